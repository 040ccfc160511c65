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

/* Last page first: a page in the index stays longer than those that follow it (share.c). */
static void drop_pages(page_pool *pool, int32_t *table, int32_t begin, int32_t end) {
    for (int32_t b = end - 1; b >= begin; b--) {
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

/* The sequence's page b is replaced by a copy of its own. There must be a page for it. */
static void copy_history(oscar_cache *cache, cache_seq *s, int32_t b) {
    int32_t from = s->history[b], to = cache_take_history(cache);
    memcpy(pool_page(&cache->history, to), pool_page(&cache->history, from), cache->history.page_bytes);
    int32_t *tokens = cache->index.tokens;
    memcpy(tokens + (size_t)to * OSCAR_PAGE_TOKENS, tokens + (size_t)from * OSCAR_PAGE_TOKENS,
           OSCAR_PAGE_TOKENS * sizeof *tokens);
    pool_unref(&cache->history, from);
    s->history[b] = to;
}

static bool own_overlay(oscar_cache *cache, cache_seq *s, int32_t b) {
    page_pool *pool = &cache->overlay;
    int32_t from = s->overlay[b];
    if (!cache->has_overlay || from == NO_PAGE || !pool_is_common(pool, from)) return true;
    int32_t to = cache_take_overlay(cache);
    if (to == NO_PAGE) return false;
    memcpy(pool_page(pool, to), pool_page(pool, from), pool->page_bytes);
    pool_unref(pool, from);
    s->overlay[b] = to;
    return true;
}

/* Whether the partial page that the sequence is to write must be copied first: others hold it, or it
 * is in the index and worth keeping there, since other pages follow it and there is room. */
static bool wants_copy(const oscar_cache *cache, int32_t page, int32_t wanted) {
    const page_pool *pool = &cache->history;
    if (pool->refs[page] > 1) return true;
    return pool->kept[page] && cache->index.notes[page].n_children > 0 && wanted < pool->n_free + pool->n_cached;
}

oscar_status oscar_seq_reserve(oscar_cache *cache, int32_t seq, int64_t n_new, oscar_error *error) {
    oscar_status status = check_seq(cache, seq, error);
    if (status) return status;
    cache_seq *s = &cache->seqs[seq];
    page_pool *pool = &cache->history;
    if (n_new < 0 || n_new > INT32_MAX - s->length)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "n_new is %lld", (long long)n_new);

    int32_t have = pages_for(s->length + s->n_reserved), need = pages_for(s->length + n_new);
    int32_t last = (int32_t)(s->length / OSCAR_PAGE_TOKENS);
    bool partial = s->length % OSCAR_PAGE_TOKENS != 0 && n_new > 0;
    int32_t wanted = need > have ? need - have : 0;
    bool copy = partial && wants_copy(cache, s->history[last], wanted);
    if (need > cache->max_pages)
        return error_set(error, OSCAR_ERROR_NO_SPACE, -1, "%lld more tokens after %lld, a sequence holds %lld", (long long)n_new,
                         (long long)s->length, (long long)cache->max_pages * OSCAR_PAGE_TOKENS);
    if (wanted + copy > pool->n_free + pool->n_cached)
        return error_set(error, OSCAR_ERROR_NO_SPACE, -1,
                         "%lld more tokens need %d pages of %d tokens, %d are free or cached of %d",
                         (long long)n_new, wanted + copy, OSCAR_PAGE_TOKENS, pool->n_free + pool->n_cached, pool->n_pages);
    if (copy) copy_history(cache, s, last);
    if (need < have) drop_pages(pool, s->history, need, have);
    for (int32_t b = have; b < need; b++) s->history[b] = cache_take_history(cache);
    /* Where it was worth a copy but there was no room, the pages that followed it are gone now. */
    if (partial && pool->kept[s->history[last]]) share_forget(cache, s->history[last]);
    if (partial && !own_overlay(cache, s, last))
        return error_set(error, OSCAR_ERROR_INTERNAL, -1, "no overlay page left");
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
    for (int32_t i = 0; i < cache->n_layers; i++) /* of rows that no step brought too */
        if (s->coded[i] < cache_coded(s->length)) s->coded[i] = (int32_t)cache_coded(s->length);
    share_completed(cache, s, s->length - n_new, s->length);
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

int64_t seq_missing_rows(const oscar_cache *cache, const cache_seq *s) {
    if (!cache->has_overlay) return 0;
    int64_t low = s->length - cache->options.recent + 1;
    if (low < cache->options.sink) low = cache->options.sink;
    int64_t high = s->recent_low < s->length ? s->recent_low : s->length;
    return high > low ? high - low : 0;
}

/* BF16 pages below recent_low that the index has, down to where oscar_seq_advance() would drop them. */
static void find_overlay(oscar_cache *cache, cache_seq *s) {
    int64_t low = s->length - cache->options.recent - cache->options.lookahead;
    int32_t keep = low > 0 ? (int32_t)(low / OSCAR_PAGE_TOKENS) : 0;
    for (int32_t b = (int32_t)((s->recent_low - 1) / OSCAR_PAGE_TOKENS); s->recent_low > 0 && b >= keep; b--) {
        int32_t page = cache->history.kept[s->history[b]] ? cache->index.notes[s->history[b]].overlay : NO_PAGE;
        /* Rows of its own, not all of them: those are kept. */
        if (page == NO_PAGE || (s->overlay[b] != NO_PAGE && s->overlay[b] != page)) return;
        if (s->overlay[b] == NO_PAGE) {
            pool_ref(&cache->overlay, page);
            s->overlay[b] = page;
        }
        s->recent_low = (int64_t)b * OSCAR_PAGE_TOKENS;
    }
}

void seq_settle(oscar_cache *cache, cache_seq *s) {
    if (s->known_end > s->length) s->known_end = s->length;
    /* Rows between recent_low and the end stay; below the old window there are none, also after new
     * tokens come, until recent_low rises past them. */
    if (s->recent_low > s->length) s->recent_low = s->length;
    if (cache->has_overlay) find_overlay(cache, s);
    if (s->length <= cache->options.sink) s->recent_low = 0;
    if (s->pure_end >= s->length) s->pure_end = seq_missing_rows(cache, s) > 0 ? s->length : INT64_MAX;
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
    for (int32_t i = 0; i < cache->n_layers; i++)
        if (s->coded[i] > n) s->coded[i] = (int32_t)n;
    s->length = n;
    s->n_reserved = 0;
    seq_settle(cache, s);
    if (n_missing) *n_missing = seq_missing_rows(cache, s);
    return OSCAR_OK;
}

oscar_status oscar_seq_clear(oscar_cache *cache, int32_t seq, oscar_error *error) {
    return oscar_seq_truncate(cache, seq, 0, NULL, error);
}

/* Pages that clearing the sequence would leave free or cached. */
int32_t seq_own_pages(const oscar_cache *cache, const cache_seq *s) {
    int32_t own = 0;
    for (int32_t b = 0; b < cache->max_pages; b++)
        own += s->history[b] != NO_PAGE && cache->history.refs[s->history[b]] == 1;
    return own;
}

/* Of the first n rows, what has codes and what waits for them. */
static void fork_codes(const oscar_cache *cache, cache_seq *to, const cache_seq *from, int32_t n) {
    bool waits = false;
    for (int32_t i = 0; i < cache->n_layers; i++) {
        to->coded[i] = from->coded[i] < n ? from->coded[i] : n;
        waits |= from->coded[i] < n;
    }
    if (waits) memcpy(to->waiting, from->waiting, cache->waiting_floats * sizeof(float));
}

static void fork_pages(page_pool *pool, int32_t *dst, const int32_t *src, int32_t n_pages) {
    for (int32_t b = 0; b < n_pages; b++) {
        dst[b] = src[b];
        if (src[b] != NO_PAGE) pool_ref(pool, src[b]);
    }
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
    /* A partial page that may still be written is copied; one in the index only when it is written. */
    int32_t last = (int32_t)(n / OSCAR_PAGE_TOKENS);
    bool copy = n % OSCAR_PAGE_TOKENS != 0 && !cache->history.kept[from->history[last]];
    if (copy && cache->history.n_free + cache->history.n_cached + seq_own_pages(cache, to) < 1)
        return error_set(error, OSCAR_ERROR_NO_SPACE, -1, "no free page for the partial page of a fork");
    oscar_seq_clear(cache, dst, NULL);
    fork_pages(&cache->history, to->history, from->history, pages_for(n));
    if (cache->has_overlay) fork_pages(&cache->overlay, to->overlay, from->overlay, pages_for(n));
    to->length = n;
    fork_codes(cache, to, from, (int32_t)n);
    to->recent_low = from->recent_low;
    to->known_end = from->known_end;
    to->pure_end = from->pure_end;
    to->salt = from->salt;
    if (copy) {
        copy_history(cache, to, last);
        if (!own_overlay(cache, to, last)) {
            oscar_seq_clear(cache, dst, NULL);
            return error_set(error, OSCAR_ERROR_INTERNAL, -1, "no overlay page left");
        }
    }
    seq_settle(cache, to);
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
