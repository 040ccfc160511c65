/*
 * interpose_table.h - the functions of libllama that liboscar-llama.so replaces.
 *
 * A wrapper acts on our cache for contexts of ours, and calls the real function for all others. The
 * list makes the table, so a wrapper without an entry does not link and an entry without a wrapper
 * fails the symbol check (tests/check_llama_symbols.sh).
 */
#ifndef OSCAR_LLAMA_INTERPOSE_TABLE_H
#define OSCAR_LLAMA_INTERPOSE_TABLE_H

#include "llama/layer.h"

/* X(function, meaning for a context of ours) */
#define INTERPOSED(X)                                                                              \
    /* models */                                                                                   \
    X(llama_model_load_from_file, "remembers which models have no weights: nothing runs on them")  \
    X(llama_load_model_from_file, "the same by its older name")                                    \
    X(llama_model_load_from_file_ptr, "the same")                                                  \
    X(llama_model_load_from_splits, "the same")                                                    \
    /* contexts */                                                                                 \
    X(llama_init_from_model, "prepares the layer, makes the inner context, attaches, starts")      \
    X(llama_new_context_with_model, "the same by its older name")                                  \
    X(llama_free, "frees the context, then the layer and its cache")                               \
    X(llama_n_ctx, "the context size that the caller asked for, or that the memory holds")         \
    X(llama_n_ctx_seq, "the same for one sequence")                                                \
    X(llama_n_seq_max, "the number of sequences that the caller asked for")                        \
    X(llama_model_n_swa, "0: sliding layers keep all tokens, so any prefix can be gone back to")   \
    /* running */                                                                                  \
    X(llama_decode, "checks positions, reserves room (1: none), computes, counts the tokens in")   \
    X(llama_process, "the same for an extended batch; encoding passes through")                    \
    X(llama_batch_ext_init, "an extended batch cannot be read back: ours is kept beside it")       \
    X(llama_batch_ext_free, "drops the mirror")                                                    \
    X(llama_batch_ext_clear, "empties the mirror")                                                 \
    X(llama_batch_ext_add, "mirrors the token's sequence")                                         \
    X(llama_batch_ext_add_token, "mirrors the token's id and sequence")                            \
    X(llama_batch_ext_add_embd, "mirrors the token's sequence")                                    \
    X(llama_batch_ext_add_seq, "mirrors a further sequence")                                       \
    X(llama_batch_ext_set_pos, "mirrors the position")                                             \
    /* memory */                                                                                   \
    X(llama_memory_clear, "empties all sequences")                                                 \
    X(llama_memory_seq_rm, "truncates; false for what would leave a hole")                         \
    X(llama_memory_seq_cp, "forks: full pages are shared; copies begin at 0")                      \
    X(llama_memory_seq_keep, "empties all other sequences")                                        \
    X(llama_memory_seq_add, "refused: positions do not change")                                    \
    X(llama_memory_seq_div, "refused: positions do not change")                                    \
    X(llama_memory_seq_pos_min, "0, or -1 for an empty sequence")                                  \
    X(llama_memory_seq_pos_max, "the last position, or -1")                                        \
    X(llama_memory_can_shift, "false")                                                             \
    /* state */                                                                                    \
    X(llama_state_get_size, "bytes of all sequences as saved")                                     \
    X(llama_get_state_size, "the same by its older name")                                          \
    X(llama_state_get_data, "saves all sequences, with a checksum")                                \
    X(llama_copy_state_data, "the same by its older name")                                         \
    X(llama_state_set_data, "restores all sequences, or changes nothing")                          \
    X(llama_set_state_data, "the same by its older name")                                          \
    X(llama_state_load_file, "the same from a file, with its tokens")                              \
    X(llama_load_session_file, "the same by its older name")                                       \
    X(llama_state_save_file, "writes a temporary file, then renames it")                           \
    X(llama_save_session_file, "the same by its older name")                                       \
    X(llama_state_seq_get_size, "bytes of a sequence as saved; never 0")                           \
    X(llama_state_seq_get_size_ext, "the same: flags change nothing")                              \
    X(llama_state_seq_get_data, "saves a sequence, with a checksum")                               \
    X(llama_state_seq_get_data_ext, "the same: a partial state is the whole")                      \
    X(llama_state_seq_set_data, "restores a sequence, or changes nothing")                         \
    X(llama_state_seq_set_data_ext, "the same: a partial state is the whole")                      \
    X(llama_state_seq_save_file, "writes a temporary file, then renames it")                       \
    X(llama_state_seq_load_file, "the same from a file; without tokens counts them")

#define INTERPOSED_ID(function, meaning) ID_##function,
enum { INTERPOSED(INTERPOSED_ID) INTERPOSED_COUNT };
#undef INTERPOSED_ID

typedef struct interposed {
    const char *name;
    const char *meaning;
    void *real; /* libllama's, once looked up */
} interposed;
extern interposed interposed_table[INTERPOSED_COUNT];

/* Functions that take a context, a memory or an extended batch, and are right as they are. */
typedef struct passed_through {
    const char *name;
    const char *reason;
} passed_through;
extern const passed_through passed_through_table[]; /* ends with a NULL name */

/* libllama's own function. */
void *interposed_real(int id);
#define REAL(function) ((__typeof__(&function))interposed_real(ID_##function))

/* False for a model that was loaded with no_alloc. */
bool interpose_has_weights(const struct llama_model *model);

/* The program's own calls come here: it asked for a context. */
extern atomic_bool interposed_used;

/* What a wrapper has to say, on standard error. */
void interpose_log(void *user, const char *line);

#endif
