// SPDX-License-Identifier: Apache-2.0
// Messages between the host tier and the stores below it, by key and by page of the tier. The owner
// of the pages and the code that reads and writes the pages share these types. Plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/page_keys.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// The part of a stored page that is the checkpoint at its end. Every other part is a lane: part 0
/// without groups, otherwise a part for each page of a column, in the order of the bundles.
constexpr std::int32_t kStatePart = 63;

/// The place of a part in the host tier: a page, or a slot for states.
struct StoredPart {
    std::int32_t part = 0;
    BlockId page = 0;
};

/// A column of tokens, and a set of its parts as bits.
struct ColumnParts {
    std::int32_t column = 0;
    std::uint64_t parts = 0;
};

/// Columns by key, each with parts to write to stores or to read from them. The host tier holds
/// these pages and slots until the ticket is finished: resets and evictions do not free them.
struct StoreMoves {
    std::uint64_t ticket = 0;  // 0: nothing to do
    std::int32_t replica = 0;
    std::vector<PageKey> keys;
    std::vector<StoredPart> parts;   // of all columns, in column order
    std::vector<std::int32_t> ends;  // for each column, its end in `parts`

    /// The places of a column's parts.
    [[nodiscard]] const StoredPart* begin_of(std::size_t column) const noexcept {
        return parts.data() + (column == 0 ? 0 : ends[column - 1]);
    }
    [[nodiscard]] const StoredPart* end_of(std::size_t column) const noexcept {
        return parts.data() + ends[column];
    }
    /// The parts of a column as bits.
    [[nodiscard]] std::uint64_t parts_of(std::size_t column) const noexcept {
        std::uint64_t bits = 0;
        for (const StoredPart* part = begin_of(column); part != end_of(column); ++part) {
            bits |= std::uint64_t{1} << part->part;
        }
        return bits;
    }

    /// Prepares for the next call; keeps the memory.
    void clear() noexcept {
        ticket = 0;
        keys.clear();
        parts.clear();
        ends.clear();
    }
};

/// The columns of a prompt that the device and the host tier have, counted from its start.
struct StoreSearch {
    std::int32_t replica = 0;
    std::int32_t stored = 0;  // in the host tier
    std::int32_t have = 0;    // on the device or in the host tier, whichever has more
    std::int32_t legal = 0;   // that a hit could use from both
    std::int32_t most = 0;    // of the longest hit if every page were cached; 0: stores cannot help
    PageKey parent{};         // key of the column before column `stored`
    // True if no group keeps every token: stores need not have every column of a hit.
    bool has_gaps = false;
    SequenceHandle sequence{};  // of the request; generation 0 for tokens without a request
};

}  // namespace kvcore
