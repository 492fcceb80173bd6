// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string_view>
#include <vector>

#include "kvcore/cache_config.hpp"
#include "kvcore/cache_events.hpp"
#include "kvcore/cached_columns.hpp"
#include "kvcore/metrics.hpp"
#include "kvcore/page_moves.hpp"
#include "kvcore/request.hpp"
#include "kvcore/store_moves.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// What CacheManager::match found for a request, held until it is allocated or dropped.
///
/// Owns: a hold on the cached pages that it names, and on what continues them in the host tier:
/// nobody evicts them meanwhile, and they count as used. Dropping it leaves no trace: not even the
/// order of eviction knows that they were looked at.
/// Threads: one at a time; the manager, which must outlive it, may be used by others.
/// Cost: O(1) to drop, under the manager's mutex.
class PrefixHit {
   public:
    /// Holds nothing.
    PrefixHit() noexcept;
    PrefixHit(PrefixHit&& other) noexcept;
    PrefixHit& operator=(PrefixHit&& other) noexcept;
    ~PrefixHit();

    /// Tokens that the request would take from the cache, copied and loaded ones included; 0 where
    /// that is no more than it has.
    [[nodiscard]] std::int64_t num_tokens() const noexcept;
    /// Whole pages of those that it would share.
    [[nodiscard]] std::int64_t num_pages() const noexcept;

   private:
    friend class CacheManager;
    struct Held;

    explicit PrefixHit(std::unique_ptr<Held> held) noexcept;

    std::unique_ptr<Held> held_;
};

/// Pages that CacheManager::hold keeps as they are for somebody who reads or writes them.
///
/// Owns: a hold on each: whoever releases it, it is not handed out again, and while it is cached
/// not evicted. Where the caches are reset and nobody else has it, it is found no more, but stays
/// until it is let go. Letting go is no use of a page, and dropping it lets go too.
/// Threads: one at a time; the manager, which must outlive it, may be used by others.
/// Cost: O(pages) to let go, under the manager's mutex.
class HeldPages {
   public:
    /// Holds nothing.
    HeldPages() noexcept;
    HeldPages(HeldPages&& other) noexcept;
    HeldPages& operator=(HeldPages&& other) noexcept;
    ~HeldPages();

    /// As they were asked for.
    [[nodiscard]] const std::vector<BlockId>& pages() const noexcept;
    /// Lets the pages go. Throws InvalidHandleError where that was done before.
    void let_go();

   private:
    friend class CacheManager;
    struct Held;

    explicit HeldPages(std::unique_ptr<Held> held) noexcept;

    std::unique_ptr<Held> held_;
};

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
/// Errors: a call that throws or returns "no" has changed nothing. Memory that runs out is
/// std::bad_alloc, likewise.
/// Copies: a call that is given `transfers` puts there what its caller has to copy at once;
/// `finish` says that it is done, or failed. Without, copies within the pool go to the list of
/// take_copies, and nothing is held for them: their order is what keeps them right. A manager is
/// used in one of the two ways; with a host tier in the first. Cost: claim, release of committed
/// pages, pin: O(1). reserve: comparing the prompt with the cache plus O(pages added). commit:
/// O(new tokens). fetch: O(pages changed since the table's last use).
class CacheManager {
   public:
    /// `make_policy`: called once per replica for what orders its eviction, where that is none of
    /// `config.eviction`. Throws std::invalid_argument for sizes below 1.
    explicit CacheManager(const CacheConfig& config, const PolicyFactory& make_policy = {});
    CacheManager(const CacheManager&) = delete;
    CacheManager& operator=(const CacheManager&) = delete;
    ~CacheManager();

    /// As given to the constructor; valid as long as the manager. O(1), without the mutex.
    [[nodiscard]] const CacheConfig& config() const noexcept;

    /// Registers a sequence; takes no pages. Throws std::out_of_range for a replica that does not
    /// exist and CapacityError when the replica is full.
    [[nodiscard]] SequenceHandle claim(std::int32_t replica = 0);
    /// What a sequence asks for its pages from now on: of a policy that goes by priority, and whose
    /// they are; those that it has, or that are cached, keep what they had. Throws
    /// RequestNotFoundError, and std::invalid_argument for a priority outside 0 .. 100, a duration
    /// below 1, ranges that are not in order, or a tenant without a quota. O(ranges).
    void set_terms(SequenceHandle sequence, const RequestTerms& terms);
    /// It is `now`, in a unit of the caller's: priorities whose time is over end. A time before is
    /// no news. O(log n) for each run whose priority ends.
    void advance(std::int64_t now);
    /// Whether the handle names a claimed sequence. O(1).
    [[nodiscard]] bool contains(SequenceHandle sequence) const;
    /// Where it was claimed. Throws RequestNotFoundError. O(1).
    [[nodiscard]] std::int32_t replica_of(SequenceHandle sequence) const;
    /// Page ids in logical order, a copy; of a bundle where there are groups: then -1 stands for a
    /// page that no layer of it reads any more, or that is not reserved yet. Those from the
    /// `first` one on, as what a reservation has added: none where there are no more. Throws
    /// RequestNotFoundError, std::out_of_range for a bundle that does not exist, and
    /// std::invalid_argument for `first` below 0. O(pages returned).
    [[nodiscard]] std::vector<BlockId> pages_of(SequenceHandle sequence, std::int32_t bundle = 0,
                                                std::int64_t first = 0) const;
    /// Forgets a sequence: committed pages stay cached, the others are free unless forks hold them
    /// or transfers are under way: then they are when those are finished.
    /// `history`, where given, gets what a later claim of the same request is to recall.
    /// Throws RequestNotFoundError. O(pages not committed).
    void release(SequenceHandle sequence, RequestHistory* history = nullptr);
    /// The claim is of a request that an earlier claim has run: what that has counted counts apart
    /// (Metrics::resumed_tokens, recomputed_tokens). Nothing for a claim that was reserved already.
    /// Throws RequestNotFoundError. O(1).
    void recall(SequenceHandle sequence, const RequestHistory& history);
    /// Drops the pages of a sequence, what is owed to it and what it counted, as if it had just
    /// been claimed: for a caller who could not take over what a reservation said. Throws
    /// RequestNotFoundError, and PendingTransfersError while transfers into its pages are under
    /// way.
    void begin_again(SequenceHandle sequence);

    /// Reuses the cached prefix, then allocates pages for the request's tokens, up to `reserve_to`
    /// where that is less, and for num_steps - 1 more, evicting where it must. On success
    /// `request.start` and `.active` are where the request now stands. Transfers into the request's
    /// pages are due before its kernels run; with a host tier a prefix that goes further there is
    /// reused too. Throws RequestNotFoundError, std::invalid_argument, also for `options` below 0,
    /// and CapacityError when the request, or what must fit, can never fit.
    [[nodiscard]] ReserveStatus reserve(RequestView& request, std::int64_t num_steps = 1,
                                        Transfers* transfers = nullptr,
                                        const ReserveOptions& options = {});
    /// Reserves in order up to the first that does not fit. Every error is raised before anything
    /// is reserved. Where a row could only be had with pages that the transfers of rows before
    /// hold, it stops in front of it (kPending): finish those, and go on with the rest. With states
    /// also in front of a row, but the first, that would be cut with several steps.
    [[nodiscard]] BatchReserve reserve_batch(const RequestBatch& batch, std::int64_t num_steps = 1,
                                             Transfers* transfers = nullptr);
    /// What `reserve` would do now. A request that can never fit returns fits = false. Throws
    /// RequestNotFoundError and std::invalid_argument. Costs what finding the hit costs.
    [[nodiscard]] ReservePlan plan(const RequestView& request, std::int64_t num_steps = 1,
                                   const ReserveOptions& options = {}) const;
    /// What it would do for a request that is not claimed, of that tenant, were it claimed there;
    /// whether it could be is not asked, nor is its handle looked at. Throws std::out_of_range for
    /// a replica that does not exist, std::invalid_argument also for a tenant without a quota.
    [[nodiscard]] ReservePlan plan(std::int32_t replica, const RequestView& request,
                                   std::int64_t num_steps = 1, const ReserveOptions& options = {},
                                   std::int32_t tenant = RequestTerms::kNoTenant) const;

    /// Gives a sequence that has nothing yet pages for a request whose first `n` tokens its caller
    /// brings, and a slot for their state: where the request stands then, as behind a hit. The
    /// cache is not looked at, and windows get pages for what is read from there on alone. The
    /// caller writes all of these pages before the next commit, which puts them where
    /// `request.name_space` says. Throws as `reserve`, and std::invalid_argument unless
    /// 1 <= n < request.end, and for a sequence that was reserved or fetched. Without `transfers`
    /// pages that make room are not stored, also where they would be with write-back. O(pages
    /// added).
    [[nodiscard]] ReserveStatus begin_at(RequestView& request, std::int64_t n,
                                         Transfers* transfers = nullptr);
    /// For who copies the pages of a sequence while others may use the manager. Throws
    /// RequestNotFoundError, and PendingTransfersError. O(1).
    [[nodiscard]] SequenceMark mark_of(SequenceHandle sequence) const;

    /// The halves of `reserve`, for who decides in between. `match` finds what the cache has of a
    /// request's prompt and holds it; the request is not touched, and dropping the hit leaves no
    /// trace, but with quotas runs of the tree that were cut. Throws as `reserve`, but no
    /// CapacityError. Costs finding the hit.
    [[nodiscard]] PrefixHit match(const RequestView& request) const;
    /// Gives the request that hit, and pages for `n` tokens in all: at least for what runs next, at
    /// most to its end. On success the hit is used up, else still held; with write-back it is given
    /// up where the page that it copies from had to be evicted: match again. Returns and throws as
    /// `reserve`, and std::invalid_argument where the request has moved since it was matched, or
    /// the hit is used up. O(pages added), nothing is compared again.
    [[nodiscard]] ReserveStatus allocate(PrefixHit& hit, RequestView& request, std::int64_t n,
                                         Transfers* transfers = nullptr);

    /// Reserves what is missing, atomically over the batch, and writes lengths and page tables to
    /// `targets` [num_replicas], batch order kept inside a replica. Errors are those of `reserve`;
    /// a request named twice is std::invalid_argument. Tables are written once no transfer into
    /// their pages is left: see FetchStatus::kPending.
    [[nodiscard]] FetchResult fetch(const RequestBatch& batch, std::int64_t num_steps,
                                    FetchTarget* targets, Transfers* transfers = nullptr);

    /// Puts every page whose tokens are all written (start / page_size) into the prefix tree. Equal
    /// pages found there replace the sequence's own: `swaps` are those of this call. Forks that
    /// hold such a page as well hold it in the tree from then on. A page for whose place in the
    /// tree there is no memory, or no room in a quota, stays the sequence's own, for a later
    /// commit. Throws std::invalid_argument when a request claims more written tokens than its
    /// pages hold, and PendingTransfersError. With a host tier, copies of cached pages that are not
    /// there yet go to `transfers`: as many as have room, none of a sequence whose last ones are
    /// not finished or for which memory runs out. So do states that are due to become checkpoints,
    /// on the device and in the tier: their sequence is pending until both are done.
    void commit(const RequestBatch& batch, std::vector<PageSwap>& swaps,
                Transfers* transfers = nullptr);

    /// Claims `children` on the parent's replica with the tokens that the parent had written as of
    /// its last commit: their pages are shared, and copied before either writes into one. Sets each
    /// child's sequence, start and, where that was not behind start, active. Throws
    /// std::invalid_argument unless each child has those tokens, at least one more, and the
    /// parent's namespace; CapacityError when the replica cannot take all of them;
    /// RequestNotFoundError and PendingTransfersError. Takes no pages. O(children * (pages + tokens
    /// compared)).
    /// With states each child has a slot from then on, into which the parent's is copied:
    /// CapacityError where there are not as many, std::invalid_argument where the parent was
    /// fetched since its last commit and no state was kept in front of that.
    void fork(const RequestView& parent, const RequestBatch& children,
              Transfers* transfers = nullptr);
    /// Forgets written tokens from `n` on, and pages that hold none any more, those reserved ahead
    /// among them; the caller sets the request's indices back. The tree's pages are not rewritten:
    /// one that is cut is copied when it is written next. Throws RequestNotFoundError,
    /// PendingTransfersError, and std::invalid_argument unless 0 <= n <= what was fetched or
    /// written. With states, `n` must be 0, where the request's state stands, behind a state that
    /// it keeps, or a token with a checkpoint, which is copied then. O(pages dropped).
    void truncate(SequenceHandle sequence, std::int64_t n, Transfers* transfers = nullptr);
    /// Groups of rows with common leading pages, nested ones too, longest first; pages, not tokens,
    /// are compared. Throws RequestNotFoundError. O(rows * runs * log(rows * runs)).
    [[nodiscard]] std::vector<SharedPrefix> shared_prefixes(const RequestBatch& batch) const;

    /// Cached whole pages of a prefix of `tokens` [n]: their number and, if asked for, their ids,
    /// and how many of the tokens behind them, less than a page, a cached page has too: with groups
    /// those that a hit could copy, with states none. Of a bundle the ids are those that a request
    /// with this hit has, as `pages_of` lists them. Pure. Throws std::out_of_range for a replica or
    /// a bundle that does not exist. Costs comparing the tokens; for the tokens behind, O(log
    /// siblings) more.
    [[nodiscard]] std::int64_t match(std::int32_t replica, std::string_view name_space,
                                     const TokenId* tokens, std::int64_t n,
                                     std::vector<BlockId>* pages = nullptr,
                                     std::int32_t* partial_tokens = nullptr,
                                     std::int32_t bundle = 0) const;
    /// The same, and a use of those pages: as a request that takes them and lets go of them at
    /// once. Throws as `match`; with more ids than `most_pages` it is no use of any, and returns
    /// the same number. The match plus O(runs).
    std::int64_t touch(std::int32_t replica, std::string_view name_space, const TokenId* tokens,
                       std::int64_t n, std::vector<BlockId>* pages = nullptr,
                       std::int32_t* partial_tokens = nullptr,
                       std::int64_t most_pages = std::numeric_limits<std::int64_t>::max(),
                       std::int32_t bundle = 0);
    /// Keeps those pages from eviction until unpinned. The match plus O(1).
    [[nodiscard]] PinHandle pin(std::int32_t replica, std::string_view name_space,
                                const TokenId* tokens, std::int64_t n);
    /// Lets them go. Throws InvalidHandleError for a handle unpinned before. O(1).
    void unpin(PinHandle pin);

    /// Replica for a request not claimed yet: longest prefix hit, on whichever tier, then most
    /// available pages, then fewest sequences, then lowest index. Pure. A match per replica.
    [[nodiscard]] std::int32_t recommend_replica(std::string_view name_space, const TokenId* tokens,
                                                 std::int64_t n) const;

    /// Tokens up to `highest` that the trees of every replica and tier hold, and what is on its way
    /// there, in any order. What stand-ins (kvcore/extra_keys.hpp) are still held. O(cached
    /// tokens).
    [[nodiscard]] std::vector<TokenId> tokens_up_to(TokenId highest) const;
    /// First token of a sequence that a call may still compare with the cache or put there. Throws
    /// RequestNotFoundError. O(1).
    [[nodiscard]] std::int64_t first_uncached(SequenceHandle sequence) const;

    /// What is cached in a replica, and in which order it would go. Throws std::out_of_range for a
    /// replica that does not exist. O(cached tokens).
    [[nodiscard]] CachedTree cached_tree(std::int32_t replica) const;
    /// Holds cached columns, for who copies them elsewhere meanwhile: fewer where fewer are cached
    /// or a quota keeps them from being held, none where the caches were reset since. Throws
    /// std::invalid_argument unless `span` asks for a whole column at least, and std::out_of_range.
    /// The match plus O(columns).
    [[nodiscard]] CacheExport export_columns(const ColumnSpan& span);
    /// Takes free pages for columns that the caller brings, and `columns` [of the span] says what
    /// of each: see CacheImport. Evicts nothing; they count for no tenant. Throws as
    /// `export_columns`, and std::invalid_argument for windows or states that there are not, and
    /// without prefix caching. The match plus O(columns).
    [[nodiscard]] CacheImport import_columns(const ColumnSpan& span, const CachedColumn* columns);
    /// The pages of an import are filled: it is found from now on, as used just now, and ends.
    /// `more`: the caller goes on with columns behind it, for which the run keeps room. False where
    /// nobody wants it any more, since the caches were reset. Throws std::invalid_argument for one
    /// that holds nothing. O(columns).
    [[nodiscard]] bool publish(CacheImport& filled, bool more = false);
    /// How often the caches were reset. O(1).
    [[nodiscard]] std::uint64_t num_resets() const;

    /// With CacheConfig::keep_windows: gives back the pages of windows that no token behind the
    /// first `n` reads. Returns with how many tokens there is more to give back: the highest
    /// int64_t where layers have no windows. Throws RequestNotFoundError, PendingTransfersError;
    /// std::invalid_argument without keep_windows, for n < 0, and for more tokens than its pages
    /// hold. O(pages given back).
    std::int64_t leave_windows(SequenceHandle sequence, std::int64_t n);
    /// What is in these pages [n] of a replica, of any bundle, is wrong: those that are cached
    /// leave the cache with all that is cached behind them, there and in the host tier, and nothing
    /// that was computed from them is put there any more. Who holds such pages keeps them: a
    /// request runs on, commits nothing from the first of them on until it was truncated to where
    /// that begins, and takes no longer prefix; a pin and a transfer keep theirs until they end.
    /// Pages that nobody holds are free. The same goes for requests whose page is not cached, if
    /// something is written in it; ids of other pages are passed over. Stores below the host tier
    /// keep what was written there. Returns how many pages left the cache of the device. Throws
    /// InvalidHandleError for an id that is no page's, std::out_of_range for a replica that does
    /// not exist; std::bad_alloc. O(cached pages + requests).
    std::int64_t forget(std::int32_t replica, const BlockId* pages, std::int64_t n);
    /// Keeps pages [n] of a replica, of any bundle, from being handed out to anybody else or
    /// evicted until they are let go, whoever releases them: for who copies to or from them
    /// meanwhile. Holds nest. With groups a page is held with all others of its tokens. A request
    /// may go on writing into its own. Throws InvalidHandleError for an id that is no page's, or a
    /// free page's; CapacityError where quotas leave no room for cached pages to be held;
    /// std::out_of_range for a replica that does not exist; std::bad_alloc. Nothing has changed
    /// then. O(pages), and O(cached pages) to find them.
    [[nodiscard]] HeldPages hold(std::int32_t replica, const BlockId* pages, std::int64_t n);
    /// The pages of a replica that can be had, in the order in which requests would be given them:
    /// free ones, then cached ones as they would be evicted now (PrefixTree::evictable_pages). For
    /// tests and for looking at a cache. Throws std::invalid_argument with groups of layers and
    /// with quotas, where it depends on who asks for how many; std::out_of_range for a replica that
    /// does not exist; std::bad_alloc. O(pages).
    [[nodiscard]] std::vector<BlockId> next_pages(std::int32_t replica) const;
    /// Forgets every cached page, in every replica and its host tier: no later request hits a page
    /// that was there, nor a page that a request computes which ran before, until `truncate` has
    /// cut it to what was not. Who holds a page keeps it. Returns whether no page is left that was
    /// cached: false while requests, pins or holds keep some. Throws std::bad_alloc; nothing has
    /// changed then. O(cached pages + requests).
    bool reset_prefix_cache();

    /// The transfers given out by one call are over. Stored pages are found from now on, but those
    /// for whose place there is no memory: they are not stored. What was held is let go. Where they
    /// are not `done`, page copies are owed again (take_owed), pages that were to be stored are
    /// not, and a request whose loads failed has lost its pages, as if it had just been claimed:
    /// set it back to where `moved` says. (One that the call moved without loads may have been
    /// run or cut by others since: it is theirs.) Throws InvalidHandleError, and changes nothing,
    /// for a ticket that was finished before. O(transfers).
    void finish(std::uint64_t ticket, bool done = true);
    /// Stores [n] to the host tier, of transfers that are about to be finished, are on a stream
    /// that reads their pages later. `finish` lets the pages go all the same, and they are handed
    /// out to others. `mark`, from 1 on, is a number of the caller's that rises in the order in
    /// which such reads end. Throws InvalidHandleError for a page that is none of the device's,
    /// std::out_of_range for a replica that does not exist, std::bad_alloc; then none is noted, and
    /// the transfers are to be finished as not `done`. O(n).
    void note_late_reads(const PageMove* stores, std::int64_t n, std::uint64_t mark);
    /// The highest mark of pages of a replica that were handed out since they were noted, 0 for
    /// none: who writes to pages of the replica does so behind the reads up to it. Throws
    /// std::out_of_range for a replica that does not exist. O(1).
    [[nodiscard]] std::uint64_t late_reads(std::int32_t replica) const;
    /// Gives out again what is owed to a sequence since its transfers failed. Where nothing is, but
    /// others make room in its replica with write-back, that is under way. O(transfers).
    [[nodiscard]] OwedStatus take_owed(SequenceHandle sequence, Transfers& transfers);
    /// Returns when no transfers into a sequence's pages are under way, and none that make room in
    /// its replica with write-back, or it is gone. Throws std::logic_error where they are the
    /// calling thread's own, which would wait for ever.
    void wait(SequenceHandle sequence) const;
    /// With stores below the host tier (CacheConfig::has_stores): up to `most` columns that have
    /// arrived there and are to be written, those that wait longest first, to be finished by their
    /// ticket. False where none waits. Throws std::bad_alloc, and has changed nothing. O(columns +
    /// hashing their tokens).
    [[nodiscard]] bool take_writes(std::int64_t most, StoreMoves& out);
    /// They are written, or never will be. Throws InvalidHandleError for a ticket that was finished
    /// before. O(columns).
    void finish_writes(std::uint64_t ticket);
    /// Columns that wait or are being written. O(1).
    [[nodiscard]] std::int64_t num_waiting_writes() const;
    /// Columns that were forgotten while they waited, or for which there was no memory. O(1).
    [[nodiscard]] std::int64_t num_dropped_writes() const;

    /// How far device and host tier get with a request, or with tokens [n]. `most` is 0 where no
    /// store could be of use: nothing is longer, or the request runs already. Throws
    /// RequestNotFoundError, std::out_of_range for a replica that does not exist. Costs finding the
    /// hit. `max_hit`: as ReserveOptions has it.
    [[nodiscard]] StoreSearch search_below(const RequestView& request,
                                           std::int64_t max_hit = ReserveOptions::kUnlimited);
    [[nodiscard]] StoreSearch search_below(std::int32_t replica, std::string_view name_space,
                                           const TokenId* tokens, std::int64_t n);
    /// Keys of columns `first` .. `last` - 1 of a prompt to `out`; `parent` is the key in front of
    /// `first`, that of the namespace where it is 0. Without the mutex. O(tokens of these columns);
    /// where tokens have extra keys, O(all in front of `last`).
    void keys_below(std::string_view name_space, const TokenId* tokens, std::int32_t first,
                    std::int32_t last, const PageKey& parent, PageKey* out) const;
    [[nodiscard]] PageKey root_key_below(std::string_view name_space) const;
    /// What stores have to bring so that a hit could take the first `end` columns of a prompt:
    /// parts that neither the device nor the tier has, by rising columns. O(columns).
    [[nodiscard]] std::vector<ColumnParts> needed_below(std::int32_t replica,
                                                        std::string_view name_space,
                                                        const TokenId* tokens,
                                                        std::int32_t end) const;
    /// Takes pages of the host tier for columns [n] that stores have and a hit of `end` columns
    /// needs, by rising columns and with their keys; new ones of the tier have to go on from what
    /// it has, and of a window all parts count or none. As many as there is room for, from the
    /// first on: see `out`, which has no ticket for none. Nobody finds them before `finish_fill`;
    /// what else of the tier such a hit takes stays there until then. Throws std::invalid_argument
    /// for columns that do not rise or are not in front of `end`; std::bad_alloc, and has changed
    /// nothing. O(columns).
    void begin_fill(std::int32_t replica, std::string_view name_space, const TokenId* tokens,
                    std::int32_t end, const ColumnParts* columns, const PageKey* keys,
                    std::int64_t n, StoreMoves& out);
    /// The bytes of the first `arrived` columns of a fill are there: they are found in the host
    /// tier from now on. The others are free again. `forward`: those that arrived wait to be
    /// written too, to stores that lack them. Throws InvalidHandleError for a ticket that was
    /// finished before. O(columns).
    void finish_fill(std::uint64_t ticket, std::int64_t arrived, bool forward = false);
    /// With CacheConfig::event_pages: what entered and left the caches since the last call, in that
    /// order. Where more waited than that, or memory ran out, it begins with kCleared of each
    /// replica, and all that is cached now. Any number of threads may take them: who is told of a
    /// page first is told by the order of the calls. Throws std::invalid_argument where there are
    /// no events; std::bad_alloc, and then the next ones begin so too. O(events + hashing the
    /// tokens of stored pages), of which others wait for O(1).
    [[nodiscard]] std::vector<CacheEvent> take_events();
    /// Pages [n] of a replica are in stores, as of `num_resets`: an event, unless the caches were
    /// reset since. Throws std::out_of_range for a replica that does not exist. O(n).
    void note_written(std::int32_t replica, const PageKey* keys, std::int64_t n,
                      std::uint64_t num_resets);
    /// Page copies on the list since the last call, of sequences still claimed; to be done in this
    /// order, before the next kernels run.
    [[nodiscard]] std::vector<PageMove> take_copies();
    /// The same of slots of states. Whoever makes both lists may begin with either.
    [[nodiscard]] std::vector<StateMove> take_state_copies();
    /// The slot of a sequence's state; -1 before it was reserved, and without states. Throws
    /// RequestNotFoundError. O(1).
    [[nodiscard]] std::int32_t state_of(SequenceHandle sequence) const;
    /// Of a replica; zeros without states. Throws std::out_of_range. O(1).
    [[nodiscard]] StateStats state_stats(std::int32_t replica) const;

    /// Pages of a replica now. Throws std::out_of_range. O(pins changed since it was asked last).
    [[nodiscard]] PoolStats stats(std::int32_t replica) const;
    /// Of each group of a replica, in the order of the configuration; none without groups. Throws
    /// std::out_of_range. O(columns of the replica).
    [[nodiscard]] std::vector<GroupStats> group_stats(std::int32_t replica) const;
    /// Of each quota in a replica, in the order of the configuration. Throws std::out_of_range.
    /// O(tenants + requests), and as `stats`.
    [[nodiscard]] std::vector<TenantStats> tenant_stats(std::int32_t replica) const;
    /// Summed over replicas. O(replicas + requests).
    [[nodiscard]] Metrics metrics() const;
    /// Counts from 0 again; the peak from what is in use. O(replicas).
    void reset_metrics();

    /// Throws IntegrityError naming the law that does not hold. O(everything).
    void check_integrity() const;

   private:
    friend struct CacheManagerProbe;  // of tests, which compare whole states
    struct Impl;

    std::unique_ptr<Impl> impl_;
};

}  // namespace kvcore
