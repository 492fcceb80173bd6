// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvcore {

/// Workers that have all pages so far, as words that are not 0.
class AliveWorkers {
   public:
    static constexpr std::size_t kMostWords = 64;

    [[nodiscard]] bool is_empty() const noexcept { return size_ == 0; }
    void add(std::size_t word, std::uint64_t bits) noexcept {
        if (bits == 0) return;
        words_[size_] = word;
        bits_[size_++] = bits;
    }
    /// Removes the workers that lack a page, and notes the number of pages before it for them.
    /// found(word) returns the workers that have the page.
    template <class Found>
    void keep(const Found& found, std::int32_t depth, std::int32_t* held) noexcept {
        std::size_t kept = 0;
        for (std::size_t i = 0; i < size_; ++i) {
            const std::uint64_t there = bits_[i] & found(words_[i]);
            note(words_[i], bits_[i] & ~there, depth, held);
            if (there == 0) continue;
            words_[kept] = words_[i];
            bits_[kept++] = there;
        }
        size_ = kept;
    }
    void end(std::int32_t depth, std::int32_t* held) noexcept {
        for (std::size_t i = 0; i < size_; ++i) note(words_[i], bits_[i], depth, held);
    }

   private:
    static void note(std::size_t word, std::uint64_t bits, std::int32_t depth,
                     std::int32_t* held) noexcept {
        for (std::size_t worker = 64 * word; bits != 0; bits >>= 1U, ++worker) {
            if ((bits & 1U) != 0) held[worker] = depth;
        }
    }

    std::size_t size_ = 0;
    std::array<std::size_t, kMostWords> words_{};
    std::array<std::uint64_t, kMostWords> bits_{};
};

}  // namespace kvcore
