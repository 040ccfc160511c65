/*
 * attn_prefill_int2_amx.c - attention of many rows over quantised pages, and of any rows over BF16
 * ones, with AMX: products of tiles of BF16 numbers.
 *
 * Codes and overlay rows are BF16 numbers exactly; queries and weights are the sum of two, which keeps
 * 16 to 17 bits. A page is laid out once as the B operands of all its products, then the rows pass in
 * stripes of 16. A code of b bits is stored as 2^b + c, which only takes a shift and an OR:
 *   q.x^_t = s_t (q.(2^b + c_t)) + (m_t - 2^b s_t) sum(q), and in the same way for values.
 * Tiles 0, 1: A, high and low; 2, 3: B; 4-7: C.
 */
#include "attn/attn_vec_avx512.h"

#include "attn/attn_amx.h"

#define STRIPE 16

/* Groups of the sides are chunks of 32 channels, or there is one. */
static bool fits(const attn_decode *d) {
    return (d->k_side->n_groups == 1 || d->k_side->group % 32 == 0) && d->rows->head_dim % 16 == 0;
}

static int padded(int head_dim) { return (head_dim + 31) / 32 * 32; }

/* --- operands ------------------------------------------------------------------------------- */

INLINE void store_halves(vf x, uint16_t *high, uint16_t *low, vf *rounded) {
    vi upper, lower;
    split_bf16(x, &upper, &lower);
    lower = vi_and(lower, vi_set1((int)0xffff0000u));
    *rounded = vf_add(_mm512_castsi512_ps(upper), _mm512_castsi512_ps(lower));
    _mm256_storeu_si256((__m256i *)(void *)high, _mm512_cvtepi32_epi16(vi_shr(upper, 16)));
    _mm256_storeu_si256((__m256i *)(void *)low, _mm512_cvtepi32_epi16(vi_shr(lower, 16)));
}

static void prefill_begin(attn_decode *d) {
    const attn_rows *rows = d->rows;
    const int dim = rows->head_dim, width = padded(dim), group = d->k_side->group;
    assert(rows->n_rows <= ATTN_ROWS_MAX);
    keep_tiles(d);
    if (rows->q_dim > dim && bias_in_tiles(d)) make_bias_tiles(d);
    for (int r = 0; r < rows->n_rows; r++) {
        const float *q = rows->q + (int64_t)r * rows->q_dim;
        uint16_t *high = d->q_halves[0] + r * width, *low = d->q_halves[1] + r * width;
        for (int g = 0; g < d->k_side->n_groups; g++) {
            vf sum = vf_zero();
            for (int i = g * group; i < (g + 1) * group; i += 16) {
                vf rounded;
                store_halves(vf_load(q + i), high + i, low + i, &rounded);
                sum = vf_add(sum, rounded);
            }
            d->halves_sum[r][g] = vf_sum(sum);
        }
        if (width > dim) {
            memset(high + dim, 0, 2 * (size_t)(width - dim));
            memset(low + dim, 0, 2 * (size_t)(width - dim));
        }
    }
}

static void prefill_end(attn_decode *d) { restore_tiles(d); }

/* Codes of n_units units of 16 as pairs of BF16 numbers 2^bits + c: pair p of unit u in row 8 u + p. */
INLINE void spread_pairs(const int bits, const code_plane *plane, int n_units, uint16_t *out, int64_t row) {
    const vi base = vi_set1((127 + bits) << 7 | (127 + bits) << 23);
    const vi first = vi_set1((int)0xff01ff00u), second = vi_set1((int)0xff03ff02u);
    const vi lanes = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x00040004, 0x00080008, 0x000c000c));
    for (int u = 0; u < n_units; u++, out += 8 * row) {
        vi word = vi_load(plane->low + u * plane->unit), high = word;
        if (bits == 3) high = vi_shr(vi_load(plane->high + u / 2 * plane->high_unit), 4 * (u & 1));
        if (bits == 4) high = vi_load(plane->high + u * plane->high_unit);
        UNROLL for (int f = 0; f < 4; f++) {
            vi codes = quad_codes(bits, f, word, high);
            vi low_pair = _mm512_shuffle_epi8(codes, vi_or(first, lanes)), high_pair = _mm512_shuffle_epi8(codes, vi_or(second, lanes));
            _mm512_storeu_si512(out + (2 * f) * row, vi_or(vi_shl(low_pair, 7 - bits), base));
            _mm512_storeu_si512(out + (2 * f + 1) * row, vi_or(vi_shl(high_pair, 7 - bits), base));
        }
    }
}

static void spread_side(const page_side *side, const uint8_t *page, uint16_t *out) {
    const bool key = side->kind == PAGE_KEY;
    const int n_vecs = key ? 4 : side->head_dim / 16, n_units = key ? side->head_dim / 16 : 4;
    const int64_t row = key ? 2 * TILE : 2 * side->head_dim;
    for (int vec = 0; vec < n_vecs; vec++) {
        code_plane plane = key ? key_plane(side->bits, side, page, vec) : value_plane(side, page, vec);
        switch (side->bits) {
        case 2: spread_pairs(2, &plane, n_units, out + 32 * vec, row); break;
        case 3: spread_pairs(3, &plane, n_units, out + 32 * vec, row); break;
        default: spread_pairs(4, &plane, n_units, out + 32 * vec, row); break;
        }
    }
}

/* Channels up to a whole chunk: queries hold zeros there, so any finite number would do. */
static void pad_keys(int head_dim, uint16_t *keys) {
    if (head_dim % 32) memset(keys + head_dim * TILE, 0, sizeof(uint16_t) * 16 * TILE);
}

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
    for (int t = 0; t < TILE; t += 2) {
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
    _Alignas(64) float at[STRIPE][64];
} stripe_products;

/* C += A B for tile t of the columns, high and low. */
#define STRIPE_PRODUCT(t, b_tile, c_tile)                                                          \
    if (n_tiles > t) {                                                                             \
        _tile_loadd(b_tile, at + 32 * t, b_row);                                                   \
        _tile_dpbf16ps(c_tile, 0, b_tile);                                                         \
        _tile_dpbf16ps(c_tile, 1, b_tile);                                                         \
    }

/* 16 rows of A (high and low, a_row bytes apart) times n_tiles tiles of 16 columns of B; b: pairs of k
 * in rows b_row bytes apart; n_chunks times 32 in k. */
INLINE void multiply(const uint16_t *high, const uint16_t *low, int64_t a_row, const uint16_t *b, int64_t b_row, int n_chunks,
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
    if (n_tiles > 1) _tile_stored(5, out->at[0] + 16, 256);
    if (n_tiles > 2) _tile_stored(6, out->at[0] + 32, 256);
    if (n_tiles > 3) _tile_stored(7, out->at[0] + 48, 256);
}

/* What a stripe works on: a view of some of the rows. */
typedef struct stripe {
    attn_rows rows;
    int first;
} stripe;

/* Logits of the stripe from the codes (page: their parameters follow) or, NULL, the overlay. */
static void stripe_keys(attn_decode *d, const stripe *s, const uint8_t *page, uint64_t valid) {
    const page_side *side = d->k_side;
    const int n_groups = page ? side->n_groups : 1, width = padded(s->rows.head_dim), group = width / n_groups;
    const vf base = vf_set1((float)(1 << side->bits));
    stripe_products products;
    for (int g = 0; g < n_groups; g++) {
        const int64_t at = (int64_t)s->first * width + g * group;
        TILE_READS_MEMORY();
        multiply(d->q_halves[0] + at, d->q_halves[1] + at, 2 * width, d->b_keys + (int64_t)g * group * TILE, 4 * TILE, group / 32, 4,
                 &products);
        TILE_READS_MEMORY();
        vf step[4], offset[4];
        for (int v = 0; v < 4 && page; v++) {
            load_params(page + side->params_offset + g * 256, 16 * v, valid, &step[v], &offset[v]);
            offset[v] = vf_sub(offset[v], vf_mul(step[v], base));
        }
        for (int r = 0; r < s->rows.n_rows; r++) {
            float *out = s->rows.logits + r * TILE;
            const vf sum = vf_set1(d->halves_sum[s->first + r][g]);
            UNROLL for (int v = 0; v < 4; v++) {
                vf x = vf_load(products.at[r] + 16 * v);
                if (page) x = vf_fma(x, step[v], vf_mul(offset[v], sum));
                if (g > 0) x = vf_add(x, vf_load(out + 16 * v));
                vf_store(out + 16 * v, x);
            }
        }
    }
}

/* The weights of the stripe times the steps of group g of the values, in halves; and what the offsets
 * come to. params NULL: the weights themselves. */
static void stripe_weights(const attn_decode *d, const stripe *s, const uint8_t *params, uint64_t valid, uint16_t (*halves)[STRIPE][TILE],
                           float *offsets) {
    const vf base = vf_set1((float)(1 << d->v_side->bits));
    vf step[4], offset[4];
    row_vectors total;
    for (int v = 0; v < 4 && params; v++) load_params(params, 16 * v, valid, &step[v], &offset[v]);
    for (int r = 0; r < s->rows.n_rows; r++) {
        vf sum = vf_zero();
        UNROLL for (int v = 0; v < 4; v++) {
            vf p = vf_load(s->rows.logits + r * TILE + 16 * v), rounded;
            store_halves(params ? vf_mul(p, step[v]) : p, halves[0][r] + 16 * v, halves[1][r] + 16 * v, &rounded);
            if (params) sum = vf_sub(vf_fma(p, offset[v], sum), vf_mul(rounded, base));
        }
        vf_store(total.at[r], sum);
    }
    reduce_rows(s->rows.n_rows, &total, false, offsets);
}

/* acc = alpha acc + weights times values. */
static void stripe_values(const attn_decode *d, const stripe *s, const uint8_t *page, uint64_t valid) {
    const page_side *side = d->v_side;
    const int dim = s->rows.head_dim, n_groups = page ? side->n_groups : 1, group = dim / n_groups;
    _Alignas(64) uint16_t halves[2][STRIPE][TILE];
    float offsets[STRIPE];
    stripe_products products;
    for (int g = 0; g < n_groups; g++) {
        stripe_weights(d, s, page ? page + side->params_offset + g * 256 : NULL, valid, halves, offsets);
        TILE_READS_MEMORY();
        for (int c = g * group; c < (g + 1) * group; c += 64) {
            const int n_tiles = (g + 1) * group - c < 64 ? ((g + 1) * group - c) / 16 : 4;
            const uint16_t *b = d->b_values + 2 * c;
            switch (n_tiles) {
            case 4: multiply(halves[0][0], halves[1][0], 2 * TILE, b, 4 * dim, 2, 4, &products); break;
            case 3: multiply(halves[0][0], halves[1][0], 2 * TILE, b, 4 * dim, 2, 3, &products); break;
            case 2: multiply(halves[0][0], halves[1][0], 2 * TILE, b, 4 * dim, 2, 2, &products); break;
            default: multiply(halves[0][0], halves[1][0], 2 * TILE, b, 4 * dim, 2, 1, &products); break;
            }
            TILE_READS_MEMORY();
            for (int r = 0; r < s->rows.n_rows; r++) {
                float *out = s->rows.acc + (int64_t)r * dim + c;
                const vf alpha = vf_set1(d->alpha[r]), offset = vf_set1(offsets[r]);
                for (int v = 0; v < n_tiles; v++) {
                    vf x = vf_fma(vf_load(out + 16 * v), alpha, vf_load(products.at[r] + 16 * v));
                    vf_store(out + 16 * v, page ? vf_add(x, offset) : x);
                }
            }
        }
    }
}

/* --- pages ---------------------------------------------------------------------------------- */

/* All rows over what b_keys and b_values hold; key_page, value_page: the codes' sides, or NULL. */
static void run_stripes(attn_decode *d, const uint8_t *key_page, const uint8_t *value_page, uint64_t valid, const uint64_t *masks) {
    attn_rows *all = d->rows;
    const int n = all->n_rows, rows = n < 8 ? 2 * n : 16;
    use_tiles(d, TILES_BF16, rows, rows);
    for (int first = 0; first < n; first += STRIPE) {
        const int count = n - first < STRIPE ? n - first : STRIPE;
        uint64_t any = 0;
        for (int r = 0; r < count; r++) any |= masks[first + r];
        if (any == 0) continue;
        stripe s = {.rows = *all, .first = first};
        s.rows.n_rows = count;
        s.rows.q += (int64_t)first * all->q_dim;
        s.rows.q_bias += first;
        s.rows.row_max += first;
        s.rows.row_sum += first;
        s.rows.acc += (int64_t)first * all->head_dim;
        s.rows.logits += (int64_t)first * TILE;
        d->rows = &s.rows;
        stripe_keys(d, &s, key_page, valid);
        if (all->q_dim > all->head_dim) (bias_in_tiles(d) ? tile_bias : bias_products)(d);
        softmax_rows(d, masks + first);
        stripe_values(d, &s, value_page, valid);
    }
    d->rows = all;
}

static void prefill_page(attn_decode *d, const uint8_t *keys, const uint8_t *values, uint64_t valid, const uint64_t *masks) {
    spread_side(d->k_side, keys, d->tile_keys);
    pad_keys(d->rows->head_dim, d->tile_keys);
    spread_side(d->v_side, values, d->tile_values);
    d->b_keys = d->tile_keys;
    d->b_values = d->tile_values;
    run_stripes(d, keys, values, valid, masks);
}

static void prefill_overlay(attn_decode *d, const uint16_t *keys, const uint16_t *values, uint64_t valid, const uint64_t *masks) {
    take_overlay(d, keys, values, valid);
    run_stripes(d, NULL, NULL, valid, masks);
}

const attn_decode_ops attn_prefill_int2_amx = {
    .name = "amx", .max_rows = ATTN_ROWS_MAX, .fits = fits, .begin = prefill_begin, .page = prefill_page, .overlay = prefill_overlay, .end = prefill_end};
