// SPDX-License-Identifier: Apache-2.0
#include "kvcore/sequence_table.hpp"

#include <limits>
#include <utility>

#include "kvcore/errors.hpp"

namespace kvcore {
namespace {

// A slot retires with it: the next one would be that of its first sequence again.
constexpr std::uint32_t kLastGeneration = std::numeric_limits<std::uint32_t>::max();

}  // namespace

SequenceHandle SequenceTable::claim(std::int32_t replica) {
    if (free_.empty()) {
        // First the room that its release will need, which must not allocate.
        if (free_.capacity() <= slots_.size()) free_.reserve(2 * slots_.size() + 1);
        slots_.emplace_back();
        free_.push_back(static_cast<std::uint32_t>(slots_.size() - 1));
    }
    const std::uint32_t index = free_.back();
    free_.pop_back();
    slots_[index].replica = static_cast<std::int16_t>(replica);
    return {index, slots_[index].generation};
}

void SequenceTable::release(SequenceHandle handle) noexcept {
    Sequence& sequence = slots_[handle.index];
    Sequence fresh;
    if (sequence.generation == kLastGeneration) {
        fresh.generation = kLastGeneration;
        ++num_retired_;
    } else {
        fresh.generation = sequence.generation + 1;
        fresh.pages.swap(sequence.pages);  // the row's memory serves the slot's next sequence
        fresh.pages.clear();
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
