// SPDX-License-Identifier: Apache-2.0
// The runs in the cache and the order of their eviction.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "support/cache_mover.hpp"
#include "support/check.hpp"
#include "support/eviction_orders.hpp"
#include "support/manager_fixture.hpp"

namespace tests::cache::cached_tree {

using cache_mover::list;
using cache_mover::Run;

namespace {

TEST(runs_are_listed_with_their_eviction_rank) {
    ManagerFixture s(ManagerFixture::config(4, 64));
    s.put(count_up(0, 8) + count_up(100, 8));
    s.put(count_up(0, 8) + count_up(200, 8));
    s.put(count_up(50, 4), 0, "other");
    s.put(count_up(0, 8) + count_up(100, 8));  // used again
    const std::vector<Run> runs = list(s.manager);
    const auto rank = [&](const Tokens& tokens) {
        for (const Run& run : runs) {
            if (run.tokens == tokens) return run.rank;
        }
        CHECK(false);
        return -1;
    };
    const Tokens common = count_up(0, 8);
    CHECK(rank(common + count_up(200, 8)) < rank(count_up(50, 4)));
    CHECK(rank(count_up(50, 4)) < rank(common + count_up(100, 8)));
    CHECK_EQ(rank(common), rank(common + count_up(100, 8)));
}

TEST(held_runs_rank_last) {
    ManagerFixture s(ManagerFixture::config(4, 64));
    Request held = served(s, count_up(0, 8), 1);
    s.put(count_up(100, 8));
    const std::vector<Run> runs = list(s.manager);
    CHECK_EQ(runs.size(), 2U);
    for (const Run& run : runs) CHECK_EQ(run.rank, run.tokens[0] == 0 ? 1 : 0);
    s.manager.release(held.sequence);
}

TEST(every_policy_ranks_in_its_eviction_order) {
    for (const kvcore::EvictionOrder order : eviction_orders::kAll) {
        kvcore::CacheConfig config = ManagerFixture::config(4, 64);
        config.eviction.order = order;
        ManagerFixture s(config);
        for (TokenId i = 0; i < 20; ++i) s.put(count_up(1000 * i, 4));
        for (TokenId i = 0; i < 20; i += 3) s.put(count_up(1000 * i, 4));
        std::vector<Run> runs = list(s.manager);
        CHECK_EQ(runs.size(), 20U);
        std::sort(runs.begin(), runs.end(),
                  [](const Run& a, const Run& b) { return a.rank < b.rank; });
        Request request = s.claim(count_up(90000, 180));  // all free pages, and one page more
        CHECK(s.reserve(request));
        CHECK_EQ(s.match(runs[0].tokens), 0);
        for (std::size_t i = 1; i < runs.size(); ++i) CHECK_EQ(s.match(runs[i].tokens), 1);
        s.manager.release(request.sequence);
    }
}

}  // namespace

}  // namespace tests::cache::cached_tree
