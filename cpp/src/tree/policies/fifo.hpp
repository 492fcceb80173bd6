// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "tree/policies/ranked.hpp"

namespace kvcore {

/// The time at which the last page of a run entered, and the depth of the run.
struct FifoRun {
    std::uint64_t time = 0;
    std::int32_t depth = 0;
};

/// First in, first out; uses change nothing. A run that grows is as old as its last page, which is
/// evicted first. The pages before it are older than all other runs at that time, and follow
/// directly.
class FifoRank {
   public:
    using Key = std::uint64_t;
    using Run = FifoRun;

    static PolicyInterest interest() noexcept {
        PolicyInterest interest;
        interest.hits = false;
        interest.sizes = true;
        return interest;
    }
    void entered(Run& run, std::int32_t depth) noexcept { run = {++time_, depth}; }
    static void used(Run&) noexcept {}
    static void released(Run&, std::uint64_t) noexcept {}
    void resized(Run& run, std::int32_t depth) noexcept {
        if (depth > run.depth) run.time = ++time_;
        run.depth = depth;
    }
    static bool joins(const Run&) noexcept { return true; }
    static Key key(const Run& run) noexcept { return run.time; }

   private:
    std::uint64_t time_ = 0;
};

using FifoPolicy = RankedPolicy<FifoRank>;

}  // namespace kvcore
