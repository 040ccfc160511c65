/*
 * gguf.c - the rotation tensors of a GGUF model, and as much of the header as checking it takes.
 *
 * Tensors blk.{i}.attn_k_rot.weight and attn_v_rot.weight are F32 [d, d] and hold the transpose of
 * the matrix that multiplies row vectors; here that is a matter of strides. All other tensors are
 * checked (known type, inside the file, no overlap, no name twice) and otherwise left alone.
 *
 * The header is read through a window, because vocabularies make it megabytes long and the file
 * holds gigabytes more.
 */
#include <stdlib.h>

#include "zoo/zoo.h"

#define WINDOW_BYTES 65536
#define MAX_KEYS 65536
#define MAX_TENSORS (1 << 20)
#define MAX_NAME_BYTES 127
#define MAX_DIMS 4

/* Value types of the metadata. */
enum {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64,
    GGUF_N_TYPES
};
static const uint8_t value_bytes[GGUF_N_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

/* Tensor types: elements a block, bytes a block; 0 where the number has no type. */
static const struct {
    uint16_t elements, bytes;
} tensor_types[] = {
    [0] = {1, 4},      [1] = {1, 2},      [2] = {32, 18},   [3] = {32, 20},    [6] = {32, 22},    [7] = {32, 24},
    [8] = {32, 34},    [9] = {32, 36},    [10] = {256, 84}, [11] = {256, 110}, [12] = {256, 144}, [13] = {256, 176},
    [14] = {256, 210}, [15] = {256, 292}, [16] = {256, 66}, [17] = {256, 74},  [18] = {256, 98},  [19] = {256, 50},
    [20] = {32, 18},   [21] = {256, 110}, [22] = {256, 82}, [23] = {256, 136}, [24] = {1, 1},     [25] = {1, 2},
    [26] = {1, 4},     [27] = {1, 8},     [28] = {1, 8},    [29] = {256, 56},  [30] = {1, 2},     [34] = {256, 54},
    [35] = {256, 66},  [39] = {32, 17},   [40] = {64, 36},  [41] = {128, 18},  [42] = {64, 18},
};
#define TENSOR_TYPE_F32 0

typedef struct gguf_tensor {
    char *name;
    uint32_t type;
    int32_t n_dims;
    uint64_t dims[MAX_DIMS]; /* the first is contiguous */
    uint64_t offset, bytes;  /* in the data section */
} gguf_tensor;

typedef struct gguf_reader {
    const byte_source *source;
    oscar_error *error;
    oscar_zoo_file *file;
    uint64_t at; /* in the file */
    uint8_t *window;
    uint64_t window_at, window_bytes;
    uint64_t alignment;
    char **keys; /* [n_keys] names of all metadata */
    size_t n_keys, keys_capacity;
    gguf_tensor *tensors;
    size_t n_tensors, tensors_capacity;
} gguf_reader;

static oscar_status fail(gguf_reader *r, const char *field, const char *what) {
    return error_set(r->error, OSCAR_ERROR_FORMAT, (int64_t)r->at, "%s: %s: %s (byte %llu)", r->source->name, field,
                     what, (unsigned long long)r->at);
}
static oscar_status no_memory(gguf_reader *r) {
    return error_set(r->error, OSCAR_ERROR_MEMORY, -1, "%s: no memory for its header", r->source->name);
}

/* ------------------------------------------------------------------------------------------------
 * Bytes
 */

/* n is at most WINDOW_BYTES. */
static oscar_status take(gguf_reader *r, void *out, uint64_t n, const char *what) {
    bool inside = r->at >= r->window_at && r->at - r->window_at <= r->window_bytes;
    if (!inside || n > r->window_bytes - (r->at - r->window_at)) {
        uint64_t left = r->source->size - r->at;
        if (n > left) return source_read(r->source, r->at, n, out, what, r->error); /* says what is missing */
        r->window_at = r->at;
        r->window_bytes = left < WINDOW_BYTES ? left : WINDOW_BYTES;
        oscar_status status = source_read(r->source, r->at, r->window_bytes, r->window, what, r->error);
        if (status) return status;
    }
    memcpy(out, r->window + (r->at - r->window_at), (size_t)n);
    r->at += n;
    return OSCAR_OK;
}

static oscar_status skip(gguf_reader *r, uint64_t n, const char *what) {
    if (n > r->source->size - r->at)
        return error_set(r->error, OSCAR_ERROR_FORMAT, (int64_t)r->at,
                         "%s: truncated: %s needs %llu bytes at offset %llu, the file has %llu", r->source->name, what,
                         (unsigned long long)n, (unsigned long long)r->at, (unsigned long long)r->source->size);
    r->at += n;
    return OSCAR_OK;
}

static oscar_status take_u32(gguf_reader *r, uint32_t *out, const char *what) {
    uint8_t bytes[4] = {0};
    oscar_status status = take(r, bytes, sizeof bytes, what);
    *out = load_u32(bytes);
    return status;
}
static oscar_status take_u64(gguf_reader *r, uint64_t *out, const char *what) {
    uint8_t bytes[8] = {0};
    oscar_status status = take(r, bytes, sizeof bytes, what);
    *out = load_u64(bytes);
    return status;
}

/* A name: not empty, short, without NUL, UTF-8. */
static oscar_status take_name(gguf_reader *r, char **out, const char *what) {
    char name[MAX_NAME_BYTES + 1];
    uint64_t n;
    oscar_status status = take_u64(r, &n, what);
    if (status) return status;
    if (n == 0 || n > MAX_NAME_BYTES) return fail(r, what, "its length is not from 1 to 127");
    status = take(r, name, n, what);
    if (status) return status;
    if (memchr(name, 0, (size_t)n) || !utf8_valid(name, (size_t)n)) return fail(r, what, "not UTF-8 text");
    *out = zoo_copy_text(r->file, name, (size_t)n);
    return *out ? OSCAR_OK : no_memory(r);
}

/* ------------------------------------------------------------------------------------------------
 * Metadata
 */

static oscar_status skip_array(gguf_reader *r, const char *key) {
    uint32_t type;
    uint64_t n, bytes;
    oscar_status status = take_u32(r, &type, key);
    if (!status) status = take_u64(r, &n, key);
    if (status) return status;
    if (type >= GGUF_N_TYPES || type == GGUF_ARRAY) return fail(r, key, "an array of arrays or of an unknown type");
    if (type != GGUF_STRING) {
        if (__builtin_mul_overflow(n, (uint64_t)value_bytes[type], &bytes)) return fail(r, key, "its size overflows");
        return skip(r, bytes, key);
    }
    for (uint64_t i = 0; i < n && !status; i++) {
        status = take_u64(r, &bytes, key);
        if (!status) status = skip(r, bytes, key);
    }
    return status;
}

/* Short texts and whole numbers are kept for listings; longer texts are skipped. */
static oscar_status read_text(gguf_reader *r, const char *key) {
    char text[256];
    uint64_t n;
    oscar_status status = take_u64(r, &n, key);
    if (status || n >= sizeof text) return status ? status : skip(r, n, key);
    status = take(r, text, n, key);
    if (status) return status;
    text[n] = '\0';
    if (!utf8_valid(text, (size_t)n)) return fail(r, key, "not UTF-8 text");
    return zoo_add_meta(r->file, key, text) ? OSCAR_OK : no_memory(r);
}

static oscar_status read_number(gguf_reader *r, const char *key, uint32_t type) {
    uint8_t bytes[8] = {0};
    char text[32];
    oscar_status status = take(r, bytes, value_bytes[type], key);
    uint64_t u = load_u64(bytes);
    bool is_signed = type == GGUF_I8 || type == GGUF_I16 || type == GGUF_I32 || type == GGUF_I64;
    if (status || type == GGUF_F32 || type == GGUF_F64) return status;
    if (type == GGUF_BOOL && u > 1) return fail(r, key, "a bool that is neither 0 nor 1");
    int shift = 64 - 8 * value_bytes[type];
    if (is_signed)
        snprintf(text, sizeof text, "%lld", (long long)((int64_t)(u << shift) >> shift));
    else
        snprintf(text, sizeof text, "%llu", (unsigned long long)u);
    if (!strcmp(key, "general.alignment")) {
        if (type != GGUF_U32 || u == 0 || (u & (u - 1)) || u > WINDOW_BYTES)
            return fail(r, key, "no power of two from 1 to 65536");
        r->alignment = u;
    }
    return zoo_add_meta(r->file, key, text) ? OSCAR_OK : no_memory(r);
}

static oscar_status read_pair(gguf_reader *r) {
    char *key;
    uint32_t type;
    oscar_status status = take_name(r, &key, "a metadata key");
    if (!status) status = take_u32(r, &type, key);
    if (status) return status;
    if (!array_grow((void **)&r->keys, r->n_keys, &r->keys_capacity, sizeof *r->keys)) return no_memory(r);
    r->keys[r->n_keys++] = key;
    if (type >= GGUF_N_TYPES) return fail(r, key, "a value of unknown type");
    if (type == GGUF_ARRAY) return skip_array(r, key);
    return type == GGUF_STRING ? read_text(r, key) : read_number(r, key, type);
}

/* ------------------------------------------------------------------------------------------------
 * Tensors
 */

static oscar_status size_tensor(gguf_reader *r, gguf_tensor *t) {
    if (t->type >= sizeof tensor_types / sizeof *tensor_types || tensor_types[t->type].elements == 0)
        return fail(r, t->name, "a tensor of unknown type");
    uint64_t block = tensor_types[t->type].elements;
    if (t->dims[0] % block) return fail(r, t->name, "its rows are no whole number of blocks");
    t->bytes = tensor_types[t->type].bytes;
    for (int32_t i = 0; i < t->n_dims; i++)
        if (__builtin_mul_overflow(t->bytes, i ? t->dims[i] : t->dims[0] / block, &t->bytes))
            return fail(r, t->name, "its size overflows");
    if (t->offset % r->alignment) return fail(r, t->name, "its offset is not aligned");
    return OSCAR_OK;
}

static oscar_status read_tensor(gguf_reader *r) {
    gguf_tensor t = {.dims = {0}};
    uint32_t n_dims = 0;
    oscar_status status = take_name(r, &t.name, "a tensor name");
    if (!status) status = take_u32(r, &n_dims, t.name);
    if (status) return status;
    if (n_dims < 1 || n_dims > MAX_DIMS) return fail(r, t.name, "its number of dimensions is not from 1 to 4");
    t.n_dims = (int32_t)n_dims;
    for (int32_t i = 0; i < t.n_dims && !status; i++) {
        status = take_u64(r, &t.dims[i], t.name);
        if (!status && t.dims[i] == 0) status = fail(r, t.name, "a dimension is 0");
    }
    if (!status) status = take_u32(r, &t.type, t.name);
    if (!status) status = take_u64(r, &t.offset, t.name);
    if (!status) status = size_tensor(r, &t);
    if (status) return status;
    if (!array_grow((void **)&r->tensors, r->n_tensors, &r->tensors_capacity, sizeof t)) return no_memory(r);
    r->tensors[r->n_tensors++] = t;
    return OSCAR_OK;
}

static int compare_key(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }
static int compare_name(const void *a, const void *b) {
    return strcmp(((const gguf_tensor *)a)->name, ((const gguf_tensor *)b)->name);
}
static int compare_offset(const void *a, const void *b) {
    uint64_t x = ((const gguf_tensor *)a)->offset, y = ((const gguf_tensor *)b)->offset;
    return x < y ? -1 : x > y;
}

static oscar_status check_names(gguf_reader *r) {
    if (r->n_keys) qsort(r->keys, r->n_keys, sizeof *r->keys, compare_key);
    for (size_t i = 1; i < r->n_keys; i++)
        if (!strcmp(r->keys[i - 1], r->keys[i])) return fail(r, r->keys[i], "this key occurs twice");
    if (r->n_tensors) qsort(r->tensors, r->n_tensors, sizeof *r->tensors, compare_name);
    for (size_t i = 1; i < r->n_tensors; i++)
        if (!compare_name(&r->tensors[i - 1], &r->tensors[i]))
            return fail(r, r->tensors[i].name, "this tensor occurs twice");
    return OSCAR_OK;
}

static oscar_status check_places(gguf_reader *r, uint64_t data_at) {
    uint64_t end = 0;
    if (r->n_tensors) qsort(r->tensors, r->n_tensors, sizeof *r->tensors, compare_offset);
    for (size_t i = 0; i < r->n_tensors; i++) {
        const gguf_tensor *t = &r->tensors[i];
        if (data_at > r->source->size || t->offset > r->source->size - data_at ||
            t->bytes > r->source->size - data_at - t->offset)
            return fail(r, t->name, "truncated: its data reaches beyond the file");
        if (t->offset < end) return fail(r, t->name, "its data overlaps another tensor's");
        end = t->offset + t->bytes;
    }
    return OSCAR_OK;
}

/* The layer of a rotation tensor's name, or -1. */
static int32_t rotation_layer(const char *name) {
    if (strncmp(name, "blk.", 4) || name[4] < '0' || name[4] > '9' || (name[4] == '0' && name[5] != '.')) return -1;
    int32_t layer = 0;
    const char *p = name + 4;
    for (; *p >= '0' && *p <= '9' && layer < OSCAR_MAX_LAYERS; p++) layer = layer * 10 + (*p - '0');
    if (layer >= OSCAR_MAX_LAYERS || (strcmp(p, ".attn_k_rot.weight") && strcmp(p, ".attn_v_rot.weight"))) return -1;
    return layer;
}

static oscar_status read_rotation(gguf_reader *r, const gguf_tensor *from, int32_t layer, uint64_t data_at) {
    if (from->type != TENSOR_TYPE_F32 || from->n_dims != 2 || from->dims[0] != from->dims[1] ||
        from->dims[0] > OSCAR_MAX_HEAD_DIM)
        return fail(r, from->name, "not F32 [d, d] with d up to 512");
    uint64_t d = from->dims[0], at = data_at + from->offset;
    uint8_t *data;
    oscar_status status = source_read_alloc(r->source, at, from->bytes, &data, from->name, r->error);
    if (status) return status;
    if (!zoo_own(r->file, data)) return no_memory(r);
    zoo_tensor t = {.name = from->name, .dtype = "F32", .layer = layer, .n_dims = 2, .shape = {d, d}, .stride = {1, d}};
    t.data = (const float *)(const void *)data;
    size_t n = (size_t)(d * d), bad = first_not_finite(t.data, n);
    if (bad < n)
        return error_set(r->error, OSCAR_ERROR_NOT_FINITE, (int64_t)(at + bad * sizeof(float)),
                         "%s: %s: value %zu is NaN or infinite", r->source->name, from->name, bad);
    return zoo_add_tensor(r->file, &t) ? OSCAR_OK : no_memory(r);
}

static oscar_status read_rotations(gguf_reader *r, uint64_t data_at) {
    bool seen[OSCAR_MAX_LAYERS] = {false};
    for (size_t i = 0; i < r->n_tensors; i++) {
        int32_t layer = rotation_layer(r->tensors[i].name);
        if (layer < 0) continue;
        oscar_status status = read_rotation(r, &r->tensors[i], layer, data_at);
        if (status) return status;
        if (!seen[layer]) r->file->n_layers++;
        seen[layer] = true;
    }
    return OSCAR_OK;
}

static oscar_status read_all(gguf_reader *r) {
    uint8_t magic[4];
    uint32_t version;
    uint64_t n_tensors, n_pairs;
    oscar_status status = take(r, magic, sizeof magic, "the magic");
    if (!status) status = take_u32(r, &version, "the version");
    if (!status && memcmp(magic, "GGUF", 4)) status = fail(r, "magic", "not GGUF");
    if (!status && version != 2 && version != 3)
        status = error_set(r->error, OSCAR_ERROR_UNSUPPORTED, 4,
                           "%s: GGUF version: found %u, expected 2 or 3 (little-endian)", r->source->name, version);
    if (!status) status = take_u64(r, &n_tensors, "the number of tensors");
    if (!status) status = take_u64(r, &n_pairs, "the number of keys");
    if (status) return status;
    r->file->version = (int32_t)version;
    if (n_tensors > MAX_TENSORS || n_pairs > MAX_KEYS)
        return fail(r, "header", "more than 1048576 tensors or 65536 keys");
    for (uint64_t i = 0; i < n_pairs && !status; i++) status = read_pair(r);
    for (uint64_t i = 0; i < n_tensors && !status; i++) status = read_tensor(r);
    if (status) return status;
    uint64_t data_at = (r->at + r->alignment - 1) & ~(r->alignment - 1);
    status = check_names(r);
    if (!status) status = check_places(r, data_at);
    return status ? status : read_rotations(r, data_at);
}

oscar_status zoo_gguf_read(oscar_zoo_file **out, const byte_source *source, oscar_error *error) {
    *out = NULL;
    gguf_reader r = {.source = source, .error = error, .alignment = 32};
    r.file = calloc(1, sizeof *r.file);
    r.window = malloc(WINDOW_BYTES);
    oscar_status status = r.file && r.window ? OSCAR_OK : no_memory(&r);
    if (!status) {
        r.file->format = OSCAR_ZOO_GGUF;
        status = read_all(&r);
    }
    free(r.window);
    free(r.keys);
    free(r.tensors);
    if (status)
        oscar_zoo_free(r.file);
    else
        *out = r.file;
    return status;
}
