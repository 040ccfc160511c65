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

#define HALF_TILE (TILE / 2)

/* What makes products logits. */
static inline float power_scale(const attn_rows *rows) { return rows->logit_scale * LOG2_E; }

/* cos and sin of mu's angle: the two middle slots are mu turned by half a step either way, so their sum lies along
 * mu, their difference across it. */
static void middle_angle(const float *row, float *cosine, float *sine) {
    const float *x = row + HALF_TILE - 1, *y = row + TILE + HALF_TILE - 1;
    float c = x[0] + x[1], s = y[0] + y[1], across_c = y[1] - y[0], across_s = x[0] - x[1];
    if (across_c * across_c + across_s * across_s > c * c + s * s) c = across_c, s = across_s;
    const float length = sqrtf(c * c + s * s);
    *cosine = length > 0.0f ? c / length : 1.0f;
    *sine = length > 0.0f ? s / length : 0.0f;
}

/* A table in halves: factors of a number and of its pair's other one that turn a query's pairs to the middle, [2][n_k];
 * then cosine and sine rows of slots 32 to 63 about the middle, [n_k][32], from a whole vector on. n_k = 2 n_pairs. */
static inline int half_rows_at(int n_k) { return (2 * n_k + 15) / 16 * 16; }

static inline size_t half_table_bytes(int32_t n_pairs) {
    return sizeof(float) * (size_t)(half_rows_at(2 * n_pairs) + 2 * n_pairs * HALF_TILE);
}

static void make_half_table(const float *bias_table, int32_t n_pairs, void *table) {
    const int n_k = 2 * n_pairs;
    float *turn[2] = {table, (float *)table + n_k}, *rows = (float *)table + half_rows_at(n_k);
    for (int k = 0; k < n_k; k += 2) {
        const float *x = bias_table + k * TILE, *y = x + TILE;
        float c, s;
        middle_angle(x, &c, &s);
        turn[0][k] = turn[0][k + 1] = c;
        turn[1][k] = s;
        turn[1][k + 1] = -s;
        for (int t = 0; t < HALF_TILE; t += LANES) {
            const int after = HALF_TILE + t, before = HALF_TILE - LANES - t;
            vf x0 = vf_reverse(vf_load(x + before)), y0 = vf_reverse(vf_load(y + before));
            vf x1 = vf_load(x + after), y1 = vf_load(y + after);
            vf cosines = vf_fma(vf_add(x0, x1), vf_set1(0.5f * c), vf_mul(vf_add(y0, y1), vf_set1(0.5f * s)));
            vf sines = vf_sub(vf_mul(vf_sub(y1, y0), vf_set1(0.5f * c)), vf_mul(vf_sub(x1, x0), vf_set1(0.5f * s)));
            vf_store(rows + k * HALF_TILE + t, cosines);
            vf_store(rows + (k + 1) * HALF_TILE + t, sines);
        }
    }
}

/* The pairs of n_rows rows turned back by their mu's angles, times the logits' scale: out [n_rows, stride]. */
static void turn_to_middle(const attn_decode *d, int r0, int n_rows, float *out, int stride) {
    const attn_rows *rows = d->rows;
    const int n_k = rows->q_dim - rows->head_dim;
    const float *c = d->half_table, *s = c + n_k, scale = power_scale(rows);
    for (int r = 0; r < n_rows; r++, out += stride) {
        const float *q = rows->q + (int64_t)(r0 + r) * rows->q_dim + rows->head_dim;
        int k = 0;
        for (; k + LANES <= n_k; k += LANES) {
            vf x = vf_load(q + k);
            vf_store(out + k, vf_mul(vf_set1(scale), vf_fma(x, vf_load(c + k), vf_mul(vf_swap_pairs(x), vf_load(s + k)))));
        }
        for (; k < n_k; k += 2) {
            out[k] = scale * (q[k] * c[k] + q[k + 1] * s[k]);
            out[k + 1] = scale * (q[k + 1] * c[k + 1] + q[k] * s[k + 1]);
        }
    }
}

/* logits += bias of n_rows rows from r0 on. */
INLINE void bias_rows(const int n_rows, attn_decode *d, int r0) {
    enum { STRIDE = 2 * ATTN_PAIRS_MAX };
    const int n_vecs = n_rows <= 3 ? 2 : 1; /* sums under way: twice n_vecs n_rows */
    const int n_k = d->rows->q_dim - d->rows->head_dim;
    float *logits = d->rows->logits + (int64_t)r0 * TILE;
    float turned[DOT_ROWS][STRIDE];
    turn_to_middle(d, r0, n_rows, turned[0], STRIDE);
    for (int vec = 0; vec < TILE_VECS / 2; vec += n_vecs) {
        vf even[DOT_ROWS][2], odd[DOT_ROWS][2], b[2];
        const float *q = turned[0], *table = d->half_table + half_rows_at(n_k) + vec * LANES;
        UNROLL for (int r = 0; r < DOT_ROWS; r++)
            UNROLL for (int v = 0; v < 2; v++) even[r][v] = odd[r][v] = vf_zero();
        for (int k = 0; k < n_k; k += 2, q += 2, table += 2 * HALF_TILE) {
            UNROLL for (int v = 0; v < n_vecs; v++) b[v] = vf_load(table + v * LANES);
            UNROLL for (int r = 0; r < n_rows; r++)
                UNROLL for (int v = 0; v < n_vecs; v++) even[r][v] = vf_fma(vf_set1(q[r * STRIDE]), b[v], even[r][v]);
            UNROLL for (int v = 0; v < n_vecs; v++) b[v] = vf_load(table + HALF_TILE + v * LANES);
            UNROLL for (int r = 0; r < n_rows; r++)
                UNROLL for (int v = 0; v < n_vecs; v++) odd[r][v] = vf_fma(vf_set1(q[r * STRIDE + 1]), b[v], odd[r][v]);
        }
        UNROLL for (int r = 0; r < n_rows; r++)
            UNROLL for (int v = 0; v < n_vecs; v++) {
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
DECODE_BLOCKS(BIAS_KERNEL)
static void (*const bias_kernels[DOT_ROWS])(attn_decode *d, int r0) = {DECODE_BLOCKS(BIAS_ENTRY)};

static void bias_products(attn_decode *d) {
    const int n = d->rows->n_rows, n_blocks = (n + DOT_ROWS - 1) / DOT_ROWS;
    if (!d->half_table) {
        make_half_table(d->bias_table, (d->rows->q_dim - d->rows->head_dim) / 2, d->own_half_table);
        d->half_table = d->own_half_table;
    }
    for (int i = 0; i < n_blocks; i++) {
        int r0 = n * i / n_blocks;
        bias_kernels[n * (i + 1) / n_blocks - r0 - 1](d, r0);
    }
}

#endif
