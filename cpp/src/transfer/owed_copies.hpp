// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "level/page_hold.hpp"
#include "request/sequence_table.hpp"
#include "transfer/column_moves.hpp"
#include "transfer/tickets.hpp"

namespace kvcore {

/// Forks of a page that let go of it in a call, and what their copies read of it meanwhile.
struct Leavers {
    std::uint32_t count = 0;
    std::int32_t reach = 0;  // tokens of the longest copy
    void add(std::int32_t num_tokens) noexcept {
        ++count;
        reach = std::max(reach, num_tokens);
    }
};

/// Copies within the pool that callers make at once: given out under a ticket, or owed again since
/// they failed.
///
/// Owns: a hold on every page that is read or written by them.
/// Invariant: a sequence's `num_pending` counts its copies here, and its loads. A copy without a
/// ticket is owed: it waits for its sequence to ask again. A sequence that is gone has copies here
/// only as long as they are under way.
/// Threads: none of its own; CacheManager locks around it.
/// Cost: O(copies) per verb, but for `add`.
class OwedCopies {
   public:
    struct Copy {
        PageMove copy;
        PageHold source;
        PageHold destination;
        std::uint64_t ticket = 0;  // 0: owed
        std::thread::id owner;     // the thread that was given it
    };

    OwedCopies(Tickets& tickets, SequenceTable& sequences, const Grouping& grouping,
               const std::vector<std::unique_ptr<Replica>>& replicas) noexcept
        : tickets_(tickets),
          sequences_(sequences),
          replicas_(replicas),
          per_column_(moves_per_column(grouping)) {}

    [[nodiscard]] bool empty() const noexcept { return copies_.empty(); }
    [[nodiscard]] const std::vector<Copy>& all() const noexcept { return copies_; }

    /// Marks the copies of a call, which know of each other.
    class Call {
       public:
        explicit Call(OwedCopies& copies) noexcept : copies_(copies) {
            copies_.call_begin_ = copies_.copies_.size();
        }
        Call(const Call&) = delete;
        Call& operator=(const Call&) = delete;
        ~Call() { copies_.call_begin_ = kNoCall; }

       private:
        OwedCopies& copies_;
    };
    /// References to a page that copies of the present call read, which its holders gave up.
    [[nodiscard]] Leavers leavers_of_call(std::int32_t replica, BlockId page) const noexcept;

    /// So that `n` calls of `add` cannot fail. Throws std::bad_alloc.
    void make_room(Transfers& transfers, std::size_t n);
    /// A copy for the caller to do at once. There is room.
    void add(const PageMove& copy, PageHold source, PageHold destination,
             Transfers& transfers) noexcept {
        copies_.push_back({copy, std::move(source), std::move(destination), 0, {}});
        give_out(copies_.back(), transfers);
    }
    /// Those of a ticket are over: forgotten, or owed again. False where there are none.
    bool finish(std::uint64_t ticket, bool done) noexcept;
    /// Gives out again what is owed to a sequence. Throws std::bad_alloc.
    [[nodiscard]] OwedStatus take_owed(SequenceHandle handle, Transfers& transfers);
    /// A sequence goes: what is owed to it is not any more, what is under way ends without it.
    void drop_owed(SequenceHandle handle) noexcept;
    [[nodiscard]] bool is_under_way(SequenceHandle handle) const noexcept;

    /// A fork that let go of a page of this sequence may still copy it, or have to once more. What
    /// it reads is not written again in place, should the sequence go back that far.
    void freeze_read_pages(Sequence& sequence, std::int64_t start,
                           std::int32_t page_size) const noexcept;
    /// A page that is held by references is the tree's from now on, the last on the way to `at`.
    void move_to_tree(std::int32_t replica, BlockId page, TreePosition at) noexcept;
    /// Around what forgets all that nobody uses: see PageHold.
    void loosen() noexcept;
    void fasten() noexcept;

   private:
    static constexpr std::size_t kNoCall = static_cast<std::size_t>(-1);

    void give_out(Copy& copy, Transfers& transfers) noexcept {
        copy.ticket = tickets_.of(transfers);
        copy.owner = std::this_thread::get_id();
        const Replica& home = *replicas_[static_cast<std::size_t>(copy.copy.replica)];
        for_each_page_move(home, copy.copy, [&](const PageMove& move) {
            transfers.copies.push_back(move);  // there is room
        });
    }
    void spare_source(const PageMove& copy, const Sequence& sequence) noexcept;

    Tickets& tickets_;
    SequenceTable& sequences_;
    const std::vector<std::unique_ptr<Replica>>& replicas_;
    std::size_t per_column_;
    std::vector<Copy> copies_;
    std::size_t call_begin_ = kNoCall;  // copies from here on are those of the present call
};

}  // namespace kvcore
