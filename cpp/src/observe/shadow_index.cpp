// SPDX-License-Identifier: Apache-2.0
#include "observe/shadow_index.hpp"

#include <algorithm>
#include <numeric>

#include "kvcore/errors.hpp"

namespace kvcore {
namespace {

std::size_t power_of_two(std::size_t least) noexcept {
    std::size_t size = 1;
    while (size < least) size *= 2;
    return size;
}

}  // namespace

ShadowIndex::ShadowIndex(std::int64_t most_pages)
    : entries_(static_cast<std::size_t>(most_pages)),
      table_(power_of_two(2 * entries_.size()), kNone),
      slots_(power_of_two(2 * entries_.size()) + 1, kNone),
      sums_(slots_.size()) {
    free_.reserve(entries_.size());
    for (std::size_t i = entries_.size(); i-- > 0;) free_.push_back(static_cast<Entry>(i));
}

// ---- the table ----------------------------------------------------------------------------------

ShadowIndex::Entry ShadowIndex::find(std::uint64_t hash) const noexcept {
    for (std::size_t at = home_of(hash); table_[at] != kNone; at = (at + 1) & (table_.size() - 1)) {
        if (entries_[table_[at]].hash == hash) return table_[at];
    }
    return kNone;
}

void ShadowIndex::link(Entry entry) noexcept {
    std::size_t at = home_of(entries_[entry].hash);
    while (table_[at] != kNone) at = (at + 1) & (table_.size() - 1);
    table_[at] = entry;
    entries_[entry].is_found = true;
}

// Moves later entries back into the gap, so that every entry is found from its home.
void ShadowIndex::unlink(Entry entry) noexcept {
    const std::size_t mask = table_.size() - 1;
    std::size_t gap = home_of(entries_[entry].hash);
    while (table_[gap] != entry) gap = (gap + 1) & mask;
    for (std::size_t at = (gap + 1) & mask; table_[at] != kNone; at = (at + 1) & mask) {
        const std::size_t home = home_of(entries_[table_[at]].hash);
        if (((at - home) & mask) < ((at - gap) & mask)) continue;
        table_[gap] = table_[at];
        gap = at;
    }
    table_[gap] = kNone;
    entries_[entry].is_found = false;
}

// ---- the order ----------------------------------------------------------------------------------

void ShadowIndex::add_to_sums(std::uint32_t slot, std::int32_t by) noexcept {
    for (std::size_t i = slot; i < sums_.size(); i += i & (~i + 1)) sums_[i] += by;
}

std::int64_t ShadowIndex::count_up_to(std::uint32_t slot) const noexcept {
    std::int64_t count = 0;
    for (std::size_t i = slot; i > 0; i &= i - 1) count += sums_[i];
    return count;
}

std::uint32_t ShadowIndex::oldest_slot() const noexcept {
    std::size_t at = 0;
    for (std::size_t step = sums_.size() - 1; step > 0; step /= 2) {
        if (at + step < sums_.size() && sums_[at + step] == 0) at += step;
    }
    return static_cast<std::uint32_t>(at + 1);
}

void ShadowIndex::close_gaps() noexcept {
    next_slot_ = 1;
    for (std::size_t from = 1; from < slots_.size(); ++from) {
        const Entry entry = slots_[from];
        if (entry == kNone) continue;
        slots_[from] = kNone;
        slots_[next_slot_] = entry;
        entries_[entry].slot = next_slot_++;
    }
    for (std::size_t i = 1; i < sums_.size(); ++i) sums_[i] = slots_[i] == kNone ? 0 : 1;
    for (std::size_t i = 1; i < sums_.size(); ++i) {
        const std::size_t parent = i + (i & (~i + 1));
        if (parent < sums_.size()) sums_[parent] += sums_[i];
    }
}

void ShadowIndex::place_first(Entry entry) noexcept {
    if (next_slot_ == slots_.size()) close_gaps();
    entries_[entry].slot = next_slot_;
    slots_[next_slot_] = entry;
    add_to_sums(next_slot_++, 1);
    ++num_idle_;
}

void ShadowIndex::take_place(Entry entry) noexcept {
    std::uint32_t& slot = entries_[entry].slot;
    slots_[slot] = kNone;
    add_to_sums(slot, -1);
    slot = 0;
    --num_idle_;
}

// ---- the verbs ----------------------------------------------------------------------------------

std::int64_t ShadowIndex::distance(Entry entry) const noexcept {
    const Page& page = entries_[entry];
    return page.holders > 0 ? 0 : num_held_ + num_idle_ - count_up_to(page.slot);
}

ShadowIndex::Entry ShadowIndex::add(std::uint64_t hash) noexcept {
    if (free_.empty()) {
        if (num_idle_ == 0) return kNone;
        remove(slots_[oldest_slot()]);
    }
    const Entry entry = free_.back();
    free_.pop_back();
    entries_[entry].hash = hash;
    entries_[entry].distance_before = kNew;
    link(entry);
    place_first(entry);
    return entry;
}

void ShadowIndex::note_distance(std::uint64_t hash) noexcept {
    const Entry known = find(hash);
    if (known == kNone) return;
    entries_[known].distance_before = static_cast<std::int32_t>(distance(known));
    if (!is_held(known)) touch(known);
}

ShadowIndex::Entry ShadowIndex::enter(std::uint64_t hash) noexcept {
    const Entry known = find(hash);
    if (known == kNone) return add(hash);
    if (!is_held(known)) touch(known);
    return known;
}

void ShadowIndex::touch(Entry entry) noexcept {
    take_place(entry);
    place_first(entry);
}

void ShadowIndex::hold(Entry entry) noexcept {
    if (entries_[entry].holders++ > 0) return;
    take_place(entry);
    ++num_held_;
}

bool ShadowIndex::release(Entry entry) noexcept {
    Page& page = entries_[entry];
    if (--page.holders > 0) return false;
    if (!page.is_found) {
        free_.push_back(entry);
        return false;
    }
    --num_held_;
    place_first(entry);
    return true;
}

void ShadowIndex::remove(Entry entry) noexcept {
    unlink(entry);
    if (entries_[entry].holders > 0) {
        --num_held_;
        return;
    }
    take_place(entry);
    free_.push_back(entry);
}

void ShadowIndex::clear() noexcept {
    for (Entry entry = 0; entry < entries_.size(); ++entry) {
        if (entries_[entry].is_found) remove(entry);
    }
}

std::int64_t ShadowIndex::count_holders() const noexcept {
    return std::accumulate(entries_.begin(), entries_.end(), std::int64_t{0},
                           [](std::int64_t sum, const Page& page) { return sum + page.holders; });
}

void ShadowIndex::check_integrity() const {
    std::int64_t idle = 0;
    std::int64_t held = 0;
    std::int64_t unfindable = 0;
    for (Entry entry = 0; entry < entries_.size(); ++entry) {
        const Page& page = entries_[entry];
        idle += page.slot > 0 ? 1 : 0;
        held += page.is_found && page.holders > 0 ? 1 : 0;
        unfindable += !page.is_found && page.holders > 0 ? 1 : 0;
        const bool has_place = page.is_found && page.holders == 0;
        detail::require_law((page.slot > 0) == has_place,
                            "shadow index: a page has a place or a holder");
        detail::require_law(page.slot == 0 || slots_[page.slot] == entry,
                            "shadow index: a place has its page");
        detail::require_law(!page.is_found || find(page.hash) == entry,
                            "shadow index: a page is found by its hash");
    }
    const auto free = static_cast<std::int64_t>(free_.size());
    detail::require_law(idle == num_idle_ && held == num_held_,
                        "shadow index: the numbers of pages are right");
    detail::require_law(count_up_to(static_cast<std::uint32_t>(sums_.size() - 1)) == idle,
                        "shadow index: the sums count the pages in order");
    detail::require_law(
        idle + held + unfindable + free == static_cast<std::int64_t>(entries_.size()),
        "shadow index: each entry is free or has a page");
}

}  // namespace kvcore
