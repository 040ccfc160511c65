/*
 * append.cu - quantises the rows of new tokens into pages and overlay.
 *
 * A CTA takes one side of one KV head, and a few tokens at a time: it removes the means, turns the rows
 * together (a thread has one channel of several rows, so that the rotation is read once), then every
 * sixteen lanes quantise a row, or a warp does when there are few (append_rows.cuh). Chunks have a row on
 * every lane (append_lanes.cuh). Rotation and metric lie in shared memory where they fit. Compiled without
 * contraction: codes are bit-equal to the CPU's.
 */
#include "append_lanes.cuh"

/* Floats of shared memory of a CTA of n_rows rows; the rotation and the metric when they are staged. */
template <int D> __host__ __device__ constexpr int rows_floats(int n_rows) {
    const int residual = D * (n_rows + 4), scratch = n_rows * Row<D>::STRIDE;
    return n_rows * Row<D>::STRIDE + (residual > scratch ? residual : scratch);
}
template <int D> __host__ __device__ constexpr int staged_floats() { return D * D + layout_metric_floats(D); }

/* The rows of tokens first .. without their means, transposed: [D, ROWS + 4]. flood() starts large copies: small
 * loads would wait behind them. */
template <int D, int THREADS, int ROWS, class F>
DEVICE void load_residuals(const AppendParams &p, const AppendSide &from, int side, int head, int first, float *out,
                           F flood) {
    static_assert(THREADS % D == 0, "a thread has one channel");
    constexpr int PITCH = ROWS + 4, N = ROWS * D / THREADS;
    const int j = threadIdx.x % D, row0 = threadIdx.x / D;
    size_t at[N];
    uint32_t v[N];
#pragma unroll
    for (int k = 0; k < N; k++) {
        const int token = min(first + row0 + k * (THREADS / D), p.n_tokens - 1);
        at[k] = (static_cast<size_t>(token) * p.n_kv_heads + head) * D + j;
    }
    const int own_row = threadIdx.x % ROWS; /* of tracked pairs */
    const int position = load_int(p.positions + min(first + own_row, p.n_tokens - 1));
    load_inputs<N>(from.in, at, p.dtype, v);
    const float mean = from.mean ? __ldg(from.mean + head * D + j) : 0.0f;
    flood();
    /* The angle of the thread's first pair while the rows are on their way. */
    const bool biased = side == 0 && p.n_tracked > 0;
    float2 turn = make_float2(1, 0);
    if (biased && threadIdx.x / ROWS < p.n_tracked) turn = page_turn(p, head, threadIdx.x / ROWS, position);
#pragma unroll
    for (int k = 0; k < N; k++) {
        const int row = row0 + k * (THREADS / D);
        float x = input_value(v[k], p.dtype);
        if (from.mean) x = x - mean;
        out[j * PITCH + row] = first + row < p.n_tokens ? x : 0.0f;
    }
    __syncthreads();
    if (!biased) return;
    for (int i = threadIdx.x / ROWS; i < p.n_tracked; i += THREADS / ROWS) {
        if (i >= THREADS / ROWS) turn = page_turn(p, head, i, position);
        const int pair = head * p.n_tracked + i;
        const int2 dims = __ldg(p.bias_dims + pair);
        const float x = __ldg(p.bias_table + pair * 128 + position % 64);
        const float y = __ldg(p.bias_table + pair * 128 + 64 + position % 64);
        out[dims.x * PITCH + own_row] -= x * turn.x - y * turn.y;
        out[dims.y * PITCH + own_row] -= x * turn.y + y * turn.x;
    }
    __syncthreads();
}

/* Rows [D, ROWS + 4] times U, rounded to BF16, to [ROWS, STRIDE]: thread (j, k) has channel j of the k-th N rows. In four pieces of U,
 * each of which wait() is called for. */
template <int D, int THREADS, int ROWS, class W>
DEVICE void turn_rows(const float *rotation, bool staged, const float *residuals, float *out, W wait) {
    constexpr int N = ROWS * D / THREADS, PITCH = ROWS + 4;
    const int j = threadIdx.x % D, first = threadIdx.x / D * N;
    float sum[N];
#pragma unroll
    for (int k = 0; k < N; k++) sum[k] = 0;
#pragma unroll 1
    for (int piece = 0; piece < 4; piece++) {
        wait(piece);
#pragma unroll 16
        for (int i = piece * (D / 4); i < (piece + 1) * (D / 4); i++) {
            const float u = staged ? rotation[i * D + j] : __ldg(rotation + i * D + j);
#pragma unroll
            for (int k = 0; k < N; k += 4) {
                const float4 x = load4(residuals + i * PITCH + first + k);
                sum[k] = fmaf(x.x, u, sum[k]);
                sum[k + 1] = fmaf(x.y, u, sum[k + 1]);
                sum[k + 2] = fmaf(x.z, u, sum[k + 2]);
                sum[k + 3] = fmaf(x.w, u, sum[k + 3]);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < N; k++) out[(first + k) * Row<D>::STRIDE + j] = round_bf16(sum[k]);
}

/* --- to the tile --------------------------------------------------------------------------------- */

/* Keys: ORs the lanes' v[m] (this lane's code of word m, in its place); the lane ends with one word, and
 * returns which. */
template <int N> DEVICE int gather_words(int (&v)[N], int lane) {
    int word = 0, n = N;
#pragma unroll
    for (int s = 1; s < 16; s <<= 1) {
        if (n > 1) {
            n /= 2;
            const bool upper = lane & s;
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                if (i >= n) continue;
                const int send = upper ? v[i] : v[i + n], keep = upper ? v[i + n] : v[i];
                v[i] = keep | __shfl_xor_sync(FULL_WARP, send, s);
            }
            word = 2 * word + upper;
        } else {
            v[0] |= __shfl_xor_sync(FULL_WARP, v[0], s);
        }
    }
    return word;
}

/* One plane of keys: bits `shift` and up of the codes; ones: a plane of one bit. */
template <int D>
DEVICE void store_key_plane(const int (&code)[D / 16], int shift, bool ones, int slot, uint8_t *plane, int lane,
                            bool valid) {
    constexpr int N = D / 16, A_GROUP = D > 64 ? 2 : 1, W = D / 64;
    int v[N];
#pragma unroll
    for (int m = 0; m < N; m++) v[m] = (code[m] >> shift & (ones ? 1 : 3)) << (2 * lane);
    const int block = gather_words<N>(v, lane);
    const int sub = slot >> 4, r = slot & 15, t = block % 8 / A_GROUP;
    const int word = block / 8 * A_GROUP + block % 8 % A_GROUP;
    int words = W, at = word, bits = v[0];
    bool mine = lane < N && valid;
    if (ones) { /* words 2 u and 2 u + 1 share one */
        words = (W + 1) / 2;
        at = word >> 1;
        if constexpr (A_GROUP == 2) {
            bits |= __shfl_xor_sync(FULL_WARP, v[0], N / 2) << 1; /* block ^ 1 */
            mine = mine && !(word & 1);
        }
    }
    if (mine)
        *reinterpret_cast<int *>(plane + sub * 256 * words + layout_word(words, 4 * (r & 7) + t, (r >> 3) * words + at)) =
            bits;
}

template <int D>
DEVICE void store_value_plane(const int (&code)[D / 16], int shift, bool ones, int slot, uint8_t *plane, int lane,
                              bool valid) {
    constexpr int W = D / 64;
    const int sub = slot >> 4, r = slot & 15, words = ones ? (W + 1) / 2 : W;
    int units[W];
#pragma unroll
    for (int w = 0; w < W; w++) {
        int v = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) v |= (code[4 * w + i] >> shift & (ones ? 1 : 3)) << (2 * i);
        units[w] = v | __shfl_xor_sync(FULL_WARP, v, 8) << 8; /* right on lanes 0 .. 7 */
    }
    if (lane >= 8 || !valid) return;
#pragma unroll
    for (int w = 0; w < W; w++) {
        if (ones && (w & 1)) continue;
        const int bits = ones && w + 1 < W ? units[w] | units[(w + 1) % W] << 1 : units[w];
        const int byte = layout_word(words, 4 * lane + ((r & 7) >> 1), (r >> 3) * words + (ones ? w >> 1 : w)) + 2 * (r & 1);
        *reinterpret_cast<uint16_t *>(plane + sub * 256 * words + byte) = static_cast<uint16_t>(bits);
    }
}

template <int D, bool WIDE>
DEVICE void store_tile(const AppendParams &p, const Row<D, WIDE> &w, const Levels &q, int side, int slot, uint8_t *tile,
                       bool valid) {
    using R = Row<D>;
    int code[R::N];
#pragma unroll
    for (int m = 0; m < R::N; m++) code[m] = static_cast<int>(w.code[m] * q.levels);
    uint8_t *low = tile + side * layout_low_bytes(D), *high = tile + layout_high_offset(D, p.side[0].bits, side);
    if (side == 0) {
        store_key_plane<D>(code, 0, false, slot, low, w.lane, valid);
        if (q.bits > 2) store_key_plane<D>(code, 2, q.bits == 3, slot, high, w.lane, valid);
    } else {
        store_value_plane<D>(code, 0, false, slot, low, w.lane, valid);
        if (q.bits > 2) store_value_plane<D>(code, 2, q.bits == 3, slot, high, w.lane, valid);
    }
#pragma unroll
    for (int g = 0; g < R::G; g++)
        if (w.lane == g && valid)
            *reinterpret_cast<__half2 *>(tile + layout_param_offset(D, side) + layout_param(g, slot)) =
                __halves2half2(__float2half_rn(w.step[g]), __float2half_rn(w.offset[g]));
}

/* --- a row --------------------------------------------------------------------------------------- */

template <int D, bool WIDE>
DEVICE void quantise(const AppendSide &from, Row<D, WIDE> &w, const Levels &q, const AppendMetric &metric, int recipe) {
    using R = Row<D, WIDE>;
    const bool zoo = recipe == OSCAR_RECIPE_ZOO, with_metric = from.metric != nullptr;
    const bool ldlq = from.ldlq && with_metric && !zoo;
#pragma unroll
    for (int g = 0; g < R::G; g++) {
        if (zoo) {
            float low, high;
            range_of_group(w, g, &low, &high);
            const float limit = magnitude_of_rank(w, g, rank_from_top<R>(from.clip));
            range_params(q, low, high, limit, &w.step[g], &w.offset[g]);
            w.step[g] = to_fp16(w.step[g]);
            w.offset[g] = to_fp16(w.offset[g]);
        } else {
            least_squares(w, q, g, &w.step[g], &w.offset[g]);
        }
    }
    if (ldlq) {
#pragma unroll 1
        for (int round = 0; round < LDLQ_REFITS; round++) round_ldlq(w, q, metric);
    } else {
        round_plain(w, q);
    }
    if (from.gain && !zoo) apply_gain(w, q, metric, with_metric, ldlq);
}

template <int D, bool WIDE>
DEVICE void append_row(const AppendParams &p, const AppendMetric &metric, float *turned, float *scratch, int side,
                       int head, int token) {
    using R = Row<D, WIDE>;
    const AppendSide &from = p.side[side];
    const int row = threadIdx.x / R::LANES;
    const bool valid = token < p.n_tokens;
    const int position = valid ? load_int(p.positions + token) : 0, seq = valid ? load_int(p.seqs + token) : 0;
    const int page = valid ? load_int(p.block_table + static_cast<size_t>(seq) * p.table_stride + position / 64) : 0;
    const int slot = valid && p.slots ? load_int(p.slots + seq) : seq;
    R w;
    w.lane = threadIdx.x & 15;
    w.upper = WIDE && (threadIdx.x & 16);
    w.shared_x = turned + row * R::STRIDE;
    w.scratch = scratch + row * R::STRIDE;
    bool finite = true, small = true;
#pragma unroll
    for (int m = 0; m < R::N; m++) {
        w.x[m] = w.shared_x[16 * m + w.lane];
        finite = finite && fabsf(w.x[m]) <= FLT_MAX;
        small = small && fabsf(w.x[m]) <= ROW_LIMIT;
    }
    const unsigned row_lanes = WIDE ? FULL_WARP : 0xffffu << (threadIdx.x & 16);
    const bool stores = valid && !w.upper;
    finite = (__ballot_sync(FULL_WARP, finite) & row_lanes) == row_lanes;
    small = __all_sync(FULL_WARP, small);
    const int overlay_row = position < p.sink ? position : p.sink8 + position % p.ring;
    auto store_overlay = [&] {
        uint16_t *overlay =
            from.overlay + (static_cast<size_t>(slot * p.n_kv_heads + head) * (p.sink8 + p.ring) + overlay_row) * D;
#pragma unroll
        for (int m = 0; m < R::N; m++)
            if (stores) overlay[16 * m + w.lane] = __bfloat16_as_ushort(__float2bfloat16_rn(w.x[m]));
    };
    if (!small) { /* otherwise the overlay is stored last: its address takes a while to arrive */
        if (!finite && w.lane == 0 && p.bad_token) atomicMin(p.bad_token, token);
#pragma unroll
        for (int m = 0; m < R::N; m++)
            if (!finite) w.x[m] = 0;
        store_overlay();
#pragma unroll
        for (int m = 0; m < R::N; m++) {
            w.x[m] = fminf(fmaxf(w.x[m], -ROW_LIMIT), ROW_LIMIT);
            w.shared_x[16 * m + w.lane] = w.x[m];
        }
        __syncwarp();
    }
    const Levels q = levels_of(from.bits);
    quantise(from, w, q, metric, p.recipe);
    if (small) store_overlay();
    store_tile(p, w, q, side, position % 64, p.pages + (static_cast<size_t>(page) * p.n_kv_heads + head) * p.tile_bytes,
               stores);
}

template <int D, int THREADS, bool STAGED, bool WIDE>
__global__ void __launch_bounds__(THREADS, 1) append_kernel(const __grid_constant__ AppendParams p) {
    constexpr int ROWS = THREADS / Row<D, WIDE>::LANES;
    extern __shared__ __align__(16) float shared[];
    const int n_keys = p.n_kv_heads * p.side[0].n_ctas, side = blockIdx.x >= n_keys;
    const AppendSide &from = p.side[side];
    const int cta = blockIdx.x - (side ? n_keys : 0), head = cta % p.n_kv_heads;
    float *turned = shared + (STAGED ? staged_floats<D>() : 0), *residuals = turned + ROWS * Row<D>::STRIDE;
    const float *rotation = from.rotation ? from.rotation + static_cast<size_t>(head) * D * D : nullptr;
    const float *packed = from.metric ? from.metric + static_cast<size_t>(head) * layout_metric_floats(D) : nullptr;
    /* Constants, while the kernel before this one ends. The rotation in pieces, in the order in which they are needed;
     * the metric, which is needed later, behind the first rows. */
    for (int piece = 0; STAGED && piece < 4; piece++) {
        if (rotation) stage(shared + piece * D * D / 4, rotation + piece * D * D / 4, D * D / 4, THREADS);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    let_next_kernel_start();
    wait_for_kernel_before();
    bool first = true;
#pragma unroll 1
    for (int token = cta / p.n_kv_heads * ROWS; token < p.n_tokens; token += from.n_ctas * ROWS) {
        auto flood = [&] {
            if (!STAGED || !first) return;
            if (packed) stage(shared + D * D, packed, layout_metric_floats(D), THREADS);
            asm volatile("cp.async.commit_group;" ::: "memory");
        };
        load_residuals<D, THREADS, ROWS>(p, from, side, head, token, residuals, flood);
        auto wait = [&](int piece) {
            if (!STAGED || !first) return;
            if (piece == 0) asm volatile("cp.async.wait_group 4;" ::: "memory");
            if (piece == 1) asm volatile("cp.async.wait_group 3;" ::: "memory");
            if (piece == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
            if (piece == 3) asm volatile("cp.async.wait_group 1;" ::: "memory");
            __syncthreads();
        };
        if (rotation)
            turn_rows<D, THREADS, ROWS>(STAGED ? shared : rotation, STAGED, residuals, turned, wait);
        else
            for (int e = threadIdx.x; e < ROWS * D; e += THREADS)
                turned[e / D * Row<D>::STRIDE + e % D] = round_bf16(residuals[e % D * (ROWS + 4) + e / D]);
        if (STAGED && first) asm volatile("cp.async.wait_group 0;" ::: "memory");
        first = false;
        __syncthreads(); /* residuals become scratch, the metric is there */
        const AppendMetric metric = metric_of<D>(STAGED ? shared + D * D : packed);
        append_row<D, WIDE>(p, metric, turned, residuals, side, head,
                            token + static_cast<int>(threadIdx.x) / Row<D, WIDE>::LANES);
        __syncthreads();
    }
}

/* --- the launch ---------------------------------------------------------------------------------- */

struct AppendPlan {
    void (*kernel)(const AppendParams);
    int n_threads, n_rows; /* of a CTA at once */
    size_t shared_bytes;
};

template <int D, int THREADS, bool STAGED, bool WIDE = false> static AppendPlan plan_of() {
    AppendPlan plan;
    plan.kernel = append_kernel<D, THREADS, STAGED, WIDE>;
    plan.n_threads = THREADS;
    plan.n_rows = THREADS / Row<D, WIDE>::LANES;
    plan.shared_bytes = (rows_floats<D>(plan.n_rows) + (STAGED ? staged_floats<D>() : 0)) * sizeof(float);
    return plan;
}

/* A row a lane: when the keys of so many tokens occupy half of the multiprocessors. */
static bool plan_lanes(const oscar_cuda_layer *layer, int n_tokens, AppendPlan *plan) {
    plan->kernel = append_lanes_kernel;
    plan->n_rows = LanesShape::ROWS;
    plan->n_threads = 32 * LanesShape::WARPS;
    plan->shared_bytes = LanesShape::FLOATS * sizeof(float);
    const int n_ctas = (n_tokens + plan->n_rows - 1) / plan->n_rows * layer->n_kv_heads;
    return layer->head_dim == LanesShape::D && layer->recipe == OSCAR_RECIPE_DEFAULT && 2 * n_ctas >= layer->n_multiprocessors &&
           plan->shared_bytes <= (size_t)layer->shared_max;
}

/* Few tokens: small CTAs, so that a row's chain of operations has a scheduler to itself. */
static AppendPlan plan_append(const oscar_cuda_layer *layer, int n_tokens) {
    if (layer->head_dim == 256) return plan_of<256, 256, false>();
    if (layer->head_dim == 64) return n_tokens <= 64 ? plan_of<64, 128, true>() : plan_of<64, 512, true>();
    const AppendPlan plan = n_tokens <= 64 ? plan_of<128, 128, true, true>() : plan_of<128, 512, true>();
    return plan.shared_bytes <= (size_t)layer->shared_max ? plan : plan_of<128, 128, false>();
}

/* CTAs a head of keys and values: all multiprocessors, three quarters to keys when they feed errors back. */
static void spread(const oscar_cuda_layer *layer, const AppendPlan &plan, int n_tokens, AppendParams *p) {
    const int groups = (n_tokens + plan.n_rows - 1) / plan.n_rows;
    int both = layer->n_multiprocessors / layer->n_kv_heads;
    if (both < 2) both = 2;
    int keys = p->side[0].ldlq ? (3 * both + 2) / 4 : both / 2;
    if (keys >= both) keys = both - 1;
    p->side[0].n_ctas = groups < keys ? groups : keys;
    const int values = 2 * groups <= both ? groups : both - keys;
    p->side[1].n_ctas = groups < values ? groups : values;
}

oscar_status oscar_cuda_append(const oscar_cuda_layer *layer, const oscar_cuda_append_args *a, oscar_cuda_stream stream,
                               oscar_error *error) {
    if (a->struct_size != sizeof *a)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "struct_size is %u, expected %zu", a->struct_size, sizeof *a);
    if (a->n_tokens < 1 || !a->k || !a->v || !a->seqs || !a->positions || !a->pages || !a->block_table ||
        !a->overlay_k || !a->overlay_v)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "n_tokens is %d or a pointer of the append arguments is NULL",
                              a->n_tokens);
    if (a->dtype < OSCAR_DTYPE_F32 || a->dtype > OSCAR_DTYPE_BF16)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "dtype is %d, expected F32, F16 or BF16", a->dtype);
    AppendParams p = {};
    for (int s = 0; s < 2; s++) {
        AppendSide &side = p.side[s];
        side.in = s ? a->v : a->k;
        side.overlay = (uint16_t *)(s ? a->overlay_v : a->overlay_k);
        side.rotation = s ? layer->v_rotation : layer->k_rotation;
        side.mean = s ? layer->v_mean : layer->k_mean;
        side.metric = s ? layer->v_metric : layer->k_metric;
        side.metric_lanes = s ? layer->v_metric_lanes : layer->k_metric_lanes;
        side.bits = s ? layer->bits_v : layer->bits_k;
        side.ldlq = s ? 0 : layer->ldlq_k;
        side.gain = s ? layer->gain_v : layer->gain_k;
        side.clip = s ? layer->clip_v : layer->clip_k;
    }
    p.seqs = a->seqs;
    p.positions = a->positions;
    p.block_table = a->block_table;
    p.slots = a->slots;
    p.pages = (uint8_t *)a->pages;
    p.bad_token = a->bad_token;
    p.bias_table = layer->append_bias_table;
    p.bias_dims = (const int2 *)layer->append_bias_dims;
    p.bias_freq = layer->append_bias_freq;
    p.n_tokens = a->n_tokens;
    p.n_kv_heads = layer->n_kv_heads;
    p.table_stride = a->table_stride;
    p.dtype = a->dtype;
    p.recipe = layer->recipe;
    p.n_tracked = layer->n_tracked;
    p.sink = layer->sink;
    p.sink8 = (layer->sink + 7) / 8 * 8;
    p.ring = layer->ring;
    p.tile_bytes = (int)oscar_cuda_tile_bytes(layer->head_dim, layer->bits_k, layer->bits_v);
    AppendPlan plan;
    if (plan_lanes(layer, a->n_tokens, &plan)) {
        p.side[0].n_ctas = p.side[1].n_ctas = (a->n_tokens + plan.n_rows - 1) / plan.n_rows;
    } else {
        plan = plan_append(layer, a->n_tokens);
        spread(layer, plan, a->n_tokens, &p);
    }
    const int n_ctas = layer->n_kv_heads * (p.side[0].n_ctas + p.side[1].n_ctas);
    const LayerLaunch launch = {dim3(n_ctas), plan.n_threads, plan.shared_bytes, layer->bulk};
    return layer_launch(reinterpret_cast<const void *>(plan.kernel), &launch, &p, stream, "append launch", error);
}
