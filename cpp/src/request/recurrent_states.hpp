// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "kvcore/cache_config.hpp"
#include "kvcore/request.hpp"
#include "layers/recurrent_slots.hpp"

namespace kvcore {

/// The state data of a sequence, in addition to its Sequence; only with state groups.
struct RecurrentState {
    static constexpr std::int64_t kNowhere = -1;

    RecurrentSlots::Slot slot = RecurrentSlots::kNone;
    RecurrentSlots::Slot kept = RecurrentSlots::kNone;  // with drafts: a copy of an earlier state
    std::int64_t at = 0;              // `slot` has the state after these tokens, at the last commit
    std::int64_t run = 0;             // the end of the run that was fetched since, or `at`
    std::int64_t kept_at = kNowhere;  // `kept` has the state after these tokens; 0 needs no slot
    bool is_restored = false;         // `slot` has this state too: the last run was undone
    std::int64_t branch = 0;          // cached pages reach up to this token, without a checkpoint
    std::int64_t prompt_end = 0;      // the last boundary of columns below the end of its prompt
};

/// The slot in which each sequence computes its state, the tokens at which checkpoints of the state
/// are due, and the state from which a sequence resumes after the model has rejected drafts.
///
/// Rejected drafts are part of the state in the slot and cannot be removed. With `max_draft_tokens`
/// the manager copies the state to a second slot before a run that may have drafts, if there are
/// two slots for each sequence. A sequence with rejected drafts resumes from the kept state: its
/// accepted tokens run again, together with new drafts. More than kMostRerun * max_draft_tokens
/// accepted tokens first run without drafts.
///
/// Owns: a row per entry of the SequenceTable.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: O(state groups).
class RecurrentStates {
   public:
    static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
    static constexpr std::int64_t kMostRerun = 2;

    explicit RecurrentStates(const CacheConfig& config)
        : column_tokens_(config.page_size),
          most_rerun_(kMostRerun * config.max_draft_tokens),
          most_run_(most_rerun_ + 1 + config.max_draft_tokens),
          keeps_(config.max_draft_tokens > 0 && config.num_state_slots / 2 >= config.max_sequences),
          has_checkpoints_(config.prefix_caching),
          exist_(!config.states.empty()) {
        for (const StateGroup& group : config.states) {
            if (group.interval > 0) intervals_.push_back(group.interval);
        }
    }

    /// Returns true if the cache has layers with states.
    [[nodiscard]] bool exist() const noexcept { return exist_; }
    /// Resets the row of a new sequence; does nothing without states. Throws std::bad_alloc.
    void begin(SequenceHandle handle) {
        if (!exist_) return;
        if (handle.index >= rows_.size()) rows_.resize(std::size_t{handle.index} + 1);
        rows_[handle.index] = {};
    }
    [[nodiscard]] RecurrentState& of(SequenceHandle handle) noexcept { return rows_[handle.index]; }
    [[nodiscard]] const RecurrentState& of(SequenceHandle handle) const noexcept {
        return rows_[handle.index];
    }
    /// Returns the row of an entry of the SequenceTable.
    [[nodiscard]] const RecurrentState& at(std::size_t entry) const noexcept {
        return rows_[entry];
    }

    /// Returns the last boundary of columns below the end of a prompt.
    [[nodiscard]] std::int64_t prompt_end(std::int64_t tokens) const noexcept {
        return (tokens - 1) / column_tokens_ * column_tokens_;
    }
    /// Returns the first token after `start` at which a checkpoint is due; kNever if no checkpoint
    /// is due.
    [[nodiscard]] std::int64_t next_due(const RecurrentState& row,
                                        std::int64_t start) const noexcept {
        if (!has_checkpoints_) return kNever;
        std::int64_t due = row.branch > start ? row.branch : kNever;
        if (row.prompt_end > start) due = std::min(due, row.prompt_end);
        for (const std::int64_t interval : intervals_) {
            due = std::min(due, (start / interval + 1) * interval);
        }
        return due;
    }
    [[nodiscard]] bool is_due(const RecurrentState& row, std::int64_t n) const noexcept {
        return n > 0 && next_due(row, n - 1) == n;
    }
    /// Returns true if the sequence keeps a state from which the last run can be undone, to any
    /// token from `kept_at` on.
    [[nodiscard]] bool has_kept(const RecurrentState& row) const noexcept {
        return keeps_ && row.kept_at >= row.at && row.run - row.kept_at <= most_run_;
    }
    /// Returns true if a request with this `start` has rejected tokens of its last run. It resumes
    /// from the kept state.
    [[nodiscard]] bool resumes(const RecurrentState& row, std::int64_t start) const noexcept {
        return start >= row.kept_at && (start < row.run || row.is_restored) && has_kept(row);
    }
    /// Returns the token from which a request with this `start` runs: an earlier token after
    /// rejected drafts.
    [[nodiscard]] std::int64_t begin_of(SequenceHandle handle, std::int64_t start) const noexcept {
        const RecurrentState& row = of(handle);
        return resumes(row, start) ? row.kept_at : start;
    }
    /// Returns true if the manager has the state that a request with this `start` needs: in its
    /// slot, which was committed or ran up to `start`, or kept. Token 0 needs no state.
    [[nodiscard]] bool can_go_on(SequenceHandle handle, std::int64_t start) const noexcept {
        return start == of(handle).at || can_run(handle, start);
    }
    /// The same for a call that hands out the slot. Kernels may have changed a slot that was handed
    /// out before, even if that run was not committed.
    [[nodiscard]] bool can_run(SequenceHandle handle, std::int64_t start) const noexcept {
        const RecurrentState& row = of(handle);
        return start == 0 || start >= row.run || resumes(row, start);
    }
    /// Returns true if a request that resumes has too many accepted tokens to run them together
    /// with drafts.
    [[nodiscard]] bool reruns_alone(const RecurrentState& row, std::int64_t start) const noexcept {
        return start - row.kept_at > most_rerun_;
    }
    /// Returns true if the state at `start` must be kept before the tokens up to `end` run, because
    /// the last tokens may be drafts.
    [[nodiscard]] bool is_to_keep(const RecurrentState& row, std::int64_t start,
                                  std::int64_t end) const noexcept {
        return keeps_ && start > 0 && start >= row.run && start != row.kept_at && end - start > 1 &&
               end - start <= most_run_;
    }
    /// Returns true if the request can run without further preparation.
    [[nodiscard]] bool is_ready(const RequestView& request, std::int64_t num_steps) const noexcept {
        const RecurrentState& row = of(request.sequence);
        const std::int64_t start = request.start;
        const bool has_state = start == 0        ? row.at == 0
                               : row.is_restored ? start == row.kept_at
                                                 : start >= row.run;
        return row.slot != RecurrentSlots::kNone && has_state &&
               (request.active - start == 1 || next_due(row, start) >= request.active) &&
               !is_to_keep(row, start, request.active + num_steps - 1);
    }
    /// Records the end of the run of a request that starts now.
    void note_run(const RequestView& request, std::int64_t num_steps) noexcept {
        RecurrentState& row = of(request.sequence);
        row.run = request.active + num_steps - 1;
        row.is_restored = false;
        if (request.start == 0) row.kept_at = 0;
    }
    /// Records that `n` tokens are written. Returns true if a checkpoint is due and the slot has
    /// its state: the last run ended at `n`.
    bool advance(SequenceHandle handle, std::int64_t n) noexcept {
        RecurrentState& row = of(handle);
        if (n < row.run || row.is_restored) {
            if (resumes(row, n)) row.at = row.kept_at;
            return false;
        }
        const bool makes = n != row.at && is_due(row, n);
        row.at = row.run = n;
        return makes;
    }
    /// Records that the slot has the state of token `n`, and that no other state is kept.
    void set_back(SequenceHandle handle, std::int64_t n) noexcept {
        RecurrentState& row = of(handle);
        row.at = row.run = n;
        row.kept_at = RecurrentState::kNowhere;
        row.is_restored = false;
    }
    /// Records that the slot has the kept state until the request runs. The request may still have
    /// its old `start`.
    void restore(SequenceHandle handle) noexcept {
        RecurrentState& row = of(handle);
        row.at = row.kept_at;
        row.is_restored = true;
    }

   private:
    std::int64_t column_tokens_;
    std::int64_t most_rerun_;  // accepted tokens that run again together with drafts
    std::int64_t most_run_;    // tokens of a run before which a state is kept
    bool keeps_;
    bool has_checkpoints_;
    bool exist_;
    std::vector<std::int64_t> intervals_;
    std::vector<RecurrentState> rows_;
};

}  // namespace kvcore
