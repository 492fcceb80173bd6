// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvcore/cache_manager.hpp"

namespace kvcore {

// Sequences this far ahead in a batch are asked for early.
constexpr std::int64_t kAhead = 8;

/// What every row of a batch must satisfy, in a form that costs little to test: a decode step
/// walks hundreds of rows and changes next to nothing.
struct CacheManager::BatchRules {
    const CacheManager& manager;
    SequenceTable::Slots sequences;
    std::int64_t num_steps;
    std::int64_t most_tokens;
    std::uint32_t stamp;

    /// Finds the sequence of a row. Throws for everything that can be wrong with it.
    [[nodiscard]] Sequence& checked(const RequestView& request, std::int64_t row) const {
        Sequence& sequence = sequences.at(request.sequence, row);
        if (!has_legal_indices(request)) manager.refuse_indices(request, row);
        if (request.end > most_tokens) manager.refuse_length(request, row, num_steps);
        if (sequence.batch_stamp == stamp) refuse_repetition(row);
        sequence.batch_stamp = stamp;
        return sequence;
    }
};

}  // namespace kvcore
