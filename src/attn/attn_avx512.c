/*
 * attn_avx512.c - attention over tiles with AVX-512 F, BW, DQ, VL: vectors of 16 floats.
 */
#include "attn/attn_vec_avx512.h"

/* 24 accumulators, the vectors of B and a broadcast fit in 32 registers: 6 x 64 for few rows, else
 * 12 x 32, which reads B half as often; a whole group of query heads then passes at once. */
#define ROWS_MAX 12
#define GEMM_UP_TO_6(X, vecs) X(1, vecs) X(2, vecs) X(3, vecs) X(4, vecs) X(5, vecs) X(6, vecs)
#define GEMM_UP_TO_12(X, vecs)                                                                     \
    GEMM_UP_TO_6(X, vecs) X(7, vecs) X(8, vecs) X(9, vecs) X(10, vecs) X(11, vecs) X(12, vecs)
#define GEMM_BLOCKS(X) GEMM_UP_TO_12(X, 1) GEMM_UP_TO_12(X, 2) GEMM_UP_TO_6(X, 3) GEMM_UP_TO_6(X, 4)
static inline int block_rows(int n_rows) { return n_rows <= 6 ? 6 : 12; }
static inline int panel_units(int n_rows) { return n_rows <= 6 ? 4 : 2; }

#define ATTN_TABLE attn_ops_avx512
#define ATTN_NAME "avx512"
#include "attn/attn_tiles.h"
