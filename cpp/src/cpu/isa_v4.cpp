// SPDX-License-Identifier: Apache-2.0
#define KVCORE_LANES 16
#define KVCORE_ISA_TABLE kV4Kernels
#define KVCORE_ISA_NAME "x86-64-v4"
#include "isa_table.hpp"
