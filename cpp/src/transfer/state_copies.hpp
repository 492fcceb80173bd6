// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "layers/recurrent_slots.hpp"
#include "level/level.hpp"
#include "request/sequence.hpp"
#include "support/tickets.hpp"

namespace kvcore {

/// Copies of state slots that are due. Callers that copy at once get them under a ticket, and
/// failed copies are owed again. Other callers take a list, and run it in order before the next
/// kernels.
///
/// A copy goes from a checkpoint into a sequence's slot, from the parent's slot into a fork's slot,
/// or from a sequence's slot into a checkpoint. Neither sequence runs before the copy is done.
///
/// Owns: a hold on every slot that copies under a ticket or owed copies read or write; the list,
/// which holds no slots.
/// Invariant: all copies here that name a sequence count as one in its `num_pending`. A checkpoint
/// is ready when its copy is done; if the copy fails, the checkpoint is dropped.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: O(copies) per method; `add` to the list O(list) amortised; `take_list` O(list) for each
/// copy to a slot of a released sequence.
class StateCopies {
   public:
    struct Copy {
        StateMove move;
        SequenceHandle from;  // the sequences that have the slots; empty: a checkpoint
        SequenceHandle into;
        StateHold source;
        StateHold destination;
        std::uint64_t ticket = 0;  // 0: owed
        std::thread::id owner;     // the thread that makes the copy
    };

    StateCopies(Tickets& tickets, SequenceTable& sequences,
                const std::vector<std::unique_ptr<Replica>>& replicas) noexcept
        : tickets_(tickets), sequences_(sequences), replicas_(replicas) {}

    [[nodiscard]] const std::vector<Copy>& all() const noexcept { return copies_; }
    /// Returns true if the copy reads or writes a slot of the sequence.
    [[nodiscard]] static bool names(const Copy& copy, SequenceHandle handle) noexcept {
        return copy.from == handle || copy.into == handle;
    }

    /// Reserves memory so that `n` calls of `add` cannot fail. Throws std::bad_alloc.
    void make_room(std::size_t n, Transfers* transfers);
    /// Adds a copy. The caller has called `make_room`. If `into` names no sequence, the destination
    /// is a checkpoint of a column. `has_run`: kernels have run on the source since the last copy
    /// into it.
    void add(const StateMove& move, SequenceHandle from, SequenceHandle into, Transfers* transfers,
             bool has_run = false) noexcept;
    /// Ends the copies of a ticket: forgets them, or owes them again if they failed and their
    /// sequence is still claimed. Returns false if the ticket has no copies.
    bool finish(std::uint64_t ticket, bool done) noexcept;
    /// Reserves memory so that `take_owed` cannot fail. Throws std::bad_alloc.
    void make_room_to_take(SequenceHandle handle, Transfers& transfers) const;
    /// Gives out the owed copies into or out of the slot of a sequence. Returns false if no copy is
    /// owed.
    bool take_owed(SequenceHandle handle, Transfers& transfers) noexcept;
    /// A sequence is released: forgets the owed copies into its slot. Its copies in flight end
    /// without it. Owed copies out of its slot stay, and keep their hold on the slot.
    void drop_owed(SequenceHandle handle) noexcept;

    [[nodiscard]] std::size_t list_size() const noexcept { return list_.size(); }
    /// Returns the copies on the list and empties it. Leaves out a copy to a slot of a released
    /// sequence, unless a later copy on the list uses the slot.
    [[nodiscard]] std::vector<StateMove> take_list();

   private:
    struct Listed {
        StateMove move;
        SequenceHandle into;
        bool is_checkpoint;
        bool has_run;
    };

    [[nodiscard]] RecurrentSlots& states(std::int32_t replica) const noexcept;
    [[nodiscard]] bool is_named(SequenceHandle handle) const noexcept;
    void give_out(Copy& copy, Transfers& transfers) noexcept;
    void leave_sequences(Copy& copy) noexcept;
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
