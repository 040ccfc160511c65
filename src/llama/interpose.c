/*
 * interpose.c - liboscar-llama.so: contexts of unmodified programs on the 2-bit cache.
 *
 * Options come from the environment, which `oscar wrap` sets:
 *   OSCAR_KV            int2 (default) or f32
 *   OSCAR_ROTATIONS     the model's rotation file
 *   OSCAR_SINK, OSCAR_RECENT, OSCAR_LOOKAHEAD   tokens
 *   OSCAR_BITS_K, OSCAR_BITS_V                  2, 3, 4; 0: as the rotations say
 *   OSCAR_KV_MEMORY     bytes, or with K, M, G: most memory for history, windows and scratch
 *   OSCAR_STATS         file for statistics in Prometheus' text format
 *   OSCAR_PASS_THROUGH  1: models that are not supported run untouched instead of being refused
 */
#include <stdio.h>
#include <stdlib.h>

#include "llama/interpose_table.h"

#define EXPORT __attribute__((visibility("default")))

/* A context is held: later ones that cannot be (draft models) run untouched. */
static atomic_bool holds_one;

void interpose_log(void *user, const char *line) {
    (void)user;
    fprintf(stderr, "oscar: %s\n", line);
}

static bool env_number(const char *name, int64_t low, int64_t high, bool suffix, int64_t *out,
                       oscar_error *error) {
    const char *text = getenv(name);
    if (!text || !*text) return true;
    char *end;
    long long value = strtoll(text, &end, 10), unit = 1;
    if (suffix && end != text) {
        if (*end == 'K' || *end == 'k') unit = 1ll << 10, end++;
        else if (*end == 'M' || *end == 'm') unit = 1ll << 20, end++;
        else if (*end == 'G' || *end == 'g') unit = 1ll << 30, end++;
    }
    int64_t product;
    if (end == text || *end || __builtin_mul_overflow(value, unit, &product) || product < low || product > high) {
        error_set(error, OSCAR_ERROR_ARGUMENT, -1, "%s is \"%.60s\": expected %lld to %lld", name, text,
                  (long long)low, (long long)high);
        return false;
    }
    *out = product;
    return true;
}

static bool env_int32(const char *name, int32_t low, int32_t high, int32_t *out, oscar_error *error) {
    int64_t value = *out;
    if (!env_number(name, low, high, false, &value, error)) return false;
    *out = (int32_t)value;
    return true;
}

static bool options_from_environment(oscar_llama_options *o, bool *pass_through, oscar_error *error) {
    *o = (oscar_llama_options)OSCAR_LLAMA_OPTIONS_INIT;
    const char *kv = getenv("OSCAR_KV");
    int32_t pass = 0;
    if (!kv || !*kv || strcmp(kv, "int2") == 0) {
        o->kv_type = OSCAR_KV_INT2;
    } else if (strcmp(kv, "f32") == 0) {
        o->kv_type = OSCAR_KV_F32;
    } else {
        error_set(error, OSCAR_ERROR_ARGUMENT, -1, "OSCAR_KV is \"%.60s\": expected int2 or f32", kv);
        return false;
    }
    o->rotations_path = getenv("OSCAR_ROTATIONS");
    const char *stats = getenv("OSCAR_STATS");
    if (stats && *stats) o->stats_path = stats;
    o->log = interpose_log;
    bool ok = env_int32("OSCAR_PASS_THROUGH", 0, 1, &pass, error) &&
              env_int32("OSCAR_SINK", 0, 1 << 20, &o->sink, error) &&
              env_int32("OSCAR_RECENT", 0, 1 << 20, &o->recent, error) &&
              env_int32("OSCAR_LOOKAHEAD", 0, 1 << 20, &o->lookahead, error) &&
              env_int32("OSCAR_BITS_K", 0, 4, &o->bits_k, error) &&
              env_int32("OSCAR_BITS_V", 0, 4, &o->bits_v, error) &&
              env_number("OSCAR_KV_MEMORY", 0, INT64_MAX, true, &o->kv_memory_bytes, error);
    *pass_through = pass != 0;
    return ok;
}

static void fill_inner(void) {
    inner.decode = REAL(llama_decode);
    inner.memory_clear = REAL(llama_memory_clear);
    inner.memory_seq_rm = REAL(llama_memory_seq_rm);
    inner.memory_seq_cp = REAL(llama_memory_seq_cp);
    inner.model_n_swa = REAL(llama_model_n_swa);
}

/* Whether a context that this layer cannot hold runs on llama.cpp's own cache. */
static bool may_pass(oscar_status status, bool pass_through) {
    if (pass_through && status == OSCAR_ERROR_UNSUPPORTED) return true;
    return atomic_load(&holds_one) && (status == OSCAR_ERROR_UNSUPPORTED || status == OSCAR_ERROR_MISMATCH);
}

static struct llama_context *give_up(struct llama_model *model, const struct llama_context_params *params,
                                     bool pass_through, const oscar_error *error) {
    char line[320];
    bool pass = may_pass(error->status, pass_through);
    snprintf(line, sizeof line, "%s%s", pass ? "context left to llama.cpp's own cache: " : "", error->message);
    interpose_log(NULL, line);
    return pass ? REAL(llama_init_from_model)(model, *params) : NULL;
}

EXPORT struct llama_context *llama_init_from_model(struct llama_model *model, struct llama_context_params params) {
    atomic_store(&interposed_used, true);
    fill_inner();
    bool drafts = params.ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT || params.ctx_other;
    if (model && drafts) interpose_log(NULL, "a context that drafts for another is left to llama.cpp's own cache");
    /* Embedding contexts keep next to nothing. */
    if (!model || drafts || params.embeddings) return REAL(llama_init_from_model)(model, params);
    oscar_error error = {0};
    oscar_llama_options options;
    bool pass_through = false;
    oscar_llama *layer = NULL;
    struct llama_context_params edited = params;
    oscar_status status = OSCAR_ERROR_ARGUMENT;
    if (options_from_environment(&options, &pass_through, &error))
        status = oscar_llama_prepare(&layer, model, &edited, &options, &error);
    if (status) return give_up(model, &params, pass_through, &error);
    struct llama_context *ctx = REAL(llama_init_from_model)(model, edited);
    if (!ctx) {
        oscar_llama_free(layer);
        return NULL;
    }
    status = oscar_llama_attach(layer, ctx, &error);
    if (!status && interpose_has_weights(model)) status = oscar_llama_start(layer, &error);
    if (status) {
        REAL(llama_free)(ctx);
        oscar_llama_free(layer);
        return give_up(model, &params, pass_through, &error);
    }
    atomic_store(&holds_one, true);
    return ctx;
}

EXPORT struct llama_context *llama_new_context_with_model(struct llama_model *model,
                                                          struct llama_context_params params) {
    return llama_init_from_model(model, params);
}

EXPORT void llama_free(struct llama_context *ctx) {
    oscar_llama *layer = ctx ? layer_of_context(ctx) : NULL;
    REAL(llama_free)(ctx);
    oscar_llama_free(layer);
}

EXPORT uint32_t llama_n_ctx(const struct llama_context *ctx) {
    const oscar_llama *layer = layer_of_context(ctx);
    return layer ? layer->n_ctx : REAL(llama_n_ctx)(ctx);
}

EXPORT uint32_t llama_n_ctx_seq(const struct llama_context *ctx) {
    const oscar_llama *layer = layer_of_context(ctx);
    return layer ? layer->n_ctx_seq : REAL(llama_n_ctx_seq)(ctx);
}

EXPORT uint32_t llama_n_seq_max(const struct llama_context *ctx) {
    const oscar_llama *layer = layer_of_context(ctx);
    /* libllama's own batches ask too, and the probe's use two sequences. */
    return layer && !layer->probe ? layer->n_seq_max : REAL(llama_n_seq_max)(ctx);
}

EXPORT int32_t llama_model_n_swa(const struct llama_model *model) {
    return layer_of_model(model) ? 0 : REAL(llama_model_n_swa)(model);
}

EXPORT int32_t llama_decode(struct llama_context *ctx, struct llama_batch batch) {
    oscar_llama *layer = layer_of_context(ctx);
    return layer ? oscar_llama_decode(layer, batch) : REAL(llama_decode)(ctx, batch);
}
