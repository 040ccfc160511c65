/* seq.c - sequences: length, room, fork, truncate; which rows a query sees. */
#include "cache/cache.h"

static int32_t pages_for(int64_t n_tokens) {
    return (int32_t)((n_tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS);
}

static oscar_status check_seq(const oscar_cache *cache, int32_t seq, oscar_error *error) {
    if (seq >= 0 && seq < cache->options.n_seqs_max) return OSCAR_OK;
    return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "sequence %d: expected 0 to %d", seq,
                     cache->options.n_seqs_max - 1);
}

int64_t oscar_seq_length(const oscar_cache *cache, int32_t seq) {
    if (seq < 0 || seq >= cache->options.n_seqs_max) return OSCAR_ERROR_ARGUMENT;
    return cache->seqs[seq].length;
}

static void drop_pages(page_pool *pool, int32_t *table, int32_t begin, int32_t end) {
    for (int32_t b = begin; b < end; b++) {
        pool_unref(pool, table[b]);
        table[b] = NO_PAGE;
    }
}

static void release_beyond(oscar_cache *cache, cache_seq *s, int64_t n) {
    int32_t used = pages_for(s->length + s->n_reserved);
    drop_pages(&cache->history, s->history, pages_for(n), used);
    if (cache->has_overlay) {
        /* Steps that were not counted in may have taken overlay pages past the reservation's end. */
        int32_t end = pages_for(s->length + cache->options.n_chunk_max) + 1;
        if (end < used) end = used;
        if (end > cache->max_pages) end = cache->max_pages;
        drop_pages(&cache->overlay, s->overlay, pages_for(n), end);
    }
}

/* A page that is to be written and that others hold as well is copied first. */
static bool own_page(page_pool *pool, int32_t *entry) {
    if (*entry == NO_PAGE || pool->refs[*entry] == 1) return true;
    int32_t copy = pool_take(pool);
    if (copy == NO_PAGE) return false;
    memcpy(pool_page(pool, copy), pool_page(pool, *entry), pool->page_bytes);
    pool_unref(pool, *entry);
    *entry = copy;
    return true;
}

oscar_status oscar_seq_reserve(oscar_cache *cache, int32_t seq, int64_t n_new, oscar_error *error) {
    oscar_status status = check_seq(cache, seq, error);
    if (status) return status;
    cache_seq *s = &cache->seqs[seq];
    if (n_new < 0 || n_new > INT32_MAX - s->length)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "n_new is %lld", (long long)n_new);

    int32_t have = pages_for(s->length + s->n_reserved), need = pages_for(s->length + n_new);
    int32_t last = (int32_t)(s->length / OSCAR_PAGE_TOKENS);
    bool partial = s->length % OSCAR_PAGE_TOKENS != 0 && n_new > 0;
    int32_t wanted = need > have ? need - have : 0;
    if (partial && cache->history.refs[s->history[last]] > 1) wanted++;
    if (wanted > cache->history.n_free || need > cache->max_pages)
        return error_set(error, OSCAR_ERROR_NO_SPACE, -1,
                         "%lld more tokens need %d pages of %d tokens, %d are free",
                         (long long)n_new, wanted, OSCAR_PAGE_TOKENS, cache->history.n_free);
    if (partial) {
        own_page(&cache->history, &s->history[last]);
        if (cache->has_overlay && !own_page(&cache->overlay, &s->overlay[last]))
            return error_set(error, OSCAR_ERROR_INTERNAL, -1, "no overlay page left");
    }
    if (need < have) drop_pages(&cache->history, s->history, need, have);
    for (int32_t b = have; b < need; b++) s->history[b] = pool_take(&cache->history);
    s->n_reserved = n_new;
    return OSCAR_OK;
}

oscar_status oscar_seq_advance(oscar_cache *cache, int32_t seq, int64_t n_new, oscar_error *error) {
    oscar_status status = check_seq(cache, seq, error);
    if (status) return status;
    cache_seq *s = &cache->seqs[seq];
    if (n_new < 0 || n_new > s->n_reserved)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "advance by %lld, %lld are reserved",
                         (long long)n_new, (long long)s->n_reserved);
    s->length += n_new;
    s->n_reserved -= n_new;
    if (!cache->has_overlay) return OSCAR_OK;

    /* A rollback by `lookahead` must still find the rows its queries see. */
    int64_t low = s->length - cache->options.recent - cache->options.lookahead;
    int32_t keep = low > 0 ? (int32_t)(low / OSCAR_PAGE_TOKENS) : 0;
    int32_t sink = pages_for(cache->options.sink);
    int32_t previous = (int32_t)((s->length - n_new) / OSCAR_PAGE_TOKENS) -
                       pages_for(cache->options.recent + cache->options.lookahead) - 1;
    if (previous < sink) previous = sink;
    if (keep > previous) drop_pages(&cache->overlay, s->overlay, previous, keep);
    if (keep > sink && s->recent_low < (int64_t)keep * OSCAR_PAGE_TOKENS)
        s->recent_low = (int64_t)keep * OSCAR_PAGE_TOKENS;
    return OSCAR_OK;
}

/* BF16 rows that the query at position n would see but that are gone. */
static int64_t missing_rows(const oscar_cache *cache, const cache_seq *s, int64_t n) {
    if (!cache->has_overlay) return 0;
    int64_t low = n - cache->options.recent + 1;
    if (low < cache->options.sink) low = cache->options.sink;
    int64_t high = s->recent_low < n ? s->recent_low : n;
    return high > low ? high - low : 0;
}

oscar_status oscar_seq_truncate(oscar_cache *cache, int32_t seq, int64_t n, int64_t *n_missing,
                                oscar_error *error) {
    oscar_status status = check_seq(cache, seq, error);
    if (status) return status;
    cache_seq *s = &cache->seqs[seq];
    if (n < 0 || n > s->length)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "truncate to %lld, the length is %lld",
                         (long long)n, (long long)s->length);
    release_beyond(cache, s, n);
    s->length = n;
    s->n_reserved = 0;
    /* Rows between recent_low and n stay; below the old window there are none, also after new
     * tokens come, until recent_low rises past them. */
    if (s->recent_low > n) s->recent_low = n;
    if (n <= cache->options.sink) s->recent_low = 0;
    if (n_missing) *n_missing = missing_rows(cache, s, n);
    return OSCAR_OK;
}

oscar_status oscar_seq_clear(oscar_cache *cache, int32_t seq, oscar_error *error) {
    return oscar_seq_truncate(cache, seq, 0, NULL, error);
}

static bool fork_table(page_pool *pool, int32_t *dst, const int32_t *src, int64_t n) {
    int32_t full = (int32_t)(n / OSCAR_PAGE_TOKENS);
    for (int32_t b = 0; b < full; b++) {
        dst[b] = src[b];
        if (src[b] != NO_PAGE) pool_ref(pool, src[b]);
    }
    if (n % OSCAR_PAGE_TOKENS == 0 || src[full] == NO_PAGE) return true;
    dst[full] = pool_take(pool);
    if (dst[full] == NO_PAGE) return false;
    memcpy(pool_page(pool, dst[full]), pool_page(pool, src[full]), pool->page_bytes);
    return true;
}

oscar_status oscar_seq_fork(oscar_cache *cache, int32_t dst, int32_t src, int64_t n,
                            oscar_error *error) {
    oscar_status status = check_seq(cache, dst, error);
    if (!status) status = check_seq(cache, src, error);
    if (status) return status;
    cache_seq *from = &cache->seqs[src], *to = &cache->seqs[dst];
    if (n < 0 || n > from->length)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "fork of %lld tokens, the length is %lld",
                         (long long)n, (long long)from->length);
    if (dst == src) return oscar_seq_truncate(cache, dst, n, NULL, error);
    oscar_seq_clear(cache, dst, NULL);
    bool ok = fork_table(&cache->history, to->history, from->history, n);
    to->length = n; /* so that clear finds the pages */
    if (ok && cache->has_overlay) ok = fork_table(&cache->overlay, to->overlay, from->overlay, n);
    if (!ok) {
        oscar_seq_clear(cache, dst, NULL);
        return error_set(error, OSCAR_ERROR_NO_SPACE, -1, "no free page for the partial page of a fork");
    }
    to->recent_low = from->recent_low < n ? from->recent_low : n;
    if (n <= cache->options.sink) to->recent_low = 0;
    return OSCAR_OK;
}

/* Bits of page b for positions low <= p < high. */
static uint64_t range_mask(int32_t b, int64_t low, int64_t high) {
    int64_t p0 = (int64_t)b * OSCAR_PAGE_TOKENS;
    int64_t lo = low - p0 < 0 ? 0 : low - p0, hi = high - p0 > 64 ? 64 : high - p0;
    if (lo >= hi) return 0;
    uint64_t upto = hi == 64 ? ~0ull : (1ull << hi) - 1;
    return upto & ~((1ull << lo) - 1); /* lo < 64 here */
}

void cache_masks(const oscar_cache *cache, const cache_seq *seq, int32_t window, int32_t b,
                 int64_t t, uint64_t *far, uint64_t *near) {
    uint64_t visible = range_mask(b, window > 0 ? t - window + 1 : 0, t + 1);
    *near = 0;
    if (cache->has_overlay && seq->overlay[b] != NO_PAGE) {
        int64_t low = t - cache->options.recent + 1;
        if (low < seq->recent_low) low = seq->recent_low;
        *near = visible & (range_mask(b, 0, cache->options.sink) | range_mask(b, low, t + 1));
    }
    *far = visible & ~*near;
}
