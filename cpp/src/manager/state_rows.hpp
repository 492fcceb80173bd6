// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "groups/column_states.hpp"
#include "kvcore/cache_types.hpp"

namespace kvcore {

/// What a sequence has of states: beside its Sequence, and only where there are such groups.
struct StateRow {
    ColumnStates::Slot slot = ColumnStates::kNone;
    std::int64_t at = 0;          // tokens whose state the slot has, as of the last commit
    std::int64_t run = 0;         // the end of what was fetched since, or the same
    std::int64_t branch = 0;      // cached pages went on up to here, without a checkpoint
    std::int64_t prompt_end = 0;  // the last boundary of columns below the end of its prompt
};

/// Which slot each sequence computes its state in, and where checkpoints of it are due.
///
/// Owns: a row per entry of the SequenceTable. Threads: none of its own; CacheManager locks around
/// it. Cost: O(State groups).
class StateRows {
   public:
    static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

    explicit StateRows(const CacheConfig& config)
        : column_tokens_(config.page_size),
          has_checkpoints_(config.prefix_caching),
          exist_(!config.states.empty()) {
        for (const StateGroup& group : config.states) {
            if (group.interval > 0) intervals_.push_back(group.interval);
        }
    }

    /// There are layers with states.
    [[nodiscard]] bool exist() const noexcept { return exist_; }
    /// For a sequence that begins. Throws std::bad_alloc.
    void begin(SequenceHandle handle) {
        if (handle.index >= rows_.size()) rows_.resize(std::size_t{handle.index} + 1);
        rows_[handle.index] = {};
    }
    [[nodiscard]] StateRow& of(SequenceHandle handle) noexcept { return rows_[handle.index]; }
    [[nodiscard]] const StateRow& of(SequenceHandle handle) const noexcept {
        return rows_[handle.index];
    }
    /// By entry of the SequenceTable.
    [[nodiscard]] const StateRow& at(std::size_t entry) const noexcept { return rows_[entry]; }

    /// The last boundary of columns below the end of a prompt.
    [[nodiscard]] std::int64_t prompt_end(std::int64_t tokens) const noexcept {
        return (tokens - 1) / column_tokens_ * column_tokens_;
    }
    /// The first token behind `start` where a checkpoint is due; kNever: none.
    [[nodiscard]] std::int64_t next_due(const StateRow& row, std::int64_t start) const noexcept {
        if (!has_checkpoints_) return kNever;
        std::int64_t due = row.branch > start ? row.branch : kNever;
        if (row.prompt_end > start) due = std::min(due, row.prompt_end);
        for (const std::int64_t interval : intervals_) {
            due = std::min(due, (start / interval + 1) * interval);
        }
        return due;
    }
    [[nodiscard]] bool is_due(const StateRow& row, std::int64_t n) const noexcept {
        return n > 0 && next_due(row, n - 1) == n;
    }
    /// The state that a request goes on with there is the one in its slot: it stands there, or ran
    /// as far as that since. At token 0 there is no state.
    [[nodiscard]] bool can_go_on(SequenceHandle handle, std::int64_t start) const noexcept {
        const StateRow& row = of(handle);
        return start == 0 || start == row.at || start >= row.run;
    }
    /// Nothing is to be done before the request runs.
    [[nodiscard]] bool is_ready(const RequestView& request) const noexcept {
        const StateRow& row = of(request.sequence);
        return row.slot != ColumnStates::kNone && (request.start > 0 || row.at == 0) &&
               can_go_on(request.sequence, request.start) &&
               (request.active - request.start == 1 ||
                next_due(row, request.start) >= request.active);
    }
    /// So far the request runs now.
    void note_run(const RequestView& request, std::int64_t num_steps) noexcept {
        of(request.sequence).run = request.active + num_steps - 1;
    }
    /// So many tokens are written. True where a checkpoint is due and the slot has that state.
    bool advance(SequenceHandle handle, std::int64_t n) noexcept {
        StateRow& row = of(handle);
        const bool makes = n != row.at && n >= row.run && is_due(row, n);
        row.at = row.run = n;
        return makes;
    }
    /// The state in the slot is that of token `n` from now on.
    void set_back(SequenceHandle handle, std::int64_t n) noexcept {
        StateRow& row = of(handle);
        row.at = row.run = n;
    }

   private:
    std::int64_t column_tokens_;
    bool has_checkpoints_;
    bool exist_;
    std::vector<std::int64_t> intervals_;
    std::vector<StateRow> rows_;
};

}  // namespace kvcore
