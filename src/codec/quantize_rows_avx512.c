/*
 * quantize_rows_avx512.c - the quantiser with one register for the sixteen rows.
 */
#include "codec/codec.h"

#include <immintrin.h>

typedef __m512 lanes;
typedef __mmask16 lanes_mask;

#define LANES_BLOCK 8

static inline lanes lanes_load(const float *p) { return _mm512_load_ps(p); }
static inline void lanes_store(float *p, lanes a) { _mm512_store_ps(p, a); }
static inline lanes lanes_set1(float v) { return _mm512_set1_ps(v); }
static inline lanes lanes_add(lanes a, lanes b) { return _mm512_add_ps(a, b); }
static inline lanes lanes_sub(lanes a, lanes b) { return _mm512_sub_ps(a, b); }
static inline lanes lanes_mul(lanes a, lanes b) { return _mm512_mul_ps(a, b); }
static inline lanes lanes_div(lanes a, lanes b) { return _mm512_div_ps(a, b); }
static inline lanes lanes_fma(lanes a, lanes b, lanes c) { return _mm512_fmadd_ps(a, b, c); }
static inline lanes lanes_fnma(lanes a, lanes b, lanes c) { return _mm512_fnmadd_ps(a, b, c); }
static inline lanes lanes_min(lanes a, lanes b) { return _mm512_min_ps(a, b); }
static inline lanes lanes_max(lanes a, lanes b) { return _mm512_max_ps(a, b); }
static inline lanes lanes_abs(lanes a) { return _mm512_abs_ps(a); }
static inline lanes lanes_trunc(lanes a) { return _mm512_cvtepi32_ps(_mm512_cvttps_epi32(a)); }
static inline lanes lanes_fp16(lanes a) {
    const lanes largest = _mm512_set1_ps(65504.0f);
    a = _mm512_max_ps(_mm512_min_ps(a, largest), _mm512_sub_ps(_mm512_setzero_ps(), largest));
    return _mm512_cvtph_ps(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline lanes_mask lanes_lt(lanes a, lanes b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static inline lanes_mask lanes_le(lanes a, lanes b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
static inline lanes_mask lanes_and(lanes_mask a, lanes_mask b) { return a & b; }
static inline uint32_t lanes_bits(lanes_mask a) { return a; }
static inline lanes_mask lanes_mask_of(uint32_t bits) { return (lanes_mask)bits; }
static inline lanes lanes_loadu(const float *p) { return _mm512_loadu_ps(p); }
static inline lanes lanes_pick(lanes a, int lane) { return _mm512_permutexvar_ps(_mm512_set1_epi32(lane), a); }
static inline lanes lanes_swap1(lanes a) { return _mm512_permute_ps(a, 0xb1); }
static inline lanes lanes_swap2(lanes a) { return _mm512_permute_ps(a, 0x4e); }
static inline lanes lanes_swap4(lanes a) { return _mm512_shuffle_f32x4(a, a, 0xb1); }
static inline lanes lanes_swap8(lanes a) { return _mm512_shuffle_f32x4(a, a, 0x4e); }
static inline lanes lanes_select(lanes_mask mask, lanes a, lanes b) { return _mm512_mask_blend_ps(mask, b, a); }

#include "codec/quantize_rows.inc.h"

const codec_ops codec_ops_avx512 = {"avx512", quantize_rows};
