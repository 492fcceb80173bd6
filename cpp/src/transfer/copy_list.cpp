// SPDX-License-Identifier: Apache-2.0
#include "transfer/copy_list.hpp"

#include <algorithm>

#include "support/memory.hpp"

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

}  // namespace kvcore
