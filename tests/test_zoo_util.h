/* test_zoo_util.h - rotations to store, golden values, and files, for the tests of the file formats. */
#ifndef OSCAR_TEST_ZOO_UTIL_H
#define OSCAR_TEST_ZOO_UTIL_H

#include "test_util.h"
#include "zoo/zoo.h"

/* What tests/data/zoo/make_golden.py puts into every file. */
#define GOLDEN_D 16
static inline float golden_rotation(int layer, int head, int r, int c) {
    int odd = __builtin_popcount((unsigned)(r & c)) + (0x0d >> ((c + 3 * head + layer) % 5) & 1);
    return odd % 2 ? -0.25f : 0.25f;
}

/* A whole file; *n receives its size. */
static inline uint8_t *read_file(const char *path, size_t *n) {
    FILE *f = fopen(path, "rb");
    if (!f) fail_msg("cannot open %s", path);
    fseek(f, 0, SEEK_END);
    *n = (size_t)ftell(f);
    rewind(f);
    uint8_t *bytes = malloc(*n + 1);
    assert_int_equal(fread(bytes, 1, *n, f), *n);
    fclose(f);
    return bytes;
}

/* Exactly n bytes of their own, so that a sanitizer sees a read of one more. */
static inline uint8_t *exact_copy(const uint8_t *bytes, size_t n) {
    uint8_t *copy = malloc(n ? n : 1);
    memcpy(copy, bytes, n);
    return copy;
}

static inline void assert_status(oscar_status found, oscar_status expected, const oscar_error *error) {
    if (found != expected) fail_msg("status %d, expected %d: %s", (int)found, (int)expected, error->message);
}
static inline void assert_message(const oscar_error *error, const char *part) {
    if (!strstr(error->message, part)) fail_msg("message \"%s\" does not say \"%s\"", error->message, part);
}

static inline float *random_array(uint64_t *rng, size_t n) {
    float *a = aligned_calloc(n, sizeof *a);
    for (size_t i = 0; i < n; i++) a[i] = (float)rng_normal(rng);
    return a;
}

/* Orthogonal: Hadamard with random signs of its columns, [n_heads, d, d]. */
static inline float *random_rotation(uint64_t *rng, int32_t n_heads, int32_t d) {
    float *a = aligned_calloc((size_t)n_heads * d * d, sizeof *a);
    for (int32_t h = 0; h < n_heads; h++) {
        float *m = a + (size_t)h * d * d;
        rotations_hadamard_matrix(d, m);
        for (int32_t j = 0; j < d; j++)
            for (int32_t i = 0, flip = rng_next(rng) >> 63; i < d && flip; i++) m[i * d + j] = -m[i * d + j];
    }
    return a;
}

/* Unit lower triangular with positive pivots. */
static inline float *random_lower(uint64_t *rng, int32_t n_heads, int32_t d) {
    float *a = random_array(rng, (size_t)n_heads * d * d);
    for (int32_t row = 0; row < n_heads * d; row++)
        for (int32_t j = row % d; j < d; j++) a[row * d + j] = j == row % d ? 1.0f : 0.0f;
    return a;
}
static inline float *random_pivots(uint64_t *rng, size_t n) {
    float *a = random_array(rng, n);
    for (size_t i = 0; i < n; i++) a[i] = fabsf(a[i]) + 0.01f;
    return a;
}

/* Three layers: everything set, nothing set, the published recipe behind a sliding window. */
static inline oscar_rotations *sample_rotations(uint64_t seed) {
    uint64_t rng = seed;
    oscar_layer shapes[3] = {{.n_kv_heads = 2, .n_q_heads = 6, .head_dim = 16},
                             {.n_kv_heads = 1, .n_q_heads = 1, .head_dim = 16},
                             {.n_kv_heads = 3, .n_q_heads = 3, .head_dim = 48, .window = 77}};
    shapes[0].rope = (oscar_rope){.layout = OSCAR_ROPE_HALF_SPLIT, .n_dims = 12, .magnitude = 1.1f};
    for (int i = 0; i < 6; i++) shapes[0].rope.inv_freq[i] = (float)rng_uniform(&rng);
    oscar_rotations *r = rotations_new(shapes, 3);
    rotations_layer *full = &r->layers[0], *zoo = &r->layers[2];
    full->bits_k = 3;
    full->bits_v = 4;
    full->ldlq_k = full->gain_k = full->gain_v = true;
    full->k_rotation = random_rotation(&rng, 2, 16);
    full->v_rotation = random_rotation(&rng, 2, 16);
    full->v_mean = random_array(&rng, 32);
    full->k_metric_b = random_lower(&rng, 2, 16);
    full->k_metric_d = random_pivots(&rng, 32);
    full->v_metric_b = random_lower(&rng, 2, 16);
    full->v_metric_d = random_pivots(&rng, 32);
    full->n_tracked = 2;
    full->tracked = aligned_calloc(4, sizeof *full->tracked);
    full->k_mean = random_array(&rng, 32);
    full->k_tracked = aligned_calloc(32, sizeof(float));
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < 2; i++) {
            int pair = full->tracked[2 * h + i] = 3 * i + h;
            for (int side = 0; side < 2; side++) {
                int dim = 16 * h + pair + 6 * side; /* half-split: f and f + n_dims / 2 */
                full->k_tracked[dim] = full->k_mean[dim];
                full->k_mean[dim] = 0;
            }
        }
    zoo->recipe = OSCAR_RECIPE_ZOO;
    zoo->clip_k = 0.96f;
    zoo->clip_v = 0.92f;
    zoo->k_rotation = random_rotation(&rng, 3, 48);
    assert_true(rotations_set_meta(r, "model", "s\xc3\xb6me \"model\"\\\n\x01"));
    assert_true(rotations_set_meta(r, "calibration_tokens", "16384"));
    return r;
}

#endif
