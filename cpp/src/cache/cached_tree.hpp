// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cache/cache_data.hpp"
#include "kvcore/cached_columns.hpp"

/// The cache contents that snapshots read.
namespace kvcore::cached_tree {

/// All runs of a replica's tree. Throws std::bad_alloc. O(cached tokens).
[[nodiscard]] CachedTree list(const CacheData& cache, std::int32_t replica);
/// Throws std::invalid_argument for an invalid span, and std::out_of_range for a replica that does
/// not exist.
void check_span(const CacheData& cache, const ColumnSpan& span);
/// The end of the requested columns as far as they are cached; the node is null if no requested
/// column is cached. Throws as `check_span`; with quotas also std::bad_alloc.
[[nodiscard]] TreePosition find(const CacheData& cache, const ColumnSpan& span);
/// Throws std::invalid_argument for columns [n] with windows or states that the manager does not
/// have, or for a manager without prefix caching.
void check_offer(const CacheData& cache, const ColumnSpan& span, const CachedColumn* columns);

}  // namespace kvcore::cached_tree
