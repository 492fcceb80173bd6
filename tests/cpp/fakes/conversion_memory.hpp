// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "oracle/elements.hpp"
#include "support/check.hpp"
#include "support/random.hpp"

/// Random elements for tests of conversions, and guarded memory for their results.
namespace conversion {

using Bytes = std::vector<std::byte>;

template <int kFirst, int kNum>
constexpr std::array<kvcore::DType, kNum> dtypes_from() {
    std::array<kvcore::DType, kNum> found{};
    for (int i = 0; i < kNum; ++i) found[std::size_t(i)] = static_cast<kvcore::DType>(kFirst + i);
    return found;
}

constexpr auto kWide = dtypes_from<0, kvcore::kNumWide>();
constexpr auto kNarrow = dtypes_from<kvcore::kNumWide, kvcore::kNumNarrow>();

/// Fill in moderate numbers, with some infinities, NaN and subnormals.
inline void fill_elements(Random& random, kvcore::DType dtype, std::byte* to, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
        std::byte* at = to + i * kvcore::item_size(dtype);
        if (random.chance(5)) {
            for (std::int64_t j = 0; j < kvcore::item_size(dtype); ++j) {
                at[j] = static_cast<std::byte>(random.next());
            }
        } else {
            const auto number = static_cast<float>(random.between(-100'000, 100'000));
            write_element(dtype, at, number / 7777.0F);
        }
    }
}

/// Memory that starts `shift` bytes after a multiple of 64, with a guard on both sides.
class Guarded {
   public:
    Guarded(std::int64_t n, std::int64_t shift)
        : size_(n), bytes_(static_cast<std::size_t>(n + 256)) {
        std::fill(bytes_.begin(), bytes_.end(), kGuard);
        const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
        first_ = 64 + static_cast<std::int64_t>((64 - address % 64) % 64) + shift;
    }
    [[nodiscard]] std::byte* data() { return bytes_.data() + first_; }
    [[nodiscard]] Bytes taken() const {
        const auto first = bytes_.begin() + first_;
        return {first, first + size_};
    }
    /// Check that no byte outside was written.
    void check() const {
        for (std::int64_t i = 0; i < static_cast<std::int64_t>(bytes_.size()); ++i) {
            if (i < first_ || i >= first_ + size_) {
                CHECK(bytes_[static_cast<std::size_t>(i)] == kGuard);
            }
        }
    }

   private:
    static constexpr std::byte kGuard{0xa5};
    std::int64_t size_;
    std::int64_t first_ = 0;
    Bytes bytes_;
};

}  // namespace conversion
