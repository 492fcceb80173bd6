// SPDX-License-Identifier: Apache-2.0
// Layers that keep a state of a fixed size for each request instead of its tokens. Plain values.
#pragma once

#include <cstdint>

#include "kvcore/types.hpp"

namespace kvcore {

/// Layers with a state. All such groups of a model share the numbers of their slots: a slot has a
/// place in the arrays of each of them.
struct StateGroup {
    // Tokens between two checkpoints, a multiple of CacheConfig::page_size; 0: none but those at
    // the end of a prompt and where prompts branch.
    std::int64_t interval = 0;
};

/// The copy of a slot, in all groups.
struct StateMove {
    std::int32_t replica = 0;
    std::int32_t source = 0;
    std::int32_t destination = 0;

    friend bool operator==(const StateMove& a, const StateMove& b) noexcept {
        return a.replica == b.replica && a.source == b.source && a.destination == b.destination;
    }
};

/// Slots of a replica at this moment, and what was done with them since construction or the last
/// reset. used + checkpoints + free == total.
struct StateStats {
    std::int64_t total_slots = 0;
    std::int64_t used_slots = 0;        // of requests, and those that only a copy still holds
    std::int64_t checkpoints = 0;       // of cached prefixes
    std::int64_t available_slots = 0;   // free ones, and checkpoints that nobody holds
    std::int64_t checkpoint_hits = 0;   // requests that began with one
    std::int64_t checkpoints_made = 0;  // since then

    /// Adds another replica's.
    StateStats& operator+=(const StateStats& other) noexcept {
        total_slots += other.total_slots;
        used_slots += other.used_slots;
        checkpoints += other.checkpoints;
        available_slots += other.available_slots;
        checkpoint_hits += other.checkpoint_hits;
        checkpoints_made += other.checkpoints_made;
        return *this;
    }
};

}  // namespace kvcore
