// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kvcore/page_moves.hpp"

namespace kvcore {

/// Numbers what a call gives out to be copied: one ticket for all of it, none where it is nothing.
class Tickets {
   public:
    /// The ticket of a call's transfers, a new one for its first.
    [[nodiscard]] std::uint64_t of(Transfers& transfers) noexcept {
        if (transfers.ticket == 0) transfers.ticket = next();
        return transfers.ticket;
    }
    [[nodiscard]] std::uint64_t next() noexcept { return ++last_; }

   private:
    std::uint64_t last_ = 0;
};

}  // namespace kvcore
