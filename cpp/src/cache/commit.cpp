// SPDX-License-Identifier: Apache-2.0
#include "cache/commit.hpp"

#include <algorithm>
#include <cstddef>
#include <new>
#include <stdexcept>
#include <utility>

#include "kvcore/errors.hpp"
#include "support/make_room.hpp"

namespace kvcore {
namespace {

[[noreturn]] void refuse_unreserved(const RequestView& request, std::int32_t pages,
                                    std::int64_t page_size, std::int64_t row) {
    throw InRow<std::invalid_argument>(
        row,
        detail::concat(request.start, " tokens are said to be written, the ", pages, " pages hold ",
                       pages * page_size, "; reserve before running the model"));
}

}  // namespace

// Calls visit(other) for every other sequence that holds this page as its own in the same column:
// forks. O(sequences).
template <class Visit>
void Committer::for_each_other_holder(const Sequence& sequence, std::int32_t column,
                                      const Visit& visit) {
    const BlockId page = sequence.pages[column];
    for (Sequence& other : state_.sequences.live()) {
        const bool holds = &other != &sequence && other.replica == sequence.replica &&
                           other.pages.has_uncommitted(column, page);
        if (holds) visit(other.pages);
    }
}

// A fork filled and committed a page that it shares with other forks. The page belongs to the tree
// now, which could evict it. So the other forks, copies under way and holds by id now hold it in
// the tree; for a fork it is the last committed page. If the tree has other pages for a fork's
// earlier columns, the fork keeps its own pages. O(sequences), once for each shared page; there is
// room.
void Committer::entrust_to_tree(const Sequence& sequence, std::int32_t column) noexcept {
    Replica& home = state_.home_of(sequence);
    TreeNode* end = sequence.pages.node();
    for_each_other_holder(sequence, column, [&](PageRow& other) {
        other.entrust(home.pool, column, TreePin(home.tree, end));
    });
    state_.copies.move_to_tree(sequence.replica, sequence.pages[column], {end, column + 1});
    state_.holds.move_to_tree(home, sequence.pages[column], {end, column + 1});
}

// Puts the columns from the committed ones to `end` into the tree. Only the last of them may also
// belong to other sequences: `is_shared`. Returns false if quotas leave no room for the pages that
// the row would hold.
bool Committer::commit_run(Sequence& sequence, SequenceHandle handle, const TokenId* tokens,
                           std::int32_t end, bool is_shared, const Retention& retention,
                           std::int32_t row) {
    Replica& home = state_.home_of(sequence);
    PageRow& pages = sequence.pages;
    const std::int32_t first = pages.committed();
    if (is_shared) {
        for_each_other_holder(sequence, end - 1, [&](PageRow& other) {
            other.make_room_for_duplicates(static_cast<std::size_t>(end - 1 - other.committed()));
        });
    }
    if (home.owners != nullptr) {
        const std::int64_t n = std::int64_t{end - first} * state_.config.page_size;
        const TokenId* from = tokens + std::ptrdiff_t{first} * state_.config.page_size;
        const TreePosition known = home.tree.match(pages.node(), from, n).at;
        if (!owned_.begin(state_, sequence, handle, known, first)) return false;
    }
    duplicates_.clear();
    const auto lanes = static_cast<std::size_t>(state_.grouping.num_lanes());
    make_room(swapped_, static_cast<std::size_t>(end - first) * lanes);
    if (home.columns != nullptr) {
        make_room(replaced_, static_cast<std::size_t>(end - first));
        home.make_room_to_cache(end - first, home.num_sequences);
    }
    if (!state_.config.dedup) pages.make_room_for_duplicates(static_cast<std::size_t>(end - first));
    if (is_shared && home.columns != nullptr) pages.make_room_for_duplicates(1);
    pages.commit(home.tree, tokens, end, duplicates_, retention);
    // Nothing below can fail.
    state_.flights.note_commit(sequence, first, end, duplicates_);
    if (home.columns != nullptr) cache_columns(home, pages, first, end);
    if (is_shared || !duplicates_.empty()) settle_run(sequence, handle, first, end, is_shared, row);
    if (home.owners != nullptr) owned_.end();
    return true;
}

// The columns of a run now have a place in the tree, which already had some of them.
void Committer::settle_run(Sequence& sequence, SequenceHandle handle, std::int32_t first,
                           std::int32_t end, bool is_shared, std::int32_t row) noexcept {
    Replica& home = state_.home_of(sequence);
    PageRow& pages = sequence.pages;
    const auto num_duplicates = static_cast<std::int32_t>(duplicates_.size());
    if (is_shared && num_duplicates < end - first) entrust_to_tree(sequence, end - 1);
    if (num_duplicates == 0) return;
    if (!state_.config.dedup) {
        for (const DuplicatePage& each : duplicates_) pages.keep_own_duplicate(first + each.index);
        home.note_peak();  // the row now also holds the tree's pages
        return;
    }
    if (home.columns != nullptr) {
        keep_what_others_read(home, handle, pages, first);
        swap_columns(home, handle, pages, first, row);
        if (is_shared) home.note_peak();  // a fork still holds the replaced column
        return;
    }
    pages.swap_duplicates(home.pool, first, duplicates_);
    for (const DuplicatePage& duplicate : duplicates_) {
        swapped_.push_back({row, first + duplicate.index, duplicate.cached});
    }
}

// Caches columns `first` .. `end` - 1, except the columns that the tree already had.
void Committer::cache_columns(Replica& home, const PageRow& pages, std::int32_t first,
                              std::int32_t end) const noexcept {
    auto duplicate = duplicates_.begin();
    for (std::int32_t c = first; c < end; ++c) {
        if (duplicate != duplicates_.end() && first + duplicate->index == c) {
            ++duplicate;
        } else {
            home.columns->cache(pages[c]);
        }
    }
}

// The tree's column cannot take over a page that others also read. If the tree's column lacks a
// page that this row reads, the row keeps its own column, as an own duplicate. Only the last column
// may be shared.
void Committer::keep_what_others_read(Replica& home, SequenceHandle handle, PageRow& pages,
                                      std::int32_t first) noexcept {
    const ColumnPages& columns = *home.columns;
    const std::int32_t index = first + duplicates_.back().index;
    const BlockId own = pages[index];
    if (home.pool.ref_count(own) == 1) return;
    const WindowRow& reader = state_.windows.of(handle);
    for (std::size_t w = 0; w < state_.grouping.windows().size(); ++w) {
        const bool is_missed = index >= reader.first[w] && columns.has(own, w) &&
                               !columns.has(duplicates_.back().cached, w);
        if (!is_missed) continue;
        duplicates_.pop_back();
        pages.keep_own_duplicate(index);
        return home.note_peak();
    }
}

// The tree's columns take over the pages that they lack, and the row reads them instead of its own
// columns. The swapped pages are the pages that the tree already had.
void Committer::swap_columns(Replica& home, SequenceHandle handle, PageRow& pages,
                             std::int32_t first, std::int32_t row) noexcept {
    ColumnPages& columns = *home.columns;
    const Grouping& grouping = state_.grouping;
    for (const DuplicatePage& duplicate : duplicates_) {
        const std::int32_t index = first + duplicate.index;
        const BlockId own = pages[index];
        const bool is_sole = home.pool.ref_count(own) == 1;
        for (std::size_t b = 0; b < grouping.bundles().size(); ++b) {
            const Grouping::Bundle& bundle = grouping.bundles()[b];
            for (std::int32_t i = 0; i < bundle.pages_per_column; ++i) {
                const BlockId page = columns.page(duplicate.cached, bundle.first_lane + i);
                const bool had = columns.page(own, bundle.first_lane + i) != ColumnPages::kNoPage;
                if (page == ColumnPages::kNoPage || !had) continue;
                swapped_.push_back(
                    {row, index * bundle.pages_per_column + i, page, static_cast<std::int32_t>(b)});
            }
        }
        state_.windows.enter_one(home, handle, index, duplicate.cached);
        if (is_sole) columns.fill_holes({pages.node(), index + 1}, duplicate.cached, own);
    }
    replaced_.clear();
    for (const DuplicatePage& duplicate : duplicates_) {
        replaced_.push_back(pages[first + duplicate.index]);
    }
    pages.swap_duplicates(home.pool, first, duplicates_);
    for (std::size_t i = 0; i < duplicates_.size(); ++i) {
        state_.windows.leave_one(home, handle, pages, first + duplicates_[i].index, replaced_[i]);
    }
}

// Commits in pieces. A piece ends after a page that forks or copies under way also hold, so that
// these get a place in the tree; another piece begins where the priority changes.
void Committer::commit_pages(Sequence& sequence, const RequestView& request, std::int32_t row) {
    const Replica& home = state_.home_of(sequence);
    const BlockPool& pool = home.pool;
    PageRow& pages = sequence.pages;
    const auto columns = this->written(request) / state_.config.page_size;
    const auto written =
        static_cast<std::int32_t>(std::min<std::int64_t>(columns, pages.commit_limit()));
    while (pages.committed() < written) {
        const std::int32_t read_only = std::min(pages.read_only_end(), written);
        const bool is_held = !state_.copies.empty() || !state_.holds.empty();
        const std::int32_t end = is_held ? written : read_only;
        const std::int32_t found = pages.find_shared(pool, end);
        const std::int32_t shared = found < end ? found : written;
        Priorities::Segment kept;
        if (home.keeps_by_priority)
            kept = state_.priorities.segment(request.sequence, pages.committed());
        const std::int32_t piece = std::min({shared + 1, written, kept.end});
        if (!commit_run(sequence, request.sequence, request.tokens, piece, shared < piece,
                        kept.retention, row)) {
            return;
        }
    }
}

// Checks all rows. rows_ gets the rows with new pages and the rows that are not sealed yet;
// passing_ gets the rows whose windows leave columns.
template <bool kHasWindows>
void Committer::find_new_pages(const RequestBatch& given) {
    const RequestBatch batch = given;
    const std::int64_t n = batch.size();
    const std::int64_t page_size = state_.config.page_size;
    const SequenceTable::Live sequences = state_.sequences.live();
    const WindowView windows = state_.windows.view();
    const bool may_owe = state_.flights.rules().is_selective();
    const bool leaves = !state_.config.keep_windows;
    rows_.clear();
    passing_.clear();
    UndoLog<&Sequence::written> written(undo_, n);
    for (std::int64_t i = 0; i < n; ++i) {
        if (i + kAhead < n) sequences.prefetch(batch[i + kAhead].sequence);
        const RequestView& request = batch[i];
        Sequence& sequence = sequences.at(request.sequence, i);
        if (!rules::has_legal_indices(request)) rules::refuse_indices(request, i);
        const std::int32_t pages = sequence.pages.size();
        if (request.start > pages * page_size) refuse_unreserved(request, pages, page_size, i);
        if (sequence.num_pending > 0) rules::refuse_pending(i);
        const std::int64_t end = this->written(request);
        written.set(sequence, end);
        if constexpr (kHasWindows) {
            if (leaves && windows.passes(request.sequence, end)) {
                passing_.push_back(i);
                const std::int32_t first = windows.of(request.sequence).first[0];
                if (first < pages) prefetch(sequence.pages.ids().data() + first);
                PrefixTree::prefetch_node(sequence.pages.node());
            }
        }
        const bool is_due = may_owe && state_.flights.is_due(request.sequence);
        if (sequence.is_sealed() && !has_new_page(sequence, request) && !is_due) continue;
        rows_.push_back(i);
        PrefixTree::prefetch_node(sequence.pages.node());
    }
    written.keep();
}

// Written tokens have moved windows on. Pages that windows have passed are given back; if they were
// committed before, the tree keeps them.
void Committer::leave_windows(const RequestBatch& batch) noexcept {
    for (std::size_t k = 0; k < passing_.size(); ++k) {
        if (k + 2 < passing_.size()) {
            const SequenceHandle later = batch[passing_[k + 2]].sequence;
            const Sequence& sequence = *state_.sequences.find(later);
            state_.windows.prefetch(state_.home_of(sequence), later, sequence.pages);
        }
        const RequestView& request = batch[passing_[k]];
        const Sequence& sequence = *state_.sequences.find(request.sequence);
        state_.windows.advance(state_.home_of(sequence), request.sequence, sequence.pages,
                               written(request));
    }
}

// Makes no checkpoint if memory or slots are missing.
void Committer::advance_states(const RequestBatch& batch, Transfers* transfers) {
    for (std::int64_t i = 0; i < batch.size(); ++i) {
        const RequestView& request = batch[i];
        const RecurrentState& row = state_.states.of(request.sequence);
        if (row.slot == RecurrentSlots::kNone) continue;
        if (!state_.states.advance(request.sequence, request.start)) continue;
        Sequence& sequence = *state_.sequences.find(request.sequence);
        const bool has_place =
            request.start == std::int64_t{sequence.pages.committed()} * state_.config.page_size;
        // The prefix was not committed if memory, or room in a quota, was missing.
        if (!has_place || sequence.pages.holds_forgotten()) continue;
        try {
            make_checkpoint(sequence, request.sequence, transfers);
        } catch (const std::bad_alloc&) {
            continue;
        }
    }
}

// Makes a checkpoint at the end of the committed prefix, unless it exists already: on the device
// and in the tier, each by itself.
void Committer::make_checkpoint(Sequence& sequence, SequenceHandle handle, Transfers* transfers) {
    Replica& home = state_.home_of(sequence);
    const RecurrentSlots::Slot slot = state_.states.of(handle).slot;
    if (home.host != nullptr) {
        state_.flights.owe_checkpoint(handle, sequence, slot, *transfers);
    }
    RecurrentSlots& states = *home.states;
    const TreePosition end{sequence.pages.node(), sequence.pages.committed()};
    const BlockId column = Replica::last_column(home.tree, end);
    const RecurrentSlots::Slot known = states.find(column);
    if (known != RecurrentSlots::kNone) return states.renew(known);
    state_.state_copies.make_room(1, transfers);
    const RecurrentSlots::Slot made = states.add(column, end);
    if (made == RecurrentSlots::kNone) return;
    state_.state_copies.add({sequence.replica, slot, made}, handle, {}, transfers);
}

// Runs after the checkpoints of the call, because a checkpoint also stores the pages before it.
void Committer::store_rows(const RequestBatch& batch, Transfers& transfers) noexcept {
    for (const std::int64_t row : rows_) {
        const SequenceHandle handle = batch[row].sequence;
        try {
            state_.flights.owe_stores(handle, *state_.sequences.find(handle), transfers);
        } catch (const std::bad_alloc&) {
            continue;
        }
    }
}

void Committer::commit(const RequestBatch& batch, std::vector<PageSwap>& swaps,
                       Transfers* transfers) {
    const bool copies_states = state_.states.exist() && transfers != nullptr;
    if (state_.config.host_pages > 0 || copies_states) rules::require_transfers(state_, transfers);
    const StoreRules& rules = state_.flights.rules();
    const bool stores =
        state_.config.host_pages > 0 && transfers != nullptr && !rules.writes_back();
    const bool is_late = rules.has_marks() && state_.states.exist();
    state_.grouping.windows().empty() ? find_new_pages<false>(batch) : find_new_pages<true>(batch);
    swapped_.clear();
    for (std::size_t k = 0; k < rows_.size(); ++k) {
        const std::int64_t row = rows_[k];
        if (k + 2 < rows_.size()) {
            const Sequence* later = state_.sequences.find(batch[rows_[k + 2]].sequence);
            state_.home_of(*later).tree.prefetch_end(later->pages.node());
        }
        const RequestView& request = batch[row];
        Sequence& sequence = *state_.sequences.find(request.sequence);
        if (written(request) != sequence.hit_tokens) {
            state_.counts.seal(state_.home_of(sequence).metrics, request.sequence, sequence,
                               state_.config.page_size);
        }
        // Checked again, because an earlier row may name the same request.
        const bool has_new = has_new_page(sequence, request);
        const bool is_due = rules.is_selective() && state_.flights.is_due(request.sequence);
        if (!state_.config.prefix_caching || !(has_new || is_due)) continue;
        try {
            if (has_new) commit_pages(sequence, request, static_cast<std::int32_t>(row));
            if (stores && !is_late) {
                state_.flights.owe_stores(request.sequence, sequence, *transfers);
            }
        } catch (const std::bad_alloc&) {
            // The pages stay the sequence's own; a later commit finds them and tries again. Swapped
            // pages must still be reported.
            continue;
        }
    }
    leave_windows(batch);
    if (state_.states.exist()) advance_states(batch, transfers);
    if (stores && is_late) store_rows(batch, *transfers);
    // Memory for swaps is kept from call to call, because few calls swap pages.
    swaps.clear();
    if (!swapped_.empty()) swaps.swap(swapped_);
}

bool OwnedCommit::begin(const CacheData& state, const Sequence& sequence, SequenceHandle handle,
                        TreePosition known, std::int32_t first) {
    home_ = &state.home_of(sequence);
    pages_.clear();
    takers_.clear();
    if (known.depth <= first) return true;
    static_cast<void>(home_->num_evictable());  // reports recent pins to the owners
    const PageRow& row = sequence.pages;
    bool is_swapped = state.config.dedup;
    ColumnsUp columns(known, state.config.page_size);
    for (std::int32_t c = known.depth - 1; c >= first; --c) {
        is_swapped &= home_->pool.ref_count(row[c]) == 1;
        add(columns[c], row[c]);
    }
    if (is_swapped) return true;
    const Owner owner = state.tenants.of(handle);
    takers_.assign(pages_.size(), owner);
    QuotaTrial trial(*home_);
    for (const BlockId page : pages_) trial.hold(page);
    for (const BlockId page : pages_) trial.share_out(page, owner);
    return trial.is_lawful();
}

// Adds the evictable pages of a cached column that a row will read. If the owner of a page has no
// room, the page counts for the owner of the row's own page, which is then free.
void OwnedCommit::add(BlockId cached, BlockId own) {
    const PageOwners& owners = *home_->owners;
    if (home_->columns == nullptr) {
        if (owners.is_held(cached)) return;
        pages_.push_back(cached);
        takers_.push_back(owners.owner(own));
        return;
    }
    const ColumnPages& columns = *home_->columns;
    for (std::int32_t lane = 0; lane < columns.grouping().num_lanes(); ++lane) {
        const BlockId page = columns.page(cached, lane);
        const BlockId other = columns.page(own, lane);
        const bool both = page != ColumnPages::kNoPage && other != ColumnPages::kNoPage;
        if (!both || owners.is_held(page)) continue;
        pages_.push_back(page);
        takers_.push_back(owners.owner(other));
    }
}

void OwnedCommit::end() noexcept {
    const std::int64_t available = home_->num_available();
    for (std::size_t i = 0; i < pages_.size(); ++i) {
        home_->owners->share_out(pages_[i], takers_[i], available);
    }
}

}  // namespace kvcore
