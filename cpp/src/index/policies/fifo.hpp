// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "index/policies/ranked.hpp"

namespace kvcore {

/// First in, first out; uses change nothing. A run that grows in place keeps its age.
struct FifoRank {
    using Key = std::uint64_t;
    using Run = std::uint64_t;  // when it entered
    static constexpr bool kHits = false;

    static void entered(Run& run, std::int32_t, std::int32_t, std::int32_t,
                        std::uint64_t time) noexcept {
        run = time;
    }
    static void used(Run&, std::uint64_t) noexcept {}
    static void released(Run&, std::uint64_t) noexcept {}
    static Key key(Run run) noexcept { return run; }
};

using FifoPolicy = RankedPolicy<FifoRank>;

}  // namespace kvcore
