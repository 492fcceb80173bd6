// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "tree/policies/ranked.hpp"

namespace kvcore {

/// What the last page of a run is worth by the time that it saves.
struct CostRun {
    std::uint64_t floor = 0;  // of the policy when it was used last
    std::uint64_t time = 0;   // of the last release
    std::uint64_t uses = 0;
    std::int32_t depth = 0;
};

/// The time of a page is the same wherever it is, plus attention, which goes with the pages in
/// front of it: of a whole prefix it grows with the square of its depth. Counted in what attention
/// spends on one page in front.
class CostRank {
   public:
    using Key = RankPair;
    using Run = CostRun;

    /// `attention_pages`: in front of a page for which attention takes as long as all else.
    explicit CostRank(std::uint64_t attention_pages) noexcept : fixed_(attention_pages) {}

    static PolicyInterest interest() noexcept {
        PolicyInterest interest;
        interest.recency = interest.growth = interest.sizes = true;
        return interest;
    }
    void entered(Run& run, std::int32_t depth) const noexcept { run = {floor_, 0, 1, depth}; }
    void used(Run& run) const noexcept {
        run.floor = floor_;
        run.uses = std::min(run.uses + 1, kMostUses);
    }
    static void released(Run& run, std::uint64_t time) noexcept { run.time = time; }
    static void resized(Run& run, std::int32_t depth) noexcept { run.depth = depth; }
    [[nodiscard]] bool joins(const Run& run) const noexcept {
        return run.uses == 1 && run.floor == floor_;
    }
    [[nodiscard]] Key key(const Run& run) const noexcept {
        const std::uint64_t page = fixed_ + static_cast<std::uint64_t>(run.depth);
        return {run.floor + run.uses * page, run.time};
    }
    /// A page of that worth went.
    void evicted(const Key& key) noexcept { floor_ = std::max(floor_, key.worth); }

   private:
    // More say nothing about the next one, and the floor must not run through 64 bits.
    static constexpr std::uint64_t kMostUses = 1023;

    std::uint64_t fixed_;
    std::uint64_t floor_ = 0;
};

/// Least prefill time saved per byte first: uses times the time of a page. What went sets the
/// floor from which runs used later are counted, so that no run stays for what it once was worth
/// (greedy dual size with frequency, GDSF). A page of a run is worth more than the page in front of
/// it, and the last page goes first: so the worth of the last page is that of the run.
class CostPolicy final : public RankedPolicy<CostRank> {
   public:
    using RankedPolicy::RankedPolicy;

    void resize(NodeId node, std::int32_t depth, std::int32_t pages) noexcept override {
        if (depth < runs_[node].depth) forget(node);
        RankedPolicy::resize(node, depth, pages);
    }
    void erase(NodeId node) noexcept override {
        forget(node);
        RankedPolicy::erase(node);
    }

   private:
    // Only the first one goes for what it is worth; others do since they serve nothing any more.
    void forget(NodeId node) noexcept {
        if (order_.first() == node) rank_.evicted(order_.key(node));
    }
};

}  // namespace kvcore
