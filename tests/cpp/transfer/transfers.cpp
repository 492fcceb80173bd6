// SPDX-License-Identifier: Apache-2.0
// Page copies between a call and the end of their ticket: which pages are held, which calls wait,
// and which copies are owed again. Copies of the host tier are in host_transfers.cpp.
#include <future>
#include <stdexcept>
#include <thread>

#include "support/manager_fixture.hpp"
#include "support/manager_probe.hpp"

namespace tests::transfer::transfers {

using kvcore::FetchStatus;
using kvcore::InvalidHandleError;
using kvcore::OwedStatus;
using kvcore::PageMove;
using kvcore::PendingTransfersError;
using kvcore::ReserveStatus;
using kvcore::Transfers;

namespace {

/// A parent of 3 tokens in a page of 4, and a fork that copies this page.
struct CopyScene {
    explicit CopyScene(std::int64_t num_blocks)
        : m(ManagerFixture::config(4, num_blocks)),
          parent(served(m, {1, 2, 3}, 4)),
          child(m.fork_of(parent, {9})) {
        CHECK(m.reserve_copying(child));
        CHECK_EQ(m.transfers.copies.size(), 1);
        copy = m.transfers.copies[0];
        ticket = m.transfers.ticket;
    }
    Trace trace() { return m.trace({&parent, &child}); }

    ManagerFixture m;
    Request parent;
    Request child;
    PageMove copy;
    std::uint64_t ticket = 0;
};

// ---- held ------------------------------------------------------------------------------------

TEST(pages_released_under_a_copy_are_nobodys_until_it_ends) {
    for (const bool is_done : {true, false}) {
        CopyScene s(3);
        s.m.manager.release(s.child.sequence);
        s.m.manager.release(s.parent.sequence);
        s.m.manager.check_integrity();
        CHECK_EQ(s.m.available(), 1);
        Request large = s.m.claim(count_up(50, 8));
        CHECK_EQ(s.m.try_reserve(large), ReserveStatus::kNoSpace);
        Request small = s.m.claim({50});
        CHECK(s.m.reserve_copying(small));
        const BlockId page = s.m.pages(small)[0];
        CHECK(page != s.copy.source && page != s.copy.destination);
        s.m.manager.finish(s.ticket, is_done);
        CHECK_EQ(s.m.available(), 2);
        CHECK(s.m.reserve_copying(large));
    }
}

// A cached source stays even if the pool has no other page to evict.
TEST(a_cached_source_is_not_evicted_under_its_copy) {
    ManagerFixture m(ManagerFixture::config(2, 3));
    m.put({1, 2});
    Request request = m.claim({1, 9});
    CHECK(m.reserve_copying(request));
    CHECK_EQ(m.transfers.copies.size(), 1);
    Request large = m.claim(count_up(50, 4));
    kvcore::RequestView view = large.view();
    Transfers none;
    CHECK_EQ(m.manager.reserve(view, 1, &none), ReserveStatus::kNoSpace);
    CHECK_EQ(m.match({1, 2}), 1);
    m.finish();
    CHECK(m.reserve_copying(large));
    CHECK_EQ(m.match({1, 2}), 0);
}

TEST(a_reset_under_a_copy_forgets_its_source) {
    for (const bool is_held : {false, true}) {
        ManagerFixture m(ManagerFixture::config(2, 6));
        m.put({1, 2});
        Request holder = m.claim({1, 2, 3});
        if (is_held) CHECK(m.reserve_copying(holder));
        Request request = m.claim({1, 9});
        CHECK(m.reserve_copying(request));
        const std::int64_t free = m.free();
        m.manager.reset_prefix_cache();
        m.manager.check_integrity();
        CHECK_EQ(m.match({1, 2}), 0);
        CHECK_EQ(m.free(), free);
        m.manager.reset_prefix_cache();
        m.finish();
        CHECK_EQ(m.free(), is_held ? free : free + 1);
        m.manager.release(request.sequence);
        m.manager.release(holder.sequence);
        m.manager.reset_prefix_cache();
        CHECK_EQ(m.free(), 6);
    }
}

// ---- finished --------------------------------------------------------------------------------

TEST(a_ticket_is_finished_once) {
    CopyScene s(3);
    const Trace before = s.trace();
    CHECK_THROWS(InvalidHandleError, s.m.manager.finish(0));
    CHECK_THROWS(InvalidHandleError, s.m.manager.finish(s.ticket + 1));
    CHECK(s.trace() == before);
    s.m.manager.finish(s.ticket);
    for (const bool is_done : {true, false}) {
        const Trace after = s.trace();
        CHECK_THROWS(InvalidHandleError, s.m.manager.finish(s.ticket, is_done));
        CHECK(s.trace() == after);
    }
    CHECK_EQ(s.m.fetch_copying({&s.child}).status, FetchStatus::kOk);
}

TEST(a_failed_copy_is_owed_again) {
    CopyScene s(4);
    kvcore::CacheManager& manager = s.m.manager;
    Transfers again;
    CHECK_EQ(manager.take_owed(s.child.sequence, again), OwedStatus::kUnderWay);
    CHECK_EQ(manager.take_owed(s.parent.sequence, again), OwedStatus::kNone);
    for (int i = 0; i < 2; ++i) {
        manager.finish(i == 0 ? s.ticket : again.ticket, false);
        manager.check_integrity();
        CHECK_EQ(s.m.fetch_copying({&s.parent, &s.child}).status, FetchStatus::kPending);
        CHECK(s.m.transfers.empty());
        again.clear();
        CHECK_EQ(manager.take_owed(s.child.sequence, again), OwedStatus::kTaken);
        CHECK(again.ticket != s.ticket && again.ticket != 0);
        CHECK_EQ(again.copies.size(), 1);
        check_copy(again.copies[0], s.copy.source, s.copy.destination, 3, s.child);
        CHECK_THROWS(InvalidHandleError, manager.finish(s.ticket));
    }
    manager.finish(again.ticket);
    CHECK_EQ(manager.take_owed(s.child.sequence, again), OwedStatus::kNone);
    CHECK_EQ(s.m.fetch_copying({&s.child}).status, FetchStatus::kOk);
}

TEST(what_is_owed_goes_with_its_sequence) {
    for (const bool is_released : {true, false}) {
        CopyScene s(3);
        s.m.manager.finish(s.ticket, false);
        if (is_released) s.m.manager.release(s.child.sequence);
        if (!is_released) s.m.manager.begin_again(s.child.sequence);
        s.m.manager.check_integrity();
        CHECK_EQ(s.m.free(), 2);
        Transfers none;
        CHECK_EQ(s.m.manager.take_owed(s.child.sequence, none), OwedStatus::kNone);
        CHECK(none.empty());
    }
}

// A fork writes to a page that is also the source of other copies. If a copy fails, the fork must
// leave the page unchanged.
TEST(a_source_of_a_failed_copy_is_not_written) {
    ManagerFixture m(ManagerFixture::config(4, 4));
    Request parent = served(m, {1, 2, 3}, 4);
    Request child = m.fork_of(parent, {9});
    CHECK_EQ(m.fetch_copying({&child, &parent}).status, FetchStatus::kPending);
    const PageMove owed = m.transfers.copies[0];
    CHECK_EQ(m.transfers.copies.size(), 1);
    CHECK_EQ(m.pages(parent)[0], owed.source);
    m.finish(false);
    parent.rewind(2);  // overwrites the source of the copy
    CHECK_EQ(m.fetch_copying({&parent}).status, FetchStatus::kPending);
    CHECK_EQ(m.transfers.copies.size(), 1);
    check_copy(m.transfers.copies[0], owed.source, m.pages(parent)[0], 1, parent);
    CHECK(m.pages(parent)[0] != owed.source);
    m.finish();
    Transfers again;
    CHECK_EQ(m.manager.take_owed(child.sequence, again), OwedStatus::kTaken);
    CHECK(again.copies[0] == owed);
    m.manager.finish(again.ticket);
    CHECK_EQ(m.free(), 2);
}

// ---- refused meanwhile -----------------------------------------------------------------------

TEST(pending_sequences_are_not_changed) {
    for (const bool is_owed : {false, true}) {
        CopyScene s(6);
        kvcore::CacheManager& manager = s.m.manager;
        if (is_owed) manager.finish(s.ticket, false);
        const Trace before = s.trace();
        CHECK_EQ(s.m.try_reserve(s.child), ReserveStatus::kPending);
        CHECK(s.m.transfers.empty());
        const kvcore::FetchResult result = s.m.fetch_copying({&s.parent, &s.child});
        CHECK_EQ(result.status, FetchStatus::kPending);
        CHECK_EQ(result.row, 1);
        CHECK(s.m.transfers.empty());
        kvcore::RequestView grandchild = s.child.view();
        CHECK_THROWS(PendingTransfersError, manager.fork(s.child.view(), {&grandchild, 1}));
        CHECK_THROWS(PendingTransfersError, manager.truncate(s.child.sequence, 1));
        CHECK_THROWS(PendingTransfersError, s.m.commit({&s.parent, &s.child}));
        if (!is_owed) {
            CHECK_THROWS(PendingTransfersError, manager.begin_again(s.child.sequence));
        }
        CHECK(s.trace() == before);
        kvcore::RequestView view = s.child.view();
        std::vector<kvcore::RequestView> batch{s.parent.view(), view};
        Transfers transfers;
        const kvcore::BatchReserve part = manager.reserve_batch({batch.data(), 2}, 1, &transfers);
        CHECK_EQ(part.reserved, 1);
        CHECK_EQ(part.status, ReserveStatus::kPending);
        CHECK_EQ(s.m.pages(s.child), before.rows[1]);
    }
}

TEST(a_manager_is_used_in_one_way) {
    ManagerFixture m(ManagerFixture::config(4, 6));
    m.put({1, 2, 3, 4});
    Request listed = m.claim({1, 2, 9});
    CHECK(m.reserve(listed));
    Request request = m.claim({1, 2, 8});
    const Trace before = m.trace({&listed, &request});
    CHECK_THROWS(std::invalid_argument, m.try_reserve(request));
    CHECK_THROWS(std::invalid_argument, m.fetch_copying({&request}));
    CHECK(m.trace({&listed, &request}) == before);
    CHECK_EQ(m.manager.take_copies().size(), 1);
    CHECK(m.reserve_copying(request));
    kvcore::RequestView view = listed.view();
    CHECK_THROWS(std::invalid_argument, m.manager.reserve(view, 1, &m.transfers));  // must be empty
    m.finish();
}

// A later call does not set back the requests that a call without transfers has moved.
TEST(moves_are_those_of_one_call) {
    ManagerFixture m(ManagerFixture::config(2, 8));
    m.put({1, 2, 3, 4});
    Request first = m.claim({1, 2, 7});
    kvcore::RequestView view = first.view();
    CHECK_EQ(m.manager.reserve(view, 1, &m.transfers), ReserveStatus::kOk);
    CHECK(m.transfers.empty());
    CHECK_EQ(m.transfers.moved.size(), 1);
    Request second = m.claim({1, 2, 3, 8});
    view = second.view();
    CHECK_EQ(m.manager.reserve(view, 1, &m.transfers), ReserveStatus::kOk);
    CHECK_EQ(m.transfers.copies.size(), 1);
    CHECK_EQ(m.transfers.moved.size(), 1);
    CHECK_EQ(m.transfers.moved[0].start, 0);
    CHECK_EQ(m.transfers.moved[0].active, 4);
    CHECK_EQ(view.start, 3);
    m.finish();
}

// ---- waited for ------------------------------------------------------------------------------

TEST(others_wait_for_a_copy_and_its_owner_does_not) {
    CopyScene s(4);
    kvcore::CacheManager& manager = s.m.manager;
    CHECK_THROWS(std::logic_error, manager.wait(s.child.sequence));
    manager.wait(s.parent.sequence);
    std::promise<void> begins;
    std::thread waiter([&] {
        begins.set_value();
        manager.wait(s.child.sequence);
        CHECK_THROWS(InvalidHandleError, manager.finish(s.ticket));
    });
    begins.get_future().wait();
    manager.finish(s.ticket, false);
    waiter.join();
    manager.wait(s.child.sequence);  // an owed copy is not in flight
    Transfers again;
    std::thread([&] {
        CHECK_EQ(manager.take_owed(s.child.sequence, again), OwedStatus::kTaken);
        CHECK_THROWS(std::logic_error, manager.wait(s.child.sequence));
    }).join();
    std::thread finisher([&] { manager.finish(again.ticket); });
    manager.wait(s.child.sequence);
    finisher.join();
}

TEST(nobody_waits_for_a_sequence_that_is_gone) {
    CopyScene s(4);
    std::promise<void> begins;
    std::thread waiter([&] {
        begins.set_value();
        s.m.manager.wait(s.child.sequence);
    });
    begins.get_future().wait();
    s.m.manager.release(s.child.sequence);
    s.m.manager.wait(s.child.sequence);
    waiter.join();
    s.m.manager.finish(s.ticket);
}

// ---- other cases ------------------------------------------------------------------------------

// The best source is the only evictable page: the reservation declines it, now and when repeated.
TEST(what_was_declined_stays_declined) {
    ManagerFixture m(ManagerFixture::config(4, 3));
    m.put({1, 2, 3, 4});
    Request request = m.claim({1, 2, 9, 9, 9, 9, 9, 9, 9});
    CHECK_EQ(m.manager.plan(request.view()).evicted_pages, 1);
    CHECK(m.reserve_copying(request));
    CHECK(m.transfers.empty());
    CHECK_EQ(request.start, 0);

    ManagerFixture two(ManagerFixture::config(4, 4));
    two.put({1, 2, 3, 4});
    two.put({5, 6, 7, 8});
    Request pair = two.claim({1, 2, 9, 9, 9, 9, 9, 9, 9});
    CHECK(two.reserve_copying(pair));
    CHECK_EQ(two.transfers.copies.size(), 1);
    const PageMove first = two.transfers.copies[0];
    CHECK_EQ(two.match({1, 2, 3, 4}), 1);
    two.finish();
    CHECK_EQ(two.try_reserve(pair), ReserveStatus::kOk);
    CHECK(two.transfers.empty());
    CHECK_EQ(two.pages(pair)[0], first.destination);
}

// The source page exists again after the reservation that declined it.
TEST(a_reservation_repeated_changes_nothing) {
    ManagerFixture m(ManagerFixture::config(2, 4));
    m.put({1, 2});
    Request other = m.claim({7, 7});
    CHECK(m.reserve_copying(other));
    Request request = m.claim({1, 3, 3, 3, 3, 3});
    CHECK(m.reserve_copying(request));  // evicts the page of {1, 2}
    CHECK_EQ(request.start, 0);
    m.manager.release(other.sequence);
    m.put({1, 2});
    CHECK_EQ(m.match({1, 2}), 1);
    const Trace before = m.trace({&request});
    CHECK(m.reserve_copying(request));
    CHECK(m.transfers.empty());
    CHECK(m.trace({&request}) == before);
}

std::uint32_t& batch_stamp(kvcore::CacheManager& manager) {
    return kvcore::CacheManagerProbe::batch_stamp(manager);
}

// After 2^32 calls, a batch still contains a request only once.
TEST(batches_are_told_apart_when_their_stamps_wrap) {
    ManagerFixture m(ManagerFixture::config(2, 8));
    Request first = served(m, {1, 2}, 3);
    Request second = m.claim({4});
    for (int i = 0; i < 2; ++i) {
        batch_stamp(m.manager) = ~0U - 1;
        for (int calls = 0; calls < 4; ++calls) {
            CHECK_EQ(m.fetch({&first, &second}).status, FetchStatus::kOk);
        }
        CHECK_EQ(batch_stamp(m.manager), 3);
        CHECK_THROWS(std::invalid_argument, m.fetch({&second, &second}));
    }
}

}  // namespace

}  // namespace tests::transfer::transfers
