// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "kvcore/request.hpp"
#include "layers/residency.hpp"
#include "level/level.hpp"
#include "tree/pins.hpp"

namespace kvcore {

/// Prefixes that callers keep, by handle.
///
/// Owns: for each prefix a pin, and with groups a hold on the pages that its windows read and on
/// the checkpoint at its end. Invariant: a handle names its prefix until `unpin`, and never another
/// one: a seat whose generations are used up is not taken again. Threads: not thread-safe;
/// CacheManager locks around it. Cost: O(1), and the match to pin.
class Pins {
   public:
    /// Keeps the cached whole pages of a prefix of `tokens` [n]. Throws std::bad_alloc.
    [[nodiscard]] PinHandle pin(Replica& home, std::string_view name_space, const TokenId* tokens,
                                std::int64_t n);
    /// Releases the pages. Throws InvalidHandleError for a handle unpinned before.
    void unpin(PinHandle pin);
    /// The end of a pinned prefix; nullptr if no page of it was cached.
    [[nodiscard]] const TreeNode* node_of(PinHandle pin) const noexcept {
        return seats_[pin.index].place.node();
    }

   private:
    struct Seat {
        TreePin place;
        WindowHold windows;
        StateHold checkpoint;
        std::uint32_t generation = 1;
    };

    std::vector<Seat> seats_;
    std::vector<std::uint32_t> free_;
};

}  // namespace kvcore
