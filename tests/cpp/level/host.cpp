// SPDX-License-Identifier: Apache-2.0
// The host tier while a copy is in flight: the pages that lookups find, hold and free at each step.
#include <stdexcept>

#include "support/host_fixture.hpp"

namespace tests::level::host {

using kvcore::PageMove;
using kvcore::Tier;
using kvcore::Transfers;

namespace {

void check_source(const Transfers& transfers, Tier source, std::int64_t n) {
    CHECK(transfers.copies.empty());
    CHECK_EQ(count(transfers.tier_moves), n);
    for (const PageMove& copy : transfers.tier_moves) CHECK_EQ(copy.source_tier, source);
}

TEST(pages_are_found_when_their_copies_are_finished) {
    HostFixture m(8, 8);
    Request request = m.claim(count_up(0, 7));
    CHECK(m.reserve(request).empty());
    const Transfers stores = m.commit(request, 7);
    check_source(stores, Tier::kDevice, 3);
    CHECK_EQ(m.stored(), 0);
    CHECK_EQ(m.manager.metrics().stored_pages, 0);
    m.finish(stores);
    CHECK_EQ(m.stored(), 3);
    CHECK_EQ(m.manager.metrics().stored_pages, 3);
    CHECK_THROWS(kvcore::InvalidHandleError, m.manager.finish(stores.ticket));
    m.manager.release(request.sequence);
}

TEST(copies_that_failed_are_never_found_and_tried_again) {
    HostFixture m(8, 8);
    Request request = m.claim(count_up(0, 6));
    m.finish(m.reserve(request));
    m.finish(m.commit(request, 6), false);
    CHECK_EQ(m.stored(), 0);
    request.append(7);
    request.active = request.end();
    m.finish(m.reserve(request));
    const Transfers stores = m.commit(request, 8);
    check_source(stores, Tier::kDevice, 4);
    m.finish(stores);
    CHECK_EQ(m.stored(), 4);
    CHECK_EQ(m.manager.metrics().stored_pages, 4);
    m.manager.release(request.sequence);
}

TEST(sources_stay_while_they_are_copied) {
    HostFixture m(3, 8);
    Request request = m.claim(count_up(0, 5));
    m.finish(m.reserve(request));
    const Transfers stores = m.commit(request, 5);
    m.manager.release(request.sequence);
    CHECK_EQ(m.manager.stats(0).available_pages(), 1);
    m.finish(stores);
    CHECK_EQ(m.manager.stats(0).available_pages(), 3);
    CHECK_EQ(m.stored(), 2);
    CHECK_EQ(m.manager.stats(0).evictable_pages, 2);
}

TEST(a_sequence_under_way_leaves_its_pages_to_the_commit_after) {
    HostFixture m(8, 8);
    Request request = m.claim(count_up(0, 4));
    m.finish(m.reserve(request));
    const Transfers first = m.commit(request, 4);
    request.append(5);
    request.active = request.end();
    m.finish(m.reserve(request));
    CHECK(m.commit(request, 6).empty());
    m.finish(first);
    request.append(7);
    request.active = request.end();
    m.finish(m.reserve(request));
    const Transfers rest = m.commit(request, 8);
    check_source(rest, Tier::kDevice, 2);
    m.finish(rest);
    CHECK_EQ(m.stored(), 4);
    m.manager.release(request.sequence);
}

// The second sequence stores only the pages after the pages that the first one is storing.
void pages_under_way_are_not_stored_twice(bool in_order) {
    HostFixture m(16, 16);
    Request first = m.claim(count_up(0, 6));
    Tokens longer = count_up(0, 6);
    longer.insert(longer.end(), {70, 71, 72, 73});
    Request second = m.claim(longer);
    m.finish(m.reserve(first));
    m.finish(m.reserve(second));
    const Transfers one = m.commit(first, 9);
    const Transfers two = m.commit(second, 9);
    check_source(one, Tier::kDevice, 3);
    check_source(two, Tier::kDevice, 2);
    m.finish(in_order ? one : two);
    m.finish(in_order ? two : one);
    CHECK_EQ(m.stored(), in_order ? 5 : 3);  // a lookup ends at the first hole
    m.manager.release(first.sequence);
    m.manager.release(second.sequence);
    m.manager.reset_prefix_cache();
    CHECK_EQ(m.stored(), 0);
}

TEST(pages_of_a_truncated_sequence_arrive_without_it) {
    HostFixture m(8, 8);
    Request request = m.claim(count_up(0, 6));
    m.finish(m.reserve(request));
    const Transfers stores = m.commit(request, 6);
    m.manager.truncate(request.sequence, 3);
    request.rewind(3);
    m.manager.check_integrity();
    m.finish(stores);
    CHECK_EQ(m.stored(), 3);
    request.append(60);
    request.append(61);
    request.active = request.end();
    m.finish(m.reserve(request));
    const Transfers rest = m.commit(request, 62);
    check_source(rest, Tier::kDevice, 1);
    m.finish(rest);
    CHECK_EQ(m.stored(), 4);
    m.manager.release(request.sequence);
}

TEST(what_is_reset_does_not_come_back) {
    HostFixture m(8, 8);
    Request gone = m.claim(count_up(0, 6));
    m.finish(m.reserve(gone));
    const Transfers stores = m.commit(gone, 6);
    m.manager.release(gone.sequence);
    m.manager.reset_prefix_cache();
    m.finish(stores);
    CHECK_EQ(m.stored(), 0);
    m.manager.reset_prefix_cache();
    CHECK_EQ(m.manager.stats(0).free_pages, 8);
}

TEST(loads_fill_the_requests_own_pages_and_hold_their_sources) {
    HostFixture m(4, 4);
    m.put(count_up(0, 6));
    CHECK_EQ(m.hit(count_up(0, 6)), 6);
    Request request = m.claim(count_up(0, 8));
    const Transfers loads = m.reserve(request);
    check_source(loads, Tier::kHost, 3);
    CHECK_EQ(request.start, 6);
    const Ids pages = m.manager.pages_of(request.sequence);
    for (std::int64_t i = 0; i < 3; ++i) {
        CHECK_EQ(item(loads.tier_moves, i).page_in(kvcore::Tier::kDevice), item(pages, i));
    }
    CHECK_EQ(m.manager.stats(0).cached_pages, 0);
    m.finish(loads);
    CHECK_EQ(m.manager.metrics().loaded_pages, 3);
    CHECK_EQ(m.manager.metrics().cache_tokens, 6);
    const Transfers stores = m.commit(request, 8);
    check_source(stores, Tier::kDevice, 1);
    CHECK_EQ(m.manager.stats(0).cached_pages, 4);
    m.finish(stores);
    m.manager.release(request.sequence);
    m.manager.reset_prefix_cache();
    CHECK_EQ(m.stored(), 0);
}

TEST(a_request_whose_pages_did_not_arrive_begins_again) {
    HostFixture m(4, 8);
    m.put(count_up(0, 6));
    Request request = m.claim(count_up(0, 8));
    const Transfers loads = m.reserve(request);
    CHECK_EQ(request.start, 6);
    m.finish(loads, false);
    CHECK_EQ(m.manager.metrics().loaded_pages, 0);
    CHECK(m.manager.pages_of(request.sequence).empty());
    CHECK_EQ(m.manager.stats(0).available_pages(), 4);
    const Transfers again = m.reserve(request);  // the start of its context does not matter
    check_source(again, Tier::kHost, 3);
    CHECK_EQ(request.start, 6);
    m.finish(again);
    m.finish(m.commit(request, 8));
    m.manager.release(request.sequence);
    m.manager.reset_prefix_cache();
    CHECK_EQ(m.stored(), 0);
}

TEST(a_request_released_under_way_leaves_nothing) {
    HostFixture m(4, 4);
    m.put(count_up(0, 6));
    Request request = m.claim(count_up(0, 8));
    const Transfers loads = m.reserve(request);
    m.manager.release(request.sequence);
    m.finish(loads);
    CHECK_EQ(m.manager.stats(0).available_pages(), 4);
    m.manager.reset_prefix_cache();
    CHECK_EQ(m.stored(), 0);
}

TEST(a_tier_asks_for_transfers) {
    HostFixture m(4, 4);
    Request request = m.claim({1, 2, 3});
    kvcore::RequestView view = request.view();
    std::vector<kvcore::PageSwap> swaps;
    kvcore::FetchTarget target;
    CHECK_THROWS(std::invalid_argument, static_cast<void>(m.manager.reserve(view)));
    CHECK_THROWS(std::invalid_argument, m.manager.commit({&view, 1}, swaps));
    CHECK_THROWS(std::invalid_argument, static_cast<void>(m.manager.fetch({&view, 1}, 1, &target)));
    CHECK_THROWS(std::invalid_argument, HostFixture(4, -1));
    kvcore::CacheConfig config = HostFixture::config(4, 4);
    config.prefix_caching = false;
    CHECK_THROWS(std::invalid_argument, ManagerFixture{config});
}

TEST(pages_under_way_are_not_stored_twice) {
    pages_under_way_are_not_stored_twice(true);
    pages_under_way_are_not_stored_twice(false);
}

}  // namespace

}  // namespace tests::level::host
