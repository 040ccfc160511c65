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
#define SAVED_VERSION 2u

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

static size_t saved_bytes(const oscar_cache *cache, const saved_header *h) {
    int64_t n_tokens = h->n_tokens, recent_low = h->recent_low;
    size_t history = 0, overlay = 0, rows = 0;
    for (int32_t i = 0; i < cache->n_layers; i++) {
        const cache_layer *l = &cache->layers[i];
        history += (size_t)l->shape.n_kv_heads * (row_bytes(cache, &l->k_side) + row_bytes(cache, &l->v_side));
        overlay += (size_t)l->shape.n_kv_heads * 2 * (size_t)l->shape.head_dim * sizeof(uint16_t);
    }
    for (int64_t p = 0; p < n_tokens; p++) rows += has_overlay_row(cache, p, recent_low);
    return header_bytes(h->version) + history * (size_t)n_tokens + overlay * rows + (size_t)h->n_known * sizeof(int32_t) +
           sizeof(uint64_t);
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

/* One history row between its page and the saved form. Returns the bytes it takes there. */
static size_t move_history_row(const oscar_cache *cache, const cache_seq *s, const cache_layer *layer, int32_t head,
                               int side, int64_t position, uint8_t *bytes, bool save) {
    int32_t d = layer->shape.head_dim, slot = (int32_t)(position % OSCAR_PAGE_TOKENS);
    const page_side *layout = side ? &layer->v_side : &layer->k_side;
    uint8_t *page = pool_page(&cache->history, s->history[position / OSCAR_PAGE_TOKENS]);
    uint8_t *base = layer_history(layer, page, head) + (side ? layer->history_value_offset : 0);
    if (cache_is_exact(cache)) {
        float *rows = (float *)(void *)base;
        int32_t stride = side ? 1 : OSCAR_PAGE_TOKENS;
        rows += side ? slot * d : slot;
        for (int32_t i = 0; i < d; i++) {
            if (save)
                memcpy(bytes + 4 * i, rows + i * stride, 4);
            else
                memcpy(rows + i * stride, bytes + 4 * i, 4);
        }
        return (size_t)d * sizeof(float);
    }
    uint8_t codes[OSCAR_MAX_HEAD_DIM];
    uint16_t params[2 * CODEC_MAX_GROUPS];
    if (save) {
        page_get_row(layout, base, slot, codes, params);
        return pack_row(layout, codes, params, bytes);
    }
    size_t used = unpack_row(layout, bytes, codes, params);
    page_put_row(layout, base, slot, codes, params);
    return used;
}

static size_t move_overlay_row(const oscar_cache *cache, const cache_seq *s, const cache_layer *layer, int32_t head,
                               int side, int64_t position, uint8_t *bytes, bool save) {
    int32_t d = layer->shape.head_dim, slot = (int32_t)(position % OSCAR_PAGE_TOKENS);
    if (s->overlay[position / OSCAR_PAGE_TOKENS] == NO_PAGE) return (size_t)d * sizeof(uint16_t);
    uint8_t *page = pool_page(&cache->overlay, s->overlay[position / OSCAR_PAGE_TOKENS]);
    page_side_kind kind = side ? PAGE_VALUE : PAGE_KEY;
    uint16_t *rows = side ? layer_overlay_values(layer, page, head) : layer_overlay_keys(layer, page, head);
    for (int32_t i = 0; i < d; i++) {
        uint16_t *at = rows + page_bf16_at(kind, d, slot, i);
        if (save)
            memcpy(bytes + 2 * i, at, 2);
        else
            memcpy(at, bytes + 2 * i, 2);
    }
    return (size_t)d * sizeof(uint16_t);
}

/* Returns the end of the rows in `bytes`. */
static uint8_t *move_rows(const oscar_cache *cache, const cache_seq *s, const saved_header *header, uint8_t *bytes, bool save) {
    for (int overlay = 0; overlay < 2; overlay++)
        for (int32_t i = 0; i < cache->n_layers; i++)
            for (int32_t h = 0; h < cache->layers[i].shape.n_kv_heads; h++)
                for (int side = 0; side < 2; side++)
                    for (int64_t p = 0; p < header->n_tokens; p++) {
                        if (!overlay)
                            bytes += move_history_row(cache, s, &cache->layers[i], h, side, p, bytes, save);
                        else if (has_overlay_row(cache, p, header->recent_low))
                            bytes += move_overlay_row(cache, s, &cache->layers[i], h, side, p, bytes, save);
                    }
    return bytes;
}

static void move_tokens(const oscar_cache *cache, const cache_seq *s, int64_t n, uint8_t *bytes, bool save) {
    for (int64_t p = 0; p < n; p += OSCAR_PAGE_TOKENS, bytes += OSCAR_PAGE_TOKENS * sizeof(int32_t)) {
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
    saved_header header = make_header(cache, s);
    memcpy(out, &header, sizeof header);
    uint8_t *end = move_rows(cache, s, &header, (uint8_t *)out + sizeof header, true);
    move_tokens(cache, s, header.n_known, end, true);
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

oscar_status oscar_seq_restore(oscar_cache *cache, int32_t seq, const void *data, size_t bytes, size_t *used,
                               oscar_error *error) {
    if (seq < 0 || seq >= cache->options.n_seqs_max)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "sequence %d", seq);
    saved_header h;
    oscar_status status = check_saved(cache, data, bytes, &h, error);
    if (status) return status;
    cache_seq *s = &cache->seqs[seq];
    int32_t need = (int32_t)((h.n_tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS);
    int32_t room = cache->history.n_free + cache->history.n_cached + seq_own_pages(cache, s);
    if (need > room)
        return error_set(error, OSCAR_ERROR_NO_SPACE, -1, "%lld saved tokens need %d pages, there is room for %d",
                         (long long)h.n_tokens, need, room);
    oscar_seq_clear(cache, seq, NULL);
    for (int32_t b = 0; b < need; b++) s->history[b] = cache_take_history(cache);
    s->length = h.n_tokens;
    /* Saved under a longer lookahead: rows that this cache has no room for are passed over. */
    int64_t low = h.n_tokens - cache->options.recent - cache->options.lookahead;
    s->recent_low = low > h.recent_low ? low : h.recent_low;
    for (int64_t p = 0; p < h.n_tokens; p++) {
        int32_t *page = &s->overlay[p / OSCAR_PAGE_TOKENS];
        if (!has_overlay_row(cache, p, s->recent_low) || *page != NO_PAGE) continue;
        *page = cache_take_overlay(cache);
        if (*page == NO_PAGE) {
            oscar_seq_clear(cache, seq, NULL);
            return error_set(error, OSCAR_ERROR_INTERNAL, -1, "no overlay page left");
        }
    }
    /* The rows are read only, but one function moves them both ways. */
    uint8_t *end = move_rows(cache, s, &h, (uint8_t *)(uintptr_t)data + header_bytes(h.version), false);
    if (cache->index.on && h.salt == s->salt) {
        move_tokens(cache, s, h.n_known, end, false);
        s->known_end = h.n_known;
    }
    share_completed(cache, s, 0, s->length);
    seq_settle(cache, s);
    if (used) *used = h.bytes;
    return OSCAR_OK;
}
