/*
 * attn_decode_bias.h - the bias of decode kernels on the codes: what the tracked pairs add to logits.
 * Included by attn_decode_page.h.
 *
 * Rows 2 p, 2 p + 1 of the table are the plane's vector nu turned by i w for slot i of a page. About the page's
 * middle, where the vector is mu, slots m + t and m - t have the same cosine and the opposite sine:
 *   bias(m +- t) = sum_p x' |nu| cos(t w) +- sum_p y' |nu| sin(t w),   (x', y') the query turned back by mu's angle,
 * so both sums are of 32 slots instead of 64.
 */
#ifndef OSCAR_ATTN_DECODE_BIAS_H
#define OSCAR_ATTN_DECODE_BIAS_H

#include "attn/attn_turn.h"

#define HALF_TILE (TILE / 2)
/* Vectors of a block, and its rows: as many sums each, beside as many vectors of the table and a number of the query. */
#define BIAS_VECS 2
#ifndef BIAS_ROWS
#define BIAS_ROWS DOT_ROWS
#define BIAS_BLOCKS DECODE_BLOCKS
#endif

/* What makes products logits. */
static inline float power_scale(const attn_rows *rows) { return rows->logit_scale * LOG2_E; }

/* |nu| cos(t w) and |nu| sin(t w) of slots 32 to 63, from the two rows of a pair. */
static void half_rows(const float *pair, float *cos_row, float *sin_row) {
    const float *x = pair, *y = pair + TILE;
    float c, s;
    attn_middle(pair, 1, &c, &s);
    for (int t = 0; t < HALF_TILE; t += LANES) {
        const int after = HALF_TILE + t, before = HALF_TILE - LANES - t;
        vf x0 = vf_reverse(vf_load(x + before)), y0 = vf_reverse(vf_load(y + before));
        vf x1 = vf_load(x + after), y1 = vf_load(y + after);
        vf_store(cos_row + t, vf_fma(vf_add(x0, x1), vf_set1(0.5f * c), vf_mul(vf_add(y0, y1), vf_set1(0.5f * s))));
        vf_store(sin_row + t, vf_sub(vf_mul(vf_sub(y1, y0), vf_set1(0.5f * c)), vf_mul(vf_sub(x1, x0), vf_set1(0.5f * s))));
    }
}

/* A table in halves: cosine and sine rows of slots 32 to 63 about the middle, [2 n_pairs][32]. */
static inline size_t half_table_bytes(int32_t n_pairs) { return sizeof(float) * (size_t)(2 * n_pairs * HALF_TILE); }

static void make_half_table(const float *bias_table, int32_t n_pairs, void *table) {
    float *rows = table;
    for (int p = 0; p < n_pairs; p++, rows += 2 * HALF_TILE) half_rows(bias_table + 2 * p * TILE, rows, rows + HALF_TILE);
}

static int n_pairs(const attn_decode *d) { return (d->rows->q_dim - d->rows->head_dim) / 2; }

/* Whether numbers follow each other, as those of tracked pairs mostly do: what they number can be read by vectors. */
static inline bool is_run(int n, const int32_t *numbers) {
    for (int i = 1; i < n; i++)
        if (numbers[i] != numbers[0] + i) return false;
    return true;
}

/* Before the first page. half_table: of make_half_table(); NULL: it is made when it is needed. */
static void open_bias(attn_decode *d, const float *half_table) {
    d->half_table = half_table;
    d->tracked_run = is_run(n_pairs(d), d->tracked);
}

/* The pairs of the rows in hand turned to the middle of the page in hand, times what makes products logits. */
static void turn_to_middle(attn_decode *d) {
    const int n = n_pairs(d);
    const float scale = power_scale(d->rows);
    float cosines[ATTN_PAIRS_MAX], sines[ATTN_PAIRS_MAX];
    const float *middle_cos = d->middle, *middle_sin = d->middle + n;
    int p = 0;
    if (d->tracked_run) {
        const float *here_cos = d->here.cosines + d->tracked[0], *here_sin = d->here.sines + d->tracked[0];
        for (; p + LANES <= n; p += LANES) {
            const vf x = vf_mul(vf_set1(scale), vf_load(here_cos + p)), y = vf_mul(vf_set1(scale), vf_load(here_sin + p));
            const vf c = vf_load(middle_cos + p), s = vf_load(middle_sin + p);
            vf_store(cosines + p, vf_sub(vf_mul(x, c), vf_mul(y, s)));
            vf_store(sines + p, vf_add(vf_mul(x, s), vf_mul(y, c)));
        }
    }
    for (; p < n; p++) {
        const float x = scale * d->here.cosines[d->tracked[p]], y = scale * d->here.sines[d->tracked[p]];
        cosines[p] = x * middle_cos[p] - y * middle_sin[p];
        sines[p] = x * middle_sin[p] + y * middle_cos[p];
    }
    turn_pairs(d->rows->n_rows, n, d->pairs + (int64_t)d->first * 2 * n, cosines, sines, d->rows->q + d->rows->head_dim, d->rows->q_dim);
}

/* Sums of x' |nu| cos(t w) (first 0) or y' |nu| sin(t w) (first 1) of BIAS_VECS vectors of slots after the middle. */
INLINE void half_sums(const int n_rows, const int first, int n_k, const float *q, int stride, const float *table,
                      vf sums[BIAS_ROWS][BIAS_VECS]) {
    vf b[BIAS_VECS];
    UNROLL for (int r = 0; r < n_rows; r++)
        UNROLL for (int v = 0; v < BIAS_VECS; v++) sums[r][v] = vf_zero();
    for (int k = first; k < n_k; k += 2) {
        UNROLL for (int v = 0; v < BIAS_VECS; v++) b[v] = vf_load(table + k * HALF_TILE + v * LANES);
        UNROLL for (int r = 0; r < n_rows; r++) {
            const vf x = vf_set1(q[r * stride + k]);
            UNROLL for (int v = 0; v < BIAS_VECS; v++) sums[r][v] = vf_fma(x, b[v], sums[r][v]);
        }
    }
}

/* logits += bias of n_rows rows from r0 on. */
INLINE void bias_rows(const int n_rows, attn_decode *d, int r0) {
    const int n_k = d->rows->q_dim - d->rows->head_dim, stride = d->rows->q_dim;
    const float *q = d->rows->q + (int64_t)r0 * stride + d->rows->head_dim;
    float *logits = d->rows->logits + (int64_t)r0 * TILE;
    for (int vec = 0; vec < TILE_VECS / 2; vec += BIAS_VECS) {
        vf even[BIAS_ROWS][BIAS_VECS], odd[BIAS_ROWS][BIAS_VECS];
        half_sums(n_rows, 0, n_k, q, stride, d->half_table + vec * LANES, even);
        half_sums(n_rows, 1, n_k, q, stride, d->half_table + vec * LANES, odd);
        UNROLL for (int r = 0; r < n_rows; r++)
            UNROLL for (int v = 0; v < BIAS_VECS; v++) {
                float *after = logits + r * TILE + HALF_TILE + (vec + v) * LANES;
                float *before = logits + r * TILE + HALF_TILE - (vec + v + 1) * LANES;
                vf_store(after, vf_add(vf_load(after), vf_add(even[r][v], odd[r][v])));
                vf_store(before, vf_add(vf_load(before), vf_reverse(vf_sub(even[r][v], odd[r][v]))));
            }
    }
}

#define BIAS_KERNEL(rows)                                                                          \
    static void bias_##rows(attn_decode *d, int r0) { bias_rows(rows, d, r0); }
#define BIAS_ENTRY(rows) [rows - 1] = bias_##rows,
BIAS_BLOCKS(BIAS_KERNEL)
static void (*const bias_kernels[BIAS_ROWS])(attn_decode *d, int r0) = {BIAS_BLOCKS(BIAS_ENTRY)};

static void bias_products(attn_decode *d) {
    const int n = d->rows->n_rows, n_blocks = (n + BIAS_ROWS - 1) / BIAS_ROWS;
    if (!d->half_table) {
        make_half_table(d->bias_table, n_pairs(d), d->own_half_table);
        d->half_table = d->own_half_table;
    }
    turn_to_middle(d);
    for (int i = 0; i < n_blocks; i++) {
        int r0 = n * i / n_blocks;
        bias_kernels[n * (i + 1) / n_blocks - r0 - 1](d, r0);
    }
}

#endif
