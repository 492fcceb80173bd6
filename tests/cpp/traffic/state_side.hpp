// SPDX-License-Identifier: Apache-2.0
// A cache whose layers keep a state, in pages, used as requests do: the real cache, and a slow twin
// that looks at every run for each eviction.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "layers/recurrent_slots.hpp"
#include "layers/window_policy.hpp"
#include "oracle/naive_policies.hpp"
#include "oracle/slow_hits.hpp"
#include "support/check.hpp"

/// The common part of both sides: `Self` chooses the victims and stores the checkpoints.
template <class Self>
class StateSide {
   public:
    using BlockId = kvcore::BlockId;
    using Retention = kvcore::Retention;
    using Tokens = std::vector<kvcore::TokenId>;
    using TreeNode = kvcore::TreeNode;
    using TreePosition = kvcore::TreePosition;
    static constexpr std::int32_t kPage = 2;

    struct Row {
        Tokens tokens;
        Retention retention;
        TreeNode* node = nullptr;
        std::int32_t committed = 0;
        std::vector<BlockId> own{};  // pages after the committed ones
    };

    /// Take a hit of a prompt and pages for the rest of it. Return false if the prompt does not
    /// fit.
    bool claim(const Tokens& tokens, Retention retention) {
        const TreePosition at = hit(tokens);
        const std::int64_t taken = tree_.num_unprotected(at);
        if (count(tokens) / kPage - at.depth > pool_.num_free() + tree_.num_evictable() - taken) {
            return false;
        }
        Row row{tokens, retention, tree_.split(at), at.depth};
        tree_.pin(row.node);
        const std::int64_t more = count(tokens) / kPage - at.depth;
        CHECK(make_room(more));
        if (at.depth > 0) self().renew(last_page(at));
        tree_.use({row.node, at.depth});
        tree_.retain({row.node, at.depth}, 0, at.depth, retention);
        row.own.resize(static_cast<std::size_t>(more));
        CHECK(pool_.allocate(more, row.own.data()));
        rows_.push_back(std::move(row));
        return true;
    }
    /// Insert the row's next `n` pages into the tree.
    void commit(std::size_t i, std::int32_t n) {
        Row& row = rows_[i];
        n = std::min(n, static_cast<std::int32_t>(row.own.size()));
        if (n == 0) return;
        std::vector<kvcore::DuplicatePage> known;
        TreeNode* end =
            tree_.insert(row.node, row.tokens.data() + std::ptrdiff_t{row.committed} * kPage,
                         row.own.data(), n, known, row.retention);
        if (end != row.node) {
            tree_.pin(end);
            let_go(std::exchange(row.node, end), false);
        }
        for (const kvcore::DuplicatePage& each : known) {
            pool_.free(&row.own[static_cast<std::size_t>(each.index)], 1);
        }
        row.committed += n;
        row.own.erase(row.own.begin(), row.own.begin() + n);
    }
    /// Make a checkpoint at the end of the committed pages, if it does not exist yet.
    void checkpoint(std::size_t i) {
        const Row& row = rows_[i];
        if (row.committed > 0) self().add(last_page({row.node, row.committed}), row.node);
    }
    /// `touch`: the release counts as a use.
    void release(std::size_t i, bool touch) {
        const Row row = std::move(rows_[i]);
        rows_.erase(rows_.begin() + static_cast<std::ptrdiff_t>(i));
        pool_.free(row.own.data(), count(row.own));
        let_go(row.node, touch);
    }
    /// Hold the run that ends a prompt during an eviction.
    void hold(const Tokens& tokens, std::int64_t pages) {
        TreeNode* node = tree_.match(root(), tokens.data(), count(tokens)).at.node;
        tree_.pin(node);
        static_cast<void>(make_room(pool_.num_free() + pages));
        let_go(node, false);
    }
    void touch(const Tokens& tokens) { tree_.touch(hit(tokens)); }
    void advance(std::int64_t now) { tree_.advance(now); }
    /// Make `n` pages free. Return false if that is impossible.
    bool make_room(std::int64_t n) {
        const std::int64_t wanted = n - pool_.num_free();
        if (wanted > tree_.num_evictable()) return false;
        if (wanted <= 0) return true;
        std::vector<BlockId> gone(static_cast<std::size_t>(wanted));
        CHECK_EQ(self().evict(wanted, gone.data()), wanted);
        std::sort(gone.begin(), gone.end());
        pool_.free(gone.data(), wanted);
        return true;
    }

    /// Return everything that a caller can observe of this side.
    [[nodiscard]] std::vector<std::int64_t> seen() const {
        std::vector<std::int64_t> seen{pool_.num_free(), tree_.num_evictable(), tree_.num_cached(),
                                       tree_.num_nodes()};
        for (BlockId page = 0; page < pool_.num_blocks(); ++page) {
            seen.push_back(2 * pool_.ref_count(page) + (self().has(page) ? 1 : 0));
        }
        return seen;
    }
    [[nodiscard]] const std::vector<Row>& rows() const { return rows_; }
    [[nodiscard]] std::int64_t num_evictable() const { return tree_.num_evictable(); }
    [[nodiscard]] std::int64_t num_free() const { return pool_.num_free(); }

   protected:
    template <class Item>
    static std::int64_t count(const std::vector<Item>& items) {
        return static_cast<std::int64_t>(items.size());
    }
    [[nodiscard]] Self& self() { return static_cast<Self&>(*this); }
    [[nodiscard]] const Self& self() const { return static_cast<const Self&>(*this); }
    [[nodiscard]] TreeNode* root() const { return tree_.find_namespace(""); }
    [[nodiscard]] BlockId last_page(TreePosition at) const {
        BlockId page = 0;
        tree_.copy_pages(at, at.depth - 1, &page);
        return page;
    }
    [[nodiscard]] TreePosition hit(const Tokens& tokens) const {
        TreePosition at = tree_.match(root(), tokens.data(), count(tokens)).at;
        while (at.depth > 0 && !self().has(last_page(at))) --at.depth;
        return kvcore::PrefixTree::position(at.node, at.depth);
    }
    void let_go(TreeNode* node, bool touch) {
        tree_.unpin(node, touch);
        self().noted(node);
    }

    kvcore::BlockPool pool_;
    kvcore::PrefixTree tree_;
    std::vector<Row> rows_;

   private:
    friend Self;
    StateSide(std::int64_t num_pages, std::unique_ptr<kvcore::EvictionPolicy> policy)
        : pool_(num_pages), tree_(kPage, std::move(policy)) {}
};

class RealStates final : public StateSide<RealStates> {
   public:
    RealStates(std::int64_t num_pages, std::int64_t num_slots, kvcore::EvictionOrder order)
        : RealStates(num_pages, num_slots,
                     std::make_unique<kvcore::WindowPolicy>(kvcore::make_policy({order, 16}, kPage),
                                                            num_slots)) {}

    [[nodiscard]] bool has(BlockId page) const { return states_.has(page); }
    void renew(BlockId page) { states_.renew(states_.find(page)); }
    void add(BlockId page, TreeNode* run) {
        if (states_.find(page) == kvcore::RecurrentSlots::kNone) {
            states_.make_ready(states_.add(page, {run, kvcore::PrefixTree::depth_of(run)}));
        }
    }
    [[nodiscard]] std::int64_t evict(std::int64_t n, BlockId* out) {
        return states_.evict(n, out, tree_, policy_);
    }
    void noted(const TreeNode*) {}

   private:
    RealStates(std::int64_t num_pages, std::int64_t num_slots,
               std::unique_ptr<kvcore::WindowPolicy> policy)
        : RealStates(num_pages, num_slots, *policy, std::move(policy)) {}
    RealStates(std::int64_t num_pages, std::int64_t num_slots, kvcore::WindowPolicy& known,
               std::unique_ptr<kvcore::WindowPolicy>&& policy)
        : StateSide(num_pages, std::move(policy)),
          policy_(known),
          states_(num_slots, pool_, known.unreachable(), nullptr) {}

    kvcore::WindowPolicy& policy_;
    kvcore::RecurrentSlots states_;
};

/// Stores only the time of the last event of each run.
class SlowStates final : public StateSide<SlowStates> {
   public:
    SlowStates(std::int64_t num_pages, std::int64_t num_slots, kvcore::EvictionOrder order)
        : SlowStates(num_pages, num_slots, std::make_unique<Aimed>(order)) {}

    [[nodiscard]] bool has(BlockId page) const { return checkpoints_.has(page); }
    void renew(BlockId page) { checkpoints_.renew(page); }
    void add(BlockId page, TreeNode*) {
        if (has(page)) return;
        if (const BlockId gone = checkpoints_.oldest_if_full(); gone >= 0) {
            checkpoints_.forget(gone);
            noted(run_of(tree_, gone));
        }
        checkpoints_.add(page);
    }
    [[nodiscard]] std::int64_t evict(std::int64_t n, BlockId* out) {
        for (std::int64_t gone = 0; gone < n;) {
            TreeNode* run = first_useless();
            std::int64_t pages = 0;
            if (run != nullptr) {
                while (pages < run->num_pages && !has(page_from_end(run, pages))) ++pages;
            } else {
                run = tree_.run(tree_.victim());
                pages = run->num_pages;
                if (checks_times) check_least(run);
            }
            pages = std::min(pages, n - gone);
            TreeNode* parent = run->parent;
            const bool is_all = run->num_pages == pages;
            policy_.aim = run->id;
            CHECK_EQ(tree_.evict(pages, out + gone), pages);
            policy_.aim = kvcore::kNoNode;
            if (is_all && !parent->is_root()) noted(parent);
            for (std::int64_t i = 0; i < pages; ++i) {
                if (!has(out[gone + i])) continue;
                checkpoints_.forget(out[gone + i]);
                if (!is_all) noted(run);
            }
            gone += pages;
        }
        return n;
    }
    /// Check victims by time only: if every release is a use, the run released longest ago is
    /// evicted.
    bool checks_times = false;
    /// Record the time of an event of a run.
    void noted(const TreeNode* run) {
        if (can_go(run)) happened_[run->id] = ++clock_;
    }

   private:
    /// A naive policy that evicts a chosen run first.
    class Aimed final : public kvcore::EvictionPolicy {
        using Id = kvcore::NodeId;
        using Int = std::int32_t;
        using Time = std::uint64_t;

       public:
        explicit Aimed(kvcore::EvictionOrder order)
            : policy_(make_naive({order, 16}, kPage)),
              knows_times_(order != kvcore::EvictionOrder::kLru &&
                           order != kvcore::EvictionOrder::kFifo &&
                           order != kvcore::EvictionOrder::kArc) {}
        Id aim = kvcore::kNoNode;
        std::map<Id, Time> released;

        [[nodiscard]] kvcore::PolicyInterest interest() const noexcept override {
            return {true, true, true, true, true, true};
        }
        void make_room(Id last) override { policy_->make_room(last); }
        void insert(Id node, Int depth, Int pages, Int priority) noexcept override {
            policy_->insert(node, depth, pages, priority);
        }
        void hit(Id node) noexcept override { policy_->hit(node); }
        // The parents follow the run that ends a prefix: they are released at the same time.
        void release(Id node, Time time) noexcept override {
            candidates_.insert(node);
            released[node] = time;
            policy_->release(node, time);
        }
        void pass(Id node, Time time) noexcept override {
            if (knows_times_) return policy_->pass(node, time);
            release(node, time);
        }
        void split(Id upper, Id lower) noexcept override {
            candidates_.erase(upper);
            released[upper] = released[lower];
            policy_->split(upper, lower);
        }
        void erase(Id node) noexcept override {
            candidates_.erase(node);
            policy_->erase(node);
        }
        void resize(Id node, Int depth, Int pages) noexcept override {
            policy_->resize(node, depth, pages);
        }
        void identify(Id node, Time print) noexcept override { policy_->identify(node, print); }
        void retain(Id node, const Retention& asked) noexcept override {
            policy_->retain(node, asked);
        }
        [[nodiscard]] bool joins(Id node, const Retention& asked) const noexcept override {
            return policy_->joins(node, asked);
        }
        void advance(std::int64_t now) noexcept override { policy_->advance(now); }
        void offer(Id node) noexcept override {
            if (candidates_.insert(node).second) policy_->offer(node);
        }
        void withdraw(Id node) noexcept override {
            candidates_.erase(node);
            policy_->withdraw(node);
        }
        [[nodiscard]] Id victim() noexcept override {
            return aim != kvcore::kNoNode ? aim : policy_->victim();
        }

       private:
        std::unique_ptr<kvcore::EvictionPolicy> policy_;
        bool knows_times_;
        std::set<Id> candidates_;
    };

    SlowStates(std::int64_t num_pages, std::int64_t num_slots, std::unique_ptr<Aimed> policy)
        : SlowStates(num_pages, num_slots, *policy, std::move(policy)) {}
    SlowStates(std::int64_t num_pages, std::int64_t num_slots, Aimed& known,
               std::unique_ptr<Aimed>&& policy)
        : StateSide(num_pages, std::move(policy)), policy_(known), checkpoints_(num_slots) {}

    [[nodiscard]] static bool can_go(const TreeNode* run) {
        return !run->is_root() && run->num_children == 0 && run->pins == 0;
    }
    void check_least(const TreeNode* victim) const {
        for_each_run(tree_, [&](const TreeNode* run) {
            const bool is_older =
                can_go(run) && policy_.released.at(run->id) < policy_.released.at(victim->id);
            CHECK(!is_older);
        });
    }
    [[nodiscard]] TreeNode* first_useless() const {
        TreeNode* first = nullptr;
        for_each_run(tree_, [&](TreeNode* run) {
            if (!can_go(run) || has(page_from_end(run, 0))) return;
            const bool is_first =
                first == nullptr || happened_.at(run->id) < happened_.at(first->id);
            if (is_first) first = run;
        });
        return first;
    }
    [[nodiscard]] BlockId page_from_end(TreeNode* run, std::int64_t i) const {
        return last_page({run, run->end() - static_cast<std::int32_t>(i)});
    }
    Aimed& policy_;
    SlowCheckpoints checkpoints_;
    std::map<kvcore::NodeId, std::int64_t> happened_;  // time of the last event, by run
    std::int64_t clock_ = 0;
};
