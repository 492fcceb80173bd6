// SPDX-License-Identifier: Apache-2.0
// K9, K10 and K11: copy pages within a cache and between caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "copy_body.hpp"
#include "kvcore/cuda.hpp"
#include "page_lists.hpp"

namespace kvcore::cuda {

/// A list of copies of the first tokens of pages.
struct StartList {
    PageCounts pages;
    const PageStart* starts;

    [[nodiscard]] KVCORE_HOST_DEVICE PageStart at(std::int64_t i) const noexcept {
        return starts[i];
    }
};

/// The layers of pages; an item is K or V of one layer. `List` is PairList, or StartList for the
/// first tokens of pages, whose bytes come first in an item.
template <class List, template <class> class Layers>
struct PageItems {
    struct Tensor {
        Layers<std::byte> to;
        Layers<const std::byte> from;
        std::int64_t to_page;  // bytes
        std::int64_t from_page;
        std::int64_t token_bytes;
    };
    Tensor tensors[2];
    List list;  // [items / layers]
    Divider layers;
    static constexpr bool kKnowsSource = false;

    [[nodiscard]] bool counts() const noexcept { return false; }
    [[nodiscard]] KVCORE_HOST_DEVICE Place find(int part, std::int64_t item,
                                                bool /*counts*/) const {
        const std::int64_t index = layers.quotient(item);
        const std::int64_t layer = layers.remainder(item, index);
        const auto pair = list.at(index);
        if (!are_pages(pair, list.pages)) return {};
        const Tensor& tensor = tensors[part];
        Place place{tensor.to.at(layer) + pair.destination * tensor.to_page,
                    tensor.from.at(layer) + pair.source * tensor.from_page};
        if constexpr (std::is_same_v<List, StartList>) {
            place.bytes = pair.tokens * tensor.token_bytes;
        }
        return place;
    }
};

namespace {

[[nodiscard]] CacheTensor<const std::byte> readable(const CacheTensor<std::byte>& tensor) noexcept {
    return {tensor.data,         tensor.layers,      tensor.page_stride, tensor.layer_stride,
            tensor.token_stride, tensor.head_stride, tensor.row_bytes};
}

/// Moves pages of some layers, at most the number of layers that fits in the arguments.
template <class List, template <class> class Layers>
[[nodiscard]] Status move_some_layers(const CacheView<const std::byte>& source,
                                      const CacheView<std::byte>& destination, List list,
                                      std::int64_t n, LayerRange layers, std::int64_t max_blocks,
                                      Stream stream) noexcept {
    using Items = PageItems<List, Layers>;
    const auto tensor_of = [&](const CacheTensor<const std::byte>& from,
                               const CacheTensor<std::byte>& to) {
        const LayerRange held = to.row_bytes == 0 ? LayerRange{0, 0} : layers;
        return typename Items::Tensor{{to, held},
                                      {from, held},
                                      to.page_stride,
                                      from.page_stride,
                                      source.heads * from.row_bytes};
    };
    const Items items{{tensor_of(source.k, destination.k), tensor_of(source.v, destination.v)},
                      list,
                      Divider(layers.count)};
    std::int64_t alignment = 16;
    const auto shape_of = [&](const CacheTensor<const std::byte>& from,
                              const CacheTensor<std::byte>& to,
                              const typename Items::Tensor& tensor) {
        if (to.row_bytes == 0) return CopyShape{};
        alignment = alignment_of(alignment, tensor.to.alignment(), tensor.from.alignment(),
                                 tensor.to_page, tensor.from_page);
        const CopyShape shape{to.row_bytes,
                              {source.page_size, to.token_stride, from.token_stride},
                              {source.heads, to.head_stride, from.head_stride}};
        if constexpr (std::is_same_v<List, StartList>) {
            // The first tokens of a page are its first bytes only in their own order, and must be
            // whole units.
            alignment = alignment_of(alignment, tensor.token_bytes);
            return shape.merged();
        } else {
            return shape.reordered();
        }
    };
    const CopyShape of_k = shape_of(source.k, destination.k, items.tensors[0]);
    const CopyShape of_v = shape_of(source.v, destination.v, items.tensors[1]);
    return launch_copy(items, n * layers.count, of_k, of_v, alignment, stream, max_blocks);
}

template <class List, template <class> class Layers>
[[nodiscard]] Status move_layers(const CacheView<const std::byte>& source,
                                 const CacheView<std::byte>& destination, List list, std::int64_t n,
                                 LayerRange layers, std::int64_t max_blocks,
                                 Stream stream) noexcept {
    return for_some_layers(layers, Layers<std::byte>::kMost, [&](LayerRange some) {
        return move_some_layers<List, Layers>(source, destination, list, n, some, max_blocks,
                                              stream);
    });
}

template <class List>
[[nodiscard]] Status move_pages(const CacheView<const std::byte>& source,
                                const CacheView<std::byte>& destination, List list, std::int64_t n,
                                LayerRange layers, std::int64_t max_blocks,
                                Stream stream) noexcept {
    if (n < 0 || layers.count < 0 || max_blocks < 0) return kInvalidCall;
    const bool are_listed = source.k.layers != nullptr || source.v.layers != nullptr ||
                            destination.k.layers != nullptr || destination.v.layers != nullptr;
    const auto move = are_listed ? move_layers<List, ListedLayers> : move_layers<List, EvenLayers>;
    return move(source, destination, list, n, layers, max_blocks, stream);
}

}  // namespace

Status copy_pages(const PageBytes<std::byte>& pool, std::int64_t num_pages, const PagePair* pairs,
                  std::int64_t n, Stream stream) noexcept {
    const CacheTensor<std::byte> pages{pool.data, nullptr, pool.page_stride, 0,
                                       0,         0,       pool.page_bytes};
    const PairList list({num_pages, num_pages}, pairs);
    return move_pages({1, 1, 1, readable(pages), {}}, {1, 1, 1, pages, {}}, list, n, {0, 1}, 0,
                      stream);
}

Status copy_partial(const CacheView<std::byte>& pool, std::int64_t num_pages,
                    const PageStart* copies, std::int64_t n, Stream stream) noexcept {
    const CacheView<const std::byte> source{pool.layers, pool.page_size, pool.heads,
                                            readable(pool.k), readable(pool.v)};
    const StartList list{{num_pages, num_pages}, copies};
    return move_pages(source, pool, list, n, {0, pool.layers}, 0, stream);
}

Status transfer(const CacheView<const std::byte>& source, const CacheView<std::byte>& destination,
                PageCounts pages, const PagePair* pairs, std::int64_t n, LayerRange layers,
                std::int64_t max_blocks, Stream stream) noexcept {
    const PairList list(pages, pairs);
    return move_pages(source, destination, list, n, layers, max_blocks, stream);
}

Status transfer(const CacheView<const std::byte>& source, const CacheView<std::byte>& destination,
                PageCounts pages, const std::int64_t* source_ids,
                const std::int64_t* destination_ids, std::int64_t n, LayerRange layers,
                std::int64_t max_blocks, Stream stream) noexcept {
    const PairList list(pages, source_ids, destination_ids);
    return move_pages(source, destination, list, n, layers, max_blocks, stream);
}

}  // namespace kvcore::cuda
