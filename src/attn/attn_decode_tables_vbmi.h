/*
 * attn_decode_tables_vbmi.h - keys of 2 bits with AVX-512 VBMI: VPERMB looks up in a table of 64 bytes, so byte j of every
 * lane has a table of its own, pair j or 4 + j of a unit. VPDPBUSD adds what the four bytes of a lane come to. Included by
 * attn_decode_dot.h.
 */
#ifndef OSCAR_ATTN_DECODE_TABLES_VBMI_H
#define OSCAR_ATTN_DECODE_TABLES_VBMI_H

#include "attn/attn_decode_tables.h"

/* Of pairs p and p + 4. */
INLINE vf two_tables(vf sizes) { return vf_add(sizes, _mm512_shuffle_f32x4(sizes, sizes, 0x4e)); }

/* [pairs 0 to 3, 4 to 7][low, high][4 pairs][16] */
static void unit_tables(const float *q, float scale, uint8_t *out) {
    const vf first = _mm512_broadcast_f32x4(_mm_setr_ps(-1.5f, -0.5f, 0.5f, 1.5f));
    const vf second = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), first);
    for (int p = 0; p < 8; p++) {
        const float *at = q + p % 4 + p / 4 * 8;
        const vi v = vi_add(vi_from_float(vf_fma(second, vf_set1(scale * at[4]), vf_mul(first, vf_set1(scale * at[0])))),
                            vi_set1(TABLE_ZERO << 8));
        uint8_t *to = out + p / 4 * 128 + p % 4 * 16;
        vi_store_bytes((int8_t *)to, v);
        vi_store_bytes((int8_t *)to + 64, vi_shr(v, 8));
    }
}

/* Indices in key_tiles: [unit][pairs 0 to 3, 4 to 7][64 tokens][4]. */
static void spread_pairs(attn_decode *d, const uint8_t *page) {
    const int units = d->k_side->head_dim / 16, tile = 64 * units;
    const vi nibble = vi_set1(0x0f0f0f0f), byte = vi_set1(0x30201000);
    uint8_t *out = d->key_tiles;
    for (int unit = 0; unit < units; unit++, page += 64, out += 512)
        UNROLL for (int v = 0; v < TILE_VECS; v++) {
            const vi word = vi_load(page + v * tile);
            _mm512_store_si512(out + 64 * v, vi_or(vi_and(word, nibble), byte));
            _mm512_store_si512(out + 64 * v + 256, vi_or(vi_and(vi_shr(word, 4), nibble), byte));
        }
}

/* Sums of V over a group. */
INLINE void group_sums(int units, const uint8_t *pairs, const uint8_t *tables, vi sums[TILE_VECS]) {
    const vi ones = vi_set1(0x01010101), zero = vi_set1(-TABLE_ZERO * 8 * units);
    vi low[TILE_VECS], high[TILE_VECS];
    UNROLL for (int v = 0; v < TILE_VECS; v++) low[v] = vi_zero(), high[v] = zero;
    for (const uint8_t *end = pairs + 512 * units; pairs < end; pairs += 512, tables += 256) {
        const vi low0 = vi_load(tables), high0 = vi_load(tables + 64), low1 = vi_load(tables + 128), high1 = vi_load(tables + 192);
        UNROLL for (int v = 0; v < TILE_VECS; v++) {
            const vi i0 = vi_load(pairs + 64 * v), i1 = vi_load(pairs + 64 * v + 256);
            low[v] = _mm512_dpbusd_epi32(low[v], _mm512_permutexvar_epi8(i0, low0), ones);
            low[v] = _mm512_dpbusd_epi32(low[v], _mm512_permutexvar_epi8(i1, low1), ones);
            high[v] = _mm512_dpbusd_epi32(high[v], _mm512_add_epi8(_mm512_permutexvar_epi8(i0, high0), _mm512_permutexvar_epi8(i1, high1)), ones);
        }
    }
    UNROLL for (int v = 0; v < TILE_VECS; v++) sums[v] = vi_add(vi_shl(high[v], 8), low[v]);
}

#endif
