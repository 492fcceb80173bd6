// SPDX-License-Identifier: Apache-2.0
#include "kvcore/request.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

namespace kvcore {

LookupTable::LookupTable(std::uint32_t* data, std::int64_t max_rows, std::int64_t stride,
                         std::uint32_t unassigned)
    : data_(data),
      max_rows_(max_rows),
      stride_(stride),
      unassigned_(unassigned),
      rows_(static_cast<std::size_t>(max_rows)) {}

std::int32_t LookupTable::shown(const Row& known, SequenceHandle occupant, std::uint32_t version,
                                const RowChanges* changes) noexcept {
    if (known.occupant != occupant) return 0;
    if (known.version == version) return std::numeric_limits<std::int32_t>::max();
    return changes == nullptr ? 0 : changes->unchanged(known.version, version);
}

void LookupTable::rewrite_row(std::int64_t row, SequenceHandle occupant, const RowPages& pages) {
    Row& known = rows_[static_cast<std::size_t>(row)];
    std::uint32_t* columns = data_ + row * stride_;
    const std::int32_t from =
        std::min(known.filled, shown(known, occupant, pages.version, pages.changes));
    if (from < pages.n) {
        // Ids are not negative, so int32 and uint32 have the same bytes.
        std::memcpy(columns + from, pages.ids + from,
                    static_cast<std::size_t>(pages.n - from) * sizeof(std::uint32_t));
    }
    if (pages.n < known.filled) std::fill(columns + pages.n, columns + known.filled, unassigned_);
    known.padded = std::max({known.padded, known.filled, pages.n});
    known.occupant = occupant;
    known.version = pages.version;
    known.filled = pages.n;
}

// Cells [0, known.first) of the same occupant are `unassigned`, even if its columns have changed.
void LookupTable::rewrite_row(std::int64_t row, SequenceHandle occupant, const BundlePages& pages) {
    Row& known = rows_[static_cast<std::size_t>(row)];
    std::uint32_t* cells = data_ + row * stride_;
    const std::int32_t first = pages.first * pages.per_column;
    const std::int32_t end = pages.n * pages.per_column;
    const std::int32_t passed = std::min(first, end);
    const std::int32_t columns = shown(known, occupant, pages.state.version, pages.changes);
    const std::int32_t from =
        columns > known.filled / pages.per_column ? known.filled : columns * pages.per_column;
    const std::int32_t read = columns > 0 ? known.first : 0;
    for (std::int32_t c = read; c < passed; ++c) cells[c] = unassigned_;
    for (std::int32_t c = first < read ? first : std::max(first, from); c < end; ++c) {
        cells[c] = pages.cell(c / pages.per_column, c % pages.per_column, unassigned_);
    }
    for (std::int32_t c = end; c < known.filled; ++c) cells[c] = unassigned_;
    known.padded = std::max({known.padded, known.filled, end});
    known.occupant = occupant;
    known.version = pages.state.version;
    known.first = first;
    known.filled = end;
}

void LookupTable::doubt() noexcept {
    for (Row& row : rows_) row.windows = 0;
}

void LookupTable::forget() noexcept {
    std::fill(rows_.begin(), rows_.end(), Row{});
    leader_ = nullptr;
    num_padded_ = 0;
    padded_ = 0;
}

void LookupTable::pad_rows(std::int64_t num_rows, std::int32_t width) {
    // Pads several columns at a time, because the longest row grows by a column again and again.
    constexpr std::int64_t kAtATime = 16;
    const auto to =
        static_cast<std::int32_t>(std::min(stride_, ceil_div(width, kAtATime) * kAtATime));
    for (std::int64_t row = 0; row < num_rows; ++row) {
        Row& known = rows_[static_cast<std::size_t>(row)];
        if (known.padded >= to) continue;
        std::uint32_t* columns = data_ + row * stride_;
        std::fill(columns + known.padded, columns + to, unassigned_);
        known.padded = to;
    }
    num_padded_ = num_rows;
    padded_ = to;
}

}  // namespace kvcore
