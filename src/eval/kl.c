/* KL divergence, perplexity and agreement of rows of logits. */
#include "eval/kl.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#include "base/base.h"

#define LANES 8
#define BLOCK 256

/* 2^n e^r with |r| <= ln 2 / 2; plain float arithmetic, so that the compiler turns loops over it
 * into vectors. Rounding by the magic number 1.5 * 2^23 needs no instruction of its own. */
static inline float exp_inline(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * bits_float((uint32_t)((int32_t)n + 127) << 23);
}

float kl_exp(float x) { return exp_inline(x); }

static float row_max(int32_t n, const float *x) {
    float most[LANES];
    for (int l = 0; l < LANES; l++) most[l] = -INFINITY;
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) most[l] = x[i + l] > most[l] ? x[i + l] : most[l];
    for (; i < n; i++) most[0] = x[i] > most[0] ? x[i] : most[0];
    for (int l = 1; l < LANES; l++) most[0] = most[l] > most[0] ? most[l] : most[0];
    return most[0];
}

static int32_t first_equal(int32_t n, const float *x, float value) {
    for (int32_t i = 0; i < n; i++)
        if (x[i] == value) return i;
    return 0;
}

static double lane_sum(const double *lanes) {
    double sum = 0;
    for (int l = 0; l < LANES; l++) sum += lanes[l];
    return sum;
}

/* log sum e^x; the exponentials e^(x - most) go to `terms` [n] unless NULL. NaN when a logit is
 * NaN or plus infinity (a NaN lane never wins the maximum, but its exponential stays in the sum). */
static double log_sum_exp(int32_t n, const float *x, float most, float *terms) {
    double lanes[LANES] = {0};
    float block[BLOCK];
    for (int32_t at = 0; at < n; at += BLOCK) {
        int32_t count = n - at < BLOCK ? n - at : BLOCK;
        float *out = terms ? terms + at : block;
        for (int32_t i = 0; i < count; i++) out[i] = exp_inline(x[at + i] - most) + (x[at + i] - x[at + i]);
        int32_t i = 0;
        for (; i + LANES <= count; i += LANES)
            for (int l = 0; l < LANES; l++) lanes[l] += (double)out[i + l];
        for (; i < count; i++) lanes[0] += (double)out[i];
    }
    return (double)most + log(lane_sum(lanes));
}

/* sum p (x - y) */
static double weighted_difference(int32_t n, const float *p, const float *x, const float *y) {
    double lanes[LANES] = {0};
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] += (double)p[i + l] * ((double)x[i + l] - (double)y[i + l]);
    for (; i < n; i++) lanes[0] += (double)p[i] * ((double)x[i] - (double)y[i]);
    return lane_sum(lanes);
}

/* Rows dealt to threads; fixed work for each row, so results do not depend on their number. */
typedef struct kl_job {
    kl_reference *reference;
    const float *logits; /* NULL: fill the reference from its own copy */
    const int32_t *targets;
    kl_row *rows;
    int ith, n_threads;
} kl_job;

static void reference_row(kl_reference *ref, int32_t r, int32_t target, kl_row *row) {
    size_t at = (size_t)r * (size_t)ref->n_vocab;
    const float *x = ref->logits + at;
    float *p = ref->prob + at;
    float most = row_max(ref->n_vocab, x);
    ref->top[r] = first_equal(ref->n_vocab, x, most);
    ref->log_sum[r] = log_sum_exp(ref->n_vocab, x, most, p);
    float scale = (float)exp((double)most - ref->log_sum[r]);
    for (int32_t i = 0; i < ref->n_vocab; i++) p[i] *= scale;
    *row = (kl_row){0, ref->log_sum[r] - (double)x[target], true, isfinite(ref->log_sum[r])};
}

static void method_row(const kl_reference *ref, const float *y, int32_t r, int32_t target, kl_row *row) {
    size_t at = (size_t)r * (size_t)ref->n_vocab;
    float most = row_max(ref->n_vocab, y);
    double log_sum = log_sum_exp(ref->n_vocab, y, most, NULL);
    double kl = weighted_difference(ref->n_vocab, ref->prob + at, ref->logits + at, y) - ref->log_sum[r] + log_sum;
    row->finite = isfinite(log_sum) && isfinite(kl);
    row->kl = kl > 0 ? kl : 0;
    row->nll = log_sum - (double)y[target];
    row->top1 = first_equal(ref->n_vocab, y, most) == ref->top[r];
}

static void *run_job(void *argument) {
    kl_job *job = argument;
    for (int32_t r = job->ith; r < job->reference->n_rows; r += job->n_threads) {
        if (job->logits)
            method_row(job->reference, job->logits + (size_t)r * (size_t)job->reference->n_vocab, r, job->targets[r], &job->rows[r]);
        else
            reference_row(job->reference, r, job->targets[r], &job->rows[r]);
    }
    return NULL;
}

static void run_jobs(kl_job job) {
    enum { MAX_THREADS = 16 };
    kl_job jobs[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    bool started[MAX_THREADS] = {false};
    if (job.n_threads > MAX_THREADS) job.n_threads = MAX_THREADS;
    if (job.n_threads < 1) job.n_threads = 1;
    for (int i = job.n_threads - 1; i >= 0; i--) {
        jobs[i] = job;
        jobs[i].ith = i;
        /* A thread that cannot be had leaves its rows to this one. */
        started[i] = i > 0 && pthread_create(&threads[i], NULL, run_job, &jobs[i]) == 0;
        if (!started[i]) run_job(&jobs[i]);
    }
    for (int i = 1; i < job.n_threads; i++)
        if (started[i]) pthread_join(threads[i], NULL);
}

bool kl_reference_init(kl_reference *reference, int32_t n_vocab, int32_t n_rows_max) {
    memset(reference, 0, sizeof *reference);
    reference->n_vocab = n_vocab;
    reference->n_rows_max = n_rows_max;
    size_t rows = (size_t)n_rows_max, n = 0;
    if (!size_mul(rows, (size_t)n_vocab, &n)) return false;
    reference->logits = aligned_calloc(n, sizeof(float));
    reference->prob = aligned_calloc(n, sizeof(float));
    reference->log_sum = aligned_calloc(rows, sizeof(double));
    reference->top = aligned_calloc(rows, sizeof(int32_t));
    if (reference->logits && reference->prob && reference->log_sum && reference->top) return true;
    kl_reference_destroy(reference);
    return false;
}

void kl_reference_destroy(kl_reference *reference) {
    aligned_free(reference->logits);
    aligned_free(reference->prob);
    aligned_free(reference->log_sum);
    aligned_free(reference->top);
    memset(reference, 0, sizeof *reference);
}

void kl_set_reference(kl_reference *reference, int32_t n_rows, const float *logits, const int32_t *targets,
                      int n_threads, kl_row *rows) {
    reference->n_rows = n_rows;
    memcpy(reference->logits, logits, (size_t)n_rows * (size_t)reference->n_vocab * sizeof *logits);
    run_jobs((kl_job){reference, NULL, targets, rows, 0, n_threads});
}

void kl_compare(const kl_reference *reference, const float *logits, const int32_t *targets, int n_threads, kl_row *rows) {
    run_jobs((kl_job){(kl_reference *)reference, logits, targets, rows, 0, n_threads});
}

static int compare_float(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

double kl_quantile(float *values, int64_t n, double q) {
    qsort(values, (size_t)n, sizeof *values, compare_float);
    double at = q * (double)(n - 1);
    int64_t low = (int64_t)at;
    if (low >= n - 1) return (double)values[n - 1];
    double part = at - (double)low;
    return (double)values[low] * (1 - part) + (double)values[low + 1] * part;
}
