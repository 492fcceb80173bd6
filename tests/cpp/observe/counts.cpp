// SPDX-License-Identifier: Apache-2.0
// The counters: evicted pages by reason, and tokens by tenant. Pages have 2 tokens.
#include <vector>

#include "support/tier_scene.hpp"

namespace tests::observe::counts {

using kvcore::EvictionCounts;
using kvcore::Metrics;
using kvcore::TenantStats;
using kvcore::WritePolicy;

namespace {

void check(const EvictionCounts& counts, std::int64_t policy, std::int64_t reset) {
    CHECK_EQ(counts.policy, policy);
    CHECK_EQ(counts.window, 0);
    CHECK_EQ(counts.unreachable, 0);
    CHECK_EQ(counts.reset, reset);
}

TEST(both_tiers_make_room_and_are_reset) {
    TierScene m(tier_config(WritePolicy::kWriteThrough, 8, 6));
    m.serve(count_up(0, 8));
    m.serve(count_up(100, 8));
    check(m.manager.metrics().evicted, 0, 0);
    check(m.manager.metrics().host_evicted, 2, 0);  // 4 + 4 pages in a tier of 6
    m.crowd_out(3);
    check(m.manager.metrics().evicted, 3, 0);
    CHECK_EQ(m.manager.metrics().evicted_pages, 3);
    m.manager.reset_prefix_cache();
    check(m.manager.metrics().evicted, 3, 5);
    check(m.manager.metrics().host_evicted, 2, 6);
    CHECK_EQ(m.manager.metrics().evicted_pages, 3);
    m.manager.reset_metrics();
    check(m.manager.metrics().evicted, 0, 0);
    check(m.manager.metrics().host_evicted, 0, 0);
}

TEST(pages_given_up_once_they_are_stored_made_room) {
    TierScene m(tier_config(WritePolicy::kWriteBack, 6, 20));
    m.serve(count_up(0, 6));
    CHECK_EQ(m.crowd_out(5), 3);
    check(m.manager.metrics().evicted, 2, 0);
    CHECK_EQ(m.manager.metrics().evicted_pages, 2);
}

TEST(tokens_that_the_host_tier_had) {
    TierScene m(tier_config(WritePolicy::kWriteThrough, 6, 20));
    const Tokens prompt = count_up(0, 9);
    m.serve(prompt);
    m.crowd_out(4);  // evicts 2 of 4 pages
    CHECK_EQ(m.on_device(prompt), 2);
    m.manager.reset_metrics();
    m.serve(prompt);
    const Metrics found = m.manager.metrics();
    CHECK_EQ(found.cache_tokens, 8);
    CHECK_EQ(found.loaded_tokens, 4);
    CHECK_EQ(found.loaded_pages, 2);
    CHECK_EQ(found.input_tokens, 1);
}

TEST(a_load_that_failed_brought_nothing) {
    TierScene m(tier_config(WritePolicy::kWriteThrough, 6, 20));
    const Tokens prompt = count_up(0, 9);
    m.serve(prompt);
    m.crowd_out(6);
    m.manager.reset_metrics();
    Request request = m.claim(prompt);
    kvcore::Transfers loads;
    CHECK_EQ(m.try_reserve(request, loads), kvcore::ReserveStatus::kOk);
    CHECK(!loads.empty());
    m.finish(loads, false);
    CHECK_EQ(m.manager.metrics().loaded_tokens, 0);
    CHECK_EQ(m.manager.metrics().cache_tokens, 0);
}

TEST(a_longer_hit_moves_its_tokens_out_of_the_input) {
    TierScene m(tier_config(WritePolicy::kWriteThrough, 12, 4));
    Request early = m.begin(count_up(0, 6));
    Tokens longer = count_up(0, 6);
    longer.push_back(99);
    Request late = m.begin(longer);
    CHECK_EQ(m.manager.metrics().input_tokens, 13);
    CHECK_EQ(m.manager.metrics().cache_tokens, 0);
    m.finish(m.commit(early, 0));
    m.settle(late);
    CHECK_EQ(late.start, 6);
    CHECK_EQ(m.manager.metrics().input_tokens, 7);
    CHECK_EQ(m.manager.metrics().cache_tokens, 6);
}

std::vector<TenantStats> stats(const TierScene& m) { return m.manager.tenant_stats(0); }

void tell(TierScene& m, const Request& request, std::int32_t tenant) {
    kvcore::RequestPriority terms;
    terms.tenant = tenant;
    m.manager.set_priority(request.sequence, terms);
}

// The counts move with the request. Otherwise a later correction would change another tenant's
// counts.
TEST(tokens_of_a_request_that_changes_its_tenant) {
    kvcore::CacheConfig config = tier_config(WritePolicy::kWriteThrough, 12, 4);
    config.quotas.resize(2);
    TierScene m(config);
    m.serve(count_up(0, 8));  // counted for no tenant
    Request request = m.claim(count_up(0, 11));
    tell(m, request, 0);
    m.settle(request);
    CHECK_EQ(stats(m)[0].cache_tokens, 8);
    CHECK_EQ(stats(m)[0].input_tokens, 3);
    tell(m, request, 1);
    CHECK_EQ(stats(m)[0].cache_tokens, 0);
    CHECK_EQ(stats(m)[0].input_tokens, 0);
    CHECK_EQ(stats(m)[1].cache_tokens, 8);
    CHECK_EQ(stats(m)[1].input_tokens, 3);
    m.manager.begin_again(request.sequence);
    CHECK_EQ(stats(m)[1].cache_tokens, 0);
    CHECK_EQ(stats(m)[1].input_tokens, 0);
    m.manager.check_integrity();
    m.settle(request);
    m.manager.reset_metrics();
    tell(m, request, 0);  // counts from before the reset belong to no tenant
    CHECK_EQ(stats(m)[0].cache_tokens, 0);
    CHECK_EQ(stats(m)[1].input_tokens, 0);
    m.manager.check_integrity();
}

// The first tenant has no room for its cached pages, which a step of the second begins to hold.
TEST(swapped_pages_count_for_the_tenant_of_the_pages_they_replace) {
    kvcore::CacheConfig config = tier_config(WritePolicy::kWriteThrough, 12, 4);
    config.quotas = {{0, 4}, {0, 4}};
    TierScene m(config);
    const auto begin = [&](TokenId first, std::int32_t tenant) {
        Request request = m.claim(count_up(first, 8));
        tell(m, request, tenant);
        m.settle(request);
        return request;
    };
    Request first = begin(0, 0);
    Request second = begin(0, 1);
    m.finish(m.commit(first, 0));
    m.manager.release(first.sequence);
    begin(100, 0);
    CHECK_EQ(stats(m)[0].held_pages, 4);
    m.finish(m.commit(second, 0));
    CHECK_EQ(stats(m)[0].held_pages, 4);
    CHECK_EQ(stats(m)[1].held_pages, 4);
    m.manager.check_integrity();
}

}  // namespace

}  // namespace tests::observe::counts
