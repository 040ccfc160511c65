/*
 * fit_model.h - calibration of a model: texts through the exact cache, rotations out.
 *
 * Pass 1 sums what every layer sees (calib_add). Pass 2 runs held-out tokens and measures every
 * number of tracked pairs; pass 3 runs them again with the number chosen and decides the gain
 * corrections and, under a budget, the bits of each layer. Memory does not grow with the number of
 * tokens.
 */
#ifndef OSCAR_FIT_MODEL_H
#define OSCAR_FIT_MODEL_H

#include "calib/calib.h"
#include "eval/text.h"

/* Fewer tokens than this are refused: the rotation would fit noise. */
#define FIT_TOKENS_LEAST 256
#define FIT_TOKENS_DEFAULT 32768
#define FIT_CHUNK_TOKENS 2048
#define FIT_HELDOUT_TOKENS 1024
#define FIT_MAX_CANDIDATES 10

typedef struct fit_options {
    const char *model_name; /* for the metadata */
    const char *text_path; /* NULL: the model writes its own text */
    int64_t n_tokens;
    int32_t context;    /* positions that keys will reach; 0: the trained context, up to 32,768 */
    int32_t n_tracked;  /* < 0: choose */
    double bits_budget; /* average bits of the codes; up to 2: 2 in every layer */
    int32_t n_threads;
    uint64_t seed; /* of a sampled text */
    text_progress progress; /* NULL: none */
    void (*warn)(void *user, const char *message);
    void *user;
} fit_options;

/* Held-out errors of one recipe, as means over layers. */
typedef struct fit_error {
    double logit_square; /* mean squared error of the scaled logits */
    double attn_kl;      /* mean KL of the attention probabilities */
    double out_k, out_v; /* |o^ - o|^2 / |o|^2 by quantised keys, by quantised values */
} fit_error;

typedef struct fit_report {
    int64_t n_tokens, n_heldout;
    uint64_t text_hash;
    int32_t n_layers, n_gain_k, n_gain_v;
    int32_t context;
    int32_t n_tracked, n_pairs_max;
    int32_t n_candidates;
    int32_t candidate[FIT_MAX_CANDIDATES];       /* numbers of tracked pairs that were tried */
    double candidate_error[FIT_MAX_CANDIDATES];  /* mean over layers of out_k */
    double tracked_cost; /* part that the chosen number adds to the work of a key's logit */
    double code_bits;    /* average bits of the codes */
    int32_t n_more_bits; /* (layer, side) pairs with more than 2 bits */
    fit_error zoo, ours;
} fit_report;

/* *zoo (NULL: not wanted) receives the published recipe from the same sums. Metadata say model, text
 * and day: the same input gives the same bytes on the same day. Errors: those of text_open(), ARGUMENT (too few
 * tokens), NOT_FINITE, UNSUPPORTED (the model), MEMORY. */
oscar_status fit_model(struct llama_model *model, const fit_options *options, oscar_rotations **ours,
                       oscar_rotations **zoo, fit_report *report, oscar_error *error);
/* The published recipe alone: pass 1. */
oscar_status fit_model_zoo(struct llama_model *model, const fit_options *options, oscar_rotations **zoo,
                           fit_report *report, oscar_error *error);

#endif
