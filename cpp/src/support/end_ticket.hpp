// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace kvcore {

/// The ticket of an entry that `remove_ended` removes.
constexpr std::uint64_t kEnded = std::numeric_limits<std::uint64_t>::max();

template <class Entry>
void remove_ended(std::vector<Entry>& entries) noexcept {
    const auto has_ended = [](const Entry& entry) { return entry.ticket == kEnded; };
    entries.erase(std::remove_if(entries.begin(), entries.end(), has_ended), entries.end());
}

/// Ends the entries of a ticket in order: calls end(entry), and removes the entry if it returns
/// true; otherwise the entry stays without a ticket. Returns false if no entry has the ticket.
/// Ticket 0 is no ticket. O(entries).
template <class Entry, class End>
bool end_ticket(std::vector<Entry>& entries, std::uint64_t ticket, const End& end) noexcept {
    if (ticket == 0) return false;
    bool is_known = false;
    for (Entry& entry : entries) {
        if (entry.ticket != ticket) continue;
        is_known = true;
        entry.ticket = end(entry) ? kEnded : 0;
    }
    if (is_known) remove_ended(entries);
    return is_known;
}

}  // namespace kvcore
