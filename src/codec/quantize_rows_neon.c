/*
 * quantize_rows_neon.c - the quantiser with four NEON registers for the sixteen rows.
 */
#include "codec/codec.h"

#include <arm_neon.h>

typedef struct lanes {
    float32x4_t v[4]; /* rows 0-3, 4-7, 8-11, 12-15 */
} lanes;
typedef struct lanes_mask {
    uint32x4_t v[4]; /* all ones or zeros in a lane */
} lanes_mask;

#define LANES_BLOCK 4
#define LANES_OF(type, expression)                                                                 \
    type y;                                                                                        \
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) y.v[i] = (expression);                     \
    return y

static inline lanes lanes_load(const float *p) { LANES_OF(lanes, vld1q_f32(p + 4 * i)); }
static inline lanes lanes_loadu(const float *p) { return lanes_load(p); }
static inline void lanes_store(float *p, lanes a) {
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]);
}
static inline lanes lanes_set1(float x) { LANES_OF(lanes, vdupq_n_f32(x)); }
static inline lanes lanes_add(lanes a, lanes b) { LANES_OF(lanes, vaddq_f32(a.v[i], b.v[i])); }
static inline lanes lanes_sub(lanes a, lanes b) { LANES_OF(lanes, vsubq_f32(a.v[i], b.v[i])); }
static inline lanes lanes_mul(lanes a, lanes b) { LANES_OF(lanes, vmulq_f32(a.v[i], b.v[i])); }
static inline lanes lanes_div(lanes a, lanes b) { LANES_OF(lanes, vdivq_f32(a.v[i], b.v[i])); }
static inline lanes lanes_fma(lanes a, lanes b, lanes c) { LANES_OF(lanes, vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
static inline lanes lanes_fnma(lanes a, lanes b, lanes c) { LANES_OF(lanes, vfmsq_f32(c.v[i], a.v[i], b.v[i])); }
/* Comparisons and not FMIN and FMAX, which order -0 and 0 and pass NaN on: b when equal, as elsewhere. */
static inline lanes lanes_min(lanes a, lanes b) { LANES_OF(lanes, vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
static inline lanes lanes_max(lanes a, lanes b) { LANES_OF(lanes, vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
static inline lanes lanes_abs(lanes a) { LANES_OF(lanes, vabsq_f32(a.v[i])); }
static inline lanes lanes_trunc(lanes a) { LANES_OF(lanes, vcvtq_f32_s32(vcvtq_s32_f32(a.v[i]))); }
static inline lanes lanes_fp16(lanes a) {
    const float32x4_t largest = vdupq_n_f32(65504.0f), least = vdupq_n_f32(-65504.0f);
    LANES_OF(lanes, vcvt_f32_f16(vcvt_f16_f32(vmaxq_f32(vminq_f32(a.v[i], largest), least))));
}
static inline lanes_mask lanes_lt(lanes a, lanes b) { LANES_OF(lanes_mask, vcltq_f32(a.v[i], b.v[i])); }
static inline lanes_mask lanes_le(lanes a, lanes b) { LANES_OF(lanes_mask, vcleq_f32(a.v[i], b.v[i])); }
static inline lanes_mask lanes_and(lanes_mask a, lanes_mask b) { LANES_OF(lanes_mask, vandq_u32(a.v[i], b.v[i])); }
static inline uint32_t lanes_bits(lanes_mask a) {
    const uint32x4_t bit = {1, 2, 4, 8};
    uint32_t bits = 0;
    for (int i = 0; i < 4; i++) bits |= vaddvq_u32(vandq_u32(a.v[i], bit)) << 4 * i;
    return bits;
}
static inline lanes_mask lanes_mask_of(uint32_t bits) {
    const uint32x4_t bit = {1, 2, 4, 8};
    LANES_OF(lanes_mask, vtstq_u32(vdupq_n_u32(bits >> 4 * i), bit));
}
static inline lanes lanes_pick(lanes a, int lane) {
    _Alignas(64) float out[CODEC_LANES];
    lanes_store(out, a);
    return lanes_set1(out[lane]);
}
static inline lanes lanes_swap1(lanes a) { LANES_OF(lanes, vrev64q_f32(a.v[i])); }
static inline lanes lanes_swap2(lanes a) { LANES_OF(lanes, vextq_f32(a.v[i], a.v[i], 2)); }
static inline lanes lanes_swap4(lanes a) { LANES_OF(lanes, a.v[i ^ 1]); }
static inline lanes lanes_swap8(lanes a) { LANES_OF(lanes, a.v[i ^ 2]); }
static inline lanes lanes_select(lanes_mask mask, lanes a, lanes b) { LANES_OF(lanes, vbslq_f32(mask.v[i], a.v[i], b.v[i])); }

#include "codec/quantize_rows.inc.h"

const codec_ops codec_ops_neon = {"neon", quantize_rows};
