// SPDX-License-Identifier: Apache-2.0
// Reservations when memory runs out: no reservation is made in part.
#include <string>

#include "support/reserve_states.hpp"

namespace tests::faults::reserve {

using failing_scene::allocates_nothing;
using failing_scene::each_outcome;
using failing_scene::leaves_no_trace;
using failing_scene::State;
using failing_scene::text;

namespace {

// reserve_batch stops before the first request for which memory runs out. The requests before it
// are reserved as by a call with only these requests, and the next call can reserve the rest.
void reserve_batch_stops_in_front(const State& state) {
    std::vector<std::string> reserved;  // text after n reserved requests
    const auto rows = static_cast<std::int64_t>(state()->rows.size());
    for (std::int64_t n = 0; n <= rows; ++n) {
        auto scene = state();
        if (n > 0) scene->reserve_first(n);
        reserved.push_back(text(scene));
    }
    const auto judge = [&](ManagerScene& scene, bool has_thrown) {
        const std::int64_t n = has_thrown ? 0 : scene.answer[0];
        if (has_thrown) CHECK_EQ(scene.answer[0], -1);
        const auto status = static_cast<kvcore::ReserveStatus>(scene.answer[1]);
        if (!has_thrown && n < rows && status == kvcore::ReserveStatus::kPending) {
            CHECK(n > 0 || rows == 0);
            scene.answer[1] = static_cast<std::int64_t>(kvcore::ReserveStatus::kOk);
            CHECK_EQ(ManagerText(scene).of_all(), item(reserved, n));
            return;
        }
        CHECK_EQ(ManagerText(scene).of_all(), item(reserved, has_thrown ? 0 : rows));
    };
    each_outcome(
        "reserve_batch", state, [](ManagerScene& scene) { scene.call_reserve_batch(); }, judge);
}

void halves_do_what_reserve_does(const State& state) {
    auto whole = state();
    whole->call_reserve();
    auto halves = state();
    halves->call_match_and_allocate();
    CHECK_EQ(text(halves), text(whole));
    auto untouched = state();
    auto asked = state();
    static_cast<void>(asked->manager.match(asked->views[0]));  // dropped at once
    CHECK_EQ(text(asked), text(untouched));
}

TEST(reservations) {
    for (const State& state : reserve_states::all()) {
        allocates_nothing("plan", state, [](ManagerScene& scene) { scene.call_plan(); });
        leaves_no_trace("reserve with options", state,
                        [](ManagerScene& scene) { scene.call_with_options(); });
        leaves_no_trace("reserve", state, [](ManagerScene& scene) { scene.call_reserve(); });
        leaves_no_trace("begin_at", state, [](ManagerScene& scene) { scene.call_begin_at(); });
        leaves_no_trace("match, allocate", state,
                        [](ManagerScene& scene) { scene.call_match_and_allocate(); });
        halves_do_what_reserve_does(state);
        leaves_no_trace("fetch", state, [](ManagerScene& scene) { scene.call_fetch(); });
        leaves_no_trace("fetch of several steps", state,
                        [](ManagerScene& scene) { scene.call_fetch(6); });
        leaves_no_trace("fetch without a table", state, [](ManagerScene& scene) {
            scene.targets[0].table = nullptr;
            scene.call_fetch();
        });
        reserve_batch_stops_in_front(state);
    }
}

}  // namespace

}  // namespace tests::faults::reserve
