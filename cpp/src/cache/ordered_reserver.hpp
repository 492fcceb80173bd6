// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cache/admitter.hpp"
#include "cache/held_hit.hpp"
#include "cache/reserver.hpp"
#include "cache/validate_requests.hpp"

namespace kvcore {

/// Reserves one request after the other: finds what the cache has of it, then allocates the rest.
///
/// Owns: nothing. Threads: none of its own. Cost: that of the halves.
class OrderedReserver {
   public:
    OrderedReserver(ManagerState& state, BatchRows& rows, const Admitter& admitter,
                    Reserver& reserver) noexcept
        : state_(state), rows_(rows), admitter_(admitter), reserver_(reserver) {}

    /// The verbs of CacheManager.
    [[nodiscard]] BatchReserve reserve(const RequestBatch& batch, std::int64_t num_steps,
                                       Transfers* transfers, const ReserveOptions& options = {});
    [[nodiscard]] ReserveStatus begin_at(RequestView& request, std::int64_t n,
                                         Transfers* transfers);
    [[nodiscard]] ReservePlan plan(const RequestView& request, const Asked& asked) const;
    [[nodiscard]] ReservePlan plan(std::int32_t replica, const RequestView& request,
                                   const Asked& asked) const;
    [[nodiscard]] HeldHit match(const RequestView& request) const;
    [[nodiscard]] ReserveStatus allocate(HeldHit& hit, RequestView& request, std::int64_t n,
                                         Transfers* transfers);

   private:
    [[nodiscard]] ReserveStatus take(const Admission& admission, Sequence& sequence,
                                     RequestView& request, std::int64_t row, Transfers* transfers);
    [[nodiscard]] ReserveStatus reserve_row(RequestView& request, const Asked& asked,
                                            std::int64_t row, Transfers* transfers);
    [[nodiscard]] bool can_ever_fit(const Sequence& sequence, const RequestView& request,
                                    const Asked& asked) const;
    [[nodiscard]] ReservePlan plan(const Sequence& sequence, const RequestView& request,
                                   const Asked& asked) const;

    void require_one_step(const RequestBatch& batch, std::int64_t num_steps) const;

    ManagerState& state_;
    BatchRows& rows_;
    const Admitter& admitter_;
    Reserver& reserver_;
};

}  // namespace kvcore
