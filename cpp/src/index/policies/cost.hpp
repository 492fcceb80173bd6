// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "index/policies/ranked.hpp"

namespace kvcore {

/// What a run is worth by the time that it saves.
struct CostRun {
    std::uint64_t floor = 0;  // of the policy when it was used last
    std::uint64_t time = 0;
    std::uint64_t uses = 0;
    std::uint64_t per_page = 0;  // prefill time of a page of it, on average
};

/// The time of a page is the same wherever it is, plus attention, which goes with the pages in
/// front of it: of a whole prefix it grows with the square of its depth. Counted in half of the
/// time that attention spends on one page in front, so that the mean of a run is a whole number.
class CostRank {
   public:
    using Key = RankPair;
    using Run = CostRun;
    static constexpr bool kHits = true;

    /// `attention_pages`: in front of a page for which attention takes as long as all else.
    explicit CostRank(std::uint64_t attention_pages) noexcept : fixed_(2 * attention_pages) {}

    void entered(Run& run, std::int32_t depth, std::int32_t pages, std::int32_t,
                 std::uint64_t time) const noexcept {
        run = {floor_, time, 1, per_page(depth, pages)};
    }
    void used(Run& run, std::uint64_t time) const noexcept {
        run = {floor_, time, std::min(run.uses + 1, kMostUses), run.per_page};
    }
    static void released(Run& run, std::uint64_t time) noexcept { run.time = time; }
    static Key key(const Run& run) noexcept {
        return {run.floor + run.uses * run.per_page, run.time};
    }
    void resized(Run& run, std::int32_t depth, std::int32_t pages) const noexcept {
        run.per_page = per_page(depth, pages);
    }
    /// A candidate went.
    void evicted(const Key& key) noexcept { floor_ = std::max(floor_, key.worth); }

   private:
    // More say nothing about the next one, and the floor must not run through 64 bits.
    static constexpr std::uint64_t kMostUses = 1023;

    [[nodiscard]] std::uint64_t per_page(std::int32_t depth, std::int32_t pages) const noexcept {
        return fixed_ + static_cast<std::uint64_t>(2 * std::int64_t{depth} - pages + 1);
    }

    std::uint64_t fixed_;
    std::uint64_t floor_ = 0;
};

/// Least prefill time saved per byte first: uses times the time of a page. What went sets the
/// floor from which runs used later are counted, so that no run stays for what it once was worth
/// (greedy dual size with frequency, GDSF).
class CostPolicy final : public RankedPolicy<CostRank> {
   public:
    using RankedPolicy::RankedPolicy;

    [[nodiscard]] PolicyInterest interest() const noexcept override {
        PolicyInterest interest;
        interest.sizes = true;
        return interest;
    }
    void resize(NodeId node, std::int32_t depth, std::int32_t pages) noexcept override {
        rank_.resized(runs_[node], depth, pages);
        move(node);
    }
    void erase(NodeId node) noexcept override {
        if (order_.contains(node)) rank_.evicted(order_.key(node));
        RankedPolicy::erase(node);
    }
};

}  // namespace kvcore
