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

#include "append_chunk.cuh"
#include "append_feedback.cuh"
#include "append_sorted.cuh"

/* Words of shared memory of 128 rows of keys and as many of values: values, the metric, then what four pairs of warps have. */
struct LanesShape {
    static constexpr int D = 128, SIDE_WARPS = 4, ROWS = 32 * SIDE_WARPS; /* of each side */
    static constexpr int X = D / 2 * 32, C = D / 4 * 32, E = D * 32;      /* of 32 rows, see FeedbackRows; X: halves of x too */
    static constexpr int VALUES = 0, METRIC = SIDE_WARPS * X, PAIRS = METRIC + LAYOUT_FEEDBACK_FLOATS;
    /* Of a pair. */
    static constexpr int ERRORS = 0, CODES = E, HAND = CODES + C, KEYS = HAND + N_HAND * 32, HALVES = KEYS + X, PAIR = HALVES + X;
    static constexpr int WORDS = PAIRS + SIDE_WARPS * PAIR;
    /* Before a pair has codes and errors, both sides have 32 rows there as they come, [32][64] words, then in order, and sums,
     * [32][32]. Where keys may have codes of the rows before yet, values have nothing. */
    DEVICE static constexpr int staged(int side) { return side ? ERRORS : CODES + C - X; }
    DEVICE static constexpr int sorted(int side) { return side ? ERRORS : HALVES; }
    DEVICE static constexpr int sums(int side) { return side ? ERRORS + X : CODES + C - X; }
    static constexpr int SUMS = 32 * 32;
    static_assert(X + SUMS <= CODES + C - X, "values and keys as they come");
    /* While tokens' rows are turned: the values' rotation; then values, turned values, later in order, and their sums; the keys'
     * rotation, then turned keys; residuals. The metric comes when values have their parameters. */
    using Chunk = ChunkShape<ROWS>;
    static constexpr int VALUE_ROTATION = 0, TURNED_VALUES = METRIC, VALUE_SUMS = TURNED_VALUES + Chunk::TURNED;
    static constexpr int KEY_ROTATION = VALUE_SUMS + SIDE_WARPS * SUMS, TURNED_KEYS = KEY_ROTATION;
    static constexpr int RESIDUALS = KEY_ROTATION + D * D;
    static_assert(D * D <= VALUE_SUMS && RESIDUALS + Chunk::RESIDUALS <= WORDS, "shared memory of turning");
    static_assert(KEY_ROTATION <= PAIRS + CODES + C - X, "keys do not reach into what values have");
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

/* Warps of one side come here. */
DEVICE void meet_side(int side) { asm volatile("bar.sync %0, 128;" ::"r"(1 + LanesShape::SIDE_WARPS + side) : "memory"); }

/* What is quantised of this lane's. MEET: all of the side have read before one writes. */
template <bool MEET> DEVICE void take_row(const LaneRow &w, int side, const uint32_t *stage) {
    const int lane = threadIdx.x & 31;
    const uint32_t limit = pack_bf162(ROW_LIMIT, ROW_LIMIT);
    uint4 v[16];
#pragma unroll
    for (int k = 0; k < 16; k++) v[k] = *reinterpret_cast<const uint4 *>(stage + 64 * lane + 4 * (k ^ (lane & 7)));
    if (MEET) meet_side(side);
#pragma unroll
    for (int k = 0; k < 16; k++) {
        const uint32_t words[4] = {v[k].x, v[k].y, v[k].z, v[k].w};
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

/* Asks for the rotations of a head. */
DEVICE void ask_for_rotations(const AppendParams &p, int head, uint32_t *words) {
    using L = LanesShape;
#pragma unroll
    for (int side = 1; side >= 0; side--) {
        const float *rotation = p.side[side].rotation;
        float *to = reinterpret_cast<float *>(words + (side ? L::VALUE_ROTATION : L::KEY_ROTATION));
        if (rotation) stage(to, rotation + static_cast<size_t>(head) * L::D * L::D, L::D * L::D, threadIdx.x, L::Chunk::THREADS);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
}

DEVICE void ask_for_metric(const AppendParams &p, int head, uint32_t *words, int thread, int n_threads) {
    const float *from = p.side[0].feedback + static_cast<size_t>(head) * LAYOUT_FEEDBACK_FLOATS;
    float *to = reinterpret_cast<float *>(words + LanesShape::METRIC);
    if (p.side[0].feedback) stage(to, from, LAYOUT_FEEDBACK_FLOATS, thread, n_threads);
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Leaves values of 128 tokens, turned, and residuals of keys in shared memory. All threads come here; rotations have been asked
 * for. input: of values; tracked: prepared; position: of the thread's row. */
DEVICE void turn_values(const AppendParams &p, int head, int first, ChunkInput<LanesShape::ROWS> &input,
                        ChunkTracked<LanesShape::ROWS> &tracked, int position, uint32_t *words) {
    using L = LanesShape;
    float *residuals = reinterpret_cast<float *>(words + L::RESIDUALS);
    if (p.n_tracked > 0) tracked.turn(position); /* while inputs are on their way */
    input.store(p, p.side[1], head, first, residuals);
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads();
    input.load(p, p.side[0].in, head, first);
    if (p.n_tracked > 0) tracked.ask(p, head, position, 0);
    ChunkPart<L::ROWS, 8> part;
    if (p.side[1].rotation)
        part.turn(reinterpret_cast<float *>(words + L::VALUE_ROTATION), residuals);
    else
        part.copy(residuals);
    __syncthreads(); /* rotation and residuals are not needed any more */
    part.keep(words + L::TURNED_VALUES);
    input.store(p, p.side[0], head, first, residuals);
    __syncthreads();
    if (p.n_tracked > 0) tracked.take_all(p, head, position, residuals);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
}

/* Turns keys, of which the residuals are there. Warps of keys come here. */
DEVICE void turn_keys(const AppendParams &p, uint32_t *words) {
    using L = LanesShape;
    const float *residuals = reinterpret_cast<float *>(words + L::RESIDUALS);
    ChunkPart<L::ROWS, 4> part;
    if (p.side[0].rotation)
        part.turn(reinterpret_cast<float *>(words + L::KEY_ROTATION), residuals);
    else
        part.copy(residuals);
    meet_side(0); /* turned rows take the rotation's place */
    part.keep(words + L::TURNED_KEYS);
    __syncwarp();
}

/* Brings rows of tokens to the overlay and to this lane; returns their tile. Keys are turned while values are quantised. */
DEVICE uint8_t *take_tokens(const AppendParams &p, const LaneRow &w, ChunkTracked<LanesShape::ROWS> &tracked, int head, int token,
                            const RowPlace &at, uint32_t *words) {
    using L = LanesShape;
    const int side = threadIdx.x / 32 / L::SIDE_WARPS, pair = threadIdx.x / 32 % L::SIDE_WARPS;
    ChunkInput<L::ROWS> input;
    input.load(p, p.side[1].in, head, token);
    const int slot = slot_of(p, at);
    uint8_t *tile = tile_of(p, at, head);
    turn_values(p, head, token, input, tracked, at.position, words);
    if (side == 0) turn_keys(p, words);
    uint32_t *turned = words + (side ? L::TURNED_VALUES : L::TURNED_KEYS) + pair * L::X;
    store_turned(p, turned, 0, 32, overlay_address(p, p.side[side], at, slot, head), token + 32 * pair);
    __syncwarp();
    take_row<true>(w, side, turned);
    return tile;
}

/* Brings rows of the overlay to this lane, and the metric if it is the first time; returns their tile. */
DEVICE uint8_t *take_settled(const AppendParams &p, const LaneRow &w, int head, const RowPlace &at, bool first, uint32_t *words,
                             uint32_t *rows) {
    const int side = threadIdx.x / 32 / LanesShape::SIDE_WARPS;
    const AppendSide &from = p.side[side];
    ask_for_rows(at.valid ? overlay_of<128>(p, from, at, slot_of(p, at), head) : nullptr, from.overlay, rows);
    uint8_t *tile = tile_of(p, at, head);
    if (first) {
        ask_for_metric(p, head, words, threadIdx.x, blockDim.x); /* which is needed later, behind the first rows */
        asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
    __syncwarp();
    take_row<false>(w, side, rows);
    return tile;
}

/* What a pair of warps has for error feedback. */
DEVICE FeedbackRows feedback_of(uint32_t *own, int pair) {
    using L = LanesShape;
    FeedbackRows feedback;
    feedback.x = own + L::KEYS;
    feedback.c = reinterpret_cast<uint8_t *>(own + L::CODES);
    feedback.e = reinterpret_cast<uint8_t *>(own + L::ERRORS);
    feedback.halves = reinterpret_cast<uint8_t *>(own + L::HALVES);
    feedback.hand = reinterpret_cast<float *>(own + L::HAND);
    feedback.pair = pair;
    return feedback;
}

/* TOKENS: rows of tokens, stored in the overlay too; otherwise rows of the overlay that are to be settled. */
template <bool TOKENS>
__global__ void __launch_bounds__(64 * LanesShape::SIDE_WARPS, 1) code_lanes_kernel(const __grid_constant__ AppendParams p) {
    using L = LanesShape;
    extern __shared__ __align__(16) uint32_t words[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, side = warp / L::SIDE_WARPS, pair = warp % L::SIDE_WARPS;
    const int head = blockIdx.x % p.n_kv_heads, row = 32 * pair + lane;
    const AppendSide &from = p.side[side];
    const float *metric = reinterpret_cast<float *>(words + L::METRIC);
    uint32_t *own = words + L::PAIRS + pair * L::PAIR;
    const LaneRow w = {(side ? words + L::VALUES + pair * L::X : own + L::KEYS) + lane};
    SortedRow sorted;
    sorted.words = (TOKENS && side ? words + L::TURNED_VALUES + pair * L::X : own + L::sorted(side)) + lane;
    sorted.sums = reinterpret_cast<float *>(TOKENS && side ? words + L::VALUE_SUMS + pair * L::SUMS : own + L::sums(side)) + lane;
    const FeedbackRows feedback = feedback_of(own, pair);
    ChunkTracked<L::ROWS> tracked;
    if (TOKENS) ask_for_rotations(p, head, words);
    if (TOKENS && p.n_tracked > 0) tracked.prepare(p, head, 0);
    let_next_kernel_start();
    wait_for_kernel_before();
    bool first = true;
#pragma unroll 1
    for (int group = blockIdx.x / p.n_kv_heads;; group += from.n_ctas) {
        RowPlace at;
        uint8_t *tile;
        if constexpr (TOKENS) {
            if (group * L::ROWS >= p.n_tokens) return;
            if (!first) {
                __syncthreads(); /* all have their codes */
                ask_for_rotations(p, head, words);
                if (p.n_tracked > 0) tracked.prepare(p, head, 0);
            }
            at = place_of_token(p, group * L::ROWS + row);
            tile = take_tokens(p, w, tracked, head, group * L::ROWS, at, words);
        } else {
            if (group * L::ROWS >= place_to_settle(p, group * L::ROWS + row, &at)) return;
            tile = take_settled(p, w, head, at, first, words, own + L::staged(side));
        }
        __syncwarp(); /* sorted rows take the place of rows as they came */
        sorted.sort(w.x_);
        const LeastSquares found = sorted_least_squares(sorted, w.x_, levels_of(from.bits));
        if (TOKENS && side == 1) { /* the metric takes the place of values in order */
            meet_side(1);
            ask_for_metric(p, head, words, threadIdx.x - 32 * L::SIDE_WARPS, 32 * L::SIDE_WARPS);
        }
        if (TOKENS || first) {
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
