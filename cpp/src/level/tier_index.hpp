// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/prefix_tree.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// The pages of a tier below the device, and the tokens in them, for one replica. Ids only; a
/// HostStore has the bytes.
///
/// Owns: a BlockPool and a PrefixTree of the tier's pages. A place is a node of that tree that its
/// holder has pinned once: the pages on the path to it stay until `let_go`.
/// Invariant: a page is free, in flight (taken and not yet published), or in the tree, so searches
/// find only pages that have arrived.
/// Memory: a method that cannot get memory throws std::bad_alloc and changes nothing. The noexcept
/// methods need no memory, so the pages and places of a failed call can always be given up. Giving
/// up a page or place that the caller does not have ends the program.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: that of the tree's methods.
class TierIndex {
   public:
    /// Uses LRU unless a policy is given. Throws std::invalid_argument for sizes below 1.
    TierIndex(std::int64_t num_pages, std::int32_t page_size,
              std::unique_ptr<EvictionPolicy> policy = nullptr);

    /// Pages of the tier, and stored pages. O(1).
    [[nodiscard]] std::int64_t num_pages() const noexcept { return pool_.num_blocks(); }
    [[nodiscard]] std::int64_t num_stored() const noexcept { return tree_.num_cached(); }
    /// Pages that `take` can take: free pages and pages without a holder. Cost as `num_evictable`.
    [[nodiscard]] std::int64_t num_available() const noexcept {
        return pool_.num_free() + tree_.num_evictable();
    }

    /// The longest stored prefix in whole pages; no node and depth 0 for an unknown namespace.
    [[nodiscard]] TreePosition match(std::string_view name_space, const TokenId* tokens,
                                     std::int64_t n) const noexcept;
    /// Writes the ids of pages first .. at.depth - 1 on the path to `at` to `out` [at.depth -
    /// first].
    void copy_pages(TreePosition at, std::int32_t first, BlockId* out) const noexcept {
        tree_.copy_pages(at, first, out);
    }
    /// Tokens of the same pages.
    [[nodiscard]] std::vector<TokenId> tokens_of(TreePosition at, std::int32_t first) const {
        return tree_.tokens_of(at, first);
    }

    /// Counts a use of a prefix, for policies that count uses.
    void use(TreeNode* node, std::int32_t depth) noexcept {
        if (node != nullptr) tree_.use({node, depth});
    }
    /// Returns a place at the start of a namespace.
    [[nodiscard]] TreeNode* open(std::string_view name_space);
    /// Returns a place at a position.
    [[nodiscard]] TreeNode* hold(TreePosition at);
    /// Gives up a place, which counts as a use of its pages.
    void let_go(TreeNode* place) noexcept;
    /// Moves a place forward over stored pages that continue it by `tokens` [n].
    [[nodiscard]] TreeNode* advance(TreeNode* place, const TokenId* tokens, std::int64_t n);
    /// Moves a place back to a depth in pages.
    [[nodiscard]] TreeNode* retreat(TreeNode* place, std::int32_t depth);

    /// Takes up to `n` pages: free pages first, and after them the least valuable pages without a
    /// holder. Writes their ids to `out` [n]. Returns the number of taken pages.
    [[nodiscard]] std::int64_t take(std::int64_t n, BlockId* out) noexcept;
    /// Puts taken pages [n] into the tree after a place, with this `retention`, and moves the place
    /// to their end. Frees pages whose tokens were stored meanwhile; with `duplicates` these pages
    /// stay taken and are listed in it. Throws InvalidHandleError for a page that is not taken.
    [[nodiscard]] TreeNode* publish(TreeNode* place, const TokenId* tokens, const BlockId* ids,
                                    std::int32_t n,
                                    std::vector<DuplicatePage>* duplicates = nullptr,
                                    const Retention& retention = {});
    /// Frees taken pages [n] that did not arrive.
    void give_back(const BlockId* ids, std::int64_t n) noexcept { pool_.free(ids, n); }

    /// Evicts every page without a holder.
    void reset() noexcept;
    /// The pool and the tree, for holds on single pages.
    [[nodiscard]] BlockPool& pool() noexcept { return pool_; }
    [[nodiscard]] PrefixTree& tree() noexcept { return tree_; }

    /// Throws IntegrityError unless the invariant holds with `on_their_way` pages in flight.
    /// O(pages).
    void check_integrity(std::int64_t on_their_way) const;

   private:
    BlockPool pool_;
    PrefixTree tree_;
    std::vector<DuplicatePage> duplicates_;  // scratch
};

}  // namespace kvcore
