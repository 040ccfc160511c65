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
    static constexpr int STATS = 2 + C::G; /* maximum (log2), sum, offset sums */
    static constexpr int WARP_BYTES = FRAGMENTS * 16;
    static constexpr int WARPS_BYTES = C::WARPS * (WARP_BYTES + 16 * STATS * 4);
    static constexpr int ROWS_BYTES = 16 * C::D * 4; /* output rows */
    static constexpr int BYTES = WARPS_BYTES > ROWS_BYTES ? WARPS_BYTES : ROWS_BYTES;
};

/* A row of this CTA: log2 maximum, sum, offset sum of one group. */
struct RowTotal {
    float max, sum, offset;
};

/* Statistics of warps behind their fragments: [WARPS, 16, STATS]. */
template <class C> DEVICE float *warp_stats(uint8_t *area) {
    return reinterpret_cast<float *>(area + C::WARPS * Merge<C>::WARP_BYTES);
}

/* Total of a row over the warps, and the factors that bring them to one maximum. */
template <class C> DEVICE RowTotal weigh_warps(uint8_t *area, int row, int group, float (&factor)[C::WARPS]) {
    using M = Merge<C>;
    const float *stats = warp_stats<C>(area) + row * M::STATS;
    RowTotal total = {NO_MAXIMUM, 0, 0};
#pragma unroll
    for (int w = 0; w < C::WARPS; w++) {
        factor[w] = stats[w * 16 * M::STATS];
        total.max = fmaxf(total.max, factor[w]);
    }
#pragma unroll
    for (int w = 0; w < C::WARPS; w++) {
        factor[w] = exp2_fast(factor[w] - total.max);
        total.sum = fmaf(factor[w], stats[w * 16 * M::STATS + 1], total.sum);
        total.offset = fmaf(factor[w], stats[w * 16 * M::STATS + 2 + group], total.offset);
    }
    return total;
}

/* Rows and channel of fragment e: x and z are of row0, y and w of row1 (the same in a half tile); x and y are of channel
 * d, z and w of d + 8. */
template <class C> struct Fragment {
    int row0, row1, step, d;
    bool full;
    DEVICE explicit Fragment(int e) {
        const int j = e / (C::STEPS * 32);
        step = (e >> 5) % C::STEPS;
        full = j < C::FULL;
        row0 = 8 * j + (e & 3);
        row1 = full ? row0 + 4 : row0;
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

template <class C> DEVICE void store_warp(Rows<C> &r, uint8_t *area, int warp, int lane) {
    using M = Merge<C>;
    float4 *fragments = reinterpret_cast<float4 *>(area) + warp * M::FRAGMENTS;
    float *stats = warp_stats<C>(area) + warp * 16 * M::STATS;
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) {
            r.row_sum[i] += __shfl_xor_sync(FULL_WARP, r.row_sum[i], d);
#pragma unroll
            for (int k = 0; k < C::G; k++)
                r.offset_sum[i][k] += __shfl_xor_sync(FULL_WARP, r.offset_sum[i][k], d);
        }
        if (lane < 4) {
            float *a = stats + (4 * i + lane) * M::STATS;
            a[0] = r.row_sum[i] > 0 ? r.row_max[i] * r.scale[i] : NO_MAXIMUM;
            a[1] = r.row_sum[i];
#pragma unroll
            for (int k = 0; k < C::G; k++) a[2 + k] = r.offset_sum[i][k];
        }
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

    /* Takes in the maxima and sums of N partials, of which n count. Returns what the sums so far are to be multiplied by;
     * weight: what the new ones are. */
    template <int N> DEVICE float take(const float2 (&stats)[N], int n, float (&weight)[N]) {
        float top = max;
#pragma unroll
        for (int k = 0; k < N; k++) top = fmaxf(top, stats[k].x);
        const float factor = exp2_fast(max - top);
        max = top;
        sum *= factor;
#pragma unroll
        for (int k = 0; k < N; k++) {
            weight[k] = k < n ? exp2_fast(stats[k].x - top) : 0.0f;
            sum = fmaf(weight[k], stats[k].y, sum);
        }
        return factor;
    }
};

/* Sums n partials: the first in slot first_slot, the others in slots 2 (first_cta + k). Every thread weighs the rows of
 * its own fragment: that is sooner done than said to the others. */
template <class C>
DEVICE void finish_partials(const DecodeParams &p, uint8_t *area, const Target &to, int first_slot, int first_cta, int n) {
    using M = Merge<C>;
    float *rows = reinterpret_cast<float *>(area);
    constexpr int BATCH = 16;
#pragma unroll 1
    for (int e0 = 0; e0 < M::FRAGMENTS; e0 += C::THREADS) {
        /* All threads load: a register that only some define would be taken for the whole kernel. */
        const bool active = e0 + thread_index() < M::FRAGMENTS;
        const int e = min(e0 + thread_index(), M::FRAGMENTS - 1);
        const Fragment<C> at(e);
        const float2 mean = fragment_means<C>(p, to, at.d);
        float4 sum = make_float4(0, 0, 0, 0);
        RunningRow row0 = {NO_MAXIMUM, 0}, row1 = row0;
#pragma unroll 1
        for (int first = 0; first < n; first += BATCH) {
            float4 v[BATCH];
            float2 stats0[BATCH], stats1[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const int c = min(first + k, n - 1);
                const size_t slot = c == 0 ? first_slot : 2 * (first_cta + c);
                v[k] = __ldcg(reinterpret_cast<const float4 *>(p.partials + slot * M::SLOT_FLOATS) + e);
                stats0[k] = __ldcg(p.partial_sums + slot * 16 + at.row0);
                if (C::FULL > 0) stats1[k] = __ldcg(p.partial_sums + slot * 16 + at.row1);
            }
            float w0[BATCH], w1[BATCH];
            const float f0 = row0.take(stats0, n - first, w0), f1 = C::FULL > 0 ? row1.take(stats1, n - first, w1) : f0;
            sum = make_float4(sum.x * f0, sum.y * f1, sum.z * f0, sum.w * f1);
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const float weight1 = C::FULL > 0 ? w1[k] : w0[k];
                sum.x = fmaf(w0[k], v[k].x, sum.x);
                sum.y = fmaf(weight1, v[k].y, sum.y);
                sum.z = fmaf(w0[k], v[k].z, sum.z);
                sum.w = fmaf(weight1, v[k].w, sum.w);
            }
        }
        if (C::FULL == 0) row1 = row0;
        const float n0 = row_factor<C>(p, to, at.row0, row0.max, row0.sum), n1 = row_factor<C>(p, to, at.row1, row1.max, row1.sum);
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
        __stcg(reinterpret_cast<float4 *>(p.partials + s * M::SLOT_FLOATS) + e, sum_warps<C>(area, e, total0, total1));
        const Fragment<C> at(e);
        if (at.d == 0) {
            __stcg(p.partial_sums + s * 16 + at.row0, make_float2(total0.max, total0.sum));
            if (at.full) __stcg(p.partial_sums + s * 16 + at.row1, make_float2(total1.max, total1.sum));
        }
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
