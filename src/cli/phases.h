/*
 * phases.h - progress of calibration and evaluation, which come in phases with names of their own.
 */
#ifndef OSCAR_CLI_PHASES_H
#define OSCAR_CLI_PHASES_H

#include <stdint.h>

/* A bar for each phase: a new one begins when `what` (a constant string) changes. */
void phases_show(void *user, const char *what, int64_t done, int64_t total);
/* Ends the last bar; before anything else is printed. */
void phases_end(void);
/* `oscar: warning: ...` */
void phases_warn(void *user, const char *message);

#endif
