/*
 * decode_runs.cuh - the key bias of more than 16 pairs, for more than four rows (C::RUNS): products with tables for a run of
 * pages.
 *
 * A warp's tiles are pages that follow each other, RUN_PAGES at a time (run_of_tile()). With z turned to the middle of such
 * a run the bias of any of its tokens x is sum over pairs of Re z cos(x f) + Im z sin(x f), two steps of an MMA for the 16
 * fastest pairs. The others are slow enough for their waves over the whole run to be sums of eight even and eight odd
 * functions e_j(x), o_j(x) (layer_bias.cu): cos(x f) = sum_j w_j(f) e_j(x), sin(x f) = sum_j v_j(f) o_j(x). So of all slow
 * pairs a row has 16 numbers, sum over pairs of w_j (Re z) and of v_j (Im z), which one more step multiplies with e and o.
 * These numbers are products too, of the queries as they are and of w and v turned to the run's middle: what is turned are
 * 16 numbers a pair, for all rows alike, instead of a number a row and pair.
 *
 * Where biases are large, all of this has high and low halves, and the table, which has room for half as many pages, is one for
 * runs of SHORT_RUN.
 */
#ifndef OSCAR_CUDA_DECODE_RUNS_CUH
#define OSCAR_CUDA_DECODE_RUNS_CUH

#include "decode_bias.cuh"

/* A half of two numbers for both. */
DEVICE uint32_t scale_half2(uint32_t x, uint32_t by, bool high) {
    const __half2 b = bits_half2(by);
    return half2_bits(__hmul2(bits_half2(x), high ? __high2half2(b) : __low2half2(b)));
}

/* Sums over slow pairs are up to 64 times what an fp16 number holds; the table has the factor. */
#define RUN_SUM_UNIT (1.0f / 64)

/* Whether a bias of some row needs low halves, or pairs the table that has them. */
template <class C> DEVICE bool needs_short_runs(const DecodeParams &p, const SegmentData<C> &s, int lane) {
    return !p.bias_long_runs || has_large_bias<C>(s, lane);
}

template <class C> struct RunBias {
    static constexpr int PRODUCTS = 3, NOTHING = -16;
    int first; /* page with which the run begins whose operands the lanes have; NOTHING: none */
    bool large; /* with low halves */

    /* B operands of a run. LOW: with low halves. */
    template <bool LOW> struct Operands {
        static constexpr int HALVES = LOW ? 2 : 1, WORDS = PRODUCTS * C::TILES * HALVES * 2;
        uint32_t b[PRODUCTS][C::TILES][HALVES][2];

        DEVICE static constexpr int lines() { return (WORDS + 3) / 4; }
        DEVICE uint32_t word(int i) const {
            return i < WORDS ? b[i / 2 / HALVES / C::TILES][i / 2 / HALVES % C::TILES][i / 2 % HALVES][i % 2] : 0u;
        }
        DEVICE void leave(uint4 *own) const {
#pragma unroll
            for (int v = 0; v < lines(); v++)
                own[32 * v] = make_uint4(word(4 * v), word(4 * v + 1), word(4 * v + 2), word(4 * v + 3));
        }
        DEVICE void take(const uint4 *own) {
#pragma unroll
            for (int v = 0; v < lines(); v++) {
                const uint4 x = own[32 * v];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const int i = 4 * v + k;
                    if (i < WORDS)
                        b[i / 2 / HALVES / C::TILES][i / 2 / HALVES % C::TILES][i / 2 % HALVES][i % 2] =
                            k == 0 ? x.x : k == 1 ? x.y : k == 2 ? x.z : x.w;
                }
            }
        }
        DEVICE void put(int k, int j, float x0, float x1, float x2, float x3) {
            uint32_t high[2], low[2];
            bias_operands(x0, x1, x2, x3, high, low);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                b[k][j][0][i] = high[i];
                if (LOW) b[k][j][HALVES - 1][i] = low[i];
            }
        }
    };

    template <bool LOW> DEVICE static constexpr int pages() { return LOW ? SHORT_RUN : RUN_PAGES; }
    DEVICE static uint4 *own(const SegmentData<C> &s) {
        return s.run_own + (threadIdx.x >> 5) * run_own<C>() * 32 + (threadIdx.x & 31);
    }
    DEVICE static float2 phase_of(const SegmentData<C> &s, int pair, int page, int halves) {
        const unsigned long long turns = s.bias_turn[pair]; /* the upper half of the lower half of the product with page */
        const uint32_t turn = static_cast<uint32_t>(turns >> 32) * page + __umulhi(static_cast<uint32_t>(turns), page) +
                              s.run_half[pair] * halves;
        const float angle = static_cast<float>(static_cast<int>(turn)) * 1.4629180792671596e-9f;
        return make_float2(__cosf(angle), __sinf(angle));
    }
    /* Phases of pairs at the middle of a run, [steps, 4] of two pairs. Of slow pairs, without low halves, as halves: cos and
     * sin, -sin and cos. */
    template <bool LOW>
    DEVICE static const float4 *put_run_phases(const SegmentData<C> &s, const DecodeParams &p, int page, int lane) {
        float4 *phase = s.bias_phase + (threadIdx.x >> 5) * 4 * p.bias_steps;
        __syncwarp();
        if (lane < 4 * p.bias_steps) {
            const int halves = pages<LOW>() - 1;
            const float2 a = phase_of(s, 2 * lane, page, halves), b = phase_of(s, 2 * lane + 1, page, halves);
            if (LOW || lane < 8)
                phase[lane] = make_float4(a.x, a.y, b.x, b.y);
            else
                reinterpret_cast<uint4 *>(phase)[lane] = make_uint4(pack_half2(a.x, a.y), pack_half2(b.x, b.y),
                                                                    pack_half2(-a.y, a.x), pack_half2(-b.y, b.x));
        }
        __syncwarp();
        return phase + (lane & 3);
    }

    /* Sums of slow pairs. c: of even functions in rows 0 to 7, of odd ones in rows 8 to 15. */
    DEVICE static void sum_slow(const SegmentData<C> &s, const DecodeParams &p, const float4 *phase, int lane,
                                float (&c)[C::TILES][4]) {
        const uint4 *weights = s.bias_table + PRODUCTS * RUN_LINES + lane, *query = s.run_query + lane;
        constexpr int MOST = C::D / 32 - 1; /* twos of steps */
        float d[C::TILES][4]; /* of second steps: two chains */
#pragma unroll
        for (int j = 0; j < C::TILES; j++) d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0;
#pragma unroll
        for (int two = 0; two < MOST; two++) {
            const int step = 2 + 2 * two;
            const bool any = step < p.bias_steps;
            const int line = any ? two : 0;
            uint4 w = weights[32 * line];
            const uint4 *e = reinterpret_cast<const uint4 *>(phase) + 8 + 8 * line;
            const uint4 e0 = e[0], e1 = e[4];
            if (!any) w = make_uint4(0, 0, 0, 0);
            const uint32_t a[8] = {scale_half2(e0.x, w.x, false), scale_half2(e0.z, w.y, false), scale_half2(e0.y, w.x, true),
                                   scale_half2(e0.w, w.y, true),  scale_half2(e1.x, w.z, false), scale_half2(e1.z, w.w, false),
                                   scale_half2(e1.y, w.z, true),  scale_half2(e1.w, w.w, true)};
#pragma unroll
            for (int j = 0; j < C::TILES; j++) {
                const uint4 z = query[32 * (line * C::TILES + j)];
                mma_f16(c[j], a[0], a[1], a[2], a[3], z.x, z.y);
                mma_f16(d[j], a[4], a[5], a[6], a[7], z.z, z.w);
            }
        }
#pragma unroll
        for (int k = 0; k < C::TILES * 4; k++) c[k / 4][k % 4] += d[k / 4][k % 4];
    }
    /* The same with low halves of everything. */
    DEVICE static void sum_slow_all(const SegmentData<C> &s, const DecodeParams &p, const float4 *phase, int lane,
                                    float (&c)[C::TILES][4]) {
        const float4 *weights = reinterpret_cast<const float4 *>(s.bias_table) + PRODUCTS * RUN_LINES + lane;
#pragma unroll 1
        for (int step = 2; step < p.bias_steps; step++) {
            const float4 w = weights[(step - 2) * 32], e = phase[4 * step];
            uint32_t even[2], odd[2], even_low[2], odd_low[2];
            bias_operands(w.x * e.x, w.x * e.y, w.y * e.z, w.y * e.w, even, even_low);
            bias_operands(-w.z * e.y, w.z * e.x, -w.w * e.w, w.w * e.z, odd, odd_low);
#pragma unroll
            for (int j = 0; j < C::TILES; j++) {
                const float4 z = s.bias_query[(step * C::TILES + j) * 32 + lane];
                uint32_t high[2], low[2];
                bias_operands(z.x, z.y, z.z, z.w, high, low);
                mma_f16(c[j], even[0], odd[0], even[1], odd[1], high[0], high[1]);
                mma_f16(c[j], even[0], odd[0], even[1], odd[1], low[0], low[1]);
                mma_f16(c[j], even_low[0], odd_low[0], even_low[1], odd_low[1], high[0], high[1]);
            }
        }
    }

    template <bool LOW> DEVICE void make(const SegmentData<C> &s, const DecodeParams &p, int page, int lane) {
        const float4 *phase = put_run_phases<LOW>(s, p, page, lane);
        Operands<LOW> to;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const float4 e = phase[4 * k];
#pragma unroll
            for (int j = 0; j < C::TILES; j++) {
                float z[4];
                take_four(z, s.bias_query[(k * C::TILES + j) * 32 + lane]);
                bias_turn_two(z, e);
                to.put(k, j, z[0], z[1], z[2], z[3]);
            }
        }
        float c[C::TILES][4];
#pragma unroll
        for (int j = 0; j < C::TILES; j++) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0;
        if (LOW) sum_slow_all(s, p, phase, lane, c);
        else sum_slow(s, p, phase, lane, c);
#pragma unroll
        for (int j = 0; j < C::TILES; j++) { /* rows are functions: they become those of a B operand */
            to.put(2, j, c[j][0] * RUN_SUM_UNIT, c[j][1] * RUN_SUM_UNIT, c[j][2] * RUN_SUM_UNIT, c[j][3] * RUN_SUM_UNIT);
#pragma unroll
            for (int half = 0; half < (LOW ? 2 : 1); half++)
#pragma unroll
                for (int i = 0; i < 2; i++) to.b[2][j][half][i] = transpose8x8(to.b[2][j][half][i]);
        }
        to.leave(own(s));
        first = page;
    }

    /* Scores of N blocks of 16 tokens. table: the first one's. */
    template <bool LOW, int N>
    DEVICE static void blocks(const Operands<LOW> &by, const uint4 *table, float (&c)[N][C::TILES][4]) {
#pragma unroll
        for (int k = 0; k < N * C::TILES * 4; k++) c[k / 4 / C::TILES][k / 4 % C::TILES][k % 4] = 0;
#pragma unroll
        for (int k = 0; k < PRODUCTS; k++) {
#pragma unroll
            for (int n = 0; n < N; n++) {
                const uint4 a = table[k * RUN_LINES + 32 * n];
#pragma unroll
                for (int j = 0; j < C::TILES; j++)
#pragma unroll
                    for (int half = 0; half < (LOW ? 2 : 1); half++)
                        mma_f16(c[n][j], a.x, a.y, a.z, a.w, by.b[k][j][half][0], by.b[k][j][half][1]);
                if (!LOW) continue;
                const uint4 low = table[k * RUN_LINES + 128 * SHORT_RUN + 32 * n];
#pragma unroll
                for (int j = 0; j < C::TILES; j++) mma_f16(c[n][j], low.x, low.y, low.z, low.w, by.b[k][j][0][0], by.b[k][j][0][1]);
            }
        }
    }

    /* Of a block of 16 tokens, for a unit. */
    template <bool LOW>
    DEVICE void block(const SegmentData<C> &s, const DecodeParams &p, int page, int n, float (&c)[1][C::TILES][4]) {
        const int lane = threadIdx.x & 31;
        if (static_cast<unsigned>(page - first) >= pages<LOW>()) make<LOW>(s, p, page, lane);
        Operands<LOW> by;
        by.take(own(s));
        blocks<LOW, 1>(by, s.bias_table + ((page - first) * 4 + n) * 32 + lane, c);
    }

    DEVICE void start(uint8_t *area, const DecodeParams &p) {
        first = NOTHING;
        large = needs_short_runs<C>(p, segment_data<C>(area, p.bias_steps), threadIdx.x & 31);
    }
    DEVICE void of_unit(const Rows<C> &r, const SegmentData<C> &s, const DecodeParams &p, int position, int warp, int lane,
                        float (&score)[C::COLUMNS]) {
        float c[1][C::TILES][4]; /* of the eight tokens and those beside them */
        const int n = (position & 63) >> 4;
        if (large) block<true>(s, p, position >> 6, n, c);
        else block<false>(s, p, position >> 6, n, c);
#pragma unroll
        for (int i = 0; i < C::COLUMNS; i++)
            score[i] = position & 8 ? c[0][i >> 1][2 + (i & 1)] : c[0][i >> 1][i & 1];
    }
};

/* Of a tile, a few blocks at a time. */
template <class C, bool LOW> struct TileBias {
    typedef RunBias<C> Run;
    /* Blocks made at once: beside the products of as many sub-tiles, or, which is faster with many products, all before. */
    static constexpr int BLOCKS = Run::PRODUCTS * C::TILES > 4 && !LOW ? 4 : C::SIDE_BY_SIDE;
    typename Run::template Operands<LOW> by;
    const uint4 *table; /* this lane's place in that of the page */
    float c[BLOCKS][C::TILES][4];

    DEVICE TileBias(const SegmentData<C> &s, int page) : table(s.bias_table + page * 128 + (threadIdx.x & 31)) {
        by.take(Run::own(s));
        if (BLOCKS == 4) Run::template blocks<LOW, BLOCKS>(by, table, c);
    }
    DEVICE void products(int first) {
        if (BLOCKS < 4) Run::template blocks<LOW, BLOCKS>(by, table + 32 * first, c);
    }
    DEVICE void begin(int n, float (*score)[C::COLUMNS]) const {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < C::COLUMNS; i++) score[h][i] = c[n % BLOCKS][i >> 1][2 * h + (i & 1)];
    }
    DEVICE static float key_unit(const Rows<C> &r) { return r.key_unit; }
};
/* Of a tile whose scores begin with something already. */
template <class C> struct NoTileBias {
    DEVICE static float key_unit(const Rows<C> &) { return 1.0f; }
    DEVICE void products(int) {}
    DEVICE void begin(int, float (*)[C::COLUMNS]) const {}
};

#endif
