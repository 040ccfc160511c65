/*
 * attn_softmax.h - what all vector kernels of attention share: a tile's shape, the
 * parameters of a page, and the softmax of a row. Included after attn_vec_*.h.
 */
#ifndef OSCAR_ATTN_SOFTMAX_H
#define OSCAR_ATTN_SOFTMAX_H

#include <math.h>

#define TILE 64
#define UNIT_VECS (16 / LANES)
#define TILE_VECS (TILE / LANES)
#define INLINE static inline __attribute__((always_inline))
/* Loops over registers must vanish; -O3 alone does not promise it. */
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* The bits of LANES slots from `slot` on. */
INLINE uint32_t lane_bits(uint64_t slots, int slot) {
    return (uint32_t)(slots >> slot) & ((1u << LANES) - 1);
}

/* Steps and offsets of LANES tokens of a group from `slot` on; zeros where they are not valid, so
 * that whatever the codes are there comes out as zero. params: [2][64] fp16. */
INLINE void load_params(const uint8_t *params, int slot, uint64_t valid, vf *step, vf *offset) {
    *step = vf_load_fp16(params + 2 * slot);
    *offset = vf_load_fp16(params + 128 + 2 * slot);
    if (valid == UINT64_MAX) return;
    *step = vf_keep(lane_bits(valid, slot), *step);
    *offset = vf_keep(lane_bits(valid, slot), *offset);
}

/* The same of all slots, into memory: [64] each. */
INLINE void store_params(const uint8_t *params, uint64_t valid, float *steps, float *offsets) {
    for (int t = 0; t < TILE; t += LANES) {
        vf step, offset;
        load_params(params, t, valid, &step, &offset);
        vf_store(steps + t, step);
        vf_store(offsets + t, offset);
    }
}

/* exp(x) for x <= 0, -inf included, 1 at 0; zero where normal floats end, or somewhat later. Relative error
 * below 2e-7 + 8e-8 |x|: at most 2.3e-7 of the largest weight. 2^y for y = n + r, r in [0, 1): the polynomial
 * of least relative error. */
INLINE vf vf_exp(vf x) {
    vf y = vf_mul(x, vf_set1(1.44269504f)), n, r = vf_fraction(y, &n);
    vf p = vf_set1(2.17022549e-4f);
    p = vf_fma(p, r, vf_set1(1.24396884e-3f));
    p = vf_fma(p, r, vf_set1(9.67884064e-3f));
    p = vf_fma(p, r, vf_set1(5.54833412e-2f));
    p = vf_fma(p, r, vf_set1(0.24022983f));
    p = vf_fma(p, r, vf_set1(0.693147004f));
    p = vf_fma(p, r, vf_set1(1.0f));
    return vf_times_pow2(p, n);
}

/* a r^4 + b r^3 + c r^2 + d r + e */
INLINE vf vf_quartic(vf r, float a, float b, float c, float d, float e) {
    vf p = vf_fma(vf_set1(a), r, vf_set1(b));
    p = vf_fma(p, r, vf_set1(c));
    p = vf_fma(p, r, vf_set1(d));
    return vf_fma(p, r, vf_set1(e));
}

/* 2^y for y up to 127; relative error 3e-6. Without instructions for it zero is never reached: 2^-125 is the least,
 * at -inf too (EXP2_LEAST). */
#ifdef VF_ADD_EXPONENT
#define EXP2_LEAST true
INLINE vf vf_exp2(vf y) {
    const vf x = vf_max(vf_set1(-125.0f), y), unit = vf_set1(12582912.0f); /* NaN stays; 1.5 2^23 */
    const vf n = vf_add(x, unit), r = vf_sub(x, vf_sub(n, unit));          /* the nearest whole n, and what is left */
    return vf_add_exponent(vf_quartic(r, 0.00957010126f, 0.0559178642f, 0.24024745f, 0.69312181f, 0.999999264f), n);
}
#else
#define EXP2_LEAST false
INLINE vf vf_exp2(vf y) {
    vf n, r = vf_fraction(y, &n);
    return vf_times_pow2(vf_quartic(r, 0.013534167f, 0.052011468f, 0.24144275f, 0.69300383f, 1.0000026f), n);
}
#endif

/* tanh, absolute error below 1e-7: an odd polynomial near zero, where the quotient cancels. */
INLINE vf vf_tanh(vf x) {
    vf a = vf_abs(x), z = vf_mul(x, x), one = vf_set1(1.0f);
    vf e = vf_exp(vf_mul(a, vf_set1(-2.0f)));
    vf far = vf_div(vf_sub(one, e), vf_add(one, e));
    vf p = vf_set1(-0.0060945549f);
    p = vf_fma(p, z, vf_set1(0.0209956951f));
    p = vf_fma(p, z, vf_set1(-0.0538505949f));
    p = vf_fma(p, z, vf_set1(0.133327678f));
    p = vf_fma(p, z, vf_set1(-0.333333284f));
    vf near = vf_fma(vf_mul(p, z), a, a);
    return vf_copysign(vf_where_less(a, vf_set1(0.625f), near, far), x);
}

/* Products of row r to weights relative to its new maximum, in place. *drop: by how much all that
 * was summed before falls, as a logarithm; *sum: of the new weights. The maximum starts at -inf:
 * never subtract it from itself. */
INLINE void row_softmax(attn_rows *rows, int r, uint64_t mask, float *drop, float *sum) {
    float *logits = rows->logits + (int64_t)r * TILE;
    vf x[TILE_VECS], bias = vf_set1(rows->q_bias[r]), scale = vf_set1(rows->logit_scale);
    vf top = vf_set1(-INFINITY), total = vf_zero();
    float cap = rows->logit_softcap;
    UNROLL for (int v = 0; v < TILE_VECS; v++)
        x[v] = vf_mul(vf_add(vf_load(logits + v * LANES), bias), scale);
    if (cap > 0.0f)
        UNROLL for (int v = 0; v < TILE_VECS; v++)
            x[v] = vf_mul(vf_set1(cap), vf_tanh(vf_div(x[v], vf_set1(cap))));
    if (mask != UINT64_MAX)
        UNROLL for (int v = 0; v < TILE_VECS; v++) x[v] = vf_hide(lane_bits(mask, v * LANES), x[v]);
    UNROLL for (int v = 0; v < TILE_VECS; v++) top = vf_max(top, x[v]);
    float before = rows->row_max[r], now = vf_top(top);
    if (before > now) now = before;
    float base = now > -INFINITY ? now : 0.0f;
    UNROLL for (int v = 0; v < TILE_VECS; v++) {
        x[v] = vf_exp(vf_sub(x[v], vf_set1(base)));
        vf_store(logits + v * LANES, x[v]);
        total = vf_add(total, x[v]);
    }
    rows->row_max[r] = now;
    *drop = before - base;
    *sum = vf_sum(total);
}

#endif
