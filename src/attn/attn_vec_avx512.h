/*
 * attn_vec_avx512.h - a vector of 16 floats or 32-bit integers, and what the kernels do with it.
 */
#ifndef OSCAR_ATTN_VEC_H
#define OSCAR_ATTN_VEC_H

#include <immintrin.h>

#include "attn/attn.h"

#define LANES 16
typedef __m512 vf;
typedef __m512i vi;

static inline vf vf_zero(void) { return _mm512_setzero_ps(); }
static inline vf vf_set1(float x) { return _mm512_set1_ps(x); }
static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
/* x - n for the whole n at or below x, which vf_times_pow2() takes: it rounds down itself. */
static inline vf vf_fraction(vf x, vf *n) {
    *n = x;
    return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
static inline bool vf_any_above(vf x, vf limit) { return _mm512_cmp_ps_mask(x, limit, _CMP_GT_OQ) != 0; }
static inline vf vf_abs(vf x) { return _mm512_abs_ps(x); }
static inline vf vf_copysign(vf x, vf sign) {
    return _mm512_or_ps(x, _mm512_and_ps(_mm512_set1_ps(-0.0f), sign));
}
/* a < b ? x : y */
static inline vf vf_where_less(vf a, vf b, vf x, vf y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
/* x 2^n, n rounded down; -inf included. */
static inline vf vf_times_pow2(vf x, vf n) { return _mm512_scalef_ps(x, n); }

static inline vf vf_reverse(vf x) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), x);
}

/* Lanes whose bit is clear become 0, or -inf. */
static inline vf vf_keep(uint32_t bits, vf x) { return _mm512_maskz_mov_ps((__mmask16)bits, x); }
static inline vf vf_hide(uint32_t bits, vf x) {
    return _mm512_mask_blend_ps((__mmask16)bits, _mm512_set1_ps(-__builtin_inff()), x);
}

/* x of lane i and y of lane i in turn: lanes 2 i, 2 i + 1 of two vectors at p. */
static inline void vf_store_pairs(float *p, vf x, vf y) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    _mm512_storeu_ps(p, _mm512_permutex2var_ps(x, low, y));
    _mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(x, high, y));
}

/* Lanes 0 to 3 and 4 to 7 exchanged, as 8 to 11 and 12 to 15. */
static inline vf vf_swap_quads(vf x) { return _mm512_shuffle_f32x4(x, x, 0xb1); }

static inline float vf_sum(vf x) { return _mm512_reduce_add_ps(x); }
static inline float vf_top(vf x) { return _mm512_reduce_max_ps(x); }

static inline vf vf_load_fp16(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline vf vf_from_bits(vi x) { return _mm512_castsi512_ps(x); }

static inline vi vi_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
static inline vi vi_set1(int x) { return _mm512_set1_epi32(x); }
static inline vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
static inline vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
static inline vi vi_shl(vi x, int n) { return _mm512_slli_epi32(x, (unsigned)n); }
static inline vi vi_shr(vi x, int n) { return _mm512_srli_epi32(x, (unsigned)n); }
static inline vf vf_from_int(vi x) { return _mm512_cvtepi32_ps(x); }
static inline vi vi_from_float(vf x) { return _mm512_cvtps_epi32(x); } /* nearest */
static inline vi vi_zero(void) { return _mm512_setzero_si512(); }
static inline vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
static inline vi vi_sra(vi x, int n) { return _mm512_srai_epi32(x, (unsigned)n); }
static inline int vi_sum(vi x) { return _mm512_reduce_add_epi32(x); }
/* The low byte of every lane. */
static inline void vi_store_bytes(int8_t *p, vi x) { _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8(x)); }


/* NAME_four: vectors 0, step, 2 step, 3 step of rows [][16], each reduced to four lanes, side by side.
 * NAME_rows: sixteen vectors, each reduced: lane r is row r. Vector k of a level's result holds rows k, 4 + k,
 * 8 + k, 12 + k, so that the last shuffle leaves them in order.
 * NAME_half: eight vectors, every one in the same order, to lanes 0 to 7. */
#define VF_REDUCE(name, op)                                                                        \
    static inline vf name##_four(const float *rows, int step) {                                    \
        vf a = vf_load(rows), b = vf_load(rows + 16 * step);                                       \
        vf c = vf_load(rows + 32 * step), d = vf_load(rows + 48 * step);                           \
        a = op(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));                \
        c = op(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));                \
        return op(_mm512_shuffle_f32x4(a, c, 0x88), _mm512_shuffle_f32x4(a, c, 0xdd));             \
    }                                                                                              \
    static inline vf name##_two(vf a, vf b) {                                                      \
        return op(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));                   \
    }                                                                                              \
    static inline vf name##_one(vf a, vf b) {                                                      \
        return op(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));                   \
    }                                                                                              \
    static inline vf name##_rows(const float *rows) {                                              \
        vf a = name##_two(name##_four(rows, 4), name##_four(rows + 16, 4));                        \
        return name##_one(a, name##_two(name##_four(rows + 32, 4), name##_four(rows + 48, 4)));    \
    }                                                                                              \
    static inline vf name##_half(const float *rows) {                                              \
        vf a = name##_two(name##_four(rows, 2), name##_four(rows + 16, 2));                        \
        return _mm512_maskz_compress_ps(0x3333, name##_one(a, a));                                 \
    }
#define VF_HALF_ROWS 8
VF_REDUCE(vf_sum, vf_add)
VF_REDUCE(vf_top, vf_max)

/* High and low bytes of 64 numbers of 16 bits: y = 256 high + low. Quads of tokens end up where the
 * packing leaves them: quad f of unit u at byte 4 u + 16 f. */
static inline void vi_split_tile(const vi y[4], int8_t *high, int8_t *low) {
    vi a = _mm512_packs_epi32(y[0], y[1]), b = _mm512_packs_epi32(y[2], y[3]);
    const vi half = _mm512_set1_epi16(128);
    vi high_a = _mm512_srai_epi16(_mm512_add_epi16(a, half), 8), high_b = _mm512_srai_epi16(_mm512_add_epi16(b, half), 8);
    vi low_a = _mm512_sub_epi16(a, _mm512_slli_epi16(high_a, 8)), low_b = _mm512_sub_epi16(b, _mm512_slli_epi16(high_b, 8));
    _mm512_storeu_si512(high, _mm512_packs_epi16(high_a, high_b));
    _mm512_storeu_si512(low, _mm512_packs_epi16(low_a, low_b));
}
static inline int split_unit(int unit) { return 4 * unit; }
static inline int split_quad(int f) { return 16 * f; }

#endif
