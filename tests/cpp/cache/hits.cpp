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

TEST(a_hit_is_what_reserve_takes) {
    ManagerFixture m(ManagerFixture::config(2, 16));
    m.put(count_up(1, 8));
    Tokens tokens = count_up(1, 7);
    tokens.push_back(50);
    Request two = m.claim(tokens);
    RequestView view = two.view();
    const auto plan = m.manager.plan(view);
    PrefixHit hit = m.manager.match(view);
    CHECK_EQ(hit.num_tokens(), plan.hit_tokens);
    CHECK_EQ(hit.num_tokens(), 7);  // the last one copied
    CHECK_EQ(hit.num_pages(), 3);
    CHECK_EQ(view.start, 0);
    CHECK_EQ(m.manager.allocate(hit, view, 8), ReserveStatus::kOk);
    CHECK_EQ(view.start, 7);
    CHECK_EQ(count(m.manager.pages_of(two.sequence)), 4);
    CHECK_EQ(m.manager.metrics().cache_tokens, 7);
    CHECK_EQ(m.manager.take_copies().size(), 1);
    CHECK_EQ(hit.num_tokens(), 0);  // used up
    CHECK_THROWS(std::invalid_argument, static_cast<void>(m.manager.allocate(hit, view, 8)));
    m.manager.check_integrity();
}

// Held pages are nobody's to evict; dropped, they go in the order in which they went before.
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
    CHECK_EQ(m.manager.plan(asks.view()).hit_tokens, 0);  // still the oldest
    m.manager.check_integrity();
}

// It is not in its own way: what it holds is no longer there to evict, as with `reserve`.
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

TEST(a_hit_of_a_request_that_has_moved_is_refused) {
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

// A namespace whose pages go while a hit inside its first page is held.
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

// Its end is forgotten while it is held: what the hit reads of windows ends before the pin that
// keeps the run, which goes then.
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

TEST(a_hit_goes_on_in_the_host_tier) {
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

// Pages are held for what runs next at least, and for no more than the end.
TEST(reserve_to_says_how_far) {
    ManagerFixture m(ManagerFixture::config(2, 16));
    Request chunked = m.claim(count_up(1, 12));
    RequestView view = chunked.view();
    view.active = 4;
    view.reserve_to = 0;
    CHECK_EQ(m.manager.plan(view).new_pages, 2);
    CHECK_EQ(m.manager.reserve(view), ReserveStatus::kOk);
    CHECK_EQ(count(m.manager.pages_of(chunked.sequence)), 2);
    view.reserve_to = 7;
    CHECK_EQ(m.manager.reserve(view, 2), ReserveStatus::kOk);  // a step more adds a token
    CHECK_EQ(count(m.manager.pages_of(chunked.sequence)), 4);
    view.reserve_to = 1000;
    CHECK_EQ(m.manager.reserve(view), ReserveStatus::kOk);
    CHECK_EQ(count(m.manager.pages_of(chunked.sequence)), 6);
    m.manager.check_integrity();
}

}  // namespace

}  // namespace tests::cache::hits
