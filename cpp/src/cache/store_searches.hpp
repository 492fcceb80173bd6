// SPDX-License-Identifier: Apache-2.0
// Searches before the lower stores are read: how long the prefix is without them.
#pragma once

#include <cstdint>
#include <string_view>

#include "cache/cache_data.hpp"
#include "kvcore/store_moves.hpp"

namespace kvcore::store_searches {

/// Each is CacheManager::search_below with these arguments.
[[nodiscard]] StoreSearch search(CacheData& cache, std::int32_t replica,
                                 std::string_view name_space, const TokenId* tokens,
                                 std::int64_t n);
[[nodiscard]] StoreSearch search(CacheData& cache, const RequestView& request,
                                 std::int64_t max_hit);

}  // namespace kvcore::store_searches
