/*
 * rotation_file_save.c - writes a rotation file of ours (docs/FORMAT.md).
 *
 * Everything is checked first by the rules that loading applies, so that a file that was written
 * can be read; then the header is laid out, then the arrays follow in the same order.
 */
#include <stdlib.h>

#include "zoo/rotation_file.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "arrays are stored as they lie in memory");

/* Called for every tensor of the file in the order of its bytes: once to write the header, once to
 * write the data. */
typedef struct saver {
    const oscar_rotations *rotations;
    const char *path;
    oscar_error *error;
    byte_buffer header;
    uint64_t data_bytes; /* laid out so far */
    bool is_first;       /* no comma before the next entry */
} saver;

static oscar_status check_all(const saver *s) {
    const oscar_rotations *r = s->rotations;
    if (r->n_layers < 1 || r->n_layers > OSCAR_MAX_LAYERS)
        return error_set(s->error, OSCAR_ERROR_ARGUMENT, -1, "%s: %d layers, expected 1 to %d", s->path,
                         (int)r->n_layers, OSCAR_MAX_LAYERS);
    for (int32_t i = 0; i < r->n_meta; i++) {
        const rotations_meta *meta = &r->meta[i];
        if (rotation_key_reserved(meta->key))
            return error_set(s->error, OSCAR_ERROR_ARGUMENT, -1, "%s: metadata key %s belongs to the format", s->path,
                             meta->key);
        if (!utf8_valid(meta->key, strlen(meta->key)) || !utf8_valid(meta->value, strlen(meta->value)))
            return error_set(s->error, OSCAR_ERROR_ARGUMENT, -1, "%s: metadata %.40s is not UTF-8", s->path, meta->key);
    }
    oscar_status status = OSCAR_OK;
    for (int32_t i = 0; i < r->n_layers && !status; i++) {
        const rotations_layer *layer = &r->layers[i];
        status = rotation_numbers_check(layer, i, s->path, OSCAR_ERROR_ARGUMENT, s->error);
        for (int j = 0; j < ROTATION_N_REALS && !status; j++)
            if (first_not_finite(&(float){rotation_real_get(layer, &rotation_reals[j])}, 1) == 0)
                status = error_set(s->error, OSCAR_ERROR_NOT_FINITE, -1, "%s: layers.%d.%s is NaN or infinite", s->path,
                                   (int)i, rotation_reals[j].name);
    }
    return status ? status : rotation_contents_check(r, s->path, OSCAR_ERROR_ARGUMENT, s->error);
}

/* ------------------------------------------------------------------------------------------------
 * The header
 */

static void put_meta(saver *s, const char *key, const char *value) {
    if (!s->is_first) buffer_put_text(&s->header, ",");
    s->is_first = false;
    json_put_string(&s->header, key);
    buffer_put_text(&s->header, ":");
    json_put_string(&s->header, value);
}

static void put_layer_meta(saver *s, int32_t index) {
    const rotations_layer *layer = &s->rotations->layers[index];
    char key[ROTATION_NAME_BYTES], value[32];
    for (int i = 0; i < ROTATION_N_NUMBERS; i++) {
        rotation_name(key, index, rotation_numbers[i].name);
        snprintf(value, sizeof value, "%d", (int)rotation_number_get(layer, &rotation_numbers[i]));
        put_meta(s, key, value);
    }
    for (int i = 0; i < ROTATION_N_REALS; i++) {
        float real = rotation_real_get(layer, &rotation_reals[i]);
        rotation_name(key, index, rotation_reals[i].name);
        /* Nine digits give a float back exactly. */
        if (!format_real(value, sizeof value, 9, (double)real)) s->header.failed = true;
        put_meta(s, key, value);
    }
}

static void put_tensor(saver *s, int32_t index, const char *name, const char *dtype, int32_t n_dims,
                       const size_t *shape) {
    char full[ROTATION_NAME_BYTES];
    uint64_t bytes = 4; /* F32 and I32 alike */
    rotation_name(full, index, name);
    buffer_put_format(&s->header, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", full, dtype);
    for (int32_t i = 0; i < n_dims; i++) {
        buffer_put_format(&s->header, i ? ",%zu" : "%zu", shape[i]);
        bytes *= shape[i];
    }
    buffer_put_format(&s->header, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)s->data_bytes,
                      (unsigned long long)(s->data_bytes + bytes));
    s->data_bytes += bytes;
}

static void put_layer_tensors(saver *s, int32_t index) {
    const rotations_layer *layer = &s->rotations->layers[index];
    size_t n_heads = (size_t)layer->shape.n_kv_heads, d = (size_t)layer->shape.head_dim;
    size_t n_freq = (size_t)layer->shape.rope.n_dims / 2, n_tracked = (size_t)layer->n_tracked;
    if (n_freq) put_tensor(s, index, "rope_inv_freq", "F32", 1, &n_freq);
    if (n_tracked) put_tensor(s, index, "k_pairs", "I32", 2, (const size_t[]){n_heads, n_tracked});
    for (int i = 0; i < ROTATION_N_FIELDS; i++) {
        const rotation_field *field = &rotation_fields[i];
        if (!*rotation_array(layer, field)) continue;
        size_t floats = rotation_head_file_floats(field, layer->shape.head_dim);
        if (field->shape == ROTATION_SQUARE)
            put_tensor(s, index, field->name, "F32", 3, (const size_t[]){n_heads, d, d});
        else
            put_tensor(s, index, field->name, "F32", 2, (const size_t[]){n_heads, floats});
    }
}

static oscar_status make_header(saver *s) {
    const oscar_rotations *r = s->rotations;
    char value[16];
    buffer_put_text(&s->header, "{\"__metadata__\":{");
    s->is_first = true;
    put_meta(s, "format", ROTATION_FILE_FORMAT);
    snprintf(value, sizeof value, "%d", ROTATION_FILE_VERSION);
    put_meta(s, "format_version", value);
    snprintf(value, sizeof value, "%d", (int)r->n_layers);
    put_meta(s, "n_layers", value);
    for (int32_t i = 0; i < r->n_meta; i++) put_meta(s, r->meta[i].key, r->meta[i].value);
    for (int32_t i = 0; i < r->n_layers; i++) put_layer_meta(s, i);
    buffer_put_text(&s->header, "}");
    for (int32_t i = 0; i < r->n_layers; i++) put_layer_tensors(s, i);
    buffer_put_text(&s->header, "}");
    /* The data starts at a multiple of 8 bytes, so that a mapped file can be used in place. */
    while (s->header.n_bytes % 8 && !s->header.failed) buffer_put_text(&s->header, " ");
    if (s->header.failed) return error_set(s->error, OSCAR_ERROR_MEMORY, -1, "%s: no memory for the header", s->path);
    if (s->header.n_bytes > SAFETENSORS_MAX_HEADER_BYTES)
        return error_set(s->error, OSCAR_ERROR_ARGUMENT, -1, "%s: a header of %zu bytes, at most %u are read back",
                         s->path, s->header.n_bytes, SAFETENSORS_MAX_HEADER_BYTES);
    return OSCAR_OK;
}

/* ------------------------------------------------------------------------------------------------
 * The data, in the order of put_layer_tensors
 */

static void write_lower(atomic_file *file, const float *array, size_t n_heads, size_t d) {
    for (size_t row = 0; row < n_heads * d; row++) atomic_file_write(file, array + row * d, row % d * sizeof(float));
}

static void write_layer(atomic_file *file, const rotations_layer *layer) {
    size_t n_heads = (size_t)layer->shape.n_kv_heads, d = (size_t)layer->shape.head_dim;
    atomic_file_write(file, layer->shape.rope.inv_freq, (size_t)layer->shape.rope.n_dims / 2 * sizeof(float));
    atomic_file_write(file, layer->tracked, n_heads * (size_t)layer->n_tracked * sizeof(int32_t));
    for (int i = 0; i < ROTATION_N_FIELDS; i++) {
        const rotation_field *field = &rotation_fields[i];
        const float *array = *rotation_array(layer, field);
        if (!array) continue;
        if (field->shape == ROTATION_LOWER)
            write_lower(file, array, n_heads, d);
        else
            atomic_file_write(file, array,
                              n_heads * rotation_head_floats(field, layer->shape.head_dim) * sizeof(float));
    }
}

static oscar_status write_file(saver *s) {
    atomic_file file;
    oscar_status status = atomic_file_begin(&file, s->path, s->error);
    if (status) return status;
    uint64_t length = s->header.n_bytes;
    atomic_file_write(&file, &length, sizeof length);
    atomic_file_write(&file, s->header.bytes, s->header.n_bytes);
    for (int32_t i = 0; i < s->rotations->n_layers; i++) write_layer(&file, &s->rotations->layers[i]);
    return atomic_file_commit(&file, s->error);
}

oscar_status oscar_rotations_save(const oscar_rotations *rotations, const char *path, oscar_error *error) {
    if (!rotations || !path) return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "rotations or path is NULL");
    saver s = {.rotations = rotations, .path = path, .error = error};
    oscar_status status = check_all(&s);
    if (status) return status;
    status = make_header(&s);
    if (!status) status = write_file(&s);
    buffer_free(&s.header);
    return status;
}
