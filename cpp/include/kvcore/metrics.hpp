// SPDX-License-Identifier: Apache-2.0
// Counters of caches: pages and tokens, tenants, groups of layers, states, and the time of calls.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "kvcore/block_pool.hpp"
#include "kvcore/eviction.hpp"

namespace kvcore {

/// Counters since construction or the last reset.
struct Metrics {
    std::int64_t input_tokens = 0;      // of prompts, to be computed; each token of a request
                                        // counts once
    std::int64_t cache_tokens = 0;      // of prompts, taken from the prefix cache instead
    std::int64_t copied_tokens = 0;     // part of cache_tokens: copied out of a partly equal page
    std::int64_t evicted_pages = 0;     // cached pages given to a new owner
    EvictionCounts evicted;             // evicted_pages and pages dropped by resets, by reason
    EvictionCounts host_evicted;        // the same for the host tier
    std::int64_t peak_used_pages = 0;   // most pages held or pinned at a time
    std::int64_t stored_pages = 0;      // copied from the device to the host tier
    std::int64_t loaded_pages = 0;      // copied from the host tier to the device
    std::int64_t loaded_tokens = 0;     // tokens of hits that loaded_pages added
    std::int64_t generated_tokens = 0;  // appended to requests after their prompts
    // Of requests that were claimed before: tokens that ran before and were still cached, and
    // tokens that run once more. Neither count is in input_tokens or cache_tokens.
    std::int64_t resumed_tokens = 0;
    std::int64_t recomputed_tokens = 0;
    // Whole pages of prompts that were on neither the device nor a tier when the request first ran.
    std::int64_t missed_pages = 0;

    /// Adds another replica's counters; peaks are also added, so the sum is an upper bound.
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
    std::int64_t free_pages = 0;       // without an owner or contents
    std::int64_t cached_pages = 0;     // in the prefix tree
    std::int64_t evictable_pages = 0;  // cached pages that no sequence and no pin protects
    std::int64_t num_sequences = 0;    // claimed
    std::int64_t host_pages = 0;       // of the host tier, not counted in the fields above
    std::int64_t host_cached_pages = 0;

    /// Pages that a reservation can get: free pages and pages that eviction would free.
    [[nodiscard]] std::int64_t available_pages() const noexcept {
        return free_pages + evictable_pages;
    }
};

/// Pages of one group of layers in one replica at this moment.
struct GroupStats {
    std::int64_t held_pages = 0;    // pages that requests, pins and copies read
    std::int64_t cached_pages = 0;  // pages in the prefix tree
    std::int64_t holes = 0;         // pages that the tree lacks for its tokens
    std::int64_t given_back = 0;    // after windows passed, since construction or reset
    std::int64_t filled = 0;        // holes that got pages again, since construction or reset
    std::int64_t stored_pages = 0;  // copied to the host tier, since construction or reset
    std::int64_t loaded_pages = 0;  // copied back, since construction or reset

    /// Adds another replica's counters.
    GroupStats& operator+=(const GroupStats& other) noexcept {
        held_pages += other.held_pages;
        cached_pages += other.cached_pages;
        holes += other.holes;
        given_back += other.given_back;
        filled += other.filled;
        stored_pages += other.stored_pages;
        loaded_pages += other.loaded_pages;
        return *this;
    }
};

/// State slots of a replica at this moment, and counters since construction or the last reset.
/// used + checkpoints + free == total.
struct StateStats {
    std::int64_t total_slots = 0;
    std::int64_t used_slots = 0;           // of requests, and slots that only a copy still holds
    std::int64_t checkpoints = 0;          // of cached prefixes
    std::int64_t available_slots = 0;      // free slots, and checkpoints without a holder
    std::int64_t checkpoint_hits = 0;      // requests that began with a checkpoint
    std::int64_t checkpoints_made = 0;     // since construction or reset
    std::int64_t host_slots = 0;           // of the host tier, not counted in the fields above
    std::int64_t host_checkpoints = 0;     // of prefixes in the host tier
    std::int64_t stored_checkpoints = 0;   // copied to the host tier since construction or reset
    std::int64_t loaded_checkpoints = 0;   // the part of checkpoint_hits from the host tier
    std::int64_t evicted_checkpoints = 0;  // of the device, evicted because slots were needed

    /// Adds another replica's counters.
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

/// The pages of one tenant in one replica at this moment.
struct TenantStats {
    std::int64_t held_pages = 0;
    std::int64_t reserved_pages = 0;
    std::int64_t max_pages = TenantQuota::kNoCeiling;
    std::int64_t refused = 0;       // reservations refused only because of quotas
    std::int64_t input_tokens = 0;  // of its requests, as in Metrics
    std::int64_t cache_tokens = 0;
    std::int64_t generated_tokens = 0;
};

/// Counts calls by their duration.
///
/// Owns: a count per bucket. Threads: no locks of its own. Cost: O(1).
class LatencyHistogram {
   public:
    /// Inclusive upper bounds in nanoseconds: 1, 2 and 5 of every power of ten, 1 us to 1 s.
    static constexpr std::array<std::int64_t, 19> kBounds = {
        1'000,      2'000,       5'000,       10'000,      20'000,       50'000,     100'000,
        200'000,    500'000,     1'000'000,   2'000'000,   5'000'000,    10'000'000, 20'000'000,
        50'000'000, 100'000'000, 200'000'000, 500'000'000, 1'000'000'000};
    /// Calls per bucket, not cumulative; the last bucket has the calls that took longer than 1 s.
    using Counts = std::array<std::int64_t, kBounds.size() + 1>;

    /// The longest duration, in seconds, that a bucket counts; infinity for the last bucket.
    [[nodiscard]] static double bound(std::size_t bucket) noexcept {
        return bucket < kBounds.size() ? static_cast<double>(kBounds[bucket]) / 1e9
                                       : std::numeric_limits<double>::infinity();
    }
    /// Counts a call of that many ticks; `bounds` are the buckets' upper bounds in ticks.
    void add(std::int64_t ticks, const std::array<std::int64_t, kBounds.size()>& bounds) noexcept {
        std::size_t bucket = 0;
        while (bucket < bounds.size() && ticks > bounds[bucket]) ++bucket;
        ++counts_[bucket];
        ticks_ += ticks;
    }
    void reset() noexcept { *this = {}; }

    [[nodiscard]] const Counts& counts() const noexcept { return counts_; }
    /// Total of all calls.
    [[nodiscard]] std::int64_t ticks() const noexcept { return ticks_; }

   private:
    Counts counts_{};
    std::int64_t ticks_ = 0;
};

/// Measures how long the calls of a manager take while at least one user has started it.
///
/// A call starts with `begin`, and is counted when its result is passed to `end`; a call that
/// throws in between is not counted. Times come from the processor's counter if it has a counter
/// with a constant rate; otherwise from the steady clock, which can take ten times as long to read.
///
/// Owns: a histogram for each kind of call. Threads: no locks of its own. Cost: a comparison while
/// it is off; while it is on, two reads of the counter, about 10 ns each.
class CallTimes {
   public:
    enum Call : std::size_t { kReserve, kReserveBatch, kFetch, kStep, kNumCalls };

    /// Seconds per tick of the counter, measured over two milliseconds.
    [[nodiscard]] static double measure_tick() noexcept;
    /// Adds a user: calls are measured from now on. The first user's measured tick length is used.
    void start(double seconds_per_tick) noexcept;
    /// Removes a user. The counts stay.
    void stop() noexcept { num_users_ -= num_users_ > 0 ? 1 : 0; }
    [[nodiscard]] bool is_on() const noexcept { return num_users_ > 0; }

    /// The start time of a call; 0 while no user has started measuring.
    [[nodiscard]] std::int64_t begin() const noexcept { return is_on() ? now() : 0; }
    void end(Call call, std::int64_t begun) noexcept {
        if (begun != 0) calls_[call].add(std::max<std::int64_t>(0, now() - begun), bounds_);
    }
    /// Sets all counts to 0.
    void reset() noexcept {
        for (LatencyHistogram& each : calls_) each.reset();
    }

    [[nodiscard]] const LatencyHistogram& of(Call call) const noexcept { return calls_[call]; }
    /// Total duration of all calls of a kind.
    [[nodiscard]] double seconds(Call call) const noexcept {
        return static_cast<double>(calls_[call].ticks()) * seconds_per_tick_;
    }

   private:
    [[nodiscard]] std::int64_t now() const noexcept;

    std::int64_t num_users_ = 0;
    bool uses_counter_ = false;
    double seconds_per_tick_ = 0.0;
    std::array<std::int64_t, LatencyHistogram::kBounds.size()> bounds_{};  // in ticks
    std::array<LatencyHistogram, kNumCalls> calls_;
};

}  // namespace kvcore
