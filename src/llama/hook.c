/*
 * hook.c - attention nodes of llama.cpp's graph, answered from the cache.
 *
 * The evaluation callback sees every node before its range is computed. A FLASH_ATTN_EXT node is
 * turned into a CUSTOM node there, so that ggml's own threads call us: the graph is not split, and
 * no second thread pool competes with the first. A graph that is used again keeps its CUSTOM nodes.
 * Nodes are asked for a whole range before the first is computed, when their inputs hold nothing
 * yet and several layers wait; so all work happens in the node's turn.
 *
 * The scheduler has chosen the node's backend before. Where that is the CPU it also copies what the
 * node reads from devices, and nothing differs. A node that is on a device ends its range there, and
 * device.c computes it from copies.
 */
#include <stdlib.h>

#include "llama/layer.h"

static void run_node(struct ggml_tensor *node, int ith, int n_threads, void *user_data);

/* A custom node's op_params are private to ggml: taken from one that it makes. */
oscar_status hook_init(hook_layer *hook, oscar_error *error) {
    struct ggml_init_params params = {4 * ggml_tensor_overhead(), NULL, true};
    struct ggml_context *ctx = ggml_init(params);
    if (!ctx) return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for a custom node");
    struct ggml_tensor *arg = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 1);
    struct ggml_tensor *node =
        ggml_custom_4d(ctx, GGML_TYPE_F32, 1, 1, 1, 1, &arg, 1, run_node, GGML_N_TASKS_MAX, hook);
    memcpy(hook->op_params, node->op_params, sizeof hook->op_params);
    ggml_free(ctx);
    return OSCAR_OK;
}

void hook_fail(oscar_llama *layer, const oscar_error *error) {
    if (!layer->failed) layer->error = *error;
    layer->failed = true;
}

/* What must hold for a node's pointers to mean what fill_step() takes them for. */
oscar_status hook_check_node(const hook_layer *hook, const struct ggml_tensor *node, oscar_error *error) {
    const struct ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2], *sinks = node->src[4];
    const oscar_layer *shape = &hook->owner->shapes[hook->index];
    const call_state *call = &hook->owner->call;
    if (q->ne[0] != shape->head_dim || k->ne[0] != shape->head_dim || v->ne[0] != shape->head_dim ||
        q->ne[2] != shape->n_q_heads || k->ne[2] != shape->n_kv_heads || q->ne[3] != 1 || k->ne[3] != 1)
        return error_set(error, OSCAR_ERROR_INTERNAL, hook->model_layer,
                         "layer %d: the attention node's shape is not the one found at the first call",
                         hook->model_layer);
    if (q->type != GGML_TYPE_F32 || q->nb[0] != 4 || node->type != GGML_TYPE_F32 || k->type != v->type ||
        k->nb[0] != ggml_type_size(k->type) || v->nb[0] != ggml_type_size(v->type) ||
        (sinks && sinks->type != GGML_TYPE_F32))
        return error_set(error, OSCAR_ERROR_UNSUPPORTED, hook->model_layer,
                         "layer %d: queries of type %s, keys of %s, values of %s; expected f32, f16, f16",
                         hook->model_layer, ggml_type_name(q->type), ggml_type_name(k->type),
                         ggml_type_name(v->type));
    int64_t n = q->ne[1];
    if (call->base + n > call->n_tokens || call->base + n > k->ne[1] || (call->chunk && call->chunk != n))
        return error_set(error, OSCAR_ERROR_INTERNAL, hook->model_layer,
                         "layer %d: a micro-batch of %d tokens at %d of %d", hook->model_layer, (int)n,
                         call->base, call->n_tokens);
    return OSCAR_OK;
}

static bool kv_dtype(enum ggml_type type, int32_t *out) {
    switch (type) {
    case GGML_TYPE_F32: *out = OSCAR_DTYPE_F32; return true;
    case GGML_TYPE_F16: *out = OSCAR_DTYPE_F16; return true;
    case GGML_TYPE_BF16: *out = OSCAR_DTYPE_BF16; return true;
    default: return false;
    }
}

/* Row i of the inner cache holds token i of the call: it was empty when the call began, and a
 * unified cache is filled in the batch's order. */
static oscar_status fill_step(hook_layer *hook, struct ggml_tensor *node, oscar_error *error) {
    oscar_status status = hook_check_node(hook, node, error);
    if (status) return status;
    const struct ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2];
    const call_state *call = &hook->owner->call;
    oscar_step *s = &hook->step;
    *s = (oscar_step)OSCAR_STEP_INIT;
    if (!kv_dtype(k->type, &s->kv_dtype))
        return error_set(error, OSCAR_ERROR_UNSUPPORTED, hook->model_layer,
                         "layer %d: keys of type %s; expected f16", hook->model_layer, ggml_type_name(k->type));
    int64_t size = (int64_t)ggml_type_size(k->type);
    s->n_tokens = (int32_t)q->ne[1];
    s->positions = call->positions + call->base;
    s->seqs = call->seqs + call->offsets[call->base];
    s->tokens = call->tokens + call->base;
    for (int32_t i = 0; i < s->n_tokens && s->tokens; i++)
        if (s->tokens[i] < 0) s->tokens = NULL; /* embeddings: pages cannot be told by ids */
    if (!call->single) {
        const int32_t *offsets = call->offsets + call->base;
        for (int32_t i = 0; i <= s->n_tokens; i++) call->chunk_offsets[i] = offsets[i] - offsets[0];
        s->seq_offsets = call->chunk_offsets;
    }
    s->q = q->data;
    s->q_token_stride = (int64_t)q->nb[1] / 4;
    s->q_head_stride = (int64_t)q->nb[2] / 4;
    s->k = (const char *)k->data + (size_t)call->base * k->nb[1];
    s->k_token_stride = (int64_t)k->nb[1] / size;
    s->k_head_stride = (int64_t)k->nb[2] / size;
    s->v = (const char *)v->data + (size_t)call->base * v->nb[1];
    s->v_token_stride = (int64_t)v->nb[1] / size;
    s->v_head_stride = (int64_t)v->nb[2] / size;
    s->out = node->data; /* [n_tokens, n_q_heads, head_dim] */
    s->out_token_stride = (int64_t)node->nb[2] / 4;
    s->out_head_stride = (int64_t)node->nb[1] / 4;
    s->logit_scale = hook->scale;
    s->logit_softcap = hook->softcap;
    s->sink_logits = node->src[4] ? node->src[4]->data : NULL;
    return OSCAR_OK;
}

static bool begin_node(hook_layer *hook, struct ggml_tensor *node) {
    oscar_llama *layer = hook->owner;
    oscar_error error = {0};
    if (layer->failed) return false;
    if (!layer->call.active) {
        error_set(&error, OSCAR_ERROR_ARGUMENT, -1, "llama_decode() was called in place of oscar_llama_decode()");
        hook_fail(layer, &error);
        return false;
    }
    oscar_status status = fill_step(hook, node, &error);
    if (!status) status = oscar_step_prepare(layer->cache, hook->index, &hook->step, &error);
    if (status) hook_fail(layer, &error);
    return status == OSCAR_OK;
}

static void end_node(hook_layer *hook) {
    oscar_llama *layer = hook->owner;
    oscar_error error = {0};
    oscar_status status = oscar_step_finish(layer->cache, &error);
    if (!status && layer->observer) layer->observer(layer->observer_data, hook->index, &hook->step);
    if (!status) status = call_layer_done(layer, hook->index, &error);
    if (status) hook_fail(layer, &error);
}

/* Called by each of ggml's threads; ggml waits for all of them after the node. */
static void run_node(struct ggml_tensor *node, int ith, int n_threads, void *user_data) {
    hook_layer *hook = user_data;
    oscar_llama *layer = hook->owner;
    if (ith == 0) {
        hook->go = begin_node(hook, node);
        atomic_store(&hook->left, 0);
        /* The graph goes on after a failure; it must not compute with what the buffer held before. */
        if (!hook->go) memset(node->data, 0, ggml_nbytes(node));
    }
    spin_barrier_wait(&layer->barrier, n_threads);
    if (!hook->go) return;
    oscar_step_run(layer->cache, ith, n_threads);
    /* The last one to come here ends the node: nobody waits, ggml has a barrier after it. */
    if (atomic_fetch_add(&hook->left, 1) + 1 == n_threads) end_node(hook);
}

/* True: the node is to be shown again when its range has been computed. */
static bool turn_node(oscar_llama *layer, struct ggml_tensor *node) {
    int32_t n = probe_cache_layer(node->src[1]);
    oscar_error error = {0};
    if (n < 0 || layer->hook_of[n] < 0) {
        error_set(&error, OSCAR_ERROR_UNSUPPORTED, n,
                  "attention node \"%s\" was not there at the first call", node->name);
        hook_fail(layer, &error);
        return false;
    }
    hook_layer *hook = &layer->hooks[layer->hook_of[n]];
    float scale_bias_cap[3];
    memcpy(scale_bias_cap, node->op_params, sizeof scale_bias_cap);
    hook->scale = scale_bias_cap[0];
    hook->softcap = scale_bias_cap[2];
    if (layer->all_on_device || !device_is_host(node)) return device_begin(hook, node);
    memcpy(node->op_params, hook->op_params, sizeof hook->op_params);
    node->op = GGML_OP_CUSTOM;
    return false;
}

bool hook_callback(struct ggml_tensor *node, bool ask, void *user_data) {
    oscar_llama *layer = user_data;
    bool chained = layer->user_callback && !layer->probe, ours = false;
    if (!ask) {
        ours = device_end(layer, node);
        bool theirs = chained && (!ours || layer->user_waits);
        return theirs ? layer->user_callback(node, false, layer->user_callback_data) : true;
    }
    if (layer->probe)
        probe_see(layer, node);
    else if (layer->call.active && node->op == GGML_OP_FLASH_ATTN_EXT)
        ours = turn_node(layer, node);
    bool theirs = chained && layer->user_callback(node, true, layer->user_callback_data);
    if (ours) layer->user_waits = theirs;
    return ours || theirs;
}
