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
    static constexpr int FRAGMENTS = C::TILES * C::STEPS * 32; /* of 4 floats */
    static constexpr int SLOT_FLOATS = FRAGMENTS * 4;
    static constexpr int WARP_BYTES = FRAGMENTS * 16;
    static constexpr int WARPS_BYTES = C::WARPS * (WARP_BYTES + 16 * 16);
    static constexpr int ROWS_BYTES = 16 * C::D * 4; /* output rows */
    static constexpr int BYTES = WARPS_BYTES > ROWS_BYTES ? WARPS_BYTES : ROWS_BYTES;
};

/* A row of this CTA: log2 maximum, sum, offset sum of one group. */
struct RowTotal {
    float max, sum, offset;
};

/* Rows of warps behind their fragments, [WARPS, 16]: maximum (log2), sum, offset sums of up to two groups. */
template <class C> DEVICE float4 *warp_stats(uint8_t *area) {
    return reinterpret_cast<float4 *>(area + C::WARPS * Merge<C>::WARP_BYTES);
}

/* What N parts of a sum, each with a maximum of its own, count for in a row: of its lanes, eight of a warp with equal lane & 3,
 * each has every eighth part. */
template <int N> struct SharedWeights {
    static constexpr int EACH = (N + 7) / 8;
    float own[EACH];

    DEVICE static int part(int i) { return ((threadIdx.x & 31) >> 2) + 8 * i; }
    /* max: of this lane's parts. top: of what was before; returns the new one. */
    DEVICE float weigh(const float (&max)[EACH], float top) {
#pragma unroll
        for (int i = 0; i < EACH; i++) top = fmaxf(top, max[i]);
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, d));
#pragma unroll
        for (int i = 0; i < EACH; i++) own[i] = exp2_fast(max[i] - top);
        return top;
    }
    /* Sum over the parts, which are x. */
    DEVICE float sum(const float (&x)[EACH]) const {
        float all = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) all = fmaf(own[i], x[i], all);
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) all += __shfl_xor_sync(FULL_WARP, all, d);
        return all;
    }
    DEVICE float of(int k) const { return __shfl_sync(FULL_WARP, own[k / 8], k % 8 * 4 + (threadIdx.x & 3)); }
};

/* Total of a row over the warps, and the factors that bring them to one maximum. All lanes of a warp call it. */
template <class C> DEVICE RowTotal weigh_warps(uint8_t *area, int row, int group, float (&factor)[C::WARPS]) {
    typedef SharedWeights<C::WARPS> W;
    W weights;
    float max[W::EACH], sum[W::EACH], offset[W::EACH];
#pragma unroll
    for (int i = 0; i < W::EACH; i++) {
        const int w = W::part(i);
        const float4 stats = warp_stats<C>(area)[min(w, C::WARPS - 1) * 16 + row];
        max[i] = w < C::WARPS ? stats.x : NO_MAXIMUM;
        sum[i] = w < C::WARPS ? stats.y : 0.0f;
        offset[i] = w < C::WARPS ? C::G > 1 && group ? stats.w : stats.z : 0.0f;
    }
    RowTotal total;
    total.max = weights.weigh(max, NO_MAXIMUM);
    total.sum = weights.sum(sum);
    total.offset = weights.sum(offset);
#pragma unroll
    for (int w = 0; w < C::WARPS; w++) factor[w] = weights.of(w);
    return total;
}

/* Rows and channel of fragment e: x and z are of row0, y and w of row1 (the same in a half tile); x and y are of channel
 * d, z and w of d + 8. */
template <class C> struct Fragment {
    int row0, row1, step, d, stats; /* stats: where a partial has what belongs to the rows */
    bool full;
    DEVICE explicit Fragment(int e) {
        const int j = e / (C::STEPS * 32);
        step = (e >> 5) % C::STEPS;
        full = j < C::FULL;
        row0 = 8 * j + (e & 3);
        row1 = full ? row0 + 4 : row0;
        stats = 4 * j + (e & 3);
        d = 16 * step + ((e & 31) >> 2);
    }
};

/* Sum over the warps of fragment e, and the totals of its rows. */
template <class C> DEVICE float4 sum_warps(uint8_t *area, int e, RowTotal &total0, RowTotal &total1) {
    using M = Merge<C>;
    const float4 *fragments = reinterpret_cast<const float4 *>(area) + e;
    const Fragment<C> at(e);
    const int group = (at.step >> 2) / C::WORDS_A_GROUP;
    const float unit = static_cast<float>(1 << (24 - 2 * (at.step & 3)));
    float f0[C::WARPS], f1[C::WARPS];
    total0 = weigh_warps<C>(area, at.row0, group, f0);
    if constexpr (C::FULL > 0) {
        total1 = weigh_warps<C>(area, at.row1, group, f1);
    } else {
        total1 = total0;
#pragma unroll
        for (int w = 0; w < C::WARPS; w++) f1[w] = f0[w];
    }
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < C::WARPS; w++) {
        const float4 v = fragments[w * M::FRAGMENTS];
        sum.x = fmaf(f0[w], v.x, sum.x);
        sum.y = fmaf(f1[w], v.y, sum.y);
        sum.z = fmaf(f0[w], v.z, sum.z);
        sum.w = fmaf(f1[w], v.w, sum.w);
    }
    if (!at.full) { /* both columns are the same row */
        sum.x += sum.y;
        sum.z += sum.w;
    }
    return make_float4(fmaf(sum.x, unit, total0.offset), fmaf(sum.y, unit, total1.offset), fmaf(sum.z, unit, total0.offset),
                       fmaf(sum.w, unit, total1.offset));
}

template <class C> DEVICE void store_warp(Rows<C> &r, uint8_t *area, const float (&q_mean)[C::COLUMNS], int warp, int lane) {
    using M = Merge<C>;
    float4 *fragments = reinterpret_cast<float4 *>(area) + warp * M::FRAGMENTS;
    float4 *stats = warp_stats<C>(area) + warp * 16;
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) {
            r.row_sum[i] += __shfl_xor_sync(FULL_WARP, r.row_sum[i], d);
#pragma unroll
            for (int k = 0; k < C::G; k++)
                r.offset_sum[i][k] += __shfl_xor_sync(FULL_WARP, r.offset_sum[i][k], d);
        }
        if (lane < 4)
            stats[4 * i + lane] = make_float4(r.row_sum[i] > 0 ? fmaf(r.row_max[i], r.scale[i], q_mean[i]) : NO_MAXIMUM,
                                              r.row_sum[i], r.offset_sum[i][0], r.offset_sum[i][C::G - 1]);
    }
#pragma unroll
    for (int j = 0; j < C::TILES; j++)
#pragma unroll
        for (int m = 0; m < C::STEPS; m++)
            fragments[(j * C::STEPS + m) * 32 + lane] =
                make_float4(r.acc[j][m][0], r.acc[j][m][1], r.acc[j][m][2], r.acc[j][m][3]);
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

/* One number of a row to the output. */
template <class C> DEVICE void write_value(const DecodeParams &p, const Target &to, int row, int d, float x) {
    const int r = to.first_row + row, token = divide(r, p.gqa, p.gqa_magic), head = to.head * p.gqa + r - token * p.gqa;
    const size_t at = (static_cast<size_t>(to.seq * p.n_q_tokens + token) * (p.n_kv_heads * p.gqa) + head) * C::D + d;
    if (p.out_dtype == OSCAR_DTYPE_F32)
        static_cast<float *>(p.out)[at] = x;
    else
        static_cast<uint16_t *>(p.out)[at] = p.out_dtype == OSCAR_DTYPE_BF16
                                                 ? __bfloat16_as_ushort(__float2bfloat16_rn(x))
                                                 : __half_as_ushort(__float2half_rn(x));
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

/* A normalised fragment to the output, or, when rows are to be turned back, to shared memory. */
template <class C>
DEVICE void put_fragment(const DecodeParams &p, float *rows, const Target &to, const Fragment<C> &at, const float4 &v,
                         const float2 &mean) {
    const bool one = at.row0 < to.n_rows, two = at.full && at.row1 < to.n_rows;
    if (p.v_rotation_t) {
        if (one) {
            rows[at.row0 * C::D + at.d] = v.x;
            rows[at.row0 * C::D + at.d + 8] = v.z;
        }
        if (two) {
            rows[at.row1 * C::D + at.d] = v.y;
            rows[at.row1 * C::D + at.d + 8] = v.w;
        }
        return;
    }
    if (one) {
        write_value<C>(p, to, at.row0, at.d, v.x + mean.x);
        write_value<C>(p, to, at.row0, at.d + 8, v.z + mean.y);
    }
    if (two) {
        write_value<C>(p, to, at.row1, at.d, v.y + mean.x);
        write_value<C>(p, to, at.row1, at.d + 8, v.w + mean.y);
    }
}

/* What brings a row's sums to its softmax; 0 for a row that does not exist. */
template <class C> DEVICE float row_factor(const DecodeParams &p, const Target &to, int row, float max, float sum) {
    return row < to.n_rows ? normaliser(max, sum, p.sink_logits, query_head(p, to, row)) : 0.0f;
}

/* One row of the partials that a thread sums: its running maximum and sum. */
struct RunningRow {
    float max, sum;

    /* Takes in the maxima and sums of N partials, of which each of the row's lanes has some. Returns what the sums so far are to be
     * multiplied by; weight: what the new ones are. */
    template <int N> DEVICE float take(const float2 (&stats)[SharedWeights<N>::EACH], float (&weight)[N]) {
        typedef SharedWeights<N> W;
        W weights;
        float tops[W::EACH], parts[W::EACH];
#pragma unroll
        for (int i = 0; i < W::EACH; i++) {
            tops[i] = stats[i].x;
            parts[i] = stats[i].y;
        }
        const float top = weights.weigh(tops, max), factor = exp2_fast(max - top);
        max = top;
        sum = fmaf(sum, factor, weights.sum(parts));
#pragma unroll
        for (int k = 0; k < N; k++) weight[k] = weights.of(k);
        return factor;
    }
};

/* What a partial has of a fragment: all of it, or, where both columns are the same row, x and z. */
DEVICE float4 fragment_of(const float4 &v) { return v; }
DEVICE float4 fragment_of(const float2 &v) { return make_float4(v.x, 0, v.y, 0); }
DEVICE void store_fragment(float4 *to, const float4 &v) { __stcg(to, v); }
DEVICE void store_fragment(float2 *to, const float4 &v) { __stcg(to, make_float2(v.x, v.z)); }
template <bool ONE_ROW> struct PartialForm {
    typedef float4 Fragment;
};
template <> struct PartialForm<true> {
    typedef float2 Fragment;
};
/* [FRAGMENTS], of 2 slots a CTA, each with room for float4. */
template <class C> using PartialFragment = typename PartialForm<C::FULL == 0>::Fragment;
template <class C> DEVICE PartialFragment<C> *partial_of(const DecodeParams &p, size_t slot) {
    return reinterpret_cast<PartialFragment<C> *>(p.partials + slot * Merge<C>::SLOT_FLOATS);
}
template <class C> __host__ __device__ constexpr int partial_stride() {
    return Merge<C>::SLOT_FLOATS * 4 / static_cast<int>(sizeof(PartialFragment<C>));
}

/* Partials that are summed at once. */
#define PARTIALS 16

/* Sum of the partials so far. */
struct PartialSum {
    float4 sum;
    RunningRow row0, row1;

    /* Adds partials k .. k + PARTIALS - 1 of n. values, sums: of this fragment and its rows, in the first slot of CTA k; those of
     * k = 0 are in first_slot. */
    template <class C>
    DEVICE void add(const PartialFragment<C> *values, const float4 *sums, int k, int n, int first_slot) {
        float4 v[PARTIALS];
        float w0[PARTIALS], w1[PARTIALS], f0, f1;
        typedef SharedWeights<PARTIALS> W;
        float2 stats0[W::EACH], stats1[W::EACH];
#pragma unroll
        for (int i = 0; i < W::EACH; i++) {
            const int at = W::part(i);
            float4 stats = __ldcg(sums + (2 * min(at, n - 1 - k) + (k + at == 0 ? first_slot : 0)) * 8);
            if (k + at >= n) stats = make_float4(NO_MAXIMUM, 0, NO_MAXIMUM, 0);
            stats0[i] = make_float2(stats.x, stats.y);
            stats1[i] = make_float2(stats.z, stats.w);
        }
#pragma unroll
        for (int i = 0; i < PARTIALS; i++) {
            v[i] = make_float4(0, 0, 0, 0);
            if (k + i < n) v[i] = fragment_of(__ldcg(values + (2 * i + (i == 0 && k == 0 ? first_slot : 0)) * partial_stride<C>()));
        }
        f1 = f0 = row0.take(stats0, w0);
        if (C::FULL > 0) f1 = row1.take(stats1, w1);
#pragma unroll
        for (int i = 0; C::FULL == 0 && i < PARTIALS; i++) w1[i] = w0[i];
        sum = make_float4(sum.x * f0, sum.y * f1, sum.z * f0, sum.w * f1);
#pragma unroll
        for (int i = 0; i < PARTIALS; i++) {
            sum.x = fmaf(w0[i], v[i].x, sum.x);
            sum.y = fmaf(w1[i], v[i].y, sum.y);
            sum.z = fmaf(w0[i], v[i].z, sum.z);
            sum.w = fmaf(w1[i], v[i].w, sum.w);
        }
    }
};

/* Sums n partials, of CTAs from first_cta on: in the first slot of each, but in slot first_slot of the first. Every warp weighs
 * the rows of its own fragments: that is sooner done than said to the others. */
template <class C>
DEVICE void finish_partials(const DecodeParams &p, uint8_t *area, const Target &to, int first_slot, int first_cta, int n) {
    using M = Merge<C>;
    float *rows = reinterpret_cast<float *>(area);
#pragma unroll 1
    for (int e0 = 0; e0 < M::FRAGMENTS; e0 += C::THREADS) {
        /* All threads load: a register that only some define would be taken for the whole kernel. */
        const bool active = e0 + thread_index() < M::FRAGMENTS;
        const int e = min(e0 + thread_index(), M::FRAGMENTS - 1);
        const Fragment<C> at(e);
        const float2 mean = fragment_means<C>(p, to, at.d);
        PartialSum all = {make_float4(0, 0, 0, 0), {NO_MAXIMUM, 0}, {NO_MAXIMUM, 0}};
        const PartialFragment<C> *values = partial_of<C>(p, 2 * first_cta) + e;
        const float4 *sums = p.partial_sums + 2 * first_cta * 8 + at.stats;
#pragma unroll 1
        for (int k = 0; k < n; k += PARTIALS) {
            all.add<C>(values, sums, k, n, first_slot);
            values += 2 * PARTIALS * partial_stride<C>();
            sums += 2 * PARTIALS * 8;
        }
        if (C::FULL == 0) all.row1 = all.row0;
        const float n0 = row_factor<C>(p, to, at.row0, all.row0.max, all.row0.sum);
        const float n1 = row_factor<C>(p, to, at.row1, all.row1.max, all.row1.sum);
        const float4 sum = all.sum;
        if (active) put_fragment<C>(p, rows, to, at, make_float4(sum.x * n0, sum.y * n1, sum.z * n0, sum.w * n1), mean);
    }
    if (!p.v_rotation_t) return;
    __syncthreads();
    turn_back<C>(p, rows, to);
}

/* The whole segment was this CTA's: normalise and write. */
template <class C> DEVICE void finish_alone(const DecodeParams &p, uint8_t *area, const Target &to) {
    using M = Merge<C>;
    constexpr int ROUNDS = (M::FRAGMENTS + C::THREADS - 1) / C::THREADS;
    float4 value[ROUNDS];
#pragma unroll
    for (int k = 0; k < ROUNDS; k++) {
        const int e = min(thread_index() + k * C::THREADS, M::FRAGMENTS - 1);
        const Fragment<C> at(e);
        RowTotal total0, total1;
        const float4 v = sum_warps<C>(area, e, total0, total1);
        const float n0 = row_factor<C>(p, to, at.row0, total0.max, total0.sum);
        const float n1 = row_factor<C>(p, to, at.row1, total1.max, total1.sum);
        value[k] = make_float4(v.x * n0, v.y * n1, v.z * n0, v.w * n1);
    }
    __syncthreads(); /* the warps' sums are done with */
    float *rows = reinterpret_cast<float *>(area);
#pragma unroll
    for (int k = 0; k < ROUNDS; k++) {
        const int e = thread_index() + k * C::THREADS;
        const Fragment<C> at(min(e, M::FRAGMENTS - 1));
        if (e < M::FRAGMENTS) put_fragment<C>(p, rows, to, at, value[k], fragment_means<C>(p, to, at.d));
    }
    if (!p.v_rotation_t) return;
    __syncthreads();
    turn_back<C>(p, rows, to);
}

/* This CTA's part of a shared segment to the workspace; slot 0 of a CTA is a segment that began
 * before it or with it. Returns true in the CTA that arrives last. */
template <class C>
DEVICE bool leave_partial(const DecodeParams &p, uint8_t *area, int slot, int segment, int n,
                          int *last_flag) {
    using M = Merge<C>;
    const size_t s = 2 * blockIdx.x + slot;
#pragma unroll 1
    for (int e = thread_index(); e < M::FRAGMENTS; e += C::THREADS) {
        RowTotal total0, total1;
        store_fragment(partial_of<C>(p, s) + e, sum_warps<C>(area, e, total0, total1));
        const Fragment<C> at(e);
        if (at.d == 0) __stcg(p.partial_sums + s * 8 + at.stats, make_float4(total0.max, total0.sum, total1.max, total1.sum));
    }
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
