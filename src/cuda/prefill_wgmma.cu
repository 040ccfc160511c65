/*
 * prefill_wgmma.cu - attention of many query tokens at head_dim 128, on the asynchronous tensor cores of compute
 * capability 9.0a: two bits, at most 16 tracked pairs, no soft cap. What else there is, prefill.cuh does.
 *
 * One warpgroup expands: it turns tiles into fp16 keys and values in shared memory, (step code + offset) rounded
 * once, and rows of the overlay likewise. Two warpgroups attend, 64 rows each, as for any fp16 cache: scores from
 * queries in registers, a softmax in registers, whose probabilities are the A operand of the second product. The
 * expansion costs a quarter of the products' time on schedulers that they leave free.
 *
 * An expanded stage, in the 128-byte swizzle that the products read (16-byte chunk ^ row % 8, rows of 128 bytes):
 *   keys    2 panels of 64 channels, [64 tokens]; channels 16 c + i and 16 c + 8 + i are neighbours at 16 c + 2 i,
 *           as the halves of a code word are; queries are in the same order
 *   values  [128 channels] of 64 tokens
 *
 * The key bias of tracked pairs is b(t) = sum Re z cos + Im z sin of t f, z = conj(q) nu (decode_rows.cuh). Its value in
 * the middle of a page is added in fp32; what is left of it is a product too, of z with rows of cos and sin less those
 * of the middle, which are expanded as keys are (waves). Both sides are high and low fp16 halves.
 *   waves   [64 tokens] of 16 cosines, 16 sines, then their low halves; behind them cos, sin of the middle [16]
 */
#include "decode_merge.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAVE_WGMMA 1
#else
#define HAVE_WGMMA 0
#endif

namespace {

struct Wide {
    static constexpr int D = 128, CONSUMERS = 2, ROWS = 64 * CONSUMERS, THREADS = 128 * (1 + CONSUMERS);
    static constexpr int STAGES = 4, KEYS = 16384, WAVES = 8192, STAGE = 2 * KEYS + WAVES, RAW = 4, TILE = 32 * D + 512;
    static constexpr int PAIRS = 16, MIDDLES_AT = STAGES * STAGE;
    static constexpr int NATURAL = D + 8; /* halves of a query row: the padding spreads rows over the banks */
    static constexpr int OUT = D + 4;     /* floats of an output row */
    static constexpr int RAW_AT = MIDDLES_AT + STAGES * PAIRS * 8, QUERY_AT = RAW_AT + RAW * TILE, CONST_AT = QUERY_AT + ROWS * NATURAL * 2;
    static constexpr int BARRIERS_AT = CONST_AT + ROWS * 4;
    static constexpr int BYTES = BARRIERS_AT + 8 * (RAW + 2 * STAGES) + 1024; /* the last to align the first */
    static_assert(ROWS * OUT * 4 <= MIDDLES_AT, "outputs take the place of the stages");
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
    /* Position of the token of a row of the CTA; rows that do not exist are as the last. */
    DEVICE int token(const DecodeParams &p, int row) const {
        return chunk_first + divide(cta_row + min(row, n_rows - 1), p.gqa, p.gqa_magic);
    }
};

DEVICE WideBlock wide_block(const DecodeParams &p, int length) {
    WideBlock b;
    b.head = blockIdx.y;
    b.seq = blockIdx.z;
    b.cta_row = (gridDim.x - 1 - blockIdx.x) * Wide::ROWS; /* the longest first */
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

/* --- the expanding warpgroup --------------------------------------------------------------------- */

/* Code i of both halves of a word, as fp16 numbers. */
template <int I> DEVICE __half2 code_value(uint32_t word) {
    constexpr int AT = I < 5 ? I : I - 5; /* bits 2 AT of what is below 2^10 */
    const uint32_t x = ((I < 5 ? word : word >> 10) & (0x00030003u << (2 * AT))) | 0x64006400u; /* 1024 + c 4^AT */
    constexpr float unit = 1.0f / (1 << (2 * AT));
    return __hfma2(bits_half2(x), __float2half2_rn(unit), __float2half2_rn(-1024.0f * unit));
}

/* Expands sub-tile `warp` of a tile. n: tokens of the page that exist. */
DEVICE void expand_keys(const uint8_t *tile, uint32_t to, int warp, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const uint4 words = *reinterpret_cast<const uint4 *>(tile + 512 * warp + 16 * lane);
    const uint2 params = *reinterpret_cast<const uint2 *>(tile + 4096 + 64 * warp + 8 * g);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const __half2 sm = bits_half2(h ? params.y : params.x), step = __low2half2(sm), offset = __high2half2(sm);
        const uint32_t row = to + 128 * (16 * warp + 8 * h + g);
#pragma unroll
        for (int w = 0; w < 2; w++) {
            const uint32_t x = h ? (w ? words.w : words.z) : (w ? words.y : words.x);
            uint32_t v[8];
            v[0] = half2_bits(__hfma2(code_value<0>(x), step, offset));
            v[1] = half2_bits(__hfma2(code_value<1>(x), step, offset));
            v[2] = half2_bits(__hfma2(code_value<2>(x), step, offset));
            v[3] = half2_bits(__hfma2(code_value<3>(x), step, offset));
            v[4] = half2_bits(__hfma2(code_value<4>(x), step, offset));
            v[5] = half2_bits(__hfma2(code_value<5>(x), step, offset));
            v[6] = half2_bits(__hfma2(code_value<6>(x), step, offset));
            v[7] = half2_bits(__hfma2(code_value<7>(x), step, offset));
            const uint32_t panel = row + 8192 * (t >> 1);
            const int chunk = 4 * (t & 1) + 2 * w;
            store_shared(panel + ((chunk ^ g) << 4), v[0], v[1], v[2], v[3]);
            store_shared(panel + (((chunk + 1) ^ g) << 4), v[4], v[5], v[6], v[7]);
        }
    }
}

/* n: tokens of the page that exist; the others may never have been written. */
DEVICE void expand_values(const uint8_t *tile, uint32_t to, int n, int warp, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const uint4 words = *reinterpret_cast<const uint4 *>(tile + 2048 + 512 * warp + 16 * lane);
    uint4 params = *reinterpret_cast<const uint4 *>(tile + 4096 + 256 + 64 * warp + 16 * t);
    const int token = 16 * warp + 2 * t;
    if (token >= n) params.x = 0;
    if (token + 8 >= n) params.y = 0;
    if (token + 1 >= n) params.z = 0;
    if (token + 9 >= n) params.w = 0;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const uint32_t p0 = k ? params.y : params.x, p1 = k ? params.w : params.z;
        const __half2 step = bits_half2(__byte_perm(p0, p1, 0x5410)), offset = bits_half2(__byte_perm(p0, p1, 0x7632));
#pragma unroll
        for (int w = 0; w < 2; w++) {
            const uint32_t x = k ? (w ? words.w : words.z) : (w ? words.y : words.x);
            const uint32_t at = to + 128 * (64 * w + g) + (((2 * warp + k) ^ g) << 4) + 4 * t;
            auto put = [&](int i, __half2 c) {
                store_shared(at + 128 * (16 * (i & 3) + 8 * (i >> 2)), half2_bits(__hfma2(c, step, offset)));
            };
            put(0, code_value<0>(x));
            put(1, code_value<1>(x));
            put(2, code_value<2>(x));
            put(3, code_value<3>(x));
            put(4, code_value<4>(x));
            put(5, code_value<5>(x));
            put(6, code_value<6>(x));
            put(7, code_value<7>(x));
        }
    }
}

/* bf16 to fp16; what fp16 cannot hold becomes its largest number. */
DEVICE float half_range(float x) { return fminf(fmaxf(x, -65504.0f), 65504.0f); }

/* 64 rows of the overlay. first, last: positions that some row of the CTA sees; others may never have been written. */
DEVICE void expand_overlay(const DecodeParams &p, const WideBlock &b, int kind, int page, uint32_t keys, uint32_t values,
                           int tid) {
    const int slot = p.slots ? load_int(p.slots + b.seq) : b.seq;
    const size_t rows = static_cast<size_t>(slot * p.n_kv_heads + b.head) * (p.sink8 + p.ring) +
                        (kind == ITEM_SINK ? 64 * page : p.sink8 + 64 * page % p.ring);
    const int n = kind == ITEM_SINK ? min(p.sink8 - 64 * page, 64) : 64; /* rows that there are */
#pragma unroll
    for (int i = tid; i < 512; i += 128) {
        const int row = i >> 3, c = i & 7;
        const uint16_t *from = p.overlay_k + (rows + min(row, n - 1)) * Wide::D + 16 * c;
        const uint4 low = load_uint4(from), high = load_uint4(from + 8);
        const uint32_t a[4] = {low.x, low.y, low.z, low.w}, d[4] = {high.x, high.y, high.z, high.w};
        uint32_t v[8];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            v[2 * k] = pack_half2(half_range(bf16_low(a[k])), half_range(bf16_low(d[k])));
            v[2 * k + 1] = pack_half2(half_range(bf16_high(a[k])), half_range(bf16_high(d[k])));
        }
        const uint32_t at = keys + 8192 * (c >> 2) + 128 * row;
        store_shared(at + (((2 * c & 7) ^ (row & 7)) << 4), v[0], v[1], v[2], v[3]);
        store_shared(at + ((((2 * c + 1) & 7) ^ (row & 7)) << 4), v[4], v[5], v[6], v[7]);
    }
    const int first = visible(p, kind, b.t_first).first - 64 * page, last = visible(p, kind, b.length - 1).last - 64 * page;
    const uint16_t *from = p.overlay_v + rows * Wide::D + tid;
#pragma unroll 8
    for (int pair = 0; pair < 32; pair++) {
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = 2 * pair + e;
            const float v = __uint_as_float(load_u16(from + min(row, n - 1) * Wide::D) << 16);
            x[e] = row >= first && row < last ? half_range(v) : 0.0f;
        }
        store_shared(values + 128 * tid + (((pair >> 2) ^ (tid & 7)) << 4) + 4 * (pair & 3), pack_half2(x[0], x[1]));
    }
}

/* cos(x f) - 1 and sin(x f) of two tokens of the page and four pairs, of this thread of the warpgroup: pairs 2 t, 2 t + 1,
 * 2 t + 8, 2 t + 9 and tokens 8 apart, half of the threads after and half before the middle of a page. */
struct WaveTable {
    float even[2][4], odd[2][4]; /* times the head's unit */
    unsigned long long turn[4];
    int row[2]; /* of the page */

    DEVICE void load(const DecodeParams &p, int head, int tid) {
        const int lane = tid & 31, block = tid >> 5 & 1, g = lane >> 2, t = lane & 3;
        const bool before = tid >> 6;
        const uint4 *from = p.bias_table + head * 256 + 32 * block + lane;
        const float unit = __ldg(p.bias_units + head), sign = before ? -unit : unit;
        const uint4 e = from[0], e_low = from[64], o = from[128], o_low = from[192];
        const uint32_t even_high[4] = {e.x, e.y, e.z, e.w}, even_low[4] = {e_low.x, e_low.y, e_low.z, e_low.w};
        const uint32_t odd_high[4] = {o.x, o.y, o.z, o.w}, odd_low[4] = {o_low.x, o_low.y, o_low.z, o_low.w};
#pragma unroll
        for (int reg = 0; reg < 4; reg++) { /* row reg & 1, pairs of reg >> 1 */
            const float2 a = __half22float2(bits_half2(even_high[reg])), b = __half22float2(bits_half2(even_low[reg]));
            const float2 c = __half22float2(bits_half2(odd_high[reg])), d = __half22float2(bits_half2(odd_low[reg]));
            even[reg & 1][reg & 2] = (a.x + b.x) * unit;
            even[reg & 1][(reg & 2) + 1] = (a.y + b.y) * unit;
            odd[reg & 1][reg & 2] = (c.x + d.x) * sign;
            odd[reg & 1][(reg & 2) + 1] = (c.y + d.y) * sign;
        }
#pragma unroll
        for (int k = 0; k < 4; k++) turn[k] = __ldg(p.bias_turn + head * Wide::PAIRS + 2 * t + (k & 1) + 4 * (k & 2));
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int after = 16 * block + g + 8 * h;
            row[h] = before ? 31 - after : 32 + after;
        }
    }

    /* The waves of a page; middles: [16] cos, sin. */
    DEVICE void expand(int page, uint32_t waves, float2 *middles, int tid) const {
        const int t = tid & 3;
        float2 middle[4];
#pragma unroll
        for (int k = 0; k < 4; k++) middle[k] = bias_phase(turn[k], page);
        if (tid < 4) {
#pragma unroll
            for (int k = 0; k < 4; k++) middles[2 * t + (k & 1) + 4 * (k & 2)] = middle[k];
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint32_t at = waves + 128 * row[h] + 4 * t;
#pragma unroll
            for (int k = 0; k < 4; k += 2) { /* pairs k, k + 1: chunk k / 2 of cosines, 2 + k / 2 of sines */
                float wave[2][2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float u = even[h][k + e], v = odd[h][k + e], c = middle[k + e].x, s = middle[k + e].y;
                    wave[0][e] = c * u - s * v;
                    wave[1][e] = s * u + c * v;
                }
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    const uint32_t high = pack_half2(wave[part][0], wave[part][1]);
                    const float2 f = __half22float2(bits_half2(high));
                    const int chunk = 2 * part + (k >> 1);
                    store_shared(at + ((chunk ^ (row[h] & 7)) << 4), high);
                    store_shared(at + (((chunk + 4) ^ (row[h] & 7)) << 4), pack_half2(wave[part][0] - f.x, wave[part][1] - f.y));
                }
            }
        }
    }
};

/* Threads 0 .. 127. */
template <bool BIAS>
DEVICE void expand_all(const DecodeParams &p, const WideBlock &b, uint8_t *shared, uint32_t raw_full, uint32_t full,
                       uint32_t empty) {
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, n_items = b.count(), units = n_items - b.n_tiles;
    const int *table = p.block_table + static_cast<size_t>(b.seq) * p.table_stride + b.tile_first;
    auto fetch = [&](int tile) { /* by one thread */
        const uint8_t *from = p.pages + (static_cast<size_t>(load_int(table + tile)) * p.n_kv_heads + b.head) * p.tile_bytes;
        bulk_copy(shared_address(shared + Wide::RAW_AT + tile % Wide::RAW * Wide::TILE), from, Wide::TILE,
                  raw_full + 8 * (tile % Wide::RAW));
    };
    if (tid == 0)
        for (int i = 0; i < min(Wide::RAW, b.n_tiles); i++) fetch(i);
    const int exist = visible(p, ITEM_TILE, b.length - 1).last;
    WaveTable wave;
    if (BIAS) wave.load(p, b.head, tid);
    int stage = 0, phase = 1; /* a stage that was never filled is empty */
#pragma unroll 1
    for (int item = 0; item < n_items; item++) {
        const int page = b.page(item), tile = item - units;
        const uint32_t keys = shared_address(shared + stage * Wide::STAGE), values = keys + Wide::KEYS;
        barrier_wait(empty + 8 * stage, phase);
        if (tile < 0) {
            expand_overlay(p, b, b.kind(item), page, keys, values, tid);
        } else {
            const uint8_t *from = shared + Wide::RAW_AT + tile % Wide::RAW * Wide::TILE;
            barrier_wait(raw_full + 8 * (tile % Wide::RAW), tile / Wide::RAW & 1);
            expand_keys(from, keys, warp, lane);
            expand_values(from, values, exist - 64 * page, warp, lane);
        }
        if (BIAS)
            wave.expand(page, values + Wide::KEYS, reinterpret_cast<float2 *>(shared + Wide::MIDDLES_AT) + stage * Wide::PAIRS, tid);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_arrive(full + 8 * stage);
        asm volatile("bar.sync 1, 128;" ::: "memory"); /* the tile has been read */
        if (tid == 0 && tile >= 0 && tile + Wide::RAW < b.n_tiles) fetch(tile + Wide::RAW);
        if (++stage == Wide::STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
}

/* --- the attending warpgroups -------------------------------------------------------------------- */

/* Rows of 128 bytes, 128-byte swizzle, groups of 8 rows 1,024 bytes apart. */
DEVICE uint64_t matrix_of(uint32_t address) {
    return static_cast<uint64_t>(address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
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
    float out[64];
    float max[2], sum[2], constant[2]; /* raw; constant: q . mean */
    uint32_t z_high[2][4], z_low[2][4]; /* of tracked pairs, real and imaginary parts: A operands */
    float scale;                       /* raw scores to log2 */
    float unit;                        /* of z, a power of two */
    int row;                           /* of the CTA, the first of the two */
};

/* First element of a row of the CTA, or NULL. */
DEVICE const uint16_t *wide_row(const DecodeParams &p, const WideBlock &b, int row) {
    if (row >= b.n_rows) return nullptr;
    const int at = b.cta_row + row, token = divide(at, p.gqa, p.gqa_magic), head = b.head * p.gqa + at - token * p.gqa;
    return p.q + (static_cast<size_t>(b.seq * p.n_q_tokens + token) * (p.n_kv_heads * p.gqa) + head) * Wide::D;
}

/* q . mean of the warp's sixteen rows; returns the largest |q| of theirs. */
DEVICE float wide_means(const DecodeParams &p, const WideBlock &b, float *row_const, int first, int lane) {
    float top = 1e-20f;
#pragma unroll 1
    for (int row = first; row < first + 16; row++) {
        const uint16_t *q = wide_row(p, b, row);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < Wide::D / 32; i++) {
            const uint32_t bits = q ? load_u16(q + 32 * i + lane) : 0u;
            const float x = p.q_is_bf16 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(bits));
            top = fmaxf(top, fabsf(x));
            if (p.k_mean) sum = fmaf(x, __ldg(p.k_mean + b.head * Wide::D + 32 * i + lane), sum);
        }
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) sum += __shfl_xor_sync(FULL_WARP, sum, d);
        if (lane == 0) row_const[row] = sum;
    }
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, d));
    return top;
}

/* Rotates the warp's sixteen rows, scaled by a power of two, to shared memory and takes them as A operands. Returns the
 * scale. */
DEVICE float wide_queries(const DecodeParams &p, const WideBlock &b, WideRows &r, __half *natural, float *row_const, int first,
                         int lane) {
    const int g = lane >> 2, t = lane & 3;
    const float top = wide_means(p, b, row_const, first, lane);
    const float scale = __int_as_float((9 - ((__float_as_int(top) >> 23) - 127) + 127) << 23);
    uint4 x[2][4];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const uint16_t *row = wide_row(p, b, first + 8 * j + g);
#pragma unroll
        for (int m = 0; m < 4; m++) {
            x[j][m] = row ? load_uint4(row + 32 * m + 8 * t) : make_uint4(0, 0, 0, 0);
            uint32_t *w = reinterpret_cast<uint32_t *>(&x[j][m]);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float2 f = p.q_is_bf16 ? make_float2(bf16_low(w[k]), bf16_high(w[k])) : __half22float2(bits_half2(w[k]));
                w[k] = pack_half2(f.x * scale, f.y * scale);
            }
        }
    }
    const uint4 *u = p.k_rotation + static_cast<size_t>(b.head) * 64 * 64 + lane;
#pragma unroll 1
    for (int m = 0; m < 8; m++) {
        uint4 high[8], low[8];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            high[k] = load_kept(u + (m * 8 + k) * 64);
            low[k] = load_kept(u + (m * 8 + k) * 64 + 32);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float c[4] = {0, 0, 0, 0};
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const uint32_t b0 = k & 1 ? x[j][k / 2].z : x[j][k / 2].x, b1 = k & 1 ? x[j][k / 2].w : x[j][k / 2].y;
                mma_f16(c, high[k].x, high[k].y, high[k].z, high[k].w, b0, b1);
                mma_f16(c, low[k].x, low[k].y, low[k].z, low[k].w, b0, b1);
            }
#pragma unroll
            for (int e = 0; e < 2; e++) {
                __half *to = natural + (first + 8 * j + 2 * t + e) * Wide::NATURAL + 16 * m + g;
                to[0] = __float2half_rn(c[e]);
                to[8] = __float2half_rn(c[2 + e]);
            }
        }
    }
    __syncwarp();
    r.row = first + g;
    r.scale = __fdividef(p.scale_log2, scale);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const __half *from = natural + (r.row + 8 * h) * Wide::NATURAL + t;
        r.constant[h] = row_const[r.row + 8 * h] * scale;
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

/* conj(q) nu of the lane's four pairs of both rows, as A operands. scale: that of wide_queries(). */
DEVICE void wide_bias_queries(const DecodeParams &p, const WideBlock &b, WideRows &r, float scale, int lane) {
    const int t = lane & 3;
    r.unit = __ldg(p.bias_units + b.head);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint16_t *q = wide_row(p, b, r.row + 8 * h);
#pragma unroll
        for (int k = 0; k < 2; k++) { /* pairs 2 t + 8 k and the next */
            const int pair = b.head * Wide::PAIRS + 2 * t + 8 * k;
            const int4 dims = __ldg(reinterpret_cast<const int4 *>(p.bias_dims + pair));
            const float4 nu = __ldg(reinterpret_cast<const float4 *>(reinterpret_cast<const float2 *>(p.bias_nu) + pair));
            const int at[4] = {dims.x, dims.y, dims.z, dims.w};
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t bits = q ? load_u16(q + at[i]) : 0u;
                x[i] = (p.q_is_bf16 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half(bits))) * scale;
            }
            const float re[2] = {x[0] * nu.x + x[1] * nu.y, x[2] * nu.z + x[3] * nu.w};
            const float im[2] = {x[1] * nu.x - x[0] * nu.y, x[3] * nu.z - x[2] * nu.w};
            r.z_high[0][2 * k + h] = pack_half2(re[0], re[1]);
            r.z_high[1][2 * k + h] = pack_half2(im[0], im[1]);
            const float2 a = __half22float2(bits_half2(r.z_high[0][2 * k + h])), c = __half22float2(bits_half2(r.z_high[1][2 * k + h]));
            r.z_low[0][2 * k + h] = pack_half2(re[0] - a.x, re[1] - a.y);
            r.z_low[1][2 * k + h] = pack_half2(im[0] - c.x, im[1] - c.y);
        }
    }
}

/* The bias in the middle of a page, raw, of the thread's rows. middles: [16] cos, sin. */
DEVICE void wide_middle(const WideRows &r, const float2 *middles, int lane, float (&out)[2]) {
    const int t = lane & 3;
    out[0] = out[1] = 0;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const float4 m = *reinterpret_cast<const float4 *>(middles + 2 * t + 8 * k);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float2 re = __half22float2(bits_half2(r.z_high[0][2 * k + h])), im = __half22float2(bits_half2(r.z_high[1][2 * k + h]));
            const float2 re_low = __half22float2(bits_half2(r.z_low[0][2 * k + h])), im_low = __half22float2(bits_half2(r.z_low[1][2 * k + h]));
            out[h] = fmaf(re.x + re_low.x, m.x, fmaf(im.x + im_low.x, m.y, out[h]));
            out[h] = fmaf(re.y + re_low.y, m.z, fmaf(im.y + im_low.y, m.w, out[h]));
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        out[h] += __shfl_xor_sync(FULL_WARP, out[h], 1);
        out[h] += __shfl_xor_sync(FULL_WARP, out[h], 2);
        out[h] *= r.unit;
    }
}

/* Starts the scores of an item, whose stage is at `keys`. */
template <bool BIAS> DEVICE void wide_scores(const WideRows &r, uint32_t keys, float (&s)[32]) {
    wgmma_settle(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; k++) wgmma_64(s, r.q[k], matrix_of(keys + 8192 * (k >> 2) + 32 * (k & 3)), k);
    if (BIAS) {
        const uint32_t waves = keys + 2 * Wide::KEYS;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            wgmma_64(s, r.z_high[k], matrix_of(waves + 32 * k), 1);
            wgmma_64(s, r.z_low[k], matrix_of(waves + 32 * k), 1);
            wgmma_64(s, r.z_high[k], matrix_of(waves + 64 + 32 * k), 1);
        }
    }
    wgmma_commit();
}

/* The softmax of an item's scores, in place: probabilities, and what outputs so far are to be multiplied by; false when
 * that is 1, since the running maxima are raised only where a score asks for it, as raise_maximum() does. masked: some
 * row does not see all of the item. */
template <bool BIAS>
DEVICE bool wide_softmax(const DecodeParams &p, const WideBlock &b, WideRows &r, float (&s)[32], const float2 *middles,
                         int kind, int page, bool masked, int lane, float (&factor)[2]) {
    float middle[2] = {0, 0};
    if (BIAS) wide_middle(r, middles, lane, middle);
    if (masked) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const Span see = visible(p, kind, b.token(p, r.row + 8 * h));
            const int at = 64 * page + 2 * (lane & 3);
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (at + 8 * j + e < see.first || at + 8 * j + e >= see.last) s[4 * j + 2 * h + e] = MASKED;
        }
    }
    float top[2] = {s[0], s[2]};
#pragma unroll
    for (int i = 0; i < 32; i++) top[i >> 1 & 1] = fmaxf(top[i >> 1 & 1], s[i]);
    top[0] += middle[0];
    top[1] += middle[1];
    factor[0] = factor[1] = 1;
    const bool up = __any_sync(FULL_WARP, fmaxf(top[0] - r.max[0], top[1] - r.max[1]) * r.scale > RAISE_ABOVE);
    if (up) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            top[h] = fmaxf(top[h], r.max[h]);
            top[h] = fmaxf(top[h], __shfl_xor_sync(FULL_WARP, top[h], 1));
            top[h] = fmaxf(top[h], __shfl_xor_sync(FULL_WARP, top[h], 2));
            factor[h] = exp2_fast((r.max[h] - top[h]) * r.scale);
            r.max[h] = top[h];
            r.sum[h] *= factor[h];
        }
    }
    const float shift[2] = {(r.max[0] - middle[0]) * r.scale, (r.max[1] - middle[1]) * r.scale};
#pragma unroll
    for (int i = 0; i < 32; i++) {
        s[i] = exp2_fast(fmaf(s[i], r.scale, -shift[i >> 1 & 1]));
        r.sum[i >> 1 & 1] += s[i];
    }
    return up;
}

/* Probabilities as A operands. */
DEVICE void wide_pack(const float (&s)[32], uint32_t (&prob)[4][4]) {
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) prob[j >> 1][2 * (j & 1) + h] = pack_half2(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]);
}

/* Starts the product of probabilities and values. */
DEVICE void wide_values(WideRows &r, uint32_t keys, const uint32_t (&prob)[4][4]) {
    wgmma_settle(r.out);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma_128(r.out, prob[k], matrix_of(keys + Wide::KEYS + 32 * k));
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

/* Normalises, adds the mean, writes. */
DEVICE void wide_write(const DecodeParams &p, const WideBlock &b, WideRows &r, float *rows, int group, int lane) {
    const Target to = {b.seq, b.head, b.cta_row, 0};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = r.row + 8 * h, at = b.cta_row + min(row, b.n_rows - 1);
        const int head = b.head * p.gqa + at - divide(at, p.gqa, p.gqa_magic) * p.gqa;
        r.sum[h] += __shfl_xor_sync(FULL_WARP, r.sum[h], 1);
        r.sum[h] += __shfl_xor_sync(FULL_WARP, r.sum[h], 2);
        const float norm = normaliser((r.max[h] + r.constant[h]) * r.scale, r.sum[h], p.sink_logits, head);
#pragma unroll
        for (int j = 0; j < 16; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int d = 8 * j + 2 * (lane & 3) + e;
                const float x = r.out[4 * j + 2 * h + e] * norm;
                if (p.v_rotation_t)
                    rows[(row & 63) * Wide::OUT + d] = x;
                else if (row < b.n_rows)
                    write_value<Wide>(p, to, row, d, x + (p.v_mean_rotated ? __ldg(p.v_mean_rotated + b.head * Wide::D + d) : 0.0f));
            }
    }
    if (!p.v_rotation_t) return;
    asm volatile("bar.sync %0, 128;" ::"r"(3 + group) : "memory");
    wide_turn_back(p, b, rows, 64 * group, static_cast<int>(threadIdx.x & 127));
}

/* Threads 128 and up. */
template <bool BIAS>
DEVICE void attend_all(const DecodeParams &p, const WideBlock &b, uint8_t *shared, uint32_t full, uint32_t empty) {
    const int lane = threadIdx.x & 31, group = (static_cast<int>(threadIdx.x) >> 7) - 1;
    const int first = 64 * group + 16 * (static_cast<int>(threadIdx.x) >> 5 & 3), n_items = b.count();
    WideRows r;
    const float scale = wide_queries(p, b, r, reinterpret_cast<__half *>(shared + Wide::QUERY_AT),
                                     reinterpret_cast<float *>(shared + Wide::CONST_AT), first, lane);
    if (BIAS) wide_bias_queries(p, b, r, scale, lane);
    /* Tiles that every row of the CTA sees whole. */
    const int clear_first = (visible(p, ITEM_TILE, b.length - 1).first + 63) >> 6;
    const int clear_last = visible(p, ITEM_TILE, b.t_first).last >> 6;
    auto stage_of = [&](int item) { return shared_address(shared + item % Wide::STAGES * Wide::STAGE); };
    auto wait_for = [&](int item) { barrier_wait(full + 8 * (item % Wide::STAGES), item / Wide::STAGES & 1); };
    auto middles_of = [&](int item) {
        return reinterpret_cast<const float2 *>(shared + Wide::MIDDLES_AT) + item % Wide::STAGES * Wide::PAIRS;
    };
    auto softmax = [&](int item, float (&s)[32], float (&factor)[2]) {
        const int kind = b.kind(item), page = b.page(item);
        return wide_softmax<BIAS>(p, b, r, s, middles_of(item), kind, page,
                                  kind != ITEM_TILE || page < clear_first || page >= clear_last, lane, factor);
    };
    /* The values' product of an item is under way during the softmax of the next. */
    float s[32], factor[2];
    uint32_t prob[4][4];
    wait_for(0);
    wide_scores<BIAS>(r, stage_of(0), s);
    wgmma_wait<0>();
    wgmma_settle(s);
    softmax(0, s, factor);
    wide_pack(s, prob);
#pragma unroll 1
    for (int item = 1; item < n_items; item++) {
        wait_for(item);
        wide_scores<BIAS>(r, stage_of(item), s);
        wide_values(r, stage_of(item - 1), prob);
        wgmma_wait<1>();
        wgmma_settle(s);
        const bool up = softmax(item, s, factor);
        wgmma_wait<0>();
        wgmma_settle(r.out);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * ((item - 1) % Wide::STAGES));
        if (up) {
#pragma unroll
            for (int i = 0; i < 64; i++) r.out[i] *= factor[i >> 1 & 1];
        }
        wide_pack(s, prob);
    }
    wide_values(r, stage_of(n_items - 1), prob);
    wgmma_wait<0>();
    wgmma_settle(r.out);
    asm volatile("bar.sync 2, %0;" ::"n"(128 * Wide::CONSUMERS) : "memory"); /* the stages are done with */
    wide_write(p, b, r, reinterpret_cast<float *>(shared) + 64 * group * Wide::OUT, group, lane);
}

#endif

template <bool BIAS>
__global__ void __launch_bounds__(Wide::THREADS, 1) prefill_wgmma_kernel(const __grid_constant__ DecodeParams p) {
#if HAVE_WGMMA
    extern __shared__ __align__(128) uint8_t unaligned[];
    uint8_t *shared = unaligned + (-shared_address(unaligned) & 1023);
    const uint32_t raw_full = shared_address(shared + Wide::BARRIERS_AT), full = raw_full + 8 * Wide::RAW;
    const uint32_t empty = full + 8 * Wide::STAGES;
    const int length = load_int(p.lengths + blockIdx.z);
    if (length < p.n_q_tokens) return; /* the sequence is skipped */
    if (threadIdx.x == 0) {
        for (int i = 0; i < Wide::RAW; i++) barrier_init(raw_full + 8 * i, 1);
        for (int i = 0; i < Wide::STAGES; i++) {
            barrier_init(full + 8 * i, 128);
            barrier_init(empty + 8 * i, 4 * Wide::CONSUMERS);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    const WideBlock b = wide_block(p, length);
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
        expand_all<BIAS>(p, b, shared, raw_full, full, empty);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
        attend_all<BIAS>(p, b, shared, full, empty);
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
