// SPDX-License-Identifier: Apache-2.0
// Pages that are held by their ids, and where ids begin.
#include <numeric>
#include <utility>

#include "manager_fixture.hpp"

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

void a_held_page_outlives_its_request() {
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

// With what is in front of it.
void a_held_page_is_not_evicted() {
    ManagerFixture m(ManagerFixture::config(2, 8));
    m.put(count_up(0, 8));
    Ids ids;
    m.match(count_up(0, 8), 0, "", &ids);
    {
        const HeldPages first = hold(m, {ids[1], ids[1]});
        const HeldPages second = hold(m, {ids[1]});
        CHECK_EQ(m.available(), 6);  // of the run behind them nothing
        Request large = m.claim(count_up(50, 14));
        CHECK(!m.reserve(large));
        m.manager.release(large.sequence);
    }
    CHECK_EQ(m.available(), 8);
    Request large = m.claim(count_up(50, 16));
    CHECK(m.reserve(large));
}

void holds_are_refused_without_a_trace() {
    ManagerFixture m(ManagerFixture::config(2, 8));
    m.put(count_up(0, 4));
    Ids ids;
    m.match(count_up(0, 4), 0, "", &ids);
    const Trace before = m.trace({});
    CHECK_THROWS(InvalidHandleError, hold(m, {ids[0], 8}));
    CHECK_THROWS(InvalidHandleError, hold(m, {ids[0], -1}));
    CHECK_THROWS(InvalidHandleError, hold(m, {ids[0], 7}));  // free
    CHECK_THROWS(std::out_of_range, hold(m, {ids[0]}, 1));
    CHECK(m.trace({}) == before);
    HeldPages nothing = hold(m, {});
    nothing = HeldPages();
    CHECK_THROWS(InvalidHandleError, nothing.let_go());
}

// A page that is held before it is committed is the tree's then, as if it had been held there.
void held_pages_are_committed() {
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

void a_held_page_is_swapped_for_a_cached_one() {
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

void a_reset_forgets_what_is_held() {
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

void held_pages_are_forgotten() {
    ManagerFixture m(ManagerFixture::config(2, 16));
    m.put(count_up(0, 8));
    Ids ids;
    m.match(count_up(0, 8), 0, "", &ids);
    HeldPages held = hold(m, {ids[2]});
    CHECK_EQ(m.manager.forget(0, ids.data() + 1, 1), 3);
    m.manager.check_integrity();
    HeldPages more = hold(m, {ids[2]});  // held still, so it can be held once more
    CHECK_THROWS(InvalidHandleError, hold(m, {ids[0], 15}));
    m.manager.reset_prefix_cache();
    m.manager.check_integrity();
    held.let_go();
    m.manager.check_integrity();
    more.let_go();
    CHECK_EQ(m.available(), 16);
}

// Nor is a hold on a page that was forgotten any use of what is in front of it.
void a_reset_forgets_what_is_in_front_of_forgotten_pages() {
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

// The same of an export: of its first pages, which were not forgotten, too.
void exported_pages_are_forgotten_and_reset() {
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

// A request that has the same pages keeps its own, and those in front.
void a_request_keeps_what_is_in_front_of_forgotten_pages() {
    ManagerFixture m(ManagerFixture::config(2, 16));
    Request request = m.claim(count_up(0, 9));
    CHECK(m.reserve(request));
    m.run(request, 9);
    const Ids row = m.pages(request);
    HeldPages held = hold(m, {row[3]});
    CHECK_EQ(m.manager.forget(0, &row[2], 1), 2);
    m.manager.reset_prefix_cache();
    m.manager.check_integrity();
    CHECK_EQ(m.match(count_up(0, 9)), 2);
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

void a_page_of_a_window_is_held_with_its_column() {
    kvcore::CacheConfig config = ManagerFixture::config(2, 64);
    config.groups = {{}, {kvcore::GroupKind::kSliding, 4, 1, 0}};
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

void quotas_leave_room_or_not() {
    kvcore::CacheConfig config = ManagerFixture::config(2, 8);
    config.quotas = {{4, 8}};
    config.first_page = 1;
    ManagerFixture m(config);
    m.put(count_up(0, 8));  // nobody's, as all that follow
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

void ids_begin_at_the_first_page() {
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

// Those of a request that lets go of them, evicted ones, and those of a reset.
void pages_are_taken_again_from_the_last_one_on() {
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
    CHECK(m.reserve(request));  // evicts three
    CHECK_EQ(m.pages(request), (Ids{1, 2, 3}));
    m.manager.release(request.sequence);
    m.manager.reset_prefix_cache();
    request = m.claim(count_up(50, 2));
    CHECK(m.reserve(request));
    CHECK_EQ(m.pages(request), (Ids{4}));
}

}  // namespace

int main() {
    a_held_page_outlives_its_request();
    a_held_page_is_not_evicted();
    holds_are_refused_without_a_trace();
    held_pages_are_committed();
    a_held_page_is_swapped_for_a_cached_one();
    a_reset_forgets_what_is_held();
    held_pages_are_forgotten();
    a_reset_forgets_what_is_in_front_of_forgotten_pages();
    exported_pages_are_forgotten_and_reset();
    a_request_keeps_what_is_in_front_of_forgotten_pages();
    a_page_of_a_window_is_held_with_its_column();
    quotas_leave_room_or_not();
    ids_begin_at_the_first_page();
    pages_are_taken_again_from_the_last_one_on();
}
