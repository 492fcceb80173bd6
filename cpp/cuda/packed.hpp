// SPDX-License-Identifier: Apache-2.0
// Moves pages from and to vLLM's layout, where a head stores unit by unit, each for all tokens,
// instead of token by token.
#pragma once

#include <cstddef>
#include <cstdint>

#include "copy_body.hpp"
#include "kvcore/cuda.hpp"
#include "page_lists.hpp"
#include "turn_body.hpp"

namespace kvcore::cuda {

/// K or V of all layers, addressed by unit, on either side. Strides are in bytes.
template <class Byte>
struct UnitTensor {
    Byte* data;
    Byte* const* layers;
    std::int64_t page_stride;
    std::int64_t layer_stride;
    std::int64_t head_stride;
    std::int64_t token_stride;
    std::int64_t unit_stride;

    [[nodiscard]] Byte* layer(std::int64_t index) const noexcept {
        return layers != nullptr ? layers[index] : data + index * layer_stride;
    }
};

namespace {

template <class Byte>
[[nodiscard]] UnitTensor<Byte> by_units(const CacheTensor<Byte>& tensor, std::int64_t unit_bytes) {
    return {tensor.data,        tensor.layers,       tensor.page_stride, tensor.layer_stride,
            tensor.head_stride, tensor.token_stride, unit_bytes};
}
template <class Byte>
[[nodiscard]] UnitTensor<Byte> by_units(const PackedTensor<Byte>& tensor, std::int64_t page_size) {
    return {
        tensor.data,        tensor.layers,     tensor.page_stride,           tensor.layer_stride,
        tensor.head_stride, tensor.unit_bytes, page_size * tensor.unit_bytes};
}

/// The source and the destination of K or V.
struct TurnedTensor {
    UnitTensor<const std::byte> from;
    UnitTensor<std::byte> to;
    std::int64_t units;  // of a token; 0: there is no K or V
    std::int64_t unit_bytes;
};

/// A transfer, in either direction.
struct TurnedPages {
    TurnedTensor k;
    TurnedTensor v;
    bool is_to_packed;
    std::int64_t page_size;
    std::int64_t heads;
    PairList list;
    std::int64_t n;
    std::int64_t max_blocks;
    Stream stream;
};

template <template <class> class Layers>
[[nodiscard]] typename HeadItems<Layers>::Tensor located(const TurnedTensor& tensor,
                                                         LayerRange layers) noexcept {
    const LayerRange held = tensor.units == 0 ? LayerRange{0, 0} : layers;
    return {{tensor.to, held},       {tensor.from, held},   tensor.to.page_stride,
            tensor.from.page_stride, tensor.to.head_stride, tensor.from.head_stride};
}

/// Returns the alignment of all addresses of a tensor's heads.
template <class Tensor>
[[nodiscard]] std::int64_t alignment_of_heads(const Tensor& tensor) noexcept {
    return alignment_of(tensor.to.alignment(), tensor.from.alignment(), tensor.to_page,
                        tensor.from_page, tensor.to_head, tensor.from_head);
}

/// Returns the cut of a head into `tokens` x `units` lanes; no cut for a head without units.
[[nodiscard]] TurnPart turn_part(const TurnedTensor& tensor, std::int64_t tokens,
                                 std::int64_t units) noexcept {
    if (tensor.units == 0) return {};
    return {Divider(tokens * units),  Divider(tokens),         tensor.units,
            tensor.from.token_stride, tensor.from.unit_stride, tensor.to.token_stride,
            tensor.to.unit_stride};
}

/// True if one launch can move K and V: units of K have 16 bytes, and tiles of V are whole and
/// aligned.
template <int kItem, template <class> class Layers>
[[nodiscard]] bool turns(const TurnedPages& pages, const HeadItems<Layers>& items) noexcept {
    using Body = TurnBody<HeadItems<Layers>, kItem>;
    const TurnedTensor& k = pages.k;
    const TurnedTensor& v = pages.v;
    const bool is_k_whole =
        k.unit_bytes == 16 &&
        alignment_of(alignment_of_heads(items.tensors[0]), k.from.token_stride, k.from.unit_stride,
                     k.to.token_stride, k.to.unit_stride) == 16;
    if (v.units == 0 || !is_k_whole) return is_k_whole;
    const std::int64_t from_row = pages.is_to_packed ? v.from.token_stride : v.from.unit_stride;
    const std::int64_t to_row = pages.is_to_packed ? v.to.unit_stride : v.to.token_stride;
    return pages.page_size % Body::kSide == 0 && v.units % Body::kSide == 0 &&
           alignment_of(alignment_of_heads(items.tensors[1]), from_row, to_row) >= Body::kTileBytes;
}

template <int kItem, template <class> class Layers>
[[nodiscard]] Status turn_heads(const TurnedPages& pages, const HeadItems<Layers>& items,
                                std::int64_t n) noexcept {
    using Body = TurnBody<HeadItems<Layers>, kItem>;
    const TurnPart k =
        turn_part(pages.k, pages.page_size, ceil_div(pages.k.units, std::int64_t{Body::kUnits}));
    const TurnPart v =
        turn_part(pages.v, pages.page_size / Body::kSide, pages.v.units / Body::kSide);
    const std::int64_t of_k = k.units == 0 ? 0 : n * k.lanes.divisor();
    const std::int64_t all = of_k + (v.units == 0 ? 0 : n * v.lanes.divisor());
    return launch(Body{items, {k, v}, pages.is_to_packed, of_k, all},
                  grid_for(all, pages.max_blocks), pages.stream);
}

/// Moves K or V in the widest parts of a unit that its addresses allow, or element by element.
template <template <class> class Layers>
[[nodiscard]] Status copy_units(const TurnedPages& pages, const TurnedTensor& tensor,
                                HeadItems<Layers> items, int which, std::int64_t n) noexcept {
    if (tensor.units == 0) return kSuccess;
    items.tensors[0] = items.tensors[which];
    const CopyShape shape{tensor.unit_bytes,
                          {tensor.units, tensor.to.unit_stride, tensor.from.unit_stride},
                          {pages.page_size, tensor.to.token_stride, tensor.from.token_stride}};
    return launch_copy(items, n, shape.merged(), {}, alignment_of_heads(items.tensors[0]),
                       pages.stream, pages.max_blocks);
}

template <template <class> class Layers>
[[nodiscard]] Status turn_some_layers(const TurnedPages& pages, LayerRange layers) noexcept {
    const HeadItems<Layers> items{
        {located<Layers>(pages.k, layers), located<Layers>(pages.v, layers)},
        pages.list,
        Divider(layers.count),
        Divider(pages.heads)};
    const std::int64_t n = pages.n * layers.count * pages.heads;
    const bool is_small = pages.page_size * (pages.k.units + pages.v.units) < Divider::kSmall;
    switch (is_small ? (pages.v.units == 0 ? 2 : pages.v.unit_bytes) : 0) {
        case 1:
            if (turns<1>(pages, items)) return turn_heads<1>(pages, items, n);
            break;
        case 2:
            if (turns<2>(pages, items)) return turn_heads<2>(pages, items, n);
            break;
        case 4:
            if (turns<4>(pages, items)) return turn_heads<4>(pages, items, n);
            break;
        default:
            break;
    }
    const Status status = copy_units(pages, pages.k, items, 0, n);
    return status == kSuccess ? copy_units(pages, pages.v, items, 1, n) : status;
}

[[nodiscard]] Status turn_pages(const TurnedPages& pages, LayerRange layers) noexcept {
    if (pages.n < 0 || layers.count < 0 || pages.max_blocks < 0) return kInvalidCall;
    if (pages.n == 0 || pages.heads == 0 || pages.page_size == 0) return kSuccess;
    const auto is_listed = [](const TurnedTensor& tensor) {
        return tensor.from.layers != nullptr || tensor.to.layers != nullptr;
    };
    const bool are_listed = is_listed(pages.k) || is_listed(pages.v);
    const std::int64_t most =
        are_listed ? ListedLayers<std::byte>::kMost : EvenLayers<std::byte>::kMost;
    return for_some_layers(layers, most, [&](LayerRange some) {
        return are_listed ? turn_some_layers<ListedLayers>(pages, some)
                          : turn_some_layers<EvenLayers>(pages, some);
    });
}

[[nodiscard]] TurnedPages to_packed(const CacheView<const std::byte>& source,
                                    const PackedCacheView<std::byte>& destination, PairList list,
                                    std::int64_t n, std::int64_t max_blocks,
                                    Stream stream) noexcept {
    const auto tensor_of = [&](const CacheTensor<const std::byte>& from,
                               const PackedTensor<std::byte>& to) {
        return TurnedTensor{by_units(from, to.unit_bytes), by_units(to, source.page_size), to.units,
                            to.unit_bytes};
    };
    return {tensor_of(source.k, destination.k),
            tensor_of(source.v, destination.v),
            true,
            source.page_size,
            source.heads,
            list,
            n,
            max_blocks,
            stream};
}

[[nodiscard]] TurnedPages from_packed(const PackedCacheView<const std::byte>& source,
                                      const CacheView<std::byte>& destination, PairList list,
                                      std::int64_t n, std::int64_t max_blocks,
                                      Stream stream) noexcept {
    const auto tensor_of = [&](const PackedTensor<const std::byte>& from,
                               const CacheTensor<std::byte>& to) {
        return TurnedTensor{by_units(from, destination.page_size), by_units(to, from.unit_bytes),
                            from.units, from.unit_bytes};
    };
    return {tensor_of(source.k, destination.k),
            tensor_of(source.v, destination.v),
            false,
            destination.page_size,
            destination.heads,
            list,
            n,
            max_blocks,
            stream};
}

}  // namespace

Status transfer_to_packed(const CacheView<const std::byte>& source,
                          const PackedCacheView<std::byte>& destination, PageCounts pages,
                          const PagePair* pairs, std::int64_t n, LayerRange layers,
                          std::int64_t max_blocks, Stream stream) noexcept {
    return turn_pages(to_packed(source, destination, PairList(pages, pairs), n, max_blocks, stream),
                      layers);
}

Status transfer_to_packed(const CacheView<const std::byte>& source,
                          const PackedCacheView<std::byte>& destination, PageCounts pages,
                          const std::int64_t* source_ids, const std::int64_t* destination_ids,
                          std::int64_t n, LayerRange layers, std::int64_t max_blocks,
                          Stream stream) noexcept {
    const PairList list(pages, source_ids, destination_ids);
    return turn_pages(to_packed(source, destination, list, n, max_blocks, stream), layers);
}

Status transfer_from_packed(const PackedCacheView<const std::byte>& source,
                            const CacheView<std::byte>& destination, PageCounts pages,
                            const PagePair* pairs, std::int64_t n, LayerRange layers,
                            std::int64_t max_blocks, Stream stream) noexcept {
    return turn_pages(
        from_packed(source, destination, PairList(pages, pairs), n, max_blocks, stream), layers);
}

Status transfer_from_packed(const PackedCacheView<const std::byte>& source,
                            const CacheView<std::byte>& destination, PageCounts pages,
                            const std::int64_t* source_ids, const std::int64_t* destination_ids,
                            std::int64_t n, LayerRange layers, std::int64_t max_blocks,
                            Stream stream) noexcept {
    const PairList list(pages, source_ids, destination_ids);
    return turn_pages(from_packed(source, destination, list, n, max_blocks, stream), layers);
}

}  // namespace kvcore::cuda
