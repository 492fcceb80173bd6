// SPDX-License-Identifier: Apache-2.0
// The conservation laws of the whole manager.
#include <algorithm>
#include <unordered_map>

#include "kvcore/cache_manager.hpp"
#include "kvcore/errors.hpp"

namespace kvcore {

using detail::require_law;

// The committed columns of a row are the tree's pages on the way to its node, save the kept ones.
void CacheManager::check_sequence(const Sequence& sequence) const {
    require_law(sequence.committed <= sequence.num_pages(), "sequence: commits pages it holds");
    require_law(sequence.node != nullptr || sequence.pages.empty(),
                "sequence: has a place in the tree once it holds pages");
    if (sequence.node == nullptr) return;
    const PrefixTree& tree = replica_at(sequence.replica).tree;
    const std::int32_t depth = PrefixTree::depth_of(sequence.node);
    require_law(depth == sequence.committed,
                "sequence: its place in the tree is what it committed");
    std::vector<BlockId> cached(static_cast<std::size_t>(depth));
    tree.copy_pages({sequence.node, depth}, 0, cached.data());
    for (std::int32_t column = 0; column < depth; ++column) {
        const bool own = std::binary_search(sequence.kept.begin(), sequence.kept.end(), column);
        const auto i = static_cast<std::size_t>(column);
        require_law((cached[i] != sequence.pages[i]) == own,
                    "sequence: a committed page is the tree's, a kept one its own");
    }
}

// Every page is counted once for the tree and once for each sequence that holds it as its own.
void CacheManager::check_counts(std::int32_t index) const {
    const Replica& replica = replica_at(index);
    std::unordered_map<BlockId, std::uint32_t> holders;
    for (const PageCopy& copy : held_sources_) {
        if (copy.replica == index && copy.held == nullptr) ++holders[copy.source];
    }
    const std::unordered_map<BlockId, std::uint32_t> copied = holders;
    replica.tree.for_each_run([&](const BlockId* ids, std::int32_t n) {
        for (std::int32_t i = 0; i < n; ++i) {
            require_law(++holders[ids[i]] == 1, "cache: a page is in the tree once");
        }
    });
    std::int64_t sequences = 0;
    for (const Sequence& sequence : sequences_.slots()) {
        if (sequence.replica != index) continue;
        ++sequences;
        require_law(sequence.frozen >= sequence.committed &&
                        sequence.frozen <= std::max(sequence.committed, sequence.num_pages()),
                    "sequence: what is committed or shared is frozen");
        for (std::int32_t column = sequence.frozen; column < sequence.num_pages(); ++column) {
            const BlockId page = sequence.pages[static_cast<std::size_t>(column)];
            const auto source = copied.find(page);
            const std::uint32_t copies = source == copied.end() ? 0 : source->second;
            require_law(replica.pool.ref_count(page) == 1 + copies,
                        "sequence: pages that are not frozen are its own alone");
        }
        for (const std::int32_t column : sequence.kept) {
            ++holders[sequence.pages[static_cast<std::size_t>(column)]];
        }
        for (std::int32_t column = sequence.committed; column < sequence.num_pages(); ++column) {
            ++holders[sequence.pages[static_cast<std::size_t>(column)]];
        }
    }
    require_law(sequences == replica.num_sequences, "replica: sequences are counted");
    for (const auto& [page, count] : holders) {
        require_law(replica.pool.ref_count(page) == count, "pool: references == holders");
    }
    require_law(
        replica.pool.num_free() + static_cast<std::int64_t>(holders.size()) == config_.num_blocks,
        "pool: free + referenced + cached == total");
}

// What a sequence has in the host tier are the first tokens of what it has in the tree.
void CacheManager::check_host_place(const Sequence& sequence) const {
    if (sequence.storing != 0) {
        const auto flight = flights_.find(sequence.storing);
        require_law(sequence.host_node == nullptr && flight != flights_.end() &&
                        sequences_.find(flight->second.sequence) == &sequence,
                    "host tier: a sequence whose pages are stored waits for them");
    }
    if (sequence.host_node == nullptr) return;
    const Replica& replica = replica_at(sequence.replica);
    const std::int32_t depth = PrefixTree::depth_of(sequence.host_node);
    require_law(depth <= sequence.committed, "host tier: a sequence stores what it committed");
    require_law(replica.tree.tokens_of({sequence.node, depth}, 0) ==
                        replica.host->tokens_of({sequence.host_node, depth}, 0) &&
                    PrefixTree::name_of(sequence.node) == PrefixTree::name_of(sequence.host_node),
                "host tier: a sequence's prefix is the same there and here");
}

void CacheManager::check_host(std::int32_t index) const {
    const Replica& replica = replica_at(index);
    if (replica.host == nullptr) return;
    std::int64_t on_their_way = 0;
    std::vector<bool> storing(replica.storing.size());
    for (const auto& [ticket, flight] : flights_) {
        if (flight.replica != index || flight.source == nullptr) continue;
        on_their_way += static_cast<std::int64_t>(flight.host_pages.size());
        for (const BlockId page : flight.device_pages) {
            require_law(!storing[static_cast<std::size_t>(page)],
                        "host tier: a page is on its way once");
            storing[static_cast<std::size_t>(page)] = true;
        }
    }
    require_law(storing == replica.storing, "host tier: pages on their way are known");
    replica.host->check_integrity(on_their_way);
}

void CacheManager::check_integrity() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Sequence& sequence : sequences_.slots()) {
        if (sequence.replica < 0) continue;
        check_sequence(sequence);
        check_host_place(sequence);
    }
    for (std::int32_t i = 0; i < config_.num_replicas; ++i) {
        replica_at(i).pool.check_integrity();
        replica_at(i).tree.check_integrity();
        check_counts(i);
        check_host(i);
    }
}

}  // namespace kvcore
