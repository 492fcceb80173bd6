// SPDX-License-Identifier: Apache-2.0
#include "tree/token_hash.hpp"

#include <algorithm>

#include "tree/sum_chunks.hpp"

namespace kvcore {
namespace {

constexpr std::int32_t kChunk = 16;

// The hash of a page of chunks [n].
std::uint64_t hash_chunks(detail::SumChunks sum, std::uint64_t seed, const TokenId* tokens,
                          std::int32_t n) noexcept {
    constexpr std::int32_t kMost = 32;
    std::uint64_t sums[kMost];
    std::uint64_t hash = seed ^ static_cast<std::uint64_t>(std::int64_t{n} * kChunk);
    for (std::int32_t left = n; left > 0; left -= kMost) {
        const std::int32_t size = std::min(left, kMost);
        sum(sums, tokens, static_cast<std::size_t>(size), static_cast<std::uint32_t>(seed));
        for (std::int32_t i = 0; i < size; ++i) hash = joined_hash(hash, sums[i]);
        tokens += std::ptrdiff_t{size} * kChunk;
    }
    return hash;
}

}  // namespace

void hash_pages(std::uint64_t* hashes, std::uint64_t seed, const TokenId* tokens,
                std::int32_t page_size, std::int32_t n) noexcept {
    if (page_size == kChunk && n > 1) {
        detail::sum_chunks()(hashes, tokens, static_cast<std::size_t>(n),
                             static_cast<std::uint32_t>(seed));
        for (std::int32_t i = 0; i < n; ++i) hashes[i] = joined_hash(seed ^ kChunk, hashes[i]);
        return;
    }
    const bool has_chunks = page_size > kChunk && page_size % kChunk == 0;
    for (std::int32_t i = 0; i < n; ++i, tokens += page_size) {
        hashes[i] = has_chunks ? hash_chunks(detail::sum_chunks(), seed, tokens, page_size / kChunk)
                               : hash_tokens(seed, tokens, page_size);
    }
}

}  // namespace kvcore
