// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvcore/prefix_tree.hpp"
#include "kvcore/request.hpp"
#include "level/level.hpp"
#include "observe/advice_log.hpp"
#include "observe/event_log.hpp"
#include "observe/export_import.hpp"
#include "observe/miss_log.hpp"
#include "observe/token_counts.hpp"
#include "request/sequence.hpp"
#include "transfer/pool_copies.hpp"
#include "transfer/transfer_ledger.hpp"

namespace kvcore {

// ---- memory of a call, kept for the next call, so that a decode step allocates nothing ----------

/// The sequences of the rows of a batch, and the stamp that finds duplicates.
class BatchSequences {
   public:
    /// Makes room, so that `set` may name rows below `n`.
    void resize(std::int64_t n) { sequences_.resize(static_cast<std::size_t>(n)); }
    void set(std::int64_t row, Sequence& sequence) noexcept {
        sequences_[static_cast<std::size_t>(row)] = &sequence;
    }
    [[nodiscard]] Sequence& operator[](std::int64_t row) const noexcept {
        return *sequences_[static_cast<std::size_t>(row)];
    }

    std::uint32_t stamp = 0;             // of the last batch
    std::vector<RequestView*> requests;  // of a batch that was given as views

   private:
    std::vector<Sequence*> sequences_;
};

/// Rows of a batch that need pages.
struct ReserveMemory {
    /// A row that needs only more columns at its end.
    struct Growth {
        std::int64_t row;
        std::int64_t columns;
    };
    struct Supply {
        std::int64_t left;           // pages that are still available
        bool has_evictable = false;  // `left` includes evictable pages; free pages are too few
        std::int64_t wanted = 0;     // columns of the rows that only grow
    };

    std::vector<Growth> growing;
    std::vector<std::int64_t> joining;  // the other rows
    std::vector<Supply> supply;         // of each replica
    std::vector<std::int64_t> columns;  // of each replica: columns that are still available
};

struct FetchMemory {
    struct LateRow {
        std::int64_t batch_row;
        std::int64_t row;  // row in its replica's table
    };
    struct Room {
        std::int64_t rows = 0;
        std::int64_t columns = 0;
    };

    std::vector<std::int64_t> missing;  // rows that need pages
    std::vector<LateRow> late;          // rows that are written after all rows are reserved
    std::vector<Undo> undo;             // changes to undo if the batch is refused
    std::vector<std::int64_t> prompts;  // written rows that are still in their prompts
    std::vector<Room> rooms;            // of the tables of each replica
};

struct CommitMemory {
    std::vector<std::int64_t> rows;     // rows that have pages to commit
    std::vector<std::int64_t> passing;  // rows whose windows leave columns
    std::vector<Undo> undo;             // changes to undo if the batch is refused
    std::vector<DuplicatePage> duplicates;
    std::vector<PageSwap> swapped;
    std::vector<BlockId> replaced;  // columns that were swapped
    // With quotas: cached pages that the request of a row holds from now on.
    std::vector<BlockId> adopted;
    std::vector<Owner> takers;  // of each page: the new owner if its owner has no room
};

// ---- the data -----------------------------------------------------------------------------------

/// The data that a CacheManager keeps between two calls, except its pins. The verbs are functions
/// that change it.
struct CacheData {
    /// Throws std::invalid_argument for sizes below 1.
    CacheData(const CacheConfig& given, const PolicyFactory& make_policy);
    CacheData(const CacheData&) = delete;
    CacheData& operator=(const CacheData&) = delete;

    [[nodiscard]] Replica& home_of(const Sequence& sequence) const noexcept {
        return *replicas[static_cast<std::size_t>(sequence.replica)];
    }
    /// The sums that the tokens of a sequence are added to. O(1).
    [[nodiscard]] TokenSums tokens_of(const Sequence& sequence,
                                      SequenceHandle handle) const noexcept {
        Replica& home = home_of(sequence);
        if (home.owners == nullptr) return {home.metrics};
        return {home.metrics, &home.owners->tally(tenants.of(handle))};
    }
    /// Adds the generated tokens of a sequence, or of all sequences, to the metrics.
    void count_generated(SequenceHandle handle, const Sequence& sequence) noexcept {
        counts.count_generated(tokens_of(sequence, handle), handle, sequence);
    }
    void count_generated() noexcept {
        const SequenceTable::Live all = sequences.live();
        for (std::size_t i = 0; i < all.size; ++i) {
            const Sequence& sequence = all.data[i];
            if (sequence.replica < 0) continue;
            count_generated({static_cast<std::uint32_t>(i), sequence.generation}, sequence);
        }
    }
    /// The hit of a claim is final.
    void seal(SequenceHandle handle, Sequence& sequence) noexcept {
        if (misses != nullptr) misses->seal(handle);
        if (advice != nullptr)
            advice->seal(home_of(sequence), handle, sequence, tenants.of(handle));
        counts.seal(home_of(sequence).metrics, handle, sequence, config.page_size);
    }
    /// Makes a sequence, with its counted tokens, belong to that owner.
    void set_tenant(const Sequence& sequence, SequenceHandle handle, Owner owner) noexcept {
        count_generated(handle, sequence);
        const Owner before = tenants.of(handle);
        PageOwners* owners = home_of(sequence).owners.get();
        tenants.set(handle, owner);
        if (owners == nullptr || owner == before) return;
        const OwnerTally tally = counts.counted(handle, sequence);
        const auto add = [&](Owner to, std::int64_t sign) {
            owners->tally(to).input_tokens += sign * tally.input_tokens;
            owners->tally(to).cache_tokens += sign * tally.cache_tokens;
        };
        add(before, -1);
        add(owner, 1);
    }
    /// Throws std::out_of_range for a replica that does not exist.
    [[nodiscard]] Replica& replica_at(std::int32_t index) const {
        if (index < 0 || index >= config.num_replicas) throw_no_replica(index);
        return *replicas[static_cast<std::size_t>(index)];
    }
    /// The longest request that the pool and max_seq_len allow to run `num_steps` steps.
    [[nodiscard]] std::int64_t most_tokens(std::int64_t num_steps) const noexcept {
        return std::min(most_pooled_tokens_, config.max_seq_len - (num_steps - 1));
    }
    /// The number of tokens that a request needs pages for once it is active up to `at`.
    [[nodiscard]] std::int64_t tokens_to_hold(const RequestView& request, std::int64_t at,
                                              std::int64_t num_steps) const noexcept {
        return config.reserve_chunks ? at + (num_steps - 1) : request.tokens_to_hold(at, num_steps);
    }
    /// The most tokens that a request may take from the cache if the caller allows `max_hit`. All
    /// searches for hits are limited to them. At least one token is left to run.
    [[nodiscard]] static std::int64_t hit_limit(const RequestView& request,
                                                std::int64_t max_hit) noexcept {
        return std::min(request.end - 1, max_hit);
    }
    /// The fewest pages that a request of `n` tokens needs.
    [[nodiscard]] std::int64_t least_pages(std::int64_t n) const noexcept {
        return grouping.least_pages(n, {config.reserve_chunks, windows.kept_tokens()});
    }
    /// The longest request that fits in a pool without other requests.
    [[nodiscard]] std::int64_t most_pooled_tokens() const noexcept { return most_pooled_tokens_; }
    /// The place where a sequence is written next.
    [[nodiscard]] Departures::Writer writer(const Sequence& sequence,
                                            std::int64_t start) const noexcept {
        return {sequence.pages, home_of(sequence).pool, sequence.replica, config.page_size, start};
    }
    /// Pages that copies of other sequences still read are not written in place.
    void protect_read_pages(Sequence& sequence, std::int64_t start) const noexcept {
        ledger.copies.protect_read_pages(sequence, start, config.page_size);
    }

    const CacheConfig config;
    const Grouping grouping;
    const bool is_plain = grouping.is_plain();  // without groups: a column is a page
    const bool has_states = !config.states.empty();
    // The order matters: a later member holds pages of an earlier member.
    std::vector<std::unique_ptr<Replica>> replicas;
    std::unique_ptr<EventLog> events;   // null if there is no reader
    std::unique_ptr<MissLog> misses;    // null unless misses are explained
    std::unique_ptr<AdviceLog> advice;  // null unless there is advice
    SequenceTable sequences;
    WindowRows windows;
    RecurrentStates states;
    TransferLedger ledger;
    CacheCopies cache_copies;
    TokenCounts counts;
    Priorities priorities;
    SequenceTenants tenants;
    Departures departures{ledger.copies};
    BatchSequences rows;  // of the present call
    ReserveMemory reserve_memory;
    FetchMemory fetch_memory;
    CommitMemory commit_memory;

   private:
    [[noreturn]] void throw_no_replica(std::int32_t index) const;

    const std::int64_t most_pooled_tokens_;  // of one request
};

}  // namespace kvcore
