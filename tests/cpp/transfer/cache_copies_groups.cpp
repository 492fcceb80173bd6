// SPDX-License-Identifier: Apache-2.0
// Export and import of columns of models in which some layers do not keep every token: holes, kept
// windows, checkpoints.
#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "support/cache_mover.hpp"
#include "support/check.hpp"
#include "support/group_scene.hpp"

namespace tests::transfer::cache_copies_groups {

using cache_mover::restore;
using cache_mover::Run;
using cache_mover::save;
using cache_mover::span_of;
using kvcore::CacheExport;
using kvcore::CacheGroup;
using kvcore::CacheImport;
using kvcore::GroupKind;
using kvcore::ImportStatus;

namespace {

constexpr CacheGroup kFull{GroupKind::kFull, 0, 1, 0};
constexpr CacheGroup kSliding{GroupKind::kSliding, 7, 2, 0};
constexpr CacheGroup kChunked{GroupKind::kChunked, 12, 1, 2};

kvcore::CacheConfig config_of(std::int64_t num_pages, bool has_states = false) {
    kvcore::CacheConfig config = GroupScene::config(4, num_pages, {kFull, kSliding, kChunked});
    if (has_states) {
        config.states = {{8}};
        config.num_state_slots = 24;
    }
    return config;
}

/// The parts of each column of each prefix.
std::map<Tokens, std::vector<bool>> parts_of(kvcore::CacheManager& manager) {
    std::map<Tokens, std::vector<bool>> found;
    const auto page = static_cast<std::ptrdiff_t>(manager.config().page_size);
    for (const Run& run : save(manager)) {
        const std::size_t lanes = run.pages.size() / run.columns.size();
        for (std::size_t i = 0; i < run.columns.size(); ++i) {
            std::vector<bool> has;
            for (std::size_t lane = 0; lane < lanes; ++lane) {
                has.push_back(run.pages[i * lanes + lane] >= 0);
            }
            has.push_back(run.columns[i].state >= 0);
            const auto end = (run.first + static_cast<std::ptrdiff_t>(i) + 1) * page;
            found[Tokens(run.tokens.begin(), run.tokens.begin() + end)] = has;
        }
    }
    return found;
}

void put(GroupScene& scene, const Tokens& tokens, std::int64_t chunk = 1 << 20) {
    scene.put(tokens, chunk);
    static_cast<void>(scene.manager.take_state_copies());
}

void fill(GroupScene& scene) {
    const Tokens common = count_up(0, 30);
    put(scene, common + count_up(100, 25));
    put(scene, common + count_up(200, 25), 16);
    put(scene, count_up(300, 50), 9);
    put(scene, common + count_up(100, 25) + count_up(400, 30));
}

void test_holes_stay_holes(bool has_states) {
    for (const std::int64_t pages : {170, 240, 400}) {
        GroupScene from(config_of(pages, has_states));
        fill(from);
        const std::vector<Run> runs = save(from.manager);
        GroupScene into(config_of(400, has_states));
        const std::int64_t cached = from.manager.stats(0).cached_pages;
        CHECK_EQ(restore(into.manager, runs), cached);
        CHECK_EQ(into.manager.stats(0).cached_pages, cached);
        CHECK(parts_of(into.manager) == parts_of(from.manager));
        CHECK_EQ(restore(into.manager, runs), 0);
        CHECK_EQ(into.used(), 0);
        for (const Run& run : runs) {
            CHECK_EQ(into.match(run.tokens), from.match(run.tokens));
        }
    }
}

TEST(what_is_missing_is_brought) {
    GroupScene from(config_of(400));
    GroupScene into(config_of(400));
    fill(from);
    const Tokens tokens = count_up(0, 30) + count_up(100, 25);
    into.put(tokens);
    const auto before = parts_of(into.manager);
    const std::vector<Run> runs = save(from.manager);
    CHECK(restore(into.manager, runs) > 0);
    auto wanted = parts_of(from.manager);
    for (const auto& [prefix, has] : before) {
        std::vector<bool>& all = wanted[prefix];
        for (std::size_t i = 0; i < has.size(); ++i) all[i] = all[i] || has[i];
    }
    CHECK(parts_of(into.manager) == wanted);
}

TEST(windows_of_exports_are_held) {
    GroupScene scene(config_of(100));
    scene.put(count_up(0, 40));
    std::vector<Run> runs = save(scene.manager);
    const std::vector<BlockId> pages = runs[0].pages;
    CacheExport held = scene.manager.export_columns(span_of(scene.manager, runs[0]));
    scene.put(count_up(1000, 30));
    scene.manager.check_integrity();
    CHECK_EQ(scene.match(count_up(0, 40)), 40);
    CHECK(save(scene.manager)[0].pages == pages || save(scene.manager)[1].pages == pages);
    scene.manager.reset_prefix_cache();
    scene.manager.check_integrity();
    CHECK_EQ(scene.match(count_up(0, 40)), 0);
    CHECK(scene.used() > 0);
    held = CacheExport();
    scene.manager.check_integrity();
    CHECK_EQ(scene.used(), 0);
}

void test_a_reset_in_the_middle(bool has_states) {
    GroupScene from(config_of(400, has_states));
    fill(from);
    std::vector<Run> runs = save(from.manager);
    GroupScene scene(config_of(400, has_states));
    Request request = scene.claim(count_up(0, 31));
    scene.complete(request);  // holds some of these columns
    static_cast<void>(scene.manager.take_state_copies());
    std::vector<CacheExport> exports;
    std::vector<CacheImport> imports;
    for (const Run& run : save(scene.manager)) {
        exports.push_back(scene.manager.export_columns(span_of(scene.manager, run)));
        exports.push_back(scene.manager.export_columns(span_of(scene.manager, run)));
    }
    for (const Run& run : runs) {
        imports.push_back(
            scene.manager.import_columns(span_of(scene.manager, run), run.columns.data()));
    }
    scene.manager.check_integrity();
    scene.manager.reset_prefix_cache();
    scene.manager.check_integrity();
    for (CacheImport& each : imports) {
        const bool holds =
            each.status() == ImportStatus::kTaken || each.status() == ImportStatus::kKnown;
        if (holds) CHECK(!scene.manager.publish(each));
        scene.manager.check_integrity();
    }
    exports.clear();
    scene.manager.check_integrity();
    scene.manager.release(request.sequence);
    CHECK_EQ(scene.used(), 0);
    CHECK_EQ(scene.manager.state_stats(0).used_slots, 0);
}

void test_what_is_not_published_is_free_again(bool has_states) {
    GroupScene from(config_of(400, has_states));
    fill(from);
    GroupScene into(config_of(400, has_states));
    into.put(count_up(0, 20));
    static_cast<void>(into.manager.take_state_copies());
    const auto before = parts_of(into.manager);
    const std::int64_t free = into.manager.stats(0).free_pages;
    for (const Run& run : save(from.manager)) {
        CacheImport taken =
            into.manager.import_columns(span_of(into.manager, run), run.columns.data());
        into.manager.check_integrity();
    }
    into.manager.check_integrity();
    CHECK_EQ(into.manager.stats(0).free_pages, free);
    CHECK(parts_of(into.manager) == before);
}

void test_two_that_bring_the_same(bool has_states) {
    GroupScene from(config_of(400, has_states));
    fill(from);
    GroupScene into(config_of(800, has_states));
    const std::vector<Run> runs = save(from.manager);
    for (const Run& run : runs) {
        CacheImport one =
            into.manager.import_columns(span_of(into.manager, run), run.columns.data());
        Run fewer = run;
        for (kvcore::CachedColumn& column : fewer.columns) column.windows &= 1;
        CacheImport other =
            into.manager.import_columns(span_of(into.manager, fewer), fewer.columns.data());
        CHECK(into.manager.publish(other));
        into.manager.check_integrity();
        CHECK(into.manager.publish(one));
        into.manager.check_integrity();
    }
    CHECK(parts_of(into.manager) == parts_of(from.manager));
}

TEST(quotas_of_groups) {
    GroupScene from(config_of(400));
    fill(from);
    kvcore::CacheConfig config = config_of(200);
    config.quotas = {{100, 150}};
    GroupScene into(config);
    CHECK(restore(into.manager, save(from.manager)) > 0);
    CHECK_EQ(into.used(), 0);
    static_cast<void>(save(into.manager));
    into.manager.reset_prefix_cache();
    into.manager.check_integrity();
}

TEST(holes_stay_holes) {
    for (const bool has_states : {false, true}) test_holes_stay_holes(has_states);
}

TEST(a_reset_in_the_middle) {
    for (const bool has_states : {false, true}) test_a_reset_in_the_middle(has_states);
}

TEST(what_is_not_published_is_free_again) {
    for (const bool has_states : {false, true})
        test_what_is_not_published_is_free_again(has_states);
}

TEST(two_that_bring_the_same) {
    for (const bool has_states : {false, true}) test_two_that_bring_the_same(has_states);
}

}  // namespace

}  // namespace tests::transfer::cache_copies_groups
