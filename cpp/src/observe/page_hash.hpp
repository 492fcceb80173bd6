// SPDX-License-Identifier: Apache-2.0
// Hashes of prefixes, page by page, so that a hash does not depend on where runs end.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

#include "kvcore/types.hpp"

namespace kvcore::page_hash {

constexpr std::uint64_t kKeyA = 0x9e3779b97f4a7c15U;
constexpr std::uint64_t kKeyB = 0xc2b2ae3d27d4eb4fU;

/// Both halves of the product, joined.
[[nodiscard]] inline std::uint64_t folded_product(std::uint64_t a, std::uint64_t b) noexcept {
#if defined(__SIZEOF_INT128__)
    __extension__ using Wide = unsigned __int128;
    const Wide product = static_cast<Wide>(a) * b;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
#else
    a = (a ^ (a >> 32)) * kKeyA ^ b;
    b = (b ^ (b >> 29)) * kKeyB;
    return (a ^ (a >> 32)) * (b | 1);
#endif
}

/// The hash of the tokens of a page, without the pages before it. The products do not depend on
/// each other, so the processor computes several of them at a time.
[[nodiscard]] inline std::uint64_t of_tokens(const TokenId* tokens, std::int32_t n) noexcept {
    std::uint64_t sum = 0;
    std::uint64_t a = kKeyA;
    std::uint64_t b = kKeyB;
    for (; n >= 4; n -= 4, tokens += 4, a += kKeyB, b += kKeyA) {
        std::uint64_t words[2];
        std::memcpy(words, tokens, sizeof words);
        sum += folded_product(words[0] ^ a, words[1] ^ b);
    }
    for (; n > 0; --n, ++tokens, a += kKeyB) {
        sum += folded_product(static_cast<std::uint32_t>(*tokens) ^ a, b);
    }
    return sum;
}

/// The hash of a prefix that ends with a page, from the hash of the prefix before the page.
[[nodiscard]] inline std::uint64_t extended(std::uint64_t before, const TokenId* page,
                                            std::int32_t page_size) noexcept {
    return folded_product(before ^ kKeyA, of_tokens(page, page_size) ^ kKeyB) + kKeyB;
}

/// The hash of the empty prefix of a namespace.
[[nodiscard]] inline std::uint64_t of_namespace(std::string_view name) noexcept {
    std::uint64_t hash = kKeyB;
    for (const char each : name) {
        hash = folded_product(hash ^ static_cast<unsigned char>(each), kKeyA) + kKeyB;
    }
    return hash;
}

}  // namespace kvcore::page_hash
