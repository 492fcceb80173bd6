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
#include "layers/useless_runs.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {

/// Another policy, where layers do not all keep everything: it orders windows that are kept among
/// the runs of a tree.
///
/// What left a prefix together, and serves the next turn there together, is a *departure*. To the
/// policy it is a run of its own: cut off the one that the prefix ends in, so worth as much, and
/// released when it left. From then on what happens to that run, uses and priorities, happens to
/// it too, but for the time of its release. So a policy need not know of windows, and
///     lru        compares by when they were let go of
///     others     keep the windows of a run as long as its pages, and of runs worth the same let
///                windows go first
///
/// UselessRuns gets each event of a run as well. Useless runs go before the victims of the policy:
/// ColumnPages names such a run with `aim`.
///
/// Owns: the policy, a record per node id of the tree and one per departure, each of which has an
/// id of the policy's.
/// Threads: none of its own. Cost: that of the policy, for a run times the departures that end in
/// it; `make_room` alone asks for memory.
class WindowPolicy final : public EvictionPolicy {
   public:
    /// A departure; 0 is none.
    using Departure = std::uint32_t;

    /// `num_checkpoints`: so many can be, where layers keep a state.
    explicit WindowPolicy(std::unique_ptr<EvictionPolicy> policy, std::size_t num_checkpoints = 0)
        : policy_(std::move(policy)),
          interest_(policy_->interest()),
          has_states_(num_checkpoints > 0) {
        useless_.make_room_for_checkpoints(num_checkpoints);
    }

    /// It wants to hear of nothing but releases: by time alone everything that left together goes
    /// together, wherever its prefixes end.
    [[nodiscard]] bool goes_by_time() const noexcept {
        const PolicyInterest& i = interest_;
        return !(i.hits || i.recency || i.growth || i.sizes || i.retention || i.fingerprints);
    }
    /// So many departures at a time can be. Throws std::bad_alloc.
    void make_room_for_departures(std::size_t n);
    /// Those that are, and how many more can be.
    [[nodiscard]] std::size_t num_departures() const noexcept {
        return departures_.size() - 1 - num_free_;
    }
    [[nodiscard]] std::size_t num_free_departures() const noexcept { return num_free_; }
    /// Windows of a prefix that ends there are let go of now: the same one whenever it is asked
    /// with the same number, which grows; 0 where there is no room. The policy does not order spare
    /// ones: those wait in a queue of their own.
    [[nodiscard]] Departure begin(TreePosition end, std::uint32_t moment, bool is_spare) noexcept;
    /// Nothing is left of them.
    void end(Departure departure) noexcept;
    /// Where a departure ended, in what is left of the way there; no node where nothing is.
    [[nodiscard]] TreePosition end_of(Departure departure) const noexcept {
        return ends_.at(departure);
    }
    /// What goes next of `tree`, whose policy this is, should it be a departure; 0 where it is a
    /// run, or nothing can go.
    [[nodiscard]] Departure next(PrefixTree& tree) noexcept;
    /// Once no run can go: of what went before runs that were asked for, the first; 0: nothing.
    [[nodiscard]] Departure first_aside() const noexcept { return aside_.bottom; }
    /// The oldest spare departure; 0: there is none.
    [[nodiscard]] Departure first_spare() const noexcept { return spare_.bottom; }

    [[nodiscard]] UselessRuns& useless() noexcept { return useless_; }
    /// The next victim is that run; kNoNode: what the policy says. The run can go.
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
    /// Where what is useless goes out of its turn, what it followed is not the next to go: so a
    /// policy that does not ask for the times of prefixes is told of each as if it ended there.
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
    void advance(std::int64_t now) noexcept override { policy_->advance(now); }
    void expose(NodeId node) noexcept override { useless_.suspect(node); }
    void offer(NodeId node) noexcept override {
        if (!std::exchange(runs_[node].is_candidate, true)) policy_->offer(id(node));
    }
    void withdraw(NodeId node) noexcept override {
        runs_[node].is_candidate = false;
        useless_.pardon(node);
        policy_->withdraw(id(node));
    }
    /// A run, whatever departures go before it.
    [[nodiscard]] NodeId victim() noexcept override;
    [[nodiscard]] std::size_t upcoming(NodeId* out, std::size_t n) const noexcept override;

   private:
    struct Owner {
        std::uint32_t number = 0;  // a node id or a departure
        bool is_run = true;
    };
    struct Run {
        NodeId id = 0;              // the policy's
        bool is_candidate = false;  // of the policy, be it that the tree has others behind it
    };
    enum class Place : std::uint8_t { kOrdered, kAside, kSpare };
    struct Left {
        NodeId id = 0;
        std::uint32_t moment = 0;
        Departure next_free = 0;
        Departure below = 0;  // in its pile
        Departure above = 0;
        Place place = Place::kOrdered;  // by the policy, or in a pile
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
    PolicyInterest interest_;    // the policy's
    std::vector<Owner> owners_;  // of the policy's ids
    std::vector<Run> runs_;
    std::vector<Left> departures_ = std::vector<Left>(1);
    RunMarks ends_;  // of departures: where each ends
    UselessRuns useless_;
    std::uint64_t clock_ = 0;
    NodeId cut_ = kNoNode;  // the lower half of a run that is being cut
    NodeId aim_ = kNoNode;
    Departure free_ = 0;
    std::size_t num_free_ = 0;
    Pile aside_;          // what went before runs that were asked for
    Pile spare_;          // spare departures
    bool stops_ = false;  // at a departure
    bool has_states_;
};

}  // namespace kvcore
