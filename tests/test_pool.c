/* test_pool.c - live, cached and free pages: always all of them, the least recently used first. */
#include "cache/cache.h"
#include "test_util.h"

static void assert_counts(const page_pool *pool, int live, int cached, int free_pages) {
    assert_int_equal(pool_live(pool), live);
    assert_int_equal(pool->n_cached, cached);
    assert_int_equal(pool->n_free, free_pages);
}

static void test_take_and_free(void **state) {
    (void)state;
    page_pool pool;
    assert_true(pool_init(&pool, 3, 128));
    assert_int_equal(pool_take(&pool), 0); /* low numbers first */
    assert_int_equal(pool_take(&pool), 1);
    assert_int_equal(pool_take(&pool), 2);
    assert_int_equal(pool_take(&pool), NO_PAGE);
    assert_ptr_equal(pool_page(&pool, 2), pool.memory + 256);
    pool_ref(&pool, 1);
    assert_int_equal(pool_shared(&pool), 1);
    pool_unref(&pool, 1);
    assert_counts(&pool, 3, 0, 0);
    pool_unref(&pool, 1);
    pool_unref(&pool, NO_PAGE);
    assert_counts(&pool, 2, 0, 1);
    assert_int_equal(pool_take(&pool), 1);
    pool_destroy(&pool);
}

static void test_cached(void **state) {
    (void)state;
    page_pool pool;
    assert_true(pool_init(&pool, 4, 64));
    for (int i = 0; i < 4; i++) pool_take(&pool);
    for (int i = 0; i < 3; i++) pool_keep(&pool, i);
    pool_unref(&pool, 1), pool_unref(&pool, 0), pool_unref(&pool, 2), pool_unref(&pool, 3);
    assert_counts(&pool, 0, 3, 1);
    assert_int_equal(pool.oldest, 1);
    pool_ref(&pool, 0); /* from the middle of the list, and back as the newest */
    assert_counts(&pool, 1, 2, 1);
    pool_unref(&pool, 0);
    assert_int_equal(pool.newest, 0);
    pool_forget(&pool, 1); /* cached: free at once */
    assert_counts(&pool, 0, 2, 2);
    assert_int_equal(pool.oldest, 2);
    pool_ref(&pool, 2);
    pool_forget(&pool, 2); /* live: free when its reference goes */
    assert_counts(&pool, 1, 1, 2);
    pool_unref(&pool, 2);
    assert_counts(&pool, 0, 1, 3);
    assert_int_equal(pool.oldest, 0);
    pool_forget(&pool, 0);
    assert_counts(&pool, 0, 0, 4);
    assert_int_equal(pool.oldest, NO_PAGE);
    assert_int_equal(pool.newest, NO_PAGE);
    pool_destroy(&pool);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_take_and_free), cmocka_unit_test(test_cached)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
