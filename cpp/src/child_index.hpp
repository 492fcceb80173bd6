// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tree_node.hpp"

namespace kvcore {

/// Finds one of several children by its first page: a linear-hashing table over all such nodes.
///
/// The table grows and shrinks by one bucket at a time, so no insertion ever stalls on a rehash.
/// Nodes are chained through `hash_next`; a bucket holds half a node on average.
/// A hash never decides: the page's tokens do.
class ChildIndex {
   public:
    explicit ChildIndex(std::int32_t page_size);

    /// The hash of a first page below `parent`. Seeded per table, so that token ids cannot be chosen
    /// to collide.
    [[nodiscard]] std::uint32_t hash(const TreeNode* parent, const TokenId* page) const noexcept;

    /// The child of `parent` whose first page equals `page` [page_size]; nullptr when there is none.
    [[nodiscard]] TreeNode* find(const TreeNode* parent, const TokenId* page) const noexcept;

    /// Adds a node with tokens and parent set. It must not be indexed.
    void insert(TreeNode* node);
    /// Takes an indexed node out.
    void erase(TreeNode* node) noexcept;

    /// Asks for what `erase` of the node will read.
    void prefetch(const TreeNode* node) const noexcept {
        if (node->is_indexed) kvcore::prefetch(&bucket(bucket_of(node->hash)));
    }

    [[nodiscard]] std::size_t size() const noexcept { return size_; }

   private:
    static constexpr std::size_t kSegment = 1024;  // buckets per segment

    [[nodiscard]] TreeNode*& bucket(std::size_t index) const noexcept {
        return segments_[index / kSegment][index % kSegment];
    }
    [[nodiscard]] std::size_t bucket_of(std::uint32_t hash) const noexcept;
    void add_bucket();
    void drop_bucket() noexcept;

    std::int32_t page_size_;
    std::uint64_t seed_;
    std::size_t size_ = 0;
    std::size_t num_buckets_ = kSegment;
    std::size_t base_ = kSegment;  // the power of two with base <= num_buckets < 2 * base
    std::vector<std::unique_ptr<TreeNode*[]>> segments_;
};

}  // namespace kvcore
