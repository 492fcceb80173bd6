// SPDX-License-Identifier: Apache-2.0
#define KVCORE_LANES 16
#include "data/kernels/isa_table.hpp"

namespace kvcore::cpu {

const KernelTable kV4Kernels = table_of("x86-64-v4");

}  // namespace kvcore::cpu
