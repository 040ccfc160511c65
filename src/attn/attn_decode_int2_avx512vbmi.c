/*
 * attn_decode_int2_avx512vbmi.c - decode attention on the codes with AVX-512 VNNI and VBMI: values and keys of more than 2
 * bits by vpdpbusd, which adds four products of bytes into a 32-bit lane, keys of 2 bits by tables.
 */
#include "attn/attn_vec_avx512.h"

/* Up to sixteen sums under way, and half of the registers left for codes and their words. Blocks of up to four rows need half of
 * the loads that larger ones do: AMD's processors with VBMI gain, Intel's neither gain nor lose. */
#define DOT_ROWS 4
static inline int dot_vecs(int n_rows) { return n_rows <= 2 ? 4 : 2; }
#define DOT_UNITS(bits) 32 /* the largest head_dim: 512 products of 15 and 32639 stay below 2^31 */
static inline vi dot_add(vi acc, vi codes, vi bytes) { return _mm512_dpbusd_epi32(acc, codes, bytes); }
static inline vi dot_total(vi high, vi low) { return vi_add(vi_shl(high, 8), low); }

#define DOT_TABLES "attn/attn_decode_tables_vbmi.h"
#define DECODE_BLOCKS(X) X(1) X(2) X(3) X(4)
#define BIAS_ROWS 8
#define BIAS_BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#define ATTN_DECODE_TABLE attn_decode_int2_avx512vbmi
#define ATTN_DECODE_NAME "avx512vbmi"
#include "attn/attn_decode_dot.h"
