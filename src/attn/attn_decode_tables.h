/*
 * attn_decode_tables.h - keys of 2 bits by tables: two codes of a token are an index of four bits, and a byte shuffle looks
 * up what they come to with a query, in many tokens at once. Included by attn_decode_tables_*.h, which have the rest.
 *
 * Of every two channels of a query a table holds V = round(s (q0 (c0 - 1.5) + q1 (c1 - 1.5))) for all codes, low and
 * high bytes apart. s is of a row's group; the sum of V of two tables, which two_tables() tells, fits 16 bits whatever the
 * codes are, so that their high bytes, with TABLE_ZERO each for zero, may be added as bytes.
 *
 * Pair p of a unit of 16 channels is channels p % 4 + 8 (p / 4) and four further; tables take 256 bytes a unit.
 */
#ifndef OSCAR_ATTN_DECODE_TABLES_H
#define OSCAR_ATTN_DECODE_TABLES_H

#include "attn/attn_decode_page.h"

/* 2^15 less two low bytes, and what rounding adds. */
#define TABLE_TOP 32256.0f
#define TABLE_ZERO 64

static bool in_tables(const page_side *side) { return side->bits == 2 && side->head_dim <= ATTN_TABLES_DIM; }

/* Tables of all rows; q_scale: of a sum of V; q_sum: of the query over a group, scaled. */
INLINE void make_tables(attn_decode *d, vf (*two_tables)(vf sizes),
                        void (*unit_tables)(const float *q, float scale, uint8_t *out)) {
    const page_side *side = d->k_side;
    d->first = 0;
    for (int r = 0; r < d->rows->n_rows; r++)
        for (int g = 0; g < side->n_groups; g++) {
            const float *q = d->rows->q + (int64_t)r * d->rows->q_dim + g * side->group;
            uint8_t *out = d->q_tables + 16 * ((int64_t)r * side->head_dim + g * side->group);
            vf sum = vf_zero(), top = vf_zero();
            for (int i = 0; i < side->group; i += LANES) {
                vf x = vf_load(q + i), size = vf_abs(x);
                sum = vf_add(sum, x);
                top = vf_max(top, two_tables(vf_add(size, vf_swap_quads(size)))); /* both channels of a table */
            }
            const float most = vf_top(top), scale = most > 1e-30f ? TABLE_TOP / (1.5f * most) : 0.0f;
            for (int i = 0; i < side->group; i += 16) unit_tables(q + i, scale, out + 16 * i);
            d->q_scale[r][g] = scale > 0.0f ? power_scale(d->rows) / scale : 0.0f;
            d->q_sum[r][g] = scale > 0.0f ? power_scale(d->rows) * vf_sum(sum) : 0.0f;
        }
}

/* logits[r][64] = q.x^ in powers of two, of the stripe in hand and the page that is spread. */
INLINE void table_keys(attn_decode *d, const uint8_t *page, uint64_t valid,
                       void (*group_sums)(int units, const uint8_t *pairs, const uint8_t *tables, vi sums[TILE_VECS])) {
    const page_side *side = d->k_side;
    for (int g = 0; g < side->n_groups; g++) {
        float steps[TILE], offsets[TILE];
        store_params(page + side->params_offset + g * 256, valid, steps, offsets);
        for (int r = 0; r < d->rows->n_rows; r++) {
            const int row = d->first + r;
            vi sums[TILE_VECS];
            group_sums(side->group / 16, d->key_tiles + 32 * side->group * g, d->q_tables + 16 * ((int64_t)row * side->head_dim + g * side->group),
                       sums);
            const vf scale = vf_set1(d->q_scale[row][g]), sum = vf_set1(d->q_sum[row][g]), middle = vf_mul(sum, vf_set1(1.5f));
            float *out = d->rows->logits + r * TILE;
            UNROLL for (int v = 0; v < TILE_VECS; v++) {
                vf x = vf_fma(vf_from_int(sums[v]), scale, middle), before = g == 0 ? vf_zero() : vf_load(out + v * LANES);
                vf_store(out + v * LANES, vf_fma(vf_load(steps + v * LANES), x, vf_fma(vf_load(offsets + v * LANES), sum, before)));
            }
        }
    }
}

#endif
