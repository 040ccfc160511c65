/* layer.c - the layer's life: prepare, attach, free; the table of contexts. */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "llama/layer.h"

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static oscar_llama *table;

void layer_log(const oscar_llama *layer, const char *format, ...) {
    char line[640];
    if (!layer->options.log) return;
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    layer->options.log(layer->options.log_user, line);
}

oscar_llama *layer_of_context(const struct llama_context *ctx) {
    pthread_mutex_lock(&table_lock);
    oscar_llama *l = table;
    while (l && l->ctx != ctx) l = l->next;
    pthread_mutex_unlock(&table_lock);
    return l;
}

oscar_llama *layer_of_memory(llama_memory_t memory) {
    if (!memory) return NULL;
    pthread_mutex_lock(&table_lock);
    oscar_llama *l = table;
    while (l && l->memory != memory) l = l->next;
    pthread_mutex_unlock(&table_lock);
    return l;
}

oscar_llama *layer_of_model(const struct llama_model *model) {
    pthread_mutex_lock(&table_lock);
    oscar_llama *l = table;
    while (l && l->model != model) l = l->next;
    pthread_mutex_unlock(&table_lock);
    return l;
}

/* The rotations that the options name, and whether they are this model's. */
static oscar_status open_rotations(oscar_llama *layer, oscar_error *error) {
    const oscar_llama_options *o = &layer->options;
    if (o->kv_type == OSCAR_KV_F32) return OSCAR_OK;
    if (o->kv_type != OSCAR_KV_INT2)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "kv_type is %d: expected 0 (int2) or 1 (f32)", o->kv_type);
    if (o->rotations) {
        layer->rotations = o->rotations;
    } else if (o->rotations_path) {
        oscar_status status = oscar_rotations_load(&layer->owned_rotations, o->rotations_path, error);
        if (status) return status;
        layer->rotations = layer->owned_rotations;
        layer->rotations_name = strdup(o->rotations_path);
    } else {
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1,
                         "no rotations: the 2-bit cache needs the file that `oscar calibrate` writes");
    }
    return model_check_fingerprint(layer->model, layer->rotations, error);
}

/* The sizes that llama.cpp would have given the caller. */
static void set_sizes(oscar_llama *layer, const struct llama_context_params *params) {
    uint32_t n_ctx = params->n_ctx ? params->n_ctx : (uint32_t)llama_model_n_ctx_train(layer->model);
    layer->n_seq_max = params->n_seq_max ? params->n_seq_max : 1;
    layer->n_ctx = GGML_PAD(n_ctx, 256u);
    layer->n_ctx_seq = layer->n_ctx;
    layer->unified = params->kv_unified;
    if (layer->unified) return;
    layer->n_ctx_seq = GGML_PAD(layer->n_ctx / layer->n_seq_max, 256u);
    layer->n_ctx = layer->n_ctx_seq * layer->n_seq_max;
}

static void edit_params(oscar_llama *layer, struct llama_context_params *params) {
    uint32_t n_ctx = params->n_ctx ? params->n_ctx : (uint32_t)llama_model_n_ctx_train(layer->model);
    if (params->type_k != GGML_TYPE_F16 || params->type_v != GGML_TYPE_F16)
        layer_log(layer, "the cache types %s and %s are not used: this cache has its own",
                  ggml_type_name(params->type_k), ggml_type_name(params->type_v));
    if (params->flash_attn_type == LLAMA_FLASH_ATTN_TYPE_DISABLED)
        layer_log(layer, "flash attention is switched on: its nodes are the ones answered here");
    if (params->n_batch > n_ctx) params->n_batch = n_ctx;
    /* The inner cache holds one call's tokens, and the probe's. */
    params->n_ctx = GGML_PAD(params->n_batch, 256u);
    if (params->n_seq_max < 2) params->n_seq_max = 2; /* the window probe uses two sequences */
    /* libllama reserves an output a sequence, and aborts when that is more than the limit (0: the batch). */
    uint32_t n_outputs = params->n_outputs_max ? params->n_outputs_max : params->n_batch;
    if (n_outputs < params->n_seq_max) {
        if (!params->n_outputs_max_per_seq) params->n_outputs_max_per_seq = n_outputs;
        params->n_outputs_max = params->n_seq_max;
    }
    params->kv_unified = true;
    params->swa_full = true;
    params->flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params->type_k = params->type_v = GGML_TYPE_F16;
    params->cb_eval = hook_callback;
    params->cb_eval_user_data = layer;
}

oscar_status oscar_llama_prepare(oscar_llama **out, const struct llama_model *model,
                                 struct llama_context_params *params,
                                 const oscar_llama_options *options, oscar_error *error) {
    if (!out || !model || !params || !options || options->struct_size != sizeof *options)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1,
                         "options.struct_size is %u: expected %zu, and no NULL argument",
                         options ? options->struct_size : 0, sizeof *options);
    oscar_status status = model_check(model, error);
    if (!status) status = model_check_params(params, error);
    if (status) return status;
    oscar_llama *layer = calloc(1, sizeof *layer);
    if (!layer) return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for the layer");
    layer->model = model;
    layer->options = *options;
    status = open_rotations(layer, error);
    if (!status && options->stats_path && !(layer->stats_path = strdup(options->stats_path)))
        status = error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for the layer");
    layer->options.rotations_path = layer->options.stats_path = NULL; /* the caller's strings */
    if (status) {
        oscar_llama_free(layer);
        return status;
    }
    layer->user_callback = params->cb_eval;
    layer->user_callback_data = params->cb_eval_user_data;
    spin_barrier_init(&layer->barrier);
    set_sizes(layer, params);
    edit_params(layer, params);
    *out = layer;
    return OSCAR_OK;
}

oscar_status oscar_llama_attach(oscar_llama *layer, struct llama_context *ctx, oscar_error *error) {
    if (!ctx || layer->ctx)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "the context is NULL, or the layer has one");
    if (!llama_get_causal_attn(ctx))
        return error_set(error, OSCAR_ERROR_UNSUPPORTED, -1, "the context's attention is not causal");
    llama_memory_t memory = llama_get_memory(ctx);
    if (!memory) return error_set(error, OSCAR_ERROR_UNSUPPORTED, -1, "the context has no KV cache");
    layer->memory = memory;
    layer->ctx = ctx;
    pthread_mutex_lock(&table_lock);
    layer->next = table;
    table = layer;
    pthread_mutex_unlock(&table_lock);
    return OSCAR_OK;
}

void oscar_llama_free(oscar_llama *layer) {
    if (!layer) return;
    pthread_mutex_lock(&table_lock);
    for (oscar_llama **p = &table; *p; p = &(*p)->next)
        if (*p == layer) {
            *p = layer->next;
            break;
        }
    pthread_mutex_unlock(&table_lock);
    stats_end(layer);
    call_free(&layer->call);
    device_free(layer->device);
    oscar_cache_free(layer->cache);
    oscar_rotations_free(layer->owned_rotations);
    free(layer->shapes);
    free(layer->hooks);
    free(layer->rotations_name);
    free(layer->stats_path);
    free(layer);
}

oscar_status oscar_llama_start(oscar_llama *layer, oscar_error *error) {
    if (!layer->ctx) return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "the layer has no context");
    if (call_find_layers(layer)) return OSCAR_OK;
    if (error) *error = layer->error;
    return layer->error.status;
}

const oscar_error *oscar_llama_last_error(const oscar_llama *layer) { return &layer->error; }
uint32_t oscar_llama_n_ctx(const oscar_llama *layer) { return layer->n_ctx; }
uint32_t oscar_llama_n_ctx_seq(const oscar_llama *layer) { return layer->n_ctx_seq; }
oscar_cache *oscar_llama_cache(oscar_llama *layer) { return layer->cache; }

const oscar_layer *oscar_llama_layers(const oscar_llama *layer, int32_t *n_layers) {
    if (n_layers) *n_layers = layer->n_layers;
    return layer->shapes;
}

void oscar_llama_set_observer(oscar_llama *layer, oscar_llama_observer observer, void *user) {
    layer->observer = observer;
    layer->observer_data = user;
}
