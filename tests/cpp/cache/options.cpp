// SPDX-License-Identifier: Apache-2.0
// Options of a reservation: max_hit, keep_free and must_fit.
#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "support/check.hpp"
#include "support/group_scene.hpp"
#include "support/host_fixture.hpp"
#include "support/layer_groups.hpp"
#include "support/manager_fixture.hpp"

namespace tests::cache::options {

using kvcore::ReserveOptions;
using kvcore::ReservePlan;
using kvcore::ReserveStatus;

namespace {

// Reserves the request and checks the plan: a new claim takes exactly the planned pages from the
// pool.
ReserveStatus reserve(kvcore::CacheManager& manager, Request& request,
                      const ReserveOptions& options, kvcore::Transfers* transfers = nullptr) {
    kvcore::RequestView view = request.view();
    const kvcore::PoolStats before = manager.stats(0);
    const std::int64_t evicted = manager.metrics().evicted_pages;
    const ReservePlan plan = manager.plan(view, 1, options);
    const ReservePlan stranger = manager.plan(0, view, 1, options);
    const bool is_new = manager.pages_of(request.sequence).empty();
    const ReserveStatus status = manager.reserve(view, 1, transfers, options);
    if (transfers != nullptr && !transfers->empty()) manager.finish(transfers->ticket);
    const std::int64_t left = manager.stats(0).available_pages();
    CHECK_EQ(status == ReserveStatus::kOk, plan.fits);
    if (is_new) {
        CHECK_EQ(stranger.fits, plan.fits);
        CHECK_EQ(stranger.new_pages, plan.new_pages);
        CHECK_EQ(stranger.hit_tokens, plan.hit_tokens);
        CHECK_EQ(stranger.evictable_hit_pages, plan.evictable_hit_pages);
    }
    if (!plan.fits) {
        CHECK_EQ(left, before.available_pages());
        CHECK_EQ(manager.metrics().evicted_pages, evicted);
    } else if (is_new) {
        CHECK_EQ(left, before.available_pages() - plan.new_pages - plan.evictable_hit_pages);
        CHECK(left >= options.keep_free);
    }
    request.start = view.start;
    request.active = view.active;
    manager.check_integrity();
    return status;
}

ReserveOptions hit_of(std::int64_t tokens) { return {tokens, 0, 0}; }

TEST(max_hit_bounds_the_hit) {
    ManagerFixture m(ManagerFixture::config(4, 32));
    m.put(count_up(1, 20));
    for (std::int64_t most = 0; most < 24; ++most) {
        Request request = m.claim(count_up(1, 19));
        CHECK_EQ(reserve(m.manager, request, hit_of(most)), ReserveStatus::kOk);
        CHECK_EQ(request.start, std::min<std::int64_t>(most, 18));
        m.manager.release(request.sequence);
    }
    kvcore::CacheConfig whole_pages = ManagerFixture::config(4, 32);
    whole_pages.partial_page_reuse = 0;
    ManagerFixture w(whole_pages);
    w.put(count_up(1, 20));
    for (std::int64_t most = 0; most < 24; ++most) {
        Request request = w.claim(count_up(1, 19));
        CHECK_EQ(reserve(w.manager, request, hit_of(most)), ReserveStatus::kOk);
        CHECK_EQ(request.start, std::min<std::int64_t>(most, 18) / 4 * 4);
        w.manager.release(request.sequence);
    }
}

// A claim keeps a longer hit that it already has. Without the bound, the next call takes the whole
// hit.
TEST(a_bound_is_valid_for_one_call) {
    ManagerFixture m(ManagerFixture::config(4, 32));
    m.put(count_up(1, 20));
    Request request = m.claim(count_up(1, 19));
    CHECK_EQ(reserve(m.manager, request, hit_of(8)), ReserveStatus::kOk);
    CHECK_EQ(reserve(m.manager, request, hit_of(4)), ReserveStatus::kOk);
    CHECK_EQ(request.start, 8);
    CHECK(m.reserve(request));
    CHECK_EQ(request.start, 18);
}

TEST(keep_free_leaves_pages_free) {
    ManagerFixture m(ManagerFixture::config(4, 8));
    m.put(count_up(1, 16));  // evictable pages count as free
    Request request = m.claim(count_up(1, 18));
    for (std::int64_t kept = 8; kept > 3; --kept) {
        CHECK_EQ(reserve(m.manager, request, {16, kept, 0}), ReserveStatus::kNoSpace);
    }
    CHECK_EQ(m.match(count_up(1, 16)), 4);
    CHECK_EQ(reserve(m.manager, request, {16, 3, 0}), ReserveStatus::kOk);
    CHECK_EQ(m.available(), 3);
    // The request needs no more pages, but keep_free is checked all the same.
    CHECK_EQ(m.fetch({&request}).status, kvcore::FetchStatus::kOk);
    CHECK_EQ(reserve(m.manager, request, {16, 3, 0}), ReserveStatus::kOk);
    CHECK_EQ(reserve(m.manager, request, {16, 4, 0}), ReserveStatus::kNoSpace);
    CHECK(m.reserve(request));
}

// The source page of a copy is free again after the copy.
TEST(sources_of_copies_are_free_afterwards) {
    ManagerFixture m(ManagerFixture::config(4, 3));
    m.put(count_up(1, 4));
    Request request = m.claim({1, 2, 9, 9, 9});
    CHECK_EQ(reserve(m.manager, request, {100, 2, 0}), ReserveStatus::kNoSpace);
    CHECK_EQ(reserve(m.manager, request, {100, 1, 0}), ReserveStatus::kOk);
    CHECK_EQ(request.start, 2);
    CHECK_EQ(m.match(count_up(1, 4)), 1);
}

TEST(a_prompt_starts_only_if_all_of_it_fits) {
    kvcore::CacheConfig config = ManagerFixture::config(4, 10);
    config.reserve_chunks = true;
    ManagerFixture m(config);
    m.put(count_up(1, 8));
    Request request = m.claim(count_up(1, 40));
    request.active = 12;
    CHECK_EQ(reserve(m.manager, request, {8, 1, 40}), ReserveStatus::kNoSpace);
    CHECK_EQ(reserve(m.manager, request, {8, 0, 40}), ReserveStatus::kOk);
    CHECK_EQ(request.start, 8);
    CHECK_EQ(m.pages(request).size(), 3);
    CHECK_EQ(m.manager.pages_of(request.sequence, 0, 2).size(), 1);
    CHECK_EQ(m.available(), 7);
    Request other = m.claim({7});
    CHECK_EQ(reserve(m.manager, other, {0, 7, 0}), ReserveStatus::kNoSpace);
    CHECK_EQ(reserve(m.manager, other, {0, 6, 0}), ReserveStatus::kOk);
    CHECK_EQ(reserve(m.manager, request, {8, 0, 40}), ReserveStatus::kNoSpace);
    CHECK_EQ(reserve(m.manager, request, {8, 0, 36}), ReserveStatus::kOk);
    CHECK_EQ(m.pages(request).size(), 3);
}

TEST(an_impossible_option_is_an_error) {
    ManagerFixture m(ManagerFixture::config(4, 10));
    Request request = m.claim(count_up(1, 5));
    kvcore::RequestView view = request.view();
    const auto ask = [&](const ReserveOptions& options) {
        static_cast<void>(m.manager.reserve(view, 1, nullptr, options));
    };
    const Trace before = m.trace({&request});
    CHECK_THROWS(std::invalid_argument, ask({-1, 0, 0}));
    CHECK_THROWS(std::invalid_argument, ask({0, -1, 0}));
    CHECK_THROWS(std::invalid_argument, ask({0, 0, -1}));
    CHECK_THROWS(kvcore::CapacityError, ask({0, 0, 41}));
    CHECK(m.trace({&request}) == before);
    CHECK(!m.manager.plan(view, 1, {0, 0, 41}).fits);
    CHECK(!m.manager.plan(0, view, 1, {0, 0, 41}).fits);
    CHECK_EQ(reserve(m.manager, request, {0, 0, 40}), ReserveStatus::kOk);
}

// With every bound, the hit has a length that all groups can serve.
TEST(hits_of_groups_are_legal) {
    for (const bool by_chunk : {false, true}) {
        for (std::int64_t most = 0; most < 40; ++most) {
            kvcore::CacheConfig config = GroupScene::config(4, 64, {full(), sliding(6)});
            config.reserve_chunks = by_chunk;
            GroupScene scene(config);
            Request first = scene.claim(count_up(0, 37));
            CHECK_EQ(scene.reserve(first), ReserveStatus::kOk);
            scene.complete(first);
            scene.manager.release(first.sequence);
            Request request = scene.claim(count_up(0, 36));
            CHECK_EQ(reserve(scene.manager, request, hit_of(most)), ReserveStatus::kOk);
            CHECK(request.start <= most);
            scene.complete(request);
        }
    }
}

// must_fit covers every later chunk, and few pages more.
TEST(what_must_fit_is_enough_for_windows) {
    for (std::int64_t pages = 1; pages < 24; ++pages) {
        for (const std::int64_t chunk : {1, 3, 4, 9}) {
            kvcore::CacheConfig config = GroupScene::config(4, pages, {full(), sliding(6)});
            config.reserve_chunks = true;
            GroupScene scene(config);
            Request request = scene.claim(count_up(0, 30));
            request.active = chunk;
            kvcore::RequestView view = request.view();
            if (!scene.manager.plan(view).fits) continue;
            const bool fits = scene.manager.plan(view, 1, {0, 0, 30}).fits;
            const std::int64_t most = 8 + (5 + chunk + 6) / 4;
            CHECK_EQ(fits, pages >= most);
            if (!fits) continue;
            while (request.start < 30) {
                request.active = std::min<std::int64_t>(30, request.start + chunk);
                CHECK_EQ(scene.reserve(request), ReserveStatus::kOk);
                CHECK(scene.run({&request}));
                scene.step({&request}, 5);
            }
        }
    }
}

TEST(max_hit_also_bounds_hits_of_the_host_tier) {
    for (std::int64_t most = 0; most < 14; ++most) {
        HostFixture m(HostFixture::config(8, 16));
        Request first = m.claim(count_up(1, 13));
        kvcore::Transfers transfers;
        CHECK_EQ(reserve(m.manager, first, {}, &transfers), ReserveStatus::kOk);
        const kvcore::Transfers stores = m.commit(first, 0);
        m.finish(stores);
        m.manager.release(first.sequence);
        Request other = m.claim(count_up(100, 12));
        transfers.clear();
        CHECK_EQ(reserve(m.manager, other, {}, &transfers), ReserveStatus::kOk);
        m.manager.release(other.sequence);
        Request request = m.claim(count_up(1, 13));
        transfers.clear();
        CHECK_EQ(reserve(m.manager, request, {most, 1, 0}, &transfers), ReserveStatus::kOk);
        CHECK(request.start <= most);
        CHECK(request.start >= std::min<std::int64_t>(most, 12) / 2 * 2);
        CHECK_EQ(m.manager.stats(0).available_pages(), 1);
    }
}

TEST(tokens_after_the_last_whole_page_are_counted) {
    ManagerFixture m(ManagerFixture::config(4, 16));
    m.put(count_up(1, 8));
    const Tokens tokens = {1, 2, 3, 4, 5, 6, 9, 9};
    Ids ids;
    std::int32_t partial = -1;
    CHECK_EQ(m.manager.match(0, "", tokens.data(), 8, &ids, &partial), 1);
    CHECK_EQ(partial, 2);
    CHECK_EQ(m.manager.match(0, "unknown", tokens.data(), 8, nullptr, &partial), 0);
    CHECK_EQ(partial, 0);
    const Trace before = m.trace({});
    CHECK_EQ(m.manager.touch(0, "", tokens.data(), 8, &ids, &partial, 0), 1);  // too many pages
    CHECK(m.trace({}) == before);
    CHECK_EQ(m.manager.touch(0, "", tokens.data(), 8, &ids, &partial, 1), 1);
    CHECK_EQ(ids.size(), 1);
}

TEST(plans_need_no_claim) {
    kvcore::CacheConfig config = ManagerFixture::config(4, 8);
    config.max_sequences = 1;
    config.quotas = {{0, 2}};
    ManagerFixture m(config);
    Request request("", count_up(1, 12));
    CHECK(m.manager.plan(0, request.view()).fits);
    CHECK(!m.manager.plan(0, request.view(), 1, {}, 0).fits);  // the tenant may hold only two pages
    const Request claimed = m.claim({1});
    CHECK(m.manager.plan(0, request.view()).fits);
    static_cast<void>(claimed);
    CHECK_THROWS(std::out_of_range, m.manager.plan(1, request.view()));
    CHECK_THROWS(std::invalid_argument, m.manager.plan(0, request.view(), 1, {}, 1));
}

// With a short hit, a tenant shares fewer pages of other tenants, and its quota must fit the rest.
TEST(a_bounded_hit_shares_less_with_other_tenants) {
    kvcore::CacheConfig config = ManagerFixture::config(4, 16);
    config.quotas = {{0, 2}, {4, 16}};
    ManagerFixture m(config);
    kvcore::RequestPriority terms;
    terms.tenant = 1;
    Request other = m.claim(count_up(1, 13));
    m.manager.set_priority(other.sequence, terms);
    m.run(other, 0);
    terms.tenant = 0;
    ReserveOptions options;
    options.must_fit = 16;
    for (const std::int64_t most : {0, 4, 7, 8, 20}) {
        Request request = m.claim(count_up(1, 16));
        m.manager.set_priority(request.sequence, terms);
        options.max_hit = most;
        request.active = 4;  // in chunks of 4 tokens
        kvcore::RequestView view = request.view();
        const bool fits = most >= 8;
        CHECK_EQ(m.manager.plan(0, view, 1, options, 0).fits, fits);
        CHECK_EQ(m.manager.plan(view, 1, options).fits, fits);
        if (!fits)
            CHECK_THROWS(kvcore::CapacityError, m.manager.reserve(view, 1, nullptr, options));
        m.manager.release(request.sequence);
    }
}

}  // namespace

}  // namespace tests::cache::options
