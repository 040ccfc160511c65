/*
 * attn_dispatch.c - which table of attention kernels runs.
 */
#include "attn/attn.h"

const attn_ops *attn_ops_current(void) {
#if defined(__x86_64__)
    switch (isa_current()) {
    case ISA_AVX512: return &attn_ops_avx512;
    case ISA_AVX2: return &attn_ops_avx2;
    default: break;
    }
#endif
    return &attn_ops_ref;
}
