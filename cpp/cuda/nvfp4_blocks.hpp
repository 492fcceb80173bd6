// SPDX-License-Identifier: Apache-2.0
// Converts blocks of nvfp4 in the registers of a lane, with the same bytes as kvcore/quantize.hpp.
//
// A block is coded in registers if its elements are finite and its codes do not saturate. Other
// blocks are read again and coded element by element.
#pragma once

#include <cstddef>
#include <cstdint>

#include "convert_pairs.hpp"
#include "kvcore/quantize.hpp"

namespace kvcore::cuda {

template <DType kWide>
using BlockOf = Piece<kWide, 16>;

// ---- scales -------------------------------------------------------------------------------------

/// Returns the code of nvfp4_scale for a quotient that is not NaN.
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint32_t block_scale(float quotient) noexcept {
    const float four[] = {quotient, 0.0F, 0.0F, 0.0F};
    const std::uint32_t code = narrowed_word<DType::kFloat8E4M3FN>(four) & 0xffU;
    return code == 0 ? 1 : code;
}

/// Returns the factor of elements, computed in the steps of kvcore/quantize.hpp.
[[nodiscard]] KVCORE_HOST_DEVICE inline float coding_factor(std::uint32_t scale,
                                                            float global) noexcept {
    float four[4];
    widen_word<DType::kFloat8E4M3FN>(scale, four);
    return 1.0F / (four[0] * global);
}

// ---- elements to codes --------------------------------------------------------------------------

/// Returns the larger magnitudes of two pairs; NaN if either magnitude is NaN. Only for GPUs.
template <DType kWide>
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint32_t larger_or_nan(std::uint32_t a,
                                                                    std::uint32_t b) noexcept {
#if defined(__CUDA_ARCH__)
    if constexpr (kWide == DType::kFloat16) {
        asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    } else {
        asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    }
    return a;
#else
    return a > b ? a : b;
#endif
}

/// Returns the bits of the largest magnitude; at least the bits of infinity if an element is not
/// finite.
template <DType kWide>
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint32_t largest_or_infinite(
    const BlockOf<kWide>& block) noexcept {
    std::uint32_t most = 0;
#if defined(__CUDA_ARCH__)
    constexpr bool kIsPaired = item_size(kWide) == 2;
#else
    constexpr bool kIsPaired = false;
#endif
    if constexpr (kIsPaired) {
        KVCORE_UNROLL
        for (const std::uint32_t word : block.words) {
            most = larger_or_nan<kWide>(most, word & 0x7fff7fffU);
        }
        // In both formats, magnitudes have the same order as their bits.
        const std::uint32_t low = most & 0xffffU;
        const std::uint32_t high = most >> 16;
        return bits_of(widened<kWide>(low > high ? low : high));
    } else {
        KVCORE_UNROLL
        for (int i = 0; i < 16; ++i) {
            const std::uint32_t magnitude = bits_of(block.value(i)) & ~detail::kFloatSign;
            most = most > magnitude ? most : magnitude;
        }
        return most;
    }
}

/// Returns value * by + plus; the product is exact.
[[nodiscard]] KVCORE_HOST_DEVICE inline float fused(float value, float by, float plus) noexcept {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(value, by, plus);
#else
    return value * by + plus;
#endif
}

/// Returns the lesser of two numbers.
[[nodiscard]] KVCORE_HOST_DEVICE inline float lesser(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
    return fminf(a, b);
#else
    return a < b ? a : b;
#endif
}

/// Returns `before` shifted up by four bits; its lowest four bits are the upper four bits of
/// `bits`.
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint32_t with_upper(std::uint32_t before,
                                                                 std::uint32_t bits) noexcept {
#if defined(__CUDA_ARCH__)
    return __funnelshift_l(bits, before, 4);
#else
    return before << 4 | bits >> 28;
#endif
}

/// Returns the codes of eight elements times `factor`, the first in the lowest half byte. The
/// products must be below 7.
///
/// The code of a magnitude x is nearest to the least of 2 x, x + 2 and x / 2 + 4. Adding 1.5 * 2^23
/// to each of the three rounds it to a whole number, ties to even, and keeps their order.
template <DType kWide>
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint32_t codes_of_eight(const BlockOf<kWide>& block,
                                                                     int first,
                                                                     float factor) noexcept {
    constexpr float kUnit = 12582912.0F;
    constexpr std::uint32_t kUnitBits = 0x4b400000U;
    std::uint32_t codes = 0;
    std::uint32_t signs = 0;
    KVCORE_UNROLL
    for (int i = first + 7; i >= first; --i) {
        const float value = block.number(i) * factor;
        const std::uint32_t bits = bits_of(value);
        const float x = float_of(bits & ~detail::kFloatSign);
        const float least =
            lesser(lesser(fused(x, 2.0F, kUnit), x + (kUnit + 2.0F)), fused(x, 0.5F, kUnit + 4.0F));
        codes = (codes << 4) + bits_of(least);
        signs = with_upper(signs, bits);
    }
    constexpr std::uint32_t kAll = kUnitBits + (kUnitBits << 4) + (kUnitBits << 8);
    return (codes - kAll) | (signs & 0x88888888U);
}

/// Writes the codes and the scale of a block of any elements, at any addresses.
template <DType kWide>
KVCORE_HOST_DEVICE inline void code_one_by_one(const std::byte* from, float global, std::byte* to,
                                               std::byte* scale_at) noexcept {
    using Element = Piece<kWide, 1>;
    std::uint32_t most = 0;
    KVCORE_KEEP_LOOP
    for (int i = 0; i < 16; ++i) {
        Element element;
        element.load(from + i * Element::kBytes);
        const std::uint32_t magnitude = finite_magnitude(element.value(0));
        most = most > magnitude ? most : magnitude;
    }
    const std::uint32_t scale = block_scale(float_of(most) / (6.0F * global));
    store_word<1>(scale_at, scale);
    const float factor = coding_factor(scale, global);
    KVCORE_KEEP_LOOP
    for (int i = 0; i < 8; ++i) {
        std::uint32_t pair = 0;
        KVCORE_KEEP_LOOP
        for (int j = 0; j < 2; ++j) {
            Element element;
            element.load(from + (2 * i + j) * Element::kBytes);
            const std::uint32_t code = to_e2m1(element.value(0) * factor);
            pair |= code << 4 * j;
        }
        store_word<1>(to + i, pair);
    }
}

/// Writes the codes and the scale of a block that was loaded from `from`. `to` is a multiple of 8.
template <DType kWide>
KVCORE_HOST_DEVICE inline void code_block(const BlockOf<kWide>& block, const std::byte* from,
                                          float global, std::byte* to,
                                          std::byte* scale_at) noexcept {
    constexpr float kMost = 6.9F;  // it has the code of 6
    const std::uint32_t most = largest_or_infinite<kWide>(block);
    if (most < detail::kFloatInfinity) {
        const std::uint32_t scale = block_scale(float_of(most) / (6.0F * global));
        const float factor = coding_factor(scale, global);
        if (float_of(most) * factor <= kMost) {
            store_word<1>(scale_at, scale);
            const std::uint64_t low = codes_of_eight<kWide>(block, 0, factor);
            const std::uint64_t high = codes_of_eight<kWide>(block, 8, factor);
            store_unit(to, low | high << 32);
            return;
        }
    }
    code_one_by_one<kWide>(from, global, to, scale_at);
}

// ---- codes to elements --------------------------------------------------------------------------

/// Writes the values of eight codes divided by 2^14: the exponent and fraction of a code, in the
/// fields of a float16, make its value smaller by 2^14. A factor times 2^14 corrects it.
KVCORE_HOST_DEVICE inline void values_of_eight(std::uint32_t codes, float (&values)[8]) noexcept {
#if defined(__CUDA_ARCH__)
    KVCORE_UNROLL
    for (int i = 0; i < 4; ++i) {  // codes i and i + 4
        const std::uint32_t magnitudes = i < 3 ? codes << (9 - 4 * i) : codes >> 3;
        const std::uint32_t halves =
            (codes << (12 - 4 * i) & 0x80008000U) | (magnitudes & 0x0e000e00U);
        values[i] = float_of_half(halves);
        values[i + 4] = float_of_half(halves >> 16);
    }
#else
    for (int i = 0; i < 8; ++i) {
        values[i] = from_e2m1(codes >> 4 * i & 0xfU) * 0x1p-14F;
    }
#endif
}

/// Writes the values of a block of codes, at any addresses. NaN results are the same as on CPUs.
template <DType kWide>
KVCORE_HOST_DEVICE inline void read_one_by_one(const std::byte* from, float factor,
                                               std::byte* to) noexcept {
    using Element = Piece<kWide, 1>;
    KVCORE_KEEP_LOOP
    for (int i = 0; i < 16; ++i) {
        const std::uint32_t code = load_word<1>(from + i / 2) >> i % 2 * 4 & 0xfU;
        const float value = product(from_e2m1(static_cast<std::uint8_t>(code)), factor);
        Element element;
        element.words[0] = narrowed<kWide>(value);
        element.store(to + i * Element::kBytes);
    }
}

/// Writes the values of a block of codes. Both addresses allow whole units.
template <DType kWide>
KVCORE_HOST_DEVICE inline void read_block(std::uint64_t codes, const std::byte* from, float factor,
                                          std::byte* to) noexcept {
    constexpr float kHuge = 0x1p100F;
    if (!(factor < kHuge && factor > -kHuge)) return read_one_by_one<kWide>(from, factor, to);
    const float scaled = factor * 0x1p14F;
    float values[16];
    KVCORE_UNROLL
    for (int half = 0; half < 2; ++half) {
        float eight[8];
        values_of_eight(static_cast<std::uint32_t>(codes >> 32 * half), eight);
        KVCORE_UNROLL
        for (int i = 0; i < 8; ++i) values[8 * half + i] = eight[i] * scaled;
    }
    rounded<kWide>(values).store(to);
}

}  // namespace kvcore::cuda
