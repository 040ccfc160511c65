/*
 * test_llama_layer.c - the linked layer under a real model (SmolLM2): the same tokens give the same
 * logits however they are cut and mixed, memory calls mean what llama.cpp's mean, and what does not
 * fit is refused by name. Skipped without the model.
 */
#include "test_llama_util.h"

enum { N = 160, N_CTX = 512 };

static llama_token tokens[2 * N];

static char last_line[400], start_line[400];
static void keep_line(void *user, const char *line) {
    (void)user;
    snprintf(last_line, sizeof last_line, "%s", line);
    if (strstr(line, "KV cache on")) snprintf(start_line, sizeof start_line, "%s", line);
}

static struct llama_context_params params_of(int n_seqs, int n_ubatch) {
    struct llama_context_params p = llama_context_default_params();
    p.n_ctx = N_CTX;
    p.n_batch = 256;
    p.n_ubatch = (uint32_t)n_ubatch;
    p.n_seq_max = (uint32_t)n_seqs;
    p.kv_unified = true;
    p.n_threads = p.n_threads_batch = 2;
    return p;
}

static held hold(int n_seqs, int n_ubatch) {
    oscar_llama_options options = OSCAR_LLAMA_OPTIONS_INIT;
    options.kv_type = OSCAR_KV_F32;
    options.log = keep_line;
    return hold_with(&options, params_of(n_seqs, n_ubatch));
}

/* Backend matrix products may sum in another order for other batch sizes. */
static const double order_tolerance = 1e-3;

static void test_chunks(void **state) {
    (void)state;
    held whole = hold(2, 256), cut = hold(2, 256), small = hold(2, 16);
    assert_int_equal(run(whole, tokens, 0, N, N, 0), 0);
    float *reference = copy_logits(whole, -1);
    assert_int_equal(run(cut, tokens, 0, N, 7, 0), 0);
    float *other = copy_logits(cut, -1);
    assert_same(reference, other, order_tolerance, "chunks of 7");
    free(other);
    assert_int_equal(run(small, tokens, 0, N, N, 1), 0);
    other = copy_logits(small, -1);
    assert_same(reference, other, order_tolerance, "micro-batches of 16, sequence 1");
    free(other);
    free(reference);
    drop(whole);
    drop(cut);
    drop(small);
}

/* The inner context has two sequences, which is more than a batch of one token. */
static void test_batch_of_one(void **state) {
    (void)state;
    oscar_llama_options options = OSCAR_LLAMA_OPTIONS_INIT;
    options.kv_type = OSCAR_KV_F32;
    struct llama_context_params p = params_of(1, 1);
    p.n_batch = 1;
    held whole = hold(2, 256), one = hold_with(&options, p);
    assert_int_equal(run(whole, tokens, 0, 9, 9, 0), 0);
    assert_int_equal(run(one, tokens, 0, 9, 1, 0), 0);
    float *reference = copy_logits(whole, -1), *other = copy_logits(one, -1);
    assert_same(reference, other, order_tolerance, "batches of one token");
    free(reference);
    free(other);
    drop(whole);
    drop(one);
}

static void test_mixed(void **state) {
    (void)state;
    held alone = hold(2, 256), mixed = hold(2, 32);
    assert_int_equal(run(alone, tokens, 0, N, N, 0), 0);
    float *reference = copy_logits(alone, -1);
    /* Tokens of the two sequences in turn, in two batches. */
    struct llama_batch batch = llama_batch_init(256, 0, 1);
    for (int part = 0; part < 2; part++) {
        batch.n_tokens = 0;
        for (int i = part * N / 2; i < (part + 1) * N / 2; i++) {
            if (i < N - 20) add(&batch, tokens + N + i, 1, i, 1);
            add(&batch, tokens + i, 1, i, 0);
        }
        assert_int_equal(oscar_llama_decode(mixed.layer, batch), 0);
    }
    float *other = copy_logits(mixed, -1);
    assert_same(reference, other, order_tolerance, "mixed with another sequence");
    assert_int_equal(oscar_llama_memory_seq_pos_max(mixed.layer, 0), N - 1);
    assert_int_equal(oscar_llama_memory_seq_pos_max(mixed.layer, 1), N - 21);
    free(other);
    free(reference);
    llama_batch_free(batch);
    drop(alone);
    drop(mixed);
}

static void test_shared_tokens(void **state) {
    (void)state;
    held h = hold(3, 64);
    struct llama_batch batch = llama_batch_init(256, 0, 3);
    add(&batch, tokens, N / 2, 0, 2); /* two micro-batches */
    for (int i = 0; i < N / 2; i++) {
        batch.n_seq_id[i] = 2;
        batch.seq_id[i][1] = 0;
    }
    if (oscar_llama_decode(h.layer, batch))
        fail_msg("%s", oscar_llama_last_error(h.layer)->message);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 0), N / 2 - 1);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 1), -1);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 2), N / 2 - 1);
    assert_int_equal(run(h, tokens, N / 2, N, 40, 0), 0);
    float *shared = copy_logits(h, -1);
    assert_int_equal(run(h, tokens, 0, N, N, 1), 0);
    float *fresh = copy_logits(h, -1);
    assert_same(fresh, shared, order_tolerance, "tokens of two sequences");
    free(shared);
    free(fresh);
    llama_batch_free(batch);
    drop(h);
}

static void test_memory(void **state) {
    (void)state;
    held h = hold(3, 256);
    /* Before anything was computed. */
    assert_true(oscar_llama_memory_seq_rm(h.layer, 0, 5, -1));
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 0), -1);
    assert_int_equal(run(h, tokens, 0, N, N, 0), 0);
    float *reference = copy_logits(h, -1);
    assert_int_equal(oscar_llama_memory_seq_pos_min(h.layer, 0), 0);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 0), N - 1);

    assert_false(oscar_llama_memory_seq_rm(h.layer, 0, 10, 20)); /* a hole */
    assert_true(oscar_llama_memory_seq_rm(h.layer, 0, N, -1));   /* nothing there */
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 0), N - 1);

    oscar_llama_memory_seq_cp(h.layer, 0, 2, -1, -1);
    oscar_llama_memory_seq_cp(h.layer, 0, 1, 0, 70);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 1), 69);
    assert_true(oscar_llama_memory_seq_rm(h.layer, 0, 33, -1));
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 0), 32);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 2), N - 1);
    /* Other tokens, then back, then the same tokens: as if fresh. */
    assert_int_equal(run(h, tokens + N, 33, 90, 57, 0), 0);
    assert_true(oscar_llama_memory_seq_rm(h.layer, 0, 33, -1));
    assert_int_equal(run(h, tokens, 33, N, 50, 0), 0);
    float *redone = copy_logits(h, -1);
    assert_same(reference, redone, order_tolerance, "truncated and redone");
    free(redone);
    assert_int_equal(run(h, tokens, 70, N, 90, 1), 0);
    float *forked = copy_logits(h, -1);
    assert_same(reference, forked, order_tolerance, "forked at 70");
    free(forked);

    oscar_llama_memory_seq_cp(h.layer, 0, 2, 10, -1); /* does not begin at 0: refused, said */
    assert_non_null(strstr(last_line, "do not begin at 0"));
    oscar_llama_memory_seq_keep(h.layer, 2);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 0), -1);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 2), N - 1);
    oscar_llama_memory_clear(h.layer);
    assert_int_equal(oscar_llama_memory_seq_pos_min(h.layer, 2), -1);
    free(reference);
    drop(h);
}

static void test_refused_batches(void **state) {
    (void)state;
    held h = hold(2, 64);
    assert_int_equal(run(h, tokens, 0, 20, 20, 0), 0);
    assert_int_equal(run(h, tokens, 25, 30, 5, 0), -1);
    assert_non_null(strstr(oscar_llama_last_error(h.layer)->message, "position 25 of sequence 0, expected 20"));
    assert_int_equal(run(h, tokens, 0, 5, 5, 2), -1);
    assert_non_null(strstr(oscar_llama_last_error(h.layer)->message, "sequence 2, expected 0 to 1"));
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 0), 19);
    /* No room: sequence 0 to the end of its context, and then one more. */
    llama_token *many = calloc(N_CTX + 1, sizeof *many);
    memcpy(many, tokens, sizeof(llama_token) * N);
    assert_int_equal(run(h, many, 20, N_CTX, 200, 0), 0);
    int64_t free_before;
    oscar_cache_stats stats = {.struct_size = sizeof stats};
    oscar_cache_get_stats(oscar_llama_cache(h.layer), &stats);
    free_before = stats.pages_free;
    assert_int_equal(run(h, many, N_CTX, N_CTX + 1, 1, 0), 1);
    struct llama_batch batch = llama_batch_init(8, 0, 1);
    add(&batch, many, 3, 0, 1); /* would fit, but the batch goes as a whole */
    add(&batch, many, 1, N_CTX, 0);
    assert_int_equal(oscar_llama_decode(h.layer, batch), 1);
    llama_batch_free(batch);
    oscar_cache_get_stats(oscar_llama_cache(h.layer), &stats);
    assert_int_equal(stats.pages_free, free_before);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 0), N_CTX - 1);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 1), -1);
    assert_true(oscar_llama_memory_seq_rm(h.layer, 0, N, -1));
    float *again;
    assert_int_equal(run(h, many, N, N + 1, 1, 0), 0);
    again = copy_logits(h, -1);
    free(again);
    free(many);
    drop(h);
}

static bool abort_now(void *count) { return --*(int *)count < 0; }

static void test_abort(void **state) {
    (void)state;
    held h = hold(1, 32);
    assert_int_equal(run(h, tokens, 0, N, N, 0), 0);
    float *reference = copy_logits(h, -1);
    assert_true(oscar_llama_memory_seq_rm(h.layer, 0, 10, -1));
    int count = 1500; /* a few micro-batches of some 1,000 nodes */
    llama_set_abort_callback(h.ctx, abort_now, &count);
    assert_int_equal(run(h, tokens, 10, N, N, 0), 2);
    llama_set_abort_callback(h.ctx, NULL, NULL);
    int kept = oscar_llama_memory_seq_pos_max(h.layer, 0) + 1;
    printf("aborted with %d tokens held\n", kept);
    assert_true(kept >= 10 && kept < N && (kept - 10) % 32 == 0);
    assert_int_equal(run(h, tokens, kept, N, N, 0), 0);
    float *resumed = copy_logits(h, -1);
    assert_same(reference, resumed, order_tolerance, "aborted and gone on");
    free(reference);
    free(resumed);
    drop(h);
}

static void test_layers(void **state) {
    (void)state;
    held h = hold(1, 64);
    assert_null(oscar_llama_cache(h.layer));
    assert_int_equal(run(h, tokens, 0, 3, 3, 0), 0);
    int32_t n;
    const oscar_layer *layers = oscar_llama_layers(h.layer, &n);
    char text[64];
    assert_int_equal(n, llama_model_n_layer(model));
    llama_model_meta_val_str(model, "llama.rope.freq_base", text, sizeof text);
    double base = atof(text);
    for (int32_t i = 0; i < n; i++) {
        assert_int_equal(layers[i].n_q_heads, llama_model_n_head(model));
        assert_int_equal(layers[i].n_kv_heads, llama_model_n_head_kv(model));
        int d = llama_model_n_embd(model) / llama_model_n_head(model);
        assert_int_equal(layers[i].head_dim, d);
        assert_int_equal(layers[i].window, 0);
        assert_int_equal(layers[i].rope.layout, OSCAR_ROPE_ADJACENT);
        assert_int_equal(layers[i].rope.n_dims, d);
        for (int f = 0; f < d / 2; f++)
            assert_true(fabs(layers[i].rope.inv_freq[f] / pow(base, -2.0 * f / d) - 1) < 1e-5);
    }
    assert_non_null(strstr(start_line, "exact f32 KV cache on 30 of 30 layers"));
    assert_int_equal(oscar_llama_n_ctx(h.layer), N_CTX);
    drop(h);
}

/* Kullback-Leibler divergence of softmax(b) from softmax(a), in nats. */
static double divergence(const float *a, const float *b) {
    double max_a = -INFINITY, max_b = -INFINITY, sum_a = 0, sum_b = 0, kl = 0;
    for (int i = 0; i < n_vocab; i++) {
        max_a = fmax(max_a, a[i]);
        max_b = fmax(max_b, b[i]);
    }
    for (int i = 0; i < n_vocab; i++) {
        sum_a += exp(a[i] - max_a);
        sum_b += exp(b[i] - max_b);
    }
    for (int i = 0; i < n_vocab; i++) {
        double log_a = a[i] - max_a - log(sum_a), log_b = b[i] - max_b - log(sum_b);
        kl += exp(log_a) * (log_a - log_b);
    }
    return kl;
}

/* Next to llama.cpp's own cache, which holds f16 and sums in f16. */
static void test_own(void **state) {
    (void)state;
    held h = hold(1, 256);
    assert_int_equal(run(h, tokens, 0, N, N, 0), 0);
    float *ours = copy_logits(h, -1);
    struct llama_context *ctx = llama_init_from_model(model, params_of(1, 256));
    struct llama_batch batch = llama_batch_init(256, 0, 1);
    add(&batch, tokens, N, 0, 0);
    assert_int_equal(llama_decode(ctx, batch), 0);
    double kl = divergence(llama_get_logits_ith(ctx, -1), ours);
    printf("llama.cpp's own cache: KL %.2e\n", kl);
    assert_true(kl >= 0 && kl < 0.02);
    llama_batch_free(batch);
    llama_free(ctx);
    free(ours);
    drop(h);
}

static int n_observed;
static void observe(void *user, int32_t layer, const oscar_step *step) {
    held *h = user;
    assert_int_equal(layer, n_observed % 30);
    assert_int_equal(step->positions[0], n_observed < 30 ? 0 : 64);
    assert_int_equal(step->n_tokens, n_observed < 30 ? 64 : 36);
    assert_true(isfinite(step->out[0]) && isfinite(step->q[0]));
    assert_non_null(oscar_llama_cache(h->layer));
    n_observed++;
}

static void test_observer(void **state) {
    (void)state;
    held h = hold(1, 64);
    n_observed = 0;
    oscar_llama_set_observer(h.layer, observe, &h);
    assert_int_equal(run(h, tokens, 0, 100, 100, 0), 0);
    assert_int_equal(n_observed, 60);
    oscar_llama_set_observer(h.layer, NULL, NULL);
    assert_int_equal(run(h, tokens, 100, 101, 1, 0), 0);
    assert_int_equal(n_observed, 60);
    drop(h);
}

static int n_seen;
static bool see(struct ggml_tensor *node, bool ask, void *user) {
    assert_ptr_equal(user, &n_seen);
    if (ask) return strcmp(node->name, "result_norm") == 0;
    n_seen++;
    return true;
}

static void test_chained_callback(void **state) {
    (void)state;
    oscar_llama_options options = OSCAR_LLAMA_OPTIONS_INIT;
    options.kv_type = OSCAR_KV_F32;
    struct llama_context_params p = params_of(1, 64);
    p.cb_eval = see;
    p.cb_eval_user_data = &n_seen;
    held h = hold_with(&options, p);
    n_seen = 0;
    assert_int_equal(run(h, tokens, 0, 100, 100, 0), 0);
    assert_int_equal(n_seen, 2);
    drop(h);
}

/* The codes of a row are the same in every chunking; only sums differ in order, and an input that
 * differs in its last bit may fall on the other side of a step of the quantiser. */
static void test_quantised(void **state) {
    (void)state;
    oscar_rotations *r = hadamard_of(hold(1, 64));
    oscar_llama_options options = OSCAR_LLAMA_OPTIONS_INIT;
    options.rotations = r;
    options.sink = 16;
    options.recent = 32;
    options.bits_k = options.bits_v = 4;
    options.log = keep_line;
    held a = hold_with(&options, params_of(1, 256)), b = hold_with(&options, params_of(2, 64));
    assert_int_equal(run(a, tokens, 0, N, N, 0), 0);
    assert_non_null(strstr(start_line, "KV cache on 30 of 30 layers"));
    assert_int_equal(run(b, tokens, 0, N, 37, 1), 0);
    float *x = copy_logits(a, -1), *y = copy_logits(b, -1);
    assert_same(x, y, 0.5, "quantised, chunks of 37");
    free(x);
    free(y);
    drop(a);
    drop(b);
    oscar_rotations_free(r);
}

static void expect_mismatch(const oscar_layer *layers, int32_t n, const char *text) {
    oscar_rotations *r;
    assert_int_equal(oscar_rotations_hadamard(&r, layers, n, 2, NULL), OSCAR_OK);
    oscar_llama_options options = OSCAR_LLAMA_OPTIONS_INIT;
    options.rotations = r;
    held h = hold_with(&options, params_of(1, 64));
    assert_int_equal(run(h, tokens, 0, 3, 3, 0), -2);
    const oscar_error *error = oscar_llama_last_error(h.layer);
    assert_int_equal(error->status, OSCAR_ERROR_MISMATCH);
    if (!strstr(error->message, text)) fail_msg("\"%s\" lacks \"%s\"", error->message, text);
    assert_int_equal(run(h, tokens, 0, 3, 3, 0), -2); /* and stays refused */
    drop(h);
    oscar_rotations_free(r);
}

static void test_mismatch(void **state) {
    (void)state;
    oscar_rotations *r = hadamard_of(hold(1, 64));
    int32_t n = oscar_rotations_n_layers(r);
    oscar_layer *layers = calloc((size_t)n, sizeof *layers);
    for (int32_t i = 0; i < n; i++) layers[i] = *oscar_rotations_layer(r, i);
    expect_mismatch(layers, n - 1, "layers: 29 in the rotations, 30 in the model");
    layers[4].rope.inv_freq[3] *= 1.001f;
    expect_mismatch(layers, n, "layer 4: RoPE inv_freq[3]");
    layers[4].rope = layers[5].rope;
    layers[7].rope.layout = OSCAR_ROPE_HALF_SPLIT;
    expect_mismatch(layers, n, "layer 7: RoPE layout 2");
    layers[7] = layers[5];
    layers[9].n_kv_heads = 1;
    expect_mismatch(layers, n, "layer 9: 9 query heads, 1 KV heads of 64");
    free(layers);
    oscar_rotations_free(r);
}

static void test_prepare_refusals(void **state) {
    (void)state;
    oscar_llama *layer = NULL;
    oscar_error error = {0};
    oscar_llama_options options = OSCAR_LLAMA_OPTIONS_INIT;
    struct llama_context_params p = params_of(1, 64), before = p;
    assert_int_equal(oscar_llama_prepare(&layer, model, &p, &options, &error), OSCAR_ERROR_ARGUMENT);
    assert_non_null(strstr(error.message, "no rotations"));
    options.rotations_path = "/nowhere/at/all";
    assert_int_equal(oscar_llama_prepare(&layer, model, &p, &options, &error), OSCAR_ERROR_IO);
    options.kv_type = OSCAR_KV_F32;
    p.attention_type = before.attention_type = LLAMA_ATTENTION_TYPE_NON_CAUSAL;
    assert_int_equal(oscar_llama_prepare(&layer, model, &p, &options, &error), OSCAR_ERROR_UNSUPPORTED);
    assert_memory_equal(&p, &before, sizeof p);
    options.struct_size = 8;
    assert_int_equal(oscar_llama_prepare(&layer, model, &p, &options, &error), OSCAR_ERROR_ARGUMENT);
    assert_null(layer);
    char text[OSCAR_LLAMA_FINGERPRINT_SIZE];
    assert_int_equal(oscar_llama_fingerprint(model, text, sizeof text), OSCAR_OK);
    printf("%s\n", text);
    assert_non_null(strstr(text, "/layers=30/embd=576/vocab=49152"));
    assert_int_equal(oscar_llama_fingerprint(model, text, 8), OSCAR_ERROR_ARGUMENT);
}

static void test_non_causal(void **state) {
    (void)state;
    held h = hold(1, 64);
    llama_set_causal_attn(h.ctx, false);
    assert_int_equal(run(h, tokens, 0, 3, 3, 0), -2);
    assert_int_equal(oscar_llama_last_error(h.layer)->status, OSCAR_ERROR_UNSUPPORTED);
    llama_set_causal_attn(h.ctx, true);
    assert_int_equal(run(h, tokens, 0, 3, 3, 0), 0);
    drop(h);
}

int main(void) {
    if (!open_model()) return 77;
    uint64_t rng = rng_seed("test_llama_layer", 20260101);
    for (int i = 0; i < 2 * N; i++) tokens[i] = (llama_token)(1000 + rng_next(&rng) % 20000);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chunks),           cmocka_unit_test(test_mixed),
        cmocka_unit_test(test_batch_of_one),
        cmocka_unit_test(test_shared_tokens),    cmocka_unit_test(test_memory),
        cmocka_unit_test(test_refused_batches),  cmocka_unit_test(test_abort),
        cmocka_unit_test(test_layers),           cmocka_unit_test(test_own),
        cmocka_unit_test(test_observer),         cmocka_unit_test(test_chained_callback),
        cmocka_unit_test(test_quantised),        cmocka_unit_test(test_mismatch),
        cmocka_unit_test(test_prepare_refusals), cmocka_unit_test(test_non_causal),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    llama_model_free(model);
    llama_backend_free();
    return failed;
}
