/*
 * decode_params.h - what the host hands to the decode kernels.
 */
#ifndef OSCAR_CUDA_DECODE_PARAMS_H
#define OSCAR_CUDA_DECODE_PARAMS_H

#include <cuda_runtime.h>
#include <stdint.h>

#include "oscar/cuda.h"

/* Most CTAs of a launch. */
#define DECODE_MAX_CTAS 192
/* Most floats of a CTA's partial result: 16 rows of 128 channels, 8 of 256. */
#define DECODE_MAX_SLOT_FLOATS 2048

/* Pages of a run, whose key bias is products with one table: RUN_PAGES where high halves are enough, SHORT_RUN otherwise
 * (decode_runs.cuh). */
#define RUN_PAGES 4
#define SHORT_RUN 2
/* The same of up to 16 pairs with 9 to 16 rows (decode_few.cuh): FEW_RUN, or twos of FEW_SHORT where low halves are needed. These
 * tables have a unit, FEW_UNIT times the head's (which divides nu) brought within FEW_LEAST and FEW_MOST: fp16 numbers. */
#define FEW_RUN 8
#define FEW_SHORT 4
#define FEW_UNIT 512
#define FEW_LEAST (1.0f / 512)
#define FEW_MOST 64.0f
/* Lines of 16 bytes of a step of 16 of such a table's products: of high halves, or high and low ones of half as many pages. */
#define RUN_LINES (RUN_PAGES * 128)
/* Those of a table: three steps, then what slow pairs are made of. steps: of 8 pairs, more than two. */
__host__ __device__ constexpr int run_lines(int steps, bool all) { return 3 * RUN_LINES + (steps - 2) * (all ? 32 : 16); }

/* H = n_kv_heads, d = head_dim. */
typedef struct DecodeParams {
    const uint8_t *pages;  /* [n_pages, H, tile_bytes] */
    const int *block_table; /* [n_seqs, table_stride] */
    const int *lengths;     /* [n_seqs] */
    const int *slots;       /* [n_seqs] or NULL */
    const uint16_t *overlay_k; /* [n_slots, H, sink8 + ring, d] bf16 */
    const uint16_t *overlay_v;
    const uint16_t *q; /* [n_seqs, n_q_tokens, H * gqa, d] */
    void *out;
    const float *sink_logits; /* [H * gqa] or NULL */

    const uint4 *k_rotation;   /* [H, d/16, d/16, 2, 32] fragments of U^T, high and low fp16 halves */
    const float *k_mean;       /* [H, d] or NULL */
    const float *v_mean_rotated; /* [H, d] or NULL: mean times U_V */
    const float *v_rotation_t; /* [H, d, d] U_V^T, or NULL: no turning back */
    const uint4 *bias_table;   /* [H, bias_steps / 2, 2, 2, 2, 32] fragments of cos - 1 and sin, high and low halves */
    const uint4 *bias_waves;   /* [H, 2, 2, 2, 32] up to 16 pairs: the same with cos instead of cos - 1; in plans with
                                  mirror_pages: [H, bias_steps / 2, 2, 2, 4, 32], any number */
    const float4 *bias_nu;     /* [H, bias_steps, 4] nu of two pairs at the middle of a page, over the head's unit; in
                                  plans with mirror_pages: at the middle between pages that lie so far apart */
    const float *bias_units;   /* [H] powers of two */
    const float4 *bias_strides; /* [33, H, bias_steps, 4] up to 64 pairs: turns of two pairs by 0 .. 32 pages: cos, sin */
    const unsigned long long *bias_turn; /* [H, 8 bias_steps] turns a page, 64 bits after the point */
    const int2 *bias_dims;     /* [H, 8 bias_steps] the two dims of a pair */

    float *partials;      /* [2 n_ctas, slot_floats] */
    float2 *partial_sums; /* [2 n_ctas, 16] a row's maximum (log2) and sum */
    uint32_t *counters;   /* [n_seqs * H * row_tiles], zero between launches */

    int table_stride;
    int n_seqs, n_q_tokens, n_kv_heads, gqa, row_tiles;
    int sink, sink8, recent, ring, window;
    int tile_bytes, bits_k, bits_v;
    int bias_steps, bias_split_steps; /* steps of 8 pairs, an even number; the first so many need all products */
    int bias_even_steps, bias_odd_steps; /* in decode: the first so many need all products of E and of O (decode_bias.cuh);
                                            beyond the latter E has none */
    uint32_t gqa_magic, row_tiles_magic; /* for divide() of device.cuh */
    int q_is_bf16;
    int out_dtype; /* oscar_dtype */
    float scale_log2;   /* logit scale times log2 e */
    float softcap_log2; /* cap times log2 e; 0: off */
    int unit_pad; /* one sequence: eighths of a tile that a unit of BF16 tokens costs more than a tile */

    /* More than 16 pairs, by runs of pages (decode_runs.cuh): */
    const uint4 *bias_runs;       /* [H, run_lines(bias_steps, false)] tables of runs of RUN_PAGES */
    const uint4 *bias_short_runs; /* [H, run_lines(bias_steps, true)] of SHORT_RUN, with low halves */
    const uint32_t *bias_half;    /* [H, 8 bias_steps] turns of half a page, 32 bits after the point */
    int bias_long_runs;           /* whether pairs are slow enough for the first */
    /* Up to 16 pairs, by runs of pages (decode_few.cuh): */
    const uint4 *bias_few;     /* [H, 2, FEW_RUN, 4, 32] fragments of cos and sin of 8 pairs from the middle of a run */
    const uint4 *bias_few_low; /* [H, 2, 2, 2 FEW_SHORT, 32] of cos, then sin, of 16 pairs from .5 tokens on, high and low halves */
} DecodeParams;

/* How a launch of one head_dim looks for a number of rows (query heads x tokens of a KV head). */
typedef struct DecodePlan {
    int tile_rows; /* rows a pass over the pages: 4, 8, 12 or 16 */
    int row_tiles;
    int n_ctas;
    size_t shared_bytes;
    int n_threads;
    int unit_pad;     /* see DecodeParams */
    int mirror_pages; /* distance of the two pages whose key bias is made at once, one mirrored to the other; 0: none */
    void (*kernel)(const DecodeParams);
} DecodePlan;

/* What a kernel must be able to do. */
typedef struct DecodeNeeds {
    int rows;
    bool bulk;   /* the device has bulk copies (compute capability 9.0 and later) */
    bool wgmma;  /* the device has products of warpgroups (compute capability 9.0 alone) */
    bool capped; /* a soft cap */
    bool high;   /* keys or values of more than 2 bits */
    int bias_steps; /* 8 tracked pairs each */
} DecodeNeeds;

/* Returns false when nothing fits. */
bool decode_plan_d64(DecodePlan *plan, const DecodeNeeds *needs);
bool decode_plan_d128(DecodePlan *plan, const DecodeNeeds *needs);
bool decode_plan_d256(DecodePlan *plan, const DecodeNeeds *needs);
/* The same for needs->high. */
bool decode_plan_high_d64(DecodePlan *plan, const DecodeNeeds *needs);
bool decode_plan_high_d128(DecodePlan *plan, const DecodeNeeds *needs);
bool decode_plan_high_d256(DecodePlan *plan, const DecodeNeeds *needs);
/* The same for many query tokens; row_tiles is the number of CTAs a KV head. */
bool prefill_plan_d64(DecodePlan *plan, const DecodeNeeds *needs, size_t shared_max);
bool prefill_plan_d128(DecodePlan *plan, const DecodeNeeds *needs, size_t shared_max);
bool prefill_plan_d256(DecodePlan *plan, const DecodeNeeds *needs, size_t shared_max);
/* head_dim 128 on warpgroups' products. */
bool prefill_plan_wgmma(DecodePlan *plan, const DecodeNeeds *needs, size_t shared_max);

#endif
