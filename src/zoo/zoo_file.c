/*
 * zoo_file.c - opened files of any format: ownership, listing, and telling the formats apart.
 */
#include <stdlib.h>

#include "zoo/rotation_file.h"

_Static_assert(SAFETENSORS_MAX_DIMS == OSCAR_ZOO_MAX_DIMS, "shapes are copied between the two");

bool zoo_own(oscar_zoo_file *file, void *memory) {
    if (!array_grow((void **)&file->owned, file->n_owned, &file->owned_capacity, sizeof *file->owned)) {
        free(memory);
        return false;
    }
    file->owned[file->n_owned++] = memory;
    return true;
}

char *zoo_copy_text(oscar_zoo_file *file, const char *text, size_t n_bytes) {
    char *copy = malloc(n_bytes + 1);
    if (!copy) return NULL;
    memcpy(copy, text, n_bytes);
    copy[n_bytes] = '\0';
    return zoo_own(file, copy) ? copy : NULL;
}

bool zoo_add_tensor(oscar_zoo_file *file, const zoo_tensor *tensor) {
    if (!array_grow((void **)&file->tensors, (size_t)file->n_tensors, &file->tensors_capacity, sizeof *tensor))
        return false;
    file->tensors[file->n_tensors++] = *tensor;
    return true;
}

bool zoo_add_meta(oscar_zoo_file *file, const char *key, const char *value) {
    st_meta meta = {zoo_copy_text(file, key, strlen(key)), zoo_copy_text(file, value, strlen(value))};
    if (!meta.key || !meta.value) return false;
    if (!array_grow((void **)&file->meta, (size_t)file->n_meta, &file->meta_capacity, sizeof meta)) return false;
    file->meta[file->n_meta++] = meta;
    return true;
}

const zoo_tensor *zoo_find(const oscar_zoo_file *file, int32_t layer, const char *suffix) {
    size_t n_suffix = strlen(suffix);
    for (int32_t i = 0; i < file->n_tensors; i++) {
        const zoo_tensor *t = &file->tensors[i];
        size_t n = strlen(t->name);
        if (t->layer == layer && n >= n_suffix && !strcmp(t->name + n - n_suffix, suffix)) return t;
    }
    return NULL;
}

/* Offset of row `row` when all dimensions but the last are counted through. */
static uint64_t row_offset(const zoo_tensor *t, uint64_t row) {
    uint64_t offset = 0;
    for (int32_t i = t->n_dims - 1; i-- > 0;) {
        offset += row % t->shape[i] * t->stride[i];
        row /= t->shape[i];
    }
    return offset;
}

void zoo_gather(const zoo_tensor *tensor, float *out) {
    /* A tensor without dimensions is one number. */
    uint64_t n_rows = 1, length = 1, stride = 0;
    for (int32_t i = 0; i + 1 < tensor->n_dims; i++) n_rows *= tensor->shape[i];
    if (tensor->n_dims) {
        length = tensor->shape[tensor->n_dims - 1];
        stride = tensor->stride[tensor->n_dims - 1];
    }
    for (uint64_t row = 0; row < n_rows; row++) {
        const float *from = tensor->data + row_offset(tensor, row);
        for (uint64_t i = 0; i < length; i++) out[row * length + i] = from[i * stride];
    }
}

/* ------------------------------------------------------------------------------------------------
 * safetensors files are listed; oscar_rotations_load reads ours
 */

/* The layer of "layers.{i}.rest", or -1. */
static int32_t layer_of_name(const char *name) {
    if (strncmp(name, "layers.", 7)) return -1;
    int32_t layer = 0;
    const char *p = name + 7;
    for (; *p >= '0' && *p <= '9' && layer < OSCAR_MAX_LAYERS; p++) layer = layer * 10 + (*p - '0');
    return *p == '.' && p > name + 7 && layer < OSCAR_MAX_LAYERS ? layer : -1;
}

static bool list_tensors(oscar_zoo_file *file) {
    bool seen[OSCAR_MAX_LAYERS] = {false};
    for (int32_t i = 0; i < file->table.n_tensors; i++) {
        const st_tensor *from = &file->table.tensors[i];
        zoo_tensor t = {.name = from->name, .dtype = from->dtype, .n_dims = from->n_dims};
        memcpy(t.shape, from->shape, sizeof from->shape);
        t.layer = layer_of_name(t.name);
        if (t.layer >= 0 && !seen[t.layer] && strstr(t.name, "_rotation")) {
            seen[t.layer] = true;
            file->n_layers++;
        }
        if (!zoo_add_tensor(file, &t)) return false;
    }
    for (int32_t i = 0; i < file->table.n_meta; i++)
        if (!zoo_add_meta(file, file->table.meta[i].key, file->table.meta[i].value)) return false;
    return true;
}

oscar_status zoo_safetensors_read(oscar_zoo_file **out, const byte_source *source, oscar_error *error) {
    *out = NULL;
    oscar_zoo_file *file = calloc(1, sizeof *file);
    if (!file) return error_set(error, OSCAR_ERROR_MEMORY, -1, "%s: no memory", source->name);
    file->format = OSCAR_ZOO_SAFETENSORS;
    oscar_status status = st_table_read(&file->table, source, error);
    if (!status && !list_tensors(file))
        status = error_set(error, OSCAR_ERROR_MEMORY, -1, "%s: no memory for its list", source->name);
    const char *format = status ? NULL : st_table_meta(&file->table, "format");
    const char *version = status ? NULL : st_table_meta(&file->table, "format_version");
    if (format && version && !strcmp(format, ROTATION_FILE_FORMAT)) file->version = (int32_t)strtol(version, NULL, 10);
    if (status)
        oscar_zoo_free(file);
    else
        *out = file;
    return status;
}

/* ------------------------------------------------------------------------------------------------
 * Public
 */

oscar_status oscar_zoo_open(oscar_zoo_file **out, const char *path, oscar_error *error) {
    if (!out) return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "out is NULL");
    *out = NULL;
    byte_source source;
    oscar_status status = source_open(&source, path, error);
    if (status) return status;
    uint8_t head[4];
    status = source_read(&source, 0, sizeof head, head, "the first bytes", error);
    if (!status) {
        if (!memcmp(head, "GGUF", 4))
            status = zoo_gguf_read(out, &source, error);
        else if (!memcmp(head, "PK\003\004", 4))
            status = zoo_pt_read(out, &source, error);
        else
            status = zoo_safetensors_read(out, &source, error);
    }
    source_close(&source);
    return status;
}

void oscar_zoo_free(oscar_zoo_file *file) {
    if (!file) return;
    for (size_t i = 0; i < file->n_owned; i++) free(file->owned[i]);
    free(file->owned);
    free(file->tensors);
    free(file->meta);
    st_table_free(&file->table);
    free(file);
}

int32_t oscar_zoo_get_format(const oscar_zoo_file *file) { return file->format; }
int32_t oscar_zoo_get_version(const oscar_zoo_file *file) { return file->version; }
int32_t oscar_zoo_n_layers(const oscar_zoo_file *file) { return file->n_layers; }
int32_t oscar_zoo_n_tensors(const oscar_zoo_file *file) { return file->n_tensors; }
int32_t oscar_zoo_n_metadata(const oscar_zoo_file *file) { return file->n_meta; }

oscar_status oscar_zoo_get_tensor(const oscar_zoo_file *file, int32_t index, oscar_zoo_tensor *out) {
    if (index < 0 || index >= file->n_tensors) return OSCAR_ERROR_ARGUMENT;
    const zoo_tensor *t = &file->tensors[index];
    *out = (oscar_zoo_tensor){.name = t->name, .dtype = t->dtype, .n_dims = t->n_dims};
    memcpy(out->shape, t->shape, sizeof out->shape);
    return OSCAR_OK;
}

const char *oscar_zoo_metadata_key(const oscar_zoo_file *file, int32_t index) {
    return index < 0 || index >= file->n_meta ? NULL : file->meta[index].key;
}
const char *oscar_zoo_metadata_value(const oscar_zoo_file *file, int32_t index) {
    return index < 0 || index >= file->n_meta ? NULL : file->meta[index].value;
}
