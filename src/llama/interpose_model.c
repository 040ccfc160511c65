/*
 * interpose_model.c - models that a program loads without their weights.
 *
 * Programs that fit their options to the machine's memory load a model with no_alloc and make a
 * context of it, to ask what it would take. Nothing can be computed on it, so its context cannot be
 * started, and a model does not tell: it is remembered by its address.
 */
#include <pthread.h>
#include <stdlib.h>

#include "llama/interpose_table.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct hollow {
    const struct llama_model *model;
    struct hollow *next;
} hollow;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static hollow *hollows;

bool interpose_has_weights(const struct llama_model *model) {
    pthread_mutex_lock(&lock);
    hollow *h = hollows;
    while (h && h->model != model) h = h->next;
    pthread_mutex_unlock(&lock);
    return h == NULL;
}

/* An address can come back with another model. */
static struct llama_model *remember(struct llama_model *model, bool no_alloc) {
    if (!model) return NULL;
    pthread_mutex_lock(&lock);
    hollow **p = &hollows;
    while (*p && (*p)->model != model) p = &(*p)->next;
    hollow *h = *p;
    if (h && !no_alloc) {
        *p = h->next;
        free(h);
    } else if (!h && no_alloc && (h = malloc(sizeof *h))) {
        h->model = model;
        h->next = hollows;
        hollows = h;
    }
    pthread_mutex_unlock(&lock);
    return model;
}

EXPORT struct llama_model *llama_model_load_from_file(const char *path, struct llama_model_params params) {
    return remember(REAL(llama_model_load_from_file)(path, params), params.no_alloc);
}

EXPORT struct llama_model *llama_load_model_from_file(const char *path, struct llama_model_params params) {
    return llama_model_load_from_file(path, params);
}

EXPORT struct llama_model *llama_model_load_from_file_ptr(FILE *file, struct llama_model_params params) {
    return remember(REAL(llama_model_load_from_file_ptr)(file, params), params.no_alloc);
}

EXPORT struct llama_model *llama_model_load_from_splits(const char **paths, size_t n_paths, struct llama_model_params params) {
    return remember(REAL(llama_model_load_from_splits)(paths, n_paths, params), params.no_alloc);
}
