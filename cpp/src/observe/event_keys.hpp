// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "keys/path_keys.hpp"
#include "kvcore/cache_events.hpp"
#include "observe/event_log.hpp"

namespace kvcore {

/// Makes events of news: ids become keys.
///
/// Owns: the key of each page as of the news read so far, and of those with a namespace, or with
/// extra keys that reach behind them, these. Invariant: the page in front of one that it knows is
/// known.
/// Threads: none of its own; CacheManager has one reader at a time.
/// Memory: `read` throws std::bad_alloc; then what follows has to begin with kCleared.
/// Cost: hashing the tokens of stored pages, O(1) for others; 32 bytes a page of each tier.
class EventKeys {
   public:
    EventKeys(const CacheConfig& config, const Grouping& grouping,
              const std::vector<std::unique_ptr<Replica>>& replicas);

    [[nodiscard]] std::vector<CacheEvent> read(const PageNews& news);

   private:
    using Name = std::shared_ptr<const std::string>;
    /// An extra key, by where it starts and ends from the first token on of some page.
    struct Reach {
        std::int64_t start;
        std::int64_t end;
        std::int64_t length;  // of the whole extra key
        std::string bytes;
    };
    struct Tree {
        explicit Tree(std::int64_t end) : keys(static_cast<std::size_t>(end)) {}

        ZeroedArray<PageKey> keys;
        std::unordered_map<BlockId, Name> names;                  // none: ""
        std::unordered_map<BlockId, std::vector<Reach>> reaches;  // from the page behind on
    };
    /// Where the next item is read.
    struct Cursor {
        const BlockId* ids;
        const std::uint8_t* windows;  // nullptr without groups
        const TokenId* tokens;
        const PageKey* keys;
    };

    void read_stored(const PageNews& news, const PageNews::Item& item, Cursor at);
    void read_gone(const PageNews::Item& item, Cursor at);
    void key_page(Tree& tree, BlockId id, const PageKey& before, std::vector<Reach>& reaches,
                  TokenId* tokens, std::int32_t page);
    void begin_extras(TokenId* tokens, std::vector<Reach>& reaches) const;
    void split_stored(const PageNews::Item& item, Cursor at, const CacheEvent& all);
    void add_part(const CacheEvent& all, std::int32_t group, std::int64_t first, std::int64_t last);
    [[nodiscard]] std::uint8_t bit_of(std::size_t group) const noexcept;
    [[nodiscard]] static CacheEvent event(const PageNews::Item& item);

    const Grouping& grouping_;
    const StandIns* stand_ins_;
    PathKeys paths_;
    const std::size_t page_size_;
    std::vector<std::unique_ptr<Tree>> trees_;  // as of EventLog
    CacheEvent made_;                           // of all groups together
    std::vector<CacheEvent> events_;
};

}  // namespace kvcore
