// SPDX-License-Identifier: Apache-2.0
// Calls of a manager with quotas when memory runs out: the tenants of all pages stay the same.
#include <string>
#include <utility>
#include <vector>

#include "support/reserve_states.hpp"

namespace tests::faults::tenants {

using failing_scene::Build;
using failing_scene::each_outcome;
using failing_scene::leaves_no_trace;
using failing_scene::State;
using failing_scene::text;

namespace {

constexpr std::array kQuotaModes{Mode{"list, quotas", false, true, 0, true, 0, true},
                                 Mode{"list, no dedup, quotas", false, false, 0, true, 0, true},
                                 Mode{"transfers, quotas", true, true, 0, true, 0, true},
                                 Mode{"host tier, quotas", true, true, 12, true, 0, true}};

std::vector<State> states() {
    std::vector<std::pair<std::string, Build>> builds;
    reserve_states::add_single_rows(builds);
    reserve_states::add_tight_rows(builds);
    reserve_states::add_batches(builds);
    std::vector<State> states;
    for (const Mode& mode : kQuotaModes) {
        for (const auto& [name, build] : builds) states.push_back({name, mode, 16, build});
    }
    return states;
}

TEST(reservations) {
    for (const State& state : states()) {
        leaves_no_trace("plan", state, [](ManagerScene& scene) { scene.call_plan(); });
        leaves_no_trace("reserve with options", state,
                        [](ManagerScene& scene) { scene.call_with_options(); });
        leaves_no_trace("reserve", state, [](ManagerScene& scene) { scene.call_reserve(); });
        leaves_no_trace("match, allocate", state,
                        [](ManagerScene& scene) { scene.call_match_and_allocate(); });
        leaves_no_trace("fetch", state, [](ManagerScene& scene) { scene.call_fetch(); });
    }
}

void build(ManagerScene& s) {
    s.put(count_up(10, 22));
    s.pins.reserve(4);
    const std::size_t a = s.claim(count_up(10, 22));
    const std::size_t b = s.claim(count_up(300, 9));
    CHECK(s.fetch({a, b}));
    for (const std::size_t i : {a, b}) s.sample(i, static_cast<TokenId>(80 + i));
    s.choose({a, b});
}

TEST(other_verbs) {
    for (const Mode& mode : kQuotaModes) {
        const State state{"", mode, 48, build};
        auto untouched = state();
        const std::string before = text(untouched);
        each_outcome(
            "commit", state, [](ManagerScene& s) { s.call_commit(); },
            [&](ManagerScene& s, bool has_thrown) {
                if (has_thrown) return CHECK_EQ(ManagerText(s).of_all(), before);
                s.call_commit();
                static_cast<void>(ManagerText(s).of_all());
            });
        leaves_no_trace("pin", state, [](ManagerScene& s) { s.pin(0); });
        leaves_no_trace("set_priority", state, [](ManagerScene& s) {
            kvcore::RequestPriority terms;
            terms.tenant = 0;
            s.manager.set_priority(s.views[0].sequence, terms);
        });
        leaves_no_trace("tenant_stats", state, [](ManagerScene& s) {
            s.answer[0] = s.manager.tenant_stats(0)[0].held_pages;
        });
    }
}

}  // namespace

}  // namespace tests::faults::tenants
