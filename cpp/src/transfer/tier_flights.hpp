// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "kvcore/store_moves.hpp"
#include "layers/column_pages.hpp"
#include "layers/grouping.hpp"
#include "level/level.hpp"
#include "level/refs.hpp"
#include "request/sequence.hpp"
#include "store/store_queue.hpp"
#include "support/tickets.hpp"
#include "transfer/store_rules.hpp"

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

/// All pages in flight to and from the host tiers, and the length of each sequence's prefix in its
/// tier. The caller moves the bytes without the mutex. No lookup finds the pages before the caller
/// has finished their ticket.
///
/// Owns: the flights with a hold on every page that they read or write, and for each sequence a
/// place in its tier, or the number of the flight that has the place.
/// Invariant: at most one flight stores a page. The `num_pending` of a sequence counts the flights
/// that block it, and its copies. The place of a sequence is on its committed prefix.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: O(pages moved), and O(flights) to finish; `owe_stores` costs next to nothing if the tier
/// is full.
class TierFlights {
   public:
    TierFlights(const CacheConfig& config, const Grouping& grouping,
                const std::vector<std::unique_ptr<Replica>>& replicas, Tickets& tickets,
                SequenceTable& sequences, const WindowRows& windows, StoreQueue& queue);

    [[nodiscard]] const std::vector<TierFlight>& all() const noexcept { return flights_; }
    [[nodiscard]] const StoreRules& rules() const noexcept { return rules_; }

    /// Prepares a load of the pages of a hit that only the tier has, and of its checkpoint if the
    /// device has no checkpoint. Changes nothing if it throws std::bad_alloc.
    [[nodiscard]] std::unique_ptr<TierFlight> prepare_load(SequenceHandle handle,
                                                           std::int32_t replica,
                                                           const FoundHit& hit, bool has_state,
                                                           Transfers& transfers);
    /// Reserves memory for the loads of several rows: `prepare_load` reserves only for its own
    /// load.
    void make_room_for_loads(std::size_t loads, std::size_t pages, Transfers& transfers);
    /// Gives out a prepared load; its checkpoint goes into `slot`. The caller has made room.
    void owe_load(TierFlight& load, Sequence& sequence, RecurrentSlots::Slot slot,
                  Transfers& transfers);
    /// Gives out stores of committed pages that the tier does not have, as far as it has room. Does
    /// nothing while a store of the sequence is in flight. With groups, also stores window pages
    /// that the sequence has and the tier's records lack. Gives out nothing if it throws
    /// std::bad_alloc.
    void owe_stores(SequenceHandle handle, const Sequence& sequence, Transfers& transfers);
    /// Gives out a store of the state in the slot of a sequence, the state at the end of its
    /// committed prefix, as a checkpoint of the tier. If the rules have no marks, call it after
    /// `owe_stores` in the same call; with marks, it also gives out the stores of the tokens. Does
    /// nothing if the tier will not have these tokens, already has the checkpoint, or has no free
    /// slot. Gives out no state if it throws std::bad_alloc.
    void owe_checkpoint(SequenceHandle handle, Sequence& sequence, RecurrentSlots::Slot slot,
                        Transfers& transfers);

    /// Records that columns `first` .. `end` - 1 of a sequence were put into the tree. The tree
    /// already had the columns in `duplicates`.
    void note_commit(const Sequence& sequence, std::int32_t first, std::int32_t end,
                     const std::vector<DuplicatePage>& duplicates) noexcept {
        if (rules_.has_marks()) mark_commit(sequence, first, end, duplicates);
    }
    /// Reserves memory so that `note_hit` cannot fail. Throws std::bad_alloc.
    void expect_hit(SequenceHandle handle);
    /// Records that a sequence took over columns from `first` on, in a hit.
    void note_hit(SequenceHandle handle, const Sequence& sequence, std::int32_t first) noexcept;
    /// Returns true if pages of the sequence may be due since a hit.
    [[nodiscard]] bool is_due(SequenceHandle handle) const noexcept {
        const Standing* standing = find(handle);
        return standing != nullptr && standing->is_due;
    }

    /// Tells the tier when the session of a sequence returns, for the pages that the sequence has
    /// in the tier. The copies that are still on their way keep the hint that they began with.
    void expect(SequenceHandle handle, std::int64_t returns) noexcept;

    /// With write-back, prepares the eviction of `need` pages or columns of a replica: evicts pages
    /// that were offered to the tier before, and gives out stores of the other pages that are next
    /// to evict. Returns true if it gave out stores: the caller repeats its call when they are
    /// over. Pages that cannot be stored are evicted all the same. O(pages evicted), and the prefix
    /// of each run that is offered.
    [[nodiscard]] bool spill(std::int32_t replica, PageNeed need, EvictionGuard guard,
                             Transfers& transfers);
    /// Returns true if stores of `spill` are in flight in a replica, and at least `pages` more
    /// pages become available when they are over. O(flights).
    [[nodiscard]] bool holds_back(std::int32_t replica, std::int64_t pages) const noexcept;

    /// Ends the flights of a ticket; `done`: their bytes have arrived. Calls `begin_again(sequence,
    /// handle)` for each sequence whose loaded pages did not arrive. Returns false if the ticket
    /// has no flights.
    template <class BeginAgain>
    bool finish(std::uint64_t ticket, bool done, const BeginAgain& begin_again) noexcept {
        if (grouping_.is_plain()) let_go_of_spills(ticket);
        return end_ticket(flights_, ticket, [&](TierFlight& flight) {
            if (flight.is_load) {
                finish_load(flight, done, begin_again);
            } else {
                finish_store(flight, done);
            }
            return true;
        });
    }

    [[nodiscard]] const std::vector<StoreFill>& fills() const noexcept { return fills_; }
    /// The parts that the lower stores have to bring before a hit can take the first `end` columns
    /// of a prompt: parts that neither the device nor the tier has, in column order. A column that
    /// is new to the tier is listed with all parts that it needs. Throws std::bad_alloc.
    [[nodiscard]] std::vector<ColumnParts> needed_below(std::int32_t replica,
                                                        std::string_view name_space,
                                                        const TokenId* tokens,
                                                        std::int32_t end) const;
    /// Gives out pages of the tier for `items` of a hit of `end` columns, from the first item on,
    /// as far as there is room and the items form whole prefixes. If no item fits, `out` has no
    /// ticket. Until the ticket is finished, windows that the hit reads stay in the tier. Changes
    /// nothing if it throws std::bad_alloc.
    void begin_fill(std::int32_t replica, std::string_view name_space, const TokenId* tokens,
                    std::int32_t end, const ColumnParts* items, const PageKey* keys, std::size_t n,
                    StoreMoves& out);
    /// Ends the fill of a ticket: its first `arrived` columns can be found from now on, and the
    /// pages of the other columns are given back. `forward`: the columns also wait to be written to
    /// the lower stores. Returns false for an unknown ticket.
    [[nodiscard]] bool finish_fill(std::uint64_t ticket, std::int64_t arrived,
                                   bool forward) noexcept;

    /// The place of a sequence after its committed part is cut to `columns`; empty if the cut does
    /// not change the place. Throws std::bad_alloc.
    [[nodiscard]] PrefixRef find_cut(SequenceHandle handle, std::int32_t replica,
                                     std::int32_t columns) const;
    /// Cuts a sequence to `columns`; `cut` is its place from `find_cut`. Its pages in flight arrive
    /// without it.
    void move_back(SequenceHandle handle, std::int32_t columns, PrefixRef cut) noexcept;
    /// Forgets a sequence that is released or begins again.
    void forget(SequenceHandle handle) noexcept;

    /// Cancels stores of forgotten pages; the end of its place cancels a store that continues
    /// forgotten pages of the tier. A sequence whose load reads forgotten pages cannot commit the
    /// loaded pages.
    void drop_forgotten() noexcept;

    /// Throws IntegrityError unless the flights agree with the records of each sequence and tier.
    void check_integrity() const;
    /// Returns true if a load brings pages of a window for a column that a sequence has from the
    /// tree.
    [[nodiscard]] bool brings(const Sequence& sequence, std::int32_t column,
                              std::size_t window) const noexcept;
    /// Calls visit(column) for each column of the device that flights of a replica read or write.
    template <class Visit>
    void for_each_column(std::int32_t replica, const Visit& visit) const {
        for (const TierFlight& flight : flights_) {
            if (flight.replica != replica) continue;
            for (const BlockId column : flight.device_pages) visit(column);
        }
    }

   private:
    /// The state of the stores of a sequence, by the index of its handle.
    struct Standing {
        PrefixRef place;            // the end of its prefix in the tier; empty: unknown
        std::uint32_t storing = 0;  // number of the flight that has the place; 0: no flight
        std::int32_t examined = 0;  // with groups: columns whose records were examined
        bool is_due = false;        // see `is_due`
    };
    /// A cached prefix to store: the prefix of a sequence, or a prefix that is about to be evicted.
    struct Path {
        std::int32_t replica = 0;
        TreePosition at;
        SequenceHandle sequence;
    };
    /// The parts of columns to store: a bit for each window, and a bit for the full lanes.
    struct Choice;
    using ReadFrom = std::array<std::int32_t, Grouping::kMaxWindows>;

    [[nodiscard]] Replica& home_of(std::int32_t replica) const noexcept {
        return *replicas_[static_cast<std::size_t>(replica)];
    }
    [[nodiscard]] const Standing* find(SequenceHandle handle) const noexcept {
        return handle.index < standings_.size() ? &standings_[handle.index] : nullptr;
    }
    [[nodiscard]] Standing* find(SequenceHandle handle) noexcept {
        return handle.index < standings_.size() ? &standings_[handle.index] : nullptr;
    }
    /// Makes room for the standing of a sequence. Throws std::bad_alloc.
    [[nodiscard]] Standing& standing_of(SequenceHandle handle) {
        if (handle.index >= standings_.size()) standings_.resize(std::size_t{handle.index} + 1);
        return standings_[handle.index];
    }
    [[nodiscard]] static Path path_of(SequenceHandle handle, const Sequence& sequence) noexcept {
        return {sequence.replica, {sequence.pages.node(), sequence.pages.committed()}, handle};
    }
    /// The standing that gets the place of a store back; nullptr if its sequence was released or
    /// cut.
    [[nodiscard]] Standing* owner_of(const TierFlight& flight) noexcept {
        Standing* standing = flight.is_spill() ? nullptr : find(flight.sequence);
        return standing != nullptr && standing->storing == flight.number ? standing : nullptr;
    }
    void mark_commit(const Sequence& sequence, std::int32_t first, std::int32_t end,
                     const std::vector<DuplicatePage>& duplicates) noexcept;
    void find_place(Standing& standing, const Path& path) const;
    void advance(Standing& standing, const Path& path, std::int32_t end) const;
    void store_pages(const Path& path, Standing& standing, Transfers& transfers);
    void choose_stores(const Standing& standing, const Path& path, std::int32_t end,
                       TierFlight& flight) const;
    void find_parts(const Path& path, std::int32_t first, std::int32_t end,
                    TierFlight& flight) const;
    template <class Publish>
    static void for_each_part(const TierFlight& flight, std::int32_t first, std::int32_t end,
                              const Publish& publish);
    void let_go_of_spills(std::uint64_t ticket) noexcept;
    [[nodiscard]] bool spill_columns(std::int32_t replica, PageNeed need, EvictionGuard guard,
                                     Transfers& transfers);
    [[nodiscard]] std::int64_t offer(std::int32_t replica, TreePosition at, Transfers& transfers);
    [[nodiscard]] std::int64_t count_offered(std::int32_t replica, TreePosition end,
                                             std::int64_t most) const noexcept;
    void store_path(const Path& path, Standing& standing, Transfers& transfers);
    void give_out_store(TierFlight&& flight, Transfers& transfers) noexcept;
    [[nodiscard]] std::uint32_t free_number() noexcept;
    void finish_store(TierFlight& flight, bool done) noexcept;
    [[nodiscard]] bool is_storing_state(std::int32_t replica, TreePosition end) const noexcept;
    [[nodiscard]] TierFlight* find_store(SequenceHandle handle,
                                         const Transfers& transfers) noexcept;
    [[nodiscard]] std::int32_t depth_after(const TierFlight& flight) const noexcept;
    void finish_checkpoint(TierFlight& flight, bool done) noexcept;
    void land_checkpoint(Replica& home, TierFlight& flight, bool done) noexcept;
    void tell_below(const TierFlight& flight, std::int32_t first, std::int32_t end) const noexcept;
    void hand_back_place(TierFlight& flight, bool done) noexcept;
    void choose_load(const Replica& home, const FoundHit& hit, TreePosition below,
                     TierFlight& flight) const;
    void store_columns(const Path& path, const WindowRow& reader, Standing& standing,
                       Transfers& transfers);
    [[nodiscard]] std::uint8_t part_for(const Replica& home, BlockId column, BlockId record,
                                        const ReadFrom& read_from,
                                        std::int32_t index) const noexcept;
    [[nodiscard]] Choice choose_columns(const Standing& standing, const Path& path,
                                        const WindowRow& reader, std::int32_t end,
                                        TierFlight& flight) const;
    static void make_tier_room(Level& host, std::int64_t pages, std::int64_t records);
    static void take_records(Replica& home, const Choice& choice, TierFlight& flight);
    void give_out_records(Standing& standing, const Choice& choice, TierFlight flight,
                          TreeNode* node, Transfers& transfers);
    void give_record_back(Replica& home, BlockId record) const noexcept;
    void merge(Replica& home, BlockId record, const TierFlight& flight, std::int32_t column,
               bool has_ended) const noexcept;
    void complete_records(Replica& home, TierFlight& flight, bool has_ended) const noexcept;
    void publish_records(Replica& home, TierFlight& flight, bool has_ended) noexcept;
    [[nodiscard]] std::uint64_t window_parts(const Replica& home, TreePosition at,
                                             TreePosition below, std::int32_t column,
                                             std::int32_t end) const noexcept;
    [[nodiscard]] std::size_t count_fitting(const Replica& home, std::int32_t stored,
                                            const ColumnParts* items, std::size_t n) const noexcept;
    void choose_fill(const Replica& home, TreePosition below, std::int32_t end,
                     const ColumnParts* items, const PageKey* keys, std::size_t n,
                     StoreFill& fill) const;
    void take_for_fill(Replica& home, StoreFill& fill, StoreMoves& out);
    static void take_fill_records(Replica& home, StoreFill& fill);
    void fill_record(Replica& home, BlockId record, std::uint64_t parts, StoreMoves& out) const;
    void give_back_fill(Replica& home, StoreFill& fill, std::size_t arrived) noexcept;
    void land_fill(Replica& home, StoreFill& fill, std::size_t arrived, bool forward) noexcept;
    void keep_keys(Replica& home, const StoreFill& fill, std::size_t arrived) const noexcept;
    [[nodiscard]] ColumnPages::Departure departure(const TierFlight& flight, std::int32_t column,
                                                   std::size_t window,
                                                   bool has_ended) const noexcept;
    void leave_for_hit(Replica& home, const TierFlight& flight, std::int32_t column,
                       std::size_t window) const noexcept;
    void give_out_column(TierFlight& flight, BlockId column, BlockId record,
                         Transfers& transfers) const noexcept;
    static void count_column(const Replica& home, BlockId column, BlockId record,
                             ColumnCounts& counts) noexcept;
    void leave_records(const TierFlight& flight) const noexcept;
    void finish_column_load(const TierFlight& flight, const Sequence* arrived) const noexcept;
    void keep_end(Replica& home, const PrefixRef& place) const noexcept;
    void check_records(std::int32_t replica) const;
    void check_sequence(const Sequence& sequence, const Standing& standing) const;
    void check_tier(std::int32_t replica) const;
    void check_states(std::int32_t replica) const;

    // If the pages did not arrive, the request begins its claim again: its pages may hold any
    // bytes.
    template <class BeginAgain>
    void finish_load(TierFlight& flight, bool done, const BeginAgain& begin_again) noexcept {
        Replica& home = home_of(flight.replica);
        Sequence* sequence = sequences_.find(flight.sequence);
        leave_records(flight);
        if (done && tells_hits_ && flight.source.node() != nullptr) {
            home.host->tree.use(flight.source.at());
        }
        const std::int32_t columns = std::max(0, flight.source.depth() - flight.first);
        flight.source.end_use();
        if (done) {
            home.metrics.loaded_pages += flight.num_pages;
            home.metrics.loaded_tokens += std::int64_t{columns} * page_size_;
            home.count_loaded(flight.copied);
            if (flight.stored_state) home.host->states->count_hit();
        }
        flight.stored_state.end_use();
        if (sequence != nullptr) {
            --sequence->num_pending;
            if (!done) begin_again(*sequence, flight.sequence);
        }
        finish_column_load(flight, done ? sequence : nullptr);
        home.pool.free(flight.device_pages.data(),
                       static_cast<std::int64_t>(flight.device_pages.size()));
    }

    friend struct CacheManagerProbe;  // in tests, to compare whole states

    std::int32_t page_size_;
    const Grouping& grouping_;
    const std::vector<std::unique_ptr<Replica>>& replicas_;
    Tickets& tickets_;
    SequenceTable& sequences_;
    const WindowRows& windows_;
    StoreQueue& queue_;
    StoreRules rules_;
    bool tells_hits_;  // the tier's policy uses hits
    std::vector<TierFlight> flights_;
    std::vector<StoreFill> fills_;
    std::vector<Standing> standings_;
    std::vector<std::vector<bool>> storing_;  // by replica and page: a store is in flight
    std::vector<DuplicatePage> duplicates_;   // scratch
    std::vector<DuplicatePage> found_;        // scratch, for a part
    std::uint32_t last_number_ = 0;
};

// Calls publish(last, retention) for each part of the pages after `first`; `last` is the end of the
// part.
template <class Publish>
void TierFlights::for_each_part(const TierFlight& flight, std::int32_t first, std::int32_t end,
                                const Publish& publish) {
    if (flight.parts.empty()) return publish(end, Retention());
    for (const TierFlight::Part& part : flight.parts) {
        if (part.end <= first) continue;
        publish(std::min(part.end, end), part.retention);
        if (part.end >= end) return;
    }
}

}  // namespace kvcore
