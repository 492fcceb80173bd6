// SPDX-License-Identifier: Apache-2.0
#include "level/level.hpp"

#include <stdexcept>
#include <vector>

#include "kvcore/errors.hpp"
#include "support/check.hpp"
#include "support/plain_level.hpp"
#include "support/request.hpp"

namespace tests::level::level {

using kvcore::Level;
using kvcore::PrefixTree;
using kvcore::TreeNode;

namespace {

using Ids = std::vector<BlockId>;

Ids take(Level& store, std::int64_t n) {
    Ids ids(static_cast<std::size_t>(n));
    ids.resize(static_cast<std::size_t>(store.take(n, ids.data())));
    return ids;
}

std::int32_t match(const Level& store, const Tokens& tokens, const char* name = "") {
    return store.find(name, tokens.data(), count(tokens)).depth;
}

TreeNode* publish(PlainLevel& store, TreeNode* place, const Tokens& tokens, const Ids& ids) {
    return store.publish(place, tokens.data(), ids.data(), static_cast<std::int32_t>(count(ids)));
}

/// Store pages of two tokens and release them.
Ids put(PlainLevel& store, const Tokens& tokens, const char* name = "") {
    const Ids ids = take(store, count(tokens) / 2);
    store.release(publish(store, store.open(name), tokens, ids));
    return ids;
}

TEST(sizes_are_checked) {
    CHECK_THROWS(std::invalid_argument, PlainLevel(0, 2));
    CHECK_THROWS(std::invalid_argument, PlainLevel(4, 0));
}

TEST(pages_are_found_once_they_are_published) {
    PlainLevel store(4, 2);
    CHECK_EQ(match(store, {1, 2, 3, 4}), 0);
    const Ids ids = take(store, 2);
    store.check_integrity(2);
    CHECK_THROWS(kvcore::IntegrityError, store.check_integrity(1));
    CHECK_EQ(match(store, {1, 2, 3, 4}), 0);
    TreeNode* place = publish(store, store.open(""), {1, 2, 3, 4}, ids);
    CHECK_EQ(PrefixTree::depth_of(place), 2);
    CHECK_EQ(match(store, {1, 2, 3, 4, 5}), 2);
    CHECK_EQ(match(store, {1, 2, 9, 9}), 1);
    CHECK_EQ(match(store, {1, 2, 3, 4}, "other"), 0);
    Ids found(2);
    store.tree.copy_pages({place, 2}, 0, found.data());
    CHECK_EQ(found, ids);
    CHECK_EQ(store.tree.tokens_of({place, 2}, 1), (Tokens{3, 4}));
    store.release(place);
    CHECK_EQ(store.num_cached(), 2);
    store.check_integrity(0);
}

TEST(pages_that_did_not_arrive_are_free_again) {
    PlainLevel store(4, 2);
    const Ids ids = take(store, 3);
    store.give_back(ids.data(), 3);
    CHECK_EQ(store.num_available(), 4);
    store.check_integrity(0);
}

TEST(equal_pages_that_arrived_meanwhile_are_kept_once) {
    PlainLevel store(8, 2);
    const Ids late = take(store, 3);
    TreeNode* place = store.open("");
    put(store, {1, 2, 3, 4});
    place = publish(store, place, {1, 2, 3, 4, 5, 6}, late);
    CHECK_EQ(PrefixTree::depth_of(place), 3);
    CHECK_EQ(store.num_cached(), 3);
    CHECK_EQ(store.num_available(), 5);
    store.release(place);
    store.check_integrity(0);
}

TEST(a_place_keeps_its_pages_and_moves_both_ways) {
    PlainLevel store(4, 2);
    put(store, {1, 2, 3, 4, 5, 6});
    const Tokens tokens{1, 2, 3, 4};
    TreeNode* place = store.advance(store.open(""), tokens.data(), 4);
    CHECK_EQ(PrefixTree::depth_of(place), 2);
    CHECK(store.advance(place, tokens.data(), 4) == place);
    CHECK_EQ(store.num_available(), 2);
    CHECK_EQ(count(take(store, 4)), 2);
    CHECK_EQ(match(store, {1, 2, 3, 4, 5, 6}), 2);
    place = store.retreat(place, 1);
    CHECK_EQ(store.num_available(), 1);
    CHECK_EQ(count(take(store, 4)), 1);
    CHECK_EQ(count(take(store, 1)), 0);
    CHECK_EQ(match(store, {1, 2, 3, 4}), 1);
    store.release(place);
    store.check_integrity(3);
}

TEST(a_place_that_moved_on_keeps_no_page_once_it_is_released) {
    PlainLevel store(4, 2);
    put(store, {1, 2, 3, 4, 5, 6});
    const Tokens tokens{1, 2, 3, 4};
    TreeNode* place = store.advance(store.open(""), tokens.data(), 2);
    CHECK_EQ(store.num_available(), 3);
    place = store.advance(place, tokens.data() + 2, 2);
    CHECK_EQ(PrefixTree::depth_of(place), 2);
    CHECK_EQ(store.num_available(), 2);
    store.release(place);
    CHECK_EQ(store.num_available(), 4);
    CHECK_EQ(count(take(store, 4)), 4);
    store.check_integrity(4);
}

TEST(the_oldest_page_goes_first_and_a_place_let_go_is_young) {
    PlainLevel store(4, 2);
    put(store, {1, 2, 3, 4});
    put(store, {5, 6, 7, 8});
    store.release(store.hold(store.find("", Tokens{1, 2, 3, 4}.data(), 4)));
    const Ids ids = take(store, 1);
    CHECK_EQ(match(store, {5, 6, 7, 8}), 1);
    CHECK_EQ(match(store, {1, 2, 3, 4}), 2);
    store.give_back(ids.data(), 1);
}

TEST(reset_forgets_what_nobody_holds) {
    PlainLevel store(8, 2);
    put(store, {1, 2, 3, 4});
    put(store, {9, 9}, "salt");
    TreeNode* place = store.hold(store.find("", Tokens{1, 2}.data(), 2));
    store.evict_all();
    CHECK_EQ(match(store, {1, 2, 3, 4}), 1);
    CHECK_EQ(match(store, {9, 9}, "salt"), 0);
    store.check_integrity(0);
    store.release(place);
    store.evict_all();
    CHECK_EQ(store.num_cached(), 0);
    store.check_integrity(0);
}

}  // namespace

}  // namespace tests::level::level
