/*
 * test_eval.c - KL, perplexity, quantiles and the names of methods.
 */
#include "test_util.h"

#include "eval/compare.h"
#include "eval/kl.h"
#include "eval/methods.h"
#include "codec/rotations.h"

static uint64_t random_state;

static double log_sum64(int32_t n, const float *x) {
    double most = -INFINITY, sum = 0;
    for (int32_t i = 0; i < n; i++) most = fmax(most, (double)x[i]);
    for (int32_t i = 0; i < n; i++) sum += exp((double)x[i] - most);
    return most + log(sum);
}

static double kl64(int32_t n, const float *x, const float *y) {
    double lx = log_sum64(n, x), ly = log_sum64(n, y), kl = 0;
    for (int32_t i = 0; i < n; i++) kl += exp((double)x[i] - lx) * (((double)x[i] - lx) - ((double)y[i] - ly));
    return kl;
}

/* Vocabularies that are no multiple of any block, peaky and flat rows, small and large differences,
 * any number of threads. */
static void test_kl_against_float64(void **state) {
    (void)state;
    const int32_t sizes[] = {1, 7, 255, 257, 4099, 50001};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int spread = 0; spread < 3; spread++) {
            int32_t n = sizes[s], rows = 5;
            float *x = malloc((size_t)(rows * n) * sizeof *x), *y = malloc((size_t)(rows * n) * sizeof *y);
            int32_t targets[5];
            double scale = spread == 0 ? 0.1 : spread == 1 ? 3 : 25, noise = spread == 0 ? 1e-3 : spread;
            for (int32_t i = 0; i < rows * n; i++) {
                x[i] = (float)(rng_normal(&random_state) * scale - 5);
                y[i] = (float)((double)x[i] + rng_normal(&random_state) * noise);
            }
            for (int r = 0; r < rows; r++) targets[r] = (int32_t)(rng_next(&random_state) % (uint64_t)n);
            kl_reference reference;
            kl_row own[5], got[5], again[5];
            assert_true(kl_reference_init(&reference, n, rows));
            kl_set_reference(&reference, rows, x, targets, 2, own);
            kl_compare(&reference, y, targets, 1, got);
            kl_compare(&reference, y, targets, 3, again);
            for (int r = 0; r < rows; r++) {
                const float *xr = x + r * n, *yr = y + r * n;
                double kl = kl64(n, xr, yr);
                int32_t top_x = 0, top_y = 0;
                for (int32_t i = 1; i < n; i++) {
                    if (xr[i] > xr[top_x]) top_x = i;
                    if (yr[i] > yr[top_y]) top_y = i;
                }
                assert_true(own[r].finite && got[r].finite);
                assert_true(fabs(got[r].kl - kl) < 1e-6 + 1e-5 * kl);
                assert_true(fabs(own[r].nll - (log_sum64(n, xr) - (double)xr[targets[r]])) < 1e-6);
                assert_true(fabs(got[r].nll - (log_sum64(n, yr) - (double)yr[targets[r]])) < 1e-6);
                assert_int_equal(got[r].top1, top_x == top_y);
                assert_true(own[r].kl == 0 && own[r].top1);
                assert_true(got[r].kl == again[r].kl && got[r].nll == again[r].nll);
            }
            kl_reference_destroy(&reference);
            free(x);
            free(y);
        }
}

static void test_exact_against_exact_is_zero(void **state) {
    (void)state;
    enum { V = 1000 };
    float x[V];
    for (int i = 0; i < V; i++) x[i] = (float)(rng_normal(&random_state) * 8);
    kl_reference reference;
    kl_row row;
    int32_t target = 5;
    assert_true(kl_reference_init(&reference, V, 1));
    kl_set_reference(&reference, 1, x, &target, 1, &row);
    kl_compare(&reference, x, &target, 1, &row);
    assert_true(row.kl == 0);
    assert_true(row.top1);
    /* Adding a constant to all logits changes nothing. */
    for (int i = 0; i < V; i++) x[i] += 3;
    kl_compare(&reference, x, &target, 1, &row);
    assert_true(row.kl < 1e-5);
    kl_reference_destroy(&reference);
}

static void test_not_finite_is_seen(void **state) {
    (void)state;
    enum { V = 300 };
    const float bad[] = {NAN, INFINITY};
    for (int b = 0; b < 2; b++)
        for (int at = 0; at < V; at += 37) {
            float x[V] = {0}, y[V] = {0};
            kl_reference reference;
            kl_row row;
            int32_t target = 1;
            assert_true(kl_reference_init(&reference, V, 1));
            kl_set_reference(&reference, 1, x, &target, 1, &row);
            assert_true(row.finite);
            y[at] = bad[b];
            kl_compare(&reference, y, &target, 1, &row);
            assert_false(row.finite);
            kl_set_reference(&reference, 1, y, &target, 1, &row);
            assert_false(row.finite);
            kl_reference_destroy(&reference);
        }
}

static void test_exp(void **state) {
    (void)state;
    for (double x = -86; x <= 0; x += 0.0137) {
        double got = (double)kl_exp((float)x), want = exp((double)(float)x);
        assert_true(fabs(got - want) < 2.5e-7 * want);
    }
    assert_true(kl_exp(0) == 1.0f);
    assert_true(kl_exp(-1000) < 1e-37f);
}

static void test_quantile(void **state) {
    (void)state;
    float values[] = {4, 1, 3, 2, 5};
    assert_true(kl_quantile(values, 5, 0.5) == 3);
    assert_true(fabs(kl_quantile(values, 5, 0.99) - 4.96) < 1e-6);
    assert_true(kl_quantile(values, 5, 1) == 5);
    float one[] = {7};
    assert_true(kl_quantile(one, 1, 0.99) == 7);
}

static void test_method_names(void **state) {
    (void)state;
    compare_method m[COMPARE_MAX_METHODS];
    int32_t n;
    oscar_error error;
    assert_int_equal(compare_parse_methods("int2,zoo:3,quarot:k3,naive:v4@0/0,kivi,exact,int2:k3v2@4/64", m, &n, &error), OSCAR_OK);
    assert_int_equal(n, 7);
    assert_int_equal(m[0].kind, METHOD_INT2);
    assert_int_equal(m[0].bits_k, 0);
    assert_int_equal(m[0].sink, -1);
    assert_int_equal(m[1].kind, METHOD_ZOO);
    assert_true(m[1].bits_k == 3 && m[1].bits_v == 3);
    assert_true(m[2].bits_k == 3 && m[2].bits_v == 0);
    assert_true(m[3].bits_k == 0 && m[3].bits_v == 4 && m[3].sink == 0 && m[3].recent == 0);
    assert_int_equal(m[4].kind, METHOD_KIVI);
    assert_int_equal(m[5].kind, METHOD_EXACT);
    assert_true(m[6].bits_k == 3 && m[6].bits_v == 2 && m[6].sink == 4 && m[6].recent == 64);
    assert_string_equal(m[6].name, "int2:k3v2@4/64");
    const char *bad[] = {"",         "int3",    "int2,",    "int2:",      "int2:5",    "int2:k",   "int2:k1",   "int2:3x",
                         "int2@4",   "int2@/4", "int2@4/",  "int2@4/5x",  "exact:3",   ",int2",    "int2:33",   "int2@-1/2",
                         "INT2",     "zoo:v3k3"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(compare_parse_methods(bad[i], m, &n, &error), OSCAR_ERROR_ARGUMENT);
}

static void test_baseline_rotations(void **state) {
    (void)state;
    oscar_layer layer = {.n_kv_heads = 2, .n_q_heads = 4, .head_dim = 64};
    compare_method m[COMPARE_MAX_METHODS];
    int32_t n;
    assert_int_equal(compare_parse_methods("quarot,naive,int2", m, &n, NULL), OSCAR_OK);
    oscar_rotations *r;
    assert_int_equal(method_rotations(&m[0], &layer, 1, &r, NULL), OSCAR_OK);
    assert_int_equal(r->layers[0].recipe, OSCAR_RECIPE_ZOO);
    assert_true(r->layers[0].clip_k == 0.96f && r->layers[0].clip_v == 0.92f && !r->layers[0].gain_k && !r->layers[0].ldlq_k);
    assert_true(fabsf(r->layers[0].k_rotation[3]) == 0.125f);
    oscar_rotations_free(r);
    assert_int_equal(method_rotations(&m[1], &layer, 1, &r, NULL), OSCAR_OK);
    assert_true(r->layers[0].clip_k == 1 && r->layers[0].k_rotation == NULL);
    oscar_rotations_free(r);
    assert_int_equal(method_rotations(&m[2], &layer, 1, &r, NULL), OSCAR_OK);
    assert_null(r);
}

int main(void) {
    random_state = rng_seed("test_eval", 7);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kl_against_float64), cmocka_unit_test(test_exact_against_exact_is_zero),
        cmocka_unit_test(test_not_finite_is_seen), cmocka_unit_test(test_exp),
        cmocka_unit_test(test_quantile),           cmocka_unit_test(test_method_names),
        cmocka_unit_test(test_baseline_rotations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
