// SPDX-License-Identifier: Apache-2.0
// Calls of a manager when memory runs out: a call that fails changes nothing, and a call that
// releases something needs no memory. reserve.cpp, commit.cpp and transfers.cpp test reservations,
// commits and transfers.
#include <memory>
#include <string>
#include <vector>

#include "support/failing_scene.hpp"

namespace tests::faults::cache_manager {

using failing_scene::allocates_nothing;
using failing_scene::Build;
using failing_scene::is_refused;
using failing_scene::leaves_no_trace;
using failing_scene::needs_no_memory;
using failing_scene::State;

namespace {

const char* const kTenant = "the namespace of one of many tenants";

/// Sequences of every kind: decoding, forked, truncated, and with their own pages next to equal
/// pages of the tree; pinned and cached prompts; two namespaces and two replicas.
void build_all_kinds(ManagerScene& s) {
    const std::size_t a = s.served(count_up(10, 22), 5);
    s.fork(a, {7, 8});
    const std::size_t twin = s.claim(count_up(10, 14), kTenant);
    CHECK(s.fetch({twin}));
    s.put(count_up(10, 14), kTenant);
    s.sample(twin, 5);
    s.commit({twin});
    const std::size_t b = s.served(count_up(200, 12), 5, kTenant, 1);
    s.truncate(b, 6);
    s.pin(a);
    s.put(count_up(300, 9), "", 1);
    const std::size_t c = s.served(count_up(400, 5), 5, "", 1);
    s.grow(c, 500, 5);
    s.claim({1, 2, 3});
}

template <class Each>
void in_all_modes(const Build& build, Each&& each) {
    for (const Mode& mode : kModes) each(State{"", mode, 24, build});
}

TEST(built) {
    for (const Mode& mode : kModes) {
        kvcore::CacheConfig config;
        config.num_pages = 8;
        config.max_sequences = 4;
        config.max_seq_len = 40;
        config.page_size = 4;
        config.num_replicas = 3;
        config.host_pages = mode.host_pages;
        using Manager = std::unique_ptr<kvcore::CacheManager>;
        failing_memory::each_site(
            "build", [] { return Manager(); },
            [&](Manager& manager) { manager = std::make_unique<kvcore::CacheManager>(config); },
            [](Manager& manager) {
                if (manager == nullptr) return std::string("none");
                manager->check_integrity();
                return std::string("there");
            });
    }
}

TEST(claimed) {
    for (const int n : {0, 1, 2, 3, 4, 7, 8, 15, 16}) {
        const Build build = [n](ManagerScene& s) {
            for (int i = 0; i < n; ++i) s.claim({1, 2});
            s.choose({s.add({1, 2, 3})});
        };
        leaves_no_trace("claim", {std::to_string(n), kTransfers, 16, build},
                        [](ManagerScene& s) { s.views[0].sequence = s.manager.claim(1); });
    }
    const Build build = [](ManagerScene& s) {
        for (int i = 0; i < 4; ++i) s.claim({1, 2});
        s.manager.release(s.at(2).sequence);
        s.choose({s.add({1, 2, 3})});
    };
    allocates_nothing("claim", {"a slot again", kTransfers, 16, build},
                      [](ManagerScene& s) { s.views[0].sequence = s.manager.claim(1); });
}

TEST(released) {
    in_all_modes(build_all_kinds, [](const State& state) {
        const std::size_t n = state()->requests.size();
        for (std::size_t i = 0; i < n; ++i) {
            if (auto s = state(); !s->manager.contains(s->at(i).sequence)) continue;
            needs_no_memory("release", state,
                            [i](ManagerScene& s) { s.manager.release(s.at(i).sequence); });
            needs_no_memory("begin_again", state,
                            [i](ManagerScene& s) { s.manager.begin_again(s.at(i).sequence); });
        }
        needs_no_memory("release all", state, [](ManagerScene& s) {
            for (const auto& request : s.requests) {
                if (s.manager.contains(request->sequence)) s.manager.release(request->sequence);
            }
        });
        leaves_no_trace("reset_prefix_cache", state,
                        [](ManagerScene& s) { s.manager.reset_prefix_cache(); });
        needs_no_memory("unpin", state, [](ManagerScene& s) {
            s.manager.unpin(s.pins[0]);
            s.pins.clear();
        });
    });
    // A tree without spare room for growth has nothing to move.
    const Build exact = [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 6), 5);
        s.fork(a, {7, 8});
        s.pin(a);
    };
    in_all_modes(exact, [](const State& state) {
        allocates_nothing("release, unpin, begin_again", state, [](ManagerScene& s) {
            s.manager.release(s.at(0).sequence);
            s.manager.unpin(s.pins[0]);
            s.manager.begin_again(s.at(1).sequence);
            s.manager.release(s.at(1).sequence);
        });
    });
}

TEST(queried) {
    in_all_modes(build_all_kinds, [](const State& state) {
        leaves_no_trace("match", state, [](ManagerScene& s) {
            const Tokens& tokens = s.at(0).tokens();
            std::int32_t partial = 0;
            s.answer[0] = s.manager.match(0, "", tokens.data(), count(tokens), &s.found, &partial);
        });
        leaves_no_trace("shared_prefixes", state, [](ManagerScene& s) {
            kvcore::RequestView views[] = {s.at(0).view(), s.at(1).view(), s.at(2).view(),
                                           s.at(4).view()};
            s.answer[0] = static_cast<std::int64_t>(s.manager.shared_prefixes({views, 4}).size());
        });
        leaves_no_trace("pages_of", state, [](ManagerScene& s) {
            s.answer[0] = static_cast<std::int64_t>(s.manager.pages_of(s.at(0).sequence).size());
        });
        leaves_no_trace("check_integrity", state,
                        [](ManagerScene& s) { s.manager.check_integrity(); });
        allocates_nothing("questions", state, [](ManagerScene& s) {
            const Tokens& tokens = s.at(2).tokens();
            static_cast<void>(s.manager.match(0, kTenant, tokens.data(), 12, nullptr));
            static_cast<void>(s.manager.match(1, "unknown", tokens.data(), 12, nullptr));
            static_cast<void>(s.manager.recommend_replica(kTenant, tokens.data(), 12));
            static_cast<void>(s.manager.stats(1));
            static_cast<void>(s.manager.metrics());
            static_cast<void>(s.manager.contains(s.at(0).sequence));
            static_cast<void>(s.manager.replica_of(s.at(0).sequence));
            static_cast<void>(s.manager.config());
            s.manager.wait(s.at(0).sequence);
            s.manager.reset_metrics();
        });
    });
}

TEST(pinned) {
    for (const std::int64_t n : {0, 1, 3, 4, 8, 12, 23}) {
        in_all_modes(build_all_kinds, [n](const State& state) {
            const auto pin = [n](ManagerScene& s) {
                s.pins.reserve(2);
                s.pins.push_back(s.manager.pin(0, "", s.at(0).tokens().data(), n));
                s.answer[0] = s.pins.back().num_tokens;
            };
            leaves_no_trace("pin", state, pin);
            leaves_no_trace("pin of nothing", state, [n](ManagerScene& s) {
                const auto nothing = s.manager.pin(1, "unknown", s.at(0).tokens().data(), n);
                s.manager.unpin(nothing);
            });
            const Build again = [&](ManagerScene& s) {
                build_all_kinds(s);
                s.manager.unpin(s.pins[0]);
                s.pins.clear();
            };
            leaves_no_trace("pin again", {"", state.mode, 24, again}, pin);
        });
    }
}

TEST(forked) {
    // The committed prefix of the parent ends inside a run, so the run must be split.
    const Build cut = [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 22), 5);
        s.fork(a, {7, 8});
        s.at(a).rewind(11);
        s.parent = s.at(a).view();
        s.choose({s.child_of(a, {1}), s.child_of(a, {2, 3}), s.child_of(a, {4})});
    };
    const Build whole = [](ManagerScene& s) {
        build_all_kinds(s);
        s.parent = s.at(2).view();
        s.choose({s.child_of(2, {1}), s.child_of(2, {2, 3})});
    };
    const Build empty = [](ManagerScene& s) {
        const std::size_t a = s.claim({1, 2, 3});
        s.parent = s.at(a).view();
        s.choose({s.child_of(a, {1}), s.child_of(a, {2, 3})});
    };
    // The list has copies into the parent's page: the forks inherit them.
    const Build owed = [](ManagerScene& s) {
        const std::size_t a = s.served(count_up(10, 6), 5);
        const std::size_t b = s.fork(a, {7, 8});
        s.reserve(b);
        s.fetch({b});
        s.sample(b, 4);
        s.commit({b});
        s.at(b).rewind(7);
        s.parent = s.at(b).view();
        s.choose({s.child_of(b, {1}), s.child_of(b, {2}), s.child_of(b, {3})});
    };
    for (const Build& build : {cut, whole, empty, owed}) {
        in_all_modes(build, [](const State& state) {
            leaves_no_trace("fork", state, [](ManagerScene& s) { s.call_fork(); });
        });
    }
}

TEST(truncated) {
    for (const std::int64_t n : {0, 1, 4, 9, 12, 20, 21, 22}) {
        in_all_modes(build_all_kinds, [n](const State& state) {
            leaves_no_trace("truncate", state,
                            [n](ManagerScene& s) { s.manager.truncate(s.at(0).sequence, n); });
        });
    }
}

TEST(refused) {
    const kvcore::SequenceHandle stranger{3, 77};
    in_all_modes(build_all_kinds, [&](const State& state) {
        is_refused<std::out_of_range>(
            "claim", state, [](ManagerScene& s) { static_cast<void>(s.manager.claim(2)); });
        is_refused<kvcore::RequestNotFoundError>(
            "release", state, [&](ManagerScene& s) { s.manager.release(stranger); });
        is_refused<kvcore::RequestNotFoundError>(
            "begin_again", state, [&](ManagerScene& s) { s.manager.begin_again(stranger); });
        is_refused<std::invalid_argument>(
            "truncate", state, [](ManagerScene& s) { s.manager.truncate(s.at(0).sequence, 99); });
        is_refused<std::invalid_argument>("reserve", state, [](ManagerScene& s) {
            kvcore::RequestView view = s.at(0).view();
            view.start = view.end;
            static_cast<void>(s.manager.reserve(view, 1, s.given()));
        });
        is_refused<kvcore::CapacityError>("reserve", state, [](ManagerScene& s) {
            kvcore::RequestView view = s.at(0).view();
            view.active = view.end = 300;
            static_cast<void>(s.manager.reserve(view, 1, s.given()));
        });
        is_refused<std::invalid_argument>("fetch", state, [](ManagerScene& s) {
            kvcore::RequestView views[] = {s.at(0).view(), s.at(6).view(), s.at(0).view()};
            s.choose({});
            static_cast<void>(s.manager.fetch({views, 3}, 1, s.targets.data(), s.given()));
        });
        // The last view is invalid: the commit must not change the written counts of the first
        // views.
        is_refused<std::invalid_argument>("commit", state, [](ManagerScene& s) {
            kvcore::RequestView views[] = {s.at(0).view(), s.at(2).view(), s.at(1).view()};
            views[0].start = 11;
            views[2].start = views[2].end;
            s.manager.commit({views, 3}, s.swaps, s.given());
        });
        is_refused<kvcore::InvalidHandleError>("unpin", state, [](ManagerScene& s) {
            s.manager.unpin({s.pins[0].index, s.pins[0].generation + 1, 4});
        });
        is_refused<std::invalid_argument>("fork", state, [](ManagerScene& s) {
            const kvcore::RequestView parent = s.at(0).view();
            kvcore::RequestView views[] = {s.at(1).view(), s.at(6).view()};
            s.manager.fork(parent, {views, 2});
        });
    });
}

}  // namespace

}  // namespace tests::faults::cache_manager
