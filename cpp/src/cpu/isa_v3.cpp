// SPDX-License-Identifier: Apache-2.0
#define KVCORE_LANES 8
#define KVCORE_ISA_TABLE kV3Kernels
#define KVCORE_ISA_NAME "x86-64-v3"
#include "isa_table.hpp"
