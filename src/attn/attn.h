/*
 * attn.h - attention of a block of query rows over tiles of 64 positions.
 *
 * Everything is a tile: 64 positions aligned to 64, keys as [head_dim + 2 n_tracked][64] floats
 * (the last rows are the constant table R_i nu of the tracked key mean), values as [64][head_dim].
 * A query row sees of a tile the positions whose bit is set in its mask, and keeps a running
 * maximum, sum and weighted value (online softmax).
 */
#ifndef OSCAR_ATTN_H
#define OSCAR_ATTN_H

#include "codec/page.h"

/* Query rows that go through a tile together; a row is one query head of one token. */
#define ATTN_ROWS_MAX 128

/* State of a block of rows. Arrays are 64-byte aligned. */
typedef struct attn_rows {
    int32_t n_rows;
    int32_t head_dim;   /* of the values and the accumulator */
    int32_t q_dim;      /* head_dim + 2 n_tracked: floats of a query row */
    float logit_scale;
    float logit_softcap; /* 0: off */
    float *q;            /* [n_rows, q_dim] rotated query, then the turned tracked pairs */
    const float *q_bias; /* [n_rows] added to q.k before the scale: q.mu */
    float *row_max;      /* [n_rows] -inf at the start */
    float *row_sum;      /* [n_rows] 0 at the start */
    float *acc;          /* [n_rows, head_dim] 0 at the start */
    float *logits;       /* [n_rows, 64] scratch */
} attn_rows;

typedef struct attn_ops {
    const char *name;
    /* Quantised page sides to floats. keys: [head_dim][64]; values: [64][head_dim].
     * Slots outside `valid` (a bit a slot) are written as zeros whatever the page holds there. */
    void (*unpack_keys)(const page_side *side, const uint8_t *page, uint64_t valid, float *keys);
    void (*unpack_values)(const page_side *side, const uint8_t *page, uint64_t valid, float *values);
    /* BF16 overlay: keys [head_dim][64] and values [64][head_dim], the same shapes as the output. */
    void (*widen_keys)(int32_t head_dim, const uint16_t *page, uint64_t valid, float *keys);
    void (*widen_values)(int32_t head_dim, const uint16_t *page, uint64_t valid, float *values);
    /* One tile. keys: [q_dim][64], values: [64][head_dim]; masks: [n_rows] visible positions.
     * Rows with an empty mask are left as they were. Positions outside every mask must be finite.
     * What a row receives does not depend, to the bit, on the other rows of the block. */
    void (*tile)(attn_rows *rows, const float *keys, const float *values, const uint64_t *masks);
    /* y[r] = x[r] U for n_rows rows: row vector times matrix, [head_dim, head_dim]. x and y do not
     * overlap; any n_rows, rows as independent as above. */
    void (*rotate)(int32_t head_dim, const float *u, int32_t n_rows, const float *x,
                   int64_t x_stride, float *y, int64_t y_stride);
} attn_ops;

extern const attn_ops attn_ops_ref;
extern const attn_ops attn_ops_avx2;   /* in x86-64 builds */
extern const attn_ops attn_ops_avx512; /* in x86-64 builds */
/* The table of isa_current(). */
const attn_ops *attn_ops_current(void);

#endif
