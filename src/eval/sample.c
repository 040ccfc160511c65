/* Text that the model writes itself: calibration without a text file. */
#include <math.h>
#include <stdlib.h>

#include "eval/kl.h"
#include "eval/text.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

/* splitmix64 */
static uint64_t next_random(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* A token with probability softmax(logits). scratch: [n_vocab]. -1: logits are not finite. */
static int32_t draw(int32_t n_vocab, const float *logits, float *scratch, uint64_t *state) {
    float most = -INFINITY;
    for (int32_t i = 0; i < n_vocab; i++) most = logits[i] > most ? logits[i] : most;
    double sum = 0;
    for (int32_t i = 0; i < n_vocab; i++) {
        scratch[i] = kl_exp(logits[i] - most);
        sum += (double)scratch[i];
    }
    if (!isfinite(most) || !isfinite(sum)) return -1;
    double left = sum * ((double)(next_random(state) >> 11) * 0x1p-53);
    for (int32_t i = 0; i < n_vocab; i++) {
        left -= (double)scratch[i];
        if (left < 0) return i;
    }
    return n_vocab - 1;
}

static llama_token start_token(const struct llama_vocab *vocab) {
    llama_token token = llama_vocab_bos(vocab);
    if (token == LLAMA_TOKEN_NULL) token = llama_vocab_eos(vocab);
    return token;
}

static bool chunks_begin(token_chunks *out, int32_t n_chunks, int32_t chunk_tokens, llama_token start) {
    memset(out, 0, sizeof *out);
    out->n_chunks = n_chunks;
    out->length = calloc((size_t)n_chunks, sizeof *out->length);
    out->token = calloc((size_t)n_chunks, sizeof *out->token);
    bool ok = out->length && out->token;
    for (int32_t i = 0; ok && i < n_chunks; i++) {
        out->token[i] = calloc((size_t)chunk_tokens, sizeof **out->token);
        out->length[i] = chunk_tokens;
        ok = out->token[i] != NULL;
        if (ok) out->token[i][0] = start;
    }
    return ok;
}

/* One token more for every sequence. An end of text is a token like another: the model goes on with
 * its next text. */
static oscar_status sample_step(struct llama_context *ctx, struct llama_batch *batch, int32_t t, int32_t n_vocab,
                                float *scratch, uint64_t *state, token_chunks *chunks, oscar_error *error) {
    batch->n_tokens = chunks->n_chunks;
    for (int32_t i = 0; i < chunks->n_chunks; i++) {
        batch->token[i] = chunks->token[i][t];
        batch->pos[i] = t;
        batch->n_seq_id[i] = 1;
        batch->seq_id[i][0] = i;
        batch->logits[i] = 1;
    }
    int32_t result = llama_decode(ctx, *batch);
    if (result != 0) return error_set(error, OSCAR_ERROR_INTERNAL, t, "llama_decode returned %d when sampling token %d", result, t);
    for (int32_t i = 0; i < chunks->n_chunks; i++) {
        int32_t token = draw(n_vocab, llama_get_logits_ith(ctx, i), scratch, state);
        if (token < 0) return error_set(error, OSCAR_ERROR_NOT_FINITE, t, "the model's logits hold NaN or infinity at token %d", t);
        chunks->token[i][t + 1] = token;
    }
    return OSCAR_OK;
}

oscar_status text_chunks_sampled(struct llama_model *model, int32_t n_chunks, int32_t chunk_tokens, uint64_t seed,
                                 int32_t n_threads, text_progress progress, void *user, token_chunks *out,
                                 oscar_error *error) {
    const struct llama_vocab *vocab = llama_model_get_vocab(model);
    int32_t n_vocab = llama_vocab_n_tokens(vocab);
    llama_token start = start_token(vocab);
    memset(out, 0, sizeof *out);
    if (start == LLAMA_TOKEN_NULL)
        return error_set(error, OSCAR_ERROR_UNSUPPORTED, -1, "the vocabulary has no token to begin a text with: give one with --text");
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = (uint32_t)n_chunks * (((uint32_t)chunk_tokens + 255) / 256 * 256);
    params.n_batch = params.n_ubatch = (uint32_t)n_chunks;
    params.n_seq_max = (uint32_t)n_chunks;
    params.n_threads = params.n_threads_batch = n_threads;
    struct llama_context *ctx = llama_init_from_model(model, params);
    if (!ctx) return error_set(error, OSCAR_ERROR_INTERNAL, -1, "libllama made no context of %u tokens", params.n_ctx);
    struct llama_batch batch = llama_batch_init(n_chunks, 0, 1);
    float *scratch = malloc((size_t)n_vocab * sizeof *scratch);
    uint64_t state = seed;
    oscar_status status = OSCAR_OK;
    if (!scratch || !chunks_begin(out, n_chunks, chunk_tokens, start))
        status = error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for %d sampled texts", n_chunks);
    for (int32_t t = 0; status == OSCAR_OK && t + 1 < chunk_tokens; t++) {
        status = sample_step(ctx, &batch, t, n_vocab, scratch, &state, out, error);
        if (progress) progress(user, "writing a text", (int64_t)(t + 1) * n_chunks, (int64_t)chunk_tokens * n_chunks);
    }
    XXH64_state_t hash;
    XXH64_reset(&hash, 0);
    for (int32_t i = 0; status == OSCAR_OK && i < n_chunks; i++)
        XXH64_update(&hash, out->token[i], (size_t)chunk_tokens * sizeof **out->token);
    out->hash = XXH64_digest(&hash);
    if (status != OSCAR_OK) token_chunks_free(out);
    free(scratch);
    llama_batch_free(batch);
    llama_free(ctx);
    return status;
}
