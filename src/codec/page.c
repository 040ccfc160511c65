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
 * writers below is given `width` and takes 32 / width codes a lane. */
static inline int code_bit(int index, int width) {
    return 8 * (index & 3) + width * (index >> 2);
}

/* Codes shifted right by `shift`, `width` bits each, into one row of a key plane: whole words. */
static void key_plane_put(int32_t head_dim, int width, uint8_t *plane, int slot,
                          const uint8_t *codes, int shift) {
    int per_word = 32 / width, n_blocks = (head_dim + per_word - 1) / per_word;
    uint8_t *lane = plane + (size_t)(slot / TILE_TOKENS) * n_blocks * BLOCK_BYTES + slot % TILE_TOKENS * 4;
    uint32_t mask = (1u << width) - 1;
    for (int b = 0; b < n_blocks; b++) {
        uint32_t word = 0;
        int n = head_dim - b * per_word < per_word ? head_dim - b * per_word : per_word;
        for (int i = 0; i < n; i++)
            word |= ((uint32_t)codes[b * per_word + i] >> shift & mask) << code_bit(i, width);
        for (int byte = 0; byte < 4; byte++) lane[b * BLOCK_BYTES + byte] = (uint8_t)(word >> 8 * byte);
    }
}

static void key_plane_get(int32_t head_dim, int width, const uint8_t *plane, int slot,
                          uint8_t *codes, int shift) {
    int per_word = 32 / width, n_blocks = (head_dim + per_word - 1) / per_word;
    const uint8_t *lane = plane + (size_t)(slot / TILE_TOKENS) * n_blocks * BLOCK_BYTES + slot % TILE_TOKENS * 4;
    uint32_t mask = (1u << width) - 1;
    for (int c = 0; c < head_dim; c++) {
        const uint8_t *word = lane + c / per_word * BLOCK_BYTES;
        int bit = code_bit(c % per_word, width);
        codes[c] |= (uint8_t)((word[bit >> 3] >> (bit & 7) & mask) << shift);
    }
}

/* The byte of channel 0 that holds token `slot` of a value plane, and the bit in it. */
static inline size_t value_plane_byte(int32_t head_dim, int width, int slot, int *bit) {
    int tokens = 32 / width, b = code_bit(slot % tokens, width);
    *bit = b & 7;
    return (size_t)(slot / tokens) * (head_dim / 16) * BLOCK_BYTES + (size_t)(b >> 3);
}

/* One token of a value plane: `width` bits in each channel's word, shared with other tokens. */
static void value_plane_put(int32_t head_dim, int width, uint8_t *plane, int slot,
                            const uint8_t *codes, int shift) {
    int bit;
    uint8_t *at = plane + value_plane_byte(head_dim, width, slot, &bit);
    unsigned mask = (1u << width) - 1;
    for (int c = 0; c < head_dim; c++)
        at[4 * c] = (uint8_t)((at[4 * c] & ~(mask << bit)) | (((unsigned)codes[c] >> shift & mask) << bit));
}

static void value_plane_get(int32_t head_dim, int width, const uint8_t *plane, int slot,
                            uint8_t *codes, int shift) {
    int bit;
    const uint8_t *at = plane + value_plane_byte(head_dim, width, slot, &bit);
    unsigned mask = (1u << width) - 1;
    for (int c = 0; c < head_dim; c++) codes[c] |= (uint8_t)((at[4 * c] >> bit & mask) << shift);
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
