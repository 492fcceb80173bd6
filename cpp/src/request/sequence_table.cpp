// SPDX-License-Identifier: Apache-2.0
#include "request/sequence_table.hpp"

#include <limits>
#include <utility>

#include "kvcore/errors.hpp"

namespace kvcore {
namespace {

// An entry retires at this generation: after a wrap-around, old handles would be valid again.
constexpr std::uint32_t kLastGeneration = std::numeric_limits<std::uint32_t>::max();

}  // namespace

SequenceHandle SequenceTable::claim(std::int32_t replica) {
    if (free_.empty()) {
        // Makes room for the release of the entry, which must not allocate.
        if (free_.capacity() <= entries_.size()) free_.reserve(2 * entries_.size() + 1);
        entries_.emplace_back();
        free_.push_back(static_cast<std::uint32_t>(entries_.size() - 1));
    }
    const std::uint32_t index = free_.back();
    free_.pop_back();
    entries_[index].replica = static_cast<std::int16_t>(replica);
    return {index, entries_[index].generation};
}

void SequenceTable::release(SequenceHandle handle) noexcept {
    Sequence& sequence = entries_[handle.index];
    Sequence fresh;
    if (sequence.generation == kLastGeneration) {
        fresh.generation = kLastGeneration;
    } else {
        fresh.generation = sequence.generation + 1;
        fresh.pages.take_memory(sequence.pages);  // reused by the next sequence of the entry
        free_.push_back(handle.index);
    }
    sequence = std::move(fresh);
}

void SequenceTable::refuse(SequenceHandle handle, std::int64_t row) {
    const std::string text =
        detail::concat("sequence ", handle.index, " (generation ", handle.generation,
                       ") is not claimed; claim it before use");
    if (row < 0) throw RequestNotFoundError(text);
    throw InRow<RequestNotFoundError>(row, text);
}

}  // namespace kvcore
