// SPDX-License-Identifier: Apache-2.0
// vLLM's layout: a head stores unit by unit, each for all tokens, instead of token by token.
#include <cstdint>

#include "data/transpose.hpp"
#include "kvcore/page_bytes.hpp"
#include "support/parallel.hpp"

namespace kvcore {
namespace {

struct HeadPlace {
    std::int64_t page;
    std::int64_t layer;
    std::int64_t head;
};

template <class Byte>
UnitRows<Byte> rows_of(const CacheTensor<Byte>& tensor, const HeadPlace& at) noexcept {
    return {tensor.layer(at.layer) + at.page * tensor.page_stride + at.head * tensor.head_stride,
            tensor.token_stride};
}

template <class Byte>
UnitRows<Byte> rows_of(const PackedTensor<Byte>& tensor, const HeadPlace& at,
                       std::int64_t page_size) noexcept {
    return {tensor.layer(at.layer) + at.page * tensor.page_stride + at.head * tensor.head_stride,
            page_size * tensor.unit_bytes};
}

// Calls visit(page pair, layer) for all layers of all pages.
template <class Visit>
void for_each_layer(const PagePair* pairs, std::int64_t n, LayerRange layers,
                    std::int64_t layer_bytes, int threads, const Visit& visit) {
    cpu::parallel_for(n * layers.count, cpu::worth_a_thread(layer_bytes), threads,
                      [&](std::int64_t begin, std::int64_t end) {
                          for (std::int64_t at = begin; at < end; ++at) {
                              const PagePair& pair = pairs[at / layers.count];
                              if (pair.source < 0 || pair.destination < 0) continue;
                              visit(pair, layers.first + at % layers.count);
                          }
                      });
}

template <class Byte>
std::int64_t layer_bytes(const CacheView<Byte>& view) noexcept {
    return view.page_size * view.heads * (view.k.row_bytes + view.v.row_bytes);
}

}  // namespace

void transfer_to_packed(const CacheView<const std::byte>& source,
                        const PackedCacheView<std::byte>& destination, const PagePair* pairs,
                        std::int64_t n, LayerRange layers, int threads) {
    const auto pack = [&](const CacheTensor<const std::byte>& from,
                          const PackedTensor<std::byte>& to, const PagePair& pair,
                          std::int64_t layer) {
        for (std::int64_t head = 0; head < source.heads && to.units > 0; ++head) {
            transpose(rows_of(to, {pair.destination, layer, head}, source.page_size),
                      rows_of(from, {pair.source, layer, head}), source.page_size, to.units,
                      to.unit_bytes);
        }
    };
    for_each_layer(pairs, n, layers, layer_bytes(source), threads,
                   [&](const PagePair& pair, std::int64_t layer) {
                       pack(source.k, destination.k, pair, layer);
                       pack(source.v, destination.v, pair, layer);
                   });
}

void transfer_from_packed(const PackedCacheView<const std::byte>& source,
                          const CacheView<std::byte>& destination, const PagePair* pairs,
                          std::int64_t n, LayerRange layers, int threads) {
    const auto unpack = [&](const PackedTensor<const std::byte>& from,
                            const CacheTensor<std::byte>& to, const PagePair& pair,
                            std::int64_t layer) {
        for (std::int64_t head = 0; head < destination.heads && from.units > 0; ++head) {
            transpose(rows_of(to, {pair.destination, layer, head}),
                      rows_of(from, {pair.source, layer, head}, destination.page_size), from.units,
                      destination.page_size, from.unit_bytes);
        }
    };
    for_each_layer(pairs, n, layers, layer_bytes(destination), threads,
                   [&](const PagePair& pair, std::int64_t layer) {
                       unpack(source.k, destination.k, pair, layer);
                       unpack(source.v, destination.v, pair, layer);
                   });
}

}  // namespace kvcore
