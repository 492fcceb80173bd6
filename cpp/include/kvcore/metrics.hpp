// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kvcore/eviction.hpp"

namespace kvcore {

/// Counters since construction or the last reset.
struct Metrics {
    std::int64_t input_tokens = 0;      // of prompts, to compute: each of a request counts once
    std::int64_t cache_tokens = 0;      // of prompts, taken from the prefix cache instead
    std::int64_t copied_tokens = 0;     // taken out of a partly equal page, of those from the cache
    std::int64_t evicted_pages = 0;     // cached pages given to someone else
    EvictionCounts evicted;             // those, and what resets took, by their reasons
    EvictionCounts host_evicted;        // the same of the host tier
    std::int64_t peak_used_pages = 0;   // most pages held or pinned at a time
    std::int64_t stored_pages = 0;      // copied from the device to the host tier
    std::int64_t loaded_pages = 0;      // copied from the host tier to the device
    std::int64_t loaded_tokens = 0;     // that these made a hit longer by
    std::int64_t generated_tokens = 0;  // appended to requests behind their prompts
    // Of requests that were claimed before: tokens that ran then, which the cache still had, and
    // which run once more. Neither is in input_tokens or cache_tokens.
    std::int64_t resumed_tokens = 0;
    std::int64_t recomputed_tokens = 0;
    // Whole pages of prompts that neither the device nor a tier had when the request first ran.
    std::int64_t missed_pages = 0;

    /// Adds another replica's; peaks are added too, so that the sum is an upper bound.
    Metrics& operator+=(const Metrics& other) noexcept {
        input_tokens += other.input_tokens;
        cache_tokens += other.cache_tokens;
        copied_tokens += other.copied_tokens;
        evicted_pages += other.evicted_pages;
        evicted += other.evicted;
        host_evicted += other.host_evicted;
        peak_used_pages += other.peak_used_pages;
        stored_pages += other.stored_pages;
        loaded_pages += other.loaded_pages;
        loaded_tokens += other.loaded_tokens;
        generated_tokens += other.generated_tokens;
        resumed_tokens += other.resumed_tokens;
        recomputed_tokens += other.recomputed_tokens;
        missed_pages += other.missed_pages;
        return *this;
    }
};

/// Pages of one replica at this moment. free + cached + held outside the cache == total.
struct PoolStats {
    std::int64_t total_pages = 0;
    std::int64_t free_pages = 0;       // in nobody's hands, holding nothing
    std::int64_t cached_pages = 0;     // in the prefix tree
    std::int64_t evictable_pages = 0;  // of those, not protected by a sequence or a pin
    std::int64_t num_sequences = 0;    // claimed
    std::int64_t host_pages = 0;       // of the host tier, whose pages count nowhere else
    std::int64_t host_cached_pages = 0;

    /// Pages that a reservation can have: free ones and what eviction would free.
    [[nodiscard]] std::int64_t available_pages() const noexcept {
        return free_pages + evictable_pages;
    }
};

}  // namespace kvcore
