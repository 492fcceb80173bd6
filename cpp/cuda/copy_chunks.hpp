// SPDX-License-Identifier: Apache-2.0
// A batch of copies in chunks that fit the stack.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/cuda.hpp"

namespace kvcore::cuda {

/// Runs in the form that the copy engines take. Neighbouring runs are not merged: they may belong
/// to two allocations.
struct RunChunk {
    static constexpr std::int64_t kCapacity = 512;

    void* destinations[kCapacity];
    const void* sources[kCapacity];
    std::size_t bytes[kCapacity];
    std::size_t count = 0;

    void add(void* destination, const void* source, std::size_t size) noexcept {
        destinations[count] = destination;
        sources[count] = source;
        bytes[count++] = size;
    }
};

/// Calls issue(RunChunk&) for all copies, in order; stops at the first status that is not success.
template <class Issue>
[[nodiscard]] Status for_each_chunk(void* const* destinations, const void* const* sources,
                                    const std::int64_t* bytes, std::int64_t n,
                                    const Issue& issue) noexcept {
    if (n < 0) return kInvalidCall;
    for (std::int64_t i = 0; i < n; ++i) {
        if (bytes[i] < 0) return kInvalidCall;  // before anything is copied
    }
    RunChunk chunk;
    for (std::int64_t i = 0; i < n; ++i) {
        if (bytes[i] == 0) continue;
        if (chunk.count == RunChunk::kCapacity) {
            const Status status = issue(chunk);
            if (status != kSuccess) return status;
            chunk.count = 0;
        }
        chunk.add(destinations[i], sources[i], static_cast<std::size_t>(bytes[i]));
    }
    return chunk.count == 0 ? kSuccess : issue(chunk);
}

}  // namespace kvcore::cuda
