// SPDX-License-Identifier: Apache-2.0
// Writes of host-tier columns to the stores below the host tier.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "kvcore/cache_manager.hpp"
#include "kvcore/lower_store.hpp"
#include "kvcore/store_moves.hpp"

namespace kvcore {

/// Writes the columns that arrived in the host tier and wait. Each store gets the pages that it
/// lacks.
///
/// Threads: any number, each for its own batch.
/// Cost: hashing of the columns' tokens, and the writes.
class StoreWriter {
   public:
    /// Columns that are being written. The host tier keeps them unchanged until `finish`.
    struct Batch {
        StoreMoves moves;
        std::uint64_t num_resets = 0;  // of the caches, when the columns were taken
        std::uint64_t epoch = 0;
    };

    /// All arguments outlive the writer.
    StoreWriter(CacheManager& manager, std::vector<LowerStore*> stores);

    /// Takes up to `most` columns that wait. Returns false if no column waits.
    [[nodiscard]] bool take(std::int64_t most, Batch& out);
    /// Writes a batch to all stores, and waits. Returns the number of columns that some store does
    /// not have. An event reports the columns if a store has all of them.
    [[nodiscard]] std::int64_t write(const Batch& batch);
    /// Ends a batch, whether it was written or not; its columns may be evicted again.
    void finish(Batch& batch) noexcept;
    /// Removes pages in flight from the stores after they are written.
    void forget() noexcept { ++epoch_; }

   private:
    CacheManager& manager_;
    std::vector<LowerStore*> stores_;
    std::atomic<std::uint64_t> epoch_{0};  // number of calls of `forget`
};

}  // namespace kvcore
