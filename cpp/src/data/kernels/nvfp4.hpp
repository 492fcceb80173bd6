// SPDX-License-Identifier: Apache-2.0
// Converts blocks of nvfp4, with the same bits as kvcore/quantize.hpp. Each ISA's source includes
// this file inside its own unnamed namespace, after quantize.hpp. The sizes of tiles count
// elements; scales are bytes.

constexpr std::int64_t kBlock = 16;  // elements
constexpr std::int64_t kBlockCodes = 8;

// ---- two codes in a byte -----------------------------------------------------------------------

using Bytes8 = std::uint8_t __attribute__((vector_size(8)));
using Words8 = std::uint16_t __attribute__((vector_size(16)));

// Packs sixteen codes, one in each byte, into eight bytes.
inline void store_halves(std::byte* to, const std::uint8_t* codes) {
    const auto pairs = load<Words8>(codes);
    const Words8 bytes = (pairs | (pairs >> 4)) & 0xff;
#if defined(__SSE2__)
    const __m128i packed = _mm_packus_epi16(reinterpret_cast<__m128i>(bytes), __m128i{});
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), packed);
#else
    store(to, __builtin_convertvector(bytes, Bytes8));
#endif
}

// Unpacks eight bytes into sixteen codes, one in each byte.
inline void load_halves(const std::byte* from, std::uint8_t* codes) {
#if defined(__SSE2__)
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    const auto words = reinterpret_cast<Words8>(_mm_unpacklo_epi8(bytes, __m128i{}));
#else
    const auto words = __builtin_convertvector(load<Bytes8>(from), Words8);
#endif
    store(codes, (words | (words << 4)) & 0x0f0f);
}

// Rounds to the nearest code, ties to even, and saturates; NaN becomes 0.
inline U8 narrow_e2m1(F32 value) {
    constexpr std::uint32_t kSix = 0x40c00000U;
    const U32 magnitude = bits(value) & ~kSign;
    const U32 clipped = smaller(magnitude, U32{} + kSix);
    const U32 code = narrow_magnitude<1, 1>(clipped) | ((bits(value) & kSign) >> 28);
    return to_u8(magnitude > kInfinity ? U32{} : code);
}

inline F32 widen_e2m1(U8 codes) {
    const U32 code = widened(codes);
#if KVCORE_LANES == 16 && defined(__AVX512F__)
    const __m512 values = _mm512_setr_ps(0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F, -0.0F,
                                         -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F);
    return reinterpret_cast<F32>(_mm512_permutexvar_ps(reinterpret_cast<__m512i>(code), values));
#elif KVCORE_LANES == 8 && defined(__AVX2__)
    const __m256 values = _mm256_setr_ps(0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F);
    const __m256 found = _mm256_permutevar8x32_ps(values, reinterpret_cast<__m256i>(code));
    return floats(reinterpret_cast<U32>(found) | ((code & 8U) << 28));
#else
    return floats(bits(widen_magnitude<1, 1>(code & 7U)) | ((code & 8U) << 28));
#endif
}

// ---- blocks ------------------------------------------------------------------------------------

template <DType kIn>
inline float largest_finite(const std::byte* block) {
    U32 most{};
    for (std::int64_t i = 0; i < kBlock; i += kLanes) {
        const U32 magnitude = bits(load_elements<kIn>(block, i, kLanes)) & ~kSign;
        most = larger(magnitude < kInfinity ? magnitude : U32{}, most);
    }
    return float_from(largest_lane(most));
}

template <DType kIn>
inline void store_block(const std::byte* from, std::byte* to, float factor) {
    std::uint8_t codes[kBlock];
    for (std::int64_t i = 0; i < kBlock; i += kLanes) {
        store(codes + i, narrow_e2m1(load_elements<kIn>(from, i, kLanes) * factor));
    }
    store_halves(to, codes);
}

// Computes the scales of kLanes blocks together.
template <DType kIn>
void quantize_nvfp4(const Tile& tile, float global_scale) {
    const float divisor = 6.0F * global_scale;
    for_heads(tile, [&](const std::byte* from, std::byte* to, std::int64_t at) {
        for_lanes(tile.dim / kBlock, [&](std::int64_t first, std::int64_t count) {
            const std::byte* block = from + first * kBlock * item_size(kIn);
            float most[kLanes] = {};
            for (std::int64_t i = 0; i < count; ++i) {
                most[i] = largest_finite<kIn>(block + i * kBlock * item_size(kIn));
            }
            const U32 nearest_scale = narrow_fp8<3, 7, 0x43e00000U>(load<F32>(most) / divisor);
            const U32 scale = larger(nearest_scale, U32{} + 1U);
            store_codes(tile.new_scales + at + first, count, to_u8(scale));
            const F32 factors = 1.0F / (widen_magnitude<3, 7>(scale) * global_scale);
            float factor[kLanes];
            store(factor, factors);
            for (std::int64_t i = 0; i < count; ++i) {
                store_block<kIn>(block + i * kBlock * item_size(kIn),
                                 to + (first + i) * kBlockCodes, factor[i]);
            }
        });
    });
}

template <DType kOut>
void dequantize_nvfp4(const Tile& tile, float global_scale) {
    using Scale = Element<DType::kFloat8E4M3FN>;
    for_heads(tile, [&](const std::byte* from, std::byte* to, std::int64_t at) {
        for_lanes(tile.dim / kBlock, [&](std::int64_t first, std::int64_t count) {
            const std::byte* scales = tile.scales + at + first;
            const U8 of_blocks = count == kLanes ? load<U8>(scales) : load_some<U8>(scales, count);
            float factor[kLanes];
            store(factor, Scale::widen(of_blocks) * global_scale);
            for (std::int64_t i = 0; i < count; ++i) {
                std::uint8_t codes[kBlock];
                load_halves(from + (first + i) * kBlockCodes, codes);
                std::byte* block = to + (first + i) * kBlock * item_size(kOut);
                for (std::int64_t j = 0; j < kBlock; j += kLanes) {
                    store_elements<kOut>(block, j, kLanes,
                                         widen_e2m1(load<U8>(codes + j)) * factor[i]);
                }
            }
        });
    });
}
