// SPDX-License-Identifier: Apache-2.0
// Calls of a manager with groups of layers when memory runs out: no call leaves a partial change.
#include <string>
#include <utility>

#include "support/reserve_states.hpp"

namespace tests::faults::groups {

using failing_scene::allocates_nothing;
using failing_scene::Build;
using failing_scene::each_outcome;
using failing_scene::leaves_no_trace;
using failing_scene::needs_no_memory;
using failing_scene::State;
using failing_scene::text;

namespace {

TEST(reservations) {
    for (const State& state : reserve_states::with_groups()) {
        allocates_nothing("plan", state, [](ManagerScene& scene) { scene.call_plan(); });
        leaves_no_trace("reserve with options", state,
                        [](ManagerScene& scene) { scene.call_with_options(); });
        leaves_no_trace("reserve", state, [](ManagerScene& scene) { scene.call_reserve(); });
        leaves_no_trace("match, allocate", state,
                        [](ManagerScene& scene) { scene.call_match_and_allocate(); });
        leaves_no_trace("fetch", state, [](ManagerScene& scene) { scene.call_fetch(); });
        leaves_no_trace("fetch of several steps", state,
                        [](ManagerScene& scene) { scene.call_fetch(3); });
        auto untouched = state();
        const std::string before = text(untouched);
        each_outcome(
            "reserve_batch", state, [](ManagerScene& scene) { scene.call_reserve_batch(); },
            [&](ManagerScene& scene, bool has_thrown) {
                if (has_thrown) CHECK_EQ(ManagerText(scene).of_all(), before);
            });
    }
}

// A prompt whose windows have moved on, a cached prompt, and a prompt that has run half of its
// tokens.
void build(ManagerScene& s) {
    s.pins.reserve(4);
    s.put(count_up(10, 22));
    const std::size_t a = s.served(count_up(10, 13), 5);
    s.grow(a, 40, 6);
    s.served(count_up(300, 9), 5, "tenant", 1);
    s.pin(0);
    s.choose({a});
}

template <class Visit>
void in_all_modes(const Build& build, const Visit& visit) {
    for (const Mode& mode : kGroupModes) visit(State{"", mode, 48, build});
    for (const Mode& mode : kGroupHostModes) visit(State{"", mode, 48, build});
}

TEST(other_verbs) {
    in_all_modes(build, [](const State& state) {
        for (const std::size_t i : {1, 2}) {
            needs_no_memory("release", state,
                            [i](ManagerScene& s) { s.manager.release(s.at(i).sequence); });
            needs_no_memory("begin_again", state,
                            [i](ManagerScene& s) { s.manager.begin_again(s.at(i).sequence); });
            leaves_no_trace("pages_of", state, [i](ManagerScene& s) {
                s.answer[0] = count(s.manager.pages_of(s.at(i).sequence, 1));
            });
        }
        leaves_no_trace("claim", state,
                        [](ManagerScene& s) { s.views[0].sequence = s.manager.claim(1); });
        needs_no_memory("unpin", state, [](ManagerScene& s) {
            s.manager.unpin(s.pins[0]);
            s.pins.clear();
        });
        for (const std::size_t i : {0, 1}) {
            leaves_no_trace("pin", state, [i](ManagerScene& s) { s.pin(i); });
        }
        leaves_no_trace("match", state, [](ManagerScene& s) {
            const Tokens& tokens = s.at(0).tokens();
            s.answer[0] = s.manager.match(0, "", tokens.data(), count(tokens), &s.found);
        });
        leaves_no_trace("reset_prefix_cache", state,
                        [](ManagerScene& s) { s.manager.reset_prefix_cache(); });
        leaves_no_trace("truncate", state, [](ManagerScene& s) {
            s.manager.truncate(s.at(1).sequence, s.at(1).start);
        });
    });
    const Build to_fork = [](ManagerScene& s) {
        build(s);
        const std::size_t b = s.child_of(1, {7, 8});
        const std::size_t c = s.child_of(1, {9});
        s.parent = s.at(1).view();
        s.choose({b, c});
    };
    in_all_modes(to_fork, [](const State& state) {
        leaves_no_trace("fork", state, [](ManagerScene& s) { s.call_fork(); });
    });
}

void choose_run(ManagerScene& s, std::size_t i) {
    CHECK(s.fetch({i}));
    s.sample(i, 80);
    s.choose({i});
}

// Pages that cannot be stored for lack of memory stay with the request, and its windows move on all
// the same. Integrity holds, and the commit can be made again.
TEST(commits) {
    const Build builds[] = {
        [](ManagerScene& s) { choose_run(s, s.claim(count_up(10, 30))); },
        [](ManagerScene& s) {
            s.put(count_up(10, 20));
            Tokens tokens = count_up(10, 8);
            for (int k = 0; k < 9; ++k) tokens.push_back(k);
            choose_run(s, s.claim(tokens));
        },
        [](ManagerScene& s) {
            const std::size_t a = s.claim(count_up(10, 13));
            CHECK(s.fetch({a}));
            s.put(count_up(10, 23));
            choose_run(s, a);
        },
        [](ManagerScene& s) {
            const std::size_t a = s.served(count_up(10, 6), 5);
            s.fork(a, {7, 8});
            s.fork(a, {9});
            s.grow(a, 40, 1);
            choose_run(s, a);
        },
        // Forked during a step that ends in a page whose window page the tree lacks.
        [](ManagerScene& s) {
            const std::size_t a = s.claim(count_up(10, 5));
            s.at(a).active = 2;
            CHECK(s.fetch({a}));
            s.at(a).start = 2;
            s.at(a).active = 5;
            s.commit({a});
            CHECK(s.fetch({a}));
            s.put(count_up(10, 24));
            const std::size_t big = s.claim(count_up(5000, 80));
            s.reserve(big);
            s.manager.release(s.at(big).sequence);
            const Tokens& tokens = s.at(a).tokens();
            CHECK_EQ(s.manager.match(0, "", tokens.data(), 4), 0);
            s.fork(a, {13, 9});
            s.sample(a, 80);
            s.choose({a});
        },
    };
    for (const Build& given : builds) {
        in_all_modes(given, [](const State& state) {
            auto untouched = state();
            const std::string before = text(untouched);
            each_outcome(
                "commit", state, [](ManagerScene& s) { s.call_commit(); },
                [&](ManagerScene& s, bool has_thrown) {
                    if (has_thrown) return CHECK_EQ(ManagerText(s).of_all(), before);
                    s.end(s.transfers);
                    s.call_commit();
                    static_cast<void>(ManagerText(s).of_all());
                });
        });
    }
}

// Stores and loads end without memory: a page that cannot be published is not stored.
TEST(transfers_end) {
    const Build stores = [](ManagerScene& s) {
        const std::size_t a = s.claim(count_up(10, 30));
        choose_run(s, a);
        s.call_commit();
        s.open_tickets.push_back(s.transfers.ticket);
        s.transfers.clear();
        const std::size_t b = s.claim(count_up(10, 21));
        choose_run(s, b);
        s.call_commit();
        if (s.transfers.ticket != 0) s.open_tickets.push_back(s.transfers.ticket);
        s.transfers.clear();
    };
    // The tier has lost windows of a record. Another request brings these windows.
    const Build completions = [](ManagerScene& s) {
        s.put(count_up(10, 14));
        for (TokenId k = 1; k < 6; ++k) s.put(count_up(1000 * k, 9));
        reserve_states::crowd_out(s, 20);
        choose_run(s, s.claim(count_up(10, 14)));
        s.call_commit();
        if (s.transfers.ticket != 0) s.open_tickets.push_back(s.transfers.ticket);
        s.transfers.clear();
    };
    const Build loads = [](ManagerScene& s) {
        s.put(count_up(10, 26));
        reserve_states::crowd_out(s, 20);
        s.begin_reserve(s.claim(count_up(10, 26)));
    };
    for (const bool done : {true, false}) {
        for (const Build& given : {stores, completions, loads}) {
            for (const Mode& mode : kGroupHostModes) {
                const State state{done ? "done" : "failed", mode, 40, given};
                each_outcome(
                    "finish", state, [done](ManagerScene& s) { s.end_open(done); },
                    [](ManagerScene& s, bool has_thrown) {
                        CHECK(!has_thrown);
                        static_cast<void>(ManagerText(s).of_all());
                    });
            }
        }
    }
}

}  // namespace

}  // namespace tests::faults::groups
