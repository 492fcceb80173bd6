// SPDX-License-Identifier: Apache-2.0
// A store below the host tier, as a StoreReader uses it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/disk_store.hpp"
#include "kvcore/page_keys.hpp"
#include "kvcore/store_moves.hpp"

namespace kvcore {

/// Calls to the owner of the host tier's memory. A call may throw: the exception ends the load that
/// made the call.
class StoreHooks {
   public:
    /// Seconds between two calls of `check_interrupt`.
    static constexpr double kInterval = 0.1;

    StoreHooks() = default;
    StoreHooks(const StoreHooks&) = delete;
    StoreHooks& operator=(const StoreHooks&) = delete;
    virtual ~StoreHooks() = default;

    /// Waits for copies to and from the pages and slots of a fill, and makes their memory present.
    virtual void prepare(const StoreMoves& fill) = 0;
    /// Waits a limited time until the columns that wait to be written are written, because they
    /// take room in the host tier. Returns true if any column waited.
    virtual bool make_room() = 0;
    /// Called every `kInterval` seconds by a thread that waits. Throws to end the wait.
    virtual void check_interrupt() = 0;
};

/// Consecutive columns of a fill.
struct ColumnRange {
    const StoreMoves& moves;
    std::size_t first;
    std::size_t n;

    [[nodiscard]] const PageKey& key(std::size_t i) const noexcept { return moves.keys[first + i]; }
    [[nodiscard]] std::uint64_t parts(std::size_t i) const noexcept {
        return moves.parts_of(first + i);
    }
};

/// Columns that a store writes. Until the write has ended, their memory must not change.
struct StoreWrite {
    std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
    std::vector<std::vector<std::byte>> memory = {};  // of parts that the store had before
    StoreTask task = {};                              // its destructor waits
    std::int64_t stored = 0;  // pages that were stored before `write` returned, without the task
};

/// A store that keeps pages by key, below the host tier.
///
/// A failure of the store is a page that it does not have: the methods throw only if memory runs
/// out, or if a hook throws.
/// Threads: any number.
class LowerStore {
   public:
    /// The parts of a page whose store cannot list its parts before a read.
    static constexpr std::uint64_t kAllParts = ~std::uint64_t{0};

    LowerStore() = default;
    LowerStore(const LowerStore&) = delete;
    LowerStore& operator=(const LowerStore&) = delete;
    virtual ~LowerStore() = default;

    /// Writes the stored parts of pages [n] to `parts` [n], as bits; 0 for an unknown page.
    virtual void parts_of(const PageKey* keys, std::size_t n, std::uint64_t* parts) = 0;
    /// Reads columns into the host tier. Returns the number of pages that were read, a prefix of
    /// the columns, and writes their stored parts to `parts` [columns.n]. If the last of these
    /// pages lacks requested parts, its memory may hold any bytes. A read that is not over when the
    /// call returns or throws is in `late`: until it is over, the memory of the columns is in use.
    virtual std::size_t read(const ColumnRange& columns, std::uint64_t* parts, StoreTask& late,
                             StoreHooks& hooks) = 0;
    /// Begins to write `columns` of `moves`; a page keeps the parts that the store had before.
    virtual StoreWrite write(const StoreMoves& moves, const std::vector<std::size_t>& columns) = 0;
    /// Waits for a write. Returns the number of its pages that are stored now.
    virtual std::int64_t end(StoreWrite& write) = 0;
    virtual void remove(const std::vector<PageKey>& keys) = 0;
};

}  // namespace kvcore
