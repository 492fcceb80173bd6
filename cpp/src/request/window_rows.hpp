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

/// What a sequence has of windows: beside its Sequence, and only where there are groups. A cache
/// line, which a decode step reads once per row and verb.
///
///     column  0        first[w]        reserved       size
///             |  nobody |  read through  |  no pages   |
///             |  reads  |  window w      |  of w yet   |
struct alignas(64) WindowRow {
    // What follows from `first`, so that a decode step has to divide nothing: with fewer tokens
    // written than these, a window reads what it has left, and none leaves another column.
    std::int64_t least_tokens = 0;
    std::int64_t passes_at = 0;
    std::int32_t reserved = 0;    // columns up to here have pages of all windows that read them
    std::int32_t prompt_end = 0;  // whole columns of its prompt
    std::int32_t prompt_hit = 0;  // and as many as the same prompt hits: not its last token
    std::uint32_t version = 1;    // changes with `reserved`, `first`, and its columns; not 0
    std::array<std::int32_t, Grouping::kMaxWindows> first{};
};
static_assert(sizeof(WindowRow) == 64, "one cache line");

/// The rows of a WindowRows, for walks over many of them; void after its next `make_room`.
struct WindowView {
    const WindowRow* rows;
    std::int64_t column_tokens;

    [[nodiscard]] const WindowRow& of(SequenceHandle handle) const noexcept {
        return rows[handle.index];
    }
    /// The sequence has pages of its windows for `tokens`, and all that they read with `start`
    /// tokens written.
    [[nodiscard]] bool is_ready(SequenceHandle handle, std::int64_t start,
                                std::int64_t tokens) const noexcept {
        const WindowRow& reader = of(handle);
        return start >= reader.least_tokens && tokens <= reader.reserved * column_tokens;
    }
    /// With so many tokens written there may be something to leave.
    [[nodiscard]] bool passes(SequenceHandle handle, std::int64_t tokens) const noexcept {
        return tokens >= of(handle).passes_at;
    }
};

/// Which columns sequences read through their windows, and what happens to those they leave.
///
/// Owns: a row per entry of the SequenceTable. Invariant: each sequence is one reader, in each
/// window, of its columns from `first` on.
/// Threads: none of its own; CacheManager locks around it.
/// Cost: O(columns entered or left).
class WindowRows {
   public:
    WindowRows(const Grouping& grouping, std::int64_t max_draft_tokens) noexcept
        : grouping_(grouping), kept_tokens_(max_draft_tokens > 0 ? max_draft_tokens + 1 : 0) {}

    /// Tokens that windows keep behind those they read.
    [[nodiscard]] std::int64_t kept_tokens() const noexcept { return kept_tokens_; }
    /// Before the entry of a handle is used. Throws std::bad_alloc.
    void make_room(SequenceHandle handle) {
        if (handle.index >= rows_.size()) rows_.resize(std::size_t{handle.index} + 1);
    }
    [[nodiscard]] WindowRow& of(SequenceHandle handle) noexcept { return rows_[handle.index]; }
    [[nodiscard]] const WindowRow& of(SequenceHandle handle) const noexcept {
        return rows_[handle.index];
    }
    /// By entry of the SequenceTable.
    [[nodiscard]] const WindowRow& at(std::size_t entry) const noexcept { return rows_[entry]; }
    [[nodiscard]] WindowView view() const noexcept {
        return {rows_.data(), grouping_.column_tokens()};
    }
    /// The sequence has pages of its windows for so many tokens.
    [[nodiscard]] bool has_reserved(SequenceHandle handle, std::int64_t tokens) const noexcept {
        return tokens <= std::int64_t{of(handle).reserved} * grouping_.column_tokens();
    }

    /// It holds all that its windows read with so many tokens written.
    [[nodiscard]] bool can_read(SequenceHandle handle, std::int64_t tokens) const noexcept {
        return tokens >= of(handle).least_tokens;
    }

    /// Its prompt has so many tokens.
    void set_prompt(SequenceHandle handle, std::int64_t tokens) noexcept {
        of(handle).prompt_end = static_cast<std::int32_t>(tokens / grouping_.column_tokens());
        of(handle).prompt_hit = static_cast<std::int32_t>((tokens - 1) / grouping_.column_tokens());
    }
    /// The sequence reads columns `from` .. `to` - 1 of its row, which are new to it.
    void enter(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from,
               std::int32_t to) noexcept;
    /// The sequence is about to lose its columns `from` .. `to` - 1.
    void leave(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from,
               std::int32_t to) const noexcept;
    /// It reads a column from now on, in the place of another one of its row, and that one no more.
    void enter_one(Replica& home, SequenceHandle handle, std::int32_t index,
                   BlockId column) const noexcept;
    void leave_one(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t index,
                   BlockId column) const noexcept;
    /// Gives columns of the row, behind `from`, the pages of windows that they miss up to `end`.
    /// Throws IntegrityError where pages are not there.
    void fill(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from,
              std::int32_t end);
    /// It has pages of all windows for all its columns, and reads its last one in each: what it
    /// gets behind those needs a page in each lane.
    [[nodiscard]] bool grows_evenly(SequenceHandle handle, const PageRow& row) const noexcept;
    /// Gives the columns of such a row behind `from`, which are new, all their pages. Throws
    /// likewise.
    void grow(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from);
    /// The sequence is about to lose all its columns from `from` on.
    void cut(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from) noexcept;
    /// The sequence is about to lose all; it may be used again afterwards.
    void clear(Replica& home, SequenceHandle handle, const PageRow& row) noexcept;
    /// The row has a hit of `tokens` from now on, whose first `columns` are the tree's; `leave` has
    /// been called for those that were in their place. `is_reader`: of these it is one already.
    void take_hit(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t columns,
                  std::int64_t tokens, bool is_reader) noexcept;
    /// Asks for what `advance` reads of the row's next column to leave.
    void prefetch(const Replica& home, SequenceHandle handle, const PageRow& row) const noexcept {
        const std::int32_t first = of(handle).first[0];
        if (first < row.size()) home.columns->prefetch(row[first]);
    }
    /// So many tokens are written: leaves what windows have passed.
    void advance(Replica& home, SequenceHandle handle, const PageRow& row,
                 std::int64_t tokens) noexcept;
    /// A fork begins with the parent's first columns, which are in its row.
    void share(Replica& home, SequenceHandle parent, SequenceHandle child,
               const PageRow& row) noexcept;

   private:
    void note_first(WindowRow& reader) const noexcept;
    [[nodiscard]] std::int32_t keep_for(Replica& home, SequenceHandle handle, const PageRow& row,
                                        std::size_t window, std::int32_t column,
                                        std::int32_t committed) const noexcept;
    void fill_twins(Replica& home, SequenceHandle handle, const PageRow& row) const noexcept;
    static void fill_twin(Replica& home, const PageRow& row, std::int32_t column, BlockId cached,
                          std::size_t window) noexcept;
    /// For which hit a committed column is kept.
    struct Kept {
        std::int32_t end;   // of the hit; 0: it is not kept
        std::int32_t next;  // columns up to there are kept for the same one
        bool is_spare;      // the one page more in front of its window
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
    // Of those written last that may be written again: a request that is cut runs its last token
    // once more.
    std::int64_t kept_tokens_;
    std::vector<WindowRow> rows_;
};

}  // namespace kvcore
