/*
 * inspect_rotations.c - what is in a rotation file: ours, or the tensors of another format.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/inspect.h"
#include "oscar/zoo.h"

static const char *metadata(const oscar_zoo_file *file, const char *key) {
    for (int32_t i = 0; i < oscar_zoo_n_metadata(file); i++)
        if (strcmp(oscar_zoo_metadata_key(file, i), key) == 0) return oscar_zoo_metadata_value(file, i);
    return NULL;
}

static int32_t layer_number(const oscar_zoo_file *file, int32_t layer, const char *name) {
    char key[64];
    snprintf(key, sizeof key, "layers.%d.%s", (int)layer, name);
    const char *value = metadata(file, key);
    return value ? (int32_t)strtol(value, NULL, 10) : 0;
}

/* Rotary pairs whose mean is tracked in each head: tensor layers.{i}.k_pairs [n_kv_heads, n]. */
static int32_t tracked_pairs(const oscar_zoo_file *file, int32_t layer) {
    char name[64];
    snprintf(name, sizeof name, "layers.%d.k_pairs", (int)layer);
    oscar_zoo_tensor tensor;
    for (int32_t i = 0; i < oscar_zoo_n_tensors(file); i++)
        if (oscar_zoo_get_tensor(file, i, &tensor) == OSCAR_OK && strcmp(tensor.name, name) == 0)
            return tensor.n_dims == 2 ? (int32_t)tensor.shape[1] : 0;
    return 0;
}

/* Metadata of the whole file: what is not a number of one layer or of the format. */
static bool told_apart(const char *key) {
    return strncmp(key, "layers.", 7) == 0 || strncmp(key, "format", 6) == 0 ||
           strcmp(key, "n_layers") == 0;
}

static json_t *metadata_json(const oscar_zoo_file *file) {
    json_t *object = json_object();
    for (int32_t i = 0; i < oscar_zoo_n_metadata(file); i++)
        if (!told_apart(oscar_zoo_metadata_key(file, i)))
            json_object_set_new(object, oscar_zoo_metadata_key(file, i),
                                json_string(oscar_zoo_metadata_value(file, i)));
    return object;
}

static void print_metadata(const oscar_zoo_file *file) {
    for (int32_t i = 0; i < oscar_zoo_n_metadata(file); i++)
        if (!told_apart(oscar_zoo_metadata_key(file, i)))
            printf("  %-22s %s\n", oscar_zoo_metadata_key(file, i), oscar_zoo_metadata_value(file, i));
}

static int print_ours(const char *path, const oscar_zoo_file *file, const oscar_rotations *rotations) {
    printf("%s: rotations, format version %d\n", path, (int)oscar_zoo_get_version(file));
    print_metadata(file);
    puts("\n  layer  KV heads  query heads  head_dim  window  bits K  bits V  tracked pairs");
    for (int32_t i = 0; i < oscar_rotations_n_layers(rotations); i++) {
        const oscar_layer *layer = oscar_rotations_layer(rotations, i);
        printf("  %5d  %8d  %11d  %8d  %6d  %6d  %6d  %13d\n", (int)i, (int)layer->n_kv_heads,
               (int)layer->n_q_heads, (int)layer->head_dim, (int)layer->window,
               (int)layer_number(file, i, "bits_k"), (int)layer_number(file, i, "bits_v"),
               (int)tracked_pairs(file, i));
    }
    return cli_finish_output();
}

static int ours_json(const char *path, const oscar_zoo_file *file, const oscar_rotations *rotations) {
    json_t *layers = json_array();
    for (int32_t i = 0; i < oscar_rotations_n_layers(rotations); i++) {
        const oscar_layer *layer = oscar_rotations_layer(rotations, i);
        json_array_append_new(
            layers, json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:i}", "n_kv_heads",
                              (int)layer->n_kv_heads, "n_q_heads", (int)layer->n_q_heads, "head_dim",
                              (int)layer->head_dim, "window", (int)layer->window, "bits_k",
                              (int)layer_number(file, i, "bits_k"), "bits_v",
                              (int)layer_number(file, i, "bits_v"), "tracked_pairs",
                              (int)tracked_pairs(file, i)));
    }
    return cli_print_json(json_pack("{s:s, s:s, s:i, s:o, s:o}", "file", path, "type", "rotations",
                                    "version", (int)oscar_zoo_get_version(file), "metadata",
                                    metadata_json(file), "layers", layers));
}

static void print_tensor(const oscar_zoo_tensor *tensor) {
    printf("  %-40s %-5s [", tensor->name, tensor->dtype);
    for (int32_t d = 0; d < tensor->n_dims; d++)
        printf("%s%" PRIu64, d ? ", " : "", tensor->shape[d]);
    puts("]");
}

static json_t *tensor_json(const oscar_zoo_tensor *tensor) {
    json_t *shape = json_array();
    for (int32_t d = 0; d < tensor->n_dims; d++)
        json_array_append_new(shape, json_integer((json_int_t)tensor->shape[d]));
    return json_pack("{s:s, s:s, s:o}", "name", tensor->name, "dtype", tensor->dtype, "shape", shape);
}

static int list_tensors(const char *path, const oscar_zoo_file *file, bool json) {
    static const char *const types[] = {"unknown", "safetensors", "rotationzoo", "gguf"};
    int32_t format = oscar_zoo_get_format(file);
    const char *type = types[format > 0 && format < CLI_COUNT(types) ? format : 0];
    json_t *list = json_array();
    if (!json) {
        printf("%s: %s, format version %d, rotations for %d layers\n", path, type,
               (int)oscar_zoo_get_version(file), (int)oscar_zoo_n_layers(file));
        print_metadata(file);
    }
    for (int32_t i = 0; i < oscar_zoo_n_tensors(file); i++) {
        oscar_zoo_tensor tensor;
        if (oscar_zoo_get_tensor(file, i, &tensor) != OSCAR_OK) continue;
        if (json) json_array_append_new(list, tensor_json(&tensor));
        else print_tensor(&tensor);
    }
    if (json)
        return cli_print_json(json_pack("{s:s, s:s, s:i, s:i, s:o, s:o}", "file", path, "type", type,
                                        "version", (int)oscar_zoo_get_version(file), "n_layers",
                                        (int)oscar_zoo_n_layers(file), "metadata",
                                        metadata_json(file), "tensors", list));
    json_decref(list);
    return cli_finish_output();
}

int inspect_rotations(const char *path, bool json) {
    oscar_error error = {0};
    oscar_zoo_file *file = NULL;
    if (oscar_zoo_open(&file, path, &error) != OSCAR_OK) return cli_error("%s", error.message);
    const char *format = metadata(file, "format");
    int exit_code;
    if (format && strcmp(format, "oscar-rotations") == 0) {
        oscar_rotations *rotations = NULL;
        if (oscar_rotations_load(&rotations, path, &error) != OSCAR_OK)
            exit_code = cli_error("%s", error.message);
        else
            exit_code = json ? ours_json(path, file, rotations) : print_ours(path, file, rotations);
        oscar_rotations_free(rotations);
    } else {
        exit_code = list_tensors(path, file, json);
    }
    oscar_zoo_free(file);
    return exit_code;
}
