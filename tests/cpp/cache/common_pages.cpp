// SPDX-License-Identifier: Apache-2.0
// The requests that share each page: shared_prefixes, and forks with caching or dedup off.
#include "support/manager_fixture.hpp"

namespace tests::cache::common_pages {

using kvcore::CacheConfig;
using kvcore::FetchStatus;
using kvcore::PageMove;
using kvcore::SharedPrefix;

namespace {

// ---- shared prefixes -------------------------------------------------------------------------

void check_group(const SharedPrefix& group, std::int32_t replica, std::int64_t num_tokens,
                 const std::vector<std::int32_t>& rows) {
    CHECK_EQ(group.replica, replica);
    CHECK_EQ(group.num_tokens, num_tokens);
    CHECK_EQ(group.rows, rows);
}

TEST(groups_are_nested_and_longest_first) {
    ManagerFixture m(ManagerFixture::config(2, 30));
    m.put(count_up(1, 8));
    Request all = m.claim(count_up(1, 9));
    Request half = m.claim({1, 2, 3, 4, 50, 51});
    Request other = m.claim({70, 71, 72});
    Request most = m.claim({1, 2, 3, 4, 5, 6, 60});
    CHECK_EQ(m.fetch({&all, &half, &other, &most}).status, FetchStatus::kOk);
    const std::vector<SharedPrefix> groups = m.shared({&all, &half, &other, &most});
    CHECK_EQ(groups.size(), 2);
    check_group(groups[0], 0, 6, {0, 3});
    check_group(groups[1], 0, 4, {0, 1, 3});
    CHECK(m.shared({&all, &other}).empty());
    CHECK(m.shared({}).empty());
    CHECK_EQ(m.shared({&half, &all}).size(), 1);
}

// Forks share a partly filled page until a fork writes to it.
TEST(forks_share_a_partly_filled_page) {
    ManagerFixture m(ManagerFixture::config(4, 30));
    Request parent = served(m, count_up(1, 6), 7);
    Request a = m.fork_of(parent, {8});
    Request b = m.fork_of(parent, {9});
    std::vector<SharedPrefix> groups = m.shared({&a, &parent, &b});
    CHECK_EQ(groups.size(), 1);
    check_group(groups[0], 0, 6, {0, 1, 2});
    CHECK(m.reserve(parent));
    groups = m.shared({&a, &parent, &b});
    CHECK_EQ(groups.size(), 2);
    check_group(groups[0], 0, 6, {0, 2});
    check_group(groups[1], 0, 4, {0, 1, 2});
    m.manager.truncate(a.sequence, 5);
    a.rewind(5);
    groups = m.shared({&a, &b});
    CHECK_EQ(groups.size(), 1);
    check_group(groups[0], 0, 4, {0, 1});  // a writes position 4 next
}

TEST(rows_are_counted_in_their_replica) {
    CacheConfig config = ManagerFixture::config(2, 30);
    config.num_replicas = 2;
    ManagerFixture m(config);
    for (const std::int32_t replica : {0, 1}) m.put({1, 2, 3}, replica);
    Request a = m.claim({1, 2, 3}, 1);
    Request b = m.claim({1, 2, 4}, 0);
    Request c = m.claim({9, 9}, 1);
    Request d = m.claim({1, 2, 5}, 1);
    CHECK_EQ(m.fetch({&a, &b, &c, &d}).status, FetchStatus::kOk);
    const std::vector<SharedPrefix> groups = m.shared({&a, &b, &c, &d});
    CHECK_EQ(groups.size(), 1);
    check_group(groups[0], 1, 2, {0, 2});
}

// A duplicate of a cached page is not shared with the holders of the cached page.
TEST(duplicate_pages_are_not_shared) {
    CacheConfig config = ManagerFixture::config(2, 30);
    config.dedup = false;
    ManagerFixture m(config);
    m.put({1, 2});
    Request first = m.claim({1, 2, 3, 4});
    Request second = m.claim({1, 2, 3, 4});
    CHECK_EQ(m.fetch({&first, &second}).status, FetchStatus::kOk);
    for (Request* request : {&first, &second}) ManagerFixture::sample(*request, 5);
    m.commit({&first, &second});
    CHECK(m.pages(first)[1] != m.pages(second)[1]);
    std::vector<SharedPrefix> groups = m.shared({&first, &second});
    CHECK_EQ(groups.size(), 1);
    check_group(groups[0], 0, 2, {0, 1});
    Request fork = m.fork_of(second, {9});
    groups = m.shared({&first, &second, &fork});
    CHECK_EQ(groups.size(), 2);
    check_group(groups[0], 0, 4, {1, 2});
    check_group(groups[1], 0, 2, {0, 1, 2});
}

// ---- caching and dedup off -------------------------------------------------------------------

TEST(forks_without_a_cache) {
    CacheConfig config = ManagerFixture::config(2, 6);
    config.prefix_caching = false;
    ManagerFixture m(config);
    Request parent = served(m, {1, 2, 3}, 4);
    Request child = m.fork_of(parent, {9});
    CHECK_EQ(m.pages(child), m.pages(parent));
    CHECK_EQ(m.fetch({&parent, &child}).status, FetchStatus::kOk);
    CHECK_EQ(m.manager.take_copies().size(), 1);
    CHECK_EQ(m.pages(child)[0], m.pages(parent)[0]);
    CHECK(m.pages(child)[1] != m.pages(parent)[1]);
    CHECK_EQ(m.manager.stats(0).cached_pages, 0);
    m.manager.release(parent.sequence);
    CHECK_EQ(m.free(), 4);
    // Cut the child back into a page that only the child holds, and go on: no copy.
    child.rewind(2);
    m.manager.truncate(child.sequence, 2);
    m.run(child, 7);
    CHECK(m.manager.take_copies().empty());
}

// With dedup off, a sequence and its forks keep their own page next to the cached duplicate.
TEST(kept_pages_are_shared_with_forks) {
    CacheConfig config = ManagerFixture::config(2, 8);
    config.dedup = false;
    ManagerFixture m(config);
    Request first = m.claim({1, 2, 3, 4});
    Request parent = m.claim({1, 2, 3, 4});
    CHECK_EQ(m.fetch({&first, &parent}).status, FetchStatus::kOk);
    for (Request* request : {&first, &parent}) ManagerFixture::sample(*request, 5);
    m.commit({&first, &parent});
    CHECK(m.pages(parent) != m.pages(first));
    Request child = m.fork_of(parent, {9});
    CHECK_EQ(m.pages(child), m.pages(parent));
    CHECK_EQ(m.free(), 4);
    m.manager.release(parent.sequence);
    CHECK_EQ(m.free(), 4);
    child.rewind(3);
    m.manager.truncate(child.sequence, 2);
    CHECK_EQ(m.free(), 5);
    m.manager.release(child.sequence);
    CHECK_EQ(m.free(), 6);
    CHECK_EQ(m.available(), 6);  // `first` still holds the cached pages
}

TEST(a_kept_page_is_copied_while_forks_hold_it) {
    CacheConfig config = ManagerFixture::config(2, 8);
    config.dedup = false;
    ManagerFixture m(config);
    m.put({7, 8, 9});
    Request parent = m.claim({7, 8});
    parent.active = 1;  // a request with one active token takes no hit, so it gets a duplicate page
    CHECK_EQ(m.fetch({&parent}).status, FetchStatus::kOk);
    parent.start = 1;
    parent.active = 2;
    m.run(parent, 3);
    Ids cached;
    CHECK_EQ(m.match({7, 8}, 0, "", &cached), 1);
    CHECK(m.pages(parent)[0] != cached[0]);
    Request child = m.fork_of(parent, {4});
    const BlockId kept = m.pages(parent)[0];
    parent.rewind(2);  // position 1 is written again
    m.manager.truncate(parent.sequence, 1);
    CHECK(m.reserve(parent));
    const std::vector<PageMove> copies = m.manager.take_copies();
    CHECK_EQ(copies.size(), 1);
    check_copy(copies[0], kept, m.pages(parent)[0], 1, parent);
    CHECK_EQ(m.pages(child)[0], kept);
    child.rewind(2);
    CHECK(m.reserve(child));  // the last holder writes in place, although an equal page is cached
    CHECK_EQ(m.pages(child)[0], kept);
    CHECK(m.manager.take_copies().empty());
}

}  // namespace

}  // namespace tests::cache::common_pages
