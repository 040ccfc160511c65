/*
 * attn_vec_avx2.h - a vector of 8 floats or 32-bit integers, and what the kernels do with it.
 */
#ifndef OSCAR_ATTN_VEC_H
#define OSCAR_ATTN_VEC_H

#include <immintrin.h>

#include "attn/attn.h"

#define LANES 8
typedef __m256 vf;
typedef __m256i vi;

static inline vf vf_zero(void) { return _mm256_setzero_ps(); }
static inline vf vf_set1(float x) { return _mm256_set1_ps(x); }
static inline vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
static inline vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
/* x - n for the whole n at or below x, which vf_times_pow2() takes; x below -127 counts as that. */
static inline vf vf_fraction(vf x, vf *n) {
    x = _mm256_max_ps(_mm256_set1_ps(-127.0f), x); /* NaN stays */
    *n = _mm256_floor_ps(x);
    return _mm256_sub_ps(x, *n);
}
/* x 2^n as long as that is a normal number; n: the low bits of a float whose last bit is 1 */
#define VF_ADD_EXPONENT
static inline vf vf_add_exponent(vf x, vf n) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
}
static inline bool vf_any_above(vf x, vf limit) { return _mm256_movemask_ps(_mm256_cmp_ps(x, limit, _CMP_GT_OQ)) != 0; }
static inline vf vf_abs(vf x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
static inline vf vf_copysign(vf x, vf sign) {
    return _mm256_or_ps(x, _mm256_and_ps(_mm256_set1_ps(-0.0f), sign));
}
/* a < b ? x : y */
static inline vf vf_where_less(vf a, vf b, vf x, vf y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
/* x 2^n for whole n in -127..127, 0 for -127 */
static inline vf vf_times_pow2(vf x, vf n) {
    __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)));
}

static inline vf vf_reverse(vf x) { return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0)); }

/* All ones in the lanes whose bit is set. */
static inline __m256 lane_mask(uint32_t bits) {
    const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i set = _mm256_and_si256(_mm256_set1_epi32((int)bits), lanes);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lanes));
}
/* Lanes whose bit is clear become 0, or -inf. */
static inline vf vf_keep(uint32_t bits, vf x) { return _mm256_and_ps(lane_mask(bits), x); }
static inline vf vf_hide(uint32_t bits, vf x) {
    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), x, lane_mask(bits));
}

/* x of lane i and y of lane i in turn: lanes 2 i, 2 i + 1 of two vectors at p. */
static inline void vf_store_pairs(float *p, vf x, vf y) {
    __m256 low = _mm256_unpacklo_ps(x, y), high = _mm256_unpackhi_ps(x, y);
    _mm256_storeu_ps(p, _mm256_permute2f128_ps(low, high, 0x20));
    _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(low, high, 0x31));
}

/* Lanes 0 to 3 and 4 to 7 exchanged. */
static inline vf vf_swap_quads(vf x) { return _mm256_permute2f128_ps(x, x, 1); }

static inline float vf_sum(vf x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float vf_top(vf x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

static inline vf vf_load_fp16(const uint8_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline vf vf_from_bits(vi x) { return _mm256_castsi256_ps(x); }

static inline vi vi_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline vi vi_set1(int x) { return _mm256_set1_epi32(x); }
static inline vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
static inline vi vi_or(vi a, vi b) { return _mm256_or_si256(a, b); }
static inline vi vi_shl(vi x, int n) { return _mm256_slli_epi32(x, n); }
static inline vi vi_shr(vi x, int n) { return _mm256_srli_epi32(x, n); }
static inline vf vf_from_int(vi x) { return _mm256_cvtepi32_ps(x); }
static inline vi vi_from_float(vf x) { return _mm256_cvtps_epi32(x); } /* nearest */
static inline vi vi_zero(void) { return _mm256_setzero_si256(); }
static inline vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
static inline vi vi_sra(vi x, int n) { return _mm256_srai_epi32(x, n); }
static inline int vi_sum(vi x) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
/* The low byte of every lane. */
static inline void vi_store_bytes(int8_t *p, vi x) {
    const __m128i pick = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128(x), pick);
    __m128i high = _mm_shuffle_epi8(_mm256_extracti128_si256(x, 1), pick);
    _mm_storel_epi64((__m128i *)(void *)p, _mm_unpacklo_epi32(low, high));
}


/* Eight vectors at rows [8][8], each reduced: lane r is row r. Vector k of a level's result holds
 * rows k, 4 + k, so that the last shuffle leaves them in order. */
#define VF_REDUCE_ROWS(name, op)                                                                   \
    static inline vf name(const float *rows) {                                                     \
        vf four[4], two[2];                                                                        \
        for (int k = 0; k < 4; k++) {                                                              \
            vf a = vf_load(rows + 8 * k), b = vf_load(rows + 8 * (k + 4));                         \
            four[k] = op(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));  \
        }                                                                                          \
        for (int k = 0; k < 2; k++) {                                                              \
            vf a = four[2 * k], b = four[2 * k + 1];                                               \
            two[k] = op(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));             \
        }                                                                                          \
        return op(_mm256_shuffle_ps(two[0], two[1], 0x88), _mm256_shuffle_ps(two[0], two[1], 0xdd)); \
    }
VF_REDUCE_ROWS(vf_sum_rows, vf_add)
VF_REDUCE_ROWS(vf_top_rows, vf_max)

/* High and low bytes of 64 numbers of 16 bits: y = 256 high + low. Quads of tokens end up where the
 * packing leaves them: within a half of 32 bytes, quad f of unit u (of two) at dword 4 (f % 2) +
 * 2 u + f / 2. */
static inline void vi_split_tile(const vi y[8], int8_t *high, int8_t *low) {
    const vi half = _mm256_set1_epi16(128);
    for (int i = 0; i < 2; i++) {
        vi a = _mm256_packs_epi32(y[4 * i], y[4 * i + 1]), b = _mm256_packs_epi32(y[4 * i + 2], y[4 * i + 3]);
        vi high_a = _mm256_srai_epi16(_mm256_add_epi16(a, half), 8), high_b = _mm256_srai_epi16(_mm256_add_epi16(b, half), 8);
        vi low_a = _mm256_sub_epi16(a, _mm256_slli_epi16(high_a, 8)), low_b = _mm256_sub_epi16(b, _mm256_slli_epi16(high_b, 8));
        _mm256_storeu_si256((__m256i *)(void *)(high + 32 * i), _mm256_packs_epi16(high_a, high_b));
        _mm256_storeu_si256((__m256i *)(void *)(low + 32 * i), _mm256_packs_epi16(low_a, low_b));
    }
}
static inline int split_unit(int unit) { return unit / 2 * 32 + unit % 2 * 8; }
static inline int split_quad(int f) { return f % 2 * 16 + f / 2 * 4; }

#endif
