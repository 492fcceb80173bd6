// SPDX-License-Identifier: Apache-2.0
// Idle pages of windows where more leave at once than there is room to remember.
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "check.hpp"
#include "groups/idle_pages.hpp"
#include "groups/window_policy.hpp"
#include "kvcore/eviction_policies.hpp"
#include "kvcore/prefix_tree.hpp"

using kvcore::BlockId;
using kvcore::IdlePages;
using kvcore::PrefixTree;
using kvcore::TokenId;
using kvcore::WindowPolicy;

namespace {

/// A tree of one run of four pages, and room for two departures from it.
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
    /// These leave together, from a prefix of so many pages.
    void leave(std::int32_t depth, const std::vector<IdlePages::Entry>& entries) {
        idle.begin_leaving();
        idle.leave_from({end, depth});
        for (const IdlePages::Entry entry : entries) idle.keep(entry);
    }

    std::vector<TokenId> tokens{1, 2, 3, 4};
    std::vector<BlockId> ids{0, 1, 2, 3};
    std::vector<kvcore::DuplicatePage> known;
    WindowPolicy* policy = nullptr;
    PrefixTree tree;
    kvcore::TreeNode* end;
    IdlePages idle;
};

void test_what_is_kept_is_never_worse_off_for_a_use() {
    Scene scene;
    scene.leave(4, {0, 1});
    scene.leave(2, {2});
    CHECK_EQ(scene.policy->num_free_departures(), 0);
    scene.leave(3, {0, 5});
    CHECK(!scene.idle.is_passed(0));  // it stays in the departure that it is in
    CHECK(scene.idle.is_passed(5));   // nobody kept it before
    scene.leave(1, {2});
    CHECK(!scene.idle.is_passed(2));  // it was alone: its departure has made room for the next
    CHECK_EQ(scene.idle.first_passed(), 5U);
    CHECK_EQ(scene.policy->num_departures(), 2U);
}

}  // namespace

int main() { test_what_is_kept_is_never_worse_off_for_a_use(); }
