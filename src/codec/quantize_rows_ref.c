/*
 * quantize_rows_ref.c - the quantiser in plain C: it always builds and defines the answer.
 */
#include "codec/codec.h"

#include <math.h>

typedef struct lanes {
    float f[CODEC_LANES];
} lanes;
typedef uint32_t lanes_mask;

#define LANES_BLOCK 4
#define EACH for (int l = 0; l < CODEC_LANES; l++)
#define LANES_BINARY(name, expression)                                                             \
    static inline lanes name(lanes a, lanes b) {                                                   \
        lanes y;                                                                                   \
        EACH y.f[l] = (expression);                                                                \
        return y;                                                                                  \
    }

LANES_BINARY(lanes_add, a.f[l] + b.f[l])
LANES_BINARY(lanes_sub, a.f[l] - b.f[l])
LANES_BINARY(lanes_mul, a.f[l] * b.f[l])
LANES_BINARY(lanes_div, a.f[l] / b.f[l])
/* As minps and maxps: b when they are equal or one is NaN. */
LANES_BINARY(lanes_min, a.f[l] < b.f[l] ? a.f[l] : b.f[l])
LANES_BINARY(lanes_max, a.f[l] > b.f[l] ? a.f[l] : b.f[l])

static inline lanes lanes_load(const float *p) {
    lanes y;
    memcpy(y.f, p, sizeof y.f);
    return y;
}
static inline void lanes_store(float *p, lanes a) {
    memcpy(p, a.f, sizeof a.f);
}
static inline lanes lanes_set1(float v) {
    lanes y;
    EACH y.f[l] = v;
    return y;
}
static inline lanes lanes_fma(lanes a, lanes b, lanes c) {
    lanes y;
    EACH y.f[l] = fmaf(a.f[l], b.f[l], c.f[l]);
    return y;
}
static inline lanes lanes_fnma(lanes a, lanes b, lanes c) {
    lanes y;
    EACH y.f[l] = fmaf(-a.f[l], b.f[l], c.f[l]);
    return y;
}
static inline lanes lanes_abs(lanes a) {
    EACH a.f[l] = fabsf(a.f[l]);
    return a;
}
static inline lanes lanes_trunc(lanes a) {
    EACH a.f[l] = (float)(int32_t)a.f[l];
    return a;
}
static inline lanes lanes_fp16(lanes a) {
    EACH a.f[l] = fp16_to_float(fp16_from_float(a.f[l]));
    return a;
}
static inline lanes_mask lanes_lt(lanes a, lanes b) {
    lanes_mask y = 0;
    EACH y |= (lanes_mask)(a.f[l] < b.f[l]) << l;
    return y;
}
static inline lanes_mask lanes_le(lanes a, lanes b) {
    lanes_mask y = 0;
    EACH y |= (lanes_mask)(a.f[l] <= b.f[l]) << l;
    return y;
}
static inline lanes_mask lanes_and(lanes_mask a, lanes_mask b) {
    return a & b;
}
static inline uint32_t lanes_bits(lanes_mask a) {
    return a;
}
static inline lanes_mask lanes_mask_of(uint32_t bits) {
    return bits;
}
static inline lanes lanes_loadu(const float *p) {
    return lanes_load(p);
}
static inline lanes lanes_pick(lanes a, int lane) {
    return lanes_set1(a.f[lane]);
}
#define LANES_SWAP(n)                                                                              \
    static inline lanes lanes_swap##n(lanes a) {                                                   \
        lanes y;                                                                                   \
        EACH y.f[l] = a.f[l ^ n];                                                                  \
        return y;                                                                                  \
    }
LANES_SWAP(1)
LANES_SWAP(2)
LANES_SWAP(4)
LANES_SWAP(8)
static inline lanes lanes_select(lanes_mask mask, lanes a, lanes b) {
    EACH a.f[l] = mask >> l & 1 ? a.f[l] : b.f[l];
    return a;
}

#include "codec/quantize_rows.inc.h"

const codec_ops codec_ops_ref = {"ref", quantize_rows};
