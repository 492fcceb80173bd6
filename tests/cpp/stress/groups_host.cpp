// SPDX-License-Identifier: Apache-2.0
// Random traffic over groups of layers with a host tier, compared with a slow oracle. The oracle
// has the content of the tree and of the tier's records, and computes token by token the hit that
// both serve together. After every call, each page that the tree or the tier can serve must have
// been written for exactly its tokens, layer by layer. Copies end later, or fail and leave garbage.
// --count: operations of each configuration.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "traffic/group_worlds.hpp"

namespace tests::stress::groups_host {

using kvcore::WritePolicy;

namespace {

kvcore::CacheConfig with_host(std::int64_t host_pages, kvcore::CacheConfig config) {
    config.host_pages = host_pages;
    return config;
}

void run(WritePolicy policy, std::uint64_t seed, std::int64_t operations) {
    std::vector<kvcore::CacheConfig> configs = {
        with_host(80, small_pool(4, 48, {full(), sliding(8)})),
        with_host(24, small_pool(4, 40, {full(), sliding(5), sliding(11)}, true, 1, 3)),
        with_host(60, small_pool(2, 44, {full(), sliding(4, 2)}, true, 0)),
        with_host(40, small_pool(4, 40, {full(2), chunked(12)})),
        with_host(60, small_pool(8, 40, {full(), sliding(6, 1, 2)}, true, 1, 2)),
        with_host(200, small_pool(8, 60, {full(2, 4), sliding(20), chunked(16)}, true, 3, 0, 2)),
        with_host(20, small_pool(4, 14, {sliding(7)})),
        with_host(30, small_pool(4, 24, {sliding(6), chunked(8)}, true, 2, 2, 2)),
        with_host(50, small_pool(2, 40, {sliding(5, 2), full()}, false)),
        with_host(300, small_pool(4, 40, {full(), sliding(9), chunked(8)}, true, 2, 1)),
        with_host(7, small_pool(4, 40, {full(), sliding(8)})),
        with_host(90, small_pool(4, 60, {full(3)}, true, 1, 0, 2)),
    };
    // Each configuration also with stores below the tier.
    for (std::size_t i = 0, n = configs.size(); i < n; ++i) {
        configs.push_back(configs[i]);
        configs.back().has_stores = true;
    }
    std::int64_t written = 0;
    std::int64_t filled = 0;
    std::int64_t complete = 0;
    std::int64_t loaded = 0;
    std::int64_t stored = 0;
    std::int64_t hits = 0;
    std::int64_t patches = 0;
    for (std::size_t i = 0; i < configs.size(); ++i) {
        configs[i].write_policy = policy;
        run_world("policy " + std::to_string(static_cast<int>(policy)) + ", configuration " +
                      std::to_string(i),
                  GroupWorld(configs[i], true, seed + i), operations, [&](const GroupWorld& world) {
                      loaded += world.manager().metrics().loaded_pages;
                      stored += world.manager().metrics().stored_pages;
                      hits += world.num_hits_below();
                      patches += world.num_patches();
                      if (!world.store()) return;
                      written += world.store()->num_written();
                      filled += world.store()->num_filled();
                      complete += world.store()->num_complete();
                      CHECK(operations < 1000 || world.store()->num_filled() > 0);
                  });
    }
    CHECK(operations < 1000 || (loaded > 0 && hits > 0 && patches > 0));
    CHECK(operations < 1000 || (written > 0 && filled > 0 && complete > 0));
    std::printf("%lld parts written, %lld columns filled, %lld hits completed\n",
                static_cast<long long>(written), static_cast<long long>(filled),
                static_cast<long long>(complete));
    std::printf("%lld operations, %lld hits below, %lld pages loaded, %lld columns patched, ",
                static_cast<long long>(operations) * static_cast<long long>(configs.size()),
                static_cast<long long>(hits), static_cast<long long>(loaded),
                static_cast<long long>(patches));
    std::printf("%lld pages stored\n", static_cast<long long>(stored));
}

TEST(random_calls_agree_with_the_oracle) {
    const std::uint64_t seed = check::seed_or(20261124);
    const std::int64_t operations = check::count_or(2000);
    run(WritePolicy::kWriteThrough, seed, operations);
    run(WritePolicy::kSelective, seed, operations / 2);
    run(WritePolicy::kWriteBack, seed, operations / 2);
}

}  // namespace

}  // namespace tests::stress::groups_host
