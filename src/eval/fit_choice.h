/*
 * fit_choice.h - what calibration decides by measuring held-out tokens: tracked pairs, gain, bits.
 *
 * Two runs over the same held-out chunks: the first tries every number of tracked pairs, at several
 * distances from the start of a text; fit_choice_next() settles the number; the second tries gain
 * and bits with it; fit_choice_finish() settles those.
 */
#ifndef OSCAR_FIT_CHOICE_H
#define OSCAR_FIT_CHOICE_H

#include "eval/fit_model.h"

typedef struct fit_choice fit_choice;

typedef struct fit_choice_options {
    int32_t sink, recent; /* BF16 windows of the measurement */
    int32_t context;      /* positions that keys will reach */
    int32_t n_tracked;    /* < 0: choose */
    double bits_budget;   /* average bits of the codes; up to 2: 2 everywhere */
    int32_t n_threads;    /* heads are measured side by side */
} fit_choice_options;

/* `ours` is edited as choices fall; `zoo` is measured for the table. All borrowed. */
oscar_status fit_choice_new(fit_choice **out, const calib *sums, oscar_rotations *ours, const oscar_rotations *zoo,
                            const fit_choice_options *options, oscar_error *error);
void fit_choice_free(fit_choice *choice); /* NULL is allowed */
/* One layer of one held-out chunk, all of it in one step. */
oscar_status fit_choice_observe(fit_choice *choice, int32_t layer, const oscar_step *step, oscar_error *error);
oscar_status fit_choice_next(fit_choice *choice, oscar_error *error);
void fit_choice_finish(fit_choice *choice, fit_report *report);

#endif
