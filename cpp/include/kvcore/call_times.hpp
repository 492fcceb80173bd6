// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace kvcore {

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
