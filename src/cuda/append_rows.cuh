/*
 * append_rows.cuh - the quantiser for one row on sixteen lanes, or on a warp.
 *
 * Lane l has channels l, l + 16, l + 32, ...: the sixteen partial sums of the CPU's quantiser
 * (src/codec/quantize_rows.inc.h), whose operations are done here in the same order, fused where that
 * file fuses, so that codes are bit-equal; a warp does two rows. What is included here is compiled
 * without contraction.
 *
 * Few rows leave most of a device idle, and what counts is how long one takes: then a warp has one row
 * (WIDE), and its halves share what can be shared: starts of the least squares, and the 64 upper and lower
 * channels of products with B. All else both halves do.
 *
 * A code is kept as c 2^-bits, which a saturating multiply-add and an addition that rounds to zero
 * give; scaling by a power of two changes no bit of a sum.
 *
 * Error feedback goes by blocks of eight channels. All lanes of a row do the block's chain themselves,
 * since a broadcast of every error would take as long as two steps of it; then each pushes the eight
 * errors and codes to its own channels below. B comes packed for that (AppendMetric).
 */
#ifndef OSCAR_CUDA_APPEND_ROWS_CUH
#define OSCAR_CUDA_APPEND_ROWS_CUH

#include <float.h>

#include "device.cuh"
#include "layer.h"
#include "layout.h"

#define ROW_LIMIT 1048576.0f
#define STEP_MIN 1e-30f
#define REFIT_SINGULAR 1e-6f
#define LS_ROUNDS 6
#define LDLQ_REFITS 3
#define BLOCK 8

/* What depends on the bits of a side. */
struct Levels {
    int bits, n_starts;
    float levels;     /* 2^bits */
    float unit;       /* 2^-bits */
    float magic, top; /* 2^(23 - bits); that plus 1 - unit */
    float inv_levels; /* 1 / (2^bits - 1) */
    float clips[2];   /* of the starts after the first */
};

DEVICE Levels levels_of(int bits) {
    Levels q;
    q.bits = bits;
    q.n_starts = bits == 2 ? 3 : 2;
    q.levels = static_cast<float>(1 << bits);
    q.unit = 1.0f / q.levels;
    q.magic = 8388608.0f * q.unit;
    q.top = q.magic + (1.0f - q.unit);
    q.inv_levels = __fdiv_rn(1.0f, q.levels - 1.0f);
    q.clips[0] = bits == 2 ? 0.96f : 0.98f;
    q.clips[1] = bits == 2 ? 0.88f : 0.98f;
    return q;
}

/* One head's metric, as pack_metric() of layer.cu leaves it; in shared or device memory. */
struct AppendMetric {
    const float *rows;   /* chunk k: [d - 64 k][16][4]: B[64 k + i][16 (4 k + e) + l] */
    const float *blocks; /* [d / 8][28] B within a block: row 7 columns 6 .. 0, row 6 columns 5 .. 0, ... */
    const float *d;      /* [d] */
    const float *ones;   /* [groups, d] */
    const float *ones_ones; /* [groups] */
};

/* Where its parts lie. */
template <int D> DEVICE AppendMetric metric_of(const float *packed) {
    AppendMetric m;
    m.rows = packed;
    m.blocks = packed + layout_metric_rows(D);
    m.d = m.blocks + D / 8 * 28;
    m.ones = m.d + D;
    m.ones_ones = m.ones + layout_groups(D) * D;
    return m;
}

template <int D, bool WIDE_ = false> struct Row {
    static constexpr bool WIDE = WIDE_;
    static constexpr int LANES = WIDE ? 32 : 16;
    static constexpr int N = D / 16, G = D > 128 ? D / 128 : 1, GROUP = D / G, NG = GROUP / 16;
    static constexpr int CHUNKS = N / 4;
    static constexpr int STRIDE = D + 16; /* floats of a row in shared memory: two rows on all banks */
    float x[N], code[N], r[N];
    float xb[N]; /* x B: for error feedback where all channels are one group */
    float step[G], offset[G];
    float *shared_x; /* [D] this row's x */
    float *scratch;  /* [D] of this row */
    int lane;        /* 0 .. 15 */
    bool upper;      /* WIDE: this is the upper half of the warp */
};

DEVICE float to_fp16(float v) {
    return __half2float(__float2half_rn(fminf(fmaxf(v, -65504.0f), 65504.0f)));
}
/* a / b rounded to nearest, where neither they nor the quotient come near the ends of the exponents'
 * range. What the compiler makes of a division, without its branch for the other cases: several of these
 * run side by side. */
DEVICE float quotient(float a, float b) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
    r = fmaf(r, fmaf(-b, r, 1.0f), r);
    float q = a * r;
    q = fmaf(r, fmaf(-b, q, a), q);
    return fmaf(r, fmaf(-b, q, a), q);
}
DEVICE float reciprocal(float step) { return STEP_MIN < step ? quotient(1.0f, step) : 0.0f; }

/* c 2^-bits of u = a b + c, all times 2^-bits: clamped, cut to a whole code. */
DEVICE float round_code(const Levels &q, float a, float b, float c) {
    const float u = __saturatef(__fmaf_rn(a, b, c));
    return fminf(__fadd_rz(u, q.magic), q.top) - q.magic;
}

/* The tree over the partial sums of a row. */
DEVICE float fold(float v) {
    v += __shfl_xor_sync(FULL_WARP, v, 8);
    v += __shfl_xor_sync(FULL_WARP, v, 4);
    v += __shfl_xor_sync(FULL_WARP, v, 2);
    return v + __shfl_xor_sync(FULL_WARP, v, 1);
}

DEVICE float4 load4(const float *p) { return *reinterpret_cast<const float4 *>(p); }

/* --- order statistics ---------------------------------------------------------------------------- */

/* Keeps the larger of two lanes' values where larger is set. */
DEVICE float exchange(float a, int n, bool larger) {
    const float b = __shfl_xor_sync(FULL_WARP, a, n);
    return larger ? fmaxf(a, b) : fminf(a, b);
}

/* The sixteen largest |x| of a group, falling with the lane. Bitonic: every sixteen are sorted, even
 * ones falling, odd ones rising, then pairs are merged. */
template <class R> DEVICE float largest_magnitudes(const R &w, int g) {
    constexpr int NG = R::NG;
    const int swaps[10] = {1, 2, 1, 4, 2, 1, 8, 4, 2, 1};
    const unsigned masks[10] = {0x9999, 0xc3c3, 0xa5a5, 0xf00f, 0xcc33, 0xaa55, 0x00ff, 0x0f0f, 0x3333, 0x5555};
    float v[NG];
#pragma unroll
    for (int m = 0; m < NG; m++) v[m] = fabsf(w.x[g * NG + m]);
#pragma unroll
    for (int s = 0; s < 10; s++) {
        const bool larger = masks[s] >> w.lane & 1;
#pragma unroll
        for (int m = 0; m < NG; m++) v[m] = exchange(v[m], swaps[s], larger != static_cast<bool>(m & 1));
    }
#pragma unroll
    for (int n = NG / 2; n > 0; n /= 2) {
#pragma unroll
        for (int m = 0; m < n; m++) v[m] = fmaxf(v[2 * m], v[2 * m + 1]);
#pragma unroll
        for (int s = 6; s < 10; s++) {
            const bool larger = masks[s] >> w.lane & 1;
#pragma unroll
            for (int m = 0; m < n; m++) v[m] = exchange(v[m], swaps[s], larger != static_cast<bool>(m & 1));
        }
    }
    return v[0];
}

/* The index min(int(clip G), G - 1) of |x| sorted rising, counted from the top. */
template <class R> DEVICE int rank_from_top(float clip) {
    const int rank = static_cast<int>(clip * static_cast<float>(R::GROUP));
    return R::GROUP - 1 - min(rank, R::GROUP - 1);
}

/* |x| of any rank (0: largest): the value with that many before it. */
template <class R> DEVICE float magnitude_of_rank(const R &w, int g, int rank) {
    int before[R::NG];
#pragma unroll
    for (int m = 0; m < R::NG; m++) before[m] = 0;
#pragma unroll 4
    for (int j = 0; j < R::GROUP; j++) {
        const float v = fabsf(w.shared_x[g * R::GROUP + j]);
#pragma unroll
        for (int m = 0; m < R::NG; m++) {
            const float mine = fabsf(w.x[g * R::NG + m]);
            before[m] += (v > mine) | ((v == mine) & (j < 16 * m + w.lane));
        }
    }
    float found = 0;
#pragma unroll
    for (int m = 0; m < R::NG; m++)
        if (before[m] == rank) found = fabsf(w.x[g * R::NG + m]);
#pragma unroll
    for (int n = 8; n > 0; n /= 2) found = fmaxf(found, __shfl_xor_sync(FULL_WARP, found, n));
    return found;
}

template <class R> DEVICE void range_of_group(const R &w, int g, float *low, float *high) {
    constexpr int NG = R::NG;
    float a = w.x[g * NG], b = a;
#pragma unroll
    for (int m = 1; m < NG; m++) {
        a = fminf(a, w.x[g * NG + m]);
        b = fmaxf(b, w.x[g * NG + m]);
    }
#pragma unroll
    for (int n = 8; n > 0; n /= 2) {
        a = fminf(a, __shfl_xor_sync(FULL_WARP, a, n));
        b = fmaxf(b, __shfl_xor_sync(FULL_WARP, b, n));
    }
    *low = a;
    *high = b;
}

/* Start values: min and max of the row clamped to +-limit. */
DEVICE void range_params(const Levels &q, float low, float high, float limit, float *step, float *offset) {
    low = fminf(fmaxf(low, -limit), limit) + 0.0f; /* no -0 */
    high = fminf(fmaxf(high, -limit), limit);
    *step = (high - low) * q.inv_levels;
    *offset = low;
}

/* --- least squares ------------------------------------------------------------------------------- */

/* Rounds see v = x - middle on a grid, on which their sums are exact: as grid_of() and to_grid() of the CPU. */
struct Grid {
    float middle, grid;

    DEVICE Grid(const Levels &q, float low, float high)
        : middle((low + high) * 0.5f), grid((high - low) * 0.5f * (128.0f * q.levels)) {}
    DEVICE float operator()(float x) const { return ((x - middle) + grid) - grid; }
};

/* Least-squares step and offset for codes of v in units of 2^-bits, from sum c^2, c, v c, v over n channels; as they were
 * where that is singular. */
DEVICE void refit_plain(const Levels &q, float n, float cc, float c1, float vc, float v1, float &step, float &offset) {
    cc *= q.levels * q.levels;
    c1 *= q.levels;
    vc *= q.levels;
    const float scale = cc * n, det = fmaf(-c1, c1, scale);
    const float new_step = quotient(fmaf(-c1, v1, vc * n), det), m = quotient(fmaf(-c1, vc, cc * v1), det);
    const bool ok = scale * REFIT_SINGULAR < det && 0.0f < new_step;
    step = ok ? new_step : step;
    offset = ok ? m : offset;
}

/* A round of all starts side by side: codes for (step, offset), then step and offset for the codes. v1: sum of v. */
template <int STARTS, class R>
DEVICE void least_squares_round(const float (&v)[R::NG], float v1, const Levels &q, float (&step)[STARTS],
                                float (&offset)[STARTS]) {
    float sum[STARTS][3];
#pragma unroll
    for (int s = 0; s < STARTS; s++) sum[s][0] = sum[s][1] = sum[s][2] = 0;
#pragma unroll
    for (int s = 0; s < STARTS; s++) {
        const float inv = reciprocal(step[s]), shift = fmaf(-offset[s], inv, 0.5f) * q.unit;
#pragma unroll
        for (int m = 0; m < R::NG; m++) {
            const float c = round_code(q, v[m], inv * q.unit, shift);
            sum[s][0] = fmaf(c, c, sum[s][0]);
            sum[s][1] += c;
            sum[s][2] = fmaf(v[m], c, sum[s][2]);
        }
    }
#pragma unroll
    for (int d = 8; d > 0; d /= 2)
#pragma unroll
        for (int s = 0; s < STARTS; s++)
#pragma unroll
            for (int k = 0; k < 3; k++) sum[s][k] += __shfl_xor_sync(FULL_WARP, sum[s][k], d);
#pragma unroll
    for (int s = 0; s < STARTS; s++)
        refit_plain(q, static_cast<float>(R::GROUP), sum[s][0], sum[s][1], sum[s][2], v1, step[s], offset[s]);
}

template <class R> DEVICE float squared_error(const R &w, const Levels &q, int g, float step, float offset) {
    constexpr int NG = R::NG;
    const float inv = reciprocal(step) * q.unit, half = 0.5f * q.unit, up = -step * q.levels;
    float sum = 0;
#pragma unroll
    for (int m = 0; m < NG; m++) {
        const float z = w.x[g * NG + m] - offset;
        const float e = fmaf(up, round_code(q, z, inv, half), z);
        sum = fmaf(e, e, sum);
    }
    return fold(sum);
}

/* Step and offset of a group: several starts, rounds of rounding and refitting, the best by squared
 * error of what will be stored. Halves of a warp share the starts: the lower has the first ones. */
template <int STARTS, class R>
DEVICE void least_squares_from(const R &w, const Levels &q, int g, float *best_step, float *best_offset) {
    constexpr int OWN = R::WIDE ? (STARTS + 1) / 2 : STARTS;
    float low, high, step[OWN], offset[OWN], error[OWN], v[R::NG], v1 = 0;
    const float largest = largest_magnitudes(w, g);
    range_of_group(w, g, &low, &high);
    const Grid grid(q, low, high);
#pragma unroll
    for (int m = 0; m < R::NG; m++) {
        v[m] = grid(w.x[g * R::NG + m]);
        v1 += v[m];
    }
    v1 = fold(v1);
#pragma unroll
    for (int s = 0; s < OWN; s++) {
        const int lower = s == 0 ? 0 : rank_from_top<R>(q.clips[s == 0 ? 0 : s - 1]);
        constexpr int LAST = STARTS - 1;
        const int upper = rank_from_top<R>(q.clips[(OWN + s < LAST ? OWN + s : LAST) - 1]);
        const int rank = R::WIDE && w.upper ? upper : lower;
        range_params(q, low, high, __shfl_sync(FULL_WARP, largest, rank, 16), &step[s], &offset[s]);
        offset[s] -= grid.middle;
    }
#pragma unroll 1
    for (int round = 0; round < LS_ROUNDS; round++) least_squares_round<OWN, R>(v, v1, q, step, offset);
#pragma unroll
    for (int s = 0; s < OWN; s++) {
        step[s] = to_fp16(step[s]);
        offset[s] = to_fp16(offset[s] + grid.middle);
        error[s] = squared_error(w, q, g, step[s], offset[s]);
    }
    float best_error = FLT_MAX;
    *best_step = *best_offset = 0;
#pragma unroll
    for (int s = 0; s < OWN; s++) {
        const bool better = error[s] < best_error;
        *best_step = better ? step[s] : *best_step;
        *best_offset = better ? offset[s] : *best_offset;
        best_error = better ? error[s] : best_error;
    }
    if constexpr (R::WIDE) {
        const float other_error = __shfl_xor_sync(FULL_WARP, best_error, 16);
        const float other_step = __shfl_xor_sync(FULL_WARP, *best_step, 16);
        const float other_offset = __shfl_xor_sync(FULL_WARP, *best_offset, 16);
        const bool other = w.upper ? !(best_error < other_error) : other_error < best_error;
        *best_step = other ? other_step : *best_step;
        *best_offset = other ? other_offset : *best_offset;
    }
}

template <class R> DEVICE void least_squares(const R &w, const Levels &q, int g, float *step, float *offset) {
    if (q.bits == 2)
        least_squares_from<3>(w, q, g, step, offset);
    else
        least_squares_from<2>(w, q, g, step, offset);
}

template <class R> DEVICE void round_plain(R &w, const Levels &q) {
#pragma unroll
    for (int g = 0; g < R::G; g++) {
        const float inv = reciprocal(w.step[g]) * q.unit;
#pragma unroll
        for (int m = 0; m < R::NG; m++)
            w.code[g * R::NG + m] = round_code(q, w.x[g * R::NG + m] - w.offset[g], inv, 0.5f * q.unit);
    }
}

/* --- error feedback ------------------------------------------------------------------------------ */

/* Rounding of the channels of chunk K: what all its blocks use. */
struct Rounding {
    float step, offset, inv, shift;
};

/* What a block of eight channels needs. */
struct BlockInput {
    float inner[28], x[BLOCK];

    DEVICE void load(const float *shared_x, const AppendMetric &metric, int first) {
#pragma unroll
        for (int i = 0; i < 7; i++) {
            const float4 v = load4(metric.blocks + 28 * (first / BLOCK) + 4 * i);
            inner[4 * i] = v.x;
            inner[4 * i + 1] = v.y;
            inner[4 * i + 2] = v.z;
            inner[4 * i + 3] = v.w;
        }
        const float4 x0 = load4(shared_x + first), x1 = load4(shared_x + first + 4);
        x[0] = x0.x, x[1] = x0.y, x[2] = x0.z, x[3] = x0.w;
        x[4] = x1.x, x[5] = x1.y, x[6] = x1.z, x[7] = x1.w;
    }
};

/* Rounds the block of eight channels at `first`; left: what is left to round of each, in all lanes; e, c:
 * errors and codes. Leaves in scratch what was rounded. */
template <int D>
DEVICE void ldlq_block(const Row<D> &w, const Levels &q, const AppendMetric &metric, const Rounding &to, int first,
                       float (&left)[BLOCK], float (&e)[BLOCK], float (&c)[BLOCK]) {
    BlockInput in;
    in.load(w.shared_x, metric, first);
#pragma unroll
    for (int i = BLOCK - 1, at = 0; i >= 0; i--) {
        c[i] = round_code(q, left[i], to.inv, to.shift);
        e[i] = fmaf(to.step, c[i], to.offset - in.x[i]);
#pragma unroll
        for (int j = i - 1; j >= 0; j--) left[j] = fmaf(-e[i], in.inner[at++], left[j]);
    }
    if (w.lane == 0) {
        *reinterpret_cast<float4 *>(w.scratch + first) = make_float4(left[0], left[1], left[2], left[3]);
        *reinterpret_cast<float4 *>(w.scratch + first + 4) = make_float4(left[4], left[5], left[6], left[7]);
    }
}

/* B[i][64 k + ..] of this lane: four channels 16 apart. Chunks 0 .. k - 1 have 64 k D - 2048 k (k - 1) floats. */
template <int D> DEVICE const float *metric_row(const AppendMetric &metric, int k, int i, int lane) {
    return metric.rows + 64 * k * D - 2048 * k * (k - 1) + (i - 64 * k) * 64 + 4 * lane;
}

/* Pushes a block's errors to this lane's channels of chunks 0 .. K; where there are several groups also its codes. */
template <int D, int K>
DEVICE void ldlq_push(const Row<D> &w, const AppendMetric &metric, int first, const float (&e)[BLOCK],
                      const float (&c)[BLOCK], float (&t)[D / 16], float (&pushed)[D / 16]) {
#pragma unroll
    for (int i = BLOCK - 1; i >= 0; i--)
#pragma unroll
        for (int k = K; k >= 0; k--) {
            const float4 v = load4(metric_row<D>(metric, k, first + i, w.lane));
            const float row[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int n = 0; n < 4; n++) {
                t[4 * k + n] = fmaf(-e[i], row[n], t[4 * k + n]);
                if (Row<D>::G > 1) pushed[4 * k + n] = fmaf(c[i], row[n], pushed[4 * k + n]);
            }
        }
}

/* One of this lane's four channels of chunk K. */
template <int D, int K> DEVICE float pick_channel(const float (&t)[D / 16], int m) {
    const float even = m & 2 ? t[4 * K + 2] : t[4 * K], odd = m & 2 ? t[4 * K + 3] : t[4 * K + 1];
    return m & 1 ? odd : even;
}

/* The 64 channels of chunk K, from the top down, with what they push to chunks 0 .. K. t: what is left to
 * round; pushed: codes times B, of this group. A block is pushed while the next one is being rounded; only
 * the channels of that one get their share at once, in `next`. */
template <int D, int K>
DEVICE void ldlq_chunk(const Row<D> &w, const Levels &q, const AppendMetric &metric, float (&t)[D / 16],
                       float (&pushed)[D / 16]) {
    constexpr int g = K / (Row<D>::GROUP / 64);
    const float inv = reciprocal(w.step[g]);
    const Rounding to = {w.step[g] * q.levels, w.offset[g], inv * q.unit, fmaf(-w.offset[g], inv, 0.5f) * q.unit};
    float left[BLOCK], e[BLOCK], c[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i++) left[i] = __shfl_sync(FULL_WARP, t[4 * K + 3], BLOCK + i, 16);
    ldlq_block<D>(w, q, metric, to, 64 * K + 56, left, e, c);
#pragma unroll 1
    for (int b = 6; b >= 0; b--) {
        const int first = 64 * K + BLOCK * b, m = b >> 1;
        float next = pick_channel<D, K>(t, m), old_e[BLOCK], old_c[BLOCK];
#pragma unroll
        for (int i = BLOCK - 1; i >= 0; i--) {
            next = fmaf(-e[i], metric_row<D>(metric, K, first + BLOCK + i, w.lane)[m], next);
            old_e[i] = e[i];
            old_c[i] = c[i];
        }
#pragma unroll
        for (int i = 0; i < BLOCK; i++) left[i] = __shfl_sync(FULL_WARP, next, BLOCK * (b & 1) + i, 16);
        /* In this order, since no load may pass the block's stores. */
        ldlq_push<D, K>(w, metric, first + BLOCK, old_e, old_c, t, pushed);
        ldlq_block<D>(w, q, metric, to, first, left, e, c);
    }
    ldlq_push<D, K>(w, metric, 64 * K, e, c, t, pushed);
}

/* The step and offset that <w, w>, <w, 1>, <r, w>, <r, 1> in M ask for, added to the old ones. */
DEVICE void refit_metric(float ones_ones, float cc, float c1, float rc, float r1, float &step, float &offset) {
    const float scale = cc * ones_ones, det = fmaf(-c1, c1, scale);
    const float ds = quotient(fmaf(-c1, r1, rc * ones_ones), det), dm = quotient(fmaf(-c1, rc, cc * r1), det);
    const float new_step = step + ds, new_offset = offset + dm;
    const bool ok = scale * REFIT_SINGULAR < det && 0.0f < new_step && fabsf(dm) < FLT_MAX;
    step = ok ? to_fp16(new_step) : step;
    offset = ok ? to_fp16(new_offset) : offset;
}

/* Refits group g; brings r up to date. product: codes of the group times B; where all channels are one group, that is what
 * the round left over: (x - x^) B = x B - s c B - m 1 B. */
template <int D, bool WIDE>
DEVICE void refit_group(Row<D, WIDE> &w, const AppendMetric &metric, int g, float (&product)[D / 16]) {
    using R = Row<D>;
    const int n_channels = (g + 1) * R::NG;
    const float inv = reciprocal(w.step[g]);
    float cc = 0, c1 = 0, rc = 0, r1 = 0, ones[R::N];
#pragma unroll
    for (int m = 0; m < R::N; m++) {
        if (m >= n_channels) continue;
        const float d = metric.d[16 * m + w.lane];
        ones[m] = metric.ones[g * D + 16 * m + w.lane];
        if (R::G == 1) product[m] = (fmaf(-w.offset[g], ones[m], w.xb[m]) - w.r[m]) * inv;
        const float dw = d * product[m];
        cc = fmaf(dw, product[m], cc);
        c1 = fmaf(dw, ones[m], c1);
        rc = fmaf(dw, w.r[m], rc);
        r1 = fmaf(d * ones[m], w.r[m], r1);
    }
#pragma unroll
    for (int d = 8; d > 0; d /= 2) {
        cc += __shfl_xor_sync(FULL_WARP, cc, d);
        c1 += __shfl_xor_sync(FULL_WARP, c1, d);
        rc += __shfl_xor_sync(FULL_WARP, rc, d);
        r1 += __shfl_xor_sync(FULL_WARP, r1, d);
    }
    const float old_step = w.step[g], old_offset = w.offset[g];
    refit_metric(metric.ones_ones[g], cc, c1, rc, r1, w.step[g], w.offset[g]);
    const float moved_step = w.step[g] - old_step, moved_offset = w.offset[g] - old_offset;
#pragma unroll
    for (int m = 0; m < R::N; m++)
        if (m < n_channels) w.r[m] = fmaf(-moved_offset, ones[m], fmaf(-moved_step, product[m], w.r[m]));
}

/* What a row's channels are rounded to, given what was left to round of them: codes, (x - x^) B in r; then the
 * refits. pushed: codes of a group times B, in units of codes. */
template <int D, bool WIDE>
DEVICE void finish_round(Row<D, WIDE> &w, const Levels &q, const AppendMetric &metric, const float (&rounded)[D / 16],
                         float (&pushed)[Row<D>::G][D / 16]) {
    using R = Row<D>;
#pragma unroll
    for (int m = 0; m < R::N; m++) {
        const int g = m / R::NG;
        const float inv = reciprocal(w.step[g]), shift = fmaf(-w.offset[g], inv, 0.5f) * q.unit;
        w.code[m] = round_code(q, rounded[m], inv * q.unit, shift);
        w.r[m] = (rounded[m] - w.x[m]) - fmaf(w.step[g] * q.levels, w.code[m], w.offset[g] - w.x[m]);
    }
#pragma unroll
    for (int g = 0; g < R::G; g++) {
#pragma unroll
        for (int m = 0; m < R::N && R::G > 1; m++) pushed[g][m] *= q.levels;
        refit_group(w, metric, g, pushed[g]);
    }
}

/* Rounds from the last channel down, feeding the error back. */
template <int D> DEVICE void round_ldlq(Row<D, false> &w, const Levels &q, const AppendMetric &metric) {
    using R = Row<D>;
    float t[R::N], pushed[R::G][R::N];
#pragma unroll
    for (int m = 0; m < R::N; m++) {
        t[m] = w.x[m];
#pragma unroll
        for (int g = 0; g < R::G && R::G > 1; g++) pushed[g][m] = 0;
    }
    __syncwarp();
    if constexpr (R::CHUNKS > 3) ldlq_chunk<D, 3>(w, q, metric, t, pushed[R::G - 1]);
    if constexpr (R::CHUNKS > 2) ldlq_chunk<D, 2>(w, q, metric, t, pushed[R::G - 1]);
    if constexpr (R::CHUNKS > 1) ldlq_chunk<D, 1>(w, q, metric, t, pushed[0]);
    ldlq_chunk<D, 0>(w, q, metric, t, pushed[0]);
    __syncwarp();
    float rounded[R::N];
#pragma unroll
    for (int m = 0; m < R::N; m++) rounded[m] = w.scratch[16 * m + w.lane];
    finish_round(w, q, metric, rounded, pushed);
}

/* --- error feedback on a warp: head_dim 128 -------------------------------------------------------
 * The upper half has channels 64 .. 127 of t (what is left to round), the lower half the others. When the lower 64 channels
 * are rounded what the upper half has does not matter. Errors are pushed as they come. */

/* Rounds the block at `first`; left as in ldlq_block(). rows: this lane's four channels of B's rows, 64 floats a row. */
DEVICE void ldlq_block_wide(const Levels &q, const Rounding &to, const BlockInput &in, const float *rows, int first,
                            float (&left)[BLOCK], float (&t)[4]) {
#pragma unroll
    for (int i = BLOCK - 1, at = 0; i >= 0; i--) {
        const float4 v = load4(rows + 64 * (first + i));
        const float row[4] = {v.x, v.y, v.z, v.w};
        const float c = round_code(q, left[i], to.inv, to.shift);
        const float e = fmaf(to.step, c, to.offset - in.x[i]);
#pragma unroll
        for (int j = i - 1; j >= 0; j--) left[j] = fmaf(-e, in.inner[at++], left[j]);
#pragma unroll
        for (int n = 0; n < 4; n++) t[n] = fmaf(-e, row[n], t[n]);
    }
}

/* Chunk K (0 or 1) of 64 channels. rounded: what was left of this lane's channels of the chunk. */
template <int K>
DEVICE void ldlq_chunk_wide(const Row<128, true> &w, const Levels &q, const AppendMetric &metric, const Rounding &to,
                            const float *rows, BlockInput (&in)[2], float (&t)[4], float (&rounded)[8]) {
    auto keep = [&](const float (&left)[BLOCK]) { /* this lane's of eight */
        const float a = w.lane & 1 ? left[1] : left[0], b = w.lane & 1 ? left[3] : left[2];
        const float c = w.lane & 1 ? left[5] : left[4], d = w.lane & 1 ? left[7] : left[6];
        const float e = w.lane & 2 ? b : a, f = w.lane & 2 ? d : c;
        return w.lane & 4 ? f : e;
    };
    auto pick = [&](int m) {
        const float even = m & 2 ? t[2] : t[0], odd = m & 2 ? t[3] : t[1];
        return m & 1 ? odd : even;
    };
#pragma unroll 1
    for (int m = 3; m >= 0; m--) {
        const int first = 64 * K + 16 * m;
        float left[BLOCK], mine = pick(m);
#pragma unroll
        for (int i = 0; i < BLOCK; i++) left[i] = __shfl_sync(FULL_WARP, mine, 16 * K + BLOCK + i);
        in[1].load(w.shared_x, metric, first);
        ldlq_block_wide(q, to, in[0], rows, first + BLOCK, left, t);
        const float high = keep(left);
        mine = pick(m);
#pragma unroll
        for (int i = 0; i < BLOCK; i++) left[i] = __shfl_sync(FULL_WARP, mine, 16 * K + i);
        in[0].load(w.shared_x, metric, first > 0 ? first - BLOCK : 0);
        ldlq_block_wide(q, to, in[1], rows, first, left, t);
        const float low = keep(left), both = w.lane & 8 ? high : low;
#pragma unroll
        for (int n = 0; n < 4; n++) rounded[4 * K + n] = n == m ? both : rounded[4 * K + n];
    }
}

DEVICE void round_ldlq(Row<128, true> &w, const Levels &q, const AppendMetric &metric) {
    const float inv = reciprocal(w.step[0]);
    const Rounding to = {w.step[0] * q.levels, w.offset[0], inv * q.unit, fmaf(-w.offset[0], inv, 0.5f) * q.unit};
    float t[4], product[1][8], rounded[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
    for (int n = 0; n < 4; n++) t[n] = w.upper ? w.x[4 + n] : w.x[n];
    BlockInput in[2]; /* one is loaded while the other's block is rounded */
    in[0].load(w.shared_x, metric, 120);
    /* metric_row() for the chunk of this lane's half, then for the lower one. */
    const float *lower = metric.rows + 4 * w.lane;
    const float *own = w.upper ? lower + 64 * 128 - 64 * 64 : lower;
    ldlq_chunk_wide<1>(w, q, metric, to, own, in, t, rounded);
    ldlq_chunk_wide<0>(w, q, metric, to, lower, in, t, rounded);
    finish_round(w, q, metric, rounded, product);
}

/* --- gain ---------------------------------------------------------------------------------------- */

/* out = a B, rows falling; a: [D] in shared memory. */
template <int D>
DEVICE void metric_product(const Row<D, false> &w, const AppendMetric &metric, const float *a, float (&out)[D / 16]) {
#pragma unroll
    for (int m = 0; m < Row<D>::N; m++) out[m] = 0;
#pragma unroll
    for (int top = Row<D>::CHUNKS - 1; top >= 0; top--)
#pragma unroll 2
        for (int i4 = 64 * top + 60; i4 >= 64 * top; i4 -= 4) {
            const float4 v4 = load4(a + i4);
            const float v[4] = {v4.x, v4.y, v4.z, v4.w};
#pragma unroll
            for (int i = 3; i >= 0; i--)
#pragma unroll
                for (int k = top; k >= 0; k--) {
                    const float4 b = load4(metric_row<D>(metric, k, i4 + i, w.lane));
                    const float row[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
                    for (int n = 0; n < 4; n++) out[4 * k + n] = fmaf(v[i], row[n], out[4 * k + n]);
                }
        }
}

/* The same, each half of the warp 64 columns of the product. */
DEVICE void metric_product(const Row<128, true> &w, const AppendMetric &metric, const float *a, float (&out)[8]) {
    float sum[4] = {0, 0, 0, 0};
    const float *rows = metric.rows + 4 * w.lane + (w.upper ? 64 * 128 - 64 * 64 : 0);
    const int last = w.upper ? 64 : 0; /* rows above the columns of the upper half are zero */
#pragma unroll 8
    for (int i4 = 124; i4 >= 0; i4 -= 4) {
        const float4 v4 = load4(a + i4);
        const float v[4] = {v4.x, v4.y, v4.z, v4.w};
#pragma unroll
        for (int i = 3; i >= 0; i--) {
            const float4 b = load4(rows + 64 * max(i4 + i, last));
            const float row[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int n = 0; n < 4; n++) sum[n] = i4 >= last ? fmaf(v[i], row[n], sum[n]) : sum[n];
        }
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float other = __shfl_xor_sync(FULL_WARP, sum[n], 16);
        out[n] = w.upper ? other : sum[n];
        out[4 + n] = w.upper ? sum[n] : other;
    }
}

/* The factor that <x, x>_M and <x, x - x^>_M ask for. */
DEVICE float gain_factor(float xx, float xr) {
    const float hat = xx - xr, factor = fminf(fmaxf(quotient(xx, hat), 0.5f), 2.0f);
    return 0.0f < hat ? factor : 1.0f;
}

/* Scales step and offset so that the row keeps its length along itself. with_metric, have_r: uniform. */
template <int D, bool WIDE>
DEVICE void apply_gain(Row<D, WIDE> &w, const Levels &q, const AppendMetric &metric, bool with_metric, bool have_r) {
    using R = Row<D>;
    float y[R::N];
    if (!have_r) {
#pragma unroll
        for (int m = 0; m < R::N; m++) {
            const int g = m / R::NG;
            w.r[m] = fmaf(-w.step[g] * q.levels, w.code[m], w.x[m] - w.offset[g]);
        }
        if (with_metric) {
            __syncwarp();
#pragma unroll
            for (int m = 0; m < R::N; m++) w.scratch[16 * m + w.lane] = w.r[m];
            __syncwarp();
            metric_product(w, metric, w.scratch, w.r);
        }
    }
#pragma unroll
    for (int m = 0; m < R::N; m++) y[m] = w.x[m];
    if (with_metric && have_r && R::G == 1) {
#pragma unroll
        for (int m = 0; m < R::N; m++) y[m] = w.xb[m];
    } else if (with_metric) {
        metric_product(w, metric, w.shared_x, y);
    }
    float xx = 0, xr = 0;
#pragma unroll
    for (int m = 0; m < R::N; m++) {
        const float dv = with_metric ? metric.d[16 * m + w.lane] * y[m] : y[m];
        xx = fmaf(dv, y[m], xx);
        xr = fmaf(dv, w.r[m], xr);
    }
    const float factor = gain_factor(fold(xx), fold(xr));
#pragma unroll
    for (int g = 0; g < R::G; g++) {
        w.step[g] = to_fp16(w.step[g] * factor);
        w.offset[g] = to_fp16(w.offset[g] * factor);
    }
}

#endif
