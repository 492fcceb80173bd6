// SPDX-License-Identifier: Apache-2.0
#include "store/store_queue.hpp"

#include <new>
#include <utility>

#include "kvcore/errors.hpp"
#include "support/memory.hpp"
#include "support/tickets.hpp"

namespace kvcore {

StoreQueue::StoreQueue(const CacheConfig& config, const Grouping& grouping,
                       const std::vector<std::unique_ptr<Replica>>& replicas)
    : grouping_(grouping),
      replicas_(replicas),
      paths_(config.page_size, config.key_seed, config.stand_ins) {}

// A checkpoint arrives right after the pages before it, and joins their entry.
void StoreQueue::arrived(std::int32_t replica, TreePosition end, std::int32_t first) noexcept {
    Level& host = *replica_of(replica).host;
    if (host.keys == nullptr || end.depth <= first) return;
    TreeNode* node = PrefixTree::position(end.node, end.depth).node;
    if (!waiting_.empty()) {
        Waiting& last = waiting_.back();
        if (last.replica == replica && last.end.node() == node && last.end.depth() == end.depth) {
            num_waiting_ += std::max(0, last.first - first);
            last.first = std::min(last.first, first);
            return;
        }
    }
    try {
        waiting_.push_back({replica, first, PrefixRef(host, {node, end.depth})});
        num_waiting_ += end.depth - first;
    } catch (const std::bad_alloc&) {
        num_dropped_ += end.depth - first;
    }
}

// Searches from the last record upward for a known key. Mostly the last record has a key, and no
// key is computed.
void StoreQueue::ensure_keys(Level& host, TreePosition at) const {
    RecordKeys& keys = *host.keys;
    const PrefixTree& tree = host.tree;
    if (keys.find(Replica::last_column(tree, at)) != nullptr) return;
    std::vector<BlockId> records(static_cast<std::size_t>(at.depth));
    tree.copy_pages(at, 0, records.data());
    std::int32_t first = at.depth - 1;
    while (first > 0 && keys.find(records[static_cast<std::size_t>(first - 1)]) == nullptr) --first;
    const std::string_view name = PrefixTree::name_of(at.node);
    const PageKey parent =
        first == 0 ? paths_.root(name) : *keys.find(records[static_cast<std::size_t>(first - 1)]);
    const bool may_have_extras = paths_.may_have_extras();
    const std::vector<TokenId> tokens = tree.tokens_of(at, may_have_extras ? 0 : first);
    std::vector<PageKey> made(static_cast<std::size_t>(at.depth - first));
    if (may_have_extras) {
        paths_.keys_of(name, tokens.data(), first, at.depth, parent, made.data());
    } else {
        paths_.keys_behind(parent, tokens.data(), at.depth - first, made.data());
    }
    for (std::size_t i = 0; i < made.size(); ++i) {
        keys.set(records[static_cast<std::size_t>(first) + i], made[i]);
    }
}

PageKey StoreQueue::key_at(Replica& replica, std::string_view name_space, TreePosition at) const {
    if (at.depth == 0) return paths_.root(name_space);
    Level& host = *replica.host;
    ensure_keys(host, at);
    return *host.keys->find(Replica::last_column(host.tree, at));
}

// Does everything that can fail. Splits the run if only a part of it is taken.
StoreQueue::Taken StoreQueue::prepare(const Waiting& waiting, std::int32_t depth,
                                      std::uint64_t ticket) const {
    Level& host = *replica_of(waiting.replica).host;
    TreeNode* node = waiting.end.node();
    if (depth < waiting.end.depth()) node = host.tree.split({node, depth});
    ensure_keys(host, {node, depth});
    Taken taken{ticket, waiting.replica, {}, {}, {}};
    taken.records.resize(static_cast<std::size_t>(depth - waiting.first));
    host.tree.copy_pages({node, depth}, waiting.first, taken.records.data());
    if (host.states != nullptr) taken.states.reserve(taken.records.size());
    taken.source = PrefixRef(host, {node, depth}, PrefixRef::Pages::of(taken.records));
    return taken;
}

// Skips records without pages, which a store could not have.
void StoreQueue::give_out(Taken& taken, StoreMoves& out) const noexcept {
    Level& host = *replica_of(taken.replica).host;
    for (const BlockId record : taken.records) {
        const std::size_t first = out.parts.size();
        host.enter(record);
        for (std::int32_t lane = 0; lane < host.grouping().num_lanes(); ++lane) {
            const BlockId page = host.page(record, lane);
            if (page != ColumnPages::kNoPage) out.parts.push_back({lane, page});
        }
        if (host.has_checkpoint(record)) {
            taken.states.emplace_back(*host.states, host.find_checkpoint(record));
            out.parts.push_back({kStatePart, taken.states.back().slot()});
        }
        if (out.parts.size() == first) continue;
        out.keys.push_back(*host.keys->find(record));
        out.ends.push_back(static_cast<std::int32_t>(out.parts.size()));
    }
}

bool StoreQueue::take(std::int64_t most, std::uint64_t ticket, StoreMoves& out) {
    if (waiting_.empty() || most < 1) return false;
    const std::int32_t replica = waiting_.front().replica;
    const auto parts_of_one = static_cast<std::size_t>(grouping_.num_lanes()) + 1;
    while (most > 0 && !waiting_.empty() && waiting_.front().replica == replica) {
        Waiting& next = waiting_.front();
        const auto n = static_cast<std::int32_t>(std::min<std::int64_t>(most, next.size()));
        try {
            make_room(out.keys, static_cast<std::size_t>(n));
            make_room(out.ends, static_cast<std::size_t>(n));
            make_room(out.parts, static_cast<std::size_t>(n) * parts_of_one);
            make_room(taken_, 1);
            taken_.push_back(prepare(next, next.first + n, ticket));
        } catch (const std::bad_alloc&) {
            if (out.ticket == 0) throw;
            break;
        }
        give_out(taken_.back(), out);
        out.ticket = ticket;
        out.replica = replica;
        most -= n;
        next.first += n;
        if (next.size() == 0) waiting_.pop_front();
    }
    return true;
}

void StoreQueue::end(Taken& taken) noexcept {
    Level& host = *replica_of(taken.replica).host;
    host.begin_leaving(taken.source.at());
    for (const BlockId record : taken.records) {
        host.leave_now(record, ColumnPages::Departure::kUnused);
    }
    taken.states.clear();
    taken.source.end();
    num_waiting_ -= static_cast<std::int64_t>(taken.records.size());
}

bool StoreQueue::finish(std::uint64_t ticket) noexcept {
    return end_ticket(taken_, ticket, [this](Taken& each) {
        end(each);
        return true;
    });
}

void StoreQueue::drop_forgotten() noexcept {
    const auto drop = [this](const Waiting& each) {
        if (each.end) return false;
        num_waiting_ -= each.size();
        num_dropped_ += each.size();
        return true;
    };
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), drop), waiting_.end());
}

}  // namespace kvcore
