// SPDX-License-Identifier: Apache-2.0
// Random traffic over layers that keep a state, alone and beside windows: what each slot contains
// after every hit, fork, checkpoint and truncation, whether copies are made at once, later, or
// fail.
//   stress_states [seed] [operations of each configuration]
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "state_world.hpp"

using kvcore::CacheGroup;
using kvcore::GroupKind;

namespace {

kvcore::CacheConfig config(std::int32_t page_size, std::int64_t num_pages, std::int64_t num_slots,
                           std::vector<kvcore::StateGroup> states,
                           std::vector<CacheGroup> groups = {}, std::int32_t replicas = 1) {
    kvcore::CacheConfig config;
    config.page_size = page_size;
    config.num_pages = num_pages;
    config.max_sequences = 7;
    config.max_seq_len = 120;
    config.states = std::move(states);
    config.num_state_slots = num_slots;
    config.groups = std::move(groups);
    config.num_replicas = replicas;
    return config;
}

std::vector<kvcore::CacheConfig> configs() {
    const CacheGroup full{GroupKind::kFull, 0, 1, 0};
    const CacheGroup sliding{GroupKind::kSliding, 7, 1, 0};
    const CacheGroup chunked{GroupKind::kChunked, 8, 2, 0};
    std::vector<kvcore::CacheConfig> all = {
        config(4, 40, 14, {{0}}),
        config(4, 18, 8, {{0}}),
        config(4, 40, 7, {{8}}),
        config(2, 30, 40, {{4}, {6}}),
        config(1, 60, 20, {{0}}),
        config(4, 60, 16, {{8}}, {full, sliding}),
        config(4, 60, 12, {{0}}, {full, chunked}),
        config(4, 24, 12, {{12}}, {sliding}),
        config(4, 40, 10, {{8}, {0}}, {}, 2),
        config(4, 40, 10, {{8}}),
        config(4, 40, 10, {{8}}),
        config(8, 40, 12, {{16}}, {{GroupKind::kFull, 0, 1, 4}, sliding}, 2),
    };
    all[9].dedup = false;
    all[10].prefix_caching = false;
    all[7].reserve_chunks = true;
    return all;
}

}  // namespace

int main(int argc, char** argv) {
    const std::uint64_t seed = seed_from(argc, argv, 20261124);
    const std::int64_t operations = argc > 2 ? std::atoll(argv[2]) : 1500;
    std::int64_t sums[4] = {};
    std::size_t i = 0;
    for (const kvcore::CacheConfig& config : configs()) {
        for (const bool copies_later : {false, true}) {
            check::note =
                "configuration " + std::to_string(i) + (copies_later ? ", transfers" : "");
            StateWorld world(config, copies_later, seed + i);
            for (std::int64_t k = 0; k < operations; ++k) world.operate();
            world.end();
            sums[0] += world.num_hits;
            sums[1] += world.num_checkpoints;
            sums[2] += world.num_truncated;
            sums[3] += world.num_refused;
        }
        ++i;
    }
    std::printf("%lld hits, %lld checkpoints looked for, %lld truncated, %lld without a slot\n",
                static_cast<long long>(sums[0]), static_cast<long long>(sums[1]),
                static_cast<long long>(sums[2]), static_cast<long long>(sums[3]));
}
