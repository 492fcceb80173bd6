// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "kvcore/advice.hpp"
#include "kvcore/cache_config.hpp"
#include "kvcore/prefix_tree.hpp"
#include "kvcore/request.hpp"
#include "level/level.hpp"
#include "observe/shadow_index.hpp"
#include "observe/token_counts.hpp"
#include "pages/page_owners.hpp"
#include "request/sequence.hpp"
#include "support/coarse_clock.hpp"
#include "support/memory.hpp"

namespace kvcore {

/// An event of a sampled page.
struct AdviceRecord {
    enum Kind : std::uint8_t {
        kUse,        // a prompt uses the page
        kUseOfHeld,  // the same, and another request held the page before
        kLeft,       // the last holder of the page leaves
        kForgotten,  // the page leaves the cache for good
        kReset,      // all pages leave the cache for good
    };

    static constexpr std::int32_t kAnyRoom = std::numeric_limits<std::int32_t>::max();

    std::uint64_t page;    // the hash of its prefix
    std::int32_t tokens;   // of a use: tokens of the prompt in this page
    std::int32_t room;     // sampled pages without a holder that the cache has room for
    bool is_found_by_lru;  // a use at factor 1
    Owner owner;
    Kind kind;

    [[nodiscard]] bool is_use() const noexcept { return kind <= kUseOfHeld; }
};

/// The sums over the admissions of a slice of time, for one tenant.
struct AdviceSums {
    std::int64_t admissions = 0;
    std::int64_t prompt_tokens = 0;
    std::int64_t cached_tokens = 0;
    std::int64_t device_tokens = 0;   // of cached_tokens: in whole pages of the device
    std::int64_t partial_tokens = 0;  // of cached_tokens: in partial pages
    std::int64_t use_tokens = 0;      // of the pages that a hit may contain
    std::int64_t sampled_uses = 0;
    std::int64_t sampled_tokens = 0;  // of these uses
    std::array<std::int64_t, AdviceTokens::kFactors.size()>
        found_tokens{};  // by each size, of them

    AdviceSums& operator+=(const AdviceSums& other) noexcept;
};

/// A copy of a replica's records and sums, from which `advise` computes an Advice.
struct AdviceCopy {
    std::vector<std::vector<AdviceRecord>> records;  // of each replica, the oldest first
    std::vector<AdviceSums> sums;                    // of each tenant
    double seconds = 0;
    std::int64_t sample = 0;
    std::int64_t lost_uses = 0;
    bool is_lru = false;  // the cache evicts in the order of the shadow index
};

/// The uses of sampled pages in the last hour, and the distance of each use.
///
/// A page is sampled if the hash of its prefix (its tokens, all tokens before it and its namespace)
/// is 0 modulo `sample`. A use is a whole page of a prompt that a hit may contain. It is recorded
/// with its distance from the last use:
///
///     page of the hit       at the admission: the first fetch or commit
///     other page            when it is committed. If another request has committed it since the
///                           admission, no size had the page
///
/// A request that is claimed again is another admission, of the tokens that were not counted
/// before. A fork has no admission.
///
///     page enters the tree   it enters the shadow index of its replica
///     use, or commit         the request holds the page until its release
///     forget                 the pages leave the shadow index
///     reset                  all pages leave the shadow index; the records stay
///
/// The window has at most `kNumSlices` slices. A slice ends after a minute, or if its records are
/// full. So with many requests the window is shorter than an hour.
///
/// Owns: a ShadowIndex and the records for each replica; the sampled pages of each claim. Listens
/// to the device's trees, and passes each call on to the listener that a tree had before.
/// Invariant: a sampled page that a request holds has this holder in the index.
/// Memory: no call fails if memory is short: uses that cannot be recorded are lost, and counted.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: an admission reads the hash of each page of its hit. A page that enters the tree is hashed
/// once. O(log pages) per sampled page.
class AdviceLog {
   public:
    /// Returns the time in nanoseconds. No call returns less than an earlier call.
    using Clock = std::int64_t (*)();

    static constexpr std::size_t kNumSlices = 60;
    static constexpr std::int64_t kSliceTime = 60'000'000'000;  // ns
    static constexpr std::size_t kSliceRecords = 2048;
    /// Entries of a shadow index. For larger pools, fewer pages are sampled.
    static constexpr std::int64_t kMostEntries = 1 << 16;

    /// Throws std::invalid_argument if layers keep different tokens; std::bad_alloc.
    /// `is_lru`: the trees evict by LRU.
    AdviceLog(const CacheConfig& config, const std::vector<std::unique_ptr<Replica>>& replicas,
              bool is_lru, Clock clock = coarse_time);
    ~AdviceLog();
    AdviceLog(const AdviceLog&) = delete;
    AdviceLog& operator=(const AdviceLog&) = delete;

    /// Pages that leave the trees while this object exists are forgotten.
    class Forgetting {
       public:
        explicit Forgetting(AdviceLog* log) noexcept : log_(log) {
            if (log_ != nullptr) log_->is_forgetting_ = true;
        }
        Forgetting(const Forgetting&) = delete;
        Forgetting& operator=(const Forgetting&) = delete;
        ~Forgetting() {
            if (log_ != nullptr) log_->is_forgetting_ = false;
        }

       private:
        AdviceLog* log_;
    };

    /// A claim begins. Throws std::bad_alloc.
    void begin(SequenceHandle handle);
    /// A reservation took the longest hit. `fresh`: the positions of the prompt that were not
    /// counted in an earlier claim.
    void note_hit(const Replica& home, const Sequence& sequence, const RequestView& request,
                  TokenCounts::Positions fresh) noexcept;
    /// The hit of a claim is final. A second call does nothing.
    void seal(const Replica& home, SequenceHandle handle, const Sequence& sequence,
              Owner owner) noexcept;
    /// The columns first .. end - 1 of a sequence are in the tree, which had the columns before
    /// `first_new`.
    void note_commit(const Replica& home, SequenceHandle handle, const Sequence& sequence,
                     Owner owner, std::int32_t first, std::int32_t first_new,
                     std::int32_t end) noexcept;
    /// A fork shares the first `columns` of its parent.
    void share(const Sequence& sequence, SequenceHandle parent, SequenceHandle child,
               std::int32_t columns) noexcept;
    /// A claim gives back its pages: it ends, or begins again. Its uses stay counted.
    void release(const Replica& home, SequenceHandle handle, const Sequence& sequence,
                 Owner owner) noexcept;
    /// All pages left the cache.
    void reset() noexcept;

    /// Throws std::bad_alloc.
    [[nodiscard]] AdviceCopy copy() const;
    /// Throws IntegrityError. O(entries).
    void check_integrity() const;

   private:
    class Recorder;
    /// A sampled page of a claim.
    struct Page {
        std::uint64_t hash;
        ShadowIndex::Entry entry;  // kNone: the index does not have the page
        std::int32_t column;
        std::int32_t tokens;
        bool is_found_by_lru;
        bool was_held;
    };
    struct Row {
        std::vector<Page> pages;        // by column
        AdviceSums sums;                // of the admission
        std::int64_t known_tokens = 0;  // counted before this admission
        std::int64_t distance = 0;      // of the last used page
        std::int32_t next = 0;          // columns before it were used
        std::int32_t use_end = 0;       // columns from here on are no uses
        bool is_noted = false;
        bool is_counted = false;
    };
    static constexpr std::int64_t kUnused = std::numeric_limits<std::int64_t>::min() / 2;

    struct Slice {
        std::int64_t begin = kUnused;
        std::vector<std::size_t> num_records;  // of each replica
        std::vector<AdviceSums> sums;          // of each tenant
    };

    static constexpr std::int64_t kNotFound = std::numeric_limits<std::int64_t>::max();

    [[nodiscard]] bool is_sampled(std::uint64_t hash) const noexcept {
        return (hash & (sample_ - 1)) == 0;
    }
    [[nodiscard]] Recorder& recorder_of(const Sequence& sequence) const noexcept {
        return *recorders_[static_cast<std::size_t>(sequence.replica)];
    }
    void begin_uses(Row& row, const RequestView& request, std::int64_t known_tokens) const noexcept;
    void add_sampled(std::vector<Page>& pages, std::uint64_t hash, std::int32_t column) noexcept;
    void find_sampled(const Sequence& sequence, std::int32_t first, std::int32_t end) noexcept;
    template <class DistanceOf>
    void use_pages(const Sequence& sequence, Row& row, AdviceSums& sums, std::vector<Page>& pages,
                   const DistanceOf& distance_of) noexcept;
    void end_uses(Row& row, AdviceSums& sums, std::int32_t end) const noexcept;
    void count_use(Row& row, AdviceSums& sums, Page& page, std::int64_t distance) const noexcept;
    void record_uses(const Replica& home, const Sequence& sequence, const Row& row,
                     std::int32_t first, Owner owner) noexcept;
    void hold(Row& row, ShadowIndex& index, const Page& page) noexcept;
    [[nodiscard]] std::int64_t distance(std::int64_t sampled, std::int64_t others) const noexcept {
        return sampled * static_cast<std::int64_t>(sample_) + others;
    }
    [[nodiscard]] std::int32_t room(const Replica& home, const ShadowIndex& index,
                                    std::int64_t own) const noexcept;
    void add_record(std::size_t replica, const AdviceRecord& record) noexcept;
    void begin_slice(std::int64_t now) noexcept;
    [[nodiscard]] AdviceRecord* records_of(std::size_t replica, std::size_t slice) const noexcept;

    const CacheConfig& config_;
    const bool is_lru_;
    const Clock clock_;
    std::uint64_t sample_;
    std::vector<std::unique_ptr<Recorder>> recorders_;  // of each replica
    std::unique_ptr<AdviceRecord[], CFree> records_;    // [replica][slice][kSliceRecords]
    std::vector<Row> rows_;
    std::vector<Page> sampled_;  // of the present call, by column
    std::vector<Slice> slices_;  // a ring
    std::size_t slice_ = 0;      // the present slice
    std::int64_t lost_uses_ = 0;
    bool is_forgetting_ = false;
};

/// Computes an Advice. Throws std::bad_alloc. O(records log records).
[[nodiscard]] Advice advise(const AdviceCopy& copy);

}  // namespace kvcore
