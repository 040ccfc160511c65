/*
 * bench_cuda.h - `oscar bench attn --device cuda`.
 */
#ifndef OSCAR_CLI_BENCH_CUDA_H
#define OSCAR_CLI_BENCH_CUDA_H

#include <stdbool.h>
#include <stdint.h>

/* One layer: n_q_heads = group * n_kv_heads. 1, 4, 16, .. up to n_seqs sequences of depth tokens. Returns a cli_exit;
 * the message says when there is no library or no GPU. */
int bench_cuda_attn(int32_t head_dim, int32_t n_kv_heads, int32_t group, int32_t bits, int32_t n_tracked, int32_t depth,
                    int32_t n_seqs, bool json);

#endif
