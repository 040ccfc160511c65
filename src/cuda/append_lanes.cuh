/*
 * append_lanes.cuh - the quantiser with a row on every lane, for many rows of the overlay: head_dim 128, default recipe.
 *
 * What append_rows.cuh does on sixteen lanes together a lane does here alone, in the same order: nothing is done
 * twice. That takes long for one row and little time for thousands. What is included here is compiled without
 * contraction. A CTA has keys on four warps and values on four. Error feedback of keys is append_feedback.cuh; the warps
 * of values, who are done by then, assist.
 */
#ifndef OSCAR_CUDA_APPEND_LANES_CUH
#define OSCAR_CUDA_APPEND_LANES_CUH

#include "append_feedback.cuh"

struct LanesShape {
    static constexpr int D = 128, SIDE_WARPS = 4, ROWS = 32 * SIDE_WARPS; /* of each side */
    static constexpr int X = D / 2 * 32, C = D / 2 * 32, E = D * 32;      /* words of a warp: see FeedbackRows */
    static constexpr int KEYS = X + C + E + N_HAND * 32;
    static constexpr int WORDS = LAYOUT_FEEDBACK_FLOATS + SIDE_WARPS * (KEYS + X);
};

/* This lane's row: x in bf16, two channels a word. */
struct LaneRow {
    uint32_t *x_;

    DEVICE uint32_t &x2(int pair) const { return x_[pair * 32]; }
    DEVICE float x(int i) const { return i & 1 ? bf16_high(x2(i >> 1)) : bf16_low(x2(i >> 1)); }
};

/* The tree over partial sums. */
DEVICE float lane_tree(const float (&part)[16]) {
    float sum[8];
#pragma unroll
    for (int r = 0; r < 8; r++) sum[r] = part[r] + part[r + 8];
#pragma unroll
    for (int h = 4; h > 0; h /= 2)
#pragma unroll
        for (int r = 0; r < h; r++) sum[r] += sum[r + h];
    return sum[0];
}

/* All channels, sixteen partial sums at a time: use(channel % 16, x). Little code: what the instruction cache does not
 * hold takes longer. */
template <class F> DEVICE void for_channels(const LaneRow &w, F use) {
#pragma unroll 1
    for (int pair = 0; pair < 64; pair += 8)
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const uint32_t both = w.x2(pair + k);
            use(2 * k, bf16_low(both));
            use(2 * k + 1, bf16_high(both));
        }
}

/* --- least squares ------------------------------------------------------------------------------- */

#define STARTS 3 /* where there are two, the second is there twice */

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

/* The largest |x|, and those of the ranks of the other starts; the range. */
DEVICE void lane_limits(const LaneRow &w, const Levels &q, float (&limit)[STARTS], float *low, float *high) {
    float top[16]; /* falling */
#pragma unroll
    for (int k = 0; k < 16; k++) top[k] = 0;
    *low = FLT_MAX;
    *high = -FLT_MAX;
#pragma unroll 1
    for (int pair = 0; pair < 64; pair += 8) {
        float v[16];
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const uint32_t both = w.x2(pair + n);
            *low = fminf(*low, fminf(bf16_low(both), bf16_high(both)));
            *high = fmaxf(*high, fmaxf(bf16_low(both), bf16_high(both)));
            v[2 * n] = fabsf(bf16_low(both));
            v[2 * n + 1] = fabsf(bf16_high(both));
        }
        sort_rising<1, 1>(v);
#pragma unroll
        for (int k = 0; k < 16; k++) top[k] = fmaxf(top[k], v[k]);
#pragma unroll
        for (int k = 8; k >= 1; k /= 2)
#pragma unroll
            for (int i = 0; i < 16; i++) {
                if (i & k) continue;
                const float more = fmaxf(top[i], top[i + k]), less = fminf(top[i], top[i + k]);
                top[i] = more;
                top[i + k] = less;
            }
    }
    limit[0] = top[0];
#pragma unroll
    for (int s = 1; s < STARTS; s++) {
        const int rank = rank_from_top<Row<128>>(q.clips[s - 1]);
        limit[s] = top[0];
#pragma unroll
        for (int k = 0; k < 16; k++) limit[s] = k == rank ? top[k] : limit[s];
    }
}

/* A round of all starts. Codes are whole numbers, so their sums are exact in any order: of four at a time. */
DEVICE void lane_round(const LaneRow &w, const Levels &q, float (&step)[STARTS], float (&offset)[STARTS]) {
    float inv[STARTS], zc[STARTS][16], z1[STARTS][16];
    uint32_t cc[STARTS], c1[STARTS], bits[STARTS][4];
#pragma unroll
    for (int s = 0; s < STARTS; s++) {
        inv[s] = reciprocal(step[s]) * q.unit;
        cc[s] = c1[s] = 0;
#pragma unroll
        for (int r = 0; r < 16; r++) zc[s][r] = z1[s][r] = 0;
    }
    for_channels(w, [&](int r, float x) {
#pragma unroll
        for (int s = 0; s < STARTS; s++) {
            const float z = x - offset[s];
            const float v = fminf(__fadd_rz(__saturatef(__fmaf_rn(z, inv[s], 0.5f * q.unit)), q.magic), q.top);
            zc[s][r] = fmaf(z, v - q.magic, zc[s][r]);
            z1[s][r] += z;
            bits[s][r % 4] = __float_as_uint(v); /* the code is the last byte */
            if (r % 4 == 3) {
                const uint32_t codes = __byte_perm(__byte_perm(bits[s][0], bits[s][1], 0x0040),
                                                   __byte_perm(bits[s][2], bits[s][3], 0x0040), 0x5410);
                cc[s] = __dp4a(codes, codes, cc[s]);
                c1[s] = __dp4a(codes, 0x01010101u, c1[s]);
            }
        }
    });
#pragma unroll
    for (int s = 0; s < STARTS; s++) {
        const float sum[4] = {static_cast<float>(cc[s]) * (q.unit * q.unit), static_cast<float>(c1[s]) * q.unit, lane_tree(zc[s]),
                              lane_tree(z1[s])};
        refit_plain(q, 128.0f, sum, step[s], offset[s]);
    }
}

/* Step and offset; returns the largest |x|. */
DEVICE float lane_least_squares(const LaneRow &w, const Levels &q, float *best_step, float *best_offset) {
    float low, high, limit[STARTS], step[STARTS], offset[STARTS], inv[STARTS], up[STARTS], part[STARTS][16];
    lane_limits(w, q, limit, &low, &high);
#pragma unroll
    for (int s = 0; s < STARTS; s++) range_params(q, low, high, limit[s], &step[s], &offset[s]);
#pragma unroll 1
    for (int round = 0; round < LS_ROUNDS; round++) lane_round(w, q, step, offset);
#pragma unroll
    for (int s = 0; s < STARTS; s++) {
        step[s] = to_fp16(step[s]);
        offset[s] = to_fp16(offset[s]);
        inv[s] = reciprocal(step[s]) * q.unit;
        up[s] = -step[s] * q.levels;
#pragma unroll
        for (int r = 0; r < 16; r++) part[s][r] = 0;
    }
    for_channels(w, [&](int r, float x) {
#pragma unroll
        for (int s = 0; s < STARTS; s++) {
            const float z = x - offset[s], e = fmaf(up[s], round_code(q, z, inv[s], 0.5f * q.unit), z);
            part[s][r] = fmaf(e, e, part[s][r]);
        }
    });
    float best_error = FLT_MAX;
    *best_step = *best_offset = 0;
#pragma unroll
    for (int s = 0; s < STARTS; s++) {
        const float error = lane_tree(part[s]);
        const bool better = error < best_error;
        *best_step = better ? step[s] : *best_step;
        *best_offset = better ? offset[s] : *best_offset;
        best_error = better ? error : best_error;
    }
    return limit[0];
}

/* --- gain and codes without a metric --------------------------------------------------------------- */

/* The gain of this lane's row where there is no metric. */
DEVICE void lane_gain(const LaneRow &w, const Levels &q, const Rounding &to, float &step, float &offset) {
    float xx[16], xr[16];
#pragma unroll
    for (int r = 0; r < 16; r++) xx[r] = xr[r] = 0;
    for_channels(w, [&](int r, float x) {
        const float z = x - to.offset, left = fmaf(-to.step, round_code(q, z, to.inv, 0.5f * q.unit), z);
        xx[r] = fmaf(x, x, xx[r]);
        xr[r] = fmaf(x, left, xr[r]);
    });
    const float factor = gain_factor(lane_tree(xx), lane_tree(xr));
    step = to_fp16(step * factor);
    offset = to_fp16(offset * factor);
}

/* --- to memory ----------------------------------------------------------------------------------- */

/* Code of channel j. */
DEVICE int lane_code(const LaneRow &w, const Levels &q, const Rounding &to, int j) {
    const float u = __saturatef(__fmaf_rn(w.x(j) - to.offset, to.inv, 0.5f * q.unit));
    return __float_as_int(fminf(__fadd_rz(u, q.magic), q.top)) & ((1 << q.bits) - 1);
}

/* Lower and upper two bits of eight codes. */
struct EightCodes {
    uint32_t below, above;
};

/* Of channels 8 k .. of this lane's row. */
DEVICE EightCodes codes_of_lane(const LaneRow &w, const Levels &q, const Rounding &to, int k) {
    EightCodes codes = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int code = lane_code(w, q, to, 8 * k + i);
        codes.below |= (code & 3) << (2 * i);
        codes.above |= (code >> 2) << (2 * i);
    }
    return codes;
}

/* The same where error feedback left them: halves, in units of 2^bits. */
DEVICE EightCodes codes_of_feedback(const FeedbackRows &w, const Levels &q, int k) {
    const uint4 v = *reinterpret_cast<const uint4 *>(w.c + 512 * k + 16 * (threadIdx.x & 31));
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    EightCodes codes = {0, 0};
#pragma unroll
    for (int i = 0; i < 4; i++) { /* 1,024 + code has the code in its last bits */
        const uint32_t both = half2_bits(__hfma2(bits_half2(words[i]), __float2half2_rn(q.levels), __float2half2_rn(1024.0f)));
        codes.below |= ((both & 3) | (both >> 14 & 12)) << (4 * i);
        codes.above |= ((both >> 2 & 3) | (both >> 16 & 12)) << (4 * i);
    }
    return codes;
}

/* Codes of keys; slot: of the token in the tile; eight(k): codes of channels 8 k .. See layout.h. */
template <class F> DEVICE void lane_store_keys(const Levels &q, int slot, uint8_t *low, uint8_t *high, F eight) {
    const int sub = slot >> 4, r = slot & 15;
#pragma unroll 1
    for (int t = 0; t < 4; t++) {
        uint32_t below[2], above[2];
#pragma unroll
        for (int word = 0; word < 2; word++) {
            const EightCodes a = eight(4 * t + 2 * word), b = eight(4 * t + 2 * word + 1);
            below[word] = a.below | b.below << 16;
            above[word] = a.above | b.above << 16;
        }
        const int lane = 4 * (r & 7) + t;
        *reinterpret_cast<uint2 *>(low + 512 * sub + layout_word(2, lane, 2 * (r >> 3))) = make_uint2(below[0], below[1]);
        if (q.bits == 4)
            *reinterpret_cast<uint2 *>(high + 512 * sub + layout_word(2, lane, 2 * (r >> 3))) = make_uint2(above[0], above[1]);
        if (q.bits == 3) /* one bit a code: two words share one */
            *reinterpret_cast<uint32_t *>(high + 256 * sub + layout_word(1, lane, r >> 3)) = above[0] | above[1] << 1;
    }
}

DEVICE void lane_store_values(const LaneRow &w, const Levels &q, const Rounding &to, int slot, uint8_t *low, uint8_t *high) {
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
                const int code = lane_code(w, q, to, layout_value_channel(word, g, i));
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

/* What is quantised of a row of the overlay, NULL for none. */
DEVICE void lane_fetch(const LaneRow &w, const uint16_t *row) {
    const uint32_t limit = pack_bf162(ROW_LIMIT, ROW_LIMIT);
    uint4 v[16];
#pragma unroll
    for (int k = 0; k < 16; k++) v[k] = row ? load_uint4(row + 8 * k) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int k = 0; k < 16; k++) {
        const uint32_t words[4] = {v[k].x, v[k].y, v[k].z, v[k].w};
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t both;
            asm("min.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(words[n]), "r"(limit));
            asm("max.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(both), "r"(limit | 0x80008000u));
            w.x2(4 * k + n) = both;
        }
    }
}

/* Codes of this lane's row to its tile. packed, feedback: of keys with a metric, NULL if there is none. */
DEVICE void lane_code_row(const AppendParams &p, const LaneRow &w, const float *packed, const FeedbackRows &feedback, int side,
                          int head, const RowPlace &at, uint8_t *tile) {
    const AppendSide &from = p.side[side];
    const Levels q = levels_of(from.bits);
    float step, offset;
    const float largest = lane_least_squares(w, q, &step, &offset);
    const float inv = reciprocal(step);
    const Rounding to = {step * q.levels, offset, inv * q.unit, 0};
    const bool fed_back = packed && side == 0;
    const int slot = at.position % 64;
    uint8_t *low = tile + side * layout_low_bytes(128), *high = tile + layout_high_offset(128, p.side[0].bits, side);
    if (fed_back) {
        const AppendMetric exact = metric_of<128>(from.metric + static_cast<size_t>(head) * layout_metric_floats(128));
        feedback_rows(feedback, q, FeedbackMetric(packed), exact, largest, from.gain, step, offset);
        if (at.valid) lane_store_keys(q, slot, low, high, [&](int k) { return codes_of_feedback(feedback, q, k); });
    } else {
        if (from.gain) lane_gain(w, q, to, step, offset);
        if (at.valid && side == 0) lane_store_keys(q, slot, low, high, [&](int k) { return codes_of_lane(w, q, to, k); });
        if (at.valid && side == 1) lane_store_values(w, q, to, slot, low, high);
    }
    if (at.valid)
        *reinterpret_cast<__half2 *>(tile + layout_param_offset(128, side) + layout_param(0, slot)) =
            __halves2half2(__float2half_rn(step), __float2half_rn(offset));
    if (packed && side == 1) {
        __syncwarp(); /* this warp's rows become halves */
        assist_feedback(feedback, levels_of(p.side[0].bits), FeedbackMetric(packed));
    }
}

/* Rows of tokens that a launch before stored, or rows to settle. */
__global__ void __launch_bounds__(64 * LanesShape::SIDE_WARPS, 1) code_lanes_kernel(const __grid_constant__ AppendParams p) {
    using L = LanesShape;
    extern __shared__ __align__(16) uint32_t words[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, side = warp >= L::SIDE_WARPS;
    const int head = blockIdx.x % p.n_kv_heads, row = threadIdx.x % L::ROWS;
    const AppendSide &from = p.side[side];
    float *metric = reinterpret_cast<float *>(words);
    const int pair = warp % L::SIDE_WARPS;
    uint32_t *keys = words + LAYOUT_FEEDBACK_FLOATS + pair * L::KEYS;
    uint32_t *values = words + LAYOUT_FEEDBACK_FLOATS + L::SIDE_WARPS * L::KEYS + pair * L::X;
    const LaneRow w = {(side ? values : keys) + lane};
    FeedbackRows feedback;
    feedback.x = keys;
    feedback.c = reinterpret_cast<uint8_t *>(keys + L::X);
    feedback.e = reinterpret_cast<uint8_t *>(keys + L::X + L::C);
    feedback.halves = reinterpret_cast<uint8_t *>(values);
    feedback.hand = reinterpret_cast<float *>(keys + L::X + L::C + L::E);
    feedback.pair = pair;
    if (p.side[0].feedback)
        stage(metric, p.side[0].feedback + static_cast<size_t>(head) * LAYOUT_FEEDBACK_FLOATS, LAYOUT_FEEDBACK_FLOATS, blockDim.x);
    let_next_kernel_start();
    wait_for_kernel_before();
    bool first = true;
#pragma unroll 1
    for (int group = blockIdx.x / p.n_kv_heads;; group += from.n_ctas) {
        RowPlace at;
        if (group * L::ROWS >= place_of_row(p, group * L::ROWS + row, &at)) break;
        lane_fetch(w, at.valid ? overlay_of<128>(p, from, at, slot_of(p, at), head) : nullptr);
        if (first) {
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads();
        }
        first = false;
        __syncwarp();
        lane_code_row(p, w, p.side[0].feedback ? metric : nullptr, feedback, side, head, at, tile_of(p, at, head));
        __syncwarp(); /* the rows' place is free */
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

#endif
