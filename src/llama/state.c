/*
 * state.c - saving and restoring sequences.
 *
 * Not supported yet: the cache has no saved form. Callers take a size of 0 for a state that is
 * empty and restore it with success, so the size is 1 and everything else says that it failed.
 */
#include "llama/layer.h"

size_t state_size(oscar_llama *layer) {
    (void)layer;
    return 1;
}

size_t state_refuse(oscar_llama *layer, const char *function) {
    layer_log(layer, "%s() is not supported: this cache cannot be saved or restored", function);
    return 0;
}
