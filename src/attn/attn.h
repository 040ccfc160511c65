/*
 * attn.h - attention of a block of query rows over tiles of 64 positions.
 *
 * Everything is a tile: 64 positions aligned to 64, keys as [head_dim + 2 n_tracked][64] floats
 * (the last rows are the constant table R_i nu of the tracked key mean), values as [64][head_dim].
 * A query row sees of a tile the positions whose bit is set in its mask, and keeps a running
 * maximum, sum and weighted value (online softmax).
 */
#ifndef OSCAR_ATTN_H
#define OSCAR_ATTN_H

#include "codec/page.h"

/* Query rows that go through a tile together; a row is one query head of one token. */
#define ATTN_ROWS_MAX 128
/* So few that what a page costs is reading it. */
#define ATTN_FEW_ROWS 8
/* Logits of decode kernels are powers of two. */
#define LOG2_E 1.44269504f

/* State of a block of rows. Arrays are 64-byte aligned. */
typedef struct attn_rows {
    int32_t n_rows;
    int32_t head_dim;   /* of the values and the accumulator */
    int32_t q_dim;      /* head_dim + 2 n_tracked: floats of a query row */
    float logit_scale;
    float logit_softcap; /* 0: off */
    float *q;            /* [n_rows, q_dim] query in the keys' basis, then the turned tracked pairs */
    const float *q_bias; /* [n_rows] added to q.k before the scale: q.mu */
    float *row_max;      /* [n_rows] -inf at the start */
    float *row_sum;      /* [n_rows] 0 at the start */
    float *acc;          /* [n_rows, head_dim] 0 at the start */
    float *logits;       /* [n_rows, 64] scratch */
} attn_rows;

typedef struct attn_ops {
    const char *name;
    /* Quantised page sides to floats. keys: [head_dim][64]; values: [64][head_dim].
     * Slots outside `valid` (a bit a slot) are written as zeros whatever the page holds there. */
    void (*unpack_keys)(const page_side *side, const uint8_t *page, uint64_t valid, float *keys);
    void (*unpack_values)(const page_side *side, const uint8_t *page, uint64_t valid, float *values);
    /* A side of BF16 rows, see page_bf16_at(): keys to [head_dim][64], values to [64][head_dim]. */
    void (*widen_keys)(int32_t head_dim, const uint16_t *page, uint64_t valid, float *keys);
    void (*widen_values)(int32_t head_dim, const uint16_t *page, uint64_t valid, float *values);
    /* n fp16 numbers, a multiple of 16. */
    void (*widen_half)(int32_t n, const uint16_t *x, float *y);
    /* One tile. keys: [q_dim][64], values: [64][head_dim]; masks: [n_rows] visible positions.
     * Rows with an empty mask are left as they were. Positions outside every mask must be finite.
     * What a row receives does not depend, to the bit, on the other rows of the block. */
    void (*tile)(attn_rows *rows, const float *keys, const float *values, const uint64_t *masks);
    /* A tile of BF16 rows, read as they lie, for at most ATTN_FEW_ROWS rows: to the bit what widen_keys, widen_values
     * and tile make of it, without the way through memory. table: [q_dim - head_dim][64], the keys' last rows. NULL:
     * there is none. next_keys: those of the tile to come, which are asked for, or NULL. */
    void (*tile_few)(attn_rows *rows, const uint16_t *keys, const uint16_t *values, const float *table, uint64_t valid,
                     const uint64_t *masks, const uint16_t *next_keys);
    /* y[r] = x[r] U for n_rows rows: row vector times matrix, [head_dim, head_dim]. x and y do not
     * overlap; any n_rows, rows as independent as above. */
    void (*rotate)(int32_t head_dim, const float *u, int32_t n_rows, const float *x,
                   int64_t x_stride, float *y, int64_t y_stride);
    /* The tracked pairs of every query turned back by a page's start: for pair p of row r,
     * x = pairs[r][0][p], y = pairs[r][1][p] ([n_rows, 2, n_pairs]),
     * q[head_dim + 2 p] = x cos[p] + y sin[p], q[head_dim + 2 p + 1] = y cos[p] - x sin[p]. */
    void (*turn)(attn_rows *rows, int32_t n_pairs, const float *pairs, const float *cosines,
                 const float *sines);
} attn_ops;

/* Asks for a line of memory. near: isa_asks_near(). */
static inline void attn_ask_line(const uint8_t *at, bool near) {
    if (near)
        __builtin_prefetch(at, 0, 3);
    else
        __builtin_prefetch(at, 0, 2);
}

/* Rows against quantised pages by integer dot products on the codes, without unpacking them to floats.
 * Queries and weights are rounded to 15 bits and a sign (AMX: weights to 16 bits), of the largest magnitude of a
 * row's group (weights: of the page's), and go through as a high and a low byte; everything else is float. So
 * results agree with the tiles to about 3e-5, not to the bit. What a row receives does not depend, to the bit, on
 * the other rows of the block: decode, verification and prompts go through the same kernels, so that a
 * token's answer is the same however its batch was cut. */

/* Rows of a stripe, which pass a page together. */
#define ATTN_DECODE_ROWS 16
/* Chunks of 16 tracked pairs for which the table is kept in tiles. */
#define ATTN_BIAS_CHUNKS 4
/* Chunks of 64 channels of all groups together. */
#define ATTN_KEY_CHUNKS ((OSCAR_MAX_HEAD_DIM + 63) / 64)
#define ATTN_PAIRS_MAX (OSCAR_MAX_HEAD_DIM / 2)
/* Floats of a table in halves of so many pairs. */
#define ATTN_HALF_TABLE (2 * ATTN_PAIRS_MAX * 32)
/* Channels for whose pairs there are tables. */
#define ATTN_TABLES_DIM 256

/* What turns a vector to the angle that each pair of a bias table has at a page's middle: cosines and sines [n_pairs].
 * bias_table: [2 n_pairs][64], as in attn_decode. */
void attn_middle(const float *bias_table, int32_t n_pairs, float *cosines, float *sines);

/* AMX: 16 tracked pairs as B operands: slots 32 to 47 and 48 to 63, high and low, pair, slot and cos/sin. */
typedef uint16_t bias_chunk[2][2][16][32];

typedef struct attn_decode {
    /* Set by the caller. */
    attn_rows *rows; /* at most ATTN_ROWS_MAX; in a page a view of a stripe. Kernels may write the turned pairs to q */
    const page_side *k_side, *v_side;
    const float *bias_table; /* [q_dim - head_dim][64] the constant rows of the keys: 2 p, 2 p + 1 the coordinates of
                              * one vector, turned by the same angle from slot to slot */
    const void *table; /* what make_table() made of bias_table; NULL: it is made anew */
    /* What pages turn the tracked pairs of the queries by: their page's start, and attn_middle() of the table. */
    const float *pairs;                /* [n_rows, 2, n_pairs] the pairs as the queries have them */
    const int32_t *tracked;            /* [n_pairs] where an angle lies in the rows of a page */
    const float *middle;               /* [2, n_pairs] cosines and sines */
    struct attn_angles {
        const float *cosines, *sines;
    } here, next;                      /* of the page in hand; of the next one if next_keys are known */
    const uint8_t *next_keys; /* of the page after the one in hand; NULL: none, or not known */
    /* What pages to come will read: a page asks for it line by line while it works, for `ask_step` lines at a time, since a
     * core has few lines on their way at once and waits with all others meanwhile. Bytes [at, end), multiples of 64. */
    struct attn_ask {
        const uint8_t *at, *end;
    } ask[2];
    int32_t ask_step;
    bool ask_near; /* isa_asks_near() */
    /* Set by begin. */
    float q_scale[ATTN_ROWS_MAX][CODEC_MAX_GROUPS]; /* of the rounded query of a group, times logit_scale / ln 2 */
    float q_sum[ATTN_ROWS_MAX][CODEC_MAX_GROUPS];   /* of that query over the group, scaled */
    _Alignas(64) int8_t q_bytes[ATTN_ROWS_MAX + ATTN_DECODE_ROWS][2][OSCAR_MAX_HEAD_DIM]; /* high, low */
    /* Of the page in hand. */
    int32_t first; /* row of the stripe in hand */
    bool values_once; /* AMX: one stripe reads the values in hand */
    const uint8_t *spread_of; /* AMX: keys whose codes are in key_tiles */
    const uint8_t *scored_of; /* AMX: keys whose products, and those of their bias, are there already */
    float alpha[ATTN_DECODE_ROWS];    /* factor of all before */
    float p_scale[ATTN_DECODE_ROWS];  /* of the rounded weights */
    float p_offset[ATTN_DECODE_ROWS]; /* sum of weight times value offset */
    _Alignas(64) int8_t p_bytes[ATTN_DECODE_ROWS][2][64]; /* high, low */
    /* AMX: the thread's tile configuration before begin, and which one is there now. */
    _Alignas(64) uint8_t caller_tiles[64];
    int32_t tiles;
    /* AMX: the constant rows as BF16 in tiles, and room for them. */
    const bias_chunk *bias_tiles;
    _Alignas(64) bias_chunk own_bias_tiles[ATTN_BIAS_CHUNKS];
    union {
        /* AMX: queries as sums of two BF16 numbers: [high, low][n_rows][head_dim, to 32]. */
        _Alignas(64) uint16_t q_halves[2][(ATTN_ROWS_MAX + ATTN_DECODE_ROWS) * OSCAR_MAX_HEAD_DIM];
        /* AVX2, VBMI: queries as tables: [n_rows][head_dim / 16][256], attn_decode_tables.h. */
        _Alignas(64) uint8_t q_tables[ATTN_ROWS_MAX * ATTN_TABLES_DIM * 16];
    };
    /* AMX: products of a stripe with keys: [rows from 0, from 8][8 rows as high and low bytes][64 tokens]. */
    _Alignas(64) int32_t key_products[2][16][4][16];
    /* AMX: turned pairs as sums of two BF16 numbers, [row, after and before the middle][chunks in use][high, low][32], and
     * their products with the table: slots 0 to 15, 16 to 31 from the middle. */
    _Alignas(64) uint16_t bias_operands[2 * ATTN_DECODE_ROWS * ATTN_BIAS_CHUNKS * 2 * 32];
    _Alignas(64) float bias_products[2 * ATTN_DECODE_ROWS][2][16];
    /* AMX: the page in hand, codes one a byte: 16 rows of 64 bytes a tile. AVX2, VBMI: keys, two codes a byte. */
    _Alignas(64) uint8_t key_tiles[4 * 1024 * ATTN_KEY_CHUNKS], value_tiles[1024 * OSCAR_MAX_HEAD_DIM / 16];
    /* AMX: BF16 rows in hand, where they cannot be taken from their page: keys [head_dim / 2][64][2],
     * values [32][head_dim][2]. */
    _Alignas(64) uint16_t tile_keys[(OSCAR_MAX_HEAD_DIM + 16) * 64], tile_values[OSCAR_MAX_HEAD_DIM * 64];
    const uint16_t *b_keys, *b_values; /* those, or the page itself */
    /* The bias_table in halves (attn_decode_bias.h): NULL until it is needed, and room for it. */
    const float *half_table;
    bool tracked_run; /* set by open: tracked[] is a run of whole numbers */
    _Alignas(64) float own_half_table[ATTN_HALF_TABLE];
} attn_decode;

/* Puts down what pages to come will read. */
static inline void attn_ask_for(attn_decode *d, const uint8_t *keys, size_t key_bytes, const uint8_t *values, size_t value_bytes) {
    enum { POINTS = 5 }; /* of a page, at which it asks */
    d->ask[0] = (struct attn_ask){values, values + value_bytes};
    d->ask[1] = (struct attn_ask){keys, keys + key_bytes};
    d->ask_near = isa_asks_near();
    d->ask_step = (int32_t)((key_bytes + value_bytes) / 64 + POINTS - 1) / POINTS;
}

typedef struct attn_decode_ops {
    const char *name;
    /* The bias table of a head in the form that its pages want: bytes of it, and the table, 64-byte aligned. NULL:
     * they take it as it is. */
    size_t (*table_bytes)(int32_t n_pairs);
    void (*make_table)(const float *bias_table, int32_t n_pairs, void *table);
    /* Before anything else, with what does not depend on the queries; NULL: nothing to do. */
    void (*open)(attn_decode *decode);
    /* Takes the rotated queries over from rows->q; call it after they were written, before the first page. */
    void (*begin)(attn_decode *decode);
    /* One page, as attn_ops.tile: keys and values point to the page sides. */
    void (*page)(attn_decode *decode, const uint8_t *keys, const uint8_t *values, uint64_t valid,
                 const uint64_t *masks);
    /* The same of queries for BF16 rows; where `overlay` is not NULL. */
    void (*begin_overlay)(attn_decode *decode);
    /* A page of BF16 rows (page_bf16_at()); NULL: it goes through tiles. Rows outside `valid` may hold
     * anything. */
    void (*overlay)(attn_decode *decode, const uint16_t *keys, const uint16_t *values, uint64_t valid,
                    const uint64_t *masks);
    /* After the last page; NULL: nothing to do. */
    void (*end)(attn_decode *decode);
} attn_decode_ops;

extern const attn_decode_ops attn_decode_int2_avx2;       /* in x86-64 builds */
extern const attn_decode_ops attn_decode_int2_avxvnni;    /* in x86-64 builds */
extern const attn_decode_ops attn_decode_int2_avx512vnni; /* in x86-64 builds */
extern const attn_decode_ops attn_decode_int2_avx512vbmi; /* in x86-64 builds */
extern const attn_decode_ops attn_decode_int2_amx;        /* in x86-64 builds */
extern const attn_decode_ops attn_decode_int2_neondot;    /* in AArch64 builds */
/* The one of isa_current(); NULL where tiles are all there is. */
const attn_decode_ops *attn_decode_current(void);

extern const attn_ops attn_ops_ref;
extern const attn_ops attn_ops_avx2;   /* in x86-64 builds */
extern const attn_ops attn_ops_avx512; /* in x86-64 builds */
extern const attn_ops attn_ops_neon;   /* in AArch64 builds */
/* The table of isa_current(). */
const attn_ops *attn_ops_current(void);

#endif
