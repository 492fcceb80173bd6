// SPDX-License-Identifier: Apache-2.0
// Atomic sums and maxima, shared by lanes. Emulated lanes run one after the other.
#pragma once

#include <cstdint>

#include "kvcore/dtype.hpp"

namespace kvcore::cuda {

KVCORE_HOST_DEVICE inline void atomic_add(std::int32_t* to, std::int32_t value) noexcept {
#if defined(__CUDA_ARCH__)
    atomicAdd(to, value);
#else
    *to += value;
#endif
}

/// Adds modulo 2^64.
KVCORE_HOST_DEVICE inline void atomic_add(std::uint64_t* to, std::uint64_t value) noexcept {
#if defined(__CUDA_ARCH__)
    static_assert(sizeof(unsigned long long) == sizeof *to, "CUDA's own 64-bit type");
    atomicAdd(reinterpret_cast<unsigned long long*>(to), value);
#else
    *to += value;
#endif
}

KVCORE_HOST_DEVICE inline void atomic_max(std::uint32_t* to, std::uint32_t value) noexcept {
#if defined(__CUDA_ARCH__)
    atomicMax(to, value);
#else
    if (value > *to) *to = value;
#endif
}

}  // namespace kvcore::cuda
