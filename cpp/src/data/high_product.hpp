// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kvcore/dtype.hpp"

namespace kvcore {

/// The upper half of a 128-bit product, on the CPU and on GPUs.
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint64_t high_product(std::uint64_t a,
                                                                   std::uint64_t b) noexcept {
#if defined(__CUDA_ARCH__)
    return __umul64hi(a, b);
#else
    __extension__ using Wide = unsigned __int128;
    return static_cast<std::uint64_t>(Wide{a} * b >> 64);
#endif
}

}  // namespace kvcore
