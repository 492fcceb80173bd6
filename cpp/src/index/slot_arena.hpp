// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "support/memory.hpp"

namespace kvcore {

/// Raw slots for objects of one type, numbered from 0, at addresses that never move.
///
/// Small blocks first; a large cache gets blocks of one huge page, where the system has them: there
/// slots are met in no order, and most of such a meeting would be the page walk.
template <class T>
class SlotArena {
   public:
    /// The slot `index`; those below it have been asked for before.
    [[nodiscard]] T* slot(std::size_t index) {
        const bool is_small = index < kSmall * kNumSmall;
        const std::size_t slots = is_small ? kSmall : kLarge;
        const std::size_t within = is_small ? index : index - kSmall * kNumSmall;
        const std::size_t block = within / slots + (is_small ? 0 : kNumSmall);
        if (block == blocks_.size()) {
            const std::size_t bytes = is_small ? kSmallBytes : kHugePage;
            blocks_.push_back(Block(static_cast<T*>(allocate_chunk(bytes))));
        }
        return blocks_[block].get() + within % slots;
    }

   private:
    using Block = std::unique_ptr<T, CFree>;  // raw memory, slots filled one by one

    static constexpr std::size_t kSmallBytes = std::size_t{24} << 10;
    static constexpr std::size_t kSmall = kSmallBytes / sizeof(T);
    static constexpr std::size_t kNumSmall = 64;
    static constexpr std::size_t kLarge = kHugePage / sizeof(T);

    std::vector<Block> blocks_;
};

}  // namespace kvcore
