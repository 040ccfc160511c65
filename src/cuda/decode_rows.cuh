/*
 * decode_rows.cuh - query rows of one KV head against a tile of quantised tokens or a unit of BF16
 * tokens, on one warp.
 *
 * Codes are the A operand of an MMA (tokens for keys, channels for values), queries and probabilities the B operand.
 * Steps and offsets stay outside: logit = s (q.c) + m sum(q); output = sum (p s) c + sum p m. A code at bit 2 i of a
 * 16-bit half, read as fp16, is the subnormal c 4^i 2^-24 (m16n8k16): values pay for 4^i at the end, keys of more than
 * two bits in the query (scaled by 4^-i, exact). Two-bit keys are bytes, and the query an integer of 16 bits in two bytes
 * (m16n8k32): half of the masks and no shift.
 *
 * Rows and columns. Column n of an MMA is a row of the query block. A full column tile j holds rows
 * 8 j + (n >> 1) + 4 (n & 1), so that lane t of a quad owns rows t, 4 + t, 8 + t, ...: one score
 * column i is row 4 i + t. When the rows are an odd number of fours the last column tile is half:
 * row 8 j + (n >> 1) for even and odd n; keys of more than two bits put the query's low half there (the sum of
 * both columns has 22 bits), values half of the tokens. The byte products of four rows have the query's high byte in
 * even columns and the low one in odd, column n being row n >> 1: their score column is the lane's row too.
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
    /* Codes of 2 bits are bytes in keys' products, see byte_products(). B operands of the query a lane: of a column tile,
     * or, as bytes, of four rows. */
    static constexpr bool BYTES = !HIGH;
    /* Their sums: codes 2 and 3 have their own, or are shifted, which is a third more operations on codes but fewer on sums. */
    static constexpr int SUMS = COLUMNS > 2 ? 1 : 2;
    static constexpr int QUERY_TILES = BYTES ? COLUMNS : TILES, QUERY_WORDS = BYTES ? STEPS : 2 * STEPS;
    /* Where units are long beside tiles: their queries are split once a segment, and they count for more (decode_work.cuh). */
    static constexpr bool FOUR_ROWS = FULL == 0;
    static constexpr int UNIT = 16 * D; /* bytes of 8 bf16 rows of one side */
    static constexpr int LOW_TILE = 32 * D + 512 * G;
    static constexpr int STAGE = LOW_TILE + (HIGH ? 2048 * W : 0);
    static constexpr bool BULK = WARPS * STAGES * STAGE > 100000; /* made for devices with bulk copies */
    /* Sub-tiles whose products interleave. */
    static constexpr int SIDE_BY_SIDE = COLUMNS * G > 1 || WARPS > 12 || HIGH ? 2 : 4;
    static constexpr int QUERY_STRIDE = D + 4; /* floats; the padding spreads rows over the banks */
    /* Pages whose key bias is made at once: the warp's next page is in the odd columns, with at most 4 rows, or lies
     * mirrored to this one about the middle between them (MIRRORED, where shared memory has room for that table). */
    static constexpr bool MIRRORED = FULL > 0 && BULK && !HIGH && D <= 128, RUNS = false, FEW = false;
    static constexpr int RUN = 0;
    static constexpr int COLUMN_PAGES = FULL == 0 ? 2 : 1, BIAS_PAGES = FULL == 0 || MIRRORED ? 2 : 1;
    static constexpr int BIAS_STRIDE = BIAS_PAGES * WARPS; /* pages from one making to the next */
    static constexpr int BIAS_BLOCKS = MIRRORED ? 4 : 2;   /* of 16 rows of the table */
    static constexpr int BIAS_STEPS = TILES == 1 && D <= 128 && !MIRRORED ? D / 16 : 0; /* that registers have room for */
};

/* The same with more than 16 pairs whose bias is made of a table for a run of pages (decode_runs.cuh). */
template <class C> struct Runs : C {
    static constexpr bool RUNS = true, MIRRORED = false;
    static constexpr int BIAS_PAGES = 1, BIAS_STRIDE = C::WARPS, BIAS_BLOCKS = 2, BIAS_STEPS = 0, RUN = RUN_PAGES;
};
/* Up to 16 pairs by runs of pages (decode_few.cuh). */
template <class C> struct FewRuns : Runs<C> {
    static constexpr bool FEW = true;
    static constexpr int RUN = FEW_RUN;
};

#define MASKED -3.0e38f
#define NO_MAXIMUM -1.0e30f
#define CODE_UNIT 5.9604644775390625e-08f /* 2^-24 */
/* The running maximum is raised when a score exceeds it by more than this (log2): p stays <= 32, so
 * that p times a step below 2047 is an fp16 number. */
#define RAISE_ABOVE 5.0f

/* C::RUNS: the key bias is in the unit of raw scores of its row, times this, and raw scores are over the head's unit. A channel
 * of a query is below 2^10 before it is rotated and nu at most 16, so that the query's unit, at most 2^14 (2^10 with one sum),
 * makes an fp16 number of their product. (The largest of 128 rotated channels is at least a 16th of the largest before, so a
 * row's unit is less.) */
template <class C> __host__ __device__ constexpr float run_unit() { return C::SUMS == 2 ? 1.0f / 8192 : 1.0f / 512; }

/* C::FEW: the table has run_unit() and the head's unit, as far as fp16 numbers can, so that the bias is in the unit of raw
 * scores. What is left of the head's unit. */
DEVICE float few_excess(float unit) {
    return unit > FEW_MOST ? unit * (1.0f / FEW_MOST) : unit < FEW_LEAST ? unit * (1.0f / FEW_LEAST) : 1.0f;
}

template <class C> struct Rows {
    uint32_t q[C::QUERY_TILES][C::QUERY_WORDS / 4][4]; /* B operands */
    float unit[C::COLUMNS];          /* a row's query, times its scale, to raw: of the keys' products */
    float scale[C::COLUMNS];         /* raw scores to log2 */
    float q_sum[C::COLUMNS][C::G];   /* sum of the query's channels, raw */
    float q_const[C::COLUMNS];       /* q . mean, raw, where there may be a soft cap; otherwise see merge_segment() */
    float row_max[C::COLUMNS];       /* raw */
    float row_sum[C::COLUMNS];       /* this lane's tokens only */
    float offset_sum[C::COLUMNS][C::G]; /* sum of p m, this lane's tokens only */
    float bias_unit[C::COLUMNS];     /* products of the key bias to raw scores */
    float key_unit;                  /* C::RUNS without C::FEW: keys' products to raw scores; in `unit` already */
    float acc[C::TILES][C::STEPS][4];
};

/* The part of shared memory that lives as long as a segment. */
template <class C> struct SegmentData {
    uint32_t *fragments; /* [QUERY_TILES, QUERY_WORDS / 4, 32, 4] rotated queries as B operands */
    float *query;       /* [ROWS, QUERY_STRIDE] rotated, times the row's scale; then what split_query() makes of it */
    float *query_scale; /* [ROWS] a power of two */
    float *query_mean;  /* [ROWS] q . mean */
    float *query_unit;  /* [ROWS] of the bytes of the fragments, in a raw score */
    float4 *bias_stride; /* [steps, 4] turns of a lane's two pairs by BIAS_STRIDE pages: cos, sin */
    float *bias_unit;   /* [1] a power of two that nu was divided by */
    int *bias_sums;     /* [16] of |z| of the row's pairs, in log2, times SUM_UNIT; C::FEW: [2, 16] of 8 pairs each */
    float2 *bias_row;   /* [ROWS] products of the bias to raw scores, q_const */
    uint4 *bias_table;  /* [steps / 2, E and O, high and low, BIAS_BLOCKS, 32] */
    float4 *bias_query; /* [steps, TILES, 32] conj(q) nu of the two pairs of a lane, times the row's scale */
    unsigned long long *bias_turn; /* [8 steps] */
    float4 *bias_phase;            /* [WARPS, COLUMN_PAGES, 4 steps] */
    float4 *bias_own;              /* [WARPS, bias_own(), 32] what lanes leave for themselves */
    /* C::RUNS, which has the table of runs, run_lines(), in place of bias_table: */
    uint4 *run_query;   /* [(steps - 2) / 2, TILES, 32] bias_query of the slow pairs of two steps as halves */
    uint32_t *run_half; /* [8 steps] turns of half a page, 32 bits after the point */
    uint4 *run_own;     /* [WARPS, run_own(), 32] what lanes leave for themselves: B operands */
    uint4 *run_low;     /* C::FEW, where biases are large: [WARPS, few_low(), 32] in place of half of the table and of run_own */
};


template <class C> __host__ __device__ constexpr int bias_step_bytes() {
    return C::BIAS_BLOCKS * 1024 + C::TILES * 512 + 64 + 64 + C::WARPS * C::COLUMN_PAGES * 64;
}

/* Bytes of what a segment has without a bias too. */
template <class C> __host__ __device__ constexpr int query_bytes() {
    return (C::ROWS * C::QUERY_STRIDE + 100 + C::QUERY_TILES * C::QUERY_WORDS * 32) * 4;
}
/* Lines of four floats a lane that a mirroring kernel keeps in shared memory, since registers are too few: up to 16 pairs
 * z, then as much of what the second page's scores begin with as there is room for. */
template <class C> __host__ __device__ constexpr int bias_own(int steps) {
    if (!C::MIRRORED || steps == 0) return 0;
    if (steps <= 2) return 2 * C::TILES + 2 * C::COLUMNS;
    const int taken = C::WARPS * C::STAGES * (C::STAGE + 8) + 256 + query_bytes<C>() + C::D / 16 * bias_step_bytes<C>();
    const int room = (227 * 1024 - taken) / (C::WARPS * 512);
    return room < 2 * C::COLUMNS ? room : 2 * C::COLUMNS;
}

/* C::RUNS: lines of four words a lane, and bytes of what the bias takes in all. */
template <class C> __host__ __device__ constexpr int run_own() { return 3 * C::TILES; }
/* C::FEW: the same where biases are not large, and where they are: operands, and scores of the second page of two; lines of
 * either table. */
template <class C> __host__ __device__ constexpr int few_own() { return C::TILES; }
template <class C> __host__ __device__ constexpr int few_low() { return 2 * C::TILES + 2 * C::COLUMNS; }
#define FEW_LINES (2 * FEW_RUN * 128)
#define FEW_LOW_LINES (FEW_SHORT * 256)
template <class C> __host__ __device__ constexpr int few_lines() {
    const int high = FEW_LINES + C::WARPS * few_own<C>() * 32, low = FEW_LOW_LINES + C::WARPS * few_low<C>() * 32;
    return high > low ? high : low;
}
template <class C> __host__ __device__ constexpr int run_bytes(int steps) {
    if (C::FEW) return few_lines<C>() * 16 + 2 * C::TILES * 512 + 16 * 8 + 16 * 4 + C::WARPS * 256;
    return run_lines(steps, true) * 16 + steps * (C::TILES * 512 + 64 + 32 + C::WARPS * 64) + (steps - 2) * C::TILES * 256 +
           C::WARPS * run_own<C>() * 512;
}

template <class C> DEVICE SegmentData<C> segment_data(uint8_t *area, int steps) {
    SegmentData<C> s;
    s.bias_table = reinterpret_cast<uint4 *>(area);
    s.bias_query = reinterpret_cast<float4 *>(s.bias_table + steps * C::BIAS_BLOCKS * 64);
    s.bias_stride = s.bias_query + steps * C::TILES * 32;
    s.bias_turn = reinterpret_cast<unsigned long long *>(s.bias_stride + steps * 4);
    s.bias_phase = reinterpret_cast<float4 *>(s.bias_turn + steps * 8);
    s.fragments = reinterpret_cast<uint32_t *>(s.bias_phase + C::WARPS * C::COLUMN_PAGES * steps * 4);
    if constexpr (C::FEW) {
        s.run_own = s.bias_table + FEW_LINES;
        s.run_low = s.bias_table + FEW_LOW_LINES;
        s.bias_query = reinterpret_cast<float4 *>(s.bias_table + few_lines<C>());
        s.bias_phase = s.bias_query + 2 * C::TILES * 32;
        s.bias_turn = reinterpret_cast<unsigned long long *>(s.bias_phase + C::WARPS * 16);
        s.run_half = reinterpret_cast<uint32_t *>(s.bias_turn + 16);
        s.fragments = s.run_half + 16;
    } else if constexpr (C::RUNS) {
        s.bias_query = reinterpret_cast<float4 *>(s.bias_table + run_lines(steps, true));
        s.bias_turn = reinterpret_cast<unsigned long long *>(s.bias_query + steps * C::TILES * 32);
        s.bias_phase = reinterpret_cast<float4 *>(s.bias_turn + steps * 8);
        s.run_own = reinterpret_cast<uint4 *>(s.bias_phase + C::WARPS * steps * 4);
        s.run_query = s.run_own + C::WARPS * run_own<C>() * 32;
        s.run_half = reinterpret_cast<uint32_t *>(s.run_query + (steps - 2) * C::TILES * 16);
        s.fragments = s.run_half + steps * 8;
    }
    s.query = reinterpret_cast<float *>(s.fragments + C::QUERY_TILES * C::QUERY_WORDS * 32);
    s.query_scale = s.query + C::ROWS * C::QUERY_STRIDE;
    s.query_mean = s.query_scale + 16;
    s.query_unit = s.query_mean + 16;
    s.bias_unit = s.query_unit + 16;
    s.bias_sums = reinterpret_cast<int *>(s.bias_unit + 4);
    s.bias_row = reinterpret_cast<float2 *>(s.bias_sums + 16);
    s.bias_own = reinterpret_cast<float4 *>(s.bias_row + 16);
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

/* One warp: the queries of four rows as B operands of byte_products(), in units of a row's largest channel over 32,512,
 * high bytes in even columns and low ones in odd. */
template <class C, int MODE> DEVICE void put_byte_query(const SegmentData<C> &s, int four, int lane) {
    constexpr int A_GROUP = C::WORDS_A_GROUP;
    const int row = 4 * four + (lane >> 3);
    const float4 *query = reinterpret_cast<const float4 *>(s.query + row * C::QUERY_STRIDE) + (lane & 3) * 4 * A_GROUP;
    float4 x[C::W][4];
    float top = 1e-20f;
#pragma unroll
    for (int w = 0; w < C::W; w++)
#pragma unroll
        for (int v = 0; v < 4; v++) {
            const float4 f = x[w][v] = query[32 * (w / A_GROUP) + 4 * (w % A_GROUP) + v];
            top = fmaxf(top, fmaxf(fmaxf(fabsf(f.x), fabsf(f.y)), fmaxf(fabsf(f.z), fabsf(f.w))));
        }
    top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
    top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
    float up = __fdividef(32512.0f, top);
    if (C::FEW) up = fminf(up, 1024.0f / fmaxf(few_excess(*s.bias_unit), 1.0f));
    else if (C::RUNS) up = fminf(up, 1024.0f); /* see run_unit() */
    if ((lane & 7) == 0) {
        const float unit = C::SUMS == 2 ? 16.0f * up : up;
        s.query_unit[row] = unit;
        const float mean = MODE == MODE_BIAS_CAP ? s.query_mean[row] * s.query_scale[row] * unit : 0.0f;
        if (MODE != MODE_PLAIN && !C::RUNS) s.bias_row[row] = make_float2(*s.bias_unit * unit, mean);
    }
    /* Rounded to an integer above 2^23: the high byte is the second one once 128 is added. */
    const float round = 12582912.0f + (lane & 4 ? 0.0f : 128.0f);
    const uint32_t take = lane & 4 ? 0x0040 : 0x0051;
    uint32_t q[C::QUERY_WORDS];
#pragma unroll
    for (int w = 0; w < C::W; w++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float scale = i & 1 ? up * 0.25f : up;
            uint32_t u[4];
#pragma unroll
            for (int v = 0; v < 4; v++) {
                const float4 f = x[w][v];
                u[v] = __float_as_uint(fmaf(i == 0 ? f.x : i == 1 ? f.y : i == 2 ? f.z : f.w, scale, round));
            }
            q[(w / A_GROUP * 2 + i / 2) * 2 * A_GROUP + (i & 1) * A_GROUP + w % A_GROUP] =
                __byte_perm(__byte_perm(u[0], u[1], take), __byte_perm(u[2], u[3], take), 0x5410);
        }
#pragma unroll
    for (int v = 0; v < C::QUERY_WORDS / 4; v++)
        reinterpret_cast<uint4 *>(s.fragments)[(four * (C::QUERY_WORDS / 4) + v) * 32 + lane] =
            make_uint4(q[4 * v], q[4 * v + 1], q[4 * v + 2], q[4 * v + 3]);
}

/* q.c of 16 tokens by words of codes x, codes and query as bytes: a code at bit 2 i of a byte is c 4^i. Codes 0 and 1
 * make one sum, 2 and 3, which have 16 times as much, another, or are shifted to where the others are; odd ones pay for 4 in
 * the query. dot: raw, of tokens g and g + 8. */
template <class C> DEVICE void byte_dots(const int (&c)[C::SUMS][4], float (&dot)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int high = c[0][2 * h], low = c[0][2 * h + 1];
        if (C::SUMS == 2) {
            high = high * 16 + c[C::SUMS - 1][2 * h];
            low = low * 16 + c[C::SUMS - 1][2 * h + 1];
        }
        dot[h] = static_cast<float>(high * 256 + low);
    }
}
template <class C, int N>
DEVICE void byte_products(const Rows<C> &r, const uint32_t (&x)[N][2 * C::W], float (&dot)[N][C::G][C::COLUMNS][2]) {
    constexpr int A_GROUP = C::WORDS_A_GROUP;
    int c[N][C::G][C::COLUMNS][C::SUMS][4];
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int k = 0; k < C::G * C::COLUMNS * C::SUMS * 4; k++)
            c[n][k / 4 / C::SUMS / C::COLUMNS][k / 4 / C::SUMS % C::COLUMNS][k / 4 % C::SUMS][k % 4] = 0;
#pragma unroll
    for (int m = 0; m < A_GROUP; m++)
#pragma unroll
        for (int k = 0; k < 2 * C::G; k++) /* group and pair of codes */
#pragma unroll
            for (int n = 0; n < N; n++) {
                const int w0 = k / 2 * A_GROUP + 2 * m % A_GROUP, w1 = k / 2 * A_GROUP + (2 * m + 1) % A_GROUP;
                const int down = C::SUMS == 1 ? k % 2 * 4 : 0;
                const uint32_t mask0 = 0x03030303u << (2 * (k % 2 * 2 + 2 * m / A_GROUP) - down);
                const uint32_t mask1 = 0x03030303u << (2 * (k % 2 * 2 + (2 * m + 1) / A_GROUP) - down);
                const uint32_t a[4] = {x[n][w0] >> down & mask0, x[n][C::W + w0] >> down & mask0, x[n][w1] >> down & mask1,
                                       x[n][C::W + w1] >> down & mask1};
                const int b = k * 2 * A_GROUP + 2 * m;
#pragma unroll
                for (int i = 0; i < C::COLUMNS; i++)
                    mma_bytes(c[n][k / 2][i][k % C::SUMS], a[0], a[1], a[2], a[3], r.q[i][b / 4][b % 4],
                              r.q[i][(b + 1) / 4][(b + 1) % 4]);
            }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int k = 0; k < C::G * C::COLUMNS; k++)
            byte_dots<C>(c[n][k / C::COLUMNS][k % C::COLUMNS], dot[n][k / C::COLUMNS][k % C::COLUMNS]);
}

/* Sums of the query's channels as the products see them: a product with ones in place of the codes. */
template <class C> DEVICE void sum_query(Rows<C> &r) {
    if constexpr (C::BYTES) {
        uint32_t ones[1][2 * C::W];
        float dot[1][C::G][C::COLUMNS][2];
#pragma unroll
        for (int k = 0; k < 2 * C::W; k++) ones[0][k] = 0x55555555u;
        byte_products<C, 1>(r, ones, dot);
#pragma unroll
        for (int k = 0; k < C::G * C::COLUMNS; k++) r.q_sum[k / C::G][k % C::G] = dot[0][k % C::G][k / C::G][0];
    } else {
#pragma unroll
        for (int n = 0; n < C::TILES * C::G; n++) {
            const int j = n / C::G, k = n % C::G;
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
}

/* Takes the query fragments and all per-row constants; clears the accumulators. */
template <class C, int MODE>
DEVICE void start_rows(Rows<C> &r, const SegmentData<C> &s, float scale_log2, int lane) {
    const int t = lane & 3;
    const uint32_t fragments = shared_address(s.fragments) + 16 * lane;
#pragma unroll
    for (int v = 0; v < C::QUERY_TILES * C::QUERY_WORDS / 4; v++)
        load_shared(r.q[v / (C::QUERY_WORDS / 4)][v % (C::QUERY_WORDS / 4)], fragments + v * 512);
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) r.unit[i] = C::BYTES ? s.query_unit[4 * i + t] : CODE_UNIT;
    sum_query<C>(r);
    if constexpr (C::RUNS && !C::FEW) { /* the head's unit is a power of two */
        r.key_unit = __int_as_float(0x7f000000 - __float_as_int(*s.bias_unit * (1.0f / run_unit<C>())));
#pragma unroll
        for (int i = 0; i < C::COLUMNS; i++) r.unit[i] *= r.key_unit;
#pragma unroll
        for (int i = 0; i < C::COLUMNS * C::G; i++) r.q_sum[i / C::G][i % C::G] *= r.key_unit;
    }
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
        const float up = s.query_scale[4 * i + t];
        r.scale[i] = __fdividef(scale_log2, up * r.unit[i]);
        r.q_const[i] = MODE == MODE_BIAS_CAP ? s.query_mean[4 * i + t] * up * r.unit[i] : 0.0f;
        if (MODE != MODE_PLAIN) r.bias_unit[i] = *s.bias_unit * r.unit[i];
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
    bool some = false;
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
        top[i] = fmaxf(top[i], r.row_max[i]);
#pragma unroll
        for (int d = 4; d < 32; d <<= 1)
            top[i] = fmaxf(top[i], __shfl_xor_sync(FULL_WARP, top[i], d));
        factor[i] = exp2_fast((r.row_max[i] - top[i]) * r.scale[i]);
        some |= r.row_max[i] > NO_MAXIMUM;
        r.row_max[i] = top[i];
        r.row_sum[i] *= factor[i];
#pragma unroll
        for (int k = 0; k < C::G; k++) r.offset_sum[i][k] *= factor[i];
    }
    /* Nothing is summed yet: most warps raise it only then, and code that is cold takes long. (With three columns it cost the loop
     * over tiles 1 %, by other registers.) */
    if (C::COLUMNS <= 2 && !__any_sync(FULL_WARP, some)) return;
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

#endif
