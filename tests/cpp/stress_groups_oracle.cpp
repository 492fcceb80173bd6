// SPDX-License-Identifier: Apache-2.0
// Random traffic over groups of layers against a slow oracle, which knows what the tree has and
// says token by token what that can serve: the longest hit of every prompt, which pages of which
// bundle each request has after every call, how many are used, free and evicted, what a plan says.
//   stress_groups_oracle [seed] [operations of each configuration]
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "group_world.hpp"
#include "layer_groups.hpp"

namespace {

kvcore::CacheConfig config(std::int32_t page_size, std::int64_t num_pages,
                           const std::vector<kvcore::CacheGroup>& groups, bool dedup = true,
                           std::int32_t partial = 1, std::int64_t drafts = 0,
                           std::int32_t replicas = 1, bool caching = true) {
    kvcore::CacheConfig config;
    config.page_size = page_size;
    config.num_pages = num_pages;
    config.max_sequences = 8;
    config.max_seq_len = 120;
    config.groups = groups;
    config.dedup = dedup;
    config.partial_page_reuse = partial;
    config.max_draft_tokens = drafts;
    config.num_replicas = replicas;
    config.prefix_caching = caching;
    return config;
}

}  // namespace

int main(int argc, char** argv) {
    const std::uint64_t seed = seed_from(argc, argv, 20261123);
    const std::int64_t operations = argc > 2 ? std::atoll(argv[2]) : 1500;
    const std::vector<kvcore::CacheConfig> configs = {
        config(4, 60, {full(), sliding(8)}),
        config(2, 50, {full(), sliding(4, 2)}, true, 0),
        config(4, 40, {full(), sliding(5), sliding(11)}, true, 1, 3),
        config(4, 44, {full(2), chunked(12)}),
        config(4, 44, {full(), chunked(6)}),
        config(8, 40, {full(), sliding(6, 1, 2)}, true, 1, 2),
        config(8, 60, {full(2, 4), sliding(20), chunked(16)}, true, 3, 0, 2),
        config(4, 14, {sliding(7)}),
        config(4, 24, {sliding(6), chunked(8)}, true, 2, 2, 2),
        config(2, 40, {sliding(5, 2), full()}, false),
        config(4, 50, {full(), sliding(9)}, false, 1, 2),
        config(4, 40, {full(), sliding(1)}),
        config(4, 40, {full(), sliding(9), chunked(8)}, true, 2, 1),
        config(4, 40, {full(), sliding(8)}, true, 1, 0, 1, false),
        config(1, 60, {full(), sliding(3)}),
        config(16, 24, {full(), sliding(100)}),
        config(4, 60, {full(3)}, true, 1, 0, 2),
    };
    std::int64_t evicted = 0;
    std::int64_t hits = 0;
    for (std::size_t i = 0; i < configs.size(); ++i) {
        for (const bool copies_later : {false, true}) {
            check::note =
                "configuration " + std::to_string(i) + (copies_later ? ", transfers" : "");
            // One of the seven, another one for each.
            const auto order = static_cast<kvcore::EvictionOrder>((2 * i + copies_later) % 7);
            GroupWorld world(configs[i], copies_later, seed + i, order);
            for (std::int64_t k = 0; k < operations; ++k) world.operate();
            evicted += world.manager().metrics().evicted_pages;
            hits += world.num_hits();
            world.end();
        }
    }
    std::printf("%lld operations, %lld hits, %lld pages evicted\n",
                static_cast<long long>(operations) * 2 * static_cast<long long>(configs.size()),
                static_cast<long long>(hits), static_cast<long long>(evicted));
}
