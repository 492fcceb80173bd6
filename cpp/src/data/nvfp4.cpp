// SPDX-License-Identifier: Apache-2.0
#include "kvcore/quantize.hpp"

#include <algorithm>
#include <atomic>

#include "data/batch_ranges.hpp"
#include "data/row_runs.hpp"
#include "data/tiles.hpp"
#include "support/parallel.hpp"

namespace kvcore {
namespace {

using cpu::Tile;

// Returns `blocks` contiguous blocks as the only head of one token.
Tile line_of(std::int64_t blocks, const std::byte* source, std::byte* destination) noexcept {
    Tile tile{};
    tile.source = source;
    tile.destination = destination;
    tile.tokens = tile.heads = 1;
    tile.dim = blocks * kNvfp4Block;
    tile.group = kNvfp4Block;
    return tile;
}

std::int64_t blocks_worth_a_thread() noexcept {
    return cpu::worth_a_thread(kNvfp4Block * item_size(DType::kFloat32));
}

// A side of a tile: the heads of tokens in a pool, or in contiguous memory.
template <class Byte>
struct Side {
    Byte* data;
    std::int64_t token_stride;
    std::int64_t head_stride;
};

template <class Byte>
Side<Byte> in_page(const HeadBytes<Byte>& pool, std::int64_t page, std::int64_t token) noexcept {
    return {pool.at(page, token, 0), pool.token_stride, pool.head_stride};
}

template <class Source, class Target>
Tile tile_between(const Side<Source>& from, const Side<Target>& to, std::int64_t tokens,
                  std::int64_t heads, std::int64_t dim) noexcept {
    Tile tile{};
    tile.source = from.data;
    tile.source_token = from.token_stride;
    tile.source_head = from.head_stride;
    tile.destination = to.data;
    tile.destination_token = to.token_stride;
    tile.destination_head = to.head_stride;
    tile.tokens = tokens;
    tile.heads = heads;
    tile.dim = dim;
    tile.group = kNvfp4Block;
    return tile;
}

// Quantises tokens of a wide dtype into neighbouring places of a page.
void write_tokens(PageShape shape, const Nvfp4Tensor<std::byte>& pool, std::int64_t page,
                  std::int64_t in_page_token, const TokenRows<const std::byte>& source, DType wide,
                  std::int64_t tokens) {
    if (pool.dim == 0) return;
    const Side<const std::byte> from{source.data, source.token_stride, source.head_stride};
    Tile tile =
        tile_between(from, in_page(pool.codes, page, in_page_token), tokens, shape.heads, pool.dim);
    tile.new_scales = pool.scales.at(page, in_page_token, 0);
    tile.scale_token = pool.scales.token_stride;
    tile.scale_head = pool.scales.head_stride;
    cpu::kernels_of(wide).quantize_nvfp4(tile, pool.global.get());
}

void read_tokens(PageShape shape, const Nvfp4Tensor<const std::byte>& pool, std::int64_t page,
                 std::int64_t in_page_token, const TokenRows<std::byte>& destination, DType wide,
                 std::int64_t tokens) {
    const Side<std::byte> to{destination.data, destination.token_stride, destination.head_stride};
    Tile tile =
        tile_between(in_page(pool.codes, page, in_page_token), to, tokens, shape.heads, pool.dim);
    tile.scales = pool.scales.at(page, in_page_token, 0);
    tile.scale_token = pool.scales.token_stride;
    tile.scale_head = pool.scales.head_stride;
    cpu::kernels_of(wide).dequantize_nvfp4(tile, pool.global.get());
}

// Calls move(page, token of the page, token of the contiguous memory, tokens) for the part of each
// range in each page.
template <class Move>
void for_each_place(PageShape shape, const PageTable& table, const TokenRanges& ranges,
                    std::int64_t token_bytes, int threads, const Move& move) {
    for_each_part(table, ranges, token_bytes, threads, [&](const RangePart& part) {
        part.for_each(
            [&](std::int64_t row, std::int64_t token, std::int64_t at, std::int64_t count) {
                const BlockId* pages = pages_of(table, row);
                for_each_block(shape.page_size, token, count,
                               [&](std::int64_t first, std::int64_t done, std::int64_t tokens) {
                                   move(std::int64_t{pages[first / shape.page_size]},
                                        first % shape.page_size, at + done, tokens);
                               });
            });
    });
}

template <class Slot>
std::int64_t write_slots_of(const Nvfp4Pool<std::byte>& pool, const TokenRows<const std::byte>& k,
                            const TokenRows<const std::byte>& v, DType wide, const Slot* slots,
                            std::int64_t n, int threads) {
    const std::int64_t token_bytes = pool.shape.heads * (pool.k.dim + pool.v.dim) * item_size(wide);
    const std::int64_t capacity = pool.pages * pool.shape.page_size;
    std::atomic<std::int64_t> beyond{0};
    const auto work = [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t slot = slots[i];
            if (slot >= capacity) ++beyond;
            if (slot < 0 || slot >= capacity) continue;
            const std::int64_t page = slot / pool.shape.page_size;
            const std::int64_t token = slot - page * pool.shape.page_size;
            write_tokens(pool.shape, pool.k, page, token, k.from(i), wide, 1);
            write_tokens(pool.shape, pool.v, page, token, v.from(i), wide, 1);
        }
    };
    cpu::parallel_for(n, cpu::worth_a_thread(token_bytes), threads, work);
    return beyond;
}

}  // namespace

void quantize_nvfp4(std::int64_t blocks, DType wide, const std::byte* source, GlobalScale global,
                    std::byte* codes, std::byte* scales, int threads) {
    const auto kernel = cpu::kernels_of(wide).quantize_nvfp4;
    const std::int64_t block_bytes = kNvfp4Block * item_size(wide);
    const float factor = global.get();
    cpu::parallel_for(blocks, blocks_worth_a_thread(), threads,
                      [&](std::int64_t begin, std::int64_t end) {
                          Tile tile = line_of(end - begin, source + begin * block_bytes,
                                              codes + begin * kNvfp4BlockBytes);
                          tile.new_scales = scales + begin;
                          kernel(tile, factor);
                      });
}

void dequantize_nvfp4(std::int64_t blocks, const std::byte* codes, const std::byte* scales,
                      GlobalScale global, DType wide, std::byte* destination, int threads) {
    const auto kernel = cpu::kernels_of(wide).dequantize_nvfp4;
    const std::int64_t block_bytes = kNvfp4Block * item_size(wide);
    const float factor = global.get();
    cpu::parallel_for(blocks, blocks_worth_a_thread(), threads,
                      [&](std::int64_t begin, std::int64_t end) {
                          Tile tile = line_of(end - begin, codes + begin * kNvfp4BlockBytes,
                                              destination + begin * block_bytes);
                          tile.scales = scales + begin;
                          kernel(tile, factor);
                      });
}

void append_batch(PageShape shape, const Nvfp4Tensor<std::byte>& pool, const PageTable& table,
                  const TokenRanges& ranges, const TokenRows<const std::byte>& source, DType wide,
                  int threads) {
    for_each_place(
        shape, table, ranges, shape.heads * pool.dim * item_size(wide), threads,
        [&](std::int64_t page, std::int64_t token, std::int64_t at, std::int64_t tokens) {
            write_tokens(shape, pool, page, token, source.from(at), wide, tokens);
        });
}

void gather_batch(PageShape shape, const Nvfp4Tensor<const std::byte>& pool, const PageTable& table,
                  const TokenRanges& ranges, const TokenRows<std::byte>& destination, DType wide,
                  int threads) {
    for_each_place(
        shape, table, ranges, shape.heads * pool.dim * item_size(wide), threads,
        [&](std::int64_t page, std::int64_t token, std::int64_t at, std::int64_t tokens) {
            read_tokens(shape, pool, page, token, destination.from(at), wide, tokens);
        });
}

std::int64_t append_slots(const Nvfp4Pool<std::byte>& pool, const TokenRows<const std::byte>& k,
                          const TokenRows<const std::byte>& v, DType wide,
                          const std::int64_t* slots, std::int64_t n, int threads) {
    return write_slots_of(pool, k, v, wide, slots, n, threads);
}

std::int64_t append_slots(const Nvfp4Pool<std::byte>& pool, const TokenRows<const std::byte>& k,
                          const TokenRows<const std::byte>& v, DType wide,
                          const std::int32_t* slots, std::int64_t n, int threads) {
    return write_slots_of(pool, k, v, wide, slots, n, threads);
}

}  // namespace kvcore
