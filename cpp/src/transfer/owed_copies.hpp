// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "level/refs.hpp"
#include "request/sequence.hpp"
#include "transfer/column_moves.hpp"
#include "transfer/tickets.hpp"

namespace kvcore {

/// The forks that give up a page in a call, and the longest copy that reads the page for them.
struct Leavers {
    std::uint32_t count = 0;
    std::int32_t reach = 0;  // tokens of the longest copy
    void add(std::int32_t num_tokens) noexcept {
        ++count;
        reach = std::max(reach, num_tokens);
    }
};

/// Copies within the pool for callers that make them at once. A copy is in flight under a ticket,
/// or it failed and is owed again.
///
/// Owns: a hold on every page that the copies read or write.
/// Invariant: the `num_pending` of a sequence counts its copies here, and its loads. A copy without
/// a ticket is owed: `take_owed` gives it out again. Copies of a released sequence stay here only
/// while they are in flight.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: O(copies) per method, except `add`.
class OwedCopies {
   public:
    struct Copy {
        PageMove copy;
        PageRef source;
        PageRef destination;
        std::uint64_t ticket = 0;  // 0: owed
        std::thread::id owner;     // the thread that makes the copy
    };

    OwedCopies(Tickets& tickets, SequenceTable& sequences, const Grouping& grouping,
               const std::vector<std::unique_ptr<Replica>>& replicas) noexcept
        : tickets_(tickets),
          sequences_(sequences),
          replicas_(replicas),
          per_column_(moves_per_column(grouping)) {}

    [[nodiscard]] bool empty() const noexcept { return copies_.empty(); }
    [[nodiscard]] const std::vector<Copy>& all() const noexcept { return copies_; }

    /// Marks the copies of the present call, which `leavers_of_call` counts.
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
    /// The forks that gave up a page in the present call and whose copies read the page.
    [[nodiscard]] Leavers leavers_of_call(std::int32_t replica, BlockId page) const noexcept;

    /// Reserves memory so that `n` calls of `add` cannot fail. Throws std::bad_alloc.
    void make_room(Transfers& transfers, std::size_t n);
    /// Gives out a copy that the caller makes at once. The caller has called `make_room`.
    void add(const PageMove& copy, PageRef source, PageRef destination,
             Transfers& transfers) noexcept {
        copies_.push_back({copy, std::move(source), std::move(destination), 0, {}});
        give_out(copies_.back(), transfers);
    }
    /// Ends the copies of a ticket: forgets them, or owes them again if they failed and their
    /// sequence is still claimed. Returns false if the ticket has no copies.
    bool finish(std::uint64_t ticket, bool done) noexcept;
    /// Gives out the copies that are owed to a sequence. Throws std::bad_alloc.
    [[nodiscard]] OwedStatus take_owed(SequenceHandle handle, Transfers& transfers);
    /// A sequence is released: forgets the copies that are owed to it. Its copies in flight end
    /// without it.
    void drop_owed(SequenceHandle handle) noexcept;
    /// A sequence that waits for a copy of a forgotten page commits no page from the copy on.
    void drop_forgotten() noexcept;

    /// Makes the pages of a sequence read-only, from token `start` on, that copies for forks still
    /// read. The sequence continues from `start`, and must not overwrite tokens that a copy in
    /// flight or an owed copy reads.
    void protect_read_pages(Sequence& sequence, std::int64_t start,
                            std::int32_t page_size) const noexcept;

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
    std::size_t call_begin_ = kNoCall;  // the copies of the present call start here
};

}  // namespace kvcore
