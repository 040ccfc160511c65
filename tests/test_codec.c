/*
 * test_codec.c - the quantiser: paths bit-equal, agreement with a float64 version written another
 * way, what LDLQ and gain promise, degenerate rows, and rotations.
 */
#include "codec/rotations.h"
#include "test_util.h"

#define MAX_D OSCAR_MAX_HEAD_DIM

/* A quantiser with everything it points to, random. */
typedef struct fixture {
    row_codec codec;
    double *metric;    /* [d, d] f64, damped: what B D B^T stands for */
    float *b, *dg;     /* its factor */
    float *rotation;   /* [d, d] orthogonal */
    float *x;          /* [16, d] */
} fixture;

typedef struct result {
    uint32_t bad;
    float y[CODEC_LANES * MAX_D];
    uint8_t codes[CODEC_LANES * MAX_D];
    uint16_t params[CODEC_LANES * CODEC_MAX_GROUPS * 2];
} result;

static const codec_ops *paths[ISA_COUNT];
static int n_paths;

static void find_paths(void) {
    paths[n_paths++] = &codec_ops_ref;
#if defined(__x86_64__)
    oscar_isa_select(NULL);
    if (isa_current() >= ISA_AVX2) paths[n_paths++] = &codec_ops_avx2;
    if (isa_current() >= ISA_AVX512) paths[n_paths++] = &codec_ops_avx512;
#elif defined(__aarch64__)
    paths[n_paths++] = &codec_ops_neon;
#endif
    printf("paths:");
    for (int p = 0; p < n_paths; p++) printf(" %s", paths[p]->name);
    printf("\n");
}

static void random_rotation(uint64_t *rng, int d, float *out) {
    double *a = malloc(sizeof(double) * (size_t)(d * d));
    for (int i = 0; i < d; i++) {
        double norm = 0;
        for (int j = 0; j < d; j++) a[i * d + j] = rng_normal(rng);
        for (int k = 0; k < i; k++) {
            double dot = 0;
            for (int j = 0; j < d; j++) dot += a[i * d + j] * a[k * d + j];
            for (int j = 0; j < d; j++) a[i * d + j] -= dot * a[k * d + j];
        }
        for (int j = 0; j < d; j++) norm += a[i * d + j] * a[i * d + j];
        for (int j = 0; j < d; j++) a[i * d + j] /= sqrt(norm);
    }
    for (int i = 0; i < d * d; i++) out[i] = (float)a[i];
    free(a);
}

/* A covariance with a falling spectrum: as query covariances are, a few directions lead. */
static void random_metric(uint64_t *rng, int d, double *m) {
    double *a = malloc(sizeof(double) * (size_t)(d * d));
    for (int k = 0; k < d; k++)
        for (int i = 0; i < d; i++) a[k * d + i] = rng_normal(rng) * exp(-3.0 * k / d);
    memset(m, 0, sizeof(double) * (size_t)(d * d));
    for (int k = 0; k < d; k++)
        for (int i = 0; i < d; i++)
            for (int j = 0; j < d; j++) m[i * d + j] += a[k * d + i] * a[k * d + j];
    free(a);
}

static fixture fixture_make(uint64_t *rng, int d, int bits, bool with_metric, bool with_rotation) {
    fixture f = {.codec = {.head_dim = d, .group = codec_group(d), .bits = bits, .clip = 0.96f}};
    size_t cells = (size_t)(d * d);
    f.metric = malloc(cells * sizeof *f.metric);
    f.b = malloc(cells * sizeof *f.b);
    f.dg = malloc((size_t)d * sizeof *f.dg);
    f.rotation = malloc(cells * sizeof *f.rotation);
    f.x = malloc((size_t)(CODEC_LANES * d) * sizeof *f.x);
    for (int i = 0; i < CODEC_LANES * d; i++) f.x[i] = (float)rng_normal(rng);
    if (with_metric) {
        random_metric(rng, d, f.metric);
        double mean = 0;
        for (int i = 0; i < d; i++) mean += f.metric[i * d + i] / d;
        assert_int_equal(codec_factor_metric(d, f.metric, 0.01, f.b, f.dg, NULL), OSCAR_OK);
        for (int i = 0; i < d; i++) f.metric[i * d + i] += 0.01 * mean;
        f.codec.metric_b = f.b;
        f.codec.metric_d = f.dg;
    }
    if (with_rotation) {
        random_rotation(rng, d, f.rotation);
        f.codec.rotation = f.rotation;
    }
    return f;
}

static void fixture_free(fixture *f) {
    free(f->metric);
    free(f->b);
    free(f->dg);
    free(f->rotation);
    free(f->x);
}

static void run(const codec_ops *ops, const row_codec *codec, int n_rows, const float *x, result *r) {
    memset(r, 0x55, sizeof *r);
    r->bad = ops->quantize_rows(codec, n_rows, x, codec->head_dim, r->y, r->codes, r->params);
}

static double decode(const row_codec *c, const result *r, int row, int j) {
    int n_groups = c->head_dim / c->group;
    const uint16_t *p = r->params + 2 * (row * n_groups + j / c->group);
    return (double)fp16_to_float(p[1]) + (double)fp16_to_float(p[0]) * r->codes[row * c->head_dim + j];
}

/* <a, b> in M, or the identity when m is NULL. */
static double inner(int d, const double *m, const double *a, const double *b) {
    double sum = 0;
    for (int i = 0; i < d; i++) {
        double row = m ? 0 : b[i];
        for (int j = 0; m && j < d; j++) row += m[i * d + j] * b[j];
        sum += a[i] * row;
    }
    return sum;
}

static void errors_of(const row_codec *c, const double *m, const result *r, int row, double *error, double *xx, double *hx) {
    double x[MAX_D], h[MAX_D], e[MAX_D];
    for (int j = 0; j < c->head_dim; j++) {
        x[j] = (double)r->y[row * c->head_dim + j];
        h[j] = decode(c, r, row, j);
        e[j] = h[j] - x[j];
    }
    *error = inner(c->head_dim, m, e, e);
    *xx = inner(c->head_dim, m, x, x);
    *hx = inner(c->head_dim, m, h, x);
}

/* ------------------------------------------------------------------------------------------------
 * Paths
 */

static void make_difficult(uint64_t *rng, fixture *f, int kind) {
    const int d = f->codec.head_dim;
    for (int i = 0; i < CODEC_LANES * d; i++) {
        if (kind == 1 && rng_uniform(rng) < 0.02) f->x[i] *= 300; /* outliers */
        if (kind == 2) f->x[i] = f->x[i] * 0.01f + 40;            /* a large common offset */
        if (kind == 3) f->x[i] *= (float)exp(60 * (rng_uniform(rng) - 0.5)); /* 1e-13 .. 1e13 */
    }
}

static void paths_are_bit_equal(void **state) {
    (void)state;
    uint64_t rng = rng_seed("paths_are_bit_equal", 21);
    const int dims[] = {16, 48, 64, 80, 96, 128, 192, 256, 272};
    static result r[ISA_COUNT];
    for (int i = 0; i < 9; i++)
        for (int trial = 0; trial < 12; trial++) {
            const int d = dims[i], bits = 2 + trial % 3;
            fixture f = fixture_make(&rng, d, bits, trial % 4 != 3, trial & 1);
            f.codec.ldlq = f.codec.metric_b && trial % 2 == 0;
            f.codec.gain = trial % 3 != 1;
            f.codec.recipe = trial >= 10 ? OSCAR_RECIPE_ZOO : OSCAR_RECIPE_DEFAULT;
            if (d > 16 && trial == 5) f.codec.group = 16; /* many groups */
            make_difficult(&rng, &f, trial % 4);
            int n_rows = trial % 2 ? CODEC_LANES : 1 + (int)(rng_next(&rng) % CODEC_LANES);
            for (int p = 0; p < n_paths; p++) {
                run(paths[p], &f.codec, n_rows, f.x, &r[p]);
                assert_int_equal(r[p].bad, 0);
                if (memcmp(&r[0], &r[p], sizeof r[0]) != 0)
                    fail_msg("%s differs from ref: d %d trial %d", paths[p]->name, d, trial);
            }
            fixture_free(&f);
        }
}

/* A row depends on itself alone (A16): alone, in company, in another lane. */
static void rows_are_independent(void **state) {
    (void)state;
    uint64_t rng = rng_seed("rows_are_independent", 22);
    static result all, one;
    for (int p = 0; p < n_paths; p++) {
        fixture f = fixture_make(&rng, 64, 2, true, true);
        f.codec.ldlq = f.codec.gain = true;
        for (int i = 0; i < 64; i++) f.x[5 * 64 + i] *= 1000;
        run(paths[p], &f.codec, CODEC_LANES, f.x, &all);
        for (int row = 0; row < CODEC_LANES; row++) {
            run(paths[p], &f.codec, 1, f.x + row * 64, &one);
            assert_memory_equal(one.codes, all.codes + row * 64, 64);
            assert_memory_equal(one.params, all.params + row * 2, 4);
            assert_memory_equal(one.y, all.y + row * 64, 64 * sizeof(float));
            assert_int_equal(one.codes[64], 0x55); /* nothing written past the row */
        }
        /* x_stride: rows lie apart. */
        float *apart = malloc(3 * 100 * sizeof(float));
        for (int row = 0; row < 3; row++) memcpy(apart + row * 100, f.x + row * 64, 64 * sizeof(float));
        memset(&one, 0, sizeof one);
        paths[p]->quantize_rows(&f.codec, 3, apart, 100, NULL, one.codes, one.params);
        assert_memory_equal(one.codes, all.codes, 3 * 64);
        free(apart);
        fixture_free(&f);
    }
}

/* Rows turned now and quantised later, from what an overlay holds of them, any number at a time. */
static void later_is_the_same(void **state) {
    (void)state;
    uint64_t rng = rng_seed("later_is_the_same", 31);
    fixture f = fixture_make(&rng, 64, 2, true, true);
    f.codec.ldlq = f.codec.gain = f.codec.bf16 = true;
    f.x[3 * 64 + 5] = NAN;
    f.x[4 * 64 + 6] = 3e38f; /* finite, but turned and rounded perhaps not */
    for (int p = 0; p < n_paths; p++) {
        static result now, turned, later;
        run(paths[p], &f.codec, CODEC_LANES, f.x, &now);
        assert_true(now.bad >> 3 & 1);
        for (int i = 0; i < CODEC_LANES * 64; i++) assert_true(now.y[i] == bf16_to_float(bf16_from_float(now.y[i])));
        for (int n = 1; n <= CODEC_LANES; n += 5)
            for (int row = 0; row + n <= CODEC_LANES; row += n) {
                uint32_t bad = paths[p]->quantize_rows(&f.codec, n, f.x + row * 64, 64, turned.y + row * 64, NULL, NULL);
                assert_int_equal(bad, now.bad >> row & ((1u << n) - 1));
                row_codec still = f.codec;
                still.rotation = NULL;
                assert_memory_equal(turned.y + row * 64, now.y + row * 64, (size_t)n * 64 * sizeof(float));
                run(paths[p], &still, n, turned.y + row * 64, &later);
                assert_memory_equal(later.codes, now.codes + row * 64, (size_t)n * 64);
                assert_memory_equal(later.params, now.params + row * 2, (size_t)n * 4);
            }
    }
    fixture_free(&f);
}

static void dispatch(void **state) {
    (void)state;
    uint64_t rng = rng_seed("dispatch", 23);
    fixture f = fixture_make(&rng, 64, 2, true, true);
    static result want, got;
    run(&codec_ops_ref, &f.codec, CODEC_LANES, f.x, &want);
    for (int p = 0; p < n_paths; p++) {
        assert_int_equal(oscar_isa_select(paths[p]->name), OSCAR_OK);
        memset(&got, 0x55, sizeof got);
        got.bad = codec_quantize_rows(&f.codec, CODEC_LANES, f.x, 64, got.y, got.codes, got.params);
        assert_memory_equal(&got, &want, sizeof got);
    }
    oscar_isa_select(NULL);
    fixture_free(&f);
}

/* ------------------------------------------------------------------------------------------------
 * The same algorithm in float64, from its description: dense metric, direct least squares
 */

static double h16(double v) {
    return (double)fp16_to_float(fp16_from_float((float)v));
}
static double code_of(double t, int levels) {
    double c = floor(t + 0.5);
    return c < 0 ? 0 : c > levels ? levels : c;
}
static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void model_clip_minmax(int n, const double *x, int levels, float clip, double *s, double *m) {
    double sorted[MAX_D], lo = INFINITY, hi = -INFINITY;
    for (int j = 0; j < n; j++) sorted[j] = fabs(x[j]);
    qsort(sorted, (size_t)n, sizeof *sorted, compare_doubles);
    int rank = (int)((double)clip * n);
    double limit = sorted[rank < n - 1 ? rank : n - 1];
    for (int j = 0; j < n; j++) {
        double v = x[j] > limit ? limit : x[j] < -limit ? -limit : x[j];
        if (v < lo) lo = v;
        if (v > hi) hi = v;
    }
    *s = (hi - lo) / levels;
    *m = lo;
}

/* What rounds of least squares see of a row: x - middle to multiples of a power of two, 2^14 to 2^15 of which are half of
 * the range (2 bits; half as many with each bit more). */
static void model_grid(int n, const double *x, int bits, double *v, double *middle) {
    double low = INFINITY, high = -INFINITY;
    for (int j = 0; j < n; j++) low = fmin(low, x[j]), high = fmax(high, x[j]);
    *middle = (double)(float)((low + high) / 2);
    int exponent;
    frexp((high - low) / 2, &exponent); /* half of the range is in [2^(exponent - 1), 2^exponent) */
    const double unit = ldexp(1, exponent - 17 + bits);
    for (int j = 0; j < n; j++) v[j] = rint((x[j] - *middle) / unit) * unit;
}

static void model_least_squares(int n, const double *x, int bits, double *s_out, double *m_out) {
    const int levels = (1 << bits) - 1;
    double grid[MAX_D], middle;
    model_grid(n, x, bits, grid, &middle);
    const float clips2[] = {1.0f, 0.96f, 0.88f}, clips[] = {1.0f, 0.98f};
    double best = INFINITY;
    for (int start = 0; start < (bits == 2 ? 3 : 2); start++) {
        double s, m;
        model_clip_minmax(n, x, levels, bits == 2 ? clips2[start] : clips[start], &s, &m);
        m -= middle;
        for (int round = 0; round < 6; round++) {
            double a = 0, b = 0, u = 0, v = 0;
            for (int j = 0; j < n; j++) {
                double c = code_of((grid[j] - m) / s, levels);
                a += c * c, b += c, u += grid[j] * c, v += grid[j];
            }
            double det = a * n - b * b, s2 = (u * n - b * v) / det, m2 = (a * v - b * u) / det;
            if (det > 1e-6 * a * n && s2 > 0) s = s2, m = m2;
        }
        s = h16(s), m = h16(m + middle);
        double error = 0;
        for (int j = 0; j < n; j++) {
            double e = m + s * code_of((x[j] - m) / s, levels) - x[j];
            error += e * e;
        }
        if (error < best) best = error, *s_out = s, *m_out = m;
    }
}

typedef struct model_row {
    int d, group, bits;
    const double *metric; /* [d, d] */
    const double *b;      /* [d, d] unit lower factor */
    double x[MAX_D], c[MAX_D], s[CODEC_MAX_GROUPS], m[CODEC_MAX_GROUPS];
} model_row;

static double model_decode(const model_row *r, int j) {
    return r->m[j / r->group] + r->s[j / r->group] * r->c[j];
}

static void model_ldlq(model_row *r) {
    double e[MAX_D];
    for (int j = r->d - 1; j >= 0; j--) {
        double t = r->x[j];
        for (int i = j + 1; i < r->d; i++) t -= e[i] * r->b[i * r->d + j];
        int g = j / r->group;
        r->c[j] = code_of((t - r->m[g]) / r->s[g], (1 << r->bits) - 1);
        e[j] = model_decode(r, j) - r->x[j];
    }
}

/* min over (s, m) of group g of |x - x^|_M, the other groups as they are. */
static void model_refit(model_row *r, int g) {
    double ones[MAX_D] = {0}, c[MAX_D] = {0}, target[MAX_D];
    for (int j = 0; j < r->d; j++) {
        bool in = j / r->group == g;
        ones[j] = in, c[j] = in ? r->c[j] : 0;
        target[j] = r->x[j] - (in ? 0 : model_decode(r, j));
    }
    double cc = inner(r->d, r->metric, c, c), c1 = inner(r->d, r->metric, c, ones), n = inner(r->d, r->metric, ones, ones);
    double tc = inner(r->d, r->metric, target, c), t1 = inner(r->d, r->metric, target, ones);
    double det = cc * n - c1 * c1, s = (tc * n - c1 * t1) / det, m = (cc * t1 - c1 * tc) / det;
    if (det > 1e-6 * cc * n && s > 0) r->s[g] = h16(s), r->m[g] = h16(m);
}

static void model_quantize(model_row *r, bool ldlq, bool gain) {
    const int n_groups = r->d / r->group;
    for (int g = 0; g < n_groups; g++)
        model_least_squares(r->group, r->x + g * r->group, r->bits, &r->s[g], &r->m[g]);
    for (int round = 0; ldlq && round < 3; round++) {
        model_ldlq(r);
        for (int g = 0; g < n_groups; g++) model_refit(r, g);
    }
    for (int j = 0; !ldlq && j < r->d; j++)
        r->c[j] = code_of((r->x[j] - r->m[j / r->group]) / r->s[j / r->group], (1 << r->bits) - 1);
    if (!gain) return;
    double h[MAX_D];
    for (int j = 0; j < r->d; j++) h[j] = model_decode(r, j);
    double f = inner(r->d, r->metric, r->x, r->x) / inner(r->d, r->metric, h, r->x);
    f = f < 0.5 ? 0.5 : f > 2 ? 2 : f;
    for (int g = 0; g < n_groups; g++) r->s[g] = h16(r->s[g] * f), r->m[g] = h16(r->m[g] * f);
}

static void agrees_with_float64(void **state) {
    (void)state;
    uint64_t rng = rng_seed("agrees_with_float64", 31);
    static result r;
    static model_row model;
    const int dims[] = {64, 96, 128, 192, 256};
    for (int mode = 0; mode < 4; mode++) { /* ldlq, gain */
        long codes = 0, equal = 0, params = 0, params_equal = 0;
        double error = 0, model_error = 0;
        for (int trial = 0; trial < 15; trial++) {
            const int d = dims[trial % 5], bits = 2 + trial / 5;
            fixture f = fixture_make(&rng, d, bits, mode != 0, true);
            f.codec.ldlq = mode & 1;
            f.codec.gain = mode & 2;
            run(paths[n_paths - 1], &f.codec, CODEC_LANES, f.x, &r);
            double *b = malloc(sizeof(double) * (size_t)(d * d));
            for (int i = 0; i < d * d; i++) b[i] = (double)f.b[i];
            model.d = d, model.group = f.codec.group, model.bits = bits, model.b = b;
            model.metric = f.codec.metric_b ? f.metric : NULL;
            for (int row = 0; row < CODEC_LANES; row++) {
                for (int j = 0; j < d; j++) {
                    double y = 0;
                    for (int i = 0; i < d; i++) y += (double)f.x[row * d + i] * (double)f.rotation[i * d + j];
                    assert_true(fabs(y - (double)r.y[row * d + j]) < 1e-5);
                    model.x[j] = (double)r.y[row * d + j];
                }
                model_quantize(&model, f.codec.ldlq, f.codec.gain);
                double e, xx, hx, mine[MAX_D];
                errors_of(&f.codec, model.metric, &r, row, &e, &xx, &hx);
                for (int j = 0; j < d; j++) mine[j] = model_decode(&model, j) - model.x[j];
                error += e / xx;
                model_error += inner(d, model.metric, mine, mine) / xx;
                for (int j = 0; j < d; j++) equal += model.c[j] == r.codes[row * d + j], codes++;
                const int n_groups = d / f.codec.group;
                for (int g = 0; g < n_groups; g++) {
                    const uint16_t *p = r.params + 2 * (row * n_groups + g);
                    params_equal += (double)fp16_to_float(p[0]) == model.s[g];
                    params_equal += (double)fp16_to_float(p[1]) == model.m[g];
                    params += 2;
                }
            }
            free(b);
            fixture_free(&f);
        }
        printf("mode %d: %ld of %ld codes and %ld of %ld parameters equal, relative error %.6f, float64 %.6f\n", mode,
               equal, codes, params_equal, params, error / 240, model_error / 240);
        assert_true(equal >= 0.999 * codes);
        assert_true(params_equal >= 0.99 * params);
        assert_true(fabs(error / model_error - 1) < 0.01);
    }
}

static void zoo_recipe(void **state) {
    (void)state;
    uint64_t rng = rng_seed("zoo_recipe", 32);
    static result r;
    const int dims[] = {64, 128, 256};
    const float clips[] = {0.92f, 0.96f, 1.0f};
    for (int trial = 0; trial < 9; trial++) {
        const int d = dims[trial / 3];
        fixture f = fixture_make(&rng, d, 2, false, false);
        f.codec.recipe = OSCAR_RECIPE_ZOO;
        f.codec.clip = clips[trial % 3];
        make_difficult(&rng, &f, 1);
        run(paths[n_paths - 1], &f.codec, CODEC_LANES, f.x, &r);
        const int n_groups = d / f.codec.group;
        int differ = 0;
        for (int row = 0; row < CODEC_LANES; row++)
            for (int g = 0; g < n_groups; g++) {
                double x[128], s, m;
                const int n = f.codec.group;
                for (int j = 0; j < n; j++) x[j] = (double)f.x[row * d + g * n + j];
                model_clip_minmax(n, x, 3, f.codec.clip, &s, &m);
                const uint16_t *p = r.params + 2 * (row * n_groups + g);
                assert_true(fabs((double)fp16_to_float(p[0]) - s) <= s / 1024);
                assert_true((double)fp16_to_float(p[1]) == h16(m));
                s = (double)fp16_to_float(p[0]), m = h16(m);
                for (int j = 0; j < n; j++) differ += code_of((x[j] - m) / s, 3) != r.codes[row * d + g * n + j];
            }
        assert_int_equal(differ, 0);
        fixture_free(&f);
    }
}

/* ------------------------------------------------------------------------------------------------
 * What the steps are for
 */

static void least_squares_is_near_optimal(void **state) {
    (void)state;
    uint64_t rng = rng_seed("least_squares_is_near_optimal", 41);
    static result r;
    /* The best uniform quantiser of a Gaussian reaches .1188, .0374, .0115; fitted to each row of
     * 128 it does a little better. Clipping and min-max do not: .14 and more at 2 bits. */
    const double bound[] = {0.1188, 0.0374, 0.0122};
    for (int bits = 2; bits <= 4; bits++) {
        double sum = 0, n = 0;
        for (int trial = 0; trial < 20; trial++) {
            fixture f = fixture_make(&rng, 128, bits, false, false);
            run(paths[n_paths - 1], &f.codec, CODEC_LANES, f.x, &r);
            for (int row = 0; row < CODEC_LANES; row++) {
                double e, xx, hx;
                errors_of(&f.codec, NULL, &r, row, &e, &xx, &hx);
                sum += e / xx, n++;
            }
            fixture_free(&f);
        }
        printf("bits %d: relative squared error %.4f\n", bits, sum / n);
        assert_true(sum / n < bound[bits - 2]);
    }
}

static void ldlq_reduces_metric_error(void **state) {
    (void)state;
    uint64_t rng = rng_seed("ldlq_reduces_metric_error", 42);
    static result with, without;
    const int dims[] = {64, 128, 256};
    for (int i = 0; i < 3; i++) {
        double error_with = 0, error_without = 0;
        for (int trial = 0; trial < 4; trial++) {
            fixture f = fixture_make(&rng, dims[i], 2, true, false);
            run(paths[n_paths - 1], &f.codec, CODEC_LANES, f.x, &without);
            f.codec.ldlq = true;
            run(paths[n_paths - 1], &f.codec, CODEC_LANES, f.x, &with);
            for (int row = 0; row < CODEC_LANES; row++) {
                double e, xx, hx;
                errors_of(&f.codec, f.metric, &with, row, &e, &xx, &hx);
                error_with += e / xx;
                errors_of(&f.codec, f.metric, &without, row, &e, &xx, &hx);
                error_without += e / xx;
            }
            fixture_free(&f);
        }
        printf("d %d: metric error with LDLQ %.3f of plain rounding\n", dims[i], error_with / error_without);
        assert_true(error_with < 0.7 * error_without);
    }
}

static void gain_restores_length(void **state) {
    (void)state;
    uint64_t rng = rng_seed("gain_restores_length", 43);
    static result r;
    for (int mode = 0; mode < 6; mode++) { /* metric none, plain, ldlq; 1 or 2 groups */
        fixture f = fixture_make(&rng, mode < 3 ? 64 : 256, 2, mode % 3 != 0, true);
        f.codec.ldlq = mode % 3 == 2;
        double before = 0, after = 0;
        for (int gain = 0; gain < 2; gain++) {
            f.codec.gain = gain;
            run(paths[n_paths - 1], &f.codec, CODEC_LANES, f.x, &r);
            for (int row = 0; row < CODEC_LANES; row++) {
                double e, xx, hx;
                errors_of(&f.codec, f.codec.metric_b ? f.metric : NULL, &r, row, &e, &xx, &hx);
                if (gain) assert_true(fabs(hx / xx - 1) < 0.002); /* fp16 of step and offset */
                *(gain ? &after : &before) += fabs(hx / xx - 1) / CODEC_LANES;
            }
        }
        printf("mode %d: length along the row off by %.5f, with gain %.5f\n", mode, before, after);
        assert_true(before > 10 * after);
        fixture_free(&f);
    }
}

/* ------------------------------------------------------------------------------------------------
 * Degenerate rows
 */

static void assert_finite_params(const row_codec *c, const result *r, int n_rows) {
    for (int i = 0; i < n_rows * 2 * (c->head_dim / c->group); i++)
        assert_true((r->params[i] & 0x7c00) != 0x7c00);
    for (int i = 0; i < n_rows * c->head_dim; i++) assert_true(r->codes[i] < 1 << c->bits);
}

/* Quantises with every recipe, path and number of bits. */
static void each_codec(uint64_t *rng, int d, void (*check)(fixture *, const codec_ops *, void *), void *argument) {
    for (int mode = 0; mode < 5; mode++)
        for (int bits = 2; bits <= 4; bits++)
            for (int p = 0; p < n_paths; p++) {
                fixture f = fixture_make(rng, d, bits, mode == 2 || mode == 3, false);
                f.codec.ldlq = mode == 2 || mode == 3;
                f.codec.gain = mode == 1 || mode == 3;
                f.codec.recipe = mode == 4 ? OSCAR_RECIPE_ZOO : OSCAR_RECIPE_DEFAULT;
                check(&f, paths[p], argument);
                fixture_free(&f);
            }
}

/* A01: every channel the same. */
static void check_constants(fixture *f, const codec_ops *ops, void *argument) {
    (void)argument;
    static result r;
    const float values[] = {0, 5.0f, -9.0f, 1e-8f, 60000.0f, 1e-40f, -1.0f / 3, 3e-6f, 1e5f, -3e38f};
    const int d = f->codec.head_dim;
    for (int v = 0; v < 10; v++)
        for (int j = 0; j < d; j++) f->x[v * d + j] = values[v];
    run(ops, &f->codec, 10, f->x, &r);
    assert_int_equal(r.bad, 0);
    assert_finite_params(&f->codec, &r, 10);
    for (int v = 0; v < 10; v++)
        for (int j = 0; j < d; j++) {
            double x = (double)values[v], got = decode(&f->codec, &r, v, j);
            double limit = x > 65504 ? 65504 : x < -65504 ? -65504 : x;
            assert_true(fabs(got - limit) <= fabs(limit) / 2047 + ldexp(1, -24));
        }
}

static void check_one_ulp(fixture *f, const codec_ops *ops, void *argument) {
    (void)argument;
    static result r;
    const int d = f->codec.head_dim;
    const float values[] = {5.0f, -9.0f, 60000.0f, 1e-8f, 1e-40f};
    for (int v = 0; v < 5; v++)
        for (int j = 0; j < d; j++) f->x[v * d + j] = j % 3 ? values[v] : nextafterf(values[v], 1e9f);
    run(ops, &f->codec, 5, f->x, &r);
    assert_finite_params(&f->codec, &r, 5);
    for (int v = 0; v < 5; v++)
        for (int j = 0; j < d; j++)
            assert_true(fabs(decode(&f->codec, &r, v, j) - (double)values[v]) <= fabs((double)values[v]) / 1023 + ldexp(1, -23));
}

static void constants(void **state) {
    (void)state;
    uint64_t rng = rng_seed("constants", 51);
    each_codec(&rng, 64, check_constants, NULL);
    each_codec(&rng, 192, check_constants, NULL);
    each_codec(&rng, 64, check_one_ulp, NULL);
}

/* Rows that fp16 cannot hold well: finite all the same, and small ones not worse than zero. */
static void check_extremes(fixture *f, const codec_ops *ops, void *argument) {
    uint64_t *rng = argument;
    static result r;
    const int d = f->codec.head_dim;
    for (int j = 0; j < d; j++) {
        f->x[j] = (float)(rng_normal(rng) * 1e-8);
        f->x[d + j] = (float)(rng_normal(rng) * 1e-39);
        f->x[2 * d + j] = (float)(rng_normal(rng) * 1e37);
        f->x[3 * d + j] = j == 7 ? 1e30f : (float)rng_normal(rng);
        f->x[4 * d + j] = j == 7 ? -1e6f : 0.0f;
        f->x[5 * d + j] = j & 1 ? 65504.0f : -65504.0f;
        f->x[6 * d + j] = (float)(rng_normal(rng) * 1e-6);
    }
    run(ops, &f->codec, 7, f->x, &r);
    assert_int_equal(r.bad, 0);
    assert_finite_params(&f->codec, &r, 7);
    for (int j = 0; j < d; j++) {
        assert_true(fabs(decode(&f->codec, &r, 0, j)) < 1e-6);
        assert_true(fabs(decode(&f->codec, &r, 1, j)) < 1e-6);
        assert_true(isfinite(decode(&f->codec, &r, 2, j)));
    }
    double worst = 0;
    for (int j = 0; j < d; j++) worst = fmax(worst, fabs(decode(&f->codec, &r, 5, j) - (double)f->x[5 * d + j]));
    assert_true(worst <= 65504 * 0.002);
}

static void extremes(void **state) {
    (void)state;
    uint64_t rng = rng_seed("extremes", 52);
    each_codec(&rng, 64, check_extremes, &rng);
    each_codec(&rng, 256, check_extremes, &rng);
}

static void check_not_finite(fixture *f, const codec_ops *ops, void *argument) {
    (void)argument;
    static result clean, r;
    const int d = f->codec.head_dim;
    run(ops, &f->codec, 9, f->x, &clean);
    const float poison[] = {NAN, INFINITY, -INFINITY};
    const int rows[] = {0, 4, 8};
    uint32_t mask = 0;
    for (int i = 0; i < 3; i++) {
        f->x[rows[i] * d + 5 * i] = poison[i];
        mask |= 1u << rows[i];
    }
    run(ops, &f->codec, 9, f->x, &r);
    assert_int_equal(r.bad, mask);
    const int n = 2 * (d / f->codec.group);
    for (int row = 0; row < 9; row++) {
        if (mask >> row & 1) {
            for (int j = 0; j < d; j++) assert_true(r.codes[row * d + j] == 0 && r.y[row * d + j] == 0);
            for (int i = 0; i < n; i++) assert_int_equal(r.params[row * n + i], 0);
        } else {
            assert_memory_equal(r.codes + row * d, clean.codes + row * d, (size_t)d);
            assert_memory_equal(r.params + row * n, clean.params + row * n, sizeof(uint16_t) * (size_t)n);
        }
    }
}

static void not_finite(void **state) {
    (void)state;
    uint64_t rng = rng_seed("not_finite", 53);
    each_codec(&rng, 64, check_not_finite, NULL);
    /* Finite before the rotation, not after. */
    static result r;
    for (int p = 0; p < n_paths; p++) {
        fixture f = fixture_make(&rng, 64, 2, false, true);
        rotations_hadamard_matrix(64, f.rotation);
        for (int j = 0; j < 64; j++) f.x[64 + j] = 3e38f;
        run(paths[p], &f.codec, 3, f.x, &r);
        assert_int_equal(r.bad, 1u << 1);
        fixture_free(&f);
    }
}

/* A05: ranges that exclude zero; dead lanes must not take part in them. */
static void ranges_without_zero(void **state) {
    (void)state;
    uint64_t rng = rng_seed("ranges_without_zero", 54);
    static result r;
    const int dims[] = {16, 80, 96, 192, 320};
    for (int i = 0; i < 5; i++)
        for (int sign = -1; sign <= 1; sign += 2)
            for (int p = 0; p < n_paths; p++)
                for (int mode = 0; mode < 3; mode++) {
                    const int d = dims[i];
                    fixture f = fixture_make(&rng, d, 2, mode == 1, false);
                    f.codec.recipe = mode == 2 ? OSCAR_RECIPE_ZOO : OSCAR_RECIPE_DEFAULT;
                    f.codec.clip = 1;
                    for (int j = 0; j < CODEC_LANES * d; j++) f.x[j] = (float)(sign * (10 + rng_uniform(&rng)));
                    run(paths[p], &f.codec, CODEC_LANES, f.x, &r);
                    /* Half a step of 1/3, and fp16 of the offset (2^-8). Least squares lets the ends of
                     * the range go further for a smaller sum, never as far as a step that spans 0. */
                    double squares = 0;
                    for (int j = 0; j < CODEC_LANES * d; j++) {
                        double e = fabs(decode(&f.codec, &r, j / d, j % d) - (double)f.x[j]);
                        assert_true(e <= (mode == 2 ? 1.0 / 6 + 0.005 : 0.25));
                        squares += e * e / (CODEC_LANES * d);
                    }
                    assert_true(squares < 1.0 / 108); /* (1/3)^2 / 12, what rounding to min-max gives */
                    fixture_free(&f);
                }
}

/* ------------------------------------------------------------------------------------------------
 * Groups, metric factor, Hadamard, rotation objects
 */

static void groups(void **state) {
    (void)state;
    const int want[][2] = {{16, 16}, {64, 64}, {80, 80}, {96, 96}, {112, 112}, {128, 128}, {144, 48}, {160, 80},
                           {192, 96}, {256, 128}, {272, 16}, {320, 80}, {384, 128}, {512, 128}};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) assert_int_equal(codec_group(want[i][0]), want[i][1]);
    for (int d = 16; d <= OSCAR_MAX_HEAD_DIM; d += 16) {
        int g = codec_group(d);
        assert_true(d % g == 0 && g % 16 == 0 && g <= 128 && d / g <= CODEC_MAX_GROUPS);
    }
}

static void metric_factor(void **state) {
    (void)state;
    uint64_t rng = rng_seed("metric_factor", 61);
    enum { D = 96 };
    static double m[D * D];
    static float b[D * D], dg[D];
    random_metric(&rng, D, m);
    double mean = 0;
    for (int i = 0; i < D; i++) mean += m[i * D + i] / D;
    assert_int_equal(codec_factor_metric(D, m, 0.01, b, dg, NULL), OSCAR_OK);
    for (int i = 0; i < D; i++) {
        assert_true(b[i * D + i] == 1 && dg[i] > 0);
        for (int j = 0; j < D; j++) {
            double sum = 0;
            for (int k = 0; k < D; k++) sum += (double)b[i * D + k] * (double)dg[k] * (double)b[j * D + k];
            assert_true(fabs(sum - m[i * D + j] - (i == j ? 0.01 * mean : 0)) < 1e-5 * mean);
            if (j > i) assert_true(b[i * D + j] == 0);
        }
    }
    /* Rank one has a factor once damped, none without; NaN, zeros and negative ones never. */
    oscar_error e;
    for (int i = 0; i < D * D; i++) m[i] = (i / D + 1.0) * (i % D + 1.0);
    assert_int_equal(codec_factor_metric(D, m, 0.01, b, dg, &e), OSCAR_OK);
    assert_int_equal(codec_factor_metric(D, m, 0, b, dg, &e), OSCAR_ERROR_NOT_FINITE);
    assert_non_null(strstr(e.message, "pivot 1 of 96"));
    memset(m, 0, sizeof m);
    assert_int_equal(codec_factor_metric(D, m, 0.01, b, dg, &e), OSCAR_ERROR_NOT_FINITE);
    for (int i = 0; i < D; i++) m[i * D + i] = -1;
    assert_int_equal(codec_factor_metric(D, m, 0.01, b, dg, &e), OSCAR_ERROR_NOT_FINITE);
    for (int i = 0; i < D; i++) m[i * D + i] = i == 40 ? NAN : 1;
    assert_int_equal(codec_factor_metric(D, m, 0.01, b, dg, &e), OSCAR_ERROR_NOT_FINITE);
    for (int i = 0; i < D; i++) m[i * D + i] = i == 40 ? 1e300 : 1; /* beyond float32 */
    assert_int_equal(codec_factor_metric(D, m, 0, b, dg, &e), OSCAR_ERROR_NOT_FINITE);
}

/* A04 */
static void hadamard(void **state) {
    (void)state;
    uint64_t rng = rng_seed("hadamard", 62);
    const int dims[] = {16, 48, 64, 80, 96, 112, 128, 160, 192, 256, 320, 512};
    static float h[MAX_D * MAX_D];
    for (int n = 0; n < 12; n++) {
        const int d = dims[n];
        rotations_hadamard_matrix(d, h);
        double worst = 0;
        for (int i = 0; i < d; i++)
            for (int j = 0; j < d; j++) {
                double dot = 0;
                for (int k = 0; k < d; k++) dot += (double)h[k * d + i] * (double)h[k * d + j];
                worst = fmax(worst, fabs(dot - (i == j)));
            }
        assert_true(worst < 1e-5);
        double q[MAX_D], k[MAX_D], plain = 0, turned = 0, qq = 0, kk = 0, back = 0;
        for (int i = 0; i < d; i++) q[i] = rng_normal(&rng), k[i] = rng_normal(&rng);
        double rq[MAX_D] = {0}, rk[MAX_D] = {0};
        for (int i = 0; i < d; i++)
            for (int j = 0; j < d; j++) rq[j] += q[i] * (double)h[i * d + j], rk[j] += k[i] * (double)h[i * d + j];
        for (int i = 0; i < d; i++) plain += q[i] * k[i], turned += rq[i] * rk[i], qq += q[i] * q[i], kk += k[i] * k[i];
        assert_true(fabs(plain - turned) <= 1e-4 * sqrt(qq * kk));
        for (int i = 0; i < d; i++) {
            double v = 0;
            for (int j = 0; j < d; j++) v += rk[j] * (double)h[i * d + j];
            back = fmax(back, fabs(v - k[i]));
        }
        assert_true(back < 1e-5);
    }
}

static oscar_layer layer_of(int n_kv, int n_q, int d) {
    oscar_layer l = {.n_kv_heads = n_kv, .n_q_heads = n_q, .head_dim = d};
    l.rope = (oscar_rope){.layout = OSCAR_ROPE_HALF_SPLIT, .n_dims = d, .magnitude = 1};
    for (int f = 0; f < d / 2; f++) l.rope.inv_freq[f] = powf(1e4f, -2.0f * (float)f / (float)d);
    return l;
}

static void rotation_objects(void **state) {
    (void)state;
    const oscar_layer layers[2] = {layer_of(2, 6, 64), layer_of(1, 8, 80)};
    oscar_rotations *r = NULL;
    oscar_error e;
    assert_int_equal(oscar_rotations_hadamard(&r, layers, 2, 3, &e), OSCAR_OK);
    assert_int_equal(oscar_rotations_n_layers(r), 2);
    assert_memory_equal(oscar_rotations_layer(r, 1), &layers[1], sizeof layers[1]);
    assert_null(oscar_rotations_layer(r, 2));
    assert_null(oscar_rotations_layer(r, -1));
    assert_string_equal(oscar_rotations_metadata(r, "recipe"), "hadamard");
    assert_null(oscar_rotations_metadata(r, "model"));
    assert_true(rotations_set_meta(r, "model", "tiny") && rotations_set_meta(r, "recipe", "other"));
    assert_string_equal(oscar_rotations_metadata(r, "model"), "tiny");
    assert_string_equal(oscar_rotations_metadata(r, "recipe"), "other");
    assert_int_equal(r->n_meta, 2);
    assert_int_equal(rotations_check(r, &e), OSCAR_OK);
    assert_int_equal(r->layers[1].bits_v, 3);
    assert_memory_equal(r->layers[0].k_rotation, r->layers[0].k_rotation + 64 * 64, 64 * 64 * sizeof(float));
    oscar_rotations_free(r);
    assert_int_equal(oscar_rotations_identity(&r, layers, 2, 2, &e), OSCAR_OK);
    assert_null(r->layers[0].k_rotation);
    assert_int_equal(rotations_check(r, &e), OSCAR_OK);
    oscar_rotations_free(r);
    oscar_rotations_free(NULL);

    /* Refused, and the message says what was found. */
    oscar_layer bad = layers[0];
    assert_int_equal(oscar_rotations_hadamard(&r, layers, 2, 5, &e), OSCAR_ERROR_ARGUMENT);
    assert_null(r);
    assert_int_equal(oscar_rotations_identity(&r, layers, 0, 2, &e), OSCAR_ERROR_ARGUMENT);
    bad.head_dim = 72;
    assert_int_equal(oscar_rotations_identity(&r, &bad, 1, 2, &e), OSCAR_ERROR_UNSUPPORTED);
    assert_non_null(strstr(e.message, "72"));
    bad = layers[0], bad.n_q_heads = 33;
    assert_int_equal(oscar_rotations_identity(&r, &bad, 1, 2, &e), OSCAR_ERROR_ARGUMENT);
    assert_non_null(strstr(e.message, "33"));
    bad = layers[0], bad.rope.n_dims = 65;
    assert_int_equal(oscar_rotations_identity(&r, &bad, 1, 2, &e), OSCAR_ERROR_ARGUMENT);
    bad = layers[0], bad.rope.inv_freq[3] = NAN;
    assert_int_equal(oscar_rotations_identity(&r, &bad, 1, 2, &e), OSCAR_ERROR_NOT_FINITE);
}

/* A tracked mean for rotations that were not calibrated: numbers of other pairs are left out, and what is refused
 * changes nothing. */
static void rotations_tracked(void **state) {
    (void)state;
    for (int layout = OSCAR_ROPE_ADJACENT; layout <= OSCAR_ROPE_HALF_SPLIT; layout++) {
        oscar_layer layer = layer_of(2, 4, 32);
        layer.rope.layout = layout, layer.rope.n_dims = 24;
        oscar_rotations *r = NULL;
        oscar_error e;
        assert_int_equal(oscar_rotations_hadamard(&r, &layer, 1, 2, &e), OSCAR_OK);
        const int32_t pairs[4] = {3, 0, 5, 11}, twice[4] = {3, 3, 5, 11}, beyond[4] = {3, 0, 5, 12};
        float means[64];
        for (int i = 0; i < 64; i++) means[i] = (float)(i + 1);
        assert_int_equal(oscar_rotations_track(r, 1, 2, pairs, means, &e), OSCAR_ERROR_ARGUMENT);
        assert_int_equal(oscar_rotations_track(r, 0, 0, pairs, means, &e), OSCAR_ERROR_ARGUMENT);
        assert_int_equal(oscar_rotations_track(r, 0, 13, pairs, means, &e), OSCAR_ERROR_ARGUMENT);
        assert_int_equal(oscar_rotations_track(r, 0, 2, twice, means, &e), OSCAR_ERROR_ARGUMENT);
        assert_int_equal(oscar_rotations_track(r, 0, 2, beyond, means, &e), OSCAR_ERROR_ARGUMENT);
        assert_non_null(strstr(e.message, "12"));
        means[layout == OSCAR_ROPE_ADJACENT ? 7 : 3] = NAN;
        assert_int_equal(oscar_rotations_track(r, 0, 2, pairs, means, &e), OSCAR_ERROR_NOT_FINITE);
        means[layout == OSCAR_ROPE_ADJACENT ? 7 : 3] = 9;
        means[31] = NAN; /* of no pair */
        assert_int_equal(r->layers[0].n_tracked, 0);
        assert_null(r->layers[0].tracked);
        assert_int_equal(oscar_rotations_track(r, 0, 2, pairs, means, &e), OSCAR_OK);
        assert_int_equal(rotations_check(r, &e), OSCAR_OK);
        for (int i = 0; i < 64; i++) {
            int at = i % 32, pair = at >= 24 ? -1 : layout == OSCAR_ROPE_ADJACENT ? at / 2 : at % 12, h = i / 32;
            bool tracked = pair == pairs[2 * h] || pair == pairs[2 * h + 1];
            assert_true(r->layers[0].k_tracked[i] == (tracked ? means[i] : 0.0f));
        }
        assert_int_equal(oscar_rotations_track(r, 0, 2, pairs, means, &e), OSCAR_ERROR_ARGUMENT); /* it has one */
        oscar_rotations_free(r);
    }
}

/* Each way to spoil a good object is found, and the message names the field. */
static void rotation_checks(void **state) {
    (void)state;
    const oscar_layer layer = layer_of(2, 4, 32);
    for (int spoil = 0; spoil < 12; spoil++) {
        oscar_rotations *r = NULL;
        oscar_error e = {0};
        assert_int_equal(oscar_rotations_hadamard(&r, &layer, 1, 2, &e), OSCAR_OK);
        rotations_layer *l = &r->layers[0];
        l->k_metric_b = aligned_calloc(2 * 32 * 32, sizeof(float));
        l->k_metric_d = aligned_calloc(2 * 32, sizeof(float));
        l->k_tracked = aligned_calloc(2 * 32, sizeof(float));
        l->tracked = aligned_calloc(2 * 2, sizeof(int32_t));
        l->n_tracked = 2;
        for (int i = 0; i < 64; i++) l->k_metric_b[i * 32 + i % 32] = l->k_metric_d[i] = 1;
        for (int i = 0; i < 4; i++) l->tracked[i] = 7 * i % 16;
        const char *field = NULL;
        oscar_status want = OSCAR_ERROR_FORMAT;
        switch (spoil) {
        case 0: want = OSCAR_OK; break;
        case 1: l->k_rotation[1500] = NAN, field = "k_rotation", want = OSCAR_ERROR_NOT_FINITE; break;
        case 2: l->v_rotation[1500] += 0.01f, field = "v_rotation of head 1"; break;
        case 3: l->tracked[3] = 16, field = "tracked pair 1 of head 1"; break;
        case 4: l->tracked[3] = l->tracked[2], field = "twice"; break;
        case 5: l->bits_k = 1, field = "bits_k"; break;
        case 6: l->recipe = 7, field = "recipe"; break;
        case 7: l->recipe = OSCAR_RECIPE_ZOO, l->clip_k = 1, field = "clip_v"; break;
        case 8: l->k_metric_d[40] = 0, field = "k_metric: pivot 8 of head 1"; break;
        case 9: l->k_metric_b[33] = 0.5f, field = "k_metric of head 0"; break;
        case 10: l->shape.head_dim = 24, field = "head_dim", want = OSCAR_ERROR_UNSUPPORTED; break;
        case 11: l->n_tracked = 17, field = "n_tracked"; break;
        }
        assert_int_equal(rotations_check(r, &e), want);
        if (field && !strstr(e.message, field)) fail_msg("spoil %d: \"%s\" does not name %s", spoil, e.message, field);
        oscar_rotations_free(r);
    }
}

int main(void) {
    find_paths();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(paths_are_bit_equal),
        cmocka_unit_test(rows_are_independent),
        cmocka_unit_test(later_is_the_same),
        cmocka_unit_test(dispatch),
        cmocka_unit_test(agrees_with_float64),
        cmocka_unit_test(zoo_recipe),
        cmocka_unit_test(least_squares_is_near_optimal),
        cmocka_unit_test(ldlq_reduces_metric_error),
        cmocka_unit_test(gain_restores_length),
        cmocka_unit_test(constants),
        cmocka_unit_test(extremes),
        cmocka_unit_test(not_finite),
        cmocka_unit_test(ranges_without_zero),
        cmocka_unit_test(groups),
        cmocka_unit_test(metric_factor),
        cmocka_unit_test(hadamard),
        cmocka_unit_test(rotation_objects),
        cmocka_unit_test(rotations_tracked),
        cmocka_unit_test(rotation_checks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
