// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "index/page_owners.hpp"
#include "kvcore/metrics.hpp"
#include "manager/sequence_table.hpp"

namespace kvcore {

/// Where the tokens of a sequence count: for its replica, and for its tenant should it have one.
struct TokenSums {
    Metrics& replica;
    OwnerTally* tenant = nullptr;  // none without quotas

    void add_input(std::int64_t n) const noexcept {
        replica.input_tokens += n;
        if (tenant != nullptr) tenant->input_tokens += n;
    }
    void add_cached(std::int64_t n) const noexcept {
        replica.cache_tokens += n;
        if (tenant != nullptr) tenant->cache_tokens += n;
    }
};

/// Which positions of a claim are in the metrics: each counts once, as input or as taken from the
/// cache.
///
/// Owns: the number of resets. Threads: none of its own. Cost: O(1).
class TokenCounts {
   public:
    /// The metrics count from 0 again. The caller has set them.
    void reset() noexcept { ++epoch_; }
    /// A sequence begins where its parent stands, whose positions are counted.
    void begin(Sequence& child, std::int64_t written) const noexcept {
        child.counted_end = child.counted_from = written;
        child.count_epoch = epoch_;
    }

    /// Positions up to `active` run next.
    static void count_input(const TokenSums& sums, Sequence& sequence, std::int64_t start,
                            std::int64_t active) noexcept {
        if (active <= sequence.counted_end) return;
        sums.add_input(active - std::max(start, sequence.counted_end));
        sequence.counted_end = active;
    }
    /// What was counted before the last reset is left out from now on.
    void settle(Sequence& sequence) const noexcept {
        if (sequence.count_epoch == epoch_) return;
        sequence.count_epoch = epoch_;
        sequence.counted_from = sequence.counted_end;
    }
    /// A longer hit moves what it covers. The sequence is settled.
    static void count_hit(const TokenSums& sums, Sequence& sequence, std::int64_t hit_tokens,
                          std::int64_t copied_tokens) noexcept {
        const std::int64_t covered = std::min(sequence.counted_end, hit_tokens) -
                                     std::max(sequence.counted_from, sequence.hit_tokens);
        sums.add_input(-std::max<std::int64_t>(0, covered));
        sums.add_cached(hit_tokens - sequence.hit_tokens);
        sums.replica.copied_tokens += copied_tokens;
        sequence.hit_tokens = hit_tokens;
    }
    /// Of the tokens that are counted of a sequence, since the last reset.
    [[nodiscard]] OwnerTally counted(const Sequence& sequence) const noexcept {
        const bool is_known = sequence.count_epoch == epoch_;
        const std::int64_t from = is_known ? sequence.counted_from : sequence.counted_end;
        const std::int64_t first = std::max(from, sequence.hit_tokens);
        OwnerTally tally;
        tally.input_tokens = std::max<std::int64_t>(0, sequence.counted_end - first);
        tally.cache_tokens = std::max<std::int64_t>(0, sequence.hit_tokens - from);
        return tally;
    }
    /// The positions of a claim that begins again count when it is reserved again.
    void uncount(const TokenSums& sums, Sequence& sequence, std::int32_t page_size) const noexcept {
        const OwnerTally tally = counted(sequence);
        sums.add_input(-tally.input_tokens);
        sums.add_cached(-tally.cache_tokens);
        if (sequence.count_epoch == epoch_)
            sums.replica.copied_tokens -= sequence.hit_tokens % page_size;
        sequence.hit_tokens = 0;
        sequence.counted_from = sequence.counted_end = 0;
    }

   private:
    std::uint32_t epoch_ = 0;
};

}  // namespace kvcore
