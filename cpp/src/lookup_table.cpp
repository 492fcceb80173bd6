// SPDX-License-Identifier: Apache-2.0
#include "kvcore/lookup_table.hpp"

#include <algorithm>
#include <cstring>

namespace kvcore {

LookupTable::LookupTable(std::uint32_t* data, std::int64_t max_rows, std::int64_t stride,
                         std::uint32_t unassigned)
    : data_(data),
      stride_(stride),
      unassigned_(unassigned),
      rows_(static_cast<std::size_t>(max_rows)) {}

void LookupTable::rewrite_row(std::int64_t row, SequenceHandle occupant, const Sequence& sequence,
                              std::int32_t width, bool is_same) {
    Row& known = rows_[static_cast<std::size_t>(row)];
    std::uint32_t* columns = data_ + row * stride_;
    const std::int32_t pages = sequence.num_pages();
    const std::int32_t from = is_same ? known.filled : 0;
    if (from < pages) {
        // Ids are not negative, so int32 and uint32 share their bytes.
        std::memcpy(columns + from, sequence.pages.data() + from,
                    static_cast<std::size_t>(pages - from) * sizeof(std::uint32_t));
    }
    if (pages < known.filled) std::fill(columns + pages, columns + known.filled, unassigned_);
    known.padded = std::max({known.padded, known.filled, pages});
    if (known.padded < width) {
        std::fill(columns + known.padded, columns + width, unassigned_);
        known.padded = width;
    }
    known.occupant = occupant;
    known.version = sequence.row_version;
    known.filled = pages;
}

}  // namespace kvcore
