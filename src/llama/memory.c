/*
 * memory.c - llama_memory_*() on our cache.
 *
 * A sequence here is always the tokens [0, n), so what would leave a hole or shift positions is
 * refused. Before the first decode there is no cache and every sequence is empty.
 */
#include "llama/layer.h"

static int64_t length_of(const oscar_llama *layer, llama_seq_id seq) {
    if (!layer->cache || seq < 0 || (uint32_t)seq >= layer->n_seq_max) return 0;
    return oscar_seq_length(layer->cache, seq);
}

void oscar_llama_memory_clear(oscar_llama *layer) {
    if (!layer->cache) return;
    for (uint32_t s = 0; s < layer->n_seq_max; s++) oscar_seq_clear(layer->cache, (int32_t)s, NULL);
    stats_note(layer, STATS_OTHER, 0);
}

static bool truncate_seq(oscar_llama *layer, llama_seq_id seq, int64_t n) {
    int64_t n_missing = 0;
    if (oscar_seq_truncate(layer->cache, seq, n, &n_missing, &layer->error)) return false;
    stats_note(layer, STATS_OTHER, 0);
    if (n_missing > 0 && !layer->told_rollback) {
        layer->told_rollback = true;
        layer_log(layer,
                  "sequence %d went back to %lld tokens, further than the lookahead of %d: its last %lld "
                  "tokens are seen quantised until new ones come (said once)",
                  seq, (long long)n, layer->options.lookahead, (long long)n_missing);
    }
    return true;
}

static bool remove_range(oscar_llama *layer, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    int64_t n = length_of(layer, seq), begin = p0 < 0 ? 0 : p0;
    if (begin >= n || (p1 >= 0 && p1 <= begin)) return true; /* holds nothing of it */
    if (p1 >= 0 && p1 < n) return false;                     /* would leave a hole */
    return truncate_seq(layer, seq, begin);
}

bool oscar_llama_memory_seq_rm(oscar_llama *layer, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    if (seq >= 0) return remove_range(layer, seq, p0, p1);
    bool ok = true;
    for (uint32_t s = 0; s < layer->n_seq_max; s++) ok &= remove_range(layer, (llama_seq_id)s, p0, p1);
    return ok;
}

void oscar_llama_memory_seq_cp(oscar_llama *layer, llama_seq_id src, llama_seq_id dst, llama_pos p0,
                               llama_pos p1) {
    if (!layer->cache || src == dst) return;
    int64_t n = length_of(layer, src);
    if (p1 >= 0 && p1 < n) n = p1;
    if (p0 > 0) {
        layer_log(layer, "llama_memory_seq_cp(%d, %d, %d, %d): copies that do not begin at 0 are not supported",
                  src, dst, p0, p1);
        return;
    }
    if (oscar_seq_fork(layer->cache, dst, src, n, &layer->error))
        layer_log(layer, "llama_memory_seq_cp(%d, %d): %s", src, dst, layer->error.message);
    stats_note(layer, STATS_OTHER, 0);
}

void oscar_llama_memory_seq_keep(oscar_llama *layer, llama_seq_id seq) {
    if (!layer->cache) return;
    for (uint32_t s = 0; s < layer->n_seq_max; s++)
        if ((llama_seq_id)s != seq) oscar_seq_clear(layer->cache, (int32_t)s, NULL);
    stats_note(layer, STATS_OTHER, 0);
}

/* All layers keep all tokens, sliding ones as well. */
llama_pos oscar_llama_memory_seq_pos_min(const oscar_llama *layer, llama_seq_id seq) {
    return length_of(layer, seq) > 0 ? 0 : -1;
}

llama_pos oscar_llama_memory_seq_pos_max(const oscar_llama *layer, llama_seq_id seq) {
    return (llama_pos)length_of(layer, seq) - 1;
}

void memory_refuse(oscar_llama *layer, const char *function) {
    layer_log(layer, "%s() is not supported: positions in this cache cannot change", function);
}
