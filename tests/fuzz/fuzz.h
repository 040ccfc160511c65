/*
 * fuzz.h - what the fuzz targets share. A target is a function of bytes that aborts when a reader
 * breaks its promises; under libFuzzer it is the entry point, in test_zoo_fuzz.c a plain function.
 */
#ifndef OSCAR_FUZZ_H
#define OSCAR_FUZZ_H

#include <stdlib.h>

#include "zoo/zoo.h"

int fuzz_rotations(const uint8_t *bytes, size_t n_bytes);
int fuzz_pt(const uint8_t *bytes, size_t n_bytes);
int fuzz_gguf(const uint8_t *bytes, size_t n_bytes);

#ifdef OSCAR_FUZZ_REPLAY
#define FUZZ_ENTRY(target)
#else
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes);
#define FUZZ_ENTRY(target)                                                                         \
    int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes) { return target(bytes, n_bytes); }
#endif

/* Reads with a reader of .pt or GGUF and touches all that it lists; whatever was read converts to
 * rotations or is refused. */
static inline void fuzz_zoo_file(oscar_status (*read)(oscar_zoo_file **, const byte_source *, oscar_error *),
                                 const byte_source *source) {
    oscar_error error = {0};
    oscar_zoo_file *file;
    oscar_status status = read(&file, source, &error);
    if (status != OSCAR_OK) {
        if (file || error.status != status || !error.message[0]) abort();
        return;
    }
    oscar_zoo_tensor t;
    for (int32_t i = 0; oscar_zoo_get_tensor(file, i, &t) == OSCAR_OK; i++)
        if (!t.name || !t.dtype || t.n_dims < 0 || t.n_dims > OSCAR_ZOO_MAX_DIMS) abort();
    for (int32_t i = 0; oscar_zoo_metadata_key(file, i); i++)
        if (!oscar_zoo_metadata_value(file, i)) abort();
    const oscar_layer layer = {.n_kv_heads = 2, .n_q_heads = 2, .head_dim = 16};
    oscar_rotations *rotations;
    status = oscar_zoo_to_rotations(&rotations, file, file, &layer, 1, NULL);
    if ((status == OSCAR_OK) != (rotations != NULL)) abort();
    oscar_rotations_free(rotations);
    oscar_zoo_free(file);
}

#endif
