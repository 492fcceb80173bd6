// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kvcore/cache_config.hpp"
#include "kvcore/misses.hpp"
#include "kvcore/prefix_tree.hpp"
#include "kvcore/request.hpp"
#include "level/level.hpp"
#include "observe/lost_runs.hpp"
#include "request/sequence.hpp"

namespace kvcore {

/// Why the tokens of each admitted prompt were not in the cache.
///
/// An admission is a claim whose hit is final: its first fetch or commit. A request that is claimed
/// again is another admission, with its tokens at that time. A fork has no admission.
///
/// Owns: the lost runs of each replica, at most `explain_pages` pages together, a hash of each
/// cached page, and the misses of each claim. Listens to the trees, and passes each call on to the
/// listener that a tree had before.
/// Invariant: cached + missed tokens of an admission == its tokens; the counts are the sum of all
/// admissions since the last reset of metrics.
/// Memory: no call fails if memory is short: pages that cannot be recorded are lost, and counted.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: a hash of each page that enters a tree. An admission costs a look-up, and a hash of each
/// page that was cached before.
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
    void begin(SequenceHandle handle) {
        if (handle.index >= rows_.size()) rows_.resize(std::size_t{handle.index} + 1);
        Row& row = rows_[handle.index];
        row.stored = 0;
        row.next.column = -1;
        row.is_noted = row.is_counted = false;
    }
    /// The stores have the first `columns` columns of a prompt.
    void note_stored(SequenceHandle handle, std::int32_t columns) noexcept;
    /// Prefetches the memory that `note_hit` reads after this hit.
    void prefetch(const Sequence& sequence, const RequestView& request,
                  const FoundHit& hit) noexcept;
    /// A reservation took the longest hit. Finds out why the other tokens are not cached.
    void note_hit(const Replica& home, SequenceHandle handle, const Sequence& sequence,
                  const RequestView& request, const FoundHit& hit, bool declines_partial) noexcept;
    /// The hit of a claim is final. A second call does nothing.
    void seal(SequenceHandle handle) noexcept;
    /// A claim begins again.
    void uncount(SequenceHandle handle) noexcept;
    void reset_counts() noexcept;

    /// The misses of a claim; all zeros before its first reservation.
    [[nodiscard]] Misses of(SequenceHandle handle) const noexcept {
        const Row& row = rows_[handle.index];
        return row.is_noted ? row.misses : Misses{};
    }
    [[nodiscard]] MissCounts counts() const noexcept;
    /// Throws IntegrityError if the tokens of a claim or of the counts do not add up, or a record
    /// of lost runs is broken. O(claims + records).
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
    // The first page that is searched in the lost runs: its column, the hash of the prefix before
    // it, and its tag.
    struct LostPage {
        std::int32_t column = -1;
        std::uint32_t tag = 0;
        std::uint64_t path = 0;
    };
    struct Row {
        Misses misses;            // set if is_noted
        std::int32_t stored = 0;  // columns that the stores have
        LostPage next;            // the page after the hit
        bool is_noted = false;
        bool is_counted = false;
        std::uint32_t epoch = 0;  // of the reset of metrics before it was counted
    };

    void explain(const Admission& given, Row& row);
    template <class Add>
    [[nodiscard]] std::int32_t find_lost(const Admission& given, std::int32_t depth, Row& row,
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
