// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "kvcore/cache_config.hpp"
#include "kvcore/prefix_tree.hpp"
#include "kvcore/request.hpp"
#include "kvcore/types.hpp"
#include "pages/page_owners.hpp"

namespace kvcore {

/// The retention priorities that requests set for their pages, and the current time.
///
/// Owns: the priorities of sequences with priorities, by entry of the SequenceTable.
/// Threads: no locks of its own. Cost: O(1) for a sequence without priorities, else O(ranges).
class Priorities {
   public:
    /// Columns with the same retention.
    struct Segment {
        std::int32_t end = std::numeric_limits<std::int32_t>::max();
        Retention retention;
    };

    explicit Priorities(std::int32_t page_size) noexcept : page_size_(page_size) {}

    /// Sets the priorities of a sequence. Throws std::invalid_argument for invalid priorities, and
    /// std::bad_alloc.
    void set(SequenceHandle sequence, const RequestPriority& priority);
    void forget(SequenceHandle sequence) noexcept;

    [[nodiscard]] std::int64_t now() const noexcept { return now_; }
    void set_now(std::int64_t now) noexcept { now_ = now; }

    /// Returns the segment that starts at a column.
    [[nodiscard]] Segment segment(SequenceHandle sequence, std::int32_t column) const noexcept {
        const RequestPriority* priority = find(sequence);
        return priority == nullptr ? Segment() : segment_of(*priority, column);
    }
    /// Applies the priorities of a sequence to the pages from `first` to `at`, which it uses.
    void retain(PrefixTree& tree, SequenceHandle sequence, TreePosition at,
                std::int32_t first) const noexcept;

   private:
    [[nodiscard]] const RequestPriority* find(SequenceHandle sequence) const noexcept {
        return sequence.index < all_.size() ? all_[sequence.index].get() : nullptr;
    }
    [[nodiscard]] Segment segment_of(const RequestPriority& priority,
                                     std::int32_t column) const noexcept;
    [[nodiscard]] Retention lasting(std::int32_t priority, std::int64_t duration) const noexcept;

    std::int32_t page_size_;
    std::int64_t now_ = std::numeric_limits<std::int64_t>::min();
    std::vector<std::unique_ptr<RequestPriority>> all_;
};

namespace quotas {

/// Returns the owner for a tenant number. Throws std::invalid_argument for an invalid number.
[[nodiscard]] Owner owner_of(const CacheConfig& config, std::int32_t tenant);

}  // namespace quotas

}  // namespace kvcore
