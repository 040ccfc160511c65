/*
 * bench_prefill.cu - times the last chunk of a prompt: append and attention over its history in 2 bits.
 *
 *   bench_prefill [key=value ...]   d, t (tokens of history, the chunk's included), n (tokens of the chunk),
 *                                   g (query heads a KV head), h (KV heads), tracked, bias (factor of the tracked
 *                                   mean: biases of more than some logits need low halves)
 */
#include <math.h>
#include <string.h>

#include <random>

#include "timing.h"

struct Options {
    int d = 128, h = 8, g = 4, t = 32768, n = 2048, tracked = 0, bias = 1;
};

static oscar_cuda_layer *make_layer(const Options &o) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    const size_t square = (size_t)o.h * o.d * o.d;
    std::vector<float> rotation(square), mean((size_t)o.h * o.d), b(square, 0.0f), dg(mean.size(), 1.0f);
    for (float &x : rotation) x = normal(random) / sqrtf((float)o.d);
    for (float &x : mean) x = 0.3f * normal(random);
    std::vector<float> tracked_mean(mean);
    for (float &x : tracked_mean) x *= (float)o.bias;
    for (int h = 0; h < o.h; h++)
        for (int i = 0; i < o.d; i++) {
            b[((size_t)h * o.d + i) * o.d + i] = 1;
            for (int j = 0; j < i; j++) b[((size_t)h * o.d + i) * o.d + j] = 0.1f * normal(random);
        }
    std::vector<int> pairs((size_t)o.h * o.tracked);
    for (size_t i = 0; i < pairs.size(); i++) pairs[i] = (int)(i % o.tracked) * (o.d / 2) / o.tracked;
    oscar_rope rope = {};
    rope.layout = OSCAR_ROPE_HALF_SPLIT;
    rope.n_dims = o.d;
    rope.magnitude = 1;
    for (int f = 0; f < o.d / 2; f++) rope.inv_freq[f] = powf(1e6f, -2.0f * f / o.d);
    oscar_cuda_layer_options l = OSCAR_CUDA_LAYER_OPTIONS_INIT;
    l.n_kv_heads = o.h;
    l.n_q_heads = o.h * o.g;
    l.head_dim = o.d;
    l.ring = (256 + o.n + 63) / 64 * 64;
    l.ldlq_k = l.gain_k = l.gain_v = 1;
    l.n_tracked = o.tracked;
    l.tracked = pairs.data();
    l.rope = &rope;
    l.k_rotation = l.v_rotation = rotation.data();
    l.k_mean = l.v_mean = mean.data();
    l.k_tracked = tracked_mean.data();
    l.k_metric_b = b.data();
    l.k_metric_d = dg.data();
    oscar_cuda_layer *layer;
    oscar_error error;
    check(oscar_cuda_layer_create(&layer, &l, &error), error);
    return layer;
}

/* About normal: sums of the eight bytes of xorshift numbers, since a history has hundreds of millions. */
static std::vector<uint16_t> random_bf16(size_t n) {
    uint64_t state = 0x9e3779b97f4a7c15;
    std::vector<uint16_t> v(n);
    for (uint16_t &x : v) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        uint64_t pairs = (state & 0x00ff00ff00ff00ff) + (state >> 8 & 0x00ff00ff00ff00ff);
        pairs = (pairs & 0x0000ffff0000ffff) + (pairs >> 16 & 0x0000ffff0000ffff);
        const float f = ((float)((pairs & 0xffffffff) + (pairs >> 32)) - 1020) / 209;
        uint32_t u;
        memcpy(&u, &f, 4);
        x = (uint16_t)(u >> 16);
    }
    return v;
}

static void bench(const Options &o) {
    oscar_cuda_layer *layer = make_layer(o);
    oscar_error error;
    const int n_pages = (o.t + 63) / 64;
    std::vector<int> table(n_pages), positions(o.t), seqs(o.t, 0), length(1, o.t);
    for (int i = 0; i < n_pages; i++) table[i] = i;
    for (int i = 0; i < o.t; i++) positions[i] = i;
    const size_t row = (size_t)o.h * o.d, rows = (size_t)oscar_cuda_overlay_rows(layer);
    oscar_cuda_append_args a = OSCAR_CUDA_APPEND_ARGS_INIT;
    const uint16_t *k = upload(random_bf16(o.t * row)), *v = upload(random_bf16(o.t * row));
    const int *all_positions = upload(positions);
    a.seqs = upload(seqs);
    a.block_table = upload(table);
    a.table_stride = n_pages;
    check(cudaMalloc(&a.pages, (size_t)n_pages * o.h * oscar_cuda_tile_bytes(o.d, 2, 2)), "pages");
    check(cudaMalloc(&a.overlay_k, rows * row * 2), "overlay");
    check(cudaMalloc(&a.overlay_v, rows * row * 2), "overlay");
    for (int first = 0; first < o.t; first += o.n) {
        a.n_tokens = std::min(o.n, o.t - first);
        a.k = k + first * row;
        a.v = v + first * row;
        a.positions = all_positions + first;
        check(oscar_cuda_append(layer, &a, NULL, &error), error);
    }
    oscar_cuda_decode_args q = OSCAR_CUDA_DECODE_ARGS_INIT;
    q.n_seqs = 1;
    q.n_q_tokens = o.n;
    q.q = upload(random_bf16(o.n * row * o.g));
    check(cudaMalloc(&q.out, o.n * row * o.g * 2), "out");
    q.pages = a.pages;
    q.block_table = a.block_table;
    q.table_stride = n_pages;
    q.lengths = upload(length);
    q.overlay_k = a.overlay_k;
    q.overlay_v = a.overlay_v;
    q.logit_scale = 1 / sqrtf((float)o.d);
    q.out_rotated = 1;
    a.n_tokens = o.n;
    a.k = k + (o.t - o.n) * row;
    a.v = v + (o.t - o.n) * row;
    a.positions = all_positions + o.t - o.n;
    const float append = time_graph(3, 7, [&](cudaStream_t s) { check(oscar_cuda_append(layer, &a, s, &error), error); });
    const float attend = time_graph(3, 7, [&](cudaStream_t s) { check(oscar_cuda_prefill(layer, &q, s, &error), error); });
    /* Products of the visible pairs. */
    const double pairs = (double)o.n * o.t - 0.5 * o.n * (o.n - 1);
    const double flops = 4.0 * pairs * o.d * o.h * o.g;
    printf("prefill d %d, chunk %d of %d, GQA %d, tracked %d (bias %d): attention %.0f us (%.0f TFLOP/s), append %.0f us (%.1f %%)\n", o.d,
           o.n, o.t, o.g, o.tracked, o.bias, attend, flops / attend / 1e6, append, 100 * append / attend);
    oscar_cuda_layer_free(layer);
}

int main(int argc, char **argv) {
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        fprintf(stderr, "no CUDA device\n");
        return 77;
    }
    Options o;
    const struct {
        const char *name;
        int *value;
    } names[] = {{"d=", &o.d}, {"h=", &o.h}, {"g=", &o.g}, {"t=", &o.t}, {"n=", &o.n}, {"tracked=", &o.tracked}, {"bias=", &o.bias}};
    for (int i = 1; i < argc; i++) {
        bool known = false;
        for (const auto &n : names)
            if (!strncmp(argv[i], n.name, strlen(n.name))) {
                *n.value = atoi(argv[i] + strlen(n.name));
                known = true;
            }
        if (!known) {
            fprintf(stderr, "unknown option %s; expected d=, h=, g=, t=, n=, tracked= or bias=\n", argv[i]);
            return 2;
        }
    }
    if (o.t < o.n) {
        fprintf(stderr, "t is %d, expected at least n = %d\n", o.t, o.n);
        return 2;
    }
    bench(o);
    return 0;
}
