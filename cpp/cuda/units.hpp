// SPDX-License-Identifier: Apache-2.0
// The widest units that addresses and strides allow lanes to move, and the arithmetic by which
// lanes find their units.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "data/high_product.hpp"
#include "kvcore/dtype.hpp"

// Small arrays stay in registers only if the loops over them are unrolled. Loops that rarely run
// twice are kept: each copy of the body would be more instructions to load.
#if defined(__CUDA_ARCH__)
#define KVCORE_UNROLL _Pragma("unroll")
#define KVCORE_KEEP_LOOP _Pragma("unroll 1")
#else
#define KVCORE_UNROLL
#define KVCORE_KEEP_LOOP
#endif

namespace kvcore::cuda {

/// 16 bytes that a lane loads and stores in one instruction.
struct alignas(16) Unit16 {
    std::uint32_t words[4];
};

/// Returns the largest power of two up to 16 that divides every argument: addresses, strides,
/// sizes.
[[nodiscard]] inline std::int64_t alignment_of(const void* pointer) noexcept {
    const auto bits = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer) % 16U);
    return bits == 0 ? 16 : bits & -bits;
}
[[nodiscard]] constexpr std::int64_t alignment_of(std::int64_t bytes) noexcept {
    return bytes % 16 == 0 ? 16 : bytes & -bytes;
}
template <class First, class Second, class... Rest>
[[nodiscard]] std::int64_t alignment_of(First first, Second second, Rest... rest) noexcept {
    const std::int64_t a = alignment_of(first);
    const std::int64_t b = alignment_of(second, rest...);
    return a < b ? a : b;
}

/// Calls function(unit) with a unit of `bytes` bytes: 1, 2, 4, 8 or 16.
template <class Function>
auto with_unit(std::int64_t bytes, Function&& function) {
    switch (bytes) {
        case 16:
            return function(Unit16{});
        case 8:
            return function(std::uint64_t{});
        case 4:
            return function(std::uint32_t{});
        case 2:
            return function(std::uint16_t{});
        default:
            return function(std::uint8_t{});
    }
}

/// Load and store units. Addresses are multiples of the unit's size, in a device's memory or in
/// pinned host memory.
template <class Unit>
[[nodiscard]] KVCORE_HOST_DEVICE inline Unit load_unit(const std::byte* at) noexcept {
#if defined(__CUDA_ARCH__)
    __builtin_assume(__isGlobal(at));  // saves a check of the kind of memory
#endif
    return *reinterpret_cast<const Unit*>(at);
}
template <class Unit>
KVCORE_HOST_DEVICE inline void store_unit(std::byte* at, Unit unit) noexcept {
#if defined(__CUDA_ARCH__)
    __builtin_assume(__isGlobal(at));
#endif
    *reinterpret_cast<Unit*>(at) = unit;
}

/// Divides by a number that is known only when a kernel starts, with a multiplication and a shift.
/// Dividends are at least 0 and below 2^63; the divisor is at least 1.
///
/// With 2^(shift - 1) < divisor <= 2^shift, the multiplier is 2^(63 + shift) / divisor, rounded up.
/// The rounding adds less than 1 / divisor to a quotient, so the whole part is exact. In the same
/// way, the multiplier 2^(31 + shift) / divisor works for dividends below 2^31, with a quarter of
/// the instructions.
class Divider {
   public:
    static constexpr std::int64_t kSmall = std::int64_t{1} << 31;

    explicit Divider(std::int64_t divisor) noexcept : divisor_(divisor) {
        __extension__ using Wide = unsigned __int128;
        const auto by = static_cast<std::uint64_t>(divisor);
        while (shift_ < 63 && std::uint64_t{1} << shift_ < by) ++shift_;
        multiplier_ = static_cast<std::uint64_t>(((Wide{1} << (63 + shift_)) + by - 1) / by);
        if (divisor >= kSmall) return;  // quotients of small dividends are 0
        small_shift_ = shift_;
        small_multiplier_ =
            static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + shift_)) + by - 1) / by);
    }

    [[nodiscard]] KVCORE_HOST_DEVICE std::int64_t divisor() const noexcept { return divisor_; }
    [[nodiscard]] KVCORE_HOST_DEVICE std::int64_t quotient(std::int64_t dividend) const noexcept {
        const std::uint64_t twice = static_cast<std::uint64_t>(dividend) * 2;
        return static_cast<std::int64_t>(high_product(multiplier_, twice) >> shift_);
    }
    [[nodiscard]] KVCORE_HOST_DEVICE std::int64_t remainder(std::int64_t dividend,
                                                            std::int64_t quotient) const noexcept {
        return dividend - quotient * divisor_;
    }
    /// Returns the quotient of a dividend below 2^31.
    [[nodiscard]] KVCORE_HOST_DEVICE std::uint32_t small_quotient(
        std::uint32_t dividend) const noexcept {
        const std::uint32_t twice = dividend * 2;
        const std::uint64_t product = std::uint64_t{small_multiplier_} * twice;
        return static_cast<std::uint32_t>(product >> 32) >> small_shift_;
    }

   private:
    std::int64_t divisor_;
    std::uint64_t multiplier_;
    std::uint32_t shift_ = 0;
    std::uint32_t small_shift_ = 0;
    std::uint32_t small_multiplier_ = 0;
};

}  // namespace kvcore::cuda
