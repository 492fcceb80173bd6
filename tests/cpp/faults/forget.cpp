// SPDX-License-Identifier: Apache-2.0
// Forgetting and holding pages when memory runs out: a call does all or nothing.
#include <string>
#include <utility>
#include <vector>

#include "support/failing_scene.hpp"

namespace tests::faults::forget {

using failing_scene::is_refused;
using failing_scene::leaves_no_trace;
using failing_scene::needs_no_memory;
using failing_scene::State;

namespace {

Tokens prompt() { return count_up(0, 22); }

// Two requests that hold the prompt, the first with a longer tail; a branch without a holder; and a
// pin.
void shared_prompt(ManagerScene& scene) {
    scene.put({0, 1, 2, 3, 4, 5, 6, 7, 50, 51, 52, 53, 54});
    const std::size_t first = scene.served(prompt(), 90);
    scene.grow(first, 91, 5);
    const std::size_t second = scene.served(count_up(0, 14), 60);
    scene.pin(second);
    scene.choose({first});
}

// Copies, loads or stores are in flight.
void with_transfers(ManagerScene& scene) {
    shared_prompt(scene);
    if (!scene.mode.copies_at_once) return;
    const std::size_t other = scene.claim({0, 1, 2, 3, 4, 5, 60, 61, 62});
    scene.begin_reserve(other);
}

std::vector<BlockId> row_of(ManagerScene& scene) {
    return scene.manager.pages_of(scene.views[0].sequence);
}

void forget(ManagerScene& scene) {
    const std::vector<BlockId> row = row_of(scene);
    scene.answer[0] = scene.manager.forget(0, row.data() + 1, 2);
}

void hold(ManagerScene& scene) {
    const std::vector<BlockId> row = row_of(scene);
    const kvcore::HeldPages held = scene.manager.hold(0, row.data(), count(row));
}

void hold_twice_and_release(ManagerScene& scene) {
    const std::vector<BlockId> row = row_of(scene);
    kvcore::HeldPages held = scene.manager.hold(0, row.data(), count(row));
    const kvcore::HeldPages again = scene.manager.hold(0, row.data(), 2);
    scene.manager.reset_prefix_cache();
    held.let_go();
}

void all_of(const Mode& mode) {
    using Build = void (*)(ManagerScene&);
    const std::pair<const char*, Build> scenes[] = {{"shared prompt", shared_prompt},
                                                    {"with transfers", with_transfers}};
    for (const auto& [name, build] : scenes) {
        const State state{name, mode, 40, build};
        leaves_no_trace("forget", state, forget);
        leaves_no_trace("hold", state, hold);
        const auto past_the_end = [](ManagerScene& scene) {
            const BlockId page = 40;
            scene.answer[0] = scene.manager.forget(0, &page, 1);
        };
        is_refused<kvcore::InvalidHandleError>("forget no page", state, past_the_end);
        const auto free_page = [](ManagerScene& scene) {
            const BlockId page = 39;
            static_cast<void>(scene.manager.hold(0, &page, 1));
        };
        is_refused<kvcore::InvalidHandleError>("hold a free page", state, free_page);
        auto scene = state();
        hold_twice_and_release(*scene);
        scene->manager.check_integrity();
    }
}

// The commit and the release of a request that holds forgotten pages.
void goes_on(const Mode& mode) {
    const State state{"forgotten", mode, 40, [](ManagerScene& scene) {
                          shared_prompt(scene);
                          forget(scene);
                          scene.forget_call();
                          scene.grow(1, 70, 6);
                          scene.choose({1});
                      }};
    leaves_no_trace("fetch", state, [](ManagerScene& scene) { scene.call_fetch(); });
    needs_no_memory("commit", state, [](ManagerScene& scene) { scene.call_commit(); });
    needs_no_memory("release", state, [](ManagerScene& scene) {
        scene.manager.release(scene.at(1).sequence);
        scene.rows.clear();
    });
}

TEST(forgetting_leaves_no_trace) {
    for (const Mode& mode : kModes) {
        if (!mode.prefix_caching) continue;
        all_of(mode);
        goes_on(mode);
    }
    for (const Mode& mode : kGroupModes) {
        if (mode.prefix_caching) all_of(mode);
    }
    for (const Mode& mode : kGroupHostModes) all_of(mode);
}

}  // namespace

}  // namespace tests::faults::forget
