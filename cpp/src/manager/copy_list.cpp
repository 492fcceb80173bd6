// SPDX-License-Identifier: Apache-2.0
#include "manager/copy_list.hpp"

#include <algorithm>

#include "support/make_room.hpp"

namespace kvcore {

void CopyList::make_room(std::size_t n) { kvcore::make_room(copies_, n); }

void CopyList::add(const PageMove& copy) noexcept {
    prune();
    copies_.push_back(copy);
}

// A caller that never takes them must not gather those of sequences long gone.
void CopyList::prune() noexcept {
    if (copies_.size() < prune_at_) return;
    const auto is_gone = [this](const PageMove& listed) {
        return sequences_.find(listed.sequence) == nullptr;
    };
    copies_.erase(std::remove_if(copies_.begin(), copies_.end(), is_gone), copies_.end());
    prune_at_ = std::max<std::size_t>(64, 2 * copies_.size());
}

std::vector<PageMove> CopyList::take() {
    std::vector<PageMove> taken;
    taken.reserve(copies_.size());
    for (const PageMove& copy : copies_) {
        if (sequences_.find(copy.sequence) == nullptr) continue;
        const bool is_another_forks = !taken.empty() && taken.back() == copy;
        if (!is_another_forks) taken.push_back(copy);
    }
    copies_.clear();
    return taken;
}

void CopyList::forget(SequenceHandle handle, const PageRow& row, std::int32_t from) noexcept {
    const auto is_dropped = [&](const PageMove& copy) {
        return copy.sequence == handle && row.find(copy.destination, from) < row.size();
    };
    copies_.erase(std::remove_if(copies_.begin(), copies_.end(), is_dropped), copies_.end());
}

void CopyList::make_room_for_heirs(std::size_t n) {
    prune();
    make_room(copies_.size() * n);
}

// Next to the original: what comes behind it on the list may read the page, or write over the
// source.
void CopyList::inherit(SequenceHandle parent, SequenceHandle child, const PageRow& row) noexcept {
    for (std::size_t i = 0; i < copies_.size(); ++i) {
        PageMove copy = copies_[i];
        if (copy.sequence != parent || row.find(copy.destination) == row.size()) continue;
        copy.sequence = child;
        copies_.insert(copies_.begin() + static_cast<std::ptrdiff_t>(++i), copy);
    }
}

}  // namespace kvcore
