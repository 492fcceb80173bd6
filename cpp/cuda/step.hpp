// SPDX-License-Identifier: Apache-2.0
// K3 and K20: the slots, lengths and tables of a step.
#pragma once

#include <cstdint>

#include "atomics.hpp"
#include "batch_tokens.hpp"
#include "kvcore/cuda.hpp"
#include "launch.hpp"

namespace kvcore::cuda {

/// Each lane writes a slot.
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

/// Each lane advances a length.
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

/// Each lane moves a column. It visits the rows in order, so that it reads each entry before it
/// overwrites the entry. After the lanes of the table's columns, one lane moves the lengths, and
/// one lane the row offsets.
struct CompactBody {
    BatchRows batch;
    const std::uint32_t* kept;  // [n]
    std::int64_t n;
    // Rows that are loaded together: all of them are read before any of them is written.
    static constexpr int kAhead = 8;

    KVCORE_HOST_DEVICE void operator()(Lane lane) const {
        for (std::int64_t i = lane.index(); i < batch.columns + 2; i += lane.count()) {
            if (i > batch.columns) {
                if (batch.offsets != nullptr) move_offsets();
                continue;
            }
            const bool is_page = i < batch.columns;
            std::uint32_t* column = is_page ? batch.pages + i : batch.lengths;
            if (column == nullptr) continue;
            move(column, is_page ? batch.row_stride : 1, is_page ? kNoPage : 0);
        }
    }

   private:
    // The walk over `kept`. The walks of all lanes end at the same entry, whatever `kept` holds.
    struct Walk {
        std::int64_t least = 0;  // least row that may follow
        bool is_over = false;
    };
    // Returns the row that moves to row `to`, or -1 if row `to` becomes empty.
    [[nodiscard]] KVCORE_HOST_DEVICE std::int64_t next(Walk& walk, std::uint32_t named,
                                                       std::int64_t to) const {
        walk.is_over = walk.is_over || to >= n || named < walk.least || named >= batch.rows;
        if (walk.is_over) return -1;
        walk.least = std::int64_t{named} + 1;
        return named;
    }
    KVCORE_HOST_DEVICE void name_rows(std::int64_t first, std::uint32_t* named) const {
        KVCORE_UNROLL
        for (int j = 0; j < kAhead; ++j) named[j] = first + j < n ? kept[first + j] : kNoPage;
    }

    KVCORE_HOST_DEVICE void move(std::uint32_t* column, std::int64_t stride,
                                 std::uint32_t empty) const {
        Walk walk;
        for (std::int64_t first = 0; first < batch.rows; first += kAhead) {
            std::uint32_t entries[kAhead];
            bool moves[kAhead];  // false: the entry is in place
            name_rows(first, entries);
            KVCORE_UNROLL
            for (int j = 0; j < kAhead; ++j) {
                const std::int64_t from = next(walk, entries[j], first + j);
                moves[j] = first + j < batch.rows && from != first + j;
                entries[j] = empty;
                if (moves[j] && from >= 0) entries[j] = column[from * stride];
            }
            KVCORE_UNROLL
            for (int j = 0; j < kAhead; ++j) {
                if (moves[j]) column[(first + j) * stride] = entries[j];
            }
        }
    }
    // While rows stay in place, their offsets also stay. From the first row that moves, each row
    // comes from a later place, whose offsets are not yet overwritten.
    KVCORE_HOST_DEVICE void move_offsets() const {
        Walk walk;
        std::uint32_t end = 0;
        bool is_moving = false;
        for (std::int64_t first = 0; first < batch.rows; first += kAhead) {
            std::uint32_t added[kAhead];
            name_rows(first, added);
            const bool was_moving = is_moving;
            KVCORE_UNROLL
            for (int j = 0; j < kAhead; ++j) {
                const std::int64_t from = next(walk, added[j], first + j);
                is_moving = is_moving || (first + j < batch.rows && from != first + j);
                added[j] = from < 0 ? 0 : batch.offsets[from + 1] - batch.offsets[from];
            }
            if (!is_moving) continue;
            if (!was_moving) end = batch.offsets[first];
            KVCORE_UNROLL
            for (int j = 0; j < kAhead; ++j) {
                end += added[j];
                if (first + j < batch.rows) batch.offsets[first + j + 1] = end;
            }
        }
    }
};

/// Each lane writes an entry.
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

Status compact_table(const BatchRows& batch, const std::uint32_t* kept, std::int64_t n,
                     Stream stream) noexcept {
    if (batch.rows < 0 || batch.columns < 0 || n < 0) return kInvalidCall;
    if (batch.rows == 0) return kSuccess;
    // Small blocks spread the few columns over more multiprocessors.
    constexpr std::int32_t kLanes = 2 * kWarp;
    return launch(CompactBody{batch, kept, n}, grid_for(batch.columns + 2, 0, kLanes), stream);
}

Status update_table(std::uint32_t* table, std::int64_t row_stride, std::int64_t rows,
                    std::int64_t columns, const TableEdit* edits, std::int64_t n, std::int32_t* bad,
                    Stream stream) noexcept {
    if (n < 0) return kInvalidCall;
    return launch(EditBody{table, row_stride, rows, columns, edits, n, bad}, grid_for(n), stream);
}

}  // namespace kvcore::cuda
