// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "kvcore/page_keys.hpp"
#include "kvcore/store_moves.hpp"
#include "support/host_fixture.hpp"

using Keys = std::vector<kvcore::PageKey>;
using Parts = std::vector<std::vector<std::int32_t>>;

inline kvcore::CacheConfig with_groups(std::vector<kvcore::CacheGroup> groups,
                                       std::int64_t host_pages = 64) {
    kvcore::CacheConfig config = HostFixture::config(32, host_pages);
    config.groups = std::move(groups);
    return config;
}

inline kvcore::CacheConfig with_states(std::int64_t host_slots) {
    kvcore::CacheConfig config = HostFixture::config(12, 64);
    config.max_sequences = 3;
    config.states = {{0}};
    config.num_state_slots = 6;
    config.num_host_state_slots = host_slots;
    return config;
}

/// A manager with stores below its host tier; the test calls the verbs of the stores.
class StoreFixture : public HostFixture {
   public:
    explicit StoreFixture(const kvcore::CacheConfig& config)
        : HostFixture(with_stores(config)), page_size_(config.page_size) {}
    StoreFixture(std::int64_t num_blocks, std::int64_t host_pages)
        : StoreFixture(config(num_blocks, host_pages)) {}

    static kvcore::CacheConfig with_stores(kvcore::CacheConfig config) {
        config.has_stores = true;
        return config;
    }
    /// The keys of a prompt, computed without the manager.
    [[nodiscard]] Keys keys(const Tokens& tokens, kvcore::KeyOptions options = {}) const {
        kvcore::KeyChain chain(page_size_, std::move(options));
        chain.extend(tokens.data(), count(tokens));
        return chain.keys();
    }
    kvcore::StoreMoves take(std::int64_t most = 1000) {
        kvcore::StoreMoves moves;
        const bool has = manager.take_writes(most, moves);
        CHECK_EQ(has, moves.ticket != 0);
        manager.check_integrity();
        return moves;
    }
    void finish_writes(const kvcore::StoreMoves& moves) {
        manager.finish_writes(moves.ticket);
        manager.check_integrity();
    }
    /// Write all waiting columns; return their number.
    std::int64_t write_all() {
        std::int64_t n = 0;
        for (auto moves = take(); moves.ticket != 0; moves = take()) {
            n += count(moves.keys);
            finish_writes(moves);
        }
        return n;
    }
    kvcore::StoreSearch search(const Tokens& tokens, const std::string& name = "") {
        return manager.search_below(0, name, tokens.data(), count(tokens));
    }
    std::vector<kvcore::ColumnParts> needed(const Tokens& tokens, std::int32_t end) {
        return manager.needed_below(0, "", tokens.data(), end);
    }
    kvcore::StoreMoves begin_fill(const Tokens& tokens, std::int32_t end,
                                  const std::vector<kvcore::ColumnParts>& items) {
        const Keys all = keys(tokens);
        Keys own;
        for (const kvcore::ColumnParts& each : items)
            own.push_back(item(all, std::max(0, each.column)));
        kvcore::StoreMoves moves;
        manager.begin_fill(0, "", tokens.data(), end, items.data(), own.data(), count(items),
                           moves);
        manager.check_integrity();
        return moves;
    }
    /// Begin a fill of all needed columns.
    kvcore::StoreMoves begin_fill(const Tokens& tokens) {
        const auto end = static_cast<std::int32_t>(count(tokens) / page_size_);
        return begin_fill(tokens, end, needed(tokens, end));
    }
    void finish_fill(const kvcore::StoreMoves& moves, std::int64_t arrived, bool forward = false) {
        manager.finish_fill(moves.ticket, arrived, forward);
        manager.check_integrity();
    }
    static Parts parts_of(const kvcore::StoreMoves& moves) {
        Parts parts;
        std::int32_t k = 0;
        for (const std::int32_t end : moves.ends) {
            parts.emplace_back();
            for (; k < end; ++k) parts.back().push_back(item(moves.parts, k).part);
        }
        return parts;
    }

   private:
    std::int64_t page_size_;
};
