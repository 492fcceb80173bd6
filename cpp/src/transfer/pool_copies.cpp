// SPDX-License-Identifier: Apache-2.0
#include "transfer/pool_copies.hpp"

#include <algorithm>

#include "support/memory.hpp"
#include "support/tickets.hpp"

namespace kvcore {

void CopyList::make_room(std::size_t n) { kvcore::make_room(copies_, n * per_column_); }

void CopyList::add(const PageMove& copy) noexcept {
    prune();
    const Replica& home = *replicas_[static_cast<std::size_t>(copy.replica)];
    for_each_page_move(home, copy,
                       [&](const PageMove& move) { copies_.push_back({move, copy.destination}); });
}

// Removes copies for released sequences: they would pile up if the caller never took the list.
void CopyList::prune() noexcept {
    if (copies_.size() < prune_at_) return;
    const auto is_gone = [this](const Listed& listed) {
        return sequences_.find(listed.move.sequence) == nullptr;
    };
    copies_.erase(std::remove_if(copies_.begin(), copies_.end(), is_gone), copies_.end());
    prune_at_ = std::max<std::size_t>(64, 2 * copies_.size());
}

std::vector<PageMove> CopyList::take() {
    std::vector<PageMove> taken;
    taken.reserve(copies_.size());
    for (const auto& [copy, column] : copies_) {
        if (sequences_.find(copy.sequence) == nullptr) continue;
        const bool is_another_forks = !taken.empty() && taken.back() == copy;
        if (!is_another_forks) taken.push_back(copy);
    }
    copies_.clear();
    return taken;
}

void CopyList::forget(SequenceHandle handle, const PageRow& row, std::int32_t from) noexcept {
    const auto is_dropped = [&](const Listed& copy) {
        return copy.move.sequence == handle && row.find(copy.column, from) < row.size();
    };
    copies_.erase(std::remove_if(copies_.begin(), copies_.end(), is_dropped), copies_.end());
}

void CopyList::make_room_for_heirs(std::size_t n) {
    prune();
    kvcore::make_room(copies_, copies_.size() * n);
}

// Inserts the fork's copy next to the original: later copies on the list may read the page, or
// overwrite the source.
void CopyList::inherit(SequenceHandle parent, SequenceHandle child, const PageRow& row) noexcept {
    for (std::size_t i = 0; i < copies_.size(); ++i) {
        Listed copy = copies_[i];
        if (copy.move.sequence != parent || row.find(copy.column) == row.size()) continue;
        copy.move.sequence = child;
        copies_.insert(copies_.begin() + static_cast<std::ptrdiff_t>(++i), copy);
    }
}

Leavers OwedCopies::leavers_of_call(std::int32_t replica, BlockId page) const noexcept {
    Leavers leavers;
    for (std::size_t i = call_begin_; i < copies_.size(); ++i) {
        const Copy& each = copies_[i];
        const bool is_its = each.copy.replica == replica && each.source.is_reference() &&
                            each.source.column() == page;
        if (is_its) leavers.add(each.copy.num_tokens);
    }
    return leavers;
}

void OwedCopies::make_room(Transfers& transfers, std::size_t n) {
    kvcore::make_room(transfers.copies, n * per_column_);
    kvcore::make_room(copies_, n);
}

bool OwedCopies::finish(std::uint64_t ticket, bool done) noexcept {
    return end_ticket(copies_, ticket, [&](Copy& copy) {
        Sequence* sequence = sequences_.find(copy.copy.sequence);
        if (sequence != nullptr && !done) {
            spare_source(copy.copy, *sequence);
            return false;
        }
        if (sequence != nullptr) --sequence->num_pending;
        return true;
    });
}

// Protects the source of an owed copy in every sequence that holds it: the sequence must not
// write in the source while the copy is owed. O(sequences).
void OwedCopies::spare_source(const PageMove& copy, const Sequence& sequence) noexcept {
    const std::int32_t column = sequence.pages.find(copy.destination);
    for (Sequence& other : sequences_.live()) {
        const bool holds = other.replica == copy.replica && other.pages.has(column, copy.source);
        if (holds) other.pages.make_read_only(column + 1);
    }
}

OwedStatus OwedCopies::take_owed(SequenceHandle handle, Transfers& transfers) {
    const Sequence* sequence = sequences_.find(handle);
    if (sequence == nullptr || sequence->num_pending == 0) return OwedStatus::kNone;
    kvcore::make_room(transfers.copies, sequence->num_pending * per_column_);
    bool is_taken = false;
    for (Copy& copy : copies_) {
        if (copy.copy.sequence != handle || copy.ticket != 0) continue;
        give_out(copy, transfers);
        is_taken = true;
    }
    return is_taken ? OwedStatus::kTaken : OwedStatus::kUnderWay;
}

void OwedCopies::drop_owed(SequenceHandle handle) noexcept {
    const auto is_owed = [handle](const Copy& copy) {
        return copy.copy.sequence == handle && copy.ticket == 0;
    };
    copies_.erase(std::remove_if(copies_.begin(), copies_.end(), is_owed), copies_.end());
}

void OwedCopies::drop_forgotten() noexcept {
    for (const Copy& copy : copies_) {
        const TreePosition at = copy.source.at();
        Sequence* sequence = sequences_.find(copy.copy.sequence);
        if (at.node == nullptr || sequence == nullptr) continue;
        if (!PrefixTree::is_forgotten(PrefixTree::position(at.node, at.depth).node)) continue;
        sequence->pages.limit_commits(sequence->pages.find(copy.destination.column()));
    }
}

void OwedCopies::protect_read_pages(Sequence& sequence, std::int64_t start,
                                    std::int32_t page_size) const noexcept {
    const auto first = static_cast<std::int32_t>(start / page_size);
    PageRow& row = sequence.pages;
    for (const Copy& copy : copies_) {
        if (copy.copy.replica != sequence.replica || !copy.source.is_reference()) continue;
        for (std::int32_t c = std::max(first, row.read_only_end()); c < row.size(); ++c) {
            const bool is_it = row[c] == copy.copy.source;
            const std::int64_t kept = start - std::int64_t{c} * page_size;
            if (is_it && copy.copy.num_tokens > kept) row.make_read_only(c + 1);
        }
    }
}

}  // namespace kvcore
