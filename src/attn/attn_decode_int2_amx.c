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

#include "attn/attn_overlay_amx.h"

/* Products of the 32 byte rows of 16 rows with the 16 columns of a B tile. */
typedef struct tile_products {
    _Alignas(64) int32_t at[2 * ATTN_DECODE_ROWS][16];
} tile_products;

/* Groups of the sides are chunks of 64 channels, the last one filled up; where groups would share a
 * chunk, the dot products do it. */
static bool fits(const attn_decode *d) { return d->k_side->n_groups == 1 || d->k_side->group % 64 == 0; }

/* --- a piece of pages ------------------------------------------------------------------------- */

static void tile_begin(attn_decode *d) {
    const attn_rows *rows = d->rows;
    const int dim = rows->head_dim;
    begin(d);
    d->spread_of = NULL;
    for (int r = 0; r < rows->n_rows; r++)
        for (int half = 0; half < 2 && dim % 64; half++) memset(d->q_bytes[r][half] + dim, 0, (size_t)(64 - dim % 64));
    overlay_begin(d);
    keep_tiles(d);
    if (rows->q_dim > dim && bias_in_tiles(d)) make_bias_tiles(d);
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
INLINE void multiply(int n_rows, int n_chunks, const uint8_t *codes, tile_products *out) {
    TILE_READS_MEMORY();
    _tile_zero(6);
    _tile_loadd(2, codes, 64);
    _tile_dpbsud(6, 0, 2);
    if (n_chunks == 2) {
        _tile_loadd(3, codes + 1024, 64);
        _tile_dpbsud(6, 4, 3);
    }
    _tile_stored(6, out->at[0], 64);
    if (n_rows <= 8) return;
    _tile_zero(7);
    _tile_dpbsud(7, 1, 2);
    if (n_chunks == 2) _tile_dpbsud(7, 5, 3);
    _tile_stored(7, out->at[16], 64);
}

INLINE vf total_of(const tile_products *p, int r) {
    vi high = _mm512_load_si512(p->at[2 * r]), low = _mm512_load_si512(p->at[2 * r + 1]);
    return vf_from_int(vi_add(vi_shl(high, 8), low));
}

/* All codes of a page as B tiles: keys [n_groups][4][n_chunks], values [head_dim / 16]. Values beside the
 * products of the first stripe's keys: before that they may still be on their way from memory. */
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

static void spread_values(attn_decode *d) {
    const page_side *side = d->v_side;
    for (int vec = 0; vec < side->head_dim / 16; vec++) {
        code_plane plane = value_plane(side, d->unspread, vec);
        spread(side->bits, &plane, 0, 4, true, d->value_tiles + 1024 * vec);
    }
    d->unspread = NULL;
}

static void tile_keys(attn_decode *d, const uint8_t *page, uint64_t valid) {
    const page_side *side = d->k_side;
    const int n = d->rows->n_rows, n_chunks = (side->group / 16 + 3) / 4;
    const uint8_t *codes = d->key_tiles;
    tile_products products[4];
    for (int g = 0; g < side->n_groups; g++, codes += 4 * 1024 * n_chunks) {
        const int8_t *q = d->q_bytes[d->first][0] + g * side->group;
        TILE_READS_MEMORY();
        _tile_loadd(0, q, OSCAR_MAX_HEAD_DIM);
        if (n_chunks == 2) _tile_loadd(4, q + 64, OSCAR_MAX_HEAD_DIM);
        if (n > 8) _tile_loadd(1, q + 16 * OSCAR_MAX_HEAD_DIM, OSCAR_MAX_HEAD_DIM);
        if (n > 8 && n_chunks == 2) _tile_loadd(5, q + 64 + 16 * OSCAR_MAX_HEAD_DIM, OSCAR_MAX_HEAD_DIM);
        for (int t = 0; t < 4; t++) multiply(n, n_chunks, codes + 1024 * n_chunks * t, &products[t]);
        if (d->unspread) spread_values(d);
        for (int t = 0; t < 4; t++) {
            vf step, offset;
            load_params(page + side->params_offset + g * 256, 16 * t, valid, &step, &offset);
            for (int r = 0; r < n; r++) {
                float *out = d->rows->logits + r * TILE + 16 * t;
                vf x = vf_mul(offset, vf_set1(d->q_sum[d->first + r][g]));
                if (g > 0) x = vf_add(x, vf_load(out));
                vf_store(out, vf_fma(vf_mul(step, vf_set1(d->q_scale[d->first + r])), total_of(&products[t], r), x));
            }
        }
    }
}

static void tile_values(attn_decode *d, const uint8_t *page, int g) {
    (void)page; /* spread already */
    const page_side *side = d->v_side;
    const int n = d->rows->n_rows, first = g * side->group / 16, end = first + side->group / 16;
    const int64_t dim = side->head_dim;
    tile_products products[4];
    TILE_READS_MEMORY();
    _tile_loadd(0, d->p_bytes[0][0], TILE);
    if (n > 8) _tile_loadd(1, d->p_bytes[8][0], TILE);
    for (int block = first; block < end; block += 4) {
        const int count = end - block < 4 ? end - block : 4;
        for (int b = 0; b < count; b++) multiply(n, 1, d->value_tiles + 1024 * (block + b), &products[b]);
        if (d->next_keys && end * 16 == dim && block == first) spread_keys(d, d->next_keys);
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
    const int n = 2 * d->rows->n_rows;
    if (!fits(d)) {
        attn_decode_int2_avx512vnni.page(d, keys, values, valid, masks);
        return;
    }
    /* Stripes with fewer rows than the tiles multiply what lies behind them too; nobody reads it. */
    use_tiles(d, TILES_BYTES, n < 16 ? n : 16, n > 32 ? 16 : n > 16 ? n - 16 : 1);
    if (d->rows->n_rows > ATTN_DECODE_ROWS) d->next_keys = NULL; /* stripes to come need the tiles */
    spread_keys(d, keys);
    d->unspread = values;
    decode_page(d, keys, values, valid, masks, tile_keys, bias_in_tiles(d) ? tile_bias : bias_products, tile_values);
}

const attn_decode_ops attn_decode_int2_amx = {
    .name = "amx", .begin = tile_begin, .page = tile_page, .overlay = overlay_page, .end = restore_tiles};
