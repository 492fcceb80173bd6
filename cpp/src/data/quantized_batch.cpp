// SPDX-License-Identifier: Apache-2.0
#include "kvcore/paged_batch.hpp"

#include "data/batch_ranges.hpp"
#include "data/row_runs.hpp"
#include "data/tiles.hpp"
#include "kvcore/quantize.hpp"

namespace kvcore {
namespace {

using cpu::Tile;

// Returns the fields of a tile that are the same for appending and gathering.
template <class Byte>
Tile tile_of(PageShape shape, const PagedTensor<Byte>& pool) noexcept {
    Tile tile{};
    tile.heads = shape.heads;
    tile.dim = pool.dim;
    tile.group = pool.scales.data == nullptr ? pool.dim : pool.scales.group;
    tile.scale_token = pool.scales.token_stride;
    tile.scale_head = pool.scales.head_stride;
    return tile;
}

template <class Byte>
TokenShape bytes_of(PageShape shape, const PagedTensor<Byte>& pool) noexcept {
    return {shape.heads, pool.dim * item_size(pool.dtype)};
}

template <class Byte>
PagedRows<Byte> rows_of(PageShape shape, const PagedTensor<Byte>& pool) noexcept {
    return {pool.data,        pool.page_stride, pool.token_stride,
            pool.head_stride, shape.page_size,  nullptr};
}

// Finds the place of a sequence's token in its page.
template <class Byte>
class Places {
   public:
    Places(PageShape shape, const PagedTensor<Byte>& pool, const PageTable& table,
           std::int64_t row) noexcept
        : shape_(shape), pool_(pool), pages_(pages_of(table, row)) {}

    [[nodiscard]] Byte* element(std::int64_t token) const noexcept {
        return pool_.at(page_of(token), token % shape_.page_size, 0);
    }
    [[nodiscard]] Byte* scale(std::int64_t token) const noexcept {
        const ScaleView<Byte>& scales = pool_.scales;
        if (scales.data == nullptr) return nullptr;
        return scales.data + page_of(token) * scales.page_stride +
               token % shape_.page_size * scales.token_stride;
    }

   private:
    [[nodiscard]] std::int64_t page_of(std::int64_t token) const noexcept {
        return pages_[token / shape_.page_size];
    }

    PageShape shape_;
    const PagedTensor<Byte>& pool_;
    const BlockId* pages_;
};

// Calls fill(tile, places, token of the sequence, token of the contiguous memory) and then the
// kernel, for the part of each range in each page.
template <class Byte, class Kernel, class Fill>
void for_each_tile(PageShape shape, const PagedTensor<Byte>& pool, const PageTable& table,
                   const TokenRanges& ranges, std::int64_t wide_bytes, int threads, Kernel kernel,
                   const Fill& fill) {
    const Tile common = tile_of(shape, pool);
    const auto work = [&](const RangePart& part) {
        part.for_each(
            [&](std::int64_t row, std::int64_t token, std::int64_t at, std::int64_t count) {
                const Places<Byte> places(shape, pool, table, row);
                for_each_block(shape.page_size, token, count,
                               [&](std::int64_t first, std::int64_t done, std::int64_t tokens) {
                                   Tile tile = common;
                                   tile.tokens = tokens;
                                   fill(tile, places, first, at + done);
                                   kernel(tile);
                               });
            });
    };
    for_each_part(table, ranges, shape.heads * pool.dim * wide_bytes, threads, work);
}

using TileKernel = void (*)(const Tile&);

TileKernel append_kernel(DType wide, DType stored, Scales scales) {
    const cpu::WideKernels& kernels = cpu::kernels_of(wide);
    if (is_wide(stored)) return kernels.widen[static_cast<int>(stored)];
    return (scales == Scales::kFound ? kernels.quantize
                                     : kernels.quantize_by)[cpu::narrow_index(stored)];
}

TileKernel gather_kernel(DType stored, DType wide) {
    if (is_wide(stored)) return cpu::kernels_of(stored).widen[static_cast<int>(wide)];
    return cpu::kernels_of(wide).dequantize[cpu::narrow_index(stored)];
}

}  // namespace

void append_batch(PageShape shape, const PagedTensor<std::byte>& pool, const PageTable& table,
                  const TokenRanges& ranges, const TokenRows<const std::byte>& source, DType wide,
                  Scales scales, int threads) {
    if (wide == pool.dtype) {
        return append_batch(bytes_of(shape, pool), rows_of(shape, pool), table, ranges, source,
                            threads);
    }
    const TileKernel kernel = append_kernel(wide, pool.dtype, scales);
    const std::int64_t in = item_size(wide);
    const std::int64_t out = item_size(pool.dtype);
    for_each_tile(
        shape, pool, table, ranges, in, threads,
        [&](const Tile& tile) { kernel(cpu::merged(tile, in, out)); },
        [&](Tile& tile, const Places<std::byte>& places, std::int64_t token, std::int64_t at) {
            tile.source = source.from(at).data;
            tile.source_token = source.token_stride;
            tile.source_head = source.head_stride;
            tile.destination = places.element(token);
            tile.destination_token = pool.token_stride;
            tile.destination_head = pool.head_stride;
            tile.new_scales = places.scale(token);
            tile.scales = tile.new_scales;
        });
}

void gather_batch(PageShape shape, const PagedTensor<const std::byte>& pool, const PageTable& table,
                  const TokenRanges& ranges, const TokenRows<std::byte>& destination, DType wide,
                  int threads) {
    if (wide == pool.dtype) {
        return gather_batch(bytes_of(shape, pool), rows_of(shape, pool), table, ranges, destination,
                            threads);
    }
    const TileKernel kernel = gather_kernel(pool.dtype, wide);
    const std::int64_t in = item_size(pool.dtype);
    const std::int64_t out = item_size(wide);
    for_each_tile(
        shape, pool, table, ranges, out, threads,
        [&](const Tile& tile) { kernel(cpu::merged(tile, in, out)); },
        [&](Tile& tile, const Places<const std::byte>& places, std::int64_t token,
            std::int64_t at) {
            tile.source = places.element(token);
            tile.source_token = pool.token_stride;
            tile.source_head = pool.head_stride;
            tile.destination = destination.from(at).data;
            tile.destination_token = destination.token_stride;
            tile.destination_head = destination.head_stride;
            tile.scales = places.scale(token);
        });
}

void append_latent(const PoolView<std::byte>& pool, const PageTable& table,
                   const TokenRanges& ranges, const TokenRows<const std::byte>& source, DType wide,
                   int threads) {
    const PageShape shape{pool.page_size, 1};
    append_batch(shape, pool.k, table, ranges, source, wide, Scales::kFound, threads);
    const TokenRows<const std::byte> ends{source.data + pool.k.dim * item_size(wide),
                                          source.token_stride, source.head_stride};
    append_batch(shape, pool.rope, table, ranges, ends, wide, Scales::kGiven, threads);
}

void gather_latent(const PoolView<const std::byte>& pool, const PageTable& table,
                   const TokenRanges& ranges, const TokenRows<std::byte>& destination, DType wide,
                   int threads) {
    const PageShape shape{pool.page_size, 1};
    gather_batch(shape, pool.k, table, ranges, destination, wide, threads);
    const TokenRows<std::byte> ends{destination.data + pool.k.dim * item_size(wide),
                                    destination.token_stride, destination.head_stride};
    gather_batch(shape, pool.rope, table, ranges, ends, wide, threads);
}

}  // namespace kvcore
