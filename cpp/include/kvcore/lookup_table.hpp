// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

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

}  // namespace kvcore
