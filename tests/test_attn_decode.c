/*
 * test_attn_decode.c - decode attention on the codes against float64 attention over the same codes.
 */
#include "attn/attn.h"
#include "test_util.h"

#define TILE 64
#define MAX_PAGES 6
#define PI 3.14159265358979
/* Errors allowed, relative to the rms of the logits and of the output row. */
#define LOGIT_ERROR 1e-3
#define OUTPUT_ERROR 2e-3

static uint64_t random_state;
static int n_runs;

static int random_below(int n) { return (int)(rng_next(&random_state) % (uint64_t)n); }
static float random_normal(void) { return (float)rng_normal(&random_state); }

typedef struct shape {
    int d, bits_k, bits_v, n_rows, n_pairs, length, window;
    float softcap, bias;
    unsigned overlay; /* a bit a page: BF16 rows in place of codes */
    bool causal;      /* row r does not see the last n_rows - 1 - r positions */
} shape;

/* Pages of random codes, queries for them, and what float64 makes of it. */
typedef struct decode_case {
    shape s;
    page_side k_side, v_side;
    int n_pages;
    uint8_t *keys[MAX_PAGES], *values[MAX_PAGES];
    double *k, *v;         /* [n_pages * 64, d] */
    float *table;          /* [2 n_pairs, 64] */
    float *pairs;          /* [n_rows, 2, n_pairs] */
    int32_t *tracked;      /* [n_pairs] of n_angles() */
    float *cosines, *sines; /* [n_pages, n_angles()] of the pages' starts */
    float *middle;         /* [2, n_pairs] */
    float *q;              /* [n_rows, q_dim] */
    float *bias;           /* [n_rows] */
    double *want;          /* [n_rows, d] */
    double *logits;        /* [n_rows, n_pages * 64] */
} decode_case;

/* 64 elements too many, for kernels that read whole vectors. */
static void *make(size_t n, size_t size) {
    void *p = aligned_calloc(n + 64, size);
    assert_non_null(p);
    return p;
}

/* A page of ones bits (NaN steps), of which the first `count` rows are put; numbers spread alike whatever the bits. */
static uint8_t *make_page(const page_side *side, int count, double *rows) {
    uint8_t *page = make(side->bytes, 1);
    memset(page, 0xff, side->bytes);
    for (int t = 0; t < count; t++) {
        uint8_t codes[OSCAR_MAX_HEAD_DIM];
        uint16_t params[2 * CODEC_MAX_GROUPS];
        for (int g = 0; g < side->n_groups; g++) {
            float step = (float)(0.2 + rng_uniform(&random_state)) * 3 / (float)((1 << side->bits) - 1);
            params[2 * g] = fp16_from_float(step);
            params[2 * g + 1] = fp16_from_float(-step * (float)((1 << side->bits) - 1) / 2 + 0.1f * random_normal());
        }
        for (int i = 0; i < side->head_dim; i++) {
            const uint16_t *p = params + 2 * (i / side->group);
            codes[i] = (uint8_t)random_below(1 << side->bits);
            rows[t * side->head_dim + i] = (double)fp16_to_float(p[1]) + (double)fp16_to_float(p[0]) * codes[i];
        }
        page_put_row(side, page, t, codes, params);
    }
    return page;
}

/* A page of BF16 rows, NaN after the first `count`. */
static uint8_t *make_overlay(page_side_kind kind, int d, int count, double *rows) {
    uint16_t *page = make((size_t)(TILE * d), sizeof *page);
    memset(page, 0xff, sizeof *page * (size_t)(TILE * d));
    for (int t = 0; t < count; t++)
        for (int i = 0; i < d; i++) {
            uint16_t *at = &page[page_bf16_at(kind, d, t, i)];
            *at = bf16_from_float(random_normal());
            rows[t * d + i] = (double)bf16_to_float(*at);
        }
    return (uint8_t *)page;
}

/* What row r sees. */
static bool visible(const shape *s, int r, int t) {
    int end = s->length - (s->causal ? s->n_rows - 1 - r : 0);
    return t < end && (s->window == 0 || t >= end - s->window);
}

/* Angles of a page: more than are tracked. */
static int n_angles(const shape *s) { return s->n_pairs + 3; }

/* What pair p of row r adds to q.k of token t: the pair turned back by the page's start times the table. */
static double pair_bias(const decode_case *c, int r, int p, int t) {
    const int at = t / TILE * n_angles(&c->s) + c->tracked[p], n = c->s.n_pairs;
    double x = c->pairs[2 * r * n + p], y = c->pairs[(2 * r + 1) * n + p], cosine = c->cosines[at], sine = c->sines[at];
    return (x * cosine + y * sine) * c->table[2 * p * TILE + t % TILE] + (y * cosine - x * sine) * c->table[(2 * p + 1) * TILE + t % TILE];
}

/* Float64 attention of one row. */
static void attend(decode_case *c, int r, double scale) {
    const shape *s = &c->s;
    int n = c->n_pages * TILE, q_dim = s->d + 2 * s->n_pairs;
    double *logits = c->logits + (size_t)r * (size_t)n, max = -INFINITY, total = 0;
    double *out = c->want + (size_t)r * (size_t)s->d;
    for (int t = 0; t < n; t++) {
        double dot = c->bias[r];
        if (!visible(s, r, t)) continue;
        for (int i = 0; i < s->d; i++) dot += (double)c->q[r * q_dim + i] * c->k[t * s->d + i];
        for (int p = 0; p < s->n_pairs; p++) dot += pair_bias(c, r, p, t);
        dot *= scale;
        logits[t] = s->softcap > 0 ? s->softcap * tanh(dot / s->softcap) : dot;
        if (logits[t] > max) max = logits[t];
    }
    for (int i = 0; i < s->d; i++) out[i] = 0;
    for (int t = 0; t < n; t++) {
        if (!visible(s, r, t)) continue;
        double w = exp(logits[t] - max);
        total += w;
        for (int i = 0; i < s->d; i++) out[i] += w * c->v[t * s->d + i];
    }
    for (int i = 0; i < s->d; i++) out[i] /= total;
}

/* A vector of every pair, turned from slot to slot: slowly, as the pairs of a model are, or by half a circle. */
static void make_table(decode_case *c) {
    uint64_t state = (uint64_t)(c->s.length + 1000 * c->s.d);
    for (int p = 0; p < c->s.n_pairs; p++) {
        double length = (double)c->s.bias * sqrt(2) * rng_normal(&state), angle = 2 * PI * rng_uniform(&state);
        double turn = p % 8 == 7 ? PI : pow(10, -3 * rng_uniform(&state));
        for (int t = 0; t < TILE; t++) {
            c->table[2 * p * TILE + t] = (float)(length * cos(angle + turn * t));
            c->table[(2 * p + 1) * TILE + t] = (float)(length * sin(angle + turn * t));
        }
    }
}

static decode_case case_make(const shape *s) {
    decode_case c = {.s = *s, .k_side = page_side_make(PAGE_KEY, s->d, s->bits_k),
                     .v_side = page_side_make(PAGE_VALUE, s->d, s->bits_v)};
    c.n_pages = (s->length + TILE - 1) / TILE;
    size_t n = (size_t)c.n_pages * TILE, d = (size_t)s->d, rows = (size_t)s->n_rows, pairs = (size_t)s->n_pairs;
    c.k = make(n * d, sizeof *c.k), c.v = make(n * d, sizeof *c.v);
    for (int b = 0; b < c.n_pages; b++) {
        int count = s->length - b * TILE < TILE ? s->length - b * TILE : TILE;
        bool overlay = s->overlay >> b & 1;
        double *k = c.k + (size_t)b * TILE * d, *v = c.v + (size_t)b * TILE * d;
        c.keys[b] = overlay ? make_overlay(PAGE_KEY, s->d, count, k) : make_page(&c.k_side, count, k);
        c.values[b] = overlay ? make_overlay(PAGE_VALUE, s->d, count, v) : make_page(&c.v_side, count, v);
    }
    c.table = make(2 * pairs * TILE, sizeof *c.table);
    c.pairs = make(rows * 2 * pairs, sizeof *c.pairs);
    c.tracked = make(pairs, sizeof *c.tracked);
    c.middle = make(2 * pairs, sizeof *c.middle);
    const size_t angles = (size_t)c.n_pages * (size_t)n_angles(s);
    c.cosines = make(angles, sizeof *c.cosines), c.sines = make(angles, sizeof *c.sines);
    c.q = make(rows * (d + 2 * pairs), sizeof *c.q);
    c.bias = make(rows, sizeof *c.bias);
    c.want = make(rows * d, sizeof *c.want);
    c.logits = make(rows * n, sizeof *c.logits);
    make_table(&c);
    attn_middle(c.table, s->n_pairs, c.middle, c.middle + pairs);
    for (size_t i = 0; i < rows * 2 * pairs; i++) c.pairs[i] = random_normal();
    /* Half of the cases: pairs that follow each other. */
    const int first = random_below(2) ? random_below(4) : -1;
    for (int p = 0; p < s->n_pairs; p++) c.tracked[p] = first < 0 ? random_below(n_angles(s)) : first + p;
    for (size_t i = 0; i < angles; i++) {
        double angle = 3 * (double)random_normal();
        c.cosines[i] = (float)cos(angle), c.sines[i] = (float)sin(angle);
    }
    for (size_t r = 0; r < rows; r++) {
        for (size_t i = 0; i < d; i++) c.q[r * (d + 2 * pairs) + i] = random_normal() * (random_below(30) ? 1.0f : 6.0f);
        c.bias[r] = 100 * random_normal();
        attend(&c, (int)r, 1 / sqrt((double)s->d));
    }
    return c;
}

static void case_free(decode_case *c) {
    for (int b = 0; b < c->n_pages; b++) aligned_free(c->keys[b]), aligned_free(c->values[b]);
    aligned_free(c->k), aligned_free(c->v), aligned_free(c->table), aligned_free(c->pairs);
    aligned_free(c->tracked), aligned_free(c->cosines), aligned_free(c->sines), aligned_free(c->middle);
    aligned_free(c->q), aligned_free(c->bias), aligned_free(c->want), aligned_free(c->logits);
}

/* The table that a decode kernel may be given, every other time. */
static void *made_table(const attn_decode_ops *ops, const decode_case *c) {
    const size_t bytes = n_runs % 2 && c->s.n_pairs && ops->table_bytes ? ops->table_bytes(c->s.n_pairs) : 0;
    void *table = bytes ? make(bytes, 1) : NULL;
    if (table) ops->make_table(c->table, c->s.n_pairs, table);
    return table;
}

/* The angles of page b. */
static struct attn_angles angles_of(const decode_case *c, int b) {
    return (struct attn_angles){c->cosines + b * n_angles(&c->s), c->sines + b * n_angles(&c->s)};
}

/* Zeros as BF16 rows for the same queries, between two pages of codes, as a page has them of which both are seen: results
 * of their own, and nothing changes for the pages around them. */
static void run_between(const attn_decode_ops *ops, attn_decode *decode) {
    attn_rows *all = decode->rows, rows = *all;
    const size_t n = (size_t)all->n_rows, d = (size_t)all->head_dim;
    uint16_t *page = make(TILE * d, sizeof *page);
    float *acc = make(n * d, sizeof *acc), *state = make(2 * n, sizeof *state);
    uint64_t masks[ATTN_ROWS_MAX];
    rows.acc = acc, rows.row_max = state, rows.row_sum = state + n;
    for (size_t r = 0; r < n; r++) rows.row_max[r] = -INFINITY, masks[r] = 0xffff;
    decode->rows = &rows;
    attn_ask_for(decode, NULL, 0, NULL, 0);
    ops->overlay(decode, page, page, 0xffff, masks);
    decode->rows = all;
    aligned_free(page), aligned_free(acc), aligned_free(state);
}

/* Runs rows [r0, r1) of a case; out [r1 - r0, d]. Scratch is full of NaN before. Whether a page is told of the
 * next one, whether its table is there, and whether it has BF16 rows too, changes from run to run, which must change nothing. */
static void run(const attn_decode_ops *ops, const decode_case *c, int r0, int r1, float *out) {
    const shape *s = &c->s;
    int d = s->d, q_dim = d + 2 * s->n_pairs, n = r1 - r0;
    attn_decode *decode = aligned_calloc(1, sizeof *decode);
    memset(decode, 0xff, sizeof *decode);
    float *q = make((size_t)(n * q_dim), sizeof *q), *acc = make((size_t)(n * d), sizeof *acc);
    float *state = make((size_t)(2 * n), sizeof *state), *logits = make((size_t)(n * TILE), sizeof *logits);
    memset(logits, 0xff, sizeof(float) * (size_t)(n * TILE));
    memcpy(q, c->q + r0 * q_dim, sizeof(float) * (size_t)(n * q_dim));
    attn_rows rows = {.n_rows = n, .head_dim = d, .q_dim = q_dim, .logit_scale = 1 / sqrtf((float)d),
                      .logit_softcap = s->softcap, .q = q, .q_bias = c->bias + r0, .row_max = state,
                      .row_sum = state + n, .acc = acc, .logits = logits};
    for (int r = 0; r < n; r++) rows.row_max[r] = -INFINITY;
    decode->rows = &rows, decode->k_side = &c->k_side, decode->v_side = &c->v_side, decode->bias_table = c->table;
    decode->pairs = c->pairs + r0 * 2 * s->n_pairs, decode->tracked = c->tracked, decode->middle = c->middle;
    n_runs++;
    void *table = made_table(ops, c);
    decode->table = table;
    if (ops->open) ops->open(decode);
    ops->begin(decode);
    if (ops->overlay) ops->begin_overlay(decode);
    for (int b = 0; b < c->n_pages; b++) {
        uint64_t valid = 0, masks[ATTN_ROWS_MAX] = {0};
        for (int r = 0; r < n; r++) {
            for (int t = 0; t < TILE; t++)
                if (visible(s, r0 + r, b * TILE + t)) masks[r] |= 1ull << t;
            valid |= masks[r];
        }
        decode->here = angles_of(c, b);
        if (s->overlay >> b & 1)
            ops->overlay(decode, (uint16_t *)(void *)c->keys[b], (uint16_t *)(void *)c->values[b], valid, masks);
        else {
            bool told = b + 1 < c->n_pages && !(s->overlay >> (b + 1) & 1) && (n_runs + b) % 3;
            decode->next_keys = told ? c->keys[b + 1] : NULL;
            if (told) decode->next = angles_of(c, b + 1);
            attn_ask_for(decode, c->keys[0], (size_t)c->k_side.bytes / 64 * 64, c->values[0], 64 * (size_t)(n_runs % 7));
            ops->page(decode, c->keys[b], c->values[b], valid, masks);
            for (int k = 0; k < 2; k++) assert_ptr_equal(decode->ask[k].at, decode->ask[k].end);
            if (ops->overlay && (n_runs + b) % 4 == 1) run_between(ops, decode);
        }
    }
    if (ops->end) ops->end(decode);
    for (int r = 0; r < n; r++)
        for (int i = 0; i < d; i++) out[r * d + i] = acc[r * d + i] / rows.row_sum[r];
    aligned_free(decode), aligned_free(q), aligned_free(acc), aligned_free(state), aligned_free(logits), aligned_free(table);
}

/* The worst difference from float64, relative to the row's rms. */
static double worst_error(const decode_case *c, const float *out) {
    int d = c->s.d;
    double worst = 0;
    for (int r = 0; r < c->s.n_rows; r++) {
        double sum = 0, most = 0;
        for (int i = 0; i < d; i++) {
            double e = fabs(out[r * d + i] - c->want[r * d + i]);
            if (!(e <= most)) most = e;
            sum += c->want[r * d + i] * c->want[r * d + i];
        }
        if (!(most / sqrt(sum / d) <= worst)) worst = most / sqrt(sum / d);
    }
    return worst;
}

/* Every table that this machine runs; at most MAX_TABLES. */
#define MAX_TABLES 5
static int tables(const attn_decode_ops **out) {
    int n = 0;
    oscar_isa_select(NULL);
#if defined(__x86_64__)
    if (isa_current() >= ISA_AVX2) out[n++] = &attn_decode_int2_avx2;
    if (oscar_isa_select("avxvnni") == OSCAR_OK) out[n++] = &attn_decode_int2_avxvnni;
    oscar_isa_select(NULL);
    if (isa_current() >= ISA_AVX512VNNI) out[n++] = &attn_decode_int2_avx512vnni;
    if (isa_current() >= ISA_AVX512VBMI) out[n++] = &attn_decode_int2_avx512vbmi;
    if (isa_current() >= ISA_AMX) out[n++] = &attn_decode_int2_amx;
#elif defined(__aarch64__)
    if (isa_current() >= ISA_NEONDOT) out[n++] = &attn_decode_int2_neondot;
#else
    (void)out;
#endif
    return n;
}

static double check(const attn_decode_ops *ops, const decode_case *c) {
    float *out = make((size_t)(c->s.n_rows * c->s.d), sizeof *out);
    run(ops, c, 0, c->s.n_rows, out);
    double e = worst_error(c, out);
    if (!(e < OUTPUT_ERROR))
        fail_msg("%s: d %d bits %d %d rows %d pairs %d length %d window %d softcap %g: error %.2e", ops->name, c->s.d,
                 c->s.bits_k, c->s.bits_v, c->s.n_rows, c->s.n_pairs, c->s.length, c->s.window, (double)c->s.softcap, e);
    aligned_free(out);
    return e;
}

static void run_shape(const shape *s, double *worst) {
    const attn_decode_ops *ops[MAX_TABLES];
    int n_ops = tables(ops);
    decode_case c = case_make(s);
    for (int o = 0; o < n_ops; o++) {
        if (s->overlay && !ops[o]->overlay) continue;
        double e = check(ops[o], &c);
        if (e > *worst) *worst = e;
    }
    case_free(&c);
}

static void test_lengths(void **state) {
    (void)state;
    double worst = 0;
    random_state = rng_seed(__func__, 31);
    for (int n = 1; n <= 300; n++) {
        bool edge = n % TILE <= 1 || n % TILE == TILE - 1;
        if (!edge && n % 3 && n > 20) continue;
        run_shape(&(shape){.d = 64, .bits_k = 2, .bits_v = 2, .n_rows = 7, .n_pairs = 16, .length = n, .bias = 0.5f}, &worst);
    }
    printf("worst error %.2e\n", worst);
}

static void test_shapes(void **state) {
    (void)state;
    static const int dims[] = {16, 32, 64, 80, 96, 128, 192, 256, 272};
    double worst = 0;
    random_state = rng_seed(__func__, 32);
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
        for (int bits = 2; bits <= 4; bits++)
            for (int k = 0; k < 5; k++) {
                int d = dims[i], pairs[] = {0, 16, d / 2};
                run_shape(&(shape){.d = d, .bits_k = bits, .bits_v = 2 + random_below(3), .n_rows = 1 + random_below(16),
                                   .n_pairs = pairs[k % 3], .length = 1 + random_below(200), .bias = 0.3f,
                                   .softcap = k == 3 ? 5.0f : 0.0f, .window = k == 4 ? 90 : 0}, &worst);
            }
    printf("worst error %.2e\n", worst);
}

static void test_groups(void **state) {
    (void)state;
    double worst = 0;
    random_state = rng_seed(__func__, 33);
    for (int rows = 1; rows <= ATTN_DECODE_ROWS; rows++)
        for (int bits = 2; bits <= 4; bits++)
            run_shape(&(shape){.d = bits == 3 ? 96 : 128, .bits_k = bits, .bits_v = bits, .n_rows = rows, .n_pairs = 5, .length = 130,
                               .bias = 0.3f}, &worst);
    printf("worst error %.2e\n", worst);
}

/* Pages of BF16 rows alone, and between pages of codes. */
static void test_overlay(void **state) {
    (void)state;
    static const int dims[] = {16, 48, 64, 80, 96, 128, 144, 256};
    double worst = 0;
    random_state = rng_seed(__func__, 36);
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
        for (int k = 0; k < 6; k++) {
            static const unsigned overlay[] = {~0u, 9, 0x15};
            int d = dims[i], pairs[] = {0, 8, d / 2};
            run_shape(&(shape){.d = d, .bits_k = 2 + k % 3, .bits_v = 2, .n_rows = 1 + random_below(16), .n_pairs = pairs[k % 3],
                               .length = 1 + random_below(320), .bias = 0.3f, .overlay = overlay[k % 3],
                               .softcap = k == 3 ? 5.0f : 0.0f, .window = k == 4 ? 90 : 0}, &worst);
        }
    printf("worst error %.2e\n", worst);
}

/* Many rows, each of which sees one position more than the one before. */
static void test_many_rows(void **state) {
    (void)state;
    static const int dims[] = {32, 64, 80, 128, 256};
    double worst = 0;
    random_state = rng_seed(__func__, 37);
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
        for (int bits = 2; bits <= 4; bits++) {
            int rows = bits == 2 ? ATTN_ROWS_MAX : 17 + random_below(ATTN_ROWS_MAX - 17);
            run_shape(&(shape){.d = dims[i], .bits_k = bits, .bits_v = 6 - bits, .n_rows = rows, .n_pairs = bits == 3 ? 0 : dims[i] / 4,
                               .length = rows + random_below(200), .bias = 0.3f, .overlay = bits == 3 ? 0 : 0x15, .causal = true,
                               .window = bits == 4 ? 100 : 0}, &worst);
        }
    printf("worst error %.2e\n", worst);
}

/* A row is the same to the bit whichever others go with it: how a prompt is cut changes nothing. */
static void test_rows_are_independent(void **state) {
    (void)state;
    const attn_decode_ops *ops[MAX_TABLES];
    int n_ops = tables(ops);
    random_state = rng_seed(__func__, 38);
    /* Values whole and in halves, one chunk of pairs and several, more pairs than tiles, several groups. */
    static const struct {
        int d, n_pairs, n_rows;
    } shapes[] = {{64, 16, ATTN_ROWS_MAX}, {128, 40, 40}, {128, 63, 12}, {144, 70, 24}, {272, 16, 24}};
    enum { N_SHAPES = sizeof shapes / sizeof *shapes };
    for (int i = 0; i < n_ops * N_SHAPES; i++) {
        const int o = i / N_SHAPES, n = shapes[i % N_SHAPES].n_rows, d = shapes[i % N_SHAPES].d;
        decode_case c = case_make(&(shape){.d = d, .bits_k = 2, .bits_v = 3, .n_rows = n, .n_pairs = shapes[i % N_SHAPES].n_pairs,
                                           .length = n + 140, .bias = 0.3f, .overlay = ops[o]->overlay ? 9 : 0, .causal = true});
        float *all = make((size_t)(n * d), sizeof *all), *some = make((size_t)(n * d), sizeof *some);
        run(ops[o], &c, 0, n, all);
        for (int k = 0; k < 8; k++) {
            int r0 = random_below(n), r1 = r0 + 1 + random_below(n - r0);
            run(ops[o], &c, r0, r1, some);
            if (memcmp(some, all + r0 * d, sizeof(float) * (size_t)((r1 - r0) * d)))
                fail_msg("%s: rows [%d, %d) differ from those of [0, %d)", ops[o]->name, r0, r1, n);
        }
        aligned_free(all), aligned_free(some);
        case_free(&c);
    }
}

/* A row that sees nothing of a page which another row sees is left as it was. */
static void test_empty_mask(void **state) {
    (void)state;
    enum { D = 64, ROWS = 2 };
    random_state = rng_seed(__func__, 39);
    const attn_decode_ops *ops[MAX_TABLES];
    int n_ops = tables(ops);
    decode_case c = case_make(&(shape){.d = D, .bits_k = 2, .bits_v = 2, .n_rows = ROWS, .length = TILE});
    for (int o = 0; o < n_ops; o++) {
        attn_decode *decode = aligned_calloc(1, sizeof *decode);
        float top[ROWS] = {-INFINITY, -INFINITY}, sum[ROWS] = {0}, acc[ROWS * D] = {0}, logits[ROWS * TILE];
        attn_rows rows = {.n_rows = ROWS, .head_dim = D, .q_dim = D, .logit_scale = 0.125f, .q = c.q, .q_bias = c.bias,
                          .row_max = top, .row_sum = sum, .acc = acc, .logits = logits};
        decode->rows = &rows, decode->k_side = &c.k_side, decode->v_side = &c.v_side;
        if (ops[o]->open) ops[o]->open(decode);
        ops[o]->begin(decode);
        ops[o]->page(decode, c.keys[0], c.values[0], UINT64_MAX, (uint64_t[ROWS]){UINT64_MAX, 0});
        if (ops[o]->end) ops[o]->end(decode);
        assert_true(sum[0] > 0 && top[0] > -INFINITY);
        assert_true(sum[1] == 0 && top[1] == -INFINITY);
        for (int i = 0; i < D; i++) assert_true(acc[D + i] == 0);
        aligned_free(decode);
    }
    case_free(&c);
}

/* The bias alone: its absolute error where it reaches a thousand. The weights left in the scratch, times the
 * values' steps, say what a logit was; those that underflow say nothing. */
static void test_large_bias(void **state) {
    (void)state;
    enum { D = 64, PAIRS = 16, ROWS = 9 };
    random_state = rng_seed(__func__, 34);
    const attn_decode_ops *ops[MAX_TABLES];
    int n_ops = tables(ops);
    shape s = {.d = D, .bits_k = 2, .bits_v = 2, .n_rows = ROWS, .n_pairs = PAIRS, .length = TILE, .bias = 40.0f};
    decode_case c = case_make(&s);
    const int q_dim = D + 2 * PAIRS;
    double worst = 0, largest = 0;
    for (int o = 0; o < n_ops; o++) {
        attn_decode *decode = aligned_calloc(1, sizeof *decode);
        float q[ROWS * (D + 2 * PAIRS)] = {0}, bias[ROWS] = {0}, top[ROWS], sum[ROWS] = {0}, acc[ROWS * D] = {0}, logits[ROWS * TILE];
        uint64_t masks[ROWS];
        attn_rows rows = {.n_rows = ROWS, .head_dim = D, .q_dim = q_dim, .logit_scale = 0.125f, .q = q, .q_bias = bias,
                          .row_max = top, .row_sum = sum, .acc = acc, .logits = logits};
        decode->rows = &rows, decode->k_side = &c.k_side, decode->v_side = &c.v_side, decode->bias_table = c.table;
        for (int r = 0; r < ROWS; r++) top[r] = -INFINITY, masks[r] = UINT64_MAX;
        decode->pairs = c.pairs, decode->tracked = c.tracked, decode->middle = c.middle, decode->here = angles_of(&c, 0);
        if (ops[o]->open) ops[o]->open(decode);
        ops[o]->begin(decode);
        ops[o]->page(decode, c.keys[0], c.values[0], UINT64_MAX, masks);
        if (ops[o]->end) ops[o]->end(decode);
        for (int r = 0; r < ROWS; r++)
            for (int t = 0; t < TILE; t++) {
                double want = 0;
                for (int p = 0; p < PAIRS; p++) want += pair_bias(&c, r, p, t);
                if (fabs(want) > largest) largest = fabs(want);
                if (logits[r * TILE + t] < 1e-30f) continue;
                uint8_t codes[D];
                uint16_t params[2];
                page_get_row(&c.v_side, c.values[0], t, codes, params);
                double e = fabs((log(logits[r * TILE + t] / (double)fp16_to_float(params[0])) + top[r]) * 8 - want);
                if (!(e <= worst)) worst = e;
            }
        aligned_free(decode);
    }
    printf("largest bias %.0f, worst absolute error %.1e\n", largest, worst);
    assert_true(largest > 500 && worst < 0.01);
    case_free(&c);
}

#if defined(__x86_64__)
/* AMX: a caller's tile configuration is as it was afterwards. */
static void test_tiles_are_restored(void **state) {
    (void)state;
    oscar_isa_select(NULL);
    if (isa_current() < ISA_AMX) skip();
    random_state = rng_seed(__func__, 35);
    _Alignas(64) uint8_t before[64] = {1}, after[64], none[64] = {0};
    before[16] = 32, before[48] = 5; /* tile 0: 5 rows of 32 bytes */
    __asm__ volatile(".byte 0xc4,0xe2,0x78,0x49,0x00" : : "a"(before) : "memory"); /* ldtilecfg (%rax) */
    double worst = 0;
    decode_case c = case_make(&(shape){.d = 64, .bits_k = 2, .bits_v = 2, .n_rows = 7, .length = 70});
    worst = check(&attn_decode_int2_amx, &c);
    __asm__ volatile(".byte 0xc4,0xe2,0x79,0x49,0x00" : : "a"(after) : "memory"); /* sttilecfg (%rax) */
    __asm__ volatile(".byte 0xc4,0xe2,0x78,0x49,0x00" : : "a"(none) : "memory");
    assert_memory_equal(before, after, 64);
    assert_true(worst < OUTPUT_ERROR);
    case_free(&c);
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_overlay),
        cmocka_unit_test(test_many_rows),
        cmocka_unit_test(test_rows_are_independent),
        cmocka_unit_test(test_empty_mask),
        cmocka_unit_test(test_large_bias),
#if defined(__x86_64__)
        cmocka_unit_test(test_tiles_are_restored),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
