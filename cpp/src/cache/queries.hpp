// SPDX-License-Identifier: Apache-2.0
// Queries: they read a manager's state and change nothing.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "cache/cache_data.hpp"

namespace kvcore::queries {

/// Each is the verb of CacheManager with that name.
[[nodiscard]] std::int64_t match(const Replica& replica, std::string_view name_space,
                                 const TokenId* tokens, std::int64_t n, std::vector<BlockId>* pages,
                                 std::int32_t* partial_tokens, std::int32_t bundle);
[[nodiscard]] std::int64_t touch(Replica& replica, std::string_view name_space,
                                 const TokenId* tokens, std::int64_t n, std::vector<BlockId>* pages,
                                 std::int32_t* partial_tokens, std::int64_t most_pages,
                                 std::int32_t bundle);
[[nodiscard]] std::int32_t recommend_replica(const CacheData& cache, std::string_view name_space,
                                             const TokenId* tokens, std::int64_t n);
[[nodiscard]] std::vector<BlockId> pages_of(const CacheData& cache, SequenceHandle handle,
                                            std::int32_t bundle, std::int64_t first);
[[nodiscard]] std::vector<BlockId> next_pages(const Replica& replica);
[[nodiscard]] std::vector<TokenId> tokens_up_to(const CacheData& cache, TokenId highest);
[[nodiscard]] SequenceMark mark_of(const CacheData& cache, SequenceHandle handle);
[[nodiscard]] std::int64_t first_uncached(const CacheData& cache, SequenceHandle sequence);
[[nodiscard]] PoolStats stats(const CacheData& cache, std::int32_t replica);
[[nodiscard]] std::vector<TenantStats> tenant_stats(const Replica& replica);
[[nodiscard]] Metrics metrics(const CacheData& cache) noexcept;
/// Leading pages that rows of a batch share.
[[nodiscard]] std::vector<SharedPrefix> shared_prefixes(const CacheData& cache,
                                                        const RequestBatch& batch);
/// In check_integrity.cpp: the conservation laws of the whole manager.
void check_integrity(const CacheData& cache);

}  // namespace kvcore::queries
