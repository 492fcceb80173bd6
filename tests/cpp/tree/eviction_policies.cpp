// SPDX-License-Identifier: Apache-2.0
// The policies of kvcore choose the same victims as their slow twins, in trees with the same
// history.
#include "kvcore/eviction.hpp"

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "oracle/naive_policies.hpp"
#include "support/eviction_orders.hpp"
#include "support/random.hpp"
#include "support/tree_fixture.hpp"

namespace tests::tree::eviction_policies {

using kvcore::BlockId;
using kvcore::EvictionConfig;
using kvcore::EvictionOrder;
using kvcore::PrefixTree;
using kvcore::Retention;
using kvcore::ReturnTime;
using kvcore::TokenId;
using kvcore::TreeNode;
using Ids = TreeFixture::Ids;

namespace {

std::unique_ptr<PrefixTree> make_tree(EvictionOrder order, std::int32_t page_size = 1) {
    return std::make_unique<PrefixTree>(page_size, kvcore::make_policy({order}, page_size));
}

// Cache a prompt of one page per token without a holder. Page ids equal the tokens.
void put(PrefixTree& tree, const std::vector<TokenId>& tokens, const Retention& retention = {}) {
    std::vector<kvcore::DuplicatePage> found;
    TreeNode* end = tree.insert(tree.open_namespace(""), tokens.data(), tokens.data(),
                                static_cast<std::int32_t>(tokens.size()), found, retention);
    tree.pin(end);
    tree.unpin(end, true);
}

// Evict pages one by one.
Ids evict(PrefixTree& tree, std::size_t n) {
    Ids ids(n);
    for (BlockId& id : ids) CHECK_EQ(tree.evict(1, &id), 1);
    tree.check_integrity();
    return ids;
}

// ---- one page each: A, B, C with priorities 2, 0, 1
Ids victims(EvictionOrder order, const std::string& uses) {
    const auto tree = make_tree(order);
    for (const char use : uses) put(*tree, {use}, {std::array{2, 0, 1}[std::size_t(use - 'A')]});
    return evict(*tree, 3);
}

TEST(each_has_its_order) {
    const Ids abc = {'A', 'B', 'C'};
    const Ids bca = {'B', 'C', 'A'};
    const Ids cab = {'C', 'A', 'B'};
    CHECK_EQ(victims(EvictionOrder::kLru, "AABC"), abc);
    CHECK_EQ(victims(EvictionOrder::kFifo, "AABC"), abc);
    CHECK_EQ(victims(EvictionOrder::kLfu, "AABC"), bca);
    CHECK_EQ(victims(EvictionOrder::kSlru, "AABC"), bca);
    CHECK_EQ(victims(EvictionOrder::kArc, "AABC"), bca);
    CHECK_EQ(victims(EvictionOrder::kCost, "AABC"), bca);
    CHECK_EQ(victims(EvictionOrder::kPriority, "AABC"), bca);
    CHECK_EQ(victims(EvictionOrder::kLru, "BCAB"), cab);
    CHECK_EQ(victims(EvictionOrder::kFifo, "BCAB"), bca);
    CHECK_EQ(victims(EvictionOrder::kLfu, "BCAB"), cab);
}

TEST(a_touch_is_a_use_and_a_match_is_none) {
    for (const EvictionOrder order : {EvictionOrder::kLru, EvictionOrder::kLfu}) {
        const auto tree = make_tree(order);
        for (const TokenId token : {1, 2}) put(*tree, {token, token + 10});
        const std::array<TokenId, 2> prompt = {1, 9};
        TreeNode* root = tree->find_namespace("");
        const auto found = tree->match(root, prompt.data(), 2).at;
        CHECK_EQ(found.depth, 1);
        tree->touch(found);
        tree->touch({root, 0});  // touches no page
        CHECK_EQ(evict(*tree, 4), (Ids{11, 12, 2, 1}));
    }
}

TEST(cost_keeps_what_took_longest) {
    const auto tree = make_tree(EvictionOrder::kCost);
    put(*tree, {1});
    put(*tree, {2, 3, 4});
    put(*tree, {5});
    CHECK_EQ(evict(*tree, 2), (Ids{1, 5}));
    CHECK_EQ(evict(*tree, 3), (Ids{4, 3, 2}));
}

TEST(cost_forgets_what_was_worth_much_once) {
    const auto tree = make_tree(EvictionOrder::kCost);
    for (int use = 0; use < 3; ++use) put(*tree, {1});
    // Each eviction raises the floor by the value of a page: after three evictions, page 1 is next.
    for (TokenId token = 2; token < 5; ++token) {
        put(*tree, {token});
        CHECK_EQ(evict(*tree, 1), Ids{token < 4 ? token : 1});
    }
}

TEST(a_run_has_the_priority_of_its_users_for_its_time) {
    const auto tree = make_tree(EvictionOrder::kPriority);
    put(*tree, {1}, {80, 10});
    put(*tree, {2}, {20});
    put(*tree, {2}, {60});  // the highest priority counts
    put(*tree, {3}, {90, 10});
    put(*tree, {3}, {30});  // the priority that remains after time 10
    put(*tree, {4}, {10});
    CHECK_EQ(evict(*tree, 1), Ids{4});
    tree->advance(9);
    put(*tree, {5}, {50});
    CHECK_EQ(evict(*tree, 1), Ids{5});
    tree->advance(10);
    tree->advance(3);  // the time does not change
    CHECK_EQ(evict(*tree, 3), (Ids{1, 3, 2}));
}

TEST(a_run_grows_on_while_its_time_moves) {
    TreeFixture t(1, kvcore::make_policy({EvictionOrder::kPriority}, 1));
    TreeNode* end = t.hold({1});
    std::vector<kvcore::DuplicatePage> found;
    for (std::int32_t i = 0; i < 60; ++i) {
        const TokenId token = 100 + i;
        TreeNode* next = t.tree.insert(end, &token, &token, 1, found, {50, 1000 + i});
        if (next == end) continue;
        t.tree.pin(next);
        t.tree.unpin(end, false);
        end = next;
    }
    CHECK(t.tree.num_nodes() < 15);
    const std::int64_t before = t.tree.num_nodes();
    const TokenId token = 7;
    TreeNode* other = t.tree.insert(end, &token, &token, 1, found, {60, 2000});
    CHECK(other != end);  // with another priority
    CHECK_EQ(t.tree.num_nodes(), before + 1);
    t.tree.pin(other);
    t.tree.unpin(other, true);
    t.tree.check_integrity();
}

TEST(arc_learns_from_what_returns) {
    const auto tree = make_tree(EvictionOrder::kArc);
    for (const TokenId token : {1, 1, 2, 3}) put(*tree, {token});
    CHECK_EQ(evict(*tree, 2), (Ids{2, 3}));
    put(*tree, {2});  // page 2 was used once: the share of pages used once was too small
    put(*tree, {4});
    // Page 4 fits the share now. The older of the pages that were used again is evicted.
    CHECK_EQ(evict(*tree, 1), Ids{1});
}

TEST(nonsense_is_refused) {
    const auto make = [](EvictionConfig config, std::int32_t page_size) {
        return kvcore::make_policy(config, page_size);
    };
    CHECK_THROWS(std::invalid_argument, make({EvictionOrder::kLru}, 0));
    CHECK_THROWS(std::invalid_argument, make({EvictionOrder::kCost, 0}, 16));
    CHECK_THROWS(std::invalid_argument, make({EvictionOrder::kHinted, 1, -1}, 16));
    // NOLINTNEXTLINE(clang-analyzer-optin.core.EnumCastOutOfRange): a wrong caller's value
    const auto none = static_cast<EvictionOrder>(99);
    CHECK_THROWS(std::invalid_argument, make({none}, 16));
}

// ---- random traffic
/// Two trees with the same history: one has a policy, the other its slow twin.
class Twins {
   public:
    Twins(std::uint64_t seed, EvictionOrder order)
        : random_(seed),
          trees_{PrefixTree(kPage, kvcore::make_policy({order, 32, 7}, kPage)),
                 PrefixTree(kPage, make_naive({order, 32, 7}, kPage))} {}

    void run(int steps) {
        for (int step = 0; step < steps; ++step) {
            const std::int64_t dice = random_.below(100);
            if (dice < 35) {
                put();
            } else if (dice < 50) {
                grow();
            } else if (dice < 60) {
                find([](PrefixTree& tree, kvcore::TreePosition at) { tree.use(at); });
            } else if (dice < 65) {
                find([](PrefixTree& tree, kvcore::TreePosition at) { tree.touch(at); });
            } else if (dice < 75) {
                hold();
            } else if (dice < 85) {
                let_go();
            } else if (dice < 88) {
                now_ += random_.below(20);
                for (PrefixTree& tree : trees_) tree.advance(now_);
            } else {
                evict(random_.between(1, trees_[0].num_cached() > 400 ? 40 : 4));
            }
        }
        for (PrefixTree& tree : trees_) tree.check_integrity();
    }

   private:
    static constexpr std::int32_t kPage = 2;
    struct Held {
        std::array<TreeNode*, 2> ends;
    };

    // Return a prompt; prompts often share their starts.
    std::vector<TokenId> prompt() {
        std::vector<TokenId> tokens(static_cast<std::size_t>(kPage * random_.between(1, 8)));
        for (TokenId& token : tokens) token = static_cast<TokenId>(random_.below(3));
        return tokens;
    }
    Retention retention() {
        const auto priority = static_cast<std::int32_t>(random_.below(4));
        const std::int64_t until =
            random_.chance(50) ? Retention::kForever : now_ + random_.below(60);
        return {priority, until, random_.chance(90) ? ReturnTime::kUnknown : returns()};
    }
    std::int64_t returns() {
        const std::int64_t dice = random_.below(4);
        if (dice == 0) return ReturnTime::kNever;
        return dice == 1 ? ReturnTime::kUnknown : now_ + random_.between(-20, 60);
    }
    // Each end was pinned once, or is a root, before and after the call.
    Held insert(const Held& at, const std::vector<TokenId>& tokens) {
        const auto n = static_cast<std::int32_t>(tokens.size()) / kPage;
        Ids ids;
        for (std::int32_t i = 0; i < n; ++i) ids.push_back(next_id_++);
        const Retention asked = retention();
        Held held{};
        std::array<std::vector<kvcore::DuplicatePage>, 2> found;
        for (std::size_t t = 0; t < 2; ++t) {
            held.ends[t] =
                trees_[t].insert(at.ends[t], tokens.data(), ids.data(), n, found[t], asked);
            if (held.ends[t] == at.ends[t]) continue;
            trees_[t].pin(held.ends[t]);
            if (PrefixTree::depth_of(at.ends[t]) > 0) trees_[t].unpin(at.ends[t], false);
        }
        CHECK_EQ(found[0].size(), found[1].size());
        CHECK_EQ(trees_[0].num_cached(), trees_[1].num_cached());
        return held;
    }
    Held roots() { return {{trees_[0].find_namespace(""), trees_[1].find_namespace("")}}; }
    void unpin(const Held& held, bool touch) {
        const std::int64_t back = returns();
        for (std::size_t t = 0; t < 2; ++t) {
            TreeNode* end = held.ends[t];
            if (touch) trees_[t].expect({end, PrefixTree::depth_of(end)}, back);
            trees_[t].unpin(end, touch);
        }
    }
    void put() {
        const Held held = insert(roots(), prompt());
        if (held_.size() < 6 && random_.chance(10)) {
            held_.push_back(held);
        } else {
            unpin(held, true);
        }
    }
    void grow() {
        if (held_.empty()) return;
        Held& held = random_.pick(held_);
        if (PrefixTree::depth_of(held.ends[0]) > 60) return;
        held = insert(held, prompt());
    }
    template <class Do>
    void find(const Do& act) {
        const std::vector<TokenId> tokens = prompt();
        for (PrefixTree& tree : trees_) {
            act(tree, tree.match(tree.find_namespace(""), tokens.data(),
                                 static_cast<std::int64_t>(tokens.size()))
                          .at);
        }
    }
    void hold() {
        if (held_.size() >= 6) return;
        const std::vector<TokenId> tokens = prompt();
        Held held{};
        for (std::size_t t = 0; t < 2; ++t) {
            PrefixTree& tree = trees_[t];
            const auto found = tree.match(tree.find_namespace(""), tokens.data(),
                                          static_cast<std::int64_t>(tokens.size()));
            if (found.at.depth == 0) return;
            held.ends[t] = tree.split(found.at);
            tree.pin(held.ends[t]);
        }
        held_.push_back(held);
    }
    void let_go() {
        if (held_.empty()) return;
        std::swap(random_.pick(held_), held_.back());
        unpin(held_.back(), random_.chance(60));
        held_.pop_back();
    }
    void evict(std::int64_t n) {
        std::array<Ids, 2> ids;
        for (std::size_t t = 0; t < 2; ++t) {
            ids[t].resize(static_cast<std::size_t>(n));
            ids[t].resize(static_cast<std::size_t>(trees_[t].evict(n, ids[t].data())));
        }
        CHECK_EQ(ids[0], ids[1]);
    }

    Random random_;
    std::array<PrefixTree, 2> trees_;
    std::vector<Held> held_;
    BlockId next_id_ = 0;
    std::int64_t now_ = 0;
};

TEST(orders_agree_with_naive_ones) {
    const std::uint64_t seed = check::seed_or(31);
    for (const EvictionOrder order : eviction_orders::kAll) {
        check::note = "order " + std::to_string(static_cast<int>(order));
        Twins(seed, order).run(100'000);
    }
}

}  // namespace

}  // namespace tests::tree::eviction_policies
