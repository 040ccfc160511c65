/*
 * probe.c - which attention layers a model has, read from the graph of a few tokens.
 *
 * The nodes say more than metadata: an attention node carries the numbers of heads and the head
 * size, a ROPE node its parameters, and the masks which layers slide. It runs at the first real
 * call and not when the context is made: programs that measure memory first make contexts of models
 * without weights, on which nothing can be computed.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "llama/layer.h"

typedef struct probe_layer {
    bool written; /* a node stores keys in the inner cache */
    int32_t n_reads; /* attention nodes in this graph */
    bool window_seen, far_visible, near_visible;
    bool on_device; /* what attention reads is not in the host's memory, or was copied to it */
    oscar_layer shape;
} probe_layer;

struct probe {
    bool windows; /* the query of the window test is being computed */
    oscar_error error;
    const struct ggml_tensor **seen; /* [n_seen] nodes of the graph so far */
    int32_t n_seen, seen_capacity;
    probe_layer layers[OSCAR_MAX_LAYERS];
};

/* What a node reads from another backend is a copy that ggml's scheduler made: a tensor without sources,
 * named "BACKEND#NAME#N". False, with an empty name, for any other tensor. */
static bool copied_name(const struct ggml_tensor *tensor, char name[GGML_MAX_NAME]) {
    const char *first = strchr(tensor->name, '#'), *last = strrchr(tensor->name, '#');
    name[0] = '\0';
    if (tensor->op != GGML_OP_NONE || tensor->src[0] || tensor->view_src || !first || first == last) return false;
    snprintf(name, GGML_MAX_NAME, "%.*s", (int)(last - first - 1), first + 1);
    return true;
}

int32_t probe_cache_layer(const struct ggml_tensor *tensor) {
    for (int depth = 0; tensor && depth < 8; depth++) {
        int n;
        char name[GGML_MAX_NAME];
        const char *text = copied_name(tensor, name) ? name : tensor->name;
        if (sscanf(text, "cache_k_l%d", &n) == 1 && n >= 0 && n < OSCAR_MAX_LAYERS) return n;
        tensor = tensor->view_src ? tensor->view_src : tensor->src[0];
    }
    return -1;
}

const struct ggml_tensor *probe_original(const struct ggml_tensor *const *nodes, int32_t n, const struct ggml_tensor *tensor) {
    char name[GGML_MAX_NAME];
    if (!copied_name(tensor, name)) return tensor;
    for (int32_t i = n - 1; i >= 0; i--)
        if (strcmp(nodes[i]->name, name) == 0 && nodes[i]->type == tensor->type && ggml_are_same_shape(nodes[i], tensor))
            return nodes[i];
    return NULL;
}

/* The ROPE node that a key row comes from, through what keeps its pairs: views of the whole and
 * scaling by one number a row. NULL when another operation came after it, or none at all. */
static const struct ggml_tensor *find_rope(struct probe *probe, const struct ggml_tensor *tensor) {
    for (int depth = 0; tensor && depth < 16; depth++) {
        const struct ggml_tensor *copy = tensor;
        tensor = probe_original(probe->seen, probe->n_seen, copy);
        if (!tensor) {
            error_set(&probe->error, OSCAR_ERROR_UNSUPPORTED, -1,
                      "tensor \"%s\" comes from another device, and no node of that name was computed", copy->name);
            return NULL;
        }
        switch (tensor->op) {
        case GGML_OP_ROPE:
            return tensor;
        case GGML_OP_VIEW:
            if (!tensor->src[0] || ggml_nelements(tensor) != ggml_nelements(tensor->src[0])) return NULL;
            tensor = tensor->src[0];
            break;
        case GGML_OP_RESHAPE:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
        case GGML_OP_CONT:
        case GGML_OP_CPY:
        case GGML_OP_SCALE:
        case GGML_OP_RMS_NORM:
        case GGML_OP_L2_NORM:
            tensor = tensor->src[0];
            break;
        default:
            return NULL;
        }
    }
    return NULL;
}

static float param(const struct ggml_tensor *node, int i) {
    float f;
    memcpy(&f, (const char *)node->op_params + (size_t)i * 4, 4);
    return f;
}

/* Where YaRN's ramp begins and ends (arXiv 2309.00071, as ggml rounds it). */
static void yarn_ramp(const struct ggml_tensor *node, int32_t n_dims, float *low, float *high) {
    float base = param(node, 5), n_ctx = (float)node->op_params[4];
    float turns_low = param(node, 9), turns_high = param(node, 10);
    float scale = (float)n_dims / (2 * logf(base)), two_pi = 6.2831853f;
    *low = fmaxf(0, floorf(scale * logf(n_ctx / (turns_low * two_pi))));
    *high = fminf((float)n_dims - 1, ceilf(scale * logf(n_ctx / (turns_high * two_pi))));
}

static bool read_factors(const struct ggml_tensor *factors, int32_t n, float *out, oscar_error *error) {
    for (int32_t f = 0; f < n; f++) out[f] = 1;
    if (!factors) return true;
    if (strstr(factors->name, "rope_factors_long") || strstr(factors->name, "rope_factors_short")) {
        error_set(error, OSCAR_ERROR_UNSUPPORTED, -1,
                  "tensor \"%s\": RoPE factors that depend on the context size are not supported",
                  factors->name);
        return false;
    }
    if (factors->type != GGML_TYPE_F32 || factors->ne[0] < n) {
        error_set(error, OSCAR_ERROR_UNSUPPORTED, -1, "tensor \"%s\": expected %d float32 RoPE factors",
                  factors->name, n);
        return false;
    }
    ggml_backend_tensor_get(factors, out, 0, (size_t)n * sizeof(float));
    return true;
}

oscar_status probe_read_rope(const struct ggml_tensor *node, oscar_rope *rope, oscar_error *error) {
    memset(rope, 0, sizeof *rope);
    rope->magnitude = 1;
    /* Dims that do not begin at the row's start have no name in oscar_rope; without one the means
     * are kept static, which is exact as well. */
    if (!node || node->op_params[15] != 0) return OSCAR_OK;
    int32_t n_dims = node->op_params[1], mode = node->op_params[2];
    if (mode != GGML_ROPE_TYPE_NORMAL && mode != GGML_ROPE_TYPE_NEOX)
        return error_set(error, OSCAR_ERROR_UNSUPPORTED, -1,
                         "RoPE mode %d of \"%s\": expected 0 (adjacent) or 2 (half-split)", mode, node->name);
    if (n_dims < 2 || n_dims % 2 || n_dims > OSCAR_MAX_HEAD_DIM)
        return error_set(error, OSCAR_ERROR_UNSUPPORTED, -1, "RoPE over %d dims in \"%s\"", n_dims, node->name);
    float factors[OSCAR_MAX_HEAD_DIM / 2];
    if (!read_factors(node->src[2], n_dims / 2, factors, error)) return OSCAR_ERROR_UNSUPPORTED;

    float base = param(node, 5), scale = param(node, 6), extrapolate = param(node, 7);
    float low = 0, high = 0;
    if (extrapolate != 0) yarn_ramp(node, n_dims, &low, &high);
    rope->layout = mode == GGML_ROPE_TYPE_NEOX ? OSCAR_ROPE_HALF_SPLIT : OSCAR_ROPE_ADJACENT;
    rope->n_dims = n_dims;
    rope->magnitude = param(node, 8);
    if (extrapolate != 0) rope->magnitude *= 1 + 0.1f * logf(1 / scale);
    for (int32_t f = 0; f < n_dims / 2; f++) {
        double turn = pow((double)base, -2.0 * f / n_dims) / (double)factors[f];
        float ramp = 1 - fminf(1, fmaxf(0, ((float)f - low) / fmaxf(0.001f, high - low)));
        double mix = (double)(ramp * extrapolate);
        rope->inv_freq[f] = (float)(turn * ((double)scale * (1 - mix) + mix));
    }
    return OSCAR_OK;
}

static void see_write(struct probe *probe, const struct ggml_tensor *node, int32_t n) {
    probe_layer *l = &probe->layers[n];
    l->written = true;
    if (probe->windows || probe->error.status) return;
    const struct ggml_tensor *rope = find_rope(probe, node->src[0]);
    if (!probe->error.status) probe_read_rope(rope, &l->shape.rope, &probe->error);
}

static bool mask_visible(const struct ggml_tensor *mask, int64_t cell) {
    size_t size = ggml_type_size(mask->type);
    uint32_t bits = 0;
    ggml_backend_tensor_get(mask, &bits, (size_t)cell * size, size);
    float value = mask->type == GGML_TYPE_F16 ? ggml_fp16_to_fp32((ggml_fp16_t)bits) : bits_float(bits);
    return value > -1e4f;
}

static void see_attention(struct probe *probe, const struct ggml_tensor *node) {
    const struct ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2], *mask = node->src[3];
    int32_t n = probe_cache_layer(k);
    if (n < 0) {
        error_set(&probe->error, OSCAR_ERROR_UNSUPPORTED, -1,
                  "attention node \"%s\" does not read the KV cache", node->name);
        return;
    }
    probe_layer *l = &probe->layers[n];
    l->n_reads++;
    char name[GGML_MAX_NAME];
    l->on_device = !device_is_host(node) || copied_name(q, name);
    if (device_is_meta(node)) {
        error_set(&probe->error, OSCAR_ERROR_UNSUPPORTED, n,
                  "layer %d: its heads are split over devices (-sm tensor); expected whole layers on a device (-sm layer)", n);
        return;
    }
    if (probe->windows) {
        l->window_seen = mask && mask->ne[0] >= 2;
        if (!l->window_seen) return;
        l->far_visible = mask_visible(mask, 0);
        l->near_visible = mask_visible(mask, 1);
        return;
    }
    l->shape.head_dim = (int32_t)k->ne[0];
    l->shape.n_kv_heads = (int32_t)k->ne[2];
    l->shape.n_q_heads = (int32_t)q->ne[2];
    if (k->ne[0] != v->ne[0] || k->ne[2] != v->ne[2])
        error_set(&probe->error, OSCAR_ERROR_UNSUPPORTED, n,
                  "layer %d: keys of %d dims and values of %d; expected the same (latent attention is not supported)",
                  n, (int)k->ne[0], (int)v->ne[0]);
    else if (k->ne[0] % 16 || k->ne[0] > OSCAR_MAX_HEAD_DIM)
        error_set(&probe->error, OSCAR_ERROR_UNSUPPORTED, n,
                  "layer %d: head_dim is %d; expected a multiple of 16 up to %d", n, (int)k->ne[0],
                  OSCAR_MAX_HEAD_DIM);
    else if (param(node, 1) != 0)
        error_set(&probe->error, OSCAR_ERROR_UNSUPPORTED, n, "layer %d: ALiBi (max_bias %g) is not supported",
                  n, (double)param(node, 1));
}

static bool keep_seen(struct probe *probe, const struct ggml_tensor *node) {
    if (probe->n_seen == probe->seen_capacity) {
        int32_t wanted = 2 * probe->seen_capacity + 1024;
        const struct ggml_tensor **grown = realloc(probe->seen, (size_t)wanted * sizeof *grown);
        if (!grown) {
            error_set(&probe->error, OSCAR_ERROR_MEMORY, -1, "no memory for %d nodes", wanted);
            return false;
        }
        probe->seen = grown;
        probe->seen_capacity = wanted;
    }
    probe->seen[probe->n_seen++] = node;
    return true;
}

void probe_see(oscar_llama *layer, struct ggml_tensor *node) {
    struct probe *probe = layer->probe;
    if (probe->error.status || !keep_seen(probe, node)) return;
    if (node->op == GGML_OP_SET_ROWS) {
        int32_t n = probe_cache_layer(node);
        if (n >= 0) see_write(probe, node, n);
    } else if (node->op == GGML_OP_FLASH_ATTN_EXT) {
        see_attention(probe, node);
    }
}

/* Computes one or two tokens of token 0 in one sequence. */
static oscar_status compute(oscar_llama *layer, int32_t n, llama_pos position, llama_seq_id seq,
                            oscar_error *error) {
    llama_token tokens[2] = {0, 0};
    llama_pos positions[2] = {position, position + 1};
    int32_t n_seq_id[2] = {1, 1};
    llama_seq_id *seq_id[3] = {&seq, &seq, NULL};
    int8_t logits[2] = {0, 0};
    struct llama_batch batch = {n, tokens, NULL, positions, n_seq_id, seq_id, logits};
    for (int i = 0; i < OSCAR_MAX_LAYERS; i++) layer->probe->layers[i].n_reads = 0;
    layer->probe->n_seen = 0;
    int32_t result = inner.decode(layer->ctx, batch);
    if (layer->probe->error.status) {
        if (error) *error = layer->probe->error;
        return layer->probe->error.status;
    }
    if (result == 0) return OSCAR_OK;
    return error_set(error, OSCAR_ERROR_INTERNAL, -1, "the probing call failed: llama_decode() returned %d",
                     result);
}

/* Which layers slide, and that they slide as oscar_layer.window says: a query at t = 2 w + 8 must
 * see the key at t - w + 1 and not the one at t - w. Chunked and symmetric windows hide both.
 * Positions must be contiguous within a sequence, so the keys are made in one sequence and the
 * query's predecessor in another, and then both belong to sequence 1. */
static oscar_status probe_windows(oscar_llama *layer, int32_t window, oscar_error *error) {
    inner.memory_clear(layer->memory, true);
    oscar_status status = compute(layer, 1, window + 8, 1, error);
    if (!status) status = compute(layer, 1, window + 9, 1, error);
    if (!status) status = compute(layer, 1, 2 * window + 7, 0, error);
    if (status) return status;
    inner.memory_seq_cp(layer->memory, 0, 1, -1, -1);
    layer->probe->windows = true;
    status = compute(layer, 1, 2 * window + 8, 1, error);
    layer->probe->windows = false;
    for (int32_t n = 0; n < OSCAR_MAX_LAYERS && !status; n++) {
        probe_layer *l = &layer->probe->layers[n];
        if (!l->written) continue;
        if (!l->window_seen || (l->far_visible && !l->near_visible) || (!l->far_visible && !l->near_visible))
            status = error_set(error, OSCAR_ERROR_UNSUPPORTED, n,
                               "layer %d: its window of %d tokens is not a sliding one (chunked or symmetric)",
                               n, window);
        l->shape.window = l->far_visible ? 0 : window;
    }
    return status;
}

static oscar_status check_layer(int32_t n, const probe_layer *l, oscar_error *error) {
    if (l->written && l->n_reads == 1) return OSCAR_OK;
    if (l->n_reads == 0)
        return error_set(error, OSCAR_ERROR_UNSUPPORTED, n,
                         "layer %d: it stores keys, but no flash attention node reads them", n);
    return error_set(error, OSCAR_ERROR_UNSUPPORTED, n,
                     "layer %d: %d attention nodes read its keys; expected one (shared KV is not supported)",
                     n, l->n_reads);
}

static oscar_status keep_layers(oscar_llama *layer, oscar_error *error) {
    int32_t count = 0;
    for (int32_t n = 0; n < OSCAR_MAX_LAYERS; n++) {
        const probe_layer *l = &layer->probe->layers[n];
        layer->hook_of[n] = -1;
        if (!l->written && l->n_reads == 0) continue;
        oscar_status status = check_layer(n, l, error);
        if (status) return status;
        layer->hook_of[n] = count++;
    }
    if (count == 0)
        return error_set(error, OSCAR_ERROR_UNSUPPORTED, -1, "the model's graph has no attention layer");
    layer->shapes = calloc((size_t)count, sizeof *layer->shapes);
    layer->hooks = calloc((size_t)count, sizeof *layer->hooks);
    layer->call.done = calloc((size_t)count, 1);
    if (!layer->shapes || !layer->hooks || !layer->call.done)
        return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for %d layers", count);
    layer->n_layers = count;
    for (int32_t n = 0; n < OSCAR_MAX_LAYERS; n++) {
        int32_t i = layer->hook_of[n];
        if (i < 0) continue;
        layer->shapes[i] = layer->probe->layers[n].shape;
        layer->n_device_layers += layer->probe->layers[n].on_device;
        layer->hooks[i].owner = layer;
        layer->hooks[i].index = i;
        layer->hooks[i].model_layer = n;
        oscar_status status = hook_init(&layer->hooks[i], error);
        if (status) return status;
    }
    return OSCAR_OK;
}

oscar_status probe_run(oscar_llama *layer, oscar_error *error) {
    layer->probe = calloc(1, sizeof *layer->probe);
    if (!layer->probe) return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for the probe");
    inner.memory_clear(layer->memory, true);
    /* One token is not worth threads that wait for each other, perhaps more of them than cores. */
    const int32_t n_threads = llama_n_threads(layer->ctx), n_batch = llama_n_threads_batch(layer->ctx);
    llama_set_n_threads(layer->ctx, 1, 1);
    oscar_status status = compute(layer, 1, 0, 0, error);
    int32_t window = inner.model_n_swa(layer->model);
    if (!status && window > 0) status = probe_windows(layer, window, error);
    if (!status) status = keep_layers(layer, error);
    llama_set_n_threads(layer->ctx, n_threads, n_batch);
    inner.memory_clear(layer->memory, true);
    free(layer->probe->seen);
    free(layer->probe);
    layer->probe = NULL;
    llama_perf_context_reset(layer->ctx);
    return status;
}
