/*
 * test_calib_heldout.c - held-out errors against attention in float64.
 */
#include "test_util.h"

#include "calib/calib.h"

#define N 150
#define D 32
#define SINK 8
#define RECENT 20

static uint64_t random_state;

/* One KV head, two query heads, sliding window, softcap and attention sinks: everything that shapes
 * the softmax. */
typedef struct fixture {
    oscar_layer layer;
    oscar_step step;
    int32_t positions[N];
    float q[N][2][D], k[N][1][D], v[N][1][D], out[N][2][D], sinks[2];
    calib *sums;
    oscar_rotations *fitted;
} fixture;

static void fixture_init(fixture *f, int32_t window, float softcap, bool sinks) {
    memset(f, 0, sizeof *f);
    f->layer = (oscar_layer){.n_kv_heads = 1, .n_q_heads = 2, .head_dim = D, .window = window};
    f->layer.rope = (oscar_rope){.layout = OSCAR_ROPE_HALF_SPLIT, .n_dims = D, .magnitude = 1.1f};
    for (int i = 0; i < D / 2; i++) f->layer.rope.inv_freq[i] = (float)pow(100, -2.0 * i / D);
    for (int t = 0; t < N; t++) {
        f->positions[t] = t;
        double angles[D];
        rope_angles(&f->layer.rope, t, angles);
        for (int i = 0; i < D; i++) {
            f->k[t][0][i] = (float)(rng_normal(&random_state) + 1.5);
            f->v[t][0][i] = (float)(rng_normal(&random_state) + 0.5);
            for (int h = 0; h < 2; h++) {
                f->q[t][h][i] = (float)(rng_normal(&random_state) * (1 + i % 4));
                f->out[t][h][i] = (float)rng_normal(&random_state);
            }
        }
        rope_turn(&f->layer.rope, angles, false, f->k[t][0]);
        for (int i = 0; i < D; i++) f->k[t][0][i] *= 1.1f;
    }
    f->sinks[0] = 0.5f;
    f->sinks[1] = -1;
    f->step = (oscar_step)OSCAR_STEP_INIT;
    f->step.n_tokens = N;
    f->step.positions = f->positions;
    f->step.q = &f->q[0][0][0];
    f->step.k = f->k;
    f->step.v = f->v;
    f->step.out = &f->out[0][0][0];
    f->step.logit_scale = 0.15f;
    f->step.logit_softcap = softcap;
    f->step.sink_logits = sinks ? f->sinks : NULL;
    assert_int_equal(calib_new(&f->sums, &f->layer, 1, NULL), OSCAR_OK);
    assert_int_equal(calib_add(f->sums, 0, &f->step, NULL), OSCAR_OK);
    assert_int_equal(calib_fit(f->sums, 8, &f->fitted, NULL), OSCAR_OK);
}

static void fixture_free(fixture *f) {
    calib_free(f->sums);
    oscar_rotations_free(f->fitted);
}

/* Rows as the cache gives them back, in float64: quantised residual, turned back, means added. */
static void restored(const fixture *f, bool key, double back[N][D]) {
    const rotations_layer *fit = &f->fitted->layers[0];
    const float *u = key ? fit->k_rotation : fit->v_rotation;
    row_codec codec = {.head_dim = D, .group = codec_group(D), .bits = 2, .recipe = fit->recipe, .ldlq = key, .gain = true, .rotation = u,
                       .metric_b = key ? fit->k_metric_b : NULL, .metric_d = key ? fit->k_metric_d : NULL};
    for (int t = 0; t < N; t++) {
        double mean[D];
        float x[D], y[D];
        uint8_t codes[D];
        uint16_t params[2];
        for (int i = 0; i < D; i++) mean[i] = (double)(key ? fit->k_mean[i] : fit->v_mean[i]);
        for (int p = 0; key && p < D / 2; p++) {
            int i = rope_first(&f->layer.rope, p), j = rope_second(&f->layer.rope, p);
            double a = t * (double)f->layer.rope.inv_freq[p], m = (double)f->layer.rope.magnitude;
            mean[i] += m * ((double)fit->k_tracked[i] * cos(a) - (double)fit->k_tracked[j] * sin(a));
            mean[j] += m * ((double)fit->k_tracked[i] * sin(a) + (double)fit->k_tracked[j] * cos(a));
        }
        for (int i = 0; i < D; i++) x[i] = (float)((double)(key ? f->k[t][0][i] : f->v[t][0][i]) - mean[i]);
        assert_int_equal(codec_quantize_rows(&codec, 1, x, D, y, codes, params), 0);
        for (int i = 0; i < D; i++) {
            back[t][i] = mean[i];
            for (int j = 0; j < D; j++)
                back[t][i] += ((double)fp16_to_float(params[1]) + (double)fp16_to_float(params[0]) * codes[j]) * (double)u[i * D + j];
        }
    }
}

static bool in_history(const fixture *f, int t, int j) {
    return j >= SINK && j <= t - RECENT && !(f->layer.window > 0 && j <= t - f->layer.window);
}

/* Probabilities of one query over [0, t]. */
static void softmax64(const fixture *f, int t, int h, double keys[N][D], double *p) {
    double sum = 0;
    for (int j = 0; j <= t; j++) {
        double x = 0, cap = (double)f->step.logit_softcap;
        bool far = in_history(f, t, j);
        p[j] = 0;
        if (f->layer.window > 0 && j <= t - f->layer.window) continue;
        for (int i = 0; i < D; i++) x += (double)f->q[t][h][i] * (far && keys ? keys[j][i] : (double)f->k[j][0][i]);
        x *= (double)f->step.logit_scale;
        p[j] = exp(cap > 0 ? cap * tanh(x / cap) : x);
        sum += p[j];
    }
    if (f->step.sink_logits) sum += exp((double)f->sinks[h]);
    for (int j = 0; j <= t; j++) p[j] /= sum;
}

/* All queries that have a history are sampled when there are few: compare sums over all of them. */
static void check(int32_t window, float softcap, bool sinks) {
    static double keys[N][D], values[N][D];
    static fixture f;
    fixture_init(&f, window, softcap, sinks);
    restored(&f, true, keys);
    restored(&f, false, values);
    oscar_step few = f.step; /* 8 + 20 + 60 tokens: 60 queries, all sampled */
    few.n_tokens = SINK + RECENT + 60;
    heldout *h;
    heldout_error ek, ev;
    assert_int_equal(heldout_new(&h, &f.layer, &few, 0, SINK, RECENT, NULL), OSCAR_OK);
    assert_int_equal(heldout_keys(h, &f.fitted->layers[0], 0, &ek, NULL), OSCAR_OK);
    assert_int_equal(heldout_values(h, &f.fitted->layers[0], &ev, NULL), OSCAR_OK);
    heldout_free(h);
    double kl = 0, out_k = 0, out_v = 0, out_square = 0;
    for (int t = SINK + RECENT; t < SINK + RECENT + 60; t++)
        for (int head = 0; head < 2; head++) {
            double p[N], p_hat[N];
            softmax64(&f, t, head, NULL, p);
            softmax64(&f, t, head, keys, p_hat);
            for (int j = 0; j <= t; j++)
                if (p[j] > 0) kl += p[j] * log(p[j] / p_hat[j]);
            for (int i = 0; i < D; i++) {
                double o = 0, dk = 0, dv = 0;
                for (int j = 0; j <= t; j++) {
                    o += p[j] * (double)f.v[j][0][i];
                    dk += (p_hat[j] - p[j]) * (double)f.v[j][0][i];
                    if (in_history(&f, t, j)) dv += p[j] * (values[j][i] - (double)f.v[j][0][i]);
                }
                out_square += o * o;
                out_k += dk * dk;
                out_v += dv * dv;
            }
        }
    assert_int_equal((int)ek.n_queries, 120);
    assert_true(fabs(ek.attn_kl - kl) < 1e-3 * kl + 1e-4);
    assert_true(fabs(ek.out_k - out_k) < 2e-3 * out_k);
    assert_true(fabs(ev.out_v - out_v) < 2e-3 * out_v);
    assert_true(fabs(ek.out_square - out_square) < 1e-4 * out_square);
    assert_true(out_k > 0 && out_v > 0);
    fixture_free(&f);
}

static void test_plain(void **state) {
    (void)state;
    check(0, 0, false);
}

static void test_window_softcap_sinks(void **state) {
    (void)state;
    check(40, 0, false);
    check(0, 3, false);
    check(40, 3, true);
}

/* With every pair tracked, a residual does not know its position: far keys have the errors of near
 * ones. With none, a static mean fits only where it was measured. */
static void test_shift(void **state) {
    (void)state;
    static fixture f;
    fixture_init(&f, 0, 0, false);
    rotations_layer *fit = &f.fitted->layers[0];
    heldout *h;
    heldout_error here, there;
    assert_int_equal(heldout_new(&h, &f.layer, &f.step, 0, SINK, RECENT, NULL), OSCAR_OK);
    assert_int_equal(calib_set_tracked(f.sums, 0, D / 2, fit, NULL), OSCAR_OK);
    assert_int_equal(heldout_keys(h, fit, 0, &here, NULL), OSCAR_OK);
    assert_int_equal(heldout_keys(h, fit, 5000, &there, NULL), OSCAR_OK);
    assert_true(there.logit_square < 1.6 * here.logit_square && here.logit_square < 1.6 * there.logit_square);
    double tracked = here.logit_square + there.logit_square;
    assert_int_equal(calib_set_tracked(f.sums, 0, 0, fit, NULL), OSCAR_OK);
    assert_int_equal(heldout_keys(h, fit, 0, &here, NULL), OSCAR_OK);
    assert_int_equal(heldout_keys(h, fit, 5000, &there, NULL), OSCAR_OK);
    assert_true(here.logit_square + there.logit_square > 1.3 * tracked);
    heldout_free(h);
    fixture_free(&f);
}

static void test_refusals(void **state) {
    (void)state;
    static fixture f;
    fixture_init(&f, 0, 0, false);
    heldout *h;
    oscar_step few = f.step;
    few.n_tokens = SINK + RECENT;
    assert_int_equal(heldout_new(&h, &f.layer, &few, 0, SINK, RECENT, NULL), OSCAR_ERROR_ARGUMENT);
    assert_null(h);
    f.k[70][0][3] = NAN;
    assert_int_equal(heldout_new(&h, &f.layer, &f.step, 0, SINK, RECENT, NULL), OSCAR_ERROR_NOT_FINITE);
    fixture_free(&f);
}

int main(void) {
    random_state = rng_seed("test_calib_heldout", 42);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_plain), cmocka_unit_test(test_window_softcap_sinks),
                                       cmocka_unit_test(test_shift), cmocka_unit_test(test_refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
