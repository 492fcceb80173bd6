// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kvcore/types.hpp"

namespace kvcore {

struct TreeNode;

/// Told which pages enter and leave a PrefixTree: whoever mirrors them hears of each page once for
/// each time that it comes and goes, in the order in which that happens.
///
/// What is told are the pages first .. first + n - 1 on the way to `node`, counted from the root of
/// its namespace: `copy_pages` and `tokens_of` read them from `{node, first + n}` and `first`,
/// `name_of` tells the namespace. The change is complete; a listener may read the tree, but change
/// nothing. Pages enter behind those in front of them and leave before those. Pages that are there
/// already, and runs that are cut in two, are no news; a tree that is taken down tells nothing.
///
/// It is not told why pages leave. The trees of a CacheManager have none: it has no call that takes
/// one.
///
/// Owns: nothing.
/// Threads: called by whoever changes the tree, so that of a CacheManager under its mutex.
/// Cost: one call for a run that grows or shrinks, never one per page. A tree without a listener
/// pays a branch.
class TreeListener {
   public:
    TreeListener() = default;
    TreeListener(const TreeListener&) = delete;
    TreeListener& operator=(const TreeListener&) = delete;
    virtual ~TreeListener() = default;

    /// Pages entered the tree.
    virtual void stored(TreeNode* node, std::int32_t first, std::int32_t n) noexcept = 0;
    /// Pages left the tree: nothing finds them any more, but they can be read during the call.
    /// Where it was the whole run, the node is gone behind it.
    virtual void removed(TreeNode* node, std::int32_t first, std::int32_t n) noexcept = 0;
};

/// Told of pages that PrefixTree::forget took out of a tree.
///
/// Each page is told of once by `left`, and once by `let_go`: in the same call where nobody holds
/// it, else when the last holder lets go, in that one's `unpin`.
///
/// Owns: nothing. Threads: as TreeListener. Cost: a call per run.
class ForgottenListener {
   public:
    ForgottenListener() = default;
    ForgottenListener(const ForgottenListener&) = delete;
    ForgottenListener& operator=(const ForgottenListener&) = delete;
    virtual ~ForgottenListener() = default;

    /// Nothing finds these pages [n] any more. It must not change the tree.
    virtual void left(const BlockId* ids, std::int32_t n) noexcept = 0;
    /// Nobody holds them any more: the tree gives up its reference to them. It must not use the
    /// tree.
    virtual void let_go(const BlockId* ids, std::int32_t n) noexcept = 0;
};

}  // namespace kvcore
