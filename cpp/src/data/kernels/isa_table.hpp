// SPDX-License-Identifier: Apache-2.0
// All kernels of one instruction set. Everything except the table is in an unnamed namespace: if
// the linker merged a template of two ISA objects, old processors would run code for new
// processors.
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstdint>
#include <iterator>
#include <type_traits>

#include "data/attention/plan.hpp"
#include "data/kernels/isa.hpp"

namespace kvcore::cpu {
namespace {

// Each file uses the files before it.
#include "simd/lanes.hpp"

#include "simd/elements.hpp"

#include "simd/four.hpp"

#include "data/kernels/quantize.hpp"

#include "data/kernels/nvfp4.hpp"

#include "data/kernels/wide_kernels.hpp"

#include "simd/math.hpp"

#include "data/attention/rows.hpp"

#include "data/attention/blocks.hpp"

#include "data/attention/stage.hpp"

#include "data/attention/weights.hpp"

#include "data/attention/item.hpp"

#include "data/attention/attend.hpp"

#include "data/attention/merge.hpp"

constexpr KernelTable table_of(const char* name) noexcept {
    return {name,
            {wide_kernels<DType::kFloat32>(), wide_kernels<DType::kFloat16>(),
             wide_kernels<DType::kBFloat16>()},
            attention_kernels()};
}

}  // namespace
}  // namespace kvcore::cpu
