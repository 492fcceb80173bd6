// SPDX-License-Identifier: Apache-2.0
// The verbs of CacheManager without its mutex: each changes the data of a cache, and is documented
// in kvcore/cache_manager.hpp. A comment before each group names its file.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/cache_data.hpp"
#include "cache/held_hit.hpp"
#include "cache/reserve.hpp"

namespace kvcore::verbs {

// claim.cpp. O(1); to give pages back, O(uncommitted pages).
[[nodiscard]] SequenceHandle claim(CacheData& cache, std::int32_t replica);
/// Returns true if a thread may wait for the sequence. Stores the history of its request, and its
/// misses.
[[nodiscard]] bool release(CacheData& cache, SequenceHandle handle, RequestHistory* history,
                           std::int64_t returns_in, Misses* misses);
void begin_again(CacheData& cache, SequenceHandle handle);
/// Begins a sequence again that has no transfers under way.
void begin_again(CacheData& cache, Sequence& sequence, SequenceHandle handle) noexcept;
void set_priority(CacheData& cache, SequenceHandle handle, const RequestPriority& priority);
/// Sets the present time of priorities and eviction policies.
void advance(CacheData& cache, std::int64_t now) noexcept;

// truncate.cpp. O(pages given back).
void truncate(CacheData& cache, SequenceHandle handle, std::int64_t n, Transfers* transfers);
[[nodiscard]] std::int64_t leave_windows(CacheData& cache, SequenceHandle handle, std::int64_t n);

// reserve.cpp
[[nodiscard]] BatchReserve reserve(CacheData& cache, const RequestBatch& batch,
                                   std::int64_t num_steps, Transfers* transfers,
                                   const ReserveOptions& options = {});
[[nodiscard]] ReserveStatus begin_at(CacheData& cache, RequestView& request, std::int64_t n,
                                     Transfers* transfers);
[[nodiscard]] ReservePlan plan(CacheData& cache, const RequestView& request,
                               const ReserveArgs& args);
/// The plan for a request that is not claimed.
[[nodiscard]] ReservePlan plan(const CacheData& cache, std::int32_t replica,
                               const RequestView& request, const ReserveArgs& args);

// allocate.cpp
[[nodiscard]] HeldHit match(CacheData& cache, const RequestView& request);
[[nodiscard]] ReserveStatus allocate(CacheData& cache, HeldHit& hit, RequestView& request,
                                     std::int64_t n, Transfers* transfers);

// fetch.cpp. The decode step: O(rows), and O(pages changed) for changed rows.
[[nodiscard]] FetchResult fetch(CacheData& cache, const RequestBatch& batch, std::int64_t num_steps,
                                FetchTarget* targets, Transfers* transfers);

// commit.cpp. O(new tokens), and O(sequences) for a page that forks share.
void commit(CacheData& cache, const RequestBatch& batch, std::vector<PageSwap>& swaps,
            Transfers* transfers);

// fork.cpp. O(children * (pages + tokens compared)).
void fork(CacheData& cache, const RequestView& parent, const RequestBatch& children,
          Transfers* transfers);

// forget.cpp, and reset.cpp for all pages. O(cached pages + requests); with a host tier also the
// match of each prefix in the tier.
[[nodiscard]] std::int64_t forget(CacheData& cache, std::int32_t replica, const BlockId* pages,
                                  std::int64_t n);
/// Requests and transfers bring no forgotten pages of a replica back into the cache.
void drop_forgotten(CacheData& cache, std::int32_t replica) noexcept;
[[nodiscard]] bool reset_prefix_cache(CacheData& cache);
void reset_metrics(CacheData& cache) noexcept;

// finish.cpp
/// Returns false for a ticket that is not under way.
[[nodiscard]] bool finish(CacheData& cache, std::uint64_t ticket, bool done);
void note_late_reads(CacheData& cache, const PageMove* stores, std::int64_t n, std::uint64_t mark);

}  // namespace kvcore::verbs
