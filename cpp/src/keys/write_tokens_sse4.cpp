// SPDX-License-Identifier: Apache-2.0
// Compiled for processors with SSE4.1: this object file must export only write_tokens_sse4.
#include <immintrin.h>

#include "keys/kernels.hpp"

namespace kvcore::keys {
namespace {

// Tokens are of four kinds: only a head, or a head with 1, 2 or 4 bytes of a number.
constexpr std::uint8_t kMore[4] = {0, 1, 2, 4};

// How two tokens of each kind are put together from {number, head, number, head}, each of four
// bytes, low to high: heads first, numbers from their highest byte down.
struct Pairs {
    alignas(16) std::uint8_t places[16][16];
    std::uint8_t sizes[16];

    constexpr Pairs() : places(), sizes() {
        for (int pair = 0; pair < 16; ++pair) {
            std::uint8_t size = 0;
            for (std::uint8_t half = 0; half < 2; ++half) {
                const std::uint8_t more = kMore[half == 0 ? pair / 4 : pair % 4];
                const auto number = static_cast<std::uint8_t>(8 * half);
                places[pair][size++] = static_cast<std::uint8_t>(number + 4);
                for (std::uint8_t i = more; i > 0; --i) {
                    places[pair][size++] = static_cast<std::uint8_t>(number + i - 1);
                }
            }
            sizes[pair] = size;
        }
    }
};

constexpr Pairs kPairs;

std::size_t write_pair(std::uint8_t* out, __m128i items, unsigned pair) {
    const auto* places = reinterpret_cast<const __m128i*>(kPairs.places[pair]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm_shuffle_epi8(items, _mm_load_si128(places)));
    return kPairs.sizes[pair];
}

std::size_t write_four(std::uint8_t* out, __m128i tokens) {
    const __m128i sign = _mm_srai_epi32(tokens, 31);
    const __m128i number = _mm_xor_si128(tokens, sign);
    // Each -1 or 0.
    const __m128i one = _mm_cmpgt_epi32(number, _mm_set1_epi32(23));
    const __m128i two = _mm_cmpgt_epi32(number, _mm_set1_epi32(0xff));
    const __m128i four = _mm_cmpgt_epi32(number, _mm_set1_epi32(0xffff));
    const __m128i longer = _mm_add_epi32(two, four);
    const __m128i low = _mm_blendv_epi8(number, _mm_sub_epi32(_mm_set1_epi32(24), longer), one);
    const __m128i head = _mm_or_si128(low, _mm_and_si128(sign, _mm_set1_epi32(0x20)));
    // The kinds, negative, as 16 bits, and 4 * first + second of each two.
    const __m128i kinds = _mm_packs_epi32(_mm_add_epi32(one, longer), _mm_setzero_si128());
    const __m128i pairs = _mm_madd_epi16(kinds, _mm_set1_epi32(-1 * 65536 | (-4 & 0xffff)));
    const auto both = static_cast<std::uint64_t>(_mm_cvtsi128_si64(pairs));
    const std::size_t size =
        write_pair(out, _mm_unpacklo_epi32(number, head), static_cast<unsigned>(both));
    return size + write_pair(out + size, _mm_unpackhi_epi32(number, head),
                             static_cast<unsigned>(both >> 32));
}

}  // namespace

std::size_t write_tokens_sse4(std::uint8_t* out, const std::int32_t* tokens, std::size_t n) {
    std::uint8_t* end = out;
    std::size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        end += write_four(end, _mm_loadu_si128(reinterpret_cast<const __m128i*>(tokens + i)));
    }
    const auto written = static_cast<std::size_t>(end - out);
    return written + write_tokens_portable(end, tokens + i, n - i);
}

}  // namespace kvcore::keys
