/*
 * cli_args.c - option tables: reading them from a command line, printing them as help.
 */
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"

#define HELP_COLUMN 26

int cli_error(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("oscar: error: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    return CLI_FAILURE;
}

int cli_usage_error(const cli_spec *spec, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "oscar %s: error: ", spec->command);
    vfprintf(stderr, format, args);
    fprintf(stderr, "\nusage: oscar %s %s\n`oscar %s --help` explains it.\n", spec->command,
            spec->usage, spec->command);
    va_end(args);
    return CLI_USAGE;
}

/* A line break in `help` continues in the help's column. */
static void print_option(const cli_option *option) {
    char left[96];
    char letter[8] = "    ";
    if (option->letter) snprintf(letter, sizeof letter, "-%c, ", option->letter);
    int width = snprintf(left, sizeof left, "  %s--%s%s%s", letter, option->name,
                         option->argument ? " " : "", option->argument ? option->argument : "");
    fputs(left, stdout);
    if (width >= HELP_COLUMN) printf("\n%*s", HELP_COLUMN, "");
    else printf("%*s", HELP_COLUMN - width, "");
    for (const char *c = option->help; *c; c++) {
        putchar(*c);
        if (*c == '\n') printf("%*s", HELP_COLUMN, "");
    }
    putchar('\n');
}

static int print_help(const cli_spec *spec) {
    printf("usage: oscar %s %s\n\n%s\n\noptions:\n", spec->command, spec->usage, spec->about);
    for (int i = 0; i < spec->n_options; i++) print_option(&spec->options[i]);
    printf("  -h, --help              this text\n\nexamples:\n%s\n", spec->examples);
    return cli_finish_output();
}

/* Digits and nothing else: strtoll alone would take blanks, signs and trailing letters. */
static bool read_integer(const char *text, bool allow_unit, int64_t *out) {
    if (text[0] < '0' || text[0] > '9') return false;
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (errno) return false;
    int shift = 0;
    if (allow_unit && *end) {
        const char *unit = strchr("KMGkmg", *end);
        if (!unit || end[1]) return false;
        shift = 10 * (int)((unit - "KMGkmg") % 3 + 1);
        end++;
    }
    if (*end || number > (INT64_MAX >> shift)) return false;
    *out = (int64_t)number << shift;
    return true;
}

static bool read_double(const char *text, double *out) {
    char *end;
    double number = strtod(text, &end);
    if (end == text || *end || !isfinite(number)) return false;
    *out = number;
    return true;
}

static int store(const cli_spec *spec, const cli_option *option, const char *text) {
    switch (option->kind) {
    case CLI_FLAG: *(bool *)option->value = true; return CLI_CONTINUE;
    case CLI_STRING: *(const char **)option->value = text; return CLI_CONTINUE;
    case CLI_INT:
        if (read_integer(text, false, option->value)) return CLI_CONTINUE;
        return cli_usage_error(spec, "--%s: expected a whole number, found '%s'", option->name, text);
    case CLI_BYTES:
        if (read_integer(text, true, option->value)) return CLI_CONTINUE;
        return cli_usage_error(spec, "--%s: expected a number of bytes such as 512M, found '%s'",
                               option->name, text);
    case CLI_DOUBLE:
        if (read_double(text, option->value)) return CLI_CONTINUE;
        return cli_usage_error(spec, "--%s: expected a number, found '%s'", option->name, text);
    }
    return CLI_USAGE;
}

/* The option that `arg` names; *inline_value receives what follows '=', or NULL. */
static const cli_option *find_option(const cli_spec *spec, const char *arg, char **inline_value) {
    *inline_value = NULL;
    for (int i = 0; i < spec->n_options; i++) {
        const cli_option *option = &spec->options[i];
        if (arg[1] != '-') {
            if (option->letter && arg[1] == option->letter && !arg[2]) return option;
            continue;
        }
        size_t length = strlen(option->name);
        if (strncmp(arg + 2, option->name, length) != 0) continue;
        if (!arg[2 + length]) return option;
        if (arg[2 + length] == '=') {
            *inline_value = (char *)arg + 2 + length + 1;
            return option;
        }
    }
    return NULL;
}

static int take_option(const cli_spec *spec, const cli_option *option, char *inline_value, int argc,
                       char **argv, int *i) {
    if (option->kind == CLI_FLAG) {
        if (inline_value) return cli_usage_error(spec, "--%s takes no value", option->name);
        return store(spec, option, NULL);
    }
    if (inline_value) return store(spec, option, inline_value);
    if (*i + 1 >= argc)
        return cli_usage_error(spec, "--%s needs a value (%s)", option->name, option->argument);
    return store(spec, option, argv[++*i]);
}

int cli_parse(const cli_spec *spec, int argc, char **argv, cli_args *args) {
    args->n = args->n_rest = 0;
    if (argc >= CLI_MAX_ARGS)
        return cli_usage_error(spec, "expected at most %d arguments", CLI_MAX_ARGS - 1);
    bool options_ended = false;
    for (int i = 1; i < argc; i++) {
        char *arg = argv[i];
        bool dashed = arg[0] == '-' && arg[1] && !options_ended;
        if (dashed && strcmp(arg, "--") == 0) {
            options_ended = true;
            continue;
        }
        if (dashed && (strcmp(arg, "--help") == 0 || strcmp(arg, "-h") == 0)) return print_help(spec);
        char *inline_value;
        const cli_option *option = dashed ? find_option(spec, arg, &inline_value) : NULL;
        if (option) {
            int stop = take_option(spec, option, inline_value, argc, argv, &i);
            if (stop != CLI_CONTINUE) return stop;
        } else if (spec->pass_unknown && args->n > 0) {
            args->rest[args->n_rest++] = arg;
        } else if (dashed) {
            return cli_usage_error(spec, "unknown option '%s'", arg);
        } else {
            args->arg[args->n++] = arg;
        }
    }
    return CLI_CONTINUE;
}

int cli_gpu_layers_check(const cli_spec *spec, int64_t n) {
    if (n <= 1 << 20) return CLI_CONTINUE;
    return cli_usage_error(spec, "--n-gpu-layers is %lld, expected at most %d", (long long)n, 1 << 20);
}

int cli_cache_check(const cli_spec *spec, const cli_cache *cache) {
    if (strcmp(cache->kv, "int2") != 0 && strcmp(cache->kv, "f32") != 0)
        return cli_usage_error(spec, "--kv: expected int2 or f32, found '%s'", cache->kv);
    const int64_t bits[2] = {cache->bits_k, cache->bits_v};
    for (int side = 0; side < 2; side++)
        if (bits[side] != -1 && (bits[side] < 2 || bits[side] > 4))
            return cli_usage_error(spec, "--bits-%c: expected 2, 3 or 4, found %lld", "kv"[side],
                                   (long long)bits[side]);
    const int64_t windows[3] = {cache->sink, cache->recent, cache->lookahead};
    static const char *const names[3] = {"sink", "recent", "lookahead"};
    for (int i = 0; i < 3; i++)
        if (windows[i] > INT32_MAX / 4)
            return cli_usage_error(spec, "--%s: %lld tokens are too many", names[i],
                                   (long long)windows[i]);
    return CLI_CONTINUE;
}
