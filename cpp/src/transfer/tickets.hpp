// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

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

}  // namespace kvcore
