// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

#include "kvcore/types.hpp"
#include "pages/page_owners.hpp"

namespace kvcore {

/// The owner of each request; 0 for a request without a tenant.
///
/// Owns: an owner per entry of the SequenceTable, up to the last entry with a tenant. Threads: no
/// locks of its own. Cost: O(1).
class SequenceTenants {
   public:
    [[nodiscard]] Owner of(SequenceHandle sequence) const noexcept {
        return sequence.index < owners_.size() ? owners_[sequence.index] : Owner{0};
    }
    /// Makes room, so that `set` of the sequence cannot fail. Throws std::bad_alloc.
    void make_room(SequenceHandle sequence) {
        if (sequence.index >= owners_.size()) owners_.resize(std::size_t{sequence.index} + 1);
    }
    void set(SequenceHandle sequence, Owner owner) noexcept {
        if (sequence.index < owners_.size()) owners_[sequence.index] = owner;
    }

   private:
    std::vector<Owner> owners_;
};

}  // namespace kvcore
