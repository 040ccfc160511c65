/*
 * attn_dispatch.c - which tables of attention kernels run.
 */
#include "attn/attn.h"

const attn_ops *attn_ops_current(void) {
#if defined(__x86_64__)
    switch (isa_current()) {
    case ISA_AMX:
    case ISA_AVX512VNNI:
    case ISA_AVX512: return &attn_ops_avx512;
    case ISA_AVXVNNI:
    case ISA_AVX2: return &attn_ops_avx2;
    default: break;
    }
#elif defined(__aarch64__)
    if (isa_current() >= ISA_NEON) return &attn_ops_neon;
#endif
    return &attn_ops_ref;
}

const attn_decode_ops *attn_decode_current(void) {
#if defined(__x86_64__)
    switch (isa_current()) {
    case ISA_AMX: return &attn_decode_int2_amx;
    case ISA_AVX512VNNI: return &attn_decode_int2_avx512vnni;
    /* Without dot products of bytes no faster than tiles of this width, which keep more digits. */
    case ISA_AVX512: return NULL;
    case ISA_AVXVNNI: return &attn_decode_int2_avxvnni;
    case ISA_AVX2: return &attn_decode_int2_avx2;
    default: break;
    }
#elif defined(__aarch64__)
    /* Without dot products of bytes tiles are all there is. */
    if (isa_current() == ISA_NEONDOT) return &attn_decode_int2_neondot;
#endif
    return NULL;
}
