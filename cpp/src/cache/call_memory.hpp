// SPDX-License-Identifier: Apache-2.0
// Memory of a call, kept for the next call, so that a decode step allocates nothing. No call reads
// the contents that an earlier call left.
#pragma once

#include <cstdint>
#include <vector>

#include "kvcore/prefix_tree.hpp"
#include "kvcore/request.hpp"
#include "request/sequence_table.hpp"
#include "request/undo_log.hpp"

namespace kvcore {

/// The sequences of the rows of a batch, and the stamp that finds duplicates.
class BatchSequences {
   public:
    /// Makes room, so that `set` may name rows below `n`.
    void resize(std::int64_t n) { sequences_.resize(static_cast<std::size_t>(n)); }
    void set(std::int64_t row, Sequence& sequence) noexcept {
        sequences_[static_cast<std::size_t>(row)] = &sequence;
    }
    [[nodiscard]] Sequence& operator[](std::int64_t row) const noexcept {
        return *sequences_[static_cast<std::size_t>(row)];
    }

    std::uint32_t stamp = 0;  // of the last batch

   private:
    std::vector<Sequence*> sequences_;
};

/// Rows of a batch that need pages.
struct ReserveMemory {
    /// A row that needs only more columns at its end.
    struct Growth {
        std::int64_t row;
        std::int64_t columns;
    };
    struct Supply {
        std::int64_t left;           // pages that are still available
        bool has_evictable = false;  // `left` includes evictable pages; free pages are too few
        std::int64_t wanted = 0;     // columns of the rows that only grow
        std::size_t given = 0;       // of `taken`, the index of the next page
    };

    std::vector<Growth> growing;
    std::vector<std::int64_t> joining;  // the other rows
    std::vector<Supply> supply;         // of each replica
    std::vector<BlockId> taken;         // pages on the way to their rows
};

struct FetchMemory {
    struct LateRow {
        std::int64_t batch_row;
        std::int64_t row;  // row in its replica's table
    };
    struct Room {
        std::int64_t rows = 0;
        std::int64_t columns = 0;
    };

    std::vector<std::int64_t> missing;  // rows that need pages
    std::vector<LateRow> late;          // rows that are written after all rows are reserved
    std::vector<Undo> undo;             // changes to undo if the batch is refused
    std::vector<std::int64_t> prompts;  // written rows that are still in their prompts
    std::vector<Room> rooms;            // of the tables of each replica
};

struct CommitMemory {
    std::vector<std::int64_t> rows;     // rows that have pages to commit
    std::vector<std::int64_t> passing;  // rows whose windows leave columns
    std::vector<Undo> undo;             // changes to undo if the batch is refused
    std::vector<DuplicatePage> duplicates;
    std::vector<PageSwap> swapped;
    std::vector<BlockId> replaced;  // columns that were swapped
    // With quotas: cached pages that the request of a row holds from now on.
    std::vector<BlockId> adopted;
    std::vector<Owner> takers;  // of each page: the new owner if its owner has no room
};

}  // namespace kvcore
