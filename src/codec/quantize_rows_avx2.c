/*
 * quantize_rows_avx2.c - the quantiser with two registers for the sixteen rows.
 */
#include "codec/codec.h"

#include <immintrin.h>

typedef struct lanes {
    __m256 a, b; /* rows 0-7, 8-15 */
} lanes;
typedef lanes lanes_mask; /* all ones or zeros in a lane */

#define LANES_BLOCK 4

static inline lanes lanes_load(const float *p) { return (lanes){_mm256_load_ps(p), _mm256_load_ps(p + 8)}; }
static inline void lanes_store(float *p, lanes x) {
    _mm256_store_ps(p, x.a);
    _mm256_store_ps(p + 8, x.b);
}
static inline lanes lanes_set1(float v) { return (lanes){_mm256_set1_ps(v), _mm256_set1_ps(v)}; }

#define LANES_BINARY(name, instruction)                                                            \
    static inline lanes name(lanes x, lanes y) {                                                   \
        return (lanes){instruction(x.a, y.a), instruction(x.b, y.b)};                              \
    }
LANES_BINARY(lanes_add, _mm256_add_ps)
LANES_BINARY(lanes_sub, _mm256_sub_ps)
LANES_BINARY(lanes_mul, _mm256_mul_ps)
LANES_BINARY(lanes_div, _mm256_div_ps)
LANES_BINARY(lanes_min, _mm256_min_ps)
LANES_BINARY(lanes_max, _mm256_max_ps)
LANES_BINARY(lanes_and, _mm256_and_ps)

static inline lanes lanes_fma(lanes x, lanes y, lanes z) {
    return (lanes){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline lanes lanes_fnma(lanes x, lanes y, lanes z) {
    return (lanes){_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
static inline lanes lanes_abs(lanes x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return (lanes){_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
static inline lanes lanes_trunc(lanes x) {
    return (lanes){_mm256_cvtepi32_ps(_mm256_cvttps_epi32(x.a)), _mm256_cvtepi32_ps(_mm256_cvttps_epi32(x.b))};
}
static inline __m256 half_lanes_fp16(__m256 x) {
    const __m256 largest = _mm256_set1_ps(65504.0f);
    x = _mm256_max_ps(_mm256_min_ps(x, largest), _mm256_sub_ps(_mm256_setzero_ps(), largest));
    return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline lanes lanes_fp16(lanes x) { return (lanes){half_lanes_fp16(x.a), half_lanes_fp16(x.b)}; }
static inline lanes_mask lanes_lt(lanes x, lanes y) {
    return (lanes){_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)};
}
static inline lanes_mask lanes_le(lanes x, lanes y) {
    return (lanes){_mm256_cmp_ps(x.a, y.a, _CMP_LE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LE_OQ)};
}
static inline uint32_t lanes_bits(lanes_mask x) {
    return (uint32_t)_mm256_movemask_ps(x.a) | (uint32_t)_mm256_movemask_ps(x.b) << 8;
}
static inline __m256 half_mask_of(uint32_t bits) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), bit), bit));
}
static inline lanes_mask lanes_mask_of(uint32_t bits) {
    return (lanes){half_mask_of(bits), half_mask_of(bits >> 8)};
}
static inline lanes lanes_loadu(const float *p) { return (lanes){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline lanes lanes_pick(lanes x, int lane) {
    const __m256 y = _mm256_permutevar8x32_ps(lane < 8 ? x.a : x.b, _mm256_set1_epi32(lane & 7));
    return (lanes){y, y};
}
static inline lanes lanes_swap1(lanes x) { return (lanes){_mm256_permute_ps(x.a, 0xb1), _mm256_permute_ps(x.b, 0xb1)}; }
static inline lanes lanes_swap2(lanes x) { return (lanes){_mm256_permute_ps(x.a, 0x4e), _mm256_permute_ps(x.b, 0x4e)}; }
static inline lanes lanes_swap4(lanes x) {
    return (lanes){_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
}
static inline lanes lanes_swap8(lanes x) { return (lanes){x.b, x.a}; }
static inline lanes lanes_select(lanes_mask mask, lanes x, lanes y) {
    return (lanes){_mm256_blendv_ps(y.a, x.a, mask.a), _mm256_blendv_ps(y.b, x.b, mask.b)};
}

#include "codec/quantize_rows.inc.h"

const codec_ops codec_ops_avx2 = {"avx2", quantize_rows};
