// SPDX-License-Identifier: Apache-2.0
// Copies of pages and slots, by their ids. The code that owns the pages and the code that copies
// the bytes share these types. Plain values.
#pragma once

#include <cstdint>
#include <vector>

#include "kvcore/types.hpp"

namespace kvcore {

/// The memory that holds a page, the fastest first. Each tier numbers its pages from 0, in each
/// replica.
enum class Tier : std::uint8_t {
    kDevice,  // the pool that kernels read
    kHost,    // host memory
};

/// A copy that the owner of both tiers' memory makes: the first `num_tokens` tokens of a page, with
/// all layers and scales. A copy between tiers always copies the whole page.
struct PageMove {
    std::int32_t replica = 0;
    BlockId source = 0;
    BlockId destination = 0;
    std::int32_t num_tokens = 0;
    SequenceHandle sequence;  // owner of the device's page; of the destination if both are there
    Tier source_tier = Tier::kDevice;
    Tier destination_tier = Tier::kDevice;

    /// The page in a tier, for a copy between two tiers.
    [[nodiscard]] BlockId page_in(Tier tier) const noexcept {
        return source_tier == tier ? source : destination;
    }
    /// True if the copy fills a page of the device from a lower tier.
    [[nodiscard]] bool is_load() const noexcept {
        return source_tier != Tier::kDevice && destination_tier == Tier::kDevice;
    }
    /// True if both copy the same bytes to the same place; `sequence` may differ.
    friend bool operator==(const PageMove& a, const PageMove& b) noexcept {
        return a.replica == b.replica && a.source == b.source && a.destination == b.destination &&
               a.num_tokens == b.num_tokens && a.source_tier == b.source_tier &&
               a.destination_tier == b.destination_tier;
    }
};

/// The copy of a slot, in all groups. Each tier numbers its slots from 0, in each replica.
struct StateMove {
    std::int32_t replica = 0;
    std::int32_t source = 0;
    std::int32_t destination = 0;
    Tier source_tier = Tier::kDevice;
    Tier destination_tier = Tier::kDevice;

    /// The slot in a tier, for a copy between two tiers.
    [[nodiscard]] std::int32_t slot_in(Tier tier) const noexcept {
        return source_tier == tier ? source : destination;
    }
    /// True if the copy fills a slot of the device from a lower tier.
    [[nodiscard]] bool is_load() const noexcept {
        return source_tier != Tier::kDevice && destination_tier == Tier::kDevice;
    }
    friend bool operator==(const StateMove& a, const StateMove& b) noexcept {
        return a.replica == b.replica && a.source == b.source && a.destination == b.destination &&
               a.source_tier == b.source_tier && a.destination_tier == b.destination_tier;
    }
};

/// A request that a call moved: its row in the batch, and its indices before the call.
struct MovedRequest {
    std::int64_t row = 0;
    std::int64_t start = 0;
    std::int64_t active = 0;
};

/// The copies that a call leaves to its caller. The caller makes them at once, in any order, and
/// passes the ticket to CacheManager::finish. Until then, the manager holds every page of these
/// copies: no other request gets these pages, even if calls release, fork, truncate or reset in the
/// meantime, and no page table names a page that a copy writes.
struct Transfers {
    std::uint64_t ticket = 0;             // for CacheManager::finish; 0: no copies
    std::vector<PageMove> copies;         // within the device's pool
    std::vector<PageMove> tier_moves;     // between the device and lower tiers: whole pages
    std::vector<StateMove> state_copies;  // between the device's state slots, in all state groups
    std::vector<StateMove> state_moves;   // between state slots of the device and of the tier
    std::vector<MovedRequest> moved;      // requests to set back if a load fails

    [[nodiscard]] bool empty() const noexcept { return ticket == 0; }
    /// Empties the lists for the next call; keeps the memory.
    void clear() noexcept {
        ticket = 0;
        copies.clear();
        tier_moves.clear();
        state_copies.clear();
        state_moves.clear();
        moved.clear();
    }
};

/// The result of `take_owed` for a sequence.
enum class OwedStatus {
    kNone,      // no copies are owed
    kTaken,     // the owed copies are in the transfers
    kUnderWay,  // the copies are in flight elsewhere: call `wait`
};

}  // namespace kvcore
