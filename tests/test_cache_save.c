/* test_cache_save.c - saved sequences that hold pages together, and saved bytes that are not what was
 * saved: cut, changed, or made up. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "cache_chain.h"

/* ------------------------------------------------------------------------------------------ together */

enum { SEQS = 6 };

/* Restores into an empty cache what a context saved: each sequence with the pages that an earlier one has. */
static int32_t restore_all(world *w, uint8_t *const *saved, const size_t *bytes) {
    int32_t n_pages = 0;
    for (int s = 0; s < SEQS; s++) {
        int64_t n_tokens;
        size_t used;
        int32_t donor = 0, most = 0;
        assert_int_equal(cache_check_saved(w->cache, saved[s], bytes[s], &n_tokens, &used, NULL), OSCAR_OK);
        for (int d = 0; d < s; d++) {
            int32_t n = cache_saved_common(w->cache, saved[d], bytes[d], saved[s], bytes[s], most);
            if (n > 0) donor = d, most = n;
        }
        n_pages += (int32_t)(n_tokens + 63) / 64 - most;
        assert_int_equal(cache_restore_beside(w->cache, s, saved[s], bytes[s], donor, most, NULL), OSCAR_OK);
        check_inside(w->cache);
    }
    return n_pages;
}

/* A context that fits because its sequences share pages: equal prompts, one that leaves early, one that is
 * the beginning of another, and one whose ids are not known. */
static void test_together(void **state) {
    (void)state;
    for (int kv = 0; kv < 2; kv++)
        for (int known = 0; known < 2; known++) {
            world w;
            world_init(&w, 1);
            /* 16 pages together, and one for each sequence; alone they take 57. */
            oscar_cache_options o = world_options(&w, SEQS, 16 + SEQS);
            o.kv_type = kv;
            o.sink = 70;
            if (kv == OSCAR_KV_F32) o.rotations = NULL;
            world_open(&w, &o);
            chain *c[SEQS];
            const int lengths[SEQS] = {700, 700, 640, 320, 650, 640};
            for (int s = 0; s < SEQS; s++) c[s] = prompt(&w, 5, s == 3 ? 256 : 640, 100 + (uint64_t)s, lengths[s]);
            /* Forks, so that they share without ids as well. */
            for (int s = 1; s < SEQS; s++) {
                int from = s == 1 ? 256 : 640, fork = s == 1 ? 3 : s == 3 ? 1 : s;
                assert_true(chain_feed(&w, 0, c[0], from, known));
                assert_int_equal(oscar_seq_fork(w.cache, fork, 0, from, NULL), OSCAR_OK);
                c[fork]->known = known ? from : 0;
                c[fork]->low = c[0]->low;
            }
            for (int s = 0; s < SEQS; s++) assert_true(chain_feed(&w, s, c[s], lengths[s], known));
            int32_t live = (int32_t)stats_of(w.cache).pages_live;
            uint8_t *saved[SEQS];
            size_t bytes[SEQS];
            for (int s = 0; s < SEQS; s++) saved[s] = save_seq(&w, s, &bytes[s]);
            world again = w;
            o.n_tokens_max = 64 * (live + 1); /* room for a token more, which assert_goes_on() takes back */
            world_open(&again, &o);
            for (int round = 0; round < 2; round++) { /* in a cache that computed nothing, and over cached pages */
                assert_int_equal(restore_all(&again, saved, bytes), live);
                assert_int_equal(stats_of(again.cache).pages_live, live);
                assert_int_equal(stats_of(again.cache).pages_shared, 10);
                for (int s = 0; s < SEQS; s++) assert_goes_on(&again, s, c[s]);
                if (round == 0)
                    for (int s = 0; s < SEQS; s++) assert_int_equal(oscar_seq_clear(again.cache, s, NULL), OSCAR_OK);
            }
            printf("%d pages hold %d sequences of 320 to 700 tokens\n", live, SEQS);
            oscar_cache_free(again.cache);
            for (int s = 0; s < SEQS; s++) free(saved[s]), free(c[s]);
            world_close(&w);
        }
}

/* Equal ids are not enough: rows that differ in a bit, in codes or in BF16 alone, are restored as they were. */
static void test_unequal(void **state) {
    (void)state;
    for (int variant = 1; variant <= 2; variant++) {
        world w;
        world_init(&w, 1);
        oscar_cache_options o = world_options(&w, 3, 20);
        o.recent = 100;
        world_open(&w, &o);
        chain *a = prompt(&w, 6, 200, 0, 200), *b = malloc(sizeof *b);
        *b = *a;
        int t = 130; /* in the window, whose rows are saved */
        bool same_codes = false, same_rows = true;
        for (; t < 192 && (variant == 2 ? !same_codes || same_rows : same_codes || same_rows); t++) {
            b->variant[t - 1] = 0, chain_expect(&w, b, t - 1);
            b->variant[t] = (uint8_t)variant, chain_expect(&w, b, t);
            same_codes = b->history[t] == a->history[t], same_rows = b->overlay[t] == a->overlay[t];
        }
        assert_in_range(t, 131, 191);
        assert_true(chain_feed(&w, 0, a, 200, true));
        assert_true(chain_feed(&w, 1, b, 200, true));
        size_t a_bytes, b_bytes;
        uint8_t *first = save_seq(&w, 0, &a_bytes), *second = save_seq(&w, 1, &b_bytes);
        assert_int_equal(cache_saved_common(w.cache, first, a_bytes, second, b_bytes, 0), 2);
        assert_int_equal(cache_saved_common(w.cache, first, a_bytes, first, a_bytes, 2), 3);
        assert_int_equal(cache_saved_common(w.cache, first, a_bytes, second, b_bytes, 2), 0);
        world again = w;
        world_open(&again, &o);
        assert_int_equal(oscar_seq_restore(again.cache, 0, first, a_bytes, NULL, NULL), OSCAR_OK);
        assert_int_equal(oscar_seq_restore(again.cache, 1, second, b_bytes, NULL, NULL), OSCAR_OK);
        assert_int_equal(oscar_seq_restore(again.cache, 2, second, b_bytes, NULL, NULL), OSCAR_OK);
        assert_int_equal(stats_of(again.cache).pages_shared, 3);
        assert_int_equal(stats_of(again.cache).pages_live, 4 + 3);
        chain_check(again.cache, 0, a);
        chain_check(again.cache, 1, b);
        chain_check(again.cache, 2, b);
        check_inside(again.cache);
        oscar_cache_free(again.cache);
        free(first), free(second), free(a), free(b);
        world_close(&w);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_together), cmocka_unit_test(test_unequal)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
