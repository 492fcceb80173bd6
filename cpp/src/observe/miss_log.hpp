// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kvcore/cache_config.hpp"
#include "kvcore/misses.hpp"
#include "kvcore/prefix_tree.hpp"
#include "kvcore/request.hpp"
#include "level/level.hpp"
#include "request/sequence.hpp"
#include "support/memory.hpp"

namespace kvcore {

/// The runs of pages that left a replica's trees, by the prefix that they continued.
///
/// Owns: the tokens of at most `most_pages` pages; the oldest runs are dropped first.
/// Invariant: a run is found by the hash of the tokens before it, and by its first tokens; a search
/// compares all tokens.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: `add` O(1), without reading more than the first tokens. `find` compares the tokens.
class LostRuns {
   public:
    using Time = std::chrono::steady_clock::time_point;
    using Tokens = std::unique_ptr<TokenId[], CFree>;
    struct Run {
        std::uint64_t before = 0;  // hash of the tokens of the prefix that it continued
        std::int32_t first = 0;    // pages before it
        std::int32_t num_pages = 0;
        Misses::Reason cause = Misses::kEvicted;
        Time time;
    };
    struct Found {
        std::int32_t num_pages = 0;  // equal pages; 0: no run is found
        Misses::Reason cause = Misses::kEvicted;
        Time time;
    };

    LostRuns(std::int32_t page_size, std::int64_t most_pages)
        : page_size_(page_size), most_pages_(most_pages) {}

    /// Adds a run with its tokens. Throws std::bad_alloc.
    void add(const Run& run, Tokens tokens);
    /// The run that left last, of the runs after `first` pages that begin with the page `tokens`:
    /// its pages that are equal to `tokens` [n * page_size].
    [[nodiscard]] Found find(std::uint64_t before, std::int32_t first, const TokenId* tokens,
                             std::int32_t n) const noexcept;
    /// Cuts the runs with the same arguments at the end of their equal pages, at most after `pages`
    /// pages, so that a search after these pages finds the rest. Throws std::bad_alloc.
    void split(std::uint64_t before, std::int32_t first, const TokenId* tokens, std::int32_t n,
               std::int32_t pages);
    [[nodiscard]] Tokens copy(const TokenId* tokens, std::int32_t n) const;
    [[nodiscard]] std::int64_t num_pages() const noexcept { return num_pages_; }

   private:
    static constexpr std::uint32_t kNone = ~std::uint32_t{0};
    struct Entry {
        Run run;
        Tokens tokens;
        std::uint64_t key = 0;
        std::uint32_t older = kNone;  // in its bucket
        std::uint32_t newer = kNone;
    };

    [[nodiscard]] std::uint64_t key_of(std::uint64_t before, const TokenId* tokens) const noexcept;
    [[nodiscard]] std::int32_t count_equal(const Entry& entry, const TokenId* tokens,
                                           std::int32_t n) const noexcept;
    template <class Visit>
    void for_each_like(std::uint64_t before, std::int32_t first, const TokenId* tokens,
                       std::int32_t n, const Visit& visit) const;
    void link(std::uint32_t at) noexcept;
    void grow();
    void drop_oldest() noexcept;

    // Runs with equal first tokens that a search compares, the newest first.
    static constexpr int kMostCompared = 16;

    const std::int32_t page_size_;
    const std::int64_t most_pages_;
    std::vector<Entry> entries_;  // a ring; its size is a power of two
    std::vector<std::uint32_t> buckets_;
    std::uint32_t oldest_ = 0;
    std::uint32_t size_ = 0;
    std::int64_t num_pages_ = 0;
};

/// Why the tokens of each admitted prompt were not in the cache.
///
/// An admission is a claim whose hit is final: its first fetch or commit. A request that is claimed
/// again is another admission, with its tokens at that time. A fork has no admission.
///
/// Owns: the lost runs of each replica, at most `explain_pages` pages together, and the misses of
/// each claim. Listens to the trees, and passes each call on to the listener that a tree had
/// before. Invariant: cached + missed tokens of an admission == its tokens; the counts are the sum
/// of all admissions since the last reset of metrics. Memory: no call fails if memory is short:
/// pages that cannot be recorded are lost, and counted. Threads: no locks of its own; CacheManager
/// locks around it. Cost: O(1) per evicted run, and O(tokens) for a run that is evicted in parts.
/// An admission costs a look-up, and a comparison of the tokens that were cached before.
class MissLog {
   public:
    /// Other namespaces that are searched for a prompt.
    static constexpr std::int32_t kMostNamespaces = 16;

    MissLog(const CacheConfig& config, const std::vector<std::unique_ptr<Replica>>& replicas);
    ~MissLog();
    MissLog(const MissLog&) = delete;
    MissLog& operator=(const MissLog&) = delete;

    /// Pages that leave the trees while this object exists leave because of `cause`.
    class Cause {
       public:
        Cause(MissLog* log, Misses::Reason cause) noexcept : log_(log) {
            if (log_ != nullptr) log_->forced_ = cause;
        }
        Cause(const Cause&) = delete;
        Cause& operator=(const Cause&) = delete;
        ~Cause() {
            if (log_ != nullptr) log_->forced_ = Misses::kNumReasons;
        }

       private:
        MissLog* log_;
    };

    /// A claim begins. Throws std::bad_alloc.
    void begin(SequenceHandle handle);
    /// The stores have the first `columns` columns of a prompt.
    void note_stored(SequenceHandle handle, std::int32_t columns) noexcept;
    /// A reservation took the longest hit. Finds out why the other tokens are not cached.
    void note_hit(const Replica& home, SequenceHandle handle, const Sequence& sequence,
                  const RequestView& request, const FoundHit& hit, bool declines_partial) noexcept;
    /// The hit of a claim is final. A second call does nothing.
    void seal(SequenceHandle handle) noexcept;
    /// A claim begins again.
    void uncount(SequenceHandle handle) noexcept;
    void reset_counts() noexcept;

    /// The misses of a claim; all zeros before its first reservation.
    [[nodiscard]] const Misses& of(SequenceHandle handle) const noexcept {
        return rows_[handle.index].misses;
    }
    [[nodiscard]] MissCounts counts() const noexcept;
    /// Throws IntegrityError if the tokens of a claim or of the counts do not add up. O(claims).
    void check_integrity() const;

   private:
    class Recorder;
    struct Admission {
        const Replica& home;
        const Sequence& sequence;
        const RequestView& request;
        const FoundHit& hit;
        bool declines_partial;
    };
    struct Row {
        Misses misses;
        std::int32_t stored = 0;  // columns that the stores have
        bool is_noted = false;
        bool is_counted = false;
        std::uint32_t epoch = 0;  // of the reset of metrics before it was counted
    };

    void explain(const Admission& given, Row& row);
    template <class Add>
    [[nodiscard]] std::int32_t find_lost(const Admission& given, std::int32_t depth, Misses& misses,
                                         const Add& add);

    const CacheConfig& config_;
    std::vector<std::unique_ptr<LostRuns>> lost_;       // of each replica
    std::vector<std::unique_ptr<Recorder>> recorders_;  // 2 * replica, + 1: nullptr without host
    std::vector<Row> rows_;
    MissCounts counts_;
    std::uint32_t epoch_ = 0;
    Misses::Reason forced_ = Misses::kNumReasons;
};

}  // namespace kvcore
