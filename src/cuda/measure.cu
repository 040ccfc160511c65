/*
 * measure.cu - times one layer's decode attention on random pages: what `oscar bench` and bench_decode print.
 *
 * Launches are captured in a CUDA graph and rotate over sets of buffers that together are larger than the
 * cache: a set stands for a layer, with pages of its own in random order, overlay and rotations.
 */
#include <math.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <vector>

#include "layer.h"

#define SINK 64
#define RECENT 256
#define RING 384

/* Random codes and parameters: any bits are codes; parameters are finite halves of mixed sign. */
static __global__ void fill_tiles(uint32_t *pages, size_t n_words, int tile_words, int d, uint32_t seed) {
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

static __global__ void fill_bf16(uint16_t *p, size_t n, uint32_t seed) {
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
static __global__ void __launch_bounds__(512) read_tiles(const uint8_t *pages, const int *table, int n_tiles, int n_heads,
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
    return NULL;
}

/* Everything that one measurement owns. */
struct Measure {
    const oscar_cuda_measure_options *o;
    oscar_error *error;
    std::vector<void *> memory;
    std::vector<oscar_cuda_layer *> layers;
    cudaStream_t stream = NULL;
    cudaEvent_t start = NULL, stop = NULL;
    oscar_status status = OSCAR_OK;

    bool check(cudaError_t code, const char *what) {
        if (status == OSCAR_OK) status = cuda_check(code, what, error);
        return status == OSCAR_OK;
    }
    template <class T> T *array(size_t n, const char *what) {
        void *p = NULL;
        if (!check(cudaMalloc(&p, n * sizeof(T)), what)) return NULL;
        memory.push_back(p);
        return (T *)p;
    }
    ~Measure() {
        for (oscar_cuda_layer *l : layers) oscar_cuda_layer_free(l);
        for (void *p : memory) cudaFree(p);
        if (start) cudaEventDestroy(start);
        if (stop) cudaEventDestroy(stop);
        if (stream) cudaStreamDestroy(stream);
    }

    /* Median time in us of one of n launches captured in one graph; 0 after an error. */
    template <class F> double time_graph(int n, int repeats, F launch) {
        cudaGraph_t graph = NULL;
        cudaGraphExec_t exec = NULL;
        std::vector<float> times;
        if (!check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture")) return 0;
        for (int i = 0; i < n; i++) launch(i);
        const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
        if (check(ended, "capture") && check(cudaGraphInstantiate(&exec, graph, 0), "graph")) {
            for (int r = 0; r <= repeats && status == OSCAR_OK; r++) {
                float ms = 0;
                cudaEventRecord(start, stream);
                check(cudaGraphLaunch(exec, stream), "launch");
                cudaEventRecord(stop, stream);
                check(cudaStreamSynchronize(stream), "launch");
                check(cudaEventElapsedTime(&ms, start, stop), "time");
                if (r > 0) times.push_back(ms * 1000 / n); /* the first warms up */
            }
        }
        if (exec) cudaGraphExecDestroy(exec);
        if (graph) cudaGraphDestroy(graph);
        std::sort(times.begin(), times.end());
        return status == OSCAR_OK ? times[times.size() / 2] : 0;
    }

    void make_layer();
    void run(oscar_cuda_measure_result *result);
};

void Measure::make_layer() {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    const size_t square = (size_t)o->n_kv_heads * o->head_dim * o->head_dim;
    std::vector<float> rotation(square), mean((size_t)o->n_kv_heads * o->head_dim), tracked_mean(mean.size());
    for (float &x : rotation) x = normal(random) / sqrtf((float)o->head_dim);
    for (float &x : mean) x = normal(random);
    for (float &x : tracked_mean) x = 0.3f * (float)o->tracked_factor * normal(random);
    std::vector<int> pairs((size_t)o->n_kv_heads * o->n_tracked);
    for (size_t i = 0; i < pairs.size(); i++) /* spread over the frequencies */
        pairs[i] = (int)(i % o->n_tracked) * (o->head_dim / 2) / o->n_tracked;
    oscar_rope rope = {};
    rope.layout = OSCAR_ROPE_HALF_SPLIT;
    rope.n_dims = o->head_dim;
    rope.magnitude = 1;
    for (int f = 0; f < o->head_dim / 2; f++) rope.inv_freq[f] = powf(1e6f, -2.0f * f / o->head_dim);
    oscar_cuda_layer_options l = OSCAR_CUDA_LAYER_OPTIONS_INIT;
    l.n_kv_heads = o->n_kv_heads;
    l.n_q_heads = o->n_q_heads;
    l.head_dim = o->head_dim;
    l.bits_k = o->bits_k;
    l.bits_v = o->bits_v;
    l.sink = SINK;
    l.recent = RECENT;
    l.ring = RING;
    l.n_tracked = o->n_tracked;
    l.tracked = pairs.data();
    l.rope = &rope;
    l.k_rotation = l.v_rotation = rotation.data();
    l.k_mean = l.v_mean = mean.data();
    l.k_tracked = tracked_mean.data();
    oscar_cuda_layer *layer = NULL;
    status = oscar_cuda_layer_create(&layer, &l, error);
    if (status == OSCAR_OK) layers.push_back(layer);
}

void Measure::run(oscar_cuda_measure_result *result) {
    const int d = o->head_dim, b = o->n_seqs, h = o->n_kv_heads, pages_a_seq = (o->length + 63) / 64;
    const size_t tile = oscar_cuda_tile_bytes(d, o->bits_k, o->bits_v), page_bytes = tile * h;
    const size_t pages_a_set = (size_t)pages_a_seq * b, set_bytes = pages_a_set * page_bytes;
    size_t free_bytes = 0, total_bytes = 0;
    if (!check(cudaMemGetInfo(&free_bytes, &total_bytes), "memory")) return;
    if (set_bytes > free_bytes) { /* also: fewer tiles than an int counts */
        status = cuda_error_set(error, OSCAR_ERROR_MEMORY, "pages of %d sequences of %d tokens take %.1f GiB, %.1f GiB are free", b,
                                o->length, set_bytes / 1073741824.0, free_bytes / 1073741824.0);
        return;
    }
    const size_t pool = std::min<size_t>((size_t)24 << 30, free_bytes / 2);
    const int n_launches = b > 1 ? 4 : 32;
    const int n_sets = (int)std::max<size_t>(1, std::min<size_t>(pool / set_bytes, n_launches));
    /* Fewer sets than launches are larger than the cache each, and begin again. */
    std::vector<int> order((size_t)n_sets * pages_a_set), host_lengths(b, o->length);
    std::mt19937 random(5);
    for (size_t i = 0; i < order.size(); i++) order[i] = (int)i;
    for (int i = 0; i < n_sets; i++)
        std::shuffle(order.begin() + i * pages_a_set, order.begin() + (i + 1) * pages_a_set, random);
    const size_t overlay_set = (size_t)b * h * (SINK + RING) * d, q_size = (size_t)b * o->n_q_tokens * o->n_q_heads * d;
    uint8_t *pages = array<uint8_t>(n_sets * set_bytes, "pages");
    int *table = array<int>(order.size(), "block table"), *lengths = array<int>(b, "lengths");
    uint16_t *ok = array<uint16_t>(overlay_set * n_sets, "overlay"), *ov = array<uint16_t>(overlay_set * n_sets, "overlay");
    uint16_t *q = array<uint16_t>(q_size, "queries"), *out = array<uint16_t>(q_size, "output");
    for (int i = 0; i < std::min(n_sets, 8) && status == OSCAR_OK; i++) make_layer();
    if (status != OSCAR_OK) return;
    const size_t workspace_bytes = oscar_cuda_workspace_bytes(layers[0], b, o->n_q_tokens);
    uint8_t *workspace = array<uint8_t>(workspace_bytes, "workspace");
    if (status != OSCAR_OK || !check(cudaStreamCreate(&stream), "stream") || !check(cudaEventCreate(&start), "event") ||
        !check(cudaEventCreate(&stop), "event"))
        return;
    check(cudaMemset(workspace, 0, workspace_bytes), "workspace");
    check(cudaMemcpy(table, order.data(), order.size() * sizeof(int), cudaMemcpyHostToDevice), "block table");
    check(cudaMemcpy(lengths, host_lengths.data(), b * sizeof(int), cudaMemcpyHostToDevice), "lengths");
    fill_tiles<<<2048, 256>>>((uint32_t *)pages, n_sets * set_bytes / 4, (int)(tile / 4), d, 7);
    fill_bf16<<<1024, 256>>>(ok, overlay_set * n_sets, 11);
    fill_bf16<<<1024, 256>>>(ov, overlay_set * n_sets, 13);
    fill_bf16<<<64, 256>>>(q, q_size, 17);
    if (!check(cudaDeviceSynchronize(), "random pages")) return;
    const int repeats = b > 1 ? 7 : 11;
    result->bytes = (double)set_bytes + (double)b * h * (SINK + RECENT) * d * 4;
    const Reader reader = reader_of(tile);
    result->read_us = time_graph(n_launches, repeats, [&](int i) {
        reader<<<264, 512, 0, stream>>>(pages, table + i % n_sets * pages_a_set, (int)pages_a_set * h, h, (uint32_t *)out);
    });
    result->read_gb_per_s = result->read_us > 0 ? (double)set_bytes / result->read_us / 1e3 : 0;
    for (int back = 0; back < 2 && status == OSCAR_OK; back++) {
        const double us = time_graph(n_launches, repeats, [&](int launch) {
            const int i = launch % n_sets;
            oscar_cuda_decode_args a = OSCAR_CUDA_DECODE_ARGS_INIT;
            a.n_seqs = b;
            a.n_q_tokens = o->n_q_tokens;
            a.q = q;
            a.out = out;
            a.pages = pages;
            a.block_table = table + (size_t)i * pages_a_set;
            a.table_stride = pages_a_seq;
            a.lengths = lengths;
            a.overlay_k = ok + i * overlay_set;
            a.overlay_v = ov + i * overlay_set;
            a.logit_scale = 1 / sqrtf((float)d);
            a.out_rotated = !back;
            a.workspace = workspace;
            if (status == OSCAR_OK) status = oscar_cuda_decode(layers[i % layers.size()], &a, stream, error);
        });
        (back ? result->turned_back_us : result->us) = us;
    }
}

oscar_status oscar_cuda_measure(const oscar_cuda_measure_options *o, oscar_cuda_measure_result *result, oscar_error *error) {
#define REQUIRE(condition, field, value, expected)                                                                       \
    if (!(condition))                                                                                                    \
    return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "%s is %d, expected %s", field, (int)(value), expected)
    REQUIRE(o->struct_size == sizeof *o, "struct_size", o->struct_size, "sizeof(oscar_cuda_measure_options)");
    REQUIRE(oscar_cuda_tile_bytes(o->head_dim, o->bits_k, o->bits_v), "head_dim", o->head_dim, "64, 128 or 256, and 2 to 4 bits");
    REQUIRE(o->n_seqs >= 1, "n_seqs", o->n_seqs, "at least 1");
    REQUIRE(o->n_kv_heads >= 1, "n_kv_heads", o->n_kv_heads, "at least 1");
    REQUIRE(o->length >= 1, "length", o->length, "at least 1");
    REQUIRE(o->n_q_tokens >= 1 && o->n_q_tokens <= OSCAR_CUDA_MAX_Q_TOKENS, "n_q_tokens", o->n_q_tokens, "1 to 8");
#undef REQUIRE
    memset(result, 0, sizeof *result);
    int device = 0, clock = 0;
    cudaDeviceProp properties;
    if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&properties, device) != cudaSuccess)
        return cuda_error_set(error, OSCAR_ERROR_UNSUPPORTED, "no CUDA device");
    strncpy(result->device, properties.name, sizeof result->device - 1);
    result->n_multiprocessors = properties.multiProcessorCount;
    cudaDeviceGetAttribute(&clock, cudaDevAttrClockRate, device);
    result->clock_mhz = clock / 1000;
    cudaDeviceGetAttribute(&clock, cudaDevAttrMemoryClockRate, device);
    result->memory_clock_mhz = clock / 1000;
    Measure m;
    m.o = o;
    m.error = error;
    m.run(result);
    return m.status;
}
