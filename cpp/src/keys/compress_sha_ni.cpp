// SPDX-License-Identifier: Apache-2.0
// Compiled for processors with SHA and SSE4.1: this object file must export only compress_sha_ni.
#include <immintrin.h>

#include "keys/kernels.hpp"

namespace kvcore::keys {
namespace {

__m128i load(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }

// Four rounds; each instruction does two, which leave the halves of the state swapped.
void four_rounds(__m128i& abef, __m128i& cdgh, __m128i words, std::size_t group) {
    const __m128i sum = _mm_add_epi32(words, load(kRoundConstants + 4 * group));
    cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
    abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
}

// The next four words of the message, from the sixteen words before them.
__m128i next_words(__m128i w0, __m128i w1, __m128i w2, __m128i w3) {
    const __m128i ninth = _mm_alignr_epi8(w3, w2, 4);
    return _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(w0, w1), ninth), w3);
}

void compress_block(__m128i& abef, __m128i& cdgh, const std::uint8_t* block) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w0 = _mm_shuffle_epi8(load(block), big_endian);
    __m128i w1 = _mm_shuffle_epi8(load(block + 16), big_endian);
    __m128i w2 = _mm_shuffle_epi8(load(block + 32), big_endian);
    __m128i w3 = _mm_shuffle_epi8(load(block + 48), big_endian);
    for (std::size_t group = 0; group < 12; group += 4) {
        four_rounds(abef, cdgh, w0, group);
        w0 = next_words(w0, w1, w2, w3);
        four_rounds(abef, cdgh, w1, group + 1);
        w1 = next_words(w1, w2, w3, w0);
        four_rounds(abef, cdgh, w2, group + 2);
        w2 = next_words(w2, w3, w0, w1);
        four_rounds(abef, cdgh, w3, group + 3);
        w3 = next_words(w3, w0, w1, w2);
    }
    four_rounds(abef, cdgh, w0, 12);
    four_rounds(abef, cdgh, w1, 13);
    four_rounds(abef, cdgh, w2, 14);
    four_rounds(abef, cdgh, w3, 15);
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
}

}  // namespace

void compress_sha_ni(std::uint32_t* state, const std::uint8_t* blocks, std::size_t n) {
    // From {a b c d}, {e f g h} to the order of the instructions: f e b a and h g d c, low to high.
    const __m128i badc = _mm_shuffle_epi32(load(state), 0xb1);
    const __m128i hgfe = _mm_shuffle_epi32(load(state + 4), 0x1b);
    __m128i abef = _mm_alignr_epi8(badc, hgfe, 8);
    __m128i cdgh = _mm_blend_epi16(hgfe, badc, 0xf0);
    for (std::size_t i = 0; i < n; ++i) compress_block(abef, cdgh, blocks + 64 * i);
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
    const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

}  // namespace kvcore::keys
