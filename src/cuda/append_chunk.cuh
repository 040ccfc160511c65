/*
 * append_chunk.cuh - rows of many tokens into the overlay, without codes: head_dim 128.
 *
 * A CTA takes one side of one KV head, 64 tokens at a time. A thread has eight channels of four rows, so that reading the
 * rows and the rotation from shared memory takes no longer than the products. The next 64 tokens' rows are on their way
 * to registers meanwhile. Sums are those of the CPU, in its order.
 */
#ifndef OSCAR_CUDA_APPEND_CHUNK_CUH
#define OSCAR_CUDA_APPEND_CHUNK_CUH

#include "append_input.cuh"
#include "append_rows.cuh"

struct ChunkShape {
    static constexpr int D = 128, THREADS = 256, ROWS = 64, PITCH = ROWS + 4;
    static constexpr int OUT_PITCH = D / 2 + 4;  /* words of a turned row in bf16: in the residuals' place */
    static constexpr int PAIRS = THREADS / ROWS; /* of tracked channels that threads of a row have at once */
    static constexpr int FLOATS = D * D + D * PITCH;
};

/* Input of tokens first .. that a thread has: channel threadIdx % 128 of rows 8 k + 4 (threadIdx / 128) + 0 .. 3. */
struct ChunkInput {
    uint32_t v[32];

    DEVICE void load(const AppendParams &p, const void *in, int head, int first) {
        size_t at[32];
#pragma unroll
        for (int k = 0; k < 32; k++) {
            const int row = 8 * (k / 4) + 4 * (threadIdx.x / ChunkShape::D) + k % 4;
            at[k] = (static_cast<size_t>(min(first + row, p.n_tokens - 1)) * p.n_kv_heads + head) * ChunkShape::D +
                    threadIdx.x % ChunkShape::D;
        }
        load_inputs<32>(in, at, p.dtype, v);
    }
    /* Without the mean, transposed: [D][PITCH]. */
    DEVICE void store(const AppendParams &p, const float *mean, int head, int first, float *out) const {
        const int j = threadIdx.x % ChunkShape::D, row0 = 4 * (threadIdx.x / ChunkShape::D);
        const float off = mean ? __ldg(mean + head * ChunkShape::D + j) : 0.0f;
#pragma unroll
        for (int k = 0; k < 32; k += 4) {
            float x[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                x[n] = input_value(v[k + n], p.dtype);
                if (mean) x[n] = x[n] - off;
                if (first + 2 * k + row0 + n >= p.n_tokens) x[n] = 0;
            }
            *reinterpret_cast<float4 *>(out + j * ChunkShape::PITCH + 2 * k + row0) = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
};

/* Takes the tracked means off residuals [D][PITCH] of tokens first .. : a thread has a row, and every fourth pair. */
DEVICE void take_tracked_means(const AppendParams &p, int head, int position, float *residuals) {
    constexpr int PAIRS = ChunkShape::PAIRS;
    const int row = threadIdx.x % ChunkShape::ROWS, lane = threadIdx.x & 31, start = position / 64 * 64;
    const bool one_page = __all_sync(FULL_WARP, start == __shfl_sync(FULL_WARP, start, 0));
#pragma unroll 1
    for (int i0 = threadIdx.x / ChunkShape::ROWS; i0 < p.n_tracked; i0 += 4 * PAIRS) {
        /* Four pairs at once. Where a warp's rows are of one page, four lanes turn it for all. */
        float a[4], b[4], sine[4], cosine[4];
        int2 dims[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int pair = head * p.n_tracked + min(i0 + k * PAIRS, p.n_tracked - 1);
            const int *table = reinterpret_cast<const int *>(p.bias_table) + pair * 128 + position % 64;
            a[k] = __int_as_float(load_int(table));
            b[k] = __int_as_float(load_int(table + 64));
            dims[k] = __ldg(p.bias_dims + pair);
        }
        const int n_turns = one_page ? 1 : 4;
#pragma unroll 1
        for (int turn = 0; turn < n_turns; turn++) {
            const int i = min(i0 + (one_page ? lane & 3 : turn) * PAIRS, p.n_tracked - 1);
            double s, c;
            sincos(static_cast<double>(start) * static_cast<double>(__ldg(p.bias_freq + head * p.n_tracked + i)), &s, &c);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float other_s = __shfl_sync(FULL_WARP, static_cast<float>(s), k);
                const float other_c = __shfl_sync(FULL_WARP, static_cast<float>(c), k);
                if (one_page || k == turn) {
                    sine[k] = one_page ? other_s : static_cast<float>(s);
                    cosine[k] = one_page ? other_c : static_cast<float>(c);
                }
            }
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (i0 + k * PAIRS >= p.n_tracked) continue;
            residuals[dims[k].x * ChunkShape::PITCH + row] -= a[k] * cosine[k] - b[k] * sine[k];
            residuals[dims[k].y * ChunkShape::PITCH + row] -= a[k] * sine[k] + b[k] * cosine[k];
        }
    }
}

/* What a thread multiplies for one channel of the input. */
struct ChunkOperands {
    float4 u0, u1, x;

    DEVICE void load(const float *u, const float *rows, int i) {
        u0 = load4(u + i * ChunkShape::D);
        u1 = load4(u + i * ChunkShape::D + 64);
        x = load4(rows + i * ChunkShape::PITCH);
    }
    DEVICE void multiply(float (&sum)[4][8]) const {
        const float of_row[4] = {x.x, x.y, x.z, x.w};
        const float v[8] = {u0.x, u0.y, u0.z, u0.w, u1.x, u1.y, u1.z, u1.w};
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int c = 0; c < 8; c++) sum[r][c] = fmaf(of_row[r], v[c], sum[r][c]);
    }
};

/* Thread (a, b) of 16 x 16 turns rows 4 a .. 4 a + 3 to channels 4 b .. 4 b + 3 and 64 + those. Operands are loaded while those
 * before are multiplied. */
DEVICE void turn_chunk(const float *rotation, const float *residuals, float (&sum)[4][8]) {
    const float *u = rotation + 4 * (threadIdx.x % 16), *rows = residuals + threadIdx.x / 16 * 4;
    ChunkOperands even, odd;
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 8; c++) sum[r][c] = 0;
    even.load(u, rows, 0);
#pragma unroll 2
    for (int i = 0; i < ChunkShape::D - 2; i += 2) {
        odd.load(u, rows, i + 1);
        even.multiply(sum);
        even.load(u, rows, i + 2);
        odd.multiply(sum);
    }
    odd.load(u, rows, ChunkShape::D - 1);
    even.multiply(sum);
    odd.multiply(sum);
}

/* Turned rows, of thread (a, b) as above, to [ROWS][OUT_PITCH] words. */
DEVICE void keep_turned(const float (&sum)[4][8], uint32_t *out) {
    const int row0 = threadIdx.x / 16 * 4, b = threadIdx.x % 16;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const float *v = &sum[k / 2][k % 2 * 4];
        *reinterpret_cast<uint2 *>(out + (row0 + k / 2) * ChunkShape::OUT_PITCH + k % 2 * 32 + 2 * b) =
            make_uint2(pack_bf162(v[0], v[1]), pack_bf162(v[2], v[3]));
    }
}

/* A warp stores its eight rows in the overlay, two at once. to: of row lane % 8, 0 for none; token: of the first. A row that
 * is not finite is reported and becomes zeros. */
DEVICE void store_turned(const AppendParams &p, const uint32_t *rows, unsigned long long to, int token) {
    const int lane = threadIdx.x & 31, upper = lane >> 4, k = lane & 15;
#pragma unroll
    for (int row = 0; row < 8; row += 2) {
        uint4 v = *reinterpret_cast<const uint4 *>(rows + (row + upper) * ChunkShape::OUT_PITCH + 4 * k);
        bool finite = true;
        for (uint32_t both : {v.x, v.y, v.z, v.w})
            finite = finite && (both & 0x7f80u) != 0x7f80u && (both & 0x7f800000u) != 0x7f800000u;
        const unsigned bad = ~__ballot_sync(FULL_WARP, finite) >> (16 * upper) & 0xffffu;
        uint4 *place = reinterpret_cast<uint4 *>(__shfl_sync(FULL_WARP, to, row + upper));
        if (bad) v = make_uint4(0, 0, 0, 0);
        if (bad && place && k == 0 && p.bad_token) atomicMin(p.bad_token, token + row + upper);
        if (place) place[k] = v;
    }
}

__global__ void __launch_bounds__(ChunkShape::THREADS, 2) append_chunk_kernel(const __grid_constant__ AppendParams p) {
    using C = ChunkShape;
    constexpr int OWN = C::ROWS / (C::THREADS / 32); /* rows of a warp */
    static_assert(OWN == 8, "store_turned()");
    extern __shared__ __align__(16) float shared[];
    const Part part(p);
    const AppendSide &from = p.side[part.side];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, b = threadIdx.x % 16, row0 = threadIdx.x / 16 * 4;
    float *rows = shared + C::D * C::D;
    uint32_t *turned = reinterpret_cast<uint32_t *>(rows);
    if (from.rotation) stage(shared, from.rotation + static_cast<size_t>(part.head) * C::D * C::D, C::D * C::D, C::THREADS);
    let_next_kernel_start();
    wait_for_kernel_before();
    /* Of the next tokens: inputs, places of the warp's rows (lane % 8), the position of this thread's row of tracked means. */
    ChunkInput input;
    RowPlace at;
    int position;
    auto ask = [&](int first) {
        input.load(p, from.in, part.head, first);
        at = place_of_token(p, first + OWN * warp + lane % OWN);
        position = load_int(p.positions + min(first + static_cast<int>(threadIdx.x) % C::ROWS, p.n_tokens - 1));
    };
    int token = part.group * C::ROWS;
    if (token >= p.n_tokens) return;
    ask(token);
#pragma unroll 1
    while (true) {
        input.store(p, from.mean, part.head, token, rows);
        __syncthreads();
        if (part.side == 0 && p.n_tracked > 0) take_tracked_means(p, part.head, position, rows);
        asm volatile("cp.async.wait_all;" ::: "memory");
        const int slot = slot_of(p, at);
        const unsigned long long to =
            reinterpret_cast<unsigned long long>(at.valid ? overlay_of<C::D>(p, from, at, slot, part.head) : nullptr);
        __syncthreads();
        const int next = token + from.n_ctas * C::ROWS;
        if (next < p.n_tokens) ask(next);
        float sum[4][8];
        if (from.rotation)
            turn_chunk(shared, rows, sum);
        else
#pragma unroll
            for (int k = 0; k < 32; k++) sum[k / 8][k % 8] = rows[(k % 8 / 4 * 64 + 4 * b + k % 4) * C::PITCH + row0 + k / 8];
        __syncthreads(); /* turned rows take the residuals' place */
        keep_turned(sum, turned);
        __syncwarp(); /* a warp's rows are its own */
        store_turned(p, turned + OWN * warp * C::OUT_PITCH, to, token + OWN * warp);
        token = next;
        if (token >= p.n_tokens) return;
        __syncthreads();
    }
}

#endif
