// SPDX-License-Identifier: Apache-2.0
// Calls of a manager with states when memory runs out: no call leaves a partial change, and a
// checkpoint without memory is not made.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvcore/cache_manager.hpp"
#include "support/failing_memory.hpp"
#include "support/request.hpp"

namespace tests::faults::states {

namespace {

struct Use {
    const char* name;
    bool copies_at_once;
    std::int64_t window;
    std::int64_t num_slots;
    std::int64_t host_slots;  // 0: no host tier
};
constexpr Use kUses[] = {{"list", false, 0, 12, 0},
                         {"transfers", true, 0, 12, 0},
                         {"few slots", true, 0, 6, 0},
                         {"windows, list", false, 6, 12, 0},
                         {"windows, transfers", true, 6, 8, 0},
                         {"host tier", true, 0, 12, 12},
                         {"host tier, few slots", true, 0, 6, 2},
                         {"windows, host tier", true, 6, 8, 12}};

/// A cached prompt, a prompt that hits it, a running prompt, and a new prompt.
struct Scene {
    explicit Scene(const Use& given) : use(given), manager(config_of(given)) {
        swaps.reserve(64);
        for (std::int64_t b = 0; b < 2; ++b) {
            cells.emplace_back(8 * 64);
            tables.push_back(
                std::make_unique<kvcore::LookupTable>(cells.back().data(), 8, 64, ~0U));
        }
        more = tables[1].get();
        add(count_up(0, 22));
        run(0, 30);
        manager.release(requests[0].sequence);
        requests[0].sequence = {};
        if (use.host_slots > 0) crowd_out();
        add(count_up(0, 16));
        requests[1].append(99);
        requests[1].active = requests[1].end();
        add(count_up(100, 13));
        run(2, 19);
        add(count_up(0, 12));  // branches at a position without a checkpoint
        for (const TokenId token : {7, 8, 9}) requests[3].append(token);
        requests[3].active = requests[3].end();
        for (const Request& request : requests) views.push_back(request.view());
    }
    static kvcore::CacheConfig config_of(const Use& use) {
        kvcore::CacheConfig config;
        config.num_pages = 60;
        config.page_size = 4;
        config.max_sequences = 6;
        config.max_seq_len = 100;
        config.states = {{8}, {0}};
        config.num_state_slots = use.num_slots;
        config.max_draft_tokens = 8;
        config.host_pages = use.host_slots > 0 ? 80 : 0;
        config.num_host_state_slots = use.host_slots;
        if (use.window > 0) {
            config.groups = {{}, {kvcore::GroupKind::kSliding, use.window, 1, 0}};
        }
        return config;
    }
    // Moves the cached prompt out of the device, so that it is only in the host tier.
    void crowd_out() {
        std::vector<Request> crowd;
        auto status = kvcore::ReserveStatus::kOk;
        while (status == kvcore::ReserveStatus::kOk && crowd.size() < 6) {
            crowd.emplace_back("", count_up(static_cast<TokenId>(1000 * (crowd.size() + 1)), 40));
            crowd.back().sequence = manager.claim();
            kvcore::RequestView view = crowd.back().view();
            status = manager.reserve(view, 1, given());
            end();
        }
        for (const Request& request : crowd) manager.release(request.sequence);
        const Tokens& tokens = requests[0].tokens();
        CHECK_EQ(manager.match(0, "", tokens.data(), 22), 0);
        CHECK(manager.state_stats(0).host_checkpoints > 0);
    }
    void add(const Tokens& tokens) {
        requests.emplace_back("", tokens);
        requests.back().sequence = manager.claim();
    }
    kvcore::Transfers* given() { return use.copies_at_once ? &transfers : nullptr; }
    void end(bool done = true) {
        if (!transfers.empty()) manager.finish(transfers.ticket, done);
        transfers.clear();
    }
    kvcore::FetchStatus fetch(kvcore::RequestView* rows, std::int64_t n) {
        kvcore::FetchTarget target;
        target.table = tables[0].get();
        target.more = &more;
        target.cache_lengths = lengths;
        target.states = states;
        return manager.fetch({rows, n}, 1, &target, given()).status;
    }
    void run(std::size_t i, std::int64_t end_at) {
        Request& request = requests[i];
        while (request.start < end_at) {
            kvcore::RequestView view = request.view();
            while (fetch(&view, 1) == kvcore::FetchStatus::kPending) end();
            end();
            request.start = view.active;
            if (request.start == request.end()) request.append(5);
            request.active = request.end();
            view = request.view();
            manager.commit({&view, 1}, swaps, given());
            end();
        }
    }
    /// Returns all observable state of the manager.
    std::string text() {
        manager.check_integrity();
        std::string out;
        const auto add = [&out](std::int64_t value) { out += std::to_string(value) + " "; };
        for (const Request& request : requests) {
            if (!manager.contains(request.sequence)) continue;
            add(manager.state_of(request.sequence));
            for (const BlockId page : manager.pages_of(request.sequence)) add(page);
            const Tokens& tokens = request.tokens();
            add(manager.match(0, "", tokens.data(), request.end()));
        }
        for (const kvcore::RequestView& view : views) add(view.start), add(view.active);
        for (const kvcore::StateMove& move : transfers.state_copies) {
            add(move.source), add(move.destination);
        }
        for (const kvcore::StateMove& move : transfers.state_moves) {
            add(move.source), add(move.destination);
        }
        for (const kvcore::PageMove& move : transfers.tier_moves) {
            add(move.source), add(move.destination);
        }
        end(false);
        if (!use.copies_at_once) {
            for (const kvcore::StateMove& move : manager.take_state_copies()) {
                add(move.source), add(move.destination);
            }
        }
        const kvcore::StateStats stats = manager.state_stats(0);
        add(stats.available_slots), add(stats.checkpoints), add(stats.used_slots);
        add(stats.host_checkpoints), add(manager.stats(0).host_cached_pages);
        add(manager.stats(0).free_pages), add(manager.metrics().cache_tokens);
        manager.check_integrity();
        return out;
    }

    Use use;
    kvcore::CacheManager manager;
    std::vector<Request> requests;
    std::vector<kvcore::RequestView> views;
    kvcore::Transfers transfers;
    std::vector<kvcore::PageSwap> swaps;
    std::uint32_t lengths[8] = {};
    std::int32_t states[8] = {};
    std::vector<std::vector<std::uint32_t>> cells;
    std::vector<std::unique_ptr<kvcore::LookupTable>> tables;
    kvcore::LookupTable* more = nullptr;
};

using ScenePtr = std::unique_ptr<Scene>;

template <class Call>
void leaves_no_trace(const Use& use, const char* verb, Call&& call) {
    failing_memory::any_site(
        (std::string(use.name) + ", " + verb).c_str(), [&] { return std::make_unique<Scene>(use); },
        [&](const ScenePtr& s) { call(*s); }, [](const ScenePtr& s) { return s->text(); });
}

void calls(const Use& use) {
    for (const std::size_t i : {1, 3}) {
        leaves_no_trace(use, "reserve", [i](Scene& s) {
            static_cast<void>(s.manager.reserve(s.views[i], 1, s.given()));
        });
        leaves_no_trace(use, "match, allocate", [i](Scene& s) {
            kvcore::PrefixHit hit = s.manager.match(s.views[i]);
            static_cast<void>(s.manager.allocate(hit, s.views[i], s.views[i].end, s.given()));
        });
        failing_memory::allocates_nothing(
            "plan", [&] { return std::make_unique<Scene>(use); },
            [i](const ScenePtr& s) { static_cast<void>(s->manager.plan(s->views[i])); });
    }
    leaves_no_trace(use, "fetch",
                    [](Scene& s) { static_cast<void>(s.fetch(s.views.data() + 1, 3)); });
    leaves_no_trace(use, "claim", [](Scene& s) { s.views[0].sequence = s.manager.claim(); });
    leaves_no_trace(use, "pin", [](Scene& s) {
        const Tokens& tokens = s.requests[0].tokens();
        static_cast<void>(s.manager.pin(0, "", tokens.data(), 22));
    });
    leaves_no_trace(use, "fork", [](Scene& s) {
        kvcore::RequestView children[] = {s.views[2], s.views[2]};
        s.manager.fork(s.views[2], {children, 2}, s.given());
    });
    leaves_no_trace(use, "truncate",
                    [](Scene& s) { s.manager.truncate(s.requests[2].sequence, 16, s.given()); });
    leaves_no_trace(use, "release", [](Scene& s) { s.manager.release(s.requests[2].sequence); });
    leaves_no_trace(use, "reset", [](Scene& s) { s.manager.reset_prefix_cache(); });
}

// Without memory, the commit makes no checkpoint and may add no page to the tree, but the step is
// committed.
void commits(const Use& use) {
    const auto make = [&] {
        auto scene = std::make_unique<Scene>(use);
        kvcore::RequestView& view = scene->views[3];
        while (scene->fetch(&view, 1) == kvcore::FetchStatus::kPending) scene->end();
        scene->end();
        view.start = view.active;
        view.active = view.end;
        return scene;
    };
    const auto call = [](const ScenePtr& s) {
        s->manager.commit({&s->views[3], 1}, s->swaps, s->given());
    };
    auto undisturbed = make();
    const std::int64_t sites = failing_memory::detail::count(undisturbed, call);
    for (std::int64_t site = 1; site <= sites; ++site) {
        auto scene = make();
        const auto outcome =
            failing_memory::detail::run(scene, call, site, failing_memory::Failing::kFromThereOn);
        scene->manager.check_integrity();
        scene->end();
        if (outcome.has_thrown) continue;
        const Tokens& tokens = scene->requests[3].tokens();
        CHECK(scene->manager.match(0, "", tokens.data(), 12) <= 3);
        kvcore::RequestView& view = scene->views[3];
        while (scene->fetch(&view, 1) == kvcore::FetchStatus::kPending) scene->end();
        scene->end();
        CHECK(view.active > view.start);
    }
}

// Failed copies are returned again, for forks and for hits.
void owed(const Use& use) {
    if (!use.copies_at_once || use.num_slots < 8) return;  // with few slots there may be no copy
    if (use.host_slots > 0) return;                        // failed loads are not owed
    for (const bool is_fork : {true, false}) {
        for (const bool by_parent : {true, false}) {
            failing_memory::any_site(
                "take_owed",
                [&] {
                    auto s = std::make_unique<Scene>(use);
                    if (is_fork) {
                        kvcore::RequestView child = s->views[2];
                        s->manager.fork(s->views[2], {&child, 1}, s->given());
                        s->requests[by_parent ? 0 : 2].sequence = child.sequence;
                    } else {
                        CHECK_EQ(s->manager.reserve(s->views[1], 1, s->given()),
                                 kvcore::ReserveStatus::kOk);
                    }
                    CHECK(!s->transfers.empty());
                    s->end(false);
                    return s;
                },
                [&](const ScenePtr& s) {
                    const std::size_t i = is_fork ? 2 : 1;
                    const auto found = s->manager.take_owed(s->requests[i].sequence, s->transfers);
                    CHECK_EQ(found, kvcore::OwedStatus::kTaken);
                },
                [](const ScenePtr& s) { return s->text(); });
        }
    }
}

TEST(verbs_leave_no_trace) {
    for (const Use& use : kUses) {
        calls(use);
        commits(use);
        owed(use);
    }
}

}  // namespace

}  // namespace tests::faults::states
