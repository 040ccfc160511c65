/*
 * rotation_file_load.c - reads a rotation file of ours (docs/FORMAT.md).
 *
 * The order matters: geometry from the metadata first, then every tensor's shape against it, and
 * only then memory, which is therefore never more than a few times the file's size.
 */
#include <locale.h>
#include <stdlib.h>

#include "zoo/rotation_file.h"

typedef struct loader {
    const byte_source *source;
    oscar_error *error;
    st_table table;
    uint8_t *used_tensors; /* [table.n_tensors] */
    uint8_t *used_meta;    /* [table.n_meta] */
    locale_t locale;       /* "C": strtof_l with a decimal point */
    oscar_rotations *rotations;
} loader;

static oscar_status key_fail(loader *l, const char *key, const char *found, const char *expected) {
    return error_set(l->error, OSCAR_ERROR_FORMAT, -1, "%s: metadata %s: found %.60s, expected %s", l->source->name,
                     key, found ? found : "none", expected);
}

static const char *take_meta(loader *l, const char *key) {
    for (int32_t low = 0, high = l->table.n_meta; low < high;) {
        int32_t middle = low + (high - low) / 2;
        int order = strcmp(key, l->table.meta[middle].key);
        if (order == 0) {
            l->used_meta[middle] = 1;
            return l->table.meta[middle].value;
        }
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

/* Decimal digits alone: no sign, no space, no leading zero. */
static bool parse_int(const char *text, int32_t least, int32_t most, int32_t *out) {
    if (!text || !*text || strlen(text) > 10 || (text[0] == '0' && text[1])) return false;
    int64_t value = 0;
    for (; *text; text++) {
        if (*text < '0' || *text > '9') return false;
        value = value * 10 + (*text - '0');
    }
    if (value < least || value > most) return false;
    *out = (int32_t)value;
    return true;
}

static oscar_status take_int(loader *l, const char *key, int32_t least, int32_t most, int32_t *out) {
    const char *text = take_meta(l, key);
    if (parse_int(text, least, most, out)) return OSCAR_OK;
    char expected[64];
    snprintf(expected, sizeof expected, "a whole number %d to %d", (int)least, (int)most);
    return key_fail(l, key, text, expected);
}

static oscar_status take_real(loader *l, const char *key, float *out) {
    const char *text = take_meta(l, key);
    size_t length = text ? strlen(text) : 0;
    /* The character set rules out what strtof takes besides numbers: spaces, hex, inf, nan. */
    if (length == 0 || length > 40 || strspn(text, "0123456789+-.eE") != length)
        return key_fail(l, key, text, "a decimal number");
    char *end;
    *out = strtof_l(text, &end, l->locale);
    if (*end) return key_fail(l, key, text, "a decimal number");
    if (first_not_finite(out, 1) == 0)
        return error_set(l->error, OSCAR_ERROR_NOT_FINITE, -1, "%s: metadata %s: found %.60s, expected a float32",
                         l->source->name, key, text);
    return OSCAR_OK;
}

/* The tensor by name; *out is NULL when it is absent. A present one must have this dtype and
 * shape, where a dimension of 0 stands for any. */
static oscar_status take_tensor(loader *l, const char *name, const char *dtype, int32_t n_dims, const uint64_t *shape,
                                const st_tensor **out) {
    const st_tensor *t = *out = st_table_find(&l->table, name);
    if (!t) return OSCAR_OK;
    l->used_tensors[t - l->table.tensors] = 1;
    bool same = !strcmp(t->dtype, dtype) && t->n_dims == n_dims;
    char found[100] = "", expected[100] = "";
    size_t f = 0, e = 0;
    for (int32_t i = 0; i < t->n_dims && f < 80; i++)
        f += (size_t)snprintf(found + f, sizeof found - f, "%s%llu", i ? "," : "", (unsigned long long)t->shape[i]);
    for (int32_t i = 0; i < n_dims; i++) {
        if (same && shape[i] && t->shape[i] != shape[i]) same = false;
        e += shape[i] ? (size_t)snprintf(expected + e, sizeof expected - e, "%s%llu", i ? "," : "",
                                         (unsigned long long)shape[i])
                      : (size_t)snprintf(expected + e, sizeof expected - e, "%sn", i ? "," : "");
    }
    if (same) return OSCAR_OK;
    return error_set(l->error, OSCAR_ERROR_FORMAT, (int64_t)t->entry_offset,
                     "%s: tensor %s: found %.8s [%s], expected %s [%s]", l->source->name, name, t->dtype, found, dtype,
                     expected);
}

static oscar_status no_memory(loader *l, const char *name) {
    return error_set(l->error, OSCAR_ERROR_MEMORY, -1, "%s: no memory for %s", l->source->name, name);
}

static oscar_status read_floats(loader *l, const st_tensor *t, float *out) {
    size_t n = (size_t)(t->end - t->begin) / sizeof(float);
    oscar_status status = source_read(l->source, t->begin, n * sizeof(float), out, t->name, l->error);
    if (status) return status;
    size_t bad = first_not_finite(out, n);
    if (bad == n) return OSCAR_OK;
    return error_set(l->error, OSCAR_ERROR_NOT_FINITE, (int64_t)(t->begin + bad * sizeof(float)),
                     "%s: tensor %s: value %zu is NaN or infinite", l->source->name, t->name, bad);
}

/* Packed rows of one head [d (d - 1) / 2], which lie at the end of its [d, d], into their places.
 * Row by row from the top, a row's place never reaches into packed rows that are still unread:
 * row i ends at i d + i, and what follows packed row i starts d (d + 1) / 2 + i (i + 1) / 2. */
static void unpack_lower(float *matrix, size_t d) {
    const float *packed = matrix + d * d - d * (d - 1) / 2;
    for (size_t i = 0; i < d; i++) {
        float *row = matrix + i * d;
        memmove(row, packed, i * sizeof *row);
        packed += i;
        row[i] = 1.0f;
    }
    for (size_t i = 0; i < d; i++) memset(matrix + i * d + i + 1, 0, (d - i - 1) * sizeof *matrix);
}

static oscar_status load_array(loader *l, int32_t index, const rotation_field *field) {
    rotations_layer *layer = &l->rotations->layers[index];
    uint64_t n_heads = (uint64_t)layer->shape.n_kv_heads, d = (uint64_t)layer->shape.head_dim;
    size_t head_floats = rotation_head_floats(field, layer->shape.head_dim);
    size_t head_file_floats = rotation_head_file_floats(field, layer->shape.head_dim);
    const uint64_t square[3] = {n_heads, d, d}, flat[2] = {n_heads, head_file_floats};
    char name[ROTATION_NAME_BYTES];
    rotation_name(name, index, field->name);
    bool is_square = field->shape == ROTATION_SQUARE;
    const st_tensor *t;
    oscar_status status = take_tensor(l, name, "F32", is_square ? 3 : 2, is_square ? square : flat, &t);
    if (status || !t) return status;
    float *array = aligned_calloc((size_t)n_heads * head_floats, sizeof(float));
    if (!array) return no_memory(l, name);
    *rotation_array(layer, field) = array;
    if (field->shape != ROTATION_LOWER) return read_floats(l, t, array);
    for (size_t h = 0; h < n_heads; h++) {
        st_tensor part = *t;
        part.begin = t->begin + h * head_file_floats * sizeof(float);
        part.end = part.begin + head_file_floats * sizeof(float);
        float *head = array + h * head_floats;
        status = read_floats(l, &part, head + head_floats - head_file_floats);
        if (status) return status;
        unpack_lower(head, (size_t)d);
    }
    return OSCAR_OK;
}

static oscar_status load_pairs(loader *l, int32_t index) {
    rotations_layer *layer = &l->rotations->layers[index];
    const uint64_t shape[2] = {(uint64_t)layer->shape.n_kv_heads, 0};
    char name[ROTATION_NAME_BYTES];
    rotation_name(name, index, "k_pairs");
    const st_tensor *t;
    oscar_status status = take_tensor(l, name, "I32", 2, shape, &t);
    if (status || !t) return status;
    if (t->shape[1] == 0 || t->shape[1] > (uint64_t)layer->shape.rope.n_dims / 2)
        return error_set(l->error, OSCAR_ERROR_FORMAT, (int64_t)t->entry_offset,
                         "%s: tensor %s: found %llu pairs a head, expected 1 to %d", l->source->name, name,
                         (unsigned long long)t->shape[1], (int)layer->shape.rope.n_dims / 2);
    size_t n = (size_t)(t->shape[0] * t->shape[1]);
    layer->tracked = aligned_calloc(n, sizeof(int32_t));
    if (!layer->tracked) return no_memory(l, name);
    layer->n_tracked = (int32_t)t->shape[1];
    return source_read(l->source, t->begin, n * sizeof(int32_t), layer->tracked, name, l->error);
}

static oscar_status load_inv_freq(loader *l, int32_t index) {
    oscar_rope *rope = &l->rotations->layers[index].shape.rope;
    const uint64_t shape[1] = {(uint64_t)rope->n_dims / 2};
    char name[ROTATION_NAME_BYTES];
    rotation_name(name, index, "rope_inv_freq");
    const st_tensor *t = NULL;
    if (rope->n_dims == 0) return OSCAR_OK;
    oscar_status status = take_tensor(l, name, "F32", 1, shape, &t);
    if (status) return status;
    if (!t)
        return error_set(l->error, OSCAR_ERROR_FORMAT, -1, "%s: tensor %s: found none, expected F32 [%llu]",
                         l->source->name, name, (unsigned long long)shape[0]);
    return read_floats(l, t, rope->inv_freq);
}

static oscar_status load_numbers(loader *l, int32_t index, rotations_layer *layer) {
    char key[ROTATION_NAME_BYTES];
    oscar_status status = OSCAR_OK;
    for (int i = 0; i < ROTATION_N_NUMBERS && !status; i++) {
        const rotation_number *number = &rotation_numbers[i];
        int32_t value = 0;
        rotation_name(key, index, number->name);
        status = take_int(l, key, number->least, number->most, &value);
        char *member = (char *)layer + number->member;
        if (number->is_bool)
            *(bool *)member = value != 0;
        else
            memcpy(member, &value, sizeof value);
    }
    for (int i = 0; i < ROTATION_N_REALS && !status; i++) {
        float value = 0;
        rotation_name(key, index, rotation_reals[i].name);
        status = take_real(l, key, &value);
        memcpy((char *)layer + rotation_reals[i].member, &value, sizeof value);
    }
    return status;
}

static oscar_status load_layer(loader *l, int32_t index) {
    rotations_layer *layer = &l->rotations->layers[index];
    oscar_status status = load_numbers(l, index, layer);
    if (!status) status = rotation_numbers_check(layer, index, l->source->name, OSCAR_ERROR_FORMAT, l->error);
    if (!status) status = load_inv_freq(l, index);
    if (!status) status = load_pairs(l, index);
    for (int i = 0; i < ROTATION_N_FIELDS && !status; i++) status = load_array(l, index, &rotation_fields[i]);
    return status;
}

/* A rotation file, and of a version that this code knows. */
static oscar_status check_version(loader *l) {
    const char *format = take_meta(l, "format");
    if (!format || strcmp(format, ROTATION_FILE_FORMAT)) return key_fail(l, "format", format, ROTATION_FILE_FORMAT);
    int32_t version;
    oscar_status status = take_int(l, "format_version", 1, INT32_MAX, &version);
    if (!status && version > ROTATION_FILE_VERSION)
        status = error_set(l->error, OSCAR_ERROR_UNSUPPORTED, -1,
                           "%s: metadata format_version: found %d, this build reads up to %d", l->source->name,
                           (int)version, ROTATION_FILE_VERSION);
    return status;
}

/* What is left over is either the user's metadata or a mistake. */
static oscar_status load_rest(loader *l) {
    for (int32_t i = 0; i < l->table.n_tensors; i++)
        if (!l->used_tensors[i])
            return error_set(l->error, OSCAR_ERROR_FORMAT, (int64_t)l->table.tensors[i].entry_offset,
                             "%s: tensor %s: not a tensor of this format, or of a layer beyond n_layers",
                             l->source->name, l->table.tensors[i].name);
    for (int32_t i = 0; i < l->table.n_meta; i++) {
        const st_meta *meta = &l->table.meta[i];
        if (l->used_meta[i]) continue;
        if (rotation_key_reserved(meta->key)) return key_fail(l, meta->key, "it", "no such key");
        if (!rotations_set_meta(l->rotations, meta->key, meta->value)) return no_memory(l, "metadata");
    }
    return OSCAR_OK;
}

static oscar_status load_all(loader *l) {
    l->used_tensors = calloc((size_t)l->table.n_tensors + 1, 1);
    l->used_meta = calloc((size_t)l->table.n_meta + 1, 1);
    if (!l->used_tensors || !l->used_meta) return no_memory(l, "its header");
    oscar_status status = check_version(l);
    int32_t n_layers = 0;
    if (!status) status = take_int(l, "n_layers", 1, OSCAR_MAX_LAYERS, &n_layers);
    if (status) return status;
    oscar_layer *blank = calloc((size_t)n_layers, sizeof *blank);
    if (blank) l->rotations = rotations_new(blank, n_layers);
    free(blank);
    if (!l->rotations) return no_memory(l, "its layers");
    for (int32_t i = 0; i < n_layers && !status; i++) status = load_layer(l, i);
    if (!status) status = load_rest(l);
    if (!status) status = rotation_contents_check(l->rotations, l->source->name, OSCAR_ERROR_FORMAT, l->error);
    return status;
}

static size_t array_bytes(const rotations_layer *layer, const rotation_field *field) {
    if (!*rotation_array(layer, field)) return 0;
    return (size_t)layer->shape.n_kv_heads * rotation_head_floats(field, layer->shape.head_dim) * sizeof(float);
}

/* Moves all arrays into large pages, layer after layer: a decoded token reads them once each, and with small pages
 * it would wait for page tables. Without memory for it they stay where they are. */
static void pack_arrays(oscar_rotations *rotations) {
    size_t bytes = 0;
    for (int32_t i = 0; i < rotations->n_layers; i++)
        for (int f = 0; f < ROTATION_N_FIELDS; f++) bytes += ALIGN64(array_bytes(&rotations->layers[i], &rotation_fields[f]));
    uint8_t *to = region_reserve(bytes);
    if (!to) return;
    region_prefer_large(to, bytes);
    rotations->packed = to;
    rotations->packed_bytes = bytes;
    for (int32_t i = 0; i < rotations->n_layers; i++)
        for (int f = 0; f < ROTATION_N_FIELDS; f++) {
            float **array = rotation_array(&rotations->layers[i], &rotation_fields[f]);
            const size_t n = array_bytes(&rotations->layers[i], &rotation_fields[f]);
            if (n == 0) continue;
            memcpy(to, *array, n);
            aligned_free(*array);
            *array = (float *)(void *)to;
            to += ALIGN64(n);
        }
}

oscar_status rotation_file_read(oscar_rotations **out, const byte_source *source, oscar_error *error) {
    loader l = {.source = source, .error = error};
    *out = NULL;
    oscar_status status = st_table_read(&l.table, source, error);
    if (status) return status;
    l.locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    status = l.locale ? load_all(&l) : no_memory(&l, "a locale");
    if (l.locale) freelocale(l.locale);
    free(l.used_tensors);
    free(l.used_meta);
    st_table_free(&l.table);
    if (status)
        oscar_rotations_free(l.rotations);
    else
        pack_arrays(*out = l.rotations);
    return status;
}

oscar_status oscar_rotations_load(oscar_rotations **out, const char *path, oscar_error *error) {
    if (!out) return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "out is NULL");
    *out = NULL;
    byte_source source;
    oscar_status status = source_open(&source, path, error);
    if (status) return status;
    status = rotation_file_read(out, &source, error);
    source_close(&source);
    return status;
}
