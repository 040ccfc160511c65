/* test_cache.c - the contract: what a token sees depends on its position alone. */
#include "cache_model.h"

#define MAX_TOKENS 1024

/* A layer, random tokens for it, and a cache. */
typedef struct fixture {
    oscar_layer layer;
    oscar_rotations *rotations;
    oscar_cache *cache;
    float *q, *k, *v; /* [MAX_TOKENS, heads, d]: what the token at each position brings */
    int sink, recent;
} fixture;

typedef struct shape {
    int kv_heads, group, d, window, layout, tracked, sink, recent, kv_type;
} shape;

static const shape SMALL = {2, 3, 32, 0, OSCAR_ROPE_ADJACENT, 8, 4, 24, OSCAR_KV_INT2};

static oscar_cache_options options_for(const fixture *f, const shape *s, int n_seqs, int64_t n_tokens) {
    oscar_cache_options o = OSCAR_CACHE_OPTIONS_INIT;
    o.kv_type = s->kv_type;
    o.n_layers = 1;
    o.layers = &f->layer;
    o.rotations = f->rotations;
    o.n_seqs_max = n_seqs;
    o.n_tokens_max = n_tokens;
    o.n_chunk_max = 640;
    o.sink = s->sink;
    o.recent = s->recent;
    o.lookahead = 16;
    return o;
}

static void poison(oscar_cache *cache) {
    memset(cache->history.memory, 0xff, (size_t)cache->history.n_pages * cache->history.page_bytes);
    if (cache->has_overlay) memset(cache->overlay.memory, 0xff, (size_t)cache->overlay.n_pages * cache->overlay.page_bytes);
    memset(cache->thread_memory, 0xff, cache->thread_bytes * 4);
    step_state *s = &cache->step;
    memset(s->partial, 0xff, sizeof(float) * (size_t)cache->max_partials * cache->partial_floats);
}

static void setup(fixture *f, const shape *s, uint64_t seed, int n_seqs, int64_t n_tokens) {
    uint64_t rng = seed;
    memset(f, 0, sizeof *f);
    f->layer = model_layer(s->kv_heads, s->group, s->d, s->window, s->layout);
    f->rotations = model_rotations(&rng, &f->layer, 1, s->tracked);
    f->sink = s->sink;
    f->recent = s->recent;
    size_t kv = (size_t)MAX_TOKENS * (size_t)s->kv_heads * (size_t)s->d;
    f->q = random_floats(&rng, kv * (size_t)s->group, 1.0);
    f->k = random_floats(&rng, kv, 1.0);
    f->v = random_floats(&rng, kv, 1.0);
    oscar_cache_options o = options_for(f, s, n_seqs, n_tokens);
    oscar_error error;
    assert_int_equal(oscar_cache_create(&f->cache, &o, &error), OSCAR_OK);
    poison(f->cache);
}

static void teardown(fixture *f) {
    oscar_cache_free(f->cache);
    oscar_rotations_free(f->rotations);
    aligned_free(f->q);
    aligned_free(f->k);
    aligned_free(f->v);
}

static size_t kv_floats(const fixture *f) { return (size_t)f->layer.n_kv_heads * (size_t)f->layer.head_dim; }
static size_t q_floats(const fixture *f) { return (size_t)f->layer.n_q_heads * (size_t)f->layer.head_dim; }

/* Appends tokens [begin, end) of the fixture to a sequence; out [end - begin, n_q_heads, d]. */
static oscar_status feed(fixture *f, int32_t seq, int begin, int end, float *out, oscar_error *error) {
    int n = end - begin;
    int32_t seqs[MAX_TOKENS], positions[MAX_TOKENS];
    for (int i = 0; i < n; i++) {
        seqs[i] = seq;
        positions[i] = begin + i;
    }
    oscar_status status = oscar_seq_reserve(f->cache, seq, n, error);
    if (status) return status;
    oscar_step step = OSCAR_STEP_INIT;
    step.n_tokens = n;
    step.seqs = seqs;
    step.positions = positions;
    step.q = f->q + (size_t)begin * q_floats(f);
    step.k = f->k + (size_t)begin * kv_floats(f);
    step.v = f->v + (size_t)begin * kv_floats(f);
    step.out = out;
    step.logit_scale = 1.0f / sqrtf((float)f->layer.head_dim);
    status = oscar_cache_attend(f->cache, 0, &step, error);
    if (status) return status;
    return oscar_seq_advance(f->cache, seq, n, error);
}

static void feed_chunks(fixture *f, int32_t seq, int begin, int end, const int *chunks, float *out) {
    oscar_error error;
    for (int at = begin, i = 0; at < end; i++) {
        int n = chunks[i] ? chunks[i] : chunks[i = 0];
        if (n > end - at) n = end - at;
        assert_int_equal(feed(f, seq, at, at + n, out + (size_t)(at - begin) * q_floats(f), &error), OSCAR_OK);
        at += n;
    }
}

static double worst_error(const float *a, const float *b, size_t n) {
    double worst = 0, sum = 0;
    for (size_t i = 0; i < n; i++) {
        double e = fabs((double)a[i] - b[i]);
        if (!(e <= worst)) worst = e; /* NaN counts as worst */
        sum += (double)b[i] * b[i];
    }
    return worst / sqrt(sum / (double)n + 1e-30);
}

/* Every code and parameter of positions [0, n) of two sequences. */
static void assert_same_rows(const oscar_cache *a, int32_t sa, const oscar_cache *b, int32_t sb, int n) {
    const cache_layer *layer = &a->layers[0];
    cache_settle_codes(a, sa);
    cache_settle_codes(b, sb);
    for (int t = 0; t < n; t++)
        for (int h = 0; h < layer->shape.n_kv_heads; h++)
            for (int side = 0; side < 2; side++) {
                uint8_t codes[2][OSCAR_MAX_HEAD_DIM];
                uint16_t params[2][2 * CODEC_MAX_GROUPS];
                const oscar_cache *caches[2] = {a, b};
                const int32_t seqs[2] = {sa, sb};
                const page_side *layout = side ? &layer->v_side : &layer->k_side;
                for (int i = 0; i < 2; i++) {
                    uint8_t *page = pool_page(&caches[i]->history, caches[i]->seqs[seqs[i]].history[t / 64]);
                    page_get_row(layout, layer_history(layer, page, h) + (side ? layer->history_value_offset : 0), t % 64,
                                 codes[i], params[i]);
                }
                assert_memory_equal(codes[0], codes[1], (size_t)layout->head_dim);
                assert_memory_equal(params[0], params[1], sizeof(uint16_t) * 2 * (size_t)layout->n_groups);
            }
}

static double against_model(fixture *f, const float *out, int begin, int end, int stride, bool exact) {
    double worst = 0;
    int d = f->layer.head_dim;
    for (int t = begin; t < end; t += stride)
        for (int h = 0; h < f->layer.n_q_heads; h++) {
            model_query m = {.t = t, .sink = f->sink, .recent = f->recent < 1 ? 1 : f->recent, .exact = exact,
                             .scale = 1.0 / sqrt(d)};
            double want[OSCAR_MAX_HEAD_DIM];
            float got[OSCAR_MAX_HEAD_DIM], wanted[OSCAR_MAX_HEAD_DIM];
            model_attend(&f->rotations->layers[0], &m, h, f->q + (size_t)t * q_floats(f) + (size_t)(h * d), f->k, f->v, want);
            for (int i = 0; i < d; i++) {
                got[i] = out[((size_t)(t - begin) * (size_t)f->layer.n_q_heads + (size_t)h) * (size_t)d + (size_t)i];
                wanted[i] = (float)want[i];
            }
            double e = worst_error(got, wanted, (size_t)d);
            if (!(e <= worst)) worst = e;
        }
    return worst;
}

static void test_against_model(void **state) {
    (void)state;
    uint64_t seed = rng_seed("against_model", 11);
    const shape shapes[] = {
        SMALL,
        {1, 7, 64, 0, OSCAR_ROPE_HALF_SPLIT, 32, 64, 256, OSCAR_KV_INT2},
        {2, 1, 16, 0, OSCAR_ROPE_NONE, 0, 0, 0, OSCAR_KV_INT2},
        {1, 4, 256, 100, OSCAR_ROPE_HALF_SPLIT, 16, 8, 32, OSCAR_KV_INT2},
        {3, 2, 80, 0, OSCAR_ROPE_ADJACENT, 40, 70, 65, OSCAR_KV_INT2},
        {2, 3, 64, 50, OSCAR_ROPE_ADJACENT, 0, 64, 16, OSCAR_KV_F32},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        fixture f;
        setup(&f, &shapes[i], seed + i, 1, MAX_TOKENS);
        int n = 300;
        float *out = calloc((size_t)n * q_floats(&f), sizeof(float));
        feed_chunks(&f, 0, 0, n, (int[]){130, 1, 1, 70, 0}, out);
        double e = against_model(&f, out, 0, n, 41, shapes[i].kv_type == OSCAR_KV_F32);
        printf("shape %zu: worst output error %.2e of the row's rms\n", i, e);
        assert_true(e < (shapes[i].kv_type == OSCAR_KV_F32 ? 2e-5 : 2e-3));
        free(out);
        teardown(&f);
    }
}

/* The same bits however the tokens are cut: decode, verification and prompts sum in one order. */
static void check_chunking(const shape *s, uint64_t seed) {
    enum { N = 600 };
    static const int ways[][4] = {{1, 0}, {7, 0}, {64, 0}, {63, 65, 0}, {128, 0}};
    fixture one;
    setup(&one, s, seed, 1, MAX_TOKENS);
    float *want = calloc(N * q_floats(&one), sizeof(float)), *out = calloc(N * q_floats(&one), sizeof(float));
    feed_chunks(&one, 0, 0, N, (int[]){N, 0}, want);
    for (size_t w = 0; w < sizeof ways / sizeof *ways; w++) {
        fixture f;
        setup(&f, s, seed, 1, MAX_TOKENS);
        feed_chunks(&f, 0, 0, N, ways[w], out);
        if (s->kv_type == OSCAR_KV_INT2) assert_same_rows(one.cache, 0, f.cache, 0, N);
        double e = worst_error(out, want, N * q_floats(&f));
        if (e != 0) fail_msg("head_dim %d: chunks of %d differ by %.2e", s->d, ways[w][0], e);
        teardown(&f);
    }
    free(want);
    free(out);
    teardown(&one);
}

static void test_chunking(void **state) {
    (void)state;
    const shape shapes[] = {
        SMALL,
        {1, 7, 64, 0, OSCAR_ROPE_HALF_SPLIT, 32, 64, 256, OSCAR_KV_INT2},
        {1, 16, 128, 0, OSCAR_ROPE_HALF_SPLIT, 16, 64, 100, OSCAR_KV_INT2},
        {1, 4, 256, 100, OSCAR_ROPE_HALF_SPLIT, 16, 8, 32, OSCAR_KV_INT2},
        {2, 2, 80, 0, OSCAR_ROPE_ADJACENT, 40, 70, 65, OSCAR_KV_INT2},
        {2, 3, 64, 50, OSCAR_ROPE_ADJACENT, 0, 64, 16, OSCAR_KV_F32},
    };
    uint64_t seed = rng_seed("chunking", 5);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) check_chunking(&shapes[i], seed + i);
}

/* A step that was computed but never counted in leaves nothing behind: other tokens take its positions. */
static void test_step_given_up(void **state) {
    (void)state;
    uint64_t seed = rng_seed("step_given_up", 12);
    enum { N = 300 };
    static const int given_up[] = {1, 5, 16, 40};
    fixture plain;
    setup(&plain, &SMALL, seed, 1, MAX_TOKENS);
    float *want = calloc(N * q_floats(&plain), sizeof(float)), *out = calloc(N * q_floats(&plain), sizeof(float));
    feed_chunks(&plain, 0, 0, N, (int[]){N, 0}, want);
    for (size_t w = 0; w < sizeof given_up / sizeof *given_up; w++) {
        fixture f;
        setup(&f, &SMALL, seed, 1, MAX_TOKENS);
        oscar_error error;
        int32_t seqs[40] = {0}, positions[40];
        for (int at = 0; at < N; at += 7) {
            int end = at + 7 < N ? at + 7 : N, n = given_up[w];
            oscar_step step = OSCAR_STEP_INIT;
            for (int i = 0; i < n; i++) positions[i] = at + i;
            assert_int_equal(oscar_seq_reserve(f.cache, 0, n, &error), OSCAR_OK);
            step.n_tokens = n, step.seqs = seqs, step.positions = positions, step.out = out;
            step.q = f.q, step.k = f.k + 400 * kv_floats(&f), step.v = f.v + 400 * kv_floats(&f);
            step.logit_scale = .1f;
            assert_int_equal(oscar_cache_attend(f.cache, 0, &step, &error), OSCAR_OK);
            assert_int_equal(feed(&f, 0, at, end, out, &error), OSCAR_OK);
            assert_true(worst_error(out, want + (size_t)at * q_floats(&f), (size_t)(end - at) * q_floats(&f)) == 0);
        }
        assert_same_rows(plain.cache, 0, f.cache, 0, N);
        teardown(&f);
    }
    free(want), free(out);
    teardown(&plain);
}

/* Two sequences token by token in one batch; the other's rows are 1000 times larger (A16). */
static void test_mixed_batch(void **state) {
    (void)state;
    uint64_t seed = rng_seed("mixed_batch", 6);
    enum { N = 600, CHUNK = 100 };
    fixture alone, mixed;
    setup(&alone, &SMALL, seed, 1, MAX_TOKENS);
    setup(&mixed, &SMALL, seed, 3, 3 * MAX_TOKENS);
    size_t kv = kv_floats(&mixed), qf = q_floats(&mixed);
    float *want = calloc(N * qf, sizeof(float)), *out = calloc(2 * CHUNK * qf, sizeof(float));
    feed_chunks(&alone, 0, 0, N, (int[]){N, 0}, want);
    float *q = calloc(2 * CHUNK * qf, sizeof(float)), *k = calloc(2 * CHUNK * kv, sizeof(float)), *v = calloc(2 * CHUNK * kv, sizeof(float));
    int32_t seqs[2 * CHUNK], positions[2 * CHUNK];
    oscar_error error;
    for (int at = 0; at < N; at += CHUNK) {
        for (int i = 0; i < 2 * CHUNK; i++) {
            int t = at + i / 2;
            float scale = i % 2 ? 1000.0f : 1.0f;
            seqs[i] = i % 2 ? 2 : 1;
            positions[i] = t;
            memcpy(q + (size_t)i * qf, mixed.q + (size_t)t * qf, sizeof(float) * qf);
            for (size_t j = 0; j < kv; j++) {
                k[(size_t)i * kv + j] = scale * mixed.k[(size_t)t * kv + j];
                v[(size_t)i * kv + j] = scale * mixed.v[(size_t)t * kv + j];
            }
        }
        assert_int_equal(oscar_seq_reserve(mixed.cache, 1, CHUNK, &error), OSCAR_OK);
        assert_int_equal(oscar_seq_reserve(mixed.cache, 2, CHUNK, &error), OSCAR_OK);
        oscar_step step = OSCAR_STEP_INIT;
        step.n_tokens = 2 * CHUNK;
        step.seqs = seqs;
        step.positions = positions;
        step.q = q, step.k = k, step.v = v, step.out = out;
        step.logit_scale = 1.0f / sqrtf(32.0f);
        assert_int_equal(oscar_cache_attend(mixed.cache, 0, &step, &error), OSCAR_OK);
        assert_int_equal(oscar_seq_advance(mixed.cache, 1, CHUNK, &error), OSCAR_OK);
        assert_int_equal(oscar_seq_advance(mixed.cache, 2, CHUNK, &error), OSCAR_OK);
        for (int i = 0; i < CHUNK; i++)
            assert_true(worst_error(out + (size_t)(2 * i) * qf, want + (size_t)(at + i) * qf, qf) == 0);
    }
    assert_same_rows(alone.cache, 0, mixed.cache, 1, N);
    free(want), free(out), free(q), free(k), free(v);
    teardown(&alone);
    teardown(&mixed);
}

typedef struct runner {
    oscar_cache *cache;
    int ith, n;
} runner;

#include <pthread.h>
static void *run_thread(void *p) {
    runner *r = p;
    oscar_step_run(r->cache, r->ith, r->n);
    return NULL;
}

/* The same bits for any number of threads: prefill, a token with one piece of pages, one whose pages are shared out, of
 * which a thread takes one to three pieces at once. */
static void test_threads(void **state) {
    (void)state;
    uint64_t seed = rng_seed("threads", 7);
    enum { N = 1000 };
    shape s = SMALL;
    s.d = 64;
    s.kv_heads = 8; /* 24 pieces of 1,001 tokens */
    float *first = NULL;
    for (int threads = 1; threads <= 8; threads++) {
        fixture f;
        setup(&f, &s, seed, 1, MAX_TOKENS + 64);
        float *out = calloc((size_t)(N + 1) * q_floats(&f), sizeof(float));
        int32_t seqs[N + 1] = {0}, positions[N + 1];
        oscar_error error;
        const int parts[] = {0, 40, 41, 640, N, N + 1};
        for (int part = 0; part < 5; part++) {
            int begin = parts[part], n = parts[part + 1] - begin;
            for (int i = 0; i < n; i++) positions[i] = begin + i;
            assert_int_equal(oscar_seq_reserve(f.cache, 0, n, &error), OSCAR_OK);
            oscar_step step = OSCAR_STEP_INIT;
            step.n_tokens = n;
            step.seqs = seqs, step.positions = positions;
            step.q = f.q + (size_t)begin * q_floats(&f);
            step.k = f.k + (size_t)begin * kv_floats(&f);
            step.v = f.v + (size_t)begin * kv_floats(&f);
            step.out = out + (size_t)begin * q_floats(&f);
            step.logit_scale = 0.125f;
            assert_int_equal(oscar_step_prepare(f.cache, 0, &step, &error), OSCAR_OK);
            pthread_t ids[8];
            runner r[8];
            for (int i = 0; i < threads; i++) {
                r[i] = (runner){f.cache, i, threads};
                assert_int_equal(pthread_create(&ids[i], NULL, run_thread, &r[i]), 0);
            }
            for (int i = 0; i < threads; i++) pthread_join(ids[i], NULL);
            assert_int_equal(oscar_step_finish(f.cache, &error), OSCAR_OK);
            assert_int_equal(oscar_seq_advance(f.cache, 0, n, &error), OSCAR_OK);
        }
        if (!first)
            first = out;
        else {
            assert_memory_equal(first, out, sizeof(float) * (size_t)(N + 1) * q_floats(&f));
            free(out);
        }
        teardown(&f);
    }
    free(first);
}

/* Rollback within the lookahead, and a fork, against a cache that never went there. */
static void test_rollback_and_fork(void **state) {
    (void)state;
    uint64_t seed = rng_seed("rollback_and_fork", 8);
    enum { N = 500 };
    fixture plain, f;
    setup(&plain, &SMALL, seed, 1, MAX_TOKENS);
    setup(&f, &SMALL, seed, 3, 3 * MAX_TOKENS);
    size_t qf = q_floats(&f);
    float *want = calloc(N * qf, sizeof(float)), *out = calloc(N * qf, sizeof(float));
    oscar_error error;
    int64_t missing;
    feed_chunks(&plain, 0, 0, N, (int[]){N, 0}, want);
    feed_chunks(&f, 0, 0, 300, (int[]){77, 0}, out);
    /* A wrong branch of 12 tokens, taken back; its rows are other tokens' rows. */
    fixture other;
    setup(&other, &SMALL, seed + 1, 1, 64);
    float *q = f.q, *k = f.k, *v = f.v;
    f.q = other.q, f.k = other.k, f.v = other.v;
    feed_chunks(&f, 0, 300, 312, (int[]){5, 0}, out);
    f.q = q, f.k = k, f.v = v;
    assert_int_equal(oscar_seq_truncate(f.cache, 0, 300, &missing, &error), OSCAR_OK);
    assert_int_equal(missing, 0);
    assert_int_equal(oscar_seq_fork(f.cache, 1, 0, 290, &error), OSCAR_OK);
    feed_chunks(&f, 0, 300, N, (int[]){90, 1, 0}, out);
    assert_true(worst_error(out, want + 300 * qf, 200 * qf) == 0);
    feed_chunks(&f, 1, 290, N, (int[]){33, 0}, out);
    assert_true(worst_error(out, want + 290 * qf, 210 * qf) == 0);
    assert_same_rows(plain.cache, 0, f.cache, 0, N);
    assert_same_rows(plain.cache, 0, f.cache, 1, N);

    /* Four full pages of the first 290 tokens are held once. */
    oscar_cache_stats stats = {.struct_size = sizeof stats};
    oscar_cache_get_stats(f.cache, &stats);
    assert_int_equal(stats.pages_shared, 4);
    assert_int_equal(stats.pages_live, 2 * 8 - 4);
    assert_int_equal(stats.pages_live + stats.pages_free, stats.pages_total);
    for (int s = 0; s < 3; s++) oscar_seq_clear(f.cache, s, &error);
    oscar_cache_get_stats(f.cache, &stats);
    assert_int_equal(stats.pages_live, 0);
    assert_int_equal(stats.overlay_pages_live, 0);
    free(want), free(out);
    teardown(&other);
    teardown(&plain);
    teardown(&f);
}

/* A deep rollback says how many rows are gone, and is right by the contract once the window is full
 * of new tokens again. */
static void test_deep_rollback(void **state) {
    (void)state;
    uint64_t seed = rng_seed("deep_rollback", 9);
    enum { N = 500 };
    fixture plain, f;
    setup(&plain, &SMALL, seed, 1, MAX_TOKENS);
    setup(&f, &SMALL, seed, 1, MAX_TOKENS);
    size_t qf = q_floats(&f);
    float *want = calloc(N * qf, sizeof(float)), *out = calloc(N * qf, sizeof(float));
    oscar_error error;
    int64_t missing;
    feed_chunks(&plain, 0, 0, N, (int[]){N, 0}, want);
    feed_chunks(&f, 0, 0, N, (int[]){N, 0}, out);
    assert_int_equal(oscar_seq_truncate(f.cache, 0, 200, &missing, &error), OSCAR_OK);
    assert_int_equal(missing, SMALL.recent - 1);
    feed_chunks(&f, 0, 200, 400, (int[]){10, 0}, out);
    assert_true(worst_error(out, want + 200 * qf, qf) > 1e-4); /* the first sees fewer BF16 rows */
    assert_true(worst_error(out + 24 * qf, want + 224 * qf, 176 * qf) == 0);
    assert_same_rows(plain.cache, 0, f.cache, 0, 400);
    /* Back into the sink: nothing is missing. */
    assert_int_equal(oscar_seq_truncate(f.cache, 0, 3, &missing, &error), OSCAR_OK);
    assert_int_equal(missing, 0);
    feed_chunks(&f, 0, 3, 300, (int[]){50, 0}, out);
    assert_true(worst_error(out, want + 3 * qf, 297 * qf) == 0);
    free(want), free(out);
    teardown(&plain);
    teardown(&f);
}

/* V of KV head h is the constant h: query head i gives floor(i / ratio) (A09). */
static void test_gqa_ratios(void **state) {
    (void)state;
    const int ratios[] = {1, 2, 3, 5, 6, 7, 8, 12, 16, 24, 71};
    for (size_t r = 0; r < sizeof ratios / sizeof *ratios; r++) {
        shape s = {3, ratios[r], 16, 0, OSCAR_ROPE_NONE, 0, 4, 8, OSCAR_KV_INT2};
        fixture f;
        setup(&f, &s, 3, 1, 256);
        rotations_layer *l = &f.rotations->layers[0];
        aligned_free(l->v_rotation), l->v_rotation = NULL; /* the view in the cache goes too */
        for (int h = 0; h < 3; h++) f.cache->layers[0].v_codec[h].rotation = NULL;
        memset(l->v_mean, 0, sizeof(float) * 48);
        for (int t = 0; t < 100; t++)
            for (int h = 0; h < 3; h++)
                for (int i = 0; i < 16; i++) f.v[(t * 3 + h) * 16 + i] = (float)h;
        float *out = calloc(100 * q_floats(&f), sizeof(float));
        feed_chunks(&f, 0, 0, 100, (int[]){60, 1, 0}, out);
        for (int t = 0; t < 100; t++)
            for (int h = 0; h < f.layer.n_q_heads; h++)
                for (int i = 0; i < 16; i++) {
                    float got = out[((size_t)t * (size_t)f.layer.n_q_heads + (size_t)h) * 16 + (size_t)i];
                    float want = (float)(h / ratios[r]);
                    assert_float_equal(got, want, 1e-3);
                }
        free(out);
        teardown(&f);
    }
    oscar_layer bad = model_layer(2, 1, 16, 0, OSCAR_ROPE_NONE);
    bad.n_q_heads = 33;
    oscar_cache_options o = OSCAR_CACHE_OPTIONS_INIT;
    o.kv_type = OSCAR_KV_F32, o.n_layers = 1, o.layers = &bad, o.n_tokens_max = 64;
    oscar_cache *cache;
    oscar_error error;
    assert_int_equal(oscar_cache_create(&cache, &o, &error), OSCAR_ERROR_ARGUMENT);
    assert_null(cache);
}

/* One key gives logit `a`, one 0; V = 1 and 0. Returns the weight of the first. */
static float two_keys(int kv_type, float a, float softcap, const float *sink_logits, bool decode) {
    shape s = {1, 1, 16, 0, OSCAR_ROPE_NONE, 0, 4, 8, kv_type};
    fixture f;
    setup(&f, &s, 3, 1, 64);
    for (int i = 0; i < 32; i++) f.k[i] = 0, f.v[i] = i < 16, f.q[i] = 0;
    f.k[0] = 1;
    f.q[16] = a;
    memset(f.rotations->layers[0].v_mean, 0, sizeof(float) * 16);
    int32_t seqs[2] = {0, 0}, positions[2] = {0, 1};
    float out[32];
    oscar_error error;
    oscar_seq_reserve(f.cache, 0, 2, &error);
    for (int at = 0; at < 2; at += decode ? 1 : 2) {
        oscar_step step = OSCAR_STEP_INIT;
        step.n_tokens = decode ? 1 : 2;
        step.seqs = seqs + at, step.positions = positions + at;
        step.q = f.q + at * 16, step.k = f.k + at * 16, step.v = f.v + at * 16, step.out = out + at * 16;
        step.logit_softcap = softcap;
        step.sink_logits = sink_logits;
        assert_int_equal(oscar_cache_attend(f.cache, 0, &step, &error), OSCAR_OK);
        oscar_seq_advance(f.cache, 0, step.n_tokens, &error);
    }
    teardown(&f);
    return out[16 + 3];
}

static void test_softcap_and_sinks(void **state) {
    (void)state;
    for (int kv = 0; kv < 2; kv++)
        for (int decode = 0; decode < 2; decode++) {
            double tolerance = kv == OSCAR_KV_F32 ? 1e-6 : 3e-3; /* values in BF16 */
            assert_float_equal(two_keys(kv, 10, 5, NULL, decode), 0.991999, tolerance);
            assert_float_equal(two_keys(kv, 10, 0, NULL, decode), 0.999955, tolerance);
            float sink = logf(2);
            /* Logits 0, 0 and a sink of ln 2: weights 1/4, 1/4, 1/2. */
            assert_float_equal(two_keys(kv, 0, 0, &sink, decode), 0.25, tolerance);
        }
    fixture f;
    setup(&f, &SMALL, 3, 1, 64);
    oscar_error error;
    int32_t zero = 0;
    float out[192];
    oscar_seq_reserve(f.cache, 0, 1, &error);
    oscar_step step = OSCAR_STEP_INIT;
    step.n_tokens = 1, step.seqs = &zero, step.positions = &zero;
    step.q = f.q, step.k = f.k, step.v = f.v, step.out = out;
    const float bad[] = {-1.0f, NAN, INFINITY};
    for (int i = 0; i < 3; i++) {
        step.logit_softcap = bad[i];
        assert_int_equal(oscar_cache_attend(f.cache, 0, &step, &error), OSCAR_ERROR_ARGUMENT);
    }
    teardown(&f);
}

/* A14: bytes depend on the length alone; A12: sink rows stay. */
static void test_memory_by_length(void **state) {
    (void)state;
    shape s = SMALL;
    s.sink = 4, s.recent = 8;
    int64_t live[2], overlay[2];
    for (int way = 0; way < 2; way++) {
        fixture f;
        setup(&f, &s, 4, 1, MAX_TOKENS);
        float *out = calloc(1000 * q_floats(&f), sizeof(float));
        if (way == 0)
            feed_chunks(&f, 0, 0, 1000, (int[]){500, 0}, out);
        else
            feed_chunks(&f, 0, 0, 1000, (int[]){32, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0}, out);
        oscar_cache_stats stats = {.struct_size = sizeof stats};
        oscar_cache_get_stats(f.cache, &stats);
        live[way] = stats.pages_live;
        overlay[way] = stats.overlay_pages_live;
        free(out);
        teardown(&f);
    }
    assert_int_equal(live[0], 16);
    assert_int_equal(live[0], live[1]);
    assert_int_equal(overlay[0], overlay[1]);
    assert_int_equal(overlay[0], 2); /* the sink's page, and the last one: 1000 - 24 = 976 is in it */
}

/* What all of it is for: a fifth of fp16's bytes at 32K tokens and head_dim 64, a sixth at 128, windows included.
 * Only the chunks with the sink and the recent rows are computed: the rest is room that is counted. */
static void test_memory_at_32k(void **state) {
    (void)state;
    enum { N = 32768, CHUNK = 512 };
    for (int wide = 0; wide < 2; wide++) {
        const shape s = {2, 1, wide ? 128 : 64, 0, OSCAR_ROPE_HALF_SPLIT, 16, 64, 256, OSCAR_KV_INT2};
        fixture f;
        setup(&f, &s, 12, 1, N);
        oscar_error error;
        float *out = calloc(CHUNK * q_floats(&f), sizeof(float));
        int32_t seqs[CHUNK] = {0}, positions[CHUNK];
        for (int at = 0; at < N; at += CHUNK) {
            for (int i = 0; i < CHUNK; i++) positions[i] = at + i;
            oscar_step step = OSCAR_STEP_INIT;
            step.n_tokens = CHUNK, step.seqs = seqs, step.positions = positions;
            step.q = f.q, step.k = f.k, step.v = f.v, step.out = out;
            step.logit_scale = .1f;
            assert_int_equal(oscar_seq_reserve(f.cache, 0, CHUNK, &error), OSCAR_OK);
            if (at == 0 || at + CHUNK == N) assert_int_equal(oscar_cache_attend(f.cache, 0, &step, &error), OSCAR_OK);
            assert_int_equal(oscar_seq_advance(f.cache, 0, CHUNK, &error), OSCAR_OK);
        }
        oscar_cache_stats stats = {.struct_size = sizeof stats};
        oscar_cache_get_stats(f.cache, &stats);
        assert_int_equal(stats.pages_live, N / 64);
        assert_true(stats.overlay_pages_live >= (64 + 256) / 64);
        const int64_t exact = stats.exact_bytes_per_token * N, bytes = stats.history_bytes + stats.overlay_bytes;
        print_message("head_dim %d: 1/%.2f of fp16\n", s.d, (double)exact / (double)bytes);
        assert_true((wide ? 6 : 5) * bytes <= exact);
        free(out);
        teardown(&f);
    }
}

static void test_no_space(void **state) {
    (void)state;
    fixture f;
    setup(&f, &SMALL, 3, 2, 192); /* three pages */
    float *out = calloc(MAX_TOKENS * q_floats(&f), sizeof(float));
    oscar_error error;
    assert_int_equal(feed(&f, 0, 0, 100, out, &error), OSCAR_OK);
    assert_int_equal(oscar_seq_reserve(f.cache, 1, 65, &error), OSCAR_ERROR_NO_SPACE);
    assert_int_equal(oscar_seq_length(f.cache, 1), 0);
    assert_int_equal(feed(&f, 1, 0, 64, out, &error), OSCAR_OK);
    assert_int_equal(oscar_seq_fork(f.cache, 1, 0, 100, &error), OSCAR_OK); /* takes the page it freed */
    assert_int_equal(oscar_seq_reserve(f.cache, 0, 29, &error), OSCAR_ERROR_NO_SPACE);
    assert_int_equal(feed(&f, 0, 100, 128, out, &error), OSCAR_OK);
    /* Not reserved, wrong position, wrong sequence. */
    int32_t zero = 0, seven = 7;
    oscar_step step = OSCAR_STEP_INIT;
    step.n_tokens = 1, step.q = f.q, step.k = f.k, step.v = f.v, step.out = out;
    step.seqs = &zero, step.positions = &seven;
    assert_int_equal(oscar_cache_attend(f.cache, 0, &step, &error), OSCAR_ERROR_ARGUMENT);
    step.seqs = &seven;
    assert_int_equal(oscar_cache_attend(f.cache, 0, &step, &error), OSCAR_ERROR_ARGUMENT);
    int32_t at = 128;
    step.seqs = &zero, step.positions = &at;
    assert_int_equal(oscar_cache_attend(f.cache, 0, &step, &error), OSCAR_ERROR_ARGUMENT);
    assert_non_null(strstr(error.message, "reserved"));
    free(out);
    teardown(&f);
}

static void test_not_finite(void **state) {
    (void)state;
    for (int kv = 0; kv < 2; kv++) {
        shape s = SMALL;
        s.kv_type = kv;
        fixture f, clean;
        setup(&f, &s, 3, 2, 256);
        setup(&clean, &s, 3, 2, 256);
        size_t qf = q_floats(&f);
        float *out = calloc(64 * qf, sizeof(float)), *want = calloc(64 * qf, sizeof(float));
        oscar_error error;
        f.v[40 * kv_floats(&f) + 5] = NAN;
        assert_int_equal(feed(&f, 0, 0, 60, out, &error), OSCAR_ERROR_NOT_FINITE);
        assert_int_equal(error.position, 40);
        assert_int_equal(feed(&clean, 0, 0, 60, want, &error), OSCAR_OK);
        assert_memory_equal(out, want, sizeof(float) * 40 * qf); /* earlier tokens are unaffected */
        for (size_t i = 0; i < 60 * qf; i++) assert_true(isfinite(out[i]));
        free(out), free(want);
        teardown(&f);
        teardown(&clean);
    }
}

/* One token in several sequences at once, as llama.cpp's shared prompts are. */
static void test_shared_tokens(void **state) {
    (void)state;
    fixture plain, f;
    setup(&plain, &SMALL, 3, 1, MAX_TOKENS);
    setup(&f, &SMALL, 3, 3, 3 * MAX_TOKENS);
    size_t qf = q_floats(&f);
    float *want = calloc(200 * qf, sizeof(float)), *out = calloc(200 * qf, sizeof(float));
    feed_chunks(&plain, 0, 0, 200, (int[]){200, 0}, want);
    int32_t seqs[300], offsets[101], positions[100];
    for (int i = 0; i < 100; i++) {
        for (int j = 0; j < 3; j++) seqs[3 * i + j] = 2 - j;
        offsets[i] = 3 * i;
        positions[i] = i;
    }
    offsets[100] = 300;
    oscar_error error;
    for (int s = 0; s < 3; s++) oscar_seq_reserve(f.cache, s, 100, &error);
    oscar_step step = OSCAR_STEP_INIT;
    step.n_tokens = 100, step.seqs = seqs, step.seq_offsets = offsets, step.positions = positions;
    step.q = f.q, step.k = f.k, step.v = f.v, step.out = out;
    step.logit_scale = 1.0f / sqrtf(32.0f);
    assert_int_equal(oscar_cache_attend(f.cache, 0, &step, &error), OSCAR_OK);
    for (int s = 0; s < 3; s++) oscar_seq_advance(f.cache, s, 100, &error);
    assert_true(worst_error(out, want, 100 * qf) == 0);
    for (int s = 0; s < 3; s++) {
        feed_chunks(&f, s, 100, 200, (int[]){40, 0}, out);
        assert_true(worst_error(out, want + 100 * qf, 100 * qf) == 0);
        assert_same_rows(plain.cache, 0, f.cache, s, 200);
    }
    free(want), free(out);
    teardown(&plain);
    teardown(&f);
}

/* A restored sequence goes on as if it had never been away; a cut or flipped one changes nothing. */
static void test_save_and_restore(void **state) {
    (void)state;
    uint64_t seed = rng_seed("save_and_restore", 12);
    for (int kv = 0; kv < 2; kv++) {
        shape s = SMALL;
        s.kv_type = kv;
        fixture f, g;
        setup(&f, &s, seed, 2, MAX_TOKENS);
        setup(&g, &s, seed, 2, MAX_TOKENS);
        size_t qf = q_floats(&f);
        float *want = calloc(400 * qf, sizeof(float)), *out = calloc(400 * qf, sizeof(float));
        feed_chunks(&f, 0, 0, 300, (int[]){100, 0}, want);
        size_t n = oscar_seq_save_bytes(f.cache, 0), used;
        uint8_t *saved = malloc(n);
        oscar_error error;
        assert_int_equal(oscar_seq_save(f.cache, 0, saved, n - 1, &error), OSCAR_ERROR_ARGUMENT);
        assert_int_equal(oscar_seq_save(f.cache, 0, saved, n, &error), OSCAR_OK);
        assert_int_equal(oscar_seq_restore(g.cache, 1, saved, n, &used, &error), OSCAR_OK);
        assert_int_equal(used, n);
        feed_chunks(&f, 0, 300, 400, (int[]){30, 0}, want);
        feed_chunks(&g, 1, 300, 390, (int[]){30, 0}, out);
        assert_int_equal(oscar_seq_truncate(g.cache, 1, 380, NULL, &error), OSCAR_OK);
        feed_chunks(&g, 1, 380, 400, (int[]){30, 0}, out + 80 * qf);
        assert_true(worst_error(out, want, 100 * qf) == 0);

        /* Flips and cuts: a spread of bytes, all of the header. */
        for (size_t i = 0; i < n; i += i < 72 ? 1 : 997) {
            saved[i] ^= 0x10;
            assert_int_not_equal(oscar_seq_restore(g.cache, 1, saved, n, NULL, &error), OSCAR_OK);
            saved[i] ^= 0x10;
            assert_int_not_equal(oscar_seq_restore(g.cache, 1, saved, i, NULL, &error), OSCAR_OK);
        }
        assert_int_equal(oscar_seq_length(g.cache, 1), 400);

        /* Under other windows, bits or rotations. */
        for (int way = 0; way < 3; way++) {
            if (kv == OSCAR_KV_F32 && way > 0) break;
            oscar_cache_options o = options_for(&g, &s, 1, MAX_TOKENS);
            if (way == 0) o.recent++;
            if (way == 1) o.bits_k = 3;
            if (way == 2) g.rotations->layers[0].k_mean[0] += 1.0f;
            oscar_cache *other;
            assert_int_equal(oscar_cache_create(&other, &o, &error), OSCAR_OK);
            assert_int_equal(oscar_seq_restore(other, 0, saved, n, NULL, &error), OSCAR_ERROR_MISMATCH);
            oscar_cache_free(other);
        }
        free(saved), free(want), free(out);
        teardown(&f);
        teardown(&g);
    }
}

/* Attention takes the smallest floats for zeros; its caller's stay. */
static void test_small_floats(void **state) {
    (void)state;
    fixture f;
    setup(&f, &SMALL, 5, 1, MAX_TOKENS);
    volatile float small = 1e-38f;
    float *out = calloc(200 * q_floats(&f), sizeof(float));
    feed_chunks(&f, 0, 0, 200, (int[]){64, 0}, out);
    assert_true(small * 0.01f > 0);
    free(out);
    teardown(&f);
}

static void test_create_errors(void **state) {
    (void)state;
    fixture f;
    setup(&f, &SMALL, 3, 1, 64);
    oscar_cache_options o = options_for(&f, &SMALL, 1, 64), bad;
    oscar_cache *cache;
    oscar_error error;
    /* 32 TiB, which no machine has. */
    const shape large = {8, 1, 256, 0, OSCAR_ROPE_NONE, 0, 4, 8, OSCAR_KV_F32};
    fixture g;
    setup(&g, &large, 3, 1, 64);
    bad = options_for(&g, &large, 1, INT32_MAX - 8192);
    assert_int_equal(oscar_cache_create(&cache, &bad, &error), OSCAR_ERROR_MEMORY);
    assert_non_null(strstr(error.message, "takes 3"));
    teardown(&g);
    bad = o, bad.rotations = NULL;
    assert_int_equal(oscar_cache_create(&cache, &bad, &error), OSCAR_ERROR_ARGUMENT);
    bad = o, bad.bits_k = 5;
    assert_int_equal(oscar_cache_create(&cache, &bad, &error), OSCAR_ERROR_ARGUMENT);
    oscar_layer other = f.layer;
    other.head_dim = 48;
    bad = o, bad.layers = &other;
    assert_int_equal(oscar_cache_create(&cache, &bad, &error), OSCAR_ERROR_MISMATCH);
    other = f.layer, other.rope.inv_freq[3] *= 1.01f;
    assert_int_equal(oscar_cache_create(&cache, &bad, &error), OSCAR_ERROR_MISMATCH);
    other = f.layer, other.head_dim = 40;
    assert_int_equal(oscar_cache_create(&cache, &bad, &error), OSCAR_ERROR_UNSUPPORTED);
    assert_non_null(strstr(error.message, "40"));
    teardown(&f);
}

static void test_bits(void **state) {
    (void)state;
    /* DESIGN: b + 32/G bits an element. */
    const struct { int d; double bits; } cases[] = {{64, 2.5}, {128, 2.25}, {256, 2.25}, {80, 2.4}, {96, 2 + 1.0 / 3}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        shape s = {1, 1, cases[i].d, 0, OSCAR_ROPE_NONE, 0, 4, 8, OSCAR_KV_INT2};
        fixture f;
        setup(&f, &s, 3, 1, 64);
        oscar_cache_stats stats = {.struct_size = sizeof stats};
        oscar_cache_get_stats(f.cache, &stats);
        assert_float_equal(stats.history_bits, cases[i].bits, 0.02);
        teardown(&f);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_model), cmocka_unit_test(test_chunking),
        cmocka_unit_test(test_step_given_up), cmocka_unit_test(test_mixed_batch),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_rollback_and_fork), cmocka_unit_test(test_deep_rollback),
        cmocka_unit_test(test_gqa_ratios),    cmocka_unit_test(test_softcap_and_sinks),
        cmocka_unit_test(test_memory_by_length), cmocka_unit_test(test_memory_at_32k), cmocka_unit_test(test_no_space),
        cmocka_unit_test(test_not_finite),    cmocka_unit_test(test_shared_tokens),
        cmocka_unit_test(test_save_and_restore), cmocka_unit_test(test_small_floats), cmocka_unit_test(test_create_errors),
        cmocka_unit_test(test_bits),
    };
    int failed = 0;
    const char *only = getenv("OSCAR_ISA");
    for (int i = 0; i < ISA_COUNT; i++)
        if ((!only || strcmp(only, isa_names[i]) == 0) && oscar_isa_select(isa_names[i]) == OSCAR_OK)
            failed += cmocka_run_group_tests_name(isa_names[i], tests, NULL, NULL);
    return failed;
}
