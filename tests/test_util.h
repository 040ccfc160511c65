/* test_util.h - what several tests share: random numbers with a printed seed, cmocka's headers. */
#ifndef OSCAR_TEST_UTIL_H
#define OSCAR_TEST_UTIL_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* xorshift64*; never 0. */
static inline uint64_t rng_next(uint64_t *state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 2685821657736338717ull;
}
static inline double rng_uniform(uint64_t *state) { return (double)(rng_next(state) >> 11) / 9007199254740992.0; }
static inline double rng_normal(uint64_t *state) {
    double u = rng_uniform(state), v = rng_uniform(state);
    return sqrt(-2.0 * log(u + 1e-300)) * cos(6.283185307179586 * v);
}
/* The seed of a test: OSCAR_TEST_SEED or the given one; printed so that a failure can be repeated. */
static inline uint64_t rng_seed(const char *test, uint64_t otherwise) {
    const char *text = getenv("OSCAR_TEST_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : otherwise;
    if (seed == 0) seed = 1;
    printf("%s: seed %llu\n", test, (unsigned long long)seed);
    return seed;
}

#endif
