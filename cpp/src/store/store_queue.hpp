// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "keys/path_keys.hpp"
#include "kvcore/cache_config.hpp"
#include "kvcore/store_moves.hpp"
#include "level/level.hpp"
#include "level/refs.hpp"

namespace kvcore {

/// The records that arrived in the host tiers and wait to be written to the lower stores, in order
/// of arrival.
///
/// Owns: a hold on every record that waits or is being written, so that it is neither evicted nor
/// rewritten.
/// Invariant: a record that `take` gave out keeps its pages until its ticket is finished, even if
/// the tier forgets it meanwhile.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: O(1) per arrival, O(records) to take and finish; the key of a record is computed once,
/// when the record is taken.
class StoreQueue {
   public:
    StoreQueue(const CacheConfig& config, const Grouping& grouping,
               const std::vector<std::unique_ptr<Replica>>& replicas);

    /// Queues records `first` .. end.depth - 1 on the path to `end`, which have arrived or got more
    /// parts. Without memory they are not written.
    void arrived(std::int32_t replica, TreePosition end, std::int32_t first) noexcept;
    /// Gives out up to `most` of the records that have waited longest, all of one replica. Returns
    /// false if no record waits. Changes nothing if it throws std::bad_alloc.
    [[nodiscard]] bool take(std::int64_t most, std::uint64_t ticket, StoreMoves& out);
    /// Ends the holds of a ticket. Returns false if the ticket has no holds.
    [[nodiscard]] bool finish(std::uint64_t ticket) noexcept;
    /// Number of records that wait or are being written.
    [[nodiscard]] std::int64_t num_waiting() const noexcept { return num_waiting_; }
    /// Number of records that were never written: the host tier forgot them while they waited, or
    /// there was no memory to queue them.
    [[nodiscard]] std::int64_t num_dropped() const noexcept { return num_dropped_; }

    /// The key of the last record on the path to `at`, or the root key of the namespace at depth 0.
    /// Throws std::bad_alloc.
    [[nodiscard]] PageKey key_at(Replica& replica, std::string_view name_space,
                                 TreePosition at) const;
    [[nodiscard]] const PathKeys& paths() const noexcept { return paths_; }

    /// Drops waiting records whose places ended because the tier has forgotten them.
    void drop_forgotten() noexcept;

    /// For integrity checks of the tier: the first calls visit(record) for each record of a replica
    /// that is held by a reference, the second for each record whose windows are read.
    template <class Visit>
    void for_each_reference(std::int32_t replica, const Visit& visit) const {
        for (const Taken& each : taken_) {
            if (each.replica != replica) continue;
            const PrefixRef::Pages held = each.source.references();
            std::for_each(held.ids, held.ids + held.n, visit);
        }
    }
    template <class Visit>
    void for_each_taken(std::int32_t replica, const Visit& visit) const {
        for (const Taken& each : taken_) {
            if (each.replica != replica) continue;
            std::for_each(each.records.begin(), each.records.end(), visit);
        }
    }

   private:
    struct Waiting {
        std::int32_t replica;
        std::int32_t first;
        PrefixRef end;

        [[nodiscard]] std::int32_t size() const noexcept { return end.depth() - first; }
    };
    struct Taken {
        std::uint64_t ticket;
        std::int32_t replica;
        std::vector<BlockId> records;
        PrefixRef source;
        std::vector<StateHold> states;
    };

    [[nodiscard]] Replica& replica_of(std::int32_t replica) const noexcept {
        return *replicas_[static_cast<std::size_t>(replica)];
    }
    void ensure_keys(Level& host, TreePosition at) const;
    [[nodiscard]] Taken prepare(const Waiting& waiting, std::int32_t depth,
                                std::uint64_t ticket) const;
    void give_out(Taken& taken, StoreMoves& out) const noexcept;
    void end(Taken& taken) noexcept;

    const Grouping& grouping_;
    const std::vector<std::unique_ptr<Replica>>& replicas_;
    PathKeys paths_;
    std::deque<Waiting> waiting_;
    std::vector<Taken> taken_;
    std::int64_t num_waiting_ = 0;
    std::int64_t num_dropped_ = 0;
};

}  // namespace kvcore
