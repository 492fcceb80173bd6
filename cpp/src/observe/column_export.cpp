// SPDX-License-Identifier: Apache-2.0
#include "observe/cache_copies.hpp"

namespace kvcore {

// Whatever can fail is in front of the first hold, but those of checkpoints, which end by
// themselves.
ColumnExport::ColumnExport(Replica& home, TreePosition at, std::int32_t first)
    : home_(home), ids_(static_cast<std::size_t>(at.depth - first)) {
    const Grouping* grouping = home.columns == nullptr ? nullptr : &home.columns->grouping();
    const std::int32_t lanes = grouping == nullptr ? 1 : grouping->num_lanes();
    home.tree.copy_pages(at, first, ids_.data());
    columns_.reserve(ids_.size());
    pages_.reserve(ids_.size() * static_cast<std::size_t>(lanes));
    if (home.states != nullptr) states_.reserve(ids_.size());
    for (const BlockId column : ids_) {
        columns_.push_back(describe(column));
        for (std::int32_t lane = 0; lane < lanes; ++lane) {
            pages_.push_back(grouping == nullptr ? column : home.columns->page(column, lane));
        }
        if (columns_.back().state < 0) continue;
        states_.emplace_back(*home.states, columns_.back().state);
    }
    for (const BlockId column : ids_) {
        if (grouping != nullptr) home.columns->enter_all(column);
    }
    path_ =
        PathHold(home.pool, home.tree, at.node, at.depth, home.columns.get(), home.states.get());
    home.note_peak();
}

ColumnExport::~ColumnExport() {
    // Where the tree has none of them, none of their pages is kept.
    const TreePosition end{path_.node(), path_.depth()};
    for (const BlockId column : ids_) {
        if (home_.columns != nullptr) home_.columns->leave_all(column, end);
    }
    path_.end(false);
}

CachedColumn ColumnExport::describe(BlockId column) const noexcept {
    CachedColumn found;
    if (home_.columns != nullptr) {
        for (std::size_t w = 0; w < home_.columns->grouping().windows().size(); ++w) {
            const auto bit = static_cast<std::uint8_t>(1U << w);
            if (home_.columns->has(column, w)) found.windows |= bit;
            if (home_.columns->is_passed(column, w)) found.passed |= bit;
        }
    }
    if (home_.states != nullptr && home_.states->has(column)) {
        found.state = home_.states->find(column);
    }
    return found;
}

}  // namespace kvcore
