// SPDX-License-Identifier: Apache-2.0
// Random traffic over layers that keep a state, alone and with windows: the content of each slot
// after every hit, fork, checkpoint and truncation, with copies that are made at once, later, or
// fail. With a host tier, also the content of each of its slots. --count: operations of each
// configuration.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "traffic/state_world.hpp"

namespace tests::stress::states {

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

// The same configurations with a tier: of few pages, of few slots, without slots.
std::vector<kvcore::CacheConfig> configs_with_host() {
    const CacheGroup full{GroupKind::kFull, 0, 1, 0};
    const CacheGroup sliding{GroupKind::kSliding, 7, 1, 0};
    const CacheGroup chunked{GroupKind::kChunked, 8, 2, 0};
    std::vector<kvcore::CacheConfig> all = {
        config(4, 30, 9, {{0}}),
        config(4, 30, 9, {{8}}),
        config(2, 30, 7, {{4}, {6}}),
        config(1, 60, 8, {{0}}),
        config(4, 50, 9, {{8}}, {full, sliding}),
        config(4, 50, 8, {{0}}, {full, chunked}),
        config(4, 22, 8, {{12}}, {sliding}),
        config(4, 30, 9, {{8}, {0}}, {}, 2),
        config(4, 30, 9, {{8}}),
        config(8, 40, 9, {{16}}, {{GroupKind::kFull, 0, 1, 4}, sliding}, 2),
        config(4, 30, 9, {{0}}),
        config(4, 30, 9, {{8}}, {full, sliding}),
    };
    const std::int64_t pages[] = {120, 20, 60, 90, 120, 60, 40, 60, 80, 120, 60, 60};
    const std::int64_t slots[] = {40, 5, 9, 20, 30, 12, 9, 12, 1, 20, 0, 0};
    for (std::size_t i = 0; i < all.size(); ++i) {
        all[i].host_pages = pages[i];
        all[i].num_host_state_slots = slots[i];
    }
    all[8].dedup = false;
    all[6].reserve_chunks = true;
    return all;
}

// Each request has a second slot, because its last tokens may be drafts.
std::vector<kvcore::CacheConfig> configs_with_drafts() {
    const CacheGroup full{GroupKind::kFull, 0, 1, 0};
    const CacheGroup sliding{GroupKind::kSliding, 7, 1, 0};
    std::vector<kvcore::CacheConfig> all = {
        config(4, 40, 20, {{0}}),
        config(4, 18, 14, {{0}}),
        config(2, 30, 40, {{4}, {6}}),
        config(1, 60, 20, {{0}}),
        config(4, 60, 16, {{8}}, {full, sliding}),
        config(4, 24, 15, {{12}}, {sliding}),
        config(4, 40, 14, {{8}, {0}}, {}, 2),
        config(4, 40, 16, {{0}}),
    };
    for (std::size_t i = 0; i < all.size(); ++i) {
        all[i].max_draft_tokens = 1 + static_cast<std::int64_t>(i % 4);
    }
    all[5].reserve_chunks = true;
    all[7].prefix_caching = false;
    return all;
}

/// The sums over all worlds.
struct Sums {
    void run(const kvcore::CacheConfig& config, bool copies_later, std::uint64_t seed,
             std::int64_t operations) {
        StateWorld world(config, copies_later, seed);
        for (std::int64_t k = 0; k < operations; ++k) world.operate();
        stats += world.stats();
        world.end();
        if (world.store()) {
            written += world.store()->num_written();
            filled += world.store()->num_filled();
            complete += world.store()->num_complete();
        }
        hits += world.num_hits;
        checkpoints += world.num_checkpoints;
        truncated += world.num_truncated;
        refused += world.num_refused;
        stored += world.num_stored;
        lost += world.num_lost;
        rejected += world.num_rejected;
        rerun_alone += world.num_rerun_alone;
    }
    void print() const {
        std::printf("%lld hits, %lld checkpoints looked for, %lld truncated, %lld without a slot\n",
                    static_cast<long long>(hits), static_cast<long long>(checkpoints),
                    static_cast<long long>(truncated), static_cast<long long>(refused));
        std::printf("%lld checkpoints stored, %lld looked for, %lld loaded, %lld requests lost\n",
                    static_cast<long long>(stats.stored_checkpoints),
                    static_cast<long long>(stored),
                    static_cast<long long>(stats.loaded_checkpoints), static_cast<long long>(lost));
        std::printf("%lld parts written, %lld columns filled, %lld hits completed\n",
                    static_cast<long long>(written), static_cast<long long>(filled),
                    static_cast<long long>(complete));
        std::printf("%lld runs rejected in part, %lld times what was accepted ran without drafts\n",
                    static_cast<long long>(rejected), static_cast<long long>(rerun_alone));
    }

    kvcore::StateStats stats;
    std::int64_t hits = 0;
    std::int64_t checkpoints = 0;
    std::int64_t truncated = 0;
    std::int64_t refused = 0;
    std::int64_t stored = 0;
    std::int64_t lost = 0;
    std::int64_t written = 0;  // parts, to a store
    std::int64_t filled = 0;   // columns, from the store
    std::int64_t complete = 0;
    std::int64_t rejected = 0;
    std::int64_t rerun_alone = 0;
};

TEST(slots_have_the_states_of_their_tokens) {
    const std::uint64_t seed = check::seed_or(20261124);
    const std::int64_t operations = check::count_or(1500);
    Sums sums;
    std::vector<kvcore::CacheConfig> with_host = configs_with_host();
    std::size_t i = 0;
    for (const kvcore::CacheConfig& config : configs()) {
        for (const bool copies_later : {false, true}) {
            check::note =
                "configuration " + std::to_string(i) + (copies_later ? ", transfers" : "");
            sums.run(config, copies_later, seed + i, operations);
        }
        ++i;
    }
    for (kvcore::CacheConfig config : configs_with_host()) {
        for (const bool has_stores : {false, true}) {
            check::note = "configuration " + std::to_string(i) +
                          (has_stores ? ", stores below" : ", host tier");
            config.has_stores = has_stores;
            sums.run(config, true, seed + i, operations);
        }
        for (const auto policy :
             {kvcore::WritePolicy::kWriteBack, kvcore::WritePolicy::kSelective}) {
            check::note = "configuration " + std::to_string(i) + ", write policy " +
                          std::to_string(static_cast<int>(policy));
            config.write_policy = policy;
            sums.run(config, true, seed + i, operations / 2);
        }
        ++i;
    }
    for (kvcore::CacheConfig config : configs_with_drafts()) {
        for (const bool copies_later : {false, true}) {
            check::note = "configuration " + std::to_string(i) + ", drafts" +
                          (copies_later ? ", transfers" : "");
            sums.run(config, copies_later, seed + i, operations);
        }
        check::note = "configuration " + std::to_string(i) + ", drafts, host tier";
        config.host_pages = config.prefix_caching ? 60 : 0;
        config.num_host_state_slots = config.prefix_caching ? 12 : 0;
        sums.run(config, true, seed + i, operations);
        ++i;
    }
    sums.print();
    CHECK(sums.rejected > 0 && sums.rerun_alone > 0);
    CHECK(sums.stats.loaded_checkpoints > 0 && sums.stored > 0 && sums.lost > 0);
    CHECK(sums.written > 0 && sums.filled > 0 && sums.complete > 0);
}

}  // namespace

}  // namespace tests::stress::states
