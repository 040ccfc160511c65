/*
 * attn_decode_int2_avxvnni.c - decode attention on the codes with AVX-VNNI, which processors without
 * AVX-512 have: vpdpbusd on 32 bytes.
 */
#include "attn/attn_vec_avx2.h"

/* Seven rows: 14 accumulators of 16 registers; the codes and a query's bytes take the others. */
#define DOT_ROWS 7
static inline int dot_vecs(int n_rows) { return n_rows <= 3 ? 2 : 1; }
#define DOT_UNITS(bits) 32 /* the largest head_dim: 512 products of 15 and 32639 stay below 2^31 */
static inline vi dot_add(vi acc, vi codes, vi bytes) { return _mm256_dpbusd_avx_epi32(acc, codes, bytes); }
static inline vi dot_total(vi high, vi low) { return vi_add(vi_shl(high, 8), low); }

#define DECODE_BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define BIAS_ROWS 6
#define BIAS_BLOCKS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#define ATTN_DECODE_TABLE attn_decode_int2_avxvnni
#define ATTN_DECODE_NAME "avxvnni"
#include "attn/attn_decode_dot.h"
