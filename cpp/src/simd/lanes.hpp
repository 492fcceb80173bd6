// SPDX-License-Identifier: Apache-2.0
// A few lanes of floats, and operations on them. Included by each ISA's source inside its own
// unnamed namespace: objects that were compiled for different processors must share nothing here.
// KVCORE_LANES is the ISA's number of floats per register.
//
// The vector types are extensions of GCC and Clang. Other widths and the conversions of halves are
// written by hand for SSE2, AVX2, AVX-512 and NEON; everything else is plain arithmetic.

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
// Written by hand where compilers take the lanes apart one by one. Codes fit the narrower lanes.

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
    // Packing saturates signed words. So the words are made signed, which keeps their bits.
    const __m128i raised = _mm_slli_epi32(reinterpret_cast<__m128i>(codes), 16);
    const __m128i words = _mm_packs_epi32(_mm_srai_epi32(raised, 16), __m128i{});
    return load<U16>(&words);
}
#elif KVCORE_LANES == 4 && defined(__aarch64__)
inline uint8x8_t four_bytes(U8 bytes) {
    std::uint32_t packed;
    __builtin_memcpy(&packed, &bytes, sizeof packed);
    return vcreate_u8(packed);
}
inline U8 low_four(uint8x8_t bytes) {
    const std::uint32_t packed = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
    return load<U8>(&packed);
}
inline U32 widened(U16 codes) {
    return reinterpret_cast<U32>(vmovl_u16(reinterpret_cast<uint16x4_t>(codes)));
}
inline U32 widened(U8 codes) {
    return reinterpret_cast<U32>(vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(codes)))));
}
inline U16 to_u16(U32 codes) {
    return reinterpret_cast<U16>(vmovn_u32(reinterpret_cast<uint32x4_t>(codes)));
}
inline U8 to_u8(U32 codes) {
    const uint16x4_t words = vmovn_u32(reinterpret_cast<uint32x4_t>(codes));
    return low_four(vmovn_u16(vcombine_u16(words, words)));
}
#else
inline U32 widened(U8 codes) { return __builtin_convertvector(codes, U32); }
inline U32 widened(U16 codes) { return __builtin_convertvector(codes, U32); }
inline U8 to_u8(U32 codes) { return __builtin_convertvector(codes, U8); }
inline U16 to_u16(U32 codes) { return __builtin_convertvector(codes, U16); }
#endif

// The nearest integers, ties to even, of moderate numbers.
inline U32 nearest(F32 value) {
#if KVCORE_LANES == 16 && defined(__AVX512F__)
    return reinterpret_cast<U32>(_mm512_cvtps_epi32(reinterpret_cast<__m512>(value)));
#elif KVCORE_LANES == 8 && defined(__AVX2__)
    return reinterpret_cast<U32>(_mm256_cvtps_epi32(reinterpret_cast<__m256>(value)));
#elif KVCORE_LANES == 4 && defined(__SSE2__)
    return reinterpret_cast<U32>(_mm_cvtps_epi32(reinterpret_cast<__m128>(value)));
#elif KVCORE_LANES == 4 && defined(__aarch64__)
    return reinterpret_cast<U32>(vcvtnq_s32_f32(reinterpret_cast<float32x4_t>(value)));
#else
    return bits(value + 12582912.0F);
#endif
}

// The lowest byte of each lane.
inline U8 low_bytes(U32 lanes) {
#if KVCORE_LANES == 16 && defined(__AVX512F__)
    return to_u8(lanes);  // drops the others itself
#else
    return to_u8(lanes & 0xffU);
#endif
}

constexpr std::uint32_t kSign = 0x80000000U;
constexpr std::uint32_t kInfinity = 0x7f800000U;

// ---- arithmetic --------------------------------------------------------------------------------

// a * b + c, rounded once where the instruction set can.
inline F32 fused(F32 a, F32 b, F32 c) {
#if KVCORE_LANES == 16 && defined(__AVX512F__)
    return reinterpret_cast<F32>(_mm512_fmadd_ps(
        reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif KVCORE_LANES == 8 && defined(__FMA__)
    return reinterpret_cast<F32>(_mm256_fmadd_ps(
        reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#elif KVCORE_LANES == 4 && defined(__aarch64__)
    return reinterpret_cast<F32>(vfmaq_f32(reinterpret_cast<float32x4_t>(c),
                                           reinterpret_cast<float32x4_t>(a),
                                           reinterpret_cast<float32x4_t>(b)));
#else
    return a * b + c;
#endif
}

// The greater value; b if either is NaN.
inline F32 greater(F32 a, F32 b) {
#if KVCORE_LANES == 16 && defined(__AVX512F__)
    return reinterpret_cast<F32>(
        _mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif KVCORE_LANES == 8 && defined(__AVX__)
    return reinterpret_cast<F32>(
        _mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
    return a > b ? a : b;
#endif
}

// ---- where the instruction set converts halves: bytes of 16-bit lanes
// ----------------------------

inline I32 signed_lanes(U8 bytes) {
#if KVCORE_LANES == 16 && defined(__AVX512F__)
    return reinterpret_cast<I32>(_mm512_cvtepi8_epi32(reinterpret_cast<__m128i>(bytes)));
#elif KVCORE_LANES == 8 && defined(__AVX2__)
    long long packed;
    __builtin_memcpy(&packed, &bytes, sizeof packed);
    return reinterpret_cast<I32>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(packed)));
#elif KVCORE_LANES == 4 && defined(__aarch64__)
    const int16x8_t words = vmovl_s8(vreinterpret_s8_u8(four_bytes(bytes)));
    return reinterpret_cast<I32>(vmovl_s16(vget_low_s16(words)));
#else
    return reinterpret_cast<I32>(widened(bytes) << 24) >> 24;
#endif
}

#if KVCORE_LANES == 16 && defined(__AVX512F__)
#define KVCORE_HALVES 1
inline U8 high_bytes(U16 words) {
    return reinterpret_cast<U8>(
        _mm256_cvtepi16_epi8(_mm256_srli_epi16(reinterpret_cast<__m256i>(words), 8)));
}
inline U16 signed_words(U8 bytes) {
    return reinterpret_cast<U16>(_mm256_cvtepi8_epi16(reinterpret_cast<__m128i>(bytes)));
}
#elif KVCORE_LANES == 8 && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KVCORE_HALVES 1
inline U8 high_bytes(U16 words) {
    const __m128i bytes = _mm_srli_epi16(reinterpret_cast<__m128i>(words), 8);
    const __m128i packed = _mm_packus_epi16(bytes, bytes);
    return load<U8>(&packed);
}
inline U16 signed_words(U8 bytes) {
    long long packed;
    __builtin_memcpy(&packed, &bytes, sizeof packed);
    return reinterpret_cast<U16>(_mm_cvtepi8_epi16(_mm_cvtsi64_si128(packed)));
}
#elif KVCORE_LANES == 4 && defined(__aarch64__)
#define KVCORE_HALVES 1
inline U8 high_bytes(U16 words) {
    const auto four = reinterpret_cast<uint16x4_t>(words);
    return low_four(vshrn_n_u16(vcombine_u16(four, four), 8));
}
inline U16 signed_words(U8 bytes) {
    return reinterpret_cast<U16>(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(bytes)))));
}
#endif
