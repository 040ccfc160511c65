/*
 * attend.c - the attention of a step: blocks of query rows over the pages of their sequence.
 *
 * Logits are exact in what was removed from the keys: q.k_t = q'.k'_t + q.mu + (R_-p0 q).(m R_i nu)
 * for t = p0 + i, so the query is turned once a page and the last product is with a table of 64
 * columns (docs/METHOD.md). Values of the history come back by U_V^T, and all by their mean, since
 * weights sum to 1.
 */
#include "cache/cache.h"

#include <math.h>

/* The rows of a block twice, each with its own queries, maxima, sums and values: history, whose keys and values are
 * turned, and BF16 rows, which are not. What a block does not see costs nothing: where all is BF16, as in a
 * short context, no rotation is read. */
enum { HISTORY, NEAR };
#define SHARES_A_THREAD 4 /* of a step's attention */
typedef struct item_rows {
    attn_rows of[2];
    bool begun[2]; /* queries are there */
} item_rows;

static void clear_rows(item_rows *item) {
    for (int k = 0; k < 2; k++) {
        attn_rows *rows = &item->of[k];
        for (int32_t r = 0; r < rows->n_rows; r++) {
            rows->row_max[r] = -INFINITY;
            rows->row_sum[r] = 0.0f;
        }
        memset(rows->acc, 0, sizeof(float) * (size_t)rows->n_rows * (size_t)rows->head_dim);
    }
}

/* Results that lie at `floats` of each: maxima, sums, values. */
static void place_rows(item_rows *item, int32_t n_rows, float *floats[2]) {
    for (int k = 0; k < 2; k++) {
        item->of[k].row_max = floats[k];
        item->of[k].row_sum = floats[k] + n_rows;
        item->of[k].acc = floats[k] + 2 * n_rows;
    }
}

static item_rows make_rows(const oscar_cache *cache, const step_block *block, thread_scratch *scratch) {
    const step_state *s = &cache->step;
    const cache_layer *layer = &cache->layers[s->layer];
    item_rows item = {{{0}}, {false, false}};
    for (int k = 0; k < 2; k++)
        item.of[k] = (attn_rows){
            .n_rows = block->count * layer->group,
            .head_dim = layer->shape.head_dim,
            .q_dim = layer->shape.head_dim + 2 * layer->n_tracked,
            .logit_scale = s->in.logit_scale,
            .logit_softcap = s->in.logit_softcap,
            .q = scratch->q[k],
            .q_bias = scratch->q_bias,
            .logits = scratch->logits,
        };
    place_rows(&item, ATTN_ROWS_MAX, scratch->sums);
    clear_rows(&item);
    return item;
}

/* The query of row r of a block: head r % group of the KV head's group. */
static const float *query_row(const oscar_cache *cache, const step_block *block, int32_t head, int32_t r) {
    const step_state *s = &cache->step;
    int32_t group = cache->layers[s->layer].group;
    int32_t token = s->queries[block->first + r / group];
    return s->in.q + token * s->in.q_token_stride + (head * group + r % group) * s->in.q_head_stride;
}

/* The queries of a block, at out [n_rows, stride]. */
static void copy_queries(const oscar_cache *cache, const step_block *block, int32_t head, int32_t n_rows, float *out, int64_t stride) {
    int32_t d = cache->layers[cache->step.layer].shape.head_dim;
    for (int32_t r = 0; r < n_rows; r++) memcpy(out + r * stride, query_row(cache, block, head, r), sizeof(float) * (size_t)d);
}

/* The same turned. */
static void rotate_queries(const oscar_cache *cache, const step_block *block, int32_t head, int32_t n_rows, float *out,
                           int64_t stride, thread_scratch *scratch) {
    const cache_layer *layer = &cache->layers[cache->step.layer];
    int32_t d = layer->shape.head_dim;
    const float *u = layer->k_codec[head].rotation;
    copy_queries(cache, block, head, n_rows, u ? scratch->out : out, u ? d : stride);
    if (u) attn_ops_current()->rotate(d, u, n_rows, scratch->out, d, out, stride);
}

void step_turn_queries(oscar_cache *cache, int32_t head, thread_scratch *scratch) {
    step_state *s = &cache->step;
    const cache_layer *layer = &cache->layers[s->layer];
    int32_t d = layer->shape.head_dim, first = head * layer->group;
    rotate_queries(cache, &s->blocks[0], head, layer->group, s->q + (size_t)first * (size_t)d, d, scratch);
}

/* Those rows, where they have been turned for all pieces. */
static void take_queries(const oscar_cache *cache, int32_t head, attn_rows *rows) {
    const step_state *s = &cache->step;
    int32_t d = rows->head_dim, first = head * rows->n_rows;
    for (int32_t r = 0; r < rows->n_rows; r++)
        memcpy(rows->q + (int64_t)r * rows->q_dim, s->q + (size_t)(first + r) * (size_t)d, sizeof(float) * (size_t)d);
}

/* Products of the queries with the keys' mean; sums of sixteen, whose order no compiler has to keep. */
static void mean_products(const oscar_cache *cache, const step_block *block, int32_t head, int32_t n_rows, float *bias) {
    const cache_layer *layer = &cache->layers[cache->step.layer];
    int32_t d = layer->shape.head_dim;
    const float *mean = layer->fit && layer->fit->k_mean ? layer->fit->k_mean + (size_t)head * (size_t)d : NULL;
    for (int32_t r = 0; r < n_rows; r++) {
        const float *q = query_row(cache, block, head, r);
        float sums[16] = {0};
        bias[r] = 0.0f;
        if (!mean) continue;
        for (int32_t i = 0; i < d; i += 16)
            for (int32_t j = 0; j < 16; j++) sums[j] += q[i + j] * mean[i + j];
        for (int32_t j = 0; j < 16; j++) bias[r] += sums[j];
    }
}

/* The tracked pairs of every query, side by side. */
static void gather_pairs(const oscar_cache *cache, const step_block *block, int32_t head, const attn_rows *rows,
                         float *pairs) {
    const cache_layer *layer = &cache->layers[cache->step.layer];
    const oscar_rope *rope = &cache->ropes[layer->rope].rope;
    const int32_t *tracked = layer->fit->tracked + head * layer->n_tracked;
    for (int32_t r = 0; r < rows->n_rows; r++, pairs += 2 * layer->n_tracked) {
        const float *q = query_row(cache, block, head, r);
        for (int32_t p = 0; p < layer->n_tracked; p++) {
            int32_t f = tracked[p];
            pairs[p] = q[rope_first(rope, f)];
            pairs[layer->n_tracked + p] = q[rope_second(rope, f)];
        }
    }
}

/* Whether pages that these rows see go through a decode kernel: history always, BF16 rows where it takes them. */
static bool decodes(const thread_scratch *scratch, bool history) {
    return scratch->decode_ops && (history || scratch->decode_ops->overlay);
}

/* Cosines and sines of the start of page b, [rope->n_pairs]. */
static struct attn_angles page_angles(const oscar_cache *cache, int32_t b) {
    const rope_table *rope = &cache->ropes[cache->layers[cache->step.layer].rope];
    const size_t at = (size_t)b * (size_t)rope->n_pairs;
    return (struct attn_angles){rope->page_cos + at, rope->page_sin + at};
}

/* The tracked pairs of every query turned back by the start of page b: decode kernels do that themselves. */
static void turn_queries(const oscar_cache *cache, int32_t head, int32_t b, bool history, attn_rows *rows, thread_scratch *scratch) {
    const cache_layer *layer = &cache->layers[cache->step.layer];
    if (layer->n_tracked == 0) return;
    const struct attn_angles angles = page_angles(cache, b);
    if (decodes(scratch, history)) {
        scratch->decode->here = angles;
        return;
    }
    const int32_t *tracked = layer->fit->tracked + head * layer->n_tracked;
    for (int32_t p = 0; p < layer->n_tracked; p++) {
        scratch->cosines[p] = angles.cosines[tracked[p]];
        scratch->sines[p] = angles.sines[tracked[p]];
    }
    attn_ops_current()->turn(rows, layer->n_tracked, scratch->pairs, scratch->cosines, scratch->sines);
}

/* A head's history in page b: keys, then values. */
static uint8_t *head_history(const oscar_cache *cache, const step_block *block, int32_t head, int32_t b) {
    const cache_layer *layer = &cache->layers[cache->step.layer];
    return layer_history(layer, pool_page(&cache->history, cache->seqs[block->seq].history[b]), head);
}

/* Float pages: whole ones in place, the written part of the last one copied. */
static void exact_tile(const oscar_cache *cache, const step_block *block, int32_t head, int32_t b, uint64_t valid,
                       attn_rows *rows, const uint64_t *masks, thread_scratch *scratch) {
    int32_t d = rows->head_dim;
    const float *keys = (const float *)(const void *)head_history(cache, block, head, b);
    const float *values = keys + (size_t)d * OSCAR_PAGE_TOKENS;
    int64_t written = cache->seq_next[block->seq];
    if ((int64_t)(b + 1) * OSCAR_PAGE_TOKENS > written) {
        uint32_t keep[OSCAR_PAGE_TOKENS];
        for (int32_t t = 0; t < OSCAR_PAGE_TOKENS; t++) keep[t] = valid >> t & 1 ? ~0u : 0;
        for (int32_t i = 0; i < d * OSCAR_PAGE_TOKENS; i += OSCAR_PAGE_TOKENS)
            for (int32_t t = 0; t < OSCAR_PAGE_TOKENS; t++)
                scratch->keys[i + t] = bits_float(float_bits(keys[i + t]) & keep[t]);
        for (int32_t t = 0; t < OSCAR_PAGE_TOKENS; t++)
            for (int32_t i = 0; i < d; i++)
                scratch->values[t * d + i] = bits_float(float_bits(values[t * d + i]) & keep[t]);
        keys = scratch->keys;
        values = scratch->values;
    }
    attn_ops_current()->tile(rows, keys, values, masks);
}

/* Whether BF16 pages are read as they lie rather than through tiles. */
static bool few_rows(const attn_rows *rows) { return attn_ops_current()->tile_few && rows->n_rows <= ATTN_FEW_ROWS; }

/* Once for the pages of an item: what does not change from page to page. */
static void begin_pages(const oscar_cache *cache, const step_block *block, int32_t head, item_rows *item,
                        thread_scratch *scratch) {
    const cache_layer *layer = &cache->layers[cache->step.layer];
    attn_rows *rows = &item->of[HISTORY];
    size_t table = 2 * (size_t)layer->n_tracked * OSCAR_PAGE_TOKENS;
    const float *bias = layer->bias_table + (size_t)head * table;
    mean_products(cache, block, head, rows->n_rows, scratch->q_bias);
    if (layer->n_tracked) gather_pairs(cache, block, head, rows, scratch->pairs);
    scratch->decode->rows = rows;
    scratch->decode->k_side = &layer->k_side;
    scratch->decode->v_side = &layer->v_side;
    scratch->decode->bias_table = bias;
    scratch->decode->pairs = scratch->pairs;
    scratch->decode->middle = layer->middle + (size_t)head * 2 * (size_t)layer->n_tracked;
    scratch->decode->tracked = layer->n_tracked ? layer->fit->tracked + head * layer->n_tracked : NULL;
    scratch->decode_ops = cache_is_exact(cache) ? NULL : attn_decode_current();
    scratch->decode->table = layer->decode_table && layer->decode == scratch->decode_ops
                                 ? layer->decode_table + (size_t)head * layer->decode_table_bytes
                                 : NULL;
    if (scratch->decode_ops && scratch->decode_ops->open) scratch->decode_ops->open(scratch->decode);
    if (layer->n_tracked && !(scratch->decode_ops && (scratch->decode_ops->overlay || few_rows(rows)))) /* some page is a tile */
        memcpy(scratch->keys + (size_t)rows->head_dim * OSCAR_PAGE_TOKENS, bias, sizeof(float) * table);
}

/* Puts the rows in hand that see the history, or BF16 rows; the first time with their queries. */
static void take_rows(const oscar_cache *cache, const step_block *block, int32_t head, item_rows *item, int which,
                      thread_scratch *scratch) {
    attn_rows *rows = &item->of[which];
    const attn_decode_ops *ops = scratch->decode_ops;
    scratch->decode->rows = rows;
    if (item->begun[which]) return;
    item->begun[which] = true;
    if (which == NEAR) {
        copy_queries(cache, block, head, rows->n_rows, rows->q, rows->q_dim);
        if (ops && ops->overlay) ops->begin_overlay(scratch->decode);
        return;
    }
    if (cache->step.queries_turned)
        take_queries(cache, head, rows);
    else
        rotate_queries(cache, block, head, rows->n_rows, rows->q, rows->q_dim, scratch);
    if (ops) ops->begin(scratch->decode);
}

/* Asks for the first bytes of a head's history in page b: pages lie anywhere in memory, so the processor cannot know. The first
 * one is read, since what is only asked for may be dropped where its translation is not at hand. */
static void prefetch_history(const oscar_cache *cache, const step_block *block, int32_t head, int32_t b, size_t bytes) {
    const uint8_t *base = head_history(cache, block, head, b);
    (void)*(const volatile uint8_t *)base;
    const bool asks_near = isa_asks_near();
    for (size_t i = 0; i < bytes; i += 64) attn_ask_line(base + i, asks_near);
}

/* Of a head's history, the values of the next page and the keys of it or of one after it (-1: none), for a kernel to ask for. */
static void ask_ahead(const oscar_cache *cache, const step_block *block, int32_t head, int32_t next, int32_t after,
                      thread_scratch *scratch) {
    const cache_layer *layer = &cache->layers[cache->step.layer];
    const size_t keys = layer->history_value_offset;
    const uint8_t *next_head = next >= 0 ? head_history(cache, block, head, next) : NULL;
    const uint8_t *after_head = after >= 0 ? head_history(cache, block, head, after) : NULL;
    attn_ask_for(scratch->decode, after_head, after_head ? keys : 0, next_head ? next_head + keys : NULL,
                 next_head ? layer->history_head_bytes - keys : 0);
}

/* next: the page whose history follows, or -1. */
static void history_tile(const oscar_cache *cache, const step_block *block, int32_t head, int32_t b, int32_t next, uint64_t valid,
                         attn_rows *rows, const uint64_t *masks, thread_scratch *scratch) {
    const cache_layer *layer = &cache->layers[cache->step.layer];
    if (cache_is_exact(cache)) {
        exact_tile(cache, block, head, b, valid, rows, masks, scratch);
        return;
    }
    uint8_t *base = head_history(cache, block, head, b);
    if (scratch->decode_ops) {
        scratch->decode->next_keys = next >= 0 ? head_history(cache, block, head, next) : NULL;
        scratch->decode_ops->page(scratch->decode, base, base + layer->history_value_offset, valid, masks);
        return;
    }
    const attn_ops *ops = attn_ops_current();
    ops->unpack_keys(&layer->k_side, base, valid, scratch->keys);
    ops->unpack_values(&layer->v_side, base + layer->history_value_offset, valid, scratch->values);
    ops->tile(rows, scratch->keys, scratch->values, masks);
}

/* The BF16 rows of page b; NULL where there are none (b -1: no page). */
static uint8_t *overlay_page(const oscar_cache *cache, const step_block *block, int32_t b) {
    const int32_t at = b >= 0 ? cache->seqs[block->seq].overlay[b] : NO_PAGE;
    return at == NO_PAGE ? NULL : pool_page(&cache->overlay, at);
}

/* A head's BF16 rows of a page (NULL: none), for a kernel to ask for. */
static void ask_overlay(const cache_layer *layer, uint8_t *page, int32_t head, thread_scratch *scratch) {
    const size_t bytes = sizeof(uint16_t) * OSCAR_PAGE_TOKENS * (size_t)layer->shape.head_dim;
    if (page)
        attn_ask_for(scratch->decode, (const uint8_t *)layer_overlay_keys(layer, page, head), bytes,
                     (const uint8_t *)layer_overlay_values(layer, page, head), bytes);
    else
        attn_ask_for(scratch->decode, NULL, 0, NULL, 0);
}

/* next: the page whose BF16 rows may follow, or -1. */
static void overlay_tile(const oscar_cache *cache, const step_block *block, int32_t head, int32_t b, int32_t next, uint64_t valid,
                         attn_rows *rows, const uint64_t *masks, thread_scratch *scratch) {
    const cache_layer *layer = &cache->layers[cache->step.layer];
    const attn_ops *ops = attn_ops_current();
    uint8_t *page = overlay_page(cache, block, b), *next_page = overlay_page(cache, block, next);
    const uint16_t *keys = layer_overlay_keys(layer, page, head), *values = layer_overlay_values(layer, page, head);
    if (decodes(scratch, false)) {
        ask_overlay(layer, next_page, head, scratch);
        scratch->decode_ops->overlay(scratch->decode, keys, values, valid, masks);
        return;
    }
    if (few_rows(rows)) {
        ops->tile_few(rows, keys, values, scratch->decode->bias_table, valid, masks,
                      next_page ? layer_overlay_keys(layer, next_page, head) : NULL);
        return;
    }
    ops->widen_keys(rows->head_dim, keys, valid, scratch->keys);
    ops->widen_values(rows->head_dim, values, valid, scratch->values);
    ops->tile(rows, scratch->keys, scratch->values, masks);
}

/* What the queries of a block see of page b; whether it is anything. */
static bool page_masks(const oscar_cache *cache, const step_block *block, int32_t b, thread_scratch *scratch, uint64_t *any_far,
                       uint64_t *any_near) {
    const step_state *s = &cache->step;
    const cache_layer *layer = &cache->layers[s->layer];
    *any_far = *any_near = 0;
    for (int32_t i = 0; i < block->count; i++) {
        uint64_t far, near;
        cache_masks(cache, &cache->seqs[block->seq], layer->shape.window, b, s->in.positions[s->queries[block->first + i]], &far, &near);
        for (int32_t j = 0; j < layer->group; j++) {
            scratch->far[i * layer->group + j] = far;
            scratch->near[i * layer->group + j] = near;
        }
        *any_far |= far;
        *any_near |= near;
    }
    return *any_far | *any_near;
}

bool step_sees_history(const oscar_cache *cache) {
    const step_state *s = &cache->step;
    const step_block *block = &s->blocks[0];
    int32_t window = cache->layers[s->layer].shape.window;
    for (int32_t b = block->page_begin; b < block->page_end; b++) {
        uint64_t far, near;
        cache_masks(cache, &cache->seqs[block->seq], window, b, s->in.positions[s->queries[block->first]], &far, &near);
        if (far) return true;
    }
    return false;
}

/* Of pages [begin, end) those from here on have no history to see. */
static int32_t history_end(const oscar_cache *cache, const step_block *block, int32_t begin, int32_t end) {
    const step_state *s = &cache->step;
    int64_t seen = (int64_t)s->in.positions[s->queries[block->first + block->count - 1]] - cache->options.recent;
    return seen < 0 ? begin : seen / OSCAR_PAGE_TOKENS + 1 < end ? (int32_t)(seen / OSCAR_PAGE_TOKENS + 1) : end;
}

/* Asks for a head's history in the first page of [begin, end), and for the keys of the second: what kernels do not ask for
 * themselves. */
static void prefetch_first(const oscar_cache *cache, const step_block *block, int32_t head, int32_t begin, int32_t end) {
    if (cache_is_exact(cache) || !attn_decode_current()) return;
    const cache_layer *layer = &cache->layers[cache->step.layer];
    const int32_t far_end = history_end(cache, block, begin, end);
    for (int32_t b = begin; b < far_end && b < begin + 2; b++)
        prefetch_history(cache, block, head, b, b == begin ? layer->history_head_bytes : layer->history_value_offset);
}

/* Pages [begin, end); after them the thread goes on to `horizon`. */
static void attend_pages(const oscar_cache *cache, const step_block *block, int32_t head, int32_t begin, int32_t end,
                         int32_t horizon, item_rows *item, thread_scratch *scratch) {
    const step_state *s = &cache->step;
    const cache_layer *layer = &cache->layers[s->layer];
    attn_rows *history = &item->of[HISTORY], *near_rows = &item->of[NEAR];
    const int32_t far_end = history_end(cache, block, begin, horizon);
    /* The next page's keys are read with this page's values (AMX), so they are asked for two pages ahead; into the nearest cache,
     * which is small, one. */
    const int32_t keys_ahead = isa_asks_near() ? 1 : 2;
    for (int32_t b = begin; b < end; b++) {
        uint64_t far, near;
        if (!page_masks(cache, block, b, scratch, &far, &near)) continue;
        /* The next page, if it has history to see. */
        int32_t next = b + 1 < far_end ? b + 1 : -1;
        if (far) {
            if (scratch->decode_ops) ask_ahead(cache, block, head, next, b + keys_ahead < far_end ? b + keys_ahead : -1, scratch);
            take_rows(cache, block, head, item, HISTORY, scratch);
            turn_queries(cache, head, b, true, history, scratch);
            if (layer->n_tracked && next >= 0) scratch->decode->next = page_angles(cache, next);
            history_tile(cache, block, head, b, next, far, history, scratch->far, scratch);
        }
        if (near) {
            take_rows(cache, block, head, item, NEAR, scratch);
            turn_queries(cache, head, b, false, near_rows, scratch);
            overlay_tile(cache, block, head, b, b + 1 < horizon ? b + 1 : -1, near, near_rows, scratch->near, scratch);
        }
    }
}

/* Whether row r saw anything; NaN counts. */
static bool row_saw(const attn_rows *rows, int32_t r) { return rows->row_max[r] != -INFINITY; }

/* exp(max - top), 0 where nothing was seen. */
static float share_of(float max, float top) { return max == -INFINITY ? 0.0f : expf(max - top); }

/* Divides both results of every row by its softmax sum; near->row_sum receives the share that the values' mean has. */
static void divide_rows(const oscar_cache *cache, int32_t head, item_rows *item) {
    const step_state *s = &cache->step;
    const attn_rows *far = &item->of[HISTORY], *near = &item->of[NEAR];
    int32_t group = cache->layers[s->layer].group, d = far->head_dim;
    for (int32_t r = 0; r < far->n_rows; r++) {
        const float *sink = s->in.sink_logits ? &s->in.sink_logits[head * group + r % group] : NULL;
        float top = far->row_max[r] > near->row_max[r] ? far->row_max[r] : near->row_max[r];
        if (sink && *sink > top) top = *sink;
        float a = share_of(far->row_max[r], top), b = share_of(near->row_max[r], top);
        float seen = far->row_sum[r] * a + near->row_sum[r] * b, total = seen + (sink ? expf(*sink - top) : 0.0f);
        for (int32_t i = 0; i < d; i++) {
            far->acc[r * d + i] *= a / total;
            near->acc[r * d + i] *= b / total;
        }
        near->row_sum[r] = seen / total;
    }
}

/* Turns back what came from the history and writes the rows out. */
static void write_rows(const oscar_cache *cache, const step_block *block, int32_t head, item_rows *item, thread_scratch *scratch) {
    const step_state *s = &cache->step;
    const cache_layer *layer = &cache->layers[s->layer];
    const attn_rows *far = &item->of[HISTORY], *near = &item->of[NEAR];
    int32_t d = far->head_dim, group = layer->group;
    const float *back = layer->v_codec[head].rotation ? layer->v_back + (size_t)head * (size_t)d * (size_t)d : NULL;
    const float *mean = layer->fit && layer->fit->v_mean ? layer->fit->v_mean + (size_t)head * (size_t)d : NULL;
    divide_rows(cache, head, item);
    const float *out = far->acc;
    bool any = false;
    for (int32_t r = 0; r < far->n_rows; r++) any |= row_saw(far, r);
    if (back && any) {
        attn_ops_current()->rotate(d, back, far->n_rows, far->acc, d, scratch->out, d);
        out = scratch->out;
    }
    for (int32_t r = 0; r < far->n_rows; r++) {
        int32_t token = s->queries[block->first + r / group];
        float *to = s->in.out + token * s->in.out_token_stride + (head * group + r % group) * s->in.out_head_stride;
        const float *turned = out + (size_t)r * (size_t)d, *plain = near->acc + (size_t)r * (size_t)d;
        /* What is not there is left out, not added as zeros: a row's bits do not depend on its block. */
        bool history = row_saw(far, r);
        memcpy(to, history ? turned : plain, sizeof(float) * (size_t)d);
        for (int32_t i = 0; i < d && history && row_saw(near, r); i++) to[i] += plain[i];
        for (int32_t i = 0; i < d && mean; i++) to[i] += near->row_sum[r] * mean[i];
    }
}

/* A partial result: [history, BF16 rows] of [n_rows] maxima, [n_rows] sums, [n_rows, d] values. */
static item_rows partial_rows(const oscar_cache *cache, const step_block *block, int32_t piece, int32_t head, const item_rows *like) {
    int32_t heads = cache->layers[cache->step.layer].shape.n_kv_heads;
    float *at = cache->step.partial + (size_t)(block->partial + piece * heads + head) * cache->partial_floats;
    item_rows partial = *like;
    place_rows(&partial, like->of[0].n_rows, (float *[2]){at, at + cache->partial_floats / 2});
    return partial;
}

/* rows += more, which lies behind it. */
static void merge_rows(attn_rows *rows, const attn_rows *more) {
    int32_t d = rows->head_dim;
    for (int32_t r = 0; r < rows->n_rows; r++) {
        float ours = rows->row_max[r], theirs = more->row_max[r];
        if (theirs == -INFINITY) continue;
        const float *from = more->acc + (size_t)r * (size_t)d;
        float *to = rows->acc + (size_t)r * (size_t)d;
        if (ours > theirs) { /* whose factor is 1 */
            float b = expf(theirs - ours);
            for (int32_t i = 0; i < d; i++) to[i] += from[i] * b;
            rows->row_sum[r] += more->row_sum[r] * b;
            continue;
        }
        float a = share_of(ours, theirs);
        for (int32_t i = 0; i < d; i++) to[i] = to[i] * a + from[i];
        rows->row_sum[r] = rows->row_sum[r] * a + more->row_sum[r];
        rows->row_max[r] = theirs;
    }
}

static void store_partial(const item_rows *item, item_rows *partial) {
    size_t n = (size_t)item->of[0].n_rows, d = (size_t)item->of[0].head_dim;
    for (int k = 0; k < 2; k++) {
        memcpy(partial->of[k].row_max, item->of[k].row_max, sizeof(float) * n);
        memcpy(partial->of[k].row_sum, item->of[k].row_sum, sizeof(float) * n);
        if (item->begun[k]) memcpy(partial->of[k].acc, item->of[k].acc, sizeof(float) * n * d);
    }
}

/* One piece of a shared block; whoever is last merges all, in order. */
static void attend_piece(oscar_cache *cache, const step_block *block, int32_t head, int32_t piece, int32_t begin,
                         int32_t end, int32_t horizon, item_rows *item, thread_scratch *scratch) {
    step_state *s = &cache->step;
    attend_pages(cache, block, head, begin, end, horizon, item, scratch);
    item_rows partial = partial_rows(cache, block, piece, head, item);
    store_partial(item, &partial);
    if (atomic_fetch_add(&s->arrived[block->partial + head], 1) + 1 < block->n_pieces) return;
    clear_rows(item);
    for (int32_t k = 0; k < block->n_pieces; k++) {
        partial = partial_rows(cache, block, k, head, item);
        for (int i = 0; i < 2; i++) merge_rows(&item->of[i], &partial.of[i]);
    }
    write_rows(cache, block, head, item, scratch);
}

/* The pages of a piece that the block sees. */
static int32_t piece_begin(const step_block *block, int32_t piece) {
    const int32_t begin = piece_start(block->first_piece + piece);
    return begin > block->page_begin ? begin : block->page_begin;
}
static int32_t piece_end(const step_block *block, int32_t piece) {
    const int32_t end = piece_start(block->first_piece + piece + 1);
    return end < block->page_end ? end : block->page_end;
}

/* `count` pieces of a shared block from `piece` on, or all of another. */
static void attend_item(oscar_cache *cache, const step_block *block, int32_t head, int32_t piece, int32_t count,
                        thread_scratch *scratch) {
    item_rows item = make_rows(cache, block, scratch), total = item;
    place_rows(&total, ATTN_ROWS_MAX, scratch->total);
    const int32_t first = piece, last = block->shared ? piece + count : block->n_pieces, horizon = piece_end(block, last - 1);
    if (block->n_pieces > 1 && !block->shared) clear_rows(&total);
    prefetch_first(cache, block, head, piece_begin(block, first), horizon);
    begin_pages(cache, block, head, &item, scratch);
    for (; piece < last; piece++) {
        const int32_t begin = piece_begin(block, piece), end = piece_end(block, piece);
        if (piece > first) clear_rows(&item);
        if (block->shared) {
            attend_piece(cache, block, head, piece, begin, end, horizon, &item, scratch);
            continue;
        }
        attend_pages(cache, block, head, begin, end, horizon, &item, scratch);
        for (int k = 0; block->n_pieces > 1 && k < 2; k++) merge_rows(&total.of[k], &item.of[k]);
    }
    if (scratch->decode_ops && scratch->decode_ops->end) scratch->decode_ops->end(scratch->decode);
    if (block->shared) return;
    write_rows(cache, block, head, block->n_pieces > 1 ? &total : &item, scratch);
}

/* Entries of the list of items, each for one head, that a thread takes at once. Every share of a block prepares its queries
 * anew, so shares are as large as a few for each thread allow; alone, a thread has nobody to share with. */
static int32_t share_of_items(const step_state *s, int32_t n_threads) {
    const int32_t shares = n_threads > 1 ? SHARES_A_THREAD * n_threads : 1;
    return s->n_items > shares ? s->n_items / shares : 1;
}

/* Entries [first, end) of the list, which has pieces in falling order. */
static void attend_entries(oscar_cache *cache, int32_t head, int32_t first, int32_t end, thread_scratch *scratch) {
    const step_state *s = &cache->step;
    for (int32_t n; end > first; end -= n) {
        const step_block *block = &s->blocks[s->item_block[end - 1]];
        n = 1;
        while (block->shared && end - n > first && s->item_block[end - n - 1] == s->item_block[end - 1]) n++;
        attend_item(cache, block, head, s->item_piece[end - 1], n, scratch);
    }
}

void step_attend_phase(oscar_cache *cache, int32_t n_threads, thread_scratch *scratch) {
    step_state *s = &cache->step;
    const int32_t heads = cache->layers[s->layer].shape.n_kv_heads, entries = s->n_items / heads;
    const int32_t share = share_of_items(s, n_threads), n_shares = (entries + share - 1) / share * heads;
    /* Weights of what a query hardly sees end among the smallest floats: up to a fourth of a page's time. */
    const uint64_t floats = floats_flush();
    for (int32_t w; (w = atomic_fetch_add(&s->next[2].count, 1)) < n_shares;) {
        const int32_t first = w / heads * share, end = first + share < entries ? first + share : entries;
        attend_entries(cache, w % heads, first, end, scratch);
    }
    floats_restore(floats);
}
