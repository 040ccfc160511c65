/*
 * main.c - `oscar COMMAND ...`: the table of commands.
 */
#include <stdio.h>
#include <string.h>

#include "cli/cli.h"
#include "oscar/oscar.h"

typedef struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} command;

static const command commands[] = {
    {"pull", cmd_pull, "fetch a model by name"},
    {"calibrate", cmd_calibrate, "fit the rotations of a model's 2-bit cache"},
    {"run", cmd_run, "chat with a model, or complete a prompt (llama-cli)"},
    {"serve", cmd_serve, "serve a model over HTTP (llama-server)"},
    {"wrap", cmd_wrap, "run any llama.cpp program on the 2-bit cache"},
    {"eval", cmd_eval, "measure what methods cost: KL, perplexity, bits"},
    {"inspect", cmd_inspect, "say what is in a rotation file or a model"},
    {"bench", cmd_bench, "measure attention over the cache and appending to it"},
};

static void print_help(FILE *file) {
    fprintf(file,
            "oscar %s - language models on a KV cache of about 2 bits an element\n"
            "\n"
            "usage: oscar COMMAND [arguments]\n"
            "\n",
            oscar_version());
    for (int i = 0; i < CLI_COUNT(commands); i++)
        fprintf(file, "  %-10s %s\n", commands[i].name, commands[i].summary);
    fprintf(file,
            "\n"
            "Start with\n"
            "  oscar pull smollm2-135m\n"
            "  oscar calibrate smollm2-135m\n"
            "  oscar run smollm2-135m -st -p \"Why is the sky blue?\"\n"
            "\n"
            "`oscar COMMAND --help` explains a command. Results go to stdout, everything else to\n"
            "stderr. Exit codes: 0 done, 1 failed, 2 the command line makes no sense.\n");
}

int main(int argc, char **argv) {
    if (argc < 2) {
        print_help(stderr);
        return CLI_USAGE;
    }
    const char *name = argv[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || strcmp(name, "help") == 0) {
        if (argc == 2) {
            print_help(stdout);
            return cli_finish_output();
        }
        name = argv[2]; /* `oscar help run` is `oscar run --help` */
        static char help[] = "--help";
        argv[2] = help;
        argv[1] = (char *)name;
    }
    if (strcmp(name, "--version") == 0) {
        printf("oscar %s\n", oscar_version());
        return cli_finish_output();
    }
    for (int i = 0; i < CLI_COUNT(commands); i++)
        if (strcmp(name, commands[i].name) == 0) return commands[i].run(argc - 1, argv + 1);
    cli_error("unknown command '%s'; `oscar --help` lists them", name);
    return CLI_USAGE;
}
