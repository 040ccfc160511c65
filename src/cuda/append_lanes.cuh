/*
 * append_lanes.cuh - the quantiser with a row on every lane, for many rows of the overlay: head_dim 128, default recipe.
 *
 * What append_rows.cuh does on sixteen lanes together a lane does here alone, in the same order: nothing is done
 * twice, and elements of B are the same for all lanes of a warp. That takes long for one row and little time for
 * thousands. Of a row shared memory has x and t, what was left to round of each channel: codes and errors follow from
 * those in a few operations. What is included here is compiled without contraction.
 *
 * A row of B is multiplied with errors and codes while it is there; the codes' product waits in local memory for the
 * sums that need it in another order. A CTA has keys on four warps and values, which have no such products, on four.
 * Loops are unrolled no further than registers ask for: code that the instruction cache does not hold takes longer.
 */
#ifndef OSCAR_CUDA_APPEND_LANES_CUH
#define OSCAR_CUDA_APPEND_LANES_CUH

#include "append_input.cuh"
#include "append_rows.cuh"

struct LanesShape {
    static constexpr int D = 128, SIDE_WARPS = 4, ROWS = 32 * SIDE_WARPS; /* of each side */
    static constexpr int X = D / 2 * 32, T = D * 32;                      /* words of x and t of a warp */
    static constexpr int T_AT = 2 * SIDE_WARPS * X, METRIC_AT = T_AT + SIDE_WARPS * T;
    static constexpr int WORDS = METRIC_AT + LAYOUT_LANES_METRIC_FLOATS; /* once more if values have a metric */
};

/* One head's metric, as pack_lanes_metric() of layer.cu leaves it. */
struct LanesMetric {
    const float *rows; /* group m of 32 columns: [128 - 32 m][32]: B[i][32 m ..] from i = 32 m on */
    const float *d, *ones; /* [128] */
    float ones_ones;

    DEVICE explicit LanesMetric(const float *packed)
        : rows(packed), d(packed + 10240), ones(d + LanesShape::D), ones_ones(ones[LanesShape::D]) {}
    DEVICE const float *group(int m) const { return rows + 4096 * m - 512 * m * (m - 1); }
};

/* This lane's row: x in bf16, two channels a word; t of keys. */
struct LaneRow {
    uint32_t *x_;
    float *t_;

    DEVICE uint32_t &x2(int pair) const { return x_[pair * 32]; }
    DEVICE float x(int i) const { return i & 1 ? bf16_high(x2(i >> 1)) : bf16_low(x2(i >> 1)); }
    DEVICE float &t(int i) const { return t_[i * 32]; }
};

/* What a code is rounded with, in units of codes. */
DEVICE Rounding rounding_of(const Levels &q, float step, float offset) {
    const float inv = reciprocal(step);
    return {step * q.levels, offset, inv * q.unit, fmaf(-offset, inv, 0.5f) * q.unit};
}

/* The tree over partial sums. */
template <int N> DEVICE float lane_tree(const float (&part)[16][N], int k) {
    float sum[8];
#pragma unroll
    for (int r = 0; r < 8; r++) sum[r] = part[r][k] + part[r + 8][k];
#pragma unroll
    for (int h = 4; h > 0; h /= 2)
#pragma unroll
        for (int r = 0; r < h; r++) sum[r] += sum[r + h];
    return sum[0];
}

/* --- least squares ------------------------------------------------------------------------------- */

/* Sums of channels R, R + STEP, ... below STEP = 16 as the tree adds them: c^2, c, z c, z. */
template <int R, int STEP>
DEVICE void lane_sums(const float (&x)[128], const Levels &q, float offset, float inv, float (&sum)[4]) {
    if constexpr (STEP == 16) {
        sum[0] = sum[1] = sum[2] = sum[3] = 0;
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const float z = x[16 * m + R] - offset, c = round_code(q, z, inv, 0.5f * q.unit);
            sum[0] = fmaf(c, c, sum[0]);
            sum[1] += c;
            sum[2] = fmaf(z, c, sum[2]);
            sum[3] += z;
        }
    } else {
        float other[4];
        lane_sums<R, 2 * STEP>(x, q, offset, inv, sum);
        lane_sums<R + STEP, 2 * STEP>(x, q, offset, inv, other);
#pragma unroll
        for (int k = 0; k < 4; k++) sum[k] += other[k];
    }
}

/* Squared error of the same channels. */
template <int R, int STEP>
DEVICE float lane_error(const float (&x)[128], const Levels &q, float offset, float inv, float up) {
    if constexpr (STEP == 16) {
        float sum = 0;
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const float z = x[16 * m + R] - offset, e = fmaf(up, round_code(q, z, inv, 0.5f * q.unit), z);
            sum = fmaf(e, e, sum);
        }
        return sum;
    } else {
        const float sum = lane_error<R, 2 * STEP>(x, q, offset, inv, up);
        return sum + lane_error<R + STEP, 2 * STEP>(x, q, offset, inv, up);
    }
}

/* Sorts sixteen values, rising, from step (1, 1) on of Batcher's network. */
template <int P, int K> DEVICE void sort_rising(float (&v)[16]) {
#pragma unroll
    for (int i = 0; i < 16 - K; i++) {
        if (i < K % P || (i - K % P) % (2 * K) >= K || i / (2 * P) != (i + K) / (2 * P)) continue;
        const float low = fminf(v[i], v[i + K]), high = fmaxf(v[i], v[i + K]);
        v[i] = low;
        v[i + K] = high;
    }
    if constexpr (K > 1)
        sort_rising<P, K / 2>(v);
    else if constexpr (P < 8)
        sort_rising<2 * P, 2 * P>(v);
}

/* The largest |x|, and those of the ranks of the other starts. */
DEVICE void lane_limits(const LaneRow &w, const Levels &q, float (&limit)[3]) {
    float top[16]; /* falling */
#pragma unroll
    for (int k = 0; k < 16; k++) top[k] = 0;
#pragma unroll 1
    for (int pair = 0; pair < 64; pair += 8) {
        float v[16];
#pragma unroll
        for (int n = 0; n < 8; n++) {
            v[2 * n] = fabsf(bf16_low(w.x2(pair + n)));
            v[2 * n + 1] = fabsf(bf16_high(w.x2(pair + n)));
        }
        sort_rising<1, 1>(v);
#pragma unroll
        for (int k = 0; k < 16; k++) top[k] = fmaxf(top[k], v[k]);
#pragma unroll
        for (int k = 8; k >= 1; k /= 2)
#pragma unroll
            for (int i = 0; i < 16; i++) {
                if (i & k) continue;
                const float high = fmaxf(top[i], top[i + k]), low = fminf(top[i], top[i + k]);
                top[i] = high;
                top[i + k] = low;
            }
    }
    limit[0] = limit[1] = limit[2] = top[0];
#pragma unroll
    for (int s = 1; s < 3; s++) {
        const int rank = rank_from_top<Row<128>>(q.clips[s - 1]);
#pragma unroll
        for (int k = 0; k < 16; k++) limit[s] = k == rank ? top[k] : limit[s];
    }
}

/* Step and offset; x: the row, in registers. */
DEVICE void lane_least_squares(const LaneRow &w, const float (&x)[128], const Levels &q, float *best_step, float *best_offset) {
    float low = x[0], high = x[0], limit[3], best_error = FLT_MAX;
#pragma unroll
    for (int j = 1; j < 128; j++) {
        low = fminf(low, x[j]);
        high = fmaxf(high, x[j]);
    }
    lane_limits(w, q, limit);
    *best_step = *best_offset = 0;
#pragma unroll 1
    for (int start = 0; start < q.n_starts; start++) {
        float step, offset;
        range_params(q, low, high, start == 0 ? limit[0] : start == 1 ? limit[1] : limit[2], &step, &offset);
#pragma unroll 1
        for (int round = 0; round < LS_ROUNDS; round++) {
            float sum[4];
            lane_sums<0, 1>(x, q, offset, reciprocal(step) * q.unit, sum);
            refit_plain(q, 128.0f, sum, step, offset);
        }
        step = to_fp16(step);
        offset = to_fp16(offset);
        const float error = lane_error<0, 1>(x, q, offset, reciprocal(step) * q.unit, -step * q.levels);
        const bool better = error < best_error;
        *best_step = better ? step : *best_step;
        *best_offset = better ? offset : *best_offset;
        best_error = better ? error : best_error;
    }
}

/* --- error feedback ------------------------------------------------------------------------------ */

/* sum[k] += value row[k]. */
DEVICE void add_row(float value, const float *row, float (&sum)[32]) {
#pragma unroll
    for (int k = 0; k < 32; k += 4) {
        const float4 v = load4(row + k);
        sum[k] = fmaf(value, v.x, sum[k]);
        sum[k + 1] = fmaf(value, v.y, sum[k + 1]);
        sum[k + 2] = fmaf(value, v.z, sum[k + 2]);
        sum[k + 3] = fmaf(value, v.w, sum[k + 3]);
    }
}

/* Rounds from the last channel down, feeding the error back; leaves t and the codes' product with B. */
DEVICE void lane_ldlq(const LaneRow &w, const Levels &q, const LanesMetric &metric, const Rounding &to, float (&product)[128]) {
#pragma unroll 1
    for (int m = 3; m >= 0; m--) {
        const float *b = metric.group(m);
        float t[32], v[32];
#pragma unroll
        for (int k = 0; k < 32; k++) {
            t[k] = w.x(32 * m + k);
            v[k] = 0;
        }
#pragma unroll 1
        for (int i = 127; i >= 32 * m + 32; i -= 2) { /* channels of the blocks above, two at a time */
            const uint32_t both = w.x2(i >> 1);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float x = n ? bf16_low(both) : bf16_high(both), *row = b + (i - n - 32 * m) * 32;
                const float c = round_code(q, w.t(i - n), to.inv, to.shift);
                add_row(-fmaf(to.step, c, to.offset - x), row, t);
                add_row(c, row, v);
            }
        }
#pragma unroll
        for (int k = 31; k >= 0; k--) {
            const float c = round_code(q, t[k], to.inv, to.shift), e = fmaf(to.step, c, to.offset - w.x(32 * m + k));
            w.t(32 * m + k) = t[k];
#pragma unroll
            for (int l = 0; l <= k; l += 4) {
                const float4 v4 = load4(b + k * 32 + l);
                const float row[4] = {v4.x, v4.y, v4.z, v4.w};
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    if (l + n < k) t[l + n] = fmaf(-e, row[n], t[l + n]);
                    if (l + n <= k) v[l + n] = fmaf(c, row[n], v[l + n]);
                }
            }
        }
#pragma unroll
        for (int k = 0; k < 32; k++) product[32 * m + k] = v[k];
    }
}

/* (x - x^) B of channel j before the refit. */
DEVICE float lane_residual(const LaneRow &w, const Levels &q, const Rounding &to, int j) {
    const float t = w.t(j), x = w.x(j);
    return (t - x) - fmaf(to.step, round_code(q, t, to.inv, to.shift), to.offset - x);
}

/* The refit of step and offset in M; returns how far they moved. */
DEVICE float2 lane_refit(const LaneRow &w, const Levels &q, const LanesMetric &metric, const Rounding &to,
                         const float (&product)[128], float &step, float &offset) {
    float part[16][4];
#pragma unroll
    for (int r = 0; r < 16; r++) part[r][0] = part[r][1] = part[r][2] = part[r][3] = 0;
#pragma unroll 1
    for (int m = 0; m < 8; m++) {
#pragma unroll
        for (int k = 0; k < 16; k++) {
            const int j = 16 * m + k;
            const float d = metric.d[j], ones = metric.ones[j], v = product[j] * q.levels, dw = d * v;
            const float r = lane_residual(w, q, to, j);
            part[k][0] = fmaf(dw, v, part[k][0]);
            part[k][1] = fmaf(dw, ones, part[k][1]);
            part[k][2] = fmaf(dw, r, part[k][2]);
            part[k][3] = fmaf(d * ones, r, part[k][3]);
        }
    }
    const float old_step = step, old_offset = offset;
    refit_metric(metric.ones_ones, lane_tree(part, 0), lane_tree(part, 1), lane_tree(part, 2), lane_tree(part, 3), step, offset);
    return make_float2(step - old_step, offset - old_offset);
}

/* --- gain ---------------------------------------------------------------------------------------- */

/* y = x B, 32 channels at a time, to the sums that the gain is made of; residual(j): of (x - x^) B. */
template <class R> DEVICE void lane_gain_sums(const LaneRow &w, const LanesMetric &metric, float (&part)[16][2], R residual) {
#pragma unroll 1
    for (int m = 0; m < 4; m++) {
        float y[32];
#pragma unroll
        for (int k = 0; k < 32; k++) y[k] = 0;
#pragma unroll 2
        for (int i = 127; i >= 32 * m; i -= 2) {
            const float *row = metric.group(m) + (i - 32 * m) * 32;
            add_row(bf16_high(w.x2(i >> 1)), row, y);
            add_row(bf16_low(w.x2(i >> 1)), row - 32, y);
        }
#pragma unroll
        for (int k = 0; k < 32; k++) {
            const float dv = metric.d[32 * m + k] * y[k];
            part[k & 15][0] = fmaf(dv, y[k], part[k & 15][0]);
            part[k & 15][1] = fmaf(dv, residual(32 * m + k), part[k & 15][1]);
        }
    }
}

/* (x - x^) B where there was no error feedback. */
DEVICE void lane_error_product(const LaneRow &w, const Levels &q, const LanesMetric &metric, const Rounding &to,
                               float (&product)[128]) {
#pragma unroll 1
    for (int m = 0; m < 4; m++) {
        float v[32];
#pragma unroll
        for (int k = 0; k < 32; k++) v[k] = 0;
#pragma unroll 1
        for (int i = 127; i >= 32 * m; i--) {
            const float z = w.x(i) - to.offset, c = round_code(q, z, to.inv, 0.5f * q.unit);
            add_row(fmaf(-to.step, c, z), metric.group(m) + (i - 32 * m) * 32, v);
        }
#pragma unroll
        for (int k = 0; k < 32; k++) product[32 * m + k] = v[k];
    }
}

/* The same without a metric. */
DEVICE void lane_gain_plain(const LaneRow &w, const Levels &q, const Rounding &to, float (&part)[16][2]) {
#pragma unroll 1
    for (int m = 0; m < 8; m++)
#pragma unroll
        for (int k = 0; k < 16; k++) {
            const float x = w.x(16 * m + k), z = x - to.offset;
            const float r = fmaf(-to.step, round_code(q, z, to.inv, 0.5f * q.unit), z);
            part[k][0] = fmaf(x, x, part[k][0]);
            part[k][1] = fmaf(x, r, part[k][1]);
        }
}

/* --- to memory ----------------------------------------------------------------------------------- */

/* Code of channel j. */
DEVICE int lane_code(const LaneRow &w, const Levels &q, const Rounding &to, bool ldlq, int j) {
    const float u = ldlq ? __saturatef(__fmaf_rn(w.t(j), to.inv, to.shift))
                         : __saturatef(__fmaf_rn(w.x(j) - to.offset, to.inv, 0.5f * q.unit));
    return __float_as_int(fminf(__fadd_rz(u, q.magic), q.top)) & ((1 << q.bits) - 1);
}

/* Codes of keys; slot: of the token in the tile. See layout.h. */
DEVICE void lane_store_keys(const LaneRow &w, const Levels &q, const Rounding &to, bool ldlq, int slot, uint8_t *low, uint8_t *high) {
    const int sub = slot >> 4, r = slot & 15;
#pragma unroll 1
    for (int t = 0; t < 4; t++) {
        uint32_t below[2] = {0, 0}, above[2] = {0, 0};
#pragma unroll
        for (int word = 0; word < 2; word++)
#pragma unroll
            for (int k = 0; k < 16; k++) {
                const int code = lane_code(w, q, to, ldlq, 16 * (2 * t + word) + k), at = 2 * (k & 7) + 16 * (k >> 3);
                below[word] |= (code & 3) << at;
                above[word] |= (code >> 2) << at;
            }
        const int lane = 4 * (r & 7) + t;
        *reinterpret_cast<uint2 *>(low + 512 * sub + layout_word(2, lane, 2 * (r >> 3))) = make_uint2(below[0], below[1]);
        if (q.bits == 4)
            *reinterpret_cast<uint2 *>(high + 512 * sub + layout_word(2, lane, 2 * (r >> 3))) = make_uint2(above[0], above[1]);
        if (q.bits == 3) /* one bit a code: two words share one */
            *reinterpret_cast<uint32_t *>(high + 256 * sub + layout_word(1, lane, r >> 3)) = above[0] | above[1] << 1;
    }
}

DEVICE void lane_store_values(const LaneRow &w, const Levels &q, const Rounding &to, bool ldlq, int slot, uint8_t *low,
                              uint8_t *high) {
    const int sub = slot >> 4, r = slot & 15;
#pragma unroll 1
    for (int g = 0; g < 8; g++) {
        const int lane = 4 * g + ((r & 7) >> 1);
        uint32_t above[2] = {0, 0};
#pragma unroll
        for (int word = 0; word < 2; word++) {
            uint32_t below = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int code = lane_code(w, q, to, ldlq, layout_value_channel(word, g, i));
                below |= (code & 3) << (2 * i);
                above[word] |= (code >> 2) << (2 * i);
            }
            const int byte = 512 * sub + layout_word(2, lane, 2 * (r >> 3) + word) + 2 * (r & 1);
            *reinterpret_cast<uint16_t *>(low + byte) = static_cast<uint16_t>(below);
            if (q.bits == 4) *reinterpret_cast<uint16_t *>(high + byte) = static_cast<uint16_t>(above[word]);
        }
        if (q.bits == 3)
            *reinterpret_cast<uint16_t *>(high + 256 * sub + layout_word(1, lane, r >> 3) + 2 * (r & 1)) =
                static_cast<uint16_t>(above[0] | above[1] << 1);
    }
}

/* --- a CTA: 128 rows of both sides of a head ------------------------------------------------------ */

/* What is quantised of a row of the overlay, NULL for none, to x, and to registers. */
DEVICE void lane_fetch(const LaneRow &w, const uint16_t *row, float (&x)[128]) {
#pragma unroll
    for (int k = 0; k < 16; k++) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row) v = load_uint4(row + 8 * k);
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int n = 0; n < 4; n++) {
            x[8 * k + 2 * n] = fminf(fmaxf(bf16_low(words[n]), -ROW_LIMIT), ROW_LIMIT);
            x[8 * k + 2 * n + 1] = fminf(fmaxf(bf16_high(words[n]), -ROW_LIMIT), ROW_LIMIT);
        }
    }
#pragma unroll
    for (int k = 0; k < 64; k++) w.x2(k) = pack_bf162(x[2 * k], x[2 * k + 1]);
}

/* Codes of this lane's row to its tile; x: the row, in registers; packed: the head's metric or NULL. */
DEVICE void lane_code_row(const AppendParams &p, const LaneRow &w, const float (&x)[128], const float *packed, int side,
                          const RowPlace &at, uint8_t *tile) {
    const AppendSide &from = p.side[side];
    const Levels q = levels_of(from.bits);
    float step, offset, part[16][2];
    lane_least_squares(w, x, q, &step, &offset);
    const bool ldlq = from.ldlq && packed;
    const float inv = reciprocal(step);
    Rounding to = {step * q.levels, offset, inv * q.unit, 0};
#pragma unroll
    for (int r = 0; r < 16; r++) part[r][0] = part[r][1] = 0;
    if (packed) {
        const LanesMetric metric(packed);
        float product[128];
        float2 moved = make_float2(0, 0);
#pragma unroll 1
        for (int round = 0; ldlq && round < LDLQ_REFITS; round++) {
            to = rounding_of(q, step, offset);
            lane_ldlq(w, q, metric, to, product);
            moved = lane_refit(w, q, metric, to, product, step, offset);
        }
        if (from.gain && !ldlq) lane_error_product(w, q, metric, to, product);
        if (from.gain)
            lane_gain_sums(w, metric, part, [&](int j) {
                if (!ldlq) return product[j];
                /* The residual of the last round, moved by its refit. */
                return fmaf(-moved.y, metric.ones[j], fmaf(-moved.x, product[j] * q.levels, lane_residual(w, q, to, j)));
            });
    } else if (from.gain) {
        lane_gain_plain(w, q, to, part);
    }
    if (from.gain) {
        const float factor = gain_factor(lane_tree(part, 0), lane_tree(part, 1));
        step = to_fp16(step * factor);
        offset = to_fp16(offset * factor);
    }
    if (!at.valid) return;
    uint8_t *low = tile + side * layout_low_bytes(128), *high = tile + layout_high_offset(128, p.side[0].bits, side);
    if (side == 0)
        lane_store_keys(w, q, to, ldlq, at.position % 64, low, high);
    else
        lane_store_values(w, q, to, ldlq, at.position % 64, low, high);
    *reinterpret_cast<__half2 *>(tile + layout_param_offset(128, side) + layout_param(0, at.position % 64)) =
        __halves2half2(__float2half_rn(step), __float2half_rn(offset));
}

/* Rows of tokens that a launch before stored, or rows to settle. */
__global__ void __launch_bounds__(64 * LanesShape::SIDE_WARPS, 1) code_lanes_kernel(const __grid_constant__ AppendParams p) {
    using L = LanesShape;
    extern __shared__ __align__(16) uint32_t words[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, side = warp >= L::SIDE_WARPS;
    const int head = blockIdx.x % p.n_kv_heads, row = threadIdx.x % L::ROWS;
    const AppendSide &from = p.side[side];
    const LaneRow w = {words + warp * L::X + lane, reinterpret_cast<float *>(words) + L::T_AT + warp % L::SIDE_WARPS * L::T + lane};
    float *metric = reinterpret_cast<float *>(words) + L::METRIC_AT;
    let_next_kernel_start();
    wait_for_kernel_before();
    bool first = true;
#pragma unroll 1
    for (int group = blockIdx.x / p.n_kv_heads;; group += from.n_ctas) {
        RowPlace at;
        if (group * L::ROWS >= place_of_row(p, group * L::ROWS + row, &at)) return;
        for (int s = 0; s < 2; s++)
            if (first && p.side[s].metric_lanes)
                stage(metric + s * LAYOUT_LANES_METRIC_FLOATS,
                      p.side[s].metric_lanes + static_cast<size_t>(head) * LAYOUT_LANES_METRIC_FLOATS,
                      LAYOUT_LANES_METRIC_FLOATS, blockDim.x);
        float x[128];
        lane_fetch(w, at.valid ? overlay_of<128>(p, from, at, slot_of(p, at), head) : nullptr, x);
        if (first) {
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads();
        }
        first = false;
        lane_code_row(p, w, x, from.metric_lanes ? metric + side * LAYOUT_LANES_METRIC_FLOATS : nullptr, side, at,
                      tile_of(p, at, head));
    }
}

#endif
