/* embed.c - the 2-bit cache in a program of your own: append, attend, fork, truncate.
 * Build: cc embed.c $(pkg-config --cflags --libs oscar) -o embed */
#include <oscar/oscar.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 2, DIM = 64, TOKENS = 300 };
static float q[TOKENS * HEADS * DIM], k[TOKENS * HEADS * DIM], v[TOKENS * HEADS * DIM], out[TOKENS * HEADS * DIM];
static oscar_error error;

static void must(oscar_status status) {
    if (status != OSCAR_OK) exit((fprintf(stderr, "%s: %s\n", oscar_status_string(status), error.message), 1));
}
/* Appends n tokens to `seq` and computes their attention into `out`, in the only layer. */
static void decode(oscar_cache *cache, int32_t seq, int32_t n) {
    int32_t seqs[TOKENS], positions[TOKENS], start = (int32_t)oscar_seq_length(cache, seq);
    for (int32_t i = 0; i < n; i++) seqs[i] = seq, positions[i] = start + i;
    oscar_step step = OSCAR_STEP_INIT;
    step.n_tokens = n, step.seqs = seqs, step.positions = positions, step.logit_scale = 0.125f;
    step.q = q, step.k = k, step.v = v, step.out = out;
    must(oscar_seq_reserve(cache, seq, n, &error));
    must(oscar_cache_attend(cache, 0, &step, &error));
    must(oscar_seq_advance(cache, seq, n, &error));
}
int main(void) {
    for (int i = 0; i < TOKENS * HEADS * DIM; i++) q[i] = k[i] = v[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    oscar_layer layer = {.n_kv_heads = HEADS, .n_q_heads = HEADS, .head_dim = DIM};
    oscar_rotations *rotations; /* a real model's come from oscar_rotations_load() */
    must(oscar_rotations_hadamard(&rotations, &layer, 1, 2, &error));
    oscar_cache_options options = OSCAR_CACHE_OPTIONS_INIT;
    options.n_layers = 1, options.layers = &layer, options.rotations = rotations, options.n_seqs_max = 2;
    options.n_tokens_max = 1024, options.n_chunk_max = TOKENS, options.sink = 16, options.recent = 64;
    oscar_cache *cache;
    must(oscar_cache_create(&cache, &options, &error));
    decode(cache, 0, TOKENS);                                 /* a prompt of 300 tokens */
    must(oscar_seq_fork(cache, 1, 0, TOKENS, &error));        /* a second answer to it */
    decode(cache, 0, 1), decode(cache, 1, 1);
    must(oscar_seq_truncate(cache, 1, TOKENS, NULL, &error)); /* its token is taken back */
    oscar_cache_stats stats = {.struct_size = sizeof stats};
    oscar_cache_get_stats(cache, &stats);
    printf("lengths %d and %d, %d pages shared, %.2f bits an element\n", (int)oscar_seq_length(cache, 0),
           (int)oscar_seq_length(cache, 1), (int)stats.pages_shared, stats.history_bits);
    oscar_cache_free(cache), oscar_rotations_free(rotations);
}
