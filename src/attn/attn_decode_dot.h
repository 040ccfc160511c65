/*
 * attn_decode_dot.h - decode attention on the codes, in terms of a vector and of a dot product of
 * bytes; attn.h says what it computes.
 *
 * Keys: a 32-bit lane is a token and holds four channels of a quad, so q.c is one dot product of
 * unsigned codes with four bytes of q, the same in all lanes. Values: a lane is a channel and holds
 * four tokens; the other factor is four weights. Both are the loop dots() below. With x^ = m + s c,
 *   q.x^_t = s_t (q.c_t) + m_t sum(q),   sum_t p_t x^_t = sum_t (p_t s_t) c_t + sum_t p_t m_t.
 *
 * The including file defines, after attn_vec_*.h:
 *   DOT_ROWS              rows of the highest register block
 *   dot_vecs(n_rows)      vectors of such a block, a power of two
 *   DOT_UNITS(bits)       units of 16 channels or tokens that accumulators take without overflow
 *   dot_add(acc, codes, bytes), dot_total(high, low)
 *                         acc + dot products of four bytes a lane; 256 high + low as 32-bit lanes
 *   ATTN_DECODE_TABLE, ATTN_DECODE_NAME
 * It may define DOT_TABLES, a file by which keys of 2 bits go through tables (attn_decode_tables.h).
 */
#ifndef OSCAR_ATTN_DECODE_DOT_H
#define OSCAR_ATTN_DECODE_DOT_H

#include "attn/attn_decode_page.h"
#ifdef DOT_TABLES
#include DOT_TABLES
#endif

typedef struct dot_sums {
    vi high[DOT_ROWS][4], low[DOT_ROWS][4];
} dot_sums;

/* For every vector (r, v) of a register block. */
#define FOR_DOTS                                                                                   \
    UNROLL for (int r = 0; r < DOT_ROWS; r++)                                                      \
        UNROLL for (int v = 0; v < 4; v++)                                                         \
            if (r < n_rows && v < n_vecs)

INLINE vi load_bytes(const int8_t *p) {
    int32_t x;
    memcpy(&x, p, 4);
    return vi_set1(x);
}

/* sums = dot products of units [unit, end) with bytes [n_rows][2][row_bytes], in rising order or as
 * vi_split_tile() leaves them. */
INLINE void dots(const int bits, const int n_rows, const int n_vecs, const code_plane *plane, int unit, int end,
                 const int8_t *bytes, const int row_bytes, const bool split, dot_sums *sums) {
    vi high_sum[DOT_ROWS][4], low_sum[DOT_ROWS][4]; /* registers; *sums would be stored every time */
    FOR_DOTS high_sum[r][v] = low_sum[r][v] = vi_zero();
    const uint8_t *low = plane->low + unit * plane->unit;
    for (; unit < end; unit++, low += plane->unit) {
        const int8_t *unit_bytes = bytes + (split ? split_unit(unit) : 16 * unit);
        const uint8_t *high = low;
        if (bits == 3) high = plane->high + unit / 2 * plane->high_unit;
        if (bits == 4) high = plane->high + unit * plane->high_unit;
        UNROLL for (int f = 0; f < 4; f++) {
            /* Accumulators fill the registers: load words anew for every quad rather than keep them. */
            __asm__("" : "+r"(low));
            vi codes[4];
            UNROLL for (int v = 0; v < 4; v++) {
                codes[v] = vi_zero();
                if (v >= n_vecs) continue;
                vi second = bits > 2 ? vi_load(high + v * plane->high_vec) : vi_zero();
                if (bits == 3) second = vi_shr(second, 4 * (unit & 1));
                codes[v] = quad_codes(bits, f, vi_load(low + v * plane->vec), second);
            }
            UNROLL for (int r = 0; r < DOT_ROWS; r++) {
                if (r >= n_rows) continue;
                const int8_t *at = unit_bytes + 2 * row_bytes * r + (split ? split_quad(f) : 4 * f);
                vi high_byte = load_bytes(at), low_byte = load_bytes(at + row_bytes);
                UNROLL for (int v = 0; v < 4; v++)
                    if (v < n_vecs) high_sum[r][v] = dot_add(high_sum[r][v], codes[v], high_byte);
                UNROLL for (int v = 0; v < 4; v++)
                    if (v < n_vecs) low_sum[r][v] = dot_add(low_sum[r][v], codes[v], low_byte);
            }
        }
    }
    FOR_DOTS {
        sums->high[r][v] = high_sum[r][v];
        sums->low[r][v] = low_sum[r][v];
    }
}

/* --- keys ----------------------------------------------------------------------------------- */

/* logits[r][64] = q.x^ in powers of two, of n_rows rows from r0 on. */
INLINE void key_rows(const int bits, const int n_rows, attn_decode *d, int r0, const uint8_t *page, uint64_t valid) {
    const page_side *side = d->k_side;
    const int n_vecs = dot_vecs(n_rows), units = side->group / 16;
    const int8_t *bytes = d->q_bytes[d->first + r0][0];
    const float *scales = d->q_scale[d->first + r0], *q_sums = d->q_sum[d->first + r0]; /* [n_rows][CODEC_MAX_GROUPS] */
    float *logits = d->rows->logits + (int64_t)r0 * TILE;
    for (int vec = 0; vec < TILE_VECS; vec += n_vecs) {
        code_plane plane = key_plane(bits, side, page, vec);
        for (int g = 0; g < side->n_groups; g++) {
            const uint8_t *params = page + side->params_offset + g * 256;
            for (int unit = 0; unit < units; unit += DOT_UNITS(bits)) {
                int first = g * units + unit, n = units - unit < DOT_UNITS(bits) ? units - unit : DOT_UNITS(bits);
                dot_sums sums;
                dots(bits, n_rows, n_vecs, &plane, first, first + n, bytes, OSCAR_MAX_HEAD_DIM, false, &sums);
                UNROLL for (int v = 0; v < 4; v++) {
                    if (v >= n_vecs) continue;
                    vf step, offset;
                    load_params(params, (vec + v) * LANES, valid, &step, &offset);
                    UNROLL for (int r = 0; r < DOT_ROWS; r++) {
                        if (r >= n_rows) continue;
                        float *out = logits + r * TILE + (vec + v) * LANES;
                        vf x = first == 0 ? vf_zero() : vf_load(out);
                        if (unit == 0) x = vf_fma(offset, vf_set1(q_sums[r * CODEC_MAX_GROUPS + g]), x);
                        vf sum = vf_from_int(dot_total(sums.high[r][v], sums.low[r][v]));
                        vf_store(out, vf_fma(vf_mul(step, vf_set1(scales[r * CODEC_MAX_GROUPS + g])), sum, x));
                    }
                }
            }
        }
    }
}

/* --- values --------------------------------------------------------------------------------- */

/* acc = alpha acc + weights times values, for n_vecs vectors of channels from `vec` on. */
INLINE void value_block(const int bits, const int n_rows, const int n_vecs, attn_decode *d, int r0,
                        const uint8_t *page, int vec) {
    const page_side *side = d->v_side;
    const int64_t dim = d->rows->head_dim;
    const code_plane plane = value_plane(side, page, vec);
    float *acc = d->rows->acc + r0 * dim + vec * LANES;
    const int step = DOT_UNITS(bits) < 4 ? DOT_UNITS(bits) : 4;
    for (int unit = 0; unit < 4; unit += step) {
        dot_sums sums;
        dots(bits, n_rows, n_vecs, &plane, unit, unit + step, d->p_bytes[r0][0], TILE, true, &sums);
        FOR_DOTS {
            float *out = acc + r * dim + v * LANES;
            vf x = vf_load(out);
            if (unit == 0) x = vf_fma(x, vf_set1(d->alpha[r0 + r]), vf_set1(d->p_offset[r0 + r]));
            vf sum = vf_from_int(dot_total(sums.high[r][v], sums.low[r][v]));
            vf_store(out, vf_fma(sum, vf_set1(d->p_scale[r0 + r]), x));
        }
    }
}

/* The channels of group g. */
INLINE void value_rows(const int bits, const int n_rows, attn_decode *d, int r0, const uint8_t *page, int g) {
    const int n_vecs = dot_vecs(n_rows), group_vecs = d->v_side->group / LANES;
    int vec = g * group_vecs, end = vec + group_vecs;
    for (; vec + n_vecs <= end; vec += n_vecs) value_block(bits, n_rows, n_vecs, d, r0, page, vec);
    for (; vec < end; vec++) value_block(bits, n_rows, 1, d, r0, page, vec);
}

/* --- a kernel for every number of rows ---------------------------------------------------------- */

#define DECODE_KERNELS(rows)                                                                       \
    static void key_2_##rows(attn_decode *d, int r0, const uint8_t *p, uint64_t valid) { key_rows(2, rows, d, r0, p, valid); } \
    static void key_3_##rows(attn_decode *d, int r0, const uint8_t *p, uint64_t valid) { key_rows(3, rows, d, r0, p, valid); } \
    static void key_4_##rows(attn_decode *d, int r0, const uint8_t *p, uint64_t valid) { key_rows(4, rows, d, r0, p, valid); } \
    static void value_2_##rows(attn_decode *d, int r0, const uint8_t *p, int g) { value_rows(2, rows, d, r0, p, g); } \
    static void value_3_##rows(attn_decode *d, int r0, const uint8_t *p, int g) { value_rows(3, rows, d, r0, p, g); } \
    static void value_4_##rows(attn_decode *d, int r0, const uint8_t *p, int g) { value_rows(4, rows, d, r0, p, g); }

#define DECODE_ENTRY(rows)                                                                         \
    [rows - 1] = {{key_2_##rows, key_3_##rows, key_4_##rows}, {value_2_##rows, value_3_##rows, value_4_##rows}},

DECODE_BLOCKS(DECODE_KERNELS)

static const struct decode_kernels {
    void (*keys[3])(attn_decode *d, int r0, const uint8_t *page, uint64_t valid);
    void (*values[3])(attn_decode *d, int r0, const uint8_t *page, int g);
} decode_kernels[DOT_ROWS] = {DECODE_BLOCKS(DECODE_ENTRY)};

/* --- a page --------------------------------------------------------------------------------- */

static void dot_keys(attn_decode *d, const uint8_t *keys, uint64_t valid) {
#ifdef DOT_TABLES
    if (in_tables(d->k_side)) {
        table_keys(d, keys, valid, group_sums);
        return;
    }
#endif
    const int n = d->rows->n_rows, n_blocks = (n + DOT_ROWS - 1) / DOT_ROWS;
    for (int i = 0; i < n_blocks; i++) {
        int r0 = n * i / n_blocks;
        decode_kernels[n * (i + 1) / n_blocks - r0 - 1].keys[d->k_side->bits - 2](d, r0, keys, valid);
    }
}

static void dot_values(attn_decode *d, const uint8_t *values, int g) {
    const int n = d->rows->n_rows, n_blocks = (n + DOT_ROWS - 1) / DOT_ROWS;
    for (int i = 0; i < n_blocks; i++) {
        int r0 = n * i / n_blocks;
        decode_kernels[n * (i + 1) / n_blocks - r0 - 1].values[d->v_side->bits - 2](d, r0, values, g);
    }
}

static void page(attn_decode *d, const uint8_t *keys, const uint8_t *values, uint64_t valid, const uint64_t *masks) {
    stripe s = {.all = d->rows};
#ifdef DOT_TABLES
    if (in_tables(d->k_side)) spread_pairs(d, keys);
#endif
    for (int first = 0; (first = stripe_from(&s, d, masks, first)) >= 0; first += ATTN_DECODE_ROWS) {
        ask_some(d);
        dot_keys(d, keys, valid);
        ask_some(d);
        if (d->rows->q_dim > d->rows->head_dim) bias_products(d);
        ask_some(d);
        decode_values(d, values, valid, masks + first, NULL, stored_score, dot_values);
    }
    ask_rest(d);
}

static void dot_begin(attn_decode *d) {
#ifdef DOT_TABLES
    if (in_tables(d->k_side)) {
        make_tables(d, two_tables, unit_tables);
        return;
    }
#endif
    begin(d);
}

static void dot_open(attn_decode *d) { open_bias(d, d->table); }

const attn_decode_ops ATTN_DECODE_TABLE = {
    .name = ATTN_DECODE_NAME, .table_bytes = half_table_bytes, .make_table = make_half_table, .open = dot_open, .begin = dot_begin, .page = page};

#endif
