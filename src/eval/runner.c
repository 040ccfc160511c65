/* Model, context, decode: the part of llama.cpp that calibration and evaluation need. */
#include "eval/runner.h"

#include <errno.h>
#include <stdio.h>
#include <unistd.h>

static char first_error[200];

/* llama_log_set's callback is global to the process. Errors arrive in pieces, one line each; the first
 * says what is wrong, the rest who gave up for it. */
static void keep_errors(enum ggml_log_level level, const char *text, void *user) {
    (void)user;
    if (level != GGML_LOG_LEVEL_ERROR || text[0] == '\0' || text[0] == '\n' || first_error[0] != '\0') return;
    snprintf(first_error, sizeof first_error, "%s", text);
    first_error[strcspn(first_error, "\n")] = '\0';
}

int32_t runner_threads(int64_t wanted) {
    if (wanted > 0) return wanted < 512 ? (int32_t)wanted : 512;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    return cores > 0 ? (int32_t)cores : 1;
}

/* libllama ignores layers for a GPU that it was not built for. */
static oscar_status check_gpu(int32_t n_gpu_layers, oscar_error *error) {
    if (n_gpu_layers == 0 || llama_supports_gpu_offload()) return OSCAR_OK;
    return error_set(error, OSCAR_ERROR_UNSUPPORTED, -1,
                     "%d layers for a GPU: this llama.cpp has none, it was built without a GPU backend or finds no device", n_gpu_layers);
}

oscar_status runner_load_model(struct llama_model **out, const char *path, int32_t n_gpu_layers, oscar_error *error) {
    *out = NULL;
    llama_log_set(keep_errors, NULL);
    first_error[0] = '\0';
    if (access(path, R_OK) != 0) return error_set(error, OSCAR_ERROR_IO, -1, "cannot read %s: %s", path, strerror(errno));
    llama_backend_init();
    oscar_status status = check_gpu(n_gpu_layers, error);
    if (status != OSCAR_OK) return status;
    struct llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = n_gpu_layers;
    *out = llama_model_load_from_file(path, params);
    if (!*out) return error_set(error, OSCAR_ERROR_FORMAT, -1, "%s: libllama cannot load it: %s", path, first_error);
    return OSCAR_OK;
}

oscar_status runner_init(runner *r, struct llama_model *model, int32_t n_ctx, int32_t n_batch, int32_t n_threads,
                         const oscar_llama_options *options, oscar_error *error) {
    memset(r, 0, sizeof *r);
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = (uint32_t)n_ctx;
    params.n_batch = params.n_ubatch = (uint32_t)n_batch;
    params.n_seq_max = 1;
    params.n_threads = params.n_threads_batch = n_threads;
    params.op_offload = false; /* what is on the CPU is computed there */
    oscar_status status = oscar_llama_prepare(&r->layer, model, &params, options, error);
    if (status != OSCAR_OK) return status;
    first_error[0] = '\0';
    r->ctx = llama_init_from_model(model, params);
    if (!r->ctx) {
        runner_destroy(r);
        return error_set(error, OSCAR_ERROR_MEMORY, -1, "libllama made no context of %d tokens: %s", n_ctx, first_error);
    }
    status = oscar_llama_attach(r->layer, r->ctx, error);
    if (status != OSCAR_OK) {
        runner_destroy(r);
        return status;
    }
    r->batch = llama_batch_init(n_batch, 0, 1);
    r->n_batch = n_batch;
    return OSCAR_OK;
}

void runner_destroy(runner *r) {
    if (r->n_batch > 0) llama_batch_free(r->batch);
    if (r->ctx) llama_free(r->ctx);
    oscar_llama_free(r->layer);
    memset(r, 0, sizeof *r);
}

oscar_status runner_decode(runner *r, int32_t n, const int32_t *tokens, int32_t position, const int8_t *with_logits,
                           oscar_error *error) {
    r->batch.n_tokens = n;
    for (int32_t i = 0; i < n; i++) {
        r->batch.token[i] = tokens[i];
        r->batch.pos[i] = position + i;
        r->batch.n_seq_id[i] = 1;
        r->batch.seq_id[i][0] = 0;
        r->batch.logits[i] = with_logits ? with_logits[i] : 0;
    }
    int32_t result = oscar_llama_decode(r->layer, r->batch);
    if (result == 0) return OSCAR_OK;
    const oscar_error *why = oscar_llama_last_error(r->layer);
    if (why && why->status != OSCAR_OK) return error_set(error, why->status, why->position, "%s", why->message);
    return error_set(error, OSCAR_ERROR_INTERNAL, position, "decoding %d tokens at position %d failed with code %d", n, position, result);
}

void runner_clear(runner *r) { oscar_llama_memory_clear(r->layer); }
