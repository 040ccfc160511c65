/*
 * bench_cuda.c - `oscar bench attn --device cuda`: decode attention on a GPU, through liboscar-cuda, which is
 * opened at run time: this program runs without it.
 */
#include "cli/bench_cuda.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/cli.h"
#include "oscar/cuda.h"

typedef oscar_status measure_function(const oscar_cuda_measure_options *, oscar_cuda_measure_result *, oscar_error *);

/* The library beside this program, as a build leaves it, or in ../lib, as an installation does; then where the loader
 * looks. NULL after a message. */
static measure_function *open_measure(void) {
    static const char *const places[] = {"", "../" OSCAR_INSTALL_LIBDIR "/"};
    char program[4096], path[4400];
    void *library = NULL;
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    if (n < 0) n = 0;
    program[n] = 0;
    char *slash = strrchr(program, '/');
    if (slash) slash[1] = 0;
    for (int i = 0; slash && !library && i < CLI_COUNT(places); i++) {
        snprintf(path, sizeof path, "%s%sliboscar-cuda.so.0", program, places[i]);
        library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    if (!library) library = dlopen("liboscar-cuda.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        cli_error("liboscar-cuda cannot be opened (it is built where nvcc is): %s", dlerror());
        return NULL;
    }
    measure_function *measure;
    void *symbol = dlsym(library, "oscar_cuda_measure");
    memcpy(&measure, &symbol, sizeof measure);
    if (!symbol) cli_error("liboscar-cuda has no oscar_cuda_measure: %s", dlerror());
    return measure;
}

static json_t *result_json(const oscar_cuda_measure_options *o, const oscar_cuda_measure_result *r) {
    double gbs = r->bytes / r->us / 1e3;
    return json_pack("{s:i, s:i, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "sequences", o->n_seqs, "depth", o->length, "us", r->us,
                     "turned_back_us", r->turned_back_us, "gb_per_s", gbs, "read_us", r->read_us, "read_gb_per_s",
                     r->read_gb_per_s, "share_of_read_bandwidth", gbs / r->read_gb_per_s, "ps_per_token_head",
                     r->us * 1e6 / ((double)o->n_seqs * o->length * o->n_kv_heads));
}

static void print_result(const oscar_cuda_measure_options *o, const oscar_cuda_measure_result *r) {
    double gbs = r->bytes / r->us / 1e3;
    printf("  %8d x %-8d %9.1f %12.1f %8.0f %9.1f %7.1f %%\n", o->n_seqs, o->length, r->us, r->turned_back_us, gbs,
           r->read_us, 100 * gbs / r->read_gb_per_s);
}

int bench_cuda_attn(int32_t head_dim, int32_t n_kv_heads, int32_t group, int32_t bits, int32_t n_tracked, int32_t depth,
                    int32_t n_seqs, bool json) {
    measure_function *measure = open_measure();
    if (!measure) return CLI_FAILURE;
    oscar_cuda_measure_options o = OSCAR_CUDA_MEASURE_OPTIONS_INIT;
    o.head_dim = head_dim;
    o.n_kv_heads = n_kv_heads;
    o.n_q_heads = group * n_kv_heads;
    o.bits_k = o.bits_v = bits;
    o.n_tracked = n_tracked;
    o.length = depth;
    oscar_cuda_measure_result r = {.us = 0};
    json_t *results = json_array();
    for (o.n_seqs = 1; o.n_seqs <= n_seqs; o.n_seqs *= 4) {
        oscar_error error;
        if (measure(&o, &r, &error) != OSCAR_OK) {
            json_decref(results);
            return cli_error("%s", error.message);
        }
        json_array_append_new(results, result_json(&o, &r));
        if (json) continue;
        if (o.n_seqs == 1)
            printf("%s, %d multiprocessors, clocks up to %d MHz, memory %d MHz\n"
                   "head_dim %d, %d query heads for each of %d KV heads, %d tracked pairs; us in the rotated basis and turned back\n"
                   "  %-19s %9s %12s %8s %9s %9s\n",
                   r.device, r.n_multiprocessors, r.clock_mhz, r.memory_clock_mhz, head_dim, group, n_kv_heads, n_tracked,
                   "sequences x tokens", "us", "turned back", "GB/s", "read us", "of read");
        print_result(&o, &r);
    }
    if (!json) {
        json_decref(results);
        return cli_finish_output();
    }
    return cli_print_json(json_pack("{s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:o}", "bench", "attn", "device", r.device,
                                    "clock_mhz", r.clock_mhz, "memory_clock_mhz", r.memory_clock_mhz, "head_dim", head_dim,
                                    "n_kv_heads", n_kv_heads, "n_q_heads", o.n_q_heads, "tracked", n_tracked, "results",
                                    results));
}
