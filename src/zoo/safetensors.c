/*
 * safetensors.c - the header of a safetensors file, read strictly.
 *
 * The header is JSON of one known shape, so the reader is a grammar without recursion:
 *   { "__metadata__": {string: string, ...},
 *     name: {"dtype": string, "shape": [n, ...], "data_offsets": [begin, end]}, ... }
 * Strings are unescaped in place: an unescaped string is never longer than its literal, and the
 * closing quote becomes its terminator. So a hostile header costs little more memory than itself.
 */
#include <stdlib.h>

#include "zoo/zoo.h"

typedef struct reader {
    const byte_source *source;
    oscar_error *error;
    char *text;      /* [size] the header, one zero byte behind it */
    size_t size, at; /* of the header */
    st_table *table;
    size_t tensors_capacity, meta_capacity;
} reader;

/* Bytes in front of the header: its length. */
#define PREFIX_BYTES 8

static oscar_status fail(reader *r, size_t at, const char *found, const char *expected) {
    return error_set(r->error, OSCAR_ERROR_FORMAT, (int64_t)(PREFIX_BYTES + at),
                     "%s: header, byte %zu: found %s, expected %s", r->source->name, PREFIX_BYTES + at, found,
                     expected);
}

static void skip_space(reader *r) {
    while (r->at < r->size &&
           (r->text[r->at] == ' ' || r->text[r->at] == '\t' || r->text[r->at] == '\n' || r->text[r->at] == '\r'))
        r->at++;
}

static bool accept_char(reader *r, char c) {
    skip_space(r);
    if (r->at >= r->size || r->text[r->at] != c) return false;
    r->at++;
    return true;
}

static oscar_status expect_char(reader *r, char c) {
    if (accept_char(r, c)) return OSCAR_OK;
    char expected[8], found[16];
    snprintf(expected, sizeof expected, "'%c'", c);
    uint8_t byte = r->at < r->size ? (uint8_t)r->text[r->at] : 0;
    if (r->at >= r->size)
        snprintf(found, sizeof found, "its end");
    else if (byte >= 0x20 && byte < 0x7f)
        snprintf(found, sizeof found, "'%c'", byte);
    else
        snprintf(found, sizeof found, "byte 0x%02x", byte);
    return fail(r, r->at, found, expected);
}

/* Four hex digits at r->at; -1 when they are not. */
static int32_t read_hex4(reader *r) {
    if (r->size - r->at < 4) return -1;
    int32_t value = 0;
    for (int i = 0; i < 4; i++) {
        char c = r->text[r->at + (size_t)i];
        int32_t digit = c >= '0' && c <= '9'   ? c - '0'
                        : c >= 'a' && c <= 'f' ? c - 'a' + 10
                        : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                               : -1;
        if (digit < 0) return -1;
        value = value << 4 | digit;
    }
    r->at += 4;
    return value;
}

static char *put_utf8(char *out, uint32_t point) {
    if (point < 0x80) {
        *out++ = (char)point;
    } else if (point < 0x800) {
        *out++ = (char)(0xc0 | point >> 6);
        *out++ = (char)(0x80 | (point & 0x3f));
    } else if (point < 0x10000) {
        *out++ = (char)(0xe0 | point >> 12);
        *out++ = (char)(0x80 | (point >> 6 & 0x3f));
        *out++ = (char)(0x80 | (point & 0x3f));
    } else {
        *out++ = (char)(0xf0 | point >> 18);
        *out++ = (char)(0x80 | (point >> 12 & 0x3f));
        *out++ = (char)(0x80 | (point >> 6 & 0x3f));
        *out++ = (char)(0x80 | (point & 0x3f));
    }
    return out;
}

/* \uXXXX, the \u already read; a pair of surrogates is one character. */
static oscar_status read_unicode_escape(reader *r, char **out) {
    size_t start = r->at;
    int32_t unit = read_hex4(r);
    if (unit < 0) return fail(r, start, "a bad \\u escape", "four hex digits");
    if (unit == 0) return fail(r, start, "\\u0000", "text without NUL");
    uint32_t point = (uint32_t)unit;
    if (unit >= 0xd800 && unit < 0xe000) {
        bool pair = unit < 0xdc00 && r->size - r->at >= 6 && r->text[r->at] == '\\' && r->text[r->at + 1] == 'u';
        int32_t low = -1;
        if (pair) {
            r->at += 2;
            low = read_hex4(r);
        }
        if (low < 0xdc00 || low >= 0xe000) return fail(r, start, "half a surrogate pair", "a whole one");
        point = 0x10000u + ((uint32_t)(unit - 0xd800) << 10) + (uint32_t)(low - 0xdc00);
    }
    *out = put_utf8(*out, point);
    return OSCAR_OK;
}

static oscar_status read_string(reader *r, const char **out) {
    oscar_status status = expect_char(r, '"');
    if (status) return status;
    size_t start = r->at;
    char *begin = r->text + start, *end = begin;
    for (;;) {
        if (r->at >= r->size) return fail(r, start, "a string without end", "a closing quote");
        char c = r->text[r->at++];
        if (c == '"') break;
        if ((uint8_t)c < 0x20) return fail(r, r->at - 1, "a control character", "an escape");
        if (c != '\\') {
            *end++ = c;
            continue;
        }
        c = r->at < r->size ? r->text[r->at++] : '\0';
        static const char escapes[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
        const char *known = c ? strchr(escapes, c) : NULL;
        if (known)
            *end++ = meanings[known - escapes];
        else if (c != 'u')
            return fail(r, r->at - 1, "an unknown escape", "one of \" \\ / b f n r t u");
        else if ((status = read_unicode_escape(r, &end)))
            return status;
    }
    if (!utf8_valid(begin, (size_t)(end - begin))) return fail(r, start, "a string that is not UTF-8", "UTF-8");
    *end = '\0'; /* at the closing quote or before it */
    *out = begin;
    return OSCAR_OK;
}

/* A whole number without sign, fraction or exponent, below 2^64. */
static oscar_status read_number(reader *r, uint64_t *out) {
    skip_space(r);
    size_t start = r->at;
    uint64_t value = 0;
    while (r->at < r->size && r->text[r->at] >= '0' && r->text[r->at] <= '9') {
        uint64_t digit = (uint64_t)(r->text[r->at] - '0');
        if (__builtin_mul_overflow(value, 10u, &value) || __builtin_add_overflow(value, digit, &value))
            return fail(r, start, "a number of 2^64 or more", "a smaller one");
        r->at++;
    }
    if (r->at == start) return fail(r, start, "something else", "a whole number");
    if (r->text[start] == '0' && r->at - start > 1) return fail(r, start, "a leading zero", "none");
    *out = value;
    return OSCAR_OK;
}

/* [n, ...], at most `most` numbers. */
static oscar_status read_numbers(reader *r, uint64_t *out, int32_t most, int32_t *n) {
    oscar_status status = expect_char(r, '[');
    *n = 0;
    if (status || accept_char(r, ']')) return status;
    do {
        if (*n == most) {
            char expected[32];
            snprintf(expected, sizeof expected, "at most %d", most);
            return fail(r, r->at, "more numbers", expected);
        }
        if ((status = read_number(r, &out[(*n)++]))) return status;
    } while (accept_char(r, ','));
    return expect_char(r, ']');
}

static oscar_status no_memory(reader *r) {
    return error_set(r->error, OSCAR_ERROR_MEMORY, -1, "%s: no memory for its header", r->source->name);
}

static oscar_status read_metadata(reader *r) {
    st_table *t = r->table;
    oscar_status status = expect_char(r, '{');
    if (status || accept_char(r, '}')) return status;
    do {
        st_meta meta;
        if ((status = read_string(r, &meta.key)) || (status = expect_char(r, ':')) ||
            (status = read_string(r, &meta.value)))
            return status;
        if (!array_grow((void **)&t->meta, (size_t)t->n_meta, &r->meta_capacity, sizeof meta)) return no_memory(r);
        t->meta[t->n_meta++] = meta;
    } while (accept_char(r, ','));
    return expect_char(r, '}');
}

/* Bytes of one element, 0 for a dtype that the format does not have. */
static uint32_t dtype_bytes(const char *dtype) {
    static const struct {
        const char *name;
        uint32_t bytes;
    } known[] = {{"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1},
                 {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},
                 {"U32", 4},  {"F32", 4}, {"I64", 8}, {"U64", 8},     {"F64", 8}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(known[i].name, dtype)) return known[i].bytes;
    return 0;
}

static oscar_status tensor_fail(reader *r, const st_tensor *t, const char *what) {
    return error_set(r->error, OSCAR_ERROR_FORMAT, (int64_t)t->entry_offset, "%s: tensor %s: %s", r->source->name,
                     t->name, what);
}

/* The range in the data must be what shape and dtype say. Turns offsets into file offsets. */
static oscar_status place_tensor(reader *r, st_tensor *t, const uint64_t *range) {
    char what[120];
    uint64_t bytes = dtype_bytes(t->dtype);
    uint64_t data_bytes = r->source->size - PREFIX_BYTES - r->size;
    if (bytes == 0) {
        snprintf(what, sizeof what, "unknown dtype \"%.40s\"", t->dtype);
        return tensor_fail(r, t, what);
    }
    for (int32_t i = 0; i < t->n_dims; i++)
        if (__builtin_mul_overflow(bytes, t->shape[i], &bytes)) return tensor_fail(r, t, "its shape overflows");
    unsigned long long begin = range[0], end = range[1];
    if (begin > end)
        snprintf(what, sizeof what, "begins at %llu, behind its end %llu", begin, end);
    else if (end > data_bytes)
        snprintf(what, sizeof what, "truncated: ends at %llu of %llu data bytes", end, (unsigned long long)data_bytes);
    else if (end - begin != bytes)
        snprintf(what, sizeof what, "data_offsets hold %llu bytes, shape and dtype %llu", end - begin,
                 (unsigned long long)bytes);
    else {
        t->begin = PREFIX_BYTES + r->size + begin;
        t->end = PREFIX_BYTES + r->size + end;
        return OSCAR_OK;
    }
    return tensor_fail(r, t, what);
}

static oscar_status read_tensor(reader *r, const char *name, size_t entry_at) {
    st_tensor tensor = {.name = name, .entry_offset = PREFIX_BYTES + entry_at};
    uint64_t range[2] = {0, 0};
    int32_t n_range = 0;
    bool have_dtype = false, have_shape = false, have_range = false;
    oscar_status status = expect_char(r, '{');
    if (status) return status;
    do {
        const char *key;
        if ((status = read_string(r, &key)) || (status = expect_char(r, ':'))) return status;
        bool *have = !strcmp(key, "dtype")          ? &have_dtype
                     : !strcmp(key, "shape")        ? &have_shape
                     : !strcmp(key, "data_offsets") ? &have_range
                                                    : NULL;
        if (!have) return tensor_fail(r, &tensor, "a field other than dtype, shape, data_offsets");
        if (*have) return tensor_fail(r, &tensor, "a field twice");
        *have = true;
        if (have == &have_dtype)
            status = read_string(r, &tensor.dtype);
        else if (have == &have_shape)
            status = read_numbers(r, tensor.shape, SAFETENSORS_MAX_DIMS, &tensor.n_dims);
        else
            status = read_numbers(r, range, 2, &n_range);
        if (status) return status;
    } while (accept_char(r, ','));
    if ((status = expect_char(r, '}'))) return status;
    if (!have_dtype || !have_shape || !have_range)
        return tensor_fail(r, &tensor, "one of dtype, shape, data_offsets is missing");
    if (n_range != 2) return tensor_fail(r, &tensor, "data_offsets has not two numbers");
    if ((status = place_tensor(r, &tensor, range))) return status;
    st_table *t = r->table;
    if (!array_grow((void **)&t->tensors, (size_t)t->n_tensors, &r->tensors_capacity, sizeof tensor))
        return no_memory(r);
    t->tensors[t->n_tensors++] = tensor;
    return OSCAR_OK;
}

static oscar_status read_header(reader *r) {
    if (r->text[0] != '{') return fail(r, 0, "something else", "a JSON object");
    bool have_metadata = false;
    oscar_status status = expect_char(r, '{');
    if (status) return status;
    if (!accept_char(r, '}')) {
        do {
            const char *name;
            skip_space(r);
            size_t entry_at = r->at;
            if ((status = read_string(r, &name)) || (status = expect_char(r, ':'))) return status;
            if (strcmp(name, "__metadata__")) {
                status = read_tensor(r, name, entry_at);
            } else {
                if (have_metadata) return fail(r, entry_at, "__metadata__ twice", "it once");
                have_metadata = true;
                status = read_metadata(r);
            }
            if (status) return status;
        } while (accept_char(r, ','));
        if ((status = expect_char(r, '}'))) return status;
    }
    skip_space(r);
    if (r->at != r->size) return fail(r, r->at, "more text", "the end of the header");
    return OSCAR_OK;
}

static int compare_place(const void *a, const void *b) {
    const st_tensor *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}
static int compare_name(const void *a, const void *b) {
    return strcmp(((const st_tensor *)a)->name, ((const st_tensor *)b)->name);
}
static int compare_key(const void *a, const void *b) {
    return strcmp(((const st_meta *)a)->key, ((const st_meta *)b)->key);
}

/* Every byte of the data belongs to exactly one tensor, every name occurs once. */
static oscar_status check_table(reader *r) {
    st_table *t = r->table;
    uint64_t at = PREFIX_BYTES + r->size;
    char what[120];
    if (t->n_tensors) qsort(t->tensors, (size_t)t->n_tensors, sizeof *t->tensors, compare_place);
    for (int32_t i = 0; i < t->n_tensors; i++) {
        const st_tensor *tensor = &t->tensors[i];
        if (tensor->begin != at) {
            snprintf(what, sizeof what, "%s at byte %llu, expected its data at %llu",
                     tensor->begin < at ? "overlaps another" : "leaves a hole", (unsigned long long)tensor->begin,
                     (unsigned long long)at);
            return tensor_fail(r, tensor, what);
        }
        at = tensor->end;
    }
    if (at != r->source->size)
        return error_set(r->error, OSCAR_ERROR_FORMAT, (int64_t)at,
                         "%s: the tensors end at byte %llu, the file at %llu", r->source->name, (unsigned long long)at,
                         (unsigned long long)r->source->size);
    if (t->n_tensors) qsort(t->tensors, (size_t)t->n_tensors, sizeof *t->tensors, compare_name);
    for (int32_t i = 1; i < t->n_tensors; i++)
        if (!compare_name(&t->tensors[i - 1], &t->tensors[i]))
            return tensor_fail(r, &t->tensors[i], "its name occurs twice");
    if (t->n_meta) qsort(t->meta, (size_t)t->n_meta, sizeof *t->meta, compare_key);
    for (int32_t i = 1; i < t->n_meta; i++)
        if (!compare_key(&t->meta[i - 1], &t->meta[i]))
            return error_set(r->error, OSCAR_ERROR_FORMAT, (int64_t)(PREFIX_BYTES + (t->meta[i].key - r->text)),
                             "%s: metadata key %s occurs twice", r->source->name, t->meta[i].key);
    return OSCAR_OK;
}

oscar_status st_table_read(st_table *table, const byte_source *source, oscar_error *error) {
    memset(table, 0, sizeof *table);
    uint8_t prefix[PREFIX_BYTES];
    oscar_status status = source_read(source, 0, PREFIX_BYTES, prefix, "the header length", error);
    if (status) return status;
    uint64_t size = load_u64(prefix);
    if (size < 2 || size > SAFETENSORS_MAX_HEADER_BYTES)
        return error_set(error, OSCAR_ERROR_FORMAT, 0, "%s: header length: found %llu, expected 2 to %u", source->name,
                         (unsigned long long)size, SAFETENSORS_MAX_HEADER_BYTES);
    uint8_t *header;
    status = source_read_alloc(source, PREFIX_BYTES, size, &header, "the header", error);
    if (status) return status;
    table->header = (char *)header;
    reader r = {.source = source, .error = error, .text = table->header, .size = (size_t)size, .table = table};
    status = read_header(&r);
    if (!status) status = check_table(&r);
    if (status) st_table_free(table);
    return status;
}

void st_table_free(st_table *table) {
    free(table->header);
    free(table->tensors);
    free(table->meta);
    memset(table, 0, sizeof *table);
}

const st_tensor *st_table_find(const st_table *table, const char *name) {
    st_tensor key = {.name = name};
    if (table->n_tensors == 0) return NULL;
    return bsearch(&key, table->tensors, (size_t)table->n_tensors, sizeof key, compare_name);
}

const char *st_table_meta(const st_table *table, const char *key) {
    st_meta wanted = {.key = key};
    if (table->n_meta == 0) return NULL;
    const st_meta *found = bsearch(&wanted, table->meta, (size_t)table->n_meta, sizeof wanted, compare_key);
    return found ? found->value : NULL;
}

void json_put_string(byte_buffer *buffer, const char *text) {
    buffer_put(buffer, "\"", 1);
    for (; *text; text++) {
        uint8_t c = (uint8_t)*text;
        if (c == '"' || c == '\\') buffer_put(buffer, "\\", 1);
        if (c < 0x20)
            buffer_put_format(buffer, "\\u%04x", c);
        else
            buffer_put(buffer, text, 1);
    }
    buffer_put(buffer, "\"", 1);
}
