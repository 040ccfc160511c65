/*
 * attn_ref.c - attention over tiles in plain C: always builds, and defines the answer.
 *
 * Rows are independent: what a row receives does not depend on the other rows of the block, to the
 * bit. The other paths keep that, so results do not depend on how a prompt is cut into batches.
 */
#include "attn/attn.h"

#include <assert.h>
#include <math.h>

#define TILE 64

static uint32_t load_lane(const uint8_t *block, int lane) {
    const uint8_t *p = block + 4 * lane;
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* The code of (slot, channel), straight from the description in codec/page.h. */
static uint32_t code_at(const page_side *side, const uint8_t *page, int slot, int channel) {
    bool key = side->kind == PAGE_KEY;
    int tile = slot / 16, block = channel / 16, n_blocks = side->head_dim / 16;
    int lane = key ? slot % 16 : channel % 16; /* the index that has a word of its own */
    int i = key ? channel % 16 : slot % 16;    /* the index inside the word */
    int shift = 8 * (i % 4) + 2 * (i / 4);
    size_t at = ((size_t)tile * (size_t)n_blocks + (size_t)block) * 64;
    uint32_t code = load_lane(page + at, lane) >> shift & 3;
    if (side->bits == 4) {
        code |= (load_lane(page + side->high_offset + at, lane) >> shift & 3) << 2;
    } else if (side->bits == 3) {
        int i32 = key ? channel % 32 : slot % 32;
        int row = key ? tile : tile / 2;
        int row_blocks = key ? (side->head_dim + 31) / 32 : n_blocks;
        int high_block = key ? channel / 32 : block;
        size_t high = ((size_t)row * (size_t)row_blocks + (size_t)high_block) * 64;
        uint32_t word = load_lane(page + side->high_offset + high, lane);
        code |= (word >> (8 * (i32 % 4) + i32 / 4) & 1) << 2;
    }
    return code;
}

/* One number of a page. The product of an fp16 step and a code is exact in a float, so a fused
 * multiply-add elsewhere gives the same bits. */
static float number_at(const page_side *side, const uint8_t *page, int slot, int channel) {
    uint16_t step, offset;
    const uint8_t *params = page + side->params_offset + (size_t)(channel / side->group) * 256;
    memcpy(&step, params + 2 * slot, 2);
    memcpy(&offset, params + 128 + 2 * slot, 2);
    float product = fp16_to_float(step) * (float)code_at(side, page, slot, channel);
    return fp16_to_float(offset) + product;
}

static void unpack_keys(const page_side *side, const uint8_t *page, uint64_t valid, float *keys) {
    for (int c = 0; c < side->head_dim; c++)
        for (int t = 0; t < TILE; t++)
            keys[c * TILE + t] = valid >> t & 1 ? number_at(side, page, t, c) : 0.0f;
}

static void unpack_values(const page_side *side, const uint8_t *page, uint64_t valid,
                          float *values) {
    int d = side->head_dim;
    for (int t = 0; t < TILE; t++)
        for (int c = 0; c < d; c++)
            values[t * d + c] = valid >> t & 1 ? number_at(side, page, t, c) : 0.0f;
}

static void widen_keys(int32_t head_dim, const uint16_t *page, uint64_t valid, float *keys) {
    for (int c = 0; c < head_dim; c++)
        for (int t = 0; t < TILE; t++)
            keys[c * TILE + t] = valid >> t & 1 ? bf16_to_float(page[page_bf16_at(PAGE_KEY, head_dim, t, c)]) : 0.0f;
}

static void widen_values(int32_t head_dim, const uint16_t *page, uint64_t valid, float *values) {
    for (int t = 0; t < TILE; t++)
        for (int c = 0; c < head_dim; c++)
            values[t * head_dim + c] =
                valid >> t & 1 ? bf16_to_float(page[page_bf16_at(PAGE_VALUE, head_dim, t, c)]) : 0.0f;
}

static void widen_half(int32_t n, const uint16_t *x, float *y) {
    for (int32_t i = 0; i < n; i++) y[i] = fp16_to_float(x[i]);
}

/* logits[t] = what the softmax sees of row r at position t: -inf where the mask hides it. */
static void row_logits(const attn_rows *rows, int r, const float *keys, uint64_t mask,
                       float *logits) {
    const float *q = rows->q + (int64_t)r * rows->q_dim;
    float cap = rows->logit_softcap;
    for (int t = 0; t < TILE; t++) logits[t] = 0.0f;
    for (int c = 0; c < rows->q_dim; c++)
        for (int t = 0; t < TILE; t++) logits[t] += q[c] * keys[c * TILE + t];
    for (int t = 0; t < TILE; t++) {
        float logit = (logits[t] + rows->q_bias[r]) * rows->logit_scale;
        if (cap > 0.0f) logit = cap * tanhf(logit / cap);
        logits[t] = mask >> t & 1 ? logit : -INFINITY;
    }
}

/* Turns logits into weights relative to the new maximum; returns the factor of all that was summed
 * before. The maximum starts at -inf: never subtract it from itself. */
static float row_softmax(attn_rows *rows, int r, float *logits) {
    float before = rows->row_max[r], now = before, sum = 0.0f;
    for (int t = 0; t < TILE; t++) now = logits[t] > now ? logits[t] : now;
    float base = now > -INFINITY ? now : 0.0f;
    float alpha = expf(before - base);
    for (int t = 0; t < TILE; t++) {
        logits[t] = expf(logits[t] - base);
        sum += logits[t];
    }
    rows->row_max[r] = now;
    rows->row_sum[r] = rows->row_sum[r] * alpha + sum;
    return alpha;
}

static void tile(attn_rows *rows, const float *keys, const float *values, const uint64_t *masks) {
    int d = rows->head_dim;
    assert(rows->n_rows <= ATTN_ROWS_MAX);
    for (int r = 0; r < rows->n_rows; r++) {
        if (masks[r] == 0) continue;
        float *weights = rows->logits + (int64_t)r * TILE;
        float *acc = rows->acc + (int64_t)r * d;
        row_logits(rows, r, keys, masks[r], weights);
        float alpha = row_softmax(rows, r, weights);
        for (int c = 0; c < d; c++) acc[c] *= alpha;
        for (int t = 0; t < TILE; t++)
            for (int c = 0; c < d; c++) acc[c] += weights[t] * values[(int64_t)t * d + c];
    }
}

static void rotate(int32_t head_dim, const float *u, int32_t n_rows, const float *x,
                   int64_t x_stride, float *y, int64_t y_stride) {
    for (int r = 0; r < n_rows; r++) {
        const float *in = x + r * x_stride;
        float *out = y + r * y_stride;
        for (int j = 0; j < head_dim; j++) out[j] = 0.0f;
        for (int i = 0; i < head_dim; i++)
            for (int j = 0; j < head_dim; j++) out[j] += in[i] * u[(int64_t)i * head_dim + j];
    }
}

static void turn(attn_rows *rows, int32_t n_pairs, const float *pairs, const float *cosines,
                 const float *sines) {
    for (int r = 0; r < rows->n_rows; r++, pairs += 2 * n_pairs) {
        float *out = rows->q + (int64_t)r * rows->q_dim + rows->head_dim;
        for (int p = 0; p < n_pairs; p++) {
            float x = pairs[p], y = pairs[n_pairs + p];
            out[2 * p] = x * cosines[p] + y * sines[p];
            out[2 * p + 1] = y * cosines[p] - x * sines[p];
        }
    }
}

const attn_ops attn_ops_ref = {
    .name = "ref",
    .unpack_keys = unpack_keys,
    .unpack_values = unpack_values,
    .widen_keys = widen_keys,
    .widen_values = widen_values,
    .widen_half = widen_half,
    .tile = tile,
    .rotate = rotate,
    .turn = turn,
};
