/*
 * pool.c - pages of one size. A page is live (referenced), cached (referenced by nobody, but its
 * content may be asked for again: kept) or free. Cached pages stand in a list, most recently used
 * first.
 */
#include "cache/cache.h"

bool pool_init(page_pool *pool, int32_t n_pages, size_t page_bytes) {
    memset(pool, 0, sizeof *pool);
    size_t bytes;
    if (!size_mul((size_t)n_pages, page_bytes, &bytes)) return false;
    pool->memory = region_reserve(bytes ? bytes : 1);
    /* A layer reads a few KiB of each page, so small ones cost an address translation every time. */
    if (pool->memory && bytes) region_prefer_large(pool->memory, bytes);
    pool->free_stack = aligned_calloc((size_t)n_pages + 1, sizeof *pool->free_stack);
    pool->refs = aligned_calloc((size_t)n_pages + 1, sizeof *pool->refs);
    pool->kept = aligned_calloc((size_t)n_pages + 1, sizeof *pool->kept);
    pool->newer = aligned_calloc((size_t)n_pages + 1, sizeof *pool->newer);
    pool->older = aligned_calloc((size_t)n_pages + 1, sizeof *pool->older);
    pool->page_bytes = page_bytes;
    pool->n_pages = n_pages;
    if (!pool->memory || !pool->free_stack || !pool->refs || !pool->kept || !pool->newer || !pool->older) {
        pool_destroy(pool);
        return false;
    }
    /* Low numbers first, so that a short run touches little memory. */
    for (int32_t i = 0; i < n_pages; i++) pool->free_stack[i] = n_pages - 1 - i;
    pool->n_free = n_pages;
    pool->newest = pool->oldest = NO_PAGE;
    return true;
}

void pool_destroy(page_pool *pool) {
    if (pool->memory) {
        size_t bytes = (size_t)pool->n_pages * pool->page_bytes;
        region_release(pool->memory, bytes ? bytes : 1);
    }
    aligned_free(pool->free_stack);
    aligned_free(pool->refs);
    aligned_free(pool->kept);
    aligned_free(pool->newer);
    aligned_free(pool->older);
    memset(pool, 0, sizeof *pool);
}

static void list_push(page_pool *pool, int32_t page) {
    pool->newer[page] = NO_PAGE;
    pool->older[page] = pool->newest;
    if (pool->newest != NO_PAGE) pool->newer[pool->newest] = page;
    pool->newest = page;
    if (pool->oldest == NO_PAGE) pool->oldest = page;
    pool->n_cached++;
}

static void list_remove(page_pool *pool, int32_t page) {
    int32_t newer = pool->newer[page], older = pool->older[page];
    if (newer == NO_PAGE)
        pool->newest = older;
    else
        pool->older[newer] = older;
    if (older == NO_PAGE)
        pool->oldest = newer;
    else
        pool->newer[older] = newer;
    pool->n_cached--;
}

int32_t pool_take(page_pool *pool) {
    if (pool->n_free == 0) return NO_PAGE;
    int32_t page = pool->free_stack[--pool->n_free];
    pool->refs[page] = 1;
    return page;
}

void pool_ref(page_pool *pool, int32_t page) {
    if (pool->refs[page]++ == 0) list_remove(pool, page);
}

void pool_unref(page_pool *pool, int32_t page) {
    if (page == NO_PAGE || --pool->refs[page] > 0) return;
    if (pool->kept[page])
        list_push(pool, page);
    else
        pool->free_stack[pool->n_free++] = page;
}

void pool_keep(page_pool *pool, int32_t page) { pool->kept[page] = 1; }

void pool_forget(page_pool *pool, int32_t page) {
    pool->kept[page] = 0;
    if (pool->refs[page] > 0) return;
    list_remove(pool, page);
    pool->free_stack[pool->n_free++] = page;
}

int32_t pool_shared(const page_pool *pool) {
    int32_t n = 0;
    for (int32_t i = 0; i < pool->n_pages; i++) n += pool->refs[i] > 1;
    return n;
}
