// SPDX-License-Identifier: Apache-2.0
// Fork and copy-on-write, and the copies that a fork needs. truncate.cpp tests truncate and
// refusals; common_pages.cpp tests shared prefixes.
#include "support/manager_fixture.hpp"

namespace tests::cache::fork {

using kvcore::FetchResult;
using kvcore::FetchStatus;
using kvcore::PageMove;

namespace {

// ---- fork ------------------------------------------------------------------------------------

TEST(a_fork_shares_the_written_pages) {
    ManagerFixture m(ManagerFixture::config(4, 10));
    Request parent = served(m, count_up(1, 6), 7);
    const std::int64_t free = m.free();
    const kvcore::Metrics before = m.manager.metrics();
    Request child = m.fork_of(parent, {8, 9});
    CHECK_EQ(child.start, 6);
    CHECK_EQ(child.active, 8);
    CHECK_EQ(m.pages(child), m.pages(parent));
    CHECK_EQ(m.free(), free);
    CHECK_EQ(m.manager.replica_of(child.sequence), 0);
    m.check_metrics(before.input_tokens, 0, 0, 0);
    CHECK(m.manager.take_copies().empty());
    CHECK_EQ(m.manager.stats(0).num_sequences, 2);
}

// Pages that the parent reserved ahead belong only to the parent.
TEST(a_fork_gets_no_page_reserved_ahead) {
    ManagerFixture m(ManagerFixture::config(2, 10));
    Request parent = served(m, {1, 2, 3}, 4);
    CHECK(m.reserve(parent, 5));
    CHECK_EQ(m.pages(parent).size(), 4);
    const Request child = m.fork_of(parent, {4});
    CHECK_EQ(m.pages(child).size(), 2);
}

TEST(a_fork_of_a_parent_without_tokens_is_a_claim) {
    ManagerFixture m(ManagerFixture::config(2, 10));
    m.put({1, 2, 3});
    Request parent = m.claim({1, 2, 3});
    Request child("", {1, 2, 9});
    child.active = 1;
    m.fork(parent, {&child});
    CHECK_EQ(child.start, 0);
    CHECK_EQ(child.active, 1);
    CHECK(m.pages(child).empty());
    child.active = 3;
    CHECK(m.reserve(child));
    CHECK_EQ(child.start, 2);  // the child can still take a prefix hit
}

TEST(a_chunk_that_ends_after_the_fork_is_kept) {
    ManagerFixture m(ManagerFixture::config(2, 10));
    Request parent = served(m, {1, 2}, 3);
    Request chunk("", {1, 2, 3, 4, 5});
    chunk.active = 4;
    Request late("", {1, 2, 3, 4, 5});
    late.active = 2;
    m.fork(parent, {&chunk, &late});
    CHECK_EQ(chunk.active, 4);
    CHECK_EQ(late.active, 5);
}

// The fork gets the tokens of the last commit, but no token past the parent's current end.
TEST(a_fork_has_what_was_committed) {
    ManagerFixture m(ManagerFixture::config(4, 10));
    Request parent = served(m, {1, 2, 3}, 4);
    CHECK_EQ(m.fetch({&parent}, 3).status, FetchStatus::kOk);
    ManagerFixture::sample(parent, 5);
    const Request early = m.fork_of(parent, {9});
    CHECK_EQ(early.start, 3);
    m.commit({&parent});
    const Request late = m.fork_of(parent, {9});
    CHECK_EQ(late.start, 4);
    parent.rewind(2);
    const Request rewound = m.fork_of(parent, {9});
    CHECK_EQ(rewound.start, 1);
}

// ---- copy-on-write ---------------------------------------------------------------------------

TEST(the_first_writer_copies_the_page) {
    ManagerFixture m(ManagerFixture::config(4, 10));
    Request parent = served(m, {1, 2, 3}, 4);
    Request child = m.fork_of(parent, {9});
    const BlockId shared = m.pages(parent)[0];
    CHECK_EQ(m.manager.plan(child.view()).new_pages, 1);
    CHECK(m.reserve(child));
    CHECK(m.pages(child)[0] != shared);
    const std::vector<PageMove> copies = m.manager.take_copies();
    CHECK_EQ(copies.size(), 1);
    check_copy(copies[0], shared, m.pages(child)[0], 3, child);
    CHECK_EQ(m.manager.plan(parent.view()).new_pages, 0);  // the page has no other holder now
    CHECK(m.reserve(parent));
    CHECK_EQ(m.pages(parent)[0], shared);
    CHECK(m.manager.take_copies().empty());
    CHECK_EQ(m.manager.metrics().copied_tokens, 0);
    CHECK_EQ(m.free(), 8);
}

TEST(the_parent_copies_when_it_writes_first) {
    ManagerFixture m(ManagerFixture::config(4, 10));
    Request parent = served(m, {1, 2, 3}, 4);
    Request child = m.fork_of(parent, {9});
    const BlockId shared = m.pages(child)[0];
    m.run(parent, 5);
    const std::vector<PageMove> copies = m.manager.take_copies();
    CHECK_EQ(copies.size(), 1);
    check_copy(copies[0], shared, m.pages(parent)[0], 3, parent);
    CHECK_EQ(m.pages(child)[0], shared);
    CHECK_EQ(m.match({1, 2, 3, 4}), 1);
}

TEST(whole_pages_need_no_copy) {
    ManagerFixture m(ManagerFixture::config(2, 10));
    Request parent = served(m, {1, 2, 3, 4}, 5);
    Request child = m.fork_of(parent, {9});
    CHECK_EQ(m.fetch({&parent, &child}).status, FetchStatus::kOk);
    CHECK(m.manager.take_copies().empty());
    CHECK_EQ(m.free(), 6);
}

// A page with n holders is copied n - 1 times.
TEST(the_last_holder_writes_in_place) {
    ManagerFixture m(ManagerFixture::config(4, 10));
    Request parent = served(m, {1, 2, 3}, 4);
    const BlockId shared = m.pages(parent)[0];
    Request first = m.fork_of(parent, {7});
    Request second = m.fork_of(parent, {8});
    CHECK(m.reserve(first));
    CHECK(m.reserve(second));
    CHECK_EQ(m.manager.take_copies().size(), 2);
    CHECK_EQ(m.free(), 7);
    m.manager.release(first.sequence);
    CHECK_EQ(m.pages(parent)[0], shared);
    CHECK(m.reserve(parent));
    CHECK(m.manager.take_copies().empty());
}

TEST(no_copy_once_the_others_are_released) {
    ManagerFixture m(ManagerFixture::config(4, 1));  // no free page for a copy
    Request parent = served(m, {1, 2, 3}, 4);
    Request child = m.fork_of(parent, {9});
    CHECK(!m.reserve(child));
    CHECK_EQ(m.fetch({&child}).status, FetchStatus::kNoSpace);
    m.manager.release(parent.sequence);
    CHECK(m.reserve(child));
    CHECK(m.manager.take_copies().empty());
}

// ---- parent and children in one fetch --------------------------------------------------------

/// A parent with 3 tokens in a page of 4, and its forks, in a pool of `num_blocks` pages.
struct Family {
    Family(std::int64_t num_blocks, std::int64_t num_children)
        : m(ManagerFixture::config(4, num_blocks)), parent(served(m, {1, 2, 3}, 4)) {
        for (std::int64_t i = 0; i < num_children; ++i) {
            children.push_back(m.fork_of(parent, {static_cast<TokenId>(10 + i)}));
        }
    }
    std::vector<Request*> all() {
        std::vector<Request*> batch{&parent};
        for (Request& child : children) batch.push_back(&child);
        return batch;
    }

    ManagerFixture m;
    Request parent;
    std::vector<Request> children;
};

TEST(a_family_is_fetched_with_exactly_enough_free_pages) {
    for (const bool at_once : {false, true}) {
        Family family(3, 2);
        ManagerFixture& m = family.m;
        const BlockId shared = m.pages(family.parent)[0];
        if (at_once) {
            CHECK_EQ(m.fetch_copying(family.all()).status, FetchStatus::kPending);
        } else {
            CHECK_EQ(m.fetch(family.all()).status, FetchStatus::kOk);
        }
        const std::vector<PageMove> copies = at_once ? m.transfers.copies : m.manager.take_copies();
        CHECK_EQ(copies.size(), 2);
        check_copy(copies[0], shared, m.pages(family.parent)[0], 3, family.parent);
        check_copy(copies[1], shared, m.pages(family.children[0])[0], 3, family.children[0]);
        CHECK_EQ(m.pages(family.children[1])[0], shared);  // the last holder writes in place
        if (at_once) {
            m.finish();
            CHECK_EQ(m.fetch_copying(family.all()).status, FetchStatus::kOk);
            CHECK(m.transfers.empty());
        }
        CHECK_EQ(m.free(), 0);
    }
}

TEST(a_family_is_refused_with_one_free_page_less) {
    for (const bool at_once : {false, true}) {
        Family family(2, 2);
        ManagerFixture& m = family.m;
        const auto trace = [&] {
            return m.trace({&family.parent, &family.children[0], &family.children[1]});
        };
        const Trace before = trace();
        const FetchResult refused = at_once ? m.fetch_copying(family.all()) : m.fetch(family.all());
        CHECK_EQ(refused.status, FetchStatus::kNoSpace);
        CHECK_EQ(refused.row, 1);
        CHECK_EQ(refused.needed, 1);
        CHECK_EQ(refused.available, 0);
        CHECK(trace() == before);
        CHECK(m.transfers.empty() && m.manager.take_copies().empty());
    }
}

// The fetch evicts the pages that are counted as evictable to make room for the copies.
TEST(a_family_evicts_for_its_copies) {
    Family family(4, 2);
    ManagerFixture& m = family.m;
    m.put({50, 51, 52, 53, 54});
    CHECK_EQ(m.available(), 3);
    CHECK_EQ(m.fetch_copying(family.all()).status, FetchStatus::kPending);
    CHECK_EQ(m.transfers.copies.size(), 2);
    m.finish();
    CHECK_EQ(m.fetch_copying(family.all()).status, FetchStatus::kOk);
}

// Two requests of the batch continue in the same page. Both copy the page, because the third holder
// is not in the batch.
TEST(holders_outside_the_batch_count) {
    Family family(3, 2);
    ManagerFixture& m = family.m;
    CHECK_EQ(m.fetch_copying({&family.children[0], &family.children[1]}).status,
             FetchStatus::kPending);
    CHECK_EQ(m.transfers.copies.size(), 2);
    m.finish();
    CHECK_EQ(m.free(), 0);
    CHECK_EQ(m.fetch({&family.parent}).status, FetchStatus::kOk);
}

// ---- copies in flight ------------------------------------------------------------------------

TEST(a_copy_at_once_holds_its_source) {
    ManagerFixture m(ManagerFixture::config(4, 3));
    Request parent = served(m, {1, 2, 3}, 4);
    Request child = m.fork_of(parent, {9});
    CHECK(m.reserve_copying(child));
    CHECK_EQ(m.transfers.copies.size(), 1);
    check_copy(m.transfers.copies[0], m.pages(parent)[0], m.pages(child)[0], 3, child);
    CHECK(m.manager.take_copies().empty());
    m.manager.release(parent.sequence);
    CHECK_EQ(m.free(), 1);  // the source stays held until the copy is finished
    m.finish();
    CHECK_EQ(m.free(), 2);
}

// Until the copy is finished, even the last holder does not write to the source.
TEST(the_source_of_a_copy_in_flight_is_not_written) {
    ManagerFixture m(ManagerFixture::config(4, 3));
    Request parent = served(m, {1, 2, 3}, 4);
    Request child = m.fork_of(parent, {9});
    CHECK(m.reserve_copying(child));
    const kvcore::Transfers first = m.transfers;
    CHECK(m.reserve_copying(parent));
    CHECK_EQ(m.transfers.copies.size(), 1);
    check_copy(m.transfers.copies[0], first.copies[0].source, m.pages(parent)[0], 3, parent);
    m.manager.finish(first.ticket);
    m.finish();
    CHECK_EQ(m.free(), 1);
}

TEST(copies_are_finished_in_any_order) {
    ManagerFixture m(ManagerFixture::config(4, 4));
    m.put({50, 51, 52, 53, 54});
    Request parent = served(m, {1, 2, 3}, 4);
    Request child = m.fork_of(parent, {9});
    CHECK(m.reserve_copying(child));
    const kvcore::Transfers of_child = m.transfers;
    m.manager.release(child.sequence);
    Request other = m.claim({50, 51, 99});
    CHECK(m.reserve_copying(other));
    CHECK_EQ(m.transfers.copies.size(), 1);
    CHECK(m.transfers.copies[0].destination != of_child.copies[0].destination);
    m.finish();
    m.manager.finish(of_child.ticket);
    CHECK_EQ(m.available(), 2);
    m.manager.release(other.sequence);
    CHECK_EQ(m.available(), 3);
}

// A copy that is owed to a page is owed to all holders of the page.
TEST(a_copy_is_owed_to_the_forks_of_its_page) {
    ManagerFixture m(ManagerFixture::config(4, 6));
    m.put({1, 2, 3, 4, 5});
    Ids cached;
    CHECK_EQ(m.match({1, 2, 3, 4}, 0, "", &cached), 1);
    for (const bool is_released : {false, true}) {
        Request parent = m.claim({1, 2, 9});
        CHECK(m.reserve(parent));
        Request child = m.fork_of(parent, {8});
        CHECK_EQ(child.start, 2);
        if (is_released) m.manager.release(parent.sequence);
        if (!is_released) m.manager.truncate(parent.sequence, 0);
        const std::vector<PageMove> copies = m.manager.take_copies();
        CHECK_EQ(copies.size(), 1);
        check_copy(copies[0], cached[0], m.pages(child)[0], 2, child);
        m.manager.release(child.sequence);
        if (!is_released) m.manager.release(parent.sequence);
    }
}

}  // namespace

}  // namespace tests::cache::fork
