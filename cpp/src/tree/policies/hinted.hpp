// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "tree/policies/ending.hpp"

namespace kvcore {

/// `returns` is the time when the sessions of a run return, or one of ReturnTime.
struct HintedRun {
    std::uint64_t time = 0;
    std::int64_t returns = ReturnTime::kUnknown;
};

struct HintedRank {
    using Key = RankPair;
    using Run = HintedRun;

    static constexpr std::int64_t kNoEnding = ReturnTime::kUnknown;

    explicit HintedRank(std::int64_t time) noexcept : grace(time) {}

    static PolicyInterest interest() noexcept {
        PolicyInterest interest;
        interest.hits = false;
        interest.recency = interest.growth = interest.retention = interest.returns = true;
        return interest;
    }
    static void entered(Run& run, std::int32_t) noexcept { run = {}; }
    static void used(Run&) noexcept {}
    static void released(Run& run, std::uint64_t time) noexcept { run.time = time; }
    static void resized(Run&, std::int32_t) noexcept {}
    static bool joins(const Run&) noexcept { return true; }
    // kNever has worth 0, kUnknown 1, and a time the more the earlier it is. The difference of two
    // unsigned numbers is also right for times below 0.
    static Key key(const Run& run) noexcept {
        return {static_cast<std::uint64_t>(ReturnTime::kNever) -
                    static_cast<std::uint64_t>(run.returns),
                run.time};
    }
    static std::int64_t ending(const Run& run) noexcept { return std::min(run.returns, kNoEnding); }
    [[nodiscard]] bool is_over(std::int64_t time, std::int64_t now) const noexcept {
        constexpr std::int64_t kFirst = std::numeric_limits<std::int64_t>::min();
        return now >= kFirst + grace && time < now - grace;
    }
    static void end(Run& run) noexcept { run.returns = ReturnTime::kUnknown; }

    std::int64_t grace;
};

/// Evicts runs whose sessions never return, next runs without a hint, and last the runs whose
/// sessions return, the farthest return first; equal runs least recently released first. When the
/// return time of a run is over by more than the grace, the run has no hint any more.
///
/// A hint lasts until the next release of the run, which is the return that it announced: a release
/// without a hint leaves the run without a hint. If other runs continue the run, it is shared: a
/// shared run keeps the earliest return of its sessions, and is never "never" while a session gave
/// no such hint.
class HintedPolicy final : public EndingPolicy<HintedRank> {
   public:
    explicit HintedPolicy(std::int64_t grace) noexcept : EndingPolicy(HintedRank(grace)) {}

    void retain(NodeId node, const Retention& asked) noexcept override;
    [[nodiscard]] Retention retention(NodeId node) const noexcept override {
        return {kDefaultPriority, Retention::kForever, runs_[node].returns};
    }
    [[nodiscard]] bool joins(NodeId node, const Retention& asked) const noexcept override {
        return runs_[node].returns == at_present(asked.returns);
    }
    void expect(NodeId node, std::int64_t returns, bool is_shared) noexcept override;

   private:
    // Returns kUnknown for a return time that is over by more than the grace.
    [[nodiscard]] std::int64_t at_present(std::int64_t returns) const noexcept {
        return is_over(returns) ? ReturnTime::kUnknown : returns;
    }
    void set(NodeId node, std::int64_t returns) noexcept;
};

}  // namespace kvcore
