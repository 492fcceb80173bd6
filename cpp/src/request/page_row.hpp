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

/// The pages of a run of tokens, in order, and whose each of them is.
///
///     column  0              committed           frozen            size
///             |  the tree's      |  own; forks      |  own, nobody     |
///             |  (a twin: own)   |  may have it too  |  else has it     |
///             |<-- not written in place: replaced -->|<-- written here ->|
///
/// A twin is a page that lies among the committed columns and is the row's own all the same: the
/// tree has another one with the same tokens, and pages are not swapped (deduplication off).
///
/// Columns from the barred one on are not put into the tree: what is in the first of them, or was
/// read to write it, was forgotten (see CacheManager::forget) and has to be written again first.
/// They may lie among the committed ones, which are then held where nobody finds them.
///
/// Owns: a reference to each own page, and one pin where the committed columns end in the tree. A
/// row ends by `clear`, which says where the references go; it knows no pool by itself.
/// Invariant: committed <= frozen <= size, but frozen = committed where nothing is reserved; the
/// committed columns but twins are those of the tree on the way to `node`; `version` changes when a
/// page is replaced or dropped, not when one is added.
/// Threads: none of its own; CacheManager locks around it.
/// Cost: O(1), O(columns changed) where columns are named.
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
    [[nodiscard]] std::int32_t frozen() const noexcept { return frozen_; }
    [[nodiscard]] std::int32_t barred() const noexcept { return barred_; }
    /// Of what it committed something was forgotten.
    [[nodiscard]] bool holds_forgotten() const noexcept { return barred_ < committed_; }
    /// Ascending columns.
    [[nodiscard]] const std::vector<std::int32_t>& twins() const noexcept { return twins_; }
    /// Where the committed columns end; nullptr before the row has a place in the tree.
    [[nodiscard]] TreeNode* node() const noexcept { return place_.node(); }
    [[nodiscard]] std::uint32_t version() const noexcept { return version_; }
    /// What a table shows of it.
    [[nodiscard]] RowPages view() const noexcept {
        return {pages_.data(), size(), version_, &changes_};
    }
    [[nodiscard]] const RowChanges& changes() const noexcept { return changes_; }

    /// It has a reference to that page.
    [[nodiscard]] bool is_own(std::int32_t column) const noexcept {
        return column >= committed_ || std::binary_search(twins_.begin(), twins_.end(), column);
    }
    /// It has that page there, behind what it committed.
    [[nodiscard]] bool has_uncommitted(std::int32_t column, BlockId page) const noexcept {
        return committed_ <= column && has(column, page);
    }
    [[nodiscard]] bool has(std::int32_t column, BlockId page) const noexcept {
        return size() > column && (*this)[column] == page;
    }
    /// The column of a page from `from` on, or size().
    [[nodiscard]] std::int32_t find(BlockId page, std::int32_t from = 0) const noexcept {
        return static_cast<std::int32_t>(std::find(pages_.begin() + from, pages_.end(), page) -
                                         pages_.begin());
    }
    /// Columns in front that are all the tree's.
    [[nodiscard]] std::int32_t num_cached() const noexcept {
        return twins_.empty() ? committed_ : twins_.front();
    }
    /// The first column from the committed ones to `end` that is not held by this row alone; `end`
    /// when there is none.
    [[nodiscard]] std::int32_t find_shared(const BlockPool& pool, std::int32_t end) const;

    /// So that `n` more columns cannot fail. Throws std::bad_alloc.
    void make_room(std::size_t n) { kvcore::make_room(pages_, n); }
    void make_room_for_twins(std::size_t n) { kvcore::make_room(twins_, n); }
    /// Adds columns, whose ids the caller fills in. There is room.
    [[nodiscard]] BlockId* extend(std::int64_t n) noexcept {
        const std::size_t held = pages_.size();
        if (n == 1) {  // a decode step's
            pages_.push_back(0);
        } else {
            pages_.resize(held + static_cast<std::size_t>(n));
        }
        return pages_.data() + held;
    }
    void append(const BlockId* ids, std::int64_t n) noexcept {
        pages_.insert(pages_.end(), ids, ids + n);
    }
    /// Adds columns that are taken from the pool. There is room. Throws IntegrityError where they
    /// are not there.
    void take(Replica& home, std::int64_t n) {
        home.require_pages(n);
        home.take_pages(n, extend(n));
    }

    /// Gives the row its first place in the tree.
    void place_at(TreePin place) noexcept { place_ = std::move(place); }
    /// The first `columns` are those on the way to `place` from now on; own pages there are given
    /// back.
    void take_hit(Replica& home, TreePin place, std::int32_t columns) noexcept;

    /// Columns below `end` are not written in place from now on.
    void freeze(std::int32_t end) noexcept { frozen_ = std::max(frozen_, end); }
    /// They are again, those from `end` on: `truncate` and a question that is taken back.
    void unfreeze(std::int32_t end) noexcept { frozen_ = std::min(frozen_, end); }
    /// Columns from `from` on must not be put into the tree, until the row is cut there.
    void bar(std::int32_t from) noexcept { barred_ = std::min(barred_, from); }
    void unbar(std::int32_t end) noexcept {
        if (end <= barred_) barred_ = kNotBarred;
    }
    /// Gives the row pages of its own wherever it writes next, from column `first` on: in the
    /// frozen columns below `needed`; those behind are dropped. `is_sole(column)`: that page may be
    /// written in place. `give_up(column, page)` gets every page that was replaced, with the row's
    /// reference to it where `is_own(column)`. The place in the tree stays: see `move_back`. Throws
    /// IntegrityError where pages are not there.
    template <class IsSole, class GiveUp>
    void copy_on_write(Replica& home, std::int32_t first, std::int32_t needed,
                       const IsSole& is_sole, const GiveUp& give_up) {
        const std::int32_t end = std::min(frozen_, needed);
        if (frozen_ > needed) drop(home.pool, needed);
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
        drop_twins(first);
        frozen_ = first;
    }

    /// Where the committed columns end once there are but `columns`: nothing where that is no
    /// change.
    [[nodiscard]] TreePin find_cut(PrefixTree& tree, std::int32_t columns) const;
    /// Gives back the own pages from column `from` on and forgets the columns.
    void drop(BlockPool& pool, std::int32_t from) noexcept;
    /// The committed columns from `columns` on are the tree's alone from now on.
    void move_back(std::int32_t columns, TreePin cut) noexcept;
    /// Gives all back; as if it were new, but for its version.
    void clear(BlockPool& pool) noexcept;
    /// The memory of a row that is cleared and ends serves another one.
    void take_memory(PageRow& other) noexcept {
        pages_.swap(other.pages_);
        pages_.clear();
    }

    /// Puts the columns from the committed ones to `end` into the tree; `tokens` are those of
    /// column 0 on. Throws std::bad_alloc, and has changed nothing.
    void commit(PrefixTree& tree, const TokenId* tokens, std::int32_t end,
                std::vector<DuplicatePage>& duplicates, const Retention& retention = {});
    /// Of the columns from `first` on that the tree had already the tree's pages are taken.
    void swap_duplicates(BlockPool& pool, std::int32_t first,
                         const std::vector<DuplicatePage>& duplicates) noexcept;
    /// Of such a column the own page is kept: a twin, behind those before. There is room.
    void keep_twin(std::int32_t column) noexcept { twins_.push_back(column); }
    /// Another row committed a page that this one has in `column` too: it is held in the tree from
    /// now on, the last on the way to `end`. What is in front of it stays the row's own.
    void entrust(BlockPool& pool, std::int32_t column, TreePin end) noexcept;

    /// So that `share` cannot fail.
    void make_room_to_share(const PageRow& from, std::int32_t columns);
    /// Takes the first columns of another row, which both have from now on; its committed ones
    /// end at `place`.
    void share(BlockPool& pool, PageRow& from, std::int32_t columns, TreePin place) noexcept;

    /// Throws IntegrityError unless the row is what the tree says.
    void check_integrity(const PrefixTree& tree) const;

   private:
    static constexpr std::int32_t kNotBarred = std::numeric_limits<std::int32_t>::max();

    /// A page from that column on was replaced or dropped.
    void note_change(std::int32_t column) noexcept { changes_.note(++version_, column); }
    void drop_twins(std::int32_t from) noexcept;
    void free_own_pages(BlockPool& pool, std::int32_t from) const noexcept;

    std::uint32_t version_ = 0;
    std::int32_t committed_ = 0;
    std::int32_t frozen_ = 0;
    std::int32_t barred_ = kNotBarred;
    std::vector<BlockId> pages_;  // what a decode step reads ends with its size
    TreePin place_;
    std::vector<std::int32_t> twins_;
    RowChanges changes_;
};

}  // namespace kvcore
