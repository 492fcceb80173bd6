// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "cache/cache_data.hpp"

namespace kvcore {

/// Takes some or all pages out of the cache for good, because their contents are wrong.
///
///     prefix   [ a | b | c | d ]      forget(c): no hit finds c and d again. A request that holds
///                     \\ e ]         all four keeps them, and commits nothing after b until it
///                                     is truncated to b; its release frees the pages
///
/// Owns: nothing between two calls. Threads: not thread-safe; CacheManager locks around it.
/// Cost: O(cached pages + requests); with a host tier also the match of each prefix in the tier.
class Forgetter {
   public:
    explicit Forgetter(CacheData& state) noexcept : state_(state) {}

    /// The verb of CacheManager.
    [[nodiscard]] std::int64_t forget(std::int32_t replica, const BlockId* pages, std::int64_t n);
    [[nodiscard]] bool reset();

   private:
    [[nodiscard]] std::vector<TreePosition> find_stored(
        const Replica& home, const std::vector<TreePosition>& ends) const;
    void limit_owners(std::int32_t replica, const std::vector<bool>& marked) noexcept;
    void limit_copies(std::int32_t replica, const PrefixTree::Branches& branches) noexcept;
    void limit_holders(std::int32_t replica) noexcept;
    void detach_copies() noexcept;
    void drop_forgotten() noexcept;
    void limit_all() noexcept;
    [[nodiscard]] bool is_empty() const noexcept;

    CacheData& state_;
};

}  // namespace kvcore
