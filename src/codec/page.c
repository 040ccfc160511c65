/*
 * page.c - where the bits of a row go. The layout is described in page.h.
 */
#include "codec/page.h"

#include <assert.h>

#define BLOCK_BYTES 64
#define TILE_TOKENS 16

page_side page_side_make(page_side_kind kind, int32_t head_dim, int32_t bits) {
    assert(head_dim > 0 && head_dim % 16 == 0 && bits >= 2 && bits <= 4);
    page_side side = {.kind = kind, .head_dim = head_dim, .bits = bits};
    side.group = codec_group(head_dim);
    side.n_groups = head_dim / side.group;
    size_t blocks = (size_t)head_dim / 16;
    size_t low = OSCAR_PAGE_TOKENS / TILE_TOKENS * blocks * BLOCK_BYTES, high = 0;
    if (bits == 4)
        high = low;
    else if (bits == 3 && kind == PAGE_KEY)
        high = OSCAR_PAGE_TOKENS / TILE_TOKENS * (((size_t)head_dim + 31) / 32) * BLOCK_BYTES;
    else if (bits == 3)
        high = OSCAR_PAGE_TOKENS / 32 * blocks * BLOCK_BYTES;
    side.high_offset = high ? low : 0;
    side.params_offset = low + high;
    side.bytes = side.params_offset + (size_t)side.n_groups * 2 * OSCAR_PAGE_TOKENS * sizeof(uint16_t);
    return side;
}

/* The four planes differ in how many bits a code takes (2 or 1) and what a lane is, so each of the
 * functions below is given `width` and takes 32 / width codes a lane. Codes are shifted by `shift`. */
static inline int code_bit(int index, int width) {
    return 8 * (index & 3) + width * (index >> 2);
}

/* The low `width` bits of four bytes. */
static inline uint32_t four_masks(int width) { return ((1u << width) - 1) * 0x01010101u; }

static inline uint32_t load32(const uint8_t *at) {
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

/* One row of a key plane: whole words, four codes at a time, since code 4 f + j is at bit 8 j + width f. */
static void key_plane_put(int32_t head_dim, int width, uint8_t *plane, int slot,
                          const uint8_t *codes, int shift) {
    int per_word = 32 / width, n_blocks = (head_dim + per_word - 1) / per_word;
    uint8_t *lane = plane + (size_t)(slot / TILE_TOKENS) * n_blocks * BLOCK_BYTES + slot % TILE_TOKENS * 4;
    uint32_t masks = four_masks(width);
    for (int c = 0; c < head_dim; lane += BLOCK_BYTES) {
        uint32_t word = 0;
        for (int f = 0; f < per_word / 4 && c < head_dim; f++, c += 4)
            word |= (load32(codes + c) >> shift & masks) << width * f;
        memcpy(lane, &word, sizeof word);
    }
}

static void key_plane_get(int32_t head_dim, int width, const uint8_t *plane, int slot,
                          uint8_t *codes, int shift) {
    int per_word = 32 / width, n_blocks = (head_dim + per_word - 1) / per_word;
    const uint8_t *lane = plane + (size_t)(slot / TILE_TOKENS) * n_blocks * BLOCK_BYTES + slot % TILE_TOKENS * 4;
    uint32_t masks = four_masks(width);
    for (int c = 0; c < head_dim; lane += BLOCK_BYTES) {
        uint32_t word = load32(lane);
        for (int f = 0; f < per_word / 4 && c < head_dim; f++, c += 4) {
            uint32_t four = load32(codes + c) | (word >> width * f & masks) << shift;
            memcpy(codes + c, &four, sizeof four);
        }
    }
}

/* The word of channel 0 that holds token `slot` of a value plane, and the bit in it. */
static inline size_t value_plane_word(int32_t head_dim, int width, int slot, int *bit) {
    int tokens = 32 / width;
    *bit = code_bit(slot % tokens, width);
    return (size_t)(slot / tokens) * (head_dim / 16) * BLOCK_BYTES;
}

/* One token of a value plane: `width` bits in each channel's word, shared with other tokens. */
static void value_plane_put(int32_t head_dim, int width, uint8_t *plane, int slot,
                            const uint8_t *codes, int shift) {
    int bit;
    uint8_t *at = plane + value_plane_word(head_dim, width, slot, &bit);
    uint32_t mask = (1u << width) - 1;
    for (int c = 0; c < head_dim; c++) {
        uint32_t word = (load32(at + 4 * c) & ~(mask << bit)) | ((uint32_t)codes[c] >> shift & mask) << bit;
        memcpy(at + 4 * c, &word, sizeof word);
    }
}

static void value_plane_get(int32_t head_dim, int width, const uint8_t *plane, int slot,
                            uint8_t *codes, int shift) {
    int bit;
    const uint8_t *at = plane + value_plane_word(head_dim, width, slot, &bit);
    uint32_t mask = (1u << width) - 1;
    for (int c = 0; c < head_dim; c++) codes[c] |= (uint8_t)((load32(at + 4 * c) >> bit & mask) << shift);
}

void page_put_row(const page_side *side, uint8_t *page, int slot, const uint8_t *codes,
                  const uint16_t *params) {
    assert(slot >= 0 && slot < OSCAR_PAGE_TOKENS);
    void (*put)(int32_t, int, uint8_t *, int, const uint8_t *, int) =
        side->kind == PAGE_KEY ? key_plane_put : value_plane_put;
    put(side->head_dim, 2, page, slot, codes, 0);
    if (side->bits > 2) put(side->head_dim, side->bits - 2, page + side->high_offset, slot, codes, 2);
    uint16_t *out = (uint16_t *)(void *)(page + side->params_offset); /* [n_groups, 2, 64] */
    for (int i = 0; i < side->n_groups * 2; i++) out[i * OSCAR_PAGE_TOKENS + slot] = params[i];
}

void page_get_row(const page_side *side, const uint8_t *page, int slot, uint8_t *codes,
                  uint16_t *params) {
    assert(slot >= 0 && slot < OSCAR_PAGE_TOKENS);
    void (*get)(int32_t, int, const uint8_t *, int, uint8_t *, int) =
        side->kind == PAGE_KEY ? key_plane_get : value_plane_get;
    memset(codes, 0, (size_t)side->head_dim);
    get(side->head_dim, 2, page, slot, codes, 0);
    if (side->bits > 2) get(side->head_dim, side->bits - 2, page + side->high_offset, slot, codes, 2);
    const uint16_t *in = (const uint16_t *)(const void *)(page + side->params_offset);
    for (int i = 0; i < side->n_groups * 2; i++) params[i] = in[i * OSCAR_PAGE_TOKENS + slot];
}
