// SPDX-License-Identifier: Apache-2.0
#include "kvcore/sequence_table.hpp"

#include "kvcore/errors.hpp"

namespace kvcore {

SequenceHandle SequenceTable::claim(std::int32_t replica) {
    if (free_.empty()) {
        slots_.emplace_back();
        free_.reserve(slots_.size());  // release must not allocate
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
    fresh.generation = sequence.generation + 1 == 0 ? 1 : sequence.generation + 1;
    fresh.pages.swap(sequence.pages);  // the row's memory serves the slot's next sequence
    fresh.pages.clear();
    sequence = std::move(fresh);
    free_.push_back(handle.index);
}

void SequenceTable::refuse(SequenceHandle handle) {
    throw RequestNotFoundError(detail::concat("sequence ", handle.index, " (generation ",
                                              handle.generation,
                                              ") is not claimed; claim it before use"));
}

}  // namespace kvcore
