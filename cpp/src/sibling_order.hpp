// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tree_node.hpp"

namespace kvcore {

/// The children of one node, sorted by the tokens of their first pages, so that the sibling with
/// the longest common start is a neighbour of where a page would be inserted.
///
/// A sorted sequence cut into chunks; an entry carries its first two tokens, so that most
/// comparisons stay inside the chunk.
/// Cost: O(log n) to search; insert and erase move at most one chunk and, when a chunk splits or
/// empties, the directory (about n / 96 entries).
class SiblingOrder {
   public:
    explicit SiblingOrder(std::int32_t page_size) : page_size_(page_size) {}

    void insert(TreeNode* child);
    /// The child must be in the order, with its tokens still in place.
    void erase(const TreeNode* child) noexcept;
    /// Puts `replacement`, which has the same first page, where `child` is.
    void replace(const TreeNode* child, TreeNode* replacement) noexcept;

    /// The child with the longest common start with `page`, of which `limit` tokens count.
    /// Writes that length to `*common`; nullptr when no child shares a token.
    [[nodiscard]] TreeNode* longest_common_start(const TokenId* page, std::int32_t limit,
                                                 std::int32_t* common) const noexcept;

   private:
    static constexpr std::size_t kChunk = 128;

    struct Entry {
        std::uint64_t key;  // the first two tokens
        TreeNode* child;
    };
    struct Chunk {
        std::size_t size = 0;
        Entry entries[kChunk];
    };
    struct Place {
        std::size_t chunk;
        std::size_t index;
    };

    [[nodiscard]] std::uint64_t key_of(const TokenId* page) const noexcept;
    [[nodiscard]] bool is_less(const Entry& entry, std::uint64_t key, const TokenId* page,
                               std::int32_t limit) const noexcept;
    [[nodiscard]] Place lower_bound(const TokenId* page, std::int32_t limit) const noexcept;
    [[nodiscard]] Place place_of(const TreeNode* child) const noexcept;

    std::int32_t page_size_;
    std::vector<std::unique_ptr<Chunk>> chunks_;  // none empty
    std::vector<Entry> firsts_;                   // first entry of each chunk
};

/// Tokens at which `a` and `b` agree from the start, at most `limit`.
[[nodiscard]] inline std::int32_t common_tokens(const TokenId* a, const TokenId* b,
                                                std::int32_t limit) noexcept {
    std::int32_t i = 0;
    while (i < limit && a[i] == b[i]) ++i;
    return i;
}

}  // namespace kvcore
