// SPDX-License-Identifier: Apache-2.0
// Loads and stores of the host tier while other calls release, fork, commit or reset their pages.
#include <algorithm>
#include <set>
#include <stdexcept>

#include "support/host_fixture.hpp"

namespace tests::transfer::host_transfers {

using kvcore::FetchStatus;
using kvcore::InvalidHandleError;
using kvcore::OwedStatus;
using kvcore::PendingTransfersError;
using kvcore::ReserveStatus;
using kvcore::Transfers;

namespace {

bool are_disjoint(const Ids& a, const Ids& b) {
    std::set<BlockId> all(a.begin(), a.end());
    all.insert(b.begin(), b.end());
    return all.size() == a.size() + b.size();
}

// ---- loads -----------------------------------------------------------------------------------

TEST(pages_released_under_a_load_are_nobodys_until_it_ends) {
    for (const bool is_done : {true, false}) {
        HostFixture m(5, 8);
        m.put(count_up(0, 6));
        Request request = m.claim(count_up(0, 8));
        const Transfers loads = m.reserve(request);
        CHECK_EQ(loads.tier_moves.size(), 3);
        m.manager.release(request.sequence);
        m.manager.check_integrity();
        CHECK_EQ(m.manager.stats(0).available_pages(), 2);
        Request other = m.claim({70, 71, 72});
        CHECK(m.reserve(other).empty());
        for (const kvcore::PageMove& load : loads.tier_moves) {
            CHECK(are_disjoint(m.manager.pages_of(other.sequence),
                               {load.page_in(kvcore::Tier::kDevice)}));
        }
        m.finish(loads, is_done);
        CHECK_EQ(m.manager.stats(0).available_pages(), 3);
        CHECK_EQ(m.manager.metrics().loaded_pages, is_done ? 3 : 0);
        CHECK_THROWS(InvalidHandleError, m.manager.finish(loads.ticket, is_done));
    }
}

// No other request gets the pages during the load, whatever happens to the load and the request.
TEST(pages_are_held_while_they_are_loaded) {
    for (const bool is_done : {true, false}) {
        for (const bool is_reset : {true, false}) {
            HostFixture m(6, 8);
            m.put(count_up(0, 6));
            Request request = m.claim(count_up(0, 8));
            const Transfers loads = m.reserve(request);
            const Ids row = m.manager.pages_of(request.sequence);
            CHECK_EQ(loads.tier_moves.size(), 3);
            kvcore::HeldPages held = m.manager.hold(0, row.data(), 2);
            m.manager.check_integrity();
            if (is_reset) m.manager.reset_prefix_cache();
            m.manager.release(request.sequence);
            m.manager.check_integrity();
            m.finish(loads, is_done);
            CHECK_EQ(m.manager.stats(0).available_pages(), 4);
            Request other = m.claim(count_up(50, 7));
            CHECK(m.reserve(other).empty());
            CHECK(are_disjoint(m.manager.pages_of(other.sequence), {row[0], row[1]}));
            held.let_go();
            m.manager.check_integrity();
            CHECK_EQ(m.manager.stats(0).available_pages(), 2);
        }
    }
}

// If the request continues, held pages of its load remain the request's pages.
TEST(a_request_goes_on_with_held_pages_that_were_loaded) {
    HostFixture m(6, 8);
    m.put(count_up(0, 6));
    Request request = m.claim(count_up(0, 8));
    const Transfers loads = m.reserve(request);
    const Ids row = m.manager.pages_of(request.sequence);
    kvcore::HeldPages held = m.manager.hold(0, row.data(), count(row));
    m.finish(loads, false);
    CHECK(m.manager.pages_of(request.sequence).empty());  // the request has lost the pages
    CHECK_EQ(m.manager.stats(0).available_pages(), 6 - count(row));
    held.let_go();
    CHECK_EQ(m.manager.stats(0).available_pages(), 6);
    const Transfers again = m.reserve(request);
    CHECK_EQ(again.tier_moves.size(), 3);
    const Ids loaded = m.manager.pages_of(request.sequence);
    held = m.manager.hold(0, loaded.data(), 1);
    CHECK_EQ(m.manager.forget(0, loaded.data(), 1), 0);  // pages are cached only after a commit
    m.finish(again);
    CHECK_EQ(m.manager.pages_of(request.sequence), loaded);
    m.manager.reset_prefix_cache();
    m.manager.check_integrity();
    m.manager.release(request.sequence);
    CHECK_EQ(m.manager.stats(0).available_pages(), 5);
}

TEST(a_loading_sequence_is_not_changed) {
    HostFixture m(8, 8);
    m.put(count_up(0, 6));
    Request request = m.claim(count_up(0, 8));
    const Transfers loads = m.reserve(request);
    kvcore::RequestView view = request.view();
    kvcore::RequestView child = request.view();
    std::vector<std::uint32_t> cells(8);
    std::vector<std::uint32_t> lengths(2);
    kvcore::LookupTable table(cells.data(), 2, 4, 99);
    kvcore::FetchTarget target{&table, lengths.data()};
    std::vector<kvcore::PageSwap> swaps;
    Transfers none;
    CHECK_EQ(m.manager.reserve(view, 1, &none), ReserveStatus::kPending);
    CHECK_EQ(m.manager.fetch({&view, 1}, 1, &target, &none).status, FetchStatus::kPending);
    CHECK_THROWS(PendingTransfersError, m.manager.fork(view, {&child, 1}));
    CHECK_THROWS(PendingTransfersError, m.manager.truncate(request.sequence, 0));
    CHECK_THROWS(PendingTransfersError, m.manager.commit({&view, 1}, swaps, &none));
    CHECK_THROWS(PendingTransfersError, m.manager.begin_again(request.sequence));
    CHECK_THROWS(std::logic_error, m.manager.wait(request.sequence));
    CHECK_EQ(m.manager.take_owed(request.sequence, none), OwedStatus::kUnderWay);
    CHECK(none.empty());
    CHECK_EQ(m.manager.stats(0).num_sequences, 1);
    m.finish(loads);
    CHECK_EQ(m.manager.fetch({&view, 1}, 1, &target, &none).status, FetchStatus::kOk);
}

// Each request is set back to its state before the failed call.
TEST(loads_of_a_batch_fail_together) {
    HostFixture m(8, 8);
    m.put(count_up(0, 6));
    Request plain = m.claim({50});
    Request first = m.claim(count_up(0, 6));
    Request second = m.claim(count_up(0, 5));
    first.active = 3;
    std::vector<kvcore::RequestView> views{plain.view(), first.view(), second.view()};
    Transfers loads;
    const kvcore::BatchReserve all = m.manager.reserve_batch({views.data(), 3}, 1, &loads);
    CHECK_EQ(all.reserved, 3);
    CHECK_EQ(loads.tier_moves.size(), 4);
    CHECK_EQ(loads.moved.size(), 2);
    CHECK_EQ(views[1].start, 4);
    CHECK_EQ(views[2].start, 4);
    m.finish(loads, false);
    for (const kvcore::MovedRequest& moved : loads.moved) {
        CHECK(m.manager.pages_of(item(views, moved.row).sequence).empty());
        const Request& request = moved.row == 1 ? first : second;
        CHECK_EQ(moved.start, request.start);
        CHECK_EQ(moved.active, request.active);
    }
    CHECK_EQ(m.manager.pages_of(plain.sequence).size(), 1);
    CHECK_EQ(m.manager.metrics().cache_tokens, 0);
    const Transfers again = m.reserve(second);
    CHECK_EQ(again.tier_moves.size(), 2);
    m.finish(again);
}

// Two requests load one prefix while a third stores the tokens after it. The tickets end in another
// order than they began, and a load fails.
TEST(tickets_end_in_any_order) {
    HostFixture m(16, 12);
    m.put(count_up(0, 6));
    Request storing = m.claim(count_up(0, 8));
    m.finish(m.reserve(storing));
    Request first = m.claim(count_up(0, 7));
    Request second = m.claim(count_up(0, 7));
    const Transfers one = m.reserve(first);
    const Transfers stores = m.commit(storing, 8);
    const Transfers two = m.reserve(second);
    CHECK_EQ(one.tier_moves.size(), 3);
    CHECK_EQ(stores.tier_moves.size(), 1);
    CHECK(two.empty());  // on the device since the commit
    Request third = m.claim(count_up(0, 9));
    m.finish(stores);
    m.manager.release(storing.sequence);
    m.manager.reset_prefix_cache();
    m.manager.check_integrity();
    CHECK_EQ(m.stored(), 0);  // only a load holds the record
    m.finish(m.reserve(third));
    m.finish(one, false);
    CHECK(m.manager.pages_of(first.sequence).empty());
    first.start = one.moved[0].start;
    first.active = one.moved[0].active;
    m.finish(m.reserve(first));
    CHECK_EQ(first.start, 0);  // the reset has forgotten the pages that `second` holds
    CHECK_THROWS(InvalidHandleError, m.manager.finish(one.ticket));
    CHECK_THROWS(InvalidHandleError, m.manager.finish(stores.ticket));
}

// Host pages that two loads read stay until both loads end, even though a lookup no longer finds
// them.
TEST(a_reset_under_loads_keeps_their_sources) {
    HostFixture m(8, 3);
    m.put(count_up(0, 6));
    Request first = m.claim(count_up(0, 7));
    Request second = m.claim(count_up(0, 7));
    const Transfers one = m.reserve(first);
    const Transfers two = m.reserve(second);
    CHECK_EQ(two.tier_moves.size(), 3);
    m.manager.reset_prefix_cache();
    m.manager.check_integrity();
    CHECK_EQ(m.stored(), 0);
    Request other = m.claim({50, 51});
    m.manager.release(first.sequence);
    m.finish(one);
    m.finish(m.reserve(other));
    CHECK(m.commit(other, 52).empty());  // loads read every page of the tier
    m.finish(two);
    m.finish(m.reserve(other));
    const Transfers stores = m.commit(other, 53);
    CHECK(stores.empty());
    m.finish(m.reserve(other));
    m.finish(m.commit(other, 54));
    CHECK_EQ(m.stored(), 2);
}

// ---- stores ----------------------------------------------------------------------------------

TEST(a_reset_under_stores_keeps_their_sources) {
    for (const bool is_released : {true, false}) {
        HostFixture m(4, 8);
        Request request = m.claim(count_up(0, 6));
        m.finish(m.reserve(request));
        const Transfers stores = m.commit(request, 6);
        CHECK_EQ(stores.tier_moves.size(), 3);
        if (is_released) m.manager.release(request.sequence);
        m.manager.reset_prefix_cache();
        m.manager.check_integrity();
        CHECK_EQ(m.manager.stats(0).cached_pages, 0);
        CHECK_EQ(m.manager.stats(0).free_pages, 1);
        m.finish(stores);
        CHECK_EQ(m.stored(), 0);
        CHECK_EQ(m.manager.stats(0).free_pages, is_released ? 4 : 1);
    }
}

// A reset forgets a path that a request and a copy hold. Its pages are freed when both have ended.
TEST(a_forgotten_path_comes_back_when_its_holders_end) {
    HostFixture m(8, 8);
    Request front = m.claim(count_up(0, 4));
    m.finish(m.reserve(front));
    m.finish(m.commit(front, 60));
    Request longer = m.claim(count_up(0, 8));
    m.finish(m.reserve(longer));
    const Transfers stores = m.commit(longer, 8);
    CHECK_EQ(stores.tier_moves.size(), 2);
    m.manager.release(longer.sequence);
    m.manager.reset_prefix_cache();
    m.manager.check_integrity();
    CHECK_EQ(m.manager.stats(0).cached_pages, 0);
    m.manager.release(front.sequence);
    m.manager.reset_prefix_cache();
    m.manager.check_integrity();
    CHECK_EQ(m.manager.stats(0).cached_pages, 0);
    m.finish(stores);
    CHECK_EQ(m.manager.stats(0).free_pages, 8);
    CHECK_EQ(m.stored(), 0);
}

// A truncated sequence gives up the pages that it was storing: a reset forgets these pages also.
TEST(cut_pages_do_not_come_back_after_a_reset) {
    HostFixture m(8, 8);
    Request request = m.claim(count_up(0, 6));
    m.finish(m.reserve(request));
    const Transfers stores = m.commit(request, 6);
    m.manager.truncate(request.sequence, 2);
    m.manager.reset_prefix_cache();
    m.manager.check_integrity();
    m.finish(stores);
    CHECK_EQ(m.stored(), 0);
    m.manager.release(request.sequence);
}

// ---- owners of pages --------------------------------------------------------------------------

// A request and its fork hold loaded pages. A third request commits equal pages first.
void pages_have_one_owner_where_another_commits_first(bool dedup) {
    kvcore::CacheConfig config = HostFixture::config(24, 24);
    config.dedup = dedup;
    HostFixture m(config);
    m.put(count_up(0, 6));
    Request request = m.claim(count_up(0, 7));
    Request early = m.claim({0, 1, 2, 3, 90});
    const Transfers loads = m.reserve(request);
    CHECK_EQ(loads.tier_moves.size(), 3);
    m.finish(loads);
    CHECK_EQ(request.start, 6);
    Request fork("", count_up(0, 8));
    kvcore::RequestView view = fork.view();
    m.manager.fork(request.view(), {&view, 1});
    fork.sequence = view.sequence;
    fork.start = view.start;
    CHECK_EQ(m.manager.pages_of(fork.sequence).size(), 3);
    m.finish(m.reserve(early));
    ManagerFixture::sample(early, 91);
    ManagerFixture::sample(request, 92);
    m.finish(m.commit_batch({&early, &request}));
    m.finish(m.reserve(fork));
    m.manager.release(request.sequence);
    m.manager.release(early.sequence);
    m.manager.check_integrity();
    Request next = m.claim(count_up(300, 26));
    m.finish(m.reserve(next));
    m.manager.reset_prefix_cache();
    m.manager.check_integrity();
    Request last = m.claim(count_up(400, 8));
    m.finish(m.reserve(last));
    const Ids of_fork = m.manager.pages_of(fork.sequence);
    CHECK_EQ(of_fork.size(), 4);
    CHECK(are_disjoint(of_fork, m.manager.pages_of(next.sequence)));
    CHECK(are_disjoint(of_fork, m.manager.pages_of(last.sequence)));
    ManagerFixture::sample(fork, 93);
    m.finish(m.commit_batch({&fork}));
    for (const Request* each : {&fork, &next, &last}) m.manager.release(each->sequence);
    m.manager.reset_prefix_cache();
    CHECK_EQ(m.manager.stats(0).free_pages, 24);
}

TEST(pages_have_one_owner_where_another_commits_first) {
    pages_have_one_owner_where_another_commits_first(true);
    pages_have_one_owner_where_another_commits_first(false);
}

}  // namespace

}  // namespace tests::transfer::host_transfers
