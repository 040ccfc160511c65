/* pool.c - pages of one size: a free stack and reference counts. */
#include "cache/cache.h"

bool pool_init(page_pool *pool, int32_t n_pages, size_t page_bytes) {
    memset(pool, 0, sizeof *pool);
    size_t bytes;
    if (!size_mul((size_t)n_pages, page_bytes, &bytes)) return false;
    pool->memory = region_reserve(bytes ? bytes : 1);
    pool->free_stack = aligned_calloc((size_t)n_pages + 1, sizeof *pool->free_stack);
    pool->refs = aligned_calloc((size_t)n_pages + 1, sizeof *pool->refs);
    pool->page_bytes = page_bytes;
    pool->n_pages = n_pages;
    if (!pool->memory || !pool->free_stack || !pool->refs) {
        pool_destroy(pool);
        return false;
    }
    /* Low numbers first, so that a short run touches little memory. */
    for (int32_t i = 0; i < n_pages; i++) pool->free_stack[i] = n_pages - 1 - i;
    pool->n_free = n_pages;
    return true;
}

void pool_destroy(page_pool *pool) {
    if (pool->memory) {
        size_t bytes = (size_t)pool->n_pages * pool->page_bytes;
        region_release(pool->memory, bytes ? bytes : 1);
    }
    aligned_free(pool->free_stack);
    aligned_free(pool->refs);
    memset(pool, 0, sizeof *pool);
}

int32_t pool_take(page_pool *pool) {
    if (pool->n_free == 0) return NO_PAGE;
    int32_t page = pool->free_stack[--pool->n_free];
    pool->refs[page] = 1;
    return page;
}

void pool_ref(page_pool *pool, int32_t page) { pool->refs[page]++; }

void pool_unref(page_pool *pool, int32_t page) {
    if (page == NO_PAGE) return;
    if (--pool->refs[page] == 0) pool->free_stack[pool->n_free++] = page;
}

int32_t pool_shared(const page_pool *pool) {
    int32_t n = 0;
    for (int32_t i = 0; i < pool->n_pages; i++) n += pool->refs[i] > 1;
    return n;
}
