/*
 * attn_tiles.h - attention on tiles of floats (AVX2, AVX-512, NEON), in terms of a vector.
 *
 * The including file defines, before the include:
 *   what attn_vec_*.h defines
 *   ROWS_MAX              rows of the highest register block
 *   block_rows(n_rows), panel_units(n_rows)
 *                         rows and 16-column units of a register block for a product of n_rows rows
 *   GEMM_BLOCKS(X)        X(rows, vectors) for every register block there is
 *   ATTN_TABLE, ATTN_NAME   what the table at the end is called
 *
 * Every product is one register-blocked kernel, C = A B or C = alpha C + A B. Each element of C is
 * summed in rising k by fused multiply-adds whatever the block shape, so a row's result does not
 * depend on how many rows go through together.
 */
#ifndef OSCAR_ATTN_TILES_H
#define OSCAR_ATTN_TILES_H

#include "attn/attn_softmax.h"
#include "attn/attn_turn.h"

#include <assert.h>

/* --- matrix products ------------------------------------------------------------------------ */

typedef struct gemm {
    int32_t n_k;
    const float *a; /* [n_rows, n_k], stride a_stride */
    int64_t a_stride;
    const float *b; /* [n_k, n_columns], stride b_stride */
    int64_t b_stride;
    float *c; /* [n_rows, n_columns], stride c_stride */
    int64_t c_stride;
    const float *alpha; /* [n_rows] factors of the old C; NULL: C starts from zero */
} gemm;

/* For every vector (r, v) of a register block. */
#define FOR_BLOCK                                                                                  \
    UNROLL for (int r = 0; r < ROWS_MAX; r++)                                                      \
        UNROLL for (int v = 0; v < 4; v++)                                                         \
            if (r < n_rows && v < n_vecs)

/* One register block: n_rows x n_vecs vectors of C, both constants once inlined. The loops have
 * fixed bounds, so that they vanish before that too: Clang unrolls first. */
INLINE void gemm_block(const int n_rows, const int n_vecs, const gemm *g) {
    vf acc[ROWS_MAX][4], bk[4];
    const float *a = g->a, *b = g->b, *alpha = g->alpha;
    float *c = g->c;
    const int64_t a_stride = g->a_stride, b_stride = g->b_stride, c_stride = g->c_stride;
    const int32_t n_k = g->n_k;
    FOR_BLOCK acc[r][v] = vf_zero();
    if (alpha)
        FOR_BLOCK acc[r][v] = vf_mul(vf_set1(alpha[r]), vf_load(c + r * c_stride + v * LANES));
    for (int32_t k = 0; k < n_k; k++, b += b_stride) {
        UNROLL for (int v = 0; v < 4; v++) bk[v] = v < n_vecs ? vf_load(b + v * LANES) : vf_zero();
        FOR_BLOCK acc[r][v] = vf_fma(vf_set1(a[r * a_stride + k]), bk[v], acc[r][v]);
    }
    FOR_BLOCK vf_store(c + r * c_stride + v * LANES, acc[r][v]);
}

#define GEMM_BLOCK(rows, vecs)                                                                     \
    static void gemm_##rows##x##vecs(const gemm *g) { gemm_block(rows, vecs, g); }
GEMM_BLOCKS(GEMM_BLOCK)

#define GEMM_ENTRY(rows, vecs) [rows - 1][(vecs) / UNIT_VECS - 1] = gemm_##rows##x##vecs,
static void (*const gemm_kernels[ROWS_MAX][4 / UNIT_VECS])(const gemm *) = {
    GEMM_BLOCKS(GEMM_ENTRY)};

/* The whole product, n_columns a multiple of 16. Panels of columns outside, so that a panel of B
 * stays in the nearest cache while all rows pass; rows in blocks of nearly equal height. */
static void gemm_run(const gemm *whole, int32_t n_rows, int32_t n_columns) {
    int32_t n_units = n_columns / 16, widest = panel_units(n_rows), highest = block_rows(n_rows);
    int32_t n_panels = (n_units + widest - 1) / widest;
    int32_t n_blocks = (n_rows + highest - 1) / highest;
    for (int32_t p = 0; p < n_panels; p++) {
        int32_t unit = n_units * p / n_panels, units = n_units * (p + 1) / n_panels - unit;
        for (int32_t i = 0; i < n_blocks; i++) {
            int64_t row = (int64_t)n_rows * i / n_blocks;
            int64_t rows = (int64_t)n_rows * (i + 1) / n_blocks - row;
            gemm block = *whole;
            block.a += row * block.a_stride;
            block.b += unit * 16;
            block.c += row * block.c_stride + unit * 16;
            if (block.alpha) block.alpha += row;
            gemm_kernels[rows - 1][units - 1](&block);
        }
    }
}

/* --- pages to floats ------------------------------------------------------------------------ */

/* Codes of a block stay where they are in their word: code << k, k = 8 (j % 2) + 2 f within a
 * 16-bit half, is converted as it is, and the step comes multiplied by 2^-k. That is exact and
 * saves a shift per vector. */
#define CODE_SHIFT(i) (8 * ((i) % 2) + 2 * ((i) / 4))

/* The halves of the words of one block, second plane included. */
typedef struct code_words {
    vi low[2];
    vi high[2];
} code_words;

/* high: the block of the second plane; its odd_half holds our 16 when it spans 32 (3 bits). */
INLINE code_words load_words(const int bits, const uint8_t *low, const uint8_t *high,
                             int odd_half) {
    code_words w;
    vi word = vi_load(low);
    w.low[0] = word;
    w.low[1] = vi_shr(word, 16);
    w.high[0] = w.high[1] = word;
    if (bits == 3) {
        word = vi_shr(vi_load(high), 4 * odd_half);
        w.high[0] = word;
        w.high[1] = vi_shr(word, 16);
    } else if (bits == 4) {
        word = vi_load(high);
        w.high[0] = vi_shl(word, 2);
        w.high[1] = vi_shr(word, 14);
    }
    return w;
}

/* Code i = 4 f + j of every word, times 2^CODE_SHIFT(i), as floats. */
INLINE vf code_floats(const int bits, const code_words *w, const int i) {
    int half = i % 4 / 2, k = CODE_SHIFT(i);
    vi code = vi_and(w->low[half], vi_set1(3 << k));
    if (bits == 3)
        code = vi_or(code, vi_and(vi_shl(w->high[half], i / 4 + 2), vi_set1(4 << k)));
    else if (bits == 4)
        code = vi_or(code, vi_and(w->high[half], vi_set1(12 << k)));
    return vf_from_int(code);
}

/* 2^-k */
INLINE float exp2_negative(int k) { return bits_float((uint32_t)(127 - k) << 23); }

/* Blocks [first, first + n) of one group for LANES tokens; low, high: their tile's blocks. */
INLINE void unpack_key_group(const int bits, int first, int n, const uint8_t *low,
                             const uint8_t *high, vf step, vf offset, float *keys) {
    vf scaled[8];
    UNROLL for (int k = 0; k < 8; k++) scaled[k] = vf_mul(step, vf_set1(exp2_negative(2 * k)));
    for (int b = first; b < first + n; b++) {
        int high_b = bits == 3 ? b / 2 : b;
        code_words w = load_words(bits, low + 64 * b, high + 64 * high_b, b % 2);
        float *out = keys + (int64_t)b * 16 * TILE;
        UNROLL for (int i = 0; i < 16; i++)
            vf_store(out + i * TILE,
                     vf_fma(code_floats(bits, &w, i), scaled[CODE_SHIFT(i) / 2], offset));
    }
}

INLINE void unpack_keys_bits(const int bits, const page_side *side, const uint8_t *page,
                             uint64_t valid, float *keys) {
    int n_blocks = side->head_dim / 16, group_blocks = side->group / 16;
    int n_high = bits == 3 ? (n_blocks + 1) / 2 : n_blocks;
    for (int slot = 0; slot < TILE; slot += LANES) {
        int tile = slot / 16, lane = 4 * (slot % 16);
        const uint8_t *low = page + tile * n_blocks * 64 + lane;
        const uint8_t *high = page + side->high_offset + tile * n_high * 64 + lane;
        for (int g = 0; g < side->n_groups; g++) {
            vf step, offset;
            load_params(page + side->params_offset + g * 256, slot, valid, &step, &offset);
            unpack_key_group(bits, g * group_blocks, group_blocks, low, high, step, offset,
                             keys + slot);
        }
    }
}

/* Scaled steps and offsets of the 16 tokens of a tile. */
INLINE void tile_params(const uint8_t *params, int slot, uint64_t valid, float *scaled,
                        float *offsets) {
    static const float scales[16] = {1,        0x1p-8f,  1,        0x1p-8f,  0x1p-2f, 0x1p-10f,
                                     0x1p-2f,  0x1p-10f, 0x1p-4f,  0x1p-12f, 0x1p-4f, 0x1p-12f,
                                     0x1p-6f,  0x1p-14f, 0x1p-6f,  0x1p-14f}; /* 2^-CODE_SHIFT */
    UNROLL for (int i = 0; i < 16; i += LANES) {
        vf step, offset;
        load_params(params, slot + i, valid, &step, &offset);
        vf_store(scaled + i, vf_mul(step, vf_load(scales + i)));
        vf_store(offsets + i, offset);
    }
}

INLINE void unpack_values_bits(const int bits, const page_side *side, const uint8_t *page,
                               uint64_t valid, float *values) {
    int64_t d = side->head_dim;
    int n_blocks = side->head_dim / 16, group_blocks = side->group / 16;
    float scaled[16], offsets[16];
    for (int tile = 0; tile < 4; tile++) {
        int high_row = bits == 3 ? tile / 2 : tile;
        for (int b = 0; b < n_blocks; b++) {
            if (b % group_blocks == 0)
                tile_params(page + side->params_offset + b / group_blocks * 256, 16 * tile, valid,
                            scaled, offsets);
            const uint8_t *low = page + (tile * n_blocks + b) * 64;
            const uint8_t *high = page + side->high_offset + (high_row * n_blocks + b) * 64;
            UNROLL for (int v = 0; v < UNIT_VECS; v++) {
                int at = 4 * LANES * v;
                code_words w = load_words(bits, low + at, high + at, tile % 2);
                float *out = values + 16 * tile * d + 16 * b + LANES * v;
                UNROLL for (int i = 0; i < 16; i++)
                    vf_store(out + i * d, vf_fma(code_floats(bits, &w, i), vf_set1(scaled[i]),
                                                 vf_set1(offsets[i])));
            }
        }
    }
}

static void unpack_keys(const page_side *side, const uint8_t *page, uint64_t valid, float *keys) {
    switch (side->bits) {
    case 2: unpack_keys_bits(2, side, page, valid, keys); break;
    case 3: unpack_keys_bits(3, side, page, valid, keys); break;
    default: unpack_keys_bits(4, side, page, valid, keys); break;
    }
}

static void unpack_values(const page_side *side, const uint8_t *page, uint64_t valid,
                          float *values) {
    switch (side->bits) {
    case 2: unpack_values_bits(2, side, page, valid, values); break;
    case 3: unpack_values_bits(3, side, page, valid, values); break;
    default: unpack_values_bits(4, side, page, valid, values); break;
    }
}

/* The first and the second of pairs of BF16 numbers. */
INLINE vf first_of_pairs(vi pairs) { return vf_from_bits(vi_shl(pairs, 16)); }
INLINE vf second_of_pairs(vi pairs) { return vf_from_bits(vi_and(pairs, vi_set1((int)0xffff0000u))); }

static void widen_keys(int32_t head_dim, const uint16_t *page, uint64_t valid, float *keys) {
    for (int32_t c = 0; c < head_dim; c += 2, keys += 2 * TILE)
        for (int t = 0; t < TILE; t += LANES, page += 2 * LANES) {
            vi pairs = vi_load((const uint8_t *)page);
            vf_store(keys + t, vf_keep(lane_bits(valid, t), first_of_pairs(pairs)));
            vf_store(keys + TILE + t, vf_keep(lane_bits(valid, t), second_of_pairs(pairs)));
        }
}

static void widen_values(int32_t head_dim, const uint16_t *page, uint64_t valid, float *values) {
    for (int t = 0; t < TILE; t += 2, values += 2 * head_dim)
        for (int32_t c = 0; c < head_dim; c += LANES, page += 2 * LANES) {
            vi pairs = vi_load((const uint8_t *)page);
            vf_store(values + c, valid >> t & 1 ? first_of_pairs(pairs) : vf_zero());
            vf_store(values + head_dim + c, valid >> (t + 1) & 1 ? second_of_pairs(pairs) : vf_zero());
        }
}

static void widen_half(int32_t n, const uint16_t *x, float *y) {
    for (int32_t i = 0; i < n; i += LANES) vf_store(y + i, vf_load_fp16((const uint8_t *)(x + i)));
}

/* --- tiles ---------------------------------------------------------------------------------- */

/* Logits of a run of rows to weights; alpha: the factors of all before, whole vectors. */
static void weights_run(attn_rows *rows, int first, int n, const uint64_t *masks, float *alpha) {
    float sums[ATTN_ROWS_MAX];
    for (int r = 0; r < n; r++) row_softmax(rows, first + r, masks[first + r], &alpha[r], &sums[r]);
    for (int r = n; r % LANES != 0; r++) alpha[r] = 0.0f;
    for (int r = 0; r < n; r += LANES) vf_store(alpha + r, vf_exp(vf_load(alpha + r)));
    for (int r = 0; r < n; r++) rows->row_sum[first + r] = rows->row_sum[first + r] * alpha[r] + sums[r];
}

/* The run of rows that see something of a tile, from row *first on; returns their number, 0: no more. */
static int next_run(const attn_rows *rows, const uint64_t *masks, int *first) {
    int r = *first;
    while (r < rows->n_rows && masks[r] == 0) r++;
    *first = r;
    while (r < rows->n_rows && masks[r] != 0) r++;
    return r - *first;
}

static void tile(attn_rows *rows, const float *keys, const float *values, const uint64_t *masks) {
    const int64_t d = rows->head_dim, q_dim = rows->q_dim;
    float alpha[ATTN_ROWS_MAX];
    assert(rows->n_rows <= ATTN_ROWS_MAX);
    for (int first = 0, n; (n = next_run(rows, masks, &first)) > 0; first += n) {
        float *logits = rows->logits + (int64_t)first * TILE;
        gemm scores = {rows->q_dim, rows->q + first * q_dim, q_dim, keys, TILE, logits, TILE, NULL};
        gemm_run(&scores, n, TILE);
        weights_run(rows, first, n, masks, alpha);
        gemm output = {TILE, logits, TILE, values, d, rows->acc + first * d, d, alpha};
        gemm_run(&output, n, rows->head_dim);
    }
}

/* --- few rows ------------------------------------------------------------------------------- */

/* C = A B or alpha C + A B for few rows, B pairs of BF16 numbers and then floats; sums as in gemm_block(). */
typedef struct few_product {
    int32_t n_pairs, n_floats, n_columns;
    const float *a; /* [n_rows, 2 n_pairs + n_floats], stride a_stride */
    int64_t a_stride;
    const uint16_t *pairs; /* [n_pairs, n_columns, 2] */
    const float *floats;   /* [n_floats, n_columns] */
    uint64_t keep;         /* rows of B, two a pair, that are not taken as zeros whatever they hold */
    float *c;              /* [n_rows, n_columns], stride c_stride */
    int64_t c_stride;
    const float *alpha; /* [n_rows]; NULL: C starts from zero */
    const uint8_t *ask; /* as many bytes as the pairs take, asked for as these are read */
    bool ask_near;      /* isa_asks_near() */
} few_product;

#define FOR_FEW                                                                                    \
    UNROLL for (int r = 0; r < ATTN_FEW_ROWS; r++)                                                 \
        UNROLL for (int v = 0; v < 4; v++)                                                         \
            if (r < n_rows && v < n_vecs)

INLINE void few_block(const int n_rows, const int n_vecs, const bool all, const few_product *p, int column) {
    vf acc[ATTN_FEW_ROWS][4];
    const float *a = p->a, *floats = p->n_floats > 0 ? p->floats + column : NULL;
    float *c = p->c + column;
    const uint16_t *pairs = p->pairs + 2 * column;
    const int64_t a_stride = p->a_stride, row = 2 * (int64_t)p->n_columns;
    const int n_pairs = p->n_pairs;
    FOR_FEW acc[r][v] = vf_zero();
    if (p->alpha)
        FOR_FEW acc[r][v] = vf_mul(vf_set1(p->alpha[r]), vf_load(c + r * p->c_stride + v * LANES));
    for (int k = 0; k < n_pairs; k++, pairs += row, a += 2) {
        vf first[4], second[4];
        const uint32_t bits = all ? 3 : (uint32_t)(p->keep >> (2 * k)) & 3;
        const vi keep = vi_set1((int)((bits & 1 ? 0xffffu : 0) | (bits & 2 ? 0xffff0000u : 0)));
        const uint8_t *ask = p->ask + (pairs - p->pairs) * (int64_t)sizeof *pairs;
        UNROLL for (int v = 0; v < 4; v += 16 / LANES)
            if (v < n_vecs) attn_ask_line(ask + 4 * LANES * v, p->ask_near);
        UNROLL for (int v = 0; v < 4; v++) {
            vi both = v < n_vecs ? vi_load((const uint8_t *)(pairs + 2 * v * LANES)) : vi_zero();
            if (!all) both = vi_and(both, keep);
            first[v] = first_of_pairs(both);
            second[v] = second_of_pairs(both);
        }
        FOR_FEW acc[r][v] = vf_fma(vf_set1(a[r * a_stride]), first[v], acc[r][v]);
        FOR_FEW acc[r][v] = vf_fma(vf_set1(a[r * a_stride + 1]), second[v], acc[r][v]);
    }
    for (int k = 0; k < p->n_floats; k++, floats += p->n_columns, a++)
        FOR_FEW acc[r][v] = vf_fma(vf_set1(a[r * a_stride]), vf_load(floats + v * LANES), acc[r][v]);
    FOR_FEW vf_store(c + r * p->c_stride + v * LANES, acc[r][v]);
}

/* Enough sums to hide a multiplication, and registers for both halves of the pairs. */
INLINE int few_vecs(int n_rows) { return n_rows <= 2 ? 4 : n_rows <= 4 ? 2 : 1; }

INLINE void few_rows(const int n_rows, const bool all, const few_product *p) {
    const int n_vecs = few_vecs(n_rows);
    int column = 0;
    for (; column + n_vecs * LANES <= p->n_columns; column += n_vecs * LANES) few_block(n_rows, n_vecs, all, p, column);
    for (; column < p->n_columns; column += LANES) few_block(n_rows, 1, all, p, column);
}

#define FEW_BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#define FEW_KERNEL(rows)                                                                           \
    static void few_##rows(const few_product *p) {                                                 \
        if (p->keep == UINT64_MAX)                                                                 \
            few_rows(rows, true, p);                                                               \
        else                                                                                       \
            few_rows(rows, false, p);                                                              \
    }
#define FEW_ENTRY(rows) [rows - 1] = few_##rows,
FEW_BLOCKS(FEW_KERNEL)
static void (*const few_kernels[ATTN_FEW_ROWS])(const few_product *) = {FEW_BLOCKS(FEW_ENTRY)};

static void tile_few(attn_rows *rows, const uint16_t *keys, const uint16_t *values, const float *table, uint64_t valid,
                     const uint64_t *masks, const uint16_t *next_keys) {
    const int64_t d = rows->head_dim, q_dim = rows->q_dim;
    const bool near = isa_asks_near();
    /* Each product asks for what the one after it reads; without a next tile the last for what it reads itself. */
    const uint8_t *ask_values = (const uint8_t *)values, *ask_next = (const uint8_t *)(next_keys ? next_keys : values);
    float alpha[ATTN_FEW_ROWS + LANES];
    assert(rows->n_rows <= ATTN_FEW_ROWS);
    for (int first = 0, n; (n = next_run(rows, masks, &first)) > 0; first += n) {
        float *logits = rows->logits + (int64_t)first * TILE;
        /* Columns of slots that are not valid go no further than their logits, which masks hide. */
        few_product scores = {rows->head_dim / 2, rows->q_dim - rows->head_dim, TILE, rows->q + first * q_dim, q_dim, keys, table,
                              UINT64_MAX, logits, TILE, NULL, ask_values, near};
        few_kernels[n - 1](&scores);
        weights_run(rows, first, n, masks, alpha);
        few_product output = {TILE / 2, 0, rows->head_dim, logits, TILE, values, NULL, valid, rows->acc + first * d, d, alpha, ask_next, near};
        few_kernels[n - 1](&output);
    }
}

/* --- rotations ------------------------------------------------------------------------------ */

static void rotate(int32_t head_dim, const float *u, int32_t n_rows, const float *x,
                   int64_t x_stride, float *y, int64_t y_stride) {
    gemm g = {head_dim, x, x_stride, u, head_dim, y, y_stride, NULL};
    gemm_run(&g, n_rows, head_dim);
}

static void turn(attn_rows *rows, int32_t n_pairs, const float *pairs, const float *cosines,
                 const float *sines) {
    turn_pairs(rows->n_rows, n_pairs, pairs, cosines, sines, rows->q + rows->head_dim, rows->q_dim);
}

const attn_ops ATTN_TABLE = {
    .name = ATTN_NAME,
    .unpack_keys = unpack_keys,
    .unpack_values = unpack_values,
    .widen_keys = widen_keys,
    .widen_values = widen_values,
    .widen_half = widen_half,
    .tile = tile,
    .tile_few = tile_few,
    .rotate = rotate,
    .turn = turn,
};

#endif
