// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/eviction.hpp"
#include "support/memory.hpp"
#include "tree/policies/ghosts.hpp"
#include "tree/policies/rings.hpp"

namespace kvcore {

/// Adaptive replacement (ARC, Megiddo and Modha): runs used once and runs used again, each by
/// recency. The runs used once may have a share of the pages. The policy remembers evicted runs as
/// ghosts. If a run used once comes back, its share was too small and grows; if a run used again
/// comes back, the share was too large and shrinks.
///
/// The size of the cache is the number of pages in the tree. A ghost is a run, by the fingerprint
/// of its first page.
///
/// Owns: the data of each run, two rings of candidates and the ghosts.
/// Invariant: `pages_` counts the pages of all runs of each kind, candidates or not; the share is
/// at most their sum.
/// Cost: O(1) per verb.
class ArcPolicy final : public EvictionPolicy {
   public:
    [[nodiscard]] PolicyInterest interest() const noexcept override {
        PolicyInterest interest;
        interest.growth = interest.sizes = interest.fingerprints = true;
        return interest;
    }
    void make_room(NodeId last) override;
    void insert(NodeId node, std::int32_t depth, std::int32_t pages,
                std::int32_t priority) noexcept override;
    void hit(NodeId node) noexcept override;
    void release(NodeId node, std::uint64_t time) noexcept override;
    void split(NodeId upper, NodeId lower) noexcept override;
    void erase(NodeId node) noexcept override;
    void resize(NodeId node, std::int32_t depth, std::int32_t pages) noexcept override;
    void identify(NodeId node, std::uint64_t fingerprint) noexcept override;
    [[nodiscard]] bool joins(NodeId node, const Retention&) const noexcept override {
        return !runs_[node].is_reused;
    }
    void offer(NodeId node) noexcept override { rings_.push_front(runs_[node].is_reused, node); }
    void withdraw(NodeId node) noexcept override { rings_.erase(node); }
    [[nodiscard]] NodeId victim() noexcept override;
    [[nodiscard]] std::size_t upcoming(NodeId* out, std::size_t n) const noexcept override;

   private:
    struct Run {
        std::uint64_t fingerprint = 0;
        std::int32_t pages = 0;
        bool is_reused = false;
        bool is_new = false;  // its fingerprint is not set yet
    };

    [[nodiscard]] bool takes_reused() const noexcept;
    void set_reused(Run& run) noexcept;
    void adapt(bool to_reused, std::int64_t pages) noexcept;

    GrowingArray<Run> runs_;
    Rings rings_;
    Ghosts ghosts_;
    std::int64_t pages_[2] = {0, 0};  // of runs used once, of runs used again
    std::int64_t share_ = 0;          // of pages, for runs used once
};

}  // namespace kvcore
