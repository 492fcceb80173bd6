// SPDX-License-Identifier: Apache-2.0
// Exports and imports of the cache when memory runs out: a call that throws changes nothing, and
// holds end without memory.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "support/cache_mover.hpp"
#include "support/failing_memory.hpp"
#include "support/group_scene.hpp"

namespace tests::faults::cache_copies {

using cache_mover::Run;
using kvcore::CacheExport;
using kvcore::CacheImport;

namespace {

struct Use {
    const char* name;
    bool has_windows;
    bool has_states;
    bool has_quotas;
};
constexpr Use kUses[] = {{"plain", false, false, false},
                         {"quotas", false, false, true},
                         {"windows", true, false, false},
                         {"windows, quotas", true, false, true},
                         {"states", true, true, false}};

/// A cache with a part of the contents of another cache.
struct Scene {
    explicit Scene(const Use& use) : scene(config_of(use)) {
        GroupScene from(config_of(use));
        put(from, count_up(0, 34));
        put(from, count_up(0, 17));
        runs = cache_mover::save(from.manager);
        put(scene, count_up(0, 22));
        for (Run& run : runs) {
            if (run.tokens.size() > whole.tokens.size()) whole = run;
        }
        whole.columns.insert(whole.columns.begin(), static_cast<std::size_t>(whole.first),
                             kvcore::CachedColumn{});
        for (std::int32_t c = 0; use.has_windows && c < whole.first; ++c) {
            item(whole.columns, c).windows = 1;
        }
        whole.first = 0;
        here = cache_mover::list(scene.manager).back();
    }
    static kvcore::CacheConfig config_of(const Use& use) {
        const kvcore::CacheGroup sliding{kvcore::GroupKind::kSliding, 6, 1, 0};
        std::vector<kvcore::CacheGroup> groups{kvcore::CacheGroup{}};
        if (use.has_windows) groups.push_back(sliding);
        kvcore::CacheConfig config = GroupScene::config(4, 80, groups);
        config.max_sequences = 4;
        if (use.has_quotas) config.quotas = {{20, 60}};
        if (use.has_states) {
            config.states = {{8}};
            config.num_state_slots = 16;
        }
        return config;
    }
    static void put(GroupScene& scene, const Tokens& tokens) {
        scene.put(tokens);
        static_cast<void>(scene.manager.take_state_copies());
    }
    /// Returns all observable state of the cache.
    std::string text() {
        kvcore::CacheManager& manager = scene.manager;
        manager.check_integrity();
        std::string out;
        const auto add = [&out](std::int64_t value) { out += std::to_string(value) + " "; };
        add(taken.pages().empty() ? 0 : 1);
        const kvcore::PoolStats stats = manager.stats(0);
        add(stats.free_pages), add(stats.cached_pages), add(stats.evictable_pages);
        add(manager.state_stats(0).checkpoints), add(manager.state_stats(0).used_slots);
        for (const Run& run : runs) add(scene.match(run.tokens));
        held = CacheExport();
        taken = CacheImport();
        manager.check_integrity();
        std::int64_t columns = 0;
        for (const Run& run : cache_mover::save(manager)) {
            // The ends of runs are left out: a held page ends its run, except after a failed
            // allocation.
            const std::size_t lanes = run.pages.size() / run.columns.size();
            for (std::size_t i = 0; i < run.columns.size(); ++i) {
                for (std::size_t l = 0; l < lanes; ++l) add(run.pages[i * lanes + l]);
                const kvcore::CachedColumn& column = run.columns[i];
                add(column.windows), add(column.passed), add(column.state);
            }
            columns += count(run.columns);
        }
        add(columns);
        return out;
    }
    [[nodiscard]] kvcore::ColumnSpan span(const Run& run) const {
        return cache_mover::span_of(scene.manager, run);
    }

    GroupScene scene;
    std::vector<Run> runs;
    Run whole;  // offered from its first column on
    Run here;   // already cached
    CacheExport held;
    CacheImport taken;
    kvcore::HeldPages pages;  // held pages of the import
};

using ScenePtr = std::unique_ptr<Scene>;

template <class Make, class Call>
void leaves_no_trace(const Use& use, const char* verb, Make&& make, Call&& call) {
    failing_memory::any_site((std::string(use.name) + ", " + verb).c_str(), make, call,
                             [](const ScenePtr& s) { return s->text(); });
}

void calls(const Use& use) {
    const auto make = [&use] { return std::make_unique<Scene>(use); };
    const auto with_import = [&] {
        ScenePtr s = make();
        s->taken = s->scene.manager.import_columns(s->span(s->whole), s->whole.columns.data());
        CHECK(s->taken.status() == kvcore::ImportStatus::kTaken);
        return s;
    };
    const auto with_held_import = [&] {
        ScenePtr s = with_import();
        std::vector<BlockId> pages;
        for (std::size_t i = 0; i < s->taken.pages().size(); i += 2) {
            if (s->taken.pages()[i] >= 0) pages.push_back(s->taken.pages()[i]);
        }
        CHECK(!pages.empty());
        s->pages = s->scene.manager.hold(0, pages.data(), count(pages));
        return s;
    };
    const auto with_export = [&] {
        ScenePtr s = make();
        s->held = s->scene.manager.export_columns(s->span(s->here));
        CHECK(!s->held.columns().empty());
        return s;
    };
    leaves_no_trace(use, "cached_tree", make,
                    [](const ScenePtr& s) { static_cast<void>(s->scene.manager.cached_tree(0)); });
    leaves_no_trace(use, "export", make, [](const ScenePtr& s) {
        s->held = s->scene.manager.export_columns(s->span(s->here));
    });
    leaves_no_trace(use, "import", make, [](const ScenePtr& s) {
        s->taken = s->scene.manager.import_columns(s->span(s->whole), s->whole.columns.data());
    });
    leaves_no_trace(use, "publish", with_import,
                    [](const ScenePtr& s) { CHECK(s->scene.manager.publish(s->taken)); });
    leaves_no_trace(use, "publish held pages", with_held_import, [](const ScenePtr& s) {
        CHECK(s->scene.manager.publish(s->taken));
        s->pages = kvcore::HeldPages();
    });
    const auto reset = [](const ScenePtr& s) {
        static_cast<void>(s->scene.manager.reset_prefix_cache());
    };
    leaves_no_trace(use, "reset while importing", with_import, reset);
    leaves_no_trace(use, "reset while exporting", with_export, reset);
    leaves_no_trace(use, "reset while importing held pages", with_held_import, reset);
    failing_memory::allocates_nothing("end of an import", with_import,
                                      [](const ScenePtr& s) { s->taken = CacheImport(); });
    failing_memory::allocates_nothing("end of an export", with_export,
                                      [](const ScenePtr& s) { s->held = CacheExport(); });
}

TEST(calls_leave_no_trace) {
    for (const Use& use : kUses) calls(use);
}

}  // namespace

}  // namespace tests::faults::cache_copies
