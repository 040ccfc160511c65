/*
 * fuzz_saved.c - any bytes as a saved sequence: as they are, and with the header's identity and the check
 * made right, which would otherwise keep changed bytes out of reach. What is refused changes nothing; what
 * is accepted is saved again as the same bytes and can be gone on from. test_cache_save.c replays the corpus.
 */
#include <stdlib.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "cache/cache.h"
#include "fuzz/fuzz.h"

int fuzz_saved(const uint8_t *bytes, size_t n_bytes);

/* One layer with one head of 16: tokens of 16 bytes, BF16 rows of 64. */
enum { D = 16, KEPT = 70, OTHER = 7, ROOM = 256 };

/* A cache that lives on from input to input; sequence 0 holds KEPT tokens, 1 is restored into. */
static oscar_cache *cache;
static uint8_t *kept[2]; /* both as saved */
static size_t kept_bytes[2];

static void must(bool holds) {
    if (!holds) abort();
}

/* Appends a token whose rows depend on its id and position. */
static oscar_status append(int32_t seq, int32_t token) {
    float q[D], k[D], v[D], out[D];
    int32_t position = (int32_t)oscar_seq_length(cache, seq);
    for (int i = 0; i < D; i++) {
        q[i] = (float)((token + i) % 5) - 2;
        k[i] = (float)((token * 7 + position + i * 3) % 11) - 5;
        v[i] = (float)((token * 3 + i * i) % 13) - 6;
    }
    oscar_step step = OSCAR_STEP_INIT;
    step.n_tokens = 1, step.seqs = &seq, step.positions = &position, step.tokens = &token;
    step.q = q, step.k = k, step.v = v, step.out = out;
    oscar_status status = oscar_seq_reserve(cache, seq, 1, NULL);
    if (!status) status = oscar_cache_attend(cache, 0, &step, NULL);
    return status ? status : oscar_seq_advance(cache, seq, 1, NULL);
}

static uint8_t *save(int32_t seq, size_t *n) {
    *n = oscar_seq_save_bytes(cache, seq);
    uint8_t *out = malloc(*n);
    must(out && oscar_seq_save(cache, seq, out, *n, NULL) == OSCAR_OK);
    return out;
}

static void open_cache(void) {
    static oscar_layer layer = {.n_kv_heads = 1, .n_q_heads = 1, .head_dim = D};
    static oscar_rotations *rotations;
    oscar_cache_options o = OSCAR_CACHE_OPTIONS_INIT;
    must(oscar_rotations_hadamard(&rotations, &layer, 1, 2, NULL) == OSCAR_OK);
    o.n_layers = 1, o.layers = &layer, o.rotations = rotations;
    o.n_seqs_max = 2, o.n_tokens_max = ROOM, o.n_chunk_max = 8;
    o.sink = 4, o.recent = 24, o.lookahead = 16;
    must(oscar_cache_create(&cache, &o, NULL) == OSCAR_OK);
    for (int s = 0; s < 2; s++) {
        for (int i = 0; i < (s ? OTHER : KEPT); i++) must(append(s, i) == OSCAR_OK);
        kept[s] = save(s, &kept_bytes[s]);
    }
}

static bool is_kept(int32_t seq) {
    size_t n;
    uint8_t *now = save(seq, &n);
    bool same = n == kept_bytes[seq] && memcmp(now, kept[seq], n) == 0;
    free(now);
    return same;
}

static void restore(const uint8_t *bytes, size_t n_bytes) {
    oscar_error error = {0};
    size_t used = 0;
    oscar_status status = oscar_seq_restore(cache, 1, bytes, n_bytes, &used, &error);
    must(is_kept(0));
    if (status) {
        must(error.status == status && error.message[0] && is_kept(1));
        return;
    }
    must(used <= n_bytes && oscar_seq_length(cache, 1) <= ROOM);
    size_t n, again;
    uint8_t *first = save(1, &n);
    must(oscar_seq_restore(cache, 1, first, n, NULL, NULL) == OSCAR_OK);
    uint8_t *second = save(1, &again);
    must(n == again && memcmp(first, second, n) == 0);
    free(first);
    free(second);
    oscar_status more = append(1, 3);
    must(more == OSCAR_OK || more == OSCAR_ERROR_NO_SPACE);
    must(oscar_seq_truncate(cache, 1, oscar_seq_length(cache, 1) / 2, NULL, NULL) == OSCAR_OK);
    append(1, 4);
    oscar_cache_stats s = {.struct_size = sizeof s};
    oscar_cache_get_stats(cache, &s);
    must(s.pages_live + s.pages_cached + s.pages_free == s.pages_total);
    must(is_kept(0));
    must(oscar_seq_restore(cache, 1, kept[1], kept_bytes[1], NULL, NULL) == OSCAR_OK && is_kept(1));
}

int fuzz_saved(const uint8_t *bytes, size_t n_bytes) {
    if (!cache) open_cache();
    restore(bytes, n_bytes);
    /* Magic and version 0, bytes 8, geometry 16, fit 24, windows 32 to 44. */
    uint64_t whole;
    if (n_bytes < 72) return 0;
    uint8_t *copy = malloc(n_bytes);
    must(copy != NULL);
    memcpy(copy, bytes, n_bytes);
    memcpy(copy, kept[0], 4);
    memcpy(copy + 16, kept[0] + 16, 28);
    memcpy(&whole, copy + 8, sizeof whole);
    if (whole > n_bytes || whole < 72) whole = n_bytes;
    memcpy(copy + 8, &whole, sizeof whole);
    uint64_t check = XXH3_64bits(copy, whole - sizeof check);
    memcpy(copy + whole - sizeof check, &check, sizeof check);
    restore(copy, n_bytes);
    free(copy);
    return 0;
}

FUZZ_ENTRY(fuzz_saved)
