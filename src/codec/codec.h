/*
 * codec.h - from a float row to codes, step and offset, and back.
 *
 * One row is one side (key or value) of one token of one KV head: head_dim numbers in the rotated
 * basis, means already removed. A row is cut in groups of `group` channels; each has an fp16 step s
 * and offset m, each channel a code c of 2, 3 or 4 bits, and x^ = m + s c (docs/METHOD.md).
 */
#ifndef OSCAR_CODEC_H
#define OSCAR_CODEC_H

#include "base/base.h"

/* Rows are quantised CODEC_LANES at a time, one row a lane, few rows with one channel a lane: every
 * path and form does the same operations in the same order (fused multiply-adds included), so codes
 * and parameters are bit-equal. */
#define CODEC_LANES 16
#define CODEC_MAX_GROUPS 32

/* Channels in a group for a head_dim: head_dim up to 128, above the largest multiple of 16 that
 * divides it and is at most 128. */
int32_t codec_group(int32_t head_dim);

/* Everything needed to quantise rows of one side of one KV head. Pointers are views. */
typedef struct row_codec {
    int32_t head_dim;
    int32_t group;   /* channels a group */
    int32_t bits;    /* 2, 3, 4 */
    int32_t recipe;  /* oscar_recipe */
    float clip;      /* OSCAR_RECIPE_ZOO: fraction of sorted |x| that the clamp keeps; 1: none */
    bool ldlq;       /* error feedback in the metric below (keys) */
    bool gain;       /* rescale so that <x^, x>_M = <x, x>_M */
    /* Metric M = B D B^T over the rotated channels, B unit lower triangular. NULL: identity (then
     * ldlq must be false). */
    const float *metric_b; /* [head_dim, head_dim] row major, B[i][j], zero above the diagonal */
    const float *metric_d; /* [head_dim] */
    const float *rotation; /* [head_dim, head_dim]: y = x U, row vector times matrix; NULL: identity */
    bool bf16; /* rotated rows are rounded to BF16 first: CUDA makes codes of its overlay's rows, which are rotated */
    /* What row_codec_prepare() computes; NULL: computed in every call. */
    const float *ones;      /* [n_groups, head_dim] 1_g B, 1_g: ones over the channels of group g */
    const float *ones_ones; /* [n_groups] <1_g, 1_g>_M */
} row_codec;

/* Computes what is the same for every row into ones [n_groups, head_dim] and ones_ones [n_groups],
 * which the codec then points to. Needs the metric. */
void row_codec_prepare(row_codec *codec, float *ones, float *ones_ones);

/* Rotates and quantises n_rows <= CODEC_LANES rows.
 *   x:      [n_rows, head_dim] f32, stride x_stride: rows with their means removed, not yet rotated
 *   y:      [n_rows, head_dim] f32, receives the rotated rows (what CUDA's BF16 overlay holds); NULL
 *   codes:  [n_rows, head_dim] one code a byte; NULL: rows are only rotated
 *   params: [n_rows, n_groups, 2] fp16 step, offset; NULL with the codes
 * Returns a bit a row that held NaN or infinity (before or after rotation): such a row is stored as
 * zeros (step 0, offset 0, codes 0) and must be reported; the other rows are unaffected. */
uint32_t codec_quantize_rows(const row_codec *codec, int n_rows, const float *x, int64_t x_stride,
                             float *y, uint8_t *codes, uint16_t *params);

/* The same on a named path; the tests compare them. */
typedef struct codec_ops {
    const char *name;
    uint32_t (*quantize_rows)(const row_codec *codec, int n_rows, const float *x, int64_t x_stride,
                              float *y, uint8_t *codes, uint16_t *params);
} codec_ops;
extern const codec_ops codec_ops_ref;
extern const codec_ops codec_ops_avx2;   /* in x86-64 builds */
extern const codec_ops codec_ops_avx512; /* in x86-64 builds */
extern const codec_ops codec_ops_neon;   /* in AArch64 builds */

/* M (symmetric positive semi-definite, [d, d] f64) + damp * mean(diag) I = B D B^T.
 * NOT_FINITE when it has no factor. */
oscar_status codec_factor_metric(int32_t d, const double *metric, double damp, float *b, float *dg,
                                 oscar_error *error);

#endif
