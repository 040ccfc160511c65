/*
 * cache.h - the cache's inside: pools of pages, sequences, the step in flight.
 *
 * A history page holds 64 tokens of all layers and KV heads, quantised (or float32 in exact mode).
 * An overlay page holds BF16 rows of the same 64 positions. A sequence is two tables of page
 * numbers, one entry for every 64 positions: history for all of them, overlay for the sink, the
 * recent window, the lookahead and the chunk in flight. Rows never change once written, so full
 * pages are shared by reference.
 */
#ifndef OSCAR_CACHE_H
#define OSCAR_CACHE_H

#include "attn/attn.h"
#include "base/base.h"
#include "codec/page.h"
#include "codec/rotations.h"

#define NO_PAGE (-1)
/* Most threads that may run a step. */
#define CACHE_MAX_THREADS 256
/* Most pages in a group of the KIVI baseline. */
#define KIVI_MAX_PAGES 16

/* Pages of one size in one region of memory. Live + cached + free is always n_pages. */
typedef struct page_pool {
    uint8_t *memory; /* [n_pages, page_bytes] */
    size_t page_bytes;
    int32_t n_pages;
    int32_t n_free;
    int32_t n_cached;
    int32_t *free_stack;     /* [n_pages] */
    int32_t *refs;           /* [n_pages] 0: cached or free */
    uint8_t *kept;           /* [n_pages] 1: cached, not free, when the last reference goes */
    int32_t *newer, *older;  /* [n_pages] the list of cached pages */
    int32_t newest, oldest;  /* NO_PAGE: none is cached */
} page_pool;

bool pool_init(page_pool *pool, int32_t n_pages, size_t page_bytes);
void pool_destroy(page_pool *pool);
int32_t pool_take(page_pool *pool); /* a free page, now live; NO_PAGE when none is free */
void pool_ref(page_pool *pool, int32_t page); /* of a live or cached page */
void pool_unref(page_pool *pool, int32_t page); /* NO_PAGE is allowed */
void pool_keep(page_pool *pool, int32_t page);   /* a live page */
void pool_forget(page_pool *pool, int32_t page); /* a kept one; frees it when it is cached */
int32_t pool_shared(const page_pool *pool);     /* pages with more than one reference */
static inline uint8_t *pool_page(const page_pool *pool, int32_t page) {
    return pool->memory + (size_t)page * pool->page_bytes;
}
/* Others hold it, or will find it: it is not to be written. */
static inline bool pool_is_common(const page_pool *pool, int32_t page) { return pool->refs[page] > 1 || pool->kept[page]; }
static inline int32_t pool_live(const page_pool *pool) { return pool->n_pages - pool->n_free - pool->n_cached; }

/* What the index knows of a history page, see share.c. */
typedef struct page_note {
    int32_t parent;     /* page before it in its chain; NO_PAGE: the first */
    int32_t n_children; /* indexed pages whose parent it is */
    int32_t overlay;    /* page with the BF16 rows of all its tokens, or NO_PAGE */
    int32_t next;       /* in its bucket */
    uint64_t hash;
    uint64_t salt;      /* of first pages; others have their parent's */
} page_note;

/* Full history pages by what they hold; a page is in the index exactly when its pool keeps it. */
typedef struct page_index {
    bool on;
    page_note *notes;  /* [n_pages] */
    int32_t *tokens;   /* [n_pages, 64] token ids, also of pages that are not full yet */
    int32_t *buckets;  /* [n_buckets] first page */
    int32_t n_buckets; /* a power of two */
    int32_t *overlay_owner; /* [overlay pages] the history page of a kept overlay page */
    int32_t *found;    /* [max_pages] scratch of a look-up */
    /* Replaced by a test that makes every hash equal. */
    uint64_t (*hash)(uint64_t before, int64_t position, const int32_t *tokens);
    int64_t n_hits, n_misses, n_unequal, n_attached;
    int64_t n_evicted, n_overlay_evicted;
} page_index;

typedef struct cache_seq {
    int64_t length;
    int64_t n_reserved; /* tokens past length that have history pages */
    int64_t recent_low; /* overlay rows are valid from here on, and below the sink */
    int64_t known_end;  /* token ids are known of [0, known_end), past `length` while appending */
    int64_t pure_end;   /* tokens from here on saw fewer BF16 rows than the contract says */
    uint64_t salt;      /* what else the rows depend on */
    int32_t *history;   /* [max_pages] page numbers */
    int32_t *overlay;   /* [max_pages] or NO_PAGE */
    int32_t *coded;     /* [n_layers] rows below have codes; those up to `length` wait for others: see step.c */
    float *waiting;     /* the rows that wait, see waiting_row(); NULL: none ever does */
} cache_seq;

/* cos and sin of p inv_freq for every page start p = 64 b and every slot p = 0..63. */
typedef struct rope_table {
    oscar_rope rope;
    int32_t n_pairs;
    float *page_cos, *page_sin; /* [max_pages, n_pairs] */
    float *slot_cos, *slot_sin; /* [64, n_pairs] */
} rope_table;

typedef struct cache_layer {
    oscar_layer shape;
    int32_t group; /* query heads a KV head */
    int32_t n_tracked;
    page_side k_side, v_side;      /* quantised history */
    size_t history_offset;         /* of KV head 0 in a history page */
    size_t history_head_bytes;
    size_t history_value_offset;   /* of the values, from the head's start */
    size_t overlay_offset;         /* keys, then values, bf16: page_bf16_at() */
    size_t overlay_head_bytes;
    size_t waiting_offset;         /* floats, see waiting_row() */
    int32_t rope;                  /* index of the rope_table */
    const rotations_layer *fit;    /* NULL in exact mode */
    row_codec *k_codec, *v_codec;  /* [n_kv_heads] */
    float *k_ones, *v_ones;        /* [n_kv_heads][n_groups][d + 1]: what row_codec_prepare() computes */
    float *v_back;                 /* [n_kv_heads, d, d] transposed value rotations; NULL: none */
    float *bias_table;             /* [n_kv_heads][2 n_tracked][64]: magnitude * R_i nu */
    float *middle;                 /* [n_kv_heads][2][n_tracked]: attn_middle() of it, for decode kernels */
    const attn_decode_ops *decode; /* whose form of it decode_table is: those of the cache's making */
    uint8_t *decode_table;         /* [n_kv_heads][decode_table_bytes]; NULL: there is none */
    size_t decode_table_bytes;     /* of a head, a multiple of 64 */
} cache_layer;

/* A run of appended rows of one sequence in one page. */
typedef struct step_segment {
    int32_t first; /* index in the appends */
    int32_t count;
    int32_t seq;
    int32_t page; /* position / 64 */
} step_segment;

/* Query tokens of one sequence that attend together, and which pages of it. */
typedef struct step_block {
    int32_t first; /* index in `queries` */
    int32_t count;
    int32_t seq;
    int32_t page_begin, page_end;
    int32_t first_piece, n_pieces; /* of those pages, merged in order */
    bool shared;     /* every piece is an item of its own */
    int32_t partial; /* first partial result, when shared */
} step_block;

/* Pages are summed in pieces, and the pieces in order. Where a piece begins depends on nothing but the
 * position: not on what else is in the batch, how a prompt was cut, or the number of threads. The
 * first ones are short, or few KV heads would leave threads idle at small contexts. */
#define PIECE_PAGES 16
static inline int32_t piece_start(int32_t piece) {
    return piece == 0 ? 0 : piece == 1 ? 2 : piece == 2 ? 8 : PIECE_PAGES * (piece - 2);
}

static inline int32_t piece_of(int32_t page) {
    return page < 2 ? 0 : page < 8 ? 1 : 2 + page / PIECE_PAGES;
}

/* What one thread works in. */
typedef struct thread_scratch {
    float *keys;      /* [d + 2 n_tracked][64] */
    float *values;    /* [64][d] */
    float *q[2];      /* [ATTN_ROWS_MAX, d + 2 n_tracked] for the history and for BF16 rows: see attend.c */
    float *q_bias;    /* [ATTN_ROWS_MAX] */
    float *sums[2];   /* [ATTN_ROWS_MAX, d + 2] of each: maxima, sums, values */
    float *total[2];  /* the same of the pieces before */
    float *out;       /* [ATTN_ROWS_MAX, d] */
    float *logits;    /* [ATTN_ROWS_MAX, 64] */
    uint64_t *far, *near; /* [ATTN_ROWS_MAX] masks */
    float *pairs;     /* [ATTN_ROWS_MAX, 2, n_tracked] tracked pairs of the queries, not turned */
    float *cosines, *sines; /* [n_tracked] of a page's start */
    attn_decode *decode;
    const attn_decode_ops *decode_ops; /* of the block in hand; NULL: its pages go through floats */
    float *rows;      /* [CODEC_LANES, d] */
} thread_scratch;

typedef struct step_state {
    bool active;
    oscar_step in; /* strides filled in */
    int32_t layer;
    int32_t n_appends;
    int32_t *append_token, *append_seq, *append_pos; /* [n_appends] grouped by sequence */
    int32_t n_segments;
    step_segment *segments;
    int32_t *queries; /* [n_tokens] token indices grouped by first sequence */
    int32_t n_blocks;
    step_block *blocks;
    int32_t n_items;       /* (block, piece, head) */
    int32_t *item_block;   /* [n_items / n_kv_heads] block of each (block, piece) */
    int32_t *item_piece; /* of the block's, 0 where it is not shared */
    uint8_t *codes[2];     /* keys, values: [n_tokens, n_kv_heads, head_dim] */
    uint16_t *params[2];   /* [n_tokens, n_kv_heads, n_groups, 2] */
    uint16_t *rows[2];     /* [n_tokens, n_kv_heads, head_dim] bf16, what is left without the means */
    bool queries_turned;   /* of a step of one token that sees some of the history, together with its keys: */
    float *q;              /* [n_q_heads, head_dim] rotated */
    float *partial;        /* [n_partials][history, BF16 rows][group rows][head_dim + 2] */
    atomic_int *arrived;   /* [n_partials] at a block's first partial and head: pieces that are done */
    atomic_int bad_token;  /* first token with NaN or infinity, or n_tokens */
    /* Written by all threads, so on cache lines of their own: */
    struct {
        _Alignas(64) atomic_int count;
    } next[3]; /* work counters of the phases */
    _Alignas(64) spin_barrier barrier;
} step_state;

struct oscar_cache {
    oscar_cache_options options; /* recent >= 1; pointers cleared */
    int32_t baseline_kivi;       /* tokens a group of the KIVI baseline; 0: off */
    int32_t n_layers;
    cache_layer *layers;
    int32_t n_ropes;
    rope_table *ropes;
    int32_t max_pages; /* page table entries of a sequence */
    page_pool history, overlay;
    bool has_overlay;
    int32_t overlay_budget; /* live and cached overlay pages; more only where all are live */
    page_index index;
    cache_seq *seqs;
    int32_t *seq_scratch; /* [n_seqs_max] counters of step_prepare */
    int32_t *seq_next;    /* [n_seqs_max] */
    step_state step;
    uint8_t *thread_memory; /* CACHE_MAX_THREADS pieces of thread_bytes */
    size_t thread_bytes;
    size_t scratch_bytes;
    void *tables; /* v_back and bias_table of all layers, in large pages; NULL: none */
    size_t tables_bytes;
    void *scratch; /* step arrays */
    int32_t max_partials; /* of the short runs of all sequences, while they are no more than 4096 */
    size_t partial_floats; /* floats of one partial */
    size_t waiting_floats; /* of a sequence's rows that wait; 0: none ever does */
    int32_t max_items;
    size_t max_head_dim, max_q_dim; /* over the layers */
    uint64_t geometry_hash, fit_hash; /* of what a saved sequence depends on, see save.c */
};

/* Its history keeps floats: of an exact cache, and of the KIVI baseline. */
static inline bool cache_is_exact(const oscar_cache *cache) {
    return cache->options.kv_type == OSCAR_KV_F32 || cache->baseline_kivi;
}

/* Comparisons only (oscar eval): oscar_cache_create() with the KIVI quantiser, keys per channel over
 * `group_tokens` tokens, values per token, 2 bits unless the options say otherwise. History is held
 * as float32; oscar_cache_stats.history_bits says what it would take. */
oscar_status cache_create_kivi(oscar_cache **out, const oscar_cache_options *options,
                               int32_t group_tokens, oscar_error *error);

/* Whether `data` is a whole saved sequence of this cache's model, fit and windows, as
 * oscar_seq_restore() wants it; its tokens and bytes. */
oscar_status cache_check_saved(const oscar_cache *cache, const void *data, size_t bytes, int64_t *n_tokens, size_t *used,
                               oscar_error *error);

/* Full pages at the beginning of two checked saved sequences that one page each can hold: the same salt,
 * ids and rows. 0 where there are no more than `least`, which is found out without looking at all. */
int32_t cache_saved_common(const oscar_cache *cache, const void *a, size_t a_bytes, const void *b, size_t b_bytes, int32_t least);
/* Restores a checked saved sequence with that many first pages held together with `donor`, which was
 * restored from the other one. */
oscar_status cache_restore_beside(oscar_cache *cache, int32_t seq, const void *data, size_t bytes, int32_t donor, int32_t n_shared,
                                  oscar_error *error);

/* Fills geometry_hash and fit_hash. */
void cache_fingerprint(oscar_cache *cache, const oscar_cache_options *options);

/* share.c. Takes evict the least recently used cached page when no page is free (overlay: when the
 * budget is used up); NO_PAGE when all are live. */
bool share_init(oscar_cache *cache);
void share_destroy(oscar_cache *cache);
int32_t cache_take_history(oscar_cache *cache);
int32_t cache_take_overlay(oscar_cache *cache);
/* Puts the pages that the tokens [begin, end) completed into the index, or replaces them by equal
 * ones that are there. */
void share_completed(oscar_cache *cache, cache_seq *seq, int64_t begin, int64_t end);
/* Pages b of the index with this parent, salt (of first pages) and ids, one after the other: NO_PAGE
 * begins and ends. */
int32_t share_next(const oscar_cache *cache, int32_t parent, uint64_t salt, int32_t b, const int32_t *tokens, int32_t after);
/* Takes a page that is live once, and has no children, out of the index: it is to be written. */
void share_forget(oscar_cache *cache, int32_t page);

/* seq.c. References BF16 rows that the index still has, for a sequence that lacks some of its recent
 * window, and notes from where on its tokens are no longer what the contract says. */
void seq_settle(oscar_cache *cache, cache_seq *seq);
/* History pages that clearing the sequence would leave free or cached. */
int32_t seq_own_pages(const oscar_cache *cache, const cache_seq *seq);
/* BF16 rows that the query at position seq->length would see but that are gone. */
int64_t seq_missing_rows(const oscar_cache *cache, const cache_seq *seq);

/* Most query rows of a short run, whose pages threads share; 0: there is none. */
int32_t step_short_rows(int32_t group);
/* The parts of a step, see step.c. */
void step_append_phase(oscar_cache *cache, thread_scratch *scratch, bool store);
void step_store_phase(oscar_cache *cache);
void step_kivi_phase(oscar_cache *cache);
void step_attend_phase(oscar_cache *cache, int32_t n_threads, thread_scratch *scratch);
/* Whether a query of the first block sees something of the history. */
bool step_sees_history(const oscar_cache *cache);
/* Turns the queries of one KV head of a step of one token. */
void step_turn_queries(oscar_cache *cache, int32_t head, thread_scratch *scratch);
/* The scratch of a thread for a layer. */
thread_scratch step_scratch(const oscar_cache *cache, int32_t thread);

/* Gives the waiting rows of a sequence their codes, which does not change what anybody sees: for who reads
 * pages that are not full. No step may be in flight. */
void cache_settle_codes(const oscar_cache *cache, int32_t seq);
/* Whether rows wait for others before they get codes: no query may see them quantised meanwhile. */
static inline bool cache_codes_wait(const oscar_cache *cache) {
    return !cache_is_exact(cache) && cache->options.recent >= CODEC_LANES;
}
/* Rows below this have codes when the sequence is `length` long; more, where a prompt or a rollback ends. */
static inline int64_t cache_coded(int64_t length) { return length / CODEC_LANES * CODEC_LANES; }

/* Positions of page b that the query at t sees in BF16 and in the history. */
void cache_masks(const oscar_cache *cache, const cache_seq *seq, int32_t window, int32_t b,
                 int64_t t, uint64_t *far, uint64_t *near);

/* Whether overlay page b has all its 64 rows, where they are valid from recent_low on. */
static inline bool cache_is_whole(const oscar_cache *cache, int64_t recent_low, int32_t b) {
    int64_t first = (int64_t)b * OSCAR_PAGE_TOKENS;
    return cache->has_overlay && (recent_low <= first || first + OSCAR_PAGE_TOKENS <= cache->options.sink);
}

/* A row that waits for its codes, [head_dim] without the means: waiting [n_layers][16][n_kv_heads][2][head_dim]. */
static inline float *waiting_row(const cache_layer *layer, const cache_seq *seq, int32_t head, int side, int64_t position) {
    int64_t row = (position % CODEC_LANES * layer->shape.n_kv_heads + head) * 2 + side;
    return seq->waiting + layer->waiting_offset + row * layer->shape.head_dim;
}

static inline uint8_t *layer_history(const cache_layer *layer, uint8_t *page, int32_t head) {
    return page + layer->history_offset + (size_t)head * layer->history_head_bytes;
}
static inline uint16_t *layer_overlay_keys(const cache_layer *layer, uint8_t *page, int32_t head) {
    return (uint16_t *)(void *)(page + layer->overlay_offset +
                                (size_t)head * layer->overlay_head_bytes);
}
static inline uint16_t *layer_overlay_values(const cache_layer *layer, uint8_t *page, int32_t head) {
    return layer_overlay_keys(layer, page, head) + (size_t)layer->shape.head_dim * OSCAR_PAGE_TOKENS;
}

#endif
