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

/// What requests ask for their pages, and the time.
///
/// Owns: the terms of the sequences that have any, by their place in the table of sequences.
/// Threads: none of its own. Cost: O(1) where a sequence has none, else O(ranges).
class Terms {
   public:
    /// Columns that are to be kept alike.
    struct Segment {
        std::int32_t end = std::numeric_limits<std::int32_t>::max();
        Retention retention;
    };

    explicit Terms(std::int32_t page_size) noexcept : page_size_(page_size) {}

    /// Throws std::invalid_argument for terms that are none, and std::bad_alloc.
    void set(SequenceHandle sequence, const RequestTerms& terms);
    void forget(SequenceHandle sequence) noexcept;

    [[nodiscard]] std::int64_t now() const noexcept { return now_; }
    void set_now(std::int64_t now) noexcept { now_ = now; }

    /// From that column on.
    [[nodiscard]] Segment segment(SequenceHandle sequence, std::int32_t column) const noexcept {
        const RequestTerms* terms = find(sequence);
        return terms == nullptr ? Segment() : segment_of(*terms, column);
    }
    /// A sequence uses the pages from `first` on that lead to `at`.
    void retain(PrefixTree& tree, SequenceHandle sequence, TreePosition at,
                std::int32_t first) const noexcept;

   private:
    [[nodiscard]] const RequestTerms* find(SequenceHandle sequence) const noexcept {
        return sequence.index < all_.size() ? all_[sequence.index].get() : nullptr;
    }
    [[nodiscard]] Segment segment_of(const RequestTerms& terms, std::int32_t column) const noexcept;
    [[nodiscard]] Retention lasting(std::int32_t priority, std::int64_t duration) const noexcept;

    std::int32_t page_size_;
    std::int64_t now_ = std::numeric_limits<std::int64_t>::min();
    std::vector<std::unique_ptr<RequestTerms>> all_;
};

namespace quotas {

/// The owner that a number of a tenant stands for. Throws std::invalid_argument for one that is
/// none.
[[nodiscard]] Owner owner_of(const CacheConfig& config, std::int32_t tenant);

}  // namespace quotas

}  // namespace kvcore
