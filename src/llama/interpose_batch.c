/*
 * interpose_batch.c - extended batches, whose content cannot be asked back.
 *
 * Token ids, positions and sequences are kept beside each batch of a context of ours, found by its address.
 */
#include <pthread.h>
#include <stdlib.h>

#include "llama/interpose_table.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct mirror_token {
    llama_token id;     /* -1 for an embedding */
    llama_pos position; /* 0 until it is set, as in libllama */
    int32_t n_seqs;
    llama_seq_id *seqs; /* [seq_capacity] */
    int32_t seq_capacity;
} mirror_token;

typedef struct mirror {
    const struct llama_batch_ext *batch;
    int32_t n_tokens, capacity;
    mirror_token *tokens; /* [capacity] */
    bool broken;          /* no memory for a token: the batch cannot be run */
    struct mirror *next;
} mirror;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static mirror *mirrors;

static mirror *mirror_of(const struct llama_batch_ext *batch) {
    pthread_mutex_lock(&lock);
    mirror *m = mirrors;
    while (m && m->batch != batch) m = m->next;
    pthread_mutex_unlock(&lock);
    return m;
}

static void mirror_free(mirror *m) {
    for (int32_t i = 0; i < m->capacity; i++) free(m->tokens[i].seqs);
    free(m->tokens);
    free(m);
}

static bool token_add_seq(mirror_token *token, llama_seq_id seq) {
    for (int32_t x = 0; x < token->n_seqs; x++)
        if (token->seqs[x] == seq) return true;
    if (token->n_seqs == token->seq_capacity) {
        int32_t wanted = token->seq_capacity ? 2 * token->seq_capacity : 1;
        llama_seq_id *p = realloc(token->seqs, (size_t)wanted * sizeof *p);
        if (!p) return false;
        token->seqs = p;
        token->seq_capacity = wanted;
    }
    token->seqs[token->n_seqs++] = seq;
    return true;
}

/* Token `index` was added to the batch; passes index on. */
static int32_t mirror_add(const struct llama_batch_ext *batch, int32_t index, llama_seq_id seq, llama_token id) {
    mirror *m = mirror_of(batch);
    if (!m || index < 0) return index;
    if (index >= m->capacity) {
        int32_t wanted = 2 * index + 64;
        mirror_token *p = realloc(m->tokens, (size_t)wanted * sizeof *p);
        if (!p) {
            m->broken = true;
            return index;
        }
        memset(p + m->capacity, 0, (size_t)(wanted - m->capacity) * sizeof *p);
        m->tokens = p;
        m->capacity = wanted;
    }
    m->n_tokens = index + 1;
    m->tokens[index].id = id;
    m->tokens[index].position = 0;
    m->tokens[index].n_seqs = 0;
    if (!token_add_seq(&m->tokens[index], seq)) m->broken = true;
    return index;
}

EXPORT struct llama_batch_ext *llama_batch_ext_init(struct llama_context *ctx) {
    struct llama_batch_ext *batch = REAL(llama_batch_ext_init)(ctx);
    if (!batch || !layer_of_context(ctx)) return batch;
    mirror *m = calloc(1, sizeof *m);
    if (!m) {
        REAL(llama_batch_ext_free)(batch);
        return NULL;
    }
    m->batch = batch;
    pthread_mutex_lock(&lock);
    m->next = mirrors;
    mirrors = m;
    pthread_mutex_unlock(&lock);
    return batch;
}

EXPORT void llama_batch_ext_free(struct llama_batch_ext *batch) {
    pthread_mutex_lock(&lock);
    for (mirror **p = &mirrors; *p; p = &(*p)->next)
        if ((*p)->batch == batch) {
            mirror *m = *p;
            *p = m->next;
            mirror_free(m);
            break;
        }
    pthread_mutex_unlock(&lock);
    REAL(llama_batch_ext_free)(batch);
}

EXPORT void llama_batch_ext_clear(struct llama_batch_ext *batch) {
    mirror *m = mirror_of(batch);
    if (m) {
        m->n_tokens = 0;
        m->broken = false;
    }
    REAL(llama_batch_ext_clear)(batch);
}

EXPORT int32_t llama_batch_ext_add(struct llama_batch_ext *batch, llama_seq_id seq) {
    return mirror_add(batch, REAL(llama_batch_ext_add)(batch, seq), seq, -1);
}

/* libllama keeps a token whose id or embedding it refuses (-2): the batch is then unusable there,
 * and the counts differ here, which llama_process() reports. */
EXPORT int32_t llama_batch_ext_add_token(struct llama_batch_ext *batch, llama_seq_id seq, llama_token id) {
    return mirror_add(batch, REAL(llama_batch_ext_add_token)(batch, seq, id), seq, id);
}

EXPORT int32_t llama_batch_ext_add_embd(struct llama_batch_ext *batch, llama_seq_id seq, struct llama_embd embd) {
    return mirror_add(batch, REAL(llama_batch_ext_add_embd)(batch, seq, embd), seq, -1);
}

EXPORT bool llama_batch_ext_add_seq(struct llama_batch_ext *batch, int32_t index, llama_seq_id seq) {
    bool ok = REAL(llama_batch_ext_add_seq)(batch, index, seq);
    mirror *m = mirror_of(batch);
    if (ok && m && index < m->n_tokens && !token_add_seq(&m->tokens[index], seq)) m->broken = true;
    return ok;
}

EXPORT bool llama_batch_ext_set_pos(struct llama_batch_ext *batch, int32_t index, const llama_pos *position) {
    bool ok = REAL(llama_batch_ext_set_pos)(batch, index, position);
    mirror *m = mirror_of(batch);
    if (ok && m && index < m->n_tokens) m->tokens[index].position = *position;
    return ok;
}

EXPORT int32_t llama_process(struct llama_context *ctx, enum llama_process_type type,
                             struct llama_batch_ext *batch) {
    oscar_llama *layer = layer_of_context(ctx);
    if (!layer || type != LLAMA_PROCESS_TYPE_DECODE) return REAL(llama_process)(ctx, type, batch);
    mirror *m = mirror_of(batch);
    if (!m) {
        interpose_log(NULL, "llama_process(): the batch was made for another context");
        return -1;
    }
    call_clear(layer);
    for (int32_t i = 0; i < m->n_tokens && !m->broken; i++)
        m->broken = !call_add(layer, m->tokens[i].id, m->tokens[i].position, m->tokens[i].n_seqs, m->tokens[i].seqs);
    if (m->broken) {
        interpose_log(NULL, "llama_process(): no memory for the batch");
        return -2;
    }
    int32_t result = call_begin(layer);
    if (result) return result;
    return call_end(layer, REAL(llama_process)(ctx, type, batch));
}
