// SPDX-License-Identifier: Apache-2.0
// Pages between caches of different layouts, and the starts of pages within a cache. Bytes are
// moved as they are: what they mean is nobody's business here.
//
// Common to all: the caller has checked ids and sizes; nothing is allocated but the stacks of
// `threads` - 1 more threads; what is moved ends up the same for every number of threads. A call
// that moves more than the caches of a core hold writes around them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/layout.hpp"
#include "kvcore/page_bytes.hpp"

namespace kvcore {

/// K or V of all layers, [pages, layers, page_size, heads, row_bytes]: the bytes of a row are
/// contiguous, other strides count bytes, of any sign.
template <class Byte>
struct CacheTensor {
    Byte* data = nullptr;           // of page 0, layer 0
    Byte* const* layers = nullptr;  // [layers], page 0 of each, in the place of `data` and its
                                    // stride; nullptr: all lie in one piece of memory
    std::int64_t page_stride = 0;
    std::int64_t layer_stride = 0;
    std::int64_t token_stride = 0;
    std::int64_t head_stride = 0;
    std::int64_t row_bytes = 0;  // 0: there is none

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

/// The view of a cache that lies at `data`. O(1).
template <class Byte>
[[nodiscard]] constexpr CacheView<Byte> view_of(const CacheLayout& layout, Byte* data) noexcept {
    const auto tensor = [&](const TensorLayout& at) {
        return CacheTensor<Byte>{data + at.first, nullptr,        at.page_stride, at.layer_stride,
                                 at.token_stride, at.head_stride, at.row_bytes};
    };
    return {layout.sizes.layers, layout.sizes.page_size, layout.sizes.heads, tensor(layout.k),
            tensor(layout.v)};
}

/// A run of layers.
struct LayerRange {
    std::int64_t first;
    std::int64_t count;
};

/// Copies layers of pages from one cache to another: page pairs[i].source to page
/// pairs[i].destination, none a destination twice; pairs with a negative page are skipped. Both
/// caches have the same sizes but for their pages, and share no byte. Cost: the bytes, one copy per
/// run that is contiguous on both sides; neighbouring pages are one run where the layouts allow it.
void transfer(const CacheView<const std::byte>& source, const CacheView<std::byte>& destination,
              const PagePair* pairs, std::int64_t n, LayerRange layers, int threads = 1);

/// K or V as vLLM's reshape_and_cache stores it: [pages, layers, heads, units, page_size, unit], so
/// that the same unit of all tokens is contiguous. A unit is 16 bytes of K or an element of V.
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
    PackedTensor<Byte> v;  // no units: there is none
};

/// The same as `transfer` into vLLM's layout; rows have units * unit_bytes bytes.
void transfer_to_packed(const CacheView<const std::byte>& source,
                        const PackedCacheView<std::byte>& destination, const PagePair* pairs,
                        std::int64_t n, LayerRange layers, int threads = 1);

/// The same out of vLLM's layout.
void transfer_from_packed(const PackedCacheView<const std::byte>& source,
                          const CacheView<std::byte>& destination, const PagePair* pairs,
                          std::int64_t n, LayerRange layers, int threads = 1);

/// The start of a page and where it goes.
struct PageStart {
    std::int64_t source;
    std::int64_t destination;
    std::int64_t tokens;  // 0 .. page_size
};

/// Copies the first tokens of pages to other pages of the same cache, all layers, in any order: no
/// page is a source and a destination, none a destination twice. Cost: as `transfer`.
void copy_partial(const CacheView<std::byte>& pool, const PageStart* copies, std::int64_t n,
                  int threads = 1);

}  // namespace kvcore
