/*
 * test_page.c - the byte layout of page.h: rows come back, bits sit where the comment says, and no
 * writer touches a neighbour.
 */
#include "codec/page.h"
#include "test_util.h"

static const int32_t head_dims[] = {16, 64, 80, 96, 112, 128, 192, 256, 320, 512};
enum { N_HEAD_DIMS = sizeof head_dims / sizeof *head_dims };

typedef struct rows {
    uint8_t codes[OSCAR_PAGE_TOKENS][OSCAR_MAX_HEAD_DIM];
    uint16_t params[OSCAR_PAGE_TOKENS][2 * CODEC_MAX_GROUPS];
} rows;

static void random_row(uint64_t *rng, const page_side *side, uint8_t *codes, uint16_t *params) {
    for (int c = 0; c < side->head_dim; c++) codes[c] = (uint8_t)(rng_next(rng) >> 40 & ((1u << side->bits) - 1));
    for (int i = 0; i < 2 * side->n_groups; i++) params[i] = (uint16_t)(rng_next(rng) >> 40);
}

static void shuffle(uint64_t *rng, int *order) {
    for (int i = 0; i < OSCAR_PAGE_TOKENS; i++) order[i] = i;
    for (int i = OSCAR_PAGE_TOKENS - 1; i > 0; i--) {
        int j = (int)(rng_next(rng) % (uint64_t)(i + 1)), t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
}

static void sizes(void **state) {
    (void)state;
    for (int i = 0; i < N_HEAD_DIMS; i++)
        for (int kind = 0; kind < 2; kind++)
            for (int bits = 2; bits <= 4; bits++) {
                const int32_t d = head_dims[i];
                page_side s = page_side_make((page_side_kind)kind, d, bits);
                assert_int_equal(s.n_groups * s.group, d);
                assert_true(s.group <= 128 && s.n_groups <= CODEC_MAX_GROUPS);
                size_t low = 64u * (size_t)d * 2 / 8;
                size_t high = bits == 2 ? 0 : bits == 4 ? low : kind == PAGE_KEY ? 256u * (((size_t)d + 31) / 32) : low / 2;
                assert_int_equal(s.high_offset, bits == 2 ? 0 : low);
                assert_int_equal(s.params_offset, low + high);
                assert_int_equal(s.bytes, low + high + 256u * (size_t)s.n_groups);
                assert_int_equal(s.bytes % 64, 0);
            }
    /* 2.25 bits an element at head_dim 128, 2.5 at 64. */
    assert_int_equal(page_side_make(PAGE_KEY, 128, 2).bytes * 8, 64 * 128 * 9 / 4);
    assert_int_equal(page_side_make(PAGE_VALUE, 64, 2).bytes * 8, 64 * 64 * 5 / 2);
}

/* Every slot written in random order into a page full of ones, twice, and read back each time. */
static void round_trip(void **state) {
    (void)state;
    uint64_t rng = rng_seed("round_trip", 5);
    static rows want;
    for (int i = 0; i < N_HEAD_DIMS; i++)
        for (int kind = 0; kind < 2; kind++)
            for (int bits = 2; bits <= 4; bits++) {
                page_side side = page_side_make((page_side_kind)kind, head_dims[i], bits);
                uint8_t *page = aligned_calloc(side.bytes + 64, 1);
                memset(page, 0xff, side.bytes + 64);
                for (int pass = 0; pass < 2; pass++) {
                    int order[OSCAR_PAGE_TOKENS];
                    shuffle(&rng, order);
                    for (int n = 0; n < OSCAR_PAGE_TOKENS; n++) {
                        random_row(&rng, &side, want.codes[order[n]], want.params[order[n]]);
                        page_put_row(&side, page, order[n], want.codes[order[n]], want.params[order[n]]);
                        /* All rows written so far, not only this one: nobody was trodden on. */
                        for (int m = 0; m < (pass ? OSCAR_PAGE_TOKENS : n + 1); m++) {
                            int slot = order[m];
                            uint8_t codes[OSCAR_MAX_HEAD_DIM];
                            uint16_t params[2 * CODEC_MAX_GROUPS];
                            page_get_row(&side, page, slot, codes, params);
                            assert_memory_equal(codes, want.codes[slot], (size_t)side.head_dim);
                            assert_memory_equal(params, want.params[slot], sizeof(uint16_t) * 2 * (size_t)side.n_groups);
                        }
                    }
                }
                for (int j = 0; j < 64; j++) assert_int_equal(page[side.bytes + (size_t)j], 0xff);
                aligned_free(page);
            }
}

/* One bit of a plane: the value of bit `bit` of lane `lane` of block `block`. */
static int plane_bit(const uint8_t *plane, int block, int lane, int bit) {
    const uint8_t *p = plane + 64 * block + 4 * lane;
    uint32_t word = (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    return (int)(word >> bit & 1);
}

/* The code of (token, channel) straight from the comment of page.h. */
static int code_at(const page_side *side, const uint8_t *page, int token, int channel) {
    const int blocks = side->head_dim / 16, key = side->kind == PAGE_KEY;
    int tile = token / 16, in_token = token % 16, in_channel = channel % 16;
    int lane = key ? in_token : in_channel, other = key ? in_channel : in_token;
    int block = tile * blocks + channel / 16, bit = 8 * (other % 4) + 2 * (other / 4);
    int code = plane_bit(page, block, lane, bit) | plane_bit(page, block, lane, bit + 1) << 1;
    const uint8_t *high = page + side->high_offset;
    if (side->bits == 4)
        code |= plane_bit(high, block, lane, bit) << 2 | plane_bit(high, block, lane, bit + 1) << 3;
    if (side->bits == 3 && key) {
        int c = channel % 32;
        code |= plane_bit(high, tile * ((side->head_dim + 31) / 32) + channel / 32, in_token, 8 * (c % 4) + c / 4) << 2;
    }
    if (side->bits == 3 && !key) {
        int t = token % 32;
        code |= plane_bit(high, token / 32 * blocks + channel / 16, in_channel, 8 * (t % 4) + t / 4) << 2;
    }
    return code;
}

static void layout(void **state) {
    (void)state;
    uint64_t rng = rng_seed("layout", 6);
    static rows want;
    for (int i = 0; i < N_HEAD_DIMS; i++)
        for (int kind = 0; kind < 2; kind++)
            for (int bits = 2; bits <= 4; bits++) {
                page_side side = page_side_make((page_side_kind)kind, head_dims[i], bits);
                uint8_t *page = aligned_calloc(side.bytes, 1);
                memset(page, 0xff, side.bytes);
                for (int t = 0; t < OSCAR_PAGE_TOKENS; t++) {
                    random_row(&rng, &side, want.codes[t], want.params[t]);
                    page_put_row(&side, page, t, want.codes[t], want.params[t]);
                }
                for (int t = 0; t < OSCAR_PAGE_TOKENS; t++) {
                    for (int c = 0; c < side.head_dim; c++)
                        assert_int_equal(code_at(&side, page, t, c), want.codes[t][c]);
                    const uint16_t *params = (const uint16_t *)(const void *)(page + side.params_offset);
                    for (int g = 0; g < side.n_groups; g++) {
                        assert_int_equal(params[(g * 2 + 0) * 64 + t], want.params[t][g * 2]);
                        assert_int_equal(params[(g * 2 + 1) * 64 + t], want.params[t][g * 2 + 1]);
                    }
                }
                aligned_free(page);
            }
}

/* Concurrent writers of key rows are allowed: a row may touch its own words alone. */
static void key_rows_own_their_words(void **state) {
    (void)state;
    uint64_t rng = rng_seed("key_rows_own_their_words", 7);
    for (int bits = 2; bits <= 4; bits++) {
        page_side side = page_side_make(PAGE_KEY, 80, bits);
        uint8_t *page = aligned_calloc(side.bytes, 1), *before = aligned_calloc(side.bytes, 1);
        uint8_t codes[OSCAR_MAX_HEAD_DIM];
        uint16_t params[2 * CODEC_MAX_GROUPS];
        for (int slot = 0; slot < OSCAR_PAGE_TOKENS; slot++) {
            memcpy(before, page, side.bytes);
            random_row(&rng, &side, codes, params);
            page_put_row(&side, page, slot, codes, params);
            for (size_t b = 0; b < side.params_offset; b++)
                if ((int)(b % 64 / 4) != slot % 16) assert_int_equal(page[b], before[b]);
        }
        aligned_free(page);
        aligned_free(before);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sizes),
        cmocka_unit_test(round_trip),
        cmocka_unit_test(layout),
        cmocka_unit_test(key_rows_own_their_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
