/*
 * half.c - fp16 in portable integer arithmetic: the same bits as F16C and as every other path.
 */
#include "base/base.h"

float fp16_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t exponent = (h >> 10) & 31, mantissa = h & 0x3ffu;
    if (exponent == 31) return bits_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent) return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
    /* Subnormal: mantissa * 2^-24, exact in float32. */
    float f = (float)mantissa * 0x1p-24f;
    return bits_float(sign | float_bits(f));
}

uint16_t fp16_from_float(float f) {
    uint32_t u = float_bits(f), magnitude = u & 0x7fffffffu;
    uint16_t sign = (uint16_t)(u >> 16 & 0x8000u);
    if (magnitude > 0x7f800000u) return sign | 0x7e00u; /* quiet NaN */
    /* From 65520 on nearest-even would give infinity; infinities saturate as well. */
    if (magnitude >= 0x477ff000u) return sign | 0x7bffu;
    if (magnitude >= 0x38800000u) { /* normal in fp16: rebias, round away 13 bits */
        uint32_t rounded = magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1);
        return sign | (uint16_t)(rounded >> 13);
    }
    if (magnitude < 0x33000000u) return sign; /* below 2^-25: nearest is zero */
    uint32_t shift = 126 - (magnitude >> 23); /* 14 .. 24 */
    uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    uint32_t rounded = mantissa + (1u << (shift - 1)) - 1 + (mantissa >> shift & 1);
    return sign | (uint16_t)(rounded >> shift);
}
