/*
 * pt.h - the two layers of a torch archive: a stored zip, and a pickle that is read, never run.
 */
#ifndef OSCAR_PT_H
#define OSCAR_PT_H

#include "zoo/zoo.h"

/* ------------------------------------------------------------------------------------------------
 * Stored zip (pt_zip.c)
 */

typedef struct zip_entry {
    const char *name; /* a view of the archive's directory, [name_bytes], not terminated */
    size_t name_bytes;
    uint64_t offset, bytes; /* of its data in the file */
    uint32_t crc;
} zip_entry;

typedef struct zip_archive {
    uint8_t *directory;
    zip_entry *entries; /* [n_entries] */
    int32_t n_entries;
} zip_archive;

/* Reads the central directory. Entries are stored, lie inside the file and together are no larger
 * than it (so that overlapping entries cannot multiply what is read). */
oscar_status zip_open(zip_archive *archive, const byte_source *source, oscar_error *error);
void zip_close(zip_archive *archive);
const zip_entry *zip_find(const zip_archive *archive, const char *name); /* NULL: absent */
/* An entry's bytes into fresh memory, its CRC checked; free() it. */
oscar_status zip_read(const byte_source *source, const zip_entry *entry, uint8_t **out, oscar_error *error);

/* ------------------------------------------------------------------------------------------------
 * Pickle (pt_pickle.c)
 */

#define PICKLE_MAX_BYTES (1u << 20)
#define PICKLE_MAX_DIMS 4

typedef enum pickle_kind {
    PICKLE_MARK = 0,
    PICKLE_NONE,
    PICKLE_BOOL,
    PICKLE_INT,
    PICKLE_FLOAT,
    PICKLE_TEXT,
    PICKLE_SEQUENCE, /* tuple or list */
    PICKLE_DICT,
    PICKLE_GLOBAL,
    PICKLE_STORAGE,
    PICKLE_TENSOR
} pickle_kind;

/* The names that a file may mention; anything else is refused. */
typedef enum pickle_global {
    PICKLE_REBUILD_TENSOR = 0,
    PICKLE_ORDERED_DICT = 1,
    PICKLE_FLOAT_STORAGE = 2
} pickle_global;

/* Values refer to others by index. */
typedef struct pickle_value {
    uint8_t kind;   /* pickle_kind */
    int32_t *items; /* sequence: [n_items] values; dict: key, value, key, value, ... */
    int32_t n_items;
    size_t capacity; /* of items */
    int64_t number;  /* int, bool, pickle_global; tensor: element offset; storage: n elements */
    double real;
    const char *text; /* text and the key of a storage: [text_bytes], a view, not terminated */
    uint32_t text_bytes;
    int32_t storage; /* of a tensor */
    int32_t n_dims;
    int32_t dims; /* tensor: where its sizes and then its strides begin in pickle.dims */
} pickle_value;

typedef struct pickle {
    pickle_value *values; /* [n_values] */
    size_t n_values, values_capacity;
    int64_t *dims; /* [n_dims] */
    size_t n_dims, dims_capacity;
    int32_t root;
} pickle;

/* Reads a pickle of protocol 2 whose bytes must outlive the result. */
oscar_status pickle_read(pickle *out, const uint8_t *bytes, size_t n_bytes, const char *file_name,
                         oscar_error *error);
void pickle_free(pickle *p);
/* The value under a text key; -1: absent or not a dict. */
int32_t pickle_get(const pickle *p, int32_t dict, const char *key);
bool pickle_text_is(const pickle_value *value, const char *text);

#endif
