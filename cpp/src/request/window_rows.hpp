// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/types.hpp"
#include "layers/grouping.hpp"
#include "level/replica.hpp"
#include "request/sequence_table.hpp"

namespace kvcore {

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
/// Null form: in a cache without groups `make_room`, `set_prompt`, `cut`, `clear` and `share` do
/// nothing, and the other methods are not called.
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
               std::int32_t to) noexcept;
    /// Leaves columns `from` .. `to` - 1, which the sequence is about to lose.
    void leave(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from,
               std::int32_t to) const noexcept;
    /// For a column that replaces another column of the row: `enter_one` begins to read the new
    /// column, `leave_one` leaves the old column.
    void enter_one(Replica& home, SequenceHandle handle, std::int32_t index,
                   BlockId column) const noexcept;
    void leave_one(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t index,
                   BlockId column) const noexcept;
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
        if (!grouping_.is_plain()) cut_windows(home, handle, row, from);
    }
    /// Leaves all columns, which the sequence is about to lose. The row may be used again.
    void clear(Replica& home, SequenceHandle handle, const PageRow& row) noexcept {
        if (!grouping_.is_plain()) clear_windows(home, handle, row);
    }
    /// Records a hit of `tokens`, whose first `columns` are the tree's. The caller has called
    /// `leave` for the columns that the hit replaced. `is_reader`: the sequence already reads the
    /// columns of the hit.
    void take_hit(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t columns,
                  std::int64_t tokens, bool is_reader) noexcept;
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
        if (!grouping_.is_plain()) share_windows(home, parent, child, row);
    }

   private:
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

}  // namespace kvcore
