// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "layers/column_states.hpp"
#include "level/replica.hpp"
#include "request/sequence_table.hpp"
#include "transfer/tickets.hpp"

namespace kvcore {

/// Copies of slots that are due: for callers who make them at once, under a ticket or owed again
/// since they failed; for others on a list, made in its order before the next kernels run.
///
/// A copy goes into the slot of a sequence, out of a checkpoint or its parent's slot, or out of the
/// slot of a sequence into a checkpoint. Neither sequence runs before it is done.
///
/// Owns: a hold on every slot that is read or written under a ticket; the list, for which nothing
/// is held. Invariant: a sequence that copies here name counts one in its `num_pending`. A
/// checkpoint is ready when its copy is done; one that fails is dropped.
/// Threads: none of its own; CacheManager locks around it.
/// Cost: O(copies) per verb; `add` to the list O(list) amortised; taking it O(list) a copy to a
/// slot of a sequence that is gone.
class StateCopies {
   public:
    struct Copy {
        StateMove move;
        SequenceHandle from;  // the sequences whose slots they are; none: a checkpoint's
        SequenceHandle into;
        StateHold source;
        StateHold destination;
        std::uint64_t ticket = 0;  // 0: owed
        std::thread::id owner;     // the thread that was given it
    };

    StateCopies(Tickets& tickets, SequenceTable& sequences,
                const std::vector<std::unique_ptr<Replica>>& replicas) noexcept
        : tickets_(tickets), sequences_(sequences), replicas_(replicas) {}

    [[nodiscard]] const std::vector<Copy>& all() const noexcept { return copies_; }
    /// It names that sequence.
    [[nodiscard]] static bool names(const Copy& copy, SequenceHandle handle) noexcept {
        return copy.from == handle || copy.into == handle;
    }

    /// So that `n` calls of `add` cannot fail. Throws std::bad_alloc.
    void make_room(std::size_t n, Transfers* transfers);
    /// There is room. Into a checkpoint of a column where `into` names no sequence. `has_run`:
    /// kernels have run on the source since what was copied there before.
    void add(const StateMove& move, SequenceHandle from, SequenceHandle into, Transfers* transfers,
             bool has_run = false) noexcept;
    /// Those of a ticket are over: forgotten, or owed again. False where there are none.
    bool finish(std::uint64_t ticket, bool done) noexcept;
    /// So that `take_owed` cannot fail. Throws std::bad_alloc.
    void make_room_to_take(SequenceHandle handle, Transfers& transfers) const;
    /// Gives out again what is owed to a sequence, or out of its slot. False where nothing is.
    bool take_owed(SequenceHandle handle, Transfers& transfers) noexcept;
    /// A sequence goes: what is owed to it is not any more, what is under way ends without it. What
    /// is owed out of its slot is held.
    void drop_owed(SequenceHandle handle) noexcept;
    [[nodiscard]] bool is_under_way(SequenceHandle handle) const noexcept;

    [[nodiscard]] std::size_t list_size() const noexcept { return list_.size(); }
    /// What is on the list, but for copies to sequences that are gone and left them to nobody.
    [[nodiscard]] std::vector<StateMove> take_list();

   private:
    struct Listed {
        StateMove move;
        SequenceHandle into;
        bool is_checkpoint;
        bool has_run;
    };

    [[nodiscard]] ColumnStates& states(std::int32_t replica) const noexcept;
    [[nodiscard]] bool is_named(SequenceHandle handle) const noexcept;
    void give_out(Copy& copy, Transfers& transfers) noexcept;
    void remove(std::size_t index) noexcept;
    [[nodiscard]] const Listed* next_use(std::size_t index) const noexcept;
    void prune() noexcept;

    Tickets& tickets_;
    SequenceTable& sequences_;
    const std::vector<std::unique_ptr<Replica>>& replicas_;
    std::vector<Copy> copies_;
    std::vector<Listed> list_;
    std::size_t prune_at_ = 64;
};

}  // namespace kvcore
