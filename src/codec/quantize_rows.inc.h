/*
 * quantize_rows.inc.h - the quantiser, written once; docs/METHOD.md has the mathematics.
 *
 * Included by quantize_rows_ref.c, _avx2.c, _avx512.c and _neon.c after they have defined `lanes`, sixteen
 * floats of sixteen rows, and its operations. A row never leaves its lane and every lane does the
 * same operations in the same order, fused where lanes_fma stands, so all paths give the same bits
 * and a row does not depend on its neighbours. quantize_row.inc.h is the second form, for few rows:
 * there a vector is sixteen channels of one row. So that both give the same bits,
 *   sums over channels are sixteen partial sums, by channel mod 16 and rising within, added as a
 *   tree: r + (r + 8), then r + (r + 4), r + 2, r + 1; those of least squares' rounds are exact;
 *   products with a matrix add their terms one by one, fused, in the order said below.
 *
 * The includer defines: lanes, lanes_mask; lanes_load, _store, _set1, _add, _sub, _mul, _div,
 * _fma(a, b, c) = a b + c, _fnma(a, b, c) = c - a b, _min(a, b) = a < b ? a : b, _max likewise, _abs,
 * _trunc (of 0 <= x < 2^31), _fp16 (nearest fp16, saturated), _lt(a, b) and _le giving masks,
 * _and of two masks, _bits of a mask and lanes_mask_of(bits) back, _select(mask, a, b) = mask ? a : b;
 * for the second form lanes_loadu (any address), _pick(a, l): lane l in all lanes, and _swap1, _swap2,
 * _swap4, _swap8: lane l gets lane l ^ n; and LANES_BLOCK, how many accumulators stay in registers
 * (4 or 8).
 */
#include <float.h>

/* What rows are clamped to before they are quantised. fp16 steps and offsets end at 65504, so no
 * row that can be represented reaches it, and no square or sum below overflows. */
#define ROW_LIMIT 1048576.0f
/* Below this a step is no step: its reciprocal could overflow. Far below the smallest fp16. */
#define STEP_MIN 1e-30f
/* A refit is singular when 1 - cos^2 between codes and ones is smaller. */
#define REFIT_SINGULAR 1e-6f
#define LS_ROUNDS 6
#define LS_STARTS 3
#define LDLQ_REFITS 3
/* Rows up to which one at a time is faster: with error feedback, without. */
#define FEW_ROWS_LDLQ 3
#define FEW_ROWS 6

typedef struct row_scratch {
    _Alignas(64) float x[OSCAR_MAX_HEAD_DIM * CODEC_LANES];     /* [d][16] rotated rows */
    _Alignas(64) float codes[OSCAR_MAX_HEAD_DIM * CODEC_LANES]; /* [d][16] 0 .. 2^bits - 1 */
    _Alignas(64) float e[OSCAR_MAX_HEAD_DIM * CODEC_LANES];     /* [d][16] x^ - x */
    _Alignas(64) float r[OSCAR_MAX_HEAD_DIM * CODEC_LANES];     /* [d][16] (x - x^) B */
    _Alignas(64) float w[OSCAR_MAX_HEAD_DIM * CODEC_LANES];     /* [d][16] rows before they are turned; codes of a group times B */
    _Alignas(64) float xb[OSCAR_MAX_HEAD_DIM * CODEC_LANES];    /* [d][16] x B */
    _Alignas(64) float step[CODEC_MAX_GROUPS * CODEC_LANES];    /* [n_groups][16] fp16 values */
    _Alignas(64) float offset[CODEC_MAX_GROUPS * CODEC_LANES];  /* [n_groups][16] fp16 values */
} row_scratch;

#define AT(array, j) ((array) + (size_t)(j) * CODEC_LANES)

/* The tree over partial sums; destroys them. */
static inline lanes fold(lanes *part) {
    for (int h = CODEC_LANES / 2; h > 0; h /= 2)
        for (int r = 0; r < h; r++) part[r] = lanes_add(part[r], part[r + h]);
    return part[0];
}

/* Sixteen vectors, turned about their diagonal. */
static inline void transpose(lanes *v) {
#define TRANSPOSE_STEP(n, lower)                                                                                       \
    for (int i = 0; i < CODEC_LANES; i++)                                                                              \
        if (!(i & n)) {                                                                                                \
            const lanes a = v[i], b = v[i + n];                                                                        \
            v[i] = lanes_select(lanes_mask_of(lower), a, lanes_swap##n(b));                                            \
            v[i + n] = lanes_select(lanes_mask_of(lower), lanes_swap##n(a), b);                                        \
        }
    TRANSPOSE_STEP(8, 0x00ff)
    TRANSPOSE_STEP(4, 0x0f0f)
    TRANSPOSE_STEP(2, 0x3333)
    TRANSPOSE_STEP(1, 0x5555)
#undef TRANSPOSE_STEP
}

/* out[j] = sum over rows i of a[i] W[i][j] for columns 0 .. n_columns - 1 (a multiple of LANES_BLOCK)
 * and rows i0 .. i1 - 1. W = U: i rising. W = B (lower), zero above the diagonal: i falling, as codes
 * are found; rows above a column are skipped, and the zeros that a block still meets change no bit. */
static void lanes_product(int32_t d, const float *matrix, bool lower, int32_t i0, int32_t i1,
                          int32_t n_columns, const float *a, float *out) {
    for (int32_t j = 0; j < n_columns; j += LANES_BLOCK) {
        lanes sum[LANES_BLOCK];
#pragma GCC unroll 8
        for (int k = 0; k < LANES_BLOCK; k++) sum[k] = lanes_set1(0);
        const int32_t least = lower && j > i0 ? j : i0, n = i1 - least;
        for (int32_t m = 0; m < n; m++) {
            const int32_t i = lower ? i1 - 1 - m : least + m;
            const lanes ai = lanes_load(AT(a, i));
            const float *row = matrix + (size_t)i * d + j;
#pragma GCC unroll 8
            for (int k = 0; k < LANES_BLOCK; k++) sum[k] = lanes_fma(ai, lanes_set1(row[k]), sum[k]);
        }
#pragma GCC unroll 8
        for (int k = 0; k < LANES_BLOCK; k++) lanes_store(AT(out, j + k), sum[k]);
    }
}

static inline lanes reciprocal_step(lanes step) {
    return lanes_select(lanes_lt(lanes_set1(STEP_MIN), step), lanes_div(lanes_set1(1), step),
                        lanes_set1(0));
}

/* The code nearest to u - 1/2: clamped below by 0 and above by top = levels + 1/2. */
static inline lanes round_code(lanes u, lanes top) {
    return lanes_trunc(lanes_min(lanes_max(u, lanes_set1(0)), top));
}

/* Levels + 1/2, a little less so that truncation cannot reach levels + 1. */
static inline lanes code_top(int32_t bits) {
    return lanes_set1((float)((1 << bits) - 1) + 0.49f);
}

/* The n_top largest |x| of a group, falling, by insertion into top [n_top][16]. */
static __attribute__((noinline)) void largest_magnitudes(int32_t group, const float *x, int32_t n_top, float *top) {
    for (int32_t t = 0; t < n_top; t++) lanes_store(AT(top, t), lanes_set1(0));
    for (int32_t j = 0; j < group; j++) {
        lanes v = lanes_abs(lanes_load(AT(x, j)));
        for (int32_t t = 0; t < n_top; t++) {
            const lanes old = lanes_load(AT(top, t));
            lanes_store(AT(top, t), lanes_max(old, v));
            v = lanes_min(old, v);
        }
    }
}

/* a <= b in every lane. */
static inline void order_lanes(lanes *a, lanes *b) {
    const lanes low = lanes_min(*a, *b);
    *b = lanes_max(*a, *b);
    *a = low;
}

/* Step (p, k) of Batcher's network over n vectors. */
static inline __attribute__((always_inline)) void sort_step(const int n, const int p, const int k, lanes *v) {
#pragma GCC unroll 16
    for (int i = 0; i < n - k; i++)
        if (i >= k % p && (i - k % p) % (2 * k) < k && i / (2 * p) == (i + k) / (2 * p)) order_lanes(&v[i], &v[i + k]);
}

/* Sorts n = 8 or 16 vectors, rising in every lane. */
static inline __attribute__((always_inline)) void sort_rising(const int n, lanes *v) {
    sort_step(n, 1, 1, v);
    sort_step(n, 2, 2, v), sort_step(n, 2, 1, v);
    sort_step(n, 4, 4, v), sort_step(n, 4, 2, v), sort_step(n, 4, 1, v);
    if (n == 16) sort_step(n, 8, 8, v), sort_step(n, 8, 4, v), sort_step(n, 8, 2, v), sort_step(n, 8, 1, v);
}

static inline __attribute__((always_inline)) void merge_step(const int n, const int k, lanes *v) {
#pragma GCC unroll 16
    for (int i = 0; i < n; i++)
        if (!(i & k)) order_lanes(&v[i + k], &v[i]);
}

/* The n largest |x| of a group, falling: n = 8 or 16 at a time, sorted, against the largest so far. */
static inline __attribute__((always_inline)) void top_magnitudes(const int n, int32_t group, const float *x,
                                                                 float *out) {
    lanes top[16];
#pragma GCC unroll 16
    for (int i = 0; i < n; i++) top[i] = lanes_set1(0);
    for (int32_t j = 0; j < group; j += n) {
        lanes v[16];
#pragma GCC unroll 16
        for (int i = 0; i < n; i++) v[i] = lanes_abs(lanes_load(AT(x, j + i)));
        sort_rising(n, v);
#pragma GCC unroll 16
        for (int i = 0; i < n; i++) top[i] = lanes_max(top[i], v[i]); /* falling, then rising */
        if (n == 16) merge_step(n, 8, top);
        merge_step(n, 4, top), merge_step(n, 2, top), merge_step(n, 1, top);
    }
#pragma GCC unroll 16
    for (int i = 0; i < n; i++) lanes_store(AT(out, i), top[i]);
}

static __attribute__((noinline)) void eight_largest_magnitudes(int32_t group, const float *x, float *top) {
    top_magnitudes(8, group, x, top);
}
static __attribute__((noinline)) void sixteen_largest_magnitudes(int32_t group, const float *x, float *top) {
    top_magnitudes(16, group, x, top);
}

/* The index min(int(clip G), G - 1) of |x| sorted rising, counted from the top. */
static int32_t rank_from_top(int32_t group, float clip) {
    int32_t rank = (int32_t)(clip * (float)group);
    return group - 1 - (rank < group - 1 ? rank : group - 1);
}

static inline void range_of_group(int32_t group, const float *x, lanes *low, lanes *high) {
    *low = *high = lanes_load(x);
    for (int32_t j = 1; j < group; j++) {
        const lanes v = lanes_load(AT(x, j));
        *low = lanes_min(*low, v);
        *high = lanes_max(*high, v);
    }
}

/* Start values from the range, as min-max of the row clamped to +-limit: clamping is monotone. */
static inline void range_params(lanes low, lanes high, lanes limit, float inv_levels, lanes *step,
                                lanes *offset) {
    const lanes floor_ = lanes_sub(lanes_set1(0), limit);
    low = lanes_add(lanes_min(lanes_max(low, floor_), limit), lanes_set1(0)); /* no -0: it has no order */
    high = lanes_min(lanes_max(high, floor_), limit);
    *step = lanes_mul(lanes_sub(high, low), lanes_set1(inv_levels));
    *offset = low;
}

/* With four levels cutting the tail pays, with more hardly. The starts: no cut, then these. */
static inline float start_clip(int32_t bits, int start) {
    const float clips[2][2] = {{0.96f, 0.88f}, {0.98f, 0.98f}};
    return clips[bits > 2][start - 1];
}
static inline int n_starts_of(int32_t bits) { return bits == 2 ? LS_STARTS : LS_STARTS - 1; }

/* Least-squares step and offset for codes c of v, from sum c^2, c, v c, v; as they were where that is singular. */
static inline void refit_plain(int32_t group, lanes cc, lanes c1, lanes vc, lanes v1, lanes *step, lanes *offset) {
    const lanes n = lanes_set1((float)group);
    const lanes scale = lanes_mul(cc, n), det = lanes_fnma(c1, c1, scale);
    const lanes s = lanes_div(lanes_fnma(c1, v1, lanes_mul(vc, n)), det);
    const lanes m = lanes_div(lanes_fnma(c1, vc, lanes_mul(cc, v1)), det);
    const lanes_mask ok = lanes_and(lanes_lt(lanes_mul(scale, lanes_set1(REFIT_SINGULAR)), det),
                                    lanes_lt(lanes_set1(0), s));
    *step = lanes_select(ok, s, *step);
    *offset = lanes_select(ok, m, *offset);
}

/* Rounds of least squares see v = x - middle on a grid, as coarse (14 bits of half of the range with codes of 2 bits)
 * as it takes for sums of v, v c, c and c^2 to be exact, so that a round gives the same bits in whatever order it adds;
 * by the last bit of a sum a row comes to another end now and then. What adding `grid` and taking it away leaves is v. */
typedef struct row_grid {
    lanes middle, grid;
} row_grid;

static inline row_grid grid_of(int32_t bits, lanes low, lanes high) {
    const lanes half = lanes_set1(0.5f);
    return (row_grid){lanes_mul(lanes_add(low, high), half),
                      lanes_mul(lanes_mul(lanes_sub(high, low), half), lanes_set1((float)(128 << bits)))};
}
static inline lanes to_grid(row_grid g, lanes x) {
    return lanes_sub(lanes_add(lanes_sub(x, g.middle), g.grid), g.grid);
}

/* v [group][16] and its sum. */
static __attribute__((noinline)) lanes centre(int32_t group, const float *x, row_grid grid, float *v) {
    lanes v1 = lanes_set1(0);
    for (int32_t j = 0; j < group; j++) {
        const lanes vj = to_grid(grid, lanes_load(AT(x, j)));
        lanes_store(AT(v, j), vj);
        v1 = lanes_add(v1, vj);
    }
    return v1;
}

/* One round of all starts, whose chains of dependent operations overlap: codes for (step, offset), then step and offset
 * for the codes. v1: sum of v. */
static inline __attribute__((always_inline)) void starts_round(const int n_starts, int32_t group, int32_t bits,
                                                               const float *v, lanes v1, lanes *step, lanes *offset) {
    const lanes top = code_top(bits);
    lanes inv[LS_STARTS], shift[LS_STARTS], cc[LS_STARTS], c1[LS_STARTS], vc[LS_STARTS];
#pragma GCC unroll 3
    for (int k = 0; k < n_starts; k++) {
        inv[k] = reciprocal_step(step[k]);
        shift[k] = lanes_fnma(offset[k], inv[k], lanes_set1(0.5f));
        cc[k] = c1[k] = vc[k] = lanes_set1(0);
    }
    for (int32_t j = 0; j < group; j++) {
        const lanes vj = lanes_load(AT(v, j));
#pragma GCC unroll 3
        for (int k = 0; k < n_starts; k++) {
            const lanes c = round_code(lanes_fma(vj, inv[k], shift[k]), top);
            cc[k] = lanes_fma(c, c, cc[k]);
            c1[k] = lanes_add(c1[k], c);
            vc[k] = lanes_fma(vj, c, vc[k]);
        }
    }
#pragma GCC unroll 3
    for (int k = 0; k < n_starts; k++) refit_plain(group, cc[k], c1[k], vc[k], v1, &step[k], &offset[k]);
}

static __attribute__((noinline)) void least_squares_round(int n_starts, int32_t group, int32_t bits, const float *v,
                                                          lanes v1, lanes *step, lanes *offset) {
    if (n_starts == LS_STARTS)
        starts_round(LS_STARTS, group, bits, v, v1, step, offset);
    else
        starts_round(LS_STARTS - 1, group, bits, v, v1, step, offset);
}

static __attribute__((noinline)) lanes squared_error(int32_t group, int32_t bits, const float *x, lanes step, lanes offset) {
    const lanes inv = reciprocal_step(step), top = code_top(bits), half = lanes_set1(0.5f);
    lanes part[CODEC_LANES];
    for (int32_t r = 0; r < CODEC_LANES; r++) {
        part[r] = lanes_set1(0);
        for (int32_t j = r; j < group; j += CODEC_LANES) {
            const lanes z = lanes_sub(lanes_load(AT(x, j)), offset);
            const lanes c = round_code(lanes_fma(z, inv, half), top);
            const lanes e = lanes_fnma(step, c, z);
            part[r] = lanes_fma(e, e, part[r]);
        }
    }
    return fold(part);
}

/* The start of the least error so far; the first of those that are as good. */
typedef struct best_start {
    lanes step, offset, error;
} best_start;

static inline best_start no_start(void) {
    return (best_start){lanes_set1(0), lanes_set1(0), lanes_set1(FLT_MAX)};
}
static inline void keep_better(best_start *best, lanes step, lanes offset, lanes error) {
    const lanes_mask better = lanes_lt(error, best->error);
    best->step = lanes_select(better, step, best->step);
    best->offset = lanes_select(better, offset, best->offset);
    best->error = lanes_select(better, error, best->error);
}

/* Step and offset of one group by least squares: several starts, rounds of rounding and refitting,
 * the best by squared error of what will be stored. x: [group][16]. */
static __attribute__((noinline)) void least_squares_params(int32_t group, int32_t bits, const float *x, float *step_out,
                                 float *offset_out) {
    const int n_starts = n_starts_of(bits);
    _Alignas(64) float top_x[16 * CODEC_LANES]; /* a cut leaves out fewer than sixteen */
    (rank_from_top(group, start_clip(bits, n_starts - 1)) < 8 ? eight_largest_magnitudes
                                                              : sixteen_largest_magnitudes)(group, x, top_x);

    _Alignas(64) float v[128 * CODEC_LANES];
    lanes low, high;
    range_of_group(group, x, &low, &high);
    const row_grid grid = grid_of(bits, low, high);
    const lanes v1 = centre(group, x, grid, v);
    const float inv_levels = 1.0f / (float)((1 << bits) - 1);
    lanes step[LS_STARTS], offset[LS_STARTS];
    for (int k = 0; k < n_starts; k++) {
        const int32_t t = k == 0 ? 0 : rank_from_top(group, start_clip(bits, k));
        range_params(low, high, lanes_load(AT(top_x, t)), inv_levels, &step[k], &offset[k]);
        offset[k] = lanes_sub(offset[k], grid.middle);
    }
    for (int round = 0; round < LS_ROUNDS; round++) least_squares_round(n_starts, group, bits, v, v1, step, offset);
    best_start best = no_start();
    for (int k = 0; k < n_starts; k++) {
        step[k] = lanes_fp16(step[k]);
        offset[k] = lanes_fp16(lanes_add(offset[k], grid.middle));
        keep_better(&best, step[k], offset[k], squared_error(group, bits, x, step[k], offset[k]));
    }
    lanes_store(step_out, best.step);
    lanes_store(offset_out, best.offset);
}

/* The published recipe: clamp to an order statistic, min and max, no refit. */
static void clip_params(const row_codec *codec, const float *x, float *step_out, float *offset_out) {
    _Alignas(64) float top_x[128 * CODEC_LANES];
    const int32_t t = rank_from_top(codec->group, codec->clip);
    largest_magnitudes(codec->group, x, t + 1, top_x);
    lanes low, high, step, offset;
    range_of_group(codec->group, x, &low, &high);
    range_params(low, high, lanes_load(AT(top_x, t)), 1.0f / (float)((1 << codec->bits) - 1), &step, &offset);
    lanes_store(step_out, lanes_fp16(step));
    lanes_store(offset_out, lanes_fp16(offset));
}

/* Each channel to its nearest code. */
static void round_plain(const row_codec *codec, row_scratch *s) {
    const lanes top = code_top(codec->bits), half = lanes_set1(0.5f);
    for (int32_t j = 0; j < codec->head_dim; j++) {
        const int32_t g = j / codec->group;
        const lanes step = lanes_load(AT(s->step, g)), offset = lanes_load(AT(s->offset, g));
        const lanes z = lanes_sub(lanes_load(AT(s->x, j)), offset);
        lanes_store(AT(s->codes, j), round_code(lanes_fma(z, reciprocal_step(step), half), top));
    }
}

/* Codes with error feedback in M = B D B^T, from the last channel down:
 * t_j = x_j - sum_{i > j} e_i B_ij is rounded, e_j = x^_j - x_j. Blocked by columns so that the sums
 * stay in registers; within a column the order is i falling, whatever the block.
 * What is left over is the residual in the basis of B for nothing: ((x - x^) B)_j = t_j - x^_j. */
static __attribute__((noinline)) void round_ldlq(const row_codec *codec, row_scratch *s) {
    const int32_t d = codec->head_dim;
    const lanes top = code_top(codec->bits);
    for (int32_t j = d - LANES_BLOCK; j >= 0; j -= LANES_BLOCK) {
        lanes t[LANES_BLOCK];
#pragma GCC unroll 8
        for (int k = 0; k < LANES_BLOCK; k++) t[k] = lanes_load(AT(s->x, j + k));
        for (int32_t i = d - 1; i >= j + LANES_BLOCK; i--) {
            const lanes ei = lanes_load(AT(s->e, i));
            const float *row = codec->metric_b + (size_t)i * d + j;
#pragma GCC unroll 8
            for (int k = 0; k < LANES_BLOCK; k++) t[k] = lanes_fnma(ei, lanes_set1(row[k]), t[k]);
        }
        const int32_t g = j / codec->group;
        const lanes step = lanes_load(AT(s->step, g)), offset = lanes_load(AT(s->offset, g));
        const lanes inv = reciprocal_step(step);
        const lanes shift = lanes_fnma(offset, inv, lanes_set1(0.5f));
#pragma GCC unroll 8
        for (int k = LANES_BLOCK - 1; k >= 0; k--) {
            const lanes x = lanes_load(AT(s->x, j + k));
            const lanes c = round_code(lanes_fma(t[k], inv, shift), top);
            const lanes e = lanes_fma(step, c, lanes_sub(offset, x));
            lanes_store(AT(s->codes, j + k), c);
            lanes_store(AT(s->e, j + k), e);
            lanes_store(AT(s->r, j + k), lanes_sub(lanes_sub(t[k], x), e));
            const float *row = codec->metric_b + (size_t)(j + k) * d + j;
#pragma GCC unroll 8
            for (int l = 0; l < k; l++) t[l] = lanes_fnma(e, lanes_set1(row[l]), t[l]);
        }
    }
}

/* The step and offset that <w, w>, <w, 1>, <r, w>, <r, 1> in M ask for, added to the old ones; w and
 * r as in refit_group. */
static inline void refit_metric(float ones_ones, lanes cc, lanes c1, lanes rc, lanes r1, lanes *step, lanes *offset) {
    const lanes n = lanes_set1(ones_ones), scale = lanes_mul(cc, n);
    const lanes det = lanes_fnma(c1, c1, scale);
    const lanes ds = lanes_div(lanes_fnma(c1, r1, lanes_mul(rc, n)), det);
    const lanes dm = lanes_div(lanes_fnma(c1, rc, lanes_mul(cc, r1)), det);
    const lanes new_step = lanes_add(*step, ds), new_offset = lanes_add(*offset, dm);
    const lanes_mask ok = lanes_and(
        lanes_and(lanes_lt(lanes_mul(scale, lanes_set1(REFIT_SINGULAR)), det), lanes_lt(lanes_set1(0), new_step)),
        lanes_lt(lanes_abs(dm), lanes_set1(FLT_MAX)));
    *step = lanes_select(ok, lanes_fp16(new_step), *step);
    *offset = lanes_select(ok, lanes_fp16(new_offset), *offset);
}

/* Whether all channels are one group: then error feedback keeps x B, from which follows what refits need. */
static inline bool has_one_group(const row_codec *codec) { return codec->group == codec->head_dim; }

/* w = c B from what the round left over, where there is one group: (x - x^) B = x B - s c B - m 1 B. */
static inline lanes codes_times_b(lanes xb, lanes r, lanes offset, lanes one, lanes inv) {
    return lanes_mul(lanes_sub(lanes_fnma(offset, one, xb), r), inv);
}

/* Refits step and offset of one group in M, given its codes, against the residual r = (x - x^) B,
 * and brings r up to date. */
static __attribute__((noinline)) void refit_group(const row_codec *codec, row_scratch *s, int32_t g) {
    const int32_t d = codec->head_dim, i0 = g * codec->group, i1 = i0 + codec->group;
    const float *ones = codec->ones + (size_t)g * d;
    const lanes old_step = lanes_load(AT(s->step, g)), old_offset = lanes_load(AT(s->offset, g));
    const lanes inv = reciprocal_step(old_step);
    const bool one_group = has_one_group(codec);

    if (!one_group) lanes_product(d, codec->metric_b, true, i0, i1, i1, s->codes, s->w);
    lanes part_cc[CODEC_LANES], part_c1[CODEC_LANES], part_rc[CODEC_LANES], part_r1[CODEC_LANES];
    for (int32_t k = 0; k < CODEC_LANES; k++) {
        lanes cc = lanes_set1(0), c1 = cc, rc = cc, r1 = cc;
        for (int32_t j = k; j < i1; j += CODEC_LANES) {
            const lanes one = lanes_set1(ones[j]), r = lanes_load(AT(s->r, j));
            const lanes w = one_group ? codes_times_b(lanes_load(AT(s->xb, j)), r, old_offset, one, inv)
                                      : lanes_load(AT(s->w, j));
            const lanes dw = lanes_mul(lanes_set1(codec->metric_d[j]), w);
            if (one_group) lanes_store(AT(s->w, j), w);
            cc = lanes_fma(dw, w, cc);
            c1 = lanes_fma(dw, one, c1);
            rc = lanes_fma(dw, r, rc);
            r1 = lanes_fma(lanes_set1(codec->metric_d[j] * ones[j]), r, r1);
        }
        part_cc[k] = cc, part_c1[k] = c1, part_rc[k] = rc, part_r1[k] = r1;
    }
    lanes step = old_step, offset = old_offset;
    refit_metric(codec->ones_ones[g], fold(part_cc), fold(part_c1), fold(part_rc), fold(part_r1), &step, &offset);
    lanes_store(AT(s->step, g), step);
    lanes_store(AT(s->offset, g), offset);
    const lanes moved_step = lanes_sub(step, old_step), moved_offset = lanes_sub(offset, old_offset);
    for (int32_t j = 0; j < i1; j++) {
        lanes r = lanes_load(AT(s->r, j));
        r = lanes_fnma(moved_step, lanes_load(AT(s->w, j)), r);
        lanes_store(AT(s->r, j), lanes_fnma(moved_offset, lanes_set1(ones[j]), r));
    }
}

/* The factor that <x, x>_M and <x, x - x^>_M ask for. */
static inline lanes gain_factor(lanes xx, lanes xr) {
    const lanes hat = lanes_sub(xx, xr); /* <x^, x>_M */
    lanes factor = lanes_div(xx, hat);
    factor = lanes_min(lanes_max(factor, lanes_set1(0.5f)), lanes_set1(2.0f));
    return lanes_select(lanes_lt(lanes_set1(0), hat), factor, lanes_set1(1.0f));
}

/* Scales step and offset by <x, x>_M / <x^, x>_M, so that the stored row keeps the length of the
 * true one along itself. have_r: error feedback left (x - x^) B in s->r. */
static __attribute__((noinline)) void apply_gain(const row_codec *codec, row_scratch *s, bool have_r) {
    const int32_t d = codec->head_dim, n_groups = d / codec->group;
    const float *y = s->x; /* x B */
    if (!have_r) {
        float *plain = codec->metric_b ? s->e : s->r;
        for (int32_t j = 0; j < d; j++) {
            const int32_t g = j / codec->group;
            const lanes z = lanes_sub(lanes_load(AT(s->x, j)), lanes_load(AT(s->offset, g)));
            lanes_store(AT(plain, j), lanes_fnma(lanes_load(AT(s->step, g)), lanes_load(AT(s->codes, j)), z));
        }
        if (codec->metric_b) lanes_product(d, codec->metric_b, true, 0, d, d, s->e, s->r);
    }
    if (codec->metric_b) {
        if (!have_r || !has_one_group(codec)) lanes_product(d, codec->metric_b, true, 0, d, d, s->x, s->xb);
        y = s->xb;
    }
    lanes part_xx[CODEC_LANES], part_xr[CODEC_LANES];
    for (int32_t k = 0; k < CODEC_LANES; k++) {
        lanes xx = lanes_set1(0), xr = xx;
        for (int32_t j = k; j < d; j += CODEC_LANES) {
            const lanes v = lanes_load(AT(y, j));
            const lanes dv = codec->metric_b ? lanes_mul(lanes_set1(codec->metric_d[j]), v) : v;
            xx = lanes_fma(dv, v, xx);
            xr = lanes_fma(dv, lanes_load(AT(s->r, j)), xr);
        }
        part_xx[k] = xx, part_xr[k] = xr;
    }
    const lanes factor = gain_factor(fold(part_xx), fold(part_xr));
    for (int32_t g = 0; g < n_groups; g++) {
        lanes_store(AT(s->step, g), lanes_fp16(lanes_mul(lanes_load(AT(s->step, g)), factor)));
        lanes_store(AT(s->offset, g), lanes_fp16(lanes_mul(lanes_load(AT(s->offset, g)), factor)));
    }
}

/* Numbers to the nearest BF16 ones, ties to even; the largest become infinity. */
static inline void round_bf16(int32_t n, float *x) {
    for (int32_t i = 0; i < n; i++) {
        const uint32_t bits = float_bits(x[i]);
        x[i] = bits_float((bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u);
    }
}

/* Rows to lanes, turned by U; lanes with NaN or infinity are zeroed and their bits returned. */
static __attribute__((noinline)) uint32_t load_rows(const row_codec *codec, int n_rows, const float *x, int64_t x_stride,
                          row_scratch *s) {
    const int32_t d = codec->head_dim;
    float *in = codec->rotation ? s->w : s->x;
    for (int32_t j = 0; j < d; j += CODEC_LANES) {
        lanes v[CODEC_LANES];
        for (int l = 0; l < CODEC_LANES; l++) v[l] = l < n_rows ? lanes_loadu(x + l * x_stride + j) : lanes_set1(0);
        transpose(v);
        for (int k = 0; k < CODEC_LANES; k++) lanes_store(AT(in, j + k), v[k]);
    }
    const lanes limit = lanes_set1(FLT_MAX);
    lanes_mask ok = lanes_le(lanes_abs(lanes_load(in)), limit);
    for (int32_t j = 1; j < d; j++) ok = lanes_and(ok, lanes_le(lanes_abs(lanes_load(AT(in, j))), limit));
    if (codec->rotation) lanes_product(d, codec->rotation, false, 0, d, d, s->w, s->x);
    if (codec->rotation || codec->bf16) {
        if (codec->bf16) round_bf16(d * CODEC_LANES, s->x);
        for (int32_t j = 0; j < d; j++) ok = lanes_and(ok, lanes_le(lanes_abs(lanes_load(AT(s->x, j))), limit));
    }
    const uint32_t good = lanes_bits(ok);
    if (good != (1u << CODEC_LANES) - 1)
        for (int32_t j = 0; j < d; j++)
            lanes_store(AT(s->x, j), lanes_select(ok, lanes_load(AT(s->x, j)), lanes_set1(0)));
    return ~good & ((1u << n_rows) - 1);
}

static __attribute__((noinline)) void store_rows(const row_codec *codec, int n_rows, const row_scratch *s, uint8_t *codes,
                       uint16_t *params) {
    const int32_t d = codec->head_dim, n_groups = d / codec->group;
    for (int32_t j = 0; j < d; j += CODEC_LANES) {
        lanes v[CODEC_LANES];
        for (int k = 0; k < CODEC_LANES; k++) v[k] = lanes_load(AT(s->codes, j + k));
        transpose(v);
        for (int l = 0; l < n_rows; l++) {
            _Alignas(64) float row[CODEC_LANES];
            lanes_store(row, v[l]);
            for (int k = 0; k < CODEC_LANES; k++) codes[l * d + j + k] = (uint8_t)(int32_t)row[k];
        }
    }
    for (int l = 0; l < n_rows; l++) {
        for (int32_t g = 0; g < n_groups; g++) {
            params[(l * n_groups + g) * 2] = fp16_from_float(s->step[g * CODEC_LANES + l]);
            params[(l * n_groups + g) * 2 + 1] = fp16_from_float(s->offset[g * CODEC_LANES + l]);
        }
    }
}

static inline bool uses_ldlq(const row_codec *codec) {
    return codec->ldlq && codec->metric_b && codec->recipe == OSCAR_RECIPE_DEFAULT;
}

static uint32_t quantize_as_lanes(const row_codec *codec, int n_rows, const float *x, int64_t x_stride, float *y,
                                  uint8_t *codes, uint16_t *params) {
    row_scratch s;
    const int32_t d = codec->head_dim, n_groups = d / codec->group;
    const uint32_t bad = load_rows(codec, n_rows, x, x_stride, &s);
    if (y)
        for (int l = 0; l < n_rows; l++)
            for (int32_t j = 0; j < d; j++) y[l * d + j] = s.x[j * CODEC_LANES + l];
    if (!codes) return bad;
    const lanes high = lanes_set1(ROW_LIMIT), low = lanes_set1(-ROW_LIMIT);
    for (int32_t j = 0; j < d; j++)
        lanes_store(AT(s.x, j), lanes_min(lanes_max(lanes_load(AT(s.x, j)), low), high));

    for (int32_t g = 0; g < n_groups; g++) {
        const float *xg = AT(s.x, g * codec->group);
        if (codec->recipe == OSCAR_RECIPE_ZOO)
            clip_params(codec, xg, AT(s.step, g), AT(s.offset, g));
        else
            least_squares_params(codec->group, codec->bits, xg, AT(s.step, g), AT(s.offset, g));
    }
    const bool ldlq = uses_ldlq(codec);
    if (ldlq) {
        if (has_one_group(codec)) lanes_product(d, codec->metric_b, true, 0, d, d, s.x, s.xb);
        for (int round = 0; round < LDLQ_REFITS; round++) {
            round_ldlq(codec, &s);
            for (int32_t g = 0; g < n_groups; g++) refit_group(codec, &s, g);
        }
    } else {
        round_plain(codec, &s);
    }
    if (codec->gain && codec->recipe == OSCAR_RECIPE_DEFAULT) apply_gain(codec, &s, ldlq);
    store_rows(codec, n_rows, &s, codes, params);
    return bad;
}

#include "codec/quantize_row.inc.h"

static uint32_t quantize_rows(const row_codec *codec, int n_rows, const float *x, int64_t x_stride, float *y,
                              uint8_t *codes, uint16_t *params) {
    float ones[CODEC_MAX_GROUPS * OSCAR_MAX_HEAD_DIM], ones_ones[CODEC_MAX_GROUPS];
    row_codec prepared = *codec;
    const bool ldlq = uses_ldlq(codec);
    if (ldlq && codes && !codec->ones) row_codec_prepare(&prepared, ones, ones_ones);
    /* The published recipe may cut any number of values: the few-rows form sorts sixteen. */
    const bool few = n_rows <= (ldlq ? FEW_ROWS_LDLQ : FEW_ROWS) && codec->recipe == OSCAR_RECIPE_DEFAULT;
    return (few ? quantize_one_by_one : quantize_as_lanes)(&prepared, n_rows, x, x_stride, y, codes, params);
}
