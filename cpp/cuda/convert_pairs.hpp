// SPDX-License-Identifier: Apache-2.0
// Conversions of two and of four elements at once, of instructions that GPUs have for pairs. A CPU
// converts one after the other.
//
// Every narrow code is a number of float16 as well, so codes are widened in pairs to that, and from
// it to float. All is for numbers: GPUs have one NaN for all results, so whoever must answer a
// certain one has to look first.
#pragma once

#include <cstdint>

#include "convert_elements.hpp"

namespace kvcore::cuda {

// ---- codes to floats ----------------------------------------------------------------------------

/// The sign bits of codes that are NaN or infinite are set in what this answers of four; others may
/// be anything. Answers of several words may be joined by `|` before they are looked at.
template <DType kNarrow>
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint32_t mark_infinite(std::uint32_t codes) noexcept {
    constexpr std::uint32_t kMagnitude = 0x7f7f7f7fU;
    if constexpr (kNarrow == DType::kFloat8E4M3FN) return (codes & kMagnitude) + 0x01010101U;
    if constexpr (kNarrow == DType::kFloat8E5M2) return (codes & kMagnitude) + 0x04040404U;
    return 0;
}
constexpr std::uint32_t kMarks = 0x80808080U;

#if defined(__CUDA_ARCH__)

/// Codes 2 * pair and 2 * pair + 1 of four as numbers of float16, the first one in the lower half.
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
        // With its three bits of fraction in place a code counts 2^8 times too little.
        constexpr std::uint32_t kTwoTo8 = 0x5c005c00U;
        const std::uint32_t small =
            (in_upper_bytes & 0x80008000U) | (in_upper_bytes & 0x7f007f00U) >> 1;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(small), "r"(kTwoTo8));
#endif
    } else if constexpr (kNarrow == DType::kFloat8E5M2) {
        halves = in_upper_bytes;
    } else {
        // The last bit of 1024 to 2047 weighs 1.
        constexpr std::uint32_t k1152 = 0x64806480U;
        const std::uint32_t above_1024 =
            __byte_perm(codes ^ 0x80808080U, 0x64646464U, pair == 0 ? 0x4140 : 0x4342);
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(above_1024), "r"(k1152));
    }
    return halves;
}

#endif

/// The values of four codes; of NaN some NaN.
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

/// The nearest elements of two numbers, the first one in the lower half.
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

/// The nearest elements of numbers.
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

/// The bits of the largest finite magnitude of elements, looked for in all of them one by one.
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

/// The same, with a second look only where there are infinities.
template <DType kWide, int kCount, int kPieces>
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint32_t largest_magnitude(
    const Piece<kWide, kCount> (&pieces)[kPieces]) noexcept {
#if defined(__CUDA_ARCH__)
    // Of a number and NaN the number is the larger one.
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
        // Magnitudes of either format are in the order of their bits.
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
