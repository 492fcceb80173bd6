// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "kvcore/cache_manager.hpp"
#include "support/manager_probe.hpp"
#include "support/request.hpp"
#include "tree/tree_node.hpp"

/// A column of the tree, by the digest of all tokens up to its end.
struct CachedColumn {
    Digest parent = 0;            // digest of the tokens before the column
    std::vector<TokenId> tokens;  // tokens of the column
    std::vector<BlockId> pages;   // by lane; -1: no page
    BlockId id = 0;
    std::int32_t state = -1;  // slot of its checkpoint
};
using Cached = std::map<Digest, CachedColumn>;

/// Return all columns of a tree.
inline Cached cached_of(const kvcore::PrefixTree& tree, const kvcore::ColumnPages* columns,
                        const kvcore::RecurrentSlots* states,
                        const std::vector<std::string>& names) {
    const std::int32_t page_size = tree.page_size();
    const std::int32_t lanes = columns == nullptr ? 0 : columns->grouping().num_lanes();
    Cached cached;
    for (const std::string& name : names) {
        std::vector<std::pair<const kvcore::TreeNode*, Digest>> nodes;
        const kvcore::TreeNode* root = tree.find_namespace(name);
        if (root != nullptr) nodes.emplace_back(root, digest_of_namespace(name));
        while (!nodes.empty()) {
            auto [node, digest] = nodes.back();
            nodes.pop_back();
            for (std::int32_t p = 0; !node->is_root() && p < node->num_pages; ++p) {
                const TokenId* tokens = node->page_tokens(p, page_size);
                CachedColumn column{digest, {tokens, tokens + page_size}, {}, 0};
                column.id = node->ids(page_size)[p];
                for (const TokenId token : column.tokens) digest = digest_after(digest, token);
                for (std::int32_t lane = 0; lane < lanes; ++lane) {
                    column.pages.push_back(columns->page(column.id, lane));
                }
                if (states != nullptr && states->has(column.id)) {
                    column.state = states->find(column.id);
                }
                cached.emplace(digest, std::move(column));
            }
            kvcore::for_each_child(node, [&, end = digest](kvcore::TreeNode* child) {
                nodes.emplace_back(child, end);
            });
        }
    }
    return cached;
}

/// Return all columns of a replica's tree.
inline Cached cached_of(const kvcore::CacheManager& manager, std::int32_t index,
                        const std::vector<std::string>& names) {
    const kvcore::Replica& replica = kvcore::CacheManagerProbe::replica(manager, index);
    return cached_of(replica.tree, replica.columns.get(), replica.states.get(), names);
}
/// Return all columns of the replica's host tier, empty without a tier.
inline Cached records_of(const kvcore::CacheManager& manager, std::int32_t index,
                         const std::vector<std::string>& names) {
    const kvcore::Replica& replica = kvcore::CacheManagerProbe::replica(manager, index);
    if (replica.host == nullptr) return {};
    return cached_of(replica.host->tree, replica.host->columns.get(), replica.host->states.get(),
                     names);
}
