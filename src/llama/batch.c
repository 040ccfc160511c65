/*
 * batch.c - the tokens of a call: their positions and sequences, room for them, and counting them
 * in.
 *
 * llama.cpp cuts a batch into micro-batches of n_ubatch tokens, in the batch's order, and runs all
 * layers of one before the next. Tokens are counted in after each, so that the cache can give back
 * what no later query needs. When a call fails, the micro-batches that were computed stay, as in
 * llama.cpp; callers ask llama_memory_seq_pos_max().
 */
#include <stdlib.h>

#include "llama/layer.h"

void call_free(call_state *call) {
    free(call->positions);
    free(call->tokens);
    free(call->offsets);
    free(call->chunk_offsets);
    free(call->seqs);
    free(call->new_tokens);
    free(call->done);
    memset(call, 0, sizeof *call);
}

void call_clear(oscar_llama *layer) {
    call_state *call = &layer->call;
    call->n_tokens = 0;
    call->n_seqs = 0;
    call->single = true;
    if (call->new_tokens) memset(call->new_tokens, 0, layer->n_seq_max * sizeof *call->new_tokens);
}

static bool grow(int32_t **array, size_t count) {
    int32_t *p = realloc(*array, count * sizeof **array);
    if (p) *array = p;
    return p != NULL;
}

static bool make_room(oscar_llama *layer, int32_t n_seqs) {
    call_state *call = &layer->call;
    if (!call->new_tokens) {
        call->new_tokens = calloc(layer->n_seq_max, sizeof *call->new_tokens);
        if (!call->new_tokens) return false;
    }
    if (call->n_tokens == call->capacity) {
        int32_t wanted = call->capacity ? 2 * call->capacity : 512;
        if (!grow(&call->positions, (size_t)wanted) || !grow(&call->tokens, (size_t)wanted) ||
            !grow(&call->offsets, (size_t)wanted + 1) || !grow(&call->chunk_offsets, (size_t)wanted + 1))
            return false;
        call->capacity = wanted;
    }
    if (call->n_seqs + n_seqs > call->seq_capacity) {
        int32_t wanted = 2 * (call->n_seqs + n_seqs) + 512;
        if (!grow(&call->seqs, (size_t)wanted)) return false;
        call->seq_capacity = wanted;
    }
    return true;
}

bool call_add(oscar_llama *layer, llama_token token, llama_pos position, int32_t n_seqs, const llama_seq_id *seqs) {
    call_state *call = &layer->call;
    if (!make_room(layer, n_seqs)) return false;
    int32_t i = call->n_tokens++;
    call->positions[i] = position;
    call->tokens[i] = token;
    call->offsets[i] = call->n_seqs;
    for (int32_t x = 0; x < n_seqs; x++) {
        bool twice = false;
        for (int32_t y = call->offsets[i]; y < call->n_seqs; y++) twice |= call->seqs[y] == seqs[x];
        if (twice) continue;
        call->seqs[call->n_seqs++] = seqs[x];
        if (seqs[x] >= 0 && (uint32_t)seqs[x] < layer->n_seq_max) call->new_tokens[seqs[x]]++;
    }
    call->offsets[i + 1] = call->n_seqs;
    call->single &= call->n_seqs == call->offsets[i] + 1;
    return true;
}

llama_pos call_next_position(const oscar_llama *layer, llama_seq_id seq) {
    if (seq < 0 || (uint32_t)seq >= layer->n_seq_max) return 0;
    int64_t length = layer->cache ? oscar_seq_length(layer->cache, seq) : 0;
    return (llama_pos)length + (layer->call.new_tokens ? layer->call.new_tokens[seq] : 0);
}

/* Every sequence's positions must rise by one from its length. */
static oscar_status check_positions(oscar_llama *layer, oscar_error *error) {
    call_state *call = &layer->call;
    if (call->n_tokens <= 0) return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "the batch has no tokens");
    memset(call->new_tokens, 0, layer->n_seq_max * sizeof *call->new_tokens);
    for (int32_t i = 0; i < call->n_tokens; i++) {
        if (call->offsets[i] == call->offsets[i + 1])
            return error_set(error, OSCAR_ERROR_ARGUMENT, i, "token %d belongs to no sequence", i);
        for (int32_t x = call->offsets[i]; x < call->offsets[i + 1]; x++) {
            int32_t seq = call->seqs[x];
            if (seq < 0 || (uint32_t)seq >= layer->n_seq_max)
                return error_set(error, OSCAR_ERROR_ARGUMENT, i, "token %d: sequence %d, expected 0 to %u", i,
                                 seq, layer->n_seq_max - 1);
            int64_t expected = oscar_seq_length(layer->cache, seq) + call->new_tokens[seq];
            if (call->positions[i] != expected)
                return error_set(error, OSCAR_ERROR_ARGUMENT, i,
                                 "token %d: position %d of sequence %d, expected %lld", i, call->positions[i],
                                 seq, (long long)expected);
            call->new_tokens[seq]++;
        }
    }
    return OSCAR_OK;
}

/* Ends what is reserved beyond the tokens held. */
static void release(oscar_llama *layer, uint32_t n_seqs) {
    for (uint32_t s = 0; s < n_seqs; s++)
        if (layer->call.new_tokens[s])
            oscar_seq_truncate(layer->cache, (int32_t)s, oscar_seq_length(layer->cache, (int32_t)s), NULL, NULL);
}

/* All or nothing. */
static bool reserve(oscar_llama *layer) {
    for (uint32_t s = 0; s < layer->n_seq_max; s++) {
        int32_t n = layer->call.new_tokens[s];
        if (n == 0) continue;
        if (oscar_seq_length(layer->cache, (int32_t)s) + n <= (int64_t)layer->n_ctx_seq &&
            oscar_seq_reserve(layer->cache, (int32_t)s, n, &layer->error) == OSCAR_OK)
            continue;
        release(layer, s);
        return false;
    }
    return true;
}

static int32_t refuse(oscar_llama *layer, int32_t result) {
    layer_log(layer, "%s", layer->error.message);
    stats_note(layer, STATS_ERROR, 0);
    return result;
}

bool call_find_layers(oscar_llama *layer) {
    if (layer->cache) return true;
    if (layer->refused) return false;
    oscar_status status = probe_run(layer, &layer->error);
    if (!status) status = layer_create_cache(layer, &layer->error);
    layer->refused = status != OSCAR_OK;
    return status == OSCAR_OK;
}

int32_t call_begin(oscar_llama *layer) {
    call_state *call = &layer->call;
    layer->failed = false;
    if (!llama_get_causal_attn(layer->ctx)) {
        error_set(&layer->error, OSCAR_ERROR_UNSUPPORTED, -1, "non-causal attention is not supported");
        return refuse(layer, -2);
    }
    if (!call_find_layers(layer)) return refuse(layer, -2);
    if (check_positions(layer, &layer->error)) return refuse(layer, -1);
    if (!reserve(layer)) {
        stats_note(layer, STATS_NO_SLOT, 0);
        return 1;
    }
    inner.memory_clear(layer->memory, false);
    call->base = call->chunk = call->n_done = 0;
    memset(call->done, 0, (size_t)layer->n_layers);
    call->active = true;
    return 0;
}

oscar_status call_layer_done(oscar_llama *layer, int32_t index, oscar_error *error) {
    call_state *call = &layer->call;
    if (call->done[index])
        return error_set(error, OSCAR_ERROR_INTERNAL, index,
                         "attention layer %d was reached twice in one micro-batch", index);
    call->done[index] = 1;
    call->chunk = layer->hooks[index].step.n_tokens;
    if (++call->n_done < layer->n_layers) return OSCAR_OK;
    /* One sequence's tokens of the micro-batch are counted in together. */
    oscar_status status = OSCAR_OK;
    int32_t begin = call->offsets[call->base], end = call->offsets[call->base + call->chunk];
    for (int32_t x = begin; x < end && !status; x++) {
        int32_t seq = call->seqs[x], n = 0;
        if (seq < 0) continue;
        for (int32_t y = x; y < end; y++) {
            if (call->seqs[y] != seq) continue;
            n++;
            call->seqs[y] = -1; /* counted */
        }
        status = oscar_seq_advance(layer->cache, seq, n, error);
    }
    call->base += call->chunk;
    call->chunk = call->n_done = 0;
    memset(call->done, 0, (size_t)layer->n_layers);
    return status;
}

int32_t call_end(oscar_llama *layer, int32_t result) {
    call_state *call = &layer->call;
    llama_synchronize(layer->ctx);
    device_put_back(layer);
    call->active = false;
    if (!layer->failed && result == 0 && call->base != call->n_tokens) {
        error_set(&layer->error, OSCAR_ERROR_UNSUPPORTED, call->base,
                  "%d of %d layers were reached for token %d: the graph differs from the first call's",
                  call->n_done, layer->n_layers, call->base);
        layer->failed = true;
    }
    if (layer->failed) {
        layer_log(layer, "%s", layer->error.message);
        result = -2;
    }
    if (result != 0) release(layer, layer->n_seq_max);
    stats_note(layer, result == 0 ? STATS_DECODE : STATS_ERROR, call->n_tokens);
    return result;
}

int32_t oscar_llama_decode(oscar_llama *layer, struct llama_batch batch) {
    static const llama_seq_id zero = 0;
    call_clear(layer);
    for (int32_t i = 0; i < batch.n_tokens; i++) {
        int32_t n = batch.n_seq_id ? batch.n_seq_id[i] : 1;
        const llama_seq_id *seqs = batch.seq_id ? batch.seq_id[i] : &zero;
        llama_pos position = batch.pos ? batch.pos[i] : call_next_position(layer, n > 0 ? seqs[0] : 0);
        if (call_add(layer, batch.token ? batch.token[i] : -1, position, n, seqs)) continue;
        error_set(&layer->error, OSCAR_ERROR_MEMORY, i, "no memory for a batch of %d tokens", batch.n_tokens);
        return refuse(layer, -2);
    }
    int32_t result = call_begin(layer);
    if (result) return result;
    batch.pos = layer->call.positions;
    return call_end(layer, inner.decode(layer->ctx, batch));
}
