// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string_view>
#include <vector>

#include "kvcore/advice.hpp"
#include "kvcore/cache_config.hpp"
#include "kvcore/cache_events.hpp"
#include "kvcore/cached_columns.hpp"
#include "kvcore/metrics.hpp"
#include "kvcore/misses.hpp"
#include "kvcore/page_moves.hpp"
#include "kvcore/request.hpp"
#include "kvcore/store_moves.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// The prefix that CacheManager::match found for a request, pinned until it is allocated or
/// dropped.
///
/// Owns: a pin on the cached pages of the hit and on their continuation in the host tier. Pinned
/// pages are not evicted and count as used. Dropping the hit leaves no trace: the lookup does not
/// change the order of eviction.
/// Threads: one at a time; other threads may use the manager, which must outlive the hit.
/// Cost: O(1) to drop, under the manager's mutex.
class PrefixHit {
   public:
    /// Holds nothing.
    PrefixHit() noexcept;
    PrefixHit(PrefixHit&& other) noexcept;
    PrefixHit& operator=(PrefixHit&& other) noexcept;
    ~PrefixHit();

    /// Tokens that the request would take from the cache, including copied and loaded tokens; 0 if
    /// the request already has at least that many.
    [[nodiscard]] std::int64_t num_tokens() const noexcept;
    /// Whole pages of this hit that the request would share.
    [[nodiscard]] std::int64_t num_pages() const noexcept;

   private:
    friend class CacheManager;
    struct Held;

    explicit PrefixHit(std::unique_ptr<Held> held) noexcept;

    std::unique_ptr<Held> held_;
};

/// Pages that CacheManager::hold keeps unchanged while a caller reads or writes them.
///
/// Owns: a hold on each page. A held page is not handed out again, whoever releases it, and is not
/// evicted while it is cached. If the caches are reset and nothing else holds the page, no
/// request finds it any more, but it stays until the hold ends. Ending the hold does not count as a
/// use of the page. The destructor also ends the hold.
/// Threads: one at a time; other threads may use the manager, which must outlive this object.
/// Cost: O(pages) to end the hold, under the manager's mutex.
class HeldPages {
   public:
    /// Holds nothing.
    HeldPages() noexcept;
    HeldPages(HeldPages&& other) noexcept;
    HeldPages& operator=(HeldPages&& other) noexcept;
    ~HeldPages();

    /// The page ids in the order in which the caller listed them.
    [[nodiscard]] const std::vector<BlockId>& pages() const noexcept;
    /// Ends the hold. Throws InvalidHandleError if the hold has already ended.
    void let_go();

   private:
    friend class CacheManager;
    struct Held;

    explicit HeldPages(std::unique_ptr<Held> held) noexcept;

    std::unique_ptr<Held> held_;
};

/// The C++ entry point: records which page belongs to which sequence, finds the pages that a prompt
/// can reuse, and chooses the pages to evict when memory is full. It handles ids only; the caller
/// owns the memory of the pages.
///
/// Owns: a pool and a prefix tree for the device of each replica, and for its host tier; the
/// SequenceTable over all replicas; the ledger of transfers in flight.
/// Invariant: every page is free, or its reference count is the number of sequences and transfers
/// that hold it, plus the tree's reference. A page in the tree has no other owner. The source and
/// the destination of a copy are held until the copy is finished.
/// Threads: any number may call any method; one mutex, held for the length of a call. The tokens of
/// a RequestView must stay unchanged during a call. One thread at a time uses a request; other
/// threads may release or fork the request at any moment.
/// Errors: a call that throws or returns "no" has changed nothing. Running out of memory is
/// std::bad_alloc, which also changes nothing.
/// Copies: a call with `transfers` writes there the copies that its caller must make at once; the
/// caller then calls `finish` to report success or failure. Without `transfers`, copies within the
/// pool are appended to the list that `take_copies` returns. These copies hold no pages: they are
/// correct because the caller makes them in order. Use only one of the two ways with a manager.
/// With a host tier, always pass `transfers`.
/// Cost: claim, release of committed pages, pin: O(1). reserve: comparing the prompt with the cache
/// plus O(pages added). commit: O(new tokens). fetch: O(pages changed since the table's last use).
class CacheManager {
   public:
    /// `make_policy`: creates the eviction policy of a replica in place of `config.eviction`;
    /// called once per replica. Throws std::invalid_argument for sizes below 1.
    explicit CacheManager(const CacheConfig& config, const PolicyFactory& make_policy = {});
    CacheManager(const CacheManager&) = delete;
    CacheManager& operator=(const CacheManager&) = delete;
    ~CacheManager();

    /// The config given to the constructor; valid as long as the manager. O(1), without the mutex.
    [[nodiscard]] const CacheConfig& config() const noexcept;

    /// Registers a sequence; takes no pages. Throws std::out_of_range for a replica that does not
    /// exist and CapacityError when the replica is full.
    [[nodiscard]] SequenceHandle claim(std::int32_t replica = 0);
    /// Sets the priority and the tenant of a sequence, for pages that it gets from now on; pages
    /// that it already has, and cached pages, keep their priority. Throws RequestNotFoundError, and
    /// std::invalid_argument for a priority outside 0 .. 100, a duration below 1, ranges that are
    /// not in order, or a tenant without a quota. O(ranges).
    void set_priority(SequenceHandle sequence, const RequestPriority& priority);
    /// Sets the current time to `now`, in a unit that the caller chooses, and ends the priorities
    /// whose duration is over. An earlier time changes nothing. O(log n) for each run whose
    /// priority ends.
    void advance(std::int64_t now);
    /// Returns true if the handle names a claimed sequence. O(1).
    [[nodiscard]] bool contains(SequenceHandle sequence) const;
    /// The replica where the sequence was claimed. Throws RequestNotFoundError. O(1).
    [[nodiscard]] std::int32_t replica_of(SequenceHandle sequence) const;
    /// A copy of the sequence's page ids in logical order, from index `first` on; empty if the
    /// sequence has no more pages. With `first`, a caller gets the pages that a reservation added.
    /// With groups, the ids are the bundle's, and -1 marks a page that no layer of the bundle reads
    /// any more or that is not reserved yet. Throws RequestNotFoundError, std::out_of_range for a
    /// bundle that does not exist, and std::invalid_argument for `first` below 0. O(pages
    /// returned).
    [[nodiscard]] std::vector<BlockId> pages_of(SequenceHandle sequence, std::int32_t bundle = 0,
                                                std::int64_t first = 0) const;
    /// Forgets a sequence. Committed pages stay cached. The other pages become free as soon as no
    /// fork holds them and their transfers in flight are finished.
    /// `history`, if given, receives the counts that a later claim of the same request passes to
    /// `recall`.
    /// `returns_in`: when the session of the request returns, in the unit of `advance` from now on,
    /// or one of ReturnTime, for policies that use return times.
    /// `misses`, if given, receives the same as from `misses_of`, or zeros if misses are not
    /// explained.
    /// Throws RequestNotFoundError. O(pages not committed).
    void release(SequenceHandle sequence, RequestHistory* history = nullptr,
                 std::int64_t returns_in = ReturnTime::kUnknown, Misses* misses = nullptr);
    /// Marks the claim as a resumption of a request that ran under an earlier claim: the tokens in
    /// `history` are counted separately (Metrics::resumed_tokens, recomputed_tokens). Does nothing
    /// for a claim that was already reserved. Throws RequestNotFoundError. O(1).
    void recall(SequenceHandle sequence, const RequestHistory& history);
    /// Drops the pages, the owed copies and the counts of a sequence, as if it had just been
    /// claimed. For a caller that could not use the result of a reservation. Throws
    /// RequestNotFoundError, and PendingTransfersError while transfers into its pages are in
    /// flight.
    void begin_again(SequenceHandle sequence);

    /// Reuses the cached prefix, then allocates pages for the request's tokens (only up to
    /// `reserve_to` if that is less) and for num_steps - 1 more, and evicts pages if necessary. On
    /// success `request.start` and `.active` are the request's new position. The caller makes the
    /// transfers into the request's pages before its kernels run. With a host tier, a longer prefix
    /// in that tier is also reused. Throws RequestNotFoundError, std::invalid_argument (also for
    /// `options` below 0), and CapacityError if the request, or `options.must_fit`, can never fit.
    [[nodiscard]] ReserveStatus reserve(RequestView& request, std::int64_t num_steps = 1,
                                        Transfers* transfers = nullptr,
                                        const ReserveOptions& options = {});
    /// Reserves rows in order and stops at the first row that does not fit. Raises every error
    /// before it reserves anything. If a row needs pages that the transfers of earlier rows hold,
    /// the call stops before that row (kPending): finish those transfers, and reserve the remaining
    /// rows. The call also stops (kPending) before a row, other than the first, for which memory
    /// runs out or, with states and several steps, whose chunk is cut because a checkpoint is due.
    [[nodiscard]] BatchReserve reserve_batch(const RequestBatch& batch, std::int64_t num_steps = 1,
                                             Transfers* transfers = nullptr);
    /// The result that `reserve` would have now. A request that can never fit returns fits = false.
    /// Throws RequestNotFoundError and std::invalid_argument. Costs the same as finding the hit.
    [[nodiscard]] ReservePlan plan(const RequestView& request, std::int64_t num_steps = 1,
                                   const ReserveOptions& options = {}) const;
    /// The same for a request that is not claimed, as if `tenant` claimed it on `replica`. The call
    /// ignores `request.sequence` and does not check whether a claim would succeed. Throws
    /// std::out_of_range for a replica that does not exist, and std::invalid_argument also for a
    /// tenant without a quota.
    [[nodiscard]] ReservePlan plan(std::int32_t replica, const RequestView& request,
                                   std::int64_t num_steps = 1, const ReserveOptions& options = {},
                                   std::int32_t tenant = RequestPriority::kNoTenant) const;

    /// Gives an empty sequence pages for a request whose first `n` tokens the caller writes, and a
    /// slot for its state. The request then stands where a hit of `n` tokens would place it. The
    /// call does not search the cache, and gives windows only the pages that tokens from `n` on
    /// read. The caller writes all of these pages before the next commit, which caches them under
    /// `request.name_space`. Throws as `reserve`, and std::invalid_argument unless 1 <= n <
    /// request.end, and for a sequence that was reserved or fetched. Without `transfers`, pages
    /// that are evicted to make room are not stored in the host tier, even with write-back. O(pages
    /// added).
    [[nodiscard]] ReserveStatus begin_at(RequestView& request, std::int64_t n,
                                         Transfers* transfers = nullptr);
    /// A mark of the pages that the sequence has written. If the marks before and after a copy of
    /// the pages are equal, the copy is correct. Throws RequestNotFoundError, and
    /// PendingTransfersError. O(1).
    [[nodiscard]] SequenceMark mark_of(SequenceHandle sequence) const;

    /// The first half of `reserve`, for a caller that decides before it allocates. `match` finds
    /// the cached prefix of a request's prompt and pins it. The request is not changed, and
    /// dropping the hit leaves no trace, except that with quotas the lookup may split runs of the
    /// tree. Throws as `reserve`, but no CapacityError. Costs the same as finding the hit.
    [[nodiscard]] PrefixHit match(const RequestView& request) const;
    /// The second half: gives the hit to the request, and pages for `n` tokens in total: at least
    /// for the tokens that run next, at most for the whole request. On success the hit is used up;
    /// otherwise it stays pinned. With write-back, the hit is lost if the page that it copies from
    /// had to be evicted: call `match` again. Returns and throws as `reserve`, and
    /// std::invalid_argument if the request has moved since `match` or the hit is used up. O(pages
    /// added), nothing is compared again.
    [[nodiscard]] ReserveStatus allocate(PrefixHit& hit, RequestView& request, std::int64_t n,
                                         Transfers* transfers = nullptr);

    /// Reserves the missing pages, atomically over the batch, and writes lengths and page tables to
    /// `targets` [num_replicas]; rows of a replica keep the order of the batch. Throws the errors
    /// of `reserve`; a request named twice is std::invalid_argument. Tables are written only after
    /// all transfers into their pages are finished: see FetchStatus::kPending.
    [[nodiscard]] FetchResult fetch(const RequestBatch& batch, std::int64_t num_steps,
                                    FetchTarget* targets, Transfers* transfers = nullptr);

    /// Inserts every page whose tokens are all written (start / page_size) into the prefix tree. If
    /// the tree already has an equal page, that page replaces the sequence's own: `swaps` receives
    /// the replacements of this call. Forks that also hold an inserted page hold it in the tree
    /// from now on. A page stays the sequence's own until a later commit if there is no memory to
    /// insert it or a quota has no room. Throws std::invalid_argument if a request claims more
    /// written tokens than its pages hold, and PendingTransfersError. With a host tier, copies of
    /// cached pages that the tier lacks are written to `transfers`, as many as the tier has room
    /// for. A sequence stores no pages while its last stores are not finished, or if memory runs
    /// out. `transfers` also receives the states that become checkpoints, on the device and in the
    /// tier: their sequence is pending until both copies are finished.
    void commit(const RequestBatch& batch, std::vector<PageSwap>& swaps,
                Transfers* transfers = nullptr);

    /// Claims `children` on the parent's replica with the tokens that the parent had written as of
    /// its last commit. Parent and children share these pages; a shared page is copied before one
    /// of them writes into it. Sets each child's sequence and start, and active if it was not
    /// greater than start. Throws std::invalid_argument unless each child has those tokens, at
    /// least one more, and the parent's namespace; CapacityError if the replica cannot take all
    /// children; RequestNotFoundError and PendingTransfersError. Takes no pages. O(children *
    /// (pages + tokens compared)).
    /// With states, each child also gets a slot, into which the parent's state is copied:
    /// CapacityError if there are too few slots, std::invalid_argument if the parent was fetched
    /// after its last commit, and neither a kept state nor a checkpoint has its state at that
    /// commit.
    void fork(const RequestView& parent, const RequestBatch& children,
              Transfers* transfers = nullptr);
    /// Forgets written tokens from `n` on, and pages that hold no remaining token, including pages
    /// reserved ahead; the caller sets the request's indices back. Pages of the tree are not
    /// rewritten: a tree page that is cut is copied before the next write into it. Throws
    /// RequestNotFoundError, PendingTransfersError, and std::invalid_argument unless 0 <= n <= the
    /// tokens that were fetched or written. With states, `n` must be 0, the token of the request's
    /// current state, a token at or after a state that the request keeps, or a token with a
    /// checkpoint, which the call then copies. O(pages dropped).
    void truncate(SequenceHandle sequence, std::int64_t n, Transfers* transfers = nullptr);
    /// Groups of rows with common leading pages, longest first; groups may be nested. The call
    /// compares pages, not tokens. Throws RequestNotFoundError. O(rows * runs * log(rows * runs)).
    [[nodiscard]] std::vector<SharedPrefix> shared_prefixes(const RequestBatch& batch) const;

    /// Number of cached whole pages of a prefix of `tokens` [n]. `pages`, if given, receives their
    /// ids; the ids of a bundle are the ids that a request with this hit has, as `pages_of` lists
    /// them. `partial_tokens`, if given, receives the number of further tokens, less than a page,
    /// that a cached page also holds: with groups only tokens that a hit could copy, with states 0.
    /// Pure. Throws std::out_of_range for a replica or a bundle that does not exist. Costs
    /// comparing the tokens; finding `partial_tokens` costs O(log siblings) more.
    [[nodiscard]] std::int64_t match(std::int32_t replica, std::string_view name_space,
                                     const TokenId* tokens, std::int64_t n,
                                     std::vector<BlockId>* pages = nullptr,
                                     std::int32_t* partial_tokens = nullptr,
                                     std::int32_t bundle = 0) const;
    /// The same, and marks these pages as used, as if a request took and released them at once.
    /// Throws as `match`. If there are more ids than `most_pages`, the call marks no page as used
    /// and returns the same number. Costs the match plus O(runs).
    std::int64_t touch(std::int32_t replica, std::string_view name_space, const TokenId* tokens,
                       std::int64_t n, std::vector<BlockId>* pages = nullptr,
                       std::int32_t* partial_tokens = nullptr,
                       std::int64_t most_pages = std::numeric_limits<std::int64_t>::max(),
                       std::int32_t bundle = 0);
    /// Pins the pages that `match` finds until `unpin`. Costs the match plus O(1).
    [[nodiscard]] PinHandle pin(std::int32_t replica, std::string_view name_space,
                                const TokenId* tokens, std::int64_t n);
    /// Unpins the pages. Throws InvalidHandleError for a handle unpinned before. O(1).
    void unpin(PinHandle pin);

    /// The best replica for a request that is not claimed yet: the replica with the longest prefix
    /// hit, on any tier; among equal replicas, most available pages, then fewest sequences, then
    /// lowest index. Pure. Costs a match per replica.
    [[nodiscard]] std::int32_t recommend_replica(std::string_view name_space, const TokenId* tokens,
                                                 std::int64_t n) const;

    /// Token ids up to `highest` in the trees of every replica and tier, in pages in flight to
    /// these trees, and in events that were not taken, in any order. Used to find the stand-ins
    /// (kvcore/extra_keys.hpp) that are still in use. O(cached tokens).
    [[nodiscard]] std::vector<TokenId> tokens_up_to(TokenId highest) const;
    /// First token of a sequence that a later call may still compare with the cache or insert into
    /// the cache. Throws RequestNotFoundError. O(1).
    [[nodiscard]] std::int64_t first_uncached(SequenceHandle sequence) const;

    /// The cached runs of a replica, and the order in which they would be evicted. Throws
    /// std::out_of_range for a replica that does not exist. O(cached tokens).
    [[nodiscard]] CachedTree cached_tree(std::int32_t replica) const;
    /// Pins cached columns for a caller that copies them elsewhere. Returns fewer columns if fewer
    /// are cached or a quota does not allow the pins, and no columns if the caches were reset after
    /// `span.num_resets` was read. Throws std::invalid_argument unless `span` names at least one
    /// whole column, and std::out_of_range. Costs the match plus O(columns).
    [[nodiscard]] CacheExport export_columns(const ColumnSpan& span);
    /// Takes free pages for columns that the caller brings; `columns` [of the span] lists the parts
    /// of each column that the caller has: see CacheImport. Evicts nothing; these pages count for
    /// no tenant. Throws as `export_columns`, and std::invalid_argument for windows or states that
    /// the cache does not have, and without prefix caching. Costs the match plus O(columns).
    [[nodiscard]] CacheImport import_columns(const ColumnSpan& span, const CachedColumn* columns);
    /// Ends an import whose pages the caller has filled: requests find the columns from now on, and
    /// they count as used just now. `more`: the caller continues with the columns that follow, and
    /// the run keeps room for them. Returns false if the caches were reset and the columns are no
    /// longer needed. Throws std::invalid_argument for an import that holds nothing. O(columns).
    [[nodiscard]] bool publish(CacheImport& filled, bool more = false);
    /// The number of resets of the caches. O(1).
    [[nodiscard]] std::uint64_t num_resets() const;

    /// With CacheConfig::keep_windows: gives back the window pages that no token after the first
    /// `n` reads. Returns the smallest number of tokens at which more pages can be given back, or
    /// the highest int64_t if no layer has a window. Throws RequestNotFoundError,
    /// PendingTransfersError; std::invalid_argument without keep_windows, for n < 0, and for more
    /// tokens than the sequence's pages hold. O(pages given back).
    std::int64_t leave_windows(SequenceHandle sequence, std::int64_t n);
    /// Removes pages [n] of a replica, of any bundle, from the cache because their contents are
    /// wrong. Cached pages leave the cache with everything cached after them, on the device and in
    /// the host tier, and nothing that was computed from them is cached again. A request that holds
    /// such a page keeps it and continues to run, but commits nothing from its first such page on
    /// until it is truncated to the start of that page, and does not extend its reused prefix. Pins
    /// and transfers keep their pages until they end. Pages without a holder become free. The same
    /// rules apply to pages that are not cached but hold written tokens of a request; all other ids
    /// are ignored. Stores below the host tier keep the bytes that were written there. Returns the
    /// number of pages that left the device's cache. Throws InvalidHandleError for an id that is
    /// not a page's, std::out_of_range for a replica that does not exist; std::bad_alloc. O(cached
    /// pages + requests).
    std::int64_t forget(std::int32_t replica, const BlockId* pages, std::int64_t n);
    /// Holds pages [n] of a replica, of any bundle, for a caller that copies to or from them: until
    /// the hold ends, a held page is not handed out again, whoever releases it, and is not evicted.
    /// Holds nest. With groups, a page is held with all other pages of its tokens. A request may
    /// continue to write into its own pages. Throws InvalidHandleError for an id that is not a
    /// page's, or for a free page; CapacityError if quotas leave no room to hold cached pages;
    /// std::out_of_range for a replica that does not exist; std::bad_alloc. After an error nothing
    /// has changed. O(pages), and O(cached pages) to find them.
    [[nodiscard]] HeldPages hold(std::int32_t replica, const BlockId* pages, std::int64_t n);
    /// The available pages of a replica in the order in which requests would get them: free pages,
    /// then cached pages in the present order of eviction (PrefixTree::evictable_pages). For tests
    /// and for inspecting a cache. Throws std::invalid_argument with groups of layers and with
    /// quotas, because the order depends on the tenant and on the number of pages;
    /// std::out_of_range for a replica that does not exist; std::bad_alloc. O(pages).
    [[nodiscard]] std::vector<BlockId> next_pages(std::int32_t replica) const;
    /// Forgets every cached page, in every replica and its host tier. No later request hits a page
    /// that was cached before, nor a page of a request that ran before the reset, until `truncate`
    /// has removed the tokens that the request had at the reset. Requests, pins and holds keep
    /// their pages. Returns true if no formerly cached page is left, and false while requests, pins
    /// or holds keep some of these pages. Throws std::bad_alloc; then nothing has changed. O(cached
    /// pages + requests).
    bool reset_prefix_cache();

    /// Ends the transfers that one call gave out, and releases the pages held for them. Stored
    /// pages are found from now on; a page is not stored if there is no memory to index it. If the
    /// transfers are not `done`, the page copies are owed again (take_owed), and the stores are
    /// dropped. A request whose loads failed has lost its pages, as if it had just been claimed:
    /// set it back to the position in `moved`. (Do not set back a request that the call moved
    /// without loads: later calls may have run or cut it.) Throws InvalidHandleError, and changes
    /// nothing, for a ticket that was finished before. O(transfers).
    void finish(std::uint64_t ticket, bool done = true);
    /// Notes that a stream reads the source pages of stores [n] to the host tier after their
    /// transfers are finished. Call it before `finish`, which still releases these pages to new
    /// owners. `mark`, from 1 on, is a number that the caller raises in the order in which such
    /// reads end. Throws InvalidHandleError for a page that is not the device's, std::out_of_range
    /// for a replica that does not exist, std::bad_alloc; then no read is noted, and the caller
    /// must finish the transfers as not `done`. O(n).
    void note_late_reads(const PageMove* stores, std::int64_t n, std::uint64_t mark);
    /// The highest mark among pages of a replica that were handed out after their reads were noted;
    /// 0 if there was no read. Before a caller writes to pages of the replica, the reads up to this
    /// mark must have ended. Throws std::out_of_range for a replica that does not exist. O(1).
    [[nodiscard]] std::uint64_t late_reads(std::int32_t replica) const;
    /// Gives out again the copies that a sequence is owed because its transfers failed. Returns
    /// kUnderWay also if nothing is owed, but write-back transfers that make room in its replica
    /// are in flight. O(transfers).
    [[nodiscard]] OwedStatus take_owed(SequenceHandle sequence, Transfers& transfers);
    /// Waits until neither transfers into a sequence's pages nor write-back transfers that make
    /// room in its replica are in flight; also returns if the sequence is released. Throws
    /// std::logic_error if these transfers are the calling thread's own, because it would wait
    /// forever.
    void wait(SequenceHandle sequence) const;
    /// With stores below the host tier (CacheConfig::has_stores): writes to `out` up to `most`
    /// columns that arrived in the host tier and wait to be written to stores, oldest first. The
    /// caller ends the writes with `finish_writes` and the ticket of `out`. Returns false if no
    /// column waits. Throws std::bad_alloc, and has changed nothing. O(columns + hashing their
    /// tokens).
    [[nodiscard]] bool take_writes(std::int64_t most, StoreMoves& out);
    /// Ends writes that are done or abandoned. Throws InvalidHandleError for a ticket that was
    /// finished before. O(columns).
    void finish_writes(std::uint64_t ticket);
    /// Number of columns that wait or are being written. O(1).
    [[nodiscard]] std::int64_t num_waiting_writes() const;
    /// Number of columns that were never written: the cache forgot them while they waited, or there
    /// was no memory to queue them. O(1).
    [[nodiscard]] std::int64_t num_dropped_writes() const;

    /// The columns that device and host tier have of a request's prompt, or of tokens [n]. `most`
    /// is 0 if a search of the stores cannot help: no longer hit is possible, or the request
    /// already runs. Throws RequestNotFoundError, std::out_of_range for a replica that does not
    /// exist. Costs the same as finding the hit. `max_hit`: see ReserveOptions.
    [[nodiscard]] StoreSearch search_below(const RequestView& request,
                                           std::int64_t max_hit = ReserveOptions::kUnlimited);
    [[nodiscard]] StoreSearch search_below(std::int32_t replica, std::string_view name_space,
                                           const TokenId* tokens, std::int64_t n);
    /// The device, the host tier and the stores have the first `columns` columns of a searched
    /// prompt: if the request misses them, they did not arrive in time. O(1).
    void note_stored(const StoreSearch& search, std::int32_t columns) noexcept;
    /// Writes the keys of columns `first` .. `last` - 1 of a prompt to `out`. `parent` is the key
    /// of column `first` - 1, or the namespace's root key if `first` is 0. Without the mutex.
    /// O(tokens of these columns); if tokens have extra keys, O(all tokens before `last`).
    void keys_below(std::string_view name_space, const TokenId* tokens, std::int32_t first,
                    std::int32_t last, const PageKey& parent, PageKey* out) const;
    [[nodiscard]] PageKey root_key_below(std::string_view name_space) const;
    /// The parts that stores must bring before a hit can take the first `end` columns of a prompt:
    /// parts that neither the device nor the tier has, in ascending order of columns. Throws
    /// std::invalid_argument without stores, std::out_of_range for a replica that does not exist.
    /// O(columns).
    [[nodiscard]] std::vector<ColumnParts> needed_below(std::int32_t replica,
                                                        std::string_view name_space,
                                                        const TokenId* tokens,
                                                        std::int32_t end) const;
    /// Takes pages of the host tier for columns [n] that stores have and a hit of `end` columns
    /// needs, in ascending order and with their keys. Columns that are new to the tier must
    /// continue a prefix that the tier has. The parts of one window are taken together or not at
    /// all. If the tier has too little room, the call takes only the first columns. `out` lists the
    /// taken columns; its ticket is 0 if there is no room. No request finds the pages before
    /// `finish_fill`; the other pages of the tier that this hit would take stay there until
    /// `finish_fill`. Throws as `needed_below`, std::invalid_argument also for columns that do not
    /// rise or are not below `end`; std::bad_alloc, and has changed nothing. O(columns).
    void begin_fill(std::int32_t replica, std::string_view name_space, const TokenId* tokens,
                    std::int32_t end, const ColumnParts* columns, const PageKey* keys,
                    std::int64_t n, StoreMoves& out);
    /// Ends a fill: the first `arrived` columns have their bytes, and requests find them in the
    /// host tier from now on. The pages of the other columns become free. `forward`: the arrived
    /// columns also wait to be written to stores that lack them. Throws InvalidHandleError for a
    /// ticket that was finished before. O(columns).
    void finish_fill(std::uint64_t ticket, std::int64_t arrived, bool forward = false);
    /// With CacheConfig::event_pages: the pages that entered and left the caches since the last
    /// call, in that order. If more than `event_pages` pages waited, or memory ran out, the events
    /// begin with kCleared of each replica, followed by everything that is cached now. Any number
    /// of threads may take events: the order of the calls is the order of the events. Throws
    /// std::invalid_argument if the manager records no events; std::bad_alloc, and then the next
    /// events also begin with kCleared. O(events + hashing the tokens of stored pages), of which
    /// other threads wait for O(1).
    [[nodiscard]] std::vector<CacheEvent> take_events();
    /// Records an event that pages [n] of a replica are in stores, unless the caches were reset
    /// after `num_resets` was read. Throws std::out_of_range for a replica that does not exist.
    /// O(n).
    void note_written(std::int32_t replica, const PageKey* keys, std::int64_t n,
                      std::uint64_t num_resets);
    /// Page copies that were added to the list since the last call, for sequences that are still
    /// claimed. Make them in this order, before the next kernels run.
    [[nodiscard]] std::vector<PageMove> take_copies();
    /// The same for slots of states. A caller may make the copies of either list first.
    [[nodiscard]] std::vector<StateMove> take_state_copies();
    /// The slot of a sequence's state; -1 before the sequence is reserved, and without states.
    /// Throws RequestNotFoundError. O(1).
    [[nodiscard]] std::int32_t state_of(SequenceHandle sequence) const;
    /// States of a replica; zeros without states. Throws std::out_of_range. O(1).
    [[nodiscard]] StateStats state_stats(std::int32_t replica) const;

    /// The page counts of a replica at this moment. Throws std::out_of_range. O(pins changed since
    /// the last call).
    [[nodiscard]] PoolStats stats(std::int32_t replica) const;
    /// Pages of each group of a replica, in the order of the configuration; empty without groups.
    /// Throws std::out_of_range. O(columns of the replica).
    [[nodiscard]] std::vector<GroupStats> group_stats(std::int32_t replica) const;
    /// Pages of each quota in a replica, in the order of the configuration. Throws
    /// std::out_of_range. O(tenants + requests), and as `stats`.
    [[nodiscard]] std::vector<TenantStats> tenant_stats(std::int32_t replica) const;
    /// Summed over replicas. O(replicas + requests).
    [[nodiscard]] Metrics metrics() const;
    /// With CacheConfig::explain_pages: why tokens of a request's prompt were not cached, as of its
    /// last reservation with a search for a hit; all zeros before, and for forks. Throws
    /// RequestNotFoundError, and std::invalid_argument if misses are not explained. O(1).
    [[nodiscard]] Misses misses_of(SequenceHandle sequence) const;
    /// The sum of the misses of all admissions; all zeros if misses are not explained. O(replicas).
    [[nodiscard]] MissCounts miss_counts() const;
    /// With CacheConfig::advice_sample: the hit rates that other sizes of the cache, and the
    /// optimum, would have had in the last hour. The call locks the cache only while it copies the
    /// records of sampled pages. Throws std::invalid_argument without `advice_sample`. O(records
    /// log records).
    [[nodiscard]] Advice advice() const;
    /// Sets the counters to 0, and the peak to the number of pages in use. O(replicas).
    void reset_metrics();

    /// Throws IntegrityError naming the law that does not hold. O(everything).
    void check_integrity() const;

   private:
    friend struct CacheManagerProbe;  // of tests, which compare whole states
    struct Impl;

    std::unique_ptr<Impl> impl_;
};

}  // namespace kvcore
