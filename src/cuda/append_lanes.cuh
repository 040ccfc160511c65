/*
 * append_lanes.cuh - the quantiser with a row on every lane, for many rows of the overlay: head_dim 128, default recipe.
 *
 * What append_rows.cuh does on sixteen lanes together a lane does here alone: nothing is done twice. That takes long for one
 * row and little time for thousands. What is included here is compiled without contraction. Least squares are
 * append_sorted.cuh. A CTA has keys on four warps and values on four. Error feedback of keys is append_feedback.cuh; the
 * warps of values, who have their parameters by then, assist, and store their codes on the way.
 */
#ifndef OSCAR_CUDA_APPEND_LANES_CUH
#define OSCAR_CUDA_APPEND_LANES_CUH

#include "append_feedback.cuh"
#include "append_sorted.cuh"

/* Words of shared memory of 32 rows of keys and 32 of values. */
struct LanesShape {
    static constexpr int D = 128, SIDE_WARPS = 4, ROWS = 32 * SIDE_WARPS; /* of each side */
    static constexpr int X = D / 2 * 32, C = D / 4 * 32, E = D * 32; /* see FeedbackRows; X: halves of x too */
    static constexpr int KEYS = 0, VALUES = X, HALVES = 2 * X, CODES = 3 * X, ERRORS = CODES + C, HAND = ERRORS + E;
    static constexpr int PAIR = HAND + N_HAND * 32;
    static_assert(2 * X + 32 * 32 <= C + E, "sums of values");
    static constexpr int WORDS = LAYOUT_FEEDBACK_FLOATS + SIDE_WARPS * PAIR;
    /* Before there are codes and errors both sides have 32 rows as they come there, [32][64] words, then these. */
    DEVICE static int staged(int side) { return CODES + side * X; }
    DEVICE static int sorted(int side) { return side ? CODES + X : HALVES; }
    DEVICE static int sums(int side) { return CODES + side * 2 * X; } /* [32][32] */
};

/* This lane's row: x in bf16, two channels a word. */
struct LaneRow {
    uint32_t *x_;

    DEVICE uint32_t &x2(int pair) const { return x_[pair * 32]; }
    DEVICE float x(int i) const { return i & 1 ? bf16_high(x2(i >> 1)) : bf16_low(x2(i >> 1)); }
};

/* --- to memory ----------------------------------------------------------------------------------- */

/* Lower and upper two bits of eight codes. */
struct EightCodes {
    uint32_t below, above;

    /* The two bits from `shift` on of four bytes, side by side. */
    DEVICE static uint32_t two_bits(uint32_t bytes, int shift) { return ((bytes >> shift & 0x03030303u) * 0x01041040u) >> 24; }
    /* Of codes a byte each. */
    DEVICE EightCodes(uint32_t a, uint32_t b)
        : below(two_bits(a, 0) | two_bits(b, 0) << 8), above(two_bits(a, 2) | two_bits(b, 2) << 8) {}
};

/* Codes of four values, a byte each. */
DEVICE uint32_t four_codes(const Levels &q, const Rounding &to, float a, float b, float c, float d) {
    auto code = [&](float x) {
        const float u = __saturatef(__fmaf_rn(x - to.offset, to.inv, 0.5f * q.unit));
        return __float_as_uint(fminf(__fadd_rz(u, q.magic), q.top));
    };
    return last_bytes(code(a), code(b), code(c), code(d));
}

/* Of channels 8 k .. of this lane's row. */
DEVICE EightCodes codes_of_lane(const LaneRow &w, const Levels &q, const Rounding &to, int k) {
    uint32_t bytes[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const uint32_t a = w.x2(4 * k + 2 * n), b = w.x2(4 * k + 2 * n + 1);
        bytes[n] = four_codes(q, to, bf16_low(a), bf16_high(a), bf16_low(b), bf16_high(b));
    }
    return EightCodes(bytes[0], bytes[1]);
}

/* The same where error feedback left them. */
DEVICE EightCodes codes_of_feedback(const FeedbackRows &w, int k) {
    const uint2 bytes = *reinterpret_cast<const uint2 *>(w.c + 512 * (k >> 1) + 16 * (threadIdx.x & 31) + 8 * (k & 1));
    return EightCodes(bytes.x, bytes.y);
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

/* Codes of values of two rows of lanes, 2 part and the next; part: 0 .. 3. */
DEVICE void lane_store_values(const LaneRow &w, const Levels &q, const Rounding &to, int slot, uint8_t *low, uint8_t *high,
                              int part) {
    const int sub = slot >> 4, r = slot & 15;
    uint32_t above[2][2];
#pragma unroll
    for (int word = 0; word < 2; word++) {
        uint32_t x[8]; /* of channels that both rows of lanes have, of one in the lower half and of one in the upper */
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = w.x2(layout_value_channel(word, 0, i) / 2 + part);
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = odd ? bf16_high(x[i]) : bf16_low(x[i]);
            const EightCodes codes(four_codes(q, to, v[0], v[1], v[2], v[3]), four_codes(q, to, v[4], v[5], v[6], v[7]));
            const int lane = 4 * (2 * part + odd) + ((r & 7) >> 1);
            const int byte = 512 * sub + layout_word(2, lane, 2 * (r >> 3) + word) + 2 * (r & 1);
            *reinterpret_cast<uint16_t *>(low + byte) = static_cast<uint16_t>(codes.below);
            if (q.bits == 4) *reinterpret_cast<uint16_t *>(high + byte) = static_cast<uint16_t>(codes.above);
            above[odd][word] = codes.above;
        }
    }
    if (q.bits != 3) return;
#pragma unroll
    for (int odd = 0; odd < 2; odd++)
        *reinterpret_cast<uint16_t *>(high + 256 * sub + layout_word(1, 4 * (2 * part + odd) + ((r & 7) >> 1), r >> 3) +
                                      2 * (r & 1)) = static_cast<uint16_t>(above[odd][0] | above[odd][1] << 1);
}

/* --- a CTA: 128 rows of both sides of a head ------------------------------------------------------ */

/* Asks for the overlay's rows of a warp, in [32][64] words of shared memory: 16 bytes k of row r at k ^ (r & 7), so that
 * lanes that read theirs ask no bank twice. row: this lane's, NULL for none; some: any of the overlay. */
DEVICE void ask_for_rows(const uint16_t *row, const uint16_t *some, uint32_t *stage) {
    const int lane = threadIdx.x & 31, k = lane & 15;
    const unsigned long long own = reinterpret_cast<unsigned long long>(row);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int r = 2 * i + (lane >> 4);
        const unsigned long long from = __shfl_sync(FULL_WARP, own, r);
        const uint16_t *source = from ? reinterpret_cast<const uint16_t *>(from) + 8 * k : some;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(stage + 64 * r + 4 * (k ^ (r & 7)))),
                     "l"(source), "r"(from ? 16 : 0)
                     : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* What is quantised of this lane's. */
DEVICE void take_row(const LaneRow &w, const uint32_t *stage) {
    const int lane = threadIdx.x & 31;
    const uint32_t limit = pack_bf162(ROW_LIMIT, ROW_LIMIT);
#pragma unroll
    for (int k = 0; k < 16; k++) {
        const uint4 v = *reinterpret_cast<const uint4 *>(stage + 64 * lane + 4 * (k ^ (lane & 7)));
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int n = 0; n < 4; n++) w.x2(4 * k + n) = max_bf162(min_bf162(words[n], limit), limit | 0x80008000u);
    }
}

/* Step and offset of this lane's row to its tile. */
DEVICE void lane_store_params(uint8_t *tile, int side, int slot, float step, float offset) {
    *reinterpret_cast<__half2 *>(tile + layout_param_offset(128, side) + layout_param(0, slot)) =
        __halves2half2(__float2half_rn(step), __float2half_rn(offset));
}

/* This lane's row of keys, from the least squares on, to its tile. */
DEVICE void finish_keys(const AppendParams &p, const LaneRow &w, const LeastSquares &found, const float *metric,
                        const FeedbackRows &feedback, int head, const RowPlace &at, uint8_t *tile) {
    const AppendSide &from = p.side[0];
    const Levels q = levels_of(from.bits);
    const int slot = at.position % 64;
    uint8_t *high = tile + layout_high_offset(128, from.bits, 0);
    float step = found.step, offset = found.offset;
    if (from.feedback) {
        const AppendMetric exact = metric_of<128>(from.metric + static_cast<size_t>(head) * layout_metric_floats(128));
        feedback_rows(feedback, q, FeedbackMetric(metric), exact, found.largest, from.gain, step, offset);
        if (at.valid) lane_store_keys(q, slot, tile, high, [&](int k) { return codes_of_feedback(feedback, k); });
    } else {
        const Rounding to = {step * q.levels, offset, reciprocal(step) * q.unit, 0};
        if (at.valid) lane_store_keys(q, slot, tile, high, [&](int k) { return codes_of_lane(w, q, to, k); });
        if (from.gain) {
            step = to_fp16(step * found.gain);
            offset = to_fp16(offset * found.gain);
        }
    }
    if (at.valid) lane_store_params(tile, 0, slot, step, offset);
}

/* The same of values; then, or meanwhile, this warp assists that of keys. */
DEVICE void finish_values(const AppendParams &p, const LaneRow &w, const LeastSquares &found, const float *metric,
                          const FeedbackRows &feedback, const RowPlace &at, uint8_t *tile) {
    const Levels q = levels_of(p.side[1].bits);
    const Rounding to = {0, found.offset, reciprocal(found.step) * q.unit, 0};
    const int slot = at.position % 64;
    const float gain = p.side[1].gain ? found.gain : 1.0f;
    if (at.valid) lane_store_params(tile, 1, slot, to_fp16(found.step * gain), to_fp16(found.offset * gain));
    auto store = [&](int part) {
        if (at.valid)
            lane_store_values(w, q, to, slot, tile + layout_low_bytes(128), tile + layout_high_offset(128, p.side[0].bits, 1),
                              part);
    };
    if (p.side[0].feedback) {
        assist_feedback(feedback, FeedbackMetric(metric), store);
    } else {
#pragma unroll 1
        for (int part = 0; part < 4; part++) store(part);
    }
}

/* Rows of tokens that a launch before stored, or rows to settle. */
__global__ void __launch_bounds__(64 * LanesShape::SIDE_WARPS, 1) code_lanes_kernel(const __grid_constant__ AppendParams p) {
    using L = LanesShape;
    extern __shared__ __align__(16) uint32_t words[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, side = warp / L::SIDE_WARPS, pair = warp % L::SIDE_WARPS;
    const int head = blockIdx.x % p.n_kv_heads, row = 32 * pair + lane;
    const AppendSide &from = p.side[side];
    float *metric = reinterpret_cast<float *>(words);
    uint32_t *own = words + LAYOUT_FEEDBACK_FLOATS + pair * L::PAIR;
    const LaneRow w = {own + (side ? L::VALUES : L::KEYS) + lane};
    uint32_t *stage_rows = own + L::staged(side);
    SortedRow sorted;
    sorted.words = own + L::sorted(side) + lane;
    sorted.sums = reinterpret_cast<float *>(own + L::sums(side)) + lane;
    FeedbackRows feedback;
    feedback.x = own + L::KEYS;
    feedback.c = reinterpret_cast<uint8_t *>(own + L::CODES);
    feedback.e = reinterpret_cast<uint8_t *>(own + L::ERRORS);
    feedback.halves = reinterpret_cast<uint8_t *>(own + L::HALVES);
    feedback.hand = reinterpret_cast<float *>(own + L::HAND);
    feedback.pair = pair;
    let_next_kernel_start();
    wait_for_kernel_before();
    bool first = true;
#pragma unroll 1
    for (int group = blockIdx.x / p.n_kv_heads;; group += from.n_ctas) {
        RowPlace at;
        if (group * L::ROWS >= place_of_row(p, group * L::ROWS + row, &at)) return;
        ask_for_rows(at.valid ? overlay_of<128>(p, from, at, slot_of(p, at), head) : nullptr, from.overlay, stage_rows);
        /* The metric, which is needed later, behind the first rows. */
        if (first && p.side[0].feedback)
            stage(metric, p.side[0].feedback + static_cast<size_t>(head) * LAYOUT_FEEDBACK_FLOATS, LAYOUT_FEEDBACK_FLOATS,
                  blockDim.x);
        asm volatile("cp.async.commit_group;" ::: "memory");
        uint8_t *tile = tile_of(p, at, head);
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncwarp();
        take_row(w, stage_rows);
        __syncwarp(); /* sorted rows take the place of rows as they came */
        sorted.sort(w.x_);
        const LeastSquares found = sorted_least_squares(sorted, w.x_, levels_of(from.bits));
        if (first) {
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads();
        }
        first = false;
        if (side == 0)
            finish_keys(p, w, found, metric, feedback, head, at, tile);
        else
            finish_values(p, w, found, metric, feedback, at, tile);
        __syncwarp(); /* the rows' place is free */
    }
}

#endif
