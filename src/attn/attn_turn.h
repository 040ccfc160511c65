/*
 * attn_turn.h - the tracked pairs of queries, turned back by an angle a pair. Included after attn_vec_*.h.
 */
#ifndef OSCAR_ATTN_TURN_H
#define OSCAR_ATTN_TURN_H

#include <stdint.h>

/* pairs [n_rows, 2, n_pairs] to out [n_rows, stride], a pair's numbers side by side: attn_ops.turn. */
static void turn_pairs(int n_rows, int32_t n_pairs, const float *pairs, const float *cosines, const float *sines, float *out,
                       int64_t stride) {
    for (int r = 0; r < n_rows; r++, pairs += 2 * n_pairs, out += stride) {
        int32_t p = 0;
        for (; p + LANES <= n_pairs; p += LANES) {
            vf x = vf_load(pairs + p), y = vf_load(pairs + n_pairs + p);
            vf c = vf_load(cosines + p), s = vf_load(sines + p);
            vf_store_pairs(out + 2 * p, vf_fma(x, c, vf_mul(y, s)), vf_sub(vf_mul(y, c), vf_mul(x, s)));
        }
        for (; p < n_pairs; p++) {
            float x = pairs[p], y = pairs[n_pairs + p];
            out[2 * p] = x * cosines[p] + y * sines[p];
            out[2 * p + 1] = y * cosines[p] - x * sines[p];
        }
    }
}

#endif
