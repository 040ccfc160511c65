/*
 * decode_rows.cuh - query rows of one KV head against a tile of quantised tokens or a unit of BF16
 * tokens, on one warp.
 *
 * Codes are the A operand of mma.m16n8k16 (tokens for keys, channels for values), queries and
 * probabilities the B operand. A code at bit 2 i of a 16-bit half, read as fp16, is the subnormal
 * c 4^i 2^-24: keys pay for 4^i in the query (scaled by 4^-i, exact), values at the end. Steps and
 * offsets stay outside: logit = s (q.c) + m sum(q); output = sum (p s) c + sum p m.
 *
 * Rows and columns. Column n of an MMA is a row of the query block. A full column tile j holds rows
 * 8 j + (n >> 1) + 4 (n & 1), so that lane t of a quad owns rows t, 4 + t, 8 + t, ...: one score
 * column i is row 4 i + t. When the rows are an odd number of fours the last column tile is half:
 * row 8 j + (n >> 1) for even and odd n; keys put the query's low half there (the sum of both
 * columns has 22 bits), values half of the tokens.
 */
#ifndef OSCAR_CUDA_DECODE_ROWS_CUH
#define OSCAR_CUDA_DECODE_ROWS_CUH

#include "decode_work.cuh"
#include "layout.h"

/* What a kernel can do beyond the plain product: the key bias of tracked means; that and a soft cap. */
enum Mode { MODE_PLAIN = 0, MODE_BIAS = 1, MODE_BIAS_CAP = 2 };

template <int D_, int ROWS_, int WARPS_, int STAGES_> struct Config {
    static constexpr int D = D_, ROWS = ROWS_, WARPS = WARPS_, STAGES = STAGES_;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int W = D / 64;     /* code words */
    static constexpr int G = D > 128 ? D / 128 : 1; /* groups */
    static constexpr int WORDS_A_GROUP = W / G;
    static constexpr int STEPS = D / 16; /* MMA steps over the channels */
    static constexpr int COLUMNS = (ROWS + 3) / 4; /* score columns of a lane */
    static constexpr int FULL = COLUMNS / 2;
    static constexpr int TILES = FULL + (COLUMNS & 1); /* column tiles */
    static constexpr int UNIT = 16 * D; /* bytes of 8 bf16 rows of one side */
    static constexpr int LOW_TILE = 32 * D + 512 * G;
    static constexpr int STAGE = LOW_TILE;
    static constexpr bool BULK = WARPS * STAGES * STAGE > 100000; /* made for devices with bulk copies */
    static constexpr int SIDE_BY_SIDE = TILES * G > 1 || WARPS > 12 ? 2 : 4; /* sub-tiles whose products interleave */
    static constexpr int QUERY_STRIDE = D + 4; /* floats; the padding spreads rows over the banks */
};

#define MASKED -3.0e38f
#define NO_MAXIMUM -1.0e30f
#define CODE_UNIT 5.9604644775390625e-08f /* 2^-24 */
/* The running maximum is raised when a score exceeds it by more than this (log2): p stays <= 32, so
 * that p times a step below 2047 is an fp16 number. */
#define RAISE_ABOVE 5.0f

template <class C> struct Rows {
    uint32_t q[C::TILES][C::STEPS / 2][4]; /* B operands of two steps each */
    float scale[C::COLUMNS];         /* raw scores to log2 */
    float q_sum[C::COLUMNS][C::G];   /* sum of the query's channels, raw */
    float q_const[C::COLUMNS];       /* q . mean, raw */
    float row_max[C::COLUMNS];       /* raw */
    float row_sum[C::COLUMNS];       /* this lane's tokens only */
    float offset_sum[C::COLUMNS][C::G]; /* sum of p m, this lane's tokens only */
    float acc[C::TILES][C::STEPS][4];
};

/* The part of shared memory that lives as long as a segment. */
template <class C> struct SegmentData {
    uint32_t *fragments; /* [TILES, STEPS / 2, 32, 4] rotated queries as B operands */
    float *query;       /* [ROWS, QUERY_STRIDE] rotated, times the row's scale */
    float *query_scale; /* [ROWS] a power of two */
    float *query_mean;  /* [ROWS] q . mean */
    uint4 *bias_table;  /* [steps, 2, 4, 32] */
    float4 *bias_query; /* [steps, TILES, 32] the two pairs of a lane, times the row's scale */
    float4 *bias_nu;    /* [steps, 4] */
    unsigned long long *bias_turn; /* [8 steps] */
    float4 *bias_phase;            /* [WARPS, 4 steps] */
};

template <class C> __host__ __device__ constexpr int bias_step_bytes() {
    return 4096 + C::TILES * 512 + 64 + 64 + C::WARPS * 64;
}

template <class C> DEVICE SegmentData<C> segment_data(uint8_t *area, int steps) {
    SegmentData<C> s;
    s.bias_table = reinterpret_cast<uint4 *>(area);
    s.bias_query = reinterpret_cast<float4 *>(s.bias_table + steps * 256);
    s.bias_nu = s.bias_query + steps * C::TILES * 32;
    s.bias_turn = reinterpret_cast<unsigned long long *>(s.bias_nu + steps * 4);
    s.bias_phase = reinterpret_cast<float4 *>(s.bias_turn + steps * 8);
    s.fragments = reinterpret_cast<uint32_t *>(s.bias_phase + C::WARPS * steps * 4);
    s.query = reinterpret_cast<float *>(s.fragments + C::TILES * C::STEPS * 64);
    s.query_scale = s.query + C::ROWS * C::QUERY_STRIDE;
    s.query_mean = s.query_scale + 16;
    return s;
}

/* Row of column n = g of column tile j; the odd columns of a half tile repeat the even ones. */
template <class C> DEVICE int column_row(int j, int g) {
    return 8 * j + (g >> 1) + (j < C::FULL ? 4 * (g & 1) : 0);
}

/* Writes two channels of a rotated query row, 16 m + g and 16 m + 8 + g, to the fragments: they are
 * the two halves of one register of lane (column, t), see layout.h. */
template <class C>
DEVICE void put_query(uint32_t *fragments, int m, int g, int row, float lower, float upper) {
    constexpr int A_GROUP = C::WORDS_A_GROUP;
    const int w = m / 8 * A_GROUP + m % 8 % A_GROUP, t = m % 8 / A_GROUP;
    const int reg = 2 * (4 * w + (g & 3)) + (g >> 2), j = row >> 3, r = row & 7;
    const bool half = j >= C::FULL;
    const int column = half ? 2 * r : 2 * (r & 3) + (r >> 2);
    const float down = __int_as_float((127 - 2 * (g & 3)) << 23);
    const __half2 high = __floats2half2_rn(lower * down, upper * down);
    uint32_t *to = fragments + ((j * (C::STEPS / 2) + reg / 4) * 32 + 4 * column + t) * 4 + reg % 4;
    *to = half2_bits(high);
    if (half) {
        const float2 f = __half22float2(high);
        to[16] = pack_half2(lower * down - f.x, upper * down - f.y);
    }
}

/* Takes the query fragments and all per-row constants; clears the accumulators. */
template <class C> DEVICE void start_rows(Rows<C> &r, const SegmentData<C> &s, float scale_log2,
                                          int lane) {
    const int t = lane & 3;
    const uint32_t fragments = shared_address(s.fragments) + 16 * lane;
#pragma unroll
    for (int j = 0; j < C::TILES; j++) {
#pragma unroll
        for (int v = 0; v < C::STEPS / 2; v++) load_shared(r.q[j][v], fragments + (j * (C::STEPS / 2) + v) * 512);
        /* Sums of what is in the fragments: a product with 4^i in place of the codes. */
#pragma unroll
        for (int k = 0; k < C::G; k++) {
            float sum[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll
            for (int m = 0; m < 4 * C::WORDS_A_GROUP; m++) {
                const uint32_t one = pack_half2(1 << (2 * (m & 3)), 1 << (2 * (m & 3)));
                const int step = 4 * C::WORDS_A_GROUP * k + m;
                mma_f16(sum[m & 1], one, one, one, one, r.q[j][step / 2][2 * (step & 1)],
                        r.q[j][step / 2][2 * (step & 1) + 1]);
            }
            const float s0 = (sum[0][0] + sum[1][0]) * CODE_UNIT, s1 = (sum[0][1] + sum[1][1]) * CODE_UNIT;
            r.q_sum[2 * j][k] = j < C::FULL ? s0 : s0 + s1;
            if (j < C::FULL) r.q_sum[(2 * j + 1) % C::COLUMNS][k] = s1;
        }
    }
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
        const float up = s.query_scale[4 * i + t];
        r.scale[i] = __fdividef(scale_log2, up * CODE_UNIT); /* by a power of two: exact */
        r.q_const[i] = s.query_mean[4 * i + t] * up * CODE_UNIT;
        r.row_max[i] = NO_MAXIMUM;
        r.row_sum[i] = 0;
#pragma unroll
        for (int k = 0; k < C::G; k++) r.offset_sum[i][k] = 0;
    }
#pragma unroll
    for (int j = 0; j < C::TILES; j++)
#pragma unroll
        for (int m = 0; m < C::STEPS; m++)
#pragma unroll
            for (int k = 0; k < 4; k++) r.acc[j][m][k] = 0;
}

/* --- the key bias of the tracked mean -------------------------------------------------------------
 * b(p0 + i) = Re(conj(Q e^{-i p0 f}) nu e^{i i f}) summed over pairs. The query is turned to the page
 * (the angle from a 64-bit fixed-point product: exact at any position), the part that is constant
 * over the page is summed in fp32, the rest is a product with the table (R_i - I) nu, high and low
 * fp16 halves. Pairs are in order of falling frequency: for slow ones (the last steps) the table is
 * so small that the high halves alone are enough. */

template <class C> DEVICE void bias_phases(const SegmentData<C> &s, int steps, int page, int warp,
                                           int lane) {
    float2 *phase = reinterpret_cast<float2 *>(s.bias_phase + warp * steps * 4);
#pragma unroll 1
    for (int i = lane; i < 8 * steps; i += 32) {
        const unsigned long long turns = s.bias_turn[i] * static_cast<unsigned long long>(page);
        const float angle = static_cast<float>(static_cast<int>(turns >> 32)) * 1.4629180792671596e-9f;
        phase[i] = make_float2(__cosf(angle), __sinf(angle));
    }
    __syncwarp();
}

/* The two turned pairs of this lane's column as fp16 high and low halves; adds their constant part. */
template <class C> DEVICE void turned_query(const SegmentData<C> &s, int steps, int step, int j, int warp,
                                            int lane, uint32_t (&high)[2], uint32_t (&low)[2],
                                            float &constant) {
    const int t = lane & 3;
    const float4 q = s.bias_query[(step * C::TILES + j) * 32 + lane];
    const float4 e = s.bias_phase[(warp * steps + step) * 4 + t];
    const float4 nu = s.bias_nu[step * 4 + t];
    /* Q e^{-i angle} */
    const float a0 = q.x * e.x + q.y * e.y, a1 = q.y * e.x - q.x * e.y;
    const float b0 = q.z * e.z + q.w * e.w, b1 = q.w * e.z - q.z * e.w;
    constant += a0 * nu.x + a1 * nu.y + b0 * nu.z + b1 * nu.w;
    const __half2 a = __floats2half2_rn(a0, a1), b = __floats2half2_rn(b0, b1);
    const float2 fa = __half22float2(a), fb = __half22float2(b);
    high[0] = half2_bits(a);
    high[1] = half2_bits(b);
    low[0] = pack_half2(a0 - fa.x, a1 - fa.y);
    low[1] = pack_half2(b0 - fb.x, b1 - fb.y);
}

DEVICE void bias_product(float (&c)[4], const uint4 *table, int lane, bool half, bool split,
                         const uint32_t (&high)[2], const uint32_t (&low)[2]) {
    const uint4 a = table[lane];
    if (half) {
        const bool odd = lane & 4;
        mma_f16(c, a.x, a.y, a.z, a.w, odd ? low[0] : high[0], odd ? low[1] : high[1]);
    } else {
        mma_f16(c, a.x, a.y, a.z, a.w, high[0], high[1]);
        if (split) mma_f16(c, a.x, a.y, a.z, a.w, low[0], low[1]);
    }
    if (split) {
        const uint4 b = table[128 + lane];
        const uint32_t none = half && (lane & 4) ? 0u : FULL_WARP;
        mma_f16(c, b.x, b.y, b.z, b.w, high[0] & none, high[1] & none);
    }
}

/* constant: partial sums of this lane's column over its pairs -> values of its score columns, raw. */
template <class C> DEVICE void bias_constants(float (&constant)[C::TILES], float (&out)[C::COLUMNS],
                                              int lane) {
    const int t = lane & 3;
#pragma unroll
    for (int j = 0; j < C::TILES; j++) {
        constant[j] += __shfl_xor_sync(FULL_WARP, constant[j], 1);
        constant[j] += __shfl_xor_sync(FULL_WARP, constant[j], 2);
#pragma unroll
        for (int i = 2 * j; i < min(2 * j + 2, C::COLUMNS); i++)
            out[i] = __shfl_sync(FULL_WARP, constant[j], 4 * (2 * t + (i & 1))) * CODE_UNIT;
    }
}

/* Bias of the sub-tiles [first, first + N) of a page: scores' columns in MMA order, times 2^24. */
template <class C, int N>
DEVICE void bias_page(const SegmentData<C> &s, const DecodeParams &p, int page, int first, int warp,
                      int lane, float (&c)[N][C::TILES][4], float (&constant)[C::COLUMNS]) {
    bias_phases<C>(s, p.bias_steps, page, warp, lane);
    float partial[C::TILES];
#pragma unroll
    for (int j = 0; j < C::TILES; j++) {
        partial[j] = 0;
#pragma unroll
        for (int n = 0; n < N; n++) c[n][j][0] = c[n][j][1] = c[n][j][2] = c[n][j][3] = 0;
    }
#pragma unroll 1
    for (int step = 0; step < p.bias_steps; step++) {
        const bool split = step < p.bias_split_steps;
        const uint4 *table = s.bias_table + step * 256 + first * 32;
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
            uint32_t high[2], low[2];
            turned_query<C>(s, p.bias_steps, step, j, warp, lane, high, low, partial[j]);
#pragma unroll
            for (int n = 0; n < N; n++)
                bias_product(c[n][j], table + n * 32, lane, j >= C::FULL, split, high, low);
        }
    }
    bias_constants<C>(partial, constant, lane);
}

/* --- softmax ---------------------------------------------------------------------------------- */

/* Raises the running maxima where a score asks for it. score: [N] of this lane, any order. */
template <class C, int N> DEVICE void raise_maximum(Rows<C> &r, const float (&score)[N][C::COLUMNS]) {
    float top[C::COLUMNS];
    bool up = false;
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
        float part[4];
#pragma unroll
        for (int n = 0; n < 4; n++)
            part[n] = N == 8 ? fmaxf(score[n % N][i], score[(n + 4) % N][i]) : score[n % N][i];
        top[i] = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
        up |= (top[i] - r.row_max[i]) * r.scale[i] > RAISE_ABOVE;
    }
    if (!__any_sync(FULL_WARP, up)) return;
    float factor[C::COLUMNS];
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
        top[i] = fmaxf(top[i], r.row_max[i]);
#pragma unroll
        for (int d = 4; d < 32; d <<= 1)
            top[i] = fmaxf(top[i], __shfl_xor_sync(FULL_WARP, top[i], d));
        factor[i] = exp2_fast((r.row_max[i] - top[i]) * r.scale[i]);
        r.row_max[i] = top[i];
        r.row_sum[i] *= factor[i];
#pragma unroll
        for (int k = 0; k < C::G; k++) r.offset_sum[i][k] *= factor[i];
    }
#pragma unroll
    for (int j = 0; j < C::TILES; j++) {
        const float f0 = factor[2 * j], f1 = factor[j < C::FULL ? 2 * j + 1 : 2 * j];
#pragma unroll
        for (int m = 0; m < C::STEPS; m++) {
            r.acc[j][m][0] *= f0;
            r.acc[j][m][1] *= f1;
            r.acc[j][m][2] *= f0;
            r.acc[j][m][3] *= f1;
        }
    }
}

/* cap tanh(x / cap) on raw scores. */
DEVICE float soft_cap(float raw, float scale, float cap) {
    const float x = __fdividef(raw * scale, cap); /* both are in log2 units */
    const float e = exp2_fast(-2.8853900817779268f * fabsf(x)); /* e^{-2|x|} */
    const float y = __fdividef(1.0f - e, 1.0f + e);
    /* For small x the difference above has lost its bits. */
    const float small = x - x * x * x * (1.0f / 3.0f);
    return __fdividef((fabsf(x) < 0.02f ? small : copysignf(y, x)) * cap, scale);
}

/* --- a tile of 64 quantised tokens ------------------------------------------------------------- */

/* Codes i and i + 4 of two words. */
DEVICE void code_fragment(uint32_t (&a)[4], uint32_t x, uint32_t y, int i) {
    const uint32_t mask = 0x00030003u << (2 * i);
    a[0] = x & mask;
    a[1] = x >> 8 & mask;
    a[2] = y & mask;
    a[3] = y >> 8 & mask;
}

/* The 2 W words of this lane in a sub-tile. */
template <int W> DEVICE void load_words(const uint8_t *sub_tile, int lane, uint32_t (&w)[2 * W]) {
    if constexpr (W == 1) {
        const uint2 x = *reinterpret_cast<const uint2 *>(sub_tile + 8 * lane);
        w[0] = x.x;
        w[1] = x.y;
    } else {
#pragma unroll
        for (int c = 0; c < W / 2; c++) {
            const uint4 x = *reinterpret_cast<const uint4 *>(sub_tile + 512 * c + 16 * lane);
            w[4 * c] = x.x;
            w[4 * c + 1] = x.y;
            w[4 * c + 2] = x.z;
            w[4 * c + 3] = x.w;
        }
    }
}

/* q.c of N sub-tiles side by side, since the products of one are a chain. */
template <class C, int N>
DEVICE void code_products(const Rows<C> &r, const uint8_t *keys, int lane, float (&c)[N][C::G][C::TILES][4]) {
    uint32_t words[N][2 * C::W];
#pragma unroll
    for (int n = 0; n < N; n++) {
        load_words<C::W>(keys + n * 4 * C::D, lane, words[n]);
#pragma unroll
        for (int k = 0; k < C::G; k++)
#pragma unroll
            for (int j = 0; j < C::TILES; j++) c[n][k][j][0] = c[n][k][j][1] = c[n][k][j][2] = c[n][k][j][3] = 0;
    }
#pragma unroll
    for (int s = 0; s < C::STEPS; s++)
#pragma unroll
        for (int n = 0; n < N; n++) {
            uint32_t a[4];
            code_fragment(a, words[n][s / 4], words[n][C::W + s / 4], s & 3);
#pragma unroll
            for (int j = 0; j < C::TILES; j++) {
                const uint32_t *b = &r.q[j][s / 2][2 * (s & 1)];
                mma_f16(c[n][s / 4 / C::WORDS_A_GROUP][j], a[0], a[2], a[1], a[3], b[0], b[1]);
            }
        }
}

/* Scores of 16 tokens from their products. bias: [TILES][4] of this sub-tile, or what stands for
 * none. */
template <class C, bool BIAS>
DEVICE void score_sub_tile(const Rows<C> &r, const float (&c)[C::G][C::TILES][4], const uint8_t *params, int lane,
                           const float (&bias)[C::TILES][4], const float (&constant)[C::COLUMNS],
                           float (&score)[2][C::COLUMNS]) {
#pragma unroll
    for (int k = 0; k < C::G; k++) {
        const uint2 sm = *reinterpret_cast<const uint2 *>(params + 256 * k + 8 * (lane >> 2));
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float2 f = __half22float2(bits_half2(h ? sm.y : sm.x));
#pragma unroll
            for (int i = 0; i < C::COLUMNS; i++) {
                const int j = i >> 1;
                const float *x = &c[k][j][2 * h];
                const float dot = j < C::FULL ? x[i & 1] : x[0] + x[1];
                float start = score[h][i];
                if (k == 0) {
                    start = BIAS ? constant[i] : r.q_const[i];
                    if (BIAS) {
                        const float *y = &bias[j][2 * h];
                        start = fmaf(j < C::FULL ? y[i & 1] : y[0] + y[1], CODE_UNIT, start);
                    }
                }
                score[h][i] = fmaf(dot, f.x, fmaf(f.y, r.q_sum[i][k], start));
            }
        }
    }
}

/* Probabilities of 16 tokens to the B operand, their sums, and the product with the values. */
template <class C>
DEVICE void value_sub_tile(Rows<C> &r, const uint8_t *values, const uint8_t *params, int lane,
                           const float (&score)[2][C::COLUMNS], const float (&top)[C::COLUMNS],
                           uint32_t keep_low, uint32_t keep_high) {
    float prob[2][C::COLUMNS];
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < C::COLUMNS; i++) {
            prob[h][i] = exp2_fast(fmaf(score[h][i], r.scale[i], -top[i]));
            r.row_sum[i] += prob[h][i];
        }
    uint32_t b[C::G][C::TILES][2];
#pragma unroll
    for (int k = 0; k < C::G; k++) {
        uint2 sm = *reinterpret_cast<const uint2 *>(params + 256 * k + 8 * (lane >> 2));
        sm.x &= keep_low;
        sm.y &= keep_high;
        const float m0 = __high2float(bits_half2(sm.x)), m1 = __high2float(bits_half2(sm.y));
#pragma unroll
        for (int i = 0; i < C::COLUMNS; i++)
            r.offset_sum[i][k] = fmaf(prob[1][i], m1, fmaf(prob[0][i], m0, r.offset_sum[i][k]));
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
            if (j < C::FULL) {
                const int i0 = 2 * j, i1 = (2 * j + 1) % C::COLUMNS;
                b[k][j][0] = transpose8x8(half2_bits(
                    __hmul2(__floats2half2_rn(prob[0][i0], prob[0][i1]), __low2half2(bits_half2(sm.x)))));
                b[k][j][1] = transpose8x8(half2_bits(
                    __hmul2(__floats2half2_rn(prob[1][i0], prob[1][i1]), __low2half2(bits_half2(sm.y)))));
            } else {
                const __half2 s = bits_half2(__byte_perm(sm.x, sm.y, 0x5410));
                const uint32_t x = transpose8x8(
                    half2_bits(__hmul2(__floats2half2_rn(prob[0][2 * j], prob[1][2 * j]), s)));
                b[k][j][0] = lane & 4 ? 0u : x;
                b[k][j][1] = lane & 4 ? x : 0u;
            }
        }
    }
    uint32_t words[2 * C::W];
    load_words<C::W>(values, lane, words);
#pragma unroll
    for (int s = 0; s < C::STEPS; s++) {
        uint32_t a[4];
        code_fragment(a, words[s / 4], words[C::W + s / 4], s & 3);
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
            const int k = s / 4 / C::WORDS_A_GROUP;
            mma_f16(r.acc[j][s], a[0], a[1], a[2], a[3], b[k][j][0], b[k][j][1]);
        }
    }
}

/* Query token of score column i: the rows of a KV head are [token][query head]. */
template <class C> DEVICE int column_token(const DecodeParams &p, int first_row, int i, int lane) {
    return min(divide(first_row + 4 * i + (lane & 3), p.gqa, p.gqa_magic), p.n_q_tokens - 1);
}

template <class C, int MODE>
DEVICE void attend_tile(Rows<C> &r, uint8_t *area, const DecodeParams &p,
                        const Control &ctl, const uint8_t *tile, int page, bool masked) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float bias[4][C::TILES][4], constant[C::COLUMNS];
    if constexpr (MODE != MODE_PLAIN) {
        const SegmentData<C> s = segment_data<C>(area, p.bias_steps);
        bias_page<C, 4>(s, p, page, 0, warp, lane, bias, constant);
#pragma unroll
        for (int i = 0; i < C::COLUMNS; i++) constant[i] += r.q_const[i];
    }
    float score[8][C::COLUMNS];
    const uint8_t *params = tile + 32 * C::D;
#pragma unroll
    for (int first = 0; first < 4; first += C::SIDE_BY_SIDE) {
        float c[C::SIDE_BY_SIDE][C::G][C::TILES][4];
        code_products<C, C::SIDE_BY_SIDE>(r, tile + first * 4 * C::D, lane, c);
#pragma unroll
        for (int k = 0; k < C::SIDE_BY_SIDE; k++) {
            const int n = first + k;
            score_sub_tile<C, MODE != MODE_PLAIN>(r, c[k], params + 64 * n, lane, bias[n], constant,
                                                  *reinterpret_cast<float(*)[2][C::COLUMNS]>(&score[2 * n]));
        }
    }
    if constexpr (MODE == MODE_BIAS_CAP) {
        if (p.softcap_log2 > 0) {
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int i = 0; i < C::COLUMNS; i++)
                    score[n][i] = soft_cap(score[n][i], r.scale[i], p.softcap_log2);
        }
    }
    uint32_t keep = 0xff; /* bit n: token 8 n + g exists for some row */
    if (masked) {
        const int length = ctl.place.length, t_first = length - p.n_q_tokens, position = 64 * page + (lane >> 2);
        const int head = divide(ctl.place.part, p.row_tiles, p.row_tiles_magic);
        const int first_row = (ctl.place.part - head * p.row_tiles) * C::ROWS;
        const Span last = visible(p, ITEM_TILE, length - 1);
#pragma unroll
        for (int n = 0; n < 8; n++)
            if (position + 8 * n >= last.last) keep &= ~(1u << n);
#pragma unroll
        for (int i = 0; i < C::COLUMNS; i++) {
            const Span see = visible(p, ITEM_TILE, t_first + column_token<C>(p, first_row, i, lane));
#pragma unroll
            for (int n = 0; n < 8; n++)
                if (position + 8 * n < see.first || position + 8 * n >= see.last)
                    score[n][i] = MASKED;
        }
    }
    raise_maximum<C, 8>(r, score);
    float top[C::COLUMNS];
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) top[i] = r.row_max[i] * r.scale[i];
    params += 256 * C::G;
#pragma unroll
    for (int n = 0; n < 4; n++)
        value_sub_tile<C>(r, tile + 16 * C::D + n * 4 * C::D, params + 64 * n, lane,
                          *reinterpret_cast<float(*)[2][C::COLUMNS]>(&score[2 * n]), top,
                          keep & (1u << (2 * n)) ? FULL_WARP : 0u,
                          keep & (2u << (2 * n)) ? FULL_WARP : 0u);
}

/* --- a unit of 8 BF16 tokens ------------------------------------------------------------------- */

/* q.k of 8 tokens, rows' query split in a high and a low bf16 half. c: columns in MMA order. */
template <class C>
DEVICE void score_unit(const SegmentData<C> &s, const uint8_t *keys, int lane,
                       float (&c)[C::TILES][4]) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int j = 0; j < C::TILES; j++) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0;
#pragma unroll 1
    for (int m = 0; m < C::D / 32; m++) {
        const uint4 x = *reinterpret_cast<const uint4 *>(keys + g * 2 * C::D + m * 64 + t * 16);
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
            const float *q = s.query + column_row<C>(j, g) * C::QUERY_STRIDE + 32 * m + 8 * t;
            uint32_t high[4], low[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                high[k] = pack_bf162(q[2 * k], q[2 * k + 1]);
                low[k] = pack_bf162(q[2 * k] - bf16_low(high[k]), q[2 * k + 1] - bf16_high(high[k]));
            }
            if (j >= C::FULL) {
#pragma unroll
                for (int k = 0; k < 4; k++) high[k] = g & 1 ? low[k] : high[k];
            }
            mma_bf16(c[j], x.x, 0u, x.y, 0u, high[0], high[1]);
            mma_bf16(c[j], x.z, 0u, x.w, 0u, high[2], high[3]);
            if (j < C::FULL) {
                mma_bf16(c[j], x.x, 0u, x.y, 0u, low[0], low[1]);
                mma_bf16(c[j], x.z, 0u, x.w, 0u, low[2], low[3]);
            }
        }
    }
}

/* Adds p V of 8 tokens. Probabilities are split in bf16 halves, which take the 16 tokens of an MMA
 * (or the two columns of a half tile), and scaled to the unit of the codes' accumulators. */
template <class C>
DEVICE void value_unit(Rows<C> &r, const uint8_t *values, int lane, const float (&prob)[C::COLUMNS],
                       uint32_t keep) {
    uint32_t b[C::TILES][2];
#pragma unroll
    for (int j = 0; j < C::TILES; j++) {
        const float p0 = prob[2 * j], p1 = j < C::FULL ? prob[(2 * j + 1) % C::COLUMNS] : 0.0f;
        const uint32_t high = pack_bf162(p0, p1);
        const uint32_t low = pack_bf162(p0 - bf16_low(high), p1 - bf16_high(high));
        if (j < C::FULL) {
            b[j][0] = transpose8x8(high);
            b[j][1] = transpose8x8(low);
        } else {
            b[j][0] = transpose8x8(__byte_perm(high, low, 0x5410));
            b[j][1] = 0;
        }
    }
    const uint32_t rows = shared_address(values) + (lane & 7) * 2 * C::D + (lane >> 3) * 16;
#pragma unroll
    for (int w = 0; w < C::W; w++)
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            uint32_t v[4];
            load_transposed(rows + 128 * w + 32 * i, v[0], v[1], v[2], v[3]);
#pragma unroll
            for (int k = 0; k < 4; k++) v[k] &= keep;
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const uint32_t unit = (127u - 24u + 2u * (i + k)) << 7; /* 4^i 2^-24 */
                const uint32_t scale = unit | unit << 16;
#pragma unroll
                for (int j = 0; j < C::TILES; j++)
                    mma_bf16(r.acc[j][4 * w + i + k], v[2 * k], v[2 * k + 1], v[2 * k], v[2 * k + 1],
                             mul_bf162(b[j][0], scale), mul_bf162(b[j][1], scale));
            }
        }
}

template <class C, int MODE>
DEVICE void attend_unit(Rows<C> &r, uint8_t *area, const DecodeParams &p,
                        const uint8_t *unit, int kind, int position, int length, int first_row,
                        int warp, int lane) {
    const int g = lane >> 2, t = lane & 3, t_first = length - p.n_q_tokens;
    const SegmentData<C> s = segment_data<C>(area, MODE == MODE_PLAIN ? 0 : p.bias_steps);
    float c[C::TILES][4], score[1][C::COLUMNS];
    score_unit<C>(s, unit, lane, c);
    float bias[1][C::TILES][4], constant[C::COLUMNS];
    const bool upper = position & 8;
    if constexpr (MODE != MODE_PLAIN)
        bias_page<C, 1>(s, p, position >> 6, (position & 63) >> 4, warp, lane, bias, constant);
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
        const int j = i >> 1;
        float x = (j < C::FULL ? c[j][i & 1] : c[j][0] + c[j][1]) * CODE_UNIT + r.q_const[i];
        if constexpr (MODE != MODE_PLAIN) {
            const float y0 = upper ? bias[0][j][2] : bias[0][j][0];
            const float y1 = upper ? bias[0][j][3] : bias[0][j][1];
            x += fmaf(j < C::FULL ? (i & 1 ? y1 : y0) : y0 + y1, CODE_UNIT, constant[i]);
        }
        if (MODE == MODE_BIAS_CAP && p.softcap_log2 > 0) x = soft_cap(x, r.scale[i], p.softcap_log2);
        const Span see = visible(p, kind, t_first + column_token<C>(p, first_row, i, lane));
        score[0][i] = position + g < see.first || position + g >= see.last ? MASKED : x;
    }
    raise_maximum<C, 1>(r, score);
    float prob[C::COLUMNS];
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
        prob[i] = exp2_fast(fmaf(score[0][i], r.scale[i], -(r.row_max[i] * r.scale[i])));
        r.row_sum[i] += prob[i];
    }
    /* Rows of the ring that no query sees may never have been written. */
    const int first = visible(p, kind, max(t_first, 0)).first, last = visible(p, kind, length - 1).last;
    const int token = position + 2 * t;
    const uint32_t keep = (token >= first && token < last ? 0x0000ffffu : 0u) |
                          (token + 1 >= first && token + 1 < last ? 0xffff0000u : 0u);
    value_unit<C>(r, unit + C::UNIT, lane, prob, keep);
}

#endif
