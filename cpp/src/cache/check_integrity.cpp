// SPDX-License-Identifier: Apache-2.0
// The conservation laws of the whole manager.
#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "cache/queries.hpp"
#include "kvcore/errors.hpp"
#include "level/refs.hpp"

namespace kvcore::queries {
namespace {

using detail::require_law;

using Holders = std::unordered_map<BlockId, std::uint32_t>;  // of each page

// Counts the references of copies, tier transfers, holds by id, exports and imports.
Holders transfer_holders(const CacheData& cache, std::int32_t replica) {
    Holders holders;
    const Replica& home = cache.replica_at(replica);
    home.page_refs.for_each([&](const PageRef& ref) {
        if (ref.is_reference()) ++holders[ref.column()];
    });
    home.prefix_refs.for_each([&](const PrefixRef& ref) {
        const PrefixRef::Pages held = ref.references();
        for (std::int64_t i = 0; i < held.n; ++i) ++holders[held.ids[i]];
    });
    for (const TierFlight& flight : cache.ledger.flights.all()) {
        if (flight.replica != replica || !flight.is_load) continue;
        for (const BlockId page : flight.device_pages) ++holders[page];
    }
    for (const ColumnImport* each : cache.cache_copies.imports()) {
        if (&each->home() != &cache.replica_at(replica)) continue;
        for (const BlockId own : each->own()) {
            if (own >= 0) ++holders[own];
        }
    }
    return holders;
}

void add_tree(const Replica& replica, Holders& holders) {
    replica.tree.for_each_run([&](const BlockId* ids, std::int32_t n) {
        for (std::int32_t i = 0; i < n; ++i) {
            require_law(++holders[ids[i]] == 1,
                        "cache: a page is in the tree once, and no transfer has a reference to it");
            require_law(replica.pool.ref_count(ids[i]) == 1,
                        "cache: a page in the tree has no other owner");
        }
    });
    replica.tree.for_each_forgotten_run([&](const BlockId* ids, std::int32_t n) {
        for (std::int32_t i = 0; i < n; ++i) {
            ++holders[ids[i]];  // of the forgotten run; a hold from before a reset adds its own
        }
    });
}

void add_row(const PageRow& row, const BlockPool& pool, const Holders& copied, Holders& holders) {
    for (std::int32_t column = row.read_only_end(); column < row.size(); ++column) {
        const auto source = copied.find(row[column]);
        const std::uint32_t copies = source == copied.end() ? 0 : source->second;
        require_law(pool.ref_count(row[column]) == 1 + copies,
                    "sequence: pages that are not read-only have no other owner");
    }
    for (const std::int32_t column : row.own_duplicates()) ++holders[row[column]];
    for (std::int32_t column = row.committed(); column < row.size(); ++column) {
        ++holders[row[column]];
    }
}

// Every page is counted once for the tree, or once for each sequence and transfer that owns it. A
// page in the tree has no other owner: the sequence that committed it holds its place in the tree.
void check_counts(const CacheData& cache, std::int32_t index) {
    const Replica& replica = cache.replica_at(index);
    Holders holders = transfer_holders(cache, index);
    const Holders copied = holders;
    add_tree(replica, holders);
    std::int64_t sequences = 0;
    for (const Sequence& sequence : cache.sequences.entries()) {
        if (sequence.replica != index) continue;
        ++sequences;
        add_row(sequence.pages, replica.pool, copied, holders);
    }
    require_law(sequences == replica.num_sequences, "replica: sequences are counted");
    for (const auto& [page, count] : holders) {
        require_law(replica.pool.ref_count(page) == count, "pool: references == holders");
    }
    const auto held = static_cast<std::int64_t>(holders.size());
    require_law(replica.pool.num_free() + held == replica.pool.num_blocks(),
                "pool: free + referenced + cached == total");
}

// Calls visit(column) for each column that an export reads or an import fills.
template <class Visit>
void for_each_copied_column(const CacheData& cache, const Replica& replica, const Visit& visit) {
    for (const ColumnExport* each : cache.cache_copies.exports()) {
        if (&each->home() != &replica) continue;
        for (const BlockId column : each->ids()) visit(column);
    }
    for (const ColumnImport* each : cache.cache_copies.imports()) {
        if (&each->home() != &replica) continue;
        for (const BlockId own : each->own()) {
            if (own >= 0) visit(own);
        }
    }
}

// Each sequence reads the columns that its windows cover; each copy reads the columns that it
// names.
void check_columns(const CacheData& cache, std::int32_t index) {
    const Replica& replica = cache.replica_at(index);
    if (replica.columns == nullptr) return;
    const std::size_t windows = cache.grouping.windows().size();
    std::vector<std::uint32_t> readers(static_cast<std::size_t>(replica.pool.end_id()) *
                                       std::max<std::size_t>(1, windows));
    const auto add = [&](BlockId column, std::size_t window) {
        ++readers[static_cast<std::size_t>(column) * windows + window];
    };
    const std::vector<Sequence>& entries = cache.sequences.entries();
    for (std::size_t i = 0; i < entries.size(); ++i) {
        if (entries[i].replica != index) continue;
        const PageRow& row = entries[i].pages;
        for (const BlockId column : row.ids()) {
            require_law(replica.columns->has_full_pages(column),
                        "sequence: its columns have all full pages");
        }
        for (std::size_t w = 0; w < windows; ++w) {
            for (std::int32_t c = cache.windows.at(i).first[w]; c < row.size(); ++c) {
                add(row[c], w);
                require_law(c >= cache.windows.at(i).reserved || replica.columns->has(row[c], w) ||
                                cache.ledger.flights.brings(entries[i], c, w),
                            "sequence: has the pages of windows that it has reserved");
            }
        }
    }
    cache.ledger.flights.for_each_column(index, [&](BlockId column) {
        for (std::size_t w = 0; w < windows; ++w) add(column, w);
    });
    for_each_copied_column(cache, replica, [&](BlockId column) {
        for (std::size_t w = 0; w < windows; ++w) add(column, w);
    });
    replica.page_refs.for_each([&](const PageRef& ref) {
        for (std::size_t w = 0; w < windows; ++w) add(ref.column(), w);
    });
    replica.columns->check_integrity(readers);
}

// A page is held exactly if it is neither free nor evictable, and quotas are kept.
void check_owners(const Replica& replica) {
    if (replica.owners == nullptr) return;
    const std::int64_t available = replica.num_available();
    const PageOwners& owners = *replica.owners;
    owners.check_integrity();
    std::int64_t held = 0;
    for (std::size_t i = 0; i < owners.counts().num_owners(); ++i) {
        held += owners.counts().held(static_cast<Owner>(i));
    }
    require_law(held + available == replica.num_pages(), "tenants: held + available == total");
    require_law(owners.counts().is_lawful(available),
                "tenants: no tenant is above its ceiling, every reservation can be filled");
}

// Counts by reason, and by tenant, add up to the totals.
void check_tallies(Replica& replica) {
    const Metrics counted = replica.counted();
    const EvictionCounts& evicted = counted.evicted;
    require_law(evicted.policy + evicted.window + evicted.unreachable == counted.evicted_pages,
                "metrics: evicted by reason == evicted");
    if (replica.owners == nullptr) return;
    OwnerTally sum;
    for (std::size_t i = 0; i < replica.owners->counts().num_owners(); ++i) {
        const OwnerTally& tally = replica.owners->tally(static_cast<Owner>(i));
        require_law(tally.input_tokens >= 0 && tally.cache_tokens >= 0,
                    "metrics: tokens of a tenant >= 0");
        sum.input_tokens += tally.input_tokens;
        sum.cache_tokens += tally.cache_tokens;
        sum.generated_tokens += tally.generated_tokens;
    }
    require_law(sum.input_tokens == counted.input_tokens,
                "metrics: tokens to compute of tenants == tokens to compute");
    require_law(sum.cache_tokens == counted.cache_tokens,
                "metrics: cached tokens of tenants == cached tokens");
    require_law(sum.generated_tokens == counted.generated_tokens,
                "metrics: generated tokens of tenants == generated tokens");
}

// A request has its own slots; a checkpoint belongs to the tree.
void check_states(const CacheData& cache, std::int32_t index) {
    const Replica& replica = cache.replica_at(index);
    if (replica.states == nullptr) return;
    std::vector<RecurrentSlots::Slot> used;
    const std::vector<Sequence>& entries = cache.sequences.entries();
    for (std::size_t i = 0; i < entries.size(); ++i) {
        if (entries[i].replica != index) continue;
        const RecurrentSlots::Slot slot = cache.states.at(i).slot;
        require_law(slot != RecurrentSlots::kNone || entries[i].pages.empty(),
                    "sequence: has a slot once it holds pages");
        if (slot != RecurrentSlots::kNone) used.push_back(slot);
        const RecurrentSlots::Slot kept = cache.states.at(i).kept;
        require_law(kept == RecurrentSlots::kNone || slot != RecurrentSlots::kNone,
                    "sequence: has a slot if it keeps a state");
        if (kept != RecurrentSlots::kNone) used.push_back(kept);
    }
    for (const ColumnImport* each : cache.cache_copies.imports()) {
        if (&each->home() != &replica) continue;
        for (const CachedColumn& column : each->columns()) {
            if (column.state >= 0) used.push_back(column.state);
        }
    }
    std::vector<bool> cached(static_cast<std::size_t>(replica.pool.end_id()));
    replica.tree.for_each_run([&](const BlockId* ids, std::int32_t n) {
        for (std::int32_t i = 0; i < n; ++i) cached[static_cast<std::size_t>(ids[i])] = true;
    });
    replica.states->check_integrity(used, cached);
}

// Both pages of a copy are held until it is over.
void check_copy(const CacheData& cache, const OwedCopies::Copy& copy) {
    require_law(copy.source.column() == copy.copy.source &&
                    copy.destination.column() == copy.copy.destination &&
                    copy.destination.is_reference(),
                "transfers: both pages of a copy are held");
    require_law(cache.sequences.find(copy.copy.sequence) != nullptr || copy.ticket != 0,
                "transfers: no copy is pending for a released sequence");
}

// All state copies that name a sequence count as one pending transfer of it.
void add_state_copies(const CacheData& cache,
                      std::unordered_map<const Sequence*, std::int32_t>& pending) {
    std::unordered_set<const Sequence*> named{nullptr};
    for (const StateCopies::Copy& copy : cache.ledger.state_copies.all()) {
        for (const SequenceHandle handle : {copy.from, copy.into}) {
            const Sequence* sequence = cache.sequences.find(handle);
            if (named.insert(sequence).second) ++pending[sequence];
        }
    }
}

// A page that a PageRef keeps is not free; in the tree it is protected. A page that is held by its
// id is in the column of its PageRef.
void check_refs(const Replica& replica) {
    replica.page_refs.for_each([&](const PageRef& ref) {
        require_law(replica.pool.ref_count(ref.column()) > 0, "holds: a held page is not free");
        bool is_its = ref.page() < 0;
        replica.for_each_page(ref.column(), [&](BlockId each) { is_its |= each == ref.page(); });
        require_law(is_its, "holds: a held page is in its column");
        const TreePosition at = ref.at();
        if (at.node == nullptr) return;
        require_law(
            Replica::last_column(replica.tree, at) == ref.column() && replica.tree.is_protected(at),
            "holds: a page that is held in the tree is not evicted");
    });
}

// A sequence waits for each copy or load into its pages.
void check_transfers(const CacheData& cache) {
    std::unordered_map<const Sequence*, std::int32_t> pending;
    for (const OwedCopies::Copy& copy : cache.ledger.copies.all()) {
        check_copy(cache, copy);
        const Sequence* sequence = cache.sequences.find(copy.copy.sequence);
        if (sequence != nullptr) ++pending[sequence];
    }
    add_state_copies(cache, pending);
    for (const TierFlight& flight : cache.ledger.flights.all()) {
        const Sequence* sequence = cache.sequences.find(flight.sequence);
        if (flight.holds_up() && sequence != nullptr) ++pending[sequence];
    }
    for (const Sequence& sequence : cache.sequences.entries()) {
        const auto found = pending.find(&sequence);
        const std::int32_t expected = found == pending.end() ? 0 : found->second;
        require_law(sequence.num_pending == expected,
                    "transfers: a sequence counts the transfers into its pages");
    }
}

}  // namespace

void check_integrity(const CacheData& cache) {
    for (const Sequence& sequence : cache.sequences.entries()) {
        if (sequence.replica < 0) continue;
        sequence.pages.check_integrity(cache.home_of(sequence).tree);
    }
    check_transfers(cache);
    for (std::int32_t i = 0; i < cache.config.num_replicas; ++i) {
        cache.replica_at(i).pool.check_integrity();
        cache.replica_at(i).tree.check_integrity();
        check_counts(cache, i);
        check_columns(cache, i);
        check_refs(cache.replica_at(i));
        check_owners(cache.replica_at(i));
        check_tallies(cache.replica_at(i));
        check_states(cache, i);
    }
    cache.ledger.flights.check_integrity();
    if (cache.misses != nullptr) cache.misses->check_integrity();
    if (cache.advice != nullptr) cache.advice->check_integrity();
}

}  // namespace kvcore::queries
