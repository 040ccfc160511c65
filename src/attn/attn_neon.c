/*
 * attn_neon.c - attention over tiles with NEON as every AArch64 has it: vectors of 4 floats.
 */
#include "attn/attn_vec_neon.h"

/* 6 x 16: 24 accumulators, 4 vectors of B and a broadcast fit in 32 registers. */
#define ROWS_MAX 6
#define GEMM_BLOCKS(X) X(1, 4) X(2, 4) X(3, 4) X(4, 4) X(5, 4) X(6, 4)
static inline int block_rows(int n_rows) { return (void)n_rows, ROWS_MAX; }
static inline int panel_units(int n_rows) { return (void)n_rows, 1; }

#define ATTN_TABLE attn_ops_neon
#define ATTN_NAME "neon"
#include "attn/attn_tiles.h"
