// SPDX-License-Identifier: Apache-2.0
// What a request has: its row of pages and, by the index of its handle, its windows, state slot,
// priorities and tenant.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/cache_config.hpp"
#include "kvcore/prefix_tree.hpp"
#include "kvcore/request.hpp"
#include "kvcore/types.hpp"
#include "layers/grouping.hpp"
#include "layers/recurrent_slots.hpp"
#include "level/level.hpp"
#include "pages/page_owners.hpp"
#include "support/memory.hpp"
#include "tree/pins.hpp"

namespace kvcore {

// ---- the row of pages ---------------------------------------------------------------------------

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

/// Returns true if the row has all pages that the next steps write into, and shares none with
/// others.
[[nodiscard]] inline bool is_reserved(const PageRow& row, const RequestView& request,
                                      std::int64_t num_steps, std::int64_t page_size,
                                      bool reserves_chunks) noexcept {
    const std::int64_t held = row.size() * page_size;
    // Usually the row has pages up to the end, whatever the call needs.
    const bool has_pages =
        request.end + num_steps - 1 <= held ||
        (reserves_chunks ? request.active + num_steps - 1
                         : request.tokens_to_hold(request.active, num_steps)) <= held;
    return has_pages && request.start >= row.read_only_end() * page_size;
}

// ---- the sequences ------------------------------------------------------------------------------

/// The cached pages that a sequence may still take.
enum class Reuse : std::uint8_t {
    kOpen,      // a longer prefix
    kDeclined,  // the same, but no partial page after the hit: reserve needed it
    kSealed,    // no page: it was fetched or written
};

/// A claimed sequence: its pages and its state. It takes two cache lines. A decode step reads only
/// the first line, which ends with the size of `pages`.
struct alignas(64) Sequence {
    std::uint32_t generation = 1;
    std::uint32_t batch_stamp = 0;  // the last batch it was seen in: finds duplicates
    std::int16_t replica = -1;      // -1: the entry is free
    Reuse reuse = Reuse::kOpen;     // of cached prefixes
    std::uint8_t num_pending = 0;   // transfers into its pages, waiting or in flight
    bool counts_prompt = true;      // the metrics lack positions of its prompt
    std::int64_t counted_end = 0;   // positions below it are in the metrics
    std::int64_t written = 0;       // tokens, as of the last commit
    PageRow pages;
    std::int64_t hit_tokens = 0;  // taken from the cache by this claim

    [[nodiscard]] bool is_sealed() const noexcept { return reuse == Reuse::kSealed; }
    /// Returns the end of the positions that may be filled, by the last fetched run or by a hit.
    /// With several steps per fetch, a sequence writes beyond `counted_end`.
    [[nodiscard]] std::int64_t filled_end() const noexcept {
        return is_sealed() ? std::max(counted_end, written) : hit_tokens;
    }
};
static_assert(sizeof(void*) != 8 || sizeof(Sequence) == 128, "two cache lines");

/// The claimed sequences, by handle.
///
/// Owns: the entries; page rows keep their memory when an entry is used again.
/// Invariant: a handle finds its sequence until `release`, and never another sequence: an entry at
/// its last generation is not used again.
/// Threads: no locks of its own.
/// Cost: O(1) per verb; references stay valid until the next `claim`.
class SequenceTable {
   public:
    /// Takes an entry for a sequence of a replica. May move the entries. Throws std::bad_alloc
    /// without a change.
    [[nodiscard]] SequenceHandle claim(std::int32_t replica);
    /// Frees the entry of a live sequence. The caller has given its pages back.
    void release(SequenceHandle handle) noexcept;

    /// A view for lookups of many handles; invalid after the next `claim`.
    template <class Entry>
    struct View {
        Entry* data;
        std::size_t size;

        /// All entries; free entries have replica < 0.
        [[nodiscard]] Entry* begin() const noexcept { return data; }
        [[nodiscard]] Entry* end() const noexcept { return data + size; }
        /// Returns nullptr for a stale or foreign handle.
        [[nodiscard]] Entry* find(SequenceHandle handle) const noexcept {
            if (handle.index >= size) return nullptr;
            Entry& sequence = data[handle.index];
            const bool alive = sequence.generation == handle.generation && sequence.replica >= 0;
            return alive ? &sequence : nullptr;
        }
        /// Throws RequestNotFoundError for a stale or foreign handle. `row`: the row of the batch,
        /// for the error; -1: no batch.
        [[nodiscard]] Entry& at(SequenceHandle handle, std::int64_t row = -1) const {
            if (Entry* sequence = find(handle)) return *sequence;
            refuse(handle, row);
        }
        /// Prefetches the entry that `find` reads.
        void prefetch(SequenceHandle handle) const noexcept {
            kvcore::prefetch(data + handle.index);
        }
    };
    using Live = View<Sequence>;
    /// The view for walks over sequences; `find` and `at` look up a single sequence.
    [[nodiscard]] Live live() noexcept { return {entries_.data(), entries_.size()}; }
    [[nodiscard]] View<const Sequence> live() const noexcept {
        return {entries_.data(), entries_.size()};
    }
    [[nodiscard]] Sequence* find(SequenceHandle handle) noexcept { return live().find(handle); }
    [[nodiscard]] Sequence& at(SequenceHandle handle) { return live().at(handle); }
    [[nodiscard]] const Sequence* find(SequenceHandle handle) const noexcept {
        return live().find(handle);
    }
    [[nodiscard]] const Sequence& at(SequenceHandle handle) const { return live().at(handle); }

    /// The entries by index; free entries have replica < 0.
    [[nodiscard]] const std::vector<Sequence>& entries() const noexcept { return entries_; }

   private:
    [[noreturn]] static void refuse(SequenceHandle handle, std::int64_t row);

    std::vector<Sequence> entries_;
    std::vector<std::uint32_t> free_;
};

struct Undo {
    Sequence* sequence;
    std::int64_t before;
};

/// The changes of a call to the sequences of a batch. The destructor restores the old values unless
/// `keep` was called, because a batch may be refused at its last row. At most one change per row.
template <auto kMember>
class UndoLog {
   public:
    /// Throws std::bad_alloc.
    UndoLog(std::vector<Undo>& scratch, std::int64_t rows) {
        scratch.resize(static_cast<std::size_t>(rows));
        begin_ = end_ = scratch.data();
    }
    UndoLog(const UndoLog&) = delete;
    UndoLog& operator=(const UndoLog&) = delete;
    ~UndoLog() {
        while (end_ != begin_) {
            --end_;
            end_->sequence->*kMember = end_->before;
        }
    }
    void set(Sequence& sequence, std::int64_t value) noexcept {
        *end_++ = {&sequence, sequence.*kMember};
        sequence.*kMember = value;
    }
    void keep() noexcept { end_ = begin_; }

   private:
    Undo* begin_;
    Undo* end_;
};

// ---- windows ------------------------------------------------------------------------------------

/// The window data of a sequence, in addition to its Sequence; only with layer groups. It takes a
/// cache line, which a decode step reads once per row and verb.
///
///     column  0        first[w]        reserved       size
///             |  not    |  read through  |  no pages   |
///             |  read   |  window w      |  of w yet   |
struct alignas(64) WindowRow {
    // Bounds derived from `first`, so that a decode step does not divide. With fewer than
    // `least_tokens` written, a window reads columns that it has left. With fewer than `passes_at`
    // written, no window leaves another column.
    std::int64_t least_tokens = 0;
    std::int64_t passes_at = 0;
    std::int32_t reserved = 0;    // columns below have pages of all windows that read them
    std::int32_t prompt_end = 0;  // whole columns of its prompt
    std::int32_t prompt_hit = 0;  // columns that the same prompt can hit: without its last token
    std::uint32_t version = 1;    // changes with `reserved`, `first`, and its columns; never 0
    std::array<std::int32_t, Grouping::kMaxWindows> first{};
};
static_assert(sizeof(WindowRow) == 64, "one cache line");

/// The rows of a WindowRows, for walks over many rows; invalid after the next `make_room`.
struct WindowView {
    const WindowRow* rows = nullptr;
    std::int64_t column_tokens = 0;

    [[nodiscard]] const WindowRow& of(SequenceHandle handle) const noexcept {
        return rows[handle.index];
    }
    /// Returns true if the sequence has window pages for `tokens`, and all pages that its windows
    /// read with `start` tokens written.
    [[nodiscard]] bool is_ready(SequenceHandle handle, std::int64_t start,
                                std::int64_t tokens) const noexcept {
        const WindowRow& reader = of(handle);
        return start >= reader.least_tokens && tokens <= reader.reserved * column_tokens;
    }
    /// Returns true if a window may leave a column with `tokens` written.
    [[nodiscard]] bool passes(SequenceHandle handle, std::int64_t tokens) const noexcept {
        return tokens >= of(handle).passes_at;
    }
};

/// The columns that sequences read through their windows, and the treatment of columns that they
/// leave.
///
/// Null form: in a cache without groups `make_room`, `set_prompt`, `enter`, `leave`, `leave_one`,
/// `cut`, `clear`, `take_hit` and `share` do nothing, and the other methods are not called.
///
/// Owns: a row per entry of the SequenceTable.
/// Invariant: in each window, each sequence counts as one reader of its columns from `first` on.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: O(columns entered or left).
class WindowRows {
   public:
    WindowRows(const Grouping& grouping, std::int64_t max_draft_tokens) noexcept
        : grouping_(grouping), kept_tokens_(max_draft_tokens > 0 ? max_draft_tokens + 1 : 0) {}

    /// The number of tokens that a sequence keeps before the tokens that its window reads.
    [[nodiscard]] std::int64_t kept_tokens() const noexcept { return kept_tokens_; }
    /// Makes room for the entry of a handle, before its first use. Throws std::bad_alloc.
    void make_room(SequenceHandle handle) {
        if (grouping_.is_plain()) return;
        if (handle.index >= rows_.size()) rows_.resize(std::size_t{handle.index} + 1);
    }
    [[nodiscard]] WindowRow& of(SequenceHandle handle) noexcept { return rows_[handle.index]; }
    [[nodiscard]] const WindowRow& of(SequenceHandle handle) const noexcept {
        return rows_[handle.index];
    }
    /// Returns the row of an entry of the SequenceTable.
    [[nodiscard]] const WindowRow& at(std::size_t entry) const noexcept { return rows_[entry]; }
    [[nodiscard]] WindowView view() const noexcept {
        return {rows_.data(), grouping_.column_tokens()};
    }
    /// Returns true if the sequence has window pages for `tokens`.
    [[nodiscard]] bool has_reserved(SequenceHandle handle, std::int64_t tokens) const noexcept {
        return tokens <= std::int64_t{of(handle).reserved} * grouping_.column_tokens();
    }

    /// Returns true if the sequence has all pages that its windows read with `tokens` written.
    [[nodiscard]] bool can_read(SequenceHandle handle, std::int64_t tokens) const noexcept {
        return tokens >= of(handle).least_tokens;
    }

    /// Sets the length of the prompt of a sequence.
    void set_prompt(SequenceHandle handle, std::int64_t tokens) noexcept {
        if (grouping_.is_plain()) return;
        of(handle).prompt_end = static_cast<std::int32_t>(tokens / grouping_.column_tokens());
        of(handle).prompt_hit = static_cast<std::int32_t>((tokens - 1) / grouping_.column_tokens());
    }
    /// Makes the sequence a reader of columns `from` .. `to` - 1 of its row, which are new to it.
    void enter(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from,
               std::int32_t to) noexcept {
        if (home.columns != nullptr) enter_windows(home, handle, row, from, to);
    }
    /// Leaves columns `from` .. `to` - 1, which the sequence is about to lose.
    void leave(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from,
               std::int32_t to) const noexcept {
        if (home.columns != nullptr) leave_windows(home, handle, row, from, to);
    }
    /// For a column that replaces another column of the row: `enter_one` begins to read the new
    /// column, `leave_one` leaves the old column.
    void enter_one(Replica& home, SequenceHandle handle, std::int32_t index,
                   BlockId column) const noexcept;
    void leave_one(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t index,
                   BlockId column) const noexcept {
        if (home.columns != nullptr) leave_column(home, handle, row, index, column);
    }
    /// Gives columns `from` .. `end` - 1 of the row the window pages that they lack. Throws
    /// IntegrityError if the pool has too few pages.
    void fill(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from,
              std::int32_t end);
    /// Returns true if all columns have pages of all windows and each window reads the last column:
    /// each new column needs a page in each lane.
    [[nodiscard]] bool grows_evenly(SequenceHandle handle, const PageRow& row) const noexcept;
    /// Gives the new columns from `from` on of a row that grows evenly all their pages. Throws as
    /// `fill`.
    void grow(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from);
    /// Leaves all columns from `from` on, which the sequence is about to lose.
    void cut(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from) noexcept {
        if (home.columns != nullptr) cut_windows(home, handle, row, from);
    }
    /// Leaves all columns, which the sequence is about to lose. The row may be used again.
    void clear(Replica& home, SequenceHandle handle, const PageRow& row) noexcept {
        if (home.columns != nullptr) clear_windows(home, handle, row);
    }
    /// Records a hit of `tokens`, whose first `columns` are the tree's. The caller has called
    /// `leave` for the columns that the hit replaced. `is_reader`: the sequence already reads the
    /// columns of the hit.
    void take_hit(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t columns,
                  std::int64_t tokens, bool is_reader) noexcept {
        if (home.columns != nullptr) take_windows(home, handle, row, columns, tokens, is_reader);
    }
    /// Prefetches the data that `advance` reads of the next column to leave.
    void prefetch(const Replica& home, SequenceHandle handle, const PageRow& row) const noexcept {
        const std::int32_t first = of(handle).first[0];
        if (first < row.size()) home.columns->prefetch(row[first]);
    }
    /// Leaves the columns that windows have passed with `tokens` written.
    void advance(Replica& home, SequenceHandle handle, const PageRow& row,
                 std::int64_t tokens) noexcept;
    /// Starts a fork with the first columns of its parent, which are in its row.
    void share(Replica& home, SequenceHandle parent, SequenceHandle child,
               const PageRow& row) noexcept {
        if (home.columns != nullptr) share_windows(home, parent, child, row);
    }

   private:
    void enter_windows(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from,
                       std::int32_t to) noexcept;
    void leave_windows(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from,
                       std::int32_t to) const noexcept;
    void leave_column(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t index,
                      BlockId column) const noexcept;
    void take_windows(Replica& home, SequenceHandle handle, const PageRow& row,
                      std::int32_t columns, std::int64_t tokens, bool is_reader) noexcept;
    void cut_windows(Replica& home, SequenceHandle handle, const PageRow& row,
                     std::int32_t from) noexcept;
    void clear_windows(Replica& home, SequenceHandle handle, const PageRow& row) noexcept;
    void share_windows(Replica& home, SequenceHandle parent, SequenceHandle child,
                       const PageRow& row) noexcept;
    void note_first(WindowRow& reader) const noexcept;
    [[nodiscard]] std::int32_t keep_for(Replica& home, SequenceHandle handle, const PageRow& row,
                                        std::size_t window, std::int32_t column,
                                        std::int32_t committed) const noexcept;
    void fill_from_own_duplicates(Replica& home, SequenceHandle handle,
                                  const PageRow& row) const noexcept;
    static void fill_from_own_duplicate(Replica& home, const PageRow& row, std::int32_t column,
                                        BlockId cached, std::size_t window) noexcept;
    /// The hit for which a committed column is kept.
    struct Kept {
        std::int32_t end;   // of the hit; 0: the column is not kept
        std::int32_t next;  // columns below are kept for the same hit
        bool is_spare;      // the extra page before the window of the hit
    };
    [[nodiscard]] Kept kept_for(const PageRow& row, const WindowRow& reader, std::size_t window,
                                std::int32_t column) const noexcept;
    struct Left {
        ColumnPages::Departure how;
        Kept hit;
    };
    [[nodiscard]] Left left(const Replica& home, const PageRow& row, const WindowRow& reader,
                            std::size_t window, std::int32_t column) const noexcept;
    void keep_one_more(Replica& home, const WindowRow& reader, const PageRow& row) const noexcept;
    void leave_columns(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from,
                       std::int32_t to) const noexcept;

    const Grouping& grouping_;
    // The number of last tokens that may be written again: a request that is cut runs its last
    // token once more.
    std::int64_t kept_tokens_;
    std::vector<WindowRow> rows_;
};

// ---- state slots --------------------------------------------------------------------------------

/// The state data of a sequence, in addition to its Sequence; only with state groups.
struct RecurrentState {
    static constexpr std::int64_t kNowhere = -1;

    RecurrentSlots::Slot slot = RecurrentSlots::kNone;
    RecurrentSlots::Slot kept = RecurrentSlots::kNone;  // with drafts: a copy of an earlier state
    std::int64_t at = 0;              // `slot` has the state after these tokens, at the last commit
    std::int64_t run = 0;             // the end of the run that was fetched since, or `at`
    std::int64_t kept_at = kNowhere;  // `kept` has the state after these tokens; 0 needs no slot
    bool is_restored = false;         // `slot` has this state too: the last run was undone
    std::int64_t branch = 0;          // cached pages reach up to this token, without a checkpoint
    std::int64_t prompt_end = 0;      // the last boundary of columns below the end of its prompt
};

/// The slot in which each sequence computes its state, the tokens at which checkpoints of the state
/// are due, and the state from which a sequence resumes after the model has rejected drafts.
///
/// Rejected drafts are part of the state in the slot and cannot be removed. With `max_draft_tokens`
/// the manager copies the state to a second slot before a run that may have drafts, if there are
/// two slots for each sequence. A sequence with rejected drafts resumes from the kept state: its
/// accepted tokens run again, together with new drafts. More than kMostRerun * max_draft_tokens
/// accepted tokens first run without drafts.
///
/// Owns: a row per entry of the SequenceTable.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: O(state groups).
class RecurrentStates {
   public:
    static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
    static constexpr std::int64_t kMostRerun = 2;

    explicit RecurrentStates(const CacheConfig& config)
        : column_tokens_(config.page_size),
          most_rerun_(kMostRerun * config.max_draft_tokens),
          most_run_(most_rerun_ + 1 + config.max_draft_tokens),
          keeps_(config.max_draft_tokens > 0 && config.num_state_slots / 2 >= config.max_sequences),
          has_checkpoints_(config.prefix_caching),
          exist_(!config.states.empty()) {
        for (const StateGroup& group : config.states) {
            if (group.interval > 0) intervals_.push_back(group.interval);
        }
    }

    /// Resets the row of a new sequence; does nothing without states. Throws std::bad_alloc.
    void begin(SequenceHandle handle) {
        if (!exist_) return;
        if (handle.index >= rows_.size()) rows_.resize(std::size_t{handle.index} + 1);
        rows_[handle.index] = {};
    }
    [[nodiscard]] RecurrentState& of(SequenceHandle handle) noexcept { return rows_[handle.index]; }
    [[nodiscard]] const RecurrentState& of(SequenceHandle handle) const noexcept {
        return rows_[handle.index];
    }
    /// Returns the row of an entry of the SequenceTable.
    [[nodiscard]] const RecurrentState& at(std::size_t entry) const noexcept {
        return rows_[entry];
    }

    /// Returns the slot in which a sequence computes; kNone without states.
    [[nodiscard]] RecurrentSlots::Slot slot_of(SequenceHandle handle) const noexcept {
        return exist_ ? of(handle).slot : RecurrentSlots::kNone;
    }

    /// Returns the last boundary of columns below the end of a prompt.
    [[nodiscard]] std::int64_t prompt_end(std::int64_t tokens) const noexcept {
        return (tokens - 1) / column_tokens_ * column_tokens_;
    }
    /// Returns the first token after `start` at which a checkpoint is due; kNever if no checkpoint
    /// is due.
    [[nodiscard]] std::int64_t next_due(const RecurrentState& row,
                                        std::int64_t start) const noexcept {
        if (!has_checkpoints_) return kNever;
        std::int64_t due = row.branch > start ? row.branch : kNever;
        if (row.prompt_end > start) due = std::min(due, row.prompt_end);
        for (const std::int64_t interval : intervals_) {
            due = std::min(due, (start / interval + 1) * interval);
        }
        return due;
    }
    [[nodiscard]] bool is_due(const RecurrentState& row, std::int64_t n) const noexcept {
        return n > 0 && next_due(row, n - 1) == n;
    }
    /// Returns true if the sequence keeps a state from which the last run can be undone, to any
    /// token from `kept_at` on.
    [[nodiscard]] bool has_kept(const RecurrentState& row) const noexcept {
        return keeps_ && row.kept_at >= row.at && row.run - row.kept_at <= most_run_;
    }
    /// Returns true if a request with this `start` has rejected tokens of its last run. It resumes
    /// from the kept state.
    [[nodiscard]] bool resumes(const RecurrentState& row, std::int64_t start) const noexcept {
        return start >= row.kept_at && (start < row.run || row.is_restored) && has_kept(row);
    }
    /// Returns the token from which a request with this `start` runs: an earlier token after
    /// rejected drafts.
    [[nodiscard]] std::int64_t begin_of(SequenceHandle handle, std::int64_t start) const noexcept {
        if (!exist_) return start;
        const RecurrentState& row = of(handle);
        return resumes(row, start) ? row.kept_at : start;
    }
    /// Returns true if the manager has the state that a request with this `start` needs: in its
    /// slot, which was committed or ran up to `start`, or kept. Token 0 needs no state.
    [[nodiscard]] bool can_go_on(SequenceHandle handle, std::int64_t start) const noexcept {
        return start == of(handle).at || can_run(handle, start);
    }
    /// The same for a call that hands out the slot. Kernels may have changed a slot that was handed
    /// out before, even if that run was not committed.
    [[nodiscard]] bool can_run(SequenceHandle handle, std::int64_t start) const noexcept {
        const RecurrentState& row = of(handle);
        return start == 0 || start >= row.run || resumes(row, start);
    }
    /// Returns true if a request that resumes has too many accepted tokens to run them together
    /// with drafts.
    [[nodiscard]] bool reruns_alone(const RecurrentState& row, std::int64_t start) const noexcept {
        return start - row.kept_at > most_rerun_;
    }
    /// Returns true if the state at `start` must be kept before the tokens up to `end` run, because
    /// the last tokens may be drafts.
    [[nodiscard]] bool is_to_keep(const RecurrentState& row, std::int64_t start,
                                  std::int64_t end) const noexcept {
        return keeps_ && start > 0 && start >= row.run && start != row.kept_at && end - start > 1 &&
               end - start <= most_run_;
    }
    /// Returns true if the request can run without further preparation.
    [[nodiscard]] bool is_ready(const RequestView& request, std::int64_t num_steps) const noexcept {
        const RecurrentState& row = of(request.sequence);
        const std::int64_t start = request.start;
        const bool has_state = start == 0        ? row.at == 0
                               : row.is_restored ? start == row.kept_at
                                                 : start >= row.run;
        return row.slot != RecurrentSlots::kNone && has_state &&
               (request.active - start == 1 || next_due(row, start) >= request.active) &&
               !is_to_keep(row, start, request.active + num_steps - 1);
    }
    /// Records the end of the run of a request that starts now.
    void note_run(const RequestView& request, std::int64_t num_steps) noexcept {
        RecurrentState& row = of(request.sequence);
        row.run = request.active + num_steps - 1;
        row.is_restored = false;
        if (request.start == 0) row.kept_at = 0;
    }
    /// Records that `n` tokens are written. Returns true if a checkpoint is due and the slot has
    /// its state: the last run ended at `n`.
    bool advance(SequenceHandle handle, std::int64_t n) noexcept {
        RecurrentState& row = of(handle);
        if (n < row.run || row.is_restored) {
            if (resumes(row, n)) row.at = row.kept_at;
            return false;
        }
        const bool makes = n != row.at && is_due(row, n);
        row.at = row.run = n;
        return makes;
    }
    /// Records that the slot has the state of token `n`, and that no other state is kept.
    void set_back(SequenceHandle handle, std::int64_t n) noexcept {
        RecurrentState& row = of(handle);
        row.at = row.run = n;
        row.kept_at = RecurrentState::kNowhere;
        row.is_restored = false;
    }
    /// Records that the slot has the kept state until the request runs. The request may still have
    /// its old `start`.
    void restore(SequenceHandle handle) noexcept {
        RecurrentState& row = of(handle);
        row.at = row.kept_at;
        row.is_restored = true;
    }

   private:
    std::int64_t column_tokens_;
    std::int64_t most_rerun_;  // accepted tokens that run again together with drafts
    std::int64_t most_run_;    // tokens of a run before which a state is kept
    bool keeps_;
    bool has_checkpoints_;
    bool exist_;
    std::vector<std::int64_t> intervals_;
    std::vector<RecurrentState> rows_;
};

// ---- priorities and tenants ---------------------------------------------------------------------

/// The retention priorities that requests set for their pages, and the current time.
///
/// Owns: the priorities of sequences with priorities, by entry of the SequenceTable.
/// Threads: no locks of its own. Cost: O(1) for a sequence without priorities, else O(ranges).
class Priorities {
   public:
    /// Columns with the same retention.
    struct Segment {
        std::int32_t end = std::numeric_limits<std::int32_t>::max();
        Retention retention;
    };

    explicit Priorities(std::int32_t page_size) noexcept : page_size_(page_size) {}

    /// Sets the priorities of a sequence. Throws std::invalid_argument for invalid priorities, and
    /// std::bad_alloc.
    void set(SequenceHandle sequence, const RequestPriority& priority);
    void forget(SequenceHandle sequence) noexcept;

    [[nodiscard]] std::int64_t now() const noexcept { return now_; }
    void set_now(std::int64_t now) noexcept { now_ = now; }

    /// Returns the segment that starts at a column.
    [[nodiscard]] Segment segment(SequenceHandle sequence, std::int32_t column) const noexcept {
        const RequestPriority* priority = find(sequence);
        return priority == nullptr ? Segment() : segment_of(*priority, column);
    }
    /// Applies the priorities of a sequence to the pages from `first` to `at`, which it uses.
    void retain(PrefixTree& tree, SequenceHandle sequence, TreePosition at,
                std::int32_t first) const noexcept;

    /// Returns the time after `returns_in` units of time; kNever and kUnknown stay the same.
    [[nodiscard]] std::int64_t time_of_return(std::int64_t returns_in) const noexcept;

   private:
    [[nodiscard]] const RequestPriority* find(SequenceHandle sequence) const noexcept {
        return sequence.index < all_.size() ? all_[sequence.index].get() : nullptr;
    }
    [[nodiscard]] Segment segment_of(const RequestPriority& priority,
                                     std::int32_t column) const noexcept;
    [[nodiscard]] Retention lasting(std::int32_t priority, std::int64_t duration) const noexcept;

    std::int32_t page_size_;
    std::int64_t now_ = std::numeric_limits<std::int64_t>::min();
    std::vector<std::unique_ptr<RequestPriority>> all_;
};

/// The owner of each request; 0 for a request without a tenant.
///
/// Owns: an owner per entry of the SequenceTable, up to the last entry with a tenant. Threads: no
/// locks of its own. Cost: O(1).
class SequenceTenants {
   public:
    [[nodiscard]] Owner of(SequenceHandle sequence) const noexcept {
        return sequence.index < owners_.size() ? owners_[sequence.index] : Owner{0};
    }
    /// Makes room, so that `set` of the sequence cannot fail. Throws std::bad_alloc.
    void make_room(SequenceHandle sequence) {
        if (sequence.index >= owners_.size()) owners_.resize(std::size_t{sequence.index} + 1);
    }
    void set(SequenceHandle sequence, Owner owner) noexcept {
        if (sequence.index < owners_.size()) owners_[sequence.index] = owner;
    }

   private:
    std::vector<Owner> owners_;
};

namespace quotas {

/// Returns the owner for a tenant number. Throws std::invalid_argument for an invalid number.
[[nodiscard]] Owner owner_of(const CacheConfig& config, std::int32_t tenant);

}  // namespace quotas

}  // namespace kvcore
