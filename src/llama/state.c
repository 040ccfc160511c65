/*
 * state.c - saving and restoring: llama_state_*() on our cache.
 *
 * A sequence's state is what oscar_seq_save() writes, which carries its own checksum. It holds the
 * whole sequence also where a caller asks for the part that cannot be rolled back (PARTIAL_ONLY,
 * for sliding layers): all layers keep all tokens here, and a restored whole is right in every
 * place where a part would be.
 *
 * The state of a context is a small header and the sequences that are not empty:
 *
 *   whole_header, for each sequence {uint32 id, uint32 0, saved sequence}, XXH3-64 of all before it
 *
 * Files are llama.cpp's container with two numbers at the end: which model's weights computed it,
 * and a checksum, since the tokens have none:
 *
 *   uint32 magic, version, token count, int32 tokens[], state,
 *   XXH3-64 of oscar_llama_fingerprint(), XXH3-64 of all before it
 *
 * A context that has computed nothing has no cache yet. It is made here first, because a server
 * restores slots before its first request and llama-completion its session before its prompt.
 */
#include <stdlib.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "cache/cache.h"
#include "llama/layer.h"
#include "zoo/zoo.h"

#define WHOLE_MAGIC 0x3153534fu /* "OSS1" */
#define WHOLE_VERSION 1u
#define CHECK_BYTES sizeof(uint64_t)

typedef struct whole_header {
    uint32_t magic, version;
    uint64_t bytes; /* of the whole, the checksum included */
    uint32_t n_seqs, reserved;
} whole_header;

typedef struct whole_entry {
    uint32_t seq, reserved;
} whole_entry;

static size_t fail(oscar_llama *layer, const char *function) {
    layer_log(layer, "%s: %s", function, layer->error.message);
    return 0;
}

/* The cache, made when nothing was computed yet. */
static bool ready(oscar_llama *layer) {
    if (layer->cache) return true;
    if (llama_get_causal_attn(layer->ctx)) return call_find_layers(layer);
    error_set(&layer->error, OSCAR_ERROR_UNSUPPORTED, -1, "non-causal attention is not supported");
    return false;
}

static void put_check(uint8_t *bytes, size_t size) {
    uint64_t check = XXH3_64bits(bytes, size - CHECK_BYTES);
    memcpy(bytes + size - CHECK_BYTES, &check, CHECK_BYTES);
}

static bool check_is_right(const uint8_t *bytes, size_t size) {
    uint64_t check;
    memcpy(&check, bytes + size - CHECK_BYTES, CHECK_BYTES);
    return XXH3_64bits(bytes, size - CHECK_BYTES) == check;
}

/* ------------------------------------------------------------------------------------ one sequence */

size_t oscar_llama_state_seq_get_size(oscar_llama *layer, llama_seq_id seq) {
    if (!ready(layer)) return fail(layer, "saving a sequence");
    size_t bytes = oscar_seq_save_bytes(layer->cache, seq);
    if (bytes > 0) return bytes;
    error_set(&layer->error, OSCAR_ERROR_ARGUMENT, -1, "sequence %d, expected 0 to %u", seq, layer->n_seq_max - 1);
    return fail(layer, "saving a sequence");
}

size_t oscar_llama_state_seq_get_data(oscar_llama *layer, uint8_t *dst, size_t size, llama_seq_id seq) {
    size_t bytes = oscar_llama_state_seq_get_size(layer, seq);
    if (bytes == 0) return 0;
    if (oscar_seq_save(layer->cache, seq, dst, size, &layer->error)) return fail(layer, "saving a sequence");
    stats_note(layer, STATS_SAVE, 0);
    return bytes;
}

/* Checks a saved sequence, and that a sequence of this context may be so long. */
static oscar_status check_seq(oscar_llama *layer, const uint8_t *src, size_t size, int64_t *n_tokens, size_t *bytes) {
    oscar_status status = cache_check_saved(layer->cache, src, size, n_tokens, bytes, &layer->error);
    if (status || *n_tokens <= (int64_t)layer->n_ctx_seq) return status;
    return error_set(&layer->error, OSCAR_ERROR_NO_SPACE, -1, "%lld saved tokens, a sequence of this context holds %u",
                     (long long)*n_tokens, layer->n_ctx_seq);
}

static size_t restore_seq(oscar_llama *layer, const uint8_t *src, size_t size, llama_seq_id seq) {
    int64_t n_tokens;
    size_t bytes;
    if (!ready(layer) || check_seq(layer, src, size, &n_tokens, &bytes) ||
        oscar_seq_restore(layer->cache, seq, src, size, NULL, &layer->error)) {
        stats_note(layer, STATS_REFUSED, 0);
        return 0;
    }
    stats_note(layer, STATS_RESTORE, 0);
    return bytes;
}

size_t oscar_llama_state_seq_set_data(oscar_llama *layer, const uint8_t *src, size_t size, llama_seq_id seq) {
    size_t bytes = restore_seq(layer, src, size, seq);
    return bytes ? bytes : fail(layer, "restoring a sequence");
}

/* ---------------------------------------------------------------------------------- all sequences */

size_t oscar_llama_state_get_size(oscar_llama *layer) {
    if (!ready(layer)) return fail(layer, "saving the state");
    size_t bytes = sizeof(whole_header) + CHECK_BYTES;
    for (uint32_t s = 0; s < layer->n_seq_max; s++)
        if (oscar_seq_length(layer->cache, (int32_t)s) > 0)
            bytes += sizeof(whole_entry) + oscar_seq_save_bytes(layer->cache, (int32_t)s);
    return bytes;
}

size_t oscar_llama_state_get_data(oscar_llama *layer, uint8_t *dst, size_t size) {
    size_t bytes = oscar_llama_state_get_size(layer);
    if (bytes == 0) return 0;
    if (size < bytes) {
        error_set(&layer->error, OSCAR_ERROR_ARGUMENT, -1, "size is %zu, %zu bytes are needed", size, bytes);
        return fail(layer, "saving the state");
    }
    whole_header header = {.magic = WHOLE_MAGIC, .version = WHOLE_VERSION, .bytes = bytes};
    uint8_t *p = dst + sizeof header, *end = dst + bytes - CHECK_BYTES;
    for (uint32_t s = 0; s < layer->n_seq_max; s++) {
        if (oscar_seq_length(layer->cache, (int32_t)s) <= 0) continue;
        const whole_entry entry = {.seq = s};
        size_t n = oscar_seq_save_bytes(layer->cache, (int32_t)s);
        memcpy(p, &entry, sizeof entry);
        p += sizeof entry;
        if (oscar_seq_save(layer->cache, (int32_t)s, p, (size_t)(end - p), &layer->error)) return fail(layer, "saving the state");
        p += n;
        header.n_seqs++;
    }
    memcpy(dst, &header, sizeof header);
    put_check(dst, bytes);
    stats_note(layer, STATS_SAVE, 0);
    return bytes;
}

static oscar_status check_whole_header(const uint8_t *src, size_t size, whole_header *h, oscar_error *error) {
    if (!src || size < sizeof *h + CHECK_BYTES)
        return error_set(error, OSCAR_ERROR_FORMAT, 0, "saved state: %zu bytes are no header", size);
    memcpy(h, src, sizeof *h);
    if (h->magic != WHOLE_MAGIC)
        return error_set(error, OSCAR_ERROR_FORMAT, 0, "saved state: magic is %08x, expected %08x", h->magic, WHOLE_MAGIC);
    if (h->version != WHOLE_VERSION)
        return error_set(error, OSCAR_ERROR_UNSUPPORTED, 4, "saved state of version %u, this build reads %u", h->version,
                         WHOLE_VERSION);
    if (h->bytes > size || h->bytes < sizeof *h + CHECK_BYTES)
        return error_set(error, OSCAR_ERROR_FORMAT, 8, "saved state is cut: %zu bytes of %llu", size,
                         (unsigned long long)h->bytes);
    if (!check_is_right(src, h->bytes))
        return error_set(error, OSCAR_ERROR_FORMAT, (int64_t)(h->bytes - CHECK_BYTES), "saved state: wrong checksum");
    return OSCAR_OK;
}

/* One sequence of a saved state, and the pages that an earlier one holds as well. */
typedef struct whole_part {
    const uint8_t *data;
    size_t bytes;
    int32_t seq, donor, n_shared;
} whole_part;

/* The earlier sequence that has most of its pages. Sequences are saved whole, each; but what was held once
 * must be held once again, or a context that fits because prompts are shared could not be restored. */
static void find_donor(const oscar_cache *cache, whole_part *parts, uint32_t i) {
    whole_part *part = &parts[i];
    for (uint32_t j = 0; j < i; j++) {
        int32_t n = cache_saved_common(cache, parts[j].data, parts[j].bytes, part->data, part->bytes, part->n_shared);
        if (n > 0) {
            part->donor = parts[j].seq;
            part->n_shared = n;
        }
    }
}

/* Every sequence before any is touched: ids in range and rising, rows whole, room for all together.
 * parts: [h->n_seqs] */
static oscar_status check_whole(oscar_llama *layer, const uint8_t *src, const whole_header *h, whole_part *parts) {
    size_t at = sizeof *h, end = h->bytes - CHECK_BYTES;
    int64_t n_pages = 0, lowest = 0;
    for (uint32_t i = 0; i < h->n_seqs; i++) {
        whole_entry entry;
        int64_t n_tokens = 0;
        size_t bytes = 0;
        if (end - at < sizeof entry)
            return error_set(&layer->error, OSCAR_ERROR_FORMAT, (int64_t)at, "saved state: %u of %u sequences", i, h->n_seqs);
        memcpy(&entry, src + at, sizeof entry);
        if (entry.seq < lowest || entry.seq >= layer->n_seq_max)
            return error_set(&layer->error, OSCAR_ERROR_MISMATCH, (int64_t)at, "saved state: sequence %u, expected %lld to %u",
                             entry.seq, (long long)lowest, layer->n_seq_max - 1);
        at += sizeof entry;
        oscar_status status = check_seq(layer, src + at, end - at, &n_tokens, &bytes);
        if (status) return status;
        parts[i] = (whole_part){.data = src + at, .bytes = bytes, .seq = (int32_t)entry.seq};
        find_donor(layer->cache, parts, i);
        at += bytes;
        lowest = (int64_t)entry.seq + 1;
        n_pages += (n_tokens + OSCAR_PAGE_TOKENS - 1) / OSCAR_PAGE_TOKENS - parts[i].n_shared;
    }
    oscar_cache_stats stats = {.struct_size = sizeof stats};
    oscar_cache_get_stats(layer->cache, &stats);
    if (at != end)
        return error_set(&layer->error, OSCAR_ERROR_FORMAT, (int64_t)at, "saved state: %zu bytes after the last sequence", end - at);
    if (n_pages > stats.pages_total)
        return error_set(&layer->error, OSCAR_ERROR_NO_SPACE, -1, "the saved state needs %lld pages, the cache has %lld",
                         (long long)n_pages, (long long)stats.pages_total);
    return OSCAR_OK;
}

static oscar_status restore_parts(oscar_llama *layer, const uint8_t *src, const whole_header *h) {
    if (h->n_seqs > layer->n_seq_max)
        return error_set(&layer->error, OSCAR_ERROR_MISMATCH, 16, "saved state of %u sequences, this context has %u", h->n_seqs,
                         layer->n_seq_max);
    whole_part *parts = calloc(h->n_seqs ? h->n_seqs : 1, sizeof *parts);
    if (!parts) return error_set(&layer->error, OSCAR_ERROR_MEMORY, -1, "no memory for %u sequences", h->n_seqs);
    oscar_status status = check_whole(layer, src, h, parts);
    if (!status) oscar_llama_memory_clear(layer);
    for (uint32_t i = 0; !status && i < h->n_seqs; i++) {
        const whole_part *part = &parts[i];
        status = part->n_shared ? cache_restore_beside(layer->cache, part->seq, part->data, part->bytes, part->donor, part->n_shared,
                                                       &layer->error)
                                : oscar_seq_restore(layer->cache, part->seq, part->data, part->bytes, NULL, &layer->error);
    }
    free(parts);
    return status;
}

static size_t restore_whole(oscar_llama *layer, const uint8_t *src, size_t size) {
    whole_header h;
    if (!ready(layer) || check_whole_header(src, size, &h, &layer->error) || restore_parts(layer, src, &h)) {
        stats_note(layer, STATS_REFUSED, 0);
        return 0;
    }
    stats_note(layer, STATS_RESTORE, 0);
    return h.bytes;
}

size_t oscar_llama_state_set_data(oscar_llama *layer, const uint8_t *src, size_t size) {
    size_t bytes = restore_whole(layer, src, size);
    return bytes ? bytes : fail(layer, "restoring the state");
}

/* ------------------------------------------------------------------------------------------ files */

typedef struct container_header {
    uint32_t magic, version, n_tokens;
} container_header;

#define END_BYTES (2 * sizeof(uint64_t)) /* model, checksum */

static const container_header session_container = {LLAMA_SESSION_MAGIC, LLAMA_SESSION_VERSION, 0};
static const container_header seq_container = {LLAMA_STATE_SEQ_MAGIC, LLAMA_STATE_SEQ_VERSION, 0};
#define ALL_SEQUENCES (-1)

static uint64_t model_hash(const oscar_llama *layer) {
    char text[OSCAR_LLAMA_FINGERPRINT_SIZE] = "";
    oscar_llama_fingerprint(layer->model, text, sizeof text);
    return XXH3_64bits(text, strlen(text));
}

/* Bytes of the file, 0 on failure. */
static size_t save_file(oscar_llama *layer, const char *path, llama_seq_id seq, const llama_token *tokens, size_t n_tokens) {
    bool all = seq == ALL_SEQUENCES;
    size_t n_state = all ? oscar_llama_state_get_size(layer) : oscar_llama_state_seq_get_size(layer, seq);
    if (n_state == 0) return 0;
    container_header header = all ? session_container : seq_container;
    header.n_tokens = (uint32_t)n_tokens;
    size_t before = sizeof header + n_tokens * sizeof *tokens, bytes = before + n_state + END_BYTES;
    uint8_t *memory = malloc(bytes);
    if (!memory) {
        error_set(&layer->error, OSCAR_ERROR_MEMORY, -1, "%s: no memory for %zu bytes", path, bytes);
        return fail(layer, "saving");
    }
    memcpy(memory, &header, sizeof header);
    if (n_tokens) memcpy(memory + sizeof header, tokens, n_tokens * sizeof *tokens);
    size_t done = all ? oscar_llama_state_get_data(layer, memory + before, n_state)
                      : oscar_llama_state_seq_get_data(layer, memory + before, n_state, seq);
    atomic_file file;
    if (done == 0) {
        bytes = 0;
    } else if (atomic_file_begin(&file, path, &layer->error)) {
        bytes = fail(layer, "saving");
    } else {
        uint64_t hash = model_hash(layer);
        memcpy(memory + bytes - END_BYTES, &hash, sizeof hash);
        put_check(memory, bytes);
        atomic_file_write(&file, memory, bytes);
        if (atomic_file_commit(&file, &layer->error)) bytes = fail(layer, "saving");
    }
    free(memory);
    return bytes;
}

/* The header of an opened file, and that its tokens are inside. */
static oscar_status read_header(const byte_source *source, const container_header *expected, container_header *h,
                                oscar_error *error) {
    oscar_status status = source_read(source, 0, sizeof *h, h, "the header", error);
    if (status) return status;
    if (h->magic != expected->magic || h->version != expected->version)
        return error_set(error, OSCAR_ERROR_FORMAT, 0, "%s: magic %08x, version %u; expected %08x, %u", source->name,
                         h->magic, h->version, expected->magic, expected->version);
    if (h->n_tokens > (source->size - sizeof *h) / sizeof(llama_token))
        return error_set(error, OSCAR_ERROR_FORMAT, 8, "%s: truncated: %u tokens in %llu bytes", source->name, h->n_tokens,
                         (unsigned long long)source->size);
    return OSCAR_OK;
}

/* The state inside a whole file: exactly what is between the tokens and the model. */
static oscar_status restore_file(oscar_llama *layer, const byte_source *source, const uint8_t *bytes, size_t before,
                                 llama_seq_id seq) {
    if (source->size < before + END_BYTES || !check_is_right(bytes, source->size))
        return error_set(&layer->error, OSCAR_ERROR_FORMAT, (int64_t)source->size, "%s: truncated or changed: wrong checksum",
                         source->name);
    uint64_t hash;
    size_t n_state = source->size - before - END_BYTES;
    memcpy(&hash, bytes + before + n_state, sizeof hash);
    if (hash != model_hash(layer))
        return error_set(&layer->error, OSCAR_ERROR_MISMATCH, (int64_t)(before + n_state), "%s: computed by another model",
                         source->name);
    size_t done = seq == ALL_SEQUENCES ? restore_whole(layer, bytes + before, n_state)
                                       : restore_seq(layer, bytes + before, n_state, seq);
    return done ? OSCAR_OK : layer->error.status;
}

/* Bytes read, 0 on failure: then nothing has changed. tokens NULL: only *count is filled. */
static size_t load_file(oscar_llama *layer, const char *path, llama_seq_id seq, llama_token *tokens, size_t capacity,
                        size_t *count) {
    byte_source source;
    container_header h;
    uint8_t *bytes = NULL;
    size_t before = 0, result = 0;
    oscar_status status = source_open(&source, path, &layer->error);
    if (!status) status = read_header(&source, seq == ALL_SEQUENCES ? &session_container : &seq_container, &h, &layer->error);
    if (!status) before = sizeof h + h.n_tokens * sizeof *tokens;
    if (!status && tokens) {
        if (h.n_tokens > capacity)
            status = error_set(&layer->error, OSCAR_ERROR_ARGUMENT, 8, "%s: %u tokens, room for %zu", path, h.n_tokens, capacity);
        if (!status) status = source_read_alloc(&source, 0, source.size, &bytes, "the state", &layer->error);
        if (!status) status = restore_file(layer, &source, bytes, before, seq);
        if (!status && h.n_tokens) memcpy(tokens, bytes + sizeof h, before - sizeof h);
    }
    if (status) {
        fail(layer, "loading");
    } else {
        if (count) *count = h.n_tokens;
        result = tokens ? source.size : before;
    }
    free(bytes);
    source_close(&source);
    return result;
}

size_t oscar_llama_state_seq_save_file(oscar_llama *layer, const char *path, llama_seq_id seq, const llama_token *tokens,
                                       size_t n_tokens) {
    return save_file(layer, path, seq < 0 ? INT32_MAX : seq, tokens, n_tokens);
}

size_t oscar_llama_state_seq_load_file(oscar_llama *layer, const char *path, llama_seq_id seq, llama_token *tokens,
                                       size_t capacity, size_t *n_tokens) {
    return load_file(layer, path, seq < 0 ? INT32_MAX : seq, tokens, capacity, n_tokens);
}

bool oscar_llama_state_save_file(oscar_llama *layer, const char *path, const llama_token *tokens, size_t n_tokens) {
    return save_file(layer, path, ALL_SEQUENCES, tokens, n_tokens) > 0;
}

bool oscar_llama_state_load_file(oscar_llama *layer, const char *path, llama_token *tokens, size_t capacity,
                                 size_t *n_tokens) {
    llama_token none;
    return load_file(layer, path, ALL_SEQUENCES, tokens ? tokens : &none, tokens ? capacity : 0, n_tokens) > 0;
}
