/*
 * test_attn.c - every attention table against a float64 oracle, and against the plain C one.
 */
#include "attn/attn.h"
#include "test_util.h"

#define TILE 64
#define MAX_TILES 5
#define GUARD 64 /* floats after an output that must stay as they are */

static const int head_dims[] = {16, 64, 80, 96, 128, 192, 256};
#define N_HEAD_DIMS ((int)(sizeof head_dims / sizeof head_dims[0]))
static uint64_t random_state;

static uint64_t random_u64(void) { return rng_next(&random_state); }
static int random_below(int n) { return (int)(random_u64() % (uint64_t)n); }
static float random_normal(void) { return (float)rng_normal(&random_state); }
/* Scale 0 gives plain zeros, no negative ones. */
static float *random_floats(size_t n, float scale) {
    float *x = aligned_calloc(n + GUARD, sizeof *x);
    assert_non_null(x);
    for (size_t i = 0; i < n; i++) x[i] = scale * random_normal() + 0.0f;
    return x;
}

/* The tables this machine can run, the plain one first. */
static int tables(const attn_ops **out) {
    int n = 0;
    out[n++] = &attn_ops_ref;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) out[n++] = &attn_ops_avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        out[n++] = &attn_ops_avx512;
#elif defined(__aarch64__)
    out[n++] = &attn_ops_neon;
#endif
    return n;
}

static void fill(float *x, size_t n, uint32_t bits) {
    for (size_t i = 0; i < n; i++) x[i] = bits_float(bits);
}
static void assert_guard(const float *x) {
    for (int i = 0; i < GUARD; i++) assert_int_equal(float_bits(x[i]), 0x7fc12345);
}

/* --- pages ---------------------------------------------------------------------------------- */

static uint16_t random_fp16(void) {
    /* Ordinary steps and offsets, with a few subnormal and large ones. */
    int kind = random_below(16);
    float x = random_normal();
    return fp16_from_float(kind == 0 ? x * 1e-6f : kind == 1 ? x * 1e4f : x);
}

typedef struct page_case {
    page_side side;
    uint8_t *page;
    uint8_t *codes;   /* [64, head_dim] */
    uint16_t *params; /* [64, n_groups, 2] */
    uint64_t written;
} page_case;

/* A page full of ones bits (NaN steps) in which only the rows of `written` were put, some of them
 * twice. */
static page_case page_case_make(page_side_kind kind, int d, int bits, uint64_t written) {
    page_case c = {.side = page_side_make(kind, d, bits), .written = written};
    size_t n_params = 2 * (size_t)c.side.n_groups;
    c.page = aligned_calloc(c.side.bytes, 1);
    c.codes = aligned_calloc(TILE * (size_t)d, 1);
    c.params = aligned_calloc(TILE * n_params, sizeof *c.params);
    assert_true(c.page && c.codes && c.params);
    memset(c.page, 0xff, c.side.bytes);
    for (int pass = 0; pass < 2; pass++) {
        for (int t = 0; t < TILE; t++) {
            if (!(written >> t & 1) || (pass == 1 && random_below(4))) continue;
            uint8_t *codes = c.codes + t * d;
            uint16_t *params = c.params + (size_t)t * n_params;
            for (int i = 0; i < d; i++) codes[i] = (uint8_t)random_below(1 << bits);
            for (size_t i = 0; i < n_params; i++) params[i] = random_fp16();
            page_put_row(&c.side, c.page, t, codes, params);
        }
    }
    return c;
}
static void page_case_free(page_case *c) {
    aligned_free(c->page);
    aligned_free(c->codes);
    aligned_free(c->params);
}

static float page_case_number(const page_case *c, int t, int channel) {
    const uint16_t *p = c->params + 2 * (t * c->side.n_groups + channel / c->side.group);
    double step = fp16_to_float(p[0]), offset = fp16_to_float(p[1]);
    return (float)(offset + step * c->codes[t * c->side.head_dim + channel]);
}

static void check_unpack(const attn_ops *ops, const page_case *c, uint64_t valid) {
    int d = c->side.head_dim;
    size_t n = TILE * (size_t)d;
    float *out = random_floats(n, 1);
    fill(out, n + GUARD, 0x7fc12345);
    bool key = c->side.kind == PAGE_KEY;
    (key ? ops->unpack_keys : ops->unpack_values)(&c->side, c->page, valid, out);
    for (int t = 0; t < TILE; t++) {
        for (int i = 0; i < d; i++) {
            float want = valid >> t & 1 ? page_case_number(c, t, i) : 0.0f;
            float got = out[key ? i * TILE + t : t * d + i];
            if (!(got == want))
                fail_msg("%s %s d %d bits %d slot %d channel %d: %g, expected %g", ops->name,
                         key ? "keys" : "values", d, c->side.bits, t, i, (double)got, (double)want);
        }
    }
    assert_guard(out + n);
    aligned_free(out);
}

static void test_unpack(void **state) {
    (void)state;
    static const int dims[] = {16, 48, 64, 80, 96, 112, 128, 160, 192, 256, 512};
    const attn_ops *ops[3];
    int n_ops = tables(ops);
    random_state = rng_seed(__func__, 20261129);
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
        for (int bits = 2; bits <= 4; bits++) {
            for (int kind = 0; kind < 2; kind++) {
                uint64_t patterns[] = {UINT64_MAX, 0, 1, UINT64_MAX >> 27, random_u64()};
                for (int p = 0; p < 5; p++) {
                    page_case c = page_case_make((page_side_kind)kind, dims[i], bits, patterns[p]);
                    for (int o = 0; o < n_ops; o++) {
                        check_unpack(ops[o], &c, c.written);
                        check_unpack(ops[o], &c, c.written & random_u64());
                    }
                    page_case_free(&c);
                }
            }
        }
    }
}

static void test_widen(void **state) {
    (void)state;
    const attn_ops *ops[3];
    int n_ops = tables(ops);
    random_state = rng_seed(__func__, 20261129);
    for (int i = 0; i < N_HEAD_DIMS; i++) {
        int d = head_dims[i];
        size_t n = TILE * (size_t)d;
        uint16_t *page = aligned_calloc(n, sizeof *page);
        float *out = random_floats(n, 1);
        uint64_t valid = i == 0 ? UINT64_MAX : random_u64();
        assert_non_null(page);
        for (int o = 0; o < 2 * n_ops; o++) {
            bool key = o % 2;
            for (int t = 0; t < TILE; t++)
                for (int c = 0; c < d; c++)
                    page[page_bf16_at(key ? PAGE_KEY : PAGE_VALUE, d, t, c)] =
                        valid >> t & 1 ? bf16_from_float(random_normal()) : 0xffff;
            fill(out, n + GUARD, 0x7fc12345);
            (key ? ops[o / 2]->widen_keys : ops[o / 2]->widen_values)(d, page, valid, out);
            for (int t = 0; t < TILE; t++)
                for (int c = 0; c < d; c++) {
                    uint16_t x = page[page_bf16_at(key ? PAGE_KEY : PAGE_VALUE, d, t, c)];
                    assert_true(out[key ? c * TILE + t : t * d + c] == (x == 0xffff ? 0.0f : bf16_to_float(x)));
                }
            assert_guard(out + n);
        }
        aligned_free(page);
        aligned_free(out);
    }
}

static void test_widen_half(void **state) {
    (void)state;
    const attn_ops *ops[3];
    int n_ops = tables(ops);
    uint16_t *x = aligned_calloc(65536, sizeof *x);
    float *y = random_floats(65536, 1);
    assert_non_null(x);
    for (int i = 0; i < 65536; i++) x[i] = (uint16_t)i;
    for (int o = 0; o < n_ops; o++) {
        ops[o]->widen_half(65536, x, y);
        for (int i = 0; i < 65536; i++) {
            float want = fp16_to_float(x[i]);
            assert_true(isnan(want) ? isnan(y[i]) : float_bits(y[i]) == float_bits(want));
        }
    }
    aligned_free(x);
    aligned_free(y);
}

/* --- tiles ---------------------------------------------------------------------------------- */

/* A block of rows over some tiles: the inputs, and one state that a table fills. */
typedef struct tile_case {
    attn_rows rows;
    float *q_bias;
    float *keys;     /* [n_tiles, q_dim, 64] */
    float *values;   /* [n_tiles, 64, head_dim] */
    uint64_t *masks; /* [n_tiles, n_rows] */
    int n_tiles;
} tile_case;

static uint64_t random_mask(void) {
    switch (random_below(5)) {
    case 0: return 0;
    case 1: return UINT64_MAX;
    case 2: return UINT64_MAX >> random_below(64);
    case 3: return UINT64_C(1) << random_below(64);
    default: return random_u64();
    }
}

/* BF16 rows as they lie: the same bits as through tiles. What is not valid is NaN. */
static void few_rows(const attn_ops *ops, int n_rows, int d, int n_tracked, float softcap) {
    enum { TILES = 3 };
    const int q_dim = d + 2 * n_tracked;
    float *q = random_floats((size_t)(n_rows * q_dim), 1), *bias = random_floats((size_t)n_rows, 1);
    float *keys = random_floats((size_t)(q_dim * TILE), 1), *values = random_floats((size_t)(d * TILE), 1);
    float *table = keys + d * TILE;
    attn_rows rows[2];
    for (int i = 0; i < 2; i++) {
        rows[i] = (attn_rows){.n_rows = n_rows, .head_dim = d, .q_dim = q_dim, .logit_scale = 0.3f, .logit_softcap = softcap, .q = q, .q_bias = bias,
                              .row_max = random_floats((size_t)n_rows, 0), .row_sum = random_floats((size_t)n_rows, 0),
                              .acc = random_floats((size_t)(n_rows * d), 0), .logits = random_floats((size_t)(n_rows * TILE), 0)};
        for (int r = 0; r < n_rows; r++) rows[i].row_max[r] = -INFINITY;
        fill(rows[i].acc + n_rows * d, GUARD, 0x7fc12345);
    }
    for (int b = 0; b < TILES; b++) {
        uint16_t *pages[2];
        uint64_t masks[ATTN_FEW_ROWS], valid = b == 0 ? UINT64_MAX : random_mask();
        for (int k = 0; k < 2; k++) {
            pages[k] = aligned_calloc((size_t)(TILE * d), sizeof *pages[k]);
            for (int i = 0; i < TILE * d; i++)
                pages[k][page_bf16_at((page_side_kind)k, d, i / d, i % d)] = valid >> (i / d) & 1 ? bf16_from_float(random_normal()) : 0xffff;
        }
        for (int r = 0; r < n_rows; r++) masks[r] = random_mask() & valid;
        ops->widen_keys(d, pages[0], valid, keys);
        ops->widen_values(d, pages[1], valid, values);
        ops->tile(&rows[0], keys, values, masks);
        ops->tile_few(&rows[1], pages[0], pages[1], table, valid, masks, NULL);
        aligned_free(pages[0]), aligned_free(pages[1]);
    }
    assert_memory_equal(rows[1].row_max, rows[0].row_max, sizeof(float) * (size_t)n_rows);
    assert_memory_equal(rows[1].row_sum, rows[0].row_sum, sizeof(float) * (size_t)n_rows);
    assert_memory_equal(rows[1].acc, rows[0].acc, sizeof(float) * (size_t)(n_rows * d));
    for (int i = 0; i < 2; i++) {
        assert_guard(rows[i].acc + n_rows * d);
        aligned_free(rows[i].row_max), aligned_free(rows[i].row_sum), aligned_free(rows[i].acc), aligned_free(rows[i].logits);
    }
    aligned_free(q), aligned_free(bias), aligned_free(keys), aligned_free(values);
}

static void test_few_rows(void **state) {
    (void)state;
    static const int dims[] = {16, 48, 64, 80, 96, 128, 256};
    const attn_ops *ops[3];
    int n_ops = tables(ops);
    random_state = rng_seed(__func__, 20261130);
    for (int o = 0; o < n_ops; o++)
        for (int n = 1; n <= ATTN_FEW_ROWS && ops[o]->tile_few; n++)
            for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
                few_rows(ops[o], n, dims[i], random_below(3) * dims[i] / 4, random_below(4) ? 0.0f : 5.0f);
}

/* Logits with a standard deviation of `spread`. */
static tile_case tile_case_make(int d, int q_dim, int n_rows, int n_tiles, float cap,
                                float spread) {
    size_t rows = (size_t)n_rows, tiles = (size_t)n_tiles;
    tile_case c = {.n_tiles = n_tiles};
    c.rows = (attn_rows){.n_rows = n_rows,
                         .head_dim = d,
                         .q_dim = q_dim,
                         .logit_scale = 1 / sqrtf((float)d),
                         .logit_softcap = cap,
                         .q = random_floats(rows * (size_t)q_dim, spread),
                         .row_max = random_floats(rows, 0),
                         .row_sum = random_floats(rows, 0),
                         .acc = random_floats(rows * (size_t)d, 0),
                         .logits = random_floats(rows * TILE, 0)};
    c.q_bias = random_floats(rows, spread);
    c.rows.q_bias = c.q_bias;
    c.keys = random_floats(tiles * (size_t)q_dim * TILE, 1);
    c.values = random_floats(tiles * TILE * (size_t)d, 1);
    c.masks = aligned_calloc(tiles * rows, sizeof *c.masks);
    assert_non_null(c.masks);
    for (size_t i = 0; i < tiles * rows; i++) c.masks[i] = random_mask();
    return c;
}
static void tile_case_free(tile_case *c) {
    float *all[] = {c->rows.q,      c->rows.row_max, c->rows.row_sum, c->rows.acc,
                    c->rows.logits, c->q_bias,       c->keys,         c->values};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) aligned_free(all[i]);
    aligned_free(c->masks);
}

static void tile_case_reset(tile_case *c) {
    size_t n = (size_t)c->rows.n_rows;
    for (size_t r = 0; r < n; r++) c->rows.row_max[r] = -INFINITY;
    memset(c->rows.row_sum, 0, n * sizeof(float));
    memset(c->rows.acc, 0, n * (size_t)c->rows.head_dim * sizeof(float));
    fill(c->rows.row_max + n, GUARD, 0x7fc12345);
    fill(c->rows.row_sum + n, GUARD, 0x7fc12345);
    fill(c->rows.acc + n * (size_t)c->rows.head_dim, GUARD, 0x7fc12345);
    fill(c->rows.logits + n * TILE, GUARD, 0x7fc12345);
}
static void tile_case_run(tile_case *c, const attn_ops *ops) {
    size_t n = (size_t)c->rows.n_rows, d = (size_t)c->rows.head_dim, q_dim = (size_t)c->rows.q_dim;
    tile_case_reset(c);
    for (size_t i = 0; i < (size_t)c->n_tiles; i++)
        ops->tile(&c->rows, c->keys + i * q_dim * TILE, c->values + i * TILE * d, c->masks + i * n);
    assert_guard(c->rows.row_max + n);
    assert_guard(c->rows.row_sum + n);
    assert_guard(c->rows.acc + n * d);
    assert_guard(c->rows.logits + n * TILE);
}

/* float64 logit of row r at a position; *size is |q| |k| with the bias in. */
static double oracle_logit(const tile_case *c, int r, int position, double *size) {
    const attn_rows *rows = &c->rows;
    const float *q = rows->q + r * rows->q_dim;
    const float *k = c->keys + (int64_t)(position / TILE) * rows->q_dim * TILE + position % TILE;
    double dot = 0, qq = 0, kk = 0;
    for (int i = 0; i < rows->q_dim; i++) {
        double a = q[i], b = k[i * TILE];
        dot += a * b, qq += a * a, kk += b * b;
    }
    double logit = (dot + (double)rows->q_bias[r]) * (double)rows->logit_scale;
    double cap = rows->logit_softcap;
    *size = (sqrt(qq * kk) + fabs((double)rows->q_bias[r])) * (double)rows->logit_scale;
    return cap > 0 ? cap * tanh(logit / cap) : logit;
}

/* float64 output of row r; false when it sees nothing. *largest: the largest |logit|. */
static bool oracle_row(const tile_case *c, int r, double *out, double *largest) {
    int n = c->n_tiles * TILE, d = c->rows.head_dim;
    double logits[MAX_TILES * TILE], size, top = -INFINITY, sum = 0;
    *largest = 0;
    for (int t = 0; t < n; t++) {
        bool seen = c->masks[t / TILE * c->rows.n_rows + r] >> (t % TILE) & 1;
        logits[t] = seen ? oracle_logit(c, r, t, &size) : -INFINITY;
        if (seen) *largest = fmax(*largest, fabs(logits[t]));
        top = fmax(top, logits[t]);
    }
    for (int i = 0; i < d; i++) out[i] = 0;
    if (!(top > -INFINITY)) return false;
    for (int t = 0; t < n; t++) {
        double p = exp(logits[t] - top);
        sum += p;
        for (int i = 0; i < d; i++) out[i] += p * (double)c->values[(int64_t)t * d + i];
    }
    for (int i = 0; i < d; i++) out[i] /= sum;
    return true;
}

/* The error of a weight is that of its logit, which grows with the logit's size. */
static void check_rows(const tile_case *c, const char *name) {
    int d = c->rows.head_dim;
    for (int r = 0; r < c->rows.n_rows; r++) {
        double want[512], largest, rms = 0, worst = 0;
        if (!oracle_row(c, r, want, &largest)) {
            assert_true(c->rows.row_sum[r] == 0 && c->rows.row_max[r] == -INFINITY);
            for (int i = 0; i < d; i++) assert_true(c->rows.acc[r * d + i] == 0);
            continue;
        }
        for (int i = 0; i < d; i++) {
            double got = (double)c->rows.acc[r * d + i] / (double)c->rows.row_sum[r];
            rms += want[i] * want[i];
            worst = got - want[i] <= INFINITY ? fmax(worst, fabs(got - want[i])) : NAN;
            if (isnan(got)) fail_msg("%s: row %d is not a number", name, r);
        }
        rms = sqrt(rms / d);
        double bound = 1e-5 * fmax(1, largest / 10) * rms;
        if (!(worst <= bound))
            fail_msg("%s d %d q_dim %d rows %d tiles %d cap %g row %d: off by %g, rms %g, |logit| %g",
                     name, d, c->rows.q_dim, c->rows.n_rows, c->n_tiles,
                     (double)c->rows.logit_softcap, r, worst, rms, largest);
    }
}

static void check_tile_case(int d, int q_dim, int n_rows, int n_tiles, float cap, float spread) {
    const attn_ops *ops[3];
    int n_ops = tables(ops);
    tile_case c = tile_case_make(d, q_dim, n_rows, n_tiles, cap, spread);
    for (int o = 0; o < n_ops; o++) {
        tile_case_run(&c, ops[o]);
        check_rows(&c, ops[o]->name);
    }
    tile_case_free(&c);
}

static void test_tile(void **state) {
    (void)state;
    static const int row_counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 31, 71, 127, 128};
    random_state = rng_seed(__func__, 20261129);
    for (int i = 0; i < N_HEAD_DIMS; i++) {
        for (size_t j = 0; j < sizeof row_counts / sizeof row_counts[0]; j++) {
            int d = head_dims[i], n_rows = row_counts[j];
            int q_dim = d + (j % 2 ? 2 * random_below(d / 2 + 1) : 0);
            check_tile_case(d, q_dim, n_rows, 1 + random_below(3), j % 3 ? 0 : 5, 1);
        }
        check_tile_case(head_dims[i], head_dims[i] + 8, 9, MAX_TILES, 0, 0.1f);
        check_tile_case(head_dims[i], head_dims[i] + 8, 9, MAX_TILES, 50, 2);
    }
}

static void test_large_logits(void **state) {
    (void)state;
    random_state = rng_seed(__func__, 20261129);
    for (int i = 0; i < N_HEAD_DIMS; i++) {
        check_tile_case(head_dims[i], head_dims[i], 13, 3, 0, 120);
        check_tile_case(head_dims[i], head_dims[i] + 16, 7, 3, 30, 120);
    }
}

/* With one visible position row_max is that position's logit. */
static void test_logits(void **state) {
    (void)state;
    const attn_ops *ops[3];
    int n_ops = tables(ops);
    random_state = rng_seed(__func__, 20261129);
    for (int i = 0; i < 4 * N_HEAD_DIMS; i++) {
        int d = head_dims[i / 4], n_rows = 1 + random_below(128);
        tile_case c = tile_case_make(d, d + 2 * random_below(9), n_rows, 1, i & 1 ? 20 : 0,
                                     i & 2 ? 100 : 1);
        int position[128];
        for (int r = 0; r < n_rows; r++) {
            position[r] = random_below(64);
            c.masks[r] = UINT64_C(1) << position[r];
        }
        for (int o = 0; o < n_ops; o++) {
            tile_case_run(&c, ops[o]);
            for (int r = 0; r < n_rows; r++) {
                double size, want = oracle_logit(&c, r, position[r], &size);
                assert_true(fabs((double)c.rows.row_max[r] - want) <= 1e-5 * size);
                assert_true(c.rows.row_sum[r] == 1);
            }
        }
        tile_case_free(&c);
    }
}

/* exp, seen alone: a row whose sum is 1 at logit -x meets logit 0 with value 0. Relative to the largest weight,
 * which is 1, the error allowed is below 3.3e-7 everywhere. */
static void test_exponential(void **state) {
    (void)state;
    const attn_ops *ops[3];
    int n_ops = tables(ops);
    random_state = rng_seed(__func__, 20261129);
    double worst[3] = {0};
    for (int round = 0; round < 100; round++) {
        tile_case c = tile_case_make(16, 16, 128, 2, 0, 0);
        memset(c.keys, 0, 2 * 16 * TILE * sizeof(float));
        memset(c.values, 0, 2 * 16 * TILE * sizeof(float));
        c.keys[0] = -1;
        c.values[0] = 1;
        c.rows.logit_scale = 1;
        for (int r = 0; r < 128; r++) {
            float x = 90.0f * (float)(random_u64() >> 40) * 0x1p-24f;
            c.rows.q[r * 16] = round == 0 && r < 4 ? 1e-7f * (float)r : round % 2 ? x : x / 50;
            c.masks[r] = c.masks[128 + r] = 1;
        }
        for (int o = 0; o < n_ops; o++) {
            tile_case_run(&c, ops[o]);
            for (int r = 0; r < 128; r++) {
                double want = exp(-(double)c.rows.q[r * 16]), got = (double)c.rows.acc[r * 16];
                if (want < 0x1p-125) assert_true(got >= 0 && got < 0x1p-124);
                else worst[o] = fmax(worst[o], fabs(got / want - 1) / (3e-7 + 8e-8 * (double)c.rows.q[r * 16]));
            }
        }
        tile_case_free(&c);
    }
    for (int o = 0; o < n_ops; o++) {
        printf("exp, %s: largest error %.2f of what is allowed\n", ops[o]->name, worst[o]);
        assert_true(worst[o] < 1);
    }
}

/* Two keys with raw logits 10 and 0 and values 1 and 0, cap 5: 5 tanh 2 = 4.820138. */
static void test_softcap(void **state) {
    (void)state;
    static const int row_counts[] = {1, 7, 128};
    const attn_ops *ops[3];
    int n_ops = tables(ops);
    random_state = rng_seed(__func__, 20261129);
    for (int i = 0; i < 3 * 2 * n_ops; i++) {
        int n_rows = row_counts[i % 3], n_tiles = 1 + i / 3 % 2;
        tile_case c = tile_case_make(64, 64, n_rows, n_tiles, 5, 0);
        memset(c.keys, 0, (size_t)n_tiles * 64 * TILE * sizeof(float));
        for (int t = 0; t < 64; t++) c.keys[t] = 10;
        for (int r = 0; r < n_rows; r++) {
            /* Both in one tile, or one in each. */
            c.rows.q[r * 64] = 8;
            c.masks[r] = n_tiles == 1 ? 3 : 2;
            if (n_tiles == 2) c.masks[n_rows + r] = 4;
        }
        c.keys[1] = n_tiles == 1 ? 0 : 10;
        for (int t = 0; t < n_tiles * TILE; t++)
            for (int j = 0; j < 64; j++) c.values[t * 64 + j] = 0;
        for (int j = 0; j < 64; j++) c.values[(n_tiles == 1 ? 0 : 64) + j] = 1;
        for (int capped = 0; capped < 2; capped++) {
            c.rows.logit_softcap = capped ? 5 : 0;
            tile_case_run(&c, ops[i / 6]);
            for (int j = 0; j < n_rows * 64; j++) {
                double got = (double)c.rows.acc[j] / (double)c.rows.row_sum[j / 64];
                assert_true(fabs(got - (capped ? 0.991999 : 0.999955)) < 1e-6);
            }
        }
        tile_case_free(&c);
    }
}

/* Every channel of every row is written, each from its own position: row r sees position r % 64,
 * whose value at channel c is unlike any other. */
static void test_every_element(void **state) {
    (void)state;
    static const int row_counts[] = {1, 2, 3, 5, 6, 7, 8, 12, 16, 24, 71, 128};
    const attn_ops *ops[3];
    int n_ops = tables(ops);
    random_state = rng_seed(__func__, 20261129);
    for (int i = 0; i < N_HEAD_DIMS * 12; i++) {
        int d = head_dims[i / 12], n_rows = row_counts[i % 12];
        tile_case c = tile_case_make(d, d, n_rows, 1, 0, 1);
        for (int j = 0; j < TILE * d; j++) c.values[j] = (float)(j + 1);
        for (int r = 0; r < n_rows; r++) c.masks[r] = UINT64_C(1) << r % 64;
        for (int o = 0; o < n_ops; o++) {
            tile_case_run(&c, ops[o]);
            for (int r = 0; r < n_rows; r++)
                for (int j = 0; j < d; j++)
                    assert_true(c.rows.acc[r * d + j] == (float)(r % 64 * d + j + 1));
        }
        tile_case_free(&c);
    }
}

/* A row alone gives the bits it gives among others; a row that sees nothing keeps its bits. */
static void test_rows_are_independent(void **state) {
    (void)state;
    const attn_ops *ops[3];
    int n_ops = tables(ops);
    random_state = rng_seed(__func__, 20261129);
    for (int i = 0; i < N_HEAD_DIMS * 2 * n_ops; i++) {
        int d = head_dims[i / 2 % N_HEAD_DIMS], n_rows = i % 2 ? 128 : 1 + random_below(16);
        const attn_ops *op = ops[i / 2 / N_HEAD_DIMS];
        tile_case c = tile_case_make(d, d + 2, n_rows, 3, i % 3 ? 0 : 10, 2);
        tile_case_run(&c, op);
        for (int r = 0; r < n_rows; r++) {
            float max = -INFINITY, sum = 0, *acc = random_floats((size_t)d, 0), logits[TILE];
            attn_rows one = c.rows;
            one.n_rows = 1, one.q += r * (d + 2), one.q_bias += r;
            one.row_max = &max, one.row_sum = &sum, one.acc = acc, one.logits = logits;
            for (int t = 0; t < 3; t++) {
                float before[512];
                memcpy(before, acc, (size_t)d * sizeof(float));
                uint64_t mask = c.masks[t * n_rows + r];
                op->tile(&one, c.keys + t * (d + 2) * TILE, c.values + t * TILE * d, &mask);
                if (mask == 0) assert_memory_equal(before, acc, (size_t)d * sizeof(float));
            }
            assert_memory_equal(acc, c.rows.acc + r * d, (size_t)d * sizeof(float));
            assert_memory_equal(&max, &c.rows.row_max[r], sizeof max);
            assert_memory_equal(&sum, &c.rows.row_sum[r], sizeof sum);
            aligned_free(acc);
        }
        tile_case_free(&c);
    }
}

/* A row with an empty mask is not touched, whatever its state holds. */
static void test_empty_masks(void **state) {
    (void)state;
    const attn_ops *ops[3];
    int n_ops = tables(ops);
    random_state = rng_seed(__func__, 20261129);
    for (int i = 0; i < N_HEAD_DIMS * n_ops; i++) {
        int d = head_dims[i / n_ops], n_rows = 1 + random_below(40);
        tile_case c = tile_case_make(d, d, n_rows, 1, 0, 1);
        tile_case_reset(&c);
        for (int r = 0; r < n_rows; r++) {
            c.masks[r] = random_below(2) ? 0 : UINT64_MAX;
            if (c.masks[r]) continue;
            c.rows.row_sum[r] = 7;
            for (int j = 0; j < d; j++) c.rows.acc[r * d + j] = (float)j;
        }
        ops[i % n_ops]->tile(&c.rows, c.keys, c.values, c.masks);
        for (int r = 0; r < n_rows; r++) {
            assert_int_equal(c.masks[r] == 0, c.rows.row_max[r] == -INFINITY);
            for (int j = 0; c.masks[r] == 0 && j < d; j++) {
                assert_true(c.rows.row_sum[r] == 7);
                assert_true(c.rows.acc[r * d + j] == (float)j);
            }
        }
        tile_case_free(&c);
    }
}

/* Products that overflow to -inf have weight 0, also while a row has seen nothing else. */
static void test_overflow(void **state) {
    (void)state;
    const attn_ops *ops[3];
    int n_ops = tables(ops);
    random_state = rng_seed(__func__, 20261129);
    for (int o = 0; o < n_ops; o++) {
        tile_case c = tile_case_make(64, 64, 7, 2, 0, 1);
        for (int t = 0; t < TILE; t++) c.keys[t] = -1e30f;
        memset(c.keys + 64 * TILE, 0, 64 * TILE * sizeof(float));
        for (int r = 0; r < 7; r++) {
            c.rows.q[r * 64] = 1e30f;
            c.masks[r] = UINT64_MAX;
            c.masks[7 + r] = r == 0 ? 0 : UINT64_C(1) << r;
        }
        tile_case_run(&c, ops[o]);
        for (int i = 0; i < 7 * 64; i++) {
            int r = i / 64;
            assert_true(c.rows.row_sum[r] == (r == 0 ? 0 : 1));
            assert_true(c.rows.acc[i] == (r == 0 ? 0 : c.values[(TILE + r) * 64 + i % 64]));
        }
        tile_case_free(&c);
    }
}

/* --- rotations ------------------------------------------------------------------------------ */

static void check_rotation(const attn_ops *ops, int d, int n_rows) {
    int64_t x_stride = d + 3, y_stride = d + 5;
    float *u = random_floats((size_t)d * (size_t)d, 1);
    float *x = random_floats((size_t)(n_rows * x_stride), 1);
    size_t n = (size_t)(n_rows * y_stride);
    float *y = random_floats(n, 1);
    fill(y, n + GUARD, 0x7fc12345);
    ops->rotate(d, u, n_rows, x, x_stride, y, y_stride);
    for (int r = 0; r < n_rows; r++) {
        for (int j = 0; j < d; j++) {
            double want = 0, size = 0;
            for (int i = 0; i < d; i++) {
                double a = x[r * x_stride + i], b = u[i * d + j];
                want += a * b, size += a * a;
            }
            if (!(fabs((double)y[r * y_stride + j] - want) <= 1e-5 * sqrt(size * d)))
                fail_msg("%s d %d rows %d row %d column %d: %g, expected %g", ops->name, d, n_rows,
                         r, j, (double)y[r * y_stride + j], want);
        }
        for (int64_t j = d; j < y_stride; j++)
            assert_int_equal(float_bits(y[r * y_stride + j]), 0x7fc12345);
    }
    assert_guard(y + n);
    float *alone = random_floats((size_t)d, 0), *last = y + (n_rows - 1) * y_stride;
    ops->rotate(d, u, 1, x + (n_rows - 1) * x_stride, d, alone, d);
    assert_memory_equal(alone, last, (size_t)d * sizeof(float));
    aligned_free(alone);
    aligned_free(u);
    aligned_free(x);
    aligned_free(y);
}

static void test_rotations(void **state) {
    (void)state;
    static const int row_counts[] = {1, 2, 5, 7, 16, 33};
    const attn_ops *ops[3];
    int n_ops = tables(ops);
    random_state = rng_seed(__func__, 20261129);
    for (int o = 0; o < n_ops; o++) {
        for (int i = 0; i < N_HEAD_DIMS; i++)
            for (int j = 0; j < 6; j++) check_rotation(ops[o], head_dims[i], row_counts[j]);
        check_rotation(ops[o], OSCAR_MAX_HEAD_DIM, 150);
        check_rotation(ops[o], OSCAR_MAX_HEAD_DIM, 3);
    }
}

static void test_dispatch(void **state) {
    (void)state;
    const attn_ops *ops[3];
    int n_ops = tables(ops), found = 0;
    for (int o = 0; o < n_ops; o++) found += ops[o] == attn_ops_current();
    assert_int_equal(found, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unpack),
        cmocka_unit_test(test_widen),
        cmocka_unit_test(test_widen_half),
        cmocka_unit_test(test_few_rows),
        cmocka_unit_test(test_tile),
        cmocka_unit_test(test_large_logits),
        cmocka_unit_test(test_logits),
        cmocka_unit_test(test_exponential),
        cmocka_unit_test(test_softcap),
        cmocka_unit_test(test_every_element),
        cmocka_unit_test(test_rows_are_independent),
        cmocka_unit_test(test_empty_masks),
        cmocka_unit_test(test_overflow),
        cmocka_unit_test(test_rotations),
        cmocka_unit_test(test_dispatch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
