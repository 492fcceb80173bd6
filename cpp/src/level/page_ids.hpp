// SPDX-License-Identifier: Apache-2.0
// Checks and look-ups for page ids that callers pass.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "level/level.hpp"

namespace kvcore::page_ids {

/// Throws InvalidHandleError if the id is not a page of the replica. O(1).
void require(const Replica& home, BlockId page);
/// The column of each of these pages [n]: the page itself if a column is a page, -1 for a page
/// without a column. Throws InvalidHandleError for an id that is not a page of the replica, and
/// std::bad_alloc. O(n), with groups O(pages of the replica).
[[nodiscard]] std::vector<BlockId> columns_of(const Replica& home, const BlockId* pages,
                                              std::int64_t n);
/// A bit for each id of the pool, set for these columns. Ignores -1.
[[nodiscard]] std::vector<bool> mark(const Replica& home, const std::vector<BlockId>& columns);
/// Finds the columns that are in the tree, or were forgotten and are still held. Returns their ids,
/// in rising order, each with its position as the last column of a prefix. Cuts each run after the
/// last of these columns, so a hold on them keeps no later columns. O(cached columns).
[[nodiscard]] std::vector<std::pair<BlockId, TreePosition>> locate(
    Replica& home, const std::vector<BlockId>& columns);

}  // namespace kvcore::page_ids
