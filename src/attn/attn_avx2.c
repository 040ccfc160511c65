/*
 * attn_avx2.c - attention over tiles with AVX2, FMA and F16C: vectors of 8 floats.
 */
#include "attn/attn_vec_avx2.h"

/* 6 x 16: 12 accumulators, 2 vectors of B and a broadcast fill the 16 registers. One or two rows
 * take 32 columns, or too few sums would be under way to cover the latency. */
#define ROWS_MAX 6
#define GEMM_BLOCKS(X) X(1, 2) X(2, 2) X(3, 2) X(4, 2) X(5, 2) X(6, 2) X(1, 4) X(2, 4)
static inline int block_rows(int n_rows) { return n_rows <= 2 ? 2 : 6; }
static inline int panel_units(int n_rows) { return n_rows <= 2 ? 2 : 1; }

#define ATTN_TABLE attn_ops_avx2
#define ATTN_NAME "avx2"
#include "attn/attn_tiles.h"
