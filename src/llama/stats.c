/*
 * stats.c - what the caches of this process hold, in a file for operators.
 *
 * The format is Prometheus' text format, as its node exporter reads from files: one sample a line,
 * with the context's number and model as labels. The thread that uses a cache copies its numbers
 * after each call; one thread of ours writes the file, at most once a second and only when a number
 * has changed, so that no request waits for a disk. A reader sees a whole file: it is written beside
 * and renamed.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "llama/layer.h"

#define MODEL_CHARS 96

typedef struct stats_entry {
    int number; /* of the context, counted from the start of the process */
    bool open;  /* its context lives; a closed one stays with its last counts until the next opens */
    char model[MODEL_CHARS];
    int64_t events[STATS_EVENTS], tokens;
    int64_t n_seqs_max, n_seqs_used, tokens_held, scratch_bytes;
    oscar_cache_stats cache;
    struct stats_entry *next;
} stats_entry;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static stats_entry *entries;
static char *path, *temporary; /* of the file; one a process */
static int n_contexts;
static bool dirty, told;

/* ------------------------------------------------------------------------------------- the text */

typedef struct metric {
    const char *name, *labels, *type, *help;
    int64_t (*value)(const stats_entry *);
} metric;

#define VALUE(name, expression)                                                                    \
    static int64_t name(const stats_entry *e) { return expression; }
VALUE(value_up, e->open)
VALUE(pages_live, e->cache.pages_live)
VALUE(pages_free, e->cache.pages_free)
VALUE(pages_cached, e->cache.pages_cached)
VALUE(pages_shared, e->cache.pages_shared)
VALUE(pages_total, e->cache.pages_total)
VALUE(bytes_pages, e->cache.pages_total * e->cache.page_bytes)
VALUE(bytes_overlay, e->cache.overlay_pages_budget * e->cache.overlay_page_bytes)
VALUE(bytes_scratch, e->scratch_bytes)
VALUE(used_pages, e->cache.history_bytes)
VALUE(used_overlay, e->cache.overlay_bytes)
VALUE(live_pages, e->cache.pages_live * e->cache.page_bytes)
VALUE(live_overlay, e->cache.overlay_pages_live * e->cache.overlay_page_bytes)
VALUE(hits, e->cache.page_hits)
VALUE(misses, e->cache.page_misses)
VALUE(unequal, e->cache.pages_unequal)
VALUE(evictions, e->cache.page_evictions)
VALUE(overlay_evictions, e->cache.overlay_evictions)
VALUE(seqs_max, e->n_seqs_max)
VALUE(seqs_used, e->n_seqs_used)
VALUE(tokens_held, e->tokens_held)
VALUE(tokens_computed, e->tokens)
VALUE(count_decode, e->events[STATS_DECODE])
VALUE(count_no_slot, e->events[STATS_NO_SLOT])
VALUE(count_error, e->events[STATS_ERROR])
VALUE(count_save, e->events[STATS_SAVE])
VALUE(count_restore, e->events[STATS_RESTORE])
VALUE(count_refused, e->events[STATS_REFUSED])
#undef VALUE

/* Samples of one name stand together, as the format wants. */
static const metric metrics[] = {
    {"oscar_up", "", "gauge", "1 while the context lives", value_up},
    {"oscar_pages", ",state=\"live\"", "gauge", "Pages of 64 tokens by state; the states add up to oscar_pages_total", pages_live},
    {"oscar_pages", ",state=\"cached\"", NULL, NULL, pages_cached},
    {"oscar_pages", ",state=\"free\"", NULL, NULL, pages_free},
    {"oscar_pages_total", "", "gauge", "Pages in the pool", pages_total},
    {"oscar_pages_shared", "", "gauge", "Live pages that more than one sequence holds", pages_shared},
    {"oscar_reserved_bytes", ",part=\"pages\"", "gauge", "Bytes reserved when the cache was made", bytes_pages},
    {"oscar_reserved_bytes", ",part=\"overlay\"", NULL, NULL, bytes_overlay},
    {"oscar_reserved_bytes", ",part=\"scratch\"", NULL, NULL, bytes_scratch},
    {"oscar_live_bytes", ",part=\"pages\"", "gauge", "Bytes of pages that sequences hold", live_pages},
    {"oscar_live_bytes", ",part=\"overlay\"", NULL, NULL, live_overlay},
    {"oscar_used_bytes", ",part=\"pages\"", "gauge", "Bytes of pages that sequences hold or that are cached", used_pages},
    {"oscar_used_bytes", ",part=\"overlay\"", NULL, NULL, used_overlay},
    {"oscar_page_hits_total", "", "counter", "Full pages that sequences share because they were there already", hits},
    {"oscar_page_misses_total", "", "counter", "Full pages that were new", misses},
    {"oscar_pages_unequal_total", "", "counter", "Full pages of known tokens whose bytes differed, so they were not shared", unequal},
    {"oscar_evictions_total", ",part=\"pages\"", "counter", "Cached pages that were taken for something else", evictions},
    {"oscar_evictions_total", ",part=\"overlay\"", NULL, NULL, overlay_evictions},
    {"oscar_sequences_max", "", "gauge", "Sequences that there can be", seqs_max},
    {"oscar_sequences_used", "", "gauge", "Sequences that hold a token", seqs_used},
    {"oscar_tokens_held", "", "gauge", "Tokens of all sequences; shared ones count in each", tokens_held},
    {"oscar_tokens_computed_total", "", "counter", "Tokens of computed calls", tokens_computed},
    {"oscar_calls_total", ",result=\"computed\"", "counter", "Calls by result", count_decode},
    {"oscar_calls_total", ",result=\"no_slot\"", NULL, NULL, count_no_slot},
    {"oscar_calls_total", ",result=\"error\"", NULL, NULL, count_error},
    {"oscar_states_total", ",result=\"saved\"", "counter", "Sequences and contexts saved and restored", count_save},
    {"oscar_states_total", ",result=\"restored\"", NULL, NULL, count_restore},
    {"oscar_states_total", ",result=\"refused\"", NULL, NULL, count_refused},
};

static void print_all(FILE *out) {
    for (size_t m = 0; m < sizeof metrics / sizeof *metrics; m++) {
        if (metrics[m].help)
            fprintf(out, "# HELP %s %s\n# TYPE %s %s\n", metrics[m].name, metrics[m].help, metrics[m].name, metrics[m].type);
        for (const stats_entry *e = entries; e; e = e->next)
            fprintf(out, "%s{context=\"%d\",model=\"%s\"%s} %" PRId64 "\n", metrics[m].name, e->number, e->model,
                    metrics[m].labels, metrics[m].value(e));
    }
}

/* With the lock held. False, with errno set. */
static bool write_file(void) {
    FILE *out = fopen(temporary, "w");
    if (!out) return false;
    print_all(out);
    bool ok = !ferror(out);
    ok = fclose(out) == 0 && ok && rename(temporary, path) == 0;
    if (!ok) {
        int keep = errno;
        unlink(temporary);
        errno = keep;
    }
    return ok;
}

/* ----------------------------------------------------------------------------------- the thread */

static void *write_forever(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!dirty) pthread_cond_wait(&changed, &lock);
        dirty = false;
        if (!write_file() && !told) {
            told = true;
            fprintf(stderr, "oscar: %s: %s; statistics are no longer written (said once)\n", path, strerror(errno));
        }
        pthread_mutex_unlock(&lock);
        struct timespec second = {1, 0};
        nanosleep(&second, NULL);
        pthread_mutex_lock(&lock);
    }
    return NULL;
}

/* The program's signals are not this thread's. */
static bool start_thread(void) {
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool ok = pthread_create(&thread, NULL, write_forever, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (ok) pthread_detach(thread);
    return ok;
}

/* The first context of the process names the file. */
static oscar_status open_file(const char *name, oscar_error *error) {
    if (path) {
        if (strcmp(path, name) == 0) return OSCAR_OK;
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "stats_path is %.80s: this process writes %.80s", name, path);
    }
    size_t size = strlen(name) + 24;
    path = strdup(name);
    temporary = malloc(size);
    if (path && temporary && snprintf(temporary, size, "%s.%ld", name, (long)getpid()) > 0 && write_file() && start_thread())
        return OSCAR_OK;
    error_set(error, path && temporary ? OSCAR_ERROR_IO : OSCAR_ERROR_MEMORY, -1, "stats_path %.160s: %s", name, strerror(errno));
    free(path);
    free(temporary);
    path = temporary = NULL;
    return error ? error->status : OSCAR_ERROR_IO;
}

/* --------------------------------------------------------------------------------- the contexts */

static void copy_numbers(oscar_llama *layer, stats_entry *e) {
    e->cache.struct_size = sizeof e->cache;
    oscar_cache_get_stats(layer->cache, &e->cache);
    e->n_seqs_max = layer->n_seq_max;
    e->n_seqs_used = e->tokens_held = 0;
    for (uint32_t s = 0; s < layer->n_seq_max; s++) {
        int64_t n = oscar_seq_length(layer->cache, (int32_t)s);
        e->n_seqs_used += n > 0;
        e->tokens_held += n;
    }
    dirty = true;
    pthread_cond_signal(&changed);
}

/* Contexts that are gone: a server that sleeps and wakes makes a new one each time. */
static void drop_closed(void) {
    for (stats_entry **p = &entries; *p;) {
        stats_entry *e = *p;
        if (e->open) {
            p = &e->next;
        } else {
            *p = e->next;
            free(e);
        }
    }
}

oscar_status stats_begin(oscar_llama *layer, oscar_error *error) {
    if (!layer->stats_path) return OSCAR_OK;
    stats_entry *e = calloc(1, sizeof *e);
    if (!e) return error_set(error, OSCAR_ERROR_MEMORY, -1, "no memory for statistics");
    llama_model_meta_val_str(layer->model, "general.name", e->model, sizeof e->model);
    for (char *c = e->model; *c; c++)
        if (*c == '"' || *c == '\\' || (unsigned char)*c < ' ') *c = '_';
    pthread_mutex_lock(&lock);
    oscar_status status = open_file(layer->stats_path, error);
    if (status) {
        free(e);
    } else {
        drop_closed();
        e->number = n_contexts++;
        e->open = true;
        stats_entry **end = &entries;
        while (*end) end = &(*end)->next;
        *end = e;
        copy_numbers(layer, e);
        e->scratch_bytes = layer_scratch_bytes(layer, &e->cache);
        dirty = !write_file();
        layer->stats = e;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

void stats_note(oscar_llama *layer, stats_event event, int64_t count) {
    stats_entry *e = layer->stats;
    if (!e) return;
    pthread_mutex_lock(&lock);
    e->events[event]++;
    if (event == STATS_DECODE) e->tokens += count;
    copy_numbers(layer, e);
    pthread_mutex_unlock(&lock);
}

/* The last numbers are on disk when this returns: the process may end next. */
void stats_end(oscar_llama *layer) {
    stats_entry *e = layer->stats;
    if (!e) return;
    pthread_mutex_lock(&lock);
    copy_numbers(layer, e);
    e->open = false;
    dirty = !write_file();
    pthread_mutex_unlock(&lock);
    layer->stats = NULL;
}
