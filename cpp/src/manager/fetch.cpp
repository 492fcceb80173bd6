// SPDX-License-Identifier: Apache-2.0
// The decode step. What it costs is how often it walks the batch and what it touches of each row.
#include <algorithm>

#include "manager/batch_rules.hpp"
#include "manager/transfer_ledger.hpp"
#include "manager/undo_log.hpp"

namespace kvcore {

// A replica's part of the batch, in locals for as long as rows of that replica follow each other.
struct CacheManager::Part {
    FetchTarget target;
    std::int64_t new_input = 0;

    void write(const RequestView& request, const Sequence& sequence, std::int64_t row) {
        target.width = std::max(target.width, sequence.num_pages());
        target.longest_new = std::max(target.longest_new, request.active - request.start);
        target.longest_active = std::max(target.longest_active, request.active);
        if (target.table == nullptr || !target.table->has_room(row, sequence)) return;
        target.table->write_row(row, request.sequence, sequence);
        target.cache_lengths[row] = static_cast<std::uint32_t>(request.start);
        if (target.new_lengths == nullptr) return;
        target.new_lengths[row] = static_cast<std::uint32_t>(request.active - request.start);
    }
};

// Rows that have all they need are done with here. Those of missing_ still need pages, those of
// late_ are to be written when they have.
void CacheManager::write_ready_rows(const RequestBatch& given, std::int64_t num_steps,
                                    FetchTarget* targets, InputCount& counted,
                                    FetchResult& result) {
    const BatchRules rules = rules_of(num_steps);
    const RequestBatch batch = given;
    const std::int64_t n = batch.size();
    const bool is_copying = !ledger_->copies.empty();
    batch_.resize(static_cast<std::size_t>(n));
    missing_.clear();
    late_.clear();
    std::int32_t replica = 0;
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
        if (is_copying) freeze_read_pages(sequence, request.start);
        const bool has_pages = is_reserved(sequence, request, num_steps);
        const bool is_settled =
            sequence.is_sealed() && sequence.num_pending == 0 && request.start >= sequence.written;
        if (has_pages && is_settled) {
            part.write(request, sequence, row);
            if (request.active > sequence.counted_end) {
                part.new_input += request.active - std::max(request.start, sequence.counted_end);
                counted.set(sequence, request.active);
            }
            continue;
        }
        require_namespace(sequence, request, i);
        if (sequence.num_pending > 0 && result.status == FetchStatus::kOk) {
            result.status = FetchStatus::kPending;
            result.row = i;
        }
        batch_[static_cast<std::size_t>(i)] = &sequence;
        late_.push_back({i, row});
        if (!has_pages) missing_.push_back(i);
    }
    finish_part();
}

bool CacheManager::have_room(const FetchTarget* targets) const {
    return std::all_of(targets, targets + config_.num_replicas, [](const FetchTarget& target) {
        return target.rows == 0 ||
               (target.table != nullptr && target.rows <= target.table->max_rows() &&
                target.width <= target.table->stride());
    });
}

FetchResult CacheManager::fetch(const RequestBatch& batch, std::int64_t num_steps,
                                FetchTarget* targets, Transfers* transfers) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (transfers != nullptr || config_.host_pages > 0) require_transfers(transfers);
    const CallScope scope(*ledger_);
    for (std::int32_t r = 0; r < config_.num_replicas; ++r) {
        const FetchTarget& given = targets[r];
        targets[r] = {given.table, given.cache_lengths, given.new_lengths, 0, 0, 0, 0};
    }
    new_input_.assign(static_cast<std::size_t>(config_.num_replicas), 0);
    InputCount counted(undo_, batch.size());
    FetchResult result;
    write_ready_rows(batch, num_steps, targets, counted, result);
    if (result.status != FetchStatus::kOk) return result;
    if (!missing_.empty() && !reserve_missing(batch, num_steps, transfers, result)) {
        return result;
    }
    if (transfers != nullptr && !transfers->empty()) {
        result.status = FetchStatus::kPending;
        return result;
    }
    for (const LateRow& late : late_) {
        const Sequence& sequence = *batch_[static_cast<std::size_t>(late.batch_row)];
        Part part{targets[sequence.replica]};
        part.write(batch[late.batch_row], sequence, late.row);
        targets[sequence.replica] = part.target;
    }
    if (!have_room(targets)) {
        result.status = FetchStatus::kGrow;
        return result;
    }
    counted.keep();
    for (std::int32_t r = 0; r < config_.num_replicas; ++r) {
        replica_at(r).metrics.input_tokens += new_input_[static_cast<std::size_t>(r)];
    }
    for (const LateRow& late : late_) {
        Sequence& sequence = *batch_[static_cast<std::size_t>(late.batch_row)];
        sequence.reuse = Reuse::kSealed;
        const RequestView& request = batch[late.batch_row];
        sequence.written = std::min(sequence.written, request.start);
        count_input(request.start, request.active, sequence);
    }
    for (std::int32_t r = 0; r < config_.num_replicas; ++r) {
        if (targets[r].rows > 0) targets[r].table->pad(targets[r].rows, targets[r].width);
    }
    return result;
}

}  // namespace kvcore
