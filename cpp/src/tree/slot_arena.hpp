// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "support/memory.hpp"

namespace kvcore {

/// Raw slots for objects of one type, numbered from 0, at addresses that never move.
///
/// The first blocks are small. A large cache gets blocks of one huge page, if the system has them:
/// its slots are accessed in random order, and page walks would take most of the access time.
template <class T>
class SlotArena {
   public:
    /// Returns the slot `index`, and allocates its block if needed. All slots below it have been
    /// requested before. Throws std::bad_alloc.
    [[nodiscard]] T* slot(std::size_t index) {
        const Place place = place_of(index);
        if (place.block == blocks_.size()) {
            const std::size_t bytes = place.block < kNumSmall ? kSmallBytes : kHugePage;
            blocks_.push_back(Block(static_cast<T*>(allocate_chunk(bytes))));
        }
        return blocks_[place.block].get() + place.within;
    }
    /// Returns a slot that was requested before.
    [[nodiscard]] T* at(std::size_t index) const noexcept {
        const Place place = place_of(index);
        return blocks_[place.block].get() + place.within;
    }

   private:
    using Block = std::unique_ptr<T, CFree>;  // raw memory, slots filled one by one

    static constexpr std::size_t kSmallBytes = std::size_t{24} << 10;
    static constexpr std::size_t kSmall = kSmallBytes / sizeof(T);
    static constexpr std::size_t kNumSmall = 64;
    static constexpr std::size_t kLarge = kHugePage / sizeof(T);

    struct Place {
        std::size_t block;
        std::size_t within;
    };

    [[nodiscard]] static Place place_of(std::size_t index) noexcept {
        if (index < kSmall * kNumSmall) return {index / kSmall, index % kSmall};
        const std::size_t beyond = index - kSmall * kNumSmall;
        return {kNumSmall + beyond / kLarge, beyond % kLarge};
    }

    std::vector<Block> blocks_;
};

}  // namespace kvcore
