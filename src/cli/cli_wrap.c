/*
 * cli_wrap.c - a llama.cpp program with our layer preloaded.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
           (!pass_through || setenv("OSCAR_PASS_THROUGH", "1", 1) == 0) &&
           set_number("OSCAR_SINK", cache->sink) && set_number("OSCAR_RECENT", cache->recent) &&
           set_number("OSCAR_LOOKAHEAD", cache->lookahead) &&
           set_number("OSCAR_BITS_K", cache->bits_k) && set_number("OSCAR_BITS_V", cache->bits_v) &&
           set_number("OSCAR_KV_MEMORY", cache->kv_memory_bytes);
}

/* Ours goes first: the dynamic linker takes a function from the first library that has it. */
static bool set_preload(const char *library) {
    const char *others = getenv("LD_PRELOAD");
    if (!others || !*others) return setenv("LD_PRELOAD", library, 1) == 0;
    size_t size = strlen(library) + 1 + strlen(others) + 1;
    char *both = malloc(size);
    if (!both) return false;
    snprintf(both, size, "%s:%s", library, others);
    bool done = setenv("LD_PRELOAD", both, 1) == 0;
    free(both);
    return done;
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

int cli_exec_wrapped(const cli_cache *cache, const char *rotations, bool pass_through, char **argv) {
    char library[CLI_PATH_MAX], program[CLI_PATH_MAX];
    int stop = cli_own_file("liboscar-llama.so", OSCAR_INSTALL_LIBDIR "/liboscar-llama.so", library);
    if (stop != CLI_CONTINUE) return stop;
    /* The list is separated by blanks and colons and knows no quoting. */
    if (strpbrk(library, " :"))
        return cli_error("%s: the dynamic linker cannot preload a path with blanks or colons",
                         library);
    find_program(argv[0], program);
    if (!set_environment(cache, rotations, pass_through) || !set_preload(library))
        return cli_error("cannot set the environment of %s: %s", argv[0], strerror(errno));
    execvp(program, argv);
    return cli_error("cannot run %s: %s", program, strerror(errno));
}
