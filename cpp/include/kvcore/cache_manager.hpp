// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/cache_types.hpp"
#include "kvcore/metrics.hpp"
#include "kvcore/prefix_tree.hpp"
#include "kvcore/sequence_table.hpp"
#include "kvcore/tier_index.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// The C++ entry point: which page belongs to whom, what a prompt can reuse, what goes when memory
/// is full. Ids only; the caller owns the memory behind them.
///
/// Owns: per replica a BlockPool and a PrefixTree, with a host tier a TierIndex too; the
/// SequenceTable over all replicas; the ledger of what is being copied.
/// Invariant: every page is free, or held by as many sequences, transfers and the tree as its count
/// says. A page in the tree has no other owner. A page that is copied, or copied to, is held until
/// that is finished.
/// Threads: any number may call any method; one mutex, held for the length of a call. The tokens of
/// a RequestView must stay unchanged meanwhile. One thread at a time uses a request; others may
/// release or fork it at any moment.
/// Errors: a call that throws or answers "no" has changed nothing. Memory that runs out is
/// std::bad_alloc, likewise.
/// Copies: a call that is given `transfers` puts there what its caller has to copy at once;
/// `finish` says that it is done, or failed. Without, copies within the pool go to the list of
/// take_copies, and nothing is held for them: their order is what keeps them right. A manager is
/// used in one of the two ways; with a host tier in the first. Cost: claim, release of committed
/// pages, pin: O(1). reserve: comparing the prompt with the cache plus O(pages added). commit:
/// O(new tokens). fetch: O(pages changed since the table's last use).
class CacheManager {
   public:
    /// Throws std::invalid_argument for sizes below 1.
    explicit CacheManager(const CacheConfig& config);
    CacheManager(const CacheManager&) = delete;
    CacheManager& operator=(const CacheManager&) = delete;
    ~CacheManager();

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
    /// Forgets a sequence: committed pages stay cached, the others are free unless forks hold them
    /// or transfers are under way: then they are when those are finished.
    /// Throws RequestNotFoundError. O(pages not committed).
    void release(SequenceHandle sequence);
    /// Drops the pages of a sequence, what is owed to it and what it counted, as if it had just
    /// been claimed: for a caller who could not take over what a reservation said. Throws
    /// RequestNotFoundError, and PendingTransfersError while transfers into its pages are under
    /// way.
    void begin_again(SequenceHandle sequence);

    /// Reuses the cached prefix, then allocates pages for end + num_steps - 1 tokens, evicting
    /// where it must. On success `request.start` and `.active` are where the request now stands.
    /// Transfers into the request's pages are due before its kernels run; with a host tier a prefix
    /// that goes further there is reused too. Throws RequestNotFoundError, std::invalid_argument,
    /// and CapacityError when the request can never fit.
    [[nodiscard]] ReserveStatus reserve(RequestView& request, std::int64_t num_steps = 1,
                                        Transfers* transfers = nullptr);
    /// Reserves in order up to the first that does not fit. Every error is raised before anything
    /// is reserved. Where a row could only be had with pages that the transfers of rows before
    /// hold, it stops in front of it (kPending): finish those, and go on with the rest.
    [[nodiscard]] BatchReserve reserve_batch(const RequestBatch& batch, std::int64_t num_steps = 1,
                                             Transfers* transfers = nullptr);
    /// What `reserve` would do now. A request that can never fit answers fits = false. Throws
    /// RequestNotFoundError and std::invalid_argument. Costs what finding the hit costs.
    [[nodiscard]] ReservePlan plan(const RequestView& request, std::int64_t num_steps = 1) const;

    /// Reserves what is missing, atomically over the batch, and writes lengths and page tables to
    /// `targets` [num_replicas], batch order kept inside a replica. Errors are those of `reserve`;
    /// a request named twice is std::invalid_argument. Tables are written once no transfer into
    /// their pages is left: see FetchStatus::kPending.
    [[nodiscard]] FetchResult fetch(const RequestBatch& batch, std::int64_t num_steps,
                                    FetchTarget* targets, Transfers* transfers = nullptr);

    /// Puts every page whose tokens are all written (start / page_size) into the prefix tree. Equal
    /// pages found there replace the sequence's own: `swaps` are those of this call. Forks that
    /// hold such a page as well hold it in the tree from then on. A page for whose place in the
    /// tree there is no memory stays the sequence's own, for a later commit. Throws
    /// std::invalid_argument when a request claims more written tokens than its pages hold, and
    /// PendingTransfersError. With a host tier, copies of cached pages that are not there yet go to
    /// `transfers`: as many as have room, none of a sequence whose last ones are not finished or
    /// for which memory runs out.
    void commit(const RequestBatch& batch, std::vector<PageSwap>& swaps,
                Transfers* transfers = nullptr);

    /// Claims `children` on the parent's replica with the tokens that the parent had written as of
    /// its last commit: their pages are shared, and copied before either writes into one. Sets each
    /// child's sequence, start and, where that was not behind start, active. Throws
    /// std::invalid_argument unless each child has those tokens, at least one more, and the
    /// parent's namespace; CapacityError when the replica cannot take all of them;
    /// RequestNotFoundError and PendingTransfersError. Takes no pages. O(children * (pages + tokens
    /// compared)).
    void fork(const RequestView& parent, const RequestBatch& children);
    /// Forgets written tokens from `n` on, and pages that hold none any more, those reserved ahead
    /// among them; the caller sets the request's indices back. The tree's pages are not rewritten:
    /// one that is cut is copied when it is written next. Throws RequestNotFoundError,
    /// PendingTransfersError, and std::invalid_argument unless 0 <= n <= what was fetched or
    /// written. O(pages dropped).
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

    /// The transfers given out by one call are over. Stored pages are found from now on, but those
    /// for whose place there is no memory: they are not stored. What was held is let go. Where they
    /// are not `done`, page copies are owed again (take_owed), pages that were to be stored are
    /// not, and a request whose loads failed has lost its pages, as if it had just been claimed:
    /// set it back to where `moved` says. Throws InvalidHandleError, and changes nothing, for a
    /// ticket that was finished before. O(transfers).
    void finish(std::uint64_t ticket, bool done = true);
    /// Gives out again what is owed to a sequence since its transfers failed. O(transfers).
    [[nodiscard]] OwedStatus take_owed(SequenceHandle sequence, Transfers& transfers);
    /// Returns when no transfers into a sequence's pages are under way, or it is gone. Throws
    /// std::logic_error where they are the calling thread's own, which would wait for ever.
    void wait(SequenceHandle sequence) const;
    /// Page copies on the list since the last call, of sequences still claimed; to be done in this
    /// order, before the next kernels run.
    [[nodiscard]] std::vector<PageCopy> take_copies();

    /// Pages of a replica now. Throws std::out_of_range. O(pins changed since it was asked last).
    [[nodiscard]] PoolStats stats(std::int32_t replica) const;
    /// Summed over replicas. O(replicas).
    [[nodiscard]] Metrics metrics() const;
    /// Counts from 0 again; the peak from what is in use. O(replicas).
    void reset_metrics();

    /// Throws IntegrityError naming the law that does not hold. O(everything).
    void check_integrity() const;

   private:
    friend struct CacheManagerProbe;  // of tests, which compare whole states
    struct Replica {
        BlockPool pool;
        PrefixTree tree;
        std::int64_t num_sequences = 0;
        Metrics metrics;
        std::unique_ptr<TierIndex> host = nullptr;  // none without a host tier
        std::vector<bool> storing = {};             // for each page: it is on its way there
    };
    struct PinSlot {
        TreeNode* node = nullptr;
        std::int32_t replica = 0;
        std::uint32_t generation = 1;
    };
    struct Supply {
        std::int64_t left;           // pages that can still be had
        bool has_evictable = false;  // counted in, which is worth it only when free ones do not do
        std::int64_t wanted = 0;     // pages of the rows that only grow
        std::size_t given = 0;       // of taken_, where the next ones are
    };
    struct Admission;    // a reservation worked out, not yet made
    struct Reservation;  // the same with all that it takes beside pages: it cannot fail any more
    struct Ledger;       // transfers that are owed or under way
    class CallScope;
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
    /// Forks of a page that let go of it in a call, and what their copies read of it meanwhile.
    struct Leavers {
        std::uint32_t count = 0;
        std::int32_t reach = 0;  // tokens of the longest copy
        void add(std::int32_t num_tokens) noexcept {
            ++count;
            reach = std::max(reach, num_tokens);
        }
    };

    // cache_manager.cpp
    [[nodiscard]] Replica& replica_at(std::int32_t index) const {
        return *replicas_[static_cast<std::size_t>(index)];
    }
    void require_replica(std::int32_t index) const;
    static void free_own_pages(Replica& replica, const Sequence& sequence, std::int32_t from);
    void note_peak(Replica& replica);
    // manager/admit.cpp
    [[nodiscard]] static bool has_legal_indices(const RequestView& request) noexcept {
        return request.start >= 0 && request.start < request.active &&
               request.active <= request.end;
    }
    /// Longest request that the pool and max_seq_len allow to run so many steps.
    [[nodiscard]] std::int64_t most_tokens(std::int64_t num_steps) const noexcept {
        return std::min(capacity_tokens_, config_.max_seq_len - (num_steps - 1));
    }
    [[noreturn]] void refuse_indices(const RequestView& request, std::int64_t row) const;
    void require_namespace(const Sequence& own, const RequestView& request, std::int64_t row) const;
    [[noreturn]] void refuse_length(const RequestView& request, std::int64_t row,
                                    std::int64_t num_steps) const;
    static void require_steps(std::int64_t num_steps);
    [[nodiscard]] Admission admit(const Sequence& sequence, const RequestView& request,
                                  std::int64_t num_steps, bool allow_partial) const;
    void find_hit(Admission& admission, const Sequence& sequence, const RequestView& request,
                  bool allow_partial) const;
    [[nodiscard]] std::int64_t find_hit_below(Admission& admission, const TierIndex& host,
                                              const RequestView& request, std::int64_t hit) const;
    void weigh(Admission& admission, const Sequence& sequence, std::int64_t needed) const;
    [[nodiscard]] static bool is_own(const Sequence& sequence, std::int32_t column) noexcept;
    [[nodiscard]] bool is_sole_holder(const Sequence& sequence, std::int32_t column,
                                      std::int64_t start) const;
    [[nodiscard]] std::int64_t count_sole(const Sequence& sequence, std::int64_t start,
                                          std::int64_t end) const;
    [[nodiscard]] std::int64_t count_returned(const Sequence& sequence, std::int64_t from) const;
    // manager/apply.cpp
    [[nodiscard]] Reservation prepare(const Admission& admission, Sequence& sequence,
                                      const RequestView& request, Transfers* transfers);
    bool apply(Reservation& reservation, Sequence& sequence, RequestView& request, std::int64_t row,
               Transfers* transfers) noexcept;
    void take_hit(const Admission& admission, Replica& replica, Sequence& sequence,
                  TreeNode* place) noexcept;
    void take_pages(Replica& replica, std::int64_t n, BlockId* out,
                    EvictionGuard guard = {}) noexcept;
    [[nodiscard]] static EvictionGuard guard_of(const Admission& admission,
                                                const Sequence& sequence) noexcept;
    static void drop_columns(Replica& replica, Sequence& sequence, std::int32_t from) noexcept;
    struct CutPlaces;  // where a shorter row ends, in the trees
    [[nodiscard]] static CutPlaces find_cut(Replica& replica, const Sequence& sequence,
                                            std::int32_t columns);
    static void move_back(Replica& replica, Sequence& sequence, std::int32_t columns,
                          CutPlaces& places) noexcept;
    void thaw(Reservation& reservation, Replica& replica, SequenceHandle handle, Sequence& sequence,
              Transfers* transfers) noexcept;
    void owe_cached_copy(const PageCopy& copy, TreePosition source, Replica& replica,
                         Transfers* transfers) noexcept;
    void owe_shared_copy(const PageCopy& copy, Replica& replica, Transfers* transfers) noexcept;
    void count_hit(const Admission& admission, Sequence& sequence) noexcept;
    void uncount(const Sequence& sequence) noexcept;
    void count_input(std::int64_t start, std::int64_t active, Sequence& sequence) noexcept {
        if (active <= sequence.counted_end) return;
        replica_at(sequence.replica).metrics.input_tokens +=
            active - std::max(start, sequence.counted_end);
        sequence.counted_end = active;
    }
    void begin_again(Sequence& sequence) noexcept;
    // manager/batch.cpp
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
                                       Transfers* transfers, FetchResult& result);
    void sort_missing(const RequestBatch& batch);
    [[nodiscard]] std::int64_t missing_pages(const RequestView& request, const Sequence& sequence,
                                             std::int64_t num_steps) const;
    [[nodiscard]] bool find_supply(const RequestBatch& batch, std::int64_t num_steps,
                                   FetchResult& result);
    void prepare_growth(const RequestBatch& batch, std::int64_t num_steps);
    void grow(const RequestBatch& batch, std::int64_t num_steps) noexcept;
    [[nodiscard]] bool reserve_together(const RequestBatch& batch, std::int64_t num_steps,
                                        Transfers* transfers, FetchResult& result);
    [[nodiscard]] std::vector<Admission> admit_together(const RequestBatch& batch,
                                                        std::int64_t num_steps, bool allow_partial,
                                                        bool copies_at_once);
    [[nodiscard]] FetchResult share_out(std::vector<std::int64_t> left, const RequestBatch& batch,
                                        std::int64_t num_steps,
                                        const std::vector<Admission>& admissions) const;
    void note_leaving(const Admission& admission, const Sequence& sequence, bool copies_at_once);
    // manager/commit.cpp
    [[noreturn]] void refuse_unreserved(const RequestView& request, const Sequence& sequence,
                                        std::int64_t row) const;
    void commit_pages(Replica& replica, Sequence& sequence, const RequestView& request,
                      std::int32_t row);
    [[nodiscard]] std::int32_t next_shared(const Replica& replica, const Sequence& sequence,
                                           std::int32_t written) const;
    void commit_run(Replica& replica, Sequence& sequence, const TokenId* tokens, std::int32_t end,
                    bool is_shared, std::int32_t row);
    template <class Visit>
    void for_each_other_holder(const Sequence& sequence, std::int32_t column, const Visit& visit);
    void entrust_to_tree(const Sequence& sequence, std::int32_t column) noexcept;
    // manager/fetch.cpp
    void write_ready_rows(const RequestBatch& given, std::int64_t num_steps, FetchTarget* targets,
                          InputCount& counted, FetchResult& result);
    [[nodiscard]] bool have_room(const FetchTarget* targets) const;
    // manager/fork.cpp
    class Brood;
    static void check_children(const RequestView& parent, std::int64_t written,
                               const RequestBatch& children);
    void inherit_copies(SequenceHandle parent, SequenceHandle child) noexcept;
    void freeze_read_pages(Sequence& sequence, std::int64_t start) const noexcept;
    void forget_copies(SequenceHandle handle, const Sequence& sequence, std::int32_t from) noexcept;
    // manager/host.cpp
    struct HostFlight;
    void prepare_load(Reservation& reservation, const Sequence& sequence,
                      const RequestView& request, Transfers& transfers);
    void make_room_for_loads(const std::vector<Reservation>& made, Transfers& transfers);
    void owe_load(Reservation& reservation, Sequence& sequence, Transfers& transfers) noexcept;
    static void advance_host_place(Replica& replica, Sequence& sequence, std::int32_t end);
    static void find_host_place(Replica& replica, Sequence& sequence);
    static void choose_stores(Replica& replica, const Sequence& sequence, std::int32_t end,
                              HostFlight& flight);
    void owe_stores(SequenceHandle handle, Sequence& sequence, Transfers& transfers);
    void finish_store(HostFlight& flight, bool done) noexcept;
    void finish_load(HostFlight& flight, bool done) noexcept;
    // manager/transfers.cpp
    void require_transfers(Transfers* transfers) const;
    [[noreturn]] static void refuse_pending(std::int64_t row);
    void put_on_list(const PageCopy& copy) noexcept;
    void prune_copies() noexcept;
    void spare_source(const PageCopy& copy, const Sequence& sequence) noexcept;
    [[nodiscard]] bool is_under_way(SequenceHandle sequence) const noexcept;
    void drop_owed(SequenceHandle sequence) noexcept;
    // manager/check.cpp
    void check_host_place(const Sequence& sequence) const;
    void check_host(std::int32_t replica) const;
    void check_sequence(const Sequence& sequence) const;
    void check_counts(std::int32_t replica) const;
    void check_transfers() const;

    CacheConfig config_;
    mutable std::mutex mutex_;
    mutable std::condition_variable finished_;  // transfers were
    std::vector<std::unique_ptr<Replica>> replicas_;
    mutable SequenceTable sequences_;
    std::vector<PinSlot> pins_;
    std::vector<std::uint32_t> free_pins_;
    std::unique_ptr<Ledger> ledger_;
    std::vector<PageCopy> listed_copies_;
    std::size_t prune_copies_at_ = 64;
    std::int64_t capacity_tokens_;
    std::uint32_t batch_stamp_ = 0;
    std::uint32_t count_epoch_ = 0;  // resets of the metrics
    // Scratch of a call, kept for its memory.
    std::vector<Sequence*> batch_;         // of its rows
    std::vector<std::int64_t> missing_;    // rows that need pages
    std::vector<std::int64_t> growing_;    // those of them that need nothing else
    std::vector<std::int64_t> joining_;    // the others
    std::vector<LateRow> late_;            // rows that fetch writes when it has reserved
    std::vector<Undo> undo_;               // what to take back from the rows of a refused batch
    std::vector<std::int64_t> new_input_;  // tokens of each replica
    std::vector<Supply> supply_;           // of each replica
    std::vector<BlockId> taken_;           // pages on the way to their rows
    std::map<PageKey, Leavers> leaving_;   // of each page
    std::vector<DuplicatePage> duplicates_;
    std::vector<PageSwap> swapped_;  // by the present commit
};

}  // namespace kvcore
