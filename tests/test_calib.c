/*
 * test_calib.c - sums, rotations and means against float64 references on synthetic rows.
 */
#include "test_util.h"

#include "calib/calib.h"

static uint64_t random_state;
static double uniform(void) { return rng_uniform(&random_state); }
static double normal(void) { return rng_normal(&random_state); }

static oscar_layer make_layer(int32_t d, int32_t n_kv_heads, int32_t g, int32_t layout, int32_t n_dims, float magnitude) {
    oscar_layer layer = {.n_kv_heads = n_kv_heads, .n_q_heads = n_kv_heads * g, .head_dim = d};
    layer.rope.layout = n_dims ? layout : OSCAR_ROPE_NONE;
    layer.rope.n_dims = n_dims;
    layer.rope.magnitude = magnitude;
    for (int32_t f = 0; f < n_dims / 2; f++) layer.rope.inv_freq[f] = (float)pow(10000, -2.0 * f / n_dims);
    return layer;
}

/* Rows of a step, contiguous. */
typedef struct rows {
    oscar_step step;
    int32_t *positions;
    float *q, *k, *v, *out;
} rows;

static rows make_rows(const oscar_layer *layer, int32_t n) {
    rows r = {.step = OSCAR_STEP_INIT};
    size_t d = (size_t)layer->head_dim, nq = (size_t)n * (size_t)layer->n_q_heads * d, nk = (size_t)n * (size_t)layer->n_kv_heads * d;
    r.positions = calloc((size_t)n, sizeof *r.positions);
    r.q = calloc(nq, sizeof *r.q);
    r.out = calloc(nq, sizeof *r.out);
    r.k = calloc(nk, sizeof *r.k);
    r.v = calloc(nk, sizeof *r.v);
    for (int32_t t = 0; t < n; t++) r.positions[t] = t;
    r.step.n_tokens = n;
    r.step.positions = r.positions;
    r.step.q = r.q;
    r.step.k = r.k;
    r.step.v = r.v;
    r.step.out = r.out;
    r.step.logit_scale = (float)(1 / sqrt((double)d));
    return r;
}

static void free_rows(rows *r) {
    free(r->positions);
    free(r->q);
    free(r->k);
    free(r->v);
    free(r->out);
}

/* Normal rows with a different spread in every dim and head; keys with a mean before RoPE, turned
 * to their position. */
static void fill_rows(const oscar_layer *layer, rows *r, double key_mean) {
    int32_t d = layer->head_dim, hk = layer->n_kv_heads, g = layer->n_q_heads / hk;
    double angles[OSCAR_MAX_HEAD_DIM];
    for (int32_t t = 0; t < r->step.n_tokens; t++)
        for (int32_t h = 0; h < hk; h++) {
            float *k = r->k + ((size_t)t * (size_t)hk + (size_t)h) * (size_t)d, *v = r->v + (k - r->k);
            for (int32_t i = 0; i < d; i++) {
                k[i] = (float)(normal() + key_mean * (1 + (i + h) % 3));
                v[i] = (float)(normal() * (1 + i % 5) + h);
            }
            rope_angles(&layer->rope, r->positions[t], angles);
            rope_turn(&layer->rope, angles, false, k);
            for (int32_t i = 0; i < layer->rope.n_dims / 2; i++) {
                k[rope_first(&layer->rope, i)] *= layer->rope.magnitude;
                k[rope_second(&layer->rope, i)] *= layer->rope.magnitude;
            }
            for (int32_t j = 0; j < g * d; j++) {
                size_t at = ((size_t)t * (size_t)layer->n_q_heads + (size_t)(h * g)) * (size_t)d + (size_t)j;
                r->q[at] = (float)(normal() * (1 + (j % d + 7 * h) % d * 0.2));
                r->out[at] = (float)(normal() * (1 + (j % d + 3 * h) % 9));
            }
        }
}

/* max |U^T U - I| */
static double orthogonality(int32_t d, const float *u32, const double *u64) {
    double worst = 0;
    for (int32_t i = 0; i < d; i++)
        for (int32_t j = 0; j <= i; j++) {
            double sum = 0;
            for (int32_t k = 0; k < d; k++)
                sum += u64 ? u64[k * d + i] * u64[k * d + j] : (double)u32[k * d + i] * (double)u32[k * d + j];
            worst = fmax(worst, fabs(sum - (i == j)));
        }
    return worst;
}

static void random_covariance(int32_t d, double spread, double *c) {
    double *a = calloc((size_t)d * (size_t)d, sizeof *a);
    for (int32_t i = 0; i < d * d; i++) a[i] = normal();
    for (int32_t i = 0; i < d; i++)
        for (int32_t j = 0; j < d; j++) {
            double sum = 0;
            for (int32_t k = 0; k < d; k++) sum += a[i * d + k] * a[j * d + k] * exp(-spread * k / d);
            c[i * d + j] = sum / d;
        }
    free(a);
}

static void test_compose_is_orthogonal(void **state) {
    (void)state;
    const int32_t dims[] = {16, 48, 64, 80, 96, 112, 128, 192, 256, 320};
    for (size_t t = 0; t < sizeof dims / sizeof *dims; t++) {
        int32_t d = dims[t];
        size_t n = (size_t)d * (size_t)d;
        double *c = calloc(n, sizeof *c), *metric = calloc(n, sizeof *c), *e = calloc(n, sizeof *e), *u = calloc(n, sizeof *u);
        random_covariance(d, 6, c);
        random_covariance(d, 3, metric);
        assert_int_equal(calib_compose_zoo(d, c, u, NULL), OSCAR_OK);
        assert_true(orthogonality(d, NULL, u) < 1e-10);
        for (int32_t with = 0; with < 2; with++) {
            assert_int_equal(calib_basis(d, d / codec_group(d), c, with ? metric : NULL, e, NULL), OSCAR_OK);
            assert_true(orthogonality(d, NULL, e) < 1e-10);
            assert_int_equal(calib_compose(d, codec_group(d), e, u, NULL), OSCAR_OK);
            assert_true(orthogonality(d, NULL, u) < 1e-10);
        }
        free(c);
        free(metric);
        free(e);
        free(u);
    }
}

/* H mixes all eigenvectors alike, so every rotated channel gets the mean energy of its block's
 * eigenvalues; dealing them makes the blocks alike where there are several. */
static void test_compose_spreads_energy(void **state) {
    (void)state;
    const int32_t dims[] = {64, 80, 96, 128};
    for (size_t t = 0; t < sizeof dims / sizeof *dims; t++) {
        int32_t d = dims[t];
        double *c = calloc((size_t)d * (size_t)d, sizeof *c), *u = calloc((size_t)d * (size_t)d, sizeof *u);
        double *m = calloc((size_t)d * (size_t)d, sizeof *m), mean = 0, least = INFINITY, most = 0;
        random_covariance(d, 6, c);
        assert_int_equal(calib_compose_zoo(d, c, u, NULL), OSCAR_OK);
        assert_int_equal(calib_congruence(d, u, c, m, NULL), OSCAR_OK);
        for (int32_t i = 0; i < d; i++) {
            mean += c[i * d + i] / d;
            least = fmin(least, m[i * d + i]);
            most = fmax(most, m[i * d + i]);
        }
        double tolerance = (d & (d - 1)) == 0 ? 1e-9 : 0.35;
        assert_true(least > mean * (1 - tolerance) && most < mean * (1 + tolerance));
        free(c);
        free(u);
        free(m);
    }
}

/* An offset for every group of channels, in units of row length: what remains of x^T metric x, averaged
 * over rows of covariance c, when each row's best offsets are taken off. */
static double energy_left(int32_t d, const double *c, const double *metric, const double *u) {
    int32_t group = codec_group(d), n_groups = d / group;
    double *f = calloc((size_t)(d * n_groups), sizeof *f), *mf = calloc((size_t)(d * n_groups), sizeof *mf), left = 0;
    for (int32_t i = 0; i < d; i++)
        for (int32_t j = 0; j < d; j++) f[j / group * d + i] += u[i * d + j];
    for (int32_t g = 0; g < n_groups; g++) { /* orthonormal in the metric */
        for (int32_t before = 0; before <= g; before++)
            for (int twice = 0; twice < 2; twice++) {
                double dot = 0;
                for (int32_t i = 0; i < d; i++) {
                    mf[g * d + i] = 0;
                    for (int32_t j = 0; j < d; j++) mf[g * d + i] += metric[i * d + j] * f[g * d + j];
                }
                for (int32_t i = 0; i < d; i++) dot += mf[g * d + i] * f[before * d + i];
                for (int32_t i = 0; i < d; i++)
                    f[g * d + i] = before < g ? f[g * d + i] - dot * f[before * d + i] : f[g * d + i] / sqrt(dot);
            }
    }
    for (int32_t i = 0; i < d; i++)
        for (int32_t j = 0; j < d; j++) {
            left += c[i * d + j] * metric[i * d + j];
            for (int32_t g = 0; g < n_groups; g++) left -= c[i * d + j] * mf[g * d + i] * mf[g * d + j];
        }
    free(f);
    free(mf);
    return left;
}

/* Offsets that lie along the directions calib_basis leads with take off the most that as many free
 * numbers can: the largest eigenvalues of A c A, A = metric^1/2. No other rotation does better. */
static void test_offsets_take_the_most(void **state) {
    (void)state;
    const int32_t dims[] = {64, 80, 96, 192, 256};
    for (size_t t = 0; t < sizeof dims / sizeof *dims; t++) {
        int32_t d = dims[t], n_groups = d / codec_group(d);
        size_t n = (size_t)d * (size_t)d;
        double *c = calloc(n, sizeof *c), *metric = calloc(n, sizeof *c), *e = calloc(n, sizeof *e), *u = calloc(n, sizeof *u);
        double *a = calloc(n, sizeof *a), *values = calloc((size_t)d, sizeof *values), whole = 0;
        random_covariance(d, 6, c);
        random_covariance(d, 3, metric);
        assert_int_equal(calib_eigenvectors(d, metric, values, e, NULL), OSCAR_OK);
        for (int32_t i = 0; i < d; i++)
            for (int32_t j = 0; j < d; j++)
                for (int32_t k = 0; k < d; k++) a[i * d + j] += e[i * d + k] * e[j * d + k] * sqrt(values[k]);
        assert_int_equal(calib_congruence(d, a, c, u, NULL), OSCAR_OK);
        assert_int_equal(calib_eigenvectors(d, u, values, e, NULL), OSCAR_OK);
        for (int32_t i = 0; i < d; i++) whole += values[i];
        double best = whole;
        for (int32_t g = 0; g < n_groups; g++) best -= values[d - 1 - g];
        assert_int_equal(calib_basis(d, n_groups, c, metric, e, NULL), OSCAR_OK);
        assert_int_equal(calib_compose(d, codec_group(d), e, u, NULL), OSCAR_OK);
        assert_true(fabs(energy_left(d, c, metric, u) - best) < 1e-9 * whole);
        assert_int_equal(calib_compose_zoo(d, metric, u, NULL), OSCAR_OK);
        assert_true(energy_left(d, c, metric, u) > best + 0.01 * whole);
        free(c);
        free(metric);
        free(e);
        free(u);
        free(a);
        free(values);
    }
}

static void test_bit_reversal(void **state) {
    (void)state;
    int32_t perm[96];
    const int32_t eight[] = {7, 3, 5, 1, 6, 2, 4, 0}; /* br(1) = 4 holds the second largest, column 6 */
    calib_bit_reversal(8, perm);
    for (int i = 0; i < 8; i++) assert_int_equal(perm[i], eight[i]);
    calib_bit_reversal(96, perm);
    bool seen[96] = {false};
    for (int i = 0; i < 96; i++) seen[perm[i]] = true;
    for (int i = 0; i < 96; i++) assert_true(seen[i]);
    assert_int_equal(perm[0], 95);
}

/* The sums against plain float64 loops, in two steps of different size. */
static void test_sums(void **state) {
    (void)state;
    oscar_layer layer = make_layer(32, 2, 3, OSCAR_ROPE_HALF_SPLIT, 24, 1.3f);
    rows r = make_rows(&layer, 90);
    fill_rows(&layer, &r, 0.7);
    calib *c;
    assert_int_equal(calib_new(&c, &layer, 1, NULL), OSCAR_OK);
    rows part = r;
    part.step.n_tokens = 33;
    assert_int_equal(calib_add(c, 0, &part.step, NULL), OSCAR_OK);
    part.step.n_tokens = 57;
    part.step.positions = r.positions + 33;
    part.step.q = r.q + 33 * 6 * 32;
    part.step.k = r.k + 33 * 2 * 32;
    part.step.v = r.v + 33 * 2 * 32;
    assert_int_equal(calib_add(c, 0, &part.step, NULL), OSCAR_OK);
    assert_int_equal(c->sums[0].n_tokens, 90);
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < 32; i++)
            for (int j = 0; j <= i; j++) {
                double qq = 0, vv = 0, q_scale = 0, v_scale = 0;
                for (int t = 0; t < 90; t++) {
                    const float *v = r.v + (t * 2 + h) * 32;
                    vv += (double)v[i] * (double)v[j];
                    v_scale += fabs((double)v[i] * (double)v[j]);
                    for (int g = 0; g < 3; g++) {
                        const float *q = r.q + (t * 6 + h * 3 + g) * 32;
                        qq += (double)q[i] * (double)q[j];
                        q_scale += fabs((double)q[i] * (double)q[j]);
                    }
                }
                assert_true(fabs(c->sums[0].qq[(h * 32 + i) * 32 + j] - qq) < 1e-6 * q_scale);
                assert_true(fabs(c->sums[0].vv[(h * 32 + i) * 32 + j] - vv) < 1e-6 * v_scale);
            }
    calib_free(c);
    free_rows(&r);
}

/* Means: k_pre is the mean before RoPE, whatever layout and magnitude. */
static void test_key_mean_before_rope(void **state) {
    (void)state;
    const int32_t layouts[] = {OSCAR_ROPE_ADJACENT, OSCAR_ROPE_HALF_SPLIT};
    for (int l = 0; l < 2; l++) {
        oscar_layer layer = make_layer(32, 1, 1, layouts[l], 32, 1.7f);
        rows r = make_rows(&layer, 300);
        calib *c;
        oscar_rotations *fitted;
        float mean[32];
        double angles[OSCAR_MAX_HEAD_DIM];
        for (int i = 0; i < 32; i++) mean[i] = (float)(normal() * 4);
        fill_rows(&layer, &r, 0);
        for (int t = 0; t < 300; t++) { /* every key is exactly R_t mean */
            memcpy(r.k + t * 32, mean, sizeof mean);
            rope_angles(&layer.rope, t, angles);
            rope_turn(&layer.rope, angles, false, r.k + t * 32);
            for (int i = 0; i < 32; i++) r.k[t * 32 + i] *= 1.7f;
        }
        assert_int_equal(calib_new(&c, &layer, 1, NULL), OSCAR_OK);
        assert_int_equal(calib_add(c, 0, &r.step, NULL), OSCAR_OK);
        assert_int_equal(calib_fit(c, 16, &fitted, NULL), OSCAR_OK);
        assert_int_equal(fitted->layers[0].n_tracked, 16);
        for (int i = 0; i < 32; i++) {
            assert_true(fabsf(fitted->layers[0].k_tracked[i] - mean[i]) < 1e-5f);
            assert_true(fitted->layers[0].k_mean[i] == 0);
        }
        oscar_rotations_free(fitted);
        calib_free(c);
        free_rows(&r);
    }
}

/* The covariance of keys about their tracked mean, from streamed sums, against a second pass over the
 * rows: large means, both layouts, a part of the dims under RoPE, a magnitude. */
static void test_covariance_about_tracked_mean(void **state) {
    (void)state;
    const int32_t layouts[] = {OSCAR_ROPE_ADJACENT, OSCAR_ROPE_HALF_SPLIT}, n = 400;
    for (int l = 0; l < 2; l++) {
        oscar_layer layer = make_layer(32, 2, 2, layouts[l], 24, 1.4f);
        rows r = make_rows(&layer, n);
        fill_rows(&layer, &r, 6);
        calib *c;
        oscar_rotations *fitted;
        assert_int_equal(calib_new(&c, &layer, 1, NULL), OSCAR_OK);
        assert_int_equal(calib_add(c, 0, &r.step, NULL), OSCAR_OK);
        assert_int_equal(calib_fit(c, 12, &fitted, NULL), OSCAR_OK);
        for (int h = 0; h < 2; h++) {
            double want[32 * 32] = {0}, got[32 * 32], angles[OSCAR_MAX_HEAD_DIM], trace = 0;
            for (int t = 0; t < n; t++) {
                float mean[32];
                double rest[32];
                memcpy(mean, fitted->layers[0].k_tracked + h * 32, sizeof mean);
                rope_angles(&layer.rope, r.positions[t], angles);
                rope_turn(&layer.rope, angles, false, mean);
                for (int i = 0; i < 32; i++) {
                    double tracked = i < 24 ? 1.4 * (double)mean[i] : (double)fitted->layers[0].k_mean[h * 32 + i];
                    rest[i] = (double)r.k[(t * 2 + h) * 32 + i] - tracked;
                }
                for (int i = 0; i < 32; i++)
                    for (int j = 0; j < 32; j++) want[i * 32 + j] += rest[i] * rest[j] / n;
            }
            for (int i = 0; i < 32; i++) trace += want[i * 33];
            assert_int_equal(calib_key_covariance(c, 0, h, got, NULL), OSCAR_OK);
            for (int i = 0; i < 32; i++)
                for (int j = 0; j < 32; j++) assert_true(fabs(got[i * 32 + j] - want[i * 32 + j]) < 1e-5 * trace);
        }
        oscar_rotations_free(fitted);
        calib_free(c);
        free_rows(&r);
    }
}

/* q.k = q'.k' + b(t) with b(t) = q.mu + q.R_t nu, in float64, for any rows, both layouts, a part of
 * the dims under RoPE, a magnitude, and some pairs tracked. */
static void test_tracked_mean_is_exact(void **state) {
    (void)state;
    const int32_t layouts[] = {OSCAR_ROPE_ADJACENT, OSCAR_ROPE_HALF_SPLIT};
    for (int l = 0; l < 2; l++) {
        oscar_layer layer = make_layer(64, 2, 2, layouts[l], 48, 0.85f);
        rows r = make_rows(&layer, 400);
        fill_rows(&layer, &r, 3);
        calib *c;
        oscar_rotations *fitted;
        assert_int_equal(calib_new(&c, &layer, 1, NULL), OSCAR_OK);
        assert_int_equal(calib_add(c, 0, &r.step, NULL), OSCAR_OK);
        assert_int_equal(calib_fit(c, 8, &fitted, NULL), OSCAR_OK);
        const rotations_layer *fit = &fitted->layers[0];
        assert_int_equal(fit->n_tracked, 8);
        for (int trial = 0; trial < 200; trial++) {
            int t = (int)(uniform() * 400), h = trial % 2, position = t + trial * 97;
            const float *k = r.k + (t * 2 + h) * 64, *q = r.q + (t * 4 + h * 2) * 64;
            const float *u = fit->k_rotation + h * 64 * 64, *nu = fit->k_tracked + h * 64, *mu = fit->k_mean + h * 64;
            double exact = 0, bias = 0, turned[64] = {0}, residual[64], rotated = 0;
            for (int f = 0; f < 24; f++) {
                int i = rope_first(&layer.rope, f), j = rope_second(&layer.rope, f);
                double a = position * (double)layer.rope.inv_freq[f], m = (double)layer.rope.magnitude;
                turned[i] = m * ((double)nu[i] * cos(a) - (double)nu[j] * sin(a));
                turned[j] = m * ((double)nu[i] * sin(a) + (double)nu[j] * cos(a));
            }
            for (int i = 0; i < 64; i++) {
                exact += (double)q[i] * (double)k[i];
                bias += (double)q[i] * ((double)mu[i] + turned[i]);
                residual[i] = (double)k[i] - (double)mu[i] - turned[i];
            }
            for (int j = 0; j < 64; j++) {
                double kj = 0, qj = 0;
                for (int i = 0; i < 64; i++) {
                    kj += residual[i] * (double)u[i * 64 + j];
                    qj += (double)q[i] * (double)u[i * 64 + j];
                }
                rotated += kj * qj;
            }
            assert_true(fabs(exact - rotated - bias) < 2e-4); /* u is float32 */
        }
        oscar_rotations_free(fitted);
        calib_free(c);
        free_rows(&r);
    }
}

/* Pairs are taken by how much more their mean weighs when it is turned with the key. */
static void test_tracked_order(void **state) {
    (void)state;
    oscar_layer layer = make_layer(32, 1, 1, OSCAR_ROPE_HALF_SPLIT, 32, 1);
    rows r = make_rows(&layer, 2000);
    fill_rows(&layer, &r, 0);
    double angles[OSCAR_MAX_HEAD_DIM];
    for (int t = 0; t < 2000; t++) { /* only pairs 1 and 3 have a mean before RoPE */
        float mean[32] = {0};
        mean[1] = 5;
        mean[3 + 16] = -6;
        rope_angles(&layer.rope, t, angles);
        rope_turn(&layer.rope, angles, false, mean);
        for (int i = 0; i < 32; i++) r.k[t * 32 + i] += mean[i];
    }
    calib *c;
    oscar_rotations *fitted;
    assert_int_equal(calib_new(&c, &layer, 1, NULL), OSCAR_OK);
    assert_int_equal(calib_add(c, 0, &r.step, NULL), OSCAR_OK);
    assert_int_equal(calib_fit(c, 2, &fitted, NULL), OSCAR_OK);
    assert_int_equal(fitted->layers[0].tracked[0], 1);
    assert_int_equal(fitted->layers[0].tracked[1], 3);
    assert_true(fabsf(fitted->layers[0].k_tracked[1] - 5) < 0.2f);
    assert_int_equal(calib_set_tracked(c, 0, 0, &fitted->layers[0], NULL), OSCAR_OK);
    assert_null(fitted->layers[0].tracked);
    for (int i = 0; i < 32; i++) assert_true(fitted->layers[0].k_tracked[i] == 0);
    oscar_rotations_free(fitted);
    calib_free(c);
    free_rows(&r);
}

/* A21: too little or degenerate data still gives finite, orthogonal rotations. */
static void check_degenerate(int32_t n, bool equal, bool dead_channel) {
    oscar_layer layer = make_layer(64, 2, 2, OSCAR_ROPE_ADJACENT, 64, 1);
    rows r = make_rows(&layer, n);
    fill_rows(&layer, &r, 1);
    for (int32_t t = 1; equal && t < n; t++) {
        memcpy(r.q + t * 256, r.q, 256 * sizeof(float));
        memcpy(r.out + t * 256, r.out, 256 * sizeof(float));
        memcpy(r.k + t * 128, r.k, 128 * sizeof(float));
        memcpy(r.v + t * 128, r.v, 128 * sizeof(float));
    }
    for (int32_t i = 0; dead_channel && i < n * 4; i++) r.q[i * 64 + 5] = r.out[i * 64 + 5] = 0;
    calib *c[2];
    oscar_rotations *fitted[2], *zoo;
    for (int again = 0; again < 2; again++) {
        assert_int_equal(calib_new(&c[again], &layer, 1, NULL), OSCAR_OK);
        assert_int_equal(calib_add(c[again], 0, &r.step, NULL), OSCAR_OK);
        assert_int_equal(calib_fit(c[again], 16, &fitted[again], NULL), OSCAR_OK);
    }
    const rotations_layer *a = &fitted[0]->layers[0], *b = &fitted[1]->layers[0];
    for (int h = 0; h < 2; h++) {
        assert_true(orthogonality(64, a->k_rotation + h * 4096, NULL) < 1e-5);
        assert_true(orthogonality(64, a->v_rotation + h * 4096, NULL) < 1e-5);
    }
    assert_memory_equal(a->k_rotation, b->k_rotation, 2 * 4096 * sizeof(float));
    assert_memory_equal(a->v_rotation, b->v_rotation, 2 * 4096 * sizeof(float));
    assert_memory_equal(a->k_metric_b, b->k_metric_b, 2 * 4096 * sizeof(float));
    assert_int_equal(calib_fit_zoo(c[0], &zoo, NULL), OSCAR_OK);
    assert_true(orthogonality(64, zoo->layers[0].v_rotation, NULL) < 1e-5);
    oscar_rotations_free(zoo);
    for (int again = 0; again < 2; again++) {
        oscar_rotations_free(fitted[again]);
        calib_free(c[again]);
    }
    free_rows(&r);
}

static void test_degenerate(void **state) {
    (void)state;
    check_degenerate(1, false, false);
    check_degenerate(12, false, false);
    check_degenerate(1000, true, false);
    check_degenerate(600, false, true);
}

static void test_refuses_nan(void **state) {
    (void)state;
    oscar_layer layer = make_layer(32, 2, 2, OSCAR_ROPE_HALF_SPLIT, 32, 1);
    for (int what = 0; what < 3; what++) {
        rows r = make_rows(&layer, 20);
        fill_rows(&layer, &r, 0);
        float *arrays[] = {r.q, r.k, r.v};
        arrays[what][(7 * (what == 0 ? 4 : 2) + 1) * 32 + 3] = what % 2 ? INFINITY : NAN;
        calib *c;
        oscar_error error;
        assert_int_equal(calib_new(&c, &layer, 1, NULL), OSCAR_OK);
        assert_int_equal(calib_add(c, 0, &r.step, &error), OSCAR_ERROR_NOT_FINITE);
        assert_int_equal(error.position, 7);
        calib_free(c);
        free_rows(&r);
    }
    calib *c;
    oscar_rotations *fitted;
    assert_int_equal(calib_new(&c, &layer, 1, NULL), OSCAR_OK);
    assert_int_equal(calib_fit(c, 8, &fitted, NULL), OSCAR_ERROR_ARGUMENT); /* no tokens */
    assert_null(fitted);
    calib_free(c);
}

/* Mean of e C_Q e^T over rows of one head when keys are quantised as `layer` says. */
static double logit_error(const rotations_layer *layer, const oscar_layer *shape, const rows *r, int32_t head, const double *qq) {
    int32_t d = shape->head_dim;
    size_t square = (size_t)head * (size_t)d * (size_t)d;
    row_codec codec = {.head_dim = d, .group = codec_group(d), .bits = 2, .recipe = OSCAR_RECIPE_DEFAULT, .clip = 1, .rotation = layer->k_rotation + square};
    double sum = 0;
    for (int32_t t = 0; t < r->step.n_tokens; t++) {
        float y[OSCAR_MAX_HEAD_DIM], e[OSCAR_MAX_HEAD_DIM];
        double back[OSCAR_MAX_HEAD_DIM];
        uint8_t codes[OSCAR_MAX_HEAD_DIM];
        uint16_t params[2 * CODEC_MAX_GROUPS];
        assert_int_equal(codec_quantize_rows(&codec, 1, r->k + (t * shape->n_kv_heads + head) * d, d, y, codes, params), 0);
        for (int32_t i = 0; i < d; i++) e[i] = fp16_to_float(params[1]) + fp16_to_float(params[0]) * (float)codes[i] - y[i];
        for (int32_t i = 0; i < d; i++) {
            back[i] = 0;
            for (int32_t j = 0; j < d; j++) back[i] += (double)e[j] * (double)codec.rotation[i * d + j];
        }
        for (int32_t i = 0; i < d; i++)
            for (int32_t j = 0; j < d; j++) sum += back[i] * back[j] * qq[square + (size_t)(i > j ? i * d + j : j * d + i)];
    }
    return sum;
}

/* A06: heads whose queries read different directions need a rotation each. Keys are strongest where
 * this head's queries look; its own rotation spreads that direction evenly over all channels, a
 * shared one leaves some channels far above the others. */
static void test_per_head_beats_shared(void **state) {
    (void)state;
    oscar_layer layer = make_layer(64, 4, 2, OSCAR_ROPE_ADJACENT, 0, 1);
    rows r = make_rows(&layer, 500);
    double *c_random = calloc(4096, sizeof *c_random), *basis = calloc(4096, sizeof *basis), values[64];
    for (int h = 0; h < 4; h++) {
        random_covariance(64, 6, c_random);
        assert_int_equal(calib_eigenvectors(64, c_random, values, basis, NULL), OSCAR_OK);
        for (int t = 0; t < 500; t++) {
            double strong = (t % 2 ? 300 : -300) * (1 + 0.2 * uniform());
            for (int i = 0; i < 64; i++) {
                r.k[(t * 4 + h) * 64 + i] = (float)(normal() + strong * basis[i * 64 + 63]);
                r.v[(t * 4 + h) * 64 + i] = (float)normal();
            }
            for (int g = 0; g < 2; g++) {
                float *q = r.q + (t * 8 + h * 2 + g) * 64;
                for (int j = 0; j < 64; j++) {
                    double along = normal() * (j == 63 ? 30 : 1); /* eigenvector 63 far above the others */
                    for (int i = 0; i < 64; i++) q[i] += (float)(along * basis[i * 64 + j]);
                    r.out[(t * 8 + h * 2 + g) * 64 + j] = (float)normal();
                }
            }
        }
    }
    free(c_random);
    free(basis);
    calib *c;
    oscar_rotations *own, *shared;
    assert_int_equal(calib_new(&c, &layer, 1, NULL), OSCAR_OK);
    assert_int_equal(calib_add(c, 0, &r.step, NULL), OSCAR_OK);
    assert_int_equal(calib_fit(c, 0, &own, NULL), OSCAR_OK);
    assert_int_equal(calib_fit_zoo(c, &shared, NULL), OSCAR_OK);
    for (int h = 1; h < 4; h++) /* one matrix for the layer */
        assert_memory_equal(shared->layers[0].k_rotation, shared->layers[0].k_rotation + h * 4096, 4096 * sizeof(float));
    for (int h = 0; h < 4; h++) {
        double mine = logit_error(&own->layers[0], &layer, &r, h, c->sums[0].qq);
        double common = logit_error(&shared->layers[0], &layer, &r, h, c->sums[0].qq);
        printf("head %d: logit error with its own rotation %.4g, with a shared one %.4g\n", h, mine, common);
        assert_true(mine < common / 5);
    }
    oscar_rotations_free(own);
    oscar_rotations_free(shared);
    calib_free(c);
    free_rows(&r);
}

int main(void) {
    random_state = rng_seed("test_calib", 20260517);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_compose_is_orthogonal), cmocka_unit_test(test_compose_spreads_energy),
        cmocka_unit_test(test_offsets_take_the_most), cmocka_unit_test(test_bit_reversal),
        cmocka_unit_test(test_sums),                  cmocka_unit_test(test_covariance_about_tracked_mean),
        cmocka_unit_test(test_key_mean_before_rope),  cmocka_unit_test(test_tracked_mean_is_exact),
        cmocka_unit_test(test_tracked_order),         cmocka_unit_test(test_degenerate),
        cmocka_unit_test(test_refuses_nan),           cmocka_unit_test(test_per_head_beats_shared),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
