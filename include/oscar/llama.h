/*
 * llama.h - the 2-bit cache under llama.cpp, for programs that link libllama.
 *
 * A context keeps its own (inner) KV cache tiny; this layer turns each attention node of its graph
 * into a node of ours, which appends the batch's keys and values to an oscar_cache and computes
 * attention over it (docs/ARCHITECTURE.md). Unmodified programs get the same by preloading
 * liboscar-llama.so, which calls these functions from its versions of llama_decode() and the rest.
 *
 *   struct llama_context_params params = llama_context_default_params();
 *   oscar_llama_options options = OSCAR_LLAMA_OPTIONS_INIT;
 *   options.rotations_path = "model.rot.safetensors";
 *   oscar_llama *layer;
 *   oscar_llama_prepare(&layer, model, &params, &options, &error);   // edits params
 *   struct llama_context *ctx = llama_init_from_model(model, params);
 *   oscar_llama_attach(layer, ctx, &error);
 *   oscar_llama_decode(layer, batch);                                // in place of llama_decode()
 *   llama_free(ctx);
 *   oscar_llama_free(layer);
 *
 * Built against one libllama version; oscar_llama_prepare() refuses another by name.
 * A layer is used by one thread at a time, like the llama_context it belongs to.
 */
#ifndef OSCAR_LLAMA_H
#define OSCAR_LLAMA_H

#include <llama.h>
#include "oscar/oscar.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct oscar_llama oscar_llama;

typedef struct oscar_llama_options {
    uint32_t struct_size;
    int32_t kv_type;               /* oscar_kv_type */
    const char *rotations_path;    /* for OSCAR_KV_INT2, unless `rotations` is given */
    const oscar_rotations *rotations; /* borrowed, must outlive the layer; NULL: read the path */
    int32_t sink, recent, lookahead;
    int32_t bits_k, bits_v;        /* 0: as the rotations say */
    int32_t baseline;              /* oscar_llama_baseline: comparisons only */
    int64_t kv_memory_bytes;       /* most bytes of history, windows and scratch together; a context that
                                      asks for more becomes smaller. 0: from n_ctx and n_seq_max */
    void (*log)(void *user, const char *line); /* what the layer has to say, a line at a time,
                                                  without a newline; NULL: silent */
    void *log_user;
    const char *stats_path;        /* file for statistics in Prometheus' text format, replaced atomically
                                      about once a second while the cache is used; NULL: none */
} oscar_llama_options;

/* Quantisers of other papers that are no oscar_recipe, simulated in float32 by `oscar eval`. */
typedef enum oscar_llama_baseline {
    OSCAR_LLAMA_BASELINE_NONE = 0,
    OSCAR_LLAMA_BASELINE_KIVI = 1 /* keys per channel over 128 tokens, values per token */
} oscar_llama_baseline;

#define OSCAR_LLAMA_OPTIONS_INIT                                                                   \
    {sizeof(oscar_llama_options), OSCAR_KV_INT2, NULL, NULL, 64, 256, 64, 0, 0, 0, 0, NULL,   \
     NULL, NULL}

/* Checks the model, reads the rotations, and edits *params so that the context made from them runs
 * on this layer: n_ctx becomes the inner size, flash attention, a unified f16 inner cache and the
 * evaluation callback are set (a callback of the caller's is chained).
 * Errors: UNSUPPORTED (architecture or libllama version, named), MISMATCH (rotations of another
 * model), IO, FORMAT, MEMORY. On error *params is as it was. */
OSCAR_API oscar_status oscar_llama_prepare(oscar_llama **out, const struct llama_model *model,
                                           struct llama_context_params *params,
                                           const oscar_llama_options *options, oscar_error *error);
/* Binds the layer to the context made from the prepared params. Geometry and RoPE are read from the
 * graph at the first call, which is when MISMATCH and UNSUPPORTED of single layers appear. */
OSCAR_API oscar_status oscar_llama_attach(oscar_llama *layer, struct llama_context *ctx,
                                          oscar_error *error);
/* Reads the model's graph and makes the cache now instead of at the first call, so that what is refused
 * is refused before anything runs, and that oscar_llama_n_ctx() is what the memory holds. The model's
 * weights must be loaded. Errors: as the first oscar_llama_decode(), and MEMORY (more than is
 * available), ARGUMENT (kv_memory_bytes is too small), IO (stats_path). */
OSCAR_API oscar_status oscar_llama_start(oscar_llama *layer, oscar_error *error);
OSCAR_API void oscar_llama_free(oscar_llama *layer); /* NULL is allowed */

/* In place of llama_decode(): 0 on success, 1 when there is no room for the batch (nothing is
 * changed), 2 aborted, -1 when the batch is not valid (each sequence's positions must go on from
 * what it holds; nothing is changed), below on other errors; details in oscar_llama_last_error().
 * After 2 and below -1 the micro-batches that were computed stay, as in llama.cpp. */
OSCAR_API int32_t oscar_llama_decode(oscar_llama *layer, struct llama_batch batch);
OSCAR_API const oscar_error *oscar_llama_last_error(const oscar_llama *layer);

/* In place of llama_n_ctx(), llama_n_ctx_seq(): what the caller asked for, or what kv_memory_bytes holds
 * of it, which is known once the cache is made. */
OSCAR_API uint32_t oscar_llama_n_ctx(const oscar_llama *layer);
OSCAR_API uint32_t oscar_llama_n_ctx_seq(const oscar_llama *layer);

/* In place of llama_memory_*(), with the same meaning of arguments and results. A sequence is always
 * the tokens [0, n): removing from its middle returns false and changes nothing, copies begin at 0
 * and replace what the destination held. */
OSCAR_API void oscar_llama_memory_clear(oscar_llama *layer);
OSCAR_API bool oscar_llama_memory_seq_rm(oscar_llama *layer, llama_seq_id seq, llama_pos p0, llama_pos p1);
OSCAR_API void oscar_llama_memory_seq_cp(oscar_llama *layer, llama_seq_id src, llama_seq_id dst,
                                         llama_pos p0, llama_pos p1);
OSCAR_API void oscar_llama_memory_seq_keep(oscar_llama *layer, llama_seq_id seq);
OSCAR_API llama_pos oscar_llama_memory_seq_pos_min(const oscar_llama *layer, llama_seq_id seq);
OSCAR_API llama_pos oscar_llama_memory_seq_pos_max(const oscar_llama *layer, llama_seq_id seq);

/* In place of llama_state_seq_*(): a sequence as bytes (oscar_seq_save()) and back. The size is
 * never 0 for a sequence that exists, an empty one included; 0 says that the call failed, with the
 * reason in oscar_llama_last_error(). What is refused (cut, changed, of another model, rotations or
 * windows, no room) leaves the cache as it was. set_data returns the bytes read. Restoring into a
 * context that has computed nothing yet probes the model and makes the cache first. */
OSCAR_API size_t oscar_llama_state_seq_get_size(oscar_llama *layer, llama_seq_id seq);
OSCAR_API size_t oscar_llama_state_seq_get_data(oscar_llama *layer, uint8_t *dst, size_t size, llama_seq_id seq);
OSCAR_API size_t oscar_llama_state_seq_set_data(oscar_llama *layer, const uint8_t *src, size_t size,
                                                llama_seq_id seq);
/* The same in a file of llama.cpp's form (magic, version, tokens, state) with a checksum at its end,
 * written under another name, synced and renamed. Both return the bytes of the file, 0 on failure.
 * tokens NULL in load: only *n_tokens is filled and nothing is restored. */
OSCAR_API size_t oscar_llama_state_seq_save_file(oscar_llama *layer, const char *path, llama_seq_id seq,
                                                 const llama_token *tokens, size_t n_tokens);
OSCAR_API size_t oscar_llama_state_seq_load_file(oscar_llama *layer, const char *path, llama_seq_id seq,
                                                 llama_token *tokens, size_t capacity, size_t *n_tokens);
/* In place of llama_state_*(): all sequences. Restoring empties those that were empty when saved. */
OSCAR_API size_t oscar_llama_state_get_size(oscar_llama *layer);
OSCAR_API size_t oscar_llama_state_get_data(oscar_llama *layer, uint8_t *dst, size_t size);
OSCAR_API size_t oscar_llama_state_set_data(oscar_llama *layer, const uint8_t *src, size_t size);
OSCAR_API bool oscar_llama_state_save_file(oscar_llama *layer, const char *path, const llama_token *tokens,
                                           size_t n_tokens);
OSCAR_API bool oscar_llama_state_load_file(oscar_llama *layer, const char *path, llama_token *tokens,
                                           size_t capacity, size_t *n_tokens);

/* The cache under the layer (owned by it); NULL before the first decode. */
OSCAR_API oscar_cache *oscar_llama_cache(oscar_llama *layer);
/* What the layer found in the model's graph; valid after the first decode. *n_layers receives the
 * number of attention layers. */
OSCAR_API const oscar_layer *oscar_llama_layers(const oscar_llama *layer, int32_t *n_layers);

/* A line that says which weights a model has, whatever their quantisation: architecture, name,
 * parameters, layers, width, vocabulary. `oscar calibrate` stores it in the rotations' metadata as
 * "model_fingerprint", and oscar_llama_prepare() compares it. Errors: ARGUMENT (size too small). */
#define OSCAR_LLAMA_FINGERPRINT_SIZE 320
OSCAR_API oscar_status oscar_llama_fingerprint(const struct llama_model *model, char *out, size_t size);

/* Called after each layer's attention with its inputs and output, from one thread, while the graph
 * is computed. For calibration. NULL turns it off. */
typedef void (*oscar_llama_observer)(void *user, int32_t layer, const oscar_step *step);
OSCAR_API void oscar_llama_set_observer(oscar_llama *layer, oscar_llama_observer observer, void *user);

#ifdef __cplusplus
}
#endif

#endif
