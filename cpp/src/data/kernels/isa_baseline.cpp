// SPDX-License-Identifier: Apache-2.0
#define KVCORE_LANES 4
#include "data/kernels/isa_table.hpp"

namespace kvcore::cpu {

const KernelTable kBaselineKernels = table_of("baseline");

}  // namespace kvcore::cpu
