// SPDX-License-Identifier: Apache-2.0
// Which cached pages are stored in the host tier (selective stores, minimum priorities), and which
// pages the tier evicts first. Pages have 2 tokens.
#include <stdexcept>
#include <string>
#include <vector>

#include "support/tier_scene.hpp"

namespace tests::transfer::write_policies {

using kvcore::EvictionOrder;
using kvcore::Transfers;
using kvcore::WritePolicy;

namespace {

void require_refused(const kvcore::CacheConfig& config, const std::string& what) {
    try {
        const kvcore::CacheManager manager(config);
        CHECK(false);
    } catch (const std::invalid_argument& error) {
        CHECK(std::string(error.what()).find(what) != std::string::npos);
    }
}

TEST(impossible_rules_are_refused) {
    kvcore::CacheConfig given = tier_config(WritePolicy::kSelective, 4, 4);
    given.write_threshold = 0;
    require_refused(given, "write_threshold is 0, must be 1 .. 255");
    given.write_threshold = 256;
    require_refused(given, "write_threshold is 256, must be 1 .. 255");
    given = tier_config(WritePolicy::kWriteThrough, 4, 4);
    given.host_min_priority = 60;
    require_refused(given, "host_min_priority is 60, must be 0 unless");
    given.eviction.order = EvictionOrder::kPriority;
    given.host_min_priority = 101;
    require_refused(given, "host_min_priority is 101, must be 0 .. 100");
    given = tier_config(WritePolicy::kWriteThrough, 4, 4);
    given.host_eviction.order = EvictionOrder::kPriority;
    require_refused(given, "host_eviction is priority, must be another policy");
    CHECK_THROWS(std::invalid_argument, static_cast<void>(kvcore::write_policy("write_around")));
    CHECK_EQ(kvcore::write_policy("write_back"), WritePolicy::kWriteBack);
}

// ---- selective -------------------------------------------------------------------------------

TEST(selective_stores_what_was_used_often_enough) {
    kvcore::CacheConfig given = tier_config(WritePolicy::kSelective, 20, 20);
    given.write_threshold = 3;
    TierScene m(given);
    const Tokens prompt = count_up(0, 7);
    CHECK_EQ(m.serve(prompt), 0);
    CHECK_EQ(m.serve(prompt), 0);
    CHECK_EQ(m.serve(prompt), 3);
    CHECK_EQ(m.serve(prompt), 0);
    CHECK_EQ(m.stored(), 3);
}

// The commit after the hit stores only the part of the longer prompt that other requests used.
TEST(a_hit_stores_what_became_due_though_nothing_is_new) {
    TierScene m(tier_config(WritePolicy::kSelective, 20, 20));
    CHECK_EQ(m.serve(count_up(0, 10)), 0);
    Tokens shared = count_up(0, 6);
    shared.push_back(90);
    Request request = m.begin(shared);
    CHECK_EQ(request.start, 6);
    const Transfers stores = m.commit(request, 91);  // token 7 does not fill a page
    CHECK_EQ(count(stores.tier_moves), 3);
    m.finish(stores);
    CHECK_EQ(m.stored(), 3);
    // The request's own new pages have only one use.
    m.finish(m.reserve(request));
    CHECK(m.commit(request, 92).empty());
    CHECK_EQ(m.hit(count_up(0, 10)), 10);
}

// Equal pages from two requests count as used by both.
TEST(pages_that_are_brought_again_are_used_again) {
    for (const bool dedup : {true, false}) {
        kvcore::CacheConfig given = tier_config(WritePolicy::kSelective, 20, 20);
        given.dedup = dedup;
        TierScene m(given);
        Request first = m.begin(count_up(0, 5));
        Request second = m.begin(count_up(0, 5));
        CHECK(m.commit(first, 1).empty());
        const Transfers stores = m.commit(second, 2);
        CHECK_EQ(count(stores.tier_moves), 2);
        m.finish(stores);
    }
}

TEST(a_page_id_that_is_used_anew_is_used_for_the_first_time) {
    TierScene m(tier_config(WritePolicy::kSelective, 3, 20));
    CHECK_EQ(m.serve(count_up(0, 6)), 0);
    CHECK_EQ(m.serve(count_up(50, 6)), 0);
    CHECK_EQ(m.serve(count_up(0, 6)), 0);
    CHECK_EQ(m.stored(), 0);
}

// ---- stored pages and evicted pages -----------------------------------------------------------

TEST(pages_of_a_lower_priority_are_not_stored) {
    for (const WritePolicy policy : {WritePolicy::kWriteThrough, WritePolicy::kWriteBack}) {
        kvcore::CacheConfig given = tier_config(policy, 20, 40);
        given.eviction.order = EvictionOrder::kPriority;
        given.host_min_priority = 60;
        TierScene m(given);
        const auto serve = [&](const Tokens& tokens, std::int32_t priority, std::int64_t retained) {
            Request request = m.claim(tokens);
            kvcore::RequestPriority terms;
            terms.priority = priority;
            if (retained > 0) terms.ranges = {{0, retained, 90, kvcore::Retention::kForever}};
            m.manager.set_priority(request.sequence, terms);
            m.settle(request);
            const Transfers stores = m.commit(request, 0);
            m.finish(stores);
            m.manager.release(request.sequence);
            return count(stores.tier_moves);
        };
        const bool is_back = policy == WritePolicy::kWriteBack;
        CHECK_EQ(serve(count_up(0, 6), 50, 0), 0);
        CHECK_EQ(serve(count_up(20, 6), 60, 0), is_back ? 0 : 3);
        CHECK_EQ(serve(count_up(40, 6), 10, 4), is_back ? 0 : 2);
        m.crowd_out(20);
        CHECK_EQ(m.stored(), 5);
        CHECK_EQ(m.hit(count_up(0, 6)), 0);
        CHECK_EQ(m.hit(count_up(40, 6)), 4);
    }
}

// A request with a higher priority stores the pages that others left unstored, at its next step.
TEST(a_higher_priority_stores_what_was_not) {
    kvcore::CacheConfig given = tier_config(WritePolicy::kWriteThrough, 20, 40);
    given.eviction.order = EvictionOrder::kPriority;
    given.host_min_priority = 60;
    TierScene m(given);
    CHECK_EQ(m.serve(count_up(0, 6)), 0);
    Request request = m.claim(count_up(0, 7));
    kvcore::RequestPriority terms;
    terms.priority = 70;
    m.manager.set_priority(request.sequence, terms);
    m.settle(request);
    const Transfers stores = m.commit(request, 0);
    CHECK_EQ(count(stores.tier_moves), 3);
    m.finish(stores);
}

// Three prompts in a tier for two: LRU evicts the oldest, LFU the prompt that was not used again.
TEST(a_tier_has_a_policy_of_its_own) {
    for (const EvictionOrder order : {EvictionOrder::kLru, EvictionOrder::kLfu}) {
        kvcore::CacheConfig given = tier_config(WritePolicy::kWriteThrough, 3, 4);
        given.host_eviction.order = order;
        TierScene m(given);
        m.serve(count_up(0, 4));
        m.crowd_out(3);
        m.serve(count_up(0, 5));  // a load counts as a use
        m.serve(count_up(20, 4));
        m.serve(count_up(40, 4));
        m.crowd_out(3);
        const bool is_lru = order == EvictionOrder::kLru;
        CHECK_EQ(m.hit(count_up(0, 4)), is_lru ? 0 : 4);
        CHECK_EQ(m.hit(count_up(20, 4)), is_lru ? 4 : 0);
    }
}

// A record has the priorities of the device's runs, part by part.
TEST(a_tier_can_go_by_priority) {
    kvcore::CacheConfig given = tier_config(WritePolicy::kWriteThrough, 4, 4);
    given.eviction.order = given.host_eviction.order = EvictionOrder::kPriority;
    TierScene m(given);
    Request request = m.claim(count_up(0, 8));
    kvcore::RequestPriority terms;
    terms.priority = 10;
    terms.ranges = {{0, 4, 90, kvcore::Retention::kForever}};
    m.manager.set_priority(request.sequence, terms);
    m.settle(request);
    const Transfers stores = m.commit(request, 0);
    CHECK_EQ(count(stores.tier_moves), 4);
    m.finish(stores);
    m.manager.release(request.sequence);
    m.serve(count_up(20, 5));  // priority 50: evicts the pages of priority 10
    m.crowd_out(4);
    CHECK_EQ(m.hit(count_up(0, 6)), 4);
    CHECK_EQ(m.hit(count_up(20, 5)), 4);
}

}  // namespace

}  // namespace tests::transfer::write_policies
