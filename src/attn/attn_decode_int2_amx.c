/*
 * attn_decode_int2_amx.c - decode attention on the codes with AMX: products of tiles of bytes.
 *
 * A page's layout is a tile's: sixteen quads of channels by sixteen tokens (values: quads of tokens
 * by channels) are the B operand of TDPBSUD once the codes lie one a byte, and the high and low bytes
 * of eight queries (weights) the rows of A. One instruction does the work of 128 dot products of
 * AVX-512 VNNI. Tiles 0-3: A, chunk of 64 channels times two and half of the rows; 4, 5: B; 6, 7: C.
 *
 * Other code in the thread may keep a tile configuration of its own (ggml does), so begin saves it
 * and end brings it back.
 */
#include "attn/attn_vec_avx512.h"

#define DOT_ROWS 8
#define DECODE_BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#include "attn/attn_decode_page_x86.h"

/* What LDTILECFG reads. */
typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
} tile_config;

/* The intrinsics that read memory do not say so: what was stored must be in memory before them. */
#define TILE_READS_MEMORY() __asm__ volatile("" ::: "memory")

/* Products of the 32 byte rows of 16 rows with the 16 columns of a B tile. */
typedef struct tile_products {
    _Alignas(64) int32_t at[2 * ATTN_DECODE_ROWS][16];
} tile_products;

/* Groups of the sides are chunks of 64 channels, the last one filled up; where groups would share a
 * chunk, the dot products do it. */
static bool fits(const attn_decode *d) { return d->k_side->n_groups == 1 || d->k_side->group % 64 == 0; }

/* --- bias ----------------------------------------------------------------------------------- *
 * Query and table as the sum of two BF16 numbers each, which keeps 16 to 17 bits: at |b| = 1,000 the
 * error stays below 0.01.
 */

static int n_pairs(const attn_decode *d) { return (d->rows->q_dim - d->rows->head_dim) / 2; }
static bool bias_in_tiles(const attn_decode *d) { return n_pairs(d) <= 16 * ATTN_BIAS_CHUNKS; }

/* x = high + low + little: BF16 bits in the upper halves of the lanes. */
INLINE void split_bf16(vf x, vi *high, vi *low) {
    const vi half = vi_set1(0x8000);
    *high = vi_and(vi_add(_mm512_castps_si512(x), half), vi_set1((int)0xffff0000u));
    *low = vi_add(_mm512_castps_si512(vf_sub(x, _mm512_castsi512_ps(*high))), half);
}

/* The constant rows 2 p, 2 p + 1 side by side for every token, as a B operand has them. */
static void make_bias_tiles(attn_decode *d) {
    for (int p = 0; p < (n_pairs(d) + 15) / 16 * 16; p++)
        for (int t = 0; t < 4; t++) {
            vi high[2] = {vi_zero(), vi_zero()}, low[2] = {vi_zero(), vi_zero()};
            for (int k = 0; k < 2 && p < n_pairs(d); k++)
                split_bf16(vf_load(d->bias_table + (2 * p + k) * TILE + 16 * t), &high[k], &low[k]);
            uint16_t(*tile)[16][32] = d->bias_tiles[p / 16][t];
            _mm512_store_si512(tile[0][p % 16], _mm512_mask_blend_epi16(0xaaaaaaaa, vi_shr(high[0], 16), high[1]));
            _mm512_store_si512(tile[1][p % 16], _mm512_mask_blend_epi16(0xaaaaaaaa, vi_shr(low[0], 16), low[1]));
        }
}

/* The turned queries as rows of an A operand: [n_rows][high, low][32] for pairs from 16 chunk on. */
static void bias_queries(const attn_decode *d, int chunk, uint16_t (*out)[2][32]) {
    const attn_rows *rows = d->rows;
    const int n = 2 * n_pairs(d) - 32 * chunk;
    const __mmask16 first = n >= 16 ? 0xffff : (__mmask16)((1 << n) - 1);
    const __mmask16 second = n >= 32 ? 0xffff : n > 16 ? (__mmask16)((1 << (n - 16)) - 1) : 0;
    __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21,
                                   19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    for (int r = 0; r < rows->n_rows; r++) {
        const float *q = rows->q + (int64_t)r * rows->q_dim + rows->head_dim + 32 * chunk;
        vi high[2], low[2];
        split_bf16(_mm512_maskz_loadu_ps(first, q), &high[0], &low[0]);
        split_bf16(_mm512_maskz_loadu_ps(second, q + 16), &high[1], &low[1]);
        _mm512_store_si512(out[r][0], _mm512_permutex2var_epi16(high[0], odd, high[1]));
        _mm512_store_si512(out[r][1], _mm512_permutex2var_epi16(low[0], odd, low[1]));
    }
}

static void tile_bias(attn_decode *d) {
    const int n = d->rows->n_rows, chunks = (n_pairs(d) + 15) / 16;
    _Alignas(64) uint16_t queries[ATTN_BIAS_CHUNKS][ATTN_DECODE_ROWS][2][32];
    _Alignas(64) float products[2 * ATTN_DECODE_ROWS][16];
    for (int c = 0; c < chunks; c++) bias_queries(d, c, queries[c]);
    TILE_READS_MEMORY();
    for (int t = 0; t < 4; t++) {
        _tile_zero(6);
        _tile_zero(7);
        for (int c = 0; c < chunks; c++) {
            _tile_loadd(0, queries[c][0], 64);
            _tile_loadd(4, d->bias_tiles[c][t][0], 64);
            _tile_loadd(5, d->bias_tiles[c][t][1], 64);
            _tile_dpbf16ps(6, 0, 4);
            _tile_dpbf16ps(6, 0, 5);
            if (n <= 8) continue;
            _tile_loadd(1, queries[c][8], 64);
            _tile_dpbf16ps(7, 1, 4);
            _tile_dpbf16ps(7, 1, 5);
        }
        _tile_stored(6, products[0], 64);
        if (n > 8) _tile_stored(7, products[16], 64);
        for (int r = 0; r < n; r++) {
            float *out = d->rows->logits + r * TILE + 16 * t;
            vf bias = vf_add(vf_load(products[2 * r]), vf_load(products[2 * r + 1]));
            vf_store(out, vf_add(vf_load(out), bias));
        }
    }
}

/* --- a piece of pages ------------------------------------------------------------------------- */

static void tile_begin(attn_decode *d) {
    begin(d);
    if (!fits(d)) return;
    if (bias_in_tiles(d)) make_bias_tiles(d);
    const int n = 2 * d->rows->n_rows, dim = d->rows->head_dim;
    for (int r = 0; r < d->rows->n_rows; r++)
        for (int half = 0; half < 2 && dim % 64; half++) memset(d->q_bytes[r][half] + dim, 0, (size_t)(64 - dim % 64));
    tile_config config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        int rows = t == 4 || t == 5 ? 16 : t % 2 ? n - 16 : n < 16 ? n : 16;
        config.rows[t] = (uint8_t)(rows > 0 ? rows : 1);
        config.column_bytes[t] = 64;
    }
    _tile_storeconfig(d->caller_tiles);
    TILE_READS_MEMORY();
    _tile_loadconfig(&config);
}

static void tile_end(attn_decode *d) {
    TILE_READS_MEMORY();
    if (fits(d)) _tile_loadconfig(d->caller_tiles);
}

/* n_units units of 16 to rows of 64 bytes: quad f of unit u in row unit_rows u + quad_rows f. */
INLINE void spread_codes(const int bits, const code_plane *plane, int unit, int n_units, const int unit_rows,
                         const int quad_rows, uint8_t *rows) {
    for (int u = 0; u < n_units; u++) {
        vi word = vi_load(plane->low + (unit + u) * plane->unit), high = word;
        if (bits == 3) high = vi_shr(vi_load(plane->high + (unit + u) / 2 * plane->high_unit), 4 * ((unit + u) & 1));
        if (bits == 4) high = vi_load(plane->high + (unit + u) * plane->high_unit);
        UNROLL for (int f = 0; f < 4; f++)
            _mm512_store_si512(rows + 64 * (unit_rows * u + quad_rows * f), quad_codes(bits, f, word, high));
    }
}

static void spread(int bits, const code_plane *plane, int unit, int n_units, bool split, uint8_t *rows) {
    if (split)
        switch (bits) {
        case 2: spread_codes(2, plane, unit, n_units, 1, 4, rows); break;
        case 3: spread_codes(3, plane, unit, n_units, 1, 4, rows); break;
        default: spread_codes(4, plane, unit, n_units, 1, 4, rows); break;
        }
    else
        switch (bits) {
        case 2: spread_codes(2, plane, unit, n_units, 4, 1, rows); break;
        case 3: spread_codes(3, plane, unit, n_units, 4, 1, rows); break;
        default: spread_codes(4, plane, unit, n_units, 4, 1, rows); break;
        }
}

/* Tiles 0 and 1 (and 2, 3 for a second chunk) times codes [n_chunks][16][64]. */
INLINE void multiply(int n_rows, int n_chunks, const uint8_t *codes, tile_products *out) {
    TILE_READS_MEMORY();
    _tile_zero(6);
    _tile_loadd(4, codes, 64);
    _tile_dpbsud(6, 0, 4);
    if (n_chunks == 2) {
        _tile_loadd(5, codes + 1024, 64);
        _tile_dpbsud(6, 2, 5);
    }
    _tile_stored(6, out->at[0], 64);
    if (n_rows <= 8) return;
    _tile_zero(7);
    _tile_dpbsud(7, 1, 4);
    if (n_chunks == 2) _tile_dpbsud(7, 3, 5);
    _tile_stored(7, out->at[16], 64);
}

INLINE vf total_of(const tile_products *p, int r) {
    vi high = _mm512_load_si512(p->at[2 * r]), low = _mm512_load_si512(p->at[2 * r + 1]);
    return vf_from_int(vi_add(vi_shl(high, 8), low));
}

static void tile_keys(attn_decode *d, const uint8_t *page, uint64_t valid) {
    const page_side *side = d->k_side;
    const int n = d->rows->n_rows, units = side->group / 16, n_chunks = (units + 3) / 4;
    _Alignas(64) uint8_t codes[4][2][1024];
    tile_products products[4];
    for (int g = 0; g < side->n_groups; g++) {
        const int8_t *q = d->q_bytes[0][0] + g * side->group;
        for (int t = 0; t < 4; t++) {
            code_plane plane = key_plane(side->bits, side, page, t);
            spread(side->bits, &plane, g * units, units, false, codes[t][0]);
        }
        TILE_READS_MEMORY();
        _tile_loadd(0, q, OSCAR_MAX_HEAD_DIM);
        if (n_chunks == 2) _tile_loadd(2, q + 64, OSCAR_MAX_HEAD_DIM);
        if (n > 8) _tile_loadd(1, q + 16 * OSCAR_MAX_HEAD_DIM, OSCAR_MAX_HEAD_DIM);
        if (n > 8 && n_chunks == 2) _tile_loadd(3, q + 64 + 16 * OSCAR_MAX_HEAD_DIM, OSCAR_MAX_HEAD_DIM);
        for (int t = 0; t < 4; t++) multiply(n, n_chunks, codes[t][0], &products[t]);
        for (int t = 0; t < 4; t++) {
            vf step, offset;
            load_params(page + side->params_offset + g * 256, 16 * t, valid, &step, &offset);
            for (int r = 0; r < n; r++) {
                float *out = d->rows->logits + r * TILE + 16 * t;
                vf x = vf_mul(offset, vf_set1(d->q_sum[r][g]));
                if (g > 0) x = vf_add(x, vf_load(out));
                vf_store(out, vf_fma(vf_mul(step, vf_set1(d->q_scale[r])), total_of(&products[t], r), x));
            }
        }
    }
}

static void tile_values(attn_decode *d, const uint8_t *page, int g) {
    const page_side *side = d->v_side;
    const int n = d->rows->n_rows, first = g * side->group / 16, end = first + side->group / 16;
    const int64_t dim = side->head_dim;
    _Alignas(64) uint8_t codes[4][1024];
    tile_products products[4];
    TILE_READS_MEMORY();
    _tile_loadd(0, d->p_bytes[0][0], TILE);
    if (n > 8) _tile_loadd(1, d->p_bytes[8][0], TILE);
    for (int block = first; block < end; block += 4) {
        const int count = end - block < 4 ? end - block : 4;
        for (int b = 0; b < count; b++) {
            code_plane plane = value_plane(side, page, block + b);
            spread(side->bits, &plane, 0, 4, true, codes[b]);
        }
        for (int b = 0; b < count; b++) multiply(n, 1, codes[b], &products[b]);
        for (int r = 0; r < n; r++) {
            const vf alpha = vf_set1(d->alpha[r]), offset = vf_set1(d->p_offset[r]), scale = vf_set1(d->p_scale[r]);
            for (int b = 0; b < count; b++) {
                float *out = d->rows->acc + r * dim + 16 * (block + b);
                vf_store(out, vf_fma(total_of(&products[b], r), scale, vf_fma(vf_load(out), alpha, offset)));
            }
        }
    }
}

static void tile_page(attn_decode *d, const uint8_t *keys, const uint8_t *values, uint64_t valid, const uint64_t *masks) {
    if (fits(d))
        decode_page(d, keys, values, valid, masks, tile_keys, bias_in_tiles(d) ? tile_bias : bias_products, tile_values);
    else
        attn_decode_int2_avx512vnni.page(d, keys, values, valid, masks);
}

const attn_decode_ops attn_decode_int2_amx = {.name = "amx", .begin = tile_begin, .page = tile_page, .end = tile_end};
