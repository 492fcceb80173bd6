// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvcore/types.hpp"
#include "support/memory.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {

/// A linear-hashing table of all nodes that have siblings. Finds a child by its first page.
///
/// The table grows and shrinks by one bucket at a time, so no insertion stalls on a rehash. Nodes
/// are chained through `hash_next`; a bucket holds one node on average. A match always compares the
/// tokens of the page, not only the hash.
class ChildIndex {
   public:
    explicit ChildIndex(std::int32_t page_size);

    /// The hash of a first page below `parent`. Seeded per table, so that token ids cannot be
    /// chosen to collide.
    [[nodiscard]] std::uint32_t hash(const TreeNode* parent, const TokenId* page) const noexcept;

    /// Returns the child of `parent` whose first page equals `page` [page_size]; nullptr if no
    /// child matches.
    [[nodiscard]] TreeNode* find(const TreeNode* parent, const TokenId* page) const noexcept;

    /// Makes room, so that the next `n` insertions cannot fail. Throws std::bad_alloc, without a
    /// change, if a segment cannot be allocated.
    void reserve(std::size_t n);
    /// Adds a node with tokens and parent set. It must not be indexed. Throws as `reserve(1)`.
    void insert(TreeNode* node);
    /// Removes an indexed node.
    void erase(TreeNode* node) noexcept;
    /// Replaces the indexed `node` by `replacement`, which has the same parent and first page.
    void replace(TreeNode* node, TreeNode* replacement) noexcept;

    /// Prefetches the bucket that `erase` of the node reads.
    void prefetch(const TreeNode* node) const noexcept {
        if (node->is_indexed) kvcore::prefetch(&bucket(bucket_of(node->hash)));
    }

    [[nodiscard]] std::size_t size() const noexcept { return size_; }

   private:
    using Segment = std::unique_ptr<TreeNode*[], CFree>;

    // The first segments are small; later segments have 2 MiB.
    static constexpr std::size_t kSmall = 1024;  // buckets
    static constexpr std::size_t kLarge = std::size_t{1} << 18;
    static constexpr std::size_t kNumSmall = kLarge / kSmall;

    [[nodiscard]] static Segment new_segment(std::size_t buckets);
    [[nodiscard]] static std::size_t segment_of(std::size_t index) noexcept {
        return index < kLarge ? index / kSmall : kNumSmall - 1 + index / kLarge;
    }
    [[nodiscard]] TreeNode*& bucket(std::size_t index) const noexcept {
        return index < kLarge ? segments_[index / kSmall][index % kSmall]
                              : segments_[kNumSmall - 1 + index / kLarge][index % kLarge];
    }
    [[nodiscard]] static bool starts_segment(std::size_t index) noexcept {
        return index % (index < kLarge ? kSmall : kLarge) == 0;
    }
    [[nodiscard]] std::size_t bucket_of(std::uint32_t hash) const noexcept;
    void add_bucket() noexcept;
    void drop_bucket() noexcept;

    std::int32_t page_size_;
    std::uint64_t seed_;
    std::size_t size_ = 0;
    std::size_t num_buckets_ = kSmall;
    std::size_t base_ = kSmall;      // the power of two with base <= num_buckets < 2 * base
    std::vector<Segment> segments_;  // the buckets, at times with a spare segment
};

}  // namespace kvcore
