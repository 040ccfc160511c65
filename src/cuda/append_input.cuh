/*
 * append_input.cuh - what the append kernels are given, and how they read it.
 */
#ifndef OSCAR_CUDA_APPEND_INPUT_CUH
#define OSCAR_CUDA_APPEND_INPUT_CUH

#include "device.cuh"
#include "oscar/cuda.h"

struct AppendSide {
    const void *in;     /* [n_tokens, H, d] */
    uint16_t *overlay;  /* [n_slots, H, sink8 + ring, d] bf16 */
    const float *rotation; /* [H, d, d] or NULL */
    const float *mean;     /* [H, d] or NULL */
    const float *metric;   /* [H, layout_metric_floats()] or NULL */
    const float *metric_lanes; /* [H, LAYOUT_LANES_METRIC_FLOATS] or NULL */
    int bits, ldlq, gain, n_ctas; /* CTAs a head */
    float clip;
};

struct AppendParams {
    AppendSide side[2];
    const int *seqs, *positions; /* [n_tokens] */
    const int *block_table, *slots;
    uint8_t *pages;
    int *bad_token; /* NULL or the lowest token with NaN or infinity */
    const float *bias_table; /* [H, n_tracked, 2, 64] R_i nu */
    const int2 *bias_dims;   /* [H, n_tracked] */
    const float *bias_freq;  /* [H, n_tracked] */
    int n_tokens, n_kv_heads, table_stride, dtype, recipe;
    int n_tracked, sink, sink8, ring, tile_bytes;
};

/* N values as bits; all loads are in flight at once, and stay before what follows. */
template <int N> DEVICE void load_inputs(const void *in, const size_t (&at)[N], int dtype, uint32_t (&v)[N]) {
    if (dtype == OSCAR_DTYPE_F32) {
#pragma unroll
        for (int k = 0; k < N; k++)
            v[k] = static_cast<uint32_t>(load_int(static_cast<const int *>(in) + at[k]));
    } else {
#pragma unroll
        for (int k = 0; k < N; k++) v[k] = load_u16(static_cast<const uint16_t *>(in) + at[k]);
    }
}

DEVICE float input_value(uint32_t bits, int dtype) {
    return dtype == OSCAR_DTYPE_F32    ? __uint_as_float(bits)
           : dtype == OSCAR_DTYPE_BF16 ? __uint_as_float(bits << 16)
                                       : __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

/* What the overlay holds of a rotated row. Codes are made from that, so that they do not depend on when they are made. */
DEVICE float round_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

/* 16-byte asynchronous copies of n floats by all threads. */
DEVICE void stage(float *to, const float *from, int n, int n_threads) {
    for (int i = 4 * threadIdx.x; i < n; i += 4 * n_threads)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + i)), "l"(from + i)
                     : "memory");
}

/* Cosine and sine of a pair's angle at the start of a position's page. */
DEVICE float2 page_turn(const AppendParams &p, int head, int pair, int position) {
    double s, c;
    sincos(static_cast<double>(position / 64 * 64) * static_cast<double>(__ldg(p.bias_freq + head * p.n_tracked + pair)), &s, &c);
    return make_float2(static_cast<float>(c), static_cast<float>(s));
}

#endif
