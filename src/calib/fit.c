/* Rotations, metrics and means from the sums of a calibration. */
#include <cblas.h>
#include <math.h>
#include <stdlib.h>

#include "calib/calib.h"

#define METRIC_DAMP 0.01
/* The published clips: the fraction of sorted |x| that a row keeps. */
#define ZOO_CLIP_K 0.96f
#define ZOO_CLIP_V 0.92f

static oscar_status no_memory(int32_t layer, oscar_error *error) {
    return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for the rotations of layer %d", layer);
}

/* The metric U^T C U of one head, scaled to a mean diagonal of 1 so that its factor is far from
 * the limits of float32; the identity for a head that no query reads. */
static oscar_status fit_metric(int32_t d, const double *u, const double *c, float *b, float *dg,
                               oscar_error *error) {
    double *m = aligned_calloc((size_t)d * (size_t)d, sizeof *m);
    if (!m) return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for a %d x %d metric", d, d);
    oscar_status status = calib_congruence(d, u, c, m, error);
    double mean = 0;
    for (int32_t i = 0; i < d; i++) mean += m[i * d + i] / d;
    bool usable = mean > 1e-30;
    for (int32_t i = 0; i < d; i++)
        for (int32_t j = 0; j < d; j++) m[i * d + j] = usable ? m[i * d + j] / mean : i == j;
    if (status == OSCAR_OK) status = codec_factor_metric(d, m, METRIC_DAMP, b, dg, error);
    aligned_free(m);
    return status;
}

static void narrow(size_t n, const double *from, float *to) {
    for (size_t i = 0; i < n; i++) to[i] = (float)from[i];
}

/* Where the mean of a key at angles c = (cosine and sine of every pair, 1) is: mean [d] = w [d, m] c.
 * Every pair is tracked; dims that RoPE leaves alone have a static mean. */
static void mean_weights(const oscar_layer *shape, const calib_sums *sums, size_t at, double *w) {
    int32_t d = shape->head_dim, m = shape->rope.n_dims + 1;
    double scale = 1 / (double)sums->n_tokens, turned = scale * (double)shape->rope.magnitude;
    for (int32_t i = 0; i < d; i++) w[i * m + m - 1] = sums->k[at + (size_t)i] * scale;
    for (int32_t f = 0; f < shape->rope.n_dims / 2; f++) {
        int32_t i = rope_first(&shape->rope, f), j = rope_second(&shape->rope, f);
        double x = sums->k_pre[at + (size_t)i] * turned, y = sums->k_pre[at + (size_t)j] * turned;
        w[i * m + m - 1] = w[j * m + m - 1] = 0;
        w[i * m + 2 * f] = x;
        w[i * m + 2 * f + 1] = -y;
        w[j * m + 2 * f] = y;
        w[j * m + 2 * f + 1] = x;
    }
}

/* With z = (k, c) and P = (I, -w), the sum of (P z)^T (P z) is P (sum of z^T z) P^T. */
oscar_status calib_key_covariance(const calib *c, int32_t layer, int32_t head, double *out, oscar_error *error) {
    const oscar_layer *shape = &c->layers[layer];
    int32_t d = shape->head_dim, m = shape->rope.n_dims + 1, width = d + m;
    double *w = aligned_calloc((size_t)d * (size_t)(m + 2 * width), sizeof *w);
    if (!w) return no_memory(layer, error);
    double *p = w + d * m, *product = p + d * width;
    mean_weights(shape, &c->sums[layer], (size_t)head * (size_t)d, w);
    for (int32_t i = 0; i < d; i++) {
        p[i * width + i] = 1;
        for (int32_t j = 0; j < m; j++) p[i * width + d + j] = -w[i * m + j];
    }
    const double *zz = c->sums[layer].kz + (size_t)head * (size_t)width * (size_t)width;
    cblas_dsymm(CblasRowMajor, CblasRight, CblasLower, d, width, 1, zz, width, p, width, 0, product, width);
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, d, d, width, 1, product, width, p, width, 0, out, d);
    for (int32_t i = 0; i < d * d; i++) out[i] /= (double)c->sums[layer].n_tokens;
    aligned_free(w);
    return OSCAR_OK;
}

static void value_covariance(const calib *c, int32_t layer, int32_t head, double *out) {
    int32_t d = c->layers[layer].head_dim;
    const double *vv = c->sums[layer].vv + (size_t)head * (size_t)d * (size_t)d;
    const double *v = c->sums[layer].v + (size_t)head * (size_t)d, n = (double)c->sums[layer].n_tokens;
    for (int32_t i = 0; i < d; i++)
        for (int32_t j = 0; j <= i; j++) out[i * d + j] = vv[i * d + j] / n - v[i] / n * (v[j] / n);
}

/* Key and value rotation and key metric of one head. */
static oscar_status fit_head(const calib *c, int32_t layer, int32_t head, rotations_layer *out,
                             oscar_error *error) {
    int32_t d = c->layers[layer].head_dim, group = codec_group(d);
    size_t square = (size_t)d * (size_t)d, at = (size_t)head * square;
    double *work = aligned_calloc(3 * square, sizeof *work);
    if (!work) return no_memory(layer, error);
    double *e = work + square, *u = work + 2 * square;
    const double *qq = c->sums[layer].qq + at;
    oscar_status status = calib_key_covariance(c, layer, head, work, error);
    if (status == OSCAR_OK) status = calib_basis(d, d / group, work, qq, e, error);
    if (status == OSCAR_OK) status = calib_compose(d, group, e, u, error);
    if (status == OSCAR_OK) {
        narrow(square, u, out->k_rotation + at);
        status = fit_metric(d, u, qq, out->k_metric_b + at, out->k_metric_d + (size_t)head * (size_t)d, error);
    }
    value_covariance(c, layer, head, work);
    if (status == OSCAR_OK) status = calib_basis(d, 0, work, NULL, e, error);
    if (status == OSCAR_OK) status = calib_compose(d, group, e, u, error);
    if (status == OSCAR_OK) narrow(square, u, out->v_rotation + at);
    aligned_free(work);
    return status;
}

typedef struct pair_gain {
    double energy; /* |nu_f|^2 - |mu_f|^2, after RoPE's magnitude */
    int32_t pair;
} pair_gain;

static int compare_gain(const void *a, const void *b) {
    const pair_gain *x = a, *y = b;
    if (x->energy != y->energy) return x->energy > y->energy ? -1 : 1;
    return x->pair - y->pair; /* the same order on every C library */
}

static int compare_index(const void *a, const void *b) {
    return *(const int32_t *)a - *(const int32_t *)b;
}

/* Means and tracked pairs of one head. */
static void set_head_means(const calib *c, int32_t layer, int32_t head, rotations_layer *out) {
    const oscar_layer *shape = &c->layers[layer];
    const calib_sums *sums = &c->sums[layer];
    int32_t d = shape->head_dim, n_pairs = shape->rope.n_dims / 2;
    size_t at = (size_t)head * (size_t)d;
    double n = (double)sums->n_tokens, magnitude = (double)shape->rope.magnitude;
    pair_gain order[OSCAR_MAX_HEAD_DIM / 2];
    for (int32_t i = 0; i < d; i++) {
        out->k_mean[at + (size_t)i] = (float)(sums->k[at + (size_t)i] / n);
        out->k_tracked[at + (size_t)i] = 0;
        out->v_mean[at + (size_t)i] = (float)(sums->v[at + (size_t)i] / n);
    }
    for (int32_t f = 0; f < n_pairs; f++) {
        size_t i = at + (size_t)rope_first(&shape->rope, f), j = at + (size_t)rope_second(&shape->rope, f);
        double nu = hypot(sums->k_pre[i], sums->k_pre[j]) * magnitude / n;
        double mu = hypot(sums->k[i], sums->k[j]) / n;
        order[f] = (pair_gain){nu * nu - mu * mu, f};
    }
    qsort(order, (size_t)n_pairs, sizeof *order, compare_gain);
    int32_t *tracked = out->tracked ? out->tracked + head * out->n_tracked : NULL;
    for (int32_t r = 0; r < out->n_tracked; r++) {
        int32_t f = order[r].pair;
        size_t i = at + (size_t)rope_first(&shape->rope, f), j = at + (size_t)rope_second(&shape->rope, f);
        tracked[r] = f;
        out->k_tracked[i] = (float)(sums->k_pre[i] / n);
        out->k_tracked[j] = (float)(sums->k_pre[j] / n);
        out->k_mean[i] = out->k_mean[j] = 0;
    }
    if (tracked) qsort(tracked, (size_t)out->n_tracked, sizeof *tracked, compare_index);
}

oscar_status calib_set_tracked(const calib *c, int32_t layer, int32_t n_tracked, rotations_layer *fitted,
                               oscar_error *error) {
    const oscar_layer *shape = &c->layers[layer];
    if (c->sums[layer].n_tokens < 1)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "layer %d has seen no tokens", layer);
    int32_t n_pairs = shape->rope.n_dims / 2;
    if (n_tracked > n_pairs) n_tracked = n_pairs;
    int32_t *tracked = NULL;
    if (n_tracked > 0) {
        tracked = aligned_calloc((size_t)shape->n_kv_heads * (size_t)n_tracked, sizeof *tracked);
        if (!tracked) return no_memory(layer, error);
    }
    aligned_free(fitted->tracked);
    fitted->tracked = tracked;
    fitted->n_tracked = n_tracked;
    for (int32_t h = 0; h < shape->n_kv_heads; h++) set_head_means(c, layer, h, fitted);
    return OSCAR_OK;
}

static oscar_status fit_layer(const calib *c, int32_t layer, int32_t n_tracked, rotations_layer *out,
                              oscar_error *error) {
    size_t heads = (size_t)c->layers[layer].n_kv_heads, d = (size_t)c->layers[layer].head_dim;
    out->recipe = OSCAR_RECIPE_DEFAULT;
    out->bits_k = out->bits_v = 2;
    out->ldlq_k = out->gain_k = out->gain_v = true;
    out->k_rotation = aligned_calloc(heads * d * d, sizeof(float));
    out->v_rotation = aligned_calloc(heads * d * d, sizeof(float));
    out->k_metric_b = aligned_calloc(heads * d * d, sizeof(float));
    out->k_metric_d = aligned_calloc(heads * d, sizeof(float));
    out->k_mean = aligned_calloc(heads * d, sizeof(float));
    out->k_tracked = aligned_calloc(heads * d, sizeof(float));
    out->v_mean = aligned_calloc(heads * d, sizeof(float));
    if (!out->k_rotation || !out->v_rotation || !out->k_metric_b || !out->k_metric_d || !out->k_mean ||
        !out->k_tracked || !out->v_mean)
        return no_memory(layer, error);
    oscar_status status = calib_set_tracked(c, layer, n_tracked, out, error);
    for (int32_t h = 0; h < (int32_t)heads && status == OSCAR_OK; h++) status = fit_head(c, layer, h, out, error);
    return status;
}

static oscar_status fit_all(const calib *c, int32_t n_tracked,
                            oscar_status (*fit_one)(const calib *, int32_t, int32_t, rotations_layer *, oscar_error *),
                            oscar_rotations **out, oscar_error *error) {
    *out = NULL;
    oscar_rotations *rotations = rotations_new(c->layers, c->n_layers);
    if (!rotations) return no_memory(0, error);
    oscar_status status = OSCAR_OK;
    for (int32_t i = 0; i < c->n_layers && status == OSCAR_OK; i++)
        status = fit_one(c, i, n_tracked, &rotations->layers[i], error);
    if (status == OSCAR_OK) status = rotations_check(rotations, error);
    if (status != OSCAR_OK) {
        oscar_rotations_free(rotations);
        return status;
    }
    *out = rotations;
    return OSCAR_OK;
}

oscar_status calib_fit(const calib *c, int32_t n_tracked, oscar_rotations **out, oscar_error *error) {
    return fit_all(c, n_tracked, fit_layer, out, error);
}

static oscar_status fit_zoo_layer(const calib *c, int32_t layer, int32_t unused, rotations_layer *out,
                                  oscar_error *error) {
    (void)unused;
    size_t heads = (size_t)c->layers[layer].n_kv_heads, d = (size_t)c->layers[layer].head_dim, square = d * d;
    if (c->sums[layer].n_tokens < 1)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "layer %d has seen no tokens", layer);
    out->recipe = OSCAR_RECIPE_ZOO;
    out->bits_k = out->bits_v = 2;
    out->clip_k = ZOO_CLIP_K;
    out->clip_v = ZOO_CLIP_V;
    out->k_rotation = aligned_calloc(heads * square, sizeof(float));
    out->v_rotation = aligned_calloc(heads * square, sizeof(float));
    double *sum = aligned_calloc(2 * square, sizeof *sum);
    oscar_status status = out->k_rotation && out->v_rotation && sum ? OSCAR_OK : no_memory(layer, error);
    if (status == OSCAR_OK) {
        for (size_t h = 0; h < heads; h++)
            for (size_t i = 0; i < square; i++) sum[i] += c->sums[layer].qq[h * square + i];
        status = calib_compose_zoo((int32_t)d, sum, sum + square, error);
    }
    for (size_t h = 0; status == OSCAR_OK && h < heads; h++) narrow(square, sum + square, out->k_rotation + h * square);
    if (status == OSCAR_OK) status = calib_compose_zoo((int32_t)d, c->sums[layer].zoo_vv, sum + square, error);
    for (size_t h = 0; status == OSCAR_OK && h < heads; h++) narrow(square, sum + square, out->v_rotation + h * square);
    aligned_free(sum);
    return status;
}

oscar_status calib_fit_zoo(const calib *c, oscar_rotations **out, oscar_error *error) {
    return fit_all(c, 0, fit_zoo_layer, out, error);
}
