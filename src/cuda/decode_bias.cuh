/*
 * decode_bias.cuh - the key bias of the tracked mean: what the scores of a tile or a unit begin with.
 *
 * With z = conj(q) nu of a pair, b(t) = Re(z e^{i t f}) summed over pairs. z is turned to the middle of the page (nu
 * comes turned by the 31.5 tokens up to it; the angle is from a 64-bit fixed-point product: exact at any position).
 * For tokens x = .5, 1.5, .. 31.5 after and before the middle b is E + O and E - O, E = sum Re z cos(x f), O = sum
 * Im z sin(x f): products with a table of 32 rows of high and low fp16 halves, and z as high and low halves, 16 pairs
 * a step of an MMA. The columns of an MMA are rows of queries; where these are at most four, rows of two pages.
 *
 * More than 16 pairs come in order of falling frequency and with cos(x f) - 1 in the table, so that slow pairs, whose
 * tables are small, can do with fewer products; the sum of Re z, constant over the page, is added in fp32.
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

/* Adds the products of 16 pairs to M blocks of 16 rows of E or O. table: the first block's high halves, the low ones
 * are 64 further on. z: of this lane's four pairs and column. all: high and low halves of both. */
template <int M>
DEVICE void bias_products(float (&c)[M][4], const uint4 *table, int lane, float z0, float z1, float z2, float z3, bool all) {
    const uint32_t high0 = pack_half2(z0, z1), high1 = pack_half2(z2, z3);
    uint4 a[M];
#pragma unroll
    for (int n = 0; n < M; n++) {
        a[n] = table[32 * n + lane];
        mma_f16(c[n], a[n].x, a[n].y, a[n].z, a[n].w, high0, high1);
    }
    if (!all) return;
    const float2 f0 = __half22float2(bits_half2(high0)), f1 = __half22float2(bits_half2(high1));
    const uint32_t low0 = pack_half2(z0 - f0.x, z1 - f0.y), low1 = pack_half2(z2 - f1.x, z3 - f1.y);
#pragma unroll
    for (int n = 0; n < M; n++) {
        const uint4 b = table[64 + 32 * n + lane];
        mma_f16(c[n], b.x, b.y, b.z, b.w, high0, high1);
        mma_f16(c[n], a[n].x, a[n].y, a[n].z, a[n].w, low0, low1);
    }
}

/* E and O of a page's 32 rows: what its scores begin with. constant: of the columns. Rows before the middle come in
 * reverse order, so from the lanes of the other half. */
template <class C>
DEVICE void bias_scores(const Rows<C> &r, const float (&even)[C::TILES][2][4], const float (&odd)[C::TILES][2][4],
                        const float (&constant)[C::BIAS_PAGES][C::COLUMNS], float (&score)[C::BIAS_PAGES][8][C::COLUMNS]) {
#pragma unroll
    for (int j = 0; j < C::TILES; j++)
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int h = k >> 1, page = C::BIAS_PAGES > 1 ? k & 1 : 0, i = C::BIAS_PAGES > 1 ? 0 : 2 * j + (k & 1);
                if (i >= C::COLUMNS) continue; /* half a tile: both columns are the same row */
                const float middle = fmaf(even[j][n][k], r.bias_unit[i], constant[page][i]);
                const float before = fmaf(-odd[j][n][k], r.bias_unit[i], middle);
                score[page][4 + 2 * n + h][i] = fmaf(odd[j][n][k], r.bias_unit[i], middle);
                score[page][3 - 2 * n - h][i] = __shfl_xor_sync(FULL_WARP, before, 28);
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
DEVICE void clear_sums(float (&sum)[C::TILES], float (&even)[C::TILES][M][4], float (&odd)[C::TILES][M][4]) {
#pragma unroll
    for (int j = 0; j < C::TILES; j++) {
        sum[j] = 0;
#pragma unroll
        for (int k = 0; k < 4 * M; k++) even[j][k >> 2][k & 3] = odd[j][k >> 2][k & 3] = 0;
    }
}

/* Few pairs: z of the page at hand stays in registers and is turned on from page to page. That adds about 1e-7 a page
 * to its error, so it begins anew every FRESH pages. STEPS: of 8 pairs, at most. */
template <class C, int STEPS> struct PageBias {
    static constexpr int FRESH = 16;
    static constexpr bool WHOLE = STEPS == 2; /* the table has cos(x f) */
    float z[STEPS][C::TILES][4];

    DEVICE static bool has(const DecodeParams &p, int step) { return WHOLE || step < p.bias_steps; }

    DEVICE void clear() {
#pragma unroll
        for (int k = 0; k < STEPS * C::TILES * 4; k++) z[k / 4 / C::TILES][k / 4 % C::TILES][k & 3] = 0;
    }

    DEVICE void start(const SegmentData<C> &s, const DecodeParams &p, int page, int lane) {
        if (C::BIAS_PAGES > 1 && (lane & 4)) page += C::WARPS;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            if (!has(p, step)) continue;
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

    /* What scores begin with; then on to the next pages. */
    DEVICE void take(const Rows<C> &r, const SegmentData<C> &s, const DecodeParams &p, int lane,
                     float (&score)[C::BIAS_PAGES][8][C::COLUMNS]) {
        float sum[C::TILES], even[C::TILES][2][4], odd[C::TILES][2][4], constant[C::BIAS_PAGES][C::COLUMNS];
        clear_sums<C, 2>(sum, even, odd);
#pragma unroll
        for (int step = 0; step < STEPS; step += 2) {
            if (!has(p, step)) continue;
            const float4 stride0 = s.bias_stride[4 * step + (lane & 3)], stride1 = s.bias_stride[4 * step + 4 + (lane & 3)];
            const uint4 *table = s.bias_table + 128 * step;
#pragma unroll
            for (int j = 0; j < C::TILES; j++) {
                float(&x)[4] = z[step][j], (&y)[4] = z[(step + 1) % STEPS][j];
                if (!WHOLE) sum[j] += (x[0] + x[2]) + (y[0] + y[2]);
                if (WHOLE || step < p.bias_odd_steps)
                    bias_products<2>(even[j], table, lane, x[0], x[2], y[0], y[2], WHOLE || step < p.bias_even_steps);
                bias_products<2>(odd[j], table + 128, lane, x[1], x[3], y[1], y[3], WHOLE || step < p.bias_odd_steps);
                bias_turn(x[0], x[1], stride0.x, stride0.y);
                bias_turn(x[2], x[3], stride0.z, stride0.w);
                bias_turn(y[0], y[1], stride1.x, stride1.y);
                bias_turn(y[2], y[3], stride1.z, stride1.w);
            }
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
template <class C, int M, bool WHOLE>
DEVICE void bias_sums(const SegmentData<C> &s, const DecodeParams &p, const float2 *phase, int block, int lane,
                      float (&even)[C::TILES][M][4], float (&odd)[C::TILES][M][4], float (&sum)[C::TILES]) {
    const float4 *e = reinterpret_cast<const float4 *>(phase) + (lane & 3);
#pragma unroll 1
    for (int step = 0; step < p.bias_steps; step += 2) {
        const float4 e0 = e[4 * step], e1 = e[4 * step + 4];
        const uint4 *table = s.bias_table + step * 128 + block * 32;
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
            float4 z = s.bias_query[(step * C::TILES + j) * 32 + lane];
            float4 y = s.bias_query[((step + 1) * C::TILES + j) * 32 + lane];
            bias_turn(z.x, z.y, e0.x, e0.y);
            bias_turn(z.z, z.w, e0.z, e0.w);
            bias_turn(y.x, y.y, e1.x, e1.y);
            bias_turn(y.z, y.w, e1.z, e1.w);
            sum[j] += WHOLE ? 0.0f : (z.x + z.z) + (y.x + y.z);
            if (WHOLE || step < p.bias_odd_steps)
                bias_products<M>(even[j], table, lane, z.x, z.z, y.x, y.z, WHOLE || step < p.bias_even_steps);
            bias_products<M>(odd[j], table + 128, lane, z.y, z.w, y.y, y.w, WHOLE || step < p.bias_odd_steps);
        }
    }
}

/* Phases of all pairs at a page to shared memory. */
DEVICE void put_phases(float2 *phase, const unsigned long long *turn, int n, int page, int lane) {
#pragma unroll 2
    for (int i = lane; i < n; i += 32) phase[i] = bias_phase(turn[i], page);
}

/* What the scores of any page begin with, or, with few rows, of this warp's next two tiles. */
template <class C>
DEVICE void bias_page(const Rows<C> &r, const SegmentData<C> &s, const DecodeParams &p, int page, int warp, int lane,
                      float (&score)[C::BIAS_PAGES][8][C::COLUMNS]) {
    float2 *phase = reinterpret_cast<float2 *>(s.bias_phase + warp * C::BIAS_PAGES * p.bias_steps * 4);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < C::BIAS_PAGES; k++)
        put_phases(phase + k * 8 * p.bias_steps, s.bias_turn, 8 * p.bias_steps, page + k * C::WARPS, lane);
    __syncwarp();
    float sum[C::TILES], even[C::TILES][2][4], odd[C::TILES][2][4], constant[C::BIAS_PAGES][C::COLUMNS];
    clear_sums<C, 2>(sum, even, odd);
    bias_sums<C, 2, false>(s, p, phase + (C::BIAS_PAGES > 1 && (lane & 4) ? 8 * p.bias_steps : 0), 0, lane, even, odd, sum);
    page_constants<C>(r, sum, constant, lane);
    bias_scores<C>(r, even, odd, constant, score);
}

/* The same for the 8 tokens of a unit. */
template <class C, bool WHOLE>
DEVICE void bias_unit(const Rows<C> &r, const SegmentData<C> &s, const DecodeParams &p, int position, int warp, int lane,
                      float (&score)[C::COLUMNS]) {
    float2 *phase = reinterpret_cast<float2 *>(s.bias_phase + warp * C::BIAS_PAGES * p.bias_steps * 4);
    __syncwarp();
    put_phases(phase, s.bias_turn, 8 * p.bias_steps, position >> 6, lane);
    __syncwarp();
    float sum[C::TILES], even[C::TILES][1][4], odd[C::TILES][1][4], constant[C::COLUMNS];
    clear_sums<C, 1>(sum, even, odd);
    const int eighth = (position & 63) >> 3;
    const bool after = eighth >= 4, upper = after ? eighth & 1 : !(eighth & 1);
    bias_sums<C, 1, WHOLE>(s, p, phase, after ? (eighth - 4) >> 1 : (3 - eighth) >> 1, lane, even, odd, sum);
    bias_constants<C>(r, sum, constant, lane);
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
        const int j = i >> 1, k = i & 1;
        const float e = upper ? even[j][0][2 + k] : even[j][0][k], o = upper ? odd[j][0][2 + k] : odd[j][0][k];
        const float x = fmaf(after ? o : -o, r.bias_unit[i], fmaf(e, r.bias_unit[i], constant[i]));
        const float reversed = __shfl_xor_sync(FULL_WARP, x, 28);
        score[i] = after ? x : reversed;
    }
}

/* What the scores of a warp's tiles begin with, tile after tile of a segment. */
template <class C, int MODE> struct Beginnings {
    static constexpr int STEPS = MODE == MODE_BIAS_16 ? 2 : MODE == MODE_BIAS ? C::BIAS_STEPS : 0;
    PageBias<C, STEPS ? STEPS : 2> bias;
    float next[8][C::COLUMNS]; /* of the next tile, when two are made at once */
    int n_made;

    /* Everything is defined here, so that nothing is kept before. */
    DEVICE void start() {
        n_made = 0;
        if (STEPS) bias.clear();
#pragma unroll
        for (int k = 0; k < 8 * C::COLUMNS; k++) next[k / C::COLUMNS][k % C::COLUMNS] = 0;
    }

    DEVICE void make(const Rows<C> &r, uint8_t *area, const DecodeParams &p, int page,
                     float (&made)[C::BIAS_PAGES][8][C::COLUMNS]) {
        const int lane = threadIdx.x & 31;
        const SegmentData<C> s = segment_data<C>(area, p.bias_steps);
        if constexpr (STEPS > 0) {
            if (n_made % bias.FRESH == 0) bias.start(s, p, page, lane);
            bias.take(r, s, p, lane, made);
        } else {
            bias_page<C>(r, s, p, page, static_cast<int>(threadIdx.x >> 5), lane, made);
        }
    }

    DEVICE void take(const Rows<C> &r, uint8_t *area, const DecodeParams &p, int page, float (&score)[8][C::COLUMNS]) {
        if constexpr (MODE == MODE_PLAIN) {
#pragma unroll
            for (int k = 0; k < 8 * C::COLUMNS; k++) score[k / C::COLUMNS][k % C::COLUMNS] = r.q_const[k % C::COLUMNS];
        } else {
            if (n_made % C::BIAS_PAGES == 0) {
                float made[C::BIAS_PAGES][8][C::COLUMNS];
                make(r, area, p, page, made);
#pragma unroll
                for (int k = 0; k < 8 * C::COLUMNS; k++) {
                    const int n = k / C::COLUMNS, i = k % C::COLUMNS;
                    score[n][i] = made[0][n][i];
                    if (C::BIAS_PAGES > 1) next[n][i] = made[C::BIAS_PAGES - 1][n][i];
                }
            } else {
#pragma unroll
                for (int k = 0; k < 8 * C::COLUMNS; k++)
                    score[k / C::COLUMNS][k % C::COLUMNS] = next[k / C::COLUMNS][k % C::COLUMNS];
            }
            n_made++;
        }
    }
};

#endif
