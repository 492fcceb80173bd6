// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cache/admission.hpp"
#include "cache/state.hpp"
#include "transfer/departures.hpp"

namespace kvcore {

/// The second half of a reservation: `prepare` gets what it takes beside pages and may run out of
/// memory, having changed nothing that anybody sees; `evict` makes room for pages, and
/// `apply` does it and cannot fail.
///
/// Threads: none of its own. Cost: O(pages added and replaced).
class Reserver {
   public:
    Reserver(ManagerState& state, const Departures& departures) noexcept
        : state_(state), departures_(departures) {}

    /// Throws std::bad_alloc.
    [[nodiscard]] Reservation prepare(const Admission& admission, Sequence& sequence,
                                      const RequestView& request, Transfers* transfers);
    /// Between both, with write-back: what `apply` would evict is stored first where it has to be;
    /// true where that was given out. Then the reservation is dropped, and made again later.
    [[nodiscard]] bool spill(const Reservation& made, const Sequence& sequence,
                             Transfers& transfers);
    /// Called after `spill`: evicts the pages that `apply` takes beyond free ones. Throws
    /// IntegrityError where these pages or a state slot cannot be had although the reservation was
    /// admitted, and std::bad_alloc.
    void evict(const Reservation& made, const Sequence& sequence, SequenceHandle handle);
    /// True when the request now stands elsewhere. `row`: of the batch, for `transfers->moved`.
    /// The caller calls `evict` before, and `end_room` of the replica after.
    bool apply(Reservation& made, Sequence& sequence, RequestView& request, std::int64_t row,
               Transfers* transfers);
    /// So that `n` reservations more do not run out of room for their copies. Throws
    /// std::bad_alloc.
    void make_room_for_copies(std::size_t n, Transfers* transfers);

   private:
    ManagerState& state_;
    const Departures& departures_;
};

}  // namespace kvcore
