// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

namespace kvcore {

/// What CacheManager::match found for a request, held until it is allocated or dropped.
///
/// Owns: a hold on the cached pages that it names, and on what continues them in the host tier:
/// nobody evicts them meanwhile, and they count as used. Dropping it leaves no trace: not even the
/// order of eviction knows that they were looked at.
/// Threads: one at a time; the manager, which must outlive it, may be used by others.
/// Cost: O(1) to drop, under the manager's mutex.
class PrefixHit {
   public:
    /// Holds nothing.
    PrefixHit() noexcept;
    PrefixHit(PrefixHit&& other) noexcept;
    PrefixHit& operator=(PrefixHit&& other) noexcept;
    ~PrefixHit();

    /// Tokens that the request would take from the cache, copied and loaded ones included; 0 where
    /// that is no more than it has.
    [[nodiscard]] std::int64_t num_tokens() const noexcept;
    /// Whole pages of those that it would share.
    [[nodiscard]] std::int64_t num_pages() const noexcept;

   private:
    friend class CacheManager;
    struct Held;

    explicit PrefixHit(std::unique_ptr<Held> held) noexcept;

    std::unique_ptr<Held> held_;
};

}  // namespace kvcore
