// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cache/cache_data.hpp"

namespace kvcore {

/// Makes sequences that share a written prefix.
///
/// Threads: not thread-safe. Cost: O(children * (pages + tokens compared)).
class Forker {
   public:
    explicit Forker(CacheData& state) noexcept : state_(state) {}

    /// The verb of CacheManager.
    void fork(const RequestView& parent, const RequestBatch& children, Transfers* transfers);

   private:
    class Brood;

    [[nodiscard]] StateHold find_state(const RequestView& parent, const Sequence& source,
                                       std::int64_t written, std::int64_t num_children) const;
    void copy_state(const StateHold& source, SequenceHandle parent, RequestView& child,
                    Transfers* transfers);
    void require_room(std::int32_t replica, std::int64_t num_children) const;

    CacheData& state_;
};

}  // namespace kvcore
