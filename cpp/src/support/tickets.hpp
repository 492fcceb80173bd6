// SPDX-License-Identifier: Apache-2.0
// Tickets: the numbers by which a caller ends what a call gave out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "kvcore/page_moves.hpp"

namespace kvcore {

/// Numbers the copies that a call gives out: one ticket for all copies of a call, no ticket for a
/// call without copies.
class Tickets {
   public:
    /// The ticket of the transfers of a call; a new ticket for its first transfer.
    [[nodiscard]] std::uint64_t of(Transfers& transfers) noexcept {
        if (transfers.ticket == 0) transfers.ticket = next();
        return transfers.ticket;
    }
    [[nodiscard]] std::uint64_t next() noexcept { return ++last_; }

   private:
    std::uint64_t last_ = 0;
};

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
