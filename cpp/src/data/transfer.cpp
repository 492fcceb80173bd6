// SPDX-License-Identifier: Apache-2.0
#include "kvcore/page_bytes.hpp"

#include <algorithm>
#include <cstdint>

#include "data/copy_nest.hpp"
#include "support/parallel.hpp"

namespace kvcore {
namespace {

using Source = CacheTensor<const std::byte>;
using Destination = CacheTensor<std::byte>;

struct Block {
    std::int64_t pages;
    std::int64_t layers;
    std::int64_t tokens;
    std::int64_t heads;
};

std::int64_t distance(const std::byte* from, const std::byte* to) noexcept {
    return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) -
                                     reinterpret_cast<std::uintptr_t>(from));
}

// True if K and V differ only in their addresses, so that K and V form one more axis.
template <class Byte>
bool is_paired(const CacheView<Byte>& view) noexcept {
    const CacheTensor<Byte>& k = view.k;
    const CacheTensor<Byte>& v = view.v;
    return k.row_bytes == v.row_bytes && k.page_stride == v.page_stride &&
           k.layer_stride == v.layer_stride && k.token_stride == v.token_stride &&
           k.head_stride == v.head_stride && k.layers == nullptr && v.layers == nullptr;
}

// Copies blocks of pages of K and V. Keeps the nests of the last block, because most blocks have
// the same size.
class BlockCopier {
   public:
    BlockCopier(const CacheView<const std::byte>& source, const CacheView<std::byte>& destination,
                std::int64_t call_bytes) noexcept
        : source_(source),
          destination_(destination),
          is_paired_(is_paired(source) && is_paired(destination)),
          is_by_layer_{source.k.layers != nullptr || destination.k.layers != nullptr,
                       source.v.layers != nullptr || destination.v.layers != nullptr},
          copier_(call_bytes) {}

    void copy(const PagePair& first, std::int64_t layer, const Block& block) noexcept {
        if (block.pages != block_.pages || block.layers != block_.layers ||
            block.tokens != block_.tokens) {
            block_ = block;
            nest_k_ = nest(source_.k, destination_.k, is_by_layer_[0]);
            if (!is_paired_) nest_v_ = nest(source_.v, destination_.v, is_by_layer_[1]);
        }
        copy_tensor(source_.k, destination_.k, nest_k_, is_by_layer_[0], first, layer);
        if (!is_paired_) {
            copy_tensor(source_.v, destination_.v, nest_v_, is_by_layer_[1], first, layer);
        }
    }

   private:
    [[nodiscard]] CopyNest nest(const Source& from, const Destination& to,
                                bool is_by_layer) const noexcept {
        return {from.row_bytes,
                {{{is_paired_ ? 2 : 1, distance(destination_.k.data, destination_.v.data),
                   distance(source_.k.data, source_.v.data)},
                  {block_.pages, to.page_stride, from.page_stride},
                  {is_by_layer ? 1 : block_.layers, to.layer_stride, from.layer_stride},
                  {block_.tokens, to.token_stride, from.token_stride},
                  {block_.heads, to.head_stride, from.head_stride}}}};
    }

    void copy_tensor(const Source& from, const Destination& to, const CopyNest& nest,
                     bool is_by_layer, const PagePair& pair, std::int64_t layer) noexcept {
        const std::int64_t steps = is_by_layer ? block_.layers : 1;
        for (std::int64_t i = 0; i < steps; ++i) {
            if (to.row_bytes == 0) return;
            nest.copy(to.layer(layer + i) + pair.destination * to.page_stride,
                      from.layer(layer + i) + pair.source * from.page_stride, copier_);
        }
    }

    const CacheView<const std::byte>& source_;
    const CacheView<std::byte>& destination_;
    bool is_paired_;
    bool is_by_layer_[2];
    Block block_ = {0, 0, 0, 0};
    CopyNest nest_k_;
    CopyNest nest_v_;
    RunCopier copier_;
};

// Returns the number of pairs, from the first, whose pages are consecutive on both sides.
std::int64_t neighbours(const PagePair* pairs, std::int64_t n) noexcept {
    std::int64_t count = 1;
    while (count < n && pairs[count].source == pairs[0].source + count &&
           pairs[count].destination == pairs[0].destination + count) {
        ++count;
    }
    return count;
}

bool is_padding(const PagePair& pair) noexcept { return pair.source < 0 || pair.destination < 0; }

}  // namespace

void transfer(const CacheView<const std::byte>& source, const CacheView<std::byte>& destination,
              const PagePair* pairs, std::int64_t n, LayerRange layers, int threads) {
    const std::int64_t piece =
        source.page_size * source.heads * (source.k.row_bytes + source.v.row_bytes);
    // Work is cut between the layers of pages, so that a few large pages occupy all threads.
    cpu::parallel_for(n * layers.count, cpu::worth_a_thread(piece), threads,
                      [&](std::int64_t begin, std::int64_t end) {
                          BlockCopier copier(source, destination, n * layers.count * piece);
                          for (std::int64_t at = begin; at < end;) {
                              const PagePair& pair = pairs[at / layers.count];
                              const std::int64_t skipped = at % layers.count;
                              Block block{1, std::min(layers.count - skipped, end - at),
                                          source.page_size, source.heads};
                              if (!is_padding(pair)) {
                                  if (block.layers == layers.count) {
                                      block.pages = neighbours(&pair, (end - at) / layers.count);
                                  }
                                  copier.copy(pair, layers.first + skipped, block);
                              }
                              at += block.pages * block.layers;
                          }
                      });
}

void copy_partial(const CacheView<std::byte>& pool, const PageStart* copies, std::int64_t n,
                  int threads) {
    const auto readable = [](const Destination& tensor) {
        return Source{tensor.data,         tensor.layers,       tensor.page_stride,
                      tensor.layer_stride, tensor.token_stride, tensor.head_stride,
                      tensor.row_bytes};
    };
    const CacheView<const std::byte> source{pool.layers, pool.page_size, pool.heads,
                                            readable(pool.k), readable(pool.v)};
    const std::int64_t token_bytes =
        pool.layers * pool.heads * (pool.k.row_bytes + pool.v.row_bytes);
    std::int64_t tokens = 0;
    for (std::int64_t i = 0; i < n; ++i) tokens += copies[i].tokens;
    cpu::parallel_for(n, cpu::worth_a_thread(token_bytes * tokens / std::max<std::int64_t>(1, n)),
                      threads, [&](std::int64_t begin, std::int64_t end) {
                          BlockCopier copier(source, pool, tokens * token_bytes);
                          for (std::int64_t i = begin; i < end; ++i) {
                              copier.copy({copies[i].source, copies[i].destination}, 0,
                                          {1, pool.layers, copies[i].tokens, pool.heads});
                          }
                      });
}

}  // namespace kvcore
