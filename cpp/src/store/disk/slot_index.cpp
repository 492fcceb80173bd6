// SPDX-License-Identifier: Apache-2.0
#include "store/disk/slot_index.hpp"

#include <algorithm>
#include <utility>

#include "kvcore/errors.hpp"

namespace kvcore {

SlotIndex::SlotIndex(std::size_t num_directories)
    : free_(num_directories), num_of_(num_directories, 0) {}

void SlotIndex::make_room(std::size_t directory, std::int64_t slots) {
    const auto more = static_cast<std::size_t>(slots);
    const auto reserve = [](auto& values, std::size_t size) {
        if (size > values.capacity()) values.reserve(std::max(size, 2 * values.capacity()));
    };
    reserve(records_, records_.size() + more);
    reserve(free_[directory], num_of_[directory] + more);
}

SlotId SlotIndex::add(SlotPlace place) noexcept {
    records_.push_back({place, {}, 0, 0, kNoSlot, kNoSlot, 0, State::kBusy, false});
    ++num_of_[static_cast<std::size_t>(place.directory)];
    return num_slots() - 1;
}

SlotId SlotIndex::find(const StoreKey& key) const noexcept {
    const auto found = by_key_.find(key);
    return found == by_key_.end() ? kNoSlot : found->second;
}

void SlotIndex::touch(SlotId slot) noexcept {
    if (slot == newest_) return;
    unlink(slot);
    link(slot);
}

void SlotIndex::pin(SlotId slot) noexcept {
    touch(slot);
    ++at(slot).pins;
}

bool SlotIndex::unpin(SlotId slot) noexcept {
    Record& record = at(slot);
    if (--record.pins > 0 || record.state != State::kDoomed) return false;
    record.state = State::kBusy;
    return true;
}

SlotId SlotIndex::take_free(std::size_t directory) noexcept {
    std::vector<SlotId>& free = free_[directory];
    if (free.empty()) return kNoSlot;
    const SlotId slot = free.back();
    free.pop_back();
    at(slot).state = State::kBusy;
    return slot;
}

SlotId SlotIndex::evict() noexcept {
    for (SlotId slot = oldest_; slot != kNoSlot;) {
        const SlotId evicted = std::exchange(slot, at(slot).newer);
        if (at(evicted).pins > 0) continue;
        [[maybe_unused]] const bool is_busy = drop(evicted);
        if (!is_suspect(evicted)) return evicted;
        free(evicted);
    }
    return kNoSlot;
}

SlotId SlotIndex::publish(SlotId slot, const StoreKey& key, std::uint64_t parts,
                          std::int64_t payload, bool& is_busy) {
    const auto [place, is_new] = by_key_.try_emplace(key, slot);  // the only step that needs memory
    const SlotId before = is_new ? kNoSlot : place->second;
    if (before != kNoSlot) {
        is_busy = retire(before);
        place->second = slot;
    }
    Record& record = at(slot);
    record.key = key;
    record.parts = parts;
    record.payload = payload;
    record.state = State::kStored;
    link(slot);
    return before;
}

bool SlotIndex::drop(SlotId slot) noexcept {
    by_key_.erase(at(slot).key);
    return retire(slot);
}

std::int64_t SlotIndex::clear() noexcept {
    const std::int64_t stored = num_stored();
    while (oldest_ != kNoSlot) {
        const SlotId slot = oldest_;
        if (drop(slot)) free(slot);
    }
    return stored;
}

bool SlotIndex::retire(SlotId slot) noexcept {
    Record& record = at(slot);
    unlink(slot);
    const bool is_busy = record.pins == 0;
    record.state = is_busy ? State::kBusy : State::kDoomed;
    return is_busy;
}

void SlotIndex::free(SlotId slot) noexcept {
    Record& record = at(slot);
    record.state = record.is_suspect ? State::kBroken : State::kFree;
    if (record.is_suspect) {
        ++num_broken_;
    } else {
        free_[static_cast<std::size_t>(record.place.directory)].push_back(slot);
    }
}

void SlotIndex::free_broken() noexcept {
    for (SlotId slot = num_slots(); slot-- > 0;) {
        if (at(slot).state != State::kBroken) continue;
        set_suspect(slot, false);
        free(slot);
    }
    num_broken_ = 0;
}

void SlotIndex::link(SlotId slot) noexcept {
    Record& record = at(slot);
    record.older = newest_;
    record.newer = kNoSlot;
    (newest_ == kNoSlot ? oldest_ : at(newest_).newer) = slot;
    newest_ = slot;
}

void SlotIndex::unlink(SlotId slot) noexcept {
    const Record& record = at(slot);
    (record.older == kNoSlot ? oldest_ : at(record.older).newer) = record.newer;
    (record.newer == kNoSlot ? newest_ : at(record.newer).older) = record.older;
}

void SlotIndex::check_integrity() const {
    using detail::require_law;
    std::size_t free = 0;
    for (const std::vector<SlotId>& each : free_) free += each.size();
    std::size_t counts[5] = {};
    for (const Record& record : records_) {
        ++counts[static_cast<int>(record.state)];
        const bool is_read = record.pins > 0;
        const bool may_be =
            record.state == State::kStored || (record.state == State::kDoomed) == is_read;
        require_law(record.pins >= 0 && may_be, "only stored and doomed slots have readers");
    }
    require_law(counts[static_cast<int>(State::kFree)] == free, "free slots are listed once");
    require_law(counts[static_cast<int>(State::kStored)] == by_key_.size(),
                "each stored slot is found by a key");
    require_law(counts[static_cast<int>(State::kBroken)] == static_cast<std::size_t>(num_broken_),
                "broken slots are counted");
    std::size_t linked = 0;
    for (SlotId slot = oldest_; slot != kNoSlot; slot = at(slot).newer, ++linked) {
        require_law(at(slot).state == State::kStored && find(at(slot).key) == slot,
                    "slots in the order of use are stored, under their keys");
    }
    require_law(linked == by_key_.size(), "each stored slot has a place in the order of use");
}

}  // namespace kvcore
