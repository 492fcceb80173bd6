// SPDX-License-Identifier: Apache-2.0
// What goes into the calls of CacheManager and comes out of them: plain values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "kvcore/cache_groups.hpp"
#include "kvcore/cache_states.hpp"
#include "kvcore/eviction_policies.hpp"
#include "kvcore/lookup_table.hpp"
#include "kvcore/page_moves.hpp"
#include "kvcore/stand_ins.hpp"
#include "kvcore/tenants.hpp"
#include "kvcore/types.hpp"
#include "kvcore/write_policy.hpp"

namespace kvcore {

/// What a CacheManager is built for. Its constructor checks the numbers. New fields come last, so
/// that those who list values by their order go on compiling: there is one of these for a manager.
// NOLINTNEXTLINE(clang-analyzer-optin.performance.Padding)
struct CacheConfig {
    std::int64_t num_pages = 0;      // of each replica
    std::int32_t page_size = 128;    // tokens
    std::int64_t max_sequences = 0;  // claimed at a time, in each replica
    std::int64_t max_seq_len = 0;    // tokens
    std::int32_t num_replicas = 1;
    bool prefix_caching = true;
    bool dedup = true;  // commit swaps a page for an equal cached one
    // A hit may end inside a page, whose start is then copied, from so many tokens on; 0: never.
    std::int32_t partial_page_reuse = 1;
    // Of the tier below each replica, with groups for any bundle; 0: there is none.
    std::int64_t host_pages = 0;
    // Layers that do not all keep everything; none: every page is one of all layers.
    std::vector<CacheGroup> groups = {};
    // Every group gets pages for what runs next alone; else those that keep everything get them for
    // the whole request at once.
    bool reserve_chunks = false;
    // With groups or states: so many tokens of those written last may be truncated.
    std::int64_t max_draft_tokens = 0;
    // Of tenants, by number: see RequestTerms. Reservations are no more than the pages in all.
    std::vector<TenantQuota> quotas = {};
    // Layers with a state beside those with pages, and how many slots they share in each replica:
    // one for each sequence at least, those beyond are checkpoints.
    std::vector<StateGroup> states = {};
    std::int64_t num_state_slots = 0;
    // Of the tier below each replica, for checkpoints; 0: those stay on the device.
    std::int64_t num_host_state_slots = 0;
    // What arrives in the host tier has keys, and waits to be written to stores below it.
    bool has_stores = false;
    std::string key_seed = {};            // of keys, one item of CBOR; "" is nil
    const StandIns* stand_ins = nullptr;  // names of tokens with extra keys, outlive the manager
    // Pages of which events wait to be taken, at most; 0: there are no events.
    std::int64_t event_pages = 0;
    EvictionConfig eviction = {};       // of cached pages, in each replica
    EvictionConfig host_eviction = {};  // of those of the host tier
    // When a cached page goes to the host tier; kSelective: once it was used so often, 1 .. 255.
    WritePolicy write_policy = WritePolicy::kWriteThrough;
    std::int32_t write_threshold = 2;
    // With eviction by priority: the lowest priority whose runs the host tier takes. The tier takes
    // no page of a run below it, and no page behind that run.
    std::int32_t host_min_priority = 0;
    // Where ids of pages begin: those in front, of memory that is there too, are the caller's.
    BlockId first_page = 0;
    // With groups: `commit` gives back no page that a window has passed; `leave_windows` does. For
    // engines that commit tokens when they schedule them, while steps before still read the pages.
    bool keep_windows = false;
};

/// One request as the manager sees it for the length of a call; tokens and name are the caller's.
/// 0 <= start < active <= end: KV is written for [0, start), [start, active) runs next.
struct RequestView {
    SequenceHandle sequence = {};
    const TokenId* tokens = nullptr;  // [end]
    std::int64_t start = 0;
    std::int64_t active = 0;
    std::int64_t end = 0;
    std::string_view name_space = {};  // prefix-cache namespace; "" is the default one
    // Tokens to hold pages for: at least what runs next gets them, and no more than end.
    std::int64_t reserve_to = std::numeric_limits<std::int64_t>::max();

    /// Tokens that so many steps need pages for, once the request is active up to `at`: each step
    /// but the first adds one.
    [[nodiscard]] std::int64_t tokens_to_hold(std::int64_t at, std::int64_t num_steps) const {
        return std::max(at, std::min(end, reserve_to)) + (num_steps - 1);
    }
};

/// What the claims of a request have counted, for a later claim of the same request: a request that
/// was preempted comes back with its prompt counted, and some of its tokens run.
struct RequestHistory {
    std::int64_t prompt_tokens = -1;  // -1: all that the request has when it is next reserved
    std::int64_t counted_tokens = 0;  // in the metrics, from the first one on
    std::int64_t written_tokens = 0;  // computed, from the first one on
};

/// Tokens of a prompt whose pages have a priority of their own.
struct RetainedTokens {
    std::int64_t start = 0;
    std::int64_t end = 0;
    std::int32_t priority = kDefaultPriority;
    std::int64_t duration = Retention::kForever;
};

/// What a request asks for its pages: of a policy that goes by priority, and whose quota they count
/// against. Durations count from the last use, a release among them, in the unit of
/// CacheManager::advance.
struct RequestTerms {
    static constexpr std::int32_t kNoTenant = -1;
    static constexpr std::int32_t kSameTenant = -2;  // of a fork its parent's, else none

    std::int32_t priority = kDefaultPriority;  // 0 .. 100
    std::int64_t duration = Retention::kForever;
    // Ascending, none overlaps another. A page is in the range that its first token is in.
    std::vector<RetainedTokens> ranges = {};
    // Whose its pages are that it takes from now on: one of CacheConfig::quotas, by its number.
    std::int32_t tenant = kSameTenant;
};

/// The requests of a call: an array of views, or of pointers to views that lie elsewhere. Owns
/// neither; passed by value at no cost. The manager writes `start` and `active` (fork: `sequence`
/// too) of the views.
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

/// What a sequence has written, and in which pages: equal marks before and behind a copy of these
/// pages say that the copy is what was written.
struct SequenceMark {
    std::int64_t written = 0;  // tokens, as of the last commit
    std::int64_t state = 0;    // with states: the token that its slot stands at
    std::int64_t run = 0;      // and how far it was fetched since
    std::uint32_t pages = 0;   // changes when a page is replaced, dropped or left
    std::uint32_t windows = 0;

    friend bool operator==(const SequenceMark& a, const SequenceMark& b) noexcept {
        return a.written == b.written && a.state == b.state && a.run == b.run &&
               a.pages == b.pages && a.windows == b.windows;
    }
    friend bool operator!=(const SequenceMark& a, const SequenceMark& b) noexcept {
        return !(a == b);
    }
};

/// Whether a reservation was made: a full pool is an answer, not an error.
enum class ReserveStatus {
    kOk,
    kNoSpace,  // nothing changed
    // Nothing changed, and asking again is worth it: transfers into the request's pages are owed or
    // under way, or hold pages that it needs. A tier that has to look first whether it has a prefix
    // returns this too, until it knows.
    kPending,
};

/// How far a reservation may go, and what it has to leave. What is refused for it evicts nothing.
struct ReserveOptions {
    static constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

    // The request has this many tokens of the cache at most, loaded and copied ones included, or
    // what it had before; 0: the cache is not asked. A hit is cut to what may end in front of it.
    std::int64_t max_hit = kUnlimited;
    // Pages of the replica that are free or evictable afterwards, of no matter whose quota.
    std::int64_t keep_free = 0;
    // Beside keep_free there is room for the request with so many tokens, of which it gets no page
    // by that: later chunks are taken to be no longer than this one. Quotas count.
    std::int64_t must_fit = 0;

    /// It asks for more than the pages that it takes.
    [[nodiscard]] bool has_margin() const noexcept { return (keep_free | must_fit) != 0; }
    /// None of them is below 0.
    [[nodiscard]] bool is_legal() const noexcept { return (max_hit | keep_free | must_fit) >= 0; }
};

/// What `reserve_batch` returns.
struct BatchReserve {
    std::int64_t reserved = 0;                  // rows, from the first one on
    ReserveStatus status = ReserveStatus::kOk;  // of the row behind them, kOk where there is none
};

/// What `reserve` would do now.
struct ReservePlan {
    std::int64_t hit_tokens = 0;     // taken from the cache, copied ones included
    std::int64_t new_pages = 0;      // allocated
    std::int64_t evicted_pages = 0;  // evicted for that
    std::int64_t copied_tokens = 0;  // of hit_tokens, copied out of a partly equal page
    bool fits = false;
    std::int64_t active = 0;  // where what runs next would end
    // Of the hit, pages that are evictable now: with new_pages those that the replica has less
    // afterwards, unless the request gives some back for it.
    std::int64_t evictable_hit_pages = 0;
};

/// A request that a call moved, and where it stood before.
struct MovedRequest {
    std::int64_t row = 0;  // of the batch
    std::int64_t start = 0;
    std::int64_t active = 0;
};

/// What a call leaves to be done to bytes: by its caller, at once and in any order, and then
/// finished by its ticket. Until it is finished every page that it names is held: nobody else gets
/// it, whoever releases, forks, truncates or resets meanwhile; and no table names a page that is
/// written by it.
struct Transfers {
    std::uint64_t ticket = 0;          // what CacheManager::finish ends; 0: there is nothing to do
    std::vector<PageMove> copies;      // within the device's pool
    std::vector<PageMove> tier_moves;  // between it and the tiers below: whole pages
    std::vector<StateMove> state_copies;  // between slots of states, in all their groups
    std::vector<StateMove> state_moves;   // the same between the device's and those of the tier
    std::vector<MovedRequest> moved;      // to be set back should a load fail

    [[nodiscard]] bool empty() const noexcept { return ticket == 0; }
    /// Ready for the next call; keeps the memory.
    void clear() noexcept {
        ticket = 0;
        copies.clear();
        tier_moves.clear();
        state_copies.clear();
        state_moves.clear();
        moved.clear();
    }
};

/// What `take_owed` found of a sequence.
enum class OwedStatus {
    kNone,      // nothing is owed to it
    kTaken,     // what is owed is in the transfers
    kUnderWay,  // somebody else is at it: wait
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
    std::int32_t bundle = 0;
};

/// Where `fetch` writes one replica's part of a batch, and how large that part is. Table and
/// lengths are the caller's.
struct FetchTarget {
    LookupTable* table = nullptr;
    std::uint32_t* cache_lengths = nullptr;  // [table->max_rows()]
    std::uint32_t* new_lengths = nullptr;    // [table->max_rows()]: active - start; null: not asked
    std::int64_t rows = 0;                   // out: requests of this replica
    std::int32_t width = 0;                  // out: most pages of one of them, in columns
    std::int64_t longest_new = 0;            // out: longest active - start
    std::int64_t longest_active = 0;         // out: longest active
    LookupTable* const* more = nullptr;      // [num_bundles - 1], with groups: of other bundles
    std::int32_t* states = nullptr;          // [table->max_rows()], with states: slots
};

/// Whether a batch can run now.
enum class FetchStatus {
    kOk,
    kNoSpace,  // nothing changed; see row, needed, available
    kGrow,     // pages are reserved, but a table is missing or too small for rows x width; what was
               // offered may be written in part
    kPending,  // the transfers given out are to be finished first; where there are none, those of
               // `row`: they are owed since they failed, or under way elsewhere. Then call again
};

/// What `fetch` returns. `row` is set where there is no space or something pending, `needed` and
/// `available` where there is no space.
struct FetchResult {
    FetchStatus status = FetchStatus::kOk;
    std::int64_t row = 0;        // first request that did not fit, or has to wait
    std::int64_t needed = 0;     // pages
    std::int64_t available = 0;  // pages
    bool has_moved = false;      // start or active of a request changed
    bool is_over_quota = false;  // there is no space since quotas of tenants keep it
    bool lacks_slot = false;     // what `row` did not find is a slot for its state
};

/// Names a pinned prefix; `num_tokens` of it, whole pages, are kept. Recognised as stale once it
/// is unpinned.
struct PinHandle {
    std::uint32_t index = 0;
    std::uint32_t generation = 0;
    std::int64_t num_tokens = 0;
};

}  // namespace kvcore
