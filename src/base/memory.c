/*
 * memory.c - aligned memory, and address space that is paid for when touched.
 */
#include "base/base.h"

#include <stdlib.h>
#include <sys/mman.h>

void *aligned_calloc(size_t count, size_t size) {
    size_t bytes;
    if (!size_mul(count, size, &bytes) || !size_add(bytes, 63, &bytes)) return NULL;
    /* A whole number of cache lines, and never none: NULL means failure alone. */
    bytes &= ~(size_t)63;
    if (bytes == 0) bytes = 64;
    void *memory = NULL;
    if (posix_memalign(&memory, 64, bytes) != 0) return NULL;
    memset(memory, 0, bytes);
    return memory;
}

void aligned_free(void *memory) {
    free(memory);
}

void *region_reserve(size_t bytes) {
    if (bytes == 0) return NULL;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void region_prefer_large(void *memory, size_t bytes) {
#ifdef MADV_HUGEPAGE
    /* Advice: where the system has no large pages, or will not give them, the small ones serve. */
    (void)madvise(memory, bytes, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

void region_release(void *memory, size_t bytes) {
    if (memory) munmap(memory, bytes);
}
