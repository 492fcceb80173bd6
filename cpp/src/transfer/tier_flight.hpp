// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <thread>
#include <vector>

#include "kvcore/store_moves.hpp"
#include "layers/column_pages.hpp"
#include "layers/grouping.hpp"
#include "level/level.hpp"
#include "level/refs.hpp"

namespace kvcore {

/// Pages that one call moves between the pool and the host tier for one sequence. With states, a
/// flight may also move the checkpoint at the end of the prefix, or only this checkpoint.
///
/// All ids here are ids of columns: the flight copies a page for each lane in which both columns
/// have a page. With groups of layers, some columns only bring window pages for a record that the
/// tier already has, or for a column that the tree already has. They are freed when their pages
/// have arrived.
struct TierFlight {
    std::uint64_t ticket = 0;
    std::thread::id owner;  // the thread that moves the pages
    std::int32_t replica = 0;
    SequenceHandle sequence;
    bool is_load = false;             // otherwise a store
    std::vector<BlockId> host_pages;  // loads: pages of `source`; stores: taken from the tier
    std::vector<BlockId>
        device_pages;            // loads: with a reference to each; stores: pages of `source`
    PrefixRef source;            // the pages to read: of the tier (loads) or the tree (stores)
    std::int64_t num_pages = 0;  // to copy
    // Only for stores:
    PrefixRef place;              // in the tier: the stored pages continue it; empty: cancelled
    std::int32_t ahead = 0;       // pages after `place` that earlier flights store
    std::vector<TokenId> tokens;  // of these pages and of the copied pages
    std::uint32_t number = 0;     // no other flight has the same number
    bool goes_below = true;       // written to the lower stores, if there are any
    // Only for stores of pages that are about to be evicted, which have no sequence: the number of
    // pages that were available until the store took them. 0 for other flights.
    std::int64_t held_back = 0;
    // If the tier evicts by priority: the retention of the pages after `place`, in order, each part
    // up to a depth.
    struct Part {
        std::int32_t end = 0;
        Retention retention;
    };
    std::vector<Part> parts;
    // Of the columns; `prompt_end`, `read_from` and `patches` only with groups:
    std::int32_t first = 0;       // loads: the first own column; stores: the first column
    std::int32_t num_new = 0;     // stores: the last columns, after `place`; id -1: not stored
    std::int32_t prompt_end = 0;  // stores: whole columns of the prompt
    std::array<std::int32_t, Grouping::kMaxWindows> read_from{};  // stores: first column read
    std::vector<Patch> patches;                                   // loads
    ColumnCounts copied;                                          // num_pages, by columns
    // Only with states, if the flight copies a checkpoint:
    StateHold state;               // the sequence's slot
    StateHold stored_state;        // the slot in the tier
    std::int32_t state_depth = 0;  // stores: depth of the checkpoint's record

    /// Returns true if the flight stores pages that are evicted next, to make room.
    [[nodiscard]] bool is_spill() const noexcept { return held_back > 0; }
    /// Returns true if the sequence must not run before the flight is over.
    [[nodiscard]] bool holds_up() const noexcept { return is_load || state; }
};

/// Columns that are read from the lower stores into the host tier: a flight without a sequence. Its
/// place keeps the windows that the hit also reads and the tier has.
struct StoreFill : TierFlight {
    std::vector<ColumnParts> items;  // the parts to read, in column order
    std::vector<PageKey> keys;       // of the items
};

}  // namespace kvcore
