/*
 * cmd_wrap.c - `oscar wrap [options] -- PROGRAM ...`: any program on libllama, on the 2-bit cache.
 */
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"

/* The value of -m or --model among a program's arguments; NULL without one. */
static char **find_model(cli_args *args) {
    for (int i = 1; i + 1 < args->n; i++)
        if (strcmp(args->arg[i], "-m") == 0 || strcmp(args->arg[i], "--model") == 0)
            return &args->arg[i + 1];
    return NULL;
}

int cmd_wrap(int argc, char **argv) {
    cli_cache cache = CLI_CACHE_INIT;
    bool pass_through = false;
    const cli_option options[] = {
        CLI_CACHE_OPTIONS(&cache),
        {"pass-through", 0, CLI_FLAG, &pass_through, NULL,
         "let models that the layer does not support run on\nllama.cpp's own cache instead of refusing "
         "them"},
    };
    const cli_spec spec = {
        .command = "wrap",
        .usage = "[options] -- PROGRAM [arguments]",
        .about = "Runs a program that uses libllama, unmodified, with its KV cache replaced by ours:\n"
                 "llama-bench, llama-perplexity, llama-completion, Python with llama-cpp-python, or a\n"
                 "program of your own. liboscar-llama.so is preloaded, for Python put in front of libllama,\n"
                 "and finds the options in the environment: OSCAR_KV, OSCAR_ROTATIONS, OSCAR_SINK,\n"
                 "OSCAR_RECENT, OSCAR_LOOKAHEAD, OSCAR_BITS_K, OSCAR_BITS_V, OSCAR_KV_MEMORY, OSCAR_STATS,\n"
                 "OSCAR_PASS_THROUGH. PROGRAM is looked for in the folder OSCAR_LLAMA_BIN, then in the\n"
                 "llama.cpp that this was built with, then in PATH. Among its arguments the value of\n"
                 "-m or --model may be a name that `oscar pull` knows, and decides which rotations are\n"
                 "taken unless --rotations says.",
        .examples = "  oscar wrap -- llama-bench -m smollm2-135m -p 512 -n 32\n"
                    "  oscar wrap --kv f32 -- llama-perplexity -m model.gguf -f text.txt\n"
                    "  oscar wrap --rotations model.rot.safetensors -- python3 chat.py",
        .options = options,
        .n_options = CLI_COUNT(options),
    };
    static cli_args args;
    int stop = cli_parse(&spec, argc, argv, &args);
    if (stop == CLI_CONTINUE) stop = cli_cache_check(&spec, &cache);
    if (stop != CLI_CONTINUE) return stop;
    if (args.n == 0) return cli_usage_error(&spec, "expected -- and the PROGRAM to run");

    static char model[CLI_PATH_MAX], rotations[CLI_PATH_MAX];
    const char *use = NULL;
    bool needs_rotations = strcmp(cache.kv, "int2") == 0 && !getenv("OSCAR_ROTATIONS");
    char **named = find_model(&args);
    if (named) {
        stop = cli_model_path(*named, model);
        if (stop != CLI_CONTINUE) return stop;
        *named = model;
    }
    /* Without a model to go by the program may bring one later: the layer then tells what it lacks. */
    if (cache.rotations || (named && needs_rotations)) {
        stop = cli_rotations_path(cache.rotations, model, rotations);
        if (stop != CLI_CONTINUE) return stop;
        use = rotations;
    }
    args.arg[args.n] = NULL;
    return cli_exec_wrapped(&cache, use, pass_through, args.arg);
}
