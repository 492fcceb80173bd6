// SPDX-License-Identifier: Apache-2.0
// From a sequence's own pages to the prefix tree's.
#include <algorithm>
#include <new>
#include <stdexcept>
#include <utility>

#include "kvcore/errors.hpp"
#include "manager/batch_rules.hpp"
#include "manager/transfer_ledger.hpp"
#include "manager/undo_log.hpp"

namespace kvcore {

void CacheManager::refuse_unreserved(const RequestView& request, const Sequence& sequence,
                                     std::int64_t row) const {
    throw InRow<std::invalid_argument>(
        row,
        detail::concat(request.start, " tokens are said to be written, the ", sequence.num_pages(),
                       " pages hold ", std::int64_t{sequence.num_pages()} * config_.page_size,
                       "; reserve before running the model"));
}

// Calls visit(other) for every other sequence that has this page there as its own: forks.
// O(sequences).
template <class Visit>
void CacheManager::for_each_other_holder(const Sequence& sequence, std::int32_t column,
                                         const Visit& visit) {
    const BlockId page = sequence.pages[static_cast<std::size_t>(column)];
    const SequenceTable::Slots live = sequences_.live();
    for (Sequence* other = live.data; other != live.data + live.size; ++other) {
        const bool holds = other != &sequence && other->replica == sequence.replica &&
                           other->committed <= column && other->num_pages() > column &&
                           other->pages[static_cast<std::size_t>(column)] == page;
        if (holds) visit(*other);
    }
}

// A page that forks have begun was filled and committed by one of them. It is the tree's now, which
// would evict it: so the others, and copies under way, hold it there, as the last committed page of
// theirs. What they have in front of it and the tree has another page for, stays their own.
// O(sequences), once for such a page; there is room.
void CacheManager::entrust_to_tree(const Sequence& sequence, std::int32_t column) noexcept {
    Replica& replica = replica_at(sequence.replica);
    const BlockId page = sequence.pages[static_cast<std::size_t>(column)];
    TreeNode* end = sequence.node;
    for_each_other_holder(sequence, column, [&](Sequence& other) {
        replica.pool.free(&page, 1);
        replica.tree.pin(end);
        replica.tree.unpin(std::exchange(other.node, end), false);
        for (std::int32_t c = other.committed; c < column; ++c) other.kept.push_back(c);
        other.committed = column + 1;
        other.frozen = std::max(other.frozen, other.committed);
    });
    for (Ledger::Copy& copy : ledger_->copies) {
        PageHold& source = copy.source;
        const bool is_it =
            copy.copy.replica == sequence.replica && source.is_reference() && source.page() == page;
        if (is_it) source.move_to_tree(replica.tree, {end, column + 1});
    }
}

// The first column from the committed ones on that others may hold as well, forks or copies under
// way; `written` when there is none.
std::int32_t CacheManager::next_shared(const Replica& replica, const Sequence& sequence,
                                       std::int32_t written) const {
    const std::int32_t end = ledger_->copies.empty() ? std::min(sequence.frozen, written) : written;
    for (std::int32_t column = sequence.committed; column < end; ++column) {
        const BlockId page = sequence.pages[static_cast<std::size_t>(column)];
        if (replica.pool.ref_count(page) > 1) return column;
    }
    return written;
}

// Puts the columns from the committed ones to `end` into the tree; of these only the last one may
// be others' too: `is_shared`.
void CacheManager::commit_run(Replica& replica, Sequence& sequence, const TokenId* tokens,
                              std::int32_t end, bool is_shared, std::int32_t row) {
    const std::int32_t first = sequence.committed;
    BlockId* pages = sequence.pages.data();
    if (is_shared) {
        for_each_other_holder(sequence, end - 1, [&](Sequence& other) {
            make_room(other.kept, static_cast<std::size_t>(end - 1 - other.committed));
        });
    }
    duplicates_.clear();
    make_room(swapped_, static_cast<std::size_t>(end - first));
    if (!config_.dedup) make_room(sequence.kept, static_cast<std::size_t>(end - first));
    TreeNode* node =
        replica.tree.insert(sequence.node, tokens + std::ptrdiff_t{first} * config_.page_size,
                            pages + first, end - first, duplicates_);
    // Nothing below can fail.
    if (node != sequence.node) {
        replica.tree.pin(node);
        replica.tree.unpin(std::exchange(sequence.node, node), false);
    }
    sequence.committed = end;
    sequence.frozen = std::max(sequence.frozen, end);
    const auto num_duplicates = static_cast<std::int32_t>(duplicates_.size());
    if (is_shared && num_duplicates < end - first) entrust_to_tree(sequence, end - 1);
    for (const DuplicatePage& duplicate : duplicates_) {
        const std::int32_t column = first + duplicate.index;
        if (!config_.dedup) {
            sequence.kept.push_back(column);
            continue;
        }
        replica.pool.free(pages + column, 1);
        pages[column] = duplicate.cached;
        swapped_.push_back({row, column, duplicate.cached});
    }
    if (duplicates_.empty()) return;
    if (config_.dedup) {
        ++sequence.row_version;
    } else {
        note_peak(replica);  // the tree's twins are held now as well
    }
}

// In pieces that end behind a page that others hold too, so that they have a place there.
void CacheManager::commit_pages(Replica& replica, Sequence& sequence, const RequestView& request,
                                std::int32_t row) {
    const auto written = static_cast<std::int32_t>(request.start / config_.page_size);
    while (sequence.committed < written) {
        const std::int32_t shared = next_shared(replica, sequence, written);
        commit_run(replica, sequence, request.tokens, std::min(shared + 1, written),
                   shared < written, row);
    }
}

void CacheManager::commit(const RequestBatch& given, std::vector<PageSwap>& swaps,
                          Transfers* transfers) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (config_.host_pages > 0) require_transfers(transfers);
    const RequestBatch batch = given;
    const std::int64_t n = batch.size();
    const std::int64_t page = config_.page_size;
    const SequenceTable::Slots sequences = sequences_.live();
    missing_.clear();  // of pages in the tree
    UndoLog<&Sequence::written> written(undo_, n);
    for (std::int64_t i = 0; i < n; ++i) {
        if (i + kAhead < n) sequences.prefetch(batch[i + kAhead].sequence);
        const RequestView& request = batch[i];
        Sequence& sequence = sequences.at(request.sequence, i);
        if (!has_legal_indices(request)) refuse_indices(request, i);
        if (request.start > sequence.num_pages() * page) refuse_unreserved(request, sequence, i);
        if (sequence.num_pending > 0) refuse_pending(i);
        written.set(sequence, request.start);
        const bool has_new_page = request.start >= (sequence.committed + 1) * page;
        if (sequence.is_sealed() && !has_new_page) continue;
        missing_.push_back(i);
        PrefixTree::prefetch_node(sequence.node);
    }
    written.keep();
    swapped_.clear();
    for (std::size_t k = 0; k < missing_.size(); ++k) {
        const std::int64_t row = missing_[k];
        if (k + 2 < missing_.size()) {
            const Sequence* later = sequences.find(batch[missing_[k + 2]].sequence);
            replica_at(later->replica).tree.prefetch_end(later->node);
        }
        const RequestView& request = batch[row];
        Sequence& sequence = *sequences.find(request.sequence);
        if (request.start != sequence.hit_tokens) sequence.reuse = Reuse::kSealed;
        // Asked again: an earlier row may name the same request.
        const bool has_new_page = request.start >= (sequence.committed + 1) * page;
        if (!config_.prefix_caching || !has_new_page) continue;
        try {
            commit_pages(replica_at(sequence.replica), sequence, request,
                         static_cast<std::int32_t>(row));
            if (config_.host_pages > 0) owe_stores(request.sequence, sequence, *transfers);
        } catch (const std::bad_alloc&) {
            // The pages stay the sequence's own; a later commit finds them and tries again. What
            // was swapped must be reported all the same.
            continue;
        }
    }
    // Memory for swaps is kept from call to call: few calls have any.
    swaps.clear();
    if (!swapped_.empty()) swaps.swap(swapped_);
}

}  // namespace kvcore
