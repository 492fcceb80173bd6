// SPDX-License-Identifier: Apache-2.0
// Copies from page to page within the pool: a list that the caller runs in order, or copies under a
// ticket; and the pages that forks write in place, which need no copy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "kvcore/page_moves.hpp"
#include "level/level.hpp"
#include "level/refs.hpp"
#include "request/sequence.hpp"
#include "support/tickets.hpp"

namespace kvcore {

/// Calls visit(move) for each page copy that copies one column to another. Skips lanes without
/// tokens to copy, and lanes without a page in the source or the destination.
template <class Visit>
void for_each_page_move(const Replica& home, const PageMove& columns, const Visit& visit) {
    const Grouping& grouping = home.grouping();
    for (const Grouping::Bundle& bundle : grouping.bundles()) {
        const std::int32_t page_size = grouping.column_tokens() / bundle.pages_per_column;
        for (std::int32_t i = 0; i < bundle.pages_per_column; ++i) {
            PageMove move = columns;
            move.num_tokens = std::min(page_size, columns.num_tokens - i * page_size);
            move.source = home.page(columns.source, bundle.first_lane + i);
            move.destination = home.page(columns.destination, bundle.first_lane + i);
            const bool is_copied = move.num_tokens > 0 && move.source != ColumnPages::kNoPage &&
                                   move.destination != ColumnPages::kNoPage;
            if (is_copied) visit(move);
        }
    }
}

/// The maximum number of page copies for the copy of one column.
[[nodiscard]] inline std::size_t moves_per_column(const Grouping& grouping) noexcept {
    return static_cast<std::size_t>(grouping.num_lanes());
}

/// The alternative to OwedCopies for copies within the pool: a list that the caller runs in order
/// before the next kernels. The list holds no pages: the order of the copies keeps the bytes right.
///
/// Owns: the list. Threads: no locks of its own; CacheManager locks around it.
/// Cost: `add` O(1) amortised; methods that search for the copies of a sequence O(list).
class CopyList {
   public:
    CopyList(SequenceTable& sequences, const Grouping& grouping,
             const std::vector<std::unique_ptr<Replica>>& replicas) noexcept
        : sequences_(sequences), replicas_(replicas), per_column_(moves_per_column(grouping)) {}

    [[nodiscard]] std::size_t size() const noexcept { return copies_.size(); }
    /// Reserves memory so that `n` calls of `add` cannot fail. Throws std::bad_alloc.
    void make_room(std::size_t n);
    /// Adds a copy for each page that the copy of a column needs. The caller has called
    /// `make_room`.
    void add(const PageMove& copy) noexcept;
    /// Returns the copies for sequences that are still claimed, each copy once, and empties the
    /// list.
    [[nodiscard]] std::vector<PageMove> take();
    /// Forgets copies into the pages of a sequence from column `from` on. The sequence gives these
    /// pages up, and a late copy would overwrite the tokens of their next holder.
    void forget(SequenceHandle handle, const PageRow& row, std::int32_t from) noexcept;

    /// Reserves memory so that `n` calls of `inherit` cannot fail.
    void make_room_for_heirs(std::size_t n);
    /// For each copy of `parent` into a page that the fork `child` also holds, lists the same copy
    /// for the fork: the copy is still made if either sequence is released.
    void inherit(SequenceHandle parent, SequenceHandle child, const PageRow& row) noexcept;

   private:
    void prune() noexcept;

    struct Listed {
        PageMove move;
        BlockId column;  // the destination column
    };

    SequenceTable& sequences_;
    const std::vector<std::unique_ptr<Replica>>& replicas_;
    std::size_t per_column_;
    std::vector<Listed> copies_;
    std::size_t prune_at_ = 64;
};

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

/// Decides whether a row may write a page in place: only if the row is the sole holder of the page,
/// not counting forks that give the page up in the same call.
///
/// Owns: the pages that earlier rows of the present call will give up, until the call ends.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: O(1) for a page with one holder, else O(copies of the call + log forked pages of the
/// call).
class Departures {
   public:
    /// A row that the call will write from token `start` on.
    struct Writer {
        const PageRow& row;
        const BlockPool& pool;
        std::int32_t replica;
        std::int32_t page_size;
        std::int64_t start;

        [[nodiscard]] std::int32_t first_column() const noexcept {
            return static_cast<std::int32_t>(start / page_size);
        }
        /// Tokens of the first column before `start`, which stay unchanged.
        [[nodiscard]] std::int32_t kept_tokens() const noexcept {
            return static_cast<std::int32_t>(start % page_size);
        }
    };

    explicit Departures(const OwedCopies& copies) noexcept : copies_(copies) {}

    /// Returns true if neither the tree nor another fork nor a copy holds the page. A copy for a
    /// fork that gave the page up may still read it: this copy must end before the first token that
    /// the row writes.
    [[nodiscard]] bool is_sole_holder(const Writer& writer, std::int32_t column) const {
        if (!writer.row.is_own(column)) return false;
        const BlockId page = writer.row[column];
        std::uint32_t holders = writer.pool.ref_count(page);
        if (holders == 1) return true;
        const auto left = leaving_.find({writer.replica, page});
        const Leavers going = left != leaving_.end() ? left->second : Leavers{};
        const Leavers gone = copies_.leavers_of_call(writer.replica, page);
        holders -= going.count + gone.count;
        const std::int64_t kept = writer.start - std::int64_t{column} * writer.page_size;
        return holders == 1 && std::max(going.reach, gone.reach) <= std::max<std::int64_t>(0, kept);
    }
    /// The number of columns before `end` that the row writes in place.
    [[nodiscard]] std::int64_t count_sole(const Writer& writer, std::int64_t end) const {
        std::int64_t count = 0;
        for (std::int32_t column = writer.first_column(); column < end; ++column) {
            count += is_sole_holder(writer, column) ? 1 : 0;
        }
        return count;
    }

    /// Records that the row will give up the pages that it cannot write in place. If several forks
    /// of a batch continue to write the same page, the last fork needs no copy. If only one fork
    /// continues, it needs no copy. Copies on the list are made before any of the rows writes.
    void note(const Writer& writer, bool copies_at_once) {
        const std::int32_t first = writer.first_column();
        for (std::int32_t column = first; column < writer.row.read_only_end(); ++column) {
            if (!writer.row.is_own(column) || is_sole_holder(writer, column)) continue;
            leaving_[{writer.replica, writer.row[column]}].add(
                copies_at_once && column == first ? writer.kept_tokens() : 0);
        }
    }
    /// Clears the records at the end of the call, however it ends: with stale records, a later call
    /// would treat a shared page as the own page of a row.
    class Call {
       public:
        explicit Call(Departures& departures) noexcept : departures_(departures) {}
        Call(const Call&) = delete;
        Call& operator=(const Call&) = delete;
        ~Call() { departures_.leaving_.clear(); }

       private:
        Departures& departures_;
    };

   private:
    const OwedCopies& copies_;
    std::map<std::pair<std::int32_t, BlockId>, Leavers> leaving_;  // by replica and page
};

}  // namespace kvcore
