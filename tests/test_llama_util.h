/* test_llama_util.h - a context on our cache, and running tokens in it, for the tests of the layer. */
#ifndef OSCAR_TEST_LLAMA_UTIL_H
#define OSCAR_TEST_LLAMA_UTIL_H

#include <unistd.h>

#include "llama/layer.h"
#include "test_util.h"

typedef struct held {
    struct llama_context *ctx;
    oscar_llama *layer;
} held;

static struct llama_model *model;
static int n_vocab;

static held hold_with(const oscar_llama_options *options, struct llama_context_params p) {
    held h;
    oscar_error error = {0};
    if (oscar_llama_prepare(&h.layer, model, &p, options, &error)) fail_msg("prepare: %s", error.message);
    h.ctx = llama_init_from_model(model, p);
    assert_non_null(h.ctx);
    if (oscar_llama_attach(h.layer, h.ctx, &error)) fail_msg("attach: %s", error.message);
    return h;
}

static void drop(held h) {
    llama_free(h.ctx);
    oscar_llama_free(h.layer);
}

/* Appends `n` tokens of `from` at `position` of `seq` to the batch; the last one gives logits. */
static void add(struct llama_batch *batch, const llama_token *from, int n, int position, llama_seq_id seq) {
    for (int i = 0; i < n; i++) {
        int j = batch->n_tokens++;
        batch->token[j] = from[i];
        batch->pos[j] = position + i;
        batch->n_seq_id[j] = 1;
        batch->seq_id[j][0] = seq;
        batch->logits[j] = i == n - 1;
    }
}

/* Runs tokens [begin, end) in sequence seq, `chunk` at a time. */
static int run(held h, const llama_token *from, int begin, int end, int chunk, llama_seq_id seq) {
    struct llama_batch batch = llama_batch_init(256, 0, 1);
    int result = 0;
    for (int i = begin; i < end && result == 0; i += chunk) {
        batch.n_tokens = 0;
        add(&batch, from + i, end - i < chunk ? end - i : chunk, i, seq);
        result = oscar_llama_decode(h.layer, batch);
    }
    llama_batch_free(batch);
    return result;
}

/* Hadamard rotations for a held model, which is dropped. The first call finds its layers. */
static inline oscar_rotations *hadamard_of(held h) {
    const llama_token any = 1;
    assert_int_equal(run(h, &any, 0, 1, 1, 0), 0);
    int32_t n;
    const oscar_layer *layers = oscar_llama_layers(h.layer, &n);
    oscar_rotations *r;
    assert_int_equal(oscar_rotations_hadamard(&r, layers, n, 2, NULL), OSCAR_OK);
    drop(h);
    return r;
}

static float *copy_logits(held h, int i) {
    float *out = malloc((size_t)n_vocab * sizeof *out);
    memcpy(out, llama_get_logits_ith(h.ctx, i), (size_t)n_vocab * sizeof *out);
    return out;
}

/* The largest difference, and that the reference is not flat. */
static void assert_same(const float *a, const float *b, double tolerance, const char *what) {
    double worst = 0, low = INFINITY, high = -INFINITY;
    for (int i = 0; i < n_vocab; i++) {
        worst = fmax(worst, fabs((double)a[i] - (double)b[i]));
        low = fmin(low, a[i]);
        high = fmax(high, a[i]);
    }
    printf("%s: logits %.2f to %.2f, largest difference %.2e\n", what, low, high, worst);
    assert_true(high - low > 5);
    if (!(worst <= tolerance)) fail_msg("%s: logits differ by %g", what, worst);
}

static void quiet(enum ggml_log_level level, const char *text, void *user) {
    (void)user;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

/* Loads SmolLM2; false when it is not there, and says so. */
static bool open_model(void) {
    const char *cache = getenv("OSCAR_CACHE"), *home = getenv("HOME");
    char path[1024];
    if (cache) snprintf(path, sizeof path, "%s/models/smollm2-135m.gguf", cache);
    else snprintf(path, sizeof path, "%s/.cache/oscar/models/smollm2-135m.gguf", home ? home : "");
    if (access(path, R_OK) != 0) {
        printf("skipped: no model at %s\n", path);
        return false;
    }
    llama_log_set(quiet, NULL);
    llama_backend_init();
    model = llama_model_load_from_file(path, llama_model_default_params());
    if (!model) exit(1);
    n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    return true;
}

#endif
