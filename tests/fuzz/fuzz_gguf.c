/* fuzz_gguf.c - any bytes as a GGUF file. */
#include "fuzz/fuzz.h"

int fuzz_gguf(const uint8_t *bytes, size_t n_bytes) {
    byte_source source = source_from_memory(bytes, n_bytes, "fuzz");
    fuzz_zoo_file(zoo_gguf_read, &source);
    return 0;
}

FUZZ_ENTRY(fuzz_gguf)
