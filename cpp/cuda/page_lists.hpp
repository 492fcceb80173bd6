// SPDX-License-Identifier: Apache-2.0
// The pages and layers that move between caches, as arguments of kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "kvcore/cuda.hpp"
#include "units.hpp"

namespace kvcore::cuda {

/// The addresses of layers whose distances are all equal.
template <class Byte>
struct EvenLayers {
    Byte* first;
    std::int64_t stride;

    static constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

    template <class Tensor>
    EvenLayers(const Tensor& tensor, LayerRange layers) noexcept
        : first(tensor.data + layers.first * tensor.layer_stride), stride(tensor.layer_stride) {}

    [[nodiscard]] KVCORE_HOST_DEVICE Byte* at(std::int64_t layer) const noexcept {
        return first + layer * stride;
    }
    [[nodiscard]] std::int64_t alignment() const noexcept { return alignment_of(first, stride); }
};

/// The addresses of a few layers, in the arguments of the kernel: the caller may change its own
/// list after the launch, and a captured graph keeps this copy.
template <class Byte>
struct ListedLayers {
    static constexpr std::int64_t kMost = 24;

    Byte* layers[kMost] = {};
    std::int64_t count;

    template <class Tensor>
    ListedLayers(const Tensor& tensor, LayerRange range) noexcept : count(range.count) {
        for (std::int64_t i = 0; i < count; ++i) layers[i] = tensor.layer(range.first + i);
    }

    [[nodiscard]] KVCORE_HOST_DEVICE Byte* at(std::int64_t layer) const noexcept {
        return layers[layer];
    }
    [[nodiscard]] std::int64_t alignment() const noexcept {
        std::int64_t found = 16;
        for (std::int64_t i = 0; i < count; ++i) found = alignment_of(found, layers[i]);
        return found;
    }
};

/// True if an id names a page of a pool.
[[nodiscard]] KVCORE_HOST_DEVICE constexpr bool is_page(std::int64_t id,
                                                        std::int64_t num_pages) noexcept {
    return static_cast<std::uint64_t>(id) < static_cast<std::uint64_t>(num_pages);
}

/// True if both ids of a copy name pages.
template <class Copy>
[[nodiscard]] KVCORE_HOST_DEVICE constexpr bool are_pages(const Copy& copy,
                                                          PageCounts pages) noexcept {
    return is_page(copy.source, pages.source) && is_page(copy.destination, pages.destination);
}

/// Pairs of pages, or two lists of pages.
struct PairList {
    PageCounts pages;  // of the caches
    const std::int64_t* sources;
    const std::int64_t* destinations;
    std::int64_t step;  // from one pair to the next

    PairList(PageCounts counts, const PagePair* pairs) noexcept
        : PairList(counts, reinterpret_cast<const std::int64_t*>(pairs)) {}
    PairList(PageCounts counts, const std::int64_t* of_sources,
             const std::int64_t* of_destinations) noexcept
        : pages(counts), sources(of_sources), destinations(of_destinations), step(1) {}

    [[nodiscard]] KVCORE_HOST_DEVICE PagePair at(std::int64_t i) const noexcept {
        return {sources[i * step], destinations[i * step]};
    }

   private:
    static_assert(sizeof(PagePair) == 2 * sizeof(std::int64_t));
    PairList(PageCounts counts, const std::int64_t* pairs) noexcept
        : pages(counts),
          sources(pairs),
          destinations(pairs == nullptr ? nullptr : pairs + 1),
          step(2) {}
};

/// Calls move(layers) for at most `most` layers at a time, until a call fails.
template <class Move>
[[nodiscard]] Status for_some_layers(LayerRange layers, std::int64_t most,
                                     const Move& move) noexcept {
    const std::int64_t end = layers.first + layers.count;
    while (layers.first < end) {
        const std::int64_t left = end - layers.first;
        layers.count = left < most ? left : most;
        const Status status = move(layers);
        if (status != kSuccess) return status;
        layers.first += layers.count;
    }
    return kSuccess;
}

}  // namespace kvcore::cuda
