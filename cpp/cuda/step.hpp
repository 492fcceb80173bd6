// SPDX-License-Identifier: Apache-2.0
// K3 and K20: the slots, lengths and tables of a step.
#pragma once

#include <cstdint>

#include "atomics.hpp"
#include "batch_tokens.hpp"
#include "kvcore/cuda.hpp"
#include "launch.hpp"

namespace kvcore::cuda {

/// A lane writes a slot.
template <class Slot>
struct SlotsBody {
    DeviceBatch batch;
    BatchTokens tokens;
    std::int64_t page_size;
    Slot* slots;  // [capacity]
    std::int64_t capacity;

    KVCORE_HOST_DEVICE void operator()(Lane lane) const {
        const std::int64_t first = batch.table.batch == 0 ? 0 : batch.ranges.offsets[0];
        for (std::int64_t i = lane.index(); i < capacity; i += lane.count()) {
            const TokenPlace place =
                batch.table.batch == 0 ? TokenPlace{} : tokens.find(first + i, false);
            slots[i] =
                place.page < 0 ? Slot{-1} : static_cast<Slot>(place.page * page_size + place.entry);
        }
    }
};

/// A lane advances a length.
struct AdvanceBody {
    const std::uint32_t* lengths;  // [batch]
    const std::uint32_t* offsets;  // [batch + 1]
    const std::uint8_t* active;    // [batch] or nullptr
    std::uint32_t* advanced;       // [batch]
    std::int64_t batch;

    KVCORE_HOST_DEVICE void operator()(Lane lane) const {
        for (std::int64_t row = lane.index(); row < batch; row += lane.count()) {
            const bool grows = active == nullptr || active[row] != 0;
            advanced[row] = lengths[row] + (grows ? offsets[row + 1] - offsets[row] : 0U);
        }
    }
};

/// A lane writes an entry.
struct EditBody {
    std::uint32_t* table;  // [rows, columns]
    std::int64_t row_stride;
    std::int64_t rows;
    std::int64_t columns;
    const TableEdit* edits;  // [n]
    std::int64_t n;
    std::int32_t* bad;

    KVCORE_HOST_DEVICE void operator()(Lane lane) const {
        for (std::int64_t i = lane.index(); i < n; i += lane.count()) {
            const TableEdit edit = edits[i];
            if (edit.row < rows && edit.column < columns) {
                table[edit.row * row_stride + edit.column] = edit.page;
            } else if (bad != nullptr) {
                atomic_add(bad, 1);
            }
        }
    }
};

namespace {

template <class Slot>
[[nodiscard]] Status write_slots(const PageTable& table, const TokenRanges& ranges,
                                 std::int64_t page_size, std::int64_t num_pages, Slot* slots,
                                 std::int64_t capacity, Stream stream) noexcept {
    if (capacity < 0) return kInvalidCall;
    const DeviceBatch batch{table, ranges, capacity, num_pages};
    return launch(
        SlotsBody<Slot>{batch, BatchTokens(batch, page_size, nullptr), page_size, slots, capacity},
        grid_for(capacity), stream);
}

}  // namespace

Status build_slots(const PageTable& table, const TokenRanges& ranges, std::int64_t page_size,
                   std::int64_t num_pages, std::int64_t* slots, std::int64_t capacity,
                   Stream stream) noexcept {
    return write_slots(table, ranges, page_size, num_pages, slots, capacity, stream);
}

Status build_slots(const PageTable& table, const TokenRanges& ranges, std::int64_t page_size,
                   std::int64_t num_pages, std::int32_t* slots, std::int64_t capacity,
                   Stream stream) noexcept {
    return write_slots(table, ranges, page_size, num_pages, slots, capacity, stream);
}

Status advance_lengths(const std::uint32_t* lengths, const std::uint32_t* offsets,
                       const std::uint8_t* active, std::uint32_t* advanced, std::int64_t batch,
                       Stream stream) noexcept {
    if (batch < 0) return kInvalidCall;
    return launch(AdvanceBody{lengths, offsets, active, advanced, batch}, grid_for(batch), stream);
}

Status update_table(std::uint32_t* table, std::int64_t row_stride, std::int64_t rows,
                    std::int64_t columns, const TableEdit* edits, std::int64_t n, std::int32_t* bad,
                    Stream stream) noexcept {
    if (n < 0) return kInvalidCall;
    return launch(EditBody{table, row_stride, rows, columns, edits, n, bad}, grid_for(n), stream);
}

}  // namespace kvcore::cuda
