/*
 * file_io.c - reading at checked offsets, writing files that appear whole or not at all.
 */
#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "zoo/zoo.h"

oscar_status source_open(byte_source *source, const char *path, oscar_error *error) {
    memset(source, 0, sizeof *source);
    source->fd = -1;
    source->name = path;
    if (!path) return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "path is NULL");
    /* Without O_NONBLOCK the open of a named pipe would wait for a writer. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return error_set(error, OSCAR_ERROR_IO, -1, "%s: %s", path, strerror(errno));
    struct stat st;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        return error_set(error, OSCAR_ERROR_IO, -1, "%s: not a regular file", path);
    }
    source->fd = fd;
    source->size = (uint64_t)st.st_size;
    return OSCAR_OK;
}

byte_source source_from_memory(const void *bytes, size_t size, const char *name) {
    return (byte_source){.name = name, .memory = bytes, .fd = -1, .size = size};
}

void source_close(byte_source *source) {
    if (source->name && !source->memory && source->fd >= 0) close(source->fd);
    memset(source, 0, sizeof *source);
    source->fd = -1;
}

oscar_status source_read(const byte_source *source, uint64_t offset, uint64_t bytes, void *out, const char *what,
                         oscar_error *error) {
    if (offset > source->size || bytes > source->size - offset)
        return error_set(error, OSCAR_ERROR_FORMAT, offset > INT64_MAX ? -1 : (int64_t)offset,
                         "%s: truncated: %s needs %llu bytes at offset %llu, the file has %llu", source->name, what,
                         (unsigned long long)bytes, (unsigned long long)offset, (unsigned long long)source->size);
    if (source->memory) {
        if (bytes) memcpy(out, source->memory + offset, (size_t)bytes);
        return OSCAR_OK;
    }
    for (uint64_t done = 0; done < bytes;) {
        size_t part = bytes - done > (1u << 30) ? (1u << 30) : (size_t)(bytes - done);
        ssize_t n = pread(source->fd, (uint8_t *)out + done, part, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return error_set(error, OSCAR_ERROR_IO, (int64_t)(offset + done), "%s: reading %s: %s", source->name, what,
                             n < 0 ? strerror(errno) : "the file became shorter");
        done += (uint64_t)n;
    }
    return OSCAR_OK;
}

oscar_status source_read_alloc(const byte_source *source, uint64_t offset, uint64_t bytes, uint8_t **out,
                               const char *what, oscar_error *error) {
    *out = NULL;
    if (offset > source->size || bytes > source->size - offset)
        return source_read(source, offset, bytes, NULL, what, error);
    uint8_t *memory = malloc((size_t)bytes + 1);
    if (!memory)
        return error_set(error, OSCAR_ERROR_MEMORY, -1, "%s: no memory for %s (%llu bytes)", source->name, what,
                         (unsigned long long)bytes);
    oscar_status status = source_read(source, offset, bytes, memory, what, error);
    if (status) {
        free(memory);
        return status;
    }
    memory[bytes] = 0;
    *out = memory;
    return OSCAR_OK;
}

/* ------------------------------------------------------------------------------------------------
 * Atomic files
 */

/* The name does not grow out of the file's own, which may already be as long as names can be. */
static char *temporary_name(const char *path) {
    static atomic_uint counter;
    const char *slash = strrchr(path, '/');
    size_t folder = slash ? (size_t)(slash - path) + 1 : 0;
    size_t capacity = folder + 64;
    char *name = malloc(capacity);
    if (!name) return NULL;
    memcpy(name, path, folder);
    snprintf(name + folder, capacity - folder, ".oscar-%ld-%u.tmp", (long)getpid(), atomic_fetch_add(&counter, 1u));
    return name;
}

oscar_status atomic_file_begin(atomic_file *file, const char *path, oscar_error *error) {
    memset(file, 0, sizeof *file);
    if (!path || !*path) return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "path is empty");
    file->path = path;
    file->temporary_path = temporary_name(path);
    if (!file->temporary_path) return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for a file name");
    int fd = open(file->temporary_path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd >= 0) file->stream = fdopen(fd, "wb");
    if (!file->stream) {
        int failure = errno;
        if (fd >= 0) {
            close(fd);
            unlink(file->temporary_path);
        }
        free(file->temporary_path);
        memset(file, 0, sizeof *file);
        return error_set(error, OSCAR_ERROR_IO, -1, "%s: cannot create a file in its folder: %s", path,
                         strerror(failure));
    }
    return OSCAR_OK;
}

void atomic_file_write(atomic_file *file, const void *bytes, size_t n_bytes) {
    if (file->failure || n_bytes == 0) return;
    errno = 0;
    if (fwrite(bytes, 1, n_bytes, file->stream) != n_bytes) file->failure = errno ? errno : EIO;
}

/* The rename itself lasts only once the folder is synced. Some file systems cannot sync folders;
 * the file is complete under its name either way, so that is no failure. */
static void sync_folder(const char *path) {
    const char *slash = strrchr(path, '/');
    char *folder = slash ? strndup(path, slash == path ? 1 : (size_t)(slash - path)) : strdup(".");
    if (!folder) return;
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    free(folder);
    if (fd < 0) return;
    fsync(fd);
    close(fd);
}

oscar_status atomic_file_commit(atomic_file *file, oscar_error *error) {
    if (fflush(file->stream) != 0 && !file->failure) file->failure = errno;
    if (!file->failure && fsync(fileno(file->stream)) != 0) file->failure = errno;
    if (fclose(file->stream) != 0 && !file->failure) file->failure = errno;
    file->stream = NULL;
    if (!file->failure && rename(file->temporary_path, file->path) != 0) file->failure = errno;
    oscar_status status = OSCAR_OK;
    if (file->failure)
        status = error_set(error, OSCAR_ERROR_IO, -1, "%s: not written: %s", file->path, strerror(file->failure));
    else
        sync_folder(file->path);
    atomic_file_abort(file);
    return status;
}

void atomic_file_abort(atomic_file *file) {
    if (file->stream) fclose(file->stream);
    /* After a successful rename the name is gone, and nobody else makes one like it. */
    if (file->temporary_path) unlink(file->temporary_path);
    free(file->temporary_path);
    memset(file, 0, sizeof *file);
}

/* ------------------------------------------------------------------------------------------------
 * Buffers and text
 */

void buffer_put(byte_buffer *buffer, const void *bytes, size_t n_bytes) {
    if (buffer->failed || n_bytes == 0) return;
    size_t needed;
    if (!size_add(buffer->n_bytes, n_bytes, &needed)) {
        buffer->failed = true;
        return;
    }
    if (needed > buffer->capacity) {
        size_t capacity = buffer->capacity ? buffer->capacity : 1024;
        while (capacity < needed && capacity <= SIZE_MAX / 2) capacity *= 2;
        uint8_t *grown = capacity < needed ? NULL : realloc(buffer->bytes, capacity);
        if (!grown) {
            buffer->failed = true;
            return;
        }
        buffer->bytes = grown;
        buffer->capacity = capacity;
    }
    memcpy(buffer->bytes + buffer->n_bytes, bytes, n_bytes);
    buffer->n_bytes = needed;
}

void buffer_put_text(byte_buffer *buffer, const char *text) { buffer_put(buffer, text, strlen(text)); }

void buffer_put_format(byte_buffer *buffer, const char *format, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (n < 0 || (size_t)n >= sizeof text)
        buffer->failed = true;
    else
        buffer_put(buffer, text, (size_t)n);
}

void buffer_free(byte_buffer *buffer) {
    free(buffer->bytes);
    memset(buffer, 0, sizeof *buffer);
}

bool format_real(char *out, size_t n_bytes, int n_digits, double value) {
    locale_t c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (!c_locale) return false;
    locale_t before = uselocale(c_locale);
    snprintf(out, n_bytes, "%.*g", n_digits, value);
    uselocale(before);
    freelocale(c_locale);
    return true;
}

bool utf8_valid(const char *text, size_t n_bytes) {
    const uint8_t *p = (const uint8_t *)text, *end = p + n_bytes;
    while (p < end) {
        uint32_t lead = *p++;
        if (lead < 0x80) continue;
        int n_more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
        if (lead < 0xc2 || lead > 0xf4 || end - p < n_more) return false;
        uint32_t point = lead & (0x3fu >> n_more);
        for (int i = 0; i < n_more; i++, p++) {
            if ((*p & 0xc0) != 0x80) return false;
            point = point << 6 | (*p & 0x3fu);
        }
        static const uint32_t least[4] = {0, 0x80, 0x800, 0x10000};
        if (point < least[n_more] || point > 0x10ffff || (point >= 0xd800 && point < 0xe000)) return false;
    }
    return true;
}

size_t first_not_finite(const float *values, size_t n) {
    for (size_t i = 0; i < n; i++)
        if ((float_bits(values[i]) & 0x7f800000u) == 0x7f800000u) return i;
    return n;
}

/* Geometric growth keeps an array in proportion to the input that fills it. */
bool array_grow(void **array, size_t count, size_t *capacity, size_t element_bytes) {
    if (count < *capacity) return true;
    size_t larger = *capacity ? *capacity * 2 : 16;
    void *grown = realloc(*array, larger * element_bytes);
    if (!grown) return false;
    *array = grown;
    *capacity = larger;
    return true;
}

uint32_t crc32_update(uint32_t crc, const void *bytes, size_t n_bytes) {
    /* The remainders of the 16 four-bit messages: small, and fast enough for files of megabytes. */
    static const uint32_t table[16] = {0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4,
                                       0x4db26158, 0x5005713c, 0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
                                       0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
    const uint8_t *p = bytes;
    crc = ~crc;
    for (size_t i = 0; i < n_bytes; i++) {
        crc ^= p[i];
        crc = crc >> 4 ^ table[crc & 15];
        crc = crc >> 4 ^ table[crc & 15];
    }
    return ~crc;
}
