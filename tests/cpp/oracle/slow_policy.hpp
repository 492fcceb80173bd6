// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "kvcore/prefix_tree.hpp"
#include "oracle/naive_policies.hpp"
#include "tree/tree_node.hpp"

/// A slow policy that treats entries that left together (a departure) as a run.
class SlowPolicy : public kvcore::EvictionPolicy {
   public:
    using NodeId = kvcore::NodeId;

    SlowPolicy(const kvcore::EvictionConfig& config, std::int32_t page_size)
        : goes_by_time(config.order == kvcore::EvictionOrder::kLru),
          releases_parents_(goes_by_time || config.order == kvcore::EvictionOrder::kFifo ||
                            config.order == kvcore::EvictionOrder::kArc),
          policy_(make_naive(config, page_size)) {}

    const bool goes_by_time;

    std::function<std::vector<NodeId>(NodeId)> departures_of;  // ids of the departures in a run
    std::function<void(NodeId)> pardon;
    std::function<void(NodeId)> suspect;
    NodeId aim = kvcore::kNoNode;  // the next victim

    void make_room_for_departures(std::size_t n) {
        for (; num_departures_ < n; ++num_departures_) {
            free.push_back(static_cast<NodeId>(is_run_.size()));
            take_id(false);
        }
    }
    [[nodiscard]] std::size_t num_departures() const { return num_departures_; }
    std::vector<NodeId> free;  // ids of departures; the last id is used first
    void begin(NodeId departure, NodeId run) {
        policy_->split(departure, ids_[run]);
        policy_->release(departure, ++clock_);
    }
    void end(NodeId departure) {
        policy_->withdraw(departure);
        aside_.erase(std::remove(aside_.begin(), aside_.end(), departure), aside_.end());
    }
    /// Return the first victim among departures and evictable runs: a departure, or 0 for a run.
    [[nodiscard]] NodeId next(kvcore::PrefixTree& tree) {
        for (; !aside_.empty(); aside_.pop_back()) policy_->offer(aside_.back());
        sees_departures_ = true;
        const bool is_run = tree.victim() != kvcore::kNoNode;
        sees_departures_ = false;
        return is_run ? 0 : policy_->victim();
    }
    /// Return the first departure, if no run is evictable.
    [[nodiscard]] NodeId first_aside() const { return aside_.empty() ? 0 : aside_.front(); }

    [[nodiscard]] kvcore::PolicyInterest interest() const noexcept override {
        return {true, true, true, true, true, true, true, true};
    }
    void make_room(NodeId last) override {
        if (last < ids_.size()) return;
        ids_.push_back(static_cast<NodeId>(is_run_.size()));
        take_id(true);
        runs_.resize(is_run_.size());
        runs_[ids_.back()] = last;
    }
    void insert(NodeId node, std::int32_t depth, std::int32_t pages,
                std::int32_t priority) noexcept override {
        policy_->insert(ids_[node], depth, pages, priority);
    }
    void hit(NodeId node) noexcept override {
        pardon(node);
        for (const NodeId departure : departures_of(node)) policy_->hit(departure);
        policy_->hit(ids_[node]);
    }
    void expect(NodeId node, std::int64_t returns, bool is_shared) noexcept override {
        for (const NodeId departure : departures_of(node)) {
            policy_->expect(departure, returns, is_shared);
        }
        policy_->expect(ids_[node], returns, is_shared);
    }
    void release(NodeId node, std::uint64_t) noexcept override {
        candidates_.insert(node);
        policy_->release(ids_[node], ++clock_);
    }
    void pass(NodeId node, std::uint64_t time) noexcept override {
        if (releases_parents_) return release(node, time);
        policy_->pass(ids_[node], clock_);
    }
    void split(NodeId upper, NodeId lower) noexcept override {
        candidates_.erase(upper);
        policy_->split(ids_[upper], ids_[lower]);
    }
    void erase(NodeId node) noexcept override {
        pardon(node);
        candidates_.erase(node);
        policy_->erase(ids_[node]);
    }
    void resize(NodeId node, std::int32_t depth, std::int32_t pages) noexcept override {
        policy_->resize(ids_[node], depth, pages);
    }
    void identify(NodeId node, std::uint64_t fingerprint) noexcept override {
        policy_->identify(ids_[node], fingerprint);
    }
    void retain(NodeId node, const kvcore::Retention& asked) noexcept override {
        policy_->retain(ids_[node], asked);
        for (const NodeId departure : departures_of(node)) policy_->retain(departure, asked);
    }
    [[nodiscard]] bool joins(NodeId node, const kvcore::Retention& asked) const noexcept override {
        return policy_->joins(ids_[node], asked);
    }
    void advance(std::int64_t now) noexcept override { policy_->advance(now); }
    void expose(NodeId node) noexcept override { suspect(node); }
    void offer(NodeId node) noexcept override {
        if (candidates_.insert(node).second) policy_->offer(ids_[node]);
    }
    void withdraw(NodeId node) noexcept override {
        pardon(node);
        candidates_.erase(node);
        policy_->withdraw(ids_[node]);
    }
    [[nodiscard]] NodeId victim() noexcept override {
        if (aim != kvcore::kNoNode) return aim;
        NodeId least = policy_->victim();
        if (sees_departures_) return least != 0 && is_run_[least] ? runs_[least] : 0;
        while (least != 0 && !is_run_[least]) {
            aside_.push_back(least);
            policy_->withdraw(least);
            least = policy_->victim();
        }
        return least == 0 ? 0 : runs_[least];
    }

   private:
    void take_id(bool is_run) {
        policy_->make_room(static_cast<NodeId>(is_run_.size()));
        is_run_.push_back(is_run);
    }

    bool releases_parents_;  // parents keep their place if a child is evicted early
    std::set<NodeId> candidates_;
    std::unique_ptr<kvcore::EvictionPolicy> policy_;
    std::vector<NodeId> ids_;   // the policy's ids of runs
    std::vector<NodeId> runs_;  // by the policy's ids
    std::vector<bool> is_run_;
    std::vector<NodeId> aside_;  // departures, during a search for runs
    std::size_t num_departures_ = 0;
    std::uint64_t clock_ = 0;
    bool sees_departures_ = false;
};
