// SPDX-License-Identifier: Apache-2.0
#include "request/sequence.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "kvcore/errors.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {

std::int32_t PageRow::find_shared(const BlockPool& pool, std::int32_t end) const {
    for (std::int32_t column = committed_; column < end; ++column) {
        if (pool.ref_count((*this)[column]) > 1) return column;
    }
    return end;
}

void PageRow::take_hit(Replica& home, TreePin place, std::int32_t columns) noexcept {
    place_ = std::move(place);
    const std::int32_t first = committed_;
    if (columns <= first) return;
    home.pool.free(pages_.data() + first, std::min(size(), columns) - first);
    if (!pages_.empty()) note_change(first);
    if (size() < columns) pages_.resize(static_cast<std::size_t>(columns));
    home.tree.copy_pages({place_.node(), columns}, first, pages_.data() + first);
    committed_ = read_only_end_ = columns;
}

TreePin PageRow::find_cut(PrefixTree& tree, std::int32_t columns) const {
    if (committed_ <= columns) return {};
    return {tree, tree.split({node(), columns})};
}

void PageRow::free_own_pages(BlockPool& pool, std::int32_t from) const noexcept {
    const auto first_duplicate =
        std::lower_bound(own_duplicates_.begin(), own_duplicates_.end(), from);
    for (auto column = first_duplicate; column != own_duplicates_.end(); ++column) {
        pool.free(&pages_[static_cast<std::size_t>(*column)], 1);
    }
    const std::int32_t first = std::max(from, committed_);
    if (first < size()) pool.free(pages_.data() + first, size() - first);
}

void PageRow::drop_own_duplicates(std::int32_t from) noexcept {
    own_duplicates_.erase(std::lower_bound(own_duplicates_.begin(), own_duplicates_.end(), from),
                          own_duplicates_.end());
}

void PageRow::drop(BlockPool& pool, std::int32_t from) noexcept {
    if (from >= size()) return;
    free_own_pages(pool, from);
    pages_.resize(static_cast<std::size_t>(from));
    drop_own_duplicates(from);
    note_change(from);
}

void PageRow::move_back(std::int32_t columns, TreePin cut) noexcept {
    committed_ = columns;
    std::swap(place_, cut);
    cut.end_use();
}

void PageRow::clear(BlockPool& pool) noexcept {
    if (!pages_.empty()) note_change(0);
    free_own_pages(pool, 0);
    pages_.clear();
    own_duplicates_.clear();
    place_.end_use();
    committed_ = read_only_end_ = 0;
    commit_limit_ = kNoLimit;
}

void PageRow::commit(PrefixTree& tree, const TokenId* tokens, std::int32_t end,
                     std::vector<DuplicatePage>& duplicates, const Retention& retention) {
    const std::int32_t first = committed_;
    TreeNode* last = tree.insert(node(), tokens + std::ptrdiff_t{first} * tree.page_size(),
                                 pages_.data() + first, end - first, duplicates, retention);
    if (last != node()) place_ = TreePin(tree, last);
    committed_ = end;
    make_read_only(end);
}

void PageRow::swap_duplicates(BlockPool& pool, std::int32_t first,
                              const std::vector<DuplicatePage>& duplicates) noexcept {
    if (duplicates.empty()) return;
    std::int32_t changed = size();
    for (const DuplicatePage& duplicate : duplicates) {
        const std::int32_t column = first + duplicate.index;
        changed = std::min(changed, column);
        BlockId& page = pages_[static_cast<std::size_t>(column)];
        pool.free(&page, 1);
        page = duplicate.cached;
    }
    note_change(changed);
}

void PageRow::entrust(BlockPool& pool, std::int32_t column, TreePin end) noexcept {
    pool.free(&pages_[static_cast<std::size_t>(column)], 1);
    place_ = std::move(end);
    for (std::int32_t c = committed_; c < column; ++c) own_duplicates_.push_back(c);
    committed_ = column + 1;
    make_read_only(committed_);
}

void PageRow::make_room_to_share(const PageRow& from, std::int32_t columns) {
    pages_.reserve(static_cast<std::size_t>(columns));
    own_duplicates_.reserve(from.own_duplicates_.size());
}

void PageRow::share(BlockPool& pool, PageRow& from, std::int32_t columns, TreePin place) noexcept {
    pages_.assign(from.pages_.begin(), from.pages_.begin() + columns);
    committed_ = std::min(from.committed_, columns);
    place_ = std::move(place);
    own_duplicates_.assign(
        from.own_duplicates_.begin(),
        std::lower_bound(from.own_duplicates_.begin(), from.own_duplicates_.end(), committed_));
    for (const std::int32_t column : own_duplicates_) {
        pool.share(&pages_[static_cast<std::size_t>(column)], 1);
    }
    pool.share(pages_.data() + committed_, columns - committed_);
    read_only_end_ = columns;
    commit_limit_ = from.commit_limit_;
    from.make_read_only(columns);
}

void PageRow::check_integrity(const PrefixTree& tree) const {
    using detail::require_law;
    require_law(committed_ <= size(), "sequence: commits pages it holds");
    require_law(read_only_end_ >= committed_ && read_only_end_ <= std::max(committed_, size()),
                "sequence: committed and shared columns are read-only");
    require_law(node() != nullptr || pages_.empty(),
                "sequence: has a place in the tree once it holds pages");
    if (node() == nullptr) return;
    require_law(
        !PrefixTree::is_forgotten(node()) || commit_limit_ <= PrefixTree::findable_depth(node()),
        "sequence: forgotten columns are beyond the commit limit");
    const std::int32_t depth = PrefixTree::depth_of(node());
    require_law(depth == committed_, "sequence: its place is the end of its columns in the tree");
    std::vector<BlockId> cached(static_cast<std::size_t>(depth));
    tree.copy_pages({node(), depth}, 0, cached.data());
    for (std::int32_t column = 0; column < depth; ++column) {
        const bool is_own_duplicate =
            std::binary_search(own_duplicates_.begin(), own_duplicates_.end(), column);
        require_law(
            (cached[static_cast<std::size_t>(column)] != (*this)[column]) == is_own_duplicate,
            "sequence: only own duplicates differ from the pages of the tree");
    }
}

namespace {

// An entry retires at this generation: after a wrap-around, old handles would be valid again.
constexpr std::uint32_t kLastGeneration = std::numeric_limits<std::uint32_t>::max();

}  // namespace

SequenceHandle SequenceTable::claim(std::int32_t replica) {
    if (free_.empty()) {
        // Makes room for the release of the entry, which must not allocate.
        if (free_.capacity() <= entries_.size()) free_.reserve(2 * entries_.size() + 1);
        entries_.emplace_back();
        free_.push_back(static_cast<std::uint32_t>(entries_.size() - 1));
    }
    const std::uint32_t index = free_.back();
    free_.pop_back();
    entries_[index].replica = static_cast<std::int16_t>(replica);
    return {index, entries_[index].generation};
}

void SequenceTable::release(SequenceHandle handle) noexcept {
    Sequence& sequence = entries_[handle.index];
    Sequence fresh;
    if (sequence.generation == kLastGeneration) {
        fresh.generation = kLastGeneration;
    } else {
        fresh.generation = sequence.generation + 1;
        fresh.pages.take_memory(sequence.pages);  // reused by the next sequence of the entry
        free_.push_back(handle.index);
    }
    sequence = std::move(fresh);
}

void SequenceTable::refuse(SequenceHandle handle, std::int64_t row) {
    const std::string text =
        detail::concat("sequence ", handle.index, " (generation ", handle.generation,
                       ") is not claimed; claim it before use");
    if (row < 0) throw RequestNotFoundError(text);
    throw InRow<RequestNotFoundError>(row, text);
}

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

void WindowRows::enter_windows(Replica& home, SequenceHandle handle, const PageRow& row,
                               std::int32_t from, std::int32_t to) noexcept {
    WindowRow& reader = of(handle);
    note_change(reader);
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        const std::int32_t first = std::max(from, reader.first[w]);
        if (first < to) home.columns->enter(row.ids().data() + first, to - first, w);
    }
}

void WindowRows::leave_windows(Replica& home, SequenceHandle handle, const PageRow& row,
                               std::int32_t from, std::int32_t to) const noexcept {
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

void WindowRows::leave_column(Replica& home, SequenceHandle handle, const PageRow& row,
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
    leave_windows(home, handle, row, from, row.size());
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

void WindowRows::take_windows(Replica& home, SequenceHandle handle, const PageRow& row,
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
    if (!is_reader) enter_windows(home, handle, row, 0, columns);
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
    enter_windows(home, child, row, 0, row.size());
}

namespace {

void check_priority(std::int32_t priority, std::int64_t duration) {
    if (priority < 0 || priority > 100) {
        throw std::invalid_argument(detail::concat("priority is ", priority, ", must be 0 .. 100"));
    }
    if (duration < 1) {
        throw std::invalid_argument(
            detail::concat("a priority lasts ", duration, " units of time, must be at least 1"));
    }
}

void check_request(const RequestPriority& priority) {
    check_priority(priority.priority, priority.duration);
    std::int64_t last = 0;
    for (const RetainedTokens& range : priority.ranges) {
        check_priority(range.priority, range.duration);
        if (range.start < last || range.end <= range.start) {
            throw std::invalid_argument(detail::concat(
                "retained tokens are ", range.start, " .. ", range.end,
                ", must be at least 1 token and start at ", last, " or later; sort the ranges"));
        }
        last = range.end;
    }
}

}  // namespace

void Priorities::set(SequenceHandle sequence, const RequestPriority& priority) {
    check_request(priority);
    auto own = std::make_unique<RequestPriority>(priority);
    if (sequence.index >= all_.size()) all_.resize(sequence.index + std::size_t{1});
    all_[sequence.index] = std::move(own);
}

void Priorities::forget(SequenceHandle sequence) noexcept {
    if (sequence.index < all_.size()) all_[sequence.index].reset();
}

Retention Priorities::lasting(std::int32_t priority, std::int64_t duration) const noexcept {
    const std::int64_t left = Retention::kForever - std::max<std::int64_t>(now_, 0);
    return {priority, duration < left ? now_ + duration : Retention::kForever};
}

std::int64_t Priorities::time_of_return(std::int64_t returns_in) const noexcept {
    if (returns_in > ReturnTime::kLatest) return returns_in;
    const std::int64_t left = ReturnTime::kLatest - std::max<std::int64_t>(now_, 0);
    return std::min(returns_in, left) + now_;
}

Priorities::Segment Priorities::segment_of(const RequestPriority& priority,
                                           std::int32_t column) const noexcept {
    constexpr std::int64_t kLast = std::numeric_limits<std::int32_t>::max();
    const auto column_of = [&](std::int64_t token) {
        return static_cast<std::int32_t>(std::min(ceil_div(token, page_size_), kLast));
    };
    for (const RetainedTokens& range : priority.ranges) {
        const std::int32_t start = column_of(range.start);
        const std::int32_t end = column_of(range.end);
        if (column >= end || start == end) continue;
        if (column < start) return {start, lasting(priority.priority, priority.duration)};
        return {end, lasting(range.priority, range.duration)};
    }
    return {static_cast<std::int32_t>(kLast), lasting(priority.priority, priority.duration)};
}

void Priorities::retain(PrefixTree& tree, SequenceHandle sequence, TreePosition at,
                        std::int32_t first) const noexcept {
    while (first < at.depth) {
        const Segment kept = segment(sequence, first);
        tree.retain(at, first, std::min(kept.end, at.depth), kept.retention);
        first = kept.end;
    }
}

Owner quotas::owner_of(const CacheConfig& config, std::int32_t tenant) {
    const auto n = static_cast<std::int64_t>(config.quotas.size());
    if (tenant < RequestPriority::kNoTenant || tenant >= n) {
        throw std::invalid_argument(detail::concat("tenant is ", tenant, ", must be one of ", n,
                                                   " quotas, counted from 0, or kNoTenant"));
    }
    return static_cast<Owner>(tenant + 1);
}

}  // namespace kvcore
