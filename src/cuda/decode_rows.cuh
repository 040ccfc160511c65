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

/* What a kernel can do beyond the plain product: the key bias of at most 16 tracked pairs; of any number;
 * that and a soft cap. */
enum Mode { MODE_PLAIN = 0, MODE_BIAS_16 = 1, MODE_BIAS = 2, MODE_BIAS_CAP = 3 };

/* HIGH: tiles may have planes of a third and fourth bit. */
template <int D_, int ROWS_, int WARPS_, int STAGES_, bool HIGH_ = false> struct Config {
    static constexpr int D = D_, ROWS = ROWS_, WARPS = WARPS_, STAGES = STAGES_;
    static constexpr bool HIGH = HIGH_;
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
    static constexpr int STAGE = LOW_TILE + (HIGH ? 2048 * W : 0);
    static constexpr bool BULK = WARPS * STAGES * STAGE > 100000; /* made for devices with bulk copies */
    static constexpr int SIDE_BY_SIDE = TILES * G > 1 || WARPS > 12 || HIGH ? 2 : 4; /* sub-tiles whose products interleave */
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
    float bias_unit;                 /* products of the key bias to raw scores */
    float acc[C::TILES][C::STEPS][4];
};

/* The part of shared memory that lives as long as a segment. */
template <class C> struct SegmentData {
    uint32_t *fragments; /* [TILES, STEPS / 2, 32, 4] rotated queries as B operands */
    float *query;       /* [ROWS, QUERY_STRIDE] rotated, times the row's scale */
    float *query_scale; /* [ROWS] a power of two */
    float *query_mean;  /* [ROWS] q . mean */
    float4 *bias_stride; /* [steps, 4] turns of a lane's two pairs by WARPS pages: cos, sin */
    float *bias_unit;   /* [1] a power of two that nu was divided by */
    uint4 *bias_table;  /* [steps / 2, E and O, high and low, 2, 32] */
    float4 *bias_query; /* [steps, TILES, 32] conj(q) nu of the two pairs of a lane, times the row's scale */
    unsigned long long *bias_turn; /* [8 steps] */
    float4 *bias_phase;            /* [WARPS, 4 steps] */
};

template <class C> __host__ __device__ constexpr int bias_step_bytes() {
    return 2048 + C::TILES * 512 + 64 + 64 + C::WARPS * 64;
}

template <class C> DEVICE SegmentData<C> segment_data(uint8_t *area, int steps) {
    SegmentData<C> s;
    s.bias_table = reinterpret_cast<uint4 *>(area);
    s.bias_query = reinterpret_cast<float4 *>(s.bias_table + steps * 128);
    s.bias_stride = s.bias_query + steps * C::TILES * 32;
    s.bias_turn = reinterpret_cast<unsigned long long *>(s.bias_stride + steps * 4);
    s.bias_phase = reinterpret_cast<float4 *>(s.bias_turn + steps * 8);
    s.fragments = reinterpret_cast<uint32_t *>(s.bias_phase + C::WARPS * steps * 4);
    s.query = reinterpret_cast<float *>(s.fragments + C::TILES * C::STEPS * 64);
    s.query_scale = s.query + C::ROWS * C::QUERY_STRIDE;
    s.query_mean = s.query_scale + 16;
    s.bias_unit = s.query_mean + 16;
    return s;
}

template <class C> DEVICE float q_value(const DecodeParams &p, uint32_t word, int half) {
    const uint32_t h = half ? word >> 16 : word & 0xffffu;
    return p.q_is_bf16 ? __uint_as_float(h << 16) : __half2float(__ushort_as_half(h));
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
template <class C, int MODE>
DEVICE void start_rows(Rows<C> &r, const SegmentData<C> &s, float scale_log2, int lane) {
    if constexpr (MODE != MODE_PLAIN) r.bias_unit = *s.bias_unit * CODE_UNIT;
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
 * With z = conj(q) nu of a pair, b(t) = Re(z e^{i t f}) summed over pairs. z is turned to the middle of the page (nu
 * comes turned by the 31.5 tokens up to it; the angle is from a 64-bit fixed-point product: exact at any position);
 * its real part, constant over the page, is summed in fp32. For tokens x = .5, 1.5, .. 31.5 after and before the
 * middle the rest is E + O and E - O, E = sum Re z (cos(x f) - 1), O = sum Im z sin(x f): products with a table of 32
 * rows of high and low fp16 halves, and z as high and low halves, 16 pairs a step of an MMA. Pairs are in order of
 * falling frequency: for slow ones (the last steps) the table is so small that the high halves alone are enough. */

DEVICE float2 bias_phase(unsigned long long turn, int pages) {
    const unsigned long long turns = turn * static_cast<unsigned long long>(pages);
    const float angle = static_cast<float>(static_cast<int>(turns >> 32)) * 1.4629180792671596e-9f;
    return make_float2(__cosf(angle), __sinf(angle));
}

/* z e^{i angle}, for the imaginary part's sign in which b = Re z cos + Im z sin. */
DEVICE void bias_turn(float &re, float &im, float c, float s) {
    const float x = re * c + im * s;
    im = im * c - re * s;
    re = x;
}

/* Four numbers of this lane's column as B operands. A full tile: high and low halves; a half tile: high
 * halves in even columns, low ones in odd, and nothing else. */
DEVICE void bias_operands(float z0, float z1, float z2, float z3, bool half, int lane, uint32_t (&first)[2],
                          uint32_t (&second)[2]) {
    const uint32_t keep = half && !(lane & 4) ? 0u : FULL_WARP;
    const uint32_t high0 = pack_half2(z0, z1), high1 = pack_half2(z2, z3);
    const float2 f0 = __half22float2(bits_half2(high0 & keep)), f1 = __half22float2(bits_half2(high1 & keep));
    second[0] = pack_half2(z0 - f0.x, z1 - f0.y);
    second[1] = pack_half2(z2 - f1.x, z3 - f1.y);
    first[0] = half ? second[0] : high0;
    first[1] = half ? second[1] : high1;
}

/* table: 16 rows of E or O of 16 pairs; their low halves are 64 further on. */
DEVICE void bias_product(float (&c)[4], const uint4 *table, int lane, bool half, bool split, const uint32_t (&first)[2],
                         const uint32_t (&second)[2]) {
    const uint4 a = table[lane];
    mma_f16(c, a.x, a.y, a.z, a.w, first[0], first[1]);
    if (!split) return;
    if (!half) mma_f16(c, a.x, a.y, a.z, a.w, second[0], second[1]);
    const uint4 b = table[64 + lane];
    mma_f16(c, b.x, b.y, b.z, b.w, first[0], first[1]);
}

/* E and O of 16 rows to the bias of a sub-tile: after the middle as they are, before it E - O in reverse order. The
 * columns of a half tile come summed. */
DEVICE void bias_after(const float (&even)[4], const float (&odd)[4], float (&out)[4]) {
#pragma unroll
    for (int k = 0; k < 4; k++) out[k] = even[k] + odd[k];
}
DEVICE void bias_before(const float (&even)[4], const float (&odd)[4], bool half, float (&out)[4]) {
    float m[4];
#pragma unroll
    for (int k = 0; k < 4; k++) m[k] = even[k] - odd[k];
    if (half) { /* rows 15 - r of the other half of the lanes' rows */
        out[0] = __shfl_xor_sync(FULL_WARP, m[2] + m[3], 28);
        out[2] = __shfl_xor_sync(FULL_WARP, m[0] + m[1], 28);
        out[1] = out[3] = 0;
    } else {
#pragma unroll
        for (int k = 0; k < 4; k++) out[k] = __shfl_xor_sync(FULL_WARP, m[k ^ 2], 28);
    }
}

/* constant: partial sums of this lane's column over its pairs -> values of its score columns, raw. */
template <class C>
DEVICE void bias_constants(const Rows<C> &r, float (&constant)[C::TILES], float (&out)[C::COLUMNS], int lane) {
    const int t = lane & 3;
#pragma unroll
    for (int j = 0; j < C::TILES; j++) {
        constant[j] += __shfl_xor_sync(FULL_WARP, constant[j], 1);
        constant[j] += __shfl_xor_sync(FULL_WARP, constant[j], 2);
#pragma unroll
        for (int i = 2 * j; i < min(2 * j + 2, C::COLUMNS); i++)
            out[i] = fmaf(__shfl_sync(FULL_WARP, constant[j], 4 * (2 * t + (i & 1))), r.bias_unit, r.q_const[i]);
    }
}

/* At most 16 pairs: z of the page at hand stays in registers and is turned on from page to page. That adds
 * about 1e-7 a page to its error, so it begins anew every FRESH pages. */
template <class C> struct PageBias {
    static constexpr int STEPS = 2, FRESH = 16;
    float z[STEPS][C::TILES][4];

    DEVICE void start(const SegmentData<C> &s, int page, int lane) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const unsigned long long *turns = s.bias_turn + 8 * step + 2 * (lane & 3);
            const float2 a = bias_phase(turns[0], page), b = bias_phase(turns[1], page);
#pragma unroll
            for (int j = 0; j < C::TILES; j++) {
                const float4 at = s.bias_query[(step * C::TILES + j) * 32 + lane];
                float(&to)[4] = z[step][j];
                to[0] = at.x;
                to[1] = at.y;
                to[2] = at.z;
                to[3] = at.w;
                bias_turn(to[0], to[1], a.x, a.y);
                bias_turn(to[2], to[3], b.x, b.y);
            }
        }
    }

    /* Bias of a page's sub-tiles; then on to the page that is this warp's next. */
    DEVICE void take(const Rows<C> &r, const SegmentData<C> &s, int lane, float (&c)[4][C::TILES][4],
                     float (&constant)[C::COLUMNS]) {
        float partial[C::TILES];
        const float4 stride0 = s.bias_stride[lane & 3], stride1 = s.bias_stride[4 + (lane & 3)];
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
            const bool half = j >= C::FULL;
            float(&z)[4] = z_of(0, j), (&y)[4] = z_of(1, j), even[2][4], odd[2][4];
            uint32_t first[2], second[2];
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int k = 0; k < 4; k++) even[n][k] = odd[n][k] = 0;
            bias_operands(z[0], z[2], y[0], y[2], half, lane, first, second);
#pragma unroll
            for (int n = 0; n < 2; n++) bias_product(even[n], s.bias_table + 32 * n, lane, half, true, first, second);
            bias_operands(z[1], z[3], y[1], y[3], half, lane, first, second);
#pragma unroll
            for (int n = 0; n < 2; n++) bias_product(odd[n], s.bias_table + 128 + 32 * n, lane, half, true, first, second);
            partial[j] = (z[0] + z[2]) + (y[0] + y[2]);
            bias_turn(z[0], z[1], stride0.x, stride0.y);
            bias_turn(z[2], z[3], stride0.z, stride0.w);
            bias_turn(y[0], y[1], stride1.x, stride1.y);
            bias_turn(y[2], y[3], stride1.z, stride1.w);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                bias_after(even[n], odd[n], c[2 + n][j]);
                bias_before(even[n], odd[n], half, c[1 - n][j]);
            }
        }
        bias_constants<C>(r, partial, constant, lane);
    }

    DEVICE float (&z_of(int step, int j))[4] { return z[step][j]; }
};

/* Bias of the sub-tiles of any page, all four or (N = 1) the one at `first`: scores' columns in MMA order. */
template <class C, int N>
DEVICE void bias_page(const Rows<C> &r, const SegmentData<C> &s, const DecodeParams &p, int page, int first, int warp,
                      int lane, float (&c)[N][C::TILES][4], float (&constant)[C::COLUMNS]) {
    constexpr int M = N == 4 ? 2 : 1; /* blocks of 16 rows of the table */
    float2 *phase = reinterpret_cast<float2 *>(s.bias_phase + warp * p.bias_steps * 4);
    __syncwarp();
#pragma unroll 2
    for (int i = lane; i < 8 * p.bias_steps; i += 32) phase[i] = bias_phase(s.bias_turn[i], page);
    __syncwarp();
    float partial[C::TILES], even[C::TILES][M][4], odd[C::TILES][M][4];
    const int block = N == 4 ? 0 : first < 2 ? 1 - first : first - 2;
#pragma unroll
    for (int j = 0; j < C::TILES; j++) {
        partial[j] = 0;
#pragma unroll
        for (int n = 0; n < M; n++)
#pragma unroll
            for (int k = 0; k < 4; k++) even[j][n][k] = odd[j][n][k] = 0;
    }
#pragma unroll 1
    for (int step = 0; step < p.bias_steps; step += 2) {
        const bool split = step < p.bias_split_steps;
        const float4 *e = s.bias_phase + (warp * p.bias_steps + step) * 4 + (lane & 3);
        const float4 e0 = e[0], e1 = e[4];
        const uint4 *table = s.bias_table + step * 128 + block * 32;
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
            const bool half = j >= C::FULL;
            float4 z = s.bias_query[(step * C::TILES + j) * 32 + lane];
            float4 y = s.bias_query[((step + 1) * C::TILES + j) * 32 + lane];
            bias_turn(z.x, z.y, e0.x, e0.y);
            bias_turn(z.z, z.w, e0.z, e0.w);
            bias_turn(y.x, y.y, e1.x, e1.y);
            bias_turn(y.z, y.w, e1.z, e1.w);
            partial[j] += (z.x + z.z) + (y.x + y.z);
            uint32_t high[2], low[2];
            bias_operands(z.x, z.z, y.x, y.z, half, lane, high, low);
#pragma unroll
            for (int n = 0; n < M; n++) bias_product(even[j][n], table + 32 * n, lane, half, split, high, low);
            bias_operands(z.y, z.w, y.y, y.w, half, lane, high, low);
#pragma unroll
            for (int n = 0; n < M; n++) bias_product(odd[j][n], table + 128 + 32 * n, lane, half, split, high, low);
        }
    }
#pragma unroll
    for (int j = 0; j < C::TILES; j++) {
        if constexpr (N == 4) {
#pragma unroll
            for (int n = 0; n < 2; n++) {
                bias_after(even[j][n % M], odd[j][n % M], c[(2 + n) % N][j]);
                bias_before(even[j][n % M], odd[j][n % M], j >= C::FULL, c[(1 - n) % N][j]);
            }
        } else {
            if (first < 2)
                bias_before(even[j][0], odd[j][0], j >= C::FULL, c[0][j]);
            else
                bias_after(even[j][0], odd[j][0], c[0][j]);
        }
    }
    bias_constants<C>(r, partial, constant, lane);
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

/* Adds the third and fourth bit of the codes, from the words of the high plane: they go above the low two,
 * where code i + 1 was before the mask. odd: a plane of one bit has two words in one. */
template <int BITS>
DEVICE void add_high(uint32_t (&a)[4], uint32_t x, uint32_t y, int i, bool odd) {
    const uint32_t mask = (BITS == 4 ? 0x000c000cu : 0x00040004u) << (2 * i);
    const int up = odd ? 1 : 2;
    a[0] |= x << up & mask;
    a[1] |= x >> (8 - up) & mask;
    a[2] |= y << up & mask;
    a[3] |= y >> (8 - up) & mask;
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

/* The words of this lane in a sub-tile of codes of BITS bits, and its fragments. high: the sub-tile of the
 * high plane. */
template <class C, int BITS> struct Codes {
    static constexpr int HIGH_WORDS = BITS == 4 ? C::W : BITS == 3 ? (C::W + 1) / 2 : 1;
    uint32_t low[2 * C::W], high[2 * HIGH_WORDS];

    DEVICE void load(const uint8_t *from, const uint8_t *from_high, int lane) {
        load_words<C::W>(from, lane, low);
        if constexpr (BITS > 2) load_words<HIGH_WORDS>(from_high, lane, high);
    }
    DEVICE void fragment(int s, uint32_t (&a)[4]) const {
        const int w = s / 4, u = BITS == 3 ? w / 2 : w;
        code_fragment(a, low[w], low[C::W + w], s & 3);
        if constexpr (BITS > 2) add_high<BITS>(a, high[u], high[HIGH_WORDS + u], s & 3, BITS == 3 && (w & 1));
    }
};

/* Bytes of a sub-tile of the high plane. */
template <class C> DEVICE constexpr int high_sub_tile(int bits) {
    return 256 * (bits == 4 ? C::W : (C::W + 1) / 2);
}

/* q.c of N sub-tiles side by side, since the products of one are a chain. */
template <class C, int BITS, int N>
DEVICE void code_products(const Rows<C> &r, const uint8_t *keys, const uint8_t *high, int lane,
                          float (&c)[N][C::G][C::TILES][4]) {
    Codes<C, BITS> codes[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        codes[n].load(keys + n * 4 * C::D, high + n * high_sub_tile<C>(BITS), lane);
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
            codes[n].fragment(s, a);
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
                        start = fmaf(j < C::FULL ? y[i & 1] : y[0] + y[1], r.bias_unit, start);
                    }
                }
                score[h][i] = fmaf(dot, f.x, fmaf(f.y, r.q_sum[i][k], start));
            }
        }
    }
}

template <class C, int BITS>
DEVICE void value_products(Rows<C> &r, const uint8_t *values, const uint8_t *high, int lane,
                           const uint32_t (&b)[C::G][C::TILES][2]) {
    Codes<C, BITS> codes;
    codes.load(values, high, lane);
#pragma unroll
    for (int s = 0; s < C::STEPS; s++) {
        uint32_t a[4];
        codes.fragment(s, a);
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
            const int k = s / 4 / C::WORDS_A_GROUP;
            mma_f16(r.acc[j][s], a[0], a[1], a[2], a[3], b[k][j][0], b[k][j][1]);
        }
    }
}

/* Probabilities of 16 tokens to the B operand, their sums, and the product with the values. */
template <class C>
DEVICE void value_sub_tile(Rows<C> &r, const uint8_t *values, const uint8_t *high, int bits, const uint8_t *params, int lane,
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
    if (!C::HIGH || bits == 2)
        value_products<C, 2>(r, values, high, lane, b);
    else if (bits == 3)
        value_products<C, 3>(r, values, high, lane, b);
    else
        value_products<C, 4>(r, values, high, lane, b);
}

/* Query token of score column i: the rows of a KV head are [token][query head]. */
template <class C> DEVICE int column_token(const DecodeParams &p, int first_row, int i, int lane) {
    return min(divide(first_row + 4 * i + (lane & 3), p.gqa, p.gqa_magic), p.n_q_tokens - 1);
}

template <class C, int MODE>
DEVICE void attend_tile(Rows<C> &r, PageBias<C> &page_bias, uint8_t *area, const DecodeParams &p,
                        const Control &ctl, const uint8_t *tile, int page, bool masked) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float bias[4][C::TILES][4], constant[C::COLUMNS];
    if constexpr (MODE != MODE_PLAIN) {
        const SegmentData<C> s = segment_data<C>(area, p.bias_steps);
        if constexpr (MODE == MODE_BIAS_16)
            page_bias.take(r, s, lane, bias, constant);
        else
            bias_page<C, 4>(r, s, p, page, 0, warp, lane, bias, constant);
    }
    float score[8][C::COLUMNS];
    const uint8_t *params = tile + 32 * C::D, *high = tile + C::LOW_TILE;
#pragma unroll
    for (int first = 0; first < 4; first += C::SIDE_BY_SIDE) {
        constexpr int N = C::SIDE_BY_SIDE;
        float c[N][C::G][C::TILES][4];
        const uint8_t *keys = tile + first * 4 * C::D;
        if (!C::HIGH || p.bits_k == 2)
            code_products<C, 2, N>(r, keys, high, lane, c);
        else if (p.bits_k == 3)
            code_products<C, 3, N>(r, keys, high + first * high_sub_tile<C>(3), lane, c);
        else
            code_products<C, 4, N>(r, keys, high + first * high_sub_tile<C>(4), lane, c);
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
    if (C::HIGH && p.bits_k > 2) high += 4 * high_sub_tile<C>(p.bits_k);
    const int high_step = C::HIGH ? high_sub_tile<C>(p.bits_v) : 0;
#pragma unroll
    for (int n = 0; n < 4; n++)
        value_sub_tile<C>(r, tile + 16 * C::D + n * 4 * C::D, high + n * high_step, p.bits_v, params + 64 * n, lane,
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
        bias_page<C, 1>(r, s, p, position >> 6, (position & 63) >> 4, warp, lane, bias, constant);
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
        const int j = i >> 1;
        float x = (j < C::FULL ? c[j][i & 1] : c[j][0] + c[j][1]) * CODE_UNIT;
        if constexpr (MODE != MODE_PLAIN) {
            const float y0 = upper ? bias[0][j][2] : bias[0][j][0];
            const float y1 = upper ? bias[0][j][3] : bias[0][j][1];
            x += fmaf(j < C::FULL ? (i & 1 ? y1 : y0) : y0 + y1, r.bias_unit, constant[i]);
        } else {
            x += r.q_const[i];
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
