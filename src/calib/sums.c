/* Streaming sums: float32 products of one step at a time, added up in float64. */
#include <cblas.h>
#include <math.h>
#include <stdlib.h>

#include "calib/calib.h"

static bool sums_alloc(calib_sums *sums, const oscar_layer *shape) {
    size_t d = (size_t)shape->head_dim, heads = (size_t)shape->n_kv_heads;
    sums->qq = aligned_calloc(heads * d * d, sizeof(double));
    sums->kz = aligned_calloc(heads * calib_kz_width(shape) * calib_kz_width(shape), sizeof(double));
    sums->vv = aligned_calloc(heads * d * d, sizeof(double));
    sums->k = aligned_calloc(heads * d, sizeof(double));
    sums->k_pre = aligned_calloc(heads * d, sizeof(double));
    sums->v = aligned_calloc(heads * d, sizeof(double));
    sums->zoo_vv = aligned_calloc(d * d, sizeof(double));
    return sums->qq && sums->kz && sums->vv && sums->k && sums->k_pre && sums->v && sums->zoo_vv;
}

oscar_status calib_new(calib **out, const oscar_layer *layers, int32_t n_layers, oscar_error *error) {
    *out = NULL;
    if (n_layers < 1 || n_layers > OSCAR_MAX_LAYERS)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "n_layers is %d, expected 1 to %d", n_layers, OSCAR_MAX_LAYERS);
    calib *c = calloc(1, sizeof *c);
    if (!c) return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for calibration");
    c->n_layers = n_layers;
    c->layers = calloc((size_t)n_layers, sizeof *c->layers);
    c->sums = calloc((size_t)n_layers, sizeof *c->sums);
    bool ok = c->layers && c->sums;
    for (int32_t i = 0; ok && i < n_layers; i++) {
        c->layers[i] = layers[i];
        ok = sums_alloc(&c->sums[i], &layers[i]);
    }
    if (!ok) {
        calib_free(c);
        return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for the covariances of %d layers", n_layers);
    }
    calib_single_thread_blas();
    *out = c;
    return OSCAR_OK;
}

void calib_free(calib *c) {
    if (!c) return;
    for (int32_t i = 0; c->sums && i < c->n_layers; i++) {
        calib_sums *sums = &c->sums[i];
        aligned_free(sums->qq);
        aligned_free(sums->kz);
        aligned_free(sums->vv);
        aligned_free(sums->k);
        aligned_free(sums->k_pre);
        aligned_free(sums->v);
        aligned_free(sums->zoo_vv);
    }
    free(c->sums);
    free(c->layers);
    aligned_free(c->scratch);
    free(c);
}

/* Scratch of a step: rows [n_rows, width], then one [width, width] product. */
static float *scratch_for(calib *c, size_t n_rows, size_t width) {
    size_t need = n_rows * width + width * width;
    if (need > c->scratch_floats) {
        aligned_free(c->scratch);
        c->scratch = aligned_calloc(need, sizeof *c->scratch);
        c->scratch_floats = c->scratch ? need : 0;
    }
    return c->scratch;
}

/* product = rows^T rows, lower triangle, rows [n, d]. */
static void self_product(int32_t n, int32_t d, const float *rows, float *product) {
    cblas_ssyrk(CblasRowMajor, CblasLower, CblasTrans, d, n, 1, rows, d, 0, product, d);
}

static void add_lower(int32_t d, const float *product, double scale, double *sum) {
    for (int32_t i = 0; i < d; i++)
        for (int32_t j = 0; j <= i; j++) sum[i * d + j] += scale * (double)product[i * d + j];
}

/* Queries of one KV head, [n_tokens, g, d]; the token of a bad row, or -1. */
static int32_t gather_queries(const oscar_layer *shape, const oscar_step *step, int32_t head, float *rows) {
    int32_t g = shape->n_q_heads / shape->n_kv_heads, d = shape->head_dim;
    for (int32_t t = 0; t < step->n_tokens; t++)
        for (int32_t i = 0; i < g; i++)
            if (!step_read_q(shape, step, t, head * g + i, rows + ((size_t)t * (size_t)g + (size_t)i) * (size_t)d)) return t;
    return -1;
}

static oscar_status not_finite(int32_t layer, int32_t head, int32_t token, const char *what, oscar_error *error) {
    return error_set(error, OSCAR_ERROR_NOT_FINITE, token, "layer %d, KV head %d: %s of token %d in the batch holds NaN or infinity",
                     layer, head, what, token);
}

/* Adds a key [d] and its position's angles to the sums of its head. */
static void add_key(const oscar_layer *shape, const float *key, const double *cos_sin, double *k_sum, double *pre_sum) {
    for (int32_t i = 0; i < shape->head_dim; i++) k_sum[i] += (double)key[i];
    double scale = 1 / (double)shape->rope.magnitude;
    for (int32_t f = 0; f < shape->rope.n_dims / 2; f++) { /* R_{-t}, in double */
        int32_t i = rope_first(&shape->rope, f), j = rope_second(&shape->rope, f);
        double a = key[i], b = key[j], cs = cos_sin[2 * f], sn = cos_sin[2 * f + 1];
        pre_sum[i] += scale * (a * cs + b * sn);
        pre_sum[j] += scale * (b * cs - a * sn);
    }
}

/* Key sums of one head. weights [n_tokens] receive k C k^T, with C (symmetric) in `metric` [d, d],
 * made from its lower triangle. rows: scratch [n_tokens, d + m], product [d + m, d + m]. */
static oscar_status add_keys(calib *c, int32_t layer, const oscar_step *step, int32_t head, const float *metric,
                             float *weights, float *rows, float *product, oscar_error *error) {
    const oscar_layer *shape = &c->layers[layer];
    int32_t d = shape->head_dim, n_dims = shape->rope.n_dims, width = (int32_t)calib_kz_width(shape);
    size_t at = (size_t)head * (size_t)d;
    double cos_sin[OSCAR_MAX_HEAD_DIM];
    float through[OSCAR_MAX_HEAD_DIM];
    for (int32_t t = 0; t < step->n_tokens; t++) {
        float *row = rows + (size_t)t * (size_t)width;
        if (!step_read_k(shape, step, t, head, row)) return not_finite(layer, head, t, "the key", error);
        cblas_ssymv(CblasRowMajor, CblasLower, d, 1, metric, d, row, 1, 0, through, 1);
        double weight = 0;
        for (int32_t i = 0; i < d; i++) weight += (double)row[i] * (double)through[i];
        weights[t] = weight > 0 ? (float)weight : 0;
        if (n_dims > 0) rope_angles(&shape->rope, step->positions[t], cos_sin);
        add_key(shape, row, cos_sin, c->sums[layer].k + at, c->sums[layer].k_pre + at);
        for (int32_t i = 0; i < n_dims; i++) row[d + i] = (float)cos_sin[i];
        row[d + n_dims] = 1;
    }
    self_product(step->n_tokens, width, rows, product);
    add_lower(width, product, 1, c->sums[layer].kz + (size_t)head * (size_t)width * (size_t)width);
    return OSCAR_OK;
}

/* Value sums of one head: plain, and weighted for the published recipe. */
static oscar_status add_values(calib *c, int32_t layer, const oscar_step *step, int32_t head, const float *weights,
                               float *rows, float *product, oscar_error *error) {
    const oscar_layer *shape = &c->layers[layer];
    int32_t d = shape->head_dim, n = step->n_tokens;
    double *sum = c->sums[layer].v + (size_t)head * (size_t)d;
    double total = 0;
    for (int32_t t = 0; t < n; t++) {
        float *row = rows + (size_t)t * (size_t)d;
        if (!step_read_v(shape, step, t, head, row)) return not_finite(layer, head, t, "the value", error);
        for (int32_t i = 0; i < d; i++) sum[i] += (double)row[i];
        total += (double)weights[t];
    }
    self_product(n, d, rows, product);
    add_lower(d, product, 1, c->sums[layer].vv + (size_t)head * (size_t)d * (size_t)d);
    if (total > 0) {
        for (int32_t t = 0; t < n; t++) cblas_sscal(d, sqrtf(weights[t]), rows + (size_t)t * (size_t)d, 1);
        self_product(n, d, rows, product);
        add_lower(d, product, 1 / total, c->sums[layer].zoo_vv);
    }
    return OSCAR_OK;
}

oscar_status calib_add(calib *c, int32_t layer, const oscar_step *step, oscar_error *error) {
    if (layer < 0 || layer >= c->n_layers)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "layer is %d, expected 0 to %d", layer, c->n_layers - 1);
    const oscar_layer *shape = &c->layers[layer];
    int32_t d = shape->head_dim, g = shape->n_q_heads / shape->n_kv_heads, n = step->n_tokens;
    if (n == 0) return OSCAR_OK;
    size_t square = (size_t)d * (size_t)d, width = calib_kz_width(shape), n_rows = (size_t)n * (size_t)g;
    float *rows = scratch_for(c, n_rows, width);
    float *metric = malloc((square + (size_t)n) * sizeof *metric), *weights = metric ? metric + square : NULL;
    if (!rows || !metric) {
        free(metric);
        return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for %d rows of layer %d", n, layer);
    }
    float *product = rows + n_rows * width;
    oscar_status status = OSCAR_OK;
    for (int32_t h = 0; h < shape->n_kv_heads && status == OSCAR_OK; h++) {
        int32_t bad = gather_queries(shape, step, h, rows);
        if (bad >= 0) {
            status = not_finite(layer, h, bad, "the query", error);
            break;
        }
        self_product((int32_t)n_rows, d, rows, metric);
        status = add_keys(c, layer, step, h, metric, weights, rows, product, error);
        if (status != OSCAR_OK) break;
        add_lower(d, metric, 1, c->sums[layer].qq + (size_t)h * square);
        status = add_values(c, layer, step, h, weights, rows, product, error);
    }
    free(metric);
    if (status == OSCAR_OK) c->sums[layer].n_tokens += n;
    return status;
}

int64_t calib_enough_tokens(const calib *c) {
    int64_t most = 0;
    for (int32_t i = 0; i < c->n_layers; i++)
        if (10 * (int64_t)c->layers[i].head_dim > most) most = 10 * (int64_t)c->layers[i].head_dim;
    return most;
}
