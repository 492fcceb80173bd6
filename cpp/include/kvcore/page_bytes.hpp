// SPDX-License-Identifier: Apache-2.0
// Whole pages as bytes: copies, zeros, digests.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/dtype.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// Pages of a pool, each of which is one run of bytes.
template <class Byte>
struct PageBytes {
    Byte* data;                // of page 0
    std::int64_t page_stride;  // bytes
    std::int64_t page_bytes;

    [[nodiscard]] KVCORE_HOST_DEVICE constexpr Byte* page(std::int64_t id) const noexcept {
        return data + id * page_stride;
    }
};

/// A page and where its bytes go.
struct PagePair {
    std::int64_t source;
    std::int64_t destination;
};

/// Copies page after page, in any order: no page is a source and a destination, none a destination
/// twice. Ids are in range. Cost: the bytes.
void copy_pages(const PageBytes<std::byte>& pool, const PagePair* pairs, std::int64_t n,
                int threads = 1);

/// Fills pages with a byte. Cost: the bytes.
void fill_pages(const PageBytes<std::byte>& pool, const std::int64_t* ids, std::int64_t n,
                std::byte value, int threads = 1);

/// Writes a digest of each page's bytes to `digests` [n]: the sum, modulo 2^64, over its 8-byte
/// little-endian words w (the last one padded with zeros) of high(p) ^ low(p), where p is the
/// 128-bit product (w ^ (i + 1) * 0x9e3779b97f4a7c15) * 0xd6e8feb86659fd93 and i counts words. A
/// sum, so that words may be visited in any order. Finds accidents, not adversaries. Cost: reading
/// the bytes.
void digest_pages(const PageBytes<const std::byte>& pool, const std::int64_t* ids, std::int64_t n,
                  std::uint64_t* digests, int threads = 1);

}  // namespace kvcore
