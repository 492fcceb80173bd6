// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/block_store.hpp"
#include "kvcore/cache_types.hpp"
#include "kvcore/metrics.hpp"
#include "kvcore/prefix_tree.hpp"
#include "kvcore/sequence_table.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// The C++ entry point: which page belongs to whom, what a prompt can reuse, what goes when memory
/// is full. Ids only; the caller owns the memory behind them.
///
/// Owns: per replica a BlockPool and a PrefixTree, with a host tier a BlockStore too; the
/// SequenceTable over all replicas.
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

    /// As given to the constructor; valid as long as the manager. O(1), without the mutex.
    [[nodiscard]] const CacheConfig& config() const noexcept { return config_; }

    /// Registers a sequence; takes no pages. Throws std::out_of_range for a replica that does not
    /// exist and CapacityError when the replica is full.
    [[nodiscard]] SequenceHandle claim(std::int32_t replica = 0);
    /// Whether the handle names a claimed sequence. O(1).
    [[nodiscard]] bool contains(SequenceHandle sequence) const;
    /// Where it was claimed. Throws RequestNotFoundError. O(1).
    [[nodiscard]] std::int32_t replica_of(SequenceHandle sequence) const;
    /// Page ids in logical order, a copy. Throws RequestNotFoundError. O(pages).
    [[nodiscard]] std::vector<BlockId> pages_of(SequenceHandle sequence) const;
    /// Forgets a sequence: committed pages stay cached, the others are free unless forks hold them.
    /// Throws RequestNotFoundError. O(pages not committed).
    void release(SequenceHandle sequence);

    /// Reuses the cached prefix, then allocates pages for end + num_steps - 1 tokens, evicting
    /// where it must. On success `request.start` and `.active` are where the request now stands.
    /// Page copies owed go to `copies` (and are then due before their finish_copies) or, without
    /// it, to the list that take_copies hands out. Throws RequestNotFoundError,
    /// std::invalid_argument, and CapacityError when the request can never fit.
    /// With a host tier a prefix that goes further there is reused too: the copies into the
    /// request's own pages go to `host_copies`, which must be given, and are due before their
    /// finish_host_copies.
    [[nodiscard]] ReserveStatus reserve(RequestView& request, std::int64_t num_steps = 1,
                                        std::vector<PageCopy>* copies = nullptr,
                                        std::vector<HostCopy>* host_copies = nullptr);
    /// Reserves in order up to the first that does not fit; returns how many. Every error is raised
    /// before anything is reserved. With `copies` it also stops behind a row that owes one: do it,
    /// finish it, and go on with the rest.
    [[nodiscard]] std::int64_t reserve_batch(const RequestBatch& batch, std::int64_t num_steps = 1,
                                             std::vector<PageCopy>* copies = nullptr,
                                             std::vector<HostCopy>* host_copies = nullptr);
    /// What `reserve` would do now. A request that can never fit answers fits = false. Throws
    /// RequestNotFoundError and std::invalid_argument. Costs what finding the hit costs.
    [[nodiscard]] ReservePlan plan(const RequestView& request, std::int64_t num_steps = 1) const;

    /// Reserves what is missing, atomically over the batch, and writes lengths and page tables to
    /// `targets` [num_replicas], batch order kept inside a replica. Copies owed and errors are
    /// those of `reserve`; a request named twice is std::invalid_argument.
    [[nodiscard]] FetchResult fetch(const RequestBatch& batch, std::int64_t num_steps,
                                    FetchTarget* targets, std::vector<PageCopy>* copies = nullptr,
                                    std::vector<HostCopy>* host_copies = nullptr);

    /// Puts every page whose tokens are all written (start / page_size) into the prefix tree. Equal
    /// pages found there replace the sequence's own, reported in `swaps`. Forks that hold such a
    /// page as well hold it in the tree from then on.
    /// Throws std::invalid_argument when a request claims more written tokens than its pages hold.
    /// With a host tier, copies of cached pages that are not there yet go to `host_copies`, which
    /// must be given: as many as have room, none of a sequence whose last ones are not finished.
    void commit(const RequestBatch& batch, std::vector<PageSwap>& swaps,
                std::vector<HostCopy>* host_copies = nullptr);

    /// Claims `children` on the parent's replica with the tokens that the parent had written as of
    /// its last commit: their pages are shared, and copied before either writes into one. Sets each
    /// child's sequence, start and, where that was not behind start, active. Throws
    /// std::invalid_argument unless each child has those tokens, at least one more, and the
    /// parent's namespace; CapacityError when the replica cannot take all of them;
    /// RequestNotFoundError. Takes no pages. O(children * (pages + tokens compared)).
    void fork(const RequestView& parent, const RequestBatch& children);
    /// Forgets written tokens from `n` on, and pages that hold none any more, those reserved ahead
    /// among them; the caller sets the request's indices back. The tree's pages are not rewritten:
    /// one that is cut is copied when it is written next. Throws RequestNotFoundError, and
    /// std::invalid_argument unless 0 <= n <= what was fetched or written. O(pages dropped).
    void truncate(SequenceHandle sequence, std::int64_t n);
    /// Groups of rows with common leading pages, nested ones too, longest first; pages, not tokens,
    /// are compared. Throws RequestNotFoundError. O(rows * runs * log(rows * runs)).
    [[nodiscard]] std::vector<SharedPrefix> shared_prefixes(const RequestBatch& batch) const;

    /// Cached whole pages of a prefix of `tokens` [n]: their number and, if asked for, their ids.
    /// Pure. Throws std::out_of_range for a replica that does not exist. Costs comparing the
    /// tokens.
    [[nodiscard]] std::int64_t match(std::int32_t replica, std::string_view name_space,
                                     const TokenId* tokens, std::int64_t n,
                                     std::vector<BlockId>* pages = nullptr) const;
    /// Keeps those pages from eviction until unpinned. The match plus O(1).
    [[nodiscard]] PinHandle pin(std::int32_t replica, std::string_view name_space,
                                const TokenId* tokens, std::int64_t n);
    /// Lets them go. Throws InvalidHandleError for a handle unpinned before. O(1).
    void unpin(PinHandle pin);

    /// Replica for a request not claimed yet: longest prefix hit, on whichever tier, then most
    /// available pages, then fewest sequences, then lowest index. Pure. A match per replica.
    [[nodiscard]] std::int32_t recommend_replica(std::string_view name_space, const TokenId* tokens,
                                                 std::int64_t n) const;

    /// Forgets every cached page that nobody holds, in every replica and its host tier. O(pages
    /// forgotten).
    void reset_prefix_cache();

    /// Copies owed since the last call, of sequences still claimed; to be done in this order.
    [[nodiscard]] std::vector<PageCopy> take_copies();
    /// The copies given out by reserve or fetch are done: their sources are let go. Once for each
    /// copy, in any order; none are due for those of take_copies. O(copies under way) each.
    void finish_copies(const std::vector<PageCopy>& copies);
    /// The host copies given out by one call are over: stored pages are found from now on, unless
    /// `done` is false, and what was held for the copies is let go. A request whose loads are not
    /// done loses its pages, as if it had just been claimed. Throws InvalidHandleError for copies
    /// that were finished before. O(pages).
    void finish_host_copies(const std::vector<HostCopy>& copies, bool done = true);

    /// Pages of a replica now. Throws std::out_of_range. O(pins changed since it was asked last).
    [[nodiscard]] PoolStats stats(std::int32_t replica) const;
    /// Summed over replicas. O(replicas).
    [[nodiscard]] Metrics metrics() const;
    /// Counts from 0 again; the peak from what is in use. O(replicas).
    void reset_metrics();

    /// Throws IntegrityError naming the law that does not hold. O(everything).
    void check_integrity() const;

   private:
    struct Replica {
        BlockPool pool;
        PrefixTree tree;
        std::int64_t num_sequences = 0;
        Metrics metrics;
        std::unique_ptr<BlockStore> host = nullptr;  // none without a host tier
        std::vector<bool> storing = {};              // for each page: it is on its way there
    };
    // Copies between the pool and the host tier that one sequence was given in one call.
    struct HostFlight {
        std::int32_t replica = 0;
        SequenceHandle sequence;
        TreeNode* place = nullptr;  // in the tier, the flight's: what is loaded ends there, what is
                                    // stored goes behind it
        std::vector<BlockId> host_pages;  // of the copies
        // Of stores alone:
        TreeNode* source = nullptr;         // in the tree of the replica, pinned
        std::vector<BlockId> device_pages;  // of the copies
        std::int32_t ahead = 0;             // pages behind `place` that earlier flights store
        std::vector<TokenId> tokens;        // of those and of the copies
        bool is_wanted = true;              // false: forgotten meanwhile
    };
    struct Owed {  // where a call puts the copies that it owes
        std::vector<PageCopy>* copies;
        std::vector<HostCopy>* host_copies;
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
    struct LateRow {
        std::int64_t batch_row;
        std::int64_t row;  // of its replica's table
    };
    struct Undo {
        Sequence* sequence;
        std::int64_t before;
    };
    template <auto kMember>
    class UndoLog;
    using InputCount = UndoLog<&Sequence::counted_end>;
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
    bool apply(const Admission& admission, Sequence& sequence, RequestView& request, Owed owed);
    [[nodiscard]] std::int64_t find_hit_below(Admission& admission, const BlockStore& host,
                                              const RequestView& request, std::int64_t hit) const;
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
    [[nodiscard]] std::int64_t count_returned(const Sequence& sequence, std::int64_t from) const;
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
    [[nodiscard]] bool reserve_missing(const RequestBatch& batch, std::int64_t num_steps, Owed owed,
                                       FetchResult& result);
    [[nodiscard]] bool only_grow(const RequestBatch& batch) const;
    [[nodiscard]] std::int64_t missing_pages(const RequestView& request, const Sequence& sequence,
                                             std::int64_t num_steps) const;
    [[nodiscard]] bool find_supply(const RequestBatch& batch, std::int64_t num_steps,
                                   FetchResult& result);
    [[nodiscard]] bool grow_together(const RequestBatch& batch, std::int64_t num_steps,
                                     FetchResult& result);
    [[nodiscard]] bool reserve_together(const RequestBatch& batch, std::int64_t num_steps,
                                        Owed owed, FetchResult& result);
    [[nodiscard]] bool fits_together(const std::vector<Admission>& admissions,
                                     FetchResult& result) const;
    [[noreturn]] void refuse_unreserved(const RequestView& request, const Sequence& sequence,
                                        std::int64_t row) const;
    void note_leaving(const Admission& admission, const Sequence& sequence);
    bool apply_together(const std::vector<Admission>& admissions, const RequestBatch& batch,
                        Owed owed);
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
    void inherit_copies(SequenceHandle parent, SequenceHandle child);
    void entrust_to_tree(const Sequence& sequence, std::int32_t column);
    void forget_copies(SequenceHandle handle, const Sequence& sequence, std::int32_t from);
    // cache_manager_host.cpp
    void require_host_copies(const std::vector<HostCopy>* host_copies) const;
    [[nodiscard]] std::uint32_t next_ticket();
    void owe_loads(const Admission& admission, const Sequence& sequence, SequenceHandle handle,
                   std::vector<HostCopy>& host_copies);
    static void advance_host_place(Replica& replica, Sequence& sequence, std::int32_t end);
    static void choose_stores(Replica& replica, const Sequence& sequence, std::int32_t end,
                              HostFlight& flight);
    void owe_stores(SequenceHandle handle, Sequence& sequence, std::vector<HostCopy>& host_copies);
    void finish_store(std::uint32_t ticket, const HostFlight& flight, bool done);
    void finish_load(const HostFlight& flight, bool done);
    // cache_manager_check.cpp
    void check_host_place(const Sequence& sequence) const;
    void check_host(std::int32_t replica) const;
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
    std::unordered_map<std::uint32_t, HostFlight> flights_;  // by ticket
    std::uint32_t last_ticket_ = 0;
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
    std::map<PageKey, std::uint32_t> leaving_;  // forks of a page that let go of it in this call
    std::vector<DuplicatePage> duplicates_;
};

}  // namespace kvcore
