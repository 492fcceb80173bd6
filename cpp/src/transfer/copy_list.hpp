// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "request/sequence_table.hpp"
#include "transfer/column_moves.hpp"

namespace kvcore {

/// The other way to hand out copies within the pool: on a list, made in its order before the next
/// kernels run. Nothing is held for them: the order is what keeps them right.
///
/// Owns: the list. Threads: none of its own; CacheManager locks around it.
/// Cost: `add` O(1) amortised; what looks for a sequence's copies O(list).
class CopyList {
   public:
    CopyList(SequenceTable& sequences, const Grouping& grouping,
             const std::vector<std::unique_ptr<Replica>>& replicas) noexcept
        : sequences_(sequences), replicas_(replicas), per_column_(moves_per_column(grouping)) {}

    [[nodiscard]] std::size_t size() const noexcept { return copies_.size(); }
    /// So that `n` calls of `add` cannot fail. Throws std::bad_alloc.
    void make_room(std::size_t n);
    /// Of a column's pages all that are copied. There is room.
    void add(const PageMove& copy) noexcept;
    /// Those of sequences still claimed, each once; the list is empty then.
    [[nodiscard]] std::vector<PageMove> take();
    /// Forgets copies into pages that a sequence gives up, those from column `from` on; whoever
    /// gets them next must not find them written.
    void forget(SequenceHandle handle, const PageRow& row, std::int32_t from) noexcept;

    /// So that as many calls of `inherit` cannot fail.
    void make_room_for_heirs(std::size_t n);
    /// A copy into a page that a fork holds too is owed to each of them, should the other go first.
    void inherit(SequenceHandle parent, SequenceHandle child, const PageRow& row) noexcept;

   private:
    void prune() noexcept;

    struct Listed {
        PageMove move;
        BlockId column;  // that is copied to
    };

    SequenceTable& sequences_;
    const std::vector<std::unique_ptr<Replica>>& replicas_;
    std::size_t per_column_;
    std::vector<Listed> copies_;
    std::size_t prune_at_ = 64;
};

}  // namespace kvcore
