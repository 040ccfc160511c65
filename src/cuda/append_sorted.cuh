/*
 * append_sorted.cuh - least squares of a row of 128 channels that a lane has alone, by sorting it once.
 *
 * Codes rise with the value. So the values of a code and above are the last of the values in order, and all that a refit asks
 * of them is how many they are and their sum: a search for the first of them and a difference of prefix sums, instead of
 * rounding every channel anew. Whether a value reaches a code is decided as the CPU rounds it, for every value that the
 * search meets, and sums of rounds are exact (see Grid), so step and offset are the CPU's, to the bit. The gain is good to some
 * 1e-7 before it is rounded to fp16.
 */
#ifndef OSCAR_CUDA_APPEND_SORTED_CUH
#define OSCAR_CUDA_APPEND_SORTED_CUH

#include "append_input.cuh"
#include "append_rows.cuh"

/* What stores before this left in shared memory. */
DEVICE float load_bf16(uint32_t address) {
    unsigned short r;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(r) : "r"(address));
    return __uint_as_float(static_cast<uint32_t>(r) << 16);
}
DEVICE uint32_t load_shared_word(uint32_t address) {
    uint32_t r;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(address));
    return r;
}

/* --- order --------------------------------------------------------------------------------------- */

/* Two values in each word: halves are sorted apart. */
DEVICE void put_in_order(uint32_t &a, uint32_t &b) {
    const uint32_t low = min_bf162(a, b);
    b = max_bf162(a, b);
    a = low;
}

/* Sorts 32 words, rising, from step (1, 1) on of Batcher's network. */
template <int P, int K> DEVICE void sort_words(uint32_t (&v)[32]) {
#pragma unroll
    for (int i = 0; i < 32 - K; i++)
        if (i >= K % P && (i - K % P) % (2 * K) < K && i / (2 * P) == (i + K) / (2 * P)) put_in_order(v[i], v[i + K]);
    if constexpr (K > 1)
        sort_words<P, K / 2>(v);
    else if constexpr (P < 16)
        sort_words<2 * P, 2 * P>(v);
}

/* The first step of merging two lists of 64: low halves of all words, and high halves. Leaves two bitonic lists of 64, of
 * which the second has no smaller value. */
DEVICE void meet_halves(uint32_t (&v)[64]) {
#pragma unroll
    for (int i = 0; i < 32; i++) {
        uint32_t a = __byte_perm(v[i], v[63 - i], 0x5410), b = __byte_perm(v[i], v[63 - i], 0x3276);
        put_in_order(a, b);
        v[i] = __byte_perm(a, b, 0x5410);
        v[63 - i] = __byte_perm(a, b, 0x7632);
    }
#pragma unroll
    for (int i = 0; i < 32; i++) put_in_order(v[i], v[32 + i]);
}

/* This lane's row in order: in shared memory, a word in every 32 is the lane's. */
struct SortedRow {
    uint32_t *words; /* [64][32] values i and 64 + i of 128 rising bf16 numbers */
    float *sums;     /* [32][32] of values less the grid's middle, on the grid: from the 64th on to before the 4 k-th */
    float all, above, squares; /* sums: of all such values; of the upper 64; of squares of all values */

    DEVICE float at(int i) const {
        const uint32_t both = words[(i & 63) * 32];
        return i & 64 ? bf16_high(both) : bf16_low(both);
    }
    DEVICE void sort(const uint32_t *x);
    DEVICE void add_up(const Grid &grid);
    DEVICE float magnitude_of_rank(int rank) const;
};

/* x: [64][32] the lane's row, in any order. */
DEVICE void SortedRow::sort(const uint32_t *x) {
    uint32_t v[64];
    /* Four lists of 32. */
#pragma unroll 1
    for (int first = 0; first < 64; first += 32) {
        uint32_t part[32];
#pragma unroll
        for (int i = 0; i < 32; i++) part[i] = x[(first + i) * 32];
        sort_words<1, 1>(part);
#pragma unroll
        for (int i = 0; i < 32; i++) words[(first + i) * 32] = part[i];
    }
#pragma unroll
    for (int i = 0; i < 64; i++) v[i] = words[i * 32];
    /* Bitonic merges: to two lists of 64, then to one. */
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
        if (pass == 0) {
#pragma unroll
            for (int i = 0; i < 32; i++) put_in_order(v[i], v[63 - i]);
        } else {
            meet_halves(v);
        }
#pragma unroll
        for (int k = 16; k >= 1; k /= 2)
#pragma unroll
            for (int i = 0; i < 64; i++)
                if (!(i & k)) put_in_order(v[i], v[i + k]);
    }
#pragma unroll
    for (int i = 0; i < 64; i++) words[i * 32] = v[i];
}

/* Sums begin in the middle, where they are small. */
DEVICE void SortedRow::add_up(const Grid &grid) {
    float below = 0, square[4] = {0, 0, 0, 0};
    above = 0;
#pragma unroll 2
    for (int k = 0; k < 16; k++) {
        const uint32_t *up = words + 4 * k * 32, *down = words + (60 - 4 * k) * 32;
        float high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            high[i] = bf16_high(up[32 * i]);
            low[i] = bf16_low(down[32 * i]);
            square[i] = fmaf(high[i], high[i], square[i]);
            square[i] = fmaf(low[i], low[i], square[i]);
            high[i] = grid(high[i]);
            low[i] = grid(low[i]);
        }
        sums[(16 + k) * 32] = above;
        above += (high[0] + high[1]) + (high[2] + high[3]);
        below -= (low[0] + low[1]) + (low[2] + low[3]);
        sums[(15 - k) * 32] = below;
    }
    all = above - below;
    squares = (square[0] + square[1]) + (square[2] + square[3]);
    asm volatile("" ::: "memory"); /* before loads that the compiler does not know */
}

/* |x| of a rank (0: largest) below 64: the rank-th of two falling lists, the largest values and the smallest negated. */
DEVICE float SortedRow::magnitude_of_rank(int rank) const {
    float found = fmaxf(at(127 - rank), -at(rank));
#pragma unroll 4
    for (int i = 0; i < rank; i++) found = fmaxf(found, fminf(at(127 - i), -at(rank - 1 - i)));
    return found;
}

/* --- rounds -------------------------------------------------------------------------------------- */

#define STARTS 3          /* where there are two, the second is there twice */
#define TIE 9.5367432e-7f /* 2^-20: how exact the last sums are, of those of one half of the values */

/* What a start rounds with: a value is on the grid less base, its code that times inv, plus shift. */
struct SortedRounding {
    float base[STARTS], inv[STARTS], shift[STARTS];
    float middle, grid; /* of sums */

    DEVICE float value(int s, float x) const { return ((x - base[s]) + grid) - grid; }
};

/* Sums over codes c of all values v: of c^2, c, and c v. */
struct CodeSums {
    int cc, c1;
    float vc;
};

/* Adds the values that reach each of three codes, `first` and those after it, in all starts: for a code k, a value of it or
 * above has one more c, and 2 k - 1 more c^2. */
DEVICE void add_codes(const SortedRow &row, const SortedRounding &to, int first, int n_codes, CodeSums (&sums)[STARTS]) {
    constexpr int N = 3 * STARTS;
    const uint32_t words = shared_address(row.words), prefix = shared_address(row.sums);
    float level[3];
#pragma unroll
    for (int k = 0; k < 3; k++) level[k] = first + k < n_codes ? static_cast<float>(first + k) : FLT_MAX;
    auto reaches = [&](int n, float v) { return fmaf(v, to.inv[n % STARTS], to.shift[n % STARTS]) >= level[n / STARTS]; };
    uint32_t at[N]; /* addresses: value i 128 i bytes behind `words`, value 64 + i 2 bytes behind it */
    const float x63 = load_bf16(words + 128 * 63);
#pragma unroll
    for (int n = 0; n < N; n++) at[n] = reaches(n, to.value(n % STARTS, x63)) ? words : words + 2;
    /* The first four values of which the last reaches the code; the last four, if there are none. */
#pragma unroll
    for (int four = 8; four >= 1; four /= 2)
#pragma unroll
        for (int n = 0; n < N; n++)
            if (!reaches(n, to.value(n % STARTS, load_bf16(at[n] + 128 * (4 * four - 1))))) at[n] += 128 * 4 * four;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int k = n / STARTS, s = n % STARTS, before = (at[n] - words) >> 7;
        const uint32_t upper = at[n] & 2;
        int more = 0;
        float sum = __uint_as_float(load_shared_word(prefix + 32 * (before & ~3) + 1024 * upper));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float v = to.value(s, load_bf16(at[n] + 128 * i));
            if (reaches(n, v)) continue;
            sum += v;
            more++;
        }
        const int reached = 128 - (before + more + 32 * upper);
        sums[s].c1 += reached;
        sums[s].cc += (2 * (first + k) - 1) * reached;
        sums[s].vc += row.above - fmaf(to.base[s] - to.middle, static_cast<float>(more), sum);
    }
}

/* A round's refits. */
DEVICE void refit_sorted(const SortedRow &row, const Levels &q, const CodeSums (&sums)[STARTS], float (&step)[STARTS],
                         float (&offset)[STARTS]) {
#pragma unroll
    for (int s = 0; s < STARTS; s++)
        refit_plain(q, 128.0f, static_cast<float>(sums[s].cc) * (q.unit * q.unit), static_cast<float>(sums[s].c1) * q.unit,
                    sums[s].vc * q.unit, row.all, step[s], offset[s]);
}

/* What least squares find. */
struct LeastSquares {
    float step, offset; /* fp16 numbers */
    float largest;      /* |x| */
    float gain;         /* the factor of the gain where there is no metric */
};

/* The squared error of this lane's row as the CPU sums it: sixteen partial sums, then a tree. x: as it came, [64][32]. */
DEVICE float squared_error_in_order(const uint32_t *x, const Levels &q, float step, float offset) {
    const float inv = reciprocal(step) * q.unit, up = -step * q.levels;
    float part[16];
#pragma unroll
    for (int r = 0; r < 16; r++) part[r] = 0;
#pragma unroll 1
    for (int pair = 0; pair < 64; pair += 8)
#pragma unroll
        for (int r = 0; r < 16; r++) {
            const uint32_t both = x[(pair + r / 2) * 32];
            const float z = (r & 1 ? bf16_high(both) : bf16_low(both)) - offset;
            const float e = fmaf(up, round_code(q, z, inv, 0.5f * q.unit), z);
            part[r] = fmaf(e, e, part[r]);
        }
#pragma unroll
    for (int h = 8; h > 0; h /= 2)
#pragma unroll
        for (int r = 0; r < h; r++) part[r] += part[r + h];
    return part[0];
}

/* The start of the least squared error, given the sums of codes of values less middle. Errors are differences of larger numbers
 * (less the sum of squares, which is the same for all), and as exact as those. Where that does not tell two starts apart, as
 * when an outlier leaves all other channels one code, which may be any, the CPU's order of sums decides. */
DEVICE int best_start(const SortedRow &row, const uint32_t *x, const Levels &q, const CodeSums (&sums)[STARTS],
                      const float (&step)[STARTS], const float (&offset)[STARTS], float middle) {
    double error[STARTS], least = DBL_MAX;
    float tolerance = 0, best_step = 0, best_offset = 0;
    int best = 0;
#pragma unroll
    for (int s = 0; s < STARTS; s++) {
        const float reach = fabsf(offset[s] - middle) + (q.levels - 1.0f) * step[s];
        const double c1 = sums[s].c1, cc = sums[s].cc, vc = sums[s].vc, up = step[s], a = offset[s] - middle;
        error[s] = a * (128.0 * a - 2.0 * row.all + 2.0 * up * c1) + up * (up * cc - 2.0 * vc);
        tolerance = fmaxf(tolerance, TIE * reach * fmaxf(fabsf(row.above), fabsf(row.all - row.above)));
        if (!(error[s] < least)) continue;
        least = error[s];
        best = s;
        best_step = step[s];
        best_offset = offset[s];
    }
    bool tie = false;
#pragma unroll
    for (int s = 0; s < STARTS; s++)
        tie = tie || (!(error[s] - least > tolerance) && (step[s] != best_step || offset[s] != best_offset));
    if (!tie) return best;
    float least_in_order = FLT_MAX, next_step[STARTS] = {step[0], step[1], step[2]};
    float next_offset[STARTS] = {offset[0], offset[1], offset[2]};
    best = 0;
#pragma unroll 1
    for (int s = 0; s < STARTS; s++) {
        const float e = squared_error_in_order(x, q, next_step[0], next_offset[0]);
        best = e < least_in_order ? s : best;
        least_in_order = fminf(e, least_in_order);
#pragma unroll
        for (int k = 0; k < STARTS - 1; k++) {
            next_step[k] = next_step[k + 1];
            next_offset[k] = next_offset[k + 1];
        }
    }
    return best;
}

/* Rounds are those of the CPU, to the bit: on the grid sums are exact. Errors and the gain are of the values themselves. x: this
 * lane's row as it came, [64][32]. */
DEVICE LeastSquares sorted_least_squares(SortedRow &row, const uint32_t *x, const Levels &q) {
    const float low = row.at(0), high = row.at(127);
    Grid grid(q, low, high);
    float step[STARTS], offset[STARTS]; /* less grid.middle */
    CodeSums sums[STARTS];
    LeastSquares best = {0, 0, fmaxf(fabsf(low), fabsf(high)), 1};
#pragma unroll
    for (int s = 0; s < STARTS; s++) {
        const float limit = s == 0 ? best.largest : row.magnitude_of_rank(rank_from_top<Row<128>>(q.clips[s - 1]));
        range_params(q, low, high, limit, &step[s], &offset[s]);
        offset[s] -= grid.middle;
    }
#pragma unroll 1
    for (int round = 0;; round++) {
        const bool last = round == LS_ROUNDS; /* of what is stored */
        SortedRounding to;
        if (last) grid.grid = 0;
        if (last || round == 0) row.add_up(grid);
        to.middle = grid.middle;
        to.grid = grid.grid;
#pragma unroll
        for (int s = 0; s < STARTS; s++) {
            if (last) {
                step[s] = to_fp16(step[s]);
                offset[s] = to_fp16(offset[s] + grid.middle);
            }
            to.inv[s] = reciprocal(step[s]);
            to.base[s] = last ? offset[s] : grid.middle;
            to.shift[s] = last ? 0.5f : fmaf(-offset[s], to.inv[s], 0.5f);
            sums[s] = {0, 0, 0};
        }
#pragma unroll 1
        for (int first = 1; first < 1 << q.bits; first += 3) add_codes(row, to, first, 1 << q.bits, sums);
        if (last) break;
        refit_sorted(row, q, sums, step, offset);
    }
    const int start = best_start(row, x, q, sums, step, offset, grid.middle);
    float c1 = 0, vc = 0;
#pragma unroll
    for (int s = 0; s < STARTS; s++) {
        if (s != start) continue;
        best.step = step[s];
        best.offset = offset[s];
        c1 = static_cast<float>(sums[s].c1);
        vc = sums[s].vc;
    }
    /* <x^, x> */
    const float hat = fmaf(best.offset, fmaf(128.0f, grid.middle, row.all), best.step * fmaf(grid.middle, c1, vc));
    best.gain = gain_factor(row.squares, row.squares - hat);
    return best;
}

#endif
