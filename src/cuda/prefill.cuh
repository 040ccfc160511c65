/*
 * prefill.cuh - attention of many query tokens of a sequence over its pages and overlay.
 *
 * The products are those of decode_rows.cuh: codes are the A operand as they lie, so nothing is expanded
 * to halves first; here an A fragment serves 32 rows (16 at head_dim 256) of a warp. A CTA has one KV
 * head's next WARPS x ROWS rows (query head within token), and all its warps read the same tiles. Rotated
 * queries stay in shared memory, outputs in registers.
 */
#ifndef OSCAR_CUDA_PREFILL_CUH
#define OSCAR_CUDA_PREFILL_CUH

#include "decode_merge.cuh"

/* Shared memory of a CTA. */
template <class C> struct PrefillShared {
    static constexpr int NATURAL = C::D + 8; /* halves of a row: the padding spreads rows over the banks */
    uint8_t *ring;       /* [STAGES, STAGE] */
    uint4 *bias_table;   /* as in decode, for all warps */
    float2 *bias_wave;   /* [8 steps] nu turned to the page at hand */
    /* Of one warp: */
    uint32_t *fragments; /* [TILES, STEPS / 2, 32, 4] rotated queries as B operands */
    __half *natural;     /* [ROWS, NATURAL] the same in their order */
    uint2 *bias_query;   /* [steps, TILES, 32] raw queries of a lane's two pairs, four halves */
    uint4 *bias_operand; /* [steps, TILES, 32] of the page at hand: high and low halves */
    float *row_const;    /* [ROWS] q . mean, raw */
};

template <class C> __host__ __device__ constexpr int prefill_warp_bytes(int steps) {
    return C::TILES * C::STEPS * 256 + C::ROWS * PrefillShared<C>::NATURAL * 2 + steps * C::TILES * 32 * 24 +
           C::ROWS * 4;
}
template <class C> __host__ __device__ constexpr int prefill_bytes(int steps) {
    return C::STAGES * C::STAGE + steps * (2048 + 64) + C::WARPS * prefill_warp_bytes<C>(steps);
}

template <class C> DEVICE PrefillShared<C> prefill_shared(uint8_t *at, int steps, int warp) {
    PrefillShared<C> s;
    s.ring = at;
    at += C::STAGES * C::STAGE;
    s.bias_table = reinterpret_cast<uint4 *>(at);
    s.bias_wave = reinterpret_cast<float2 *>(at + steps * 2048);
    at += steps * (2048 + 64) + warp * prefill_warp_bytes<C>(steps);
    s.fragments = reinterpret_cast<uint32_t *>(at);
    s.natural = reinterpret_cast<__half *>(at + C::TILES * C::STEPS * 256);
    s.bias_operand = reinterpret_cast<uint4 *>(reinterpret_cast<uint8_t *>(s.natural) +
                                               C::ROWS * PrefillShared<C>::NATURAL * 2);
    s.bias_query = reinterpret_cast<uint2 *>(s.bias_operand + steps * C::TILES * 32);
    s.row_const = reinterpret_cast<float *>(s.bias_query + steps * C::TILES * 32);
    return s;
}

/* Rows of a CTA and of one of its warps; rows are counted from the chunk's first token's first query head. */
struct PrefillBlock {
    int seq, head, chunk_first; /* position of the chunk's first token */
    int t_first, length;        /* positions t_first .. length - 1 of the CTA's rows */
    int first_row, n_rows;      /* of this warp */
};

/* Position of the token of score column i. */
template <class C> DEVICE int prefill_token(const DecodeParams &p, const PrefillBlock &b, int i, int lane) {
    const int row = b.first_row + min(4 * i + (lane & 3), max(b.n_rows - 1, 0));
    return b.chunk_first + divide(row, p.gqa, p.gqa_magic);
}

/* First element of row `row` of the warp, or NULL. */
template <class C> DEVICE const uint16_t *prefill_row(const DecodeParams &p, const PrefillBlock &b, int row) {
    if (row >= b.n_rows) return nullptr;
    const int r = b.first_row + row, token = divide(r, p.gqa, p.gqa_magic), head = b.head * p.gqa + r - token * p.gqa;
    return p.q + (static_cast<size_t>(b.seq * p.n_q_tokens + token) * (p.n_kv_heads * p.gqa) + head) * C::D;
}

/* Rotates the warp's rows into shared memory; a power of two scales all of them. Returns it. */
template <class C>
DEVICE float prefill_queries(const DecodeParams &p, const PrefillShared<C> &s, const PrefillBlock &b, int lane) {
    const int g = lane >> 2, t = lane & 3;
    float top = 1e-20f;
#pragma unroll 1
    for (int row = 0; row < b.n_rows; row++) {
        const uint16_t *q = prefill_row<C>(p, b, row);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < C::D / 32; i++) {
            const float x = q_value<C>(p, q[32 * i + lane], 0);
            top = fmaxf(top, fabsf(x));
            if (p.k_mean) sum = fmaf(x, __ldg(p.k_mean + b.head * C::D + 32 * i + lane), sum);
        }
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) sum += __shfl_xor_sync(FULL_WARP, sum, d);
        if (lane == 0) s.row_const[row] = sum;
    }
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, d));
    const float scale = __int_as_float((9 - ((__float_as_int(top) >> 23) - 127) + 127) << 23);
    __syncwarp();
    if (lane < C::ROWS) s.row_const[lane] = lane < b.n_rows ? s.row_const[lane] * scale * CODE_UNIT : 0.0f;
#pragma unroll 1
    for (int j = 0; j < C::ROWS / 8; j++) {
        const uint16_t *row = prefill_row<C>(p, b, 8 * j + g);
        uint4 x[C::D / 32];
#pragma unroll
        for (int m = 0; m < C::D / 32; m++) {
            x[m] = row ? load_uint4(row + 32 * m + 8 * t) : make_uint4(0, 0, 0, 0);
            uint32_t *w = reinterpret_cast<uint32_t *>(&x[m]);
#pragma unroll
            for (int k = 0; k < 4; k++)
                w[k] = pack_half2(q_value<C>(p, w[k], 0) * scale, q_value<C>(p, w[k], 1) * scale);
        }
        const uint4 *u = p.k_rotation + static_cast<size_t>(b.head) * C::STEPS * C::STEPS * 64 + lane;
#pragma unroll 1
        for (int m = 0; m < C::STEPS; m++) {
            float c[4] = {0, 0, 0, 0};
#pragma unroll
            for (int k = 0; k < C::STEPS; k++) {
                const uint4 high = load_kept(u + (m * C::STEPS + k) * 64), low = load_kept(u + (m * C::STEPS + k) * 64 + 32);
                const uint32_t b0 = k & 1 ? x[k / 2].z : x[k / 2].x, b1 = k & 1 ? x[k / 2].w : x[k / 2].y;
                mma_f16(c, high.x, high.y, high.z, high.w, b0, b1);
                mma_f16(c, low.x, low.y, low.z, low.w, b0, b1);
            }
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int r = 8 * j + 2 * t + e;
                put_query<C>(s.fragments, m, g, r, c[e], c[2 + e]);
                s.natural[r * PrefillShared<C>::NATURAL + 16 * m + g] = __float2half_rn(c[e]);
                s.natural[r * PrefillShared<C>::NATURAL + 16 * m + 8 + g] = __float2half_rn(c[2 + e]);
            }
        }
    }
    return scale;
}

/* Raw queries of the tracked pairs, scaled; exact, since a bf16 or fp16 number times a power of two is one. */
template <class C>
DEVICE void prefill_bias_queries(const DecodeParams &p, const PrefillShared<C> &s, const PrefillBlock &b, float scale,
                                 int lane) {
#pragma unroll 1
    for (int i = lane; i < p.bias_steps * C::TILES * 32; i += 32) {
        const int step = i / (C::TILES * 32), j = i / 32 % C::TILES;
        const uint16_t *q = prefill_row<C>(p, b, column_row<C>(j, (i & 31) >> 2));
        uint2 x = make_uint2(0, 0);
        if (q) {
            const int4 dims =
                __ldg(reinterpret_cast<const int4 *>(p.bias_dims + (b.head * p.bias_steps + step) * 8 + 2 * (i & 3)));
            x.x = pack_half2(q_value<C>(p, q[dims.x], 0) * scale, q_value<C>(p, q[dims.y], 0) * scale);
            x.y = pack_half2(q_value<C>(p, q[dims.z], 0) * scale, q_value<C>(p, q[dims.w], 0) * scale);
        }
        s.bias_query[i] = x;
    }
}

/* nu turned to a page, by the CTA. */
template <class C> DEVICE void prefill_wave(const DecodeParams &p, const PrefillShared<C> &s, int head, int page) {
    for (int i = threadIdx.x; i < 8 * p.bias_steps; i += C::THREADS) {
        const float2 nu = __ldg(reinterpret_cast<const float2 *>(p.bias_nu) + head * 8 * p.bias_steps + i);
        const float2 e = bias_phase(__ldg(p.bias_turn + head * 8 * p.bias_steps + i), page);
        s.bias_wave[i] = make_float2(nu.x * e.x - nu.y * e.y, nu.y * e.x + nu.x * e.y);
    }
}

/* B operands of the warp's rows for the page of bias_wave, and what is constant over it. */
template <class C>
DEVICE void prefill_operands(const DecodeParams &p, const PrefillShared<C> &s, const Rows<C> &r, int lane,
                             float (&constant)[C::COLUMNS]) {
    float partial[C::TILES];
#pragma unroll
    for (int j = 0; j < C::TILES; j++) partial[j] = 0;
#pragma unroll 1
    for (int step = 0; step < p.bias_steps; step += 2) {
        const float4 *wave = reinterpret_cast<const float4 *>(s.bias_wave) + step * 4 + (lane & 3);
        const float4 n[2] = {wave[0], wave[4]};
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
            float z[2][4];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const uint2 x = s.bias_query[((step + k) * C::TILES + j) * 32 + lane];
                const float2 a = __half22float2(bits_half2(x.x)), b = __half22float2(bits_half2(x.y));
                z[k][0] = a.x * n[k].x + a.y * n[k].y;
                z[k][1] = a.y * n[k].x - a.x * n[k].y;
                z[k][2] = b.x * n[k].z + b.y * n[k].w;
                z[k][3] = b.y * n[k].z - b.x * n[k].w;
                partial[j] += z[k][0] + z[k][2];
            }
            uint32_t first[2], second[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                bias_operands(z[0][k], z[0][2 + k], z[1][k], z[1][2 + k], first, second);
                s.bias_operand[((step + k) * C::TILES + j) * 32 + lane] =
                    make_uint4(first[0], first[1], second[0], second[1]);
            }
        }
    }
    __syncwarp();
    bias_constants<C>(r, partial, constant, lane);
}

/* Bias of sub-tile `sub` of the page. */
template <class C>
DEVICE void prefill_bias(const DecodeParams &p, const PrefillShared<C> &s, int sub, int lane, float (&c)[C::TILES][4]) {
    const uint4 *table = s.bias_table + 32 * (sub < 2 ? 1 - sub : sub - 2);
#pragma unroll
    for (int j = 0; j < C::TILES; j++) {
        float part[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll 1
        for (int step = 0; step < p.bias_steps; step += 2)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const uint4 x = s.bias_operand[((step + k) * C::TILES + j) * 32 + lane];
                const uint32_t first[2] = {x.x, x.y}, second[2] = {x.z, x.w};
                bias_product(part[k], table + (step + k) * 128, lane, step < p.bias_split_steps, first, second);
            }
        if (sub < 2)
            bias_before(part[0], part[1], c[j]);
        else
            bias_after(part[0], part[1], c[j]);
    }
}

/* q.c of 16 tokens. */
template <class C, int BITS>
DEVICE void prefill_products(const PrefillShared<C> &s, const uint8_t *keys, const uint8_t *high, int lane,
                             float (&c)[C::G][C::TILES][4]) {
    Codes<C, BITS> codes;
    codes.load(keys, high, lane);
    const uint32_t fragments = shared_address(s.fragments) + 16 * lane;
#pragma unroll
    for (int k = 0; k < C::G; k++)
#pragma unroll
        for (int j = 0; j < C::TILES; j++) c[k][j][0] = c[k][j][1] = c[k][j][2] = c[k][j][3] = 0;
#pragma unroll
    for (int v = 0; v < C::STEPS / 2; v++) {
        uint32_t a[2][4];
        codes.fragment(2 * v, a[0]);
        codes.fragment(2 * v + 1, a[1]);
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
            uint32_t b[4];
            load_shared(b, fragments + (j * (C::STEPS / 2) + v) * 512);
            float(&to)[4] = c[v / 2 / C::WORDS_A_GROUP][j];
            mma_f16(to, a[0][0], a[0][2], a[0][1], a[0][3], b[0], b[1]);
            mma_f16(to, a[1][0], a[1][2], a[1][1], a[1][3], b[2], b[3]);
        }
    }
}

/* A tile of 64 quantised tokens, 16 at a time. */
template <class C, int MODE>
DEVICE void prefill_tile(Rows<C> &r, const PrefillShared<C> &s, const DecodeParams &p, const PrefillBlock &b,
                         const uint8_t *tile, int page, bool masked, int lane) {
    const uint8_t *params = tile + 32 * C::D, *high_k = tile + C::LOW_TILE;
    const uint8_t *high_v = high_k + (C::HIGH && p.bits_k > 2 ? 4 * high_sub_tile<C>(p.bits_k) : 0);
    float constant[C::COLUMNS];
    if constexpr (MODE != MODE_PLAIN) prefill_operands<C>(p, s, r, lane, constant);
#pragma unroll 1
    for (int n = 0; n < 4; n++) {
        const uint8_t *keys = tile + n * 4 * C::D;
        float c[C::G][C::TILES][4], bias[C::TILES][4], score[2][C::COLUMNS];
        if (!C::HIGH || p.bits_k == 2)
            prefill_products<C, 2>(s, keys, high_k, lane, c);
        else if (p.bits_k == 3)
            prefill_products<C, 3>(s, keys, high_k + n * high_sub_tile<C>(3), lane, c);
        else
            prefill_products<C, 4>(s, keys, high_k + n * high_sub_tile<C>(4), lane, c);
        if constexpr (MODE != MODE_PLAIN) prefill_bias<C>(p, s, n, lane, bias);
        score_sub_tile<C, MODE != MODE_PLAIN>(r, c, params + 64 * n, lane, bias, constant, score);
        if (MODE != MODE_PLAIN && p.softcap_log2 > 0) {
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int i = 0; i < C::COLUMNS; i++) score[h][i] = soft_cap(score[h][i], r.scale[i], p.softcap_log2);
        }
        uint32_t keep_low = FULL_WARP, keep_high = FULL_WARP;
        if (masked) {
            const int position = 64 * page + 16 * n + (lane >> 2), last = visible(p, ITEM_TILE, b.length - 1).last;
            if (position >= last) keep_low = 0;
            if (position + 8 >= last) keep_high = 0;
#pragma unroll
            for (int i = 0; i < C::COLUMNS; i++) {
                const Span see = visible(p, ITEM_TILE, prefill_token<C>(p, b, i, lane));
                if (position < see.first || position >= see.last) score[0][i] = MASKED;
                if (position + 8 < see.first || position + 8 >= see.last) score[1][i] = MASKED;
            }
        }
        raise_maximum<C, 2>(r, score);
        float top[C::COLUMNS];
#pragma unroll
        for (int i = 0; i < C::COLUMNS; i++) top[i] = r.row_max[i] * r.scale[i];
        value_sub_tile<C>(r, tile + 16 * C::D + n * 4 * C::D, high_v + (C::HIGH ? n * high_sub_tile<C>(p.bits_v) : 0),
                          p.bits_v, params + 256 * C::G + 64 * n, lane, score, top, keep_low, keep_high);
    }
}

/* Constants of the rows; clears the accumulators. Without a bias, q . mean is the same for all keys of a row and
 * waits until the end. */
template <class C, int MODE>
DEVICE void prefill_start(Rows<C> &r, const DecodeParams &p, const PrefillShared<C> &s, const PrefillBlock &b, float scale,
                          int lane) {
    const int t = lane & 3;
    const uint32_t fragments = shared_address(s.fragments) + 16 * lane;
    const float to_log2 = __fdividef(p.scale_log2, scale * CODE_UNIT);
    const float bias_unit = MODE == MODE_PLAIN || !p.bias_units ? 0.0f : __ldg(p.bias_units + b.head) * CODE_UNIT;
#pragma unroll
    for (int j = 0; j < C::TILES; j++) {
        uint32_t q[C::STEPS / 2][4];
#pragma unroll
        for (int v = 0; v < C::STEPS / 2; v++) load_shared(q[v], fragments + (j * (C::STEPS / 2) + v) * 512);
#pragma unroll
        for (int k = 0; k < C::G; k++) {
            float sum[4] = {0, 0, 0, 0};
#pragma unroll
            for (int m = 0; m < 4 * C::WORDS_A_GROUP; m++) {
                const uint32_t one = pack_half2(1 << (2 * (m & 3)), 1 << (2 * (m & 3)));
                const int step = 4 * C::WORDS_A_GROUP * k + m;
                mma_f16(sum, one, one, one, one, q[step / 2][2 * (step & 1)], q[step / 2][2 * (step & 1) + 1]);
            }
            r.q_sum[2 * j][k] = sum[0] * CODE_UNIT;
            r.q_sum[2 * j + 1][k] = sum[1] * CODE_UNIT;
        }
#pragma unroll
        for (int m = 0; m < C::STEPS; m++)
#pragma unroll
            for (int k = 0; k < 4; k++) r.acc[j][m][k] = 0;
    }
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
        r.scale[i] = to_log2;
        r.bias_unit[i] = bias_unit;
        r.q_const[i] = MODE == MODE_PLAIN ? 0.0f : s.row_const[4 * i + t];
        r.row_max[i] = NO_MAXIMUM;
        r.row_sum[i] = 0;
#pragma unroll
        for (int k = 0; k < C::G; k++) r.offset_sum[i][k] = 0;
    }
}

/* A unit of 8 BF16 tokens. Queries are split in bf16 halves, which hold all of their fp16 bits. */
template <class C, int MODE>
DEVICE void prefill_unit(Rows<C> &r, const PrefillShared<C> &s, const DecodeParams &p, const PrefillBlock &b,
                         const uint8_t *unit, int kind, int position, int lane) {
    const int g = lane >> 2, t = lane & 3;
    float c[C::TILES][4], score[1][C::COLUMNS];
#pragma unroll
    for (int j = 0; j < C::TILES; j++) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0;
#pragma unroll 1
    for (int m = 0; m < C::D / 32; m++) {
        const uint4 x = *reinterpret_cast<const uint4 *>(unit + g * 2 * C::D + m * 64 + t * 16);
#pragma unroll
        for (int j = 0; j < C::TILES; j++) {
            const uint4 q = *reinterpret_cast<const uint4 *>(s.natural + column_row<C>(j, g) * PrefillShared<C>::NATURAL +
                                                             32 * m + 8 * t);
            const uint32_t w[4] = {q.x, q.y, q.z, q.w};
            uint32_t high[4], low[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float2 f = __half22float2(bits_half2(w[k]));
                high[k] = pack_bf162(f.x, f.y);
                low[k] = pack_bf162(f.x - bf16_low(high[k]), f.y - bf16_high(high[k]));
            }
            mma_bf16(c[j], x.x, 0u, x.y, 0u, high[0], high[1]);
            mma_bf16(c[j], x.z, 0u, x.w, 0u, high[2], high[3]);
            mma_bf16(c[j], x.x, 0u, x.y, 0u, low[0], low[1]);
            mma_bf16(c[j], x.z, 0u, x.w, 0u, low[2], low[3]);
        }
    }
    float bias[C::TILES][4], constant[C::COLUMNS];
    const bool upper = position & 8;
    if constexpr (MODE != MODE_PLAIN) {
        prefill_operands<C>(p, s, r, lane, constant);
        prefill_bias<C>(p, s, (position & 63) >> 4, lane, bias);
    }
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
        const int j = i >> 1;
        float x = c[j][i & 1] * CODE_UNIT;
        if constexpr (MODE != MODE_PLAIN) {
            x += fmaf(upper ? bias[j][2 + (i & 1)] : bias[j][i & 1], r.bias_unit[i], constant[i]);
            if (p.softcap_log2 > 0) x = soft_cap(x, r.scale[i], p.softcap_log2);
        }
        const Span see = visible(p, kind, prefill_token<C>(p, b, i, lane));
        score[0][i] = position + g < see.first || position + g >= see.last ? MASKED : x;
    }
    weigh_unit<C>(r, p, unit + C::UNIT, lane, score, kind, position, b.t_first, b.length);
}

/* Normalised rows of the warp to [ROWS, D + 4] floats, which take the place of its queries. */
template <class C, int MODE>
DEVICE void prefill_normalise(Rows<C> &r, const DecodeParams &p, const PrefillBlock &b, const float *row_const, float *out,
                              int lane) {
    const int g = lane >> 2, t = lane & 3;
    float constants[C::COLUMNS];
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) constants[i] = MODE == MODE_PLAIN ? row_const[4 * i + t] : 0.0f;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < C::COLUMNS; i++) {
        const int j = i >> 1, row = 4 * i + t;
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) {
            r.row_sum[i] += __shfl_xor_sync(FULL_WARP, r.row_sum[i], d);
#pragma unroll
            for (int k = 0; k < C::G; k++) r.offset_sum[i][k] += __shfl_xor_sync(FULL_WARP, r.offset_sum[i][k], d);
        }
        const int q_row = b.first_row + min(row, max(b.n_rows - 1, 0));
        const int q_head = b.head * p.gqa + q_row - divide(q_row, p.gqa, p.gqa_magic) * p.gqa;
        const float norm = normaliser((r.row_max[i] + constants[i]) * r.scale[i], r.row_sum[i], p.sink_logits, q_head);
#pragma unroll
        for (int m = 0; m < C::STEPS; m++) {
            const float unit = static_cast<float>(1 << (24 - 2 * (m & 3)));
            const float offset = r.offset_sum[i][m / 4 / C::WORDS_A_GROUP];
            float *to = out + row * (C::D + 4) + 16 * m + g;
            to[0] = fmaf(r.acc[j][m][i & 1], unit, offset) * norm;
            to[8] = fmaf(r.acc[j][m][2 + (i & 1)], unit, offset) * norm;
        }
    }
    __syncwarp();
}

/* Adds the mean, turns back, writes. A lane has every 32nd channel, of eight rows at a time. */
template <class C>
DEVICE void prefill_write(const DecodeParams &p, const PrefillBlock &b, const float *rows, int lane) {
    constexpr int N = C::D / 32;
    const float *mean = p.v_mean_rotated ? p.v_mean_rotated + b.head * C::D : nullptr;
    const float *back = p.v_rotation_t ? p.v_rotation_t + static_cast<size_t>(b.head) * C::D * C::D : nullptr;
#pragma unroll 1
    for (int first = 0; first < b.n_rows; first += 8) {
        float x[8][N];
#pragma unroll
        for (int k = 0; k < 8; k++)
#pragma unroll
            for (int n = 0; n < N; n++)
                x[k][n] = back ? 0.0f : rows[(first + k) * (C::D + 4) + 32 * n + lane] + (mean ? __ldg(mean + 32 * n + lane) : 0.0f);
        if (back)
#pragma unroll 2
            for (int i = 0; i < C::D; i++) {
                float u[N];
                const float m = mean ? __ldg(mean + i) : 0.0f;
#pragma unroll
                for (int n = 0; n < N; n++) u[n] = __ldg(back + i * C::D + 32 * n + lane);
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    const float v = rows[(first + k) * (C::D + 4) + i] + m;
#pragma unroll
                    for (int n = 0; n < N; n++) x[k][n] = fmaf(v, u[n], x[k][n]);
                }
            }
#pragma unroll
        for (int k = 0; k < 8; k++) {
            if (first + k >= b.n_rows) continue;
            const Target to = {b.seq, b.head, b.first_row, b.n_rows};
#pragma unroll
            for (int n = 0; n < N; n++) write_value<C>(p, to, first + k, 32 * n + lane, x[k][n]);
        }
    }
}

/* Copies an item of the CTA into a stage; a group is committed also without one, so that they can be counted. */
template <class C> DEVICE void prefill_fetch(const DecodeParams &p, uint8_t *stage, bool any, uint32_t source) {
    const uint32_t to = shared_address(stage);
    if (any && source & OVERLAY_ITEM) {
        const size_t rows = static_cast<size_t>(source & ~OVERLAY_ITEM) * (16 * C::D);
        const uint8_t *k = reinterpret_cast<const uint8_t *>(p.overlay_k) + rows;
        const uint8_t *v = reinterpret_cast<const uint8_t *>(p.overlay_v) + rows;
        for (int i = 16 * threadIdx.x; i < 2 * C::UNIT; i += 16 * C::THREADS)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(i < C::UNIT ? k + i : v + i - C::UNIT)
                         : "memory");
    } else if (any) {
        const uint8_t *from = p.pages + static_cast<size_t>(source) * p.tile_bytes;
        for (int i = 16 * threadIdx.x; i < p.tile_bytes; i += 16 * C::THREADS)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(from + i) : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <class C, int MODE>
__global__ void __launch_bounds__(C::THREADS, 1) prefill_kernel(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(128) uint8_t shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, steps = MODE == MODE_PLAIN ? 0 : p.bias_steps;
    const int rows = p.n_q_tokens * p.gqa, cta_row = (gridDim.x - 1 - blockIdx.x) * C::WARPS * C::ROWS;
    PrefillBlock b;
    b.head = blockIdx.y;
    b.seq = blockIdx.z;
    const int length = load_int(p.lengths + b.seq);
    if (length < p.n_q_tokens) return; /* the sequence is skipped */
    b.chunk_first = length - p.n_q_tokens;
    b.t_first = b.chunk_first + divide(cta_row, p.gqa, p.gqa_magic);
    b.length = b.chunk_first + divide(min(cta_row + C::WARPS * C::ROWS, rows) - 1, p.gqa, p.gqa_magic) + 1;
    b.first_row = min(cta_row + warp * C::ROWS, rows - 1);
    b.n_rows = max(min(C::ROWS, rows - cta_row - warp * C::ROWS), 0);
    const PrefillShared<C> s = prefill_shared<C>(shared, steps, warp);
    const Items items = items_between(p, b.t_first, b.length);
    const Place place = {b.seq, b.head, 0, b.length};
    const int n_items = items.count();
    auto source_of = [&](int item) { return item < n_items ? source_in_segment(p, item, place, items) : 0u; };
    for (int i = 0; i < C::STAGES - 1; i++) prefill_fetch<C>(p, s.ring + i * C::STAGE, i < n_items, source_of(i));
    uint32_t next_source = source_of(C::STAGES - 1);
    const float scale = prefill_queries<C>(p, s, b, lane);
    if constexpr (MODE != MODE_PLAIN) {
        prefill_bias_queries<C>(p, s, b, scale, lane);
        for (int i = threadIdx.x; i < steps * 128; i += C::THREADS)
            s.bias_table[i] = __ldg(p.bias_table + static_cast<size_t>(b.head) * steps * 128 + i);
    }
    __syncwarp();
    Rows<C> r;
    prefill_start<C, MODE>(r, p, s, b, scale, lane);
    /* Tiles that every row sees whole. */
    const int clear_first = (visible(p, ITEM_TILE, b.length - 1).first + 63) >> 6;
    const int clear_last = visible(p, ITEM_TILE, b.t_first).last >> 6;
    int stage = 0, wave_page = -1;
#pragma unroll 1
    for (int item = 0; item < n_items; item++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(C::STAGES - 2) : "memory");
        const bool unit = item < items.units(), sink = item < items.n_sink;
        const int row8 = sink ? items.sink_first + item : items.recent_first + item - items.n_sink;
        const int page = unit ? row8 >> 3 : items.tile_first + item - items.units();
        if (MODE != MODE_PLAIN && page != wave_page) {
            __syncthreads(); /* the last page's wave is done with */
            prefill_wave<C>(p, s, b.head, page);
            wave_page = page;
        }
        __syncthreads();
        const int free_stage = stage == 0 ? C::STAGES - 1 : stage - 1;
        prefill_fetch<C>(p, s.ring + free_stage * C::STAGE, item + C::STAGES - 1 < n_items, next_source);
        next_source = source_of(item + C::STAGES);
        const uint8_t *at = s.ring + stage * C::STAGE;
        if (unit)
            prefill_unit<C, MODE>(r, s, p, b, at, sink ? ITEM_SINK : ITEM_RECENT, 8 * row8, lane);
        else
            prefill_tile<C, MODE>(r, s, p, b, at, page, page < clear_first || page >= clear_last, lane);
        if (++stage == C::STAGES) stage = 0;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    float *out = reinterpret_cast<float *>(s.fragments);
    prefill_normalise<C, MODE>(r, p, b, s.row_const, out, lane);
    prefill_write<C>(p, b, out, lane);
}

#endif
