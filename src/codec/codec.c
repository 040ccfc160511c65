/*
 * codec.c - the choice of the code path, groups, and the factor of a metric.
 */
#include "codec/codec.h"

#include <math.h>

int32_t codec_group(int32_t head_dim) {
    if (head_dim <= 128) return head_dim;
    for (int32_t group = 128; group > 16; group -= 16)
        if (head_dim % group == 0) return group;
    return 16;
}

void row_codec_prepare(row_codec *codec, float *ones, float *ones_ones) {
    const int32_t d = codec->head_dim;
    for (int32_t g = 0; g < d / codec->group; g++) {
        float *row_ones = ones + (size_t)g * d, sum = 0;
        const int32_t i0 = g * codec->group, i1 = i0 + codec->group;
        for (int32_t j = 0; j < d; j++) row_ones[j] = 0;
        for (int32_t i = i0; i < i1; i++) {
            const float *row = codec->metric_b + (size_t)i * d;
            for (int32_t j = 0; j < i1; j++) row_ones[j] += row[j];
        }
        for (int32_t j = 0; j < i1; j++) sum += codec->metric_d[j] * row_ones[j] * row_ones[j];
        ones_ones[g] = sum;
    }
    codec->ones = ones;
    codec->ones_ones = ones_ones;
}

uint32_t codec_quantize_rows(const row_codec *codec, int n_rows, const float *x, int64_t x_stride,
                             float *y, uint8_t *codes, uint16_t *params) {
    const codec_ops *ops = &codec_ops_ref;
#if defined(__x86_64__)
    switch (isa_current()) {
    case ISA_AMX:
    case ISA_AVX512VBMI:
    case ISA_AVX512VNNI:
    case ISA_AVX512: ops = &codec_ops_avx512; break;
    case ISA_AVXVNNI:
    case ISA_AVX2: ops = &codec_ops_avx2; break;
    default: break;
    }
#elif defined(__aarch64__)
    if (isa_current() >= ISA_NEON) ops = &codec_ops_neon;
#endif
    return ops->quantize_rows(codec, n_rows, x, x_stride, y, codes, params);
}

/* Cholesky in place: the lower triangle of a becomes L with a = L L^T. Returns the row of the first
 * pivot that is not positive and finite, or -1. */
static int32_t cholesky(int32_t d, double *a) {
    for (int32_t j = 0; j < d; j++) {
        double *row = a + (size_t)j * d;
        double pivot = row[j];
        for (int32_t k = 0; k < j; k++) pivot -= row[k] * row[k];
        if (!(pivot > 0) || !isfinite(pivot)) return j;
        row[j] = sqrt(pivot);
        for (int32_t i = j + 1; i < d; i++) {
            double *below = a + (size_t)i * d;
            double sum = below[j];
            for (int32_t k = 0; k < j; k++) sum -= below[k] * row[k];
            below[j] = sum / row[j];
        }
    }
    return -1;
}

oscar_status codec_factor_metric(int32_t d, const double *metric, double damp, float *b, float *dg,
                                 oscar_error *error) {
    double *a = aligned_calloc((size_t)d * d, sizeof *a); /* [d, d] */
    if (!a) return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for a %d x %d metric", d, d);
    double trace = 0;
    for (int32_t i = 0; i < d; i++) trace += metric[(size_t)i * d + i];
    memcpy(a, metric, (size_t)d * d * sizeof *a);
    for (int32_t i = 0; i < d; i++) a[(size_t)i * d + i] += damp * trace / d;
    int32_t bad = cholesky(d, a);
    for (int32_t j = 0; j < d && bad < 0; j++) {
        double l = a[(size_t)j * d + j];
        dg[j] = (float)(l * l);
        if (!(dg[j] > 0) || !isfinite(dg[j])) bad = j;
        for (int32_t i = 0; i < d; i++) {
            float f = i < j ? 0.0f : (float)(a[(size_t)i * d + j] / l);
            b[(size_t)i * d + j] = f;
            if (!isfinite(f)) bad = j;
        }
    }
    aligned_free(a);
    if (bad >= 0)
        return error_set(error, OSCAR_ERROR_NOT_FINITE, -1,
                         "metric has no factor: pivot %d of %d is not positive and finite", bad, d);
    return OSCAR_OK;
}
