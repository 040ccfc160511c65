/*
 * attn_decode_page.h - what decode kernels on the codes share: planes of codes, bytes of queries
 * and weights, the bias, the softmax, and the order of a page. Included after attn_vec_*.h; the
 * includer defines DOT_ROWS, the rows of the highest register block, and DECODE_BLOCKS(X), which is
 * X(1) .. X(DOT_ROWS). It may define WEIGHTS_MAX and split_weights(), and BIAS_ROWS with BIAS_BLOCKS(X), the same for the bias.
 *
 * Logits are powers of two here: products times logit_scale / ln 2. row_max is what weights are relative
 * to; it follows the largest logit only when that has grown by GROWTH_MAX, so that most pages need no
 * maximum across lanes and leave everything before them as it is.
 */
#ifndef OSCAR_ATTN_DECODE_PAGE_H
#define OSCAR_ATTN_DECODE_PAGE_H

#include "attn/attn_softmax.h"

#include <assert.h>

/* The largest magnitude as an integer: 127 high bytes, and a low byte of at most 127. */
#define BYTES_MAX 32512.0f
#ifndef WEIGHTS_MAX
#define WEIGHTS_MAX BYTES_MAX
#define split_weights vi_split_tile
#endif
#define LN_2 0.693147181f
#define GROWTH_MAX 8.0f
#include "attn/attn_decode_bias.h"

/* Bytes from a 64-byte block's start to vector v of it, and between vectors of one register block:
 * blocks of a tile row lie a stride apart, and an AVX2 vector is half a block. */
#define VEC_BYTES (4 * LANES)

/* One plane or two of codes, from the first vector of a register block on. A unit is 16 channels
 * (keys) or tokens (values). */
typedef struct code_plane {
    const uint8_t *low, *high;
    int64_t unit, high_unit; /* bytes to the next unit; high: of a second plane of 3 bits two units */
    int64_t vec, high_vec;   /* bytes to the next vector */
} code_plane;

/* The codes of quad f as bytes. high: the word of the second plane, shifted to this unit's half. */
INLINE vi quad_codes(const int bits, const int f, vi word, vi high) {
    vi codes = vi_and(f ? vi_shr(word, 2 * f) : word, vi_set1(0x03030303));
    if (bits == 3) {
        vi bit = f < 2 ? vi_shl(high, 2 - f) : vi_shr(high, f - 2);
        codes = vi_or(codes, vi_and(bit, vi_set1(0x04040404)));
    } else if (bits == 4) {
        vi pair = f < 1 ? vi_shl(high, 2) : vi_shr(high, 2 * f - 2);
        codes = vi_or(codes, vi_and(pair, vi_set1(0x0c0c0c0c)));
    }
    return codes;
}

/* Vector `vec` of the tokens of a key side. */
INLINE code_plane key_plane(const int bits, const page_side *side, const uint8_t *page, int vec) {
    int64_t n_blocks = side->head_dim / 16, n_high = bits == 3 ? (n_blocks + 1) / 2 : n_blocks;
    int64_t tile = vec / UNIT_VECS, part = vec % UNIT_VECS * VEC_BYTES;
    return (code_plane){
        .low = page + tile * n_blocks * 64 + part,
        .high = page + side->high_offset + tile * n_high * 64 + part,
        .unit = 64,
        .high_unit = 64,
        .vec = UNIT_VECS == 1 ? n_blocks * 64 : VEC_BYTES,
        .high_vec = UNIT_VECS == 1 ? n_high * 64 : VEC_BYTES,
    };
}

/* Vector `vec` of the channels of a value side. */
INLINE code_plane value_plane(const page_side *side, const uint8_t *page, int vec) {
    int64_t row_bytes = side->head_dim / 16 * 64;
    return (code_plane){
        .low = page + vec * VEC_BYTES,
        .high = page + side->high_offset + vec * VEC_BYTES,
        .unit = row_bytes,
        .high_unit = row_bytes,
        .vec = VEC_BYTES,
        .high_vec = VEC_BYTES,
    };
}

/* --- bytes ---------------------------------------------------------------------------------- */

/* n floats (a multiple of 16) to high and low bytes of round(x inverse); returns their sum. */
INLINE int32_t split_bytes(int n, const float *x, float inverse, int8_t *high, int8_t *low) {
    vi total = vi_zero();
    for (int i = 0; i < n; i += LANES) {
        vi y = vi_from_float(vf_mul(vf_load(x + i), vf_set1(inverse)));
        total = vi_add(total, y);
        vi_store_bytes(low + i, y);
        vi_store_bytes(high + i, vi_sra(vi_add(y, vi_set1(128)), 8));
    }
    return vi_sum(total);
}

/* What a magnitude is multiplied by to fill the bytes. Tiny ones could overflow it: they are 0. */
static inline float bytes_inverse(float top) { return top > 1e-30f ? BYTES_MAX / top : 0.0f; }

static inline void begin(attn_decode *d) {
    const attn_rows *rows = d->rows;
    const page_side *side = d->k_side;
    assert(rows->n_rows <= ATTN_ROWS_MAX);
    d->first = 0;
    for (int r = 0; r < rows->n_rows; r++)
        for (int g = 0; g < side->n_groups; g++) {
            const int at = g * side->group;
            const float *q = rows->q + (int64_t)r * rows->q_dim + at;
            vf top = vf_zero();
            for (int i = 0; i < side->group; i += LANES) top = vf_max(top, vf_abs(vf_load(q + i)));
            float inverse = bytes_inverse(vf_top(top));
            int32_t sum = split_bytes(side->group, q, inverse, d->q_bytes[r][0] + at, d->q_bytes[r][1] + at);
            d->q_scale[r][g] = inverse > 0.0f ? power_scale(rows) / inverse : 0.0f;
            d->q_sum[r][g] = d->q_scale[r][g] * (float)sum;
        }
}

/* --- softmax ---------------------------------------------------------------------------------- *
 * In passes over the rows between which what is a number a row is a vector of rows.
 */

typedef struct row_vectors {
    _Alignas(64) float at[ATTN_DECODE_ROWS][LANES]; /* to be reduced to a number a row */
} row_vectors;

/* One at a time, or the compiler calls memset for one vector. */
INLINE void clear_row(row_vectors *v, int r) {
    vf_store(v->at[r], vf_zero());
    __asm__("" ::: "memory");
}

/* The number of every row from its vector; whole vectors are written. */
INLINE void reduce_rows(int n, row_vectors *v, const bool top, float *out) {
#ifdef VF_HALF_ROWS
    if (n <= VF_HALF_ROWS) {
        for (int r = n; r < VF_HALF_ROWS; r++) clear_row(v, r);
        vf_store(out, top ? vf_top_half(v->at[0]) : vf_sum_half(v->at[0]));
        return;
    }
#endif
    for (int r = n; r % LANES != 0; r++) clear_row(v, r);
    for (int r = 0; r < n; r += LANES) vf_store(out + r, top ? vf_top_rows(v->at[r]) : vf_sum_rows(v->at[r]));
}

/* A row's logits relative to its row_max (or, before the first, to 0), capped and masked; returns their
 * maximum. score(): vector v of the logits of row r, plus an offset. */
INLINE vf row_logits(const attn_decode *d, int r, uint64_t mask, const void *scores,
                     vf (*score)(const attn_decode *d, const void *scores, int r, int v, vf offset), vf *x) {
    const attn_rows *rows = d->rows;
    const float before = rows->row_max[r], base = before > -INFINITY ? before * LOG2_E : 0.0f;
    const float bias = rows->q_bias[r] * power_scale(rows);
    if (rows->logit_softcap > 0.0f) {
        const vf cap = vf_set1(rows->logit_softcap * LOG2_E), offset = vf_set1(bias);
        UNROLL for (int v = 0; v < TILE_VECS; v++)
            x[v] = vf_sub(vf_mul(cap, vf_tanh(vf_div(score(d, scores, r, v, offset), cap))), vf_set1(base));
    } else {
        const vf offset = vf_set1(bias - base);
        UNROLL for (int v = 0; v < TILE_VECS; v++) x[v] = score(d, scores, r, v, offset);
    }
    if (mask != UINT64_MAX)
        UNROLL for (int v = 0; v < TILE_VECS; v++) x[v] = vf_hide(lane_bits(mask, v * LANES), x[v]);
    vf most = x[0];
    UNROLL for (int v = 1; v < TILE_VECS; v++) most = vf_max(most, x[v]);
    return most;
}

/* Moves row_max to a logit that lies `top` above it; returns by how much logits fall. alpha: the factor of
 * all before. */
static __attribute__((noinline)) float raise_base(attn_decode *d, int r, float top) {
    attn_rows *rows = d->rows;
    const float before = rows->row_max[r], base = before > -INFINITY ? before * LOG2_E : 0.0f;
    rows->row_max[r] = (base + top) * LN_2;
    const float fall = rows->row_max[r] * LOG2_E - base;
    float factor[LANES];
    vf_store(factor, vf_exp2(vf_set1(-fall)));
    d->alpha[r] = before > -INFINITY ? factor[0] : 0.0f;
    return fall;
}

/* Scores to weights, in place of the logits; `weigh`: times the steps of the values' only group, with the
 * largest of each row in tops and their sums times the offsets in p_offset. */
INLINE void softmax_rows(attn_decode *d, const uint64_t *masks, const bool weigh, const uint8_t *params, uint64_t valid,
                         float *tops, const void *scores,
                         vf (*score)(const attn_decode *d, const void *scores, int r, int v, vf offset)) {
    attn_rows *rows = d->rows;
    const int n = rows->n_rows;
    float sums[ATTN_DECODE_ROWS];
    row_vectors total, top, offset;
    vf steps[TILE_VECS], offsets[TILE_VECS];
    if (weigh)
        UNROLL for (int v = 0; v < TILE_VECS; v++) load_params(params, v * LANES, valid, &steps[v], &offsets[v]);
    for (int r = 0; r < n; r++) {
        float *weights = rows->logits + (int64_t)r * TILE;
        vf x[TILE_VECS], sum = vf_zero(), largest = vf_zero(), mean = vf_zero();
        vf most = row_logits(d, r, masks[r], scores, score, x);
        d->alpha[r] = 1.0f;
        if (__builtin_expect(vf_any_above(most, vf_set1(rows->row_max[r] > -INFINITY ? GROWTH_MAX : -INFINITY)), 0)) {
            const vf fall = vf_set1(raise_base(d, r, vf_top(most)));
            UNROLL for (int v = 0; v < TILE_VECS; v++) x[v] = vf_sub(x[v], fall);
        }
        UNROLL for (int v = 0; v < TILE_VECS; v++) x[v] = vf_exp2(x[v]);
        if (EXP2_LEAST && masks[r] != UINT64_MAX)
            UNROLL for (int v = 0; v < TILE_VECS; v++) x[v] = vf_keep(lane_bits(masks[r], v * LANES), x[v]);
        UNROLL for (int v = 0; v < TILE_VECS; v++) {
            vf p = x[v];
            sum = vf_add(sum, p);
            if (weigh) {
                mean = vf_fma(p, offsets[v], mean);
                p = vf_mul(p, steps[v]);
                largest = vf_max(largest, p);
            }
            vf_store(weights + v * LANES, p);
        }
        vf_store(total.at[r], sum);
        vf_store(top.at[r], largest);
        vf_store(offset.at[r], mean);
    }
    if (weigh) {
        reduce_rows(n, &top, true, tops);
        reduce_rows(n, &offset, false, d->p_offset);
    }
    reduce_rows(n, &total, false, sums);
    for (int r = 0; r < n; r++) rows->row_sum[r] = rows->row_sum[r] * d->alpha[r] + sums[r];
}

/* Weights times the steps of group g of the values, the largest of each row, and the sums of weights times
 * offsets: where several groups need the weights as they are. */
static void weigh_group(attn_decode *d, const uint8_t *params, uint64_t valid, float *tops, float *weighed) {
    const int n = d->rows->n_rows;
    const float *weights = d->rows->logits;
    vf steps[TILE_VECS], offsets[TILE_VECS];
    row_vectors top, offset;
    UNROLL for (int v = 0; v < TILE_VECS; v++) load_params(params, v * LANES, valid, &steps[v], &offsets[v]);
    for (int r = 0; r < n; r++) {
        vf most = vf_zero(), sum = vf_zero();
        UNROLL for (int v = 0; v < TILE_VECS; v++) {
            vf p = vf_load(weights + (int64_t)r * TILE + v * LANES);
            sum = vf_fma(p, offsets[v], sum);
            p = vf_mul(p, steps[v]);
            most = vf_max(most, p);
            vf_store(weighed + (int64_t)r * TILE + v * LANES, p);
        }
        vf_store(top.at[r], most);
        vf_store(offset.at[r], sum);
    }
    reduce_rows(n, &top, true, tops);
    reduce_rows(n, &offset, false, d->p_offset);
}

/* Weights times steps, at most `tops`, as bytes. Steps are not negative. */
INLINE void weight_bytes(attn_decode *d, const float *tops, const float *weighed) {
    const int n = d->rows->n_rows;
    float inverses[ATTN_DECODE_ROWS];
    for (int r = 0; r < n; r += LANES) {
        const vf top = vf_load(tops + r), tiny = vf_set1(1e-30f);
        vf_store(inverses + r, vf_where_less(top, tiny, vf_zero(), vf_div(vf_set1(WEIGHTS_MAX), top)));
        vf_store(d->p_scale + r, vf_mul(top, vf_set1(1.0f / WEIGHTS_MAX)));
    }
    for (int r = 0; r < n; r++) {
        vi y[TILE_VECS];
        UNROLL for (int v = 0; v < TILE_VECS; v++)
            y[v] = vi_from_float(vf_mul(vf_load(weighed + (int64_t)r * TILE + v * LANES), vf_set1(inverses[r])));
        split_weights(y, d->p_bytes[r][0], d->p_bytes[r][1]);
    }
}

/* --- a page --------------------------------------------------------------------------------- *
 * Rows pass a page in stripes of ATTN_DECODE_ROWS, for which d->rows is a view of some of them.
 */

typedef struct stripe {
    attn_rows *all, view;
} stripe;

/* Puts the first stripe from row `first` on in hand of which some row sees the page; returns its first
 * row, or -1 with all rows in hand again. */
static int stripe_from(stripe *s, attn_decode *d, const uint64_t *masks, int first) {
    const attn_rows *all = s->all;
    for (; first < all->n_rows; first += ATTN_DECODE_ROWS) {
        const int left = all->n_rows - first, count = left < ATTN_DECODE_ROWS ? left : ATTN_DECODE_ROWS;
        uint64_t any = 0;
        for (int r = 0; r < count; r++) any |= masks[first + r];
        if (any == 0) continue;
        if (all->n_rows <= ATTN_DECODE_ROWS) return 0; /* all in hand */
        s->view = *all;
        s->view.n_rows = count;
        s->view.q += (int64_t)first * all->q_dim;
        s->view.q_bias += first;
        s->view.row_max += first;
        s->view.row_sum += first;
        s->view.acc += (int64_t)first * all->head_dim;
        s->view.logits += (int64_t)first * TILE;
        d->rows = &s->view;
        d->first = first;
        return first;
    }
    d->rows = s->all;
    d->first = 0;
    return -1;
}

/* Logits as the kernels of a page left them. */
INLINE vf stored_score(const attn_decode *d, const void *scores, int r, int v, vf offset) {
    (void)scores;
    return vf_add(vf_load(d->rows->logits + (int64_t)r * TILE + v * LANES), offset);
}

/* Asks for the next lines that pages to come will read. Out of line, but where an includer (ASK_LINES) wants it otherwise: loops
 * around it are sensitive to what surrounds them. */
#ifndef ASK_LINES
#define ASK_LINES static __attribute__((noinline))
#endif
ASK_LINES void ask_lines(attn_decode *d, int32_t n) {
    for (int k = 0; k < 2; k++)
        for (; n > 0 && d->ask[k].at < d->ask[k].end; n--, d->ask[k].at += 64) attn_ask_line(d->ask[k].at, d->ask_near);
}

INLINE void ask_some(attn_decode *d) { ask_lines(d, d->ask_step); }

/* All that are left, at a page's end. */
static void ask_rest(attn_decode *d) { ask_lines(d, INT32_MAX); }

/* Softmax and values of a stripe. values: acc = alpha acc + weights times values of group g. */
INLINE void decode_values(attn_decode *d, const uint8_t *values, uint64_t valid, const uint64_t *masks, const void *scores,
                          vf (*score)(const attn_decode *d, const void *scores, int r, int v, vf offset),
                          void (*value_products)(attn_decode *d, const uint8_t *page, int g)) {
    const uint8_t *params = values + d->v_side->params_offset;
    float tops[ATTN_DECODE_ROWS];
    if (d->v_side->n_groups == 1) {
        softmax_rows(d, masks, true, params, valid, tops, scores, score);
        ask_some(d);
        weight_bytes(d, tops, d->rows->logits);
        value_products(d, values, 0);
        return;
    }
    _Alignas(64) float weighed[ATTN_DECODE_ROWS * TILE];
    softmax_rows(d, masks, false, NULL, valid, NULL, scores, score);
    for (int g = 0; g < d->v_side->n_groups; g++) {
        weigh_group(d, params + g * 256, valid, tops, weighed);
        weight_bytes(d, tops, weighed);
        value_products(d, values, g);
    }
}

#endif
