/*
 * inspect.h - the kinds of file that `oscar inspect` knows. Each prints to stdout and returns a
 * cli_exit.
 */
#ifndef OSCAR_CLI_INSPECT_H
#define OSCAR_CLI_INSPECT_H

#include "cli/cli.h"

int inspect_gguf(const char *path, bool json);
int inspect_rotations(const char *path, bool json);

#endif
