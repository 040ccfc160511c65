/*
 * bench_decode.cu - times decode attention; src/cuda/measure.cu says how.
 *
 *   bench_decode [key=value ...]   d, b (sequences), t (tokens), g (query heads a KV head), tracked,
 *                                  tokens (query tokens), h (KV heads), bits_k, bits_v, bias (factor of the tracked means)
 * Without arguments: the first table of docs/PERFORMANCE-cuda.md.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "oscar/cuda.h"

struct Options {
    int d = 128, h = 8, g = 4, b = 1, t = 100000, tracked = 0, tokens = 1, bits_k = 2, bits_v = 2, bias = 1;
};

static void bench(const Options &o) {
    oscar_cuda_measure_options m = OSCAR_CUDA_MEASURE_OPTIONS_INIT;
    m.head_dim = o.d;
    m.n_kv_heads = o.h;
    m.n_q_heads = o.h * o.g;
    m.bits_k = o.bits_k;
    m.bits_v = o.bits_v;
    m.n_tracked = o.tracked;
    m.n_seqs = o.b;
    m.length = o.t;
    m.n_q_tokens = o.tokens;
    m.tracked_factor = o.bias;
    oscar_cuda_measure_result r;
    oscar_error error;
    const oscar_status status = oscar_cuda_measure(&m, &r, &error);
    if (status != OSCAR_OK) {
        fprintf(stderr, "%s\n", error.message);
        exit(status == OSCAR_ERROR_UNSUPPORTED ? 77 : 1);
    }
    const double gbs = r.bytes / r.us / 1e3;
    if (o.bias != 1) printf("bias %d  ", o.bias);
    if (o.bits_k > 2 || o.bits_v > 2) printf("bits %d/%d  ", o.bits_k, o.bits_v);
    printf("d %3d  B %2d  T %7d  GQA %2d  tracked %3d  q %d | %8.1f us (turned back %8.1f) %5.0f GB/s | read %8.1f us "
           "%5.0f GB/s | %5.1f %% of read | %.2f ps a token-head\n",
           o.d, o.b, o.t, o.g, o.tracked, o.tokens, r.us, r.turned_back_us, gbs, r.read_us, r.read_gb_per_s,
           100 * gbs / r.read_gb_per_s, r.us * 1e6 / ((double)o.b * o.t * o.h));
    fflush(stdout);
}

static void set_option(Options &o, const char *argument) {
    const char *equals = strchr(argument, '=');
    const struct {
        const char *name;
        int *value;
    } names[] = {{"d", &o.d},   {"h", &o.h},           {"g", &o.g},           {"b", &o.b},           {"t", &o.t},
                 {"tracked", &o.tracked}, {"tokens", &o.tokens}, {"bits_k", &o.bits_k}, {"bits_v", &o.bits_v}, {"bias", &o.bias}};
    for (const auto &n : names)
        if (equals && strlen(n.name) == (size_t)(equals - argument) && !strncmp(n.name, argument, equals - argument)) {
            *n.value = atoi(equals + 1);
            return;
        }
    fprintf(stderr, "unknown option %s; expected d=, h=, g=, b=, t=, tracked=, tokens=, bits_k=, bits_v= or bias=\n", argument);
    exit(2);
}

int main(int argc, char **argv) {
    Options o;
    if (argc > 1) {
        for (int i = 1; i < argc; i++) set_option(o, argv[i]);
        bench(o);
        return 0;
    }
    for (int b : {1, 32})
        for (int g : {4, 8, 12})
            for (int tracked : {0, 16, 64}) {
                o.b = b;
                o.g = g;
                o.tracked = tracked;
                bench(o);
            }
    return 0;
}
