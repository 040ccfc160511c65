/*
 * inspect_gguf.c - what of a model file matters to the cache: geometry, windows, positions.
 *
 * Read through libllama's own parser. Its accessors abort on a key of another type, so every value
 * is asked for its type first.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "cli/inspect.h"
#include "ggml.h"
#include "gguf.h"

/* The parser tells what is wrong through ggml's log alone; the first line names the cause. */
static char parser_message[200];
static void keep_message(enum ggml_log_level level, const char *text, void *user) {
    (void)user;
    if (level < GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_CONT || parser_message[0]) return;
    const char *colon = strstr(text, ": "); /* after the function's name */
    snprintf(parser_message, sizeof parser_message, "%s", colon ? colon + 2 : text);
    parser_message[strcspn(parser_message, "\n")] = '\0';
}

static int64_t find_key(const struct gguf_context *gguf, const char *arch, const char *name) {
    char key[256];
    snprintf(key, sizeof key, "%s.%s", arch, name);
    return gguf_find_key(gguf, key);
}

/* An integer of any width; `absent` when the key is missing or of another type. */
static int64_t read_integer(const struct gguf_context *gguf, int64_t key, int64_t absent) {
    if (key < 0) return absent;
    switch (gguf_get_kv_type(gguf, key)) {
    case GGUF_TYPE_UINT32: return gguf_get_val_u32(gguf, key);
    case GGUF_TYPE_INT32: return gguf_get_val_i32(gguf, key);
    case GGUF_TYPE_UINT64: return (int64_t)gguf_get_val_u64(gguf, key);
    case GGUF_TYPE_INT64: return gguf_get_val_i64(gguf, key);
    case GGUF_TYPE_UINT16: return gguf_get_val_u16(gguf, key);
    default: return absent;
    }
}

/* Head counts are one number, or an array with one for each layer (of which the range is told). */
static void read_heads(const struct gguf_context *gguf, int64_t key, int64_t n_layers, int64_t *least,
                       int64_t *most, int64_t *sum) {
    if (key >= 0 && gguf_get_kv_type(gguf, key) == GGUF_TYPE_ARRAY &&
        (gguf_get_arr_type(gguf, key) == GGUF_TYPE_UINT32 ||
         gguf_get_arr_type(gguf, key) == GGUF_TYPE_INT32) &&
        gguf_get_arr_n(gguf, key) > 0) {
        const uint32_t *values = gguf_get_arr_data(gguf, key);
        size_t n = gguf_get_arr_n(gguf, key);
        *least = *most = values[0];
        *sum = 0;
        for (size_t i = 0; i < n; i++) {
            if (values[i] < *least) *least = values[i];
            if (values[i] > *most) *most = values[i];
            *sum += values[i];
        }
        return;
    }
    *least = *most = read_integer(gguf, key, 0);
    *sum = *most * n_layers;
}

static const char *read_string(const struct gguf_context *gguf, const char *key) {
    int64_t id = gguf_find_key(gguf, key);
    return id >= 0 && gguf_get_kv_type(gguf, id) == GGUF_TYPE_STRING ? gguf_get_val_str(gguf, id)
                                                                     : NULL;
}

/* False when the file ends before its last tensor does. */
static bool tensors_fit(const struct gguf_context *gguf, const char *path, int64_t *needed,
                        int64_t *found) {
    struct stat info;
    *needed = (int64_t)gguf_get_data_offset(gguf);
    *found = stat(path, &info) == 0 ? info.st_size : 0;
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf); i++) {
        int64_t end = (int64_t)(gguf_get_data_offset(gguf) + gguf_get_tensor_offset(gguf, i) +
                                gguf_get_tensor_size(gguf, i));
        if (end > *needed) *needed = end;
    }
    return *needed <= *found;
}

typedef struct geometry {
    const char *name, *arch;
    int64_t layers, q_heads_min, q_heads_max, kv_heads_min, kv_heads_max, kv_heads_sum;
    int64_t k_dim, v_dim, window, context;
    double rope_base;
    int64_t baked_rotations;
} geometry;

static int64_t count_baked_rotations(const struct gguf_context *gguf) {
    int64_t n = 0;
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf); i++) {
        const char *name = gguf_get_tensor_name(gguf, i);
        n += strstr(name, ".attn_k_rot.weight") || strstr(name, ".attn_v_rot.weight");
    }
    return n;
}

static void read_geometry(const struct gguf_context *gguf, geometry *g) {
    int64_t sum;
    g->name = read_string(gguf, "general.name");
    g->layers = read_integer(gguf, find_key(gguf, g->arch, "block_count"), 0);
    read_heads(gguf, find_key(gguf, g->arch, "attention.head_count"), g->layers, &g->q_heads_min,
               &g->q_heads_max, &sum);
    read_heads(gguf, find_key(gguf, g->arch, "attention.head_count_kv"), g->layers, &g->kv_heads_min,
               &g->kv_heads_max, &g->kv_heads_sum);
    int64_t width = read_integer(gguf, find_key(gguf, g->arch, "embedding_length"), 0);
    int64_t split = g->q_heads_max > 0 ? width / g->q_heads_max : 0;
    g->k_dim = read_integer(gguf, find_key(gguf, g->arch, "attention.key_length"), split);
    g->v_dim = read_integer(gguf, find_key(gguf, g->arch, "attention.value_length"), split);
    g->window = read_integer(gguf, find_key(gguf, g->arch, "attention.sliding_window"), 0);
    g->context = read_integer(gguf, find_key(gguf, g->arch, "context_length"), 0);
    int64_t base = find_key(gguf, g->arch, "rope.freq_base");
    g->rope_base = base >= 0 && gguf_get_kv_type(gguf, base) == GGUF_TYPE_FLOAT32
                       ? (double)gguf_get_val_f32(gguf, base)
                       : 0;
    g->baked_rotations = count_baked_rotations(gguf);
}

/* What a token's keys and values take in fp16, over all layers. */
static int64_t exact_bytes(const geometry *g) { return 2 * g->kv_heads_sum * (g->k_dim + g->v_dim); }

static void print_range(const char *label, int64_t least, int64_t most) {
    if (least == most) printf("  %-14s %" PRId64 "\n", label, least);
    else printf("  %-14s %" PRId64 " to %" PRId64 ", by layer\n", label, least, most);
}

static int print_text(const char *path, const geometry *g, uint32_t version) {
    char bytes[32];
    printf("%s: model, GGUF version %u\n", path, version);
    if (g->name) printf("  %-14s %s\n", "name", g->name);
    printf("  %-14s %s\n", "architecture", g->arch);
    printf("  %-14s %" PRId64 "\n", "layers", g->layers);
    print_range("query heads", g->q_heads_min, g->q_heads_max);
    print_range("KV heads", g->kv_heads_min, g->kv_heads_max);
    if (g->k_dim == g->v_dim) printf("  %-14s %" PRId64 "\n", "head_dim", g->k_dim);
    else printf("  %-14s %" PRId64 " keys, %" PRId64 " values\n", "head_dim", g->k_dim, g->v_dim);
    if (g->window > 0) printf("  %-14s %" PRId64 " tokens in sliding layers\n", "window", g->window);
    else printf("  %-14s none\n", "window");
    printf("  %-14s %" PRId64 " tokens\n", "context", g->context);
    if (g->rope_base > 0) printf("  %-14s %g\n", "RoPE base", g->rope_base);
    printf("  %-14s %s a token in fp16\n", "cache", cli_bytes_text(exact_bytes(g), bytes));
    if (g->baked_rotations > 0)
        printf("  %-14s %" PRId64 " tensors attn_k_rot, attn_v_rot\n", "rotations", g->baked_rotations);
    return cli_finish_output();
}

static int print_json(const char *path, const geometry *g, uint32_t version) {
    json_t *object = json_pack(
        "{s:s, s:s, s:i, s:s?, s:s, s:I, s:[II], s:[II], s:I, s:I, s:I, s:I, s:f, s:I, s:I}", "file",
        path, "type", "gguf", "version", (int)version, "name", g->name, "architecture", g->arch,
        "layers", (json_int_t)g->layers, "query_heads", (json_int_t)g->q_heads_min,
        (json_int_t)g->q_heads_max, "kv_heads", (json_int_t)g->kv_heads_min,
        (json_int_t)g->kv_heads_max, "key_dim", (json_int_t)g->k_dim, "value_dim",
        (json_int_t)g->v_dim, "window", (json_int_t)g->window, "context", (json_int_t)g->context,
        "rope_base", g->rope_base, "fp16_bytes_per_token", (json_int_t)exact_bytes(g),
        "baked_rotations", (json_int_t)g->baked_rotations);
    return cli_print_json(object);
}

static int inspect(const char *path, const struct gguf_context *gguf, bool json) {
    geometry g = {.arch = read_string(gguf, "general.architecture")};
    if (!g.arch) return cli_error("%s: no general.architecture; is this a model?", path);
    int64_t needed, found;
    if (!tensors_fit(gguf, path, &needed, &found))
        return cli_error("%s: cut short: its tensors end at byte %" PRId64 ", the file at %" PRId64,
                         path, needed, found);
    read_geometry(gguf, &g);
    uint32_t version = gguf_get_version(gguf);
    return json ? print_json(path, &g, version) : print_text(path, &g, version);
}

int inspect_gguf(const char *path, bool json) {
    parser_message[0] = '\0';
    ggml_log_set(keep_message, NULL);
    struct gguf_init_params params = {.no_alloc = true, .ctx = NULL};
    struct gguf_context *gguf = gguf_init_from_file(path, params);
    if (!gguf)
        return cli_error("%s: not a whole GGUF file: %s", path,
                         parser_message[0] ? parser_message : "the parser gives no reason");
    int exit_code = inspect(path, gguf, json);
    gguf_free(gguf);
    return exit_code;
}
