/*
 * fuzz_rotations.c - any bytes as a rotation file of ours. What loads must satisfy
 * rotations_check(). Build as tests/fuzz/README.md says; test_zoo_fuzz.c replays the corpus.
 */
#include <stdlib.h>

#include "fuzz/fuzz.h"

int fuzz_rotations(const uint8_t *bytes, size_t n_bytes) {
    byte_source source = source_from_memory(bytes, n_bytes, "fuzz");
    oscar_error error = {0};
    oscar_rotations *rotations;
    oscar_status status = rotation_file_read(&rotations, &source, &error);
    if (status == OSCAR_OK && rotations_check(rotations, NULL) != OSCAR_OK) abort();
    if (status != OSCAR_OK && (rotations || error.status != status || !error.message[0])) abort();
    oscar_rotations_free(rotations);
    return 0;
}

FUZZ_ENTRY(fuzz_rotations)
