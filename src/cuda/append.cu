/*
 * append.cu - quantises the rows of new tokens into pages and overlay.
 *
 * A warp takes one row: one side of one token of one KV head. It does the operations of
 * src/codec/quantize_rows.inc.h in the same order, fused where that file fuses, so that codes are
 * bit-equal to the CPU's; this file is compiled without contraction. What a channel does alone is
 * spread over the lanes (lane l has channels CPL l .. CPL l + CPL - 1); sums over channels whose
 * order shows in the result are chains, several of them side by side on different lanes.
 */
#include <float.h>

#include "device.cuh"
#include "layer.h"
#include "layout.h"

#define ROW_LIMIT 1048576.0f
#define STEP_MIN 1e-30f
#define REFIT_SINGULAR 1e-6f
#define LS_ROUNDS 6
#define LDLQ_REFITS 3
#define ROWS_A_CTA 4
#define MAX_STARTS 3

struct AppendSide {
    const void *in;     /* [n_tokens, H, d] */
    uint16_t *overlay;  /* [n_slots, H, sink8 + ring, d] bf16 */
    const float *rotation; /* [H, d, d] or NULL */
    const float *mean;     /* [H, d] or NULL */
    const float *metric_b; /* [H, d, d] or NULL */
    const float *metric_d; /* [H, d] */
    const float *ones;     /* [H, G, d] 1_g B */
    const float *ones_ones; /* [H, G] */
    int ldlq, gain;
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

/* A warp's channels and scratch. G groups; all lanes of a group hold its step and offset. */
template <int D> struct Row {
    static constexpr int CPL = D / 32, G = D > 128 ? D / 128 : 1, GROUP = D / G, LANES = 32 / G;
    float x[CPL], code[CPL], r[CPL];
    float step, offset;
    float *scratch; /* [8][D] of this warp */
    int lane;
    DEVICE int channel(int k) const { return CPL * lane + k; }
    DEVICE int group() const { return lane / LANES; }
};

DEVICE float to_fp16(float v) {
    return __half2float(__float2half_rn(fminf(fmaxf(v, -65504.0f), 65504.0f)));
}
DEVICE float reciprocal(float step) { return STEP_MIN < step ? __fdiv_rn(1.0f, step) : 0.0f; }
DEVICE float round_code(float u, float top) { return truncf(fminf(fmaxf(u, 0.0f), top)); }

/* Over the lanes of a group. */
template <int LANES> DEVICE float group_sum(float v) {
#pragma unroll
    for (int d = 1; d < LANES; d <<= 1) v += __shfl_xor_sync(FULL_WARP, v, d);
    return v;
}
template <int LANES> DEVICE float group_min(float v) {
#pragma unroll
    for (int d = 1; d < LANES; d <<= 1) v = fminf(v, __shfl_xor_sync(FULL_WARP, v, d));
    return v;
}
template <int LANES> DEVICE float group_max(float v) {
#pragma unroll
    for (int d = 1; d < LANES; d <<= 1) v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, d));
    return v;
}

/* sum of a[j] b[j] in the order of j, from first to last - 1, of this lane's own arrays. */
DEVICE float chain(const float *a, const float *b, int first, int last) {
    float sum = 0;
#pragma unroll 16
    for (int j = first; j < last; j++) sum = fmaf(a[j], b[j], sum);
    return sum;
}

/* The value of rank `rank` (0: largest) of |x| within each group. Leaves |x| in scratch row 0. */
template <int D> DEVICE float magnitude_of_rank(Row<D> &w, int rank) {
    float *magnitude = w.scratch, *found = w.scratch + D;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < Row<D>::CPL; k++) magnitude[w.channel(k)] = fabsf(w.x[k]);
    __syncwarp();
    int above[Row<D>::CPL];
#pragma unroll
    for (int k = 0; k < Row<D>::CPL; k++) above[k] = 0;
    const int first = w.group() * Row<D>::GROUP;
#pragma unroll 4
    for (int j = first; j < first + Row<D>::GROUP; j++) {
        const float v = magnitude[j];
#pragma unroll
        for (int k = 0; k < Row<D>::CPL; k++) {
            const float mine = fabsf(w.x[k]);
            above[k] += v > mine || (v == mine && j < w.channel(k));
        }
    }
#pragma unroll
    for (int k = 0; k < Row<D>::CPL; k++)
        if (above[k] == rank) found[w.group()] = fabsf(w.x[k]);
    __syncwarp();
    return found[w.group()];
}

template <int D> DEVICE int rank_from_top(float clip) {
    const int rank = static_cast<int>(clip * static_cast<float>(Row<D>::GROUP));
    return Row<D>::GROUP - 1 - (rank < Row<D>::GROUP - 1 ? rank : Row<D>::GROUP - 1);
}

template <int D> DEVICE void start_params(Row<D> &w, float limit, float *step, float *offset) {
    float low = w.x[0], high = w.x[0];
#pragma unroll
    for (int k = 1; k < Row<D>::CPL; k++) {
        low = fminf(low, w.x[k]);
        high = fmaxf(high, w.x[k]);
    }
    low = group_min<Row<D>::LANES>(low);
    high = group_max<Row<D>::LANES>(high);
    low = fminf(fmaxf(low, -limit), limit);
    high = fminf(fmaxf(high, -limit), limit);
    *step = (high - low) * (1.0f / 3.0f);
    *offset = low;
}

/* Least squares from three starts at once. Chains: lane 8 g + 2 s + q of group g, start s; q = 0: sum
 * z c, q = 1: sum z. Sums of codes are integers: any order is exact. */
template <int D> DEVICE void least_squares(Row<D> &w) {
    using R = Row<D>;
    const float top = 3.0f + 0.49f, clips[2] = {0.96f, 0.88f};
    float step[MAX_STARTS], offset[MAX_STARTS], cc[MAX_STARTS], c1[MAX_STARTS];
#pragma unroll
    for (int s = 0; s < MAX_STARTS; s++) {
        const int rank = s == 0 ? 0 : rank_from_top<D>(clips[s == 0 ? 0 : s - 1]);
        start_params<D>(w, magnitude_of_rank<D>(w, rank), &step[s], &offset[s]);
    }
    const int chain_group = w.lane / 8 % R::G, chain_start = w.lane % 8 / 2 % MAX_STARTS;
    const int first = chain_group * R::GROUP;
    const float n = static_cast<float>(R::GROUP);
#pragma unroll 1
    for (int round = 0; round <= LS_ROUNDS; round++) {
        const bool last = round == LS_ROUNDS;
        __syncwarp();
#pragma unroll
        for (int s = 0; s < MAX_STARTS; s++) {
            if (last) {
                step[s] = to_fp16(step[s]);
                offset[s] = to_fp16(offset[s]);
            }
            const float inv = reciprocal(step[s]);
            cc[s] = c1[s] = 0;
#pragma unroll
            for (int k = 0; k < R::CPL; k++) {
                const float z = w.x[k] - offset[s];
                const float c = round_code(fmaf(z, inv, 0.5f), top);
                cc[s] += c * c;
                c1[s] += c;
                const float e = fmaf(-step[s], c, z);
                w.scratch[2 * s * D + w.channel(k)] = last ? e : z;
                w.scratch[(2 * s + 1) * D + w.channel(k)] = last ? e : c;
            }
            cc[s] = group_sum<R::LANES>(cc[s]);
            c1[s] = group_sum<R::LANES>(c1[s]);
        }
        __syncwarp();
        const float *z = w.scratch + 2 * chain_start * D;
        float sum = 0;
        const bool plain = (w.lane & 1) && !last;
#pragma unroll 16
        for (int j = first; j < first + R::GROUP; j++) sum = fmaf(z[j], plain ? 1.0f : z[D + j], sum);
        float best_error = FLT_MAX;
#pragma unroll
        for (int s = 0; s < MAX_STARTS; s++) {
            const float zc = __shfl_sync(FULL_WARP, sum, 8 * w.group() + 2 * s);
            const float z1 = __shfl_sync(FULL_WARP, sum, 8 * w.group() + 2 * s + 1);
            if (last) {
                const bool better = zc < best_error;
                if (!better && s > 0) continue;
                w.step = better ? step[s] : 0.0f;
                w.offset = better ? offset[s] : 0.0f;
                best_error = better ? zc : 0.0f;
                continue;
            }
            const float scale = cc[s] * n, det = fmaf(-c1[s], c1[s], scale);
            const float new_step = __fdiv_rn(fmaf(-c1[s], z1, zc * n), det);
            const float dm = __fdiv_rn(fmaf(-c1[s], zc, cc[s] * z1), det);
            if (scale * REFIT_SINGULAR < det && 0.0f < new_step) {
                step[s] = new_step;
                offset[s] = offset[s] + dm;
            }
        }
    }
}

template <int D> DEVICE void round_plain(Row<D> &w) {
    const float inv = reciprocal(w.step);
#pragma unroll
    for (int k = 0; k < Row<D>::CPL; k++)
        w.code[k] = round_code(fmaf(w.x[k] - w.offset, inv, 0.5f), 3.49f);
}

/* This lane's channels of a row of a [D, D] matrix. */
template <int CPL> DEVICE void load_row(float (&out)[CPL], const float *row) {
    if constexpr (CPL == 2) {
        const float2 v = __ldg(reinterpret_cast<const float2 *>(row));
        out[0] = v.x;
        out[1] = v.y;
    } else {
#pragma unroll
        for (int k = 0; k < CPL; k += 4) {
            const float4 v = __ldg(reinterpret_cast<const float4 *>(row + k));
            out[k] = v.x;
            out[k + 1] = v.y;
            out[k + 2] = v.z;
            out[k + 3] = v.w;
        }
    }
}

/* Rounds from the last channel down, feeding the error back; leaves (x - x^) B in r. */
template <int D> DEVICE void round_ldlq(Row<D> &w, const float *b) {
    constexpr int CPL = Row<D>::CPL;
    const float inv = reciprocal(w.step), shift = fmaf(-w.offset, inv, 0.5f);
    float t[CPL], next[CPL][CPL];
#pragma unroll
    for (int k = 0; k < CPL; k++) {
        t[k] = w.x[k];
        load_row<CPL>(next[k], b + (CPL * 31 + k) * D + CPL * w.lane);
    }
#pragma unroll 1
    for (int owner = 31; owner >= 0; owner--) {
        float rows[CPL][CPL];
#pragma unroll
        for (int k = 0; k < CPL; k++) {
#pragma unroll
            for (int m = 0; m < CPL; m++) rows[k][m] = next[k][m];
            if (owner > 0) load_row<CPL>(next[k], b + (CPL * (owner - 1) + k) * D + CPL * w.lane);
        }
#pragma unroll
        for (int k = CPL - 1; k >= 0; k--) {
            const float c = round_code(fmaf(t[k], inv, shift), 3.49f);
            const float mine = fmaf(w.step, c, w.offset - w.x[k]);
            if (w.lane == owner) {
                w.code[k] = c;
                w.r[k] = (t[k] - w.x[k]) - mine;
            }
            const float e = __shfl_sync(FULL_WARP, mine, owner);
#pragma unroll
            for (int m = 0; m < CPL; m++) t[m] = fmaf(-e, rows[k][m], t[m]);
        }
    }
}

/* out = a B for the lower triangular B, rows first .. last - 1 rising; a: [D] in scratch. */
template <int D>
DEVICE void product(Row<D> &w, const float *matrix, const float *a, int first, int last, float (&out)[D / 32]) {
    constexpr int CPL = Row<D>::CPL;
#pragma unroll
    for (int k = 0; k < CPL; k++) out[k] = 0;
#pragma unroll 8
    for (int i = first; i < last; i++) {
        float row[CPL];
        load_row<CPL>(row, matrix + i * D + CPL * w.lane);
        const float v = a[i];
#pragma unroll
        for (int k = 0; k < CPL; k++) out[k] = fmaf(v, row[k], out[k]);
    }
}

/* Refits step and offset of group g in the metric; see refit_group of the reference. */
template <int D> DEVICE void refit_group(Row<D> &w, const AppendSide &side, int head, int g) {
    using R = Row<D>;
    constexpr int CPL = R::CPL;
    const float *b = side.metric_b + static_cast<size_t>(head) * D * D, *d = side.metric_d + head * D;
    const float *ones = side.ones + (head * R::G + g) * D;
    const int i0 = g * R::GROUP, i1 = i0 + R::GROUP;
    float *s = w.scratch, product_w[CPL], own_ones[CPL];
    __syncwarp();
#pragma unroll
    for (int k = 0; k < CPL; k++) s[7 * D + w.channel(k)] = w.code[k];
    __syncwarp();
    product<D>(w, b, s + 7 * D, i0, i1, product_w);
#pragma unroll
    for (int k = 0; k < CPL; k++) {
        const int j = w.channel(k);
        own_ones[k] = j < i1 ? __ldg(ones + j) : 0.0f;
        const float dj = __ldg(d + j), dw = dj * product_w[k];
        s[j] = dw;
        s[D + j] = product_w[k];
        s[2 * D + j] = own_ones[k];
        s[3 * D + j] = w.r[k];
        s[4 * D + j] = dj * own_ones[k];
    }
    __syncwarp();
    /* cc, c1, rc, r1 on lanes 0 .. 3 */
    const float *x = s + (w.lane == 3 ? 4 : 0) * D, *y = s + (w.lane == 0 ? 1 : w.lane == 1 ? 2 : 3) * D;
    const float sum = chain(x, y, 0, i1);
    const float cc = __shfl_sync(FULL_WARP, sum, 0), c1 = __shfl_sync(FULL_WARP, sum, 1);
    const float rc = __shfl_sync(FULL_WARP, sum, 2), r1 = __shfl_sync(FULL_WARP, sum, 3);
    const float n = __ldg(side.ones_ones + head * R::G + g), scale = cc * n, det = fmaf(-c1, c1, scale);
    const float ds = __fdiv_rn(fmaf(-c1, r1, rc * n), det), dm = __fdiv_rn(fmaf(-c1, rc, cc * r1), det);
    const float old_step = __shfl_sync(FULL_WARP, w.step, g * R::LANES);
    const float old_offset = __shfl_sync(FULL_WARP, w.offset, g * R::LANES);
    float step = old_step + ds, offset = old_offset + dm;
    const bool ok = scale * REFIT_SINGULAR < det && 0.0f < step && fabsf(dm) < FLT_MAX;
    step = ok ? to_fp16(step) : old_step;
    offset = ok ? to_fp16(offset) : old_offset;
    if (w.group() == g) {
        w.step = step;
        w.offset = offset;
    }
    const float moved_step = step - old_step, moved_offset = offset - old_offset;
#pragma unroll
    for (int k = 0; k < CPL; k++) {
        if (w.channel(k) >= i1) continue;
        w.r[k] = fmaf(-moved_step, product_w[k], w.r[k]);
        w.r[k] = fmaf(-moved_offset, own_ones[k], w.r[k]);
    }
}

/* Scales step and offset so that the row keeps its length along itself. */
template <int D> DEVICE void apply_gain(Row<D> &w, const AppendSide &side, int head, bool have_r) {
    using R = Row<D>;
    constexpr int CPL = R::CPL;
    const float *b = side.metric_b ? side.metric_b + static_cast<size_t>(head) * D * D : nullptr;
    float *s = w.scratch, y[CPL];
    __syncwarp();
#pragma unroll
    for (int k = 0; k < CPL; k++) {
        s[7 * D + w.channel(k)] = w.x[k];
        const float e = fmaf(-w.step, w.code[k], w.x[k] - w.offset);
        s[6 * D + w.channel(k)] = e;
        y[k] = w.x[k];
        if (!have_r) w.r[k] = e;
    }
    __syncwarp();
    if (b) {
        if (!have_r) product<D>(w, b, s + 6 * D, 0, D, w.r);
        product<D>(w, b, s + 7 * D, 0, D, y);
    }
#pragma unroll
    for (int k = 0; k < CPL; k++) {
        const int j = w.channel(k);
        s[j] = b ? __ldg(side.metric_d + head * D + j) * y[k] : y[k];
        s[D + j] = y[k];
        s[2 * D + j] = w.r[k];
    }
    __syncwarp();
    const float sum = chain(s, s + (w.lane == 0 ? 1 : 2) * D, 0, D);
    const float xx = __shfl_sync(FULL_WARP, sum, 0), hat = xx - __shfl_sync(FULL_WARP, sum, 1);
    float factor = __fdiv_rn(xx, hat);
    factor = fminf(fmaxf(factor, 0.5f), 2.0f);
    factor = 0.0f < hat ? factor : 1.0f;
    w.step = to_fp16(w.step * factor);
    w.offset = to_fp16(w.offset * factor);
}

DEVICE float input_value(const void *in, size_t at, int dtype) {
    if (dtype == OSCAR_DTYPE_F32) return static_cast<const float *>(in)[at];
    const uint16_t h = static_cast<const uint16_t *>(in)[at];
    return dtype == OSCAR_DTYPE_BF16 ? __uint_as_float(static_cast<uint32_t>(h) << 16)
                                     : __half2float(__ushort_as_half(h));
}

/* The row without its means in scratch row 0. */
template <int D>
DEVICE void load_residual(const AppendParams &p, Row<D> &w, int side, int token, int head, int position) {
    const AppendSide &from = p.side[side];
    float *row = w.scratch;
    for (int j = w.lane; j < D; j += 32) {
        float v = input_value(from.in, (static_cast<size_t>(token) * p.n_kv_heads + head) * D + j, p.dtype);
        if (from.mean) v = v - __ldg(from.mean + head * D + j);
        row[j] = v;
    }
    __syncwarp();
    if (side == 0)
        for (int i = w.lane; i < p.n_tracked; i += 32) {
            const int pair = head * p.n_tracked + i;
            const int2 dims = __ldg(p.bias_dims + pair);
            double s, c;
            sincos(static_cast<double>(position / 64 * 64) * static_cast<double>(__ldg(p.bias_freq + pair)), &s, &c);
            const float cf = static_cast<float>(c), sf = static_cast<float>(s);
            const float x = __ldg(p.bias_table + pair * 128 + position % 64);
            const float y = __ldg(p.bias_table + pair * 128 + 64 + position % 64);
            row[dims.x] = row[dims.x] - (x * cf - y * sf);
            row[dims.y] = row[dims.y] - (x * sf + y * cf);
        }
    __syncwarp();
}

/* Codes in scratch row 0 to the tile. */
template <int D> DEVICE void store_tile(const Row<D> &w, int side, int slot, uint8_t *tile) {
    constexpr int W = D / 64, A_GROUP = D > 64 ? 2 : 1;
    const int sub = slot >> 4, r = slot & 15;
    uint8_t *plane = tile + side * layout_low_bytes(D) + sub * 256 * W;
    if (side == 0 && w.lane < D / 16) {
        const int block = w.lane, t = block % 8 / A_GROUP, word = block / 8 * A_GROUP + block % 8 % A_GROUP;
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < 16; i++) bits |= static_cast<uint32_t>(w.scratch[16 * block + i]) << (2 * i);
        *reinterpret_cast<uint32_t *>(plane + layout_word(W, 4 * (r & 7) + t, (r >> 3) * W + word)) = bits;
    } else if (side == 1 && w.lane < 8 * W) {
        const int g = w.lane & 7, word = w.lane >> 3;
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < 8; i++)
            bits |= static_cast<uint32_t>(w.scratch[layout_value_channel(word, g, i)]) << (2 * i);
        const int byte = layout_word(W, 4 * g + ((r & 7) >> 1), (r >> 3) * W + word) + 2 * (r & 1);
        *reinterpret_cast<uint16_t *>(plane + byte) = static_cast<uint16_t>(bits);
    }
    if (w.lane % Row<D>::LANES == 0)
        *reinterpret_cast<__half2 *>(tile + layout_param_offset(D, side) + layout_param(w.group(), slot)) =
            __halves2half2(__float2half_rn(w.step), __float2half_rn(w.offset));
}

template <int D>
__global__ void __launch_bounds__(32 * ROWS_A_CTA) append_kernel(const __grid_constant__ AppendParams p) {
    using R = Row<D>;
    __shared__ __align__(16) float scratch[ROWS_A_CTA][8 * D];
    const int warp = threadIdx.x >> 5, token = blockIdx.x * ROWS_A_CTA + warp;
    const int head = blockIdx.y >> 1, side = blockIdx.y & 1;
    if (token >= p.n_tokens) return;
    const AppendSide &from = p.side[side];
    const int position = load_int(p.positions + token), seq = load_int(p.seqs + token);
    R w;
    w.lane = threadIdx.x & 31;
    w.scratch = scratch[warp];
    load_residual<D>(p, w, side, token, head, position);

    bool finite = true;
    if (from.rotation) {
        for (int j = w.lane; j < D; j += 32) finite = finite && fabsf(w.scratch[j]) <= FLT_MAX;
        product<D>(w, from.rotation + static_cast<size_t>(head) * D * D, w.scratch, 0, D, w.x);
    } else {
#pragma unroll
        for (int k = 0; k < R::CPL; k++) w.x[k] = w.scratch[w.channel(k)];
    }
#pragma unroll
    for (int k = 0; k < R::CPL; k++) finite = finite && fabsf(w.x[k]) <= FLT_MAX;
    finite = __all_sync(FULL_WARP, finite);
    if (!finite && w.lane == 0 && p.bad_token) atomicMin(p.bad_token, token);
    const int slot = p.slots ? load_int(p.slots + seq) : seq;
    const int overlay_row = position < p.sink ? position : p.sink8 + position % p.ring;
    uint16_t *overlay = from.overlay + (static_cast<size_t>(slot * p.n_kv_heads + head) * (p.sink8 + p.ring) + overlay_row) * D;
#pragma unroll
    for (int k = 0; k < R::CPL; k++) {
        if (!finite) w.x[k] = 0;
        overlay[w.channel(k)] = __bfloat16_as_ushort(__float2bfloat16_rn(w.x[k]));
        w.x[k] = fminf(fmaxf(w.x[k], -ROW_LIMIT), ROW_LIMIT);
    }

    const bool zoo = p.recipe == OSCAR_RECIPE_ZOO;
    const bool ldlq = from.ldlq && from.metric_b && !zoo;
    if (zoo) {
        start_params<D>(w, magnitude_of_rank<D>(w, rank_from_top<D>(from.clip)), &w.step, &w.offset);
        w.step = to_fp16(w.step);
        w.offset = to_fp16(w.offset);
    } else {
        least_squares<D>(w);
    }
    if (ldlq) {
#pragma unroll 1
        for (int round = 0; round < LDLQ_REFITS; round++) {
            round_ldlq<D>(w, from.metric_b + static_cast<size_t>(head) * D * D);
#pragma unroll 1
            for (int g = 0; g < R::G; g++) refit_group<D>(w, from, head, g);
        }
    } else {
        round_plain<D>(w);
    }
    if (from.gain && !zoo) apply_gain<D>(w, from, head, ldlq);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < R::CPL; k++) w.scratch[w.channel(k)] = w.code[k];
    __syncwarp();
    const int page = load_int(p.block_table + static_cast<size_t>(seq) * p.table_stride + position / 64);
    store_tile<D>(w, side, position % 64, p.pages + (static_cast<size_t>(page) * p.n_kv_heads + head) * p.tile_bytes);
}

oscar_status oscar_cuda_append(const oscar_cuda_layer *layer, const oscar_cuda_append_args *a, oscar_cuda_stream stream,
                               oscar_error *error) {
    if (a->struct_size != sizeof *a)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "struct_size is %u, expected %zu", a->struct_size, sizeof *a);
    if (a->n_tokens < 1 || !a->k || !a->v || !a->seqs || !a->positions || !a->pages || !a->block_table ||
        !a->overlay_k || !a->overlay_v)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "n_tokens is %d or a pointer of the append arguments is NULL",
                              a->n_tokens);
    if (a->dtype < OSCAR_DTYPE_F32 || a->dtype > OSCAR_DTYPE_BF16)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "dtype is %d, expected F32, F16 or BF16", a->dtype);
    AppendParams p = {};
    for (int s = 0; s < 2; s++) {
        AppendSide &side = p.side[s];
        side.in = s ? a->v : a->k;
        side.overlay = (uint16_t *)(s ? a->overlay_v : a->overlay_k);
        side.rotation = s ? layer->v_rotation : layer->k_rotation;
        side.mean = s ? layer->v_mean : layer->k_mean;
        side.metric_b = s ? layer->v_metric_b : layer->k_metric_b;
        side.metric_d = s ? layer->v_metric_d : layer->k_metric_d;
        side.ldlq = s ? 0 : layer->ldlq_k;
        side.gain = s ? layer->gain_v : layer->gain_k;
        side.clip = s ? layer->clip_v : layer->clip_k;
    }
    p.side[0].ones = layer->k_ones;
    p.side[0].ones_ones = layer->k_ones_ones;
    p.seqs = a->seqs;
    p.positions = a->positions;
    p.block_table = a->block_table;
    p.slots = a->slots;
    p.pages = (uint8_t *)a->pages;
    p.bad_token = a->bad_token;
    p.bias_table = layer->append_bias_table;
    p.bias_dims = (const int2 *)layer->append_bias_dims;
    p.bias_freq = layer->append_bias_freq;
    p.n_tokens = a->n_tokens;
    p.n_kv_heads = layer->n_kv_heads;
    p.table_stride = a->table_stride;
    p.dtype = a->dtype;
    p.recipe = layer->recipe;
    p.n_tracked = 8 * layer->bias_steps;
    p.sink = layer->sink;
    p.sink8 = (layer->sink + 7) / 8 * 8;
    p.ring = layer->ring;
    p.tile_bytes = (int)oscar_cuda_tile_bytes(layer->head_dim, layer->bits_k, layer->bits_v);
    const dim3 grid((a->n_tokens + ROWS_A_CTA - 1) / ROWS_A_CTA, 2 * layer->n_kv_heads);
    void (*kernel)(const AppendParams) = layer->head_dim == 64    ? append_kernel<64>
                                         : layer->head_dim == 128 ? append_kernel<128>
                                                                  : append_kernel<256>;
    kernel<<<grid, 32 * ROWS_A_CTA, 0, (cudaStream_t)stream>>>(p);
    return cuda_check(cudaGetLastError(), "append launch", error);
}
