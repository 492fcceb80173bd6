// SPDX-License-Identifier: Apache-2.0
// Reserve, fetch and commit. sharing.cpp tests pins, copies and replicas; errors.cpp tests
// refusals.
#include "support/manager_fixture.hpp"

namespace tests::cache::cache_manager {

using kvcore::FetchStatus;
using kvcore::ReservePlan;

namespace {

// Page size 1: a prompt 10..14, and a second request with the same first tokens.
TEST(two_requests_share_a_prefix) {
    ManagerFixture m(ManagerFixture::config(1, 128));
    Request first = m.claim({10, 11, 12, 13, 14});
    CHECK(m.reserve(first));
    CHECK_EQ(m.pages(first).size(), 5);
    CHECK_EQ(m.free(), 123);
    m.check_metrics(5, 0, 0, 0);
    m.run(first, 15);

    Request second = m.claim({10, 11, 12, 13});
    CHECK(m.reserve(second));
    CHECK_EQ(second.start, 3);
    CHECK_EQ(m.free(), 122);
    m.check_metrics(6, 3, 0, 0);
    m.run(second, 14);
    CHECK_EQ(m.swaps.size(), 1);
    CHECK_EQ(m.swaps[0].row, 0);
    CHECK_EQ(m.swaps[0].column, 3);
    CHECK_EQ(m.swaps[0].page, m.pages(first)[3]);
    CHECK_EQ(m.free(), 123);
    Ids shared = m.pages(first);
    shared.resize(4);
    CHECK_EQ(m.pages(second), shared);

    m.manager.release(first.sequence);
    m.manager.release(second.sequence);
    CHECK_EQ(m.available(), 128);
    CHECK_EQ(m.match({10, 11, 12, 13, 14}), 5);
}

TEST(reserving_is_idempotent_and_grows) {
    ManagerFixture m(ManagerFixture::config(4, 10));
    Request request = m.claim(count_up(0, 9));
    CHECK(m.reserve(request));
    const Trace once = m.trace({&request});
    CHECK(m.reserve(request));
    CHECK(m.trace({&request}) == once);
    CHECK(m.reserve(request, 4));  // 9 + 4 - 1 = 12 tokens: three pages
    CHECK(m.trace({&request}) == once);
    CHECK(m.reserve(request, 5));
    CHECK_EQ(m.pages(request).size(), 4);
    CHECK(m.reserve(request));  // a request keeps the pages that it holds
    CHECK_EQ(m.pages(request).size(), 4);
    m.check_metrics(9, 0, 0, 0);
}

TEST(one_token_is_left_to_run) {
    ManagerFixture m(ManagerFixture::config(2, 20));
    m.put({1, 2, 3, 4});
    Request same = m.claim({1, 2, 3, 4});
    CHECK(m.reserve(same));
    CHECK_EQ(same.start, 3);  // one page is shared, and the first token of the next page is copied
    Request single = m.claim({1});
    CHECK(m.reserve(single));
    CHECK_EQ(single.start, 0);
    Request chunk = m.claim({1, 2, 3, 4, 5});
    chunk.active = 1;  // no reuse for a single active token
    CHECK(m.reserve(chunk));
    CHECK_EQ(chunk.start, 0);
}

TEST(a_hit_beyond_the_chunk_moves_the_chunk) {
    ManagerFixture m(ManagerFixture::config(2, 20));
    m.put(count_up(1, 10));
    Request request = m.claim(count_up(1, 20));
    request.active = 4;
    CHECK(m.reserve(request));
    CHECK_EQ(request.start, 10);
    CHECK_EQ(request.active, 14);
    m.check_metrics(10 + 4, 10, 0, 0);
    Request longer = m.claim(count_up(1, 11));
    longer.active = 9;
    CHECK(m.reserve(longer));
    CHECK_EQ(longer.start, 10);
    CHECK_EQ(longer.active, 11);
}

TEST(a_longer_hit_replaces_the_requests_own_pages) {
    ManagerFixture m(ManagerFixture::config(2, 20));
    Request waiting = m.claim(count_up(1, 9));
    CHECK(m.reserve(waiting));
    m.check_metrics(9, 0, 0, 0);
    m.put(count_up(1, 6));
    m.check_metrics(15, 0, 0, 0);
    const std::int64_t free = m.free();
    CHECK(m.reserve(waiting));
    CHECK_EQ(waiting.start, 6);
    CHECK_EQ(m.free(), free + 3);
    m.check_metrics(9, 6, 0, 0);
    Ids cached;
    CHECK_EQ(m.match(count_up(1, 6), 0, "", &cached), 3);
    Ids row = m.pages(waiting);
    CHECK_EQ(row.size(), 5);
    row.resize(3);
    CHECK_EQ(row, cached);
}

// After a fetch, the pages of a request do not change until its commit, even if its prefix is
// cached meanwhile.
TEST(fetching_ends_prefix_reuse) {
    ManagerFixture m(ManagerFixture::config(2, 20));
    Request request = m.claim(count_up(1, 9));
    CHECK_EQ(m.fetch({&request}).status, FetchStatus::kOk);
    const Ids row = m.pages(request);
    m.put(count_up(1, 6));
    CHECK(m.reserve(request));
    CHECK_EQ(request.start, 0);
    CHECK_EQ(m.pages(request), row);
}

TEST(reserve_does_what_the_plan_says) {
    ManagerFixture m(ManagerFixture::config(2, 10));
    m.put(count_up(1, 7));    // three pages cached
    m.put(count_up(50, 10));  // five pages
    Request request = m.claim({1, 2, 3, 9, 9, 9, 9, 9});
    const Trace before = m.trace({&request});
    const ReservePlan plan = m.manager.plan(request.view());
    CHECK(m.trace({&request}) == before);
    CHECK(plan.fits);
    CHECK_EQ(plan.hit_tokens, 3);
    CHECK_EQ(plan.copied_tokens, 1);
    CHECK_EQ(plan.new_pages, 3);
    CHECK_EQ(plan.evicted_pages, 1);
    CHECK(m.reserve(request));
    CHECK_EQ(request.start, 3);
    m.check_metrics(7 + 10 + 5, 3, 1, 1);
    CHECK_EQ(m.free(), 0);
    CHECK_EQ(m.match(count_up(1, 6)), 2);  // the older prompt's tail was evicted, not the source

    Request large = m.claim(count_up(100, 16));
    const ReservePlan refused = m.manager.plan(large.view());
    CHECK(!refused.fits);
    CHECK(!m.manager.plan(large.view(), 1'000'000).fits);
}

TEST(eviction_goes_by_last_release) {
    ManagerFixture m(ManagerFixture::config(1, 9));
    m.put({1, 2, 3});
    m.put({4, 5, 6});
    m.put({7, 8, 9});
    Request user = m.claim({1, 2, 3, 0});
    CHECK(m.reserve(user));  // takes one page: the tail of 4 5 6
    CHECK_EQ(m.match({4, 5, 6}), 2);
    m.manager.release(user.sequence);  // 1 2 3 is the newest now
    Request large = m.claim(count_up(100, 7));
    CHECK(m.reserve(large));
    CHECK_EQ(m.match({4}), 0);
    CHECK_EQ(m.match({7}), 0);
    CHECK_EQ(m.match({1, 2, 3}), 2);
}

TEST(a_preempted_request_starts_again) {
    ManagerFixture m(ManagerFixture::config(2, 10));
    Request request = m.claim(count_up(1, 6));
    m.run(request, 7);
    m.manager.release(request.sequence);
    CHECK_EQ(request.start, 6);
    m.manager.reset_prefix_cache();
    request.sequence = m.manager.claim();
    CHECK(m.reserve(request));
    CHECK_EQ(request.start, 0);
    CHECK_EQ(request.active, 7);
    CHECK_EQ(m.pages(request).size(), 4);
}

TEST(uncached_managers_share_nothing) {
    kvcore::CacheConfig config = ManagerFixture::config(1, 10);
    config.prefix_caching = false;
    ManagerFixture m(config);
    m.put({1, 2, 3});
    CHECK_EQ(m.free(), 10);
    CHECK_EQ(m.match({1, 2, 3}), 0);
    Request request = m.claim({1, 2, 3});
    m.run(request, 4);
    CHECK_EQ(request.start, 3);
    CHECK_EQ(m.swaps.size(), 0);
    CHECK_EQ(m.manager.stats(0).cached_pages, 0);
}

TEST(without_dedup_a_request_keeps_its_duplicate_pages) {
    kvcore::CacheConfig config = ManagerFixture::config(1, 20);
    config.dedup = false;
    ManagerFixture m(config);
    Request one = m.claim({1, 2, 3});
    Request two = m.claim({1, 2, 3});
    CHECK_EQ(m.fetch({&one, &two}).status, FetchStatus::kOk);
    for (Request* request : {&one, &two}) {
        request->start = 3;
        request->append(4);
        request->active = 4;
    }
    const Ids before = m.pages(two);
    m.commit({&one, &two});
    CHECK_EQ(m.swaps.size(), 0);
    CHECK_EQ(m.pages(two), before);
    CHECK_EQ(m.manager.stats(0).cached_pages, 3);
    m.manager.release(one.sequence);
    CHECK_EQ(m.manager.stats(0).evictable_pages, 0);  // `two` also holds the cached node
    m.manager.release(two.sequence);
    CHECK_EQ(m.available(), 20);
    CHECK_EQ(m.free(), 17);
}

// The tokens are cut back into committed pages and written again. Other requests must not see the
// new tokens.
TEST(a_rewound_request_writes_pages_of_its_own) {
    ManagerFixture m(ManagerFixture::config(2, 20));
    Request request = m.claim(count_up(1, 8));
    m.run(request, 9);
    const Ids before = m.pages(request);
    request.rewind(4);
    CHECK_EQ(request.start, 3);
    request.append(77);
    request.active = request.end();
    CHECK_EQ(m.manager.plan(request.view()).new_pages, 2);
    CHECK(m.reserve(request));
    const Ids after = m.pages(request);
    CHECK_EQ(after.size(), 3);
    CHECK_EQ(after[0], before[0]);
    CHECK(after[1] != before[1] && after[2] != before[2]);
    const std::vector<kvcore::PageMove> owed = m.manager.take_copies();
    CHECK_EQ(owed.size(), 1);
    CHECK_EQ(owed[0].source, before[1]);
    CHECK_EQ(owed[0].destination, after[1]);
    CHECK_EQ(owed[0].num_tokens, 1);
    Ids cached;
    CHECK_EQ(m.match(count_up(1, 8), 0, "", &cached), 4);
    CHECK_EQ(cached, Ids(before.begin(), before.begin() + 4));
    m.run(request, 78);
    CHECK_EQ(m.match({1, 2, 3, 4}), 2);  // the rewritten second page is the same as before
    CHECK_EQ(m.pages(request)[1], before[1]);
}

TEST(an_empty_batch_is_served) {
    ManagerFixture m(ManagerFixture::config(1, 4));
    CHECK_EQ(m.fetch({}).status, FetchStatus::kOk);
    m.commit({});
    std::vector<kvcore::RequestView> none;
    CHECK_EQ(m.manager.reserve_batch({none.data(), 0}).reserved, 0);
}

TEST(metrics_count_each_position_once) {
    ManagerFixture m(ManagerFixture::config(4, 10));
    Request request = m.claim(count_up(1, 10));
    request.active = 6;
    CHECK(m.reserve(request));
    m.check_metrics(6, 0, 0, 0);
    CHECK_EQ(m.fetch({&request}).status, FetchStatus::kOk);
    m.check_metrics(6, 0, 0, 0);
    request.start = 6;
    request.active = 10;
    CHECK_EQ(m.fetch({&request}).status, FetchStatus::kOk);
    m.check_metrics(10, 0, 0, 0);
    CHECK_EQ(m.manager.metrics().peak_used_pages, 3);
    m.manager.release(request.sequence);
    m.manager.reset_metrics();
    m.check_metrics(0, 0, 0, 0);
    CHECK_EQ(m.manager.metrics().peak_used_pages, 0);
}

}  // namespace

}  // namespace tests::cache::cache_manager
