/*
 * text.h - tokens to calibrate and evaluate on: from a file, or written by the model itself.
 */
#ifndef OSCAR_TEXT_H
#define OSCAR_TEXT_H

#include "base/base.h"
#include <llama.h>

/* A text file, mapped. */
typedef struct text_file {
    const char *path; /* borrowed */
    char *bytes;      /* [n_bytes] not terminated */
    size_t n_bytes;
    uint64_t hash; /* xxh64 of all bytes */
} text_file;

/* Errors: IO, FORMAT (empty, or not UTF-8; position: the first bad byte). */
oscar_status text_open(text_file *text, const char *path, oscar_error *error);
void text_close(text_file *text); /* a zeroed one is allowed */

/* Chunks of tokens, each the beginning of a sequence of its own. */
typedef struct token_chunks {
    int32_t n_chunks;
    int32_t *length; /* [n_chunks] */
    int32_t **token; /* [n_chunks][length] */
    uint64_t hash;   /* xxh64 of what they came from */
} token_chunks;
void token_chunks_free(token_chunks *chunks);
int64_t token_chunks_total(const token_chunks *chunks);

/* The first n_chunks * chunk_tokens tokens of the text, in order. The first token of each chunk is
 * replaced by BOS when the vocabulary begins texts with it.
 * Errors: ARGUMENT (the text is too short; says how many tokens it has), MEMORY. */
oscar_status text_chunks_in_order(const struct llama_vocab *vocab, const text_file *text, int32_t n_chunks,
                                  int32_t chunk_tokens, token_chunks *out, oscar_error *error);
/* n_chunks chunks of chunk_tokens tokens from places spread evenly over the text, so that a file
 * made of several texts is seen in all its parts. From a text that is too short: all of it, in
 * fewer chunks. Never tokenises more than it needs. Errors: MEMORY, ARGUMENT (no tokens at all). */
oscar_status text_chunks_spread(const struct llama_vocab *vocab, const text_file *text, int32_t n_chunks,
                                int32_t chunk_tokens, token_chunks *out, oscar_error *error);

typedef void (*text_progress)(void *user, const char *what, int64_t done, int64_t total);

/* n_chunks chunks that the model writes itself from BOS at temperature 1, side by side.
 * Errors: UNSUPPORTED (no token to begin with), INTERNAL (libllama fails), MEMORY. */
oscar_status text_chunks_sampled(struct llama_model *model, int32_t n_chunks, int32_t chunk_tokens, uint64_t seed,
                                 int32_t n_threads, text_progress progress, void *user, token_chunks *out,
                                 oscar_error *error);

#endif
