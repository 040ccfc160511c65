/*
 * rotation_file.c - the fields of a rotation file and the rules that loading and saving share.
 */
#include "zoo/rotation_file.h"

#define MEMBER(name) offsetof(rotations_layer, name)

const rotation_field rotation_fields[ROTATION_N_FIELDS] = {
    {"k_rotation", MEMBER(k_rotation), ROTATION_SQUARE},
    {"v_rotation", MEMBER(v_rotation), ROTATION_SQUARE},
    {"k_mean", MEMBER(k_mean), ROTATION_ROW},
    {"k_tracked", MEMBER(k_tracked), ROTATION_ROW},
    {"v_mean", MEMBER(v_mean), ROTATION_ROW},
    {"k_metric_b", MEMBER(k_metric_b), ROTATION_LOWER},
    {"k_metric_d", MEMBER(k_metric_d), ROTATION_ROW},
    {"v_metric_b", MEMBER(v_metric_b), ROTATION_LOWER},
    {"v_metric_d", MEMBER(v_metric_d), ROTATION_ROW},
};

const rotation_number rotation_numbers[ROTATION_N_NUMBERS] = {
    {"n_kv_heads", MEMBER(shape.n_kv_heads), false, 1, INT32_MAX},
    {"n_q_heads", MEMBER(shape.n_q_heads), false, 1, INT32_MAX},
    {"head_dim", MEMBER(shape.head_dim), false, 16, OSCAR_MAX_HEAD_DIM},
    {"window", MEMBER(shape.window), false, 0, INT32_MAX},
    {"rope_layout", MEMBER(shape.rope.layout), false, OSCAR_ROPE_NONE, OSCAR_ROPE_HALF_SPLIT},
    {"rope_n_dims", MEMBER(shape.rope.n_dims), false, 0, OSCAR_MAX_HEAD_DIM},
    {"bits_k", MEMBER(bits_k), false, 2, 4},
    {"bits_v", MEMBER(bits_v), false, 2, 4},
    {"recipe", MEMBER(recipe), false, OSCAR_RECIPE_DEFAULT, OSCAR_RECIPE_ZOO},
    {"ldlq_k", MEMBER(ldlq_k), true, 0, 1},
    {"gain_k", MEMBER(gain_k), true, 0, 1},
    {"gain_v", MEMBER(gain_v), true, 0, 1},
};

const rotation_real rotation_reals[ROTATION_N_REALS] = {
    {"rope_magnitude", MEMBER(shape.rope.magnitude)},
    {"clip_k", MEMBER(clip_k)},
    {"clip_v", MEMBER(clip_v)},
};

void rotation_name(char *out, int32_t layer, const char *name) {
    snprintf(out, ROTATION_NAME_BYTES, "layers.%d.%s", (int)layer, name);
}

bool rotation_key_reserved(const char *key) {
    return !strcmp(key, "format") || !strcmp(key, "format_version") || !strcmp(key, "n_layers") ||
           !strncmp(key, "layers.", 7);
}

float **rotation_array(const rotations_layer *layer, const rotation_field *field) {
    return (float **)((uintptr_t)layer + field->member);
}

int32_t rotation_number_get(const rotations_layer *layer, const rotation_number *number) {
    const char *member = (const char *)layer + number->member;
    if (number->is_bool) return *(const bool *)member;
    return *(const int32_t *)(const void *)member;
}

float rotation_real_get(const rotations_layer *layer, const rotation_real *real) {
    float value;
    memcpy(&value, (const char *)layer + real->member, sizeof value);
    return value;
}

size_t rotation_head_floats(const rotation_field *field, int32_t head_dim) {
    size_t d = (size_t)head_dim;
    return field->shape == ROTATION_ROW ? d : d * d;
}

size_t rotation_head_file_floats(const rotation_field *field, int32_t head_dim) {
    size_t d = (size_t)head_dim;
    return field->shape == ROTATION_LOWER ? d * (d - 1) / 2 : rotation_head_floats(field, head_dim);
}

/* One line for what is wrong with the numbers, or NULL. */
static const char *wrong_numbers(const rotations_layer *layer) {
    const oscar_layer *s = &layer->shape;
    const oscar_rope *rope = &s->rope;
    if (s->head_dim % 16) return "head_dim is no multiple of 16";
    if (s->n_q_heads % s->n_kv_heads) return "n_q_heads is no multiple of n_kv_heads";
    if (s->n_q_heads / s->n_kv_heads > OSCAR_MAX_GQA_GROUP) return "too many query heads for a KV head";
    if (rope->n_dims % 2 || rope->n_dims > s->head_dim) return "rope_n_dims is odd or above head_dim";
    if ((rope->layout == OSCAR_ROPE_NONE) != (rope->n_dims == 0)) return "rope_layout and rope_n_dims contradict";
    if (layer->recipe == OSCAR_RECIPE_ZOO &&
        !(layer->clip_k > 0 && layer->clip_k <= 1 && layer->clip_v > 0 && layer->clip_v <= 1))
        return "a clip is outside (0, 1]";
    return NULL;
}

oscar_status rotation_numbers_check(const rotations_layer *layer, int32_t index, const char *path, oscar_status status,
                                    oscar_error *error) {
    for (int i = 0; i < ROTATION_N_NUMBERS; i++) {
        const rotation_number *number = &rotation_numbers[i];
        int32_t value = rotation_number_get(layer, number);
        if (value < number->least || value > number->most)
            return error_set(error, status, -1, "%s: layers.%d.%s: found %d, expected %d to %d", path, (int)index,
                             number->name, (int)value, (int)number->least, (int)number->most);
    }
    const char *wrong = wrong_numbers(layer);
    return wrong ? error_set(error, status, -1, "%s: layer %d: %s", path, (int)index, wrong) : OSCAR_OK;
}

oscar_status rotation_contents_check(const oscar_rotations *rotations, const char *path, oscar_status status,
                                     oscar_error *error) {
    oscar_error found = {0};
    oscar_status wrong = rotations_check(rotations, &found);
    if (wrong == OSCAR_OK) return OSCAR_OK;
    if (wrong == OSCAR_ERROR_ARGUMENT || wrong == OSCAR_ERROR_FORMAT) wrong = status;
    return error_set(error, wrong, -1, "%s: %s", path, found.message);
}
