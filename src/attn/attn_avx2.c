/*
 * attn_avx2.c - attention over tiles with AVX2, FMA and F16C: vectors of 8 floats.
 */
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
static inline vf vf_round(vf x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline vf vf_abs(vf x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
static inline vf vf_copysign(vf x, vf sign) {
    return _mm256_or_ps(x, _mm256_and_ps(_mm256_set1_ps(-0.0f), sign));
}
/* a < b ? x : y */
static inline vf vf_where_less(vf a, vf b, vf x, vf y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
/* x 2^n for whole n in -126..127 */
static inline vf vf_times_pow2(vf x, vf n) {
    __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)));
}

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
static inline vf vf_load_bf16(const uint16_t *p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

static inline vi vi_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline vi vi_set1(int x) { return _mm256_set1_epi32(x); }
static inline vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
static inline vi vi_or(vi a, vi b) { return _mm256_or_si256(a, b); }
static inline vi vi_shl(vi x, int n) { return _mm256_slli_epi32(x, n); }
static inline vi vi_shr(vi x, int n) { return _mm256_srli_epi32(x, n); }
static inline vf vf_from_int(vi x) { return _mm256_cvtepi32_ps(x); }

/* 6 x 16: 12 accumulators, 2 vectors of B and a broadcast fill the 16 registers. One or two rows
 * take 32 columns, or too few sums would be under way to cover the latency. */
#define ROWS_MAX 6
#define GEMM_BLOCKS(X) X(1, 2) X(2, 2) X(3, 2) X(4, 2) X(5, 2) X(6, 2) X(1, 4) X(2, 4)
static inline int block_rows(int n_rows) { return n_rows <= 2 ? 2 : 6; }
static inline int panel_units(int n_rows) { return n_rows <= 2 ? 2 : 1; }

#define ATTN_X86_TABLE attn_ops_avx2
#define ATTN_X86_NAME "avx2"
#include "attn/attn_x86.h"
