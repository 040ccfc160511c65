/*
 * test_llama_state.c - saving and restoring under a real model (SmolLM2): what goes on from a
 * restored sequence equals what goes on without, in the same context, in another that has computed
 * nothing, and from a file; what is cut, changed or of another setting is refused and changes
 * nothing. Skipped without the model.
 */
#include "test_llama_util.h"

enum { N = 300, N_MORE = 12, N_LONG = N + 40, N_CTX = 512 };

static llama_token tokens[N_LONG];
static llama_token others[N_LONG];
static oscar_rotations *rotations;
static char folder[] = "test_llama_state.XXXXXX";

static held hold_bits(int kv_type, int n_seqs, uint32_t n_ctx, int bits_k, int bits_v) {
    oscar_llama_options options = OSCAR_LLAMA_OPTIONS_INIT;
    options.kv_type = kv_type;
    options.rotations = kv_type == OSCAR_KV_INT2 ? rotations : NULL;
    options.sink = 16;
    options.recent = 64;
    options.bits_k = bits_k;
    options.bits_v = bits_v;
    struct llama_context_params p = llama_context_default_params();
    p.n_ctx = n_ctx;
    p.n_batch = 256;
    p.n_ubatch = 128;
    p.n_seq_max = (uint32_t)n_seqs;
    p.kv_unified = true;
    p.n_threads = p.n_threads_batch = 1;
    return hold_with(&options, p);
}

static held hold(int kv_type, int n_seqs, uint32_t n_ctx) { return hold_bits(kv_type, n_seqs, n_ctx, 0, 0); }

/* Logits after the N_MORE further tokens, one at a time. */
static float *go_on(held h, llama_seq_id seq) {
    assert_int_equal(run(h, tokens, N, N + N_MORE, 1, seq), 0);
    return copy_logits(h, -1);
}

static void expect_equal(const float *reference, float *got, const char *what) {
    assert_same(reference, got, 0, what);
    free(got);
}

static uint8_t *saved(held h, llama_seq_id seq, size_t *bytes) {
    *bytes = oscar_llama_state_seq_get_size(h.layer, seq);
    assert_true(*bytes > 0);
    uint8_t *blob = malloc(*bytes);
    assert_int_equal(oscar_llama_state_seq_get_data(h.layer, blob, *bytes, seq), *bytes);
    return blob;
}

static void round_trip(int kv_type, const char *name) {
    held h = hold(kv_type, 2, N_CTX);
    assert_int_equal(run(h, tokens, 0, N, 256, 0), 0);
    size_t bytes;
    uint8_t *blob = saved(h, 0, &bytes);
    float *reference = go_on(h, 0);
    oscar_llama_memory_clear(h.layer);
    assert_int_equal(run(h, others, 0, 200, 200, 0), 0); /* other rows where the old ones were */
    assert_int_equal(oscar_llama_state_seq_set_data(h.layer, blob, bytes, 0), bytes);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 0), N - 1);
    expect_equal(reference, go_on(h, 0), name);
    assert_int_equal(oscar_llama_state_seq_set_data(h.layer, blob, SIZE_MAX, 1), bytes); /* no size given */
    expect_equal(reference, go_on(h, 1), "into another sequence");
    /* A rollback within the lookahead afterwards is as exact as without. */
    assert_int_equal(oscar_llama_state_seq_set_data(h.layer, blob, bytes, 0), bytes);
    assert_true(oscar_llama_memory_seq_rm(h.layer, 0, N - 40, -1));
    assert_int_equal(run(h, tokens, N - 40, N, 40, 0), 0);
    float *back = go_on(h, 0);
    assert_same(reference, back, 1e-3, "rolled back by 40 after the restore");
    free(back);

    held fresh = hold(kv_type, 2, N_CTX);
    assert_int_equal(oscar_llama_state_seq_set_data(fresh.layer, blob, bytes, 1), bytes);
    expect_equal(reference, go_on(fresh, 1), "into a context that computed nothing");
    drop(fresh);
    free(blob);
    free(reference);
    drop(h);
}

static void test_round_trip_int2(void **state) {
    (void)state;
    round_trip(OSCAR_KV_INT2, "int2, cleared and restored");
}

static void test_round_trip_f32(void **state) {
    (void)state;
    round_trip(OSCAR_KV_F32, "f32, cleared and restored");
}

/* Codes of 3 and 4 bits, and that other bits are another kind of state. */
static void test_bits(void **state) {
    (void)state;
    held h = hold_bits(OSCAR_KV_INT2, 1, N_CTX, 3, 4), fresh = hold_bits(OSCAR_KV_INT2, 1, N_CTX, 3, 4);
    held two = hold(OSCAR_KV_INT2, 1, N_CTX);
    assert_int_equal(run(h, tokens, 0, N, 256, 0), 0);
    size_t bytes;
    uint8_t *blob = saved(h, 0, &bytes);
    float *reference = go_on(h, 0);
    assert_int_equal(oscar_llama_state_seq_set_data(fresh.layer, blob, bytes, 0), bytes);
    expect_equal(reference, go_on(fresh, 0), "keys of 3 bits, values of 4");
    assert_int_equal(oscar_llama_state_seq_set_data(two.layer, blob, bytes, 0), 0);
    assert_int_equal(oscar_llama_last_error(two.layer)->status, OSCAR_ERROR_MISMATCH);
    free(reference);
    free(blob);
    drop(two);
    drop(fresh);
    drop(h);
}

static oscar_cache_stats stats_of(held h) {
    oscar_cache_stats stats = {.struct_size = sizeof stats};
    oscar_cache_get_stats(oscar_llama_cache(h.layer), &stats);
    return stats;
}

/* Lengths around the page: what restores take is what the rows need, and all comes back. */
static void test_pages(void **state) {
    (void)state;
    held h = hold(OSCAR_KV_INT2, 2, N_CTX);
    assert_int_equal(run(h, tokens, 0, 1, 1, 0), 0);
    oscar_llama_memory_clear(h.layer);
    const oscar_cache_stats empty = stats_of(h);
    assert_int_equal(empty.pages_free, empty.pages_total);
    const int lengths[] = {1, 63, 64, 65, 128, 129};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        int n = lengths[i];
        assert_int_equal(run(h, tokens, 0, n, 256, 0), 0);
        size_t bytes;
        uint8_t *blob = saved(h, 0, &bytes);
        oscar_llama_memory_seq_cp(h.layer, 0, 1, -1, -1);
        for (int k = 0; k < 20; k++) assert_int_equal(oscar_llama_state_seq_set_data(h.layer, blob, bytes, k % 2), bytes);
        oscar_cache_stats s = stats_of(h);
        /* Full pages are found again and held once. */
        assert_int_equal(s.pages_live, n / 64 + (n % 64 ? 2 : 0));
        assert_int_equal(s.pages_shared, n / 64);
        assert_int_equal(s.pages_free + s.pages_cached + s.pages_live, s.pages_total);
        assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 1), n - 1);
        oscar_llama_memory_clear(h.layer);
        s = stats_of(h);
        assert_int_equal(s.pages_live, 0);
        assert_int_equal(s.pages_free + s.pages_cached, empty.pages_free);
        assert_int_equal(s.overlay_pages_live, empty.overlay_pages_live);
        free(blob);
    }
    drop(h);
}

static void test_empty(void **state) {
    (void)state;
    held h = hold(OSCAR_KV_INT2, 2, N_CTX);
    size_t bytes; /* nothing was computed yet */
    uint8_t *blob = saved(h, 1, &bytes);
    assert_int_equal(run(h, tokens, 0, 70, 70, 0), 0);
    assert_int_equal(oscar_llama_state_seq_set_data(h.layer, blob, bytes, 0), bytes);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 0), -1);
    assert_int_equal(oscar_llama_state_seq_get_size(h.layer, 2), 0);
    assert_non_null(strstr(oscar_llama_last_error(h.layer)->message, "sequence 2, expected 0 to 1"));
    assert_int_equal(oscar_llama_state_seq_get_data(h.layer, blob, bytes - 1, 0), 0);
    assert_int_equal(oscar_llama_state_seq_set_data(h.layer, blob, bytes, -1), 0);
    free(blob);
    drop(h);
}

/* Refuses the bytes, and the sequence is as it was. */
static void refuse_data(held h, const uint8_t *blob, size_t size, oscar_status status) {
    uint8_t *copy = malloc(size + 1); /* a read past the end is seen by the sanitiser */
    memcpy(copy, blob, size);
    assert_int_equal(oscar_llama_state_seq_set_data(h.layer, copy, size, 0), 0);
    oscar_status found = oscar_llama_last_error(h.layer)->status;
    if (status && found != status) fail_msg("status %d: %s", found, oscar_llama_last_error(h.layer)->message);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 0), N - 1);
    free(copy);
}

static void test_refused(void **state) {
    (void)state;
    uint64_t rng = *(uint64_t *)*state;
    held h = hold(OSCAR_KV_INT2, 2, N_CTX);
    assert_int_equal(run(h, others, 0, 100, 100, 1), 0);
    assert_int_equal(run(h, tokens, 0, N, 256, 0), 0);
    size_t bytes;
    uint8_t *blob = saved(h, 1, &bytes);
    const size_t cuts[] = {0, 1, 3, 4, 40, 71, 72, 79, 80, bytes / 2, bytes - 8, bytes - 1};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) refuse_data(h, blob, cuts[i], OSCAR_ERROR_FORMAT);
    for (size_t i = 0; i < 72 + 100; i++) { /* every byte of the header, and some of the rest */
        size_t at = i < 72 ? i : (size_t)(rng_next(&rng) % bytes);
        uint8_t before = blob[at];
        blob[at] ^= (uint8_t)(1u << rng_next(&rng) % 8);
        refuse_data(h, blob, bytes, OSCAR_OK);
        blob[at] = before;
    }
    /* Another setting: windows, kind, and a context in which it is too long. */
    held exact = hold(OSCAR_KV_F32, 1, N_CTX), small = hold(OSCAR_KV_INT2, 1, 256);
    assert_int_equal(run(exact, tokens, 0, N, 256, 0), 0);
    refuse_data(exact, blob, bytes, OSCAR_ERROR_MISMATCH);
    free(blob);
    blob = saved(h, 0, &bytes);
    assert_int_equal(oscar_llama_state_seq_set_data(small.layer, blob, bytes, 0), 0);
    assert_int_equal(oscar_llama_last_error(small.layer)->status, OSCAR_ERROR_NO_SPACE);
    free(blob);
    drop(small);
    drop(exact);
    /* After all that, as if nothing had been. */
    float *got = go_on(h, 0);
    held clean = hold(OSCAR_KV_INT2, 2, N_CTX);
    assert_int_equal(run(clean, tokens, 0, N, 256, 0), 0);
    float *reference = go_on(clean, 0);
    expect_equal(reference, got, "after refusals");
    free(reference);
    drop(clean);
    drop(h);
}

static uint8_t *read_file(const char *path, size_t *size) {
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    *size = (size_t)ftell(f);
    rewind(f);
    uint8_t *bytes = malloc(*size);
    assert_int_equal(fread(bytes, 1, *size, f), *size);
    fclose(f);
    return bytes;
}

static void write_file(const char *path, const uint8_t *bytes, size_t size) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, size, f), size);
    assert_int_equal(fclose(f), 0);
}

static void test_seq_file(void **state) {
    uint64_t rng = *(uint64_t *)*state;
    char path[64], bad[64];
    snprintf(path, sizeof path, "%s/slot", folder);
    snprintf(bad, sizeof bad, "%s/bad", folder);
    held h = hold(OSCAR_KV_INT2, 2, N_CTX);
    assert_int_equal(run(h, tokens, 0, N, 256, 0), 0);
    size_t bytes = oscar_llama_state_seq_save_file(h.layer, path, 0, tokens, N), size;
    uint8_t *file = read_file(path, &size);
    assert_int_equal(size, bytes);
    assert_int_equal(oscar_llama_state_seq_save_file(h.layer, "/nowhere/slot", 0, tokens, N), 0);
    assert_int_equal(oscar_llama_last_error(h.layer)->status, OSCAR_ERROR_IO);
    float *reference = go_on(h, 0);

    held fresh = hold(OSCAR_KV_INT2, 2, N_CTX);
    llama_token loaded[N] = {0};
    size_t n = 0;
    /* Without tokens: counted only, and nothing is restored or made. */
    assert_int_equal(oscar_llama_state_seq_load_file(fresh.layer, path, 1, NULL, 0, &n), 12 + 4 * N);
    assert_int_equal(n, N);
    assert_int_equal(oscar_llama_memory_seq_pos_max(fresh.layer, 1), -1);
    assert_int_equal(oscar_llama_state_seq_load_file(fresh.layer, path, 1, loaded, N - 1, &n), 0);
    assert_int_equal(oscar_llama_state_seq_load_file(fresh.layer, path, 1, loaded, N, &n), bytes);
    assert_memory_equal(loaded, tokens, sizeof loaded);
    expect_equal(reference, go_on(fresh, 1), "from a file");

    assert_true(oscar_llama_memory_seq_rm(fresh.layer, 1, N, -1));
    const size_t cuts[] = {0, 11, 12, 12 + 4 * N, 12 + 4 * N + 80, size / 2, size - 16, size - 1};
    memset(loaded, 0, sizeof loaded);
    const llama_token zeros[N] = {0};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts + 40; i++) {
        bool cut = i < sizeof cuts / sizeof *cuts;
        size_t at = (size_t)(rng_next(&rng) % (i % 2 ? size : 12 + 4 * N));
        if (!cut) file[at] ^= 16;
        write_file(bad, file, cut ? cuts[i] : size);
        if (!cut) file[at] ^= 16;
        if (oscar_llama_state_seq_load_file(fresh.layer, bad, 1, loaded, N, &n) != 0) fail_msg("accepted, case %zu", i);
        assert_int_equal(oscar_llama_memory_seq_pos_max(fresh.layer, 1), N - 1);
        assert_memory_equal(loaded, zeros, sizeof loaded);
    }
    expect_equal(reference, go_on(fresh, 1), "after refused files");
    free(file);
    free(reference);
    drop(fresh);
    drop(h);
}

static void test_whole(void **state) {
    (void)state;
    char path[64];
    snprintf(path, sizeof path, "%s/session", folder);
    held h = hold(OSCAR_KV_INT2, 3, N_CTX);
    assert_int_equal(run(h, tokens, 0, N, 256, 0), 0);
    assert_int_equal(run(h, others, 0, 50, 50, 2), 0);
    size_t size = oscar_llama_state_get_size(h.layer);
    uint8_t *blob = malloc(size);
    assert_int_equal(oscar_llama_state_get_data(h.layer, blob, size - 1), 0);
    assert_int_equal(oscar_llama_state_get_data(h.layer, blob, SIZE_MAX), size);
    assert_true(oscar_llama_state_save_file(h.layer, path, tokens, N));
    float *reference = go_on(h, 0);

    assert_int_equal(run(h, others, 0, 30, 30, 1), 0);
    for (size_t at = 0; at < size; at += at < 64 ? 1 : size / 50) {
        blob[at] ^= 4;
        assert_int_equal(oscar_llama_state_set_data(h.layer, blob, size), 0);
        blob[at] ^= 4;
    }
    assert_int_equal(oscar_llama_state_set_data(h.layer, blob, size - 1), 0);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 0), N + N_MORE - 1);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 1), 29);
    assert_int_equal(oscar_llama_state_set_data(h.layer, blob, size), size);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 0), N - 1);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 1), -1);
    assert_int_equal(oscar_llama_memory_seq_pos_max(h.layer, 2), 49);
    expect_equal(reference, go_on(h, 0), "all sequences restored");

    held fresh = hold(OSCAR_KV_INT2, 3, N_CTX), fewer = hold(OSCAR_KV_INT2, 2, N_CTX);
    llama_token loaded[N] = {0};
    size_t n = 0;
    assert_true(oscar_llama_state_load_file(fresh.layer, path, loaded, N, &n));
    assert_int_equal(n, N);
    assert_memory_equal(loaded, tokens, sizeof loaded);
    assert_int_equal(oscar_llama_memory_seq_pos_max(fresh.layer, 2), 49);
    expect_equal(reference, go_on(fresh, 0), "a session from a file");
    assert_false(oscar_llama_state_load_file(fewer.layer, path, loaded, N, &n));
    assert_non_null(strstr(oscar_llama_last_error(fewer.layer)->message, "sequence 2"));
    assert_int_equal(oscar_llama_memory_seq_pos_max(fewer.layer, 0), -1);
    assert_int_equal(oscar_llama_state_seq_load_file(fresh.layer, path, 0, loaded, N, &n), 0); /* other kind of file */
    free(blob);
    free(reference);
    drop(fewer);
    drop(fresh);
    drop(h);
}

/* Four sequences with one prompt, in a context that could not hold it twice. */
static void test_whole_shared(void **state) {
    (void)state;
    enum { SEQS = 4, OWN = 20 };
    held h = hold(OSCAR_KV_INT2, SEQS, N_CTX), fresh = hold(OSCAR_KV_INT2, SEQS, N_CTX);
    assert_int_equal(run(h, tokens, 0, N, 256, 0), 0);
    for (int s = 1; s < SEQS; s++) oscar_llama_memory_seq_cp(h.layer, 0, s, -1, -1);
    for (int s = 1; s < SEQS; s++) assert_int_equal(run(h, others + s, N, N + OWN, OWN, s), 0);
    oscar_cache_stats before = stats_of(h);
    assert_true((N + OWN + 63) / 64 * (SEQS - 1) + (N + 63) / 64 > before.pages_total);
    size_t size = oscar_llama_state_get_size(h.layer);
    uint8_t *blob = malloc(size);
    assert_int_equal(oscar_llama_state_get_data(h.layer, blob, size), size);
    held contexts[2] = {h, fresh};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(oscar_llama_state_set_data(contexts[i].layer, blob, size), size);
        oscar_cache_stats s = stats_of(contexts[i]);
        assert_int_equal(s.pages_live, before.pages_live);
        assert_int_equal(s.pages_shared, N / 64);
    }
    /* From here on both compute the same, in a sequence whose pages others hold as well. */
    int at = N + OWN;
    for (int i = 0; i < 2; i++) assert_int_equal(run(contexts[i], tokens, at, at + 5, 5, SEQS - 1), 0);
    float *a = copy_logits(h, -1);
    expect_equal(a, copy_logits(fresh, -1), "four sequences of one prompt restored");
    free(a);
    float *reference = go_on(h, 0);
    expect_equal(reference, go_on(fresh, 0), "the first of them");
    held alone = hold(OSCAR_KV_INT2, 1, N_CTX);
    assert_int_equal(run(alone, tokens, 0, N, 256, 0), 0);
    expect_equal(reference, go_on(alone, 0), "as if it were alone");
    free(reference);
    free(blob);
    drop(alone);
    drop(fresh);
    drop(h);
}

/* Prompts around the page size sent twice: the second time all but the last token is known. */
static void test_known_prompts(void **state) {
    (void)state;
    const int lengths[] = {1, 63, 64, 65, 128, 256};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        int n = lengths[i];
        held h = hold(OSCAR_KV_INT2, 1, N_CTX);
        assert_int_equal(run(h, tokens, 0, n, 256, 0), 0);
        float *cold = copy_logits(h, -1), *warm[2];
        assert_int_equal(run(h, others, n, n + 20, 1, 0), 0); /* an answer */
        for (int k = 0; k < 2; k++) {
            assert_true(oscar_llama_memory_seq_rm(h.layer, 0, n - 1, -1));
            assert_int_equal(run(h, tokens, n - 1, n, 1, 0), 0);
            warm[k] = copy_logits(h, -1);
        }
        char what[64];
        snprintf(what, sizeof what, "%d tokens, warm and warm", n);
        assert_same(warm[0], warm[1], 0, what);
        snprintf(what, sizeof what, "%d tokens, cold and warm", n);
        assert_same(cold, warm[0], 0.2, what); /* one token and many: sums in another order */
        free(cold);
        free(warm[0]);
        free(warm[1]);
        drop(h);
    }
}

int main(void) {
    /* Equal to the bit, so on a path that decodes as it prefills. The kernels on codes round queries and
     * weights to 16 bits (test_attn_decode bounds that), and ggml's rounding of activations to 8 bits
     * makes half a logit of it. */
    if (oscar_isa_select("avx512") != OSCAR_OK) assert_int_equal(oscar_isa_select("ref"), OSCAR_OK);
    if (!open_model()) return 77;
    uint64_t rng = rng_seed("test_llama_state", 77);
    for (int i = 0; i < N_LONG; i++) tokens[i] = (llama_token)(1000 + rng_next(&rng) % 20000);
    for (int i = 0; i < N_LONG; i++) others[i] = (llama_token)(1000 + rng_next(&rng) % 20000);
    if (!mkdtemp(folder)) return 1;
    rotations = hadamard_of(hold(OSCAR_KV_F32, 1, N_CTX));
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip_int2), cmocka_unit_test(test_round_trip_f32),
        cmocka_unit_test(test_bits),            cmocka_unit_test(test_pages),
        cmocka_unit_test(test_empty),           cmocka_unit_test_prestate(test_refused, &rng),
        cmocka_unit_test_prestate(test_seq_file, &rng), cmocka_unit_test(test_whole), cmocka_unit_test(test_whole_shared),
        cmocka_unit_test(test_known_prompts),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    const char *names[] = {"slot", "bad", "session"};
    char path[64];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    if (rmdir(folder) != 0) failed = 1; /* a temporary file was left */
    oscar_rotations_free(rotations);
    llama_model_free(model);
    llama_backend_free();
    return failed;
}
