// SPDX-License-Identifier: Apache-2.0
#include "tree/policies/ghosts.hpp"

namespace kvcore {

void Ghosts::make_room(std::uint32_t last) {
    buckets_.make_room(last, kNone);
    entries_.make_room(last, Entry{});  // from here on nothing can fail
    if (num_entries_ > last) return;
    entries_[last].chain = free_;
    free_ = last;
    num_entries_ = last + 1;
    if (num_entries_ == 2 * (mask_ + 1)) spread(2 * mask_ + 1);
}

// Each entry stays in its bucket or moves to a bucket that was not used before.
void Ghosts::spread(std::uint32_t mask) noexcept {
    mask_ = mask;
    for (std::uint32_t b = 0; b <= mask; ++b) buckets_[b] = kNone;
    for (const List& list : lists_) {
        for (std::uint32_t at = list.oldest; at != kNone; at = entries_[at].newer) link(at);
    }
}

void Ghosts::link(std::uint32_t at) noexcept {
    std::uint32_t& head = bucket(entries_[at].fingerprint);
    entries_[at].chain = head;
    head = at;
}

void Ghosts::add(bool list, std::uint64_t fingerprint) noexcept {
    take(fingerprint);  // the fingerprint may have been evicted before
    if (free_ == kNone) remove(lists_[lists_[1].size > lists_[0].size ? 1 : 0].oldest);
    const std::uint32_t at = free_;
    free_ = entries_[at].chain;
    List& in = lists_[list ? 1 : 0];
    entries_[at] = {fingerprint, kNone, in.newest, kNone, list};
    link(at);
    (in.newest == kNone ? in.oldest : entries_[in.newest].newer) = at;
    in.newest = at;
    ++in.size;
}

int Ghosts::take(std::uint64_t fingerprint) noexcept {
    for (std::uint32_t at = bucket(fingerprint); at != kNone; at = entries_[at].chain) {
        if (entries_[at].fingerprint != fingerprint) continue;
        const int list = entries_[at].list ? 1 : 0;
        remove(at);
        return list;
    }
    return -1;
}

void Ghosts::remove(std::uint32_t at) noexcept {
    const Entry entry = entries_[at];
    std::uint32_t* place = &bucket(entry.fingerprint);
    while (*place != at) place = &entries_[*place].chain;
    *place = entry.chain;
    List& list = lists_[entry.list ? 1 : 0];
    (entry.older == kNone ? list.oldest : entries_[entry.older].newer) = entry.newer;
    (entry.newer == kNone ? list.newest : entries_[entry.newer].older) = entry.older;
    --list.size;
    entries_[at].chain = free_;
    free_ = at;
}

}  // namespace kvcore
