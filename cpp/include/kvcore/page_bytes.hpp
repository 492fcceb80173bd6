// SPDX-License-Identifier: Apache-2.0
// Pages as bytes: copies, fills and digests whole pages, copies the starts of pages within a cache,
// and moves pages between caches of different layouts. The functions do not interpret the bytes.
//
// Common to all: the caller has checked ids and sizes; the functions allocate only the stacks of
// `threads` - 1 more threads; results are the same for every number of threads. A call that moves
// more bytes than a core's caches hold writes around the caches.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/dtype.hpp"
#include "kvcore/layout.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// Pages of a pool, each of them one run of bytes.
template <class Byte>
struct PageBytes {
    Byte* data;                // of page 0
    std::int64_t page_stride;  // bytes
    std::int64_t page_bytes;

    [[nodiscard]] KVCORE_HOST_DEVICE constexpr Byte* page(std::int64_t id) const noexcept {
        return data + id * page_stride;
    }
};

/// A page and the destination of its bytes.
struct PagePair {
    std::int64_t source;
    std::int64_t destination;
};

/// Copies page after page, in any order: no page is both a source and a destination, and no page is
/// a destination twice. Ids are in range. Cost: the bytes.
void copy_pages(const PageBytes<std::byte>& pool, const PagePair* pairs, std::int64_t n,
                int threads = 1);

/// Fills pages with a byte. Cost: the bytes.
void fill_pages(const PageBytes<std::byte>& pool, const std::int64_t* ids, std::int64_t n,
                std::byte value, int threads = 1);

/// Writes a digest of each page's bytes to `digests` [n]: the sum, modulo 2^64, over its 8-byte
/// little-endian words w (the last word is padded with zeros) of high(p) ^ low(p), where p is the
/// 128-bit product (w ^ (i + 1) * 0x9e3779b97f4a7c15) * 0xd6e8feb86659fd93 and i counts words. The
/// digest is a sum, so the words can be read in any order. It detects accidental changes, not
/// attacks. Cost: reading the bytes.
void digest_pages(const PageBytes<const std::byte>& pool, const std::int64_t* ids, std::int64_t n,
                  std::uint64_t* digests, int threads = 1);

/// K or V of all layers, [pages, layers, page_size, heads, row_bytes]: the bytes of a row are
/// contiguous, other strides count bytes, of any sign.
template <class Byte>
struct CacheTensor {
    Byte* data = nullptr;           // of page 0, layer 0
    Byte* const* layers = nullptr;  // [layers], page 0 of each, in the place of `data` and its
                                    // stride; nullptr: all layers are one piece of memory
    std::int64_t page_stride = 0;
    std::int64_t layer_stride = 0;
    std::int64_t token_stride = 0;
    std::int64_t head_stride = 0;
    std::int64_t row_bytes = 0;  // 0: no tensor

    [[nodiscard]] constexpr Byte* layer(std::int64_t index) const noexcept {
        return layers != nullptr ? layers[index] : data + index * layer_stride;
    }
};

/// A cache in memory. Owns nothing.
template <class Byte>
struct CacheView {
    std::int64_t layers = 0;
    std::int64_t page_size = 0;  // tokens
    std::int64_t heads = 0;
    CacheTensor<Byte> k;
    CacheTensor<Byte> v;
};

/// The view of a cache at `data`. O(1).
template <class Byte>
[[nodiscard]] constexpr CacheView<Byte> view_of(const CacheLayout& layout, Byte* data) noexcept {
    const auto tensor = [&](const TensorLayout& at) {
        return CacheTensor<Byte>{data + at.first, nullptr,        at.page_stride, at.layer_stride,
                                 at.token_stride, at.head_stride, at.row_bytes};
    };
    return {layout.sizes.layers, layout.sizes.page_size, layout.sizes.heads, tensor(layout.k),
            tensor(layout.v)};
}

/// A contiguous range of layers.
struct LayerRange {
    std::int64_t first;
    std::int64_t count;
};

/// Copies layers of pages from one cache to another: page pairs[i].source to page
/// pairs[i].destination. No page is a destination twice; pairs with a negative page are skipped.
/// Both caches have the same sizes except for the number of pages, and share no byte. Cost: the
/// bytes, one copy per run that is contiguous on both sides; neighbouring pages are one run if the
/// layouts allow it.
void transfer(const CacheView<const std::byte>& source, const CacheView<std::byte>& destination,
              const PagePair* pairs, std::int64_t n, LayerRange layers, int threads = 1);

/// K or V in the layout of vLLM's reshape_and_cache: [pages, layers, heads, units, page_size,
/// unit], in which the same unit of all tokens is contiguous. A unit is 16 bytes of K or an element
/// of V.
template <class Byte>
struct PackedTensor {
    Byte* data = nullptr;           // of page 0, layer 0
    Byte* const* layers = nullptr;  // as in CacheTensor
    std::int64_t page_stride = 0;
    std::int64_t layer_stride = 0;
    std::int64_t head_stride = 0;
    std::int64_t units = 0;
    std::int64_t unit_bytes = 0;  // 1, 2, 4 or 16

    [[nodiscard]] constexpr Byte* layer(std::int64_t index) const noexcept {
        return layers != nullptr ? layers[index] : data + index * layer_stride;
    }
};

template <class Byte>
struct PackedCacheView {
    PackedTensor<Byte> k;
    PackedTensor<Byte> v;  // no units: no V
};

/// The same as `transfer` into vLLM's layout; rows have units * unit_bytes bytes.
void transfer_to_packed(const CacheView<const std::byte>& source,
                        const PackedCacheView<std::byte>& destination, const PagePair* pairs,
                        std::int64_t n, LayerRange layers, int threads = 1);

/// The same out of vLLM's layout.
void transfer_from_packed(const PackedCacheView<const std::byte>& source,
                          const CacheView<std::byte>& destination, const PagePair* pairs,
                          std::int64_t n, LayerRange layers, int threads = 1);

/// The number of first tokens to copy from a page, and the destination page.
struct PageStart {
    std::int64_t source;
    std::int64_t destination;
    std::int64_t tokens;  // 0 .. page_size
};

/// Copies the first tokens of pages to other pages of the same cache, all layers, in any order: no
/// page is both a source and a destination, and no page is a destination twice. Cost: as
/// `transfer`.
void copy_partial(const CacheView<std::byte>& pool, const PageStart* copies, std::int64_t n,
                  int threads = 1);

/// CRC-32C (Castagnoli, as in RFC 3720) of bytes, or of earlier bytes with the CRC `before`
/// followed by these bytes. Cost: reading the bytes with SSE4.2; about 2 GB/s without.
[[nodiscard]] std::uint32_t crc32c(const void* data, std::size_t bytes,
                                   std::uint32_t before = 0) noexcept;

}  // namespace kvcore
