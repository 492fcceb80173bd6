// SPDX-License-Identifier: Apache-2.0
#include "manager/look_up.hpp"

#include <algorithm>
#include <tuple>

namespace kvcore::look_up {

namespace {

// depth 0, and no node where the namespace has no page.
TreePosition find(const Replica& replica, std::string_view name_space, const TokenId* tokens,
                  std::int64_t n, std::vector<BlockId>* pages) {
    TreeNode* root = replica.tree.find_namespace(name_space);
    TreePosition at;
    if (root != nullptr) at = replica.tree.match(root, tokens, n).at;
    if (pages == nullptr) return at;
    pages->resize(static_cast<std::size_t>(at.depth));
    if (at.depth > 0) replica.tree.copy_pages(at, 0, pages->data());
    return at;
}

}  // namespace

std::int64_t match(const Replica& replica, std::string_view name_space, const TokenId* tokens,
                   std::int64_t n, std::vector<BlockId>* pages) {
    return find(replica, name_space, tokens, n, pages).depth;
}

std::int64_t touch(Replica& replica, std::string_view name_space, const TokenId* tokens,
                   std::int64_t n, std::vector<BlockId>* pages) {
    const TreePosition at = find(replica, name_space, tokens, n, pages);
    replica.tree.touch(at);
    return at.depth;
}

std::int32_t recommend_replica(const ManagerState& state, std::string_view name_space,
                               const TokenId* tokens, std::int64_t n) {
    using Merit = std::tuple<std::int64_t, std::int64_t, std::int64_t>;
    std::int32_t best = 0;
    Merit most{-1, -1, 0};
    for (std::int32_t i = 0; i < state.config.num_replicas; ++i) {
        const Replica& replica = state.replica_at(i);
        std::int64_t hit = 0;
        if (state.config.prefix_caching) {
            hit = match(replica, name_space, tokens, n, nullptr);
            if (replica.host != nullptr) {
                hit = std::max<std::int64_t>(hit, replica.host->match(name_space, tokens, n).depth);
            }
        }
        const Merit merit{hit, replica.num_available(), -replica.num_sequences};
        if (i == 0 || merit > most) {
            most = merit;
            best = i;
        }
    }
    return best;
}

PoolStats stats(const ManagerState& state, std::int32_t replica) {
    const Replica& asked = state.replica_at(replica);
    return {state.config.num_pages,
            asked.pool.num_free(),
            asked.tree.num_cached(),
            asked.tree.num_evictable(),
            asked.num_sequences,
            state.config.host_pages,
            asked.host == nullptr ? 0 : asked.host->num_stored()};
}

Metrics metrics(const ManagerState& state) noexcept {
    Metrics sum;
    for (const auto& replica : state.replicas) sum += replica->metrics;
    return sum;
}

}  // namespace kvcore::look_up
