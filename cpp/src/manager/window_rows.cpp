// SPDX-License-Identifier: Apache-2.0
#include "manager/window_rows.hpp"

#include <algorithm>
#include <limits>

#include "index/tree_node.hpp"

namespace kvcore {
namespace {

// The first branch behind a column of a row, no more than `reach` columns on; 0: none. What was
// committed in pieces is in as many runs: it may be some of them further on.
std::int32_t first_branch(const PageRow& row, std::int32_t column, std::int32_t reach) noexcept {
    std::int32_t first = 0;
    for (const TreeNode* node = row.node(); node->end() > column; node = node->parent) {
        if (node->num_children > 1 && node->end() - column <= reach) first = node->end();
    }
    return first;
}

}  // namespace

void WindowRows::enter(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from,
                       std::int32_t to) noexcept {
    WindowRow& reader = of(handle);
    ++reader.version;
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        for (std::int32_t c = std::max(from, reader.first[w]); c < to; ++c) {
            home.columns->enter(row[c], w);
        }
    }
}

void WindowRows::leave(Replica& home, SequenceHandle handle, const PageRow& row, std::int32_t from,
                       std::int32_t to) const noexcept {
    home.columns->begin_leaving();
    leave_columns(home, handle, row, from, to);
}

// What is in front of a branch is kept for that; else for whoever goes on where the row ends.
void WindowRows::leave_columns(Replica& home, SequenceHandle handle, const PageRow& row,
                               std::int32_t from, std::int32_t to) const noexcept {
    const WindowRow& reader = of(handle);
    const std::int32_t end = std::min(row.committed(), to);
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        for (std::int32_t c = std::max(from, reader.first[w]); c < to; ++c) {
            if (c < end) {
                const std::int32_t branch =
                    first_branch(row, c, grouping_.reach(grouping_.windows()[w]));
                home.columns->leave_from({row.node(), branch > 0 ? branch : end});
            }
            home.columns->leave(row[c], w, ColumnPages::Departure::kKept);
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
                      std::int32_t end) noexcept {
    WindowRow& reader = of(handle);
    ++reader.version;
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

void WindowRows::grow(Replica& home, SequenceHandle handle, const PageRow& row,
                      std::int32_t from) noexcept {
    WindowRow& reader = of(handle);
    ++reader.version;
    for (std::int32_t c = from; c < row.size(); ++c) home.columns->begin(row[c]);
    reader.reserved = row.size();
}

void WindowRows::cut(Replica& home, SequenceHandle handle, const PageRow& row,
                     std::int32_t from) noexcept {
    leave(home, handle, row, from, row.size());
    WindowRow& reader = of(handle);
    ++reader.version;
    reader.reserved = std::min(reader.reserved, from);
}

// A row that kept columns of its own beside the tree's leaves those what they miss.
void WindowRows::fill_twins(Replica& home, const PageRow& row) noexcept {
    std::int32_t column = row.committed();
    if (row.twins().empty()) return;
    const TreePosition end{row.node(), column};
    home.columns->for_each_column(end, row.twins().front(), [&](BlockId cached) {
        const BlockId own = row[--column];
        const bool is_sole_twin = own != cached && home.pool.ref_count(own) == 1;
        if (is_sole_twin) home.columns->fill_holes(cached, own);
    });
}

// With one page more in front of each window, so that the next turn still hits when it differs in
// the last page.
void WindowRows::clear(Replica& home, SequenceHandle handle, const PageRow& row) noexcept {
    WindowRow& reader = of(handle);
    home.columns->begin_leaving();
    home.columns->leave_from({row.node(), std::max(1, row.committed() - 1)});
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        const std::int32_t first = reader.first[w];
        if (first > 0 && first <= row.size()) home.columns->keep(row[first - 1], w);
    }
    home.columns->begin_leaving();
    home.columns->leave_from({row.node(), row.committed()});
    fill_twins(home, row);
    leave_columns(home, handle, row, 0, row.size());
    const std::uint32_t version = reader.version;
    reader = {};
    reader.version = version + 1;
}

void WindowRows::take_hit(Replica& home, SequenceHandle handle, const PageRow& row,
                          std::int32_t columns, std::int64_t tokens, bool is_reader) noexcept {
    WindowRow& reader = of(handle);
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        const std::int32_t first = grouping_.first_column(grouping_.windows()[w], tokens);
        // Own columns behind the hit stay. Where that goes on below, a window may begin further on.
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

// Where a hit ends for which a column is kept that the row passes; 0: it is not.
std::int32_t WindowRows::kept_for(const PageRow& row, const WindowRow& reader, std::size_t window,
                                  std::int32_t column) const noexcept {
    if (column >= row.committed()) return 0;
    const std::int32_t reach = grouping_.reach(grouping_.windows()[window]);
    const std::int32_t branch = first_branch(row, column, reach);
    if (branch > 0) return branch;
    const bool is_in_front = column < reader.prompt_end && reader.prompt_end - column <= reach;
    return is_in_front ? std::min(reader.prompt_end, row.committed()) : 0;
}

void WindowRows::advance(Replica& home, SequenceHandle handle, const PageRow& row,
                         std::int64_t tokens) noexcept {
    WindowRow& reader = of(handle);
    const std::int64_t n = std::max<std::int64_t>(0, tokens - kept_tokens_);
    home.columns->begin_leaving();
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        const std::int32_t end =
            std::min(row.size(), grouping_.first_column(grouping_.windows()[w], n));
        std::int32_t& first = reader.first[w];
        for (; first < end; ++first) {
            const std::int32_t kept = kept_for(row, reader, w, first);
            if (kept > 0) home.columns->leave_from({row.node(), kept});
            home.columns->pass(
                row[first], w,
                kept > 0 ? ColumnPages::Departure::kKept : ColumnPages::Departure::kPassed);
        }
    }
    note_first(reader);
}

void WindowRows::note_first(WindowRow& reader) const noexcept {
    ++reader.version;
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

void WindowRows::share(Replica& home, SequenceHandle parent, SequenceHandle child,
                       const PageRow& row) noexcept {
    WindowRow& reader = of(child);
    reader = of(parent);
    reader.reserved = std::min(reader.reserved, row.size());
    enter(home, child, row, 0, row.size());
}

}  // namespace kvcore
