/*
 * cmd_bench.c - `oscar bench attn|append|prefill`: what attention over the cache and appending to it
 * cost, on every instruction set, through the public interface.
 *
 * A step appends and attends, so attention alone is the difference between a step over long
 * sequences and one over nearly empty ones. A step that is not followed by oscar_seq_advance() can
 * be repeated: it writes the same rows again.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/bench_cuda.h"
#include "cli/cli.h"
#include "oscar/oscar.h"

#define MAX_SEQS 256
#define FILL_CHUNK 256
#define READ_BYTES ((size_t)256 << 20)

typedef enum bench_kind { BENCH_ATTN, BENCH_APPEND, BENCH_PREFILL } bench_kind;
static const char *const kind_names[] = {"attn", "append", "prefill"};

typedef struct bench {
    bench_kind kind;
    oscar_layer layer;
    oscar_rotations *rotations;
    oscar_cache *cache;
    int32_t depth, n_seqs; /* tokens of a sequence; sequences besides the short ones */
    double seconds;        /* time to spend on a number */
    float *q, *k, *v, *out; /* [FILL_CHUNK or n_seqs tokens, heads, head_dim] */
    int32_t seqs[MAX_SEQS + FILL_CHUNK], positions[MAX_SEQS + FILL_CHUNK];
    double read_gbs;
    double token_head_bytes;
} bench;

static uint64_t random_state = 88172645463325252u;

/* Normal enough: the sum of four uniform numbers, of variance one. */
static float random_number(void) {
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        random_state ^= random_state << 13;
        random_state ^= random_state >> 7;
        random_state ^= random_state << 17;
        sum += (float)(random_state >> 40) * 0x1p-24f - 0.5f;
    }
    return sum * 1.7320508f;
}

static void fill_random(float *x, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = random_number();
}

/* GB/s of one core reading memory that no cache holds, the best of five. */
static double read_bandwidth(void) {
    uint64_t *memory = malloc(READ_BYTES);
    if (!memory) return 0;
    memset(memory, 1, READ_BYTES);
    double best = 0;
    volatile uint64_t sink;
    for (int round = 0; round < 5; round++) {
        uint64_t sum[8] = {0};
        double start = cli_seconds();
        for (size_t i = 0; i < READ_BYTES / sizeof *memory; i += 8)
            for (int j = 0; j < 8; j++) sum[j] += memory[i + (size_t)j];
        double rate = (double)READ_BYTES / (cli_seconds() - start) * 1e-9;
        sink = sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
        if (rate > best) best = rate;
    }
    (void)sink;
    free(memory);
    return best;
}

/* One step of n tokens as b->seqs and b->positions say. */
static oscar_status step(bench *b, int32_t n, oscar_error *error) {
    oscar_step s = OSCAR_STEP_INIT;
    s.n_tokens = n;
    s.seqs = b->seqs;
    s.positions = b->positions;
    s.q = b->q, s.k = b->k, s.v = b->v, s.out = b->out;
    s.logit_scale = 1.0f / sqrtf((float)b->layer.head_dim);
    return oscar_cache_attend(b->cache, 0, &s, error);
}

static size_t q_floats(const bench *b) { return (size_t)b->layer.n_q_heads * (size_t)b->layer.head_dim; }
static size_t kv_floats(const bench *b) { return (size_t)b->layer.n_kv_heads * (size_t)b->layer.head_dim; }

static oscar_status fill_sequence(bench *b, int32_t seq, int32_t n_tokens, oscar_error *error) {
    for (int32_t at = 0; at < n_tokens; at += FILL_CHUNK) {
        int32_t n = n_tokens - at < FILL_CHUNK ? n_tokens - at : FILL_CHUNK;
        fill_random(b->q, (size_t)n * q_floats(b));
        fill_random(b->k, (size_t)n * kv_floats(b));
        fill_random(b->v, (size_t)n * kv_floats(b));
        for (int32_t i = 0; i < n; i++) b->seqs[i] = seq, b->positions[i] = at + i;
        oscar_status status = oscar_seq_reserve(b->cache, seq, n, error);
        if (!status) status = step(b, n, error);
        if (!status) status = oscar_seq_advance(b->cache, seq, n, error);
        if (status) return status;
    }
    return oscar_seq_reserve(b->cache, seq, b->kind == BENCH_PREFILL ? FILL_CHUNK : 1, error);
}

/* Sequences 0 .. n_seqs - 1 of `depth` tokens, n_seqs .. 2 n_seqs - 1 of one page. */
static oscar_status open_cache(bench *b, oscar_error *error) {
    oscar_cache_options o = OSCAR_CACHE_OPTIONS_INIT;
    size_t tokens = (size_t)(b->n_seqs > FILL_CHUNK ? b->n_seqs : FILL_CHUNK);
    o.n_layers = 1;
    o.layers = &b->layer;
    o.rotations = b->rotations;
    o.n_seqs_max = 2 * b->n_seqs;
    o.n_tokens_max = (int64_t)b->n_seqs * (b->depth + 2 * (FILL_CHUNK + 2 * OSCAR_PAGE_TOKENS));
    o.n_chunk_max = (int32_t)tokens;
    o.sink = o.recent = o.lookahead = 0;
    b->q = calloc(tokens * q_floats(b), sizeof(float));
    b->k = calloc(tokens * kv_floats(b), sizeof(float));
    b->v = calloc(tokens * kv_floats(b), sizeof(float));
    b->out = calloc(tokens * q_floats(b), sizeof(float));
    if (!b->q || !b->k || !b->v || !b->out) return OSCAR_ERROR_MEMORY;
    oscar_status status = oscar_cache_create(&b->cache, &o, error);
    for (int32_t i = 0; !status && i < 2 * b->n_seqs; i++)
        status = fill_sequence(b, i, i < b->n_seqs ? b->depth : OSCAR_PAGE_TOKENS - 1, error);
    oscar_cache_stats stats = {.struct_size = sizeof stats};
    if (!status) oscar_cache_get_stats(b->cache, &stats);
    b->token_head_bytes = (double)stats.page_bytes / OSCAR_PAGE_TOKENS / b->layer.n_kv_heads;
    return status;
}

static void close_cache(bench *b) {
    oscar_cache_free(b->cache);
    oscar_rotations_free(b->rotations);
    free(b->q), free(b->k), free(b->v), free(b->out);
}

/* Nanoseconds of a step: the least of many. Its tokens: prefill n that follow each other in sequence
 * `first`, else one in each of n sequences from `first` on. */
static oscar_status time_step(bench *b, int32_t first, int32_t n, double *ns, oscar_error *error) {
    for (int32_t i = 0; i < n; i++) {
        int32_t seq = b->kind == BENCH_PREFILL ? first : first + i;
        b->seqs[i] = seq;
        b->positions[i] = (int32_t)oscar_seq_length(b->cache, seq) + (b->kind == BENCH_PREFILL ? i : 0);
    }
    *ns = INFINITY;
    double end = cli_seconds() + b->seconds;
    for (int round = 0; round < (b->seconds < 0 ? 1 : 5) || cli_seconds() < end; round++) {
        double start = cli_seconds();
        oscar_status status = step(b, n, error);
        double took = (cli_seconds() - start) * 1e9;
        if (status) return status;
        if (took < *ns) *ns = took;
    }
    return OSCAR_OK;
}

/* The rms difference of b->out from `want`, relative to its rms. */
static double relative_error(const bench *b, const float *want, int32_t n) {
    double square = 0, error = 0;
    for (size_t i = 0; i < (size_t)n * q_floats(b); i++) {
        double e = (double)b->out[i] - want[i];
        square += (double)want[i] * want[i];
        error += e * e;
    }
    return sqrt(error / square);
}

/* One row of the table: attention over n sequences on the path in use. */
static oscar_status measure_attn(bench *b, int32_t n, const float *want, json_t *results, oscar_error *error) {
    double base, full;
    oscar_status status = time_step(b, b->n_seqs, n, &base, error);
    if (!status) status = time_step(b, 0, n, &full, error);
    if (status) return status;
    double token_heads = (double)n * (b->depth - (OSCAR_PAGE_TOKENS - 1)) * b->layer.n_kv_heads;
    double ns = (full - base) / token_heads, gbs = b->token_head_bytes / ns;
    double off = relative_error(b, want, n);
    if (!results)
        printf("  %-11s %8d x %-7d %8.2f %8.2f %7.1f %%   %.1e\n", oscar_isa_name(), n, b->depth, ns, gbs,
               100 * gbs / b->read_gbs, off);
    else
        json_array_append_new(results, json_pack("{s:s, s:i, s:i, s:f, s:f, s:f, s:f}", "isa", oscar_isa_name(), "sequences",
                                                 n, "depth", b->depth, "ns_per_token_head", ns, "gb_per_s", gbs,
                                                 "share_of_read_bandwidth", gbs / b->read_gbs, "error", off));
    return OSCAR_OK;
}

/* A chunk of n tokens of a prompt: the difference between one far into it and one at its start, for each
 * of its tokens and each token of a KV head that it looks back at. */
static oscar_status measure_prefill(bench *b, int32_t n, const float *want, json_t *results, oscar_error *error) {
    double base, full;
    oscar_status status = time_step(b, b->n_seqs, n, &base, error);
    if (!status) status = time_step(b, 0, n, &full, error);
    if (status) return status;
    double pairs = (double)n * (b->depth - (OSCAR_PAGE_TOKENS - 1)) * b->layer.n_kv_heads;
    double ns = (full - base) / pairs, off = relative_error(b, want, n);
    double gflops = 4.0 * b->layer.head_dim * b->layer.n_q_heads / b->layer.n_kv_heads / ns;
    if (!results)
        printf("  %-11s %8d at %-7d %11.3f %9.1f %12.1f   %.1e\n", oscar_isa_name(), n, b->depth, ns, gflops, full * 1e-3 / n, off);
    else
        json_array_append_new(results, json_pack("{s:s, s:i, s:i, s:f, s:f, s:f, s:f}", "isa", oscar_isa_name(), "tokens", n, "depth",
                                                 b->depth, "ns_per_token_and_token_head", ns, "gflop_per_s", gflops, "us_per_token",
                                                 full * 1e-3 / n, "error", off));
    return OSCAR_OK;
}

/* Appending n tokens to nearly empty sequences: the step's cost without a history, a row of a head. */
static oscar_status measure_append(bench *b, int32_t n, json_t *results, oscar_error *error) {
    double ns;
    oscar_status status = time_step(b, b->n_seqs, n, &ns, error);
    if (status) return status;
    double token_head = ns / n / b->layer.n_kv_heads;
    if (!results)
        printf("  %-11s %8d %16.0f %16.0f\n", oscar_isa_name(), n, ns, token_head);
    else
        json_array_append_new(results, json_pack("{s:s, s:i, s:f, s:f}", "isa", oscar_isa_name(), "tokens", n,
                                                 "ns_per_step", ns, "ns_per_token_head", token_head));
    return OSCAR_OK;
}

/* Plain C's output is what the others are compared with. */
static oscar_status run_paths(bench *b, const char *only, json_t *results, oscar_error *error) {
    static const char *const names[] = {"ref", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512vbmi", "amx", "neon", "neondot"};
    const int32_t most = b->kind == BENCH_PREFILL ? FILL_CHUNK : b->n_seqs;
    float *want = calloc((size_t)most * q_floats(b), sizeof(float));
    double ns, seconds = b->seconds;
    oscar_status status = want ? oscar_isa_select("ref") : OSCAR_ERROR_MEMORY;
    b->seconds = -1;
    if (!status && b->kind != BENCH_APPEND) status = time_step(b, 0, most, &ns, error);
    b->seconds = seconds;
    if (!status) memcpy(want, b->out, (size_t)most * q_floats(b) * sizeof(float));
    for (int i = 0; !status && i < CLI_COUNT(names); i++) {
        if (only ? strcmp(only, names[i]) != 0 : i == 0) continue;
        if (oscar_isa_select(names[i]) != OSCAR_OK) continue;
        if (b->kind == BENCH_PREFILL) status = measure_prefill(b, FILL_CHUNK, want, results, error);
        for (int32_t n = 1; b->kind != BENCH_PREFILL && !status && n <= b->n_seqs; n *= 4)
            status = b->kind == BENCH_ATTN ? measure_attn(b, n, want, results, error) : measure_append(b, n, results, error);
    }
    oscar_isa_select(NULL);
    free(want);
    return status;
}

/* Rotary embedding with a base of 1e4, and the means of its n fastest pairs tracked. */
static oscar_status track_pairs(bench *b, int32_t n, oscar_error *error) {
    const int32_t heads = b->layer.n_kv_heads;
    int32_t *pairs = calloc((size_t)(heads * n), sizeof *pairs);
    float *means = calloc(kv_floats(b), sizeof *means);
    oscar_status status = pairs && means ? OSCAR_OK : OSCAR_ERROR_MEMORY;
    for (int32_t i = 0; !status && i < heads * n; i++) pairs[i] = i % n;
    if (!status) fill_random(means, kv_floats(b));
    if (!status) status = oscar_rotations_track(b->rotations, 0, n, pairs, means, error);
    free(pairs), free(means);
    return status;
}

/* A layer of the options' shape with Hadamard rotations, or the first layer of a rotation file. */
static int make_layer(bench *b, const char *path, int64_t d, int64_t group, int64_t heads, int64_t bits, int64_t tracked) {
    oscar_error error = {.message = "no memory"};
    oscar_rotations *file = NULL;
    b->layer = (oscar_layer){.n_kv_heads = (int32_t)heads, .n_q_heads = (int32_t)(heads * group), .head_dim = (int32_t)d,
                             .rope = {.layout = tracked ? OSCAR_ROPE_HALF_SPLIT : OSCAR_ROPE_NONE, .magnitude = 1.0f}};
    if (tracked) b->layer.rope.n_dims = (int32_t)d;
    for (int32_t f = 0; f < b->layer.rope.n_dims / 2; f++) b->layer.rope.inv_freq[f] = powf(1e4f, -2.0f * (float)f / (float)d);
    oscar_status status = path ? oscar_rotations_load(&file, path, &error)
                               : oscar_rotations_hadamard(&b->rotations, &b->layer, 1, (int32_t)bits, &error);
    if (!status && !path && tracked) status = track_pairs(b, (int32_t)tracked, &error);
    if (status) return cli_error("%s", error.message);
    if (!path) return CLI_CONTINUE;
    b->rotations = file;
    b->layer = *oscar_rotations_layer(file, 0);
    if (oscar_rotations_n_layers(file) == 1) return CLI_CONTINUE;
    return cli_error("%s has %d layers; bench takes a file of one", path, oscar_rotations_n_layers(file));
}

static void print_heading(const bench *b) {
    printf("head_dim %d, %d query heads for each of %d KV heads, one thread\n", b->layer.head_dim,
           b->layer.n_q_heads / b->layer.n_kv_heads, b->layer.n_kv_heads);
    if (b->kind == BENCH_ATTN)
        printf("%.1f bytes a token-head; this core reads %.1f GB/s\n  %-11s %18s %8s %8s %9s   %s\n", b->token_head_bytes,
               b->read_gbs, "path", "sequences x tokens", "ns", "GB/s", "of read", "error");
    else if (b->kind == BENCH_APPEND)
        printf("  %-11s %8s %16s %16s\n", "path", "tokens", "ns a step", "ns a token-head");
    else
        printf("  %-11s %19s %11s %9s %12s   %s\n", "path", "chunk at depth", "ns a pair", "GFLOP/s", "us a token", "error");
}

static int run_bench(bench *b, const char *only, bool json) {
    oscar_error error = {.message = "no memory"};
    json_t *results = json ? json_array() : NULL;
    b->read_gbs = b->kind == BENCH_ATTN ? read_bandwidth() : 0;
    oscar_status status = open_cache(b, &error);
    if (!status && !json) print_heading(b);
    if (!status) status = run_paths(b, only, results, &error);
    close_cache(b);
    if (status) {
        json_decref(results);
        return cli_error("%s", error.message);
    }
    if (!json) return cli_finish_output();
    return cli_print_json(json_pack("{s:s, s:i, s:i, s:i, s:f, s:o}", "bench", kind_names[b->kind], "head_dim",
                                    b->layer.head_dim, "n_kv_heads", b->layer.n_kv_heads, "n_q_heads", b->layer.n_q_heads,
                                    "read_gb_per_s", b->read_gbs, "results", results));
}

int cmd_bench(int argc, char **argv) {
    int64_t d = 64, group = 7, heads = 2, bits = 2, depth = 4096, seqs = 4, tracked = 0;
    double seconds = 0.5;
    const char *isa = NULL, *rotations = NULL, *device = "cpu";
    bool json = false;
    const cli_option options[] = {
        {"head-dim", 'd', CLI_INT, &d, "N", "numbers of a head, a multiple of 16 (default 64)"},
        {"group", 'g', CLI_INT, &group, "N", "query heads of a KV head (default 7)"},
        {"kv-heads", 0, CLI_INT, &heads, "N", "KV heads (default 2)"},
        {"bits", 0, CLI_INT, &bits, "2|3|4", "bits of keys and values (default 2)"},
        {"rotations", 0, CLI_STRING, &rotations, "FILE", "a rotation file of one layer, whose shape, tracked pairs\nand bits are taken"},
        {"depth", 0, CLI_INT, &depth, "N", "tokens of a sequence (default 4096)"},
        {"seqs", 0, CLI_INT, &seqs, "N", "most sequences in a step, 1, 4, 16, ... (default 4)"},
        {"isa", 0, CLI_STRING, &isa, "NAME", "one path: ref, avx2, avxvnni, avx512, avx512vnni, avx512vbmi, amx, neon, neondot (default: all\nthat run here but ref)"},
        {"device", 0, CLI_STRING, &device, "cpu|cuda", "cuda: attn on the GPU, BF16 window of 64 + 256, 1, 4, 16, ...\nsequences; against a pure read of the same pages"},
        {"tracked", 0, CLI_INT, &tracked, "N", "tracked pairs, a multiple of 8 (default 0)"},
        {"seconds", 0, CLI_DOUBLE, &seconds, "S", "time spent on a number (default 0.5)"},
        {"json", 0, CLI_FLAG, &json, NULL, "print JSON"},
    };
    const cli_spec spec = {
        .command = "bench",
        .usage = "attn|append|prefill [options]",
        .about = "Measures one layer of a cache on one thread. attn: nanoseconds a token of a KV head in\n"
                 "decode, GB/s against the read bandwidth measured in the same run, and the rms\n"
                 "difference from plain C on the same codes. append: a step over nearly empty sequences,\n"
                 "which is all quantising. prefill: a chunk of 256 tokens at a depth, nanoseconds a token\n"
                 "and token of a KV head that it looks back at. Times are the least of many, so another busy program on the\n"
                 "core shows in the bandwidth too.",
        .examples = "  oscar bench attn -d 128 -g 6\n  oscar bench append --json\n"
                    "  oscar bench attn --device cuda -d 128 -g 4 --kv-heads 8 --depth 100000 --seqs 16",
        .options = options,
        .n_options = CLI_COUNT(options),
    };
    static cli_args args;
    static bench b;
    int stop = cli_parse(&spec, argc, argv, &args);
    if (stop != CLI_CONTINUE) return stop;
    int kind = 0;
    while (args.n == 1 && kind < CLI_COUNT(kind_names) && strcmp(args.arg[0], kind_names[kind]) != 0) kind++;
    if (args.n != 1 || kind == CLI_COUNT(kind_names)) return cli_usage_error(&spec, "expected attn, append or prefill");
    b.kind = (bench_kind)kind;
    if (seqs < 1 || seqs > MAX_SEQS || depth < 2 * OSCAR_PAGE_TOKENS || depth > 1 << 24)
        return cli_usage_error(&spec, "expected 1 to %d sequences of at least %d tokens", MAX_SEQS, 2 * OSCAR_PAGE_TOKENS);
    if (d < 16 || d > OSCAR_MAX_HEAD_DIM || group < 1 || group > OSCAR_MAX_GQA_GROUP || heads < 1 || heads > 256 || bits < 2 || bits > 4)
        return cli_usage_error(&spec, "no such layer: head_dim %lld, group %lld, %lld KV heads, %lld bits", (long long)d,
                               (long long)group, (long long)heads, (long long)bits);
    if (tracked < 0 || tracked > d / 2 || tracked % 8) return cli_usage_error(&spec, "expected a multiple of 8 up to %lld after --tracked", (long long)d / 2);
    if (rotations && tracked) return cli_usage_error(&spec, "the file given by --rotations has its own tracked pairs");
    if (strcmp(device, "cuda") == 0) {
        if (b.kind != BENCH_ATTN || rotations || isa) return cli_usage_error(&spec, "--device cuda measures attn, of a layer given by options");
        return bench_cuda_attn((int32_t)d, (int32_t)heads, (int32_t)group, (int32_t)bits, (int32_t)tracked,
                               (int32_t)depth, (int32_t)seqs, json);
    }
    if (strcmp(device, "cpu") != 0) return cli_usage_error(&spec, "expected cpu or cuda after --device, found %s", device);
    if (isa && oscar_isa_select(isa) != OSCAR_OK) return cli_error("this processor or build has no path '%s'", isa);
    b.depth = (int32_t)depth;
    b.n_seqs = (int32_t)seqs;
    b.seconds = seconds;
    oscar_isa_select(NULL);
    stop = make_layer(&b, rotations, d, group, heads, bits, tracked);
    return stop == CLI_CONTINUE ? run_bench(&b, isa, json) : stop;
}
