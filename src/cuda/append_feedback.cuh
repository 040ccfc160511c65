/*
 * append_feedback.cuh - error feedback of 32 rows by two warps, on tensor cores: head_dim 128.
 *
 * A lane of the first warp has a row. It rounds sixteen channels in a chain of its own, each channel aiming at what the
 * errors above it leave; then the warp takes what all errors mean for the next sixteen channels from products of errors
 * with B. The second warp makes the products that refits and gain need meanwhile. Errors and B are fp16 numbers with an fp16
 * remainder, scaled by powers of two, so a product is good to 2^-22; codes are exact.
 *
 * That is not the CPU's order of sums, so what is left to round of a channel may be off by some units in its last place.
 * A code depends on that only where it is next to a threshold: a lane that comes closer to one than the sums are exact
 * (once in some thousand rows) has its sixteen channels made again, in the CPU's order. So the codes of a round are
 * those of the CPU. Sums for refits and gain, which are rounded to fp16, are good to some 1e-7 instead.
 *
 * Those sums need V = c B and Y = x B alone: the residual (x - x^) B is Y - s V - m 1 B. V and Y are products too; Y waits
 * in local memory.
 */
#ifndef OSCAR_CUDA_APPEND_FEEDBACK_CUH
#define OSCAR_CUDA_APPEND_FEEDBACK_CUH

#include "append_input.cuh"
#include "append_rows.cuh"

#define FEEDBACK_MARGIN 9.5367432e-7f /* 2^-20: how far sums may be off, of what is near a threshold */

/* One head's metric in shared memory, as pack_feedback_metric() of layer.cu leaves it. */
struct FeedbackMetric {
    uint32_t pieces;     /* shared address of [36][2][32] uint4: 16 x 16 channels (k, b) of B, b <= k, at k (k + 1) / 2 + b:
                            fp16 numbers, then remainders, in the order in which mma.m16n8k16 takes two B operands */
    const float *inner;  /* [8][120] B within 16 channels: row 15 columns 14 .. 0, row 14 columns 13 .. 0, ... */
    const float *d, *ones; /* [128] */
    float ones_ones, unscale; /* unscale: what products with pieces are to be multiplied with */

    DEVICE explicit FeedbackMetric(const float *packed)
        : pieces(shared_address(packed)), inner(packed + 9216), d(inner + 960), ones(d + 128), ones_ones(ones[128]),
          unscale(ones[129]) {}
};

/* Values a lane that the warps hand each other. */
enum { HAND_UNSCALE, HAND_STEP, HAND_OFFSET, HAND_CC, HAND_C1, HAND_RC, HAND_R1, HAND_YR, HAND_YC, HAND_YY, HAND_Y1, N_HAND };

/* Shared memory of the 32 rows. */
struct FeedbackRows {
    const uint32_t *x; /* [64][32] bf16, two channels a word */
    uint8_t *c;        /* [8][2][32][8] halves: codes in units of 2^bits */
    uint8_t *e;        /* [8][2][2][32][8] halves: errors, then their remainders; a block's sums until it has errors */
    uint8_t *halves;   /* [8][2][32][8] halves: x */
    float *hand;       /* [N_HAND][32] */
    int pair;          /* of warps */

    /* Both warps come here. */
    DEVICE void meet() const { asm volatile("bar.sync %0, 64;" ::"r"(1 + pair) : "memory"); }
    DEVICE float x_at(int row, int i) const {
        const uint32_t both = x[(i >> 1) * 32 + row];
        return i & 1 ? bf16_high(both) : bf16_low(both);
    }
};

/* --- products ------------------------------------------------------------------------------------ */

/* An A operand: 16 x 16 halves, in shared memory in two pieces of [32][8], of which this takes rows 0 .. 15. */
DEVICE void load_rows(uint32_t (&r)[4], uint32_t address) {
    const int lane = threadIdx.x & 31;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address + (lane >> 4) * 512 + (lane & 15) * 16)
                 : "memory");
}

/* c = a b. Sums of steps are added outside of the tensor cores, which cut what they add. */
DEVICE void product_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
                 : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

/* Rows 16 m + 8 h + g, columns 8 n + 2 t + e of 32 x 16 are at [m][n][2 h + e] of lane 4 g + t. */
using Sums = float[2][2][4];

DEVICE void clear(Sums &sum) {
#pragma unroll
    for (int k = 0; k < 16; k++) sum[k / 8][k / 4 % 2][k % 4] = 0;
}
DEVICE void add(Sums &sum, const Sums &other) {
#pragma unroll
    for (int k = 0; k < 16; k++) sum[k / 8][k / 4 % 2][k % 4] += other[k / 8][k / 4 % 2][k % 4];
}

/* 32 x 16 times 16 x 16: the sums of both. b: as a piece has it. */
DEVICE void multiply(Sums &fresh, const uint32_t (&a)[2][4], const uint32_t (&b)[4]) {
#pragma unroll
    for (int k = 0; k < 4; k++) product_f16(fresh[k / 2][k % 2], a[k / 2], b[2 * (k % 2)], b[2 * (k % 2) + 1]);
}
/* The same, added to sum on the tensor cores: for what is small. */
DEVICE void multiply_add(Sums &sum, const uint32_t (&a)[2][4], const uint32_t (&b)[4]) {
#pragma unroll
    for (int k = 0; k < 4; k++)
        mma_f16(sum[k / 2][k % 2], a[k / 2][0], a[k / 2][1], a[k / 2][2], a[k / 2][3], b[2 * (k % 2)], b[2 * (k % 2) + 1]);
}

/* Sixteen channels of 32 rows of halves. */
DEVICE void load_block(uint32_t (&a)[2][4], uint32_t address) {
    load_rows(a[0], address);
    load_rows(a[1], address + 256);
}

/* A piece of B. */
struct Piece {
    uint32_t numbers[4], remainders[4];

    DEVICE Piece(const FeedbackMetric &metric, int k, int b) {
        const uint32_t address = metric.pieces + 1024 * (k * (k + 1) / 2 + b) + 16 * (threadIdx.x & 31);
        load_shared(numbers, address);
        load_shared(remainders, address + 512);
    }
};

/* Sums over the four lanes of a row, from where products are to the lane that has the row. v: of rows 8 k + g. */
DEVICE float sum_of_row(const float (&v)[4]) {
    const int lane = threadIdx.x & 31;
    const bool two = lane & 2, one = lane & 1;
    const float a = (two ? v[2] : v[0]) + __shfl_xor_sync(FULL_WARP, two ? v[0] : v[2], 2);
    const float b = (two ? v[3] : v[1]) + __shfl_xor_sync(FULL_WARP, two ? v[1] : v[3], 2);
    const float sum = (one ? b : a) + __shfl_xor_sync(FULL_WARP, one ? a : b, 1);
    return __shfl_sync(FULL_WARP, sum, 4 * (lane & 7) + (lane >> 3));
}

/* --- halves -------------------------------------------------------------------------------------- */

/* A power of two that brings numbers up to `largest` below 2^14, and its inverse. */
DEVICE void scale_to_halves(float largest, float *scale, float *inverse) {
    const int exponent = max(static_cast<int>(__float_as_uint(largest) >> 23), 27);
    *scale = __uint_as_float(static_cast<uint32_t>(267 - exponent) << 23);
    *inverse = __uint_as_float(static_cast<uint32_t>(exponent - 13) << 23);
}

/* This lane's sixteen numbers to two pieces of [32][8] halves; leaves remainders in v. */
DEVICE void store_halves(uint8_t *to, float (&v)[16]) {
    uint32_t words[8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const __half2 both = __floats2half2_rn(v[2 * k], v[2 * k + 1]);
        const float2 back = __half22float2(both);
        words[k] = half2_bits(both);
        v[2 * k] -= back.x;
        v[2 * k + 1] -= back.y;
    }
    uint4 *pieces = reinterpret_cast<uint4 *>(to) + (threadIdx.x & 31);
    pieces[0] = make_uint4(words[0], words[1], words[2], words[3]);
    pieces[32] = make_uint4(words[4], words[5], words[6], words[7]);
}

/* --- rounding ------------------------------------------------------------------------------------ */

/* What a code is rounded with, in units of codes. */
DEVICE Rounding rounding_of(const Levels &q, float step, float offset) {
    const float inv = reciprocal(step);
    return {step * q.levels, offset, inv * q.unit, fmaf(-offset, inv, 0.5f) * q.unit};
}

/* Word of a block's sums where four columns (group) of a row begin: no bank is asked twice for the rows of eight lanes. */
DEVICE int sums_place(int row, int group) { return 16 * row + 4 * (group ^ ((row >> 1) & 3)); }

DEVICE void store_sums(float *to, const Sums &sum) {
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const int m = k >> 2, n = k >> 1 & 1, h = k & 1;
        *reinterpret_cast<float2 *>(to + sums_place(16 * m + 8 * h + g, 2 * n + (t >> 1)) + 2 * (t & 1)) =
            make_float2(sum[m][n][2 * h], sum[m][n][2 * h + 1]);
    }
}

/* Rounds sixteen channels from the last down; left: what is left to round of each. Returns how near to a threshold the
 * nearest came, in units of 2^bits. */
DEVICE float feedback_block(const Levels &q, const Rounding &to, const float *inner, const float (&x)[16], float (&left)[16],
                            float (&e)[16], float (&c)[16]) {
    const float whole = 1.5f * q.magic; /* rounds to whole codes */
    float near = 1, row[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 15, at = 0; i >= 0; i--) {
        const float u = __fmaf_rn(left[i], to.inv, to.shift);
        near = fminf(near, fabsf(u - (__fadd_rn(u, whole) - whole)));
        c[i] = round_code(q, left[i], to.inv, to.shift);
        e[i] = fmaf(to.step, c[i], to.offset - x[i]);
#pragma unroll
        for (int j = i - 1; j >= 0; j--, at++) {
            if (at % 4 == 0) {
                const float4 v = load4(inner + at);
                row[0] = v.x, row[1] = v.y, row[2] = v.z, row[3] = v.w;
            }
            left[j] = fmaf(-e[i], row[at % 4], left[j]);
        }
    }
    return near;
}

/* What is left to round of block b of a row, in the CPU's order, in place of its sums. All lanes come here. */
DEVICE void exact_block(const FeedbackRows &w, const AppendMetric &exact, const Rounding &to, int row, int b, float *sums) {
    const int lane = threadIdx.x & 31, k = lane & 15;
    const float step = __shfl_sync(FULL_WARP, to.step, row), offset = __shfl_sync(FULL_WARP, to.offset, row);
    float left = w.x_at(row, 16 * b + k);
#pragma unroll 1
    for (int above = 7; above > b; above--) {
        const __half code = reinterpret_cast<const __half *>(w.c + 1024 * above + 512 * (k >> 3) + 16 * row)[k & 7];
        const float e = fmaf(step, __half2float(code), offset - w.x_at(row, 16 * above + k));
        float of_row[16];
#pragma unroll
        for (int n = 15; n >= 0; n--) of_row[n] = metric_row<128>(exact, b >> 2, 16 * above + n, k)[b & 3];
#pragma unroll
        for (int n = 15; n >= 0; n--) left = fmaf(-__shfl_sync(FULL_WARP, e, n, 16), of_row[n], left);
    }
    if (lane < 16) sums[sums_place(row, k >> 2) + (k & 3)] = left;
}

/* How errors are kept, and how near to a threshold sums may decide. */
struct FeedbackScale {
    float scale, unscale; /* of errors as halves; of their products */
    float margin;
};

/* largest: |x| of the row. Sums are off by some units in the last place of what is near a threshold, which is no larger
 * than the values of codes, or of a step. */
DEVICE FeedbackScale feedback_scale(const Levels &q, const FeedbackMetric &metric, float step, float offset, float largest) {
    const float value = fmaxf(fabsf(offset), fabsf(fmaf(q.levels - 1.0f, step, offset)));
    FeedbackScale s;
    scale_to_halves(largest + value, &s.scale, &s.unscale);
    s.unscale *= metric.unscale;
    s.margin = FEEDBACK_MARGIN * q.unit * fmaf(value, reciprocal(step), 1.0f);
    return s;
}

/* Errors of the channels above block b times B, for its sixteen columns. */
DEVICE void feedback_sums(uint32_t errors, const FeedbackMetric &metric, int b, Sums &sum) {
    Sums low;
    clear(sum);
    clear(low);
#pragma unroll 2
    for (int k = 7; k > b; k--) {
        uint32_t numbers[2][4], rests[2][4];
        Sums fresh;
        const Piece piece(metric, k, b);
        load_block(numbers, errors + 2048 * k);
        load_block(rests, errors + 2048 * k + 1024);
        multiply(fresh, numbers, piece.numbers);
        multiply_add(low, numbers, piece.remainders);
        multiply_add(low, rests, piece.numbers);
        add(sum, fresh);
    }
    add(sum, low);
}

/* Rounds block b; leaves codes and errors. */
DEVICE void round_block(const FeedbackRows &w, const Levels &q, const Rounding &to, const FeedbackScale &s,
                        const FeedbackMetric &metric, const AppendMetric &exact, int b) {
    const int lane = threadIdx.x & 31;
    float *sums = reinterpret_cast<float *>(w.e + 2048 * b), e[16], c[16];
    unsigned rows;
    bool made_again = false;
#pragma unroll 1
    do {
        float x[16], left[16];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const uint32_t both = w.x[(8 * b + k) * 32 + lane];
            x[2 * k] = bf16_low(both);
            x[2 * k + 1] = bf16_high(both);
        }
        const float factor = made_again ? 1.0f : -s.unscale;
#pragma unroll
        for (int k = 0; k < 16; k += 4) {
            const float4 v = load4(sums + sums_place(lane, k / 4));
            left[k] = fmaf(v.x, factor, made_again ? 0.0f : x[k]);
            left[k + 1] = fmaf(v.y, factor, made_again ? 0.0f : x[k + 1]);
            left[k + 2] = fmaf(v.z, factor, made_again ? 0.0f : x[k + 2]);
            left[k + 3] = fmaf(v.w, factor, made_again ? 0.0f : x[k + 3]);
        }
        const bool near = feedback_block(q, to, metric.inner + 120 * b, x, left, e, c) < s.margin && !made_again;
        rows = __ballot_sync(FULL_WARP, near);
        for (unsigned rest = rows; rest; rest &= rest - 1) exact_block(w, exact, to, __ffs(rest) - 1, b, sums);
        made_again = made_again || near;
        __syncwarp();
    } while (rows);
    /* Errors take the place of sums. */
    store_halves(w.c + 1024 * b, c);
#pragma unroll
    for (int k = 0; k < 16; k++) e[k] *= s.scale;
    store_halves(w.e + 2048 * b, e);
    store_halves(w.e + 2048 * b + 1024, e);
}

/* --- the second warp ----------------------------------------------------------------------------- */

/* Sums of this lane's rows 8 k + g: of <V, V>, <V, 1>, <r, V>, <r, 1>, <Y, r>, <Y, V> in M, r = Y - s V - m 1 B; of <Y, Y>,
 * <Y, 1>. */
struct RefitSums {
    float cc[4], c1[4], rc[4], r1[4], yr[4], yc[4], yy[4], y1[4];

    DEVICE RefitSums() {
#pragma unroll
        for (int k = 0; k < 4; k++) cc[k] = c1[k] = rc[k] = r1[k] = yr[k] = yc[k] = yy[k] = y1[k] = 0;
    }
    DEVICE void add(int k, float d, float one, float v, float y, float step, float offset) {
        const float r = fmaf(-offset, one, fmaf(-step, v, y)), dv = d * v, dy = d * y;
        cc[k] = fmaf(dv, v, cc[k]);
        c1[k] = fmaf(dv, one, c1[k]);
        rc[k] = fmaf(dv, r, rc[k]);
        r1[k] = fmaf(d * one, r, r1[k]);
        yr[k] = fmaf(dy, r, yr[k]);
        yc[k] = fmaf(dy, v, yc[k]);
    }
    DEVICE void add_y(int k, float d, float one, float y) {
        yy[k] = fmaf(d * y, y, yy[k]);
        y1[k] = fmaf(d * y, one, y1[k]);
    }
};

/* Calls use(v, k, column) for this lane's elements v of sixteen columns: of row 8 k + g, column 0 .. 3 of the lane's own. */
template <class F> DEVICE void for_elements(Sums &sum, F use) {
#pragma unroll
    for (int i = 0; i < 16; i++) use(sum[i / 8][i / 4 % 2][i % 4], 2 * (i / 8) + i / 2 % 2, i / 4 % 2 * 2 + i % 2);
}

/* What the second warp has of sixteen columns b, of the blocks above so far. */
struct Columns {
    Sums v, v_low, y, y_low;

    DEVICE void start() {
        clear(v);
        clear(v_low);
        clear(y);
        clear(y_low);
    }
    /* Adds block k to columns b. */
    DEVICE void add_block(const FeedbackRows &w, const FeedbackMetric &metric, int k, int b, bool with_y) {
        uint32_t codes[2][4], x[2][4];
        Sums fresh, fresh_y;
        const Piece piece(metric, k, b);
        load_block(codes, shared_address(w.c + 1024 * k));
        multiply(fresh, codes, piece.numbers);
        multiply_add(v_low, codes, piece.remainders);
        if (with_y) {
            load_block(x, shared_address(w.halves + 1024 * k));
            multiply(fresh_y, x, piece.numbers);
            multiply_add(y_low, x, piece.remainders);
            add(y, fresh_y);
        }
        add(v, fresh);
    }
};

/* Adds finished columns b to the sums; y: in local memory, made where with_y. */
DEVICE void use_columns(Columns &columns, const FeedbackMetric &metric, int b, bool with_y, const float (&unscale)[4],
                        float unscale_v, const float (&step)[4], const float (&offset)[4], float4 (&y)[4], RefitSums &sums) {
    float d[4], one[4];
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const int column = 16 * b + 8 * n + 2 * (threadIdx.x & 3);
        const float2 both_d = *reinterpret_cast<const float2 *>(metric.d + column);
        const float2 both_one = *reinterpret_cast<const float2 *>(metric.ones + column);
        d[2 * n] = both_d.x, d[2 * n + 1] = both_d.y;
        one[2 * n] = both_one.x, one[2 * n + 1] = both_one.y;
    }
    add(columns.v, columns.v_low);
    if (with_y) {
        add(columns.y, columns.y_low);
        for_elements(columns.y, [&](float &v, int k, int column) {
            v *= unscale[k];
            sums.add_y(k, d[column], one[column], v);
        });
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float(&v)[4] = columns.y[i / 2][i % 2];
            y[i] = make_float4(v[0], v[1], v[2], v[3]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float(&v)[4] = columns.y[i / 2][i % 2];
            v[0] = y[i].x, v[1] = y[i].y, v[2] = y[i].z, v[3] = y[i].w;
        }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int m = i / 8, n = i / 4 % 2, k = 2 * m + i / 2 % 2, column = 2 * n + i % 2;
        sums.add(k, d[column], one[column], columns.v[m][n][i % 4] * unscale_v, columns.y[m][n][i % 4], step[k], offset[k]);
    }
}

/* A round of the second warp: the sums of the refit, columns by columns as their codes are there. */
DEVICE void assist_round(const FeedbackRows &w, const Levels &q, const FeedbackMetric &metric, bool first, float4 (&y)[8][4]) {
    const int lane = threadIdx.x & 31, g = lane >> 2;
    const float unscale_v = q.levels * metric.unscale;
    w.meet(); /* block 7 has been rounded */
    float unscale[4], step[4], offset[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        unscale[k] = w.hand[32 * HAND_UNSCALE + 8 * k + g];
        step[k] = w.hand[32 * HAND_STEP + 8 * k + g];
        offset[k] = w.hand[32 * HAND_OFFSET + 8 * k + g];
    }
    RefitSums sums;
    Columns columns;
    columns.start();
#pragma unroll 1
    for (int b = 6; b >= -1; b--) { /* while block b is rounded */
        columns.add_block(w, metric, b + 1, b + 1, first);
        use_columns(columns, metric, b + 1, first, unscale, unscale_v, step, offset, y[b + 1], sums);
        if (b < 0) break;
        columns.start();
#pragma unroll 1
        for (int k = 7; k > b; k--) columns.add_block(w, metric, k, b, first);
        w.meet();
    }
    float *hand = w.hand + lane;
    hand[32 * HAND_CC] = sum_of_row(sums.cc);
    hand[32 * HAND_C1] = sum_of_row(sums.c1);
    hand[32 * HAND_RC] = sum_of_row(sums.rc);
    hand[32 * HAND_R1] = sum_of_row(sums.r1);
    hand[32 * HAND_YR] = sum_of_row(sums.yr);
    hand[32 * HAND_YC] = sum_of_row(sums.yc);
    if (first) {
        hand[32 * HAND_YY] = sum_of_row(sums.yy);
        hand[32 * HAND_Y1] = sum_of_row(sums.y1);
    }
    w.meet();
}

/* What the second warp does while the first feeds back errors; w.halves must be free. */
DEVICE void assist_feedback(const FeedbackRows &w, const Levels &q, const FeedbackMetric &metric) {
    float4 y[8][4]; /* this lane's part of x B, in columns 16 b .. */
    w.meet();
#pragma unroll 1
    for (int round = 0; round < LDLQ_REFITS; round++) assist_round(w, q, metric, round == 0, y);
}

/* --- a row --------------------------------------------------------------------------------------- */

/* x as halves; what products with it are to be multiplied with. */
DEVICE void hand_rows(const FeedbackRows &w, const FeedbackMetric &metric, float largest) {
    const int lane = threadIdx.x & 31;
    float scale, unscale;
    scale_to_halves(largest, &scale, &unscale);
    w.hand[32 * HAND_UNSCALE + lane] = unscale * metric.unscale;
#pragma unroll 1
    for (int b = 0; b < 8; b++) {
        float v[16];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const uint32_t both = w.x[(8 * b + k) * 32 + lane];
            v[2 * k] = bf16_low(both) * scale;
            v[2 * k + 1] = bf16_high(both) * scale;
        }
        store_halves(w.halves + 1024 * b, v);
    }
}

/* Codes of 32 rows to w.c, step and offset of this lane's: error feedback with its refits, from the least squares' on;
 * then the gain, if there is one. largest: |x| of the row. The other warp assists. */
DEVICE void feedback_rows(const FeedbackRows &w, const Levels &q, const FeedbackMetric &metric, const AppendMetric &exact,
                          float largest, bool gain, float &step, float &offset) {
    float *hand = w.hand + (threadIdx.x & 31), factor = 1;
    w.meet(); /* w.halves are free */
    hand_rows(w, metric, largest);
#pragma unroll 1
    for (int round = 0; round < LDLQ_REFITS; round++) {
        hand[32 * HAND_STEP] = step;
        hand[32 * HAND_OFFSET] = offset;
        const Rounding to = rounding_of(q, step, offset);
        const FeedbackScale scale = feedback_scale(q, metric, step, offset, largest);
#pragma unroll 1
        for (int b = 7; b >= 0; b--) {
            Sums sum;
            feedback_sums(shared_address(w.e), metric, b, sum);
            store_sums(reinterpret_cast<float *>(w.e + 2048 * b), sum);
            __syncwarp();
            round_block(w, q, to, scale, metric, exact, b);
            w.meet();
        }
        w.meet(); /* sums are there */
        const float old_step = step, old_offset = offset;
        refit_metric(metric.ones_ones, hand[32 * HAND_CC], hand[32 * HAND_C1], hand[32 * HAND_RC], hand[32 * HAND_R1], step,
                     offset);
        /* The residual of the last round, moved by its refit. */
        const float yr = hand[32 * HAND_YR] - (step - old_step) * hand[32 * HAND_YC] - (offset - old_offset) * hand[32 * HAND_Y1];
        factor = gain_factor(hand[32 * HAND_YY], yr);
    }
    if (gain) {
        step = to_fp16(step * factor);
        offset = to_fp16(offset * factor);
    }
}

#endif
