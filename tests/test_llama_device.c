/*
 * test_llama_device.c - attention nodes that are on a device: what is read through the scheduler's
 * copies, and, under a real model (SmolLM2), that a node computed from copies gives what it gives in
 * place. Machines without a device take the same way with every node; skipped without the model.
 */
#include "test_llama_util.h"

enum { N = 160, N_CTX = 512 };

static llama_token tokens[2 * N];

static struct ggml_tensor *named(struct ggml_context *ctx, int64_t n, const char *name) {
    struct ggml_tensor *t = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n);
    return ggml_set_name(t, name);
}

static void test_names(void **state) {
    (void)state;
    struct ggml_context *ctx = ggml_init((struct ggml_init_params){64 * ggml_tensor_overhead(), NULL, true});
    assert_int_equal(probe_cache_layer(named(ctx, 4, "cache_k_l7")), 7);
    assert_int_equal(probe_cache_layer(named(ctx, 4, "CUDA0#cache_k_l31 (view) (permuted)#0")), 31);
    assert_int_equal(probe_cache_layer(named(ctx, 4, "RPC[127.0.0.1:50052]#cache_k_l0 (view)#3")), 0);
    assert_int_equal(probe_cache_layer(named(ctx, 4, "CUDA0#cache_v_l3 (view)#0")), -1);
    assert_int_equal(probe_cache_layer(named(ctx, 4, "x#cache_k_l3")), -1);
    struct ggml_tensor *cache = named(ctx, 8, "cache_k_l12");
    assert_int_equal(probe_cache_layer(ggml_view_1d(ctx, cache, 4, 0)), 12);

    const struct ggml_tensor *nodes[4] = {named(ctx, 4, "Kcur-0"), named(ctx, 4, "Kcur-1"), named(ctx, 4, "Kcur-0"), named(ctx, 8, "Kcur-0")};
    struct ggml_tensor *copy = named(ctx, 4, "CPU#Kcur-0#0");
    assert_ptr_equal(probe_original(nodes, 4, copy), nodes[2]); /* the last of its name and shape */
    assert_ptr_equal(probe_original(nodes, 2, copy), nodes[0]);
    assert_null(probe_original(nodes, 4, named(ctx, 4, "CPU#Kcur-2#0")));
    assert_ptr_equal(probe_original(nodes, 4, nodes[0]), nodes[0]);
    /* A node with sources is no copy, whatever it is called. */
    struct ggml_tensor *made = ggml_set_name(ggml_neg(ctx, copy), "CPU#Kcur-0#0");
    assert_ptr_equal(probe_original(nodes, 4, made), made);
    ggml_free(ctx);
}

static held hold(const oscar_rotations *rotations, int n_ubatch, int n_threads, bool device) {
    oscar_llama_options options = OSCAR_LLAMA_OPTIONS_INIT;
    options.kv_type = rotations ? OSCAR_KV_INT2 : OSCAR_KV_F32;
    options.rotations = rotations;
    options.sink = 4;
    options.recent = 16;
    struct llama_context_params p = llama_context_default_params();
    p.n_ctx = N_CTX;
    p.n_batch = 256;
    p.n_ubatch = (uint32_t)n_ubatch;
    p.n_seq_max = 2;
    p.kv_unified = true;
    p.n_threads = 1;
    p.n_threads_batch = n_threads;
    held h = hold_with(&options, p);
    h.layer->all_on_device = device;
    return h;
}

/* A prompt in micro-batches, single tokens on a graph that is used again, and a second sequence. With 2 bits
 * prompts have two threads and single tokens one. */
static void test_copies(void **state) {
    (void)state;
    oscar_rotations *rotations = hadamard_of(hold(NULL, 64, 1, false));
    for (int int2 = 0; int2 < 2; int2++) {
        float *logits[2][3];
        for (int device = 0; device < 2; device++) {
            held h = hold(int2 ? rotations : NULL, 64, int2 ? 2 : 1, device);
            assert_int_equal(run(h, tokens, 0, N - 20, N - 20, 0), 0);
            logits[device][0] = copy_logits(h, -1);
            assert_int_equal(run(h, tokens, N - 20, N, 1, 0), 0);
            logits[device][1] = copy_logits(h, -1);
            assert_int_equal(run(h, tokens + N, 0, 50, 30, 1), 0);
            logits[device][2] = copy_logits(h, -1);
            assert_int_equal(h.layer->device != NULL, device);
            drop(h);
        }
        for (int i = 0; i < 3; i++) {
            assert_same(logits[0][i], logits[1][i], 0, int2 ? "2 bits, from copies" : "exact, from copies");
            free(logits[0][i]);
            free(logits[1][i]);
        }
    }
    oscar_rotations_free(rotations);
}

static bool abort_now(void *count) { return --*(int *)count < 0; }

/* A range that fails leaves its node out of the graph; the next call may use the same graph. */
static void test_abort(void **state) {
    (void)state;
    held h = hold(NULL, 32, 1, true);
    assert_int_equal(run(h, tokens, 0, N, N, 0), 0);
    float *reference = copy_logits(h, -1);
    assert_true(oscar_llama_memory_seq_rm(h.layer, 0, 32, -1));
    int count = 1500;
    llama_set_abort_callback(h.ctx, abort_now, &count);
    assert_int_equal(run(h, tokens, 32, N, N, 0), 2);
    llama_set_abort_callback(h.ctx, NULL, NULL);
    int kept = oscar_llama_memory_seq_pos_max(h.layer, 0) + 1;
    printf("aborted with %d tokens held\n", kept);
    assert_true(kept >= 32 && kept < N && kept % 32 == 0);
    assert_int_equal(run(h, tokens, kept, N, N, 0), 0);
    float *resumed = copy_logits(h, -1);
    assert_same(reference, resumed, 1e-3, "aborted and gone on");
    free(reference);
    free(resumed);
    drop(h);
}

typedef struct wanted {
    int asked, seen;
    bool wants;
    double sum;
} wanted;

/* Wants the attention node of layer 3, whatever its operation is now. */
static bool see(struct ggml_tensor *node, bool ask, void *user) {
    wanted *w = user;
    bool attention = node->src[0] && node->src[1] && node->src[2] && node->src[3] && probe_cache_layer(node->src[1]) == 3;
    if (ask) {
        w->asked += attention;
        return w->wants && attention;
    }
    assert_true(attention);
    w->seen++;
    const float *out = node->data;
    for (int64_t i = 0; i < ggml_nelements(node); i++) w->sum += fabs((double)out[i]);
    return true;
}

/* A caller's own callback is shown the result when it wants the node, and only then. */
static void test_chained_callback(void **state) {
    (void)state;
    double sum[2] = {0, 0};
    for (int device = 0; device < 2; device++)
        for (int wants = 0; wants < 2; wants++) {
            wanted w = {.wants = wants};
            oscar_llama_options options = OSCAR_LLAMA_OPTIONS_INIT;
            options.kv_type = OSCAR_KV_F32;
            struct llama_context_params p = llama_context_default_params();
            p.n_ctx = N_CTX;
            p.n_batch = p.n_ubatch = 64;
            p.n_threads = p.n_threads_batch = 1;
            p.cb_eval = see;
            p.cb_eval_user_data = &w;
            held h = hold_with(&options, p);
            h.layer->all_on_device = device;
            assert_int_equal(run(h, tokens, 0, 40, 40, 0), 0);
            assert_int_equal(w.asked, 1);
            assert_int_equal(w.seen, wants);
            if (wants) sum[device] = w.sum;
            drop(h);
        }
    assert_true(sum[0] > 0 && sum[0] == sum[1]);
}

int main(void) {
    const struct CMUnitTest names[] = {cmocka_unit_test(test_names)};
    int failed = cmocka_run_group_tests(names, NULL, NULL);
    if (failed || !open_model()) return failed;
    for (int i = 0; i < 2 * N; i++) tokens[i] = (i * 7919 + 13) % (n_vocab - 100) + 50;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_copies),
        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_chained_callback),
    };
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    llama_model_free(model);
    llama_backend_free();
    return failed;
}
