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
#include "support/memory.hpp"

namespace kvcore {

/// Turns news into events: page ids become keys.
///
/// Owns: the key of each page as of the news read so far; the namespace of each page in a
/// namespace; the extra keys of each page whose extra keys reach into later pages.
/// Invariant: if the key of a page is known, the key of the page before it is known.
/// Threads: no locks of its own; CacheManager has one reader at a time.
/// Memory: `read` throws std::bad_alloc; the next news must begin with kCleared after that.
/// Cost: hashing the tokens of stored pages, O(1) for other pages; 32 bytes a page of each tier.
class EventKeys {
   public:
    EventKeys(const CacheConfig& config, const Grouping& grouping,
              const std::vector<std::unique_ptr<Replica>>& replicas);

    [[nodiscard]] std::vector<CacheEvent> read(const PageNews& news);

   private:
    using Name = std::shared_ptr<const std::string>;
    /// An extra key; its start and end count from the first token of a page.
    struct Reach {
        std::int64_t start;
        std::int64_t end;
        std::int64_t length;  // of the whole extra key
        std::string bytes;
    };
    struct Tree {
        explicit Tree(std::int64_t end) : keys(static_cast<std::size_t>(end)) {}

        ZeroedArray<PageKey> keys;
        std::unordered_map<BlockId, Name> names;                  // missing: ""
        std::unordered_map<BlockId, std::vector<Reach>> reaches;  // from the next page on
    };
    /// The read position of the next item.
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
    std::vector<std::unique_ptr<Tree>> trees_;  // as in EventLog
    CacheEvent made_;                           // of all groups together
    std::vector<CacheEvent> events_;
};

}  // namespace kvcore
