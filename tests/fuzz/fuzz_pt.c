/*
 * fuzz_pt.c - any bytes as a RotationZoo archive, and as its pickle alone, which the archive's CRCs
 * would otherwise keep out of reach of changed bytes.
 */
#include <stdlib.h>

#include "fuzz/fuzz.h"
#include "zoo/pt.h"

int fuzz_pt(const uint8_t *bytes, size_t n_bytes) {
    byte_source source = source_from_memory(bytes, n_bytes, "fuzz");
    oscar_error error = {0};
    fuzz_zoo_file(zoo_pt_read, &source);
    pickle p;
    oscar_status status = pickle_read(&p, bytes, n_bytes, "fuzz", &error);
    if (status != OSCAR_OK && (p.values || error.status != status)) abort();
    if (status == OSCAR_OK) pickle_get(&p, p.root, "layers");
    pickle_free(&p);
    return 0;
}

FUZZ_ENTRY(fuzz_pt)
