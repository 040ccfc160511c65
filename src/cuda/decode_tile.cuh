/*
 * decode_tile.cuh - query rows of one KV head against a tile of 64 quantised tokens or a unit of 8 BF16 tokens, on one
 * warp. decode_rows.cuh says what is a row and what a column.
 */
#ifndef OSCAR_CUDA_DECODE_TILE_CUH
#define OSCAR_CUDA_DECODE_TILE_CUH

#include "decode_few.cuh"

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

/* Scores of 16 tokens: their products, dot(k, i, h), on top of what score begins with. unit: of the products. */
template <class C, class Dot>
DEVICE void add_scaled(const Rows<C> &r, const uint8_t *params, int lane, float unit, float (*score)[C::COLUMNS], const Dot &dot) {
#pragma unroll
    for (int k = 0; k < C::G; k++) {
        const uint2 sm = *reinterpret_cast<const uint2 *>(params + 256 * k + 8 * (lane >> 2));
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float2 f = __half22float2(bits_half2(h ? sm.y : sm.x));
            const float step = f.x * unit;
#pragma unroll
            for (int i = 0; i < C::COLUMNS; i++)
                score[h][i] = fmaf(dot(k, i, h), step, fmaf(f.y, r.q_sum[i][k], score[h][i]));
        }
    }
}

/* Of what code_products() makes. */
template <class C>
DEVICE void add_products(const Rows<C> &r, const float (&c)[C::G][C::TILES][4], const uint8_t *params, int lane,
                         float (*score)[C::COLUMNS]) {
    add_scaled<C>(r, params, lane, 1.0f, score, [&](int k, int i, int h) {
        const float *x = &c[k][i >> 1][2 * h];
        return (i >> 1) < C::FULL ? x[i & 1] : x[0] + x[1];
    });
}

/* Of what byte_products() makes. */
template <class C>
DEVICE void add_dots(const Rows<C> &r, const float (&dot)[C::G][C::COLUMNS][2], const uint8_t *params, int lane,
                     float unit, float (*score)[C::COLUMNS]) {
    add_scaled<C>(r, params, lane, unit, score, [&](int k, int i, int h) { return dot[k][i][h]; });
}

/* Prefill: scores of 16 tokens from their products. bias: [TILES][4] of this sub-tile, or what stands for
 * none. */
template <class C, bool BIAS>
DEVICE void score_sub_tile(const Rows<C> &r, const float (&c)[C::G][C::TILES][4], const uint8_t *params, int lane,
                           const float (&bias)[C::TILES][4], const float (&constant)[C::COLUMNS],
                           float (&score)[2][C::COLUMNS]) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < C::COLUMNS; i++) {
            const int j = i >> 1;
            const float *y = &bias[j][2 * h];
            score[h][i] = BIAS ? fmaf(j < C::FULL ? y[i & 1] : y[0] + y[1], r.bias_unit[i], constant[i]) : r.q_const[i];
        }
    add_products<C>(r, c, params, lane, score);
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
DEVICE void weigh_values(Rows<C> &r, const uint8_t *values, const uint8_t *high, int bits, const uint8_t *params, int lane,
                         const float (&prob)[2][C::COLUMNS], uint32_t keep_low, uint32_t keep_high) {
    /* Even columns of a half tile have the first eight tokens, odd ones the others: factors of 1 and 0, since a product
     * is not the ALU pipe's. */
    const __half2 even = bits_half2(lane & 4 ? 0u : 0x3c003c00u), odd = bits_half2(lane & 4 ? 0x3c003c00u : 0u);
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < C::COLUMNS; i++) r.row_sum[i] += prob[h][i];
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
                const __half2 x = bits_half2(transpose8x8(
                    half2_bits(__hmul2(__floats2half2_rn(prob[0][2 * j], prob[1][2 * j]), s))));
                b[k][j][0] = half2_bits(__hmul2(x, even));
                b[k][j][1] = half2_bits(__hmul2(x, odd));
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

/* Prefill: the same from scores. */
template <class C>
DEVICE void value_sub_tile(Rows<C> &r, const uint8_t *values, const uint8_t *high, int bits, const uint8_t *params, int lane,
                           const float (&score)[2][C::COLUMNS], const float (&top)[C::COLUMNS],
                           uint32_t keep_low, uint32_t keep_high) {
    float prob[2][C::COLUMNS];
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < C::COLUMNS; i++) prob[h][i] = exp2_fast(fmaf(score[h][i], r.scale[i], -top[i]));
    weigh_values<C>(r, values, high, bits, params, lane, prob, keep_low, keep_high);
}

/* Query token of score column i: the rows of a KV head are [token][query head]. */
template <class C> DEVICE int column_token(const DecodeParams &p, int first_row, int i, int lane) {
    return min(divide(first_row + 4 * i + (lane & 3), p.gqa, p.gqa_magic), p.n_q_tokens - 1);
}

/* Exponents of a tile's probabilities, in log2, from its scores. */
template <class C>
DEVICE void exponents(const Rows<C> &r, const float (&score)[8][C::COLUMNS], float (&exponent)[8][C::COLUMNS]) {
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
        const float top = r.row_max[i] * r.scale[i];
#pragma unroll
        for (int n = 0; n < 8; n++) exponent[n][i] = fmaf(score[n][i], r.scale[i], -top);
    }
}

/* Whether one of them is above RAISE_ABOVE. Numbers above zero are in the order of their bits as integers, and those
 * below are negative as integers too, which halves the steps: there is a maximum of three. */
template <class C> DEVICE bool exceeds(const float (&exponent)[8][C::COLUMNS]) {
    int most = __float_as_int(exponent[0][0]);
#pragma unroll
    for (int k = 1; k < 8 * C::COLUMNS; k += 2)
        most = __vimax3_s32(most, __float_as_int(exponent[k % 8][k / 8]),
                            __float_as_int(exponent[(k + 1) % 8 * (k + 1 < 8 * C::COLUMNS)][(k + 1) / 8 % C::COLUMNS]));
    return most > __float_as_int(RAISE_ABOVE);
}

/* Scores of what some query does not see are masked, and parameters of values that do not exist cleared: codes are
 * numbers whatever they are. */
template <class C>
DEVICE void mask_tile(const DecodeParams &p, const Control &ctl, uint8_t *value_params, int page, int lane,
                      float (&score)[8][C::COLUMNS]) {
    const int length = ctl.place.length, t_first = length - p.n_q_tokens, position = 64 * page + (lane >> 2);
    const int head = divide(ctl.place.part, p.row_tiles, p.row_tiles_magic);
    const int first_row = (ctl.place.part - head * p.row_tiles) * C::ROWS;
    const Span last = visible(p, ITEM_TILE, length - 1);
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
        const Span see = visible(p, ITEM_TILE, t_first + column_token<C>(p, first_row, i, lane));
#pragma unroll
        for (int n = 0; n < 8; n++)
            if (position + 8 * n < see.first || position + 8 * n >= see.last) score[n][i] = MASKED;
    }
#pragma unroll
    for (int n = 0; n < 8; n++)
        if ((lane & 3) == 0 && position + 8 * n >= last.last)
#pragma unroll
            for (int k = 0; k < C::G; k++)
                *reinterpret_cast<uint32_t *>(value_params + 256 * k + 64 * (n >> 1) + 8 * (lane >> 2) + 4 * (n & 1)) = 0;
    fence_before_copies(); /* the next tile comes here by another way than these stores */
    __syncwarp();
}

/* score: what the scores begin with, see begin_scores(). */
template <class C, int MODE, class BIAS>
DEVICE void attend_tile(Rows<C> &r, const DecodeParams &p, const Control &ctl, uint8_t *tile, int page, bool masked,
                        float (&score)[8][C::COLUMNS], BIAS &bias) {
    const int lane = threadIdx.x & 31;
    uint8_t *params = tile + 32 * C::D;
    const uint8_t *high = tile + C::LOW_TILE;
#pragma unroll
    for (int first = 0; first < 4; first += C::SIDE_BY_SIDE) {
        constexpr int N = C::SIDE_BY_SIDE;
        const uint8_t *keys = tile + first * 4 * C::D;
        if constexpr (C::BYTES) {
            uint32_t x[N][2 * C::W];
            float dot[N][C::G][C::COLUMNS][2];
#pragma unroll
            for (int k = 0; k < N; k++) load_words<C::W>(keys + k * 4 * C::D, lane, x[k]);
            bias.products(first);
            byte_products<C, N>(r, x, dot);
#pragma unroll
            for (int k = 0; k < N; k++) {
                bias.begin(first + k, &score[2 * (first + k)]);
                add_dots<C>(r, dot[k], params + 64 * (first + k), lane, BIAS::key_unit(r), &score[2 * (first + k)]);
            }
            continue;
        }
        float c[N][C::G][C::TILES][4];
        if (!C::HIGH || p.bits_k == 2)
            code_products<C, 2, N>(r, keys, high, lane, c);
        else if (p.bits_k == 3)
            code_products<C, 3, N>(r, keys, high + first * high_sub_tile<C>(3), lane, c);
        else
            code_products<C, 4, N>(r, keys, high + first * high_sub_tile<C>(4), lane, c);
#pragma unroll
        for (int k = 0; k < C::SIDE_BY_SIDE; k++) {
            const int n = first + k;
            add_products<C>(r, c[k], params + 64 * n, lane, &score[2 * n]);
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
    params += 256 * C::G;
    if (masked) mask_tile<C>(p, ctl, params, page, lane, score);
    float exponent[8][C::COLUMNS];
    exponents<C>(r, score, exponent);
    if (__any_sync(FULL_WARP, exceeds<C>(exponent))) {
        raise_maximum<C, 8>(r, score);
        exponents<C>(r, score, exponent);
    }
    if (C::HIGH && p.bits_k > 2) high += 4 * high_sub_tile<C>(p.bits_k);
    const int high_step = C::HIGH ? high_sub_tile<C>(p.bits_v) : 0;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        float prob[2][C::COLUMNS];
#pragma unroll
        for (int i = 0; i < C::COLUMNS; i++) {
            prob[0][i] = exp2_fast(exponent[2 * n][i]);
            prob[1][i] = exp2_fast(exponent[2 * n + 1][i]);
        }
        weigh_values<C>(r, tile + 16 * C::D + n * 4 * C::D, high + n * high_step, p.bits_v, params + 64 * n, lane, prob,
                        FULL_WARP, FULL_WARP);
    }
}

/* --- a unit of 8 BF16 tokens ------------------------------------------------------------------- */

/* Four rows: queries of units as B operands [D / 32, 32, 4 words], high bf16 halves in even columns and low ones in odd, in
 * s.query, once that is not needed any more. */
template <class C> DEVICE void split_query(const SegmentData<C> &s) {
    constexpr int PAIRS = C::ROWS * C::D / 2, EACH = (PAIRS + C::THREADS - 1) / C::THREADS;
    uint32_t high[EACH], low[EACH];
#pragma unroll
    for (int v = 0; v < EACH; v++) {
        const int i = min(thread_index() + v * C::THREADS, PAIRS - 1), row = i / (C::D / 2);
        const float2 x = *reinterpret_cast<const float2 *>(s.query + row * C::QUERY_STRIDE + 2 * (i % (C::D / 2)));
        high[v] = pack_bf162(x.x, x.y);
        low[v] = pack_bf162(x.x - bf16_low(high[v]), x.y - bf16_high(high[v]));
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < EACH; v++) {
        const int i = thread_index() + v * C::THREADS, row = i / (C::D / 2), at = i % (C::D / 2);
        if (i >= PAIRS) continue;
        uint32_t *to = reinterpret_cast<uint32_t *>(s.query) + (at / 16 * 32 + 8 * row + at / 4 % 4) * 4 + at % 4;
        to[0] = high[v];
        to[16] = low[v];
    }
    __syncthreads();
}

/* q.k of 8 tokens, of queries split so. */
template <class C> DEVICE void score_four(const SegmentData<C> &s, const uint8_t *keys, int lane, float (&c)[C::TILES][4]) {
    const uint4 *query = reinterpret_cast<const uint4 *>(s.query) + lane;
    float d[4] = {0, 0, 0, 0}; /* two chains side by side */
    c[0][0] = c[0][1] = c[0][2] = c[0][3] = 0;
#pragma unroll 1
    for (int m = 0; m < C::D / 32; m++) {
        const uint4 x = *reinterpret_cast<const uint4 *>(keys + (lane >> 2) * 2 * C::D + m * 64 + (lane & 3) * 16);
        const uint4 q = query[m * 32];
        mma_bf16(c[0], x.x, 0u, x.y, 0u, q.x, q.y);
        mma_bf16(d, x.z, 0u, x.w, 0u, q.z, q.w);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) c[0][k] += d[k];
}

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

/* Scores of 8 tokens from `position` on to weights, and these times the values. Rows that no query from position
 * `query` to the last one sees may never have been written. */
template <class C>
DEVICE void weigh_unit(Rows<C> &r, const DecodeParams &p, const uint8_t *values, int lane, const float (&score)[1][C::COLUMNS],
                       int kind, int position, int query, int length) {
    raise_maximum<C, 1>(r, score);
    float prob[C::COLUMNS];
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
        prob[i] = exp2_fast(fmaf(score[0][i], r.scale[i], -(r.row_max[i] * r.scale[i])));
        r.row_sum[i] += prob[i];
    }
    const int first = visible(p, kind, query).first, last = visible(p, kind, length - 1).last;
    const int token = position + 2 * (lane & 3);
    const uint32_t keep = (token >= first && token < last ? 0x0000ffffu : 0u) |
                          (token + 1 >= first && token + 1 < last ? 0xffff0000u : 0u);
    value_unit<C>(r, values, lane, prob, keep);
}

template <class C, int MODE>
DEVICE void attend_unit(Rows<C> &r, uint8_t *area, const DecodeParams &p,
                        const uint8_t *unit, int kind, int position, int length, int first_row,
                        int warp, int lane, Bias<C, MODE> &start) {
    const int g = lane >> 2, t_first = length - p.n_q_tokens;
    const SegmentData<C> s = segment_data<C>(area, MODE == MODE_PLAIN ? 0 : p.bias_steps);
    float c[C::TILES][4], score[1][C::COLUMNS];
    if constexpr (C::FOUR_ROWS) score_four<C>(s, unit, lane, c);
    else score_unit<C>(s, unit, lane, c);
    if constexpr (MODE != MODE_PLAIN) start.of_unit(r, s, p, position, warp, lane, score[0]);
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
        const int j = i >> 1;
        const float dot = j < C::FULL ? c[j][i & 1] : c[j][0] + c[j][1];
        float x = fmaf(dot, r.unit[i], MODE == MODE_PLAIN ? 0.0f : score[0][i]);
        if (MODE == MODE_BIAS_CAP && p.softcap_log2 > 0) x = soft_cap(x, r.scale[i], p.softcap_log2);
        const Span see = visible(p, kind, t_first + column_token<C>(p, first_row, i, lane));
        score[0][i] = position + g < see.first || position + g >= see.last ? MASKED : x;
    }
    weigh_unit<C>(r, p, unit + C::UNIT, lane, score, kind, position, max(t_first, 0), length);
}

#endif
