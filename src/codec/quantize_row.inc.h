/*
 * quantize_row.inc.h - the quantiser for few rows: one row at a time, sixteen channels a vector.
 *
 * Included by quantize_rows.inc.h, whose functions of step, offset and codes serve both forms: here
 * every lane holds the row's value. What a channel receives is computed in the same order as there,
 * so the bits are the same.
 */

typedef struct one_scratch {
    _Alignas(64) float x[OSCAR_MAX_HEAD_DIM];     /* [d] the rotated row */
    _Alignas(64) float codes[OSCAR_MAX_HEAD_DIM]; /* [d] */
    _Alignas(64) float e[OSCAR_MAX_HEAD_DIM];     /* [d] x^ - x */
    _Alignas(64) float t[OSCAR_MAX_HEAD_DIM];     /* [d] what is left to round */
    _Alignas(64) float r[OSCAR_MAX_HEAD_DIM];     /* [d] (x - x^) B */
    _Alignas(64) float xb[OSCAR_MAX_HEAD_DIM];    /* [d] x B */
    _Alignas(64) float w[CODEC_MAX_GROUPS * OSCAR_MAX_HEAD_DIM]; /* [n_groups][d] codes of a group times B */
    float step[CODEC_MAX_GROUPS];   /* [n_groups] fp16 values */
    float offset[CODEC_MAX_GROUPS]; /* [n_groups] fp16 values */
} one_scratch;

/* The tree over the lanes of a vector, in all lanes. */
static inline lanes fold_lanes(lanes a) {
    a = lanes_add(a, lanes_swap8(a));
    a = lanes_add(a, lanes_swap4(a));
    a = lanes_add(a, lanes_swap2(a));
    return lanes_add(a, lanes_swap1(a));
}

static inline float first_lane(lanes a) {
    _Alignas(64) float out[CODEC_LANES];
    lanes_store(out, a);
    return out[0];
}

/* out[j] = sum over i of a[i] W[i][j] for all d columns, in the order of lanes_product. */
static __attribute__((noinline)) void one_product(int32_t d, const float *matrix, bool lower, const float *a,
                                                  float *out) {
    for (int32_t j = 0; j < d; j += 4 * CODEC_LANES) {
        const int n = (d - j) / CODEC_LANES < 4 ? (d - j) / CODEC_LANES : 4;
        lanes sum[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) sum[k] = lanes_set1(0);
        const int32_t n_terms = lower ? d - j : d;
        for (int32_t m = 0; m < n_terms; m++) {
            const int32_t i = lower ? d - 1 - m : m;
            const lanes ai = lanes_set1(a[i]);
            const float *row = matrix + (size_t)i * d + j;
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++)
                if (k < n) sum[k] = lanes_fma(ai, lanes_loadu(row + CODEC_LANES * k), sum[k]);
        }
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++)
            if (k < n) lanes_store(out + j + CODEC_LANES * k, sum[k]);
    }
}

/* One stage of a bitonic network between lanes l and l ^ n, given as their swap: the larger where
 * `larger` has the lane's bit. */
static inline lanes exchange(lanes a, lanes swapped, uint32_t larger) {
    return lanes_select(lanes_mask_of(larger), lanes_max(a, swapped), lanes_min(a, swapped));
}

/* A bitonic vector, falling. */
static inline lanes merge_falling(lanes a) {
    a = exchange(a, lanes_swap8(a), 0x00ff);
    a = exchange(a, lanes_swap4(a), 0x0f0f);
    a = exchange(a, lanes_swap2(a), 0x3333);
    return exchange(a, lanes_swap1(a), 0x5555);
}

/* Any vector, falling, or rising when flip is 0xffff. */
static inline lanes sort_lanes(lanes a, uint32_t flip) {
    a = exchange(a, lanes_swap1(a), 0x9999 ^ flip);
    a = exchange(a, lanes_swap2(a), 0xc3c3 ^ flip);
    a = exchange(a, lanes_swap1(a), 0xa5a5 ^ flip);
    a = exchange(a, lanes_swap4(a), 0xf00f ^ flip);
    a = exchange(a, lanes_swap2(a), 0xcc33 ^ flip);
    a = exchange(a, lanes_swap1(a), 0xaa55 ^ flip);
    a = exchange(a, lanes_swap8(a), 0x00ff ^ flip);
    a = exchange(a, lanes_swap4(a), 0x0f0f ^ flip);
    a = exchange(a, lanes_swap2(a), 0x3333 ^ flip);
    return exchange(a, lanes_swap1(a), 0x5555 ^ flip);
}

/* The sixteen largest |x| of a group, falling. */
static inline lanes one_largest_magnitudes(int32_t group, const float *x) {
    lanes top = sort_lanes(lanes_abs(lanes_load(x)), 0);
    for (int32_t j = CODEC_LANES; j < group; j += CODEC_LANES)
        top = merge_falling(lanes_max(top, sort_lanes(lanes_abs(lanes_load(x + j)), 0xffff)));
    return top;
}

static inline void one_range(int32_t group, const float *x, lanes *low, lanes *high) {
    lanes a = lanes_load(x), b = a;
    for (int32_t j = CODEC_LANES; j < group; j += CODEC_LANES) {
        a = lanes_min(a, lanes_load(x + j));
        b = lanes_max(b, lanes_load(x + j));
    }
    a = lanes_min(a, lanes_swap8(a)), b = lanes_max(b, lanes_swap8(b));
    a = lanes_min(a, lanes_swap4(a)), b = lanes_max(b, lanes_swap4(b));
    a = lanes_min(a, lanes_swap2(a)), b = lanes_max(b, lanes_swap2(b));
    *low = lanes_min(a, lanes_swap1(a)), *high = lanes_max(b, lanes_swap1(b));
}

/* A round of all starts: their chains of dependent operations overlap. v, v1: as in least_squares_round. */
static inline void one_round(const int n_starts, int32_t group, int32_t bits, const float *v, lanes v1, lanes *step,
                             lanes *offset) {
    const lanes top = code_top(bits), half = lanes_set1(0.5f), zero = lanes_set1(0);
    lanes inv[LS_STARTS], shift[LS_STARTS], cc[LS_STARTS], c1[LS_STARTS], vc[LS_STARTS];
#pragma GCC unroll 3
    for (int k = 0; k < n_starts; k++) {
        inv[k] = reciprocal_step(step[k]);
        shift[k] = lanes_fnma(offset[k], inv[k], half);
        cc[k] = c1[k] = vc[k] = zero;
    }
    for (int32_t j = 0; j < group; j += CODEC_LANES) {
        const lanes vj = lanes_load(v + j);
#pragma GCC unroll 3
        for (int k = 0; k < n_starts; k++) {
            const lanes c = round_code(lanes_fma(vj, inv[k], shift[k]), top);
            cc[k] = lanes_fma(c, c, cc[k]);
            c1[k] = lanes_add(c1[k], c);
            vc[k] = lanes_fma(vj, c, vc[k]);
        }
    }
#pragma GCC unroll 3
    for (int k = 0; k < n_starts; k++)
        refit_plain(group, fold_lanes(cc[k]), fold_lanes(c1[k]), fold_lanes(vc[k]), v1, &step[k], &offset[k]);
}

static inline lanes one_squared_error(int32_t group, int32_t bits, const float *x, lanes step, lanes offset) {
    const lanes inv = reciprocal_step(step), top = code_top(bits), half = lanes_set1(0.5f);
    lanes sum = lanes_set1(0);
    for (int32_t j = 0; j < group; j += CODEC_LANES) {
        const lanes z = lanes_sub(lanes_load(x + j), offset);
        const lanes c = round_code(lanes_fma(z, inv, half), top);
        const lanes e = lanes_fnma(step, c, z);
        sum = lanes_fma(e, e, sum);
    }
    return fold_lanes(sum);
}

static inline void one_least_squares(const int n_starts, int32_t group, int32_t bits, const float *x, float *step_out,
                                     float *offset_out) {
    const lanes largest = one_largest_magnitudes(group, x);
    const float inv_levels = 1.0f / (float)((1 << bits) - 1);
    lanes low, high, step[LS_STARTS], offset[LS_STARTS];
    one_range(group, x, &low, &high);
    _Alignas(64) float v[128];
    const row_grid grid = grid_of(bits, low, high);
    lanes v1 = lanes_set1(0);
    for (int32_t j = 0; j < group; j += CODEC_LANES) {
        const lanes vj = to_grid(grid, lanes_load(x + j));
        lanes_store(v + j, vj);
        v1 = lanes_add(v1, vj);
    }
    v1 = fold_lanes(v1);
    for (int k = 0; k < n_starts; k++) {
        range_params(low, high, lanes_pick(largest, k == 0 ? 0 : rank_from_top(group, start_clip(bits, k))), inv_levels,
                     &step[k], &offset[k]);
        offset[k] = lanes_sub(offset[k], grid.middle);
    }
    for (int round = 0; round < LS_ROUNDS; round++) one_round(n_starts, group, bits, v, v1, step, offset);
    best_start best = no_start();
    for (int k = 0; k < n_starts; k++) {
        step[k] = lanes_fp16(step[k]);
        offset[k] = lanes_fp16(lanes_add(offset[k], grid.middle));
        keep_better(&best, step[k], offset[k], one_squared_error(group, bits, x, step[k], offset[k]));
    }
    *step_out = first_lane(best.step);
    *offset_out = first_lane(best.offset);
}

static __attribute__((noinline)) void one_params(const row_codec *codec, one_scratch *s) {
    for (int32_t g = 0; g < codec->head_dim / codec->group; g++) {
        const float *x = s->x + (size_t)g * codec->group;
        if (codec->bits == 2)
            one_least_squares(LS_STARTS, codec->group, 2, x, &s->step[g], &s->offset[g]);
        else
            one_least_squares(LS_STARTS - 1, codec->group, codec->bits, x, &s->step[g], &s->offset[g]);
    }
}

static void one_round_plain(const row_codec *codec, one_scratch *s) {
    const lanes top = code_top(codec->bits), half = lanes_set1(0.5f);
    for (int32_t j = 0; j < codec->head_dim; j += CODEC_LANES) {
        const int32_t g = j / codec->group;
        const lanes z = lanes_sub(lanes_load(s->x + j), lanes_set1(s->offset[g]));
        const lanes u = lanes_fma(z, reciprocal_step(lanes_set1(s->step[g])), half);
        lanes_store(s->codes + j, round_code(u, top));
    }
}

/* t[j] -= sum of e_i B_ij over the channels i of block `block`, falling, for the columns of the vector at `column`. */
static inline void push_errors(const row_codec *codec, one_scratch *s, int32_t block, int32_t column) {
    lanes t = lanes_load(s->t + column);
    for (int32_t i = block + CODEC_LANES - 1; i >= block; i--)
        t = lanes_fnma(lanes_set1(s->e[i]), lanes_loadu(codec->metric_b + (size_t)i * codec->head_dim + column), t);
    lanes_store(s->t + column, t);
}

/* w[j] += sum of c_i B_ij, likewise. */
static inline void push_codes(const row_codec *codec, const one_scratch *s, int32_t block, int32_t column, float *w) {
    lanes sum = lanes_load(w + column);
    for (int32_t i = block + CODEC_LANES - 1; i >= block; i--)
        sum = lanes_fma(lanes_set1(s->codes[i]), lanes_loadu(codec->metric_b + (size_t)i * codec->head_dim + column),
                        sum);
    lanes_store(w + column, sum);
}

/* The sixteen channels from j on. Each waits for the one above it, so what counts is the chain from
 * t to e: with four levels, e is chosen among four by comparisons. The vector below is brought up to
 * date on the way, since it is needed next. */
static inline void ldlq_block(const bool two_bits, const bool has_next, const row_codec *codec, one_scratch *s,
                              int32_t j) {
    const int32_t d = codec->head_dim, g = j / codec->group;
    const lanes top = code_top(codec->bits), one = lanes_set1(1), two = lanes_set1(2), three = lanes_set1(3);
    const lanes step = lanes_set1(s->step[g]), offset = lanes_set1(s->offset[g]), inv = reciprocal_step(step);
    const lanes shift = lanes_fnma(offset, inv, lanes_set1(0.5f));
    const lanes x = lanes_load(s->x + j), base = lanes_sub(offset, x);
    const lanes e0 = lanes_fma(step, lanes_set1(0), base), e1 = lanes_fma(step, one, base);
    const lanes e2 = lanes_fma(step, two, base), e3 = lanes_fma(step, three, base);
    lanes t = lanes_load(s->t + j), next = has_next ? lanes_load(s->t + j - CODEC_LANES) : t, rounded = t;
#pragma GCC unroll 16
    for (int l = CODEC_LANES - 1; l >= 0; l--) {
        const lanes u = lanes_fma(t, inv, shift);
        const float *row = codec->metric_b + (size_t)(j + l) * d + j;
        lanes e;
        if (two_bits) {
            const lanes low = lanes_select(lanes_le(one, u), e1, e0), high = lanes_select(lanes_le(three, u), e3, e2);
            e = lanes_select(lanes_le(two, u), high, low);
        } else {
            e = lanes_fma(step, round_code(u, top), base);
        }
        e = lanes_pick(e, l);
        rounded = lanes_select(lanes_mask_of(1u << l), t, rounded);
        t = lanes_fnma(e, lanes_loadu(row), t);
        if (has_next) next = lanes_fnma(e, lanes_loadu(row - CODEC_LANES), next);
    }
    const lanes c = round_code(lanes_fma(rounded, inv, shift), top);
    const lanes e = lanes_fma(step, c, base);
    lanes_store(s->codes + j, c);
    lanes_store(s->e + j, e);
    lanes_store(s->r + j, lanes_sub(lanes_sub(rounded, x), e));
    if (has_next) lanes_store(s->t + j - CODEC_LANES, next);
}

/* As round_ldlq, and where there are several groups the products of the codes with B on the way. */
static __attribute__((noinline)) void one_round_ldlq(const row_codec *codec, one_scratch *s) {
    const int32_t d = codec->head_dim;
    const bool one_group = has_one_group(codec);
    memcpy(s->t, s->x, sizeof(float) * (size_t)d);
    if (!one_group) memset(s->w, 0, sizeof(float) * (size_t)(d / codec->group) * (size_t)d);
    for (int32_t j = d - CODEC_LANES; j >= 0; j -= CODEC_LANES) {
        float *w = s->w + (size_t)(j / codec->group) * d;
        if (codec->bits != 2)
            j > 0 ? ldlq_block(false, true, codec, s, j) : ldlq_block(false, false, codec, s, j);
        else
            j > 0 ? ldlq_block(true, true, codec, s, j) : ldlq_block(true, false, codec, s, j);
        for (int32_t column = j - 2 * CODEC_LANES; column >= 0; column -= CODEC_LANES) push_errors(codec, s, j, column);
        for (int32_t column = j; !one_group && column >= 0; column -= CODEC_LANES) push_codes(codec, s, j, column, w);
    }
}

static __attribute__((noinline)) void one_refit(const row_codec *codec, one_scratch *s, int32_t g) {
    const int32_t d = codec->head_dim, i1 = (g + 1) * codec->group;
    const float *ones = codec->ones + (size_t)g * d;
    float *w = s->w + (size_t)g * d;
    const lanes old_step = lanes_set1(s->step[g]), old_offset = lanes_set1(s->offset[g]);
    const lanes inv = reciprocal_step(old_step);
    const bool one_group = has_one_group(codec);
    lanes cc = lanes_set1(0), c1 = cc, rc = cc, r1 = cc;
    for (int32_t j = 0; j < i1; j += CODEC_LANES) {
        const lanes r = lanes_load(s->r + j), dg = lanes_loadu(codec->metric_d + j), one = lanes_loadu(ones + j);
        const lanes wj = one_group ? codes_times_b(lanes_load(s->xb + j), r, old_offset, one, inv) : lanes_load(w + j);
        const lanes dw = lanes_mul(dg, wj);
        if (one_group) lanes_store(w + j, wj);
        cc = lanes_fma(dw, wj, cc);
        c1 = lanes_fma(dw, one, c1);
        rc = lanes_fma(dw, r, rc);
        r1 = lanes_fma(lanes_mul(dg, one), r, r1);
    }
    lanes step = old_step, offset = old_offset;
    refit_metric(codec->ones_ones[g], fold_lanes(cc), fold_lanes(c1), fold_lanes(rc), fold_lanes(r1), &step, &offset);
    s->step[g] = first_lane(step);
    s->offset[g] = first_lane(offset);
    const lanes moved_step = lanes_sub(step, old_step), moved_offset = lanes_sub(offset, old_offset);
    for (int32_t j = 0; j < i1; j += CODEC_LANES) {
        const lanes r = lanes_fnma(moved_step, lanes_load(w + j), lanes_load(s->r + j));
        lanes_store(s->r + j, lanes_fnma(moved_offset, lanes_loadu(ones + j), r));
    }
}

static __attribute__((noinline)) void one_gain(const row_codec *codec, one_scratch *s, bool have_r) {
    const int32_t d = codec->head_dim;
    const float *y = s->x;
    if (!have_r) {
        float *plain = codec->metric_b ? s->e : s->r;
        for (int32_t j = 0; j < d; j += CODEC_LANES) {
            const int32_t g = j / codec->group;
            const lanes z = lanes_sub(lanes_load(s->x + j), lanes_set1(s->offset[g]));
            lanes_store(plain + j, lanes_fnma(lanes_set1(s->step[g]), lanes_load(s->codes + j), z));
        }
        if (codec->metric_b) one_product(d, codec->metric_b, true, s->e, s->r);
    }
    if (codec->metric_b) {
        if (!have_r || !has_one_group(codec)) one_product(d, codec->metric_b, true, s->x, s->xb);
        y = s->xb;
    }
    lanes xx = lanes_set1(0), xr = xx;
    for (int32_t j = 0; j < d; j += CODEC_LANES) {
        const lanes v = lanes_load(y + j);
        const lanes dv = codec->metric_b ? lanes_mul(lanes_loadu(codec->metric_d + j), v) : v;
        xx = lanes_fma(dv, v, xx);
        xr = lanes_fma(dv, lanes_load(s->r + j), xr);
    }
    const lanes factor = gain_factor(fold_lanes(xx), fold_lanes(xr));
    for (int32_t g = 0; g < d / codec->group; g++) {
        s->step[g] = first_lane(lanes_fp16(lanes_mul(lanes_set1(s->step[g]), factor)));
        s->offset[g] = first_lane(lanes_fp16(lanes_mul(lanes_set1(s->offset[g]), factor)));
    }
}

/* The row turned by U; zeros and false when it holds NaN or infinity. */
static __attribute__((noinline)) bool one_load(const row_codec *codec, const float *x, one_scratch *s) {
    const int32_t d = codec->head_dim;
    const lanes limit = lanes_set1(FLT_MAX);
    if (codec->rotation)
        one_product(d, codec->rotation, false, x, s->x);
    else
        memcpy(s->x, x, sizeof(float) * (size_t)d);
    if (codec->bf16) round_bf16(d, s->x);
    lanes_mask ok = lanes_le(lanes_abs(lanes_loadu(x)), limit);
    for (int32_t j = 0; j < d; j += CODEC_LANES) {
        ok = lanes_and(ok, lanes_le(lanes_abs(lanes_loadu(x + j)), limit));
        ok = lanes_and(ok, lanes_le(lanes_abs(lanes_load(s->x + j)), limit));
    }
    const bool good = lanes_bits(ok) == (1u << CODEC_LANES) - 1;
    if (!good) memset(s->x, 0, sizeof(float) * (size_t)d);
    return good;
}

static bool quantize_one(const row_codec *codec, const float *x, float *y, uint8_t *codes, uint16_t *params) {
    one_scratch s;
    const int32_t d = codec->head_dim, n_groups = d / codec->group;
    const bool good = one_load(codec, x, &s);
    if (y) memcpy(y, s.x, sizeof(float) * (size_t)d);
    if (!codes) return good;
    const lanes high = lanes_set1(ROW_LIMIT), low = lanes_set1(-ROW_LIMIT);
    for (int32_t j = 0; j < d; j += CODEC_LANES)
        lanes_store(s.x + j, lanes_min(lanes_max(lanes_load(s.x + j), low), high));
    one_params(codec, &s);
    const bool ldlq = uses_ldlq(codec);
    if (ldlq && has_one_group(codec)) one_product(d, codec->metric_b, true, s.x, s.xb);
    for (int round = 0; ldlq && round < LDLQ_REFITS; round++) {
        one_round_ldlq(codec, &s);
        for (int32_t g = 0; g < n_groups; g++) one_refit(codec, &s, g);
    }
    if (!ldlq) one_round_plain(codec, &s);
    if (codec->gain) one_gain(codec, &s, ldlq);
    for (int32_t j = 0; j < d; j++) codes[j] = (uint8_t)(int32_t)s.codes[j];
    for (int32_t g = 0; g < n_groups; g++) {
        params[2 * g] = fp16_from_float(s.step[g]);
        params[2 * g + 1] = fp16_from_float(s.offset[g]);
    }
    return good;
}

static uint32_t quantize_one_by_one(const row_codec *codec, int n_rows, const float *x, int64_t x_stride, float *y,
                                    uint8_t *codes, uint16_t *params) {
    const int32_t d = codec->head_dim, n_groups = d / codec->group;
    uint32_t bad = 0;
    for (int l = 0; l < n_rows; l++)
        if (!quantize_one(codec, x + l * x_stride, y ? y + (size_t)l * d : NULL, codes ? codes + (size_t)l * d : NULL,
                          params ? params + (size_t)l * n_groups * 2 : NULL))
            bad |= 1u << l;
    return bad;
}
