// SPDX-License-Identifier: Apache-2.0
// What caches count: pages and tokens, tenants, groups of layers, states, and the time of calls.
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

/// Pages of one group of layers in one replica at this moment.
struct GroupStats {
    std::int64_t held_pages = 0;    // that requests, pins and copies read
    std::int64_t cached_pages = 0;  // that the prefix tree has
    std::int64_t holes = 0;         // that the tree lacks for tokens that it has
    std::int64_t given_back = 0;    // since construction or the last reset: behind windows
    std::int64_t filled = 0;        // since then: holes of the tree that have pages again
    std::int64_t stored_pages = 0;  // since then: copied to the host tier
    std::int64_t loaded_pages = 0;  // since then: copied back

    /// Adds another replica's.
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

/// What one tenant holds in one replica at this moment.
struct TenantStats {
    std::int64_t held_pages = 0;
    std::int64_t reserved_pages = 0;
    std::int64_t max_pages = TenantQuota::kNoCeiling;
    std::int64_t refused = 0;  // reservations of its requests that quotas alone were in the way of
    std::int64_t input_tokens = 0;  // of its requests, as of Metrics
    std::int64_t cache_tokens = 0;
    std::int64_t generated_tokens = 0;
};

/// How many calls took how long.
///
/// Owns: a count per bucket. Threads: none of its own. Cost: O(1).
class LatencyHistogram {
   public:
    /// Upper bounds in nanoseconds, each included: 1, 2 and 5 of every power of ten, 1 us to 1 s.
    static constexpr std::array<std::int64_t, 19> kBounds = {
        1'000,      2'000,       5'000,       10'000,      20'000,       50'000,     100'000,
        200'000,    500'000,     1'000'000,   2'000'000,   5'000'000,    10'000'000, 20'000'000,
        50'000'000, 100'000'000, 200'000'000, 500'000'000, 1'000'000'000};
    /// By bucket, each without those below it; what took longer than the last bound comes last.
    using Counts = std::array<std::int64_t, kBounds.size() + 1>;

    /// Seconds that calls of a bucket took at most; infinity for the last one.
    [[nodiscard]] static double bound(std::size_t bucket) noexcept {
        return bucket < kBounds.size() ? static_cast<double>(kBounds[bucket]) / 1e9
                                       : std::numeric_limits<double>::infinity();
    }
    /// A call took that many ticks, of which `bounds` are those of the buckets.
    void add(std::int64_t ticks, const std::array<std::int64_t, kBounds.size()>& bounds) noexcept {
        std::size_t bucket = 0;
        while (bucket < bounds.size() && ticks > bounds[bucket]) ++bucket;
        ++counts_[bucket];
        ticks_ += ticks;
    }
    void reset() noexcept { *this = {}; }

    [[nodiscard]] const Counts& counts() const noexcept { return counts_; }
    /// Of all calls together.
    [[nodiscard]] std::int64_t ticks() const noexcept { return ticks_; }

   private:
    Counts counts_{};
    std::int64_t ticks_ = 0;
};

/// How long the calls of a manager took, while anybody wants to know.
///
/// A call begins with `begin`, and counts once `end` is told what that returned; one that throws in
/// between does not. Times are those of a counter of the processor, where it has one that runs at
/// one rate; else those of the steady clock, which can take ten times as long to read.
///
/// Owns: a histogram for each kind of call. Threads: none of its own. Cost: a comparison while
/// nobody wants to know; else two reads of the counter, about 10 ns each.
class CallTimes {
   public:
    enum Call : std::size_t { kReserve, kReserveBatch, kFetch, kStep, kNumCalls };

    /// Seconds from one count to the next, measured for two milliseconds.
    [[nodiscard]] static double measure_tick() noexcept;
    /// Somebody wants to know from now on. The first one says how long a tick takes, as measured.
    void start(double seconds_per_tick) noexcept;
    /// The same one does not any more. What is counted stays.
    void stop() noexcept { num_users_ -= num_users_ > 0 ? 1 : 0; }
    [[nodiscard]] bool is_on() const noexcept { return num_users_ > 0; }

    /// 0 while nobody wants to know.
    [[nodiscard]] std::int64_t begin() const noexcept { return is_on() ? now() : 0; }
    void end(Call call, std::int64_t begun) noexcept {
        if (begun != 0) calls_[call].add(std::max<std::int64_t>(0, now() - begun), bounds_);
    }
    /// Counts from 0 again.
    void reset() noexcept {
        for (LatencyHistogram& each : calls_) each.reset();
    }

    [[nodiscard]] const LatencyHistogram& of(Call call) const noexcept { return calls_[call]; }
    /// That all calls of a kind took together.
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
