// SPDX-License-Identifier: Apache-2.0
// The number that a word adds to the digest of a page, the same on the CPU and on GPUs.
#pragma once

#include <cstdint>

#include "data/high_product.hpp"
#include "kvcore/dtype.hpp"

namespace kvcore {

constexpr std::uint64_t kDigestStep = 0x9e3779b97f4a7c15ULL;
constexpr std::uint64_t kDigestFactor = 0xd6e8feb86659fd93ULL;

/// `counter` is kDigestStep times the word's number, which counts from 1.
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint64_t digest_word(std::uint64_t word,
                                                                  std::uint64_t counter) noexcept {
    const std::uint64_t mixed = word ^ counter;
    return mixed * kDigestFactor ^ high_product(mixed, kDigestFactor);
}

}  // namespace kvcore
