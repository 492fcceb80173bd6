// SPDX-License-Identifier: Apache-2.0
// Partial pages and their copies, batches, pins, namespaces and replicas.
#include <set>

#include "kvcore/extra_keys.hpp"
#include "support/manager_fixture.hpp"

namespace tests::cache::sharing {

using kvcore::FetchResult;
using kvcore::FetchStatus;
using kvcore::namespace_name;
using kvcore::PageMove;
using kvcore::PinHandle;
using kvcore::ReserveStatus;

namespace {

// ---- partial pages ---------------------------------------------------------------------------

TEST(the_best_partial_page_is_copied) {
    ManagerFixture m(ManagerFixture::config(4, 20));
    m.put({1, 2, 3, 4, 5, 6, 7, 8});
    m.put({1, 2, 3, 4, 5, 6, 9, 9});
    Ids cached;
    CHECK_EQ(m.match({1, 2, 3, 4, 5, 6, 9, 9}, 0, "", &cached), 2);
    Request request = m.claim({1, 2, 3, 4, 5, 6, 9, 1, 1});
    CHECK(m.reserve(request));
    CHECK_EQ(request.start, 7);
    m.check_metrics(8 + 2 + 2, 6 + 7, 2 + 3, 0);
    const std::vector<PageMove> owed = m.manager.take_copies();
    CHECK_EQ(owed.size(), 1);
    CHECK_EQ(owed[0].replica, 0);
    CHECK_EQ(owed[0].source, cached[1]);
    CHECK_EQ(owed[0].destination, m.pages(request)[1]);
    CHECK_EQ(owed[0].num_tokens, 3);
    CHECK(owed[0].sequence == request.sequence);
    CHECK(m.manager.take_copies().empty());
}

TEST(partial_pages_can_be_switched_off) {
    kvcore::CacheConfig config = ManagerFixture::config(4, 20);
    config.partial_page_reuse = 0;
    ManagerFixture m(config);
    m.put({1, 2, 3, 4, 5, 6, 7, 8});
    Request request = m.claim({1, 2, 3, 4, 5, 6, 9, 1, 1});
    CHECK(m.reserve(request));
    CHECK_EQ(request.start, 4);
    CHECK(m.manager.take_copies().empty());
}

// The source of the partial hit is the only evictable page. It is evicted, so the partial hit is
// dropped.
TEST(a_partial_hit_is_dropped_if_its_source_is_evicted) {
    ManagerFixture m(ManagerFixture::config(2, 2));
    m.put({1, 2});
    Request request = m.claim({1, 3, 3, 3});
    CHECK_EQ(m.manager.plan(request.view()).copied_tokens, 0);
    CHECK_EQ(m.manager.plan(request.view()).evicted_pages, 1);
    CHECK(m.reserve(request));
    CHECK_EQ(request.start, 0);
    CHECK(m.manager.take_copies().empty());
}

TEST(copies_at_once_hold_their_source) {
    ManagerFixture m(ManagerFixture::config(2, 4));
    m.put({1, 2});
    Request request = m.claim({1, 3});
    CHECK(m.reserve_copying(request));
    CHECK_EQ(request.start, 1);
    CHECK_EQ(m.transfers.copies.size(), 1);
    CHECK_EQ(m.available(), 2);  // the copy and its source are not available
    CHECK(m.manager.take_copies().empty());
    m.manager.release(request.sequence);
    CHECK_EQ(m.available(), 2);
    m.finish();
    CHECK_EQ(m.available(), 4);
}

// Sources of copies in a batch are not evicted for later requests of the batch: these wait.
TEST(a_batch_stops_if_only_sources_of_copies_are_evictable) {
    ManagerFixture m(ManagerFixture::config(2, 4));
    m.put({1, 2});
    m.put({3, 4});
    Request copying = m.claim({1, 3});
    Request plain = m.claim({7});
    Request last = m.claim({8});
    std::vector<kvcore::RequestView> views{copying.view(), plain.view(), last.view()};
    kvcore::Transfers transfers;
    const kvcore::BatchReserve part = m.manager.reserve_batch({views.data(), 3}, 1, &transfers);
    CHECK_EQ(part.reserved, 2);
    CHECK_EQ(part.status, ReserveStatus::kPending);
    CHECK_EQ(transfers.copies.size(), 1);
    CHECK(m.pages(last).empty());
    m.manager.finish(transfers.ticket);
    transfers.clear();
    const kvcore::BatchReserve rest = m.manager.reserve_batch({&views[2], 1}, 1, &transfers);
    CHECK_EQ(rest.reserved, 1);
    CHECK_EQ(rest.status, ReserveStatus::kOk);
    CHECK(transfers.empty());
}

// Copies of released requests are dropped, even if the caller never takes them.
TEST(copies_of_released_requests_are_not_owed) {
    ManagerFixture m(ManagerFixture::config(2, 40));
    m.put({1, 2});
    Request stays = m.claim({1, 3});
    CHECK(m.reserve(stays));
    for (int i = 0; i < 500; ++i) {
        Request goes = m.claim({1, 4});
        CHECK(m.reserve(goes));
        m.manager.release(goes.sequence);
    }
    const std::vector<PageMove> owed = m.manager.take_copies();
    CHECK_EQ(owed.size(), 1);
    CHECK(owed[0].sequence == stays.sequence);
}

// ---- batches ---------------------------------------------------------------------------------

TEST(a_batch_is_reserved_up_to_the_first_request_that_does_not_fit) {
    ManagerFixture m(ManagerFixture::config(1, 6));
    Request a = m.claim(count_up(0, 3));
    Request b = m.claim(count_up(10, 4));
    Request c = m.claim({99});
    std::vector<kvcore::RequestView> views{a.view(), b.view(), c.view()};
    const kvcore::BatchReserve part = m.manager.reserve_batch({views.data(), 3});
    CHECK_EQ(part.reserved, 1);
    CHECK_EQ(part.status, ReserveStatus::kNoSpace);
    CHECK_EQ(m.pages(a).size(), 3);
    CHECK(m.pages(b).empty() && m.pages(c).empty());
}

TEST(a_fetch_is_all_or_nothing) {
    ManagerFixture m(ManagerFixture::config(1, 8));
    m.put({1, 2, 3});
    Request a = m.claim({1, 2, 3, 4});
    Request b = m.claim(count_up(10, 6));
    const Trace before = m.trace({&a, &b});
    const FetchResult refused = m.fetch({&a, &b});
    CHECK_EQ(refused.status, FetchStatus::kNoSpace);
    CHECK_EQ(refused.row, 1);
    CHECK_EQ(refused.needed, 6);
    CHECK_EQ(refused.available, 4);
    CHECK(m.trace({&a, &b}) == before);
    Request c = m.claim(count_up(10, 4));
    CHECK_EQ(m.fetch({&a, &c}).status, FetchStatus::kOk);
    CHECK_EQ(a.start, 3);
    CHECK_EQ(m.free(), 0);
}

// One request evicts the rest of a run after another request's hit.
TEST(a_fetch_evicts_pages_after_the_hits_of_its_requests) {
    ManagerFixture m(ManagerFixture::config(1, 9));
    m.put(count_up(1, 6));
    m.put({20});
    Request large = m.claim(count_up(100, 6));
    Request hit = m.claim({1, 2, 9});
    Ids cached;
    CHECK_EQ(m.match({1, 2}, 0, "", &cached), 2);
    CHECK_EQ(m.fetch({&large, &hit}).status, FetchStatus::kOk);
    CHECK_EQ(hit.start, 2);
    Ids row = m.pages(hit);
    CHECK_EQ(row.size(), 3);
    row.resize(2);
    CHECK_EQ(row, cached);
    CHECK_EQ(m.match(count_up(1, 6)), 2);
    CHECK_EQ(m.match({20}), 0);
    const Ids others = m.pages(large);
    std::set<BlockId> all(others.begin(), others.end());
    for (const BlockId page : m.pages(hit)) all.insert(page);
    CHECK_EQ(all.size(), 9);
}

TEST(a_fetch_returns_the_table_size_that_it_needs) {
    ManagerFixture m(ManagerFixture::config(2, 20));
    Request a = m.claim(count_up(1, 5));
    Request b = m.claim(count_up(20, 3));
    std::vector<std::uint32_t> memory(4, 7);
    std::vector<std::uint32_t> lengths(2, 7);
    kvcore::LookupTable narrow(memory.data(), 2, 2, 99);
    kvcore::FetchTarget target;
    target.table = &narrow;
    target.cache_lengths = lengths.data();
    std::vector<kvcore::RequestView> views{a.view(), b.view()};
    CHECK_EQ(m.manager.fetch({views.data(), 2}, 2, &target).status, FetchStatus::kGrow);
    CHECK_EQ(target.rows, 2);
    CHECK_EQ(target.width, 3);
    CHECK_EQ(m.manager.metrics().input_tokens, 8);
    CHECK_EQ(m.pages(a).size(), 3);  // reserved, but not fetched
    memory.assign(8, 7);
    kvcore::LookupTable wide(memory.data(), 2, 4, 99);
    target.table = &wide;
    CHECK_EQ(m.manager.fetch({views.data(), 2}, 2, &target).status, FetchStatus::kOk);
    CHECK_EQ(target.longest_new, 5);
    CHECK_EQ(target.longest_active, 5);
    CHECK_EQ(m.manager.metrics().input_tokens, 8);  // counted once
    CHECK_EQ(lengths, std::vector<std::uint32_t>(2, 0));
    const Ids row = m.pages(b);
    CHECK_EQ(memory[4], row[0]);
    CHECK_EQ(memory[5], row[1]);
    CHECK_EQ(memory[6], 99);
}

// ---- pins and namespaces ---------------------------------------------------------------------

PinHandle pin(ManagerFixture& m, const Tokens& tokens, const std::string& name = "") {
    return m.manager.pin(0, name, tokens.data(), count(tokens));
}

TEST(pins_keep_whole_pages_from_eviction) {
    ManagerFixture m(ManagerFixture::config(2, 6));
    m.put(count_up(1, 8));
    const PinHandle kept = pin(m, {1, 2, 3, 4, 5});
    CHECK_EQ(kept.num_tokens, 4);
    CHECK_EQ(m.available(), 4);
    CHECK_EQ(m.manager.metrics().peak_used_pages, 4);
    CHECK_EQ(m.match(count_up(1, 8)), 4);
    CHECK(!m.manager.reset_prefix_cache());
    CHECK_EQ(m.match(count_up(1, 8)), 0);
    Request large = m.claim(count_up(100, 10));
    CHECK(!m.reserve(large));
    m.manager.unpin(kept);
    CHECK(m.reserve(large));
    CHECK(m.manager.reset_prefix_cache());
}

TEST(a_pin_is_released_only_once) {
    ManagerFixture m(ManagerFixture::config(1, 6));
    m.put({1, 2, 3});
    const PinHandle first = pin(m, {1, 2, 3});
    const PinHandle second = pin(m, {1, 2, 3});
    m.manager.unpin(first);
    CHECK_EQ(m.available(), 3);
    CHECK_THROWS(kvcore::InvalidHandleError, m.manager.unpin(first));
    CHECK_EQ(m.available(), 3);
    m.manager.unpin(second);
    CHECK_EQ(m.available(), 6);
    CHECK_THROWS(kvcore::InvalidHandleError, m.manager.unpin(second));
    CHECK_THROWS(kvcore::InvalidHandleError, m.manager.unpin({7, 1, 0}));
    CHECK_THROWS(kvcore::InvalidHandleError, m.manager.unpin({}));
    const PinHandle none = pin(m, {9}, "nobody's");
    CHECK_EQ(none.num_tokens, 0);
    m.manager.unpin(none);
    CHECK_THROWS(kvcore::InvalidHandleError, m.manager.unpin(none));
}

TEST(unpin_counts_as_a_use) {
    ManagerFixture m(ManagerFixture::config(1, 4));
    m.put({1, 2});
    m.put({3, 4});
    m.manager.unpin(pin(m, {1, 2}));
    Request request = m.claim({9, 9});
    CHECK(m.reserve(request));
    CHECK_EQ(m.match({1, 2}), 2);
    CHECK_EQ(m.match({3}), 0);
}

TEST(namespaces_never_share_pages) {
    CHECK(namespace_name({}, {}).empty());
    const std::set<std::string> names{namespace_name({}, {}),   namespace_name("", {}),
                                      namespace_name({}, ""),   namespace_name("", ""),
                                      namespace_name("a", "b"), namespace_name("ab", ""),
                                      namespace_name("", "ab"), namespace_name("ab", {}),
                                      namespace_name({}, "ab"), namespace_name("b", "a")};
    CHECK_EQ(names.size(), 10);
    ManagerFixture m(ManagerFixture::config(1, 20));
    m.put({1, 2, 3}, 0, namespace_name("a", "b"));
    for (const std::string& name : names) {
        CHECK_EQ(m.match({1, 2, 3}, 0, name), name == namespace_name("a", "b") ? 3 : 0);
    }
    Request request = m.claim({1, 2, 3}, 0, namespace_name("ab", ""));
    m.run(request, 4);
    CHECK_EQ(m.swaps.size(), 0);
    CHECK_EQ(m.manager.stats(0).cached_pages, 6);
}

// ---- replicas --------------------------------------------------------------------------------

TEST(replicas_are_separate_and_recommended) {
    kvcore::CacheConfig config = ManagerFixture::config(1, 10);
    config.num_replicas = 3;
    ManagerFixture m(config);
    const Tokens prompt{1, 2, 3, 4};
    const auto recommended = [&](const Tokens& tokens) {
        return m.manager.recommend_replica("", tokens.data(), count(tokens));
    };
    CHECK_EQ(recommended(prompt), 0);
    m.put({1, 2, 3}, 2);
    CHECK_EQ(m.match(prompt, 0), 0);
    CHECK_EQ(recommended(prompt), 2);  // the longest hit
    Request one = m.claim({7}, 0);
    CHECK_EQ(recommended({9}), 1);  // equal pages, fewer sequences
    CHECK(m.reserve(one));
    Request two = m.claim({7}, 1);
    CHECK_EQ(recommended({9}), 2);  // most available pages
    CHECK_EQ(m.manager.replica_of(two.sequence), 1);
    CHECK_EQ(m.fetch({&one, &two}).status, FetchStatus::kOk);
    m.put({5, 6}, 0);
    m.manager.reset_prefix_cache();
    for (const std::int32_t i : {0, 1, 2}) CHECK_EQ(m.manager.stats(i).cached_pages, 0);
}

}  // namespace

}  // namespace tests::cache::sharing
