// SPDX-License-Identifier: Apache-2.0
// A policy that is not part of the library: fewest uses first, then least recently released. The
// tree's victims must be the victims of an oracle that looks at every run. (The policy's std::set
// allocates outside make_room, which only a test may do.)
#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "kvcore/eviction.hpp"
#include "support/random.hpp"
#include "support/tree_fixture.hpp"

namespace tests::tree::eviction_policy {

using kvcore::NodeId;
using kvcore::PrefixTree;
using kvcore::TokenId;
using kvcore::TreeNode;
using Ids = TreeFixture::Ids;

namespace {

// ---- the whole policy
class FewestUses final : public kvcore::EvictionPolicy {
   public:
    void make_room(NodeId last) override { runs_.resize(last + std::size_t{1}); }
    void insert(NodeId node, std::int32_t, std::int32_t, std::int32_t) noexcept override {
        runs_[node] = {1, 0};
    }
    void hit(NodeId node) noexcept override {
        const bool was_candidate = order_.erase(key(node)) > 0;
        ++runs_[node].uses;
        if (was_candidate) order_.insert(key(node));
    }
    void release(NodeId node, std::uint64_t time) noexcept override {
        order_.erase(key(node));
        runs_[node].time = time;
        order_.insert(key(node));
    }
    void split(NodeId upper, NodeId lower) noexcept override { runs_[upper] = runs_[lower]; }
    void erase(NodeId node) noexcept override { order_.erase(key(node)); }
    void offer(NodeId node) noexcept override { order_.insert(key(node)); }
    void withdraw(NodeId node) noexcept override { order_.erase(key(node)); }
    [[nodiscard]] NodeId victim() noexcept override {
        return order_.empty() ? kvcore::kNoNode : std::get<NodeId>(*order_.begin());
    }

   private:
    struct Run {
        std::uint64_t uses = 0;
        std::uint64_t time = 0;
    };
    using Key = std::tuple<std::uint64_t, std::uint64_t, NodeId>;
    [[nodiscard]] Key key(NodeId node) const { return {runs_[node].uses, runs_[node].time, node}; }

    std::vector<Run> runs_;
    std::set<Key> order_;
};

// ---- the calls that the tree makes
/// Records every call, and returns the order of the policy that it wraps.
class Recorder final : public kvcore::EvictionPolicy {
   public:
    explicit Recorder(std::string& text, bool exposure = false)
        : text_(text), exposure_(exposure) {}
    [[nodiscard]] kvcore::PolicyInterest interest() const noexcept override {
        kvcore::PolicyInterest interest = inner_.interest();
        interest.exposure = exposure_;
        return interest;
    }
    void make_room(NodeId last) override { inner_.make_room(last); }
    void insert(NodeId node, std::int32_t depth, std::int32_t pages,
                std::int32_t priority) noexcept override {
        add("insert", node);
        for (const std::int32_t value : {depth, pages, priority}) {
            text_ += " " + std::to_string(value);
        }
        inner_.insert(node, depth, pages, priority);
    }
    void hit(NodeId node) noexcept override {
        add("hit", node);
        inner_.hit(node);
    }
    void release(NodeId node, std::uint64_t time) noexcept override {
        add("release", node);
        CHECK(time > last_time_);
        last_time_ = time;
        inner_.release(node, time);
    }
    void split(NodeId upper, NodeId lower) noexcept override {
        add("split", upper);
        text_ += " of " + std::to_string(lower);
        inner_.split(upper, lower);
    }
    void erase(NodeId node) noexcept override {
        add("erase", node);
        inner_.erase(node);
    }
    void expose(NodeId node) noexcept override { add("expose", node); }
    void offer(NodeId node) noexcept override {
        add("offer", node);
        inner_.offer(node);
    }
    void withdraw(NodeId node) noexcept override {
        add("withdraw", node);
        inner_.withdraw(node);
    }
    [[nodiscard]] NodeId victim() noexcept override { return inner_.victim(); }

   private:
    void add(const char* verb, NodeId node) {
        text_ += (text_.empty() ? "" : ", ") + std::string(verb) + " " + std::to_string(node);
    }

    std::string& text_;
    bool exposure_;
    FewestUses inner_;
    std::uint64_t last_time_ = 0;
};

// The calls contain whether a run was used, and whether its end is unprotected.
TEST(the_policy_hears_of_runs_that_can_go) {
    std::string told;
    TreeFixture t(1, std::make_unique<Recorder>(told, true));
    const auto heard = [&] { return std::exchange(told, {}); };
    TreeNode* a = t.hold({1, 2, 3});
    TreeNode* again = t.pin({1, 2, 3});
    static_cast<void>(heard());
    t.tree.unpin(a, true);
    CHECK_EQ(heard(), "release 1");
    t.tree.unpin(again, false);
    CHECK_EQ(heard(), "expose 1");
    t.put({1, 2, 4});
    CHECK_EQ(heard(), "split 3 of 1, insert 2 3 1 50, hit 3, release 2, expose 2");
    CHECK_EQ(t.evict(2).size(), 2);
    CHECK_EQ(heard(), "erase 1, erase 2, expose 3, offer 3");
}

TEST(the_policy_hears_of_every_run) {
    std::string told;
    TreeFixture t(1, std::make_unique<Recorder>(told));
    const auto heard = [&] { return std::exchange(told, {}); };
    TreeNode* a = t.hold({1, 2, 3});
    CHECK_EQ(heard(), "insert 1 3 3 50");
    t.tree.unpin(a, true);
    CHECK_EQ(heard(), "release 1");
    t.match({1, 2, 9});
    CHECK_EQ(heard(), "");  // a match is not a use
    t.put({1, 2, 4});       // two of the pages are already cached
    CHECK_EQ(heard(), "split 3 of 1, insert 2 3 1 50, hit 3, release 2");
    t.tree.use(t.match({1, 2, 4}).at);
    CHECK_EQ(heard(), "hit 2, hit 3");
    TreeNode* held = t.pin({1, 2, 3});
    CHECK_EQ(heard(), "");
    CHECK_EQ(t.evict(3), Ids{5});  // eviction skips the held run and takes the other
    CHECK_EQ(heard(), "withdraw 1, erase 2");
    t.tree.unpin(held, false);  // free again without a use
    CHECK_EQ(heard(), "offer 1");
    CHECK_EQ(t.evict(3), (Ids{2, 1, 0}));
    CHECK_EQ(heard(), "erase 1, offer 3, erase 3");
}

TEST(priorities_reach_the_policy) {
    std::string told;
    TreeFixture t(1, std::make_unique<Recorder>(told));
    std::vector<kvcore::DuplicatePage> found;
    const TokenId token = 7;
    const kvcore::BlockId id = 0;
    TreeNode* end = t.tree.insert(t.tree.open_namespace(""), &token, &id, 1, found, 80);
    CHECK_EQ(told, "insert 1 1 1 80");
    CHECK_EQ(PrefixTree::depth_of(end), 1);
}

TEST(a_policy_decides_what_goes) {
    TreeFixture t(1, std::make_unique<FewestUses>());
    for (const TokenId branch : {1, 1, 2, 3}) t.put({branch});
    // Ids count up with each inserted page: the second page was already cached.
    CHECK_EQ(t.evict(3), (Ids{2, 3, 0}));
}

// ---- random traffic
/// Branches of one page each below two roots. Every run is a page, and the oracle is a table.
class Branches {
   public:
    explicit Branches(std::uint64_t seed)
        : random_(seed), tree_(1, std::make_unique<FewestUses>()) {}

    void run(int steps) {
        for (int step = 0; step < steps; ++step) {
            const std::int64_t dice = random_.below(100);
            if (dice < 50) {
                put(static_cast<TokenId>(random_.below(300)));
            } else if (dice < 60) {
                use(static_cast<TokenId>(random_.below(300)));
            } else if (dice < 75 && held_.size() < 20) {
                hold(static_cast<TokenId>(random_.below(300)));
            } else if (dice < 85 && !held_.empty()) {
                let_go(random_.chance(50));
            } else if (branches_.size() > 150) {
                evict(random_.between(1, 5));
            }
        }
        tree_.tree.check_integrity();
    }

   private:
    struct Branch {
        std::uint64_t uses = 0;
        std::uint64_t time = 0;
        int pins = 0;
        kvcore::BlockId id = 0;
    };

    void put(TokenId token) {
        const auto [place, is_new] = branches_.try_emplace(token);
        if (is_new) place->second.id = next_id_;
        ++next_id_;
        ++place->second.uses;
        place->second.time = ++clock_;
        tree_.put({token});
    }
    void use(TokenId token) {
        const auto found = branches_.find(token);
        if (found == branches_.end()) return;
        ++found->second.uses;
        tree_.tree.use(tree_.match({token}).at);
    }
    void hold(TokenId token) {
        const auto found = branches_.find(token);
        if (found == branches_.end()) return;
        ++found->second.pins;
        held_.emplace_back(token, tree_.pin({token}));
    }
    void let_go(bool is_use) {
        std::swap(random_.pick(held_), held_.back());
        Branch& branch = branches_.at(held_.back().first);
        --branch.pins;
        if (is_use) branch.time = ++clock_;
        tree_.tree.unpin(held_.back().second, is_use);
        held_.pop_back();
    }
    void evict(std::int64_t n) {
        Ids expected;
        for (; n > 0; --n) {
            auto least = branches_.end();
            for (auto at = branches_.begin(); at != branches_.end(); ++at) {
                if (at->second.pins > 0) continue;
                if (least == branches_.end() || worth(at->second) < worth(least->second)) {
                    least = at;
                }
            }
            expected.push_back(least->second.id);
            branches_.erase(least);
        }
        std::vector<kvcore::BlockId> gone(expected.size());
        CHECK_EQ(tree_.tree.evict(static_cast<std::int64_t>(gone.size()), gone.data()),
                 gone.size());
        CHECK_EQ(gone, expected);
    }
    static std::pair<std::uint64_t, std::uint64_t> worth(const Branch& branch) {
        return {branch.uses, branch.time};
    }

    Random random_;
    TreeFixture tree_;
    std::map<TokenId, Branch> branches_;
    std::vector<std::pair<TokenId, TreeNode*>> held_;
    std::uint64_t clock_ = 0;
    kvcore::BlockId next_id_ = 0;
};

TEST(random_branches_agree) {
    const std::uint64_t seed = check::seed_or(21);
    Branches(seed).run(100'000);
}

}  // namespace

}  // namespace tests::tree::eviction_policy
