/*
 * test_llama_models.c - what the probe finds in real models, and every layer's attention against
 * float64 computed from the same queries, keys and values: SmolLM2 (heads of 64, adjacent RoPE),
 * Qwen2.5 (key bias, half-split RoPE), Gemma 3 (heads of 256, sliding windows). Skipped without models.
 */
#include <unistd.h>

#include "llama/layer.h"
#include "test_util.h"

enum { N = 600 }; /* longer than Gemma's window of 512 */

typedef struct watch {
    oscar_llama *layer;
    int n_seen;
    double worst; /* largest error over the largest value of its row */
    int worst_layer;
} watch;

static double row_value(const oscar_step *step, const void *rows, int64_t at) {
    return step->kv_dtype == OSCAR_DTYPE_F16 ? fp16_to_float(((const uint16_t *)rows)[at]) : ((const float *)rows)[at];
}

/* Attention of query head h of token t, from the definition. */
static void reference(const oscar_step *s, const oscar_layer *shape, int t, int h, double *out) {
    static double weight[N];
    int d = shape->head_dim, g = h / (shape->n_q_heads / shape->n_kv_heads);
    int begin = shape->window > 0 && t - shape->window + 1 > 0 ? t - shape->window + 1 : 0;
    double highest = -INFINITY, sum = 0;
    for (int j = begin; j <= t; j++) {
        double dot = 0;
        for (int i = 0; i < d; i++)
            dot += (double)s->q[t * s->q_token_stride + h * s->q_head_stride + i] *
                   row_value(s, s->k, j * s->k_token_stride + g * s->k_head_stride + i);
        weight[j] = dot * (double)s->logit_scale;
        highest = fmax(highest, weight[j]);
    }
    for (int j = begin; j <= t; j++) sum += weight[j] = exp(weight[j] - highest);
    for (int i = 0; i < d; i++) out[i] = 0;
    for (int j = begin; j <= t; j++)
        for (int i = 0; i < d; i++)
            out[i] += weight[j] / sum * row_value(s, s->v, j * s->v_token_stride + g * s->v_head_stride + i);
}

static void observe(void *user, int32_t index, const oscar_step *step) {
    watch *w = user;
    const oscar_layer *shape = &oscar_llama_layers(w->layer, NULL)[index];
    static const int queries[] = {0, 1, 63, 64, 200, 511, 512, 513, N - 1};
    assert_int_equal(step->n_tokens, N);
    assert_true(step->logit_softcap == 0 && !step->sink_logits);
    for (size_t x = 0; x < sizeof queries / sizeof *queries; x++)
        for (int h = 0; h < shape->n_q_heads; h += 3) {
            double expected[OSCAR_MAX_HEAD_DIM], size = 0, error = 0;
            const float *out = step->out + queries[x] * step->out_token_stride + h * step->out_head_stride;
            reference(step, shape, queries[x], h, expected);
            for (int i = 0; i < shape->head_dim; i++) {
                size = fmax(size, fabs(expected[i]));
                error = fmax(error, fabs(expected[i] - (double)out[i]));
            }
            if (error <= w->worst * size) continue;
            w->worst = error / size;
            w->worst_layer = index;
        }
    w->n_seen++;
}

static bool find_model(const char *name, char *path, size_t size) {
    const char *cache = getenv("OSCAR_CACHE"), *home = getenv("HOME");
    if (cache) snprintf(path, size, "%s/models/%s.gguf", cache, name);
    else snprintf(path, size, "%s/.cache/oscar/models/%s.gguf", home ? home : "", name);
    return access(path, R_OK) == 0;
}

typedef struct expected_model {
    const char *name;
    int n_layers, n_q, n_kv, d, layout;
    double base, global_base;
    int window, period; /* every period-th layer is global */
} expected_model;

static void check_layers(const expected_model *e, const oscar_layer *layers, int32_t n) {
    assert_int_equal(n, e->n_layers);
    for (int32_t i = 0; i < n; i++) {
        bool global = e->window == 0 || i % e->period == e->period - 1;
        assert_int_equal(layers[i].n_q_heads, e->n_q);
        assert_int_equal(layers[i].n_kv_heads, e->n_kv);
        assert_int_equal(layers[i].head_dim, e->d);
        assert_int_equal(layers[i].window, global ? 0 : e->window);
        assert_int_equal(layers[i].rope.layout, e->layout);
        assert_int_equal(layers[i].rope.n_dims, e->d);
        assert_true(layers[i].rope.magnitude == 1);
        for (int f = 0; f < e->d / 2; f++) {
            double turn = pow(global ? e->global_base : e->base, -2.0 * f / e->d);
            assert_true(fabs((double)layers[i].rope.inv_freq[f] / turn - 1) < 1e-5);
        }
    }
}

static void check_model(const expected_model *e) {
    char path[1024];
    if (!find_model(e->name, path, sizeof path)) {
        printf("no model at %s\n", path);
        skip();
    }
    struct llama_model *model = llama_model_load_from_file(path, llama_model_default_params());
    assert_non_null(model);
    struct llama_context_params p = llama_context_default_params();
    p.n_ctx = p.n_batch = p.n_ubatch = 640;
    p.n_threads = p.n_threads_batch = 2;
    oscar_llama_options options = OSCAR_LLAMA_OPTIONS_INIT;
    options.kv_type = OSCAR_KV_F32;
    watch w = {0};
    oscar_error error = {0};
    if (oscar_llama_prepare(&w.layer, model, &p, &options, &error)) fail_msg("%s", error.message);
    struct llama_context *ctx = llama_init_from_model(model, p);
    assert_non_null(ctx);
    assert_int_equal(oscar_llama_attach(w.layer, ctx, &error), OSCAR_OK);
    oscar_llama_set_observer(w.layer, observe, &w);
    llama_token tokens[N];
    uint64_t rng = rng_seed(e->name, 7);
    for (int i = 0; i < N; i++) tokens[i] = (llama_token)(1000 + rng_next(&rng) % 20000);
    if (oscar_llama_decode(w.layer, llama_batch_get_one(tokens, N))) fail_msg("%s", oscar_llama_last_error(w.layer)->message);
    int32_t n;
    const oscar_layer *layers = oscar_llama_layers(w.layer, &n);
    check_layers(e, layers, n);
    assert_int_equal(w.n_seen, n);
    printf("%s: %d layers, attention within %.1e of float64 (layer %d)\n", e->name, n, w.worst, w.worst_layer);
    /* Exponents of large logits lose bits in float32: Qwen's are in the hundreds. */
    assert_true(w.worst < 2e-4);
    llama_free(ctx);
    oscar_llama_free(w.layer);
    llama_model_free(model);
}

static void test_smollm2(void **state) {
    (void)state;
    check_model(&(expected_model){"smollm2-135m", 30, 9, 3, 64, OSCAR_ROPE_ADJACENT, 1e5, 1e5, 0, 0});
}

static void test_qwen(void **state) {
    (void)state;
    check_model(&(expected_model){"qwen2.5-coder-0.5b", 24, 14, 2, 64, OSCAR_ROPE_HALF_SPLIT, 1e6, 1e6, 0, 0});
}

static void test_gemma(void **state) {
    (void)state;
    check_model(&(expected_model){"gemma-3-270m", 18, 4, 1, 256, OSCAR_ROPE_HALF_SPLIT, 1e4, 1e6, 512, 6});
}

static void quiet(enum ggml_log_level level, const char *text, void *user) {
    (void)user;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

int main(void) {
    llama_log_set(quiet, NULL);
    llama_backend_init();
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_smollm2), cmocka_unit_test(test_qwen),
                                       cmocka_unit_test(test_gemma)};
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    llama_backend_free();
    return failed;
}
