// SPDX-License-Identifier: Apache-2.0
// The policy "hinted": runs by the time at which their sessions return.
#include "tree/policies/hinted.hpp"

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "support/check.hpp"
#include "support/tree_fixture.hpp"
#include "tree/tree_node.hpp"

namespace tests::tree::hinted {

using kvcore::Retention;
using kvcore::ReturnTime;
using kvcore::TreeNode;
using Ids = TreeFixture::Ids;

namespace {

constexpr std::int64_t kGrace = 10;

/// A tree of one token a page, whose page ids equal the tokens.
struct Hinted : TreeFixture {
    Hinted() : TreeFixture(1, std::make_unique<kvcore::HintedPolicy>(kGrace)) {}

    TreeNode* take(const std::vector<kvcore::TokenId>& tokens, const Retention& retention = {}) {
        std::vector<kvcore::DuplicatePage> found;
        TreeNode* end = tree.insert(tree.open_namespace(""), tokens.data(), tokens.data(),
                                    static_cast<std::int32_t>(tokens.size()), found, retention);
        tree.pin(end);
        return end;
    }
    void release(TreeNode* end, std::int64_t returns) {
        tree.expect({end, kvcore::PrefixTree::depth_of(end)}, returns);
        tree.unpin(end, true);
    }
    void serve(const std::vector<kvcore::TokenId>& tokens, std::int64_t returns) {
        release(take(tokens), returns);
    }
};

TEST(closed_sessions_go_first_and_near_returns_last) {
    Hinted t;
    t.serve({1}, 50);
    t.serve({2}, ReturnTime::kUnknown);
    t.serve({3}, ReturnTime::kNever);
    t.serve({4}, 70);
    t.serve({5}, ReturnTime::kUnknown);
    t.serve({6}, ReturnTime::kNever);
    CHECK_EQ(t.evict(6), (Ids{3, 6, 2, 5, 4, 1}));
}

TEST(the_latest_release_decides_for_a_run_of_one_session) {
    Hinted t;
    t.serve({1, 2}, 50);
    t.serve({3}, ReturnTime::kUnknown);
    t.serve({1, 2}, ReturnTime::kNever);  // before its time: the session is closed
    CHECK_EQ(t.evict(3), (Ids{2, 1, 3}));
    t.serve({4}, ReturnTime::kNever);
    t.serve({5}, ReturnTime::kUnknown);
    t.serve({4}, 90);  // opened again
    CHECK_EQ(t.evict(2), (Ids{5, 4}));
}

TEST(a_release_without_a_hint_uses_up_the_hint) {
    Hinted t;
    t.serve({1}, 50);
    t.serve({2}, ReturnTime::kUnknown);
    t.serve({1}, ReturnTime::kUnknown);  // the return that the hint announced
    t.serve({3}, ReturnTime::kUnknown);
    CHECK_EQ(t.evict(3), (Ids{2, 1, 3}));
}

TEST(a_shared_run_keeps_the_earliest_return) {
    Hinted t;
    t.serve({1, 2}, 20);
    t.serve({1, 3}, 60);
    t.serve({1, 4}, ReturnTime::kNever);
    t.serve({5}, 30);
    // Page 1 returns at 20, later than all pages that continue it.
    CHECK_EQ(t.evict(5), (Ids{4, 3, 5, 2, 1}));
}

TEST(a_shared_run_is_closed_after_all_its_sessions_are_closed) {
    Hinted t;
    t.serve({1, 2}, ReturnTime::kNever);
    t.serve({1, 3}, ReturnTime::kNever);
    t.serve({4}, ReturnTime::kUnknown);
    CHECK_EQ(t.evict(4), (Ids{2, 3, 1, 4}));
    t.serve({1, 2}, ReturnTime::kUnknown);
    t.serve({1, 3}, ReturnTime::kNever);
    t.serve({4}, ReturnTime::kNever);
    CHECK_EQ(t.evict(4), (Ids{3, 4, 2, 1}));
}

TEST(a_holder_in_the_middle_of_a_run_shares_it) {
    Hinted t;
    t.serve({1, 2, 3}, 20);
    t.serve({1, 2}, ReturnTime::kNever);  // cuts the run; page 3 is another session's
    t.serve({4}, ReturnTime::kUnknown);
    CHECK_EQ(t.evict(4), (Ids{4, 3, 2, 1}));
}

TEST(a_return_that_is_over_by_more_than_the_grace_is_no_hint) {
    Hinted t;
    t.tree.advance(0);
    t.serve({1}, 20);
    t.serve({2}, ReturnTime::kUnknown);
    t.serve({3}, 25);
    t.tree.advance(30);  // 20 and the grace
    CHECK_EQ(t.evict(1), Ids{2});
    t.tree.advance(31);
    t.serve({4}, ReturnTime::kUnknown);
    CHECK_EQ(t.evict(3), (Ids{1, 4, 3}));
    t.serve({5}, 20);  // over before it is given
    t.serve({6}, ReturnTime::kUnknown);
    CHECK_EQ(t.evict(2), (Ids{5, 6}));
}

TEST(a_shared_run_forgets_a_return_that_is_over) {
    Hinted t;
    t.serve({1, 2}, 20);
    t.serve({1, 3}, 40);  // page 1 has 20
    t.tree.advance(31);
    t.serve({1, 4}, 60);  // page 1 has 60 now
    t.serve({5}, 50);
    CHECK_EQ(t.evict(5), (Ids{2, 4, 5, 3, 1}));
}

TEST(an_earlier_time_changes_nothing) {
    Hinted t;
    t.tree.advance(31);
    t.tree.advance(5);
    t.serve({1}, 20);  // over by 11
    t.serve({2}, ReturnTime::kUnknown);
    CHECK_EQ(t.evict(2), (Ids{1, 2}));
}

TEST(times_at_both_ends_are_in_order) {
    constexpr std::int64_t kFirst = std::numeric_limits<std::int64_t>::min();
    Hinted t;
    t.serve({1}, kFirst);
    t.serve({2}, ReturnTime::kLatest);
    t.serve({3}, -1);
    t.serve({4}, 0);
    t.tree.advance(kFirst + 1);
    CHECK_EQ(t.evict(4), (Ids{2, 4, 3, 1}));
}

TEST(pages_after_a_hint_are_a_separate_run) {
    Hinted t;
    t.serve({1}, 50);
    TreeNode* end = t.take({1});
    std::vector<kvcore::DuplicatePage> found;
    const kvcore::TokenId next = 2;
    TreeNode* grown = t.tree.insert(end, &next, &next, 1, found);
    CHECK(grown != end);
    t.tree.pin(grown);
    t.tree.unpin(end, false);
    t.tree.unpin(grown, true);  // a holder that gives no hint
    t.serve({3}, 70);
    CHECK_EQ(t.evict(3), (Ids{2, 3, 1}));
}

TEST(a_use_without_a_release_keeps_the_hint) {
    Hinted t;
    t.serve({1}, 50);
    t.serve({2}, 60);
    TreeNode* end = t.take({1});
    t.tree.unpin(end, false);
    CHECK_EQ(t.evict(2), (Ids{2, 1}));
}

TEST(pages_arrive_with_a_hint) {
    Hinted t;
    for (const std::int64_t returns : {ReturnTime::kNever, std::int64_t{50}}) {
        const auto token = static_cast<kvcore::TokenId>(returns == 50 ? 1 : 2);
        t.tree.unpin(t.take({token}, {50, Retention::kForever, returns}), true);
        const auto at = t.match({token}).at;
        CHECK_EQ(t.tree.policy().retention(at.node->id).returns, returns);
    }
    t.serve({3}, ReturnTime::kUnknown);
    CHECK_EQ(t.evict(3), (Ids{2, 3, 1}));
}

TEST(a_forgotten_run_takes_no_hint) {
    Hinted t;
    TreeNode* end = t.take({1});
    auto branches = t.tree.make_branches();
    t.tree.forget_all(branches);
    t.release(end, 50);
    t.serve({2}, ReturnTime::kUnknown);
    t.serve({3}, ReturnTime::kNever);
    t.tree.advance(100);
    CHECK_EQ(t.evict(3), (Ids{3, 2}));
}

}  // namespace

}  // namespace tests::tree::hinted
