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

/* The turn of some tokens in 2^-64 turns: the angle of pages is that of 64 times their number, mod 1. */
static unsigned long long turn_of(int tokens, double inv_freq) {
    const long double turns = tokens * (long double)inv_freq / (2.0L * 3.14159265358979323846264338327950288L);
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

/* Sixteen pairs: fragments of cos(x f) - less, then of sin(x f), x = first, first + 1, ..; lane t has pairs 2 t, 2 t + 1
 * (k = 2 t, 2 t + 1) and 2 t + 8, 2 t + 9. less: 0 or 1. out: [2][high, low][n_blocks][32][4] words. */
static void pack_step(const Pair *pairs, int less, double unit, double first, int n_blocks, uint32_t *out) {
    for (int part = 0; part < 2; part++)
        for (int block = 0; block < n_blocks; block++)
            for (int lane = 0; lane < 32; lane++)
                for (int reg = 0; reg < 4; reg++) {
                    const double x = first + 16 * block + (lane >> 2) + 8 * (reg & 1);
                    uint16_t half[2][2];
                    for (int e = 0; e < 2; e++) {
                        const double angle = pairs[2 * (lane & 3) + e + 8 * (reg >> 1)].freq * x, half_sine = sin(angle / 2);
                        const double value = unit * (part ? sin(angle) : less ? -2 * half_sine * half_sine : cos(angle));
                        const __half high = __float2half_rn((float)value);
                        half[0][e] = __half_as_ushort(high);
                        half[1][e] = __half_as_ushort(__float2half_rn((float)(value - (double)__half2float(high))));
                    }
                    for (int low = 0; low < 2; low++)
                        out[(((part * 2 + low) * n_blocks + block) * 32 + lane) * 4 + reg] = half[low][0] | (uint32_t)half[low][1] << 16;
                }
}

/* Functions of the distance from a run's middle, even or odd, of which waves of slow pairs are sums: the waves themselves made
 * orthogonal, the one of which most is left first. That is close to the best basis: with a base of 1e4 and all but the 16
 * fastest of 64 pairs, waves are off by 2e-5 over 4 pages, by 3e-10 over 2. */
struct RunBasis {
    static constexpr int N = 8;
    std::vector<double> function[N]; /* [tokens after the middle], at most 1 */
    std::vector<double> weight[N];   /* [pairs] */
    double error = 0;                /* most that a wave is off */

    RunBasis(const Pair *pairs, int n_pairs, int pages, bool odd) {
        const int n = 32 * pages;
        std::vector<std::vector<double>> rest(n_pairs, std::vector<double>(n));
        for (int k = 0; k < n_pairs; k++)
            for (int x = 0; x < n; x++) rest[k][x] = odd ? sin(pairs[k].freq * (x + .5)) : cos(pairs[k].freq * (x + .5));
        for (int j = 0; j < N; j++) {
            weight[j].resize(n_pairs);
            size_t most = 0;
            for (size_t k = 0; k < rest.size(); k++)
                if (dot(rest[k], rest[k]) > dot(rest[most], rest[most])) most = k;
            function[j] = rest[most];
            for (int i = 0; i < j; i++) subtract(function[j], function[i]); /* what rounding has left of these */
            if (dot(function[j], function[j]) < 1e-24 * n) std::fill(function[j].begin(), function[j].end(), 0.0);
            for (int k = 0; k < n_pairs; k++) weight[j][k] = subtract(rest[k], function[j]);
        }
        for (const std::vector<double> &r : rest)
            for (double x : r) error = std::max(error, fabs(x));
        for (int j = 0; j < N; j++) {
            double top = 0;
            for (double x : function[j]) top = std::max(top, fabs(x));
            for (double &x : function[j]) x = top > 0 ? x / top : 0;
            for (double &w : weight[j]) w *= top;
        }
    }

    static double dot(const std::vector<double> &a, const std::vector<double> &b) {
        double sum = 0;
        for (size_t i = 0; i < a.size(); i++) sum += a[i] * b[i];
        return sum;
    }
    /* Takes from x its part along y and returns how much of y that was. */
    static double subtract(std::vector<double> &x, const std::vector<double> &y) {
        const double size = dot(y, y), part = size > 0 ? dot(x, y) / size : 0;
        for (size_t i = 0; i < x.size(); i++) x[i] -= part * y[i];
        return part;
    }
};

static uint32_t pack_halves(double a, double b) {
    return __half_as_ushort(__float2half_rn((float)a)) | (uint32_t)__half_as_ushort(__float2half_rn((float)b)) << 16;
}
static double without_half(double x) { return x - (double)__half2float(__float2half_rn((float)x)); }

/* Of word i of A operands of 16 tokens x 16, [blocks][32][4]: how far its token is from the middle of a run of pages. */
static double run_token(int pages, int i) { return 16 * (i / 128) + (i / 4 % 32 >> 2) + 8 * (i & 1) + .5 - 32 * pages; }
/* The angle whose cos and sin it has: columns 2 t and 2 t + 1 are of pair 2 t of a step, 2 t + 8 and 2 t + 9 of pair 2 t + 1. */
static double run_angle(const Pair *pairs, int pages, int i) {
    return pairs[2 * (i / 4 & 3) + (i >> 1 & 1)].freq * run_token(pages, i);
}

/* The table of one head for runs of some pages, as decode_runs.cuh has it: cos and sin of two steps (run_angle()); then of slow
 * pairs 64 times even functions in the first eight columns, odd ones in the others. low: with low halves, [product][high,
 * low][blocks][32][4].
 * Then weights of slow pairs, of a lane its row's of two pairs, even and odd: halves of two steps, or floats. */
struct RunTable {
    double error;
    std::vector<uint32_t> words;

    RunTable(const std::vector<Pair> &pairs, int pages, bool low) {
        const int n_slow = (int)pairs.size() - 16;
        const RunBasis even(&pairs[16], n_slow, pages, false), odd(&pairs[16], n_slow, pages, true);
        error = std::max(even.error, odd.error);
        for (int product = 0; product < 3; product++)
            for (int half = 0; half < (low ? 2 : 1); half++)
                for (int i = 0; i < 4 * pages * 128; i++) {
                    const int t = i / 4 & 3, is_odd = i >> 1 & 1;
                    double value[2];
                    for (int e = 0; e < 2; e++)
                        value[e] = product < 2 ? wave(run_angle(&pairs[8 * product], pages, i), e)
                                               : function(is_odd ? odd : even, 2 * t + e, run_token(pages, i), is_odd);
                    words.push_back(half ? pack_halves(without_half(value[0]), without_half(value[1]))
                                         : pack_halves(value[0], value[1]));
                }
        for (int step = 0; step < n_slow / 8; step += low ? 1 : 2)
            for (int lane = 0; lane < 32; lane++)
                for (int k = 0; k < 4; k++) {
                    const int g = lane >> 2, at = 8 * step + 2 * (lane & 3);
                    if (low) {
                        const float w = (float)(k < 2 ? even : odd).weight[g][at + (k & 1)];
                        uint32_t bits;
                        memcpy(&bits, &w, 4);
                        words.push_back(bits);
                    } else {
                        const std::vector<double> &w = (k & 1 ? odd : even).weight[g];
                        words.push_back(pack_halves(w[at + 8 * (k >> 1)], w[at + 8 * (k >> 1) + 1]));
                    }
                }
    }
    static double wave(double angle, int sine) { return sine ? sin(angle) : cos(angle); }
    static double function(const RunBasis &basis, int j, double x, bool odd) {
        const double y = 64 * basis.function[j][(size_t)fabs(x)];
        return odd && x < 0 ? -y : y;
    }
};

/* Most that waves of slow pairs may be off in tables of high halves, which are off by as much themselves, and with low halves. */
#define LONG_RUN_ERROR (1.0 / 8192)
#define SHORT_RUN_ERROR (1.0 / 8388608)

/* Steps whose table is not small: |e^{i x f} - 1| is at most 31.5 f, and fp16 keeps 11 bits, so below this the
 * high halves alone are as exact as fp32 sums. */
#define SLOW_PAIR (1.0 / 31.5 / 128)
/* Decode looks at cos - 1, at most (31.5 f)^2 / 2, and sin, at most 31.5 f, apart: up to 2^-9 a product of two rounded
 * halves is exact to 2^-20 of |z|, and a cosine of a 2^-20 is nothing. */
#define SLOW_EVEN (1.0 / 31.5 / 16)
#define SLOW_ODD (1.0 / 31.5 / 724)

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

/* What goes to the device, as DecodeParams has it. n: pairs of a head, filled up. */
struct BiasArrays {
    int steps, n, n_heads;
    std::vector<uint32_t> table, waves, mirror_waves[LAYER_N_MIRRORS], runs, short_runs, half, few, few_low;
    std::vector<float> nu, units, mirror_nu[LAYER_N_MIRRORS];
    std::vector<float2> strides;
    std::vector<unsigned long long> turn;
    std::vector<int2> dims;
    int split = 0, even = 0, odd = 0; /* steps that need more than what slow pairs do */
    double run_error = 0, short_run_error = 0;

    /* mirrored: for kernels that make the bias of two pages at once, one mirrored to the other. */
    BiasArrays(int n_tracked, int n_heads_, bool mirrored)
        : steps((n_tracked + 15) / 16 * 2), n(8 * steps), n_heads(n_heads_), table((size_t)n_heads * steps * 512),
          waves(steps == 2 ? table.size() : 0), half(mirrored ? (size_t)n_heads * n : 0), nu((size_t)n_heads * n * 2), units(n_heads),
          strides(steps <= 8 ? (size_t)33 * n_heads * n : 0), turn((size_t)n_heads * n),
          dims((size_t)n_heads * n) {
        for (int i = 0; mirrored && i < LAYER_N_MIRRORS; i++) {
            mirror_waves[i].resize(2 * table.size());
            mirror_nu[i].resize(nu.size());
        }
    }

    void put_tables(int head, const std::vector<Pair> &pairs) {
        for (int s = 0; s < steps; s += 2) {
            const double fastest = pairs[8 * s].freq;
            pack_step(&pairs[8 * s], 1, 1, .5, 2, &table[((size_t)head * steps + s) * 512]);
            if (!waves.empty()) pack_step(&pairs[8 * s], 0, 1, .5, 2, &waves[(size_t)head * 1024]);
            for (int i = 0; i < LAYER_N_MIRRORS && !mirror_nu[i].empty(); i++) /* the second page, from the middle of both */
                pack_step(&pairs[8 * s], 0, 1, 128 * (i + 2) - 31.5, 4, &mirror_waves[i][((size_t)head * steps + s) * 1024]);
            if (fastest > SLOW_PAIR) split = std::max(split, s + 2);
            if (fastest > SLOW_EVEN) even = std::max(even, s + 2);
            if (fastest > SLOW_ODD) odd = std::max(odd, s + 2);
        }
    }

    /* Up to 16 pairs by runs of pages (decode_few.cuh). */
    void put_few(const std::vector<Pair> &pairs, double head_unit) {
        const double unit = FEW_UNIT * std::min(std::max(head_unit, (double)FEW_LEAST), (double)FEW_MOST);
        for (int product = 0; product < 2; product++)
            for (int i = 0; i < 4 * FEW_RUN * 128; i++) {
                const double angle = run_angle(&pairs[8 * product], FEW_RUN, i);
                few.push_back(pack_halves(unit * cos(angle), unit * sin(angle)));
            }
        few_low.resize(few_low.size() + FEW_SHORT * 1024);
        pack_step(pairs.data(), 0, unit, .5, 2 * FEW_SHORT, &few_low[few_low.size() - FEW_SHORT * 1024]);
    }

    /* More than 16 pairs, mirrored kernels' other form. */
    void put_runs(const std::vector<Pair> &pairs) {
        const RunTable of_runs(pairs, RUN_PAGES, false), of_short_runs(pairs, SHORT_RUN, true);
        runs.insert(runs.end(), of_runs.words.begin(), of_runs.words.end());
        short_runs.insert(short_runs.end(), of_short_runs.words.begin(), of_short_runs.words.end());
        run_error = std::max(run_error, of_runs.error);
        short_run_error = std::max(short_run_error, of_short_runs.error);
    }

    static void put_nu(std::vector<float> &to, size_t at, const Pair &pair, double angle, double unit) {
        const double c = cos(angle) / unit, s = sin(angle) / unit;
        to[2 * at] = (float)(pair.nu[0] * c - pair.nu[1] * s);
        to[2 * at + 1] = (float)(pair.nu[0] * s + pair.nu[1] * c);
    }

    void put_pair(int head, int k, const Pair &pair, double unit) {
        const size_t at = (size_t)head * n + k;
        const double f = pair.freq;
        put_nu(nu, at, pair, 31.5 * f, unit);
        for (int i = 0; i < LAYER_N_MIRRORS && !mirror_nu[i].empty(); i++) put_nu(mirror_nu[i], at, pair, (31.5 + 128 * (i + 2)) * f, unit);
        turn[at] = turn_of(64, f);
        if (!half.empty()) half[at] = (uint32_t)(turn_of(32, f) >> 32);
        dims[at] = pair.dims;
        for (size_t pages = 0; pages < strides.size() / ((size_t)n_heads * n); pages++) {
            const double angle = fmod(64.0 * pages * f, 6.283185307179586);
            strides[pages * n_heads * n + at] = make_float2((float)cos(angle), (float)sin(angle));
        }
    }
};

template <class T>
static void upload(void **out, const std::vector<T> &v, const char *what, oscar_status *status, oscar_error *error) {
    if (*status == OSCAR_OK && !v.empty()) *status = layer_upload(out, v.data(), v.size() * sizeof(T), what, error);
}

oscar_status layer_upload_bias(oscar_cuda_layer *layer, const oscar_cuda_layer_options *o, oscar_error *error) {
    for (int i = 0; i < o->n_kv_heads * o->n_tracked; i++)
        if (o->tracked[i] < 0 || o->tracked[i] >= o->rope->n_dims / 2)
            return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "tracked[%d] is %d, expected a pair below %d", i,
                                  o->tracked[i], o->rope->n_dims / 2);
    const bool mirrored = layer->bulk && o->head_dim <= 128 && o->bits_k == 2 && o->bits_v == 2;
    BiasArrays a(o->n_tracked, o->n_kv_heads, mirrored);
    for (int head = 0; head < o->n_kv_heads; head++) {
        std::vector<Pair> pairs = pairs_of(o, head);
        const double unit = unit_of(pairs);
        a.units[head] = (float)unit;
        pairs.resize(a.n, Pair()); /* pairs whose nu is zero */
        a.put_tables(head, pairs);
        if (mirrored && a.steps > 2) a.put_runs(pairs);
        if (mirrored && a.steps == 2) a.put_few(pairs, unit);
        for (int k = 0; k < a.n; k++) a.put_pair(head, k, pairs[k], unit);
    }
    layer->n_tracked = o->n_tracked;
    layer->bias_steps = a.steps;
    layer->bias_split_steps = a.split;
    layer->bias_even_steps = a.even;
    layer->bias_odd_steps = a.odd;
    layer->bias_long_runs = !a.runs.empty() && a.run_error <= LONG_RUN_ERROR;
    layer->bias_short_runs = !a.runs.empty() && a.short_run_error <= SHORT_RUN_ERROR;
    oscar_status status = OSCAR_OK;
    upload(&layer->bias_table, a.table, "bias table", &status, error);
    upload(&layer->bias_waves, a.waves, "bias table", &status, error);
    upload(&layer->bias_nu, a.nu, "k_tracked", &status, error);
    for (int i = 0; i < LAYER_N_MIRRORS; i++) {
        upload(&layer->mirror_waves[i], a.mirror_waves[i], "bias table", &status, error);
        upload(&layer->mirror_nu[i], a.mirror_nu[i], "k_tracked", &status, error);
    }
    upload(&layer->few_table, a.few, "bias table", &status, error);
    upload(&layer->few_low_table, a.few_low, "bias table", &status, error);
    upload(&layer->run_table, a.runs, "bias table", &status, error);
    upload(&layer->short_run_table, a.short_runs, "bias table", &status, error);
    upload(&layer->bias_half, a.half, "bias turns", &status, error);
    upload(&layer->bias_units, a.units, "k_tracked", &status, error);
    upload(&layer->bias_strides, a.strides, "bias turns", &status, error);
    upload(&layer->bias_turn, a.turn, "bias turns", &status, error);
    upload(&layer->bias_dims, a.dims, "tracked", &status, error);
    if (status == OSCAR_OK) status = upload_append_table(layer, o, error);
    return status;
}
