// SPDX-License-Identifier: Apache-2.0
// The hash of tokens, for the index of children, policies and the logs of pages.
#pragma once

#if defined(__SSE2__) && defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvcore/types.hpp"

namespace kvcore {

/// The two halves of the 128-bit product of `a` and `b`, joined by exclusive or. Every bit depends
/// on every bit of `a` and `b`.
[[nodiscard]] inline std::uint64_t folded_product(std::uint64_t a, std::uint64_t b) noexcept {
    __extension__ using Wide = unsigned __int128;
    const Wide product = Wide{a} * b;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

namespace detail {

// Hexadecimal digits of pi after the first 32.
alignas(16) constexpr std::uint32_t kHashKeys[16] = {
    0xa4093822U, 0x299f31d0U, 0x082efa98U, 0xec4e6c89U, 0x452821e6U, 0x38d01377U,
    0xbe5466cfU, 0x34e90c6cU, 0xc0ac29b7U, 0xc97c50ddU, 0x3f84d5b5U, 0xb5470917U,
    0x9216d5d9U, 0x8979fb1bU, 0xd1310ba6U, 0x98dfb5acU};

// Returns (t0 + k0 + s) * (t1 + k1 + s) + (t2 + k2 + s) * (t3 + k3 + s) + ... for kTokens tokens, a
// multiple of 4. The sums have 32 bits and the products 64.
template <std::ptrdiff_t kTokens>
[[nodiscard]] inline std::uint64_t sum_products(const TokenId* tokens, std::uint32_t s) noexcept {
#if defined(__SSE2__) && defined(__x86_64__)
    __m128i sum = _mm_setzero_si128();
    const __m128i more = _mm_set1_epi32(static_cast<int>(s));
    for (std::ptrdiff_t i = 0; i < kTokens; i += 4) {
        const auto* at = reinterpret_cast<const __m128i*>(tokens + i);
        const auto* key = reinterpret_cast<const __m128i*>(kHashKeys + i);
        const __m128i four =
            _mm_add_epi32(_mm_loadu_si128(at), _mm_add_epi32(_mm_load_si128(key), more));
        sum = _mm_add_epi64(sum, _mm_mul_epu32(four, _mm_srli_epi64(four, 32)));
    }
    const __m128i other = _mm_unpackhi_epi64(sum, sum);
    return static_cast<std::uint64_t>(_mm_cvtsi128_si64(_mm_add_epi64(sum, other)));
#else
    std::uint64_t sum = 0;
    for (std::ptrdiff_t i = 0; i < kTokens; i += 2) {
        const std::uint32_t first = static_cast<std::uint32_t>(tokens[i]) + kHashKeys[i] + s;
        const std::uint32_t second =
            static_cast<std::uint32_t>(tokens[i + 1]) + kHashKeys[i + 1] + s;
        sum += std::uint64_t{first} * second;
    }
    return sum;
#endif
}

}  // namespace detail

/// Extends a hash of tokens by the sum of products of the tokens after them.
[[nodiscard]] inline std::uint64_t joined_hash(std::uint64_t hash, std::uint64_t sum) noexcept {
    constexpr std::uint64_t kMul = 0x9e3779b97f4a7c15U;
    return folded_product(hash ^ sum, kMul);
}

/// Returns a hash of `tokens` [n] under a seed: sums of products as in NH (Black et al., UMAC,
/// 1999), 16 tokens at a time, joined by folded products. Only code with the seed can choose tokens
/// whose hashes are equal.
[[nodiscard]] inline std::uint64_t hash_tokens(std::uint64_t seed, const TokenId* tokens,
                                               std::int64_t n) noexcept {
    const auto s = static_cast<std::uint32_t>(seed);
    std::uint64_t hash = seed ^ static_cast<std::uint64_t>(n);
    for (; n >= 16; n -= 16, tokens += 16) {
        hash = joined_hash(hash, detail::sum_products<16>(tokens, s));
    }
    for (; n >= 4; n -= 4, tokens += 4) {
        hash = joined_hash(hash, detail::sum_products<4>(tokens, s));
    }
    if (n > 0) {
        TokenId rest[4] = {};
        std::memcpy(rest, tokens, static_cast<std::size_t>(n) * sizeof(TokenId));
        hash = joined_hash(hash, detail::sum_products<4>(rest, s));
    }
    return hash;
}

/// Writes the hash that `hash_tokens` returns for each page of `tokens` [n pages]. With AVX2, four
/// chunks of 16 tokens are read at a time.
void hash_pages(std::uint64_t* hashes, std::uint64_t seed, const TokenId* tokens,
                std::int32_t page_size, std::int32_t n) noexcept;

/// Calls take(i, hash) for i = 0 .. n - 1 with the hash of the i-th page of `tokens` [n pages].
template <class Take>
void for_each_page_hash(std::uint64_t seed, const TokenId* tokens, std::int32_t page_size,
                        std::int32_t n, const Take& take) {
    constexpr std::int32_t kBlock = 32;
    std::uint64_t hashes[kBlock];
    for (std::int32_t i = 0; i < n; i += kBlock) {
        const std::int32_t size = std::min(kBlock, n - i);
        hash_pages(hashes, seed, tokens + std::ptrdiff_t{i} * page_size, page_size, size);
        for (std::int32_t j = 0; j < size; ++j) take(i + j, hashes[j]);
    }
}

}  // namespace kvcore
