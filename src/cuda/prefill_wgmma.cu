/*
 * prefill_wgmma.cu - attention of many query tokens at head_dim 128, on the asynchronous tensor cores of compute
 * capability 9.0a: two bits, at most 16 tracked pairs, no soft cap. What else there is, prefill.cuh does.
 *
 * Two warpgroups expand, every other tile each (prefill_expand.cuh). Two warpgroups attend, 64 rows each, as for any
 * fp16 cache: scores from queries in registers, a softmax in registers, whose probabilities are the A operand of the
 * second product. The expansion takes issue slots that the products leave free.
 */
#include <type_traits>

#include "prefill_expand.cuh"

namespace {

#if HAVE_WGMMA
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
/* c [64, 32] (+)= a [64, 16] b [16, 32]. */
DEVICE void wgmma_32(float (&c)[16], const uint32_t (&a)[4], uint64_t b, int accumulate) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %21, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, 0;\n\t}"
                 : SIXTEEN(c, 0)
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

/* First element of a row of the CTA, in queries and in the output; rows that do not exist are as the last. */
DEVICE size_t wide_row(const DecodeParams &p, const WideBlock &b, int row) {
    const int at = b.cta_row + min(row, b.n_rows - 1), token = divide(at, p.gqa, p.gqa_magic);
    const int others = (p.n_kv_heads - 1) * p.gqa; /* rows of other KV heads a token */
    return (static_cast<size_t>(b.seq * p.n_q_tokens) * (p.n_kv_heads * p.gqa) + b.head * p.gqa + at + token * others) * Wide::D;
}

DEVICE float2 query_floats(const DecodeParams &p, uint32_t word) {
    return p.q_is_bf16 ? make_float2(bf16_low(word), bf16_high(word)) : __half22float2(bits_half2(word));
}

/* Two rows' queries, and what their tracked pairs are measured with. */
template <bool BIAS> struct WideQueries {
    uint32_t x[8][4]; /* A operands: channels 32 m + 8 t .. + 3 of rows g and g + 8 in step 2 m, .. + 7 in the next */
    float4 nu[2];     /* of four pairs, over `unit` */
    float unit;
    float scale;      /* a power of two, which x has been multiplied by */

    DEVICE void load(const DecodeParams &p, const WideBlock &b, int first, int lane) {
        const int t = lane & 3;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint16_t *row = p.q + wide_row(p, b, first + 8 * j) + 8 * t;
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const uint4 v = load_uint4(row + 32 * m);
                x[2 * m][j] = v.x;
                x[2 * m][2 + j] = v.y;
                x[2 * m + 1][j] = v.z;
                x[2 * m + 1][2 + j] = v.w;
            }
        }
        if constexpr (BIAS) {
            const float2 *from = reinterpret_cast<const float2 *>(p.bias_nu) + b.head * Wide::PAIRS + (t & 2) + 8 * (t & 1);
#pragma unroll
            for (int k = 0; k < 2; k++) nu[k] = __ldg(reinterpret_cast<const float4 *>(from + 4 * k));
            unit = __ldg(p.bias_units + b.head);
        }
    }

    /* q . mean of the two rows, as loaded. */
    DEVICE void dot_mean(const DecodeParams &p, const WideBlock &b, int lane, float (&sum)[2]) const {
        sum[0] = sum[1] = 0;
        if (!p.k_mean) return;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const int channel = 32 * (k >> 1) + 8 * (lane & 3) + 4 * (k & 1);
            const float4 mean = __ldg(reinterpret_cast<const float4 *>(p.k_mean + b.head * Wide::D + channel));
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float2 v = query_floats(p, x[k][j]), w = query_floats(p, x[k][2 + j]);
                sum[j] = fmaf(v.x, mean.x, fmaf(v.y, mean.y, fmaf(w.x, mean.z, fmaf(w.y, mean.w, sum[j]))));
            }
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            sum[j] += __shfl_xor_sync(FULL_WARP, sum[j], 1);
            sum[j] += __shfl_xor_sync(FULL_WARP, sum[j], 2);
        }
    }

    /* To fp16, times what brings the warp's largest to 2^9. */
    DEVICE void to_half(const DecodeParams &p) {
        float top = 1e-20f;
        if (p.q_is_bf16) {
            __nv_bfloat162 most = __float2bfloat162_rn(0.0f);
#pragma unroll
            for (int i = 0; i < 32; i++)
                most = __hmax2(most, __habs2(*reinterpret_cast<const __nv_bfloat162 *>(&x[i >> 2][i & 3])));
            top = fmaxf(top, fmaxf(__low2float(most), __high2float(most)));
        } else {
            __half2 most = __float2half2_rn(0.0f);
#pragma unroll
            for (int i = 0; i < 32; i++) most = __hmax2(most, __habs2(bits_half2(x[i >> 2][i & 3])));
            top = fmaxf(top, fmaxf(__low2float(most), __high2float(most)));
        }
        top = __uint_as_float(__reduce_max_sync(FULL_WARP, __float_as_uint(top)));
        scale = __int_as_float((9 - ((__float_as_int(top) >> 23) - 127) + 127) << 23);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const float2 f = query_floats(p, x[i >> 2][i & 3]);
            x[i >> 2][i & 3] = pack_half2(f.x * scale, f.y * scale);
        }
    }
};

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

/* Takes over the query's channels of four pairs, of both rows, in the order of the waves: exact, for they have at most 11
 * bits. Returns the larger sum of |q| |nu| over a row's pairs. */
DEVICE float wide_bias_queries(const WideQueries<true> &q, WideRows &r, const float (&c)[16]) {
    float most = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const float *first = c + 4 * k + 2 * h, *second = first + 8;
            const float4 &nu = q.nu[k];
            sum += (fabsf(first[0]) + fabsf(second[0])) * (fabsf(nu.x) + fabsf(nu.y)) +
                   (fabsf(first[1]) + fabsf(second[1])) * (fabsf(nu.z) + fabsf(nu.w));
            r.pairs[0][2 * k + h] = pack_half2(first[0], first[1]);
            r.pairs[1][2 * k + h] = pack_half2(second[0], second[1]);
        }
        sum += __shfl_xor_sync(FULL_WARP, sum, 1);
        sum += __shfl_xor_sync(FULL_WARP, sum, 2);
        most = fmaxf(most, sum);
    }
    return most * q.unit;
}

/* Turns queries, by products in which the matrix staged by the expanding warpgroups is what keys are otherwise; brings what
 * waves are made of while that goes on. Returns whether a bias of the warpgroup's rows needs low halves. */
template <bool BIAS>
DEVICE bool wide_turn(const DecodeParams &p, const WideBlock &b, const WideQueries<BIAS> &q, WideRows &r, uint8_t *shared,
                      const WideBarriers &at, int group, int lane) {
    constexpr float LIMIT = 16; /* in log2: the error is below 2^-7, 0.0055 of a logit */
    const uint32_t high = shared_address(shared + Wide::TURN_HIGH_AT), low = shared_address(shared + Wide::TURN_LOW_AT);
    const uint32_t ones = shared_address(shared + Wide::TURN_PAIRS_AT);
    float pairs[16];
#pragma unroll
    for (int i = 0; i < 64; i++) r.out[i] = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) pairs[i] = 0;
    asm volatile("bar.sync 11, %0;" ::"n"(Wide::THREADS) : "memory"); /* high halves are there */
    wgmma_settle(r.out);
    wgmma_settle(pairs);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; k++) wgmma_128(r.out, q.x[k], matrix_of(high, Wide::KEYS * (k >> 2) + 32 * (k & 3)));
    if (BIAS) {
#pragma unroll
        for (int k = 0; k < 8; k++) wgmma_32(pairs, q.x[k], matrix_of(ones, 4096 * (k >> 2) + 32 * (k & 3)), 1);
    }
    wgmma_commit();
    if (BIAS) {
        if (threadIdx.x < 128)
            reinterpret_cast<WaveTable *>(shared + Wide::WAVE_TABLE_AT)->load(p, b.head, static_cast<int>(threadIdx.x));
        asm volatile("bar.arrive 10, %0;" ::"n"(Wide::THREADS) : "memory");
    }
    asm volatile("bar.sync 9, %0;" ::"n"(Wide::THREADS) : "memory"); /* low halves are there */
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; k++) wgmma_128(r.out, q.x[k], matrix_of(low, Wide::KEYS * (k >> 2) + 32 * (k & 3)));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(r.out);
    wgmma_settle(pairs);
    __syncwarp();
    if (lane == 0) {
        barrier_arrive(at.keys_empty + 8 * (Wide::STAGES - 1));
        barrier_arrive(at.values_empty + 8 * (Wide::STAGES - 1));
    }
    r.scale = __fdividef(p.scale_log2, q.scale);
#pragma unroll
    for (int k = 0; k < 8; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) r.q[k][i] = pack_half2(r.out[8 * k + 2 * i], r.out[8 * k + 2 * i + 1]);
#pragma unroll
    for (int i = 0; i < 64; i++) r.out[i] = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        r.max[h] = NO_MAXIMUM;
        r.sum[h] = 0;
    }
    if constexpr (BIAS)
        return group_any(4 + group, !(wide_bias_queries(q, r, pairs) * r.scale < LIMIT));
    else
        return false;
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
    const int kind = b.kind(item), first = 64 * b.page(item), at = first + 8 * (tid & 1) + (tid & 2);
    if (first >= visible(p, kind, b.length - 1).first && first + 64 <= visible(p, kind, b.t_first).last) return; /* all see all */
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

/* Raises the running maxima to an item's scores. factor: what outputs and sums so far are to be multiplied by. */
DEVICE void wide_raise(WideRows &r, const float (&s)[32], float (&factor)[2]) {
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
    }
}

/* The softmax of an item's scores: probabilities, and what outputs so far are to be multiplied by; false when that is 1.
 * Nothing looks for the largest score unless a sum of probabilities is so large that one of them may be beyond fp16: the
 * running maxima are lower than the scores' by no more than that allows, and raised only then, and by the first item. */
template <bool FIRST> DEVICE bool wide_softmax(WideRows &r, const float (&s)[32], uint32_t (&prob)[4][4], float (&factor)[2]) {
    constexpr float LARGE = 1024;
    float sum[2];
    if (!FIRST) wide_probabilities(r, s, prob, sum);
    const bool up = FIRST || __any_sync(FULL_WARP, fmaxf(sum[0], sum[1]) > LARGE);
    if (up) {
        wide_raise(r, s, factor);
#pragma unroll
        for (int h = 0; h < 2; h++) r.sum[h] *= factor[h];
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

/* Rows in shared memory [64, OUT] of a warpgroup, turned back, to the output. */
DEVICE void wide_turn_back(const DecodeParams &p, const WideBlock &b, const float *rows, int first, int tid) {
    const float *back = p.v_rotation_t + static_cast<size_t>(b.head) * Wide::D * Wide::D + tid;
#pragma unroll 1
    for (int row = 0; row < 64 && first + row < b.n_rows; row += 16) {
        float x[16];
#pragma unroll
        for (int k = 0; k < 16; k++) x[k] = 0;
#pragma unroll 2
        for (int i = 0; i < Wide::D; i++) {
            const float u = __ldg(back + i * Wide::D);
#pragma unroll
            for (int k = 0; k < 16; k++) x[k] = fmaf(rows[(row + k) * Wide::OUT + i], u, x[k]);
        }
#pragma unroll
        for (int k = 0; k < 16; k++) {
            const Target to = {b.seq, b.head, b.cta_row, 0};
            if (first + row + k < b.n_rows) write_value<Wide>(p, to, first + row + k, tid, x[k]);
        }
    }
}

/* A warp's sixteen rows of 16 bits, to the output by way of its own 4 KiB of shared memory, in which chunks of 16 bytes are
 * swizzled: a row at a time, whose 256 bytes are neighbours. */
DEVICE void wide_write_half(const DecodeParams &p, const WideBlock &b, const float (&out)[64], uint32_t area, int first,
                            int lane) {
    const uint32_t to = area + 256 * (lane & 15) + (((lane >> 4) ^ (lane & 7)) << 4);
    const bool bf16 = p.out_dtype == OSCAR_DTYPE_BF16;
#pragma unroll
    for (int j = 0; j < 8; j++) { /* channels 16 j .. */
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float x = out[8 * j + 2 * i], y = out[8 * j + 2 * i + 1];
            w[i] = bf16 ? pack_bf162(x, y) : pack_half2(x, y);
        }
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to ^ 32 * j), "r"(w[0]), "r"(w[1]),
                     "r"(w[2]), "r"(w[3])
                     : "memory");
    }
    __syncwarp();
    uint16_t *output = static_cast<uint16_t *>(p.out) + 4 * lane;
    const int n = min(16, b.n_rows - first);
#pragma unroll 4
    for (int row = 0; row < n; row++) {
        uint2 v;
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];"
                     : "=r"(v.x), "=r"(v.y)
                     : "r"(area + 256 * row + (((lane >> 1) ^ (row & 7)) << 4) + 8 * (lane & 1)));
        *reinterpret_cast<uint2 *>(output + wide_row(p, b, first + row)) = v;
    }
}

DEVICE void attenders_meet() { asm volatile("bar.sync 3, %0;" ::"n"(128 * Wide::CONSUMERS) : "memory"); }

/* Normalises, adds the mean, writes. */
DEVICE void wide_write(const DecodeParams &p, const WideBlock &b, WideRows &r, uint8_t *shared, int group, int lane) {
    const float *constants = reinterpret_cast<const float *>(shared + Wide::CONST_AT);
    const int row = wide_first_row();
    float norm[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        r.sum[h] += __shfl_xor_sync(FULL_WARP, r.sum[h], 1);
        r.sum[h] += __shfl_xor_sync(FULL_WARP, r.sum[h], 2);
        float max = 0;
        int head = 0;
        if (p.sink_logits) {
            const int at = b.cta_row + min(row + 8 * h, b.n_rows - 1);
            head = b.head * p.gqa + at - divide(at, p.gqa, p.gqa_magic) * p.gqa;
            max = (r.max[h] + constants[row + 8 * h]) * r.scale;
        }
        norm[h] = normaliser(max, r.sum[h], p.sink_logits, head);
    }
    const float *mean = reinterpret_cast<const float *>(shared + Wide::MEAN_AT) + 2 * (lane & 3);
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const float2 m = *reinterpret_cast<const float2 *>(mean + 8 * j);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            r.out[4 * j + 2 * h] = fmaf(r.out[4 * j + 2 * h], norm[h], m.x);
            r.out[4 * j + 2 * h + 1] = fmaf(r.out[4 * j + 2 * h + 1], norm[h], m.y);
        }
    }
    if (!p.v_rotation_t && p.out_dtype != OSCAR_DTYPE_F32) {
        const int warp = row >> 4;
        wide_write_half(p, b, r.out, shared_address(shared + Wide::TURN_LOW_AT) + 4096 * warp, 16 * warp, lane);
        return;
    }
    float *rows = reinterpret_cast<float *>(shared) + 64 * group * Wide::OUT;
    if (p.v_rotation_t) attenders_meet(); /* the stages are done with */
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float *to = p.v_rotation_t ? rows + (row + 8 * h & 63) * Wide::OUT
                                   : static_cast<float *>(p.out) + wide_row(p, b, row + 8 * h);
        if (!p.v_rotation_t && row + 8 * h >= b.n_rows) continue;
        to += 2 * (lane & 3);
#pragma unroll
        for (int j = 0; j < 16; j++)
            *reinterpret_cast<float2 *>(to + 8 * j) = make_float2(r.out[4 * j + 2 * h], r.out[4 * j + 2 * h + 1]);
    }
    if (!p.v_rotation_t) return;
    asm volatile("bar.sync %0, 128;" ::"r"(4 + group) : "memory");
    wide_turn_back(p, b, rows, 64 * group, static_cast<int>(threadIdx.x & 127));
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
    auto softmax = [&](auto first, int item, uint32_t (&prob)[4][4]) {
        wgmma_settle(s);
        release(at.keys_empty, item);
        if (item < clear.first || item >= clear.last) wide_mask(p, b, s, item);
        const bool up = wide_softmax<first>(r, s, prob, factor);
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
        const bool up = softmax(std::false_type(), item, prob);
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
    softmax(std::true_type(), 0, even);
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
template <bool BIAS>
DEVICE void attend_all(const DecodeParams &p, const WideBlock &b, WideQueries<BIAS> &q, uint8_t *shared, const WideBarriers &at) {
    const int lane = threadIdx.x & 31, group = static_cast<int>(threadIdx.x) >> 7;
    WideRows r;
    const bool low = wide_turn<BIAS>(p, b, q, r, shared, at, group, lane);
    if constexpr (BIAS) {
        if ((threadIdx.x & 127) == 0) reinterpret_cast<uint32_t *>(shared + Wide::LOW_AT)[group] = low;
        if (low)
            attend_items<4>(p, b, shared, at, r, group);
        else
            attend_items<2>(p, b, shared, at, r, group);
    } else {
        attend_items<0>(p, b, shared, at, r, group);
    }
    /* Rows take the place of what queries are turned with, which the other warpgroup may still read if no turn has passed. */
    if (b.count() == 1) attenders_meet();
    wide_write(p, b, r, shared, group, lane);
}

/* Queries of a thread's rows, and their constants where a softmax needs them. */
template <bool BIAS> DEVICE void wide_queries(const DecodeParams &p, const WideBlock &b, WideQueries<BIAS> &q, uint8_t *shared) {
    const int lane = threadIdx.x & 31, row = wide_first_row();
    q.load(p, b, row, lane);
    float sum[2];
    if (p.sink_logits) q.dot_mean(p, b, lane, sum);
    q.to_half(p);
    if (p.sink_logits && (lane & 3) == 0)
        for (int h = 0; h < 2; h++) reinterpret_cast<float *>(shared + Wide::CONST_AT)[row + 8 * h] = sum[h] * q.scale;
}

#endif

template <bool BIAS>
__global__ void __launch_bounds__(Wide::THREADS, 1) prefill_wgmma_kernel(const __grid_constant__ DecodeParams p) {
#if HAVE_WGMMA
    extern __shared__ __align__(128) uint8_t unaligned[];
    uint8_t *shared = unaligned + (-shared_address(unaligned) & 1023);
    const WideBarriers at(shared_address(shared + Wide::BARRIERS_AT));
    WideBlock b = wide_rows(p);
    const int length = load_int(p.lengths + b.seq);
    if (threadIdx.x >= 128 * Wide::CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        WideTurn turn;
        turn.load(p, b.head, false, (static_cast<int>(threadIdx.x) >> 5) - 4 * Wide::CONSUMERS, threadIdx.x & 31);
        wide_stage<BIAS>(p, b.head, shared, at);
        if (length < p.n_q_tokens) return; /* the sequence is skipped */
        wide_items(p, b, length);
        expand_all<BIAS>(p, b, turn, shared, at);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
        WideQueries<BIAS> q;
        wide_queries<BIAS>(p, b, q, shared);
        if (length < p.n_q_tokens) return;
        wide_items(p, b, length);
        attend_all<BIAS>(p, b, q, shared, at);
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
