// SPDX-License-Identifier: Apache-2.0
// What goes between the host tier and stores below it, said by keys and by pages of the tier: the
// words that who owns the pages and who reads and writes them have in common. Plain values.
#pragma once

#include <cstdint>
#include <vector>

#include "kvcore/page_keys.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// The part of a stored page that is the checkpoint at its end. All others are lanes: part 0 alone
/// without groups, else one for each page that a column has, in the order of the bundles.
constexpr std::int32_t kStatePart = 63;

/// Where a part lies in the host tier: a page, or a slot of its states.
struct StoredPart {
    std::int32_t part = 0;
    BlockId page = 0;
};

/// A column of tokens, and parts of it as bits.
struct ColumnParts {
    std::int32_t column = 0;
    std::uint64_t parts = 0;
};

/// Columns by their keys, each with parts that are to be written to stores, or read from them.
/// What it names is held until it is finished by its ticket: nobody else gets it, whoever resets or
/// evicts meanwhile.
struct StoreMoves {
    std::uint64_t ticket = 0;  // 0: there is nothing to do
    std::int32_t replica = 0;
    std::vector<PageKey> keys;
    std::vector<StoredPart> parts;   // of all columns, in their order
    std::vector<std::int32_t> ends;  // of each column its end in `parts`

    /// Ready for the next call; keeps the memory.
    void clear() noexcept {
        ticket = 0;
        keys.clear();
        parts.clear();
        ends.clear();
    }
};

/// What device and host tier have of a prompt. Columns, from its start on.
struct StoreSearch {
    std::int32_t replica = 0;
    std::int32_t stored = 0;  // of the host tier
    std::int32_t have = 0;    // of either
    std::int32_t legal = 0;   // that a hit could take of both together
    std::int32_t most = 0;    // that a hit could take of a cache that had everything; 0: none will
    PageKey parent{};         // in front of column `stored`
    // No group keeps everything: stores need not have every column of a hit.
    bool has_gaps = false;
};

}  // namespace kvcore
