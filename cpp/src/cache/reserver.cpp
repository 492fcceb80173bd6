// SPDX-License-Identifier: Apache-2.0
#include "cache/reserver.hpp"

#include <algorithm>
#include <utility>

#include "kvcore/errors.hpp"
#include "level/quotas.hpp"
#include "support/make_room.hpp"

namespace kvcore {
namespace {

// The page that a hit copies from is the first behind it; no other page may be needed instead.
EvictionGuard guard_of(const Reservation& made) noexcept {
    const FoundHit& hit = made.admission.hit;
    if (!hit.is_partial()) return {};
    const TreePosition& source = made.partial;
    return {PrefixTree::position(source.node, source.depth).node,
            source.depth - hit.match.at.depth};
}

// With `transfers` the caller copies at once, and both pages are held until it has; without, the
// copy is on the list that take_copies hands out before the next kernels run.
void owe_cached_copy(ManagerState& state, const PageMove& copy, TreePosition source,
                     Transfers* transfers) noexcept {
    if (transfers == nullptr) return state.copy_list.add(copy);
    Replica& home = *state.replicas[static_cast<std::size_t>(copy.replica)];
    state.copies.add(copy, PageHold::pin(home, source, copy.source),
                     PageHold::share(home, copy.destination), *transfers);
}

// The same of a page that forks hold: the reference given up is the one that holds it.
void owe_shared_copy(ManagerState& state, const PageMove& copy, Transfers* transfers) noexcept {
    Replica& home = *state.replicas[static_cast<std::size_t>(copy.replica)];
    if (transfers == nullptr) {
        state.copy_list.add(copy);
        return home.pool.free(&copy.source, 1);
    }
    state.copies.add(copy, PageHold::adopt(home, copy.source),
                     PageHold::share(home, copy.destination), *transfers);
}

// A new column of a row, which is read from now on: with pages of all bundles.
void fill_column(ManagerState& state, Replica& home, SequenceHandle handle, const PageRow& row,
                 std::int32_t column) {
    home.columns->fill_full(row[column]);
    for (std::size_t w = 0; w < state.grouping.windows().size(); ++w) {
        home.columns->fill(row[column], w);
    }
    state.windows.enter(home, handle, row, column, column + 1);
}

// The next tokens go into pages that the tree or forks may read. The sequence gets pages of its own
// for these columns; the first page begins with a copy of the tokens that the sequence keeps. The
// sequence drops its shared pages behind the columns that it needs.
void copy_on_write(ManagerState& state, const Departures& departures, Reservation& made,
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
        if (row.frozen() > needed) {
            state.windows.cut(home, handle, row, needed);
            row.drop(home.pool, needed);
        }
    }
    row.copy_on_write(home, first, made.admission.needed, is_sole, give_up);
    made.cut.apply(state, handle, sequence);
}

// Columns that the row gets at its end, and pages of windows for what runs next.
void append_columns(ManagerState& state, const Admission& admission, SequenceHandle handle,
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

void copy_partial_page(ManagerState& state, const Reservation& made, SequenceHandle handle,
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

// With drafts: the state that they run on is copied in front of them, to a slot of its own. Where
// it is not in the request's slot yet, nor in a checkpoint, that is done once it is there.
void keep_state(ManagerState& state, const Reservation& made, const Sequence& sequence,
                SequenceHandle handle, Transfers* transfers) noexcept {
    StateRow& row = state.states.of(handle);
    if (row.kept == ColumnStates::kNone) row.kept = state.home_of(sequence).states->take();
    if (made.admission.hit.is_taken() && !made.checkpoint) return;
    const bool is_copied = made.checkpoint && made.checkpoint.slot() != row.slot;
    const ColumnStates::Slot source = is_copied ? made.checkpoint.slot() : row.slot;
    state.state_copies.add({sequence.replica, source, row.kept}, {}, handle, transfers, !is_copied);
    row.kept_at = made.admission.start;
}

// The slot that the request computes in from now on, with the state at the end of its hit. Where
// there is none but the checkpoint of the hit itself, that becomes its slot.
void take_state(ManagerState& state, Reservation& made, const Sequence& sequence,
                const RequestView& request, Transfers* transfers) {
    ColumnStates& states = *state.home_of(sequence).states;
    const Admission& admission = made.admission;
    StateRow& row = state.states.of(request.sequence);
    const ColumnStates::Slot checkpoint = made.checkpoint.slot();
    const bool takes_over =
        row.slot == ColumnStates::kNone && states.num_available() < admission.slots;
    if (takes_over) {
        states.take_over(checkpoint);
        row.slot = checkpoint;
    } else if (row.slot == ColumnStates::kNone) {
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

void count(ManagerState& state, const Admission& admission, const RequestView& request,
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
    if (home.owners != nullptr) quotas::find_idle(home, hit, made.idle);
    if (hit.shares()) {
        made.place = TreePin(tree, tree.split(hit.match.at));
        // What holds the page that is copied holds its run.
        if (home.owners != nullptr && hit.is_partial()) {
            made.partial.node = tree.split(hit.match.partial);
        }
        if (!hit.ends_below()) made.checkpoint = home.hold_state(hit.match.at);
        if (home.columns != nullptr) {
            made.windows = WindowHold(home, hit.match.at, hit.tokens);
            if (hit.is_partial()) {
                const std::int32_t source = hit.match.at.depth;
                made.source = WindowHold(home, hit.match.partial, hit.tokens, source);
            }
        }
    } else if (row.node() == nullptr) {
        made.place = TreePin(tree, tree.open_namespace(request.name_space));
    }
    const auto first = static_cast<std::int32_t>(admission.start / state_.config.page_size);
    const bool writes_frozen = row.frozen() > first;
    if (!made.place && writes_frozen) {
        made.cut = RowCut(state_, request.sequence, sequence, first);
    }
    // At most one copy: of the page that a hit ends in, or that is written into again.
    if (hit.is_partial() || writes_frozen || made.checkpoint || admission.keeps ||
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
        const bool has_slot = state_.states.of(handle).slot != ColumnStates::kNone ||
                              home.states->num_available() > 0 || made.checkpoint.is_sole();
        detail::require_law(has_slot, "reserve: an admitted state slot is there");
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
    if (home.owners != nullptr) home.owners->set_taker(state_.tenants.of(handle));
    if (admission.hit.shares()) {
        // The run in which the hit was found may have gone: the hit's own end is pinned.
        const TreePosition hit{made.place.node(), admission.hit.match.at.depth};
        const std::int32_t columns = admission.hit_pages;
        home.tree.use(hit, pages.committed());
        if (home.keeps_by_priority) {
            state_.terms.retain(home.tree, handle, hit, pages.committed());
        }
        if (home.columns != nullptr) {
            state_.windows.leave(home, handle, pages, 0, std::min(columns, pages.size()));
        }
        const std::int32_t first = pages.committed();
        pages.take_hit(home, std::move(made.place), columns);
        state_.flights.note_hit(handle, sequence, first);
        if (home.columns != nullptr) {
            const bool takes_over = pages.twins().empty();  // else some of its own are others
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
    if (pages.frozen() > admission.start / state_.config.page_size) {
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
                                has_state ? state_.states.of(handle).slot : ColumnStates::kNone,
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

}  // namespace kvcore
