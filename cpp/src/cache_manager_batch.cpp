// SPDX-License-Identifier: Apache-2.0
// What is done to a batch as a whole: checks, reserving all or nothing.
#include <algorithm>
#include <stdexcept>

#include "admission.hpp"
#include "batch_rules.hpp"
#include "kvcore/errors.hpp"

namespace kvcore {

void CacheManager::require_steps(std::int64_t num_steps) {
    if (num_steps >= 1) return;
    throw std::invalid_argument(detail::concat("num_steps is ", num_steps, ", must be at least 1"));
}

void CacheManager::refuse_repetition(std::int64_t row) {
    throw InRow<std::invalid_argument>(
        row, detail::concat("row ", row,
                            " repeats a request of an earlier row of the batch; "
                            "name each request once"));
}

CacheManager::BatchRules CacheManager::rules_of(std::int64_t num_steps) {
    require_steps(num_steps);
    const SequenceTable::Slots sequences = sequences_.live();
    if (++batch_stamp_ == 0) {  // once in 2^32 calls; 0 is the stamp of a sequence in no batch yet
        for (std::size_t i = 0; i < sequences.size; ++i) sequences.data[i].batch_stamp = 0;
        batch_stamp_ = 1;
    }
    return {*this, sequences, num_steps, most_tokens(num_steps), batch_stamp_};
}

// Everything that can be wrong with a batch, before anything is done with it.
void CacheManager::check_batch(const RequestBatch& batch, std::int64_t num_steps) {
    const BatchRules rules = rules_of(num_steps);
    batch_.resize(static_cast<std::size_t>(batch.size()));
    for (std::int64_t row = 0; row < batch.size(); ++row) {
        Sequence& sequence = rules.checked(batch[row], row);
        require_namespace(sequence, batch[row], row);
        batch_[static_cast<std::size_t>(row)] = &sequence;
    }
}

// Takes what the missing rows need from what is free or evictable in their replicas; the first row
// for which that is not enough goes to `result`.
bool CacheManager::fits_together(const std::vector<Admission>& admissions,
                                 FetchResult& result) const {
    std::vector<std::int64_t> left;
    for (const auto& replica : replicas_) {
        left.push_back(replica->pool.num_free() + replica->tree.num_evictable());
    }
    for (std::size_t k = 0; k < missing_.size(); ++k) {
        const Sequence& sequence = *batch_[static_cast<std::size_t>(missing_[k])];
        std::int64_t& available = left[static_cast<std::size_t>(sequence.replica)];
        const std::int64_t needed = admissions[k].new_pages() - admissions[k].returned;
        if (needed > available) {
            result = {FetchStatus::kNoSpace, missing_[k], needed, available, false};
            return false;
        }
        available -= needed;
    }
    return true;
}

// What each missing row would do by itself, but for the forks among them.
std::vector<CacheManager::Admission> CacheManager::admit_together(const RequestBatch& batch,
                                                                  std::int64_t num_steps,
                                                                  bool allow_partial,
                                                                  bool copies_at_once) {
    // Known to this call alone, however it ends: whoever is asked later would take a page that
    // others hold for its own.
    struct Forgotten {
        decltype(leaving_)& leaving;
        ~Forgotten() { leaving.clear(); }
    };
    const Forgotten forgotten{leaving_};
    std::vector<Admission> admissions;
    admissions.reserve(missing_.size());
    for (const std::int64_t row : missing_) {
        const Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        admissions.push_back(admit(sequence, batch[row], num_steps, allow_partial));
        if (!allow_partial) admissions.back().declines_partial = true;
        note_leaving(admissions.back(), sequence, copies_at_once);
    }
    return admissions;
}

// Whether free pages alone are not enough.
bool CacheManager::must_evict(const std::vector<Admission>& admissions) const {
    std::vector<std::int64_t> free;
    for (const auto& replica : replicas_) free.push_back(replica->pool.num_free());
    for (std::size_t k = 0; k < missing_.size(); ++k) {
        const Sequence& sequence = *batch_[static_cast<std::size_t>(missing_[k])];
        std::int64_t& left = free[static_cast<std::size_t>(sequence.replica)];
        left -= admissions[k].new_pages() - admissions[k].returned;
        if (left < 0) return true;
    }
    return false;
}

// Several rows against one state, so that the batch gets its pages as a whole or not at all. All
// hits are pinned first: what is evictable then is exactly what the batch may evict. Partial hits
// are dropped where something must be evicted, for one row's victim could be another's source.
bool CacheManager::reserve_together(const RequestBatch& batch, std::int64_t num_steps,
                                    Transfers* transfers, FetchResult& result) {
    const bool copies_at_once = transfers != nullptr;
    std::vector<Admission> admissions = admit_together(batch, num_steps, true, copies_at_once);
    const bool evicts = must_evict(admissions);
    if (evicts) admissions = admit_together(batch, num_steps, false, copies_at_once);
    std::vector<Reservation> made;
    made.reserve(missing_.size());
    make_room(listed_copies_, missing_.size());
    make_room(ledger_->copies, missing_.size());
    if (transfers != nullptr) {
        make_room(transfers->copies, missing_.size());
        make_room(transfers->moved, missing_.size());
    }
    for (std::size_t k = 0; k < missing_.size(); ++k) {
        const std::int64_t row = missing_[k];
        Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        if (only_appends(admissions[k], sequence)) {
            make_room(sequence.pages, static_cast<std::size_t>(admissions[k].appended));
        } else {
            made.push_back(prepare(admissions[k], sequence, batch[row], transfers));
        }
    }
    if (transfers != nullptr) make_room_for_loads(made, *transfers);
    if (evicts && !fits_together(admissions, result)) return false;
    auto next = made.begin();
    for (std::size_t k = 0; k < missing_.size(); ++k) {
        const std::int64_t row = missing_[k];
        Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        if (only_appends(admissions[k], sequence)) {
            Reservation plain{admissions[k], {}, {}, nullptr};
            result.has_moved |= apply(plain, sequence, batch[row], row, transfers);
        } else {
            result.has_moved |= apply(*next++, sequence, batch[row], row, transfers);
        }
    }
    return true;
}

// What most rows of a decode step need: no place in a tree, no copy, nothing but pages. It stays so
// while other rows of the batch are reserved.
bool CacheManager::only_appends(const Admission& admission, const Sequence& sequence) const {
    return sequence.node != nullptr && !admission.takes_hit &&
           std::int64_t{sequence.frozen} * config_.page_size <= admission.start;
}

// Of the forks in a batch that go on writing the same page, the last one need not copy it, nor need
// the only one that goes on. Copies on the list are made before any of them writes.
void CacheManager::note_leaving(const Admission& admission, const Sequence& sequence,
                                bool copies_at_once) {
    const auto first = static_cast<std::int32_t>(admission.start / config_.page_size);
    const auto kept_tokens = static_cast<std::int32_t>(admission.start % config_.page_size);
    for (std::int32_t column = first; column < sequence.frozen; ++column) {
        if (!is_own(sequence, column) || is_sole_holder(sequence, column, admission.start))
            continue;
        leaving_[{sequence.replica, sequence.pages[static_cast<std::size_t>(column)]}].add(
            copies_at_once && column == first ? kept_tokens : 0);
    }
}

// True when no missing row can take a hit, begin again or must replace pages: all it needs is more
// of them.
bool CacheManager::only_grow(const RequestBatch& batch) const {
    return std::all_of(missing_.begin(), missing_.end(), [&](std::int64_t row) {
        const Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        return sequence.is_sealed() && !sequence.pages.empty() &&
               batch[row].start >= std::int64_t{sequence.frozen} * config_.page_size;
    });
}

std::int64_t CacheManager::missing_pages(const RequestView& request, const Sequence& sequence,
                                         std::int64_t num_steps) const {
    return ceil_div(request.end + num_steps - 1, config_.page_size) - sequence.num_pages();
}

// Adds up what the missing rows need in each replica; the first row for which what is free or
// evictable is not enough goes to `result`.
bool CacheManager::find_supply(const RequestBatch& batch, std::int64_t num_steps,
                               FetchResult& result) {
    supply_.clear();
    for (const auto& replica : replicas_) supply_.push_back({replica->pool.num_free()});
    for (const std::int64_t row : missing_) {
        const Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        Supply& supply = supply_[static_cast<std::size_t>(sequence.replica)];
        const std::int64_t pages = missing_pages(batch[row], sequence, num_steps);
        if (pages > supply.left && !supply.has_evictable) {
            supply.has_evictable = true;
            supply.left += replica_at(sequence.replica).tree.num_evictable();
        }
        if (pages > supply.left) {
            result = {FetchStatus::kNoSpace, row, pages, supply.left, false};
            return false;
        }
        supply.left -= pages;
        supply.wanted += pages;
    }
    return true;
}

// The decode step: rows that cross into a new page get it, all or none.
bool CacheManager::grow_together(const RequestBatch& batch, std::int64_t num_steps,
                                 FetchResult& result) {
    if (!find_supply(batch, num_steps, result)) return false;
    std::int64_t wanted = 0;
    for (const Supply& supply : supply_) wanted += supply.wanted;
    taken_.reserve(static_cast<std::size_t>(wanted));
    for (const std::int64_t row : missing_) {
        Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        const std::int64_t pages = missing_pages(batch[row], sequence, num_steps);
        make_room(sequence.pages, static_cast<std::size_t>(pages));
    }
    taken_.clear();
    for (std::size_t r = 0; r < replicas_.size(); ++r) {
        Supply& supply = supply_[r];
        supply.given = taken_.size();
        taken_.resize(taken_.size() + static_cast<std::size_t>(supply.wanted));
        take_pages(*replicas_[r], supply.wanted, taken_.data() + supply.given);
        note_peak(*replicas_[r]);
    }
    for (const std::int64_t row : missing_) {
        Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        std::size_t& given = supply_[static_cast<std::size_t>(sequence.replica)].given;
        const BlockId* first = taken_.data() + given;
        const std::int64_t pages = missing_pages(batch[row], sequence, num_steps);
        sequence.pages.insert(sequence.pages.end(), first, first + pages);
        given += static_cast<std::size_t>(pages);
    }
    return true;
}

bool CacheManager::reserve_missing(const RequestBatch& batch, std::int64_t num_steps,
                                   Transfers* transfers, FetchResult& result) {
    if (only_grow(batch)) return grow_together(batch, num_steps, result);
    if (missing_.size() > 1) return reserve_together(batch, num_steps, transfers, result);
    // One row is what `reserve` does.
    const std::int64_t row = missing_[0];
    Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
    const Admission admission = admit(sequence, batch[row], num_steps, true);
    if (!admission.fits) {
        result = {FetchStatus::kNoSpace, row, admission.new_pages(), admission.available, false};
        return false;
    }
    Reservation made = prepare(admission, sequence, batch[row], transfers);
    result.has_moved = apply(made, sequence, batch[row], row, transfers);
    return true;
}

}  // namespace kvcore
