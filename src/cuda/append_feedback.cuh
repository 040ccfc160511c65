/*
 * append_feedback.cuh - error feedback of 32 rows by two warps, on tensor cores: head_dim 128.
 *
 * A lane of the first warp has a row. It rounds sixteen channels in a chain of its own, each channel aiming at what the
 * errors above it leave. What the errors of all sixteen channels above mean for the next sixteen are products of errors
 * with B: of the block just rounded by the first warp, of all blocks above that by the second, while that block is rounded.
 * Errors and B are fp16 numbers with an fp16 remainder, scaled by powers of two, so a product is good to 2^-22.
 *
 * That is not the CPU's order of sums, so what is left to round of a channel may be off by some units in its last place.
 * A code depends on that only where it is next to a threshold: a lane that comes closer to one than the sums are exact
 * (once in some thousand rows) has its sixteen channels made again, in the CPU's order. So the codes of a round are
 * those of the CPU. Sums for refits and gain, which are rounded to fp16, are good to some 1e-7 instead.
 *
 * The same products are the residual, r = (x - x^) B, of which refit and gain take sums; the second warp makes them. With
 * Y = (x - center) B, made once, the codes need no product of their own: s c B = Y - r - (m - center) 1 B. The center is
 * near the row's, so that these differences cost no digits. Y waits in local memory.
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
enum { HAND_LARGEST, HAND_CENTER, HAND_UNSCALE, HAND_RR, HAND_R1, HAND_RY, HAND_YY, HAND_Y1, N_HAND };

/* Shared memory of the 32 rows. */
struct FeedbackRows {
    const uint32_t *x; /* [64][32] bf16, two channels a word */
    uint8_t *c;        /* [8][32][16] codes */
    uint8_t *e;        /* [8][2][2][32][8] halves: errors, then their remainders; a block's sums until it has errors: of the
                          second warp as products lie, then of all a row after the other */
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

/* Last bytes of four words, of which the last bits of a + 2^(23 - bits) are the code. */
DEVICE uint32_t last_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

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

/* Where this lane stores sums of products, two columns of rows g + 8 n at 128 n, and where four columns of its own row are: of
 * block 0. */
struct SumsPlaces {
    float *products[2], *row[4];

    DEVICE explicit SumsPlaces(uint8_t *e) {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        float *sums = reinterpret_cast<float *>(e);
#pragma unroll
        for (int n = 0; n < 2; n++) products[n] = sums + sums_place(g, 2 * n + (t >> 1)) + 2 * (t & 1);
#pragma unroll
        for (int k = 0; k < 4; k++) row[k] = sums + sums_place(lane, k);
    }
};

DEVICE void store_sums(const SumsPlaces &places, int b, const Sums &sum) {
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const int m = k >> 2, n = k >> 1 & 1, h = k & 1;
        *reinterpret_cast<float2 *>(places.products[n] + 512 * b + 256 * m + 128 * h) =
            make_float2(sum[m][n][2 * h], sum[m][n][2 * h + 1]);
    }
}

/* Rounds sixteen channels from the last down; left: what is left to round of each. codes: a byte each. Returns how near to a
 * threshold the nearest came, in units of 2^bits. */
DEVICE float feedback_block(const Levels &q, const Rounding &to, const float *inner, const float (&x)[16], float (&left)[16],
                            float (&e)[16], uint32_t (&codes)[4]) {
    const float whole = 1.5f * q.magic; /* rounds to whole codes */
    float near = 1, row[4] = {0, 0, 0, 0};
    uint32_t bits[16];
#pragma unroll
    for (int i = 15, at = 0; i >= 0; i--) {
        float part;
        asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(part) : "f"(left[i]), "f"(to.inv), "f"(to.shift));
        const float u = __fmaf_rn(left[i], to.inv, to.shift), v = fminf(__fadd_rz(part, q.magic), q.top);
        near = fminf(near, fabsf(u - (__fadd_rn(u, whole) - whole)));
        bits[i] = __float_as_uint(v);
        e[i] = fmaf(to.step, v - q.magic, to.offset - x[i]);
#pragma unroll
        for (int j = i - 1; j >= 0; j--, at++) {
            if (at % 4 == 0) {
                const float4 four = load4(inner + at);
                row[0] = four.x, row[1] = four.y, row[2] = four.z, row[3] = four.w;
            }
            left[j] = fmaf(-e[i], row[at % 4], left[j]);
        }
    }
#pragma unroll
    for (int k = 0; k < 4; k++) codes[k] = last_bytes(bits[4 * k], bits[4 * k + 1], bits[4 * k + 2], bits[4 * k + 3]);
    return near;
}

/* What is left to round of block b of a row, in the CPU's order, in place of its sums. All lanes come here. */
DEVICE void exact_block(const FeedbackRows &w, const Levels &q, const AppendMetric &exact, const Rounding &to, int row, int b) {
    const int lane = threadIdx.x & 31, k = lane & 15;
    const float step = __shfl_sync(FULL_WARP, to.step, row), offset = __shfl_sync(FULL_WARP, to.offset, row);
    float left = w.x_at(row, 16 * b + k);
#pragma unroll 1
    for (int above = 7; above > b; above--) {
        const float code = static_cast<float>(w.c[512 * above + 16 * row + k]) * q.unit;
        const float e = fmaf(step, code, offset - w.x_at(row, 16 * above + k));
        float of_row[16];
#pragma unroll
        for (int n = 15; n >= 0; n--) of_row[n] = metric_row<128>(exact, b >> 2, 16 * above + n, k)[b & 3];
#pragma unroll
        for (int n = 15; n >= 0; n--) left = fmaf(-__shfl_sync(FULL_WARP, e, n, 16), of_row[n], left);
    }
    if (lane < 16) reinterpret_cast<float *>(w.e + 2048 * b)[sums_place(row, k >> 2) + (k & 3)] = left;
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

/* Adds this lane's row of sums of block b, times factor. */
DEVICE void add_sums(const SumsPlaces &places, int b, float factor, float (&left)[16]) {
#pragma unroll
    for (int k = 0; k < 16; k += 4) {
        const float4 v = load4(places.row[k / 4] + 512 * b);
        left[k] = fmaf(v.x, factor, left[k]);
        left[k + 1] = fmaf(v.y, factor, left[k + 1]);
        left[k + 2] = fmaf(v.z, factor, left[k + 2]);
        left[k + 3] = fmaf(v.w, factor, left[k + 3]);
    }
}

/* Rounds block b, whose sums are there; leaves codes and errors. words: x of the block. */
DEVICE void round_block(const FeedbackRows &w, const SumsPlaces &places, const Levels &q, const Rounding &to,
                        const FeedbackScale &s, const FeedbackMetric &metric, const AppendMetric &exact,
                        const uint32_t (&words)[8], int b) {
    const int lane = threadIdx.x & 31;
    float x[16], left[16], e[16];
    uint32_t codes[4];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        left[2 * k] = x[2 * k] = bf16_low(words[k]);
        left[2 * k + 1] = x[2 * k + 1] = bf16_high(words[k]);
    }
    add_sums(places, b, -s.unscale, left);
    bool again = false;
#pragma unroll 1
    for (;;) {
        const bool near = feedback_block(q, to, metric.inner + 120 * b, x, left, e, codes) < s.margin;
        if (again) break;
        const unsigned rows = __ballot_sync(FULL_WARP, near);
        if (!rows) break;
        __syncwarp();
        int block = b;
        asm volatile("" : "+r"(block)); /* nothing of this is worked out before it is needed */
#pragma unroll 1
        for (unsigned rest = rows; rest; rest &= rest - 1) exact_block(w, q, exact, to, __ffs(rest) - 1, block);
        __syncwarp();
        if (!near) break;
        again = true;
#pragma unroll
        for (int k = 0; k < 16; k++) left[k] = 0;
        add_sums(places, b, 1.0f, left);
    }
    __syncwarp(); /* errors take the place of sums */
    reinterpret_cast<uint4 *>(w.c + 512 * b)[lane] = make_uint4(codes[0], codes[1], codes[2], codes[3]);
#pragma unroll
    for (int k = 0; k < 16; k++) e[k] *= s.scale;
    store_halves(w.e + 2048 * b, e);
    store_halves(w.e + 2048 * b + 1024, e);
}

/* --- products of errors --------------------------------------------------------------------------- */

/* Adds errors of block k times B, for sixteen columns b. */
DEVICE void add_errors(const FeedbackRows &w, const FeedbackMetric &metric, int k, int b, Sums &sum, Sums &low) {
    uint32_t numbers[2][4], rests[2][4];
    Sums fresh;
    const Piece piece(metric, k, b);
    load_block(numbers, shared_address(w.e + 2048 * k));
    load_block(rests, shared_address(w.e + 2048 * k + 1024));
    multiply(fresh, numbers, piece.numbers);
    multiply_add(low, numbers, piece.remainders);
    multiply_add(low, rests, piece.numbers);
    add(sum, fresh);
}
DEVICE void add_errors(const FeedbackRows &w, const FeedbackMetric &metric, int k, int b, Sums &sum) {
    Sums low;
    clear(low);
    add_errors(w, metric, k, b, sum, low);
    add(sum, low);
}

/* The second warp's sums of block b: it leaves them, the first takes them. */
DEVICE void leave_sums(const FeedbackRows &w, int b, const Sums &sum) {
    float4 *to = reinterpret_cast<float4 *>(w.e + 2048 * b) + (threadIdx.x & 31);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float(&v)[4] = sum[i / 2][i % 2];
        to[32 * i] = make_float4(v[0], v[1], v[2], v[3]);
    }
}
DEVICE void take_sums(const FeedbackRows &w, int b, Sums &sum) {
    const float4 *from = reinterpret_cast<const float4 *>(w.e + 2048 * b) + (threadIdx.x & 31);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float(&v)[4] = sum[i / 2][i % 2];
        const float4 four = from[32 * i];
        v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    }
}

/* --- the second warp ----------------------------------------------------------------------------- */

/* x as halves. Returns what products with them are to be multiplied with. */
DEVICE float halve_rows(const FeedbackRows &w, const FeedbackMetric &metric, float largest) {
    const int lane = threadIdx.x & 31;
    float scale, unscale;
    scale_to_halves(largest, &scale, &unscale);
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
    return unscale * metric.unscale;
}

/* x B in sixteen columns b. */
DEVICE void multiply_rows(const FeedbackRows &w, const FeedbackMetric &metric, int b, Sums &sum) {
    Sums low;
    clear(sum);
    clear(low);
#pragma unroll 1
    for (int k = 7; k >= b; k--) {
        uint32_t x[2][4];
        Sums fresh;
        const Piece piece(metric, k, b);
        load_block(x, shared_address(w.halves + 1024 * k));
        multiply(fresh, x, piece.numbers);
        multiply_add(low, x, piece.remainders);
        add(sum, fresh);
    }
    add(sum, low);
}

/* Sums of this lane's rows 8 k + g in M: <r, r>, <r, 1>, <r, Y>, <Y, Y>, <Y, 1>. */
struct RefitSums {
    float rr[4], r1[4], ry[4], yy[4], y1[4];

    DEVICE RefitSums() {
#pragma unroll
        for (int k = 0; k < 4; k++) rr[k] = r1[k] = ry[k] = yy[k] = y1[k] = 0;
    }
};

/* Calls use(i, k, column) for this lane's elements of sixteen columns: i of Sums, of row 8 k + g, column 0 .. 3 of the
 * lane's own. */
template <class F> DEVICE void for_elements(F use) {
#pragma unroll
    for (int i = 0; i < 16; i++) use(i, 2 * (i / 8) + i / 2 % 2, i / 4 % 2 * 2 + i % 2);
}
DEVICE float &element(Sums &sum, int i) { return sum[i / 8][i / 4 % 2][i % 4]; }

/* D and 1 B of this lane's columns. */
struct ColumnConstants {
    float d[4], one[4];

    DEVICE ColumnConstants(const FeedbackMetric &metric, int b) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int column = 16 * b + 8 * n + 2 * (threadIdx.x & 3);
            const float2 both_d = *reinterpret_cast<const float2 *>(metric.d + column);
            const float2 both_one = *reinterpret_cast<const float2 *>(metric.ones + column);
            d[2 * n] = both_d.x, d[2 * n + 1] = both_d.y;
            one[2 * n] = both_one.x, one[2 * n + 1] = both_one.y;
        }
    }
};

/* Y of columns b, from x B; and its sums. */
DEVICE void center_columns(const ColumnConstants &of, Sums &y, const float (&unscale)[4], const float (&center)[4],
                           RefitSums &sums) {
    for_elements([&](int i, int k, int column) {
        float &v = element(y, i);
        v = fmaf(v, unscale[k], -center[k] * of.one[column]);
        const float dv = of.d[column] * v;
        sums.yy[k] = fmaf(dv, v, sums.yy[k]);
        sums.y1[k] = fmaf(dv, of.one[column], sums.y1[k]);
    });
}

/* Adds columns of r = -e B to the sums. e: errors times B, to be multiplied with unscale. */
DEVICE void use_columns(const ColumnConstants &of, Sums &e, const Sums &y, const float (&unscale)[4], RefitSums &sums) {
    for_elements([&](int i, int k, int column) {
        const float r = element(e, i) * -unscale[k], dr = of.d[column] * r;
        sums.rr[k] = fmaf(dr, r, sums.rr[k]);
        sums.r1[k] = fmaf(dr, of.one[column], sums.r1[k]);
        sums.ry[k] = fmaf(dr, y[i / 8][i / 4 % 2][i % 4], sums.ry[k]);
    });
}

/* What the first warp's lanes hand this warp's for rows 8 k + g. */
DEVICE void take_handed(const FeedbackRows &w, int what, float (&v)[4]) {
#pragma unroll
    for (int k = 0; k < 4; k++) v[k] = w.hand[32 * what + 8 * k + ((threadIdx.x & 31) >> 2)];
}

/* Y of columns b, kept in local memory, and its sums. */
DEVICE void make_y(const FeedbackRows &w, const FeedbackMetric &metric, int b, const float (&unscale_x)[4],
                   const float (&center)[4], float4 (&kept)[4], RefitSums &sums) {
    Sums y;
    multiply_rows(w, metric, b, y);
    center_columns(ColumnConstants(metric, b), y, unscale_x, center, sums);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float(&v)[4] = y[i / 2][i % 2];
        kept[i] = make_float4(v[0], v[1], v[2], v[3]);
    }
}

/* A round of the second warp: sums of errors for the blocks to come, and the sums of the refit, columns by columns as
 * their errors are there. Y is made in the first round while there are few errors to add; so is something else in the
 * second, idle(0 .. 3). */
template <class F>
DEVICE void assist_round(const FeedbackRows &w, const FeedbackMetric &metric, int round, const float (&unscale_x)[4],
                         const float (&center)[4], float4 (&kept)[8][4], F idle) {
    Sums done, mine; /* products of all errors from block b + 2 on, in columns b + 1 and b */
    RefitSums sums;
    clear(done);
    clear(mine);
#pragma unroll 1
    for (int b = 7; b >= -1; b--) { /* while block b is rounded */
        Sums next, low, y;
        if (b < 7) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float(&v)[4] = y[i / 2][i % 2];
                const float4 four = kept[b + 1][i];
                v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
            }
            w.meet(); /* block b + 1 has been rounded */
        }
        clear(next);
        if (b > 0) {
            clear(low);
#pragma unroll 2
            for (int k = 7; k > b; k--) add_errors(w, metric, k, b - 1, next, low);
            add(next, low);
            leave_sums(w, b - 1, next);
        }
        if (b < 7) {
            float unscale[4];
            take_handed(w, HAND_UNSCALE, unscale);
            add_errors(w, metric, b + 1, b + 1, done);
            use_columns(ColumnConstants(metric, b + 1), done, y, unscale, sums);
            if (b < 0) break;
            add_errors(w, metric, b + 1, b, mine);
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            element(done, i) = element(mine, i);
            element(mine, i) = element(next, i);
        }
        if (b < 4) continue;
        if (round == 0)
#pragma unroll 1
            for (int n = 0; n < 2; n++) {
                const int columns = n ? 7 - b : b;
                make_y(w, metric, columns, unscale_x, center, kept[columns], sums);
            }
        if (round == 1) idle(b - 4);
    }
    float *hand = w.hand + (threadIdx.x & 31);
    hand[32 * HAND_RR] = sum_of_row(sums.rr);
    hand[32 * HAND_R1] = sum_of_row(sums.r1);
    hand[32 * HAND_RY] = sum_of_row(sums.ry);
    if (round == 0) {
        hand[32 * HAND_YY] = sum_of_row(sums.yy);
        hand[32 * HAND_Y1] = sum_of_row(sums.y1);
    }
    w.meet();
}

/* What the second warp does while the first feeds back errors. */
template <class F> DEVICE void assist_feedback(const FeedbackRows &w, const FeedbackMetric &metric, F idle) {
    const int lane = threadIdx.x & 31;
    float4 kept[8][4]; /* this lane's part of Y, in columns 16 b .. */
    float unscale_x[4], center[4];
    w.meet(); /* the first warp has what feedback begins with */
    const float unscale = halve_rows(w, metric, w.hand[32 * HAND_LARGEST + lane]);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; k++) unscale_x[k] = __shfl_sync(FULL_WARP, unscale, 8 * k + (lane >> 2));
    take_handed(w, HAND_CENTER, center);
#pragma unroll 1
    for (int round = 0; round < LDLQ_REFITS; round++) assist_round(w, metric, round, unscale_x, center, kept, idle);
}

/* --- a row --------------------------------------------------------------------------------------- */

/* Step and offset that the round's sums ask for; returns the factor of the gain after that. */
DEVICE float refit_feedback(float ones_ones, const float *hand, float center, float &step, float &offset) {
    const float rr = hand[32 * HAND_RR], r1 = hand[32 * HAND_R1], ry = hand[32 * HAND_RY];
    const float yy = hand[32 * HAND_YY], y1 = hand[32 * HAND_Y1];
    /* Of s c B = Y - r - m 1 B with itself, 1 B, r, Y; then of c B. */
    const float m = offset - center, inv = reciprocal(step), old_step = step, old_offset = offset;
    const float w1 = y1 - r1 - m * ones_ones, rw = ry - rr - m * r1, yw = yy - ry - m * y1, ww = yw - rw - m * w1;
    const float cc = ww * inv * inv, c1 = w1 * inv;
    refit_metric(ones_ones, cc, c1, rw * inv, r1, step, offset);
    const float ds = step - old_step, dm = offset - old_offset; /* the refit takes ds c B + dm 1 B off r */
    const float left_y = ry - ds * (yw * inv) - dm * y1, left_1 = r1 - ds * c1 - dm * ones_ones;
    return gain_factor(fmaf(center, fmaf(center, ones_ones, 2.0f * y1), yy), fmaf(center, left_1, left_y));
}

/* Codes of 32 rows to w.c, step and offset of this lane's: error feedback with its refits, from the least squares' on;
 * then the gain, if there is one. largest: |x| of the row. The other warp assists. */
DEVICE void feedback_rows(const FeedbackRows &w, const Levels &q, const FeedbackMetric &metric, const AppendMetric &exact,
                          float largest, bool gain, float &step, float &offset) {
    float *hand = w.hand + (threadIdx.x & 31), factor = 1;
    const SumsPlaces places(w.e);
    const float center = fmaf(0.5f * (q.levels - 1.0f), step, offset);
    hand[32 * HAND_LARGEST] = largest;
    hand[32 * HAND_CENTER] = center;
    w.meet();
#pragma unroll 1
    for (int round = 0; round < LDLQ_REFITS; round++) {
        const Rounding to = rounding_of(q, step, offset);
        const FeedbackScale scale = feedback_scale(q, metric, step, offset, largest);
        hand[32 * HAND_UNSCALE] = scale.unscale;
#pragma unroll 1
        for (int b = 7; b >= 0; b--) {
            Sums sum;
            uint32_t words[8];
#pragma unroll
            for (int k = 0; k < 8; k++) words[k] = w.x[(8 * b + k) * 32 + (threadIdx.x & 31)];
            clear(sum);
            if (b < 7) {
                take_sums(w, b, sum);
                add_errors(w, metric, b + 1, b, sum);
            }
            __syncwarp(); /* all have taken theirs */
            store_sums(places, b, sum);
            __syncwarp();
            round_block(w, places, q, to, scale, metric, exact, words, b);
            w.meet();
        }
        w.meet(); /* sums are there */
        factor = refit_feedback(metric.ones_ones, hand, center, step, offset);
    }
    if (gain) {
        step = to_fp16(step * factor);
        offset = to_fp16(offset * factor);
    }
}

#endif
