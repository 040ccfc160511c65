/*
 * progress.c - how far a slow thing has come, on stderr.
 */
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "cli/cli.h"

#define FIRST_SHOWN_S 0.5
#define TERMINAL_EVERY_S 0.1
#define LOG_EVERY_S 10.0
#define BAR_CELLS 24

double cli_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void cli_progress_start(cli_progress *progress, const char *label) {
    progress->label = label;
    progress->started_s = progress->shown_s = cli_seconds();
    progress->terminal = isatty(STDERR_FILENO);
    progress->visible = false;
}

static void show(cli_progress *progress, int64_t done, int64_t total, double elapsed_s) {
    if (progress->terminal) fputs("\r\033[K", stderr);
    if (total <= 0) {
        fprintf(stderr, "%s  %.0f s", progress->label, elapsed_s);
    } else {
        double part = done >= total ? 1 : (double)done / (double)total;
        int filled = (int)(part * BAR_CELLS);
        fprintf(stderr, "%s  [%.*s%.*s] %3.0f %%", progress->label, filled,
                "########################", BAR_CELLS - filled, "........................",
                100 * part);
        if (part > 0.02 && part < 1)
            fprintf(stderr, ", %.0f s left", elapsed_s / part * (1 - part));
    }
    if (!progress->terminal) fputc('\n', stderr);
    fflush(stderr);
    progress->visible = true;
}

void cli_progress_update(cli_progress *progress, int64_t done, int64_t total) {
    double now = cli_seconds();
    double every_s = progress->terminal ? TERMINAL_EVERY_S : LOG_EVERY_S;
    if (now - progress->started_s < FIRST_SHOWN_S) return;
    if (now - progress->shown_s < (progress->visible || !progress->terminal ? every_s : 0)) return;
    progress->shown_s = now;
    show(progress, done, total, now - progress->started_s);
}

void cli_progress_end(cli_progress *progress) {
    if (!progress->visible) return;
    double elapsed_s = cli_seconds() - progress->started_s;
    fprintf(stderr, "%s%s  done in %.1f s\n", progress->terminal ? "\r\033[K" : "", progress->label,
            elapsed_s);
    progress->visible = false;
}
