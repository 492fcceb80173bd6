// SPDX-License-Identifier: Apache-2.0
#include "cache/reserve.hpp"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <utility>

#include "kvcore/errors.hpp"
#include "level/quotas.hpp"
#include "support/make_room.hpp"

namespace kvcore {
namespace {

// Guards the page that a hit copies from, the first page after the hit, from eviction.
EvictionGuard guard_of(const Reservation& made) noexcept {
    const FoundHit& hit = made.admission.hit;
    if (!hit.is_partial()) return {};
    const TreePosition& source = made.partial;
    return {PrefixTree::position(source.node, source.depth).node,
            source.depth - hit.match.at.depth};
}

// With `transfers`, the caller copies at once, and both pages are held until the copy ends.
// Without, take_copies hands out the copy before the next kernels run.
void owe_cached_copy(CacheData& state, const PageMove& copy, TreePosition source,
                     Transfers* transfers) noexcept {
    if (transfers == nullptr) return state.copy_list.add(copy);
    Replica& home = *state.replicas[static_cast<std::size_t>(copy.replica)];
    state.copies.add(copy, PageHold::pin(home, source, copy.source),
                     PageHold::share(home, copy.destination), *transfers);
}

// The same for a page that forks hold: the reference that the row gives up holds the page.
void owe_shared_copy(CacheData& state, const PageMove& copy, Transfers* transfers) noexcept {
    Replica& home = *state.replicas[static_cast<std::size_t>(copy.replica)];
    if (transfers == nullptr) {
        state.copy_list.add(copy);
        return home.pool.free(&copy.source, 1);
    }
    state.copies.add(copy, PageHold::adopt(home, copy.source),
                     PageHold::share(home, copy.destination), *transfers);
}

// Fills a new column of a row, which reads it from now on, with pages of all bundles.
void fill_column(CacheData& state, Replica& home, SequenceHandle handle, const PageRow& row,
                 std::int32_t column) {
    home.columns->fill_full(row[column]);
    for (std::size_t w = 0; w < state.grouping.windows().size(); ++w) {
        home.columns->fill(row[column], w);
    }
    state.windows.enter(home, handle, row, column, column + 1);
}

// The next tokens go into pages that the tree or forks may read. The sequence gets pages of its own
// for these columns; the first page begins with a copy of the tokens that the sequence keeps. The
// sequence drops its shared pages after the columns that it needs.
void copy_on_write(CacheData& state, const Departures& departures, Reservation& made,
                   SequenceHandle handle, Sequence& sequence, Transfers* transfers) {
    Replica& home = state.home_of(sequence);
    PageRow& row = sequence.pages;
    const Departures::Writer writer = state.writer(sequence, made.admission.start);
    const std::int32_t first = writer.first_column();
    const std::int32_t kept_tokens = writer.kept_tokens();
    const auto is_sole = [&](std::int32_t column) {
        return departures.is_sole_holder(writer, column);
    };
    const auto give_up = [&](std::int32_t column, BlockId source) {
        if (home.columns != nullptr) fill_column(state, home, handle, row, column);
        const bool is_copied = column == first && kept_tokens > 0;
        const PageMove copy{sequence.replica, source, row[column], kept_tokens, handle};
        if (is_copied && transfers != nullptr) ++sequence.num_pending;
        if (row.is_own(column)) {
            if (is_copied) {
                owe_shared_copy(state, copy, transfers);
            } else {
                home.pool.free(&source, 1);
            }
        } else if (is_copied) {
            owe_cached_copy(state, copy, {row.node(), column + 1}, transfers);
        }
        if (home.columns != nullptr) state.windows.leave_one(home, handle, row, column, source);
    };
    if (home.columns != nullptr) {
        const std::int32_t needed = made.admission.needed;
        if (row.read_only_end() > needed) {
            state.windows.cut(home, handle, row, needed);
            row.drop(home.pool, needed);
        }
    }
    row.copy_on_write(home, first, made.admission.needed, is_sole, give_up);
    made.cut.apply(state, handle, sequence);
}

// Appends the row's new columns, and pages of windows for the tokens that run next.
void append_columns(CacheData& state, const Admission& admission, SequenceHandle handle,
                    Sequence& sequence) {
    Replica& home = state.home_of(sequence);
    PageRow& row = sequence.pages;
    const std::int32_t size = row.size();
    if (admission.appended > 0) row.take(home, admission.appended);
    for (std::int32_t c = size; c < row.size(); ++c) home.columns->fill_full(row[c]);
    state.windows.enter(home, handle, row, size, row.size());
    const std::int32_t end = std::min(row.size(), admission.windowed);
    state.windows.fill(home, handle, row, admission.hit_pages, end);
}

void copy_partial_page(CacheData& state, const Reservation& made, SequenceHandle handle,
                       Sequence& sequence, Transfers* transfers) noexcept {
    const FoundHit& hit = made.admission.hit;
    Replica& home = state.home_of(sequence);
    const TreePosition& source = made.partial;
    BlockId page = 0;
    home.tree.copy_pages(source, source.depth - 1, &page);
    if (transfers != nullptr) ++sequence.num_pending;
    const PageMove copy{sequence.replica, page, sequence.pages[hit.match.at.depth],
                        hit.match.partial_tokens, handle};
    owe_cached_copy(state, copy, source, transfers);
}

// With drafts: copies the state to a slot of its own before the drafts change it. If the state is
// neither in the request's slot nor in a checkpoint yet, the copy is made later.
void keep_state(CacheData& state, const Reservation& made, const Sequence& sequence,
                SequenceHandle handle, Transfers* transfers) noexcept {
    RecurrentState& row = state.states.of(handle);
    if (row.kept == RecurrentSlots::kNone) row.kept = state.home_of(sequence).states->take();
    if (made.admission.hit.is_taken() && !made.checkpoint) return;
    const bool is_copied = made.checkpoint && made.checkpoint.slot() != row.slot;
    const RecurrentSlots::Slot source = is_copied ? made.checkpoint.slot() : row.slot;
    state.state_copies.add({sequence.replica, source, row.kept}, {}, handle, transfers, !is_copied);
    row.kept_at = made.admission.start;
}

// Takes the slot that the request computes in from now on, with the state at the end of its hit. If
// only the checkpoint of the hit is available, the request takes over its slot.
void take_state(CacheData& state, Reservation& made, const Sequence& sequence,
                const RequestView& request, Transfers* transfers) {
    RecurrentSlots& states = *state.home_of(sequence).states;
    const Admission& admission = made.admission;
    RecurrentState& row = state.states.of(request.sequence);
    const RecurrentSlots::Slot checkpoint = made.checkpoint.slot();
    const bool takes_over =
        row.slot == RecurrentSlots::kNone && states.num_available() < admission.slots;
    if (takes_over) {
        states.take_over(checkpoint);
        row.slot = checkpoint;
    } else if (row.slot == RecurrentSlots::kNone) {
        row.slot = states.take();
    }
    if (made.checkpoint || (made.load != nullptr && made.load->stored_state)) states.count_hit();
    if (made.checkpoint) {
        if (!takes_over) {
            states.renew(checkpoint);
            state.state_copies.add({sequence.replica, checkpoint, row.slot}, {}, request.sequence,
                                   transfers);
        }
    }
    if (!sequence.is_sealed()) row.prompt_end = state.states.prompt_end(request.end);
    if (admission.hit.branch >= 0) row.branch = admission.hit.branch;
    if (admission.resumes) {
        if (row.kept_at > 0 && !row.is_restored) {
            state.state_copies.add({sequence.replica, row.kept, row.slot}, {}, request.sequence,
                                   transfers);
        }
        state.states.restore(request.sequence);
    } else if (row.at != admission.start && (admission.hit.is_taken() || admission.start == 0)) {
        state.states.set_back(request.sequence, admission.start);
    }
    if (admission.keeps) keep_state(state, made, sequence, request.sequence, transfers);
    made.checkpoint.leave();
}

void count(CacheData& state, const Admission& admission, const RequestView& request,
           Sequence& sequence) noexcept {
    const SequenceHandle handle = request.sequence;
    const TokenSums sums = state.tokens_of(sequence, handle);
    const FoundHit& hit = admission.hit;
    state.counts.see(handle, request);
    state.counts.settle(handle, sequence);
    state.counts.want(handle, hit.wanted);
    state.count_generated(handle, sequence);
    sequence.written =
        hit.is_taken() ? admission.start : std::min(sequence.written, admission.start);
    if (hit.is_taken()) {
        state.counts.count_hit(sums, handle, sequence, hit.tokens, hit.match.partial_tokens);
    }
    if (!sequence.is_sealed()) {
        if (hit.is_taken()) sequence.reuse = Reuse::kOpen;
        if (admission.declines_partial) sequence.reuse = Reuse::kDeclined;
    }
    state.counts.count_input(sums, handle, sequence, admission.start, admission.active);
}

}  // namespace

void Reserver::make_room_for_copies(std::size_t n, Transfers* transfers) {
    if (transfers == nullptr) {
        state_.copy_list.make_room(n);
    } else {
        state_.copies.make_room(*transfers, n);
    }
    // A state is copied to the slot of a request, and to the one in which it is kept.
    if (state_.states.exist()) state_.state_copies.make_room(2 * n, transfers);
}

Reservation Reserver::prepare(const Admission& admission, Sequence& sequence,
                              const RequestView& request, Transfers* transfers) {
    Replica& home = state_.home_of(sequence);
    PrefixTree& tree = home.tree;
    PageRow& row = sequence.pages;
    const FoundHit& hit = admission.hit;
    const std::int32_t length = std::max(admission.hit_pages, admission.needed);
    if (length > row.size()) row.make_room(static_cast<std::size_t>(length - row.size()));
    Reservation made(admission);
    made.partial = hit.match.partial;
    quotas::find_idle(home, hit, made.idle);
    if (hit.shares()) {
        made.place = TreePin(tree, tree.split(hit.match.at));
        // A hold on the source page holds its whole run, so the run is cut.
        if (home.owners != nullptr && hit.is_partial()) {
            made.partial.node = tree.split(hit.match.partial);
        }
        if (!hit.ends_below()) made.checkpoint = home.hold_state(hit.match.at);
        made.windows = WindowHold(home, hit.match.at, hit.tokens);
        if (hit.is_partial()) {
            const std::int32_t source = hit.match.at.depth;
            made.source = WindowHold(home, hit.match.partial, hit.tokens, source);
        }
    } else if (row.node() == nullptr) {
        made.place = TreePin(tree, tree.open_namespace(request.name_space));
    }
    const auto first = static_cast<std::int32_t>(admission.start / state_.config.page_size);
    const bool writes_read_only = row.read_only_end() > first;
    if (!made.place && writes_read_only) {
        made.cut = RowCut(state_, request.sequence, sequence, first);
    }
    // At most one page is copied: the last page of a hit, or a page that is written again.
    if (hit.is_partial() || writes_read_only || made.checkpoint || admission.keeps ||
        admission.resumes) {
        make_room_for_copies(1, transfers);
    }
    if (transfers != nullptr) make_room(transfers->moved, 1);
    if (hit.shares()) state_.flights.expect_hit(request.sequence);
    if (hit.below.node != nullptr) {
        made.load = state_.flights.prepare_load(request.sequence, sequence.replica,
                                                {hit.match.at, hit.below, hit.tokens},
                                                !made.checkpoint, *transfers);
    }
    return made;
}

bool Reserver::spill(const Reservation& made, const Sequence& sequence, Transfers& transfers) {
    return state_.flights.spill(sequence.replica, made.admission.need(), guard_of(made), transfers);
}

void Reserver::evict(const Reservation& made, const Sequence& sequence, SequenceHandle handle) {
    Replica& home = state_.home_of(sequence);
    if (home.states != nullptr) {
        const bool has_slot = state_.states.of(handle).slot != RecurrentSlots::kNone ||
                              home.states->num_available() > 0 || made.checkpoint.is_sole();
        detail::require_law(has_slot, "reserve: an admitted state slot is available");
    }
    const PageNeed need = need_now(home, sequence.pages, made.admission);
    home.prepare_room(need);
    home.make_room(need, guard_of(made));
}

bool Reserver::apply(Reservation& made, Sequence& sequence, RequestView& request, std::int64_t row,
                     Transfers* transfers) {
    const Admission& admission = made.admission;
    Replica& home = state_.home_of(sequence);
    PageRow& pages = sequence.pages;
    const SequenceHandle handle = request.sequence;
    home.set_taker(state_.tenants.of(handle));
    if (admission.hit.shares()) {
        // The run in which the hit was found may be gone: the end of the hit is pinned.
        const TreePosition hit{made.place.node(), admission.hit.match.at.depth};
        const std::int32_t columns = admission.hit_pages;
        home.tree.use(hit, pages.committed());
        if (home.keeps_by_priority) {
            state_.priorities.retain(home.tree, handle, hit, pages.committed());
        }
        if (home.columns != nullptr) {
            state_.windows.leave(home, handle, pages, 0, std::min(columns, pages.size()));
        }
        const std::int32_t first = pages.committed();
        pages.take_hit(home, std::move(made.place), columns);
        state_.flights.note_hit(handle, sequence, first);
        if (home.columns != nullptr) {
            const bool takes_over =
                pages.own_duplicates().empty();  // own duplicates differ from the hit's columns
            state_.windows.take_hit(home, handle, pages, columns, admission.start, takes_over);
            if (takes_over) made.windows.hand_over();
            made.windows.leave();
        }
    } else {
        if (pages.node() == nullptr) pages.place_at(std::move(made.place));
        const bool is_all_below = home.columns != nullptr && admission.hit.is_taken();
        if (is_all_below) {
            state_.windows.take_hit(home, handle, pages, 0, admission.start, false);
        }
    }
    if (home.columns != nullptr) {
        append_columns(state_, admission, handle, sequence);
        if (!sequence.is_sealed()) {
            state_.windows.set_prompt(handle, request.end);
        }
    } else if (admission.appended > 0) {
        pages.take(home, admission.appended);
    }
    if (pages.read_only_end() > admission.start / state_.config.page_size) {
        copy_on_write(state_, departures_, made, handle, sequence, transfers);
    }
    home.note_peak();  // before a copy holds its source for a moment
    if (admission.hit.is_partial()) {
        copy_partial_page(state_, made, handle, sequence, transfers);
    }
    if (!made.idle.empty()) quotas::share_out(home, made.idle, state_.tenants.of(handle));
    if (home.states != nullptr) take_state(state_, made, sequence, request, transfers);
    if (made.load != nullptr) {
        const bool has_state = home.states != nullptr;
        state_.flights.owe_load(*made.load, sequence,
                                has_state ? state_.states.of(handle).slot : RecurrentSlots::kNone,
                                *transfers);
    }
    count(state_, admission, request, sequence);
    const bool has_moved = request.start != admission.start || request.active != admission.active;
    if (has_moved && transfers != nullptr) {
        transfers->moved.push_back({row, request.start, request.active});
    }
    request.start = admission.start;
    request.active = admission.active;
    return has_moved;
}

namespace {

FetchResult no_space(std::int64_t row, std::int64_t needed, std::int64_t available) {
    FetchResult result;
    result.status = FetchStatus::kNoSpace;
    result.row = row;
    result.needed = needed;
    result.available = available;
    return result;
}

}  // namespace

bool JointReserver::reserve(const BatchRows& rows, const RequestBatch& batch,
                            const std::vector<std::int64_t>& missing, std::int64_t num_steps,
                            Transfers* transfers, FetchResult& result) {
    const Call call{rows, batch, missing, num_steps, transfers};
    sort(call);
    if (try_reserve(call, result)) return true;
    if (result.status != FetchStatus::kNoSpace || result.lacks_slot) return false;
    const std::int64_t lacking = result.is_over_quota ? 0 : result.needed - result.available;
    if (state_.flights.holds_back(rows[result.row].replica, lacking))
        result.status = FetchStatus::kPending;
    return false;
}

bool JointReserver::try_reserve(const Call& call, FetchResult& result) {
    if (joining_.empty()) {
        if (!find_supply(call, result) || !has_columns(call, {}, result)) return false;
        std::vector<Reservation> none;
        if (!state_.config.quotas.empty() && !heed_quotas(call, none, result)) return false;
        prepare_growth(call);
        if (spill(call, none, result)) return false;
        prepare_room(call, none);
        evict_for_growth();
        grow(call);
        return true;
    }
    return call.missing.size() > 1 ? reserve_together(call, result) : reserve_one(call, result);
}

// Pages and columns that a replica needs before the first row is applied. A row makes pages free
// only for later rows, so the need is the largest sum over the first rows. Called after
// `prepare_growth`.
PageNeed JointReserver::need_of(std::int32_t replica, const Call& call,
                                const std::vector<Reservation>& made) const noexcept {
    PageNeed need;
    PageNeed taken;
    const auto add = [&](const PageNeed& more) {
        taken.pages += more.pages;
        taken.columns += more.columns;
        need.pages = std::max(need.pages, taken.pages);
        need.columns = std::max(need.columns, taken.columns);
    };
    for (std::size_t k = 0; k < made.size(); ++k) {
        if (call.rows[joining_[k]].replica == replica) add(made[k].admission.need());
    }
    const std::int64_t wanted = supply_[static_cast<std::size_t>(replica)].wanted;
    add({wanted * state_.grouping.num_lanes(), wanted});
    return need;
}

// Called after `spill`, before any other change: checks that all rows can get their pages, and gets
// memory for them. Each row evicts its pages when its turn comes.
void JointReserver::prepare_room(const Call& call, const std::vector<Reservation>& made) {
    for (std::int32_t r = 0; r < state_.config.num_replicas; ++r) {
        state_.replicas[static_cast<std::size_t>(r)]->prepare_room(need_of(r, call, made));
    }
}

void JointReserver::evict_for_growth() {
    for (std::size_t r = 0; r < state_.replicas.size(); ++r) {
        const std::int64_t wanted = supply_[r].wanted;
        state_.replicas[r]->make_room({wanted * state_.grouping.num_lanes(), wanted});
    }
}

// Stores pages that rows will evict, if they must be stored first: see Reserver::spill.
bool JointReserver::spill(const Call& call, const std::vector<Reservation>& made,
                          FetchResult& result) {
    if (call.transfers == nullptr || !state_.flights.rules().writes_back()) return false;
    for (std::int32_t r = 0; r < state_.config.num_replicas; ++r) {
        const PageNeed need = need_of(r, call, made);
        if (!state_.flights.spill(r, need, {}, *call.transfers)) continue;
        result.status = FetchStatus::kPending;
        result.row = call.missing[0];
    }
    return result.status == FetchStatus::kPending;
}

// Separates the growing rows. A growing row takes no hit, does not begin again and replaces no
// page: it needs only more pages, of all bundles, as most rows of a decode step do. This stays true
// while other rows are reserved.
void JointReserver::sort(const Call& call) {
    growing_.clear();
    joining_.clear();
    const std::int64_t page_size = state_.config.page_size;
    for (const std::int64_t row : call.missing) {
        const Sequence& sequence = call.rows[row];
        const bool only_grows = !state_.states.exist() && sequence.is_sealed() &&
                                !sequence.pages.empty() &&
                                call.batch[row].start >= sequence.pages.read_only_end() * page_size;
        const Growth growth{row, only_grows ? missing_columns(call, row) : 0};
        if (only_grows && (state_.grouping.is_plain() || grows_evenly(call, growth))) {
            growing_.push_back(growth);
        } else {
            joining_.push_back(row);
        }
    }
}

// With groups: returns true if all new columns also get pages of all windows. For other rows the
// Admitter decides which columns get them.
bool JointReserver::grows_evenly(const Call& call, Growth growth) const {
    const RequestView& request = call.batch[growth.row];
    const std::int64_t tokens = request.active + call.num_steps - 1;
    const PageRow& pages = call.rows[growth.row].pages;
    const std::int64_t in_front = pages.size() + growth.columns - 1;
    return state_.config.quotas.empty() && tokens > in_front * state_.config.page_size &&
           state_.windows.grows_evenly(request.sequence, pages);
}

// Reserves the only missing row, as `OrderedReserver::reserve` does.
bool JointReserver::reserve_one(const Call& call, FetchResult& result) {
    const std::int64_t row = call.missing[0];
    Sequence& sequence = call.rows[row];
    RequestView& request = call.batch[row];
    Asked asked{call.num_steps};
    asked.runs = true;
    const Admission admission = admitter_.admit(sequence, request, asked);
    rules::require_one_step(request, admission, call.num_steps, row);
    if (!admission.fits) {
        if (admission.is_over_quota) count_refusal(call, row);
        result = no_space(row, admission.new_pages(), admission.available);
        result.is_over_quota = admission.is_over_quota;
        result.lacks_slot = admission.lacks_slot;
        return false;
    }
    Reservation made = reserver_.prepare(admission, sequence, request, call.transfers);
    if (call.transfers != nullptr && reserver_.spill(made, sequence, *call.transfers)) {
        result.status = FetchStatus::kPending;
        result.row = row;
        return false;
    }
    reserver_.evict(made, sequence, request.sequence);
    result.has_moved = reserver_.apply(made, sequence, request, row, call.transfers);
    state_.home_of(sequence).end_room();
    return true;
}

std::int64_t JointReserver::missing_columns(const Call& call, std::int64_t row) const {
    const RequestView& request = call.batch[row];
    const std::int64_t tokens = state_.tokens_to_hold(request, request.active, call.num_steps);
    return ceil_div(tokens, state_.config.page_size) - call.rows[row].pages.size();
}

// Returns true if each replica has enough free or evictable pages for its growing rows. Else stores
// the first row without enough pages in `result`.
bool JointReserver::find_supply(const Call& call, FetchResult& result) {
    supply_.clear();
    for (const auto& replica : state_.replicas) supply_.push_back({replica->num_free()});
    for (const Growth& growth : growing_) {
        const Sequence& sequence = call.rows[growth.row];
        Supply& supply = supply_[static_cast<std::size_t>(sequence.replica)];
        const std::int64_t pages = pages_of(growth);
        if (pages > supply.left && !supply.has_evictable) {
            supply.has_evictable = true;
            supply.left += state_.home_of(sequence).num_evictable();
        }
        if (pages > supply.left) {
            result = no_space(growth.row, pages, supply.left);
            return false;
        }
        supply.left -= pages;
    }
    return true;
}

// Counts the needs of the growing rows and gets memory for them, so that `grow` cannot run out of
// it.
void JointReserver::prepare_growth(const Call& call) {
    supply_.assign(state_.replicas.size(), {});
    std::int64_t wanted = 0;
    for (const auto& [row, columns] : growing_) {
        Sequence& sequence = call.rows[row];
        sequence.pages.make_room(static_cast<std::size_t>(columns));
        supply_[static_cast<std::size_t>(sequence.replica)].wanted += columns;
        wanted += columns;
    }
    taken_.reserve(static_cast<std::size_t>(wanted));
}

void JointReserver::grow(const Call& call) {
    if (!state_.grouping.is_plain()) return grow_columns(call);
    taken_.clear();
    for (std::size_t r = 0; r < supply_.size(); ++r) {
        Supply& supply = supply_[r];
        Replica& replica = *state_.replicas[r];
        replica.require_pages(supply.wanted);
        supply.given = taken_.size();
        taken_.resize(taken_.size() + static_cast<std::size_t>(supply.wanted));
        replica.take_pages(supply.wanted, taken_.data() + supply.given);
        replica.note_peak();
    }
    for (const auto& [row, pages] : growing_) {
        Sequence& sequence = call.rows[row];
        std::size_t& given = supply_[static_cast<std::size_t>(sequence.replica)].given;
        if (PageOwners* owners = state_.home_of(sequence).owners.get()) {
            owners->give(taken_.data() + given, pages, state_.tenants.of(call.batch[row].sequence));
        }
        sequence.pages.append(taken_.data() + given, pages);
        given += static_cast<std::size_t>(pages);
    }
}

void JointReserver::grow_columns(const Call& call) {
    for (const auto& [row, columns] : growing_) {
        Sequence& sequence = call.rows[row];
        Replica& home = state_.home_of(sequence);
        PageRow& pages = sequence.pages;
        const std::int32_t size = pages.size();
        pages.take(home, columns);
        state_.windows.grow(home, call.batch[row].sequence, pages, size);
    }
    for (const auto& replica : state_.replicas) replica->note_peak();
}

// The admission of each joining row by itself, except that forks of one page consider each other.
std::vector<Admission> JointReserver::admit_together(const Call& call, bool allow_partial) {
    const Departures::Call scope(departures_);
    std::vector<Admission> admissions;
    admissions.reserve(joining_.size());
    for (const std::int64_t row : joining_) {
        const Sequence& sequence = call.rows[row];
        Asked asked{call.num_steps};
        asked.runs = true;
        admissions.push_back(admitter_.admit(sequence, call.batch[row], asked, allow_partial));
        rules::require_one_step(call.batch[row], admissions.back(), call.num_steps, row);
        if (!allow_partial) admissions.back().declines_partial = true;
        departures_.note(state_.writer(sequence, admissions.back().start),
                         call.transfers != nullptr);
    }
    return admissions;
}

// Checks whether the pages left in each replica are enough for all missing rows, in the order of
// the batch. Else returns the first row that gets no pages.
FetchResult JointReserver::share_out(std::vector<std::int64_t> left, const Call& call,
                                     const std::vector<Admission>& admissions) const {
    auto joining = joining_.begin();
    auto growing = growing_.begin();
    auto admission = admissions.begin();
    for (const std::int64_t row : call.missing) {
        std::int64_t needed = 0;
        if (joining != joining_.end() && *joining == row) {
            needed = admission->new_pages() - admission->returned;
            ++joining;
            ++admission;
        } else {
            needed = pages_of(*growing++);
        }
        std::int64_t& available = left[static_cast<std::size_t>(call.rows[row].replica)];
        if (needed > available) {
            return no_space(row, needed, available);
        }
        available -= needed;
    }
    return {};
}

// With groups: columns may be missing although pages are available. Called when all hits are held.
bool JointReserver::has_columns(const Call& call, const std::vector<Admission>& admissions,
                                FetchResult& result) const {
    if (state_.grouping.is_plain()) return true;
    std::vector<std::int64_t> left;
    for (const auto& replica : state_.replicas) {
        left.push_back(replica->pool.num_free() + replica->tree.num_evictable());
    }
    for (std::size_t k = 0; k < joining_.size(); ++k) {
        std::int64_t& available = left[static_cast<std::size_t>(call.rows[joining_[k]].replica)];
        available -= admissions[k].appended + admissions[k].replaced + admissions[k].patched;
        if (available >= 0) continue;
        const std::int64_t pages = admissions[k].new_pages();
        result = no_space(joining_[k], pages, admissions[k].available);
        return false;
    }
    for (const Growth& growth : growing_) {
        const Sequence& sequence = call.rows[growth.row];
        std::int64_t& available = left[static_cast<std::size_t>(sequence.replica)];
        available -= growth.columns;
        if (available >= 0) continue;
        const std::int64_t could_have = state_.home_of(sequence).num_available();
        result = no_space(growth.row, pages_of(growth), could_have);
        return false;
    }
    return true;
}

// With states: checks that all rows that need slots get them, in their order. A row may take over
// the checkpoint of its hit if no other request holds the hit. Called when all hits are held.
bool JointReserver::has_slots(const Call& call, const std::vector<Reservation>& made,
                              FetchResult& result) const {
    if (!state_.states.exist()) return true;
    std::vector<std::int64_t> left;
    for (const auto& replica : state_.replicas) left.push_back(replica->states->num_available());
    for (std::size_t k = 0; k < joining_.size(); ++k) {
        const std::int64_t row = joining_[k];
        const Admission& admission = made[k].admission;
        std::int64_t& available = left[static_cast<std::size_t>(call.rows[row].replica)];
        const bool takes_over =
            state_.states.of(call.batch[row].sequence).slot == RecurrentSlots::kNone &&
            available < admission.slots && made[k].checkpoint.is_sole();
        available -= admission.slots - (takes_over ? 1 : 0);
        if (available >= 0) continue;
        result = no_space(row, admission.new_pages(), admission.available);
        result.lacks_slot = true;
        return false;
    }
    return true;
}

// With groups: returns true if columns must be evicted although there are pages.
bool JointReserver::lacks_columns(const Call& call,
                                  const std::vector<Admission>& admissions) const noexcept {
    if (state_.grouping.is_plain()) return false;
    for (std::size_t r = 0; r < state_.replicas.size(); ++r) {
        std::int64_t left = state_.replicas[r]->pool.num_free();
        for (std::size_t k = 0; k < admissions.size(); ++k) {
            const bool is_here = call.rows[joining_[k]].replica == static_cast<std::int32_t>(r);
            if (is_here) left -= admissions[k].need().columns;
        }
        for (const Growth& growth : growing_) {
            const bool is_here = call.rows[growth.row].replica == static_cast<std::int32_t>(r);
            if (is_here) left -= growth.columns;
        }
        if (left < 0) return true;
    }
    return false;
}

std::vector<Reservation> JointReserver::prepare(const Call& call,
                                                const std::vector<Admission>& admissions) {
    const std::size_t n = joining_.size();
    std::vector<Reservation> made;
    made.reserve(n);
    reserver_.make_room_for_copies(n, call.transfers);
    if (call.transfers != nullptr) make_room(call.transfers->moved, n);
    std::size_t loads = 0;
    std::size_t pages = 0;
    for (std::size_t k = 0; k < n; ++k) {
        const std::int64_t row = joining_[k];
        made.push_back(
            reserver_.prepare(admissions[k], call.rows[row], call.batch[row], call.transfers));
        if (made.back().load == nullptr) continue;
        ++loads;
        pages += static_cast<std::size_t>(made.back().load->num_pages);
    }
    if (loads > 0) state_.flights.make_room_for_loads(loads, pages, *call.transfers);
    return made;
}

// Returns true if quotas allow the pages of the batch, in the order in which they are applied. All
// hits are held already; source pages of copies are not held yet. Else stores the first row that
// quotas refuse in `result`.
bool JointReserver::heed_quotas(const Call& call, std::vector<Reservation>& made,
                                FetchResult& result) {
    std::vector<QuotaTrial> trials;
    for (const auto& replica : state_.replicas) trials.emplace_back(*replica);
    for (std::size_t k = 0; k < made.size(); ++k) {
        const auto home = static_cast<std::size_t>(call.rows[joining_[k]].replica);
        trials[home].hold_once(made[k].idle);
    }
    FetchResult refusal;  // unless a later row makes room for it
    const auto take = [&](std::int64_t row, std::int64_t pages, const Reservation* reservation) {
        const Sequence& sequence = call.rows[row];
        const Owner owner = state_.tenants.of(call.batch[row].sequence);
        QuotaTrial& trial = trials[static_cast<std::size_t>(sequence.replica)];
        if (reservation != nullptr) {
            quotas::for_each_returned_page(state_.home_of(sequence), sequence.pages,
                                           reservation->admission,
                                           [&](BlockId page) { trial.give_back(page); });
        }
        trial.take(owner, pages);
        if (reservation != nullptr) {
            for (const BlockId page : reservation->idle) trial.share_out(page, owner);
        }
        if (trial.is_lawful() || refusal.is_over_quota) return;
        refusal = no_space(row, pages, trial.room(owner, pages));
        refusal.is_over_quota = true;
    };
    for (std::size_t k = 0; k < made.size(); ++k) {
        take(joining_[k], made[k].admission.new_pages(), &made[k]);
    }
    for (const Growth& growth : growing_) take(growth.row, pages_of(growth), nullptr);
    const bool is_lawful = std::all_of(trials.begin(), trials.end(),
                                       [](const QuotaTrial& trial) { return trial.is_lawful(); });
    if (is_lawful) return true;
    count_refusal(call, refusal.row);
    result = refusal;
    return false;
}

void JointReserver::count_refusal(const Call& call, std::int64_t row) noexcept {
    const Owner owner = state_.tenants.of(call.batch[row].sequence);
    state_.home_of(call.rows[row]).owners->tally(owner).refused += 1;
}

// Reserves several rows against one state, so that the batch gets all of its pages or no page. All
// hits are pinned first, so the evictable pages are exactly the pages that the batch may evict.
// Partial hits are dropped if pages must be evicted, because one row could evict the source of
// another. Rows that only grow come last, after other rows have given pages back.
bool JointReserver::reserve_together(const Call& call, FetchResult& result) {
    std::vector<std::int64_t> left;
    for (const auto& replica : state_.replicas) left.push_back(replica->num_free());
    std::vector<Admission> admissions = admit_together(call, true);
    const bool evicts = share_out(left, call, admissions).status != FetchStatus::kOk ||
                        lacks_columns(call, admissions);
    if (evicts) admissions = admit_together(call, false);
    std::vector<Reservation> made = prepare(call, admissions);
    prepare_growth(call);
    if (evicts) {
        for (std::size_t r = 0; r < left.size(); ++r) left[r] = state_.replicas[r]->num_available();
        const FetchResult shared = share_out(std::move(left), call, admissions);
        if (shared.status != FetchStatus::kOk) {
            result = shared;
            return false;
        }
    }
    if (!has_columns(call, admissions, result) || !has_slots(call, made, result)) return false;
    if (!state_.config.quotas.empty() && !heed_quotas(call, made, result)) return false;
    if (evicts && spill(call, made, result)) return false;
    prepare_room(call, made);
    for (std::size_t k = 0; k < joining_.size(); ++k) {
        const std::int64_t row = joining_[k];
        Sequence& sequence = call.rows[row];
        reserver_.evict(made[k], sequence, call.batch[row].sequence);
        result.has_moved |=
            reserver_.apply(made[k], sequence, call.batch[row], row, call.transfers);
        state_.home_of(sequence).end_room();
    }
    evict_for_growth();
    grow(call);
    return true;
}

namespace {

// Restores the read-only columns that a query changed, also if it throws.
struct Thaw {
    PageRow& row;
    const std::int32_t read_only_end;

    ~Thaw() { row.make_writable(read_only_end); }
};

}  // namespace

ReserveStatus OrderedReserver::take(const Admission& admission, Sequence& sequence,
                                    RequestView& request, std::int64_t row, Transfers* transfers) {
    // Pages and checkpoints that earlier rows copy from are held, but this row may have to take
    // them.
    const bool is_short = admission.evicted > 0 || admission.is_over_quota || admission.lacks_slot;
    if (is_short && transfers != nullptr && !transfers->empty()) return ReserveStatus::kPending;
    if (!admission.fits) {
        const std::int64_t lacking = admission.is_over_quota ? 0 : admission.lacking;
        const bool is_held_back =
            !admission.lacks_slot && state_.flights.holds_back(sequence.replica, lacking);
        if (is_held_back && transfers != nullptr) return ReserveStatus::kPending;
        if (admission.is_over_quota) {
            const Owner owner = state_.tenants.of(request.sequence);
            state_.home_of(sequence).owners->tally(owner).refused += 1;
        }
        return ReserveStatus::kNoSpace;
    }
    Reservation made = reserver_.prepare(admission, sequence, request, transfers);
    if (transfers != nullptr && reserver_.spill(made, sequence, *transfers)) {
        return ReserveStatus::kPending;
    }
    reserver_.evict(made, sequence, request.sequence);
    reserver_.apply(made, sequence, request, row, transfers);
    state_.home_of(sequence).end_room();
    return ReserveStatus::kOk;
}

ReserveStatus OrderedReserver::reserve_row(RequestView& request, const Asked& asked,
                                           std::int64_t row, Transfers* transfers) {
    const std::int64_t num_steps = asked.num_steps;
    Sequence& sequence = rows_[row];
    if (sequence.num_pending > 0) return ReserveStatus::kPending;
    if (!state_.copies.empty()) state_.protect_read_pages(sequence, request.start);
    const std::int32_t page_size = state_.config.page_size;
    if (sequence.is_sealed() && !asked.options.has_margin() &&
        JointReserver::is_reserved(sequence.pages, request, num_steps, page_size,
                                   state_.config.reserve_chunks) &&
        (state_.grouping.is_plain() ||
         state_.windows.has_reserved(request.sequence, request.active + num_steps - 1)) &&
        (!state_.states.exist() || state_.states.is_ready(request, num_steps))) {
        sequence.written = std::min(sequence.written, request.start);
        state_.counts.count_input(state_.tokens_of(sequence, request.sequence), request.sequence,
                                  sequence, request.start, request.active);
        return ReserveStatus::kOk;
    }
    const Admission admission = admitter_.admit(sequence, request, asked);
    if (admission.is_cut && num_steps > 1 && row > 0) return ReserveStatus::kPending;
    rules::require_one_step(request, admission, num_steps, row);
    return take(admission, sequence, request, row, transfers);
}

// Throws the errors of every row before any row is reserved. An earlier row may evict the hit of a
// later row; the call stops before that later row.
void OrderedReserver::require_one_step(const RequestBatch& batch, std::int64_t num_steps) const {
    for (std::int64_t i = 0; i < batch.size(); ++i) {
        const RequestView& request = batch[i];
        const Asked asked{num_steps};
        rules::require_one_step(request, admitter_.admit(rows_[i], request, asked), num_steps, i);
    }
}

BatchReserve OrderedReserver::reserve(const RequestBatch& batch, std::int64_t num_steps,
                                      Transfers* transfers, const ReserveOptions& options) {
    if (transfers != nullptr || state_.config.host_pages > 0) {
        rules::require_transfers(state_, transfers);
    }
    rows_.check(batch, num_steps);
    if (options.must_fit > 0) {
        for (std::int64_t i = 0; i < batch.size(); ++i) {
            rules::require_fit(state_, rows_[i], batch[i], options, i);
        }
    }
    if (num_steps > 1 && state_.states.exist()) require_one_step(batch, num_steps);
    const OwedCopies::Call scope(state_.copies);
    const Asked asked{num_steps, options};
    for (std::int64_t i = 0; i < batch.size(); ++i) {
        try {
            const ReserveStatus status = reserve_row(batch[i], asked, i, transfers);
            if (status != ReserveStatus::kOk) return {i, status};
        } catch (const std::bad_alloc&) {
            if (i == 0) throw;
            return {i, ReserveStatus::kPending};  // a call that begins with this row throws
        }
    }
    return {batch.size(), ReserveStatus::kOk};
}

// Reserves as after a hit without cached pages. Only pages that must be evicted are copied.
ReserveStatus OrderedReserver::begin_at(RequestView& request, std::int64_t n,
                                        Transfers* transfers) {
    rows_.check({&request, 1}, 1);
    Sequence& sequence = rows_[0];
    if (!sequence.pages.empty() || sequence.is_sealed()) {
        throw std::invalid_argument(detail::concat("the sequence has ", sequence.pages.size(),
                                                   " pages or was fetched, must be newly "
                                                   "claimed; release it and claim again"));
    }
    if (n < 1 || n >= request.end) {
        throw std::invalid_argument(detail::concat("the sequence cannot begin at token ", n,
                                                   ", must be 1 .. ", request.end - 1, ": of ",
                                                   request.end, " tokens at least one must run"));
    }
    const OwedCopies::Call scope(state_.copies);
    FoundHit brought;
    brought.tokens = n;
    const Admission admission = admitter_.admit(brought, sequence, request, 1);
    const ReserveStatus status = take(admission, sequence, request, 0, transfers);
    if (status == ReserveStatus::kOk) sequence.reuse = Reuse::kSealed;
    return status;
}

bool OrderedReserver::can_ever_fit(const Sequence& sequence, const RequestView& request,
                                   const Asked& asked) const {
    if (request.end > state_.most_tokens(asked.num_steps)) return false;
    const std::int64_t tokens = std::max(request.end, asked.options.must_fit);
    if (tokens > request.end && tokens > state_.most_tokens(1)) return false;
    if (state_.config.quotas.empty()) return true;
    const Owner owner =
        Asked::is_claimed(request) ? state_.tenants.of(request.sequence) : asked.stranger;
    const std::int64_t shared =
        asked.options.must_fit > 0 ? asked.options.max_hit : ReserveOptions::kUnlimited;
    return !quotas::exceeds_ceiling(state_, sequence, request, tokens, owner, shared);
}

ReservePlan OrderedReserver::plan(const RequestView& request, const Asked& asked) const {
    rules::require_steps(asked.num_steps);
    Sequence& sequence = state_.sequences.at(request.sequence);
    if (!rules::has_legal_indices(request)) rules::refuse_indices(request, 0);
    rules::require_namespace(state_.config, sequence, request, 0);
    rules::require_windows(state_, sequence, request, 0);
    const Thaw thaw{sequence.pages, sequence.pages.read_only_end()};
    state_.protect_read_pages(sequence, request.start);
    return plan(sequence, request, asked);
}

ReservePlan OrderedReserver::plan(std::int32_t replica, const RequestView& request,
                                  const Asked& asked) const {
    rules::require_steps(asked.num_steps);
    static_cast<void>(state_.replica_at(replica));
    RequestView unclaimed = request;
    unclaimed.sequence = {};
    if (!rules::has_legal_indices(unclaimed)) rules::refuse_indices(unclaimed, 0);
    Sequence fresh;
    fresh.replica = static_cast<std::int16_t>(replica);
    return plan(fresh, unclaimed, asked);
}

ReservePlan OrderedReserver::plan(const Sequence& sequence, const RequestView& request,
                                  const Asked& asked) const {
    if (!can_ever_fit(sequence, request, asked)) return {};
    const Admission admission = admitter_.admit(sequence, request, asked);
    rules::require_one_step(request, admission, asked.num_steps, 0);
    return {admission.hit.is_taken() ? admission.hit.tokens - sequence.hit_tokens : 0,
            admission.new_pages(),
            admission.evicted,
            admission.hit.match.partial_tokens,
            admission.fits,
            admission.active,
            admitter_.count_adopted(state_.home_of(sequence), admission.hit)};
}

HeldHit OrderedReserver::match(const RequestView& request) const {
    const Sequence& sequence = state_.sequences.at(request.sequence);
    if (!rules::has_legal_indices(request)) rules::refuse_indices(request, 0);
    rules::require_namespace(state_.config, sequence, request, 0);
    rules::require_windows(state_, sequence, request, 0);
    return {state_, admitter_.find_hit(sequence, request), sequence, request};
}

ReserveStatus OrderedReserver::allocate(HeldHit& hit, RequestView& request, std::int64_t n,
                                        Transfers* transfers) {
    if (transfers != nullptr || state_.config.host_pages > 0) {
        rules::require_transfers(state_, transfers);
    }
    RequestView view = request;
    view.reserve_to = n;
    rows_.check({&view, 1}, 1);
    Sequence& sequence = rows_[0];
    hit.require_unmoved(sequence, request);
    hit.require_cached();
    if (sequence.num_pending > 0) return ReserveStatus::kPending;
    const OwedCopies::Call scope(state_.copies);
    if (!state_.copies.empty()) state_.protect_read_pages(sequence, request.start);
    Replica& home = state_.home_of(sequence);
    hit.let_go();
    ReserveStatus status = ReserveStatus::kNoSpace;
    const std::int64_t evicted = home.num_evicted();
    bool is_whole = true;
    try {
        hit.cut(home);
        const Admission admission = admitter_.admit(hit.found(), sequence, view, 1);
        is_whole = !admission.declines_partial || !hit.found().is_partial();
        status = take(admission, sequence, view, 0, transfers);
    } catch (const std::bad_alloc&) {
        hit.hold(home);
        throw;
    } catch (const IntegrityError&) {
        hit.give_up();
        throw;
    }
    if (status != ReserveStatus::kOk) {
        const bool is_there = is_whole || evicted == home.num_evicted();
        is_there ? hit.hold(home) : hit.give_up();
    }
    request.start = view.start;
    request.active = view.active;
    return status;
}

}  // namespace kvcore
