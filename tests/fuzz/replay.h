/*
 * replay.h - runs a fuzz target without a fuzzer: each input of its corpus as it is, then mutated.
 */
#ifndef OSCAR_FUZZ_REPLAY_H
#define OSCAR_FUZZ_REPLAY_H

#include <dirent.h>

#include "test_util.h"

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

/* One input as it is and mutated; each in memory of exactly its size, so that a sanitiser sees a read past it. */
static void replay_input(uint64_t *rng, const uint8_t *bytes, size_t n, int (*target)(const uint8_t *, size_t)) {
    uint8_t *changed = malloc(2 * n + 1);
    for (int i = 0; i <= N_MUTATIONS; i++) {
        size_t size = i ? mutate(rng, bytes, n, changed) : n;
        uint8_t *exact = malloc(size ? size : 1);
        memcpy(exact, i ? changed : bytes, size);
        assert_int_equal(target(exact, size), 0);
        free(exact);
    }
    free(changed);
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
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        FILE *file = fopen(path, "rb");
        assert_non_null(file);
        fseek(file, 0, SEEK_END);
        size_t n = (size_t)ftell(file);
        rewind(file);
        uint8_t *bytes = malloc(n + 1);
        assert_int_equal(fread(bytes, 1, n, file), n);
        fclose(file);
        replay_input(&rng, bytes, n, target);
        free(bytes);
        n_inputs++;
    }
    closedir(d);
    assert_true(n_inputs >= 3);
}

#endif
