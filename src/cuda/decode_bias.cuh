/*
 * decode_bias.cuh - the key bias of the tracked mean: what the scores of a tile or a unit begin with.
 *
 * With z = conj(q) nu of a pair, b(t) = Re(z e^{i t f}) summed over pairs. z is turned to the middle of the page (nu
 * comes turned by the 31.5 tokens up to it; the angle is from a 64-bit fixed-point product: exact at any position).
 * For tokens x = .5, 1.5, .. 31.5 after and before the middle b is E + O and E - O, E = sum Re z cos(x f), O = sum
 * Im z sin(x f): products with a table of 32 rows of high and low fp16 halves, and z as high and low halves, 16 pairs
 * a step of an MMA. The columns of an MMA are rows of queries; where these are at most four, rows of two pages. With
 * more rows, two pages of a warp lie mirrored about the middle between them (C::MIRRORED), and the table has 64 rows:
 * z is turned and halved once for both. Low halves are left out where biases are small enough.
 *
 * Where pages do not lie mirrored, more than 16 pairs have cos(x f) - 1 in the table. Pairs come in order of falling
 * frequency, so slow ones, whose tables are small, can do with fewer products; the sum of Re z, constant over the page,
 * is added in fp32.
 */
#ifndef OSCAR_CUDA_DECODE_BIAS_CUH
#define OSCAR_CUDA_DECODE_BIAS_CUH

#include "decode_rows.cuh"
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

/* --- prefill's, a sub-tile at a time ---------------------------------------------------------------- */

/* Four numbers of this lane's column as B operands: high and low halves. */
DEVICE void bias_operands(float z0, float z1, float z2, float z3, uint32_t (&high)[2], uint32_t (&low)[2]) {
    high[0] = pack_half2(z0, z1);
    high[1] = pack_half2(z2, z3);
    const float2 f0 = __half22float2(bits_half2(high[0])), f1 = __half22float2(bits_half2(high[1]));
    low[0] = pack_half2(z0 - f0.x, z1 - f0.y);
    low[1] = pack_half2(z2 - f1.x, z3 - f1.y);
}

/* table: 16 rows of E or O of 16 pairs; their low halves are 64 further on. */
DEVICE void bias_product(float (&c)[4], const uint4 *table, int lane, bool split, const uint32_t (&high)[2],
                         const uint32_t (&low)[2]) {
    const uint4 a = table[lane];
    mma_f16(c, a.x, a.y, a.z, a.w, high[0], high[1]);
    if (!split) return;
    mma_f16(c, a.x, a.y, a.z, a.w, low[0], low[1]);
    const uint4 b = table[64 + lane];
    mma_f16(c, b.x, b.y, b.z, b.w, high[0], high[1]);
}

/* E and O of 16 rows to the bias of a sub-tile: after the middle as they are, before it E - O in reverse order: rows
 * 15 - r are those of the other half of the lanes' rows. */
DEVICE void bias_after(const float (&even)[4], const float (&odd)[4], float (&out)[4]) {
#pragma unroll
    for (int k = 0; k < 4; k++) out[k] = even[k] + odd[k];
}
DEVICE void bias_before(const float (&even)[4], const float (&odd)[4], float (&out)[4]) {
#pragma unroll
    for (int k = 0; k < 4; k++) out[k] = __shfl_xor_sync(FULL_WARP, even[k ^ 2] - odd[k ^ 2], 28);
}

/* --- both ------------------------------------------------------------------------------------------- */

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
            out[i] = fmaf(__shfl_sync(FULL_WARP, constant[j], 4 * (2 * t + (i & 1))), r.bias_unit[i], r.q_const[i]);
    }
}

/* --- decode's --------------------------------------------------------------------------------------- */

/* Without low halves of z and of the table a bias is off by at most 2^-10 of sum |z|, 0.008 of a logit where that sum is
 * below SMALL_BIAS (in log2). Sums are integers, so that their order is no matter. */
#define SMALL_BIAS 12
#define SUM_UNIT 1024

/* Whether a bias of some row needs low halves. */
template <class C> DEVICE bool has_large_bias(const SegmentData<C> &s, int lane) {
    const int row = min(lane & 15, C::ROWS - 1), sum = s.bias_sums[row] + (C::FEW ? s.bias_sums[16 + row] : 0);
    return __any_sync(FULL_WARP, sum >= SMALL_BIAS * SUM_UNIT);
}

/* Adds the products of 16 pairs to M blocks of 16 rows of E or O. table: the first block's high halves. z: of this
 * lane's four pairs and columns. all: high and low halves of both. */
template <class C, int M>
DEVICE void bias_products(float (&c)[M][C::TILES][4], const uint4 *table, int lane, const float (&z)[C::TILES][4], bool all) {
    uint32_t high[C::TILES][2];
#pragma unroll
    for (int j = 0; j < C::TILES; j++) {
        high[j][0] = pack_half2(z[j][0], z[j][1]);
        high[j][1] = pack_half2(z[j][2], z[j][3]);
    }
#pragma unroll
    for (int n = 0; n < M; n++) {
        const uint4 a = table[32 * n + lane];
#pragma unroll
        for (int j = 0; j < C::TILES; j++) mma_f16(c[n][j], a.x, a.y, a.z, a.w, high[j][0], high[j][1]);
    }
    if (!all) return;
    uint32_t low[C::TILES][2];
#pragma unroll
    for (int j = 0; j < C::TILES; j++) {
        const float2 f0 = __half22float2(bits_half2(high[j][0])), f1 = __half22float2(bits_half2(high[j][1]));
        low[j][0] = pack_half2(z[j][0] - f0.x, z[j][1] - f0.y);
        low[j][1] = pack_half2(z[j][2] - f1.x, z[j][3] - f1.y);
    }
#pragma unroll
    for (int n = 0; n < M; n++) {
        const uint4 a = table[32 * n + lane], b = table[32 * (C::BIAS_BLOCKS + n) + lane];
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
            mma_f16(c[n][j], b.x, b.y, b.z, b.w, high[j][0], high[j][1]);
            mma_f16(c[n][j], a.x, a.y, a.z, a.w, low[j][0], low[j][1]);
        }
    }
}

/* The same for E and O. WHOLE: the table has cos(x f), otherwise cos(x f) - 1, and slow pairs do with fewer products. */
template <class C, int M, bool WHOLE>
DEVICE void bias_step(const DecodeParams &p, const uint4 *table, int step, int lane, const float (&re)[C::TILES][4],
                      const float (&im)[C::TILES][4], bool large, float (&even)[M][C::TILES][4], float (&odd)[M][C::TILES][4]) {
    if (WHOLE || step < p.bias_odd_steps)
        bias_products<C, M>(even, table, lane, re, large && (WHOLE || step < p.bias_even_steps));
    bias_products<C, M>(odd, table + 64 * C::BIAS_BLOCKS, lane, im, large && (WHOLE || step < p.bias_odd_steps));
}

/* E and O of a page's 32 rows: what its scores begin with. constant: of the columns. Rows before the middle come in
 * reverse order, so from the lanes of the other half. */
template <class C>
DEVICE void bias_scores(const Rows<C> &r, const float (&even)[2][C::TILES][4], const float (&odd)[2][C::TILES][4],
                        const float (&constant)[C::BIAS_PAGES][C::COLUMNS], float (&score)[C::BIAS_PAGES][8][C::COLUMNS]) {
#pragma unroll
    for (int j = 0; j < C::TILES; j++)
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int h = k >> 1, page = C::BIAS_PAGES > 1 ? k & 1 : 0, i = C::BIAS_PAGES > 1 ? 0 : 2 * j + (k & 1);
                if (i >= C::COLUMNS) continue; /* half a tile: both columns are the same row */
                const float middle = fmaf(even[n][j][k], r.bias_unit[i], constant[page][i]);
                const float before = fmaf(-odd[n][j][k], r.bias_unit[i], middle);
                score[page][4 + 2 * n + h][i] = fmaf(odd[n][j][k], r.bias_unit[i], middle);
                score[page][3 - 2 * n - h][i] = __shfl_xor_sync(FULL_WARP, before, 28);
            }
}

/* Two pages that lie mirrored: block n of the table's rows. score: of the first page, which lies before the middle. MEAN: scores
 * begin with q . mean, where there may be a soft cap. */
template <class C, bool MEAN>
DEVICE void mirror_scores(const float2 (&row)[C::COLUMNS], int n, const float (&even)[C::TILES][4], const float (&odd)[C::TILES][4],
                          float (&score)[8][C::COLUMNS], float (&next)[8][C::COLUMNS]) {
#pragma unroll
    for (int j = 0; j < C::TILES; j++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int eight = 2 * n + (k >> 1), i = 2 * j + (k & 1);
            if (i >= C::COLUMNS) continue; /* half a tile: both columns are the same row */
            const float middle = MEAN ? fmaf(even[j][k], row[i].x, row[i].y) : even[j][k] * row[i].x, before = fmaf(-odd[j][k], row[i].x, middle);
            next[eight][i] = fmaf(odd[j][k], row[i].x, middle);
            score[7 - eight][i] = __shfl_xor_sync(FULL_WARP, before, 28);
        }
}

/* Sums over this lane's pairs to what is constant over a page. */
template <class C>
DEVICE void page_constants(const Rows<C> &r, float (&sum)[C::TILES], float (&constant)[C::BIAS_PAGES][C::COLUMNS], int lane) {
    if constexpr (C::BIAS_PAGES == 1) {
        bias_constants<C>(r, sum, constant[0], lane);
    } else { /* columns 2 t and 2 t + 1: two pages */
        sum[0] += __shfl_xor_sync(FULL_WARP, sum[0], 1);
        sum[0] += __shfl_xor_sync(FULL_WARP, sum[0], 2);
#pragma unroll
        for (int k = 0; k < 2; k++)
            constant[k][0] = fmaf(__shfl_sync(FULL_WARP, sum[0], 4 * (2 * (lane & 3) + k)), r.bias_unit[0], r.q_const[0]);
    }
}

/* Nothing of M blocks of rows yet: sums of Re z, E and O. */
template <class C, int M>
DEVICE void clear_sums(float (&sum)[C::TILES], float (&even)[M][C::TILES][4], float (&odd)[M][C::TILES][4]) {
#pragma unroll
    for (int j = 0; j < C::TILES; j++) {
        sum[j] = 0;
#pragma unroll
        for (int k = 0; k < 4 * M; k++) even[k >> 2][j][k & 3] = odd[k >> 2][j][k & 3] = 0;
    }
}

/* This lane's four pairs of a step as the products take them. */
DEVICE void bias_parts(const float (&x)[4], const float (&y)[4], float (&re)[4], float (&im)[4]) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
        re[k] = x[2 * k];
        im[k] = x[2 * k + 1];
        re[2 + k] = y[2 * k];
        im[2 + k] = y[2 * k + 1];
    }
}

/* Turns the two pairs of a lane. */
DEVICE void bias_turn_two(float (&z)[4], const float4 &by) {
    bias_turn(z[0], z[1], by.x, by.y);
    bias_turn(z[2], z[3], by.z, by.w);
}

DEVICE void take_four(float (&to)[4], const float4 &from) {
    to[0] = from.x;
    to[1] = from.y;
    to[2] = from.z;
    to[3] = from.w;
}

template <class C> DEVICE float2 *warp_phases(const SegmentData<C> &s, const DecodeParams &p, int warp) {
    return reinterpret_cast<float2 *>(s.bias_phase + warp * C::COLUMN_PAGES * p.bias_steps * 4);
}

/* Phases of all pairs at a page, or at the two pages of a product's columns, to shared memory. Returns those of this
 * lane's column. */
template <class C, int PAGES>
DEVICE const float4 *put_phases(const SegmentData<C> &s, const DecodeParams &p, int page, int warp, int lane) {
    float2 *phase = warp_phases(s, p, warp);
    const int n = 8 * p.bias_steps;
    __syncwarp();
#pragma unroll 1
    for (int k = 0; k < PAGES; k++)
#pragma unroll 2
        for (int i = lane; i < n; i += 32) phase[k * n + i] = bias_phase(s.bias_turn[i], page + k * C::WARPS);
    __syncwarp();
    return reinterpret_cast<const float4 *>(phase + (PAGES > 1 && (lane & 4) ? n : 0));
}

/* z of a step's pairs at the page of the phases. */
template <class C>
DEVICE void bias_at_page(const SegmentData<C> &s, const float4 *phase, int step, int lane, float (&z)[C::TILES][4]) {
    const float4 e = phase[4 * step + (lane & 3)];
#pragma unroll
    for (int j = 0; j < C::TILES; j++) {
        take_four(z[j], s.bias_query[(step * C::TILES + j) * 32 + lane]);
        bias_turn_two(z[j], e);
    }
}

/* What is turned on from page to page gains an error of about 1e-7 a page, so it begins anew every so many makings. */
#define BIAS_FRESH 16

/* Few pairs: z of the page at hand stays in registers and is turned on from page to page. STEPS: of 8 pairs, at most. */
template <class C, int STEPS> struct PageBias {
    static constexpr bool WHOLE = STEPS == 2; /* the table has cos(x f) */
    float z[STEPS][C::TILES][4];

    DEVICE static bool has(const DecodeParams &p, int step) { return WHOLE || step < p.bias_steps; }

    DEVICE void clear() {
#pragma unroll
        for (int k = 0; k < STEPS * C::TILES * 4; k++) z[k / 4 / C::TILES][k / 4 % C::TILES][k & 3] = 0;
    }

    DEVICE void start(const SegmentData<C> &s, const DecodeParams &p, int page, int warp, int lane) {
        const float4 *phase = put_phases<C, C::COLUMN_PAGES>(s, p, page, warp, lane);
#pragma unroll
        for (int step = 0; step < STEPS; step++)
            if (has(p, step)) bias_at_page<C>(s, phase, step, lane, z[step]);
    }

    /* What scores begin with; then on to the next pages. */
    DEVICE void take(const Rows<C> &r, const SegmentData<C> &s, const DecodeParams &p, int lane, bool large,
                     float (&score)[C::BIAS_PAGES][8][C::COLUMNS]) {
        float sum[C::TILES], even[2][C::TILES][4], odd[2][C::TILES][4], constant[C::BIAS_PAGES][C::COLUMNS];
        clear_sums<C, 2>(sum, even, odd);
#pragma unroll
        for (int step = 0; step < STEPS; step += 2) {
            if (!has(p, step)) continue;
            const float4 stride0 = s.bias_stride[4 * step + (lane & 3)], stride1 = s.bias_stride[4 * step + 4 + (lane & 3)];
            float re[C::TILES][4], im[C::TILES][4];
#pragma unroll
            for (int j = 0; j < C::TILES; j++) {
                float(&x)[4] = z[step][j], (&y)[4] = z[(step + 1) % STEPS][j];
                if (!WHOLE) sum[j] += (x[0] + x[2]) + (y[0] + y[2]);
                bias_parts(x, y, re[j], im[j]);
                bias_turn_two(x, stride0);
                bias_turn_two(y, stride1);
            }
            bias_step<C, 2, WHOLE>(p, s.bias_table + step * 128, step, lane, re, im, large, even, odd);
        }
        if constexpr (WHOLE) {
#pragma unroll
            for (int k = 0; k < C::BIAS_PAGES * C::COLUMNS; k++)
                constant[k / C::COLUMNS][k % C::COLUMNS] = r.q_const[k % C::COLUMNS];
        } else {
            page_constants<C>(r, sum, constant, lane);
        }
        bias_scores<C>(r, even, odd, constant, score);
    }
};

/* Adds E and O of M blocks of rows, any number of pairs, and returns the sums of Re z over this lane's pairs.
 * phase: of the pages. WHOLE: the table has cos(x f), so nothing is to be added to E. */
template <class C, int M, bool WHOLE, int UNROLL = 1>
DEVICE void bias_sums(const SegmentData<C> &s, const DecodeParams &p, const float4 *phase, int block, int lane, bool large,
                      float (&even)[M][C::TILES][4], float (&odd)[M][C::TILES][4], float (&sum)[C::TILES]) {
#pragma unroll UNROLL
    for (int step = 0; step < p.bias_steps; step += 2) {
        float x[C::TILES][4], y[C::TILES][4], re[C::TILES][4], im[C::TILES][4];
        bias_at_page<C>(s, phase, step, lane, x);
        bias_at_page<C>(s, phase, step + 1, lane, y);
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
            sum[j] += WHOLE ? 0.0f : (x[j][0] + x[j][2]) + (y[j][0] + y[j][2]);
            bias_parts(x[j], y[j], re[j], im[j]);
        }
        bias_step<C, M, WHOLE>(p, s.bias_table + step * 64 * C::BIAS_BLOCKS + block * 32, step, lane, re, im, large, even, odd);
    }
}

/* What the scores of any page begin with, or, with few rows, of this warp's next two tiles. */
template <class C>
DEVICE void bias_page(const Rows<C> &r, const SegmentData<C> &s, const DecodeParams &p, int page, int warp, int lane,
                      bool large, float (&score)[C::BIAS_PAGES][8][C::COLUMNS]) {
    const float4 *phase = put_phases<C, C::COLUMN_PAGES>(s, p, page, warp, lane);
    float sum[C::TILES], even[2][C::TILES][4], odd[2][C::TILES][4], constant[C::BIAS_PAGES][C::COLUMNS];
    clear_sums<C, 2>(sum, even, odd);
    bias_sums<C, 2, false>(s, p, phase, 0, lane, large, even, odd, sum);
    page_constants<C>(r, sum, constant, lane);
    bias_scores<C>(r, even, odd, constant, score);
}

/* Two pages that lie mirrored. FEW: up to 16 pairs, whose z is in shared memory and turns on from page to page; otherwise
 * a lane has the phases of two pairs, which turn on. */
template <class C, bool FEW> struct MirroredBias {
    float4 phase;

    DEVICE static int own_phases(const DecodeParams &p, int lane) { return min(lane, max(4 * p.bias_steps - 1, 0)); }

    DEVICE static void put(float4 *own, int k, const float (&z)[4]) { own[k * 32] = make_float4(z[0], z[1], z[2], z[3]); }

    /* own: this lane's lines. */
    DEVICE void start(const SegmentData<C> &s, const DecodeParams &p, float4 *own, int page, int warp, int lane) {
        if constexpr (FEW) {
            const float4 *at = put_phases<C, 1>(s, p, page, warp, lane);
#pragma unroll
            for (int step = 0; step < 2; step++) {
                float z[C::TILES][4];
                bias_at_page<C>(s, at, step, lane, z);
#pragma unroll
                for (int j = 0; j < C::TILES; j++) put(own, step * C::TILES + j, z[j]);
            }
        } else {
            const int pair = 2 * own_phases(p, lane);
            const float2 a = bias_phase(s.bias_turn[pair], page), b = bias_phase(s.bias_turn[pair + 1], page);
            phase = make_float4(a.x, a.y, b.x, b.y);
        }
    }

    /* table: this lane's place in the block. */
    template <bool ALL>
    DEVICE static void block_products(const uint4 *table, const uint32_t (&e)[2][C::TILES][2], const uint32_t (&o)[2][C::TILES][2],
                                      float (&even)[C::TILES][4], float (&odd)[C::TILES][4]) {
        const uint4 a = table[0], b = table[256];
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
#pragma unroll
            for (int k = 0; k < 4; k++) even[j][k] = odd[j][k] = 0;
#pragma unroll
            for (int half = 0; half < (ALL ? 2 : 1); half++) {
                mma_f16(even[j], a.x, a.y, a.z, a.w, e[half][j][0], e[half][j][1]);
                mma_f16(odd[j], b.x, b.y, b.z, b.w, o[half][j][0], o[half][j][1]);
            }
        }
        if (!ALL) return;
        const uint4 c = table[128], d = table[384];
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
            mma_f16(even[j], c.x, c.y, c.z, c.w, e[0][j][0], e[0][j][1]);
            mma_f16(odd[j], d.x, d.y, d.z, d.w, o[0][j][0], o[0][j][1]);
        }
    }
    /* Products and scores, a block of rows behind the other. */
    template <bool ALL>
    DEVICE static void few_scores(const SegmentData<C> &s, int lane, const float2 (&row)[C::COLUMNS], const float (&re)[C::TILES][4],
                                  const float (&im)[C::TILES][4], float (&score)[8][C::COLUMNS], float (&next)[8][C::COLUMNS]) {
        uint32_t e[2][C::TILES][2], o[2][C::TILES][2]; /* high and low halves */
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
            bias_operands(re[j][0], re[j][1], re[j][2], re[j][3], e[0][j], e[1][j]);
            bias_operands(im[j][0], im[j][1], im[j][2], im[j][3], o[0][j], o[1][j]);
        }
        float even[2][C::TILES][4], odd[2][C::TILES][4]; /* of this block and the one before */
#pragma unroll
        for (int n = 0; n <= 4; n++) {
            if (n < 4) block_products<ALL>(s.bias_table + 32 * n + lane, e, o, even[n & 1], odd[n & 1]);
            if (n > 0) mirror_scores<C, false>(row, n - 1, even[~n & 1], odd[~n & 1], score, next);
        }
    }
    DEVICE static void few(const SegmentData<C> &s, float4 *own, int lane, bool large, const float2 (&row)[C::COLUMNS],
                           float (&score)[8][C::COLUMNS], float (&next)[8][C::COLUMNS]) {
        const float4 stride0 = s.bias_stride[lane & 3], stride1 = s.bias_stride[4 + (lane & 3)];
        float re[C::TILES][4], im[C::TILES][4];
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
            float x[4], y[4];
            take_four(x, own[j * 32]);
            take_four(y, own[(C::TILES + j) * 32]);
            bias_parts(x, y, re[j], im[j]);
            bias_turn_two(x, stride0);
            bias_turn_two(y, stride1);
            put(own, j, x);
            put(own, C::TILES + j, y);
        }
        if (large) few_scores<true>(s, lane, row, re, im, score, next);
        else few_scores<false>(s, lane, row, re, im, score, next);
    }
    DEVICE void many(const SegmentData<C> &s, const DecodeParams &p, int warp, int lane, bool large,
                     const float2 (&row)[C::COLUMNS], float (&score)[8][C::COLUMNS], float (&next)[8][C::COLUMNS]) {
        float2 *phases = warp_phases(s, p, warp);
        __syncwarp();
        if (lane < 4 * p.bias_steps) reinterpret_cast<float4 *>(phases)[lane] = phase;
        const float4 stride = s.bias_stride[own_phases(p, lane)];
        bias_turn(phase.x, phase.y, stride.x, -stride.y);
        bias_turn(phase.z, phase.w, stride.z, -stride.w);
        __syncwarp();
        float sum[C::TILES], even[4][C::TILES][4], odd[4][C::TILES][4];
        clear_sums<C, 4>(sum, even, odd);
        const float4 *at = reinterpret_cast<const float4 *>(phases);
        if (large) bias_sums<C, 4, true>(s, p, at, 0, lane, true, even, odd, sum);
        else bias_sums<C, 4, true, 2>(s, p, at, 0, lane, false, even, odd, sum);
#pragma unroll
        for (int n = 0; n < 4; n++) mirror_scores<C, true>(row, n, even[n], odd[n], score, next);
    }
    DEVICE void take(const SegmentData<C> &s, const DecodeParams &p, float4 *own, int warp, int lane, bool large,
                     float (&score)[8][C::COLUMNS], float (&next)[8][C::COLUMNS]) {
        float2 row[C::COLUMNS];
#pragma unroll
        for (int i = 0; i < C::COLUMNS; i++) row[i] = s.bias_row[4 * i + (lane & 3)];
        if constexpr (!FEW) many(s, p, warp, lane, large, row, score, next);
        else few(s, own, lane, large, row, score, next);
    }
};

/* What the scores of the 8 tokens of a unit begin with. */
template <class C, bool WHOLE>
DEVICE void bias_unit(const Rows<C> &r, const SegmentData<C> &s, const DecodeParams &p, int position, int warp, int lane,
                      bool large, float (&score)[C::COLUMNS]) {
    /* Where pages lie mirrored, this is the second of two. */
    const float4 *phase = put_phases<C, 1>(s, p, (position >> 6) - (C::MIRRORED ? C::WARPS : 0), warp, lane);
    float sum[C::TILES], even[1][C::TILES][4], odd[1][C::TILES][4], constant[C::COLUMNS];
    clear_sums<C, 1>(sum, even, odd);
    const int eighth = (position & 63) >> 3;
    const bool after = C::MIRRORED || eighth >= 4, upper = after ? eighth & 1 : !(eighth & 1);
    const int block = C::MIRRORED ? eighth >> 1 : after ? (eighth - 4) >> 1 : (3 - eighth) >> 1;
    bias_sums<C, 1, WHOLE, C::COLUMN_PAGES>(s, p, phase, block, lane, large, even, odd, sum);
    if constexpr (WHOLE) {
#pragma unroll
        for (int i = 0; i < C::COLUMNS; i++) constant[i] = r.q_const[i];
    } else {
        bias_constants<C>(r, sum, constant, lane);
    }
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
        const int j = i >> 1, k = i & 1;
        const float e = upper ? even[0][j][2 + k] : even[0][j][k], o = upper ? odd[0][j][2 + k] : odd[0][j][k];
        const float x = fmaf(after ? o : -o, r.bias_unit[i], fmaf(e, r.bias_unit[i], constant[i]));
        score[i] = x;
        if (C::MIRRORED) continue;
        const float reversed = __shfl_xor_sync(FULL_WARP, x, 28);
        score[i] = after ? x : reversed;
    }
}

/* What the scores of a warp's tiles begin with: those of C::BIAS_PAGES tiles are made together. */
template <class C, int MODE> struct Beginnings {
    static constexpr bool FEW = MODE == MODE_BIAS_16;
    static constexpr int STEPS = C::MIRRORED ? 0 : FEW ? 2 : MODE == MODE_BIAS ? C::BIAS_STEPS : 0;
    /* Lines of a lane: z, then those of `next` that are in shared memory. */
    static constexpr int LINES = bias_own<C>(FEW ? 2 : MODE == MODE_BIAS ? 4 : 0), LINES_Z = FEW ? 2 * C::TILES : 0;
    PageBias<C, STEPS ? STEPS : 2> bias;
    MirroredBias<C, FEW> mirrored;
    float next[8][C::COLUMNS]; /* of the second tile */
    int n_made;
    bool large;

    DEVICE static int steps(const DecodeParams &p) { return FEW ? 2 : p.bias_steps; }
    DEVICE static float4 *own(const SegmentData<C> &s) {
        return s.bias_own + (threadIdx.x >> 5) * LINES * 32 + (threadIdx.x & 31);
    }

    /* Everything is defined here, so that nothing is kept before. */
    DEVICE void start(uint8_t *area, const DecodeParams &p) {
        n_made = 0;
        large = false;
        if constexpr (MODE != MODE_PLAIN) large = has_large_bias<C>(segment_data<C>(area, steps(p)), threadIdx.x & 31);
        bias.clear();
        mirrored.phase = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < 8 * C::COLUMNS; k++) next[k / C::COLUMNS][k % C::COLUMNS] = 0;
    }

    DEVICE void of_unit(const Rows<C> &r, const SegmentData<C> &s, const DecodeParams &p, int position, int warp, int lane,
                        float (&score)[C::COLUMNS]) {
        bias_unit<C, C::MIRRORED || FEW>(r, s, p, position, warp, lane, large, score);
    }

    /* Of the tile of `page` and what take_next() gives. */
    DEVICE void make(const Rows<C> &r, uint8_t *area, const DecodeParams &p, int page, float (&score)[8][C::COLUMNS]) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const SegmentData<C> s = segment_data<C>(area, steps(p));
        const bool fresh = n_made++ % BIAS_FRESH == 0;
        if constexpr (C::MIRRORED) {
            float second[8][C::COLUMNS];
            if (fresh) mirrored.start(s, p, own(s), page, warp, lane);
            mirrored.take(s, p, own(s), warp, lane, large, score, second);
            put_next(s, second);
        } else {
            float made[C::BIAS_PAGES][8][C::COLUMNS];
            if (STEPS > 0 && fresh) bias.start(s, p, page, warp, lane);
            if constexpr (STEPS > 0) bias.take(r, s, p, lane, large, made);
            else bias_page<C>(r, s, p, page, warp, lane, large, made);
#pragma unroll
            for (int k = 0; k < 8 * C::COLUMNS; k++) score[k / C::COLUMNS][k % C::COLUMNS] = made[0][k / C::COLUMNS][k % C::COLUMNS];
            put_next(s, made[C::BIAS_PAGES - 1]);
        }
    }
    DEVICE void put_next(const SegmentData<C> &s, const float (&from)[8][C::COLUMNS]) {
#pragma unroll
        for (int v = 0; v < 2 * C::COLUMNS; v++) {
            float x[4];
#pragma unroll
            for (int k = 0; k < 4; k++) x[k] = from[(4 * v + k) / C::COLUMNS][(4 * v + k) % C::COLUMNS];
            if (LINES_Z + v < LINES) own(s)[(LINES_Z + v) * 32] = make_float4(x[0], x[1], x[2], x[3]);
            else
#pragma unroll
                for (int k = 0; k < 4; k++) next[(4 * v + k) / C::COLUMNS][(4 * v + k) % C::COLUMNS] = x[k];
        }
    }
    DEVICE void take_next(uint8_t *area, const DecodeParams &p, float (&score)[8][C::COLUMNS]) const {
        const SegmentData<C> s = segment_data<C>(area, steps(p));
#pragma unroll
        for (int v = 0; v < 2 * C::COLUMNS; v++) {
            float x[4];
            if (LINES_Z + v < LINES) take_four(x, own(s)[(LINES_Z + v) * 32]);
#pragma unroll
            for (int k = 0; k < 4; k++)
                score[(4 * v + k) / C::COLUMNS][(4 * v + k) % C::COLUMNS] =
                    LINES_Z + v < LINES ? x[k] : next[(4 * v + k) / C::COLUMNS][(4 * v + k) % C::COLUMNS];
        }
    }
};

#endif
