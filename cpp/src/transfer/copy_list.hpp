// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "request/sequence.hpp"
#include "transfer/column_moves.hpp"

namespace kvcore {

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

}  // namespace kvcore
