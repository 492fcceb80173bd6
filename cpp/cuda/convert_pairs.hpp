// SPDX-License-Identifier: Apache-2.0
// Converts two or four elements at once, with the instructions that GPUs have for pairs. A CPU
// converts them one after the other.
//
// The value of every narrow code is also a float16, so codes are widened in pairs to float16, and
// from float16 to float. The conversions are for numbers: GPUs return the same NaN for all results,
// so a caller that needs a specific NaN must check first.
#pragma once

#include <cstdint>

#include "convert_elements.hpp"

namespace kvcore::cuda {

/// Whether a kernel takes pieces of codes of a dtype: `WidenBody` takes codes of float8_e5m2 one by
/// one.
[[nodiscard]] inline bool has_pieces(DType narrow) noexcept {
    return narrow == DType::kInt8 || narrow == DType::kFloat8E4M3FN;
}

// ---- codes to floats ----------------------------------------------------------------------------

/// Returns marks for four codes: a sign bit is set if the code is NaN or infinite; the other bits
/// are arbitrary. Marks of several words may be joined by `|` before they are checked.
template <DType kNarrow>
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint32_t mark_infinite(std::uint32_t codes) noexcept {
    constexpr std::uint32_t kMagnitude = 0x7f7f7f7fU;
    if constexpr (kNarrow == DType::kFloat8E4M3FN) {
        return (codes & kMagnitude) + 0x01010101U;
    } else {
        static_assert(kNarrow == DType::kInt8, "mark_infinite has no code for this dtype");
        return 0;
    }
}
constexpr std::uint32_t kMarks = 0x80808080U;

#if defined(__CUDA_ARCH__)

/// Returns codes 2 * pair and 2 * pair + 1 of four as float16 numbers, the first in the lower half.
template <DType kNarrow>
[[nodiscard]] __device__ inline std::uint32_t halves_of(std::uint32_t codes, int pair) noexcept {
    std::uint32_t halves;
    const std::uint32_t in_upper_bytes = __byte_perm(codes, 0, pair == 0 ? 0x1404 : 0x3424);
    if constexpr (kNarrow == DType::kFloat8E4M3FN) {
#if __CUDA_ARCH__ >= 890
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;"
            : "=r"(halves)
            : "h"(static_cast<std::uint16_t>(codes >> 16 * pair)));
#else
        // After its three fraction bits are moved into place, a code has a value that is 2^8 times
        // too small.
        constexpr std::uint32_t kTwoTo8 = 0x5c005c00U;
        const std::uint32_t small =
            (in_upper_bytes & 0x80008000U) | (in_upper_bytes & 0x7f007f00U) >> 1;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(small), "r"(kTwoTo8));
#endif
    } else {
        static_assert(kNarrow == DType::kInt8, "halves_of has no code for this dtype");
        // The last bit of a float16 from 1024 to 2047 has the value 1.
        constexpr std::uint32_t k1152 = 0x64806480U;
        const std::uint32_t above_1024 =
            __byte_perm(codes ^ 0x80808080U, 0x64646464U, pair == 0 ? 0x4140 : 0x4342);
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(above_1024), "r"(k1152));
    }
    return halves;
}

#endif

/// Writes the values of four codes; for NaN, some NaN.
template <DType kNarrow>
KVCORE_HOST_DEVICE inline void widen_word(std::uint32_t codes, float (&values)[4]) noexcept {
#if defined(__CUDA_ARCH__)
    KVCORE_UNROLL
    for (int pair = 0; pair < 2; ++pair) {
        const std::uint32_t halves = halves_of<kNarrow>(codes, pair);
        values[2 * pair] = float_of_half(halves);
        values[2 * pair + 1] = float_of_half(halves >> 16);
    }
#else
    for (int i = 0; i < 4; ++i) values[i] = widened<kNarrow>(codes >> 8 * i & 0xffU);
#endif
}

// ---- floats to elements of two bytes ------------------------------------------------------------

/// Returns the nearest elements of two numbers, the first in the lower half.
template <DType kWide>
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint32_t rounded_pair(float first,
                                                                   float second) noexcept {
    static_assert(item_size(kWide) == 2);
#if defined(__CUDA_ARCH__)
    std::uint32_t both;
    if constexpr (kWide == DType::kFloat16) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    }
    return both;
#else
    return narrowed<kWide>(first) | narrowed<kWide>(second) << 16;
#endif
}

/// Returns the nearest elements of numbers.
template <DType kWide, int kCount>
[[nodiscard]] KVCORE_HOST_DEVICE inline Piece<kWide, kCount> rounded(
    const float (&values)[kCount]) noexcept {
    Piece<kWide, kCount> piece;
    if constexpr (item_size(kWide) == 4) {
        for (int i = 0; i < kCount; ++i) piece.words[i] = bits_of(values[i]);
    } else {
        for (int i = 0; i < kCount; i += 2) {
            piece.words[i / 2] = rounded_pair<kWide>(values[i], values[i + 1]);
        }
    }
    return piece;
}

// ---- the largest of many ------------------------------------------------------------------------

/// Returns the bits of the largest finite magnitude of all elements, which it checks one by one.
template <DType kWide, int kCount, int kPieces>
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint32_t largest_finite(
    const Piece<kWide, kCount> (&pieces)[kPieces]) noexcept {
    std::uint32_t most = 0;
    KVCORE_UNROLL
    for (int i = 0; i < kPieces; ++i) {
        for (int j = 0; j < kCount; ++j) {
            const std::uint32_t magnitude = finite_magnitude(pieces[i].value(j));
            most = most > magnitude ? most : magnitude;
        }
    }
    return most;
}

/// Returns the bits of the largest finite magnitude of all elements. Checks them one by one only if
/// there are infinities.
template <DType kWide, int kCount, int kPieces>
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint32_t largest_magnitude(
    const Piece<kWide, kCount> (&pieces)[kPieces]) noexcept {
#if defined(__CUDA_ARCH__)
    // The maximum of a number and NaN is the number.
    std::uint32_t most = 0;
    if constexpr (item_size(kWide) == 4) {
        float found = 0.0F;
        KVCORE_UNROLL
        for (int i = 0; i < kPieces; ++i) {
            for (const std::uint32_t word : pieces[i].words) {
                found = fmaxf(found, fabsf(float_of(word)));
            }
        }
        most = bits_of(found);
    } else if constexpr (kCount > 1) {
        std::uint32_t both = 0;
        KVCORE_UNROLL
        for (int i = 0; i < kPieces; ++i) {
            for (const std::uint32_t word : pieces[i].words) {
                if constexpr (kWide == DType::kFloat16) {
                    asm("max.f16x2 %0, %0, %1;" : "+r"(both) : "r"(word & 0x7fff7fffU));
                } else {
                    asm("max.bf16x2 %0, %0, %1;" : "+r"(both) : "r"(word & 0x7fff7fffU));
                }
            }
        }
        // In both formats, magnitudes have the same order as their bits.
        const std::uint32_t low = both & 0xffffU;
        const std::uint32_t high = both >> 16;
        const std::uint32_t code = low > high ? low : high;
        most = kWide == DType::kFloat16 ? bits_of(float_of_half(code)) : code << 16;
    } else {
        return largest_finite(pieces);
    }
    if (most < detail::kFloatInfinity) return most;
#endif
    return largest_finite(pieces);
}

}  // namespace kvcore::cuda
