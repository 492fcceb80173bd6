// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kvcore/page_moves.hpp"
#include "kvcore/transfer.hpp"

namespace kvcore {

/// Does the page copies that a CacheManager gives out, in the pools of its replicas.
///
/// Owns: views of the pools; their memory is the caller's.
/// Threads: `run` may be called by any number at a time, for copies that are given out once each.
/// Cost: the bytes. Allocates nothing.
class PageCopier {
   public:
    /// The caches that make up the pool of a replica: of each of its devices, and scales.
    using Pool = std::vector<CacheView<std::byte>>;

    /// `pools` [num_replicas].
    explicit PageCopier(std::vector<Pool> pools) : pools_(std::move(pools)) {}

    /// Copies the first tokens of pages, in any order. Of one CacheManager's transfers no page is
    /// a source and a destination, and none a destination twice.
    void run(const PageMove* copies, std::int64_t n) const;
    /// What `run` would move.
    [[nodiscard]] std::int64_t bytes_of(const PageMove* copies, std::int64_t n) const noexcept;

   private:
    std::vector<Pool> pools_;
};

}  // namespace kvcore
