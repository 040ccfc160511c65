/*
 * attn_dispatch.c - which tables of attention kernels run, and the middle of a bias table.
 */
#include "attn/attn.h"

#include <math.h>

/* The two middle slots are the vector at the middle turned by half a step either way, so their sum lies along it, their
 * difference across it: the longer of the two tells its angle. */
void attn_middle(const float *bias_table, int32_t n_pairs, float *cosines, float *sines) {
    const int32_t before = OSCAR_PAGE_TOKENS / 2 - 1, after = before + 1;
    for (int32_t p = 0; p < n_pairs; p++) {
        const float *x = bias_table + (size_t)(2 * p) * OSCAR_PAGE_TOKENS, *y = x + OSCAR_PAGE_TOKENS;
        float c = x[before] + x[after], s = y[before] + y[after];
        float across_c = y[after] - y[before], across_s = x[before] - x[after];
        if (across_c * across_c + across_s * across_s > c * c + s * s) c = across_c, s = across_s;
        const float length = sqrtf(c * c + s * s);
        cosines[p] = length > 0.0f ? c / length : 1.0f;
        sines[p] = length > 0.0f ? s / length : 0.0f;
    }
}

const attn_ops *attn_ops_current(void) {
#if defined(__x86_64__)
    switch (isa_current()) {
    case ISA_AMX:
    case ISA_AVX512VBMI:
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
    case ISA_AVX512VBMI: return &attn_decode_int2_avx512vbmi;
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
