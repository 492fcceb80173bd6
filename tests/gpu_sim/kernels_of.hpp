// SPDX-License-Identifier: Apache-2.0
// Kernels that nvcc put into this program, by the functions that stand for them on the host.
#pragma once

#include <cstdlib>

#include "ptx.hpp"

namespace gpu_sim {

/// The compute capability of a device, times 10: devices take turns, so that kernels run as they
/// are compiled for the newest and for the oldest architecture.
[[nodiscard]] constexpr int architecture_of(int device) { return device % 2 == 0 ? 90 : 80; }

/// The kernel in the newest PTX that an architecture takes. nullptr: the function stands for none.
[[nodiscard]] const Kernel* kernel_of(const void* function, int architecture);

}  // namespace gpu_sim
