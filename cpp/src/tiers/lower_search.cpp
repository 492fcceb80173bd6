// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include "kvcore/store_reader.hpp"

namespace kvcore {
namespace {

constexpr std::int32_t kFirstBatch = 8;
constexpr std::int32_t kMostBatch = 256;

}  // namespace

LowerSearch::LowerSearch(CacheManager& manager, const StoreSearch& found,
                         std::string_view name_space, const TokenId* tokens, NextColumn next)
    : manager_(manager),
      found_(found),
      name_space_(name_space),
      tokens_(tokens, tokens + std::int64_t{found.most} * manager.config().page_size),
      keys_(std::move(next.keys)),
      columns_(static_cast<std::size_t>(found.most)) {
    if (!keys_.empty()) at(found.have) = {next.store, next.parts};
}

// Computes the keys of a range of columns. The keys of all columns in the host tier are computed
// together.
void LowerSearch::make_keys(std::int32_t first, std::int32_t end) {
    if (first < found_.stored && front_.empty()) {
        std::vector<PageKey> front(static_cast<std::size_t>(found_.stored));
        manager_.keys_below(name_space_, tokens_.data(), 0, found_.stored,
                            manager_.root_key_below(name_space_), front.data());
        front_.swap(front);
    }
    const auto known = found_.stored + static_cast<std::int32_t>(keys_.size());
    if (end <= known) return;
    std::vector<PageKey> more(static_cast<std::size_t>(end - known));
    manager_.keys_below(name_space_, tokens_.data(), known, end,
                        keys_.empty() ? found_.parent : keys_.back(), more.data());
    keys_.insert(keys_.end(), more.begin(), more.end());
}

// Looks up columns in ascending order, except columns that were looked up before.
void LowerSearch::look(const Stores& stores, const std::vector<std::int32_t>& columns) {
    std::vector<std::int32_t> open;
    for (const std::int32_t column : columns) {
        if (at(column).store == kUnknown) open.push_back(column);
    }
    if (open.empty()) return;
    make_keys(open.front(), open.back() + 1);
    std::vector<std::int32_t> asked;
    std::vector<PageKey> keys;
    std::vector<std::uint64_t> parts;
    for (std::size_t s = 0; s < stores.size() && !open.empty(); ++s) {
        const auto store = static_cast<std::int32_t>(s);
        asked.clear();
        keys.clear();
        for (const std::int32_t column : open) {
            const std::pair<std::int32_t, std::int32_t> place(column, store);
            if (std::find(lost_.begin(), lost_.end(), place) != lost_.end()) continue;
            asked.push_back(column);
            keys.push_back(key(column));
        }
        if (asked.empty()) continue;
        parts.assign(keys.size(), 0);
        stores[s]->parts_of(keys.data(), keys.size(), parts.data());
        for (std::size_t i = 0; i < asked.size(); ++i) {
            if (parts[i] != 0) at(asked[i]) = {store, parts[i]};
        }
        const auto is_known = [&](std::int32_t column) { return at(column).store != kUnknown; };
        open.erase(std::remove_if(open.begin(), open.end(), is_known), open.end());
    }
    for (const std::int32_t column : open) at(column).store = kNowhere;
}

void LowerSearch::look(const Stores& stores, std::int32_t first, std::int32_t end) {
    std::vector<std::int32_t> columns(static_cast<std::size_t>(end - first));
    std::iota(columns.begin(), columns.end(), first);
    look(stores, columns);
}

std::int32_t LowerSearch::reach(const Stores& stores) {
    std::int32_t end = found_.have;
    if (found_.has_gaps) {
        look(stores, found_.have, found_.most);
        for (std::int32_t c = found_.have; c < found_.most; ++c) {
            if (at(c).store >= 0) end = c + 1;
        }
        return end;
    }
    for (std::int32_t batch = 1; end < found_.most;
         batch = std::min(kMostBatch, std::max(kFirstBatch, 2 * batch))) {
        const std::int32_t last = std::min(end + batch, found_.most);
        look(stores, end, last);
        for (; end < last; ++end) {
            if (at(end).store < 0) return end;
        }
    }
    return end;
}

// The columns that stores must load for the longest hit of at most `end` columns; none if no hit is
// longer than `least` columns.
std::vector<ColumnParts> LowerSearch::longest(const Stores& stores, std::int32_t end,
                                              std::int32_t least) {
    while (end > least) {
        std::vector<ColumnParts> needed =
            manager_.needed_below(found_.replica, name_space_, tokens_.data(), end);
        end_ = end;
        std::vector<std::int32_t> columns;
        columns.reserve(needed.size());
        for (const ColumnParts& each : needed) columns.push_back(each.column);
        look(stores, columns);
        const auto lacking = std::find_if(
            needed.rbegin(), needed.rend(),
            [&](const ColumnParts& each) { return (each.parts & ~at(each.column).parts) != 0; });
        if (lacking == needed.rend()) return needed;
        // A hit that ends after this column needs it; the next try ends before the column.
        end = lacking->column;
    }
    return {};
}

void LowerSearch::begin_fill(const std::vector<ColumnParts>& columns, StoreMoves& out) {
    std::vector<PageKey> keys;
    keys.reserve(columns.size());
    for (const ColumnParts& each : columns) keys.push_back(key(each.column));
    manager_.begin_fill(found_.replica, name_space_, tokens_.data(), end_, columns.data(),
                        keys.data(), static_cast<std::int64_t>(keys.size()), out);
}

// Notes that a store does not have a column. Returns true if another store has it.
bool LowerSearch::lose(const Stores& stores, std::int32_t column) {
    lost_.emplace_back(column, at(column).store);
    at(column) = {};
    look(stores, {column});
    return at(column).store >= 0;
}

}  // namespace kvcore
