/*
 * attn_decode_int2_amx.c - decode attention on the codes with AMX: products of tiles of bytes.
 *
 * A page's layout is a tile's: sixteen quads of channels by sixteen tokens (values: quads of tokens
 * by channels) are the B operand of TDPBSUD once the codes lie one a byte, and the high and low bytes
 * of eight queries (weights) the rows of A. One instruction does the work of 128 dot products of
 * AVX-512 VNNI. Tiles 0, 1: A, each half of the rows; 4, 5: A for a second chunk of 64 channels; 2, 3: B; 6, 7: C.
 * Codes are spread once a page, for all stripes of rows, and while products are on their way: a tile that is
 * loaded soon after its stores waits for them. BF16 rows go through attn_overlay_amx.h.
 */
#include "attn/attn_vec_avx512.h"

#define ASK_LINES static inline __attribute__((always_inline)) /* as it was measured */

#include "attn/attn_overlay_amx.h"

/* Products of 8 rows, high and low bytes, with the 16 columns of each of four B tiles. What few rows need lies
 * close together: a page's operands and products fill most of the nearest cache, and all parts of it alike. */
typedef int32_t tile_products[16][4][16];

/* Groups of the sides are chunks of 64 channels, the last one filled up; where groups would share a
 * chunk, the dot products do it. */
static bool fits(const attn_decode *d) { return d->k_side->n_groups == 1 || d->k_side->group % 64 == 0; }

/* --- a piece of pages ------------------------------------------------------------------------- */

static size_t tile_table_bytes(int32_t n_pairs) {
    const int chunks = bias_chunks(n_pairs);
    return chunks <= ATTN_BIAS_CHUNKS ? (size_t)chunks * sizeof(bias_chunk) : 0;
}

static void tile_open(attn_decode *d) {
    d->first = 0;
    d->spread_of = d->scored_of = NULL;
    open_bias(d, NULL); /* `table` is in tiles */
    keep_tiles(d);
    d->bias_tiles = d->table ? d->table : d->own_bias_tiles;
    if (!d->table && n_pairs(d) > 0 && bias_in_tiles(d)) make_bias_tiles(d->bias_table, n_pairs(d), d->own_bias_tiles);
}

static void tile_begin(attn_decode *d) {
    const attn_rows *rows = d->rows;
    const int dim = rows->head_dim;
    begin(d);
    for (int r = 0; r < rows->n_rows; r++)
        for (int half = 0; half < 2 && dim % 64; half++) memset(d->q_bytes[r][half] + dim, 0, (size_t)(64 - dim % 64));
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

/* Tiles 0 and 1 (and 4, 5 for a second chunk) times codes [n_chunks][16][64]. */
INLINE void multiply_keys(int n_rows, int n_chunks, const uint8_t *codes, int b, tile_products *out) {
    TILE_READS_MEMORY();
    _tile_zero(6);
    _tile_loadd(2, codes, 64);
    _tile_dpbsud(6, 0, 2);
    if (n_chunks == 2) {
        _tile_loadd(3, codes + 1024, 64);
        _tile_dpbsud(6, 4, 3);
    }
    _tile_stored(6, out[0][0][b], sizeof out[0][0]);
    if (n_rows <= 8) return;
    _tile_zero(7);
    _tile_dpbsud(7, 1, 2);
    if (n_chunks == 2) _tile_dpbsud(7, 5, 3);
    _tile_stored(7, out[1][0][b], sizeof out[1][0]);
}

/* Tiles 0 and 1, weights without sign, times codes [16][64]. */
INLINE void multiply_values(int n_rows, const uint8_t *codes, int b, tile_products *out) {
    TILE_READS_MEMORY();
    _tile_zero(6);
    _tile_loadd(2, codes, 64);
    _tile_dpbuud(6, 0, 2);
    _tile_stored(6, out[0][0][b], sizeof out[0][0]);
    if (n_rows <= 8) return;
    _tile_zero(7);
    _tile_dpbuud(7, 1, 2);
    _tile_stored(7, out[1][0][b], sizeof out[1][0]);
}

INLINE vf total_of(const tile_products *p, int r, int b) {
    const int32_t(*at)[4][16] = p[r / 8] + 2 * (r % 8);
    vi high = _mm512_load_si512(at[0][b]), low = _mm512_load_si512(at[1][b]);
    return vf_from_int(vi_add(vi_shl(high, 8), low));
}

/* All codes of a page as B tiles: keys [n_groups][4][n_chunks], values [head_dim / 16]. */
static void spread_keys(attn_decode *d, const uint8_t *keys) {
    const page_side *side = d->k_side;
    if (d->spread_of == keys) return;
    d->spread_of = keys;
    const int units = side->group / 16, n_chunks = (units + 3) / 4;
    uint8_t *out = d->key_tiles;
    for (int g = 0; g < side->n_groups; g++)
        for (int t = 0; t < 4; t++, out += 1024 * n_chunks) {
            code_plane plane = key_plane(side->bits, side, keys, t);
            spread(side->bits, &plane, g * units, units, false, out);
        }
}

/* Vectors [from, to) of the values to the first of value_tiles. */
static void spread_values(attn_decode *d, const uint8_t *values, int from, int to) {
    uint8_t *tiles = d->value_tiles;
    for (int vec = from; vec < to; vec++, tiles += 1024) {
        code_plane plane = value_plane(d->v_side, values, vec);
        spread(d->v_side->bits, &plane, 0, 4, true, tiles);
    }
}

/* Vectors whose tiles are there at a time: where one stripe reads them, so few that they stay in the nearest cache. */
static int value_vecs(const attn_decode *d) { return d->values_once && d->v_side->head_dim > 64 ? 4 : d->v_side->head_dim / 16; }

/* Products of the stripe in hand with group g of the keys that are spread. */
static void multiply_group(attn_decode *d, int g) {
    const page_side *side = d->k_side;
    const int n = d->rows->n_rows, n_chunks = (side->group / 16 + 3) / 4;
    const uint8_t *codes = d->key_tiles + g * 4 * 1024 * n_chunks;
    const int8_t *q = d->q_bytes[d->first][0] + g * side->group;
    TILE_READS_MEMORY();
    _tile_loadd(0, q, OSCAR_MAX_HEAD_DIM);
    if (n_chunks == 2) _tile_loadd(4, q + 64, OSCAR_MAX_HEAD_DIM);
    if (n > 8) _tile_loadd(1, q + 16 * OSCAR_MAX_HEAD_DIM, OSCAR_MAX_HEAD_DIM);
    if (n > 8 && n_chunks == 2) _tile_loadd(5, q + 64 + 16 * OSCAR_MAX_HEAD_DIM, OSCAR_MAX_HEAD_DIM);
    for (int t = 0; t < 4; t++) multiply_keys(n, n_chunks, codes + 1024 * n_chunks * t, t, d->key_products);
    TILE_READS_MEMORY();
}

/* What the softmax makes logits of as it goes, beside key_products and bias_products: parameters of a group. */
typedef struct page_scores {
    _Alignas(64) float steps[TILE], offsets[TILE];
    int32_t group;
} page_scores;

static void take_steps(const attn_decode *d, const uint8_t *keys, uint64_t valid, int g, page_scores *out) {
    out->group = g;
    store_params(keys + d->k_side->params_offset + g * 256, valid, out->steps, out->offsets);
}

INLINE vf page_score(const attn_decode *d, const void *scores, int r, int t, vf offset) {
    const page_scores *p = scores;
    vf x = vf_fma(vf_load(p->offsets + 16 * t), vf_set1(d->q_sum[d->first + r][p->group]), offset);
    return vf_fma(vf_mul(vf_load(p->steps + 16 * t), vf_set1(d->q_scale[d->first + r][p->group])), total_of(d->key_products, r, t), x);
}

INLINE vf page_score_bias(const attn_decode *d, const void *scores, int r, int t, vf offset) {
    return add_bias(d, r, t, page_score(d, scores, r, t, offset));
}

INLINE vf stored_score_bias(const attn_decode *d, const void *scores, int r, int t, vf offset) {
    return add_bias(d, r, t, stored_score(d, scores, r, t, offset));
}

/* Logits of a stripe into rows->logits. */
static void stripe_logits(attn_decode *d, const uint8_t *keys, uint64_t valid) {
    page_scores scores;
    for (int g = 0; g < d->k_side->n_groups; g++) {
        multiply_group(d, g);
        take_steps(d, keys, valid, g, &scores);
        for (int r = 0; r < d->rows->n_rows; r++)
            for (int t = 0; t < 4; t++) {
                float *out = d->rows->logits + r * TILE + 16 * t;
                vf_store(out, page_score(d, &scores, r, t, g > 0 ? vf_load(out) : vf_zero()));
            }
    }
    d->scored_of = NULL;
}

/* Values of group g; behind them products of the next page, so that the softmax of that one starts with them there. Products
 * of all kinds are taken at one place of a page: for some 190 clocks after one the processor does floating point on 512
 * bits at half its speed. The next page's codes are spread before this one's products, or those would wait for them. */
static void tile_values(attn_decode *d, const uint8_t *page, int g) {
    const page_side *side = d->v_side;
    const int n = d->rows->n_rows, first = g * side->group / 16, end = first + side->group / 16;
    const int64_t dim = side->head_dim;
    const bool ahead = d->next_keys && g + 1 == side->n_groups;
    _Alignas(64) tile_products products[2];
    if (ahead && n_pairs(d) > 0) bias_queries(d, &d->next);
    if (ahead) spread_keys(d, d->next_keys);
    ask_some(d);
    TILE_READS_MEMORY();
    _tile_loadd(0, d->p_bytes[0][0], TILE);
    if (n > 8) _tile_loadd(1, d->p_bytes[8][0], TILE);
    for (int block = first; block < end; block += 4) {
        const int count = end - block < 4 ? end - block : 4;
        for (int b = 0; b < count; b++) multiply_values(n, d->value_tiles + 1024 * (block % value_vecs(d) + b), b, products);
        if (value_vecs(d) == 4 && block + 4 < end) {
            TILE_READS_MEMORY(); /* what the products read lies where these go */
            spread_values(d, page, block + 4, block + 8 < end ? block + 8 : end);
        }
        ask_some(d);
        if (ahead && block + count == end) {
            multiply_group(d, 0);
            d->scored_of = d->next_keys;
            if (n_pairs(d) > 0) tile_bias(d);
        }
        TILE_READS_MEMORY();
        for (int r = 0; r < n; r++) {
            const vf alpha = vf_set1(d->alpha[r]), offset = vf_set1(d->p_offset[r]), scale = vf_set1(d->p_scale[r]);
            for (int b = 0; b < count; b++) {
                float *out = d->rows->acc + r * dim + 16 * (block + b);
                vf_store(out, vf_fma(total_of(products, r, b), scale, vf_fma(vf_load(out), alpha, offset)));
            }
        }
    }
}

static void tile_stripe(attn_decode *d, const uint8_t *keys, const uint8_t *values, uint64_t valid, const uint64_t *masks) {
    const bool pairs = d->rows->q_dim > d->rows->head_dim;
    page_scores scores;
    if (d->k_side->n_groups > 1 || !bias_in_tiles(d)) {
        stripe_logits(d, keys, valid);
        if (pairs && bias_in_tiles(d)) {
            bias_queries(d, &d->here);
            tile_bias(d);
            decode_values(d, values, valid, masks, NULL, stored_score_bias, tile_values);
        } else {
            if (pairs) bias_products(d);
            decode_values(d, values, valid, masks, NULL, stored_score, tile_values);
        }
        return;
    }
    if (d->scored_of != keys) {
        if (pairs) bias_queries(d, &d->here);
        multiply_group(d, 0);
        if (pairs) tile_bias(d);
    }
    d->scored_of = NULL;
    ask_some(d);
    take_steps(d, keys, valid, 0, &scores);
    if (pairs)
        decode_values(d, values, valid, masks, &scores, page_score_bias, tile_values);
    else
        decode_values(d, values, valid, masks, &scores, page_score, tile_values);
}

static void tile_page(attn_decode *d, const uint8_t *keys, const uint8_t *values, uint64_t valid, const uint64_t *masks) {
    const int n = 2 * d->rows->n_rows;
    if (!fits(d)) {
        attn_decode_int2_avx512vnni.page(d, keys, values, valid, masks);
        return;
    }
    /* Stripes with fewer rows than the tiles multiply what lies behind them too; nobody reads it. */
    use_tiles(d, TILES_BYTES, n < 16 ? n : 16, n > 32 ? 16 : n > 16 ? n - 16 : n / 2);
    /* Stripes to come need the tiles; several groups share key_products. */
    if (d->rows->n_rows > ATTN_DECODE_ROWS || d->k_side->n_groups > 1 || !bias_in_tiles(d)) d->next_keys = NULL;
    spread_keys(d, keys);
    d->values_once = d->rows->n_rows <= ATTN_DECODE_ROWS && d->v_side->n_groups == 1;
    spread_values(d, values, 0, value_vecs(d));
    stripe s = {.all = d->rows};
    for (int first = 0; (first = stripe_from(&s, d, masks, first)) >= 0; first += ATTN_DECODE_ROWS)
        tile_stripe(d, keys, values, valid, masks + first);
    ask_rest(d);
}

const attn_decode_ops attn_decode_int2_amx = {
    .name = "amx", .table_bytes = tile_table_bytes, .make_table = make_bias_tiles, .open = tile_open, .begin = tile_begin, .page = tile_page,
    .begin_overlay = overlay_begin, .overlay = overlay_page, .end = restore_tiles};
