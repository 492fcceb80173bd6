// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kvcore/eviction.hpp"
#include "kvcore/prefix_tree.hpp"
#include "layers/run_marks.hpp"
#include "layers/unreachable_tails.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {

/// Wraps an eviction policy if not all layers keep every token: orders kept windows among the runs
/// of a tree.
///
/// Window pages that left a prefix together, and serve the next turn together, are a *departure*.
/// For the wrapped policy a departure is a run: it was cut off the run that the prefix ends in, has
/// the same value, and was released when the pages left. Later uses and priorities of that run also
/// apply to the departure, but not the time of its release. So a policy needs no code for windows:
///     lru        compares windows and runs by the times of their release
///     others     keep the windows of a run as long as its pages, and evict the windows
///                first among runs of equal value
///
/// UnreachableTails also gets each event of a run. Useless runs are evicted before the victims of
/// the policy: ColumnPages names a useless run with `aim`.
///
/// Owns: the wrapped policy, a record per node id of the tree and a record per departure; each
/// record has an id of the wrapped policy.
/// Threads: no locks of its own. Cost: that of the wrapped policy, for a run times the departures
/// that end in it; only the methods that make room allocate.
class WindowPolicy final : public EvictionPolicy {
   public:
    /// The number of a departure; 0: no departure.
    using Departure = std::uint32_t;

    /// `num_checkpoints`: the largest number of checkpoints, if layers keep a state.
    explicit WindowPolicy(std::unique_ptr<EvictionPolicy> policy, std::size_t num_checkpoints = 0)
        : policy_(std::move(policy)),
          interest_(policy_->interest()),
          has_states_(num_checkpoints > 0) {
        unreachable_.make_room_for_checkpoints(num_checkpoints);
    }

    /// True if the wrapped policy uses only releases. It orders by time, so all pages that left
    /// together are evicted together, wherever their prefixes end.
    [[nodiscard]] bool goes_by_time() const noexcept {
        const PolicyInterest& i = interest_;
        return !(i.hits || i.recency || i.growth || i.sizes || i.retention || i.fingerprints);
    }
    /// Makes room for `n` departures at a time. Throws std::bad_alloc.
    void make_room_for_departures(std::size_t n);
    /// The departures that exist, and the number of departures that can still begin.
    [[nodiscard]] std::size_t num_departures() const noexcept {
        return departures_.size() - 1 - num_free_;
    }
    [[nodiscard]] std::size_t num_free_departures() const noexcept { return num_free_; }
    /// Begins a departure: windows of a prefix that ends at `end` are left now. Returns the same
    /// departure for the same end and `moment`, a number that grows; 0 if there is no room. The
    /// policy does not order spare departures: they wait in their own queue.
    [[nodiscard]] Departure begin(TreePosition end, std::uint32_t moment, bool is_spare) noexcept;
    /// The departure has no pages any more.
    void end(Departure departure) noexcept;
    /// The end of a departure, in the part of its path that is still in the tree; no node if no
    /// part is left.
    [[nodiscard]] TreePosition end_of(Departure departure) const noexcept {
        return ends_.at(departure);
    }
    /// The next victim of `tree`, which uses this policy, if that is a departure; 0 if it is a run,
    /// or if nothing can be evicted.
    [[nodiscard]] Departure next(PrefixTree& tree) noexcept;
    /// For use when no run can be evicted: the first departure that `victim` set aside to find a
    /// run; 0: no departure.
    [[nodiscard]] Departure first_aside() const noexcept { return aside_.bottom; }
    /// The oldest spare departure; 0: no departure.
    [[nodiscard]] Departure first_spare() const noexcept { return spare_.bottom; }

    [[nodiscard]] UnreachableTails& unreachable() noexcept { return unreachable_; }
    /// Makes this run the next victim; kNoNode: the policy chooses. The run must be evictable.
    void aim(NodeId run) noexcept { aim_ = run; }

    [[nodiscard]] PolicyInterest interest() const noexcept override {
        PolicyInterest interest = interest_;
        interest.hits = interest.sizes = interest.recency = true;
        interest.exposure = has_states_;
        return interest;
    }
    void make_room(NodeId last) override;
    void insert(NodeId node, std::int32_t depth, std::int32_t pages,
                std::int32_t priority) noexcept override {
        runs_[node].is_candidate = false;
        policy_->insert(id(node), depth, pages, priority);
    }
    void hit(NodeId node) noexcept override;
    void release(NodeId node, std::uint64_t) noexcept override {
        runs_[node].is_candidate = true;
        policy_->release(id(node), ++clock_);
    }
    /// Useless runs are evicted out of turn, so the run before a useless run is not the next
    /// victim. If the wrapped policy does not use `pass`, every run of a released prefix counts as
    /// released.
    void pass(NodeId node, std::uint64_t time) noexcept override {
        if (!interest_.recency) return release(node, time);
        policy_->pass(id(node), clock_);
    }
    void split(NodeId upper, NodeId lower) noexcept override {
        runs_[upper].is_candidate = false;
        policy_->split(id(upper), id(lower));
        cut_ = lower;
    }
    void erase(NodeId node) noexcept override;
    void resize(NodeId node, std::int32_t depth, std::int32_t pages) noexcept override;
    void identify(NodeId node, std::uint64_t fingerprint) noexcept override {
        policy_->identify(id(node), fingerprint);
    }
    void retain(NodeId node, const Retention& retention) noexcept override;
    [[nodiscard]] Retention retention(NodeId node) const noexcept override {
        return policy_->retention(id(node));
    }
    [[nodiscard]] bool joins(NodeId node, const Retention& retention) const noexcept override {
        return policy_->joins(id(node), retention);
    }
    void expect(NodeId node, std::int64_t returns, bool is_shared) noexcept override;
    void advance(std::int64_t now) noexcept override { policy_->advance(now); }
    void expose(NodeId node) noexcept override { unreachable_.suspect(node); }
    void offer(NodeId node) noexcept override {
        if (!std::exchange(runs_[node].is_candidate, true)) policy_->offer(id(node));
    }
    void withdraw(NodeId node) noexcept override {
        runs_[node].is_candidate = false;
        unreachable_.pardon(node);
        policy_->withdraw(id(node));
    }
    /// The next run, even if departures come before it.
    [[nodiscard]] NodeId victim() noexcept override;
    [[nodiscard]] std::size_t upcoming(NodeId* out, std::size_t n) const noexcept override;

   private:
    struct Owner {
        std::uint32_t number = 0;  // a node id or a departure
        bool is_run = true;
    };
    struct Run {
        NodeId id = 0;              // of the wrapped policy
        bool is_candidate = false;  // of the policy; the tree may have later runs
    };
    enum class Place : std::uint8_t { kOrdered, kAside, kSpare };
    struct Left {
        NodeId id = 0;
        std::uint32_t moment = 0;
        Departure next_free = 0;
        Departure below = 0;  // in its pile
        Departure above = 0;
        Place place = Place::kOrdered;  // ordered by the policy, or in a pile
    };
    struct Pile {
        Departure bottom = 0;  // came first
        Departure top = 0;     // came last
    };

    [[nodiscard]] NodeId id(NodeId node) const noexcept { return runs_[node].id; }
    [[nodiscard]] NodeId take_id(Owner owner);
    void recycle(Departure departure) noexcept;
    void put_on(Pile& pile, Departure departure, Place place) noexcept;
    void take_off(Pile& pile, Departure departure) noexcept;
    void put_back() noexcept;

    std::unique_ptr<EvictionPolicy> policy_;
    PolicyInterest interest_;    // of the wrapped policy
    std::vector<Owner> owners_;  // by id of the wrapped policy
    std::vector<Run> runs_;
    std::vector<Left> departures_ = std::vector<Left>(1);
    RunMarks ends_;  // the ends of departures
    UnreachableTails unreachable_;
    std::uint64_t clock_ = 0;
    NodeId cut_ = kNoNode;  // the lower half of a run that is being cut
    NodeId aim_ = kNoNode;
    Departure free_ = 0;
    std::size_t num_free_ = 0;
    Pile aside_;          // departures that came before a wanted run
    Pile spare_;          // spare departures
    bool stops_ = false;  // `victim` stops at a departure
    bool has_states_;
};

}  // namespace kvcore
