/*
 * decode_few.cuh - the key bias of up to 16 pairs for 9 to 16 rows (C::FEW): products with a table for a run of pages.
 *
 * A warp's tiles are pages that follow each other, FEW_RUN at a time (run_of_tile()). With z turned to the middle of such a run
 * the bias of any of its tokens x is sum over pairs of Re z cos(x f) + Im z sin(x f): two steps of an MMA, 8 pairs each. Of a
 * half tile the odd columns, which are the even ones' rows again, have z turned by 32 tokens more: what they make of the first
 * half of a page is the bias of the second half.
 *
 * Where biases are large, all of this has high and low halves, and products count for more than instructions. Then pages are
 * taken in twos that lie mirrored about the middle of FEW_SHORT (paired_page()): with z turned to there, the bias is E + O after
 * it and E - O before it, E = sum Re z cos(x f), O = sum Im z sin(x f), a step of 16 pairs each. Of a half tile the odd columns
 * have low halves of z.
 */
#ifndef OSCAR_CUDA_DECODE_FEW_CUH
#define OSCAR_CUDA_DECODE_FEW_CUH

#include "decode_runs.cuh"

/* Operands of up to 16 pairs for a run of pages, or for those about a middle. */
template <class C> struct FewBias {
    static_assert(FEW_UNIT * run_unit<C>() == 1.0f, "the tables' unit");
    static constexpr int NOTHING = -16;
    int first; /* page with which the run begins whose operands the lanes have, or that begins at the middle; NOTHING: none */
    int away;  /* where biases are large: the two pages whose scores were made last, NOTHING: none */
    bool large;

    DEVICE static bool half_tile(int j) { return j >= C::FULL; }
    DEVICE static uint4 *own(const SegmentData<C> &s) {
        return s.run_own + (threadIdx.x >> 5) * few_own<C>() * 32 + (threadIdx.x & 31);
    }
    DEVICE static uint4 *own_low(const SegmentData<C> &s) {
        return s.run_low + (threadIdx.x >> 5) * few_low<C>() * 32 + (threadIdx.x & 31);
    }

    /* Phases of pairs so many halves of a page after the middle of one, [2, 4] of two pairs, then those 32 tokens on. Returns
     * this lane's. */
    DEVICE static const float4 *put_phases(const SegmentData<C> &s, int page, int halves) {
        const int lane = threadIdx.x & 31;
        float4 *phase = s.bias_phase + (threadIdx.x >> 5) * 16;
        __syncwarp();
        reinterpret_cast<float2 *>(phase)[lane] = RunBias<C>::phase_of(s, lane & 15, page, halves + (lane >> 4));
        __syncwarp();
        return phase + (lane & 3);
    }
    DEVICE static void turned(const SegmentData<C> &s, const float4 &phase, int step, int j, float (&z)[4]) {
        take_four(z, s.bias_query[(step * C::TILES + j) * 32 + (threadIdx.x & 31)]);
        bias_turn_two(z, phase);
    }

    /* Operands of the run from `page` on. */
    DEVICE void make(const SegmentData<C> &s, int page) {
        const float4 *phase = put_phases(s, page, FEW_RUN - 1);
        const int ahead = threadIdx.x & 4 ? 8 : 0;
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
            float x[4], y[4];
            turned(s, phase[half_tile(j) ? ahead : 0], 0, j, x);
            turned(s, phase[half_tile(j) ? 4 + ahead : 4], 1, j, y);
            own(s)[32 * j] = make_uint4(pack_half2(x[0], x[1]), pack_half2(x[2], x[3]), pack_half2(y[0], y[1]),
                                        pack_half2(y[2], y[3]));
        }
        first = page;
    }

    /* Operands for pages about the beginning of `page`: of cosines, then of sines: of a whole tile high, then low halves; of a
     * half tile high halves in even and low ones in odd columns, then high ones in even columns alone. */
    DEVICE void make_low(const SegmentData<C> &s, int page) {
        const float4 *phase = put_phases(s, page, -1);
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
            float x[4], y[4], part[2][4];
            turned(s, phase[0], 0, j, x);
            turned(s, phase[4], 1, j, y);
            bias_parts(x, y, part[0], part[1]);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                uint32_t high[2], low[2];
                bias_operands(part[k][0], part[k][1], part[k][2], part[k][3], high, low);
                const bool odd = half_tile(j) && (threadIdx.x & 4);
                uint4 w = make_uint4(high[0], high[1], low[0], low[1]);
                if (half_tile(j)) w = odd ? make_uint4(low[0], low[1], 0, 0) : make_uint4(high[0], high[1], high[0], high[1]);
                own_low(s)[32 * (k * C::TILES + j)] = w;
            }
        }
        first = page;
        away = NOTHING;
    }

    /* One of E and O of a block of 16 tokens. table: its high halves. by: this lane's operands of a tile. */
    DEVICE static void low_products(const uint4 &a, const uint4 &low, int j, const uint4 &by, float (&c)[4]) {
        mma_f16(c, a.x, a.y, a.z, a.w, by.x, by.y);
        if (!half_tile(j)) mma_f16(c, a.x, a.y, a.z, a.w, by.z, by.w);
        if (half_tile(j)) mma_f16(c, low.x, low.y, low.z, low.w, by.z, by.w);
        else mma_f16(c, low.x, low.y, low.z, low.w, by.x, by.y);
    }
    DEVICE static void parts(const uint4 *table, const uint4 (&by)[2][C::TILES], float (&even)[C::TILES][4],
                             float (&odd)[C::TILES][4]) {
        constexpr int HALF = 64 * FEW_SHORT;
        const uint4 a = table[0], b = table[HALF], c = table[2 * HALF], d = table[3 * HALF];
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
#pragma unroll
            for (int k = 0; k < 4; k++) even[j][k] = odd[j][k] = 0;
            low_products(a, b, j, by[0][j], even[j]);
            low_products(c, d, j, by[1][j], odd[j]);
        }
    }
    DEVICE static float part(const float (&c)[C::TILES][4], int i, int h) {
        const float x = h ? c[i >> 1][2 + (i & 1)] : c[i >> 1][i & 1];
        return half_tile(i >> 1) ? x + (h ? c[i >> 1][3] : c[i >> 1][1]) : x;
    }
    DEVICE static void take_operands(const SegmentData<C> &s, uint4 (&by)[2][C::TILES]) {
#pragma unroll
        for (int k = 0; k < 2 * C::TILES; k++) by[k / C::TILES][k % C::TILES] = own_low(s)[32 * k];
    }

    /* What the scores of a page begin with, so many pages away from the one that begins at the edge. Those before the edge
     * come first, and are made together with those after it. */
    DEVICE void scores(const SegmentData<C> &s, int edge, int away_now, bool after, float (&score)[8][C::COLUMNS]) {
        if (first != edge) make_low(s, edge);
        uint4 *next = own_low(s) + 2 * C::TILES * 32;
        if (away != away_now) {
            uint4 by[2][C::TILES];
            take_operands(s, by);
            float later[8][C::COLUMNS];
            const uint4 *table = s.bias_table + away_now * 128 + (threadIdx.x & 31);
            float even[2][C::TILES][4], odd[2][C::TILES][4]; /* of this block and the one before */
#pragma unroll
            for (int n = 0; n <= 4; n++) {
                if (n < 4) parts(table + 32 * n, by, even[n & 1], odd[n & 1]);
                if (n == 0) continue;
#pragma unroll
                for (int h = 0; h < 2; h++)
#pragma unroll
                    for (int i = 0; i < C::COLUMNS; i++) {
                        const float e = part(even[~n & 1], i, h), o = part(odd[~n & 1], i, h);
                        later[2 * n - 2 + h][i] = e + o;
                        score[9 - 2 * n - h][i] = __shfl_xor_sync(FULL_WARP, e - o, 28);
                    }
            }
#pragma unroll
            for (int v = 0; v < 2 * C::COLUMNS; v++) {
                uint32_t x[4];
#pragma unroll
                for (int k = 0; k < 4; k++) x[k] = __float_as_uint(later[(4 * v + k) / C::COLUMNS][(4 * v + k) % C::COLUMNS]);
                next[32 * v] = make_uint4(x[0], x[1], x[2], x[3]);
            }
            away = away_now;
        }
        if (!after) return;
#pragma unroll
        for (int v = 0; v < 2 * C::COLUMNS; v++) {
            const uint4 x = next[32 * v];
#pragma unroll
            for (int k = 0; k < 4; k++)
                score[(4 * v + k) / C::COLUMNS][(4 * v + k) % C::COLUMNS] =
                    __uint_as_float(k == 0 ? x.x : k == 1 ? x.y : k == 2 ? x.z : x.w);
        }
    }

    DEVICE void start(uint8_t *area, const DecodeParams &) {
        first = away = NOTHING;
        large = has_large_bias<C>(segment_data<C>(area, 2), threadIdx.x & 31);
    }
    DEVICE void of_unit(const Rows<C> &r, const SegmentData<C> &s, const DecodeParams &, int position, int, int lane,
                        float (&score)[C::COLUMNS]);
};

/* Of a tile: all before the products of keys. */
template <class C> struct FewTile {
    float c[4][C::TILES][4]; /* blocks; of a half tile two, whose odd columns are two blocks on */

    /* N blocks; with N = 1 odd columns are no matter. */
    template <int N> DEVICE static void blocks(const SegmentData<C> &s, const uint4 *table, float (*c)[C::TILES][4]) {
        uint4 by[C::TILES];
#pragma unroll
        for (int j = 0; j < C::TILES; j++) by[j] = FewBias<C>::own(s)[32 * j];
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int n = 0; n < N; n++) {
                const uint4 a = table[k * FEW_RUN * 128 + 32 * n];
#pragma unroll
                for (int j = 0; j < C::TILES; j++) {
                    if (n > 1 && FewBias<C>::half_tile(j)) continue;
                    if (k == 0) c[n][j][0] = c[n][j][1] = c[n][j][2] = c[n][j][3] = 0;
                    mma_f16(c[n][j], a.x, a.y, a.z, a.w, k ? by[j].z : by[j].x, k ? by[j].w : by[j].y);
                }
            }
    }
    DEVICE FewTile(const SegmentData<C> &s, int page) { blocks<4>(s, s.bias_table + page * 128 + (threadIdx.x & 31), c); }
    DEVICE void products(int) {}
    DEVICE void begin(int n, float (*score)[C::COLUMNS]) const {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < C::COLUMNS; i++)
                score[h][i] = FewBias<C>::half_tile(i >> 1) ? c[n & 1][i >> 1][2 * h + (n >> 1)] : c[n][i >> 1][2 * h + (i & 1)];
    }
    DEVICE static float key_unit(const Rows<C> &) { return 1.0f; }
};

template <class C>
DEVICE void FewBias<C>::of_unit(const Rows<C> &r, const SegmentData<C> &s, const DecodeParams &, int position, int, int lane,
                                float (&score)[C::COLUMNS]) {
    const int page = position >> 6, n = (position & 63) >> 4;
    float c[1][C::TILES][4];
    if (large) {
        if (first != page) make_low(s, page);
        uint4 by[2][C::TILES];
        take_operands(s, by);
        float odd[C::TILES][4];
        parts(s.bias_table + 32 * n + lane, by, c[0], odd);
#pragma unroll
        for (int k = 0; k < C::TILES * 4; k++) c[0][k / 4][k % 4] += odd[k / 4][k % 4];
    } else {
        if (static_cast<unsigned>(page - first) >= FEW_RUN) make(s, page);
        FewTile<C>::template blocks<1>(s, s.bias_table + ((page - first) * 4 + n) * 32 + lane, c);
    }
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
        const float x = position & 8 ? c[0][i >> 1][2 + (i & 1)] : c[0][i >> 1][i & 1];
        score[i] = large ? part(c[0], i, position & 8) : x;
    }
}

/* What the scores of a warp's tiles and units begin with. */
template <class C, int MODE, bool RUNS, bool FEW> struct BiasForm {
    typedef Beginnings<C, MODE> Type;
};
template <class C, int MODE> struct BiasForm<C, MODE, true, false> {
    typedef RunBias<C> Type;
};
template <class C, int MODE> struct BiasForm<C, MODE, true, true> {
    typedef FewBias<C> Type;
};
template <class C, int MODE> using Bias = typename BiasForm<C, MODE, C::RUNS, C::FEW>::Type;

#endif
