// SPDX-License-Identifier: Apache-2.0
// What is to be done to bytes, said by page ids: the words that who owns the pages and who copies
// them have in common. Plain values.
#pragma once

#include <cstdint>

#include "kvcore/types.hpp"

namespace kvcore {

/// Where pages lie, from the fastest down. Each tier numbers its pages from 0, in each replica.
enum class Tier : std::uint8_t {
    kDevice,  // the pool that kernels read
    kHost,    // host memory
};

/// A copy that the owner of both tiers' memory performs: the first `num_tokens` tokens of a page,
/// all layers and scales. Between tiers it is always the whole page.
struct PageMove {
    std::int32_t replica = 0;
    BlockId source = 0;
    BlockId destination = 0;
    std::int32_t num_tokens = 0;
    SequenceHandle sequence;  // that the device's page belongs to: where both are, the destination
    Tier source_tier = Tier::kDevice;
    Tier destination_tier = Tier::kDevice;

    /// Its page in a tier, of a move between two.
    [[nodiscard]] BlockId page_in(Tier tier) const noexcept {
        return source_tier == tier ? source : destination;
    }
    /// It fills a page of the device from a tier below.
    [[nodiscard]] bool is_load() const noexcept {
        return source_tier != Tier::kDevice && destination_tier == Tier::kDevice;
    }
    /// The same bytes to the same place, whoever asked for them.
    friend bool operator==(const PageMove& a, const PageMove& b) noexcept {
        return a.replica == b.replica && a.source == b.source && a.destination == b.destination &&
               a.num_tokens == b.num_tokens && a.source_tier == b.source_tier &&
               a.destination_tier == b.destination_tier;
    }
};

}  // namespace kvcore
