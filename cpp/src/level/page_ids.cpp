// SPDX-License-Identifier: Apache-2.0
#include "level/page_ids.hpp"

#include <algorithm>
#include <cstddef>

#include "kvcore/errors.hpp"

namespace kvcore::page_ids {

void require(const Replica& home, BlockId page) {
    const BlockPool& pool = home.page_pool();
    if (page >= pool.first_id() && page < pool.end_id()) return;
    throw InvalidHandleError(detail::concat("page ", page, " does not exist, must be ",
                                            pool.first_id(), " .. ", pool.end_id() - 1));
}

std::vector<BlockId> columns_of(const Replica& home, const BlockId* pages, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) require(home, pages[i]);
    std::vector<BlockId> columns(pages, pages + n);
    if (home.columns == nullptr) return columns;
    std::vector<BlockId> owner(static_cast<std::size_t>(home.page_pool().end_id()), -1);
    for (std::int64_t i = 0; i < home.pool.end_id(); ++i) {
        const auto column = static_cast<BlockId>(i);
        home.for_each_page(column,
                           [&](BlockId page) { owner[static_cast<std::size_t>(page)] = column; });
    }
    for (BlockId& each : columns) each = owner[static_cast<std::size_t>(each)];
    return columns;
}

std::vector<bool> mark(const Replica& home, const std::vector<BlockId>& columns) {
    std::vector<bool> marked(static_cast<std::size_t>(home.pool.end_id()));
    for (const BlockId column : columns) {
        if (column >= 0) marked[static_cast<std::size_t>(column)] = true;
    }
    return marked;
}

std::vector<std::pair<BlockId, TreePosition>> locate(Replica& home,
                                                     const std::vector<BlockId>& columns) {
    std::vector<std::pair<BlockId, TreePosition>> found;
    const std::vector<TreePosition> places = home.tree.locate(mark(home, columns));
    for (std::size_t i = 0; i < places.size(); ++i) {
        const TreePosition& at = places[i];
        found.emplace_back(Replica::last_column(home.tree, at), at);
        const bool is_last = i + 1 == places.size() || places[i + 1].node != at.node;
        if (is_last) static_cast<void>(home.tree.split(at));
    }
    std::sort(found.begin(), found.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    return found;
}

}  // namespace kvcore::page_ids
