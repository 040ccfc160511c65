/*
 * page.h - the byte layout of quantised rows in a page, on CPUs.
 *
 * A page holds 64 tokens. One side of one KV head of one layer is a `page side`:
 *
 *   planes   codes, in tiles of 16 tokens (4 tiles), each tile in blocks of 64 bytes
 *   params   [n_groups][2][64] fp16: the steps of the 64 tokens, then their offsets
 *
 * 2-bit plane, one block = 16 tokens x 16 channels. It is 16 little-endian 32-bit lanes:
 *   keys:   lane = token; the code of channel 4 f + j of the block sits at bit 8 j + 2 f
 *   values: lane = channel; the code of token 4 f + j of the tile sits at bit 8 j + 2 f
 * so that (lane >> 2 f) & 0x03030303 gives four bytes that one integer dot product takes, and
 * (lane >> (8 j + 2 f)) & 3 a vector of 16 codes to widen. A tile has head_dim/16 blocks, channels
 * rising.
 *
 * 3 bits: a second plane with bit 2 of each code; a block is 16 tokens x 32 channels (keys: channel
 * 4 f + j of the 32 at bit 8 j + f, f = 0..7) or 16 channels x 32 tokens (values: token 4 f + j of
 * the 32 at bit 8 j + f). Keys: ceil(head_dim/32) blocks a tile of 16 tokens; values: head_dim/16
 * blocks a half page of 32 tokens.
 * 4 bits: a second 2-bit plane, laid out like the first, with bits 2 and 3.
 * Planes follow each other; then the parameters.
 *
 * A key row owns whole 32-bit words; a value row shares bytes with the rows of its tile, so writers
 * of value rows of one page side must not run at the same time.
 */
#ifndef OSCAR_PAGE_H
#define OSCAR_PAGE_H

#include "codec/codec.h"

typedef enum page_side_kind { PAGE_KEY = 0, PAGE_VALUE = 1 } page_side_kind;

typedef struct page_side {
    int32_t kind; /* page_side_kind */
    int32_t head_dim;
    int32_t group;
    int32_t n_groups;
    int32_t bits;          /* 2, 3, 4 */
    size_t high_offset;    /* bytes to the second plane; 0 when bits == 2 */
    size_t params_offset;  /* bytes to the parameters */
    size_t bytes;          /* the whole side, a multiple of 64 */
} page_side;

page_side page_side_make(page_side_kind kind, int32_t head_dim, int32_t bits);

/* Where a page of BF16 rows has a number: keys [head_dim / 2][64][2], values [32][head_dim][2]. Two
 * channels (keys) or tokens (values) lie side by side, as products of BF16 numbers take them. */
static inline size_t page_bf16_at(page_side_kind kind, int32_t head_dim, int slot, int channel) {
    if (kind == PAGE_KEY) return (size_t)((channel / 2 * OSCAR_PAGE_TOKENS + slot) * 2 + channel % 2);
    return (size_t)((slot / 2 * head_dim + channel) * 2 + slot % 2);
}

/* Writes the row of token `slot` (0..63). codes: [head_dim] one a byte; params: [n_groups, 2]. */
void page_put_row(const page_side *side, uint8_t *page, int slot, const uint8_t *codes,
                  const uint16_t *params);
void page_get_row(const page_side *side, const uint8_t *page, int slot, uint8_t *codes,
                  uint16_t *params);

#endif
