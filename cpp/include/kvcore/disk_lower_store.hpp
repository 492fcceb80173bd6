// SPDX-License-Identifier: Apache-2.0
// A disk store below a host tier: reads and writes the memory of the tier.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "kvcore/disk_store.hpp"
#include "kvcore/lower_store.hpp"
#include "kvcore/store_moves.hpp"

namespace kvcore {

/// Rows of equal size: the pages of a host tier, or the slots of its states.
struct TierRows {
    std::byte* data = nullptr;
    std::int64_t n = 0;
    std::int64_t bytes = 0;
};

/// The memory of a replica's host tier.
struct TierMemory {
    TierRows pages;
    TierRows slots;
};

/// A disk store as a lower store. Its threads read into the host tier without another copy.
///
/// Owns: counters. The store and the memory belong to the caller.
/// Threads: any number.
/// Cost: O(1) per page, and the read.
class DiskLowerStore final : public LowerStore {
   public:
    /// Counters. DiskStoreStats counts the failures of the disk.
    struct Counters {
        std::int64_t errors = 0;                // calls of a store that its owner had closed
        std::int64_t timeouts = 0;              // reads
        std::vector<double> read_seconds = {};  // of the last reads, at most 512
        std::vector<double> write_seconds = {};
    };

    /// `memory` [num_replicas]. `has_parts`: whether a page can have more than one part.
    /// `seconds`: the time limit of a read.
    DiskLowerStore(DiskStore& store, std::vector<TierMemory> memory, bool has_parts,
                   double seconds);

    void parts_of(const PageKey* keys, std::size_t n, std::uint64_t* parts) override;
    std::size_t read(const ColumnRange& columns, std::uint64_t* parts, StoreTask& late,
                     StoreHooks& hooks) override;
    StoreWrite write(const StoreMoves& moves, const std::vector<std::size_t>& columns) override;
    std::int64_t end(StoreWrite& write) override;
    void remove(const std::vector<PageKey>& keys) override;

    /// Returns the counters since the last call.
    [[nodiscard]] Counters take_counters();

   private:
    [[nodiscard]] StorePart<std::byte> place_of(std::int32_t replica, StoredPart part) const;
    void complete(std::vector<PageToWrite>& pages, StoreWrite& write);
    void count(std::int64_t Counters::* counter) noexcept;
    void took(std::vector<double> Counters::* times, std::chrono::steady_clock::time_point begin);

    DiskStore& store_;
    std::vector<TierMemory> memory_;
    bool has_parts_;
    double seconds_;
    std::mutex mutex_;  // guards all members below
    Counters counters_;
};

}  // namespace kvcore
