/*
 * attn_avx2.c - attention over tiles, the plain C code compiled for avx2 until it has kernels of
 * its own.
 */
#define attn_ops_ref attn_ops_avx2
#include "attn/attn_ref.c"
