/*
 * append_input.cuh - what the append and settle kernels are given, and how they find and read it.
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
    const float *feedback;     /* [H, LAYOUT_FEEDBACK_FLOATS] or NULL: keys of many rows */
    int bits, ldlq, gain, n_ctas; /* CTAs a head */
    float clip;
};

struct AppendParams {
    AppendSide side[2];
    const int *seqs, *positions; /* [n_tokens]; NULL when settling */
    const int *from, *to;        /* [n_seqs] positions to settle */
    const int *block_table, *slots;
    uint8_t *pages;
    int *bad_token; /* NULL or the lowest token with NaN or infinity */
    const float *bias_table; /* [H, n_tracked, 2, 64] R_i nu */
    const int2 *bias_dims;   /* [H, n_tracked] */
    const float *bias_freq;  /* [H, n_tracked] */
    int n_tokens, n_seqs, n_kv_heads, table_stride, dtype, recipe;
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

/* 16-byte asynchronous copies of n floats by n_threads threads, of which this is one. */
DEVICE void stage(float *to, const float *from, int n, int thread, int n_threads) {
    for (int i = 4 * thread; i < n; i += 4 * n_threads)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + i)), "l"(from + i)
                     : "memory");
}

/* The side, the head and the first group of rows of this CTA; keys come first. */
struct Part {
    int side, head, group;
    DEVICE explicit Part(const AppendParams &p) {
        const int n_keys = p.n_kv_heads * p.side[0].n_ctas;
        side = static_cast<int>(blockIdx.x) >= n_keys;
        const int cta = blockIdx.x - (side ? n_keys : 0);
        head = cta % p.n_kv_heads;
        group = cta / p.n_kv_heads;
    }
};

/* Where a row belongs. */
struct RowPlace {
    int seq, position;
    bool valid; /* there is such a row */
};

DEVICE RowPlace place_of_token(const AppendParams &p, int token) {
    RowPlace at;
    at.valid = token < p.n_tokens;
    at.position = at.valid ? load_int(p.positions + token) : 0;
    at.seq = at.valid ? load_int(p.seqs + token) : 0;
    return at;
}

/* The row-th (the lane's own) of the rows to settle: positions from .. to - 1 of the first sequence, then of the next.
 * All lanes of a warp come here; returns how many rows there are. */
DEVICE int place_to_settle(const AppendParams &p, int row, RowPlace *at) {
    const int lane = threadIdx.x & 31;
    int before = 0;
    at->valid = false;
    at->seq = at->position = 0;
#pragma unroll 1
    for (int first = 0; first < p.n_seqs; first += 32) {
        const bool exists = first + lane < p.n_seqs;
        const int from = exists ? load_int(p.from + first + lane) : 0;
        const int n = exists ? max(load_int(p.to + first + lane) - from, 0) : 0;
        int sum = n; /* of this sequence and those before */
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const int other = __shfl_up_sync(FULL_WARP, sum, d);
            if (lane >= d) sum += other;
        }
        const int total = __shfl_sync(FULL_WARP, sum, 31);
        const bool here = row >= before && row < before + total;
        if (__any_sync(FULL_WARP, here)) {
            int which = 0; /* sequences that end at or before the row */
#pragma unroll
            for (int k = 0; k < 32; k++) which += before + __shfl_sync(FULL_WARP, sum, k) <= row;
            const int start = __shfl_sync(FULL_WARP, from + n - sum, which & 31); /* position of the list's row 0 */
            if (here) {
                at->valid = true;
                at->seq = first + which;
                at->position = start + row - before;
            }
        }
        before += total;
    }
    return before;
}

DEVICE int slot_of(const AppendParams &p, const RowPlace &at) { return at.valid && p.slots ? load_int(p.slots + at.seq) : at.seq; }

/* The tile of a row. */
DEVICE uint8_t *tile_of(const AppendParams &p, const RowPlace &at, int head) {
    const int page = at.valid ? load_int(p.block_table + static_cast<size_t>(at.seq) * p.table_stride + at.position / 64) : 0;
    return p.pages + (static_cast<size_t>(page) * p.n_kv_heads + head) * p.tile_bytes;
}

/* A row of the overlay. */
template <int D> DEVICE uint16_t *overlay_of(const AppendParams &p, const AppendSide &from, const RowPlace &at, int slot, int head) {
    const int row = at.position < p.sink ? at.position : p.sink8 + at.position % p.ring;
    return from.overlay + (static_cast<size_t>(slot * p.n_kv_heads + head) * (p.sink8 + p.ring) + row) * D;
}

/* The tracked mean of the head's pair at a position: what is taken off its two channels. */
struct TrackedMean {
    int2 dims;
    float x, y;
};
DEVICE TrackedMean tracked_mean(const AppendParams &p, int head, int i, int position) {
    const int pair = head * p.n_tracked + i;
    /* R_i nu is on its way while the angle of the page's start is worked out. */
    const int *table = reinterpret_cast<const int *>(p.bias_table) + pair * 128 + position % 64;
    const float a = __int_as_float(load_int(table)), b = __int_as_float(load_int(table + 64));
    TrackedMean mean;
    mean.dims = __ldg(p.bias_dims + pair);
    double s, c;
    sincos(static_cast<double>(position / 64 * 64) * static_cast<double>(__ldg(p.bias_freq + pair)), &s, &c);
    const float cosine = static_cast<float>(c), sine = static_cast<float>(s);
    mean.x = a * cosine - b * sine;
    mean.y = a * sine + b * cosine;
    return mean;
}

#endif
