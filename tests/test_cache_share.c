/* test_cache_share.c - pages held once, pages that stay, prefixes found again, room that runs out. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "cache_chain.h"

/* Sixteen sequences with one prompt of 4,000 tokens, in a pool that could not hold it twice. */
static void test_sixteen_prompts(void **state) {
    (void)state;
    for (int kv = 0; kv < 2; kv++)
        for (int together = 0; together < 2; together++) {
            enum { N = 4000, SEQS = 16, FULL = N / 64 };
            world w;
            world_init(&w, 1);
            oscar_cache_options o = world_options(&w, SEQS, FULL + 2 * SEQS + 2);
            o.kv_type = kv;
            if (kv == OSCAR_KV_F32) o.rotations = NULL;
            world_open(&w, &o);
            chain *c = prompt(&w, 1, N, 0, N), *seqs[SEQS];
            for (int s = 0; s < SEQS; s++) seqs[s] = malloc(sizeof *c), *seqs[s] = *c;
            if (together) /* all of them grow at the same time */
                for (int at = 0; at < N;) {
                    at = at + 50 < N ? at + 50 : N;
                    for (int s = 0; s < SEQS; s++) assert_true(chain_feed(&w, s, seqs[s], at, true));
                }
            else
                for (int s = 0; s < SEQS; s++) assert_true(chain_feed(&w, s, seqs[s], N, true));
            oscar_cache_stats stats = stats_of(w.cache);
            assert_int_equal(stats.pages_live, FULL + SEQS); /* and a partial page for each */
            assert_int_equal(stats.pages_shared, FULL);
            assert_int_equal(stats.page_hits, (SEQS - 1) * FULL);
            assert_int_equal(stats.page_misses, FULL);
            assert_int_equal(stats.pages_unequal, 0);
            assert_int_equal(stats.history_bytes, (stats.pages_live + stats.pages_cached) * stats.page_bytes);
            /* BF16 rows as well: the sink's page and the window's full ones once. */
            if (w.cache->has_overlay) assert_true(stats.overlay_pages_live <= 3 + SEQS);
            check_inside(w.cache);
            for (int s = 0; s < SEQS; s += 5) assert_goes_on(&w, s, seqs[s]);
            for (int s = 0; s < SEQS; s++) free(seqs[s]);
            free(c);
            world_close(&w);
        }
}

static uint64_t constant_hash(uint64_t before, int64_t position, const int32_t *tokens) {
    (void)before, (void)position, (void)tokens;
    return 0;
}

/* Every hash equal: prompts that differ in one token, wherever it is, share what is before it alone. */
static void test_equal_hashes(void **state) {
    (void)state;
    static const int differ[] = {0, 63, 64, 200};
    for (size_t i = 0; i < sizeof differ / sizeof *differ; i++) {
        world w;
        world_init(&w, 1);
        oscar_cache_options o = world_options(&w, 3, 40);
        world_open(&w, &o);
        w.cache->index.hash = constant_hash;
        chain *a = prompt(&w, 1, 300, 0, 300), *b = calloc(1, sizeof *b);
        b->pure = INT32_MAX;
        for (int t = 0; t < 300; t++) chain_add(&w, b, a->tokens[t] + (t == differ[i]), 0);
        assert_true(chain_feed(&w, 0, a, 300, true));
        assert_true(chain_feed(&w, 1, b, 300, true));
        assert_int_equal(stats_of(w.cache).pages_shared, differ[i] / 64);
        assert_goes_on(&w, 0, a);
        assert_goes_on(&w, 1, b);
        for (int k = 0; k < 2; k++) {
            const chain *c = k ? b : a;
            int64_t n;
            assert_int_equal(oscar_seq_attach_prefix(w.cache, 2, c->tokens, 300, 1000, &n, NULL), OSCAR_OK);
            assert_int_equal(n, 256);
            for (int t = 0; t < 256; t++) assert_true(held_history(w.cache, 2, t) == c->history[t]);
        }
        check_inside(w.cache);
        free(a), free(b);
        world_close(&w);
    }
}

/* The same 64 tokens after another first page, and under another salt, are other rows. */
static void test_keys(void **state) {
    (void)state;
    world w;
    world_init(&w, 1);
    oscar_cache_options o = world_options(&w, 3, 40);
    world_open(&w, &o);
    chain *a = prompt(&w, 1, 256, 0, 256), *b = calloc(1, sizeof *b), *c = calloc(1, sizeof *c);
    b->pure = c->pure = INT32_MAX;
    c->salt = 5;
    for (int t = 0; t < 256; t++) chain_add(&w, b, t < 64 ? 1 : a->tokens[t], 0);
    for (int t = 0; t < 256; t++) chain_add(&w, c, a->tokens[t], 0);
    assert_int_equal(oscar_seq_set_salt(w.cache, 2, 5, NULL), OSCAR_OK);
    assert_true(chain_feed(&w, 0, a, 256, true));
    assert_true(chain_feed(&w, 1, b, 256, true));
    assert_true(chain_feed(&w, 2, c, 256, true));
    assert_int_equal(stats_of(w.cache).pages_shared, 0);
    assert_int_equal(stats_of(w.cache).pages_unequal, 0);
    for (int s = 0; s < 3; s++) assert_goes_on(&w, s, (chain *[]){a, b, c}[s]);
    assert_int_equal(oscar_seq_set_salt(w.cache, 2, 6, NULL), OSCAR_ERROR_ARGUMENT); /* it holds tokens */
    assert_int_equal(oscar_seq_set_salt(w.cache, 3, 6, NULL), OSCAR_ERROR_ARGUMENT);
    int64_t n;
    assert_int_equal(oscar_seq_clear(w.cache, 0, NULL), OSCAR_OK);
    assert_int_equal(oscar_seq_set_salt(w.cache, 0, 6, NULL), OSCAR_OK);
    assert_int_equal(oscar_seq_attach_prefix(w.cache, 0, a->tokens, 256, 1000, &n, NULL), OSCAR_OK);
    assert_int_equal(n, 0);
    free(a), free(b), free(c);
    world_close(&w);
}

/* Rows of equal tokens that differ, in their codes or in their BF16 numbers alone, stay what they are. */
static void test_unequal_rows(void **state) {
    (void)state;
    for (int variant = 1; variant <= 2; variant++) {
        world w;
        world_init(&w, 1);
        oscar_cache_options o = world_options(&w, 3, 40);
        world_open(&w, &o);
        chain *a = prompt(&w, 6, 200, 0, 200), *b = malloc(sizeof *b);
        *b = *a;
        int t = 70;
        bool same_codes = false, same_rows = true;
        for (; t < 128 && (variant == 2 ? !same_codes || same_rows : same_codes || same_rows); t++) {
            b->variant[t - 1] = 0, chain_expect(&w, b, t - 1);
            b->variant[t] = (uint8_t)variant, chain_expect(&w, b, t);
            same_codes = b->history[t] == a->history[t], same_rows = b->overlay[t] == a->overlay[t];
        }
        assert_in_range(t, 71, 127);
        assert_true(chain_feed(&w, 0, a, 200, true));
        assert_true(chain_feed(&w, 1, b, 200, true));
        chain_check(w.cache, 0, a);
        chain_check(w.cache, 1, b);
        assert_int_equal(stats_of(w.cache).pages_shared, 1);
        assert_int_equal(stats_of(w.cache).pages_unequal, 1); /* what follows it has another parent */
        chain *c = malloc(sizeof *c);
        *c = *b;
        c->known = c->low = 0;
        assert_true(chain_feed(&w, 2, c, 200, true)); /* equal to the second */
        assert_int_equal(stats_of(w.cache).pages_shared, 3);
        chain_check(w.cache, 2, c);
        check_inside(w.cache);
        free(a), free(b), free(c);
        world_close(&w);
    }
}

/* Rows without ids are not shared, nor what follows; ids of a step that was not counted in are not
 * believed. */
static void test_unknown_tokens(void **state) {
    (void)state;
    world w;
    world_init(&w, 1);
    oscar_cache_options o = world_options(&w, 3, 40);
    world_open(&w, &o);
    chain *a = prompt(&w, 1, 300, 0, 300), *b = prompt(&w, 1, 300, 0, 300);
    assert_true(chain_feed(&w, 0, a, 300, true));
    assert_true(chain_feed(&w, 1, b, 70, true));
    assert_true(chain_feed(&w, 1, b, 71, false)); /* an image in the middle */
    assert_true(chain_feed(&w, 1, b, 300, true));
    assert_int_equal(stats_of(w.cache).pages_shared, 1);
    chain_check(w.cache, 1, b);
    /* A negative id is none. */
    chain *m = prompt(&w, 1, 300, 0, 70);
    chain_add(&w, m, -1, 0);
    for (int t = 71; t < 192; t++) chain_add(&w, m, 5, 0);
    for (int s = 1; s < 3; s++) {
        assert_int_equal(oscar_seq_clear(w.cache, s, NULL), OSCAR_OK);
        m->known = m->low = 0;
        assert_true(chain_feed(&w, s, m, 192, true));
        m->known = 70;
        chain_check(w.cache, s, m);
    }
    assert_int_equal(oscar_seq_clear(w.cache, 2, NULL), OSCAR_OK);
    free(m);
    /* A step with the ids of `a` that fails, then other rows without ids. */
    chain *c = prompt(&w, 2, 128, 0, 128);
    oscar_step step = OSCAR_STEP_INIT;
    float x[128 * CHAIN_ROW] = {0};
    int32_t seqs[128], positions[128];
    for (int i = 0; i < 128; i++) seqs[i] = 2, positions[i] = i;
    step.n_tokens = 128, step.seqs = seqs, step.positions = positions, step.q = x, step.out = x;
    step.k = step.v = x, step.tokens = a->tokens;
    assert_int_equal(oscar_seq_reserve(w.cache, 2, 128, NULL), OSCAR_OK);
    assert_int_equal(oscar_cache_attend(w.cache, 0, &step, NULL), OSCAR_OK);
    assert_true(chain_feed(&w, 2, c, 128, false));
    assert_int_equal(stats_of(w.cache).pages_shared, 1);
    chain_check(w.cache, 2, c);
    check_inside(w.cache);
    free(a), free(b), free(c);
    world_close(&w);
}

/* Prompts of 1, 63, 64, 65, 128, 512 tokens, twice: the second time all full pages are found but never
 * the last token; the answer is the same. Generated tokens are found as well. */
static void test_prefix_again(void **state) {
    (void)state;
    static const int lengths[] = {1, 63, 64, 65, 128, 512}, reused[] = {0, 0, 0, 64, 64, 448};
    for (int kv = 0; kv < 2; kv++)
        for (size_t i = 0; i < 6; i++) {
            int n = lengths[i];
            world w;
            world_init(&w, 1);
            oscar_cache_options o = world_options(&w, 2, 40);
            o.kv_type = kv;
            if (kv == OSCAR_KV_F32) o.rotations = NULL;
            world_open(&w, &o);
            chain *a = prompt(&w, 3, n, 0, n), *b = prompt(&w, 3, n, 0, n);
            int64_t found;
            assert_true(chain_feed(&w, 0, a, n, true));
            for (int round = 0; round < 2; round++) { /* from a live sequence, then from cached pages */
                assert_int_equal(oscar_seq_attach_prefix(w.cache, 1, a->tokens, n, 0, &found, NULL), OSCAR_OK);
                assert_int_equal(found, reused[i]);
                assert_int_equal(oscar_seq_length(w.cache, 1), reused[i]);
                b->known = reused[i];
                b->low = reused[i] - o.recent + 1 < o.sink ? 0 : reused[i] - o.recent + 1;
                assert_true(chain_feed(&w, 1, b, n, true));
                assert_goes_on(&w, 1, b);
                if (round == 0) oscar_seq_clear(w.cache, 0, NULL);
            }
            /* Generated, one by one: the pages that they complete are found. */
            for (int t = 0; t < 100; t++) {
                chain_add(&w, b, t, 0);
                assert_true(chain_feed(&w, 1, b, b->n, true));
            }
            assert_int_equal(oscar_seq_attach_prefix(w.cache, 0, b->tokens, b->n, 0, &found, NULL), OSCAR_OK);
            assert_int_equal(found, (b->n - 1) / 64 * 64);
            check_inside(w.cache);
            free(a), free(b);
            world_close(&w);
        }
}

/* A prefix is served where its BF16 rows are; after a deep rollback they are found again, too. */
static void test_window_rows(void **state) {
    (void)state;
    world w;
    world_init(&w, 1);
    oscar_cache_options o = world_options(&w, 6, 100); /* the budget of BF16 pages: 4 a sequence, and a chunk */
    world_open(&w, &o);
    chain *a = prompt(&w, 4, 1000, 0, 1000), *b = prompt(&w, 4, 448, 9, 600);
    int64_t n, missing;
    assert_true(chain_feed(&w, 0, a, 1000, true));
    assert_int_equal(oscar_seq_truncate(w.cache, 0, 500, &missing, NULL), OSCAR_OK);
    assert_int_equal(missing, 0); /* 500 back, with a lookahead of 16 */
    chain_cut(w.cache, a, 500, missing);
    assert_goes_on(&w, 0, a);
    assert_int_equal(oscar_seq_attach_prefix(w.cache, 1, b->tokens, 600, 0, &n, NULL), OSCAR_OK);
    assert_int_equal(n, 448);
    b->known = 448, b->low = 448 - 23;
    assert_true(chain_feed(&w, 1, b, 600, true));
    assert_goes_on(&w, 1, b);
    oscar_seq_clear(w.cache, 0, NULL), oscar_seq_clear(w.cache, 1, NULL);
    /* The oldest BF16 pages go first; what is left says how far a prefix reaches. */
    chain *c = prompt(&w, 5, 4000, 0, 4000);
    assert_true(chain_feed(&w, 2, c, 4000, true));
    assert_true(stats_of(w.cache).overlay_evictions > 0);
    assert_int_equal(oscar_seq_attach_prefix(w.cache, 3, c->tokens, 700, 0, &n, NULL), OSCAR_OK);
    assert_int_equal(n, 64); /* the sink's page stays, as the sequence holds it */
    assert_int_equal(oscar_seq_attach_prefix(w.cache, 3, c->tokens, 700, 23, &n, NULL), OSCAR_OK);
    assert_int_equal(n, 640);
    assert_int_equal(seq_missing_rows(w.cache, &w.cache->seqs[3]), 23);
    check_inside(w.cache);
    /* What comes after missing rows is not what others would compute: never shared. */
    chain *d = prompt(&w, 5, 640, 0, 640), *e = prompt(&w, 5, 640, 0, 640);
    for (int t = 0; t < 100; t++) chain_add(&w, d, t, 0), chain_add(&w, e, t, 0);
    d->known = d->low = d->pure = 640;
    chain *f = malloc(sizeof *f);
    *f = *d;
    for (int when = 0; when < 2; when++) { /* saved with the rows missing, and after what followed */
        size_t bytes;
        uint8_t *saved = save_seq(&w, 3, &bytes);
        assert_int_equal(oscar_seq_restore(w.cache, 5, saved, bytes, NULL, NULL), OSCAR_OK);
        if (when == 0) {
            assert_true(chain_feed(&w, 5, f, 740, true));
            assert_true(chain_feed(&w, 3, d, 740, true));
        }
        f->known = 640; /* of a saved sequence, the ids of what is not pure are not known either */
        chain_check(w.cache, 5, when ? f : d);
        free(saved);
    }
    chain_check(w.cache, 3, d);
    int64_t hits = stats_of(w.cache).page_hits;
    assert_true(chain_feed(&w, 4, e, 740, true));
    assert_int_equal(stats_of(w.cache).page_hits - hits, 10);
    assert_goes_on(&w, 4, e);
    /* Nor in a fork. */
    assert_int_equal(oscar_seq_fork(w.cache, 5, 3, 700, NULL), OSCAR_OK);
    *f = *d;
    chain_cut(w.cache, f, 700, seq_missing_rows(w.cache, &w.cache->seqs[5]));
    for (int t = 0; t < 100; t++) chain_add(&w, f, t, 0);
    assert_true(chain_feed(&w, 5, f, 800, true));
    chain_check(w.cache, 5, f);
    assert_int_equal(stats_of(w.cache).page_hits - hits, 10);
    free(f);
    /* Back to before it: pure again. */
    assert_int_equal(oscar_seq_truncate(w.cache, 3, 2, &missing, NULL), OSCAR_OK);
    chain_cut(w.cache, d, 2, missing);
    for (int t = 2; t < 740; t++) chain_add(&w, d, e->tokens[t], 0);
    assert_true(chain_feed(&w, 3, d, 740, true));
    assert_int_equal(stats_of(w.cache).page_hits - hits, 10 + 11);
    free(a), free(b), free(c), free(d), free(e);
    world_close(&w);
}

/* B08, B07: cached pages give way, the least recently used first; what was evicted is computed anew. */
static void test_eviction(void **state) {
    (void)state;
    world w;
    world_init(&w, 1);
    oscar_cache_options o = world_options(&w, 4, 12);
    world_open(&w, &o);
    chain *p[4];
    int64_t n;
    for (int i = 0; i < 4; i++) p[i] = prompt(&w, 20 + (uint64_t)i, 256, 0, 256); /* four pages */
    for (int i = 0; i < 3; i++) {
        assert_true(chain_feed(&w, 0, p[i], 256, true));
        oscar_seq_clear(w.cache, 0, NULL);
    }
    oscar_cache_stats s = stats_of(w.cache);
    assert_int_equal(s.pages_cached, 12);
    assert_int_equal(s.pages_free + s.pages_live + s.page_evictions, 0);
    oscar_seq_attach_prefix(w.cache, 0, p[0]->tokens, 256, 1000, &n, NULL); /* used again: not the oldest */
    assert_int_equal(n, 192);
    oscar_seq_clear(w.cache, 0, NULL);
    /* Takes four pages: the first prompt's last one, which was not used again, and the second's, the
     * last page first. */
    assert_true(chain_feed(&w, 0, p[3], 200, true));
    assert_int_equal(stats_of(w.cache).page_evictions, 4);
    static const int left[] = {192, 64, 192};
    for (int i = 0; i < 3; i++) {
        oscar_seq_attach_prefix(w.cache, 1, p[i]->tokens, 256, 1000, &n, NULL);
        assert_int_equal(n, left[i]);
        oscar_seq_clear(w.cache, 1, NULL);
    }
    /* The evicted prompt again: a miss, and right. */
    p[1]->known = p[1]->low = 0;
    assert_true(chain_feed(&w, 1, p[1], 256, true));
    assert_goes_on(&w, 1, p[1]);
    check_inside(w.cache);
    /* All of it is there for one sequence: cached pages never cause a refusal. */
    oscar_seq_clear(w.cache, 0, NULL), oscar_seq_clear(w.cache, 1, NULL);
    assert_int_equal(oscar_seq_reserve(w.cache, 2, 12 * 64, NULL), OSCAR_OK);
    assert_int_equal(stats_of(w.cache).pages_live, 12);
    check_inside(w.cache);
    for (int i = 0; i < 4; i++) free(p[i]);
    world_close(&w);
}

/* B18, B06: four streams in a pool for three. The one that finds no room is as it was; it waits, the
 * others finish, and it finishes when one of them has ended. */
static void test_exhaustion(void **state) {
    (void)state;
    world w;
    world_init(&w, 1);
    oscar_cache_options o = world_options(&w, 5, 12);
    world_open(&w, &o);
    chain *c[4];
    int waiting = -1;
    int64_t found;
    for (int i = 0; i < 4; i++) c[i] = prompt(&w, 30 + (uint64_t)i, 256, 0, 256);
    for (int at = 32; at <= 256; at += 32)
        for (int i = 0; i < 4; i++) {
            if (i == waiting) continue;
            oscar_cache_stats before = stats_of(w.cache);
            int n = (int)oscar_seq_length(w.cache, i);
            if (chain_feed(&w, i, c[i], at, true)) continue;
            assert_int_equal(waiting, -1); /* one at most */
            waiting = i;
            oscar_cache_stats after = stats_of(w.cache);
            assert_memory_equal(&before, &after, sizeof before);
            check_inside(w.cache);
            chain *part = malloc(sizeof *part);
            *part = *c[i], part->n = n;
            chain_check(w.cache, i, part);
            /* A fork that needs a page changes nothing either, not even where it would go. */
            assert_int_equal(oscar_seq_truncate(w.cache, i, n - 5, NULL, NULL), OSCAR_OK);
            assert_int_equal(oscar_seq_fork(w.cache, 4, i, n - 7, NULL), OSCAR_OK); /* in the index: no copy yet */
            assert_int_equal(oscar_seq_reserve(w.cache, 4, 1, NULL), OSCAR_ERROR_NO_SPACE);
            assert_int_equal(oscar_seq_length(w.cache, 4), n - 7);
            assert_int_equal(oscar_seq_clear(w.cache, 4, NULL), OSCAR_OK);
            assert_int_equal(oscar_seq_reserve(w.cache, i, 5, NULL), OSCAR_OK);
            assert_int_equal(oscar_seq_fork(w.cache, 4, i, n - 7, NULL), OSCAR_ERROR_NO_SPACE);
            part->n = n - 5;
            chain_check(w.cache, i, part);
            assert_int_equal(oscar_seq_clear(w.cache, i, NULL), OSCAR_OK);
            free(part);
        }
    assert_in_range(waiting, 0, 3);
    for (int i = 0; i < 4; i++)
        if (i != waiting) assert_int_equal(oscar_seq_length(w.cache, i), 256);
    assert_int_equal(stats_of(w.cache).pages_live, 12);
    assert_false(chain_feed(&w, waiting, c[waiting], 256, true));
    assert_int_equal(oscar_seq_clear(w.cache, (waiting + 1) % 4, NULL), OSCAR_OK);
    assert_int_equal(oscar_seq_attach_prefix(w.cache, waiting, c[waiting]->tokens, 256, 0, &found, NULL), OSCAR_OK);
    c[waiting]->known = (int)found;
    c[waiting]->low = 0;
    assert_true(chain_feed(&w, waiting, c[waiting], 256, true));
    for (int i = 0; i < 4; i++)
        if (i != (waiting + 1) % 4) chain_check(w.cache, i, c[i]);
    check_inside(w.cache);
    assert_int_equal(oscar_seq_clear(w.cache, (waiting + 2) % 4, NULL), OSCAR_OK);
    assert_goes_on(&w, waiting, c[waiting]);
    for (int i = 0; i < 4; i++) free(c[i]);
    world_close(&w);
}

/* B07: many requests, a third of them cut short anywhere: nothing is live afterwards. */
static void test_many_requests(void **state) {
    (void)state;
    uint64_t rng = rng_seed("many requests", 50) | 1;
    world w;
    world_init(&w, 1);
    oscar_cache_options o = world_options(&w, 2, 16);
    world_open(&w, &o);
    for (int r = 0; r < 2000; r++) {
        int n = 1 + (int)(rng_next(&rng) >> 33) % 300, stop = rng_uniform(&rng) < 0.3 ? (int)(rng_next(&rng) >> 33) % n : n;
        chain *c = prompt(&w, rng_next(&rng) % 6, n, 0, n);
        int64_t found;
        int32_t seq = r % 2;
        assert_int_equal(oscar_seq_attach_prefix(w.cache, seq, c->tokens, n, 1000, &found, NULL), OSCAR_OK);
        c->known = (int)found;
        if (stop > found) assert_true(chain_feed(&w, seq, c, stop, true));
        if (stop < n && rng_next(&rng) % 2) oscar_seq_reserve(w.cache, seq, n - stop, NULL); /* in flight when it ends */
        oscar_seq_clear(w.cache, seq, NULL);
        if (r % 50 == 0) check_inside(w.cache);
        free(c);
    }
    oscar_cache_stats s = stats_of(w.cache);
    assert_int_equal(s.pages_live, 0);
    assert_int_equal(s.pages_cached + s.pages_free, s.pages_total);
    assert_int_equal(s.overlay_pages_live, 0);
    assert_int_equal(oscar_seq_reserve(w.cache, 0, 16 * 64, NULL), OSCAR_OK); /* cached ones are all evictable */
    world_close(&w);
}

/* n tokens pay for n, windows or not; past the windows the BF16 rows stop growing. */
static void test_memory(void **state) {
    (void)state;
    world w;
    world_init(&w, 1);
    oscar_cache_options o = world_options(&w, 64, 700);
    o.sink = 64, o.recent = 256, o.lookahead = 64; /* the defaults */
    world_open(&w, &o);
    chain *c = prompt(&w, 60, 2000, 0, 2000);
    for (int n = 1; n <= 2000; n += n < 330 ? 1 : 23) {
        assert_true(chain_feed(&w, 0, c, n, false));
        oscar_cache_stats s = stats_of(w.cache);
        int pages = (n + 63) / 64, low = n - o.recent - o.lookahead, window = low > 64 ? pages - low / 64 + 1 : pages;
        assert_int_equal(s.pages_live, pages);
        assert_int_equal(s.overlay_pages_live, window);
        assert_int_equal(s.overlay_bytes, window * s.overlay_page_bytes);
        assert_true(window <= 1 + 6);
    }
    oscar_cache_stats one = stats_of(w.cache);
    assert_int_equal(one.scratch_bytes, stats_of(w.cache).scratch_bytes);
    /* 63 more short sequences: a page of each kind each, and nothing for the windows that they lack. */
    for (int s = 1; s < 64; s++) {
        chain *d = prompt(&w, 61 + (uint64_t)s, 20, 0, 20);
        assert_true(chain_feed(&w, s, d, 20, true));
        free(d);
    }
    oscar_cache_stats all = stats_of(w.cache);
    assert_int_equal(all.pages_live - one.pages_live, 63);
    assert_int_equal(all.overlay_pages_live - one.overlay_pages_live, 63);
    assert_int_equal(all.scratch_bytes, one.scratch_bytes); /* the chunk in flight: once for the cache */
    free(c);
    world_close(&w);
}

/* Scratch is for what can be in flight: more with more sequences, longer ones, and larger chunks. A sequence
 * is no longer than was said. */
static void test_scratch(void **state) {
    (void)state;
    world w;
    world_init(&w, 1);
    int64_t bytes[4];
    for (int i = 0; i < 4; i++) {
        oscar_cache_options o = world_options(&w, i == 1 ? 64 : 4, 400);
        o.n_seq_tokens_max = i == 2 ? 0 : 640;
        o.n_chunk_max = i == 3 ? 512 : CHAIN_CHUNK;
        world_open(&w, &o);
        bytes[i] = stats_of(w.cache).scratch_bytes;
        assert_int_equal(stats_of(w.cache).pages_total, 400);
        assert_true(stats_of(w.cache).scratch_thread_bytes > 0);
        if (i == 0) {
            assert_int_equal(oscar_seq_reserve(w.cache, 0, 641, NULL), OSCAR_ERROR_NO_SPACE);
            assert_int_equal(oscar_seq_reserve(w.cache, 0, 640, NULL), OSCAR_OK);
            check_inside(w.cache);
        }
        oscar_cache_free(w.cache);
    }
    printf("scratch: %lld bytes for 4 sequences of 640 tokens, %lld for 64, %lld for 4 of any length, %lld with chunks of 512\n",
           (long long)bytes[0], (long long)bytes[1], (long long)bytes[2], (long long)bytes[3]);
    /* Four short runs of 16 query rows of 34 floats on 2 heads, 10 pages in 3 pieces, for the history and for BF16 rows;
     * 16 rows of 160 floats a sequence that wait; and 10 numbers of pages twice. */
    const int64_t partials = 4 * 2 * 3 * 2, waiting = 4 * 16 * 160, tables = 4 * 2 * 64;
    assert_in_range(bytes[0], partials * 16 * 34 * 4 + waiting * 4 + tables, 192 * 1024);
    for (int i = 1; i < 4; i++) assert_true(bytes[i] > bytes[0]);
    oscar_cache_options bad = world_options(&w, 4, 400);
    bad.n_seq_tokens_max = -1;
    assert_int_equal(oscar_cache_create(&w.cache, &bad, NULL), OSCAR_ERROR_ARGUMENT);
    oscar_rotations_free(w.rotations);
}

/* Restored pages are shared with those that are there, and found by their tokens; cached pages make room
 * for a restore. */
static void test_restore(void **state) {
    (void)state;
    for (int kv = 0; kv < 2; kv++) {
        world w;
        world_init(&w, 1);
        oscar_cache_options o = world_options(&w, 4, 12);
        o.kv_type = kv;
        if (kv == OSCAR_KV_F32) o.rotations = NULL;
        o.sink = 64;
        world_open(&w, &o);
        chain *a = prompt(&w, 80, 300, 0, 300), *b = prompt(&w, 81, 200, 0, 200);
        size_t bytes;
        int64_t n;
        assert_true(chain_feed(&w, 0, a, 300, true)); /* five pages, four of them full */
        uint8_t *saved = save_seq(&w, 0, &bytes);
        assert_int_equal(oscar_seq_restore(w.cache, 1, saved, bytes, NULL, NULL), OSCAR_OK);
        assert_int_equal(stats_of(w.cache).pages_live, 6);
        assert_int_equal(stats_of(w.cache).pages_shared, 4);
        assert_goes_on(&w, 0, a);
        assert_goes_on(&w, 1, a);
        /* Under another salt it is somebody else's. */
        assert_int_equal(oscar_seq_clear(w.cache, 1, NULL), OSCAR_OK);
        assert_int_equal(oscar_seq_set_salt(w.cache, 1, 9, NULL), OSCAR_OK);
        assert_int_equal(oscar_seq_restore(w.cache, 1, saved, bytes, NULL, NULL), OSCAR_OK);
        assert_int_equal(stats_of(w.cache).pages_shared, 0);
        check_inside(w.cache);
        /* A new cache, as after a restart: found by tokens. */
        for (int s = 0; s < 2; s++) oscar_seq_clear(w.cache, s, NULL);
        world again = w;
        world_open(&again, &o);
        assert_int_equal(oscar_seq_restore(again.cache, 3, saved, bytes, NULL, NULL), OSCAR_OK);
        assert_int_equal(oscar_seq_clear(again.cache, 3, NULL), OSCAR_OK);
        /* The saved BF16 rows are the last ones, which are in no full page, and the sink's. */
        assert_int_equal(oscar_seq_attach_prefix(again.cache, 0, a->tokens, 300, 0, &n, NULL), OSCAR_OK);
        assert_int_equal(n, kv == OSCAR_KV_F32 ? 256 : 64);
        assert_int_equal(oscar_seq_attach_prefix(again.cache, 0, a->tokens, 300, o.recent, &n, NULL), OSCAR_OK);
        assert_int_equal(n, 256);
        chain *c = malloc(sizeof *c);
        *c = *a;
        c->n = c->known = c->low = 256;
        c->pure = kv == OSCAR_KV_F32 ? INT32_MAX : 256;
        chain_check(again.cache, 0, c);
        check_inside(again.cache);
        chain *e = prompt(&w, 85, 300, 0, 300);
        size_t other_bytes;
        assert_true(chain_feed(&again, 1, e, 300, true));
        uint8_t *other = save_seq(&again, 1, &other_bytes);
        oscar_cache_free(again.cache);
        /* Room: of cached pages, of the sequence's own, and none. */
        for (int i = 0; i < 3; i++) { /* fills the pool with cached pages */
            chain *d = prompt(&w, 90 + (uint64_t)i, 256, 0, 256);
            assert_true(chain_feed(&w, 0, d, 256, true));
            oscar_seq_clear(w.cache, 0, NULL);
            free(d);
        }
        assert_int_equal(stats_of(w.cache).pages_free, 0);
        assert_int_equal(oscar_seq_restore(w.cache, 2, saved, bytes, NULL, NULL), OSCAR_OK);
        assert_true(chain_feed(&w, 0, b, 200, false));
        assert_int_equal(oscar_seq_reserve(w.cache, 3, 3 * 64, NULL), OSCAR_OK); /* 5 + 4 + 3 pages live */
        assert_int_equal(oscar_seq_restore(w.cache, 2, saved, bytes, NULL, NULL), OSCAR_OK);
        assert_int_equal(oscar_seq_restore(w.cache, 0, other, other_bytes, NULL, NULL), OSCAR_ERROR_NO_SPACE);
        chain_check(w.cache, 0, b);
        check_inside(w.cache);
        /* What the cache holds already takes no room: one page more instead of five. */
        assert_int_equal(oscar_seq_restore(w.cache, 0, saved, bytes, NULL, NULL), OSCAR_OK);
        assert_int_equal(stats_of(w.cache).pages_live, 6 + 3);
        assert_int_equal(oscar_seq_restore(w.cache, 0, saved, bytes, NULL, NULL), OSCAR_OK); /* it holds them itself */
        assert_int_equal(stats_of(w.cache).pages_live, 6 + 3);
        assert_goes_on(&w, 0, a);
        assert_goes_on(&w, 2, a);
        check_inside(w.cache);
        free(saved), free(other), free(a), free(b), free(c), free(e);
        world_close(&w);
    }
}

/* A full page of which only the last BF16 rows were saved: nobody reads the others. */
static void test_restored_window(void **state) {
    (void)state;
    world w;
    world_init(&w, 1);
    oscar_cache_options o = world_options(&w, 2, 12);
    o.sink = 64;
    world_open(&w, &o);
    chain *a = prompt(&w, 83, 321, 0, 321);
    size_t bytes;
    int64_t n;
    assert_true(chain_feed(&w, 0, a, 320, true));
    uint8_t *saved = save_seq(&w, 0, &bytes); /* BF16 rows from 280 on */
    world again = w;
    world_open(&again, &o);
    assert_int_equal(oscar_seq_restore(again.cache, 0, saved, bytes, NULL, NULL), OSCAR_OK);
    a->n = 320;
    chain_check(again.cache, 0, a);
    assert_int_equal(oscar_seq_attach_prefix(again.cache, 1, a->tokens, 321, o.recent, &n, NULL), OSCAR_OK);
    assert_int_equal(n, 320);
    a->low = 320;
    chain_check(again.cache, 1, a);
    assert_int_equal(seq_missing_rows(again.cache, &again.cache->seqs[1]), 23);
    check_inside(again.cache);
    oscar_cache_free(again.cache);
    free(saved), free(a);
    world_close(&w);
}

static void set_version(uint8_t *saved, size_t bytes, uint32_t version) {
    uint64_t whole = bytes, check;
    memcpy(saved + 4, &version, 4);
    memcpy(saved + 8, &whole, 8);
    check = XXH3_64bits(saved, bytes - 8);
    memcpy(saved + bytes - 8, &check, 8);
}

/* Version 1 had no ids: 16 bytes less in the header, nothing before the check. BF16 rows of versions 1 and 2 were
 * turned, so only floats are taken. */
static void test_versions(void **state) {
    (void)state;
    for (int exact = 0; exact < 2; exact++) {
        world w;
        world_init(&w, 1);
        oscar_cache_options o = world_options(&w, 2, 12);
        if (exact) o.kv_type = OSCAR_KV_F32;
        world_open(&w, &o);
        chain *a = prompt(&w, 82, 300, 0, 300);
        assert_true(chain_feed(&w, 0, a, 300, false));
        size_t bytes, used;
        uint8_t *saved = save_seq(&w, 0, &bytes);
        oscar_error error;
        const uint32_t versions[] = {4, 3, 2, 1};
        for (int i = 0; i < 4; i++) {
            if (versions[i] == 1) {
                memmove(saved + 64, saved + 80, bytes - 80);
                bytes -= 16;
            }
            set_version(saved, bytes, versions[i]);
            assert_int_equal(oscar_seq_clear(w.cache, 1, NULL), OSCAR_OK);
            bool good = versions[i] == 3 || (exact && versions[i] < 3);
            assert_int_equal(oscar_seq_restore(w.cache, 1, saved, bytes, &used, &error), good ? OSCAR_OK : OSCAR_ERROR_UNSUPPORTED);
            if (!good) continue;
            assert_int_equal(used, bytes);
            chain_check(w.cache, 1, a);
        }
        if (exact) assert_goes_on(&w, 1, a);
        free(saved), free(a);
        world_close(&w);
    }
}

/* The KIVI baseline writes its pages again when a group is full: none of them is shared. */
static void test_kivi(void **state) {
    (void)state;
    world w;
    world_init(&w, 1);
    oscar_cache_options o = world_options(&w, 2, 20);
    assert_int_equal(cache_create_kivi(&w.cache, &o, 128, NULL), OSCAR_OK);
    chain *c = prompt(&w, 70, 300, 0, 300);
    int64_t n;
    for (int s = 0; s < 2; s++) assert_true(chain_feed(&w, s, c, 300, true));
    assert_int_equal(oscar_seq_clear(w.cache, 0, NULL), OSCAR_OK);
    assert_int_equal(stats_of(w.cache).pages_cached, 0);
    assert_int_equal(stats_of(w.cache).page_hits + stats_of(w.cache).page_misses, 0);
    assert_int_equal(oscar_seq_attach_prefix(w.cache, 0, c->tokens, 300, 1000, &n, NULL), OSCAR_OK);
    assert_int_equal(n, 0);
    free(c);
    world_close(&w);
}

static void test_arguments(void **state) {
    (void)state;
    world w;
    world_init(&w, 1);
    oscar_cache_options o = world_options(&w, 2, 4);
    world_open(&w, &o);
    int32_t token = 1;
    int64_t n = 9;
    assert_int_equal(oscar_seq_attach_prefix(w.cache, 2, &token, 1, 0, &n, NULL), OSCAR_ERROR_ARGUMENT);
    assert_int_equal(n, 0);
    assert_int_equal(oscar_seq_attach_prefix(w.cache, -1, &token, 1, 0, NULL, NULL), OSCAR_ERROR_ARGUMENT);
    assert_int_equal(oscar_seq_attach_prefix(w.cache, 0, &token, -1, 0, NULL, NULL), OSCAR_ERROR_ARGUMENT);
    assert_int_equal(oscar_seq_attach_prefix(w.cache, 0, NULL, 1, 0, NULL, NULL), OSCAR_ERROR_ARGUMENT);
    assert_int_equal(oscar_seq_attach_prefix(w.cache, 0, &token, 1, -1, NULL, NULL), OSCAR_ERROR_ARGUMENT);
    assert_int_equal(oscar_seq_attach_prefix(w.cache, 0, NULL, 0, 0, NULL, NULL), OSCAR_OK);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sixteen_prompts), cmocka_unit_test(test_equal_hashes),
        cmocka_unit_test(test_keys),            cmocka_unit_test(test_unequal_rows),     cmocka_unit_test(test_unknown_tokens),
        cmocka_unit_test(test_prefix_again),    cmocka_unit_test(test_window_rows),
        cmocka_unit_test(test_eviction),        cmocka_unit_test(test_exhaustion),
        cmocka_unit_test(test_many_requests),   cmocka_unit_test(test_memory),
        cmocka_unit_test(test_scratch), cmocka_unit_test(test_restore),         cmocka_unit_test(test_restored_window),  cmocka_unit_test(test_versions),
        cmocka_unit_test(test_kivi),            cmocka_unit_test(test_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
