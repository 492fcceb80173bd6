// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <stdexcept>

#include "cache/validate_requests.hpp"
#include "cache/verbs.hpp"
#include "kvcore/errors.hpp"

namespace kvcore::verbs {
namespace {

// Pages that windows have left are gone, or will soon belong to other requests.
void require_window(const CacheData& cache, SequenceHandle handle, const Sequence& sequence,
                    std::int64_t n) {
    if (cache.grouping.windows().empty()) return;
    const std::int64_t least = sequence.written - cache.config.max_draft_tokens;
    if (n < least && !cache.config.keep_windows) {
        throw std::invalid_argument(
            detail::concat("cannot be truncated to ", n, " tokens, must be at least ",
                           sequence.written, " - max_draft_tokens of ",
                           cache.config.max_draft_tokens, ": windows have left the earlier pages"));
    }
    if (cache.windows.can_read(handle, n)) return;
    throw std::invalid_argument(detail::concat("cannot be truncated to ", n,
                                               " tokens: its cached prefix is longer, and "
                                               "windows hold only the last pages of it"));
}

// Finds the checkpoint to restore. Returns an empty hold if the slot already has the state of token
// `n`, if the request restarts at token 0, or if it continues from the state that was kept before
// its drafts.
StateHold find_checkpoint(const CacheData& cache, SequenceHandle handle, const Sequence& sequence,
                          std::int64_t n) {
    if (!cache.has_states) return {};
    const RecurrentState& row = cache.states.of(handle);
    const std::int64_t stands = std::max(row.at, row.run);
    if (n == 0 || n == stands || row.slot == RecurrentSlots::kNone) return {};
    if (cache.states.resumes(row, n)) return {};
    StateHold found =
        cache.home_of(sequence).hold_state({sequence.pages.node(), sequence.pages.committed()}, n);
    if (found) return found;
    throw std::invalid_argument(detail::concat("cannot be truncated to ", n, " tokens, must be ",
                                               stands,
                                               ", the token of its present state, or a token with "
                                               "a checkpoint"));
}

}  // namespace

void truncate(CacheData& cache, SequenceHandle handle, std::int64_t n, Transfers* transfers) {
    if (transfers != nullptr) rules::require_transfers(cache, transfers);
    Sequence& sequence = cache.sequences.at(handle);
    if (sequence.num_pending > 0) rules::refuse_pending(-1);
    const std::int64_t most = sequence.is_sealed() ? sequence.filled_end() : 0;
    if (n < 0 || n > most) {
        throw std::invalid_argument(detail::concat("cannot be truncated to ", n,
                                                   " tokens, must be 0 .. ", most,
                                                   ", the end of its last fetch"));
    }
    require_window(cache, handle, sequence, n);
    StateHold checkpoint = find_checkpoint(cache, handle, sequence, n);
    if (checkpoint) cache.ledger.state_copies.make_room(1, transfers);
    PageRow& row = sequence.pages;
    const auto columns = static_cast<std::int32_t>(ceil_div(n, cache.config.page_size));
    if (columns < row.size()) {
        Replica& home = cache.home_of(sequence);
        RowCut cut(cache, handle, sequence, columns);
        cache.ledger.copy_list.forget(handle, row, columns);
        cache.windows.cut(home, handle, row, columns);
        row.drop(home.pool, columns);
        cut.apply(cache, handle, sequence);
        row.make_writable(columns);
    }
    row.lift_commit_limit(columns);
    cache.protect_read_pages(sequence, n);
    cache.count_generated(handle, sequence);
    sequence.written = std::min(sequence.written, n);
    if (!cache.has_states) return;
    if (checkpoint || n == 0) cache.states.set_back(handle, n);
    if (!checkpoint) return;
    const StateMove copy{sequence.replica, checkpoint.slot(), cache.states.of(handle).slot};
    cache.ledger.state_copies.add(copy, {}, handle, transfers);
    checkpoint.end_use();
}

std::int64_t leave_windows(CacheData& cache, SequenceHandle handle, std::int64_t n) {
    Sequence& sequence = cache.sequences.at(handle);
    const std::int64_t most = std::int64_t{sequence.pages.size()} * cache.config.page_size;
    if (!cache.config.keep_windows) {
        throw std::invalid_argument(
            "keep_windows is false, so commit gives back the pages of windows; "
            "make the manager with keep_windows");
    }
    if (n < 0 || n > most) {
        throw std::invalid_argument(detail::concat("cannot leave the windows of ", n,
                                                   " tokens, must be 0 .. ", most,
                                                   ", the tokens that its pages hold"));
    }
    if (sequence.num_pending > 0) rules::refuse_pending(-1);
    if (cache.grouping.windows().empty()) return std::numeric_limits<std::int64_t>::max();
    if (cache.windows.view().passes(handle, n)) {
        cache.windows.advance(cache.home_of(sequence), handle, sequence.pages, n);
    }
    return cache.windows.of(handle).passes_at;
}

}  // namespace kvcore::verbs
