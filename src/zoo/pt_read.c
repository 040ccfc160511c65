/*
 * pt_read.c - a RotationZoo file: what its pickle says about layers, and the tensors it names.
 *
 *   {format_version, objective, source_grouping, calibration: {...},
 *    layers: {id: {layer_id, rotation [d,d] or [H,d,d], eigenvalues, ...}}}
 * Version 1 has rotations alone; versions 2 and 3 add k_mean and, for maps that are not
 * orthogonal, q_rotation and o_rotation.
 */
#include <stdlib.h>

#include "zoo/pt.h"

#define NEWEST_VERSION 3
/* Names are compared with each other; a rotation file has two to four a layer. */
#define MAX_TENSORS 8192

typedef struct pt_reader {
    const byte_source *source;
    oscar_error *error;
    zip_archive archive;
    char prefix[256]; /* the folder inside the archive, with its slash */
    uint8_t *pickle_bytes;
    pickle p;
    float **storages; /* [archive.n_entries]: an entry's floats once they were read; owned by the file */
    oscar_zoo_file *file;
} pt_reader;

static oscar_status fail(pt_reader *r, const char *field, const char *what) {
    return error_set(r->error, OSCAR_ERROR_FORMAT, -1, "%s: %s: %s", r->source->name, field, what);
}
static oscar_status no_memory(pt_reader *r) {
    return error_set(r->error, OSCAR_ERROR_MEMORY, -1, "%s: no memory for its contents", r->source->name);
}

/* Everything lies in one folder, which is called like the file was when it was saved. */
static oscar_status find_prefix(pt_reader *r) {
    static const char wanted[] = "/data.pkl";
    size_t n = sizeof wanted - 1;
    for (int32_t i = 0; i < r->archive.n_entries; i++) {
        const zip_entry *e = &r->archive.entries[i];
        if (e->name_bytes < n || memcmp(e->name + e->name_bytes - n, wanted, n)) continue;
        size_t folder = e->name_bytes - n + 1;
        if (folder >= sizeof r->prefix - 32 || memchr(e->name, 0, folder))
            return fail(r, "data.pkl", "a folder name that is too long or holds NUL");
        memcpy(r->prefix, e->name, folder);
        r->prefix[folder] = '\0';
        return OSCAR_OK;
    }
    return fail(r, "data.pkl", "not in the archive: not a torch file");
}

static const zip_entry *find_entry(pt_reader *r, const char *name) {
    char full[sizeof r->prefix + 32];
    snprintf(full, sizeof full, "%s%s", r->prefix, name);
    return zip_find(&r->archive, full);
}

static oscar_status check_byte_order(pt_reader *r) {
    const zip_entry *entry = find_entry(r, "byteorder");
    if (!entry) return OSCAR_OK; /* torch before 2.1 wrote none, and little-endian files only */
    uint8_t *text;
    oscar_status status = zip_read(r->source, entry, &text, r->error);
    if (status) return status;
    bool is_little = entry->bytes == 6 && !memcmp(text, "little", 6);
    free(text);
    if (is_little) return OSCAR_OK;
    return error_set(r->error, OSCAR_ERROR_UNSUPPORTED, -1, "%s: byteorder is not little", r->source->name);
}

/* The floats of a storage, read and checked once however many tensors view it. `tensor` is the
 * name of the one that asks. */
static oscar_status read_storage(pt_reader *r, const pickle_value *storage, const char *tensor, const float **out) {
    char name[32];
    if (storage->text_bytes > 12 || memchr(storage->text, 0, storage->text_bytes))
        return fail(r, tensor, "a storage key of more than 12 characters");
    snprintf(name, sizeof name, "data/%.*s", (int)storage->text_bytes, storage->text);
    const zip_entry *entry = find_entry(r, name);
    if (!entry) return fail(r, tensor, "its data is not in the archive");
    float **slot = &r->storages[entry - r->archive.entries];
    uint64_t bytes;
    if (__builtin_mul_overflow((uint64_t)storage->number, sizeof(float), &bytes) || bytes != entry->bytes)
        return error_set(r->error, OSCAR_ERROR_FORMAT, (int64_t)entry->offset,
                         "%s: %s: found %llu bytes of data, expected %lld float32", r->source->name, tensor,
                         (unsigned long long)entry->bytes, (long long)storage->number);
    if (!*slot) {
        uint8_t *data;
        oscar_status status = zip_read(r->source, entry, &data, r->error);
        if (status) return status;
        if (!zoo_own(r->file, data)) return no_memory(r);
        *slot = (float *)(void *)data;
        size_t n = (size_t)storage->number, bad = first_not_finite(*slot, n);
        if (bad < n)
            return error_set(r->error, OSCAR_ERROR_NOT_FINITE, (int64_t)(entry->offset + bad * sizeof(float)),
                             "%s: %s: value %zu of its data is NaN or infinite", r->source->name, tensor, bad);
    }
    *out = *slot;
    return OSCAR_OK;
}

static oscar_status add_tensor(pt_reader *r, int32_t layer, const pickle_value *key, const pickle_value *value) {
    char name[96];
    if (key->text_bytes > 64 || memchr(key->text, 0, key->text_bytes))
        return fail(r, "layers", "a key of more than 64 characters");
    int n = snprintf(name, sizeof name, "layers.%d.%.*s", (int)layer, (int)key->text_bytes, key->text);
    if (r->file->n_tensors == MAX_TENSORS) return fail(r, name, "more than 8192 tensors");
    for (int32_t i = 0; i < r->file->n_tensors; i++)
        if (!strcmp(r->file->tensors[i].name, name)) return fail(r, name, "occurs twice");
    zoo_tensor t = {.dtype = "F32", .layer = layer, .n_dims = value->n_dims};
    oscar_status status = read_storage(r, &r->p.values[value->storage], name, &t.data);
    if (status) return status;
    t.data += value->number;
    for (int32_t i = 0; i < t.n_dims; i++) {
        t.shape[i] = (uint64_t)r->p.dims[value->dims + i];
        t.stride[i] = (uint64_t)r->p.dims[value->dims + t.n_dims + i];
    }
    t.name = zoo_copy_text(r->file, name, (size_t)n);
    return t.name && zoo_add_tensor(r->file, &t) ? OSCAR_OK : no_memory(r);
}

/* A layer's id as dict key: a number, or its digits. */
static bool layer_id(const pickle_value *v, int32_t *out) {
    int64_t id = -1;
    if (v->kind == PICKLE_INT) {
        id = v->number;
    } else if (v->kind == PICKLE_TEXT && v->text_bytes > 0 && v->text_bytes < 6) {
        id = 0;
        for (uint32_t i = 0; i < v->text_bytes; i++) {
            if (v->text[i] < '0' || v->text[i] > '9') return false;
            id = id * 10 + (v->text[i] - '0');
        }
    }
    *out = (int32_t)id;
    return id >= 0 && id < OSCAR_MAX_LAYERS;
}

static oscar_status check_rotation(pt_reader *r, int32_t layer) {
    const zoo_tensor *t = zoo_find(r->file, layer, ".rotation");
    char name[32];
    snprintf(name, sizeof name, "layers.%d.rotation", (int)layer);
    if (!t) return fail(r, name, "found none, expected a tensor [d, d] or [H, d, d]");
    bool is_matrix = t->n_dims == 2 || t->n_dims == 3;
    if (!is_matrix || t->shape[t->n_dims - 2] != t->shape[t->n_dims - 1])
        return fail(r, name, "its shape is neither [d, d] nor [H, d, d]");
    r->file->n_layers++;
    return OSCAR_OK;
}

static oscar_status read_layer(pt_reader *r, const pickle_value *key, int32_t value) {
    int32_t layer, stated;
    if (!layer_id(key, &layer)) return fail(r, "layers", "a key that is no layer id from 0 to 511");
    const pickle_value *dict = &r->p.values[value];
    if (dict->kind != PICKLE_DICT) return fail(r, "layers", "an entry that is no dict");
    int32_t stated_at = pickle_get(&r->p, value, "layer_id");
    if (stated_at >= 0 && (!layer_id(&r->p.values[stated_at], &stated) || stated != layer))
        return fail(r, "layers", "an entry whose layer_id is not its key");
    for (int32_t i = 0; i + 1 < dict->n_items; i += 2) {
        const pickle_value *k = &r->p.values[dict->items[i]], *v = &r->p.values[dict->items[i + 1]];
        if (k->kind != PICKLE_TEXT) return fail(r, "layers", "a key of an entry that is no text");
        oscar_status status = v->kind == PICKLE_TENSOR ? add_tensor(r, layer, k, v) : OSCAR_OK;
        if (status) return status;
    }
    return check_rotation(r, layer);
}

static oscar_status read_layers(pt_reader *r) {
    int32_t index = pickle_get(&r->p, r->p.root, "layers");
    if (index < 0 || r->p.values[index].kind != PICKLE_DICT) return fail(r, "layers", "found none, expected a dict");
    const pickle_value *layers = &r->p.values[index];
    if (layers->n_items / 2 > OSCAR_MAX_LAYERS) return fail(r, "layers", "more than 512 entries");
    for (int32_t i = 0; i + 1 < layers->n_items; i += 2) {
        oscar_status status = read_layer(r, &r->p.values[layers->items[i]], layers->items[i + 1]);
        if (status) return status;
    }
    return r->file->n_layers ? OSCAR_OK : fail(r, "layers", "found none, expected at least one");
}

/* Plain values of a dict as text; what is nested deeper than `calibration` is not kept. */
static oscar_status read_metadata(pt_reader *r, int32_t dict, const char *prefix) {
    const pickle_value *d = &r->p.values[dict];
    for (int32_t i = 0; i + 1 < d->n_items; i += 2) {
        const pickle_value *k = &r->p.values[d->items[i]], *v = &r->p.values[d->items[i + 1]];
        if (k->kind != PICKLE_TEXT || k->text_bytes > 64 || pickle_text_is(k, "format_version")) continue;
        char key[128], number[40];
        snprintf(key, sizeof key, "%s%.*s", prefix, (int)k->text_bytes, k->text);
        const char *text = number;
        if (v->kind == PICKLE_TEXT)
            text = zoo_copy_text(r->file, v->text, v->text_bytes);
        else if (v->kind == PICKLE_INT)
            snprintf(number, sizeof number, "%lld", (long long)v->number);
        else if (v->kind == PICKLE_BOOL)
            text = v->number ? "true" : "false";
        else if (v->kind == PICKLE_FLOAT)
            text = format_real(number, sizeof number, 17, v->real) ? number : NULL;
        else
            continue;
        if (!text || !zoo_add_meta(r->file, key, text)) return no_memory(r);
    }
    return OSCAR_OK;
}

static oscar_status read_contents(pt_reader *r) {
    if (r->p.values[r->p.root].kind != PICKLE_DICT) return fail(r, "data.pkl", "not a dict");
    int32_t index = pickle_get(&r->p, r->p.root, "format_version");
    if (index < 0 || r->p.values[index].kind != PICKLE_INT || r->p.values[index].number < 1)
        return fail(r, "format_version", "found none, expected a whole number from 1");
    int64_t version = r->p.values[index].number;
    if (version > NEWEST_VERSION)
        return error_set(r->error, OSCAR_ERROR_UNSUPPORTED, -1,
                         "%s: format_version: found %lld, this build reads up to %d", r->source->name,
                         (long long)version, NEWEST_VERSION);
    r->file->version = (int32_t)version;
    r->storages = calloc((size_t)r->archive.n_entries, sizeof *r->storages);
    if (!r->storages) return no_memory(r);
    oscar_status status = read_metadata(r, r->p.root, "");
    int32_t calibration = pickle_get(&r->p, r->p.root, "calibration");
    if (!status && calibration >= 0 && r->p.values[calibration].kind == PICKLE_DICT)
        status = read_metadata(r, calibration, "calibration.");
    return status ? status : read_layers(r);
}

static oscar_status read_archive(pt_reader *r) {
    oscar_status status = find_prefix(r);
    if (!status) status = check_byte_order(r);
    if (status) return status;
    const zip_entry *entry = find_entry(r, "data.pkl");
    if (!entry) return fail(r, "data.pkl", "not in the archive");
    if (entry->bytes > PICKLE_MAX_BYTES) return fail(r, "data.pkl", "larger than 1 MiB");
    status = zip_read(r->source, entry, &r->pickle_bytes, r->error);
    if (!status) status = pickle_read(&r->p, r->pickle_bytes, (size_t)entry->bytes, r->source->name, r->error);
    return status ? status : read_contents(r);
}

oscar_status zoo_pt_read(oscar_zoo_file **out, const byte_source *source, oscar_error *error) {
    *out = NULL;
    pt_reader r = {.source = source, .error = error};
    r.file = calloc(1, sizeof *r.file);
    if (!r.file) return no_memory(&r);
    r.file->format = OSCAR_ZOO_PT;
    oscar_status status = zip_open(&r.archive, source, error);
    if (!status) status = read_archive(&r);
    zip_close(&r.archive);
    pickle_free(&r.p);
    free(r.pickle_bytes);
    free(r.storages);
    if (status)
        oscar_zoo_free(r.file);
    else
        *out = r.file;
    return status;
}
