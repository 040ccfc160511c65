/*
 * test_decode.cu - decode attention on the GPU against float64, on the same codes.
 *
 * Exit status 77 without a GPU. OSCAR_CUDA_TEST_QUICK=1 keeps to a few small cases, for sanitizers.
 *
 *   test_decode [HEAD_DIM [PART]]   PART: one of the names in main()
 */
#include "../../bench/cuda/memory.h"
#include "oracle.h"

static int n_cases, n_failures;

struct Device {
    oscar_cuda_layer *layer = NULL;
    oscar_cuda_decode_args args = OSCAR_CUDA_DECODE_ARGS_INIT;
    std::vector<void *> owned;
    template <class T> T *keep(T *p) {
        owned.push_back((void *)p);
        return p;
    }
    ~Device() {
        for (void *p : owned) cudaFree(p);
        oscar_cuda_layer_free(layer);
    }
};

static void set_up(Device &device, Problem &p) {
    oscar_cuda_layer_options o = OSCAR_CUDA_LAYER_OPTIONS_INIT;
    o.n_kv_heads = p.n_kv_heads;
    o.n_q_heads = p.n_kv_heads * p.gqa;
    o.head_dim = p.d;
    o.window = p.window;
    o.sink = p.sink;
    o.recent = p.recent;
    o.ring = p.ring;
    o.bits_k = p.bits_k;
    o.bits_v = p.bits_v;
    o.n_tracked = p.n_tracked;
    o.tracked = p.tracked.data();
    o.rope = &p.rope;
    if (p.rotated) {
        o.k_rotation = p.k_rotation.data();
        o.v_rotation = p.v_rotation.data();
    }
    if (p.means) {
        o.k_mean = p.k_mean.data();
        o.v_mean = p.v_mean.data();
    }
    o.k_tracked = p.k_tracked.data();
    oscar_error error;
    if (oscar_cuda_layer_create(&device.layer, &o, &error) != OSCAR_OK) {
        printf("FAILED layer: %s\n", error.message);
        exit(1);
    }
    oscar_cuda_decode_args &a = device.args;
    a.n_seqs = (int)p.lengths.size();
    a.n_q_tokens = p.n_q_tokens;
    a.q_dtype = p.q_bf16 ? OSCAR_DTYPE_BF16 : OSCAR_DTYPE_F16;
    a.out_dtype = OSCAR_DTYPE_F32;
    a.q = device.keep(upload(p.q));
    a.pages = device.keep(upload(p.pages));
    a.block_table = device.keep(upload(p.table));
    a.table_stride = p.table_stride;
    a.lengths = device.keep(upload(p.lengths));
    a.slots = device.keep(upload(p.slots));
    a.overlay_k = device.keep(upload(p.overlay_k));
    a.overlay_v = device.keep(upload(p.overlay_v));
    a.sink_logits = p.sink_logits ? device.keep(upload(p.sinks)) : NULL;
    a.logit_scale = p.logit_scale;
    a.logit_softcap = p.softcap;
    a.out_rotated = p.out_rotated;
    const size_t bytes = oscar_cuda_workspace_bytes(device.layer, a.n_seqs, a.n_q_tokens);
    check(cudaMalloc(&a.workspace, bytes), "workspace");
    check(cudaMemset(a.workspace, 0, bytes), "workspace");
    device.keep(a.workspace);
    check(cudaMalloc(&a.out, p.q.size() * 4), "out");
    device.keep(a.out);
}

static std::vector<float> decode(Device &device, size_t n, bool prefill = false) {
    std::vector<float> out(n);
    check(cudaMemset(device.args.out, 0xff, n * 4), "poison");
    oscar_error error;
    if ((prefill ? oscar_cuda_prefill : oscar_cuda_decode)(device.layer, &device.args, NULL, &error) != OSCAR_OK) {
        printf("FAILED %s: %s\n", prefill ? "prefill" : "decode", error.message);
        exit(1);
    }
    check(cudaDeviceSynchronize(), "decode");
    check(cudaMemcpy(out.data(), device.args.out, n * 4, cudaMemcpyDeviceToHost), "copy");
    return out;
}

/* |out - expected| / |expected| of the worst row and of all rows together. The second is what the
 * tolerance is about (errors against the output's rms); one row may be three times that: a row of a
 * sharp softmax has its queries' rounding to fp16 amplified. */
static void errors_of(const Problem &p, const std::vector<float> &out, double *worst, double *all) {
    double error = 0, norm = 0;
    *worst = 0;
    const size_t per_seq = p.q.size() / p.lengths.size();
    for (size_t r = 0; r < out.size() / p.d; r++) {
        if (p.lengths[r * p.d / per_seq] == 0) continue;
        double e = 0, n = 0;
        for (int i = 0; i < p.d; i++) {
            const double x = out[r * p.d + i] - p.expected[r * p.d + i];
            e += x * x;
            n += p.expected[r * p.d + i] * p.expected[r * p.d + i];
        }
        if (!(sqrt(e / n) <= *worst)) *worst = sqrt(e / n);
        error += e;
        norm += n;
    }
    *all = norm > 0 ? sqrt(error / norm) : 0;
}

/* Whether outputs of sequences without tokens are as decode() poisoned them. */
static bool left_alone(const Problem &p, const std::vector<float> &out) {
    const size_t per_seq = p.q.size() / p.lengths.size();
    for (size_t i = 0; i < out.size(); i++) {
        uint32_t bits;
        memcpy(&bits, &out[i], 4);
        if (p.lengths[i / per_seq] == 0 && bits != 0xffffffffu) return false;
    }
    return true;
}

static void run_case(const char *name, Problem &p, double tolerance, bool loud, bool prefill = false) {
    p.seed += (uint64_t)n_cases;
    build(p);
    Device device;
    set_up(device, p);
    const std::vector<float> first = decode(device, p.q.size(), prefill), second = decode(device, p.q.size(), prefill);
    double worst, all;
    errors_of(p, first, &worst, &all);
    const bool same = memcmp(first.data(), second.data(), first.size() * 4) == 0;
    /* The worst of thousands of rows lies further out than that of a few. */
    const bool good = all <= tolerance && worst <= (prefill ? 6 : 3) * tolerance && same && left_alone(p, first);
    n_cases++;
    n_failures += !good;
    if (!good || loud)
        printf("%s %s: d %d, %d KV heads x %d, %d query tokens, %zu sequences of %d.., sink %d recent %d window %d, "
               "%d tracked, bits %d/%d: worst row %.2e, all %.2e%s (seed %llu)\n",
               good ? "ok    " : "FAILED", name, p.d, p.n_kv_heads, p.gqa, p.n_q_tokens, p.lengths.size(), p.lengths[0],
               p.sink, p.recent, p.window, p.n_tracked, p.bits_k, p.bits_v, worst, all,
               same ? "" : ", two runs differ", (unsigned long long)p.seed);
}

static Problem make(int d, int gqa, std::vector<int> lengths) {
    Problem p;
    p.d = d;
    p.gqa = gqa;
    p.lengths = lengths;
    return p;
}

/* Lengths around the edges of pages and windows. */
static void test_edges(int d) {
    const int edges[] = {1,   2,   7,   8,   9,   15,  16,  17,  63,  64,  65,  71,  72,  127, 128,
                         129, 255, 256, 257, 318, 319, 320, 321, 322, 383, 384, 385, 447, 448, 449, 512};
    for (int n : edges) {
        Problem p = make(d, 4, {n});
        run_case("edge", p, 1e-3, false);
        Problem s = make(d, 6, {n, 3 * n + 1});
        s.sink = 5;
        s.recent = 19;
        s.ring = 64;
        run_case("small windows", s, 1e-3, false);
    }
    for (int n = 1; n <= 128; n += 1) {
        Problem p = make(d, 2, {n, 129 - n});
        p.n_kv_heads = 1;
        p.sink = 3;
        p.recent = 1;
        p.ring = 64;
        run_case("1 to 2 pages", p, 1e-3, false);
    }
    printf("d %d edges: %d cases, %d failures\n", d, n_cases, n_failures);
}

static void test_groups(int d) {
    for (int gqa = 1; gqa <= 16; gqa++) {
        Problem p = make(d, gqa, {700, 5, 3000, 64, 0, 1111});
        p.q_bf16 = gqa % 2;
        run_case("group", p, 1e-3, false);
        Problem b = make(d, gqa, {1500, 321});
        b.n_tracked = 16;
        b.bias_size = 3;
        run_case("group, bias", b, 1e-3, false);
    }
    printf("d %d groups: %d cases, %d failures\n", d, n_cases, n_failures);
}

static void test_features(int d) {
    for (int k = 0; k < 24; k++) {
        Problem p = make(d, 1 + (k * 5) % 16, {2000 + 37 * k, 90, 400});
        p.softcap = k % 3 == 1 ? 20.0f : 0.0f;
        p.sink_logits = k % 2;
        p.window = k % 4 == 3 ? 700 : k % 8 == 2 ? 100 : 0;
        p.n_tracked = k % 4 == 0 ? 0 : k % 4 == 1 ? 16 : k % 4 == 2 ? 32 : d / 2;
        p.bias_size = 2;
        p.adjacent = k & 1;
        p.rotated = k % 5 != 4;
        p.means = k % 7 != 6;
        p.out_rotated = k % 3 == 2;
        run_case("features", p, 1e-3, false);
    }
    for (int tokens = 2; tokens <= 8; tokens++) {
        Problem p = make(d, tokens == 5 ? 6 : tokens == 7 ? 1 : 4, {1000, tokens, 400, 64 + tokens, 320});
        p.n_q_tokens = tokens;
        p.window = tokens == 4 ? 300 : 0;
        p.n_tracked = tokens % 2 ? 16 : 0;
        p.bias_size = 2;
        run_case("query tokens", p, 1e-3, false);
    }
    std::vector<int> many;
    for (int i = 0; i < 70; i++) many.push_back((i * 37) % 400);
    Problem p = make(d, 4, many);
    p.ring = 256;
    p.recent = 100;
    run_case("70 sequences", p, 1e-3, false);
    printf("d %d features: %d cases, %d failures\n", d, n_cases, n_failures);
}

/* One sequence: CTAs share segments evenly (8 heads) or not (3). */
static void test_one_sequence(int d) {
    const int lengths[] = {1, 2, 63, 65, 129, 320, 321, 700, 1999, 5000, 0};
    for (int k = 0; k < 22; k++) {
        Problem p = make(d, 1 + (k * 5 + 3) % 16, {lengths[k % 11]});
        p.n_kv_heads = k % 3 == 2 ? 3 : 8;
        p.n_q_tokens = k % 11 == 7 ? 4 : k % 11 == 9 ? 2 : 1;
        p.n_tracked = k % 4 == 1 ? 16 : k % 4 == 3 ? d / 2 : 0;
        p.bias_size = 2;
        p.softcap = k % 5 == 4 ? 20.0f : 0.0f;
        p.sink_logits = k & 1;
        p.window = k % 7 == 6 ? 300 : 0;
        p.out_rotated = k % 2;
        p.means = k % 6 != 5;
        p.bits_k = k == 13 ? 4 : k == 18 ? 3 : 2;
        p.bits_v = k == 13 ? 3 : k == 19 ? 4 : 2;
        run_case("one sequence", p, 1e-3, false);
    }
    /* Many heads, so that units of four rows count for more when the list of items is cut: no tiles, one, some, none of the sink. */
    const int lengths_of_many[] = {300, 330, 700, 1100, 2100};
    for (int k = 0; k < 10; k++) {
        Problem p = make(d, 1 + k % 4, {lengths_of_many[k % 5]});
        p.n_kv_heads = k == 4 ? 65 : 32 * (2 + (k + 1) % 3);
        p.n_tracked = k % 3 == 1 ? 16 : k == 5 ? d / 2 : 0;
        p.bias_size = 2;
        p.sink_logits = k & 1;
        p.window = k == 7 ? 600 : 0;
        p.out_rotated = k % 4 != 3;
        run_case("one sequence, many heads", p, 1e-3, false);
    }
    printf("d %d one sequence: %d cases, %d failures\n", d, n_cases, n_failures);
}

/* Planes of a third and fourth bit, on either side. */
static void test_bits(int d) {
    const int groups[] = {4, 8, 1, 12};
    for (int k = 1; k < 9; k++) {
        Problem p = make(d, groups[k % 4], {1500 + k, 321, 70});
        p.bits_k = 2 + k / 3;
        p.bits_v = 2 + k % 3;
        p.n_tracked = k % 3 == 0 ? 0 : k % 3 == 1 ? 16 : d / 2;
        p.bias_size = 2;
        p.softcap = k % 4 == 3 ? 20.0f : 0.0f;
        p.n_q_tokens = k == 5 ? 3 : 1;
        run_case("bits", p, 1e-3, false);
        Problem b = make(d, 4, {2000, 129});
        b.bits_k = p.bits_k;
        b.bits_v = p.bits_v;
        run_case("bits", b, 1e-3, false);
    }
    printf("d %d bits: %d cases, %d failures\n", d, n_cases, n_failures);
}

/* Outputs of 16 bits are those of 32, rounded; behind them and of sequences that are not run nothing is written. */
static void test_prefill_narrow(int d) {
    for (int k = 0; k < 4; k++) {
        Problem p = make(d, 4, {700, 0, 90});
        p.n_q_tokens = 75;
        p.ring = 512;
        p.n_tracked = k & 1 ? 16 : 0;
        p.bias_size = 2;
        p.out_rotated = k < 3;
        p.means = k != 1;
        build(p);
        Device device;
        set_up(device, p);
        const std::vector<float> wide = decode(device, p.q.size(), true);
        device.args.out_dtype = k & 2 ? OSCAR_DTYPE_F16 : OSCAR_DTYPE_BF16;
        const std::vector<float> both = decode(device, p.q.size(), true);
        std::vector<uint16_t> narrow(2 * both.size());
        memcpy(narrow.data(), both.data(), both.size() * 4);
        const size_t per_seq = p.q.size() / p.lengths.size();
        int n_wrong = 0;
        for (size_t i = 0; i < narrow.size(); i++) {
            const bool written = i < wide.size() && p.lengths[i / per_seq] >= p.n_q_tokens;
            n_wrong += narrow[i] != (!written ? 0xffff : k & 2 ? to_fp16(wide[i]) : to_bf16(wide[i]));
        }
        n_cases++;
        n_failures += n_wrong > 0;
        if (n_wrong) printf("FAILED prefill, 16-bit outputs: d %d, case %d: %d numbers differ\n", d, k, n_wrong);
    }
}

/* Chunks of a prompt: at its start, around the windows, ragged; every feature. A sequence shorter than the chunk
 * is not run. */
static void test_prefill(int d) {
    const int chunks[] = {1, 9, 33, 64, 65, 130, 200};
    for (int k = 0; k < 14; k++) {
        const int n = chunks[k % 7], gqa = k < 7 ? 4 : 1 + (k * 5) % 16;
        Problem p = make(d, gqa, {n, n + 1, n + 63, n + 320, 900});
        p.n_q_tokens = n;
        p.ring = 512;
        p.window = k % 5 == 3 ? 150 : 0;
        p.sink = k % 3 == 2 ? 5 : 64;
        p.recent = k % 4 == 3 ? 19 : 256;
        p.n_tracked = k % 3 == 0 ? 0 : k % 3 == 1 ? 16 : d / 2;
        p.bias_size = 2;
        p.softcap = k % 6 == 5 ? 20.0f : 0.0f;
        p.sink_logits = k % 2;
        p.adjacent = k & 1;
        p.rotated = k != 4;
        p.means = k != 6;
        p.out_rotated = k % 3 == 2;
        p.q_bf16 = k % 4 != 1;
        p.bits_k = k == 9 ? 4 : k == 11 ? 3 : 2;
        p.bits_v = k == 10 ? 3 : k == 9 ? 4 : 2;
        run_case("prefill", p, 1e-3, false, true);
    }
    for (int tracked : {0, 16}) {
        Problem p = make(d, 4, {3000});
        p.n_q_tokens = 256;
        p.ring = 512;
        p.n_tracked = tracked;
        p.bias_size = 2;
        run_case("prefill", p, 1e-3, true, true);
    }
    for (double size : {3.9, 4.2}) { /* some rows need low halves of the bias, others do not */
        Problem p = make(d, 4, {1500});
        p.n_q_tokens = 250;
        p.ring = 512;
        p.n_tracked = 16;
        p.bias_size = size;
        run_case("prefill, biases of all sizes", p, 1e-3, true, true);
    }
    for (int slow = 0; slow < 2; slow++) { /* |b| of 1,000: see test_large_bias() */
        Problem p = make(d, 8, {20000});
        p.n_kv_heads = 1;
        p.n_q_tokens = 20;
        p.ring = 512;
        p.n_tracked = 16;
        p.bias_size = 250;
        p.slow_pairs = slow;
        p.q_size = 0.3;
        p.means = false;
        p.logit_scale = 0.05f;
        run_case("prefill, bias of 1,000", p, 5e-4, true, true);
    }
    test_prefill_narrow(d);
    printf("d %d prefill: %d cases, %d failures\n", d, n_cases, n_failures);
}

/* |b| of about 1,000 and logits 0.05 of it, so that several tokens share the softmax: an error of 0.01
 * in b is 5e-4 in the logits, and as much in the output, which has no mean to hide it. */
static void test_large_bias(int d) {
    for (int gqa : {4, 8, 12})
        for (int kind = 0; kind < 3; kind++) /* the fastest pairs, any, and any of a base that has far slower ones */
            for (int tracked : {16, d / 2}) {
                Problem p = make(d, gqa, {4133, 60000});
                p.n_kv_heads = 1;
                p.n_tracked = tracked;
                p.bias_size = 1000.0 / sqrt((double)tracked);
                p.slow_pairs = kind > 0;
                p.rope_base = kind == 2 ? 1e6 : 1e4;
                p.q_size = 0.3;
                p.means = false;
                p.logit_scale = 0.05f;
                run_case("bias of 1,000", p, 5e-4, true);
            }
}

/* Biases whose low halves are left out, those that need them, and rows of both kinds. A pair's |q| |nu| is 0.9 of
 * bias_size on average. */
static void test_bias_sizes(int d) {
    for (int gqa : {4, 8, 12})
        for (int tracked : {16, d / 2})
            for (double log2_units : {8.0, 12.0, 18.0}) {
                Problem p = make(d, gqa, {4133, 700, 70});
                p.n_tracked = tracked;
                p.bias_size = log2_units * sqrt((double)d) / (0.9 * 1.4427 * tracked);
                run_case("bias of all sizes", p, 1e-3, true);
            }
}

/* All pairs, the 17th fastest of which turns by so much a token: too fast for long runs of pages, or for any (decode_runs.cuh). */
static void test_fast_pairs(int d) {
    for (int gqa : {8, 12, 16})
        for (double fast : {0.13, 0.6})
            for (double log2_units : {4.0, 18.0}) {
                Problem p = make(d, gqa, {4133, 700, 70});
                p.n_tracked = d / 2;
                p.rope_base = pow(fast, -d / 32.0);
                p.bias_size = log2_units * sqrt((double)d) / (0.9 * 1.4427 * p.n_tracked);
                run_case("fast pairs", p, 1e-3, true);
            }
}

static void test_long(int d) {
    if (d != 128) return;
    for (int gqa : {4, 8, 12})
        for (int tracked : {0, 16}) {
            Problem p = make(d, gqa, {99983});
            p.n_kv_heads = 2;
            p.n_tracked = tracked;
            p.bias_size = 5;
            run_case("long", p, 1e-3, true);
        }
}

/* One captured graph serves growing sequences. */
static void test_graph(int d) {
    Problem p = make(d, 8, {1500, 700});
    p.seed = 99;
    build(p);
    Device device;
    set_up(device, p);
    int *lengths = (int *)device.args.lengths;
    const std::vector<int> none(2, 1);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check(cudaStreamCreate(&stream), "stream");
    decode(device, p.q.size());
    check(cudaMemcpy(lengths, none.data(), 8, cudaMemcpyHostToDevice), "lengths");
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    oscar_error error;
    if (oscar_cuda_decode(device.layer, &device.args, stream, &error) != OSCAR_OK) {
        printf("FAILED capture: %s\n", error.message);
        exit(1);
    }
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    check(cudaMemcpy(lengths, p.lengths.data(), 8, cudaMemcpyHostToDevice), "lengths");
    check(cudaMemset(device.args.out, 0xff, p.q.size() * 4), "poison");
    check(cudaGraphLaunch(exec, stream), "launch");
    check(cudaStreamSynchronize(stream), "graph");
    std::vector<float> out(p.q.size());
    check(cudaMemcpy(out.data(), device.args.out, out.size() * 4, cudaMemcpyDeviceToHost), "copy");
    double worst, all;
    errors_of(p, out, &worst, &all);
    n_cases++;
    n_failures += !(worst <= 1e-3);
    printf("%s graph: worst row %.2e\n", worst <= 1e-3 ? "ok    " : "FAILED", worst);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
}

static void test_quick(int d) {
    for (int gqa : {4, 7, 12, 16}) {
        Problem p = make(d, gqa, {450, 70});
        p.n_kv_heads = 1;
        p.n_tracked = gqa == 7 || gqa == 12 ? 16 : 0;
        p.bias_size = gqa == 12 ? 20 : 2; /* needs low halves, or does not */
        run_case("quick", p, 1e-3, true);
    }
    for (int back = 0; back < 2; back++) {
        Problem one = make(d, 4, {450});
        one.n_kv_heads = back ? 64 : 8; /* with 64, units count for more */
        one.out_rotated = !back;
        run_case("quick, one sequence", one, 1e-3, true);
    }
    for (int gqa : {4, 8, 12}) {
        Problem all = make(d, gqa, {2500, 70});
        all.n_kv_heads = 1;
        all.n_tracked = d / 2;
        all.bias_size = 2;
        all.rope_base = 1e6;
        run_case("quick, all pairs", all, 1e-3, true);
    }
    Problem p = make(d, 4, {450, 70});
    p.n_kv_heads = 1;
    p.bits_k = 4;
    p.bits_v = 3;
    run_case("quick", p, 1e-3, true);
}

/* Long enough for rings of tiles and stages to come around. */
static void test_quick_prefill(int d) {
    for (int tracked : {0, 16}) {
        Problem p = make(d, 4, {1000, 90});
        p.n_kv_heads = 1;
        p.n_q_tokens = 70;
        p.ring = 512;
        p.n_tracked = tracked;
        p.bias_size = 2;
        p.out_rotated = tracked == 0;
        run_case("quick prefill", p, 1e-3, true, true);
    }
}

int main(int argc, char **argv) {
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        fprintf(stderr, "SKIPPED: no CUDA device, decode attention on GPUs is NOT tested\n");
        return 77;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    const bool quick = getenv("OSCAR_CUDA_TEST_QUICK") != NULL;
    for (int d : {128, 64, 256}) {
        if (argc > 1 && atoi(argv[1]) != d) continue;
        if (quick) {
            if (argc < 3 || strcmp(argv[2], "prefill")) test_quick(d);
            if (argc < 3 || !strcmp(argv[2], "prefill")) test_quick_prefill(d);
            continue;
        }
        const struct {
            const char *name;
            void (*run)(int);
        } parts[] = {{"edges", test_edges}, {"groups", test_groups},   {"features", test_features}, {"one", test_one_sequence},
                     {"bits", test_bits},   {"prefill", test_prefill}, {"graph", test_graph},       {"bias", test_large_bias},
                     {"sizes", test_bias_sizes}, {"fast", test_fast_pairs}, {"long", test_long}};
        for (const auto &part : parts)
            if (argc < 3 || !strcmp(argv[2], part.name)) part.run(d);
    }
    printf("%d cases, %d failures\n", n_cases, n_failures);
    return n_failures != 0;
}
