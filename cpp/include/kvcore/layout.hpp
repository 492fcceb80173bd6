// SPDX-License-Identifier: Apache-2.0
// The positions of a KV cache's elements in memory: the layouts that engines use, as byte strides.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include "kvcore/dtype.hpp"

namespace kvcore {

/// float32 [pages, page_size, heads, dim / group]: a code times its scale is the value. Strides
/// count bytes, of any sign. Stride 0 along an axis means that one scale is used along the whole
/// axis, so a scale per tensor or per head is also a view.
template <class Byte>
struct ScaleView {
    Byte* data = nullptr;  // of page 0; nullptr: codes are the values
    std::int64_t page_stride = 0;
    std::int64_t token_stride = 0;
    std::int64_t head_stride = 0;
    std::int64_t group =
        1;  // elements of a head that share a scale; the scales of a head are dense
};

/// K or V of one layer, [pages, page_size, heads, dim]: the elements of a head are contiguous, all
/// other strides count bytes, of any sign.
template <class Byte>
struct PagedTensor {
    Byte* data = nullptr;  // of page 0
    DType dtype = DType::kFloat32;
    std::int64_t dim = 0;  // 0: no tensor
    std::int64_t page_stride = 0;
    std::int64_t token_stride = 0;
    std::int64_t head_stride = 0;
    ScaleView<Byte> scales = {};

    /// The first element of a head. O(1).
    [[nodiscard]] KVCORE_HOST_DEVICE constexpr Byte* at(std::int64_t page, std::int64_t token,
                                                        std::int64_t head) const noexcept {
        return data + page * page_stride + token * token_stride + head * head_stride;
    }
};

/// K and V of one layer. Owns nothing.
///
/// Latent rows (MLA) have one head; their keys are `k` followed by `rope`, and their values are
/// also `k`. Views of this kind describe joint rows [pages, page_size, 576], two arrays of 512 and
/// 64, and the 656-byte row of FP8 codes, scales and a bfloat16 rope part.
template <class Byte>
struct PoolView {
    std::int64_t pages = 0;
    std::int64_t page_size = 0;  // tokens
    std::int64_t heads = 0;      // of K and V
    PagedTensor<Byte> k;
    PagedTensor<Byte> v;
    PagedTensor<Byte> rope =
        {};  // the last elements of a key if they are stored separately; no scales
};

/// The contents of a row: the K (or V) of one head of one token.
enum class RowFormat : std::uint8_t {
    kPlain,        // `dim` elements
    kInlineScale,  // `dim` one-byte codes, their float32 scale, 12 unused bytes
    kLatentFp8,    // `dim` FP8 codes, a float32 scale for each 128, 64 bfloat16 of the rope part
};

constexpr std::int64_t kInlineScaleBytes = 16;  // the scale and its padding
constexpr std::int64_t kLatentTile = 128;       // codes that share a scale
constexpr std::int64_t kLatentRope = 64;        // elements
constexpr std::int64_t kLatentRopeBytes = 128;  // of bfloat16
constexpr std::int64_t kLatentFp8Bytes = 656;   // of a whole row of 512 codes

/// Sizes of a cache, each at least 0. `dim_v` 0: rows have no values of their own. Rows of latents
/// (MLA) have one head; if their rope part is stored separately, it has the place of V.
struct CacheSizes {
    std::int64_t pages;
    std::int64_t layers;
    std::int64_t page_size;  // tokens
    std::int64_t heads;
    std::int64_t dim_k;
    std::int64_t dim_v;
    DType dtype;
    RowFormat format = RowFormat::kPlain;
};

/// The axes outside a row.
enum class CacheAxis : std::uint8_t { kPage, kKv, kLayer, kToken, kHead };
constexpr int kNumCacheAxes = 5;

/// Orders of the axes that engines use.
enum class LayoutName : std::uint8_t {
    kMax,                  // [page, kv, layer, token, head]
    kLayerFirstNhd,        // [kv, layer, page, token, head]: K and V separate
    kLayerFirstNhdPaired,  // [layer, page, kv, token, head]
    kLayerFirstHnd,        // [kv, layer, page, head, token]
    kLayerFirstHndPaired,  // [layer, page, kv, head, token]
    kPageFirst,            // [kv, page, token, layer, head]: token-granular
    kPageFirstDirect,      // [kv, page, layer, token, head]
    kPageHead,             // [kv, page, head, token, layer]
    kPageUnified,          // [page, layer, kv, token, head]
};
constexpr int kNumLayouts = 9;

/// The axes of a layout, outermost first.
[[nodiscard]] constexpr std::array<CacheAxis, kNumCacheAxes> axes_of(LayoutName name) noexcept {
    constexpr CacheAxis kP = CacheAxis::kPage;
    constexpr CacheAxis kKv = CacheAxis::kKv;
    constexpr CacheAxis kL = CacheAxis::kLayer;
    constexpr CacheAxis kT = CacheAxis::kToken;
    constexpr CacheAxis kH = CacheAxis::kHead;
    constexpr std::array<CacheAxis, kNumCacheAxes> kOrders[kNumLayouts] = {
        {kP, kKv, kL, kT, kH}, {kKv, kL, kP, kT, kH}, {kL, kP, kKv, kT, kH},
        {kKv, kL, kP, kH, kT}, {kL, kP, kKv, kH, kT}, {kKv, kP, kT, kL, kH},
        {kKv, kP, kL, kT, kH}, {kKv, kP, kH, kT, kL}, {kP, kL, kKv, kT, kH}};
    return kOrders[static_cast<int>(name)];
}

/// The position of K (or V): bytes from the cache's first byte, and between neighbours along an
/// axis.
struct TensorLayout {
    std::int64_t first = 0;
    std::int64_t page_stride = 0;
    std::int64_t layer_stride = 0;
    std::int64_t token_stride = 0;
    std::int64_t head_stride = 0;
    std::int64_t row_bytes = 0;  // 0: no tensor

    /// Bytes from the cache's first byte to a row. O(1).
    [[nodiscard]] KVCORE_HOST_DEVICE constexpr std::int64_t offset(
        std::int64_t page, std::int64_t layer, std::int64_t token,
        std::int64_t head) const noexcept {
        return first + page * page_stride + layer * layer_stride + token * token_stride +
               head * head_stride;
    }
};

/// A cache in one piece of memory.
struct CacheLayout {
    CacheSizes sizes;
    TensorLayout k;
    TensorLayout v;
    std::int64_t bytes;
};

namespace detail {

/// Sums and products of numbers that are not negative; -1 if the result does not fit in int64.
[[nodiscard]] constexpr std::int64_t checked_product(std::int64_t a, std::int64_t b) noexcept {
    if (a < 0 || b < 0) return -1;
    return b != 0 && a > std::numeric_limits<std::int64_t>::max() / b ? -1 : a * b;
}
[[nodiscard]] constexpr std::int64_t checked_sum(std::int64_t a, std::int64_t b) noexcept {
    if (a < 0 || b < 0) return -1;
    return a > std::numeric_limits<std::int64_t>::max() - b ? -1 : a + b;
}

[[nodiscard]] constexpr std::int64_t count_along(const CacheSizes& sizes, CacheAxis axis) noexcept {
    switch (axis) {
        case CacheAxis::kPage:
            return sizes.pages;
        case CacheAxis::kLayer:
            return sizes.layers;
        case CacheAxis::kToken:
            return sizes.page_size;
        default:
            return sizes.heads;
    }
}

[[nodiscard]] constexpr std::int64_t& stride_along(TensorLayout& tensor, CacheAxis axis) noexcept {
    switch (axis) {
        case CacheAxis::kPage:
            return tensor.page_stride;
        case CacheAxis::kLayer:
            return tensor.layer_stride;
        case CacheAxis::kToken:
            return tensor.token_stride;
        default:
            return tensor.head_stride;
    }
}

}  // namespace detail

/// Bytes of a row of `dim` elements or codes; 0 for dim 0, -1 if the result does not fit in int64.
[[nodiscard]] constexpr std::int64_t row_bytes(RowFormat format, DType dtype,
                                               std::int64_t dim) noexcept {
    if (dim == 0) return 0;
    switch (format) {
        case RowFormat::kInlineScale:
            return detail::checked_sum(dim, kInlineScaleBytes);
        case RowFormat::kLatentFp8:
            return detail::checked_sum(
                dim,
                dim / kLatentTile * static_cast<std::int64_t>(sizeof(float)) + kLatentRopeBytes);
        default:
            return detail::checked_product(dim, item_size(dtype));
    }
}

/// Lays out a cache without gaps. Returns nullopt for negative sizes, and if the number of bytes
/// does not fit in int64. O(1).
[[nodiscard]] constexpr std::optional<CacheLayout> layout_of(LayoutName name,
                                                             const CacheSizes& sizes) noexcept {
    CacheLayout layout{sizes, {}, {}, 0};
    layout.k.row_bytes = row_bytes(sizes.format, sizes.dtype, sizes.dim_k);
    layout.v.row_bytes = row_bytes(sizes.format, sizes.dtype, sizes.dim_v);
    std::int64_t of_k = layout.k.row_bytes;  // bytes of a block of K inside the present axis
    std::int64_t of_v = layout.v.row_bytes;
    if (of_k < 0 || of_v < 0) return std::nullopt;
    const auto order = axes_of(name);
    for (int i = kNumCacheAxes - 1; i >= 0; --i) {
        const CacheAxis axis = order[static_cast<std::size_t>(i)];
        if (axis == CacheAxis::kKv) {
            layout.v.first = of_k;
            of_k = of_v = detail::checked_sum(of_k, of_v);
        } else {
            detail::stride_along(layout.k, axis) = of_k;
            detail::stride_along(layout.v, axis) = of_v;
            of_k = detail::checked_product(of_k, detail::count_along(sizes, axis));
            of_v = detail::checked_product(of_v, detail::count_along(sizes, axis));
        }
        if (of_k < 0 || of_v < 0) return std::nullopt;
    }
    layout.bytes = of_k;
    return layout;
}

namespace detail {

template <class Byte>
[[nodiscard]] constexpr PagedTensor<Byte> tensor_of(const CacheLayout& layout,
                                                    const TensorLayout& tensor, std::int64_t dim,
                                                    Byte* data, std::int64_t layer) noexcept {
    const CacheSizes& sizes = layout.sizes;
    Byte* first = data + tensor.offset(0, layer, 0, 0);
    PagedTensor<Byte> found{
        first, sizes.dtype, dim, tensor.page_stride, tensor.token_stride, tensor.head_stride, {}};
    if (sizes.format != RowFormat::kPlain) {
        const bool is_latent = sizes.format == RowFormat::kLatentFp8;
        found.scales = {first + dim, tensor.page_stride, tensor.token_stride, tensor.head_stride,
                        is_latent ? kLatentTile : dim};
    }
    return found;
}

}  // namespace detail

/// One layer of a cache of keys and values at `data`, including its scales if the rows contain
/// scales. 0 <= layer < layers. O(1).
template <class Byte>
[[nodiscard]] constexpr PoolView<Byte> layer_view(const CacheLayout& layout, Byte* data,
                                                  std::int64_t layer) noexcept {
    const CacheSizes& sizes = layout.sizes;
    PoolView<Byte> view{sizes.pages, sizes.page_size, sizes.heads, {}, {}, {}};
    view.k = detail::tensor_of(layout, layout.k, sizes.dim_k, data, layer);
    if (sizes.dim_v > 0) {
        view.v = detail::tensor_of(layout, layout.v, sizes.dim_v, data, layer);
    }
    return view;
}

/// One layer of a cache of latents at `data`: values are the first `rank` elements of a row; the
/// rope part is the rest of the row, or the tensor in the place of V. Rows of `kLatentFp8` have
/// their own rope part, and rank dim_k. 0 <= layer < layers, 0 < rank <= dim_k. O(1).
template <class Byte>
[[nodiscard]] constexpr PoolView<Byte> latent_view(const CacheLayout& layout, Byte* data,
                                                   std::int64_t layer, std::int64_t rank) noexcept {
    const CacheSizes& sizes = layout.sizes;
    PoolView<Byte> view{sizes.pages, sizes.page_size, sizes.heads, {}, {}, {}};
    view.k = detail::tensor_of(layout, layout.k, rank, data, layer);
    view.v = view.k;
    if (sizes.format == RowFormat::kLatentFp8) {
        view.rope = view.k;
        view.rope.data += layout.k.row_bytes - kLatentRopeBytes;
        view.rope.dtype = DType::kBFloat16;
        view.rope.dim = kLatentRope;
        view.rope.scales = {};
    } else if (sizes.dim_v > 0) {
        view.rope = detail::tensor_of(layout, layout.v, sizes.dim_v, data, layer);
        view.rope.scales = {};
    } else if (rank < sizes.dim_k) {
        view.rope = view.k;
        view.rope.data += rank * item_size(sizes.dtype);
        view.rope.dim = sizes.dim_k - rank;
        view.rope.scales = {};
    }
    return view;
}

}  // namespace kvcore
