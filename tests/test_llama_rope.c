/* test_llama_rope.c - RoPE parameters read from a graph's nodes, against what ggml computes from the
 * same nodes. */
#include "llama/layer.h"
#include "test_util.h"

enum { DIMS = 96, POSITIONS = 3 };
static const int32_t positions[POSITIONS] = {1, 7, 300};

typedef struct rope_case {
    const char *name;
    int mode, n_dims, n_ctx_orig;
    float base, scale, ext, attn, beta_fast, beta_slow;
    bool factors;
} rope_case;

static const rope_case cases[] = {
    {"plain, adjacent", GGML_ROPE_TYPE_NORMAL, 96, 4096, 1e4f, 1, 0, 1, 32, 1, false},
    {"plain, half-split, part of the row", GGML_ROPE_TYPE_NEOX, 64, 4096, 1e6f, 1, 0, 1, 32, 1, false},
    {"linear scaling", GGML_ROPE_TYPE_NEOX, 96, 4096, 1e4f, 0.25f, 0, 1, 32, 1, false},
    {"frequency factors", GGML_ROPE_TYPE_NORMAL, 96, 8192, 5e5f, 1, 0, 1, 32, 1, true},
    {"YaRN", GGML_ROPE_TYPE_NEOX, 96, 4096, 1e6f, 0.25f, 1, 0.8f, 32, 1, false},
    {"YaRN with factors, half mixed", GGML_ROPE_TYPE_NORMAL, 64, 512, 1e4f, 0.125f, 0.5f, 1.2f, 16, 2, true},
};

/* What ggml makes of the row that is 1 in the first dim of each pair: magnitude cos, magnitude sin. */
static struct ggml_tensor *compute(const rope_case *c, ggml_backend_t backend, struct ggml_context *ctx,
                                   ggml_backend_buffer_t *buffer, float *out) {
    struct ggml_tensor *x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, DIMS, 1, POSITIONS);
    struct ggml_tensor *pos = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, POSITIONS);
    struct ggml_tensor *factors = c->factors ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, DIMS / 2) : NULL;
    struct ggml_tensor *node = ggml_rope_ext(ctx, x, pos, factors, c->n_dims, c->mode, c->n_ctx_orig, c->base, c->scale,
                                             c->ext, c->attn, c->beta_fast, c->beta_slow);
    struct ggml_cgraph *graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, node);
    *buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    assert_non_null(*buffer);
    float rows[POSITIONS * DIMS] = {0}, values[DIMS / 2];
    for (int t = 0; t < POSITIONS; t++)
        for (int f = 0; f < c->n_dims / 2; f++) rows[t * DIMS + (c->mode == GGML_ROPE_TYPE_NEOX ? f : 2 * f)] = 1;
    for (int f = 0; f < DIMS / 2; f++) values[f] = 1 + 0.1f * (float)f;
    ggml_backend_tensor_set(x, rows, 0, sizeof rows);
    ggml_backend_tensor_set(pos, positions, 0, sizeof positions);
    if (factors) ggml_backend_tensor_set(factors, values, 0, sizeof values);
    assert_int_equal(ggml_backend_graph_compute(backend, graph), GGML_STATUS_SUCCESS);
    ggml_backend_tensor_get(node, out, 0, sizeof rows);
    return node;
}

static void test_parameters(void **state) {
    (void)state;
    ggml_backend_t backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, NULL);
    assert_non_null(backend);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const rope_case *c = &cases[i];
        struct ggml_init_params params = {16 * ggml_tensor_overhead() + ggml_graph_overhead(), NULL, true};
        struct ggml_context *ctx = ggml_init(params);
        ggml_backend_buffer_t buffer;
        float out[POSITIONS * DIMS];
        const struct ggml_tensor *node = compute(c, backend, ctx, &buffer, out);
        oscar_rope rope;
        oscar_error error = {0};
        assert_int_equal(probe_read_rope(node, &rope, &error), OSCAR_OK);
        assert_int_equal(rope.n_dims, c->n_dims);
        bool half = c->mode == GGML_ROPE_TYPE_NEOX;
        assert_int_equal(rope.layout, half ? OSCAR_ROPE_HALF_SPLIT : OSCAR_ROPE_ADJACENT);
        double worst = 0;
        for (int t = 0; t < POSITIONS; t++)
            for (int f = 0; f < c->n_dims / 2; f++) {
                double angle = positions[t] * (double)rope.inv_freq[f];
                const float *row = out + t * DIMS;
                double a = row[half ? f : 2 * f], b = row[half ? f + c->n_dims / 2 : 2 * f + 1];
                worst = fmax(worst, fabs(a - (double)rope.magnitude * cos(angle)));
                worst = fmax(worst, fabs(b - (double)rope.magnitude * sin(angle)));
            }
        if (worst > 2e-4) fail_msg("%s: differs from ggml by %g", c->name, worst);
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
    ggml_backend_free(backend);
}

static void test_refusals(void **state) {
    (void)state;
    struct ggml_init_params params = {16 * ggml_tensor_overhead(), NULL, true};
    struct ggml_context *ctx = ggml_init(params);
    struct ggml_tensor *x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, DIMS, 1, POSITIONS);
    struct ggml_tensor *pos = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, POSITIONS);
    struct ggml_tensor *pos4 = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, 4 * POSITIONS);
    struct ggml_tensor *factors = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, DIMS / 2);
    ggml_set_name(factors, "rope_factors_short.weight");
    oscar_rope rope;
    oscar_error error = {0};
    struct ggml_tensor *node = ggml_rope_ext(ctx, x, pos, factors, DIMS, 0, 4096, 1e4f, 1, 0, 1, 32, 1);
    assert_int_equal(probe_read_rope(node, &rope, &error), OSCAR_ERROR_UNSUPPORTED);
    assert_non_null(strstr(error.message, "rope_factors_short.weight"));
    int sections[4] = {16, 16, 16, 0};
    node = ggml_rope_multi(ctx, x, pos4, NULL, DIMS, sections, GGML_ROPE_TYPE_MROPE, 4096, 1e4f, 1, 0, 1, 32, 1);
    assert_int_equal(probe_read_rope(node, &rope, &error), OSCAR_ERROR_UNSUPPORTED);
    assert_non_null(strstr(error.message, "RoPE mode 8"));
    assert_int_equal(probe_read_rope(NULL, &rope, &error), OSCAR_OK);
    assert_int_equal(rope.layout, OSCAR_ROPE_NONE);
    ggml_free(ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_parameters), cmocka_unit_test(test_refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
