/*
 * cmd_run.c - `oscar run MODEL ...` and `oscar serve MODEL ...`: llama-cli and llama-server on the
 * 2-bit cache.
 */
#include <string.h>

#include "cli/cli.h"

/* Whether the user has set an option of llama.cpp that has a short and a long form. */
static bool has_option(const cli_args *args, const char *brief, const char *full) {
    for (int i = 0; i < args->n_rest; i++)
        if (strcmp(args->rest[i], brief) == 0 || strcmp(args->rest[i], full) == 0) return true;
    return false;
}

/* PROGRAM -m MODEL plus what the user wrote for it. */
static int run_program(char *program, const cli_spec *spec, cli_cache *cache, const bool *pass_through,
                       int argc, char **argv) {
    static cli_args args;
    int stop = cli_parse(spec, argc, argv, &args);
    if (stop == CLI_CONTINUE) stop = cli_cache_check(spec, cache);
    if (stop != CLI_CONTINUE) return stop;
    if (args.n != 1)
        return cli_usage_error(spec, "expected MODEL, a path or a name that `oscar pull` knows");

    char model[CLI_PATH_MAX], rotations[CLI_PATH_MAX];
    stop = cli_model_path(args.arg[0], model);
    bool needs_rotations = strcmp(cache->kv, "int2") == 0;
    if (stop == CLI_CONTINUE && needs_rotations)
        stop = cli_rotations_path(cache->rotations, model, rotations);
    if (stop != CLI_CONTINUE) return stop;

    static char *command[CLI_MAX_ARGS + 8];
    static char model_option[] = "-m", fit_option[] = "-fit", off[] = "off";
    int n = 0;
    command[n++] = program;
    command[n++] = model_option;
    command[n++] = model;
    /* Fitting to the machine's memory would count the cache that we replace. */
    if (!has_option(&args, "-fit", "--fit")) {
        command[n++] = fit_option;
        command[n++] = off;
    }
    for (int i = 0; i < args.n_rest; i++) command[n++] = args.rest[i];
    command[n] = NULL;
    return cli_exec_wrapped(cache, needs_rotations ? rotations : NULL, *pass_through, command);
}

#define PASS_THROUGH_OPTION(flag)                                                                  \
    {"pass-through", 0, CLI_FLAG, flag, NULL,                                                      \
     "let models that the layer does not support run on\nllama.cpp's own cache instead of refusing them"}

int cmd_run(int argc, char **argv) {
    cli_cache cache = CLI_CACHE_INIT;
    bool pass_through = false;
    const cli_option options[] = {CLI_CACHE_OPTIONS(&cache), PASS_THROUGH_OPTION(&pass_through)};
    const cli_spec spec = {
        .command = "run",
        .usage = "MODEL [options] [options of llama-cli]",
        .about = "Chats with MODEL, or answers one prompt: llama-cli with its KV cache replaced by ours.\n"
                 "MODEL is a GGUF file or a name that `oscar pull` knows, and comes first. Options that\n"
                 "are not listed here go to llama-cli as they are, and so does everything after `--`\n"
                 "(`oscar run MODEL -- --help` prints llama-cli's own). The most used:\n"
                 "  -p TEXT     the prompt          -st        answer it and leave\n"
                 "  -n N        tokens to write     -c N       context size in tokens\n"
                 "  -t N        threads             --temp T   0 takes the likeliest token each time\n"
                 "  -ngl N      layers on a GPU, where llama.cpp was built for one; attention stays on the CPU",
        .examples = "  oscar run smollm2-135m\n"
                    "  oscar run smollm2-135m -st -p \"Why is the sky blue?\" -n 100\n"
                    "  oscar run model.gguf --kv f32 -st -p \"The same, exactly\"",
        .options = options,
        .n_options = CLI_COUNT(options),
        .pass_unknown = true,
    };
    static char program[] = "llama-cli";
    return run_program(program, &spec, &cache, &pass_through, argc, argv);
}

int cmd_serve(int argc, char **argv) {
    cli_cache cache = CLI_CACHE_INIT;
    bool pass_through = false;
    const cli_option options[] = {CLI_CACHE_OPTIONS(&cache), PASS_THROUGH_OPTION(&pass_through)};
    const cli_spec spec = {
        .command = "serve",
        .usage = "MODEL [options] [options of llama-server]",
        .about = "Serves MODEL over HTTP with the OpenAI-compatible API: llama-server with its KV cache\n"
                 "replaced by ours. MODEL is a GGUF file or a name that `oscar pull` knows, and comes\n"
                 "first. Options that are not listed here go to llama-server as they are, and so does\n"
                 "everything after `--`. The most used:\n"
                 "  --host A    address (127.0.0.1)  --port N    port (8080)\n"
                 "  -np N       requests at a time   -c N        context size in tokens, of all requests\n"
                 "  -ngl N      layers on a GPU, where llama.cpp was built for one; attention stays on the CPU",
        .examples = "  oscar serve smollm2-135m --port 8080 -np 4 -c 32768\n"
                    "  oscar serve model.gguf --kv-memory 2G --recent 512",
        .options = options,
        .n_options = CLI_COUNT(options),
        .pass_unknown = true,
    };
    static char program[] = "llama-server";
    return run_program(program, &spec, &cache, &pass_through, argc, argv);
}
