/*
 * test_zoo_fuzz.c - replays the fuzz targets without a fuzzer: the corpus as it is, then mutated.
 */
#include <dirent.h>

#include "test_zoo_util.h"

#define OSCAR_FUZZ_REPLAY
#include "fuzz/fuzz_gguf.c"
#include "fuzz/fuzz_pt.c"
#include "fuzz/fuzz_rotations.c"

/* Mutations of each input. */
#define N_MUTATIONS 300

/* A few bytes replaced, numbers made extreme, parts copied over others, the end cut or repeated:
 * what a fuzzer tries first. out: [2 n] */
static size_t mutate(uint64_t *rng, const uint8_t *bytes, size_t n, uint8_t *out) {
    static const uint8_t extreme[4][8] = {
        {0}, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, {0, 0, 0, 0x80, 0, 0, 0, 0x80}, {1}};
    memcpy(out, bytes, n);
    size_t changes = 1 + rng_next(rng) % 4;
    for (size_t i = 0; i < changes && n >= 16; i++) {
        /* Half of the changes near the start, where headers are. */
        size_t at = rng_next(rng) % (rng_next(rng) >> 63 ? n : n < 512 ? n : 512), from = rng_next(rng) % n;
        size_t width = (size_t)1 << rng_next(rng) % 4;
        if (at + width > n || from + width > n) continue;
        switch (rng_next(rng) % 5) {
        case 0: out[at] = (uint8_t)rng_next(rng); break;
        case 1: out[at] ^= (uint8_t)(1u << rng_next(rng) % 8); break;
        case 2: memcpy(out + at, extreme[rng_next(rng) % 4], width); break;
        case 3: memmove(out + at, out + from, width); break;
        default: out[at] = (uint8_t)(out[at] + (rng_next(rng) >> 63 ? 1 : 255)); break;
        }
    }
    uint64_t end = rng_next(rng) % 16;
    if (end == 0 && n) return rng_next(rng) % n;
    if (end == 1) {
        memcpy(out + n, bytes, n);
        return 2 * n;
    }
    return n;
}

static void replay(const char *name, int (*target)(const uint8_t *, size_t)) {
    char folder[512];
    snprintf(folder, sizeof folder, OSCAR_TEST_DATA "/../fuzz/corpus/%s", name);
    uint64_t rng = rng_seed(name, 2024);
    DIR *d = opendir(folder);
    assert_non_null(d);
    int n_inputs = 0;
    for (struct dirent *entry; (entry = readdir(d));) {
        char path[1024];
        size_t n;
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        uint8_t *bytes = read_file(path, &n), *changed = malloc(2 * n + 1);
        assert_int_equal(target(bytes, n), 0);
        for (int i = 0; i < N_MUTATIONS; i++) {
            size_t n_changed = mutate(&rng, bytes, n, changed);
            uint8_t *exact = exact_copy(changed, n_changed);
            target(exact, n_changed);
            free(exact);
        }
        free(bytes);
        free(changed);
        n_inputs++;
    }
    closedir(d);
    assert_true(n_inputs >= 3);
}

static void test_rotations(void **state) {
    (void)state;
    replay("fuzz_rotations", fuzz_rotations);
}
static void test_pt(void **state) {
    (void)state;
    replay("fuzz_pt", fuzz_pt);
}
static void test_gguf(void **state) {
    (void)state;
    replay("fuzz_gguf", fuzz_gguf);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rotations), cmocka_unit_test(test_pt),
                                       cmocka_unit_test(test_gguf)};
    return cmocka_run_group_tests_name("zoo_fuzz", tests, NULL, NULL);
}
