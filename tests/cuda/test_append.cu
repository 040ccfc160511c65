/*
 * test_append.cu - rows quantised on the GPU against the CPU's quantiser, code by code.
 *
 * Exit status 77 without a GPU.
 */
#include <cuda_runtime.h>
#include <limits.h>

#include "oracle.h"

#include "reference.h"

static int n_failures;

static void check(cudaError_t code, const char *what) {
    if (code == cudaSuccess) return;
    printf("FAILED %s: %s\n", what, cudaGetErrorString(code));
    exit(1);
}
template <class T> static T *upload(const std::vector<T> &v) {
    T *p;
    check(cudaMalloc(&p, v.size() * sizeof(T)), "cudaMalloc");
    check(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    return p;
}
template <class T> static std::vector<T> download(const T *p, size_t n) {
    std::vector<T> v(n);
    check(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return v;
}

struct Case {
    int d, n_kv_heads, n_tokens, n_tracked, recipe, ldlq, gain, metric, rotated, dtype;
    float clip;
    int bits_k, bits_v;
};

/* A metric with a falling spectrum in a random basis, factored as calibration does. */
static void make_metric(int d, Random &random, float *b, float *dg) {
    std::vector<float> basis((size_t)d * d);
    random_rotation(d, random, basis.data());
    std::vector<double> m((size_t)d * d, 0.0);
    for (int i = 0; i < d; i++)
        for (int j = 0; j < d; j++)
            for (int k = 0; k < d; k++)
                m[(size_t)i * d + j] += (double)basis[(size_t)i * d + k] * basis[(size_t)j * d + k] * exp(-6.0 * k / d);
    oscar_error error;
    if (reference_factor(d, m.data(), .01, b, dg, &error) != OSCAR_OK) {
        printf("FAILED metric: %s\n", error.message);
        exit(1);
    }
}

/* The residual of a key or value as the CPU's append computes it. */
static void residual_of(const Problem &p, int head, int side, int position, float *row) {
    const int d = p.d;
    const std::vector<float> &mean = side ? p.v_mean : p.k_mean;
    for (int j = 0; j < d; j++) row[j] -= mean[(size_t)head * d + j];
    if (side) return;
    for (int n = 0; n < p.n_tracked; n++) {
        const int f = p.tracked[(size_t)head * p.n_tracked + n];
        const int a = p.adjacent ? 2 * f : f, b = p.adjacent ? 2 * f + 1 : f + d / 2;
        const double freq = p.rope.inv_freq[f], page = position / 64 * 64, slot = position % 64;
        const double na = p.k_tracked[(size_t)head * d + a], nb = p.k_tracked[(size_t)head * d + b];
        const float x = (float)(na * cos(freq * slot) - nb * sin(freq * slot));
        const float y = (float)(na * sin(freq * slot) + nb * cos(freq * slot));
        const float c = (float)cos(page * freq), s = (float)sin(page * freq);
        volatile float xc = x * c, ys = y * s, xs = x * s, yc = y * c;
        row[a] -= xc - ys;
        row[b] -= xs + yc;
    }
}

static void run_case(const Case &c, uint64_t seed) {
    Problem p;
    p.d = c.d;
    p.n_kv_heads = c.n_kv_heads;
    p.gqa = 1;
    p.n_tracked = c.n_tracked;
    p.bias_size = 20;
    p.adjacent = seed & 1;
    p.rotated = c.rotated;
    p.seed = seed;
    build_constants(p);
    Random random(seed * 977 + 3);
    const int d = c.d, h = c.n_kv_heads, groups = d > 128 ? d / 128 : 1, sink = 5, ring = 704, rows = 8 + ring;
    std::vector<float> metric_b((size_t)h * d * d), metric_d((size_t)h * d), vmetric_b(metric_b), vmetric_d(metric_d);
    for (int i = 0; i < h; i++) {
        make_metric(d, random, &metric_b[(size_t)i * d * d], &metric_d[(size_t)i * d]);
        make_metric(d, random, &vmetric_b[(size_t)i * d * d], &vmetric_d[(size_t)i * d]);
    }
    oscar_cuda_layer_options o = OSCAR_CUDA_LAYER_OPTIONS_INIT;
    o.n_kv_heads = o.n_q_heads = h;
    o.head_dim = d;
    o.sink = sink;
    o.recent = 40;
    o.ring = ring;
    o.recipe = c.recipe;
    o.bits_k = c.bits_k;
    o.bits_v = c.bits_v;
    o.ldlq_k = c.ldlq;
    o.gain_k = o.gain_v = c.gain;
    o.clip_k = o.clip_v = c.clip;
    o.n_tracked = c.n_tracked;
    o.tracked = p.tracked.data();
    o.rope = &p.rope;
    o.k_rotation = c.rotated ? p.k_rotation.data() : NULL;
    o.v_rotation = c.rotated ? p.v_rotation.data() : NULL;
    o.k_mean = p.k_mean.data();
    o.v_mean = p.v_mean.data();
    o.k_tracked = p.k_tracked.data();
    if (c.metric) {
        o.k_metric_b = metric_b.data();
        o.k_metric_d = metric_d.data();
        o.v_metric_b = vmetric_b.data();
        o.v_metric_d = vmetric_d.data();
    }
    oscar_error error;
    oscar_cuda_layer *layer;
    if (oscar_cuda_layer_create(&layer, &o, &error) != OSCAR_OK) {
        printf("FAILED layer: %s\n", error.message);
        exit(1);
    }
    /* Two sequences, tokens interleaved; pages in reverse. One row of NaN. */
    const int n = c.n_tokens, pages_a_seq = (n / 2 + 200) / 64 + 1, n_pages = 2 * pages_a_seq;
    std::vector<int> seqs(n), positions(n), table(n_pages);
    for (int i = 0; i < n_pages; i++) table[i] = n_pages - 1 - i;
    for (int i = 0; i < n; i++) {
        seqs[i] = i & 1;
        positions[i] = i / 2 + (i & 1) * 100;
    }
    const size_t elements = (size_t)n * h * d;
    std::vector<float> input[2];
    std::vector<uint16_t> narrow[2];
    for (int side = 0; side < 2; side++) {
        input[side].resize(elements);
        for (size_t i = 0; i < elements; i++)
            input[side][i] = (float)(random.normal() * (i % d == 7 ? 12 : 1) + (i % 16 == 3 ? 3 : 0));
        if (side == 0) input[0][(size_t)3 * h * d + 5] = NAN;
        narrow[side].resize(elements);
        for (size_t i = 0; i < elements; i++) {
            const bool nan = i == (size_t)3 * h * d + 5 && side == 0;
            narrow[side][i] = nan                            ? (c.dtype == OSCAR_DTYPE_F16 ? 0x7e00 : 0x7fc0)
                              : c.dtype == OSCAR_DTYPE_F16 ? to_fp16(input[side][i])
                                                           : to_bf16(input[side][i]);
            if (c.dtype == OSCAR_DTYPE_BF16) input[side][i] = (float)from_bf16(narrow[side][i]);
            if (c.dtype == OSCAR_DTYPE_F16) input[side][i] = (float)from_fp16(narrow[side][i]);
        }
    }
    const size_t tile = oscar_cuda_tile_bytes(d, c.bits_k, c.bits_v), overlay_size = (size_t)2 * h * rows * d;
    oscar_cuda_append_args a = OSCAR_CUDA_APPEND_ARGS_INIT;
    a.n_tokens = n;
    a.dtype = c.dtype;
    a.k = c.dtype == OSCAR_DTYPE_F32 ? (void *)upload(input[0]) : (void *)upload(narrow[0]);
    a.v = c.dtype == OSCAR_DTYPE_F32 ? (void *)upload(input[1]) : (void *)upload(narrow[1]);
    a.seqs = upload(seqs);
    a.positions = upload(positions);
    a.block_table = upload(table);
    a.table_stride = pages_a_seq;
    a.pages = upload(std::vector<uint8_t>(n_pages * h * tile, 0xff));
    a.overlay_k = upload(std::vector<uint16_t>(overlay_size, 0xffff));
    a.overlay_v = upload(std::vector<uint16_t>(overlay_size, 0xffff));
    a.bad_token = upload(std::vector<int>(1, INT_MAX));
    if (oscar_cuda_append(layer, &a, NULL, &error) != OSCAR_OK) {
        printf("FAILED append: %s\n", error.message);
        exit(1);
    }
    check(cudaDeviceSynchronize(), "append");
    const std::vector<uint8_t> pages = download((const uint8_t *)a.pages, n_pages * h * tile);
    const std::vector<uint16_t> overlay[2] = {download((const uint16_t *)a.overlay_k, overlay_size),
                                              download((const uint16_t *)a.overlay_v, overlay_size)};
    const int bad = download(a.bad_token, 1)[0];

    size_t wrong_codes = 0, wrong_params = 0, wrong_overlay = 0;
    int largest = 0;
    for (int t = 0; t < n; t++)
        for (int head = 0; head < h; head++)
            for (int side = 0; side < 2; side++) {
                std::vector<float> row(input[side].begin() + ((size_t)t * h + head) * d,
                                       input[side].begin() + ((size_t)t * h + head + 1) * d), y(d);
                residual_of(p, head, side, positions[t], row.data());
                reference_codec codec = {};
                codec.head_dim = d;
                codec.group = d / groups;
                codec.recipe = c.recipe;
                codec.bits = side ? c.bits_v : c.bits_k;
                codec.clip = c.clip;
                codec.ldlq = c.ldlq && side == 0;
                codec.gain = c.gain;
                if (c.metric) {
                    codec.metric_b = (side ? vmetric_b : metric_b).data() + (size_t)head * d * d;
                    codec.metric_d = (side ? vmetric_d : metric_d).data() + (size_t)head * d;
                }
                if (c.rotated) codec.rotation = (side ? p.v_rotation : p.k_rotation).data() + (size_t)head * d * d;
                std::vector<uint8_t> codes(d), got(d);
                uint16_t params[4], got_params[4];
                const int nan = reference_quantize(&codec, row.data(), y.data(), codes.data(), params);
                oscar_cuda_tile_get_row(&pages[((size_t)table[seqs[t] * pages_a_seq + positions[t] / 64] * h + head) * tile],
                                        d, c.bits_k, c.bits_v, side, positions[t] % 64, got.data(), got_params);
                for (int i = 0; i < d; i++) {
                    wrong_codes += codes[i] != got[i];
                    largest = std::max(largest, abs((int)codes[i] - (int)got[i]));
                }
                for (int i = 0; i < 2 * groups; i++) wrong_params += params[i] != got_params[i];
                const int at = positions[t] < sink ? positions[t] : 8 + positions[t] % ring;
                for (int i = 0; i < d; i++)
                    wrong_overlay += overlay[side][((size_t)(seqs[t] * h + head) * rows + at) * d + i] !=
                                     (nan ? 0 : to_bf16(y[i]));
            }
    const double share = (double)wrong_codes / (2.0 * elements);
    const bool good = share <= 1e-4 && largest <= 1 && wrong_overlay == 0 && bad == 3;
    n_failures += !good;
    printf("%s append: d %d, %d tokens x %d heads, %d tracked, recipe %d, ldlq %d, gain %d, metric %d, rotated %d, bits %d/%d: %zu of "
           "%zu codes differ (by at most %d), %zu parameters, %zu overlay values, bad token %d (seed %llu)\n",
           good ? "ok    " : "FAILED", d, n, h, c.n_tracked, c.recipe, c.ldlq, c.gain, c.metric, c.rotated, c.bits_k, c.bits_v, wrong_codes,
           2 * elements, largest, wrong_params, wrong_overlay, bad, (unsigned long long)seed);
    for (const void *x : {a.k, a.v, (const void *)a.seqs, (const void *)a.positions, (const void *)a.block_table,
                          (const void *)a.pages, (const void *)a.overlay_k, (const void *)a.overlay_v,
                          (const void *)a.bad_token})
        cudaFree((void *)x);
    oscar_cuda_layer_free(layer);
}

int main(void) {
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        fprintf(stderr, "SKIPPED: no CUDA device, append on GPUs is NOT tested\n");
        return 77;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    uint64_t seed = 1;
    /* Up to 64 tokens a row is a warp's at head_dim 128. */
    const bool quick = getenv("OSCAR_CUDA_TEST_QUICK") != NULL;
    for (int n : {quick ? 80 : 700, quick ? 7 : 61})
        for (int d : {128, 64, 256}) {
            run_case({d, 2, n, 16, OSCAR_RECIPE_DEFAULT, 1, 1, 1, 1, OSCAR_DTYPE_BF16, 1.0f, 2, 2}, seed++);
            run_case({d, 2, n, 0, OSCAR_RECIPE_DEFAULT, 0, 1, 0, 1, OSCAR_DTYPE_F32, 1.0f, 2, 2}, seed++);
            run_case({d, 1, n, d / 2, OSCAR_RECIPE_DEFAULT, 1, 0, 1, 0, OSCAR_DTYPE_F32, 1.0f, 2, 2}, seed++);
            run_case({d, 2, n, 0, OSCAR_RECIPE_ZOO, 0, 0, 0, 1, OSCAR_DTYPE_BF16, 0.96f, 2, 2}, seed++);
            run_case({d, 1, n, 0, OSCAR_RECIPE_DEFAULT, 0, 1, 1, 1, OSCAR_DTYPE_BF16, 1.0f, 2, 2}, seed++);
            run_case({d, 1, n, 8, OSCAR_RECIPE_DEFAULT, 1, 1, 1, 1, OSCAR_DTYPE_BF16, 1.0f, 3, 4}, seed++);
            run_case({d, 1, n, 0, OSCAR_RECIPE_DEFAULT, 1, 1, 1, 1, OSCAR_DTYPE_F16, 1.0f, 4, 3}, seed++);
            run_case({d, 2, std::min(n, 40), 16, OSCAR_RECIPE_DEFAULT, 1, 1, 1, 1, OSCAR_DTYPE_BF16, 1.0f, 2, 2}, seed++);
        }
    if (!quick) { /* so many that a lane has a row */
        const int d = 128, n = 1090, h = 8;
        run_case({d, h, n, 16, OSCAR_RECIPE_DEFAULT, 1, 1, 1, 1, OSCAR_DTYPE_BF16, 1.0f, 2, 2}, seed++);
        run_case({d, h, n, 0, OSCAR_RECIPE_DEFAULT, 0, 1, 0, 1, OSCAR_DTYPE_F32, 1.0f, 2, 2}, seed++);
        run_case({d, h, n, d / 2, OSCAR_RECIPE_DEFAULT, 1, 0, 1, 0, OSCAR_DTYPE_F32, 1.0f, 2, 2}, seed++);
        run_case({d, h, n, 0, OSCAR_RECIPE_DEFAULT, 0, 1, 1, 1, OSCAR_DTYPE_BF16, 1.0f, 2, 2}, seed++);
        run_case({d, h, n, 8, OSCAR_RECIPE_DEFAULT, 1, 1, 1, 1, OSCAR_DTYPE_BF16, 1.0f, 3, 4}, seed++);
        run_case({d, h, n, 0, OSCAR_RECIPE_DEFAULT, 1, 1, 1, 1, OSCAR_DTYPE_F16, 1.0f, 4, 3}, seed++);
    }
    printf("%d failures\n", n_failures);
    return n_failures != 0;
}
