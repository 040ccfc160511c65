/* cache.c - creation: layouts, tables, and all memory that the cache will ever use. */
#include "cache/cache.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

/* Most partial results that there is room for, however many long sequences there may be at once. */
#define MOST_PARTIALS 4096

static int32_t pages_for(int64_t n_tokens) {
    return (int32_t)((n_tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS);
}

/* ---------------------------------------------------------------------------------------- checks */

static oscar_status check_layer(const oscar_layer *l, int32_t i, oscar_error *error) {
    if (l->head_dim <= 0 || l->head_dim % 16 || l->head_dim > OSCAR_MAX_HEAD_DIM)
        return error_set(error, OSCAR_ERROR_UNSUPPORTED, -1,
                         "layer %d: head_dim %d, expected a multiple of 16 up to %d", i, l->head_dim,
                         OSCAR_MAX_HEAD_DIM);
    if (l->n_kv_heads <= 0 || l->n_q_heads <= 0 || l->n_q_heads % l->n_kv_heads ||
        l->n_q_heads / l->n_kv_heads > OSCAR_MAX_GQA_GROUP)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1,
                         "layer %d: %d query heads over %d KV heads, expected a multiple up to %d", i,
                         l->n_q_heads, l->n_kv_heads, OSCAR_MAX_GQA_GROUP);
    if (l->window < 0 || l->rope.n_dims < 0 || l->rope.n_dims % 2 || l->rope.n_dims > l->head_dim)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "layer %d: window %d, rope n_dims %d", i,
                         l->window, l->rope.n_dims);
    return OSCAR_OK;
}

static oscar_status check_rotations(const oscar_cache_options *o, oscar_error *error) {
    if (!o->rotations)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "a quantised cache needs rotations");
    if (o->rotations->n_layers != o->n_layers)
        return error_set(error, OSCAR_ERROR_MISMATCH, -1, "rotations have %d layers, the model %d",
                         o->rotations->n_layers, o->n_layers);
    for (int32_t i = 0; i < o->n_layers; i++) {
        const oscar_layer *a = &o->rotations->layers[i].shape, *b = &o->layers[i];
        if (a->head_dim != b->head_dim || a->n_kv_heads != b->n_kv_heads)
            return error_set(error, OSCAR_ERROR_MISMATCH, -1,
                             "layer %d: rotations are for %d KV heads of %d, the model has %d of %d", i,
                             a->n_kv_heads, a->head_dim, b->n_kv_heads, b->head_dim);
        if (o->rotations->layers[i].n_tracked == 0) continue;
        if (a->rope.layout != b->rope.layout || a->rope.n_dims != b->rope.n_dims)
            return error_set(error, OSCAR_ERROR_MISMATCH, -1,
                             "layer %d: rotations are for RoPE layout %d on %d dims, the model has %d on %d",
                             i, a->rope.layout, a->rope.n_dims, b->rope.layout, b->rope.n_dims);
        for (int32_t f = 0; f < a->rope.n_dims / 2; f++)
            if (!(fabsf(a->rope.inv_freq[f] - b->rope.inv_freq[f]) <=
                  1e-4f * fabsf(b->rope.inv_freq[f])))
                return error_set(error, OSCAR_ERROR_MISMATCH, -1,
                                 "layer %d: RoPE frequency %d is %g in the rotations, %g in the model",
                                 i, f, (double)a->rope.inv_freq[f], (double)b->rope.inv_freq[f]);
    }
    return OSCAR_OK;
}

static oscar_status check_options(const oscar_cache_options *o, bool kivi, oscar_error *error) {
    if (!o || o->struct_size != sizeof *o)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "options: struct_size");
    if (o->n_layers <= 0 || o->n_layers > OSCAR_MAX_LAYERS || !o->layers)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "n_layers is %d", o->n_layers);
    if (o->n_seqs_max <= 0 || o->n_seqs_max > 65536 || o->n_tokens_max <= 0 ||
        o->n_tokens_max > INT32_MAX - 4096 || o->n_chunk_max <= 0 || o->n_chunk_max > 1 << 20)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1,
                         "n_seqs_max %d, n_tokens_max %lld, n_chunk_max %d", o->n_seqs_max,
                         (long long)o->n_tokens_max, o->n_chunk_max);
    if (o->n_seq_tokens_max < 0)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "n_seq_tokens_max is %lld", (long long)o->n_seq_tokens_max);
    if (o->sink < 0 || o->recent < 0 || o->lookahead < 0 || o->sink > 1 << 20 ||
        o->recent > 1 << 20 || o->lookahead > 1 << 20)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "sink %d, recent %d, lookahead %d", o->sink,
                         o->recent, o->lookahead);
    const int32_t bits[2] = {o->bits_k, o->bits_v};
    for (int i = 0; i < 2; i++)
        if (bits[i] != 0 && (bits[i] < 2 || bits[i] > 4))
            return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "bits_%c is %d, expected 0, 2, 3 or 4",
                             i ? 'v' : 'k', bits[i]);
    for (int32_t i = 0; i < o->n_layers; i++) {
        oscar_status status = check_layer(&o->layers[i], i, error);
        if (status) return status;
    }
    if (o->kv_type == OSCAR_KV_F32 || kivi) return OSCAR_OK;
    if (o->kv_type != OSCAR_KV_INT2)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "kv_type is %d", o->kv_type);
    return check_rotations(o, error);
}

/* ---------------------------------------------------------------------------------------- tables */

static bool rope_equal(const oscar_rope *a, const oscar_rope *b) {
    return a->n_dims == b->n_dims &&
           memcmp(a->inv_freq, b->inv_freq, sizeof(float) * (size_t)a->n_dims / 2) == 0;
}

static bool rope_table_init(rope_table *table, const oscar_rope *rope, int32_t max_pages) {
    size_t pairs = (size_t)rope->n_dims / 2;
    table->rope = *rope;
    table->n_pairs = (int32_t)pairs;
    size_t n[2] = {(size_t)max_pages, OSCAR_PAGE_TOKENS};
    float **cosines[2] = {&table->page_cos, &table->slot_cos};
    float **sines[2] = {&table->page_sin, &table->slot_sin};
    for (int k = 0; k < 2; k++) {
        float *c = *cosines[k] = aligned_calloc(n[k] * pairs + 1, sizeof(float));
        float *s = *sines[k] = aligned_calloc(n[k] * pairs + 1, sizeof(float));
        if (!c || !s) return false;
        double step = k == 0 ? OSCAR_PAGE_TOKENS : 1;
        for (size_t p = 0; p < n[k]; p++)
            for (size_t f = 0; f < pairs; f++) {
                double angle = (double)p * step * (double)rope->inv_freq[f];
                c[p * pairs + f] = (float)cos(angle);
                s[p * pairs + f] = (float)sin(angle);
            }
    }
    return true;
}

/* The layer's rope table, made when no earlier layer has it. */
static bool layer_rope(oscar_cache *cache, cache_layer *layer) {
    for (int32_t i = 0; i < cache->n_ropes; i++)
        if (rope_equal(&cache->ropes[i].rope, &layer->shape.rope)) {
            layer->rope = i;
            return true;
        }
    layer->rope = cache->n_ropes++;
    return rope_table_init(&cache->ropes[layer->rope], &layer->shape.rope, cache->max_pages);
}

typedef struct arena {
    uint8_t *base; /* NULL while measuring */
    size_t used;
} arena;

static void *arena_take(arena *a, size_t count, size_t size) {
    void *p = a->base ? a->base + a->used : NULL;
    a->used += ALIGN64(count * size);
    return p;
}

/* Tables of which a decoded token reads all. */
static void arrange_tables(cache_layer *layer, arena *a) {
    size_t heads = (size_t)layer->shape.n_kv_heads, d = (size_t)layer->shape.head_dim, n = (size_t)layer->n_tracked;
    if (layer->v_codec[0].rotation) layer->v_back = arena_take(a, heads * d * d, sizeof(float));
    if (n) layer->bias_table = arena_take(a, heads * 2 * n * OSCAR_PAGE_TOKENS, sizeof(float));
    if (n) layer->middle = arena_take(a, heads * 2 * n, sizeof(float));
    layer->decode = attn_decode_current();
    if (n == 0 || !layer->decode || !layer->decode->table_bytes) return;
    layer->decode_table_bytes = ALIGN64(layer->decode->table_bytes(layer->n_tracked));
    if (layer->decode_table_bytes) layer->decode_table = arena_take(a, heads, layer->decode_table_bytes);
}

/* Rows 2 p, 2 p + 1: magnitude * R_i nu of tracked pair p for slots i = 0..63. */
static void layer_bias_table(const oscar_cache *cache, cache_layer *layer) {
    int32_t n = layer->n_tracked, heads = layer->shape.n_kv_heads, d = layer->shape.head_dim;
    if (n == 0) return;
    const rope_table *rope = &cache->ropes[layer->rope];
    for (int32_t h = 0; h < heads; h++)
        for (int32_t p = 0; p < n; p++) {
            int32_t f = layer->fit->tracked[h * n + p], a = rope_first(&layer->shape.rope, f), b = rope_second(&layer->shape.rope, f);
            double x = layer->fit->k_tracked[h * d + a], y = layer->fit->k_tracked[h * d + b];
            double magnitude = layer->shape.rope.magnitude;
            float *row = layer->bias_table + ((size_t)h * (size_t)n + (size_t)p) * 2 * OSCAR_PAGE_TOKENS;
            for (int32_t i = 0; i < OSCAR_PAGE_TOKENS; i++) {
                double c = rope->slot_cos[i * rope->n_pairs + f], s = rope->slot_sin[i * rope->n_pairs + f];
                row[i] = (float)(magnitude * (x * c - y * s));
                row[OSCAR_PAGE_TOKENS + i] = (float)(magnitude * (x * s + y * c));
            }
        }
    for (int32_t h = 0; h < heads; h++) {
        const float *table = layer->bias_table + (size_t)h * 2 * (size_t)n * OSCAR_PAGE_TOKENS;
        float *middle = layer->middle + (size_t)h * 2 * (size_t)n;
        attn_middle(table, n, middle, middle + n);
        if (layer->decode_table) layer->decode->make_table(table, n, layer->decode_table + (size_t)h * layer->decode_table_bytes);
    }
}

static const float *at_head(const float *array, int32_t head, size_t floats) {
    return array ? array + (size_t)head * floats : NULL;
}

static bool layer_codecs(const oscar_cache_options *o, cache_layer *layer, bool kivi) {
    const rotations_layer *fit = layer->fit;
    int32_t heads = layer->shape.n_kv_heads, d = layer->shape.head_dim;
    size_t dd = (size_t)d * (size_t)d;
    layer->k_codec = aligned_calloc((size_t)heads, sizeof(row_codec));
    layer->v_codec = aligned_calloc((size_t)heads, sizeof(row_codec));
    if (!layer->k_codec || !layer->v_codec) return false;
    int32_t bits_k = o->bits_k ? o->bits_k : fit ? fit->bits_k : 2;
    int32_t bits_v = o->bits_v ? o->bits_v : fit ? fit->bits_v : 2;
    for (int32_t h = 0; h < heads; h++) {
        row_codec base = {.head_dim = d, .group = codec_group(d), .recipe = OSCAR_RECIPE_ZOO, .clip = 1.0f};
        row_codec k = base, v = base;
        k.bits = bits_k;
        v.bits = bits_v;
        if (fit && !kivi) {
            k.bf16 = v.bf16 = true;
            k.recipe = v.recipe = fit->recipe;
            k.clip = fit->clip_k;
            v.clip = fit->clip_v;
            k.ldlq = fit->ldlq_k;
            k.gain = fit->gain_k;
            v.gain = fit->gain_v;
            k.rotation = at_head(fit->k_rotation, h, dd);
            v.rotation = at_head(fit->v_rotation, h, dd);
            k.metric_b = at_head(fit->k_metric_b, h, dd);
            k.metric_d = at_head(fit->k_metric_d, h, (size_t)d);
            v.metric_b = at_head(fit->v_metric_b, h, dd);
            v.metric_d = at_head(fit->v_metric_d, h, (size_t)d);
        }
        layer->k_codec[h] = k;
        layer->v_codec[h] = v;
    }
    return true;
}

/* What append and attention would compute in every call. */
static bool layer_constants(cache_layer *layer) {
    int32_t heads = layer->shape.n_kv_heads, d = layer->shape.head_dim;
    row_codec *codecs[2] = {layer->k_codec, layer->v_codec};
    float **ones[2] = {&layer->k_ones, &layer->v_ones};
    for (int side = 0; side < 2; side++) {
        if (!codecs[side][0].metric_b) continue;
        size_t groups = (size_t)(d / codecs[side][0].group), floats = groups * ((size_t)d + 1);
        *ones[side] = aligned_calloc((size_t)heads * floats, sizeof(float));
        if (!*ones[side]) return false;
        for (int32_t h = 0; h < heads; h++) {
            float *at = *ones[side] + (size_t)h * floats;
            row_codec_prepare(&codecs[side][h], at, at + groups * (size_t)d);
        }
    }
    for (int32_t h = 0; h < heads && layer->v_back; h++)
        for (int32_t i = 0; i < d; i++)
            for (int32_t j = 0; j < d; j++)
                layer->v_back[((size_t)h * (size_t)d + (size_t)j) * (size_t)d + (size_t)i] =
                    layer->v_codec[h].rotation[i * d + j];
    return true;
}

/* Where the layer lies in a history page and in an overlay page. */
static void layer_layout(oscar_cache *cache, cache_layer *layer, size_t *history, size_t *overlay) {
    size_t heads = (size_t)layer->shape.n_kv_heads;
    size_t side = (size_t)layer->shape.head_dim * OSCAR_PAGE_TOKENS;
    bool exact = cache_is_exact(cache);
    layer->k_side = page_side_make(PAGE_KEY, layer->shape.head_dim, layer->k_codec[0].bits);
    layer->v_side = page_side_make(PAGE_VALUE, layer->shape.head_dim, layer->v_codec[0].bits);
    layer->history_offset = *history;
    layer->history_value_offset = exact ? side * sizeof(float) : layer->k_side.bytes;
    layer->history_head_bytes =
        exact ? 2 * side * sizeof(float) : layer->k_side.bytes + layer->v_side.bytes;
    *history += heads * layer->history_head_bytes;
    layer->overlay_offset = *overlay;
    layer->overlay_head_bytes = 2 * side * sizeof(uint16_t);
    *overlay += heads * layer->overlay_head_bytes;
}

static bool make_layers(oscar_cache *cache, const oscar_cache_options *o, size_t *history,
                        size_t *overlay) {
    cache->layers = aligned_calloc((size_t)o->n_layers, sizeof *cache->layers);
    cache->ropes = aligned_calloc((size_t)o->n_layers, sizeof *cache->ropes);
    if (!cache->layers || !cache->ropes) return false;
    for (int32_t i = 0; i < o->n_layers; i++) {
        cache_layer *layer = &cache->layers[i];
        cache->n_layers = i + 1;
        layer->shape = o->layers[i];
        layer->group = layer->shape.n_q_heads / layer->shape.n_kv_heads;
        if (o->kv_type == OSCAR_KV_INT2 && !cache->baseline_kivi) {
            layer->fit = &o->rotations->layers[i];
            layer->n_tracked = layer->fit->n_tracked;
        }
        if (!layer_codecs(o, layer, cache->baseline_kivi != 0)) return false;
        layer_layout(cache, layer, history, overlay);
    }
    return true;
}

/* After the pools: a context that does not fit is refused before its tables are computed. */
static bool make_tables(oscar_cache *cache) {
    arena tables = {NULL, 0};
    for (int32_t i = 0; i < cache->n_layers; i++) arrange_tables(&cache->layers[i], &tables);
    cache->tables_bytes = tables.used;
    if (tables.used && !(cache->tables = region_reserve(tables.used))) return false;
    if (cache->tables) region_prefer_large(cache->tables, cache->tables_bytes);
    tables = (arena){cache->tables, 0};
    for (int32_t i = 0; i < cache->n_layers; i++) {
        cache_layer *layer = &cache->layers[i];
        if (cache->tables) arrange_tables(layer, &tables);
        if (!layer_rope(cache, layer) || !layer_constants(layer)) return false;
        layer_bias_table(cache, layer);
    }
    return true;
}

/* ---------------------------------------------------------------------------------------- memory */

static void arrange_step(oscar_cache *cache, arena *a) {
    step_state *s = &cache->step;
    size_t chunk = (size_t)cache->options.n_chunk_max, seqs = (size_t)cache->options.n_seqs_max;
    size_t appends = chunk * seqs, rows = 0, params = 0, queries = 0;
    for (int32_t i = 0; i < cache->n_layers; i++) {
        const cache_layer *l = &cache->layers[i];
        size_t heads = (size_t)l->shape.n_kv_heads;
        if (heads * (size_t)l->shape.head_dim > rows) rows = heads * (size_t)l->shape.head_dim;
        if ((size_t)l->group * rows > queries) queries = (size_t)l->group * rows;
        if (heads * (size_t)l->k_side.n_groups * 2 > params) params = heads * (size_t)l->k_side.n_groups * 2;
    }
    s->append_token = arena_take(a, appends, sizeof(int32_t));
    s->append_seq = arena_take(a, appends, sizeof(int32_t));
    s->append_pos = arena_take(a, appends, sizeof(int32_t));
    s->segments = arena_take(a, appends, sizeof(step_segment));
    s->queries = arena_take(a, chunk, sizeof(int32_t));
    s->blocks = arena_take(a, chunk, sizeof(step_block));
    cache->max_items = (int32_t)chunk + cache->max_partials;
    s->item_block = arena_take(a, (size_t)cache->max_items, sizeof(int32_t));
    s->item_piece = arena_take(a, (size_t)cache->max_items, sizeof(int32_t));
    for (int side = 0; side < 2; side++) {
        s->codes[side] = arena_take(a, chunk * rows, 1);
        s->params[side] = arena_take(a, chunk * params, sizeof(uint16_t));
        s->rows[side] = arena_take(a, chunk * rows, sizeof(uint16_t));
    }
    s->q = arena_take(a, queries, sizeof(float));
    s->partial = arena_take(a, (size_t)cache->max_partials * cache->partial_floats, sizeof(float));
    s->arrived = arena_take(a, (size_t)cache->max_partials, sizeof(atomic_int));
    cache->seq_scratch = arena_take(a, seqs, sizeof(int32_t));
    cache->seq_next = arena_take(a, seqs, sizeof(int32_t));
    cache->seqs = arena_take(a, seqs, sizeof(cache_seq));
    for (size_t i = 0; i < seqs; i++) {
        int32_t *history = arena_take(a, (size_t)cache->max_pages, sizeof(int32_t));
        int32_t *overlay = arena_take(a, (size_t)cache->max_pages, sizeof(int32_t));
        int32_t *coded = arena_take(a, (size_t)cache->n_layers, sizeof(int32_t));
        float *waiting = arena_take(a, cache->waiting_floats, sizeof(float));
        if (!a->base) continue;
        cache->seqs[i].history = history;
        cache->seqs[i].overlay = overlay;
        cache->seqs[i].coded = coded;
        cache->seqs[i].waiting = cache->waiting_floats ? waiting : NULL;
    }
}

static thread_scratch arrange_thread(arena *a, size_t d, size_t q_dim) {
    thread_scratch t;
    t.keys = arena_take(a, q_dim * OSCAR_PAGE_TOKENS, sizeof(float));
    t.values = arena_take(a, d * OSCAR_PAGE_TOKENS, sizeof(float));
    for (int i = 0; i < 2; i++) {
        t.q[i] = arena_take(a, ATTN_ROWS_MAX * q_dim, sizeof(float));
        t.sums[i] = arena_take(a, ATTN_ROWS_MAX * (d + 2), sizeof(float));
        t.total[i] = arena_take(a, ATTN_ROWS_MAX * (d + 2), sizeof(float));
    }
    t.q_bias = arena_take(a, ATTN_ROWS_MAX, sizeof(float));
    t.out = arena_take(a, ATTN_ROWS_MAX * d, sizeof(float));
    t.logits = arena_take(a, ATTN_ROWS_MAX * OSCAR_PAGE_TOKENS, sizeof(float));
    t.far = arena_take(a, ATTN_ROWS_MAX, sizeof(uint64_t));
    t.near = arena_take(a, ATTN_ROWS_MAX, sizeof(uint64_t));
    t.pairs = arena_take(a, ATTN_ROWS_MAX * q_dim, sizeof(float));
    t.cosines = arena_take(a, q_dim, sizeof(float));
    t.sines = arena_take(a, q_dim, sizeof(float));
    t.decode = arena_take(a, 1, sizeof(attn_decode));
    t.rows = arena_take(a, CODEC_LANES * d, sizeof(float));
    return t;
}

thread_scratch step_scratch(const oscar_cache *cache, int32_t thread) {
    arena a = {cache->thread_memory + (size_t)thread * cache->thread_bytes, 0};
    return arrange_thread(&a, cache->max_head_dim, cache->max_q_dim);
}

static size_t thread_scratch_bytes(const oscar_cache *cache) {
    arena a = {NULL, 0};
    arrange_thread(&a, cache->max_head_dim, cache->max_q_dim);
    return (a.used + 4095) & ~(size_t)4095;
}

/* What can be in flight at once: a short run of each sequence, each as long as it can be. */
static void size_partials(oscar_cache *cache) {
    const oscar_cache_options *o = &cache->options;
    int64_t runs = o->n_seqs_max < o->n_chunk_max ? o->n_seqs_max : o->n_chunk_max;
    int64_t pieces = piece_of(cache->max_pages - 1) + 1, most = 1;
    for (int32_t i = 0; i < cache->n_layers; i++) {
        const cache_layer *l = &cache->layers[i];
        size_t floats = 2 * (size_t)step_short_rows(l->group) * ((size_t)l->shape.head_dim + 2);
        if (floats > cache->partial_floats) cache->partial_floats = floats;
        if (runs * pieces * l->shape.n_kv_heads > most) most = runs * pieces * l->shape.n_kv_heads;
    }
    cache->max_partials = most < MOST_PARTIALS ? (int32_t)most : MOST_PARTIALS;
}

static bool make_scratch(oscar_cache *cache) {
    for (int32_t i = 0; i < cache->n_layers; i++) {
        const cache_layer *l = &cache->layers[i];
        size_t d = (size_t)l->shape.head_dim, q_dim = d + 2 * (size_t)l->n_tracked;
        if (d > cache->max_head_dim) cache->max_head_dim = d;
        if (q_dim > cache->max_q_dim) cache->max_q_dim = q_dim;
        if (!cache_codes_wait(cache)) continue;
        cache->layers[i].waiting_offset = cache->waiting_floats;
        cache->waiting_floats += CODEC_LANES * 2 * (size_t)l->shape.n_kv_heads * d;
    }
    size_partials(cache);
    arena measure = {NULL, 0};
    arrange_step(cache, &measure);
    cache->scratch_bytes = measure.used;
    cache->scratch = region_reserve(cache->scratch_bytes);
    cache->thread_bytes = thread_scratch_bytes(cache);
    cache->thread_memory = region_reserve(cache->thread_bytes * CACHE_MAX_THREADS);
    if (!cache->scratch || !cache->thread_memory) return false;
    arena place = {cache->scratch, 0};
    arrange_step(cache, &place);
    for (int32_t s = 0; s < cache->options.n_seqs_max; s++)
        for (int32_t b = 0; b < cache->max_pages; b++)
            cache->seqs[s].history[b] = cache->seqs[s].overlay[b] = NO_PAGE;
    for (int32_t s = 0; s < cache->options.n_seqs_max; s++) cache->seqs[s].pure_end = INT64_MAX;
    return true;
}

static oscar_status make_pools(oscar_cache *cache, size_t history_bytes, size_t overlay_bytes,
                               oscar_error *error) {
    const oscar_cache_options *o = &cache->options;
    int32_t n_pages = pages_for(o->n_tokens_max);
    int64_t per_seq = pages_for(o->sink) + pages_for(o->recent + o->lookahead) + 2;
    int64_t chunk = pages_for(o->n_chunk_max) + 1;
    /* A chunk whose tokens belong to every sequence at once takes pages in each of them, and restored
     * sequences may share history without sharing BF16 rows. That is rare, and address space costs nothing
     * until it is touched, so what counts as memory is windows and one chunk, or one page for each history
     * page; besides, a sequence may hold some that lack rows: restored ones, and the one that it writes. */
    int64_t most = (int64_t)n_pages + (2 + pages_for(o->sink)) * (int64_t)o->n_seqs_max;
    int64_t in_flight = chunk * o->n_seqs_max, usual = per_seq * o->n_seqs_max + chunk;
    if (in_flight > (int64_t)n_pages + o->n_seqs_max) in_flight = (int64_t)n_pages + o->n_seqs_max;
    int64_t n_overlay = per_seq * o->n_seqs_max + in_flight;
    if (usual > most) usual = most;
    if (!cache->has_overlay) n_overlay = usual = 0;
    double wanted = (double)n_pages * (double)history_bytes + (double)usual * (double)overlay_bytes;
    double memory = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    if (wanted > memory)
        return error_set(error, OSCAR_ERROR_MEMORY, -1,
                         "a cache of %lld tokens takes %.1f GiB, this machine has %.1f GiB",
                         (long long)o->n_tokens_max, wanted / (1 << 30), memory / (1 << 30));
    cache->overlay_budget = (int32_t)usual;
    if (!pool_init(&cache->history, n_pages, history_bytes) ||
        !pool_init(&cache->overlay, (int32_t)n_overlay, overlay_bytes))
        return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for %.1f GiB of cache", wanted / (1 << 30));
    return OSCAR_OK;
}

static oscar_status create(oscar_cache **out, const oscar_cache_options *o, int32_t kivi_group,
                           oscar_error *error) {
    if (!out) return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "out is NULL");
    *out = NULL;
    oscar_status status = check_options(o, kivi_group != 0, error);
    if (!status) status = isa_check(error);
    if (status) return status;
    oscar_cache *cache = aligned_calloc(1, sizeof *cache);
    if (!cache) return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory");
    cache->options = *o;
    if (cache->options.recent < 1) cache->options.recent = 1;
    cache->options.n_tokens_max = (int64_t)pages_for(o->n_tokens_max) * OSCAR_PAGE_TOKENS;
    cache->baseline_kivi = kivi_group;
    if (kivi_group && cache->options.lookahead < kivi_group) cache->options.lookahead = kivi_group;
    cache->has_overlay = o->kv_type == OSCAR_KV_INT2 || kivi_group;
    bool shorter = o->n_seq_tokens_max > 0 && o->n_seq_tokens_max < o->n_tokens_max;
    cache->max_pages = pages_for(shorter ? o->n_seq_tokens_max : o->n_tokens_max);
    size_t history_bytes = 0, overlay_bytes = 0;
    if (!make_layers(cache, o, &history_bytes, &overlay_bytes))
        status = error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for the cache's layers");
    if (!status) status = make_pools(cache, history_bytes, overlay_bytes, error);
    if (!status && (!make_tables(cache) || !make_scratch(cache) || !share_init(cache)))
        status = error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for the cache's tables");
    if (status) {
        oscar_cache_free(cache);
        return status;
    }
    cache_fingerprint(cache, o);
    cache->options.layers = NULL;
    cache->options.rotations = NULL;
    *out = cache;
    return OSCAR_OK;
}

oscar_status oscar_cache_create(oscar_cache **out, const oscar_cache_options *options, oscar_error *error) {
    return create(out, options, 0, error);
}

oscar_status cache_create_kivi(oscar_cache **out, const oscar_cache_options *options,
                               int32_t group_tokens, oscar_error *error) {
    if (group_tokens <= 0 || group_tokens % OSCAR_PAGE_TOKENS || group_tokens > KIVI_MAX_PAGES * OSCAR_PAGE_TOKENS)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "KIVI group of %d tokens, expected a multiple of %d up to %d",
                         group_tokens, OSCAR_PAGE_TOKENS, KIVI_MAX_PAGES * OSCAR_PAGE_TOKENS);
    return create(out, options, group_tokens, error);
}

void oscar_cache_free(oscar_cache *cache) {
    if (!cache) return;
    for (int32_t i = 0; i < cache->n_layers; i++) {
        aligned_free(cache->layers[i].k_codec);
        aligned_free(cache->layers[i].v_codec);
        aligned_free(cache->layers[i].k_ones);
        aligned_free(cache->layers[i].v_ones);
    }
    for (int32_t i = 0; i < cache->n_ropes; i++) {
        aligned_free(cache->ropes[i].page_cos);
        aligned_free(cache->ropes[i].page_sin);
        aligned_free(cache->ropes[i].slot_cos);
        aligned_free(cache->ropes[i].slot_sin);
    }
    aligned_free(cache->layers);
    aligned_free(cache->ropes);
    if (cache->tables) region_release(cache->tables, cache->tables_bytes);
    if (cache->scratch) region_release(cache->scratch, cache->scratch_bytes);
    if (cache->thread_memory) region_release(cache->thread_memory, cache->thread_bytes * CACHE_MAX_THREADS);
    pool_destroy(&cache->history);
    pool_destroy(&cache->overlay);
    share_destroy(cache);
    aligned_free(cache);
}

/* Bits an element that the KIVI baseline would take: codes, and fp16 step and offset for each
 * channel over a group of tokens (keys) and for each token (values). */
static double kivi_bits(const oscar_cache *cache) {
    double bits = 0, elements = 0;
    for (int32_t i = 0; i < cache->n_layers; i++) {
        const cache_layer *l = &cache->layers[i];
        double n = (double)l->shape.n_kv_heads * l->shape.head_dim;
        bits += n * (l->k_codec[0].bits + 32.0 / cache->baseline_kivi + l->v_codec[0].bits +
                     32.0 / l->v_codec[0].group);
        elements += 2 * n;
    }
    return bits / elements;
}

static oscar_cache_stats read_stats(const oscar_cache *cache) {
    const page_pool *history = &cache->history, *overlay = &cache->overlay;
    const page_index *index = &cache->index;
    oscar_cache_stats s = {
        .struct_size = sizeof s,
        .page_bytes = (int64_t)history->page_bytes,
        .pages_total = history->n_pages,
        .pages_free = history->n_free,
        .pages_live = pool_live(history),
        .pages_shared = pool_shared(history),
        .overlay_page_bytes = (int64_t)overlay->page_bytes,
        .overlay_pages_total = overlay->n_pages,
        .overlay_pages_live = pool_live(overlay),
        .scratch_bytes = (int64_t)cache->scratch_bytes,
        .pages_cached = history->n_cached,
        .overlay_pages_cached = overlay->n_cached,
        .overlay_pages_budget = cache->overlay_budget,
        .page_hits = index->n_hits,
        .page_misses = index->n_misses,
        .page_evictions = index->n_evicted,
        .pages_unequal = index->n_unequal,
        .overlay_evictions = index->n_overlay_evicted,
        .tokens_attached = index->n_attached,
        .scratch_thread_bytes = (int64_t)cache->thread_bytes,
    };
    for (int32_t i = 0; i < cache->n_layers; i++)
        s.exact_bytes_per_token += 2 * 2 * (int64_t)cache->layers[i].shape.n_kv_heads * cache->layers[i].shape.head_dim;
    s.history_bytes = (s.pages_live + s.pages_cached) * s.page_bytes;
    s.overlay_bytes = (s.overlay_pages_live + s.overlay_pages_cached) * s.overlay_page_bytes;
    s.history_bits = cache->baseline_kivi ? kivi_bits(cache)
                                          : 8.0 * (double)history->page_bytes /
                                                ((double)s.exact_bytes_per_token / 2 * OSCAR_PAGE_TOKENS);
    return s;
}

void oscar_cache_get_stats(const oscar_cache *cache, oscar_cache_stats *stats) {
    if (stats->struct_size != sizeof *stats) return;
    *stats = read_stats(cache);
}
