// SPDX-License-Identifier: Apache-2.0
// What is done to a batch as a whole: checks, reserving all or nothing, commit.
#include <algorithm>
#include <stdexcept>

#include "admission.hpp"
#include "batch_rules.hpp"
#include "kvcore/errors.hpp"
#include "undo_log.hpp"

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
    return {*this, sequences_.live(), num_steps, most_tokens(num_steps), ++batch_stamp_};
}

// Everything that can be wrong with a batch, before anything is done with it.
void CacheManager::check_batch(const RequestBatch& batch, std::int64_t num_steps) {
    const BatchRules rules = rules_of(num_steps);
    batch_.resize(static_cast<std::size_t>(batch.size()));
    for (std::int64_t row = 0; row < batch.size(); ++row) {
        batch_[static_cast<std::size_t>(row)] = &rules.checked(batch[row], row);
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

// Several rows against one state, so that the batch gets its pages as a whole or not at all. Where
// something must be evicted, all hits are pinned first: what is evictable then is exactly what the
// batch may evict. Partial hits are dropped there, for one row's victim could be another's source.
bool CacheManager::reserve_together(const RequestBatch& batch, std::int64_t num_steps, Owed owed,
                                    FetchResult& result) {
    std::vector<Admission> admissions;
    admissions.reserve(missing_.size());
    std::vector<std::int64_t> free;
    for (const auto& replica : replicas_) free.push_back(replica->pool.num_free());
    bool must_evict = false;
    for (const std::int64_t row : missing_) {
        const Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        admissions.push_back(admit(sequence, batch[row], num_steps, true));
        note_leaving(admissions.back(), sequence);
        std::int64_t& left = free[static_cast<std::size_t>(sequence.replica)];
        left -= admissions.back().new_pages() - admissions.back().returned;
        must_evict = must_evict || left < 0;
    }
    std::vector<std::pair<PrefixTree*, TreeNode*>> held;
    bool fits = true;
    leaving_.clear();
    if (must_evict) {
        for (std::size_t k = 0; k < missing_.size(); ++k) {
            const Sequence& sequence = *batch_[static_cast<std::size_t>(missing_[k])];
            admissions[k] = admit(sequence, batch[missing_[k]], num_steps, false);
            note_leaving(admissions[k], sequence);
            if (!admissions[k].shares()) continue;
            PrefixTree& tree = replica_at(sequence.replica).tree;
            TreeNode*& end = admissions[k].match.at.node;
            end = tree.split(admissions[k].match.at);
            tree.pin(end);
            held.emplace_back(&tree, end);
        }
        fits = fits_together(admissions, result);
        leaving_.clear();
    }
    if (fits) result.has_moved |= apply_together(admissions, batch, owed);
    for (const auto& [tree, node] : held) tree->unpin(node, false);
    return fits;
}

// Of the forks in a batch that go on writing the same page, the last one need not copy it, nor need
// the only one that goes on.
void CacheManager::note_leaving(const Admission& admission, const Sequence& sequence) {
    const auto first = static_cast<std::int32_t>(admission.start / config_.page_size);
    for (std::int32_t column = first; column < sequence.frozen; ++column) {
        if (!is_own(sequence, column) || is_sole_holder(sequence, column)) continue;
        ++leaving_[{sequence.replica, sequence.pages[static_cast<std::size_t>(column)]}];
    }
}

// Copies made at once hold their sources meanwhile, and yet the last fork of a page has it for
// itself, as it was admitted.
bool CacheManager::apply_together(const std::vector<Admission>& admissions,
                                  const RequestBatch& batch, Owed owed) {
    const std::vector<PageCopy>* copies = owed.copies;
    bool has_moved = false;
    std::size_t done = copies == nullptr ? 0 : copies->size();
    for (std::size_t k = 0; k < missing_.size(); ++k) {
        const std::int64_t row = missing_[k];
        has_moved |= apply(admissions[k], *batch_[static_cast<std::size_t>(row)], batch[row], owed);
        for (; copies != nullptr && done < copies->size(); ++done) {
            const PageCopy& copy = (*copies)[done];
            if (copy.held == nullptr) ++leaving_[{copy.replica, copy.source}];
        }
    }
    leaving_.clear();
    return has_moved;
}

// True when no missing row can take a hit, begin again or must replace pages: all it needs is more
// of them.
bool CacheManager::only_grow(const RequestBatch& batch) const {
    return std::all_of(missing_.begin(), missing_.end(), [&](std::int64_t row) {
        const Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        return sequence.is_sealed && !sequence.pages.empty() &&
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

bool CacheManager::reserve_missing(const RequestBatch& batch, std::int64_t num_steps, Owed owed,
                                   FetchResult& result) {
    if (only_grow(batch)) return grow_together(batch, num_steps, result);
    if (missing_.size() > 1) return reserve_together(batch, num_steps, owed, result);
    // One row is what `reserve` does.
    RequestView& request = batch[missing_[0]];
    Sequence& sequence = *batch_[static_cast<std::size_t>(missing_[0])];
    const Admission admission = admit(sequence, request, num_steps, true);
    if (!admission.fits) {
        result = {FetchStatus::kNoSpace, missing_[0], admission.new_pages(), admission.available,
                  false};
        return false;
    }
    result.has_moved = apply(admission, sequence, request, owed);
    return true;
}

void CacheManager::commit_pages(Replica& replica, Sequence& sequence, const RequestView& request,
                                std::int32_t row, std::vector<PageSwap>& swaps) {
    const std::int32_t first = sequence.committed;
    const auto written = static_cast<std::int32_t>(request.start / config_.page_size);
    BlockId* pages = sequence.pages.data();
    duplicates_.clear();
    TreeNode* node = replica.tree.insert(sequence.node,
                                         request.tokens + std::ptrdiff_t{first} * config_.page_size,
                                         pages + first, written - first, duplicates_);
    if (node != sequence.node) {
        replica.tree.pin(node);
        replica.tree.unpin(sequence.node, false);
        sequence.node = node;
    }
    // Columns that others may hold too: forks, or copies under way.
    const std::int32_t shared_end =
        held_sources_.empty() ? std::min(sequence.frozen, written) : written;
    sequence.committed = written;
    sequence.frozen = std::max(sequence.frozen, written);
    const auto num_new = written - first - static_cast<std::int32_t>(duplicates_.size());
    for (std::int32_t column = written - num_new; column < shared_end; ++column) {
        if (replica.pool.ref_count(pages[column]) > 1) entrust_to_tree(sequence, column);
    }
    for (const DuplicatePage& duplicate : duplicates_) {
        const std::int32_t column = first + duplicate.index;
        if (!config_.dedup) {
            sequence.kept.push_back(column);
            continue;
        }
        replica.pool.free(pages + column, 1);
        pages[column] = duplicate.cached;
        swaps.push_back({row, column, duplicate.cached});
    }
    if (duplicates_.empty()) return;
    if (config_.dedup) {
        ++sequence.row_version;
    } else {
        note_peak(replica);  // the tree's twins are held now as well
    }
}

void CacheManager::commit(const RequestBatch& given, std::vector<PageSwap>& swaps,
                          std::vector<HostCopy>* host_copies) {
    require_host_copies(host_copies);
    const std::lock_guard<std::mutex> lock(mutex_);
    const RequestBatch batch = given;
    const std::int64_t n = batch.size();
    const std::int64_t page = config_.page_size;
    const bool has_host = config_.host_pages > 0;
    const SequenceTable::Slots sequences = sequences_.live();
    missing_.clear();  // of pages in the tree
    UndoLog<&Sequence::written> written(undo_, n);
    for (std::int64_t i = 0; i < n; ++i) {
        if (i + kAhead < n) sequences.prefetch(batch[i + kAhead].sequence);
        const RequestView& request = batch[i];
        Sequence& sequence = sequences.at(request.sequence);
        if (!has_legal_indices(request)) refuse_indices(request, i);
        if (request.start > sequence.num_pages() * page) refuse_unreserved(request, sequence, i);
        written.set(sequence, request.start);
        const bool has_new_page = request.start >= (sequence.committed + 1) * page;
        if (sequence.is_sealed && !has_new_page) continue;
        missing_.push_back(i);
        PrefixTree::prefetch_node(sequence.node);
    }
    written.keep();
    for (std::size_t k = 0; k < missing_.size(); ++k) {
        const std::int64_t row = missing_[k];
        if (k + 2 < missing_.size()) {
            const Sequence* later = sequences.find(batch[missing_[k + 2]].sequence);
            replica_at(later->replica).tree.prefetch_end(later->node);
        }
        const RequestView& request = batch[row];
        Sequence& sequence = *sequences.find(request.sequence);
        if (request.start != sequence.hit_tokens) sequence.is_sealed = true;
        // Asked again: an earlier row may name the same request.
        const bool has_new_page = request.start >= (sequence.committed + 1) * page;
        if (!config_.prefix_caching || !has_new_page) continue;
        Replica& replica = replica_at(sequence.replica);
        commit_pages(replica, sequence, request, static_cast<std::int32_t>(row), swaps);
        if (has_host) owe_stores(request.sequence, sequence, *host_copies);
    }
}

void CacheManager::refuse_unreserved(const RequestView& request, const Sequence& sequence,
                                     std::int64_t row) const {
    throw InRow<std::invalid_argument>(
        row,
        detail::concat(request.start, " tokens are said to be written, the ", sequence.num_pages(),
                       " pages hold ", std::int64_t{sequence.num_pages()} * config_.page_size,
                       "; reserve before running the model"));
}

}  // namespace kvcore
