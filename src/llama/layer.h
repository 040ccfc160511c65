/*
 * layer.h - the inside of the layer under llama.cpp.
 *
 * A call (one llama_decode()) goes through the files in this order: batch.c checks positions and
 * reserves room, probe.c finds the model's attention layers (first call only), the inner
 * llama_decode() computes the graph, hook.c answers its attention nodes from the cache (device.c
 * those that are on a device), batch.c counts the tokens in. memory.c and state.c act between calls, sizing.c makes the cache, stats.c
 * tells operators what it holds.
 */
#ifndef OSCAR_LLAMA_LAYER_H
#define OSCAR_LLAMA_LAYER_H

#include "base/base.h"
#include "oscar/llama.h"

/* The libllama that graph shapes, tensor names and batch rules were checked with. */
#define LLAMA_VERSION_CHECKED "0.5.0"

/* The functions of libllama that the preloaded library replaces and this layer needs as they are.
 * Linked programs use libllama's own; the preloaded library fills the table before main(). */
typedef struct inner_api {
    int32_t (*decode)(struct llama_context *, struct llama_batch);
    void (*memory_clear)(llama_memory_t, bool);
    bool (*memory_seq_rm)(llama_memory_t, llama_seq_id, llama_pos, llama_pos);
    void (*memory_seq_cp)(llama_memory_t, llama_seq_id, llama_seq_id, llama_pos, llama_pos);
    int32_t (*model_n_swa)(const struct llama_model *);
} inner_api;
extern inner_api inner;

/* One attention layer of the graph, and the user data of its custom nodes. */
typedef struct hook_layer {
    oscar_llama *owner;
    int32_t index;       /* in the cache */
    int32_t model_layer; /* as llama.cpp counts */
    float scale, softcap; /* of the attention node, read before it was turned */
    int32_t op_params[GGML_MAX_OP_PARAMS / sizeof(int32_t)]; /* of our custom node */
    oscar_step step;
    bool go; /* set by thread 0 before a barrier: the step is prepared */
    atomic_int left; /* threads that have run their part of it */
} hook_layer;

/* The tokens of one llama_decode(). */
typedef struct call_state {
    bool active;
    int32_t n_tokens;
    int32_t n_seqs;     /* entries of seqs */
    int32_t capacity;   /* tokens */
    int32_t seq_capacity;
    bool single;        /* one sequence a token */
    int32_t *positions; /* [n_tokens] */
    int32_t *tokens;    /* [n_tokens] ids; -1: an embedding */
    int32_t *offsets;   /* [n_tokens + 1] into seqs */
    int32_t *chunk_offsets; /* [chunk + 1] the micro-batch's, from 0 */
    int32_t *seqs;      /* [n_seqs] */
    int32_t *new_tokens;  /* [n_seq_max] tokens that this call adds */
    int32_t base;       /* first token of the micro-batch in flight */
    int32_t chunk;      /* its tokens; 0 before its first layer */
    int32_t n_done;     /* layers that have run it */
    uint8_t *done;      /* [n_layers] whether this one has */
} call_state;

struct probe;
struct device_step;

struct oscar_llama {
    const struct llama_model *model;
    struct llama_context *ctx; /* NULL until attached */
    llama_memory_t memory;
    oscar_llama_options options; /* its paths cleared */
    char *rotations_name; /* the file, for messages; NULL: the caller's object */
    char *stats_path;     /* NULL: no statistics are written */
    struct stats_entry *stats; /* in stats.c's list; NULL without a path */
    const oscar_rotations *rotations;
    oscar_rotations *owned_rotations;
    /* What the caller asked for, rounded as llama.cpp does; n_ctx and n_ctx_seq less where
     * kv_memory_bytes does not hold it. */
    uint32_t n_ctx, n_ctx_seq, n_seq_max;
    bool unified; /* sequences share n_ctx, instead of having n_ctx_seq each */
    ggml_backend_sched_eval_callback user_callback;
    void *user_callback_data;
    bool user_waits; /* the caller's callback wants the node that device.c computes */
    struct probe *probe; /* while probing */
    bool refused;        /* the first call found something unsupported; error says what */
    int32_t n_layers;
    oscar_layer *shapes; /* [n_layers] */
    hook_layer *hooks;   /* [n_layers] */
    int32_t hook_of[OSCAR_MAX_LAYERS]; /* model layer -> index, or -1 */
    oscar_cache *cache;
    call_state call;
    spin_barrier barrier; /* of the threads in a custom node */
    int32_t n_device_layers;   /* whose attention nodes are on a device, or read from one */
    struct device_step *device; /* NULL until a node on a device is met */
    bool all_on_device;         /* every node is treated as if it were: tests on machines without one */
    bool failed;          /* a node of this call failed; written by one thread at a time */
    bool told_rollback;
    oscar_error error;
    oscar_llama_observer observer;
    void *observer_data;
    oscar_llama *next; /* in the table of contexts */
};

/* layer.c */
oscar_llama *layer_of_context(const struct llama_context *ctx); /* NULL: not ours */
oscar_llama *layer_of_memory(llama_memory_t memory);
oscar_llama *layer_of_model(const struct llama_model *model);
void layer_log(const oscar_llama *layer, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* sizing.c: makes the cache in the memory that there is, shortens the context to it, and says so. */
oscar_status layer_create_cache(oscar_llama *layer, oscar_error *error);
/* Scratch of the cache with what the context's threads work in. */
int64_t layer_scratch_bytes(const oscar_llama *layer, const oscar_cache_stats *stats);

/* stats.c: a file of numbers for operators. All do nothing without a path. */
typedef enum stats_event {
    STATS_DECODE,   /* a call was computed; its tokens count */
    STATS_NO_SLOT,  /* a call was refused for lack of room */
    STATS_ERROR,    /* a call failed or was not valid */
    STATS_SAVE,     /* a state was saved */
    STATS_RESTORE,  /* a state was restored */
    STATS_REFUSED,  /* a state was refused */
    STATS_OTHER,    /* sequences changed in another way */
    STATS_EVENTS
} stats_event;
oscar_status stats_begin(oscar_llama *layer, oscar_error *error); /* writes the file for the first time */
void stats_note(oscar_llama *layer, stats_event event, int64_t count);
void stats_end(oscar_llama *layer);

/* model.c: what can be told from the model alone. */
oscar_status model_check(const struct llama_model *model, oscar_error *error);
oscar_status model_check_params(const struct llama_context_params *params, oscar_error *error);
/* The rotations against the model's metadata, and against the layers that the probe found. */
oscar_status model_check_fingerprint(const struct llama_model *model,
                                     const oscar_rotations *rotations, oscar_error *error);
oscar_status model_check_rotations(const oscar_layer *layers, int32_t n_layers,
                                   const oscar_rotations *rotations, oscar_error *error);

/* probe.c: fills shapes, hooks and hook_of. */
oscar_status probe_run(oscar_llama *layer, oscar_error *error);
void probe_see(oscar_llama *layer, struct ggml_tensor *node);
/* N of a view of "cache_k_l<N>"; -1 when the tensor is none. */
int32_t probe_cache_layer(const struct ggml_tensor *tensor);
/* The node that ggml's scheduler copied to make the tensor, or the tensor itself where it is no copy. A
 * graph may use a name again: the last node that has it is the one that a later node reads. NULL: none has. */
const struct ggml_tensor *probe_original(const struct ggml_tensor *const *nodes, int32_t n, const struct ggml_tensor *tensor);
/* What a ROPE node does to a row; OSCAR_ERROR_UNSUPPORTED for M-RoPE and context-dependent factors. */
oscar_status probe_read_rope(const struct ggml_tensor *node, oscar_rope *rope, oscar_error *error);

/* hook.c */
bool hook_callback(struct ggml_tensor *node, bool ask, void *layer);
oscar_status hook_init(hook_layer *hook, oscar_error *error);
/* The first error of a call, which ends it. */
void hook_fail(oscar_llama *layer, const oscar_error *error);
/* Whether a node's shapes and types are those that the layer expects; batch position call.base. */
oscar_status hook_check_node(const hook_layer *hook, const struct ggml_tensor *node, oscar_error *error);

/* device.c: attention nodes that ggml's scheduler gave to a device. */
bool device_is_host(const struct ggml_tensor *node); /* the node's result is in the host's memory */
bool device_is_meta(const struct ggml_tensor *node); /* the node is split over several devices */
/* Takes the node out of the device's graph; false, with the call failed, when there is no memory for copies. */
bool device_begin(hook_layer *hook, struct ggml_tensor *node);
/* Whether the node is the one taken out; if so, computes it on the host and puts it back. */
bool device_end(oscar_llama *layer, struct ggml_tensor *node);
/* Puts back a node whose turn did not come, because its range failed. */
void device_put_back(oscar_llama *layer);
void device_free(struct device_step *device);

/* batch.c: call_clear, call_add for every token, call_begin, the inner call, call_end. */
void call_clear(oscar_llama *layer);
bool call_add(oscar_llama *layer, llama_token token, llama_pos position, int32_t n_seqs, const llama_seq_id *seqs);
/* The position that follows what the sequence holds and what the call has added to it. */
llama_pos call_next_position(const oscar_llama *layer, llama_seq_id seq);
/* Probes the model and makes the cache where that was not done; false: refused, see layer->error. */
bool call_find_layers(oscar_llama *layer);
int32_t call_begin(oscar_llama *layer); /* 0, or what llama_decode() is to return */
int32_t call_end(oscar_llama *layer, int32_t result);
void call_free(call_state *call);
/* After a layer has run the micro-batch in flight. */
oscar_status call_layer_done(oscar_llama *layer, int32_t index, oscar_error *error);

/* memory.c */
void memory_refuse(oscar_llama *layer, const char *function);

#endif
