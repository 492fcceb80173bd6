// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvcore/cache_config.hpp"
#include "kvcore/page_keys.hpp"
#include "kvcore/prefix_tree.hpp"
#include "layers/window_listener.hpp"
#include "level/replica.hpp"

namespace kvcore {

/// Pages that entered or left trees, one after the other: ids and tokens, from which EventKeys
/// makes events.
struct PageNews {
    enum class Kind : std::uint8_t {
        kStored,   // ids, tokens, windows, behind `parent`
        kRemoved,  // ids, windows: they left the tree
        kLost,     // ids, windows: they are still there
        kWritten,  // keys: to stores
        kCleared,  // a replica
    };
    /// The full groups of a column; windows are the bits below.
    static constexpr std::uint8_t kFullPages{1U << Grouping::kMaxWindows};
    static constexpr BlockId kNoParent = -1;

    struct Item {
        Kind kind;
        std::int32_t tree;           // 2 * replica, + 1 that of its host tier
        std::int64_t num_pages = 0;  // those behind the ids, or keys, of items in front of it
        BlockId parent = kNoParent;
        std::int32_t name = -1;  // in `names`, of stored ones without parent; -1: ""
    };

    std::vector<Item> items;
    std::vector<BlockId> ids;
    std::vector<std::uint8_t> windows;  // of each id, with groups
    std::vector<TokenId> tokens;        // of stored ones
    std::vector<std::string> names;
    std::vector<PageKey> keys;

    void clear() noexcept;
};

/// The news of all trees of a manager since they were read last.
///
/// Owns: the news, at most so many pages. With more of them, or without memory for one, all are
/// dropped, and until they are read next nothing is noted: then they begin with what is cached.
/// Invariant: read one after the other, they say what the trees have.
/// Threads: none of its own; CacheManager locks around it. What `begin_read` returned may be read
/// without the mutex until `end_read`.
/// Cost: of a page copying its id and tokens; `begin_read` O(1), or O(cached tokens) where news
/// were dropped.
class EventLog {
   public:
    /// Tells the trees of `replicas` that it listens.
    EventLog(const CacheConfig& config, const Grouping& grouping,
             const std::vector<std::unique_ptr<Replica>>& replicas);
    ~EventLog();
    EventLog(const EventLog&) = delete;
    EventLog& operator=(const EventLog&) = delete;

    /// A call begins: what it stores is no part of what was stored before.
    void seal() noexcept { is_sealed_ = true; }
    /// Pages [n] are in stores.
    void written(std::int32_t replica, const PageKey* keys, std::int64_t n) noexcept;
    /// All caches are about to be reset; what goes is no news.
    void begin_reset() noexcept { is_deaf_ = true; }
    /// They were: the news begin with that, and what is cached still.
    void end_reset() noexcept;

    /// All news so far. Throws std::bad_alloc, and has changed nothing.
    [[nodiscard]] const PageNews& begin_read();
    /// They were read, or not: then the next ones begin with what is cached.
    void end_read(bool done) noexcept;
    /// Tokens of news that are at most `highest` are added to `out`.
    void find_tokens_up_to(TokenId highest, std::vector<TokenId>& out) const;

   private:
    class Recorder;

    [[nodiscard]] bool is_deaf() const noexcept { return is_deaf_ || has_dropped_; }
    void drop() noexcept;
    void note_all();
    void note_stored(const Recorder& tree, const TreeNode* node, std::int32_t first,
                     std::int32_t n);
    void note_gone(const Recorder& tree, PageNews::Kind kind, const BlockId* ids, std::int32_t n,
                   const std::uint8_t* windows);
    [[nodiscard]] bool goes_on(const PageNews::Item& item) const noexcept;
    template <class Note>
    void note(std::int64_t pages, const Note& note) noexcept;

    const Grouping& grouping_;
    const std::int64_t most_pages_;
    std::vector<std::unique_ptr<Recorder>> trees_;  // 2 * replica, + 1: nullptr without host tier
    PageNews news_;
    PageNews reading_;
    bool is_sealed_ = true;
    bool is_deaf_ = false;
    bool has_dropped_ = false;
};

}  // namespace kvcore
