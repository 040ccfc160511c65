/*
 * decode_merge.cuh - from the accumulators of a CTA's warps to output rows.
 *
 * Warps are summed in order through shared memory. A segment that one CTA did alone is finished
 * there; otherwise every CTA leaves its partial in the workspace, in fragment order, and the last to
 * arrive sums them in the order of the CTAs. Nothing depends on who arrives when.
 */
#ifndef OSCAR_CUDA_DECODE_MERGE_CUH
#define OSCAR_CUDA_DECODE_MERGE_CUH

#include "decode_rows.cuh"

template <class C> struct Merge {
    static constexpr int FRAGMENTS = C::TILES * C::STEPS * 32; /* of 4 floats */
    static constexpr int SLOT_FLOATS = FRAGMENTS * 4;
    static constexpr int STATS = 2 + C::G; /* maximum (log2), sum, offset sums */
    static constexpr int WARP_BYTES = FRAGMENTS * 16;
    static constexpr int BYTES = C::WARPS * (WARP_BYTES + 16 * STATS * 4 + 64) + 16 * STATS * 4;
    static constexpr int FINISH_BYTES = 16 * C::D * 4; /* output rows; weights follow */
};

template <class C> __host__ __device__ constexpr int finish_bytes(int n_ctas) {
    return Merge<C>::FINISH_BYTES + n_ctas * 16 * 4;
}

/* A row of this CTA: log2 maximum, sum, offset sums. */
template <class C> struct RowTotal {
    float max, sum, offset[C::G];
};

/* The tables behind the fragments: statistics of warps, their factors, totals of rows. */
template <class C> struct MergeTables {
    float *stats;        /* [WARPS, 16, STATS] */
    float *factors;      /* [WARPS, 16] */
    RowTotal<C> *totals; /* [16] */
};
template <class C> DEVICE MergeTables<C> merge_tables(uint8_t *area) {
    using M = Merge<C>;
    MergeTables<C> t;
    t.stats = reinterpret_cast<float *>(area + C::WARPS * M::WARP_BYTES);
    t.factors = t.stats + C::WARPS * 16 * M::STATS;
    t.totals = reinterpret_cast<RowTotal<C> *>(t.factors + C::WARPS * 16);
    return t;
}

/* Factors that bring the warps of a row to one maximum: a warp a row. */
template <class C> DEVICE void weigh_warps(const MergeTables<C> &table, int warp, int lane) {
    using M = Merge<C>;
#pragma unroll 1
    for (int row = warp; row < C::ROWS; row += C::WARPS) {
        const float *a = table.stats + (min(lane, C::WARPS - 1) * 16 + row) * M::STATS;
        float max = a[0];
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, d));
        const float factor = lane < C::WARPS ? exp2_fast(a[0] - max) : 0.0f;
        if (lane < C::WARPS) table.factors[lane * 16 + row] = factor;
        float v[1 + C::G];
#pragma unroll
        for (int k = 0; k < 1 + C::G; k++) {
            v[k] = factor * a[1 + k];
#pragma unroll
            for (int d = 1; d < 32; d <<= 1) v[k] += __shfl_xor_sync(FULL_WARP, v[k], d);
        }
        if (lane == 0) {
            table.totals[row].max = max;
            table.totals[row].sum = v[0];
#pragma unroll
            for (int k = 0; k < C::G; k++) table.totals[row].offset[k] = v[1 + k];
        }
    }
}

/* Sum over the warps of fragment e. */
template <class C> DEVICE float4 sum_warps(const MergeTables<C> &table, const uint8_t *area, int e) {
    using M = Merge<C>;
    const float4 *fragments = reinterpret_cast<const float4 *>(area) + e;
    const int j = e / (C::STEPS * 32), step = (e >> 5) % C::STEPS, t = e & 3;
    const bool full = j < C::FULL;
    const int row0 = 8 * j + t, row1 = full ? row0 + 4 : row0;
    const int group = (step >> 2) / C::WORDS_A_GROUP;
    const float unit = static_cast<float>(1 << (24 - 2 * (step & 3)));
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < C::WARPS; w++) {
        const float f0 = table.factors[w * 16 + row0], f1 = table.factors[w * 16 + row1];
        const float4 v = fragments[w * M::FRAGMENTS];
        sum.x = fmaf(f0, v.x, sum.x);
        sum.y = fmaf(f1, v.y, sum.y);
        sum.z = fmaf(f0, v.z, sum.z);
        sum.w = fmaf(f1, v.w, sum.w);
    }
    if (!full) { /* both columns are the same row */
        sum.x += sum.y;
        sum.z += sum.w;
    }
    const float m0 = table.totals[row0].offset[group], m1 = table.totals[row1].offset[group];
    return make_float4(fmaf(sum.x, unit, m0), fmaf(sum.y, unit, m1), fmaf(sum.z, unit, m0), fmaf(sum.w, unit, m1));
}

template <class C> DEVICE void store_warp(Rows<C> &r, uint8_t *area, int warp, int lane) {
    using M = Merge<C>;
    float4 *fragments = reinterpret_cast<float4 *>(area) + warp * M::FRAGMENTS;
    float *stats = reinterpret_cast<float *>(area + C::WARPS * M::WARP_BYTES) + warp * 16 * M::STATS;
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

/* Rows in shared memory [n_rows, D], normalised, to the output: mean, turning back, conversion. */
template <class C>
DEVICE void write_rows(const DecodeParams &p, const float *rows, const Target &to, float own_mean) {
    const int n_q_heads = p.n_kv_heads * p.gqa;
    const float *mean = p.v_mean_rotated ? p.v_mean_rotated + to.head * C::D : nullptr;
    const float *back = p.v_rotation_t ? p.v_rotation_t + static_cast<size_t>(to.head) * C::D * C::D
                                       : nullptr;
#pragma unroll 1
    for (int e = thread_index(); e < to.n_rows * C::D; e += C::THREADS) {
        const int row = e / C::D, d = e % C::D, r = to.first_row + row;
        float x = 0;
        if (back) {
#pragma unroll 16
            for (int i = 0; i < C::D; i++)
                x = fmaf(rows[row * C::D + i] + (mean ? mean[i] : 0.0f), __ldg(back + i * C::D + d), x);
        } else {
            x = rows[e] + (C::THREADS % C::D == 0 || !mean ? own_mean : mean[d]);
        }
        const int token = divide(r, p.gqa, p.gqa_magic), head = to.head * p.gqa + r - token * p.gqa;
        const size_t at =
            (static_cast<size_t>(to.seq * p.n_q_tokens + token) * n_q_heads + head) * C::D + d;
        if (p.out_dtype == OSCAR_DTYPE_F32)
            static_cast<float *>(p.out)[at] = x;
        else
            static_cast<uint16_t *>(p.out)[at] = p.out_dtype == OSCAR_DTYPE_BF16
                                                     ? __bfloat16_as_ushort(__float2bfloat16_rn(x))
                                                     : __half_as_ushort(__float2half_rn(x));
    }
}

template <class C> DEVICE void put_fragment(float *rows, int e, const float4 &v, int n_rows) {
    const int j = e / (C::STEPS * 32), step = (e >> 5) % C::STEPS, t = e & 3, g = (e & 31) >> 2;
    const int row = 8 * j + t, d = 16 * step + g;
    if (row < n_rows) {
        rows[row * C::D + d] = v.x;
        rows[row * C::D + d + 8] = v.z;
    }
    if (j < C::FULL && row + 4 < n_rows) {
        rows[(row + 4) * C::D + d] = v.y;
        rows[(row + 4) * C::D + d + 8] = v.w;
    }
}

/* Sums n partials: the first in slot first_slot, the others in slots 2 (first_cta + k). */
template <class C>
DEVICE void finish_partials(const DecodeParams &p, uint8_t *area, Target to, float own_mean,
                                             int first_slot, int first_cta, int n) {
    using M = Merge<C>;
    float *rows = reinterpret_cast<float *>(area);
    float *weights = rows + 16 * C::D; /* [n, 16] */
    const int warp = thread_index() >> 5, lane = thread_index() & 31;
    constexpr int BATCH = 16;
#pragma unroll 1
    for (int e0 = 0; e0 < M::FRAGMENTS; e0 += C::THREADS) {
        /* All threads load: a register that only some define would be taken for the whole kernel. */
        const bool active = e0 + thread_index() < M::FRAGMENTS;
        const int e = min(e0 + thread_index(), M::FRAGMENTS - 1);
        float4 sum = make_float4(0, 0, 0, 0);
        const int j = e / (C::STEPS * 32), row0 = 8 * j + (e & 3);
        const int row1 = j < C::FULL ? row0 + 4 : row0;
#pragma unroll 1
        for (int first = 0; first < n; first += BATCH) {
            float4 v[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const int c = min(first + k, n - 1);
                const size_t slot = c == 0 ? first_slot : 2 * (first_cta + c);
                v[k] = __ldcg(reinterpret_cast<const float4 *>(p.partials + slot * M::SLOT_FLOATS) + e);
            }
            if (e0 == 0 && first == 0) {
#pragma unroll 1
                for (int row = warp; row < to.n_rows; row += C::WARPS) {
                    /* The first 32 are read once: each read is a trip through a busy cache. */
                    auto stats_of = [&](int c) {
                        const size_t slot = c == 0 ? first_slot : 2 * (first_cta + c);
                        return __ldcg(p.partial_sums + slot * 16 + row);
                    };
                    const float2 own = lane < n ? stats_of(lane) : make_float2(NO_MAXIMUM, 0.0f);
                    float max = own.x;
#pragma unroll 1
                    for (int c = lane + 32; c < n; c += 32) max = fmaxf(max, stats_of(c).x);
#pragma unroll
                    for (int d = 1; d < 32; d <<= 1)
                        max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, d));
                    float sum_all = 0;
#pragma unroll 1
                    for (int c = lane; c < n; c += 32) {
                        const float2 x = c == lane ? own : stats_of(c);
                        const float f = exp2_fast(x.x - max);
                        weights[c * 16 + row] = f;
                        sum_all = fmaf(f, x.y, sum_all);
                    }
#pragma unroll
                    for (int d = 1; d < 32; d <<= 1)
                        sum_all += __shfl_xor_sync(FULL_WARP, sum_all, d);
                    const float norm = normaliser(max, sum_all, p.sink_logits,
                                                  query_head(p, to, row));
                    __syncwarp();
#pragma unroll 1
                    for (int c = lane; c < n; c += 32) weights[c * 16 + row] *= norm;
                }
                __syncthreads();
            }
#pragma unroll
            for (int k = 0; k < BATCH; k++)
                if (first + k < n) {
                    const float f0 = row0 < to.n_rows ? weights[(first + k) * 16 + row0] : 0.0f;
                    const float f1 = row1 < to.n_rows ? weights[(first + k) * 16 + row1] : 0.0f;
                    sum.x = fmaf(f0, v[k].x, sum.x);
                    sum.y = fmaf(f1, v[k].y, sum.y);
                    sum.z = fmaf(f0, v[k].z, sum.z);
                    sum.w = fmaf(f1, v[k].w, sum.w);
                }
        }
        if (active) put_fragment<C>(rows, e, sum, to.n_rows);
    }
    __syncthreads();
    write_rows<C>(p, rows, to, own_mean);
}

/* The whole segment was this CTA's: normalise and write. */
template <class C>
DEVICE void finish_alone(const DecodeParams &p, uint8_t *area, Target to, float own_mean) {
    using M = Merge<C>;
    const MergeTables<C> table = merge_tables<C>(area);
    constexpr int ROUNDS = (M::FRAGMENTS + C::THREADS - 1) / C::THREADS;
    float4 value[ROUNDS];
#pragma unroll
    for (int k = 0; k < ROUNDS; k++) {
        const int e = min(thread_index() + k * C::THREADS, M::FRAGMENTS - 1);
        const float4 v = sum_warps<C>(table, area, e);
        const int j = e / (C::STEPS * 32), row0 = 8 * j + (e & 3), row1 = j < C::FULL ? row0 + 4 : row0;
        const float n0 = row0 < to.n_rows ? normaliser(table.totals[row0].max, table.totals[row0].sum, p.sink_logits,
                                                       query_head(p, to, row0))
                                          : 0.0f;
        const float n1 = row1 < to.n_rows ? normaliser(table.totals[row1].max, table.totals[row1].sum, p.sink_logits,
                                                       query_head(p, to, row1))
                                          : 0.0f;
        value[k] = make_float4(v.x * n0, v.y * n1, v.z * n0, v.w * n1);
    }
    __syncthreads();
    float *rows = reinterpret_cast<float *>(area);
#pragma unroll
    for (int k = 0; k < ROUNDS; k++) {
        const int e = thread_index() + k * C::THREADS;
        if (e < M::FRAGMENTS) put_fragment<C>(rows, e, value[k], to.n_rows);
    }
    __syncthreads();
    write_rows<C>(p, rows, to, own_mean);
}

/* This CTA's part of a shared segment to the workspace; slot 0 of a CTA is a segment that began
 * before it or with it. Returns true in the CTA that arrives last. */
template <class C>
DEVICE bool leave_partial(const DecodeParams &p, uint8_t *area, int slot, int segment, int n,
                          int *last_flag) {
    using M = Merge<C>;
    const MergeTables<C> table = merge_tables<C>(area);
    const size_t s = 2 * blockIdx.x + slot;
#pragma unroll 1
    for (int e = thread_index(); e < M::FRAGMENTS; e += C::THREADS)
        __stcg(reinterpret_cast<float4 *>(p.partials + s * M::SLOT_FLOATS) + e, sum_warps<C>(table, area, e));
    if (thread_index() < C::ROWS)
        __stcg(p.partial_sums + s * 16 + thread_index(),
               make_float2(table.totals[thread_index()].max, table.totals[thread_index()].sum));
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
