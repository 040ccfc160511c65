/*
 * pt_zip.c - the zip container of torch archives: stored entries, found through the directory.
 */
#include <stdlib.h>

#include "zoo/pt.h"

#define END_BYTES 22
#define ENTRY_BYTES 46
#define LOCAL_BYTES 30

static oscar_status fail(const byte_source *source, uint64_t at, const char *what, oscar_error *error) {
    return error_set(error, OSCAR_ERROR_FORMAT, (int64_t)at, "%s: zip, byte %llu: %s", source->name,
                     (unsigned long long)at, what);
}

/* Offset of the end record: the last place whose comment reaches exactly to the end of the file. */
static oscar_status find_end(const byte_source *source, uint8_t *end, uint64_t *at, oscar_error *error) {
    if (source->size < END_BYTES) return fail(source, 0, "truncated: no room for an end record", error);
    uint64_t tail_bytes = source->size < END_BYTES + 65535u ? source->size : END_BYTES + 65535u;
    uint64_t tail_at = source->size - tail_bytes;
    uint8_t *tail;
    oscar_status status = source_read_alloc(source, tail_at, tail_bytes, &tail, "the zip directory", error);
    if (status) return status;
    status = OSCAR_ERROR_FORMAT;
    for (uint64_t i = tail_bytes - END_BYTES + 1; i-- > 0 && status;) {
        if (load_u32(tail + i) != 0x06054b50 || load_u16(tail + i + 20) != tail_bytes - END_BYTES - i) continue;
        memcpy(end, tail + i, END_BYTES);
        *at = tail_at + i;
        status = OSCAR_OK;
    }
    free(tail);
    return status ? fail(source, source->size, "truncated: no end record", error) : OSCAR_OK;
}

/* The data of an entry starts behind its local header, whose name and extra field have lengths of
 * their own. */
static oscar_status locate(const byte_source *source, zip_entry *entry, uint64_t local_at, oscar_error *error) {
    uint8_t local[LOCAL_BYTES];
    oscar_status status = source_read(source, local_at, LOCAL_BYTES, local, "a zip entry", error);
    if (status) return status;
    if (load_u32(local) != 0x04034b50) return fail(source, local_at, "no local header where the directory says", error);
    if (load_u16(local + 26) != entry->name_bytes)
        return fail(source, local_at, "local and directory names differ", error);
    entry->offset = local_at + LOCAL_BYTES + load_u16(local + 26) + load_u16(local + 28);
    if (entry->offset > source->size || entry->bytes > source->size - entry->offset)
        return fail(source, local_at, "truncated: an entry reaches beyond the file", error);
    return OSCAR_OK;
}

static oscar_status read_entries(zip_archive *archive, const byte_source *source, uint64_t directory_at,
                                 size_t directory_bytes, oscar_error *error) {
    uint64_t total = 0;
    size_t at = 0;
    for (int32_t i = 0; i < archive->n_entries; i++) {
        const uint8_t *record = archive->directory + at;
        uint64_t file_at = directory_at + at;
        if (directory_bytes - at < ENTRY_BYTES || load_u32(record) != 0x02014b50)
            return fail(source, file_at, "a directory entry is missing", error);
        zip_entry *entry = &archive->entries[i];
        size_t name_bytes = load_u16(record + 28);
        size_t bytes = ENTRY_BYTES + name_bytes + load_u16(record + 30) + load_u16(record + 32);
        if (bytes > directory_bytes - at) return fail(source, file_at, "a directory entry is cut off", error);
        if (load_u16(record + 8) & 1) return fail(source, file_at, "an encrypted entry", error);
        if (load_u16(record + 10) != 0 || load_u32(record + 20) != load_u32(record + 24))
            return fail(source, file_at, "a compressed entry, expected stored ones", error);
        *entry = (zip_entry){.name = (const char *)record + ENTRY_BYTES,
                             .name_bytes = name_bytes,
                             .bytes = load_u32(record + 24),
                             .crc = load_u32(record + 16)};
        oscar_status status = locate(source, entry, load_u32(record + 42), error);
        if (status) return status;
        total += entry->bytes;
        if (total > source->size) return fail(source, file_at, "entries overlap", error);
        for (int32_t j = 0; j < i; j++)
            if (archive->entries[j].name_bytes == name_bytes &&
                !memcmp(archive->entries[j].name, entry->name, name_bytes))
                return fail(source, file_at, "two entries of one name", error);
        at += bytes;
    }
    return OSCAR_OK;
}

oscar_status zip_open(zip_archive *archive, const byte_source *source, oscar_error *error) {
    memset(archive, 0, sizeof *archive);
    uint8_t end[END_BYTES] = {0};
    uint64_t end_at = 0;
    oscar_status status = find_end(source, end, &end_at, error);
    if (status) return status;
    uint32_t n_entries = load_u16(end + 10), bytes = load_u32(end + 12), at = load_u32(end + 16);
    if (n_entries == 0xffff || at == 0xffffffffu)
        return error_set(error, OSCAR_ERROR_UNSUPPORTED, (int64_t)end_at, "%s: a zip64 archive beyond 4 GiB",
                         source->name);
    if (load_u16(end + 4) || load_u16(end + 6) || load_u16(end + 8) != n_entries)
        return fail(source, end_at, "one disk of several", error);
    if (at > end_at || bytes > end_at - at)
        return fail(source, end_at, "the directory reaches beyond its end record", error);
    /* Names are compared with each other, so their number is kept small: a rotation file has two
     * or three entries a layer. */
    if (n_entries > 8192) return fail(source, end_at, "more than 8192 entries", error);
    status = source_read_alloc(source, at, bytes, &archive->directory, "the zip directory", error);
    if (status) return status;
    archive->n_entries = (int32_t)n_entries;
    archive->entries = calloc(n_entries + 1, sizeof *archive->entries);
    status = archive->entries
                 ? read_entries(archive, source, at, bytes, error)
                 : error_set(error, OSCAR_ERROR_MEMORY, -1, "%s: no memory for its directory", source->name);
    if (status) zip_close(archive);
    return status;
}

void zip_close(zip_archive *archive) {
    free(archive->directory);
    free(archive->entries);
    memset(archive, 0, sizeof *archive);
}

const zip_entry *zip_find(const zip_archive *archive, const char *name) {
    size_t n = strlen(name);
    for (int32_t i = 0; i < archive->n_entries; i++)
        if (archive->entries[i].name_bytes == n && !memcmp(archive->entries[i].name, name, n))
            return &archive->entries[i];
    return NULL;
}

oscar_status zip_read(const byte_source *source, const zip_entry *entry, uint8_t **out, oscar_error *error) {
    oscar_status status = source_read_alloc(source, entry->offset, entry->bytes, out, "a zip entry", error);
    if (status) return status;
    uint32_t crc = crc32_update(0, *out, (size_t)entry->bytes);
    if (crc == entry->crc) return OSCAR_OK;
    free(*out);
    *out = NULL;
    return error_set(error, OSCAR_ERROR_FORMAT, (int64_t)entry->offset,
                     "%s: zip entry %.*s: CRC-32 found %08x, expected %08x", source->name,
                     (int)(entry->name_bytes < 80 ? entry->name_bytes : 80), entry->name, crc, entry->crc);
}
