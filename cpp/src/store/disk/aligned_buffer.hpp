// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "support/memory.hpp"

namespace kvcore {

/// Reads and writes that bypass the page cache begin and end at multiples of this size, in memory
/// and in files.
constexpr std::int64_t kDiskBlock = 4096;

[[nodiscard]] constexpr std::int64_t whole_blocks(std::int64_t bytes) noexcept {
    return (bytes + kDiskBlock - 1) / kDiskBlock * kDiskBlock;
}

[[nodiscard]] inline bool is_block_aligned(const void* data, std::int64_t bytes) noexcept {
    return reinterpret_cast<std::uintptr_t>(data) % kDiskBlock == 0 && bytes % kDiskBlock == 0;
}

/// Zeroed memory of whole blocks.
class AlignedBuffer {
   public:
    explicit AlignedBuffer(std::int64_t bytes)
        : memory_(static_cast<std::byte*>(
              std::aligned_alloc(kDiskBlock, static_cast<std::size_t>(whole_blocks(bytes))))) {
        if (memory_ == nullptr) throw std::bad_alloc();
        std::fill_n(memory_.get(), whole_blocks(bytes), std::byte{0});
    }
    [[nodiscard]] std::byte* data() const noexcept { return memory_.get(); }

   private:
    std::unique_ptr<std::byte, CFree> memory_;
};

}  // namespace kvcore
