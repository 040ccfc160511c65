/*
 * decode_api.cu - checks the arguments of a decode call and launches its kernel.
 */
#include "layer.h"

#define LOG2_E 1.4426950408889634

static bool plan_decode(const oscar_cuda_layer *layer, int n_q_tokens, bool capped, DecodePlan *plan) {
    const int rows = layer->n_q_heads / layer->n_kv_heads * n_q_tokens;
    /* Pairs too fast for runs of pages: kernels for more bits make the bias a page at a time. */
    const bool fast = layer->bulk && rows > 4 && layer->head_dim <= 128 && layer->bias_steps > 2 && !layer->bias_short_runs && !capped;
    const bool high = layer->bits_k > 2 || layer->bits_v > 2 || fast;
    const DecodeNeeds needs = {rows, layer->bulk, layer->wgmma, capped, high, layer->bias_steps};
    bool ok = false;
    switch (layer->head_dim) {
    case 64: ok = (needs.high ? decode_plan_high_d64 : decode_plan_d64)(plan, &needs); break;
    case 128: ok = (needs.high ? decode_plan_high_d128 : decode_plan_d128)(plan, &needs); break;
    case 256: ok = (needs.high ? decode_plan_high_d256 : decode_plan_d256)(plan, &needs); break;
    }
    if (!ok || plan->shared_bytes > (size_t)layer->shared_max) return false;
    return true;
}

/* Pages of a sequence (32K tokens) up to which whole segments a CTA cost no time at any head_dim. */
#define SHORT_PAGES 512

/* One CTA a multiprocessor, or so many that no CTA has to merge once more, where that leaves few idle: a whole number a
 * segment or, where few multiprocessors read as fast as all and merging counts, of segments a CTA (of equal lengths). */
static int n_ctas_of(const oscar_cuda_layer *layer, const oscar_cuda_decode_args *a, const DecodePlan *plan) {
    const int segments = a->n_seqs * layer->n_kv_heads * plan->row_tiles;
    const int most = layer->n_multiprocessors < DECODE_MAX_CTAS ? layer->n_multiprocessors : DECODE_MAX_CTAS;
    const int least = (most * 9 + 9) / 10, even = most / segments * segments;
    if (segments <= most) return even >= least ? even : most;
    if (plan->tile_rows <= 8 && (layer->head_dim == 64 || a->table_stride <= SHORT_PAGES))
        for (int n = most; n >= least; n--)
            if (segments % n == 0) return n;
    return most;
}

/* The workspace: sums, then partials, then counters, which must be zero between launches: so their
 * place does not depend on the call. */
#define SUMS_BYTES (2 * DECODE_MAX_CTAS * 16 * sizeof(float2))
#define PARTIALS_BYTES (2 * DECODE_MAX_CTAS * DECODE_MAX_SLOT_FLOATS * sizeof(float))

size_t oscar_cuda_workspace_bytes(const oscar_cuda_layer *layer, int32_t n_seqs, int32_t n_q_tokens) {
    size_t most = 0;
    for (int tokens = 1; tokens <= n_q_tokens; tokens++) {
        DecodePlan plan;
        if (!plan_decode(layer, tokens, false, &plan)) continue;
        const size_t n_segments = (size_t)n_seqs * layer->n_kv_heads * plan.row_tiles;
        const size_t bytes = SUMS_BYTES + PARTIALS_BYTES + n_segments * sizeof(uint32_t);
        if (bytes > most) most = bytes;
    }
    return most;
}

static oscar_status check_args(const oscar_cuda_layer *layer, const oscar_cuda_decode_args *a, oscar_error *error) {
#define REQUIRE(condition, ...)                                                                    \
    if (!(condition)) return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, __VA_ARGS__)
    REQUIRE(a->q && a->out && a->pages && a->block_table && a->lengths && a->overlay_k && a->overlay_v,
            "a pointer of the decode arguments is NULL");
    REQUIRE(a->q_dtype == OSCAR_DTYPE_BF16 || a->q_dtype == OSCAR_DTYPE_F16,
            "q_dtype is %d, expected F16 or BF16", a->q_dtype);
    REQUIRE(a->out_dtype >= OSCAR_DTYPE_F32 && a->out_dtype <= OSCAR_DTYPE_BF16,
            "out_dtype is %d, expected F32, F16 or BF16", a->out_dtype);
    REQUIRE(a->table_stride > 0, "table_stride is %d, expected at least 1", a->table_stride);
    REQUIRE(a->logit_softcap >= 0, "logit_softcap is %g, expected 0 or more", a->logit_softcap);
#undef REQUIRE
    return OSCAR_OK;
}

/* See divide() in device.cuh. */
static uint32_t magic_of(int n) { return n > 1 ? (uint32_t)((((uint64_t)1 << 32) + n - 1) / n) : 0; }

/* What decode and prefill hand to their kernels. */
static DecodeParams params_of(const oscar_cuda_layer *layer, const oscar_cuda_decode_args *a, int row_tiles) {
    DecodeParams p = {};
    p.pages = (const uint8_t *)a->pages;
    p.block_table = a->block_table;
    p.lengths = a->lengths;
    p.slots = a->slots;
    p.overlay_k = (const uint16_t *)a->overlay_k;
    p.overlay_v = (const uint16_t *)a->overlay_v;
    p.q = (const uint16_t *)a->q;
    p.out = a->out;
    p.sink_logits = a->sink_logits;
    p.k_rotation = (const uint4 *)layer->k_rotation_fragments;
    p.k_mean = layer->k_mean;
    p.v_mean_rotated = layer->v_mean_rotated;
    p.v_rotation_t = a->out_rotated ? NULL : layer->v_rotation_t;
    p.bias_table = (const uint4 *)layer->bias_table;
    p.bias_waves = (const uint4 *)layer->bias_waves;
    p.bias_runs = (const uint4 *)layer->run_table;
    p.bias_short_runs = (const uint4 *)layer->short_run_table;
    p.bias_few = (const uint4 *)layer->few_table;
    p.bias_few_low = (const uint4 *)layer->few_low_table;
    p.bias_half = (const uint32_t *)layer->bias_half;
    p.bias_long_runs = layer->bias_long_runs;
    p.bias_nu = (const float4 *)layer->bias_nu;
    p.bias_units = (const float *)layer->bias_units;
    p.bias_strides = (const float4 *)layer->bias_strides;
    p.bias_turn = (const unsigned long long *)layer->bias_turn;
    p.bias_dims = (const int2 *)layer->bias_dims;
    if (a->workspace) {
        uint8_t *w = (uint8_t *)a->workspace;
        p.partial_sums = (float2 *)w;
        p.partials = (float *)(w + SUMS_BYTES);
        p.counters = (uint32_t *)(w + SUMS_BYTES + PARTIALS_BYTES);
    }
    p.table_stride = a->table_stride;
    p.n_seqs = a->n_seqs;
    p.n_q_tokens = a->n_q_tokens;
    p.n_kv_heads = layer->n_kv_heads;
    p.gqa = layer->n_q_heads / layer->n_kv_heads;
    p.row_tiles = row_tiles;
    p.gqa_magic = magic_of(p.gqa);
    p.row_tiles_magic = magic_of(p.row_tiles);
    p.sink = layer->sink;
    p.sink8 = (layer->sink + 7) / 8 * 8;
    p.recent = layer->recent;
    p.ring = layer->ring;
    p.window = layer->window;
    p.tile_bytes = (int)oscar_cuda_tile_bytes(layer->head_dim, layer->bits_k, layer->bits_v);
    p.bits_k = layer->bits_k;
    p.bits_v = layer->bits_v;
    p.bias_steps = layer->bias_steps;
    p.bias_split_steps = layer->bias_split_steps;
    p.bias_even_steps = layer->bias_even_steps;
    p.bias_odd_steps = layer->bias_odd_steps;
    p.q_is_bf16 = a->q_dtype == OSCAR_DTYPE_BF16;
    p.out_dtype = a->out_dtype;
    p.scale_log2 = (float)(a->logit_scale * LOG2_E);
    p.softcap_log2 = (float)(a->logit_softcap * LOG2_E);
    return p;
}

oscar_status oscar_cuda_decode(const oscar_cuda_layer *layer, const oscar_cuda_decode_args *a,
                               oscar_cuda_stream stream, oscar_error *error) {
    if (a->struct_size != sizeof *a)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "struct_size is %u, expected %zu", a->struct_size,
                              sizeof *a);
    if (a->n_seqs < 1 || a->n_q_tokens < 1 || a->n_q_tokens > OSCAR_CUDA_MAX_Q_TOKENS)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT,
                              "n_seqs is %d and n_q_tokens %d, expected at least 1 and 1..%d", a->n_seqs,
                              a->n_q_tokens, OSCAR_CUDA_MAX_Q_TOKENS);
    DecodePlan plan;
    if (!plan_decode(layer, a->n_q_tokens, a->logit_softcap > 0, &plan))
        return cuda_error_set(error, OSCAR_ERROR_UNSUPPORTED,
                              "no kernel for head_dim %d with %d tracked pairs in %d bytes of shared memory",
                              layer->head_dim, 8 * layer->bias_steps, layer->shared_max);
    const oscar_status status = check_args(layer, a, error);
    if (status != OSCAR_OK) return status;
    if (!a->workspace) return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "workspace is NULL");
    plan.n_ctas = n_ctas_of(layer, a, &plan);
    const double items = (double)a->n_seqs * layer->n_kv_heads * plan.row_tiles *
                         (a->table_stride + 2 * (oscar_cuda_overlay_rows(layer) / 8 + 2)); /* pads, see decode_work.cuh */
    if (items * plan.n_ctas >= 4294967296.0)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "n_seqs x table_stride is too large: %d x %d", a->n_seqs,
                              a->table_stride);
    DecodeParams params = params_of(layer, a, plan.row_tiles);
    params.unit_pad = plan.unit_pad;
    if (plan.mirror_pages) {
        params.bias_waves = (const uint4 *)layer->mirror_waves[plan.mirror_pages / 4 - 2];
        params.bias_nu = (const float4 *)layer->mirror_nu[plan.mirror_pages / 4 - 2];
    }
    const LayerLaunch launch = {dim3(plan.n_ctas), plan.n_threads, plan.shared_bytes, layer->bulk};
    return layer_launch(reinterpret_cast<const void *>(plan.kernel), &launch, &params, stream, "decode launch", error);
}

oscar_status oscar_cuda_prefill(const oscar_cuda_layer *layer, const oscar_cuda_decode_args *a, oscar_cuda_stream stream,
                                oscar_error *error) {
    if (a->struct_size != sizeof *a)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "struct_size is %u, expected %zu", a->struct_size, sizeof *a);
    const int gqa = layer->n_q_heads / layer->n_kv_heads;
    if (a->n_seqs < 1 || a->n_q_tokens < 1 || a->n_q_tokens > OSCAR_CUDA_MAX_PREFILL_TOKENS)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "n_seqs is %d and n_q_tokens %d, expected at least 1 and 1..%d",
                              a->n_seqs, a->n_q_tokens, OSCAR_CUDA_MAX_PREFILL_TOKENS);
    if (layer->ring < layer->recent + a->n_q_tokens - 1)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "ring is %d, expected at least recent + n_q_tokens - 1 = %d",
                              layer->ring, layer->recent + a->n_q_tokens - 1);
    const DecodeNeeds needs = {gqa * a->n_q_tokens, layer->bulk, layer->wgmma, a->logit_softcap > 0, layer->bits_k > 2 || layer->bits_v > 2,
                               layer->bias_steps};
    DecodePlan plan;
    const size_t most = (size_t)layer->shared_max;
    if (!(layer->head_dim == 64    ? prefill_plan_d64(&plan, &needs, most)
          : layer->head_dim == 128 ? prefill_plan_d128(&plan, &needs, most)
                                   : prefill_plan_d256(&plan, &needs, most)))
        return cuda_error_set(error, OSCAR_ERROR_UNSUPPORTED,
                              "no prefill kernel for head_dim %d with %d tracked pairs in %d bytes of shared memory",
                              layer->head_dim, layer->n_tracked, layer->shared_max);
    const oscar_status status = check_args(layer, a, error);
    if (status != OSCAR_OK) return status;
    DecodeParams params = params_of(layer, a, 1);
    const LayerLaunch launch = {dim3(plan.row_tiles, layer->n_kv_heads, a->n_seqs), plan.n_threads, plan.shared_bytes, false};
    return layer_launch(reinterpret_cast<const void *>(plan.kernel), &launch, &params, stream, "prefill launch", error);
}
