/*
 * rotations.c - what a rotation file holds, in memory: made, checked, freed.
 */
#include "codec/rotations.h"

#include <math.h>
#include <stdlib.h>

oscar_rotations *rotations_new(const oscar_layer *layers, int32_t n_layers) {
    oscar_rotations *rotations = calloc(1, sizeof *rotations);
    if (!rotations) return NULL;
    rotations->layers = aligned_calloc((size_t)n_layers, sizeof *rotations->layers);
    if (!rotations->layers) {
        free(rotations);
        return NULL;
    }
    rotations->n_layers = n_layers;
    for (int32_t i = 0; i < n_layers; i++) {
        rotations->layers[i].shape = layers[i];
        rotations->layers[i].bits_k = rotations->layers[i].bits_v = 2;
    }
    return rotations;
}

void oscar_rotations_free(oscar_rotations *rotations) {
    if (!rotations) return;
    for (int32_t i = 0; i < rotations->n_layers; i++) {
        rotations_layer *l = &rotations->layers[i];
        void *arrays[] = {l->k_rotation, l->v_rotation, l->k_mean,     l->k_tracked, l->v_mean,
                          l->k_metric_b, l->k_metric_d, l->v_metric_b, l->v_metric_d};
        for (size_t a = 0; a < sizeof arrays / sizeof *arrays && !rotations->packed; a++) aligned_free(arrays[a]);
        aligned_free(l->tracked);
    }
    if (rotations->packed) region_release(rotations->packed, rotations->packed_bytes);
    for (int32_t i = 0; i < rotations->n_meta; i++) {
        free(rotations->meta[i].key);
        free(rotations->meta[i].value);
    }
    free(rotations->meta);
    aligned_free(rotations->layers);
    free(rotations);
}

bool rotations_set_meta(oscar_rotations *rotations, const char *key, const char *value) {
    char *copy = strdup(value);
    if (!copy) return false;
    for (int32_t i = 0; i < rotations->n_meta; i++) {
        if (strcmp(rotations->meta[i].key, key) != 0) continue;
        free(rotations->meta[i].value);
        rotations->meta[i].value = copy;
        return true;
    }
    char *key_copy = strdup(key);
    rotations_meta *grown = key_copy ? realloc(rotations->meta, ((size_t)rotations->n_meta + 1) * sizeof *grown) : NULL;
    if (!grown) {
        free(copy);
        free(key_copy);
        return false;
    }
    rotations->meta = grown;
    grown[rotations->n_meta++] = (rotations_meta){key_copy, copy};
    return true;
}

void rotations_hadamard_matrix(int32_t d, float *out) {
    /* A doubled matrix cut to d x d would not be orthogonal; blocks that divide d are. */
    const int32_t block = d & -d;
    const float value = (float)(1 / sqrt((double)block));
    for (int32_t i = 0; i < d; i++)
        for (int32_t j = 0; j < d; j++) {
            float v = __builtin_parity((unsigned)(i & j & (block - 1))) ? -value : value;
            out[(size_t)i * d + j] = i / block == j / block ? v : 0.0f;
        }
}

int32_t oscar_rotations_n_layers(const oscar_rotations *rotations) {
    return rotations->n_layers;
}

const oscar_layer *oscar_rotations_layer(const oscar_rotations *rotations, int32_t layer) {
    return layer >= 0 && layer < rotations->n_layers ? &rotations->layers[layer].shape : NULL;
}

const char *oscar_rotations_metadata(const oscar_rotations *rotations, const char *key) {
    for (int32_t i = 0; i < rotations->n_meta; i++)
        if (strcmp(rotations->meta[i].key, key) == 0) return rotations->meta[i].value;
    return NULL;
}

/* ------------------------------------------------------------------------------------------------
 * Checks
 */

static oscar_status check_rope(const oscar_layer *s, int32_t layer, oscar_error *error) {
    const oscar_rope *r = &s->rope;
    if (r->layout < OSCAR_ROPE_NONE || r->layout > OSCAR_ROPE_HALF_SPLIT)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "layer %d: rope.layout is %d, expected 0 to 2", layer, r->layout);
    if (r->n_dims < 0 || r->n_dims > s->head_dim || r->n_dims % 2)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "layer %d: rope.n_dims is %d, expected an even number up to head_dim %d",
                         layer, r->n_dims, s->head_dim);
    if (r->layout == OSCAR_ROPE_NONE && r->n_dims)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "layer %d: rope.n_dims is %d without a rope.layout", layer, r->n_dims);
    if (r->n_dims && !(isfinite(r->magnitude) && r->magnitude > 0))
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "layer %d: rope.magnitude is %g, expected a positive number",
                         layer, (double)r->magnitude);
    for (int32_t f = 0; f < r->n_dims / 2; f++)
        if (!isfinite(r->inv_freq[f]))
            return error_set(error, OSCAR_ERROR_NOT_FINITE, -1, "layer %d: rope.inv_freq[%d] is not finite", layer, f);
    return OSCAR_OK;
}

static oscar_status check_shape(const oscar_layer *s, int32_t layer, oscar_error *error) {
    if (s->head_dim < 16 || s->head_dim > OSCAR_MAX_HEAD_DIM || s->head_dim % 16)
        return error_set(error, OSCAR_ERROR_UNSUPPORTED, -1, "layer %d: head_dim is %d, expected a multiple of 16 up to %d",
                         layer, s->head_dim, OSCAR_MAX_HEAD_DIM);
    if (s->n_kv_heads < 1)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "layer %d: n_kv_heads is %d, expected at least 1", layer, s->n_kv_heads);
    if (s->n_q_heads < s->n_kv_heads || s->n_q_heads % s->n_kv_heads)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "layer %d: n_q_heads is %d, expected a multiple of n_kv_heads %d",
                         layer, s->n_q_heads, s->n_kv_heads);
    if (s->n_q_heads / s->n_kv_heads > OSCAR_MAX_GQA_GROUP)
        return error_set(error, OSCAR_ERROR_UNSUPPORTED, -1, "layer %d: %d query heads a KV head, expected at most %d",
                         layer, s->n_q_heads / s->n_kv_heads, OSCAR_MAX_GQA_GROUP);
    if (s->window < 0)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "layer %d: window is %d, expected 0 or more", layer, s->window);
    return check_rope(s, layer, error);
}

static oscar_status check_finite(const char *name, const float *values, size_t count, int32_t layer,
                                 oscar_error *error) {
    for (size_t i = 0; values && i < count; i++)
        if (!isfinite(values[i]))
            return error_set(error, OSCAR_ERROR_NOT_FINITE, -1, "layer %d: %s[%zu] is not finite", layer, name, i);
    return OSCAR_OK;
}

/* max |R R^T - I| <= 1e-3 for every head. rotation: [n_heads, d, d], NULL: identity. */
static oscar_status check_orthogonal(const char *name, const float *rotation, const oscar_layer *s,
                                     int32_t layer, oscar_error *error) {
    const int32_t d = s->head_dim;
    for (int32_t h = 0; rotation && h < s->n_kv_heads; h++) {
        const float *r = rotation + (size_t)h * d * d;
        for (int32_t i = 0; i < d; i++)
            for (int32_t j = 0; j <= i; j++) {
                /* Sixteen partial sums: the compiler keeps them in vectors. */
                float part[16] = {0};
                for (int32_t k = 0; k < d; k += 16)
                    for (int32_t l = 0; l < 16; l++) part[l] += r[(size_t)i * d + k + l] * r[(size_t)j * d + k + l];
                float dot = i == j ? -1.0f : 0.0f;
                for (int32_t l = 0; l < 16; l++) dot += part[l];
                if (!(fabsf(dot) <= 1e-3f))
                    return error_set(error, OSCAR_ERROR_FORMAT, -1,
                                     "layer %d: %s of head %d is not orthogonal: rows %d and %d are off by %.2g, expected at most 1e-3",
                                     layer, name, h, i, j, (double)dot);
            }
    }
    return OSCAR_OK;
}

static oscar_status check_metric(const char *name, const float *b, const float *dg,
                                 const oscar_layer *s, int32_t layer, oscar_error *error) {
    const int32_t d = s->head_dim;
    if (!b != !dg)
        return error_set(error, OSCAR_ERROR_FORMAT, -1, "layer %d: %s has only one of its factors", layer, name);
    for (int32_t h = 0; b && h < s->n_kv_heads; h++)
        for (int32_t i = 0; i < d; i++) {
            if (!(dg[(size_t)h * d + i] > 0))
                return error_set(error, OSCAR_ERROR_FORMAT, -1, "layer %d: %s: pivot %d of head %d is %g, expected positive",
                                 layer, name, i, h, (double)dg[(size_t)h * d + i]);
            const float *row = b + ((size_t)h * d + i) * d;
            for (int32_t j = i; j < d; j++)
                if (row[j] != (i == j ? 1.0f : 0.0f))
                    return error_set(error, OSCAR_ERROR_FORMAT, -1, "layer %d: %s of head %d is not unit lower triangular at %d, %d",
                                     layer, name, h, i, j);
        }
    return OSCAR_OK;
}

static oscar_status check_tracked(const rotations_layer *l, int32_t layer, oscar_error *error) {
    const int32_t n_pairs = l->shape.rope.n_dims / 2;
    if (l->n_tracked < 0 || l->n_tracked > n_pairs)
        return error_set(error, OSCAR_ERROR_FORMAT, -1, "layer %d: n_tracked is %d, expected 0 to %d", layer, l->n_tracked, n_pairs);
    if (l->n_tracked && (!l->tracked || !l->k_tracked))
        return error_set(error, OSCAR_ERROR_FORMAT, -1, "layer %d: n_tracked is %d but %s is missing", layer, l->n_tracked,
                         l->tracked ? "k_tracked" : "tracked");
    for (int32_t h = 0; l->n_tracked && h < l->shape.n_kv_heads; h++) {
        bool seen[OSCAR_MAX_HEAD_DIM / 2] = {false};
        for (int32_t i = 0; i < l->n_tracked; i++) {
            int32_t pair = l->tracked[(size_t)h * l->n_tracked + i];
            if (pair < 0 || pair >= n_pairs)
                return error_set(error, OSCAR_ERROR_FORMAT, -1, "layer %d: tracked pair %d of head %d is %d, expected 0 to %d",
                                 layer, i, h, pair, n_pairs - 1);
            if (seen[pair])
                return error_set(error, OSCAR_ERROR_FORMAT, -1, "layer %d: head %d tracks pair %d twice", layer, h, pair);
            seen[pair] = true;
        }
    }
    return OSCAR_OK;
}

static oscar_status check_choices(const rotations_layer *l, int32_t layer, oscar_error *error) {
    const int32_t bits[2] = {l->bits_k, l->bits_v};
    const float clips[2] = {l->clip_k, l->clip_v};
    for (int side = 0; side < 2; side++) {
        const char name = "kv"[side];
        if (bits[side] < 2 || bits[side] > 4)
            return error_set(error, OSCAR_ERROR_FORMAT, -1, "layer %d: bits_%c is %d, expected 2, 3 or 4", layer, name, bits[side]);
        if (l->recipe == OSCAR_RECIPE_ZOO && !(clips[side] > 0 && clips[side] <= 1))
            return error_set(error, OSCAR_ERROR_FORMAT, -1, "layer %d: clip_%c is %g, expected above 0 and up to 1",
                             layer, name, (double)clips[side]);
    }
    if (l->recipe != OSCAR_RECIPE_DEFAULT && l->recipe != OSCAR_RECIPE_ZOO)
        return error_set(error, OSCAR_ERROR_FORMAT, -1, "layer %d: recipe is %d, expected 0 or 1", layer, l->recipe);
    if (l->ldlq_k && !l->k_metric_b)
        return error_set(error, OSCAR_ERROR_FORMAT, -1, "layer %d: ldlq_k is set without a k_metric", layer);
    return OSCAR_OK;
}

static oscar_status check_layer(const rotations_layer *l, int32_t layer, oscar_error *error) {
    oscar_status status = check_shape(&l->shape, layer, error);
    if (!status) status = check_choices(l, layer, error);
    if (!status) status = check_tracked(l, layer, error);
    if (status) return status;
    const size_t rows = (size_t)l->shape.n_kv_heads * l->shape.head_dim, cells = rows * l->shape.head_dim;
    const struct {
        const char *name;
        const float *values;
        size_t count;
    } arrays[] = {{"k_rotation", l->k_rotation, cells}, {"v_rotation", l->v_rotation, cells},
                  {"k_mean", l->k_mean, rows},          {"k_tracked", l->k_tracked, rows},
                  {"v_mean", l->v_mean, rows},          {"k_metric_b", l->k_metric_b, cells},
                  {"k_metric_d", l->k_metric_d, rows},  {"v_metric_b", l->v_metric_b, cells},
                  {"v_metric_d", l->v_metric_d, rows}};
    for (size_t a = 0; a < sizeof arrays / sizeof *arrays; a++) {
        status = check_finite(arrays[a].name, arrays[a].values, arrays[a].count, layer, error);
        if (status) return status;
    }
    status = check_metric("k_metric", l->k_metric_b, l->k_metric_d, &l->shape, layer, error);
    if (!status) status = check_metric("v_metric", l->v_metric_b, l->v_metric_d, &l->shape, layer, error);
    if (!status) status = check_orthogonal("k_rotation", l->k_rotation, &l->shape, layer, error);
    if (!status) status = check_orthogonal("v_rotation", l->v_rotation, &l->shape, layer, error);
    return status;
}

oscar_status rotations_check(const oscar_rotations *rotations, oscar_error *error) {
    if (rotations->n_layers < 1 || rotations->n_layers > OSCAR_MAX_LAYERS)
        return error_set(error, OSCAR_ERROR_FORMAT, -1, "n_layers is %d, expected 1 to %d", rotations->n_layers, OSCAR_MAX_LAYERS);
    for (int32_t i = 0; i < rotations->n_layers; i++) {
        oscar_status status = check_layer(&rotations->layers[i], i, error);
        if (status) return status;
    }
    return OSCAR_OK;
}

/* ------------------------------------------------------------------------------------------------
 * Stand-ins without calibration
 */

static oscar_status make_plain(oscar_rotations **out, const oscar_layer *layers, int32_t n_layers,
                               int32_t bits, const char *recipe, oscar_error *error) {
    *out = NULL;
    if (!layers || n_layers < 1 || n_layers > OSCAR_MAX_LAYERS)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "n_layers is %d, expected 1 to %d", n_layers, OSCAR_MAX_LAYERS);
    if (bits < 2 || bits > 4)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "bits is %d, expected 2, 3 or 4", bits);
    for (int32_t i = 0; i < n_layers; i++) {
        oscar_status status = check_shape(&layers[i], i, error);
        if (status) return status;
    }
    oscar_rotations *rotations = rotations_new(layers, n_layers);
    if (!rotations || !rotations_set_meta(rotations, "recipe", recipe)) {
        oscar_rotations_free(rotations);
        return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for rotations of %d layers", n_layers);
    }
    for (int32_t i = 0; i < n_layers; i++) rotations->layers[i].bits_k = rotations->layers[i].bits_v = bits;
    *out = rotations;
    return OSCAR_OK;
}

oscar_status oscar_rotations_identity(oscar_rotations **out, const oscar_layer *layers,
                                      int32_t n_layers, int32_t bits, oscar_error *error) {
    return make_plain(out, layers, n_layers, bits, "identity", error);
}

/* [n_heads, d, d], the same matrix for every head. */
static float *hadamard_heads(int32_t n_heads, int32_t d) {
    size_t cells = (size_t)d * d;
    float *all = aligned_calloc((size_t)n_heads * cells, sizeof *all);
    if (!all) return NULL;
    rotations_hadamard_matrix(d, all);
    for (int32_t h = 1; h < n_heads; h++) memcpy(all + h * cells, all, cells * sizeof *all);
    return all;
}

oscar_status oscar_rotations_hadamard(oscar_rotations **out, const oscar_layer *layers,
                                      int32_t n_layers, int32_t bits, oscar_error *error) {
    oscar_status status = make_plain(out, layers, n_layers, bits, "hadamard", error);
    if (status) return status;
    for (int32_t i = 0; i < n_layers; i++) {
        rotations_layer *l = &(*out)->layers[i];
        l->k_rotation = hadamard_heads(l->shape.n_kv_heads, l->shape.head_dim);
        l->v_rotation = hadamard_heads(l->shape.n_kv_heads, l->shape.head_dim);
        if (!l->k_rotation || !l->v_rotation) {
            oscar_rotations_free(*out);
            *out = NULL;
            return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for the rotations of layer %d", i);
        }
    }
    return OSCAR_OK;
}

oscar_status oscar_rotations_track(oscar_rotations *rotations, int32_t layer, int32_t n_pairs, const int32_t *pairs,
                                   const float *means, oscar_error *error) {
    if (layer < 0 || layer >= rotations->n_layers)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "layer is %d, expected 0 to %d", layer, rotations->n_layers - 1);
    rotations_layer *l = &rotations->layers[layer];
    const int32_t heads = l->shape.n_kv_heads, d = l->shape.head_dim, most = l->shape.rope.n_dims / 2;
    if (rotations->packed || l->n_tracked)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "layer %d has its means already", layer);
    if (n_pairs < 1 || n_pairs > most)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "n_pairs is %d, expected 1 to the %d of layer %d", n_pairs, most, layer);
    rotations_layer made = {.shape = l->shape, .n_tracked = n_pairs};
    made.tracked = aligned_calloc((size_t)heads * (size_t)n_pairs, sizeof *made.tracked);
    made.k_tracked = aligned_calloc((size_t)heads * (size_t)d, sizeof *made.k_tracked);
    oscar_status status = OSCAR_OK;
    if (!made.tracked || !made.k_tracked)
        status = error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for %d pairs of layer %d", n_pairs, layer);
    if (!status) memcpy(made.tracked, pairs, (size_t)heads * (size_t)n_pairs * sizeof *pairs);
    if (!status && check_tracked(&made, layer, error)) status = OSCAR_ERROR_ARGUMENT;
    for (int32_t i = 0; !status && i < heads * n_pairs; i++) {
        const size_t head = (size_t)(i / n_pairs) * (size_t)d;
        const size_t a = head + (size_t)rope_first(&l->shape.rope, pairs[i]), b = head + (size_t)rope_second(&l->shape.rope, pairs[i]);
        made.k_tracked[a] = means[a];
        made.k_tracked[b] = means[b];
    }
    if (!status) status = check_finite("means", made.k_tracked, (size_t)heads * (size_t)d, layer, error);
    if (status) {
        aligned_free(made.tracked), aligned_free(made.k_tracked);
        return status;
    }
    l->n_tracked = n_pairs;
    l->tracked = made.tracked;
    l->k_tracked = made.k_tracked;
    return OSCAR_OK;
}
