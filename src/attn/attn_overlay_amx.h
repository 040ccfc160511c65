/*
 * attn_overlay_amx.h - attention of any rows over BF16 rows with AMX: products of tiles of BF16
 * numbers. Included by attn_decode_int2_amx.c.
 *
 * A page of BF16 rows has the shape of the B operands already; queries and weights are the sum of two
 * BF16 numbers, which keeps 16 to 17 bits. Rows pass in stripes of 16. Tiles 0, 1: A, high and low; 2, 3: B; 4-7: C.
 */
#ifndef OSCAR_ATTN_OVERLAY_AMX_H
#define OSCAR_ATTN_OVERLAY_AMX_H

#include "attn/attn_amx.h"

static int padded(int head_dim) { return (head_dim + 31) / 32 * 32; }

/* --- operands ------------------------------------------------------------------------------- */

INLINE void store_halves(vf x, uint16_t *high, uint16_t *low) {
    vi upper, lower;
    split_bf16(x, &upper, &lower);
    _mm256_storeu_si256((__m256i *)(void *)high, _mm512_cvtepi32_epi16(vi_shr(upper, 16)));
    _mm256_storeu_si256((__m256i *)(void *)low, _mm512_cvtepi32_epi16(vi_shr(lower, 16)));
}

static void overlay_begin(attn_decode *d) {
    const attn_rows *rows = d->rows;
    const int dim = rows->head_dim, width = padded(dim);
    const vf scale = vf_set1(power_scale(rows));
    for (int r = 0; r < rows->n_rows; r++) {
        const float *q = rows->q + (int64_t)r * rows->q_dim;
        uint16_t *high = d->q_halves[0] + r * width, *low = d->q_halves[1] + r * width;
        for (int i = 0; i < dim; i += 16) store_halves(vf_mul(vf_load(q + i), scale), high + i, low + i);
        if (width > dim) {
            memset(high + dim, 0, 2 * (size_t)(width - dim));
            memset(low + dim, 0, 2 * (size_t)(width - dim));
        }
    }
}

/* Channels up to a whole chunk: queries hold zeros there, so any finite number would do. */
static void pad_keys(int head_dim, uint16_t *keys) {
    if (head_dim % 32) memset(keys + head_dim * TILE, 0, sizeof(uint16_t) * 16 * TILE);
}

/* Tiles of 16 tokens up to the last valid one: what lies behind them in a page that is not full is neither read nor
 * multiplied. Its weights would be zeros. */
static int valid_tiles(uint64_t valid) { return (63 - __builtin_clzll(valid)) / 16 + 1; }

/* A page of BF16 rows has the shape of the operands already. Columns of the keys that are not valid go
 * no further than their logits, which masks hide; values meet a weight of zero, so they must be
 * finite: a page that is not full is copied with zeros in them. */
static void take_overlay(attn_decode *d, const uint16_t *keys, const uint16_t *values, uint64_t valid) {
    const int dim = d->rows->head_dim;
    d->b_keys = keys;
    d->b_values = values;
    if (dim % 32) {
        memcpy(d->tile_keys, keys, sizeof(uint16_t) * (size_t)(dim * TILE));
        pad_keys(dim, d->tile_keys);
        d->b_keys = d->tile_keys;
    }
    if (valid == UINT64_MAX) return;
    for (int t = 0; t < (valid_tiles(valid) + 1) / 2 * 32; t += 2) {
        const uint32_t first = valid >> t & 1 ? 0xffffu : 0, second = valid >> (t + 1) & 1 ? 0xffff0000u : 0;
        const vi keep = vi_set1((int)(first | second));
        for (int c = 0; c < dim; c += 16) {
            const int at = t * dim + 2 * c;
            _mm512_storeu_si512(d->tile_values + at, vi_and(vi_load((const uint8_t *)(values + at)), keep));
        }
    }
    d->b_values = d->tile_values;
}

/* --- products ------------------------------------------------------------------------------- */

typedef struct stripe_products {
    _Alignas(64) float at[ATTN_DECODE_ROWS][64];
} stripe_products;

/* C += A B for tile t of the columns, high and low. */
#define STRIPE_PRODUCT(t, b_tile, c_tile)                                                          \
    if (n_tiles > t) {                                                                             \
        _tile_loadd(b_tile, at + 32 * t, b_row);                                                   \
        _tile_dpbf16ps(c_tile, 0, b_tile);                                                         \
        _tile_dpbf16ps(c_tile, 1, b_tile);                                                         \
    }

/* 16 rows of A (high and low, a_row bytes apart) times n_tiles tiles of 16 columns of B, other columns zeros; b: pairs
 * of k in rows b_row bytes apart; n_chunks times 32 in k. */
INLINE void multiply_halves(const uint16_t *high, const uint16_t *low, int64_t a_row, const uint16_t *b, int64_t b_row, int n_chunks,
                            const int n_tiles, stripe_products *out) {
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int c = 0; c < n_chunks; c++) {
        const uint16_t *at = b + c * 8 * b_row; /* 16 rows, in numbers of two bytes */
        _tile_loadd(0, high + 32 * c, a_row);
        _tile_loadd(1, low + 32 * c, a_row);
        STRIPE_PRODUCT(0, 2, 4)
        STRIPE_PRODUCT(1, 3, 5)
        STRIPE_PRODUCT(2, 2, 6)
        STRIPE_PRODUCT(3, 3, 7)
    }
    _tile_stored(4, out->at[0], 256);
    _tile_stored(5, out->at[0] + 16, 256);
    _tile_stored(6, out->at[0] + 32, 256);
    _tile_stored(7, out->at[0] + 48, 256);
}

/* The same for 1 to 4 tiles. */
static void multiply_tiles(const uint16_t *high, const uint16_t *low, int64_t a_row, const uint16_t *b, int64_t b_row, int n_chunks,
                           int n_tiles, stripe_products *out) {
    TILE_READS_MEMORY();
    switch (n_tiles) {
    case 4: multiply_halves(high, low, a_row, b, b_row, n_chunks, 4, out); break;
    case 3: multiply_halves(high, low, a_row, b, b_row, n_chunks, 3, out); break;
    case 2: multiply_halves(high, low, a_row, b, b_row, n_chunks, 2, out); break;
    default: multiply_halves(high, low, a_row, b, b_row, n_chunks, 1, out); break;
    }
    TILE_READS_MEMORY();
}

static void stripe_keys(attn_decode *d, int n_tiles, stripe_products *out) {
    const int width = padded(d->rows->head_dim);
    const int64_t at = (int64_t)d->first * width;
    multiply_tiles(d->q_halves[0] + at, d->q_halves[1] + at, 2 * width, d->b_keys, 4 * TILE, width / 32, n_tiles, out);
}

INLINE vf overlay_score(const attn_decode *d, const void *scores, int r, int v, vf offset) {
    (void)d;
    return vf_add(vf_load(((const stripe_products *)scores)->at[r] + 16 * v), offset);
}

INLINE vf overlay_score_bias(const attn_decode *d, const void *scores, int r, int v, vf offset) {
    return add_bias(d, r, v, overlay_score(d, scores, r, v, offset));
}

/* More pairs than tiles: the vector kernels add to logits. */
static void stripe_many_pairs(attn_decode *d, const stripe_products *keys) {
    for (int r = 0; r < d->rows->n_rows; r++) memcpy(d->rows->logits + r * TILE, keys->at[r], sizeof keys->at[r]);
    bias_products(d);
}

/* acc = alpha acc + weights times values, of the first n_chunks times 32 tokens. */
static void stripe_values(const attn_decode *d, int n_chunks) {
    const attn_rows *rows = d->rows;
    const int dim = rows->head_dim;
    _Alignas(64) uint16_t halves[2][ATTN_DECODE_ROWS][TILE];
    stripe_products products;
    for (int r = 0; r < rows->n_rows; r++)
        for (int t = 0; t < TILE; t += 16) store_halves(vf_load(rows->logits + r * TILE + t), halves[0][r] + t, halves[1][r] + t);
    for (int c = 0; c < dim; c += 64) {
        const int n_tiles = dim - c < 64 ? (dim - c) / 16 : 4;
        multiply_tiles(halves[0][0], halves[1][0], 2 * TILE, d->b_values + 2 * c, 4 * dim, n_chunks, n_tiles, &products);
        for (int r = 0; r < rows->n_rows; r++) {
            float *out = rows->acc + (int64_t)r * dim + c;
            const vf alpha = vf_set1(d->alpha[r]);
            for (int v = 0; v < n_tiles; v++)
                vf_store(out + 16 * v, vf_fma(vf_load(out + 16 * v), alpha, vf_load(products.at[r] + 16 * v)));
        }
    }
}

static void overlay_stripe(attn_decode *d, int n_tiles, const uint64_t *masks) {
    stripe_products scores;
    ask_some(d);
    stripe_keys(d, n_tiles, &scores);
    ask_some(d);
    if (d->rows->q_dim == d->rows->head_dim) {
        softmax_rows(d, masks, false, NULL, 0, NULL, &scores, overlay_score);
    } else if (bias_in_tiles(d)) {
        bias_queries(d, &d->here);
        tile_bias(d);
        softmax_rows(d, masks, false, NULL, 0, NULL, &scores, overlay_score_bias);
    } else {
        stripe_many_pairs(d, &scores);
        softmax_rows(d, masks, false, NULL, 0, NULL, NULL, stored_score);
    }
    ask_some(d);
    stripe_values(d, (n_tiles + 1) / 2);
}

static void overlay_page(attn_decode *d, const uint16_t *keys, const uint16_t *values, uint64_t valid, const uint64_t *masks) {
    if (valid == 0) return; /* no row sees any of it */
    const int n = d->rows->n_rows < 16 ? d->rows->n_rows : 16;
    use_tiles(d, TILES_BF16, n, n);
    d->scored_of = NULL; /* the bias' products are these rows' now */
    take_overlay(d, keys, values, valid);
    stripe s = {.all = d->rows};
    for (int first = 0; (first = stripe_from(&s, d, masks, first)) >= 0; first += ATTN_DECODE_ROWS)
        overlay_stripe(d, valid_tiles(valid), masks + first);
    ask_rest(d);
}

#endif
