// SPDX-License-Identifier: Apache-2.0
// A handle is valid while its pages are cached, and never again.
#include "kvcore/errors.hpp"
#include "support/tree_fixture.hpp"
#include "tree/tree_node.hpp"

namespace tests::tree::prefix_tree_handles {

using kvcore::InvalidHandleError;
using kvcore::PrefixHandle;
using kvcore::PrefixTree;
using kvcore::TreeNode;
using kvcore::TreePosition;
using Ids = TreeFixture::Ids;

namespace {

TEST(handles_are_stale_once_pages_went) {
    TreeFixture t(1);
    t.put({1, 2, 3, 4});
    const PrefixHandle four = t.tree.handle(t.match({1, 2, 3, 4}).at);
    const PrefixHandle two = t.tree.handle(t.match({1, 2}).at);
    CHECK_EQ(four.depth, 4);
    t.tree.unpin(t.pin({1, 2, 3}), true);  // handles survive a split
    CHECK_EQ(t.tree.resolve(four).depth, 4);
    const TreePosition found = t.tree.resolve(two);
    CHECK_EQ(PrefixTree::depth_of(t.tree.split(found)), 2);
    CHECK_EQ(t.evict(1), Ids{3});
    CHECK_THROWS(InvalidHandleError, t.tree.resolve(four));
    // Another page took the place: the depth fits again, but the pages differ.
    TreeNode* end = t.extend(t.pin({1, 2, 3}), {9});
    CHECK_EQ(PrefixTree::depth_of(end), 4);
    CHECK_THROWS(InvalidHandleError, t.tree.resolve(four));
    t.tree.unpin(end, true);
    CHECK_EQ(t.evict(1), Ids{4});
    const PrefixHandle three = t.tree.handle(t.match({1, 2, 3}).at);
    CHECK_EQ(t.evict(3), (Ids{2, 1, 0}));
    t.put({1, 2, 3, 4});  // uses the slots again
    CHECK_THROWS(InvalidHandleError, t.tree.resolve(three));
    CHECK_THROWS(InvalidHandleError, t.tree.resolve(four));
    CHECK_THROWS(InvalidHandleError, t.tree.resolve({12345678, 0, 0}));
    PrefixHandle wrong = t.tree.handle(t.match({1}).at);
    wrong.depth = 5;
    CHECK_THROWS(InvalidHandleError, t.tree.resolve(wrong));
}

// If a generation wrapped, handles from four billion uses ago would be valid again.
TEST(generations_never_come_round) {
    constexpr std::uint32_t kLast = TreeNode::kNoGeneration - 1;
    TreeFixture t(1);
    TreeNode* node = t.put({1, 2, 3});
    const PrefixHandle first = t.tree.handle(t.match({1, 2}).at);
    node->generation = kLast;
    const PrefixHandle last = t.tree.handle(t.match({1, 2}).at);
    CHECK_EQ(t.tree.resolve(last).depth, 2);
    for (std::size_t left = 3; left-- > 0;) {
        CHECK_EQ(t.evict(1).size(), 1);
        CHECK_THROWS(InvalidHandleError, t.tree.resolve(first));
        CHECK_THROWS(InvalidHandleError, t.tree.resolve(last));
        if (left == 0) continue;
        const PrefixHandle none = t.tree.handle(t.match({1}).at);
        CHECK_THROWS(InvalidHandleError, t.tree.resolve(none));
    }
    // The next run gets another slot.
    t.put({1, 2, 3});
    const PrefixHandle next = t.tree.handle(t.match({1, 2}).at);
    CHECK(next.node != first.node);
    CHECK_EQ(t.tree.resolve(next).depth, 2);
}

}  // namespace

}  // namespace tests::tree::prefix_tree_handles
