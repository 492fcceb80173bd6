// SPDX-License-Identifier: Apache-2.0
// Transfers of bytes, named by page ids. The owner of the pages and the code that copies the pages
// share these types. Plain values.
#pragma once

#include <cstdint>
#include <vector>

#include "kvcore/types.hpp"

namespace kvcore {

/// The memory that holds a page, fastest first. Each tier numbers its pages from 0, in each
/// replica.
enum class Tier : std::uint8_t {
    kDevice,  // the pool that kernels read
    kHost,    // host memory
};

/// A copy of the first `num_tokens` tokens of a page, with all layers and scales, which the owner
/// of the memory makes. A copy between tiers is always a whole page.
struct PageMove {
    std::int32_t replica = 0;
    BlockId source = 0;
    BlockId destination = 0;
    std::int32_t num_tokens = 0;
    SequenceHandle sequence;  // owner of the device's page; within the device, of the destination
    Tier source_tier = Tier::kDevice;
    Tier destination_tier = Tier::kDevice;

    /// The page in `tier`, if the move is between two tiers.
    [[nodiscard]] BlockId page_in(Tier tier) const noexcept {
        return source_tier == tier ? source : destination;
    }
    /// True if the move fills a page of the device from a lower tier.
    [[nodiscard]] bool is_load() const noexcept {
        return source_tier != Tier::kDevice && destination_tier == Tier::kDevice;
    }
    /// Equal moves copy the same bytes to the same place; `sequence` may differ.
    friend bool operator==(const PageMove& a, const PageMove& b) noexcept {
        return a.replica == b.replica && a.source == b.source && a.destination == b.destination &&
               a.num_tokens == b.num_tokens && a.source_tier == b.source_tier &&
               a.destination_tier == b.destination_tier;
    }
};

/// The copy of a state slot, in all state groups. Each tier numbers its slots from 0, in each
/// replica.
struct StateMove {
    std::int32_t replica = 0;
    std::int32_t source = 0;
    std::int32_t destination = 0;
    Tier source_tier = Tier::kDevice;
    Tier destination_tier = Tier::kDevice;

    /// The slot in `tier`, if the move is between two tiers.
    [[nodiscard]] std::int32_t slot_in(Tier tier) const noexcept {
        return source_tier == tier ? source : destination;
    }
    /// True if the move fills a slot of the device from a lower tier.
    [[nodiscard]] bool is_load() const noexcept {
        return source_tier != Tier::kDevice && destination_tier == Tier::kDevice;
    }
    friend bool operator==(const StateMove& a, const StateMove& b) noexcept {
        return a.replica == b.replica && a.source == b.source && a.destination == b.destination &&
               a.source_tier == b.source_tier && a.destination_tier == b.destination_tier;
    }
};

/// A request that a call moved, and its position before the call.
struct MovedRequest {
    std::int64_t row = 0;  // of the batch
    std::int64_t start = 0;
    std::int64_t active = 0;
};

/// The copies that a call hands out. The caller makes them at once, in any order, and then ends
/// them by their ticket. Until then, every page that they name is held: no other owner gets the
/// page, even after a release, fork, truncation or reset, and no table shows a page that they
/// write.
struct Transfers {
    std::uint64_t ticket = 0;             // for CacheManager::finish; 0: nothing to do
    std::vector<PageMove> copies;         // within the device's pool
    std::vector<PageMove> tier_moves;     // between the pool and lower tiers: whole pages
    std::vector<StateMove> state_copies;  // between slots of the device
    std::vector<StateMove> state_moves;   // between slots of the device and of the tier
    std::vector<MovedRequest> moved;      // to be set back if a load fails

    [[nodiscard]] bool empty() const noexcept { return ticket == 0; }
    /// Prepares for the next call; keeps the memory.
    void clear() noexcept {
        ticket = 0;
        copies.clear();
        tier_moves.clear();
        state_copies.clear();
        state_moves.clear();
        moved.clear();
    }
};

/// The result of `take_owed`.
enum class OwedStatus {
    kNone,      // nothing is owed to the sequence
    kTaken,     // the owed copies are in the transfers
    kUnderWay,  // another thread makes the transfers: wait
};

}  // namespace kvcore
