// SPDX-License-Identifier: Apache-2.0
// Checks of a request before anything is done for it. Errors name the row of the batch.
#pragma once

#include <cstdint>

#include "cache/cache_data.hpp"

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
void require_steps(std::int64_t num_steps);
/// A claim that has pages but was not fetched yet must not continue in another namespace: its
/// tokens would be found in the namespace in which it began. O(runs of its hit).
void require_namespace(const CacheConfig& config, const Sequence& sequence,
                       const RequestView& request, std::int64_t row);
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
[[nodiscard]] BatchRules begin_batch(CacheData& cache, std::int64_t num_steps);
/// Finds the sequences of a batch, and checks everything that can be wrong with its rows before any
/// row is changed.
void check_batch(CacheData& cache, const RequestBatch& batch, std::int64_t num_steps);

}  // namespace kvcore
