// SPDX-License-Identifier: Apache-2.0
#define KVCORE_LANES 4
#define KVCORE_ISA_TABLE kBaselineKernels
#define KVCORE_ISA_NAME "baseline"
#include "isa_table.hpp"
