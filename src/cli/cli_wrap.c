/*
 * cli_wrap.c - a llama.cpp program with our layer preloaded, or a Python program with it in front.
 *
 * Python opens libllama with dlopen(), where a preload is not looked at. It gets a folder of libraries
 * whose libllama.so needs ours before the true one (scripts/front-library.sh), which llama-cpp-python
 * takes by LLAMA_CPP_LIB_PATH. The folder is made once and kept in the cache folder.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "cli/cli.h"

/* False, with errno set, when the environment cannot grow. */
static bool set_number(const char *name, int64_t value) {
    char text[32];
    if (value < 0) return true;
    snprintf(text, sizeof text, "%lld", (long long)value);
    return setenv(name, text, 1) == 0;
}

static bool set_environment(const cli_cache *cache, const char *rotations, bool pass_through) {
    return setenv("OSCAR_KV", cache->kv, 1) == 0 &&
           (!rotations || setenv("OSCAR_ROTATIONS", rotations, 1) == 0) &&
           (!cache->stats || setenv("OSCAR_STATS", cache->stats, 1) == 0) &&
           (!pass_through || setenv("OSCAR_PASS_THROUGH", "1", 1) == 0) &&
           set_number("OSCAR_SINK", cache->sink) && set_number("OSCAR_RECENT", cache->recent) &&
           set_number("OSCAR_LOOKAHEAD", cache->lookahead) &&
           set_number("OSCAR_BITS_K", cache->bits_k) && set_number("OSCAR_BITS_V", cache->bits_v) &&
           set_number("OSCAR_KV_MEMORY", cache->kv_memory_bytes);
}

/* In a build with AddressSanitizer "RUNTIME:": the program has none, so the runtime goes before everything. */
#ifndef OSCAR_SANITIZER_RUNTIME
#define OSCAR_SANITIZER_RUNTIME ""
#endif

/* Ours goes first: the dynamic linker takes a function from the first library that has it. */
static bool set_preload(const char *library) {
    const char *others = getenv("LD_PRELOAD");
    if (!others) others = "";
    size_t size = sizeof OSCAR_SANITIZER_RUNTIME + strlen(library) + 1 + strlen(others);
    char *all = malloc(size);
    if (!all) return false;
    snprintf(all, size, "%s%s%s%s", OSCAR_SANITIZER_RUNTIME, library, *others ? ":" : "", others);
    bool done = setenv("LD_PRELOAD", all, 1) == 0;
    free(all);
    /* What the program leaks is its own. */
    return done && (!*OSCAR_SANITIZER_RUNTIME || setenv("ASAN_OPTIONS", "detect_leaks=0", 0) == 0);
}

/* A name without a slash that neither folder has is left to PATH. */
static void find_program(const char *name, char path[CLI_PATH_MAX]) {
    const char *folders[2] = {getenv("OSCAR_LLAMA_BIN"), OSCAR_LLAMA_BIN};
    for (int i = 0; i < 2 && !strchr(name, '/'); i++) {
        if (!folders[i] || !*folders[i]) continue;
        int length = snprintf(path, CLI_PATH_MAX, "%s/%s", folders[i], name);
        if (length < CLI_PATH_MAX && access(path, X_OK) == 0) return;
    }
    snprintf(path, CLI_PATH_MAX, "%s", name);
}

/* The file that execvp() would run. */
static bool resolve(const char *program, char path[CLI_PATH_MAX]) {
    if (strchr(program, '/')) return snprintf(path, CLI_PATH_MAX, "%s", program) < CLI_PATH_MAX;
    const char *list = getenv("PATH");
    for (const char *p = list; p && *p;) {
        int n = (int)strcspn(p, ":");
        if (snprintf(path, CLI_PATH_MAX, "%.*s/%s", n, p, program) < CLI_PATH_MAX && access(path, X_OK) == 0) return true;
        p += n + (p[n] == ':');
    }
    return false;
}

/* An interpreter by its name, or a script by its first line. */
static bool is_python(const char *program) {
    char path[CLI_PATH_MAX], line[256] = "";
    if (!resolve(program, path)) return false;
    const char *name = strrchr(path, '/');
    if (strncmp(name ? name + 1 : path, "python", 6) == 0) return true;
    FILE *file = fopen(path, "r");
    if (!file) return false;
    bool script = fgets(line, sizeof line, file) && line[0] == '#' && line[1] == '!' && strstr(line, "python");
    fclose(file);
    return script;
}

static bool newer(const char *path, const char *than) {
    struct stat a, b;
    return stat(path, &a) == 0 && stat(than, &b) == 0 && a.st_mtime >= b.st_mtime;
}

/* The folder with libllama.so: OSCAR_LLAMA_BIN, or of the llama.cpp this was built with. */
static bool find_libllama(char folder[CLI_PATH_MAX]) {
    const char *chosen = getenv("OSCAR_LLAMA_BIN");
    const char *folders[3] = {chosen && *chosen ? chosen : OSCAR_LLAMA_BIN, OSCAR_LLAMA_BIN, OSCAR_LLAMA_BIN "/../lib"};
    for (int i = 0; i < 3; i++) {
        char file[CLI_PATH_MAX];
        snprintf(folder, CLI_PATH_MAX, "%s", folders[i]);
        if (snprintf(file, sizeof file, "%s/libllama.so", folders[i]) < CLI_PATH_MAX && access(file, R_OK) == 0) return true;
    }
    return false;
}

/* Runs the script, its output on standard error. */
static bool make_front(const char *script, const char *folder, const char *ours, const char *theirs) {
    pid_t child = fork();
    if (child == 0) {
        dup2(STDERR_FILENO, STDOUT_FILENO);
        execl(script, script, folder, ours, theirs, (char *)NULL);
        _exit(127);
    }
    int status = -1;
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    return child > 0 && status == 0;
}

/* LLAMA_CPP_LIB_PATH to a folder where ours stands before libllama. One that the user set stays. */
static int set_front(const char *ours) {
    char theirs[CLI_PATH_MAX], script[CLI_PATH_MAX], name[64], folder[CLI_PATH_MAX], library[CLI_PATH_MAX + 32],
        true_library[CLI_PATH_MAX + 32];
    const char *given = getenv("LLAMA_CPP_LIB_PATH");
    if (given && *given) return CLI_CONTINUE;
    if (!find_libllama(theirs)) return cli_error("no libllama.so in " OSCAR_LLAMA_BIN " for Python to open");
    /* Of both paths: other libraries, another folder. */
    uint64_t hash = XXH3_64bits_withSeed(theirs, strlen(theirs), XXH3_64bits(ours, strlen(ours)));
    snprintf(name, sizeof name, "front-%016" PRIx64, hash);
    int stop = cli_cache_folder(folder, name);
    if (stop == CLI_CONTINUE)
        stop = cli_own_file(OSCAR_SOURCE_DIR "/scripts/front-library.sh", OSCAR_INSTALL_DATADIR "/oscar/front-library.sh", script);
    if (stop != CLI_CONTINUE) return stop;
    snprintf(library, sizeof library, "%s/libllama.so", folder);
    snprintf(true_library, sizeof true_library, "%s/libllama.so", theirs);
    if (!(newer(library, ours) && newer(library, true_library)) && !make_front(script, folder, ours, theirs))
        return cli_error("%s: could not be made; Python programs need it", library);
    if (setenv("LLAMA_CPP_LIB_PATH", folder, 1) != 0) return cli_error("cannot set LLAMA_CPP_LIB_PATH: %s", strerror(errno));
    return CLI_CONTINUE;
}

int cli_exec_wrapped(const cli_cache *cache, const char *rotations, bool pass_through, char **argv) {
    char library[CLI_PATH_MAX], program[CLI_PATH_MAX];
    int stop = cli_own_file("liboscar-llama.so", OSCAR_INSTALL_LIBDIR "/liboscar-llama.so", library);
    if (stop != CLI_CONTINUE) return stop;
    /* The list is separated by blanks and colons and knows no quoting. */
    if (strpbrk(library, " :"))
        return cli_error("%s: the dynamic linker cannot preload a path with blanks or colons",
                         library);
    find_program(argv[0], program);
    if (is_python(program) && (stop = set_front(library)) != CLI_CONTINUE) return stop;
    if (!set_environment(cache, rotations, pass_through) || !set_preload(library))
        return cli_error("cannot set the environment of %s: %s", argv[0], strerror(errno));
    execvp(program, argv);
    return cli_error("cannot run %s: %s", program, strerror(errno));
}
