// SPDX-License-Identifier: Apache-2.0
// Arithmetic on lanes: the same operations in the same order for every number of lanes, so that
// instruction sets with a fused multiply-add agree to the last bit. Included by each ISA's source
// inside its own unnamed namespace, after lanes.hpp.

// Register blocks are arrays: unless their loops are unrolled early, they are kept on the stack.
#if defined(__clang__)
#define KVCORE_UNROLL _Pragma("unroll")
#else
#define KVCORE_UNROLL _Pragma("GCC unroll 16")
#endif

// The same value, which the compiler may not load anew for each use.
inline F32 keep_in_register(F32 value) {
#if defined(__AVX512F__)
    asm("" : "+v"(value));
#endif
    return value;
}

// ---- sixteen floats, in one or more registers --------------------------------------------------

constexpr int kSixteen = 16 / static_cast<int>(kLanes);  // registers

using F4 = float __attribute__((vector_size(16)));

// Lanes i, i + 4, i + 8, i + 12, added as (0 + 8) + (4 + 12).
inline F4 fold(const F32* sixteen) {
#if KVCORE_LANES == 16
    const auto x = sixteen[0];
    const auto half = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                      __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    return __builtin_shufflevector(half, half, 0, 1, 2, 3) +
           __builtin_shufflevector(half, half, 4, 5, 6, 7);
#elif KVCORE_LANES == 8
    const auto half = sixteen[0] + sixteen[1];
    return __builtin_shufflevector(half, half, 0, 1, 2, 3) +
           __builtin_shufflevector(half, half, 4, 5, 6, 7);
#else
    return (sixteen[0] + sixteen[2]) + (sixteen[1] + sixteen[3]);
#endif
}

// The sums of four folded registers, (0 + 2) + (1 + 3) each.
inline F4 sums_of(F4 a, F4 b, F4 c, F4 d) {
    const F4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) +  // a0+a2 b0+b2 a1+a3 b1+b3
                  __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const F4 cd =
        __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) +
           __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

// The sum of sixteen floats.
inline float sum_of(const F32* sixteen) {
    const F4 four = fold(sixteen);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// The greatest of a register's lanes.
inline float greatest_lane(F32 x) {
    const auto most = [](auto a, auto b) { return a > b ? a : b; };
#if KVCORE_LANES == 16
    const auto eight = most(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7),
                            __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
#else
    const auto eight = x;
#endif
#if KVCORE_LANES >= 8
    const F4 four = most(__builtin_shufflevector(eight, eight, 0, 1, 2, 3),
                         __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
#else
    const F4 four = eight;
#endif
    const F4 two = most(four, __builtin_shufflevector(four, four, 2, 3, 0, 1));
    return two[0] > two[1] ? two[0] : two[1];
}

#if KVCORE_LANES == 16 && defined(__AVX512F__)
template <int kWhich>
inline F32 shuffled(F32 a, F32 b) {  // in each quarter: two of a, two of b
    return reinterpret_cast<F32>(
        _mm512_shuffle_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), kWhich));
}
template <int kWhich>
inline F32 quarters(F32 a, F32 b) {  // two of a, two of b
    return reinterpret_cast<F32>(
        _mm512_shuffle_f32x4(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), kWhich));
}

// Quarter q has the sums of a[q], b[q], c[q], d[q], added as `sums_of` does.
inline F32 sums_of_sixteen(const F32 (*a)[1], const F32 (*b)[1], const F32 (*c)[1],
                           const F32 (*d)[1]) {
    const auto folded = [](const F32(*x)[1]) {
        const F32 low = quarters<0x44>(x[0][0], x[1][0]) + quarters<0xee>(x[0][0], x[1][0]);
        const F32 high = quarters<0x44>(x[2][0], x[3][0]) + quarters<0xee>(x[2][0], x[3][0]);
        return quarters<0x88>(low, high) + quarters<0xdd>(low, high);
    };
    const auto half = [](F32 x, F32 y) { return shuffled<0x44>(x, y) + shuffled<0xee>(x, y); };
    const F32 ab = half(folded(a), folded(b));
    const F32 cd = half(folded(c), folded(d));
    return shuffled<0x88>(ab, cd) + shuffled<0xdd>(ab, cd);
}

inline void store_quarters(F32 x, float* to, std::int64_t stride) {
    const auto all_of = reinterpret_cast<__m512>(x);
    _mm_storeu_ps(to, _mm512_castps512_ps128(all_of));
    _mm_storeu_ps(to + stride, _mm512_extractf32x4_ps(all_of, 1));
    _mm_storeu_ps(to + 2 * stride, _mm512_extractf32x4_ps(all_of, 2));
    _mm_storeu_ps(to + 3 * stride, _mm512_extractf32x4_ps(all_of, 3));
}
#elif KVCORE_LANES == 8 && defined(__AVX__)
template <int kWhich>
inline F32 shuffled(F32 a, F32 b) {
    return reinterpret_cast<F32>(
        _mm256_shuffle_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), kWhich));
}
inline void store_quarters(F32 x, float* to, std::int64_t stride) {
    const auto all_of = reinterpret_cast<__m256>(x);
    _mm_storeu_ps(to, _mm256_castps256_ps128(all_of));
    _mm_storeu_ps(to + stride, _mm256_extractf128_ps(all_of, 1));
}
#else
template <int kWhich>
inline F32 shuffled(F32 a, F32 b) {
    return __builtin_shufflevector(a, b, kWhich & 3, kWhich >> 2 & 3, 4 + (kWhich >> 4 & 3),
                                   4 + (kWhich >> 6 & 3));
}
inline void store_quarters(F32 x, float* to, std::int64_t) { store(to, x); }
#endif

// Lanes 0, 2, 4 .. and 1, 3, 5 .. of two registers, and the way back.
#if KVCORE_LANES == 16
inline F32 even_lanes(F32 a, F32 b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}
inline F32 odd_lanes(F32 a, F32 b) {
    return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
inline F32 low_zipped(F32 a, F32 b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline F32 high_zipped(F32 a, F32 b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                   31);
}
#elif KVCORE_LANES == 8
inline F32 even_lanes(F32 a, F32 b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
}
inline F32 odd_lanes(F32 a, F32 b) {
    return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
}
inline F32 low_zipped(F32 a, F32 b) {
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
}
inline F32 high_zipped(F32 a, F32 b) {
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}
#else
inline F32 even_lanes(F32 a, F32 b) { return __builtin_shufflevector(a, b, 0, 2, 4, 6); }
inline F32 odd_lanes(F32 a, F32 b) { return __builtin_shufflevector(a, b, 1, 3, 5, 7); }
inline F32 low_zipped(F32 a, F32 b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
inline F32 high_zipped(F32 a, F32 b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
#endif

// Four rows as columns: to[i * stride .. + 4] = lane i of each.
inline void store_across(const F32 (&row)[4], float* to, std::int64_t stride) {
    const F32 even01 = shuffled<0x88>(row[0], row[1]);  // a0 a2 b0 b2 in each quarter
    const F32 even23 = shuffled<0x88>(row[2], row[3]);
    const F32 odd01 = shuffled<0xdd>(row[0], row[1]);  // a1 a3 b1 b3
    const F32 odd23 = shuffled<0xdd>(row[2], row[3]);
    store_quarters(shuffled<0x88>(even01, even23), to, 4 * stride);
    store_quarters(shuffled<0x88>(odd01, odd23), to + stride, 4 * stride);
    store_quarters(shuffled<0xdd>(even01, even23), to + 2 * stride, 4 * stride);
    store_quarters(shuffled<0xdd>(odd01, odd23), to + 3 * stride, 4 * stride);
}

// ---- functions ---------------------------------------------------------------------------------

// e^x for x <= 88, to 1e-7 of its value; 0 below -87, NaN of NaN.
inline F32 exponential(F32 x) {
    const F32 least = all(-87.0F);
    const F32 clipped = greater(least, x);
    // x = n ln 2 + r: adding 1.5 * 2^23 rounds to an integer, ln 2 is taken off in two pieces.
    const F32 magic = all(12582912.0F);
    const F32 shifted = fused(clipped, all(1.44269504F), magic);
    const F32 n = shifted - magic;
    F32 r = fused(n, all(-0.693359375F), clipped);
    r = fused(n, all(2.12194440e-4F), r);
    // The polynomial whose relative error is nowhere over 1.7e-8 and that is exact at 0.
    F32 p = all(1.3843635e-3F);
    p = fused(p, r, all(8.3741713e-3F));
    p = fused(p, r, all(4.1668002e-2F));
    p = fused(p, r, all(0.16666432F));
    p = fused(p, r, all(0.49999994F));
    p = fused(p, r, all(1.0F));
    p = fused(p, r, all(1.0F));
    const F32 power = floats((bits(shifted) + 127U) << 23);
    const F32 value = p * power;
    return x < least ? F32{} : value;
}

// tanh x, to 2e-7.
inline F32 hyperbolic_tangent(F32 x) {
    const F32 magnitude = floats(bits(x) & ~kSign);
    const F32 power = exponential(magnitude * -2.0F);
    const F32 value = (1.0F - power) / (1.0F + power);
    return floats(bits(value) | (bits(x) & kSign));
}
