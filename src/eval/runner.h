/*
 * runner.h - a model and contexts of it on our cache, fed with chunks of tokens.
 */
#ifndef OSCAR_RUNNER_H
#define OSCAR_RUNNER_H

#include "base/base.h"
#include "oscar/llama.h"

/* Loads a GGUF file, its last n_gpu_layers layers on a GPU. libllama's own messages are kept from the
 * terminal; its first error becomes part of the message. Errors: IO, FORMAT, UNSUPPORTED (no GPU). */
oscar_status runner_load_model(struct llama_model **out, const char *path, int32_t n_gpu_layers, oscar_error *error);

/* One context under the layer. */
typedef struct runner {
    struct llama_context *ctx;
    oscar_llama *layer;
    struct llama_batch batch; /* n_batch tokens */
    int32_t n_batch;
} runner;

/* n_ctx tokens of one sequence, micro-batches of n_batch tokens. */
oscar_status runner_init(runner *r, struct llama_model *model, int32_t n_ctx, int32_t n_batch, int32_t n_threads,
                         const oscar_llama_options *options, oscar_error *error);
void runner_destroy(runner *r); /* a zeroed one is allowed */
/* Runs n <= n_batch tokens at positions from `position` on; with_logits: [n] or NULL for none. */
oscar_status runner_decode(runner *r, int32_t n, const int32_t *tokens, int32_t position, const int8_t *with_logits,
                           oscar_error *error);
void runner_clear(runner *r);

/* Threads to use: `wanted`, or the machine's cores when it is 0. */
int32_t runner_threads(int64_t wanted);

#endif
