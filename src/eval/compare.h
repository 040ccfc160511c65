/*
 * compare.h - methods of keeping the KV cache side by side on one text.
 *
 * Every method has a context of its own; all run the same tokens in lockstep, teacher-forced, and
 * each next-token distribution is compared with that of an exact (float32) cache in the same
 * engine. Scored are positions skip .. context - 2 of every chunk, as in RESULTS of the method.
 */
#ifndef OSCAR_COMPARE_H
#define OSCAR_COMPARE_H

#include "eval/kl.h"
#include "eval/text.h"
#include "oscar/oscar.h"

#define COMPARE_MAX_METHODS 16

typedef enum method_kind {
    METHOD_EXACT = 0,  /* float32: KL 0, a check of the comparison itself */
    METHOD_INT2 = 1,   /* the rotation file */
    METHOD_ZOO = 2,    /* the published OSCAR */
    METHOD_QUAROT = 3, /* Hadamard rotation, OSCAR's clips */
    METHOD_NAIVE = 4,  /* min-max without rotation */
    METHOD_KIVI = 5,   /* keys per channel over 128 tokens, values per token */
    METHOD_BF16 = 6    /* BF16 rows for every token: the floor that the engine's rounding sets */
} method_kind;

/* NAME[:BITS][@SINK/RECENT]; BITS is N for both sides or kN, vN, kNvM. */
typedef struct compare_method {
    char name[48]; /* as written */
    int32_t kind;  /* method_kind */
    int32_t bits_k, bits_v; /* 0: 2, or as the rotation file says */
    int32_t sink, recent;   /* -1: the comparison's */
} compare_method;

/* Reads a comma-separated list. Errors: ARGUMENT, with the item that is wrong. */
oscar_status compare_parse_methods(const char *list, compare_method methods[COMPARE_MAX_METHODS], int32_t *n_methods,
                                   oscar_error *error);

typedef struct compare_options {
    const compare_method *methods;
    int32_t n_methods;
    const oscar_rotations *rotations; /* for int2; NULL when no method needs it */
    const oscar_rotations *zoo;       /* for zoo */
    const token_chunks *text;         /* chunks of equal length */
    int32_t skip;                     /* positions not scored at the start of a chunk */
    int32_t sink, recent;
    int32_t n_threads;
    bool exact_baseline; /* false: perplexities alone, no exact context */
    text_progress progress; /* NULL: none */
    void *user;
} compare_options;

typedef struct compare_result {
    double kl, kl_p99; /* nats; 0 without a baseline */
    double ppl;
    double top1;         /* part of positions with the exact model's most probable token */
    double bits;         /* an element, history pages */
    double bits_windows; /* an element at the end of a chunk, pages and BF16 windows as allocated */
} compare_result;

typedef struct compare_report {
    int64_t n_scored;
    double exact_ppl;
    compare_result method[COMPARE_MAX_METHODS];
} compare_report;

/* Errors: ARGUMENT (nothing to score), those of the layer, NOT_FINITE (a method's logits), MEMORY. */
oscar_status compare_run(struct llama_model *model, const compare_options *options, compare_report *report,
                         oscar_error *error);

#endif
