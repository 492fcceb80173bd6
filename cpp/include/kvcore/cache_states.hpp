// SPDX-License-Identifier: Apache-2.0
// Layers that keep a state of a fixed size for each request instead of its tokens. Plain values.
#pragma once

#include <cstdint>

#include "kvcore/page_moves.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// Layers with a state. All such groups of a model share the numbers of their slots: a slot has a
/// place in the arrays of each of them.
struct StateGroup {
    // Tokens between two checkpoints, a multiple of CacheConfig::page_size; 0: none but those at
    // the end of a prompt and where prompts branch.
    std::int64_t interval = 0;
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

/// Slots of a replica at this moment, and what was done with them since construction or the last
/// reset. used + checkpoints + free == total.
struct StateStats {
    std::int64_t total_slots = 0;
    std::int64_t used_slots = 0;           // of requests, and those that only a copy still holds
    std::int64_t checkpoints = 0;          // of cached prefixes
    std::int64_t available_slots = 0;      // free ones, and checkpoints that nobody holds
    std::int64_t checkpoint_hits = 0;      // requests that began with one
    std::int64_t checkpoints_made = 0;     // since then
    std::int64_t host_slots = 0;           // of the host tier, which count nowhere else
    std::int64_t host_checkpoints = 0;     // of prefixes that it has
    std::int64_t stored_checkpoints = 0;   // that it got, since construction or the last reset
    std::int64_t loaded_checkpoints = 0;   // of checkpoint_hits, those that came from it
    std::int64_t evicted_checkpoints = 0;  // of the device, given up since their slots were needed

    /// Adds another replica's.
    StateStats& operator+=(const StateStats& other) noexcept {
        total_slots += other.total_slots;
        used_slots += other.used_slots;
        checkpoints += other.checkpoints;
        available_slots += other.available_slots;
        checkpoint_hits += other.checkpoint_hits;
        checkpoints_made += other.checkpoints_made;
        host_slots += other.host_slots;
        host_checkpoints += other.host_checkpoints;
        stored_checkpoints += other.stored_checkpoints;
        loaded_checkpoints += other.loaded_checkpoints;
        evicted_checkpoints += other.evicted_checkpoints;
        return *this;
    }
};

}  // namespace kvcore
