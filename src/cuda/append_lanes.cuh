/*
 * append_lanes.cuh - the quantiser with a row on every lane, for chunks of a prompt: head_dim 128, default recipe.
 *
 * What append_rows.cuh does on sixteen lanes together a lane does here alone, in the same order: nothing is done
 * twice, and elements of U and B are the same for all lanes of a warp. That takes long for one row and little time
 * for thousands. Of a row shared memory has x and t, what was left to round of each channel: codes and errors follow
 * from those in a few operations. What is included here is compiled without contraction.
 */
#ifndef OSCAR_CUDA_APPEND_LANES_CUH
#define OSCAR_CUDA_APPEND_LANES_CUH

#include "append_input.cuh"
#include "append_rows.cuh"

struct LanesShape {
    static constexpr int D = 128, WARPS = 4, ROWS = 32 * WARPS, COLUMNS = 32; /* columns of B at a time */
    static constexpr int ARRAY = D * 32;                                      /* floats of x or t of a warp */
    static constexpr int METRIC_AT = 2 * WARPS * ARRAY, FLOATS = METRIC_AT + LAYOUT_LANES_METRIC_FLOATS;
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

/* This lane's row. x is so placed that a warp reads a channel of its rows, or 32 channels of a row, without conflicts. */
struct LaneRow {
    float *x_, *t_;
    int lane;
    DEVICE float &x(int i) const { return x_[i * 32 + (lane ^ (i & 31))]; }
    DEVICE float &x_of(int row, int i) const { return x_[i * 32 + (row ^ (i & 31))]; }
    DEVICE float &t(int i) const { return t_[i * 32 + lane]; }
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

/* The largest |x|, and those of the ranks of the other starts. */
DEVICE void lane_limits(const LaneRow &w, const Levels &q, float (&limit)[3]) {
    float top[16];
#pragma unroll
    for (int k = 0; k < 16; k++) top[k] = 0;
#pragma unroll 4
    for (int j = 0; j < 128; j++) {
        float v = fabsf(w.x(j));
#pragma unroll
        for (int k = 0; k < 16; k++) {
            const float old = top[k];
            top[k] = fmaxf(old, v);
            v = fminf(old, v);
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

/* Rounds from the last channel down, feeding the error back; leaves t. */
DEVICE void lane_ldlq(const LaneRow &w, const Levels &q, const LanesMetric &metric, const Rounding &to) {
#pragma unroll 1
    for (int m = 3; m >= 0; m--) {
        const float *b = metric.group(m);
        float t[32];
#pragma unroll
        for (int k = 0; k < 32; k++) t[k] = w.x(32 * m + k);
#pragma unroll 2
        for (int i = 127; i >= 32 * m + 32; i--) {
            const float c = round_code(q, w.t(i), to.inv, to.shift);
            add_row(-fmaf(to.step, c, to.offset - w.x(i)), b + (i - 32 * m) * 32, t);
        }
#pragma unroll
        for (int k = 31; k >= 0; k--) {
            const float c = round_code(q, t[k], to.inv, to.shift), e = fmaf(to.step, c, to.offset - w.x(32 * m + k));
            w.t(32 * m + k) = t[k];
#pragma unroll
            for (int l = 0; l < k; l += 4) {
                const float4 v4 = load4(b + k * 32 + l);
                const float v[4] = {v4.x, v4.y, v4.z, v4.w};
#pragma unroll
                for (int n = 0; n < 4; n++)
                    if (l + n < k) t[l + n] = fmaf(-e, v[n], t[l + n]);
            }
        }
    }
}

/* (x - x^) B of channel j before the refit. */
DEVICE float lane_residual(const LaneRow &w, const Levels &q, const Rounding &to, int j) {
    const float t = w.t(j), x = w.x(j);
    return (t - x) - fmaf(to.step, round_code(q, t, to.inv, to.shift), to.offset - x);
}

/* The refit of step and offset in M; returns how far they moved. */
DEVICE float2 lane_refit(const LaneRow &w, const Levels &q, const LanesMetric &metric, const Rounding &to, float &step,
                         float &offset) {
    float part[16][4];
#pragma unroll
    for (int r = 0; r < 16; r++) part[r][0] = part[r][1] = part[r][2] = part[r][3] = 0;
#pragma unroll 1
    for (int m = 0; m < 4; m++) {
        float product[32];
#pragma unroll
        for (int k = 0; k < 32; k++) product[k] = 0;
#pragma unroll 2
        for (int i = 127; i >= 32 * m; i--)
            add_row(round_code(q, w.t(i), to.inv, to.shift), metric.group(m) + (i - 32 * m) * 32, product);
#pragma unroll
        for (int k = 0; k < 32; k++) {
            const float d = metric.d[32 * m + k], ones = metric.ones[32 * m + k], v = product[k] * q.levels, dw = d * v;
            const float r = lane_residual(w, q, to, 32 * m + k);
            float(&sum)[4] = part[k & 15];
            sum[0] = fmaf(dw, v, sum[0]);
            sum[1] = fmaf(dw, ones, sum[1]);
            sum[2] = fmaf(dw, r, sum[2]);
            sum[3] = fmaf(d * ones, r, sum[3]);
        }
    }
    const float old_step = step, old_offset = offset;
    refit_metric(metric.ones_ones, lane_tree(part, 0), lane_tree(part, 1), lane_tree(part, 2), lane_tree(part, 3), step, offset);
    return make_float2(step - old_step, offset - old_offset);
}

/* --- gain ---------------------------------------------------------------------------------------- */

/* x B and the residual's product with B, 32 channels at a time, to the sums that the gain is made of. ldlq: the residual
 * is that of error feedback, moved by the last refit; otherwise it is x - x^. */
DEVICE void lane_gain_sums(const LaneRow &w, const Levels &q, const LanesMetric &metric, const Rounding &to, bool ldlq,
                           float2 moved, float (&part)[16][2]) {
#pragma unroll 1
    for (int m = 0; m < 4; m++) {
        float y[32], v[32];
#pragma unroll
        for (int k = 0; k < 32; k++) y[k] = v[k] = 0;
#pragma unroll 1
        for (int i = 127; i >= 32 * m; i--) {
            const float x = w.x(i), *row = metric.group(m) + (i - 32 * m) * 32;
            const float c = ldlq ? round_code(q, w.t(i), to.inv, to.shift) : round_code(q, x - to.offset, to.inv, 0.5f * q.unit);
            add_row(x, row, y);
            add_row(ldlq ? c : fmaf(-to.step, c, x - to.offset), row, v);
        }
#pragma unroll
        for (int k = 0; k < 32; k++) {
            const int j = 32 * m + k;
            const float r = ldlq ? fmaf(-moved.y, metric.ones[j], fmaf(-moved.x, v[k] * q.levels, lane_residual(w, q, to, j))) : v[k];
            const float dv = metric.d[j] * y[k];
            part[k & 15][0] = fmaf(dv, y[k], part[k & 15][0]);
            part[k & 15][1] = fmaf(dv, r, part[k & 15][1]);
        }
    }
}

DEVICE void lane_gain(const LaneRow &w, const Levels &q, const float *packed, const Rounding &to, bool ldlq, float2 moved,
                      float &step, float &offset) {
    float part[16][2];
#pragma unroll
    for (int r = 0; r < 16; r++) part[r][0] = part[r][1] = 0;
    if (packed) {
        lane_gain_sums(w, q, LanesMetric(packed), to, ldlq, moved, part);
    } else {
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
    const float factor = gain_factor(lane_tree(part, 0), lane_tree(part, 1));
    step = to_fp16(step * factor);
    offset = to_fp16(offset * factor);
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

/* --- a CTA: 128 tokens of one side of a head ------------------------------------------------------ */

/* Residuals of the warp's tokens to x. */
DEVICE void lanes_load(const AppendParams &p, const AppendSide &from, const LaneRow &w, int side, int head, int first, int position) {
    float mean[4];
#pragma unroll
    for (int k = 0; k < 4; k++) mean[k] = from.mean ? __ldg(from.mean + head * 128 + 32 * k + w.lane) : 0.0f;
#pragma unroll 1
    for (int row0 = 0; row0 < 32; row0 += 4) {
        size_t at[16];
        uint32_t v[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int token = min(first + row0 + (i >> 2), p.n_tokens - 1);
            at[i] = (static_cast<size_t>(token) * p.n_kv_heads + head) * 128 + 32 * (i & 3) + w.lane;
        }
        load_inputs<16>(from.in, at, p.dtype, v);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float x = input_value(v[i], p.dtype);
            if (from.mean) x = x - mean[i & 3];
            w.x_of(row0 + (i >> 2), 32 * (i & 3) + w.lane) = first + row0 + (i >> 2) < p.n_tokens ? x : 0.0f;
        }
    }
    __syncwarp();
    if (side) return;
#pragma unroll 1
    for (int i = 0; i < p.n_tracked; i++) {
        const TrackedMean mean = tracked_mean(p, head, i, position);
        w.x(mean.dims.x) -= mean.x;
        w.x(mean.dims.y) -= mean.y;
    }
}

/* bf16 rows of the warp to the overlay; row: this lane's, NULL for none. */
DEVICE void lanes_store_overlay(const LaneRow &w, uint16_t *row) {
    const unsigned long long own = reinterpret_cast<unsigned long long>(row);
#pragma unroll 4
    for (int r = 0; r < 32; r++) {
        uint16_t *to = reinterpret_cast<uint16_t *>(__shfl_sync(FULL_WARP, own, r));
        if (!to) continue;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int i = 64 * k + 2 * w.lane;
            *reinterpret_cast<uint32_t *>(to + i) = pack_bf162(w.x_of(r, i), w.x_of(r, i + 1));
        }
    }
}

/* The other way: what is quantised of the warp's rows to x. */
DEVICE void lanes_fetch_overlay(const LaneRow &w, const uint16_t *row) {
    const unsigned long long own = reinterpret_cast<unsigned long long>(row);
#pragma unroll 1
    for (int row0 = 0; row0 < 32; row0 += 8) {
        uint32_t v[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int *from = reinterpret_cast<const int *>(__shfl_sync(FULL_WARP, own, row0 + (i >> 1)));
            v[i] = from ? load_int(from + 32 * (i & 1) + w.lane) : 0;
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int at = 64 * (i & 1) + 2 * w.lane, r = row0 + (i >> 1);
            w.x_of(r, at) = fminf(fmaxf(bf16_low(v[i]), -ROW_LIMIT), ROW_LIMIT);
            w.x_of(r, at + 1) = fminf(fmaxf(bf16_high(v[i]), -ROW_LIMIT), ROW_LIMIT);
        }
    }
    __syncwarp();
}

/* x U in registers; rotation: in shared memory, NULL for the identity. */
DEVICE void lanes_turn(const LaneRow &w, const float *rotation, float (&x)[128]) {
    if (!rotation) {
#pragma unroll
        for (int j = 0; j < 128; j++) x[j] = w.x(j);
        return;
    }
#pragma unroll
    for (int j = 0; j < 128; j++) x[j] = 0;
#pragma unroll 1
    for (int i = 0; i < 128; i++) {
        const float v = w.x(i);
#pragma unroll
        for (int j = 0; j < 128; j += 4) {
            const float4 u = load4(rotation + i * 128 + j);
            x[j] = fmaf(v, u.x, x[j]);
            x[j + 1] = fmaf(v, u.y, x[j + 1]);
            x[j + 2] = fmaf(v, u.z, x[j + 2]);
            x[j + 3] = fmaf(v, u.w, x[j + 3]);
        }
    }
}

/* Rounds the rotated row to BF16, stores it in the overlay, and leaves in registers and in x what is quantised. */
DEVICE void lanes_keep(const AppendParams &p, const AppendSide &from, const LaneRow &w, float (&x)[128], int head, int slot,
                       const RowPlace &at, int token) {
    bool finite = true;
#pragma unroll
    for (int j = 0; j < 128; j++) {
        x[j] = round_bf16(x[j]);
        finite = finite && fabsf(x[j]) <= FLT_MAX;
    }
    if (!finite && at.valid && p.bad_token) atomicMin(p.bad_token, token);
#pragma unroll
    for (int j = 0; j < 128; j++) {
        x[j] = finite ? x[j] : 0.0f;
        w.x(j) = x[j];
    }
    __syncwarp();
    lanes_store_overlay(w, at.valid ? overlay_of<128>(p, from, at, slot, head) : nullptr);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 128; j++) {
        x[j] = fminf(fmaxf(x[j], -ROW_LIMIT), ROW_LIMIT);
        w.x(j) = x[j];
    }
}

/* Codes of this lane's row to its tile; x: the row, in registers; packed: the head's metric or NULL. */
DEVICE void lane_code_row(const AppendParams &p, const LaneRow &w, const float (&x)[128], const float *packed, int side,
                          const RowPlace &at, uint8_t *tile) {
    const AppendSide &from = p.side[side];
    const Levels q = levels_of(from.bits);
    float step, offset;
    lane_least_squares(w, x, q, &step, &offset);
    const bool ldlq = from.ldlq && packed;
    const float inv = reciprocal(step);
    Rounding to = {step * q.levels, offset, inv * q.unit, 0};
    float2 moved = make_float2(0, 0);
    if (ldlq) {
        const LanesMetric metric(packed);
#pragma unroll 1
        for (int round = 0; round < LDLQ_REFITS; round++) {
            to = rounding_of(q, step, offset);
            lane_ldlq(w, q, metric, to);
            moved = lane_refit(w, q, metric, to, step, offset);
        }
    }
    if (from.gain) lane_gain(w, q, packed, to, ldlq, moved, step, offset);
    if (!at.valid) return;
    uint8_t *low = tile + side * layout_low_bytes(128), *high = tile + layout_high_offset(128, p.side[0].bits, side);
    if (side == 0)
        lane_store_keys(w, q, to, ldlq, at.position % 64, low, high);
    else
        lane_store_values(w, q, to, ldlq, at.position % 64, low, high);
    *reinterpret_cast<__half2 *>(tile + layout_param_offset(128, side) + layout_param(0, at.position % 64)) =
        __halves2half2(__float2half_rn(step), __float2half_rn(offset));
}

DEVICE LaneRow lane_row(float *shared) {
    const int warp = threadIdx.x >> 5;
    return {shared + warp * LanesShape::ARRAY, shared + (LanesShape::WARPS + warp) * LanesShape::ARRAY,
            static_cast<int>(threadIdx.x & 31)};
}

__global__ void __launch_bounds__(32 * LanesShape::WARPS, 1) append_lanes_kernel(const __grid_constant__ AppendParams p) {
    using L = LanesShape;
    extern __shared__ __align__(16) float shared[];
    const Part part(p);
    const AppendSide &from = p.side[part.side];
    const int head = part.head, first = part.group * L::ROWS + static_cast<int>(threadIdx.x & ~31);
    const LaneRow w = lane_row(shared);
    float *rotation = shared + L::WARPS * L::ARRAY; /* where t will be */
    const float *packed = from.metric_lanes ? shared + L::METRIC_AT : nullptr;
    if (from.rotation) stage(rotation, from.rotation + static_cast<size_t>(head) * 128 * 128, 128 * 128, blockDim.x);
    if (packed)
        stage(shared + L::METRIC_AT, from.metric_lanes + static_cast<size_t>(head) * LAYOUT_LANES_METRIC_FLOATS,
              LAYOUT_LANES_METRIC_FLOATS, blockDim.x);
    asm volatile("cp.async.commit_group;" ::: "memory");
    let_next_kernel_start();
    wait_for_kernel_before();
    const int token = first + w.lane;
    const RowPlace at = place_of_token(p, token);
    const int slot = slot_of(p, at);
    uint8_t *tile = tile_of(p, at, head);
    lanes_load(p, from, w, part.side, head, first, at.position);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    float x[128];
    lanes_turn(w, from.rotation ? rotation : nullptr, x);
    __syncthreads(); /* t takes the rotation's place */
    lanes_keep(p, from, w, x, head, slot, at, token);
    lane_code_row(p, w, x, packed, part.side, at, tile);
}

__global__ void __launch_bounds__(32 * LanesShape::WARPS, 1) settle_lanes_kernel(const __grid_constant__ AppendParams p) {
    using L = LanesShape;
    extern __shared__ __align__(16) float shared[];
    const Part part(p);
    const AppendSide &from = p.side[part.side];
    const LaneRow w = lane_row(shared);
    const float *packed = from.metric_lanes ? shared + L::METRIC_AT : nullptr;
    let_next_kernel_start();
    wait_for_kernel_before();
    bool first = true;
#pragma unroll 1
    for (int group = part.group;; group += from.n_ctas) {
        RowPlace at;
        if (group * L::ROWS >= place_to_settle(p, group * L::ROWS + threadIdx.x, &at)) return;
        if (first && packed)
            stage(shared + L::METRIC_AT, from.metric_lanes + static_cast<size_t>(part.head) * LAYOUT_LANES_METRIC_FLOATS,
                  LAYOUT_LANES_METRIC_FLOATS, blockDim.x);
        lanes_fetch_overlay(w, at.valid ? overlay_of<128>(p, from, at, slot_of(p, at), part.head) : nullptr);
        if (first) {
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads();
        }
        first = false;
        float x[128];
#pragma unroll
        for (int j = 0; j < 128; j++) x[j] = w.x(j);
        lane_code_row(p, w, x, packed, part.side, at, tile_of(p, at, part.head));
        __syncwarp(); /* the rows' places are free */
    }
}

#endif
