// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <mutex>

#include "data/tiles.hpp"
#include "kvcore/quantize.hpp"
#include "support/parallel.hpp"

namespace kvcore {
namespace {

using cpu::Tile;

std::int64_t worth(std::int64_t elements_each) noexcept {
    return cpu::worth_a_thread(elements_each * item_size(DType::kFloat32));
}

// Contiguous elements [rows, heads, dim] with scales [rows, heads], or [heads] for all rows.
Tile tile_of(HeadRows shape, DType in, const std::byte* source, DType out, std::byte* destination,
             bool has_scales_of_rows) noexcept {
    Tile tile{};
    tile.source = source;
    tile.source_head = shape.dim * item_size(in);
    tile.source_token = shape.heads * tile.source_head;
    tile.destination = destination;
    tile.destination_head = shape.dim * item_size(out);
    tile.destination_token = shape.heads * tile.destination_head;
    tile.scale_head = sizeof(float);
    tile.scale_token = has_scales_of_rows ? shape.heads * tile.scale_head : 0;
    tile.tokens = shape.rows;
    tile.heads = shape.heads;
    tile.dim = tile.group = shape.dim;
    return tile;
}

// Calls kernel(part) for the tokens of each thread.
template <class Kernel>
void for_parts(const Tile& tile, DType in, DType out, int threads, const Kernel& kernel) {
    if (tile.dim == 0) return;
    cpu::parallel_for(tile.tokens, worth(tile.heads * tile.dim), threads,
                      [&](std::int64_t begin, std::int64_t end) {
                          kernel(cpu::merged(cpu::part_of(tile, begin, end - begin), item_size(in),
                                             item_size(out)));
                      });
}

// Finds one scale for each head from all rows: each thread finds the maxima of its rows, then the
// maxima of all threads are merged.
void find_scales(HeadRows shape, DType wide, const std::byte* source, DType narrow, float* scales,
                 int threads) {
    constexpr std::int64_t kHeads = 64;
    const auto raise_to_largest = cpu::kernels_of(wide).raise_to_largest;
    std::fill(scales, scales + shape.heads, 0.0F);
    std::mutex merging;
    const Tile all = tile_of(shape, wide, source, narrow, nullptr, false);
    cpu::parallel_for(shape.rows, worth(shape.heads * shape.dim), threads,
                      [&](std::int64_t begin, std::int64_t end) {
                          for (std::int64_t first = 0; first < shape.heads; first += kHeads) {
                              Tile tile = cpu::part_of(all, begin, end - begin);
                              tile.source += first * tile.source_head;
                              tile.heads = std::min(kHeads, shape.heads - first);
                              float most[kHeads] = {};
                              raise_to_largest(tile, most);
                              const std::lock_guard<std::mutex> lock(merging);
                              for (std::int64_t head = 0; head < tile.heads; ++head) {
                                  scales[first + head] = std::max(scales[first + head], most[head]);
                              }
                          }
                      });
    for (std::int64_t head = 0; head < shape.heads; ++head) {
        scales[head] = std::max(scales[head] / largest(narrow), kSmallestScale);
    }
}

}  // namespace

void quantize(Groups shape, DType wide, const std::byte* source, DType narrow, std::byte* codes,
              float* scales, int threads) {
    Tile tile = tile_of({shape.groups, 1, shape.group}, wide, source, narrow, codes, true);
    tile.new_scales = reinterpret_cast<std::byte*>(scales);
    for_parts(tile, wide, narrow, threads,
              cpu::kernels_of(wide).quantize[cpu::narrow_index(narrow)]);
}

void quantize(HeadRows shape, DType wide, const std::byte* source, DType narrow, std::byte* codes,
              float* scales, int threads) {
    find_scales(shape, wide, source, narrow, scales, threads);
    quantize_by(shape, wide, source, narrow, codes, scales, threads);
}

void quantize_by(HeadRows shape, DType wide, const std::byte* source, DType narrow,
                 std::byte* codes, const float* scales, int threads) {
    Tile tile = tile_of(shape, wide, source, narrow, codes, false);
    tile.scales = reinterpret_cast<const std::byte*>(scales);
    for_parts(tile, wide, narrow, threads,
              cpu::kernels_of(wide).quantize_by[cpu::narrow_index(narrow)]);
}

void dequantize(Groups shape, DType narrow, const std::byte* codes, const float* scales, DType wide,
                std::byte* destination, int threads) {
    Tile tile = tile_of({shape.groups, 1, shape.group}, narrow, codes, wide, destination, true);
    tile.scales = reinterpret_cast<const std::byte*>(scales);
    for_parts(tile, narrow, wide, threads,
              cpu::kernels_of(wide).dequantize[cpu::narrow_index(narrow)]);
}

void dequantize(HeadRows shape, DType narrow, const std::byte* codes, const float* scales,
                DType wide, std::byte* destination, int threads) {
    Tile tile = tile_of(shape, narrow, codes, wide, destination, false);
    tile.scales = reinterpret_cast<const std::byte*>(scales);
    for_parts(tile, narrow, wide, threads,
              cpu::kernels_of(wide).dequantize[cpu::narrow_index(narrow)]);
}

}  // namespace kvcore
