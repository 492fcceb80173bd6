// SPDX-License-Identifier: Apache-2.0
// Columns that are exported as bytes and imported again: which pages calls hold, find and forget.
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "kvcore/errors.hpp"
#include "support/cache_mover.hpp"
#include "support/check.hpp"
#include "support/manager_fixture.hpp"

namespace tests::transfer::cache_copies {

using cache_mover::list;
using cache_mover::restore;
using cache_mover::Run;
using cache_mover::save;
using cache_mover::span_of;
using kvcore::CacheExport;
using kvcore::CacheImport;
using kvcore::ImportStatus;

namespace {

kvcore::CacheConfig with_quota(std::int64_t reserved) {
    kvcore::CacheConfig config = ManagerFixture::config(4, 16);
    config.quotas = {{reserved, 16}};
    return config;
}

Run run_of(const Tokens& tokens, std::int32_t first = 0, const std::string& name = "") {
    Run run;
    run.name = name;
    run.tokens = tokens;
    run.first = first;
    run.columns.resize(tokens.size() / 4 - static_cast<std::size_t>(first));
    return run;
}

// ---- exports --------------------------------------------------------------------------------

TEST(what_is_exported_stays) {
    ManagerFixture s(ManagerFixture::config(4, 6));
    s.put(count_up(0, 8));
    s.put(count_up(100, 8));
    std::vector<Run> runs = list(s.manager);
    const Run& run = runs[0].tokens[0] == 0 ? runs[0] : runs[1];
    CacheExport held = s.manager.export_columns(span_of(s.manager, run));
    CHECK_EQ(held.columns().size(), 2U);
    Ids ids;
    CHECK_EQ(s.match(count_up(0, 8), 0, "", &ids), 2);
    CHECK(ids == held.pages());
    Request request = s.claim(count_up(200, 20));
    CHECK(!s.reserve(request));  // the free pages and the other two are not enough
    Request smaller = s.claim(count_up(200, 16));
    CHECK(s.reserve(smaller));
    CHECK_EQ(s.match(count_up(0, 8)), 2);
    CHECK_EQ(s.match(count_up(100, 8)), 0);
    s.manager.check_integrity();
    held = CacheExport();
    CHECK(held.columns().empty() && held.pages().empty());
    s.manager.release(smaller.sequence);
    CHECK(s.reserve(request));
    s.manager.release(request.sequence);
}

TEST(an_export_is_no_use) {
    ManagerFixture s(ManagerFixture::config(4, 4));
    s.put(count_up(0, 8));
    s.put(count_up(100, 8));
    static_cast<void>(save(s.manager));
    s.put(count_up(200, 4));
    CHECK_EQ(s.match(count_up(0, 8)), 1);
    CHECK_EQ(s.match(count_up(100, 8)), 2);
}

TEST(only_what_is_still_cached_is_exported) {
    ManagerFixture s(ManagerFixture::config(4, 6));
    s.put(count_up(0, 16));
    const std::vector<Run> runs = list(s.manager);
    Request request = s.claim(count_up(100, 16));
    CHECK(s.reserve(request));
    CHECK_EQ(s.manager.export_columns(span_of(s.manager, runs[0])).columns().size(), 2U);
    Run tail = runs[0];
    tail.first = 2;
    CHECK(s.manager.export_columns(span_of(s.manager, tail)).columns().empty());
    tail.name = "unknown";
    CHECK(s.manager.export_columns(span_of(s.manager, tail)).columns().empty());
    s.manager.release(request.sequence);
}

TEST(a_reset_forgets_what_is_exported_but_keeps_its_pages) {
    ManagerFixture s(ManagerFixture::config(4, 6));
    s.put(count_up(0, 16));
    const std::vector<Run> runs = list(s.manager);
    const kvcore::ColumnSpan span = span_of(s.manager, runs[0]);
    CacheExport held = s.manager.export_columns(span);
    CacheExport again = s.manager.export_columns(span);
    s.manager.reset_prefix_cache();
    s.manager.check_integrity();
    CHECK_EQ(s.match(count_up(0, 16)), 0);
    CHECK_EQ(s.available(), 2);
    CHECK_EQ(held.columns().size(), 4U);
    CHECK(s.manager.export_columns(span).columns().empty());  // from before the reset
    Request request = s.claim(count_up(0, 12));
    CHECK(!s.reserve(request));
    held = CacheExport();
    CHECK_EQ(s.available(), 2);
    again = CacheExport();
    CHECK_EQ(s.available(), 6);
    CHECK_EQ(s.free(), 6);
    s.manager.check_integrity();
}

TEST(what_a_request_holds_too_is_found_no_more_after_a_reset) {
    ManagerFixture s(ManagerFixture::config(4, 8));
    Request held = served(s, count_up(0, 8), 1);
    s.put(count_up(0, 8) + count_up(50, 8));
    std::vector<Run> runs = list(s.manager);
    std::vector<CacheExport> exports;
    for (const Run& run : runs) {
        exports.push_back(s.manager.export_columns(span_of(s.manager, run)));
    }
    s.manager.reset_prefix_cache();
    s.manager.check_integrity();
    CHECK_EQ(s.match(count_up(0, 8)), 0);
    CHECK_EQ(s.match(count_up(0, 8) + count_up(50, 8)), 0);
    exports.clear();
    s.manager.check_integrity();
    s.manager.release(held.sequence);
    CHECK_EQ(s.available(), 8);
}

// ---- imports --------------------------------------------------------------------------------

TEST(what_is_brought_is_found_once_it_is_published) {
    ManagerFixture s(ManagerFixture::config(4, 16));
    const Run run = run_of(count_up(0, 12));
    CacheImport taken = s.manager.import_columns(span_of(s.manager, run), run.columns.data());
    CHECK_EQ(taken.status(), ImportStatus::kTaken);
    CHECK_EQ(taken.columns().size(), 3U);
    CHECK_EQ(s.match(run.tokens), 0);
    CHECK_EQ(s.free(), 13);
    CHECK_EQ(s.available(), 13);
    s.manager.check_integrity();
    const Ids pages = taken.pages();
    CHECK(s.manager.publish(taken));
    CHECK(taken.columns().empty());
    CHECK_THROWS(std::invalid_argument, static_cast<void>(s.manager.publish(taken)));
    Ids ids;
    CHECK_EQ(s.match(run.tokens, 0, "", &ids), 3);
    CHECK(ids == pages);
    CHECK_EQ(s.available(), 16);
}

TEST(what_is_not_published_leaves_no_trace) {
    ManagerFixture s(ManagerFixture::config(4, 16));
    s.put(count_up(0, 8));
    const Trace before = s.trace({});
    for (const Run& run : {run_of(count_up(0, 16), 2), run_of(count_up(0, 16), 0),
                           run_of(count_up(0, 12), 0, "new")}) {
        CacheImport taken = s.manager.import_columns(span_of(s.manager, run), run.columns.data());
        CHECK_EQ(taken.status(), ImportStatus::kTaken);
        taken = CacheImport();
        Trace after = s.trace({});
        after.numbers[8] = before.numbers[8];  // peak of used pages
        CHECK(after == before);
    }
}

TEST(what_is_cached_is_not_written_again) {
    ManagerFixture s(ManagerFixture::config(4, 16));
    s.put(count_up(0, 8));
    const Run run = run_of(count_up(0, 16));
    CacheImport taken = s.manager.import_columns(span_of(s.manager, run), run.columns.data());
    CHECK_EQ(taken.pages()[0], -1);
    CHECK_EQ(taken.pages()[1], -1);
    CHECK(taken.pages()[2] >= 0 && taken.pages()[3] >= 0);
    CHECK_EQ(s.free(), 12);
    CHECK(s.manager.publish(taken));
    CHECK_EQ(s.match(run.tokens), 4);
    taken = s.manager.import_columns(span_of(s.manager, run), run.columns.data());
    CHECK_EQ(taken.status(), ImportStatus::kKnown);
    CHECK_EQ(s.free(), 12);
    CHECK(s.manager.publish(taken));
}

TEST(of_two_that_bring_the_same_one_is_kept) {
    ManagerFixture s(ManagerFixture::config(4, 16));
    const Run run = run_of(count_up(0, 16));
    const Run longer = run_of(count_up(0, 20));
    CacheImport one = s.manager.import_columns(span_of(s.manager, run), run.columns.data());
    CacheImport other = s.manager.import_columns(span_of(s.manager, longer), longer.columns.data());
    s.put(count_up(0, 8));
    const Ids pages = one.pages();
    CHECK(s.manager.publish(one));
    s.manager.check_integrity();
    CHECK(s.manager.publish(other));
    s.manager.check_integrity();
    Ids ids;
    CHECK_EQ(s.match(longer.tokens, 0, "", &ids), 5);
    CHECK_EQ(ids[2], pages[2]);
    CHECK(ids[0] != pages[0]);
    CHECK_EQ(s.free(), 11);
    CHECK_EQ(s.available(), 16);
}

TEST(what_has_no_parent_or_no_room_is_told) {
    ManagerFixture s(ManagerFixture::config(4, 6));
    const Run orphan = run_of(count_up(0, 16), 2);
    CHECK_EQ(s.manager.import_columns(span_of(s.manager, orphan), orphan.columns.data()).status(),
             ImportStatus::kNoParent);
    s.put(count_up(0, 4));
    CHECK_EQ(s.manager.import_columns(span_of(s.manager, orphan), orphan.columns.data()).status(),
             ImportStatus::kNoParent);
    s.put(count_up(0, 8));
    CacheImport taken = s.manager.import_columns(span_of(s.manager, orphan), orphan.columns.data());
    CHECK_EQ(taken.columns().size(), 2U);
    const Run large = run_of(count_up(100, 16));
    CacheImport part = s.manager.import_columns(span_of(s.manager, large), large.columns.data());
    CHECK_EQ(part.columns().size(), 2U);  // an import evicts nothing
    CHECK_EQ(s.manager.import_columns(span_of(s.manager, large), large.columns.data()).status(),
             ImportStatus::kNoRoom);
    CHECK(s.manager.publish(part));
    CHECK_EQ(s.match(large.tokens), 2);
    CHECK(s.manager.publish(taken));
    CHECK_EQ(s.match(orphan.tokens), 4);
    CHECK_EQ(s.manager.import_columns(span_of(s.manager, large), large.columns.data()).status(),
             ImportStatus::kKnown);  // only the cached columns
}

TEST(what_was_begun_before_a_reset_is_not_wanted) {
    ManagerFixture s(ManagerFixture::config(4, 8));
    s.put(count_up(0, 8));
    const Run run = run_of(count_up(0, 16), 2);
    const kvcore::ColumnSpan span = span_of(s.manager, run);
    CacheImport taken = s.manager.import_columns(span, run.columns.data());
    s.manager.reset_prefix_cache();
    s.manager.check_integrity();
    CHECK_EQ(s.available(), 6);
    CHECK(!s.manager.publish(taken));
    CHECK_EQ(s.available(), 8);
    CHECK_EQ(s.match(run.tokens), 0);
    CHECK_EQ(s.manager.import_columns(span, run.columns.data()).status(), ImportStatus::kReset);
}

TEST(a_run_grows_from_part_to_part) {
    ManagerFixture s(ManagerFixture::config(4, 200));
    const Tokens tokens = count_up(0, 400);
    for (std::int32_t first = 0; first < 100; first += 2) {
        const Run run =
            run_of(Tokens(tokens.begin(), tokens.begin() + std::ptrdiff_t{4} * (first + 2)), first);
        CacheImport taken = s.manager.import_columns(span_of(s.manager, run), run.columns.data());
        CHECK(s.manager.publish(taken, first < 98));
    }
    CHECK_EQ(s.match(tokens), 100);
    CHECK(list(s.manager).size() <= 20);
}

TEST(what_cannot_be_is_refused) {
    ManagerFixture s(ManagerFixture::config(4, 8));
    Run run = run_of(count_up(0, 8));
    const auto import = [&](kvcore::ColumnSpan span) {
        static_cast<void>(s.manager.import_columns(span, run.columns.data()));
    };
    for (int i = 0; i < 4; ++i) {
        kvcore::ColumnSpan span = span_of(s.manager, run);
        if (i == 0) span.n = 7;
        if (i == 1) span.first = 2;
        if (i == 2) span.first = -1;
        if (i == 3) span.n = 0;
        CHECK_THROWS(std::invalid_argument, import(span));
        CHECK_THROWS(std::invalid_argument, static_cast<void>(s.manager.export_columns(span)));
        span.replica = 1;
        CHECK_THROWS(std::out_of_range, import(span));
    }
    run.columns[1].windows = 1;
    CHECK_THROWS(std::invalid_argument, import(span_of(s.manager, run)));
    run.columns[1] = {0, 0, 3};
    CHECK_THROWS(std::invalid_argument, import(span_of(s.manager, run)));
    CHECK_THROWS(std::out_of_range, static_cast<void>(s.manager.cached_tree(1)));
    kvcore::CacheConfig config = ManagerFixture::config(4, 8);
    config.prefix_caching = false;
    ManagerFixture other(config);
    run.columns[1] = {};
    CHECK_THROWS(std::invalid_argument, static_cast<void>(other.manager.import_columns(
                                            span_of(other.manager, run), run.columns.data())));
}

// ---- whole caches ---------------------------------------------------------------------------

TEST(a_cache_comes_back_and_goes_in_the_same_order) {
    ManagerFixture from(ManagerFixture::config(4, 64));
    from.put(count_up(0, 8) + count_up(100, 20));
    from.put(count_up(0, 8) + count_up(200, 20), 0, "salt");
    from.put(count_up(0, 8) + count_up(300, 20));
    from.put(count_up(400, 20));
    from.put(count_up(0, 8) + count_up(100, 12));
    const std::vector<Run> runs = save(from.manager);
    ManagerFixture into(ManagerFixture::config(4, 64));
    CHECK_EQ(restore(into.manager, runs), from.manager.stats(0).cached_pages);
    for (const Run& run : runs)
        CHECK_EQ(into.match(run.tokens, 0, run.name), count(run.tokens) / 4);
    CHECK_EQ(restore(into.manager, runs), 0);
    while (from.available() == 64 && from.manager.stats(0).cached_pages > 1) {
        for (ManagerFixture* s : {&from, &into}) {
            Request request = s->claim(count_up(9000, 4 * (s->free() + 1)));
            CHECK(s->reserve(request));
            s->manager.release(request.sequence);
        }
        for (const Run& run : runs) {
            CHECK_EQ(into.match(run.tokens, 0, run.name), from.match(run.tokens, 0, run.name));
        }
    }
}

TEST(a_smaller_pool_takes_what_is_worth_most) {
    ManagerFixture from(ManagerFixture::config(4, 64));
    for (TokenId i = 0; i < 8; ++i) from.put(count_up(1000 * i, 16));
    ManagerFixture into(ManagerFixture::config(4, 18));
    CHECK_EQ(restore(into.manager, save(from.manager)), 18);
    for (TokenId i = 0; i < 8; ++i) {
        const std::int64_t expected = i >= 4 ? 4 : i == 3 ? 2 : 0;
        CHECK_EQ(into.match(count_up(1000 * i, 16)), expected);
    }
}

// ---- quotas ---------------------------------------------------------------------------------

TEST(quotas_are_kept) {
    ManagerFixture s(with_quota(10));
    const Run run = run_of(count_up(0, 40));
    CacheImport taken = s.manager.import_columns(span_of(s.manager, run), run.columns.data());
    CHECK_EQ(taken.columns().size(), 6U);  // the remaining pages are reserved
    s.manager.check_integrity();
    CHECK(s.manager.publish(taken));
    s.manager.check_integrity();
    CHECK_EQ(s.available(), 16);
    const Run rest = run_of(count_up(0, 40), 6);
    taken = s.manager.import_columns(span_of(s.manager, rest), rest.columns.data());
    CHECK(taken.status() == ImportStatus::kNoRoom);
    std::vector<Run> runs = list(s.manager);
    CHECK_EQ(runs.size(), 1U);
    kvcore::CacheExport held = s.manager.export_columns(span_of(s.manager, runs[0]));
    CHECK_EQ(held.columns().size(), 6U);
    s.manager.check_integrity();
    s.manager.reset_prefix_cache();
    s.manager.check_integrity();
}

}  // namespace

}  // namespace tests::transfer::cache_copies
