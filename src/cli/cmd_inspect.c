/*
 * cmd_inspect.c - `oscar inspect FILE`: which kind of file it is, then what it holds.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "cli/inspect.h"

/* The first four bytes of the file at `path`; CLI_CONTINUE, or CLI_FAILURE after a message. */
static int read_magic(const char *path, char magic[4]) {
    FILE *file = fopen(path, "rb");
    if (!file) return cli_error("cannot read %s: %s", path, strerror(errno));
    size_t n = fread(magic, 1, 4, file);
    fclose(file);
    return n == 4 ? CLI_CONTINUE : cli_error("%s: neither a model nor a rotation file: %zu bytes", path, n);
}

int cmd_inspect(int argc, char **argv) {
    bool json = false;
    const cli_option options[] = {{"json", 0, CLI_FLAG, &json, NULL, "print JSON"}};
    const cli_spec spec = {
        .command = "inspect",
        .usage = "FILE [--json]",
        .about = "Says what is in a file, after checking it: rotations that `oscar calibrate` wrote (per\n"
                 "layer: geometry, bits, tracked pairs), RotationZoo .pt files, other safetensors files\n"
                 "(tensors), and GGUF models (the numbers that the cache depends on). FILE may also be\n"
                 "the name of a pulled model. A damaged file gives one line and exit code 1.",
        .examples = "  oscar inspect smollm2-135m\n"
                    "  oscar inspect model.rot.safetensors --json\n"
                    "  oscar inspect k_rotation_qqt_r_h_pbr.pt",
        .options = options,
        .n_options = CLI_COUNT(options),
    };
    static cli_args args;
    int stop = cli_parse(&spec, argc, argv, &args);
    if (stop != CLI_CONTINUE) return stop;
    if (args.n != 1) return cli_usage_error(&spec, "expected one FILE, found %d", args.n);

    char path[CLI_PATH_MAX], magic[4];
    stop = cli_model_path(args.arg[0], path);
    if (stop == CLI_CONTINUE) stop = read_magic(path, magic);
    if (stop != CLI_CONTINUE) return stop;
    return memcmp(magic, "GGUF", 4) == 0 ? inspect_gguf(path, json) : inspect_rotations(path, json);
}
