/*
 * prefill_wgmma.cu - attention of many query tokens at head_dim 128, on the asynchronous tensor cores of compute
 * capability 9.0a: two bits, at most 16 tracked pairs, no soft cap. What else there is, prefill.cuh does.
 *
 * Two warpgroups expand, every other tile each: they turn tiles into fp16 keys and values in shared memory,
 * (step code + offset) rounded once, and rows of the overlay likewise. Two warpgroups attend, 64 rows each, as for any
 * fp16 cache: scores from queries in registers, a softmax in registers, whose probabilities are the A operand of the
 * second product. The expansion takes issue slots that the products leave free.
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
 */
#include "decode_merge.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAVE_WGMMA 1
#else
#define HAVE_WGMMA 0
#endif

namespace {

struct Wide {
    static constexpr int D = 128, CONSUMERS = 2, PRODUCERS = 2; /* warpgroups: the consumers come first */
    static constexpr int ROWS = 64 * CONSUMERS, THREADS = 128 * (PRODUCERS + CONSUMERS);
    static constexpr int STAGES = 4, KEYS = 16384, WAVES = 8192, STAGE = 2 * KEYS + WAVES, RAW = 4, TILE = 32 * D + 512;
    static constexpr int PAIRS = 16;
    static constexpr int NATURAL = D + 8; /* halves of a query row: the padding spreads rows over the banks */
    static constexpr int OUT = D + 4;     /* floats of an output row */
    static constexpr int RAW_AT = STAGES * STAGE, QUERY_AT = RAW_AT + RAW * TILE;
    static constexpr int CONST_AT = QUERY_AT + ROWS * NATURAL * 2, WAVE_TABLE_AT = CONST_AT + ROWS * 4;
    static constexpr int BARRIERS_AT = WAVE_TABLE_AT + 2 * 128 * 16 + PAIRS * 16; /* behind a WaveTable */
    static constexpr int LOW_AT = BARRIERS_AT + 8 * (RAW + 4 * STAGES); /* of each attending warpgroup: it needs low halves */
    static constexpr int BYTES = LOW_AT + 8 + 1024;                     /* the last to align the first */
    static_assert(ROWS * OUT * 4 <= RAW_AT, "outputs take the place of the stages");
    static_assert(RAW % PRODUCERS == 0 && STAGES % PRODUCERS == 0, "a stage and a raw tile are always of the same warpgroup");
};

#if HAVE_WGMMA
/* The rows of a CTA and what they see, in groups of 64 positions. */
struct WideBlock {
    int seq, head, chunk_first, cta_row, n_rows;
    int t_first, length; /* positions t_first .. length - 1 of the rows */
    int sink_first, n_sink, recent_first, n_recent, tile_first, n_tiles;

    DEVICE int count() const { return n_sink + n_recent + n_tiles; }
    DEVICE int kind(int item) const { return item < n_sink ? ITEM_SINK : item < n_sink + n_recent ? ITEM_RECENT : ITEM_TILE; }
    DEVICE int page(int item) const {
        return item < n_sink              ? sink_first + item
               : item < n_sink + n_recent ? recent_first + item - n_sink
                                          : tile_first + item - n_sink - n_recent;
    }
    /* Items that are tiles which every row of the CTA sees whole. */
    DEVICE Span clear_items(const DecodeParams &p) const {
        const int units = n_sink + n_recent, tile0 = units - tile_first;
        return {max(units, tile0 + ((visible(p, ITEM_TILE, length - 1).first + 63) >> 6)),
                tile0 + (visible(p, ITEM_TILE, t_first).last >> 6)};
    }
    /* Position of the token of a row of the CTA; rows that do not exist are as the last. */
    DEVICE int token(const DecodeParams &p, int row) const {
        return chunk_first + divide(cta_row + min(row, n_rows - 1), p.gqa, p.gqa_magic);
    }
};

DEVICE WideBlock wide_block(const DecodeParams &p, int length) {
    WideBlock b;
    /* The longest of all heads first. */
    const int at = blockIdx.y * gridDim.x + blockIdx.x;
    b.head = at % p.n_kv_heads;
    b.seq = blockIdx.z;
    b.cta_row = (gridDim.x - 1 - at / p.n_kv_heads) * Wide::ROWS;
    b.n_rows = min(p.n_q_tokens * p.gqa - b.cta_row, Wide::ROWS);
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
    return b;
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

/* --- the expanding warpgroups -------------------------------------------------------------------- */

DEVICE void store_shared_two(uint32_t address, uint32_t a, uint32_t b) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

/* 1024 in both halves, as a value that is not known to be constant: an instruction has room for one constant, the mask. */
DEVICE uint32_t thousand(const DecodeParams &p) { return 0x64006400u + (p.n_kv_heads >> 31); }

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
    const int base = anew(at.key_to);
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
    const uint32_t base = to + anew(at.value_to);
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

/* bf16 to fp16; what fp16 cannot hold becomes its largest number. */
DEVICE float half_range(float x) { return fminf(fmaxf(x, -65504.0f), 65504.0f); }

/* First of 64 rows of the overlay. n: rows that there are. */
DEVICE size_t overlay_rows(const DecodeParams &p, const WideBlock &b, int kind, int page, int &n) {
    const int slot = p.slots ? load_int(p.slots + b.seq) : b.seq;
    n = kind == ITEM_SINK ? min(p.sink8 - 64 * page, 64) : 64;
    return static_cast<size_t>(slot * p.n_kv_heads + b.head) * (p.sink8 + p.ring) +
           (kind == ITEM_SINK ? 64 * page : p.sink8 + 64 * page % p.ring);
}

/* 64 rows of the overlay: their keys. Cold code: nothing of it is kept for the loop over tiles. */
DEVICE void expand_overlay_keys(const DecodeParams &p, const WideBlock &b, int kind, int page, uint32_t to) {
    int n;
    const uint16_t *from = p.overlay_k + overlay_rows(p, b, kind, page, n) * Wide::D;
#pragma unroll 2
    for (int i = thread_index() & 127; i < 512; i += 128) {
        const int row = i >> 3, c = i & 7, place = (row & 0x31) | (row & 6) << 1 | (row & 8) >> 2;
        const uint16_t *at = from + min(row, n - 1) * Wide::D + 16 * c;
        const uint4 low = load_uint4(at), high = load_uint4(at + 8);
        const uint32_t a[4] = {low.x, low.y, low.z, low.w}, d[4] = {high.x, high.y, high.z, high.w};
        uint32_t v[8];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            v[2 * k] = pack_half2(half_range(bf16_low(a[k])), half_range(bf16_low(d[k])));
            v[2 * k + 1] = pack_half2(half_range(bf16_high(a[k])), half_range(bf16_high(d[k])));
        }
        const uint32_t base = to + 8192 * (c >> 2) + 128 * place;
        store_shared(base + (((2 * c & 7) ^ (place & 7)) << 4), v[0], v[1], v[2], v[3]);
        store_shared(base + ((((2 * c + 1) & 7) ^ (place & 7)) << 4), v[4], v[5], v[6], v[7]);
    }
}

/* Their values; rows that no query of the CTA sees may never have been written. A lane has two rows. */
DEVICE void expand_overlay_values(const DecodeParams &p, const WideBlock &b, int kind, int page, uint32_t to) {
    int n;
    const uint16_t *from = p.overlay_v + overlay_rows(p, b, kind, page, n) * Wide::D;
    const int tid = thread_index() & 127, lane = tid & 31;
    const int first = visible(p, kind, b.t_first).first - 64 * page, last = visible(p, kind, b.length - 1).last - 64 * page;
    const int row = 2 * lane, place = (lane & 0x18) | (lane & 3) << 1 | (lane & 4) >> 2; /* halved */
    const uint32_t keep = (row >= first && row < last ? 0x0000ffffu : 0u) |
                          (row + 1 >= first && row + 1 < last ? 0xffff0000u : 0u);
#pragma unroll 2
    for (int c = tid >> 5; c < 16; c += 4) { /* channels 8 c .. */
        const uint4 one = load_uint4(from + min(row, n - 1) * Wide::D + 8 * c);
        const uint4 two = load_uint4(from + min(row + 1, n - 1) * Wide::D + 8 * c);
        const uint32_t a[4] = {one.x, one.y, one.z, one.w}, d[4] = {two.x, two.y, two.z, two.w};
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float x = k & 1 ? bf16_high(a[k / 2]) : bf16_low(a[k / 2]);
            const float y = k & 1 ? bf16_high(d[k / 2]) : bf16_low(d[k / 2]);
            store_shared(to + 128 * (8 * c + k) + (((place >> 2) ^ k) << 4) + 4 * (place & 3),
                         pack_half2(half_range(x), half_range(y)) & keep);
        }
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
        const int lane = tid & 31, g = row_of(lane), t = lane & 3;
        const uint4 *from = p.bias_table + head * 256 + (tid & 32) + 16 * (tid >> 6) + 8 * (g >> 2) + 4 * (g & 1) + t;
        const bool upper = g & 2;
        const uint4 e = from[0], e_low = from[64], o = from[128], o_low = from[192];
        auto two = [&](const uint4 &x, const uint4 &x_low, int k) {
            const float2 a = __half22float2(bits_half2(k ? (upper ? x.w : x.z) : (upper ? x.y : x.x)));
            const float2 b = __half22float2(bits_half2(k ? (upper ? x_low.w : x_low.z) : (upper ? x_low.y : x_low.x)));
            return make_float2(a.x + b.x, a.y + b.y);
        };
        const float2 e0 = two(e, e_low, 0), e1 = two(e, e_low, 1), o0 = two(o, o_low, 0), o1 = two(o, o_low, 1);
        even[tid] = make_float4(1 + e0.x, 1 + e0.y, 1 + e1.x, 1 + e1.y);
        odd[tid] = make_float4(o0.x, o0.y, o1.x, o1.y);
        if (tid < Wide::PAIRS) {
            const float unit = __ldg(p.bias_units + head);
            const float2 x = __ldg(reinterpret_cast<const float2 *>(p.bias_nu) + head * Wide::PAIRS + tid);
            nu[tid] = make_float2(x.x * unit, x.y * unit);
            turn[tid] = __ldg(p.bias_turn + head * Wide::PAIRS + tid);
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

/* Threads 128 CONSUMERS and up. */
template <bool BIAS> DEVICE void expand_all(const DecodeParams &p, const WideBlock &b, uint8_t *shared, const WideBarriers &at) {
    const int group = (static_cast<int>(threadIdx.x) >> 7) - Wide::CONSUMERS, tid = threadIdx.x & 127;
    const int n_items = b.count(), units = n_items - b.n_tiles;
    const uint32_t k1024 = thousand(p);
    const ExpandPlaces places(tid);
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
    const int first = (units + group) % Wide::PRODUCERS; /* tile */
    int id = 0;
    if ((tid & 31) == 0) {
        if (tid == 0)
            for (int i = first; i < min(Wide::RAW, b.n_tiles); i += Wide::PRODUCERS) fetch(i, id_of(i));
        id = id_of(first + Wide::PRODUCERS * (tid >> 5) + Wide::RAW);
    }
    const int exist = visible(p, ITEM_TILE, b.length - 1).last;
    WaveTable *wave = reinterpret_cast<WaveTable *>(shared + Wide::WAVE_TABLE_AT);
    if (BIAS) {
        if (group == 0) wave->load(p, b.head, tid);
        asm volatile("bar.sync 6, %0;" ::"n"(128 * Wide::PRODUCERS) : "memory");
    }
#pragma unroll 1
    for (int item = group; item < n_items; item += Wide::PRODUCERS) {
        const int page = b.page(item), tile = item - units;
        const uint32_t stage = static_cast<uint32_t>(item) % Wide::STAGES, slot = static_cast<uint32_t>(tile) % Wide::RAW;
        const uint32_t keys = shared_address(shared + stage * Wide::STAGE), values = keys + Wide::KEYS;
        const uint32_t phase = ~(static_cast<uint32_t>(item) / Wide::STAGES) & 1; /* a stage that was never filled is empty */
        const uint8_t *from = shared + Wide::RAW_AT + slot * Wide::TILE;
        barrier_wait(at.keys_empty + 8 * stage, phase);
        if (tile >= 0) {
            barrier_wait(at.raw_full + 8 * slot, static_cast<uint32_t>(tile) / Wide::RAW & 1);
            expand_keys(from, keys, k1024, places, anew(tid));
        } else {
            expand_overlay_keys(p, b, b.kind(item), page, keys);
        }
        if (BIAS) {
            /* Known when a stage has been released. */
            const volatile uint32_t *needs = reinterpret_cast<const volatile uint32_t *>(shared + Wide::LOW_AT);
            wave->expand(page, values + Wide::KEYS, anew(tid), item < Wide::STAGES || (needs[0] | needs[1]));
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_arrive(at.keys_full + 8 * stage);
        barrier_wait(at.values_empty + 8 * stage, phase);
        if (tile >= 0)
            expand_values(from, values, k1024, places, exist - 64 * page);
        else
            expand_overlay_values(p, b, b.kind(item), page, values);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_arrive(at.values_full + 8 * stage);
        asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); /* the tile has been read */
        if (tid == 32 * (tile / Wide::PRODUCERS % 4) && tile >= 0 && tile + Wide::RAW < b.n_tiles) {
            fetch(tile + Wide::RAW, id);
            id = id_of(tile + Wide::RAW + 4 * Wide::PRODUCERS);
        }
    }
}

/* --- the attending warpgroups -------------------------------------------------------------------- */

/* Rows of 128 bytes, 128-byte swizzle, groups of 8 rows 1,024 bytes apart. at: bytes behind the address. */
DEVICE uint64_t matrix_of(uint32_t address, uint32_t at) {
    const uint32_t low = (address >> 4 | 1u << 16) + (at >> 4), high = 64u | 1u << 30;
    return static_cast<uint64_t>(high) << 32 | low;
}
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
/* Accumulators that asynchronous products write: no use of them moves from one side of this to the other. */
template <int N> DEVICE void wgmma_settle(float (&c)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i])::"memory");
}

#define FOUR(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define SIXTEEN(x, i) FOUR(x, i), FOUR(x, i + 4), FOUR(x, i + 8), FOUR(x, i + 12)

/* c [64, 64] (+)= a [64, 16] b [16, 64]; b: rows are the columns of c. */
DEVICE void wgmma_64(float (&c)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %37, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,"
        "%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;\n\t}"
        : SIXTEEN(c, 0), SIXTEEN(c, 16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
/* c [64, 128] += a [64, 16] b [16, 128]. */
DEVICE void wgmma_128(float (&c)[64], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,"
        "%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,"
        "%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
        : SIXTEEN(c, 0), SIXTEEN(c, 16), SIXTEEN(c, 32), SIXTEEN(c, 48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef FOUR
#undef SIXTEEN

/* A thread's two rows, g and g + 8 of its warp's sixteen. */
struct WideRows {
    uint32_t q[8][4];
    uint32_t pairs[2][4]; /* the first and second dims of tracked pairs, not rotated: A operands */
    float out[64];
    float max[2], sum[2]; /* raw */
    float scale;          /* raw scores to log2 */
};

/* Of the CTA, the first of a thread's two rows. */
DEVICE int wide_first_row() {
    const int tid = thread_index();
    return (tid >> 5) * 16 + (tid >> 2 & 7);
}

/* First element of a row of the CTA, or NULL. */
DEVICE const uint16_t *wide_row(const DecodeParams &p, const WideBlock &b, int row) {
    if (row >= b.n_rows) return nullptr;
    const int at = b.cta_row + row, token = divide(at, p.gqa, p.gqa_magic), head = b.head * p.gqa + at - token * p.gqa;
    return p.q + (static_cast<size_t>(b.seq * p.n_q_tokens + token) * (p.n_kv_heads * p.gqa) + head) * Wide::D;
}

DEVICE float2 query_floats(const DecodeParams &p, uint32_t word) {
    return p.q_is_bf16 ? make_float2(bf16_low(word), bf16_high(word)) : __half22float2(bits_half2(word));
}

/* The warp's sixteen rows, times a power of two that is returned, to shared memory as fp16, and q . mean. */
DEVICE float wide_load(const DecodeParams &p, const WideBlock &b, __half *natural, float *constants, int first, int lane) {
    const int g = lane >> 2, t = lane & 3;
    uint4 x[2][4];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const uint16_t *row = wide_row(p, b, first + 8 * j + g);
#pragma unroll
        for (int m = 0; m < 4; m++) x[j][m] = row ? load_uint4(row + 32 * m + 8 * t) : make_uint4(0, 0, 0, 0);
    }
    float top = 1e-20f, sum[2] = {0, 0};
#pragma unroll
    for (int m = 0; m < 4; m++) {
        float mean[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (p.k_mean) {
            const float4 *from = reinterpret_cast<const float4 *>(p.k_mean + b.head * Wide::D + 32 * m + 8 * t);
            *reinterpret_cast<float4 *>(mean) = __ldg(from);
            *reinterpret_cast<float4 *>(mean + 4) = __ldg(from + 1);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint32_t w[4] = {x[j][m].x, x[j][m].y, x[j][m].z, x[j][m].w};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float2 f = query_floats(p, w[k]);
                top = fmaxf(top, fmaxf(fabsf(f.x), fabsf(f.y)));
                sum[j] = fmaf(f.x, mean[2 * k], fmaf(f.y, mean[2 * k + 1], sum[j]));
            }
        }
    }
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, d));
    const float scale = __int_as_float((9 - ((__float_as_int(top) >> 23) - 127) + 127) << 23);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        sum[j] += __shfl_xor_sync(FULL_WARP, sum[j], 1);
        sum[j] += __shfl_xor_sync(FULL_WARP, sum[j], 2);
        if (t == 0) constants[first + 8 * j + g] = sum[j] * scale;
#pragma unroll
        for (int m = 0; m < 4; m++) {
            uint32_t w[4] = {x[j][m].x, x[j][m].y, x[j][m].z, x[j][m].w};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float2 f = query_floats(p, w[k]);
                w[k] = pack_half2(f.x * scale, f.y * scale);
            }
            __half *to = natural + (first + 8 * j + g) * Wide::NATURAL + 32 * m + 8 * t;
            *reinterpret_cast<uint4 *>(to) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
    return scale;
}

/* Rotates the warpgroup's 64 rows in shared memory; every warp does 32 channels of all. Little code: it comes from memory
 * once a CTA. */
DEVICE void wide_rotate(const DecodeParams &p, const WideBlock &b, __half *rows, int barrier, int warp, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const uint4 *u = p.k_rotation + static_cast<size_t>(b.head) * 64 * 64 + 2 * warp * 8 * 64 + lane;
    uint4 high[2][8], low[2][8];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int k = 0; k < 8; k++) {
            high[i][k] = load_kept(u + (i * 8 + k) * 64);
            low[i][k] = load_kept(u + (i * 8 + k) * 64 + 32);
        }
    asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
#pragma unroll 1
    for (int j = 0; j < 64; j += 8) {
        float c[2][4] = {};
#pragma unroll
        for (int m = 0; m < 4; m++) {
            const uint4 x = *reinterpret_cast<const uint4 *>(rows + (j + g) * Wide::NATURAL + 32 * m + 8 * t);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint4 &h0 = high[i][2 * m], &h1 = high[i][2 * m + 1], &l0 = low[i][2 * m], &l1 = low[i][2 * m + 1];
                mma_f16(c[i], h0.x, h0.y, h0.z, h0.w, x.x, x.y);
                mma_f16(c[i], l0.x, l0.y, l0.z, l0.w, x.x, x.y);
                mma_f16(c[i], h1.x, h1.y, h1.z, h1.w, x.z, x.w);
                mma_f16(c[i], l1.x, l1.y, l1.z, l1.w, x.z, x.w);
            }
        }
        asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory"); /* all have read these eight rows */
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                __half *to = rows + (j + 2 * t + e) * Wide::NATURAL + 16 * (2 * warp + i) + g;
                to[0] = __float2half_rn(c[i][e]);
                to[8] = __float2half_rn(c[i][2 + e]);
            }
    }
    asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
}

/* The warpgroup's 64 rows, whose place in shared memory is `natural`, rotated, as A operands. Returns the scale of
 * wide_load(). */
DEVICE float wide_queries(const DecodeParams &p, const WideBlock &b, WideRows &r, __half *natural, float *constants, int group,
                          int warp, int lane) {
    const int t = lane & 3, first = 64 * group + 16 * warp;
    const float scale = wide_load(p, b, natural, constants, first, lane);
    wide_rotate(p, b, natural + 64 * group * Wide::NATURAL, 4 + group, warp, lane);
    r.scale = __fdividef(p.scale_log2, scale);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const __half *from = natural + (first + (lane >> 2) + 8 * h) * Wide::NATURAL + t;
        r.max[h] = NO_MAXIMUM;
        r.sum[h] = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            r.q[k][h] = half2_bits(__halves2half2(from[16 * k], from[16 * k + 8]));
            r.q[k][2 + h] = half2_bits(__halves2half2(from[16 * k + 4], from[16 * k + 12]));
        }
    }
#pragma unroll
    for (int i = 0; i < 64; i++) r.out[i] = 0;
    return scale;
}

/* Whether any thread of a warpgroup says so. */
DEVICE bool group_any(int barrier, bool x) {
    int r;
    asm volatile("{\n\t.reg .pred p, q;\n\tsetp.ne.s32 p, %2, 0;\n\tbarrier.cta.red.or.aligned.pred q, %1, 128, p;\n\t"
                 "selp.s32 %0, 1, 0, q;\n\t}"
                 : "=r"(r)
                 : "r"(barrier), "r"(static_cast<int>(x))
                 : "memory");
    return r;
}

/* The query's channels of four pairs, of both rows, in the order of the waves: exact, for they have at most 11 bits. scale:
 * that of wide_load(). Returns whether a bias of the warpgroup's rows needs low halves. */
DEVICE bool wide_bias_queries(const DecodeParams &p, const WideBlock &b, WideRows &r, float scale, int group, int lane) {
    constexpr float LIMIT = 16; /* in log2: the error is below 2^-7, 0.0055 of a logit */
    const int t = lane & 3, first = b.head * Wide::PAIRS + (t & 2) + 8 * (t & 1);
    float most = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint16_t *q = wide_row(p, b, wide_first_row() + 8 * h);
        float sum = 0;
#pragma unroll
        for (int k = 0; k < 2; k++) { /* pairs first + 4 k and the next */
            const int4 dims = __ldg(reinterpret_cast<const int4 *>(p.bias_dims + first + 4 * k));
            const float4 nu = __ldg(reinterpret_cast<const float4 *>(reinterpret_cast<const float2 *>(p.bias_nu) + first + 4 * k));
            const int at[4] = {dims.x, dims.y, dims.z, dims.w};
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t bits = q ? load_u16(q + at[i]) : 0u;
                x[i] = (p.q_is_bf16 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(bits))) * scale;
            }
            sum += (fabsf(x[0]) + fabsf(x[1])) * (fabsf(nu.x) + fabsf(nu.y)) + (fabsf(x[2]) + fabsf(x[3])) * (fabsf(nu.z) + fabsf(nu.w));
            r.pairs[0][2 * k + h] = pack_half2(x[0], x[2]);
            r.pairs[1][2 * k + h] = pack_half2(x[1], x[3]);
        }
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        most = fmaxf(most, sum);
    }
    return group_any(4 + group, !(most * __ldg(p.bias_units + b.head) * r.scale < LIMIT));
}

/* Starts the scores of an item, whose stage is at `keys`. */
template <int BIAS_STEPS> DEVICE void wide_scores(const WideRows &r, uint32_t keys, float (&s)[32]) {
    wgmma_settle(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; k++) wgmma_64(s, r.q[k], matrix_of(keys, 8192 * (k >> 2) + 32 * (k & 3)), k);
#pragma unroll
    for (int k = 0; k < BIAS_STEPS; k++) wgmma_64(s, r.pairs[k & 1], matrix_of(keys, 2 * Wide::KEYS + 32 * k), 1);
    wgmma_commit();
}

/* Scores of what the thread's rows do not see. */
DEVICE void wide_mask(const DecodeParams &p, const WideBlock &b, float (&s)[32], int item) {
    const int tid = thread_index(), row = wide_first_row();
    const int kind = b.kind(item), at = 64 * b.page(item) + 8 * (tid & 1) + (tid & 2);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const Span see = visible(p, kind, b.token(p, row + 8 * h));
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int position = at + 16 * (j >> 1) + 4 * (j & 1) + e;
                if (position < see.first || position >= see.last) s[4 * j + 2 * h + e] = MASKED;
            }
    }
}

/* Probabilities by the running maxima, as A operands, and their sums a row. */
DEVICE void wide_probabilities(const WideRows &r, const float (&s)[32], uint32_t (&prob)[4][4], float (&sum)[2]) {
    const float shift[2] = {r.max[0] * r.scale, r.max[1] * r.scale};
    float sums[2][2];
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float x = exp2_fast(fmaf(s[4 * j + 2 * h], r.scale, -shift[h]));
            const float y = exp2_fast(fmaf(s[4 * j + 2 * h + 1], r.scale, -shift[h]));
            prob[j >> 1][2 * (j & 1) + h] = pack_half2(x, y);
            sums[h][0] = j == 0 ? x : sums[h][0] + x;
            sums[h][1] = j == 0 ? y : sums[h][1] + y;
        }
    sum[0] = sums[0][0] + sums[0][1];
    sum[1] = sums[1][0] + sums[1][1];
}

/* The softmax of an item's scores: probabilities, and what outputs so far are to be multiplied by; false when that is 1.
 * Nothing looks for the largest score unless a sum of probabilities is so large that one of them may be beyond fp16: the
 * running maxima are lower than the scores' by no more than that allows, and raised only then. */
DEVICE bool wide_softmax(WideRows &r, const float (&s)[32], uint32_t (&prob)[4][4], float (&factor)[2]) {
    constexpr float LARGE = 1024;
    float sum[2];
    wide_probabilities(r, s, prob, sum);
    const bool up = __any_sync(FULL_WARP, fmaxf(sum[0], sum[1]) > LARGE);
    if (up) {
        float top[2] = {s[0], s[2]};
#pragma unroll
        for (int i = 0; i < 32; i++) top[i >> 1 & 1] = fmaxf(top[i >> 1 & 1], s[i]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            top[h] = fmaxf(top[h], r.max[h]);
            top[h] = fmaxf(top[h], __shfl_xor_sync(FULL_WARP, top[h], 1));
            top[h] = fmaxf(top[h], __shfl_xor_sync(FULL_WARP, top[h], 2));
            factor[h] = exp2_fast((r.max[h] - top[h]) * r.scale);
            r.max[h] = top[h];
            r.sum[h] *= factor[h];
        }
        wide_probabilities(r, s, prob, sum);
    }
    r.sum[0] += sum[0];
    r.sum[1] += sum[1];
    return up;
}

/* Starts the product of probabilities and values. */
DEVICE void wide_values(WideRows &r, uint32_t keys, const uint32_t (&prob)[4][4]) {
    wgmma_settle(r.out);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma_128(r.out, prob[k], matrix_of(keys, Wide::KEYS + 32 * k));
    wgmma_commit();
}

/* Normalised rows in shared memory [64, OUT] of a warpgroup, turned back, to the output. */
DEVICE void wide_turn_back(const DecodeParams &p, const WideBlock &b, const float *rows, int first, int tid) {
    const float *back = p.v_rotation_t + static_cast<size_t>(b.head) * Wide::D * Wide::D + tid;
    const float *mean = p.v_mean_rotated ? p.v_mean_rotated + b.head * Wide::D : nullptr;
#pragma unroll 1
    for (int row = 0; row < 64 && first + row < b.n_rows; row += 16) {
        float x[16];
#pragma unroll
        for (int k = 0; k < 16; k++) x[k] = 0;
#pragma unroll 2
        for (int i = 0; i < Wide::D; i++) {
            const float u = __ldg(back + i * Wide::D), m = mean ? __ldg(mean + i) : 0.0f;
#pragma unroll
            for (int k = 0; k < 16; k++) x[k] = fmaf(rows[(row + k) * Wide::OUT + i] + m, u, x[k]);
        }
#pragma unroll
        for (int k = 0; k < 16; k++) {
            const Target to = {b.seq, b.head, b.cta_row, 0};
            if (first + row + k < b.n_rows) write_value<Wide>(p, to, first + row + k, tid, x[k]);
        }
    }
}

/* The same, not turned back. A warp has a row at a time, a lane four channels. */
DEVICE void wide_copy_out(const DecodeParams &p, const WideBlock &b, const float *rows, int first, int tid) {
    const int d = 4 * (tid & 31);
    float4 mean = make_float4(0, 0, 0, 0);
    if (p.v_mean_rotated) mean = __ldg(reinterpret_cast<const float4 *>(p.v_mean_rotated + b.head * Wide::D + d));
#pragma unroll 2
    for (int row = tid >> 5; row < min(64, b.n_rows - first); row += 4) {
        const float4 x = *reinterpret_cast<const float4 *>(rows + row * Wide::OUT + d);
        const int at = b.cta_row + first + row, token = divide(at, p.gqa, p.gqa_magic);
        const int head = b.head * p.gqa + at - token * p.gqa;
        const size_t to = (static_cast<size_t>(b.seq * p.n_q_tokens + token) * (p.n_kv_heads * p.gqa) + head) * Wide::D + d;
        const float4 y = make_float4(x.x + mean.x, x.y + mean.y, x.z + mean.z, x.w + mean.w);
        if (p.out_dtype == OSCAR_DTYPE_F32)
            *reinterpret_cast<float4 *>(static_cast<float *>(p.out) + to) = y;
        else
            *reinterpret_cast<uint2 *>(static_cast<uint16_t *>(p.out) + to) =
                p.out_dtype == OSCAR_DTYPE_BF16 ? make_uint2(pack_bf162(y.x, y.y), pack_bf162(y.z, y.w))
                                                : make_uint2(pack_half2(y.x, y.y), pack_half2(y.z, y.w));
    }
}

/* Normalises, adds the mean, writes, by way of the warpgroup's rows in shared memory. */
DEVICE void wide_write(const DecodeParams &p, const WideBlock &b, WideRows &r, const float *constants, float *rows, int group,
                       int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = wide_first_row() + 8 * h, at = b.cta_row + min(row, b.n_rows - 1);
        const int head = b.head * p.gqa + at - divide(at, p.gqa, p.gqa_magic) * p.gqa;
        r.sum[h] += __shfl_xor_sync(FULL_WARP, r.sum[h], 1);
        r.sum[h] += __shfl_xor_sync(FULL_WARP, r.sum[h], 2);
        const float norm = normaliser((r.max[h] + constants[row]) * r.scale, r.sum[h], p.sink_logits, head);
        float *to = rows + (row & 63) * Wide::OUT + 2 * (lane & 3);
#pragma unroll
        for (int j = 0; j < 16; j++)
            *reinterpret_cast<float2 *>(to + 8 * j) = make_float2(r.out[4 * j + 2 * h] * norm, r.out[4 * j + 2 * h + 1] * norm);
    }
    asm volatile("bar.sync %0, 128;" ::"r"(4 + group) : "memory");
    if (p.v_rotation_t)
        wide_turn_back(p, b, rows, 64 * group, static_cast<int>(threadIdx.x & 127));
    else
        wide_copy_out(p, b, rows, 64 * group, static_cast<int>(threadIdx.x & 127));
}

/* The attending warpgroups have their scores in turn, so that one has its softmax while the other has products. */
DEVICE void wait_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(7 + group) : "memory"); }
DEVICE void give_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(8 - group) : "memory"); }

/* All items. BIAS_STEPS: of the product of queries and waves, 4 with low halves. */
template <int BIAS_STEPS>
DEVICE void attend_items(const DecodeParams &p, const WideBlock &b, const uint8_t *shared, const WideBarriers &at, WideRows &r,
                         int group) {
    const int lane = threadIdx.x & 31, n_items = b.count();
    const Span clear = b.clear_items(p);
    auto stage_of = [&](uint32_t item) { return shared_address(shared) + item % Wide::STAGES * Wide::STAGE; };
    auto start_scores = [&](uint32_t item, float (&s)[32]) {
        barrier_wait(at.keys_full + 8 * (item % Wide::STAGES), item / Wide::STAGES & 1);
        wide_scores<BIAS_STEPS>(r, stage_of(item), s);
    };
    auto release = [&](uint32_t empty, uint32_t item) {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * (item % Wide::STAGES));
    };
    auto start_values = [&](uint32_t item, const uint32_t (&prob)[4][4]) {
        barrier_wait(at.values_full + 8 * (item % Wide::STAGES), item / Wide::STAGES & 1);
        wide_values(r, stage_of(item), prob);
    };
    float s[32], factor[2];
    /* An item's scores, when the values' product of the item before is under way, to probabilities. */
    auto softmax = [&](int item, uint32_t (&prob)[4][4]) {
        wgmma_settle(s);
        release(at.keys_empty, item);
        if (item < clear.first || item >= clear.last) wide_mask(p, b, s, item);
        const bool up = wide_softmax(r, s, prob, factor);
#pragma unroll
        for (int i = 0; i < 16; i++) asm volatile("" : "+r"(prob[i >> 2][i & 3])::"memory"); /* before any later wait */
        return up;
    };
    auto step = [&](int item, const uint32_t (&before)[4][4], uint32_t (&prob)[4][4]) {
        wait_turn(group);
        start_scores(item, s);
        start_values(item - 1, before);
        wgmma_wait<1>();
        if (group == 0 || item + 1 < n_items) give_turn(group);
        const bool up = softmax(item, prob);
        wgmma_wait<0>();
        wgmma_settle(r.out);
        release(at.values_empty, item - 1);
        if (up) {
#pragma unroll
            for (int i = 0; i < 64; i++) r.out[i] *= factor[i >> 1 & 1];
        }
    };
    uint32_t even[4][4], odd[4][4];
    if (group == 1 && n_items > 1) give_turn(group); /* group 0 begins */
    start_scores(0, s);
    wgmma_wait<0>();
    softmax(0, even);
    int item = 1;
#pragma unroll 1
    for (; item + 1 < n_items; item += 2) {
        step(item, even, odd);
        step(item + 1, odd, even);
    }
    if (item < n_items) {
        step(item, even, odd);
        start_values(item, odd);
    } else {
        start_values(item - 1, even);
    }
    wgmma_wait<0>();
    wgmma_settle(r.out);
}

/* Threads below 128 CONSUMERS. */
template <bool BIAS> DEVICE void attend_all(const DecodeParams &p, const WideBlock &b, uint8_t *shared, const WideBarriers &at) {
    const int lane = threadIdx.x & 31, warp = static_cast<int>(threadIdx.x) >> 5 & 3;
    const int group = static_cast<int>(threadIdx.x) >> 7;
    WideRows r;
    float *constants = reinterpret_cast<float *>(shared + Wide::CONST_AT);
    const float scale = wide_queries(p, b, r, reinterpret_cast<__half *>(shared + Wide::QUERY_AT), constants, group, warp, lane);
    if constexpr (BIAS) {
        const bool low = wide_bias_queries(p, b, r, scale, group, lane);
        if ((threadIdx.x & 127) == 0) reinterpret_cast<uint32_t *>(shared + Wide::LOW_AT)[group] = low;
        if (low)
            attend_items<4>(p, b, shared, at, r, group);
        else
            attend_items<2>(p, b, shared, at, r, group);
    } else {
        attend_items<0>(p, b, shared, at, r, group);
    }
    asm volatile("bar.sync 3, %0;" ::"n"(128 * Wide::CONSUMERS) : "memory"); /* the stages are done with */
    wide_write(p, b, r, constants, reinterpret_cast<float *>(shared) + 64 * group * Wide::OUT, group, lane);
}

#endif

template <bool BIAS>
__global__ void __launch_bounds__(Wide::THREADS, 1) prefill_wgmma_kernel(const __grid_constant__ DecodeParams p) {
#if HAVE_WGMMA
    extern __shared__ __align__(128) uint8_t unaligned[];
    uint8_t *shared = unaligned + (-shared_address(unaligned) & 1023);
    const WideBarriers at(shared_address(shared + Wide::BARRIERS_AT));
    const int length = load_int(p.lengths + blockIdx.z);
    if (length < p.n_q_tokens) return; /* the sequence is skipped */
    if (threadIdx.x == 0) at.init();
    __syncthreads();
    const WideBlock b = wide_block(p, length);
    if (threadIdx.x >= 128 * Wide::CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        expand_all<BIAS>(p, b, shared, at);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
        attend_all<BIAS>(p, b, shared, at);
    }
#endif
}

} // namespace

bool prefill_plan_wgmma(DecodePlan *plan, const DecodeNeeds *needs, size_t shared_max) {
    plan->tile_rows = Wide::ROWS;
    plan->row_tiles = (needs->rows + Wide::ROWS - 1) / Wide::ROWS;
    plan->n_ctas = 0;
    plan->shared_bytes = Wide::BYTES;
    plan->n_threads = Wide::THREADS;
    plan->kernel = needs->bias_steps ? prefill_wgmma_kernel<true> : prefill_wgmma_kernel<false>;
    return needs->wgmma && !needs->high && !needs->capped && needs->bias_steps <= 2 && plan->shared_bytes <= shared_max;
}
