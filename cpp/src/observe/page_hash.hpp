// SPDX-License-Identifier: Apache-2.0
// Hashes of prefixes, page by page, so that a hash does not depend on where runs end.
#pragma once

#include <cstdint>
#include <string_view>

#include "tree/token_hash.hpp"

namespace kvcore::page_hash {

// Fixed, so that a replay always has the same sample.
constexpr std::uint64_t kSeed = 0x9e3779b97f4a7c15U;
constexpr std::uint64_t kChain = 0xc2b2ae3d27d4eb4fU;

/// The hash of a prefix that ends with a page, from the hash of the prefix before the page and the
/// hash of the page's tokens under kSeed.
[[nodiscard]] inline std::uint64_t extended(std::uint64_t before, std::uint64_t tokens) noexcept {
    return folded_product(before ^ kSeed, tokens ^ kChain) + kChain;
}

/// The hash of the empty prefix of a namespace.
[[nodiscard]] inline std::uint64_t of_namespace(std::string_view name) noexcept {
    std::uint64_t hash = kChain;
    for (const char each : name) {
        hash = folded_product(hash ^ static_cast<unsigned char>(each), kSeed) + kChain;
    }
    return hash;
}

}  // namespace kvcore::page_hash
