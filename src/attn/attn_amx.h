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

/* The intrinsics that read memory do not say so: what was stored must be in memory before them. */
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
 * error stays below 0.01.
 */

static int n_pairs(const attn_decode *d) { return (d->rows->q_dim - d->rows->head_dim) / 2; }
static bool bias_in_tiles(const attn_decode *d) { return n_pairs(d) <= 16 * ATTN_BIAS_CHUNKS; }
static int bias_chunks(int n_pairs) { return (n_pairs + 15) / 16; }

/* x = high + low + little: BF16 bits in the upper halves of the lanes. */
INLINE void split_bf16(vf x, vi *high, vi *low) {
    const vi half = vi_set1(0x8000);
    *high = vi_and(vi_add(_mm512_castps_si512(x), half), vi_set1((int)0xffff0000u));
    *low = vi_add(_mm512_castps_si512(vf_sub(x, _mm512_castsi512_ps(*high))), half);
}

/* The constant rows 2 p, 2 p + 1 side by side for every token, as a B operand has them. */
static void make_bias_tiles(const float *table, int32_t n_pairs, void *to) {
    bias_chunk *tiles = to;
    for (int p = 0; p < 16 * bias_chunks(n_pairs); p++)
        for (int t = 0; t < 4; t++) {
            vi high[2] = {vi_zero(), vi_zero()}, low[2] = {vi_zero(), vi_zero()};
            for (int k = 0; k < 2 && p < n_pairs; k++)
                split_bf16(vf_load(table + (2 * p + k) * TILE + 16 * t), &high[k], &low[k]);
            uint16_t(*tile)[16][32] = tiles[p / 16][t];
            _mm512_store_si512(tile[0][p % 16], _mm512_mask_blend_epi16(0xaaaaaaaa, vi_shr(high[0], 16), high[1]));
            _mm512_store_si512(tile[1][p % 16], _mm512_mask_blend_epi16(0xaaaaaaaa, vi_shr(low[0], 16), low[1]));
        }
}

/* The turned queries as A operands, bias_operands[chunk][high, low][row][pairs from 16 chunk on, cos and sin].
 * turned: [n_rows, stride]. */
static void bias_queries(attn_decode *d, const float *turned, int64_t stride) {
    const vf scale = vf_set1(power_scale(d->rows));
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21,
                                         19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    for (int chunk = 0; 16 * chunk < n_pairs(d); chunk++) {
        const int n = 2 * n_pairs(d) - 32 * chunk;
        const __mmask16 first = n >= 16 ? 0xffff : (__mmask16)((1 << n) - 1);
        const __mmask16 second = n >= 32 ? 0xffff : n > 16 ? (__mmask16)((1 << (n - 16)) - 1) : 0;
        for (int r = 0; r < d->rows->n_rows; r++) {
            const float *q = turned + r * stride + 32 * chunk;
            vi high[2], low[2];
            split_bf16(vf_mul(_mm512_maskz_loadu_ps(first, q), scale), &high[0], &low[0]);
            split_bf16(vf_mul(_mm512_maskz_loadu_ps(second, q + 16), scale), &high[1], &low[1]);
            _mm512_store_si512(d->bias_operands[chunk][0][r], _mm512_permutex2var_epi16(high[0], odd, high[1]));
            _mm512_store_si512(d->bias_operands[chunk][1][r], _mm512_permutex2var_epi16(low[0], odd, low[1]));
        }
    }
}

/* Of the page in hand. */
static void turned_queries(attn_decode *d) {
    bias_queries(d, d->rows->q + d->rows->head_dim, d->rows->q_dim);
}

/* high high + low high + high low, the queries in tiles `a_high` and `a_low`; what is left out is 2^-16 of it
 * or less. */
#define TILE_BIAS(a_high, a_low, c)                                                                \
    for (int t = 0; t < n_tiles; t++) {                                                            \
        _tile_zero(c);                                                                             \
        for (int k = 0; k < chunks; k++) {                                                         \
            if (chunks > 1 || t == 0) {                                                            \
                _tile_loadd(a_high, d->bias_operands[k][0], 64);                                   \
                _tile_loadd(a_low, d->bias_operands[k][1], 64);                                    \
            }                                                                                      \
            _tile_loadd(2, d->bias_tiles[k][t][0], 64);                                            \
            _tile_loadd(3, d->bias_tiles[k][t][1], 64);                                            \
            _tile_dpbf16ps(c, a_high, 2);                                                          \
            _tile_dpbf16ps(c, a_low, 2);                                                           \
            _tile_dpbf16ps(c, a_high, 3);                                                          \
        }                                                                                          \
        _tile_stored(c, d->bias_products[t], 64);                                                  \
    }

/* bias_products: tokens [16 t, 16 t + 16) of every row in [t], t < n_tiles. Up to eight rows: the odd tiles have as many rows.
 * More: the even ones have sixteen. */
static void tile_bias(attn_decode *d, int n_tiles) {
    const int chunks = bias_chunks(n_pairs(d));
    TILE_READS_MEMORY();
    if (d->rows->n_rows <= 8) {
        TILE_BIAS(1, 5, 7)
    } else {
        TILE_BIAS(0, 4, 6)
    }
    TILE_READS_MEMORY();
}

/* x + the products of vector t of row r. */
INLINE vf add_bias(const attn_decode *d, int r, int t, vf x) { return vf_add(x, vf_load(d->bias_products[t][r])); }

#endif
