/*
 * bench_append.cu - times append inside a CUDA graph: one token for 32 sequences, and a chunk of
 * 2,048 tokens; 8 KV heads, head_dim 128, default recipe with 16 tracked pairs.
 */
#include <math.h>

#include <random>

#include "timing.h"

static const int D = 128, H = 8;

static void bench(const oscar_cuda_layer *layer, int n_tokens, int n_seqs, const char *what) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<float> k((size_t)n_tokens * H * D), v(k.size());
    for (float &x : k) x = normal(random);
    for (float &x : v) x = normal(random);
    const int a_seq = n_tokens / n_seqs, stride = (1000 + a_seq) / 64 + 1;
    std::vector<int> seqs(n_tokens), positions(n_tokens), table(n_seqs * stride);
    for (int i = 0; i < n_tokens; i++) {
        seqs[i] = i % n_seqs;
        positions[i] = 1000 + i / n_seqs;
    }
    for (size_t i = 0; i < table.size(); i++) table[i] = (int)i;
    const size_t rows = (size_t)oscar_cuda_overlay_rows(layer);
    oscar_cuda_append_args a = OSCAR_CUDA_APPEND_ARGS_INIT;
    a.n_tokens = n_tokens;
    a.dtype = OSCAR_DTYPE_F32;
    a.k = upload(k);
    a.v = upload(v);
    a.seqs = upload(seqs);
    a.positions = upload(positions);
    a.block_table = upload(table);
    a.table_stride = stride;
    a.pages = upload(std::vector<uint8_t>(table.size() * H * oscar_cuda_tile_bytes(D, 2, 2)));
    a.overlay_k = upload(std::vector<uint16_t>(n_seqs * H * rows * D));
    a.overlay_v = upload(std::vector<uint16_t>(n_seqs * H * rows * D));
    oscar_error error;
    const float us = time_graph(10, 11, [&](cudaStream_t stream) { check(oscar_cuda_append(layer, &a, stream, &error), error); });
    printf("append %s: %d tokens x %d heads, %.1f us\n", what, n_tokens, H, us);
}

int main() {
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        fprintf(stderr, "no CUDA device\n");
        return 77;
    }
    std::mt19937 random(3);
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
    o.ring = 2304;
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
    bench(layer, 32, 32, "one token of 32 sequences");
    bench(layer, 2048, 1, "a chunk");
    oscar_cuda_layer_free(layer);
    return 0;
}
