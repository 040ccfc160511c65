/*
 * bench_append.cu - times append and settle inside CUDA graphs: 8 KV heads, head_dim 128, default recipe with 16 tracked
 * pairs. Launches rotate over the layers of a model, each with constants, pages and overlay of its own, so that the
 * cache holds none of them.
 */
#include <math.h>
#include <string.h>

#include <random>

#include "timing.h"

static const int D = 128, H = 8;

/* Does nothing, and does not let the next kernel start early. */
__global__ void nothing(void) {}

static oscar_cuda_layer *make_layer(int seed, int ring) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> rotation((size_t)H * D * D), mean((size_t)H * D, 0.5f), b(rotation.size(), 0.0f), dg(mean.size(), 1.0f);
    for (float &x : rotation) x = normal(random) / sqrtf((float)D);
    for (int h = 0; h < H; h++)
        for (int i = 0; i < D; i++) {
            b[((size_t)h * D + i) * D + i] = 1;
            for (int j = 0; j < i; j++) b[((size_t)h * D + i) * D + j] = 0.1f * normal(random);
        }
    std::vector<int> tracked(H * 16);
    for (size_t i = 0; i < tracked.size(); i++) tracked[i] = (int)(i % 16) * 4;
    oscar_rope rope = {};
    rope.layout = OSCAR_ROPE_HALF_SPLIT;
    rope.n_dims = D;
    rope.magnitude = 1;
    for (int f = 0; f < D / 2; f++) rope.inv_freq[f] = powf(1e6f, -2.0f * f / D);
    oscar_cuda_layer_options o = OSCAR_CUDA_LAYER_OPTIONS_INIT;
    o.n_kv_heads = H;
    o.n_q_heads = 4 * H;
    o.head_dim = D;
    o.ring = ring;
    o.ldlq_k = o.gain_k = o.gain_v = 1;
    o.n_tracked = 16;
    o.tracked = tracked.data();
    o.rope = &rope;
    o.k_rotation = o.v_rotation = rotation.data();
    o.k_mean = o.v_mean = o.k_tracked = mean.data();
    o.k_metric_b = b.data();
    o.k_metric_d = dg.data();
    oscar_cuda_layer *layer;
    oscar_error error;
    check(oscar_cuda_layer_create(&layer, &o, &error), error);
    return layer;
}

/* A layer, and what is done to it. */
struct Work {
    oscar_cuda_layer *layer;
    oscar_cuda_append_args append = OSCAR_CUDA_APPEND_ARGS_INIT;
    oscar_cuda_settle_args settle = OSCAR_CUDA_SETTLE_ARGS_INIT;
};

/* [n_tokens, H, D] bf16, drawn once. */
static std::vector<uint16_t> random_rows(size_t n_tokens) {
    static std::mt19937 random(7);
    static std::normal_distribution<float> normal;
    static std::vector<uint16_t> v;
    while (v.size() < n_tokens * H * D) {
        const float f = normal(random);
        uint32_t u;
        memcpy(&u, &f, 4);
        v.push_back((uint16_t)(u >> 16));
    }
    return std::vector<uint16_t>(v.begin(), v.begin() + n_tokens * H * D);
}

/* per_seq tokens of each of n_seqs sequences, from position `first` on. fill: overlay rows of random numbers, for
 * settling. */
static Work make_work(int seed, int n_seqs, int per_seq, int first, bool fill) {
    Work w;
    w.layer = make_layer(seed, (256 + per_seq + 63) / 64 * 64);
    const int n_tokens = n_seqs * per_seq, stride = (first + per_seq) / 64 + 1;
    std::vector<int> seqs(n_tokens), positions(n_tokens), table(n_seqs * stride);
    for (int i = 0; i < n_tokens; i++) {
        seqs[i] = i % n_seqs;
        positions[i] = first + i / n_seqs;
    }
    for (size_t i = 0; i < table.size(); i++) table[i] = (int)i;
    const size_t rows = (size_t)oscar_cuda_overlay_rows(w.layer), overlay = n_seqs * rows;
    oscar_cuda_append_args &a = w.append;
    a.n_tokens = n_tokens;
    a.k = upload(random_rows(n_tokens));
    a.v = upload(random_rows(n_tokens));
    a.seqs = upload(seqs);
    a.positions = upload(positions);
    a.block_table = upload(table);
    a.table_stride = stride;
    a.pages = upload(std::vector<uint8_t>(table.size() * H * oscar_cuda_tile_bytes(D, 2, 2)));
    if (fill) {
        a.overlay_k = upload(random_rows(overlay));
        a.overlay_v = upload(random_rows(overlay));
    } else {
        check(cudaMalloc(&a.overlay_k, overlay * H * D * 2), "overlay");
        check(cudaMalloc(&a.overlay_v, overlay * H * D * 2), "overlay");
    }
    oscar_cuda_settle_args &s = w.settle;
    s.n_seqs = n_seqs;
    s.n_positions = per_seq;
    s.from = upload(std::vector<int>(n_seqs, first));
    s.to = upload(std::vector<int>(n_seqs, first + per_seq));
    s.block_table = a.block_table;
    s.table_stride = stride;
    s.pages = a.pages;
    s.overlay_k = a.overlay_k;
    s.overlay_v = a.overlay_v;
    return w;
}

static void free_work(Work &w) {
    for (const void *p : {w.append.k, w.append.v, (const void *)w.append.seqs, (const void *)w.append.positions,
                          (const void *)w.append.block_table, (const void *)w.append.pages, (const void *)w.append.overlay_k,
                          (const void *)w.append.overlay_v, (const void *)w.settle.from, (const void *)w.settle.to})
        check(cudaFree((void *)p), "free");
    oscar_cuda_layer_free(w.layer);
}

static oscar_error error;
static void append(Work &w, bool later, cudaStream_t stream) {
    w.append.codes_later = later;
    check(oscar_cuda_append(w.layer, &w.append, stream, &error), error);
}
static void settle(Work &w, cudaStream_t stream) { check(oscar_cuda_settle(w.layer, &w.settle, stream, &error), error); }

/* One token of 32 sequences, in 64 layers. */
static void bench_token(void) {
    const int n_layers = 64, n_seqs = 32;
    std::vector<Work> layers;
    for (int i = 0; i < n_layers; i++) layers.push_back(make_work(i + 1, n_seqs, 1, 1000, false));
    Work page = make_work(99, n_seqs, 64, 960, true);
    auto time_layers = [&](auto launch) { return time_graph(n_layers, 11, [&, i = 0](cudaStream_t s) mutable { launch(layers[i++], s); }); };
    const float now = time_layers([](Work &w, cudaStream_t s) { append(w, false, s); });
    const float later = time_layers([](Work &w, cudaStream_t s) { append(w, true, s); });
    const float empty = time_layers([](Work &, cudaStream_t s) { nothing<<<1, 32, 0, s>>>(); });
    const float now_apart = time_layers([](Work &w, cudaStream_t s) { append(w, false, s), nothing<<<1, 32, 0, s>>>(); }) - empty;
    const float later_apart = time_layers([](Work &w, cudaStream_t s) { append(w, true, s), nothing<<<1, 32, 0, s>>>(); }) - empty;
    const float a_page = time_graph(4, 11, [&](cudaStream_t s) { settle(page, s); });
    const float with_page = time_graph(1, 11, [&](cudaStream_t s) {
        for (Work &w : layers) append(w, true, s);
        settle(page, s);
    });
    printf("append, one token of %d sequences x %d heads, codes at once: %.2f us (%.2f behind an empty kernel)\n", n_seqs, H, now,
           now_apart);
    printf("append, the same, codes later: %.2f us (%.2f behind an empty kernel)\n", later, later_apart);
    printf("settle, 64 positions of %d sequences x %d heads: %.1f us, %.2f us a token; graph of 64 appends and one settle: %.1f us, "
           "%.2f us a token\n",
           n_seqs, H, a_page, a_page / 64, with_page, with_page / 64);
    std::vector<int> none(n_seqs, 960);
    check(cudaMemcpy((void *)page.settle.to, none.data(), none.size() * sizeof(int), cudaMemcpyHostToDevice), "to");
    const float nothing_due = time_graph(64, 11, [&](cudaStream_t s) { settle(page, s); });
    printf("settle with nothing to do: %.2f us\n", nothing_due);
    for (Work &w : layers) free_work(w);
    free_work(page);
}

/* A chunk of tokens, in 16 layers. */
static void bench_chunk(int n_tokens) {
    const int n_layers = 16;
    std::vector<Work> layers;
    for (int i = 0; i < n_layers; i++) layers.push_back(make_work(i + 1, 1, n_tokens, 1024, true));
    auto time_layers = [&](auto launch) { return time_graph(n_layers, 7, [&, i = 0](cudaStream_t s) mutable { launch(layers[i++], s); }); };
    const float now = time_layers([](Work &w, cudaStream_t s) { append(w, false, s); });
    const float codes = time_layers([](Work &w, cudaStream_t s) { settle(w, s); });
    const float later = time_layers([](Work &w, cudaStream_t s) { append(w, true, s); });
    printf("append, a chunk of %d tokens x %d heads, codes at once: %.1f us; codes later: %.1f us, their settle %.1f us\n", n_tokens, H,
           now, later, codes);
    for (Work &w : layers) free_work(w);
}

int main() {
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        fprintf(stderr, "no CUDA device\n");
        return 77;
    }
    bench_token();
    for (int n_tokens : {2048, 640, 256}) bench_chunk(n_tokens);
    return 0;
}
