/*
 * zoo.h - the files that hold rotations: ours (safetensors), RotationZoo's (.pt), GGUF tensors.
 *
 * Every reader works on a byte_source, so that one parser serves files and the memory buffers of
 * the fuzz targets. Rules for all of them: a size is compared with what the source holds before
 * anything of that size is allocated, and an error says which field is wrong, what was found and
 * what was expected.
 */
#ifndef OSCAR_ZOO_INTERNAL_H
#define OSCAR_ZOO_INTERNAL_H

#include <stdio.h>

#include "codec/rotations.h"
#include "oscar/zoo.h"

/* ------------------------------------------------------------------------------------------------
 * Bytes in, bytes out (file_io.c)
 */

/* A file or a buffer that is read at offsets. */
typedef struct byte_source {
    const char *name;      /* for messages */
    const uint8_t *memory; /* [size], or NULL: read from fd */
    int fd;
    uint64_t size;
} byte_source;

/* Opens a regular file. The name is a view of `path`. */
oscar_status source_open(byte_source *source, const char *path, oscar_error *error);
byte_source source_from_memory(const void *bytes, size_t size, const char *name);
void source_close(byte_source *source); /* a zeroed or memory source is allowed */
/* FORMAT ("truncated") when [offset, offset + bytes) is not inside the source. `what` names it. */
oscar_status source_read(const byte_source *source, uint64_t offset, uint64_t bytes, void *out,
                         const char *what, oscar_error *error);
/* The same into fresh memory, one zero byte longer; free() it. */
oscar_status source_read_alloc(const byte_source *source, uint64_t offset, uint64_t bytes,
                               uint8_t **out, const char *what, oscar_error *error);

/* A file that appears under its name only when it is complete: written under another name in the
 * same folder, synced, renamed. The first failure sticks; commit reports it and removes all. */
typedef struct atomic_file {
    const char *path;
    char *temporary_path;
    FILE *stream;
    int failure; /* errno of the first failure, 0: none */
} atomic_file;
oscar_status atomic_file_begin(atomic_file *file, const char *path, oscar_error *error);
void atomic_file_write(atomic_file *file, const void *bytes, size_t n_bytes);
oscar_status atomic_file_commit(atomic_file *file, oscar_error *error);
void atomic_file_abort(atomic_file *file);

/* Appends to a growing buffer; `failed` once there was no memory. */
typedef struct byte_buffer {
    uint8_t *bytes;
    size_t n_bytes, capacity;
    bool failed;
} byte_buffer;
void buffer_put(byte_buffer *buffer, const void *bytes, size_t n_bytes);
void buffer_put_text(byte_buffer *buffer, const char *text);
void buffer_put_format(byte_buffer *buffer, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void buffer_free(byte_buffer *buffer);

/* Little-endian numbers at any alignment. */
static inline uint16_t load_u16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }
static inline uint32_t load_u32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}
static inline uint64_t load_u64(const uint8_t *p) {
    return (uint64_t)load_u32(p) | (uint64_t)load_u32(p + 4) << 32;
}

/* A decimal number with a point, whatever locale the program runs in; false: no memory. */
bool format_real(char *out, size_t n_bytes, int n_digits, double value);
/* True for a well-formed UTF-8 string (no surrogates, no overlong forms). */
bool utf8_valid(const char *text, size_t n_bytes);
/* Index of the first value that is NaN or infinite, or n. */
size_t first_not_finite(const float *values, size_t n);

/* ------------------------------------------------------------------------------------------------
 * safetensors (safetensors.c): an 8-byte header length, a JSON header, the data
 */

#define SAFETENSORS_MAX_HEADER_BYTES 100000000u
#define SAFETENSORS_MAX_DIMS 8

/* Strings are views into the table. Offsets count from the start of the file. */
typedef struct st_tensor {
    const char *name;
    const char *dtype;
    int32_t n_dims;
    uint64_t shape[SAFETENSORS_MAX_DIMS];
    uint64_t begin, end;
    uint64_t entry_offset; /* of its header entry, for messages */
} st_tensor;

typedef struct st_meta {
    const char *key, *value;
} st_meta;

typedef struct st_table {
    char *header; /* the header's bytes; strings are unescaped in place */
    int32_t n_tensors, n_meta;
    st_tensor *tensors; /* [n_tensors] by name */
    st_meta *meta;      /* [n_meta] by key */
} st_table;

/* Reads and checks the whole header: tensors cover the data without overlap or hole, sizes are
 * shape times dtype, no name twice. On failure *table is empty. */
oscar_status st_table_read(st_table *table, const byte_source *source, oscar_error *error);
void st_table_free(st_table *table);
const st_tensor *st_table_find(const st_table *table, const char *name); /* NULL: absent */
const char *st_table_meta(const st_table *table, const char *key);       /* NULL: absent */

/* A JSON string literal with its quotes; the text must be UTF-8. */
void json_put_string(byte_buffer *buffer, const char *text);

/* ------------------------------------------------------------------------------------------------
 * Our rotation files (rotation_file_load.c, rotation_file_save.c), docs/FORMAT.md
 */

oscar_status rotation_file_read(oscar_rotations **out, const byte_source *source,
                                oscar_error *error);

/* ------------------------------------------------------------------------------------------------
 * Opened files of any format (zoo_file.c)
 */

/* Strings and data are owned by the file. */
typedef struct zoo_tensor {
    const char *name;
    const char *dtype;
    int32_t layer; /* -1: none */
    int32_t n_dims;
    uint64_t shape[OSCAR_ZOO_MAX_DIMS];
    uint64_t stride[OSCAR_ZOO_MAX_DIMS]; /* in elements */
    const float *data;                   /* NULL: listed, not read */
} zoo_tensor;

struct oscar_zoo_file {
    int32_t format, version, n_layers;
    int32_t n_tensors, n_meta;
    zoo_tensor *tensors; /* [n_tensors] */
    st_meta *meta;       /* [n_meta] */
    size_t tensors_capacity, meta_capacity;
    void **owned; /* [n_owned] memory to free() */
    size_t n_owned, owned_capacity;
    st_table table; /* safetensors: what the names are views of */
};

oscar_status zoo_safetensors_read(oscar_zoo_file **out, const byte_source *source, oscar_error *error);
oscar_status zoo_pt_read(oscar_zoo_file **out, const byte_source *source, oscar_error *error);
oscar_status zoo_gguf_read(oscar_zoo_file **out, const byte_source *source, oscar_error *error);

/* Parts of the readers; false: no memory. zoo_own takes the memory also when it fails. */
bool zoo_own(oscar_zoo_file *file, void *memory);
char *zoo_copy_text(oscar_zoo_file *file, const char *text, size_t n_bytes); /* NULL: no memory */
bool zoo_add_tensor(oscar_zoo_file *file, const zoo_tensor *tensor);
bool zoo_add_meta(oscar_zoo_file *file, const char *key, const char *value); /* copies */
/* The tensor of a layer whose name ends in `suffix`; NULL: absent. */
const zoo_tensor *zoo_find(const oscar_zoo_file *file, int32_t layer, const char *suffix);
/* The tensor's values in row-major order. out: [product of shape] */
void zoo_gather(const zoo_tensor *tensor, float *out);
/* Grows *array for one more element; false: no memory. */
bool array_grow(void **array, size_t count, size_t *capacity, size_t element_bytes);

/* CRC-32 as zip has it; start with 0. */
uint32_t crc32_update(uint32_t crc, const void *bytes, size_t n_bytes);

#endif
