/*
 * test_zoo.c - rotation files of ours: round trips, golden files, and everything that must be
 * refused.
 */
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "test_zoo_util.h"
#include "zoo/rotation_file.h"

#define SAVED OSCAR_BUILD_DIR "/test_zoo.tmp/saved.safetensors"
#define FOLDER OSCAR_BUILD_DIR "/test_zoo.tmp"
#define GOLDEN OSCAR_TEST_DATA "/zoo/golden.safetensors"

static oscar_status load_bytes(const uint8_t *bytes, size_t n, oscar_rotations **out, oscar_error *error) {
    byte_source source = source_from_memory(bytes, n, "bytes");
    memset(error, 0, sizeof *error);
    return rotation_file_read(out, &source, error);
}

/* Entries of the test's folder, "." and ".." included. */
static int count_files(void) {
    DIR *d = opendir(FOLDER);
    assert_non_null(d);
    int n = 0;
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

/* An empty folder, whatever an interrupted run left there. */
static int set_up(void **state) {
    (void)state;
    mkdir(FOLDER, 0777);
    DIR *d = opendir(FOLDER);
    if (!d) return -1;
    for (struct dirent *entry; (entry = readdir(d));) unlinkat(dirfd(d), entry->d_name, 0); /* not "." and ".." */
    closedir(d);
    return 0;
}

/* ------------------------------------------------------------------------------------------------
 * What must come back
 */

static void assert_same_layer(const rotations_layer *a, const rotations_layer *b) {
    size_t n_heads = (size_t)a->shape.n_kv_heads;
    assert_memory_equal(&a->shape, &b->shape, sizeof a->shape);
    assert_int_equal(a->bits_k, b->bits_k);
    assert_int_equal(a->bits_v, b->bits_v);
    assert_int_equal(a->recipe, b->recipe);
    assert_int_equal(a->ldlq_k, b->ldlq_k);
    assert_int_equal(a->gain_k, b->gain_k);
    assert_int_equal(a->gain_v, b->gain_v);
    assert_memory_equal(&a->clip_k, &b->clip_k, sizeof(float));
    assert_memory_equal(&a->clip_v, &b->clip_v, sizeof(float));
    assert_int_equal(a->n_tracked, b->n_tracked);
    assert_int_equal(!a->tracked, !b->tracked);
    if (a->tracked) assert_memory_equal(a->tracked, b->tracked, n_heads * (size_t)a->n_tracked * sizeof(int32_t));
    for (int i = 0; i < ROTATION_N_FIELDS; i++) {
        const float *x = *rotation_array(a, &rotation_fields[i]), *y = *rotation_array(b, &rotation_fields[i]);
        assert_int_equal(!x, !y);
        if (x)
            assert_memory_equal(x, y,
                                n_heads * rotation_head_floats(&rotation_fields[i], a->shape.head_dim) * sizeof(float));
    }
}

static void test_round_trip(void **state) {
    (void)state;
    oscar_error error = {0};
    oscar_rotations *saved = sample_rotations(rng_seed("round_trip", 7)), *loaded, *again;
    assert_status(oscar_rotations_save(saved, SAVED, &error), OSCAR_OK, &error);
    assert_status(oscar_rotations_load(&loaded, SAVED, &error), OSCAR_OK, &error);
    assert_int_equal(oscar_rotations_n_layers(loaded), 3);
    for (int i = 0; i < 3; i++) assert_same_layer(&saved->layers[i], &loaded->layers[i]);
    assert_int_equal(loaded->n_meta, 2);
    assert_string_equal(oscar_rotations_metadata(loaded, "model"), "s\xc3\xb6me \"model\"\\\n\x01");
    assert_string_equal(oscar_rotations_metadata(loaded, "calibration_tokens"), "16384");
    /* What was loaded is saved to the same bytes, metadata order aside. */
    size_t n1, n2;
    uint8_t *first = read_file(SAVED, &n1);
    assert_status(oscar_rotations_save(loaded, SAVED, &error), OSCAR_OK, &error);
    assert_status(oscar_rotations_load(&again, SAVED, &error), OSCAR_OK, &error);
    uint8_t *second = read_file(SAVED, &n2);
    assert_int_equal(n1, n2);
    assert_memory_equal(first + 8 + load_u64(first), second + 8 + load_u64(second), n1 - 8 - load_u64(first));
    assert_int_equal(load_u64(first) % 8, 0);
    assert_int_equal(count_files(), 3); /* the file alone */
    free(first);
    free(second);
    oscar_rotations_free(saved);
    oscar_rotations_free(loaded);
    oscar_rotations_free(again);
}

/* Files of another writer (make_golden.py), header order both ways. */
static void test_golden(void **state) {
    (void)state;
    static const char *const names[] = {GOLDEN, OSCAR_TEST_DATA "/zoo/golden_unordered.safetensors"};
    for (int f = 0; f < 2; f++) {
        oscar_error error = {0};
        oscar_rotations *r;
        assert_status(oscar_rotations_load(&r, names[f], &error), OSCAR_OK, &error);
        assert_int_equal(r->n_layers, 2);
        assert_string_equal(oscar_rotations_metadata(r, "model"), "g\xc3\xb6lden \xf0\x9f\x98\x80 \"quoted\"\n");
        const rotations_layer *l = &r->layers[0], *m = &r->layers[1];
        assert_int_equal(l->shape.n_q_heads, 6);
        assert_int_equal(l->shape.rope.n_dims, 8);
        assert_true(l->shape.rope.magnitude == 1.25f && l->shape.rope.inv_freq[3] == 2.0f);
        assert_true(l->bits_k == 3 && l->bits_v == 2 && l->ldlq_k && l->gain_k && !l->gain_v &&
                    l->recipe == OSCAR_RECIPE_DEFAULT);
        assert_true(m->bits_v == 4 && m->recipe == OSCAR_RECIPE_ZOO && m->clip_k == 0.96f && m->clip_v == 0.92f &&
                    m->shape.window == 128);
        assert_true(!m->v_rotation && !m->k_mean && !m->tracked && !m->k_metric_b && !l->v_metric_b);
        const int32_t pairs[4] = {1, 3, 0, 2};
        assert_memory_equal(l->tracked, pairs, sizeof pairs);
        assert_true(l->k_tracked[1] == 2.0f / 8 && l->k_mean[1] == 0 && l->k_mean[0] == 1.0f / 8);
        for (int h = 0; h < 2; h++)
            for (int i = 0; i < 16; i++)
                for (int j = 0; j < 16; j++) {
                    int at = (16 * h + i) * 16 + j;
                    assert_true(l->k_rotation[at] == golden_rotation(0, h, i, j));
                    assert_true(h == 1 || m->k_rotation[at] == golden_rotation(1, 0, i, j));
                    float packed = 0.125f * (float)(120 * h + i * (i - 1) / 2 + j + 1);
                    assert_true(l->k_metric_b[at] == (j < i ? packed : j == i));
                }
        oscar_rotations_free(r);
    }
}

/* ------------------------------------------------------------------------------------------------
 * What must be refused
 */

/* A safetensors file of this header text (padded by nothing) and n_data zero bytes. */
static uint8_t *make_file(const char *header, size_t n_data, size_t *n) {
    uint64_t length = strlen(header);
    *n = 8 + (size_t)length + n_data;
    uint8_t *bytes = calloc(*n, 1);
    memcpy(bytes, &length, 8);
    memcpy(bytes + 8, header, (size_t)length);
    return bytes;
}

#define T(name, dtype, shape, range)                                                                                   \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" range "}"

static void test_header(void **state) {
    (void)state;
    static const struct {
        const char *header;
        size_t n_data;
        const char *message; /* NULL: a good header */
    } cases[] = {
        {"{}", 0, NULL},
        {"{ } \n", 0, NULL},
        {"{" T("a", "F32", "[]", "[0,4]") "}", 4, NULL},
        {"{" T("a", "F32", "[0]", "[0,0]") "," T("b", "U8", "[3]", "[0,3]") "}", 3, NULL},
        {"{" T("b", "U8", "[3]", "[4,7]") "," T("a", "F32", "[1]", "[0,4]") "}", 7, NULL},
        {"{" T("\\u0061\\ud83d\\ude00\\n", "U8", "[1]", "[0,1]") "}", 1, NULL},
        {"{" T("a", "F32", "[1]", "[4,0]") "}", 4, "behind its end"},
        {"{" T("a", "F32", "[1]", "[0,4]") "," T("b", "F32", "[1]", "[0,4]") "}", 4, "overlaps"},
        {"{" T("a", "F32", "[1]", "[0,4]") "," T("b", "F32", "[1]", "[2,6]") "}", 6, "overlaps"},
        {"{" T("a", "F32", "[1]", "[0,4]") "," T("b", "F32", "[1]", "[8,12]") "}", 12, "hole"},
        {"{" T("a", "F32", "[1]", "[4,8]") "}", 8, "hole"},
        {"{" T("a", "F32", "[1]", "[0,4]") "}", 5, "the tensors end"},
        {"{}", 1, "the tensors end"},
        {"{" T("a", "F32", "[1000000]", "[0,4000000]") "}", 4, "truncated"},
        {"{" T("a", "F32", "[2]", "[0,4]") "}", 4, "shape and dtype 8"},
        {"{" T("a", "F32", "[4611686018427387904,4]", "[0,0]") "}", 0, "overflows"},
        {"{" T("a", "F32", "[18446744073709551616]", "[0,0]") "}", 0, "2^64"},
        {"{" T("a", "F32", "[1]", "[0]") "}", 4, "two numbers"},
        {"{" T("a", "F32", "[1]", "[0,2,4]") "}", 4, "at most 2"},
        {"{" T("a", "F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", 4, "at most 8"},
        {"{" T("a", "F32", "[01]", "[0,4]") "}", 4, "leading zero"},
        {"{" T("a", "F32", "[-1]", "[0,4]") "}", 4, "whole number"},
        {"{" T("a", "F32", "[1.0]", "[0,4]") "}", 4, "found '.'"},
        {"{" T("a", "F32", "[1]", "[0,4]") "," T("a", "F32", "[1]", "[4,8]") "}", 8, "occurs twice"},
        {"{" T("a", "F32", "[1]", "[0,4]") "," T("\\u0061", "F32", "[1]", "[4,8]") "}", 8, "occurs twice"},
        {"{\"__metadata__\":{\"a\":\"b\",\"a\":\"c\"}}", 0, "occurs twice"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "__metadata__ twice"},
        {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", 1, "a field twice"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[]}}", 0, "missing"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1],\"x\":1}}", 1, "a field other than"},
        {"{" T("a", "F31", "[1]", "[0,4]") "}", 4, "unknown dtype \"F31\""},
        {"[]", 0, "JSON object"},
        {" {}", 0, "JSON object"},
        {"null", 0, "JSON object"},
        {"{},", 0, "end of the header"},
        {"{\"a\"", 0, "its end"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "found '1'"},
        {"{\"__metadata__\":{\"a\":\"\\u0000\"}}", 0, "NUL"},
        {"{\"__metadata__\":{\"a\":\"\\ud800\"}}", 0, "surrogate"},
        {"{\"__metadata__\":{\"a\":\"\\ud800\\u0041\"}}", 0, "surrogate"},
        {"{\"__metadata__\":{\"a\":\"\\x\"}}", 0, "unknown escape"},
        {"{\"__metadata__\":{\"a\":\"\\u12g4\"}}", 0, "hex digits"},
        {"{\"__metadata__\":{\"a\":\"\xff\"}}", 0, "UTF-8"},
        {"{\"__metadata__\":{\"a\":\"\xc0\x80\"}}", 0, "UTF-8"},
        {"{\"__metadata__\":{\"a\":\"\t\"}}", 0, "control character"},
        {"{\"__metadata__\":{\"a\":\"b\"", 0, "its end"},
        {"{\"__metadata__\":{\"a\":\"b", 0, "a string without end"},
        {"{\"__metadata__\":{\"a\":\"b\\", 0, "unknown escape"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t n;
        uint8_t *bytes = make_file(cases[i].header, cases[i].n_data, &n);
        byte_source source = source_from_memory(bytes, n, "bytes");
        oscar_error error = {0};
        st_table table;
        oscar_status status = st_table_read(&table, &source, &error);
        if (status != (cases[i].message ? OSCAR_ERROR_FORMAT : OSCAR_OK))
            fail_msg("case %zu %s: status %d %s", i, cases[i].header, (int)status, error.message);
        if (cases[i].message) assert_message(&error, cases[i].message);
        st_table_free(&table);
        free(bytes);
    }
}

static void test_header_length(void **state) {
    (void)state;
    static const uint64_t lengths[] = {0, 1, 7, 100, 100000001, 1ull << 32, UINT64_MAX / 2, UINT64_MAX - 7, UINT64_MAX};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        uint8_t bytes[16];
        memcpy(bytes, &lengths[i], 8);
        memcpy(bytes + 8, "{}      ", 8);
        oscar_error error;
        oscar_rotations *r;
        /* 7 leaves one byte behind the header that no tensor owns. */
        assert_status(load_bytes(bytes, sizeof bytes, &r, &error), OSCAR_ERROR_FORMAT, &error);
        assert_null(r);
    }
}

/* Replaces the first occurrence of `from` in the header (same length) and loads. */
static oscar_status load_with(const char *from, const char *to, oscar_error *error) {
    size_t n;
    uint8_t *bytes = read_file(GOLDEN, &n);
    size_t length = strlen(from);
    assert_int_equal(length, strlen(to));
    uint8_t *at = memmem(bytes + 8, (size_t)load_u64(bytes), from, length);
    if (!at) fail_msg("no %s in the golden file", from);
    memcpy(at, to, length);
    oscar_rotations *r = NULL;
    oscar_status status = load_bytes(bytes, n, &r, error);
    oscar_rotations_free(r);
    free(bytes);
    return status;
}

static void test_meaning(void **state) {
    (void)state;
    static const struct {
        const char *from, *to;
        oscar_status status;
        const char *message;
    } cases[] = {
        {"\"format_version\": \"1\"", "\"format_version\": \"2\"", OSCAR_ERROR_UNSUPPORTED, "found 2"},
        {"\"format_version\": \"1\"", "\"format_version\": \"0\"", OSCAR_ERROR_FORMAT, "format_version: found 0"},
        {"\"format_version\": \"1\"", "\"format_version\": \"x\"", OSCAR_ERROR_FORMAT, "format_version: found x"},
        {"oscar-rotations", "oscar-rotation5", OSCAR_ERROR_FORMAT, "format: found oscar-rotation5"},
        {"\"n_layers\": \"2\"", "\"n_layers\": \"1\"", OSCAR_ERROR_FORMAT, "layers.1."},
        {"\"n_layers\": \"2\"", "\"n_layers\": \"3\"", OSCAR_ERROR_FORMAT, "layers.2.n_kv_heads: found none"},
        {"\"n_layers\": \"2\"", "\"n_lalers\": \"2\"", OSCAR_ERROR_FORMAT, "n_layers: found none"},
        {"layers.0.bits_k\": \"3\"", "layers.0.bits_k\": \"5\"", OSCAR_ERROR_FORMAT,
         "layers.0.bits_k: found 5, expected a whole number 2 to 4"},
        {"layers.0.ldlq_k\": \"1\"", "layers.0.ldlq_k\": \"2\"", OSCAR_ERROR_FORMAT, "ldlq_k"},
        {"layers.0.head_dim\": \"16\"", "layers.0.head_dim\": \"32\"", OSCAR_ERROR_FORMAT,
         "found F32 [2,16,16], expected F32 [2,32,32]"},
        {"layers.0.head_dim\": \"16\"", "layers.0.head_dim\": \"17\"", OSCAR_ERROR_FORMAT, "multiple of 16"},
        {"layers.0.head_dim\": \"16\"", "layers.0.head_dim\": \"+6\"", OSCAR_ERROR_FORMAT, "found +6"},
        {"layers.0.head_dim\": \"16\"", "layers.0.head_dim\": \"00\"", OSCAR_ERROR_FORMAT, "found 00"},
        {"layers.0.n_kv_heads\": \"2\"", "layers.0.n_kv_heads\": \"3\"", OSCAR_ERROR_FORMAT, "expected I32 [3,n]"},
        {"layers.0.n_kv_heads\": \"2\"", "layers.0.n_kv_heads\": \"4\"", OSCAR_ERROR_FORMAT, "n_q_heads"},
        {"layers.0.rope_n_dims\": \"8\"", "layers.0.rope_n_dims\": \"6\"", OSCAR_ERROR_FORMAT, "rope_inv_freq"},
        {"layers.0.rope_layout\": \"2\"", "layers.0.rope_layout\": \"0\"", OSCAR_ERROR_FORMAT, "contradict"},
        {"layers.0.rope_magnitude\": \"1.25\"", "layers.0.rope_magnitude\": \"1e99\"", OSCAR_ERROR_NOT_FINITE,
         "rope_magnitude"},
        {"layers.0.rope_magnitude\": \"1.25\"", "layers.0.rope_magnitude\": \"1,25\"", OSCAR_ERROR_FORMAT,
         "decimal number"},
        {"layers.0.rope_magnitude\": \"1.25\"", "layers.0.rope_magnitude\": \" nan\"", OSCAR_ERROR_FORMAT,
         "decimal number"},
        {"layers.1.clip_k\": \"0.96\"", "layers.1.clip_k\": \"9.96\"", OSCAR_ERROR_FORMAT, "clip"},
        {"layers.0.v_mean\": {\"dtype\": \"F32\"", "layers.0.v_mean\": {\"dtype\": \"I32\"", OSCAR_ERROR_FORMAT,
         "layers.0.v_mean: found I32 [2,16], expected F32"},
        {"layers.0.v_mean", "layers.0.w_mean", OSCAR_ERROR_FORMAT, "layers.0.w_mean: not a tensor"},
        {"layers.0.v_mean", "layers.7.v_mean", OSCAR_ERROR_FORMAT, "layers.7.v_mean: not a tensor"},
        {"layers.0.rope_inv_freq", "layers.0.rope_inv_fraq", OSCAR_ERROR_FORMAT, "rope_inv_freq: found none"},
        {"layers.0.k_metric_d", "layers.0.v_metric_d", OSCAR_ERROR_FORMAT, "k_metric"},
        {"layers.0.gain_k", "layers.0.pain_k", OSCAR_ERROR_FORMAT, "gain_k: found none"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        oscar_error error;
        oscar_status status = load_with(cases[i].from, cases[i].to, &error);
        if (status != cases[i].status) fail_msg("%s: status %d %s", cases[i].to, (int)status, error.message);
        assert_message(&error, cases[i].message);
    }
}

/* NaN and infinity in each tensor in turn; pairs out of range; a rotation that is none. */
static void test_values(void **state) {
    (void)state;
    size_t n;
    uint8_t *bytes = read_file(GOLDEN, &n);
    byte_source source = source_from_memory(bytes, n, "bytes");
    oscar_error error = {0};
    oscar_rotations *r;
    st_table table;
    assert_status(st_table_read(&table, &source, &error), OSCAR_OK, &error);
    for (int32_t i = 0; i < table.n_tensors; i++) {
        const st_tensor *t = &table.tensors[i];
        bool is_float = !strcmp(t->dtype, "F32");
        static const uint32_t bad[3] = {0x7fc00000, 0x7f800000, 0xff800000};
        for (int b = 0; b < 3; b++) {
            uint32_t before;
            uint8_t *last = bytes + t->end - 4;
            memcpy(&before, last, 4);
            memcpy(last, &bad[b], 4);
            assert_status(load_bytes(bytes, n, &r, &error), is_float ? OSCAR_ERROR_NOT_FINITE : OSCAR_ERROR_FORMAT,
                          &error);
            if (is_float) {
                assert_message(&error, t->name);
                assert_int_equal(error.position, t->end - 4);
            }
            memcpy(last, &before, 4);
        }
    }
    float two = 2.0f;
    memcpy(bytes + st_table_find(&table, "layers.0.k_rotation")->begin, &two, 4);
    assert_status(load_bytes(bytes, n, &r, &error), OSCAR_ERROR_FORMAT, &error);
    assert_message(&error, "orthogonal");
    st_table_free(&table);
    free(bytes);
}

static void test_cut_at_every_byte(void **state) {
    (void)state;
    size_t n;
    uint8_t *bytes = read_file(GOLDEN, &n);
    for (size_t cut = 0; cut < n; cut++) {
        oscar_error error;
        oscar_rotations *r;
        uint8_t *part = exact_copy(bytes, cut);
        assert_status(load_bytes(part, cut, &r, &error), OSCAR_ERROR_FORMAT, &error);
        assert_null(r);
        free(part);
    }
    free(bytes);
}

/* Any outcome is fine that is an error or a consistent object; the sanitizers watch the rest. */
static void test_flip_every_bit(void **state) {
    (void)state;
    size_t n, n_loaded = 0;
    uint8_t *bytes = read_file(GOLDEN, &n);
    size_t n_header = 8 + (size_t)load_u64(bytes);
    for (size_t bit = 0; bit < 8 * n; bit += bit < 8 * n_header ? 1 : 61) {
        oscar_error error;
        oscar_rotations *r;
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        if (load_bytes(bytes, n, &r, &error) == OSCAR_OK) {
            assert_int_equal(rotations_check(r, &error), OSCAR_OK);
            n_loaded++;
        } else {
            assert_null(r);
            assert_true(error.message[0] && error.status != OSCAR_OK && error.status != OSCAR_ERROR_INTERNAL);
        }
        oscar_rotations_free(r);
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    assert_true(n_loaded > 0);
    free(bytes);
}

/* ------------------------------------------------------------------------------------------------
 * Files
 */

static void test_paths(void **state) {
    (void)state;
    oscar_error error = {0};
    oscar_rotations *r = sample_rotations(3), *loaded;
    assert_int_equal(oscar_rotations_load(&loaded, FOLDER "/absent", &error), OSCAR_ERROR_IO);
    assert_message(&error, "No such file");
    assert_int_equal(oscar_rotations_load(&loaded, FOLDER, &error), OSCAR_ERROR_IO);
    assert_message(&error, "not a regular file");
    assert_int_equal(oscar_rotations_load(&loaded, NULL, &error), OSCAR_ERROR_ARGUMENT);
    assert_int_equal(oscar_rotations_save(r, FOLDER "/absent/file", &error), OSCAR_ERROR_IO);
    assert_message(&error, "No such file");
    assert_int_equal(oscar_rotations_save(r, FOLDER, &error), OSCAR_ERROR_IO);
    assert_int_equal(oscar_rotations_save(r, "", &error), OSCAR_ERROR_ARGUMENT);
    assert_int_equal(oscar_rotations_save(NULL, SAVED, NULL), OSCAR_ERROR_ARGUMENT);
    assert_int_equal(count_files(), 2);
    oscar_rotations_free(r);
}

/* A disk that fills up at any point: an error, the old file whole, nothing else left. */
static void test_disk_full(void **state) {
    (void)state;
    oscar_error error = {0};
    oscar_rotations *r = sample_rotations(4);
    assert_status(oscar_rotations_save(r, SAVED, &error), OSCAR_OK, &error);
    size_t n, n_after;
    uint8_t *before = read_file(SAVED, &n);
    struct rlimit old, small;
    getrlimit(RLIMIT_FSIZE, &old);
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    static const size_t limits[] = {0, 1, 8, 4096, 10000};
    for (size_t i = 0; i <= sizeof limits / sizeof *limits; i++) {
        small = old;
        small.rlim_cur = i < sizeof limits / sizeof *limits ? limits[i] : n - 1;
        setrlimit(RLIMIT_FSIZE, &small);
        oscar_status status = oscar_rotations_save(r, SAVED, &error);
        setrlimit(RLIMIT_FSIZE, &old);
        assert_status(status, OSCAR_ERROR_IO, &error);
        assert_message(&error, "File too large");
        assert_int_equal(count_files(), 3);
        uint8_t *after = read_file(SAVED, &n_after);
        assert_int_equal(n, n_after);
        assert_memory_equal(before, after, n);
        free(after);
    }
    signal(SIGXFSZ, handler);
    free(before);
    oscar_rotations_free(r);
}

/* What could not be loaded again is not saved. */
static void test_save_refuses(void **state) {
    (void)state;
    oscar_error error = {0};
    oscar_rotations *r = sample_rotations(5);
    rotations_layer *l = &r->layers[0];
    l->v_mean[3] = NAN;
    assert_status(oscar_rotations_save(r, SAVED, &error), OSCAR_ERROR_NOT_FINITE, &error);
    assert_message(&error, "v_mean");
    l->v_mean[3] = 0;
    l->k_metric_b[1] = 0.5f; /* above the diagonal */
    assert_status(oscar_rotations_save(r, SAVED, &error), OSCAR_ERROR_ARGUMENT, &error);
    assert_message(&error, "triangular");
    l->k_metric_b[1] = 0;
    l->bits_k = 1;
    assert_status(oscar_rotations_save(r, SAVED, &error), OSCAR_ERROR_ARGUMENT, &error);
    assert_message(&error, "bits_k");
    l->bits_k = 2;
    rotations_set_meta(r, "layers.0.bits_k", "2");
    assert_status(oscar_rotations_save(r, SAVED, &error), OSCAR_ERROR_ARGUMENT, &error);
    assert_message(&error, "belongs to the format");
    free(r->meta[r->n_meta - 1].key);
    r->meta[r->n_meta - 1].key = strdup("note");
    rotations_set_meta(r, "note", "\xff");
    assert_status(oscar_rotations_save(r, SAVED, &error), OSCAR_ERROR_ARGUMENT, &error);
    assert_message(&error, "UTF-8");
    assert_int_equal(count_files(), 2);
    oscar_rotations_free(r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_round_trip, set_up),
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_header),
        cmocka_unit_test(test_header_length),
        cmocka_unit_test(test_meaning),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_cut_at_every_byte),
        cmocka_unit_test(test_flip_every_bit),
        cmocka_unit_test_setup(test_paths, set_up),
        cmocka_unit_test_setup(test_disk_full, set_up),
        cmocka_unit_test_setup(test_save_refuses, set_up),
    };
    return cmocka_run_group_tests_name("zoo", tests, NULL, NULL);
}
