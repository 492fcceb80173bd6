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
#include "level/hit.hpp"
#include "level/page_hold.hpp"
#include "level/page_holds.hpp"
#include "level/replica.hpp"
#include "level/store_place.hpp"
#include "level/window_hold.hpp"
#include "request/sequence_table.hpp"
#include "request/window_rows.hpp"
#include "store/store_queue.hpp"
#include "transfer/store_rules.hpp"
#include "transfer/tickets.hpp"
#include "transfer/tier_flight.hpp"

namespace kvcore {

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
                SequenceTable& sequences, const WindowRows& windows, PageHolds& holds,
                StoreQueue& queue);

    [[nodiscard]] const std::vector<TierFlight>& all() const noexcept { return flights_; }
    [[nodiscard]] const StoreRules& rules() const noexcept { return rules_; }

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
                  Transfers& transfers);
    /// Gives out what the sequence committed and the tier does not have: as much as there is room
    /// for, while nothing of it is on its way. With groups, also pages of windows that the sequence
    /// has and their records lack. Throws std::bad_alloc; nothing was given out then.
    void owe_stores(SequenceHandle handle, const Sequence& sequence, Transfers& transfers);
    /// Gives out the state in a sequence's slot, which is that at the end of what it committed, as
    /// a checkpoint of the tier. Behind `owe_stores` of the same call, where that is not up to
    /// rules: then it gives out those tokens too. Not where the tier will not have them, has that
    /// checkpoint, or has no slot. Throws std::bad_alloc; no state was given out then.
    void owe_checkpoint(SequenceHandle handle, Sequence& sequence, ColumnStates::Slot slot,
                        Transfers& transfers);

    /// Columns `first` .. `end` - 1 of a sequence were put into the tree, which had these of them.
    void note_commit(const Sequence& sequence, std::int32_t first, std::int32_t end,
                     const std::vector<DuplicatePage>& duplicates) noexcept;
    /// So that `note_hit` cannot fail. Throws std::bad_alloc.
    void expect_hit(SequenceHandle handle);
    /// A sequence took over columns from `first` on.
    void note_hit(SequenceHandle handle, const Sequence& sequence, std::int32_t first) noexcept;
    /// What a sequence has may be due since a hit.
    [[nodiscard]] bool is_due(SequenceHandle handle) const noexcept {
        const Standing* standing = find(handle);
        return standing != nullptr && standing->is_due;
    }

    /// With write-back, before a replica evicts so many pages, or columns: gives out stores of what
    /// goes next and was not offered to the tier yet, and makes free what was. True where it gave
    /// out some: then the call is to be made again when they are over. What cannot be stored goes
    /// all the same. O(pages evicted), and the prefix of each run that is offered.
    [[nodiscard]] bool spill(std::int32_t replica, PageNeed need, EvictionGuard guard,
                             Transfers& transfers);
    /// Such stores of a replica are under way, and so many pages more can be had once they are
    /// over. O(flights).
    [[nodiscard]] bool holds_back(std::int32_t replica, std::int64_t pages) const noexcept;

    /// Those of a ticket have landed, or failed: `begin_again(sequence, handle)` gets each whose
    /// pages did not arrive. False where there are none.
    template <class BeginAgain>
    bool finish(std::uint64_t ticket, bool done, const BeginAgain& begin_again) noexcept {
        bool is_known = false;
        if (grouping_.is_plain()) let_go_of_spills(ticket);
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

    [[nodiscard]] const std::vector<StoreFill>& fills() const noexcept { return fills_; }
    /// What stores have to bring so that a hit could take the first `end` columns of a prompt:
    /// parts that neither the device nor the tier has, by rising columns; new columns of the tier
    /// with all that they are to have. Throws std::bad_alloc.
    [[nodiscard]] std::vector<ColumnParts> needed_below(std::int32_t replica,
                                                        std::string_view name_space,
                                                        const TokenId* tokens,
                                                        std::int32_t end) const;
    /// Gives out pages of the tier for these, of a hit of `end` columns: as many, from the first
    /// on, as there is room for, and as still make whole prefixes. None: `out` has no ticket. Until
    /// it is finished, windows that such a hit reads stay in the tier. Throws std::bad_alloc, and
    /// has changed nothing.
    void begin_fill(std::int32_t replica, std::string_view name_space, const TokenId* tokens,
                    std::int32_t end, const ColumnParts* items, const PageKey* keys, std::size_t n,
                    StoreMoves& out);
    /// The first `arrived` columns of a ticket are there and can be found from now on; the pages of
    /// others are given back. `forward`: they wait to be written to stores too. False where there
    /// is no such ticket.
    [[nodiscard]] bool finish_fill(std::uint64_t ticket, std::int64_t arrived,
                                   bool forward) noexcept;

    /// A sequence's place once its committed part is cut; nothing where that is no change. Throws
    /// std::bad_alloc.
    [[nodiscard]] StorePlace find_cut(SequenceHandle handle, std::int32_t replica,
                                      std::int32_t columns) const;
    /// It is cut to so many columns; its pages on their way arrive without it.
    void move_back(SequenceHandle handle, std::int32_t columns, StorePlace cut) noexcept;
    /// A sequence goes, or begins again.
    void forget(SequenceHandle handle) noexcept;

    /// What is stored of forgotten pages of a replica, or behind forgotten ones of its tier, is not
    /// wanted any more, and nobody has a place there. Pages that are loaded from such are no
    /// better.
    void drop_forgotten(std::int32_t replica) noexcept;
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
        bool is_due = false;        // see `is_due`
    };
    /// A cached prefix to be stored, of a sequence or on its way out.
    struct Path {
        std::int32_t replica = 0;
        TreePosition at;
        SequenceHandle sequence;
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
    [[nodiscard]] static Path path_of(SequenceHandle handle, const Sequence& sequence) noexcept {
        return {sequence.replica, {sequence.pages.node(), sequence.pages.committed()}, handle};
    }
    /// The standing that a store's place goes back to; none where it is not wanted any more.
    [[nodiscard]] Standing* owner_of(const TierFlight& flight) noexcept {
        Standing* standing = flight.is_spill() ? nullptr : find(flight.sequence);
        return standing != nullptr && standing->storing == flight.number ? standing : nullptr;
    }
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
    void give_out_store(TierFlight flight, Transfers& transfers) noexcept;
    [[nodiscard]] std::uint32_t free_number() noexcept;
    void finish_store(TierFlight& flight, bool done) noexcept;
    void publish(TierFlight& flight) const noexcept;
    [[nodiscard]] bool is_storing_state(std::int32_t replica, TreePosition end) const noexcept;
    [[nodiscard]] TierFlight* find_store(SequenceHandle handle,
                                         const Transfers& transfers) noexcept;
    [[nodiscard]] std::int32_t depth_after(const TierFlight& flight) const noexcept;
    void finish_checkpoint(TierFlight& flight, bool done) noexcept;
    void land_checkpoint(Replica& home, TierFlight& flight, bool done) noexcept;
    void tell_below(const TierFlight& flight, std::int32_t first, std::int32_t end) const noexcept;
    void hand_back_place(TierFlight& flight, bool done) noexcept;
    void choose_load(const Replica& home, const TieredHit& hit, TierFlight& flight) const;
    void choose_column_load(const Replica& home, const TieredHit& hit, TierFlight& flight) const;
    void store_columns(const Path& path, const WindowRow& reader, Standing& standing,
                       Transfers& transfers);
    [[nodiscard]] std::uint8_t part_for(const Replica& home, BlockId column, BlockId record,
                                        const ReadFrom& read_from,
                                        std::int32_t index) const noexcept;
    [[nodiscard]] Choice choose_columns(const Standing& standing, const Path& path,
                                        const WindowRow& reader, std::int32_t end,
                                        TierFlight& flight) const;
    static void require_room(const Replica& home, std::int64_t pages, std::int64_t records);
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
    void finish_column_store(TierFlight& flight, bool done) noexcept;
    [[nodiscard]] ColumnPages::Departure departure(const TierFlight& flight, std::int32_t column,
                                                   std::size_t window,
                                                   bool has_ended) const noexcept;
    void leave_for_hit(Replica& home, const TierFlight& flight, std::int32_t column,
                       std::size_t window) const noexcept;
    void owe_column_load(TierFlight& load, Sequence& sequence, Transfers& transfers);
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
        if (done && tells_hits_) home.host->use(flight.source.node(), flight.source.depth());
        const std::int32_t columns = std::max(0, flight.source.depth() - flight.first);
        flight.source.end(true);
        if (done) {
            home.metrics.loaded_pages += flight.num_pages;
            home.metrics.loaded_tokens += std::int64_t{columns} * page_size_;
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
    PageHolds& holds_;
    StoreQueue& queue_;
    StoreRules rules_;
    bool tells_hits_;  // to the tier's policy
    std::vector<TierFlight> flights_;
    std::vector<StoreFill> fills_;
    std::vector<Standing> standings_;
    std::vector<std::vector<bool>> storing_;  // of each replica, for each page: it is on its way
    std::vector<DuplicatePage> duplicates_;   // scratch
    std::vector<DuplicatePage> found_;        // the same, of a part
    std::uint32_t last_number_ = 0;
};

// Calls publish(last, retention) for each part of what is behind `first`, of which `last` is the
// end.
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
