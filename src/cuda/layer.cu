/*
 * layer.cu - uploads what one layer needs: rotations in the order the MMA takes them, means.
 */
#include "layer.h"

#include <cuda_fp16.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <new>

#include "layout.h"

oscar_status cuda_error_set(oscar_error *error, oscar_status status, const char *format, ...) {
    if (error) {
        error->status = status;
        error->position = -1;
        va_list list;
        va_start(list, format);
        vsnprintf(error->message, sizeof error->message, format, list);
        va_end(list);
    }
    return status;
}

oscar_status cuda_check(cudaError_t code, const char *what, oscar_error *error) {
    if (code == cudaSuccess) return OSCAR_OK;
    oscar_status status =
        code == cudaErrorMemoryAllocation ? OSCAR_ERROR_MEMORY : OSCAR_ERROR_INTERNAL;
    return cuda_error_set(error, status, "%s: %s", what, cudaGetErrorString(code));
}

oscar_status layer_upload(void **out, const void *data, size_t bytes, const char *what,
                          oscar_error *error) {
    oscar_status status = cuda_check(cudaMalloc(out, bytes), what, error);
    if (status != OSCAR_OK) {
        *out = NULL;
        return status;
    }
    return cuda_check(cudaMemcpy(*out, data, bytes, cudaMemcpyHostToDevice), what, error);
}

oscar_status layer_launch(const void *kernel, const LayerLaunch *launch, void *params, oscar_cuda_stream stream,
                          const char *what, oscar_error *error) {
    const oscar_status status = cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)launch->shared_bytes), what, error);
    if (status != OSCAR_OK) return status;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = launch->grid;
    config.blockDim = dim3(launch->n_threads);
    config.dynamicSmemBytes = launch->shared_bytes;
    config.stream = (cudaStream_t)stream;
    config.attrs = &attribute;
    config.numAttrs = launch->overlap ? 1 : 0;
    void *arguments[] = {params};
    return cuda_check(cudaLaunchKernelExC(&config, kernel, arguments), what, error);
}

size_t oscar_cuda_tile_bytes(int32_t head_dim, int32_t bits_k, int32_t bits_v) {
    if (head_dim != 64 && head_dim != 128 && head_dim != 256) return 0;
    if (bits_k < 2 || bits_k > 4 || bits_v < 2 || bits_v > 4) return 0;
    return layout_tile_bytes(head_dim, bits_k, bits_v);
}

int32_t oscar_cuda_overlay_rows(const oscar_cuda_layer *layer) {
    return (layer->sink + 7) / 8 * 8 + layer->ring;
}

static oscar_status check_options(const oscar_cuda_layer_options *o, oscar_error *error) {
#define REQUIRE(condition, field, value, expected)                                                 \
    if (!(condition))                                                                              \
    return cuda_error_set(error, OSCAR_ERROR_ARGUMENT, "%s is %d, expected %s", field, (int)(value), expected)
    REQUIRE(o->struct_size == sizeof *o, "struct_size", o->struct_size, "sizeof(oscar_cuda_layer_options)");
    REQUIRE(o->n_kv_heads > 0, "n_kv_heads", o->n_kv_heads, "at least 1");
    REQUIRE(o->n_q_heads > 0 && o->n_q_heads % o->n_kv_heads == 0, "n_q_heads", o->n_q_heads,
            "a multiple of n_kv_heads");
    REQUIRE(o->n_q_heads / o->n_kv_heads <= 16, "n_q_heads", o->n_q_heads, "at most 16 a KV head");
    REQUIRE(o->head_dim == 64 || o->head_dim == 128 || o->head_dim == 256, "head_dim", o->head_dim,
            "64, 128 or 256");
    REQUIRE(o->window >= 0, "window", o->window, "0 or more");
    REQUIRE(o->sink >= 0, "sink", o->sink, "0 or more");
    REQUIRE(o->recent >= 1, "recent", o->recent, "1 or more");
    REQUIRE(o->ring % 64 == 0 && o->ring >= o->recent, "ring", o->ring,
            "a multiple of 64, at least recent");
    REQUIRE(o->bits_k >= 2 && o->bits_k <= 4, "bits_k", o->bits_k, "2, 3 or 4");
    REQUIRE(o->bits_v >= 2 && o->bits_v <= 4, "bits_v", o->bits_v, "2, 3 or 4");
    REQUIRE(!o->ldlq_k || (o->k_metric_b && o->k_metric_d), "ldlq_k", o->ldlq_k, "0 without a key metric");
    REQUIRE(o->n_tracked >= 0 && o->n_tracked % 8 == 0 && o->n_tracked <= o->head_dim / 2, "n_tracked",
            o->n_tracked, "a multiple of 8 up to head_dim / 2");
    REQUIRE(o->n_tracked == 0 || (o->tracked && o->rope && o->k_tracked), "tracked", 0,
            "pairs, rope and k_tracked when n_tracked is not 0");
#undef REQUIRE
    return OSCAR_OK;
}

/* A operand fragments of U^T (m: output channels, k: input channels), high and low fp16 halves. Input
 * channels of steps 2 m, 2 m + 1 are so ordered that lane t takes channels 32 m + 8 t .. + 7. */
static void pack_rotation(const float *u, int d, uint32_t *out) {
    const int steps = d / 16;
    for (int m = 0; m < steps; m++)
        for (int k = 0; k < steps; k++)
            for (int lane = 0; lane < 32; lane++) {
                const int g = lane >> 2, t = lane & 3;
                for (int reg = 0; reg < 4; reg++) {
                    const int row = 16 * m + g + 8 * (reg & 1);
                    const int column = 32 * (k / 2) + 8 * t + 4 * (k & 1) + 2 * (reg >> 1);
                    uint16_t half[2][2];
                    for (int e = 0; e < 2; e++) {
                        const int i = column + e;
                        const float x = u ? u[(size_t)i * d + row] : i == row;
                        const __half high = __float2half_rn(x);
                        const __half low = __float2half_rn(x - __half2float(high));
                        half[0][e] = __half_as_ushort(high);
                        half[1][e] = __half_as_ushort(low);
                    }
                    for (int part = 0; part < 2; part++)
                        out[((((size_t)m * steps + k) * 2 + part) * 32 + lane) * 4 + reg] =
                            half[part][0] | (uint32_t)half[part][1] << 16;
                }
            }
}

static oscar_status upload_rotations(oscar_cuda_layer *layer, const oscar_cuda_layer_options *o,
                                     oscar_error *error) {
    const int d = o->head_dim, h = o->n_kv_heads;
    const size_t square = (size_t)d * d;
    uint32_t *fragments = (uint32_t *)malloc(h * square * 4);
    float *rotated = (float *)malloc((size_t)h * d * sizeof(float));
    float *transposed = (float *)malloc(h * square * sizeof(float));
    oscar_status status = OSCAR_OK;
    if (!fragments || !rotated || !transposed)
        status = cuda_error_set(error, OSCAR_ERROR_MEMORY, "no memory for the rotations of %d heads", h);
    if (status == OSCAR_OK) {
        for (int i = 0; i < h; i++)
            pack_rotation(o->k_rotation ? o->k_rotation + i * square : NULL, d, fragments + i * square);
        status = layer_upload(&layer->k_rotation_fragments, fragments, h * square * 4, "k_rotation", error);
    }
    if (status == OSCAR_OK && o->k_mean)
        status = layer_upload((void **)&layer->k_mean, o->k_mean, (size_t)h * d * 4, "k_mean", error);
    if (status == OSCAR_OK && o->v_mean) {
        for (int i = 0; i < h; i++)
            for (int j = 0; j < d; j++) {
                double sum = 0;
                for (int k = 0; k < d; k++)
                    sum += (double)o->v_mean[(size_t)i * d + k] *
                           (o->v_rotation ? o->v_rotation[i * square + (size_t)k * d + j] : k == j);
                rotated[(size_t)i * d + j] = (float)sum;
            }
        status = layer_upload((void **)&layer->v_mean_rotated, rotated, (size_t)h * d * 4, "v_mean", error);
    }
    if (status == OSCAR_OK && o->v_rotation) {
        for (int i = 0; i < h; i++)
            for (int k = 0; k < d; k++)
                for (int j = 0; j < d; j++)
                    transposed[i * square + (size_t)k * d + j] = o->v_rotation[i * square + (size_t)j * d + k];
        status = layer_upload((void **)&layer->v_rotation_t, transposed, h * square * 4, "v_rotation", error);
    }
    free(fragments);
    free(rotated);
    free(transposed);
    return status;
}

/* One head's metric in the order of AppendMetric (append_rows.cuh). 1_g B and <1_g, 1_g>_M are summed in the
 * order of the CPU's row_codec_prepare. */
static void pack_metric(const float *b, const float *dg, int d, float *out) {
    const int groups = layout_groups(d), group = d / groups;
    for (int k = 0; k < d / 64; k++)
        for (int i = 64 * k; i < d; i++)
            for (int l = 0; l < 16; l++)
                for (int e = 0; e < 4; e++) *out++ = b[(size_t)i * d + 16 * (4 * k + e) + l];
    for (int first = 0; first < d; first += 8)
        for (int i = 7; i > 0; i--)
            for (int j = i - 1; j >= 0; j--) *out++ = b[(size_t)(first + i) * d + first + j];
    memcpy(out, dg, (size_t)d * sizeof(float));
    out += d;
    float *ones = out, *ones_ones = out + (size_t)groups * d;
    for (int g = 0; g < groups; g++, ones += d) {
        float sum = 0;
        for (int j = 0; j < d; j++) ones[j] = 0;
        for (int i = g * group; i < (g + 1) * group; i++)
            for (int j = 0; j < (g + 1) * group; j++) ones[j] += b[(size_t)i * d + j];
        for (int j = 0; j < (g + 1) * group; j++) sum += dg[j] * ones[j] * ones[j];
        ones_ones[g] = sum;
    }
}

/* Fragments of 16 x 16 channels of B from (i0, j0) on, times scale: fp16 numbers, then what is left of them. */
static uint32_t *pack_feedback_piece(const float *b, int i0, int j0, float scale, uint32_t *out) {
    for (int part = 0; part < 2; part++)
        for (int lane = 0; lane < 32; lane++)
            for (int reg = 0; reg < 4; reg++) {
                uint32_t word = 0;
                for (int e = 0; e < 2; e++) {
                    const int i = i0 + 2 * (lane & 3) + 8 * (reg & 1) + e, j = j0 + 8 * (reg >> 1) + (lane >> 2);
                    const float x = j <= i ? b[(size_t)i * 128 + j] * scale : 0;
                    const __half number = __float2half_rn(x), rest = __float2half_rn(x - __half2float(number));
                    word |= (uint32_t)__half_as_ushort(part ? rest : number) << (16 * e);
                }
                *out++ = word;
            }
    return out;
}

/* See FeedbackMetric in append_feedback.cuh; tail: D, 1 B, <1, 1> as pack_metric() left them. */
static void pack_feedback_metric(const float *b, const float *tail, float *out) {
    float largest = 0;
    for (int i = 0; i < 128; i++)
        for (int j = 0; j <= i; j++) largest = fmaxf(largest, fabsf(b[(size_t)i * 128 + j]));
    int exponent;
    frexpf(largest, &exponent);
    const float scale = ldexpf(1.0f, 14 - exponent); /* below 2^14 */
    uint32_t *piece = (uint32_t *)out;
    for (int k = 0; k < 8; k++)
        for (int n = 0; n <= k; n++) piece = pack_feedback_piece(b, 16 * k, 16 * n, scale, piece);
    out += 36 * 256;
    for (int first = 0; first < 128; first += 16)
        for (int i = 15; i > 0; i--)
            for (int j = i - 1; j >= 0; j--) *out++ = b[(size_t)(first + i) * 128 + first + j];
    memcpy(out, tail, (128 + 128 + 1) * sizeof(float));
    out[257] = 1.0f / scale;
}

/* feedback: NULL, or the other order, for keys at head_dim 128. */
static oscar_status upload_metric(float **to, float **feedback, const float *b, const float *dg, int n_heads, int d,
                                  const char *what, oscar_error *error) {
    if (!b || !dg) return OSCAR_OK;
    const size_t floats = (size_t)layout_metric_floats(d), more = feedback && d == 128 ? LAYOUT_FEEDBACK_FLOATS : 0;
    float *packed = (float *)calloc((size_t)n_heads * (floats + more), sizeof(float));
    if (!packed) return cuda_error_set(error, OSCAR_ERROR_MEMORY, "no memory for the metric of %d heads", n_heads);
    float *for_feedback = packed + n_heads * floats;
    for (int h = 0; h < n_heads; h++) {
        float *out = packed + h * floats;
        pack_metric(b + (size_t)h * d * d, dg + (size_t)h * d, d, out);
        if (more)
            pack_feedback_metric(b + (size_t)h * d * d, out + layout_metric_rows(d) + d / 8 * 28, for_feedback + h * more);
    }
    oscar_status status = layer_upload((void **)to, packed, n_heads * floats * sizeof(float), what, error);
    if (status == OSCAR_OK && more)
        status = layer_upload((void **)feedback, for_feedback, n_heads * more * sizeof(float), what, error);
    free(packed);
    return status;
}

/* What append alone needs. */
static oscar_status upload_for_append(oscar_cuda_layer *layer, const oscar_cuda_layer_options *o, oscar_error *error) {
    const size_t h = (size_t)o->n_kv_heads, d = (size_t)o->head_dim;
    const struct {
        float **to;
        const float *from;
        size_t n;
        const char *name;
    } arrays[] = {{&layer->k_rotation, o->k_rotation, h * d * d, "k_rotation"},
                  {&layer->v_rotation, o->v_rotation, h * d * d, "v_rotation"},
                  {&layer->v_mean, o->v_mean, h * d, "v_mean"}};
    for (const auto &a : arrays) {
        if (!a.from) continue;
        oscar_status status = layer_upload((void **)a.to, a.from, a.n * sizeof(float), a.name, error);
        if (status != OSCAR_OK) return status;
    }
    oscar_status status = upload_metric(&layer->k_metric, &layer->k_feedback, o->k_metric_b, o->k_metric_d, o->n_kv_heads,
                                        o->head_dim, "k_metric", error);
    if (status != OSCAR_OK) return status;
    return upload_metric(&layer->v_metric, NULL, o->v_metric_b, o->v_metric_d, o->n_kv_heads, o->head_dim, "v_metric", error);
}

oscar_status oscar_cuda_layer_create(oscar_cuda_layer **out, const oscar_cuda_layer_options *o,
                                     oscar_error *error) {
    *out = NULL;
    oscar_status status = check_options(o, error);
    if (status != OSCAR_OK) return status;
    int device = 0, major = 0, minor = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess)
        return cuda_error_set(error, OSCAR_ERROR_UNSUPPORTED, "no CUDA device");
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (major < 8)
        return cuda_error_set(error, OSCAR_ERROR_UNSUPPORTED,
                              "device %d has compute capability %d.%d, expected 8.0 or later", device, major,
                              minor);
    oscar_cuda_layer *layer = new (std::nothrow) oscar_cuda_layer();
    if (!layer) return cuda_error_set(error, OSCAR_ERROR_MEMORY, "no memory for a layer");
    layer->n_kv_heads = o->n_kv_heads;
    layer->n_q_heads = o->n_q_heads;
    layer->head_dim = o->head_dim;
    layer->window = o->window;
    layer->sink = o->sink;
    layer->recent = o->recent;
    layer->ring = o->ring;
    layer->bits_k = o->bits_k;
    layer->bits_v = o->bits_v;
    layer->recipe = o->recipe;
    layer->ldlq_k = o->ldlq_k;
    layer->gain_k = o->gain_k;
    layer->gain_v = o->gain_v;
    layer->clip_k = o->clip_k;
    layer->clip_v = o->clip_v;
    layer->device = device;
    layer->bulk = major >= 9;
    layer->wgmma = major == 9;
    cudaDeviceGetAttribute(&layer->n_multiprocessors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&layer->shared_max, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    status = upload_rotations(layer, o, error);
    if (status == OSCAR_OK) status = upload_for_append(layer, o, error);
    if (status == OSCAR_OK && o->n_tracked) status = layer_upload_bias(layer, o, error);
    if (status != OSCAR_OK) {
        oscar_cuda_layer_free(layer);
        return status;
    }
    *out = layer;
    return OSCAR_OK;
}

void oscar_cuda_layer_free(oscar_cuda_layer *layer) {
    if (!layer) return;
    cudaFree(layer->k_rotation_fragments);
    cudaFree(layer->k_mean);
    cudaFree(layer->v_mean_rotated);
    cudaFree(layer->v_rotation_t);
    cudaFree(layer->bias_table);
    cudaFree(layer->bias_waves);
    cudaFree(layer->bias_nu);
    cudaFree(layer->bias_units);
    cudaFree(layer->bias_strides);
    cudaFree(layer->bias_turn);
    cudaFree(layer->bias_dims);
    for (int i = 0; i < LAYER_N_MIRRORS; i++) {
        cudaFree(layer->mirror_waves[i]);
        cudaFree(layer->mirror_nu[i]);
    }
    cudaFree(layer->run_table);
    cudaFree(layer->short_run_table);
    cudaFree(layer->bias_half);
    cudaFree(layer->few_table);
    cudaFree(layer->few_low_table);
    cudaFree(layer->k_rotation);
    cudaFree(layer->v_rotation);
    cudaFree(layer->v_mean);
    cudaFree(layer->k_metric);
    cudaFree(layer->k_feedback);
    cudaFree(layer->v_metric);
    cudaFree(layer->append_bias_table);
    cudaFree(layer->append_bias_freq);
    cudaFree(layer->append_bias_dims);
    delete layer;
}

/* --- host access to tiles ------------------------------------------------------------------------- */

/* Where code `channel` of a token lies: byte in the tile's plane and bit. words: of the plane. */
struct CodePlace {
    int byte, bit;
};

static CodePlace code_place(int d, int side, int slot, int channel, bool one_bit) {
    const int sub = slot >> 4, r = slot & 15, words = d / 64;
    int lane = 0, word = 0, half = 0, code = 0, first = 0;
    if (side == 0) {
        const int per_group = d > 64 ? 2 : 1, in_group = channel % 128;
        word = channel / 128 * per_group + in_group / 16 % per_group;
        lane = 4 * (r & 7) + in_group / (16 * per_group);
        half = in_group / 8 & 1;
        code = in_group & 7;
        first = r >> 3;
    } else {
        word = channel / 64;
        code = channel / 16 % 4 + 4 * (channel / 8 & 1);
        lane = 4 * (channel & 7) + ((r & 7) >> 1);
        half = r & 1;
        first = r >> 3;
    }
    int plane_words = words, bit = 16 * half + 2 * code;
    if (one_bit) {
        plane_words = (words + 1) / 2;
        bit += word & 1;
        word >>= 1;
    }
    CodePlace place;
    place.byte = sub * 256 * plane_words + layout_word(plane_words, lane, first * plane_words + word) + bit / 8;
    place.bit = bit % 8;
    return place;
}

void oscar_cuda_tile_put_row(uint8_t *tile, int32_t d, int32_t bits_k, int32_t bits_v, int32_t side,
                             int32_t slot, const uint8_t *codes, const uint16_t *params) {
    const int bits = side ? bits_v : bits_k;
    uint8_t *low = tile + side * layout_low_bytes(d), *high = tile + layout_high_offset(d, bits_k, side);
    for (int i = 0; i < d; i++) {
        const CodePlace p = code_place(d, side, slot, i, false);
        low[p.byte] = (uint8_t)((low[p.byte] & ~(3 << p.bit)) | (codes[i] & 3) << p.bit);
        if (bits == 2) continue;
        const CodePlace q = code_place(d, side, slot, i, bits == 3);
        const int mask = bits == 3 ? 1 : 3;
        high[q.byte] = (uint8_t)((high[q.byte] & ~(mask << q.bit)) | (codes[i] >> 2 & mask) << q.bit);
    }
    for (int k = 0; k < layout_groups(d); k++)
        memcpy(tile + layout_param_offset(d, side) + layout_param(k, slot), params + 2 * k, 4);
}

void oscar_cuda_tile_get_row(const uint8_t *tile, int32_t d, int32_t bits_k, int32_t bits_v, int32_t side,
                             int32_t slot, uint8_t *codes, uint16_t *params) {
    const int bits = side ? bits_v : bits_k;
    const uint8_t *low = tile + side * layout_low_bytes(d);
    const uint8_t *high = tile + layout_high_offset(d, bits_k, side);
    for (int i = 0; i < d; i++) {
        const CodePlace p = code_place(d, side, slot, i, false);
        codes[i] = low[p.byte] >> p.bit & 3;
        if (bits == 2) continue;
        const CodePlace q = code_place(d, side, slot, i, bits == 3);
        codes[i] |= (uint8_t)((high[q.byte] >> q.bit & (bits == 3 ? 1 : 3)) << 2);
    }
    for (int k = 0; k < layout_groups(d); k++)
        memcpy(params + 2 * k, tile + layout_param_offset(d, side) + layout_param(k, slot), 4);
}
