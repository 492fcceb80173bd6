// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kvcore/eviction.hpp"

namespace kvcore {

/// Another policy, and when each run was let go of last: so that runs can be compared with what
/// else could go.
///
/// Owns: the policy, and a time per node id. Threads, cost: those of the policy.
class TimedPolicy final : public EvictionPolicy {
   public:
    explicit TimedPolicy(std::unique_ptr<EvictionPolicy> policy) noexcept
        : policy_(std::move(policy)) {}

    /// Of what is let go of now: behind the last release of any run, and no later than the next
    /// one, for windows leave right before their run does.
    [[nodiscard]] std::uint64_t now() const noexcept { return now_ + 1; }
    /// When a run was last released; of one that became free when others went, when those were.
    [[nodiscard]] std::uint64_t time_of(NodeId node) const noexcept { return times_[node]; }

    [[nodiscard]] PolicyInterest interest() const noexcept override { return policy_->interest(); }
    void resize(NodeId node, std::int32_t depth, std::int32_t pages) noexcept override {
        policy_->resize(node, depth, pages);
    }
    void identify(NodeId node, std::uint64_t fingerprint) noexcept override {
        policy_->identify(node, fingerprint);
    }
    void retain(NodeId node, const Retention& retention) noexcept override {
        policy_->retain(node, retention);
    }
    [[nodiscard]] bool joins(NodeId node, const Retention& retention) const noexcept override {
        return policy_->joins(node, retention);
    }
    void advance(std::int64_t now) noexcept override { policy_->advance(now); }

    void make_room(NodeId last) override {
        if (last >= times_.size()) times_.resize(std::size_t{last} + 1);
        policy_->make_room(last);
    }
    void insert(NodeId node, std::int32_t depth, std::int32_t pages,
                std::int32_t priority) noexcept override {
        times_[node] = now_;
        policy_->insert(node, depth, pages, priority);
    }
    void hit(NodeId node) noexcept override { policy_->hit(node); }
    void release(NodeId node, std::uint64_t time) noexcept override {
        now_ = times_[node] = time;
        policy_->release(node, time);
    }
    void split(NodeId upper, NodeId lower) noexcept override {
        times_[upper] = times_[lower];
        policy_->split(upper, lower);
    }
    void erase(NodeId node) noexcept override {
        last_gone_ = times_[node];
        policy_->erase(node);
    }
    void offer(NodeId node) noexcept override {
        times_[node] = last_gone_ > times_[node] ? last_gone_ : times_[node];
        policy_->offer(node);
    }
    void withdraw(NodeId node) noexcept override { policy_->withdraw(node); }
    [[nodiscard]] NodeId victim() noexcept override { return policy_->victim(); }
    [[nodiscard]] std::size_t upcoming(NodeId* out, std::size_t n) const noexcept override {
        return policy_->upcoming(out, n);
    }

   private:
    std::unique_ptr<EvictionPolicy> policy_;
    std::vector<std::uint64_t> times_;
    std::uint64_t now_ = 0;
    std::uint64_t last_gone_ = 0;
};

}  // namespace kvcore
