// SPDX-License-Identifier: Apache-2.0
#include "cache/claim.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "cache/plan.hpp"
#include "cache/validate_requests.hpp"
#include "kvcore/errors.hpp"

namespace kvcore {

SequenceHandle Claims::claim(std::int32_t replica) {
    Replica& home = state_.replica_at(replica);
    if (home.num_sequences >= state_.config.max_sequences) {
        throw CapacityError(detail::concat("replica ", replica, " is full: ", home.num_sequences,
                                           " of ", state_.config.max_sequences,
                                           " sequences are claimed; release one first"));
    }
    const SequenceHandle handle = state_.sequences.claim(replica);
    try {
        state_.counts.begin(handle);
        state_.windows.make_room(handle);
        state_.states.begin(handle);
    } catch (...) {
        state_.sequences.release(handle);
        throw;
    }
    ++home.num_sequences;
    return handle;
}

bool Claims::release(SequenceHandle handle, RequestHistory* history) {
    Sequence& leaving = state_.sequences.at(handle);
    state_.count_generated(handle, leaving);
    if (history != nullptr) *history = state_.counts.history(handle, leaving);
    Replica& home = state_.home_of(leaving);
    const bool is_pending = leaving.num_pending > 0;
    if (is_pending) state_.copies.drop_owed(handle);
    if (home.states != nullptr) give_back_slot(home, leaving, handle);
    TreeNode* node = leaving.pages.node();
    state_.windows.clear(home, handle, leaving.pages);
    if (home.keeps_by_priority && node != nullptr) {
        state_.priorities.retain(home.tree, handle, {node, PrefixTree::depth_of(node)}, 0);
    }
    state_.priorities.forget(handle);
    state_.tenants.set(handle, 0);
    leaving.pages.clear(home.pool);
    if (node != nullptr) home.tree.shrink(node);
    state_.flights.forget(handle);
    --home.num_sequences;
    state_.sequences.release(handle);
    return is_pending;
}

void Claims::begin_again(Sequence& sequence, SequenceHandle handle) noexcept {
    Replica& home = state_.home_of(sequence);
    if (home.states != nullptr) give_back_slot(home, sequence, handle);
    state_.count_generated(handle, sequence);
    state_.counts.uncount(state_.tokens_of(sequence, handle), handle, sequence,
                          state_.config.page_size);
    state_.windows.clear(home, handle, sequence.pages);
    sequence.pages.clear(home.pool);
    state_.flights.forget(handle);
    sequence.reuse = Reuse::kOpen;
    sequence.written = 0;
}

void Claims::begin_again(SequenceHandle handle) {
    Sequence& sequence = state_.sequences.at(handle);
    if (sequence.num_pending > 0) {
        const bool is_under_way = state_.copies.is_under_way(handle) ||
                                  state_.state_copies.is_under_way(handle) ||
                                  state_.flights.is_under_way(handle);
        if (is_under_way) rules::refuse_pending(-1);
        state_.copies.drop_owed(handle);
        state_.state_copies.drop_owed(handle);
        sequence.num_pending = 0;
    }
    state_.copy_list.forget(handle, sequence.pages, 0);
    begin_again(sequence, handle);
}

// Pages that windows have left are gone, or will soon belong to other requests.
void Claims::require_window(SequenceHandle handle, const Sequence& sequence, std::int64_t n) const {
    if (state_.grouping.windows().empty()) return;
    const std::int64_t least = sequence.written - state_.config.max_draft_tokens;
    if (n < least && !state_.config.keep_windows) {
        throw std::invalid_argument(detail::concat(
            "cannot be truncated to ", n, " tokens, must be at least ", sequence.written,
            " - max_draft_tokens of ", state_.config.max_draft_tokens,
            ": windows have left the earlier pages"));
    }
    if (state_.windows.can_read(handle, n)) return;
    throw std::invalid_argument(detail::concat("cannot be truncated to ", n,
                                               " tokens: its cached prefix is longer, and "
                                               "windows hold only the last pages of it"));
}

std::int64_t Claims::leave_windows(SequenceHandle handle, std::int64_t n) {
    Sequence& sequence = state_.sequences.at(handle);
    const std::int64_t most = std::int64_t{sequence.pages.size()} * state_.config.page_size;
    if (!state_.config.keep_windows) {
        throw std::invalid_argument(
            "leaves its windows in commit; make the manager with keep_windows");
    }
    if (n < 0 || n > most) {
        throw std::invalid_argument(detail::concat("cannot leave the windows of ", n,
                                                   " tokens, must be 0 .. ", most,
                                                   ", the tokens that its pages hold"));
    }
    if (sequence.num_pending > 0) rules::refuse_pending(-1);
    if (state_.grouping.windows().empty()) return std::numeric_limits<std::int64_t>::max();
    if (state_.windows.view().passes(handle, n)) {
        state_.windows.advance(state_.home_of(sequence), handle, sequence.pages, n);
    }
    return state_.windows.of(handle).passes_at;
}

// Copies under way still write the slot, and forks may have to read it.
void Claims::give_back_slot(Replica& home, const Sequence& sequence,
                            SequenceHandle handle) noexcept {
    home.note_hit({sequence.pages.node(), sequence.pages.committed()}, sequence.hit_tokens);
    state_.state_copies.drop_owed(handle);
    RecurrentState& row = state_.states.of(handle);
    for (const RecurrentSlots::Slot slot : {row.slot, row.kept}) {
        if (slot != RecurrentSlots::kNone) home.states->give_back(slot);
    }
    row = {};
}

// Finds the checkpoint to restore. Returns an empty hold if the slot already has the state of token
// `n`, if the request restarts at token 0, or if it continues from the state that was kept before
// its drafts.
StateHold Claims::find_state(SequenceHandle handle, const Sequence& sequence,
                             std::int64_t n) const {
    if (!state_.states.exist()) return {};
    const RecurrentState& row = state_.states.of(handle);
    const std::int64_t stands = std::max(row.at, row.run);
    if (n == 0 || n == stands || row.slot == RecurrentSlots::kNone) return {};
    if (state_.states.resumes(row, n)) return {};
    StateHold found =
        state_.home_of(sequence).hold_state({sequence.pages.node(), sequence.pages.committed()}, n);
    if (found) return found;
    throw std::invalid_argument(detail::concat("cannot be truncated to ", n, " tokens, must be ",
                                               stands,
                                               ", the token of its present state, or a token with "
                                               "a checkpoint"));
}

void Claims::truncate(SequenceHandle handle, std::int64_t n, Transfers* transfers) {
    if (transfers != nullptr) rules::require_transfers(state_, transfers);
    Sequence& sequence = state_.sequences.at(handle);
    if (sequence.num_pending > 0) rules::refuse_pending(-1);
    const std::int64_t most = sequence.is_sealed() ? sequence.filled_end() : 0;
    if (n < 0 || n > most) {
        throw std::invalid_argument(detail::concat("cannot be truncated to ", n,
                                                   " tokens, must be 0 .. ", most,
                                                   ", the end of its last fetch"));
    }
    require_window(handle, sequence, n);
    StateHold checkpoint = find_state(handle, sequence, n);
    if (checkpoint) state_.state_copies.make_room(1, transfers);
    PageRow& row = sequence.pages;
    const auto columns = static_cast<std::int32_t>(ceil_div(n, state_.config.page_size));
    if (columns < row.size()) {
        Replica& home = state_.home_of(sequence);
        RowCut cut(state_, handle, sequence, columns);
        state_.copy_list.forget(handle, row, columns);
        state_.windows.cut(home, handle, row, columns);
        row.drop(home.pool, columns);
        cut.apply(state_, handle, sequence);
        row.make_writable(columns);
    }
    row.lift_commit_limit(columns);
    state_.protect_read_pages(sequence, n);
    state_.count_generated(handle, sequence);
    sequence.written = std::min(sequence.written, n);
    if (!state_.states.exist()) return;
    if (checkpoint || n == 0) state_.states.set_back(handle, n);
    if (!checkpoint) return;
    const StateMove copy{sequence.replica, checkpoint.slot(), state_.states.of(handle).slot};
    state_.state_copies.add(copy, {}, handle, transfers);
    checkpoint.end_use();
}

}  // namespace kvcore
