/*
 * oscar.h - a KV cache of about 2 bits an element, and attention over it.
 *
 * OSCAR (Offline Spectral Covariance-Aware Rotation, arXiv 2605.17757) turns the keys and values of
 * a transformer along the directions that its attention reads, so that 2 bits an element keep
 * near-BF16 accuracy. This library holds the cache: it quantises rows as they are appended, keeps
 * them in pages of 64 tokens, and computes attention over the pages. docs/METHOD.md has the
 * mathematics, docs/FORMAT.md the bytes.
 *
 * Life cycle
 *   1. oscar_rotations_load() reads what `oscar calibrate` fitted for a model (or
 *      oscar_rotations_identity() makes a stand-in without calibration).
 *   2. oscar_cache_create() reserves all memory: a pool of pages shared by the sequences.
 *   3. For every chunk of tokens: oscar_seq_reserve(), then oscar_cache_attend() once for each
 *      layer (appends the chunk's keys and values, computes its attention), then
 *      oscar_seq_advance().
 *   4. oscar_seq_fork(), oscar_seq_truncate(), oscar_seq_clear(), oscar_seq_attach_prefix() at any
 *      time between chunks.
 *
 * Example (one sequence, error handling left out)
 *
 *   oscar_cache_options o = OSCAR_CACHE_OPTIONS_INIT;
 *   o.n_layers = 1; o.layers = &layer; o.rotations = rotations;
 *   o.n_seqs_max = 4; o.n_tokens_max = 4096;
 *   oscar_cache *cache;
 *   oscar_cache_create(&cache, &o, &error);
 *   oscar_seq_reserve(cache, 0, n_tokens, &error);
 *   oscar_step s = OSCAR_STEP_INIT;
 *   s.n_tokens = n_tokens; s.seqs = seqs; s.positions = positions;
 *   s.q = q; s.k = k; s.v = v; s.out = out; s.logit_scale = 0.125f;
 *   oscar_cache_attend(cache, 0, &s, &error);
 *   oscar_seq_advance(cache, 0, n_tokens, &error);
 *   oscar_cache_free(cache);
 *
 * The contract. What a token sees depends on its position alone: the query at t sees BF16 rows for
 * positions [0, sink) and (t - recent, t], and quantised rows between, whatever the chunking, the
 * batch, the forks or the rollbacks before. The codes of a row are bit-equal for equal inputs on
 * every instruction set; attention outputs agree up to the order of floating-point sums. The one
 * exception is a rollback deeper than `lookahead` tokens, see oscar_seq_truncate().
 *
 * Errors. 0 is success, negative an oscar_status. Functions that can fail in more than one way take
 * an oscar_error (NULL is allowed) which receives the details. The library never exits, never
 * aborts on input and never prints.
 *
 * Threads. A cache may be used by one thread at a time, except oscar_step_run(), which is made to
 * be called by several threads at once. Rotations are immutable once loaded and may be shared.
 */
#ifndef OSCAR_OSCAR_H
#define OSCAR_OSCAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define OSCAR_API __attribute__((visibility("default")))
#else
#define OSCAR_API
#endif

#define OSCAR_VERSION_MAJOR 0
#define OSCAR_VERSION_MINOR 1
#define OSCAR_VERSION_PATCH 0

/* Tokens in a page. */
#define OSCAR_PAGE_TOKENS 64
/* Largest head_dim; head_dim is a multiple of 16. */
#define OSCAR_MAX_HEAD_DIM 512
#define OSCAR_MAX_LAYERS 512
/* Largest number of query heads per KV head. */
#define OSCAR_MAX_GQA_GROUP 128

typedef enum oscar_status {
    OSCAR_OK = 0,
    OSCAR_ERROR_ARGUMENT = -1,    /* a value that the function's documentation rules out */
    OSCAR_ERROR_MEMORY = -2,      /* the system gave no memory */
    OSCAR_ERROR_IO = -3,          /* a file could not be read or written */
    OSCAR_ERROR_FORMAT = -4,      /* a file's bytes are not what its format says */
    OSCAR_ERROR_MISMATCH = -5,    /* a file of another model, geometry, rotation or recipe */
    OSCAR_ERROR_UNSUPPORTED = -6, /* well formed, but not something this build does */
    OSCAR_ERROR_NO_SPACE = -7,    /* the page pool has too few free pages */
    OSCAR_ERROR_NOT_FINITE = -8,  /* NaN or infinity in a key, value or file */
    OSCAR_ERROR_INTERNAL = -9     /* a bug in this library */
} oscar_status;

/* Details of a failure, owned by the caller. */
typedef struct oscar_error {
    oscar_status status;
    int64_t position; /* byte offset in a file, token index in a step, or -1 */
    char message[240];
} oscar_error;

/* A fixed English phrase for a status; never NULL. */
OSCAR_API const char *oscar_status_string(oscar_status status);
/* "0.1.0" */
OSCAR_API const char *oscar_version(void);

/* ------------------------------------------------------------------------------------------------
 * Instruction sets
 */

/* The name of the code path in use: "ref"; on x86-64 "avx2", "avxvnni", "avx512", "avx512vnni",
 * "avx512vbmi", "amx"; on AArch64 "neon", "neondot". Chosen once, from CPUID and XCR0, or from what Linux tells of an AArch64
 * processor; the environment variable OSCAR_ISA forces one, and no cache is made when it names one
 * that this machine cannot run. Where the processor has AMX, the choice asks Linux for its registers,
 * which makes signal frames of the process 8 KiB larger. */
OSCAR_API const char *oscar_isa_name(void);
/* Forces a path by name; NULL goes back to the automatic choice. OSCAR_ERROR_UNSUPPORTED when this
 * processor or build lacks it. Not while any cache is in use. */
OSCAR_API oscar_status oscar_isa_select(const char *name);

/* ------------------------------------------------------------------------------------------------
 * Geometry
 */

/* How rotary embedding pairs dims: pair f is (2f, 2f+1) or (f, f + n_dims/2). */
typedef enum oscar_rope_layout {
    OSCAR_ROPE_NONE = 0,
    OSCAR_ROPE_ADJACENT = 1,  /* GGUF files of the llama architecture, GPT-J */
    OSCAR_ROPE_HALF_SPLIT = 2 /* NeoX, Hugging Face */
} oscar_rope_layout;

/* Rotary embedding of one layer: pair f of a key at position t is turned by t * inv_freq[f] radians
 * and multiplied by `magnitude` (1 unless YaRN says otherwise). Dims >= n_dims are left alone. */
typedef struct oscar_rope {
    int32_t layout; /* oscar_rope_layout */
    int32_t n_dims; /* even, <= head_dim; 0 without RoPE */
    float magnitude;
    float inv_freq[OSCAR_MAX_HEAD_DIM / 2]; /* [n_dims / 2] radians a token */
} oscar_rope;

/* One attention layer. */
typedef struct oscar_layer {
    int32_t n_kv_heads;
    int32_t n_q_heads; /* a multiple of n_kv_heads; query head i reads KV head i / (n_q/n_kv) */
    int32_t head_dim;  /* of keys and of values; a multiple of 16 */
    int32_t window;    /* sliding window: the query at t sees (t - window, t]; 0: all */
    oscar_rope rope;
} oscar_layer;

/* ------------------------------------------------------------------------------------------------
 * Rotations: what calibration fitted for one model
 */

/* How rows are quantised. */
typedef enum oscar_recipe {
    OSCAR_RECIPE_DEFAULT = 0, /* means removed, least squares, LDLQ for keys, gain correction */
    OSCAR_RECIPE_ZOO = 1      /* the published OSCAR: clip, min-max, no means */
} oscar_recipe;

typedef struct oscar_rotations oscar_rotations;

/* Reads a rotation file of ours (safetensors, docs/FORMAT.md).
 * Errors: IO, FORMAT (position: byte offset), NOT_FINITE, UNSUPPORTED (newer version), MEMORY.
 * The object is independent of the file afterwards. */
OSCAR_API oscar_status oscar_rotations_load(oscar_rotations **out, const char *path,
                                            oscar_error *error);
/* Writes `path` atomically (temporary file, fsync, rename). Errors: IO. */
OSCAR_API oscar_status oscar_rotations_save(const oscar_rotations *rotations, const char *path,
                                            oscar_error *error);
/* Hadamard rotations without means or metric, for a model that was not calibrated: what QuaRot
 * does. `layers` [n_layers] is copied. bits: 2, 3 or 4 for all layers. */
OSCAR_API oscar_status oscar_rotations_hadamard(oscar_rotations **out, const oscar_layer *layers,
                                                int32_t n_layers, int32_t bits,
                                                oscar_error *error);
/* The same without any rotation. */
OSCAR_API oscar_status oscar_rotations_identity(oscar_rotations **out, const oscar_layer *layers,
                                                int32_t n_layers, int32_t bits,
                                                oscar_error *error);
/* Gives a layer of rotations made by the two functions above a tracked key mean (docs/METHOD.md), for models whose keys
 * have a large mean before RoPE, such as the bias of their projection. pairs: [n_kv_heads, n_pairs] rotary pairs, each
 * once; means: [n_kv_heads, head_dim] keys' means before RoPE, of which those of other pairs are left alone.
 * Errors: ARGUMENT, NOT_FINITE, MEMORY; then the layer is as before. Not while a cache uses the rotations. */
OSCAR_API oscar_status oscar_rotations_track(oscar_rotations *rotations, int32_t layer, int32_t n_pairs, const int32_t *pairs,
                                             const float *means, oscar_error *error);
OSCAR_API void oscar_rotations_free(oscar_rotations *rotations); /* NULL is allowed */

OSCAR_API int32_t oscar_rotations_n_layers(const oscar_rotations *rotations);
/* The layer's geometry as calibrated; NULL when out of range. */
OSCAR_API const oscar_layer *oscar_rotations_layer(const oscar_rotations *rotations, int32_t layer);
/* Metadata by key ("model", "recipe", "calibration_tokens", ...); NULL when absent. */
OSCAR_API const char *oscar_rotations_metadata(const oscar_rotations *rotations, const char *key);

/* ------------------------------------------------------------------------------------------------
 * The cache
 */

typedef struct oscar_cache oscar_cache;

/* How the cache keeps its history. */
typedef enum oscar_kv_type {
    OSCAR_KV_INT2 = 0, /* quantised (2, 3 or 4 bits, as the rotations say) + BF16 windows */
    OSCAR_KV_F32 = 1   /* exact float32 rows: the baseline of every comparison */
} oscar_kv_type;

typedef struct oscar_cache_options {
    uint32_t struct_size; /* sizeof(oscar_cache_options) */
    int32_t kv_type;      /* oscar_kv_type */
    int32_t n_layers;
    const oscar_layer *layers;        /* [n_layers]; copied */
    const oscar_rotations *rotations; /* must outlive the cache; NULL for OSCAR_KV_F32 */
    int32_t n_seqs_max;               /* sequence ids are 0 .. n_seqs_max - 1 */
    int64_t n_tokens_max;             /* tokens that fit, summed over sequences; rounded up to pages */
    int32_t n_chunk_max;              /* largest n_tokens of one step */
    int32_t sink;                     /* first tokens kept in BF16 as well */
    int32_t recent;                   /* last tokens kept in BF16 as well, the query's own among
                                         them; 0 means 1 */
    int32_t lookahead;                /* rollback of up to this many tokens loses no BF16 row */
    int32_t bits_k;                   /* 2, 3, 4; 0: as the rotations say */
    int32_t bits_v;
    int64_t n_seq_tokens_max;         /* most tokens of one sequence, rounded up to pages; 0: n_tokens_max.
                                         Less takes less scratch */
} oscar_cache_options;

#define OSCAR_CACHE_OPTIONS_INIT                                                                   \
    {sizeof(oscar_cache_options), OSCAR_KV_INT2, 0, NULL, NULL, 1, 0, 512, 64, 256, 64, 0, 0, 0}

/* Reserves everything that the cache will ever use.
 * Errors: ARGUMENT, MEMORY, MISMATCH (rotations of another geometry; the message names the layer
 * and the field), UNSUPPORTED (a head_dim that is no multiple of 16 or too large). */
OSCAR_API oscar_status oscar_cache_create(oscar_cache **out, const oscar_cache_options *options,
                                          oscar_error *error);
OSCAR_API void oscar_cache_free(oscar_cache *cache); /* NULL is allowed */

/* Bytes and pages, counted from what is allocated. */
typedef struct oscar_cache_stats {
    uint32_t struct_size;
    int64_t page_bytes;          /* one page of 64 tokens, all layers */
    int64_t pages_total;         /* history pages in the pool */
    int64_t pages_free;          /* hold nothing; see pages_cached */
    int64_t pages_live;          /* referenced by at least one sequence */
    int64_t pages_shared;        /* of those, referenced by more than one */
    int64_t overlay_page_bytes;  /* one page of 64 BF16 rows, all layers */
    int64_t overlay_pages_total;
    int64_t overlay_pages_live;
    int64_t scratch_bytes;       /* for the chunk in flight, and page tables */
    int64_t exact_bytes_per_token; /* what the same rows take in fp16, all layers */
    double history_bits;         /* bits an element of a history page */
    int64_t pages_cached;        /* referenced by no sequence, but found by their tokens; taken when
                                    no page is free. live + cached + free is pages_total */
    int64_t overlay_pages_cached;
    int64_t overlay_pages_budget; /* live and cached ones together, except where live ones alone need
                                     more: one chunk in flight, not one for each sequence */
    int64_t history_bytes;       /* of live and cached pages */
    int64_t overlay_bytes;
    int64_t page_hits;           /* full pages of known tokens that sequences came to hold: found, */
    int64_t page_misses;         /* and new */
    int64_t pages_unequal;       /* of those: the tokens were there, but with rows that differ in bits */
    int64_t page_evictions;      /* cached pages that were taken for something else */
    int64_t overlay_evictions;
    int64_t tokens_attached;     /* by oscar_seq_attach_prefix() */
    int64_t scratch_thread_bytes; /* besides scratch_bytes, for each thread that runs steps */
} oscar_cache_stats;
OSCAR_API void oscar_cache_get_stats(const oscar_cache *cache, oscar_cache_stats *stats);

/* ------------------------------------------------------------------------------------------------
 * Sequences
 *
 * Positions are 0-based and contiguous. Every sequence exists from the start with length 0.
 */

/* Tokens held. ARGUMENT for a bad id. */
OSCAR_API int64_t oscar_seq_length(const oscar_cache *cache, int32_t seq);
/* Makes room for n_new more tokens; afterwards appending them cannot fail for lack of room. A later
 * call replaces the reservation, oscar_seq_advance() uses it up, _truncate and _clear end it.
 * Errors: ARGUMENT, NO_SPACE (nothing is changed). */
OSCAR_API oscar_status oscar_seq_reserve(oscar_cache *cache, int32_t seq, int64_t n_new,
                                         oscar_error *error);
/* Counts n_new appended tokens in, after every layer has appended them: after each chunk, before the
 * next one is appended. May be called for a part of what was reserved. BF16 rows that no query can
 * reach any more are given back. */
OSCAR_API oscar_status oscar_seq_advance(oscar_cache *cache, int32_t seq, int64_t n_new,
                                         oscar_error *error);
/* Shortens the sequence to n tokens. *n_missing (NULL is allowed) receives how many tokens of the
 * recent window of the next query have no BF16 row any more (0 when the rollback was within
 * `lookahead`): until `recent` new tokens have come these are seen quantised. A caller that cannot
 * accept that truncates to 0 and computes the tokens again. Rows of shared pages (see "Page sharing")
 * that are still held are found again, so that less is missing after a deeper rollback. */
OSCAR_API oscar_status oscar_seq_truncate(oscar_cache *cache, int32_t seq, int64_t n,
                                          int64_t *n_missing, oscar_error *error);
/* dst becomes the first n tokens of src (n <= length of src). Full pages are shared, one partial
 * page is copied. What dst held is dropped. Errors: ARGUMENT, NO_SPACE (nothing is changed). */
OSCAR_API oscar_status oscar_seq_fork(oscar_cache *cache, int32_t dst, int32_t src, int64_t n,
                                      oscar_error *error);
OSCAR_API oscar_status oscar_seq_clear(oscar_cache *cache, int32_t seq, oscar_error *error);

/* ------------------------------------------------------------------------------------------------
 * Page sharing
 *
 * Full pages whose token ids are known (oscar_step.tokens) are held once: when a sequence completes a
 * page that is already there with the same tokens from the start, the same salt and the same bytes,
 * it takes that one. Tokens and bytes are compared, hashes only find. Pages that no sequence holds any
 * more stay cached until their memory is needed, least recently used first, before anything is
 * refused for lack of room. Tokens that saw fewer BF16 rows than the contract says (a rollback deeper
 * than the cache could serve) are never shared, nor is what follows them.
 */

/* What else than token ids the rows of this sequence depend on (an adapter, a control vector, images
 * behind placeholder tokens, a tenant). Pages are shared among equal salts alone. 0 at first; kept by
 * _truncate, _clear and _restore, copied by _fork. ARGUMENT: bad id; the sequence holds tokens of
 * another salt. */
OSCAR_API oscar_status oscar_seq_set_salt(oscar_cache *cache, int32_t seq, uint64_t salt, oscar_error *error);
/* The sequence drops what it holds and begins with the longest run of cached or live full pages that
 * hold tokens [n_tokens], under its salt. *n_attached (NULL is allowed) receives how many tokens that
 * is: a multiple of 64 and less than n_tokens, so that the last one is left to compute for its logits;
 * 0 when nothing was found. The caller appends the rest.
 * The next query must see BF16 rows in the sink and the recent window. They are kept with cached pages
 * while overlay_pages_budget lasts; a prefix is cut to where at most missing_max rows of the window are
 * gone. 0: as if the tokens had just been computed here; `recent`: the longest prefix, seen quantised
 * where rows are gone, as after a deep oscar_seq_truncate(). Errors: ARGUMENT. */
OSCAR_API oscar_status oscar_seq_attach_prefix(oscar_cache *cache, int32_t seq, const int32_t *tokens,
                                               int64_t n_tokens, int64_t missing_max, int64_t *n_attached,
                                               oscar_error *error);

/* ------------------------------------------------------------------------------------------------
 * Saving and restoring a sequence (docs/FORMAT.md, "Saved sequence")
 *
 * The saved form is independent of the page layout, carries a version and a checksum, and names the
 * geometry, rotations, recipe, bits and windows it was made under.
 */

/* Bytes that oscar_seq_save() writes for the sequence as it is now. 0 for a bad id. */
OSCAR_API size_t oscar_seq_save_bytes(const oscar_cache *cache, int32_t seq);
/* Errors: ARGUMENT (bad id, out_bytes too small: the message says how many are needed). */
OSCAR_API oscar_status oscar_seq_save(const oscar_cache *cache, int32_t seq, void *out, size_t out_bytes,
                                      oscar_error *error);
/* Replaces what `seq` holds. Every byte is checked before anything is touched: on error the
 * sequence is as it was. Token ids are saved with the rows: full pages of a sequence that was saved
 * under the salt of `seq` are shared again, and need no room where the cache has them. *used (NULL is allowed) receives the bytes read, which may be fewer than
 * `bytes`. Errors: FORMAT (cut, flipped; position: byte offset), MISMATCH (made under another
 * geometry, rotation, recipe, bits or window; the message says which), UNSUPPORTED (newer version),
 * NO_SPACE. */
OSCAR_API oscar_status oscar_seq_restore(oscar_cache *cache, int32_t seq, const void *data, size_t bytes,
                                         size_t *used, oscar_error *error);

/* ------------------------------------------------------------------------------------------------
 * Attention
 */

typedef enum oscar_dtype {
    OSCAR_DTYPE_F32 = 0,
    OSCAR_DTYPE_F16 = 1,
    OSCAR_DTYPE_BF16 = 2
} oscar_dtype;

/* One chunk of tokens for one layer. Tokens may belong to different sequences, in any order that
 * keeps each sequence's positions rising by one from its length. Strides are in elements; 0 means contiguous [n_tokens, n_heads, head_dim].
 * q and k are taken after RoPE (and after q/k norm). Nothing is kept of these pointers. */
typedef struct oscar_step {
    uint32_t struct_size;
    int32_t n_tokens;
    const int32_t *seqs;         /* [n_tokens], or [seq_offsets[n_tokens]] */
    const int32_t *seq_offsets;  /* [n_tokens + 1]: token i is appended to the sequences
                                    seqs[seq_offsets[i] .. seq_offsets[i+1]) and attends in the
                                    first of them; NULL: one sequence a token */
    const int32_t *positions;    /* [n_tokens] */
    const float *q;              /* [n_tokens, n_q_heads, head_dim] */
    int64_t q_token_stride, q_head_stride;
    const void *k; /* [n_tokens, n_kv_heads, head_dim] of kv_dtype */
    int64_t k_token_stride, k_head_stride;
    const void *v;
    int64_t v_token_stride, v_head_stride;
    int32_t kv_dtype; /* oscar_dtype */
    float *out;       /* [n_tokens, n_q_heads, head_dim] */
    int64_t out_token_stride, out_head_stride;
    float logit_scale;        /* logits are q.k times this */
    float logit_softcap;      /* then cap * tanh(logit / cap); 0: off; negative, NaN: refused */
    const float *sink_logits; /* [n_q_heads]: one more logit in each softmax sum, with no value
                                 (attention sinks); NULL: none */
    const int32_t *tokens;    /* [n_tokens] token ids, the same for every layer; NULL, or a negative
                                 id: not known (embeddings), then the pages of these and of the
                                 sequence's later tokens are not shared */
} oscar_step;

#define OSCAR_STEP_INIT                                                                            \
    {sizeof(oscar_step), 0, NULL, NULL, NULL, NULL, 0, 0, NULL, 0, 0, NULL, 0, 0, 0, NULL, 0, 0,   \
     1.0f, 0.0f, NULL, NULL}

/* Appends the step's keys and values to `layer` and writes its attention to step->out.
 * Errors: ARGUMENT (positions that do not continue their sequence, room not reserved, bad softcap),
 * NOT_FINITE (position: token index; the output of other tokens is unaffected). */
OSCAR_API oscar_status oscar_cache_attend(oscar_cache *cache, int32_t layer, const oscar_step *step,
                                          oscar_error *error);

/* The same in three parts, for callers with threads of their own: one thread prepares, n_threads
 * threads run with ith = 0 .. n_threads - 1 (all must call; they wait for each other inside), one
 * thread finishes. A cache has one step in flight at a time. */
OSCAR_API oscar_status oscar_step_prepare(oscar_cache *cache, int32_t layer, const oscar_step *step,
                                          oscar_error *error);
OSCAR_API void oscar_step_run(oscar_cache *cache, int32_t ith, int32_t n_threads);
OSCAR_API oscar_status oscar_step_finish(oscar_cache *cache, oscar_error *error);

#ifdef __cplusplus
}
#endif

#endif
