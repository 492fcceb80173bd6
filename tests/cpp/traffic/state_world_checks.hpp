// SPDX-License-Identifier: Apache-2.0
// Part of state_world.hpp: the comparisons with the oracle after each verb.
#pragma once

#include "traffic/state_world.hpp"

// Check that a tier record of the row's tokens has the checkpoint made at their end. Skip the check
// if the store may hold the slots.
inline void StateWorld::check_stored(const Row& row, std::int64_t n) {
    const Cached stored = records(row.replica);
    const auto record = stored.find(row.request.digest(n));
    if (record == stored.end() || config().num_host_state_slots == 0) return;
    if (store_ && !store_->is_idle()) return;  // the store may hold the slots
    CHECK(record->second.state >= 0);
    ++num_stored;
}

inline void StateWorld::check_state() {
    manager_.check_integrity();
    for (std::int32_t r = 0; r < config().num_replicas; ++r) {
        const Cached now = cached(r);
        std::set<std::int32_t> seen;
        for (const auto& [digest, column] : now) {
            if (column.state < 0) continue;
            CHECK(seen.insert(column.state).second);
            CHECK_EQ(item(item(slots_, r), column.state), digest);
        }
        for (const Row& row : live_) {
            if (row.replica != r || manager_.state_of(row.request.sequence) < 0) continue;
            CHECK(seen.insert(manager_.state_of(row.request.sequence)).second);
        }
        std::set<std::int32_t> stored;
        for (const auto& [digest, record] : records(r)) {
            if (record.state < 0) continue;
            CHECK(stored.insert(record.state).second);
            CHECK_EQ(item(item(host_slots_, r), record.state), digest);
        }
        const kvcore::StateStats stats = manager_.state_stats(r);
        CHECK_EQ(stats.host_checkpoints, static_cast<std::int64_t>(stored.size()));
        CHECK(stats.used_slots + stats.checkpoints >= static_cast<std::int64_t>(seen.size()));
        const Request asked(random_.chance(10) ? "other" : "", prompt());
        const std::int64_t columns =
            manager_.match(r, asked.name_space(), asked.tokens().data(), asked.end());
        CHECK_EQ(columns * page(), hit_of(now, asked, asked.end()));
    }
}
