// SPDX-License-Identifier: Apache-2.0
// Arguments and results of the calls of CacheManager, as plain values, and the page table that
// `fetch` writes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "kvcore/eviction.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// Recent changes to the pages of a row: the first column that the last versions changed.
class RowChanges {
   public:
    /// Records that version `version` replaced or dropped a page in `column` or a later column.
    void note(std::uint32_t version, std::int32_t column) noexcept {
        if (version % kSpan == 0) before_ = std::exchange(lately_, kNone);
        lately_ = std::min(lately_, column);
    }
    /// Leading columns that have the same pages at version `now` as at version `then`; 0 if `then`
    /// is too old.
    [[nodiscard]] std::int32_t unchanged(std::uint32_t then, std::uint32_t now) const noexcept {
        const std::uint32_t spans = now / kSpan - (then + 1) / kSpan;
        if (spans > 1) return 0;
        return spans == 0 ? lately_ : std::min(lately_, before_);
    }

   private:
    static constexpr std::uint32_t kSpan = 32;  // versions whose changes are merged
    static constexpr std::int32_t kNone = std::numeric_limits<std::int32_t>::max();

    std::int32_t lately_ = kNone;  // of the versions since the last multiple of kSpan
    std::int32_t before_ = kNone;  // of the kSpan versions before those
};

/// The pages of a row as a table shows them; does not own the ids. `version` changes when a page is
/// replaced or dropped, but not when a page is appended. Without `changes` the table rewrites every
/// page of a row that has another version.
struct RowPages {
    const BlockId* ids = nullptr;  // [n]
    std::int32_t n = 0;
    std::uint32_t version = 0;
    const RowChanges* changes = nullptr;
};

/// Determines a row's pages in all bundles: while the state is the same, the pages are the same.
struct RowState {
    std::uint32_t version = 0;  // as in RowPages, of the columns
    std::uint32_t windows = 0;  // changes with the columns, `first` and `n`; 0: unknown
};

/// The pages of a row in one bundle. The row's ids are columns, and each column has pages in every
/// bundle. The table shows pages for columns first .. n - 1 and `unassigned` for the others.
struct BundlePages {
    const BlockId* columns = nullptr;  // [n]
    std::int32_t n = 0;
    std::int32_t first = 0;
    RowState state;
    const RowChanges* changes = nullptr;  // of the columns, as in RowPages
    const BlockId* pages = nullptr;       // [column id * stride + lane]: page id + 1, 0: no page
    std::int32_t stride = 1;
    std::int32_t per_column = 1;

    /// The table cell for one page of a column.
    [[nodiscard]] std::uint32_t cell(std::int32_t column, std::int32_t lane,
                                     std::uint32_t unassigned) const noexcept {
        const BlockId page = pages[std::ptrdiff_t{columns[column]} * stride + lane];
        return page == 0 ? unassigned : static_cast<std::uint32_t>(page - 1);
    }
};

/// The page table that kernels read, in a buffer that all batches share. A row is rewritten only if
/// its sequence's pages have changed since the buffer last showed them.
///
/// Owns: its data about each row. The memory [max_rows, stride] uint32 is the caller's and need not
/// be initialised. Invariant: in each row, columns [0, filled) are its occupant's pages and columns
/// [filled, padded) are `unassigned`. Threads: no locks of its own. Cost: per row O(1) if nothing
/// changed, else O(pages changed).
class LookupTable {
   public:
    /// Uses the memory `data` [max_rows, stride], which must outlive the table; cells without a
    /// page read `unassigned`. Does not check the sizes. O(max_rows).
    LookupTable(std::uint32_t* data, std::int64_t max_rows, std::int64_t stride,
                std::uint32_t unassigned);

    /// Rows and columns of the memory. O(1).
    [[nodiscard]] std::int64_t max_rows() const noexcept { return max_rows_; }
    [[nodiscard]] std::int64_t stride() const noexcept { return stride_; }

    /// True if the memory has row `row` and enough columns for the pages.
    [[nodiscard]] bool has_room(std::int64_t row, RowPages pages) const noexcept {
        return row < max_rows_ && pages.n <= stride_;
    }
    /// Writes the occupant's pages to the start of row `row`. They must fit. O(pages changed).
    void write_row(std::int64_t row, const SequenceHandle& occupant, const RowPages& pages) {
        if (!shows(row, occupant, pages.version, pages.n)) rewrite_row(row, occupant, pages);
    }
    /// Registers the tables of the other bundles, nullptr for a missing table. From now on the
    /// caller writes them before this table, so that they show the same rows. O(n), or O(max_rows)
    /// if the last call did not register the same tables: a new table lacks the rows written in
    /// between.
    void lead(LookupTable* const* others, std::size_t n) noexcept {
        bool is_known = true;
        const std::uint64_t before = times_led_++;
        LookupTable* last = this;
        for (std::size_t i = 0; i < n; ++i) {
            LookupTable* const other = others[i];
            is_known &= other != nullptr && other->leader_ == this && other->led_at_ == before &&
                        last->next_ == other;
            if (other == nullptr) continue;
            other->leader_ = this;
            other->led_at_ = times_led_;
            last->next_ = other;
            last = other;
        }
        if (!is_known) doubt();
    }
    /// Makes `shows` return false for every row until it is written again; the cells stay known.
    /// O(max_rows).
    void doubt() noexcept;
    /// True if row `row` < max_rows shows the `n` pages that an occupant has at this version.
    [[nodiscard]] bool shows(std::int64_t row, const SequenceHandle& occupant,
                             std::uint32_t version, std::int32_t n) const noexcept {
        const Row& known = rows_[static_cast<std::size_t>(row)];
        return known.occupant == occupant && known.version == version && known.filled == n;
    }
    /// True if row `row` < max_rows shows the pages that a bundle has for an occupant in this
    /// state.
    [[nodiscard]] bool shows(std::int64_t row, const SequenceHandle& occupant,
                             const RowState& state) const noexcept {
        const Row& known = rows_[static_cast<std::size_t>(row)];
        return known.occupant == occupant && known.version == state.version &&
               known.windows == state.windows;
    }
    /// Writes the pages of a bundle. They must fit: n * per_column <= stride. O(pages changed).
    void write_row(std::int64_t row, const SequenceHandle& occupant, const BundlePages& pages) {
        Row& known = rows_[static_cast<std::size_t>(row)];
        const bool is_same = known.occupant == occupant && known.version == pages.state.version;
        known.windows = pages.state.windows;
        if (!is_same || pages.per_column > 1 || pages.n < known.filled) {
            return rewrite_row(row, occupant, pages);
        }
        std::uint32_t* cells = data_ + row * stride_;
        const std::int32_t passed = std::min(pages.first, pages.n);
        if (known.first < passed) {
            std::fill(cells + known.first, cells + passed, unassigned_);
            known.first = passed;
        }
        for (std::int32_t c = known.filled; c < pages.n; ++c) {
            cells[c] = c < passed ? unassigned_ : pages.cell(c, 0, unassigned_);
        }
        known.filled = pages.n;
        known.padded = std::max(known.padded, pages.n);
    }
    /// Forgets the contents of the memory, after other code has written it. O(max_rows).
    void forget() noexcept;
    /// Fills rows 0 .. num_rows - 1 with `unassigned`, from the end of their pages up to column
    /// `width` <= stride. O(cells not padded yet).
    void pad(std::int64_t num_rows, std::int32_t width) {
        if (num_rows > num_padded_ || width > padded_) pad_rows(num_rows, width);
    }

   private:
    struct alignas(32) Row {
        SequenceHandle occupant;
        std::uint32_t version = 0;
        std::int32_t first = 0;
        std::int32_t filled = 0;
        std::int32_t padded = 0;
        std::uint32_t windows = 0;  // of a bundle, as in RowState; 0: unknown
    };

    void rewrite_row(std::int64_t row, SequenceHandle occupant, const RowPages& pages);
    void rewrite_row(std::int64_t row, SequenceHandle occupant, const BundlePages& pages);
    /// Leading columns of a row that the memory already shows correctly.
    [[nodiscard]] static std::int32_t shown(const Row& known, SequenceHandle occupant,
                                            std::uint32_t version,
                                            const RowChanges* changes) noexcept;
    void pad_rows(std::int64_t num_rows, std::int32_t width);

    std::uint32_t* data_;
    std::int64_t max_rows_;
    std::int64_t stride_;
    std::uint32_t unassigned_;
    std::vector<Row> rows_;
    const LookupTable* leader_ = nullptr;  // the table that was written after this table
    std::uint64_t led_at_ = 0;             // `times_led_` of the leader at that time
    // The next table in the leader's order. Needed because a new leader may have the address and
    // the `times_led_` of a former leader.
    const LookupTable* next_ = nullptr;
    std::uint64_t times_led_ = 0;
    // Rows 0 .. num_padded_ - 1 are padded at least up to column padded_.
    std::int64_t num_padded_ = 0;
    std::int32_t padded_ = 0;
};

/// A request as the manager sees it during a call; tokens and name are the caller's.
/// 0 <= start < active <= end: KV is written for [0, start), and [start, active) runs next.
struct RequestView {
    SequenceHandle sequence = {};
    const TokenId* tokens = nullptr;  // [end]
    std::int64_t start = 0;
    std::int64_t active = 0;
    std::int64_t end = 0;
    std::string_view name_space = {};  // prefix-cache namespace; "" is the default one
    // Tokens to hold pages for: at least the tokens that run next, at most `end`.
    std::int64_t reserve_to = std::numeric_limits<std::int64_t>::max();

    /// Tokens that need pages for `num_steps` steps after the request is active up to `at`: each
    /// step after the first adds a token.
    [[nodiscard]] std::int64_t tokens_to_hold(std::int64_t at, std::int64_t num_steps) const {
        return std::max(at, std::min(end, reserve_to)) + (num_steps - 1);
    }
};

/// Token counts from earlier claims of a request, for its next claim: a preempted request comes
/// back after its prompt was counted and some of its tokens were computed.
struct RequestHistory {
    std::int64_t prompt_tokens = -1;  // -1: every token of the request at its next reservation
    std::int64_t counted_tokens = 0;  // in the metrics, from token 0
    std::int64_t written_tokens = 0;  // computed, from token 0
};

/// Tokens of a prompt whose pages have a separate priority.
struct RetainedTokens {
    std::int64_t start = 0;
    std::int64_t end = 0;
    std::int32_t priority = kDefaultPriority;
    std::int64_t duration = Retention::kForever;
};

/// The priority of a request's pages, for policies that use priorities, and the tenant whose quota
/// they count against. Durations count from the last use or release, in the unit of
/// CacheManager::advance.
struct RequestPriority {
    static constexpr std::int32_t kNoTenant = -1;
    static constexpr std::int32_t kSameTenant = -2;  // a fork: its parent's tenant; else no tenant

    std::int32_t priority = kDefaultPriority;  // 0 .. 100
    std::int64_t duration = Retention::kForever;
    // Ascending, without overlaps. A page is in the range of its first token.
    std::vector<RetainedTokens> ranges = {};
    // The tenant of the pages that the request takes from now on: an index into
    // CacheConfig::quotas.
    std::int32_t tenant = kSameTenant;
};

/// The requests of a call: an array of views, or of pointers to views elsewhere. Does not own them;
/// passed by value at no cost. The manager writes `start` and `active` of the views; a fork also
/// writes `sequence`.
class RequestBatch {
   public:
    RequestBatch(RequestView* views, std::int64_t n) noexcept : views_(views), size_(n) {}
    RequestBatch(RequestView* const* rows, std::int64_t n) noexcept : rows_(rows), size_(n) {}

    [[nodiscard]] std::int64_t size() const noexcept { return size_; }
    [[nodiscard]] RequestView& operator[](std::int64_t row) const noexcept {
        return rows_ != nullptr ? *rows_[row] : views_[row];
    }
    /// The rows as pointers, for long walks. `memory` gets the pointers if the batch was given as
    /// views. Throws std::bad_alloc.
    [[nodiscard]] RequestView* const* rows(std::vector<RequestView*>& memory) const {
        if (rows_ != nullptr) return rows_;
        memory.resize(static_cast<std::size_t>(size_));
        for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = views_ + i;
        return memory.data();
    }

   private:
    RequestView* views_ = nullptr;
    RequestView* const* rows_ = nullptr;
    std::int64_t size_;
};

/// Identifies the tokens that a sequence has written and their pages. If the mark is equal before
/// and after a copy of these pages, the copy has the written tokens.
struct SequenceMark {
    std::int64_t written = 0;  // tokens, as of the last commit
    std::int64_t state = 0;    // with states: tokens whose state its slot has
    std::int64_t run = 0;      // with states: the end of the tokens fetched since
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

/// The outcome of a reservation. A full pool is a status, not an error.
enum class ReserveStatus {
    kOk,
    kNoSpace,  // nothing changed
    // Nothing changed; call again later. Transfers into the request's pages are owed or in flight,
    // transfers hold pages that the request needs, or pages to evict must be stored first.
    kPending,
};

/// Limits of a reservation, and the room that it must leave. A reservation that fails because of
/// them evicts nothing.
struct ReserveOptions {
    static constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

    // The request takes at most this many tokens from the cache, including loaded and copied
    // tokens, or as many as it already had; 0: no look-up. A longer hit is cut to the longest legal
    // hit within this limit.
    std::int64_t max_hit = kUnlimited;
    // Pages of the replica that must be free or evictable afterwards, whatever quota they count
    // against.
    std::int64_t keep_free = 0;
    // In addition to keep_free, the replica must have room for the request with this many tokens,
    // but the request does not get these pages now. Assumes that later chunks are no longer than
    // this chunk. Quotas count.
    std::int64_t must_fit = 0;

    /// True if the options require more room than the pages that the request takes.
    [[nodiscard]] bool has_margin() const noexcept { return (keep_free | must_fit) != 0; }
    /// True if no option is below 0.
    [[nodiscard]] bool is_legal() const noexcept { return (max_hit | keep_free | must_fit) >= 0; }
};

/// The result of `reserve_batch`.
struct BatchReserve {
    std::int64_t reserved = 0;                  // rows, from the first one on
    ReserveStatus status = ReserveStatus::kOk;  // of the next row; kOk if there is no next row
};

/// The effects that `reserve` would have now.
struct ReservePlan {
    std::int64_t hit_tokens = 0;     // taken from the cache, including copied tokens
    std::int64_t new_pages = 0;      // allocated
    std::int64_t evicted_pages = 0;  // evicted to allocate new_pages
    std::int64_t copied_tokens = 0;  // of hit_tokens, copied out of a partly equal page
    bool fits = false;
    std::int64_t active = 0;  // where the tokens that run next would end
    // Pages of the hit that are evictable now. The replica's free and evictable pages shrink by
    // this number plus new_pages, unless the request gives pages back for it.
    std::int64_t evictable_hit_pages = 0;
};

/// Rows of a batch that hold the same leading pages.
struct SharedPrefix {
    std::int32_t replica = 0;
    std::int64_t num_tokens = 0;     // written, by all of them
    std::vector<std::int32_t> rows;  // of the replica's part of the batch
};

/// A page that commit replaced by an equal cached page.
struct PageSwap {
    std::int32_t row;  // in the batch
    std::int32_t column;
    BlockId page;  // the cached page, now in the row
    std::int32_t bundle = 0;
};

/// Buffers for one replica's part of a batch, and the size of that part, which `fetch` writes. The
/// table and the arrays are the caller's.
struct FetchTarget {
    LookupTable* table = nullptr;
    std::uint32_t* cache_lengths = nullptr;  // [table->max_rows()]
    std::uint32_t* new_lengths = nullptr;    // [table->max_rows()]: active - start; or null
    std::int64_t rows = 0;                   // out: requests of this replica
    std::int32_t width = 0;                  // out: most pages of a request, in columns
    std::int64_t longest_new = 0;            // out: longest active - start
    std::int64_t longest_active = 0;         // out: longest active
    LookupTable* const* more = nullptr;      // [num_bundles - 1], with groups: other bundles
    std::int32_t* states = nullptr;          // [table->max_rows()], with states: slots
};

/// The outcome of `fetch`: kOk if the batch can run now.
enum class FetchStatus {
    kOk,
    kNoSpace,  // nothing changed; see row, needed, available
    kGrow,     // pages are reserved, but a table is missing or too small for rows x width; the
               // given tables may be partly written
    kPending,  // finish the returned transfers, then call again. If no transfers are returned,
               // transfers of `row` are owed after a failure, or in flight elsewhere
};

/// The result of `fetch`. `row` is set for kNoSpace and kPending, `needed` and `available` for
/// kNoSpace.
struct FetchResult {
    FetchStatus status = FetchStatus::kOk;
    std::int64_t row = 0;        // first request that did not fit, or must wait
    std::int64_t needed = 0;     // pages
    std::int64_t available = 0;  // pages
    bool has_moved = false;      // start or active of a request changed
    bool is_over_quota = false;  // no space because of the quotas of tenants
    bool lacks_slot = false;     // `row` found no free slot for its state
};

/// Names a pinned prefix; its first `num_tokens` tokens, whole pages, stay cached. The handle is
/// stale after `unpin`.
struct PinHandle {
    std::uint32_t index = 0;
    std::uint32_t generation = 0;
    std::int64_t num_tokens = 0;
};

}  // namespace kvcore
