/*
 * attn_avx512.c - attention over tiles, the plain C code compiled for avx512 until it has kernels of
 * its own.
 */
#define attn_ops_ref attn_ops_avx512
#include "attn/attn_ref.c"
