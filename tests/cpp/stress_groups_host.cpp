// SPDX-License-Identifier: Apache-2.0
// Random traffic over groups of layers with a host tier against a slow oracle, which knows what the
// tree has and what the tier's records have, and says token by token what both serve together.
// After every call all that either can give to anybody was written for just those tokens, layer by
// layer; copies end some time, or fail and leave rubbish behind.
//   stress_groups_host [seed] [operations of each configuration]
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "group_world.hpp"

using kvcore::CacheGroup;
using kvcore::GroupKind;

namespace {

CacheGroup full(std::int32_t num_bundles = 1, std::int32_t page_size = 0) {
    return {GroupKind::kFull, 0, num_bundles, page_size};
}
CacheGroup sliding(std::int64_t window, std::int32_t num_bundles = 1, std::int32_t page_size = 0) {
    return {GroupKind::kSliding, window, num_bundles, page_size};
}
CacheGroup chunked(std::int64_t chunk, std::int32_t num_bundles = 1) {
    return {GroupKind::kChunked, chunk, num_bundles, 0};
}

kvcore::CacheConfig config(std::int32_t page_size, std::int64_t num_pages, std::int64_t host_pages,
                           const std::vector<CacheGroup>& groups, bool dedup = true,
                           std::int32_t partial = 1, std::int64_t drafts = 0,
                           std::int32_t replicas = 1) {
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
    config.host_pages = host_pages;
    return config;
}

}  // namespace

int main(int argc, char** argv) {
    const std::uint64_t seed = seed_from(argc, argv, 20261124);
    const std::int64_t operations = argc > 2 ? std::atoll(argv[2]) : 3000;
    const std::vector<kvcore::CacheConfig> configs = {
        config(4, 48, 80, {full(), sliding(8)}),
        config(4, 40, 24, {full(), sliding(5), sliding(11)}, true, 1, 3),
        config(2, 44, 60, {full(), sliding(4, 2)}, true, 0),
        config(4, 40, 40, {full(2), chunked(12)}),
        config(8, 40, 60, {full(), sliding(6, 1, 2)}, true, 1, 2),
        config(8, 60, 200, {full(2, 4), sliding(20), chunked(16)}, true, 3, 0, 2),
        config(4, 14, 20, {sliding(7)}),
        config(4, 24, 30, {sliding(6), chunked(8)}, true, 2, 2, 2),
        config(2, 40, 50, {sliding(5, 2), full()}, false),
        config(4, 40, 300, {full(), sliding(9), chunked(8)}, true, 2, 1),
        config(4, 40, 7, {full(), sliding(8)}),
        config(4, 60, 90, {full(3)}, true, 1, 0, 2),
    };
    std::int64_t loaded = 0;
    std::int64_t stored = 0;
    std::int64_t hits = 0;
    std::int64_t patches = 0;
    for (std::size_t i = 0; i < configs.size(); ++i) {
        check::note = "configuration " + std::to_string(i);
        GroupWorld world(configs[i], true, seed + i);
        for (std::int64_t k = 0; k < operations; ++k) world.operate();
        loaded += world.manager().metrics().loaded_pages;
        stored += world.manager().metrics().stored_pages;
        hits += world.num_hits_below();
        patches += world.num_patches();
        world.end();
    }
    CHECK(loaded > 0 && hits > 0 && patches > 0);
    std::printf("%lld operations, %lld hits below, %lld pages loaded, %lld columns patched, ",
                static_cast<long long>(operations) * static_cast<long long>(configs.size()),
                static_cast<long long>(hits), static_cast<long long>(loaded),
                static_cast<long long>(patches));
    std::printf("%lld pages stored\n", static_cast<long long>(stored));
}
