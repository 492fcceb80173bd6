// SPDX-License-Identifier: Apache-2.0
// Loads of prompts from the stores below the host tier.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvcore/cache_manager.hpp"
#include "kvcore/lower_store.hpp"
#include "kvcore/page_keys.hpp"
#include "kvcore/store_moves.hpp"

namespace kvcore {

/// The first column after the columns that the device and the host tier have, and its place in the
/// stores.
struct NextColumn {
    std::vector<PageKey> keys;  // of the columns after StoreSearch::stored, up to this column
    std::int32_t store = -1;    // that has it
    std::uint64_t parts = 0;
};

/// A search of the lower stores for the columns of a prompt. Each key is computed once, and each
/// store is called once for each column.
///
/// Owns: a copy of the tokens.
/// Threads: one at a time.
class LowerSearch {
   public:
    /// `tokens` [found.most * page_size]. `next`: the result of StoreReader::has, or empty.
    LowerSearch(CacheManager& manager, const StoreSearch& found, std::string_view name_space,
                const TokenId* tokens, NextColumn next);

    [[nodiscard]] const StoreSearch& found() const noexcept { return found_; }

   private:
    friend class StoreReader;
    using Stores = std::vector<LowerStore*>;
    static constexpr std::int32_t kNowhere = -1;
    static constexpr std::int32_t kUnknown = -2;
    struct Column {
        std::int32_t store = kUnknown;
        std::uint64_t parts = 0;
    };

    [[nodiscard]] Column& at(std::int32_t column) {
        return columns_[static_cast<std::size_t>(column)];
    }
    [[nodiscard]] const PageKey& key(std::int32_t column) const {
        return column < found_.stored ? front_[static_cast<std::size_t>(column)]
                                      : keys_[static_cast<std::size_t>(column - found_.stored)];
    }
    void make_keys(std::int32_t first, std::int32_t end);
    void look(const Stores& stores, const std::vector<std::int32_t>& columns);
    void look(const Stores& stores, std::int32_t first, std::int32_t end);
    [[nodiscard]] std::int32_t reach(const Stores& stores);
    [[nodiscard]] std::vector<ColumnParts> longest(const Stores& stores, std::int32_t end,
                                                   std::int32_t least);
    void begin_fill(const std::vector<ColumnParts>& columns, StoreMoves& out);
    [[nodiscard]] bool lose(const Stores& stores, std::int32_t column);

    CacheManager& manager_;
    StoreSearch found_;
    std::string name_space_;
    std::vector<TokenId> tokens_;
    std::vector<PageKey> keys_;   // of the columns from found_.stored on
    std::vector<PageKey> front_;  // of the columns before found_.stored; made when they are needed
    std::vector<Column> columns_;
    std::vector<std::pair<std::int32_t, std::int32_t>> lost_;  // columns and stores
    std::int32_t end_ = 0;  // of the hit in the last call of `longest`
};

/// Loads the columns of prompts from lower stores into the host tier.
///
/// Owns: the reads that exceeded their time limit, with the host-tier pages that they use.
/// Invariant: at most one thread reads a column of a replica at a time. Pages of a fill are given
/// back after the store has ended its use of them.
/// Threads: any number. It calls the manager, the stores and the hooks without a lock, except that
/// a fill ends under the lock that `forget` takes.
/// Cost: O(columns) and the reads. A read of the first store is also the only copy of the bytes.
class StoreReader {
   public:
    struct Options {
        std::int64_t page_bytes = 0;   // of a page of the host tier
        std::int64_t state_bytes = 0;  // of a slot of the host tier
        std::int64_t batch_bytes = 0;  // approximate size of a read of a store
        double seconds = 0;            // longest wait for columns that another thread reads
    };

    /// `stores`: in the order in which they are searched. All arguments outlive the reader.
    StoreReader(CacheManager& manager, std::vector<LowerStore*> stores, StoreHooks& hooks,
                const Options& options);
    StoreReader(const StoreReader&) = delete;
    StoreReader& operator=(const StoreReader&) = delete;
    /// Waits for the late reads.
    ~StoreReader() = default;

    /// Returns true if a store has the last of `next.keys`, and sets the other members of `next`.
    [[nodiscard]] bool has(NextColumn& next);
    /// The number of columns before the first column that is in no tier. If a hit does not need all
    /// of its columns, counts up to the last column that a store has. Reads no page.
    [[nodiscard]] std::int32_t reach(LowerSearch& search);
    /// Loads the columns that make the hit of a prompt longer.
    void load(LowerSearch& search);
    /// Discards the pages that are in flight now: no search finds them.
    void forget() noexcept;
    /// From now on, `has` and `load` do nothing.
    void switch_off() noexcept { is_off_ = true; }
    [[nodiscard]] bool is_off() const noexcept { return is_off_; }
    /// Switches the reader off, and waits for late reads; at most `seconds`, without limit if
    /// negative. Returns true if the late reads and all calls of other threads are over: from then
    /// on, the reader does not use its stores.
    bool close(double seconds);

   private:
    using Clock = std::chrono::steady_clock;
    using Flights = std::map<std::pair<std::int32_t, PageKey>, std::uint64_t>;
    class Flight;
    class Running;

    /// The pages of a fill. The destructor gives back all pages if the fill has not ended.
    struct OpenFill {
        explicit OpenFill(CacheManager& owner) : manager(owner) {}
        OpenFill(const OpenFill&) = delete;
        OpenFill& operator=(const OpenFill&) = delete;
        ~OpenFill() { end(0, false); }
        void end(std::int64_t arrived, bool forward) noexcept;

        CacheManager& manager;
        StoreMoves moves;
    };
    /// A fill that is being read.
    struct Reading {
        explicit Reading(CacheManager& manager) : fill(manager) {}

        OpenFill fill;
        StoreTask late;  // its destructor runs first, and waits
        std::vector<std::int32_t> columns = {};
        std::size_t arrived = 0;
        bool has_learned = false;    // another attempt may load more
        bool is_from_lower = false;  // the first store lacks some of the pages
        std::uint64_t epoch = 0;
    };

    [[nodiscard]] bool fill(LowerSearch& search, const std::vector<ColumnParts>& columns);
    [[nodiscard]] bool read_on(LowerSearch& search, Reading& reading);
    [[nodiscard]] std::size_t batch(LowerSearch& search, const Reading& reading) const;
    void end(Reading& reading) noexcept;
    void end_late_reads() noexcept;
    [[nodiscard]] std::uint64_t epoch() noexcept;
    [[nodiscard]] bool has_ended(std::unique_lock<std::mutex>& lock, Clock::time_point until,
                                 const Flights::value_type& flight);

    CacheManager& manager_;
    std::vector<LowerStore*> stores_;
    StoreHooks& hooks_;
    Options options_;
    std::atomic<bool> is_off_{false};

    std::mutex mutex_;  // guards all members below
    std::condition_variable changed_;
    Flights flights_;  // columns that are being read, with the number of the flight
    std::uint64_t last_flight_ = 0;
    std::uint64_t epoch_ = 0;   // number of calls of `forget`
    std::int64_t running_ = 0;  // calls in progress
    std::list<Reading> late_;
};

}  // namespace kvcore
