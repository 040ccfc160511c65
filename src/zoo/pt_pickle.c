/*
 * pt_pickle.c - reads the pickle of a rotation file without running anything.
 *
 * A pickle is a program for a stack machine. Of its instructions this reader knows those that build
 * plain values, and of the calls that a pickle can make two: torch._utils._rebuild_tensor_v2 and
 * collections.OrderedDict, which become values here. Every other name or instruction is refused.
 * Values are made once, refer to each other by index and are never walked recursively, so a pickle
 * that contains itself does no harm.
 */
#include <stdlib.h>

#include "zoo/pt.h"

typedef struct machine {
    pickle *p;
    const uint8_t *bytes;
    size_t n_bytes, at;
    const char *file_name;
    oscar_error *error;
    int32_t *stack; /* values */
    size_t depth, stack_capacity;
    int32_t *memo; /* values, -1: none */
    size_t n_memo, memo_capacity;
} machine;

static oscar_status fail(machine *m, const char *what) {
    return error_set(m->error, OSCAR_ERROR_FORMAT, (int64_t)m->at, "%s: data.pkl, byte %zu: %s", m->file_name, m->at,
                     what);
}
static oscar_status no_memory(machine *m) {
    return error_set(m->error, OSCAR_ERROR_MEMORY, -1, "%s: no memory for data.pkl", m->file_name);
}

static oscar_status push_index(machine *m, int32_t index) {
    if (!array_grow((void **)&m->stack, m->depth, &m->stack_capacity, sizeof *m->stack)) return no_memory(m);
    m->stack[m->depth++] = index;
    return OSCAR_OK;
}

static oscar_status push(machine *m, pickle_value value) {
    pickle *p = m->p;
    if (!array_grow((void **)&p->values, p->n_values, &p->values_capacity, sizeof value)) return no_memory(m);
    p->values[p->n_values] = value;
    return push_index(m, (int32_t)p->n_values++);
}
static oscar_status push_number(machine *m, pickle_kind kind, int64_t number) {
    return push(m, (pickle_value){.kind = (uint8_t)kind, .number = number});
}

static pickle_value *value_at(machine *m, int32_t index) { return &m->p->values[index]; }

/* The values above the topmost mark; the mark's place in *mark. */
static oscar_status find_mark(machine *m, size_t *mark) {
    for (size_t i = m->depth; i-- > 0;)
        if (value_at(m, m->stack[i])->kind == PICKLE_MARK) {
            *mark = i;
            return OSCAR_OK;
        }
    return fail(m, "no mark on the stack");
}

static oscar_status append(machine *m, int32_t container, int32_t item) {
    pickle_value *v = value_at(m, container);
    if (value_at(m, item)->kind == PICKLE_MARK) return fail(m, "a mark used as a value");
    if (!array_grow((void **)&v->items, (size_t)v->n_items, &v->capacity, sizeof *v->items)) return no_memory(m);
    v->items[v->n_items++] = item;
    return OSCAR_OK;
}

/* Pops everything from stack place `first` on into the container. */
static oscar_status append_from(machine *m, int32_t container, size_t first) {
    oscar_status status = OSCAR_OK;
    for (size_t i = first; i < m->depth && !status; i++) status = append(m, container, m->stack[i]);
    m->depth = first;
    return status;
}

/* The n topmost values become one tuple. */
static oscar_status make_tuple(machine *m, size_t n) {
    if (m->depth < n) return fail(m, "the stack is too short");
    size_t first = m->depth - n;
    oscar_status status = push(m, (pickle_value){.kind = PICKLE_SEQUENCE});
    if (status) return status;
    int32_t tuple = m->stack[--m->depth];
    status = append_from(m, tuple, first);
    return status ? status : push_index(m, tuple);
}

static oscar_status make_marked_tuple(machine *m) {
    size_t mark = 0;
    oscar_status status = find_mark(m, &mark);
    if (!status) status = make_tuple(m, m->depth - mark - 1);
    if (status) return status;
    m->stack[mark] = m->stack[mark + 1]; /* the tuple takes the mark's place */
    m->depth = mark + 1;
    return OSCAR_OK;
}

/* Adds what lies from place `first` on to the container below it. */
static oscar_status extend(machine *m, pickle_kind kind, size_t below, size_t first) {
    if (below >= m->depth || first > m->depth) return fail(m, "the stack is too short");
    int32_t container = m->stack[below];
    if (value_at(m, container)->kind != kind) return fail(m, "adding to a value that is no list or dict");
    if (kind == PICKLE_DICT && (m->depth - first) % 2) return fail(m, "a key without a value");
    oscar_status status = append_from(m, container, first);
    m->depth = below + 1;
    return status;
}
static oscar_status extend_marked(machine *m, pickle_kind kind) {
    size_t mark = 0;
    oscar_status status = find_mark(m, &mark);
    if (status) return status;
    return mark == 0 ? fail(m, "the stack is too short") : extend(m, kind, mark - 1, mark + 1);
}
static oscar_status extend_by(machine *m, pickle_kind kind, size_t n) {
    return m->depth <= n ? fail(m, "the stack is too short") : extend(m, kind, m->depth - n - 1, m->depth - n);
}

/* n bytes of operand; NULL when the pickle ends before. */
static const uint8_t *take(machine *m, size_t n) {
    if (m->n_bytes - m->at < n) return NULL;
    m->at += n;
    return m->bytes + m->at - n;
}

/* "module\nname\n" */
static oscar_status read_global(machine *m) {
    static const char *const known[] = {
        [PICKLE_REBUILD_TENSOR] = "torch._utils\n_rebuild_tensor_v2\n",
        [PICKLE_ORDERED_DICT] = "collections\nOrderedDict\n",
        [PICKLE_FLOAT_STORAGE] = "torch\nFloatStorage\n",
    };
    for (int i = 0; i < (int)(sizeof known / sizeof *known); i++) {
        size_t n = strlen(known[i]);
        if (m->n_bytes - m->at < n || memcmp(m->bytes + m->at, known[i], n)) continue;
        m->at += n;
        return push_number(m, PICKLE_GLOBAL, i);
    }
    char name[64];
    size_t n = 0;
    for (int lines = 0; lines < 2 && n + 1 < sizeof name && m->at + n < m->n_bytes; n++) {
        uint8_t c = m->bytes[m->at + n];
        lines += c == '\n';
        name[n] = c >= 0x20 && c < 0x7f ? (char)c : ' ';
    }
    name[n] = '\0';
    return error_set(m->error, OSCAR_ERROR_FORMAT, (int64_t)m->at,
                     "%s: data.pkl, byte %zu: names %s, which a rotation file has no use for", m->file_name, m->at,
                     name);
}

static const pickle_value *item(machine *m, const pickle_value *sequence, int32_t i, pickle_kind kind) {
    if (sequence->kind != PICKLE_SEQUENCE || i >= sequence->n_items) return NULL;
    const pickle_value *v = value_at(m, sequence->items[i]);
    return v->kind == kind ? v : NULL;
}

/* ("storage", torch.FloatStorage, key, device, n elements) */
static oscar_status read_storage(machine *m) {
    if (m->depth == 0) return fail(m, "the stack is too short");
    const pickle_value *id = value_at(m, m->stack[--m->depth]);
    const pickle_value *word = item(m, id, 0, PICKLE_TEXT), *type = item(m, id, 1, PICKLE_GLOBAL);
    const pickle_value *key = item(m, id, 2, PICKLE_TEXT), *n = item(m, id, 4, PICKLE_INT);
    if (!word || !pickle_text_is(word, "storage") || !type || type->number != PICKLE_FLOAT_STORAGE || !key || !n ||
        n->number < 0)
        return fail(m, "a persistent id that is no float32 storage");
    pickle_value storage = {
        .kind = PICKLE_STORAGE, .number = n->number, .text = key->text, .text_bytes = key->text_bytes};
    return push(m, storage);
}

/* Sizes and strides of a tensor: whole numbers from 0 to 2^31 - 1, so that a product of two
 * fits in 64 bits. */
static oscar_status take_dims(machine *m, const pickle_value *sequence) {
    pickle *p = m->p;
    for (int32_t i = 0; i < sequence->n_items; i++) {
        const pickle_value *v = item(m, sequence, i, PICKLE_INT);
        if (!v || v->number < 0 || v->number > INT32_MAX)
            return fail(m, "a size or stride is no number from 0 to 2^31 - 1");
        if (!array_grow((void **)&p->dims, p->n_dims, &p->dims_capacity, sizeof *p->dims)) return no_memory(m);
        p->dims[p->n_dims++] = v->number;
    }
    return OSCAR_OK;
}

/* (storage, offset, sizes, strides, requires_grad, hooks) */
static oscar_status rebuild_tensor(machine *m, const pickle_value *args) {
    const pickle_value *offset = item(m, args, 1, PICKLE_INT);
    const pickle_value *sizes = item(m, args, 2, PICKLE_SEQUENCE), *strides = item(m, args, 3, PICKLE_SEQUENCE);
    if (!item(m, args, 0, PICKLE_STORAGE) || !offset || offset->number < 0 || !sizes || !strides)
        return fail(m, "a tensor without storage, offset, sizes and strides");
    if (sizes->n_items != strides->n_items || sizes->n_items > PICKLE_MAX_DIMS)
        return fail(m, "a tensor of more than 4 dimensions, or with another number of strides");
    pickle_value tensor = {.kind = PICKLE_TENSOR,
                           .storage = args->items[0],
                           .number = offset->number,
                           .n_dims = sizes->n_items,
                           .dims = (int32_t)m->p->n_dims};
    oscar_status status = take_dims(m, sizes);
    if (!status) status = take_dims(m, strides);
    if (status) return status;
    const int64_t *size = m->p->dims + tensor.dims, *stride = size + tensor.n_dims;
    int64_t n = 1, last = 0, n_storage = value_at(m, tensor.storage)->number;
    for (int32_t i = 0; i < tensor.n_dims; i++) {
        if (size[i] == 0) return fail(m, "an empty tensor");
        if (__builtin_mul_overflow(n, size[i], &n)) return fail(m, "the tensor's sizes overflow");
        if (__builtin_add_overflow(last, (size[i] - 1) * stride[i], &last))
            return fail(m, "the tensor's strides overflow");
    }
    if (n > n_storage || offset->number >= n_storage || last >= n_storage - offset->number)
        return fail(m, "a tensor that reaches beyond its storage");
    return push(m, tensor);
}

static oscar_status reduce(machine *m) {
    if (m->depth < 2) return fail(m, "the stack is too short");
    m->depth -= 2;
    const pickle_value *what = value_at(m, m->stack[m->depth]), *args = value_at(m, m->stack[m->depth + 1]);
    if (what->kind != PICKLE_GLOBAL || args->kind != PICKLE_SEQUENCE)
        return fail(m, "a call of something that is no function");
    if (what->number == PICKLE_REBUILD_TENSOR) return rebuild_tensor(m, args);
    if (what->number == PICKLE_ORDERED_DICT && args->n_items == 0) return push(m, (pickle_value){.kind = PICKLE_DICT});
    return fail(m, "a call that a rotation file has no use for");
}

static oscar_status put_memo(machine *m, uint32_t index) {
    if (m->depth == 0) return fail(m, "the stack is empty");
    /* Indices count up in what torch writes; a gap would only serve to ask for memory. */
    if (index > m->n_memo) return fail(m, "a memo index out of order");
    if (!array_grow((void **)&m->memo, m->n_memo, &m->memo_capacity, sizeof *m->memo)) return no_memory(m);
    m->memo[index] = m->stack[m->depth - 1];
    if (index == m->n_memo) m->n_memo++;
    return OSCAR_OK;
}
static oscar_status get_memo(machine *m, uint32_t index) {
    return index < m->n_memo ? push_index(m, m->memo[index]) : fail(m, "a memo index that was not set");
}

/* LONG1: n bytes of two's complement. */
static oscar_status read_long(machine *m, const uint8_t *p, size_t n) {
    if (n > 8) return fail(m, "a whole number of more than 64 bits");
    uint64_t value = n && p[n - 1] & 0x80 ? UINT64_MAX : 0;
    for (size_t i = n; i-- > 0;) value = value << 8 | p[i];
    return push_number(m, PICKLE_INT, (int64_t)value);
}

static oscar_status read_float(machine *m, const uint8_t *p) {
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++) bits = bits << 8 | p[i];
    pickle_value value = {.kind = PICKLE_FLOAT};
    memcpy(&value.real, &bits, sizeof bits);
    return push(m, value);
}

/* Instructions with operands: bytes that follow the instruction. -1: not one of them. */
static int operand_bytes(uint8_t op) {
    switch (op) {
    case 0x80:
    case 'q':
    case 'h':
    case 'K':
    case 0x8a: return 1;
    case 'M': return 2;
    case 'r':
    case 'j':
    case 'J':
    case 'X': return 4;
    case 'G': return 8;
    default: return -1;
    }
}

static oscar_status step_operand(machine *m, uint8_t op, const uint8_t *p) {
    const uint8_t *more;
    switch (op) {
    case 0x80: return p[0] == 2 ? OSCAR_OK : fail(m, "a pickle of another protocol than 2");
    case 'q': return put_memo(m, p[0]);
    case 'r': return put_memo(m, load_u32(p));
    case 'h': return get_memo(m, p[0]);
    case 'j': return get_memo(m, load_u32(p));
    case 'K': return push_number(m, PICKLE_INT, p[0]);
    case 'M': return push_number(m, PICKLE_INT, load_u16(p));
    case 'J': return push_number(m, PICKLE_INT, (int32_t)load_u32(p));
    case 'G': return read_float(m, p);
    case 0x8a: more = take(m, p[0]); return more ? read_long(m, more, p[0]) : fail(m, "truncated");
    default: /* 'X' */
        more = take(m, load_u32(p));
        if (!more) return fail(m, "truncated text");
        if (!utf8_valid((const char *)more, load_u32(p))) return fail(m, "text that is not UTF-8");
        return push(m, (pickle_value){.kind = PICKLE_TEXT, .text = (const char *)more, .text_bytes = load_u32(p)});
    }
}

static oscar_status step_plain(machine *m, uint8_t op) {
    char what[64];
    switch (op) {
    case '(': return push(m, (pickle_value){.kind = PICKLE_MARK});
    case 'N': return push(m, (pickle_value){.kind = PICKLE_NONE});
    case 0x88: return push_number(m, PICKLE_BOOL, 1);
    case 0x89: return push_number(m, PICKLE_BOOL, 0);
    case '}': return push(m, (pickle_value){.kind = PICKLE_DICT});
    case ']':
    case ')': return push(m, (pickle_value){.kind = PICKLE_SEQUENCE});
    case 't': return make_marked_tuple(m);
    case 0x85:
    case 0x86:
    case 0x87: return make_tuple(m, (size_t)(op - 0x84));
    case 'a': return extend_by(m, PICKLE_SEQUENCE, 1);
    case 'e': return extend_marked(m, PICKLE_SEQUENCE);
    case 's': return extend_by(m, PICKLE_DICT, 2);
    case 'u': return extend_marked(m, PICKLE_DICT);
    case 'c': return read_global(m);
    case 'Q': return read_storage(m);
    case 'R': return reduce(m);
    default:
        snprintf(what, sizeof what, "instruction 0x%02x, which a rotation file has no use for", op);
        return fail(m, what);
    }
}

static oscar_status run(machine *m) {
    for (;;) {
        const uint8_t *op = take(m, 1);
        if (!op) return fail(m, "truncated: no end instruction");
        if (*op == '.') break;
        oscar_status status;
        int n = operand_bytes(*op);
        if (n < 0) {
            status = step_plain(m, *op);
        } else {
            const uint8_t *operand = take(m, (size_t)n);
            status = operand ? step_operand(m, *op, operand) : fail(m, "truncated");
        }
        if (status) return status;
    }
    if (m->depth != 1) return fail(m, "not exactly one value at the end");
    m->p->root = m->stack[0];
    return OSCAR_OK;
}

oscar_status pickle_read(pickle *out, const uint8_t *bytes, size_t n_bytes, const char *file_name, oscar_error *error) {
    memset(out, 0, sizeof *out);
    if (n_bytes > PICKLE_MAX_BYTES)
        return error_set(error, OSCAR_ERROR_FORMAT, -1, "%s: data.pkl: found %zu bytes, expected at most %u", file_name,
                         n_bytes, PICKLE_MAX_BYTES);
    machine m = {.p = out, .bytes = bytes, .n_bytes = n_bytes, .file_name = file_name, .error = error};
    oscar_status status = run(&m);
    free(m.stack);
    free(m.memo);
    if (status) pickle_free(out);
    return status;
}

void pickle_free(pickle *p) {
    for (size_t i = 0; i < p->n_values; i++) free(p->values[i].items);
    free(p->values);
    free(p->dims);
    memset(p, 0, sizeof *p);
}

bool pickle_text_is(const pickle_value *value, const char *text) {
    return value->kind == PICKLE_TEXT && value->text_bytes == strlen(text) &&
           !memcmp(value->text, text, value->text_bytes);
}

int32_t pickle_get(const pickle *p, int32_t dict, const char *key) {
    const pickle_value *v = dict < 0 ? NULL : &p->values[dict];
    if (!v || v->kind != PICKLE_DICT) return -1;
    for (int32_t i = 0; i + 1 < v->n_items; i += 2)
        if (pickle_text_is(&p->values[v->items[i]], key)) return v->items[i + 1];
    return -1;
}
