/*
 * test_llama_share.c - pages shared under a real model (SmolLM2): prompts in common are held once,
 * whatever they were computed beside, and logits do not change. Skipped without the model.
 *
 *   OSCAR_TEST_SEQS, OSCAR_TEST_TOKENS   sequences and tokens of their common prompt (3, 200)
 */
#include "test_llama_util.h"

enum { OWN = 60 }; /* tokens after the common prompt */

static int n_seqs = 3, n_common = 200;
static llama_token *prompts; /* [n_seqs, n_common + OWN] */

static llama_token *prompt_of(int seq) { return prompts + (size_t)seq * (size_t)(n_common + OWN); }

static oscar_rotations *rotations; /* not calibrated: which rows are held once does not depend on it */

static held hold_as(int kv_type) {
    oscar_llama_options options = OSCAR_LLAMA_OPTIONS_INIT;
    struct llama_context_params p = llama_context_default_params();
    options.kv_type = kv_type;
    options.rotations = kv_type == OSCAR_KV_INT2 ? rotations : NULL;
    p.n_ctx = (uint32_t)(n_seqs * (n_common + OWN + 64));
    p.n_batch = p.n_ubatch = 256;
    p.n_seq_max = (uint32_t)n_seqs;
    p.kv_unified = true;
    p.n_threads = p.n_threads_batch = 1;
    return hold_with(&options, p);
}

static held hold(void) { return hold_as(OSCAR_KV_INT2); }

static oscar_cache_stats stats_of(held h) {
    oscar_cache_stats stats = {.struct_size = sizeof stats};
    oscar_cache_get_stats(oscar_llama_cache(h.layer), &stats);
    return stats;
}

static void print_stats(const char *what, oscar_cache_stats s) {
    printf("%s: %lld pages live, %lld of them shared; %lld found, %lld new, %lld of those unequal\n", what,
           (long long)s.pages_live, (long long)s.pages_shared, (long long)s.page_hits, (long long)s.page_misses,
           (long long)s.pages_unequal);
}

/* One sequence after the other, and all of them in the same batches. */
static void test_common_prompt(void **state) {
    (void)state;
    int n = n_common + OWN, full = n_common / 64, own = (n + 63) / 64 - full;
    for (int together = 0; together < 2; together++) {
        held h = hold();
        float **logits = calloc((size_t)n_seqs, sizeof *logits);
        if (!together)
            for (int s = 0; s < n_seqs; s++) {
                assert_int_equal(run(h, prompt_of(s), 0, n, 256, s), 0);
                logits[s] = copy_logits(h, -1);
            }
        int part = 256 / n_seqs;
        struct llama_batch batch = llama_batch_init(256, 0, 1);
        for (int at = 0; together && at < n; at += part) {
            batch.n_tokens = 0;
            for (int s = 0; s < n_seqs; s++) add(&batch, prompt_of(s) + at, n - at < part ? n - at : part, at, s);
            assert_int_equal(oscar_llama_decode(h.layer, batch), 0);
        }
        for (int s = 0; together && s < n_seqs; s++) logits[s] = copy_logits(h, batch.n_tokens / n_seqs * (s + 1) - 1);
        llama_batch_free(batch);
        oscar_cache_stats stats = stats_of(h);
        print_stats(together ? "together" : "one after the other", stats);
        assert_int_equal(stats.pages_shared, full);
        assert_int_equal(stats.pages_live, full + n_seqs * own);
        assert_int_equal(stats.pages_unequal, 0);
        /* Alone in a context that shares nothing. */
        for (int s = 0; s < n_seqs; s += n_seqs - 1) {
            held alone = hold();
            assert_int_equal(run(alone, prompt_of(s), 0, n, together ? part : 256, 0), 0);
            float *want = copy_logits(alone, -1);
            assert_same(want, logits[s], 1e-3, "sequence alone");
            free(want);
            drop(alone);
        }
        for (int s = 0; s < n_seqs; s++) free(logits[s]);
        free(logits);
        drop(h);
    }
}

/* A sequence that is gone leaves its pages: the next one with the same prompt holds the same. An answer
 * that was decoded token by token and comes back in a prompt may differ in bits; it is then held twice. */
static void test_again(void **state) {
    (void)state;
    int n = n_common + OWN;
    held h = hold();
    assert_int_equal(run(h, prompt_of(0), 0, n_common, 256, 0), 0);
    assert_int_equal(run(h, prompt_of(0), n_common, n, 1, 0), 0);
    oscar_llama_memory_clear(h.layer);
    oscar_cache_stats gone = stats_of(h);
    assert_int_equal(gone.pages_live, 0);
    assert_int_equal(gone.pages_cached, n / 64);
    assert_int_equal(run(h, prompt_of(0), 0, n, 256, 1), 0);
    oscar_cache_stats again = stats_of(h);
    print_stats("again", again);
    assert_true(again.page_hits >= n_common / 64);
    assert_int_equal(again.page_hits + again.page_misses, 2 * (n / 64));
    assert_int_equal(again.pages_live + again.pages_cached + again.pages_free, again.pages_total);
    drop(h);
}

int main(void) {
    if (getenv("OSCAR_TEST_SEQS")) n_seqs = atoi(getenv("OSCAR_TEST_SEQS"));
    if (getenv("OSCAR_TEST_TOKENS")) n_common = atoi(getenv("OSCAR_TEST_TOKENS"));
    if (!open_model()) return 0;
    uint64_t rng = rng_seed("share", 17);
    prompts = calloc((size_t)(n_seqs * (n_common + OWN)), sizeof *prompts);
    for (int i = 0; i < n_common + OWN; i++) prompt_of(0)[i] = (llama_token)(rng_next(&rng) % 40000);
    for (int s = 1; s < n_seqs; s++)
        for (int i = 0; i < n_common + OWN; i++)
            prompt_of(s)[i] = i < n_common ? prompt_of(0)[i] : (llama_token)(rng_next(&rng) % 40000);
    rotations = hadamard_of(hold_as(OSCAR_KV_F32));
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_common_prompt), cmocka_unit_test(test_again)};
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    free(prompts);
    oscar_rotations_free(rotations);
    llama_model_free(model);
    return failed;
}
