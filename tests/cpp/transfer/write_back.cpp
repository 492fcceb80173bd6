// SPDX-License-Identifier: Apache-2.0
// Write-back: a page is stored in the host tier before it is evicted. Pages have 2 tokens.
#include <stdexcept>
#include <vector>

#include "support/tier_scene.hpp"

namespace tests::transfer::write_back {

using kvcore::FetchStatus;
using kvcore::OwedStatus;
using kvcore::ReserveStatus;
using kvcore::Transfers;
using kvcore::WritePolicy;

namespace {

TEST(write_back_stores_what_is_about_to_go) {
    TierScene m(tier_config(WritePolicy::kWriteBack, 6, 20));
    const Tokens prompt = count_up(0, 6);
    CHECK_EQ(m.serve(prompt), 0);
    Request other = m.claim(count_up(50, 10));
    Transfers stores;
    CHECK_EQ(m.try_reserve(other, stores), ReserveStatus::kPending);
    CHECK_EQ(count(stores.tier_moves), 3);
    for (const kvcore::PageMove& move : stores.tier_moves) CHECK(!move.is_load());
    CHECK_EQ(m.stored(), 0);
    CHECK_EQ(m.on_device(prompt), 3);  // not evicted yet
    m.finish(stores);
    CHECK_EQ(m.stored(), 3);
    CHECK_EQ(m.try_reserve(other, stores), ReserveStatus::kOk);
    CHECK(stores.empty());
    CHECK_EQ(m.manager.metrics().evicted_pages, 2);
    CHECK_EQ(m.manager.metrics().stored_pages, 3);
    CHECK_EQ(m.hit(prompt), 6);
}

// While a hit is allocated, the pages after it in its run may be evicted and other pages may have
// to be stored first. The hit is still held when the stores end.
TEST(a_hit_is_held_while_others_are_stored) {
    TierScene m(tier_config(WritePolicy::kWriteBack, 8, 20));
    m.serve(count_up(0, 8));
    Request other = m.claim(count_up(50, 12));
    Transfers stores;
    CHECK_EQ(m.try_reserve(other, stores), ReserveStatus::kPending);
    m.finish(stores);  // all four pages are offered and stored
    m.manager.release(other.sequence);
    m.serve(count_up(100, 4));
    Request request = m.claim(count_up(0, 4) + count_up(200, 12));
    kvcore::RequestView view = request.view();
    kvcore::PrefixHit hit = m.manager.match(view);
    CHECK_EQ(hit.num_pages(), 2);
    stores.clear();
    CHECK_EQ(m.manager.allocate(hit, view, 16, &stores), ReserveStatus::kPending);
    CHECK_EQ(m.on_device(count_up(0, 8)), 2);  // the pages after the hit were evicted
    m.manager.check_integrity();
    CHECK_EQ(hit.num_pages(), 2);
    m.finish(stores);
    stores.clear();
    CHECK_EQ(m.manager.allocate(hit, view, 16, &stores), ReserveStatus::kOk);
    CHECK_EQ(view.start, 4);
    m.manager.check_integrity();
    m.manager.release(request.sequence);
}

// The prefix of a stored page is also stored, once. Pages that the tier already has are evicted at
// once.
TEST(prefixes_go_along) {
    TierScene m(tier_config(WritePolicy::kWriteBack, 8, 20));
    Tokens left = count_up(0, 4);
    Tokens right = left;
    for (TokenId token : {60, 61, 62, 63}) left.push_back(token);
    for (TokenId token : {70, 71, 72, 73}) right.push_back(token);
    m.serve(left);
    m.serve(right);
    CHECK_EQ(m.crowd_out(3), 4);  // 2 free; one page of `left` is evicted after its 3 prefix pages
    CHECK_EQ(m.stored(), 4);
    CHECK_EQ(m.crowd_out(4), 0);
    CHECK_EQ(m.crowd_out(8), 2);  // the rest of `right`
    CHECK_EQ(m.stored(), 6);
    CHECK_EQ(m.hit(left), 8);
    CHECK_EQ(m.hit(right), 8);
    CHECK_EQ(m.serve(left), 0);
    CHECK_EQ(m.crowd_out(8), 0);  // loaded from the tier
    CHECK_EQ(m.manager.metrics().stored_pages, 6);
}

TEST(what_the_tier_lost_is_stored_again_behind_a_use) {
    TierScene m(tier_config(WritePolicy::kWriteBack, 8, 4));
    const Tokens prompt = count_up(0, 8);
    m.serve(prompt);
    CHECK_EQ(m.crowd_out(5), 4);
    CHECK_EQ(m.on_device(prompt), 3);
    m.serve(count_up(50, 8));
    CHECK_EQ(m.crowd_out(8), 4);  // stores the other prompt in place of this one
    CHECK_EQ(m.hit(prompt), 0);
    m.serve(prompt);
    CHECK_EQ(m.crowd_out(8), 4);
    CHECK_EQ(m.hit(prompt), 8);
}

TEST(a_tier_without_room_takes_what_it_can) {
    TierScene m(tier_config(WritePolicy::kWriteBack, 6, 2));
    m.serve(count_up(0, 10));
    CHECK_EQ(m.crowd_out(6), 2);
    CHECK_EQ(m.on_device(count_up(0, 10)), 0);
    CHECK_EQ(m.hit(count_up(0, 10)), 4);
    // The whole record is being loaded: the tier evicts no page of it.
    Request loading = m.claim(count_up(0, 5));
    Transfers loads;
    CHECK_EQ(m.try_reserve(loading, loads), ReserveStatus::kOk);
    Request first = m.begin({80, 81, 82});
    static_cast<void>(m.commit(first, 83));
    m.manager.release(first.sequence);
    Request second = m.claim({90, 91, 92, 93, 94});
    Transfers none;
    CHECK_EQ(m.try_reserve(second, none), ReserveStatus::kOk);
    CHECK(none.empty());
    m.finish(loads);
}

TEST(a_store_that_fails_does_not_keep_the_page) {
    TierScene m(tier_config(WritePolicy::kWriteBack, 6, 20));
    m.serve(count_up(0, 10));
    CHECK_EQ(m.crowd_out(6, false), 5);
    CHECK_EQ(m.stored(), 0);
    CHECK_EQ(m.hit(count_up(0, 10)), 0);
    CHECK_EQ(m.manager.stats(0).free_pages, 6);
    CHECK_EQ(m.manager.metrics().stored_pages, 0);
}

// Pages that a store holds are not lost: a call that needs them waits.
TEST(others_wait_for_the_pages_of_a_store) {
    TierScene m(tier_config(WritePolicy::kWriteBack, 6, 20));
    m.serve(count_up(0, 12));
    Request first = m.claim(count_up(50, 4));
    Request second = m.claim(count_up(60, 4));
    Request third = m.claim(count_up(70, 14));
    Transfers stores;
    Transfers none;
    CHECK_EQ(m.try_reserve(first, stores), ReserveStatus::kPending);
    CHECK_EQ(count(stores.tier_moves), 6);
    CHECK_EQ(m.try_reserve(second, none), ReserveStatus::kPending);
    CHECK(none.empty());
    CHECK_EQ(m.manager.take_owed(second.sequence, none), OwedStatus::kUnderWay);
    CHECK_THROWS(std::logic_error, m.manager.wait(second.sequence));
    CHECK_THROWS(kvcore::CapacityError, static_cast<void>(m.try_reserve(third, none)));
    std::vector<std::uint32_t> cells(12);
    std::vector<std::uint32_t> lengths(2);
    kvcore::LookupTable table(cells.data(), 2, 6, 99);
    kvcore::FetchTarget target{&table, lengths.data()};
    std::vector<kvcore::RequestView> views{first.view(), second.view()};
    const kvcore::FetchResult both = m.manager.fetch({views.data(), 2}, 1, &target, &none);
    CHECK_EQ(both.status, FetchStatus::kPending);
    CHECK(none.empty());
    m.finish(stores);
    m.manager.wait(second.sequence);
    CHECK_EQ(m.manager.take_owed(second.sequence, none), OwedStatus::kNone);
    CHECK_EQ(m.try_reserve(second, none), ReserveStatus::kOk);
    CHECK_EQ(m.try_reserve(first, none), ReserveStatus::kOk);
    CHECK(none.empty());
}

// A batch gets its pages as a whole, including rows that only grow.
TEST(a_batch_waits_once) {
    TierScene m(tier_config(WritePolicy::kWriteBack, 8, 20));
    Request growing = m.begin({40, 41});
    CHECK(m.commit(growing, 42).empty());
    m.serve(count_up(0, 8));
    m.serve(count_up(20, 4));
    Request joining = m.claim(count_up(60, 6));
    std::vector<std::uint32_t> cells(32);
    std::vector<std::uint32_t> lengths(2);
    kvcore::LookupTable table(cells.data(), 2, 8, 99);
    kvcore::FetchTarget target{&table, lengths.data()};
    std::vector<kvcore::RequestView> views{growing.view(), joining.view()};
    Transfers stores;
    kvcore::FetchResult result = m.manager.fetch({views.data(), 2}, 1, &target, &stores);
    CHECK_EQ(result.status, FetchStatus::kPending);
    CHECK(!stores.empty());
    m.finish(stores);
    stores.clear();
    result = m.manager.fetch({views.data(), 2}, 1, &target, &stores);
    CHECK_EQ(result.status, FetchStatus::kOk);
    CHECK(stores.empty());
    CHECK_EQ(m.hit(count_up(0, 8)), 8);
}

TEST(a_reset_ends_what_is_stored_on_its_way_out) {
    for (const bool done : {true, false}) {
        TierScene m(tier_config(WritePolicy::kWriteBack, 6, 20));
        m.serve(count_up(0, 12));
        Request other = m.claim(count_up(50, 12));
        Transfers stores;
        CHECK_EQ(m.try_reserve(other, stores), ReserveStatus::kPending);
        m.manager.reset_prefix_cache();
        m.manager.check_integrity();
        CHECK_EQ(m.manager.stats(0).free_pages, 0);  // free after the copies
        m.manager.release(other.sequence);
        m.finish(stores, done);
        CHECK_EQ(m.manager.stats(0).free_pages, 6);
        CHECK_EQ(m.stored(), 0);
    }
}

// A page that was about to be evicted is used again: it stays while the pool has other pages.
TEST(a_hit_keeps_what_was_about_to_go) {
    TierScene m(tier_config(WritePolicy::kWriteBack, 6, 20));
    m.serve(count_up(0, 4));
    m.serve(count_up(20, 8));
    Request other = m.claim(count_up(50, 2));
    Transfers stores;
    CHECK_EQ(m.try_reserve(other, stores), ReserveStatus::kPending);
    CHECK_EQ(count(stores.tier_moves), 2);
    Request again = m.claim(count_up(0, 5));
    m.finish(stores);
    CHECK_EQ(m.settle(again), 4);  // evicts a page of the second prompt for its last token
    CHECK_EQ(again.start, 4);
    CHECK_EQ(m.settle(other), 0);
    CHECK_EQ(m.on_device(count_up(0, 4)), 2);
    CHECK_EQ(m.stored(), 6);
}

// Stored pages are evicted in their order.
TEST(what_is_stored_keeps_its_place) {
    TierScene m(tier_config(WritePolicy::kWriteBack, 6, 20));
    for (const TokenId first : {0, 20, 40}) m.serve(count_up(first, 4));
    Request other = m.claim(count_up(60, 10));
    Transfers stores;
    CHECK_EQ(m.try_reserve(other, stores), ReserveStatus::kPending);
    CHECK_EQ(count(stores.tier_moves), 6);
    m.finish(stores);
    CHECK_EQ(m.crowd_out(1), 0);
    CHECK_EQ(m.on_device(count_up(0, 4)), 1);
    CHECK_EQ(m.crowd_out(3), 0);
    CHECK_EQ(m.on_device(count_up(0, 4)), 0);
    CHECK_EQ(m.on_device(count_up(20, 4)), 1);
    CHECK_EQ(m.on_device(count_up(40, 4)), 2);
}

TEST(begin_at_stores_too) {
    for (const bool transfers : {true, false}) {
        TierScene m(tier_config(WritePolicy::kWriteBack, 6, 20));
        m.serve(count_up(0, 10));
        Request brought = m.claim(count_up(50, 7));
        kvcore::RequestView view = brought.view();
        Transfers stores;
        if (transfers) {
            CHECK_EQ(m.manager.begin_at(view, 6, &stores), ReserveStatus::kPending);
            CHECK_EQ(count(stores.tier_moves), 5);
            m.finish(stores);
            stores.clear();
            CHECK_EQ(m.manager.begin_at(view, 6, &stores), ReserveStatus::kOk);
            CHECK(stores.empty());
        } else {
            CHECK_EQ(m.manager.begin_at(view, 6), ReserveStatus::kOk);
        }
        CHECK_EQ(view.start, 6);
        CHECK_EQ(m.hit(count_up(0, 10)), transfers ? 10 : 4);
    }
}

// The source page of a partial hit is not evicted to make room for the hit.
TEST(the_source_of_a_partial_hit_stays) {
    TierScene m(tier_config(WritePolicy::kWriteBack, 6, 20));
    m.serve(count_up(0, 4));
    m.serve(count_up(20, 8));
    Tokens tokens = count_up(0, 3);
    for (TokenId token : {90, 91, 92}) tokens.push_back(token);
    Request request = m.claim(tokens);
    Transfers transfers;
    CHECK_EQ(m.try_reserve(request, transfers), ReserveStatus::kPending);
    CHECK_EQ(count(transfers.tier_moves), 4);
    m.finish(transfers);
    CHECK_EQ(m.try_reserve(request, transfers), ReserveStatus::kOk);
    CHECK_EQ(request.start, 3);
    CHECK_EQ(count(transfers.copies), 1);
    m.finish(transfers);
}

// A store holds a page for a moment, if the quotas allow it. Otherwise the page is evicted
// unstored.
TEST(quotas_come_first) {
    kvcore::CacheConfig given = tier_config(WritePolicy::kWriteBack, 8, 20);
    given.quotas = {{0, 3}, {5, 8}};
    TierScene m(given);
    const auto claim_for = [&](const Tokens& tokens, std::int32_t tenant) {
        Request request = m.claim(tokens);
        kvcore::RequestPriority terms;
        terms.tenant = tenant;
        m.manager.set_priority(request.sequence, terms);
        return request;
    };
    const auto serve_for = [&](const Tokens& tokens, std::int32_t tenant) {
        Request request = claim_for(tokens, tenant);
        m.settle(request);
        m.finish(m.commit(request, 0));
        m.manager.release(request.sequence);
    };
    serve_for(count_up(0, 4), 0);
    serve_for(count_up(20, 4), 0);
    serve_for(count_up(40, 4), 0);
    Request holding = claim_for(count_up(60, 4), 0);
    m.settle(holding);
    Request large = claim_for(count_up(80, 10), 1);
    m.settle(large);
    CHECK_EQ(m.manager.pages_of(large.sequence).size(), 5);
}

// ---- groups and states -----------------------------------------------------------------------

// Evicting a window's page also stores all pages of its prefix.
TEST(windows_and_full_pages_come_back) {
    kvcore::CacheConfig given = tier_config(WritePolicy::kWriteBack, 16, 40);
    given.groups = {{kvcore::GroupKind::kFull, 0, 1, 0}, {kvcore::GroupKind::kSliding, 4, 1, 0}};
    TierScene m(given);
    const Tokens prompt = count_up(0, 8);
    CHECK_EQ(m.serve(prompt), 0);
    CHECK(m.crowd_out(8) > 0);
    CHECK_EQ(m.on_device(prompt), 0);
    CHECK_EQ(m.hit(prompt), 8);
    Request again = m.claim(count_up(0, 9));
    Transfers loads;
    ReserveStatus status = ReserveStatus::kPending;
    while (status == ReserveStatus::kPending) {
        status = m.try_reserve(again, loads);
        m.finish(loads);
    }
    CHECK_EQ(again.start, 8);
    const std::vector<kvcore::GroupStats> groups = m.manager.group_stats(0);
    CHECK_EQ(groups[0].loaded_pages, 4);
    CHECK_EQ(groups[1].loaded_pages, 2);
}

// The policy decides on other pages: the pages before a checkpoint are stored with the checkpoint.
TEST(a_checkpoint_takes_its_pages_along) {
    for (const WritePolicy policy : {WritePolicy::kWriteBack, WritePolicy::kSelective}) {
        kvcore::CacheConfig given = tier_config(policy, 12, 40);
        given.max_sequences = 3;
        given.states = {{0}};
        given.num_state_slots = 3;
        given.num_host_state_slots = 4;
        TierScene m(given);
        Request request = m.begin(count_up(0, 9));
        CHECK_EQ(request.active, 8);
        request.start = 8;
        request.active = 9;
        const Transfers stores = m.commit_batch({&request});
        CHECK_EQ(count(stores.tier_moves), 4);
        CHECK_EQ(count(stores.state_moves), 1);
        m.finish(stores);
        m.manager.release(request.sequence);
        CHECK_EQ(m.manager.state_stats(0).host_checkpoints, 1);
        CHECK_EQ(m.crowd_out(12), 0);
        CHECK_EQ(m.hit(count_up(0, 9)), 8);
    }
}

}  // namespace

}  // namespace tests::transfer::write_back
