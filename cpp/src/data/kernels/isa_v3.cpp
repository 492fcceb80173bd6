// SPDX-License-Identifier: Apache-2.0
#define KVCORE_LANES 8
#include "data/kernels/isa_table.hpp"

namespace kvcore::cpu {

const KernelTable kV3Kernels = table_of("x86-64-v3");

}  // namespace kvcore::cpu
