/*
 * decode.cuh - the decode kernel: one CTA a multiprocessor, every warp with a ring of its own.
 *
 * A launch of a short context is latency: lengths, then page ids, then the first tiles, while the
 * queries are rotated under them; small loads would queue behind the flood of tiles.
 */
#ifndef OSCAR_CUDA_DECODE_CUH
#define OSCAR_CUDA_DECODE_CUH

#include "decode_merge.cuh"

/* State of a CTA that all its warps read. */
struct Control {
    int start, end;
    uint32_t total;
    Place place;
    int last_flag;
};

template <class C> DEVICE float q_value(const DecodeParams &p, uint32_t word, int half) {
    const uint32_t h = half ? word >> 16 : word & 0xffffu;
    return p.q_is_bf16 ? __uint_as_float(h << 16) : __half2float(__ushort_as_half(h));
}

/* First element of a row's query, or NULL when the row does not exist. */
template <class C> DEVICE const uint16_t *query_row(const DecodeParams &p, const Target &to, int row) {
    if (row >= to.n_rows) return nullptr;
    const int r = to.first_row + row, token = r / p.gqa, head = to.head * p.gqa + r % p.gqa;
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

/* Rotates the segment's queries into shared memory and gathers what the bias needs. `between` runs
 * after the first loads are on their way. */
template <class C, int MODE, class F>
DEVICE void prepare_segment(const DecodeParams &p, const SegmentData<C> &s, const Target &to, int warp,
                            int lane, F between) {
    constexpr int ROW_TILES = (C::ROWS + 7) / 8, CHUNK = C::STEPS < 8 ? C::STEPS : 8;
    constexpr int TURNS = (C::STEPS + C::WARPS - 1) / C::WARPS;
    const int g = lane >> 2, t = lane & 3;
    RawQuery<C> raw[ROW_TILES];
    if (warp < C::STEPS) {
#pragma unroll
        for (int j = 0; j < ROW_TILES; j++) load_query<C>(p, to, j, lane, raw[j]);
    }
    const uint4 *u = p.k_rotation + static_cast<size_t>(to.head) * C::STEPS * C::STEPS * 64 + lane;
    float scale[ROW_TILES];
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int m = warp + turn * C::WARPS;
        if (m < C::STEPS) {
            float c[ROW_TILES][4];
#pragma unroll
            for (int j = 0; j < ROW_TILES; j++) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0;
#pragma unroll
            for (int first = 0; first < C::STEPS; first += CHUNK) {
                uint4 high[CHUNK], low[CHUNK];
#pragma unroll
                for (int k = 0; k < CHUNK; k++) {
                    high[k] = load_uint4(u + ((m * C::STEPS + first + k) * 2) * 32);
                    low[k] = load_uint4(u + ((m * C::STEPS + first + k) * 2 + 1) * 32);
                }
                if (turn == 0 && first == 0) {
                    between();
#pragma unroll
                    for (int j = 0; j < ROW_TILES; j++) scale_query<C>(p, raw[j], scale[j]);
                }
#pragma unroll
                for (int k = 0; k < CHUNK; k++)
#pragma unroll
                    for (int j = 0; j < ROW_TILES; j++) {
                        const uint4 x = raw[j].x[(first + k) / 2];
                        const uint32_t b0 = k & 1 ? x.z : x.x, b1 = k & 1 ? x.w : x.y;
                        mma_f16(c[j], high[k].x, high[k].y, high[k].z, high[k].w, b0, b1);
                        mma_f16(c[j], low[k].x, low[k].y, low[k].z, low[k].w, b0, b1);
                    }
            }
#pragma unroll
            for (int j = 0; j < ROW_TILES; j++) {
                float *q = s.query + (8 * j + 2 * t) * C::QUERY_STRIDE + 16 * m + g;
                if (8 * j + 2 * t < C::ROWS) {
                    q[0] = c[j][0];
                    q[8] = c[j][2];
                }
                if (8 * j + 2 * t + 1 < C::ROWS) {
                    q[C::QUERY_STRIDE] = c[j][1];
                    q[C::QUERY_STRIDE + 8] = c[j][3];
                }
                if (turn == 0 && m == 0 && t == 0 && 8 * j + g < C::ROWS)
                    s.query_scale[8 * j + g] = scale[j];
            }
        } else if (turn == 0) {
            between();
        }
    }
    /* q . mean, one row a warp, from the last warp on: it is the one without a rotation to do. */
#pragma unroll 1
    for (int row = C::WARPS - 1 - warp; row < C::ROWS; row += C::WARPS) {
        float sum = 0;
        const uint16_t *q = query_row<C>(p, to, row);
        if (q && p.k_mean)
#pragma unroll
            for (int i = 0; i < C::D / 32; i++)
                sum = fmaf(q_value<C>(p, q[32 * i + lane], 0), __ldg(p.k_mean + to.head * C::D + 32 * i + lane),
                           sum);
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) sum += __shfl_xor_sync(FULL_WARP, sum, d);
        if (lane == 0) s.query_mean[row] = sum;
    }
    if constexpr (MODE != MODE_PLAIN) {
        const int steps = p.bias_steps;
        const uint4 *table = p.bias_table + static_cast<size_t>(to.head) * steps * 256;
        for (int i = threadIdx.x; i < steps * 256; i += C::THREADS) s.bias_table[i] = __ldg(table + i);
        for (int i = threadIdx.x; i < steps * 8; i += C::THREADS)
            s.bias_turn[i] = __ldg(p.bias_turn + to.head * steps * 8 + i);
        for (int i = threadIdx.x; i < steps * 4; i += C::THREADS)
            s.bias_nu[i] = __ldg(p.bias_nu + to.head * steps * 4 + i);
        __syncthreads(); /* the scales */
        for (int i = threadIdx.x; i < steps * C::TILES * 32; i += C::THREADS) {
            const int step = i / (C::TILES * 32), j = i / 32 % C::TILES;
            const int row = column_row<C>(j, (i & 31) >> 2), pair = 8 * step + 2 * (i & 3);
            const uint16_t *q = query_row<C>(p, to, row);
            float4 x = make_float4(0, 0, 0, 0);
            if (q) {
                const int2 a = __ldg(p.bias_dims + to.head * steps * 8 + pair);
                const int2 b = __ldg(p.bias_dims + to.head * steps * 8 + pair + 1);
                const float up = s.query_scale[row];
                x = make_float4(q_value<C>(p, q[a.x], 0) * up, q_value<C>(p, q[a.y], 0) * up,
                                q_value<C>(p, q[b.x], 0) * up, q_value<C>(p, q[b.y], 0) * up);
            }
            s.bias_query[i] = x;
        }
    }
    __syncthreads();
}

template <class C> DEVICE Target target_of(const DecodeParams &p, const Place &at) {
    Target to;
    const int tile = p.row_tiles == 1 ? 0 : at.part % p.row_tiles;
    to.seq = at.seq;
    to.head = p.row_tiles == 1 ? at.part : at.part / p.row_tiles;
    to.first_row = tile * C::ROWS;
    to.n_rows = min(C::ROWS, p.gqa * p.n_q_tokens - to.first_row);
    return to;
}

template <class C> __host__ __device__ constexpr int ring_bytes() {
    return C::WARPS * C::STAGES * C::STAGE;
}
template <class C> __host__ __device__ constexpr int area_bytes(int bias_steps, int n_ctas) {
    int segment = bias_steps * bias_step_bytes<C>() + (C::ROWS * C::QUERY_STRIDE + 32) * 4;
    int merge = Merge<C>::BYTES;
    int finish = finish_bytes<C>(n_ctas);
    int most = segment > merge ? segment : merge;
    return ((most > finish ? most : finish) + 127) / 128 * 128;
}
template <class C> __host__ __device__ constexpr int shared_bytes(int bias_steps, int n_ctas) {
    return ring_bytes<C>() + area_bytes<C>(bias_steps, n_ctas) + C::WARPS * C::STAGES * 8 + 128;
}

/* Feeds a warp's ring: lane l knows the source of the warp's item l of the next 32. */
template <class C> struct Feeder {
    Ring<C::STAGES, C::STAGE> ring;
    uint32_t now, later; /* sources of this block of 32 items and the next */
    int issued, n_items; /* of this warp in the whole launch */

    DEVICE void copy(const DecodeParams &p, int stage, uint32_t source, bool any, int lane) {
        const bool overlay = source & OVERLAY_ITEM;
        const size_t rows = static_cast<size_t>(source & ~OVERLAY_ITEM) * (8 * C::D);
        const void *a = p.pages + static_cast<size_t>(source) * p.tile_bytes, *b = nullptr;
        int a_bytes = p.tile_bytes, b_bytes = 0;
        if (overlay) {
            a = p.overlay_k + rows;
            b = p.overlay_v + rows;
            a_bytes = b_bytes = C::UNIT;
        }
        if (!any) a_bytes = b_bytes = 0;
        ring.copy(stage, a, a_bytes, b, b_bytes, lane, overlay || p.row_tiles > 1);
    }

    DEVICE uint32_t look_up(const DecodeParams &p, const Control &ctl, int first, int warp, int lane) {
        const int item = ctl.start + warp + (first + lane) * C::WARPS;
        return item < ctl.end ? item_source(p, item, ctl.place) : 0u;
    }

    /* Fills stages [first, last) at the start. */
    DEVICE void fill(const DecodeParams &p, int first, int last, int lane) {
#if HAVE_BULK_COPY
        if (lane >= first && lane < last && lane < n_items) copy(p, lane, now, true, lane);
#else
        for (int i = first; i < last; i++)
            copy(p, i, __shfl_sync(FULL_WARP, now, i), i < n_items, lane);
#endif
    }

    /* The current stage has been read: fetch the next item into it. */
    DEVICE void refill(const DecodeParams &p, const Control &ctl, int warp, int lane) {
        __syncwarp();
        const uint32_t source = __shfl_sync(FULL_WARP, now, issued & 31);
#if HAVE_BULK_COPY
        if (issued < n_items && lane == 0) copy(p, ring.stage, source, true, lane);
#else
        copy(p, ring.stage, source, issued < n_items, lane);
#endif
        issued++;
        if ((issued & 31) == 0) now = later;
        else if ((issued & 31) == 8 && issued > 32) later = look_up(p, ctl, (issued & ~31) + 32, warp, lane);
        ring.next();
    }
};

template <class C, int MODE>
DEVICE void run_segment(const DecodeParams &p, Feeder<C> &feeder, Rows<C> &rows,
                        const SegmentData<C> &data, const Control &ctl, const uint8_t *stages,
                        int first_row, int warp, int lane) {
    const Items items = items_of(p, ctl.place.length);
    const int base = ctl.place.base, length = ctl.place.length;
    const int from = max(ctl.start, base), to = min(ctl.end, base + items.count());
    const int units_end = min(max(from, base + items.units()), to);
    const int behind = from - ctl.start - warp;
    int item = ctl.start + warp + (behind > 0 ? (behind + C::WARPS - 1) / C::WARPS * C::WARPS : 0);
#pragma unroll 1
    for (; item < units_end; item += C::WARPS) {
        feeder.ring.wait();
        const int i = item - base, kind = i < items.n_sink ? ITEM_SINK : ITEM_RECENT;
        const int unit = kind == ITEM_SINK ? items.sink_first + i : items.recent_first + i - items.n_sink;
        attend_unit<C, MODE>(rows, data, p, stages + feeder.ring.stage * C::STAGE, kind, 8 * unit, length,
                             first_row, warp, lane);
        feeder.refill(p, ctl, warp, lane);
    }
    const int clear_first = visible(p, ITEM_TILE, length - 1).first;
    const int clear_last = visible(p, ITEM_TILE, length - p.n_q_tokens).last;
    int page = items.tile_first + item - base - items.units();
#pragma unroll 1
    for (; item < to; item += C::WARPS, page += C::WARPS) {
        feeder.ring.wait();
        const bool masked = 64 * page < clear_first || 64 * page + 64 > clear_last;
        attend_tile<C, MODE>(rows, data, p, stages + feeder.ring.stage * C::STAGE, page, masked, length,
                             first_row, warp, lane);
        feeder.refill(p, ctl, warp, lane);
    }
}

template <class C>
DEVICE void merge_segment(const DecodeParams &p, Rows<C> &rows, uint8_t *area, Control &ctl,
                          const Target &to, int warp, int lane) {
    const int base = ctl.place.base, end = base + items_of(p, ctl.place.length).count();
    __syncthreads(); /* the segment's data is done with */
    store_warp<C>(rows, area, warp, lane);
    __syncthreads();
    if (base >= ctl.start && end <= ctl.end) {
        finish_alone<C>(p, area, to);
        return;
    }
    const int segment = ctl.place.seq * p.n_kv_heads * p.row_tiles + ctl.place.part;
    const int first = cta_of(base, ctl.total), n = cta_of(end - 1, ctl.total) - first + 1;
    if (leave_partial<C>(p, area, ctl.start >= base ? 0 : 1, segment, n, &ctl.last_flag))
        finish_partials<C>(p, area, to, 2 * first + (start_of(first, ctl.total) >= base ? 0 : 1), first, n);
}

template <class C, int MODE> DEVICE void decode(const DecodeParams &p, uint8_t *shared) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int area_size = area_bytes<C>(MODE == MODE_PLAIN ? 0 : p.bias_steps, DECODE_MAX_CTAS);
    uint8_t *area = shared + ring_bytes<C>();
    uint8_t *barriers = area + area_size;
    Control &ctl = *reinterpret_cast<Control *>(barriers + C::WARPS * C::STAGES * 8);
    const uint8_t *stages = shared + warp * C::STAGES * C::STAGE;
    const SegmentData<C> data = segment_data<C>(area, MODE == MODE_PLAIN ? 0 : p.bias_steps);

    Feeder<C> feeder;
    feeder.ring.data = shared_address(stages);
    feeder.ring.barriers = shared_address(barriers) + warp * C::STAGES * 8;
    Target to;
    {
        const Share share = share_of(p, lane);
        if (share.start >= share.end) return; /* fewer items than CTAs */
        Control mine;
        mine.start = share.start;
        mine.end = share.end;
        mine.total = share.total;
        mine.place = share.place;
        if (threadIdx.x == 0) {
            ctl.start = share.start;
            ctl.end = share.end;
            ctl.total = share.total;
            ctl.place = share.place;
        }
        feeder.n_items = (share.end - share.start - warp + C::WARPS - 1) / C::WARPS;
        feeder.issued = C::STAGES;
        feeder.now = feeder.look_up(p, mine, 0, warp, lane);
        feeder.later = 0;
        feeder.ring.init(lane);
        to = target_of<C>(p, share.place);
    }
    feeder.fill(p, 0, 1, lane);
    prepare_segment<C, MODE>(p, data, to, warp, lane, [&] { feeder.fill(p, 1, C::STAGES, lane); });
    if (feeder.n_items > 32) feeder.later = feeder.look_up(p, ctl, 32, warp, lane);
    Rows<C> rows;
    while (true) {
        start_rows<C>(rows, data, p.scale_log2, lane);
        run_segment<C, MODE>(p, feeder, rows, data, ctl, stages, to.first_row, warp, lane);
        merge_segment<C>(p, rows, area, ctl, to, warp, lane);
        const int next = ctl.place.base + items_of(p, ctl.place.length).count();
        if (next >= ctl.end) break;
        __syncthreads();
        if (threadIdx.x == 0) {
            Place place = ctl.place;
            advance_to(p, next, place);
            ctl.place = place;
        }
        __syncthreads();
        to = target_of<C>(p, ctl.place);
        prepare_segment<C, MODE>(p, data, to, warp, lane, [] {});
    }
}

template <class C, int MODE>
__global__ void __launch_bounds__(C::THREADS, 1) decode_kernel(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(128) uint8_t shared[];
    if constexpr (C::BULK == (HAVE_BULK_COPY != 0)) decode<C, MODE>(p, shared);
}

#endif
