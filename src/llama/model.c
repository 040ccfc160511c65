/* model.c - what can be told before a graph exists: models that this layer refuses, and rotations of
 * another model. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "llama/layer.h"

static bool meta_string(const struct llama_model *model, const char *key, char *out, size_t size) {
    out[0] = '\0';
    return llama_model_meta_val_str(model, key, out, size) >= 0;
}

/* The value of "<arch>.<suffix>". */
static bool meta_arch_string(const struct llama_model *model, const char *suffix, char *out,
                             size_t size) {
    char arch[64], key[160];
    if (!meta_string(model, "general.architecture", arch, sizeof arch)) return false;
    snprintf(key, sizeof key, "%s.%s", arch, suffix);
    return meta_string(model, key, out, size);
}

static oscar_status refuse(const struct llama_model *model, const char *what, oscar_error *error) {
    char arch[64];
    if (!meta_string(model, "general.architecture", arch, sizeof arch)) snprintf(arch, sizeof arch, "?");
    return error_set(error, OSCAR_ERROR_UNSUPPORTED, -1,
                     "architecture \"%s\": %s; expected a causal decoder with ordinary attention",
                     arch, what);
}

static oscar_status check_version(oscar_error *error) {
    const char *version = llama_version();
    size_t n = strlen(LLAMA_VERSION_CHECKED);
    if (strncmp(version, LLAMA_VERSION_CHECKED, n) == 0 && (version[n] == '\0' || version[n] == '-'))
        return OSCAR_OK;
    return error_set(error, OSCAR_ERROR_UNSUPPORTED, -1,
                     "libllama version: found %s, this build was checked with %s", version,
                     LLAMA_VERSION_CHECKED);
}

oscar_status model_check(const struct llama_model *model, oscar_error *error) {
    oscar_status status = check_version(error);
    if (status) return status;
    if (llama_model_has_encoder(model)) return refuse(model, "it has an encoder", error);
    if (!llama_model_has_decoder(model)) return refuse(model, "it has no decoder", error);
    if (llama_model_is_hybrid(model)) return refuse(model, "it is hybrid", error);
    if (llama_model_is_recurrent(model)) return refuse(model, "it is recurrent", error);
    if (llama_model_is_diffusion(model)) return refuse(model, "it is a diffusion model", error);
    enum llama_rope_type rope = llama_model_rope_type(model);
    if (rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE ||
        rope == LLAMA_ROPE_TYPE_VISION)
        return refuse(model, "it uses M-RoPE", error);
    char value[64];
    if (meta_arch_string(model, "attention.kv_lora_rank", value, sizeof value) && atoi(value) > 0)
        return refuse(model, "it uses multi-head latent attention (MLA)", error);
    if (meta_arch_string(model, "attention.max_alibi_bias", value, sizeof value) && atof(value) != 0)
        return refuse(model, "it uses ALiBi", error);
    if (meta_arch_string(model, "attention.causal", value, sizeof value) && strcmp(value, "false") == 0)
        return refuse(model, "its attention is not causal", error);
    if (meta_arch_string(model, "rope.scaling.type", value, sizeof value) &&
        strcmp(value, "longrope") == 0)
        return refuse(model, "its RoPE factors depend on the context size (longrope)", error);
    return OSCAR_OK;
}

oscar_status model_check_params(const struct llama_context_params *params, oscar_error *error) {
    if (params->ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT || params->ctx_other)
        return error_set(error, OSCAR_ERROR_UNSUPPORTED, -1,
                         "ctx_type is %d: expected an ordinary context, not one that drafts for another",
                         (int)params->ctx_type);
    if (params->attention_type == LLAMA_ATTENTION_TYPE_NON_CAUSAL)
        return error_set(error, OSCAR_ERROR_UNSUPPORTED, -1,
                         "attention_type is non-causal: expected causal");
    return OSCAR_OK;
}

oscar_status oscar_llama_fingerprint(const struct llama_model *model, char *out, size_t size) {
    char arch[64], name[128];
    if (!meta_string(model, "general.architecture", arch, sizeof arch)) snprintf(arch, sizeof arch, "?");
    if (!meta_string(model, "general.name", name, sizeof name)) snprintf(name, sizeof name, "?");
    int n = snprintf(out, size, "%s/%s/params=%llu/layers=%d/embd=%d/vocab=%d", arch, name,
                     (unsigned long long)llama_model_n_params(model), llama_model_n_layer(model),
                     llama_model_n_embd(model), llama_vocab_n_tokens(llama_model_get_vocab(model)));
    return n > 0 && (size_t)n < size ? OSCAR_OK : OSCAR_ERROR_ARGUMENT;
}

oscar_status model_check_fingerprint(const struct llama_model *model,
                                     const oscar_rotations *rotations, oscar_error *error) {
    char found[OSCAR_LLAMA_FINGERPRINT_SIZE];
    const char *expected = oscar_rotations_metadata(rotations, "model_fingerprint");
    if (!expected) return OSCAR_OK;
    if (oscar_llama_fingerprint(model, found, sizeof found) == OSCAR_OK && strcmp(found, expected) == 0)
        return OSCAR_OK;
    return error_set(error, OSCAR_ERROR_MISMATCH, -1,
                     "model_fingerprint: the rotations are of %.90s, the model is %.90s", expected, found);
}

static bool near_rel(float a, float b) { return fabsf(a - b) <= 1e-4f * fmaxf(fabsf(a), fabsf(b)); }

static oscar_status check_rope(int32_t index, const oscar_rope *model, const oscar_rope *file,
                               oscar_error *error) {
    if (model->layout != file->layout || model->n_dims != file->n_dims)
        return error_set(error, OSCAR_ERROR_MISMATCH, index,
                         "layer %d: RoPE layout %d over %d dims in the rotations, %d over %d in the model",
                         index, file->layout, file->n_dims, model->layout, model->n_dims);
    if (model->layout == OSCAR_ROPE_NONE) return OSCAR_OK;
    if (!near_rel(model->magnitude, file->magnitude))
        return error_set(error, OSCAR_ERROR_MISMATCH, index,
                         "layer %d: RoPE magnitude %g in the rotations, %g in the model", index,
                         (double)file->magnitude, (double)model->magnitude);
    for (int32_t f = 0; f < model->n_dims / 2; f++)
        if (!near_rel(model->inv_freq[f], file->inv_freq[f]))
            return error_set(error, OSCAR_ERROR_MISMATCH, index,
                             "layer %d: RoPE inv_freq[%d] is %g in the rotations, %g in the model", index,
                             f, (double)file->inv_freq[f], (double)model->inv_freq[f]);
    return OSCAR_OK;
}

oscar_status model_check_rotations(const oscar_layer *layers, int32_t n_layers,
                                   const oscar_rotations *rotations, oscar_error *error) {
    if (oscar_rotations_n_layers(rotations) != n_layers)
        return error_set(error, OSCAR_ERROR_MISMATCH, -1,
                         "layers: %d in the rotations, %d in the model",
                         oscar_rotations_n_layers(rotations), n_layers);
    for (int32_t i = 0; i < n_layers; i++) {
        const oscar_layer *model = &layers[i], *file = oscar_rotations_layer(rotations, i);
        if (model->n_kv_heads != file->n_kv_heads || model->n_q_heads != file->n_q_heads ||
            model->head_dim != file->head_dim)
            return error_set(error, OSCAR_ERROR_MISMATCH, i,
                             "layer %d: %d query heads, %d KV heads of %d dims in the rotations; %d, %d, %d in the model",
                             i, file->n_q_heads, file->n_kv_heads, file->head_dim, model->n_q_heads,
                             model->n_kv_heads, model->head_dim);
        oscar_status status = check_rope(i, &model->rope, &file->rope, error);
        if (status) return status;
    }
    return OSCAR_OK;
}
