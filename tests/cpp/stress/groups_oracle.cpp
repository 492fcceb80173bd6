// SPDX-License-Identifier: Apache-2.0
// Random traffic over groups of layers, compared with a slow oracle. The oracle has the content of
// the tree. From this content it computes, token by token, the longest hit of every prompt, the
// pages of each bundle that each request has after every call, the numbers of used, free and
// evicted pages, and the result of a plan. --count: operations of each configuration.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "traffic/group_worlds.hpp"

namespace tests::stress::groups_oracle {

namespace {

kvcore::CacheConfig uncached(kvcore::CacheConfig config) {
    config.prefix_caching = false;
    return config;
}

TEST(random_calls_agree_with_the_oracle) {
    const std::uint64_t seed = check::seed_or(20261123);
    const std::int64_t operations = check::count_or(1500);
    const std::vector<kvcore::CacheConfig> configs = {
        small_pool(4, 60, {full(), sliding(8)}),
        small_pool(2, 50, {full(), sliding(4, 2)}, true, 0),
        small_pool(4, 40, {full(), sliding(5), sliding(11)}, true, 1, 3),
        small_pool(4, 44, {full(2), chunked(12)}),
        small_pool(4, 44, {full(), chunked(6)}),
        small_pool(8, 40, {full(), sliding(6, 1, 2)}, true, 1, 2),
        small_pool(8, 60, {full(2, 4), sliding(20), chunked(16)}, true, 3, 0, 2),
        small_pool(4, 14, {sliding(7)}),
        small_pool(4, 24, {sliding(6), chunked(8)}, true, 2, 2, 2),
        small_pool(2, 40, {sliding(5, 2), full()}, false),
        small_pool(4, 50, {full(), sliding(9)}, false, 1, 2),
        small_pool(4, 40, {full(), sliding(1)}),
        small_pool(4, 40, {full(), sliding(9), chunked(8)}, true, 2, 1),
        uncached(small_pool(4, 40, {full(), sliding(8)})),
        small_pool(1, 60, {full(), sliding(3)}),
        small_pool(16, 24, {full(), sliding(100)}),
        small_pool(4, 60, {full(3)}, true, 1, 0, 2),
    };
    std::int64_t evicted = 0;
    std::int64_t hits = 0;
    for (std::size_t i = 0; i < configs.size(); ++i) {
        for (const bool copies_later : {false, true}) {
            // Each world gets another of the seven orders.
            const auto order = static_cast<kvcore::EvictionOrder>((2 * i + copies_later) % 7);
            run_world("configuration " + std::to_string(i) + (copies_later ? ", transfers" : ""),
                      GroupWorld(configs[i], copies_later, seed + i, order), operations,
                      [&](const GroupWorld& world) {
                          evicted += world.manager().metrics().evicted_pages;
                          hits += world.num_hits();
                      });
        }
    }
    std::printf("%lld operations, %lld hits, %lld pages evicted\n",
                static_cast<long long>(operations) * 2 * static_cast<long long>(configs.size()),
                static_cast<long long>(hits), static_cast<long long>(evicted));
}

}  // namespace

}  // namespace tests::stress::groups_oracle
