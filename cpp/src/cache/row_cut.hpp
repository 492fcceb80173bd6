// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>

#include "cache/state.hpp"

namespace kvcore {

/// Where the committed part of a row ends once it has but so many columns, and what is stored of it
/// below. Got beforehand, since that may run out of memory; applied when nothing can fail any more.
///
/// Owns: both places, or none where the row is not cut there.
class RowCut {
   public:
    RowCut() noexcept = default;
    /// Throws std::bad_alloc.
    RowCut(ManagerState& state, SequenceHandle handle, const Sequence& sequence,
           std::int32_t columns)
        : columns_(columns),
          place_(sequence.pages.find_cut(state.home_of(sequence).tree, columns)) {
        if (place_) stored_ = state.flights.find_cut(handle, sequence.replica, columns);
    }

    void apply(ManagerState& state, SequenceHandle handle, Sequence& sequence) noexcept {
        if (!place_) return;
        state.flights.move_back(handle, columns_, std::move(stored_));
        sequence.pages.move_back(columns_, std::move(place_));
    }

   private:
    std::int32_t columns_ = 0;
    TreePin place_;
    StorePlace stored_;
};

}  // namespace kvcore
