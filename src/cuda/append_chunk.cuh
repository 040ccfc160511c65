/*
 * append_chunk.cuh - rows of many tokens: without their means, turned, to the overlay. head_dim 128.
 *
 * 64 or 128 rows of one side of a head are turned together. A thread has eight or sixteen channels of four or eight rows, so
 * that reading rows and rotation from shared memory takes no longer than the products. Sums are those of the CPU, in its order.
 *
 * The kernel here stores rows alone; append_lanes.cuh makes codes of rows that it turns with the same functions.
 */
#ifndef OSCAR_CUDA_APPEND_CHUNK_CUH
#define OSCAR_CUDA_APPEND_CHUNK_CUH

#include "append_input.cuh"
#include "append_rows.cuh"

template <int ROWS_> struct ChunkShape {
    static constexpr int D = 128, THREADS = 256, ROWS = ROWS_, PITCH = ROWS + 4;
    static constexpr int FOURS = ROWS / 64;     /* groups of four rows that a thread turns */
    static constexpr int PAIR_ROWS = ROWS / 4;  /* rows that warps w and w + 4 turn, or w alone */
    static constexpr int INPUTS = ROWS / 16;    /* times eight channels that a thread loads */
    static constexpr int RESIDUALS = D * PITCH; /* floats */
    static constexpr int TURNED = ROWS * D / 2; /* words */
};

/* Input of tokens first ..: channels 16 w + 8 (lane % 2) .. of rows lane / 2 + 16 k. Rows of tokens that do not exist are the
 * last one's. */
template <int ROWS> struct ChunkInput {
    using C = ChunkShape<ROWS>;
    uint4 v[C::INPUTS]; /* of 16-bit numbers; others are loaded when they are stored, for want of registers */

    DEVICE static size_t at(const AppendParams &p, int head, int first, int k) {
        const int row = static_cast<int>(threadIdx.x) % 32 / 2 + 16 * k;
        return (static_cast<size_t>(min(first + row, p.n_tokens - 1)) * p.n_kv_heads + head) * C::D + threadIdx.x / 32 * 16;
    }
    DEVICE void load(const AppendParams &p, const void *in, int head, int first) {
#pragma unroll
        for (int k = 0; k < C::INPUTS; k++)
            v[k] = p.dtype == OSCAR_DTYPE_F32
                       ? make_uint4(0, 0, 0, 0)
                       : load_uint4(static_cast<const uint16_t *>(in) + at(p, head, first, k) + threadIdx.x % 2 * 8);
    }
    /* Without the mean, transposed: [D][PITCH]. Every other lane begins with its upper four channels, so that no bank is asked
     * twice. */
    DEVICE void store(const AppendParams &p, const AppendSide &from, int head, int first, float *out) const {
        const bool swap = threadIdx.x % 2;
        const int row = threadIdx.x % 32 / 2, low = threadIdx.x / 32 * 16 + (swap ? 12 : 0), high = low + (swap ? -4 : 4);
        float off[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (from.mean) {
#pragma unroll
            for (int n = 0; n < 8; n++) off[n] = __ldg(from.mean + head * C::D + (n < 4 ? low + n : high + n - 4));
        }
        auto put = [&](int k, int n, float x) {
            out[(n < 4 ? low + n : high + n - 4) * C::PITCH + row + 16 * k] = x - off[n];
        };
        auto put_halves = [&](auto value) {
#pragma unroll
            for (int k = 0; k < C::INPUTS; k++) {
                const uint32_t words[4] = {swap ? v[k].z : v[k].x, swap ? v[k].w : v[k].y, swap ? v[k].x : v[k].z,
                                           swap ? v[k].y : v[k].w};
#pragma unroll
                for (int n = 0; n < 8; n++) put(k, n, value(words[n / 2], n % 2));
            }
        };
        if (p.dtype == OSCAR_DTYPE_BF16) {
            put_halves([](uint32_t both, bool upper) { return upper ? bf16_high(both) : bf16_low(both); });
        } else if (p.dtype == OSCAR_DTYPE_F16) {
            put_halves([](uint32_t both, bool upper) {
                return upper ? __high2float(bits_half2(both)) : __low2float(bits_half2(both));
            });
        } else {
#pragma unroll 4
            for (int k = 0; k < C::INPUTS; k++) {
                const float *x = static_cast<const float *>(from.in) + at(p, head, first, k) - threadIdx.x / 32 * 16;
                const uint4 a = load_uint4(x + low), b = load_uint4(x + high);
                const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
                for (int n = 0; n < 8; n++) put(k, n, __uint_as_float(words[n]));
            }
        }
    }
};

/* Tracked means of row threadIdx % ROWS: of sixteen pairs, every PAIRS-th of them. */
template <int ROWS> struct ChunkTracked {
    using C = ChunkShape<ROWS>;
    static constexpr int PAIRS = C::THREADS / ROWS, N = 16 / PAIRS;
    float a[N], b[N];         /* R_i nu of the row */
    float sine, cosine, freq; /* of the (lane % N)-th pair */
    int dims[N];              /* both channels */

    DEVICE static int pair_of(const AppendParams &p, int head, int first, int k) {
        return head * p.n_tracked + min(first + static_cast<int>(threadIdx.x) / ROWS + k * PAIRS, p.n_tracked - 1);
    }
    /* What the layer knows of pairs first .. first + 15. */
    DEVICE void prepare(const AppendParams &p, int head, int first) {
#pragma unroll
        for (int k = 0; k < N; k++) {
            const int2 both = __ldg(p.bias_dims + pair_of(p, head, first, k));
            dims[k] = both.x | both.y << 16;
        }
        freq = __ldg(p.bias_freq + pair_of(p, head, first, threadIdx.x % N));
    }
    DEVICE void ask(const AppendParams &p, int head, int position, int first) {
#pragma unroll
        for (int k = 0; k < N; k++) {
            const int *table = reinterpret_cast<const int *>(p.bias_table) + pair_of(p, head, first, k) * 128 + position % 64;
            a[k] = __int_as_float(load_int(table));
            b[k] = __int_as_float(load_int(table + 64));
        }
    }
    DEVICE static void turn(int position, float freq_of, float *s, float *c) {
        double sine_of, cosine_of;
        sincos(static_cast<double>(position / 64 * 64) * static_cast<double>(freq_of), &sine_of, &cosine_of);
        *s = static_cast<float>(sine_of);
        *c = static_cast<float>(cosine_of);
    }
    /* The angle of the page's start, of the lane's pair. */
    DEVICE void turn(int position) { turn(position, freq, &sine, &cosine); }

    /* Takes these pairs' means off residuals [D][PITCH]. Where a warp's rows are of one page, a lane has turned a pair for
     * all. */
    DEVICE void take(const AppendParams &p, int position, int first, float *residuals) const {
        const int start = position / 64 * 64;
        const bool one_page = __all_sync(FULL_WARP, start == __shfl_sync(FULL_WARP, start, 0));
        const int n_turns = one_page ? 1 : N, i0 = first + static_cast<int>(threadIdx.x) / ROWS;
        float *rows = residuals + threadIdx.x % ROWS;
#pragma unroll 1
        for (int t = 0; t < n_turns; t++) {
            float own_sine = sine, own_cosine = cosine;
            if (!one_page) turn(position, __shfl_sync(FULL_WARP, freq, t), &own_sine, &own_cosine);
#pragma unroll
            for (int k = 0; k < N; k++) {
                const float other_sine = __shfl_sync(FULL_WARP, own_sine, k), other_cosine = __shfl_sync(FULL_WARP, own_cosine, k);
                const float s = one_page ? other_sine : own_sine, c = one_page ? other_cosine : own_cosine;
                if ((!one_page && k != t) || i0 + k * PAIRS >= p.n_tracked) continue;
                rows[(dims[k] & 0xffff) * C::PITCH] -= a[k] * c - b[k] * s;
                rows[(dims[k] >> 16) * C::PITCH] -= a[k] * s + b[k] * c;
            }
        }
    }
    /* All pairs', of which the first sixteen are prepared, asked for and turned. */
    DEVICE void take_all(const AppendParams &p, int head, int position, float *residuals) {
        take(p, position, 0, residuals);
#pragma unroll 1
        for (int first = 16; first < p.n_tracked; first += 16) {
            prepare(p, head, first);
            ask(p, head, position, first);
            turn(position);
            take(p, position, first, residuals);
        }
    }
};

/* --- turning ------------------------------------------------------------------------------------- */

/* What a thread has of turned rows: rows PAIR_ROWS (w % 4) + 16 f + 4 (lane / 8) + 0 .. 3 at [4 f ..], channels
 * 32 n + 4 (lane % 8) + 0 .. 3 at [][4 n ..], of all when four warps turn, of the lower or upper 64 when eight do. */
template <int ROWS, int WARPS> struct ChunkPart {
    using C = ChunkShape<ROWS>;
    static constexpr int N_ROWS = 4 * C::FOURS, N_CHANNELS = 64 / WARPS;
    float sum[N_ROWS][N_CHANNELS];

    DEVICE static int row() { return C::PAIR_ROWS * (threadIdx.x / 32 % 4) + threadIdx.x % 32 / 8 * 4; }
    DEVICE static int channel() { return threadIdx.x / 128 * 64 + threadIdx.x % 8 * 4; }
    DEVICE void turn(const float *rotation, const float *residuals);
    DEVICE void copy(const float *residuals);
    DEVICE void keep(uint32_t *out) const;
};

/* What a thread multiplies for one channel of the input. */
template <class Part> struct ChunkOperands {
    float4 u[Part::N_CHANNELS / 4], x[Part::N_ROWS / 4];

    DEVICE void load(const float *rotation, const float *rows, int i) {
#pragma unroll
        for (int n = 0; n < Part::N_CHANNELS / 4; n++) u[n] = load4(rotation + i * Part::C::D + 32 * n);
#pragma unroll
        for (int f = 0; f < Part::N_ROWS / 4; f++) x[f] = load4(rows + i * Part::C::PITCH + 16 * f);
    }
    DEVICE void multiply(float (&sum)[Part::N_ROWS][Part::N_CHANNELS]) const {
#pragma unroll
        for (int f = 0; f < Part::N_ROWS / 4; f++) {
            const float of_row[4] = {x[f].x, x[f].y, x[f].z, x[f].w};
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int n = 0; n < Part::N_CHANNELS / 4; n++) {
                    const float v[4] = {u[n].x, u[n].y, u[n].z, u[n].w};
#pragma unroll
                    for (int c = 0; c < 4; c++) sum[4 * f + r][4 * n + c] = fmaf(of_row[r], v[c], sum[4 * f + r][4 * n + c]);
                }
        }
    }
};

/* Operands are loaded while those before are multiplied. rotation: [D][D], residuals: [D][PITCH]. */
template <int ROWS, int WARPS> DEVICE void ChunkPart<ROWS, WARPS>::turn(const float *rotation, const float *residuals) {
    const float *u = rotation + channel(), *rows = residuals + row();
    ChunkOperands<ChunkPart> even, odd;
#pragma unroll
    for (int k = 0; k < N_ROWS * N_CHANNELS; k++) sum[k / N_CHANNELS][k % N_CHANNELS] = 0;
    even.load(u, rows, 0);
#pragma unroll 2
    for (int i = 0; i < C::D - 2; i += 2) {
        odd.load(u, rows, i + 1);
        even.multiply(sum);
        even.load(u, rows, i + 2);
        odd.multiply(sum);
    }
    odd.load(u, rows, C::D - 1);
    even.multiply(sum);
    odd.multiply(sum);
}

/* Where there is no rotation. */
template <int ROWS, int WARPS> DEVICE void ChunkPart<ROWS, WARPS>::copy(const float *residuals) {
#pragma unroll
    for (int r = 0; r < N_ROWS; r++)
#pragma unroll
        for (int c = 0; c < N_CHANNELS; c++)
            sum[r][c] = residuals[(channel() + c / 4 * 32 + c % 4) * C::PITCH + row() + r / 4 * 16 + r % 4];
}

/* To [ROWS][64] words of bf16: 16 bytes k of row r at k ^ (r & 7), so that no bank is asked twice. */
template <int ROWS, int WARPS> DEVICE void ChunkPart<ROWS, WARPS>::keep(uint32_t *out) const {
#pragma unroll
    for (int n = 0; n < N_ROWS; n++)
#pragma unroll
        for (int c = 0; c < N_CHANNELS; c += 4) {
            const int r = row() + n / 4 * 16 + n % 4, word = channel() / 2 + c * 4;
            *reinterpret_cast<uint2 *>(out + 64 * r + 4 * (word / 4 ^ (r & 7)) + word % 4) =
                make_uint2(pack_bf162(sum[n][c], sum[n][c + 1]), pack_bf162(sum[n][c + 2], sum[n][c + 3]));
        }
}

/* A warp stores n rows from the first-th on in the overlay, two at once. rows: of a warp or of two, as keep() leaves them; to:
 * the place of row `lane`, 0 for none; token: of row 0. A row that is not finite is reported and becomes zeros, in `rows` too. */
DEVICE void store_turned(const AppendParams &p, uint32_t *rows, int first, int n, unsigned long long to, int token) {
    const int upper = threadIdx.x / 16 % 2, k = threadIdx.x % 16;
#pragma unroll 2
    for (int i = 0; i < n; i += 2) {
        const int row = first + i + upper;
        uint4 *here = reinterpret_cast<uint4 *>(rows + 64 * row + 4 * (k ^ (row & 7)));
        uint4 v = *here;
        uint32_t none = 0; /* but for signs, if all are finite */
        for (uint32_t both : {v.x, v.y, v.z, v.w}) none = fma_bf162(both, 0, none);
        const unsigned bad = __ballot_sync(FULL_WARP, none & 0x7fff7fffu) >> (16 * upper) & 0xffffu;
        uint4 *place = reinterpret_cast<uint4 *>(__shfl_sync(FULL_WARP, to, row));
        if (bad) *here = v = make_uint4(0, 0, 0, 0);
        if (bad && place && k == 0 && p.bad_token) atomicMin(p.bad_token, token + row);
        if (place) place[k] = v;
    }
}

/* The place of the lane's row in the overlay. */
DEVICE unsigned long long overlay_address(const AppendParams &p, const AppendSide &from, const RowPlace &at, int slot, int head) {
    return reinterpret_cast<unsigned long long>(at.valid ? overlay_of<128>(p, from, at, slot, head) : nullptr);
}

/* --- rows alone ---------------------------------------------------------------------------------- */

/* A CTA has one side of a head, 64 tokens at a time: two of them on a multiprocessor, so that one loads while the other turns. */
__global__ void __launch_bounds__(256, 2) append_chunk_kernel(const __grid_constant__ AppendParams p) {
    constexpr int ROWS = 64, STORED = ROWS / 8; /* STORED: rows that a warp stores */
    using C = ChunkShape<ROWS>;
    extern __shared__ __align__(16) float shared[];
    const Part part(p);
    const AppendSide &from = p.side[part.side];
    const int pair_row = threadIdx.x / 32 % 4 * C::PAIR_ROWS;
    float *rows = shared + C::D * C::D;
    uint32_t *turned = reinterpret_cast<uint32_t *>(rows); /* in the residuals' place */
    ChunkTracked<ROWS> tracked;
    const bool biased = part.side == 0 && p.n_tracked > 0;
    if (biased) tracked.prepare(p, part.head, 0);
    const float *rotation = from.rotation + static_cast<size_t>(part.head) * C::D * C::D;
    if (from.rotation) stage(shared, rotation, C::D * C::D, threadIdx.x, C::THREADS);
    let_next_kernel_start();
    wait_for_kernel_before();
    /* Of the next tokens: inputs, places of the warp's rows, the position of this thread's row of tracked means. */
    ChunkInput<ROWS> input;
    RowPlace at;
    int position;
    auto ask = [&](int first) {
        input.load(p, from.in, part.head, first);
        at = place_of_token(p, first + pair_row + static_cast<int>(threadIdx.x) % C::PAIR_ROWS);
        position = load_int(p.positions + min(first + static_cast<int>(threadIdx.x) % C::ROWS, p.n_tokens - 1));
    };
    int token = part.group * C::ROWS;
    if (token >= p.n_tokens) return;
    ask(token);
    if (biased) tracked.ask(p, part.head, position, 0);
#pragma unroll 1
    while (true) {
        input.store(p, from, part.head, token, rows);
        if (biased) tracked.turn(position);
        __syncthreads();
        if (biased) tracked.take_all(p, part.head, position, rows);
        asm volatile("cp.async.wait_all;" ::: "memory");
        const unsigned long long to = overlay_address(p, from, at, slot_of(p, at), part.head);
        __syncthreads();
        const int next = token + from.n_ctas * C::ROWS;
        if (next < p.n_tokens) ask(next);
        if (biased) tracked.prepare(p, part.head, 0);
        ChunkPart<ROWS, 8> part_of;
        if (from.rotation)
            part_of.turn(shared, rows);
        else
            part_of.copy(rows);
        if (biased && next < p.n_tokens) tracked.ask(p, part.head, position, 0);
        __syncthreads(); /* turned rows take the residuals' place */
        part_of.keep(turned);
        __syncthreads();
        store_turned(p, turned + 64 * pair_row, threadIdx.x / 128 * STORED, STORED, to, token + pair_row);
        token = next;
        if (token >= p.n_tokens) return;
        __syncthreads();
    }
}

#endif
