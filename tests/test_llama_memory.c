/* test_llama_memory.c - how large the cache is made, what happens when it is full, the file of
 * statistics, and pages shared through the layer. Skipped without the model. */
#include <sys/stat.h>

#include "test_llama_util.h"

enum { N = 256 };

static llama_token tokens[2 * N];

static struct llama_context_params params_of(uint32_t n_ctx, uint32_t n_seqs, bool unified) {
    struct llama_context_params p = llama_context_default_params();
    p.n_ctx = n_ctx;
    p.n_batch = p.n_ubatch = 64;
    p.n_seq_max = n_seqs;
    p.kv_unified = unified;
    p.n_threads = p.n_threads_batch = 1;
    return p;
}

static char said[1024];
static void keep_lines(void *user, const char *line) {
    (void)user;
    size_t n = strlen(said);
    snprintf(said + n, sizeof said - n, "%s\n", line);
}

static oscar_llama_options exact(int64_t kv_memory) {
    oscar_llama_options options = OSCAR_LLAMA_OPTIONS_INIT;
    options.kv_type = OSCAR_KV_F32;
    options.kv_memory_bytes = kv_memory;
    options.log = keep_lines;
    said[0] = '\0';
    return options;
}

static oscar_cache_stats stats_of(held h) {
    oscar_cache_stats s = {.struct_size = sizeof s};
    oscar_cache_get_stats(oscar_llama_cache(h.layer), &s);
    return s;
}

/* Bytes of a cache of exactly n_pages for n_seqs sequences. */
static int64_t bytes_of_pages(int64_t n_pages, uint32_t n_seqs) {
    oscar_llama_options options = exact(0);
    held h = hold_with(&options, params_of(256, n_seqs, true));
    assert_int_equal(oscar_llama_start(h.layer, NULL), 0);
    oscar_cache_stats s = stats_of(h);
    assert_int_equal(s.overlay_pages_total, 0); /* exact: no overlay, so that bytes are linear in pages */
    /* More pages take more scratch: a page table for each sequence, which is rounded up, and partial
     * results of 3 heads for each 16 pages. Together less than a page. */
    int64_t more = n_seqs * (2 * 64 * 64 + (n_pages / 16 + 3) * 3 * 24 * 66 * 4);
    assert_true(more < s.page_bytes);
    drop(h);
    return s.scratch_bytes + s.scratch_thread_bytes + more + n_pages * s.page_bytes;
}

/* The largest cache that stays below, and the context that follows from it. */
static void test_sizes(void **state) {
    (void)state;
    const struct {
        bool unified;
        uint32_t n_ctx, n_seqs;
        int64_t pages;
        uint32_t seq_pages; /* expected */
    } cases[] = {{false, 8192, 4, 22, 5}, {true, 8192, 4, 22, 18}, {false, 512, 2, 100, 4}, {false, 2048, 1, 7, 7}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t budget = bytes_of_pages(cases[i].pages, cases[i].n_seqs);
        oscar_llama_options options = exact(budget);
        held h = hold_with(&options, params_of(cases[i].n_ctx, cases[i].n_seqs, cases[i].unified));
        oscar_error error = {0};
        if (oscar_llama_start(h.layer, &error)) fail_msg("%s", error.message);
        oscar_cache_stats s = stats_of(h);
        int64_t held_bytes = s.pages_total * s.page_bytes + s.scratch_bytes + s.scratch_thread_bytes;
        printf("%lld pages wanted, %lld made\n", (long long)cases[i].pages, (long long)s.pages_total);
        assert_true(held_bytes <= budget);
        assert_int_equal(oscar_llama_n_ctx_seq(h.layer), 64 * cases[i].seq_pages);
        assert_int_equal(oscar_llama_n_ctx(h.layer), 64 * cases[i].seq_pages * (cases[i].unified ? 1 : cases[i].n_seqs));
        bool less = cases[i].pages * 64 < cases[i].n_ctx;
        assert_true((strstr(said, "instead of") != NULL) == less);
        if (less) assert_true(held_bytes + s.page_bytes > budget - s.page_bytes);
        drop(h);
    }
}

static void refused(int64_t kv_memory, uint32_t n_ctx, uint32_t n_seqs, oscar_status status, const char *words) {
    oscar_llama_options options = exact(kv_memory);
    held h = hold_with(&options, params_of(n_ctx, n_seqs, false));
    oscar_error error = {0};
    assert_int_equal(oscar_llama_start(h.layer, &error), status);
    if (!strstr(error.message, words)) fail_msg("message: %s", error.message);
    assert_null(oscar_llama_cache(h.layer));
    assert_int_equal(run(h, tokens, 0, 4, 4, 0), -2); /* and stays refused */
    drop(h);
}

static void test_refused(void **state) {
    (void)state;
    refused(1 << 20, 512, 2, OSCAR_ERROR_ARGUMENT, "kv_memory_bytes is 1048576: expected at least");
    refused(bytes_of_pages(3, 8), 4096, 8, OSCAR_ERROR_ARGUMENT, "8 sequences need 8");
    refused(0, 1u << 28, 1, OSCAR_ERROR_MEMORY, "a cache of 268435520 tokens takes");
}

/* A full pool refuses the call and changes nothing: not for the other sequence either. */
static void test_full(void **state) {
    (void)state;
    oscar_llama_options options = exact(bytes_of_pages(6, 2));
    held h = hold_with(&options, params_of(4096, 2, true)), alone = hold_with(&options, params_of(4096, 2, true));
    assert_int_equal(run(h, tokens, 0, 100, 64, 1), 0); /* 2 of 6 pages */
    assert_int_equal(run(h, tokens + N, 0, 250, 64, 0), 0); /* the other 4 */
    assert_int_equal(stats_of(h).pages_free, 0);
    assert_int_equal(run(h, tokens, 100, 164, 64, 1), 1);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 1), 99);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 0), 249);
    /* A batch of both: nothing of either. */
    struct llama_batch batch = llama_batch_init(64, 0, 1);
    add(&batch, tokens + N + 250, 1, 250, 0);
    add(&batch, tokens + 100, 40, 100, 1);
    assert_int_equal(oscar_llama_decode(h.layer, batch), 1);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 0), 249);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 1), 99);
    llama_batch_free(batch);
    /* What fits in the pages they have goes on, and is right. */
    assert_int_equal(run(h, tokens, 100, 128, 28, 1), 0);
    assert_int_equal(run(alone, tokens, 0, 100, 64, 1), 0);
    assert_int_equal(run(alone, tokens, 100, 128, 28, 1), 0);
    float *a = copy_logits(alone, -1), *b = copy_logits(h, -1);
    assert_same(a, b, 0, "beside a full pool");
    free(a);
    free(b);
    /* Room that is given back is used. */
    assert_true(oscar_llama_memory_seq_rm(h.layer, 0, -1, -1));
    assert_int_equal(run(h, tokens, 128, 192, 64, 1), 0);
    drop(h);
    drop(alone);
}

/* The number behind `name` in the file; -1 without it. */
static long long number_in(const char *path, const char *name) {
    char line[400];
    long long value = -1;
    FILE *file = fopen(path, "r");
    if (!file) return -1;
    while (fgets(line, sizeof line, file)) {
        const char *labels = strchr(line, '{');
        char head[400];
        if (!labels) continue;
        snprintf(head, sizeof head, "%.*s", (int)(labels - line), line);
        const char *more = strstr(labels, "\",state=\"");
        if (more) snprintf(head + strlen(head), sizeof head - strlen(head), "/%.*s", (int)strcspn(more + 9, "\""), more + 9);
        if (strcmp(head, name) == 0) value = atoll(strrchr(line, ' '));
    }
    fclose(file);
    return value;
}

static void test_statistics(void **state) {
    (void)state;
    char path[] = "/tmp/oscar-stats-XXXXXX";
    int file = mkstemp(path);
    assert_true(file >= 0);
    close(file);
    oscar_llama_options options = exact(0);
    options.stats_path = path;
    held h = hold_with(&options, params_of(512, 2, false));
    oscar_error error = {0};
    if (oscar_llama_start(h.layer, &error)) fail_msg("%s", error.message);
    assert_int_equal(number_in(path, "oscar_up"), 1); /* written before anything runs */
    assert_int_equal(number_in(path, "oscar_pages/live"), 0);
    assert_int_equal(run(h, tokens, 0, 200, 64, 0), 0);
    oscar_llama_memory_seq_cp(h.layer, 0, 1, -1, -1);
    long long live = -1;
    for (int i = 0; i < 100 && live != 5; i++) { /* by the thread that writes it */
        usleep(100000);
        live = number_in(path, "oscar_pages/live");
    }
    assert_int_equal(live, 5); /* three full ones shared, a partial one each */
    assert_int_equal(number_in(path, "oscar_pages_shared"), 3);
    assert_int_equal(number_in(path, "oscar_tokens_held"), 400);
    assert_int_equal(number_in(path, "oscar_tokens_computed_total"), 200);
    assert_int_equal(number_in(path, "oscar_pages/live") + number_in(path, "oscar_pages/cached") + number_in(path, "oscar_pages/free"),
                     number_in(path, "oscar_pages_total"));
    /* Another file in one process is refused. */
    options.stats_path = "/tmp/another";
    held other = hold_with(&options, params_of(512, 2, false));
    assert_int_equal(oscar_llama_start(other.layer, &error), OSCAR_ERROR_ARGUMENT);
    drop(other);
    drop(h);
    assert_int_equal(number_in(path, "oscar_up"), 0);
    unlink(path);
}

/* Two sequences with the same beginning hold its full pages once, and go on as if alone. */
static void test_shared(void **state) {
    (void)state;
    oscar_llama_options options = exact(0);
    held h = hold_with(&options, params_of(512, 2, false)), alone = hold_with(&options, params_of(512, 2, false));
    assert_int_equal(run(h, tokens, 0, 150, 64, 0), 0);
    assert_int_equal(run(h, tokens, 0, 150, 64, 1), 0);
    oscar_cache_stats s = stats_of(h);
    printf("%lld pages live, %lld shared, %lld hits\n", (long long)s.pages_live, (long long)s.pages_shared, (long long)s.page_hits);
    assert_int_equal(s.pages_live, 4);
    assert_int_equal(s.pages_shared, 2);
    assert_int_equal(run(h, tokens + N, 150, 200, 50, 1), 0);
    assert_int_equal(run(alone, tokens, 0, 150, 64, 1), 0);
    assert_int_equal(run(alone, tokens + N, 150, 200, 50, 1), 0);
    float *a = copy_logits(alone, -1), *b = copy_logits(h, -1);
    assert_same(a, b, 0, "on shared pages");
    free(a);
    free(b);
    drop(h);
    drop(alone);
}

int main(void) {
    if (!open_model()) return 0;
    unsigned seed = 7;
    printf("seed %u\n", seed);
    for (int i = 0; i < 2 * N; i++) tokens[i] = (llama_token)(rand_r(&seed) % (unsigned)n_vocab);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes), cmocka_unit_test(test_refused),    cmocka_unit_test(test_full),
        cmocka_unit_test(test_statistics), cmocka_unit_test(test_shared),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    llama_model_free(model);
    return failed;
}
