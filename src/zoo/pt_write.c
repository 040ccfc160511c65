/*
 * pt_write.c - writes one side of rotations as a RotationZoo file that torch.load reads.
 *
 * The archive is what torch.save would make: stored entries under one folder, data aligned to 64
 * bytes by padding in the extra field, the pickle of protocol 2 with one storage for each tensor.
 */
#include <errno.h>
#include <stdlib.h>

#include "zoo/pt.h"

#define DATA_ALIGNMENT 64
#define UTF8_NAMES 0x0800 /* zip flag */

typedef struct pt_writer {
    const oscar_rotations *rotations;
    int32_t side; /* oscar_zoo_side */
    oscar_error *error;
    atomic_file file;
    uint64_t at;           /* bytes written so far */
    byte_buffer directory; /* central directory records so far */
    int32_t n_entries;
    byte_buffer pickle;
    int32_t n_storages;
} pt_writer;

/* ------------------------------------------------------------------------------------------------
 * Zip
 */

static void put_u16(byte_buffer *b, uint32_t v) { buffer_put(b, (const uint8_t[]){(uint8_t)v, (uint8_t)(v >> 8)}, 2); }
static void put_u32(byte_buffer *b, uint32_t v) {
    put_u16(b, v & 0xffff);
    put_u16(b, v >> 16);
}

static void write_buffer(pt_writer *w, byte_buffer *b) {
    if (b->failed && !w->file.failure) w->file.failure = ENOMEM;
    atomic_file_write(&w->file, b->bytes, b->n_bytes);
    w->at += b->n_bytes;
}

/* The fields that a local header and a directory record share, from the flags to the sizes. */
static void put_common(byte_buffer *b, uint32_t crc, size_t n_bytes) {
    put_u16(b, UTF8_NAMES);
    put_u16(b, 0);          /* stored */
    put_u32(b, 0x00210000); /* 1980-01-01: the same input gives the same file */
    put_u32(b, crc);
    put_u32(b, (uint32_t)n_bytes);
    put_u32(b, (uint32_t)n_bytes);
}

static void write_entry(pt_writer *w, const char *name, const void *bytes, size_t n_bytes) {
    static const uint8_t padding[DATA_ALIGNMENT] = {0};
    uint32_t crc = crc32_update(0, bytes, n_bytes), local_at = (uint32_t)w->at;
    size_t name_bytes = strlen(name);
    size_t unpadded = (size_t)w->at + 30 + name_bytes + 4;
    size_t n_padding = (DATA_ALIGNMENT - unpadded % DATA_ALIGNMENT) % DATA_ALIGNMENT;
    byte_buffer local = {0};
    put_u32(&local, 0x04034b50);
    put_u16(&local, 0); /* version needed */
    put_common(&local, crc, n_bytes);
    put_u16(&local, (uint32_t)name_bytes);
    put_u16(&local, (uint32_t)(4 + n_padding));
    buffer_put_text(&local, name);
    put_u16(&local, 0x4246); /* "FB", the field that torch pads with */
    put_u16(&local, (uint32_t)n_padding);
    buffer_put(&local, padding, n_padding);
    write_buffer(w, &local);
    buffer_free(&local);
    atomic_file_write(&w->file, bytes, n_bytes);
    w->at += n_bytes;

    put_u32(&w->directory, 0x02014b50);
    put_u16(&w->directory, 0); /* made by */
    put_u16(&w->directory, 0); /* version needed */
    put_common(&w->directory, crc, n_bytes);
    put_u16(&w->directory, (uint32_t)name_bytes);
    put_u16(&w->directory, 0); /* extra */
    put_u16(&w->directory, 0); /* comment */
    put_u16(&w->directory, 0); /* disk */
    put_u16(&w->directory, 0); /* internal attributes */
    put_u32(&w->directory, 0); /* external attributes */
    put_u32(&w->directory, local_at);
    buffer_put_text(&w->directory, name);
    w->n_entries++;
}

static void write_end(pt_writer *w) {
    byte_buffer end = {0};
    put_u32(&end, 0x06054b50);
    put_u16(&end, 0);
    put_u16(&end, 0);
    put_u16(&end, (uint32_t)w->n_entries);
    put_u16(&end, (uint32_t)w->n_entries);
    put_u32(&end, (uint32_t)w->directory.n_bytes);
    put_u32(&end, (uint32_t)w->at);
    put_u16(&end, 0);
    write_buffer(w, &w->directory);
    write_buffer(w, &end);
    buffer_free(&end);
}

/* ------------------------------------------------------------------------------------------------
 * Pickle
 */

static void put_op(pt_writer *w, char op) { buffer_put(&w->pickle, &op, 1); }
static void put_int(pt_writer *w, uint32_t v) {
    put_op(w, 'J');
    put_u32(&w->pickle, v);
}
static void put_text(pt_writer *w, const char *text) {
    put_op(w, 'X');
    put_u32(&w->pickle, (uint32_t)strlen(text));
    buffer_put_text(&w->pickle, text);
}

/* Sizes or row-major strides as a tuple. */
static void put_dims(pt_writer *w, const uint32_t *values, int32_t n) {
    put_op(w, '(');
    for (int32_t i = 0; i < n; i++) put_int(w, values[i]);
    put_op(w, 't');
}

/* A tensor of its own storage, numbered in the order of writing. */
static void put_tensor(pt_writer *w, const uint32_t *shape, int32_t n_dims) {
    uint32_t strides[3], n = 1;
    char key[16];
    for (int32_t i = n_dims; i-- > 0; n *= shape[i]) strides[i] = n;
    snprintf(key, sizeof key, "%d", (int)w->n_storages++);
    buffer_put_text(&w->pickle, "ctorch._utils\n_rebuild_tensor_v2\n((");
    put_text(w, "storage");
    buffer_put_text(&w->pickle, "ctorch\nFloatStorage\n");
    put_text(w, key);
    put_text(w, "cpu");
    put_int(w, n);
    buffer_put_text(&w->pickle, "tQ");
    put_int(w, 0);
    put_dims(w, shape, n_dims);
    put_dims(w, strides, n_dims);
    buffer_put_text(&w->pickle, "\x89"
                                "ccollections\nOrderedDict\n)RtR");
}

/* One matrix stands for all heads where they agree in every bit, or where there is none. */
static bool is_shared(const pt_writer *w, int32_t index) {
    const rotations_layer *l = &w->rotations->layers[index];
    const float *rotation = w->side == OSCAR_ZOO_KEY ? l->k_rotation : l->v_rotation;
    size_t n = (size_t)l->shape.head_dim * (size_t)l->shape.head_dim;
    for (int32_t h = 1; rotation && h < l->shape.n_kv_heads; h++)
        if (memcmp(rotation, rotation + (size_t)h * n, n * sizeof(float))) return false;
    return true;
}

static const float *key_mean(const pt_writer *w, int32_t index) {
    return w->side == OSCAR_ZOO_KEY ? w->rotations->layers[index].k_mean : NULL;
}

static void put_layer(pt_writer *w, int32_t index) {
    const oscar_layer *shape = &w->rotations->layers[index].shape;
    uint32_t d = (uint32_t)shape->head_dim, n_heads = (uint32_t)shape->n_kv_heads;
    const uint32_t dims[3] = {n_heads, d, d};
    put_int(w, (uint32_t)index);
    buffer_put_text(&w->pickle, "}(");
    put_text(w, "layer_id");
    put_int(w, (uint32_t)index);
    put_text(w, "rotation");
    if (is_shared(w, index))
        put_tensor(w, dims + 1, 2);
    else
        put_tensor(w, dims, 3);
    if (key_mean(w, index)) {
        put_text(w, "k_mean");
        put_tensor(w, dims, 2);
    }
    put_op(w, 'u');
}

static void put_pickle(pt_writer *w) {
    const oscar_rotations *r = w->rotations;
    bool is_key = w->side == OSCAR_ZOO_KEY, all_shared = true, any_mean = false;
    for (int32_t i = 0; i < r->n_layers; i++) {
        all_shared = all_shared && is_shared(w, i);
        any_mean = any_mean || key_mean(w, i);
    }
    const char *objective = oscar_rotations_metadata(r, is_key ? "k.objective" : "v.objective");
    buffer_put(&w->pickle, "\x80\x02}(", 4);
    put_text(w, "format_version");
    put_int(w, any_mean ? 2 : 1);
    put_text(w, "objective");
    put_text(w, objective ? objective : "oscar");
    put_text(w, "source_grouping");
    put_text(w, all_shared ? "layer" : "head");
    put_text(w, "layers");
    buffer_put_text(&w->pickle, "}(");
    for (int32_t i = 0; i < r->n_layers; i++) put_layer(w, i);
    buffer_put_text(&w->pickle, "uu.");
}

/* ------------------------------------------------------------------------------------------------
 * Together
 */

static void write_floats(pt_writer *w, const float *values, size_t n) {
    char name[48];
    snprintf(name, sizeof name, "rotations/data/%d", (int)w->n_storages++);
    write_entry(w, name, values, n * sizeof *values);
}

/* The storages in the order that put_layer numbered them. */
static oscar_status write_layer(pt_writer *w, int32_t index) {
    const rotations_layer *l = &w->rotations->layers[index];
    size_t d = (size_t)l->shape.head_dim, n_heads = (size_t)l->shape.n_kv_heads;
    const float *rotation = w->side == OSCAR_ZOO_KEY ? l->k_rotation : l->v_rotation;
    if (rotation) {
        write_floats(w, rotation, (is_shared(w, index) ? 1 : n_heads) * d * d);
    } else {
        float *identity = calloc(d * d, sizeof *identity);
        if (!identity) return error_set(w->error, OSCAR_ERROR_MEMORY, -1, "%s: no memory", w->file.path);
        for (size_t i = 0; i < d; i++) identity[i * d + i] = 1.0f;
        write_floats(w, identity, d * d);
        free(identity);
    }
    if (key_mean(w, index)) write_floats(w, l->k_mean, n_heads * d);
    return OSCAR_OK;
}

/* Zip counts in 32 bits. */
static bool fits(const pt_writer *w) {
    uint64_t bytes = 1 << 20;
    for (int32_t i = 0; i < w->rotations->n_layers; i++) {
        const oscar_layer *s = &w->rotations->layers[i].shape;
        bytes += (uint64_t)s->n_kv_heads * (uint64_t)(s->head_dim + 1) * (uint64_t)s->head_dim * sizeof(float) + 1024;
        if (bytes > UINT32_MAX) return false;
    }
    return true;
}

static oscar_status write_archive(pt_writer *w) {
    oscar_status status = OSCAR_OK;
    put_pickle(w);
    if (w->pickle.failed)
        return error_set(w->error, OSCAR_ERROR_MEMORY, -1, "%s: no memory for the pickle", w->file.path);
    write_entry(w, "rotations/data.pkl", w->pickle.bytes, w->pickle.n_bytes);
    write_entry(w, "rotations/byteorder", "little", 6);
    w->n_storages = 0;
    for (int32_t i = 0; i < w->rotations->n_layers && !status; i++) status = write_layer(w, i);
    write_entry(w, "rotations/version", "3\n", 2);
    write_end(w);
    return status;
}

/* What the published format has no field for. */
static const char *lost_field(const rotations_layer *l) {
    if (l->recipe != OSCAR_RECIPE_ZOO) return "recipe";
    if (l->bits_k != 2 || l->bits_v != 2) return "bits";
    if (l->n_tracked) return "k_tracked";
    return l->v_mean ? "v_mean" : NULL;
}

oscar_status oscar_zoo_write_pt(const oscar_rotations *rotations, int32_t side, bool lossy, const char *path,
                                oscar_error *error) {
    if (!rotations || !path || (side != OSCAR_ZOO_KEY && side != OSCAR_ZOO_VALUE))
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "rotations or path is NULL, or side is neither 0 nor 1");
    pt_writer w = {.rotations = rotations, .side = side, .error = error};
    for (int32_t i = 0; i < rotations->n_layers && !lossy; i++) {
        const char *lost = lost_field(&rotations->layers[i]);
        if (lost)
            return error_set(error, OSCAR_ERROR_MISMATCH, -1, "%s: layer %d: %s cannot be kept in a .pt file", path,
                             (int)i, lost);
    }
    oscar_status status = rotations_check(rotations, error);
    if (status) return status;
    if (!fits(&w)) return error_set(error, OSCAR_ERROR_UNSUPPORTED, -1, "%s: rotations beyond 4 GiB", path);
    status = atomic_file_begin(&w.file, path, error);
    if (status) return status;
    status = write_archive(&w);
    buffer_free(&w.directory);
    buffer_free(&w.pickle);
    if (!status) return atomic_file_commit(&w.file, error);
    atomic_file_abort(&w.file);
    return status;
}
