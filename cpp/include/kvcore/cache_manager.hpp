// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/lookup_table.hpp"
#include "kvcore/metrics.hpp"
#include "kvcore/prefix_tree.hpp"
#include "kvcore/sequence_table.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

struct CacheConfig {
    std::int64_t num_blocks = 0;     // pages of each replica
    std::int32_t page_size = 128;    // tokens
    std::int64_t max_sequences = 0;  // claimed at a time, in each replica
    std::int64_t max_seq_len = 0;    // tokens
    std::int32_t num_replicas = 1;
    bool prefix_caching = true;
    bool dedup = true;               // commit swaps a page for an equal cached one
    bool partial_page_reuse = true;  // a hit may end inside a page, whose start is then copied
};

/// One request as the manager sees it for the length of a call.
/// 0 <= start < active <= end: KV is written for [0, start), [start, active) runs next.
struct RequestView {
    SequenceHandle sequence;
    const TokenId* tokens = nullptr;  // [end]
    std::int64_t start = 0;
    std::int64_t active = 0;
    std::int64_t end = 0;
    std::string_view name_space;  // prefix-cache namespace; "" is the default one
};

/// The requests of a call: an array of views, or of pointers to views that lie elsewhere.
class RequestBatch {
   public:
    RequestBatch(RequestView* views, std::int64_t n) noexcept : views_(views), size_(n) {}
    RequestBatch(RequestView* const* rows, std::int64_t n) noexcept : rows_(rows), size_(n) {}

    [[nodiscard]] std::int64_t size() const noexcept { return size_; }
    [[nodiscard]] RequestView& operator[](std::int64_t row) const noexcept {
        return rows_ != nullptr ? *rows_[row] : views_[row];
    }

   private:
    RequestView* views_ = nullptr;
    RequestView* const* rows_ = nullptr;
    std::int64_t size_;
};

enum class ReserveStatus { kOk, kNoSpace };

/// What `reserve` would do now.
struct ReservePlan {
    std::int64_t hit_tokens = 0;     // taken from the cache, copied ones included
    std::int64_t new_pages = 0;      // allocated
    std::int64_t evicted_pages = 0;  // evicted for that
    std::int64_t copied_tokens = 0;  // of hit_tokens, copied out of a partly equal page
    bool fits = false;
};

/// A page copy that the owner of the pool performs: the first `num_tokens` tokens, all layers.
struct PageCopy {
    std::int32_t replica = 0;
    BlockId source = 0;
    BlockId destination = 0;
    std::int32_t num_tokens = 0;
    SequenceHandle sequence;   // that the destination belongs to
    TreeNode* held = nullptr;  // pinned until finish_copies; nullptr: not a page of the tree

    friend bool operator==(const PageCopy& a, const PageCopy& b) noexcept {
        return a.replica == b.replica && a.source == b.source && a.destination == b.destination &&
               a.num_tokens == b.num_tokens;
    }
};

/// Rows of a batch that hold the same leading pages.
struct SharedPrefix {
    std::int32_t replica = 0;
    std::int64_t num_tokens = 0;     // written, by all of them
    std::vector<std::int32_t> rows;  // of the replica's part of the batch
};

/// A page that commit swapped for an equal cached one.
struct PageSwap {
    std::int32_t row;  // of the batch
    std::int32_t column;
    BlockId page;  // the cached one, now in the row
};

/// Where `fetch` writes one replica's part of a batch, and how large that part is.
struct FetchTarget {
    LookupTable* table = nullptr;
    std::uint32_t* cache_lengths = nullptr;  // [table->max_rows()]
    std::int64_t rows = 0;                   // out: requests of this replica
    std::int32_t width = 0;                  // out: most pages of one of them
    std::int64_t longest_new = 0;            // out: longest active - start
    std::int64_t longest_active = 0;         // out: longest active
};

enum class FetchStatus {
    kOk,
    kNoSpace,  // nothing changed; see row, needed, available
    kGrow,     // pages are reserved, but a table is missing or too small for rows x width; what was
               // offered may be written in part
};

struct FetchResult {
    FetchStatus status = FetchStatus::kOk;
    std::int64_t row = 0;        // first request that did not fit
    std::int64_t needed = 0;     // pages
    std::int64_t available = 0;  // pages
    bool has_moved = false;      // start or active of a request changed
};

/// Names a pinned prefix; `num_tokens` of it are kept.
struct PinHandle {
    std::uint32_t index = 0;
    std::uint32_t generation = 0;
    std::int64_t num_tokens = 0;
};

/// The C++ entry point: which page belongs to whom, what a prompt can reuse, what goes when memory
/// is full. Ids only; the caller owns the memory behind them.
///
/// Owns: per replica a BlockPool and a PrefixTree; the SequenceTable over all replicas.
/// Invariant: every page is free, or held by as many sequences and the tree as its count says.
/// Threads: any number may call any method; one mutex, held for the length of a call. The tokens of
/// a RequestView must stay unchanged meanwhile.
/// Errors: a call that throws or answers "no" has changed nothing.
/// Cost: claim, release of committed pages, pin: O(1). reserve: comparing the prompt with the cache
/// plus O(pages added). commit: O(new tokens). fetch: O(pages changed since the table's last use).
class CacheManager {
   public:
    /// Throws std::invalid_argument for sizes below 1.
    explicit CacheManager(const CacheConfig& config);

    [[nodiscard]] const CacheConfig& config() const noexcept { return config_; }

    /// Registers a sequence; takes no pages. Throws std::out_of_range for a replica that does not
    /// exist and CapacityError when the replica is full.
    [[nodiscard]] SequenceHandle claim(std::int32_t replica = 0);
    [[nodiscard]] bool contains(SequenceHandle sequence) const;
    [[nodiscard]] std::int32_t replica_of(SequenceHandle sequence) const;
    /// Page ids in logical order.
    [[nodiscard]] std::vector<BlockId> pages_of(SequenceHandle sequence) const;
    /// Forgets a sequence: committed pages stay cached, the others are free.
    void release(SequenceHandle sequence);

    /// Reuses the cached prefix, then allocates pages for end + num_steps - 1 tokens, evicting
    /// where it must. On success `request.start` and `.active` are where the request now stands.
    /// Page copies owed go to `copies` (and are then due before their finish_copies) or, without
    /// it, to the list that take_copies hands out. Throws RequestNotFoundError,
    /// std::invalid_argument, and CapacityError when the request can never fit.
    [[nodiscard]] ReserveStatus reserve(RequestView& request, std::int64_t num_steps = 1,
                                        std::vector<PageCopy>* copies = nullptr);
    /// Reserves in order up to the first that does not fit; returns how many. Every error is raised
    /// before anything is reserved. With `copies` it also stops behind a row that owes one: do it,
    /// finish it, and go on with the rest.
    [[nodiscard]] std::int64_t reserve_batch(const RequestBatch& batch, std::int64_t num_steps = 1,
                                             std::vector<PageCopy>* copies = nullptr);
    /// What `reserve` would do now. A request that can never fit answers fits = false.
    [[nodiscard]] ReservePlan plan(const RequestView& request, std::int64_t num_steps = 1) const;

    /// Reserves what is missing, atomically over the batch, and writes lengths and page tables to
    /// `targets` [num_replicas], batch order kept inside a replica.
    [[nodiscard]] FetchResult fetch(const RequestBatch& batch, std::int64_t num_steps,
                                    FetchTarget* targets, std::vector<PageCopy>* copies = nullptr);

    /// Puts every page whose tokens are all written (start / page_size) into the prefix tree. Equal
    /// pages found there replace the sequence's own, reported in `swaps`. Where a fork still holds
    /// such a page, it and those behind it wait for the next commit after that has let go.
    /// Throws std::invalid_argument when a request claims more written tokens than its pages hold.
    void commit(const RequestBatch& batch, std::vector<PageSwap>& swaps);

    /// Claims `children` on the parent's replica with the tokens that the parent had written as of
    /// its last commit: their pages are shared, and copied before either writes into one. Sets each
    /// child's sequence, start and, where that was not behind start, active. Throws
    /// std::invalid_argument unless each child has those tokens, at least one more, and the
    /// parent's namespace; CapacityError when the replica cannot take all of them.
    void fork(const RequestView& parent, const RequestBatch& children);
    /// Forgets written tokens from `n` on, and pages that hold none any more. Throws
    /// std::invalid_argument unless 0 <= n <= the last fetched `active`.
    void truncate(SequenceHandle sequence, std::int64_t n);
    /// Groups of rows with common leading pages, nested ones too, longest first. O(rows * runs).
    [[nodiscard]] std::vector<SharedPrefix> shared_prefixes(const RequestBatch& batch) const;

    /// Cached whole pages of a prefix: their number and, if asked for, their ids.
    [[nodiscard]] std::int64_t match(std::int32_t replica, std::string_view name_space,
                                     const TokenId* tokens, std::int64_t n,
                                     std::vector<BlockId>* pages = nullptr) const;
    /// Keeps those pages from eviction until unpinned.
    [[nodiscard]] PinHandle pin(std::int32_t replica, std::string_view name_space,
                                const TokenId* tokens, std::int64_t n);
    /// Throws InvalidHandleError for a handle unpinned before.
    void unpin(PinHandle pin);

    /// Replica for a request not claimed yet: longest prefix hit, then most available pages, then
    /// fewest sequences, then lowest index.
    [[nodiscard]] std::int32_t recommend_replica(std::string_view name_space, const TokenId* tokens,
                                                 std::int64_t n) const;

    /// Forgets every cached page that nobody holds, in every replica.
    void reset_prefix_cache();

    /// Copies owed since the last call, of sequences still claimed; to be done in this order.
    [[nodiscard]] std::vector<PageCopy> take_copies();
    /// The copies given out by reserve or fetch are done: their sources are let go.
    void finish_copies(const std::vector<PageCopy>& copies);

    [[nodiscard]] PoolStats stats(std::int32_t replica) const;
    /// Summed over replicas.
    [[nodiscard]] Metrics metrics() const;
    void reset_metrics();

    /// Throws IntegrityError naming the law that does not hold. O(everything).
    void check_integrity() const;

   private:
    struct Replica {
        BlockPool pool;
        PrefixTree tree;
        std::int64_t num_sequences = 0;
        Metrics metrics;
    };
    struct PinSlot {
        TreeNode* node = nullptr;
        std::int32_t replica = 0;
        std::uint32_t generation = 1;
    };
    struct Supply {
        std::int64_t left;           // pages that can still be had
        bool has_evictable = false;  // counted in, which is worth it only when free ones do not do
        std::int64_t wanted = 0;     // pages
        std::size_t given = 0;       // of taken_, where the next ones are
    };
    struct Admission;  // a reservation worked out, not yet made
    struct BatchRules;
    class InputCount;
    struct LateRow {
        std::int64_t batch_row;
        std::int64_t row;  // of its replica's table
    };
    class WrittenCount;
    struct Undo {
        Sequence* sequence;
        std::int64_t before;
    };
    struct Part;
    struct PageKey {
        std::int32_t replica;
        BlockId page;
        friend bool operator<(const PageKey& a, const PageKey& b) noexcept {
            return a.replica != b.replica ? a.replica < b.replica : a.page < b.page;
        }
    };

    // cache_manager.cpp
    [[nodiscard]] Replica& replica_at(std::int32_t index) const {
        return *replicas_[static_cast<std::size_t>(index)];
    }
    void require_replica(std::int32_t index) const;
    static void free_own_pages(Replica& replica, const Sequence& sequence, std::int32_t from);
    void note_peak(Replica& replica);
    // cache_manager_reserve.cpp
    [[nodiscard]] static bool has_legal_indices(const RequestView& request) noexcept {
        return request.start >= 0 && request.start < request.active &&
               request.active <= request.end;
    }
    /// Longest request that the pool and max_seq_len allow to run so many steps.
    [[nodiscard]] std::int64_t most_tokens(std::int64_t num_steps) const noexcept {
        return std::min(capacity_tokens_, config_.max_seq_len - (num_steps - 1));
    }
    [[noreturn]] void refuse_indices(const RequestView& request, std::int64_t row) const;
    [[noreturn]] void refuse_length(const RequestView& request, std::int64_t row,
                                    std::int64_t num_steps) const;
    static void require_steps(std::int64_t num_steps);
    [[nodiscard]] Admission admit(const Sequence& sequence, const RequestView& request,
                                  std::int64_t num_steps, bool allow_partial) const;
    void find_hit(Admission& admission, const Sequence& sequence, const RequestView& request,
                  bool allow_partial) const;
    void weigh(Admission& admission, const Sequence& sequence, std::int64_t needed) const;
    bool apply(const Admission& admission, Sequence& sequence, RequestView& request,
               std::vector<PageCopy>* copies);
    void take_hit(const Admission& admission, Replica& replica, Sequence& sequence);
    void take_pages(Replica& replica, std::int64_t n, BlockId* out, EvictionGuard guard = {});
    void append_pages(Replica& replica, Sequence& sequence, std::int64_t n,
                      EvictionGuard guard = {});
    [[nodiscard]] static EvictionGuard guard_of(const Admission& admission,
                                                const Sequence& sequence);
    [[nodiscard]] static bool is_own(const Sequence& sequence, std::int32_t column) noexcept;
    [[nodiscard]] bool is_sole_holder(const Sequence& sequence, std::int32_t column) const;
    [[nodiscard]] std::int64_t count_sole(const Sequence& sequence, std::int64_t begin,
                                          std::int64_t end) const;
    static void drop_columns(Replica& replica, Sequence& sequence, std::int32_t from);
    static void move_back(Replica& replica, Sequence& sequence, std::int32_t columns);
    void thaw(const Admission& admission, Replica& replica, SequenceHandle handle,
              Sequence& sequence, std::vector<PageCopy>* copies);
    void owe_copy(PageCopy copy, TreePosition source, Replica& replica,
                  std::vector<PageCopy>* copies);
    void owe_shared_copy(const PageCopy& copy, Replica& replica, std::vector<PageCopy>* copies);
    void put_on_list(const PageCopy& copy);
    void prune_copies();
    void count_hit(const Admission& admission, Sequence& sequence);
    void count_input(std::int64_t start, std::int64_t active, Sequence& sequence) {
        if (active <= sequence.counted_end) return;
        replica_at(sequence.replica).metrics.input_tokens +=
            active - std::max(start, sequence.counted_end);
        sequence.counted_end = active;
    }
    // cache_manager_batch.cpp
    /// It has all pages that the next steps write into, none of them shared.
    [[nodiscard]] bool is_reserved(const Sequence& sequence, const RequestView& request,
                                   std::int64_t num_steps) const noexcept {
        const std::int64_t page = config_.page_size;
        return request.end + num_steps - 1 <= sequence.num_pages() * page &&
               request.start >= sequence.frozen * page;
    }
    [[nodiscard]] BatchRules rules_of(std::int64_t num_steps);
    [[noreturn]] static void refuse_repetition(std::int64_t row);
    void check_batch(const RequestBatch& batch, std::int64_t num_steps);
    [[nodiscard]] bool reserve_missing(const RequestBatch& batch, std::int64_t num_steps,
                                       std::vector<PageCopy>* copies, FetchResult& result);
    [[nodiscard]] bool only_grow(const RequestBatch& batch) const;
    [[nodiscard]] std::int64_t missing_pages(const RequestView& request, const Sequence& sequence,
                                             std::int64_t num_steps) const;
    [[nodiscard]] bool find_supply(const RequestBatch& batch, std::int64_t num_steps,
                                   FetchResult& result);
    [[nodiscard]] bool grow_together(const RequestBatch& batch, std::int64_t num_steps,
                                     FetchResult& result);
    [[nodiscard]] bool reserve_together(const RequestBatch& batch, std::int64_t num_steps,
                                        std::vector<PageCopy>* copies, FetchResult& result);
    [[nodiscard]] bool fits_together(const std::vector<Admission>& admissions,
                                     FetchResult& result) const;
    [[noreturn]] void refuse_unreserved(const RequestView& request, const Sequence& sequence,
                                        std::int64_t row) const;
    void note_leaving(const Admission& admission, const Sequence& sequence);
    bool apply_together(const std::vector<Admission>& admissions, const RequestBatch& batch,
                        std::vector<PageCopy>* copies);
    [[nodiscard]] std::int32_t end_of_commit(const Sequence& sequence,
                                             const RequestView& request) const;
    void commit_pages(Replica& replica, Sequence& sequence, const RequestView& request,
                      std::int32_t row, std::vector<PageSwap>& swaps);
    // cache_manager_fetch.cpp
    void write_ready_rows(const RequestBatch& given, std::int64_t num_steps, FetchTarget* targets,
                          InputCount& counted);
    [[nodiscard]] bool have_room(const FetchTarget* targets) const;
    // cache_manager_fork.cpp
    static void check_children(const RequestView& parent, std::int64_t written,
                               const RequestBatch& children);
    static void adopt_pages(Replica& replica, Sequence& parent, Sequence& child,
                            std::int32_t num_pages);
    void share_copies(SequenceHandle handle, const Sequence& child);
    void forget_copies(SequenceHandle handle, const Sequence& sequence, std::int32_t from);
    // cache_manager_check.cpp
    void check_sequence(const Sequence& sequence) const;
    void check_counts(std::int32_t replica) const;

    CacheConfig config_;
    mutable std::mutex mutex_;
    std::vector<std::unique_ptr<Replica>> replicas_;
    mutable SequenceTable sequences_;
    std::vector<PinSlot> pins_;
    std::vector<std::uint32_t> free_pins_;
    std::vector<PageCopy> owed_copies_;
    std::vector<PageCopy> held_sources_;  // given out; each holds a reference to its source
    std::size_t prune_copies_at_ = 64;
    std::int64_t capacity_tokens_;
    std::uint32_t batch_stamp_ = 0;
    std::uint32_t count_epoch_ = 0;  // resets of the metrics
    // Scratch of a call, kept for its memory.
    std::vector<Sequence*> batch_;         // of its rows
    std::vector<std::int64_t> missing_;    // rows that need pages
    std::vector<LateRow> late_;            // rows that fetch writes when it has reserved
    std::vector<Undo> undo_;               // what to take back from the rows of a refused batch
    std::vector<std::int64_t> new_input_;  // tokens of each replica
    std::vector<Supply> supply_;           // of each replica
    std::vector<BlockId> taken_;           // pages on the way to their rows
    std::map<PageKey, std::uint32_t> leaving_;  // forks of a page that copy it in this call
    std::vector<DuplicatePage> duplicates_;
};

}  // namespace kvcore
