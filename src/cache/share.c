/*
 * share.c - full pages held once: an index of pages by the tokens that they hold.
 *
 * The rows of a page depend on the ids of its tokens and of all tokens before them. So a page's key
 * is its parent (the page before it in the same sequence, itself in the index), its 64 token ids and,
 * for a first page, the sequence's salt. It is found through a hash chained over the parents' and
 * compared: by induction every token from the start is compared, whatever the hashes are.
 *
 * A sequence computes its rows itself and looks a page up when it is complete. Where the index has
 * one with the same key and the same bytes, the sequence takes that and frees its own, so sharing
 * never changes a result. Rows of equal tokens can differ in the last bits of their inputs (a token
 * decoded alone, or in a prompt); such a page goes into the index beside the first one.
 *
 * Pages that no sequence holds any more stay in the index until their memory is needed: the least
 * recently used goes first. A sequence gives its pages back last one first, so a page is always more
 * recently used than its children, and the oldest has none.
 *
 * A page in the index knows the overlay page that holds the BF16 rows of the same 64 tokens, while
 * it exists: a sequence that begins with a cached prefix needs the sink's and the recent window's.
 */
#include <assert.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "cache/cache.h"

static uint64_t hash_page(uint64_t before, int64_t position, const int32_t *tokens) {
    return XXH3_64bits_withSeed(tokens, OSCAR_PAGE_TOKENS * sizeof *tokens, before + (uint64_t)position * XXH_PRIME64_1);
}

bool share_init(oscar_cache *cache) {
    page_index *index = &cache->index;
    size_t n = (size_t)cache->history.n_pages;
    /* The KIVI baseline writes full pages again. */
    index->on = cache->baseline_kivi == 0;
    index->hash = hash_page;
    index->n_buckets = 64;
    while ((size_t)index->n_buckets < n) index->n_buckets *= 2;
    index->notes = aligned_calloc(n, sizeof *index->notes);
    index->tokens = aligned_calloc(n * OSCAR_PAGE_TOKENS, sizeof *index->tokens);
    index->buckets = aligned_calloc((size_t)index->n_buckets, sizeof *index->buckets);
    index->overlay_owner = aligned_calloc((size_t)cache->overlay.n_pages, sizeof *index->overlay_owner);
    index->found = aligned_calloc((size_t)cache->max_pages, sizeof *index->found);
    if (!index->notes || !index->tokens || !index->buckets || !index->overlay_owner || !index->found) return false;
    for (int32_t i = 0; i < index->n_buckets; i++) index->buckets[i] = NO_PAGE;
    return true;
}

void share_destroy(oscar_cache *cache) {
    aligned_free(cache->index.notes);
    aligned_free(cache->index.tokens);
    aligned_free(cache->index.buckets);
    aligned_free(cache->index.overlay_owner);
    aligned_free(cache->index.found);
}

static int32_t *bucket_of(const page_index *index, uint64_t hash) {
    return &index->buckets[hash & (uint64_t)(index->n_buckets - 1)];
}

/* ------------------------------------------------------------------------------------------ evict */

static void unlink_overlay(oscar_cache *cache, int32_t page) {
    page_note *note = &cache->index.notes[page];
    if (note->overlay != NO_PAGE) pool_forget(&cache->overlay, note->overlay);
    note->overlay = NO_PAGE;
}

static void remove_page(oscar_cache *cache, int32_t page) {
    page_index *index = &cache->index;
    page_note *note = &index->notes[page];
    assert(note->n_children == 0);
    int32_t *at = bucket_of(index, note->hash);
    while (*at != page) at = &index->notes[*at].next;
    *at = note->next;
    if (note->parent != NO_PAGE) index->notes[note->parent].n_children--;
    unlink_overlay(cache, page);
    pool_forget(&cache->history, page);
}

void share_forget(oscar_cache *cache, int32_t page) { remove_page(cache, page); }

int32_t cache_take_history(oscar_cache *cache) {
    page_pool *pool = &cache->history;
    if (pool->n_free == 0 && pool->n_cached > 0) {
        cache->index.n_evicted++;
        remove_page(cache, pool->oldest);
    }
    return pool_take(pool);
}

int32_t cache_take_overlay(oscar_cache *cache) {
    page_pool *pool = &cache->overlay;
    while (pool->n_cached > 0 && (pool->n_free == 0 || pool_live(pool) + pool->n_cached >= cache->overlay_budget)) {
        cache->index.n_overlay_evicted++;
        unlink_overlay(cache, cache->index.overlay_owner[pool->oldest]);
    }
    return pool_take(pool);
}

/* ------------------------------------------------------------------------------------------- find */

typedef struct page_key {
    int32_t parent;
    uint64_t salt; /* compared where the parent is NO_PAGE */
    uint64_t hash;
    const int32_t *tokens; /* [64] */
} page_key;

static page_key key_after(const oscar_cache *cache, int32_t parent, uint64_t salt, int64_t position, const int32_t *tokens) {
    uint64_t before = parent == NO_PAGE ? salt : cache->index.notes[parent].hash;
    return (page_key){parent, salt, cache->index.hash(before, position, tokens), tokens};
}

static bool has_key(const page_index *index, int32_t page, const page_key *key) {
    const page_note *note = &index->notes[page];
    return note->hash == key->hash && note->parent == key->parent && (key->parent != NO_PAGE || note->salt == key->salt) &&
           memcmp(index->tokens + (size_t)page * OSCAR_PAGE_TOKENS, key->tokens, OSCAR_PAGE_TOKENS * sizeof(int32_t)) == 0;
}

/* The pages with this key, the one that came last first; after NO_PAGE the first of them. */
static int32_t find_next(const oscar_cache *cache, const page_key *key, int32_t after) {
    const page_index *index = &cache->index;
    int32_t p = after == NO_PAGE ? *bucket_of(index, key->hash) : index->notes[after].next;
    while (p != NO_PAGE && !has_key(index, p, key)) p = index->notes[p].next;
    return p;
}

int32_t share_next(const oscar_cache *cache, int32_t parent, uint64_t salt, int32_t b, const int32_t *tokens, int32_t after) {
    page_key key = key_after(cache, parent, salt, (int64_t)b * OSCAR_PAGE_TOKENS, tokens);
    return find_next(cache, &key, after);
}

static bool same_bytes(const page_pool *pool, int32_t a, int32_t b) {
    return a == b || memcmp(pool_page(pool, a), pool_page(pool, b), pool->page_bytes) == 0;
}

/* A page with this key and the bytes of the sequence's page b, BF16 rows included where both have them. */
static int32_t find_equal(const oscar_cache *cache, const page_key *key, const cache_seq *seq, int32_t b, bool *unequal) {
    const page_index *index = &cache->index;
    int32_t overlay = cache_is_whole(cache, seq->recent_low, b) ? seq->overlay[b] : NO_PAGE;
    for (int32_t p = find_next(cache, key, NO_PAGE); p != NO_PAGE; p = find_next(cache, key, p)) {
        int32_t theirs = index->notes[p].overlay;
        if (same_bytes(&cache->history, p, seq->history[b]) &&
            (overlay == NO_PAGE || theirs == NO_PAGE || same_bytes(&cache->overlay, theirs, overlay)))
            return p;
        *unequal = true;
    }
    return NO_PAGE;
}

static void add_page(oscar_cache *cache, int32_t page, const page_key *key) {
    page_index *index = &cache->index;
    int32_t *bucket = bucket_of(index, key->hash);
    index->notes[page] = (page_note){key->parent, 0, NO_PAGE, *bucket, key->hash, key->salt};
    *bucket = page;
    if (key->parent != NO_PAGE) index->notes[key->parent].n_children++;
    pool_keep(&cache->history, page);
}

/* --------------------------------------------------------------------------------------- complete */

/* One whole BF16 page for each page of the index: the sequence's becomes it, or is replaced by it. */
static void share_overlay(oscar_cache *cache, cache_seq *seq, int32_t b) {
    page_note *note = &cache->index.notes[seq->history[b]];
    int32_t *own = &seq->overlay[b];
    if (*own == NO_PAGE || *own == note->overlay || !cache_is_whole(cache, seq->recent_low, b)) return;
    if (note->overlay != NO_PAGE) {
        pool_ref(&cache->overlay, note->overlay);
        pool_unref(&cache->overlay, *own);
        *own = note->overlay;
    } else {
        note->overlay = *own;
        cache->index.overlay_owner[*own] = seq->history[b];
        pool_keep(&cache->overlay, *own);
    }
}

void share_completed(oscar_cache *cache, cache_seq *seq, int64_t begin, int64_t end) {
    page_index *index = &cache->index;
    int64_t good = seq->known_end < seq->pure_end ? seq->known_end : seq->pure_end;
    if (!index->on) return;
    if (end > good) end = good;
    for (int32_t b = (int32_t)(begin / OSCAR_PAGE_TOKENS); b < (int32_t)(end / OSCAR_PAGE_TOKENS); b++) {
        int32_t own = seq->history[b], parent = b ? seq->history[b - 1] : NO_PAGE;
        if (cache->history.kept[own]) { /* restored in place of one of its own */
            int32_t theirs = index->notes[own].overlay, rows = seq->overlay[b];
            if (theirs == NO_PAGE || (rows != NO_PAGE && same_bytes(&cache->overlay, theirs, rows))) share_overlay(cache, seq, b);
            continue;
        }
        if (parent != NO_PAGE && !cache->history.kept[parent]) return;
        page_key key = key_after(cache, parent, seq->salt, (int64_t)b * OSCAR_PAGE_TOKENS,
                                 index->tokens + (size_t)own * OSCAR_PAGE_TOKENS);
        bool unequal = false;
        int32_t page = find_equal(cache, &key, seq, b, &unequal);
        if (page == NO_PAGE) {
            add_page(cache, own, &key);
            index->n_misses++;
            index->n_unequal += unequal;
        } else {
            pool_ref(&cache->history, page);
            pool_unref(&cache->history, own);
            seq->history[b] = page;
            index->n_hits++;
        }
        share_overlay(cache, seq, b);
    }
}

/* ----------------------------------------------------------------------------------------- attach */

/* The chain of full pages that hold the tokens; their number. */
static int32_t find_prefix(oscar_cache *cache, uint64_t salt, const int32_t *tokens, int32_t most) {
    page_index *index = &cache->index;
    int32_t parent = NO_PAGE, n = 0;
    for (; n < most; n++) {
        const int32_t *ids = tokens + (size_t)n * OSCAR_PAGE_TOKENS;
        page_key key = key_after(cache, parent, salt, (int64_t)n * OSCAR_PAGE_TOKENS, ids);
        parent = find_next(cache, &key, NO_PAGE);
        if (parent == NO_PAGE) break;
        index->found[n] = parent;
    }
    return n;
}

/* Whether the query after n pages of the prefix finds its BF16 rows, all but missing_max of them. */
static bool can_serve(const oscar_cache *cache, int32_t n, int64_t missing_max) {
    const page_note *notes = cache->index.notes;
    const int32_t *found = cache->index.found;
    int64_t sink = cache->options.sink, length = (int64_t)n * OSCAR_PAGE_TOKENS, low = length - cache->options.recent + 1;
    if (!cache->has_overlay) return true;
    for (int32_t b = 0; b < n && (int64_t)b * OSCAR_PAGE_TOKENS < sink; b++)
        if (notes[found[b]].overlay == NO_PAGE) return false;
    if (low < sink) low = sink;
    int32_t b = n;
    while (b > 0 && (int64_t)b * OSCAR_PAGE_TOKENS > low && notes[found[b - 1]].overlay != NO_PAGE) b--;
    return (int64_t)b * OSCAR_PAGE_TOKENS - low <= missing_max;
}

oscar_status oscar_seq_attach_prefix(oscar_cache *cache, int32_t seq, const int32_t *tokens, int64_t n_tokens,
                                     int64_t missing_max, int64_t *n_attached, oscar_error *error) {
    if (n_attached) *n_attached = 0;
    if (n_tokens < 0 || (n_tokens > 0 && !tokens) || missing_max < 0)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "n_tokens %lld, missing_max %lld, or tokens is NULL",
                         (long long)n_tokens, (long long)missing_max);
    oscar_status status = oscar_seq_clear(cache, seq, error);
    if (status || !cache->index.on || n_tokens == 0) return status;
    cache_seq *s = &cache->seqs[seq];
    int64_t most = (n_tokens - 1) / OSCAR_PAGE_TOKENS; /* one token is always left to compute */
    int32_t n = find_prefix(cache, s->salt, tokens, most < cache->max_pages ? (int32_t)most : cache->max_pages);
    while (n > 0 && !can_serve(cache, n, missing_max)) n--;
    for (int32_t b = 0; b < n; b++) {
        s->history[b] = cache->index.found[b];
        pool_ref(&cache->history, s->history[b]);
        int32_t overlay = cache->index.notes[s->history[b]].overlay;
        if (!cache->has_overlay || (int64_t)b * OSCAR_PAGE_TOKENS >= cache->options.sink) continue;
        s->overlay[b] = overlay;
        pool_ref(&cache->overlay, overlay);
    }
    s->length = s->recent_low = s->known_end = (int64_t)n * OSCAR_PAGE_TOKENS;
    for (int32_t i = 0; i < cache->n_layers; i++) s->coded[i] = (int32_t)s->length;
    seq_settle(cache, s);
    cache->index.n_hits += n;
    cache->index.n_attached += s->length;
    if (n_attached) *n_attached = s->length;
    return OSCAR_OK;
}

oscar_status oscar_seq_set_salt(oscar_cache *cache, int32_t seq, uint64_t salt, oscar_error *error) {
    if (seq < 0 || seq >= cache->options.n_seqs_max)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "sequence %d: expected 0 to %d", seq, cache->options.n_seqs_max - 1);
    cache_seq *s = &cache->seqs[seq];
    if (s->length > 0 && s->salt != salt)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "sequence %d holds %lld tokens of another salt", seq,
                         (long long)s->length);
    s->salt = salt;
    return OSCAR_OK;
}
