// SPDX-License-Identifier: Apache-2.0
// Element types of a KV cache, and their conversions from and to float: the same bits on the CPU
// and on a GPU.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define KVCORE_HOST_DEVICE __host__ __device__
#else
#define KVCORE_HOST_DEVICE
#endif

namespace kvcore {

/// How an element of K or V is stored.
///
/// Tables of kernels are indexed by the number: wide dtypes come first, a new narrow one goes to
/// the end. "Add a dtype" in CONTRIBUTING.md lists the places that have to know it: most of what is
/// forgotten compiles, and computes as another dtype.
enum class DType : std::uint8_t {
    kFloat32,
    kFloat16,       // IEEE 754 binary16
    kBFloat16,      // the upper half of a float
    kFloat8E4M3FN,  // OCP FP8: bias 7, no infinities, NaN 0x7f and 0xff, largest 448
    kFloat8E5M2,    // OCP FP8: bias 15, infinities, largest finite 57344
    kInt8,
};

constexpr int kNumDTypes = 6;

/// Bytes of an element.
[[nodiscard]] KVCORE_HOST_DEVICE constexpr std::int64_t item_size(DType dtype) noexcept {
    return dtype == DType::kFloat32                                ? 4
           : dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? 2
                                                                   : 1;
}

/// The largest finite value; what the largest element of a group is scaled to.
[[nodiscard]] KVCORE_HOST_DEVICE constexpr float largest(DType dtype) noexcept {
    switch (dtype) {
        case DType::kFloat16:
            return 65504.0F;
        case DType::kFloat8E4M3FN:
            return 448.0F;
        case DType::kFloat8E5M2:
            return 57344.0F;
        case DType::kInt8:
            return 127.0F;
        case DType::kBFloat16:
            return 3.38953139e38F;
        default:
            return 3.40282347e38F;
    }
}

/// The bits of a float, and back.
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint32_t bits_of(float value) noexcept {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
[[nodiscard]] KVCORE_HOST_DEVICE inline float float_of(std::uint32_t bits) noexcept {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

namespace detail {

constexpr std::uint32_t kFloatSign = 0x80000000U;
constexpr std::uint32_t kFloatInfinity = 0x7f800000U;

// A format has a sign, `kMantissa` bits of fraction and exponents with `kBias`.

// To the nearest code, ties to even. `magnitude` are the bits of a float without its sign, at most
// those of the format's largest value or its infinity, where it has one.
template <int kMantissa, int kBias>
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint32_t narrow_magnitude(
    std::uint32_t magnitude) noexcept {
    constexpr int kDropped = 23 - kMantissa;
    constexpr std::uint32_t kSmallestNormal = static_cast<std::uint32_t>(128 - kBias) << 23;
    const std::uint32_t exponent = magnitude & kFloatInfinity;
    const std::uint32_t binade = exponent > kSmallestNormal ? exponent : kSmallestNormal;
    // Adding a number whose last bit weighs as much as the code's last bit rounds to that bit.
    const std::uint32_t unit = binade + (static_cast<std::uint32_t>(kDropped) << 23);
    const std::uint32_t digits = bits_of(float_of(magnitude) + float_of(unit)) - unit;
    return ((binade - kSmallestNormal) >> kDropped) + digits;
}

// Exact. `code` is without its sign and neither an infinity nor NaN.
template <int kMantissa, int kBias>
[[nodiscard]] KVCORE_HOST_DEVICE inline float widen_magnitude(std::uint32_t code) noexcept {
    constexpr std::uint32_t kUnit = static_cast<std::uint32_t>(128 - kBias - kMantissa) << 23;
    constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(127 - kBias) << 23;
    if (code < (1U << kMantissa)) return static_cast<float>(code) * float_of(kUnit);
    return float_of((code << (23 - kMantissa)) + kRebias);
}

// `kLargest` are the bits of the format's largest value.
template <int kMantissa, int kBias, std::uint32_t kLargest>
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint8_t to_fp8(float value) noexcept {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t magnitude = bits & ~kFloatSign;
    if (magnitude > kFloatInfinity) return 0x7f;
    const std::uint32_t clipped = magnitude < kLargest ? magnitude : kLargest;
    return static_cast<std::uint8_t>((bits & kFloatSign) >> 24 |
                                     narrow_magnitude<kMantissa, kBias>(clipped));
}

}  // namespace detail

/// IEEE binary16: ties to even, infinity beyond the largest, NaN becomes quiet.
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint16_t to_half(float value) noexcept {
    const std::uint32_t bits = bits_of(value);
    const auto sign = static_cast<std::uint16_t>((bits & detail::kFloatSign) >> 16);
    std::uint32_t magnitude = bits & ~detail::kFloatSign;
    if (magnitude > detail::kFloatInfinity) {
        return static_cast<std::uint16_t>(sign | 0x7e00U | (magnitude >> 13 & 0x3ffU));
    }
    constexpr std::uint32_t kTwoTo16 = 143U << 23;
    if (magnitude > kTwoTo16) magnitude = kTwoTo16;  // whose code is infinity's
    return static_cast<std::uint16_t>(sign | detail::narrow_magnitude<10, 15>(magnitude));
}
[[nodiscard]] KVCORE_HOST_DEVICE inline float from_half(std::uint16_t code) noexcept {
    const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x8000U) << 16;
    const std::uint32_t magnitude = code & 0x7fffU;
    if (magnitude >= 0x7c00U) {
        const std::uint32_t quiet = magnitude > 0x7c00U ? 0x400000U : 0;
        return float_of(sign | detail::kFloatInfinity | quiet | (magnitude & 0x3ffU) << 13);
    }
    return float_of(sign | bits_of(detail::widen_magnitude<10, 15>(magnitude)));
}

/// bfloat16: ties to even, NaN becomes quiet.
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint16_t to_bfloat16(float value) noexcept {
    const std::uint32_t bits = bits_of(value);
    if ((bits & ~detail::kFloatSign) > detail::kFloatInfinity) {
        return static_cast<std::uint16_t>(bits >> 16 | 0x40U);
    }
    return static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}
[[nodiscard]] KVCORE_HOST_DEVICE inline float from_bfloat16(std::uint16_t code) noexcept {
    return float_of(static_cast<std::uint32_t>(code) << 16);
}

/// FP8: ties to even, the largest finite value beyond it (infinities included), NaN is 0x7f.
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint8_t to_e4m3fn(float value) noexcept {
    return detail::to_fp8<3, 7, 0x43e00000U>(value);  // 448
}
[[nodiscard]] KVCORE_HOST_DEVICE inline float from_e4m3fn(std::uint8_t code) noexcept {
    const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80U) << 24;
    if ((code & 0x7fU) == 0x7fU) return float_of(sign | 0x7fc00000U);
    return float_of(sign | bits_of(detail::widen_magnitude<3, 7>(code & 0x7fU)));
}
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint8_t to_e5m2(float value) noexcept {
    return detail::to_fp8<2, 15, 0x47600000U>(value);  // 57344
}
[[nodiscard]] KVCORE_HOST_DEVICE inline float from_e5m2(std::uint8_t code) noexcept {
    return from_half(static_cast<std::uint16_t>(code << 8));
}

/// int8: ties to even, saturated to -128 .. 127, NaN is 0.
[[nodiscard]] KVCORE_HOST_DEVICE inline std::int8_t to_int8(float value) noexcept {
    if (!(value == value)) return 0;
    const float clipped = value > 127.0F ? 127.0F : value < -128.0F ? -128.0F : value;
    constexpr float kUnit = 12582912.0F;  // 1.5 * 2^23: its last bit weighs one
    return static_cast<std::int8_t>(bits_of(clipped + kUnit) & 0xffU);
}

}  // namespace kvcore
