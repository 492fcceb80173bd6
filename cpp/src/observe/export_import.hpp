// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/cached_columns.hpp"
#include "level/level.hpp"
#include "level/refs.hpp"
#include "support/memory.hpp"

namespace kvcore {

/// Columns of the tree whose bytes are copied elsewhere: see CacheExport.
///
/// Owns: a hold on their path, a read of all their windows, and holds on their checkpoints.
/// Threads: no locks of its own; CacheManager locks around it. Cost: O(columns).
class ColumnExport {
   public:
    /// Columns `first` .. at.depth - 1 on the path to `at`: at least one column. Throws
    /// std::bad_alloc.
    ColumnExport(Replica& replica, TreePosition at, std::int32_t first);
    ColumnExport(const ColumnExport&) = delete;
    ColumnExport& operator=(const ColumnExport&) = delete;
    ~ColumnExport();

    [[nodiscard]] const Replica& home() const noexcept { return home_; }
    [[nodiscard]] const std::vector<BlockId>& ids() const noexcept { return ids_; }
    [[nodiscard]] const std::vector<CachedColumn>& columns() const noexcept { return columns_; }
    [[nodiscard]] const std::vector<BlockId>& pages() const noexcept { return pages_; }
    /// The last columns of ids(), which the tree no longer has.
    [[nodiscard]] PrefixRef::Pages references() const noexcept { return path_.references(); }

   private:
    [[nodiscard]] CachedColumn describe(BlockId column) const noexcept;

    Replica& home_;
    std::vector<BlockId> ids_;
    std::vector<CachedColumn> columns_;
    std::vector<BlockId> pages_;
    std::vector<StateHold> states_;
    PrefixRef path_;
};

/// Columns that are brought into the tree: see CacheImport.
///
/// A column that the tree lacks is taken as a whole. If the tree has the column and lacks some of
/// its windows, these windows come in a separate column and are merged, like pages that arrive from
/// a tier.
///
/// Owns: a reference to each of its own columns, whose windows it reads; slots; until it is
/// published, a place at the end of the prefix before its columns. The import is cancelled if that
/// prefix is forgotten, or the caches are reset.
/// Threads: no locks of its own; CacheManager locks around it. Cost: O(columns).
class ColumnImport {
   public:
    /// `offered` [n / column - first]: the columns of the caller. Throws std::bad_alloc, or
    /// IntegrityError if counted pages are missing, and changes nothing.
    ColumnImport(Replica& replica, const ColumnSpan& span, const CachedColumn* offered);
    ColumnImport(const ColumnImport&) = delete;
    ColumnImport& operator=(const ColumnImport&) = delete;
    ~ColumnImport();

    [[nodiscard]] ImportStatus status() const noexcept { return status_; }
    [[nodiscard]] const Replica& home() const noexcept { return home_; }
    [[nodiscard]] const std::vector<CachedColumn>& columns() const noexcept { return columns_; }
    [[nodiscard]] const std::vector<BlockId>& pages() const noexcept { return pages_; }
    /// The tokens of the columns that it takes or completes.
    [[nodiscard]] const std::vector<TokenId>& tokens() const noexcept { return tokens_; }
    /// Its own column for each column; -1 if it needs no own column.
    [[nodiscard]] const std::vector<BlockId>& own() const noexcept { return own_; }

    /// Makes the columns findable; `more`: their run will grow. PageRefs on published pages become
    /// pins in the tree. If another request cached the column of a held page meanwhile, the page
    /// stays with its PageRef. With quotas, if another request cached columns meanwhile, columns
    /// from the first held column on are given back. Returns false if the caches were reset since.
    /// Changes nothing if it throws std::bad_alloc.
    [[nodiscard]] bool publish(bool more);

   private:
    struct Budget {
        std::int64_t pages = 0;
        std::int64_t columns = 0;
        std::int64_t slots = 0;
    };
    struct Arrived;

    void find_place(const ColumnSpan& span, std::int32_t n);
    [[nodiscard]] Budget budget() const;
    void choose(const CachedColumn* offered, std::size_t n, Budget budget);
    [[nodiscard]] std::int64_t count_pages(std::size_t i) const noexcept;
    [[nodiscard]] bool is_new(std::size_t i) const noexcept {
        return static_cast<std::int32_t>(i) >= num_known_;
    }
    void take();
    void take_column(std::size_t i);
    void give_back(std::size_t from) noexcept;
    [[nodiscard]] bool is_held(std::size_t i) const noexcept {
        return own_[i] >= 0 && home_.pool.ref_count(own_[i]) > 1;
    }
    [[nodiscard]] std::size_t count_publishable() const noexcept;
    void settle(Arrived& arrived, TreeNode* end) noexcept;
    void entrust_to_tree(std::size_t i, TreeNode* end) noexcept;
    void merge(std::size_t i, Arrived& arrived) noexcept;
    void leave_windows(const Arrived& arrived, TreeNode* end) noexcept;
    void leave_column(std::size_t i, const Arrived& arrived) noexcept;
    void hand_over_states(const Arrived& arrived, TreeNode* end) noexcept;
    void tell_owners(const Arrived& arrived, TreeNode* end) noexcept;

    Replica& home_;
    ImportStatus status_ = ImportStatus::kTaken;
    std::int32_t first_;
    std::int32_t num_known_ = 0;  // columns that the tree had at the start
    PrefixRef place_;             // the end of these columns; empty: cancelled
    std::vector<TokenId> tokens_;
    std::vector<CachedColumn> columns_;
    std::vector<CachedColumn> offered_;  // the same, as offered
    std::vector<BlockId> own_;
    std::vector<BlockId> pages_;
};

/// All exports and imports of the caches of a manager, and the number of resets.
///
/// Owns: nothing; the code that copies owns the exports and imports.
/// Threads: no locks of its own; CacheManager locks around it. Cost: O(exports and imports) per
/// method.
class CacheCopies {
   public:
    [[nodiscard]] const std::vector<ColumnExport*>& exports() const noexcept { return exports_; }
    [[nodiscard]] const std::vector<ColumnImport*>& imports() const noexcept { return imports_; }
    [[nodiscard]] std::uint64_t num_resets() const noexcept { return num_resets_; }

    /// Reserves memory for one more export and one more import. Throws std::bad_alloc.
    void make_room() {
        kvcore::make_room(exports_, 1);
        kvcore::make_room(imports_, 1);
    }
    void add(ColumnExport& one) noexcept { exports_.push_back(&one); }
    void add(ColumnImport& one) noexcept { imports_.push_back(&one); }
    void remove(const ColumnExport& one) noexcept { erase(exports_, &one); }
    void remove(const ColumnImport& one) noexcept { erase(imports_, &one); }

    void note_reset() noexcept { ++num_resets_; }

   private:
    template <class T>
    static void erase(std::vector<T*>& all, const T* one) noexcept {
        all.erase(std::find(all.begin(), all.end(), one));
    }

    std::vector<ColumnExport*> exports_;
    std::vector<ColumnImport*> imports_;
    std::uint64_t num_resets_ = 0;
};

}  // namespace kvcore
