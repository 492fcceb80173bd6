// SPDX-License-Identifier: Apache-2.0
// What is to be done to bytes, said by page ids: the words that who owns the pages and who copies
// them have in common. Plain values.
#pragma once

#include <cstdint>
#include <vector>

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

/// The copy of a slot, in all groups. Each tier numbers its slots from 0, in each replica.
struct StateMove {
    std::int32_t replica = 0;
    std::int32_t source = 0;
    std::int32_t destination = 0;
    Tier source_tier = Tier::kDevice;
    Tier destination_tier = Tier::kDevice;

    /// Its slot in a tier, of a move between two.
    [[nodiscard]] std::int32_t slot_in(Tier tier) const noexcept {
        return source_tier == tier ? source : destination;
    }
    /// It fills a slot of the device from a tier below.
    [[nodiscard]] bool is_load() const noexcept {
        return source_tier != Tier::kDevice && destination_tier == Tier::kDevice;
    }
    friend bool operator==(const StateMove& a, const StateMove& b) noexcept {
        return a.replica == b.replica && a.source == b.source && a.destination == b.destination &&
               a.source_tier == b.source_tier && a.destination_tier == b.destination_tier;
    }
};

/// A request that a call moved, and where it stood before.
struct MovedRequest {
    std::int64_t row = 0;  // of the batch
    std::int64_t start = 0;
    std::int64_t active = 0;
};

/// What a call leaves to be done to bytes: by its caller, at once and in any order, and then
/// finished by its ticket. Until it is finished every page that it names is held: nobody else gets
/// it, whoever releases, forks, truncates or resets meanwhile; and no table names a page that is
/// written by it.
struct Transfers {
    std::uint64_t ticket = 0;          // what CacheManager::finish ends; 0: there is nothing to do
    std::vector<PageMove> copies;      // within the device's pool
    std::vector<PageMove> tier_moves;  // between it and the tiers below: whole pages
    std::vector<StateMove> state_copies;  // between slots of states, in all their groups
    std::vector<StateMove> state_moves;   // the same between the device's and those of the tier
    std::vector<MovedRequest> moved;      // to be set back should a load fail

    [[nodiscard]] bool empty() const noexcept { return ticket == 0; }
    /// Ready for the next call; keeps the memory.
    void clear() noexcept {
        ticket = 0;
        copies.clear();
        tier_moves.clear();
        state_copies.clear();
        state_moves.clear();
        moved.clear();
    }
};

/// What `take_owed` found of a sequence.
enum class OwedStatus {
    kNone,      // nothing is owed to it
    kTaken,     // what is owed is in the transfers
    kUnderWay,  // somebody else is at it: wait
};

}  // namespace kvcore
