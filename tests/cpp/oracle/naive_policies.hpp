// SPDX-License-Identifier: Apache-2.0
// The policies of kvcore in the simplest form: tables, and a look at every run for each victim.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "kvcore/eviction.hpp"

/// Every policy except LRU and ARC: the victim is the candidate with the lowest rank.
class NaivePolicy : public kvcore::EvictionPolicy {
   public:
    struct Run {
        bool is_candidate = false;
        std::int64_t uses = 0;
        std::int64_t entered = 0;
        std::uint64_t last = 0;  // last release of a prefix that contains the run
        std::int64_t depth = 0;
        std::int64_t floor = 0;
        kvcore::Retention highest{0};
        std::int32_t lasting = 0;
        std::int64_t returns = kvcore::ReturnTime::kUnknown;
    };
    using Rank = std::tuple<std::int64_t, std::uint64_t>;

    NaivePolicy(const kvcore::EvictionConfig& config, std::int64_t attention_pages)
        : order_(config.order), attention_pages_(attention_pages), grace_(config.return_grace) {}

    [[nodiscard]] kvcore::PolicyInterest interest() const noexcept override {
        return {true, true, true, true, true, true, false, true};
    }
    void make_room(kvcore::NodeId last) override { runs_.resize(last + std::size_t{1}); }
    void insert(kvcore::NodeId node, std::int32_t depth, std::int32_t,
                std::int32_t) noexcept override {
        runs_[node] = {false, 1, ++time_, 0, depth, floor_, {0}, 0};
    }
    void hit(kvcore::NodeId node) noexcept override {
        Run& run = runs_[node];
        ++run.uses;
        run.floor = floor_;
    }
    void release(kvcore::NodeId node, std::uint64_t time) noexcept override {
        runs_[node].last = time;
        runs_[node].is_candidate = true;
    }
    void pass(kvcore::NodeId node, std::uint64_t time) noexcept override {
        runs_[node].last = time;
    }
    void split(kvcore::NodeId upper, kvcore::NodeId lower) noexcept override {
        runs_[upper] = runs_[lower];
        runs_[upper].is_candidate = false;
    }
    void erase(kvcore::NodeId node) noexcept override {
        if (victim() == node) floor_ = std::max(floor_, worth(runs_[node]));
        runs_[node] = {};
    }
    void resize(kvcore::NodeId node, std::int32_t depth, std::int32_t) noexcept override {
        Run& run = runs_[node];
        if (depth > run.depth) run.entered = ++time_;
        if (depth < run.depth && victim() == node) floor_ = std::max(floor_, worth(run));
        run.depth = depth;
    }
    void retain(kvcore::NodeId node, const kvcore::Retention& given) noexcept override {
        const kvcore::Retention asked = given.until <= now_ ? kvcore::Retention(0) : given;
        Run& run = runs_[node];
        if (run.highest.until <= now_) run.highest = run.lasting;
        if (asked.until == kvcore::Retention::kForever) {
            run.lasting = std::max(run.lasting, asked.priority);
        }
        const auto key = [](const kvcore::Retention& r) { return std::tuple(r.priority, r.until); };
        if (key(run.highest) < key(asked)) run.highest = asked;
        if (returns(given.returns) != kvcore::ReturnTime::kUnknown) run.returns = given.returns;
    }
    [[nodiscard]] kvcore::Retention retention(kvcore::NodeId node) const noexcept override {
        return {kvcore::kDefaultPriority, kvcore::Retention::kForever,
                returns(runs_[node].returns)};
    }
    void expect(kvcore::NodeId node, std::int64_t given, bool is_shared) noexcept override {
        std::int64_t& kept = runs_[node].returns;
        kept = is_shared ? std::min(returns(kept), returns(given)) : given;
    }
    [[nodiscard]] bool joins(kvcore::NodeId node,
                             const kvcore::Retention& given) const noexcept override {
        const kvcore::Retention asked = given.until <= now_ ? kvcore::Retention(0) : given;
        const bool goes_by_use = order_ != kvcore::EvictionOrder::kPriority;
        if (order_ == kvcore::EvictionOrder::kFifo) return true;
        if (order_ == kvcore::EvictionOrder::kHinted) {
            return returns(runs_[node].returns) == returns(given.returns);
        }
        const bool has_floor =
            order_ != kvcore::EvictionOrder::kCost || runs_[node].floor == floor_;
        if (goes_by_use) return runs_[node].uses == 1 && has_floor;
        const bool lasts = runs_[node].highest.until <= now_ ||
                           runs_[node].highest.until == kvcore::Retention::kForever;
        return priority(runs_[node]) == asked.priority &&
               lasts == (asked.until == kvcore::Retention::kForever);
    }
    void advance(std::int64_t now) noexcept override { now_ = now; }
    void offer(kvcore::NodeId node) noexcept override { runs_[node].is_candidate = true; }
    void withdraw(kvcore::NodeId node) noexcept override { runs_[node].is_candidate = false; }
    [[nodiscard]] kvcore::NodeId victim() noexcept override {
        kvcore::NodeId least = kvcore::kNoNode;
        for (kvcore::NodeId node = 1; node < runs_.size(); ++node) {
            if (!runs_[node].is_candidate) continue;
            if (least == kvcore::kNoNode || rank(runs_[node]) < rank(runs_[least])) least = node;
        }
        return least;
    }

   private:
    [[nodiscard]] std::int32_t priority(const Run& run) const {
        return run.highest.until > now_ ? run.highest.priority : run.lasting;
    }
    // An order of three kinds: never, unknown, and times, the farthest first.
    [[nodiscard]] std::int64_t returns(std::int64_t time) const {
        const bool is_over = now_ > 0 && time < now_ - grace_;
        return is_over ? kvcore::ReturnTime::kUnknown : time;
    }
    [[nodiscard]] std::int64_t worth(const Run& run) const {
        return run.floor + run.uses * (attention_pages_ + run.depth);
    }
    [[nodiscard]] Rank rank(const Run& run) const {
        switch (order_) {
            case kvcore::EvictionOrder::kLfu:
                return {run.uses, run.last};
            case kvcore::EvictionOrder::kSlru:
                return {run.uses > 1 ? 1 : 0, run.last};
            case kvcore::EvictionOrder::kFifo:
                return {run.entered, 0};
            case kvcore::EvictionOrder::kPriority:
                return {priority(run), run.last};
            case kvcore::EvictionOrder::kCost:
                return {worth(run), run.last};
            case kvcore::EvictionOrder::kHinted:
                return {-returns(run.returns), run.last};
            default:
                return {};
        }
    }

    kvcore::EvictionOrder order_;
    std::int64_t attention_pages_;
    std::int64_t grace_;
    std::vector<Run> runs_;
    std::int64_t time_ = 0;
    std::int64_t floor_ = 0;
    std::int64_t now_ = std::numeric_limits<std::int64_t>::min();
};

/// LRU and ARC: lists of candidates, oldest first.
class NaiveLists : public kvcore::EvictionPolicy {
   public:
    explicit NaiveLists(bool adapts) : adapts_(adapts) {}

    [[nodiscard]] kvcore::PolicyInterest interest() const noexcept override {
        return {true, true, true, true, true, true};
    }
    [[nodiscard]] bool joins(kvcore::NodeId node,
                             const kvcore::Retention&) const noexcept override {
        return !adapts_ || runs_[node].list == 0;
    }
    void make_room(kvcore::NodeId last) override {
        runs_.resize(last + std::size_t{1});
        lists_.resize(2);
        ghosts_.resize(2);
    }
    void insert(kvcore::NodeId node, std::int32_t, std::int32_t pages,
                std::int32_t) noexcept override {
        runs_[node] = {true, true, 0, pages, 0};
    }
    void identify(kvcore::NodeId node, std::uint64_t fingerprint) noexcept override {
        Run& run = runs_[node];
        run.fingerprint = fingerprint;
        if (!std::exchange(run.is_new, false) || !adapts_) return;
        for (std::size_t list = 0; list < 2; ++list) {
            const auto size = [&](std::size_t l) {
                return static_cast<std::int64_t>(ghosts_[l].size());
            };
            const std::int64_t step =
                size(list) == 0
                    ? 0
                    : run.pages * std::max<std::int64_t>(1, size(1 - list) / size(list));
            const auto found = std::find(ghosts_[list].begin(), ghosts_[list].end(), fingerprint);
            if (found == ghosts_[list].end()) continue;
            ghosts_[list].erase(found);
            share_ = std::min(std::max<std::int64_t>(0, share_ + (list == 0 ? step : -step)),
                              pages_of(0) + pages_of(1));
            run.list = 1;
            return;
        }
    }
    void hit(kvcore::NodeId node) noexcept override {
        if (!adapts_) return;
        const bool was_in = take_out(node);
        runs_[node].list = 1;
        if (was_in) lists_[1].push_back(node);
    }
    void release(kvcore::NodeId node, std::uint64_t) noexcept override {
        take_out(node);
        list_of(node).push_back(node);
    }
    void split(kvcore::NodeId upper, kvcore::NodeId lower) noexcept override {
        runs_[upper] = runs_[lower];
        runs_[upper].pages = 0;  // `resize` sets it
    }
    void resize(kvcore::NodeId node, std::int32_t, std::int32_t pages) noexcept override {
        runs_[node].pages = pages;
    }
    void erase(kvcore::NodeId node) noexcept override {
        take_out(node);
        const Run gone = std::exchange(runs_[node], {});
        if (!adapts_) return;
        for (auto& ghosts : ghosts_) {
            ghosts.erase(std::remove(ghosts.begin(), ghosts.end(), gone.fingerprint), ghosts.end());
        }
        if (ghosts_[0].size() + ghosts_[1].size() == runs_.size()) {
            ghosts_[ghosts_[1].size() > ghosts_[0].size() ? 1 : 0].pop_front();
        }
        ghosts_[gone.list].push_back(gone.fingerprint);
    }
    void offer(kvcore::NodeId node) noexcept override { list_of(node).push_front(node); }
    void withdraw(kvcore::NodeId node) noexcept override { take_out(node); }
    [[nodiscard]] kvcore::NodeId victim() noexcept override {
        const bool first = !lists_[0].empty() && (lists_[1].empty() || pages_of(0) > share_);
        const auto& list = lists_[first ? 0 : 1];
        return list.empty() ? kvcore::kNoNode : list.front();
    }

   private:
    struct Run {
        bool is_there = false;
        bool is_new = false;
        std::size_t list = 0;  // 1: used again
        std::int64_t pages = 0;
        std::uint64_t fingerprint = 0;
    };

    std::deque<kvcore::NodeId>& list_of(kvcore::NodeId node) { return lists_[runs_[node].list]; }
    bool take_out(kvcore::NodeId node) {
        auto& list = list_of(node);
        const auto found = std::find(list.begin(), list.end(), node);
        if (found == list.end()) return false;
        list.erase(found);
        return true;
    }
    [[nodiscard]] std::int64_t pages_of(std::size_t list) const {
        std::int64_t pages = 0;
        for (const Run& run : runs_) pages += run.is_there && run.list == list ? run.pages : 0;
        return pages;
    }

    bool adapts_;
    std::vector<Run> runs_;
    std::vector<std::deque<kvcore::NodeId>> lists_;
    std::vector<std::deque<std::uint64_t>> ghosts_;
    std::int64_t share_ = 0;
};

inline std::unique_ptr<kvcore::EvictionPolicy> make_naive(const kvcore::EvictionConfig& config,
                                                          std::int32_t page_size) {
    using kvcore::EvictionOrder;
    if (config.order == EvictionOrder::kLru) return std::make_unique<NaiveLists>(false);
    if (config.order == EvictionOrder::kArc) return std::make_unique<NaiveLists>(true);
    return std::make_unique<NaivePolicy>(config, std::max(1, config.attention_tokens / page_size));
}
