/*
 * attn_decode_int2_avx512vnni.c - decode attention on the codes with AVX-512 VNNI: vpdpbusd adds
 * four products of bytes into a 32-bit lane.
 */
#include "attn/attn_vec_avx512.h"

/* At least ten sums under way, and half of the registers left for codes and their words. */
#define DOT_ROWS 8
static inline int dot_vecs(int n_rows) { return n_rows <= 2 ? 4 : n_rows <= 4 ? 2 : 1; }
#define DOT_UNITS(bits) 32 /* the largest head_dim: 512 products of 15 and 32639 stay below 2^31 */
static inline vi dot_add(vi acc, vi codes, vi bytes) { return _mm512_dpbusd_epi32(acc, codes, bytes); }
static inline vi dot_total(vi high, vi low) { return vi_add(vi_shl(high, 8), low); }

#define DECODE_BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#define ATTN_DECODE_TABLE attn_decode_int2_avx512vnni
#define ATTN_DECODE_NAME "avx512vnni"
#include "attn/attn_decode_dot.h"
