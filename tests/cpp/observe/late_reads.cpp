// SPDX-License-Identifier: Apache-2.0
// Reads that continue after a page has a new owner: which callers must wait before they write.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "support/cache_mover.hpp"
#include "support/check.hpp"
#include "support/group_scene.hpp"
#include "support/layer_groups.hpp"
#include "support/manager_fixture.hpp"
#include "support/random.hpp"

namespace tests::observe::late_reads {

using kvcore::CacheManager;
using kvcore::PageMove;

namespace {

constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();

void note(CacheManager& manager, const Ids& pages, std::uint64_t mark, std::int32_t replica = 0) {
    std::vector<PageMove> stores;
    for (const BlockId page : pages) {
        PageMove store;
        store.replica = replica;
        store.source = page;
        store.destination_tier = kvcore::Tier::kHost;
        stores.push_back(store);
    }
    manager.note_late_reads(stores.data(), count(stores), mark);
}

Ids cached(ManagerFixture& m, const Tokens& tokens, std::int32_t replica = 0) {
    Ids ids;
    m.match(tokens, replica, "", &ids);
    return ids;
}

void take(ManagerFixture& m, std::int64_t pages, std::int32_t replica = 0) {
    Request request = m.claim(count_up(10'000, 2 * pages), replica);
    CHECK(m.reserve(request));
}

TEST(evicted_pages_are_told_of) {
    ManagerFixture m(ManagerFixture::config(2, 8));
    CHECK_EQ(m.manager.late_reads(0), 0U);
    m.put(count_up(0, 4));
    m.put(count_up(100, 4));
    note(m.manager, cached(m, count_up(0, 4)), 5);
    note(m.manager, cached(m, count_up(100, 4)), kMost);
    take(m, 4);  // free pages
    CHECK_EQ(m.manager.late_reads(0), 0U);
    take(m, 1);
    CHECK_EQ(m.manager.late_reads(0), 5U);
    take(m, 1);
    CHECK_EQ(m.manager.late_reads(0), 5U);
    take(m, 1);
    CHECK_EQ(m.manager.late_reads(0), kMost);
}

TEST(a_hit_is_no_new_owner) {
    ManagerFixture m(ManagerFixture::config(2, 8));
    m.put(count_up(0, 8));
    note(m.manager, cached(m, count_up(0, 8)), 1);
    Request request = m.claim(count_up(0, 9));
    CHECK(m.reserve(request));
    CHECK_EQ(request.start, 8);
    CHECK_EQ(m.manager.late_reads(0), 0U);
}

TEST(freed_pages_are_told_of) {
    ManagerFixture m(ManagerFixture::config(2, 8));
    Request request = m.claim(count_up(0, 7));
    CHECK(m.reserve(request));
    note(m.manager, m.pages(request), 3);
    m.manager.release(request.sequence);
    CHECK_EQ(m.manager.late_reads(0), 0U);
    take(m, 1);
    CHECK_EQ(m.manager.late_reads(0), 3U);
}

// The destination page of a copy, and pages that a reset has freed.
TEST(so_are_copies_and_what_a_reset_leaves) {
    ManagerFixture m(ManagerFixture::config(4, 4));
    m.put(count_up(0, 8));
    note(m.manager, cached(m, count_up(0, 8)), 3);
    m.manager.reset_prefix_cache();
    CHECK_EQ(m.manager.late_reads(0), 0U);
    take(m, 6);  // three pages; a late read covers two of them
    CHECK_EQ(m.manager.late_reads(0), 3U);
    ManagerFixture forked(ManagerFixture::config(4, 4));
    Request parent = served(forked, count_up(0, 6), 7);
    Request spare = forked.claim(count_up(100, 4));
    CHECK(forked.reserve(spare));
    note(forked.manager, forked.pages(spare), 4);
    forked.manager.release(spare.sequence);
    Request child = forked.fork_of(parent, {8});
    CHECK(forked.reserve(child));
    CHECK_EQ(forked.manager.late_reads(0), 4U);
}

TEST(replicas_have_their_own) {
    kvcore::CacheConfig config = ManagerFixture::config(2, 4);
    config.num_replicas = 2;
    config.first_page = 10;
    ManagerFixture m(config);
    for (const std::int32_t replica : {0, 1}) m.put(count_up(0, 8), replica);
    note(m.manager, cached(m, count_up(0, 8), 1), 7, 1);
    for (const std::int32_t replica : {0, 1}) take(m, 4, replica);
    CHECK_EQ(m.manager.late_reads(0), 0U);
    CHECK_EQ(m.manager.late_reads(1), 7U);
    CHECK_THROWS(std::out_of_range, static_cast<void>(m.manager.late_reads(2)));
}

TEST(what_is_refused_is_not_noted) {
    kvcore::CacheConfig config = ManagerFixture::config(2, 4);
    config.first_page = 3;
    ManagerFixture m(config);
    CHECK_THROWS(kvcore::InvalidHandleError, note(m.manager, {3, 4, 5, 6, 7}, 1));
    CHECK_THROWS(kvcore::InvalidHandleError, note(m.manager, {3, 4, 5, 6, 2}, 1));
    CHECK_THROWS(std::out_of_range, note(m.manager, {3}, 1, 1));
    note(m.manager, {}, 1);
    take(m, 4);
    CHECK_EQ(m.manager.late_reads(0), 0U);
}

void imports_are_told_of(const std::vector<kvcore::CacheGroup>& groups) {
    const kvcore::CacheConfig config = GroupScene::config(4, 12, groups);
    GroupScene from(config);
    from.put(count_up(0, 9));
    std::vector<cache_mover::Run> runs = cache_mover::save(from.manager);
    GroupScene to(config);
    Ids all(12);
    for (BlockId i = 0; i < 12; ++i) all[static_cast<std::size_t>(i)] = i;
    note(to.manager, all, 6);
    CHECK_EQ(to.manager.late_reads(0), 0U);
    CHECK(cache_mover::restore(to.manager, std::move(runs)) > 0);
    CHECK_EQ(to.manager.late_reads(0), 6U);
}

// ---- any requests

/// Requests whose full pages are read late. Each step has a mark of its own. The manager reports
/// the highest mark among the pages that were handed out.
class Traffic {
   public:
    Traffic(std::uint64_t seed, std::vector<kvcore::CacheGroup> groups)
        : random_(seed),
          scene_(GroupScene::config(4, kPages, std::move(groups))),
          marks_(static_cast<std::size_t>(kPages)) {}

    void act() {
        if (live_.size() < 3 && random_.chance(40)) return begin();
        if (live_.empty()) return;
        const std::int64_t at = random_.below(count(live_));
        if (random_.chance(15)) return end(at);
        run(at);
    }
    [[nodiscard]] std::uint64_t told() const { return scene_.manager.late_reads(0); }

   private:
    static constexpr std::int64_t kPages = 40;

    void begin() {
        const std::int64_t shared = 4 * random_.below(4);
        Tokens tokens = count_up(0, shared + random_.below(3));
        for (std::int64_t i = random_.between(1, 12); i > 0; --i) {
            tokens.push_back(static_cast<TokenId>(500 + random_.below(3)));
        }
        live_.push_back(scene_.claim(tokens));
    }
    void end(std::int64_t at) {
        scene_.manager.release(item(live_, at).sequence);
        live_.erase(live_.begin() + at);
    }
    void run(std::int64_t at) {
        Request& request = item(live_, at);
        if (!scene_.run({&request})) return end(at);
        for_each_bundle(request, [&](const Ids& pages, std::int64_t page_size) {
            for (std::int64_t i = request.start / page_size; i < count(pages); ++i) {
                const BlockId page = item(pages, i);
                if (page >= 0) handed_out_ = std::max(handed_out_, item(marks_, page));
            }
        });
        CHECK_EQ(told(), handed_out_);
        scene_.step({&request}, static_cast<TokenId>(random_.below(3)));
        ++last_;
        for_each_bundle(request, [&](const Ids& pages, std::int64_t page_size) {
            const std::int64_t whole = request.start / 4 * 4 / page_size;
            for (std::int64_t i = 0; i < std::min(whole, count(pages)); ++i) {
                const BlockId page = item(pages, i);
                if (page < 0) continue;
                item(marks_, page) = last_;
                note(scene_.manager, {page}, last_);
            }
        });
    }
    template <class Visit>
    void for_each_bundle(const Request& request, const Visit& visit) {
        const auto n = static_cast<std::int32_t>(scene_.bundles.size());
        for (std::int32_t b = 0; b < n; ++b) {
            visit(scene_.manager.pages_of(request.sequence, b), item(scene_.bundles, b).page_size);
        }
    }

    Random random_;
    GroupScene scene_;
    std::vector<std::uint64_t> marks_;  // of each page
    std::vector<Request> live_;
    std::uint64_t last_ = 0;
    std::uint64_t handed_out_ = 0;
};

void any_requests_are_told_of_their_pages(const std::vector<kvcore::CacheGroup>& groups) {
    for (std::uint64_t seed = 0; seed < 30; ++seed) {
        Traffic traffic(seed, groups);
        for (int i = 0; i < 200; ++i) traffic.act();
        CHECK(traffic.told() > 0);
    }
}

TEST(imports_and_requests_of_groups_are_told_of) {
    for (const std::vector<kvcore::CacheGroup>& groups :
         {std::vector{full()}, std::vector{full(), sliding(6)}, std::vector{sliding(5)},
          std::vector{full(), sliding(6, 1, 2)}}) {
        imports_are_told_of(groups);
        any_requests_are_told_of_their_pages(groups);
    }
}

}  // namespace

}  // namespace tests::observe::late_reads
