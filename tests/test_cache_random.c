/*
 * test_cache_random.c - random operations on a cache and on a simple model of it.
 *
 *   OSCAR_TEST_SEED   of the first round
 *   OSCAR_TEST_OPS    operations, in rounds of 500 (3000; 10000 and more for a long run)
 */
#include "cache_chain.h"

#define N_SEQS 6
#define ROUND_OPS 500
#define N_STORIES 4

typedef struct game {
    world world;
    uint64_t seed, rng;
    chain chains[N_SEQS];
    uint8_t *saved; /* one saved sequence */
    size_t saved_bytes;
    chain saved_chain;
    int n_done[8], n_refused, n_compared;
} game;

static int below(game *g, int n) { return (int)(rng_next(&g->rng) >> 33) % n; }

/* Stories begin alike, so that prompts have prefixes in common. */
static int32_t story_token(const game *g, int story, int i) {
    int from = i < 70 ? 0 : i < 200 ? story / 2 : story;
    return (int32_t)(mix(g->seed + (uint64_t)from * 1000, (uint64_t)i) % 5);
}

static uint64_t constant_hash(uint64_t before, int64_t position, const int32_t *tokens) {
    (void)before, (void)position, (void)tokens;
    return 42;
}

static void check_all(game *g) {
    check_inside(g->world.cache);
    for (int s = 0; s < N_SEQS; s++) chain_check(g->world.cache, s, &g->chains[s]);
}

/* Outputs of a chain's last tokens against a cache that computed the chain alone, from the start. */
static void compare_outputs(game *g, const chain *c, int begin, const float *out) {
    world fresh = g->world;
    fresh.n_threads = 1;
    oscar_cache_options o = g->world.cache->options;
    oscar_error error;
    o.struct_size = sizeof o, o.layers = fresh.layers, o.rotations = o.kv_type == OSCAR_KV_F32 ? NULL : fresh.rotations;
    o.n_seqs_max = 1, o.n_tokens_max = CHAIN_MAX;
    if (oscar_cache_create(&fresh.cache, &o, &error)) fail_msg("%s", error.message);
    chain copy = *c;
    HOLDS(chain_feed(&fresh, 0, &copy, begin, false));
    float want[CHAIN_CHUNK * CHAIN_ROW];
    HOLDS(oscar_seq_reserve(fresh.cache, 0, c->n - begin, NULL) == OSCAR_OK);
    chain_compute(&fresh, fresh.cache, 0, c, begin, c->n, false, want);
    int width = fresh.layers[CHAIN_LAYERS - 1].n_q_heads * fresh.layers[CHAIN_LAYERS - 1].head_dim;
    for (int i = 0; i < c->n - begin; i++)
        for (int j = 0; j < width; j++) HOLDS(fabsf(out[i * CHAIN_ROW + j] - want[i * CHAIN_ROW + j]) < 2e-3f);
    oscar_cache_free(fresh.cache);
    g->n_compared++;
}

static void op_append(game *g, int seq) {
    chain *c = &g->chains[seq];
    int begin = c->n, n = 1 + below(g, below(g, 3) ? 100 : 4), story = below(g, N_STORIES);
    bool tokens = below(g, 25) != 0;
    int variant = below(g, 12) == 0, wild = below(g, 20) == 0;
    if (n > CHAIN_MAX - begin) n = CHAIN_MAX - begin;
    if (n == 0) return;
    oscar_status status = oscar_seq_reserve(g->world.cache, seq, n, NULL);
    if (status) {
        HOLDS(status == OSCAR_ERROR_NO_SPACE);
        g->n_refused++;
        check_all(g); /* nobody notices, and the sequence is what it was */
        return;
    }
    for (int i = 0; i < n; i++) chain_add(&g->world, c, story_token(g, story, begin + i) + 100 * wild, variant);
    float out[CHAIN_CHUNK * CHAIN_ROW];
    bool pure = seq_missing_rows(g->world.cache, &g->world.cache->seqs[seq]) == 0 && c->pure > begin;
    g->world.n_threads = below(g, 8) ? 1 : 3;
    chain_compute(&g->world, g->world.cache, seq, c, begin, c->n, tokens, out);
    if (tokens && c->known == begin) c->known = c->n;
    int low = c->n - g->world.cache->options.recent - g->world.cache->options.lookahead;
    if (c->low < low) c->low = low;
    if (pure && below(g, 8) == 0) compare_outputs(g, c, begin, out);
}

static void op_truncate(game *g, int seq) {
    chain *c = &g->chains[seq];
    int64_t missing;
    int n = below(g, 2) ? c->n - below(g, 20) : below(g, c->n + 1);
    if (n < 0) n = 0;
    bool near = c->n - n <= g->world.cache->options.lookahead;
    int64_t before = seq_missing_rows(g->world.cache, &g->world.cache->seqs[seq]);
    HOLDS(oscar_seq_truncate(g->world.cache, seq, n, &missing, NULL) == OSCAR_OK);
    if (near && before == 0 && c->pure > c->n) HOLDS(missing == 0);
    chain_cut(g->world.cache, c, n, missing);
}

static void op_fork(game *g, int seq) {
    int from = below(g, N_SEQS), n = below(g, g->chains[from].n + 1);
    if (from == seq) return;
    oscar_status status = oscar_seq_fork(g->world.cache, seq, from, n, NULL);
    if (status) {
        HOLDS(status == OSCAR_ERROR_NO_SPACE);
        g->n_refused++;
        return;
    }
    g->chains[seq] = g->chains[from];
    chain_cut(g->world.cache, &g->chains[seq], n, seq_missing_rows(g->world.cache, &g->world.cache->seqs[seq]));
}

static void op_clear(game *g, int seq) {
    HOLDS(oscar_seq_clear(g->world.cache, seq, NULL) == OSCAR_OK);
    chain_cut(g->world.cache, &g->chains[seq], 0, 0);
    if (below(g, 3)) return;
    g->chains[seq].salt = (uint64_t)below(g, 2);
    HOLDS(oscar_seq_set_salt(g->world.cache, seq, g->chains[seq].salt, NULL) == OSCAR_OK);
}

static void op_save(game *g, int seq) {
    size_t n = oscar_seq_save_bytes(g->world.cache, seq);
    g->saved = realloc(g->saved, n);
    HOLDS(oscar_seq_save(g->world.cache, seq, g->saved, n, NULL) == OSCAR_OK);
    g->saved_bytes = n;
    g->saved_chain = g->chains[seq];
}

static void op_restore(game *g, int seq) {
    if (!g->saved) return;
    if (below(g, 4) == 0) { /* a flipped byte changes nothing */
        size_t at = (size_t)below(g, (int)g->saved_bytes);
        g->saved[at] ^= 0x40;
        HOLDS(oscar_seq_restore(g->world.cache, seq, g->saved, g->saved_bytes, NULL, NULL) != OSCAR_OK);
        g->saved[at] ^= 0x40;
        return;
    }
    oscar_status status = oscar_seq_restore(g->world.cache, seq, g->saved, g->saved_bytes, NULL, NULL);
    if (status) {
        HOLDS(status == OSCAR_ERROR_NO_SPACE);
        g->n_refused++;
        return;
    }
    chain *c = &g->chains[seq];
    uint64_t salt = c->salt;
    *c = g->saved_chain;
    if (c->known > c->pure) c->known = c->pure;
    if (c->salt != salt) c->known = 0;
    c->salt = salt; /* the sequence keeps its own; rows and hashes are the saved ones */
    c->pure = INT32_MAX; /* what was not pure is not known now */
    chain_cut(g->world.cache, c, c->n, seq_missing_rows(g->world.cache, &g->world.cache->seqs[seq]));
}

static void op_attach(game *g, int seq) {
    chain *c = &g->chains[seq], found = {.salt = c->salt, .pure = INT32_MAX};
    int n = below(g, 500), story = below(g, N_STORIES), from = below(g, 2 * N_SEQS);
    int32_t tokens[CHAIN_MAX];
    for (int i = 0; i < n; i++) tokens[i] = story_token(g, story, i);
    if (from < N_SEQS) /* what some sequence holds, and then the story */
        for (int i = 0; i < n && i < g->chains[from].n; i++) tokens[i] = g->chains[from].tokens[i];
    int64_t missing_max = below(g, 2) ? 0 : 1000, attached, sink = g->world.cache->options.sink;
    HOLDS(oscar_seq_attach_prefix(g->world.cache, seq, tokens, n, missing_max, &attached, NULL) == OSCAR_OK);
    HOLDS(attached % 64 == 0 && (attached == 0 || attached < n));
    for (int i = 0; i < attached; i++) {
        chain_add(&g->world, &found, tokens[i], 0);
        if (held_history(g->world.cache, seq, i) == found.history[i]) continue;
        found.n--;
        chain_add(&g->world, &found, tokens[i], 1);
    }
    int64_t missing = seq_missing_rows(g->world.cache, &g->world.cache->seqs[seq]);
    HOLDS(missing <= missing_max);
    found.known = found.n;
    found.low = missing_max ? found.n : found.n - g->world.cache->options.recent + 1;
    if (found.low < sink) found.low = (int)sink;
    if (found.low > found.n || found.n <= sink) found.low = found.n;
    *c = found;
    chain_cut(g->world.cache, c, c->n, missing);
}

static void play(game *g, int n_ops) {
    for (int i = 0; i < N_SEQS; i++) g->chains[i].pure = INT32_MAX;
    for (int op = 0; op < n_ops; op++) {
        int seq = below(g, N_SEQS), kind = below(g, 100);
        if (kind < 50) op_append(g, seq), g->n_done[0]++;
        else if (kind < 62) op_truncate(g, seq), g->n_done[1]++;
        else if (kind < 70) op_fork(g, seq), g->n_done[2]++;
        else if (kind < 79) op_clear(g, seq), g->n_done[3]++;
        else if (kind < 83) op_save(g, seq), g->n_done[4]++;
        else if (kind < 88) op_restore(g, seq), g->n_done[5]++;
        else op_attach(g, seq), g->n_done[6]++;
        check_inside(g->world.cache);
        chain_check(g->world.cache, seq, &g->chains[seq]);
        if (op % 10 == 0) check_all(g);
    }
    check_all(g);
    for (int s = 0; s < N_SEQS; s++) oscar_seq_clear(g->world.cache, s, NULL);
    oscar_cache_stats stats = stats_of(g->world.cache);
    HOLDS(stats.pages_live == 0 && stats.pages_cached + stats.pages_free == stats.pages_total);
    HOLDS(stats.overlay_pages_live == 0);
}

/* Windows, bits, pool size and hash are drawn from the seed. */
static void open_game(game *g, uint64_t seed, const world *shared) {
    memset(g, 0, sizeof *g);
    g->seed = seed;
    g->rng = mix(seed, 1) | 1;
    g->world = *shared;
    oscar_cache_options o = world_options(&g->world, N_SEQS, 6 + below(g, 20));
    o.sink = (int32_t[]){0, 4, 70}[below(g, 3)];
    o.recent = (int32_t[]){1, 24, 100}[below(g, 3)];
    o.lookahead = (int32_t[]){0, 16, 64}[below(g, 3)];
    o.bits_k = below(g, 4) + 1, o.bits_v = below(g, 4) + 1;
    if (o.bits_k == 1) o.bits_k = 0;
    if (o.bits_v == 1) o.bits_v = 0;
    if (below(g, 5) == 0) o.kv_type = OSCAR_KV_F32, o.rotations = NULL;
    world_open(&g->world, &o);
    if (below(g, 4) == 0) g->world.cache->index.hash = constant_hash;
}

static void close_game(game *g) {
    oscar_cache_free(g->world.cache);
    free(g->saved);
}

static int ops_wanted(void) {
    const char *text = getenv("OSCAR_TEST_OPS");
    return text ? atoi(text) : 3000;
}

static void test_random(void **state) {
    (void)state;
    uint64_t seed = rng_seed("random operations", 4001);
    world shared;
    world_init(&shared, 1);
    game *g = malloc(sizeof *g);
    int n_refused = 0, n_compared = 0, rounds = (ops_wanted() + ROUND_OPS - 1) / ROUND_OPS;
    int64_t hits = 0, evicted = 0, attached = 0, unequal = 0;
    for (int r = 0; r < rounds; r++) {
        open_game(g, seed + (uint64_t)r, &shared);
        printf("round %d: OSCAR_TEST_SEED=%llu, %d pages, sink %d, recent %d, lookahead %d\n", r, (unsigned long long)g->seed,
               g->world.cache->max_pages, g->world.cache->options.sink, g->world.cache->options.recent,
               g->world.cache->options.lookahead);
        fflush(stdout);
        play(g, ROUND_OPS);
        oscar_cache_stats s = stats_of(g->world.cache);
        hits += s.page_hits, evicted += s.page_evictions, attached += s.tokens_attached, unequal += s.pages_unequal;
        n_refused += g->n_refused, n_compared += g->n_compared;
        close_game(g);
    }
    printf("%d operations: %lld pages found, %lld evicted, %lld unequal, %lld tokens attached, %d refused, %d outputs compared\n",
           rounds * ROUND_OPS, (long long)hits, (long long)evicted, (long long)unequal, (long long)attached, n_refused,
           n_compared);
    /* A test that never gets there tests nothing. */
    assert_true(hits > 100 && evicted > 100 && attached > 1000 && unequal > 10 && n_refused > 10 && n_compared > 50);
    free(g);
    world_close(&shared);
}

static void *play_thread(void *user) {
    game *g = user;
    play(g, ROUND_OPS);
    return NULL;
}

/* Caches of several threads, with one set of rotations. */
static void test_threads(void **state) {
    (void)state;
    uint64_t seed = rng_seed("caches of several threads", 4101);
    enum { N = 3 };
    world shared;
    world_init(&shared, 1);
    game *games = malloc(N * sizeof *games);
    pthread_t ids[N];
    for (int i = 0; i < N; i++) open_game(&games[i], seed + (uint64_t)i, &shared);
    for (int i = 0; i < N; i++) assert_int_equal(pthread_create(&ids[i], NULL, play_thread, &games[i]), 0);
    for (int i = 0; i < N; i++) pthread_join(ids[i], NULL);
    for (int i = 0; i < N; i++) close_game(&games[i]);
    free(games);
    world_close(&shared);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random), cmocka_unit_test(test_threads)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
