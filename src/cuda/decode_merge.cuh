/*
 * decode_merge.cuh - from the accumulators of a CTA's warps to output rows.
 *
 * Warps are summed in order through shared memory. A segment that one CTA did alone is finished
 * there; otherwise every CTA leaves its partial in the workspace, in fragment order, and the last to
 * arrive sums them in the order of the CTAs. Nothing depends on who arrives when.
 */
#ifndef OSCAR_CUDA_DECODE_MERGE_CUH
#define OSCAR_CUDA_DECODE_MERGE_CUH

#include "decode_tile.cuh"

template <class C> struct Merge {
    static constexpr int WHOLE = C::FULL * C::STEPS * 32;             /* fragments of a warp: of two rows, four floats */
    static constexpr int HALF = (C::TILES - C::FULL) * C::STEPS * 32; /* and of one row, two floats */
    static constexpr int SLOT_FLOATS = WHOLE * 4 + HALF * 2;
    static constexpr int WARP_BYTES = (SLOT_FLOATS + 2 * C::ROWS) * 4; /* with rows' maxima and sums */
    static constexpr int LINE = (C::WARPS + 3) / 4 * 4;                /* floats of a row: weights of the warps */
    static constexpr int WEIGHTS = C::ROWS * LINE + 16;                /* a warp has all of them, and rows' factors */
    static constexpr int WARPS_BYTES = C::WARPS * (WARP_BYTES + WEIGHTS * 4);
    /* Weights of partials: floats from a row to the next, so that four rows lie in different banks. */
    static constexpr int PARTIALS_LINE = DECODE_MAX_CTAS + 4;
    static constexpr int ROWS_OFFSET = (C::ROWS * PARTIALS_LINE + 16) * 4; /* of output rows, behind these and rows' factors */
    static constexpr int ROWS_BYTES = ROWS_OFFSET + C::ROWS * C::D * 4;
    static constexpr int BYTES = WARPS_BYTES > ROWS_BYTES ? WARPS_BYTES : ROWS_BYTES;
};

/* Fragment e of whole or of half column tiles: of channels d and d + 8, of row and, if whole, of row + 4. */
template <class C, bool WHOLE> struct Fragment {
    static constexpr int COUNT = WHOLE ? Merge<C>::WHOLE : Merge<C>::HALF;
    static constexpr int ROUNDS = (COUNT + C::THREADS - 1) / C::THREADS;
    int row, d;
    DEVICE explicit Fragment(int e) {
        row = 8 * (e / (C::STEPS * 32) + (WHOLE ? 0 : C::FULL)) + (e & 3);
        d = 16 * ((e >> 5) % C::STEPS) + ((e & 31) >> 2);
    }
    /* Of this thread, and whether it has one: if not, any, so that no register is defined by some threads only. */
    DEVICE static int of_thread(int round) { return min(thread_index() + round * C::THREADS, COUNT ? COUNT - 1 : 0); }
    DEVICE static bool has(int round) {
        return COUNT % C::THREADS == 0 || thread_index() + round * C::THREADS < COUNT;
    }
};
template <bool WHOLE> struct FragmentForm {
    typedef float4 Type;
};
template <> struct FragmentForm<false> {
    typedef float2 Type;
};
template <bool WHOLE> using FragmentValue = typename FragmentForm<WHOLE>::Type;

DEVICE void clear(float4 &x) { x = make_float4(0, 0, 0, 0); }
DEVICE void clear(float2 &x) { x = make_float2(0, 0); }
/* f0, f1: of the two rows. */
DEVICE void add_weighted(float4 &sum, const float4 &v, float f0, float f1) {
    sum = make_float4(fmaf(f0, v.x, sum.x), fmaf(f1, v.y, sum.y), fmaf(f0, v.z, sum.z), fmaf(f1, v.w, sum.w));
}
DEVICE void add_weighted(float2 &sum, const float2 &v, float f, float) {
    sum = make_float2(fmaf(f, v.x, sum.x), fmaf(f, v.y, sum.y));
}
DEVICE float4 scaled(const float4 &v, float f0, float f1) { return make_float4(v.x * f0, v.y * f1, v.z * f0, v.w * f1); }
DEVICE float2 scaled(const float2 &v, float f, float) { return make_float2(v.x * f, v.y * f); }

/* Fragments of one kind, of a slot or of a warp's sums: the whole ones come first. */
template <class C, bool WHOLE> DEVICE const FragmentValue<WHOLE> *fragments_of(const float *slot) {
    return reinterpret_cast<const FragmentValue<WHOLE> *>(slot + (WHOLE ? 0 : Merge<C>::WHOLE * 4));
}
template <class C, bool WHOLE> DEVICE FragmentValue<WHOLE> *fragments_of(float *slot) {
    return reinterpret_cast<FragmentValue<WHOLE> *>(slot + (WHOLE ? 0 : Merge<C>::WHOLE * 4));
}

/* Where warps leave their sums: a warp's are so many bytes behind those of the warp before. */
struct WarpSums {
    uint8_t *first;
    int stride;
    DEVICE float *of(int warp) const { return reinterpret_cast<float *>(first + warp * stride); }
    /* [ROWS] maximum (log2) and sum. */
    template <class C> DEVICE float2 *rows_of(int warp) const {
        return reinterpret_cast<float2 *>(of(warp) + Merge<C>::SLOT_FLOATS);
    }
};

/* What a warp has of the output, and its rows' maxima and sums. q_mean: see merge_segment(). */
template <class C> DEVICE void leave_warp(Rows<C> &r, const WarpSums &sums, const float (&q_mean)[C::COLUMNS], int warp, int lane) {
#pragma unroll
    for (int d = 4; d < 32; d <<= 1)
#pragma unroll
        for (int i = 0; i < C::COLUMNS; i++) {
            r.row_sum[i] += __shfl_xor_sync(FULL_WARP, r.row_sum[i], d);
#pragma unroll
            for (int k = 0; k < C::G; k++)
                r.offset_sum[i][k] += __shfl_xor_sync(FULL_WARP, r.offset_sum[i][k], d);
        }
    if (lane < 4)
#pragma unroll
        for (int i = 0; i < C::COLUMNS; i++)
            sums.rows_of<C>(warp)[4 * i + lane] =
                make_float2(r.row_sum[i] > 0 ? fmaf(r.row_max[i], r.scale[i], q_mean[i]) : NO_MAXIMUM, r.row_sum[i]);
    float *own = sums.of(warp);
#pragma unroll
    for (int j = 0; j < C::TILES; j++)
#pragma unroll
        for (int m = 0; m < C::STEPS; m++) {
            const float unit = static_cast<float>(1 << (24 - 2 * (m & 3))), (&x)[4] = r.acc[j][m];
            const int k = (m >> 2) / C::WORDS_A_GROUP;
            const float o0 = r.offset_sum[2 * j][k], o1 = r.offset_sum[j < C::FULL ? 2 * j + 1 : 2 * j][k];
            if (j < C::FULL)
                fragments_of<C, true>(own)[(j * C::STEPS + m) * 32 + lane] =
                    make_float4(fmaf(x[0], unit, o0), fmaf(x[1], unit, o1), fmaf(x[2], unit, o0), fmaf(x[3], unit, o1));
            else /* both columns are the same row */
                fragments_of<C, false>(own)[m * 32 + lane] = make_float2(fmaf(x[0] + x[1], unit, o0), fmaf(x[2] + x[3], unit, o0));
        }
}

/* A row of this CTA: log2 maximum and sum. */
struct RowTotal {
    float max, sum;
};

/* This lane's row of this CTA, and, for this warp alone, what the warps' sums count for in all rows. own: the warp's weights. */
template <class C> DEVICE RowTotal weigh_warps(const WarpSums &sums, float *own, int lane) {
    const int row = min(lane, C::ROWS - 1);
    float2 x[Merge<C>::LINE];
    RowTotal total = {NO_MAXIMUM, 0};
#pragma unroll
    for (int w = 0; w < Merge<C>::LINE; w++) {
        x[w] = w < C::WARPS ? sums.rows_of<C>(w)[row] : make_float2(NO_MAXIMUM, 0);
        total.max = fmaxf(total.max, x[w].x);
    }
#pragma unroll
    for (int w = 0; w < Merge<C>::LINE; w++) {
        x[w].x = w < C::WARPS ? exp2_fast(x[w].x - total.max) : 0.0f;
        total.sum = fmaf(x[w].x, x[w].y, total.sum);
    }
#pragma unroll
    for (int v = 0; v < Merge<C>::LINE / 4; v++)
        if (lane < C::ROWS)
            reinterpret_cast<float4 *>(own + row * Merge<C>::LINE)[v] =
                make_float4(x[4 * v].x, x[4 * v + 1].x, x[4 * v + 2].x, x[4 * v + 3].x);
    __syncwarp();
    return total;
}

/* Sum over the warps of fragment e. weights: see weigh_warps(). */
template <class C, bool WHOLE> DEVICE FragmentValue<WHOLE> sum_warps(const WarpSums &sums, const float *weights, int e) {
    const Fragment<C, WHOLE> at(e);
    const float4 *f0 = reinterpret_cast<const float4 *>(weights + at.row * Merge<C>::LINE);
    const float4 *f1 = WHOLE ? f0 + Merge<C>::LINE : f0; /* four rows on */
    FragmentValue<WHOLE> sum;
    clear(sum);
#pragma unroll
    for (int v = 0; v < Merge<C>::LINE / 4; v++) {
        const float4 a = f0[v], b = f1[v];
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (4 * v + k < C::WARPS)
                add_weighted(sum, fragments_of<C, WHOLE>(sums.of(4 * v + k))[e], k == 0 ? a.x : k == 1 ? a.y : k == 2 ? a.z : a.w,
                             k == 0 ? b.x : k == 1 ? b.y : k == 2 ? b.z : b.w);
    }
    return sum;
}

/* Where rows of a segment go. */
struct Target {
    int seq, head, first_row, n_rows;
};

DEVICE int query_head(const DecodeParams &p, const Target &to, int row) {
    const int r = to.first_row + row;
    return to.head * p.gqa + r - divide(r, p.gqa, p.gqa_magic) * p.gqa;
}

/* Adds another logit, that has no value, to a softmax with this maximum and sum: the factor that
 * normalises. */
DEVICE float normaliser(float max, float sum, const float *sink_logits, int q_head) {
    float factor = 1.0f;
    if (sink_logits) {
        const float x = sink_logits[q_head] * 1.4426950408889634f, top = fmaxf(max, x);
        factor = exp2_fast(max - top);
        sum = sum * factor + exp2_fast(x - top);
    }
    return __fdividef(factor, sum);
}

/* Index of a row's first number in the output. */
template <class C> DEVICE size_t place_of_row(const DecodeParams &p, const Target &to, int row) {
    const int r = to.first_row + row, token = divide(r, p.gqa, p.gqa_magic), head = to.head * p.gqa + r - token * p.gqa;
    return (static_cast<size_t>(to.seq * p.n_q_tokens + token) * (p.n_kv_heads * p.gqa) + head) * C::D;
}

/* One number to the output. */
DEVICE void write_number(const DecodeParams &p, size_t at, float x) {
    if (p.out_dtype == OSCAR_DTYPE_F32)
        static_cast<float *>(p.out)[at] = x;
    else
        static_cast<uint16_t *>(p.out)[at] = p.out_dtype == OSCAR_DTYPE_BF16
                                                 ? __bfloat16_as_ushort(__float2bfloat16_rn(x))
                                                 : __half_as_ushort(__float2half_rn(x));
}
template <class C> DEVICE void write_value(const DecodeParams &p, const Target &to, int row, int d, float x) {
    write_number(p, place_of_row<C>(p, to, row) + d, x);
}

/* Rows in shared memory [n_rows, D], normalised, turned back, to the output. */
template <class C> DEVICE void turn_back(const DecodeParams &p, const float *rows, const Target &to) {
    const float *mean = p.v_mean_rotated ? p.v_mean_rotated + to.head * C::D : nullptr;
    const float *back = p.v_rotation_t + static_cast<size_t>(to.head) * C::D * C::D;
#pragma unroll 1
    for (int e = thread_index(); e < to.n_rows * C::D; e += C::THREADS) {
        const int row = e / C::D, d = e % C::D;
        float x = 0;
#pragma unroll 16
        for (int i = 0; i < C::D; i++)
            x = fmaf(rows[row * C::D + i] + (mean ? mean[i] : 0.0f), __ldg(back + i * C::D + d), x);
        write_value<C>(p, to, row, d, x);
    }
}

/* The means of a fragment's two channels. */
template <class C> DEVICE float2 fragment_means(const DecodeParams &p, const Target &to, int d) {
    if (!p.v_mean_rotated) return make_float2(0, 0);
    const float *mean = p.v_mean_rotated + to.head * C::D + d;
    return make_float2(__ldg(mean), __ldg(mean + 8));
}

/* Where channels d and d + 8 of a row go: to the output, or, when rows are to be turned back, to shared memory. */
template <class C> struct OutputPlace {
    size_t at;
    bool any;
    DEVICE OutputPlace(const DecodeParams &p, const Target &to, int row, int d) {
        any = row < to.n_rows;
        at = p.v_rotation_t ? row * C::D + d : place_of_row<C>(p, to, row) + d;
    }
    DEVICE void put(const DecodeParams &p, float *rows, float x, float y, const float2 &mean) const {
        if (!any) return;
        if (p.v_rotation_t) {
            rows[at] = x;
            rows[at + 8] = y;
        } else {
            write_number(p, at, x + mean.x);
            write_number(p, at + 8, y + mean.y);
        }
    }
};

/* The places of a fragment's numbers, and their means: what takes long is done before the numbers are there. */
template <class C, bool WHOLE> struct FragmentPlace {
    OutputPlace<C> first, second;
    float2 mean;
    DEVICE FragmentPlace(const DecodeParams &p, const Target &to, const Fragment<C, WHOLE> &at)
        : first(p, to, at.row, at.d), second(p, to, at.row + (WHOLE ? 4 : 0), at.d), mean(fragment_means<C>(p, to, at.d)) {}
    DEVICE void put(const DecodeParams &p, float *rows, const float4 &v) const {
        first.put(p, rows, v.x, v.z, mean);
        second.put(p, rows, v.y, v.w, mean);
    }
    DEVICE void put(const DecodeParams &p, float *rows, const float2 &v) const { first.put(p, rows, v.x, v.y, mean); }
};
template <class C> DEVICE float *output_rows(uint8_t *area) { return reinterpret_cast<float *>(area + Merge<C>::ROWS_OFFSET); }

/* What brings a row's sums to its softmax; 0 for a row that does not exist. */
template <class C> DEVICE float row_factor(const DecodeParams &p, const Target &to, int row, float max, float sum) {
    return row < to.n_rows ? normaliser(max, sum, p.sink_logits, query_head(p, to, row)) : 0.0f;
}

/* Partials of the workspace, two slots a CTA. */
template <class C> DEVICE float *partial_of(const DecodeParams &p, int slot) {
    return p.partials + static_cast<size_t>(slot) * Merge<C>::SLOT_FLOATS;
}
/* Partials that are summed at once. */
#define PARTIALS 16

/* The partials of a segment: the first CTA's is in slot first_slot of its two, the others' in the first. */
struct Partials {
    int first_slot, first_cta, n;
    DEVICE int slot(int k) const { return 2 * (first_cta + k) + (k == 0 ? first_slot : 0); }
};

/* Partials k .. k + PARTIALS - 1 of a fragment. */
template <class C, bool WHOLE> struct Loaded {
    FragmentValue<WHOLE> v[PARTIALS];
    DEVICE void load(const DecodeParams &p, const Partials &of, int e, int k) {
#pragma unroll
        for (int i = 0; i < PARTIALS; i++) {
            clear(v[i]);
            if (k + i < of.n) v[i] = __ldcg(fragments_of<C, WHOLE>(partial_of<C>(p, of.slot(k + i))) + e);
        }
    }
    DEVICE void add_to(FragmentValue<WHOLE> &sum, const float *weights, int row, int k) const {
        const float4 *f0 = reinterpret_cast<const float4 *>(weights + row * Merge<C>::PARTIALS_LINE + k);
        const float4 *f1 = WHOLE ? f0 + Merge<C>::PARTIALS_LINE : f0;
#pragma unroll
        for (int i = 0; i < PARTIALS; i += 4) {
            const float4 a = f0[i / 4], b = f1[i / 4];
            add_weighted(sum, v[i], a.x, b.x);
            add_weighted(sum, v[i + 1], a.y, b.y);
            add_weighted(sum, v[i + 2], a.z, b.z);
            add_weighted(sum, v[i + 3], a.w, b.w);
        }
    }
};

/* Half a warp has a row at a time: which, in a round. */
template <class C> DEVICE int own_row(int round) { return (thread_index() >> 4) + round * 2 * C::WARPS; }
/* Its maximum and sum in partial k. */
template <class C> DEVICE float2 load_stats(const DecodeParams &p, const Partials &of, int k, int round) {
    return k < of.n ? __ldcg(p.partial_sums + of.slot(k) * 16 + min(own_row<C>(round), C::ROWS - 1)) : make_float2(NO_MAXIMUM, 0);
}

/* Weights of all partials in all rows, and the rows' factors behind them. first: this thread's of the first round. */
template <class C>
DEVICE void weigh_partials(const DecodeParams &p, float *weights, const Target &to, const Partials &of, const float2 &first) {
    static_assert(PARTIALS == 16, "half a warp");
    const int own = thread_index() & 15;
#pragma unroll
    for (int round = 0; round < (C::ROWS + 2 * C::WARPS - 1) / (2 * C::WARPS); round++) {
        const int row = min(own_row<C>(round), C::ROWS - 1);
        const bool active = own_row<C>(round) < C::ROWS;
        float *line = weights + row * Merge<C>::PARTIALS_LINE;
        const float2 x = round == 0 ? first : load_stats<C>(p, of, own, round);
        float max = x.x;
#pragma unroll 1
        for (int k = own + PARTIALS; k < of.n; k += PARTIALS) max = fmaxf(max, load_stats<C>(p, of, k, round).x);
#pragma unroll
        for (int d = 1; d < 16; d <<= 1) max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, d));
        float f = exp2_fast(x.x - max), sum = f * x.y;
        if (active) line[own] = f;
#pragma unroll 1
        for (int k = PARTIALS; k < of.n; k += PARTIALS) {
            const float2 y = load_stats<C>(p, of, k + own, round);
            f = exp2_fast(y.x - max);
            sum = fmaf(f, y.y, sum);
            if (active) line[k + own] = f;
        }
#pragma unroll
        for (int d = 1; d < 16; d <<= 1) sum += __shfl_xor_sync(FULL_WARP, sum, d);
        if (active && own == 0) weights[C::ROWS * Merge<C>::PARTIALS_LINE + row] = row_factor<C>(p, to, row, max, sum);
    }
}

/* Sums the partials of a segment. Most of its time goes by until all of them have come from the L2 cache, so the loads of a round
 * are all on their way before anything else. */
template <class C> DEVICE void finish_partials(const DecodeParams &p, uint8_t *area, const Target &to, const Partials &of) {
    typedef Fragment<C, true> Whole;
    typedef Fragment<C, false> Half;
    constexpr int ROUNDS = Whole::ROUNDS > Half::ROUNDS ? Whole::ROUNDS : Half::ROUNDS;
    float *weights = reinterpret_cast<float *>(area), *factors = weights + C::ROWS * Merge<C>::PARTIALS_LINE;
    const float2 stats = load_stats<C>(p, of, thread_index() & 15, 0); /* before what takes long */
#pragma unroll 1
    for (int round = 0; round < ROUNDS; round++) {
        const int e = Whole::of_thread(round), h = Half::of_thread(round);
        const Whole whole_at(e);
        const Half half_at(h);
        const FragmentPlace<C, true> whole_place(p, to, whole_at);
        const FragmentPlace<C, false> half_place(p, to, half_at);
        Loaded<C, true> whole;
        Loaded<C, false> half;
        if (Whole::COUNT) whole.load(p, of, e, 0);
        if (Half::COUNT) half.load(p, of, h, 0);
        if (round == 0) { /* while these are on their way */
            weigh_partials<C>(p, weights, to, of, stats);
            __syncthreads();
        }
        float4 sum;
        float2 half_sum;
        clear(sum);
        clear(half_sum);
#pragma unroll 1
        for (int k = 0;;) {
            if (Whole::COUNT) whole.add_to(sum, weights, whole_at.row, k);
            if (Half::COUNT) half.add_to(half_sum, weights, half_at.row, k);
            k += PARTIALS;
            if (k >= of.n) break;
            if (Whole::COUNT) whole.load(p, of, e, k);
            if (Half::COUNT) half.load(p, of, h, k);
        }
        if (Whole::COUNT && round < Whole::ROUNDS && Whole::has(round))
            whole_place.put(p, output_rows<C>(area), scaled(sum, factors[whole_at.row], factors[whole_at.row + 4]));
        if (Half::COUNT && round < Half::ROUNDS && Half::has(round))
            half_place.put(p, output_rows<C>(area), scaled(half_sum, factors[half_at.row], 0.0f));
    }
    if (!p.v_rotation_t) return;
    __syncthreads();
    turn_back<C>(p, output_rows<C>(area), to);
}

/* Normalised fragments of one kind. */
template <class C, bool WHOLE>
DEVICE void sum_alone(const WarpSums &sums, const float *weights, FragmentValue<WHOLE> (&value)[Fragment<C, WHOLE>::ROUNDS + 1]) {
    typedef Fragment<C, WHOLE> F;
    const float *factors = weights + C::ROWS * Merge<C>::LINE;
#pragma unroll
    for (int k = 0; k < F::ROUNDS; k++) {
        const int e = F::of_thread(k), row = F(e).row;
        value[k] = scaled(sum_warps<C, WHOLE>(sums, weights, e), factors[row], factors[WHOLE ? row + 4 : row]);
    }
}
template <class C, bool WHOLE>
DEVICE void put_alone(const DecodeParams &p, uint8_t *area, const Target &to,
                      const FragmentValue<WHOLE> (&value)[Fragment<C, WHOLE>::ROUNDS + 1]) {
    typedef Fragment<C, WHOLE> F;
#pragma unroll
    for (int k = 0; k < F::ROUNDS; k++)
        if (F::has(k)) FragmentPlace<C, WHOLE>(p, to, F(F::of_thread(k))).put(p, output_rows<C>(area), value[k]);
}

/* The whole segment was this CTA's: normalise and write. total: of this lane's row. */
template <class C>
DEVICE void finish_alone(const DecodeParams &p, uint8_t *area, const Target &to, const WarpSums &sums, float *weights,
                         const RowTotal &total) {
    const int lane = thread_index() & 31;
    if (lane < C::ROWS) weights[C::ROWS * Merge<C>::LINE + lane] = row_factor<C>(p, to, lane, total.max, total.sum);
    __syncwarp();
    float4 whole[Fragment<C, true>::ROUNDS + 1];
    float2 half[Fragment<C, false>::ROUNDS + 1];
    sum_alone<C, true>(sums, weights, whole);
    sum_alone<C, false>(sums, weights, half);
    __syncthreads(); /* the warps' sums are done with */
    put_alone<C, true>(p, area, to, whole);
    put_alone<C, false>(p, area, to, half);
    if (!p.v_rotation_t) return;
    __syncthreads();
    turn_back<C>(p, output_rows<C>(area), to);
}

template <class C, bool WHOLE>
DEVICE void leave_fragments(const DecodeParams &p, int slot, const WarpSums &sums, const float *weights) {
    typedef Fragment<C, WHOLE> F;
#pragma unroll
    for (int k = 0; k < F::ROUNDS; k++)
        if (F::has(k)) {
            const int e = F::of_thread(k);
            __stcg(fragments_of<C, WHOLE>(partial_of<C>(p, slot)) + e, sum_warps<C, WHOLE>(sums, weights, e));
        }
}

/* This CTA's part of a shared segment to the workspace; slot 0 of a CTA is a segment that began
 * before it or with it. Returns true in the CTA that arrives last. */
template <class C>
DEVICE bool leave_partial(const DecodeParams &p, const WarpSums &sums, const float *weights, const RowTotal &total, int slot,
                          int segment, int n, int *last_flag) {
    const int s = 2 * blockIdx.x + slot;
    leave_fragments<C, true>(p, s, sums, weights);
    leave_fragments<C, false>(p, s, sums, weights);
    if (thread_index() < C::ROWS) __stcg(p.partial_sums + s * 16 + thread_index(), make_float2(total.max, total.sum));
    __syncthreads();
    if (thread_index() == 0) {
        const bool last = atomic_add_acq_rel(p.counters + segment, 1) == static_cast<uint32_t>(n - 1);
        if (last) p.counters[segment] = 0;
        *last_flag = last;
    }
    __syncthreads();
    return *last_flag != 0;
}

#endif
