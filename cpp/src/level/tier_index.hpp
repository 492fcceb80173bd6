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

/// Which pages of a tier below the device hold which tokens, for one replica. Ids only; the bytes
/// are those of a HostStore.
///
/// Owns: a BlockPool and a PrefixTree of the tier's pages. A place is a node of that tree which its
/// holder has pinned once: what lies on the way to it stays until it is let go.
/// Invariant: a page is free, on its way in (taken and not yet published), or in the tree, so that
/// only what has arrived is ever found.
/// Memory: a verb that cannot get it throws std::bad_alloc and has changed nothing. Those that are
/// noexcept work without any, so that what a failed call holds can always be given up; to give up
/// what one does not have ends the program.
/// Threads: none of its own; CacheManager locks around it.
/// Cost: that of the tree's verbs.
class TierIndex {
   public:
    /// LRU unless another policy is given. Throws std::invalid_argument for sizes below 1.
    TierIndex(std::int64_t num_pages, std::int32_t page_size,
              std::unique_ptr<EvictionPolicy> policy = nullptr);

    /// Pages of the tier, and those that can be found. O(1).
    [[nodiscard]] std::int64_t num_pages() const noexcept { return pool_.num_blocks(); }
    [[nodiscard]] std::int64_t num_stored() const noexcept { return tree_.num_cached(); }
    /// Pages that `take` can have: free ones and those that nobody holds. As `num_evictable`.
    [[nodiscard]] std::int64_t num_available() const noexcept {
        return pool_.num_free() + tree_.num_evictable();
    }

    /// The longest stored prefix in whole pages; no node and depth 0 for an unknown namespace.
    [[nodiscard]] TreePosition match(std::string_view name_space, const TokenId* tokens,
                                     std::int64_t n) const noexcept;
    /// Ids of pages first .. at.depth - 1 on the way to `at`, to `out` [at.depth - first].
    void copy_pages(TreePosition at, std::int32_t first, BlockId* out) const noexcept {
        tree_.copy_pages(at, first, out);
    }
    /// Tokens of those pages.
    [[nodiscard]] std::vector<TokenId> tokens_of(TreePosition at, std::int32_t first) const {
        return tree_.tokens_of(at, first);
    }

    /// Counts a use of a prefix, for policies that go by that.
    void use(TreeNode* node, std::int32_t depth) noexcept {
        if (node != nullptr) tree_.use({node, depth});
    }
    /// The start of a namespace as a place.
    [[nodiscard]] TreeNode* open(std::string_view name_space);
    /// A position as a place.
    [[nodiscard]] TreeNode* hold(TreePosition at);
    /// Gives a place up, which is a use of its pages.
    void let_go(TreeNode* place) noexcept;
    /// Moves a place on over stored pages that continue it by `tokens` [n].
    [[nodiscard]] TreeNode* advance(TreeNode* place, const TokenId* tokens, std::int64_t n);
    /// Moves a place back to a depth in pages.
    [[nodiscard]] TreeNode* retreat(TreeNode* place, std::int32_t depth);

    /// Takes up to `n` pages, free ones first, then the least valuable that nobody holds; their ids
    /// go to `out` [n]. Returns how many.
    [[nodiscard]] std::int64_t take(std::int64_t n, BlockId* out) noexcept;
    /// Makes taken pages [n] findable behind a place, which moves to their end; they are kept as
    /// `retention` says. Those that are stored meanwhile are free again; with `duplicates` they
    /// stay taken, and that says which they are. Throws InvalidHandleError for a page that is not
    /// taken.
    [[nodiscard]] TreeNode* publish(TreeNode* place, const TokenId* tokens, const BlockId* ids,
                                    std::int32_t n,
                                    std::vector<DuplicatePage>* duplicates = nullptr,
                                    const Retention& retention = {});
    /// Frees taken pages [n] that did not arrive.
    void give_back(const BlockId* ids, std::int64_t n) noexcept { pool_.free(ids, n); }

    /// Forgets every page that nobody holds.
    void reset() noexcept;
    /// Where holds on single pages lie.
    [[nodiscard]] BlockPool& pool() noexcept { return pool_; }
    [[nodiscard]] PrefixTree& tree() noexcept { return tree_; }

    /// Throws IntegrityError unless the invariant holds with so many pages on their way in.
    /// O(pages).
    void check_integrity(std::int64_t on_their_way) const;

   private:
    BlockPool pool_;
    PrefixTree tree_;
    std::vector<DuplicatePage> duplicates_;  // scratch
};

}  // namespace kvcore
