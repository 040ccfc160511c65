/*
 * test_zoo_pt.c - RotationZoo files and GGUF rotation tensors: read, converted, written, refused.
 */
#include <sys/stat.h>
#include <unistd.h>

#include "oscar/zoo.h"
#include "test_zoo_util.h"

#define ZOO OSCAR_TEST_DATA "/zoo/"
#define WRITTEN OSCAR_BUILD_DIR "/test_zoo_pt.pt"

typedef oscar_status (*read_fn)(oscar_zoo_file **out, const byte_source *source, oscar_error *error);

static oscar_status read_bytes(read_fn read, const uint8_t *bytes, size_t n, oscar_zoo_file **out, oscar_error *error) {
    byte_source source = source_from_memory(bytes, n, "bytes");
    memset(error, 0, sizeof *error);
    return read(out, &source, error);
}

static oscar_zoo_file *open_golden(const char *name) {
    char path[512];
    oscar_error error = {0};
    oscar_zoo_file *file;
    snprintf(path, sizeof path, ZOO "%s", name);
    assert_status(oscar_zoo_open(&file, path, &error), OSCAR_OK, &error);
    return file;
}

static oscar_layer layer_of(int32_t n_kv_heads, int32_t head_dim) {
    return (oscar_layer){.n_kv_heads = n_kv_heads, .n_q_heads = n_kv_heads, .head_dim = head_dim};
}

static void assert_golden(const float *rotation, int layer, int n_heads, bool shared) {
    for (int h = 0; h < n_heads; h++)
        for (int i = 0; i < GOLDEN_D; i++)
            for (int j = 0; j < GOLDEN_D; j++)
                assert_true(rotation[(h * GOLDEN_D + i) * GOLDEN_D + j] ==
                            golden_rotation(layer, shared ? 0 : h, i, j));
}

/* ------------------------------------------------------------------------------------------------
 * Reading and converting
 */

static void test_version_1(void **state) {
    (void)state;
    oscar_error error = {0};
    oscar_zoo_file *file = open_golden("golden_v1.pt");
    assert_int_equal(oscar_zoo_get_format(file), OSCAR_ZOO_PT);
    assert_int_equal(oscar_zoo_get_version(file), 1);
    assert_int_equal(oscar_zoo_n_layers(file), 2);
    assert_int_equal(oscar_zoo_n_tensors(file), 4);
    oscar_zoo_tensor t;
    assert_int_equal(oscar_zoo_get_tensor(file, 2, &t), OSCAR_OK);
    assert_string_equal(t.name, "layers.1.rotation");
    assert_string_equal(t.dtype, "F32");
    assert_true(t.n_dims == 2 && t.shape[0] == 16 && t.shape[1] == 16);
    assert_int_equal(oscar_zoo_get_tensor(file, 4, &t), OSCAR_ERROR_ARGUMENT);
    assert_string_equal(oscar_zoo_metadata_key(file, 0), "objective");
    assert_string_equal(oscar_zoo_metadata_value(file, 0), "qqt_r_h_pbr");
    assert_null(oscar_zoo_metadata_key(file, oscar_zoo_n_metadata(file)));
    const oscar_layer layers[2] = {layer_of(3, 16), layer_of(1, 16)};
    oscar_rotations *r;
    assert_status(oscar_zoo_to_rotations(&r, file, NULL, layers, 2, &error), OSCAR_OK, &error);
    assert_golden(r->layers[0].k_rotation, 0, 3, true);
    assert_golden(r->layers[1].k_rotation, 1, 1, true);
    assert_null(r->layers[0].v_rotation);
    assert_true(r->layers[0].recipe == OSCAR_RECIPE_ZOO && r->layers[0].clip_k == 0.96f &&
                r->layers[0].clip_v == 0.92f);
    assert_string_equal(oscar_rotations_metadata(r, "k.calibration.tokens"), "1000");
    assert_string_equal(oscar_rotations_metadata(r, "k.calibration.created_at_unix"), "1.5");
    oscar_rotations_free(r);
    oscar_zoo_free(file);
}

static void test_version_2(void **state) {
    (void)state;
    oscar_error error = {0};
    oscar_zoo_file *file = open_golden("golden_v2.pt");
    const oscar_layer layer = layer_of(2, 16);
    oscar_rotations *r;
    assert_int_equal(oscar_zoo_get_version(file), 2);
    assert_status(oscar_zoo_to_rotations(&r, file, file, &layer, 1, &error), OSCAR_OK, &error);
    assert_golden(r->layers[0].k_rotation, 0, 2, false);
    assert_golden(r->layers[0].v_rotation, 0, 2, false);
    for (int i = 0; i < 32; i++) assert_true(r->layers[0].k_mean[i] == 0.5f * (float)i);
    oscar_rotations_free(r);
    oscar_zoo_free(file);
}

static void test_gguf(void **state) {
    (void)state;
    oscar_error error = {0};
    oscar_zoo_file *file = open_golden("golden_rot.gguf.bin");
    assert_int_equal(oscar_zoo_get_format(file), OSCAR_ZOO_GGUF);
    assert_int_equal(oscar_zoo_n_tensors(file), 3);
    const oscar_layer layers[2] = {layer_of(2, 16), layer_of(1, 16)};
    oscar_rotations *r;
    assert_status(oscar_zoo_to_rotations(&r, file, file, layers, 1, &error), OSCAR_ERROR_MISMATCH, &error);
    assert_status(oscar_zoo_to_rotations(&r, file, file, layers, 2, &error), OSCAR_ERROR_MISMATCH, &error);
    assert_message(&error, "value rotation of layer 1: found none");
    assert_status(oscar_zoo_to_rotations(&r, file, NULL, layers, 2, &error), OSCAR_OK, &error);
    assert_golden(r->layers[0].k_rotation, 0, 2, true);
    assert_golden(r->layers[1].k_rotation, 2, 1, true);
    oscar_rotations_free(r);
    oscar_zoo_free(file);
}

static void test_mismatch(void **state) {
    (void)state;
    oscar_error error = {0};
    oscar_rotations *r = NULL;
    oscar_zoo_file *one = open_golden("golden_v1.pt"), *two = open_golden("golden_v2.pt"),
                   *ours = open_golden("golden.safetensors");
    const oscar_layer good[3] = {layer_of(1, 16), layer_of(1, 16), layer_of(1, 16)};
    oscar_layer bad = layer_of(3, 16);
    assert_int_equal(oscar_zoo_to_rotations(&r, two, NULL, &bad, 1, &error), OSCAR_ERROR_MISMATCH);
    assert_message(&error, "key rotation of layer 0: found [2,16,16], expected [16,16] or [3,16,16]");
    bad = layer_of(2, 32);
    assert_int_equal(oscar_zoo_to_rotations(&r, NULL, two, &bad, 1, &error), OSCAR_ERROR_MISMATCH);
    assert_message(&error, "value rotation of layer 0: found [2,16,16], expected [32,32] or [2,32,32]");
    assert_int_equal(oscar_zoo_to_rotations(&r, one, NULL, good, 3, &error), OSCAR_ERROR_MISMATCH);
    assert_message(&error, "layer 2: found none");
    assert_int_equal(oscar_zoo_to_rotations(&r, one, NULL, good, 1, &error), OSCAR_ERROR_MISMATCH);
    assert_message(&error, "found 2 layers, expected 1");
    assert_int_equal(oscar_zoo_to_rotations(&r, ours, NULL, good, 2, &error), OSCAR_ERROR_UNSUPPORTED);
    assert_int_equal(oscar_zoo_to_rotations(&r, one, NULL, good, 0, &error), OSCAR_ERROR_ARGUMENT);
    assert_int_equal(oscar_zoo_to_rotations(&r, one, NULL, NULL, 1, &error), OSCAR_ERROR_ARGUMENT);
    assert_null(r);
    oscar_zoo_free(one);
    oscar_zoo_free(two);
    oscar_zoo_free(ours);
    oscar_zoo_free(NULL);
}

/* ------------------------------------------------------------------------------------------------
 * Writing
 */

static void test_write(void **state) {
    (void)state;
    oscar_error error = {0};
    uint64_t rng = rng_seed("write", 11);
    const oscar_layer layers[3] = {layer_of(2, 32), layer_of(3, 48), layer_of(1, 16)};
    oscar_rotations *r = rotations_new(layers, 3), *back;
    for (int i = 0; i < 3; i++)
        r->layers[i].recipe = OSCAR_RECIPE_ZOO, r->layers[i].clip_k = 0.96f, r->layers[i].clip_v = 0.92f;
    r->layers[0].k_rotation = random_rotation(&rng, 2, 32);
    r->layers[1].k_rotation = random_rotation(&rng, 1, 48);
    float *shared = aligned_calloc(3 * 48 * 48, sizeof *shared);
    for (int h = 0; h < 3; h++) memcpy(shared + h * 48 * 48, r->layers[1].k_rotation, 48 * 48 * sizeof *shared);
    aligned_free(r->layers[1].k_rotation);
    r->layers[1].k_rotation = shared;
    r->layers[0].k_mean = random_array(&rng, 64);
    rotations_set_meta(r, "k.objective", "something");
    assert_status(oscar_zoo_write_pt(r, OSCAR_ZOO_KEY, false, WRITTEN, &error), OSCAR_OK, &error);
    oscar_zoo_file *file;
    assert_status(oscar_zoo_open(&file, WRITTEN, &error), OSCAR_OK, &error);
    assert_int_equal(oscar_zoo_get_version(file), 2);
    oscar_zoo_tensor t;
    assert_int_equal(oscar_zoo_get_tensor(file, 0, &t), OSCAR_OK);
    assert_int_equal(t.n_dims, 3);
    assert_int_equal(oscar_zoo_get_tensor(file, 2, &t), OSCAR_OK);
    assert_int_equal(t.n_dims, 2); /* one matrix for all heads */
    assert_status(oscar_zoo_to_rotations(&back, file, NULL, layers, 3, &error), OSCAR_OK, &error);
    assert_memory_equal(back->layers[0].k_rotation, r->layers[0].k_rotation, 2 * 32 * 32 * sizeof(float));
    assert_memory_equal(back->layers[1].k_rotation, shared, 3 * 48 * 48 * sizeof(float));
    assert_memory_equal(back->layers[0].k_mean, r->layers[0].k_mean, 64 * sizeof(float));
    for (int i = 0; i < 256; i++) assert_true(back->layers[2].k_rotation[i] == (i % 17 == 0)); /* none: the identity */
    assert_string_equal(oscar_rotations_metadata(back, "k.objective"), "something");
    oscar_zoo_free(file);
    oscar_rotations_free(back);

    r->layers[1].bits_k = 3;
    assert_int_equal(oscar_zoo_write_pt(r, OSCAR_ZOO_KEY, false, WRITTEN, &error), OSCAR_ERROR_MISMATCH);
    assert_message(&error, "layer 1: bits");
    assert_status(oscar_zoo_write_pt(r, OSCAR_ZOO_KEY, true, WRITTEN, &error), OSCAR_OK, &error);
    assert_int_equal(oscar_zoo_write_pt(r, 2, true, WRITTEN, &error), OSCAR_ERROR_ARGUMENT);
    assert_int_equal(oscar_zoo_write_pt(r, OSCAR_ZOO_VALUE, true, OSCAR_BUILD_DIR "/absent/x.pt", &error),
                     OSCAR_ERROR_IO);
    oscar_rotations_free(r);
    unlink(WRITTEN);
}

/* The published rotations of Qwen3-4B: read, converted, saved and loaded, written and read again. */
static void test_published(void **state) {
    (void)state;
    static const char folder[] = OSCAR_SHARED_DIR "/data/rotations/qwen3-4b-thinking-2507/";
    oscar_error error = {0};
    oscar_zoo_file *files[2], *again;
    char path[1024];
    for (int side = 0; side < 2; side++) {
        snprintf(path, sizeof path, "%s%s", folder, side ? "v_rotation_sst_r_h_pbr.pt" : "k_rotation_qqt_r_h_pbr.pt");
        if (access(path, R_OK)) {
            print_message("skipped: no published rotations at hand\n");
            skip();
        }
        assert_status(oscar_zoo_open(&files[side], path, &error), OSCAR_OK, &error);
        assert_int_equal(oscar_zoo_n_layers(files[side]), 36);
    }
    oscar_layer layers[36];
    for (int i = 0; i < 36; i++) layers[i] = layer_of(2, 128);
    oscar_rotations *r, *back;
    assert_status(oscar_zoo_to_rotations(&r, files[0], files[1], layers, 36, &error), OSCAR_OK, &error);
    assert_memory_equal(r->layers[35].k_rotation, r->layers[35].k_rotation + 128 * 128, 128 * 128 * sizeof(float));
    assert_memory_not_equal(r->layers[35].k_rotation, r->layers[35].v_rotation, 128 * 128 * sizeof(float));
    assert_status(oscar_zoo_write_pt(r, OSCAR_ZOO_VALUE, false, WRITTEN, &error), OSCAR_OK, &error);
    assert_status(oscar_zoo_open(&again, WRITTEN, &error), OSCAR_OK, &error);
    assert_status(oscar_zoo_to_rotations(&back, NULL, again, layers, 36, &error), OSCAR_OK, &error);
    for (int i = 0; i < 36; i++)
        assert_memory_equal(r->layers[i].v_rotation, back->layers[i].v_rotation, 2 * 128 * 128 * sizeof(float));
    unlink(WRITTEN);
    oscar_zoo_free(files[0]);
    oscar_zoo_free(files[1]);
    oscar_zoo_free(again);
    oscar_rotations_free(r);
    oscar_rotations_free(back);

    /* A hybrid model's file: layers 3, 7, ... share one Hadamard of d 256. */
    oscar_zoo_file *hybrid;
    assert_status(oscar_zoo_open(&hybrid, OSCAR_SHARED_DIR "/data/rotations/qwen3.5-4b-hadamard/k_rotation.pt", &error),
                  OSCAR_OK, &error);
    assert_int_equal(oscar_zoo_n_layers(hybrid), 8);
    const zoo_tensor *first = zoo_find(hybrid, 3, ".rotation"), *last = zoo_find(hybrid, 31, ".rotation");
    assert_ptr_equal(first->data, last->data);
    for (int i = 0; i < 256 * 256; i++) assert_true(fabsf(first->data[i]) == 0.0625f);
    oscar_zoo_free(hybrid);
}

/* ------------------------------------------------------------------------------------------------
 * Refusing
 */

static void test_hostile(void **state) {
    (void)state;
    oscar_error error = {0};
    oscar_zoo_file *file = NULL;
    assert_int_equal(oscar_zoo_open(&file, ZOO "hostile.pt", &error), OSCAR_ERROR_FORMAT);
    assert_message(&error, "posix system");
    assert_int_equal(oscar_zoo_open(&file, ZOO "make_golden.py", &error), OSCAR_ERROR_FORMAT);
    assert_int_equal(oscar_zoo_open(&file, "/dev/null", &error), OSCAR_ERROR_IO);
    assert_null(file);
}

static const struct {
    const char *name;
    read_fn read;
} formats[] = {{"golden_v1.pt", zoo_pt_read}, {"golden_v2.pt", zoo_pt_read}, {"golden_rot.gguf.bin", zoo_gguf_read}};

static void test_cut_at_every_byte(void **state) {
    (void)state;
    for (int f = 0; f < 3; f++) {
        char path[512];
        size_t n;
        snprintf(path, sizeof path, ZOO "%s", formats[f].name);
        uint8_t *bytes = read_file(path, &n);
        for (size_t cut = 0; cut < n; cut++) {
            oscar_error error;
            oscar_zoo_file *file;
            uint8_t *part = exact_copy(bytes, cut);
            assert_status(read_bytes(formats[f].read, part, cut, &file, &error), OSCAR_ERROR_FORMAT, &error);
            assert_null(file);
            free(part);
        }
        free(bytes);
    }
}

static void test_flip_every_bit(void **state) {
    (void)state;
    for (int f = 0; f < 3; f++) {
        char path[512];
        size_t n, n_read = 0;
        snprintf(path, sizeof path, ZOO "%s", formats[f].name);
        uint8_t *bytes = read_file(path, &n);
        for (size_t bit = 0; bit < 8 * n; bit++) {
            oscar_error error;
            oscar_zoo_file *file;
            bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
            if (read_bytes(formats[f].read, bytes, n, &file, &error) == OSCAR_OK)
                n_read++;
            else
                assert_true(!file && error.message[0]);
            oscar_zoo_free(file);
            bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        }
        /* The archive's CRCs cover pickle and data: what is left to flip are dates and flags. */
        if (formats[f].read == zoo_pt_read && n_read > 8 * n / 10)
            fail_msg("%zu of %zu flips were not noticed", n_read, 8 * n);
        free(bytes);
    }
}

/* Pickles in an archive whose CRCs are right: replaces `from` in data.pkl (same length). */
static oscar_status read_with(const char *name, const char *from, const char *to, size_t n_change, oscar_error *error) {
    char path[512];
    size_t n;
    snprintf(path, sizeof path, ZOO "%s", name);
    uint8_t *bytes = read_file(path, &n);
    uint8_t *at = memmem(bytes, n, from, n_change);
    if (!at) fail_msg("no %s in %s", from, name);
    memcpy(at, to, n_change);
    /* Entry 0 is data.pkl: local header, name, data. Its CRC stands there and in the directory. */
    uint32_t n_pickle = load_u32(bytes + 18), before = load_u32(bytes + 14);
    uint32_t crc = crc32_update(0, bytes + 30 + load_u16(bytes + 26) + load_u16(bytes + 28), n_pickle);
    for (size_t i = 0; i + 4 <= n; i++)
        if (load_u32(bytes + i) == before) memcpy(bytes + i, &crc, 4);
    oscar_zoo_file *file = NULL;
    oscar_status status = read_bytes(zoo_pt_read, bytes, n, &file, error);
    oscar_zoo_free(file);
    free(bytes);
    return status;
}

static void test_pickles(void **state) {
    (void)state;
    static const struct {
        const char *from, *to;
        size_t n; /* bytes of both */
        oscar_status status;
        const char *message;
    } cases[] = {
        {"objective", "objectivf", 9, OSCAR_OK, ""},
        {"format_version\x4b\x01", "format_version\x4b\x04", 16, OSCAR_ERROR_UNSUPPORTED, "found 4"},
        {"format_version\x4b\x01", "format_versiom\x4b\x01", 16, OSCAR_ERROR_FORMAT, "format_version"},
        {"_rebuild_tensor_v2", "_rebuild_tensor_v3", 18, OSCAR_ERROR_FORMAT, "_rebuild_tensor_v3"},
        {"OrderedDict", "OrderedDicu", 11, OSCAR_ERROR_FORMAT, "OrderedDicu"},
        {"FloatStorage", "BloatStorage", 12, OSCAR_ERROR_FORMAT, "BloatStorage"},
        {"storage", "Storage", 7, OSCAR_ERROR_FORMAT, "float32 storage"},
        {"layer_id\x4b\x01", "layer_id\x4b\x02", 10, OSCAR_ERROR_FORMAT, "layer_id"},
        {"rotation\x63", "rotatiom\x63", 9, OSCAR_ERROR_FORMAT, "layers.0.rotation: found none"},
        {"\x4d\x00\x02\x74\x51", "\x4d\x01\x02\x74\x51", 5, OSCAR_ERROR_FORMAT, "found 2048 bytes"},
        {"(\x4b\x10\x4b\x10t", "(\x4b\x10\x4b\x11t", 6, OSCAR_ERROR_FORMAT, "[d, d]"},
        {"(\x4b\x10\x4b\x10t", "(\x4b\xff\x4b\xfft", 6, OSCAR_ERROR_FORMAT, "beyond its storage"},
        {"(\x4b\x10\x4b\x10t", "(\x4b\x00\x4b\x10t", 6, OSCAR_ERROR_FORMAT, "empty tensor"},
        {"\x51\x4d\x00\x01(", "\x51\x4d\x01\x01(", 5, OSCAR_ERROR_FORMAT, "beyond its storage"}, /* offset 257 of 512 */
        {"\x80\x02}", "\x80\x03}", 3, OSCAR_ERROR_FORMAT, "protocol"},
        {"\x80\x02}", "\x80\x02i", 3, OSCAR_ERROR_FORMAT, "instruction 0x69"},
        {"\x80\x02}", "\x80\x02)", 3, OSCAR_ERROR_FORMAT, "no list or dict"},
        {"uu.", "u..", 3, OSCAR_ERROR_FORMAT, "exactly one value"},
        {"uu.", "uuu", 3, OSCAR_ERROR_FORMAT, "no mark"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        oscar_error error;
        oscar_status status = read_with("golden_v1.pt", cases[i].from, cases[i].to, cases[i].n, &error);
        if (status != cases[i].status)
            fail_msg("case %zu %s: status %d %s", i, cases[i].to, (int)status, error.message);
        assert_message(&error, cases[i].message);
    }
}

/* ------------------------------------------------------------------------------------------------
 * GGUF headers
 */

typedef struct gguf_case {
    const char *key; /* one metadata pair of this key, type and raw value */
    uint32_t type;
    uint64_t value;
    int n_value;
    uint32_t n_dims; /* one tensor */
    uint64_t dims[4];
    uint32_t kind;
    uint64_t offset;
    const char *message; /* NULL: a good file */
} gguf_case;

static void put(byte_buffer *b, uint64_t v, int n) { buffer_put(b, &v, (size_t)n); }
static void put_name(byte_buffer *b, const char *text) {
    put(b, strlen(text), 8);
    buffer_put_text(b, text);
}

static oscar_status read_case(const gguf_case *c, oscar_error *error) {
    byte_buffer b = {0};
    buffer_put_text(&b, "GGUF");
    put(&b, 3, 4);
    put(&b, 1, 8);
    put(&b, 1, 8);
    put_name(&b, c->key);
    put(&b, c->type, 4);
    if (c->type == 9) put(&b, 8, 4); /* an array of texts */
    put(&b, c->value, c->n_value);
    put_name(&b, "blk.3.attn_k_rot.weight");
    put(&b, c->n_dims, 4);
    for (uint32_t i = 0; i < c->n_dims && i < 4; i++) put(&b, c->dims[i], 8);
    put(&b, c->kind, 4);
    put(&b, c->offset, 8);
    while (b.n_bytes % 32) put(&b, 0, 1);
    for (int i = 0; i < 256; i++) put(&b, float_bits(1.0f), 4);
    oscar_zoo_file *file = NULL;
    oscar_status status = read_bytes(zoo_gguf_read, b.bytes, b.n_bytes, &file, error);
    oscar_zoo_free(file);
    buffer_free(&b);
    return status;
}

static void test_gguf_headers(void **state) {
    (void)state;
    static const gguf_case cases[] = {
        {"a", 4, 7, 4, 2, {16, 16}, 0, 0, NULL},
        {"a", 9, 0, 8, 2, {16, 16}, 0, 0, NULL},
        {"general.alignment", 4, 32, 4, 2, {16, 16}, 0, 0, NULL},
        {"general.alignment", 4, 0, 4, 2, {16, 16}, 0, 0, "general.alignment"},
        {"general.alignment", 4, 3, 4, 2, {16, 16}, 0, 0, "general.alignment"},
        {"general.alignment", 10, 32, 8, 2, {16, 16}, 0, 0, "general.alignment"},
        {"", 4, 7, 4, 2, {16, 16}, 0, 0, "a metadata key"},
        {"a", 13, 7, 4, 2, {16, 16}, 0, 0, "unknown type"},
        {"a", 8, 1ull << 63, 8, 2, {16, 16}, 0, 0, "truncated"},
        {"a", 9, 1ull << 62, 8, 2, {16, 16}, 0, 0, "truncated"},
        {"a", 7, 2, 1, 2, {16, 16}, 0, 0, "neither 0 nor 1"},
        {"a", 4, 7, 4, 0, {0}, 0, 0, "dimensions"},
        {"a", 4, 7, 4, 5, {1, 1, 1, 1}, 0, 0, "dimensions"},
        {"a", 4, 7, 4, UINT32_MAX, {1, 1, 1, 1}, 0, 0, "dimensions"},
        {"a", 4, 7, 4, 2, {16, 0}, 0, 0, "dimension is 0"},
        {"a", 4, 7, 4, 2, {(1ull << 42) + 1, 16}, 0, 0, "truncated"},
        {"a", 4, 7, 4, 2, {UINT64_MAX, 2}, 0, 0, "overflows"},
        {"a", 4, 7, 4, 4, {1ull << 32, 1ull << 32, 1, 1}, 0, 0, "overflows"},
        {"a", 4, 7, 4, 2, {16, 16}, 99, 0, "unknown type"},
        {"a", 4, 7, 4, 2, {16, 16}, 4, 0, "unknown type"},
        {"a", 4, 7, 4, 2, {16, 16}, 2, 0, "blocks"},
        {"a", 4, 7, 4, 2, {16, 16}, 1, 0, "not F32"},
        {"a", 4, 7, 4, 2, {16, 8}, 0, 0, "not F32"},
        {"a", 4, 7, 4, 3, {16, 4, 4}, 0, 0, "not F32"},
        {"a", 4, 7, 4, 2, {16, 16}, 0, 32, "truncated"},
        {"a", 4, 7, 4, 2, {16, 16}, 0, 4, "not aligned"},
        {"a", 4, 7, 4, 2, {16, 16}, 0, UINT64_MAX - 31, "truncated"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        oscar_error error;
        oscar_status status = read_case(&cases[i], &error);
        if (status != (cases[i].message ? OSCAR_ERROR_FORMAT : OSCAR_OK))
            fail_msg("case %zu: status %d %s", i, (int)status, error.message);
        if (cases[i].message) assert_message(&error, cases[i].message);
    }
}

/* Changes of the golden file that keep its length. */
static void test_gguf_changes(void **state) {
    (void)state;
    static const struct {
        size_t at, n;
        uint64_t value;
        const char *find, *replace, *message;
        oscar_status status;
    } cases[] = {
        {4, 4, 1, NULL, NULL, "version: found 1", OSCAR_ERROR_UNSUPPORTED},
        {4, 4, 99, NULL, NULL, "version: found 99", OSCAR_ERROR_UNSUPPORTED},
        {4, 4, 0x03000000, NULL, NULL, "little-endian", OSCAR_ERROR_UNSUPPORTED},
        {8, 8, 1ull << 62, NULL, NULL, "more than", OSCAR_ERROR_FORMAT},
        {16, 8, 1ull << 62, NULL, NULL, "more than", OSCAR_ERROR_FORMAT},
        {0, 0, 0, "blk.0.attn_v_rot", "blk.0.attn_k_rot", "this tensor occurs twice", OSCAR_ERROR_FORMAT},
        {0, 0, 0, "llama.rope.freq_base", "general.architecture", "this key occurs twice", OSCAR_ERROR_FORMAT},
        {0, 4, 0x46554748, NULL, NULL, "not GGUF", OSCAR_ERROR_FORMAT},
        {0, 0, 0, "\x80\x3e\x00\x00\x80\x3e", "\x80\x7f\x00\x00\x80\x3e", "NaN or infinite", OSCAR_ERROR_NOT_FINITE},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t n;
        oscar_error error;
        oscar_zoo_file *file;
        uint8_t *bytes = read_file(ZOO "golden_rot.gguf.bin", &n);
        memcpy(bytes + cases[i].at, &cases[i].value, cases[i].n);
        size_t length = cases[i].find ? (cases[i].find[0] == '\x80' ? 6 : strlen(cases[i].find)) : 0;
        if (length) memcpy(memmem(bytes, n, cases[i].find, length), cases[i].replace, length);
        assert_status(read_bytes(zoo_gguf_read, bytes, n, &file, &error), cases[i].status, &error);
        assert_message(&error, cases[i].message);
        free(bytes);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_version_1),      cmocka_unit_test(test_version_2),
        cmocka_unit_test(test_gguf),           cmocka_unit_test(test_mismatch),
        cmocka_unit_test(test_write),          cmocka_unit_test(test_published),
        cmocka_unit_test(test_hostile),        cmocka_unit_test(test_cut_at_every_byte),
        cmocka_unit_test(test_flip_every_bit), cmocka_unit_test(test_pickles),
        cmocka_unit_test(test_gguf_headers),   cmocka_unit_test(test_gguf_changes),
    };
    return cmocka_run_group_tests_name("zoo_pt", tests, NULL, NULL);
}
