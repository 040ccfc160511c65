/*
 * layout.h - the bytes of a tile: 64 tokens of one KV head, keys and values, on GPUs.
 *
 * A tile is what one bulk copy brings into shared memory. Its parts follow each other:
 *
 *   keys     4 sub-tiles of 16 tokens, 4 * head_dim bytes each
 *   values   4 sub-tiles of 16 tokens
 *   key parameters    [n_groups][4][8][2] half2 (step, offset): token 16 s + g + 8 h at [s][g][h]
 *   value parameters  the same
 *   high planes of keys and values, when their bits exceed 2: 2-bit planes (4 bits) or 1-bit planes
 *                     (3 bits), sub-tiles as above
 *
 * Sub-tiles are in the order in which mma.m16n8k16 takes its A operand, so that lane L = 4 g + t
 * loads its own words and nothing is transposed. W = head_dim / 64 words a lane and token.
 *
 *   keys:   lane (g, t) has W words of token g, then W words of token g + 8. Half h (16 bits) of
 *           word w holds channels 16 (W' t + w') + 8 h + 0..7 of the group, code i at bit 2 i,
 *           where W' = words a group (1 at head_dim 64, else 2), w = W' group + w'.
 *   values: lane (g, t) has, for k = 0, 1 and w = 0..W-1, one word; half h is token 2 t + 8 k + h;
 *           its code i is channel 64 w + 16 (i & 3) + 8 (i >> 2) + g.
 *
 * A lane's words are split in 16-byte chunks: chunk c of lane L is at 512 c + 16 L in the sub-tile
 * (head_dim 64 has 8-byte chunks at 8 L). So a key token owns whole words and a value token whole
 * 16-bit units: appending a token is plain stores.
 *
 * 1-bit planes have W/2 words (1 at head_dim 64): bit 2 i of a half belongs to word 2 u of the
 * 2-bit plane, bit 2 i + 1 to word 2 u + 1.
 */
#ifndef OSCAR_CUDA_LAYOUT_H
#define OSCAR_CUDA_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define LAYOUT_FN __host__ __device__ static inline
#else
#define LAYOUT_FN static inline
#endif

LAYOUT_FN int layout_groups(int d) { return d > 128 ? d / 128 : 1; }
/* Words a (token, lane) of the high plane. */
LAYOUT_FN int layout_high_words(int d, int bits) {
    return bits == 4 ? d / 64 : bits == 3 ? (d + 127) / 128 : 0;
}
LAYOUT_FN int layout_low_bytes(int d) { return 16 * d; }
LAYOUT_FN int layout_high_bytes(int d, int bits) { return 1024 * layout_high_words(d, bits); }
LAYOUT_FN int layout_param_offset(int d, int side) {
    return 32 * d + side * 256 * layout_groups(d);
}
LAYOUT_FN int layout_high_offset(int d, int bits_k, int side) {
    return 32 * d + 512 * layout_groups(d) + (side ? layout_high_bytes(d, bits_k) : 0);
}
LAYOUT_FN int layout_tile_bytes(int d, int bits_k, int bits_v) {
    return 32 * d + 512 * layout_groups(d) + layout_high_bytes(d, bits_k) +
           layout_high_bytes(d, bits_v);
}

/* Byte of 32-bit word `word` (0 .. 2 words - 1) of `lane` in a sub-tile of `words` words a token. */
LAYOUT_FN int layout_word(int words, int lane, int word) {
    int per_lane = 2 * words;
    if (per_lane == 2) return 8 * lane + 4 * word;
    return 512 * (word / 4) + 16 * lane + 4 * (word % 4);
}
/* Key channel of code i (0..7) of half h of word w of lane quad position t. */
LAYOUT_FN int layout_key_channel(int d, int w, int t, int h, int i) {
    int per_group = d > 64 ? 2 : 1;
    return 128 * (w / per_group) + 16 * (per_group * t + w % per_group) + 8 * h + i;
}
/* Value channel of code i of word w of lane row g. */
LAYOUT_FN int layout_value_channel(int w, int g, int i) {
    return 64 * w + 16 * (i & 3) + 8 * (i >> 2) + g;
}
/* Floats of a head's metric as append takes it: rows of B, blocks of B, D, 1_g B, <1_g, 1_g>; see
 * AppendMetric in append_rows.cuh. */
LAYOUT_FN constexpr int layout_metric_rows(int d) { return 64 * d * (d / 64) - 2048 * (d / 64) * (d / 64 - 1); }
LAYOUT_FN constexpr int layout_metric_floats(int d) {
    return layout_metric_rows(d) + d / 8 * 28 + d + (d > 128 ? d / 128 : 1) * d + 4;
}
/* The same for append_feedback.cuh, head_dim 128: B in fragments, B within blocks of 16 channels, D, 1 B, <1, 1>, a scale. */
#define LAYOUT_FEEDBACK_FLOATS (36 * 256 + 8 * 120 + 128 + 128 + 4)
/* Byte of the (step, offset) pair of a token within the parameters of one side. */
LAYOUT_FN int layout_param(int group, int slot) {
    int s = slot >> 4, h = (slot >> 3) & 1, g = slot & 7;
    return 4 * (((group * 4 + s) * 8 + g) * 2 + h);
}

#endif
