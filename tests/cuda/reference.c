/*
 * reference.c - see reference.h.
 */
#include "reference.h"

#include "codec/codec.h"

int reference_quantize(const reference_codec *r, const float *x, float *y, uint8_t *codes, uint16_t *params) {
    row_codec codec = {.head_dim = r->head_dim,
                       .group = r->group,
                       .bits = r->bits,
                       .recipe = r->recipe,
                       .clip = r->clip,
                       .ldlq = r->ldlq != 0,
                       .gain = r->gain != 0,
                       .bf16 = true, /* as the cache has it where there is a rotation file */
                       .metric_b = r->metric_b,
                       .metric_d = r->metric_d,
                       .rotation = r->rotation};
    return codec_quantize_rows(&codec, 1, x, r->head_dim, y, codes, params) != 0;
}

oscar_status reference_factor(int32_t d, const double *metric, double damp, float *b, float *dg, oscar_error *error) {
    return codec_factor_metric(d, metric, damp, b, dg, error);
}
