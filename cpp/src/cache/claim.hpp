// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cache/cache_data.hpp"

namespace kvcore {

/// Claims sequences, restarts them, truncates them and releases them.
///
/// Threads: not thread-safe. Cost: O(1), and O(uncommitted pages) to give these back.
class Claims {
   public:
    explicit Claims(CacheData& state) noexcept : state_(state) {}

    /// The verbs of CacheManager. `release` returns true if a thread may wait for the sequence, and
    /// stores the history of its request.
    [[nodiscard]] SequenceHandle claim(std::int32_t replica);
    [[nodiscard]] bool release(SequenceHandle handle, RequestHistory* history);
    void begin_again(SequenceHandle handle);
    void truncate(SequenceHandle handle, std::int64_t n, Transfers* transfers);
    [[nodiscard]] std::int64_t leave_windows(SequenceHandle handle, std::int64_t n);

    /// Begins a sequence again that has no transfers under way.
    void begin_again(Sequence& sequence, SequenceHandle handle) noexcept;

   private:
    [[nodiscard]] StateHold find_state(SequenceHandle handle, const Sequence& sequence,
                                       std::int64_t n) const;
    void give_back_slot(Replica& home, const Sequence& sequence, SequenceHandle handle) noexcept;
    void require_window(SequenceHandle handle, const Sequence& sequence, std::int64_t n) const;

    CacheData& state_;
};

}  // namespace kvcore
