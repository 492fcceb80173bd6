// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>

#include "cache/cache_data.hpp"

namespace kvcore {

/// Prepares a cut of a row to `columns` columns: the new end of its committed part in the tree, and
/// of its stored part in the tiers. Preparing may run out of memory; applying cannot fail.
///
/// Owns: both places; they are empty if the cut removes no committed column.
class RowCut {
   public:
    RowCut() noexcept = default;
    /// Throws std::bad_alloc.
    RowCut(CacheData& cache, SequenceHandle handle, const Sequence& sequence, std::int32_t columns)
        : columns_(columns),
          place_(sequence.pages.find_cut(cache.home_of(sequence).tree, columns)) {
        if (place_) stored_ = cache.flights.find_cut(handle, sequence.replica, columns);
    }

    void apply(CacheData& cache, SequenceHandle handle, Sequence& sequence) noexcept {
        if (!place_) return;
        cache.flights.move_back(handle, columns_, std::move(stored_));
        sequence.pages.move_back(columns_, std::move(place_));
    }

   private:
    std::int32_t columns_ = 0;
    TreePin place_;
    StorePlace stored_;
};

}  // namespace kvcore
