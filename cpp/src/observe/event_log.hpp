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
#include "level/level.hpp"

namespace kvcore {

/// Pages that entered or left trees, in order: ids and tokens, which EventKeys turns into events.
struct PageNews {
    enum class Kind : std::uint8_t {
        kStored,   // ids, tokens, windows; after page `parent`
        kRemoved,  // ids, windows: the pages left the tree
        kLost,     // ids, windows: columns lost windows and stay in the tree
        kWritten,  // keys: written to stores
        kCleared,  // a replica
    };
    /// The bit for the full groups of a column; lower bits are windows.
    static constexpr std::uint8_t kFullPages{1U << Grouping::kMaxWindows};
    static constexpr BlockId kNoParent = -1;

    struct Item {
        Kind kind;
        std::int32_t tree;           // 2 * replica, + 1 for its host tier
        std::int64_t num_pages = 0;  // the next ids, or keys, after earlier items' ids
        BlockId parent = kNoParent;
        std::int32_t name = -1;  // in `names`, of kStored without parent; -1: ""
    };

    std::vector<Item> items;
    std::vector<BlockId> ids;
    std::vector<std::uint8_t> windows;  // of each id, with groups
    std::vector<TokenId> tokens;        // of stored pages
    std::vector<std::string> names;
    std::vector<PageKey> keys;

    void clear() noexcept;
};

/// The news of all trees of a manager since the last read.
///
/// Owns: the news, for at most `event_pages` pages. With more pages, or without memory, all news
/// are dropped, and nothing is recorded until the next read, which begins with the cached pages.
/// Invariant: news that are read in order give the content of the trees.
/// Threads: no locks of its own; CacheManager locks around it. The result of `begin_read` may be
/// read without the mutex until `end_read`.
/// Cost: per page, a copy of its id and tokens; `begin_read` O(1), or O(cached tokens) if news were
/// dropped.
class EventLog {
   public:
    /// Becomes the listener of the trees of `replicas`.
    EventLog(const CacheConfig& config, const Grouping& grouping,
             const std::vector<std::unique_ptr<Replica>>& replicas);
    ~EventLog();
    EventLog(const EventLog&) = delete;
    EventLog& operator=(const EventLog&) = delete;

    /// A call begins: its stored pages are not added to an earlier item.
    void seal() noexcept { is_sealed_ = true; }
    /// The pages of `keys` [n] were written to stores.
    void written(std::int32_t replica, const PageKey* keys, std::int64_t n) noexcept;
    /// All caches are about to be reset; pages that leave them are not recorded.
    void begin_reset() noexcept { is_deaf_ = true; }
    /// The caches were reset: the news begin with kCleared and the pages that are still cached.
    void end_reset() noexcept;

    /// Returns all news so far. Changes nothing if it throws std::bad_alloc.
    [[nodiscard]] const PageNews& begin_read();
    /// Ends the read. If not `done`, the next news begin with the cached pages.
    void end_read(bool done) noexcept;
    /// Adds the tokens of the news that are at most `highest` to `out`.
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
