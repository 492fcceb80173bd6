// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "tree/policies/ranked.hpp"

namespace kvcore {

/// The data from which the worth of a run's last page is computed: the prefill time that it saves.
struct CostRun {
    std::uint64_t floor = 0;  // of the policy at the last use
    std::uint64_t time = 0;   // of the last release
    std::uint64_t uses = 0;
    std::int32_t depth = 0;
};

/// The prefill time of a page is a constant plus the time of its attention, which is proportional
/// to the number of pages before it: for a whole prefix it grows with the square of the depth. The
/// unit is the attention time of a page for one page before it.
class CostRank {
   public:
    using Key = RankPair;
    using Run = CostRun;

    /// `attention_pages`: the number of earlier pages for which the attention of a page takes as
    /// long as all its other work.
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
    /// Raises the floor to the worth of an evicted page.
    void evicted(const Key& key) noexcept { floor_ = std::max(floor_, key.worth); }

   private:
    // More uses do not predict the next use, and the floor must not overflow 64 bits.
    static constexpr std::uint64_t kMostUses = 1023;

    std::uint64_t fixed_;
    std::uint64_t floor_ = 0;
};

/// Evicts the run with the least prefill time saved per byte: uses times the time of a page. The
/// worth of an evicted page becomes the floor for runs used later, so that no run stays because of
/// old uses (greedy dual size with frequency, GDSF). In a run each page is worth more than the page
/// before it, and the last page is evicted first. The worth of a run is the worth of its last page.
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
    // Only the first run is evicted for its worth; other runs are removed because nothing can use
    // them.
    void forget(NodeId node) noexcept {
        if (order_.first() == node) rank_.evicted(order_.key(node));
    }
};

}  // namespace kvcore
