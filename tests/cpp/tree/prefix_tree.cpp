// SPDX-License-Identifier: Apache-2.0
// The effect of each verb. Random traffic is in prefix_tree_random.cpp.
#include <memory>
#include <stdexcept>

#include "kvcore/errors.hpp"
#include "support/tree_fixture.hpp"

namespace tests::tree::prefix_tree {

using kvcore::InvalidHandleError;
using kvcore::PrefixMatch;
using kvcore::PrefixTree;
using kvcore::TreeNode;
using Ids = TreeFixture::Ids;
using Tokens = TreeFixture::Tokens;

namespace {

TEST(an_empty_tree_has_nothing) {
    CHECK_THROWS(std::invalid_argument, PrefixTree(0));
    TreeFixture t(2);
    CHECK_EQ(t.tree.page_size(), 2);
    CHECK_EQ(t.depth({1, 2, 3, 4}), 0);
    CHECK_EQ(t.match({1, 2, 3}, true).partial_tokens, 0);
    CHECK_EQ(t.evict(5), Ids{});
    t.check_counts(0, 0, 0);
}

TEST(a_match_counts_whole_pages) {
    TreeFixture t(3);
    t.put({1, 2, 3, 4, 5, 6, 7, 8, 9});
    CHECK_EQ(t.pages({1, 2, 3, 4, 5, 6, 7, 8, 9, 10}), (Ids{0, 1, 2}));
    CHECK_EQ(t.pages({1, 2, 3, 4, 5, 6, 7, 8}), (Ids{0, 1}));
    CHECK_EQ(t.pages({1, 2, 3, 4, 5, 0, 7, 8, 9}), Ids{0});
    CHECK_EQ(t.pages({1, 2}), Ids{});
    CHECK_EQ(t.pages({2, 2, 3, 4, 5, 6}), Ids{});
    t.check_counts(3, 3, 1);
}

TEST(a_match_goes_on_below_any_node) {
    TreeFixture t(1);
    t.put({1, 2, 3});
    t.put({1, 2, 4, 5});
    TreeNode* fork = t.tree.split(t.match({1, 2}).at);
    const Tokens rest{4, 5, 6};
    const PrefixMatch below = t.tree.match(fork, rest.data(), 3);
    CHECK_EQ(below.at.depth, 4);
    Ids tail(2);
    t.tree.copy_pages(below.at, 2, tail.data());
    CHECK_EQ(tail, (Ids{5, 6}));
}

TEST(splitting_moves_nothing) {
    TreeFixture t(2);
    TreeNode* end = t.hold({1, 1, 2, 2, 3, 3, 4, 4});
    const PrefixMatch three = t.match({1, 1, 2, 2, 3, 3});
    const PrefixMatch one = t.match({1, 1});
    TreeNode* head = t.tree.split(three.at);
    t.check_counts(4, 0, 2);
    CHECK(head != end);
    CHECK_EQ(PrefixTree::depth_of(head), 3);
    CHECK_EQ(PrefixTree::depth_of(end), 4);
    CHECK_EQ(t.tree.split(three.at), head);  // already a run's end
    // Positions from before the split stay valid.
    TreeNode* first = t.tree.split(one.at);
    t.check_counts(4, 0, 3);
    CHECK_EQ(PrefixTree::position(end, 1).node, first);
    CHECK_EQ(PrefixTree::position(end, 3).node, head);
    CHECK_EQ(t.pages({1, 1, 2, 2, 3, 3, 4, 4}), (Ids{0, 1, 2, 3}));
    TreeNode* root = t.tree.open_namespace("");
    CHECK_EQ(t.tree.split({root, 0}), root);
    t.tree.unpin(end, true);
    t.check_counts(4, 4, 3);
}

TEST(repeated_pages_are_reported) {
    TreeFixture t(1);
    t.put({1, 2, 3, 4});
    TreeNode* end = t.hold({1, 2, 9, 9});
    CHECK_EQ(t.duplicates.size(), 2);
    CHECK_EQ(t.duplicates[0].index, 0);
    CHECK_EQ(t.duplicates[0].cached, 0);
    CHECK_EQ(t.duplicates[1].index, 1);
    CHECK_EQ(t.duplicates[1].cached, 1);
    CHECK_EQ(t.pages({1, 2, 9, 9}), (Ids{0, 1, 6, 7}));
    t.check_counts(6, 2, 3);
    t.tree.unpin(end, true);

    // All pages are cached already, up to the inside of a run, which is split.
    TreeNode* inside = t.hold({1, 2, 3});
    CHECK_EQ(t.duplicates.size(), 3);
    CHECK_EQ(PrefixTree::depth_of(inside), 3);
    t.check_counts(6, 3, 4);

    // The insertion starts at the end of the sequence's own run.
    TreeNode* longer = t.extend(inside, {4, 5});
    CHECK_EQ(t.duplicates.size(), 1);
    CHECK_EQ(t.duplicates[0].index, 0);
    CHECK_EQ(t.duplicates[0].cached, 3);
    CHECK_EQ(PrefixTree::depth_of(longer), 5);
    t.check_counts(7, 2, 5);
}

// A growing sequence commits pages one by one into the spare room of its run.
TEST(a_run_of_ones_own_grows_in_place) {
    TreeFixture t(2);
    TreeNode* end = t.hold({1, 1, 2, 2});
    end = t.extend(end, {3, 3});
    const std::int64_t nodes = t.tree.num_nodes();
    TreeNode* before = end;
    end = t.extend(end, {4, 4});
    CHECK_EQ(end, before);
    CHECK_EQ(t.tree.num_nodes(), nodes);
    CHECK_EQ(t.pages({1, 1, 2, 2, 3, 3, 4, 4}), (Ids{0, 1, 2, 3}));

    // A second holder ends here: the next pages get a run of their own.
    t.tree.pin(end);
    TreeNode* below = t.extend(end, {5, 5});
    CHECK(below != end);
    CHECK_EQ(PrefixTree::depth_of(end), 4);
    t.tree.unpin(end, true);
    t.check_counts(5, 0, nodes + 1);

    // The same below a run with children.
    TreeNode* other = t.pin({1, 1, 2, 2, 3, 3, 4, 4});
    CHECK_EQ(other, end);
    TreeNode* sibling = t.extend(other, {6, 6});
    t.check_counts(6, 0, nodes + 2);
    t.tree.unpin(below, true);
    t.tree.unpin(sibling, true);
    t.tree.shrink(sibling);
    t.tree.shrink(below);
    t.check_counts(6, 6, nodes + 2);
    CHECK_EQ(t.evict(6), (Ids{4, 5, 3, 2, 1, 0}));
}

TEST(long_runs_grow_page_by_page) {
    for (const std::int32_t page_size : {1, 2, 3, 16}) {
        TreeFixture t(page_size);
        Tokens all;
        TreeNode* end = nullptr;
        for (std::int32_t page = 0; page < 2000; ++page) {
            Tokens tokens(static_cast<std::size_t>(page_size), page);
            all.insert(all.end(), tokens.begin(), tokens.end());
            end = page == 0 ? t.hold(tokens) : t.extend(end, tokens);
        }
        CHECK_EQ(t.depth(all), 2000);
        CHECK(t.tree.num_nodes() < 100);
        t.tree.unpin(end, true);
        t.tree.shrink(end);
        for (std::int32_t page = 2000; page-- > 0;) CHECK_EQ(t.evict(1), Ids{page});
        t.check_counts(0, 0, 0);
    }
}

TEST(a_pin_protects_what_lies_above) {
    TreeFixture t(1);
    t.put({1, 2, 3, 4});
    t.put({1, 2, 5});
    TreeNode* node = t.pin({1, 2, 3});
    t.check_counts(5, 2, 4);
    CHECK(t.tree.is_protected(t.match({1}).at));
    CHECK(t.tree.is_protected(t.match({1, 2, 3}).at));
    CHECK(!t.tree.is_protected(t.match({1, 2, 3, 4}).at));
    CHECK_EQ(t.tree.num_unprotected(t.match({1, 2, 3, 4}).at), 1);
    CHECK_EQ(t.tree.num_unprotected(t.match({1, 2, 3}).at), 0);
    CHECK_EQ(t.evict(9), (Ids{3, 6}));
    t.tree.pin(node);
    t.tree.unpin(node, true);
    t.check_counts(3, 0, 2);
    CHECK_EQ(t.evict(1), Ids{});
    t.tree.unpin(node, true);
    t.check_counts(3, 3, 2);
    CHECK_EQ(t.tree.num_unprotected(t.match({1, 2, 3}).at), 3);
    CHECK_EQ(t.evict(2), (Ids{2, 1}));
    CHECK_EQ(t.pages({1, 2, 3}), Ids{0});
}

// A count never includes pins that start and end between two counts.
TEST(protection_counted_late_is_right) {
    TreeFixture t(1);
    TreeNode* a = t.put({1, 2, 3});
    TreeNode* b = t.put({1, 7});
    for (int i = 0; i < 3; ++i) {
        t.tree.pin(a);
        t.tree.pin(b);
        t.tree.unpin(a, false);
    }
    t.check_counts(4, 2, 3);
    for (int i = 0; i < 3; ++i) t.tree.unpin(b, true);
    t.tree.pin(t.tree.split(t.match({1, 2}).at));
    t.tree.unpin(t.match({1, 2}).at.node, true);
    t.check_counts(4, 4, 4);
}

// More pins than the list of uncounted pins can hold.
TEST(many_pins_are_counted) {
    TreeFixture t(1);
    std::vector<TreeNode*> nodes;
    for (std::int32_t i = 0; i < 1500; ++i) nodes.push_back(t.put({i, 7}));
    for (TreeNode* node : nodes) t.tree.pin(node);
    t.check_counts(3000, 0, 1500);
    for (std::size_t i = 0; i < 1400; ++i) t.tree.unpin(nodes[i], true);
    t.check_counts(3000, 2800, 1500);
}

TEST(a_node_without_pins_is_not_unpinned) {
    TreeFixture t(1);
    TreeNode* older = t.put({1, 2});
    t.put({3});
    CHECK_THROWS(InvalidHandleError, t.tree.unpin(older, true));
    t.tree.pin(older);
    t.tree.unpin(older, false);
    CHECK_THROWS(InvalidHandleError, t.tree.unpin(older, true));
    CHECK_THROWS(InvalidHandleError, t.tree.unpin(t.tree.open_namespace(""), true));
    t.check_counts(3, 3, 2);
    TreeNode* root = t.tree.open_namespace("salt");
    CHECK_THROWS(InvalidHandleError, t.tree.unpin(root, true));
    CHECK_EQ(t.tree.find_namespace("salt"), root);
    CHECK_EQ(t.evict(1), Ids{1});  // opening a namespace is not a use of its pages
}

TEST(least_recently_released_goes_first) {
    TreeFixture t(1);
    t.put({1, 2});
    t.put({3, 4});
    t.put({5, 6});
    CHECK_EQ(t.evict(1), Ids{1});  // evicts the tail before the head
    TreeNode* used = t.pin({1});
    t.tree.unpin(used, true);
    CHECK_EQ(t.evict(3), (Ids{3, 2, 5}));
    CHECK_EQ(t.evict(9), (Ids{4, 0}));
}

TEST(a_parent_goes_right_after_its_last_child) {
    TreeFixture t(1);
    t.put({1, 2, 3});  // 0 1 2
    t.put({9});        // 3
    t.put({1, 2, 4});  // .. .. 6
    CHECK_EQ(t.evict(1), Ids{2});
    CHECK_EQ(t.evict(1), Ids{3});
    CHECK_EQ(t.evict(3), (Ids{6, 1, 0}));
}

TEST(a_use_of_the_head_leaves_the_tail_its_age) {
    TreeFixture t(1);
    t.put({1, 2, 3, 4});  // 0 1 2 3
    t.put({8, 9});        // 4 5
    TreeNode* head = t.pin({1, 2});
    t.tree.unpin(head, true);
    CHECK_EQ(t.evict(3), (Ids{3, 2, 5}));
    CHECK_EQ(t.evict(9), (Ids{4, 1, 0}));
}

// Moving a pin to a lower node, or holding for a moment, is not a use.
TEST(unpinning_without_a_use_keeps_the_age) {
    TreeFixture t(1);
    TreeNode* old = t.put({1});
    t.put({2});
    t.tree.pin(old);
    t.tree.unpin(old, false);
    CHECK_EQ(t.evict(1), Ids{0});
    // The same if an eviction has skipped the run meanwhile.
    TreeNode* next = t.match({2}).at.node;
    t.put({3});
    t.tree.pin(next);
    CHECK_EQ(t.evict(1), Ids{2});
    t.put({4});
    t.tree.unpin(next, false);
    CHECK_EQ(t.evict(2), (Ids{1, 3}));
}

TEST(the_guard_keeps_the_start_of_a_run) {
    TreeFixture t(1);
    TreeNode* oldest = t.put({1, 2, 3, 4});  // 0 1 2 3
    t.put({7, 8});                           // 4 5
    CHECK_EQ(t.evict(3, {oldest, 2}), (Ids{3, 2, 5}));
    CHECK_EQ(t.evict(1, {oldest, 2}), Ids{4});
    CHECK_EQ(t.evict(1, {oldest, 2}), Ids{});
    t.put({9});                            // 6
    CHECK_EQ(t.evict(3), (Ids{1, 0, 6}));  // the guarded run has kept its place
    t.check_counts(0, 0, 0);
}

TEST(a_partial_page_is_the_best_continuation) {
    TreeFixture t(4);
    t.put({1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9});
    PrefixMatch found = t.match({1, 2, 3, 4, 5, 6, 0, 0}, true);  // ends inside the run
    CHECK_EQ(found.at.depth, 1);
    CHECK_EQ(found.partial.depth, 2);
    CHECK_EQ(found.partial_tokens, 2);
    found = t.match({1, 2, 3}, true);  // fewer tokens than a page
    CHECK_EQ(found.at.depth, 0);
    CHECK_EQ(found.partial_tokens, 3);
    CHECK_EQ(t.match({0, 2, 3}, true).partial_tokens, 0);
    CHECK_EQ(t.match({1, 2, 3, 4}, true).partial_tokens, 0);  // no token is left
    CHECK_EQ(t.match({1, 2, 0, 4}, false).partial_tokens, 0);

    t.put({1, 2, 3, 4, 5, 6, 7, 0});  // siblings below {1, 2, 3, 4}
    t.put({1, 2, 3, 4, 5, 0, 0, 0});
    found = t.match({1, 2, 3, 4, 5, 6, 7, 7}, true);
    CHECK_EQ(found.partial_tokens, 3);
    found = t.match({1, 2, 3, 4, 5, 0, 0}, true);
    CHECK_EQ(found.partial_tokens, 3);
    kvcore::BlockId source = -1;
    t.tree.copy_pages(found.partial, found.partial.depth - 1, &source);
    CHECK_EQ(source, 6);  // ids 0-2; then 3 (a duplicate) and 4; then 5 and 6
    CHECK_EQ(t.match({1, 2, 3, 4, 6}, true).partial_tokens, 0);
}

TEST(namespaces_share_nothing_and_vanish_when_empty) {
    TreeFixture t(1);
    CHECK(t.tree.find_namespace("") != nullptr);
    CHECK(t.tree.find_namespace("a") == nullptr);
    t.put({1, 2}, "a");
    t.put({1}, "b");
    CHECK_EQ(t.depth({1, 2}), 0);
    CHECK_EQ(t.match({1, 2}, false, "a").at.depth, 2);
    CHECK_EQ(t.match({1, 2}, false, "b").at.depth, 1);
    CHECK_EQ(t.evict(2), (Ids{1, 0}));
    CHECK(t.tree.find_namespace("a") == nullptr);
    CHECK(t.tree.find_namespace("b") != nullptr);

    TreeNode* root = t.tree.open_namespace("held");
    t.tree.pin(root);
    CHECK_EQ(t.tree.find_namespace("held"), root);
    t.tree.unpin(root, true);
    CHECK(t.tree.find_namespace("held") == nullptr);

    // While a caller holds the root, the root outlives its last page.
    root = t.tree.open_namespace("b");
    t.tree.pin(root);
    CHECK_EQ(t.evict(1), Ids{2});
    CHECK_EQ(t.tree.find_namespace("b"), root);
    t.tree.unpin(root, false);
    CHECK(t.tree.find_namespace("b") == nullptr);
    CHECK(t.tree.find_namespace("") != nullptr);
    t.check_counts(0, 0, 0);
}

}  // namespace

}  // namespace tests::tree::prefix_tree
