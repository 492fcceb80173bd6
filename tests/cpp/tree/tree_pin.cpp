// SPDX-License-Identifier: Apache-2.0
#include "tree/pins.hpp"

#include <type_traits>
#include <utility>

#include "support/tree_fixture.hpp"

namespace tests::tree::tree_pin {

using kvcore::TreeNode;
using kvcore::TreePin;

static_assert(!std::is_copy_constructible_v<TreePin> && !std::is_copy_assignable_v<TreePin>);
static_assert(std::is_nothrow_move_constructible_v<TreePin>);
static_assert(std::is_nothrow_move_assignable_v<TreePin>);

namespace {

TEST(a_pin_lasts_as_long_as_its_holder) {
    TreeFixture t(1);
    TreeNode* end = t.put({1, 2, 3});
    t.check_counts(3, 3, 1);
    {
        const TreePin pin(t.tree, end);
        CHECK(pin && pin.node() == end);
        t.check_counts(3, 0, 1);
    }
    t.check_counts(3, 3, 1);
    const TreePin none;
    CHECK(!none && none.node() == nullptr);
}

TEST(a_pin_moves_and_is_given_back_once) {
    TreeFixture t(1);
    TreeNode* a = t.put({1, 2});
    TreeNode* b = t.put({5});
    TreePin first(t.tree, a);
    TreePin second(std::move(first));
    CHECK_EQ(second.node(), a);
    t.check_counts(3, 1, 2);
    TreePin third(t.tree, b);
    t.check_counts(3, 0, 2);
    third = std::move(second);  // releases b
    CHECK_EQ(third.node(), a);
    t.check_counts(3, 1, 2);
    TreePin& same = third;
    third = std::move(same);
    t.check_counts(3, 1, 2);
    third.reset();
    third.reset();
    t.check_counts(3, 3, 2);
}

// A use moves its pages to the end of the eviction order. Returning a pin without a use does not.
TEST(the_end_of_a_use_is_noticed) {
    for (const bool is_used : {false, true}) {
        TreeFixture t(1);
        TreeNode* oldest = t.put({1});
        t.put({2});
        TreePin pin(t.tree, oldest);
        is_used ? pin.end_use() : pin.reset();
        CHECK(!pin);
        pin.end_use();
        kvcore::BlockId first = 0;
        kvcore::BlockId expected = 0;
        TreeNode* root = t.tree.find_namespace("");
        const kvcore::TokenId token = is_used ? 2 : 1;
        t.tree.copy_pages(t.tree.match(root, &token, 1).at, 0, &expected);
        CHECK_EQ(t.tree.evict(1, &first), 1);
        CHECK_EQ(first, expected);
    }
}

TEST(a_released_pin_is_the_callers) {
    TreeFixture t(1);
    TreeNode* end = t.put({1, 2});
    {
        TreePin pin(t.tree, end);
        CHECK_EQ(pin.release(), end);
        CHECK(pin.release() == nullptr);
    }
    t.check_counts(2, 0, 1);
    t.tree.unpin(end, true);
    t.check_counts(2, 2, 1);
}

TEST(a_pin_that_goes_is_no_use_of_the_pages) {
    TreeFixture t(1);
    TreeNode* older = t.put({1});
    t.put({2});
    {
        const TreePin pin(t.tree, older);
    }
    CHECK_EQ(t.evict(1), (TreeFixture::Ids{0}));
}

TEST(an_empty_namespace_goes_with_its_last_pin) {
    TreeFixture t(1);
    {
        const TreePin pin(t.tree, t.tree.open_namespace("salt"));
        CHECK(t.tree.find_namespace("salt") == pin.node());
    }
    CHECK(t.tree.find_namespace("salt") == nullptr);
}

}  // namespace

}  // namespace tests::tree::tree_pin
