// SPDX-License-Identifier: Apache-2.0
// Truncate, the count of written tokens, forks of cached pages, and refusals.
#include "support/manager_fixture.hpp"

namespace tests::cache::truncate {

using kvcore::CacheConfig;
using kvcore::FetchStatus;
using kvcore::PageMove;

namespace {

// ---- truncate --------------------------------------------------------------------------------

// Three draft tokens run, and one is accepted.
TEST(rejected_drafts_are_forgotten) {
    ManagerFixture m(ManagerFixture::config(2, 10));
    Request request = served(m, {1, 2, 3}, 4);
    for (const TokenId draft : {5, 6, 7}) request.append(draft);
    request.active = request.end();
    CHECK_EQ(m.fetch({&request}).status, FetchStatus::kOk);
    CHECK_EQ(m.pages(request).size(), 4);
    m.manager.truncate(request.sequence, 5);
    CHECK_EQ(m.pages(request).size(), 3);
    CHECK_EQ(m.free(), 7);
    request.rewind(5);
    request.start = 5;
    request.append(8);
    request.active = 6;
    m.commit({&request});
    CHECK_EQ(m.match({1, 2, 3, 4, 5, 6}), 2);
    m.run(request, 9);
    CHECK_EQ(m.match({1, 2, 3, 4, 5, 8}), 3);
}

// A page of the tree stays unchanged after a truncation inside it: the next write copies it.
TEST(committed_pages_are_not_rewritten) {
    ManagerFixture m(ManagerFixture::config(4, 10));
    Request request = served(m, count_up(1, 8), 9);
    const Ids before = m.pages(request);
    m.manager.truncate(request.sequence, 6);
    CHECK_EQ(m.pages(request), before);
    request.rewind(6);
    request.start = 6;
    request.append(50);
    request.active = 7;
    m.run(request, 51);
    const std::vector<PageMove> copies = m.manager.take_copies();
    CHECK_EQ(copies.size(), 1);
    CHECK_EQ(copies[0].source, before[1]);
    CHECK_EQ(copies[0].destination, m.pages(request)[1]);
    CHECK_EQ(copies[0].num_tokens, 2);
    CHECK_EQ(m.match(count_up(1, 8)), 2);
    CHECK_EQ(m.available(), 8);
}

TEST(truncated_pages_of_the_tree_become_evictable) {
    ManagerFixture m(ManagerFixture::config(2, 10));
    Request request = served(m, count_up(1, 8), 9);
    CHECK_EQ(m.available(), 6);
    m.manager.truncate(request.sequence, 4);
    CHECK_EQ(m.available(), 8);
    CHECK_EQ(m.free(), 6);
    CHECK_EQ(m.match(count_up(1, 8)), 4);
}

// A claim without pages has no written tokens, whether it is reserved or fetched.
TEST(a_claim_truncated_to_nothing_begins_again) {
    for (const bool is_reserved : {false, true}) {
        ManagerFixture m(ManagerFixture::config(2, 10));
        Request request = served(m, {1, 2, 3}, 4);
        m.manager.truncate(request.sequence, 0);
        CHECK(m.pages(request).empty());
        if (is_reserved) CHECK(m.reserve(request));
        CHECK_EQ(m.fetch({&request}).status, FetchStatus::kOk);
        CHECK_EQ(request.start, 0);
        CHECK_EQ(request.active, 4);
    }
}

TEST(pages_of_forks_outlive_a_truncation) {
    ManagerFixture m(ManagerFixture::config(2, 10));
    Request parent = served(m, {1, 2, 3}, 4);
    const Request child = m.fork_of(parent, {9});
    m.manager.truncate(parent.sequence, 2);
    CHECK_EQ(m.pages(parent).size(), 1);
    CHECK_EQ(m.pages(child).size(), 2);
    CHECK_EQ(m.free(), 8);
    parent.rewind(3);
    parent.start = 2;
    m.run(parent, 7);
    CHECK(m.manager.take_copies().empty());
    CHECK_EQ(m.free(), 7);
}

TEST(copies_owed_to_truncated_pages_are_forgotten) {
    ManagerFixture m(ManagerFixture::config(4, 10));
    Request parent = served(m, {1, 2, 3}, 4);
    Request child = m.fork_of(parent, {9});
    CHECK(m.reserve(child));
    m.manager.truncate(child.sequence, 0);
    CHECK(m.manager.take_copies().empty());
    Request other = m.fork_of(parent, {8});
    CHECK(m.reserve(other));
    m.manager.truncate(other.sequence, 2);  // the kept page still needs its copy
    CHECK_EQ(m.manager.take_copies().size(), 1);
}

TEST(pages_reserved_ahead_are_given_back) {
    ManagerFixture m(ManagerFixture::config(2, 10));
    Request request = served(m, {1, 2, 3}, 4);
    CHECK(m.reserve(request, 7));
    CHECK_EQ(m.free(), 5);
    m.manager.truncate(request.sequence, 3);
    CHECK_EQ(m.free(), 8);
}

TEST(a_truncation_beyond_the_fetched_tokens_is_refused) {
    ManagerFixture m(ManagerFixture::config(2, 10));
    Request request = m.claim({1, 2, 3});
    CHECK(m.reserve(request));
    const Trace reserved = m.trace({&request});
    CHECK_THROWS(std::invalid_argument, m.manager.truncate(request.sequence, 1));
    CHECK(m.trace({&request}) == reserved);
    m.run(request, 4);
    const Trace before = m.trace({&request});
    CHECK_THROWS(std::invalid_argument, m.manager.truncate(request.sequence, 4));
    CHECK_THROWS(std::invalid_argument, m.manager.truncate(request.sequence, -1));
    kvcore::SequenceHandle stale = request.sequence;
    ++stale.generation;
    CHECK_THROWS(kvcore::RequestNotFoundError, m.manager.truncate(stale, 0));
    CHECK(m.trace({&request}) == before);
    m.manager.truncate(request.sequence, 3);
    CHECK(m.trace({&request}) == before);
}

// ---- written tokens --------------------------------------------------------------------------

/// Returns the number of tokens that a fork would get.
std::int64_t written(ManagerFixture& m, const Request& parent) {
    const Request child = m.fork_of(parent, {99});
    m.manager.release(child.sequence);
    return child.start;
}

/// Commits a step of `first` and `wrong`; the commit is refused because of `wrong`.
template <class Exception>
void commit_in_vain(ManagerFixture& m, Request& first, Request wrong) {
    CHECK_EQ(m.fetch({&first}).status, FetchStatus::kOk);
    ManagerFixture::sample(first, 5);
    CHECK_THROWS(Exception, m.commit({&first, &wrong}));
    CHECK_EQ(written(m, first), 3);
    CHECK_EQ(m.match({1, 2, 3, 4}), 0);
    first.rewind(4);
}

TEST(a_refused_commit_keeps_the_written_count) {
    ManagerFixture m(ManagerFixture::config(4, 10));
    Request first = served(m, {1, 2, 3}, 4);
    const Request second = served(m, {7, 8}, 9);
    Request too_far = second;
    while (too_far.end() < 20) too_far.append(0);
    too_far.start = 19;
    too_far.active = 20;
    commit_in_vain<std::invalid_argument>(m, first, too_far);
    Request illegal = second;
    illegal.start = illegal.active;
    commit_in_vain<std::invalid_argument>(m, first, illegal);
    Request unknown = second;
    ++unknown.sequence.generation;
    commit_in_vain<kvcore::RequestNotFoundError>(m, first, unknown);
    m.run(first, 5);
    CHECK_EQ(written(m, first), 4);
}

// Tokens that run again no longer count as written, however the request gets its pages.
TEST(fetching_rewound_tokens_unwrites_them) {
    for (const std::int64_t num_steps : {1, 4}) {
        ManagerFixture m(ManagerFixture::config(4, 10));
        Request request = served(m, count_up(1, 7), 8);
        request.rewind(6);
        CHECK_EQ(request.start, 5);
        CHECK_EQ(m.fetch({&request}, num_steps).status, FetchStatus::kOk);
        ManagerFixture::sample(request, 50);
        CHECK_EQ(written(m, request), 5);
        m.commit({&request});
        CHECK_EQ(written(m, request), 6);
    }
}

// ---- forks of cached pages -------------------------------------------------------------------

// The parent fills and commits a page that its fork also holds. The page must not be evicted while
// the fork holds it.
TEST(a_page_committed_under_a_fork_is_not_evicted) {
    ManagerFixture m(ManagerFixture::config(2, 3));
    Request parent = served(m, {1}, 2);
    CHECK_EQ(m.fetch({&parent}).status, FetchStatus::kOk);
    Request child = m.fork_of(parent, {9});
    CHECK_EQ(child.start, 1);
    const BlockId page = m.pages(child)[0];
    ManagerFixture::sample(parent, 3);
    m.commit({&parent});
    CHECK_EQ(m.match({1, 2}), 1);
    m.manager.check_integrity();
    m.manager.release(parent.sequence);
    CHECK_EQ(m.available(), 2);
    Request large = m.claim({5, 6, 7, 8});
    CHECK(m.reserve(large));
    m.manager.check_integrity();
    CHECK_EQ(m.pages(child)[0], page);
    CHECK(!m.reserve(child));
    m.manager.release(large.sequence);
    CHECK(m.reserve(child));
    const std::vector<PageMove> copies = m.manager.take_copies();
    CHECK_EQ(copies.size(), 1);
    CHECK_EQ(copies[0].source, page);
    CHECK_EQ(copies[0].num_tokens, 1);
    CHECK_EQ(m.match({1, 2}), 1);
    CHECK_EQ(m.available(), 2);
}

TEST(a_page_committed_while_it_is_copied_is_not_evicted) {
    ManagerFixture m(ManagerFixture::config(2, 3));
    Request parent = served(m, {1}, 2);
    CHECK_EQ(m.fetch({&parent}).status, FetchStatus::kOk);
    Request child = m.fork_of(parent, {9});
    CHECK(m.reserve_copying(child));
    ManagerFixture::sample(parent, 3);
    m.commit({&parent});
    m.manager.check_integrity();
    m.manager.release(parent.sequence);
    CHECK_EQ(m.available(), 1);
    CHECK_EQ(m.match({1, 2}), 1);
    m.manager.reset_prefix_cache();
    CHECK_EQ(m.match({1, 2}), 0);  // a copy does not keep its source in the cache after a reset
    CHECK_EQ(m.available(), 1);
    m.finish();
    CHECK_EQ(m.free(), 2);
}

TEST(forks_share_and_release_cached_pages) {
    ManagerFixture m(ManagerFixture::config(2, 10));
    Request parent = served(m, {1, 2, 3}, 4);
    Request same = m.fork_of(parent, {4});
    m.run(parent, 5);
    m.run(same, 6);
    CHECK_EQ(m.swaps.size(), 1);  // both wrote token 4
    CHECK_EQ(m.pages(same), m.pages(parent));
    CHECK_EQ(m.free(), 8);
    m.manager.release(parent.sequence);
    m.manager.release(same.sequence);
    CHECK_EQ(m.available(), 10);
    CHECK_EQ(m.match({1, 2, 3, 4}), 2);
}

// ---- refusals --------------------------------------------------------------------------------

TEST(refused_forks_leave_no_trace) {
    CacheConfig config = ManagerFixture::config(2, 10);
    config.max_sequences = 3;
    ManagerFixture m(config);
    Request parent = served(m, {1, 2, 3}, 4);
    Request good("", {1, 2, 3, 9});
    const Trace before = m.trace({&parent});
    const auto check_refused = [&](Request wrong) {
        CHECK_THROWS(std::invalid_argument, m.fork(parent, {&good, &wrong}));
        CHECK(m.trace({&parent}) == before);
        CHECK_EQ(good.start, 0);
        CHECK(good.sequence == kvcore::SequenceHandle{});
    };
    check_refused(Request("", {1, 2, 3}));
    check_refused(Request("", {1, 2}));
    check_refused(Request("", {1, 2, 4, 9}));
    check_refused(Request("another", {1, 2, 3, 9}));
    Request second("", {1, 2, 3, 8});
    Request third("", {1, 2, 3, 7});
    CHECK_THROWS(kvcore::CapacityError, m.fork(parent, {&good, &second, &third}));
    CHECK(m.trace({&parent}) == before);
    Request stale = parent;
    ++stale.sequence.generation;
    CHECK_THROWS(kvcore::RequestNotFoundError, m.fork(stale, {&good}));
    Request illegal = parent;
    illegal.start = illegal.active;
    CHECK_THROWS(std::invalid_argument, m.fork(illegal, {&good}));
    CHECK(m.trace({&parent}) == before);
    m.fork(parent, {});
    CHECK(m.trace({&parent}) == before);
    m.fork(parent, {&good, &second});
    CHECK_THROWS(kvcore::CapacityError, m.fork(parent, {&third}));
}

TEST(forks_stay_in_their_namespace) {
    ManagerFixture m(ManagerFixture::config(2, 10));
    Request parent = m.claim({1, 2, 3}, 0, "tenant");
    m.run(parent, 4);
    Request child = m.fork_of(parent, {9});
    CHECK_EQ(child.name_space(), "tenant");
    m.run(child, 5);
    CHECK_EQ(m.match({1, 2, 3, 9}), 0);
    CHECK_EQ(m.match({1, 2, 3, 9}, 0, "tenant"), 2);
}

}  // namespace

}  // namespace tests::cache::truncate
