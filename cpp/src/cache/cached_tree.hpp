// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cache/state.hpp"
#include "kvcore/cached_columns.hpp"

/// What snapshots read of the caches.
namespace kvcore::cached_tree {

/// All runs of a replica's tree. Throws std::bad_alloc. O(cached tokens).
[[nodiscard]] CachedTree list(const ManagerState& state, std::int32_t replica);
/// Throws std::invalid_argument for a span that cannot be, and std::out_of_range.
void check_span(const ManagerState& state, const ColumnSpan& span);
/// Where the columns that are asked for end, as far as they are cached; no node where none is.
/// Throws as `check_span`; with quotas std::bad_alloc.
[[nodiscard]] TreePosition find(const ManagerState& state, const ColumnSpan& span);
/// Throws std::invalid_argument for columns [n] that nobody can offer.
void check_offer(const ManagerState& state, const ColumnSpan& span, const CachedColumn* columns);

}  // namespace kvcore::cached_tree
