// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cache/state.hpp"

namespace kvcore {

/// The life of a claim: it begins, begins again, is cut, and ends.
///
/// Threads: none of its own. Cost: O(1), O(pages not committed) to give them back.
class Claims {
   public:
    explicit Claims(ManagerState& state) noexcept : state_(state) {}

    /// The verbs of CacheManager. `release` returns whether somebody may wait for the sequence, and
    /// tells the history of its request.
    [[nodiscard]] SequenceHandle claim(std::int32_t replica);
    [[nodiscard]] bool release(SequenceHandle handle, RequestHistory* history);
    void begin_again(SequenceHandle handle);
    void truncate(SequenceHandle handle, std::int64_t n, Transfers* transfers);
    [[nodiscard]] std::int64_t leave_windows(SequenceHandle handle, std::int64_t n);

    /// The same of a sequence for which nothing is under way.
    void begin_again(Sequence& sequence, SequenceHandle handle) noexcept;

   private:
    [[nodiscard]] StateHold find_state(SequenceHandle handle, const Sequence& sequence,
                                       std::int64_t n) const;
    void give_back_slot(Replica& home, const Sequence& sequence, SequenceHandle handle) noexcept;
    void require_window(SequenceHandle handle, const Sequence& sequence, std::int64_t n) const;

    ManagerState& state_;
};

}  // namespace kvcore
