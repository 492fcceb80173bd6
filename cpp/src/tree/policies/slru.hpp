// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "tree/policies/ranked.hpp"

namespace kvcore {

/// Segmented LRU: runs used once are evicted before runs used again, each by recency. So prompts
/// that never come back do not evict prompts that do. No run falls back to the first segment.
struct SlruRank {
    using Key = std::uint64_t;
    using Run = std::uint64_t;  // time of the last release, with the top bit set after a second use
    static constexpr std::uint64_t kProtected = std::uint64_t{1} << 63;

    static PolicyInterest interest() noexcept {
        PolicyInterest interest;
        interest.recency = interest.growth = true;
        return interest;
    }
    static void entered(Run& run, std::int32_t) noexcept { run = 0; }
    static void used(Run& run) noexcept { run |= kProtected; }
    static void released(Run& run, std::uint64_t time) noexcept { run = (run & kProtected) | time; }
    static void resized(Run&, std::int32_t) noexcept {}
    static bool joins(Run run) noexcept { return (run & kProtected) == 0; }
    static Key key(Run run) noexcept { return run; }
};

using SlruPolicy = RankedPolicy<SlruRank>;

}  // namespace kvcore
