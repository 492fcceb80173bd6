// SPDX-License-Identifier: Apache-2.0
#include "transfer/tier_flights.hpp"

#include <algorithm>
#include <array>
#include <new>
#include <unordered_set>
#include <utility>
#include <vector>

#include "kvcore/errors.hpp"
#include "level/quotas.hpp"
#include "support/memory.hpp"

namespace kvcore {

TierFlights::TierFlights(const CacheConfig& config, const Grouping& grouping,
                         const std::vector<std::unique_ptr<Replica>>& replicas, Tickets& tickets,
                         SequenceTable& sequences, const WindowRows& windows, StoreQueue& queue)
    : page_size_(config.page_size),
      grouping_(grouping),
      replicas_(replicas),
      tickets_(tickets),
      sequences_(sequences),
      windows_(windows),
      queue_(queue),
      rules_(config, replicas[0]->pool.end_id()),
      tells_hits_(config.host_eviction.order != EvictionOrder::kLru) {
    if (config.host_pages == 0) return;
    const auto n = static_cast<std::size_t>(replicas[0]->pool.end_id());
    storing_.assign(replicas.size(), std::vector<bool>(n));
}

std::unique_ptr<TierFlight> TierFlights::prepare_load(SequenceHandle handle, std::int32_t replica,
                                                      const FoundHit& hit, bool has_state,
                                                      Transfers& transfers) {
    Replica& home = home_of(replica);
    Level& host = *home.host;
    auto flight = std::make_unique<TierFlight>();
    flight->replica = replica;
    flight->sequence = handle;
    flight->is_load = true;
    flight->first = hit.match.at.depth;
    const TreePosition below{host.tree.split(hit.below), hit.below.depth};
    choose_load(home, hit, below, *flight);
    flight->source = PrefixRef(host, below, PrefixRef::Pages::of(flight->host_pages));
    make_room(transfers.tier_moves, static_cast<std::size_t>(flight->num_pages));
    make_room(flights_, 1);
    if (has_state) flight->stored_state = home.hold_stored_state(below);
    if (flight->stored_state) make_room(transfers.state_moves, 1);
    return flight;
}

void TierFlights::make_room_for_loads(std::size_t loads, std::size_t pages, Transfers& transfers) {
    make_room(transfers.tier_moves, pages);
    make_room(flights_, loads);
    if (replicas_[0]->stores_states()) make_room(transfers.state_moves, loads);
}

void TierFlights::owe_load(TierFlight& load, Sequence& sequence, RecurrentSlots::Slot slot,
                           Transfers& transfers) {
    Replica& home = home_of(load.replica);
    load.ticket = tickets_.of(transfers);
    load.owner = std::this_thread::get_id();
    if (load.stored_state) {
        load.state = StateHold(*home.states, slot);
        transfers.state_moves.push_back(
            {load.replica, load.stored_state.slot(), slot, Tier::kHost, Tier::kDevice});
    }
    ++sequence.num_pending;
    for (const BlockId record : load.host_pages) home.host->enter(record);
    const std::int32_t end = load.source.depth();
    const auto record_of = [&](std::int32_t column) {
        return load.host_pages[load.host_pages.size() - static_cast<std::size_t>(end - column)];
    };
    for (std::int32_t c = load.first; c < end; ++c) {
        const BlockId column = sequence.pages[c];
        home.pool.share(&column, 1);
        home.enter(column);
        load.device_pages.push_back(column);
        give_out_column(load, column, record_of(c), transfers);
    }
    for (Patch& patch : load.patches) {
        home.require_pages(1);
        home.take_pages(1, &patch.bringer);
        home.enter(patch.bringer);
        for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
            if (patch.has(w)) home.columns->fill(patch.bringer, w);
        }
        load.device_pages.push_back(patch.bringer);
        give_out_column(load, patch.bringer, record_of(patch.index), transfers);
    }
    home.note_peak();
    flights_.push_back(std::move(load));
}

// Moves the place over the stored pages among the sequence's first `end` pages. Takes the tokens
// from the tree, not from the request, so that they match the pages.
void TierFlights::advance(Standing& standing, const Path& path, std::int32_t end) const {
    const std::int32_t first = standing.place.depth();
    if (end <= first) return;
    const std::vector<TokenId> tokens =
        home_of(path.replica).tree.tokens_of({path.at.node, end}, first);
    standing.place.advance(tokens.data(), static_cast<std::int64_t>(tokens.size()));
}

// Finds the whole prefix of a sequence in the tier; without memory, it leaves the place empty. A
// shorter place would be wrong: `store_pages` looks past the place only by the number of pages that
// the tier has room for.
void TierFlights::find_place(Standing& standing, const Path& path) const {
    Level& host = *home_of(path.replica).host;
    Standing found;
    found.place = {host, host.open(PrefixTree::name_of(path.at.node))};
    advance(found, path, path.at.depth);
    standing.place = std::move(found.place);
    standing.examined = 0;
}

// Gives the stored pages the retention that they have on the device.
void TierFlights::find_parts(const Path& path, std::int32_t first, std::int32_t end,
                             TierFlight& flight) const {
    const Replica& home = home_of(path.replica);
    if (!home.host->keeps_by_priority) return;
    const TreeNode* node = PrefixTree::position(path.at.node, end).node;
    for (; node->end() > first; node = node->parent) {
        flight.parts.push_back(
            {std::min(end, node->end()), home.tree.policy().retention(node->id)});
    }
    std::reverse(flight.parts.begin(), flight.parts.end());
}

// Chooses the pages to store for a sequence: cached pages that the tier does not have and that are
// not in flight, no more than there is room for. Takes the pages from the tier last, since no later
// step fails.
void TierFlights::choose_stores(const Standing& standing, const Path& path, std::int32_t end,
                                TierFlight& flight) const {
    Replica& home = home_of(path.replica);
    const std::int32_t first = standing.place.depth();
    TreeNode* node = path.at.node;
    std::vector<BlockId>& pages = flight.device_pages;
    pages.resize(static_cast<std::size_t>(end - first));
    home.tree.copy_pages({node, end}, first, pages.data());
    const std::vector<bool>& storing = storing_[static_cast<std::size_t>(path.replica)];
    const auto is_on_its_way = [&](BlockId page) -> bool {
        return storing[static_cast<std::size_t>(page)];
    };
    const auto own = std::find_if_not(pages.begin(), pages.end(), is_on_its_way);
    pages.erase(std::find_if(own, pages.end(), is_on_its_way), pages.end());
    flight.ahead = static_cast<std::int32_t>(own - pages.begin());
    pages.erase(pages.begin(), own);
    const auto last = first + flight.ahead + static_cast<std::int32_t>(pages.size());
    flight.tokens = home.tree.tokens_of({node, last}, first);
    find_parts(path, first, last, flight);
    flight.host_pages.resize(pages.size());
    const auto taken = static_cast<std::size_t>(
        home.host->take(static_cast<std::int64_t>(pages.size()), flight.host_pages.data()));
    pages.resize(taken);
    flight.host_pages.resize(taken);
    flight.tokens.resize((static_cast<std::size_t>(flight.ahead) + taken) *
                         static_cast<std::size_t>(page_size_));
}

// A full tier costs next to nothing: pages without room in the tier are not examined.
void TierFlights::owe_stores(SequenceHandle handle, const Sequence& sequence,
                             Transfers& transfers) {
    if (sequence.pages.holds_forgotten()) return;
    Standing& standing = standing_of(handle);
    if (standing.storing != 0) return;
    standing.is_due = false;
    const Path path = path_of(handle, sequence);
    if (grouping_.is_plain()) return store_pages(path, standing, transfers);
    store_columns(path, windows_.of(handle), standing, transfers);
}

void TierFlights::store_pages(const Path& path, Standing& standing, Transfers& transfers) {
    Replica& home = home_of(path.replica);
    if (!standing.place) find_place(standing, path);
    const auto room = static_cast<std::int32_t>(std::min<std::int64_t>(
        path.at.depth, standing.place.depth() + home.host->num_available_columns()));
    const std::int32_t end =
        rules_.end_of_due(home.tree, path.replica, {path.at.node, room}, standing.place.depth());
    advance(standing, path, end);
    const std::int32_t stored = standing.place.depth();
    if (end <= stored) return;
    make_room(flights_, 1);
    make_room(transfers.tier_moves, static_cast<std::size_t>(end - stored));
    TierFlight flight;
    choose_stores(standing, path, end, flight);
    if (flight.host_pages.empty()) return;
    flight.replica = path.replica;
    flight.sequence = path.sequence;
    flight.place = std::move(standing.place);
    flight.first = stored + flight.ahead;
    flight.num_new = static_cast<std::int32_t>(flight.device_pages.size());
    flight.num_pages = flight.num_new;
    flight.source = PrefixRef(home, {path.at.node, flight.first + flight.num_new},
                              PrefixRef::Pages::of(flight.device_pages));
    standing.storing = flight.number = free_number();
    give_out_store(std::move(flight), transfers);
}

void TierFlights::give_out_store(TierFlight&& flight, Transfers& transfers) noexcept {
    flight.ticket = tickets_.of(transfers);
    flight.owner = std::this_thread::get_id();
    std::vector<bool>& storing = storing_[static_cast<std::size_t>(flight.replica)];
    for (std::size_t i = 0; i < flight.host_pages.size(); ++i) {
        const BlockId page = flight.device_pages[i];
        if (flight.host_pages[i] < 0) continue;
        storing[static_cast<std::size_t>(page)] = true;
        give_out_column(flight, page, flight.host_pages[i], transfers);
    }
    flights_.push_back(std::move(flight));
}

// The number of a store, which names it for its sequence in half the memory of a ticket.
std::uint32_t TierFlights::free_number() noexcept {
    const auto is_taken = [this](const TierFlight& each) { return each.number == last_number_; };
    do {
        ++last_number_;
    } while (last_number_ == 0 || std::any_of(flights_.begin(), flights_.end(), is_taken));
    return last_number_;
}

// Queues columns `first` .. `end` - 1 on the path to the place, to be written to the lower stores.
void TierFlights::tell_below(const TierFlight& flight, std::int32_t first,
                             std::int32_t end) const noexcept {
    if (flight.goes_below) queue_.arrived(flight.replica, {flight.place.node(), end}, first);
}

// Returns the place to the sequence, unless the sequence was released or cut.
void TierFlights::hand_back_place(TierFlight& flight, bool done) noexcept {
    if (flight.state) finish_checkpoint(flight, done);
    if (Standing* standing = owner_of(flight)) {
        standing->storing = 0;
        standing->place = std::move(flight.place);
    } else {
        flight.place.release();
    }
}

PrefixRef TierFlights::find_cut(SequenceHandle handle, std::int32_t replica,
                                std::int32_t columns) const {
    const Standing* standing = find(handle);
    if (standing == nullptr || !standing->place || standing->place.depth() <= columns) return {};
    Level& host = *home_of(replica).host;
    return {host, host.hold({standing->place.node(), columns})};
}

void TierFlights::move_back(SequenceHandle handle, std::int32_t columns, PrefixRef cut) noexcept {
    Standing* standing = find(handle);
    if (standing == nullptr) return;
    standing->storing = 0;
    standing->examined = std::min(standing->examined, columns);
    if (!cut) return;
    standing->place.release();
    standing->place = std::move(cut);
}

void TierFlights::expect(SequenceHandle handle, std::int64_t returns) noexcept {
    const Standing* standing = find(handle);
    if (standing == nullptr || !standing->place) return;
    Level& host = *home_of(sequences_.find(handle)->replica).host;
    host.tree.expect({standing->place.node(), standing->place.depth()}, returns);
}

void TierFlights::forget(SequenceHandle handle) noexcept {
    Standing* standing = find(handle);
    if (standing == nullptr) return;
    if (standing->place) keep_end(home_of(sequences_.find(handle)->replica), standing->place);
    standing->place.release();
    *standing = {};
}

void TierFlights::drop_forgotten() noexcept {
    for (TierFlight& flight : flights_) {
        if (!flight.source.is_forgotten()) continue;
        if (!flight.is_load) {
            flight.place.end();
        } else if (Sequence* sequence = sequences_.find(flight.sequence)) {
            sequence->pages.limit_commits(PrefixTree::findable_depth(flight.source.node()));
        }
    }
}

// Loads for a sequence, and code that loads and stores share.

// The columns after the tree's part of the hit are the request's own. Window pages that the tree's
// columns lack cannot be placed there before their bytes arrive, because other requests would read
// them: patches bring these pages.
void TierFlights::choose_load(const Replica& home, const FoundHit& hit, TreePosition below,
                              TierFlight& flight) const {
    const auto end = static_cast<std::int32_t>(hit.tokens / page_size_);
    std::int32_t lowest = std::min(hit.match.at.depth, below.depth);
    tiered::for_each_patch(home, hit.match.at, hit.tokens, [&](const Patch& patch) {
        flight.patches.push_back(patch);
        flight.num_pages += tiered::count_pages(grouping_, patch.windows);
        lowest = std::min(lowest, patch.index);
    });
    const std::int32_t num_own = end - hit.match.at.depth;
    flight.num_pages += std::int64_t{num_own} * grouping_.num_full_lanes();
    for (const Grouping::Window& window : grouping_.windows()) {
        const std::int32_t first = grouping_.first_column(window, hit.tokens);
        flight.num_pages +=
            std::int64_t{window.num_lanes} * std::max(0, end - std::max(first, hit.match.at.depth));
    }
    flight.host_pages.resize(static_cast<std::size_t>(below.depth - lowest));
    home.host->tree.copy_pages(below, lowest, flight.host_pages.data());
    flight.device_pages.reserve(static_cast<std::size_t>(num_own) + flight.patches.size());
}

// Gives out a move for each lane in which both columns have a page.
void TierFlights::give_out_column(TierFlight& flight, BlockId column, BlockId record,
                                  Transfers& transfers) const noexcept {
    const Replica& home = home_of(flight.replica);
    count_column(home, column, record, flight.copied);
    const Tier from = flight.is_load ? Tier::kHost : Tier::kDevice;
    const Tier to = flight.is_load ? Tier::kDevice : Tier::kHost;
    for (const Grouping::Bundle& bundle : grouping_.bundles()) {
        const std::int32_t tokens = page_size_ / bundle.pages_per_column;
        for (std::int32_t i = 0; i < bundle.pages_per_column; ++i) {
            const BlockId here = home.page(column, bundle.first_lane + i);
            const BlockId below = home.host->page(record, bundle.first_lane + i);
            if (here == ColumnPages::kNoPage || below == ColumnPages::kNoPage) continue;
            transfers.tier_moves.push_back({flight.replica, flight.is_load ? below : here,
                                            flight.is_load ? here : below, tokens, flight.sequence,
                                            from, to});
        }
    }
}

void TierFlights::count_column(const Replica& home, BlockId column, BlockId record,
                               ColumnCounts& counts) noexcept {
    for (std::size_t w = 0; w < home.grouping().windows().size(); ++w) {
        if (home.columns->has(column, w) && home.host->columns->has(record, w)) ++counts.of[w];
    }
    if (home.has_full_pages(column) && home.host->has_full_pages(record)) {
        ++counts.of[ColumnCounts::kFull];
    }
}

// Ends the read of the records, which counts as a use.
void TierFlights::leave_records(const TierFlight& flight) const noexcept {
    Level& host = *home_of(flight.replica).host;
    host.begin_leaving(flight.source.at());
    for (const BlockId record : flight.host_pages) {
        host.leave_now(record, ColumnPages::Departure::kKept);
    }
}

// `arrived`: the sequence; nullptr if it was released or the copies failed. Holds on a column that
// brought pages move to the column that needed them.
void TierFlights::finish_column_load(const TierFlight& flight,
                                     const Sequence* arrived) const noexcept {
    Replica& home = home_of(flight.replica);
    for (const Patch& patch : flight.patches) {
        if (arrived == nullptr) continue;
        const PageRow& row = arrived->pages;
        const TreePosition end{row.node(), patch.index + 1};
        home.fill_holes(end, row[patch.index], patch.bringer);
        if (home.pool.ref_count(patch.bringer) == 1) continue;
        // A hold on a column holds all its windows. Idle windows are evicted, because holding them
        // could break quotas.
        if (home.owners != nullptr) home.columns->give_up_idle(row[patch.index]);
        const bool is_own = row.is_own(patch.index);
        home.move_refs(patch.bringer, row[patch.index], is_own ? TreePosition{} : end);
    }
    for (const BlockId column : flight.device_pages) home.leave(column, {});
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

// Keeps the records at the end of the stored prefix of a released sequence: the next turn continues
// from it. Keeps them from the first record on, the order in which they may be evicted.
void TierFlights::keep_end(Replica& home, const PrefixRef& place) const noexcept {
    std::array<BlockId, 64> records;
    const std::int32_t depth = place.depth();
    home.host->begin_leaving({place.node(), depth});
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        std::int32_t c = std::max(0, depth - grouping_.windows()[w].reach);
        while (c < depth) {
            const auto n = std::min(depth - c, static_cast<std::int32_t>(records.size()));
            home.host->tree.copy_pages({place.node(), c + n}, c, records.data());
            for (std::int32_t i = 0; i < n; ++i) {
                home.host->columns->keep(records[static_cast<std::size_t>(i)], w);
            }
            c += n;
        }
    }
}

// Every flight reads all windows of its records, and so does every write to a lower store.
void TierFlights::check_records(std::int32_t replica) const {
    const Replica& home = home_of(replica);
    const std::size_t windows = grouping_.windows().size();
    std::vector<std::uint32_t> readers(static_cast<std::size_t>(home.host->pool.num_blocks()) *
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
    for (const StoreFill& fill : fills_) add_all(fill);
    queue_.for_each_taken(replica, add);
    home.host->columns->check_integrity(readers);
}

// Stores of a sequence's columns. A record is a column of the tier, with pages of each bundle. With
// groups of layers, `store_columns` chooses the parts of columns that records lack.

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
    std::int32_t examined = 0;  // end of the examined columns
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

// The parts that a column has and its record lacks: pages of windows that the row reads or has just
// written. Without a record, all parts of the column.
std::uint8_t TierFlights::part_for(const Replica& home, BlockId column, BlockId record,
                                   const ReadFrom& read_from, std::int32_t index) const noexcept {
    std::uint8_t part = record < 0 ? kFullLanes : std::uint8_t{0};
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        const bool is_wanted =
            record < 0 || (index >= read_from[w] && !home.host->columns->has(record, w));
        if (is_wanted && home.columns->has(column, w)) part |= static_cast<std::uint8_t>(1U << w);
    }
    return part;
}

// Chooses the parts that records lack, and all parts of the columns after them. Leaves out columns
// in flight, and chooses no more than there is room for.
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
    home.host->tree.copy_pages({standing.place.node(), stored}, choice.first, records.data());
    choice.parts.reserve(columns.size());
    const std::vector<bool>& storing = storing_[static_cast<std::size_t>(path.replica)];
    std::int64_t room = home.host->num_available();
    const std::int64_t most_records = home.host->num_available_columns();
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

// Takes columns of the tier for the chosen parts. The tier has room: otherwise it throws
// IntegrityError and takes nothing.
void TierFlights::take_records(Replica& home, const Choice& choice, TierFlight& flight) {
    ColumnPages& records = *home.host->columns;
    make_tier_room(*home.host, choice.num_pages, choice.num_records);
    for (std::size_t i = 0; i < choice.parts.size(); ++i) {
        BlockId& record = flight.host_pages[i];
        const std::uint8_t part = choice.parts[i];
        if (part == 0) continue;
        static_cast<void>(home.host->take(1, &record));
        records.enter_all(record);
        if ((part & kFullLanes) != 0) records.fill_full(record);
        for (std::size_t w = 0; w < Grouping::kMaxWindows; ++w) {
            if (tiered::has_window(part, w)) records.fill(record, w);
        }
    }
}

// Like `store_pages`. A full tier costs next to nothing.
void TierFlights::store_columns(const Path& path, const WindowRow& reader, Standing& standing,
                                Transfers& transfers) {
    const Replica& home = home_of(path.replica);
    const std::int64_t room = home.host->num_available();
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
    if (!quotas::may_hold(home, last, choice.first)) return;
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

// Cannot fail after the records are taken.
void TierFlights::give_out_records(Standing& standing, const Choice& choice, TierFlight flight,
                                   TreeNode* node, Transfers& transfers) {
    Replica& home = home_of(flight.replica);
    take_records(home, choice, flight);
    standing.examined = choice.examined;
    flight.num_pages = choice.num_pages;
    flight.first = choice.first;
    flight.place = std::move(standing.place);
    flight.source =
        PrefixRef(home, {node, choice.end()}, PrefixRef::Pages::of(flight.device_pages));
    for (const BlockId column : flight.device_pages) home.enter(column);
    standing.storing = flight.number = free_number();
    give_out_store(std::move(flight), transfers);
}

// Decides, in both tiers, whether a window page is kept for the next turn or counts as passed in
// the middle of a prompt. A store may be the last reader of pages that its sequence has left
// meanwhile.
ColumnPages::Departure TierFlights::departure(const TierFlight& flight, std::int32_t column,
                                              std::size_t window, bool has_ended) const noexcept {
    const auto end = flight.first + static_cast<std::int32_t>(flight.host_pages.size());
    const std::int32_t reach = grouping_.windows()[window].reach;
    const bool is_at_prompts_end =
        column < flight.prompt_end && flight.prompt_end - column <= reach;
    const bool is_kept = is_at_prompts_end || (has_ended && end - column <= reach);
    return is_kept ? ColumnPages::Departure::kKept : ColumnPages::Departure::kPassed;
}

// Moves the pages that a record lacks into it.
void TierFlights::merge(Replica& home, BlockId record, const TierFlight& flight,
                        std::int32_t column, bool has_ended) const noexcept {
    Level& host = *home.host;
    const BlockId own = flight.host_pages[static_cast<std::size_t>(column - flight.first)];
    std::array<bool, Grouping::kMaxWindows> had{};
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        had[w] = host.columns->has(record, w);
    }
    host.enter(record);
    host.fill_holes({flight.place.node(), column + 1}, record, own);
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        host.columns->leave(
            record, w,
            had[w] ? ColumnPages::Departure::kUnused : departure(flight, column, w, has_ended));
    }
    give_record_back(home, own);
}

void TierFlights::give_record_back(Replica& home, BlockId record) const noexcept {
    home.host->leave_now(record, ColumnPages::Departure::kUnused);
    home.host->give_back(&record, 1);
}

// Completes existing records before the place, which keeps these records in the tier.
void TierFlights::complete_records(Replica& home, TierFlight& flight,
                                   bool has_ended) const noexcept {
    const auto size = static_cast<std::int32_t>(flight.host_pages.size());
    std::int32_t column = std::min(flight.place.depth(), flight.first + size);
    std::int32_t lowest = column;
    std::int32_t end = 0;
    if (column <= flight.first) return;
    ColumnsUp records({flight.place.node(), column}, page_size_);
    for (--column; column >= flight.first; --column) {
        BlockId& own = flight.host_pages[static_cast<std::size_t>(column - flight.first)];
        if (own < 0) continue;
        merge(home, records[column], flight, column, has_ended);
        own = -1;
        lowest = column;
        end = std::max(end, column + 1);
    }
    tell_below(flight, lowest, end);
}

// Publishes new records after the records of earlier flights. Publishes nothing if those records
// did not arrive.
void TierFlights::publish_records(Replica& home, TierFlight& flight, bool has_ended) noexcept {
    const std::size_t begin = flight.host_pages.size() - static_cast<std::size_t>(flight.num_new);
    const TokenId* tokens = flight.tokens.data();
    std::int32_t published = 0;
    duplicates_.clear();
    try {
        make_room(duplicates_, static_cast<std::size_t>(flight.num_new));
        home.host->make_room_to_cache(flight.num_new, home.num_sequences);
        const std::int32_t joint = flight.place.depth() + flight.ahead;
        flight.place.advance(tokens, std::int64_t{flight.ahead} * page_size_);
        if (flight.place.depth() != joint) return;
        tokens += std::int64_t{flight.ahead} * page_size_;
        const auto publish = [&](std::int32_t last, const Retention& retention) {
            flight.place.put(tokens + std::int64_t{published} * page_size_,
                             flight.host_pages.data() + begin + published, last - joint - published,
                             found_, retention);
            for (const DuplicatePage& each : found_) {
                duplicates_.push_back({each.index + published, each.cached});
            }
            published = last - joint;
        };
        for_each_part(flight, joint, joint + flight.num_new, publish);
    } catch (const std::bad_alloc&) {
        if (published == 0) return flight.place.release();
    }
    Level& host = *home.host;
    host.leave_from(flight.place.at());
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
            host.cache(own);
            for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
                host.columns->leave(own, w, departure(flight, column, w, has_ended));
            }
        }
        own = -1;
    }
    tell_below(flight, flight.place.depth() - flight.num_new, flight.place.depth());
}

// If hits end at checkpoints, the pages are kept for the first hit that reads them.
void TierFlights::leave_for_hit(Replica& home, const TierFlight& flight, std::int32_t column,
                                std::size_t window) const noexcept {
    const TreePosition end = flight.source.at();
    if (end.node == nullptr) return;
    const std::int32_t hit = home.columns->first_hit(end, column, window);
    home.columns->leave_from({end.node, hit > 0 ? hit : end.depth});
}

void TierFlights::finish_store(TierFlight& flight, bool done) noexcept {
    Replica& home = home_of(flight.replica);
    const bool has_ended = owner_of(flight) == nullptr;
    std::vector<bool>& storing = storing_[static_cast<std::size_t>(flight.replica)];
    home.begin_leaving(flight.source.at());
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
    flight.source.end();
    if (done) {
        home.metrics.stored_pages += flight.num_pages;
        home.count_stored(flight.copied);
    }
    if (done && flight.place) {
        home.host->begin_leaving(flight.place.at());
        complete_records(home, flight, has_ended);
        if (flight.num_new > 0) publish_records(home, flight, has_ended);
    }
    for (const BlockId record : flight.host_pages) {
        if (record >= 0) give_record_back(home, record);
    }
    hand_back_place(flight, done);
}

// With states: stores of a sequence's slot. A checkpoint of the tier is in the tier's
// RecurrentSlots and belongs to the record at the end of the sequence's prefix in the tier.

// The store that this call gave out for a sequence.
TierFlight* TierFlights::find_store(SequenceHandle handle, const Transfers& transfers) noexcept {
    const std::uint32_t number = standings_[handle.index].storing;
    const auto found =
        std::find_if(flights_.begin(), flights_.end(), [&](const TierFlight& flight) {
            return flight.number == number && flight.ticket == transfers.ticket && !flight.is_load;
        });
    return found == flights_.end() ? nullptr : &*found;
}

// Returns true if a flight already stores this checkpoint: several requests with a common prefix
// may reach its end in one step.
bool TierFlights::is_storing_state(std::int32_t replica, TreePosition end) const noexcept {
    return std::any_of(flights_.begin(), flights_.end(), [&](const TierFlight& flight) {
        return flight.replica == replica && !flight.is_load && flight.stored_state &&
               flight.place && flight.place.node() == end.node && flight.state_depth == end.depth;
    });
}

// The depth of the place of a store when the store is over.
std::int32_t TierFlights::depth_after(const TierFlight& flight) const noexcept {
    return flight.place.depth() + (flight.num_new > 0 ? flight.ahead + flight.num_new : 0);
}

// Reads the state from the slot where it was computed, like the copy into the checkpoint of the
// device. Both copies may be made in any order, and the device needs no slot for its checkpoint.
void TierFlights::owe_checkpoint(SequenceHandle handle, Sequence& sequence,
                                 RecurrentSlots::Slot slot, Transfers& transfers) {
    Replica& home = home_of(sequence.replica);
    if (!home.stores_states()) return;
    const std::int32_t depth = sequence.pages.committed();
    Standing& standing = standing_of(handle);
    if (rules_.has_marks() && standing.storing == 0) {
        rules_.demand(home.tree, sequence.replica, {sequence.pages.node(), depth});
        owe_stores(handle, sequence, transfers);
    }
    TierFlight* flight = nullptr;
    if (standing.storing != 0) {
        flight = find_store(handle, transfers);
        if (flight == nullptr || depth_after(*flight) != depth) return;
    } else {
        const Path path = path_of(handle, sequence);
        if (!standing.place) find_place(standing, path);
        advance(standing, path, depth);
        if (standing.place.depth() != depth) return;
        if (StateHold known = home.hold_stored_state({standing.place.node(), depth})) {
            return known.end_use();
        }
        if (is_storing_state(sequence.replica, {standing.place.node(), depth})) return;
    }
    if (home.host->states->num_available() == 0) return;
    make_room(transfers.state_moves, 1);
    if (flight == nullptr) {
        make_room(flights_, 1);
        TierFlight alone;
        alone.replica = sequence.replica;
        alone.sequence = handle;
        alone.place = std::move(standing.place);
        standing.storing = alone.number = free_number();
        give_out_store(std::move(alone), transfers);
        flight = &flights_.back();
    }
    flight->state = StateHold(*home.states, slot);
    flight->stored_state = StateHold(*home.host->states, home.host->states->take());
    flight->state_depth = depth;
    ++sequence.num_pending;
    transfers.state_moves.push_back(
        {sequence.replica, slot, flight->stored_state.slot(), Tier::kDevice, Tier::kHost});
}

void TierFlights::finish_checkpoint(TierFlight& flight, bool done) noexcept {
    if (Sequence* sequence = sequences_.find(flight.sequence)) --sequence->num_pending;
    land_checkpoint(home_of(flight.replica), flight, done);
}

// Gives the checkpoint to its record, if the record has arrived and has no checkpoint. The place of
// the flight has reached its final depth.
void TierFlights::land_checkpoint(Replica& home, TierFlight& flight, bool done) noexcept {
    RecurrentSlots& states = *home.host->states;
    const RecurrentSlots::Slot slot = flight.stored_state.slot();
    const bool has_record = done && flight.place && flight.place.depth() == flight.state_depth;
    if (!has_record) return states.give_back(slot);
    const BlockId record =
        Replica::last_column(home.host->tree, {flight.place.node(), flight.state_depth});
    if (states.find(record) != RecurrentSlots::kNone) return states.give_back(slot);
    states.hand_over(slot, record, {flight.place.node(), flight.state_depth});
    tell_below(flight, flight.state_depth - 1, flight.state_depth);
}

// Each slot of the tier is free, in flight to the tier, or belongs to a record.
void TierFlights::check_states(std::int32_t replica) const {
    const Replica& home = home_of(replica);
    std::vector<RecurrentSlots::Slot> used;
    for (const TierFlight& flight : flights_) {
        const bool takes_slot = flight.replica == replica && !flight.is_load && flight.state;
        if (takes_slot) used.push_back(flight.stored_state.slot());
    }
    for (const StoreFill& fill : fills_) {
        const TierFlight& flight = fill;
        if (flight.replica == replica && flight.stored_state) {
            used.push_back(flight.stored_state.slot());
        }
    }
    std::vector<bool> cached(static_cast<std::size_t>(home.host->pool.num_blocks()));
    home.host->tree.for_each_run([&](const BlockId* ids, std::int32_t n) {
        for (std::int32_t i = 0; i < n; ++i) cached[static_cast<std::size_t>(ids[i])] = true;
    });
    home.host->states->check_integrity(used, cached);
}

// Fills: columns that the lower stores bring into the host tier. No lookup finds their pages before
// the bytes have arrived. A fill belongs to no request: a request finds the columns like columns
// that it stored itself.

namespace {

constexpr std::uint64_t kState = std::uint64_t{1} << kStatePart;

std::uint64_t lanes(std::int32_t first, std::int32_t n) noexcept {
    return ((std::uint64_t{1} << n) - 1) << first;
}

std::uint64_t full_lanes(const Grouping& grouping) noexcept {
    std::uint64_t parts = 0;
    for (const Grouping::Bundle& bundle : grouping.bundles()) {
        if (bundle.window < 0) parts |= lanes(bundle.first_lane, bundle.pages_per_column);
    }
    return parts;
}

std::uint64_t window_lanes(const Grouping::Window& window) noexcept {
    return lanes(window.first_lane, window.num_lanes);
}

// Drops the windows with missing lanes: a column of the tier has all lanes of a window or no lane
// of it.
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

BlockId column_at(const PrefixTree& tree, TreePosition at, std::int32_t column) noexcept {
    return Replica::last_column(tree, PrefixTree::position(at.node, column + 1));
}

bool has_checkpoint(const Level& level, TreePosition at, std::int32_t end) noexcept {
    return at.depth >= end && level.has_checkpoint(column_at(level.tree, at, end - 1));
}

}  // namespace

// The window lanes that a hit of `end` columns reads in a column, and that neither tier has.
std::uint64_t TierFlights::window_parts(const Replica& home, TreePosition at, TreePosition below,
                                        std::int32_t column, std::int32_t end) const noexcept {
    if (grouping_.windows().empty()) return 0;
    const bool is_here = column < at.depth;
    const bool is_there = column < below.depth;
    const BlockId here = is_here ? column_at(home.tree, at, column) : 0;
    const BlockId there = is_there ? column_at(home.host->tree, below, column) : 0;
    std::uint64_t parts = 0;
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        const Grouping::Window& window = grouping_.windows()[w];
        if (column < grouping_.first_column(window, std::int64_t{end} * page_size_)) continue;
        const bool is_had = (is_here && home.columns->has(here, w)) ||
                            (is_there && home.host->columns->has(there, w));
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
    const TreePosition at = home.find(name_space, tokens, n);
    const TreePosition below = home.host->find(name_space, tokens, n);
    std::int32_t first = std::min(below.depth, end);
    for (const Grouping::Window& window : grouping_.windows()) {
        first = std::min(first, grouping_.first_column(window, n));
    }
    if (home.stores_states()) first = std::min(first, end - 1);
    std::vector<ColumnParts> needed;
    for (std::int32_t c = first; c < end; ++c) {
        std::uint64_t parts = window_parts(home, at, below, c, end);
        if (c >= below.depth) parts |= full_lanes(grouping_);
        const bool lacks_state = c == end - 1 && home.stores_states() &&
                                 !has_checkpoint(home, at, end) &&
                                 !has_checkpoint(*home.host, below, end);
        if (lacks_state) parts |= kState;
        if (parts != 0) needed.push_back({c, parts});
    }
    return needed;
}

// The number of items that fit. Any column before `stored` may be completed. From `stored` on,
// columns follow without a gap, each with its full lanes. If there are no full lanes, columns
// without pages may be left out between them.
std::size_t TierFlights::count_fitting(const Replica& home, std::int32_t stored,
                                       const ColumnParts* items, std::size_t n) const noexcept {
    const std::uint64_t full = full_lanes(grouping_);
    std::int64_t records = home.host->num_available_columns();
    std::int64_t pages = home.host->num_available();
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

// Leaves out parts that have arrived since the search, and items without room.
void TierFlights::choose_fill(const Replica& home, TreePosition below, std::int32_t end,
                              const ColumnParts* items, const PageKey* keys, std::size_t n,
                              StoreFill& fill) const {
    for (std::size_t i = 0; i < n; ++i) {
        ColumnParts item{items[i].column, whole_parts(grouping_, items[i].parts)};
        if (item.column < below.depth) {
            item.parts &= window_parts(home, {}, below, item.column, end) | kState;
        }
        const bool may_have_state = item.column == end - 1 && home.stores_states() &&
                                    !has_checkpoint(*home.host, below, end);
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
    Level& host = *home.host;
    TreePosition below = host.find(name_space, tokens, std::int64_t{end} * page_size_);
    StoreFill fill;
    TierFlight& flight = fill;
    flight.replica = replica;
    flight.place = PrefixRef(host, below.depth > 0 ? host.hold(below) : host.open(name_space));
    below.node = flight.place.node();
    flight.place.hold_windows(std::int64_t{end} * page_size_);
    choose_fill(home, below, end, items, keys, n, fill);
    if (fill.items.empty()) return flight.place.release();
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
    out.parts.reserve(size * (static_cast<std::size_t>(grouping_.num_lanes()) + 1));
    take_for_fill(home, fill, out);
    fills_.push_back(std::move(fill));
}

// Cannot fail after the records are taken.
void TierFlights::take_for_fill(Replica& home, StoreFill& fill, StoreMoves& out) {
    TierFlight& flight = fill;
    take_fill_records(home, fill);
    flight.ticket = out.ticket = tickets_.next();
    out.replica = flight.replica;
    for (std::size_t i = 0; i < fill.items.size(); ++i) {
        const ColumnParts& item = fill.items[i];
        const BlockId record =
            flight.host_pages[static_cast<std::size_t>(item.column - flight.first)];
        if (record >= 0) fill_record(home, record, item.parts, out);
        if ((item.parts & kState) != 0 && home.host->states->num_available() > 0) {
            flight.stored_state = StateHold(*home.host->states, home.host->states->take());
            flight.state_depth = item.column + 1;
            out.parts.push_back({kStatePart, flight.stored_state.slot()});
        }
        out.keys.push_back(fill.keys[i]);
        out.ends.push_back(static_cast<std::int32_t>(out.parts.size()));
    }
}

// Makes room in the tier for `pages` pages and `records` records, which the caller takes one by one
// afterwards. Throws IntegrityError if the tier has no room.
void TierFlights::make_tier_room(Level& host, std::int64_t pages, std::int64_t records) {
    detail::require_law(host.make_room_to_take(pages, records),
                        "host tier: the counted pages are available");
}

// Takes a record for each column that brings pages, and for each new column of the tier. Throws
// IntegrityError and takes nothing if the tier has no room for them.
void TierFlights::take_fill_records(Replica& home, StoreFill& fill) {
    TierFlight& flight = fill;
    std::int64_t pages = 0;
    std::int64_t records = flight.num_new;
    for (const ColumnParts& item : fill.items) {
        const std::int64_t n = count_bits(item.parts & ~kState);
        pages += n;
        records += n > 0 && item.column < flight.place.depth() ? 1 : 0;
    }
    make_tier_room(*home.host, pages, records);
    const auto take = [&](std::int32_t column) {
        BlockId& record = flight.host_pages[static_cast<std::size_t>(column - flight.first)];
        static_cast<void>(home.host->take(1, &record));
        home.host->enter(record);
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
    Level& host = *home.host;
    if ((parts & full_lanes(grouping_)) != 0) host.fill_full(record);
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        if ((parts & window_lanes(grouping_.windows()[w])) != 0) host.columns->fill(record, w);
    }
    for (std::int32_t lane = 0; lane < host.grouping().num_lanes(); ++lane) {
        const BlockId page = host.page(record, lane);
        if (page != ColumnPages::kNoPage) out.parts.push_back({lane, page});
    }
}

// Gives back the records after the last item that arrived.
void TierFlights::give_back_fill(Replica& home, StoreFill& fill, std::size_t arrived) noexcept {
    TierFlight& flight = fill;
    const std::int32_t end = arrived == 0 ? flight.first : fill.items[arrived - 1].column + 1;
    const auto size = static_cast<std::size_t>(end - flight.first);
    for (std::size_t i = size; i < flight.host_pages.size(); ++i) {
        const BlockId record = flight.host_pages[i];
        if (record >= 0) give_record_back(home, record);
    }
    const auto lost = static_cast<std::int32_t>(flight.host_pages.size() - size);
    flight.num_new = std::max(0, flight.num_new - lost);
    flight.host_pages.resize(size);
    flight.tokens.resize(static_cast<std::size_t>(flight.num_new) *
                         static_cast<std::size_t>(page_size_));
}

void TierFlights::land_fill(Replica& home, StoreFill& fill, std::size_t arrived,
                            bool forward) noexcept {
    TierFlight& flight = fill;
    flight.place.end_windows();
    flight.goes_below = forward;
    const bool has_state = flight.stored_state && arrived == fill.items.size();
    give_back_fill(home, fill, arrived);
    home.host->begin_leaving(flight.place.at());
    complete_records(home, flight, false);
    if (flight.num_new > 0) publish_records(home, flight, false);
    for (const BlockId record : flight.host_pages) {
        if (record >= 0) give_record_back(home, record);
    }
    if (flight.stored_state) land_checkpoint(home, flight, has_state);
    if (flight.place) keep_keys(home, fill, arrived);
    flight.place.release();
}

// Keeps the keys of the arrived columns, which later searches would compute again otherwise. The
// key of a column is kept only if the keys of all columns before it are known.
void TierFlights::keep_keys(Replica& home, const StoreFill& fill,
                            std::size_t arrived) const noexcept {
    const TreePosition at = fill.place.at();
    for (std::size_t i = 0; i < arrived; ++i) {
        const std::int32_t column = fill.items[i].column;
        if (column >= at.depth) return;
        const PrefixTree& tree = home.host->tree;
        const bool is_behind_known =
            column == 0 || home.host->keys->find(column_at(tree, at, column - 1)) != nullptr;
        if (!is_behind_known) return;
        home.host->keys->set(column_at(tree, at, column), fill.keys[i]);
    }
}

bool TierFlights::finish_fill(std::uint64_t ticket, std::int64_t arrived, bool forward) noexcept {
    return end_ticket(fills_, ticket, [&](StoreFill& fill) {
        Replica& home = home_of(fill.replica);
        const auto most = static_cast<std::int64_t>(fill.items.size());
        const auto n = static_cast<std::size_t>(std::clamp<std::int64_t>(arrived, 0, most));
        if (fill.place) {
            land_fill(home, fill, n, forward);
        } else {
            give_back_fill(home, fill, 0);
            if (fill.stored_state) land_checkpoint(home, fill, false);
        }
        return true;
    });
}

// Marks the uses of pages between the commits that store them, and with write-back the stores of
// pages that are about to be evicted. Such a store reads pages that stay in the tree until it is
// over. After that, the caller repeats its call, which finds that the pages were offered, and
// evicts them.

void TierFlights::mark_commit(const Sequence& sequence, std::int32_t first, std::int32_t end,
                              const std::vector<DuplicatePage>& duplicates) noexcept {
    auto duplicate = duplicates.begin();
    for (std::int32_t c = first; c < end; ++c) {
        if (duplicate != duplicates.end() && first + duplicate->index == c) {
            rules_.use(sequence.replica, duplicate++->cached);
        } else {
            rules_.enter(sequence.replica, sequence.pages[c]);
        }
    }
}

void TierFlights::expect_hit(SequenceHandle handle) {
    if (rules_.is_selective()) static_cast<void>(standing_of(handle));
}

void TierFlights::note_hit(SequenceHandle handle, const Sequence& sequence,
                           std::int32_t first) noexcept {
    if (rules_.has_marks()) {
        for (std::int32_t c = first; c < sequence.pages.committed(); ++c) {
            rules_.use(sequence.replica, sequence.pages[c]);
        }
    }
    if (rules_.is_selective()) standings_[handle.index].is_due = true;
}

bool TierFlights::holds_back(std::int32_t replica, std::int64_t pages) const noexcept {
    std::int64_t held_back = 0;
    for (const TierFlight& flight : flights_) {
        if (flight.replica == replica) held_back += flight.held_back;
    }
    return held_back > 0 && pages <= held_back;
}

// The number of offered pages at the end of a run, at most `most`.
std::int64_t TierFlights::count_offered(std::int32_t replica, TreePosition end,
                                        std::int64_t most) const noexcept {
    const BlockId* ids = end.node->ids(page_size_);
    std::int64_t n = 0;
    while (n < most && rules_.was_offered(replica, ids[end.node->num_pages - 1 - n])) ++n;
    return n;
}

void TierFlights::store_path(const Path& path, Standing& standing, Transfers& transfers) {
    if (grouping_.is_plain()) return store_pages(path, standing, transfers);
    WindowRow reader;
    reader.prompt_end = path.at.depth;
    const std::int64_t tokens = std::int64_t{path.at.depth} * page_size_;
    for (std::size_t w = 0; w < grouping_.windows().size(); ++w) {
        reader.first[w] = grouping_.first_column(grouping_.windows()[w], tokens);
    }
    store_columns(path, reader, standing, transfers);
}

// Offers a prefix whose end is evicted next. The prefix counts as offered even if it is not stored.
// Returns the number of pages that become available when the store is over; 0 if no store was given
// out.
std::int64_t TierFlights::offer(std::int32_t replica, TreePosition at, Transfers& transfers) {
    Replica& home = home_of(replica);
    rules_.offer(home.tree, replica, at);
    const std::int64_t available = home.num_available();
    const std::size_t before = flights_.size();
    try {
        if (!quotas::may_hold(home, at, 0)) return 0;
        Standing standing;
        store_path({replica, at, {}}, standing, transfers);
        standing.place.release();
    } catch (const std::bad_alloc&) {
        return 0;
    }
    if (flights_.size() == before) return 0;
    const std::int64_t held = available - home.num_available();
    flights_.back().held_back = std::max<std::int64_t>(1, held);
    return flights_.back().held_back;
}

// Offers several runs in one call: a run that is being stored is in use, so the next victim is
// another run.
bool TierFlights::spill(std::int32_t replica, PageNeed need, EvictionGuard guard,
                        Transfers& transfers) {
    if (!rules_.writes_back()) return false;
    if (!grouping_.is_plain()) return spill_columns(replica, need, guard, transfers);
    Replica& home = home_of(replica);
    std::int64_t coming = 0;
    while (home.pool.num_free() + coming < need.pages) {
        const PrefixTree::Victim next = home.tree.next_victim(guard);
        if (next.end.node == nullptr) break;
        const std::int64_t missing = need.pages - home.pool.num_free() - coming;
        const std::int64_t offered =
            count_offered(replica, next.end, std::min(next.num_pages, missing));
        if (offered > 0) {
            home.evict(offered, guard);
        } else {
            coming += offer(replica, next.end, transfers);
        }
    }
    return coming > 0;
}

// Ends the last hold first: a run released without a use is the next to be evicted, so the runs
// keep their order.
void TierFlights::let_go_of_spills(std::uint64_t ticket) noexcept {
    if (!rules_.writes_back()) return;
    for (auto flight = flights_.rbegin(); flight != flights_.rend(); ++flight) {
        if (flight->ticket == ticket && flight->is_spill()) flight->source.end();
    }
}

// Offers one run per call, or one set of windows that were left together: windows that are being
// read have no place in the eviction order.
bool TierFlights::spill_columns(std::int32_t replica, PageNeed need, EvictionGuard guard,
                                Transfers& transfers) {
    Replica& home = home_of(replica);
    for (;;) {
        const bool lacks_pages = home.num_free() < need.pages;
        const bool lacks_columns = home.pool.num_free() < need.columns;
        if (!lacks_pages && !lacks_columns) return false;
        const TreePosition next = home.columns->next_kept(lacks_pages, guard);
        const bool is_new = next.node != nullptr &&
                            !rules_.was_offered(replica, Replica::last_column(home.tree, next));
        if (is_new && offer(replica, next, transfers) > 0) return true;
        if (!home.evict_one(lacks_pages, lacks_columns, guard)) return false;
    }
}

// Integrity checks of the flights to and from the host tiers.

// The prefix of a sequence in the host tier is the start of its prefix in the tree.
void TierFlights::check_sequence(const Sequence& sequence, const Standing& standing) const {
    using detail::require_law;
    if (standing.storing != 0) {
        const auto is_its = [&](const TierFlight& flight) {
            return flight.number == standing.storing && !flight.is_load &&
                   sequences_.find(flight.sequence) == &sequence;
        };
        require_law(!standing.place && std::any_of(flights_.begin(), flights_.end(), is_its),
                    "host tier: the store in flight of a sequence has its place");
    }
    if (!standing.place) return;
    const Replica& home = home_of(sequence.replica);
    const std::int32_t depth = standing.place.depth();
    TreeNode* node = sequence.pages.node();
    require_law(depth <= sequence.pages.committed(),
                "host tier: a sequence stores only committed pages");
    require_law(home.tree.tokens_of({node, depth}, 0) ==
                        home.host->tree.tokens_of({standing.place.node(), depth}, 0) &&
                    PrefixTree::name_of(node) == PrefixTree::name_of(standing.place.node()),
                "host tier: a sequence's prefix is equal in tier and tree");
}

void TierFlights::check_tier(std::int32_t index) const {
    using detail::require_law;
    std::int64_t on_their_way = 0;
    std::unordered_set<BlockId> referenced;  // by at least one load
    const std::vector<bool>& known = storing_[static_cast<std::size_t>(index)];
    std::vector<bool> storing(known.size());
    for (const TierFlight& flight : flights_) {
        if (flight.replica != index) continue;
        if (flight.is_load) {
            const PrefixRef::Pages held = flight.source.references();
            referenced.insert(held.ids, held.ids + held.n);
            continue;
        }
        for (std::size_t i = 0; i < flight.device_pages.size(); ++i) {
            if (flight.host_pages[i] < 0) continue;
            ++on_their_way;
            const auto page = static_cast<std::size_t>(flight.device_pages[i]);
            require_law(!storing[page], "host tier: at most one flight stores a page");
            storing[page] = true;
        }
    }
    require_law(storing == known, "host tier: pages in flight are marked");
    const auto add = [&](BlockId record) { referenced.insert(record); };
    queue_.for_each_reference(index, add);
    for (const StoreFill& fill : fills_) {
        if (fill.replica != index) continue;
        const std::vector<BlockId>& pages = fill.host_pages;
        on_their_way +=
            std::count_if(pages.begin(), pages.end(), [](BlockId id) { return id >= 0; });
    }
    Level& host = *home_of(index).host;
    // Forgotten pages may also have a place in the tier.
    host.tree.for_each_forgotten_run([&](const BlockId* ids, std::int32_t n) {
        for (std::int32_t i = 0; i < n; ++i) referenced.erase(ids[i]);
    });
    host.check_integrity(on_their_way + static_cast<std::int64_t>(referenced.size()));
}

void TierFlights::check_integrity() const {
    if (storing_.empty()) return;
    for (std::size_t i = 0; i < standings_.size(); ++i) {
        const Sequence& sequence = sequences_.entries()[i];
        const Standing& standing = standings_[i];
        detail::require_law(sequence.replica >= 0 || (!standing.place && standing.storing == 0),
                            "host tier: a released sequence has no place");
        if (sequence.replica >= 0) check_sequence(sequence, standing);
    }
    for (std::size_t r = 0; r < storing_.size(); ++r) {
        check_tier(static_cast<std::int32_t>(r));
        if (!grouping_.is_plain()) check_records(static_cast<std::int32_t>(r));
        if (replicas_[r]->stores_states()) check_states(static_cast<std::int32_t>(r));
    }
}

}  // namespace kvcore
