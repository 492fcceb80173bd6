// SPDX-License-Identifier: Apache-2.0
// A few lanes of floats, and elements of every dtype as such lanes. Included by each ISA's source
// inside its own unnamed namespace: nothing here may be shared between objects that were compiled
// for different processors. KVCORE_LANES is the ISA's number of floats per register.
//
// The vector types are those of GCC and Clang; everything but half precision is plain arithmetic.

using F32 = float __attribute__((vector_size(4 * KVCORE_LANES)));
using U32 = std::uint32_t __attribute__((vector_size(4 * KVCORE_LANES)));
using I32 = std::int32_t __attribute__((vector_size(4 * KVCORE_LANES)));
using U16 = std::uint16_t __attribute__((vector_size(2 * KVCORE_LANES)));
using U8 = std::uint8_t __attribute__((vector_size(KVCORE_LANES)));

constexpr std::int64_t kLanes = KVCORE_LANES;

template <class V>
inline V load(const void* from) {
    V value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}
template <class V>
inline void store(void* to, V value) {
    __builtin_memcpy(to, &value, sizeof value);
}
inline U32 bits(F32 value) { return reinterpret_cast<U32>(value); }
inline F32 floats(U32 value) { return reinterpret_cast<F32>(value); }
inline F32 all(float value) { return value - F32{}; }  // of -0 as well, so nothing is added

// ---- lanes of other widths -----------------------------------------------------------------
// By hand where compilers take the lanes apart one by one. Codes fit the narrower lanes.

#if KVCORE_LANES == 16 && defined(__AVX512F__)
inline U32 widened(U8 codes) {
    return reinterpret_cast<U32>(_mm512_cvtepu8_epi32(reinterpret_cast<__m128i>(codes)));
}
inline U32 widened(U16 codes) {
    return reinterpret_cast<U32>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(codes)));
}
inline U8 to_u8(U32 codes) {
    return reinterpret_cast<U8>(_mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(codes)));
}
inline U16 to_u16(U32 codes) {
    return reinterpret_cast<U16>(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(codes)));
}
#elif KVCORE_LANES == 8 && defined(__AVX2__)
inline U32 widened(U8 codes) {
    long long bytes;
    __builtin_memcpy(&bytes, &codes, sizeof bytes);
    return reinterpret_cast<U32>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes)));
}
inline U32 widened(U16 codes) {
    return reinterpret_cast<U32>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(codes)));
}
inline U8 to_u8(U32 codes) {
    const __m256i words = _mm256_packs_epi32(reinterpret_cast<__m256i>(codes), __m256i{});
    const __m256i bytes = _mm256_packus_epi16(words, __m256i{});
    const __m128i both =
        _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    return load<U8>(&both);
}
inline U16 to_u16(U32 codes) {
    const __m256i words = _mm256_packus_epi32(reinterpret_cast<__m256i>(codes), __m256i{});
    return reinterpret_cast<U16>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(words, 0b1000)));
}
#elif KVCORE_LANES == 4 && defined(__SSE2__)
inline U32 widened(U16 codes) {
    long long words;
    __builtin_memcpy(&words, &codes, sizeof words);
    return reinterpret_cast<U32>(_mm_unpacklo_epi16(_mm_cvtsi64_si128(words), __m128i{}));
}
inline U32 widened(U8 codes) {
    int bytes;
    __builtin_memcpy(&bytes, &codes, sizeof bytes);
    const __m128i words = _mm_unpacklo_epi8(_mm_cvtsi32_si128(bytes), __m128i{});
    return reinterpret_cast<U32>(_mm_unpacklo_epi16(words, __m128i{}));
}
inline U8 to_u8(U32 codes) {
    const __m128i words = _mm_packs_epi32(reinterpret_cast<__m128i>(codes), __m128i{});
    const __m128i bytes = _mm_packus_epi16(words, __m128i{});
    return load<U8>(&bytes);
}
inline U16 to_u16(U32 codes) {
    // Packing saturates as signed: so are the words made, which keeps their bits.
    const __m128i raised = _mm_slli_epi32(reinterpret_cast<__m128i>(codes), 16);
    const __m128i words = _mm_packs_epi32(_mm_srai_epi32(raised, 16), __m128i{});
    return load<U16>(&words);
}
#else
inline U32 widened(U8 codes) { return __builtin_convertvector(codes, U32); }
inline U32 widened(U16 codes) { return __builtin_convertvector(codes, U32); }
inline U8 to_u8(U32 codes) { return __builtin_convertvector(codes, U8); }
inline U16 to_u16(U32 codes) { return __builtin_convertvector(codes, U16); }
#endif

constexpr std::uint32_t kSign = 0x80000000U;
constexpr std::uint32_t kInfinity = 0x7f800000U;

// ---- small floats, as in dtype.hpp -------------------------------------------------------------

inline U32 larger(U32 a, U32 b) { return a > b ? a : b; }
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
#else
    const U32 code = widened(codes);
    const U32 magnitude = code & 0x7fffU;
    const U32 quiet = magnitude > 0x7c00U ? U32{} + 0x400000U : U32{};
    const U32 special = kInfinity | quiet | ((magnitude & 0x3ffU) << 13);
    const U32 finite = bits(widen_magnitude<10, 15>(magnitude));
    return floats((magnitude >= 0x7c00U ? special : finite) | ((code & 0x8000U) << 16));
#endif
}

// ---- elements ----------------------------------------------------------------------------------

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
    static F32 widen(U8 codes) {
        const U32 code = widened(codes);
        const U32 magnitude = code & 0x7fU;
        const U32 finite = bits(widen_magnitude<3, 7>(magnitude));
        const U32 value = magnitude == 0x7fU ? U32{} + 0x7fc00000U : finite;
        return floats(value | ((code & 0x80U) << 24));
    }
    static U8 narrow(F32 value) { return to_u8(narrow_fp8<3, 7, 0x43e00000U>(value)); }
};
template <>
struct Element<DType::kFloat8E5M2> {
    using Storage = U8;
    static F32 widen(U8 codes) { return widen_half(to_u16(widened(codes) << 8)); }
    static U8 narrow(F32 value) { return to_u8(narrow_fp8<2, 15, 0x47600000U>(value)); }
};
template <>
struct Element<DType::kInt8> {
    using Storage = U8;
    static F32 widen(U8 codes) {
        const U32 code = widened(codes) << 24;
        return __builtin_convertvector(reinterpret_cast<I32>(code) >> 24, F32);
    }
    static U8 narrow(F32 value) {
        const F32 high = value > 127.0F ? all(127.0F) : value;
        const F32 clipped = high < -128.0F ? all(-128.0F) : high;
        const F32 number = value == value ? clipped : F32{};
        return to_u8(bits(number + 12582912.0F) & 0xffU);
    }
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
