/*
 * test_codes.c - codes, parameters and pages as a hash that every build and machine must print alike.
 *
 * tests/check_neon.sh compares the lines with those of another processor, so the input is made of
 * sums, products and square roots alone, which IEEE 754 rounds in one way: no logarithms, no cosines.
 */
#include "codec/page.h"
#include "test_util.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#define MAX_D 256
#define ROWS CODEC_LANES
#define N_ROWS 32

/* Four uniform numbers make one that is nearly normal. */
static double bell(uint64_t *rng) {
    double sum = -2;
    for (int i = 0; i < 4; i++) sum += rng_uniform(rng);
    return 1.7320508 * sum;
}

/* out [d, d]: orthogonal. */
static void make_rotation(uint64_t *rng, int d, float *out) {
    static double a[MAX_D * MAX_D];
    for (int i = 0; i < d; i++) {
        double *row = a + i * d, norm = 0;
        for (int j = 0; j < d; j++) row[j] = bell(rng);
        for (int k = 0; k < i; k++) {
            double dot = 0;
            for (int j = 0; j < d; j++) dot += row[j] * a[k * d + j];
            for (int j = 0; j < d; j++) row[j] -= dot * a[k * d + j];
        }
        for (int j = 0; j < d; j++) norm += row[j] * row[j];
        for (int j = 0; j < d; j++) row[j] /= sqrt(norm);
    }
    for (int i = 0; i < d * d; i++) out[i] = (float)a[i];
}

/* b [d, d], dg [d]: the factor of a covariance with a falling spectrum. */
static void make_metric(uint64_t *rng, int d, float *b, float *dg) {
    static double m[MAX_D * MAX_D];
    double row[MAX_D];
    memset(m, 0, sizeof m);
    for (int k = 0; k < d; k++) {
        for (int i = 0; i < d; i++) row[i] = bell(rng) / (1 + k);
        for (int i = 0; i < d; i++)
            for (int j = 0; j < d; j++) m[i * d + j] += row[i] * row[j];
    }
    assert_int_equal(codec_factor_metric(d, m, 0.01, b, dg, NULL), OSCAR_OK);
}

/* Quantises N_ROWS rows [N_ROWS, d], `at_once` a call, and puts them in a page. */
static uint64_t hash_page(const row_codec *codec, page_side_kind kind, int at_once, const float *x) {
    const int d = codec->head_dim;
    page_side side = page_side_make(kind, d, codec->bits);
    uint8_t *page = aligned_calloc(side.bytes, 1), codes[ROWS * MAX_D];
    uint16_t params[ROWS * CODEC_MAX_GROUPS * 2];
    assert_non_null(page);
    for (int t = 0; t < N_ROWS; t += at_once) {
        assert_int_equal(codec_quantize_rows(codec, at_once, x + t * d, d, NULL, codes, params), 0);
        for (int r = 0; r < at_once; r++)
            page_put_row(&side, page, t + r, codes + r * d, params + r * side.n_groups * 2);
    }
    uint64_t hash = XXH3_64bits(page, side.bytes);
    aligned_free(page);
    return hash;
}

/* What the cases of a head_dim have in common. */
typedef struct inputs {
    float x[N_ROWS * MAX_D], rotation[MAX_D * MAX_D], b[MAX_D * MAX_D], dg[MAX_D];
} inputs;

static void make_inputs(int d, inputs *in) {
    uint64_t rng = 977 * (uint64_t)d;
    make_rotation(&rng, d, in->rotation);
    make_metric(&rng, d, in->b, in->dg);
    for (int i = 0; i < N_ROWS * d; i++) in->x[i] = (float)(bell(&rng) * (rng_next(&rng) % 40 ? 1 : 12));
}

static void check_case(const inputs *in, int d, int bits, oscar_recipe recipe, bool key) {
    uint64_t want = 0;
    row_codec codec = {.head_dim = d, .group = codec_group(d), .bits = bits, .recipe = (int32_t)recipe, .clip = 0.96f,
                       .ldlq = key, .gain = true, .metric_b = key ? in->b : NULL, .metric_d = key ? in->dg : NULL,
                       .rotation = in->rotation};
    for (int i = 0; i < ISA_COUNT; i++) {
        if (oscar_isa_select(isa_names[i])) continue;
        for (int at_once = 1; at_once <= ROWS; at_once *= ROWS) { /* both forms of the quantiser */
            uint64_t hash = hash_page(&codec, key ? PAGE_KEY : PAGE_VALUE, at_once, in->x);
            if (i == 0 && at_once == 1) want = hash;
            if (hash != want) fail_msg("%s, %d rows at once: other codes than plain C", isa_names[i], at_once);
        }
    }
    oscar_isa_select(NULL);
    printf("codes %d %d %s %s %016llx\n", d, bits, recipe == OSCAR_RECIPE_ZOO ? "zoo" : "default", key ? "key" : "value",
           (unsigned long long)want);
}

static void test_codes(void **state) {
    (void)state;
    static const int dims[] = {64, 80, 96, 128, 256};
    static inputs in;
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
        make_inputs(dims[i], &in);
        for (int bits = 2; bits <= (dims[i] > 128 ? 2 : 4); bits++)
            for (int key = 0; key < 2; key++) check_case(&in, dims[i], bits, OSCAR_RECIPE_DEFAULT, key);
        check_case(&in, dims[i], 2, OSCAR_RECIPE_ZOO, true);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_codes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
