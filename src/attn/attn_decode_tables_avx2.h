/*
 * attn_decode_tables_avx2.h - keys of 2 bits with AVX2, which has no dot product of bytes: VPSHUFB looks up in 32 tokens at
 * once. What is not added as bytes is summed in 16 bits, even and odd bytes: all as they lie, and the odd ones shifted
 * down, which are taken off at the end. Included by attn_decode_dot.h.
 */
#ifndef OSCAR_ATTN_DECODE_TABLES_AVX2_H
#define OSCAR_ATTN_DECODE_TABLES_AVX2_H

#include "attn/attn_decode_tables.h"

/* Of two tables side by side. */
INLINE vf two_tables(vf sizes) { return vf_add(sizes, _mm256_permute_ps(sizes, 0xb1)); }

/* [8 pairs][low, high][16] */
static void unit_tables(const float *q, float scale, uint8_t *out) {
    const vf first = _mm256_setr_ps(-1.5f, -0.5f, 0.5f, 1.5f, -1.5f, -0.5f, 0.5f, 1.5f);
    const vf even = _mm256_setr_ps(-1.5f, -1.5f, -1.5f, -1.5f, 0.5f, 0.5f, 0.5f, 0.5f); /* entries 0-3, 8-11 */
    const vf odd = _mm256_setr_ps(-0.5f, -0.5f, -0.5f, -0.5f, 1.5f, 1.5f, 1.5f, 1.5f);
    for (int p = 0; p < 8; p++, out += 32) {
        const float *at = q + p % 4 + p / 4 * 8;
        vf x = vf_mul(first, vf_set1(scale * at[0])), y = vf_set1(scale * at[4]);
        vi v = _mm256_packs_epi32(vi_from_float(vf_fma(even, y, x)), vi_from_float(vf_fma(odd, y, x)));
        v = _mm256_add_epi16(v, _mm256_set1_epi16(TABLE_ZERO << 8));
        v = _mm256_packus_epi16(_mm256_and_si256(v, _mm256_set1_epi16(255)), _mm256_srli_epi16(v, 8));
        _mm256_store_si256((__m256i *)(void *)out, _mm256_permute4x64_epi64(v, 0xd8));
    }
}

/* Two codes a byte, in key_tiles: [unit][8 pairs][64 tokens], each half of them in the order in which group_sums()
 * takes them apart again: 0, 8, 1, 9, 2, 10, 3, 11, 16, 24, ... */
static void spread_pairs(attn_decode *d, const uint8_t *page) {
    const vi pick = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const vi nibble = _mm256_set1_epi8(15);
    const int units = d->k_side->head_dim / 16, tile = 64 * units;
    uint8_t *out = d->key_tiles;
    for (int unit = 0; unit < units; unit++, page += 64, out += 512)
        UNROLL for (int half = 0; half < 2; half++) {
            const uint8_t *at = page + 2 * half * tile;
            vi t0 = _mm256_shuffle_epi8(vi_load(at), pick), t8 = _mm256_shuffle_epi8(vi_load(at + 32), pick);
            vi t16 = _mm256_shuffle_epi8(vi_load(at + tile), pick), t24 = _mm256_shuffle_epi8(vi_load(at + tile + 32), pick);
            vi low0 = _mm256_unpacklo_epi8(t0, t8), high0 = _mm256_unpackhi_epi8(t0, t8);
            vi low16 = _mm256_unpacklo_epi8(t16, t24), high16 = _mm256_unpackhi_epi8(t16, t24);
            vi bytes[4] = {_mm256_unpacklo_epi64(low0, low16), _mm256_unpackhi_epi64(low0, low16),
                           _mm256_unpacklo_epi64(high0, high16), _mm256_unpackhi_epi64(high0, high16)};
            UNROLL for (int j = 0; j < 4; j++) {
                _mm256_store_si256((__m256i *)(void *)(out + 64 * j + 32 * half), vi_and(bytes[j], nibble));
                _mm256_store_si256((__m256i *)(void *)(out + 64 * (4 + j) + 32 * half), vi_and(vi_shr(bytes[j], 4), nibble));
            }
        }
}

INLINE vi table_at(const uint8_t *table) {
    return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)(const void *)table));
}

INLINE void add_bytes(vi x, vi *all, vi *odd) {
    *all = in_order(_mm256_add_epi16(*all, x));
    *odd = in_order(_mm256_add_epi16(*odd, _mm256_srli_epi16(x, 8)));
}

/* Sums of V over a group, eight tokens a vector. Up to 128 pairs, 16 bits with a sign hold what they must. */
INLINE void group_sums(int units, const uint8_t *pairs, const uint8_t *tables, vi sums[TILE_VECS]) {
    const short zero = (short)(-TABLE_ZERO * 8 * units);
    vi all[2][2], odd[2][2]; /* [low, high bytes][half of the tokens] */
    UNROLL for (int h = 0; h < 2; h++) {
        all[0][h] = odd[0][h] = vi_zero();
        all[1][h] = _mm256_set1_epi16((short)(257 * zero));
        odd[1][h] = _mm256_set1_epi16(zero);
    }
    for (const uint8_t *end = pairs + 512 * units; pairs < end; pairs += 512, tables += 256)
        UNROLL for (int p = 0; p < 8; p += 2) {
            const vi low0 = table_at(tables + 32 * p), low1 = table_at(tables + 32 * p + 32);
            const vi high0 = table_at(tables + 32 * p + 16), high1 = table_at(tables + 32 * p + 48);
            UNROLL for (int h = 0; h < 2; h++) {
                const vi i0 = vi_load(pairs + 64 * p + 32 * h), i1 = vi_load(pairs + 64 * p + 32 * h + 64);
                add_bytes(_mm256_shuffle_epi8(low0, i0), &all[0][h], &odd[0][h]);
                add_bytes(_mm256_shuffle_epi8(low1, i1), &all[0][h], &odd[0][h]);
                add_bytes(_mm256_add_epi8(_mm256_shuffle_epi8(high0, i0), _mm256_shuffle_epi8(high1, i1)), &all[1][h], &odd[1][h]);
            }
        }
    const vi weights = vi_set1(256 << 16 | 1);
    UNROLL for (int h = 0; h < 2; h++) {
        vi low = _mm256_sub_epi16(all[0][h], _mm256_slli_epi16(odd[0][h], 8)), high = _mm256_sub_epi16(all[1][h], _mm256_slli_epi16(odd[1][h], 8));
        vi *out = sums + 4 * h;
        out[0] = _mm256_madd_epi16(_mm256_unpacklo_epi16(low, high), weights);
        out[1] = _mm256_madd_epi16(_mm256_unpacklo_epi16(odd[0][h], odd[1][h]), weights);
        out[2] = _mm256_madd_epi16(_mm256_unpackhi_epi16(low, high), weights);
        out[3] = _mm256_madd_epi16(_mm256_unpackhi_epi16(odd[0][h], odd[1][h]), weights);
    }
}

#endif
