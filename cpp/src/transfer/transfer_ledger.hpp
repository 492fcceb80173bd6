// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "request/sequence.hpp"
#include "store/store_queue.hpp"
#include "support/tickets.hpp"
#include "transfer/pool_copies.hpp"
#include "transfer/state_copies.hpp"
#include "transfer/tier_flights.hpp"

namespace kvcore {

/// All transfers of a cache that are under way, owed or listed: copies within the pool, copies of
/// states, loads and stores of the host tier, fills from the lower stores and writes to them. What
/// concerns all kinds is one method here. What begins a transfer is a method of its kind.
///
/// Owns: the transfers of each kind, with the refs that keep their pages.
/// Invariant: a ticket names the transfers that one call gave out. The `num_pending` of a sequence
/// counts the transfers that block it.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: O(transfers) per method; nothing for calls that give out no transfers.
struct TransferLedger {
    TransferLedger(const CacheConfig& config, const Grouping& grouping,
                   const std::vector<std::unique_ptr<Replica>>& all, SequenceTable& table,
                   const WindowRows& windows)
        : replicas(all),
          sequences(table),
          copies(tickets, table, grouping, all),
          copy_list(table, grouping, all),
          state_copies(tickets, table, all),
          store_queue(config, grouping, all),
          flights(config, grouping, all, tickets, table, windows, store_queue) {}

    /// Ends the transfers of a ticket; `done`: their bytes have arrived. Calls
    /// `begin_again(sequence, handle)` for each sequence whose loaded pages did not arrive. Returns
    /// false if the ticket has no transfers, or names a fill or writes: see StoreQueue::finish and
    /// TierFlights::finish_fill.
    template <class BeginAgain>
    [[nodiscard]] bool finish(std::uint64_t ticket, bool done,
                              const BeginAgain& begin_again) noexcept {
        const bool has_copies = copies.finish(ticket, done);
        const bool has_states = state_copies.finish(ticket, done);
        const bool has_flights = flights.finish(ticket, done, begin_again);
        return has_copies || has_states || has_flights;
    }
    /// Gives out the copies that are owed to a sequence. Throws std::bad_alloc.
    [[nodiscard]] OwedStatus take_owed(SequenceHandle handle, Transfers& transfers);
    /// Forgets the copies that are owed to a sequence.
    void drop_owed(SequenceHandle handle) noexcept;
    /// Returns true if transfers that block a sequence are in flight.
    [[nodiscard]] bool is_under_way(SequenceHandle handle) const noexcept;
    /// Returns true if a thread has to wait for a sequence: transfers that block it are in flight,
    /// or transfers that make room in its replica. Throws std::logic_error if the calling thread
    /// itself has to finish them.
    [[nodiscard]] bool must_wait(SequenceHandle handle) const;

    /// Call this after the trees of a replica forgot pages. Transfers that continue or store these
    /// pages are cancelled: their pages are given back when they end. A sequence commits no pages
    /// from the first page on that a transfer brings from these pages.
    void drop_forgotten(Replica& home) noexcept;

    /// Calls visit(ticket, owner, handle) for each transfer and each sequence that it blocks. An
    /// owed transfer has ticket 0; `handle` may name no sequence any more.
    template <class Visit>
    void for_each_blocked(const Visit& visit) const {
        for (const OwedCopies::Copy& copy : copies.all()) {
            visit(copy.ticket, copy.owner, copy.copy.sequence);
        }
        for (const StateCopies::Copy& copy : state_copies.all()) {
            visit(copy.ticket, copy.owner, copy.from);
            visit(copy.ticket, copy.owner, copy.into);
        }
        for (const TierFlight& flight : flights.all()) {
            if (flight.holds_up()) visit(flight.ticket, flight.owner, flight.sequence);
        }
    }

    const std::vector<std::unique_ptr<Replica>>& replicas;
    SequenceTable& sequences;
    Tickets tickets;
    OwedCopies copies;
    CopyList copy_list;
    StateCopies state_copies;
    StoreQueue store_queue;
    TierFlights flights;
};

}  // namespace kvcore
