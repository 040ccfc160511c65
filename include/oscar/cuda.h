/*
 * cuda.h - the quantised cache on NVIDIA GPUs: pages, append, attention.
 *
 * liboscar-cuda is a library of its own, opened at run time by those who find a GPU. It holds
 * kernels and the host code that launches them; all memory belongs to the caller. Every launch is
 * asynchronous on the given stream, allocates nothing and can be captured in a CUDA graph. Sequence
 * lengths and block tables are read on the device, so that one captured graph serves sequences that
 * grow.
 *
 * Life cycle
 *   1. oscar_cuda_layer_create() uploads what one layer needs (rotations, means, tables).
 *   2. The caller allocates pages, overlay and workspace; the functions below say how many bytes.
 *      The workspace is set to zero once.
 *   3. oscar_cuda_append() quantises the rows of new tokens; oscar_cuda_decode() attends. Or append stores
 *      BF16 rows alone, and oscar_cuda_settle() quantises many of them together, before they leave the window.
 *
 * Example (one decode step of one layer)
 *
 *   oscar_cuda_decode_args a = OSCAR_CUDA_DECODE_ARGS_INIT;
 *   a.n_seqs = 32; a.q = q; a.out = out;
 *   a.pages = pages; a.block_table = table; a.table_stride = 2048; a.lengths = lengths;
 *   a.overlay_k = ok; a.overlay_v = ov; a.logit_scale = 0.0884f; a.workspace = workspace;
 *   oscar_cuda_decode(layer, &a, stream, &error);
 *
 * Memory on the device
 *   pages      [n_pages, n_kv_heads, tile]: a tile is 64 tokens of one KV head, keys and values,
 *              oscar_cuda_tile_bytes() long (src/cuda/layout.h has the bytes). A page id indexes
 *              the first dimension.
 *   overlay_k  [n_slots, n_kv_heads, sink8 + ring, head_dim] bf16: rotated residual keys of the
 *              first `sink` tokens (rows 0 .. sink-1; sink8 is sink rounded up to 8), then a ring:
 *              position p >= sink is row sink8 + p % ring. overlay_v the same for values.
 *   workspace  oscar_cuda_workspace_bytes(); one launch at a time may use it.
 *
 * What a query at position t sees (docs/METHOD.md): BF16 rows for [0, sink) and (t - recent, t],
 * quantised rows between; nothing at or before t - window when the layer slides.
 */
#ifndef OSCAR_CUDA_H
#define OSCAR_CUDA_H

#include "oscar/oscar.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct oscar_cuda_layer oscar_cuda_layer;
/* A cudaStream_t. */
typedef void *oscar_cuda_stream;

#define OSCAR_CUDA_MAX_Q_TOKENS 8
#define OSCAR_CUDA_MAX_PREFILL_TOKENS 4095

/* One layer. Arrays are host memory, float32, and copied; H = n_kv_heads, d = head_dim. A NULL
 * array means zeros, or the identity for rotations and metric. */
typedef struct oscar_cuda_layer_options {
    uint32_t struct_size;
    int32_t n_kv_heads;
    int32_t n_q_heads; /* a multiple of n_kv_heads, at most 16 times as many */
    int32_t head_dim;  /* 64, 128 or 256 */
    int32_t window;    /* sliding window, 0: none */
    int32_t sink;      /* first tokens kept in BF16 */
    int32_t recent;    /* last tokens kept in BF16, at least 1 */
    int32_t ring;      /* overlay rows for recent tokens: a multiple of 64, at least recent + the
                          tokens appended at once */
    int32_t bits_k, bits_v; /* 2, 3 or 4 */
    int32_t recipe;         /* oscar_recipe, for append */
    int32_t ldlq_k, gain_k, gain_v; /* 0 or 1, for append */
    float clip_k, clip_v;           /* OSCAR_RECIPE_ZOO */
    int32_t n_tracked;              /* rotary pairs with a tracked mean: a multiple of 8, <= d/2 */
    const int32_t *tracked;         /* [H, n_tracked] pairs */
    const oscar_rope *rope;         /* NULL only when n_tracked is 0 */
    const float *k_rotation;        /* [H, d, d] row vector times matrix */
    const float *v_rotation;        /* [H, d, d] */
    const float *k_mean;            /* [H, d] */
    const float *k_tracked;         /* [H, d] */
    const float *v_mean;            /* [H, d] */
    const float *k_metric_b;        /* [H, d, d] unit lower factor, for append */
    const float *k_metric_d;        /* [H, d] */
    const float *v_metric_b;        /* [H, d, d] */
    const float *v_metric_d;        /* [H, d] */
} oscar_cuda_layer_options;

#define OSCAR_CUDA_LAYER_OPTIONS_INIT                                                              \
    {sizeof(oscar_cuda_layer_options), 0, 0, 0, 0, 64, 256, 384, 2, 2, 0, 0, 0, 0, 1.0f, 1.0f, 0,  \
     NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL}

/* Uploads a layer to the current device. Errors: ARGUMENT (the message names the field),
 * UNSUPPORTED (no device, a device older than compute capability 8.0), MEMORY. */
OSCAR_API oscar_status oscar_cuda_layer_create(oscar_cuda_layer **out,
                                               const oscar_cuda_layer_options *options,
                                               oscar_error *error);
OSCAR_API void oscar_cuda_layer_free(oscar_cuda_layer *layer); /* NULL is allowed */

/* Bytes of one tile: 64 tokens of one KV head. 0 for a head_dim or bits that are not supported. */
OSCAR_API size_t oscar_cuda_tile_bytes(int32_t head_dim, int32_t bits_k, int32_t bits_v);
/* Overlay rows of one (slot, KV head): sink8 + ring. */
OSCAR_API int32_t oscar_cuda_overlay_rows(const oscar_cuda_layer *layer);
/* Workspace for at most n_seqs sequences of n_q_tokens query tokens on the current device. */
OSCAR_API size_t oscar_cuda_workspace_bytes(const oscar_cuda_layer *layer, int32_t n_seqs,
                                            int32_t n_q_tokens);

/* Writes or reads the row of token `slot` (0..63) of a tile in host memory. codes: [head_dim] one a
 * byte; params: [n_groups, 2] fp16 step, offset (one group up to head_dim 128, two at 256).
 * side: 0 keys, 1 values. */
OSCAR_API void oscar_cuda_tile_put_row(uint8_t *tile, int32_t head_dim, int32_t bits_k,
                                       int32_t bits_v, int32_t side, int32_t slot,
                                       const uint8_t *codes, const uint16_t *params);
OSCAR_API void oscar_cuda_tile_get_row(const uint8_t *tile, int32_t head_dim, int32_t bits_k,
                                       int32_t bits_v, int32_t side, int32_t slot, uint8_t *codes,
                                       uint16_t *params);

/* All pointers are device memory. */
typedef struct oscar_cuda_decode_args {
    uint32_t struct_size;
    int32_t n_seqs;
    int32_t n_q_tokens; /* 1..8: the last tokens of each sequence */
    int32_t q_dtype;    /* oscar_dtype: F16 or BF16 */
    int32_t out_dtype;  /* oscar_dtype */
    const void *q;      /* [n_seqs, n_q_tokens, n_q_heads, head_dim] after RoPE */
    void *out;          /* the same shape */
    const void *pages;
    const int32_t *block_table; /* [n_seqs, table_stride] page ids */
    int32_t table_stride;
    const int32_t *lengths; /* [n_seqs] tokens appended, the query's included; a sequence of length
                               0 is skipped and its output left as it was */
    const int32_t *slots;   /* [n_seqs] overlay slot; NULL: the sequence's index */
    const void *overlay_k, *overlay_v;
    const float *sink_logits; /* [n_q_heads] one more logit in each softmax; NULL: none */
    float logit_scale;
    float logit_softcap; /* 0: off */
    int32_t out_rotated; /* 1: leave the output in the rotated basis, for a W_O that has the value
                            rotation folded in */
    void *workspace;
} oscar_cuda_decode_args;

#define OSCAR_CUDA_DECODE_ARGS_INIT                                                                \
    {sizeof(oscar_cuda_decode_args), 0, 1, OSCAR_DTYPE_BF16, OSCAR_DTYPE_BF16, NULL, NULL, NULL,   \
     NULL, 0, NULL, NULL, NULL, NULL, NULL, 1.0f, 0.0f, 0, NULL}

/* Attention of the last n_q_tokens tokens of every sequence. Two runs on the same input give the
 * same bits on one kind of device. Errors: ARGUMENT, INTERNAL (a CUDA error; its name is in the
 * message). */
OSCAR_API oscar_status oscar_cuda_decode(const oscar_cuda_layer *layer,
                                         const oscar_cuda_decode_args *args,
                                         oscar_cuda_stream stream, oscar_error *error);

/* The same for a chunk of a prompt: n_q_tokens up to OSCAR_CUDA_MAX_PREFILL_TOKENS, the last tokens of every
 * sequence, which append has stored. Made for many rows: one launch, no workspace (args->workspace may be NULL).
 * The ring must hold recent + n_q_tokens - 1 rows. A sequence shorter than n_q_tokens is skipped and its output
 * left as it was. What a query sees is decode's rule, so how a prompt is cut into chunks changes nothing but the
 * order of sums. Errors: ARGUMENT, UNSUPPORTED (too many tracked pairs for the device's shared memory), INTERNAL. */
OSCAR_API oscar_status oscar_cuda_prefill(const oscar_cuda_layer *layer, const oscar_cuda_decode_args *args,
                                          oscar_cuda_stream stream, oscar_error *error);

/* All pointers are device memory. Tokens in any order; no two with the same sequence and position. */
typedef struct oscar_cuda_append_args {
    uint32_t struct_size;
    int32_t n_tokens;
    int32_t dtype;            /* oscar_dtype of k and v */
    const void *k, *v;        /* [n_tokens, n_kv_heads, head_dim], keys after RoPE; at multiples of 16 bytes */
    const int32_t *seqs;      /* [n_tokens] row of the block table */
    const int32_t *positions; /* [n_tokens] */
    const int32_t *block_table;
    int32_t table_stride;
    const int32_t *slots; /* [n_seqs] overlay slot; NULL: the sequence's index */
    void *pages;
    void *overlay_k, *overlay_v;
    int32_t *bad_token; /* lowered to the first token with NaN or infinity, whose row is stored as zeros;
                           set it to INT32_MAX before; NULL: not reported */
    int32_t codes_later; /* 1: only overlay rows are stored, and oscar_cuda_settle() makes their codes; pages and
                            block_table may be NULL */
} oscar_cuda_append_args;

#define OSCAR_CUDA_APPEND_ARGS_INIT                                                                \
    {sizeof(oscar_cuda_append_args), 0, OSCAR_DTYPE_BF16, NULL, NULL, NULL, NULL, NULL, 0, NULL,   \
     NULL, NULL, NULL, NULL, 0}

/* Removes means, rotates, rounds to BF16, quantises with the layer's recipe (LDLQ and gain included) and stores
 * rows of new tokens in pages and overlay, in one launch. Codes are those of the CPU's cache. With codes_later it ends with
 * the overlay. Where many rows with error feedback are quantised together (head_dim 128), their refits and gain are sums in
 * another order than for few: once in some thousand rows the step or the offset is the next fp16 number, once in some ten
 * thousand that moves codes too (by 1e-5 of all, tests/cuda).
 * Errors: ARGUMENT, INTERNAL. */
OSCAR_API oscar_status oscar_cuda_append(const oscar_cuda_layer *layer, const oscar_cuda_append_args *args,
                                         oscar_cuda_stream stream, oscar_error *error);

/* All pointers are device memory. A sequence is a row of the block table. */
typedef struct oscar_cuda_settle_args {
    uint32_t struct_size;
    int32_t n_seqs;
    int32_t n_positions; /* how many positions a sequence usually has to settle: sizes the launch, changes no result */
    const int32_t *from, *to; /* [n_seqs] positions from .. to - 1 get their codes; nothing where to <= from */
    const int32_t *block_table; /* [n_seqs, table_stride] page ids */
    int32_t table_stride;
    const int32_t *slots; /* [n_seqs] overlay slot; NULL: the sequence's index */
    void *pages;
    const void *overlay_k, *overlay_v;
} oscar_cuda_settle_args;

#define OSCAR_CUDA_SETTLE_ARGS_INIT {sizeof(oscar_cuda_settle_args), 0, 64, NULL, NULL, NULL, 0, NULL, NULL, NULL, NULL}

/* Codes of positions that were appended with codes_later, made of their overlay rows: the same that append would have
 * stored at once (bit for bit when both quantise few rows, or both many; see there). One launch for all sequences; from and to are read on the device, so a captured launch serves
 * whatever is due when it is replayed, and costs little when nothing is. Made for many rows: settling a page of 64
 * positions of every sequence together takes a fraction of what codes of each token by itself do.
 *
 * What the caller sees to. A position, one of the sink too, must be settled
 *   - before a query sees it quantised: everything below L - recent must be settled before oscar_cuda_decode() or
 *     oscar_cuda_prefill() with a length of L. For single tokens that leaves `recent` tokens of time, so settling may
 *     run beside attention and append, on another stream, as long as what it settles stays in the window meanwhile;
 *   - while its overlay row is there: before position + ring of the same sequence is appended;
 *   - before its page is shared, copied or saved.
 * No two launches may settle the same position at once. After a rollback to n tokens, positions from n on that are
 * appended again are to be settled again. Natural is a page at a time: with `coded` the positions settled so far, every
 * 64 tokens from = coded, to = length / 64 * 64 (recent must be at least 64).
 *
 *   oscar_cuda_settle_args s = OSCAR_CUDA_SETTLE_ARGS_INIT;
 *   s.n_seqs = 32; s.from = coded; s.to = full; s.block_table = table; s.table_stride = 2048;
 *   s.pages = pages; s.overlay_k = ok; s.overlay_v = ov;
 *   oscar_cuda_settle(layer, &s, stream, &error);
 *
 * Rows with NaN or infinity were stored as zeros, and reported, by append. Errors: ARGUMENT, INTERNAL. */
OSCAR_API oscar_status oscar_cuda_settle(const oscar_cuda_layer *layer, const oscar_cuda_settle_args *args,
                                         oscar_cuda_stream stream, oscar_error *error);

/* What oscar_cuda_measure() measures: decode attention of one layer on random pages, window 64 + 256. */
typedef struct oscar_cuda_measure_options {
    uint32_t struct_size;
    int32_t head_dim, n_kv_heads, n_q_heads, bits_k, bits_v, n_tracked;
    int32_t n_seqs, length, n_q_tokens; /* length: tokens of each sequence */
    int32_t tracked_factor; /* of the tracked pairs' means, normal deviates times 0.3: from 10 or so on biases are so
                               large that they take more products */
} oscar_cuda_measure_options;

#define OSCAR_CUDA_MEASURE_OPTIONS_INIT {sizeof(oscar_cuda_measure_options), 128, 8, 32, 2, 2, 0, 1, 100000, 1, 1}

typedef struct oscar_cuda_measure_result {
    double us;             /* a launch, output left in the rotated basis */
    double turned_back_us; /* output turned back */
    double bytes;          /* tiles and window rows that a launch reads */
    double read_us, read_gb_per_s; /* a kernel that loads the same tiles and does nothing with them */
    char device[256];
    int32_t n_multiprocessors, clock_mhz, memory_clock_mhz; /* clocks: the most the device runs at */
} oscar_cuda_measure_result;

/* Medians over replays of a CUDA graph whose launches rotate over buffers larger than the cache. Allocates and
 * frees device memory, at most half of what is free. Errors: ARGUMENT, UNSUPPORTED (no device), MEMORY, INTERNAL. */
OSCAR_API oscar_status oscar_cuda_measure(const oscar_cuda_measure_options *options, oscar_cuda_measure_result *result,
                                          oscar_error *error);

#ifdef __cplusplus
}
#endif

#endif
