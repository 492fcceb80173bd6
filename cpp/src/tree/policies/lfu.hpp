// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "tree/policies/ranked.hpp"

namespace kvcore {

/// Fewest uses first, then least recently released.
struct LfuRank {
    using Key = RankPair;
    using Run = RankPair;  // worth: uses

    static PolicyInterest interest() noexcept {
        PolicyInterest interest;
        interest.recency = interest.growth = true;
        return interest;
    }
    static void entered(Run& run, std::int32_t) noexcept { run = {1, 0}; }
    static void used(Run& run) noexcept { ++run.worth; }
    static void released(Run& run, std::uint64_t time) noexcept { run.time = time; }
    static void resized(Run&, std::int32_t) noexcept {}
    static bool joins(const Run& run) noexcept { return run.worth == 1; }
    static Key key(const Run& run) noexcept { return run; }
};

using LfuPolicy = RankedPolicy<LfuRank>;

}  // namespace kvcore
