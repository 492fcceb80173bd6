// SPDX-License-Identifier: Apache-2.0
// K9, K10 and K11: pages within a cache and between caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "copy_body.hpp"
#include "kvcore/cuda.hpp"

namespace kvcore::cuda {

/// Layers of pages: an item is K or V of one. `Pair` is PagePair, or PageStart for the first tokens
/// of pages, the bytes of which come first in an item.
template <class Pair>
struct PageItems {
    struct Tensor {
        CacheTensor<std::byte> to;
        CacheTensor<const std::byte> from;
        std::int64_t token_bytes;
    };
    Tensor tensors[2];
    const Pair* pairs;  // [items / layers]
    Divider layers;
    std::int64_t first_layer;

    // A table of layers is read on the device.
    static constexpr bool kMayBeUnaligned = true;

    [[nodiscard]] bool counts() const noexcept { return false; }
    [[nodiscard]] KVCORE_HOST_DEVICE Place find(int part, std::int64_t item,
                                                bool /*counts*/) const {
        const std::int64_t index = layers.quotient(item);
        const std::int64_t layer = first_layer + layers.remainder(item, index);
        const Pair pair = pairs[index];
        if (pair.source < 0 || pair.destination < 0) return {};
        const Tensor& tensor = tensors[part];
        Place place{page_of(tensor.to, layer, pair.destination),
                    page_of(tensor.from, layer, pair.source)};
        if constexpr (std::is_same_v<Pair, PageStart>) {
            place.bytes = pair.tokens * tensor.token_bytes;
        }
        return place;
    }

   private:
    template <class Byte>
    [[nodiscard]] KVCORE_HOST_DEVICE static Byte* page_of(const CacheTensor<Byte>& tensor,
                                                          std::int64_t layer, std::int64_t page) {
        Byte* first = tensor.layers != nullptr ? tensor.layers[layer]
                                               : tensor.data + layer * tensor.layer_stride;
        return first + page * tensor.page_stride;
    }
};

namespace {

template <class Byte>
[[nodiscard]] std::int64_t alignment_of_tensor(const CacheTensor<Byte>& tensor) noexcept {
    if (tensor.layers != nullptr) return alignment_of(tensor.page_stride);
    return alignment_of(tensor.data, tensor.page_stride, tensor.layer_stride);
}

[[nodiscard]] CacheTensor<const std::byte> readable(const CacheTensor<std::byte>& tensor) noexcept {
    return {tensor.data,         tensor.layers,      tensor.page_stride, tensor.layer_stride,
            tensor.token_stride, tensor.head_stride, tensor.row_bytes};
}

template <class Pair>
[[nodiscard]] Status move_pages(const CacheView<const std::byte>& source,
                                const CacheView<std::byte>& destination, const Pair* pairs,
                                std::int64_t n, LayerRange layers, std::int64_t max_blocks,
                                Stream stream) noexcept {
    if (n < 0 || layers.count < 0) return kInvalidCall;
    if (layers.count == 0) return kSuccess;
    std::int64_t alignment = 16;
    const auto shape_of = [&](const CacheTensor<const std::byte>& from,
                              const CacheTensor<std::byte>& to) {
        if (to.row_bytes == 0) return CopyShape{};
        alignment = alignment_of(alignment, alignment_of_tensor(from), alignment_of_tensor(to));
        const CopyShape shape{to.row_bytes,
                              {source.page_size, to.token_stride, from.token_stride},
                              {source.heads, to.head_stride, from.head_stride}};
        if constexpr (std::is_same_v<Pair, PageStart>) {
            // The first tokens of a page are its first bytes in their own order alone, and whole
            // units of them.
            alignment = alignment_of(alignment, source.heads * from.row_bytes);
            return shape.merged();
        } else {
            return shape.reordered();
        }
    };
    const CopyShape of_k = shape_of(source.k, destination.k);
    const CopyShape of_v = shape_of(source.v, destination.v);
    const PageItems<Pair> items{{{destination.k, source.k, source.heads * source.k.row_bytes},
                                 {destination.v, source.v, source.heads * source.v.row_bytes}},
                                pairs,
                                Divider(layers.count),
                                layers.first};
    return launch_copy(items, n * layers.count, of_k, of_v, alignment, stream, max_blocks);
}

}  // namespace

Status copy_pages(const PageBytes<std::byte>& pool, const PagePair* pairs, std::int64_t n,
                  Stream stream) noexcept {
    const CacheTensor<std::byte> pages{pool.data, nullptr, pool.page_stride, 0,
                                       0,         0,       pool.page_bytes};
    return move_pages({1, 1, 1, readable(pages), {}}, {1, 1, 1, pages, {}}, pairs, n, {0, 1}, 0,
                      stream);
}

Status copy_partial(const CacheView<std::byte>& pool, const PageStart* copies, std::int64_t n,
                    Stream stream) noexcept {
    const CacheView<const std::byte> source{pool.layers, pool.page_size, pool.heads,
                                            readable(pool.k), readable(pool.v)};
    return move_pages(source, pool, copies, n, {0, pool.layers}, 0, stream);
}

Status transfer(const CacheView<const std::byte>& source, const CacheView<std::byte>& destination,
                const PagePair* pairs, std::int64_t n, LayerRange layers, std::int64_t max_blocks,
                Stream stream) noexcept {
    return move_pages(source, destination, pairs, n, layers, max_blocks, stream);
}

}  // namespace kvcore::cuda
