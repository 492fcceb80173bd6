// SPDX-License-Identifier: Apache-2.0
// Kernels that nvcc put into this program, by the host functions that stand for them.
#pragma once

#include <cstdlib>

#include "ptx.hpp"

namespace gpu_sim {

/// The compute capability of a device, times 10. Devices alternate between the newest and the
/// oldest architecture, so kernels run as compiled for both.
[[nodiscard]] constexpr int architecture_of(int device) { return device % 2 == 0 ? 90 : 80; }

/// The kernel in the newest PTX that an architecture accepts; nullptr if `function` is no kernel.
[[nodiscard]] const Kernel* kernel_of(const void* function, int architecture);

}  // namespace gpu_sim
