// SPDX-License-Identifier: Apache-2.0
// With groups of layers: what is loaded for a sequence, and what both directions have in common.
#include <algorithm>
#include <array>
#include <utility>

#include "support/make_room.hpp"
#include "transfer/tier_flights.hpp"

namespace kvcore {

// The columns behind the tree's part of the hit are the request's own. What those of the tree miss
// cannot lie in them before it has arrived, for others would read it: patches bring it.
void TierFlights::choose_column_load(const Replica& home, const TieredHit& hit,
                                     TierFlight& flight) const {
    const auto end = static_cast<std::int32_t>(hit.tokens / page_size_);
    std::int32_t lowest = std::min(hit.at.depth, hit.below.depth);
    tiered::for_each_patch(home, hit.at, hit.tokens, [&](const Patch& patch) {
        flight.patches.push_back(patch);
        flight.num_pages += tiered::count_pages(grouping_, patch.windows);
        lowest = std::min(lowest, patch.index);
    });
    const std::int32_t num_own = end - hit.at.depth;
    flight.num_pages += std::int64_t{num_own} * grouping_.num_full_lanes();
    for (const Grouping::Window& window : grouping_.windows()) {
        const std::int32_t first = grouping_.first_column(window, hit.tokens);
        flight.num_pages +=
            std::int64_t{window.num_lanes} * std::max(0, end - std::max(first, hit.at.depth));
    }
    flight.host_pages.resize(static_cast<std::size_t>(hit.below.depth - lowest));
    home.host->copy_pages(hit.below, lowest, flight.host_pages.data());
    flight.device_pages.reserve(static_cast<std::size_t>(num_own) + flight.patches.size());
}

void TierFlights::owe_column_load(TierFlight& load, Sequence& sequence, Transfers& transfers) {
    Replica& home = home_of(load.replica);
    for (const BlockId record : load.host_pages) home.host_columns->enter_all(record);
    const std::int32_t end = load.source.depth();
    const auto record_of = [&](std::int32_t column) {
        return load.host_pages[load.host_pages.size() - static_cast<std::size_t>(end - column)];
    };
    for (std::int32_t c = load.first; c < end; ++c) {
        const BlockId column = sequence.pages[c];
        home.pool.share(&column, 1);
        home.columns->enter_all(column);
        load.device_pages.push_back(column);
        give_out_column(load, column, record_of(c), transfers);
    }
    for (Patch& patch : load.patches) {
        home.require_pages(1);
        home.take_pages(1, &patch.bringer);
        home.columns->enter_all(patch.bringer);
        for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
            if (patch.has(w)) home.columns->fill(patch.bringer, w);
        }
        load.device_pages.push_back(patch.bringer);
        give_out_column(load, patch.bringer, record_of(patch.index), transfers);
    }
    home.note_peak();
    flights_.push_back(std::move(load));
}

// The pages that both sides have.
void TierFlights::give_out_column(TierFlight& flight, BlockId column, BlockId record,
                                  Transfers& transfers) const noexcept {
    const Replica& home = home_of(flight.replica);
    count_column(home, column, record, flight.copied);
    const Tier from = flight.is_load ? Tier::kHost : Tier::kDevice;
    const Tier to = flight.is_load ? Tier::kDevice : Tier::kHost;
    for (const Grouping::Bundle& bundle : grouping_.bundles()) {
        const std::int32_t tokens = page_size_ / bundle.pages_per_column;
        for (std::int32_t i = 0; i < bundle.pages_per_column; ++i) {
            const BlockId here = home.columns->page(column, bundle.first_lane + i);
            const BlockId below = home.host_columns->page(record, bundle.first_lane + i);
            if (here == ColumnPages::kNoPage || below == ColumnPages::kNoPage) continue;
            transfers.tier_moves.push_back({flight.replica, flight.is_load ? below : here,
                                            flight.is_load ? here : below, tokens, flight.sequence,
                                            from, to});
        }
    }
}

void TierFlights::count_column(const Replica& home, BlockId column, BlockId record,
                               ColumnCounts& counts) noexcept {
    for (std::size_t w = 0; w < home.columns->grouping().windows().size(); ++w) {
        if (home.columns->has(column, w) && home.host_columns->has(record, w)) ++counts.of[w];
    }
    if (home.columns->has_full_pages(column) && home.host_columns->has_full_pages(record)) {
        ++counts.of[ColumnCounts::kFull];
    }
}

// Which is a use of them.
void TierFlights::leave_records(const TierFlight& flight) const noexcept {
    ColumnPages& records = *home_of(flight.replica).host_columns;
    records.begin_leaving();
    records.leave_from({flight.source.node(), flight.source.depth()});
    for (const BlockId record : flight.host_pages) {
        for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
            records.leave(record, w, ColumnPages::Departure::kKept);
        }
    }
}

// `arrived`: its sequence, unless that is gone or the copies failed. Who holds pages that were
// brought holds them where they are needed.
void TierFlights::finish_column_load(const TierFlight& flight,
                                     const Sequence* arrived) const noexcept {
    Replica& home = home_of(flight.replica);
    ColumnPages& columns = *home.columns;
    for (const Patch& patch : flight.patches) {
        if (arrived == nullptr) continue;
        const PageRow& row = arrived->pages;
        const TreePosition end{row.node(), patch.index + 1};
        columns.fill_holes(end, row[patch.index], patch.bringer);
        if (home.pool.ref_count(patch.bringer) == 1) continue;
        // A hold on a column holds all its windows, so idle windows are evicted: else quotas could
        // be broken.
        if (home.owners != nullptr) columns.give_up_idle(row[patch.index]);
        const bool is_own = row.is_own(patch.index);
        holds_.follow(home, patch.bringer, row[patch.index], is_own ? TreePosition{} : end);
    }
    for (const BlockId column : flight.device_pages) columns.leave_all(column, {});
}

bool TierFlights::brings(const Sequence& sequence, std::int32_t column,
                         std::size_t window) const noexcept {
    return std::any_of(flights_.begin(), flights_.end(), [&](const TierFlight& flight) {
        return sequences_.find(flight.sequence) == &sequence &&
               std::any_of(flight.patches.begin(), flight.patches.end(), [&](const Patch& patch) {
                   return patch.index == column && patch.has(window);
               });
    });
}

// A sequence goes that has stored so much: its next turn comes back to the end. In the order in
// which they may go, from the first on.
void TierFlights::keep_end(Replica& home, const StorePlace& place) const noexcept {
    std::array<BlockId, 64> records;
    const std::int32_t depth = place.depth();
    home.host_columns->begin_leaving();
    home.host_columns->leave_from({place.node(), depth});
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        std::int32_t c = std::max(0, depth - grouping_.windows()[w].reach);
        while (c < depth) {
            const auto n = std::min(depth - c, static_cast<std::int32_t>(records.size()));
            home.host->copy_pages({place.node(), c + n}, c, records.data());
            for (std::int32_t i = 0; i < n; ++i) {
                home.host_columns->keep(records[static_cast<std::size_t>(i)], w);
            }
            c += n;
        }
    }
}

// Every flight, and whoever writes them to a store, reads all windows of its records.
void TierFlights::check_records(std::int32_t replica) const {
    const Replica& home = home_of(replica);
    const std::size_t windows = grouping_.windows().size();
    std::vector<std::uint32_t> readers(static_cast<std::size_t>(home.host->num_pages()) *
                                       std::max<std::size_t>(1, windows));
    const auto add = [&](BlockId record) {
        for (std::size_t w = 0; record >= 0 && w < windows; ++w) {
            ++readers[static_cast<std::size_t>(record) * windows + w];
        }
    };
    const auto add_all = [&](const TierFlight& flight) {
        if (flight.replica != replica) return;
        std::for_each(flight.host_pages.begin(), flight.host_pages.end(), add);
    };
    std::for_each(flights_.begin(), flights_.end(), add_all);
    for (const StoreFill& fill : fills_) add_all(fill.flight);
    queue_.for_each_taken(replica, add);
    home.host_columns->check_integrity(readers);
}

}  // namespace kvcore
