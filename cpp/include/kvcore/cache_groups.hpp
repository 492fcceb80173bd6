// SPDX-License-Identifier: Apache-2.0
// Models whose layers do not all keep everything: which of them share pages, and what they read.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvcore {

/// What the layers of a group read of the tokens behind them.
enum class GroupKind : std::uint8_t {
    kFull,     // all of them
    kSliding,  // the token itself and the `span` - 1 in front of it
    kChunked,  // those of its own chunk of `span` tokens, counted from the first token
};

/// Layers that read the same tokens. They are cut into bundles, each of which has pages of its own;
/// all bundles of all groups take them from one pool.
struct CacheGroup {
    GroupKind kind = GroupKind::kFull;
    std::int64_t span = 0;         // tokens of the window or chunk; unused by kFull
    std::int32_t num_bundles = 1;  // pages that each run of `page_size` tokens takes
    std::int32_t page_size = 0;    // tokens of its pages; divides CacheConfig's; 0: the same

    /// With `n` tokens written, those below this one are never read again.
    [[nodiscard]] std::int64_t skipped_tokens(std::int64_t n) const noexcept {
        switch (kind) {
            case GroupKind::kSliding:
                return std::max<std::int64_t>(0, n - span + 1);
            case GroupKind::kChunked:
                return n / span * span;
            case GroupKind::kFull:
                break;
        }
        return 0;
    }
    /// So many tokens have to be written before those below `first` >= 1 are never read again.
    /// Not asked of kFull.
    [[nodiscard]] std::int64_t least_skipping(std::int64_t first) const noexcept {
        return kind == GroupKind::kChunked ? (first + span - 1) / span * span : first + span - 1;
    }
};

/// Pages of one group of layers in one replica at this moment.
struct GroupStats {
    std::int64_t held_pages = 0;    // that requests, pins and copies read
    std::int64_t cached_pages = 0;  // that the prefix tree has
    std::int64_t holes = 0;         // that the tree lacks for tokens that it has
    std::int64_t given_back = 0;    // since construction or the last reset: behind windows
    std::int64_t filled = 0;        // since then: holes of the tree that have pages again
    std::int64_t stored_pages = 0;  // since then: copied to the host tier
    std::int64_t loaded_pages = 0;  // since then: copied back

    /// Adds another replica's.
    GroupStats& operator+=(const GroupStats& other) noexcept {
        held_pages += other.held_pages;
        cached_pages += other.cached_pages;
        holes += other.holes;
        given_back += other.given_back;
        filled += other.filled;
        stored_pages += other.stored_pages;
        loaded_pages += other.loaded_pages;
        return *this;
    }
};

}  // namespace kvcore
