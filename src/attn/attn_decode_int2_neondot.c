/*
 * attn_decode_int2_neondot.c - decode attention on the codes with NEON's dot products: SDOT adds four
 * products of bytes into a 32-bit lane. Codes are at most 15, so they are signed bytes too.
 */
#include "attn/attn_vec_neon.h"

/* 6 rows of 2 vectors, or 3 of 4, times two bytes: 24 accumulators of 32 registers. More vectors
 * share the load of a query's bytes, more rows the unpacking of codes. */
#define DOT_ROWS 6
static inline int dot_vecs(int n_rows) { return n_rows <= 3 ? 4 : 2; }
#define DOT_UNITS(bits) 32 /* the largest head_dim: 512 products of 15 and 32639 stay below 2^31 */
static inline vi dot_add(vi acc, vi codes, vi bytes) {
    return vdotq_s32(acc, vreinterpretq_s8_s32(codes), vreinterpretq_s8_s32(bytes));
}
static inline vi dot_total(vi high, vi low) { return vi_add(vi_shl(high, 8), low); }

#define DECODE_BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#define ATTN_DECODE_TABLE attn_decode_int2_neondot
#define ATTN_DECODE_NAME "neondot"
#include "attn/attn_decode_dot.h"
