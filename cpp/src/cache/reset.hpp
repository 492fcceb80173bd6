// SPDX-License-Identifier: Apache-2.0
// Verbs that change all of a manager's state at once.
#pragma once

#include <cstdint>

#include "cache/cache_data.hpp"
#include "cache/claim.hpp"

namespace kvcore::housekeeping {

/// Each is the verb of CacheManager with that name. `finish` returns false for a ticket that is not
/// under way.
[[nodiscard]] bool finish(CacheData& state, Claims& claims, std::uint64_t ticket, bool done);
void note_late_reads(CacheData& state, const PageMove* stores, std::int64_t n, std::uint64_t mark);
void advance(CacheData& state, std::int64_t now) noexcept;
void reset_metrics(CacheData& state) noexcept;

}  // namespace kvcore::housekeeping
