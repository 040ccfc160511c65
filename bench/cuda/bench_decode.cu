/*
 * bench_decode.cu - times decode attention inside a CUDA graph, over rotated buffers.
 *
 *   oscar_bench_cuda [key=value ...]   d, b (sequences), t (tokens), g (query heads a KV head),
 *                                      tracked, tokens (query tokens), h (KV heads), bits_k, bits_v
 * Without arguments: the table of docs/PERFORMANCE-cuda.md. The pure read is a kernel that loads
 * the same tiles and does nothing with them.
 */
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <vector>

#include "oscar/cuda.h"

static void check(cudaError_t code, const char *what) {
    if (code == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
    exit(1);
}

/* Random codes and parameters: any bits are codes; parameters are finite halves of mixed sign. */
__global__ void fill_tiles(uint32_t *pages, size_t n_words, int tile_words, int d, uint32_t seed) {
    const int groups = d > 128 ? d / 128 : 1, params_first = 8 * d, params_last = 8 * d + 128 * groups;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n_words; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t x = (uint32_t)(i * 2654435761u) ^ seed;
        x ^= x >> 16;
        x *= 0x85ebca6bu;
        x ^= x >> 13;
        x *= 0xc2b2ae35u;
        x ^= x >> 16;
        const int w = (int)(i % tile_words);
        /* step in .5 .. 1, offset in -1.5 .. -1 */
        if (w >= params_first && w < params_last) x = 0xbc003800u | (x & 0x01ff03ffu);
        pages[i] = x;
    }
}

__global__ void fill_bf16(uint16_t *p, size_t n, uint32_t seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t x = (uint32_t)(i * 2654435761u) ^ seed;
        x ^= x >> 15;
        x *= 0x2c1b3c6du;
        x ^= x >> 12;
        p[i] = (uint16_t)((x & 0x807f) | (0x3f00 + (x >> 9 & 0x80)));
    }
}

/* Reads tiles with plain 16-byte loads, a warp a tile, all its loads in flight at once. */
template <int CHUNKS>
__global__ void __launch_bounds__(512) read_tiles(const uint8_t *pages, const int *table, int n_tiles, int n_heads,
                                                  uint32_t *out) {
    const int lane = threadIdx.x & 31, n_warps = gridDim.x * 16;
    uint32_t x = 0;
#pragma unroll 1
    for (int i = blockIdx.x * 16 + (threadIdx.x >> 5); i < n_tiles; i += n_warps) {
        const size_t tile = (size_t)table[i / n_heads] * n_heads + i % n_heads;
        const uint4 *p = reinterpret_cast<const uint4 *>(pages) + tile * (CHUNKS * 32) + lane;
        uint4 v[CHUNKS];
#pragma unroll
        for (int k = 0; k < CHUNKS; k++)
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(v[k].x), "=r"(v[k].y), "=r"(v[k].z), "=r"(v[k].w)
                         : "l"(p + 32 * k));
#pragma unroll
        for (int k = 0; k < CHUNKS; k++) x ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (x == 0x12345678) out[threadIdx.x] = x;
}

/* The reader of tiles of a size, which is a multiple of 512 bytes. */
typedef void (*Reader)(const uint8_t *, const int *, int, int, uint32_t *);
static Reader reader_of(size_t tile) {
    const struct {
        size_t chunks;
        Reader kernel;
    } readers[] = {{5, read_tiles<5>},   {7, read_tiles<7>},   {9, read_tiles<9>},   {11, read_tiles<11>},
                   {13, read_tiles<13>}, {15, read_tiles<15>}, {17, read_tiles<17>}, {18, read_tiles<18>},
                   {22, read_tiles<22>}, {26, read_tiles<26>}, {30, read_tiles<30>}, {34, read_tiles<34>}};
    for (const auto &r : readers)
        if (r.chunks * 512 == tile) return r.kernel;
    fprintf(stderr, "no reader of tiles of %zu bytes\n", tile);
    exit(1);
}

struct Options {
    int d = 128, h = 8, g = 4, b = 1, t = 100000, tracked = 0, tokens = 1, bits_k = 2, bits_v = 2;
};

struct Pool {
    uint8_t *pages = NULL;
    size_t bytes = 0, tile = 0;
    int d = 0;
};
static Pool pool;
static const int SINK = 64, RECENT = 256, RING = 384;

static float median_of(std::vector<float> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

/* Median time in us of one of n launches captured in one graph. */
template <class F> static float time_graph(int n, int repeats, F launch) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t start, stop;
    check(cudaStreamCreate(&stream), "stream");
    check(cudaEventCreate(&start), "event");
    check(cudaEventCreate(&stop), "event");
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    for (int i = 0; i < n; i++) launch(i, stream);
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    check(cudaGraphLaunch(exec, stream), "launch");
    check(cudaStreamSynchronize(stream), "launch");
    std::vector<float> times;
    for (int r = 0; r < repeats; r++) {
        check(cudaEventRecord(start, stream), "record");
        check(cudaGraphLaunch(exec, stream), "launch");
        check(cudaEventRecord(stop, stream), "record");
        check(cudaStreamSynchronize(stream), "synchronize");
        float ms;
        check(cudaEventElapsedTime(&ms, start, stop), "elapsed");
        times.push_back(ms * 1000 / n);
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaEventDestroy(start);
    cudaEventDestroy(stop);
    cudaStreamDestroy(stream);
    return median_of(times);
}

template <class T> static T *device_array(size_t n) {
    T *p;
    check(cudaMalloc(&p, n * sizeof(T)), "cudaMalloc");
    return p;
}

static oscar_cuda_layer *make_layer(const Options &o) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    const size_t square = (size_t)o.h * o.d * o.d;
    std::vector<float> rotation(square), mean((size_t)o.h * o.d), tracked_mean(mean.size());
    for (float &x : rotation) x = normal(random) / sqrtf((float)o.d);
    for (float &x : mean) x = normal(random);
    for (float &x : tracked_mean) x = 0.3f * normal(random);
    std::vector<int> pairs((size_t)o.h * o.tracked);
    for (size_t i = 0; i < pairs.size(); i++) /* spread over the frequencies */
        pairs[i] = (int)(i % o.tracked) * (o.d / 2) / o.tracked;
    oscar_rope rope = {};
    rope.layout = OSCAR_ROPE_HALF_SPLIT;
    rope.n_dims = o.d;
    rope.magnitude = 1;
    for (int f = 0; f < o.d / 2; f++) rope.inv_freq[f] = powf(1e6f, -2.0f * f / o.d);
    oscar_cuda_layer_options l = OSCAR_CUDA_LAYER_OPTIONS_INIT;
    l.n_kv_heads = o.h;
    l.n_q_heads = o.h * o.g;
    l.head_dim = o.d;
    l.bits_k = o.bits_k;
    l.bits_v = o.bits_v;
    l.sink = SINK;
    l.recent = RECENT;
    l.ring = RING;
    l.n_tracked = o.tracked;
    l.tracked = pairs.data();
    l.rope = &rope;
    l.k_rotation = l.v_rotation = rotation.data();
    l.k_mean = l.v_mean = mean.data();
    l.k_tracked = tracked_mean.data();
    oscar_cuda_layer *layer;
    oscar_error error;
    if (oscar_cuda_layer_create(&layer, &l, &error) != OSCAR_OK) {
        fprintf(stderr, "%s\n", error.message);
        exit(1);
    }
    return layer;
}

static void bench(const Options &o) {
    const size_t tile = oscar_cuda_tile_bytes(o.d, o.bits_k, o.bits_v), page_bytes = tile * o.h;
    if (!pool.pages) {
        pool.bytes = (size_t)24 << 30;
        pool.pages = device_array<uint8_t>(pool.bytes);
    }
    if (pool.d != o.d || pool.tile != tile) {
        fill_tiles<<<2048, 256>>>((uint32_t *)pool.pages, pool.bytes / tile * tile / 4, (int)(tile / 4), o.d, 7);
        pool.d = o.d;
        pool.tile = tile;
    }
    const size_t n_pages = pool.bytes / page_bytes;
    const int pages_a_seq = (o.t + 63) / 64;
    const size_t pages_a_set = (size_t)pages_a_seq * o.b;
    const int n_sets = (int)std::max<size_t>(1, std::min<size_t>(n_pages / pages_a_set, o.b > 1 ? 4 : 32));
    /* A set stands for a layer: pages of its own, in random order. */
    std::vector<int> order((size_t)n_sets * pages_a_set);
    std::mt19937 random(5);
    for (size_t i = 0; i < order.size(); i++) order[i] = (int)i;
    for (int i = 0; i < n_sets; i++)
        std::shuffle(order.begin() + i * pages_a_set, order.begin() + (i + 1) * pages_a_set, random);
    int *table = device_array<int>(order.size()), *lengths = device_array<int>(o.b);
    check(cudaMemcpy(table, order.data(), order.size() * 4, cudaMemcpyHostToDevice), "table");
    std::vector<int> host_lengths(o.b, o.t);
    check(cudaMemcpy(lengths, host_lengths.data(), o.b * 4, cudaMemcpyHostToDevice), "lengths");
    const size_t overlay_set = (size_t)o.b * o.h * (SINK + RING) * o.d;
    uint16_t *ok = device_array<uint16_t>(overlay_set * n_sets), *ov = device_array<uint16_t>(overlay_set * n_sets);
    fill_bf16<<<1024, 256>>>(ok, overlay_set * n_sets, 11);
    fill_bf16<<<1024, 256>>>(ov, overlay_set * n_sets, 13);
    const size_t q_size = (size_t)o.b * o.tokens * o.h * o.g * o.d;
    uint16_t *q = device_array<uint16_t>(q_size), *out = device_array<uint16_t>(q_size);
    fill_bf16<<<64, 256>>>(q, q_size, 17);
    std::vector<oscar_cuda_layer *> layers;
    for (int i = 0; i < std::min(n_sets, 8); i++) layers.push_back(make_layer(o));
    const size_t workspace_bytes = oscar_cuda_workspace_bytes(layers[0], o.b, o.tokens);
    void *workspace = device_array<uint8_t>(workspace_bytes);
    check(cudaMemset(workspace, 0, workspace_bytes), "workspace");
    const int repeats = o.b > 1 ? 7 : 11;
    const float read = time_graph(n_sets, repeats, [&](int i, cudaStream_t stream) {
        reader_of(tile)<<<264, 512, 0, stream>>>(pool.pages, table + (size_t)i * pages_a_set, (int)pages_a_set * o.h, o.h,
                                        (uint32_t *)out);
    });
    float time[2];
    for (int back = 0; back < 2; back++)
        time[back] = time_graph(n_sets, repeats, [&](int i, cudaStream_t stream) {
            oscar_cuda_decode_args a = OSCAR_CUDA_DECODE_ARGS_INIT;
            a.n_seqs = o.b;
            a.n_q_tokens = o.tokens;
            a.q = q;
            a.out = out;
            a.pages = pool.pages;
            a.block_table = table + (size_t)i * pages_a_set;
            a.table_stride = pages_a_seq;
            a.lengths = lengths;
            a.overlay_k = ok + i * overlay_set;
            a.overlay_v = ov + i * overlay_set;
            a.logit_scale = 1 / sqrtf((float)o.d);
            a.out_rotated = !back;
            a.workspace = workspace;
            oscar_error error;
            if (oscar_cuda_decode(layers[i % layers.size()], &a, stream, &error) != OSCAR_OK) {
                fprintf(stderr, "%s\n", error.message);
                exit(1);
            }
        });
    const double bytes = (double)pages_a_set * page_bytes + (double)o.b * o.h * 320 * o.d * 4;
    if (o.bits_k > 2 || o.bits_v > 2) printf("bits %d/%d  ", o.bits_k, o.bits_v);
    printf("d %3d  B %2d  T %7d  GQA %2d  tracked %3d  q %d | %8.1f us (turned back %8.1f) %5.0f GB/s | read %8.1f us "
           "%5.0f GB/s | %5.1f %% of read | %.2f ps a token-head\n",
           o.d, o.b, o.t, o.g, o.tracked, o.tokens, time[0], time[1], bytes / time[0] / 1e3, read,
           pages_a_set * page_bytes / read / 1e3, 100 * read / time[0] * bytes / (pages_a_set * page_bytes),
           time[0] * 1e6 / ((double)o.b * o.t * o.h));
    fflush(stdout);
    for (oscar_cuda_layer *l : layers) oscar_cuda_layer_free(l);
    for (void *p : {(void *)table, (void *)lengths, (void *)ok, (void *)ov, (void *)q, (void *)out, workspace}) cudaFree(p);
}

static void set_option(Options &o, const char *argument) {
    const char *equals = strchr(argument, '=');
    const struct {
        const char *name;
        int *value;
    } names[] = {{"d", &o.d}, {"h", &o.h}, {"g", &o.g}, {"b", &o.b}, {"t", &o.t}, {"tracked", &o.tracked}, {"tokens", &o.tokens}, {"bits_k", &o.bits_k}, {"bits_v", &o.bits_v}};
    for (const auto &n : names)
        if (equals && strlen(n.name) == (size_t)(equals - argument) && !strncmp(n.name, argument, equals - argument)) {
            *n.value = atoi(equals + 1);
            return;
        }
    fprintf(stderr, "unknown option %s; expected d=, h=, g=, b=, t=, tracked=, tokens=, bits_k= or bits_v=\n", argument);
    exit(2);
}

int main(int argc, char **argv) {
    cudaDeviceProp properties;
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        fprintf(stderr, "no CUDA device\n");
        return 77;
    }
    check(cudaGetDeviceProperties(&properties, 0), "properties");
    int clock = 0;
    cudaDeviceGetAttribute(&clock, cudaDevAttrClockRate, 0);
    printf("%s, %d multiprocessors, up to %d MHz\n", properties.name, properties.multiProcessorCount, clock / 1000);
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
