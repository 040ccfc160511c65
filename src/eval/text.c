/* Text files to chunks of tokens. */
#include "eval/text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

/* Bytes of the UTF-8 sequence at p (n bytes left), or 0. */
static size_t utf8_sequence(const unsigned char *p, size_t n) {
    if (p[0] < 0x80) return 1;
    size_t length = p[0] >= 0xF0 ? 4 : p[0] >= 0xE0 ? 3 : 2;
    if (p[0] < 0xC2 || p[0] > 0xF4 || length > n) return 0;
    for (size_t i = 1; i < length; i++)
        if ((p[i] & 0xC0) != 0x80) return 0;
    if ((p[0] == 0xE0 && p[1] < 0xA0) || (p[0] == 0xED && p[1] > 0x9F) || (p[0] == 0xF0 && p[1] < 0x90) ||
        (p[0] == 0xF4 && p[1] > 0x8F))
        return 0;
    return length;
}

oscar_status text_open(text_file *text, const char *path, oscar_error *error) {
    memset(text, 0, sizeof *text);
    text->path = path;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat info;
    if (fd < 0) return error_set(error, OSCAR_ERROR_IO, -1, "cannot read %s: %s", path, strerror(errno));
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        close(fd);
        return error_set(error, OSCAR_ERROR_IO, -1, "%s is not a regular file", path);
    }
    if (info.st_size == 0) {
        close(fd);
        return error_set(error, OSCAR_ERROR_FORMAT, 0, "%s is empty, expected text", path);
    }
    void *bytes = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    int failure = errno;
    close(fd);
    if (bytes == MAP_FAILED) return error_set(error, OSCAR_ERROR_IO, -1, "cannot map %s: %s", path, strerror(failure));
    text->bytes = bytes;
    text->n_bytes = (size_t)info.st_size;
    for (size_t at = 0, step; at < text->n_bytes; at += step) {
        step = utf8_sequence((const unsigned char *)text->bytes + at, text->n_bytes - at);
        if (step == 0) {
            text_close(text);
            return error_set(error, OSCAR_ERROR_FORMAT, (int64_t)at, "%s is not UTF-8 text: bad byte at offset %zu", path, at);
        }
    }
    text->hash = XXH64(text->bytes, text->n_bytes, 0);
    return OSCAR_OK;
}

void text_close(text_file *text) {
    if (text->bytes) munmap(text->bytes, text->n_bytes);
    text->bytes = NULL;
}

void token_chunks_free(token_chunks *chunks) {
    for (int32_t i = 0; chunks->token && i < chunks->n_chunks; i++) free(chunks->token[i]);
    free(chunks->token);
    free(chunks->length);
    memset(chunks, 0, sizeof *chunks);
}

int64_t token_chunks_total(const token_chunks *chunks) {
    int64_t total = 0;
    for (int32_t i = 0; i < chunks->n_chunks; i++) total += chunks->length[i];
    return total;
}

static oscar_status no_memory(oscar_error *error) {
    return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for tokens");
}

/* A place where no UTF-8 sequence is cut: at or after `at`, behind a line break when one is near. */
static size_t clean_start(const text_file *text, size_t at) {
    if (at == 0) return 0;
    for (size_t i = at; i < text->n_bytes && i < at + 400; i++)
        if (text->bytes[i - 1] == '\n') return i;
    while (at < text->n_bytes && ((unsigned char)text->bytes[at] & 0xC0) == 0x80) at++;
    return at;
}

/* Tokens of bytes [from, to); at least `want` of them if the text has so many. *tokens is malloc'ed.
 * Reads as little of a long text as it needs: what is cut off at the end may be tokenised
 * differently, so a few tokens more than wanted must be there. */
static oscar_status tokenize(const struct llama_vocab *vocab, const text_file *text, size_t from, size_t to,
                             int64_t want, int32_t **tokens, int64_t *n_tokens, oscar_error *error) {
    *tokens = NULL;
    *n_tokens = 0;
    size_t bytes = (size_t)want * 6 + 4096;
    for (;; bytes *= 2) {
        bool all = bytes >= to - from;
        size_t end = all ? to : clean_start(text, from + bytes);
        if (end > to) end = to;
        if (end - from > INT32_MAX / 2)
            return error_set(error, OSCAR_ERROR_UNSUPPORTED, -1, "%s: %zu bytes are too many for one tokenisation", text->path, end - from);
        int32_t capacity = (int32_t)(end - from) + 16;
        int32_t *out = realloc(*tokens, (size_t)capacity * sizeof *out);
        if (!out) {
            free(*tokens);
            *tokens = NULL;
            return no_memory(error);
        }
        *tokens = out;
        int32_t n = llama_tokenize(vocab, text->bytes + from, (int32_t)(end - from), out, capacity, false, false);
        if (n < 0) {
            free(out);
            *tokens = NULL;
            return error_set(error, OSCAR_ERROR_INTERNAL, -1, "llama_tokenize returned %d for %zu bytes", n, end - from);
        }
        *n_tokens = n;
        if (all || end == to || n >= want + 64) return OSCAR_OK;
    }
}

static bool chunks_alloc(token_chunks *chunks, int32_t n_chunks) {
    memset(chunks, 0, sizeof *chunks);
    chunks->length = calloc((size_t)n_chunks, sizeof *chunks->length);
    chunks->token = calloc((size_t)n_chunks, sizeof *chunks->token);
    chunks->n_chunks = n_chunks;
    return chunks->length && chunks->token;
}

static bool set_chunk(const struct llama_vocab *vocab, token_chunks *chunks, int32_t i, const int32_t *tokens, int32_t n) {
    chunks->token[i] = malloc((size_t)n * sizeof *tokens);
    if (!chunks->token[i]) return false;
    memcpy(chunks->token[i], tokens, (size_t)n * sizeof *tokens);
    chunks->length[i] = n;
    if (llama_vocab_get_add_bos(vocab)) chunks->token[i][0] = llama_vocab_bos(vocab);
    return true;
}

/* Cuts tokens [n] into chunks; the last may be shorter. */
static oscar_status cut(const struct llama_vocab *vocab, const text_file *text, const int32_t *tokens, int64_t n,
                        int32_t n_chunks, int32_t chunk_tokens, token_chunks *out, oscar_error *error) {
    bool ok = chunks_alloc(out, n_chunks);
    for (int32_t i = 0; ok && i < n_chunks; i++) {
        int64_t from = (int64_t)i * chunk_tokens, left = n - from;
        ok = set_chunk(vocab, out, i, tokens + from, left < chunk_tokens ? (int32_t)left : chunk_tokens);
    }
    out->hash = text->hash;
    if (ok) return OSCAR_OK;
    token_chunks_free(out);
    return no_memory(error);
}

oscar_status text_chunks_in_order(const struct llama_vocab *vocab, const text_file *text, int32_t n_chunks,
                                  int32_t chunk_tokens, token_chunks *out, oscar_error *error) {
    memset(out, 0, sizeof *out);
    int32_t *tokens;
    int64_t n, want = (int64_t)n_chunks * chunk_tokens;
    oscar_status status = tokenize(vocab, text, 0, text->n_bytes, want, &tokens, &n, error);
    if (status != OSCAR_OK) return status;
    if (n < want)
        status = error_set(error, OSCAR_ERROR_ARGUMENT, -1, "%s has %lld tokens, expected at least %lld (%d chunks of %d)",
                           text->path, (long long)n, (long long)want, n_chunks, chunk_tokens);
    else
        status = cut(vocab, text, tokens, want, n_chunks, chunk_tokens, out, error);
    free(tokens);
    return status;
}

/* All of a short text. */
static oscar_status everything(const struct llama_vocab *vocab, const text_file *text, int64_t want, int32_t chunk_tokens,
                               token_chunks *out, oscar_error *error) {
    int32_t *tokens;
    int64_t n;
    oscar_status status = tokenize(vocab, text, 0, text->n_bytes, want, &tokens, &n, error);
    if (status != OSCAR_OK) return status;
    if (n > want) n = want;
    if (n < 1)
        status = error_set(error, OSCAR_ERROR_ARGUMENT, -1, "%s has no tokens", text->path);
    else
        status = cut(vocab, text, tokens, n, (int32_t)((n + chunk_tokens - 1) / chunk_tokens), chunk_tokens, out, error);
    free(tokens);
    return status;
}

oscar_status text_chunks_spread(const struct llama_vocab *vocab, const text_file *text, int32_t n_chunks,
                                int32_t chunk_tokens, token_chunks *out, oscar_error *error) {
    memset(out, 0, sizeof *out);
    size_t part = text->n_bytes / (size_t)n_chunks;
    bool enough = part / 2 > (size_t)chunk_tokens;
    if (enough && !chunks_alloc(out, n_chunks)) return no_memory(error);
    out->hash = text->hash;
    for (int32_t i = 0; enough && i < n_chunks; i++) {
        size_t from = clean_start(text, (size_t)i * part);
        size_t to = i + 1 < n_chunks ? clean_start(text, (size_t)(i + 1) * part) : text->n_bytes;
        int32_t *tokens;
        int64_t n;
        oscar_status status = tokenize(vocab, text, from, to, chunk_tokens, &tokens, &n, error);
        if (status == OSCAR_OK && n >= chunk_tokens && !set_chunk(vocab, out, i, tokens, chunk_tokens)) status = no_memory(error);
        free(tokens);
        if (status != OSCAR_OK) {
            token_chunks_free(out);
            return status;
        }
        enough = n >= chunk_tokens;
    }
    if (enough) return OSCAR_OK;
    token_chunks_free(out);
    return everything(vocab, text, (int64_t)n_chunks * chunk_tokens, chunk_tokens, out, error);
}
