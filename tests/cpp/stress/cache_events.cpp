// SPDX-License-Identifier: Apache-2.0
// Random traffic over groups of layers, with and without a host tier. At every point, a reader of
// events can list exactly the pages that each group has cached in each tier, even if its queue is
// too short.
// --count: operations of each configuration.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "oracle/event_mirror.hpp"
#include "traffic/group_worlds.hpp"

namespace tests::stress::cache_events {

namespace {

kvcore::CacheConfig with_host(std::int64_t host_pages, kvcore::CacheConfig config) {
    config.host_pages = host_pages;
    return config;
}

TEST(a_reader_of_events_knows_the_trees) {
    const std::uint64_t seed = check::seed_or(20261123);
    const std::int64_t operations = check::count_or(1500);
    std::vector<kvcore::CacheConfig> configs = {
        small_pool(4, 60, {full(), sliding(8)}),
        small_pool(4, 40, {full(), sliding(5), sliding(11)}, true, 1, 3),
        small_pool(4, 44, {full(2), chunked(12)}),
        small_pool(8, 40, {full(), sliding(6, 1, 2)}, true, 1, 2),
        small_pool(8, 60, {full(2, 4), sliding(20), chunked(16)}, true, 3, 0, 2),
        small_pool(4, 14, {sliding(7)}),
        small_pool(2, 40, {sliding(5, 2), full()}, false),
        small_pool(4, 60, {full(3)}, true, 1, 0, 2),
        with_host(80, small_pool(4, 48, {full(), sliding(8)})),
        with_host(24, small_pool(4, 40, {full(), sliding(5), sliding(11)}, true, 1, 3)),
        with_host(20, small_pool(4, 14, {sliding(7)})),
        with_host(50, small_pool(2, 40, {sliding(5, 2), full()}, false)),
        with_host(300, small_pool(4, 40, {full(), sliding(9), chunked(8)}, true, 2, 1)),
    };
    configs.push_back(configs[8]);
    configs.back().write_policy = kvcore::WritePolicy::kWriteBack;
    std::int64_t events = 0;
    for (std::size_t i = 0; i < configs.size(); ++i) {
        for (const std::int64_t most : {1 << 20, 12}) {
            kvcore::CacheConfig config = configs[i];
            config.event_pages = most;
            check::note = "configuration " + std::to_string(i) + ", " + std::to_string(most);
            GroupWorld world(config, true, seed + i);
            EventMirror mirror(config);
            for (std::int64_t k = 0; k < operations; ++k) {
                world.operate();
                if (k % 3 != 0) continue;
                mirror.read(world.manager().take_events());
                CHECK(mirror.pages() == mirror.truth(world.manager()));
            }
            world.end();
            mirror.read(world.manager().take_events());
            CHECK(mirror.pages() == mirror.truth(world.manager()));
            events += mirror.num_events();
        }
    }
    CHECK(operations < 1000 || events > 10000);
    std::printf("%lld operations, %lld events\n",
                static_cast<long long>(operations) * 2 * static_cast<long long>(configs.size()),
                static_cast<long long>(events));
}

}  // namespace

}  // namespace tests::stress::cache_events
