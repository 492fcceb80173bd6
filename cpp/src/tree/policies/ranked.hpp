// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/eviction.hpp"
#include "support/memory.hpp"
#include "tree/indexed_heap.hpp"

namespace kvcore {

/// Two numbers, compared by `worth` first.
struct RankPair {
    std::uint64_t worth = 0;
    std::uint64_t time = 0;

    friend bool operator<(const RankPair& a, const RankPair& b) noexcept {
        return a.worth != b.worth ? a.worth < b.worth : a.time < b.time;
    }
};

/// A policy that gives each run a rank and evicts the lowest rank: all policies except LRU and ARC.
///
/// `Rank` is the rule of a policy and the data that it keeps for a run:
///     Key, Run                  the rank, and the data of a run
///     interest()                the calls that the policy needs
///     entered(run, depth)       the first use of a run
///     used(run)                 a later use
///     released(run, time)       a user released it
///     resized(run, depth)       it has a new end
///     joins(run)                true if pages at their first use are worth the same
///     key(run)                  the rank of a run
///
/// Owns: a Run for each node id, and the candidates in the order of their ranks.
/// Invariant: a candidate is in the heap under key(its run).
/// Cost: O(log candidates) per verb.
template <class Rank>
class RankedPolicy : public EvictionPolicy {
   public:
    using Run = typename Rank::Run;

    explicit RankedPolicy(Rank rank = {}) noexcept : rank_(rank) {}

    [[nodiscard]] PolicyInterest interest() const noexcept override { return Rank::interest(); }
    void make_room(NodeId last) override {
        runs_.make_room(last, Run{});
        order_.make_room(last);
    }
    void insert(NodeId node, std::int32_t depth, std::int32_t, std::int32_t) noexcept override {
        rank_.entered(runs_[node], depth);
    }
    void hit(NodeId node) noexcept override {
        rank_.used(runs_[node]);
        move(node);
    }
    void release(NodeId node, std::uint64_t time) noexcept override {
        rank_.released(runs_[node], time);
        offer(node);
    }
    void pass(NodeId node, std::uint64_t time) noexcept override {
        rank_.released(runs_[node], time);
        move(node);
    }
    void resize(NodeId node, std::int32_t depth, std::int32_t) noexcept override {
        rank_.resized(runs_[node], depth);
        move(node);
    }
    [[nodiscard]] bool joins(NodeId node, const Retention&) const noexcept override {
        return rank_.joins(runs_[node]);
    }
    void split(NodeId upper, NodeId lower) noexcept override { runs_[upper] = runs_[lower]; }
    void erase(NodeId node) noexcept override { order_.erase(node); }
    void offer(NodeId node) noexcept override { order_.put(node, rank_.key(runs_[node])); }
    void withdraw(NodeId node) noexcept override { order_.erase(node); }
    [[nodiscard]] NodeId victim() noexcept override { return order_.first(); }
    [[nodiscard]] std::size_t upcoming(NodeId* out, std::size_t n) const noexcept override {
        return order_.upcoming(out, n);
    }

   protected:
    /// Moves a run to its new place in the heap, if it is a candidate.
    void move(NodeId node) noexcept {
        if (order_.contains(node)) offer(node);
    }

    Rank rank_;
    GrowingArray<Run> runs_;
    IndexedHeap<typename Rank::Key> order_;
};

}  // namespace kvcore
