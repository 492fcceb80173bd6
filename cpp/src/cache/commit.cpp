// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <new>
#include <stdexcept>
#include <utility>

#include "cache/validate_requests.hpp"
#include "cache/verbs.hpp"
#include "kvcore/errors.hpp"
#include "level/quotas.hpp"
#include "request/sequence.hpp"
#include "support/memory.hpp"

namespace kvcore::verbs {
namespace {

[[noreturn]] void refuse_unreserved(const RequestView& request, std::int32_t pages,
                                    std::int64_t page_size, std::int64_t row) {
    throw InRow<std::invalid_argument>(
        row, detail::concat("start_idx is ", request.start, ", but the ", pages,
                            " pages of the request hold only ", pages * page_size,
                            " tokens; reserve before running the model"));
}

// The number of tokens of a request that stay written. With states it is less than `start` if some
// tokens run again after rejected drafts.
std::int64_t written_tokens(const CacheData& cache, const RequestView& request) noexcept {
    return cache.states.begin_of(request.sequence, request.start);
}

bool has_new_page(const CacheData& cache, const Sequence& sequence,
                  const RequestView& request) noexcept {
    return written_tokens(cache, request) >=
           (sequence.pages.committed() + std::int64_t{1}) * cache.config.page_size;
}

// Calls visit(other) for every other sequence that holds this page as its own in the same column:
// forks. O(sequences).
template <class Visit>
void for_each_other_holder(CacheData& cache, const Sequence& sequence, std::int32_t column,
                           const Visit& visit) {
    const BlockId page = sequence.pages[column];
    for (Sequence& other : cache.sequences.live()) {
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
void entrust_to_tree(CacheData& cache, const Sequence& sequence, std::int32_t column) noexcept {
    Replica& home = cache.home_of(sequence);
    TreeNode* end = sequence.pages.node();
    for_each_other_holder(cache, sequence, column, [&](PageRow& other) {
        other.entrust(home.pool, column, TreePin(home.tree, end));
    });
    home.move_refs_to_tree(sequence.pages[column], {end, column + 1});
}

// Adds the evictable pages of a cached column that a row will read. If the owner of a page has no
// room, the page counts for the owner of the row's own page, which is then free.
void adopt_column(CommitMemory& memory, const Replica& home, BlockId cached, BlockId own) {
    const PageOwners& owners = *home.owners;
    if (home.columns == nullptr) {
        if (owners.is_held(cached)) return;
        memory.adopted.push_back(cached);
        memory.takers.push_back(owners.owner(own));
        return;
    }
    const ColumnPages& columns = *home.columns;
    for (std::int32_t lane = 0; lane < columns.grouping().num_lanes(); ++lane) {
        const BlockId page = columns.page(cached, lane);
        const BlockId other = columns.page(own, lane);
        const bool both = page != ColumnPages::kNoPage && other != ColumnPages::kNoPage;
        if (!both || owners.is_held(page)) continue;
        memory.adopted.push_back(page);
        memory.takers.push_back(owners.owner(other));
    }
}

// With quotas: finds the cached pages that a commit of columns `first` .. known.depth - 1 meets on
// the way to `known` and that no request held before. The request holds them from now on. If they
// replace the row's own pages, these become free and quotas can be kept; if both stay, quotas may
// leave no room for them. Returns false if the columns must not be committed now. Throws
// std::bad_alloc, and has changed nothing.
[[gnu::noinline]] bool find_adopted(CacheData& cache, const Sequence& sequence,
                                    SequenceHandle handle, TreePosition known, std::int32_t first) {
    const Replica& home = cache.home_of(sequence);
    CommitMemory& memory = cache.commit_memory;
    memory.adopted.clear();
    memory.takers.clear();
    if (known.depth <= first) return true;
    static_cast<void>(home.num_evictable());  // reports recent pins to the owners
    const PageRow& row = sequence.pages;
    bool is_swapped = cache.config.dedup;
    ColumnsUp columns(known, cache.config.page_size);
    for (std::int32_t c = known.depth - 1; c >= first; --c) {
        is_swapped &= home.pool.ref_count(row[c]) == 1;
        adopt_column(memory, home, columns[c], row[c]);
    }
    if (is_swapped) return true;
    const Owner owner = cache.tenants.of(handle);
    memory.takers.assign(memory.adopted.size(), owner);
    QuotaTrial trial(home);
    for (const BlockId page : memory.adopted) trial.hold(page);
    for (const BlockId page : memory.adopted) trial.share_out(page, owner);
    return trial.is_lawful();
}

// Called after the columns were committed.
void share_out_adopted(const CommitMemory& memory, Replica& home) noexcept {
    const std::int64_t available = home.num_available();
    for (std::size_t i = 0; i < memory.adopted.size(); ++i) {
        home.owners->share_out(memory.adopted[i], memory.takers[i], available);
    }
}

// The tree's column cannot take over a page that others also read. If the tree's column lacks a
// page that this row reads, the row keeps its own column, as an own duplicate. Only the last column
// may be shared.
void keep_what_others_read(CacheData& cache, Replica& home, SequenceHandle handle, PageRow& pages,
                           std::int32_t first) noexcept {
    const ColumnPages& columns = *home.columns;
    const std::int32_t index = first + cache.commit_memory.duplicates.back().index;
    const BlockId own = pages[index];
    if (home.pool.ref_count(own) == 1) return;
    const WindowRow& reader = cache.windows.of(handle);
    for (std::size_t w = 0; w < cache.grouping.windows().size(); ++w) {
        const bool is_missed = index >= reader.first[w] && columns.has(own, w) &&
                               !columns.has(cache.commit_memory.duplicates.back().cached, w);
        if (!is_missed) continue;
        cache.commit_memory.duplicates.pop_back();
        pages.keep_own_duplicate(index);
        return home.note_peak();
    }
}

// The tree's columns take over the pages that they lack, and the row reads them instead of its own
// columns. The swapped pages are the pages that the tree already had.
void swap_columns(CacheData& cache, Replica& home, SequenceHandle handle, PageRow& pages,
                  std::int32_t first, std::int32_t row) noexcept {
    ColumnPages& columns = *home.columns;
    const Grouping& grouping = cache.grouping;
    for (const DuplicatePage& duplicate : cache.commit_memory.duplicates) {
        const std::int32_t index = first + duplicate.index;
        const BlockId own = pages[index];
        const bool is_sole = home.pool.ref_count(own) == 1;
        for (std::size_t b = 0; b < grouping.bundles().size(); ++b) {
            const Grouping::Bundle& bundle = grouping.bundles()[b];
            for (std::int32_t i = 0; i < bundle.pages_per_column; ++i) {
                const BlockId page = columns.page(duplicate.cached, bundle.first_lane + i);
                const bool had = columns.page(own, bundle.first_lane + i) != ColumnPages::kNoPage;
                if (page == ColumnPages::kNoPage || !had) continue;
                cache.commit_memory.swapped.push_back(
                    {row, index * bundle.pages_per_column + i, page, static_cast<std::int32_t>(b)});
            }
        }
        cache.windows.enter_one(home, handle, index, duplicate.cached);
        if (is_sole) columns.fill_holes({pages.node(), index + 1}, duplicate.cached, own);
    }
    cache.commit_memory.replaced.clear();
    for (const DuplicatePage& duplicate : cache.commit_memory.duplicates) {
        cache.commit_memory.replaced.push_back(pages[first + duplicate.index]);
    }
    pages.swap_duplicates(home.pool, first, cache.commit_memory.duplicates);
    for (std::size_t i = 0; i < cache.commit_memory.duplicates.size(); ++i) {
        cache.windows.leave_one(home, handle, pages,
                                first + cache.commit_memory.duplicates[i].index,
                                cache.commit_memory.replaced[i]);
    }
}

// Caches columns `first` .. `end` - 1, except the columns that the tree already had.
[[gnu::noinline]] void cache_columns(const CacheData& cache, Replica& home, const PageRow& pages,
                                     std::int32_t first, std::int32_t end) noexcept {
    auto duplicate = cache.commit_memory.duplicates.begin();
    for (std::int32_t c = first; c < end; ++c) {
        if (duplicate != cache.commit_memory.duplicates.end() && first + duplicate->index == c) {
            ++duplicate;
        } else {
            home.columns->cache(pages[c]);
        }
    }
}

// The columns of a run now have a place in the tree, which already had some of them.
[[gnu::noinline]] void settle_run(CacheData& cache, Sequence& sequence, SequenceHandle handle,
                                  std::int32_t first, std::int32_t end, bool is_shared,
                                  std::int32_t row) noexcept {
    Replica& home = cache.home_of(sequence);
    PageRow& pages = sequence.pages;
    const auto num_duplicates = static_cast<std::int32_t>(cache.commit_memory.duplicates.size());
    if (is_shared && num_duplicates < end - first) entrust_to_tree(cache, sequence, end - 1);
    if (num_duplicates == 0) return;
    if (!cache.config.dedup) {
        for (const DuplicatePage& each : cache.commit_memory.duplicates)
            pages.keep_own_duplicate(first + each.index);
        home.note_peak();  // the row now also holds the tree's pages
        return;
    }
    if (home.columns != nullptr) {
        keep_what_others_read(cache, home, handle, pages, first);
        swap_columns(cache, home, handle, pages, first, row);
        if (is_shared) home.note_peak();  // a fork still holds the replaced column
        return;
    }
    pages.swap_duplicates(home.pool, first, cache.commit_memory.duplicates);
    for (const DuplicatePage& duplicate : cache.commit_memory.duplicates) {
        cache.commit_memory.swapped.push_back({row, first + duplicate.index, duplicate.cached});
    }
}

// Puts the columns from the committed ones to `end` into the tree. Only the last of them may also
// belong to other sequences: `is_shared`. Returns false if quotas leave no room for the pages that
// the row would hold.
bool commit_run(CacheData& cache, Sequence& sequence, SequenceHandle handle, const TokenId* tokens,
                std::int32_t end, bool is_shared, const Retention& retention, std::int32_t row) {
    Replica& home = cache.home_of(sequence);
    PageRow& pages = sequence.pages;
    const std::int32_t first = pages.committed();
    if (unlikely(is_shared)) {
        for_each_other_holder(cache, sequence, end - 1, [&](PageRow& other) {
            other.make_room_for_duplicates(static_cast<std::size_t>(end - 1 - other.committed()));
        });
    }
    if (unlikely(home.owners != nullptr)) {
        const std::int64_t n = std::int64_t{end - first} * cache.config.page_size;
        const TokenId* from = tokens + std::ptrdiff_t{first} * cache.config.page_size;
        const TreePosition known = home.tree.match(pages.node(), from, n).at;
        if (!find_adopted(cache, sequence, handle, known, first)) return false;
    }
    cache.commit_memory.duplicates.clear();
    const auto lanes = static_cast<std::size_t>(cache.grouping.num_lanes());
    make_room(cache.commit_memory.swapped, static_cast<std::size_t>(end - first) * lanes);
    if (unlikely(home.columns != nullptr)) {
        make_room(cache.commit_memory.replaced, static_cast<std::size_t>(end - first));
        home.make_room_to_cache(end - first, home.num_sequences);
    }
    if (unlikely(!cache.config.dedup))
        pages.make_room_for_duplicates(static_cast<std::size_t>(end - first));
    if (unlikely(is_shared && home.columns != nullptr)) pages.make_room_for_duplicates(1);
    pages.commit(home.tree, tokens, end, cache.commit_memory.duplicates, retention);
    // Nothing below can fail.
    const std::int32_t first_new =
        first + static_cast<std::int32_t>(cache.commit_memory.duplicates.size());
    cache.ledger.flights.note_commit(sequence, first, end, cache.commit_memory.duplicates);
    if (unlikely(home.columns != nullptr)) cache_columns(cache, home, pages, first, end);
    if (unlikely(is_shared || !cache.commit_memory.duplicates.empty()))
        settle_run(cache, sequence, handle, first, end, is_shared, row);
    if (unlikely(home.owners != nullptr)) share_out_adopted(cache.commit_memory, home);
    if (unlikely(cache.advice != nullptr)) {
        cache.advice->note_commit(home, handle, sequence, cache.tenants.of(handle), first,
                                  first_new, end);
    }
    return true;
}

// Commits in pieces. A piece ends after a page that forks or copies in flight also hold, so that
// they get a place in the tree, and where the priority changes.
void commit_pages(CacheData& cache, Sequence& sequence, const RequestView& request,
                  std::int32_t row) {
    const Replica& home = cache.home_of(sequence);
    const BlockPool& pool = home.pool;
    PageRow& pages = sequence.pages;
    const auto columns = written_tokens(cache, request) / cache.config.page_size;
    const auto written =
        static_cast<std::int32_t>(std::min<std::int64_t>(columns, pages.commit_limit()));
    while (pages.committed() < written) {
        const std::int32_t read_only = std::min(pages.read_only_end(), written);
        const bool is_held = !home.page_refs.empty();
        const std::int32_t end = is_held ? written : read_only;
        const std::int32_t found = pages.find_shared(pool, end);
        const std::int32_t shared = found < end ? found : written;
        Priorities::Segment kept;
        if (unlikely(home.keeps_by_priority))
            kept = cache.priorities.segment(request.sequence, pages.committed());
        const std::int32_t piece = std::min({shared + 1, written, kept.end});
        if (!commit_run(cache, sequence, request.sequence, request.tokens, piece, shared < piece,
                        kept.retention, row)) {
            return;
        }
    }
}

// Checks all rows. `commit_memory.rows` gets the rows that have new pages, owe stores or are not
// sealed yet; `commit_memory.passing` gets the rows whose windows leave columns.
template <bool kHasWindows>
[[gnu::noinline]] void find_new_pages(CacheData& cache, const RequestBatch& batch) {
    const std::int64_t n = batch.size();
    RequestView* const* const requests = batch.rows(cache.rows.requests);
    const std::int64_t page_size = cache.config.page_size;
    const SequenceTable::Live sequences = cache.sequences.live();
    const WindowView windows = kHasWindows ? cache.windows.view() : WindowView();
    const bool may_owe = cache.ledger.flights.rules().is_selective();
    const bool leaves = !cache.config.keep_windows;
    const bool has_states = cache.has_states;
    cache.commit_memory.rows.clear();
    cache.commit_memory.passing.clear();
    UndoLog<&Sequence::written> written(cache.commit_memory.undo, n);
    for (std::int64_t i = 0; i < n; ++i) {
        if (i + kAhead < n) sequences.prefetch(requests[i + kAhead]->sequence);
        const RequestView& request = *requests[i];
        Sequence& sequence = sequences.at(request.sequence, i);
        if (!rules::has_legal_indices(request)) rules::refuse_indices(request, i);
        const std::int32_t pages = sequence.pages.size();
        if (request.start > pages * page_size) refuse_unreserved(request, pages, page_size, i);
        if (sequence.num_pending > 0) rules::refuse_pending(i);
        const std::int64_t end = has_states ? written_tokens(cache, request) : request.start;
        written.set(sequence, end);
        if constexpr (kHasWindows) {
            if (leaves && windows.passes(request.sequence, end)) {
                cache.commit_memory.passing.push_back(i);
                const std::int32_t first = windows.of(request.sequence).first[0];
                if (first < pages) prefetch(sequence.pages.ids().data() + first);
                PrefixTree::prefetch_node(sequence.pages.node());
            }
        }
        const bool has_new = end >= (sequence.pages.committed() + std::int64_t{1}) * page_size;
        const bool is_due = may_owe && cache.ledger.flights.is_due(request.sequence);
        if (unlikely(!sequence.is_sealed() || has_new || is_due)) {
            cache.commit_memory.rows.push_back(i);
            PrefixTree::prefetch_node(sequence.pages.node());
        }
    }
    written.keep();
}

// Written tokens have moved windows on. Pages that windows have passed are given back; if they were
// committed before, the tree keeps them.
[[gnu::noinline]] void advance_windows(CacheData& cache, const RequestBatch& batch) noexcept {
    for (std::size_t k = 0; k < cache.commit_memory.passing.size(); ++k) {
        if (k + 2 < cache.commit_memory.passing.size()) {
            const SequenceHandle later = batch[cache.commit_memory.passing[k + 2]].sequence;
            const Sequence& sequence = *cache.sequences.find(later);
            cache.windows.prefetch(cache.home_of(sequence), later, sequence.pages);
        }
        const RequestView& request = batch[cache.commit_memory.passing[k]];
        const Sequence& sequence = *cache.sequences.find(request.sequence);
        cache.windows.advance(cache.home_of(sequence), request.sequence, sequence.pages,
                              written_tokens(cache, request));
    }
}

// Makes a checkpoint at the end of the committed prefix, unless it exists already: on the device
// and in the tier, each by itself.
void make_checkpoint(CacheData& cache, Sequence& sequence, SequenceHandle handle,
                     Transfers* transfers) {
    Replica& home = cache.home_of(sequence);
    const RecurrentSlots::Slot slot = cache.states.of(handle).slot;
    if (home.host != nullptr) {
        cache.ledger.flights.owe_checkpoint(handle, sequence, slot, *transfers);
    }
    RecurrentSlots& states = *home.states;
    const TreePosition end{sequence.pages.node(), sequence.pages.committed()};
    const BlockId column = Replica::last_column(home.tree, end);
    const RecurrentSlots::Slot known = states.find(column);
    if (known != RecurrentSlots::kNone) return states.renew(known);
    cache.ledger.state_copies.make_room(1, transfers);
    const RecurrentSlots::Slot made = states.add(column, end);
    if (made == RecurrentSlots::kNone) return;
    cache.ledger.state_copies.add({sequence.replica, slot, made}, handle, {}, transfers);
}

// Makes no checkpoint if memory or slots are missing.
[[gnu::noinline]] void advance_states(CacheData& cache, const RequestBatch& batch,
                                      Transfers* transfers) {
    for (std::int64_t i = 0; i < batch.size(); ++i) {
        const RequestView& request = batch[i];
        const RecurrentState& row = cache.states.of(request.sequence);
        if (row.slot == RecurrentSlots::kNone) continue;
        if (!cache.states.advance(request.sequence, request.start)) continue;
        Sequence& sequence = *cache.sequences.find(request.sequence);
        const bool has_place =
            request.start == std::int64_t{sequence.pages.committed()} * cache.config.page_size;
        // The prefix was not committed if memory, or room in a quota, was missing.
        if (!has_place || sequence.pages.holds_forgotten()) continue;
        try {
            make_checkpoint(cache, sequence, request.sequence, transfers);
        } catch (const std::bad_alloc&) {
            continue;
        }
    }
}

// Runs after the checkpoints of the call, because a checkpoint also stores the pages before it.
[[gnu::noinline]] void store_rows(CacheData& cache, const RequestBatch& batch,
                                  Transfers& transfers) noexcept {
    for (const std::int64_t row : cache.commit_memory.rows) {
        const SequenceHandle handle = batch[row].sequence;
        try {
            cache.ledger.flights.owe_stores(handle, *cache.sequences.find(handle), transfers);
        } catch (const std::bad_alloc&) {
            continue;
        }
    }
}

}  // namespace

void commit(CacheData& cache, const RequestBatch& batch, std::vector<PageSwap>& swaps,
            Transfers* transfers) {
    const bool copies_states = cache.has_states && transfers != nullptr;
    if (unlikely(cache.config.host_pages > 0 || copies_states))
        rules::require_transfers(cache, transfers);
    const StoreRules& rules = cache.ledger.flights.rules();
    const bool stores = cache.config.host_pages > 0 && transfers != nullptr && !rules.writes_back();
    const bool is_late = rules.has_marks() && cache.has_states;
    cache.grouping.windows().empty() ? find_new_pages<false>(cache, batch)
                                     : find_new_pages<true>(cache, batch);
    cache.commit_memory.swapped.clear();
    for (std::size_t k = 0; k < cache.commit_memory.rows.size(); ++k) {
        const std::int64_t row = cache.commit_memory.rows[k];
        if (k + 2 < cache.commit_memory.rows.size()) {
            const Sequence* later =
                cache.sequences.find(batch[cache.commit_memory.rows[k + 2]].sequence);
            cache.home_of(*later).tree.prefetch_end(later->pages.node());
        }
        const RequestView& request = batch[row];
        Sequence& sequence = *cache.sequences.find(request.sequence);
        if (written_tokens(cache, request) != sequence.hit_tokens) {
            cache.seal(request.sequence, sequence);
        }
        // Checked again, because an earlier row may name the same request.
        const bool has_new = has_new_page(cache, sequence, request);
        const bool is_due = rules.is_selective() && cache.ledger.flights.is_due(request.sequence);
        if (!cache.config.prefix_caching || !(has_new || is_due)) continue;
        try {
            if (has_new) commit_pages(cache, sequence, request, static_cast<std::int32_t>(row));
            if (unlikely(stores && !is_late)) {
                cache.ledger.flights.owe_stores(request.sequence, sequence, *transfers);
            }
        } catch (const std::bad_alloc&) {
            // The pages stay the sequence's own; a later commit finds them and tries again. Swapped
            // pages must still be reported.
            continue;
        }
    }
    if (unlikely(!cache.commit_memory.passing.empty())) advance_windows(cache, batch);
    if (unlikely(cache.has_states)) advance_states(cache, batch, transfers);
    if (unlikely(stores && is_late)) store_rows(cache, batch, *transfers);
    // Memory for swaps is kept from call to call, because few calls swap pages.
    swaps.clear();
    if (unlikely(!cache.commit_memory.swapped.empty())) swaps.swap(cache.commit_memory.swapped);
}

}  // namespace kvcore::verbs
