// SPDX-License-Identifier: Apache-2.0
#include "manager/fetcher.hpp"

#include <algorithm>

#include "manager/quotas.hpp"

namespace kvcore {
namespace {

bool has_room(const FetchTarget& target, const LookupTable* table, std::int32_t pages_per_column) {
    return table != nullptr && target.rows <= table->max_rows() &&
           std::int64_t{target.width} * pages_per_column <= table->stride();
}

LookupTable* table_of(const FetchTarget& target, std::size_t bundle) {
    if (bundle == 0) return target.table;
    return target.more == nullptr ? nullptr : target.more[bundle - 1];
}

bool have_room(const Grouping& grouping, const FetchTarget* targets, const FetchTarget* end) {
    return std::all_of(targets, end, [&](const FetchTarget& target) {
        if (target.rows == 0) return true;
        if (grouping.is_plain()) return has_room(target, target.table, 1);
        for (std::size_t b = 0; b < grouping.bundles().size(); ++b) {
            const std::int32_t pages = grouping.bundles()[b].pages_per_column;
            if (!has_room(target, table_of(target, b), pages)) return false;
        }
        return true;
    });
}

void pad(const Grouping& grouping, const FetchTarget& target) {
    if (grouping.is_plain()) return target.table->pad(target.rows, target.width);
    for (std::size_t b = 0; b < grouping.bundles().size(); ++b) {
        const std::int32_t pages = grouping.bundles()[b].pages_per_column;
        table_of(target, b)->pad(target.rows, target.width * pages);
    }
}

}  // namespace

// A replica's part of the batch, in locals for as long as rows of that replica follow each other.
struct Fetcher::Part {
    FetchTarget target;
    std::int64_t new_input = 0;

    // `groups`: the state, where columns have pages of several bundles.
    void write(const RequestView& request, const Sequence& sequence, std::int64_t row,
               const ManagerState* groups) {
        const RowPages pages = sequence.pages.view();
        target.width = std::max(target.width, pages.n);
        target.longest_new = std::max(target.longest_new, request.active - request.start);
        target.longest_active = std::max(target.longest_active, request.active);
        if (groups != nullptr) {
            if (!write_bundles(request, sequence, row, *groups)) return;
        } else {
            if (target.table == nullptr || !target.table->has_room(row, pages)) return;
            target.table->write_row(row, request.sequence, pages);
        }
        target.cache_lengths[row] = static_cast<std::uint32_t>(request.start);
        if (target.new_lengths == nullptr) return;
        target.new_lengths[row] = static_cast<std::uint32_t>(request.active - request.start);
    }

    // Rows behind those that a table has are counted only.
    void write_state(const RequestView& request, std::int64_t row, const StateRows& states) const {
        const bool has_room = target.table != nullptr && row < target.table->max_rows();
        if (has_room && target.states != nullptr) {
            target.states[row] = states.of(request.sequence).slot;
        }
    }

    // False where a table has no room.
    bool write_bundles(const RequestView& request, const Sequence& sequence, std::int64_t row,
                       const ManagerState& groups) {
        const PageRow& columns = sequence.pages;
        const WindowRow& reader = groups.windows.of(request.sequence);
        const RowState state{columns.version(), columns.size(), reader.version};
        const std::size_t num_bundles = groups.grouping.bundles().size();
        for (std::size_t b = 0; b < num_bundles; ++b) {
            LookupTable* table = table_of(target, b);
            if (table == nullptr) return false;
            if (table->shows(row, request.sequence, state)) continue;
            if (!write_bundle(*table, b, request, sequence, row, state, groups)) return false;
        }
        return true;
    }

    static bool write_bundle(LookupTable& table, std::size_t b, const RequestView& request,
                             const Sequence& sequence, std::int64_t row, const RowState& state,
                             const ManagerState& groups) {
        const PageRow& columns = sequence.pages;
        const Grouping::Bundle& bundle = groups.grouping.bundles()[b];
        BundlePages view;
        view.pages = groups.home_of(sequence).columns->lane(bundle.first_lane);
        view.stride = groups.grouping.num_lanes();
        view.per_column = bundle.pages_per_column;
        view.columns = columns.ids().data();
        view.state = state;
        view.n = columns.size();
        if (bundle.window >= 0) {
            const WindowRow& reader = groups.windows.of(request.sequence);
            view.n = std::min(view.n, reader.reserved);
            view.first = reader.first[static_cast<std::size_t>(bundle.window)];
        }
        const std::int64_t cells = std::int64_t{columns.size()} * view.per_column;
        if (row >= table.max_rows() || cells > table.stride()) return false;
        table.write_row(row, request.sequence, view);
        return true;
    }
};

void Fetcher::begin(FetchTarget* targets, const FetchTarget* end) {
    for (FetchTarget* target = targets; target != end; ++target) {
        target->rows = target->longest_new = target->longest_active = 0;
        target->width = 0;
    }
    new_input_.assign(static_cast<std::size_t>(end - targets), 0);
    missing_.clear();
    late_.clear();
}

// It is written when the others have all they need, too.
void Fetcher::note_late_row(const RequestView& request, Sequence& sequence, LateRow late,
                            bool has_pages, FetchResult& result) {
    const std::int64_t i = late.batch_row;
    rules::require_namespace(state_.config, sequence, request, i);
    rules::require_windows(state_, sequence, request, i);
    if (!has_pages && !state_.config.quotas.empty()) {
        quotas::require_ceiling(state_, sequence, request, i);
    }
    if (sequence.num_pending > 0 && result.status == FetchStatus::kOk) {
        result.status = FetchStatus::kPending;
        result.row = i;
    }
    rows_.set(i, sequence);
    late_.push_back(late);
    if (!has_pages) missing_.push_back(i);
}

// Rows that have all they need are done with here. Those of missing_ still need pages, those of
// late_ are to be written when they have. `kIsPlain`: there are neither groups nor states.
template <bool kIsPlain>
void Fetcher::write_ready_rows(const RequestBatch& given, std::int64_t num_steps,
                               FetchTarget* targets, InputCount& counted, FetchResult& result) {
    const BatchRules rules = rows_.begin(num_steps);
    const RequestBatch batch = given;
    const std::int64_t n = batch.size();
    const std::int64_t page_size = state_.config.page_size;
    const bool is_copying = !state_.copies.empty();
    const bool in_chunks = state_.config.reserve_chunks;
    rows_.resize(n);
    std::int32_t replica = 0;
    const bool has_groups = !kIsPlain && !state_.grouping.is_plain();
    const bool has_states = !kIsPlain && state_.states.exist();
    const ManagerState* groups = has_groups ? &state_ : nullptr;
    Part part{targets[0]};
    const auto finish_part = [&] {
        targets[replica] = part.target;
        new_input_[static_cast<std::size_t>(replica)] += part.new_input;
    };
    for (std::int64_t i = 0; i < n; ++i) {
        if (i + kAhead < n) rules.sequences.prefetch(batch[i + kAhead].sequence);
        const RequestView& request = batch[i];
        Sequence& sequence = rules.checked(request, i);
        if (sequence.replica != replica) {
            finish_part();
            replica = sequence.replica;
            part = {targets[replica]};
        }
        const std::int64_t row = part.target.rows++;
        if (is_copying) state_.freeze_read_pages(sequence, request.start);
        const bool has_pages =
            JointReserver::is_reserved(sequence.pages, request, num_steps, page_size, in_chunks) &&
            (!has_groups ||
             (state_.windows.has_reserved(request.sequence, request.active + num_steps - 1) &&
              state_.windows.can_read(request.sequence, request.start))) &&
            (!has_states || state_.states.is_ready(request));
        const bool is_settled =
            sequence.is_sealed() && sequence.num_pending == 0 && request.start >= sequence.written;
        if (!has_pages || !is_settled) {
            note_late_row(request, sequence, {i, row}, has_pages, result);
            continue;
        }
        part.write(request, sequence, row, groups);
        if (has_states) part.write_state(request, row, state_.states);
        if (request.active <= sequence.counted_end) continue;
        part.new_input += request.active - std::max(request.start, sequence.counted_end);
        counted.set(sequence, request.active);
    }
    finish_part();
}

void Fetcher::write_late_rows(const RequestBatch& batch, FetchTarget* targets) const {
    for (const LateRow& late : late_) {
        const Sequence& sequence = rows_[late.batch_row];
        Part part{targets[sequence.replica]};
        const RequestView& request = batch[late.batch_row];
        part.write(request, sequence, late.row, state_.grouping.is_plain() ? nullptr : &state_);
        if (state_.states.exist()) part.write_state(request, late.row, state_.states);
        targets[sequence.replica] = part.target;
    }
}

void Fetcher::count(const RequestBatch& batch) noexcept {
    for (std::size_t r = 0; r < new_input_.size(); ++r) {
        state_.replicas[r]->metrics.input_tokens += new_input_[r];
    }
    for (const LateRow& late : late_) {
        Sequence& sequence = rows_[late.batch_row];
        const RequestView& request = batch[late.batch_row];
        sequence.reuse = Reuse::kSealed;
        sequence.written = std::min(sequence.written, request.start);
        TokenCounts::count_input(state_.home_of(sequence).metrics, sequence, request.start,
                                 request.active);
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
    InputCount counted(undo_, batch.size());
    FetchResult result;
    if (state_.grouping.is_plain() && !state_.states.exist()) {
        write_ready_rows<true>(batch, num_steps, targets, counted, result);
    } else {
        write_ready_rows<false>(batch, num_steps, targets, counted, result);
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
    if (!have_room(state_.grouping, targets, end)) {
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
