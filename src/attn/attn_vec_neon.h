/*
 * attn_vec_neon.h - a vector of 4 floats or 32-bit integers, and what the kernels do with it.
 */
#ifndef OSCAR_ATTN_VEC_H
#define OSCAR_ATTN_VEC_H

#include <arm_neon.h>

#include "attn/attn.h"

#define LANES 4
typedef float32x4_t vf;
typedef int32x4_t vi;

static inline vf vf_zero(void) { return vdupq_n_f32(0.0f); }
static inline vf vf_set1(float x) { return vdupq_n_f32(x); }
static inline vf vf_load(const float *p) { return vld1q_f32(p); }
static inline void vf_store(float *p, vf x) { vst1q_f32(p, x); }
static inline vf vf_add(vf a, vf b) { return vaddq_f32(a, b); }
static inline vf vf_sub(vf a, vf b) { return vsubq_f32(a, b); }
static inline vf vf_mul(vf a, vf b) { return vmulq_f32(a, b); }
static inline vf vf_div(vf a, vf b) { return vdivq_f32(a, b); }
static inline vf vf_max(vf a, vf b) { return vmaxq_f32(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
/* x - n for the whole n at or below x, which vf_times_pow2() takes; x below -127 counts as that. */
static inline vf vf_fraction(vf x, vf *n) {
    x = vmaxq_f32(x, vf_set1(-127.0f));
    *n = vrndmq_f32(x);
    return vsubq_f32(x, *n);
}
/* x 2^n as long as that is a normal number; n: the low bits of a float whose last bit is 1 */
#define VF_ADD_EXPONENT
static inline vf vf_add_exponent(vf x, vf n) {
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(vreinterpretq_s32_f32(n), 23)));
}
static inline bool vf_any_above(vf x, vf limit) { return vmaxvq_u32(vcgtq_f32(x, limit)) != 0; }
static inline vf vf_abs(vf x) { return vabsq_f32(x); }
static inline vf vf_copysign(vf x, vf sign) { return vbslq_f32(vdupq_n_u32(1u << 31), sign, x); }
/* a < b ? x : y */
static inline vf vf_where_less(vf a, vf b, vf x, vf y) { return vbslq_f32(vcltq_f32(a, b), x, y); }
/* x 2^n for whole n in -127..127, 0 for -127 */
static inline vf vf_times_pow2(vf x, vf n) {
    vi e = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
    return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(e, 23)));
}

static inline vf vf_reverse(vf x) {
    vf pairs = vrev64q_f32(x);
    return vextq_f32(pairs, pairs, 2);
}

/* All ones in the lanes whose bit is set. */
static inline uint32x4_t lane_mask(uint32_t bits) {
    const uint32x4_t lanes = {1, 2, 4, 8};
    return vtstq_u32(vdupq_n_u32(bits), lanes);
}
/* Lanes whose bit is clear become 0, or -inf. */
static inline vf vf_keep(uint32_t bits, vf x) { return vbslq_f32(lane_mask(bits), x, vf_zero()); }
static inline vf vf_hide(uint32_t bits, vf x) { return vbslq_f32(lane_mask(bits), x, vf_set1(-__builtin_inff())); }

/* x of lane i and y of lane i in turn: lanes 2 i, 2 i + 1 of two vectors at p. */
static inline void vf_store_pairs(float *p, vf x, vf y) { vst2q_f32(p, ((float32x4x2_t){{x, y}})); }

static inline float vf_sum(vf x) { return vaddvq_f32(x); }
static inline float vf_top(vf x) { return vmaxvq_f32(x); }

/* Part of every AArch64: the FP16 extension is about arithmetic. */
static inline vf vf_load_fp16(const uint8_t *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
static inline vf vf_from_bits(vi x) { return vreinterpretq_f32_s32(x); }

/* Shifts as C writes them: the intrinsics take constants alone. */
static inline vi vi_load(const uint8_t *p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
static inline vi vi_set1(int x) { return vdupq_n_s32(x); }
static inline vi vi_and(vi a, vi b) { return vandq_s32(a, b); }
static inline vi vi_or(vi a, vi b) { return vorrq_s32(a, b); }
static inline vi vi_shl(vi x, int n) { return x << n; }
static inline vi vi_shr(vi x, int n) { return vreinterpretq_s32_u32(vreinterpretq_u32_s32(x) >> (uint32_t)n); }
static inline vf vf_from_int(vi x) { return vcvtq_f32_s32(x); }
static inline vi vi_from_float(vf x) { return vcvtnq_s32_f32(x); } /* nearest */
static inline vi vi_zero(void) { return vdupq_n_s32(0); }
static inline vi vi_add(vi a, vi b) { return vaddq_s32(a, b); }
static inline vi vi_sra(vi x, int n) { return x >> n; }
static inline int vi_sum(vi x) { return vaddvq_s32(x); }
/* The low byte of every lane. */
static inline void vi_store_bytes(int8_t *p, vi x) {
    int16x4_t half = vmovn_s32(x);
    int32_t bytes = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(half, half))), 0);
    memcpy(p, &bytes, sizeof bytes);
}

/* Four vectors at rows [4][4], each reduced: lane r is row r. */
static inline vf vf_sum_rows(const float *rows) {
    return vpaddq_f32(vpaddq_f32(vf_load(rows), vf_load(rows + 4)), vpaddq_f32(vf_load(rows + 8), vf_load(rows + 12)));
}
static inline vf vf_top_rows(const float *rows) {
    return vpmaxq_f32(vpmaxq_f32(vf_load(rows), vf_load(rows + 4)), vpmaxq_f32(vf_load(rows + 8), vf_load(rows + 12)));
}

/* High and low bytes of 64 numbers of 16 bits: y = 256 high + low, in order. */
static inline void vi_split_tile(const vi y[16], int8_t *high, int8_t *low) {
    for (int i = 0; i < 8; i++) {
        int16x8_t numbers = vcombine_s16(vqmovn_s32(y[2 * i]), vqmovn_s32(y[2 * i + 1]));
        vst1_s8(high + 8 * i, vrshrn_n_s16(numbers, 8)); /* rounded: low is what is left, -128 .. 127 */
        vst1_s8(low + 8 * i, vmovn_s16(numbers));
    }
}
static inline int split_unit(int unit) { return 16 * unit; }
static inline int split_quad(int f) { return 4 * f; }

#endif
