/*
 * decode_work.cuh - the work of a decode launch as one flat list of items, cut evenly over the CTAs.
 *
 * A segment is (sequence, KV head, row tile). Its items are, in order: units of 8 BF16 sink rows,
 * units of 8 BF16 recent rows, tiles of 64 quantised tokens; a unit moves about as many bytes as a
 * tile. Segments follow each other, sequences slowest. CTA c of C takes items
 * [c T / C, (c + 1) T / C) of T; which CTAs share a segment follows from that alone, so the order in
 * which partial results are merged never changes.
 */
#ifndef OSCAR_CUDA_DECODE_WORK_CUH
#define OSCAR_CUDA_DECODE_WORK_CUH

#include "decode_params.h"
#include "device.cuh"

/* Units and tiles of a segment: first index and count of each kind. */
struct Items {
    int sink_first, n_sink;
    int recent_first, n_recent;
    int tile_first, n_tiles;
    DEVICE int count() const { return n_sink + n_recent + n_tiles; }
    DEVICE int units() const { return n_sink + n_recent; }
};

DEVICE int window_start(const DecodeParams &p, int t) {
    return p.window ? max(0, t - p.window + 1) : 0;
}

/* What queries at t_first .. length - 1 see together. */
DEVICE Items items_between(const DecodeParams &p, int t_first, int length) {
    Items r = {0, 0, 0, 0, 0, 0};
    const int t_last = length - 1;
    const int start = window_start(p, t_first);
    const int sink_end = min(p.sink, length);
    r.sink_first = start >> 3;
    r.n_sink = start < sink_end ? ((sink_end + 7) >> 3) - r.sink_first : 0;
    const int recent_start = max(max(p.sink, t_first - p.recent + 1), start);
    r.recent_first = recent_start >> 3;
    r.n_recent = recent_start < length ? ((length + 7) >> 3) - r.recent_first : 0;
    const int tile_start = max(p.sink, start), tile_end = t_last - p.recent + 1;
    r.tile_first = tile_start >> 6;
    r.n_tiles = tile_end > tile_start ? ((tile_end + 63) >> 6) - r.tile_first : 0;
    return r;
}

DEVICE Items items_of(const DecodeParams &p, int length) {
    if (length <= 0) return {0, 0, 0, 0, 0, 0};
    return items_between(p, max(length - p.n_q_tokens, 0), length);
}

/* Where an item lies: its sequence, the part (KV head x row tile) and the first item of that
 * segment. */
struct Place {
    int seq, part, base, length;
};

/* Of one sequence, whose time is that of its slowest CTA: where units cost more than tiles, the list that is cut evenly has pads
 * between a segment's units and tiles, fewer than a CTA's share, so that every CTA has an item of each segment that it has a
 * place of. Returns the pads of a segment of n items, `units` of them units. */
DEVICE int pads_of(const DecodeParams &p, int n, int units) {
    const int pads = units < n ? units * p.unit_pad >> 3 : 0;
    return static_cast<uint32_t>(n * p.n_kv_heads * p.row_tiles) >= gridDim.x * static_cast<uint32_t>(pads + 1) ? pads : 0;
}
/* Place in the list with pads -> item. */
template <bool PADS> DEVICE int without_pads(uint32_t slot, int n, int units, int pads) {
    if (!PADS) return static_cast<int>(slot);
    const int part = static_cast<int>(slot) / (n + pads), i = static_cast<int>(slot) - part * (n + pads);
    return part * n + (i <= units ? i : max(i - pads, units));
}

DEVICE void advance_to(const DecodeParams &p, int item, Place &at) {
    int n = items_of(p, at.length).count();
    while (item >= at.base + n) {
        at.base += n;
        if (++at.part == p.n_kv_heads * p.row_tiles || n == 0) {
            at.part = 0;
            at.seq++;
            at.length = load_int(p.lengths + at.seq);
            n = items_of(p, at.length).count();
        }
    }
}

/* Every CTA that works has an item. */
DEVICE uint32_t working_ctas(uint32_t total) { return min(gridDim.x, total); }

/* Total number of items, and this CTA's share with the place of its first item. Every warp computes
 * it: that is cheaper than waiting for one. */
struct Share {
    uint32_t total; /* pads included */
    int start, end;
    Place place;
};

/* length: of sequence `lane`, 0 for none. PADS: one sequence may have some. */
template <bool PADS> DEVICE Share share_of(const DecodeParams &p, int lane, int length) {
    const int parts = p.n_kv_heads * p.row_tiles;
    Share s;
    if (p.n_seqs == 1) { /* what follows, in fewer steps: nothing else happens meanwhile */
        s.place.length = __shfl_sync(FULL_WARP, length, 0);
        const Items items = items_of(p, s.place.length);
        const uint32_t n = items.count();
        const int pads = PADS ? pads_of(p, n, items.units()) : 0;
        s.total = (n + pads) * parts;
        const uint32_t n_ctas = working_ctas(s.total);
        s.start = s.end = 0;
        if (blockIdx.x >= n_ctas) return s;
        s.start = without_pads<PADS>(blockIdx.x * s.total / n_ctas, n, items.units(), pads);
        s.end = without_pads<PADS>((blockIdx.x + 1) * s.total / n_ctas, n, items.units(), pads);
        s.place.seq = 0;
        s.place.part = s.start / static_cast<int>(n);
        s.place.base = s.place.part * static_cast<int>(n);
        return s;
    }
    int mine = items_of(p, length).count() * parts;
    int sum = mine;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        int other = __shfl_up_sync(FULL_WARP, sum, d);
        if (lane >= d) sum += other;
    }
    uint32_t total = __shfl_sync(FULL_WARP, sum, 31);
    const uint32_t first_total = total;
#pragma unroll 1
    for (int i = 32; i < p.n_seqs; i += 32) {
        int n = i + lane < p.n_seqs ? items_of(p, load_int(p.lengths + i + lane)).count() : 0;
        total += __reduce_add_sync(FULL_WARP, n * parts);
    }
    s.total = total;
    const uint32_t n_ctas = working_ctas(total);
    s.start = s.end = 0;
    if (blockIdx.x >= n_ctas) return s;
    s.start = static_cast<int>(blockIdx.x * total / n_ctas);
    s.end = static_cast<int>((blockIdx.x + 1) * total / n_ctas);
    uint32_t before = 0, chunk = first_total;
    int i = 0;
    while (static_cast<uint32_t>(s.start) >= before + chunk && i + 32 < p.n_seqs) {
        before += chunk;
        i += 32;
        length = i + lane < p.n_seqs ? load_int(p.lengths + i + lane) : 0;
        mine = items_of(p, length).count() * parts;
        sum = mine;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            int other = __shfl_up_sync(FULL_WARP, sum, d);
            if (lane >= d) sum += other;
        }
        chunk = __shfl_sync(FULL_WARP, sum, 31);
    }
    const int target = s.start - static_cast<int>(before);
    const uint32_t above = __ballot_sync(FULL_WARP, sum > target);
    const int owner = above ? __ffs(above) - 1 : 31;
    const int n = max(__shfl_sync(FULL_WARP, mine, owner) / parts, 1);
    const int base = static_cast<int>(before) + __shfl_sync(FULL_WARP, sum - mine, owner);
    s.place.seq = i + owner;
    s.place.length = __shfl_sync(FULL_WARP, length, owner);
    s.place.part = (s.start - base) / n;
    s.place.base = base + s.place.part * n;
    return s;
}

/* Which CTA has a place of the list with pads, and where in that a CTA begins. */
DEVICE int cta_of(uint32_t item, uint32_t total) {
    return static_cast<int>(((item + 1) * working_ctas(total) - 1) / total);
}
DEVICE int start_of(uint32_t cta, uint32_t total) {
    return static_cast<int>(cta * total / working_ctas(total));
}

/* The tiles of a segment that a CTA has, counted from the segment's first. */
struct Part {
    int first, n;
};
DEVICE Part part_of(int start, int end, const Place &at, const Items &r) {
    const int before = at.base + r.units(), first = max(start - before, 0);
    return {first, min(end - before, r.n_tiles) - first};
}

/* Tiles are dealt out to warps in turn. So that those of a warp are runs of pages, the list of a CTA's tiles can have another
 * order than pages: the run of tile i of n, pages counted from the first. */
struct PageRun {
    int first, length; /* pages */
    int turn;          /* how many of the run's tiles come before this one */
};
template <int WARPS, int PAGES> DEVICE PageRun run_of_tile(int i, int n) {
    constexpr int ROUND = PAGES * WARPS;
    const int base = i / ROUND * ROUND, here = min(n - base, ROUND); /* the last round has shorter runs, some longer by a page */
    const int length = here / WARPS, longer = here - length * WARPS;
    const int turn = (i - base) / WARPS, warp = (i - base) - turn * WARPS;
    return {base + warp * length + min(warp, longer), length + (warp < longer), turn};
}

/* Pages of a run of FEW_RUN come in twos that lie mirrored about the middle of (at most) FEW_SHORT of them. */
struct PairedPage {
    int edge; /* page, from the run's first, that begins at the middle */
    int away; /* pages between that and this one */
    bool after;
    DEVICE int page() const { return after ? edge + away : edge - 1 - away; }
};
DEVICE PairedPage paired_page(int turn, int length) {
    const int group = turn & ~(FEW_SHORT - 1), n = min(length - group, FEW_SHORT), i = turn - group;
    return {group + (n >> 1), i >> 1, (i & 1) || i == n - 1};
}

/* Which page of a run each turn takes, four bits each: what follows from paired_page(). */
DEVICE uint32_t page_order(int length) {
    return length < FEW_SHORT ? 0x210 : length < FEW_RUN ? 0x6543021 : 0x74653021;
}

/* Page of tile i of a segment, of which the CTA has a part. WARPS: 0 where the list is in the order of pages. */
template <int WARPS, int PAGES> DEVICE int place_of_tile(int i, const Part &part) {
    if constexpr (WARPS == 0) {
        return i;
    } else {
        const PageRun run = run_of_tile<WARPS, PAGES>(i - part.first, part.n);
        return part.first + run.first + (PAGES == FEW_RUN ? page_order(run.length) >> 4 * run.turn & 15 : run.turn);
    }
}

/* What to copy for an item: bit 31 set: 8 overlay rows, else a tile. Both as indices. r: the items
 * of the segment that `at` names, which has the item. start, end: the CTA's items. */
#define OVERLAY_ITEM 0x80000000u
template <int RUN_WARPS = 0, int RUN = 0>
DEVICE uint32_t source_in_segment(const DecodeParams &p, int item, const Place &at, const Items &r, int start = 0, int end = 0) {
    const int head = divide(at.part, p.row_tiles, p.row_tiles_magic);
    const int i = item - at.base - r.units();
    if (i < 0) {
        const int slot = p.slots ? load_int(p.slots + at.seq) : at.seq;
        const int unit = i + r.units();
        const int row8 = unit < r.n_sink
                             ? r.sink_first + unit
                             : (p.sink8 >> 3) + (r.recent_first + unit - r.n_sink) % (p.ring >> 3);
        return OVERLAY_ITEM | ((slot * p.n_kv_heads + head) * ((p.sink8 + p.ring) >> 3) + row8);
    }
    const int place = r.tile_first + place_of_tile<RUN_WARPS, RUN>(i, part_of(start, end, at, r));
    const int page = load_int(p.block_table + static_cast<size_t>(at.seq) * p.table_stride + place);
    return static_cast<uint32_t>(page) * p.n_kv_heads + head;
}

template <int RUN_WARPS, int RUN> DEVICE uint32_t source_beyond(const DecodeParams &p, int item, Place at, int start, int end) {
    advance_to(p, item, at);
    return source_in_segment<RUN_WARPS, RUN>(p, item, at, items_of(p, at.length), start, end);
}

/* Positions that the query at t sees of one kind of item: [first, last). */
enum ItemKind { ITEM_SINK = 0, ITEM_RECENT = 1, ITEM_TILE = 2 };
struct Span {
    int first, last;
};
DEVICE Span visible(const DecodeParams &p, int kind, int t) {
    const int start = window_start(p, t);
    Span s;
    if (kind == ITEM_SINK) {
        s.first = start;
        s.last = min(p.sink, t + 1);
    } else if (kind == ITEM_RECENT) {
        s.first = max(max(p.sink, t - p.recent + 1), start);
        s.last = t + 1;
    } else {
        s.first = max(p.sink, start);
        s.last = t - p.recent + 1;
    }
    return s;
}

/* State of a CTA that all its warps read. */
struct Control {
    int start, end;
    uint32_t total;
    Place place;
    Items items; /* of the place's segment */
    Part part;   /* of that, what is this CTA's */
    int last_flag;
};

DEVICE void enter_segment(const DecodeParams &p, Control &ctl, const Place &at) {
    ctl.place = at;
    ctl.items = items_of(p, at.length);
    ctl.part = part_of(ctl.start, ctl.end, at, ctl.items);
}

#endif
