// SPDX-License-Identifier: Apache-2.0
// Checks of a request before anything is done for it. validate_requests.cpp has the errors, which
// name the row of the batch, and the checks that few requests need.
#pragma once

#include <cstdint>

#include "cache/cache_data.hpp"
#include "kvcore/prefix_tree.hpp"
#include "kvcore/request.hpp"

namespace kvcore {

// Sequences this far ahead in a batch are prefetched.
constexpr std::int64_t kAhead = 8;

/// The condition, with the side of the branch that walks over hundreds of rows seldom take.
[[nodiscard]] inline bool unlikely(bool condition) noexcept {
#if defined(__GNUC__)
    return __builtin_expect(static_cast<long>(condition), 0) != 0;
#else
    return condition;
#endif
}

namespace rules {

[[nodiscard]] inline bool has_legal_indices(const RequestView& request) noexcept {
    return request.start >= 0 && request.start < request.active && request.active <= request.end;
}
[[noreturn]] void refuse_indices(const RequestView& request, std::int64_t row);
[[noreturn]] void refuse_length(const CacheData& cache, const RequestView& request,
                                std::int64_t row, std::int64_t num_steps);
[[noreturn]] void refuse_repetition(std::int64_t row);
[[noreturn]] void refuse_pending(std::int64_t row);
/// Throws std::invalid_argument if `num_steps` is below 1.
[[noreturn]] void refuse_steps(std::int64_t num_steps);
inline void require_steps(std::int64_t num_steps) {
    if (num_steps < 1) refuse_steps(num_steps);
}
[[noreturn]] void refuse_namespace(std::int64_t row);
/// A claim that has pages but was not fetched yet must not continue in another namespace: its
/// tokens would be found in the namespace in which it began. O(runs of its hit).
inline void require_namespace(const CacheConfig& config, const Sequence& sequence,
                              const RequestView& request, std::int64_t row) {
    TreeNode* node = sequence.pages.node();
    if (sequence.is_sealed() || node == nullptr || !config.prefix_caching) return;
    if (PrefixTree::name_of(node) != request.name_space) refuse_namespace(row);
}
/// A request that restarts at `start` without `truncate`, or a fork that begins at `start`, must
/// not read pages that its windows have left, nor continue from the state of another token. Called
/// only with groups.
void require_windows(const CacheData& cache, const Sequence& sequence, std::int64_t start,
                     SequenceHandle handle, std::int64_t row);
inline void require_windows(const CacheData& cache, const Sequence& sequence,
                            const RequestView& request, std::int64_t row) {
    if (!cache.has_states) {
        if (cache.is_plain) return;
        if (cache.windows.can_read(request.sequence, request.start)) return;
    }
    require_windows(cache, sequence, request.start, request.sequence, row);
}
/// A request must not run twice from the same state: kernels may have changed the state since the
/// fetch. Called only with states.
void require_run(const CacheData& cache, const RequestView& request, std::int64_t row);
/// Throws std::invalid_argument for numbers below 0.
[[noreturn]] void refuse_options(const ReserveOptions& options);
inline void require_options(const ReserveOptions& options) {
    if (!options.is_legal()) refuse_options(options);
}
/// Throws CapacityError if a request can never have `must_fit` tokens.
void require_fit(const CacheData& cache, const Sequence& sequence, const RequestView& request,
                 const ReserveOptions& options, std::int64_t row);
/// Not called without transfers if there is no host tier. Clears the transfers.
void require_transfers(const CacheData& cache, Transfers* transfers);

}  // namespace rules

namespace quotas {

/// Returns true if quotas leave no room for `tokens` tokens of a request of `owner`, even without
/// other requests. Pages that it shares now, or could share by a hit of at most `max_hit` tokens,
/// count for their present owners. O(1) if the pages fit under the ceiling, else the match of its
/// prompt.
[[nodiscard]] bool exceeds_ceiling(const CacheData& cache, const Sequence& sequence,
                                   const RequestView& request, std::int64_t tokens, Owner owner,
                                   std::int64_t max_hit);
/// Throws CapacityError if `exceeds_ceiling` is true of a claimed request.
void require_ceiling(const CacheData& cache, const Sequence& sequence, const RequestView& request,
                     std::int64_t tokens, std::int64_t row,
                     std::int64_t max_hit = ReserveOptions::kUnlimited);

}  // namespace quotas

/// The rules for every row of a batch, in a form that costs little to test: a decode step walks
/// hundreds of rows and changes almost nothing.
struct BatchRules {
    const CacheData& cache;
    SequenceTable::Live sequences;
    std::int64_t num_steps;
    std::int64_t most_tokens;
    std::uint32_t stamp;

    /// Finds the sequence of a row. Throws for everything that can be wrong with the row.
    [[nodiscard]] Sequence& checked(const RequestView& request, std::int64_t row) const {
        Sequence& sequence = sequences.at(request.sequence, row);
        if (!rules::has_legal_indices(request)) rules::refuse_indices(request, row);
        if (request.end > most_tokens) rules::refuse_length(cache, request, row, num_steps);
        if (sequence.batch_stamp == stamp) rules::refuse_repetition(row);
        sequence.batch_stamp = stamp;
        return sequence;
    }
};

/// The rules of a call. Throws std::invalid_argument if `num_steps` is below 1.
[[nodiscard]] inline BatchRules begin_batch(CacheData& cache, std::int64_t num_steps) {
    rules::require_steps(num_steps);
    const SequenceTable::Live sequences = cache.sequences.live();
    std::uint32_t& stamp = cache.rows.stamp;
    if (++stamp == 0) {  // once in 2^32 calls; 0 is the stamp of a sequence in no batch yet
        for (Sequence& sequence : sequences) sequence.batch_stamp = 0;
        stamp = 1;
    }
    return {cache, sequences, num_steps, cache.most_tokens(num_steps), stamp};
}
/// Finds the sequences of a batch, and checks everything that can be wrong with its rows before any
/// row is changed.
inline void check_batch(CacheData& cache, const RequestBatch& batch, std::int64_t num_steps) {
    const BatchRules known = begin_batch(cache, num_steps);
    cache.rows.resize(batch.size());
    for (std::int64_t row = 0; row < batch.size(); ++row) {
        Sequence& sequence = known.checked(batch[row], row);
        rules::require_namespace(cache.config, sequence, batch[row], row);
        rules::require_windows(cache, sequence, batch[row], row);
        if (!cache.config.quotas.empty()) {
            quotas::require_ceiling(cache, sequence, batch[row], batch[row].end, row);
        }
        cache.rows.set(row, sequence);
    }
}

}  // namespace kvcore
