// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvcore/prefix_tree.hpp"
#include "support/check.hpp"

/// A PrefixTree whose page ids count up in insertion order, with the steps that most tests repeat.
class TreeFixture {
   public:
    using Tokens = std::vector<kvcore::TokenId>;
    using Ids = std::vector<kvcore::BlockId>;

    explicit TreeFixture(std::int32_t page_size,
                         std::unique_ptr<kvcore::EvictionPolicy> policy = nullptr)
        : tree(page_size, std::move(policy)) {}

    kvcore::PrefixTree tree;
    std::vector<kvcore::DuplicatePage> duplicates;  // of the last insertion

    /// Insert whole pages below `at`, a root or a node that is pinned once. The pin moves to their
    /// end.
    kvcore::TreeNode* extend(kvcore::TreeNode* at, const Tokens& tokens) {
        const auto n = static_cast<std::int32_t>(tokens.size()) / tree.page_size();
        Ids ids;
        for (std::int32_t i = 0; i < n; ++i) ids.push_back(next_id_++);
        duplicates.clear();
        kvcore::TreeNode* end = tree.insert(at, tokens.data(), ids.data(), n, duplicates);
        tree.pin(end);
        if (is_pinned_run(at)) tree.unpin(at, false);
        return end;
    }
    /// Insert pages below a namespace's root; the end stays pinned.
    kvcore::TreeNode* hold(const Tokens& tokens, const std::string& name_space = "") {
        return extend(tree.open_namespace(name_space), tokens);
    }
    /// Cache a prompt without a holder.
    kvcore::TreeNode* put(const Tokens& tokens, const std::string& name_space = "") {
        kvcore::TreeNode* end = hold(tokens, name_space);
        tree.unpin(end, true);
        return end;
    }
    /// Split the run at the end of a hit and pin it, as a sequence with a hit does.
    kvcore::TreeNode* pin(const Tokens& tokens) {
        kvcore::TreeNode* node = tree.split(match(tokens).at);
        tree.pin(node);
        return node;
    }

    kvcore::PrefixMatch match(const Tokens& tokens, bool want_partial = false,
                              const std::string& name_space = "") {
        return tree.match(tree.open_namespace(name_space), tokens.data(),
                          static_cast<std::int64_t>(tokens.size()), want_partial);
    }
    std::int32_t depth(const Tokens& tokens) { return match(tokens).at.depth; }
    Ids pages(const Tokens& tokens) {
        const kvcore::TreePosition at = match(tokens).at;
        Ids ids(static_cast<std::size_t>(at.depth));
        tree.copy_pages(at, 0, ids.data());
        return ids;
    }
    /// Evict pages one by one; fewer if no other page is evictable.
    Ids evict(std::int64_t n, kvcore::EvictionGuard guard = {}) {
        Ids ids;
        kvcore::BlockId id = -1;
        while (n-- > 0 && tree.evict(1, &id, guard) == 1) ids.push_back(id);
        tree.check_integrity();
        return ids;
    }
    /// Evict pages in one call, which returns them in no order. Return them sorted.
    Ids evict_at_once(std::int64_t n, kvcore::EvictionGuard guard = {}) {
        Ids ids(static_cast<std::size_t>(n), -1);
        ids.resize(static_cast<std::size_t>(tree.evict(n, ids.data(), guard)));
        tree.check_integrity();
        std::sort(ids.begin(), ids.end());
        return ids;
    }
    void check_counts(std::int64_t cached, std::int64_t evictable, std::int64_t nodes) const {
        tree.check_integrity();
        CHECK_EQ(tree.num_cached(), cached);
        CHECK_EQ(tree.num_evictable(), evictable);
        CHECK_EQ(tree.num_nodes(), nodes);
    }

   private:
    static bool is_pinned_run(const kvcore::TreeNode* node) {
        return kvcore::PrefixTree::depth_of(node) > 0;
    }

    kvcore::BlockId next_id_ = 0;
};
