/*
 * oracle.h - a decode problem with random codes, and its answer in float64, for the CUDA tests.
 *
 * Everything that must not be read is poisoned: pages that no block table names, tokens beyond a
 * sequence's length or in every query's window, overlay rows that no query sees.
 */
#ifndef OSCAR_CUDA_TEST_ORACLE_H
#define OSCAR_CUDA_TEST_ORACLE_H

#include <cuda_fp16.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <numeric>
#include <thread>
#include <vector>

#include "oscar/cuda.h"

struct Random {
    uint64_t state;
    explicit Random(uint64_t seed) : state(seed) {}
    uint64_t next() {
        state += 0x9E3779B97F4A7C15ull;
        uint64_t z = state;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    }
    double uniform() { return (double)(next() >> 11) / 9007199254740992.0; }
    double normal() { return sqrt(-2 * log(1 - uniform())) * cos(6.283185307179586 * uniform()); }
    int below(int n) { return (int)(next() % (uint64_t)n); }
};

static inline uint16_t to_bf16(double x) {
    float f = (float)x;
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
static inline double from_bf16(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint16_t to_fp16(double x) { return __half_as_ushort(__float2half_rn((float)x)); }
static inline double from_fp16(uint16_t h) { return __half2float(__ushort_as_half(h)); }

struct Problem {
    /* Set by the caller. */
    int d = 128, n_kv_heads = 2, gqa = 4, n_q_tokens = 1;
    std::vector<int> lengths;
    int sink = 64, recent = 256, ring = 384, window = 0;
    int bits_k = 2, bits_v = 2;
    int n_tracked = 0;
    double bias_size = 0; /* largest |q . R nu| of a pair */
    bool slow_pairs = true; /* tracked pairs over all frequencies; otherwise the fastest */
    double rope_base = 10000;
    bool adjacent = false;
    bool rotated = true, means = true, sink_logits = false, out_rotated = false, q_bf16 = true;
    bool scramble_slots = true;
    float softcap = 0, logit_scale = 0;
    double q_size = 3;
    uint64_t seed = 1;

    /* Made by build(). */
    std::vector<float> k_rotation, v_rotation, k_mean, k_tracked, v_mean, sinks;
    std::vector<int32_t> tracked, table, slots;
    oscar_rope rope;
    std::vector<uint8_t> pages;
    std::vector<uint16_t> overlay_k, overlay_v, q;
    std::vector<double> expected; /* [n_seqs, n_q_tokens, n_q_heads, d] */
    int table_stride, n_pages, rows;
};

template <class F> static void in_parallel(int n, F f) {
    int n_threads = (int)std::max(1u, std::thread::hardware_concurrency());
    std::vector<std::thread> threads;
    for (int k = 0; k < n_threads; k++)
        threads.emplace_back([=] {
            for (int i = k; i < n; i += n_threads) f(i);
        });
    for (auto &t : threads) t.join();
}

/* A product of random reflections. */
static inline void random_rotation(int d, Random &random, float *out) {
    std::vector<double> u((size_t)d * d, 0.0), v(d);
    for (int i = 0; i < d; i++) u[(size_t)i * d + i] = 1;
    for (int k = 0; k < 6; k++) {
        double norm = 0;
        for (double &x : v) {
            x = random.normal();
            norm += x * x;
        }
        for (int i = 0; i < d; i++) {
            double dot = 0;
            for (int j = 0; j < d; j++) dot += u[(size_t)i * d + j] * v[j];
            for (int j = 0; j < d; j++) u[(size_t)i * d + j] -= 2 * dot / norm * v[j];
        }
    }
    for (size_t i = 0; i < u.size(); i++) out[i] = (float)u[i];
}

static inline void build_constants(Problem &p) {
    Random random(p.seed * 7919 + 1);
    const int d = p.d, h = p.n_kv_heads;
    memset(&p.rope, 0, sizeof p.rope);
    p.rope.layout = p.adjacent ? OSCAR_ROPE_ADJACENT : OSCAR_ROPE_HALF_SPLIT;
    p.rope.n_dims = d;
    p.rope.magnitude = 1;
    for (int f = 0; f < d / 2; f++) p.rope.inv_freq[f] = (float)pow(p.rope_base, -2.0 * f / d);
    if (p.rotated) {
        p.k_rotation.resize((size_t)h * d * d);
        p.v_rotation.resize((size_t)h * d * d);
        for (int i = 0; i < h; i++) {
            random_rotation(d, random, &p.k_rotation[(size_t)i * d * d]);
            random_rotation(d, random, &p.v_rotation[(size_t)i * d * d]);
        }
    }
    if (p.means) {
        p.k_mean.resize((size_t)h * d);
        p.v_mean.resize((size_t)h * d);
        for (float &x : p.k_mean) x = (float)random.normal();
        for (float &x : p.v_mean) x = (float)random.normal();
    }
    if (p.sink_logits) {
        p.sinks.resize((size_t)h * p.gqa);
        for (float &x : p.sinks) x = (float)(4 * random.normal());
    }
    p.tracked.resize((size_t)h * p.n_tracked);
    p.k_tracked.assign((size_t)h * d, 0.0f);
    for (int i = 0; i < h; i++) {
        std::vector<int> pairs(d / 2);
        std::iota(pairs.begin(), pairs.end(), 0);
        if (p.slow_pairs) /* a random subset in random order */
            for (int k = d / 2 - 1; k > 0; k--) std::swap(pairs[k], pairs[random.below(k + 1)]);
        for (int k = 0; k < p.n_tracked; k++) {
            const int f = pairs[k];
            p.tracked[(size_t)i * p.n_tracked + k] = f;
            const int a = p.adjacent ? 2 * f : f, b = p.adjacent ? 2 * f + 1 : f + d / 2;
            const double size = p.bias_size / (p.q_size * 1.4), angle = 6.28 * random.uniform();
            p.k_tracked[(size_t)i * d + a] = (float)(size * cos(angle));
            p.k_tracked[(size_t)i * d + b] = (float)(size * sin(angle));
        }
    }
}

/* Keys and values as the queries shall see them: [length, d] each, quantised and BF16 versions. */
struct Rows64 {
    std::vector<double> quantised, exact;
};

static inline void build_rows(Problem &p, int seq, int head, int side, Rows64 &rows) {
    Random random(p.seed * 1000003 + seq * 7919 + head * 31 + side);
    const int d = p.d, length = p.lengths[seq], bits = side ? p.bits_v : p.bits_k;
    const int groups = d > 128 ? d / 128 : 1, group = d / groups;
    const size_t tile_bytes = oscar_cuda_tile_bytes(d, p.bits_k, p.bits_v);
    rows.quantised.resize((size_t)length * d);
    rows.exact.resize((size_t)length * d);
    std::vector<uint8_t> codes(d);
    std::vector<uint16_t> params(2 * groups);
    std::vector<uint16_t> &overlay = side ? p.overlay_v : p.overlay_k;
    const int sink8 = (p.sink + 7) / 8 * 8, levels = (1 << bits) - 1;
    const size_t overlay_base = (size_t)(p.slots[seq] * p.n_kv_heads + head) * p.rows;
    const int first_recent = std::max(p.sink, length - p.n_q_tokens - p.recent + 1);
    for (int t = 0; t < length; t++) {
        double *x = &rows.quantised[(size_t)t * d], *y = &rows.exact[(size_t)t * d];
        for (int k = 0; k < groups; k++) {
            params[2 * k] = to_fp16(exp(0.4 * random.normal()) * 2.2 / levels);
            params[2 * k + 1] =
                to_fp16(from_fp16(params[2 * k]) * (-0.5 * levels + 0.3 * random.normal()));
        }
        for (int i = 0; i < d; i++) {
            codes[i] = (uint8_t)random.below(levels + 1);
            x[i] = from_fp16(params[2 * (i / group) + 1]) + from_fp16(params[2 * (i / group)]) * codes[i];
            const uint16_t b = to_bf16(random.normal());
            y[i] = from_bf16(b);
            if (t < p.sink) overlay[(overlay_base + t) * d + i] = b;
            else if (t >= first_recent) overlay[(overlay_base + sink8 + t % p.ring) * d + i] = b;
        }
        if (t >= p.sink && t >= length - p.recent) continue; /* in every query's window: its codes may not be made yet */
        uint8_t *tile = &p.pages[((size_t)p.table[(size_t)seq * p.table_stride + t / 64] * p.n_kv_heads + head) *
                                 tile_bytes];
        oscar_cuda_tile_put_row(tile, d, p.bits_k, p.bits_v, side, t % 64, codes.data(), params.data());
    }
}

static inline void attend_row(Problem &p, int seq, int head, int token, int q_head, const Rows64 &keys,
                              const Rows64 &values) {
    const int d = p.d, n_q_heads = p.n_kv_heads * p.gqa, t = p.lengths[seq] - p.n_q_tokens + token;
    const size_t row = ((size_t)seq * p.n_q_tokens + token) * n_q_heads + q_head;
    std::vector<double> q(d), turned(d, 0.0);
    for (int i = 0; i < d; i++) q[i] = p.q_bf16 ? from_bf16(p.q[row * d + i]) : from_fp16(p.q[row * d + i]);
    for (int j = 0; j < d; j++) {
        if (!p.rotated) turned[j] = q[j];
        else
            for (int i = 0; i < d; i++) turned[j] += q[i] * p.k_rotation[((size_t)head * d + i) * d + j];
    }
    double constant = 0;
    if (p.means)
        for (int i = 0; i < d; i++) constant += q[i] * p.k_mean[(size_t)head * d + i];
    const int start = p.window ? std::max(0, t - p.window + 1) : 0;
    std::vector<double> logit(t + 1), out(d, 0.0);
    double top = p.sink_logits ? p.sinks[q_head] : -1e300;
    for (int s = start; s <= t; s++) {
        const bool exact = s < p.sink || s > t - p.recent;
        const double *k = &(exact ? keys.exact : keys.quantised)[(size_t)s * d];
        double x = constant;
        for (int i = 0; i < d; i++) x += turned[i] * k[i];
        for (int n = 0; n < p.n_tracked; n++) {
            const int f = p.tracked[(size_t)head * p.n_tracked + n];
            const int a = p.adjacent ? 2 * f : f, b = p.adjacent ? 2 * f + 1 : f + d / 2;
            const double angle = (double)s * (double)p.rope.inv_freq[f], c = cos(angle), sn = sin(angle);
            const double na = p.k_tracked[(size_t)head * d + a], nb = p.k_tracked[(size_t)head * d + b];
            x += q[a] * (na * c - nb * sn) + q[b] * (nb * c + na * sn);
        }
        x *= p.logit_scale;
        if (p.softcap > 0) x = p.softcap * tanh(x / p.softcap);
        logit[s] = x;
        top = std::max(top, x);
    }
    double sum = p.sink_logits ? exp(p.sinks[q_head] - top) : 0;
    for (int s = start; s <= t; s++) {
        const bool exact = s < p.sink || s > t - p.recent;
        const double *v = &(exact ? values.exact : values.quantised)[(size_t)s * d];
        const double w = exp(logit[s] - top);
        sum += w;
        for (int i = 0; i < d; i++) out[i] += w * v[i];
    }
    std::vector<double> mean(d, 0.0);
    if (p.means)
        for (int j = 0; j < d; j++)
            for (int i = 0; i < d; i++)
                mean[j] += p.v_mean[(size_t)head * d + i] *
                           (p.rotated ? p.v_rotation[((size_t)head * d + i) * d + j] : i == j);
    for (int i = 0; i < d; i++) out[i] = out[i] / sum + mean[i];
    for (int j = 0; j < d; j++) {
        double x = out[j];
        if (p.rotated && !p.out_rotated) {
            x = 0;
            for (int i = 0; i < d; i++) x += out[i] * p.v_rotation[((size_t)head * d + j) * d + i];
        }
        p.expected[row * d + j] = x;
    }
}

static inline void build(Problem &p) {
    const int d = p.d, n_seqs = (int)p.lengths.size(), n_q_heads = p.n_kv_heads * p.gqa;
    if (p.logit_scale == 0) p.logit_scale = (float)(1 / sqrt((double)d));
    build_constants(p);
    Random random(p.seed * 131 + 5);
    const size_t tile_bytes = oscar_cuda_tile_bytes(d, p.bits_k, p.bits_v);
    p.rows = (p.sink + 7) / 8 * 8 + p.ring;
    p.table_stride = 1;
    p.n_pages = 3;
    for (int n : p.lengths) {
        p.table_stride = std::max(p.table_stride, (n + 63) / 64);
        p.n_pages += (n + 63) / 64;
    }
    std::vector<int> order(p.n_pages);
    std::iota(order.begin(), order.end(), 0);
    for (int i = p.n_pages - 1; i > 0; i--) std::swap(order[i], order[random.below(i + 1)]);
    p.table.assign((size_t)n_seqs * p.table_stride, 0x3fffffff);
    int used = 0;
    for (int s = 0; s < n_seqs; s++)
        for (int i = 0; i < (p.lengths[s] + 63) / 64; i++) p.table[(size_t)s * p.table_stride + i] = order[used++];
    p.slots.resize(n_seqs);
    std::iota(p.slots.begin(), p.slots.end(), 0);
    if (p.scramble_slots) std::reverse(p.slots.begin(), p.slots.end());
    p.pages.assign((size_t)p.n_pages * p.n_kv_heads * tile_bytes, 0xff);
    p.overlay_k.assign((size_t)n_seqs * p.n_kv_heads * p.rows * d, 0xffff);
    p.overlay_v = p.overlay_k;
    p.q.resize((size_t)n_seqs * p.n_q_tokens * n_q_heads * d);
    for (uint16_t &x : p.q) {
        const double v = p.q_size * random.normal();
        x = p.q_bf16 ? to_bf16(v) : to_fp16(v);
    }
    p.expected.assign(p.q.size(), 0.0);
    in_parallel(n_seqs * p.n_kv_heads, [&p](int i) {
        const int seq = i / p.n_kv_heads, head = i % p.n_kv_heads;
        if (p.lengths[seq] == 0) return;
        Rows64 keys, values;
        build_rows(p, seq, head, 0, keys);
        build_rows(p, seq, head, 1, values);
        for (int token = 0; token < p.n_q_tokens; token++)
            for (int g = 0; g < p.gqa; g++) attend_row(p, seq, head, token, head * p.gqa + g, keys, values);
    });
}

#endif
