/*
 * cache_chain.h - sequences whose rows depend on all tokens before them, as a model's do, and a model
 * of the cache that knows what every row must hold. The tests of sharing compare the cache with it.
 */
#ifndef OSCAR_CACHE_CHAIN_H
#define OSCAR_CACHE_CHAIN_H

#include <pthread.h>

#include "cache/cache.h"
#include "test_util.h"

#define CHAIN_MAX 4160 /* tokens of a sequence */
#define CHAIN_LAYERS 2
#define CHAIN_CHUNK 128
#define CHAIN_ROW 64 /* most floats of one token, layer and side: heads times head_dim */

/* Also from threads that cmocka knows nothing of. */
#define HOLDS(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);          \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

typedef struct world {
    oscar_layer layers[CHAIN_LAYERS];
    oscar_rotations *rotations;
    oscar_cache *cache;
    int n_threads; /* of a step */
} world;

/* What one sequence must hold. */
typedef struct chain {
    int n;
    int32_t tokens[CHAIN_MAX];
    uint64_t salt;
    uint64_t hash[CHAIN_MAX];    /* of all tokens up to this one, and the salt */
    uint8_t variant[CHAIN_MAX];  /* rows of equal tokens can differ in their last bits */
    uint64_t history[CHAIN_MAX]; /* digest of the history rows, all layers */
    uint64_t overlay[CHAIN_MAX]; /* of the BF16 rows */
    int known;                   /* the cache was told the ids of so many tokens */
    int pure;                    /* tokens from here on saw fewer rows than the contract says */
    int low;                     /* BF16 rows from here on must be there */
} chain;

static inline uint64_t mix(uint64_t a, uint64_t b) {
    a = (a ^ b) * 0x9e3779b97f4a7c15ull;
    a ^= a >> 29;
    a *= 0xbf58476d1ce4e5b9ull;
    return a ^ (a >> 32);
}

static inline uint64_t digest(uint64_t hash, const void *bytes, size_t n) {
    for (size_t i = 0; i < n; i++) hash = (hash ^ ((const uint8_t *)bytes)[i]) * 0x100000001b3ull;
    return hash;
}

static inline void world_init(world *w, int n_threads) {
    memset(w, 0, sizeof *w);
    w->n_threads = n_threads;
    w->layers[0] = (oscar_layer){.n_kv_heads = 1, .n_q_heads = 2, .head_dim = 16};
    w->layers[1] = (oscar_layer){.n_kv_heads = 2, .n_q_heads = 2, .head_dim = 32, .window = 50};
    HOLDS(oscar_rotations_hadamard(&w->rotations, w->layers, CHAIN_LAYERS, 2, NULL) == OSCAR_OK);
}

static inline oscar_cache_options world_options(const world *w, int n_seqs, int n_pages) {
    oscar_cache_options o = OSCAR_CACHE_OPTIONS_INIT;
    o.n_layers = CHAIN_LAYERS;
    o.layers = w->layers;
    o.rotations = w->rotations;
    o.n_seqs_max = n_seqs;
    o.n_tokens_max = (int64_t)n_pages * OSCAR_PAGE_TOKENS;
    o.n_chunk_max = CHAIN_CHUNK;
    o.sink = 4;
    o.recent = 24;
    o.lookahead = 16;
    return o;
}

static inline void world_open(world *w, const oscar_cache_options *o) {
    oscar_error error;
    if (oscar_cache_create(&w->cache, o, &error)) fail_msg("%s", error.message);
    /* What was never written must not be read. */
    memset(w->cache->history.memory, 0xff, (size_t)w->cache->history.n_pages * w->cache->history.page_bytes);
    if (w->cache->has_overlay)
        memset(w->cache->overlay.memory, 0xff, (size_t)w->cache->overlay.n_pages * w->cache->overlay.page_bytes);
}

static inline void world_close(world *w) {
    oscar_cache_free(w->cache);
    oscar_rotations_free(w->rotations);
}

/* side 0 keys, 1 values, 2 queries: the floats that token i of a chain brings. */
static inline void chain_row(const world *w, const chain *c, int i, int layer, int side, float *out) {
    int heads = side == 2 ? w->layers[layer].n_q_heads : w->layers[layer].n_kv_heads;
    uint64_t rng = mix(c->hash[i], (uint64_t)(layer * 3 + side + 1)) | 1;
    for (int j = 0; j < heads * w->layers[layer].head_dim; j++) out[j] = (float)rng_uniform(&rng) - 0.5f;
    if (c->variant[i] == 1 && side < 2) out[3] += 0.25f;
    if (c->variant[i] == 2 && side < 2) out[3] *= 1.006f; /* often another BF16 number and the same codes */
}

/* What the cache must make of token i. */
static inline void chain_expect(const world *w, chain *c, int i) {
    uint64_t history = 1, overlay = 1;
    bool exact = w->cache->options.kv_type == OSCAR_KV_F32;
    for (int l = 0; l < CHAIN_LAYERS; l++)
        for (int side = 0; side < 2; side++) {
            float row[CHAIN_ROW];
            int d = w->layers[l].head_dim;
            chain_row(w, c, i, l, side, row);
            for (int h = 0; h < w->layers[l].n_kv_heads; h++) {
                const cache_layer *layer = &w->cache->layers[l];
                const row_codec *codec = side ? &layer->v_codec[h] : &layer->k_codec[h];
                uint8_t codes[CHAIN_ROW];
                uint16_t params[2 * CODEC_MAX_GROUPS], half[CHAIN_ROW];
                if (exact) {
                    history = digest(history, row + h * d, sizeof(float) * (size_t)d);
                    continue;
                }
                codec_quantize_rows(codec, 1, row + h * d, d, NULL, codes, params);
                for (int j = 0; j < d; j++) half[j] = bf16_from_float(row[h * d + j]);
                history = digest(history, codes, (size_t)d);
                history = digest(history, params, sizeof(uint16_t) * 2 * (size_t)(d / codec->group));
                overlay = digest(overlay, half, sizeof(uint16_t) * (size_t)d);
            }
        }
    c->history[i] = history;
    c->overlay[i] = overlay;
}

/* Adds a token to what the sequence must hold. */
static inline void chain_add(const world *w, chain *c, int32_t token, int variant) {
    int i = c->n++;
    HOLDS(c->n <= CHAIN_MAX);
    c->tokens[i] = token;
    c->hash[i] = mix(i ? c->hash[i - 1] : mix(c->salt, 77), (uint64_t)(uint32_t)token);
    c->variant[i] = (uint8_t)variant;
    chain_expect(w, c, i);
}

static inline void chain_cut(const oscar_cache *cache, chain *c, int n, int64_t missing) {
    c->n = n;
    if (c->known > n) c->known = n;
    if (c->low > n) c->low = n;
    if (n <= cache->options.sink) c->low = 0;
    if (c->pure >= n) c->pure = missing > 0 ? n : INT32_MAX;
}

/* Digests of what the cache holds at a position. */
static inline uint64_t held_history(const oscar_cache *cache, int32_t seq, int position) {
    uint64_t hash = 1;
    uint8_t *page = pool_page(&cache->history, cache->seqs[seq].history[position / 64]);
    int slot = position % 64;
    for (int l = 0; l < cache->n_layers; l++)
        for (int side = 0; side < 2; side++)
            for (int h = 0; h < cache->layers[l].shape.n_kv_heads; h++) {
                const cache_layer *layer = &cache->layers[l];
                const page_side *layout = side ? &layer->v_side : &layer->k_side;
                uint8_t *base = layer_history(layer, page, h) + (side ? layer->history_value_offset : 0), codes[CHAIN_ROW];
                uint16_t params[2 * CODEC_MAX_GROUPS];
                int d = layout->head_dim;
                if (cache->options.kv_type == OSCAR_KV_F32) {
                    const float *rows = (const float *)(void *)base;
                    for (int i = 0; i < d; i++) hash = digest(hash, rows + (side ? slot * d + i : i * 64 + slot), sizeof(float));
                    continue;
                }
                page_get_row(layout, base, slot, codes, params);
                hash = digest(hash, codes, (size_t)d);
                hash = digest(hash, params, sizeof(uint16_t) * 2 * (size_t)layout->n_groups);
            }
    return hash;
}

static inline uint64_t held_overlay(const oscar_cache *cache, int32_t seq, int position) {
    uint64_t hash = 1;
    uint8_t *page = pool_page(&cache->overlay, cache->seqs[seq].overlay[position / 64]);
    int slot = position % 64;
    for (int l = 0; l < cache->n_layers; l++)
        for (int side = 0; side < 2; side++)
            for (int h = 0; h < cache->layers[l].shape.n_kv_heads; h++) {
                const cache_layer *layer = &cache->layers[l];
                int d = layer->shape.head_dim;
                const uint16_t *rows = side ? layer_overlay_values(layer, page, h) : layer_overlay_keys(layer, page, h);
                for (int i = 0; i < d; i++) hash = digest(hash, rows + page_bf16_at(side ? PAGE_VALUE : PAGE_KEY, d, slot, i), sizeof *rows);
            }
    return hash;
}

/* Every row of the sequence is the chain's, its codes too once it has some; every BF16 row that a query can
 * see is there. */
static inline void chain_check(const oscar_cache *cache, int32_t seq, const chain *c) {
    const cache_seq *s = &cache->seqs[seq];
    HOLDS(s->length == c->n);
    int64_t coded = s->length;
    for (int l = 0; l < cache->n_layers; l++) {
        HOLDS(s->coded[l] <= s->length && s->coded[l] >= cache_coded(s->length));
        if (s->coded[l] < coded) coded = s->coded[l];
    }
    for (int i = 0; i < coded; i++) HOLDS(held_history(cache, seq, i) == c->history[i]);
    for (int b = 0; (b + 1) * 64 <= c->n; b++)
        if (cache->history.kept[s->history[b]]) HOLDS((b + 1) * 64 <= c->known && (b + 1) * 64 <= c->pure);
    if (!cache->has_overlay) return;
    HOLDS(s->recent_low <= c->low);
    for (int i = 0; i < c->n; i++) {
        if (i >= cache->options.sink && i < s->recent_low) continue;
        HOLDS(s->overlay[i / 64] != NO_PAGE);
        HOLDS(held_overlay(cache, seq, i) == c->overlay[i]);
    }
}

typedef struct step_thread {
    oscar_cache *cache;
    int ith, n;
} step_thread;

static inline void *step_thread_run(void *user) {
    step_thread *t = user;
    oscar_step_run(t->cache, t->ith, t->n);
    return NULL;
}

static inline void run_step(const world *w, oscar_cache *cache) {
    pthread_t ids[8];
    step_thread threads[8];
    for (int i = 1; i < w->n_threads; i++) {
        threads[i] = (step_thread){cache, i, w->n_threads};
        HOLDS(pthread_create(&ids[i], NULL, step_thread_run, &threads[i]) == 0);
    }
    oscar_step_run(cache, 0, w->n_threads);
    for (int i = 1; i < w->n_threads; i++) HOLDS(pthread_join(ids[i], NULL) == 0);
}

/* Computes tokens [begin, end) of a chain in sequence `seq`, in one step, with room reserved.
 * out: [end - begin, CHAIN_ROW] of the last layer, or NULL. */
static inline void chain_compute(const world *w, oscar_cache *cache, int32_t seq, const chain *c, int begin, int end, bool tokens,
                                 float *out) {
    float q[CHAIN_CHUNK * CHAIN_ROW], k[CHAIN_CHUNK * CHAIN_ROW], v[CHAIN_CHUNK * CHAIN_ROW], y[CHAIN_CHUNK * CHAIN_ROW];
    int32_t seqs[CHAIN_CHUNK], positions[CHAIN_CHUNK];
    int n = end - begin;
    oscar_error error;
    for (int l = 0; l < CHAIN_LAYERS; l++) {
        oscar_step step = OSCAR_STEP_INIT;
        step.n_tokens = n;
        step.seqs = seqs, step.positions = positions;
        step.q = q, step.k = k, step.v = v, step.out = l == CHAIN_LAYERS - 1 && out ? out : y;
        step.q_token_stride = step.k_token_stride = step.v_token_stride = step.out_token_stride = CHAIN_ROW;
        step.tokens = tokens ? c->tokens + begin : NULL;
        step.logit_scale = 2.0f;
        for (int i = 0; i < n; i++) {
            seqs[i] = seq;
            positions[i] = begin + i;
            chain_row(w, c, begin + i, l, 2, q + i * CHAIN_ROW);
            chain_row(w, c, begin + i, l, 0, k + i * CHAIN_ROW);
            chain_row(w, c, begin + i, l, 1, v + i * CHAIN_ROW);
        }
        if (oscar_step_prepare(cache, l, &step, &error)) fail_msg("%s", error.message);
        run_step(w, cache);
        HOLDS(oscar_step_finish(cache, NULL) == OSCAR_OK);
    }
    HOLDS(oscar_seq_advance(cache, seq, n, NULL) == OSCAR_OK);
}

/* The chain's tokens from where the sequence stands to `end`; false: no room, nothing was done. */
static inline bool chain_feed(const world *w, int32_t seq, chain *c, int end, bool tokens) {
    for (int begin = (int)oscar_seq_length(w->cache, seq); begin < end;) {
        int n = end - begin < CHAIN_CHUNK ? end - begin : CHAIN_CHUNK;
        if (oscar_seq_reserve(w->cache, seq, n, NULL)) return false;
        chain_compute(w, w->cache, seq, c, begin, begin + n, tokens, NULL);
        if (tokens && c->known == begin) c->known = begin + n;
        begin += n;
        int low = begin - w->cache->options.recent - w->cache->options.lookahead;
        if (c->low < low) c->low = low;
    }
    return true;
}

static inline oscar_cache_stats stats_of(const oscar_cache *cache) {
    oscar_cache_stats stats = {.struct_size = sizeof stats};
    oscar_cache_get_stats(cache, &stats);
    return stats;
}

/* A prompt of n tokens; prompts of one seed begin alike up to `common`. */
static inline chain *prompt(const world *w, uint64_t seed, int common, uint64_t other, int n) {
    chain *c = calloc(1, sizeof *c);
    c->pure = INT32_MAX;
    for (int i = 0; i < n; i++) chain_add(w, c, (int32_t)(mix(i < common ? seed : other, (uint64_t)i) % 1000), 0);
    return c;
}

/* What the sequence holds is the chain's; so is the output of a token more. */
static inline void assert_goes_on(world *w, int32_t seq, const chain *c) {
    chain *more = malloc(sizeof *more), *cold = malloc(sizeof *cold);
    *more = *c;
    chain_check(w->cache, seq, more);
    chain_add(w, more, 7, 0);
    float got[CHAIN_ROW], want[CHAIN_ROW];
    HOLDS(oscar_seq_reserve(w->cache, seq, 1, NULL) == OSCAR_OK);
    chain_compute(w, w->cache, seq, more, c->n, c->n + 1, true, got);
    HOLDS(oscar_seq_truncate(w->cache, seq, c->n, NULL, NULL) == OSCAR_OK);
    world fresh = *w;
    oscar_cache_options o = world_options(w, 1, c->n / 64 + 2);
    o.kv_type = w->cache->options.kv_type;
    if (o.kv_type == OSCAR_KV_F32) o.rotations = NULL;
    o.sink = w->cache->options.sink, o.recent = w->cache->options.recent;
    world_open(&fresh, &o);
    *cold = *more;
    cold->known = cold->low = 0;
    assert_true(chain_feed(&fresh, 0, cold, c->n, false));
    HOLDS(oscar_seq_reserve(fresh.cache, 0, 1, NULL) == OSCAR_OK);
    chain_compute(w, fresh.cache, 0, cold, c->n, c->n + 1, false, want);
    int width = w->layers[CHAIN_LAYERS - 1].n_q_heads * w->layers[CHAIN_LAYERS - 1].head_dim;
    assert_memory_equal(got, want, sizeof(float) * (size_t)width); /* same rows, same steps: same bits */
    oscar_cache_free(fresh.cache);
    free(more), free(cold);
}

static inline uint8_t *save_seq(const world *w, int32_t seq, size_t *bytes) {
    *bytes = oscar_seq_save_bytes(w->cache, seq);
    uint8_t *out = malloc(*bytes);
    assert_int_equal(oscar_seq_save(w->cache, seq, out, *bytes, NULL), OSCAR_OK);
    return out;
}

/* ------------------------------------------------------------------------ the inside, counted again */

static inline void check_pool(const page_pool *pool, const int32_t *refs) {
    int32_t n_live = 0, n_listed = 0, n_kept = 0;
    for (int32_t p = 0; p < pool->n_pages; p++) {
        HOLDS(pool->refs[p] == refs[p]);
        n_live += refs[p] > 0;
        n_kept += refs[p] == 0 && pool->kept[p];
    }
    for (int32_t p = pool->newest, newer = NO_PAGE; p != NO_PAGE; newer = p, p = pool->older[p]) {
        HOLDS(pool->newer[p] == newer && refs[p] == 0 && pool->kept[p]);
        HOLDS(pool->older[p] != NO_PAGE || pool->oldest == p);
        n_listed++;
    }
    HOLDS(n_listed == pool->n_cached && n_kept == pool->n_cached);
    HOLDS(n_live + pool->n_cached + pool->n_free == pool->n_pages);
    for (int32_t i = 0; i < pool->n_free; i++) HOLDS(refs[pool->free_stack[i]] == 0 && !pool->kept[pool->free_stack[i]]);
}

static inline void check_index(const oscar_cache *cache) {
    const page_index *index = &cache->index;
    int32_t n = cache->history.n_pages, n_kept = 0, n_found = 0;
    int32_t *children = calloc((size_t)n + 1, sizeof *children);
    for (int32_t p = 0; p < n; p++) {
        const page_note *note = &index->notes[p];
        if (!cache->history.kept[p]) continue;
        n_kept++;
        if (note->parent != NO_PAGE) {
            HOLDS(cache->history.kept[note->parent]);
            HOLDS(cache->history.refs[note->parent] >= cache->history.refs[p]);
            children[note->parent]++;
        }
        if (note->overlay != NO_PAGE)
            HOLDS(cache->overlay.kept[note->overlay] && index->overlay_owner[note->overlay] == p);
    }
    for (int32_t b = 0; b < index->n_buckets; b++)
        for (int32_t p = index->buckets[b]; p != NO_PAGE; p = index->notes[p].next) {
            HOLDS(cache->history.kept[p]);
            n_found++;
        }
    HOLDS(n_found == n_kept);
    for (int32_t p = 0; p < n; p++)
        if (cache->history.kept[p]) HOLDS(children[p] == index->notes[p].n_children);
    if (cache->history.oldest != NO_PAGE) HOLDS(index->notes[cache->history.oldest].n_children == 0);
    for (int32_t o = 0; o < cache->overlay.n_pages; o++)
        if (cache->overlay.kept[o]) HOLDS(index->notes[index->overlay_owner[o]].overlay == o);
    free(children);
}

static inline void check_inside(const oscar_cache *cache) {
    const page_pool *history = &cache->history, *overlay = &cache->overlay;
    int32_t *h = calloc((size_t)history->n_pages + 1, sizeof *h), *o = calloc((size_t)overlay->n_pages + 1, sizeof *o);
    for (int32_t s = 0; s < cache->options.n_seqs_max; s++)
        for (int32_t b = 0; b < cache->max_pages; b++) {
            const cache_seq *seq = &cache->seqs[s];
            HOLDS((seq->history[b] != NO_PAGE) == ((int64_t)b * 64 < seq->length + seq->n_reserved));
            if (seq->history[b] != NO_PAGE) h[seq->history[b]]++;
            if (seq->overlay[b] != NO_PAGE) o[seq->overlay[b]]++;
        }
    check_pool(history, h);
    check_pool(overlay, o);
    check_index(cache);
    free(h), free(o);
    oscar_cache_stats s = stats_of(cache);
    HOLDS(s.pages_live + s.pages_cached + s.pages_free == s.pages_total);
    HOLDS(s.overlay_pages_cached == 0 || s.overlay_pages_live + s.overlay_pages_cached <= s.overlay_pages_budget ||
          s.overlay_pages_live >= s.overlay_pages_budget - 1);
}

#endif
