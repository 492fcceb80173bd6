// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/prefix_tree.hpp"
#include "kvcore/request.hpp"
#include "kvcore/types.hpp"
#include "level/replica.hpp"
#include "support/make_room.hpp"
#include "tree/tree_pin.hpp"

namespace kvcore {

/// The pages of a sequence, in order, and the owner of each page.
///
///     column  0              committed         read_only_end       size
///             |  in the tree     |  own; forks      |  own, only this  |
///             |  (or own         |  may share it    |  row has it      |
///             |   duplicates)    |                  |                  |
///             |<-- not written in place: replaced -->|<-- written here ->|
///
/// An own duplicate is an own page in a committed column: the tree has another page with the same
/// tokens, and the row keeps its own page (deduplication off).
///
/// Columns from `commit_limit` on are not put into the tree: the content of the column at the
/// limit, or content that was read to write it, was forgotten (see CacheManager::forget) and must
/// be written again first. Columns after the limit may be committed; the tree keeps them in
/// forgotten runs, which no lookup finds.
///
/// Owns: a reference to each own page, and a pin on the tree node at which the committed columns
/// end. A row does not store its pool: the owner must call `clear` with the pool.
/// Invariant: committed <= read_only_end <= size, but read_only_end = committed if nothing is
/// reserved. The committed columns except own duplicates are the tree's pages on the path to
/// `node`. `version` changes when a page is replaced or dropped, not when a page is added.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: O(1); O(columns changed) for functions that take columns.
class PageRow {
   public:
    [[nodiscard]] std::int32_t size() const noexcept {
        return static_cast<std::int32_t>(pages_.size());
    }
    [[nodiscard]] bool empty() const noexcept { return pages_.empty(); }
    [[nodiscard]] BlockId operator[](std::int32_t column) const noexcept {
        return pages_[static_cast<std::size_t>(column)];
    }
    [[nodiscard]] const std::vector<BlockId>& ids() const noexcept { return pages_; }
    [[nodiscard]] std::int32_t committed() const noexcept { return committed_; }
    [[nodiscard]] std::int32_t read_only_end() const noexcept { return read_only_end_; }
    [[nodiscard]] std::int32_t commit_limit() const noexcept { return commit_limit_; }
    /// Returns true if a committed column was forgotten.
    [[nodiscard]] bool holds_forgotten() const noexcept { return commit_limit_ < committed_; }
    /// The columns of the own duplicates, ascending.
    [[nodiscard]] const std::vector<std::int32_t>& own_duplicates() const noexcept {
        return own_duplicates_;
    }
    /// The tree node at which the committed columns end; nullptr before the row has a place in the
    /// tree.
    [[nodiscard]] TreeNode* node() const noexcept { return place_.node(); }
    [[nodiscard]] std::uint32_t version() const noexcept { return version_; }
    /// The pages that a block table shows.
    [[nodiscard]] RowPages view() const noexcept {
        return {pages_.data(), size(), version_, &changes_};
    }
    [[nodiscard]] const RowChanges& changes() const noexcept { return changes_; }

    /// Returns true if the row has its own reference to the page of a column.
    [[nodiscard]] bool is_own(std::int32_t column) const noexcept {
        return column >= committed_ ||
               std::binary_search(own_duplicates_.begin(), own_duplicates_.end(), column);
    }
    /// Returns true if the column has the page and is not committed.
    [[nodiscard]] bool has_uncommitted(std::int32_t column, BlockId page) const noexcept {
        return committed_ <= column && has(column, page);
    }
    [[nodiscard]] bool has(std::int32_t column, BlockId page) const noexcept {
        return size() > column && (*this)[column] == page;
    }
    /// Returns the first column from `from` on that has a page, or size().
    [[nodiscard]] std::int32_t find(BlockId page, std::int32_t from = 0) const noexcept {
        return static_cast<std::int32_t>(std::find(pages_.begin() + from, pages_.end(), page) -
                                         pages_.begin());
    }
    /// Returns the number of leading columns whose pages are all the tree's.
    [[nodiscard]] std::int32_t num_cached() const noexcept {
        return own_duplicates_.empty() ? committed_ : own_duplicates_.front();
    }
    /// Returns the first column from `committed` to `end` whose page has another holder; `end` if
    /// no column is shared.
    [[nodiscard]] std::int32_t find_shared(const BlockPool& pool, std::int32_t end) const;

    /// Makes room, so that adding `n` columns cannot fail. Throws std::bad_alloc.
    void make_room(std::size_t n) { kvcore::make_room(pages_, n); }
    void make_room_for_duplicates(std::size_t n) { kvcore::make_room(own_duplicates_, n); }
    /// Adds columns; the caller fills in their ids. The row has room.
    [[nodiscard]] BlockId* extend(std::int64_t n) noexcept {
        const std::size_t held = pages_.size();
        if (n == 1) {  // a decode step
            pages_.push_back(0);
        } else {
            pages_.resize(held + static_cast<std::size_t>(n));
        }
        return pages_.data() + held;
    }
    /// Adds columns with pages from the pool. The row has room. Throws IntegrityError if the pool
    /// has too few pages.
    void take(Replica& home, std::int64_t n) {
        home.require_pages(n);
        home.take_pages(n, extend(n));
    }

    /// Gives the row its first place in the tree.
    void place_at(TreePin place) noexcept { place_ = std::move(place); }
    /// Replaces the first `columns` by the tree's pages on the path to `place`, and gives back the
    /// row's own pages in these columns.
    void take_hit(Replica& home, TreePin place, std::int32_t columns) noexcept;

    /// Columns below `end` are not written in place from now on.
    void make_read_only(std::int32_t end) noexcept {
        read_only_end_ = std::max(read_only_end_, end);
    }
    /// Columns from `end` on may be written in place again: for `truncate`, and for a query that is
    /// undone.
    void make_writable(std::int32_t end) noexcept {
        read_only_end_ = std::min(read_only_end_, end);
    }
    /// Keeps the columns from `from` on out of the tree, until the row is cut at `from` or before.
    void limit_commits(std::int32_t from) noexcept {
        commit_limit_ = std::min(commit_limit_, from);
    }
    void lift_commit_limit(std::int32_t end) noexcept {
        if (end <= commit_limit_) commit_limit_ = kNoLimit;
    }
    /// Gives the row own pages for the columns that it writes next: replaces the read-only columns
    /// from `first` to `needed`. Drops the columns from `needed` on if read-only columns are among
    /// them. `is_sole(column)` returns true if the page may be written in place. `give_up(column,
    /// page)` gets each replaced page, with the row's reference to the page if `is_own(column)`.
    /// The place in the tree stays: see `move_back`. Throws IntegrityError if the pool has too few
    /// pages.
    template <class IsSole, class GiveUp>
    void copy_on_write(Replica& home, std::int32_t first, std::int32_t needed,
                       const IsSole& is_sole, const GiveUp& give_up) {
        const std::int32_t end = std::min(read_only_end_, needed);
        if (read_only_end_ > needed) drop(home.pool, needed);
        std::int32_t changed = end;
        for (std::int32_t column = first; column < end; ++column) {
            if (is_sole(column)) continue;
            BlockId& page = pages_[static_cast<std::size_t>(column)];
            const BlockId source = page;
            home.require_pages(1);
            home.take_pages(1, &page);
            changed = std::min(changed, column);
            give_up(column, source);
        }
        if (changed < end) note_change(changed);
        drop_own_duplicates(first);
        read_only_end_ = first;
    }

    /// Returns a pin on the end of the first `columns` committed columns; an empty pin if no more
    /// columns are committed.
    [[nodiscard]] TreePin find_cut(PrefixTree& tree, std::int32_t columns) const;
    /// Gives back the own pages from column `from` on and removes the columns.
    void drop(BlockPool& pool, std::int32_t from) noexcept;
    /// Moves the end of the committed columns back to `columns`; `cut` is the pin on the new end.
    /// After the call only the tree holds the later columns.
    void move_back(std::int32_t columns, TreePin cut) noexcept;
    /// Gives back all pages and the pin. The row is as new, except for its version.
    void clear(BlockPool& pool) noexcept;
    /// Takes over the memory of `other`, a cleared row at its end.
    void take_memory(PageRow& other) noexcept {
        pages_.swap(other.pages_);
        pages_.clear();
    }

    /// Puts the columns from `committed` to `end` into the tree; `tokens` start at column 0. Throws
    /// std::bad_alloc without a change.
    void commit(PrefixTree& tree, const TokenId* tokens, std::int32_t end,
                std::vector<DuplicatePage>& duplicates, const Retention& retention = {});
    /// Replaces each duplicate column, counted from `first`, by the page that the tree already had.
    void swap_duplicates(BlockPool& pool, std::int32_t first,
                         const std::vector<DuplicatePage>& duplicates) noexcept;
    /// Keeps the own page of a column that the tree also has. Columns are added in ascending
    /// order. The row has room.
    void keep_own_duplicate(std::int32_t column) noexcept { own_duplicates_.push_back(column); }
    /// Commits `column`, whose page another row has committed: the tree holds the page from now on,
    /// as the last page on the path to `end`. The uncommitted columns before it become own
    /// duplicates.
    void entrust(BlockPool& pool, std::int32_t column, TreePin end) noexcept;

    /// Makes room, so that `share` cannot fail.
    void make_room_to_share(const PageRow& from, std::int32_t columns);
    /// Copies the first `columns` of another row, which both rows share from now on. The committed
    /// columns end at `place`.
    void share(BlockPool& pool, PageRow& from, std::int32_t columns, TreePin place) noexcept;

    /// Throws IntegrityError if the row does not agree with the tree.
    void check_integrity(const PrefixTree& tree) const;

   private:
    static constexpr std::int32_t kNoLimit = std::numeric_limits<std::int32_t>::max();

    /// Notes that a page from `column` on was replaced or dropped.
    void note_change(std::int32_t column) noexcept { changes_.note(++version_, column); }
    void drop_own_duplicates(std::int32_t from) noexcept;
    void free_own_pages(BlockPool& pool, std::int32_t from) const noexcept;

    std::uint32_t version_ = 0;
    std::int32_t committed_ = 0;
    std::int32_t read_only_end_ = 0;
    std::int32_t commit_limit_ = kNoLimit;
    std::vector<BlockId> pages_;  // its size is the last field that a decode step reads
    TreePin place_;
    std::vector<std::int32_t> own_duplicates_;
    RowChanges changes_;
};

}  // namespace kvcore
