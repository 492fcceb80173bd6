// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace kvcore {

/// Index of a page (block) in a pool, 0 <= id < num_blocks.
using BlockId = std::int32_t;

/// A token as the model's vocabulary numbers it. Every int32 is a legal, opaque token.
using TokenId = std::int32_t;

/// Names a claimed sequence: an entry and the generation of its present occupant, so that a handle
/// kept after `release` is recognised as stale. Generation 0 is never alive.
struct SequenceHandle {
    std::uint32_t index = 0;
    std::uint32_t generation = 0;

    friend bool operator==(const SequenceHandle& a, const SequenceHandle& b) noexcept {
        return a.index == b.index && a.generation == b.generation;
    }
    friend bool operator!=(const SequenceHandle& a, const SequenceHandle& b) noexcept {
        return !(a == b);
    }
};

/// ceil(a / b) for a >= 0, b > 0.
[[nodiscard]] constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) noexcept {
    return (a + b - 1) / b;
}

}  // namespace kvcore
