/*
 * reference.h - the CPU's quantiser, behind an interface that C++ can include.
 */
#ifndef OSCAR_CUDA_TEST_REFERENCE_H
#define OSCAR_CUDA_TEST_REFERENCE_H

#include "oscar/oscar.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct reference_codec {
    int32_t head_dim, group, recipe, bits;
    int32_t ldlq, gain;
    float clip;
    const float *metric_b, *metric_d, *rotation;
} reference_codec;

/* One row; see codec_quantize_rows. Returns whether the row held NaN or infinity. */
int reference_quantize(const reference_codec *codec, const float *x, float *y, uint8_t *codes, uint16_t *params);
oscar_status reference_factor(int32_t d, const double *metric, double damp, float *b, float *dg, oscar_error *error);

#ifdef __cplusplus
}
#endif

#endif
