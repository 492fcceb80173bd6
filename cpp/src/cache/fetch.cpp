// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cache/validate_requests.hpp"
#include "cache/verbs.hpp"
#include "level/quotas.hpp"
#include "request/sequence.hpp"

namespace kvcore::verbs {
namespace {

using CountedEnds = UndoLog<&Sequence::counted_end>;

LookupTable* table_of(const FetchTarget& target, std::size_t bundle) {
    if (bundle == 0) return target.table;
    return target.more == nullptr ? nullptr : target.more[bundle - 1];
}

// Writes a row that the first table does not show. The first table is written last: if it shows the
// row, all other tables show it. There is room.
[[gnu::noinline]] void write_bundles(const FetchTarget& target, const SequenceHandle& handle,
                                     const Sequence& sequence, std::int64_t row,
                                     const CacheData& cache) {
    const ColumnPages& pages = *cache.home_of(sequence).columns;
    const WindowRow& reader = cache.windows.of(handle);
    const std::int32_t n = sequence.pages.size();
    const std::int32_t reserved = std::min(n, reader.reserved);
    BundlePages view;
    view.columns = sequence.pages.ids().data();
    view.state = {sequence.pages.version(), reader.version};
    view.changes = &sequence.pages.changes();
    view.stride = cache.grouping.num_lanes();
    const auto write = [&](const Grouping::Bundle& bundle, LookupTable& table) {
        const bool is_full = bundle.window < 0;
        view.pages = pages.lane(bundle.first_lane);
        view.per_column = bundle.pages_per_column;
        view.n = is_full ? n : reserved;
        view.first = is_full ? 0 : reader.first[static_cast<std::size_t>(bundle.window)];
        table.write_row(row, handle, view);
    };
    const auto first = cache.grouping.bundles().begin();
    const auto end = cache.grouping.bundles().end();
    LookupTable* const* table = target.more;
    for (auto bundle = first + 1; bundle != end; ++bundle) write(*bundle, **table++);
    write(*first, *target.table);
}

void pad(const Grouping& grouping, const FetchTarget& target) {
    for (std::size_t b = 0; b < grouping.bundles().size(); ++b) {
        const std::int32_t pages = grouping.bundles()[b].pages_per_column;
        table_of(target, b)->pad(target.rows, target.width * pages);
    }
}

// A replica's part of the batch, for as long as rows of that replica follow each other.
struct Part {
    FetchTarget* target;
    const FetchMemory::Room* room;

    // With `kHasGroups`, columns have pages of several bundles.
    template <bool kHasGroups>
    void write(const RequestView& request, const Sequence& sequence, std::int64_t row,
               const CacheData& cache, const WindowView& windows) {
        const std::int32_t n = sequence.pages.size();
        const std::int64_t num_new = request.active - request.start;
        // Few rows are the longest, so a row usually stores nothing.
        if (unlikely(n > target->width)) target->width = n;
        if (unlikely(num_new > target->longest_new)) target->longest_new = num_new;
        if (unlikely(request.active > target->longest_active)) {
            target->longest_active = request.active;
        }
        if (unlikely(row >= room->rows) || unlikely(n > room->columns)) return;
        if constexpr (kHasGroups) {
            const SequenceHandle& handle = request.sequence;
            const RowState now{sequence.pages.version(), windows.of(handle).version};
            if (!target->table->shows(row, handle, now)) {
                write_bundles(*target, handle, sequence, row, cache);
            }
        } else {
            LookupTable& table = *target->table;
            if (unlikely(!table.shows(row, request.sequence, sequence.pages.version(), n))) {
                table.write_row(row, request.sequence, sequence.pages.view());
            }
        }
        target->cache_lengths[row] = static_cast<std::uint32_t>(request.start);
        if (target->new_lengths == nullptr) return;
        target->new_lengths[row] = static_cast<std::uint32_t>(num_new);
    }

    // Rows beyond the end of a table are only counted.
    void write_state(const RequestView& request, std::int64_t row, const RecurrentStates& states) {
        if (row < room->rows && target->states != nullptr) {
            target->states[row] = states.of(request.sequence).slot;
        }
    }
};

// The rows and columns that fit in all tables of a replica.
FetchMemory::Room room_of(const CacheData& cache, const FetchTarget& target) {
    const Grouping& grouping = cache.grouping;
    if (target.table == nullptr) return {};
    FetchMemory::Room room{target.table->max_rows(), target.table->stride()};
    for (std::size_t b = 0; b < grouping.bundles().size(); ++b) {
        const LookupTable* table = table_of(target, b);
        if (table == nullptr) return {};
        room.rows = std::min(room.rows, table->max_rows());
        const std::int64_t columns = table->stride() / grouping.bundles()[b].pages_per_column;
        room.columns = std::min(room.columns, columns);
    }
    return room;
}

void begin_fetch(CacheData& cache, FetchTarget* targets, const FetchTarget* end) {
    cache.fetch_memory.rooms.clear();
    for (FetchTarget* target = targets; target != end; ++target) {
        target->rows = target->longest_new = target->longest_active = 0;
        target->width = 0;
        cache.fetch_memory.rooms.push_back(room_of(cache, *target));
        const std::size_t bundles = cache.grouping.bundles().size();
        if (unlikely(bundles > 1) && cache.fetch_memory.rooms.back().rows > 0)
            target->table->lead(target->more, bundles - 1);
    }
    cache.fetch_memory.prompts.clear();
    cache.fetch_memory.missing.clear();
    cache.fetch_memory.late.clear();
}

// Returns true if the rows and columns of the batch fit in the tables of each replica.
bool have_room(const CacheData& cache, const FetchTarget* targets) noexcept {
    for (std::size_t r = 0; r < cache.fetch_memory.rooms.size(); ++r) {
        const FetchTarget& target = targets[r];
        const bool fits = target.rows <= cache.fetch_memory.rooms[r].rows &&
                          target.width <= cache.fetch_memory.rooms[r].columns;
        if (target.rows > 0 && !fits) return false;
    }
    return true;
}

// Notes a row that is written after all rows of the batch are reserved.
void note_late_row(CacheData& cache, const RequestView& request, Sequence& sequence,
                   FetchMemory::LateRow late, bool has_pages, FetchResult& result) {
    const std::int64_t i = late.batch_row;
    rules::require_namespace(cache.config, sequence, request, i);
    rules::require_windows(cache, sequence, request, i);
    if (cache.has_states) rules::require_run(cache, request, i);
    if (!has_pages && !cache.config.quotas.empty()) {
        quotas::require_ceiling(cache, sequence, request, request.end, i);
    }
    if (sequence.num_pending > 0 && result.status == FetchStatus::kOk) {
        result.status = FetchStatus::kPending;
        result.row = i;
    }
    cache.rows.set(i, sequence);
    cache.fetch_memory.late.push_back(late);
    if (!has_pages) cache.fetch_memory.missing.push_back(i);
}

Part part_of(const CacheData& cache, FetchTarget* targets, std::int32_t replica) noexcept {
    return {targets + replica, &cache.fetch_memory.rooms[static_cast<std::size_t>(replica)]};
}

// Writes the rows that are already reserved and settled. fetch_memory.missing gets the rows that
// need pages; fetch_memory.late gets the rows that are written after all rows are reserved.
template <bool kHasGroups, bool kHasStates>
[[gnu::noinline]] void write_ready_rows(CacheData& cache, const RequestBatch& batch,
                                        std::int64_t num_steps, FetchTarget* targets,
                                        CountedEnds& counted, FetchResult& result) {
    const BatchRules rules = begin_batch(cache, num_steps);
    const std::int64_t n = batch.size();
    RequestView* const* const requests = batch.rows(cache.rows.requests);
    const std::int64_t page_size = cache.config.page_size;
    const bool is_copying = !cache.ledger.copies.empty();
    const bool in_chunks = cache.config.reserve_chunks;
    const WindowView windows = kHasGroups ? cache.windows.view() : WindowView();
    cache.rows.resize(n);
    std::int32_t replica = 0;
    Part part = part_of(cache, targets, replica);
    for (std::int64_t i = 0; i < n; ++i) {
        if (i + kAhead < n) rules.sequences.prefetch(requests[i + kAhead]->sequence);
        const RequestView& request = *requests[i];
        Sequence& sequence = rules.checked(request, i);
        if (unlikely(sequence.replica != replica)) {
            replica = sequence.replica;
            part = part_of(cache, targets, replica);
        }
        const std::int64_t row = part.target->rows++;
        if (unlikely(is_copying)) cache.protect_read_pages(sequence, request.start);
        const bool has_pages =
            is_reserved(sequence.pages, request, num_steps, page_size, in_chunks) &&
            (!kHasGroups ||
             windows.is_ready(request.sequence, request.start, request.active + num_steps - 1)) &&
            (!kHasStates || cache.states.is_ready(request, num_steps));
        const bool is_open = unlikely(!sequence.is_sealed()) ||
                             unlikely(sequence.num_pending > 0) ||
                             unlikely(request.start < sequence.written);
        if (unlikely(is_open) || unlikely(!has_pages)) {
            note_late_row(cache, request, sequence, {i, row}, has_pages, result);
            continue;
        }
        part.write<kHasGroups>(request, sequence, row, cache, windows);
        if constexpr (kHasStates) part.write_state(request, row, cache.states);
        if (request.active <= sequence.counted_end) continue;
        if (unlikely(sequence.counts_prompt)) {
            cache.fetch_memory.prompts.push_back(i);
        } else {
            counted.set(sequence, request.active);
        }
    }
}

void write_late_rows(const CacheData& cache, const RequestBatch& batch, FetchTarget* targets) {
    const bool is_plain = cache.is_plain;
    const WindowView windows = cache.windows.view();
    for (const FetchMemory::LateRow& late : cache.fetch_memory.late) {
        const Sequence& sequence = cache.rows[late.batch_row];
        Part part = part_of(cache, targets, sequence.replica);
        const RequestView& request = batch[late.batch_row];
        is_plain ? part.write<false>(request, sequence, late.row, cache, windows)
                 : part.write<true>(request, sequence, late.row, cache, windows);
        if (cache.has_states) part.write_state(request, late.row, cache.states);
    }
}

void count_rows(CacheData& cache, const RequestBatch& batch) noexcept {
    const auto count_row = [&](Sequence& sequence, const RequestView& request) {
        cache.counts.count_input(cache.tokens_of(sequence, request.sequence), request.sequence,
                                 sequence, request.start, request.active);
    };
    for (const std::int64_t row : cache.fetch_memory.prompts) {
        const RequestView& request = batch[row];
        count_row(*cache.sequences.find(request.sequence), request);
    }
    for (const FetchMemory::LateRow& late : cache.fetch_memory.late) {
        Sequence& sequence = cache.rows[late.batch_row];
        const RequestView& request = batch[late.batch_row];
        cache.seal(request.sequence, sequence);
        cache.count_generated(request.sequence, sequence);
        sequence.written = std::min(sequence.written, request.start);
        count_row(sequence, request);
    }
}

}  // namespace

FetchResult fetch(CacheData& cache, const RequestBatch& batch, std::int64_t num_steps,
                  FetchTarget* targets, Transfers* transfers) {
    if (unlikely(transfers != nullptr || cache.config.host_pages > 0)) {
        rules::require_transfers(cache, transfers);
    }
    const OwedCopies::Call scope(cache.ledger.copies);
    FetchTarget* const end = targets + cache.config.num_replicas;
    begin_fetch(cache, targets, end);
    CountedEnds counted(cache.fetch_memory.undo, batch.size());
    FetchResult result;
    if (unlikely(cache.has_states)) {
        cache.is_plain
            ? write_ready_rows<false, true>(cache, batch, num_steps, targets, counted, result)
            : write_ready_rows<true, true>(cache, batch, num_steps, targets, counted, result);
    } else {
        cache.is_plain
            ? write_ready_rows<false, false>(cache, batch, num_steps, targets, counted, result)
            : write_ready_rows<true, false>(cache, batch, num_steps, targets, counted, result);
    }
    if (unlikely(result.status != FetchStatus::kOk)) return result;
    if (!cache.fetch_memory.missing.empty() &&
        !reserve_rows(cache, batch, cache.fetch_memory.missing, num_steps, transfers, result)) {
        return result;
    }
    if (unlikely(transfers != nullptr && !transfers->empty())) {
        result.status = FetchStatus::kPending;
        return result;
    }
    write_late_rows(cache, batch, targets);
    if (unlikely(!have_room(cache, targets))) {
        result.status = FetchStatus::kGrow;
        return result;
    }
    counted.keep();
    count_rows(cache, batch);
    for (std::int64_t i = 0; cache.has_states && i < batch.size(); ++i) {
        cache.states.note_run(batch[i], num_steps);
    }
    for (FetchTarget* target = targets; target != end; ++target) {
        if (target->rows > 0) pad(cache.grouping, *target);
    }
    return result;
}

}  // namespace kvcore::verbs
