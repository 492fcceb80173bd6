// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "manager/state.hpp"

namespace kvcore {

/// Makes sequences with a common past.
///
/// Threads: none of its own. Cost: O(children * (pages + tokens compared)).
class Forker {
   public:
    explicit Forker(ManagerState& state) noexcept : state_(state) {}

    /// The verb of CacheManager.
    void fork(const RequestView& parent, const RequestBatch& children);

   private:
    class Brood;

    void require_room(std::int32_t replica, std::int64_t num_children) const;

    ManagerState& state_;
};

}  // namespace kvcore
