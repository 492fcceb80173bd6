// SPDX-License-Identifier: Apache-2.0
// What stores below bring into the host tier: pages of it that nobody finds before their bytes are
// there. It is nobody's: a request whose prompt it continues finds it as it finds what it stored.
#include <algorithm>
#include <new>
#include <utility>

#include "kvcore/errors.hpp"
#include "support/make_room.hpp"
#include "transfer/tier_flights.hpp"

namespace kvcore {
namespace {

constexpr std::uint64_t kState = std::uint64_t{1} << kStatePart;

std::uint64_t lanes(std::int32_t first, std::int32_t n) noexcept {
    return ((std::uint64_t{1} << n) - 1) << first;
}

std::uint64_t full_lanes(const Grouping& grouping) noexcept {
    if (grouping.is_plain()) return 1;
    std::uint64_t parts = 0;
    for (const Grouping::Bundle& bundle : grouping.bundles()) {
        if (bundle.window < 0) parts |= lanes(bundle.first_lane, bundle.pages_per_column);
    }
    return parts;
}

std::uint64_t window_lanes(const Grouping::Window& window) noexcept {
    return lanes(window.first_lane, window.num_lanes);
}

// Of a window all lanes or none; a column of the tier has no others.
std::uint64_t whole_parts(const Grouping& grouping, std::uint64_t parts) noexcept {
    std::uint64_t whole = parts & (full_lanes(grouping) | kState);
    for (const Grouping::Window& window : grouping.windows()) {
        const std::uint64_t all = window_lanes(window);
        if ((parts & all) == all) whole |= all;
    }
    return whole;
}

std::int64_t count_bits(std::uint64_t parts) noexcept {
    std::int64_t n = 0;
    for (; parts != 0; parts &= parts - 1) ++n;
    return n;
}

TreePosition match_in(const PrefixTree& tree, std::string_view name_space, const TokenId* tokens,
                      std::int64_t n) noexcept {
    TreeNode* root = tree.find_namespace(name_space);
    return root == nullptr ? TreePosition{} : tree.match(root, tokens, n).at;
}

BlockId column_at(const PrefixTree& tree, TreePosition at, std::int32_t column) noexcept {
    return Replica::last_column(tree, PrefixTree::position(at.node, column + 1));
}

bool has_checkpoint(const ColumnStates* states, const PrefixTree& tree, TreePosition at,
                    std::int32_t end) noexcept {
    return states != nullptr && at.depth >= end && states->has(column_at(tree, at, end - 1));
}

}  // namespace

// Lanes of windows that a hit of `end` columns reads in a column, and that are nowhere.
std::uint64_t TierFlights::window_parts(const Replica& home, TreePosition at, TreePosition below,
                                        std::int32_t column, std::int32_t end) const noexcept {
    if (grouping_.is_plain()) return 0;
    const bool is_here = column < at.depth;
    const bool is_there = column < below.depth;
    const BlockId here = is_here ? column_at(home.tree, at, column) : 0;
    const BlockId there = is_there ? column_at(home.host->tree(), below, column) : 0;
    std::uint64_t parts = 0;
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        const Grouping::Window& window = grouping_.windows()[w];
        if (column < grouping_.first_column(window, std::int64_t{end} * page_size_)) continue;
        const bool is_had = (is_here && home.columns->has(here, w)) ||
                            (is_there && home.host_columns->has(there, w));
        if (!is_had) parts |= window_lanes(window);
    }
    return parts;
}

std::vector<ColumnParts> TierFlights::needed_below(std::int32_t replica,
                                                   std::string_view name_space,
                                                   const TokenId* tokens, std::int32_t end) const {
    if (end < 1) return {};
    const Replica& home = home_of(replica);
    const std::int64_t n = std::int64_t{end} * page_size_;
    const TreePosition at = match_in(home.tree, name_space, tokens, n);
    const TreePosition below = home.host->match(name_space, tokens, n);
    std::int32_t first = std::min(below.depth, end);
    for (const Grouping::Window& window : grouping_.windows()) {
        first = std::min(first, grouping_.first_column(window, n));
    }
    if (home.host_states != nullptr) first = std::min(first, end - 1);
    std::vector<ColumnParts> needed;
    for (std::int32_t c = first; c < end; ++c) {
        std::uint64_t parts = window_parts(home, at, below, c, end);
        if (c >= below.depth) parts |= full_lanes(grouping_);
        const bool lacks_state =
            c == end - 1 && home.host_states != nullptr &&
            !has_checkpoint(home.states.get(), home.tree, at, end) &&
            !has_checkpoint(home.host_states.get(), home.host->tree(), below, end);
        if (lacks_state) parts |= kState;
        if (parts != 0) needed.push_back({c, parts});
    }
    return needed;
}

// In front of what is stored any columns may be completed; behind it they have to go on from it,
// each with its full lanes. Where there are none, columns without pages may lie between them.
std::size_t TierFlights::count_fitting(const Replica& home, std::int32_t stored,
                                       const ColumnParts* items, std::size_t n) const noexcept {
    const std::uint64_t full = full_lanes(grouping_);
    std::int64_t records = home.host->num_available();
    std::int64_t pages =
        home.host_columns == nullptr ? records : home.host_columns->num_available();
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint64_t parts = items[i].parts & ~kState;
        const bool is_new = items[i].column >= stored;
        const bool has_gap = full != 0 && items[i].column > stored;
        if (is_new && (has_gap || (parts & full) != full)) return i;
        pages -= count_bits(parts);
        if (is_new) {
            records -= items[i].column + 1 - stored;
            stored = items[i].column + 1;
        } else {
            records -= parts != 0 ? 1 : 0;
        }
        if (pages < 0 || records < 0) return i;
    }
    return n;
}

// What has arrived since it was asked for is not read again, and there has to be room.
void TierFlights::choose_fill(const Replica& home, TreePosition below, std::int32_t end,
                              const ColumnParts* items, const PageKey* keys, std::size_t n,
                              StoreFill& fill) const {
    const PrefixTree& tree = home.host->tree();
    for (std::size_t i = 0; i < n; ++i) {
        ColumnParts item{items[i].column, whole_parts(grouping_, items[i].parts)};
        if (item.column < below.depth) {
            item.parts &= window_parts(home, {}, below, item.column, end) | kState;
        }
        const bool may_have_state = item.column == end - 1 && home.host_states != nullptr &&
                                    !has_checkpoint(home.host_states.get(), tree, below, end);
        if (!may_have_state) item.parts &= ~kState;
        if (item.parts == 0) continue;
        fill.items.push_back(item);
        fill.keys.push_back(keys[i]);
    }
    const std::size_t fitting =
        count_fitting(home, below.depth, fill.items.data(), fill.items.size());
    fill.items.resize(fitting);
    fill.keys.resize(fitting);
}

void TierFlights::begin_fill(std::int32_t replica, std::string_view name_space,
                             const TokenId* tokens, std::int32_t end, const ColumnParts* items,
                             const PageKey* keys, std::size_t n, StoreMoves& out) {
    Replica& home = home_of(replica);
    TierIndex& host = *home.host;
    TreePosition below = host.match(name_space, tokens, std::int64_t{end} * page_size_);
    StoreFill fill;
    TierFlight& flight = fill.flight;
    flight.replica = replica;
    flight.place = below.depth > 0 ? StorePlace(host, host.hold(below))
                                   : StorePlace(host, host.open(name_space));
    below.node = flight.place.node();
    if (home.host_columns != nullptr) {
        fill.windows =
            WindowHold(*home.host_columns, host.tree(), below, std::int64_t{end} * page_size_);
    }
    choose_fill(home, below, end, items, keys, n, fill);
    if (fill.items.empty()) return;
    const std::int32_t last = fill.items.back().column + 1;
    flight.first = std::min(fill.items.front().column, below.depth);
    flight.num_new = std::max(0, last - below.depth);
    flight.prompt_end = end;
    flight.host_pages.assign(static_cast<std::size_t>(last - flight.first), -1);
    flight.tokens.assign(tokens + std::int64_t{std::min(below.depth, last)} * page_size_,
                         tokens + std::int64_t{last} * page_size_);
    make_room(fills_, 1);
    const std::size_t size = fill.items.size();
    out.keys.reserve(size);
    out.ends.reserve(size);
    out.parts.reserve(size * (static_cast<std::size_t>(grouping_.pages_per_column()) + 1));
    take_for_fill(home, fill, out);
    fills_.push_back(std::move(fill));
}

// Nothing of it can fail once the records are taken.
void TierFlights::take_for_fill(Replica& home, StoreFill& fill, StoreMoves& out) {
    TierFlight& flight = fill.flight;
    take_fill_records(home, fill);
    flight.ticket = out.ticket = tickets_.next();
    out.replica = flight.replica;
    for (std::size_t i = 0; i < fill.items.size(); ++i) {
        const ColumnParts& item = fill.items[i];
        const BlockId record =
            flight.host_pages[static_cast<std::size_t>(item.column - flight.first)];
        if (record >= 0) fill_record(home, record, item.parts, out);
        if ((item.parts & kState) != 0 && home.host_states->num_available() > 0) {
            flight.stored_state = StateHold(*home.host_states, home.host_states->take());
            flight.state_depth = item.column + 1;
            out.parts.push_back({kStatePart, flight.stored_state.slot()});
        }
        out.keys.push_back(fill.keys[i]);
        out.ends.push_back(static_cast<std::int32_t>(out.parts.size()));
    }
}

// Throws IntegrityError unless the tier has so many pages and records, which are taken one by one
// afterwards.
void TierFlights::require_room(const Replica& home, std::int64_t pages, std::int64_t records) {
    const bool is_plain = home.host_columns == nullptr;
    const std::int64_t free_pages = is_plain ? pages : home.host_columns->pages().num_free();
    const std::int64_t free_records =
        is_plain ? home.host->num_available() : home.host->pool().num_free();
    detail::require_law(free_pages >= pages && free_records >= records,
                        "host tier: counted pages are there");
}

// One for each column that brings pages, and for each new one of the tier. Throws IntegrityError
// where they are not there; nothing was taken then.
void TierFlights::take_fill_records(Replica& home, StoreFill& fill) {
    TierFlight& flight = fill.flight;
    std::int64_t pages = 0;
    std::int64_t records = flight.num_new;
    for (const ColumnParts& item : fill.items) {
        const std::int64_t n = count_bits(item.parts & ~kState);
        pages += n;
        records += n > 0 && item.column < flight.place.depth() ? 1 : 0;
    }
    if (home.host_columns != nullptr) home.host_columns->make_room(pages, records, {});
    require_room(home, pages, records);
    const auto take = [&](std::int32_t column) {
        BlockId& record = flight.host_pages[static_cast<std::size_t>(column - flight.first)];
        static_cast<void>(home.take_stored(1, &record));
        if (home.host_columns != nullptr) home.host_columns->enter_all(record);
    };
    for (const ColumnParts& item : fill.items) {
        const bool is_new = item.column >= flight.place.depth();
        if (!is_new && (item.parts & ~kState) != 0) take(item.column);
    }
    const std::int32_t stored = flight.place.depth();
    for (std::int32_t c = stored; c < stored + flight.num_new; ++c) take(c);
}

void TierFlights::fill_record(Replica& home, BlockId record, std::uint64_t parts,
                              StoreMoves& out) const {
    if (home.host_columns == nullptr) return out.parts.push_back({0, record});
    ColumnPages& columns = *home.host_columns;
    if ((parts & full_lanes(grouping_)) != 0) columns.fill_full(record);
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        if ((parts & window_lanes(grouping_.windows()[w])) != 0) columns.fill(record, w);
    }
    for (std::int32_t lane = 0; lane < grouping_.num_lanes(); ++lane) {
        const BlockId page = columns.page(record, lane);
        if (page != ColumnPages::kNoPage) out.parts.push_back({lane, page});
    }
}

// Behind what has arrived.
void TierFlights::give_back_fill(Replica& home, StoreFill& fill, std::size_t arrived) noexcept {
    TierFlight& flight = fill.flight;
    const std::int32_t end = arrived == 0 ? flight.first : fill.items[arrived - 1].column + 1;
    const auto size = static_cast<std::size_t>(end - flight.first);
    for (std::size_t i = size; i < flight.host_pages.size(); ++i) {
        const BlockId record = flight.host_pages[i];
        if (record < 0) continue;
        if (home.host_columns != nullptr) {
            give_record_back(home, record);
        } else {
            home.host->give_back(&record, 1);
        }
    }
    const auto lost = static_cast<std::int32_t>(flight.host_pages.size() - size);
    flight.num_new = std::max(0, flight.num_new - lost);
    flight.host_pages.resize(size);
    flight.tokens.resize(static_cast<std::size_t>(flight.num_new) *
                         static_cast<std::size_t>(page_size_));
}

void TierFlights::land_fill(Replica& home, StoreFill& fill, std::size_t arrived,
                            bool forward) noexcept {
    TierFlight& flight = fill.flight;
    fill.windows.reset();
    flight.goes_below = forward;
    const bool has_state = flight.stored_state && arrived == fill.items.size();
    give_back_fill(home, fill, arrived);
    if (home.host_columns != nullptr) {
        home.host_columns->begin_leaving();
        home.host_columns->leave_from({flight.place.node(), flight.place.depth()});
        complete_records(home, flight, false);
        if (flight.num_new > 0) publish_records(home, flight, false);
        for (const BlockId record : flight.host_pages) {
            if (record >= 0) give_record_back(home, record);
        }
    } else if (flight.num_new > 0) {
        // What is completed in front of these is a checkpoint alone.
        const auto first = flight.host_pages.end() - flight.num_new;
        flight.host_pages.erase(flight.host_pages.begin(), first);
        publish(flight);
        home.host->give_back(flight.host_pages.data(),
                             static_cast<std::int64_t>(flight.host_pages.size()));
    }
    if (flight.stored_state) land_checkpoint(home, flight, has_state);
    if (flight.place) keep_keys(home, fill, arrived);
}

// So that they are not computed again for who looks for what is behind them. A key is known only
// where all in front of it are.
void TierFlights::keep_keys(Replica& home, const StoreFill& fill,
                            std::size_t arrived) const noexcept {
    const StorePlace& place = fill.flight.place;
    for (std::size_t i = 0; i < arrived; ++i) {
        const std::int32_t column = fill.items[i].column;
        if (column >= place.depth()) return;
        const TreePosition at{place.node(), place.depth()};
        const PrefixTree& tree = home.host->tree();
        const bool is_behind_known =
            column == 0 || home.record_keys->find(column_at(tree, at, column - 1)) != nullptr;
        if (!is_behind_known) return;
        home.record_keys->set(column_at(tree, at, column), fill.keys[i]);
    }
}

bool TierFlights::finish_fill(std::uint64_t ticket, std::int64_t arrived, bool forward) noexcept {
    const auto found = std::find_if(fills_.begin(), fills_.end(), [&](const StoreFill& each) {
        return each.flight.ticket == ticket && ticket != 0;
    });
    if (found == fills_.end()) return false;
    StoreFill fill = std::move(*found);
    fills_.erase(found);
    Replica& home = home_of(fill.flight.replica);
    const auto most = static_cast<std::int64_t>(fill.items.size());
    const auto n = static_cast<std::size_t>(std::clamp<std::int64_t>(arrived, 0, most));
    if (fill.flight.is_wanted) {
        land_fill(home, fill, n, forward);
    } else {
        give_back_fill(home, fill, 0);
        if (fill.flight.stored_state) land_checkpoint(home, fill.flight, false);
    }
    return true;
}

}  // namespace kvcore
