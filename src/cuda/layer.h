/*
 * layer.h - a layer on the device, as the launchers see it.
 */
#ifndef OSCAR_CUDA_LAYER_H
#define OSCAR_CUDA_LAYER_H

#include "decode_params.h"
#include "oscar/cuda.h"

/* Distances of pages for which there are tables: 8, 12, 16. */
#define LAYER_N_MIRRORS 3

/* Device pointers are owned. H = n_kv_heads, d = head_dim. */
struct oscar_cuda_layer {
    int32_t n_kv_heads, n_q_heads, head_dim, window, sink, recent, ring;
    int32_t bits_k, bits_v;
    int32_t recipe, ldlq_k, gain_k, gain_v;
    float clip_k, clip_v;
    int32_t device, n_multiprocessors, shared_max;
    bool bulk;  /* compute capability 9.0 or later */
    bool wgmma; /* 9.0 */
    int32_t n_tracked, bias_steps, bias_split_steps, bias_even_steps, bias_odd_steps;
    bool bias_long_runs, bias_short_runs; /* whether more than 16 pairs are slow enough for either kind of runs */
    /* For decode: see DecodeParams. */
    void *k_rotation_fragments;
    float *k_mean, *v_mean_rotated, *v_rotation_t;
    void *bias_table, *bias_waves, *bias_nu, *bias_units, *bias_strides, *bias_turn, *bias_dims;
    void *mirror_waves[LAYER_N_MIRRORS], *mirror_nu[LAYER_N_MIRRORS]; /* of pages 4 (i + 2) apart */
    void *run_table, *short_run_table, *bias_half, *few_table, *few_low_table;
    /* For append: see AppendParams in append.cu. */
    float *k_rotation, *v_rotation, *v_mean, *k_metric, *v_metric, *k_feedback;
    float *append_bias_table, *append_bias_freq;
    void *append_bias_dims;
};

/* Fills *error (NULL is allowed) and returns status. */
oscar_status cuda_error_set(oscar_error *error, oscar_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* OSCAR_OK, or what a CUDA call said. */
oscar_status cuda_check(cudaError_t code, const char *what, oscar_error *error);

/* overlap: the kernel waits for the one before itself, and may start while that ends (bulk devices only). */
typedef struct LayerLaunch {
    dim3 grid;
    int n_threads;
    size_t shared_bytes;
    bool overlap;
} LayerLaunch;
/* Launches a kernel that takes one struct. */
oscar_status layer_launch(const void *kernel, const LayerLaunch *launch, void *params, oscar_cuda_stream stream,
                          const char *what, oscar_error *error);

/* Fragments of the tracked mean's table; layer_bias.cu. */
oscar_status layer_upload_bias(oscar_cuda_layer *layer, const oscar_cuda_layer_options *options,
                               oscar_error *error);
/* Copies bytes to new device memory. */
oscar_status layer_upload(void **out, const void *data, size_t bytes, const char *what,
                          oscar_error *error);

#endif
