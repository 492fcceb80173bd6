// SPDX-License-Identifier: Apache-2.0
// What is done to a batch as a whole: checks, reserving all or nothing.
#include <stdexcept>
#include <utility>

#include "kvcore/errors.hpp"
#include "manager/admission.hpp"
#include "manager/batch_rules.hpp"

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

// What each joining row would do by itself, but for the forks among them.
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
    admissions.reserve(joining_.size());
    for (const std::int64_t row : joining_) {
        const Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        admissions.push_back(admit(sequence, batch[row], num_steps, allow_partial));
        if (!allow_partial) admissions.back().declines_partial = true;
        note_leaving(admissions.back(), sequence, copies_at_once);
    }
    return admissions;
}

// Whether what each replica has left is enough for all missing rows, in the order of the batch; if
// not, the first row that goes without.
FetchResult CacheManager::share_out(std::vector<std::int64_t> left, const RequestBatch& batch,
                                    std::int64_t num_steps,
                                    const std::vector<Admission>& admissions) const {
    auto joining = joining_.begin();
    auto admission = admissions.begin();
    for (const std::int64_t row : missing_) {
        const Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        std::int64_t needed = 0;
        if (joining != joining_.end() && *joining == row) {
            needed = admission->new_pages() - admission->returned;
            ++joining;
            ++admission;
        } else {
            needed = missing_pages(batch[row], sequence, num_steps);
        }
        std::int64_t& available = left[static_cast<std::size_t>(sequence.replica)];
        if (needed > available) return {FetchStatus::kNoSpace, row, needed, available, false};
        available -= needed;
    }
    return {};
}

// Several rows against one state, so that the batch gets its pages as a whole or not at all. All
// hits are pinned first: what is evictable then is exactly what the batch may evict. Partial hits
// are dropped where something must be evicted, for one row's victim could be another's source.
// Rows that only grow come last: pages that others give back are there by then.
bool CacheManager::reserve_together(const RequestBatch& batch, std::int64_t num_steps,
                                    Transfers* transfers, FetchResult& result) {
    const bool copies_at_once = transfers != nullptr;
    std::vector<std::int64_t> left;
    for (const auto& replica : replicas_) left.push_back(replica->pool.num_free());
    std::vector<Admission> admissions = admit_together(batch, num_steps, true, copies_at_once);
    const bool evicts = share_out(left, batch, num_steps, admissions).status != FetchStatus::kOk;
    if (evicts) admissions = admit_together(batch, num_steps, false, copies_at_once);
    std::vector<Reservation> made;
    made.reserve(joining_.size());
    make_room(listed_copies_, joining_.size());
    make_room(ledger_->copies, joining_.size());
    if (transfers != nullptr) {
        make_room(transfers->copies, joining_.size());
        make_room(transfers->moved, joining_.size());
    }
    for (std::size_t k = 0; k < joining_.size(); ++k) {
        const std::int64_t row = joining_[k];
        Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        made.push_back(prepare(admissions[k], sequence, batch[row], transfers));
    }
    if (transfers != nullptr) make_room_for_loads(made, *transfers);
    prepare_growth(batch, num_steps);
    if (evicts) {
        for (std::size_t r = 0; r < replicas_.size(); ++r) {
            left[r] = replicas_[r]->pool.num_free() + replicas_[r]->tree.num_evictable();
        }
        const FetchResult shared = share_out(std::move(left), batch, num_steps, admissions);
        if (shared.status != FetchStatus::kOk) {
            result = shared;
            return false;
        }
    }
    for (std::size_t k = 0; k < joining_.size(); ++k) {
        const std::int64_t row = joining_[k];
        Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        result.has_moved |= apply(made[k], sequence, batch[row], row, transfers);
    }
    grow(batch, num_steps);
    return true;
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

// Rows that can take no hit, do not begin again and replace no page need nothing but more pages:
// what most rows of a decode step need. It stays so while other rows are reserved.
void CacheManager::sort_missing(const RequestBatch& batch) {
    growing_.clear();
    joining_.clear();
    for (const std::int64_t row : missing_) {
        const Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        const bool only_grows =
            sequence.is_sealed() && !sequence.pages.empty() &&
            batch[row].start >= std::int64_t{sequence.frozen} * config_.page_size;
        (only_grows ? growing_ : joining_).push_back(row);
    }
}

std::int64_t CacheManager::missing_pages(const RequestView& request, const Sequence& sequence,
                                         std::int64_t num_steps) const {
    return ceil_div(request.end + num_steps - 1, config_.page_size) - sequence.num_pages();
}

// Whether each replica has enough for its growing rows, free or evictable; the first row for which
// it has not goes to `result`.
bool CacheManager::find_supply(const RequestBatch& batch, std::int64_t num_steps,
                               FetchResult& result) {
    supply_.clear();
    for (const auto& replica : replicas_) supply_.push_back({replica->pool.num_free()});
    for (const std::int64_t row : growing_) {
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
    }
    return true;
}

// Counts what the growing rows want and gets memory for it, so that `grow` cannot fail.
void CacheManager::prepare_growth(const RequestBatch& batch, std::int64_t num_steps) {
    supply_.assign(replicas_.size(), {});
    std::int64_t wanted = 0;
    for (const std::int64_t row : growing_) {
        Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        const std::int64_t pages = missing_pages(batch[row], sequence, num_steps);
        make_room(sequence.pages, static_cast<std::size_t>(pages));
        supply_[static_cast<std::size_t>(sequence.replica)].wanted += pages;
        wanted += pages;
    }
    taken_.reserve(static_cast<std::size_t>(wanted));
}

void CacheManager::grow(const RequestBatch& batch, std::int64_t num_steps) noexcept {
    taken_.clear();
    for (std::size_t r = 0; r < replicas_.size(); ++r) {
        Supply& supply = supply_[r];
        supply.given = taken_.size();
        taken_.resize(taken_.size() + static_cast<std::size_t>(supply.wanted));
        take_pages(*replicas_[r], supply.wanted, taken_.data() + supply.given);
        note_peak(*replicas_[r]);
    }
    for (const std::int64_t row : growing_) {
        Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        std::size_t& given = supply_[static_cast<std::size_t>(sequence.replica)].given;
        const BlockId* first = taken_.data() + given;
        const std::int64_t pages = missing_pages(batch[row], sequence, num_steps);
        sequence.pages.insert(sequence.pages.end(), first, first + pages);
        given += static_cast<std::size_t>(pages);
    }
}

// Rows that need pages get them, all or none.
bool CacheManager::reserve_missing(const RequestBatch& batch, std::int64_t num_steps,
                                   Transfers* transfers, FetchResult& result) {
    sort_missing(batch);
    if (joining_.empty()) {
        if (!find_supply(batch, num_steps, result)) return false;
        prepare_growth(batch, num_steps);
        grow(batch, num_steps);
        return true;
    }
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
