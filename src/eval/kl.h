/*
 * kl.h - how far one next-token distribution is from another.
 *
 * KL(p || q) = sum p (x - y) - log sum e^x + log sum e^y for logits x (exact) and y (method): no
 * logarithm of a probability is taken, and equal logits give exactly 0. Exponentials are float32,
 * sums float64: the absolute error is below 1e-6.
 */
#ifndef OSCAR_KL_H
#define OSCAR_KL_H

#include <stdbool.h>
#include <stdint.h>

/* The exact model's distributions of a batch of positions. */
typedef struct kl_reference {
    int32_t n_vocab, n_rows_max, n_rows;
    float *logits;   /* [n_rows_max, n_vocab] */
    float *prob;     /* [n_rows_max, n_vocab] */
    double *log_sum; /* [n_rows_max] log of the sum of e^logit */
    int32_t *top;    /* [n_rows_max] index of the first largest logit */
} kl_reference;

/* One position of a method. */
typedef struct kl_row {
    double kl;    /* KL(exact || method), nats, never below 0 */
    double nll;   /* -log of the probability that the method gives the target token */
    bool top1;    /* same most probable token as the exact model */
    bool finite;  /* false: a logit was NaN or infinite, the other members mean nothing */
} kl_row;

bool kl_reference_init(kl_reference *reference, int32_t n_vocab, int32_t n_rows_max);
void kl_reference_destroy(kl_reference *reference);
/* Copies n_rows rows of logits [n_rows, n_vocab] and computes the rest on n_threads threads.
 * targets: [n_rows] the tokens that follow. rows: [n_rows] the exact model's own results (kl 0). */
void kl_set_reference(kl_reference *reference, int32_t n_rows, const float *logits,
                      const int32_t *targets, int n_threads, kl_row *rows);
/* Compares logits [reference->n_rows, n_vocab]. rows: [n_rows]. */
void kl_compare(const kl_reference *reference, const float *logits, const int32_t *targets,
                int n_threads, kl_row *rows);

/* The q-quantile (0 .. 1) of values [n], linear between order statistics; sorts them. n >= 1. */
double kl_quantile(float *values, int64_t n, double q);

/* e^x to 2 units in the last place for x <= 0, 0 below -87. */
float kl_exp(float x);

#endif
