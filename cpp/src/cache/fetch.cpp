// SPDX-License-Identifier: Apache-2.0
#include "cache/fetch.hpp"

#include <algorithm>

#include "level/quotas.hpp"

namespace kvcore {
namespace {

LookupTable* table_of(const FetchTarget& target, std::size_t bundle) {
    if (bundle == 0) return target.table;
    return target.more == nullptr ? nullptr : target.more[bundle - 1];
}

// Writes a row that the first table does not show. The first table is written last: if it shows the
// row, all other tables show it. There is room.
[[gnu::noinline]] void write_bundles(const FetchTarget& target, const SequenceHandle& handle,
                                     const Sequence& sequence, std::int64_t row,
                                     const CacheData& groups) {
    const ColumnPages& pages = *groups.home_of(sequence).columns;
    const WindowRow& reader = groups.windows.of(handle);
    const std::int32_t n = sequence.pages.size();
    const std::int32_t reserved = std::min(n, reader.reserved);
    BundlePages view;
    view.columns = sequence.pages.ids().data();
    view.state = {sequence.pages.version(), reader.version};
    view.changes = &sequence.pages.changes();
    view.stride = groups.grouping.num_lanes();
    const auto write = [&](const Grouping::Bundle& bundle, LookupTable& table) {
        const bool is_full = bundle.window < 0;
        view.pages = pages.lane(bundle.first_lane);
        view.per_column = bundle.pages_per_column;
        view.n = is_full ? n : reserved;
        view.first = is_full ? 0 : reader.first[static_cast<std::size_t>(bundle.window)];
        table.write_row(row, handle, view);
    };
    const auto first = groups.grouping.bundles().begin();
    const auto end = groups.grouping.bundles().end();
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

}  // namespace

// A replica's part of the batch, in locals for as long as rows of that replica follow each other.
struct Fetcher::Part {
    FetchTarget target;
    Room room;

    // With groups columns have pages of several bundles.
    template <bool kHasGroups>
    void write(const RequestView& request, const Sequence& sequence, std::int64_t row,
               const CacheData& state, const WindowView& windows) {
        const RowPages pages = sequence.pages.view();
        target.width = std::max(target.width, pages.n);
        target.longest_new = std::max(target.longest_new, request.active - request.start);
        target.longest_active = std::max(target.longest_active, request.active);
        if (row >= room.rows || pages.n > room.columns) return;
        if constexpr (kHasGroups) {
            const SequenceHandle& handle = request.sequence;
            const RowState now{pages.version, windows.of(handle).version};
            if (!target.table->shows(row, handle, now)) {
                write_bundles(target, handle, sequence, row, state);
            }
        } else {
            target.table->write_row(row, request.sequence, pages);
        }
        target.cache_lengths[row] = static_cast<std::uint32_t>(request.start);
        if (target.new_lengths == nullptr) return;
        target.new_lengths[row] = static_cast<std::uint32_t>(request.active - request.start);
    }

    // Rows beyond the end of a table are only counted.
    void write_state(const RequestView& request, std::int64_t row,
                     const RecurrentStates& states) const {
        if (row < room.rows && target.states != nullptr) {
            target.states[row] = states.of(request.sequence).slot;
        }
    }
};

// The rows and columns that fit in all tables of a replica.
Fetcher::Room Fetcher::room_of(const FetchTarget& target) const {
    const Grouping& grouping = state_.grouping;
    if (target.table == nullptr) return {};
    Room room{target.table->max_rows(), target.table->stride()};
    for (std::size_t b = 0; b < grouping.bundles().size(); ++b) {
        const LookupTable* table = table_of(target, b);
        if (table == nullptr) return {};
        room.rows = std::min(room.rows, table->max_rows());
        const std::int64_t columns = table->stride() / grouping.bundles()[b].pages_per_column;
        room.columns = std::min(room.columns, columns);
    }
    return room;
}

void Fetcher::begin(FetchTarget* targets, const FetchTarget* end) {
    rooms_.clear();
    for (FetchTarget* target = targets; target != end; ++target) {
        target->rows = target->longest_new = target->longest_active = 0;
        target->width = 0;
        rooms_.push_back(room_of(*target));
        const std::size_t bundles = state_.grouping.bundles().size();
        if (bundles > 1 && rooms_.back().rows > 0) target->table->lead(target->more, bundles - 1);
    }
    prompts_.clear();
    missing_.clear();
    late_.clear();
}

// Returns true if the rows and columns of the batch fit in the tables of each replica.
bool Fetcher::have_room(const FetchTarget* targets) const noexcept {
    for (std::size_t r = 0; r < rooms_.size(); ++r) {
        const FetchTarget& target = targets[r];
        const bool fits = target.rows <= rooms_[r].rows && target.width <= rooms_[r].columns;
        if (target.rows > 0 && !fits) return false;
    }
    return true;
}

// Notes a row that is written after all rows of the batch are reserved.
void Fetcher::note_late_row(const RequestView& request, Sequence& sequence, LateRow late,
                            bool has_pages, FetchResult& result) {
    const std::int64_t i = late.batch_row;
    rules::require_namespace(state_.config, sequence, request, i);
    rules::require_windows(state_, sequence, request, i);
    if (state_.states.exist()) rules::require_run(state_, request, i);
    if (!has_pages && !state_.config.quotas.empty()) {
        quotas::require_ceiling(state_, sequence, request, request.end, i);
    }
    if (sequence.num_pending > 0 && result.status == FetchStatus::kOk) {
        result.status = FetchStatus::kPending;
        result.row = i;
    }
    rows_.set(i, sequence);
    late_.push_back(late);
    if (!has_pages) missing_.push_back(i);
}

// Writes the rows that are already reserved and settled. missing_ gets the rows that need pages;
// late_ gets the rows that are written after all rows are reserved.
template <bool kHasGroups, bool kHasStates>
void Fetcher::write_ready_rows(const RequestBatch& given, std::int64_t num_steps,
                               FetchTarget* targets, CountedEnds& counted, FetchResult& result) {
    const BatchRules rules = rows_.begin(num_steps);
    const RequestBatch batch = given;
    const std::int64_t n = batch.size();
    const std::int64_t page_size = state_.config.page_size;
    const bool is_copying = !state_.copies.empty();
    const bool in_chunks = state_.config.reserve_chunks;
    rows_.resize(n);
    std::int32_t replica = 0;
    const WindowView windows = state_.windows.view();
    Part part{targets[0], rooms_[0]};
    for (std::int64_t i = 0; i < n; ++i) {
        if (i + kAhead < n) rules.sequences.prefetch(batch[i + kAhead].sequence);
        const RequestView& request = batch[i];
        Sequence& sequence = rules.checked(request, i);
        if (sequence.replica != replica) {
            targets[replica] = part.target;
            replica = sequence.replica;
            part = {targets[replica], rooms_[static_cast<std::size_t>(replica)]};
        }
        const std::int64_t row = part.target.rows++;
        if (is_copying) state_.protect_read_pages(sequence, request.start);
        const bool has_pages =
            JointReserver::is_reserved(sequence.pages, request, num_steps, page_size, in_chunks) &&
            (!kHasGroups ||
             windows.is_ready(request.sequence, request.start, request.active + num_steps - 1)) &&
            (!kHasStates || state_.states.is_ready(request, num_steps));
        const bool is_settled =
            sequence.is_sealed() && sequence.num_pending == 0 && request.start >= sequence.written;
        if (!has_pages || !is_settled) {
            note_late_row(request, sequence, {i, row}, has_pages, result);
            continue;
        }
        part.write<kHasGroups>(request, sequence, row, state_, windows);
        if constexpr (kHasStates) part.write_state(request, row, state_.states);
        if (request.active <= sequence.counted_end) continue;
        if (sequence.counts_prompt) {
            prompts_.push_back(i);
        } else {
            counted.set(sequence, request.active);
        }
    }
    targets[replica] = part.target;
}

void Fetcher::write_late_rows(const RequestBatch& batch, FetchTarget* targets) const {
    const bool is_plain = state_.grouping.is_plain();
    const WindowView windows = state_.windows.view();
    std::int32_t replica = 0;
    Part part{targets[0], rooms_[0]};
    for (const LateRow& late : late_) {
        const Sequence& sequence = rows_[late.batch_row];
        if (sequence.replica != replica) {
            targets[replica] = part.target;
            replica = sequence.replica;
            part = {targets[replica], rooms_[static_cast<std::size_t>(replica)]};
        }
        const RequestView& request = batch[late.batch_row];
        is_plain ? part.write<false>(request, sequence, late.row, state_, windows)
                 : part.write<true>(request, sequence, late.row, state_, windows);
        if (state_.states.exist()) part.write_state(request, late.row, state_.states);
    }
    targets[replica] = part.target;
}

void Fetcher::count(const RequestBatch& batch) noexcept {
    const auto count_row = [&](Sequence& sequence, const RequestView& request) {
        state_.counts.count_input(state_.tokens_of(sequence, request.sequence), request.sequence,
                                  sequence, request.start, request.active);
    };
    for (const std::int64_t row : prompts_) {
        const RequestView& request = batch[row];
        count_row(*state_.sequences.find(request.sequence), request);
    }
    for (const LateRow& late : late_) {
        Sequence& sequence = rows_[late.batch_row];
        const RequestView& request = batch[late.batch_row];
        state_.counts.seal(state_.home_of(sequence).metrics, request.sequence, sequence,
                           state_.config.page_size);
        state_.count_generated(request.sequence, sequence);
        sequence.written = std::min(sequence.written, request.start);
        count_row(sequence, request);
    }
}

FetchResult Fetcher::fetch(const RequestBatch& batch, std::int64_t num_steps, FetchTarget* targets,
                           Transfers* transfers) {
    if (transfers != nullptr || state_.config.host_pages > 0) {
        rules::require_transfers(state_, transfers);
    }
    const OwedCopies::Call scope(state_.copies);
    FetchTarget* const end = targets + state_.config.num_replicas;
    begin(targets, end);
    CountedEnds counted(undo_, batch.size());
    FetchResult result;
    if (state_.states.exist()) {
        state_.grouping.is_plain()
            ? write_ready_rows<false, true>(batch, num_steps, targets, counted, result)
            : write_ready_rows<true, true>(batch, num_steps, targets, counted, result);
    } else {
        state_.grouping.is_plain()
            ? write_ready_rows<false, false>(batch, num_steps, targets, counted, result)
            : write_ready_rows<true, false>(batch, num_steps, targets, counted, result);
    }
    if (result.status != FetchStatus::kOk) return result;
    if (!missing_.empty() &&
        !reserver_.reserve(rows_, batch, missing_, num_steps, transfers, result)) {
        return result;
    }
    if (transfers != nullptr && !transfers->empty()) {
        result.status = FetchStatus::kPending;
        return result;
    }
    write_late_rows(batch, targets);
    if (!have_room(targets)) {
        result.status = FetchStatus::kGrow;
        return result;
    }
    counted.keep();
    count(batch);
    for (std::int64_t i = 0; state_.states.exist() && i < batch.size(); ++i) {
        state_.states.note_run(batch[i], num_steps);
    }
    for (FetchTarget* target = targets; target != end; ++target) {
        if (target->rows > 0) pad(state_.grouping, *target);
    }
    return result;
}

}  // namespace kvcore
