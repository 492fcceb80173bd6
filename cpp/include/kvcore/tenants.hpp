// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>

namespace kvcore {

/// What one tenant may hold of the pages of each replica. A page is held while a request, a pin or
/// a copy keeps it from eviction, and counts once: for the tenant whose request took it from the
/// pool, who is also the one that cached it first. Pages that are cached and held by nobody count
/// for none.
struct TenantQuota {
    static constexpr std::int64_t kNoCeiling = std::numeric_limits<std::int64_t>::max();

    std::int64_t reserved_pages = 0;      // others leave it so many, free or evictable
    std::int64_t max_pages = kNoCeiling;  // it never holds more
};

/// What one tenant holds in one replica at this moment.
struct TenantStats {
    std::int64_t held_pages = 0;
    std::int64_t reserved_pages = 0;
    std::int64_t max_pages = TenantQuota::kNoCeiling;
    std::int64_t refused = 0;  // reservations of its requests that quotas alone were in the way of
    std::int64_t input_tokens = 0;  // of its requests, as of Metrics
    std::int64_t cache_tokens = 0;
    std::int64_t generated_tokens = 0;
};

}  // namespace kvcore
