// SPDX-License-Identifier: Apache-2.0
// The conservation laws of the whole manager.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "kvcore/errors.hpp"
#include "manager/transfer_ledger.hpp"

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

// Every page is counted once for the tree, or once for each sequence and transfer that holds it as
// its own. The tree's has no other owner: who committed it holds its place there.
void CacheManager::check_counts(std::int32_t index) const {
    const Replica& replica = replica_at(index);
    std::unordered_map<BlockId, std::uint32_t> holders;
    for (const Ledger::Copy& copy : ledger_->copies) {
        if (copy.copy.replica != index) continue;
        ++holders[copy.destination.page()];
        if (copy.source.is_reference()) ++holders[copy.source.page()];
    }
    for (const HostFlight& flight : ledger_->flights) {
        if (flight.replica != index) continue;
        const bool is_load = flight.direction == HostDirection::kLoad;
        const PathHold::Pages held =
            is_load ? PathHold::Pages{flight.device_pages.data(),
                                      static_cast<std::int64_t>(flight.device_pages.size())}
                    : flight.source.references();
        for (std::int64_t i = 0; i < held.n; ++i) ++holders[held.ids[i]];
    }
    const std::unordered_map<BlockId, std::uint32_t> copied = holders;
    replica.tree.for_each_run([&](const BlockId* ids, std::int32_t n) {
        for (std::int32_t i = 0; i < n; ++i) {
            require_law(++holders[ids[i]] == 1,
                        "cache: a page is in the tree once, and no transfer has a reference to it");
            require_law(replica.pool.ref_count(ids[i]) == 1,
                        "cache: a page in the tree has no other owner");
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
        const auto is_its = [&](const HostFlight& flight) {
            return flight.number == sequence.storing && flight.direction == HostDirection::kStore &&
                   sequences_.find(flight.sequence) == &sequence;
        };
        require_law(sequence.host_node == nullptr &&
                        std::any_of(ledger_->flights.begin(), ledger_->flights.end(), is_its),
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
    std::unordered_set<BlockId> referenced;  // by one load or several
    std::vector<bool> storing(replica.storing.size());
    for (const HostFlight& flight : ledger_->flights) {
        if (flight.replica != index) continue;
        if (flight.direction == HostDirection::kLoad) {
            const PathHold::Pages held = flight.source.references();
            referenced.insert(held.ids, held.ids + held.n);
            continue;
        }
        on_their_way += static_cast<std::int64_t>(flight.host_pages.size());
        for (const BlockId page : flight.device_pages) {
            require_law(!storing[static_cast<std::size_t>(page)],
                        "host tier: a page is on its way once");
            storing[static_cast<std::size_t>(page)] = true;
        }
    }
    require_law(storing == replica.storing, "host tier: pages on their way are known");
    replica.host->check_integrity(on_their_way + static_cast<std::int64_t>(referenced.size()));
}

// Both pages of a copy are held until it is over, and its sequence waits for it.
void CacheManager::check_transfers() const {
    std::unordered_map<const Sequence*, std::int32_t> pending;
    for (const Ledger::Copy& copy : ledger_->copies) {
        const Replica& replica = replica_at(copy.copy.replica);
        require_law(copy.source.page() == copy.copy.source &&
                        copy.destination.page() == copy.copy.destination &&
                        copy.destination.is_reference(),
                    "transfers: both pages of a copy are held");
        if (!copy.source.is_reference()) {
            const TreePosition at = copy.source.at();
            BlockId page = -1;
            replica.tree.copy_pages(at, at.depth - 1, &page);
            require_law(page == copy.copy.source && replica.tree.is_protected(at),
                        "transfers: what is copied out of the tree stays there");
        }
        const Sequence* sequence = sequences_.find(copy.copy.sequence);
        require_law(sequence != nullptr || copy.ticket != 0,
                    "transfers: nothing is owed to a sequence that is gone");
        if (sequence != nullptr) ++pending[sequence];
    }
    for (const HostFlight& flight : ledger_->flights) {
        const Sequence* sequence = sequences_.find(flight.sequence);
        const bool is_load = flight.direction == HostDirection::kLoad;
        if (is_load && sequence != nullptr) ++pending[sequence];
    }
    for (const Sequence& sequence : sequences_.slots()) {
        const auto found = pending.find(&sequence);
        const std::int32_t expected = found == pending.end() ? 0 : found->second;
        require_law(sequence.num_pending == expected,
                    "transfers: a sequence knows of those into its pages");
    }
}

void CacheManager::check_integrity() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Sequence& sequence : sequences_.slots()) {
        if (sequence.replica < 0) continue;
        check_sequence(sequence);
        check_host_place(sequence);
    }
    check_transfers();
    for (std::int32_t i = 0; i < config_.num_replicas; ++i) {
        replica_at(i).pool.check_integrity();
        replica_at(i).tree.check_integrity();
        check_counts(i);
        check_host(i);
    }
}

}  // namespace kvcore
