// SPDX-License-Identifier: Apache-2.0
// Pages that are held by their ids, and `first_page`.
#include <numeric>
#include <utility>

#include "support/cache_mover.hpp"
#include "support/manager_fixture.hpp"

namespace tests::cache::hold {

using kvcore::HeldPages;
using kvcore::InvalidHandleError;

namespace {

HeldPages hold(ManagerFixture& m, const Ids& pages, std::int32_t replica = 0) {
    HeldPages held = m.manager.hold(replica, pages.data(), count(pages));
    m.manager.check_integrity();
    return held;
}

Ids all_pages(std::int64_t n, BlockId first = 0) {
    Ids ids(static_cast<std::size_t>(n));
    std::iota(ids.begin(), ids.end(), first);
    return ids;
}

TEST(a_held_page_outlives_its_request) {
    ManagerFixture m(ManagerFixture::config(2, 8));
    Request request = m.claim(count_up(0, 7));
    CHECK(m.reserve(request));
    const Ids row = m.pages(request);
    HeldPages held = hold(m, {row[0], row[3]});
    CHECK(held.pages() == (Ids{row[0], row[3]}));
    m.manager.release(request.sequence);
    m.manager.check_integrity();
    CHECK_EQ(m.free(), 6);
    Request large = m.claim(count_up(50, 12));
    CHECK(m.reserve(large));
    for (const BlockId page : m.pages(large)) CHECK(page != row[0] && page != row[3]);
    held.let_go();
    CHECK_EQ(m.free(), 2);
    CHECK_THROWS(InvalidHandleError, held.let_go());
    CHECK(held.pages().empty());
}

// A held page keeps its whole prefix in the cache.
TEST(a_held_page_is_not_evicted) {
    ManagerFixture m(ManagerFixture::config(2, 8));
    m.put(count_up(0, 8));
    Ids ids;
    m.match(count_up(0, 8), 0, "", &ids);
    {
        const HeldPages first = hold(m, {ids[1], ids[1]});
        const HeldPages second = hold(m, {ids[1]});
        CHECK_EQ(m.available(), 6);  // the pages after them in the run stay evictable
        Request large = m.claim(count_up(50, 14));
        CHECK(!m.reserve(large));
        m.manager.release(large.sequence);
    }
    CHECK_EQ(m.available(), 8);
    Request large = m.claim(count_up(50, 16));
    CHECK(m.reserve(large));
}

TEST(holds_are_refused_without_a_trace) {
    ManagerFixture m(ManagerFixture::config(2, 8));
    m.put(count_up(0, 4));
    Ids ids;
    m.match(count_up(0, 4), 0, "", &ids);
    const Trace before = m.trace({});
    CHECK_THROWS(InvalidHandleError, hold(m, {ids[0], 8}));
    CHECK_THROWS(InvalidHandleError, hold(m, {ids[0], -1}));
    CHECK_THROWS(InvalidHandleError, hold(m, {ids[0], 7}));  // a free page
    CHECK_THROWS(std::out_of_range, hold(m, {ids[0]}, 1));
    CHECK(m.trace({}) == before);
    HeldPages nothing = hold(m, {});
    nothing = HeldPages();
    CHECK_THROWS(InvalidHandleError, nothing.let_go());
}

// A held page that is committed later belongs to the tree, as if the hold had been made after the
// commit.
TEST(held_pages_are_committed) {
    ManagerFixture m(ManagerFixture::config(2, 16));
    Request request = m.claim(count_up(0, 8));
    CHECK(m.reserve(request));
    HeldPages held = hold(m, {m.pages(request)[1], m.pages(request)[2]});
    m.run(request, 8);
    m.manager.check_integrity();
    CHECK_EQ(m.match(count_up(0, 8)), 4);
    m.manager.release(request.sequence);
    CHECK_EQ(m.available(), 16 - 3);
    held.let_go();
    m.manager.check_integrity();
    CHECK_EQ(m.available(), 16);
}

TEST(a_held_page_is_swapped_for_a_cached_one) {
    ManagerFixture m(ManagerFixture::config(2, 16));
    Request first = m.claim(count_up(0, 5));
    Request second = m.claim(count_up(0, 5));
    CHECK(m.reserve(first) && m.reserve(second));
    m.run(first, 5);
    const BlockId own = m.pages(second)[0];
    HeldPages held = hold(m, {own});
    m.run(second, 5);
    CHECK_EQ(m.pages(second)[0], m.pages(first)[0]);
    m.manager.check_integrity();
    m.manager.release(first.sequence);
    m.manager.release(second.sequence);
    CHECK_EQ(m.available(), 15);
    held.let_go();
    CHECK_EQ(m.available(), 16);
}

TEST(a_reset_forgets_what_is_held) {
    ManagerFixture m(ManagerFixture::config(2, 16));
    m.put(count_up(0, 8));
    Ids ids;
    m.match(count_up(0, 8), 0, "", &ids);
    HeldPages held = hold(m, {ids[3], ids[1], ids[1]});
    m.manager.reset_prefix_cache();
    m.manager.check_integrity();
    CHECK_EQ(m.match(count_up(0, 8)), 0);
    CHECK_EQ(m.free(), 14);
    held.let_go();
    CHECK_EQ(m.free(), 16);
}

TEST(held_pages_are_forgotten) {
    ManagerFixture m(ManagerFixture::config(2, 16));
    m.put(count_up(0, 8));
    Ids ids;
    m.match(count_up(0, 8), 0, "", &ids);
    HeldPages held = hold(m, {ids[2]});
    CHECK_EQ(m.manager.forget(0, ids.data() + 1, 1), 3);
    m.manager.check_integrity();
    HeldPages more = hold(m, {ids[2]});  // a page that is still held can be held again
    CHECK_THROWS(InvalidHandleError, hold(m, {ids[0], 15}));
    m.manager.reset_prefix_cache();
    m.manager.check_integrity();
    held.let_go();
    m.manager.check_integrity();
    more.let_go();
    CHECK_EQ(m.available(), 16);
}

// After a reset, a hold on a forgotten page does not keep the pages before it in the cache.
TEST(a_reset_forgets_the_prefix_of_forgotten_pages) {
    ManagerFixture m(ManagerFixture::config(2, 16));
    m.put(count_up(0, 16));
    Ids ids;
    m.match(count_up(0, 16), 0, "", &ids);
    HeldPages held = hold(m, {ids[1], ids[5], ids[7], ids[5]});
    CHECK_EQ(m.manager.forget(0, &ids[4], 1), 4);
    CHECK_EQ(m.match(count_up(0, 16)), 4);
    m.manager.reset_prefix_cache();
    m.manager.check_integrity();
    CHECK_EQ(m.match(count_up(0, 16)), 0);
    CHECK_EQ(m.free(), 13);
    held.let_go();
    CHECK_EQ(m.free(), 16);
}

// An export keeps neither its forgotten pages nor its other pages in the cache after a reset.
TEST(exported_pages_are_forgotten_and_reset) {
    for (const BlockId bad : {0, 4}) {
        ManagerFixture m(ManagerFixture::config(2, 16));
        const std::vector<TokenId> tokens = count_up(0, 16);
        m.put(tokens);
        Ids ids;
        m.match(tokens, 0, "", &ids);
        kvcore::ColumnSpan span;
        span.tokens = tokens.data();
        span.n = 16;
        span.first = 2;
        kvcore::CacheExport copied = m.manager.export_columns(span);
        CHECK_EQ(count(copied.pages()), 6);
        CHECK_EQ(m.manager.forget(0, &ids[static_cast<std::size_t>(bad)], 1), 8 - bad);
        m.manager.reset_prefix_cache();
        m.manager.check_integrity();
        CHECK_EQ(m.match(tokens), 0);
        CHECK_EQ(m.free(), 10);
        copied = kvcore::CacheExport();
        m.manager.check_integrity();
        CHECK_EQ(m.free(), 16);
    }
}

// A request with the same pages keeps its own pages and their prefix.
TEST(a_request_keeps_the_prefix_of_its_forgotten_pages) {
    ManagerFixture m(ManagerFixture::config(2, 16));
    Request request = m.claim(count_up(0, 9));
    CHECK(m.reserve(request));
    m.run(request, 9);
    const Ids row = m.pages(request);
    HeldPages held = hold(m, {row[3]});
    CHECK_EQ(m.manager.forget(0, &row[2], 1), 2);
    m.manager.reset_prefix_cache();
    m.manager.check_integrity();
    CHECK_EQ(m.match(count_up(0, 9)), 0);
    HeldPages more = hold(m, {row[2], row[3]});
    m.manager.release(request.sequence);
    m.manager.check_integrity();
    m.manager.reset_prefix_cache();
    m.manager.check_integrity();
    CHECK_EQ(m.match(count_up(0, 9)), 0);
    CHECK_EQ(m.free(), 14);
    more.let_go();
    CHECK_EQ(m.free(), 15);
    held.let_go();
    CHECK_EQ(m.free(), 16);
}

kvcore::CacheConfig with_windows(std::int64_t num_pages) {
    kvcore::CacheConfig config = ManagerFixture::config(2, num_pages);
    config.groups = {{}, {kvcore::GroupKind::kSliding, 4, 1, 0}};
    return config;
}

// A request that has reserved pages takes a longer hit. Its old pages are held by their ids, so
// they are not freed, and the plan must not count them as free.
enum class Call { kReserve, kFetch, kFetchTwo, kAllocate };

void held_pages_are_no_room_for_a_longer_hit(bool has_windows, Call call) {
    const std::int64_t lanes = has_windows ? 2 : 1;
    kvcore::CacheConfig config =
        has_windows ? with_windows(12 * lanes) : ManagerFixture::config(2, 12);
    config.partial_page_reuse = 0;
    ManagerFixture m(config);
    Request request = m.claim(count_up(0, 12));
    CHECK(m.reserve(request));  // 6 columns of its own pages
    Request other = m.claim(count_up(0, 10));
    m.run(other, 90);  // the same prefix: 5 columns are cached
    const Ids row = m.pages(request);
    HeldPages held = hold(m, row);
    m.manager.release(other.sequence);
    CHECK_EQ(m.free(), has_windows ? 2 : 1);
    request.append(91);
    for (TokenId t = 92; t < 97; ++t) request.append(t);
    request.active = request.end();  // 9 columns: 5 cached, its own last column, 3 new
    Request small = m.claim(count_up(500, 1));
    const Trace before = m.trace({&request, &small});
    const kvcore::ReservePlan plan = m.manager.plan(request.view());
    CHECK_EQ(plan.hit_tokens, 10);
    CHECK(!plan.fits);
    if (call == Call::kReserve) CHECK(!m.reserve(request));
    if (call == Call::kFetch) CHECK_EQ(m.fetch({&request}).status, kvcore::FetchStatus::kNoSpace);
    if (call == Call::kFetchTwo) {
        CHECK_EQ(m.fetch({&request, &small}).status, kvcore::FetchStatus::kNoSpace);
    }
    if (call == Call::kAllocate) {
        kvcore::PrefixHit hit = m.manager.match(request.view());
        kvcore::RequestView view = request.view();
        CHECK_EQ(m.manager.allocate(hit, view, view.end), kvcore::ReserveStatus::kNoSpace);
    }
    CHECK(m.trace({&request, &small}) == before);
    held.let_go();
    CHECK(m.manager.plan(request.view()).fits);
    CHECK(m.reserve(request));
    CHECK_EQ(request.start, 10);
    m.manager.check_integrity();
}

kvcore::CacheImport import(ManagerFixture& m, const cache_mover::Run& run) {
    return m.manager.import_columns(cache_mover::span_of(m.manager, run), run.columns.data());
}

// An import fills pages that a caller holds. Before `publish`, the hold is a reference to the page;
// after it, the hold pins the page and its prefix in the tree, but no page after it.
void held_pages_are_brought_in(bool has_windows) {
    for (const std::int64_t which : {0, 1, 3}) {
        ManagerFixture m(has_windows ? with_windows(16) : ManagerFixture::config(2, 8));
        const std::int64_t per_column = has_windows ? 2 : 1;
        cache_mover::Run run;
        run.tokens = count_up(0, 8);
        run.columns.resize(4);
        for (kvcore::CachedColumn& each : run.columns) each.windows = has_windows ? 1 : 0;
        kvcore::CacheImport taken = import(m, run);
        const BlockId page = item(taken.pages(), which * per_column);
        HeldPages held = hold(m, {page});
        HeldPages twice = hold(m, {page, item(taken.pages(), which * per_column)});
        CHECK(m.manager.publish(taken));
        m.manager.check_integrity();
        twice.let_go();
        m.manager.check_integrity();
        // A held page also keeps all window pages of its column.
        const std::int64_t kept = has_windows ? which + 2 : which + 1;
        CHECK_EQ(m.available(), 8 * per_column - kept);
        Request large = m.claim(count_up(50, 2 * (8 - which - 1)));
        CHECK(m.reserve(large));
        const int group = has_windows ? 1 : 0;
        for (const BlockId each : m.manager.pages_of(large.sequence, group)) CHECK(each != page);
        if (!has_windows) CHECK_EQ(m.match(run.tokens), which + 1);
        m.manager.release(large.sequence);
        held.let_go();
        m.manager.check_integrity();
        CHECK_EQ(m.available(), 8 * per_column);
    }
}

// The next part of a run is not merged into a held node.
TEST(a_run_grows_after_a_held_page) {
    ManagerFixture m(ManagerFixture::config(2, 16));
    cache_mover::Run run;
    run.tokens = count_up(0, 8);
    run.columns.resize(4);
    kvcore::CacheImport taken = import(m, run);
    HeldPages held = hold(m, {taken.pages()[3]});
    CHECK(m.manager.publish(taken, true));
    run.tokens = count_up(0, 16);
    run.first = 4;
    taken = import(m, run);
    CHECK(m.manager.publish(taken));
    m.manager.check_integrity();
    CHECK_EQ(m.match(run.tokens), 8);
    CHECK_EQ(m.available(), 12);
    held.let_go();
    CHECK_EQ(m.available(), 16);
}

// Two imports of the same run, whose pages of one window are missing in the tree. A page that is
// held by its id stays with its holder; a page without a holder fills the hole.
TEST(two_imports_fill_the_same_hole) {
    ManagerFixture m(with_windows(40));
    cache_mover::Run run;
    run.tokens = count_up(0, 12);
    run.columns.resize(6);
    kvcore::CacheImport holes = import(m, run);
    CHECK(m.manager.publish(holes));
    CHECK_EQ(cache_mover::save(m.manager)[0].pages[1], -1);
    for (kvcore::CachedColumn& each : run.columns) each.windows = 1;
    kvcore::CacheImport one = import(m, run);
    kvcore::CacheImport other = import(m, run);
    const BlockId filling = one.pages()[1];
    const BlockId idle = other.pages()[1];
    CHECK(filling >= 0 && idle >= 0 && filling != idle);
    HeldPages held = hold(m, {idle});
    CHECK(m.manager.publish(other));
    m.manager.check_integrity();
    CHECK_EQ(cache_mover::save(m.manager)[0].pages[1], -1);
    CHECK(m.manager.publish(one));
    m.manager.check_integrity();
    CHECK_EQ(cache_mover::save(m.manager)[0].pages[1], filling);
    Request large = m.claim(count_up(500, 30));
    CHECK(m.reserve(large));  // takes all pages without a holder
    for (const std::size_t group : {0U, 1U}) {
        for (const BlockId page : m.manager.pages_of(large.sequence, static_cast<int>(group))) {
            CHECK(page != idle);
        }
    }
    m.manager.check_integrity();
    m.manager.release(large.sequence);
    held.let_go();
    m.manager.check_integrity();
    CHECK_EQ(m.available(), 40);
}

TEST(held_pages_of_a_dropped_import) {
    for (const bool is_reset : {false, true}) {
        ManagerFixture m(with_windows(20));
        cache_mover::Run run;
        run.tokens = count_up(0, 8);
        run.columns.resize(4);
        for (kvcore::CachedColumn& each : run.columns) each.windows = 1;
        kvcore::CacheImport taken = import(m, run);
        HeldPages held = hold(m, {taken.pages()[2]});
        if (is_reset) {
            m.manager.reset_prefix_cache();
            CHECK(!m.manager.publish(taken));
        }
        taken = kvcore::CacheImport();
        m.manager.check_integrity();
        CHECK_EQ(m.available(), 18);
        held.let_go();
        CHECK_EQ(m.available(), 20);
    }
}

TEST(a_page_of_a_window_is_held_with_its_column) {
    kvcore::CacheConfig config = with_windows(64);
    config.first_page = 3;
    ManagerFixture m(config);
    Request request = m.claim(count_up(0, 12));
    CHECK(m.reserve(request));
    const Ids window = m.manager.pages_of(request.sequence, 1);
    HeldPages held = hold(m, {window[2]});
    m.run(request, 12);
    for (TokenId t = 13; t < 20; ++t) m.run(request, t);
    m.manager.check_integrity();
    m.manager.release(request.sequence);
    m.manager.check_integrity();
    held.let_go();
    m.manager.check_integrity();
    CHECK_EQ(m.available(), 64);
}

TEST(quotas_limit_held_pages) {
    kvcore::CacheConfig config = ManagerFixture::config(2, 8);
    config.quotas = {{4, 8}};
    config.first_page = 1;
    ManagerFixture m(config);
    m.put(count_up(0, 8));  // no tenant is charged for these pages or for the pages below
    Ids ids;
    m.match(count_up(0, 8), 0, "", &ids);
    Request own = m.claim(count_up(50, 3));
    CHECK(m.reserve(own));
    const Trace before = m.trace({&own});
    CHECK_THROWS(kvcore::CapacityError, hold(m, {ids[3]}));
    CHECK(m.trace({&own}) == before);
    HeldPages few = hold(m, {ids[1], ids[0]});
    HeldPages held = hold(m, m.pages(own));
    m.manager.release(own.sequence);
    m.manager.check_integrity();
    m.manager.reset_prefix_cache();
    m.manager.check_integrity();
}

kvcore::CacheConfig with_quota(kvcore::CacheConfig config, const kvcore::TenantQuota& quota) {
    config.quotas = {quota};
    return config;
}

std::int64_t held_by_tenant(const ManagerFixture& m) {
    return m.manager.tenant_stats(0)[0].held_pages;
}

// A held page is charged to its tenant after a pin, a request or an export released the forgotten
// pages and the caches were reset.
TEST(a_held_page_counts_for_its_tenant_to_the_end) {
    for (const bool has_windows : {false, true}) {
        const std::int64_t lanes = has_windows ? 2 : 1;
        const kvcore::CacheConfig sizes =
            has_windows ? with_windows(32) : ManagerFixture::config(2, 16);
        for (int holder = 0; holder < 3; ++holder) {
            for (const bool forgets : {false, true}) {
                ManagerFixture m(with_quota(sizes, {2, 12}));
                Request request = m.claim(count_up(0, 8));
                kvcore::RequestPriority terms;
                terms.tenant = 0;
                m.manager.set_priority(request.sequence, terms);
                m.run(request, 9);
                const Ids row = m.pages(request);
                kvcore::PinHandle pin;
                kvcore::CacheExport copied;
                const Tokens tokens = count_up(0, 8);
                if (holder == 1) pin = m.manager.pin(0, "", tokens.data(), 8);
                if (holder == 2) {
                    cache_mover::Run run;
                    run.tokens = tokens;
                    copied = m.manager.export_columns(cache_mover::span_of(m.manager, run));
                    CHECK_EQ(copied.columns().size(), 4U);
                }
                if (holder != 0) m.manager.release(request.sequence);
                HeldPages held = hold(m, {row[1], row[2]});
                if (forgets) CHECK(m.manager.forget(0, row.data(), 1) > 0);
                m.manager.reset_prefix_cache();
                m.manager.check_integrity();
                if (holder == 0) m.manager.release(request.sequence);
                if (holder == 1) m.manager.unpin(pin);
                copied = kvcore::CacheExport();
                m.manager.check_integrity();
                m.manager.reset_prefix_cache();
                m.manager.check_integrity();
                CHECK(held_by_tenant(m) >= 2);
                CHECK_EQ(m.available() + held_by_tenant(m), 16 * lanes);
                held.let_go();
                m.manager.check_integrity();
                CHECK_EQ(held_by_tenant(m), 0);
                CHECK_EQ(m.available(), 16 * lanes);
            }
        }
    }
}

// An export holds the windows of all its columns, so it ends before the first column for which the
// quotas leave no room.
TEST(an_export_keeps_to_quotas) {
    kvcore::CacheConfig config = with_quota(with_windows(16), {9, 16});
    ManagerFixture m(config);
    cache_mover::Run run;
    run.tokens = count_up(0, 8);
    run.columns.resize(3);
    for (kvcore::CachedColumn& each : run.columns) each.windows = 1;
    run.tokens.resize(6);
    kvcore::CacheImport taken = import(m, run);
    CHECK_EQ(taken.columns().size(), 3U);
    CHECK(m.manager.publish(taken));
    const kvcore::ColumnSpan span = cache_mover::span_of(m.manager, run);
    CHECK_EQ(m.manager.export_columns(span).columns().size(), 3U);
    Request request = m.claim(count_up(50, 1));
    CHECK(m.reserve(request));  // two more pages without a tenant
    {
        const kvcore::CacheExport copied = m.manager.export_columns(span);
        CHECK_EQ(copied.columns().size(), 2U);
        m.manager.check_integrity();
        cache_mover::Run tail = run;
        tail.first = 2;
        CHECK(m.manager.export_columns(cache_mover::span_of(m.manager, tail)).columns().empty());
        Request own = m.claim(count_up(70, 8));
        kvcore::RequestPriority terms;
        terms.tenant = 0;
        m.manager.set_priority(own.sequence, terms);
        CHECK(m.reserve(own));  // within the tenant's reserved pages
        m.manager.check_integrity();
    }
    m.manager.check_integrity();
}

// Meanwhile another request caches the first columns of the import. Publishing the columns after
// them would also hold the cached columns for the import's holder, and its tenant has no room for
// more pages. The held page is not published.
TEST(held_pages_are_not_brought_in_beyond_quotas) {
    ManagerFixture m(with_quota(ManagerFixture::config(2, 16), {0, 4}));
    cache_mover::Run run;
    run.tokens = count_up(0, 12);
    run.columns.resize(6);
    kvcore::CacheImport taken = import(m, run);
    HeldPages held = hold(m, {taken.pages()[4]});
    const auto serve = [&](const Tokens& tokens) {
        Request request = m.claim(tokens);
        kvcore::RequestPriority terms;
        terms.tenant = 0;
        m.manager.set_priority(request.sequence, terms);
        m.run(request, 9);
        return request;
    };
    m.manager.release(serve(count_up(0, 7)).sequence);
    const Request full = serve(count_up(500, 7));
    CHECK_EQ(held_by_tenant(m), 4);
    CHECK(m.manager.publish(taken));
    m.manager.check_integrity();
    CHECK_EQ(m.match(run.tokens), 4);  // up to the held page
    CHECK_EQ(held_by_tenant(m), 4);
    m.manager.release(full.sequence);
    held.let_go();
    m.manager.check_integrity();
    CHECK_EQ(m.available(), 16);
}

// Pages of an import have no tenant while they are filled. Held pages of an import have no tenant
// afterwards either.
TEST(quotas_count_held_pages_of_imports) {
    for (const bool has_windows : {false, true}) {
        const kvcore::CacheConfig sizes =
            has_windows ? with_windows(32) : ManagerFixture::config(2, 16);
        ManagerFixture m(with_quota(sizes, {has_windows ? 20 : 10, 32}));
        cache_mover::Run run;
        run.tokens = count_up(0, 12);
        run.columns.resize(6);
        for (kvcore::CachedColumn& each : run.columns) each.windows = has_windows ? 1 : 0;
        kvcore::CacheImport taken = import(m, run);
        CHECK_EQ(taken.columns().size(), 6U);
        HeldPages held = hold(m, {taken.pages()[has_windows ? 8 : 4]});
        CHECK(m.manager.publish(taken));
        m.manager.check_integrity();
        CHECK_EQ(m.available(), has_windows ? 32 - 6 : 16 - 5);
        m.manager.reset_prefix_cache();
        m.manager.check_integrity();
        held.let_go();
        m.manager.check_integrity();
        CHECK_EQ(m.available(), has_windows ? 32 : 16);
    }
}

TEST(ids_begin_at_the_first_page) {
    kvcore::CacheConfig config = ManagerFixture::config(2, 8);
    config.first_page = 1;
    ManagerFixture m(config);
    Request request = m.claim(count_up(0, 16));
    CHECK(m.reserve(request));
    CHECK_EQ(m.pages(request), all_pages(8, 1));
    CHECK_EQ(m.free(), 0);
    CHECK_THROWS(InvalidHandleError, hold(m, {0}));
    CHECK_THROWS(InvalidHandleError, hold(m, {9}));
    const Ids first{0};
    CHECK_THROWS(InvalidHandleError, m.manager.forget(0, first.data(), 1));
    CHECK_EQ(hold(m, {8}).pages().size(), 1);
    m.run(request, 16);
    m.manager.release(request.sequence);
    m.manager.check_integrity();
    config.first_page = -1;
    CHECK_THROWS(std::invalid_argument, kvcore::CacheManager{config});
    config.first_page = INT32_MAX;
    CHECK_THROWS(std::invalid_argument, kvcore::CacheManager{config});
}

// Free pages are taken again from the last page on: pages of a released request, evicted pages, and
// pages of a reset.
TEST(pages_are_taken_again_from_the_last_one_on) {
    kvcore::CacheConfig config = ManagerFixture::config(2, 4);
    config.first_page = 1;
    ManagerFixture m(config);
    Request request = m.claim(count_up(0, 8));
    CHECK(m.reserve(request));
    m.manager.release(request.sequence);
    request = m.claim(count_up(0, 8));
    CHECK(m.reserve(request));
    CHECK_EQ(m.pages(request), (Ids{4, 3, 2, 1}));
    m.run(request, 9);
    m.manager.release(request.sequence);
    request = m.claim(count_up(50, 6));
    CHECK(m.reserve(request));  // evicts three pages
    CHECK_EQ(m.pages(request), (Ids{1, 2, 3}));
    m.manager.release(request.sequence);
    m.manager.reset_prefix_cache();
    request = m.claim(count_up(50, 2));
    CHECK(m.reserve(request));
    CHECK_EQ(m.pages(request), (Ids{4}));
}

TEST(held_pages_are_no_room_for_a_longer_hit) {
    for (const bool has_windows : {false, true}) {
        for (const Call call : {Call::kReserve, Call::kFetch, Call::kFetchTwo, Call::kAllocate}) {
            held_pages_are_no_room_for_a_longer_hit(has_windows, call);
        }
    }
}

TEST(held_pages_are_brought_in) {
    for (const bool has_windows : {false, true}) held_pages_are_brought_in(has_windows);
}

}  // namespace

}  // namespace tests::cache::hold
