/*
 * attn_decode_int2_avx2.c - decode attention on the codes with AVX2: vpmaddubsw adds two products of
 * bytes into a 16-bit lane.
 */
#include "attn/attn_vec_avx2.h"

/* A sum that stays where it is: GCC would make trees of integer sums, for whose terms there are no registers. */
static inline vi in_order(vi sum) {
    __asm__("" : "+x"(sum));
    return sum;
}

/* Seven rows: 14 sums of 16 registers. */
#define DOT_ROWS 7
static inline int dot_vecs(int n_rows) { return n_rows <= 2 ? 2 : 1; }
/* Four sums of two products of a code and a byte of -128 a unit, before 16 bits overflow. */
#define DOT_UNITS(bits) ((bits) == 2 ? 8 : (bits) == 3 ? 4 : 2)
static inline vi dot_add(vi acc, vi codes, vi bytes) {
    return in_order(_mm256_add_epi16(acc, _mm256_maddubs_epi16(codes, bytes)));
}
static inline vi dot_total(vi high, vi low) {
    return _mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(256)),
                            _mm256_madd_epi16(low, _mm256_set1_epi16(1)));
}

#define DOT_TABLES "attn/attn_decode_tables_avx2.h"
#define DECODE_BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define BIAS_ROWS 6
#define BIAS_BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#define ATTN_DECODE_TABLE attn_decode_int2_avx2
#define ATTN_DECODE_NAME "avx2"
#include "attn/attn_decode_dot.h"
