// SPDX-License-Identifier: Apache-2.0
// Pieces of elements in registers, and their conversions from and to float: the conversions of
// kvcore/dtype.hpp, or GPU instructions that return the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kvcore/dtype.hpp"
#include "units.hpp"

namespace kvcore::cuda {

// ---- floats from codes, and codes from floats ---------------------------------------------------

#if defined(__CUDA_ARCH__)
/// Returns the value of a float16 in the lower half of a word. For NaN, it returns some NaN: GPUs
/// do not specify which.
[[nodiscard]] __device__ inline float float_of_half(std::uint32_t code) noexcept {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<std::uint16_t>(code)));
    return value;
}
#endif

/// Returns the exact value of a code.
template <DType kDType>
[[nodiscard]] KVCORE_HOST_DEVICE inline float widened(std::uint32_t code) noexcept {
    using Traits = DTypeTraits<kDType>;
#if defined(__CUDA_ARCH__)
    if constexpr (kDType == DType::kFloat16) {
        const float value = float_of_half(code);
        if (value == value) return value;
    }
#endif
    return Traits::widen(static_cast<typename Traits::Code>(code));
}

/// Returns the code of the nearest value.
template <DType kDType>
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint32_t narrowed(float value) noexcept {
#if defined(__CUDA_ARCH__)
    if constexpr (kDType == DType::kFloat16) {
        std::uint16_t code;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(code) : "f"(value));
        if (value == value) return code;
    }
#endif
    return DTypeTraits<kDType>::narrow(value);
}

/// Returns the codes of four values, the first in the lowest byte.
template <DType kDType>
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint32_t narrowed_word(
    const float (&values)[4]) noexcept {
#if defined(__CUDA_ARCH__)
    if constexpr (kDType == DType::kInt8) {
        // Conversions to integers saturate and return 0 for NaN; packing saturates again. The
        // values that are packed first end up in the upper half.
        std::uint32_t upper;
        std::uint32_t codes;
        asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;"
            : "=r"(upper)
            : "r"(__float2int_rn(values[3])), "r"(__float2int_rn(values[2])), "r"(0));
        asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;"
            : "=r"(codes)
            : "r"(__float2int_rn(values[1])), "r"(__float2int_rn(values[0])), "r"(upper));
        return codes;
    }
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    // The instruction saturates infinities and returns 0x7f for NaN, like to_e4m3fn.
    if constexpr (kDType == DType::kFloat8E4M3FN) {
        std::uint16_t low;
        std::uint16_t high;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(values[1]), "f"(values[0]));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
            : "=h"(high)
            : "f"(values[3]), "f"(values[2]));
        return low | static_cast<std::uint32_t>(high) << 16;
    }
#endif
    std::uint32_t codes = 0;
    for (int i = 0; i < 4; ++i) codes |= narrowed<kDType>(values[i]) << 8 * i;
    return codes;
}

/// Returns value * scale. If the result is NaN, it is the NaN of a factor, as on CPUs. GPU
/// instructions return the same NaN for all factors.
[[nodiscard]] KVCORE_HOST_DEVICE inline float product(float value, float scale) noexcept {
    const float found = value * scale;
#if defined(__CUDA_ARCH__)
    if (found != found) {
        constexpr std::uint32_t kQuiet = 0x400000U;
        if (value != value) return float_of(bits_of(value) | kQuiet);
        return float_of(scale != scale ? bits_of(scale) | kQuiet : 0xffc00000U);
    }
#endif
    return found;
}

/// Returns the bits of a magnitude; 0 if the value is not finite.
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint32_t finite_magnitude(float value) noexcept {
    const std::uint32_t magnitude = bits_of(value) & ~detail::kFloatSign;
    return magnitude < detail::kFloatInfinity ? magnitude : 0;
}

/// Returns the scale of elements whose largest finite magnitude has these bits.
[[nodiscard]] KVCORE_HOST_DEVICE inline float scale_for(std::uint32_t largest_bits,
                                                        DType narrow) noexcept {
    const float ratio = float_of(largest_bits) / largest(narrow);
    return ratio > kSmallestScale ? ratio : kSmallestScale;
}

// ---- memory ---------------------------------------------------------------------------------

/// Loads a word of 1, 2 or 4 bytes at any address.
template <int kBytes>
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint32_t load_word(const std::byte* at) noexcept {
    using Word = std::conditional_t<kBytes == 1, std::uint8_t,
                                    std::conditional_t<kBytes == 2, std::uint16_t, std::uint32_t>>;
    if (reinterpret_cast<std::uintptr_t>(at) % kBytes == 0) return load_unit<Word>(at);
    std::uint32_t word = 0;
    for (int i = 0; i < kBytes; ++i) word |= static_cast<std::uint32_t>(at[i]) << 8 * i;
    return word;
}
template <int kBytes>
KVCORE_HOST_DEVICE inline void store_word(std::byte* at, std::uint32_t word) noexcept {
    using Word = std::conditional_t<kBytes == 1, std::uint8_t,
                                    std::conditional_t<kBytes == 2, std::uint16_t, std::uint32_t>>;
    if (reinterpret_cast<std::uintptr_t>(at) % kBytes == 0) {
        store_unit(at, static_cast<Word>(word));
        return;
    }
    for (int i = 0; i < kBytes; ++i) at[i] = static_cast<std::byte>(word >> 8 * i & 0xffU);
}

/// Neighbouring elements, as in memory. Two or more elements need an address that is a multiple of
/// their bytes, or of 16; a single element may be at any address.
template <DType kDType, int kCount>
struct Piece {
    static constexpr int kItem = static_cast<int>(item_size(kDType));
    static constexpr int kBytes = kItem * kCount;
    static constexpr int kWords = (kBytes + 3) / 4;
    static_assert(kCount == 1 || kBytes % 4 == 0, "whole words, or one element");
    using Unit = std::conditional_t<(kBytes >= 16), Unit16,
                                    std::conditional_t<kBytes == 8, std::uint64_t, std::uint32_t>>;

    std::uint32_t words[kWords];

    KVCORE_HOST_DEVICE void load(const std::byte* from) noexcept {
        if constexpr (kCount == 1) {
            words[0] = load_word<kItem>(from);
        } else {
            for (std::size_t i = 0; i < kBytes / sizeof(Unit); ++i) {
                const Unit unit = load_unit<Unit>(from + i * sizeof(Unit));
                std::memcpy(words + i * sizeof(Unit) / 4, &unit, sizeof unit);
            }
        }
    }
    KVCORE_HOST_DEVICE void store(std::byte* to) const noexcept {
        if constexpr (kCount == 1) {
            store_word<kItem>(to, words[0]);
        } else {
            for (std::size_t i = 0; i < kBytes / sizeof(Unit); ++i) {
                Unit unit;
                std::memcpy(&unit, words + i * sizeof(Unit) / 4, sizeof unit);
                store_unit(to + i * sizeof(Unit), unit);
            }
        }
    }

    /// Returns the value of an element. The index is a constant after loops are unrolled.
    [[nodiscard]] KVCORE_HOST_DEVICE float value(int i) const noexcept {
        return widened<kDType>(words[i * kItem / 4] >> i * kItem % 4 * 8);
    }

    /// Returns the value of an element; for NaN, some NaN.
    [[nodiscard]] KVCORE_HOST_DEVICE float number(int i) const noexcept {
#if defined(__CUDA_ARCH__)
        if constexpr (kDType == DType::kFloat16) {
            return float_of_half(words[i / 2] >> i % 2 * 16);
        }
#endif
        return value(i);
    }

    /// Moves each element, of one byte, to the place of the element before it.
    KVCORE_HOST_DEVICE void drop_first() noexcept {
        static_assert(kItem == 1);
        for (int i = 0; i < kWords; ++i) {
            words[i] = words[i] >> 8 | (i + 1 < kWords ? words[i + 1] << 24 : 0);
        }
    }

    /// Returns the elements that are nearest to floats.
    [[nodiscard]] KVCORE_HOST_DEVICE static Piece of(const float (&values)[kCount]) noexcept {
        Piece piece{};
        if constexpr (kItem == 1 && kCount > 1) {
            for (int i = 0; i < kCount; i += 4) {
                const float four[] = {values[i], values[i + 1], values[i + 2], values[i + 3]};
                piece.words[i / 4] = narrowed_word<kDType>(four);
            }
        } else {
            for (int i = 0; i < kCount; ++i) {
                piece.words[i * kItem / 4] |= narrowed<kDType>(values[i]) << i * kItem % 4 * 8;
            }
        }
        return piece;
    }
};

}  // namespace kvcore::cuda
