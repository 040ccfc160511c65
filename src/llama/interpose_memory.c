/* interpose_memory.c - llama_memory_*() and llama_state_*() of contexts on our cache. */
#include "llama/interpose_table.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT void llama_memory_clear(llama_memory_t memory, bool data) {
    oscar_llama *layer = layer_of_memory(memory);
    if (layer)
        oscar_llama_memory_clear(layer);
    else
        REAL(llama_memory_clear)(memory, data);
}

EXPORT bool llama_memory_seq_rm(llama_memory_t memory, llama_seq_id seq, llama_pos p0, llama_pos p1) {
    oscar_llama *layer = layer_of_memory(memory);
    return layer ? oscar_llama_memory_seq_rm(layer, seq, p0, p1) : REAL(llama_memory_seq_rm)(memory, seq, p0, p1);
}

EXPORT void llama_memory_seq_cp(llama_memory_t memory, llama_seq_id src, llama_seq_id dst, llama_pos p0,
                                llama_pos p1) {
    oscar_llama *layer = layer_of_memory(memory);
    if (layer)
        oscar_llama_memory_seq_cp(layer, src, dst, p0, p1);
    else
        REAL(llama_memory_seq_cp)(memory, src, dst, p0, p1);
}

EXPORT void llama_memory_seq_keep(llama_memory_t memory, llama_seq_id seq) {
    oscar_llama *layer = layer_of_memory(memory);
    if (layer)
        oscar_llama_memory_seq_keep(layer, seq);
    else
        REAL(llama_memory_seq_keep)(memory, seq);
}

EXPORT void llama_memory_seq_add(llama_memory_t memory, llama_seq_id seq, llama_pos p0, llama_pos p1,
                                 llama_pos delta) {
    oscar_llama *layer = layer_of_memory(memory);
    if (layer)
        memory_refuse(layer, "llama_memory_seq_add");
    else
        REAL(llama_memory_seq_add)(memory, seq, p0, p1, delta);
}

EXPORT void llama_memory_seq_div(llama_memory_t memory, llama_seq_id seq, llama_pos p0, llama_pos p1, int d) {
    oscar_llama *layer = layer_of_memory(memory);
    if (layer)
        memory_refuse(layer, "llama_memory_seq_div");
    else
        REAL(llama_memory_seq_div)(memory, seq, p0, p1, d);
}

EXPORT llama_pos llama_memory_seq_pos_min(llama_memory_t memory, llama_seq_id seq) {
    const oscar_llama *layer = layer_of_memory(memory);
    return layer ? oscar_llama_memory_seq_pos_min(layer, seq) : REAL(llama_memory_seq_pos_min)(memory, seq);
}

EXPORT llama_pos llama_memory_seq_pos_max(llama_memory_t memory, llama_seq_id seq) {
    const oscar_llama *layer = layer_of_memory(memory);
    return layer ? oscar_llama_memory_seq_pos_max(layer, seq) : REAL(llama_memory_seq_pos_max)(memory, seq);
}

EXPORT bool llama_memory_can_shift(llama_memory_t memory) {
    return layer_of_memory(memory) ? false : REAL(llama_memory_can_shift)(memory);
}

/* --- state: libllama's plain forms call its _ext forms, which may be these or inlined ones, so all
 * are wrapped and agree. Flags change nothing: a partial state is the whole one (state.c), and there
 * is no device memory to keep it in. */

EXPORT size_t llama_state_get_size(struct llama_context *ctx) {
    oscar_llama *layer = layer_of_context(ctx);
    return layer ? oscar_llama_state_get_size(layer) : REAL(llama_state_get_size)(ctx);
}

EXPORT size_t llama_get_state_size(struct llama_context *ctx) { return llama_state_get_size(ctx); }

EXPORT size_t llama_state_get_data(struct llama_context *ctx, uint8_t *data, size_t size) {
    oscar_llama *layer = layer_of_context(ctx);
    return layer ? oscar_llama_state_get_data(layer, data, size) : REAL(llama_state_get_data)(ctx, data, size);
}

EXPORT size_t llama_copy_state_data(struct llama_context *ctx, uint8_t *data) {
    return llama_state_get_data(ctx, data, SIZE_MAX);
}

EXPORT size_t llama_state_set_data(struct llama_context *ctx, const uint8_t *data, size_t size) {
    oscar_llama *layer = layer_of_context(ctx);
    return layer ? oscar_llama_state_set_data(layer, data, size) : REAL(llama_state_set_data)(ctx, data, size);
}

EXPORT size_t llama_set_state_data(struct llama_context *ctx, const uint8_t *data) {
    return llama_state_set_data(ctx, data, SIZE_MAX);
}

EXPORT bool llama_state_load_file(struct llama_context *ctx, const char *path, llama_token *tokens,
                                  size_t capacity, size_t *count) {
    oscar_llama *layer = layer_of_context(ctx);
    return layer ? oscar_llama_state_load_file(layer, path, tokens, capacity, count)
                 : REAL(llama_state_load_file)(ctx, path, tokens, capacity, count);
}

EXPORT bool llama_load_session_file(struct llama_context *ctx, const char *path, llama_token *tokens,
                                    size_t capacity, size_t *count) {
    return llama_state_load_file(ctx, path, tokens, capacity, count);
}

EXPORT bool llama_state_save_file(struct llama_context *ctx, const char *path, const llama_token *tokens,
                                  size_t count) {
    oscar_llama *layer = layer_of_context(ctx);
    return layer ? oscar_llama_state_save_file(layer, path, tokens, count)
                 : REAL(llama_state_save_file)(ctx, path, tokens, count);
}

EXPORT bool llama_save_session_file(struct llama_context *ctx, const char *path, const llama_token *tokens,
                                    size_t count) {
    return llama_state_save_file(ctx, path, tokens, count);
}

EXPORT size_t llama_state_seq_get_size_ext(struct llama_context *ctx, llama_seq_id seq, llama_state_seq_flags flags) {
    oscar_llama *layer = layer_of_context(ctx);
    return layer ? oscar_llama_state_seq_get_size(layer, seq) : REAL(llama_state_seq_get_size_ext)(ctx, seq, flags);
}

EXPORT size_t llama_state_seq_get_size(struct llama_context *ctx, llama_seq_id seq) {
    return llama_state_seq_get_size_ext(ctx, seq, 0);
}

EXPORT size_t llama_state_seq_get_data_ext(struct llama_context *ctx, uint8_t *data, size_t size, llama_seq_id seq,
                                           llama_state_seq_flags flags) {
    oscar_llama *layer = layer_of_context(ctx);
    return layer ? oscar_llama_state_seq_get_data(layer, data, size, seq)
                 : REAL(llama_state_seq_get_data_ext)(ctx, data, size, seq, flags);
}

EXPORT size_t llama_state_seq_get_data(struct llama_context *ctx, uint8_t *data, size_t size, llama_seq_id seq) {
    return llama_state_seq_get_data_ext(ctx, data, size, seq, 0);
}

EXPORT size_t llama_state_seq_set_data_ext(struct llama_context *ctx, const uint8_t *data, size_t size,
                                           llama_seq_id seq, llama_state_seq_flags flags) {
    oscar_llama *layer = layer_of_context(ctx);
    return layer ? oscar_llama_state_seq_set_data(layer, data, size, seq)
                 : REAL(llama_state_seq_set_data_ext)(ctx, data, size, seq, flags);
}

EXPORT size_t llama_state_seq_set_data(struct llama_context *ctx, const uint8_t *data, size_t size,
                                       llama_seq_id seq) {
    return llama_state_seq_set_data_ext(ctx, data, size, seq, 0);
}

EXPORT size_t llama_state_seq_save_file(struct llama_context *ctx, const char *path, llama_seq_id seq,
                                        const llama_token *tokens, size_t count) {
    oscar_llama *layer = layer_of_context(ctx);
    return layer ? oscar_llama_state_seq_save_file(layer, path, seq, tokens, count)
                 : REAL(llama_state_seq_save_file)(ctx, path, seq, tokens, count);
}

EXPORT size_t llama_state_seq_load_file(struct llama_context *ctx, const char *path, llama_seq_id seq,
                                        llama_token *tokens, size_t capacity, size_t *count) {
    oscar_llama *layer = layer_of_context(ctx);
    return layer ? oscar_llama_state_seq_load_file(layer, path, seq, tokens, capacity, count)
                 : REAL(llama_state_seq_load_file)(ctx, path, seq, tokens, capacity, count);
}
