/*
 * device.c - attention nodes that ggml's scheduler gave to a device (CUDA, Vulkan, a remote machine).
 *
 * The cache is in the host's memory and its attention runs on the host's cores, so such a node becomes an
 * empty one in the device's graph: its range ends there, and before the rest is computed queries and the
 * micro-batch's keys and values are copied to the host, a graph of one custom node runs there, and its
 * result is copied back. Data of a device is only reached through ggml_backend_tensor_get() and _set().
 *
 * The scheduler would do these copies itself if the node were the CPU's, but it has chosen backends
 * before a callback is asked, and a device that computes flash attention gets the node.
 */
#include <stdlib.h>

#include "llama/layer.h"

enum { TENSORS = 5 }; /* q, k, v, sinks, the result */

typedef struct ggml_threadpool *(*new_pool)(struct ggml_threadpool_params *params);
typedef void (*free_pool)(struct ggml_threadpool *pool);
typedef void (*set_pool)(ggml_backend_t backend, struct ggml_threadpool *pool);
typedef void (*set_threads)(ggml_backend_t backend, int n_threads);

struct device_step {
    ggml_backend_t cpu; /* our own: the context's is not to be had */
    struct ggml_threadpool *pool;
    int32_t pool_threads;
    new_pool new_pool;
    free_pool free_pool;
    set_pool set_pool;
    set_threads set_threads;
    void *graph_memory; /* of the one-node graph's descriptions */
    size_t graph_bytes;
    char *data;         /* the tensors, one after the other */
    size_t data_bytes;
    struct ggml_tensor *node; /* taken out of the device's graph; NULL: none is */
    hook_layer *hook;
};

static ggml_backend_buffer_t buffer_of(const struct ggml_tensor *t) { return t->view_src ? t->view_src->buffer : t->buffer; }

bool device_is_host(const struct ggml_tensor *node) {
    ggml_backend_buffer_t buffer = buffer_of(node);
    return !buffer || ggml_backend_buffer_is_host(buffer);
}

bool device_is_meta(const struct ggml_tensor *node) {
    ggml_backend_buffer_t buffer = buffer_of(node);
    ggml_backend_dev_t device = buffer ? ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer)) : NULL;
    return device && ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_META;
}

void device_free(struct device_step *d) {
    if (!d) return;
    if (d->cpu) ggml_backend_free(d->cpu);
    if (d->pool) d->free_pool(d->pool);
    free(d->graph_memory);
    free(d->data);
    free(d);
}

/* The CPU backend may be a library that is opened at run time: its functions are asked for by name. */
static bool find_functions(struct device_step *d) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(d->cpu));
    *(void **)&d->new_pool = ggml_backend_reg_get_proc_address(reg, "ggml_threadpool_new");
    *(void **)&d->free_pool = ggml_backend_reg_get_proc_address(reg, "ggml_threadpool_free");
    *(void **)&d->set_pool = ggml_backend_reg_get_proc_address(reg, "ggml_backend_cpu_set_threadpool");
    *(void **)&d->set_threads = ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    return d->new_pool && d->free_pool && d->set_pool && d->set_threads;
}

static struct device_step *create(oscar_error *error) {
    struct device_step *d = calloc(1, sizeof *d);
    if (d) {
        d->graph_bytes = (TENSORS + 1) * ggml_tensor_overhead() + ggml_graph_overhead_custom(TENSORS + 1, false);
        d->graph_memory = malloc(d->graph_bytes);
        d->cpu = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, NULL);
    }
    if (d && d->graph_memory && d->cpu && find_functions(d)) return d;
    if (!d || !d->graph_memory)
        error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for a step of a device's layer");
    else
        error_set(error, OSCAR_ERROR_UNSUPPORTED, -1, "ggml's CPU backend: %s",
                  d->cpu ? "it has no functions for threads" : "there is none to run attention on");
    device_free(d);
    return NULL;
}

/* The context's number of threads for so many tokens, in a pool that is kept between nodes. */
static bool ready_threads(struct device_step *d, const oscar_llama *layer, int64_t n_tokens, oscar_error *error) {
    int32_t one = llama_n_threads(layer->ctx), many = llama_n_threads_batch(layer->ctx);
    int32_t most = one > many ? one : many;
    if (most > d->pool_threads) {
        struct ggml_threadpool_params params = ggml_threadpool_params_default(most);
        struct ggml_threadpool *pool = d->new_pool(&params);
        if (!pool) {
            error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for %d threads", most);
            return false;
        }
        d->set_pool(d->cpu, pool);
        if (d->pool) d->free_pool(d->pool);
        d->pool = pool;
        d->pool_threads = most;
    }
    d->set_threads(d->cpu, n_tokens > 1 ? many : one);
    return true;
}

static size_t padded_bytes(const struct ggml_tensor *t) { return t ? GGML_PAD(ggml_nbytes(t), (size_t)64) : 0; }

static bool ready_data(struct device_step *d, const struct ggml_tensor *node, oscar_error *error) {
    size_t bytes = padded_bytes(node) + padded_bytes(node->src[0]) + padded_bytes(node->src[1]) + padded_bytes(node->src[2]) +
                   padded_bytes(node->src[4]);
    if (bytes <= d->data_bytes) return true;
    char *data = aligned_alloc(64, bytes);
    if (!data) {
        error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for %zu bytes of a device's queries and keys", bytes);
        return false;
    }
    free(d->data);
    d->data = data;
    d->data_bytes = bytes;
    return true;
}

bool device_begin(hook_layer *hook, struct ggml_tensor *node) {
    oscar_llama *layer = hook->owner;
    oscar_error error = {0};
    if (!layer->device) layer->device = create(&error);
    struct device_step *d = layer->device;
    if (!d || !ready_data(d, node, &error) || !ready_threads(d, layer, node->src[0]->ne[1], &error)) {
        hook_fail(layer, &error); /* the device computes the node; the call has failed */
        return false;
    }
    node->op = GGML_OP_NONE;
    d->node = node;
    d->hook = hook;
    return true;
}

/* The same tensor in the host's memory at *at, which moves on. */
static struct ggml_tensor *twin(struct ggml_context *ctx, const struct ggml_tensor *t, char **at) {
    if (!t) return NULL;
    struct ggml_tensor *host = ggml_new_tensor(ctx, t->type, GGML_MAX_DIMS, t->ne);
    memcpy(host->nb, t->nb, sizeof host->nb);
    host->data = *at;
    *at += padded_bytes(t);
    return host;
}

static void fetch(const struct ggml_tensor *from, struct ggml_tensor *to, size_t offset, size_t bytes) {
    ggml_backend_tensor_get(from, (char *)to->data + offset, offset, bytes);
}

/* Rows [base, base + n) of the inner cache's view, whichever of tokens and heads is the outer dimension. */
static void fetch_rows(const struct ggml_tensor *from, struct ggml_tensor *to, int64_t base, int64_t n) {
    size_t bytes = (size_t)(n - 1) * from->nb[1] + (size_t)(from->ne[2] - 1) * from->nb[2] + (size_t)from->ne[0] * from->nb[0];
    fetch(from, to, (size_t)base * from->nb[1], bytes);
}

/* What does not hold is said by the custom node, which checks its twins and then reads nothing. */
static void fetch_inputs(const hook_layer *hook, const struct ggml_tensor *node, struct ggml_tensor *host) {
    const oscar_llama *layer = hook->owner;
    if (layer->failed || !layer->call.active || hook_check_node(hook, node, NULL)) return;
    int64_t n = node->src[0]->ne[1];
    fetch(node->src[0], host->src[0], 0, ggml_nbytes(node->src[0]));
    fetch_rows(node->src[1], host->src[1], layer->call.base, n);
    fetch_rows(node->src[2], host->src[2], layer->call.base, n);
    if (node->src[4]) fetch(node->src[4], host->src[4], 0, ggml_nbytes(node->src[4]));
}

static void compute(struct device_step *d, struct ggml_tensor *node) {
    hook_layer *hook = d->hook;
    struct ggml_init_params params = {d->graph_bytes, d->graph_memory, true};
    struct ggml_context *ctx = ggml_init(params);
    char *at = d->data;
    struct ggml_tensor *host = twin(ctx, node, &at);
    for (int i = 0; i < TENSORS; i++)
        if (i != 3) host->src[i] = twin(ctx, node->src[i], &at); /* the mask is not read */
    fetch_inputs(hook, node, host);
    memcpy(host->op_params, hook->op_params, sizeof hook->op_params);
    host->op = GGML_OP_CUSTOM;
    struct ggml_cgraph *graph = ggml_new_graph_custom(ctx, TENSORS + 1, false);
    ggml_build_forward_expand(graph, host);
    if (ggml_backend_graph_compute(d->cpu, graph) != GGML_STATUS_SUCCESS) {
        oscar_error error = {0};
        error_set(&error, OSCAR_ERROR_INTERNAL, hook->model_layer, "layer %d: its attention was not computed", hook->model_layer);
        hook_fail(hook->owner, &error);
    }
    ggml_backend_tensor_set(node, host->data, 0, ggml_nbytes(node));
    ggml_free(ctx);
}

bool device_end(oscar_llama *layer, struct ggml_tensor *node) {
    struct device_step *d = layer->device;
    if (!d || !node || d->node != node) return false;
    compute(d, node);
    device_put_back(layer);
    return true;
}

void device_put_back(oscar_llama *layer) {
    struct device_step *d = layer->device;
    if (!d || !d->node) return;
    d->node->op = GGML_OP_FLASH_ATTN_EXT;
    d->node = NULL;
}
