// SPDX-License-Identifier: Apache-2.0
// Stores below the host tier when memory runs out. A call that throws changes nothing. A call that
// ends a ticket allocates nothing. Without memory, a hit is shorter or a page is not written.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvcore/errors.hpp"
#include "support/failing_memory.hpp"
#include "support/store_fixture.hpp"

namespace tests::faults::stores {

using failing_memory::allocates_nothing;
using failing_memory::any_site;
using failing_memory::each_site;
using failing_memory::Failing;
using failing_memory::Injection;
using kvcore::GroupKind;
using kvcore::StoreMoves;

namespace {

/// A manager, and the results of its last call.
struct Scene : StoreFixture {
    explicit Scene(const kvcore::CacheConfig& config) : StoreFixture(config) {
        for (const Tokens& each : prompts) all_keys.push_back(keys(each));
    }
    std::vector<Tokens> prompts{count_up(10, 12), count_up(10, 9), count_up(300, 8)};
    std::vector<Keys> all_keys;
    std::vector<std::vector<kvcore::ColumnParts>> items;
    StoreMoves given;
    std::vector<StoreMoves> open_fills;
    std::vector<StoreMoves> open_writes;
    std::vector<kvcore::ColumnParts> needs;

    /// Leaves a prompt on the device and in the tier.
    void keep(const Tokens& tokens) {
        Request request = claim(tokens);
        finish(reserve(request));
        finish(commit(request, 0));
        manager.release(request.sequence);
    }
    void begin(std::size_t i) {
        const auto end = static_cast<std::int32_t>(count(all_keys[i]));
        manager.begin_fill(0, "", prompts[i].data(), end, items[i].data(), all_keys[i].data(),
                           count(items[i]), given);
    }
    /// Stores the needs of each prompt, so that all other results of the calls can be dropped.
    void note_needs() {
        for (const Tokens& prompt : prompts) {
            items.push_back(needed(prompt, static_cast<std::int32_t>(count(prompt) / 2)));
        }
    }
};

using ScenePtr = std::unique_ptr<Scene>;

class Text {
   public:
    explicit Text(Scene& scene) : scene_(scene) {}
    std::string of_all() {
        add(scene_.given);
        add_counts();
        for (const auto& each : scene_.needs) add(each.column), add(std::int64_t(each.parts));
        for (const Tokens& prompt : scene_.prompts) {
            const kvcore::StoreSearch found = scene_.search(prompt);
            for (const std::int32_t n : {found.stored, found.have, found.legal, found.most}) add(n);
            add(found.parent);
        }
        for (const StoreMoves& each : scene_.open_fills) scene_.finish_fill(each, 99, true);
        if (scene_.given.ticket != 0) end(scene_.given.ticket);
        for (const StoreMoves& each : scene_.open_writes) scene_.finish_writes(each);
        add_counts();
        for (StoreMoves moves = scene_.take(); moves.ticket != 0; moves = scene_.take()) {
            add(moves);
            scene_.finish_writes(moves);
        }
        add_counts();
        for (const Tokens& prompt : scene_.prompts) add(scene_.begin_fill(prompt));
        return text_;
    }

   private:
    void end(std::uint64_t ticket) {
        try {
            scene_.manager.finish_writes(ticket);
        } catch (const kvcore::InvalidHandleError&) {
            scene_.manager.finish_fill(ticket, 99, true);
        }
    }
    void add(std::int64_t n) { text_ += " " + std::to_string(n); }
    void add(const kvcore::PageKey& key) { add(std::int64_t{key[0]} * 256 + key[1]); }
    void add(const StoreMoves& moves) {
        text_ += moves.ticket != 0 ? "\n moves" : "\n nothing";
        for (const kvcore::PageKey& key : moves.keys) add(key);
        for (const kvcore::StoredPart& part : moves.parts) add(part.part), add(part.page);
        for (const std::int32_t end : moves.ends) add(end);
    }
    void add_counts() {
        scene_.manager.check_integrity();
        const kvcore::PoolStats stats = scene_.manager.stats(0);
        const kvcore::StateStats states = scene_.manager.state_stats(0);
        text_ += '\n';
        for (const std::int64_t n :
             {stats.free_pages, stats.cached_pages, stats.evictable_pages, stats.host_cached_pages,
              states.host_checkpoints, scene_.manager.num_waiting_writes(),
              scene_.manager.num_dropped_writes()}) {
            add(n);
        }
    }

    Scene& scene_;
    std::string text_;
};

std::string text_of(const ScenePtr& scene) { return Text(*scene).of_all(); }

struct Kind {
    const char* name;
    kvcore::CacheConfig config;
};

// Requests are short, because the test checks every column of every page after each failure.
kvcore::CacheConfig small_config(std::int64_t num_pages, std::int64_t host_pages) {
    kvcore::CacheConfig config = HostFixture::config(num_pages, host_pages);
    config.max_seq_len = 64;
    return config;
}

std::vector<Kind> kinds() {
    const kvcore::CacheConfig plain = small_config(32, 16);
    kvcore::CacheConfig groups = small_config(64, 40);
    groups.groups = {{GroupKind::kFull, 0, 1, 0}, {GroupKind::kSliding, 4, 2, 0}};
    kvcore::CacheConfig sliding = small_config(64, 12);
    sliding.groups = {{GroupKind::kSliding, 4, 1, 0}};
    kvcore::CacheConfig states = small_config(32, 16);
    states.max_sequences = 3;
    states.states = {{0}};
    states.num_state_slots = 6;
    states.num_host_state_slots = 2;
    return {{"plain", plain}, {"groups", groups}, {"sliding", sliding}, {"states", states}};
}

using Build = std::function<void(Scene&)>;

// A prompt that is stored in part, and a prompt that waits to be written.
void stored(Scene& s) {
    s.finish_fill(s.begin_fill(count_up(10, 6)), 99);
    s.keep(count_up(10, 7));
    s.keep(count_up(500, 9));
}
void empty(Scene&) {}
void taken(Scene& s) {
    stored(s);
    s.open_writes.push_back(s.take(2));
}
void filling(Scene& s) {
    stored(s);
    s.open_fills.push_back(s.begin_fill(s.prompts[0]));
}
// A tier that must evict.
void crowded(Scene& s) {
    for (TokenId k = 0; k < 8; ++k) {
        const StoreMoves fill = s.begin_fill(count_up(1000 + 100 * k, 8));
        if (fill.ticket != 0) s.finish_fill(fill, 99);
    }
}

template <class Visit>
void for_each_state(const char* verb, const Visit& visit) {
    const std::pair<const char*, Build> builds[] = {{"empty", empty},
                                                    {"stored", stored},
                                                    {"taken", taken},
                                                    {"filling", filling},
                                                    {"crowded", crowded}};
    for (const Kind& kind : kinds()) {
        for (const auto& [name, build] : builds) {
            const auto make = [&kind = kind, &build = build] {
                auto scene = std::make_unique<Scene>(kind.config);
                build(*scene);
                scene->note_needs();
                return scene;
            };
            visit(std::string(verb) + ", " + kind.name + ", " + name, make);
        }
    }
}

TEST(verbs_leave_no_trace) {
    for_each_state("begin_fill", [](const std::string& name, const auto& make) {
        for (std::size_t i = 0; i < 3; ++i) {
            any_site(name.c_str(), make, [i](ScenePtr& s) { s->begin(i); }, text_of);
        }
    });
    for_each_state("needed_below", [](const std::string& name, const auto& make) {
        const auto call = [](ScenePtr& s) { s->needs = s->needed(s->prompts[0], 6); };
        any_site(name.c_str(), make, call, text_of);
    });
    for_each_state("search_below", [](const std::string& name, const auto& make) {
        const auto call = [](ScenePtr& s) {
            static_cast<void>(s->manager.search_below(0, "", s->prompts[0].data(), 12));
        };
        any_site(name.c_str(), make, call, text_of);
    });
    // Takes all columns of one arrival in the host tier, or a part of them.
    for_each_state("take_writes", [](const std::string& name, const auto& make) {
        for (const std::int64_t most : {1, 2}) {
            const auto make_one = [&] {
                auto scene = make();
                StoreMoves first = scene->take(1);
                if (first.ticket != 0) scene->open_writes.push_back(first);
                return scene;
            };
            const auto call = [most](ScenePtr& s) {
                static_cast<void>(s->manager.take_writes(most, s->given));
            };
            any_site(name.c_str(), make_one, call, text_of);
        }
    });
}

TEST(a_reset_leaves_no_trace) {
    for_each_state("reset_prefix_cache", [](const std::string& name, const auto& make) {
        const auto call = [](ScenePtr& s) { s->manager.reset_prefix_cache(); };
        each_site(name.c_str(), make, call, text_of);
    });
}

TEST(ending_a_ticket_allocates_nothing) {
    for_each_state("finish_writes", [](const std::string& name, const auto& make) {
        for (const bool resets : {false, true}) {
            const auto make_one = [&] {
                auto scene = make();
                if (resets) scene->manager.reset_prefix_cache();
                return scene;
            };
            const auto call = [](ScenePtr& s) {
                for (const StoreMoves& each : s->open_writes) {
                    s->manager.finish_writes(each.ticket);
                }
                for (const StoreMoves& each : s->open_fills) s->manager.finish_fill(each.ticket, 0);
            };
            allocates_nothing(name.c_str(), make_one, call);
        }
    });
}

/// Fails each allocation of the call in turn, and calls judge(scene) after each failure.
template <class Make, class Call, class Judge>
void each_outcome(const std::string& name, const Make& make, const Call& call, const Judge& judge) {
    for (const Failing failing : {Failing::kOnce, Failing::kFromThereOn}) {
        for (std::int64_t site = 1, seen = site; seen >= site; ++site) {
            auto scene = make();
            check::note = name + ", allocation " + std::to_string(site);
            {
                const Injection injection(site, failing);
                call(*scene);
                seen = injection.num_seen();
            }
            scene->manager.check_integrity();
            judge(*scene);
        }
    }
    check::note.clear();
}

// Columns that cannot be published for lack of memory are not found, and their pages are free.
TEST(fills_are_finished) {
    for_each_state("finish_fill", [](const std::string& name, const auto& make) {
        for (const bool forward : {false, true}) {
            const auto call = [forward](Scene& s) {
                for (const StoreMoves& each : s.open_fills) {
                    s.manager.finish_fill(each.ticket, 99, forward);
                }
            };
            each_outcome(name, make, call, [](Scene& s) {
                const std::int32_t have = s.search(s.prompts[0]).have;
                CHECK(s.open_fills.empty() || have == 6 || have == 3);
                for (const StoreMoves& each : s.open_writes) s.finish_writes(each);
                s.write_all();
                CHECK_EQ(s.manager.num_waiting_writes(), 0);
                s.manager.reset_prefix_cache();
                CHECK_EQ(s.manager.stats(0).host_cached_pages, 0);
                CHECK_EQ(s.manager.state_stats(0).host_checkpoints, 0);
            });
        }
    });
}

// A page that cannot be queued for lack of memory is not written. The manager counts it as dropped.
TEST(new_pages_are_queued_or_counted_as_dropped) {
    for (const Kind& kind : kinds()) {
        const auto make = [&] {
            struct Storing : Scene {
                using Scene::Scene;
                kvcore::Transfers stores;
            };
            auto scene = std::make_unique<Storing>(kind.config);
            Request request = scene->claim(count_up(10, 9));
            scene->finish(scene->reserve(request));
            scene->stores = scene->commit(request, 1);
            return scene;
        };
        const auto call = [](auto& s) { s.manager.finish(s.stores.ticket); };
        each_outcome(std::string("finish, ") + kind.name, make, call, [](auto& s) {
            const std::int64_t waiting = s.manager.num_waiting_writes();
            const std::int64_t dropped = s.manager.num_dropped_writes();
            CHECK(waiting == 0 || dropped == 0);
            s.write_all();
            CHECK_EQ(s.manager.num_waiting_writes(), 0);
        });
    }
}

// Columns of several prompts wait. A call takes the columns that memory allows, and later calls
// take the rest.
TEST(all_waiting_columns_are_taken_in_the_end) {
    for (const Kind& kind : kinds()) {
        const auto make = [&] {
            auto scene = std::make_unique<Scene>(kind.config);
            for (TokenId k = 0; k < 3; ++k) scene->keep(count_up(100 * k, 4));
            return scene;
        };
        const std::int64_t all = make()->write_all();
        const auto call = [](Scene& s) {
            try {
                static_cast<void>(s.manager.take_writes(100, s.given));
            } catch (const std::bad_alloc&) {
                CHECK_EQ(s.given.ticket, 0U);
            }
        };
        each_outcome(std::string("take_writes, ") + kind.name, make, call, [&](Scene& s) {
            const std::int64_t n = count(s.given.keys);
            if (s.given.ticket != 0) s.finish_writes(s.given);
            CHECK_EQ(n + s.write_all(), all);
        });
    }
}

}  // namespace

}  // namespace tests::faults::stores
