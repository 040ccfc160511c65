/* The names of methods, and the rotations that make them. */
#include "eval/methods.h"

#include <stdio.h>
#include <stdlib.h>

#include "codec/rotations.h"

/* OSCAR's published clips, which QuaRot is compared with as well. */
#define CLIP_K 0.96f
#define CLIP_V 0.92f

static const struct {
    const char *name;
    int32_t kind;
} known_methods[] = {
    {"exact", METHOD_EXACT},   {"int2", METHOD_INT2},   {"zoo", METHOD_ZOO},
    {"quarot", METHOD_QUAROT}, {"naive", METHOD_NAIVE}, {"kivi", METHOD_KIVI},
    {"bf16", METHOD_BF16},
};
#define N_KNOWN ((int)(sizeof known_methods / sizeof *known_methods))

static bool read_bits(const char **at, int32_t *bits) {
    if (**at < '2' || **at > '4') return false;
    *bits = **at - '0';
    (*at)++;
    return true;
}

/* N, kN, vN or kNvM up to '@' or the end. */
static bool parse_bits(const char **at, compare_method *method) {
    if (**at >= '0' && **at <= '9') {
        if (!read_bits(at, &method->bits_k)) return false;
        method->bits_v = method->bits_k;
        return true;
    }
    bool any = false;
    if (**at == 'k') {
        (*at)++;
        if (!read_bits(at, &method->bits_k)) return false;
        any = true;
    }
    if (**at == 'v') {
        (*at)++;
        if (!read_bits(at, &method->bits_v)) return false;
        any = true;
    }
    return any;
}

static bool parse_number(const char **at, int32_t *number) {
    if (**at < '0' || **at > '9') return false;
    int64_t value = 0;
    for (; **at >= '0' && **at <= '9' && value < 100000000; (*at)++) value = value * 10 + (**at - '0');
    *number = (int32_t)value;
    return value < 100000000;
}

/* One item without commas. */
static oscar_status parse_method(const char *item, compare_method *method, oscar_error *error) {
    size_t length = strcspn(item, ":@");
    int found = -1;
    for (int i = 0; i < N_KNOWN; i++)
        if (strlen(known_methods[i].name) == length && strncmp(known_methods[i].name, item, length) == 0) found = i;
    if (found < 0)
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "unknown method '%.40s', expected exact, bf16, int2, zoo, quarot, naive or kivi", item);
    memset(method, 0, sizeof *method);
    snprintf(method->name, sizeof method->name, "%s", item);
    method->kind = known_methods[found].kind;
    method->sink = method->recent = -1;
    const char *at = item + length;
    if (*at == ':') {
        at++;
        if (method->kind == METHOD_EXACT || method->kind == METHOD_BF16 || !parse_bits(&at, method))
            return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "method '%.40s': after ':' expected bits such as 3, k3, v4 or k3v2 (2 to 4)", item);
    }
    if (*at == '@') {
        at++;
        bool ok = parse_number(&at, &method->sink) && *at == '/';
        at += ok;
        if (!ok || !parse_number(&at, &method->recent))
            return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "method '%.40s': after '@' expected windows such as 64/256", item);
    }
    if (*at != '\0')
        return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "method '%.40s': '%.20s' makes no sense here", item, at);
    return OSCAR_OK;
}

oscar_status compare_parse_methods(const char *list, compare_method methods[COMPARE_MAX_METHODS], int32_t *n_methods,
                                   oscar_error *error) {
    *n_methods = 0;
    for (const char *at = list;;) {
        size_t length = strcspn(at, ",");
        char item[sizeof methods[0].name];
        if (length == 0 || length >= sizeof item)
            return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "method '%.40s' is empty or too long in '%.80s'", at, list);
        if (*n_methods == COMPARE_MAX_METHODS)
            return error_set(error, OSCAR_ERROR_ARGUMENT, -1, "more than %d methods", COMPARE_MAX_METHODS);
        memcpy(item, at, length);
        item[length] = '\0';
        oscar_status status = parse_method(item, &methods[*n_methods], error);
        if (status != OSCAR_OK) return status;
        ++*n_methods;
        if (at[length] == '\0') return OSCAR_OK;
        at += length + 1;
    }
}

/* A rotation set with the published quantiser and nothing of ours. */
static void published_quantiser(oscar_rotations *rotations, float clip_k, float clip_v) {
    for (int32_t i = 0; i < rotations->n_layers; i++) {
        rotations_layer *layer = &rotations->layers[i];
        layer->recipe = OSCAR_RECIPE_ZOO;
        layer->clip_k = clip_k;
        layer->clip_v = clip_v;
        layer->ldlq_k = layer->gain_k = layer->gain_v = false;
    }
}

oscar_status method_rotations(const compare_method *method, const oscar_layer *layers, int32_t n_layers,
                              oscar_rotations **out, oscar_error *error) {
    *out = NULL;
    oscar_status status = OSCAR_OK;
    if (method->kind == METHOD_QUAROT) {
        status = oscar_rotations_hadamard(out, layers, n_layers, 2, error);
        if (status == OSCAR_OK) published_quantiser(*out, CLIP_K, CLIP_V);
    } else if (method->kind == METHOD_NAIVE || method->kind == METHOD_KIVI || method->kind == METHOD_BF16) {
        status = oscar_rotations_identity(out, layers, n_layers, 2, error);
        if (status == OSCAR_OK) published_quantiser(*out, 1, 1);
    }
    return status;
}
