// SPDX-License-Identifier: Apache-2.0
// Compiled for processors with AVX2: this object file must export only sum_chunks_avx2.
#include <immintrin.h>

#include "tree/sum_chunks.hpp"
#include "tree/token_hash.hpp"

namespace kvcore::detail {
namespace {

// The keys of the first or the last 8 tokens of a chunk.
__m256i keys_of(std::ptrdiff_t first, std::uint32_t s) {
    const __m256i keys = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kHashKeys + first));
    return _mm256_add_epi32(keys, _mm256_set1_epi32(static_cast<int>(s)));
}

__m256i products(const TokenId* tokens, __m256i keys) {
    const __m256i eight =
        _mm256_add_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tokens)), keys);
    return _mm256_mul_epu32(eight, _mm256_srli_epi64(eight, 32));
}

// Four sums whose total is the sum of the chunk.
__m256i four_sums(const TokenId* tokens, __m256i low, __m256i high) {
    return _mm256_add_epi64(products(tokens, low), products(tokens + 8, high));
}

// {a0 + a1, b0 + b1, a2 + a3, b2 + b3}
__m256i added_pairs(__m256i a, __m256i b) {
    return _mm256_add_epi64(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

}  // namespace

void sum_chunks_avx2(std::uint64_t* sums, const TokenId* tokens, std::size_t n, std::uint32_t s) {
    const __m256i low = keys_of(0, s);
    const __m256i high = keys_of(8, s);
    for (; n >= 4; n -= 4, tokens += 64, sums += 4) {
        const __m256i first =
            added_pairs(four_sums(tokens, low, high), four_sums(tokens + 16, low, high));
        const __m256i second =
            added_pairs(four_sums(tokens + 32, low, high), four_sums(tokens + 48, low, high));
        const __m256i total = _mm256_add_epi64(_mm256_permute2x128_si256(first, second, 0x20),
                                               _mm256_permute2x128_si256(first, second, 0x31));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), total);
    }
    for (; n > 0; --n, tokens += 16, ++sums) {
        const __m256i four = four_sums(tokens, low, high);
        const __m128i two =
            _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
        const __m128i total = _mm_add_epi64(two, _mm_unpackhi_epi64(two, two));
        *sums = static_cast<std::uint64_t>(_mm_cvtsi128_si64(total));
    }
}

}  // namespace kvcore::detail
