/*
 * layer_bias.cu - what the bias of a tracked key mean is made of: nu, and cos(x f) - 1 and sin(x f) for the
 * tokens of a page counted from its middle, as MMA fragments. Computed in double precision on the host.
 */
#include <cuda_fp16.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "layer.h"

/* The turn of one page (64 tokens), in 2^-64 turns: a page's angle is this times its index, mod 1. */
static unsigned long long page_turn(double inv_freq) {
    const long double turns = 64.0L * (long double)inv_freq / (2.0L * 3.14159265358979323846264338327950288L);
    const long double fraction = turns - floorl(turns);
    return (unsigned long long)(fraction * 18446744073709551616.0L);
}

struct Pair {
    int index;
    double freq;
    int2 dims;
    double nu[2];
};

/* Pairs of one head in order of falling frequency. */
static std::vector<Pair> pairs_of(const oscar_cuda_layer_options *o, int head) {
    std::vector<Pair> pairs(o->n_tracked);
    for (int i = 0; i < o->n_tracked; i++) {
        Pair &p = pairs[i];
        p.index = o->tracked[(size_t)head * o->n_tracked + i];
        p.freq = o->rope->inv_freq[p.index];
        const bool adjacent = o->rope->layout == OSCAR_ROPE_ADJACENT;
        p.dims.x = adjacent ? 2 * p.index : p.index;
        p.dims.y = adjacent ? 2 * p.index + 1 : p.index + o->rope->n_dims / 2;
        const float *nu = o->k_tracked + (size_t)head * o->head_dim;
        p.nu[0] = (double)nu[p.dims.x] * o->rope->magnitude;
        p.nu[1] = (double)nu[p.dims.y] * o->rope->magnitude;
    }
    std::stable_sort(pairs.begin(), pairs.end(), [](const Pair &a, const Pair &b) { return a.freq > b.freq; });
    return pairs;
}

/* Sixteen pairs: fragments of cos(x f) - 1, then of sin(x f), x = .5 .. 31.5; lane t has pairs 2 t, 2 t + 1 (k = 2 t,
 * 2 t + 1) and 2 t + 8, 2 t + 9. out: [2][high, low][2][32][4] words. */
static void pack_step(const Pair *pairs, uint32_t *out) {
    for (int part = 0; part < 2; part++)
        for (int block = 0; block < 2; block++)
            for (int lane = 0; lane < 32; lane++)
                for (int reg = 0; reg < 4; reg++) {
                    const double x = 16 * block + (lane >> 2) + 8 * (reg & 1) + .5;
                    uint16_t half[2][2];
                    for (int e = 0; e < 2; e++) {
                        const double angle = pairs[2 * (lane & 3) + e + 8 * (reg >> 1)].freq * x, half_sine = sin(angle / 2);
                        const double value = part ? sin(angle) : -2 * half_sine * half_sine;
                        const __half high = __float2half_rn((float)value);
                        half[0][e] = __half_as_ushort(high);
                        half[1][e] = __half_as_ushort(__float2half_rn((float)(value - (double)__half2float(high))));
                    }
                    for (int low = 0; low < 2; low++)
                        out[(((part * 2 + low) * 2 + block) * 32 + lane) * 4 + reg] = half[low][0] | (uint32_t)half[low][1] << 16;
                }
}

/* Steps whose table is not small: |e^{i x f} - 1| is at most 31.5 f, and fp16 keeps 11 bits, so below this the
 * high halves alone are as exact as fp32 sums. */
#define SLOW_PAIR (1.0 / 31.5 / 128)

/* A power of two that leaves at most 16 of the largest |nu| of a head: a query's channels reach 2^10, and
 * their product with nu is kept in fp16 halves. */
static double unit_of(const std::vector<Pair> &pairs) {
    double most = 0;
    for (const Pair &p : pairs) most = std::max(most, hypot(p.nu[0], p.nu[1]));
    int exponent = 0;
    if (most > 0) frexp(most, &exponent);
    return ldexp(1.0, std::max(exponent, -60) - 4);
}

/* R_i nu of the 64 slots of a page as floats, for append: [H, n, 2, 64]. */
static oscar_status upload_append_table(oscar_cuda_layer *layer, const oscar_cuda_layer_options *o, oscar_error *error) {
    std::vector<float> table, freq;
    std::vector<int2> dims;
    for (int h = 0; h < o->n_kv_heads; h++)
        for (const Pair &p : pairs_of(o, h)) {
            freq.push_back((float)p.freq);
            dims.push_back(p.dims);
            for (int part = 0; part < 2; part++)
                for (int i = 0; i < 64; i++) {
                    const double c = cos(p.freq * i), s = sin(p.freq * i);
                    table.push_back((float)(part ? p.nu[0] * s + p.nu[1] * c : p.nu[0] * c - p.nu[1] * s));
                }
        }
    oscar_status status =
        layer_upload((void **)&layer->append_bias_table, table.data(), table.size() * 4, "k_tracked", error);
    if (status == OSCAR_OK)
        status = layer_upload((void **)&layer->append_bias_freq, freq.data(), freq.size() * 4, "rope", error);
    if (status == OSCAR_OK)
        status = layer_upload(&layer->append_bias_dims, dims.data(), dims.size() * sizeof(int2), "tracked", error);
    return status;
}

oscar_status layer_upload_bias(oscar_cuda_layer *layer, const oscar_cuda_layer_options *o, oscar_error *error) {
    const int h = o->n_kv_heads;
    for (int i = 0; i < h * o->n_tracked; i++)
        if (o->tracked[i] < 0 || o->tracked[i] >= o->rope->n_dims / 2)
            return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "tracked[%d] is %d, expected a pair below %d", i,
                                  o->tracked[i], o->rope->n_dims / 2);
    /* An even number of steps: filled up with pairs whose nu is zero. */
    const int steps = (o->n_tracked + 15) / 16 * 2, n = 8 * steps;
    std::vector<uint32_t> table((size_t)h * steps * 512);
    std::vector<float> nu((size_t)h * n * 2), units(h);
    std::vector<float2> strides(steps == 2 ? (size_t)17 * h * n : 0);
    std::vector<unsigned long long> turn((size_t)h * n);
    std::vector<int2> dims((size_t)h * n);
    int split = 0;
    for (int i = 0; i < h; i++) {
        std::vector<Pair> pairs = pairs_of(o, i);
        const double unit = unit_of(pairs);
        units[i] = (float)unit;
        pairs.resize(n, Pair());
        for (int s = 0; s < steps; s += 2) {
            pack_step(&pairs[8 * s], &table[((size_t)i * steps + s) * 512]);
            if (pairs[8 * s].freq > SLOW_PAIR) split = std::max(split, s + 2);
        }
        for (int k = 0; k < n; k++) {
            const double middle = 31.5 * pairs[k].freq, c = cos(middle) / unit, s = sin(middle) / unit;
            nu[2 * ((size_t)i * n + k)] = (float)(pairs[k].nu[0] * c - pairs[k].nu[1] * s);
            nu[2 * ((size_t)i * n + k) + 1] = (float)(pairs[k].nu[0] * s + pairs[k].nu[1] * c);
            turn[(size_t)i * n + k] = page_turn(pairs[k].freq);
            dims[(size_t)i * n + k] = pairs[k].dims;
            for (size_t pages = 0; pages < strides.size() / (h * n); pages++) {
                const double angle = fmod(64.0 * pages * pairs[k].freq, 6.283185307179586);
                strides[(pages * h + i) * n + k] = make_float2((float)cos(angle), (float)sin(angle));
            }
        }
    }
    layer->n_tracked = o->n_tracked;
    layer->bias_steps = steps;
    layer->bias_split_steps = split;
    oscar_status status = layer_upload(&layer->bias_table, table.data(), table.size() * 4, "bias table", error);
    if (status == OSCAR_OK) status = layer_upload(&layer->bias_nu, nu.data(), nu.size() * 4, "k_tracked", error);
    if (status == OSCAR_OK) status = layer_upload(&layer->bias_units, units.data(), units.size() * 4, "k_tracked", error);
    if (status == OSCAR_OK && !strides.empty())
        status = layer_upload(&layer->bias_strides, strides.data(), strides.size() * 8, "bias turns", error);
    if (status == OSCAR_OK)
        status = layer_upload(&layer->bias_turn, turn.data(), turn.size() * 8, "bias turns", error);
    if (status == OSCAR_OK) status = layer_upload(&layer->bias_dims, dims.data(), dims.size() * 8, "tracked", error);
    if (status == OSCAR_OK) status = upload_append_table(layer, o, error);
    return status;
}
