// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "index/policies/ranked.hpp"

namespace kvcore {

/// Fewest uses first, then least recently used.
struct LfuRank {
    using Key = RankPair;
    using Run = RankPair;  // worth: uses
    static constexpr bool kHits = true;

    static void entered(Run& run, std::int32_t, std::int32_t, std::int32_t,
                        std::uint64_t time) noexcept {
        run = {1, time};
    }
    static void used(Run& run, std::uint64_t time) noexcept { run = {run.worth + 1, time}; }
    static void released(Run& run, std::uint64_t time) noexcept { run.time = time; }
    static Key key(const Run& run) noexcept { return run; }
};

using LfuPolicy = RankedPolicy<LfuRank>;

}  // namespace kvcore
