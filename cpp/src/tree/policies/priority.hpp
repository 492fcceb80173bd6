// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "tree/policies/ending.hpp"

namespace kvcore {

/// The priorities that the users of a run requested: the highest priority with its end, and the
/// highest priority that lasts for ever.
struct PriorityRun {
    std::uint64_t time = 0;
    Retention highest;
    std::int32_t lasting = 0;
};

struct PriorityRank {
    using Key = RankPair;
    using Run = PriorityRun;

    static constexpr std::int64_t kNoEnding = Retention::kForever;

    static PolicyInterest interest() noexcept {
        PolicyInterest interest;
        interest.hits = false;
        interest.recency = interest.growth = interest.retention = true;
        return interest;
    }
    // `retain` sets the priority.
    static void entered(Run& run, std::int32_t) noexcept { run = {0, Retention(0), 0}; }
    static void used(Run&) noexcept {}
    static void released(Run& run, std::uint64_t time) noexcept { run.time = time; }
    static void resized(Run&, std::int32_t) noexcept {}
    static bool joins(const Run&) noexcept { return true; }
    static Key key(const Run& run) noexcept {
        return {static_cast<std::uint64_t>(run.highest.priority), run.time};
    }
    static std::int64_t ending(const Run& run) noexcept { return run.highest.until; }
    static bool is_over(std::int64_t time, std::int64_t now) noexcept { return time <= now; }
    static void end(Run& run) noexcept { run.highest = {run.lasting, Retention::kForever}; }
};

/// Lowest priority first, then least recently released. When the highest priority of a run ends,
/// the run gets its highest priority that lasts for ever, or 0. It stays cached until it is the
/// victim.
class PriorityPolicy final : public EndingPolicy<PriorityRank> {
   public:
    void retain(NodeId node, const Retention& asked) noexcept override;
    [[nodiscard]] Retention retention(NodeId node) const noexcept override {
        return runs_[node].highest;
    }
    [[nodiscard]] bool joins(NodeId node, const Retention& asked) const noexcept override;

   private:
    // Returns priority 0 for a retention that has already ended.
    [[nodiscard]] Retention at_present(const Retention& asked) const noexcept {
        return is_over(asked.until) ? Retention(0) : asked;
    }
};

}  // namespace kvcore
