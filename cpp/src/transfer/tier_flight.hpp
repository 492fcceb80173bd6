// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <thread>
#include <vector>

#include "kvcore/store_moves.hpp"
#include "layers/column_pages.hpp"
#include "layers/grouping.hpp"
#include "level/hit.hpp"
#include "level/page_hold.hpp"
#include "level/store_place.hpp"
#include "level/window_hold.hpp"

namespace kvcore {

/// Pages between the pool and the host tier that one sequence was given in one call; with states
/// also the checkpoint at the end of what is there then, or that alone.
///
/// With groups of layers all ids here are those of columns: what is copied are the pages that the
/// columns of both sides have in the same lanes. Those of a store that only complete a record of
/// the tier, and those of a load that only complete a column of the tree, bring pages of windows
/// and are gone when they have arrived.
struct TierFlight {
    std::uint64_t ticket = 0;
    std::thread::id owner;  // the thread that was given them
    std::int32_t replica = 0;
    SequenceHandle sequence;
    bool is_load = false;             // else they are stored
    std::vector<BlockId> host_pages;  // loads: those of `source`; stores: taken from the tier
    std::vector<BlockId>
        device_pages;            // loads: with a reference to each; stores: those of `source`
    PathHold source;             // what is read: loads, of the tier; stores, of the tree
    std::int64_t num_pages = 0;  // that are copied
    // Of stores alone:
    StorePlace place;             // in the tier: what is stored goes behind it
    std::int32_t ahead = 0;       // pages behind `place` that earlier flights store
    std::vector<TokenId> tokens;  // of those and of the copies
    std::uint32_t number = 0;     // no other flight has it now
    bool is_wanted = true;        // false: forgotten meanwhile
    bool goes_below = true;       // it is written to stores, should there be any
    // Stores of what is about to be evicted, which have no sequence: pages that could be had before
    // they were given out. 0: other flights.
    std::int64_t held_back = 0;
    // Where the tier goes by priority: of what is behind `place`, in order, each part up to a
    // depth.
    struct Part {
        std::int32_t end = 0;
        Retention retention;
    };
    std::vector<Part> parts;
    // With groups alone:
    std::int32_t first = 0;       // loads: column of the first own page; stores: of the first one
    std::int32_t num_new = 0;     // stores: the last ones, behind `place`; -1 as an id: not stored
    std::int32_t prompt_end = 0;  // stores: whole columns of the prompt
    std::array<std::int32_t, Grouping::kMaxWindows> read_from{};  // stores: what the row read
    std::vector<Patch> patches;                                   // loads
    ColumnCounts copied;                                          // columns of num_pages
    // With states alone, and only where a checkpoint is copied:
    StateHold state;               // the slot of its sequence
    StateHold stored_state;        // that of the tier
    std::int32_t state_depth = 0;  // stores: of the record that it belongs to

    /// Those of `source`.
    [[nodiscard]] const std::vector<BlockId>& read_pages() const noexcept {
        return is_load ? host_pages : device_pages;
    }
    /// It makes room: what it stores goes next.
    [[nodiscard]] bool is_spill() const noexcept { return held_back > 0; }
    /// Its sequence may not run before it is over.
    [[nodiscard]] bool holds_up() const noexcept { return is_load || state; }
};

/// Columns that are read from stores into the host tier: a flight without a sequence.
struct StoreFill {
    TierFlight flight;
    std::vector<ColumnParts> items;  // what is read, by rising columns
    std::vector<PageKey> keys;       // of these
    WindowHold windows;              // that a hit reads too, and the tier has
};

}  // namespace kvcore
