/* interpose_table.c - the table of replaced functions, and of those that need no replacement. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "llama/interpose_table.h"

#define INTERPOSED_ENTRY(function, meaning) {#function, meaning, NULL},
interposed interposed_table[INTERPOSED_COUNT] = {INTERPOSED(INTERPOSED_ENTRY)};
#undef INTERPOSED_ENTRY

atomic_bool interposed_used;

const passed_through passed_through_table[] = {
    {"llama_get_memory", "the real pointer: batches store it, and the layer is found by it"},
    {"llama_get_model", "the model is the caller's"},
    {"llama_n_batch", "the inner context has the caller's n_batch"},
    {"llama_n_ubatch", "the inner context has the caller's n_ubatch"},
    {"llama_n_rs_seq", "recurrent models are refused"},
    {"llama_pooling_type", "does not touch the cache"},
    {"llama_attach_threadpool", "our attention runs on ggml's threads"},
    {"llama_detach_threadpool", "our attention runs on ggml's threads"},
    {"llama_set_n_threads", "our attention runs on ggml's threads"},
    {"llama_n_threads", "our attention runs on ggml's threads"},
    {"llama_n_threads_batch", "our attention runs on ggml's threads"},
    {"llama_set_adapters_lora", "keys and values come after adapters"},
    {"llama_set_adapter_cvec", "keys and values come after adapters"},
    {"llama_encode", "computes without a cache"},
    {"llama_batch_ext_set_embd_token", "not mirrored: pages are shared only where their bytes are equal, too"},
    {"llama_batch_ext_set_embd_state", "not mirrored: pages are shared only where their bytes are equal, too"},
    {"llama_batch_ext_set_output_embd", "outputs are not mirrored"},
    {"llama_batch_ext_set_output_logits", "outputs are not mirrored"},
    {"llama_set_embeddings", "outputs are the inner context's"},
    {"llama_set_causal_attn", "asked for before each call, which is refused when it is off"},
    {"llama_get_causal_attn", "the inner context knows"},
    {"llama_set_warmup", "without effect"},
    {"llama_set_abort_callback", "the inner context aborts; what was counted in stays"},
    {"llama_synchronize", "the inner context waits"},
    {"llama_get_logits", "outputs are the inner context's"},
    {"llama_get_logits_ith", "outputs are the inner context's"},
    {"llama_get_embeddings", "outputs are the inner context's"},
    {"llama_get_embeddings_ith", "outputs are the inner context's"},
    {"llama_get_embeddings_seq", "outputs are the inner context's"},
    {"llama_get_sampled_token_ith", "outputs are the inner context's"},
    {"llama_get_sampled_probs_ith", "outputs are the inner context's"},
    {"llama_get_sampled_probs_count_ith", "outputs are the inner context's"},
    {"llama_get_sampled_logits_ith", "outputs are the inner context's"},
    {"llama_get_sampled_logits_count_ith", "outputs are the inner context's"},
    {"llama_get_sampled_candidates_ith", "outputs are the inner context's"},
    {"llama_get_sampled_candidates_count_ith", "outputs are the inner context's"},
    {"llama_set_sampler", "samples the inner context's outputs"},
    {"llama_sampler_sample", "samples the inner context's outputs"},
    {"llama_perf_context", "times are the inner context's"},
    {"llama_perf_context_print", "times are the inner context's"},
    {"llama_perf_context_reset", "times are the inner context's"},
    {"llama_opt_init", "training does not go through llama_decode()"},
    {"llama_opt_epoch", "training does not go through llama_decode()"},
    /* Not in llama.h, but called by llama.cpp's own programs. */
    {"llama_get_memory_breakdown", "counts the inner context; what ours takes is said when it is made"},
    {"llama_get_ctx_other", "drafting contexts are llama.cpp's own"},
    {"llama_get_embeddings_nextn", "outputs are the inner context's"},
    {"llama_get_embeddings_nextn_ith", "outputs are the inner context's"},
    {"llama_set_embeddings_nextn", "outputs are the inner context's"},
    {"llama_get_embeddings_layer_inp", "outputs are the inner context's"},
    {"llama_set_embeddings_layer_inp", "outputs are the inner context's"},
    {"llama_set_nextn_layer_offset", "drafting contexts are llama.cpp's own"},
    {NULL, NULL},
};

/* libllama opened by dlopen(), as Python's ctypes does: it is not behind this library in any order of
 * search, and the program's own calls do not come here, only some that libllama makes itself. Unless
 * a context was asked for here (through a front library, see docs/SERVER.md) nobody uses our cache,
 * which must not go unnoticed. */
static void *opened_later(const interposed *entry) {
    static atomic_bool told;
    /* Global from now on: the functions that this layer calls and does not replace are found there. */
    void *library = dlopen("libllama.so.0", RTLD_LAZY | RTLD_NOLOAD | RTLD_GLOBAL);
    void *real = library ? dlsym(library, entry->name) : NULL;
    if (real && !atomic_load(&interposed_used) && !atomic_exchange(&told, true))
        interpose_log(NULL, "libllama was opened by dlopen() (Python's ctypes?): its contexts are NOT on this cache; "
                            "see \"Python\" in docs/SERVER.md");
    return real;
}

void *interposed_real(int id) {
    interposed *entry = &interposed_table[id];
    if (!entry->real) entry->real = dlsym(RTLD_NEXT, entry->name);
    if (!entry->real) entry->real = opened_later(entry);
    if (!entry->real) {
        /* The wrapper was called, so a libllama exists, but under another name: there is no answer
         * to give. */
        fprintf(stderr, "oscar: %s: not found after liboscar-llama.so; preload it before libllama\n", entry->name);
        abort();
    }
    return entry->real;
}
