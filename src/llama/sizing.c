/*
 * sizing.c - how large the cache is made, that the machine has the memory for it, and saying so.
 *
 * A cache reserves all of its memory when it is made. Without kv_memory_bytes it holds what the
 * context size asks for. With it, the largest one is looked for that stays below, and the context
 * becomes as small as that cache: a sequence that would outgrow its share is then ended by its
 * program at its own limit, instead of taking the room that other sequences were promised.
 */
#include <stdio.h>
#include <stdlib.h>

#include "cache/cache.h"
#include "llama/layer.h"

/* Tokens a group of the KIVI baseline (arXiv 2402.02750). */
#define KIVI_GROUP_TOKENS 128
#define MIB 1048576.0

static oscar_status create(const oscar_llama *layer, const oscar_cache_options *options, oscar_cache **out,
                           oscar_error *error) {
    if (layer->options.baseline == OSCAR_LLAMA_BASELINE_KIVI)
        return cache_create_kivi(out, options, KIVI_GROUP_TOKENS, error);
    return oscar_cache_create(out, options, error);
}

static oscar_cache_stats stats_of(const oscar_cache *cache) {
    oscar_cache_stats stats = {.struct_size = sizeof stats};
    oscar_cache_get_stats(cache, &stats);
    return stats;
}

int64_t layer_scratch_bytes(const oscar_llama *layer, const oscar_cache_stats *s) {
    int32_t n = llama_n_threads(layer->ctx), n_batch = llama_n_threads_batch(layer->ctx);
    return s->scratch_bytes + (n > n_batch ? n : n_batch) * s->scratch_thread_bytes;
}

static int64_t bytes_of(const oscar_llama *layer, const oscar_cache_stats *s) {
    return s->pages_total * s->page_bytes + s->overlay_pages_budget * s->overlay_page_bytes + layer_scratch_bytes(layer, s);
}

/* Makes a cache of n_pages; *bytes receives what it takes. */
static oscar_status create_pages(const oscar_llama *layer, oscar_cache_options options, int64_t n_pages,
                                 oscar_cache **out, int64_t *bytes, oscar_error *error) {
    options.n_tokens_max = n_pages * OSCAR_PAGE_TOKENS;
    int64_t share = n_pages / (int64_t)layer->n_seq_max * OSCAR_PAGE_TOKENS; /* see limit_context() */
    if (!layer->unified && share > 0 && share < options.n_seq_tokens_max) options.n_seq_tokens_max = share;
    oscar_status status = create(layer, &options, out, error);
    if (status) return status;
    oscar_cache_stats s = stats_of(*out);
    *bytes = bytes_of(layer, &s);
    return OSCAR_OK;
}

/* The largest cache of at most n_pages that takes no more than kv_memory_bytes. What it takes besides
 * its pages depends on their number, so sizes are tried: making one touches little of its memory. */
static oscar_status create_within(const oscar_llama *layer, const oscar_cache_options *options, int64_t n_pages,
                                  oscar_cache **out, oscar_error *error) {
    int64_t budget = layer->options.kv_memory_bytes, bytes, low = 1;
    oscar_status status = create_pages(layer, *options, low, out, &bytes, error);
    if (status) return status;
    int64_t page_bytes = stats_of(*out).page_bytes;
    if (bytes > budget) {
        oscar_cache_free(*out);
        *out = NULL;
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1,
                         "kv_memory_bytes is %lld: expected at least %lld for windows, scratch and one page",
                         (long long)budget, (long long)bytes);
    }
    int64_t high = budget / page_bytes < n_pages ? budget / page_bytes : n_pages;
    for (int64_t next = high; low < high; next = low + (high - low + 1) / 2) {
        oscar_cache *larger;
        status = create_pages(layer, *options, next, &larger, &bytes, error);
        if (status && status != OSCAR_ERROR_MEMORY) break;
        if (status || bytes > budget) {
            if (!status) oscar_cache_free(larger);
            high = next - 1;
            status = OSCAR_OK;
        } else {
            oscar_cache_free(*out);
            *out = larger;
            low = next;
        }
    }
    if (status) {
        oscar_cache_free(*out);
        *out = NULL;
    }
    return status;
}

/* A number that follows `key` in a file of /proc or a control group; -1 without one ("max"). */
static int64_t read_number(const char *path, const char *key) {
    char line[256];
    int64_t value = -1;
    FILE *file = fopen(path, "r");
    if (!file) return -1;
    while (value < 0 && fgets(line, sizeof line, file)) {
        long long n;
        if (strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), "%lld", &n) == 1 && n >= 0) value = n;
    }
    fclose(file);
    return value;
}

/* Bytes that can be had without swapping, of the machine and of the control group; -1: not known. */
static int64_t available_bytes(void) {
    int64_t available = read_number("/proc/meminfo", "MemAvailable:");
    if (available >= 0) available *= 1024;
    int64_t limit = read_number("/sys/fs/cgroup/memory.max", "");
    int64_t used = read_number("/sys/fs/cgroup/memory.current", "");
    int64_t file = read_number("/sys/fs/cgroup/memory.stat", "file "); /* given up under pressure */
    if (limit < 0 || used < 0) return available;
    int64_t left = limit - used + (file > 0 ? file : 0);
    return available < 0 || left < available ? (left > 0 ? left : 0) : available;
}

static oscar_status check_available(const oscar_llama *layer, oscar_error *error) {
    oscar_cache_stats s = stats_of(layer->cache);
    int64_t bytes = bytes_of(layer, &s), available = available_bytes();
    if (available < 0 || bytes <= available) return OSCAR_OK;
    return error_set(error, OSCAR_ERROR_MEMORY, -1,
                     "a cache of %lld tokens takes %.1f MiB with windows and scratch, %.1f MiB are available: a smaller "
                     "context size or kv_memory is needed",
                     (long long)(s.pages_total * OSCAR_PAGE_TOKENS), (double)bytes / MIB, (double)available / MIB);
}

/* The context as small as the pool. Sequences that share one context may each leave a page nearly empty. */
static oscar_status limit_context(oscar_llama *layer, oscar_error *error) {
    int64_t pages = stats_of(layer->cache).pages_total, n_seqs = layer->n_seq_max;
    int64_t seq_pages = layer->unified ? pages - n_seqs : pages / n_seqs;
    if (seq_pages < 1)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "kv_memory_bytes is %lld: room for %lld pages of %d tokens, %lld sequences need %lld",
                         (long long)layer->options.kv_memory_bytes, (long long)pages, OSCAR_PAGE_TOKENS, (long long)n_seqs,
                         (long long)(layer->unified ? n_seqs + 1 : n_seqs));
    if (seq_pages * OSCAR_PAGE_TOKENS >= (int64_t)layer->n_ctx_seq) return OSCAR_OK;
    layer->n_ctx_seq = (uint32_t)(seq_pages * OSCAR_PAGE_TOKENS);
    layer->n_ctx = layer->unified ? layer->n_ctx_seq : layer->n_ctx_seq * layer->n_seq_max;
    return OSCAR_OK;
}

static void announce(const oscar_llama *layer, uint32_t asked) {
    oscar_cache_stats s = stats_of(layer->cache);
    int64_t tokens = s.pages_total * OSCAR_PAGE_TOKENS;
    bool f32 = layer->options.kv_type == OSCAR_KV_F32;
    char windows[64] = "", fit[200] = "", less[80] = "";
    if (!f32)
        snprintf(windows, sizeof windows, ", %d + %d tokens in BF16", layer->options.sink, layer->options.recent);
    layer_log(layer,
              "%s KV cache on %d of %d layers: %.2f bits an element%s; %lld pages for %lld tokens in %.1f MiB "
              "(f16: %.1f MiB), windows up to %.1f MiB, scratch %.1f MiB; %s",
              f32 ? "exact f32" : "2-bit", layer->n_layers, llama_model_n_layer(layer->model), s.history_bits, windows,
              (long long)s.pages_total, (long long)tokens, (double)(s.pages_total * s.page_bytes) / MIB,
              (double)(tokens * s.exact_bytes_per_token) / MIB,
              (double)(s.overlay_pages_budget * s.overlay_page_bytes) / MIB, (double)layer_scratch_bytes(layer, &s) / MIB, oscar_isa_name());
    if (layer->n_ctx_seq < asked) snprintf(less, sizeof less, " instead of %u, which kv_memory does not hold", asked);
    if (layer->rotations) {
        const char *date = oscar_rotations_metadata(layer->rotations, "calibration_date");
        const char *count = oscar_rotations_metadata(layer->rotations, "calibration_tokens");
        const char *name = layer->rotations_name ? layer->rotations_name : "the caller";
        size_t length = strlen(name), most = 90;
        snprintf(fit, sizeof fit, "; rotations of %s%s, fitted %.16s on %.12s tokens", length > most ? "..." : "",
                 length > most ? name + length - most : name, date ? date : "at an unknown date", count ? count : "?");
    }
    layer_log(layer, "KV cache of %u sequence%s of up to %u tokens%s%s", layer->n_seq_max,
              layer->n_seq_max == 1 ? "" : layer->unified ? "s that share their room, each" : "s, each", layer->n_ctx_seq, less, fit);
    if (layer->n_device_layers > 0)
        layer_log(layer, "%d of %d layers are on a device: their attention runs on this machine's cores, with copies of queries, "
                  "keys, values and results", layer->n_device_layers, layer->n_layers);
}

oscar_status layer_create_cache(oscar_llama *layer, oscar_error *error) {
    const oscar_llama_options *o = &layer->options;
    oscar_status status = OSCAR_OK;
    if (layer->rotations)
        status = model_check_rotations(layer->shapes, layer->n_layers, layer->rotations, error);
    if (status) return status;
    oscar_cache_options options = OSCAR_CACHE_OPTIONS_INIT;
    options.kv_type = o->kv_type;
    options.n_layers = layer->n_layers;
    options.layers = layer->shapes;
    options.rotations = layer->rotations;
    options.n_seqs_max = (int32_t)layer->n_seq_max;
    /* Each sequence may leave its last page nearly empty. */
    options.n_tokens_max = (int64_t)layer->n_ctx + (int64_t)OSCAR_PAGE_TOKENS * layer->n_seq_max;
    options.n_seq_tokens_max = layer->n_ctx_seq;
    options.n_chunk_max = (int32_t)llama_n_ubatch(layer->ctx);
    options.sink = o->sink;
    options.recent = o->recent;
    options.lookahead = o->lookahead;
    options.bits_k = o->bits_k;
    options.bits_v = o->bits_v;
    uint32_t asked = layer->n_ctx_seq;
    if (o->kv_memory_bytes > 0)
        status = create_within(layer, &options, options.n_tokens_max / OSCAR_PAGE_TOKENS, &layer->cache, error);
    else
        status = create(layer, &options, &layer->cache, error);
    if (!status) status = check_available(layer, error);
    if (!status) status = limit_context(layer, error);
    if (!status) status = stats_begin(layer, error);
    if (status) {
        oscar_cache_free(layer->cache);
        layer->cache = NULL;
        return status;
    }
    announce(layer, asked);
    return OSCAR_OK;
}
