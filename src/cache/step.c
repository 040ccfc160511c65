/*
 * step.c - one chunk through one layer: plan, append, store; attend.c does the rest.
 *
 * The plan is made by one thread. Phases run on all threads, pieces are taken from a counter, and a
 * barrier lies between phases: 1 quantise 16 tokens of one head and side; 2 store a page's run of
 * rows (one owner a page side: value rows share bytes); 3 attend, where whoever finishes the last
 * piece of shared pages merges them in order. A step of at most 16 tokens stores where it quantises:
 * a decoded token meets one barrier. Its queries are turned before it, once for all pieces of its
 * pages. No result depends on which thread took a piece.
 *
 * BF16 rows lie as they come, without the means; only codes are in the rotated basis. While a row is in
 * everybody's recent window nobody reads its codes, so a short step leaves rows, as floats, waiting until
 * sixteen positions, aligned to sixteen, are complete: rotation and metric, which no L2 holds for all
 * layers, are read once for sixteen, and LDLQ takes a third of the time a row. Codes do not depend on when
 * they are made.
 */
#include "cache/cache.h"

#include <float.h>
#include <math.h>

/* Query tokens of a sequence up to which threads share its pages. */
#define SPLIT_TOKENS 8

static int32_t first_seq(const oscar_step *in, int32_t token) {
    return in->seqs[in->seq_offsets ? in->seq_offsets[token] : token];
}

/* ------------------------------------------------------------------------------------------ plan */

static oscar_status check_step(const oscar_cache *cache, int32_t layer, const oscar_step *in,
                               oscar_error *error) {
    if (!in || in->struct_size != sizeof *in)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "step: struct_size");
    if (layer < 0 || layer >= cache->n_layers)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "layer %d of %d", layer, cache->n_layers);
    if (in->n_tokens <= 0 || in->n_tokens > cache->options.n_chunk_max)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "n_tokens %d, expected 1 to n_chunk_max %d",
                         in->n_tokens, cache->options.n_chunk_max);
    if (!in->seqs || !in->positions || !in->q || !in->k || !in->v || !in->out)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "step: a pointer is NULL");
    if (!(in->logit_softcap >= 0.0f) || !isfinite(in->logit_softcap) || !isfinite(in->logit_scale))
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "logit_softcap %g, logit_scale %g",
                         (double)in->logit_softcap, (double)in->logit_scale);
    if (in->kv_dtype < OSCAR_DTYPE_F32 || in->kv_dtype > OSCAR_DTYPE_BF16)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "kv_dtype %d", in->kv_dtype);
    return OSCAR_OK;
}

static void fill_strides(oscar_step *in, const oscar_layer *shape) {
    int64_t d = shape->head_dim;
    if (!in->q_head_stride) in->q_head_stride = d;
    if (!in->q_token_stride) in->q_token_stride = d * shape->n_q_heads;
    if (!in->k_head_stride) in->k_head_stride = d;
    if (!in->k_token_stride) in->k_token_stride = d * shape->n_kv_heads;
    if (!in->v_head_stride) in->v_head_stride = d;
    if (!in->v_token_stride) in->v_token_stride = d * shape->n_kv_heads;
    if (!in->out_head_stride) in->out_head_stride = d;
    if (!in->out_token_stride) in->out_token_stride = d * shape->n_q_heads;
}

/* Keeps the id beside its page; known ids have no hole, a negative one is not known. */
static void note_token(oscar_cache *cache, cache_seq *seq, int32_t position, int32_t token) {
    int32_t page = seq->history[position / OSCAR_PAGE_TOKENS];
    cache->index.tokens[(size_t)page * OSCAR_PAGE_TOKENS + (size_t)(position % OSCAR_PAGE_TOKENS)] = token;
    if (token >= 0 && seq->known_end == position) seq->known_end = position + 1;
}

/* Groups the appends by sequence, keeping their order, and checks that each sequence goes on. */
static oscar_status plan_appends(oscar_cache *cache, oscar_error *error) {
    step_state *s = &cache->step;
    const oscar_step *in = &s->in;
    int32_t n_seqs = cache->options.n_seqs_max, n = in->seq_offsets ? in->seq_offsets[in->n_tokens] : in->n_tokens;
    if (n < in->n_tokens || (int64_t)n > (int64_t)cache->options.n_chunk_max * n_seqs)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "seq_offsets end at %d", n);
    memset(cache->seq_scratch, 0, sizeof(int32_t) * (size_t)n_seqs);
    for (int32_t i = 0; i < n; i++) {
        if (in->seqs[i] < 0 || in->seqs[i] >= n_seqs)
            return error_set(error, OSCAR_ERROR_ARGUMENT, i, "sequence %d, expected 0 to %d", in->seqs[i], n_seqs - 1);
        cache->seq_scratch[in->seqs[i]]++;
    }
    int32_t start = 0;
    for (int32_t q = 0; q < n_seqs; q++) {
        int32_t count = cache->seq_scratch[q];
        cache->seq_scratch[q] = start;
        start += count;
        cache->seq_next[q] = (int32_t)cache->seqs[q].length;
        if (count && cache->seqs[q].known_end > cache->seqs[q].length) cache->seqs[q].known_end = cache->seqs[q].length;
        int32_t *coded = &cache->seqs[q].coded[s->layer]; /* past the end: of a step that was not counted in */
        if (count && *coded > cache->seqs[q].length) *coded = (int32_t)cache->seqs[q].length;
    }
    for (int32_t t = 0; t < in->n_tokens; t++) {
        int32_t begin = in->seq_offsets ? in->seq_offsets[t] : t, end = in->seq_offsets ? in->seq_offsets[t + 1] : t + 1;
        if (end <= begin || end > n)
            return error_set(error, OSCAR_ERROR_ARGUMENT, t, "token %d has no sequence", t);
        for (int32_t i = begin; i < end; i++) {
            int32_t q = in->seqs[i], at = cache->seq_scratch[q]++;
            if (in->positions[t] != cache->seq_next[q])
                return error_set(error, OSCAR_ERROR_ARGUMENT, t, "token %d: position %d in sequence %d, expected %d",
                                 t, in->positions[t], q, cache->seq_next[q]);
            if (in->positions[t] >= cache->seqs[q].length + cache->seqs[q].n_reserved)
                return error_set(error, OSCAR_ERROR_ARGUMENT, t, "token %d: position %d of sequence %d is not reserved",
                                 t, in->positions[t], q);
            if (in->tokens) note_token(cache, &cache->seqs[q], in->positions[t], in->tokens[t]);
            cache->seq_next[q]++;
            s->append_token[at] = t;
            s->append_seq[at] = q;
            s->append_pos[at] = in->positions[t];
        }
    }
    s->n_appends = n;
    return OSCAR_OK;
}

static oscar_status plan_segments(oscar_cache *cache, oscar_error *error) {
    step_state *s = &cache->step;
    s->n_segments = 0;
    for (int32_t i = 0; i < s->n_appends; i++) {
        int32_t seq = s->append_seq[i], page = s->append_pos[i] / OSCAR_PAGE_TOKENS;
        step_segment *last = s->n_segments ? &s->segments[s->n_segments - 1] : NULL;
        if (last && last->seq == seq && last->page == page) {
            last->count++;
            continue;
        }
        s->segments[s->n_segments++] = (step_segment){i, 1, seq, page};
        int32_t *overlay = &cache->seqs[seq].overlay[page];
        if (!cache->has_overlay || *overlay != NO_PAGE) continue;
        *overlay = cache_take_overlay(cache);
        if (*overlay == NO_PAGE)
            return error_set(error, OSCAR_ERROR_NO_SPACE, -1,
                             "more than n_chunk_max %d tokens are appended but not advanced over",
                             cache->options.n_chunk_max);
    }
    return OSCAR_OK;
}

int32_t step_short_rows(int32_t group) {
    int32_t tokens = ATTN_ROWS_MAX / 2 / group;
    return group * (tokens < SPLIT_TOKENS ? tokens : SPLIT_TOKENS);
}

static void add_block(oscar_cache *cache, step_block block, bool short_run, int32_t *n_partials) {
    step_state *s = &cache->step;
    int32_t heads = cache->layers[s->layer].shape.n_kv_heads;
    block.first_piece = piece_of(block.page_begin);
    block.n_pieces = piece_of(block.page_end - 1) - block.first_piece + 1;
    block.shared = short_run && block.n_pieces > 1 && *n_partials + block.n_pieces * heads <= cache->max_partials;
    block.partial = *n_partials;
    if (block.shared) {
        for (int32_t h = 0; h < heads; h++) atomic_store_explicit(&s->arrived[block.partial + h], 0, memory_order_relaxed);
        *n_partials += block.n_pieces * heads;
    }
    s->blocks[s->n_blocks++] = block;
}

/* Query tokens in blocks of one sequence; of a short run, threads share the pages. */
static void plan_blocks(oscar_cache *cache) {
    step_state *s = &cache->step;
    const oscar_step *in = &s->in;
    const cache_layer *layer = &cache->layers[s->layer];
    int32_t n = 0, n_partials = 0, window = layer->shape.window;
    for (int32_t i = 0; i < s->n_appends; i++)
        if (first_seq(in, s->append_token[i]) == s->append_seq[i]) s->queries[n++] = s->append_token[i];

    int32_t most = ATTN_ROWS_MAX / layer->group > 0 ? ATTN_ROWS_MAX / layer->group : 1;
    s->n_blocks = 0;
    for (int32_t i = 0; i < n;) {
        int32_t seq = first_seq(in, s->queries[i]), end = i;
        while (end < n && first_seq(in, s->queries[end]) == seq) end++;
        bool short_run = (end - i) * layer->group <= step_short_rows(layer->group);
        for (int32_t j = i; j < end; j += most) {
            int32_t count = end - j < most ? end - j : most;
            int32_t first = in->positions[s->queries[j]], last = in->positions[s->queries[j + count - 1]];
            int32_t low = window > 0 && first - window + 1 > 0 ? first - window + 1 : 0;
            step_block block = {.first = j, .count = count, .seq = seq};
            block.page_begin = low / OSCAR_PAGE_TOKENS;
            block.page_end = last / OSCAR_PAGE_TOKENS + 1;
            add_block(cache, block, short_run, &n_partials);
        }
        i = end;
    }
    /* Longest first: later blocks of a chunk see more pages, later pieces are longer. */
    int32_t items = 0;
    for (int32_t b = s->n_blocks - 1; b >= 0; b--)
        for (int32_t k = s->blocks[b].shared ? s->blocks[b].n_pieces - 1 : 0; k >= 0; k--) {
            s->item_block[items] = b;
            s->item_piece[items++] = k;
        }
    s->n_items = items * layer->shape.n_kv_heads;
}

oscar_status oscar_step_prepare(oscar_cache *cache, int32_t layer, const oscar_step *step, oscar_error *error) {
    step_state *s = &cache->step;
    if (s->active) return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "a step is already in flight");
    oscar_status status = check_step(cache, layer, step, error);
    if (status) return status;
    s->in = *step;
    s->layer = layer;
    fill_strides(&s->in, &cache->layers[layer].shape);
    status = plan_appends(cache, error);
    if (!status) status = plan_segments(cache, error);
    if (status) return status;
    plan_blocks(cache);
    s->queries_turned = step->n_tokens == 1 && !cache_is_exact(cache) && step_sees_history(cache);
    for (int i = 0; i < 3; i++) atomic_store(&s->next[i].count, 0);
    atomic_store(&s->bad_token, step->n_tokens);
    spin_barrier_init(&s->barrier);
    s->active = true;
    return OSCAR_OK;
}

/* Whether the step stores rows where it quantises them. */
static bool stores_at_once(const oscar_cache *cache) {
    return !cache_is_exact(cache) && cache->step.in.n_tokens <= CODEC_LANES;
}

void oscar_step_run(oscar_cache *cache, int32_t ith, int32_t n_threads) {
    step_state *s = &cache->step;
    thread_scratch scratch = step_scratch(cache, ith % CACHE_MAX_THREADS);
    bool works = ith < CACHE_MAX_THREADS, at_once = stores_at_once(cache);
    if (cache->options.kv_type != OSCAR_KV_F32 || cache->baseline_kivi) {
        if (works) step_append_phase(cache, &scratch, at_once);
        spin_barrier_wait(&s->barrier, n_threads);
    }
    if (!at_once) {
        if (works) step_store_phase(cache);
        spin_barrier_wait(&s->barrier, n_threads);
    }
    if (cache->baseline_kivi) {
        if (ith == 0) step_kivi_phase(cache);
        spin_barrier_wait(&s->barrier, n_threads);
    }
    if (works) step_attend_phase(cache, n_threads, &scratch);
}

oscar_status oscar_step_finish(oscar_cache *cache, oscar_error *error) {
    step_state *s = &cache->step;
    if (!s->active) return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "no step is in flight");
    s->active = false;
    bool wait = stores_at_once(cache) && cache_codes_wait(cache);
    for (int32_t i = 0; i < s->n_segments; i++) {
        cache_seq *seq = &cache->seqs[s->segments[i].seq];
        int64_t end = cache->seq_next[s->segments[i].seq], coded = wait ? cache_coded(end) : end;
        if (seq->coded[s->layer] < coded) seq->coded[s->layer] = (int32_t)coded;
    }
    int bad = atomic_load(&s->bad_token);
    if (bad < s->in.n_tokens)
        return error_set(error, OSCAR_ERROR_NOT_FINITE, bad, "token %d: NaN or infinity in the keys or values of layer %d",
                         bad, s->layer);
    return OSCAR_OK;
}

oscar_status oscar_cache_attend(oscar_cache *cache, int32_t layer, const oscar_step *step, oscar_error *error) {
    oscar_status status = oscar_step_prepare(cache, layer, step, error);
    if (status) return status;
    oscar_step_run(cache, 0, 1);
    return oscar_step_finish(cache, error);
}

/* ---------------------------------------------------------------------------------------- append */

static void load_row(const oscar_step *in, int side, int32_t token, int32_t head, int32_t d, float *row) {
    const void *base = side == 0 ? in->k : in->v;
    int64_t at = side == 0 ? token * in->k_token_stride + head * in->k_head_stride
                           : token * in->v_token_stride + head * in->v_head_stride;
    if (in->kv_dtype == OSCAR_DTYPE_F32) {
        memcpy(row, (const float *)base + at, sizeof(float) * (size_t)d);
        return;
    }
    const uint16_t *half = (const uint16_t *)base + at;
    if (in->kv_dtype == OSCAR_DTYPE_F16)
        attn_ops_current()->widen_half(d, half, row);
    else
        for (int32_t i = 0; i < d; i++) row[i] = bf16_to_float(half[i]);
}

/* Takes mu and magnitude * R_t nu off a key. */
static void remove_key_mean(const oscar_cache *cache, const cache_layer *layer, int32_t head, int32_t position,
                            float *row) {
    const rotations_layer *fit = layer->fit;
    int32_t d = layer->shape.head_dim, n = layer->n_tracked;
    if (fit->k_mean)
        for (int32_t i = 0; i < d; i++) row[i] -= fit->k_mean[head * d + i];
    if (n == 0) return;
    const rope_table *rope = &cache->ropes[layer->rope];
    const float *page_cos = rope->page_cos + (size_t)(position / 64) * (size_t)rope->n_pairs;
    const float *page_sin = rope->page_sin + (size_t)(position / 64) * (size_t)rope->n_pairs;
    const float *bias = layer->bias_table + (size_t)head * 2 * (size_t)n * 64 + position % 64;
    for (int32_t p = 0; p < n; p++, bias += 128) {
        int32_t f = fit->tracked[head * n + p];
        int32_t a = rope_first(&rope->rope, f), b = rope_second(&rope->rope, f);
        float c = page_cos[f], s = page_sin[f], x = bias[0], y = bias[64];
        row[a] -= x * c - y * s;
        row[b] -= x * s + y * c;
    }
}

static void note_bad(step_state *s, int32_t token) {
    int seen = atomic_load(&s->bad_token);
    while (token < seen && !atomic_compare_exchange_weak(&s->bad_token, &seen, token)) {}
}

/* Whether a row has NaN, infinity, or numbers whose sums might be. */
static bool is_bad(int32_t d, const float *row) {
    uint32_t most = 0;
    for (int32_t i = 0; i < d; i++) {
        uint32_t bits = float_bits(row[i]) & 0x7fffffffu;
        if (bits > most) most = bits;
    }
    return !(bits_float(most) < FLT_MAX / (2 * OSCAR_MAX_HEAD_DIM));
}

/* Takes tokens [first, first + count) of one head and side into scratch->rows, and quantises them into the step's
 * arrays, which are [n_kv_heads, n_tokens, ...], unless that is for later. */
static void append_rows(oscar_cache *cache, thread_scratch *scratch, int side, int32_t head, int32_t first,
                        int32_t count, bool later) {
    step_state *s = &cache->step;
    const cache_layer *layer = &cache->layers[s->layer];
    int32_t d = layer->shape.head_dim;
    const row_codec *codec = side == 0 ? &layer->k_codec[head] : &layer->v_codec[head];
    int32_t groups = d / codec->group;
    for (int32_t i = 0; i < count; i++) {
        float *row = scratch->rows + (size_t)i * (size_t)d;
        load_row(&s->in, side, first + i, head, d, row);
        if (!layer->fit) continue;
        if (side == 0)
            remove_key_mean(cache, layer, head, s->in.positions[first + i], row);
        else if (layer->fit->v_mean)
            for (int32_t j = 0; j < d; j++) row[j] -= layer->fit->v_mean[head * d + j];
    }
    size_t at = (size_t)head * (size_t)s->in.n_tokens + (size_t)first;
    for (int32_t i = 0; i < count; i++) {
        uint16_t *out = s->rows[side] + (at + (size_t)i) * (size_t)d;
        float *row = scratch->rows + (size_t)i * (size_t)d;
        if (is_bad(d, row)) {
            note_bad(s, first + i);
            memset(row, 0, sizeof(float) * (size_t)d);
        }
        for (int32_t j = 0; j < d; j++) out[j] = bf16_from_float(row[j]);
    }
    if (later) return;
    codec_quantize_rows(codec, count, scratch->rows, d, NULL, s->codes[side] + at * (size_t)d,
                        s->params[side] + at * (size_t)groups * 2);
}

/* ----------------------------------------------------------------------------------------- store */

/* A float row into a page of floats: keys as columns, values as rows. */
static void put_exact(const oscar_cache *cache, const step_segment *segment, int32_t head, int side, int32_t append) {
    step_state *s = (step_state *)&cache->step;
    const cache_layer *layer = &cache->layers[s->layer];
    int32_t d = layer->shape.head_dim, token = s->append_token[append], slot = s->append_pos[append] % OSCAR_PAGE_TOKENS;
    float row[OSCAR_MAX_HEAD_DIM];
    load_row(&s->in, side, token, head, d, row);
    bool finite = true;
    for (int32_t i = 0; i < d; i++) finite &= isfinite(row[i]) != 0;
    if (!finite) {
        memset(row, 0, sizeof(float) * (size_t)d);
        note_bad(s, token);
    }
    if (cache->baseline_kivi && side == 1) {
        size_t at = (size_t)head * (size_t)s->in.n_tokens + (size_t)token;
        int32_t group = layer->v_codec[head].group, groups = d / group;
        for (int32_t i = 0; i < d; i++) {
            const uint16_t *params = s->params[1] + at * (size_t)groups * 2 + i / group * 2;
            row[i] = fp16_to_float(params[1]) + fp16_to_float(params[0]) * s->codes[1][at * (size_t)d + (size_t)i];
        }
    }
    uint8_t *page = pool_page(&cache->history, cache->seqs[segment->seq].history[segment->page]);
    float *base = (float *)(void *)layer_history(layer, page, head);
    if (side == 0)
        for (int32_t i = 0; i < d; i++) base[i * OSCAR_PAGE_TOKENS + slot] = row[i];
    else
        memcpy(base + (size_t)d * OSCAR_PAGE_TOKENS + (size_t)slot * (size_t)d, row, sizeof(float) * (size_t)d);
}

static void put_quantised(const oscar_cache *cache, const step_segment *segment, int32_t head, int side, int32_t append) {
    const step_state *s = &cache->step;
    const cache_layer *layer = &cache->layers[s->layer];
    int32_t d = layer->shape.head_dim, slot = s->append_pos[append] % OSCAR_PAGE_TOKENS;
    size_t at = (size_t)head * (size_t)s->in.n_tokens + (size_t)s->append_token[append];
    const page_side *layout = side == 0 ? &layer->k_side : &layer->v_side;
    uint8_t *page = pool_page(&cache->history, cache->seqs[segment->seq].history[segment->page]);
    uint8_t *base = layer_history(layer, page, head) + (side ? layer->history_value_offset : 0);
    page_put_row(layout, base, slot, s->codes[side] + at * (size_t)d,
                 s->params[side] + at * (size_t)layout->n_groups * 2);
}

static void put_overlay(const oscar_cache *cache, const step_segment *segment, int32_t head, int side, int32_t append) {
    const step_state *s = &cache->step;
    const cache_layer *layer = &cache->layers[s->layer];
    int32_t d = layer->shape.head_dim, slot = s->append_pos[append] % OSCAR_PAGE_TOKENS;
    size_t at = (size_t)head * (size_t)s->in.n_tokens + (size_t)s->append_token[append];
    const uint16_t *row = s->rows[side] + at * (size_t)d;
    uint8_t *page = pool_page(&cache->overlay, cache->seqs[segment->seq].overlay[segment->page]);
    if (side == 0) {
        uint16_t *keys = layer_overlay_keys(layer, page, head) + page_bf16_at(PAGE_KEY, d, slot, 0);
        for (int32_t i = 0; i < d; i += 2) memcpy(keys + i * OSCAR_PAGE_TOKENS, row + i, 2 * sizeof *keys);
    } else {
        uint16_t *values = layer_overlay_values(layer, page, head) + page_bf16_at(PAGE_VALUE, d, slot, 0);
        for (int32_t i = 0; i < d; i++) values[2 * i] = row[i];
    }
}

/* The rows of a segment, one head and side. */
static void store_rows(const oscar_cache *cache, const step_segment *segment, int32_t head, int side) {
    bool exact = cache_is_exact(cache);
    for (int32_t i = segment->first; i < segment->first + segment->count; i++) {
        if (exact)
            put_exact(cache, segment, head, side, i);
        else
            put_quantised(cache, segment, head, side, i);
        if (cache->has_overlay) put_overlay(cache, segment, head, side, i);
    }
}

/* Codes of the waiting rows [first, end) of a sequence, of one tile of sixteen positions. */
static void code_tile(const oscar_cache *cache, const cache_layer *layer, const cache_seq *seq, int32_t head, int side,
                      int64_t first, int64_t end) {
    int32_t d = layer->shape.head_dim, b = (int32_t)(first / OSCAR_PAGE_TOKENS), slot = (int32_t)(first % OSCAR_PAGE_TOKENS);
    int32_t count = (int32_t)(end - first);
    uint8_t codes[CODEC_LANES * OSCAR_MAX_HEAD_DIM];      /* [count, d] */
    uint16_t params[CODEC_LANES * CODEC_MAX_GROUPS * 2]; /* [count, n_groups, 2] */
    const row_codec *codec = side == 0 ? &layer->k_codec[head] : &layer->v_codec[head];
    codec_quantize_rows(codec, count, waiting_row(layer, seq, head, side, first), (int64_t)layer->shape.n_kv_heads * 2 * d, NULL,
                        codes, params);
    const page_side *layout = side == 0 ? &layer->k_side : &layer->v_side;
    uint8_t *page = layer_history(layer, pool_page(&cache->history, seq->history[b]), head) + (side ? layer->history_value_offset : 0);
    for (int32_t i = 0; i < count; i++)
        page_put_row(layout, page, slot + i, codes + i * d, params + i * layout->n_groups * 2);
}

void cache_settle_codes(const oscar_cache *cache, int32_t seq) {
    cache_seq *s = &cache->seqs[seq];
    for (int32_t i = 0; i < cache->n_layers; i++) {
        if (s->coded[i] >= s->length) continue;
        for (int32_t h = 0; h < 2 * cache->layers[i].shape.n_kv_heads; h++)
            code_tile(cache, &cache->layers[i], s, h / 2, h % 2, s->coded[i], s->length);
        s->coded[i] = (int32_t)s->length;
    }
}

/* The rows that wait share a tile with the first new ones, so they have the same owner. */
void step_store_phase(oscar_cache *cache) {
    step_state *s = &cache->step;
    const cache_layer *layer = &cache->layers[s->layer];
    int32_t heads = layer->shape.n_kv_heads, pieces = s->n_segments * heads * 2;
    for (int32_t w; (w = atomic_fetch_add(&s->next[1].count, 1)) < pieces;) {
        const step_segment *segment = &s->segments[w / (heads * 2)];
        const cache_seq *seq = &cache->seqs[segment->seq];
        if (s->append_pos[segment->first] == seq->length && seq->coded[s->layer] < seq->length)
            code_tile(cache, layer, seq, w / 2 % heads, w % 2, seq->coded[s->layer], seq->length);
        store_rows(cache, segment, w / 2 % heads, w % 2);
    }
}

/* The rows of a segment, which are in scratch->rows, one head and side: BF16 ones, and those that wait, of which a
 * complete tile gets codes. */
static void store_waiting(const oscar_cache *cache, const step_segment *segment, int32_t head, int side,
                          const thread_scratch *scratch) {
    const step_state *s = &cache->step;
    const cache_layer *layer = &cache->layers[s->layer];
    const cache_seq *seq = &cache->seqs[segment->seq];
    int32_t d = layer->shape.head_dim;
    for (int32_t i = segment->first; i < segment->first + segment->count; i++) {
        int64_t position = s->append_pos[i], first = cache_coded(position);
        memcpy(waiting_row(layer, seq, head, side, position), scratch->rows + s->append_token[i] * d, sizeof(float) * (size_t)d);
        put_overlay(cache, segment, head, side, i);
        if (position + 1 < first + CODEC_LANES) continue;
        code_tile(cache, layer, seq, head, side, seq->coded[s->layer] > first ? seq->coded[s->layer] : first, position + 1);
    }
}

/* All of a short step for one head and side. */
static void store_short(const oscar_cache *cache, int32_t head, int side, const thread_scratch *scratch) {
    const step_state *s = &cache->step;
    for (int32_t i = 0; i < s->n_segments; i++)
        if (cache_codes_wait(cache))
            store_waiting(cache, &s->segments[i], head, side, scratch);
        else
            store_rows(cache, &s->segments[i], head, side);
}

/* Keys first: they take longest. */
void step_append_phase(oscar_cache *cache, thread_scratch *scratch, bool store) {
    step_state *s = &cache->step;
    int32_t heads = cache->layers[s->layer].shape.n_kv_heads, n = s->in.n_tokens;
    int32_t blocks = (n + CODEC_LANES - 1) / CODEC_LANES, pieces = blocks * heads;
    for (int32_t w; (w = atomic_fetch_add(&s->next[0].count, 1)) < 2 * pieces;) {
        int32_t side = w / pieces, head = w % heads, first = w % pieces / heads * CODEC_LANES;
        append_rows(cache, scratch, side, head, first, n - first < CODEC_LANES ? n - first : CODEC_LANES,
                    store && cache_codes_wait(cache));
        if (side == 0 && s->queries_turned) step_turn_queries(cache, head, scratch);
        if (store) store_short(cache, head, side, scratch);
    }
}
