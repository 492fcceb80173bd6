// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "support/host_fixture.hpp"
#include "support/manager_fixture.hpp"

namespace tests::cache::hits {

using kvcore::PrefixHit;
using kvcore::RequestView;
using kvcore::ReserveStatus;

namespace {

std::int64_t evictable(ManagerFixture& m) { return m.manager.stats(0).evictable_pages; }

TEST(allocate_takes_the_hit_that_reserve_would_take) {
    ManagerFixture m(ManagerFixture::config(2, 16));
    m.put(count_up(1, 8));
    Tokens tokens = count_up(1, 7);
    tokens.push_back(50);
    Request two = m.claim(tokens);
    RequestView view = two.view();
    const auto plan = m.manager.plan(view);
    PrefixHit hit = m.manager.match(view);
    CHECK_EQ(hit.num_tokens(), plan.hit_tokens);
    CHECK_EQ(hit.num_tokens(), 7);  // the last token is copied
    CHECK_EQ(hit.num_pages(), 3);
    CHECK_EQ(view.start, 0);
    CHECK_EQ(m.manager.allocate(hit, view, 8), ReserveStatus::kOk);
    CHECK_EQ(view.start, 7);
    CHECK_EQ(count(m.manager.pages_of(two.sequence)), 4);
    CHECK_EQ(m.manager.metrics().cache_tokens, 7);
    CHECK_EQ(m.manager.take_copies().size(), 1);
    CHECK_EQ(hit.num_tokens(), 0);  // allocate has used the hit up
    CHECK_THROWS(std::invalid_argument, static_cast<void>(m.manager.allocate(hit, view, 8)));
    m.manager.check_integrity();
}

// A hit pins its pages, so they cannot be evicted. After the hit is dropped, they keep their place
// in the eviction order.
TEST(a_dropped_hit_leaves_no_trace) {
    ManagerFixture m(ManagerFixture::config(2, 8));
    m.put(count_up(1, 4));
    m.put(count_up(101, 4));
    const std::int64_t before = evictable(m);
    Request asks = m.claim(count_up(1, 6));
    {
        const PrefixHit hit = m.manager.match(asks.view());
        CHECK_EQ(hit.num_pages(), 2);
        CHECK_EQ(evictable(m), before - 2);
        PrefixHit moved = m.manager.match(asks.view());
        const PrefixHit other = std::move(moved);
        // NOLINTNEXTLINE(bugprone-use-after-move,clang-analyzer-cplusplus.Move): it holds nothing
        CHECK_EQ(moved.num_tokens(), 0);
        CHECK_EQ(other.num_tokens(), 4);
        m.manager.check_integrity();
    }
    CHECK_EQ(evictable(m), before);
    CHECK_EQ(m.manager.metrics().cache_tokens, 0);
    Request large = m.claim(count_up(201, 12));  // six of eight pages: two are evicted
    CHECK(m.reserve(large));
    CHECK_EQ(m.manager.plan(asks.view()).hit_tokens, 0);  // evicted as the oldest prefix
    m.manager.check_integrity();
}

// A hit pins its pages, so they cannot be evicted for its own request. The same is true of
// `reserve`.
TEST(a_hit_that_does_not_fit_is_still_held) {
    ManagerFixture m(ManagerFixture::config(2, 4));
    m.put(count_up(1, 4));
    Request holder = m.claim(count_up(50, 4));
    CHECK(m.reserve(holder));
    Request asks = m.claim(count_up(1, 8));
    RequestView view = asks.view();
    PrefixHit hit = m.manager.match(view);
    CHECK_EQ(m.manager.allocate(hit, view, 8), ReserveStatus::kNoSpace);
    CHECK_EQ(hit.num_tokens(), 4);
    CHECK_EQ(view.start, 0);
    CHECK_EQ(evictable(m), 0);
    m.manager.release(holder.sequence);
    CHECK_EQ(m.manager.allocate(hit, view, 8), ReserveStatus::kOk);
    CHECK_EQ(view.start, 4);
    m.manager.check_integrity();
}

TEST(a_hit_is_refused_after_its_request_changed) {
    ManagerFixture m(ManagerFixture::config(2, 16));
    m.put(count_up(1, 4));
    Request asks = m.claim(count_up(1, 8));
    RequestView view = asks.view();
    PrefixHit hit = m.manager.match(view);
    CHECK(m.reserve(asks));
    RequestView now = asks.view();
    CHECK_THROWS(std::invalid_argument, static_cast<void>(m.manager.allocate(hit, now, 8)));
    CHECK_EQ(hit.num_tokens(), 4);
}

// The namespace is reset while a request holds a hit inside its first page.
TEST(a_hit_outlives_the_pages_around_it) {
    ManagerFixture m(ManagerFixture::config(4, 4));
    m.put(count_up(1, 4), 0, "tenant");
    Request asks("tenant", {1, 2, 90, 91, 92});
    asks.sequence = m.manager.claim();
    RequestView view = asks.view();
    PrefixHit hit = m.manager.match(view);
    CHECK_EQ(hit.num_tokens(), 2);
    CHECK_EQ(hit.num_pages(), 0);
    CHECK(!m.manager.reset_prefix_cache());
    CHECK_EQ(m.manager.stats(0).cached_pages, 0);
    CHECK_THROWS(std::invalid_argument, m.manager.allocate(hit, view, 5));
    hit = PrefixHit();
    CHECK(m.manager.reset_prefix_cache());
    m.manager.check_integrity();
}

// The last pages of a hit are forgotten while it is held. The hit must end its window reads before
// it releases the pin, because the run is erased with the pin.
TEST(a_hit_outlives_what_was_forgotten) {
    for (const bool has_windows : {false, true}) {
        for (const std::size_t bad : {0U, 3U}) {
            kvcore::CacheConfig config = ManagerFixture::config(2, 64);
            if (has_windows) config.groups = {{}, {kvcore::GroupKind::kSliding, 4, 1, 0}};
            ManagerFixture m(config);
            m.put(count_up(1, 8));
            Ids ids;
            m.match(count_up(1, 8), 0, "", &ids);
            Request asks = m.claim(count_up(1, 8) + Tokens{90});
            {
                PrefixHit hit = m.manager.match(asks.view());
                CHECK_EQ(hit.num_pages(), 4);
                CHECK(m.manager.forget(0, &ids[bad], 1) > 0);
                RequestView view = asks.view();
                CHECK_THROWS(std::invalid_argument,
                             static_cast<void>(m.manager.allocate(hit, view, 8)));
                m.manager.check_integrity();
                PrefixHit moved = std::move(hit);
                m.manager.check_integrity();
            }
            m.manager.check_integrity();
            CHECK_EQ(m.available(), 64);
            PrefixHit rest = m.manager.match(asks.view());
            CHECK_EQ(rest.num_pages(), bad == 0 ? 0 : 3);
        }
    }
}

TEST(a_hit_continues_in_the_host_tier) {
    HostFixture m(8, 8);
    m.put(count_up(1, 8));
    Request asks = m.claim(count_up(1, 10));
    RequestView view = asks.view();
    PrefixHit hit = m.manager.match(view);
    CHECK_EQ(hit.num_tokens(), 8);
    kvcore::Transfers loads;
    CHECK_EQ(m.manager.allocate(hit, view, 10, &loads), ReserveStatus::kOk);
    CHECK_EQ(loads.tier_moves.size(), 4);
    for (const kvcore::PageMove& move : loads.tier_moves) {
        CHECK(move.is_load());
        CHECK_EQ(move.source_tier, kvcore::Tier::kHost);
        CHECK_EQ(move.num_tokens, 2);
    }
    m.finish(loads);
}

// `reserve_to` reserves at least the pages of the next tokens and at most the pages up to the end.
TEST(reserve_to_bounds_the_reserved_pages) {
    ManagerFixture m(ManagerFixture::config(2, 16));
    Request chunked = m.claim(count_up(1, 12));
    RequestView view = chunked.view();
    view.active = 4;
    view.reserve_to = 0;
    CHECK_EQ(m.manager.plan(view).new_pages, 2);
    CHECK_EQ(m.manager.reserve(view), ReserveStatus::kOk);
    CHECK_EQ(count(m.manager.pages_of(chunked.sequence)), 2);
    view.reserve_to = 7;
    CHECK_EQ(m.manager.reserve(view, 2), ReserveStatus::kOk);  // one more step adds a token
    CHECK_EQ(count(m.manager.pages_of(chunked.sequence)), 4);
    view.reserve_to = 1000;
    CHECK_EQ(m.manager.reserve(view), ReserveStatus::kOk);
    CHECK_EQ(count(m.manager.pages_of(chunked.sequence)), 6);
    m.manager.check_integrity();
}

}  // namespace

}  // namespace tests::cache::hits
