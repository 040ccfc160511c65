/* Rows of a step as floats, and rotary embedding in double. */
#include <math.h>

#include "calib/calib.h"

void rope_angles(const oscar_rope *rope, double position, double *cos_sin) {
    for (int32_t f = 0; f < rope->n_dims / 2; f++) {
        double angle = position * (double)rope->inv_freq[f];
        cos_sin[2 * f] = cos(angle);
        cos_sin[2 * f + 1] = sin(angle);
    }
}

void rope_turn(const oscar_rope *rope, const double *cos_sin, bool inverse, float *x) {
    for (int32_t f = 0; f < rope->n_dims / 2; f++) {
        int32_t i = rope_first(rope, f), j = rope_second(rope, f);
        double c = cos_sin[2 * f], s = inverse ? -cos_sin[2 * f + 1] : cos_sin[2 * f + 1];
        double a = x[i], b = x[j];
        x[i] = (float)(a * c - b * s);
        x[j] = (float)(a * s + b * c);
    }
}

/* Infinity and NaN times zero are NaN, and NaN stays. */
static bool row_finite(int32_t d, const float *x) {
    float sum = 0;
    for (int32_t i = 0; i < d; i++) sum += x[i] * 0.0f;
    return sum == 0.0f;
}

static int64_t offset_of(int32_t token, int32_t head, int32_t n_heads, int32_t d,
                         int64_t token_stride, int64_t head_stride) {
    if (token_stride == 0) token_stride = (int64_t)n_heads * d;
    if (head_stride == 0) head_stride = d;
    return token * token_stride + head * head_stride;
}

static bool read_kv(int32_t d, int32_t dtype, const void *base, int64_t offset, float *out) {
    const float *f32 = base;
    const uint16_t *half = base;
    if (dtype == OSCAR_DTYPE_F32)
        memcpy(out, f32 + offset, (size_t)d * sizeof *out);
    else if (dtype == OSCAR_DTYPE_F16)
        for (int32_t i = 0; i < d; i++) out[i] = fp16_to_float(half[offset + i]);
    else
        for (int32_t i = 0; i < d; i++) out[i] = bf16_to_float(half[offset + i]);
    return row_finite(d, out);
}

bool step_read_q(const oscar_layer *shape, const oscar_step *step, int32_t token, int32_t head, float *out) {
    int32_t d = shape->head_dim;
    int64_t at = offset_of(token, head, shape->n_q_heads, d, step->q_token_stride, step->q_head_stride);
    memcpy(out, step->q + at, (size_t)d * sizeof *out);
    return row_finite(d, out);
}

bool step_read_k(const oscar_layer *shape, const oscar_step *step, int32_t token, int32_t head, float *out) {
    int32_t d = shape->head_dim;
    int64_t at = offset_of(token, head, shape->n_kv_heads, d, step->k_token_stride, step->k_head_stride);
    return read_kv(d, step->kv_dtype, step->k, at, out);
}

bool step_read_v(const oscar_layer *shape, const oscar_step *step, int32_t token, int32_t head, float *out) {
    int32_t d = shape->head_dim;
    int64_t at = offset_of(token, head, shape->n_kv_heads, d, step->v_token_stride, step->v_head_stride);
    return read_kv(d, step->kv_dtype, step->v, at, out);
}
