/*
 * prefill_expand.cuh - what a CTA of prefill_wgmma.cu has to do, and its expanding warpgroups: they turn tiles into fp16 keys
 * and values in shared memory, (step code + offset) rounded once, and rows of the overlay likewise.
 *
 * An expanded stage, in the 128-byte swizzle that the products read (16-byte chunk ^ row % 8, rows of 128 bytes):
 *   keys    2 panels of 64 channels, [64 places]; channels 16 c + i and 16 c + 8 + i are neighbours at 16 c + 2 i,
 *           as the halves of a code word are; queries are in the same order
 *   values  [128 channels] of 64 places
 * Token 16 a + 8 h + 2 c + e of a tile has place 16 a + 4 c + 2 h + e: the four tokens whose values a lane has are
 * neighbours.
 *
 * The key bias of tracked pairs is b(t) = sum q . R_t nu, over the two dims of a pair: a product too, of the query's own
 * channels, exact in fp16, with waves, R_t nu, which are expanded as keys are.
 *   waves   [64 places] of 16 pairs' first dims, 16 second dims, as fp16, then what that leaves of them ("low halves");
 *           pairs 2 t, 2 t + 1, 2 t + 8, 2 t + 9 are neighbours at 4 t
 * Without low halves a bias is wrong by at most 2^-11 of sum |q| |nu| over the pairs, so they are neither made nor
 * multiplied where that is far below 0.01 of a logit for all rows of a CTA.
 *
 * Before that, what queries are turned with and where their channels of tracked pairs are is expanded too, into the same
 * form, so that the attending warpgroups turn queries by their products, from registers to registers.
 */
#ifndef OSCAR_CUDA_PREFILL_EXPAND_CUH
#define OSCAR_CUDA_PREFILL_EXPAND_CUH

#include "decode_merge.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAVE_WGMMA 1
#else
#define HAVE_WGMMA 0
#endif

struct Wide {
    static constexpr int D = 128, CONSUMERS = 2, PRODUCERS = 2; /* warpgroups: the consumers come first */
    static constexpr int ROWS = 64 * CONSUMERS, THREADS = 128 * (PRODUCERS + CONSUMERS);
    static constexpr int STAGES = 4, KEYS = 16384, WAVES = 8192, STAGE = 2 * KEYS + WAVES, RAW = 4, TILE = 32 * D + 512;
    static constexpr int PAIRS = 16;
    static constexpr int OUT = D + 4; /* floats of an output row that is turned back */
    static constexpr int RAW_AT = STAGES * STAGE;
    /* What queries are turned with lies in the last stage, high halves and the channels of tracked pairs, and in a place that
     * later takes output rows, low halves. */
    static constexpr int TURN_HIGH_AT = (STAGES - 1) * STAGE, TURN_PAIRS_AT = TURN_HIGH_AT + 2 * KEYS;
    static constexpr int TURN_LOW_AT = RAW_AT + RAW * TILE;
    static constexpr int CONST_AT = TURN_LOW_AT + 2 * KEYS, MEAN_AT = CONST_AT + ROWS * 4, WAVE_TABLE_AT = MEAN_AT + D * 4;
    static constexpr int BARRIERS_AT = WAVE_TABLE_AT + 2 * 128 * 16 + PAIRS * 16; /* behind a WaveTable */
    static constexpr int LOW_AT = BARRIERS_AT + 8 * (RAW + 4 * STAGES); /* of each attending warpgroup: it needs low halves */
    static constexpr int BYTES = LOW_AT + 8 + 1024;                     /* the last to align the first */
    static_assert(TURN_HIGH_AT % 1024 == 0 && TURN_LOW_AT % 1024 == 0, "what products read begins at a swizzle's period");
    static_assert(ROWS * D * 2 <= 2 * KEYS, "output rows of 16 bits take the place of low halves");
    static_assert(ROWS * OUT * 4 <= RAW_AT, "outputs take the place of the stages");
    static_assert(RAW % PRODUCERS == 0 && STAGES % PRODUCERS == 0, "a stage and a raw tile are always of the same warpgroup");
};

#if HAVE_WGMMA
/* The rows of a CTA and what they see, in groups of 64 positions. Tiles come first: what is expanded ahead of the products
 * makes up at the end for rows of the overlay, which take longer to expand. */
struct WideBlock {
    int seq, head, chunk_first, cta_row, n_rows;
    int t_first, length; /* positions t_first .. length - 1 of the rows */
    int tile_first, n_tiles, sink_first, n_sink, recent_first, n_recent;

    DEVICE int count() const { return n_tiles + n_sink + n_recent; }
    DEVICE int kind(int item) const { return item < n_tiles ? ITEM_TILE : item < n_tiles + n_sink ? ITEM_SINK : ITEM_RECENT; }
    DEVICE int page(int item) const {
        return item < n_tiles            ? tile_first + item
               : item < n_tiles + n_sink ? sink_first + item - n_tiles
                                         : recent_first + item - n_tiles - n_sink;
    }
    /* Items that are tiles which every row of the CTA sees whole. */
    DEVICE Span clear_items(const DecodeParams &p) const {
        return {((visible(p, ITEM_TILE, length - 1).first + 63) >> 6) - tile_first,
                (visible(p, ITEM_TILE, t_first).last >> 6) - tile_first};
    }
    /* Position of the token of a row of the CTA; rows that do not exist are as the last. */
    DEVICE int token(const DecodeParams &p, int row) const {
        return chunk_first + divide(cta_row + min(row, n_rows - 1), p.gqa, p.gqa_magic);
    }
};

/* The rows of a CTA, before the length is known. */
DEVICE WideBlock wide_rows(const DecodeParams &p) {
    WideBlock b;
    /* The longest of all heads first. */
    const int at = blockIdx.y * gridDim.x + blockIdx.x, tile = at / p.n_kv_heads;
    b.head = at - tile * p.n_kv_heads;
    b.seq = blockIdx.z;
    b.cta_row = (gridDim.x - 1 - tile) * Wide::ROWS;
    b.n_rows = min(p.n_q_tokens * p.gqa - b.cta_row, Wide::ROWS);
    return b;
}

/* What they see. */
DEVICE void wide_items(const DecodeParams &p, WideBlock &b, int length) {
    b.chunk_first = length - p.n_q_tokens;
    b.t_first = b.token(p, 0);
    b.length = b.token(p, b.n_rows - 1) + 1;
    const Items i = items_between(p, b.t_first, b.length);
    b.sink_first = i.sink_first >> 3;
    b.n_sink = i.n_sink ? ((i.sink_first + i.n_sink + 7) >> 3) - b.sink_first : 0;
    b.recent_first = i.recent_first >> 3;
    b.n_recent = i.n_recent ? ((i.recent_first + i.n_recent + 7) >> 3) - b.recent_first : 0;
    b.tile_first = i.tile_first;
    b.n_tiles = i.n_tiles;
}

/* Shared addresses of barriers: of raw tiles, and of keys (with their waves) and values of a stage. */
struct WideBarriers {
    uint32_t raw_full, keys_full, keys_empty, values_full, values_empty;

    DEVICE explicit WideBarriers(uint32_t base)
        : raw_full(base), keys_full(raw_full + 8 * Wide::RAW), keys_empty(keys_full + 8 * Wide::STAGES),
          values_full(keys_empty + 8 * Wide::STAGES), values_empty(values_full + 8 * Wide::STAGES) {}

    DEVICE void init() const { /* by one thread */
        for (int i = 0; i < Wide::RAW; i++) barrier_init(raw_full + 8 * i, 1);
        for (int i = 0; i < Wide::STAGES; i++) {
            barrier_init(keys_full + 8 * i, 128);
            barrier_init(keys_empty + 8 * i, 4 * Wide::CONSUMERS);
            barrier_init(values_full + 8 * i, 128);
            barrier_init(values_empty + 8 * i, 4 * Wide::CONSUMERS);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
};

DEVICE void store_shared_two(uint32_t address, uint32_t a, uint32_t b) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

/* 1024 in both halves, as a value that is not known to be constant, nor to be the same in all threads: an instruction has
 * room for one constant, the mask, and takes nothing from a register of the warp. */
DEVICE uint32_t thousand() { return 0x64006400u + (thread_index() >> 31); }

/* The same value, as one that the loop around does not know: what is derived from it is computed where it is needed, and
 * takes no registers of the loop. One that does not fit is read back from the L2 cache, for shared memory leaves no room
 * in the first. */
DEVICE int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

/* Code i of both halves of a word, as fp16 numbers. */
template <int I> DEVICE __half2 code_value(uint32_t word, uint32_t thousand) {
    constexpr int AT = I < 5 ? I : I - 5; /* bits 2 AT of what is below 2^10 */
    uint32_t x; /* 1024 + c 4^AT */
    asm("lop3.b32 %0, %1, %2, %3, 0xea;"
        : "=r"(x)
        : "r"(I < 5 ? word : word >> 10), "n"(0x00030003u << (2 * AT)), "r"(thousand));
    constexpr float unit = 1.0f / (1 << (2 * AT));
    if (AT == 0) return __hsub2(bits_half2(x), __float2half2_rn(1024.0f));
    return __hfma2(bits_half2(x), __float2half2_rn(unit), __float2half2_rn(-1024.0f * unit));
}

/* Where a thread of a producer finds its words and parameters in a raw tile, and puts what they become in a stage. */
struct ExpandPlaces {
    int key_to, value_from, value_params, value_to;

    DEVICE explicit ExpandPlaces(int tid) {
        const int warp = tid >> 5, lane = tid & 31, t = lane & 3;
        const int place = 16 * warp + 4 * (lane >> 3) + (lane >> 2 & 1), chunk = 4 * (t & 1) + (t & 2);
        key_to = 8192 * (t >> 1) + 128 * place + ((chunk ^ (place & 7)) << 4);
        /* A half of the warp has even rows g, the other odd ones: no two lanes of a store meet in a bank. */
        const int g = (lane >> 1 & 6) | lane >> 4;
        value_from = 2048 + 512 * warp + 64 * g + 16 * t;
        value_params = 4096 + 256 + 64 * warp + 16 * t;
        value_to = 128 * g + (((2 * warp + (t >> 1)) ^ g) << 4) + 8 * (t & 1);
    }
};

/* Expands sub-tile `warp` of a tile. Lanes of the second panel take their words in the other order: no two lanes of a
 * store meet in a bank. */
DEVICE void expand_keys(const uint8_t *tile, uint32_t to, uint32_t thousand, const ExpandPlaces &at, int tid) {
    const uint4 words = *reinterpret_cast<const uint4 *>(tile + 16 * tid);
    const uint2 params = *reinterpret_cast<const uint2 *>(tile + 4096 + 2 * (tid & 0x7c));
    const int base = at.key_to;
    const bool second_panel = tid & 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const __half2 sm = bits_half2(h ? params.y : params.x), step = __low2half2(sm), offset = __high2half2(sm);
#pragma unroll
        for (int w = 0; w < 2; w++) { /* word w ^ t / 2 */
            const uint32_t first = h ? words.z : words.x, second = h ? words.w : words.y;
            const uint32_t x = second_panel ? (w ? first : second) : (w ? second : first);
            uint32_t v[8];
            v[0] = half2_bits(__hfma2(code_value<0>(x, thousand), step, offset));
            v[1] = half2_bits(__hfma2(code_value<1>(x, thousand), step, offset));
            v[2] = half2_bits(__hfma2(code_value<2>(x, thousand), step, offset));
            v[3] = half2_bits(__hfma2(code_value<3>(x, thousand), step, offset));
            v[4] = half2_bits(__hfma2(code_value<4>(x, thousand), step, offset));
            v[5] = half2_bits(__hfma2(code_value<5>(x, thousand), step, offset));
            v[6] = half2_bits(__hfma2(code_value<6>(x, thousand), step, offset));
            v[7] = half2_bits(__hfma2(code_value<7>(x, thousand), step, offset));
            const uint32_t v_at = to + (base ^ (32 * (w ^ h)));
            store_shared(v_at + 256 * h, v[0], v[1], v[2], v[3]);
            store_shared((v_at ^ 16) + 256 * h, v[4], v[5], v[6], v[7]);
        }
    }
}

/* n: tokens of the page that exist; the others may never have been written. */
DEVICE void expand_values(const uint8_t *tile, uint32_t to, uint32_t thousand, const ExpandPlaces &at, int n) {
    const uint4 words = *reinterpret_cast<const uint4 *>(tile + at.value_from);
    uint4 params = *reinterpret_cast<const uint4 *>(tile + at.value_params);
    if (n < 64) {
        const int tid = thread_index(), token = (tid >> 5 & 3) * 16 + 2 * (tid & 3);
        if (token >= n) params.x = 0;
        if (token + 8 >= n) params.y = 0;
        if (token + 1 >= n) params.z = 0;
        if (token + 9 >= n) params.w = 0;
    }
    const __half2 step0 = bits_half2(__byte_perm(params.x, params.z, 0x5410));
    const __half2 offset0 = bits_half2(__byte_perm(params.x, params.z, 0x7632));
    const __half2 step1 = bits_half2(__byte_perm(params.y, params.w, 0x5410));
    const __half2 offset1 = bits_half2(__byte_perm(params.y, params.w, 0x7632));
    const uint32_t base = to + at.value_to;
#pragma unroll
    for (int w = 0; w < 2; w++) {
        const uint32_t x = w ? words.y : words.x, y = w ? words.w : words.z;
        auto put = [&](int i, __half2 a, __half2 b) {
            store_shared_two(base + 128 * (64 * w + 16 * (i & 3) + 8 * (i >> 2)), half2_bits(__hfma2(a, step0, offset0)),
                         half2_bits(__hfma2(b, step1, offset1)));
        };
        put(0, code_value<0>(x, thousand), code_value<0>(y, thousand));
        put(1, code_value<1>(x, thousand), code_value<1>(y, thousand));
        put(2, code_value<2>(x, thousand), code_value<2>(y, thousand));
        put(3, code_value<3>(x, thousand), code_value<3>(y, thousand));
        put(4, code_value<4>(x, thousand), code_value<4>(y, thousand));
        put(5, code_value<5>(x, thousand), code_value<5>(y, thousand));
        put(6, code_value<6>(x, thousand), code_value<6>(y, thousand));
        put(7, code_value<7>(x, thousand), code_value<7>(y, thousand));
    }
}

/* To fp16; what that cannot hold becomes its largest number. */
DEVICE uint32_t pack_half2_bounded(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

/* First of 64 rows of the overlay. Behind the sink's are those of the ring: reading past the last is no harm. */
DEVICE size_t overlay_rows(const DecodeParams &p, const WideBlock &b, int kind, int page) {
    const int slot = p.slots ? load_int(p.slots + b.seq) : b.seq;
    return static_cast<size_t>(slot * p.n_kv_heads + b.head) * (p.sink8 + p.ring) +
           (kind == ITEM_SINK ? 64 * page : p.sink8 + 64 * page % p.ring);
}

/* 64 rows of the overlay: their keys. Cold code: nothing of it is kept for the loop over tiles. All loads are on their way
 * together, for a row takes longer to come than to expand. */
DEVICE void expand_overlay_keys(const DecodeParams &p, const WideBlock &b, int kind, int page, uint32_t to) {
    const int tid = thread_index() & 127, row = tid >> 3, c = tid & 7; /* rows `row` + 16 j, channels 16 c .. */
    const uint16_t *from = p.overlay_k + (overlay_rows(p, b, kind, page) + row) * Wide::D + 16 * c;
    uint4 x[4][2];
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int k = 0; k < 2; k++) x[j][k] = load_uint4(from + 16 * Wide::D * j + 8 * k);
    const int place = (row & 1) | (row & 6) << 1 | (row & 8) >> 2;
    const uint32_t first = to + 8192 * (c >> 2) + 128 * place + (((2 * c & 7) ^ (place & 7)) << 4);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint32_t a[4] = {x[j][0].x, x[j][0].y, x[j][0].z, x[j][0].w}, d[4] = {x[j][1].x, x[j][1].y, x[j][1].z, x[j][1].w};
        uint32_t v[8];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            v[2 * k] = pack_half2_bounded(bf16_low(a[k]), bf16_low(d[k]));
            v[2 * k + 1] = pack_half2_bounded(bf16_high(a[k]), bf16_high(d[k]));
        }
        store_shared(first + 2048 * j, v[0], v[1], v[2], v[3]);
        store_shared((first ^ 16) + 2048 * j, v[4], v[5], v[6], v[7]);
    }
}

/* Their values; rows that no query of the CTA sees may never have been written. A warp has 32 channels of eight rows at a time,
 * those whose places are neighbours: a lane eight channels of a row, of which it stores two in each of four matrices. */
DEVICE void expand_overlay_values(const DecodeParams &p, const WideBlock &b, int kind, int page, uint32_t to) {
    const int tid = thread_index() & 127, lane = tid & 31, warp = tid >> 5, g = lane >> 2;
    const int row = (g & 1) + 2 * (g >> 2) + 8 * (g >> 1 & 1); /* of places 8 i .. + 7: row + 16 (i / 2) + 4 (i % 2) */
    const uint16_t *from = p.overlay_v + (overlay_rows(p, b, kind, page) + row) * Wide::D + 32 * warp + 8 * (lane & 3);
    uint4 x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = load_uint4(from + (16 * (i >> 1) + 4 * (i & 1)) * Wide::D);
    const int first = visible(p, kind, b.t_first).first - 64 * page, last = visible(p, kind, b.length - 1).last - 64 * page;
    const int channel = 32 * warp + 8 * (lane >> 1 & 3) + 2 * (lane >> 3) + (lane & 1); /* whose row the lane says the place of */
    const uint32_t base = to + 128 * channel + ((channel & 7) << 4);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int r = row + 16 * (i >> 1) + 4 * (i & 1);
        const bool seen = r >= first && r < last;
        const uint32_t w[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
        uint32_t v[4];
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = seen ? pack_half2_bounded(bf16_low(w[k]), bf16_high(w[k])) : 0u;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(base ^ 16 * i), "r"(v[0]),
                     "r"(v[1]), "r"(v[2]), "r"(v[3])
                     : "memory");
    }
}

/* What waves are made of, in shared memory, for registers are short: e^{i x f} of four pairs, 2 t, 2 t + 1, 2 t + 8,
 * 2 t + 9, and of one distance x from the middle of a page, as a thread of a warpgroup has them; nu of the middle of
 * page 0 and the turn a page. */
struct WaveTable {
    float4 even[128], odd[128];
    float2 nu[Wide::PAIRS];
    unsigned long long turn[Wide::PAIRS];

    /* A half of the warp has even rows, the other odd ones: no two lanes of a store meet in a bank. */
    DEVICE static int row_of(int lane) { return (lane >> 1 & 6) | lane >> 4; }

    /* By the threads of one warpgroup. */
    DEVICE void load(const DecodeParams &p, int head, int tid) {
        const int lane = tid & 31, g = row_of(lane), t = lane & 3, pair = head * Wide::PAIRS + (tid & 15);
        const uint4 *from = p.bias_table + head * 256 + (tid & 32) + 16 * (tid >> 6) + 8 * (g >> 2) + 4 * (g & 1) + t;
        const bool upper = g & 2;
        const uint4 e = from[0], e_low = from[64], o = from[128], o_low = from[192];
        const float unit = __ldg(p.bias_units + head);
        const float2 x = __ldg(reinterpret_cast<const float2 *>(p.bias_nu) + pair);
        const unsigned long long page = __ldg(p.bias_turn + pair);
        auto two = [&](const uint4 &x, const uint4 &x_low, int k) {
            const float2 a = __half22float2(bits_half2(k ? (upper ? x.w : x.z) : (upper ? x.y : x.x)));
            const float2 b = __half22float2(bits_half2(k ? (upper ? x_low.w : x_low.z) : (upper ? x_low.y : x_low.x)));
            return make_float2(a.x + b.x, a.y + b.y);
        };
        const float2 e0 = two(e, e_low, 0), e1 = two(e, e_low, 1), o0 = two(o, o_low, 0), o1 = two(o, o_low, 1);
        even[tid] = make_float4(1 + e0.x, 1 + e0.y, 1 + e1.x, 1 + e1.y);
        odd[tid] = make_float4(o0.x, o0.y, o1.x, o1.y);
        if (tid < Wide::PAIRS) {
            nu[tid] = make_float2(x.x * unit, x.y * unit);
            turn[tid] = page;
        }
    }

    /* One place's waves of one dim. */
    DEVICE static void put(uint32_t at, const float (&x)[4], bool low) {
        const uint32_t a = pack_half2(x[0], x[1]), b = pack_half2(x[2], x[3]);
        store_shared_two(at, a, b);
        if (!low) return;
        const float2 f = __half22float2(bits_half2(a)), h = __half22float2(bits_half2(b));
        store_shared_two(at ^ 64, pack_half2(x[0] - f.x, x[1] - f.y), pack_half2(x[2] - h.x, x[3] - h.y));
    }

    /* The waves of a page. */
    DEVICE void expand(int page, uint32_t waves, int tid, bool low) const {
        const int lane = tid & 31, g = row_of(lane), t = lane & 3, place = (tid >> 1 & 16) + 8 * (tid >> 6) + g;
        const float2 phase = bias_phase(turn[tid & 15], page), z = nu[tid & 15];
        const float2 middle = make_float2(z.x * phase.x - z.y * phase.y, z.x * phase.y + z.y * phase.x);
        const uint32_t after = waves + 128 * (32 + place) + ((g ^ t >> 1) << 4) + 8 * (t & 1);
        const uint32_t before = waves + 128 * (31 - place) + ((7 - g ^ t >> 1) << 4) + 8 * (t & 1);
        const float4 us = even[tid], vs = odd[tid];
        const float u[4] = {us.x, us.y, us.z, us.w}, v[4] = {vs.x, vs.y, vs.z, vs.w};
        float up[2][4], down[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int pair = 2 * t + 8 * (i >> 1) + (i & 1);
            const float x = __shfl_sync(FULL_WARP, middle.x, pair), y = __shfl_sync(FULL_WARP, middle.y, pair);
            up[0][i] = x * u[i] - y * v[i];
            up[1][i] = y * u[i] + x * v[i];
            down[0][i] = x * u[i] + y * v[i];
            down[1][i] = y * u[i] - x * v[i];
        }
#pragma unroll
        for (int part = 0; part < 2; part++) { /* chunk t / 2 of first dims, 2 + t / 2 of second dims */
            put(after ^ 32 * part, up[part], low);
            put(before ^ 32 * part, down[part], low);
        }
    }
};

/* Where the word of 2 channels of a query that thread t has for step k is in a panel's row of the matrix that queries are
 * turned with; half: the step's first or last eight. */
DEVICE uint32_t turn_place(int row, int k, int half, int t) {
    return (128 * row + ((row & 7) << 4) + 4 * t) ^ (2 * (k & 3) + half) << 4;
}

/* U^T as two halves, [128, 128] each, as a warpgroup multiplies queries with it: 2 panels of 64 input channels. Output channel
 * 16 c + i has place 16 c + 2 i, channel 16 c + 8 + i the place behind it, as in keys. Each of eight warps brings 16 places,
 * which are on their way while it does other things. */
struct WideTurn {
    uint4 u[8];

    DEVICE void load(const DecodeParams &p, int head, bool low, int warp, int lane) {
        const uint4 *from = p.k_rotation + (static_cast<size_t>(head) * 8 + warp) * 8 * 64 + 32 * low + lane;
#pragma unroll
        for (int k = 0; k < 8; k++) u[k] = load_kept(from + 64 * k);
    }
    DEVICE void store(uint32_t to, int warp, int lane) const {
        const uint32_t base = to + turn_place(16 * warp + 2 * (lane >> 2), 0, 0, lane & 3);
#pragma unroll
        for (int k = 0; k < 8; k++)
#pragma unroll
            for (int half = 0; half < 2; half++) { /* the next row is 128 + 16 behind, before chunks are swizzled */
                const uint32_t place = (base ^ (2 * (k & 3) + half) << 4) + Wide::KEYS * (k >> 2);
                store_shared(place, half ? u[k].z : u[k].x);
                store_shared((place ^ 16) + 128, half ? u[k].w : u[k].y);
            }
    }
};

/* What the expanding warpgroups bring besides: barriers, the values' mean, and a matrix that picks the channels of pairs,
 * [32, 128], rows with a one each in the order of waves, 2 panels as of U^T. */
template <bool BIAS> DEVICE void wide_stage(const DecodeParams &p, int head, uint8_t *shared, const WideBarriers &at) {
    const int tid = static_cast<int>(threadIdx.x) - 128 * Wide::CONSUMERS, lane = tid & 31;
    const uint32_t ones = shared_address(shared + Wide::TURN_PAIRS_AT);
    int channel = 0;
    float mean = 0;
    if (tid < Wide::D && p.v_mean_rotated) mean = __ldg(p.v_mean_rotated + head * Wide::D + tid);
    if constexpr (BIAS) {
        const int i = lane & 15, pair = (i >> 2) * 2 + (i & 1) + 8 * (i >> 1 & 1); /* of row `lane`: its first or second dim */
        channel = __ldg(reinterpret_cast<const int *>(p.bias_dims) + 2 * (head * Wide::PAIRS + pair) + (lane >> 4));
        store_shared(ones + 16 * tid, 0, 0, 0, 0);
        store_shared(ones + 4096 + 16 * tid, 0, 0, 0, 0);
    }
    if (tid == 0) at.init();
    asm volatile("bar.sync 6, %0;" ::"n"(128 * Wide::PRODUCERS) : "memory");
    if (tid < Wide::D) reinterpret_cast<float *>(shared + Wide::MEAN_AT)[tid] = mean;
    if (BIAS && tid < 32) {
        const int k = channel >> 5 << 1 | (channel >> 2 & 1);
        const uint32_t one = ones + 4096 * (k >> 2) + turn_place(lane, k, channel >> 1 & 1, channel >> 3 & 3) + 2 * (channel & 1);
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(one), "h"(static_cast<unsigned short>(0x3c00)) : "memory");
    }
}

/* The phase after which an item's stage is empty: one that was never filled is, but the last, which had what queries are
 * turned with. */
DEVICE uint32_t stage_phase(int item) { return ~(static_cast<uint32_t>(item + 1) / Wide::STAGES) & 1; }

/* Keys or values of a stage are there. */
DEVICE void stage_full(uint32_t barrier) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    barrier_arrive(barrier);
}

/* Whether an attending warpgroup needs low halves of waves: known when a stage has been released. */
DEVICE bool low_halves(uint32_t needs) {
    uint32_t a, b;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(needs) : "memory");
    return a | b;
}

/* The overlay's items, from `item` every other. Not in the loop over tiles, so that no register is taken from that. */
template <bool BIAS>
DEVICE void expand_overlay(const DecodeParams &p, const WideBlock &b, uint8_t *shared, const WideBarriers &at,
                           const WaveTable *wave, uint32_t needs, int item, int n_items) {
#pragma unroll 1
    for (; item < n_items; item += Wide::PRODUCERS) {
        const int kind = b.kind(item), page = b.page(item);
        const uint32_t stage = static_cast<uint32_t>(item) % Wide::STAGES;
        const uint32_t keys = shared_address(shared + stage * Wide::STAGE), values = keys + Wide::KEYS;
        const uint32_t phase = stage_phase(item);
        barrier_wait(at.keys_empty + 8 * stage, phase);
        expand_overlay_keys(p, b, kind, page, keys);
        if (BIAS) wave->expand(page, values + Wide::KEYS, thread_index() & 127, item < Wide::STAGES || low_halves(needs));
        stage_full(at.keys_full + 8 * stage);
        barrier_wait(at.values_empty + 8 * stage, phase);
        expand_overlay_values(p, b, kind, page, values);
        stage_full(at.values_full + 8 * stage);
    }
}

/* Threads 128 CONSUMERS and up. turn: high halves of what queries are turned with, on their way. */
template <bool BIAS>
DEVICE void expand_all(const DecodeParams &p, const WideBlock &b, WideTurn &turn, uint8_t *shared, const WideBarriers &at) {
    const int group = uniform(static_cast<int>(threadIdx.x) >> 7) - Wide::CONSUMERS, tid = threadIdx.x & 127;
    const int warp = (static_cast<int>(threadIdx.x) >> 5) - 4 * Wide::CONSUMERS, n_items = b.count();
    /* Tiles are asked for by the warps in turn, so that none of them falls back; by a lane that has asked for the page's id
     * at its last turn. */
    auto id_of = [&](int tile) {
        const size_t row = static_cast<size_t>(anew(b.seq)) * p.table_stride;
        return tile < b.n_tiles ? load_int(p.block_table + row + b.tile_first + tile) : 0;
    };
    auto fetch = [&](int tile, int id) {
        const uint32_t page_bytes = p.n_kv_heads * Wide::TILE;
        const uint8_t *from = p.pages + static_cast<uint64_t>(static_cast<uint32_t>(id)) * page_bytes + anew(b.head) * Wide::TILE;
        bulk_copy(shared_address(shared + Wide::RAW_AT + tile % Wide::RAW * Wide::TILE), from, Wide::TILE,
                  at.raw_full + 8 * (tile % Wide::RAW));
    };
    const int mine = group + Wide::PRODUCERS * (tid >> 5); /* the first tile that the warp asks for */
    int id = (tid & 31) == 0 && mine < Wide::RAW ? id_of(mine) : 0;
    turn.store(shared_address(shared + Wide::TURN_HIGH_AT), warp, tid & 31);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.arrive 11, %0;" ::"n"(Wide::THREADS) : "memory");
    turn.load(p, b.head, true, warp, tid & 31);
    if ((tid & 31) == 0) {
        if (mine < min(Wide::RAW, b.n_tiles)) fetch(mine, id);
        id = id_of(mine + Wide::RAW);
    }
    turn.store(shared_address(shared + Wide::TURN_LOW_AT), warp, tid & 31);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.arrive 9, %0;" ::"n"(Wide::THREADS) : "memory");
    const int exist = visible(p, ITEM_TILE, b.length - 1).last;
    const uint32_t k1024 = thousand();
    const ExpandPlaces places(tid);
    const WaveTable *wave = reinterpret_cast<const WaveTable *>(shared + Wide::WAVE_TABLE_AT);
    const uint32_t needs = shared_address(shared + Wide::LOW_AT);
    if (BIAS) asm volatile("bar.sync 10, %0;" ::"n"(Wide::THREADS) : "memory"); /* the waves' table is there */
#pragma unroll 1
    for (int tile = group; tile < b.n_tiles; tile += Wide::PRODUCERS) {
        const int page = b.tile_first + tile;
        const uint32_t stage = static_cast<uint32_t>(tile) % Wide::STAGES, slot = static_cast<uint32_t>(tile) % Wide::RAW;
        const uint32_t keys = shared_address(shared + stage * Wide::STAGE), values = keys + Wide::KEYS;
        const uint32_t phase = stage_phase(tile);
        const uint8_t *from = shared + Wide::RAW_AT + slot * Wide::TILE;
        barrier_wait(at.keys_empty + 8 * stage, phase);
        barrier_wait(at.raw_full + 8 * slot, static_cast<uint32_t>(tile) / Wide::RAW & 1);
        expand_keys(from, keys, k1024, places, tid);
        if (BIAS) wave->expand(page, values + Wide::KEYS, tid, tile < Wide::STAGES || low_halves(needs));
        stage_full(at.keys_full + 8 * stage);
        barrier_wait(at.values_empty + 8 * stage, phase);
        expand_values(from, values, k1024, places, exist - 64 * page);
        stage_full(at.values_full + 8 * stage);
        asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); /* the tile has been read */
        if (tid == 32 * (tile / Wide::PRODUCERS % 4) && tile + Wide::RAW < b.n_tiles) {
            fetch(tile + Wide::RAW, id);
            id = id_of(tile + Wide::RAW + 4 * Wide::PRODUCERS);
        }
    }
    expand_overlay<BIAS>(p, b, shared, at, wave, needs, b.n_tiles + ((b.n_tiles + group) & 1), n_items);
}

#endif

#endif
