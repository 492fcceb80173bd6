// SPDX-License-Identifier: Apache-2.0
// Pages that callers name by their ids.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "level/replica.hpp"

namespace kvcore::page_ids {

/// Throws InvalidHandleError for an id that is none of the replica's pages. O(1).
void require(const Replica& home, BlockId page);
/// The column of each of these pages [n], itself where a column is a page; -1 for a page that no
/// column has. Throws InvalidHandleError for an id that is none of the replica's pages, and
/// std::bad_alloc. O(n), with groups O(pages of the replica).
[[nodiscard]] std::vector<BlockId> columns_of(const Replica& home, const BlockId* pages,
                                              std::int64_t n);
/// A bit for each id of the pool: whether it is one of these columns; -1 is none.
[[nodiscard]] std::vector<bool> mark(const Replica& home, const std::vector<BlockId>& columns);
/// Those of these columns that are in the tree, or were forgotten there and are held yet, by rising
/// ids: each the last one of a prefix. Runs are cut behind the last of theirs, so that a hold on
/// them keeps no more. O(cached columns).
[[nodiscard]] std::vector<std::pair<BlockId, TreePosition>> locate(
    Replica& home, const std::vector<BlockId>& columns);

}  // namespace kvcore::page_ids
