/*
 * decode.cuh - the decode kernel: one CTA a multiprocessor, every warp with a ring of its own.
 *
 * A launch of a short context is latency: lengths, then page ids, then the first tiles. What does not depend on
 * the kernel before is loaded while that ends (programmatic dependent launch).
 */
#ifndef OSCAR_CUDA_DECODE_CUH
#define OSCAR_CUDA_DECODE_CUH

#include "decode_merge.cuh"

/* First element of a row's query, or NULL when the row does not exist. */
template <class C> DEVICE const uint16_t *query_row(const DecodeParams &p, const Target &to, int row) {
    if (row >= to.n_rows) return nullptr;
    const int r = to.first_row + row, token = divide(r, p.gqa, p.gqa_magic);
    const int head = to.head * p.gqa + r - token * p.gqa;
    return p.q + (static_cast<size_t>(to.seq * p.n_q_tokens + token) * (p.n_kv_heads * p.gqa) + head) * C::D;
}

/* Query fragments of 8 rows, straight from memory: lane (g, t) takes 8 channels of every 32. */
template <class C> struct RawQuery {
    uint4 x[C::D / 32];
};

template <class C>
DEVICE void load_query(const DecodeParams &p, const Target &to, int tile, int lane, RawQuery<C> &raw) {
    const uint16_t *row = query_row<C>(p, to, 8 * tile + (lane >> 2));
#pragma unroll
    for (int m = 0; m < C::D / 32; m++)
        raw.x[m] = row ? load_uint4(row + 32 * m + 8 * (lane & 3)) : make_uint4(0, 0, 0, 0);
}

/* Queries as fp16, each row scaled by a power of two that leaves room for the rotation. */
template <class C>
DEVICE void scale_query(const DecodeParams &p, RawQuery<C> &raw, float &scale) {
    float top = 1e-20f;
    uint32_t *w = reinterpret_cast<uint32_t *>(raw.x);
#pragma unroll
    for (int k = 0; k < C::D / 8; k++)
        top = fmaxf(top, fmaxf(fabsf(q_value<C>(p, w[k], 0)), fabsf(q_value<C>(p, w[k], 1))));
    top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
    top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
    const int exponent = (__float_as_int(top) >> 23) - 127;
    scale = __int_as_float((9 - exponent + 127) << 23);
#pragma unroll
    for (int k = 0; k < C::D / 8; k++)
        w[k] = pack_half2(q_value<C>(p, w[k], 0) * scale, q_value<C>(p, w[k], 1) * scale);
}

/* 16 bytes of a constant to shared memory, asynchronously. */
DEVICE void fetch_constant(void *to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

template <class C> DEVICE void fetch_table(const SegmentData<C> &s, const uint4 *tables, int head, int size) {
    const uint4 *table = tables + static_cast<size_t>(head) * size;
    for (int i = thread_index(); i < size; i += C::THREADS) fetch_constant(s.bias_table + i, table + i);
}

/* Starts the copies of what the key bias of a head is made of; cp.async.wait_all ends them. */
template <class C, int MODE>
DEVICE void fetch_bias(const DecodeParams &p, const SegmentData<C> &s, int head) {
    const int steps = p.bias_steps, size = steps * C::BIAS_BLOCKS * 64, tid = thread_index();
    if constexpr (C::FEW) {
        fetch_table<C>(s, p.bias_few, head, FEW_LINES);
        if (tid < 4) fetch_constant(s.run_half + 4 * tid, p.bias_half + head * 16 + 4 * tid);
    } else if constexpr (C::RUNS) {
        if (p.bias_long_runs) fetch_table<C>(s, p.bias_runs, head, run_lines(steps, false));
        else fetch_table<C>(s, p.bias_short_runs, head, run_lines(steps, true));
        if (tid < steps * 2) fetch_constant(s.run_half + 4 * tid, p.bias_half + head * steps * 8 + 4 * tid);
    } else {
        fetch_table<C>(s, C::MIRRORED || MODE == MODE_BIAS_16 ? p.bias_waves : p.bias_table, head, size);
    }
    if (tid == 0)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(s.bias_unit)), "l"(p.bias_units + head)
                     : "memory");
    if (tid < steps * 4) {
        fetch_constant(s.bias_turn + 2 * tid, p.bias_turn + head * steps * 8 + 2 * tid);
        if (C::MIRRORED || (!C::RUNS && Beginnings<C, MODE>::STEPS > 0))
            fetch_constant(s.bias_stride + tid, p.bias_strides + (C::BIAS_STRIDE * p.n_kv_heads + head) * steps * 4 + tid);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* conj(q) nu of item i: two pairs of the column of a lane, without the row's scale. */
template <class C> struct BiasItem {
    int4 dims; /* of the two pairs */
    float4 nu;
    uint32_t q[4];
    float unit; /* C::FEW: the head's */

    DEVICE void load_constants(const DecodeParams &p, int head, int i) {
        const int pairs = (head * p.bias_steps + i / (C::TILES * 32)) * 4 + (i & 3);
        dims = __ldg(reinterpret_cast<const int4 *>(p.bias_dims) + pairs);
        nu = __ldg(p.bias_nu + pairs);
        if (C::FEW) unit = __ldg(p.bias_units + head);
    }
    DEVICE void load_query(const DecodeParams &p, const Target &to, int i) {
        const uint16_t *row = query_row<C>(p, to, column_row<C>(i / 32 % C::TILES, (i & 31) >> 2));
        q[0] = row ? load_u16(row + dims.x) : 0u;
        q[1] = row ? load_u16(row + dims.y) : 0u;
        q[2] = row ? load_u16(row + dims.z) : 0u;
        q[3] = row ? load_u16(row + dims.w) : 0u;
    }
    /* |z| of the two pairs, over the head's unit. */
    DEVICE float size(const DecodeParams &p) const {
        const float a0 = q_value<C>(p, q[0], 0), a1 = q_value<C>(p, q[1], 0);
        const float b0 = q_value<C>(p, q[2], 0), b1 = q_value<C>(p, q[3], 0);
        return sqrt_fast((a0 * a0 + a1 * a1) * (nu.x * nu.x + nu.y * nu.y)) +
               sqrt_fast((b0 * b0 + b1 * b1) * (nu.z * nu.z + nu.w * nu.w));
    }
    /* C::FEW: sums of |z| of a row over the 8 pairs of a step, in log2, by four lanes. */
    DEVICE void put_sums(const DecodeParams &p, const SegmentData<C> &s, int i) const {
        const int tile = i / 32 % C::TILES, column = (i & 31) >> 2;
        float sum = size(p) * unit * fabsf(p.scale_log2);
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        if ((i & 3) == 0 && (tile < C::FULL || !(column & 1)))
            s.bias_sums[i / (C::TILES * 32) * 16 + column_row<C>(tile, column)] =
                static_cast<int>(fminf(sum, SMALL_BIAS) * SUM_UNIT) + 1;
    }
    DEVICE void put(const DecodeParams &p, const SegmentData<C> &s, int i) const {
        const int tile = i / 32 % C::TILES, column = (i & 31) >> 2, row = column_row<C>(tile, column);
        float up = C::RUNS ? s.query_scale[row] * (s.query_unit[row] * run_unit<C>()) : s.query_scale[row];
        if (C::FEW) up *= few_excess(*s.bias_unit);
        const float a0 = q_value<C>(p, q[0], 0), a1 = q_value<C>(p, q[1], 0);
        const float b0 = q_value<C>(p, q[2], 0), b1 = q_value<C>(p, q[3], 0);
        const float4 z = make_float4((a0 * nu.x + a1 * nu.y) * up, (a1 * nu.x - a0 * nu.y) * up,
                                     (b0 * nu.z + b1 * nu.w) * up, (b1 * nu.z - b0 * nu.w) * up);
        s.bias_query[i] = z;
        const int step = i / (C::TILES * 32) - 2;
        if (C::RUNS && !C::FEW && step >= 0)
            reinterpret_cast<uint2 *>(s.run_query)[2 * ((step / 2 * C::TILES + tile) * 32 + (i & 31)) + (step & 1)] =
                make_uint2(pack_half2(z.x, z.y), pack_half2(z.z, z.w));
        if (C::FEW || (tile >= C::FULL && (column & 1))) return; /* the same row again */
        const float sum = size(p) * *s.bias_unit * fabsf(p.scale_log2);
        atomicAdd(s.bias_sums + row, sum < SMALL_BIAS ? static_cast<int>(sum * SUM_UNIT) + 1 : SMALL_BIAS * SUM_UNIT);
    }
};

/* q . mean, a row or two a warp, from the last warp on: those have no rotation to do. Loaded first, added up when
 * there is time. */
template <class C> struct QueryMean {
    static constexpr int ROUNDS = (C::ROWS + C::WARPS - 1) / C::WARPS;
    uint32_t q[ROUNDS][C::D / 32];
    int mean[C::D / 32];

    DEVICE void load_constants(const DecodeParams &p, int head, int lane) {
#pragma unroll
        for (int i = 0; i < C::D / 32; i++)
            mean[i] = p.k_mean ? load_int(reinterpret_cast<const int *>(p.k_mean) + head * C::D + 32 * i + lane) : 0;
    }
    DEVICE static int row_of(int round, int warp) { return (round + 1) * C::WARPS - 1 - warp; }
    DEVICE void load_query(const DecodeParams &p, const Target &to, int warp, int lane) {
#pragma unroll
        for (int k = 0; k < ROUNDS; k++) {
            const uint16_t *from = row_of(k, warp) < C::ROWS ? query_row<C>(p, to, row_of(k, warp)) : nullptr;
#pragma unroll
            for (int i = 0; i < C::D / 32; i++) q[k][i] = from ? load_u16(from + 32 * i + lane) : 0u;
        }
    }
    DEVICE void put(const DecodeParams &p, const SegmentData<C> &s, int warp, int lane) const {
#pragma unroll
        for (int k = 0; k < ROUNDS; k++) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < C::D / 32; i++) sum = fmaf(q_value<C>(p, q[k][i], 0), __int_as_float(mean[i]), sum);
#pragma unroll
            for (int d = 1; d < 32; d <<= 1) sum += __shfl_xor_sync(FULL_WARP, sum, d);
            if (lane == 0 && row_of(k, warp) < C::ROWS) s.query_mean[row_of(k, warp)] = sum;
        }
    }
};

template <int MODE> DEVICE bool has_bias(const DecodeParams &p) {
    return MODE == MODE_BIAS_16 || MODE == MODE_BIAS || (MODE == MODE_BIAS_CAP && p.bias_steps > 0);
}

/* What a segment begins with, on its way from memory: constants of the head, then the queries. Small loads wait
 * long behind tiles, so all of these are under way before the first tile is asked for. Every thread loads, those
 * that have nothing to do too: a register that only some define would be taken for the whole kernel. */
template <class C, int MODE> struct Opening {
    static constexpr int ROW_TILES = (C::ROWS + 7) / 8, CHUNK = C::STEPS < 8 ? C::STEPS : 8;
    uint4 high[CHUNK], low[CHUNK]; /* of the rotation: the warp's first 16 channels out, 16 CHUNK channels in */
    RawQuery<C> raw[ROW_TILES];
    QueryMean<C> mean;
    BiasItem<C> item[C::TILES]; /* of C::THREADS each */

    DEVICE void load_rotation(const DecodeParams &p, int head, int m, int first, int lane) {
        const uint4 *u = p.k_rotation + ((static_cast<size_t>(head) * C::STEPS + m) * C::STEPS + first) * 64 + lane;
#pragma unroll
        for (int k = 0; k < CHUNK; k++) {
            high[k] = load_kept(u + k * 64);
            low[k] = load_kept(u + k * 64 + 32);
        }
    }
    DEVICE static int own_item() { return C::THREADS - 1 - thread_index(); } /* the last warps have least to do */
    DEVICE static int own_item_below(const DecodeParams &p, int k) {
        return min(own_item() + k * C::THREADS, p.bias_steps * C::TILES * 32 - 1);
    }

    DEVICE void load_constants(const DecodeParams &p, int head, int warp, int lane) {
        if (has_bias<MODE>(p))
#pragma unroll
            for (int k = 0; k < C::TILES; k++) item[k].load_constants(p, head, own_item_below(p, k));
        load_rotation(p, head, min(warp, C::STEPS - 1), 0, lane);
        mean.load_constants(p, head, lane);
    }
    /* And the copies of tables, which keep a warp for half a microsecond: what is small and waited for goes first. */
    DEVICE void load_queries(const DecodeParams &p, uint8_t *area, const Target &to, int warp, int lane) {
#pragma unroll
        for (int j = 0; j < ROW_TILES; j++) load_query<C>(p, to, j, lane, raw[j]);
        mean.load_query(p, to, warp, lane);
        if (has_bias<MODE>(p)) {
#pragma unroll
            for (int k = 0; k < C::TILES; k++) item[k].load_query(p, to, own_item_below(p, k));
            fetch_bias<C, MODE>(p, segment_data<C>(area, p.bias_steps), to.head);
        }
    }
};

/* Rotates the segment's queries into shared memory and gathers what the bias needs. loaded: what is done once the small
 * loads have come. */
template <class C, int MODE, class Loaded>
DEVICE void prepare_segment(const DecodeParams &p, uint8_t *area, const Target &to, Opening<C, MODE> &o, int warp, int lane,
                            const Loaded &loaded) {
    constexpr int ROW_TILES = Opening<C, MODE>::ROW_TILES, CHUNK = Opening<C, MODE>::CHUNK;
    constexpr int TURNS = (C::STEPS + C::WARPS - 1) / C::WARPS;
    const int g = lane >> 2, t = lane & 3;
    const SegmentData<C> s = segment_data<C>(area, MODE == MODE_PLAIN ? 0 : p.bias_steps);
    float scale[ROW_TILES];
#pragma unroll
    for (int j = 0; j < ROW_TILES; j++) scale_query<C>(p, o.raw[j], scale[j]);
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int m = warp + turn * C::WARPS;
        if (m >= C::STEPS) continue;
        float c[ROW_TILES][4], d[ROW_TILES][4]; /* of high and low halves: two chains */
#pragma unroll
        for (int j = 0; j < ROW_TILES; j++)
            c[j][0] = c[j][1] = c[j][2] = c[j][3] = d[j][0] = d[j][1] = d[j][2] = d[j][3] = 0;
#pragma unroll
        for (int first = 0; first < C::STEPS; first += CHUNK) {
            if (turn > 0 || first > 0) o.load_rotation(p, to.head, m, first, lane);
#pragma unroll
            for (int k = 0; k < CHUNK; k++)
#pragma unroll
                for (int j = 0; j < ROW_TILES; j++) {
                    const uint4 x = o.raw[j].x[(first + k) / 2];
                    const uint32_t b0 = k & 1 ? x.z : x.x, b1 = k & 1 ? x.w : x.y;
                    mma_f16(c[j], o.high[k].x, o.high[k].y, o.high[k].z, o.high[k].w, b0, b1);
                    mma_f16(d[j], o.low[k].x, o.low[k].y, o.low[k].z, o.low[k].w, b0, b1);
                }
        }
#pragma unroll
        for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
            for (int k = 0; k < 4; k++) c[j][k] += d[j][k];
#pragma unroll
        for (int j = 0; j < ROW_TILES; j++) {
            const int row = 8 * j + 2 * t;
            float *q = s.query + row * C::QUERY_STRIDE + 16 * m + g;
            if (row < C::ROWS) { /* rows are a multiple of four */
                q[0] = c[j][0];
                q[8] = c[j][2];
                q[C::QUERY_STRIDE] = c[j][1];
                q[C::QUERY_STRIDE + 8] = c[j][3];
                if (!C::BYTES) {
                    put_query<C>(s.fragments, m, g, row, c[j][0], c[j][2]);
                    put_query<C>(s.fragments, m, g, row + 1, c[j][1], c[j][3]);
                }
            }
            if (turn == 0 && m == 0 && t == 0 && 8 * j + g < C::ROWS) s.query_scale[8 * j + g] = scale[j];
        }
    }
    loaded();
    o.mean.put(p, s, warp, lane);
    if (has_bias<MODE>(p)) asm volatile("cp.async.wait_all;" ::: "memory");
    else if (MODE == MODE_BIAS_CAP && thread_index() == 0) *s.bias_unit = 0;
    if (MODE != MODE_PLAIN && !C::FEW && thread_index() < 16) s.bias_sums[thread_index()] = 0;
    if (C::FEW && o.own_item() < 2 * C::TILES * 32) o.item[0].put_sums(p, s, o.own_item());
    if (C::BYTES || has_bias<MODE>(p)) __syncthreads(); /* queries and their scales */
    if constexpr (C::FEW) { /* where biases need it, the table with low halves in place of the other */
        if (has_large_bias<C>(s, lane)) fetch_table<C>(s, p.bias_few_low, to.head, FEW_LOW_LINES);
    }
    if (C::BYTES && warp < C::COLUMNS) put_byte_query<C, MODE>(s, warp, lane);
    if (C::RUNS) __syncthreads(); /* units of these */
    if (has_bias<MODE>(p)) {
        const int n_items = p.bias_steps * C::TILES * 32;
#pragma unroll
        for (int k = 0; k < C::TILES; k++)
            if (o.own_item() + k * C::THREADS < n_items) o.item[k].put(p, s, o.own_item() + k * C::THREADS);
#pragma unroll 1
        for (int i = o.own_item() + C::TILES * C::THREADS; i < n_items; i += C::THREADS) {
            o.item[0].load_constants(p, to.head, i);
            o.item[0].load_query(p, to, i);
            o.item[0].put(p, s, i);
        }
    }
    if (C::FEW) asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    if constexpr (C::RUNS && !C::FEW) { /* where biases turn out to need it, the table of short runs in place of the other */
        if (p.bias_long_runs && has_large_bias<C>(s, lane)) {
            fetch_table<C>(s, p.bias_short_runs, to.head, run_lines(p.bias_steps, true));
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads();
        }
    }
}

template <class C> DEVICE Target target_of(const DecodeParams &p, const Place &at) {
    Target to;
    to.seq = at.seq;
    to.head = divide(at.part, p.row_tiles, p.row_tiles_magic);
    to.first_row = (at.part - to.head * p.row_tiles) * C::ROWS;
    to.n_rows = min(C::ROWS, p.gqa * p.n_q_tokens - to.first_row);
    return to;
}

/* The segment of this CTA's first item if all sequences are of one length, which makes it independent of that. */
template <class C> DEVICE Target guess_target(const DecodeParams &p) {
    const int parts = p.n_kv_heads * p.row_tiles;
    const int segment = static_cast<int>(blockIdx.x * static_cast<uint32_t>(p.n_seqs * parts) / gridDim.x);
    Place at = {segment / parts, segment % parts, 0, 0};
    return target_of<C>(p, at);
}

template <class C> __host__ __device__ constexpr int ring_bytes() {
    return C::WARPS * C::STAGES * C::STAGE;
}
template <class C> __host__ __device__ constexpr int area_bytes(int bias_steps) {
    const int bias = C::RUNS ? run_bytes<C>(bias_steps)
                             : bias_steps * bias_step_bytes<C>() + C::WARPS * bias_own<C>(bias_steps) * 512;
    const int segment = bias + query_bytes<C>();
    return ((segment > Merge<C>::BYTES ? segment : Merge<C>::BYTES) + 127) / 128 * 128;
}
template <class C> __host__ __device__ constexpr int shared_bytes(int bias_steps) {
    return ring_bytes<C>() + area_bytes<C>(bias_steps) + C::WARPS * C::STAGES * 8 + 128;
}

/* Source of the item `first + lane` of a warp. */
template <class C>
DEVICE uint32_t look_up(const DecodeParams &p, int start, int end, const Place &place, const Items &items,
                        int first, int warp, int lane) {
    const int item = start + warp + (first + lane) * C::WARPS;
    if (item >= end) return 0u;
    constexpr int RUN_WARPS = C::RUNS ? C::WARPS : 0;
    return item < place.base + items.count() ? source_in_segment<RUN_WARPS, C::RUN>(p, item, place, items, start, end)
                                             : source_beyond<RUN_WARPS, C::RUN>(p, item, place, start, end);
}
template <class C> DEVICE uint32_t look_up_ahead(const DecodeParams &p, const Control &ctl, int first) {
    return look_up<C>(p, ctl.start, ctl.end, ctl.place, ctl.items, first, threadIdx.x >> 5, threadIdx.x & 31);
}

/* Feeds a warp's ring: lane l knows the source of the warp's item l of the next 32. */
template <class C> struct Feeder {
    Ring<C::STAGES, C::STAGE> ring;
    uint32_t now, later; /* sources of this block of 32 items and the next */
    int issued, n_items; /* of this warp in the whole launch */

    DEVICE void copy(const DecodeParams &p, int stage, uint32_t source, bool any, int lane) {
        if (source & OVERLAY_ITEM) {
            const size_t rows = static_cast<size_t>(source & ~OVERLAY_ITEM) * (8 * C::D);
            ring.copy_two(stage, p.overlay_k + rows, p.overlay_v + rows, any ? C::UNIT : 0, lane);
        } else {
            ring.copy(stage, p.pages + static_cast<size_t>(source) * p.tile_bytes, any ? p.tile_bytes : 0, lane);
        }
    }

    /* At the start: the first stage of all warps, since work begins with those, then the others. */
    DEVICE void fill_first(const DecodeParams &p, int lane) {
#if HAVE_BULK_COPY
        if (lane == 0 && n_items > 0) copy(p, 0, now, true, lane);
#endif
    }
    DEVICE void fill_rest(const DecodeParams &p, int lane) {
#if HAVE_BULK_COPY
        if (lane > 0 && lane < C::STAGES && lane < n_items) copy(p, lane, now, true, lane);
#else
        for (int i = 0; i < C::STAGES; i++) copy(p, i, __shfl_sync(FULL_WARP, now, i), i < n_items, lane);
#endif
    }

    /* The current stage has been read: fetch the next item into it. */
    template <bool ELECT> DEVICE void refill(const DecodeParams &p, const Control &ctl, int lane) {
        __syncwarp();
        const uint32_t source = __shfl_sync(FULL_WARP, now, issued & 31);
#if HAVE_BULK_COPY
        if (issued < n_items && (ELECT ? elected() : lane == 0)) copy(p, ring.stage, source, true, lane);
#else
        copy(p, ring.stage, source, issued < n_items, lane);
#endif
        issued++;
        if ((issued & 31) == 0) now = later;
        else if ((issued & 31) == 8 && issued > 32) 
            later = look_up_ahead<C>(p, ctl, (issued & ~31) + 32);
        ring.next();
    }
};

/* Whether a warp elects the lane that asks for the next item, or lane 0 does. What is faster depends on what the compiler makes
 * of the loop: up to 5 % either way, measured with 4, 8 and 12 rows. */
template <class C> __host__ __device__ constexpr bool elects() {
    return C::COLUMNS != 2 && C::COLUMNS != 3 && !C::RUNS;
}

/* Items of this warp in [first, last) of the launch. */
template <class C> DEVICE int items_of_warp(const Control &ctl, int first, int last) {
    const int mine = ctl.start + warp_index();
    const int before = max(first - mine + C::WARPS - 1, 0) / C::WARPS;
    return max(last - mine + C::WARPS - 1, 0) / C::WARPS - before;
}

template <class C, int MODE>
DEVICE void run_units(const DecodeParams &p, Feeder<C> &feeder, Rows<C> &rows, uint8_t *area, const Control &ctl,
                      uint8_t *stages, int n_units, int unit, Bias<C, MODE> &start) {
    const int warp = warp_index(), lane = threadIdx.x & 31;
    const int first_row = target_of<C>(p, ctl.place).first_row;
#pragma unroll 1
    for (; n_units > 0; n_units--, unit += C::WARPS) {
        feeder.ring.wait();
        const bool sink = unit < ctl.items.n_sink;
        const int row = sink ? ctl.items.sink_first + unit : ctl.items.recent_first + unit - ctl.items.n_sink;
        attend_unit<C, MODE>(rows, area, p, stages + feeder.ring.stage * C::STAGE, sink ? ITEM_SINK : ITEM_RECENT,
                             8 * row, ctl.place.length, first_row, warp, lane, start);
        feeder.template refill<elects<C>()>(p, ctl, lane);
    }
}

/* score: what the scores of the tile begin with, where `bias` does not say it. */
template <class C, int MODE, class BIAS>
DEVICE void run_tile(const DecodeParams &p, Feeder<C> &feeder, Rows<C> &rows, const Control &ctl, uint8_t *stages, int page,
                     bool masked, float (&score)[8][C::COLUMNS], BIAS &bias) {
    feeder.ring.wait();
    attend_tile<C, MODE>(rows, p, ctl, stages + feeder.ring.stage * C::STAGE, page, masked, score, bias);
    feeder.template refill<elects<C>()>(p, ctl, threadIdx.x & 31);
}

/* Tiles of this warp from place `tile` of the CTA's list on, by runs of pages. clear: pages that every row sees whole. */
template <class C, int MODE, bool LOW>
DEVICE void run_runs(const DecodeParams &p, Feeder<C> &feeder, Rows<C> &rows, uint8_t *area, const Control &ctl,
                     uint8_t *stages, int tile, int n_tiles, const Span &clear, RunBias<C> &runs) {
    const SegmentData<C> s = segment_data<C>(area, p.bias_steps);
    float score[8][C::COLUMNS];
#pragma unroll 1
    while (n_tiles > 0) {
        const PageRun run = run_of_tile<C::WARPS, C::RUN>(tile, uniform(ctl.part.n));
        const int first = uniform(ctl.items.tile_first + ctl.part.first) + run.first + run.turn;
        const int n = min(min(run.length - run.turn, n_tiles), RunBias<C>::template pages<LOW>());
        runs.template make<LOW>(s, p, first, threadIdx.x & 31);
#pragma unroll 1
        for (int k = 0; k < n; k++) {
            const int page = first + k;
            TileBias<C, LOW> bias(s, k);
            run_tile<C, MODE>(p, feeder, rows, ctl, stages, page, page < clear.first || page >= clear.last, score, bias);
        }
        tile += n * C::WARPS;
        n_tiles -= n;
    }
}

/* The same with up to 16 pairs. */
template <class C, int MODE, bool LOW>
DEVICE void run_few(const DecodeParams &p, Feeder<C> &feeder, Rows<C> &rows, uint8_t *area, const Control &ctl,
                    uint8_t *stages, int tile, int n_tiles, const Span &clear, FewBias<C> &few) {
    const SegmentData<C> s = segment_data<C>(area, 2);
    float score[8][C::COLUMNS];
#pragma unroll 1
    while (n_tiles > 0) {
        const PageRun run = run_of_tile<C::WARPS, C::RUN>(tile, uniform(ctl.part.n));
        const int first = uniform(ctl.items.tile_first + ctl.part.first) + run.first, n = run.length;
        const bool masked = first < clear.first || first + n > clear.last;
        uint32_t order = page_order(n);
        if (!LOW) few.make(s, first);
#pragma unroll 1
        for (int k = 0; k < n; k++) {
            if constexpr (LOW) {
                const PairedPage place = paired_page(k, n);
                few.scores(s, first + place.edge, place.away, place.after, score);
                NoTileBias<C> none;
                run_tile<C, MODE>(p, feeder, rows, ctl, stages, first + place.page(), masked, score, none);
            } else {
                const int page = order & 15;
                FewTile<C> bias(s, page);
                run_tile<C, MODE>(p, feeder, rows, ctl, stages, first + page, masked, score, bias);
                order >>= 4;
            }
        }
        tile += n * C::WARPS;
        n_tiles -= n;
    }
}

template <class C, int MODE>
DEVICE void run_segment(const DecodeParams &p, Feeder<C> &feeder, Rows<C> &rows, uint8_t *area, const Control &ctl,
                        uint8_t *stages) {
    const int base = ctl.place.base, units = ctl.items.units();
    const int from = max(ctl.start, base), to = min(ctl.end, base + ctl.items.count());
    const int middle = min(max(from, base + units), to);
    /* The first item of this warp in the segment, counted from the segment's first. */
    const int first = ctl.start + warp_index() + items_of_warp<C>(ctl, ctl.start, from) * C::WARPS - base;
    const int n_units = items_of_warp<C>(ctl, from, middle);
    Bias<C, MODE> beginnings;
    beginnings.start(area, p);
    if (C::FOUR_ROWS && from < middle) split_query<C>(segment_data<C>(area, MODE == MODE_PLAIN ? 0 : p.bias_steps));
    if (n_units > 0) run_units<C, MODE>(p, feeder, rows, area, ctl, stages, n_units, first, beginnings);
    int n_tiles = uniform(items_of_warp<C>(ctl, middle, to));
    int page = uniform(ctl.items.tile_first + first + n_units * C::WARPS - units);
    /* Pages that every row sees whole. */
    const int clear_first = uniform((visible(p, ITEM_TILE, ctl.place.length - 1).first + 63) >> 6);
    const int clear_last = uniform(visible(p, ITEM_TILE, ctl.place.length - p.n_q_tokens).last >> 6);
    float score[8][C::COLUMNS];
    NoTileBias<C> none;
    if constexpr (MODE == MODE_PLAIN) {
#pragma unroll 1
        for (; n_tiles > 0; n_tiles--, page += C::WARPS) {
#pragma unroll
            for (int k = 0; k < 8 * C::COLUMNS; k++) score[k / C::COLUMNS][k % C::COLUMNS] = 0.0f;
            run_tile<C, MODE>(p, feeder, rows, ctl, stages, page, page < clear_first || page >= clear_last, score, none);
        }
    } else if constexpr (C::FEW) {
        const int tile = page - ctl.items.tile_first - ctl.part.first;
        const Span clear = {clear_first, clear_last};
        if (beginnings.large) run_few<C, MODE, true>(p, feeder, rows, area, ctl, stages, tile, n_tiles, clear, beginnings);
        else run_few<C, MODE, false>(p, feeder, rows, area, ctl, stages, tile, n_tiles, clear, beginnings);
    } else if constexpr (C::RUNS) {
        const int tile = page - ctl.items.tile_first - ctl.part.first;
        const Span clear = {clear_first, clear_last};
        if (beginnings.large) run_runs<C, MODE, true>(p, feeder, rows, area, ctl, stages, tile, n_tiles, clear, beginnings);
        else run_runs<C, MODE, false>(p, feeder, rows, area, ctl, stages, tile, n_tiles, clear, beginnings);
    } else {
#pragma unroll 1
        while (n_tiles > 0) {
            beginnings.make(rows, area, p, page, score);
#pragma unroll 1
            for (int k = 0;; k++) {
                run_tile<C, MODE>(p, feeder, rows, ctl, stages, page, page < clear_first || page >= clear_last, score, none);
                n_tiles--;
                page += C::WARPS;
                if (n_tiles == 0 || k == C::BIAS_PAGES - 1) break;
                beginnings.take_next(area, p, score);
            }
        }
    }
}

template <class C, int MODE>
DEVICE void merge_segment(const DecodeParams &p, Rows<C> &rows, uint8_t *shared, uint8_t *area, Control &ctl) {
    const int warp = thread_index() >> 5, lane = thread_index() & 31;
    const Target to = target_of<C>(p, ctl.place);
    const int base = ctl.place.base, end = base + ctl.items.count();
    const int pads = C::FOUR_ROWS && p.n_seqs == 1 ? pads_of(p, end - base, ctl.items.units()) : 0;
    const int before = pads * ctl.place.part; /* in segments before */
    const SegmentData<C> s = segment_data<C>(area, MODE == MODE_PLAIN ? 0 : p.bias_steps);
    float q_mean[C::COLUMNS]; /* q . mean in log2, which all scores of a row lack, unless there may be a soft cap */
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++)
        q_mean[i] = MODE == MODE_BIAS_CAP ? 0.0f : s.query_mean[4 * i + (lane & 3)] * p.scale_log2;
    __syncthreads(); /* the segment's data is done with */
    /* Behind a CTA's last segment its stages are free for the warps' sums. Where these lie is one to the merge, but with all in
     * `area` GQA 12 without pairs took 3 % longer at batch 32, by what the compiler made of the loop over tiles. */
    static_assert(Merge<C>::WARP_BYTES <= C::STAGES * C::STAGE, "a warp's sums");
    WarpSums sums = {shared, C::STAGES * C::STAGE};
    if (end < ctl.end) sums = {area, Merge<C>::WARP_BYTES};
    leave_warp<C>(rows, sums, q_mean, warp, lane);
    __syncthreads();
    float *weights = reinterpret_cast<float *>(area + C::WARPS * Merge<C>::WARP_BYTES) + warp * Merge<C>::WEIGHTS;
    const RowTotal total = weigh_warps<C>(sums, weights, lane);
    if (base >= ctl.start && end <= ctl.end) {
        finish_alone<C>(p, area, to, sums, weights, total);
        return;
    }
    const int segment = ctl.place.seq * p.n_kv_heads * p.row_tiles + ctl.place.part;
    const int first = cta_of(base + before, ctl.total), n = cta_of(end - 1 + before + pads, ctl.total) - first + 1;
    if (leave_partial<C>(p, sums, weights, total, ctl.start >= base ? 0 : 1, segment, n, &ctl.last_flag))
        finish_partials<C>(p, area, to, {start_of(first, ctl.total) >= base + before ? 0 : 1, first, n});
}

template <class C, int MODE> DEVICE void decode(const DecodeParams &p, uint8_t *shared) {
    const int warp = warp_index(), lane = threadIdx.x & 31;
    const int area_size = area_bytes<C>(MODE == MODE_PLAIN ? 0 : p.bias_steps);
    uint8_t *area = shared + ring_bytes<C>();
    uint8_t *barriers = area + area_size;
    Control &ctl = *reinterpret_cast<Control *>(barriers + C::WARPS * C::STAGES * 8);
    uint8_t *stages = shared + warp * C::STAGES * C::STAGE;

    Feeder<C> feeder;
    feeder.ring.data = shared_address(stages);
    feeder.ring.barriers = shared_address(barriers) + warp * C::STAGES * 8;
    feeder.ring.init(lane);
    /* Constants of the head that this CTA will have if all sequences are of one length, while the kernel before
     * this one ends; lengths and what follows from them when it has. */
    Target to = guess_target<C>(p);
    Opening<C, MODE> opening;
    opening.load_constants(p, to.head, warp, lane);
    let_next_kernel_start();
    wait_for_kernel_before();
    const int length = lane < p.n_seqs ? load_int(p.lengths + lane) : 0;
    opening.load_queries(p, area, to, warp, lane);
    const Share share = share_of<C::FOUR_ROWS>(p, lane, length);
    if (share.start >= share.end) { /* fewer items than CTAs */
        asm volatile("cp.async.wait_all;" ::: "memory");
        return;
    }
    const Target real = target_of<C>(p, share.place);
    const Items items = items_of(p, share.place.length);
    feeder.n_items = uniform((share.end - share.start - warp + C::WARPS - 1) / C::WARPS);
    feeder.issued = C::STAGES;
    feeder.later = 0;
    feeder.now = look_up<C>(p, share.start, share.end, share.place, items, 0, warp, lane);
    if (real.seq != to.seq || real.head != to.head || real.first_row != to.first_row) {
        if (has_bias<MODE>(p)) {
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads(); /* everybody's copies of the wrong head have ended */
        }
        opening.load_constants(p, real.head, warp, lane);
        opening.load_queries(p, area, real, warp, lane);
    }
    feeder.fill_first(p, lane);
    if (threadIdx.x == 0) {
        ctl.start = share.start;
        ctl.end = share.end;
        ctl.total = share.total;
        enter_segment(p, ctl, share.place);
    }
    prepare_segment<C, MODE>(p, area, real, opening, warp, lane, [&]() {
        if (C::BULK) feeder.fill_rest(p, lane);
    });
    if (!C::BULK) feeder.fill_rest(p, lane); /* these copies are of those that prepare_segment() waits for */
    if (feeder.n_items > 32)
        feeder.later = look_up_ahead<C>(p, ctl, 32);
    Rows<C> rows;
    while (true) {
        start_rows<C, MODE>(rows, segment_data<C>(area, MODE == MODE_PLAIN ? 0 : p.bias_steps), p.scale_log2, lane);
        run_segment<C, MODE>(p, feeder, rows, area, ctl, stages);
        merge_segment<C, MODE>(p, rows, shared, area, ctl);
        const int next = ctl.place.base + ctl.items.count();
        if (next >= ctl.end) break;
        __syncthreads();
        if (threadIdx.x == 0) {
            Place place = ctl.place;
            advance_to(p, next, place);
            enter_segment(p, ctl, place);
        }
        __syncthreads();
        to = target_of<C>(p, ctl.place);
        opening.load_constants(p, to.head, warp, lane);
        opening.load_queries(p, area, to, warp, lane);
        prepare_segment<C, MODE>(p, area, to, opening, warp, lane, []() {});
    }
}

template <class C, int MODE>
__global__ void __launch_bounds__(C::THREADS, 1) decode_kernel(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(128) uint8_t shared[];
    if constexpr (C::BULK == (HAVE_BULK_COPY != 0)) decode<C, MODE>(p, shared);
}

#endif
