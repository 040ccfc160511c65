/* One bar at a time. */
#include "cli/phases.h"

#include <stdio.h>

#include "cli/cli.h"

static cli_progress bar;
static const char *label; /* NULL: no bar */

void phases_show(void *user, const char *what, int64_t done, int64_t total) {
    (void)user;
    if (label != what) {
        phases_end();
        cli_progress_start(&bar, what);
        label = what;
    }
    cli_progress_update(&bar, done, total);
}

void phases_end(void) {
    if (label) cli_progress_end(&bar);
    label = NULL;
}

void phases_warn(void *user, const char *message) {
    (void)user;
    phases_end();
    fprintf(stderr, "oscar: warning: %s\n", message);
}
