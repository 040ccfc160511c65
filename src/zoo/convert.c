/*
 * convert.c - from the published formats to rotations.
 */
#include <math.h>
#include <stdlib.h>

#include "zoo/zoo.h"

/* The clips of the published recipe. */
#define ZOO_CLIP_K 0.96f
#define ZOO_CLIP_V 0.92f
/* What rotations_check accepts as orthogonal. */
#define ORTHOGONAL_TOLERANCE 1e-3

typedef struct converter {
    const oscar_zoo_file *file;
    int32_t side; /* oscar_zoo_side */
    oscar_error *error;
} converter;

static oscar_status mismatch(const converter *c, int32_t layer, const char *found, const char *expected) {
    return error_set(c->error, OSCAR_ERROR_MISMATCH, -1, "%s rotation of layer %d: found %s, expected %s",
                     c->side == OSCAR_ZOO_KEY ? "key" : "value", (int)layer, found, expected);
}

/* A shared tensor has n_rest dimensions of size d each; one per head has n_kv_heads in front. */
static oscar_status check_shape(const converter *c, const zoo_tensor *t, int32_t layer, const oscar_layer *shape,
                                int32_t n_rest, bool *per_head) {
    *per_head = t->n_dims == n_rest + 1;
    bool same = *per_head ? t->shape[0] == (uint64_t)shape->n_kv_heads : t->n_dims == n_rest;
    for (int32_t i = 0; i < n_rest && same; i++) same = t->shape[t->n_dims - n_rest + i] == (uint64_t)shape->head_dim;
    if (same) return OSCAR_OK;
    char found[128] = "no dimension", expected[96];
    size_t n = 0;
    for (int32_t i = 0; i < t->n_dims && n < sizeof found; i++)
        n += (size_t)snprintf(found + n, sizeof found - n, "%s%llu%s", i ? "," : "[", (unsigned long long)t->shape[i],
                              i + 1 == t->n_dims ? "]" : "");
    int d = (int)shape->head_dim, h = (int)shape->n_kv_heads;
    if (n_rest == 2)
        snprintf(expected, sizeof expected, "[%d,%d] or [%d,%d,%d]", d, d, h, d, d);
    else
        snprintf(expected, sizeof expected, "[%d] or [%d,%d]", d, h, d);
    return mismatch(c, layer, found, expected);
}

/* A tensor of `floats` a head into fresh memory [n_kv_heads, floats]; a shared one is repeated. */
static oscar_status copy_heads(const converter *c, const zoo_tensor *t, const oscar_layer *shape, size_t floats,
                               bool per_head, float **out) {
    float *array = aligned_calloc((size_t)shape->n_kv_heads * floats, sizeof(float));
    if (!array) return error_set(c->error, OSCAR_ERROR_MEMORY, -1, "no memory for rotations");
    zoo_gather(t, array);
    for (int32_t h = 1; h < shape->n_kv_heads && !per_head; h++)
        memcpy(array + (size_t)h * floats, array, floats * sizeof(float));
    *out = array;
    return OSCAR_OK;
}

static bool is_orthogonal(const float *matrix, size_t d) {
    for (size_t i = 0; i < d; i++)
        for (size_t j = 0; j <= i; j++) {
            double dot = 0;
            for (size_t k = 0; k < d; k++) dot += (double)matrix[i * d + k] * matrix[j * d + k];
            if (fabs(dot - (i == j)) > ORTHOGONAL_TOLERANCE) return false;
        }
    return true;
}

/* q_rotation and o_rotation undo a map that need not be orthogonal. With an orthogonal one they are
 * the rotation itself and its transpose, and nothing is lost by leaving them out. */
static oscar_status check_companions(const converter *c, int32_t layer, const oscar_layer *shape,
                                     const float *rotation) {
    if (!zoo_find(c->file, layer, ".q_rotation") && !zoo_find(c->file, layer, ".o_rotation")) return OSCAR_OK;
    size_t d = (size_t)shape->head_dim;
    for (int32_t h = 0; h < shape->n_kv_heads; h++)
        if (!is_orthogonal(rotation + (size_t)h * d * d, d))
            return error_set(c->error, OSCAR_ERROR_UNSUPPORTED, -1,
                             "%s rotation of layer %d: not orthogonal (undone by q_rotation or o_rotation)",
                             c->side == OSCAR_ZOO_KEY ? "key" : "value", (int)layer);
    return OSCAR_OK;
}

static oscar_status convert_layer(const converter *c, rotations_layer *layer, int32_t index) {
    bool is_key = c->side == OSCAR_ZOO_KEY, is_gguf = c->file->format == OSCAR_ZOO_GGUF;
    const char *suffix = !is_gguf ? ".rotation" : is_key ? ".attn_k_rot.weight" : ".attn_v_rot.weight";
    const oscar_layer *shape = &layer->shape;
    size_t d = (size_t)shape->head_dim;
    float **rotation = is_key ? &layer->k_rotation : &layer->v_rotation;
    const zoo_tensor *t = zoo_find(c->file, index, suffix), *mean = NULL;
    bool per_head;
    if (!t) return mismatch(c, index, "none", "one for every layer of the model");
    oscar_status status = check_shape(c, t, index, shape, 2, &per_head);
    if (!status) status = copy_heads(c, t, shape, d * d, per_head, rotation);
    if (!status && !is_gguf) status = check_companions(c, index, shape, *rotation);
    if (is_key && !is_gguf) mean = zoo_find(c->file, index, ".k_mean");
    if (status || !mean) return status;
    status = check_shape(c, mean, index, shape, 1, &per_head);
    return status ? status : copy_heads(c, mean, shape, d, per_head, &layer->k_mean);
}

static oscar_status convert_side(const converter *c, oscar_rotations *r) {
    if (!c->file) return OSCAR_OK;
    if (c->file->format == OSCAR_ZOO_SAFETENSORS)
        return error_set(c->error, OSCAR_ERROR_UNSUPPORTED, -1, "a safetensors file: oscar_rotations_load reads those");
    char found[32], expected[32];
    oscar_status status = OSCAR_OK;
    for (int32_t i = 0; i < r->n_layers && !status; i++) status = convert_layer(c, &r->layers[i], i);
    if (!status && c->file->n_layers > r->n_layers) {
        snprintf(found, sizeof found, "%d layers", (int)c->file->n_layers);
        snprintf(expected, sizeof expected, "%d", (int)r->n_layers);
        status = mismatch(c, r->n_layers, found, expected);
    }
    for (int32_t i = 0; i < c->file->n_meta && !status; i++) {
        char key[160];
        snprintf(key, sizeof key, "%s.%s", c->side == OSCAR_ZOO_KEY ? "k" : "v", c->file->meta[i].key);
        if (!rotations_set_meta(r, key, c->file->meta[i].value))
            status = error_set(c->error, OSCAR_ERROR_MEMORY, -1, "no memory for metadata");
    }
    return status;
}

oscar_status oscar_zoo_to_rotations(oscar_rotations **out, const oscar_zoo_file *k, const oscar_zoo_file *v,
                                    const oscar_layer *layers, int32_t n_layers, oscar_error *error) {
    if (!out) return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "out is NULL");
    *out = NULL;
    if (!layers || n_layers < 1 || n_layers > OSCAR_MAX_LAYERS)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "n_layers: found %d, expected 1 to %d", (int)n_layers,
                         OSCAR_MAX_LAYERS);
    for (int32_t i = 0; i < n_layers; i++)
        if (layers[i].n_kv_heads < 1 || layers[i].head_dim < 16 || layers[i].head_dim > OSCAR_MAX_HEAD_DIM)
            return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "layer %d: n_kv_heads %d or head_dim %d is out of range",
                             (int)i, (int)layers[i].n_kv_heads, (int)layers[i].head_dim);
    oscar_rotations *r = rotations_new(layers, n_layers);
    if (!r) return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for rotations");
    for (int32_t i = 0; i < n_layers; i++) {
        r->layers[i].recipe = OSCAR_RECIPE_ZOO;
        r->layers[i].clip_k = ZOO_CLIP_K;
        r->layers[i].clip_v = ZOO_CLIP_V;
    }
    oscar_status status = convert_side(&(converter){k, OSCAR_ZOO_KEY, error}, r);
    if (!status) status = convert_side(&(converter){v, OSCAR_ZOO_VALUE, error}, r);
    if (!status && !rotations_set_meta(r, "recipe", "zoo"))
        status = error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for metadata");
    if (!status) status = rotations_check(r, error);
    if (status)
        oscar_rotations_free(r);
    else
        *out = r;
    return status;
}
