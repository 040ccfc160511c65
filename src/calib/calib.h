/*
 * calib.h - from the rows that a model's attention sees to the rotations that its cache uses.
 *
 * Three steps, each over data that streams by; memory does not grow with the number of tokens:
 *   1. calib_add() sums what every layer's queries, keys, values and outputs look like,
 *   2. calib_fit() turns the sums into rotations, metrics and means (docs/METHOD.md),
 *   3. heldout_*() measures rotations on tokens that were not summed, which decides how many rotary
 *      pairs get a tracked mean, where the gain correction helps, and which layers need more bits.
 * Nothing here knows llama.cpp: rows arrive as oscar_step, the view that the attention layer shows.
 */
#ifndef OSCAR_CALIB_H
#define OSCAR_CALIB_H

#include "codec/rotations.h"

/* ------------------------------------------------------------------------------------------------
 * Linear algebra (LAPACK underneath; all matrices row major, square, f64)
 */

/* One thread for BLAS: sums come out the same on every run, and the attention threads that wait
 * while rows are observed are not fought for cores. Called by calib_new(). */
void calib_single_thread_blas(void);
/* Eigenvectors of the symmetric a [d, d] (its lower triangle is read), as the columns of vectors
 * [d, d], eigenvalues ascending [d]; the largest component of each vector is positive.
 * Errors: NOT_FINITE, MEMORY, INTERNAL. */
oscar_status calib_eigenvectors(int32_t d, const double *a, double *values, double *vectors,
                                oscar_error *error);
/* Orthonormal directions as the columns of e [d, d], what a row should keep best first. c [d, d] is
 * the covariance of the rows, `metric` [d, d] weighs their errors (NULL: all directions alike). First
 * the n_lead directions along which one free number a row removes most of the rows' metric energy,
 * that is A^-1 v for the first eigenvectors v of A c A, A = metric^1/2; then the eigenvectors of the
 * metric (without one: of c), eigenvalues falling. Of c and metric the lower triangles are read.
 * Errors: NOT_FINITE, MEMORY, INTERNAL. */
oscar_status calib_basis(int32_t d, int32_t n_lead, const double *c, const double *metric, double *e,
                         oscar_error *error);
/* The rotation of the default recipe, u = e Q [d, d]: Q [d, d] spreads the directions e [d, d] over
 * the channels so that the first d/group of them are constant within groups of `group` channels
 * (a divisor of d). A row's offsets lie along these. Errors: MEMORY. */
oscar_status calib_compose(int32_t d, int32_t group, const double *e, double *u, oscar_error *error);
/* The published composition U = E H P for the covariance c [d, d], see docs/METHOD.md. u: [d, d].
 * Errors: NOT_FINITE, MEMORY, INTERNAL. */
oscar_status calib_compose_zoo(int32_t d, const double *c, double *u, oscar_error *error);
/* perm [d] of the columns: perm[br(i)] = the column with the i-th largest eigenvalue, br = bit
 * reversal; for other than powers of two, the reversal of the next one without what is >= d. */
void calib_bit_reversal(int32_t d, int32_t *perm);
/* out = u^T c u, [d, d]. */
oscar_status calib_congruence(int32_t d, const double *u, const double *c, double *out,
                              oscar_error *error);

/* ------------------------------------------------------------------------------------------------
 * Rotary embedding
 */

/* cos and sin of position * inv_freq[f] for every pair: [n_dims / 2, 2]. */
void rope_angles(const oscar_rope *rope, double position, double *cos_sin);
/* Turns the pairs of x [head_dim] in place by the angles (inverse: backwards); dims without RoPE
 * and the magnitude are left alone. */
void rope_turn(const oscar_rope *rope, const double *cos_sin, bool inverse, float *x);

/* ------------------------------------------------------------------------------------------------
 * Sums
 */

/* Sums of one layer; H = n_kv_heads, d = head_dim. Squares: lower triangles. */
typedef struct calib_sums {
    int64_t n_tokens;
    double *qq;    /* [H, d, d] sum of q^T q over tokens and the query heads of the KV head */
    double *kz;    /* [H, d + m, d + m] sum of z^T z, z = (key after RoPE, cosine and sine of every pair,
                      1), m = n_dims + 1: what the covariance about a tracked mean is made of */
    double *vv;    /* [H, d, d] sum of v^T v */
    double *k;     /* [H, d] sum of keys after RoPE */
    double *k_pre; /* [H, d] sum of R_{-t} k_t / magnitude: keys before RoPE (dims < n_dims) */
    double *v;     /* [H, d] */
    double *zoo_vv; /* [d, d] sum of v^T v weighted by k C_Q k^T, the weights of each KV head summing
                       to 1 in each step: the value covariance of the published recipe */
} calib_sums;

/* d + m of `kz`. */
static inline size_t calib_kz_width(const oscar_layer *shape) {
    return (size_t)shape->head_dim + (size_t)shape->rope.n_dims + 1;
}

typedef struct calib {
    int32_t n_layers;
    oscar_layer *layers; /* [n_layers] */
    calib_sums *sums;    /* [n_layers] */
    float *scratch;      /* rows of one head, grown as needed */
    size_t scratch_floats;
} calib;

/* Copies the geometry. Errors: ARGUMENT, MEMORY. */
oscar_status calib_new(calib **out, const oscar_layer *layers, int32_t n_layers, oscar_error *error);
void calib_free(calib *c); /* NULL is allowed */
/* Adds one step of one layer: its queries, keys and values.
 * Errors: NOT_FINITE (position: token index), MEMORY; the sums are of no use afterwards. */
oscar_status calib_add(calib *c, int32_t layer, const oscar_step *step, oscar_error *error);

/* Row `token`, head `head` of a step as floats. out: [head_dim]. false: not finite. */
bool step_read_q(const oscar_layer *shape, const oscar_step *step, int32_t token, int32_t head, float *out);
bool step_read_k(const oscar_layer *shape, const oscar_step *step, int32_t token, int32_t head, float *out);
bool step_read_v(const oscar_layer *shape, const oscar_step *step, int32_t token, int32_t head, float *out);

/* ------------------------------------------------------------------------------------------------
 * Rotations from sums
 */

/* Covariance of a head's keys about their mean, all pairs tracked: out [d, d]. Errors: MEMORY. */
oscar_status calib_key_covariance(const calib *c, int32_t layer, int32_t head, double *out, oscar_error *error);
/* The default recipe with n_tracked pairs for every layer (fewer where a layer has fewer), 2 bits,
 * LDLQ and gain on. Errors: ARGUMENT (no tokens), NOT_FINITE, MEMORY. */
oscar_status calib_fit(const calib *c, int32_t n_tracked, oscar_rotations **out, oscar_error *error);
/* Changes the number of tracked pairs of one layer: means and pair list, nothing else. */
oscar_status calib_set_tracked(const calib *c, int32_t layer, int32_t n_tracked,
                               rotations_layer *fitted, oscar_error *error);
/* The published recipe: one rotation a layer from C_Q averaged over heads, values from zoo_vv,
 * clips .96 and .92, no means. */
oscar_status calib_fit_zoo(const calib *c, oscar_rotations **out, oscar_error *error);
/* Tokens below which the weak directions of the widest layer's covariances are noise: ten rows for
 * each dim of a head. */
int64_t calib_enough_tokens(const calib *c);

/* ------------------------------------------------------------------------------------------------
 * Held-out measurement
 */

/* What the quantised rows of one KV head do to the attention of its query heads, on a chunk that
 * starts its sequence. Sampled queries see exact rows in [0, sink) and (t - recent, t], quantised
 * ones between. Sums over queries and query heads; they may be added up. */
typedef struct heldout_error {
    double logit_square; /* squared error of the scaled logits of quantised keys */
    double n_logits;
    double attn_kl;      /* KL(p || p^) of the attention probabilities, quantised keys */
    double out_k;        /* |o^ - o|^2, quantised keys and exact values */
    double out_v;        /* |o^ - o|^2, exact keys and quantised values */
    double out_square;   /* |o|^2 */
    double n_queries;
} heldout_error;
void heldout_accumulate(heldout_error *sum, const heldout_error *part);

typedef struct heldout heldout;
/* Takes the rows of KV head `head` out of the step (one sequence from position 0) and computes its
 * exact attention. sink and recent: rows kept exact. Errors: ARGUMENT (no history between the
 * windows), NOT_FINITE, MEMORY. */
oscar_status heldout_new(heldout **out, const oscar_layer *shape, const oscar_step *step,
                         int32_t head, int32_t sink, int32_t recent, oscar_error *error);
void heldout_free(heldout *h); /* NULL is allowed */
/* Keys quantised with `layer` as if the chunk began at position `shift` of its sequence: RoPE turns
 * keys and queries alike, so exact attention does not change but the means do. Fills the members
 * of keys. */
oscar_status heldout_keys(heldout *h, const rotations_layer *layer, int32_t shift,
                          heldout_error *result, oscar_error *error);
/* Values; fills out_v, out_square, n_queries. */
oscar_status heldout_values(heldout *h, const rotations_layer *layer, heldout_error *result,
                            oscar_error *error);

#endif
