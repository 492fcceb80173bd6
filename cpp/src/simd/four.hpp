// SPDX-License-Identifier: Apache-2.0
// Four registers of elements at once, where that saves shuffling. Included by each ISA's source
// inside its own unnamed namespace, after lanes.hpp.

// Registers one by one, for dtypes without faster code below.
template <DType kOut>
inline void store_each(std::byte* to, const F32 (&values)[4]) {
    for (std::int64_t i = 0; i < 4; ++i)
        store(to + i * kLanes, Element<kOut>::narrow_plain(values[i]));
}
template <DType kIn>
inline bool load_each(const std::byte* from, F32 (&values)[4]) {
    constexpr float kFactor = Element<kIn>::kPlainFactor;
    for (std::int64_t i = 0; i < 4; ++i) {
        values[i] = Element<kIn>::widen(load<U8>(from + i * kLanes)) * kFactor;
    }
    return true;
}

// `store_four` stores plain values: their codes are packed together. `load_four` loads the values
// of codes times kPlainFactor; it may return false if any code is NaN.
#if KVCORE_LANES == 16 && defined(__AVX512F__)
inline __m512i two_halves(U16 a, U16 b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(reinterpret_cast<__m256i>(a)),
                              reinterpret_cast<__m256i>(b), 1);
}
inline void store_four_high_bytes(std::byte* to, __m512i a, __m512i b) {
    const __m512i packed = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
    _mm512_storeu_si512(
        to, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed));
}
template <DType kOut>
inline void store_four(std::byte* to, const F32 (&values)[4]) {
    if constexpr (kOut == DType::kInt8) {
        const auto words = [&](std::int64_t i) {
            return _mm512_packs_epi32(reinterpret_cast<__m512i>(nearest(values[i])),
                                      reinterpret_cast<__m512i>(nearest(values[i + 1])));
        };
        const __m512i order =
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        _mm512_storeu_si512(
            to, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(words(0), words(2))));
    } else if constexpr (kOut == DType::kFloat8E4M3FN || kOut == DType::kFloat8E5M2) {
        constexpr int kMantissa = kOut == DType::kFloat8E4M3FN ? 3 : 2;
        __m512i low =
            two_halves(narrow_to_bits<kMantissa>(values[0]), narrow_to_bits<kMantissa>(values[1]));
        __m512i high =
            two_halves(narrow_to_bits<kMantissa>(values[2]), narrow_to_bits<kMantissa>(values[3]));
        if constexpr (kOut == DType::kFloat8E4M3FN) {
            // The lowest 15 bits go up by one, the sign stays.
            const __m512i sign = _mm512_set1_epi16(static_cast<short>(0x8000));
            low = _mm512_ternarylogic_epi32(sign, low, _mm512_add_epi16(low, low), 0xca);
            high = _mm512_ternarylogic_epi32(sign, high, _mm512_add_epi16(high, high), 0xca);
        }
        store_four_high_bytes(to, low, high);
    } else {
        store_each<kOut>(to, values);
    }
}

template <DType kIn>
inline bool load_four(const std::byte* from, F32 (&values)[4]) {
    if constexpr (kIn == DType::kFloat8E4M3FN || kIn == DType::kFloat8E5M2) {
        const __m512i codes = _mm512_loadu_si512(from);
        if constexpr (kIn == DType::kFloat8E4M3FN) {
            const __m512i all = _mm512_set1_epi8(-1);
            const __m512i magnitudes =
                _mm512_or_si512(codes, _mm512_set1_epi8(static_cast<char>(0x80)));
            if (_mm512_cmpeq_epi8_mask(magnitudes, all) != 0) return false;
        }
        for (std::int64_t i = 0; i < 2; ++i) {
            const __m512i words = _mm512_cvtepi8_epi16(load<__m256i>(from + 2 * i * kLanes));
            const __m512i halves =
                kIn == DType::kFloat8E4M3FN
                    ? _mm512_and_si512(_mm512_slli_epi16(words, 7),
                                       _mm512_set1_epi16(static_cast<short>(0xbfff)))
                    : _mm512_slli_epi16(words, 8);
            values[2 * i] = widen_half(reinterpret_cast<U16>(_mm512_castsi512_si256(halves)));
            values[2 * i + 1] =
                widen_half(reinterpret_cast<U16>(_mm512_extracti64x4_epi64(halves, 1)));
        }
        return true;
    } else {
        return load_each<kIn>(from, values);
    }
}

// Stores values whose NaN have no bits that rounding could carry away.
template <DType kOut>
inline void store_four_wide(std::byte* to, const F32 (&values)[4]) {
    if constexpr (kOut == DType::kBFloat16) {
        const auto rounded = [&](std::int64_t i) {
            const U32 code = bits(values[i]);
            return reinterpret_cast<__m512i>((code + 0x7fffU + ((code >> 16) & 1)) >> 16);
        };
        const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
        for (std::int64_t i = 0; i < 4; i += 2) {
            const __m512i words = _mm512_packus_epi32(rounded(i), rounded(i + 1));
            _mm512_storeu_si512(to + i * 2 * kLanes, _mm512_permutexvar_epi64(order, words));
        }
    } else {
        for (std::int64_t i = 0; i < 4; ++i) {
            store(to + i * kLanes * item_size(kOut), Element<kOut>::narrow(values[i]));
        }
    }
}
#elif KVCORE_LANES == 8 && defined(KVCORE_HALVES)
template <DType kOut>
inline void store_four(std::byte* to, const F32 (&values)[4]) {
    if constexpr (kOut == DType::kInt8) {
        const auto words = [&](std::int64_t i) {
            return _mm256_packs_epi32(reinterpret_cast<__m256i>(nearest(values[i])),
                                      reinterpret_cast<__m256i>(nearest(values[i + 1])));
        };
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        const __m256i bytes = _mm256_packs_epi16(words(0), words(2));
        store(to, _mm256_permutevar8x32_epi32(bytes, order));
    } else if constexpr (kOut == DType::kFloat8E4M3FN || kOut == DType::kFloat8E5M2) {
        constexpr int kMantissa = kOut == DType::kFloat8E4M3FN ? 3 : 2;
        const auto bytes = [&](std::int64_t i) {
            U16 words = narrow_to_bits<kMantissa>(values[i]);
            if (kOut == DType::kFloat8E4M3FN) words = ((words << 1) & 0x7fff) | (words & 0x8000);
            return reinterpret_cast<__m128i>(words >> 8);
        };
        store(to, _mm_packus_epi16(bytes(0), bytes(1)));
        store(to + 16, _mm_packus_epi16(bytes(2), bytes(3)));
    } else {
        store_each<kOut>(to, values);
    }
}
template <DType kIn>
inline bool load_four(const std::byte* from, F32 (&values)[4]) {
    if constexpr (kIn == DType::kFloat8E4M3FN) {
        const __m256i sign = _mm256_set1_epi8(static_cast<char>(0x80));
        const __m256i magnitudes = _mm256_or_si256(load<__m256i>(from), sign);
        const __m256i is_nan = _mm256_cmpeq_epi8(magnitudes, _mm256_set1_epi8(-1));
        if (_mm256_movemask_epi8(is_nan) != 0) return false;
        for (std::int64_t i = 0; i < 4; ++i) {
            const auto codes = load<U8>(from + i * kLanes);
            values[i] = widen_half((signed_words(codes) << 7) & 0xbfff);
        }
        return true;
    } else {
        return load_each<kIn>(from, values);
    }
}
template <DType kOut>
inline void store_four_wide(std::byte* to, const F32 (&values)[4]) {
    if constexpr (kOut == DType::kBFloat16) {
        const auto rounded = [&](std::int64_t i) {
            const U32 code = bits(values[i]);
            return reinterpret_cast<__m256i>((code + 0x7fffU + ((code >> 16) & 1)) >> 16);
        };
        for (std::int64_t i = 0; i < 4; i += 2) {
            const __m256i words = _mm256_packus_epi32(rounded(i), rounded(i + 1));
            store(to + i * 2 * kLanes, _mm256_permute4x64_epi64(words, 0b11011000));
        }
    } else {
        for (std::int64_t i = 0; i < 4; ++i) {
            store(to + i * kLanes * item_size(kOut), Element<kOut>::narrow(values[i]));
        }
    }
}
#else
template <DType kOut>
inline void store_four(std::byte* to, const F32 (&values)[4]) {
    store_each<kOut>(to, values);
}
template <DType kIn>
inline bool load_four(const std::byte* from, F32 (&values)[4]) {
    return load_each<kIn>(from, values);
}
template <DType kOut>
inline void store_four_wide(std::byte* to, const F32 (&values)[4]) {
    for (std::int64_t i = 0; i < 4; ++i) {
        store(to + i * kLanes * item_size(kOut), Element<kOut>::narrow(values[i]));
    }
}
#endif
