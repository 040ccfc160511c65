/*
 * cli_json.c - results on stdout: JSON, and the check that all of it arrived.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "cli/cli.h"

int cli_print_json(json_t *object) {
    if (!object) return cli_error("no memory for the JSON output");
    int failed = json_dumpf(object, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    json_decref(object);
    if (failed) return cli_error("could not write JSON to standard output");
    putchar('\n');
    return cli_finish_output();
}

int cli_finish_output(void) {
    errno = 0;
    if (fflush(stdout) != 0 || ferror(stdout))
        return cli_error("could not write to standard output: %s",
                         errno ? strerror(errno) : "write error");
    return CLI_OK;
}

const char *cli_bytes_text(int64_t bytes, char text[32]) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double amount = (double)bytes;
    int unit = 0;
    for (; amount >= 1024 && unit < CLI_COUNT(units) - 1; unit++) amount /= 1024;
    snprintf(text, 32, unit ? "%.1f %s" : "%.0f %s", amount, units[unit]);
    return text;
}
