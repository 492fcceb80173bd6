// SPDX-License-Identifier: Apache-2.0
// All kernels of one instruction set. All but the table itself lies in an unnamed namespace: were
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

constexpr KernelTable table_of(const char* name) noexcept {
    return {name,
            {wide_kernels<DType::kFloat32>(), wide_kernels<DType::kFloat16>(),
             wide_kernels<DType::kBFloat16>()}};
}

}  // namespace
}  // namespace kvcore::cpu
