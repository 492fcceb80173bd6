// SPDX-License-Identifier: Apache-2.0
#include "manager/window_rows.hpp"

#include <algorithm>
#include <limits>

#include "index/tree_node.hpp"

namespace kvcore {
namespace {

/// Columns of a row up to `end` that are in front of the same branch, no more than a reach behind
/// them; 0: of none.
struct Stretch {
    std::int32_t end;
    std::int32_t branch;
};

// From a committed column on. What was committed in pieces is in as many runs: the branch may be
// some of them further on.
Stretch stretch_from(const PageRow& row, std::int32_t column, std::int32_t reach) noexcept {
    std::int32_t branch = 0;
    for (const TreeNode* node = row.node(); node->end() > column; node = node->parent) {
        if (node->num_children > 1) branch = node->end();
    }
    if (branch == 0) return {row.committed(), 0};
    return branch - column <= reach ? Stretch{branch, branch} : Stretch{branch - reach, 0};
}

void note_change(WindowRow& reader) noexcept {
    if (++reader.version == 0) reader.version = 1;  // 0 is that of no row
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

// What is in front of a branch is kept for that; else for whoever goes on where the row ends. Where
// hits end at checkpoints, it is kept for the next one.
void WindowRows::leave_columns(Replica& home, SequenceHandle handle, const PageRow& row,
                               std::int32_t from, std::int32_t to) const noexcept {
    const WindowRow& reader = of(handle);
    const std::int32_t committed = std::min(row.committed(), to);
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        std::int32_t c = std::max(from, reader.first[w]);
        while (c < to) {
            auto how = ColumnPages::Departure::kKept;
            std::int32_t end = to;
            if (c < committed && home.columns->needs_checkpoints()) {
                // The next column may be in front of another one.
                const std::int32_t hit =
                    home.columns->first_hit({row.node(), row.committed()}, c, w);
                if (hit > 0) home.columns->leave_from({row.node(), hit});
                if (hit == 0) how = ColumnPages::Departure::kUseless;
                end = c + 1;
            } else if (c < committed) {
                const Stretch stretch = stretch_from(row, c, grouping_.windows()[w].reach);
                end = std::min(stretch.end, committed);
                const std::int32_t kept = stretch.branch > 0 ? stretch.branch : committed;
                home.columns->leave_from({row.node(), kept});
            }
            home.columns->leave(row.ids().data() + c, end - c, w, how);
            c = end;
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

void WindowRows::grow(Replica& home, SequenceHandle handle, const PageRow& row,
                      std::int32_t from) noexcept {
    WindowRow& reader = of(handle);
    note_change(reader);
    for (std::int32_t c = from; c < row.size(); ++c) home.columns->begin(row[c]);
    reader.reserved = row.size();
}

void WindowRows::cut(Replica& home, SequenceHandle handle, const PageRow& row,
                     std::int32_t from) noexcept {
    leave(home, handle, row, from, row.size());
    WindowRow& reader = of(handle);
    note_change(reader);
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
        if (is_sole_twin) home.columns->fill_holes({row.node(), column + 1}, cached, own);
    });
}

// One page more in front of each window, so that the next turn still hits when it differs in the
// last page.
void WindowRows::keep_one_more(Replica& home, const WindowRow& reader,
                               const PageRow& row) const noexcept {
    home.columns->begin_leaving();
    home.columns->leave_from({row.node(), std::max(1, row.committed() - 1)});
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        const std::int32_t first = reader.first[w];
        if (first > 0 && first <= row.size()) home.columns->keep(row[first - 1], w);
    }
}

// Where hits end at checkpoints, none ends one page earlier.
void WindowRows::clear(Replica& home, SequenceHandle handle, const PageRow& row) noexcept {
    WindowRow& reader = of(handle);
    if (!home.columns->needs_checkpoints()) keep_one_more(home, reader, row);
    home.columns->begin_leaving();
    home.columns->leave_from({row.node(), row.committed()});
    fill_twins(home, row);
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

// How a row leaves a column that it passes, and where the hit ends for which that is kept.
WindowRows::Left WindowRows::left(const Replica& home, const PageRow& row, const WindowRow& reader,
                                  std::size_t window, std::int32_t column) const noexcept {
    using Departure = ColumnPages::Departure;
    if (column >= row.committed()) return {Departure::kPassed, 0};
    const std::int32_t reach = grouping_.windows()[window].reach;
    const std::int32_t branch = stretch_from(row, column, reach).branch;
    if (home.columns->needs_checkpoints()) {
        const std::int32_t hit =
            home.columns->first_hit({row.node(), row.committed()}, column, window);
        if (hit == 0) return {Departure::kUseless, 0};
        // The checkpoint in front of a prompt's end, or one behind it.
        const bool is_kept = branch > 0 || hit >= reader.prompt_end - 1;
        return {is_kept ? Departure::kKept : Departure::kPassed, hit};
    }
    if (branch > 0) return {Departure::kKept, branch};
    const bool is_in_front = column < reader.prompt_end && reader.prompt_end - column <= reach;
    if (!is_in_front) return {Departure::kPassed, 0};
    return {Departure::kKept, std::min(reader.prompt_end, row.committed())};
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
            const auto [how, end_of_hit] = left(home, row, reader, w, first);
            if (how == ColumnPages::Departure::kKept) {
                home.columns->leave_from({row.node(), end_of_hit});
            }
            home.columns->pass(row[first], w, how);
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

void WindowRows::share(Replica& home, SequenceHandle parent, SequenceHandle child,
                       const PageRow& row) noexcept {
    WindowRow& reader = of(child);
    reader = of(parent);
    reader.reserved = std::min(reader.reserved, row.size());
    enter(home, child, row, 0, row.size());
}

}  // namespace kvcore
