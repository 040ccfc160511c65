/*
 * attn_amx.h - what the AMX kernels share: the tile configurations, and the bias in tiles. Included
 * after attn_vec_avx512.h.
 */
#ifndef OSCAR_ATTN_AMX_H
#define OSCAR_ATTN_AMX_H

#define DOT_ROWS 8
#define DECODE_BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)

/* The processor multiplies unsigned bytes too, so weights, which are not negative, have 16 bits. */
#define WEIGHTS_MAX 65280.0f
static inline void split_weights(const __m512i y[4], int8_t *high, int8_t *low) {
    const __m512i a = _mm512_packus_epi32(y[0], y[1]), b = _mm512_packus_epi32(y[2], y[3]), byte = _mm512_set1_epi16(255);
    _mm512_storeu_si512(high, _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)));
    _mm512_storeu_si512(low, _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte)));
}
#include "attn/attn_decode_page.h"

/* What LDTILECFG reads. */
typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
} tile_config;

/* The intrinsics that read memory do not say so: what was stored must be in memory before them, and what they read must not
 * be stored over too early. */
#define TILE_READS_MEMORY() __asm__ volatile("" ::: "memory")

/* The products of bytes and those of BF16 numbers cut the tiles differently. Other code in the thread
 * may keep a configuration of its own too (ggml does), so begin saves it and end brings it back. */
enum { TILES_NONE, TILES_BYTES, TILES_BF16 };

/* Tiles of 64 bytes a row: 16 rows in 2 and 3, which are B always; `even` or `odd` rows in the others. */
INLINE void use_tiles(attn_decode *d, int which, int even, int odd) {
    if (d->tiles == which) return;
    tile_config config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.rows[t] = (uint8_t)(t == 2 || t == 3 ? 16 : t % 2 ? odd : even);
        config.column_bytes[t] = 64;
    }
    TILE_READS_MEMORY();
    _tile_loadconfig(&config);
    d->tiles = which;
}

INLINE void keep_tiles(attn_decode *d) {
    _tile_storeconfig(d->caller_tiles);
    TILE_READS_MEMORY();
    d->tiles = TILES_NONE;
}

INLINE void restore_tiles(attn_decode *d) {
    TILE_READS_MEMORY();
    if (d->tiles != TILES_NONE) _tile_loadconfig(d->caller_tiles);
}

/* --- bias ----------------------------------------------------------------------------------- *
 * Query and table as the sum of two BF16 numbers each, which keeps 16 to 17 bits: at |b| = 1,000 the
 * error stays below 0.01. About a page's middle (attn_decode_bias.h) slots as far before it as after it have the same
 * cosines and the opposite sines, so that one half of the slots is all the table: queries have a row (x', y') for
 * those after the middle and (x', -y') for those before it, whose order is reversed.
 */

static bool bias_in_tiles(const attn_decode *d) { return n_pairs(d) <= 16 * ATTN_BIAS_CHUNKS; }
static int bias_chunks(int n_pairs) { return (n_pairs + 15) / 16; }

/* x = high + low + little: BF16 bits in the upper halves of the lanes. */
INLINE void split_bf16(vf x, vi *high, vi *low) {
    const vi half = vi_set1(0x8000);
    *high = vi_and(vi_add(_mm512_castps_si512(x), half), vi_set1((int)0xffff0000u));
    *low = vi_add(_mm512_castps_si512(vf_sub(x, _mm512_castsi512_ps(*high))), half);
}

/* Cosine and sine rows of a pair side by side for every slot after the middle, as a B operand has them. */
static void make_bias_tiles(const float *table, int32_t n_pairs, void *to) {
    bias_chunk *tiles = to;
    for (int p = 0; p < 16 * bias_chunks(n_pairs); p++) {
        float rows[2][HALF_TILE] = {{0}};
        if (p < n_pairs) half_rows(table + 2 * p * TILE, rows[0], rows[1]);
        for (int u = 0; u < 2; u++) {
            vi high[2], low[2];
            for (int k = 0; k < 2; k++) split_bf16(vf_load(rows[k] + 16 * u), &high[k], &low[k]);
            uint16_t(*tile)[16][32] = tiles[p / 16][u];
            _mm512_store_si512(tile[0][p % 16], _mm512_mask_blend_epi16(0xaaaaaaaa, vi_shr(high[0], 16), high[1]));
            _mm512_store_si512(tile[1][p % 16], _mm512_mask_blend_epi16(0xaaaaaaaa, vi_shr(low[0], 16), low[1]));
        }
    }
}

/* The operand of a row (2 r: slots after the middle, 2 r + 1: before), a chunk's pairs as cos and sin, high or low. */
INLINE uint16_t *bias_operand(attn_decode *d, int chunks, int row, int chunk, int half) {
    return d->bias_operands + ((row * chunks + chunk) * 2 + half) * 32;
}

/* Cosines and sines of a chunk's pairs for a page: from its start to its middle along the vectors there, times what makes
 * products logits. */
INLINE void chunk_angles(const attn_decode *d, const struct attn_angles *page, int chunk, __mmask16 pairs, vf *cosines, vf *sines) {
    const int n = n_pairs(d), at = 16 * chunk;
    const vi which = _mm512_maskz_loadu_epi32(pairs, d->tracked + at);
    const vf scale = vf_set1(power_scale(d->rows));
    const vf x = vf_mul(scale, _mm512_mask_i32gather_ps(vf_zero(), pairs, which, page->cosines, 4));
    const vf y = vf_mul(scale, _mm512_mask_i32gather_ps(vf_zero(), pairs, which, page->sines, 4));
    const vf c = _mm512_maskz_loadu_ps(pairs, d->middle + at), s = _mm512_maskz_loadu_ps(pairs, d->middle + n + at);
    *cosines = vf_sub(vf_mul(x, c), vf_mul(y, s));
    *sines = vf_fma(x, s, vf_mul(y, c));
}

/* The queries' pairs turned to a page, as A operands. */
static void bias_queries(attn_decode *d, const struct attn_angles *page) {
    const vi sign = vi_set1((int)0x80000000u); /* of the upper half of a lane, the sine's */
    const int n = n_pairs(d), chunks = bias_chunks(n);
    for (int chunk = 0; chunk < chunks; chunk++) {
        const int left = n - 16 * chunk;
        const __mmask16 pairs = left >= 16 ? 0xffff : (__mmask16)((1 << left) - 1);
        vf c, s;
        chunk_angles(d, page, chunk, pairs, &c, &s);
        const vf minus_s = vf_sub(vf_zero(), s);
        for (int r = 0; r < d->rows->n_rows; r++) {
            const float *q = d->pairs + (int64_t)(d->first + r) * 2 * n + 16 * chunk;
            const vf x = _mm512_maskz_loadu_ps(pairs, q), y = _mm512_maskz_loadu_ps(pairs, q + n);
            vi high[2], low[2];
            split_bf16(vf_fma(x, c, vf_mul(y, s)), &high[0], &low[0]);
            split_bf16(vf_fma(y, c, vf_mul(x, minus_s)), &high[1], &low[1]);
            const vi halves[2] = {_mm512_mask_blend_epi16(0xaaaaaaaa, vi_shr(high[0], 16), high[1]),
                                  _mm512_mask_blend_epi16(0xaaaaaaaa, vi_shr(low[0], 16), low[1])};
            UNROLL for (int h = 0; h < 2; h++) {
                _mm512_store_si512(bias_operand(d, chunks, 2 * r, chunk, h), halves[h]);
                _mm512_store_si512(bias_operand(d, chunks, 2 * r + 1, chunk, h), _mm512_xor_si512(halves[h], sign));
            }
        }
    }
}

/* low high + high high + high low of every step-th row from row `first` on; what is left out is 2^-16 of it or
 * less. Tile 0: A; 2, 3: B; 4, 6: C. */
INLINE void bias_tiles(attn_decode *d, int first, int step) {
    const int chunks = bias_chunks(n_pairs(d));
    const int64_t a_row = step * chunks * 128, c_row = step * 128;
    _tile_zero(4);
    _tile_zero(6);
    for (int k = 0; k < chunks; k++) {
        const uint16_t(*b)[2][16][32] = d->bias_tiles[k];
        _tile_loadd(0, bias_operand(d, chunks, first, k, 1), a_row);
        _tile_loadd(2, b[0][0], 64);
        _tile_loadd(3, b[1][0], 64);
        _tile_dpbf16ps(4, 0, 2);
        _tile_dpbf16ps(6, 0, 3);
        _tile_loadd(0, bias_operand(d, chunks, first, k, 0), a_row);
        _tile_dpbf16ps(4, 0, 2);
        _tile_dpbf16ps(6, 0, 3);
        _tile_loadd(2, b[0][1], 64);
        _tile_loadd(3, b[1][1], 64);
        _tile_dpbf16ps(4, 0, 2);
        _tile_dpbf16ps(6, 0, 3);
    }
    _tile_stored(4, d->bias_products[first][0], c_row);
    _tile_stored(6, d->bias_products[first][1], c_row);
}

/* bias_products. Up to eight rows of bytes: the even tiles have twice as many. More, and BF16 rows: as many. */
static void tile_bias(attn_decode *d) {
    TILE_READS_MEMORY();
    if (d->tiles == TILES_BYTES && d->rows->n_rows <= 8) {
        bias_tiles(d, 0, 1);
    } else {
        bias_tiles(d, 0, 2);
        bias_tiles(d, 1, 2);
    }
    TILE_READS_MEMORY();
}

/* x + the products of vector t of row r. */
INLINE vf add_bias(const attn_decode *d, int r, int t, vf x) {
    const int after = t - 2;
    return vf_add(x, after >= 0 ? vf_load(d->bias_products[2 * r][after]) : vf_reverse(vf_load(d->bias_products[2 * r + 1][1 - t])));
}

#endif
