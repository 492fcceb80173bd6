// SPDX-License-Identifier: Apache-2.0
// Element types of a KV cache, and their conversions from and to float: the same bits on the CPU
// and on a GPU.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>
#include <utility>

#if defined(__CUDACC__)
#define KVCORE_HOST_DEVICE __host__ __device__
#else
#define KVCORE_HOST_DEVICE
#endif

namespace kvcore {

/// How an element of K or V is stored.
///
/// Tables of kernels are indexed by the number: wide dtypes come first, a new narrow dtype goes to
/// the end. DTypeTraits has the properties of each dtype, and all tables are built from the traits.
/// "Add a dtype" in CONTRIBUTING.md lists the files; the compiler rejects the other files until
/// they support the dtype.
enum class DType : std::uint8_t {
    kFloat32,
    kFloat16,       // IEEE 754 binary16
    kBFloat16,      // the upper half of a float
    kFloat8E4M3FN,  // OCP FP8: bias 7, no infinities, NaN 0x7f and 0xff, largest 448
    kFloat8E5M2,    // OCP FP8: bias 15, infinities, largest finite 57344
    kInt8,
};

constexpr int kNumDTypes = static_cast<int>(DType::kInt8) + 1;  // kInt8 is the last dtype

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

// Rounds to the nearest code, ties to even. `magnitude`: the bits of a float without its sign, at
// most the bits of the format's infinity, or of its largest value if it has no infinity.
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

// Exact. `code` has no sign bit and is neither an infinity nor NaN.
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
    if (magnitude > kTwoTo16) magnitude = kTwoTo16;  // its code is infinity
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

/// FP8: ties to even, larger values (infinities included) become the largest finite value, NaN
/// becomes 0x7f.
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

/// int8: ties to even, saturated to -128 .. 127, NaN becomes 0.
[[nodiscard]] KVCORE_HOST_DEVICE inline std::int8_t to_int8(float value) noexcept {
    if (!(value == value)) return 0;
    const float clipped = value > 127.0F ? 127.0F : value < -128.0F ? -128.0F : value;
    constexpr float kUnit = 12582912.0F;  // 1.5 * 2^23: its last bit weighs one
    return static_cast<std::int8_t>(bits_of(clipped + kUnit) & 0xffU);
}

// ---- the table of dtypes -----------------------------------------------------------------------

/// The properties of a dtype: `Code`, the unsigned number that stores an element; `kName`, numpy's
/// name; `kLargest`, the largest finite value, to which the largest element of a group is scaled;
/// `widen` and `narrow`, the conversions. Kernels, bindings and Python read this table. A dtype
/// without traits does not compile.
template <DType kDType>
struct DTypeTraits;

template <>
struct DTypeTraits<DType::kFloat32> {
    using Code = std::uint32_t;
    static constexpr const char* kName = "float32";
    static constexpr float kLargest = 3.40282347e38F;
    [[nodiscard]] KVCORE_HOST_DEVICE static float widen(Code code) noexcept {
        return float_of(code);
    }
    [[nodiscard]] KVCORE_HOST_DEVICE static Code narrow(float value) noexcept {
        return bits_of(value);
    }
};
template <>
struct DTypeTraits<DType::kFloat16> {
    using Code = std::uint16_t;
    static constexpr const char* kName = "float16";
    static constexpr float kLargest = 65504.0F;
    [[nodiscard]] KVCORE_HOST_DEVICE static float widen(Code code) noexcept {
        return from_half(code);
    }
    [[nodiscard]] KVCORE_HOST_DEVICE static Code narrow(float value) noexcept {
        return to_half(value);
    }
};
template <>
struct DTypeTraits<DType::kBFloat16> {
    using Code = std::uint16_t;
    static constexpr const char* kName = "bfloat16";
    static constexpr float kLargest = 3.38953139e38F;
    [[nodiscard]] KVCORE_HOST_DEVICE static float widen(Code code) noexcept {
        return from_bfloat16(code);
    }
    [[nodiscard]] KVCORE_HOST_DEVICE static Code narrow(float value) noexcept {
        return to_bfloat16(value);
    }
};
template <>
struct DTypeTraits<DType::kFloat8E4M3FN> {
    using Code = std::uint8_t;
    static constexpr const char* kName = "float8_e4m3fn";
    static constexpr float kLargest = 448.0F;
    [[nodiscard]] KVCORE_HOST_DEVICE static float widen(Code code) noexcept {
        return from_e4m3fn(code);
    }
    [[nodiscard]] KVCORE_HOST_DEVICE static Code narrow(float value) noexcept {
        return to_e4m3fn(value);
    }
};
template <>
struct DTypeTraits<DType::kFloat8E5M2> {
    using Code = std::uint8_t;
    static constexpr const char* kName = "float8_e5m2";
    static constexpr float kLargest = 57344.0F;
    [[nodiscard]] KVCORE_HOST_DEVICE static float widen(Code code) noexcept {
        return from_e5m2(code);
    }
    [[nodiscard]] KVCORE_HOST_DEVICE static Code narrow(float value) noexcept {
        return to_e5m2(value);
    }
};
template <>
struct DTypeTraits<DType::kInt8> {
    using Code = std::uint8_t;
    static constexpr const char* kName = "int8";
    static constexpr float kLargest = 127.0F;
    [[nodiscard]] KVCORE_HOST_DEVICE static float widen(Code code) noexcept {
        return static_cast<float>(static_cast<std::int8_t>(code));
    }
    [[nodiscard]] KVCORE_HOST_DEVICE static Code narrow(float value) noexcept {
        return static_cast<Code>(to_int8(value));
    }
};

namespace detail {

template <std::size_t... kIndex>
[[nodiscard]] KVCORE_HOST_DEVICE constexpr std::int64_t item_size(
    DType dtype, std::index_sequence<kIndex...>) noexcept {
    std::int64_t size = 0;
    static_cast<void>(((static_cast<std::size_t>(dtype) == kIndex &&
                        (size = static_cast<std::int64_t>(sizeof(
                             typename DTypeTraits<static_cast<DType>(kIndex)>::Code))) > 0) ||
                       ...));
    return size;
}

template <std::size_t... kIndex>
[[nodiscard]] KVCORE_HOST_DEVICE constexpr float largest(DType dtype,
                                                         std::index_sequence<kIndex...>) noexcept {
    float value = 0;
    static_cast<void>(((static_cast<std::size_t>(dtype) == kIndex &&
                        (value = DTypeTraits<static_cast<DType>(kIndex)>::kLargest) > 0) ||
                       ...));
    return value;
}

template <std::size_t kIndex>
[[nodiscard]] constexpr std::string_view dtype_name() noexcept {
    return DTypeTraits<static_cast<DType>(kIndex)>::kName;
}

// nvcc expands no pack in the name of a static member.
template <std::size_t... kIndex>
[[nodiscard]] constexpr std::array<std::string_view, kNumDTypes> dtype_names(
    std::index_sequence<kIndex...>) noexcept {
    return {dtype_name<kIndex>()...};
}

}  // namespace detail

using AllDTypes = std::make_index_sequence<static_cast<std::size_t>(kNumDTypes)>;

/// Bytes of an element.
[[nodiscard]] KVCORE_HOST_DEVICE constexpr std::int64_t item_size(DType dtype) noexcept {
    return detail::item_size(dtype, AllDTypes{});
}

/// The largest finite value, to which the largest element of a group is scaled.
[[nodiscard]] KVCORE_HOST_DEVICE constexpr float largest(DType dtype) noexcept {
    return detail::largest(dtype, AllDTypes{});
}

/// The smallest scale of quantised elements, for a group of zeros.
constexpr float kSmallestScale = 1e-12F;

/// The names of all dtypes, by their numbers.
constexpr std::array<std::string_view, kNumDTypes> kDTypeNames = detail::dtype_names(AllDTypes{});

namespace detail {

[[nodiscard]] constexpr int count_wide() noexcept {
    int wide = 0;
    while (wide < kNumDTypes && kvcore::item_size(static_cast<DType>(wide)) > 1) ++wide;
    for (int i = wide; i < kNumDTypes; ++i) {
        if (kvcore::item_size(static_cast<DType>(i)) != 1) return -1;
    }
    return wide;
}

}  // namespace detail

constexpr int kNumWide = detail::count_wide();     // dtypes of given K and V
constexpr int kNumNarrow = kNumDTypes - kNumWide;  // dtypes of quantised K and V
static_assert(kNumWide > 0, "wide dtypes come before narrow dtypes in DType");

/// Returns call(std::integral_constant<DType, narrow>{}).
template <int kIndex = kNumWide, class Call>
KVCORE_HOST_DEVICE decltype(auto) with_narrow(DType narrow, const Call& call) {
    using Kind = std::integral_constant<DType, static_cast<DType>(kIndex)>;
    if constexpr (kIndex + 1 == kNumDTypes) {
        return call(Kind{});
    } else {
        if (narrow == Kind::value) return call(Kind{});
        return with_narrow<kIndex + 1>(narrow, call);
    }
}

}  // namespace kvcore
