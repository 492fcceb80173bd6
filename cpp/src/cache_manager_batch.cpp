// SPDX-License-Identifier: Apache-2.0
// What runs once per step over the whole batch: fetch and commit.
#include <algorithm>
#include <stdexcept>

#include "admission.hpp"
#include "kvcore/errors.hpp"

namespace kvcore {
namespace {

// Sequences this far ahead in a batch are asked for early.
constexpr std::int64_t kAhead = 8;

}  // namespace

void CacheManager::require_steps(std::int64_t num_steps) {
    if (num_steps >= 1) return;
    throw std::invalid_argument(detail::concat("num_steps is ", num_steps, ", must be at least 1"));
}

// Everything that can be wrong with a batch, before anything is done with it. Leaves the sequences
// in batch_ and, asked by `targets`, the rows that need pages in missing_ and the sizes of what the
// others have: what a decode step costs is how often it walks the batch.
void CacheManager::check_batch(const RequestBatch& batch, std::int64_t num_steps,
                               FetchTarget* targets) {
    const std::int64_t n = batch.size();
    require_steps(num_steps);
    const std::uint32_t stamp = ++batch_stamp_;
    batch_.resize(static_cast<std::size_t>(n));
    missing_.clear();
    for (std::int64_t i = 0; i < n; ++i) {
        if (i + kAhead < n) sequences_.prefetch(batch[i + kAhead].sequence);
        const RequestView& request = batch[i];
        Sequence& sequence = sequences_.at(request.sequence);
        if (!has_legal_indices(request)) refuse_indices(request, i);
        if (is_too_long(request, num_steps)) refuse_length(request, i, num_steps);
        if (sequence.batch_stamp == stamp) {
            throw InRow<std::invalid_argument>(
                i, detail::concat("row ", i,
                                  " repeats a request of an earlier row of the batch; "
                                  "name each request once"));
        }
        sequence.batch_stamp = stamp;
        batch_[static_cast<std::size_t>(i)] = &sequence;
        if (targets == nullptr) continue;
        if (is_reserved(sequence, request, num_steps)) {
            measure(request, sequence, targets[sequence.replica]);
        } else {
            missing_.push_back(i);
        }
    }
}

bool CacheManager::is_reserved(const Sequence& sequence, const RequestView& request,
                               std::int64_t num_steps) const noexcept {
    const std::int64_t page = config_.page_size;
    return request.end + num_steps - 1 <= sequence.num_pages() * page &&
           request.start >= sequence.committed * page;
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
bool CacheManager::reserve_together(const RequestBatch& batch, std::int64_t num_steps,
                                    std::vector<PageCopy>* copies, FetchResult& result) {
    std::vector<Admission> admissions;
    admissions.reserve(missing_.size());
    std::vector<std::int64_t> free;
    for (const auto& replica : replicas_) free.push_back(replica->pool.num_free());
    bool must_evict = false;
    for (const std::int64_t row : missing_) {
        const Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        admissions.push_back(admit(sequence, batch[row], num_steps, true));
        std::int64_t& left = free[static_cast<std::size_t>(sequence.replica)];
        left -= admissions.back().new_pages() - admissions.back().returned;
        must_evict = must_evict || left < 0;
    }
    std::vector<std::pair<PrefixTree*, TreeNode*>> held;
    bool fits = true;
    if (must_evict) {
        for (std::size_t k = 0; k < missing_.size(); ++k) {
            const Sequence& sequence = *batch_[static_cast<std::size_t>(missing_[k])];
            admissions[k] = admit(sequence, batch[missing_[k]], num_steps, false);
            if (!admissions[k].takes_hit) continue;
            PrefixTree& tree = replica_at(sequence.replica).tree;
            TreeNode*& end = admissions[k].match.at.node;
            end = tree.split(admissions[k].match.at);
            tree.pin(end);
            held.emplace_back(&tree, end);
        }
        fits = fits_together(admissions, result);
    }
    for (std::size_t k = 0; fits && k < missing_.size(); ++k) {
        const std::int64_t row = missing_[k];
        result.has_moved |=
            apply(admissions[k], *batch_[static_cast<std::size_t>(row)], batch[row], copies);
    }
    for (const auto& [tree, node] : held) tree->unpin(node, false);
    return fits;
}

// True when no missing row can take a hit or must replace pages: all it needs is more of them.
bool CacheManager::only_grow(const RequestBatch& batch) const {
    return std::all_of(missing_.begin(), missing_.end(), [&](std::int64_t row) {
        const Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        return sequence.is_sealed &&
               batch[row].start >= std::int64_t{sequence.committed} * config_.page_size;
    });
}

// The decode step: rows that cross into a new page get it, all or none.
bool CacheManager::grow_together(const RequestBatch& batch, std::int64_t num_steps,
                                 FetchResult& result) {
    supply_.clear();
    for (const auto& replica : replicas_) supply_.push_back({replica->pool.num_free(), false});
    for (const std::int64_t row : missing_) {
        const Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        Supply& supply = supply_[static_cast<std::size_t>(sequence.replica)];
        const std::int64_t pages =
            ceil_div(batch[row].end + num_steps - 1, config_.page_size) - sequence.num_pages();
        if (pages > supply.pages && !supply.has_evictable) {
            supply.has_evictable = true;
            supply.pages += replica_at(sequence.replica).tree.num_evictable();
        }
        if (pages > supply.pages) {
            result = {FetchStatus::kNoSpace, row, pages, supply.pages, false};
            return false;
        }
        supply.pages -= pages;
    }
    for (const std::int64_t row : missing_) {
        Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
        const std::int64_t pages =
            ceil_div(batch[row].end + num_steps - 1, config_.page_size) - sequence.num_pages();
        append_pages(replica_at(sequence.replica), sequence, pages);
    }
    for (const auto& replica : replicas_) note_peak(*replica);
    return true;
}

bool CacheManager::reserve_missing(const RequestBatch& batch, std::int64_t num_steps,
                                   std::vector<PageCopy>* copies, FetchResult& result) {
    if (only_grow(batch)) return grow_together(batch, num_steps, result);
    if (missing_.size() > 1) return reserve_together(batch, num_steps, copies, result);
    // One row is what `reserve` does.
    RequestView& request = batch[missing_[0]];
    Sequence& sequence = *batch_[static_cast<std::size_t>(missing_[0])];
    const Admission admission = admit(sequence, request, num_steps, true);
    if (!admission.fits) {
        result = {FetchStatus::kNoSpace, missing_[0], admission.new_pages(), admission.available,
                  false};
        return false;
    }
    result.has_moved = apply(admission, sequence, request, copies);
    return true;
}

void CacheManager::measure(const RequestView& request, const Sequence& sequence,
                           FetchTarget& target) {
    ++target.rows;
    target.width = std::max(target.width, sequence.num_pages());
    target.longest_new = std::max(target.longest_new, request.active - request.start);
    target.longest_active = std::max(target.longest_active, request.active);
}

bool CacheManager::have_room(const FetchTarget* targets) const {
    return std::all_of(targets, targets + config_.num_replicas, [](const FetchTarget& target) {
        return target.rows == 0 ||
               (target.table != nullptr && target.rows <= target.table->max_rows() &&
                target.width <= target.table->stride());
    });
}

FetchResult CacheManager::fetch(const RequestBatch& batch, std::int64_t num_steps,
                                FetchTarget* targets, std::vector<PageCopy>* copies) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (std::int32_t r = 0; r < config_.num_replicas; ++r) {
        targets[r] = {targets[r].table, targets[r].cache_lengths, 0, 0, 0, 0};
    }
    check_batch(batch, num_steps, targets);
    FetchResult result;
    if (!missing_.empty()) {
        if (!reserve_missing(batch, num_steps, copies, result)) return result;
        for (const std::int64_t row : missing_) {
            const Sequence& sequence = *batch_[static_cast<std::size_t>(row)];
            measure(batch[row], sequence, targets[sequence.replica]);
        }
    }
    if (!have_room(targets)) {
        result.status = FetchStatus::kGrow;
        return result;
    }
    for (std::int32_t r = 0; r < config_.num_replicas; ++r) targets[r].rows = 0;
    for (std::int64_t i = 0; i < batch.size(); ++i) {
        const RequestView& request = batch[i];
        Sequence& sequence = *batch_[static_cast<std::size_t>(i)];
        FetchTarget& target = targets[sequence.replica];
        const std::int64_t row = target.rows++;
        target.table->write_row(row, request.sequence, sequence, target.width);
        target.cache_lengths[row] = static_cast<std::uint32_t>(request.start);
        sequence.is_sealed = true;
        count_input(request.start, request.active, sequence);
    }
    return result;
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
    replica.tree.pin(node);
    replica.tree.unpin(sequence.node, false);
    sequence.node = node;
    sequence.committed = written;
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

void CacheManager::commit(const RequestBatch& batch, std::vector<PageSwap>& swaps) {
    const std::int64_t n = batch.size();
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::int64_t page = config_.page_size;
    missing_.clear();  // of pages in the tree
    for (std::int64_t i = 0; i < n; ++i) {
        if (i + kAhead < n) sequences_.prefetch(batch[i + kAhead].sequence);
        const RequestView& request = batch[i];
        const Sequence& sequence = sequences_.at(request.sequence);
        if (!has_legal_indices(request)) refuse_indices(request, i);
        const std::int64_t held = sequence.num_pages() * page;
        if (request.start > held) {
            throw InRow<std::invalid_argument>(
                i, detail::concat(request.start, " tokens are said to be written, the ",
                                  sequence.num_pages(), " pages hold ", held,
                                  "; reserve before running the model"));
        }
        const bool has_new_page = request.start >= (sequence.committed + 1) * page;
        if (has_new_page || !sequence.is_sealed) missing_.push_back(i);
    }
    for (const std::int64_t row : missing_) {
        const RequestView& request = batch[row];
        Sequence& sequence = *sequences_.find(request.sequence);
        if (request.start != sequence.hit_tokens) sequence.is_sealed = true;
        // Asked again: an earlier row may name the same request.
        const bool has_new_page = request.start >= (sequence.committed + 1) * page;
        if (!config_.prefix_caching || !has_new_page) continue;
        commit_pages(replica_at(sequence.replica), sequence, request,
                     static_cast<std::int32_t>(row), swaps);
    }
}

}  // namespace kvcore
