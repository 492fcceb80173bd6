// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "manager/page_hold.hpp"
#include "manager/replica.hpp"
#include "manager/sequence_table.hpp"
#include "manager/store_place.hpp"
#include "manager/tickets.hpp"
#include "manager/tiered_hit.hpp"
#include "manager/window_rows.hpp"

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

    /// Its sequence may not run before it is over.
    [[nodiscard]] bool holds_up() const noexcept { return is_load || state; }
};

/// All that is on its way to or from the host tiers, and how far each sequence's prefix is there.
/// The bytes are moved by the caller, while the mutex is free; until it says that they are, nothing
/// of them is found.
///
/// Owns: the flights with a hold on every page that they read or write, and for each sequence a
/// place in its tier, or the number of the flight that has it.
/// Invariant: a page is stored by one flight at a time. A sequence's `num_pending` counts flights
/// here that hold it up, and its copies. Its place is on the prefix that it committed.
/// Threads: none of its own; CacheManager locks around it.
/// Cost: O(pages moved) and O(flights) to finish; where the tier is full, `owe_stores` costs next
/// to nothing.
class TierFlights {
   public:
    TierFlights(const CacheConfig& config, const Grouping& grouping,
                const std::vector<std::unique_ptr<Replica>>& replicas, Tickets& tickets,
                SequenceTable& sequences, const WindowRows& windows);

    [[nodiscard]] const std::vector<TierFlight>& all() const noexcept { return flights_; }

    /// A load of what a hit has in the tier alone; of its checkpoint too where the device has none.
    /// Throws std::bad_alloc, and has changed nothing.
    [[nodiscard]] std::unique_ptr<TierFlight> prepare_load(SequenceHandle handle,
                                                           std::int32_t replica,
                                                           const TieredHit& hit, bool has_state,
                                                           Transfers& transfers);
    /// Of several rows: each has made room for its own load alone.
    void make_room_for_loads(std::size_t loads, std::size_t pages, Transfers& transfers);
    /// Gives it out; a checkpoint goes into that slot. There is room.
    void owe_load(TierFlight& load, Sequence& sequence, ColumnStates::Slot slot,
                  Transfers& transfers) noexcept;
    /// Gives out what the sequence committed and the tier does not have: as much as there is room
    /// for, while nothing of it is on its way. With groups, also pages of windows that the sequence
    /// has and their records lack. Throws std::bad_alloc; nothing was given out then.
    void owe_stores(SequenceHandle handle, const Sequence& sequence, Transfers& transfers);
    /// Gives out the state in a sequence's slot, which is that at the end of what it committed, as
    /// a checkpoint of the tier. Behind `owe_stores` of the same call; not where the tier will not
    /// have those tokens, has that checkpoint, or has no slot. Throws std::bad_alloc; nothing was
    /// given out then.
    void owe_checkpoint(SequenceHandle handle, Sequence& sequence, ColumnStates::Slot slot,
                        Transfers& transfers);

    /// Those of a ticket have landed, or failed: `begin_again(sequence, handle)` gets each whose
    /// pages did not arrive. False where there are none.
    template <class BeginAgain>
    bool finish(std::uint64_t ticket, bool done, const BeginAgain& begin_again) noexcept {
        bool is_known = false;
        for (TierFlight& flight : flights_) {
            if (flight.ticket != ticket || ticket == 0) continue;
            is_known = true;
            if (flight.is_load) {
                finish_load(flight, done, begin_again);
            } else {
                finish_store(flight, done);
            }
            flight.ticket = 0;
        }
        const auto has_landed = [](const TierFlight& flight) { return flight.ticket == 0; };
        flights_.erase(std::remove_if(flights_.begin(), flights_.end(), has_landed),
                       flights_.end());
        return is_known;
    }
    [[nodiscard]] bool is_under_way(SequenceHandle handle) const noexcept;

    /// A sequence's place once its committed part is cut; nothing where that is no change. Throws
    /// std::bad_alloc.
    [[nodiscard]] StorePlace find_cut(SequenceHandle handle, std::int32_t replica,
                                      std::int32_t columns) const;
    /// It is cut to so many columns; its pages on their way arrive without it.
    void move_back(SequenceHandle handle, std::int32_t columns, StorePlace cut) noexcept;
    /// A sequence goes, or begins again.
    void forget(SequenceHandle handle) noexcept;

    /// Around what forgets all that nobody uses: see PageHold. What is stored for a sequence that
    /// is gone, or was cut, is not wanted any more: it would come back otherwise.
    void loosen() noexcept;
    void fasten() noexcept;

    /// Throws IntegrityError unless what each sequence and each tier knows of the flights is so.
    void check_integrity() const;
    /// A load brings pages of a window for a column that a sequence has from the tree.
    [[nodiscard]] bool brings(const Sequence& sequence, std::int32_t column,
                              std::size_t window) const noexcept;
    /// Calls visit(column) for each column of the device that flights of a replica read, or write.
    template <class Visit>
    void for_each_column(std::int32_t replica, const Visit& visit) const {
        for (const TierFlight& flight : flights_) {
            if (flight.replica != replica) continue;
            for (const BlockId column : flight.device_pages) visit(column);
        }
    }

   private:
    /// What is known of a sequence, by the index of its handle.
    struct Standing {
        StorePlace place;           // where its prefix in the tier ends; none: unknown
        std::uint32_t storing = 0;  // number of its flight there, which has the place; 0: none
        std::int32_t examined = 0;  // with groups: columns whose records were looked at
    };
    /// What is to be stored of columns: a bit for each window, and one for the full lanes.
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
    void find_place(Standing& standing, const Sequence& sequence) const;
    void advance(Standing& standing, const Sequence& sequence, std::int32_t end) const;
    void choose_stores(const Standing& standing, const Sequence& sequence, std::int32_t end,
                       TierFlight& flight) const;
    void give_out_store(TierFlight flight, Transfers& transfers) noexcept;
    [[nodiscard]] std::uint32_t free_number() noexcept;
    void finish_store(TierFlight& flight, bool done) noexcept;
    [[nodiscard]] bool publish(TierFlight& flight) const noexcept;
    [[nodiscard]] bool is_storing_state(std::int32_t replica, TreePosition end) const noexcept;
    [[nodiscard]] TierFlight* find_store(SequenceHandle handle,
                                         const Transfers& transfers) noexcept;
    [[nodiscard]] std::int32_t depth_after(const TierFlight& flight) const noexcept;
    void finish_checkpoint(TierFlight& flight, bool done) noexcept;
    void hand_back_place(TierFlight& flight, bool done) noexcept;
    void choose_load(const Replica& home, const TieredHit& hit, TierFlight& flight) const;
    void choose_column_load(const Replica& home, const TieredHit& hit, TierFlight& flight) const;
    void owe_column_stores(SequenceHandle handle, const Sequence& sequence, Transfers& transfers);
    [[nodiscard]] std::uint8_t part_for(const Replica& home, BlockId column, BlockId record,
                                        const ReadFrom& read_from,
                                        std::int32_t index) const noexcept;
    [[nodiscard]] Choice choose_columns(const Standing& standing, const Sequence& sequence,
                                        const WindowRow& reader, std::int32_t end,
                                        TierFlight& flight) const;
    static void take_records(Replica& home, const Choice& choice, TierFlight& flight) noexcept;
    void give_out_records(Standing& standing, const Choice& choice, TierFlight flight,
                          TreeNode* node, Transfers& transfers) noexcept;
    void give_record_back(Replica& home, BlockId record) const noexcept;
    void merge(Replica& home, BlockId record, const TierFlight& flight, std::int32_t column,
               bool has_ended) const noexcept;
    void complete_records(Replica& home, TierFlight& flight, bool has_ended) const noexcept;
    void publish_records(Replica& home, TierFlight& flight, bool has_ended) noexcept;
    void finish_column_store(TierFlight& flight, bool done) noexcept;
    [[nodiscard]] ColumnPages::Departure departure(const TierFlight& flight, std::int32_t column,
                                                   std::size_t window,
                                                   bool has_ended) const noexcept;
    void owe_column_load(TierFlight& load, Sequence& sequence, Transfers& transfers) noexcept;
    void give_out_column(TierFlight& flight, BlockId column, BlockId record,
                         Transfers& transfers) const noexcept;
    static void count_column(const Replica& home, BlockId column, BlockId record,
                             ColumnCounts& counts) noexcept;
    void leave_records(const TierFlight& flight) const noexcept;
    void finish_column_load(const TierFlight& flight, const Sequence* arrived) const noexcept;
    void keep_end(Replica& home, const StorePlace& place) const noexcept;
    void check_records(std::int32_t replica) const;
    void check_sequence(const Sequence& sequence, const Standing& standing) const;
    void check_tier(std::int32_t replica) const;
    void check_states(std::int32_t replica) const;

    // A request whose pages did not arrive is where a claim begins: what it holds may be anything.
    template <class BeginAgain>
    void finish_load(TierFlight& flight, bool done, const BeginAgain& begin_again) noexcept {
        Replica& home = home_of(flight.replica);
        Sequence* sequence = sequences_.find(flight.sequence);
        if (home.columns != nullptr) leave_records(flight);
        flight.source.end(true);
        if (done) {
            home.metrics.loaded_pages += flight.num_pages;
            if (home.columns != nullptr) home.columns->count_loaded(flight.copied);
            if (flight.stored_state) home.host_states->count_hit();
        }
        flight.stored_state.end_use();
        if (sequence != nullptr) {
            --sequence->num_pending;
            if (!done) begin_again(*sequence, flight.sequence);
        }
        if (home.columns != nullptr) finish_column_load(flight, done ? sequence : nullptr);
        home.pool.free(flight.device_pages.data(),
                       static_cast<std::int64_t>(flight.device_pages.size()));
    }

    friend struct CacheManagerProbe;  // of tests, which compare whole states

    std::int32_t page_size_;
    const Grouping& grouping_;
    const std::vector<std::unique_ptr<Replica>>& replicas_;
    Tickets& tickets_;
    SequenceTable& sequences_;
    const WindowRows& windows_;
    std::vector<TierFlight> flights_;
    std::vector<Standing> standings_;
    std::vector<std::vector<bool>> storing_;  // of each replica, for each page: it is on its way
    std::vector<DuplicatePage> duplicates_;   // scratch
    std::uint32_t last_number_ = 0;
};

}  // namespace kvcore
