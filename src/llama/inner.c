/* inner.c - libllama's own functions, for programs that link it. */
#include "llama/layer.h"

inner_api inner = {
    .decode = llama_decode,
    .memory_clear = llama_memory_clear,
    .memory_seq_rm = llama_memory_seq_rm,
    .memory_seq_cp = llama_memory_seq_cp,
    .model_n_swa = llama_model_n_swa,
};
