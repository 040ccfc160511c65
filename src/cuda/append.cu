/*
 * append.cu - rows of new tokens: into the overlay, and quantised into pages.
 *
 * A CTA takes one side of one KV head, and a few tokens at a time: it removes the means, turns the rows
 * together (a thread has one channel of several rows, so that the rotation is read once), then every
 * sixteen lanes quantise a row, or a warp does when there are few (append_rows.cuh). Chunks are turned in tiles
 * (append_chunk.cuh) and have a row on every lane (append_lanes.cuh). Rotation and metric lie in shared memory
 * where they fit. Compiled without contraction: codes are bit-equal to the CPU's, but for what
 * append_sorted.cuh and append_feedback.cuh say.
 *
 * Codes depend on the overlay's rows alone, so an append may end there, and the settle kernels, which begin
 * there, quantise many positions together later.
 */
#include "append_chunk.cuh"
#include "append_lanes.cuh"

/* Floats of shared memory of a CTA of n_rows rows; the rotation and the metric when they are staged. */
template <int D> __host__ __device__ constexpr int rows_floats(int n_rows) {
    const int residual = D * (n_rows + 4), scratch = n_rows * Row<D>::STRIDE;
    return n_rows * Row<D>::STRIDE + (residual > scratch ? residual : scratch);
}
template <int D> __host__ __device__ constexpr int staged_floats(bool codes) {
    return D * D + (codes ? layout_metric_floats(D) : 0);
}

/* The rows of tokens first .. without their means, transposed: [D, ROWS + 4]. flood() starts large copies: small
 * loads would wait behind them. */
template <int D, int THREADS, int ROWS, class F>
DEVICE void load_residuals(const AppendParams &p, const AppendSide &from, int side, int head, int first, float *out,
                           F flood) {
    static_assert(THREADS % D == 0, "a thread has one channel");
    constexpr int PITCH = ROWS + 4, ALL = ROWS * D / THREADS, N = ALL < 16 ? ALL : 16;
    const int j = threadIdx.x % D, row0 = threadIdx.x / D;
    const int own_row = threadIdx.x % ROWS; /* of tracked pairs */
    const int position = load_int(p.positions + min(first + own_row, p.n_tokens - 1));
    const bool biased = side == 0 && p.n_tracked > 0;
    TrackedMean tracked = {};
#pragma unroll 1
    for (int k0 = 0; k0 < ALL; k0 += N) {
        size_t at[N];
        uint32_t v[N];
#pragma unroll
        for (int k = 0; k < N; k++) {
            const int token = min(first + row0 + (k0 + k) * (THREADS / D), p.n_tokens - 1);
            at[k] = (static_cast<size_t>(token) * p.n_kv_heads + head) * D + j;
        }
        load_inputs<N>(from.in, at, p.dtype, v);
        const float mean = from.mean ? __ldg(from.mean + head * D + j) : 0.0f;
        if (k0 == 0) {
            flood();
            /* The mean of the thread's first pair while the rows are on their way. */
            if (biased && threadIdx.x / ROWS < p.n_tracked) tracked = tracked_mean(p, head, threadIdx.x / ROWS, position);
        }
#pragma unroll
        for (int k = 0; k < N; k++) {
            const int row = row0 + (k0 + k) * (THREADS / D);
            float x = input_value(v[k], p.dtype);
            if (from.mean) x = x - mean;
            out[j * PITCH + row] = first + row < p.n_tokens ? x : 0.0f;
        }
    }
    __syncthreads();
    if (!biased) return;
    for (int i = threadIdx.x / ROWS; i < p.n_tracked; i += THREADS / ROWS) {
        if (i >= THREADS / ROWS) tracked = tracked_mean(p, head, i, position);
        out[tracked.dims.x * PITCH + own_row] -= tracked.x;
        out[tracked.dims.y * PITCH + own_row] -= tracked.y;
    }
    __syncthreads();
}

/* Rows [D, ROWS + 4] times U, rounded to BF16, to [ROWS, STRIDE]: thread (j, k) has channel j of the k-th N rows. In
 * four pieces of U, each of which wait() is called for. */
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
        if constexpr (R::G == 1) metric_product(w, metric, w.shared_x, w.xb);
#pragma unroll 1
        for (int round = 0; round < LDLQ_REFITS; round++) round_ldlq(w, q, metric);
    } else {
        round_plain(w, q);
    }
    if (from.gain && !zoo) apply_gain(w, q, metric, with_metric, ldlq);
}

/* Sixteen lanes, or a warp, code their row of `rows`. */
template <int D, bool WIDE>
DEVICE void code_row(const AppendParams &p, const AppendMetric &metric, float *rows, float *scratch, int side, int head,
                     const RowPlace &at) {
    using R = Row<D, WIDE>;
    const int row = threadIdx.x / R::LANES;
    uint8_t *tile = tile_of(p, at, head);
    R w;
    w.lane = threadIdx.x & 15;
    w.upper = WIDE && (threadIdx.x & 16);
    w.shared_x = rows + row * R::STRIDE;
    w.scratch = scratch + row * R::STRIDE;
#pragma unroll
    for (int m = 0; m < R::N; m++) w.x[m] = w.shared_x[16 * m + w.lane];
    const Levels q = levels_of(p.side[side].bits);
    quantise(p.side[side], w, q, metric, p.recipe);
    store_tile(p, w, q, side, at.position % 64, tile, at.valid && !w.upper);
}

/* --- the overlay --------------------------------------------------------------------------------- */

/* A warp stores a token's row in the overlay; to: its place there, NULL for no row. A row that is not finite is reported
 * and becomes zeros. CODES: leaves what is quantised. */
template <int D, bool CODES> DEVICE void keep_row(const AppendParams &p, float *row, uint16_t *to, int token) {
    constexpr int OWN = D / 32;
    const int lane = threadIdx.x & 31;
    float *x = row + OWN * lane, v[OWN];
    bool finite = true;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        v[i] = x[i];
        finite = finite && fabsf(v[i]) <= FLT_MAX;
    }
    finite = __all_sync(FULL_WARP, finite);
    if (!finite && to && lane == 0 && p.bad_token) atomicMin(p.bad_token, token);
#pragma unroll
    for (int i = 0; i < OWN; i++) v[i] = finite ? v[i] : 0.0f;
#pragma unroll
    for (int i = 0; i < OWN; i += 2)
        if (to) *reinterpret_cast<uint32_t *>(to + OWN * lane + i) = pack_bf162(v[i], v[i + 1]);
#pragma unroll
    for (int i = 0; i < OWN && CODES; i++) x[i] = fminf(fmaxf(v[i], -ROW_LIMIT), ROW_LIMIT);
}

/* Fetches what is quantised of a row from the overlay, by sixteen lanes. */
template <int D> DEVICE void fetch_row(const AppendParams &p, const AppendSide &from, const RowPlace &at, int head, float *row) {
    const int lane = threadIdx.x & 15;
    const int *overlay = reinterpret_cast<const int *>(overlay_of<D>(p, from, at, slot_of(p, at), head));
    uint32_t v[D / 32];
#pragma unroll
    for (int k = 0; k < D / 32; k++) v[k] = at.valid ? load_int(overlay + 16 * k + lane) : 0;
#pragma unroll
    for (int k = 0; k < D / 32; k++) {
        row[32 * k + 2 * lane] = fminf(fmaxf(bf16_low(v[k]), -ROW_LIMIT), ROW_LIMIT);
        row[32 * k + 2 * lane + 1] = fminf(fmaxf(bf16_high(v[k]), -ROW_LIMIT), ROW_LIMIT);
    }
}

/* --- kernels ------------------------------------------------------------------------------------- */

/* CODES: they are made at once; otherwise settle makes them. */
template <int D, int THREADS, bool STAGED, bool WIDE, bool CODES>
__global__ void __launch_bounds__(THREADS, CODES ? 1 : 2) append_kernel(const __grid_constant__ AppendParams p) {
    constexpr int ROWS = THREADS / Row<D, WIDE>::LANES, ROWS_A_WARP = WIDE ? 1 : 2;
    extern __shared__ __align__(16) float shared[];
    const Part part(p);
    const int head = part.head, warp = threadIdx.x >> 5;
    const AppendSide &from = p.side[part.side];
    float *turned = shared + (STAGED ? staged_floats<D>(CODES) : 0), *residuals = turned + ROWS * Row<D>::STRIDE;
    float *own = turned + warp * ROWS_A_WARP * Row<D>::STRIDE;
    const float *rotation = from.rotation ? from.rotation + static_cast<size_t>(head) * D * D : nullptr;
    const float *packed = CODES && from.metric ? from.metric + static_cast<size_t>(head) * layout_metric_floats(D) : nullptr;
    /* Constants, while the kernel before this one ends. The rotation in pieces, in the order in which they are needed;
     * the metric, which is needed later, behind the first rows. */
    for (int piece = 0; STAGED && piece < 4; piece++) {
        if (rotation) stage(shared + piece * D * D / 4, rotation + piece * D * D / 4, D * D / 4, threadIdx.x, THREADS);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    let_next_kernel_start();
    wait_for_kernel_before();
    bool first = true;
#pragma unroll 1
    for (int token = part.group * ROWS; token < p.n_tokens; token += from.n_ctas * ROWS) {
        auto flood = [&] {
            if (!STAGED || !first) return;
            if (packed) stage(shared + D * D, packed, layout_metric_floats(D), threadIdx.x, THREADS);
            asm volatile("cp.async.commit_group;" ::: "memory");
        };
        /* Places and slots are loaded long before they are used. */
        RowPlace at[ROWS_A_WARP];
        int slot[ROWS_A_WARP];
#pragma unroll
        for (int k = 0; k < ROWS_A_WARP; k++) at[k] = place_of_token(p, token + warp * ROWS_A_WARP + k);
        load_residuals<D, THREADS, ROWS>(p, from, part.side, head, token, residuals, flood);
#pragma unroll
        for (int k = 0; k < ROWS_A_WARP; k++) slot[k] = slot_of(p, at[k]);
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
#pragma unroll
        for (int k = 0; k < ROWS_A_WARP; k++) {
            uint16_t *to = at[k].valid ? overlay_of<D>(p, from, at[k], slot[k], head) : nullptr;
            keep_row<D, CODES>(p, own + k * Row<D>::STRIDE, to, token + warp * ROWS_A_WARP + k);
        }
        __syncwarp();
        if constexpr (CODES) {
            const RowPlace mine = !WIDE && threadIdx.x & 16 ? at[ROWS_A_WARP - 1] : at[0];
            code_row<D, WIDE>(p, metric_of<D>(STAGED ? shared + D * D : packed), turned, residuals, part.side, head, mine);
        }
        __syncthreads();
    }
}

template <int D, int THREADS, bool STAGED>
__global__ void __launch_bounds__(THREADS, 1) settle_kernel(const __grid_constant__ AppendParams p) {
    constexpr int ROWS = THREADS / Row<D>::LANES;
    extern __shared__ __align__(16) float shared[];
    const Part part(p);
    const AppendSide &from = p.side[part.side];
    float *rows = shared + (STAGED ? layout_metric_floats(D) : 0), *scratch = rows + ROWS * Row<D>::STRIDE;
    const float *packed = from.metric ? from.metric + static_cast<size_t>(part.head) * layout_metric_floats(D) : nullptr;
    const int row = threadIdx.x / Row<D>::LANES;
    let_next_kernel_start();
    wait_for_kernel_before();
    bool first = true;
#pragma unroll 1
    for (int group = part.group;; group += from.n_ctas) {
        RowPlace at;
        if (group * ROWS >= place_to_settle(p, group * ROWS + row, &at)) return;
        if (STAGED && first && packed) stage(shared, packed, layout_metric_floats(D), threadIdx.x, THREADS);
        fetch_row<D>(p, from, at, part.head, rows + row * Row<D>::STRIDE);
        if (first) {
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads();
        }
        first = false;
        __syncwarp();
        code_row<D, false>(p, metric_of<D>(STAGED ? shared : packed), rows, scratch, part.side, part.head, at);
        __syncwarp(); /* the row's place is free */
    }
}

/* --- the launch ---------------------------------------------------------------------------------- */

struct AppendPlan {
    void (*kernel)(const AppendParams);
    int n_threads, n_rows; /* of a CTA at once */
    size_t shared_bytes;
};

template <int D, int THREADS, bool STAGED, bool CODES, bool WIDE = false> static AppendPlan plan_append() {
    constexpr int ROWS = THREADS / Row<D, WIDE>::LANES;
    const size_t floats = rows_floats<D>(ROWS) + (STAGED ? staged_floats<D>(CODES) : 0);
    return {append_kernel<D, THREADS, STAGED, WIDE, CODES>, THREADS, ROWS, floats * sizeof(float)};
}

template <int D, int THREADS, bool STAGED> static AppendPlan plan_settle() {
    constexpr int ROWS = THREADS / Row<D>::LANES;
    const size_t floats = 2 * ROWS * Row<D>::STRIDE + (STAGED ? layout_metric_floats(D) : 0);
    return {settle_kernel<D, THREADS, STAGED>, THREADS, ROWS, floats * sizeof(float)};
}

static int groups_of(const AppendPlan &plan, int n_rows) { return (n_rows + plan.n_rows - 1) / plan.n_rows; }

/* A row a lane, of tokens or of the overlay: when so many rows occupy a quarter of the multiprocessors. Keys with a metric feed
 * errors back, values have none: what calibration makes. */
static bool plan_lanes(const oscar_cuda_layer *layer, int n_rows, AppendPlan *plan, AppendParams *p) {
    using L = LanesShape;
    *plan = {p->seqs ? code_lanes_kernel<true> : code_lanes_kernel<false>, 64 * L::SIDE_WARPS, L::ROWS, L::WORDS * sizeof(uint32_t)};
    const int groups = groups_of(*plan, n_rows), most = layer->n_multiprocessors / layer->n_kv_heads;
    p->side[0].n_ctas = p->side[1].n_ctas = groups < most || most < 1 ? groups : most; /* one has both sides */
    const bool metrics = !layer->v_metric && (layer->ldlq_k || !layer->k_metric);
    return layer->head_dim == L::D && layer->recipe == OSCAR_RECIPE_DEFAULT && metrics &&
           4 * groups * layer->n_kv_heads >= layer->n_multiprocessors && plan->shared_bytes <= (size_t)layer->shared_max;
}

/* Few tokens: small CTAs, so that a row's chain of operations has a scheduler to itself. */
template <bool CODES> static AppendPlan plan_for_append(const oscar_cuda_layer *layer, int n_tokens) {
    if (layer->head_dim == 256) return plan_append<256, 256, false, CODES>();
    if (layer->head_dim == 64) return n_tokens <= 64 ? plan_append<64, 128, true, CODES>() : plan_append<64, 512, true, CODES>();
    if (n_tokens >= 128 && !CODES) {
        using C = ChunkShape<64>;
        const AppendPlan chunk = {append_chunk_kernel, C::THREADS, C::ROWS, (C::D * C::D + C::RESIDUALS) * sizeof(float)};
        if (chunk.shared_bytes <= (size_t)layer->shared_max) return chunk;
    }
    const AppendPlan plan = n_tokens <= 64 ? plan_append<128, 128, true, CODES, true>() : plan_append<128, 512, true, CODES>();
    return plan.shared_bytes <= (size_t)layer->shared_max ? plan : plan_append<128, 128, false, CODES>();
}

static AppendPlan plan_for_settle(const oscar_cuda_layer *layer) {
    if (layer->head_dim == 256) return plan_settle<256, 256, false>();
    if (layer->head_dim == 64) return plan_settle<64, 512, true>();
    const AppendPlan plan = plan_settle<128, 512, true>();
    return plan.shared_bytes <= (size_t)layer->shared_max ? plan : plan_settle<128, 128, false>();
}

/* CTAs a head of keys and values: all multiprocessors, three quarters to keys when they feed errors back. */
static void spread(const oscar_cuda_layer *layer, int groups, bool codes, AppendParams *p) {
    int both = layer->n_multiprocessors / layer->n_kv_heads * (codes ? 1 : 2);
    if (both < 2) both = 2;
    int keys = codes && p->side[0].ldlq ? (3 * both + 2) / 4 : both / 2;
    if (keys >= both) keys = both - 1;
    p->side[0].n_ctas = groups < keys ? groups : keys;
    const int values = 2 * groups <= both ? groups : both - keys;
    p->side[1].n_ctas = groups < values ? groups : values;
}

/* What the layer decides. */
static AppendParams params_of(const oscar_cuda_layer *layer, void *overlay_k, void *overlay_v) {
    AppendParams p = {};
    for (int s = 0; s < 2; s++) {
        AppendSide &side = p.side[s];
        side.overlay = (uint16_t *)(s ? overlay_v : overlay_k);
        side.rotation = s ? layer->v_rotation : layer->k_rotation;
        side.mean = s ? layer->v_mean : layer->k_mean;
        side.metric = s ? layer->v_metric : layer->k_metric;
        side.feedback = s ? NULL : layer->k_feedback;
        side.bits = s ? layer->bits_v : layer->bits_k;
        side.ldlq = s ? 0 : layer->ldlq_k;
        side.gain = s ? layer->gain_v : layer->gain_k;
        side.clip = s ? layer->clip_v : layer->clip_k;
    }
    p.bias_table = layer->append_bias_table;
    p.bias_dims = (const int2 *)layer->append_bias_dims;
    p.bias_freq = layer->append_bias_freq;
    p.n_kv_heads = layer->n_kv_heads;
    p.recipe = layer->recipe;
    p.n_tracked = layer->n_tracked;
    p.sink = layer->sink;
    p.sink8 = (layer->sink + 7) / 8 * 8;
    p.ring = layer->ring;
    p.tile_bytes = (int)oscar_cuda_tile_bytes(layer->head_dim, layer->bits_k, layer->bits_v);
    return p;
}

static oscar_status launch_append(const oscar_cuda_layer *layer, const AppendPlan &plan, int n_ctas, AppendParams *p,
                                  oscar_cuda_stream stream, const char *what, oscar_error *error) {
    const LayerLaunch launch = {dim3(n_ctas * layer->n_kv_heads), plan.n_threads, plan.shared_bytes, layer->bulk};
    return layer_launch(reinterpret_cast<const void *>(plan.kernel), &launch, p, stream, what, error);
}

/* Overlay rows, and codes unless they come later. */
static oscar_status launch_tokens(const oscar_cuda_layer *layer, bool codes, AppendParams *p, oscar_cuda_stream stream,
                                  oscar_error *error) {
    AppendPlan plan;
    if (codes && plan_lanes(layer, p->n_tokens, &plan, p))
        return launch_append(layer, plan, p->side[0].n_ctas, p, stream, "append launch", error);
    plan = codes ? plan_for_append<true>(layer, p->n_tokens) : plan_for_append<false>(layer, p->n_tokens);
    spread(layer, groups_of(plan, p->n_tokens), codes, p);
    return launch_append(layer, plan, p->side[0].n_ctas + p->side[1].n_ctas, p, stream, "append launch", error);
}

oscar_status oscar_cuda_append(const oscar_cuda_layer *layer, const oscar_cuda_append_args *a, oscar_cuda_stream stream,
                               oscar_error *error) {
    if (a->struct_size != sizeof *a)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "struct_size is %u, expected %zu", a->struct_size, sizeof *a);
    if (a->codes_later < 0 || a->codes_later > 1)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "codes_later is %d, expected 0 or 1", a->codes_later);
    const bool codes = !a->codes_later;
    if (a->n_tokens < 1 || !a->k || !a->v || !a->seqs || !a->positions || (codes && (!a->pages || !a->block_table)) ||
        !a->overlay_k || !a->overlay_v)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "n_tokens is %d or a pointer of the append arguments is NULL",
                              a->n_tokens);
    if ((reinterpret_cast<uintptr_t>(a->k) | reinterpret_cast<uintptr_t>(a->v)) % 16)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "k is at %p and v at %p, expected multiples of 16 bytes", a->k, a->v);
    if (a->dtype < OSCAR_DTYPE_F32 || a->dtype > OSCAR_DTYPE_BF16)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "dtype is %d, expected F32, F16 or BF16", a->dtype);
    AppendParams p = params_of(layer, a->overlay_k, a->overlay_v);
    p.side[0].in = a->k;
    p.side[1].in = a->v;
    p.seqs = a->seqs;
    p.positions = a->positions;
    p.block_table = a->block_table;
    p.table_stride = a->table_stride;
    p.slots = a->slots;
    p.pages = (uint8_t *)a->pages;
    p.bad_token = a->bad_token;
    p.n_tokens = a->n_tokens;
    p.dtype = a->dtype;
    return launch_tokens(layer, codes, &p, stream, error);
}

oscar_status oscar_cuda_settle(const oscar_cuda_layer *layer, const oscar_cuda_settle_args *a, oscar_cuda_stream stream,
                               oscar_error *error) {
    if (a->struct_size != sizeof *a)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "struct_size is %u, expected %zu", a->struct_size, sizeof *a);
    if (a->n_seqs < 1 || !a->from || !a->to || !a->pages || !a->block_table || !a->overlay_k || !a->overlay_v)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "n_seqs is %d or a pointer of the settle arguments is NULL", a->n_seqs);
    if (a->n_positions < 1)
        return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "n_positions is %d, expected at least 1", a->n_positions);
    AppendParams p = params_of(layer, (void *)a->overlay_k, (void *)a->overlay_v);
    p.from = a->from;
    p.to = a->to;
    p.n_seqs = a->n_seqs;
    p.block_table = a->block_table;
    p.table_stride = a->table_stride;
    p.slots = a->slots;
    p.pages = (uint8_t *)a->pages;
    const int64_t expected = (int64_t)a->n_seqs * a->n_positions;
    const int n_rows = (int)(expected < 1 << 24 ? expected : 1 << 24);
    AppendPlan plan;
    if (plan_lanes(layer, n_rows, &plan, &p))
        return launch_append(layer, plan, p.side[0].n_ctas, &p, stream, "settle launch", error);
    plan = plan_for_settle(layer);
    spread(layer, groups_of(plan, n_rows), true, &p);
    return launch_append(layer, plan, p.side[0].n_ctas + p.side[1].n_ctas, &p, stream, "settle launch", error);
}
