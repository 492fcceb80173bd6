// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "index/policies/ranked.hpp"

namespace kvcore {

/// Segmented LRU: what was used once goes before what was used again, each by recency. So prompts
/// that never come back do not drive out those that do. No run falls back to the first segment.
struct SlruRank {
    using Key = std::uint64_t;
    using Run = std::uint64_t;  // time, with the top bit where it was used again
    static constexpr bool kHits = true;
    static constexpr std::uint64_t kProtected = std::uint64_t{1} << 63;

    static void entered(Run& run, std::int32_t, std::int32_t, std::int32_t,
                        std::uint64_t time) noexcept {
        run = time;
    }
    static void used(Run& run, std::uint64_t time) noexcept { run = kProtected | time; }
    static void released(Run& run, std::uint64_t time) noexcept { run = (run & kProtected) | time; }
    static Key key(Run run) noexcept { return run; }
};

using SlruPolicy = RankedPolicy<SlruRank>;

}  // namespace kvcore
