// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "support/memory.hpp"

namespace kvcore {

/// The fingerprints of recently evicted runs, in two lists.
///
/// Owns: an entry and a bucket for each node id. So its capacity is the highest number of runs that
/// the tree has had. When all entries are taken, the oldest entry of the longer list is dropped; of
/// the first list if both lists have the same length.
/// Memory: only `make_room` allocates.
/// Cost: O(1); `make_room` redistributes all entries over the buckets when their number doubles.
class Ghosts {
   public:
    /// As EvictionPolicy::make_room.
    void make_room(std::uint32_t last);
    void add(bool list, std::uint64_t fingerprint) noexcept;
    /// Removes the entry of a fingerprint. Returns the list that had it, -1 if neither list had it.
    int take(std::uint64_t fingerprint) noexcept;
    [[nodiscard]] std::size_t size(bool list) const noexcept { return lists_[list].size; }

   private:
    static constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();
    struct Entry {
        std::uint64_t fingerprint = 0;
        std::uint32_t chain = kNone;  // next in the bucket, or next free entry
        std::uint32_t older = kNone;
        std::uint32_t newer = kNone;
        bool list = false;
    };
    struct List {
        std::uint32_t oldest = kNone;
        std::uint32_t newest = kNone;
        std::size_t size = 0;
    };

    [[nodiscard]] std::uint32_t& bucket(std::uint64_t fingerprint) noexcept {
        return buckets_[static_cast<std::uint32_t>(fingerprint) & mask_];
    }
    void link(std::uint32_t at) noexcept;
    void remove(std::uint32_t at) noexcept;
    void spread(std::uint32_t mask) noexcept;

    GrowingArray<Entry> entries_;
    GrowingArray<std::uint32_t> buckets_;
    std::uint32_t num_entries_ = 0;
    std::uint32_t mask_ = 0;  // buckets in use - 1; their number is a power of two
    std::uint32_t free_ = kNone;
    std::array<List, 2> lists_;
};

}  // namespace kvcore
