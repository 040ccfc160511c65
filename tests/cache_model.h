/*
 * cache_model.h - a cache written the obvious way, in float64: every row that was appended is kept,
 * and a query's attention is computed from the contract alone. The tests compare the cache with it.
 */
#ifndef OSCAR_CACHE_MODEL_H
#define OSCAR_CACHE_MODEL_H

#include "cache/cache.h"
#include "test_util.h"

/* A layer with random orthogonal rotations, means, tracked pairs and metrics. */
static inline void random_orthogonal(uint64_t *rng, int d, float *out) {
    double *a = malloc(sizeof(double) * (size_t)d * (size_t)d);
    for (int i = 0; i < d; i++) {
        for (int j = 0; j < d; j++) a[i * d + j] = rng_normal(rng);
        for (int k = 0; k < i; k++) {
            double dot = 0;
            for (int j = 0; j < d; j++) dot += a[i * d + j] * a[k * d + j];
            for (int j = 0; j < d; j++) a[i * d + j] -= dot * a[k * d + j];
        }
        double norm = 0;
        for (int j = 0; j < d; j++) norm += a[i * d + j] * a[i * d + j];
        for (int j = 0; j < d; j++) a[i * d + j] /= sqrt(norm);
    }
    for (int i = 0; i < d * d; i++) out[i] = (float)a[i];
    free(a);
}

static inline oscar_layer model_layer(int kv_heads, int group, int d, int window, int layout) {
    oscar_layer l = {.n_kv_heads = kv_heads, .n_q_heads = kv_heads * group, .head_dim = d, .window = window};
    l.rope.layout = layout;
    l.rope.n_dims = layout == OSCAR_ROPE_NONE ? 0 : d;
    l.rope.magnitude = 1.07f;
    for (int f = 0; f < l.rope.n_dims / 2; f++) l.rope.inv_freq[f] = (float)pow(10000.0, -2.0 * f / d);
    return l;
}

static inline float *random_floats(uint64_t *rng, size_t n, double scale) {
    float *x = aligned_calloc(n, sizeof(float));
    for (size_t i = 0; i < n; i++) x[i] = (float)(scale * rng_normal(rng));
    return x;
}

static inline void model_pair(const oscar_rope *rope, int f, int *a, int *b) {
    bool adjacent = rope->layout == OSCAR_ROPE_ADJACENT;
    *a = adjacent ? 2 * f : f;
    *b = adjacent ? 2 * f + 1 : f + rope->n_dims / 2;
}

static inline oscar_rotations *model_rotations(uint64_t *rng, const oscar_layer *layers, int n_layers, int n_tracked) {
    oscar_rotations *r = rotations_new(layers, n_layers);
    for (int i = 0; i < n_layers; i++) {
        rotations_layer *l = &r->layers[i];
        size_t heads = (size_t)l->shape.n_kv_heads, d = (size_t)l->shape.head_dim;
        int tracked = n_tracked < l->shape.rope.n_dims / 2 ? n_tracked : l->shape.rope.n_dims / 2;
        l->ldlq_k = l->gain_k = l->gain_v = true;
        l->bits_k = l->bits_v = 2;
        l->n_tracked = tracked;
        l->k_rotation = aligned_calloc(heads * d * d, sizeof(float));
        l->v_rotation = aligned_calloc(heads * d * d, sizeof(float));
        l->k_metric_b = aligned_calloc(heads * d * d, sizeof(float));
        l->k_metric_d = aligned_calloc(heads * d, sizeof(float));
        l->k_mean = random_floats(rng, heads * d, 2.0);
        l->v_mean = random_floats(rng, heads * d, 0.5);
        l->k_tracked = aligned_calloc(heads * d, sizeof(float));
        l->tracked = tracked ? aligned_calloc(heads * (size_t)tracked, sizeof(int32_t)) : NULL;
        for (size_t h = 0; h < heads; h++) {
            random_orthogonal(rng, (int)d, l->k_rotation + h * d * d);
            random_orthogonal(rng, (int)d, l->v_rotation + h * d * d);
            for (size_t j = 0; j < d; j++) {
                l->k_metric_d[h * d + j] = (float)(0.2 + rng_uniform(rng));
                l->k_metric_b[h * d * d + j * d + j] = 1.0f;
                for (size_t k = 0; k < j; k++) l->k_metric_b[h * d * d + j * d + k] = (float)(0.1 * rng_normal(rng));
            }
            for (int p = 0; p < tracked; p++) {
                /* Every second pair, wrapping, so that the list is not the identity. */
                int f = (int)((size_t)(2 * p + (int)h) % (d / 2)), a, b;
                if (2 * p >= (int)d / 2) f = (int)((size_t)(2 * p + 1 + (int)h) % (d / 2));
                model_pair(&l->shape.rope, f, &a, &b);
                l->tracked[h * (size_t)tracked + (size_t)p] = f;
                l->k_tracked[h * d + (size_t)a] = (float)(5 * rng_normal(rng));
                l->k_tracked[h * d + (size_t)b] = (float)(5 * rng_normal(rng));
                l->k_mean[h * d + (size_t)a] = l->k_mean[h * d + (size_t)b] = 0.0f;
            }
        }
    }
    return r;
}

/* What was removed from the key at position t, in the original basis. */
static inline void model_key_mean(const rotations_layer *l, int head, int64_t t, double *out) {
    int d = l->shape.head_dim;
    for (int i = 0; i < d; i++) out[i] = l->k_mean ? l->k_mean[head * d + i] : 0.0;
    for (int p = 0; p < l->n_tracked; p++) {
        int f = l->tracked[head * l->n_tracked + p], a, b;
        model_pair(&l->shape.rope, f, &a, &b);
        double angle = (double)t * l->shape.rope.inv_freq[f], m = l->shape.rope.magnitude;
        double x = l->k_tracked[head * d + a], y = l->k_tracked[head * d + b];
        out[a] += m * (x * cos(angle) - y * sin(angle));
        out[b] += m * (x * sin(angle) + y * cos(angle));
    }
}

/* One side of a row as a query sees it, in the original basis: `near` in BF16, else quantised. */
static inline void model_seen_row(const rotations_layer *l, int side, int head, int64_t t, const float *row, bool near,
                                  double *out) {
    int d = l->shape.head_dim;
    double mean[OSCAR_MAX_HEAD_DIM] = {0};
    if (side == 0)
        model_key_mean(l, head, t, mean);
    else
        for (int i = 0; i < d; i++) mean[i] = l->v_mean ? l->v_mean[head * d + i] : 0.0;
    float residual[OSCAR_MAX_HEAD_DIM];
    for (int i = 0; i < d; i++) residual[i] = (float)((double)row[i] - mean[i]);
    for (int i = 0; i < d && near; i++) out[i] = bf16_to_float(bf16_from_float(residual[i])) + mean[i];
    if (near) return;
    const float *u = side == 0 ? l->k_rotation : l->v_rotation;
    row_codec codec = {.head_dim = d, .group = codec_group(d), .bits = side == 0 ? l->bits_k : l->bits_v,
                       .bf16 = true, .recipe = l->recipe, .clip = side == 0 ? l->clip_k : l->clip_v};
    codec.rotation = u ? u + (size_t)head * (size_t)d * (size_t)d : NULL;
    codec.ldlq = side == 0 && l->ldlq_k;
    codec.gain = side == 0 ? l->gain_k : l->gain_v;
    if (side == 0 && l->k_metric_b) {
        codec.metric_b = l->k_metric_b + (size_t)head * (size_t)d * (size_t)d;
        codec.metric_d = l->k_metric_d + (size_t)head * (size_t)d;
    }
    uint8_t codes[OSCAR_MAX_HEAD_DIM];
    uint16_t params[2 * CODEC_MAX_GROUPS];
    codec_quantize_rows(&codec, 1, residual, d, NULL, codes, params);
    double y[OSCAR_MAX_HEAD_DIM];
    for (int i = 0; i < d; i++) {
        int g = i / codec.group;
        y[i] = (double)fp16_to_float(params[2 * g + 1]) + (double)fp16_to_float(params[2 * g]) * codes[i];
    }
    for (int i = 0; i < d; i++) {
        double sum = u ? 0 : y[i];
        for (int j = 0; u && j < d; j++) sum += y[j] * codec.rotation[i * d + j];
        out[i] = sum + mean[i];
    }
}

typedef struct model_query {
    int64_t t;
    int sink, recent;
    double scale, softcap;
    const float *sink_logits; /* [n_q_heads] or NULL */
    bool exact;
} model_query;

/* Attention of query head `qh` over rows k, v [t + 1][n_kv_heads][d]; out [d]. */
static inline void model_attend(const rotations_layer *l, const model_query *m, int qh, const float *q, const float *k,
                                const float *v, double *out) {
    int d = l->shape.head_dim, heads = l->shape.n_kv_heads, head = qh / (l->shape.n_q_heads / heads);
    double *logits = malloc(sizeof(double) * (size_t)(m->t + 1)), max = -1e300;
    double *rows = malloc(sizeof(double) * (size_t)(m->t + 1) * (size_t)d);
    int64_t low = l->shape.window > 0 && m->t - l->shape.window + 1 > 0 ? m->t - l->shape.window + 1 : 0;
    for (int64_t p = low; p <= m->t; p++) {
        double row[OSCAR_MAX_HEAD_DIM], dot = 0;
        bool near = p < m->sink || p > m->t - m->recent;
        size_t at = ((size_t)p * (size_t)heads + (size_t)head) * (size_t)d;
        if (m->exact) {
            for (int i = 0; i < d; i++) row[i] = k[at + (size_t)i];
            for (int i = 0; i < d; i++) rows[(size_t)p * (size_t)d + (size_t)i] = v[at + (size_t)i];
        } else {
            model_seen_row(l, 0, head, p, k + at, near, row);
            model_seen_row(l, 1, head, p, v + at, near, rows + (size_t)p * (size_t)d);
        }
        for (int i = 0; i < d; i++) dot += row[i] * q[i];
        dot *= m->scale;
        if (m->softcap > 0) dot = m->softcap * tanh(dot / m->softcap);
        logits[p] = dot;
        if (dot > max) max = dot;
    }
    double total = 0;
    if (m->sink_logits && m->sink_logits[qh] > max) max = m->sink_logits[qh];
    if (m->sink_logits) total = exp(m->sink_logits[qh] - max);
    for (int i = 0; i < d; i++) out[i] = 0;
    for (int64_t p = low; p <= m->t; p++) {
        double w = exp(logits[p] - max);
        total += w;
        for (int i = 0; i < d; i++) out[i] += w * rows[(size_t)p * (size_t)d + (size_t)i];
    }
    for (int i = 0; i < d; i++) out[i] /= total;
    free(logits);
    free(rows);
}

#endif
