/*
 * kivi.c - the KIVI baseline of `oscar eval`: keys quantised per channel over groups of tokens.
 *
 * A group is quantised when its last token has come, from the BF16 rows; until then its keys stand
 * unquantised in the history, as KIVI keeps its residual. Not a storage format: history is float32.
 */
#include "cache/cache.h"

static void quantise_channel(const uint16_t *const *pages, int32_t n_pages, float *const *out, int32_t levels) {
    float low = bf16_to_float(pages[0][0]), high = low;
    for (int32_t p = 0; p < n_pages; p++)
        for (int32_t t = 0; t < OSCAR_PAGE_TOKENS; t++) {
            float x = bf16_to_float(pages[p][2 * t]);
            low = x < low ? x : low;
            high = x > high ? x : high;
        }
    float step = fp16_to_float(fp16_from_float((high - low) / (float)levels));
    float offset = fp16_to_float(fp16_from_float(low));
    for (int32_t p = 0; p < n_pages; p++)
        for (int32_t t = 0; t < OSCAR_PAGE_TOKENS; t++) {
            float c = step > 0 ? (bf16_to_float(pages[p][2 * t]) - offset) / step + 0.5f : 0.0f;
            c = c < 0 ? 0 : c > (float)levels ? (float)levels : c;
            out[p][t] = offset + step * (float)(int)c;
        }
}

static void quantise_group(oscar_cache *cache, const cache_seq *seq, int32_t first_page) {
    const cache_layer *layer = &cache->layers[cache->step.layer];
    int32_t n_pages = cache->baseline_kivi / OSCAR_PAGE_TOKENS, d = layer->shape.head_dim;
    int32_t levels = (1 << layer->k_codec[0].bits) - 1;
    const uint16_t *from[KIVI_MAX_PAGES];
    float *to[KIVI_MAX_PAGES];
    for (int32_t h = 0; h < layer->shape.n_kv_heads; h++)
        for (int32_t i = 0; i < d; i++) {
            for (int32_t p = 0; p < n_pages; p++) {
                uint8_t *overlay = pool_page(&cache->overlay, seq->overlay[first_page + p]);
                uint8_t *history = pool_page(&cache->history, seq->history[first_page + p]);
                from[p] = layer_overlay_keys(layer, overlay, h) + page_bf16_at(PAGE_KEY, d, 0, i);
                to[p] = (float *)(void *)layer_history(layer, history, h) + (size_t)i * OSCAR_PAGE_TOKENS;
            }
            quantise_channel(from, n_pages, to, levels);
        }
}

void step_kivi_phase(oscar_cache *cache) {
    step_state *s = &cache->step;
    int32_t group = cache->baseline_kivi;
    for (int32_t i = 0; i < s->n_segments; i++) {
        const step_segment *segment = &s->segments[i];
        int32_t last = s->append_pos[segment->first + segment->count - 1];
        if ((last + 1) % group) continue;
        quantise_group(cache, &cache->seqs[segment->seq], (last + 1 - group) / OSCAR_PAGE_TOKENS);
    }
}
