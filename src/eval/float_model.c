/* float_model.c - see float_model.h. Reading and writing GGUF is ggml's. */
#include "eval/float_model.h"

#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "ggml.h"
#include "gguf.h"

#define GENERAL_FILE_TYPE "general.file_type"

typedef struct model_copy {
    struct gguf_context *in, *out;
    struct ggml_context *tensors; /* of `in`: shapes and types, no data */
    FILE *data;                   /* `in` once more, for the data */
    FILE *file;                   /* the copy being written */
} model_copy;

/* The copy's header: the same metadata, the same tensors as float32. */
static void describe(model_copy *c) {
    gguf_set_kv(c->out, c->in);
    gguf_set_val_u32(c->out, GENERAL_FILE_TYPE, 0);
    for (struct ggml_tensor *t = ggml_get_first_tensor(c->tensors); t; t = ggml_get_next_tensor(c->tensors, t)) {
        gguf_add_tensor(c->out, t);
        gguf_set_tensor_type(c->out, ggml_get_name(t), GGML_TYPE_F32);
    }
}

static bool pad_to(FILE *file, size_t alignment) {
    long at = ftell(file);
    if (at < 0) return false;
    size_t n = (alignment - (size_t)at % alignment) % alignment;
    for (size_t i = 0; i < n; i++)
        if (fputc(0, file) == EOF) return false;
    return true;
}

/* One tensor, row by row through ggml's own conversion. */
static oscar_status copy_tensor(model_copy *c, const struct ggml_tensor *t, const char *to, oscar_error *error) {
    const struct ggml_type_traits *traits = ggml_get_type_traits(t->type);
    if (t->type != GGML_TYPE_F32 && !traits->to_float)
        return error_set(error, OSCAR_ERROR_UNSUPPORTED, -1, "tensor %s: type %s cannot be widened", t->name, traits->type_name);
    int64_t id = gguf_find_tensor(c->in, t->name);
    size_t row_bytes = ggml_row_size(t->type, t->ne[0]), n = (size_t)t->ne[0];
    if (fseek(c->data, (long)(gguf_get_data_offset(c->in) + gguf_get_tensor_offset(c->in, id)), SEEK_SET) != 0)
        return error_set(error, OSCAR_ERROR_IO, -1, "tensor %s: %s", t->name, strerror(errno));
    uint8_t *row = aligned_calloc(row_bytes, 1);
    float *wide = aligned_calloc(n, sizeof(float));
    oscar_status status = row && wide ? OSCAR_OK : error_set(error, OSCAR_ERROR_MEMORY, -1, "tensor %s: no memory", t->name);
    for (int64_t r = 0; status == OSCAR_OK && r < ggml_nrows(t); r++) {
        if (fread(row, 1, row_bytes, c->data) != row_bytes) {
            status = error_set(error, OSCAR_ERROR_FORMAT, -1, "tensor %s is truncated", t->name);
            break;
        }
        if (t->type == GGML_TYPE_F32)
            memcpy(wide, row, n * sizeof(float));
        else
            traits->to_float(row, wide, (int64_t)n);
        if (fwrite(wide, sizeof(float), n, c->file) != n)
            status = error_set(error, OSCAR_ERROR_IO, -1, "%s: %s", to, strerror(errno));
    }
    aligned_free(row);
    aligned_free(wide);
    if (status == OSCAR_OK && !pad_to(c->file, gguf_get_alignment(c->out)))
        status = error_set(error, OSCAR_ERROR_IO, -1, "%s: %s", to, strerror(errno));
    return status;
}

/* The copy is run from memory: one that does not fit is refused before it is written. */
static oscar_status check_size(const model_copy *c, const char *from, oscar_error *error) {
    double bytes = 0, memory = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    for (struct ggml_tensor *t = ggml_get_first_tensor(c->tensors); t; t = ggml_get_next_tensor(c->tensors, t))
        bytes += (double)ggml_nelements(t) * sizeof(float);
    if (bytes <= memory * 0.7) return OSCAR_OK;
    return error_set(error, OSCAR_ERROR_MEMORY, -1, "%s takes %.1f GiB in float32, this machine has %.1f GiB; --weights as-is runs it as it is",
                     from, bytes / (1 << 30), memory / (1 << 30));
}

static oscar_status write_copy(model_copy *c, const char *to, text_progress progress, oscar_error *error) {
    describe(c);
    size_t n_meta = gguf_get_meta_size(c->out);
    uint8_t *meta = aligned_calloc(n_meta, 1);
    if (!meta) return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for %zu bytes of metadata", n_meta);
    gguf_get_meta_data(c->out, meta);
    bool ok = fwrite(meta, 1, n_meta, c->file) == n_meta;
    aligned_free(meta);
    if (!ok) return error_set(error, OSCAR_ERROR_IO, -1, "%s: %s", to, strerror(errno));
    int64_t done = 0, total = gguf_get_n_tensors(c->in);
    for (struct ggml_tensor *t = ggml_get_first_tensor(c->tensors); t; t = ggml_get_next_tensor(c->tensors, t)) {
        oscar_status status = copy_tensor(c, t, to, error);
        if (status != OSCAR_OK) return status;
        if (progress) progress(NULL, "widening the weights", ++done, total);
    }
    if (fflush(c->file) != 0 || fsync(fileno(c->file)) != 0) return error_set(error, OSCAR_ERROR_IO, -1, "%s: %s", to, strerror(errno));
    return OSCAR_OK;
}

oscar_status float_model_write(const char *from, const char *to, text_progress progress,
                               oscar_error *error) {
    char part[4096];
    if (snprintf(part, sizeof part, "%s.%ld.part", to, (long)getpid()) >= (int)sizeof part)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "path too long: %s", to);
    model_copy c = {0};
    c.in = gguf_init_from_file(from, (struct gguf_init_params){.no_alloc = true, .ctx = &c.tensors});
    if (!c.in) return error_set(error, OSCAR_ERROR_FORMAT, -1, "%s: not a readable GGUF file", from);
    oscar_status status = check_size(&c, from, error);
    if (status != OSCAR_OK) {
        gguf_free(c.in);
        ggml_free(c.tensors);
        return status;
    }
    c.out = gguf_init_empty();
    c.data = fopen(from, "rb");
    c.file = c.data ? fopen(part, "wb") : NULL;
    status = c.out && c.file ? write_copy(&c, to, progress, error)
                                          : error_set(error, OSCAR_ERROR_IO, -1, "%s: %s", c.data ? part : from, strerror(errno));
    if (c.file && fclose(c.file) != 0 && status == OSCAR_OK) status = error_set(error, OSCAR_ERROR_IO, -1, "%s: %s", to, strerror(errno));
    if (status == OSCAR_OK && rename(part, to) != 0) status = error_set(error, OSCAR_ERROR_IO, -1, "%s: %s", to, strerror(errno));
    if (status != OSCAR_OK && c.file) unlink(part);
    if (c.data) fclose(c.data);
    if (c.out) gguf_free(c.out);
    gguf_free(c.in);
    ggml_free(c.tensors);
    return status;
}
