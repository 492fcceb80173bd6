// SPDX-License-Identifier: Apache-2.0
// What goes into the calls of CacheManager and comes out of them: plain values, and the page table
// that fetches write.
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

/// Where the pages of a row changed lately: the first column that the last versions touched.
class RowChanges {
   public:
    /// A page from `column` on was replaced or dropped, which made `version`.
    void note(std::uint32_t version, std::int32_t column) noexcept {
        if (version % kSpan == 0) before_ = std::exchange(lately_, kNone);
        lately_ = std::min(lately_, column);
    }
    /// Columns in front that have the same pages now, at version `now`, as at version `then`; 0 for
    /// one that is too long ago.
    [[nodiscard]] std::int32_t unchanged(std::uint32_t then, std::uint32_t now) const noexcept {
        const std::uint32_t spans = now / kSpan - (then + 1) / kSpan;
        if (spans > 1) return 0;
        return spans == 0 ? lately_ : std::min(lately_, before_);
    }

   private:
    static constexpr std::uint32_t kSpan = 32;  // versions whose changes are kept as one
    static constexpr std::int32_t kNone = std::numeric_limits<std::int32_t>::max();

    std::int32_t lately_ = kNone;  // of the versions since the last multiple of kSpan
    std::int32_t before_ = kNone;  // of the kSpan versions in front of these
};

/// The pages of a row as a table shows them; somebody else's. `version` changes when one of them is
/// replaced or dropped, not when one is added behind. Without `changes` all pages of a row with
/// another version are written again.
struct RowPages {
    const BlockId* ids = nullptr;  // [n]
    std::int32_t n = 0;
    std::uint32_t version = 0;
    const RowChanges* changes = nullptr;
};

/// What a row's pages of all bundles follow from: where nothing of it has changed, they have not.
struct RowState {
    std::uint32_t version = 0;  // as of RowPages, of the columns
    std::uint32_t windows = 0;  // changes with the columns, and with `first` and `n`; 0: unknown
};

/// The same of one bundle, where a row's ids are columns that have pages of each: read are those of
/// columns first .. n - 1, the others have none.
struct BundlePages {
    const BlockId* columns = nullptr;  // [n]
    std::int32_t n = 0;
    std::int32_t first = 0;
    RowState state;
    const RowChanges* changes = nullptr;  // of the columns, as of RowPages
    const BlockId* pages = nullptr;       // + 1, 0: none; of a column from [column * stride] on
    std::int32_t stride = 1;
    std::int32_t per_column = 1;

    /// What a table shows of one of a column's pages.
    [[nodiscard]] std::uint32_t cell(std::int32_t column, std::int32_t lane,
                                     std::uint32_t unassigned) const noexcept {
        const BlockId page = pages[std::ptrdiff_t{columns[column]} * stride + lane];
        return page == 0 ? unassigned : static_cast<std::uint32_t>(page - 1);
    }
};

/// The page table that kernels read, kept up to date in a buffer that is used again for each batch:
/// a row is rewritten only where its sequence's pages changed since this buffer last saw it.
///
/// Owns: what it knows about each row. The memory [max_rows, stride] uint32 is the caller's and
/// need not be initialised. Invariant: of a row, columns [0, filled) are its occupant's pages,
/// [filled, padded) `unassigned`. Threads: none of its own. Cost: per row O(1) when nothing
/// changed, else O(pages changed).
class LookupTable {
   public:
    /// Over `data` [max_rows, stride], which has to live as long as the table; `unassigned` is what
    /// cells without a page read. Sizes are not checked. O(max_rows).
    LookupTable(std::uint32_t* data, std::int64_t max_rows, std::int64_t stride,
                std::uint32_t unassigned);

    /// Rows and columns of the memory. O(1).
    [[nodiscard]] std::int64_t max_rows() const noexcept { return max_rows_; }
    [[nodiscard]] std::int64_t stride() const noexcept { return stride_; }

    /// True when the memory holds row `row` with those pages.
    [[nodiscard]] bool has_room(std::int64_t row, RowPages pages) const noexcept {
        return row < max_rows_ && pages.n <= stride_;
    }
    /// Makes row `row` begin with the occupant's pages. They must have room. O(pages changed).
    void write_row(std::int64_t row, SequenceHandle occupant, RowPages pages) {
        const Row& known = rows_[static_cast<std::size_t>(row)];
        const bool is_same = known.occupant == occupant && known.version == pages.version;
        if (is_same && known.filled == pages.n) return;
        rewrite_row(row, occupant, pages);
    }
    /// Tables of the other bundles, nullptr for missing ones, are written in front of this one from
    /// now on, so that they show what this one shows. O(n), O(max_rows) where one of them was not
    /// the last time: it lacks what was written meanwhile.
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
    /// Takes nothing for known of what rows show, but for their cells. O(max_rows).
    void doubt() noexcept;
    /// True when row `row` < max_rows shows the pages that a bundle has for an occupant in such a
    /// state.
    [[nodiscard]] bool shows(std::int64_t row, const SequenceHandle& occupant,
                             const RowState& state) const noexcept {
        const Row& known = rows_[static_cast<std::size_t>(row)];
        return known.occupant == occupant && known.version == state.version &&
               known.windows == state.windows;
    }
    /// The same for a bundle. They must have room: n * per_column <= stride. O(pages changed).
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
    /// Takes nothing for known of what the memory holds, which somebody else has written.
    /// O(max_rows).
    void forget() noexcept;
    /// Makes rows 0 .. num_rows - 1 read `unassigned` from the ends of their pages up to column
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
        std::uint32_t windows = 0;  // of a bundle, as of RowState; 0: in doubt
    };

    void rewrite_row(std::int64_t row, SequenceHandle occupant, RowPages pages);
    void rewrite_row(std::int64_t row, SequenceHandle occupant, const BundlePages& pages);
    /// Columns of a row that the memory shows as they are now.
    [[nodiscard]] static std::int32_t shown(const Row& known, SequenceHandle occupant,
                                            std::uint32_t version,
                                            const RowChanges* changes) noexcept;
    void pad_rows(std::int64_t num_rows, std::int32_t width);

    std::uint32_t* data_;
    std::int64_t max_rows_;
    std::int64_t stride_;
    std::uint32_t unassigned_;
    std::vector<Row> rows_;
    const LookupTable* leader_ = nullptr;  // the table that was written behind this one
    std::uint64_t led_at_ = 0;             // `times_led_` of that one, when it was
    // The one behind this in its order: a leader may lie where another one lay, and have led as
    // often.
    const LookupTable* next_ = nullptr;
    std::uint64_t times_led_ = 0;
    // Of rows 0 .. num_padded_ - 1, none is padded to less than column padded_.
    std::int64_t num_padded_ = 0;
    std::int32_t padded_ = 0;
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
