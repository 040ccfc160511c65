/* test_cache_save.c - saved sequences that hold pages together, and saved bytes that are not what was
 * saved: cut, changed, or made up. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "cache_chain.h"

#define OSCAR_FUZZ_REPLAY
#include "fuzz/fuzz_saved.c"
#include "fuzz/replay.h"

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

/* ------------------------------------------------------------------------------------------- refused */

/* Every byte changed, in one bit and in all of them, and every length: refused with a reason, and nothing
 * has changed, neither where it was to go nor elsewhere. */
static void refuse_all(int kv_type, int n_tokens) {
    world w;
    world_init(&w, 1);
    oscar_cache_options o = world_options(&w, 2, 8);
    o.kv_type = kv_type;
    if (kv_type == OSCAR_KV_F32) o.rotations = NULL;
    world_open(&w, &o);
    chain *a = prompt(&w, 8, n_tokens, 0, n_tokens), *b = prompt(&w, 9, 70, 0, 70);
    assert_true(chain_feed(&w, 0, a, n_tokens, true));
    assert_true(chain_feed(&w, 1, b, 70, true));
    size_t bytes;
    uint8_t *saved = save_seq(&w, 0, &bytes);
    const oscar_cache_stats before = stats_of(w.cache);
    for (size_t i = 0; i < 3 * bytes; i++) {
        size_t at = i % bytes, size = i < 2 * bytes ? bytes : at;
        uint8_t flip = i < bytes ? (uint8_t)(1u << at % 8) : i < 2 * bytes ? 0xff : 0;
        uint8_t *copy = malloc(size ? size : 1);
        memcpy(copy, saved, size);
        if (flip) copy[at] ^= flip;
        oscar_error error = {0};
        oscar_status status = oscar_seq_restore(w.cache, 1, copy, size, NULL, &error);
        if (status == OSCAR_OK) fail_msg("accepted: byte %zu ^ %02x of %zu", at, flip, size);
        assert_true(error.status == status && error.message[0]);
        const oscar_cache_stats after = stats_of(w.cache);
        assert_memory_equal(&before, &after, sizeof before);
        if (i % 499 == 0) {
            chain_check(w.cache, 0, a);
            chain_check(w.cache, 1, b);
        }
        free(copy);
    }
    printf("%d tokens: %zu changes of %zu bytes refused\n", n_tokens, 3 * bytes, bytes);
    check_inside(w.cache);
    assert_goes_on(&w, 0, a);
    assert_goes_on(&w, 1, b);
    assert_int_equal(oscar_seq_restore(w.cache, 1, saved, bytes, NULL, NULL), OSCAR_OK);
    assert_goes_on(&w, 1, a);
    free(saved), free(a), free(b);
    world_close(&w);
}

static void test_every_byte(void **state) {
    (void)state;
    refuse_all(OSCAR_KV_INT2, 0);
    refuse_all(OSCAR_KV_INT2, 30);
    refuse_all(OSCAR_KV_INT2, 67);
    refuse_all(OSCAR_KV_F32, 5);
}

static void test_fuzz(void **state) {
    (void)state;
    replay("fuzz_saved", fuzz_saved);
    /* True ones: of the target's own cache, in which all of it is right. */
    uint64_t rng = rng_seed("saved by the target", 31);
    for (int s = 0; s < 2; s++) replay_input(&rng, kept[s], kept_bytes[s], fuzz_saved);
    assert_int_equal(fuzz_saved(kept[0], kept_bytes[0]), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_together),   cmocka_unit_test(test_unequal),
        cmocka_unit_test(test_every_byte), cmocka_unit_test(test_fuzz),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
