/*
 * rotations.h - what a rotation file holds, in memory. Made by calib, read and written by zoo,
 * used by cache. All arrays are owned and float32 unless said otherwise.
 */
#ifndef OSCAR_ROTATIONS_H
#define OSCAR_ROTATIONS_H

#include "codec/codec.h"

/* One layer; H = n_kv_heads, d = head_dim. A NULL array means zeros, or the identity for rotations
 * and metric. */
typedef struct rotations_layer {
    oscar_layer shape;
    int32_t bits_k, bits_v; /* 2, 3, 4 */
    int32_t recipe;         /* oscar_recipe */
    float clip_k, clip_v;   /* OSCAR_RECIPE_ZOO */
    bool ldlq_k, gain_k, gain_v;
    int32_t n_tracked;    /* rotary pairs whose mean is tracked, the same number for every head */
    int32_t *tracked;     /* [H, n_tracked] pair indices (0 .. rope.n_dims/2 - 1), NULL when 0 */
    float *k_rotation;    /* [H, d, d]: row vector times matrix */
    float *v_rotation;    /* [H, d, d] */
    float *k_mean;        /* [H, d] mu: mean of the post-RoPE residue; 0 in dims of tracked pairs */
    float *k_tracked;     /* [H, d] nu: mean of the pre-RoPE key; 0 outside tracked pairs */
    float *v_mean;        /* [H, d] */
    float *k_metric_b;    /* [H, d, d] unit lower factor of the metric, U^T C_Q U (docs/METHOD.md) */
    float *k_metric_d;    /* [H, d] */
    float *v_metric_b;    /* [H, d, d] metric of the value gain; NULL: identity */
    float *v_metric_d;    /* [H, d] */
} rotations_layer;

typedef struct rotations_meta {
    char *key;
    char *value;
} rotations_meta;

struct oscar_rotations {
    int32_t n_layers;
    rotations_layer *layers; /* [n_layers] */
    int32_t n_meta;
    rotations_meta *meta; /* [n_meta] owned strings */
    uint8_t *packed;      /* what holds the float arrays of all layers; NULL: each has memory of its own */
    size_t packed_bytes;
};

/* Dims of pair f. */
static inline int32_t rope_first(const oscar_rope *rope, int32_t f) {
    return rope->layout == OSCAR_ROPE_ADJACENT ? 2 * f : f;
}
static inline int32_t rope_second(const oscar_rope *rope, int32_t f) {
    return rope->layout == OSCAR_ROPE_ADJACENT ? 2 * f + 1 : f + rope->n_dims / 2;
}

/* Copies the shapes; every other field is zero, bits 2, no arrays. NULL: no memory. */
oscar_rotations *rotations_new(const oscar_layer *layers, int32_t n_layers);
/* Adds or replaces; false: no memory. */
bool rotations_set_meta(oscar_rotations *rotations, const char *key, const char *value);
/* Sylvester Hadamard / sqrt(block), block-diagonal with the largest power of two dividing d.
 * out: [d, d]. */
void rotations_hadamard_matrix(int32_t d, float *out);
/* Everything finite, geometry sane, tracked pairs in range, rotations orthogonal to 1e-3. */
oscar_status rotations_check(const oscar_rotations *rotations, oscar_error *error);

#endif
