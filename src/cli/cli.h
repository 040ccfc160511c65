/*
 * cli.h - what the subcommands of `oscar` share: options, names of models and files, progress, JSON.
 *
 * A command is `int cmd_xxx(int argc, char **argv)` in cmd_xxx.c with one line in the table of
 * main.c; argv[0] is the command's name. It returns a cli_exit. Results go to stdout, everything
 * else to stderr, so that `oscar xxx --json | jq` always works.
 *
 *   int cmd_count(int argc, char **argv) {
 *       const char *text = NULL;
 *       int64_t tokens = 1024;
 *       bool json = false;
 *       const cli_option options[] = {
 *           {"text", 0, CLI_STRING, &text, "FILE", "the text to count in"},
 *           {"tokens", 'n', CLI_INT, &tokens, "N", "stop after N tokens (default 1024)"},
 *           {"json", 0, CLI_FLAG, &json, NULL, "print JSON"},
 *       };
 *       const cli_spec spec = {"count", "MODEL [options]", "Counts tokens.", "  oscar count m.gguf",
 *                              options, CLI_COUNT(options), false};
 *       cli_args args;
 *       int stop = cli_parse(&spec, argc, argv, &args);
 *       if (stop != CLI_CONTINUE) return stop;
 *       if (args.n != 1) return cli_usage_error(&spec, "expected one MODEL, found %d", args.n);
 *       ...
 *   }
 */
#ifndef OSCAR_CLI_H
#define OSCAR_CLI_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Exit codes of every command. */
typedef enum cli_exit {
    CLI_CONTINUE = -1, /* from cli_parse(): the command goes on */
    CLI_OK = 0,
    CLI_FAILURE = 1, /* what was asked could not be done */
    CLI_USAGE = 2    /* what was asked makes no sense: unknown option, missing argument */
} cli_exit;

/* ------------------------------------------------------------------------------------------------
 * Options (cli_args.c)
 */

typedef enum cli_kind {
    CLI_FLAG,   /* bool: --name sets true */
    CLI_INT,    /* int64_t: a decimal integer >= 0 */
    CLI_DOUBLE, /* double: finite */
    CLI_BYTES,  /* int64_t: an integer >= 0 with an optional K, M or G (powers of 1024) */
    CLI_STRING  /* const char *: points into argv */
} cli_kind;

typedef struct cli_option {
    const char *name;     /* without the dashes */
    char letter;          /* -o; 0: none */
    cli_kind kind;
    void *value;          /* written when the option is given, left alone otherwise */
    const char *argument; /* its name in the help; NULL for flags */
    const char *help;     /* one sentence; line breaks continue in the help's column */
} cli_option;

typedef struct cli_spec {
    const char *command;  /* "calibrate" */
    const char *usage;    /* what follows `oscar calibrate ` */
    const char *about;    /* what it does and when to use it, wrapped at 80 columns */
    const char *examples; /* lines, indented by two */
    const cli_option *options;
    int n_options;
    bool pass_unknown; /* unknown options, and everything after `--`, land in args.rest */
} cli_spec;

#define CLI_MAX_ARGS 4096 /* one more than can be given: room for a closing NULL */
#define CLI_COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

typedef struct cli_args {
    int n;                 /* positional arguments */
    char *arg[CLI_MAX_ARGS];
    int n_rest;            /* with pass_unknown: arguments for another program, in their order */
    char *rest[CLI_MAX_ARGS];
} cli_args;

/* Reads argv[1..]: --name VALUE, --name=VALUE, -o VALUE, flags; `--` ends the options. --help prints
 * the help to stdout and returns CLI_OK. CLI_USAGE: a message has been printed. With pass_unknown
 * the first positional argument goes to args->arg and everything unknown after it to args->rest. */
int cli_parse(const cli_spec *spec, int argc, char **argv, cli_args *args);
/* `oscar: error: ...` to stderr; returns CLI_FAILURE. */
int cli_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The same with a pointer to the command's help; returns CLI_USAGE. */
int cli_usage_error(const cli_spec *spec, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* What every command that runs a model on the cache lets the user say. Numbers are -1 until given.
 * CLI_CACHE_OPTIONS(&c) expands to the rows of an option table. */
typedef struct cli_cache {
    const char *kv; /* "int2" or "f32" */
    const char *rotations;
    int64_t sink, recent, lookahead; /* tokens */
    int64_t bits_k, bits_v;
    int64_t kv_memory_bytes;
    const char *stats;
} cli_cache;

#define CLI_CACHE_INIT {"int2", NULL, -1, -1, -1, -1, -1, -1, NULL}

#define CLI_CACHE_OPTIONS(c)                                                                       \
    {"kv", 0, CLI_STRING, &(c)->kv, "int2|f32",                                                    \
     "how the history is kept: int2 (default), or f32,\nexact and 13 times as large, to compare"},  \
    {"rotations", 0, CLI_STRING, &(c)->rotations, "FILE",                                          \
     "what `oscar calibrate` wrote for this model (default:\nMODEL's neighbour or the cache folder's " \
     "file)"},                                                                                     \
    {"sink", 0, CLI_INT, &(c)->sink, "N", "first N tokens kept in BF16 as well (default 64)"},     \
    {"recent", 0, CLI_INT, &(c)->recent, "N", "last N tokens kept in BF16 as well (default 256)"}, \
    {"lookahead", 0, CLI_INT, &(c)->lookahead, "N",                                                \
     "tokens that can be rolled back without a loss\n(default 64)"},                               \
    {"bits-k", 0, CLI_INT, &(c)->bits_k, "2|3|4",                                                  \
     "bits of the keys in every layer (default: what\ncalibration chose for each)"},               \
    {"bits-v", 0, CLI_INT, &(c)->bits_v, "2|3|4", "bits of the values in every layer"},            \
    {"kv-memory", 0, CLI_BYTES, &(c)->kv_memory_bytes, "BYTES",                                    \
     "most memory for the cache, windows and scratch\nincluded, such as 512M; a context that needs "    \
     "more\nbecomes smaller (default: what the context needs)"},                                    \
    {"stats", 0, CLI_STRING, &(c)->stats, "FILE",                                                  \
     "keep the cache's numbers in FILE, in Prometheus' text\nformat, replaced once a second while in use"}

/* For commands that run a model without one of llama.cpp's programs. */
#define CLI_GPU_LAYERS_OPTION(n)                                                                   \
    {"n-gpu-layers", 0, CLI_INT, n, "N",                                                           \
     "layers whose weights are on a GPU, such as 99 for all,\nwhere llama.cpp was built for one; the cache and its\n" \
     "attention stay on the CPU (default 0)"}
/* CLI_CONTINUE, or CLI_USAGE after a message. */
int cli_gpu_layers_check(const cli_spec *spec, int64_t n);

/* Checks the values given; CLI_CONTINUE, or CLI_USAGE after a message. */
int cli_cache_check(const cli_spec *spec, const cli_cache *cache);

/* ------------------------------------------------------------------------------------------------
 * Models and files (cli_model.c)
 */

#define CLI_PATH_MAX 4096

typedef struct cli_known_model {
    const char *name;  /* "smollm2-135m" */
    const char *about; /* one line */
    const char *sha256; /* of the GGUF file, in hex */
    int64_t bytes;
} cli_known_model;
/* The models that `oscar pull` knows; *n receives how many. */
const cli_known_model *cli_known_models(int *n);

/* OSCAR_CACHE, else XDG_CACHE_HOME/oscar, else ~/.cache/oscar, followed by /`name` unless that is
 * NULL. CLI_CONTINUE, or CLI_FAILURE after a message. */
int cli_cache_folder(char path[CLI_PATH_MAX], const char *name);
/* MODEL as users write it - a path, or a name that was pulled - to the path of a GGUF file that can
 * be read. CLI_CONTINUE, or CLI_FAILURE after a message that says what to do. */
int cli_model_path(const char *model, char path[CLI_PATH_MAX]);
/* The rotations to run MODEL with: `given` unless NULL, else <name>.rot.safetensors beside the GGUF
 * file `model_path`, else the cache folder's rotations/<name>.rot.safetensors. CLI_FAILURE after a
 * message that tells to calibrate when there is none. */
int cli_rotations_path(const char *given, const char *model_path, char path[CLI_PATH_MAX]);
/* Where `oscar calibrate` without -o writes: the cache folder's file; makes the folder. */
int cli_rotations_output(const char *model_path, char path[CLI_PATH_MAX]);
/* mkdir -p for the folders before the last slash of `path`. CLI_CONTINUE, or CLI_FAILURE. */
int cli_make_folders(const char *path);
/* A file that belongs to this program: `build_name` (absolute, or beside the executable in a build
 * folder), else `install_name` under the prefix that the program is installed to. NULL names are
 * skipped. CLI_CONTINUE, or CLI_FAILURE after a message. */
int cli_own_file(const char *build_name, const char *install_name, char path[CLI_PATH_MAX]);

/* ------------------------------------------------------------------------------------------------
 * Progress (progress.c): to stderr, a bar rewritten on a terminal, else a line every ten seconds.
 * Nothing is shown in the first half second.
 */
typedef struct cli_progress {
    const char *label; /* borrowed */
    double started_s, shown_s;
    bool terminal, visible;
} cli_progress;
void cli_progress_start(cli_progress *progress, const char *label);
/* done and total in any unit; total <= 0: unknown. Cheap to call often. */
void cli_progress_update(cli_progress *progress, int64_t done, int64_t total);
void cli_progress_end(cli_progress *progress);
double cli_seconds(void); /* a monotonic clock */

/* ------------------------------------------------------------------------------------------------
 * Output (cli_json.c)
 */

/* Prints the object to stdout and releases it. CLI_OK, or CLI_FAILURE when `object` is NULL or
 * stdout cannot be written. */
int cli_print_json(json_t *object);
/* Flushes stdout; CLI_FAILURE after a message when something could not be written (a full disk, a
 * closed pipe). The last call of a command that prints. */
int cli_finish_output(void);
/* "1.5 MiB" */
const char *cli_bytes_text(int64_t bytes, char text[32]);

/* ------------------------------------------------------------------------------------------------
 * Running a llama.cpp program on the cache (cli_wrap.c)
 */

/* Becomes argv[0] with liboscar-llama.so preloaded and the options in its environment (OSCAR_KV,
 * OSCAR_ROTATIONS, ...; an option that was not given leaves its variable as it is). A program's name
 * without a slash is looked for in OSCAR_LLAMA_BIN, then in the llama.cpp this was built with, then
 * in PATH. A Python program also gets LLAMA_CPP_LIB_PATH. `rotations` may be NULL: the layer then says
 * so when it needs them. argv ends with NULL. Returns only on failure, with CLI_FAILURE after a message. */
int cli_exec_wrapped(const cli_cache *cache, const char *rotations, bool pass_through, char **argv);

/* ------------------------------------------------------------------------------------------------
 * Commands
 */
int cmd_pull(int argc, char **argv);
int cmd_calibrate(int argc, char **argv);
int cmd_run(int argc, char **argv);
int cmd_serve(int argc, char **argv);
int cmd_wrap(int argc, char **argv);
int cmd_eval(int argc, char **argv);
int cmd_inspect(int argc, char **argv);
int cmd_bench(int argc, char **argv);

#endif
