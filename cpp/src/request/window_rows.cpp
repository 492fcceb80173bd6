// SPDX-License-Identifier: Apache-2.0
#include "request/window_rows.hpp"

#include <algorithm>
#include <limits>

#include "tree/tree_node.hpp"

namespace kvcore {
namespace {

/// The next branch of prompts, at most a reach after a column. `branch` is 0 without a branch in
/// reach.
struct Stretch {
    std::int32_t branch;
    std::int32_t end;  // columns up to there have the same branch
};

// Starts at a committed column. A prompt that was committed in pieces has several runs, so the
// branch may be several runs later.
Stretch stretch_from(const PageRow& row, std::int32_t column, std::int32_t reach) noexcept {
    std::int32_t branch = 0;
    for (const TreeNode* node = row.node(); node->end() > column; node = node->parent) {
        if (node->num_children > 1) branch = node->end();
    }
    if (branch == 0) return {0, row.committed()};
    return branch - column <= reach ? Stretch{branch, branch} : Stretch{0, branch - reach};
}

void note_change(WindowRow& reader) noexcept {
    if (++reader.version == 0) reader.version = 1;  // no row has version 0
}

}  // namespace

void WindowRows::enter(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from,
                       std::int32_t to) noexcept {
    WindowRow& reader = of(handle);
    note_change(reader);
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        const std::int32_t first = std::max(from, reader.first[w]);
        if (first < to) home.columns->enter(row.ids().data() + first, to - first, w);
    }
}

void WindowRows::leave(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from,
                       std::int32_t to) const noexcept {
    home.columns->begin_leaving();
    leave_columns(home, handle, row, from, to);
}

// A column before a branch is kept for the branch. Any other column before the end of the prompt is
// kept for the next turn. The column directly before the window is a spare: with it the next turn
// still hits if its last page differs.
WindowRows::Kept WindowRows::kept_for(const PageRow& row, const WindowRow& reader,
                                      std::size_t window, std::int32_t column) const noexcept {
    const std::int32_t reach = grouping_.windows()[window].reach;
    const Stretch stretch = stretch_from(row, column, reach);
    if (stretch.branch > 0) {
        const bool is_spare = stretch.branch - column == reach;
        return {stretch.branch, is_spare ? column + 1 : stretch.end, is_spare};
    }
    const std::int32_t end = std::min(reader.prompt_end, row.committed());
    const std::int32_t spare = std::min(reader.prompt_hit, end) - reach;
    if (column == spare) return {end, std::min(column + 1, stretch.end), true};
    if (spare < column && column < end) return {end, std::min(end, stretch.end), false};
    return {0, column < spare ? std::min(spare, stretch.end) : stretch.end, false};
}

// Chooses the hit for which a column of the row is kept: the hit at a branch or at the end of the
// prompt, else the hit at the end of the committed columns. At the end of an answer the column is a
// spare. With state layers a hit ends at a checkpoint, and the column is kept for the next
// checkpoint. Returns the number of columns that are kept for the same hit, 0 if no checkpoint
// follows.
std::int32_t WindowRows::keep_for(Replica& home, SequenceHandle handle, const PageRow& row,
                                  std::size_t window, std::int32_t column,
                                  std::int32_t committed) const noexcept {
    if (home.columns->needs_checkpoints()) {
        const TreePosition end{row.node(), row.committed()};
        const std::int32_t hit = home.columns->first_hit(end, column, window);
        home.columns->leave_from({row.node(), hit > 0 ? hit : committed});
        return hit > 0 ? 1 : 0;
    }
    const WindowRow& reader = of(handle);
    const Kept kept = kept_for(row, reader, window, column);
    const bool is_spare = kept.end == 0 ? committed > reader.prompt_end : kept.is_spare;
    home.columns->leave_from({row.node(), kept.end > 0 ? kept.end : committed}, is_spare);
    return std::min(kept.next, committed) - column;
}

void WindowRows::leave_columns(Replica& home, SequenceHandle handle, const PageRow& row,
                               std::int32_t from, std::int32_t to) const noexcept {
    const WindowRow& reader = of(handle);
    const std::int32_t committed = std::min(row.committed(), to);
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        std::int32_t c = std::max(from, reader.first[w]);
        while (c < to) {
            auto how = ColumnPages::Departure::kKept;
            std::int32_t n = to - c;
            if (c < committed) n = keep_for(home, handle, row, w, c, committed);
            if (n == 0) how = ColumnPages::Departure::kUseless;
            n = std::max(n, 1);
            home.columns->leave(row.ids().data() + c, n, w, how);
            c += n;
        }
    }
}

void WindowRows::enter_one(Replica& home, SequenceHandle handle, std::int32_t index,
                           BlockId column) const noexcept {
    const WindowRow& reader = of(handle);
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        if (index >= reader.first[w]) home.columns->enter(column, w);
    }
}

void WindowRows::leave_one(Replica& home, SequenceHandle handle, const PageRow& row,
                           std::int32_t index, BlockId column) const noexcept {
    const WindowRow& reader = of(handle);
    home.columns->begin_leaving();
    home.columns->leave_from({row.node(), std::min(index + 1, row.committed())});
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        if (index < reader.first[w]) continue;
        home.columns->leave(column, w, ColumnPages::Departure::kUnused);
    }
}

void WindowRows::fill(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from,
                      std::int32_t end) {
    WindowRow& reader = of(handle);
    note_change(reader);
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        for (std::int32_t c = std::max(from, reader.first[w]); c < end; ++c) {
            if (!home.columns->has(row[c], w)) home.columns->fill(row[c], w);
        }
    }
    reader.reserved = std::max(reader.reserved, end);
}

bool WindowRows::grows_evenly(SequenceHandle handle, const PageRow& row) const noexcept {
    const WindowRow& reader = of(handle);
    if (reader.reserved != row.size()) return false;
    const auto begin = reader.first.begin();
    return std::all_of(begin, begin + static_cast<std::ptrdiff_t>(grouping_.windows().size()),
                       [&](std::int32_t first) { return first <= row.size(); });
}

void WindowRows::grow(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from) {
    WindowRow& reader = of(handle);
    note_change(reader);
    for (std::int32_t c = from; c < row.size(); ++c) home.columns->begin(row[c]);
    reader.reserved = row.size();
}

void WindowRows::cut_windows(Replica& home, SequenceHandle handle, const PageRow& row,
                             std::int32_t from) noexcept {
    leave(home, handle, row, from, row.size());
    WindowRow& reader = of(handle);
    note_change(reader);
    reader.reserved = std::min(reader.reserved, from);
}

// A row with own duplicates fills missing window pages of the tree's columns from its own columns.
// Pages that the tree's columns already have are kept as long as the added pages, because a hit
// needs both.
void WindowRows::fill_from_own_duplicates(Replica& home, SequenceHandle handle,
                                          const PageRow& row) const noexcept {
    std::int32_t column = row.committed();
    if (row.own_duplicates().empty()) return;
    const TreePosition end{row.node(), column};
    home.columns->for_each_column(end, row.own_duplicates().front(), [&](BlockId cached) {
        if (row[--column] == cached) return;
        for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
            if (column < of(handle).first[w]) continue;
            static_cast<void>(keep_for(home, handle, row, w, column, row.committed()));
            fill_from_own_duplicate(home, row, column, cached, w);
        }
    });
}

void WindowRows::fill_from_own_duplicate(Replica& home, const PageRow& row, std::int32_t column,
                                         BlockId cached, std::size_t window) noexcept {
    if (column >= row.commit_limit())
        return;  // the content of the row is wrong from `commit_limit` on
    const BlockId own = row[column];
    if (home.columns->has(cached, window)) {
        home.columns->renew(cached, window);
    } else if (home.pool.ref_count(own) == 1) {
        home.columns->fill_holes({row.node(), column + 1}, cached, own, 1U << window);
    }
}

// Keeps one page more before each window, for a next turn that differs in the last page.
void WindowRows::keep_one_more(Replica& home, const WindowRow& reader,
                               const PageRow& row) const noexcept {
    home.columns->begin_leaving();
    home.columns->leave_from({row.node(), std::max(1, row.committed() - 1)}, true);
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        const std::int32_t first = reader.first[w];
        if (first > 0 && first <= row.size()) home.columns->keep(row[first - 1], w);
    }
}

// With checkpoints no hit ends one page earlier, so no extra page is kept.
void WindowRows::clear_windows(Replica& home, SequenceHandle handle, const PageRow& row) noexcept {
    WindowRow& reader = of(handle);
    if (!home.columns->needs_checkpoints()) keep_one_more(home, reader, row);
    home.columns->begin_leaving();
    fill_from_own_duplicates(home, handle, row);
    leave_columns(home, handle, row, 0, row.size());
    const std::uint32_t version = reader.version;
    reader = {};
    reader.version = version;
    note_change(reader);
}

void WindowRows::take_hit(Replica& home, SequenceHandle handle, const PageRow& row,
                          std::int32_t columns, std::int64_t tokens, bool is_reader) noexcept {
    WindowRow& reader = of(handle);
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        const std::int32_t first = grouping_.first_column(grouping_.windows()[w], tokens);
        // Own columns after the hit stay. If the hit continues in lower stores, a window may begin
        // at a later column.
        const std::int32_t end = std::min(first, row.size());
        for (std::int32_t c = std::max(columns, reader.first[w]); c < end; ++c) {
            home.columns->leave(row[c], w, ColumnPages::Departure::kUnused);
        }
        reader.first[w] = first;
    }
    note_first(reader);
    if (!is_reader) enter(home, handle, row, 0, columns);
    reader.reserved = std::max(reader.reserved, columns);
}

// Returns how a row leaves a column that it passes, and the hit for which the column is kept.
WindowRows::Left WindowRows::left(const Replica& home, const PageRow& row, const WindowRow& reader,
                                  std::size_t window, std::int32_t column) const noexcept {
    using Departure = ColumnPages::Departure;
    if (column >= row.committed()) return {Departure::kPassed, {}};
    if (home.columns->needs_checkpoints()) {
        const std::int32_t hit =
            home.columns->first_hit({row.node(), row.committed()}, column, window);
        if (hit == 0) return {Departure::kUseless, {}};
        // Keeps the column for a branch, for the last checkpoint before the end of the prompt, or
        // for a later checkpoint.
        const std::int32_t reach = grouping_.windows()[window].reach;
        const bool is_kept =
            stretch_from(row, column, reach).branch > 0 || hit >= reader.prompt_end - 1;
        return {is_kept ? Departure::kKept : Departure::kPassed, {hit, 0, false}};
    }
    const Kept kept = kept_for(row, reader, window, column);
    return {kept.end > 0 ? Departure::kKept : Departure::kPassed, kept};
}

void WindowRows::advance(Replica& home, SequenceHandle handle, const PageRow& row,
                         std::int64_t tokens) noexcept {
    WindowRow& reader = of(handle);
    const std::int64_t n = std::max<std::int64_t>(0, tokens - kept_tokens_);
    const std::int64_t tokens_of_column = grouping_.column_tokens();
    home.columns->begin_leaving();
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        const std::int64_t skipped = grouping_.windows()[w].rule.skipped_tokens(n);
        std::int32_t& first = reader.first[w];
        for (; first < row.size() && (first + 1) * tokens_of_column <= skipped; ++first) {
            const auto [how, hit] = left(home, row, reader, w, first);
            home.columns->count_passed(row[first], w);
            if (how == ColumnPages::Departure::kKept) {
                home.columns->leave_from({row.node(), hit.end}, hit.is_spare);
                if (row.is_own(first)) {
                    ColumnsUp columns({row.node(), row.committed()}, grouping_.column_tokens());
                    fill_from_own_duplicate(home, row, first, columns[first], w);
                }
            }
            home.columns->leave(row[first], w, how);
        }
    }
    note_first(reader);
}

void WindowRows::note_first(WindowRow& reader) const noexcept {
    note_change(reader);
    reader.least_tokens = 0;
    reader.passes_at = std::numeric_limits<std::int64_t>::max();
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        const CacheGroup& rule = grouping_.windows()[w].rule;
        const std::int64_t column = reader.first[w];
        const std::int64_t tokens = grouping_.column_tokens();
        if (column > 0) {
            reader.least_tokens =
                std::max(reader.least_tokens, rule.least_skipping(column * tokens));
        }
        reader.passes_at =
            std::min(reader.passes_at, rule.least_skipping((column + 1) * tokens) + kept_tokens_);
    }
}

void WindowRows::share_windows(Replica& home, SequenceHandle parent, SequenceHandle child,
                               const PageRow& row) noexcept {
    WindowRow& reader = of(child);
    reader = of(parent);
    reader.reserved = std::min(reader.reserved, row.size());
    enter(home, child, row, 0, row.size());
}

}  // namespace kvcore
