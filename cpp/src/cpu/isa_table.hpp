// SPDX-License-Identifier: Apache-2.0
// All kernels of one instruction set. Everything but the table lies in an unnamed namespace: were
// the linker to merge a template that two ISA objects share, old processors would run code for new
// ones.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "isa.hpp"

namespace kvcore::cpu {
namespace {

#include "lanes.hpp"
#include "quantize.hpp"

}  // namespace

const KernelTable KVCORE_ISA_TABLE = {
    KVCORE_ISA_NAME,
    {wide_kernels<DType::kFloat32>(), wide_kernels<DType::kFloat16>(),
     wide_kernels<DType::kBFloat16>()},
};

}  // namespace kvcore::cpu
