// SPDX-License-Identifier: Apache-2.0
// With groups of layers: what is stored of a sequence's columns. A record of the tier is a column
// of its own ColumnPages, which says what it has of each bundle.
#include <algorithm>
#include <array>
#include <new>
#include <utility>

#include "kvcore/errors.hpp"
#include "level/quotas.hpp"
#include "support/make_room.hpp"
#include "transfer/tier_flights.hpp"

namespace kvcore {
namespace {

constexpr std::uint8_t kFullLanes{1U << Grouping::kMaxWindows};

std::int64_t count_pages(const Grouping& grouping, std::uint8_t part) noexcept {
    const std::int64_t full = (part & kFullLanes) != 0 ? grouping.num_full_lanes() : 0;
    return full + tiered::count_pages(grouping, part);
}

}  // namespace

struct TierFlights::Choice {
    std::vector<std::uint8_t> parts;  // of each column from `first` on
    std::int32_t first = 0;
    std::int32_t examined = 0;  // columns that were looked at
    std::int64_t num_pages = 0;
    std::int64_t num_records = 0;

    [[nodiscard]] std::int32_t end() const noexcept {
        return first + static_cast<std::int32_t>(parts.size());
    }
    void trim() {
        while (!parts.empty() && parts.back() == 0) parts.pop_back();
        const auto chosen =
            std::find_if(parts.begin(), parts.end(), [](std::uint8_t part) { return part != 0; });
        first += static_cast<std::int32_t>(chosen - parts.begin());
        parts.erase(parts.begin(), chosen);
    }
};

// What a column has and its record lacks, where there is one: pages of windows that the row reads,
// or has just written.
std::uint8_t TierFlights::part_for(const Replica& home, BlockId column, BlockId record,
                                   const ReadFrom& read_from, std::int32_t index) const noexcept {
    std::uint8_t part = record < 0 ? kFullLanes : std::uint8_t{0};
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        const bool is_wanted =
            record < 0 || (index >= read_from[w] && !home.host_columns->has(record, w));
        if (is_wanted && home.columns->has(column, w)) part |= static_cast<std::uint8_t>(1U << w);
    }
    return part;
}

// What records lack, and all that there is of columns behind them. Not what is on its way already,
// and no more than there is room for.
TierFlights::Choice TierFlights::choose_columns(const Standing& standing, const Path& path,
                                                const WindowRow& reader, std::int32_t end,
                                                TierFlight& flight) const {
    const Replica& home = home_of(path.replica);
    const std::int32_t stored = standing.place.depth();
    Choice choice;
    choice.first = stored;
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        flight.read_from[w] = reader.first[w];
        const std::int32_t unknown = std::max(standing.examined, reader.first[w]);
        choice.first = std::min(choice.first, unknown);
    }
    std::vector<BlockId>& columns = flight.device_pages;
    columns.resize(static_cast<std::size_t>(end - choice.first));
    home.tree.copy_pages({path.at.node, end}, choice.first, columns.data());
    std::vector<BlockId> records(columns.size(), -1);
    home.host->copy_pages({standing.place.node(), stored}, choice.first, records.data());
    choice.parts.reserve(columns.size());
    const std::vector<bool>& storing = storing_[static_cast<std::size_t>(path.replica)];
    std::int64_t room = home.host_columns->num_available();
    const std::int64_t most_records = home.host->num_available();
    for (std::int32_t c = choice.first; c < end; ++c) {
        const auto i = static_cast<std::size_t>(c - choice.first);
        const bool is_on_its_way = storing[static_cast<std::size_t>(columns[i])];
        if (is_on_its_way && flight.num_new > 0) break;
        const std::uint8_t part =
            is_on_its_way ? 0 : part_for(home, columns[i], records[i], flight.read_from, c);
        const std::int64_t pages = count_pages(grouping_, part);
        if (pages > room || (part != 0 && choice.num_records == most_records)) break;
        choice.parts.push_back(part);
        room -= pages;
        choice.num_pages += pages;
        choice.num_records += part != 0 ? 1 : 0;
        if (c >= stored) ++(is_on_its_way ? flight.ahead : flight.num_new);
    }
    choice.examined = choice.end();
    return choice;
}

// Columns of the tier that bring what is chosen: there is room. Throws IntegrityError where there
// is not; nothing was taken then.
void TierFlights::take_records(Replica& home, const Choice& choice, TierFlight& flight) {
    ColumnPages& records = *home.host_columns;
    records.make_room(choice.num_pages, choice.num_records, {});
    require_room(home, choice.num_pages, choice.num_records);
    for (std::size_t i = 0; i < choice.parts.size(); ++i) {
        BlockId& record = flight.host_pages[i];
        const std::uint8_t part = choice.parts[i];
        if (part == 0) continue;
        static_cast<void>(home.take_stored(1, &record));
        records.enter_all(record);
        if ((part & kFullLanes) != 0) records.fill_full(record);
        for (std::size_t w = 0; w < Grouping::kMaxWindows; ++w) {
            if (tiered::has_window(part, w)) records.fill(record, w);
        }
    }
}

// As without groups; a full tier costs next to nothing here too.
void TierFlights::store_columns(const Path& path, const WindowRow& reader, Standing& standing,
                                Transfers& transfers) {
    const Replica& home = home_of(path.replica);
    const std::int64_t room = home.host_columns->num_available();
    if (room == 0) return;
    if (!standing.place) find_place(standing, path);
    const std::int64_t most_new = room / std::max(1, grouping_.num_full_lanes());
    const auto most = static_cast<std::int32_t>(
        std::min<std::int64_t>(path.at.depth, standing.place.depth() + most_new));
    const std::int32_t end =
        rules_.end_of_due(home.tree, path.replica, {path.at.node, most}, standing.place.depth());
    if (end <= std::min(standing.place.depth(), standing.examined)) return;
    advance(standing, path, end);
    TierFlight flight;
    flight.prompt_end = reader.prompt_end;
    Choice choice = choose_columns(standing, path, reader, end, flight);
    const std::int32_t begin = choice.first;
    choice.trim();
    if (choice.parts.empty()) {
        standing.examined = choice.examined;
        return;
    }
    std::vector<BlockId>& columns = flight.device_pages;
    columns.erase(columns.begin(), columns.begin() + (choice.first - begin));
    columns.resize(choice.parts.size());
    flight.host_pages.assign(choice.parts.size(), -1);
    const TreePosition last{path.at.node, choice.end()};
    // A store holds all windows of its columns. Without room in the quotas, a later commit stores
    // them.
    if (home.owners != nullptr && !quotas::may_hold(home, last, choice.first)) return;
    const std::int32_t stored = standing.place.depth();
    if (last.depth > stored) {
        flight.tokens = home.tree.tokens_of(last, stored);
        find_parts(path, stored, last.depth, flight);
    }
    make_room(flights_, 1);
    make_room(transfers.tier_moves, static_cast<std::size_t>(choice.num_pages));
    flight.sequence = path.sequence;
    flight.replica = path.replica;
    give_out_records(standing, choice, std::move(flight), last.node, transfers);
}

// Nothing of it can fail once the records are taken.
void TierFlights::give_out_records(Standing& standing, const Choice& choice, TierFlight flight,
                                   TreeNode* node, Transfers& transfers) {
    Replica& home = home_of(flight.replica);
    take_records(home, choice, flight);
    standing.examined = choice.examined;
    flight.num_pages = choice.num_pages;
    flight.first = choice.first;
    flight.place = std::move(standing.place);
    flight.source =
        PathHold(home.pool, home.tree, node, choice.end(), home.columns.get(), home.states.get());
    for (const BlockId column : flight.device_pages) home.columns->enter_all(column);
    standing.storing = flight.number = free_number();
    give_out_store(std::move(flight), transfers);
}

// What is kept for the next turn, and what a request passed in the middle of its prompt, on both
// sides: a store may be the last reader of the pages that its sequence left meanwhile.
ColumnPages::Departure TierFlights::departure(const TierFlight& flight, std::int32_t column,
                                              std::size_t window, bool has_ended) const noexcept {
    const auto end = flight.first + static_cast<std::int32_t>(flight.host_pages.size());
    const std::int32_t reach = grouping_.windows()[window].reach;
    const bool is_at_prompts_end =
        column < flight.prompt_end && flight.prompt_end - column <= reach;
    const bool is_kept = is_at_prompts_end || (has_ended && end - column <= reach);
    return is_kept ? ColumnPages::Departure::kKept : ColumnPages::Departure::kPassed;
}

// A record takes over the pages that it lacks.
void TierFlights::merge(Replica& home, BlockId record, const TierFlight& flight,
                        std::int32_t column, bool has_ended) const noexcept {
    ColumnPages& records = *home.host_columns;
    const BlockId own = flight.host_pages[static_cast<std::size_t>(column - flight.first)];
    std::array<bool, Grouping::kMaxWindows> had{};
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) had[w] = records.has(record, w);
    records.enter_all(record);
    records.fill_holes({flight.place.node(), column + 1}, record, own);
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        records.leave(
            record, w,
            had[w] ? ColumnPages::Departure::kUnused : departure(flight, column, w, has_ended));
    }
    give_record_back(home, own);
}

void TierFlights::give_record_back(Replica& home, BlockId record) const noexcept {
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        home.host_columns->leave(record, w, ColumnPages::Departure::kUnused);
    }
    home.host->give_back(&record, 1);
}

// Records that are there, in front of the place: that keeps them there.
void TierFlights::complete_records(Replica& home, TierFlight& flight,
                                   bool has_ended) const noexcept {
    const auto size = static_cast<std::int32_t>(flight.host_pages.size());
    std::int32_t column = std::min(flight.place.depth(), flight.first + size);
    std::int32_t lowest = column;
    std::int32_t end = 0;
    home.host_columns->for_each_column(
        {flight.place.node(), column}, flight.first, [&](BlockId record) {
            BlockId& own = flight.host_pages[static_cast<std::size_t>(--column - flight.first)];
            if (own < 0) return;
            merge(home, record, flight, column, has_ended);
            own = -1;
            lowest = column;
            end = std::max(end, column + 1);
        });
    tell_below(flight, lowest, end);
}

// New ones, behind what earlier flights have brought: see `publish`.
void TierFlights::publish_records(Replica& home, TierFlight& flight, bool has_ended) noexcept {
    const std::size_t begin = flight.host_pages.size() - static_cast<std::size_t>(flight.num_new);
    const TokenId* tokens = flight.tokens.data();
    std::int32_t published = 0;
    duplicates_.clear();
    try {
        make_room(duplicates_, static_cast<std::size_t>(flight.num_new));
        home.host_columns->make_room_to_cache(flight.num_new, home.num_sequences);
        const std::int32_t joint = flight.place.depth() + flight.ahead;
        flight.place.advance(tokens, std::int64_t{flight.ahead} * page_size_);
        if (flight.place.depth() != joint) return;
        tokens += std::int64_t{flight.ahead} * page_size_;
        const auto publish = [&](std::int32_t last, const Retention& retention) {
            flight.place.publish(tokens + std::int64_t{published} * page_size_,
                                 flight.host_pages.data() + begin + published,
                                 last - joint - published, &found_, retention);
            for (const DuplicatePage& each : found_) {
                duplicates_.push_back({each.index + published, each.cached});
            }
            published = last - joint;
        };
        for_each_part(flight, joint, joint + flight.num_new, publish);
    } catch (const std::bad_alloc&) {
        if (published == 0) return flight.place.reset();
    }
    ColumnPages& records = *home.host_columns;
    records.leave_from({flight.place.node(), flight.place.depth()});
    auto duplicate = duplicates_.begin();
    const std::size_t end = begin + static_cast<std::size_t>(published);
    for (std::size_t i = begin; i < end; ++i) {
        const std::int32_t column = flight.first + static_cast<std::int32_t>(i);
        BlockId& own = flight.host_pages[i];
        const bool was_there = duplicate != duplicates_.end() &&
                               begin + static_cast<std::size_t>(duplicate->index) == i;
        if (was_there) {
            merge(home, duplicate++->cached, flight, column, has_ended);
        } else {
            records.cache(own);
            for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
                records.leave(own, w, departure(flight, column, w, has_ended));
            }
        }
        own = -1;
    }
    tell_below(flight, flight.place.depth() - flight.num_new, flight.place.depth());
}

// Where hits end at checkpoints, what is left is kept for the first one that reads it.
void TierFlights::leave_for_hit(Replica& home, const TierFlight& flight, std::int32_t column,
                                std::size_t window) const noexcept {
    const TreePosition end{flight.source.node(), flight.source.depth()};
    if (end.node == nullptr) return;
    const std::int32_t hit = home.columns->first_hit(end, column, window);
    home.columns->leave_from({end.node, hit > 0 ? hit : end.depth});
}

void TierFlights::finish_column_store(TierFlight& flight, bool done) noexcept {
    Replica& home = home_of(flight.replica);
    const bool has_ended = owner_of(flight) == nullptr;
    std::vector<bool>& storing = storing_[static_cast<std::size_t>(flight.replica)];
    home.columns->begin_leaving();
    home.columns->leave_from({flight.source.node(), flight.source.depth()});
    for (std::size_t i = 0; i < flight.device_pages.size(); ++i) {
        const BlockId column = flight.device_pages[i];
        const std::int32_t index = flight.first + static_cast<std::int32_t>(i);
        if (flight.host_pages[i] >= 0) storing[static_cast<std::size_t>(column)] = false;
        for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
            if (home.columns->needs_checkpoints()) leave_for_hit(home, flight, index, w);
            home.columns->leave(column, w,
                                index < flight.read_from[w] || flight.is_spill()
                                    ? ColumnPages::Departure::kUnused
                                    : departure(flight, index, w, has_ended));
        }
    }
    flight.source.end(false);
    if (done) {
        home.metrics.stored_pages += flight.num_pages;
        home.columns->count_stored(flight.copied);
    }
    if (done && flight.is_wanted) {
        home.host_columns->begin_leaving();
        home.host_columns->leave_from({flight.place.node(), flight.place.depth()});
        complete_records(home, flight, has_ended);
        if (flight.num_new > 0) publish_records(home, flight, has_ended);
    }
    for (const BlockId record : flight.host_pages) {
        if (record >= 0) give_record_back(home, record);
    }
    hand_back_place(flight, done);
}

}  // namespace kvcore
