// SPDX-License-Identifier: Apache-2.0
// Elements of every dtype as lanes of floats, bit by bit as in dtype.hpp. Included by each ISA's
// source inside its own unnamed namespace, after lanes.hpp.

// ---- small floats, as in dtype.hpp -------------------------------------------------------------

template <class V>
inline V larger(V a, V b) {
    return a > b ? a : b;
}
inline U32 smaller(U32 a, U32 b) { return a < b ? a : b; }

template <int kMantissa, int kBias>
inline U32 narrow_magnitude(U32 magnitude) {
    constexpr int kDropped = 23 - kMantissa;
    constexpr std::uint32_t kSmallestNormal = static_cast<std::uint32_t>(128 - kBias) << 23;
    const U32 binade = larger(magnitude & kInfinity, U32{} + kSmallestNormal);
    const U32 unit = binade + (static_cast<std::uint32_t>(kDropped) << 23);
    const U32 digits = bits(floats(magnitude) + floats(unit)) - unit;
    return ((binade - kSmallestNormal) >> kDropped) + digits;
}

template <int kMantissa, int kBias>
inline F32 widen_magnitude(U32 code) {
    constexpr std::uint32_t kUnit = static_cast<std::uint32_t>(128 - kBias - kMantissa) << 23;
    constexpr std::uint32_t kRebias = static_cast<std::uint32_t>(127 - kBias) << 23;
    const F32 small = __builtin_convertvector(reinterpret_cast<I32>(code), F32);
    const F32 subnormal = small * floats(U32{} + kUnit);
    const F32 normal = floats((code << (23 - kMantissa)) + kRebias);
    return code < (1U << kMantissa) ? subnormal : normal;
}

// Saturates; NaN is 0x7f.
template <int kMantissa, int kBias, std::uint32_t kLargest>
inline U32 narrow_fp8(F32 value) {
    const U32 magnitude = bits(value) & ~kSign;
    const U32 clipped = smaller(magnitude, U32{} + kLargest);
    const U32 code = narrow_magnitude<kMantissa, kBias>(clipped) | ((bits(value) & kSign) >> 24);
    return magnitude > kInfinity ? U32{} + 0x7fU : code;
}

// ---- half precision ----------------------------------------------------------------------------

inline U16 narrow_half(F32 value) {
#if KVCORE_LANES == 16 && defined(__AVX512F__)
    return reinterpret_cast<U16>(_mm512_cvtps_ph(reinterpret_cast<__m512>(value), 0));
#elif KVCORE_LANES == 8 && defined(__F16C__)
    return reinterpret_cast<U16>(_mm256_cvtps_ph(reinterpret_cast<__m256>(value), 0));
#elif KVCORE_LANES == 4 && defined(__aarch64__)
    return reinterpret_cast<U16>(vcvt_f16_f32(reinterpret_cast<float32x4_t>(value)));
#else
    const U32 magnitude = bits(value) & ~kSign;
    constexpr std::uint32_t kTwoTo16 = 143U << 23;  // whose code is infinity's
    const U32 clipped = smaller(magnitude, U32{} + kTwoTo16);
    const U32 quiet = 0x7e00U | ((magnitude >> 13) & 0x3ffU);
    const U32 code = magnitude > kInfinity ? quiet : narrow_magnitude<10, 15>(clipped);
    return to_u16(code | ((bits(value) & kSign) >> 16));
#endif
}

inline F32 widen_half(U16 codes) {
#if KVCORE_LANES == 16 && defined(__AVX512F__)
    return reinterpret_cast<F32>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(codes)));
#elif KVCORE_LANES == 8 && defined(__F16C__)
    return reinterpret_cast<F32>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(codes)));
#elif KVCORE_LANES == 4 && defined(__aarch64__)
    return reinterpret_cast<F32>(vcvt_f32_f16(reinterpret_cast<float16x4_t>(codes)));
#else
    const U32 code = widened(codes);
    const U32 magnitude = code & 0x7fffU;
    const U32 quiet = magnitude > 0x7c00U ? U32{} + 0x400000U : U32{};
    const U32 special = kInfinity | quiet | ((magnitude & 0x3ffU) << 13);
    const U32 finite = bits(widen_magnitude<10, 15>(magnitude));
    return floats((magnitude >= 0x7c00U ? special : finite) | ((code & 0x8000U) << 16));
#endif
}

#if defined(KVCORE_HALVES)
// Rounds to the nearest half with kMantissa bits of fraction; the largest such half is not
// exceeded. Adding a number whose last bit weighs as much as the last bit to keep rounds the value
// to that bit; subtracting the number again is exact.
template <int kMantissa>
inline U16 narrow_to_bits(F32 value) {
    const F32 exponent = floats(bits(value) & kInfinity);
    const F32 binade = greater(exponent, all(0x1p-14F));
    constexpr float kUnit = static_cast<float>(3 << (22 - kMantissa));
    const F32 rounded = fused(binade, all(-kUnit), fused(binade, all(kUnit), value));
    return narrow_half(floats(bits(rounded) | (bits(value) & kSign)));
}
#endif

// ---- elements ----------------------------------------------------------------------------------
// `narrow` takes every float. `narrow_plain` takes floats up to the largest code, after a
// multiplication by kPlainFactor; it returns the same codes, but is faster.

template <DType kDType>
struct Element;

template <>
struct Element<DType::kFloat32> {
    using Storage = F32;
    static F32 widen(F32 value) { return value; }
    static F32 narrow(F32 value) { return value; }
};
template <>
struct Element<DType::kFloat16> {
    using Storage = U16;
    static F32 widen(U16 codes) { return widen_half(codes); }
    static U16 narrow(F32 value) { return narrow_half(value); }
};
template <>
struct Element<DType::kBFloat16> {
    using Storage = U16;
    static F32 widen(U16 codes) { return floats(widened(codes) << 16); }
    static U16 narrow(F32 value) {
        const U32 rounded = (bits(value) + 0x7fffU + ((bits(value) >> 16) & 1)) >> 16;
        const U32 quiet = (bits(value) >> 16) | 0x40U;
        const U32 code = (bits(value) & ~kSign) > kInfinity ? quiet : rounded;
        return to_u16(code);
    }
};
template <>
struct Element<DType::kFloat8E4M3FN> {
    using Storage = U8;
#if defined(KVCORE_HALVES)
    // Seven bits of a half: its exponents reach eight binades lower.
    static constexpr float kPlainFactor = 0x1p-8F;
    static U8 narrow_plain(F32 value) {
        const U16 half = narrow_to_bits<3>(value);
        return high_bytes(((half << 1) & 0x7fff) | (half & 0x8000));
    }
    static F32 widen(U8 codes) {
        const F32 value = widen_half((signed_words(codes) << 7) & 0xbfff) * all(0x1p8F);
        const U32 nan = (bits(value) & kSign) | 0x7fc00000U;
        return floats((bits(value) & ~kSign) == 0x43f00000U ? nan : bits(value));
    }
#else
    static constexpr float kPlainFactor = 1;
    static U8 narrow_plain(F32 value) {
        return to_u8(narrow_magnitude<3, 7>(bits(value) & ~kSign) | ((bits(value) & kSign) >> 24));
    }
    static F32 widen(U8 codes) {
        const U32 code = widened(codes);
        const U32 magnitude = code & 0x7fU;
        const U32 finite = bits(widen_magnitude<3, 7>(magnitude));
        const U32 value = magnitude == 0x7fU ? U32{} + 0x7fc00000U : finite;
        return floats(value | ((code & 0x80U) << 24));
    }
#endif
    static U8 narrow(F32 value) { return to_u8(narrow_fp8<3, 7, 0x43e00000U>(value)); }
};
template <>
struct Element<DType::kFloat8E5M2> {
    using Storage = U8;
    static constexpr float kPlainFactor = 1;
#if defined(KVCORE_HALVES)
    static U8 narrow_plain(F32 value) { return high_bytes(narrow_to_bits<2>(value)); }
    static F32 widen(U8 codes) { return widen_half(signed_words(codes) << 8); }
#else
    static U8 narrow_plain(F32 value) {
        return to_u8(narrow_magnitude<2, 15>(bits(value) & ~kSign) | ((bits(value) & kSign) >> 24));
    }
    static F32 widen(U8 codes) { return widen_half(to_u16(widened(codes) << 8)); }
#endif
    static U8 narrow(F32 value) { return to_u8(narrow_fp8<2, 15, 0x47600000U>(value)); }
};
template <>
struct Element<DType::kInt8> {
    using Storage = U8;
    static constexpr float kPlainFactor = 1;
    static F32 widen(U8 codes) { return __builtin_convertvector(signed_lanes(codes), F32); }
    static U8 narrow_plain(F32 value) { return low_bytes(nearest(value)); }
    static U8 narrow(F32 value) {
        const F32 high = value > 127.0F ? all(127.0F) : value;
        const F32 clipped = high < -128.0F ? all(-128.0F) : high;
        return narrow_plain(value == value ? clipped : F32{});
    }
};

// ---- magnitudes, for maxima --------------------------------------------------------------------

// The largest lane.
inline std::uint32_t largest_lane(U32 value) {
#if KVCORE_LANES == 16 && defined(__AVX512F__)
    return _mm512_reduce_max_epu32(reinterpret_cast<__m512i>(value));
#elif KVCORE_LANES == 4 && defined(__aarch64__)
    return vmaxvq_u32(reinterpret_cast<uint32x4_t>(value));
#else
    std::uint32_t lanes[kLanes];
    store(lanes, value);
    for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
        for (std::int64_t i = 0; i < half; ++i) {
            lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
        }
    }
    return lanes[0];
#endif
}

// A whole register of elements without their signs, in the order of the numbers.
template <DType kDType>
struct Magnitudes {  // of 16 bits
    using Bits = std::int16_t __attribute__((vector_size(4 * KVCORE_LANES)));
    static Bits of(Bits codes) { return codes & 0x7fff; }
    static std::uint32_t largest(Bits most) {
        const U32 pairs = reinterpret_cast<U32>(most);
        const std::uint32_t code = largest_lane(larger(pairs & 0xffffU, pairs >> 16));
        const U16 codes = U16{} + static_cast<std::uint16_t>(code);
        std::uint32_t lanes[kLanes];
        store(lanes, bits(Element<kDType>::widen(codes)));
        return lanes[0];
    }
};
template <>
struct Magnitudes<DType::kFloat32> {
    using Bits = I32;
    static Bits of(Bits codes) { return codes & 0x7fffffff; }
    static std::uint32_t largest(Bits most) { return largest_lane(reinterpret_cast<U32>(most)); }
};

// The first `n` < kLanes elements of a register; the others are zeros.
template <class Storage>
inline Storage load_some(const void* from, std::int64_t n) {
    Storage value{};
    __builtin_memcpy(&value, from, static_cast<std::size_t>(n) * (sizeof value / kLanes));
    return value;
}
template <class Storage>
inline void store_some(void* to, Storage value, std::int64_t n) {
    __builtin_memcpy(to, &value, static_cast<std::size_t>(n) * (sizeof value / kLanes));
}
