// SPDX-License-Identifier: Apache-2.0
// Remove pages with wrong contents from the cache (forget).
#include "support/manager_fixture.hpp"

namespace tests::cache::forget {

using kvcore::InvalidHandleError;

namespace {

std::int64_t forget(ManagerFixture& m, const Ids& pages, std::int32_t replica = 0) {
    const std::int64_t left = m.manager.forget(replica, pages.data(), count(pages));
    m.manager.check_integrity();
    return left;
}

Ids cached(ManagerFixture& m, const Tokens& tokens) {
    Ids ids;
    m.match(tokens, 0, "", &ids);
    return ids;
}

TEST(pages_without_a_holder_become_free) {
    ManagerFixture m(ManagerFixture::config(2, 16));
    m.put(count_up(0, 8));
    m.put({0, 1, 2, 3, 50, 51});
    const Ids ids = cached(m, count_up(0, 8));
    CHECK_EQ(ids.size(), 4);
    CHECK_EQ(m.free(), 11);
    CHECK_EQ(forget(m, {ids[2]}), 2);
    CHECK_EQ(m.match(count_up(0, 8)), 2);
    CHECK_EQ(m.match({0, 1, 2, 3, 50, 51}), 3);
    CHECK_EQ(m.free(), 13);
    CHECK_EQ(m.available(), 16);
    CHECK_EQ(forget(m, {ids[2]}), 0);  // no longer cached
    CHECK_EQ(forget(m, {ids[1], ids[0], ids[1]}), 3);
    CHECK_EQ(m.free(), 16);
    m.put(count_up(0, 8));
    CHECK_EQ(m.match(count_up(0, 8)), 4);
}

TEST(invalid_page_ids_are_refused) {
    ManagerFixture m(ManagerFixture::config(2, 16));
    m.put(count_up(0, 8));
    const Ids ids = cached(m, count_up(0, 8));
    const Trace before = m.trace({});
    CHECK_THROWS(InvalidHandleError, forget(m, {ids[0], 16}));
    CHECK_THROWS(InvalidHandleError, forget(m, {ids[0], -1}));
    CHECK_THROWS(std::out_of_range, forget(m, {ids[0]}, 1));
    CHECK_EQ(forget(m, {15}), 0);  // a free page
    CHECK_EQ(forget(m, {}), 0);
    CHECK(m.trace({}) == before);
}

// The holder continues. It caches no page after the gap, and its release frees the pages.
TEST(a_request_keeps_its_forgotten_pages) {
    ManagerFixture m(ManagerFixture::config(2, 16));
    Request request = served(m, count_up(0, 8), 8);
    const Ids row = m.pages(request);
    CHECK_EQ(forget(m, {row[1]}), 3);
    CHECK_EQ(m.pages(request), row);
    CHECK_EQ(m.match(count_up(0, 8)), 1);
    CHECK_EQ(m.manager.stats(0).cached_pages, 1);
    CHECK_EQ(m.available(), 16 - count(row));
    for (TokenId t = 9; t < 14; ++t) m.run(request, t);
    m.manager.check_integrity();
    CHECK_EQ(m.match(request.tokens()), 1);
    CHECK_EQ(m.manager.stats(0).cached_pages, 1);
    m.manager.release(request.sequence);
    CHECK_EQ(m.free(), 15);
    CHECK_EQ(m.available(), 16);
}

TEST(rewritten_pages_are_committed_again) {
    ManagerFixture m(ManagerFixture::config(2, 16));
    Request request = served(m, count_up(0, 8), 8);
    const Ids row = m.pages(request);
    CHECK_EQ(forget(m, {row[2]}), 2);
    m.manager.truncate(request.sequence, 5);  // the third page keeps a token
    request.rewind(6);
    request.start = 5;
    for (TokenId t = 70; t < 76; ++t) m.run(request, t);
    CHECK_EQ(m.match(request.tokens()), 2);
    m.manager.truncate(request.sequence, 4);
    CHECK_EQ(m.free() + m.manager.stats(0).cached_pages, 16);
    request.rewind(5);
    request.start = 4;
    for (TokenId t = 80; t < 86; ++t) m.run(request, t);
    CHECK_EQ(m.match(request.tokens()), request.start / 2);
    m.manager.check_integrity();
    m.manager.release(request.sequence);
    CHECK_EQ(m.available(), 16);
}

TEST(holders_of_a_forgotten_page_release_it_one_by_one) {
    ManagerFixture m(ManagerFixture::config(2, 32));
    Request first = served(m, count_up(0, 8), 8);
    Request second = served(m, count_up(0, 8), 8);
    Request child = m.fork_of(first, {9, 10});
    const kvcore::PinHandle pin = m.manager.pin(0, "", first.tokens().data(), 8);
    CHECK_EQ(pin.num_tokens, 8);
    CHECK_EQ(forget(m, {m.pages(first)[0]}), 4);
    CHECK_EQ(m.match(count_up(0, 8)), 0);
    for (Request* each : {&first, &second, &child}) m.run(*each, 99);
    m.manager.check_integrity();
    Request again = served(m, count_up(0, 8), 8);  // computes the whole prompt again
    CHECK_EQ(m.match(count_up(0, 8)), 4);
    for (Request* each : {&child, &first, &second}) {
        m.manager.release(each->sequence);
        m.manager.check_integrity();
        CHECK_EQ(m.match(count_up(0, 8)), 4);
    }
    const std::int64_t held = 32 - m.available();
    m.manager.unpin(pin);
    CHECK_EQ(m.available(), 32 - held + 4);
    m.manager.release(again.sequence);
    CHECK_EQ(m.available(), 32);
}

// The order is from the tail to the head: the parent of each forgotten run is forgotten later.
TEST(pages_are_forgotten_from_the_tail_to_the_head) {
    ManagerFixture m(ManagerFixture::config(1, 32));
    Request request = served(m, count_up(0, 8), 8);
    Request side = served(m, {0, 1, 2, 50, 51}, 52);
    const Ids row = m.pages(request);
    for (std::size_t i = 8; i-- > 0;) {
        const std::int64_t left = forget(m, {row[i]});
        CHECK_EQ(left, i == 2 ? 3 : 1);  // page 2 takes the other branch with it
    }
    CHECK_EQ(m.manager.stats(0).cached_pages, 0);
    CHECK_EQ(m.available(), 32 - 8 - 2);
    m.manager.release(side.sequence);
    m.manager.check_integrity();
    m.manager.release(request.sequence);
    CHECK_EQ(m.free(), 32);
}

// A page that a claim has hit is forgotten before the claim runs. The claim keeps the page.
TEST(a_claim_that_has_not_run_keeps_its_hit) {
    ManagerFixture m(ManagerFixture::config(2, 16));
    m.put(count_up(0, 8));
    Request request = m.claim(count_up(0, 8));
    CHECK(m.reserve(request));
    CHECK_EQ(request.start, 7);
    Request other = m.claim(count_up(0, 9));
    kvcore::PrefixHit hit = m.manager.match(other.view());
    CHECK_EQ(forget(m, {m.pages(request)[1]}), 3);
    const Ids row = m.pages(request);
    CHECK(m.reserve(request));
    CHECK_EQ(m.pages(request), row);
    m.run(request, 8);
    CHECK_EQ(m.match(count_up(0, 8)), 1);
    kvcore::RequestView view = other.view();
    CHECK_THROWS(std::invalid_argument,
                 static_cast<void>(m.manager.allocate(hit, view, view.end, nullptr)));
    hit = kvcore::PrefixHit();
    CHECK(m.reserve(other));
    CHECK_EQ(other.start, 2);
    m.manager.check_integrity();
}

// A page that starts as a copy of a forgotten page is not cached.
TEST(a_copy_of_a_forgotten_page_is_not_cached) {
    ManagerFixture m(ManagerFixture::config(4, 16));
    m.put(count_up(0, 8));
    Request request = m.claim({0, 1, 2, 3, 4, 5, 60, 61, 62});
    CHECK(m.reserve_copying(request));
    CHECK_EQ(request.start, 6);
    CHECK_EQ(forget(m, {cached(m, count_up(0, 8))[1]}), 1);
    m.finish();
    m.run(request, 63);
    CHECK_EQ(m.match(request.tokens()), 1);
    m.manager.truncate(request.sequence, 4);
    request.rewind(5);
    request.start = 4;
    for (TokenId t = 70; t < 75; ++t) m.run(request, t);
    CHECK_EQ(m.match(request.tokens()), 2);
}

TEST(a_reset_also_forgets_held_pages) {
    ManagerFixture m(ManagerFixture::config(2, 16));
    Request request = served(m, count_up(0, 8), 8);
    CHECK_EQ(forget(m, {m.pages(request)[1]}), 3);
    CHECK(!m.manager.reset_prefix_cache());
    m.manager.check_integrity();
    CHECK_EQ(m.match(count_up(0, 8)), 0);
    CHECK(!m.manager.reset_prefix_cache());
    m.manager.release(request.sequence);
    CHECK(m.manager.reset_prefix_cache());
    CHECK_EQ(m.free(), 16);
}

TEST(windows_and_namespaces) {
    kvcore::CacheConfig config = ManagerFixture::config(2, 64);
    config.groups = {{}, {kvcore::GroupKind::kSliding, 4, 1, 0}};
    ManagerFixture m(config);
    m.put(count_up(0, 12), 0, "other");
    Request request = served(m, count_up(0, 12), 12);
    m.put(count_up(0, 10));
    const std::int64_t all = 64;
    Ids row = m.manager.pages_of(request.sequence, 1);
    const BlockId page = row[4];
    CHECK(page >= 0);
    CHECK(forget(m, {page}) > 0);
    for (TokenId t = 13; t < 24; ++t) m.run(request, t);
    m.manager.check_integrity();
    CHECK(m.match(count_up(0, 12)) <= 5);
    CHECK(m.match(count_up(0, 12), 0, "other") > 0);
    m.manager.release(request.sequence);
    m.manager.check_integrity();
    CHECK_EQ(m.available(), all);
}

TEST(duplicate_pages) {
    kvcore::CacheConfig config = ManagerFixture::config(2, 32);
    config.dedup = false;
    ManagerFixture m(config);
    Request first = m.claim(count_up(0, 8));
    Request second = m.claim(count_up(0, 8));
    CHECK(m.reserve(first) && m.reserve(second));
    m.run(first, 8);
    m.run(second, 8);
    CHECK_EQ(forget(m, {m.pages(second)[1]}), 0);  // the tree holds the page of `first`
    CHECK_EQ(forget(m, {m.pages(first)[1]}), 3);
    m.run(second, 9);
    m.run(first, 9);
    m.manager.check_integrity();
    m.manager.release(first.sequence);
    m.manager.check_integrity();
    m.manager.release(second.sequence);
    CHECK_EQ(m.available(), 32);
}

}  // namespace

}  // namespace tests::cache::forget
