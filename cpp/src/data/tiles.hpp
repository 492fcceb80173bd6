// SPDX-License-Identifier: Apache-2.0
// Tiles of elements, and the kernels that convert them.
#pragma once

#include "data/kernels/isa.hpp"

namespace kvcore::cpu {

[[nodiscard]] constexpr int narrow_index(DType dtype) noexcept {
    return static_cast<int>(dtype) - kNumWide;
}

[[nodiscard]] inline const WideKernels& kernels_of(DType wide) {
    return kernels().wide[static_cast<int>(wide)];
}

/// Tokens [first, first + count) of a tile.
[[nodiscard]] constexpr Tile part_of(Tile tile, std::int64_t first, std::int64_t count) noexcept {
    tile.source += first * tile.source_token;
    if (tile.destination != nullptr) tile.destination += first * tile.destination_token;
    if (tile.scales != nullptr) tile.scales += first * tile.scale_token;
    if (tile.new_scales != nullptr) tile.new_scales += first * tile.scale_token;
    tile.tokens = count;
    return tile;
}

/// Returns the same tile with the fewest heads and tokens that its strides allow: kernels are
/// fastest in long runs. `source`, `destination`: bytes of an element.
[[nodiscard]] inline Tile merged(Tile tile, std::int64_t source,
                                 std::int64_t destination) noexcept {
    if (tile.tokens == 0 || tile.heads == 0) return tile;
    const auto can_merge = [&](std::int64_t from, std::int64_t to, std::int64_t scale) {
        const std::int64_t scales = tile.dim / tile.group * 4;
        const bool is_one_scale = tile.dim == tile.group && scale == 0;
        return from == tile.dim * source && to == tile.dim * destination &&
               (is_one_scale || scale == scales);
    };
    const auto merge = [&](std::int64_t& count, std::int64_t scale) {
        if (scale == 0) tile.group *= count;
        tile.dim *= count;
        count = 1;
    };
    if (tile.heads == 1 || can_merge(tile.source_head, tile.destination_head, tile.scale_head)) {
        if (tile.heads > 1) merge(tile.heads, tile.scale_head);
        if (can_merge(tile.source_token, tile.destination_token, tile.scale_token)) {
            merge(tile.tokens, tile.scale_token);
        }
    }
    return tile;
}

}  // namespace kvcore::cpu
