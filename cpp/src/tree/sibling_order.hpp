// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "kvcore/types.hpp"
#include "support/memory.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {

/// A chunk of a SiblingOrder: eight cache lines, because in a large family every line is cold.
struct alignas(64) OrderChunk {
    static constexpr std::size_t kCapacity = 31;

    union {
        std::size_t size = 0;
        OrderChunk* next_free;
    };
    std::uint64_t keys[kCapacity];
    TreeNode* children[kCapacity];

    void insert(std::size_t at, std::uint64_t key, TreeNode* child) noexcept;
    void erase(std::size_t at) noexcept;
};

/// The allocator for the chunks of all families of a tree.
class OrderArena {
   public:
    [[nodiscard]] OrderChunk* allocate() {
        OrderChunk* chunk = free_ != nullptr ? free_ : slots_.slot(num_used_);
        if (chunk == free_) {
            free_ = chunk->next_free;
        } else {
            ++num_used_;
        }
        return new (chunk) OrderChunk;
    }
    void recycle(OrderChunk* chunk) noexcept {
        chunk->next_free = free_;
        free_ = chunk;
    }

   private:
    SlotArena<OrderChunk> slots_;
    std::size_t num_used_ = 0;
    OrderChunk* free_ = nullptr;
};

/// The children of a node, sorted by the tokens of their first pages. The sibling with the longest
/// common start is next to the position where a page would be inserted.
///
/// A sorted sequence in chunks. The key of a child is its first two tokens, so that most
/// comparisons read only the keys of a chunk (four cache lines, prefetched together).
/// Cost: O(log n) to search; insert and erase move at most one chunk and, when a chunk splits or
/// empties, the directory (about n / 22 entries).
class SiblingOrder {
   public:
    SiblingOrder(std::int32_t page_size, OrderArena& arena)
        : page_size_(page_size), arena_(arena) {}
    SiblingOrder(const SiblingOrder&) = delete;
    SiblingOrder& operator=(const SiblingOrder&) = delete;
    ~SiblingOrder() {
        for (OrderChunk* chunk : chunks_) arena_.recycle(chunk);
    }

    /// Adds a child. Throws std::bad_alloc, without a change, if a chunk cannot be allocated.
    void insert(TreeNode* child);
    /// Removes a child of the order. Its tokens must still be in place.
    void erase(const TreeNode* child) noexcept;
    /// Replaces `child` by `replacement`, which has the same first page.
    void replace(const TreeNode* child, TreeNode* replacement) noexcept;

    /// Returns the child with the longest common start with the first `limit` tokens of `page`, and
    /// writes the length to `*common`; nullptr if no child shares a token.
    [[nodiscard]] TreeNode* longest_common_start(const TokenId* page, std::int32_t limit,
                                                 std::int32_t* common) const noexcept;

    /// Finds the children that share a start with the first `limit` tokens of `page`, the longest
    /// start first. Writes at most `n` children to `out` and the lengths to `common`. Returns the
    /// number of children. O(log children + n).
    std::size_t common_starts(const TokenId* page, std::int32_t limit, TreeNode** out,
                              std::int32_t* common, std::size_t n) const noexcept;

    /// Prefetches the chunk that a search for this page reads.
    void prefetch(const TokenId* page) const noexcept;

    /// Calls visit(child) for each child, in order.
    template <class Visit>
    void for_each(Visit&& visit) const {
        for (const Chunk* chunk : chunks_) {
            for (std::size_t i = 0; i < chunk->size; ++i) visit(chunk->children[i]);
        }
    }

   private:
    using Chunk = OrderChunk;

    struct Place {
        std::size_t chunk;
        std::size_t index;
    };

    [[nodiscard]] std::uint64_t key_of(const TokenId* page) const noexcept;
    [[nodiscard]] std::size_t chunk_of(std::uint64_t wanted, const TokenId* page,
                                       std::int32_t limit) const noexcept;
    [[nodiscard]] Place lower_bound(const TokenId* page, std::int32_t limit) const noexcept;
    [[nodiscard]] Place place_of(const TreeNode* child) const noexcept;
    [[nodiscard]] Chunk* new_chunk();
    void split_chunk(std::size_t chunk);

    std::int32_t page_size_;
    OrderArena& arena_;
    std::vector<Chunk*> chunks_;             // not empty
    std::vector<std::uint64_t> first_keys_;  // of each chunk
    // The chunks in which the last searches ended: an insert follows a match of the same page, and
    // an erase follows its prefetch. A hint: used only if the page is between the first keys of the
    // chunk and the next chunk.
    mutable std::array<std::size_t, 4> recent_{};
    mutable std::size_t next_recent_ = 0;
};

/// Returns the number of leading tokens in which `a` and `b` agree, at most `limit`.
[[nodiscard]] inline std::int32_t common_tokens(const TokenId* a, const TokenId* b,
                                                std::int32_t limit) noexcept {
    std::int32_t i = 0;
    while (i < limit && a[i] == b[i]) ++i;
    return i;
}

}  // namespace kvcore
