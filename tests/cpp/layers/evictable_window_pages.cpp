// SPDX-License-Identifier: Apache-2.0
// Idle window pages when more departures happen at once than there is room to record.
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kvcore/eviction.hpp"
#include "kvcore/prefix_tree.hpp"
#include "layers/evictable_window_pages.hpp"
#include "layers/window_policy.hpp"
#include "support/check.hpp"

namespace tests::layers::evictable_window_pages {

using kvcore::BlockId;
using kvcore::EvictableWindowPages;
using kvcore::PrefixTree;
using kvcore::TokenId;
using kvcore::WindowPolicy;

namespace {

/// A tree with one run of four pages, and room for two departures from it.
struct Scene {
    Scene()
        : tree(1, make(policy)),
          end(tree.insert(tree.open_namespace(""), tokens.data(), ids.data(), 4, known)),
          idle(8, *policy) {
        idle.make_room(8, 1);
    }
    static std::unique_ptr<kvcore::EvictionPolicy> make(WindowPolicy*& policy) {
        auto made = std::make_unique<WindowPolicy>(kvcore::make_policy({}, 1));
        policy = made.get();
        return made;
    }
    /// The entries leave in one departure from a prefix of `depth` pages.
    void leave(std::int32_t depth, const std::vector<EvictableWindowPages::Entry>& entries) {
        idle.begin_leaving();
        idle.leave_from({end, depth});
        for (const EvictableWindowPages::Entry entry : entries) idle.keep(entry);
    }

    /// Does the same with a Keeper, all entries at once.
    void leave_together(std::int32_t depth,
                        const std::vector<EvictableWindowPages::Entry>& entries) {
        idle.begin_leaving();
        idle.leave_from({end, depth});
        EvictableWindowPages::Keeper keeper(idle);
        for (const EvictableWindowPages::Entry entry : entries) keeper.keep(entry);
    }
    /// Removes the entries of the departures that end at `depth` and returns them in order.
    std::vector<EvictableWindowPages::Entry> take(std::int32_t depth) {
        const auto ends_there = [&](WindowPolicy::Departure departure) {
            const kvcore::TreePosition at = policy->end_of(departure);
            return at.node != nullptr && at.depth == depth;
        };
        WindowPolicy::Departure departure = 1;
        while (!ends_there(departure)) ++departure;
        std::vector<EvictableWindowPages::Entry> taken;
        while (ends_there(departure)) {
            taken.push_back(idle.first_of(departure));
            idle.remove(taken.back());
        }
        return taken;
    }

    std::vector<TokenId> tokens{1, 2, 3, 4};
    std::vector<BlockId> ids{0, 1, 2, 3};
    std::vector<kvcore::DuplicatePage> known;
    WindowPolicy* policy = nullptr;
    PrefixTree tree;
    kvcore::TreeNode* end;
    EvictableWindowPages idle;
};

TEST(kept_pages_never_lose_by_a_use) {
    Scene scene;
    scene.leave(4, {0, 1});
    scene.leave(2, {2});
    CHECK_EQ(scene.policy->num_free_departures(), 0);
    scene.leave(3, {0, 5});
    CHECK(!scene.idle.is_passed(0));  // the entry stays in its departure
    CHECK(scene.idle.is_passed(5));   // the entry was in no departure
    scene.leave(1, {2});
    CHECK(!scene.idle.is_passed(2));  // its departure ended and made room for this one
    CHECK_EQ(scene.idle.first_passed(), 5U);
    CHECK_EQ(scene.policy->num_departures(), 2U);
}

using Entries = std::vector<EvictableWindowPages::Entry>;

TEST(entries_that_are_kept_together_keep_their_order) {
    Scene scene;
    scene.leave_together(4, {0, 1, 2, 3, 4, 5});
    scene.leave_together(2, {1, 2, 7, 4, 3});  // a stretch, a new entry, and two in reverse order
    CHECK(scene.take(2) == Entries({1, 2, 7, 4, 3}));
    CHECK(scene.take(4) == Entries({0, 5}));
    CHECK_EQ(scene.policy->num_departures(), 0U);
}

TEST(a_departure_that_is_kept_again_ends) {
    Scene scene;
    scene.leave_together(4, {0, 1, 2});
    scene.leave_together(3, {0, 1, 2});
    CHECK_EQ(scene.policy->num_departures(), 1U);
    scene.idle.pass(5);
    scene.idle.pass(6);
    scene.leave_together(4, {2, 5, 6});
    CHECK_EQ(scene.idle.first_passed(), EvictableWindowPages::kNone);
    CHECK(scene.take(3) == Entries({0, 1}));
    CHECK(scene.take(4) == Entries({2, 5, 6}));
}

// A hit may read a useless page again. Its departure takes the page from the useless list and
// leaves the other pages.
TEST(useless_pages_are_kept_together) {
    Scene scene;
    for (const EvictableWindowPages::Entry entry : {0U, 1U, 2U, 3U}) scene.idle.give_up(entry);
    scene.leave_together(4, {1, 2});
    CHECK_EQ(scene.idle.first_useless(), 0U);
    scene.idle.remove(0);
    CHECK_EQ(scene.idle.first_useless(), 3U);
    scene.leave_together(2, {3});
    CHECK_EQ(scene.idle.first_useless(), EvictableWindowPages::kNone);
    CHECK(scene.take(4) == Entries({1, 2}));
    scene.idle.give_up(3);  // removes the last entry of the departure, which ends
    CHECK_EQ(scene.policy->num_departures(), 0U);
    CHECK_EQ(scene.idle.first_useless(), 3U);
}

// The result is the same as one by one: a page of a departure never moves to the passed pages.
TEST(entries_without_room_stay_in_their_departure) {
    Scene scene;
    scene.leave_together(4, {0, 1});
    scene.leave_together(2, {2, 3});
    scene.leave_together(3, {0, 1, 5});
    CHECK_EQ(scene.idle.first_passed(), 5U);
    CHECK(scene.take(4) == Entries({0, 1}));
    CHECK(scene.take(2) == Entries({2, 3}));
}

}  // namespace

}  // namespace tests::layers::evictable_window_pages
