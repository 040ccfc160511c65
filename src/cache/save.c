/*
 * save.c - a sequence as bytes, and back.
 *
 * Rows are written one by one in channel order, whatever the page layout of this backend:
 *
 *   header   saved_header below, little-endian
 *   history  for each layer, KV head, side (keys, values), token: the codes packed from the lowest
 *            bit up, bits * head_dim / 8 bytes, then [n_groups][2] fp16 step, offset; in an exact
 *            cache [head_dim] float32
 *   overlay  (quantised caches) for each layer, KV head, side and each position in [0, sink) and
 *            [recent_low, n_tokens) below n_tokens: [head_dim] bf16
 *   tokens   [n_known] int32 ids
 *   check    XXH3-64 of everything before it
 */
#include <stddef.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "cache/cache.h"

#define SAVED_MAGIC 0x31514553u /* "SEQ1" */
#define SAVED_VERSION 3u /* before 3 BF16 rows were turned */

typedef struct saved_header {
    uint32_t magic;
    uint32_t version;
    uint64_t bytes; /* of the whole, the check included */
    uint64_t geometry_hash;
    uint64_t fit_hash;
    int32_t kv_type, sink, recent, reserved;
    int64_t n_tokens;
    int64_t recent_low;
    uint64_t salt;   /* from here on: version 2 */
    int64_t n_known; /* the first tokens, whose ids are known and whose rows are what the contract says */
} saved_header;

#define HEADER_BYTES_1 offsetof(saved_header, salt)

static size_t header_bytes(uint32_t version) { return version == 1 ? HEADER_BYTES_1 : sizeof(saved_header); }

/* ------------------------------------------------------------------------------------ fingerprint */

static void hash_floats(XXH3_state_t *state, const float *array, size_t n) {
    uint8_t present = array != NULL;
    XXH3_64bits_update(state, &present, 1);
    if (array) XXH3_64bits_update(state, array, n * sizeof(float));
}

static void hash_fit(XXH3_state_t *state, const cache_layer *layer) {
    const rotations_layer *fit = layer->fit;
    size_t heads = (size_t)layer->shape.n_kv_heads, d = (size_t)layer->shape.head_dim;
    const int32_t numbers[] = {layer->k_codec[0].bits, layer->v_codec[0].bits, layer->k_codec[0].group};
    XXH3_64bits_update(state, numbers, sizeof numbers);
    if (!fit) return;
    const int32_t choices[] = {fit->recipe, fit->ldlq_k, fit->gain_k, fit->gain_v, fit->n_tracked};
    XXH3_64bits_update(state, choices, sizeof choices);
    XXH3_64bits_update(state, (const float[]){fit->clip_k, fit->clip_v}, 2 * sizeof(float));
    if (fit->n_tracked) XXH3_64bits_update(state, fit->tracked, heads * (size_t)fit->n_tracked * sizeof(int32_t));
    hash_floats(state, fit->k_rotation, heads * d * d);
    hash_floats(state, fit->v_rotation, heads * d * d);
    hash_floats(state, fit->k_mean, heads * d);
    hash_floats(state, fit->k_tracked, heads * d);
    hash_floats(state, fit->v_mean, heads * d);
    hash_floats(state, fit->k_metric_b, heads * d * d);
    hash_floats(state, fit->k_metric_d, heads * d);
    hash_floats(state, fit->v_metric_b, heads * d * d);
    hash_floats(state, fit->v_metric_d, heads * d);
}

void cache_fingerprint(oscar_cache *cache, const oscar_cache_options *options) {
    XXH3_state_t geometry, fit;
    XXH3_64bits_reset(&geometry);
    XXH3_64bits_reset(&fit);
    for (int32_t i = 0; i < cache->n_layers; i++) {
        const oscar_layer *l = &options->layers[i];
        const int32_t numbers[] = {l->n_kv_heads, l->head_dim, l->window, l->rope.layout, l->rope.n_dims};
        XXH3_64bits_update(&geometry, numbers, sizeof numbers);
        XXH3_64bits_update(&geometry, &l->rope.magnitude, sizeof(float));
        XXH3_64bits_update(&geometry, l->rope.inv_freq, sizeof(float) * (size_t)l->rope.n_dims / 2);
        hash_fit(&fit, &cache->layers[i]);
    }
    cache->geometry_hash = XXH3_64bits_digest(&geometry);
    cache->fit_hash = XXH3_64bits_digest(&fit);
}

/* ------------------------------------------------------------------------------------------ sizes */

static size_t row_bytes(const oscar_cache *cache, const page_side *side) {
    if (cache_is_exact(cache)) return (size_t)side->head_dim * sizeof(float);
    return (size_t)side->bits * (size_t)side->head_dim / 8 + (size_t)side->n_groups * 2 * sizeof(uint16_t);
}

static bool has_overlay_row(const oscar_cache *cache, int64_t position, int64_t recent_low) {
    return cache->has_overlay && (position < cache->options.sink || position >= recent_low);
}

/* Saved BF16 rows of the positions below `end`. */
static size_t n_overlay_rows(const oscar_cache *cache, const saved_header *h, int64_t end) {
    int64_t sink = cache->options.sink;
    if (!cache->has_overlay) return 0;
    if (h->recent_low <= sink || end <= sink) return (size_t)end;
    return (size_t)(sink + (end > h->recent_low ? end - h->recent_low : 0));
}

static size_t saved_bytes(const oscar_cache *cache, const saved_header *h) {
    size_t history = 0, overlay = 0;
    for (int32_t i = 0; i < cache->n_layers; i++) {
        const cache_layer *l = &cache->layers[i];
        history += (size_t)l->shape.n_kv_heads * (row_bytes(cache, &l->k_side) + row_bytes(cache, &l->v_side));
        overlay += (size_t)l->shape.n_kv_heads * 2 * (size_t)l->shape.head_dim * sizeof(uint16_t);
    }
    return header_bytes(h->version) + history * (size_t)h->n_tokens + overlay * n_overlay_rows(cache, h, h->n_tokens) +
           (size_t)h->n_known * sizeof(int32_t) + sizeof(uint64_t);
}

/* The first BF16 row past the sink that is saved: what a rollback within the lookahead can reach. */
static int64_t saved_low(const oscar_cache *cache, const cache_seq *s) {
    if (!cache->has_overlay) return s->length;
    int64_t low = s->length - cache->options.recent - cache->options.lookahead;
    if (low < s->recent_low) low = s->recent_low;
    return low < 0 ? 0 : low < s->length ? low : s->length;
}

static saved_header make_header(const oscar_cache *cache, const cache_seq *s) {
    int64_t known = s->known_end < s->pure_end ? s->known_end : s->pure_end;
    saved_header h = {.magic = SAVED_MAGIC, .version = SAVED_VERSION, .geometry_hash = cache->geometry_hash,
                      .fit_hash = cache->fit_hash, .kv_type = cache->options.kv_type, .sink = cache->options.sink,
                      .recent = cache->options.recent, .n_tokens = s->length, .recent_low = saved_low(cache, s),
                      .salt = s->salt, .n_known = known < s->length ? known : s->length};
    h.bytes = saved_bytes(cache, &h);
    return h;
}

size_t oscar_seq_save_bytes(const oscar_cache *cache, int32_t seq) {
    if (seq < 0 || seq >= cache->options.n_seqs_max) return 0;
    return make_header(cache, &cache->seqs[seq]).bytes;
}

/* ------------------------------------------------------------------------------------------- rows */

/* Eight codes are `bits` bytes, and head_dim is a multiple of 16. Inlined with constant bits. */
static inline __attribute__((always_inline)) size_t pack_codes(int32_t n, size_t bits, const uint8_t *codes, uint8_t *out) {
    for (int32_t i = 0; i < n; i += 8, codes += 8, out += bits) {
        uint32_t word = 0;
        for (size_t j = 0; j < 8; j++) word |= (uint32_t)codes[j] << bits * j;
        memcpy(out, &word, bits);
    }
    return (size_t)n * bits / 8;
}

static inline __attribute__((always_inline)) size_t unpack_codes(int32_t n, size_t bits, const uint8_t *in, uint8_t *codes) {
    for (int32_t i = 0; i < n; i += 8, codes += 8, in += bits) {
        uint32_t word = 0;
        memcpy(&word, in, bits);
        for (size_t j = 0; j < 8; j++) codes[j] = (uint8_t)(word >> bits * j & ((1u << bits) - 1));
    }
    return (size_t)n * bits / 8;
}

static size_t pack_row(const page_side *side, const uint8_t *codes, const uint16_t *params, uint8_t *out) {
    int32_t d = side->head_dim;
    size_t n = side->bits == 2   ? pack_codes(d, 2, codes, out)
               : side->bits == 3 ? pack_codes(d, 3, codes, out)
                                 : pack_codes(d, 4, codes, out);
    memcpy(out + n, params, (size_t)side->n_groups * 4);
    return n + (size_t)side->n_groups * 4;
}

static size_t unpack_row(const page_side *side, const uint8_t *in, uint8_t *codes, uint16_t *params) {
    int32_t d = side->head_dim;
    size_t n = side->bits == 2   ? unpack_codes(d, 2, in, codes)
               : side->bits == 3 ? unpack_codes(d, 3, in, codes)
                                 : unpack_codes(d, 4, in, codes);
    memcpy(params, in + n, (size_t)side->n_groups * 4);
    return n + (size_t)side->n_groups * 4;
}

/* The saved rows of one layer, head and side. */
typedef struct saved_rows {
    const cache_layer *layer;
    int32_t head;
    int side;
    bool overlay;
    size_t at;        /* of the first one, from the header's beginning */
    size_t row_bytes;
} saved_rows;

/* The rows that come next in the saved form, the first ones where *r is zeroed; false after the last. */
static bool next_rows(const oscar_cache *cache, const saved_header *h, saved_rows *r) {
    if (!r->layer) {
        *r = (saved_rows){.layer = cache->layers, .at = header_bytes(h->version)};
    } else {
        r->at += r->row_bytes * (r->overlay ? n_overlay_rows(cache, h, h->n_tokens) : (size_t)h->n_tokens);
        r->side ^= 1;
        if (r->side == 0 && ++r->head == r->layer->shape.n_kv_heads) {
            r->head = 0;
            if (++r->layer == cache->layers + cache->n_layers) {
                if (r->overlay) return false;
                r->layer = cache->layers;
                r->overlay = true;
            }
        }
    }
    r->row_bytes = r->overlay ? (size_t)r->layer->shape.head_dim * sizeof(uint16_t)
                              : row_bytes(cache, r->side ? &r->layer->v_side : &r->layer->k_side);
    return true;
}

/* Where the row of a position is; it must be there. */
static size_t row_at(const oscar_cache *cache, const saved_header *h, const saved_rows *r, int64_t position) {
    return r->at + r->row_bytes * (r->overlay ? n_overlay_rows(cache, h, position) : (size_t)position);
}

/* One row between slot `slot` of a history page and the saved form. */
static void move_history_row(const oscar_cache *cache, const saved_rows *r, int32_t page, int32_t slot, uint8_t *bytes, bool save) {
    int32_t d = r->layer->shape.head_dim;
    const page_side *layout = r->side ? &r->layer->v_side : &r->layer->k_side;
    uint8_t *base = layer_history(r->layer, pool_page(&cache->history, page), r->head) + (r->side ? r->layer->history_value_offset : 0);
    if (cache_is_exact(cache)) {
        float *rows = (float *)(void *)base;
        int32_t stride = r->side ? 1 : OSCAR_PAGE_TOKENS;
        rows += r->side ? slot * d : slot;
        for (int32_t i = 0; i < d; i++) {
            if (save)
                memcpy(bytes + 4 * i, rows + i * stride, 4);
            else
                memcpy(rows + i * stride, bytes + 4 * i, 4);
        }
        return;
    }
    uint8_t codes[OSCAR_MAX_HEAD_DIM];
    uint16_t params[2 * CODEC_MAX_GROUPS];
    if (save) {
        page_get_row(layout, base, slot, codes, params);
        pack_row(layout, codes, params, bytes);
    } else {
        unpack_row(layout, bytes, codes, params);
        page_put_row(layout, base, slot, codes, params);
    }
}

static void move_overlay_row(const oscar_cache *cache, const saved_rows *r, int32_t page, int32_t slot, uint8_t *bytes, bool save) {
    int32_t d = r->layer->shape.head_dim;
    uint8_t *memory = pool_page(&cache->overlay, page);
    page_side_kind kind = r->side ? PAGE_VALUE : PAGE_KEY;
    uint16_t *rows = r->side ? layer_overlay_values(r->layer, memory, r->head) : layer_overlay_keys(r->layer, memory, r->head);
    for (int32_t i = 0; i < d; i++) {
        uint16_t *at = rows + page_bf16_at(kind, d, slot, i);
        if (save)
            memcpy(bytes + 2 * i, at, 2);
        else
            memcpy(at, bytes + 2 * i, 2);
    }
}

/* All rows of a sequence. Pages that it shares hold theirs already when it is restored. */
static void move_rows(const oscar_cache *cache, const cache_seq *s, const saved_header *h, uint8_t *bytes, bool save) {
    for (saved_rows r = {0}; next_rows(cache, h, &r);) {
        const page_pool *pool = r.overlay ? &cache->overlay : &cache->history;
        for (int64_t p = 0; p < h->n_tokens; p++) {
            int32_t page = (r.overlay ? s->overlay : s->history)[p / OSCAR_PAGE_TOKENS], slot = (int32_t)(p % OSCAR_PAGE_TOKENS);
            if (r.overlay && (page == NO_PAGE || !has_overlay_row(cache, p, h->recent_low))) continue;
            if (!save && pool_is_common(pool, page)) continue;
            uint8_t *at = bytes + row_at(cache, h, &r, p);
            if (r.overlay)
                move_overlay_row(cache, &r, page, slot, at, save);
            else
                move_history_row(cache, &r, page, slot, at, save);
        }
    }
}

static size_t tokens_at(const saved_header *h) {
    return h->bytes - sizeof(uint64_t) - (size_t)h->n_known * sizeof(int32_t);
}

static void move_tokens(const oscar_cache *cache, const cache_seq *s, const saved_header *h, uint8_t *bytes, bool save) {
    bytes += tokens_at(h);
    for (int64_t p = 0, n = h->n_known; p < n; p += OSCAR_PAGE_TOKENS, bytes += OSCAR_PAGE_TOKENS * sizeof(int32_t)) {
        int32_t *tokens = cache->index.tokens + (size_t)s->history[p / OSCAR_PAGE_TOKENS] * OSCAR_PAGE_TOKENS;
        size_t count = (size_t)(n - p < OSCAR_PAGE_TOKENS ? n - p : OSCAR_PAGE_TOKENS);
        memcpy(save ? (void *)bytes : tokens, save ? (const void *)tokens : bytes, count * sizeof *tokens);
    }
}

oscar_status oscar_seq_save(const oscar_cache *cache, int32_t seq, void *out, size_t out_bytes, oscar_error *error) {
    size_t need = oscar_seq_save_bytes(cache, seq);
    if (need == 0 || !out) return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "sequence %d or out", seq);
    if (out_bytes < need)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "out holds %zu bytes, %zu are needed", out_bytes, need);
    const cache_seq *s = &cache->seqs[seq];
    cache_settle_codes(cache, seq);
    saved_header header = make_header(cache, s);
    memcpy(out, &header, sizeof header);
    move_rows(cache, s, &header, out, true);
    move_tokens(cache, s, &header, out, true);
    uint64_t check = XXH3_64bits(out, need - sizeof check);
    memcpy((uint8_t *)out + need - sizeof check, &check, sizeof check);
    return OSCAR_OK;
}

/* ---------------------------------------------------------------------------------------- restore */

/* Version 1 knew no ids. */
static oscar_status read_header(const void *data, size_t bytes, saved_header *h, oscar_error *error) {
    memset(h, 0, sizeof *h);
    if (!data || bytes < HEADER_BYTES_1 + sizeof(uint64_t))
        return error_set(error, OSCAR_ERROR_FORMAT, 0, "saved sequence: %zu bytes are no header", bytes);
    memcpy(h, data, HEADER_BYTES_1);
    if (h->magic != SAVED_MAGIC) return error_set(error, OSCAR_ERROR_FORMAT, 0, "not a saved sequence");
    if (h->version < 1 || h->version > SAVED_VERSION)
        return error_set(error, OSCAR_ERROR_UNSUPPORTED, 4, "saved sequence of version %u, this build reads 1 to %u", h->version,
                         SAVED_VERSION);
    if (h->version < 3 && h->kv_type != OSCAR_KV_F32)
        return error_set(error, OSCAR_ERROR_UNSUPPORTED, 4, "saved sequence of version %u, whose BF16 rows are in another basis: "
                         "compute it again", h->version);
    if (h->bytes > bytes || h->bytes < header_bytes(h->version) + sizeof(uint64_t))
        return error_set(error, OSCAR_ERROR_FORMAT, 8, "saved sequence is cut: %llu bytes of %llu",
                         (unsigned long long)bytes, (unsigned long long)h->bytes);
    memcpy(h, data, header_bytes(h->version));
    return OSCAR_OK;
}

static oscar_status check_saved(const oscar_cache *cache, const void *data, size_t bytes, saved_header *h,
                                oscar_error *error) {
    oscar_status status = read_header(data, bytes, h, error);
    if (status) return status;
    uint64_t check;
    memcpy(&check, (const uint8_t *)data + h->bytes - sizeof check, sizeof check);
    if (XXH3_64bits(data, h->bytes - sizeof check) != check)
        return error_set(error, OSCAR_ERROR_FORMAT, (int64_t)(h->bytes - sizeof check), "saved sequence: wrong checksum");
    if (h->geometry_hash != cache->geometry_hash)
        return error_set(error, OSCAR_ERROR_MISMATCH, 16, "saved sequence of a model with other layers, heads or RoPE");
    if (h->fit_hash != cache->fit_hash || h->kv_type != cache->options.kv_type)
        return error_set(error, OSCAR_ERROR_MISMATCH, 24, "saved sequence of other rotations, recipe or bits");
    if (h->sink != cache->options.sink || h->recent != cache->options.recent)
        return error_set(error, OSCAR_ERROR_MISMATCH, 36, "saved sequence has windows %d, %d, this cache %d, %d", h->sink,
                         h->recent, cache->options.sink, cache->options.recent);
    int64_t room = (int64_t)cache->max_pages * OSCAR_PAGE_TOKENS;
    if (h->n_tokens > room)
        return error_set(error, OSCAR_ERROR_NO_SPACE, 48, "saved sequence of %lld tokens, this cache holds %lld",
                         (long long)h->n_tokens, (long long)room);
    if (h->n_tokens < 0 || h->recent_low < 0 || h->recent_low > h->n_tokens || h->n_known < 0 || h->n_known > h->n_tokens ||
        saved_bytes(cache, h) != h->bytes)
        return error_set(error, OSCAR_ERROR_FORMAT, 48, "saved sequence of %lld tokens, %lld known, in %llu bytes",
                         (long long)h->n_tokens, (long long)h->n_known, (unsigned long long)h->bytes);
    return OSCAR_OK;
}

oscar_status cache_check_saved(const oscar_cache *cache, const void *data, size_t bytes, int64_t *n_tokens, size_t *used,
                               oscar_error *error) {
    saved_header h;
    oscar_status status = check_saved(cache, data, bytes, &h, error);
    if (status) return status;
    *n_tokens = h.n_tokens;
    *used = h.bytes;
    return OSCAR_OK;
}

/* ------------------------------------------------------------------------------------------ share */

/* A saved sequence that was checked. */
typedef struct saved_seq {
    saved_header h;
    const uint8_t *data;
} saved_seq;

static saved_seq open_saved(const void *data, size_t bytes) {
    saved_seq saved = {.data = data};
    read_header(data, bytes, &saved.h, NULL);
    return saved;
}

/* The ids of page b; how many of them are known. ids: [64] */
static int64_t page_ids(const saved_seq *saved, int32_t b, int32_t *ids) {
    int64_t first = (int64_t)b * OSCAR_PAGE_TOKENS, n = saved->h.n_known - first;
    n = n < 0 ? 0 : n > OSCAR_PAGE_TOKENS ? OSCAR_PAGE_TOKENS : n;
    if (n) memcpy(ids, saved->data + tokens_at(&saved->h) + (size_t)first * sizeof *ids, (size_t)n * sizeof *ids);
    return n;
}

/* Whether two saved sequences have the same ids in full page b, and the same rows where both have them. */
static bool same_saved_page(const oscar_cache *cache, const saved_seq *x, const saved_seq *y, int32_t b) {
    int32_t ids[2][OSCAR_PAGE_TOKENS];
    int64_t first = (int64_t)b * OSCAR_PAGE_TOKENS, n = page_ids(x, b, ids[0]);
    if (n != page_ids(y, b, ids[1]) || memcmp(ids[0], ids[1], (size_t)n * sizeof(int32_t)) != 0) return false;
    saved_rows r = {0}, q = {0};
    while (next_rows(cache, &x->h, &r) && next_rows(cache, &y->h, &q))
        for (int64_t p = first; p < first + OSCAR_PAGE_TOKENS; p++) {
            if (r.overlay && !(has_overlay_row(cache, p, x->h.recent_low) && has_overlay_row(cache, p, y->h.recent_low))) continue;
            if (memcmp(x->data + row_at(cache, &x->h, &r, p), y->data + row_at(cache, &y->h, &q, p), r.row_bytes) != 0) return false;
        }
    return true;
}

int32_t cache_saved_common(const oscar_cache *cache, const void *a, size_t a_bytes, const void *b, size_t b_bytes,
                           int32_t least) {
    saved_seq x = open_saved(a, a_bytes), y = open_saved(b, b_bytes);
    int64_t most = (x.h.n_tokens < y.h.n_tokens ? x.h.n_tokens : y.h.n_tokens) / OSCAR_PAGE_TOKENS;
    int32_t n = 0;
    if (!cache->index.on || x.h.salt != y.h.salt || least >= most || !same_saved_page(cache, &x, &y, least)) return 0;
    while (n < most && same_saved_page(cache, &x, &y, n)) n++;
    return n > least ? n : 0;
}

/* Whether a page of the cache holds the rows of the saved page b; `whole`: its BF16 rows, too, if the
 * index has them. */
static bool is_saved_page(const oscar_cache *cache, int32_t page, const saved_seq *saved, int32_t b, bool whole) {
    uint8_t row[OSCAR_MAX_HEAD_DIM * sizeof(float)];
    int32_t overlay = whole ? cache->index.notes[page].overlay : NO_PAGE;
    for (saved_rows r = {0}; next_rows(cache, &saved->h, &r);) {
        if (r.overlay && overlay == NO_PAGE) return true;
        for (int32_t slot = 0; slot < OSCAR_PAGE_TOKENS; slot++) {
            if (r.overlay)
                move_overlay_row(cache, &r, overlay, slot, row, true);
            else
                move_history_row(cache, &r, page, slot, row, true);
            const uint8_t *at = saved->data + row_at(cache, &saved->h, &r, (int64_t)b * OSCAR_PAGE_TOKENS + slot);
            if (memcmp(row, at, r.row_bytes) != 0) return false;
        }
    }
    return true;
}

/* Rows from here on are restored; saved under a longer lookahead, there are more than there is room for. */
static int64_t restored_low(const oscar_cache *cache, const saved_header *h) {
    int64_t low = h->n_tokens - cache->options.recent - cache->options.lookahead;
    return low > h->recent_low ? low : h->recent_low;
}

/* Full pages that the index has already, into index.found; their number. */
static int32_t find_saved(const oscar_cache *cache, const saved_seq *saved, uint64_t salt) {
    int32_t n = 0, parent = NO_PAGE, ids[OSCAR_PAGE_TOKENS];
    int64_t low = restored_low(cache, &saved->h);
    if (!cache->index.on || saved->h.salt != salt) return 0;
    for (; page_ids(saved, n, ids) == OSCAR_PAGE_TOKENS; n++) {
        int32_t page = share_next(cache, parent, salt, n, ids, NO_PAGE);
        while (page != NO_PAGE && !is_saved_page(cache, page, saved, n, cache_is_whole(cache, low, n)))
            page = share_next(cache, parent, salt, n, ids, page);
        if (page == NO_PAGE) break;
        cache->index.found[n] = parent = page;
    }
    return n;
}

/* The BF16 page that goes with shared page b, if it has all rows that the sequence is to have; donor NULL:
 * the index's. */
static int32_t shared_overlay(const oscar_cache *cache, const cache_seq *s, const cache_seq *donor, int32_t b) {
    int64_t first = (int64_t)b * OSCAR_PAGE_TOKENS, end = first + OSCAR_PAGE_TOKENS;
    if (!donor) return cache_is_whole(cache, s->recent_low, b) ? cache->index.notes[s->history[b]].overlay : NO_PAGE;
    bool sees_recent = end > cache->options.sink && end > s->recent_low;
    int64_t low = s->recent_low > first ? s->recent_low : first;
    return sees_recent && donor->recent_low > low ? NO_PAGE : donor->overlay[b];
}

static oscar_status restore_overlay(oscar_cache *cache, cache_seq *s, const cache_seq *donor, int32_t n_shared, oscar_error *error) {
    for (int32_t b = 0; cache->has_overlay && (int64_t)b * OSCAR_PAGE_TOKENS < s->length; b++) {
        int64_t first = (int64_t)b * OSCAR_PAGE_TOKENS;
        if (first >= cache->options.sink && first + OSCAR_PAGE_TOKENS <= s->recent_low) continue;
        int32_t page = b < n_shared ? shared_overlay(cache, s, donor, b) : NO_PAGE;
        if (page != NO_PAGE) pool_ref(&cache->overlay, page);
        else page = cache_take_overlay(cache);
        if (page == NO_PAGE) return error_set(error, OSCAR_ERROR_INTERNAL, -1, "no overlay page left");
        s->overlay[b] = page;
    }
    return OSCAR_OK;
}

/* ---------------------------------------------------------------------------------------- restore */

/* The first n_shared pages are those in index.found; their BF16 rows are the donor's or the index's. */
static oscar_status restore(oscar_cache *cache, int32_t seq, const saved_seq *saved, const cache_seq *donor, int32_t n_shared,
                            oscar_error *error) {
    cache_seq *s = &cache->seqs[seq];
    page_pool *pool = &cache->history;
    const saved_header *h = &saved->h;
    int32_t *found = cache->index.found, n_pages = (int32_t)((h->n_tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS);
    for (int32_t b = 0; b < n_shared; b++) pool_ref(pool, found[b]);
    int32_t need = n_pages - n_shared, room = pool->n_free + pool->n_cached + seq_own_pages(cache, s);
    if (need > room) {
        for (int32_t b = n_shared - 1; b >= 0; b--) pool_unref(pool, found[b]);
        return error_set(error, OSCAR_ERROR_NO_SPACE, -1, "%lld saved tokens need %d pages, there is room for %d",
                         (long long)h->n_tokens, need, room);
    }
    oscar_seq_clear(cache, seq, NULL);
    memcpy(s->history, found, (size_t)n_shared * sizeof *found);
    for (int32_t b = n_shared; b < n_pages; b++) s->history[b] = cache_take_history(cache);
    s->length = h->n_tokens;
    for (int32_t i = 0; i < cache->n_layers; i++) s->coded[i] = (int32_t)s->length;
    s->recent_low = restored_low(cache, h);
    oscar_status status = restore_overlay(cache, s, donor, n_shared, error);
    if (status) {
        oscar_seq_clear(cache, seq, NULL);
        return status;
    }
    /* They are read only, but one function moves rows both ways. */
    uint8_t *bytes = (uint8_t *)(uintptr_t)saved->data;
    move_rows(cache, s, h, bytes, false);
    if (cache->index.on && h->salt == s->salt) {
        move_tokens(cache, s, h, bytes, false);
        s->known_end = h->n_known;
    }
    cache->index.n_hits += n_shared;
    share_completed(cache, s, 0, s->length);
    seq_settle(cache, s);
    return OSCAR_OK;
}

oscar_status oscar_seq_restore(oscar_cache *cache, int32_t seq, const void *data, size_t bytes, size_t *used,
                               oscar_error *error) {
    if (seq < 0 || seq >= cache->options.n_seqs_max)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "sequence %d", seq);
    saved_seq saved = {.data = data};
    oscar_status status = check_saved(cache, data, bytes, &saved.h, error);
    if (status) return status;
    if (used) *used = saved.h.bytes;
    return restore(cache, seq, &saved, NULL, find_saved(cache, &saved, cache->seqs[seq].salt), error);
}

oscar_status cache_restore_beside(oscar_cache *cache, int32_t seq, const void *data, size_t bytes, int32_t donor, int32_t n_shared,
                                  oscar_error *error) {
    saved_seq saved = open_saved(data, bytes);
    memcpy(cache->index.found, cache->seqs[donor].history, (size_t)n_shared * sizeof(int32_t));
    return restore(cache, seq, &saved, &cache->seqs[donor], n_shared, error);
}
