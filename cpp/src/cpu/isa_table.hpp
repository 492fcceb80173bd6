// SPDX-License-Identifier: Apache-2.0
// All kernels of one instruction set. All but the table itself lies in an unnamed namespace: were
// the linker to merge a template that two ISA objects share, old processors would run code for new
// ones.
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstdint>
#include <type_traits>

#include "attention_plan.hpp"
#include "isa.hpp"

namespace kvcore::cpu {
namespace {

// Each on top of those before it.
#include "lanes.hpp"

#include "elements.hpp"

#include "four.hpp"

#include "quantize.hpp"

#include "math.hpp"

#include "attention_rows.hpp"

#include "attention_blocks.hpp"

#include "attention_stage.hpp"

#include "attention_weights.hpp"

#include "attention_item.hpp"

#include "attention_attend.hpp"

#include "attention_merge.hpp"

constexpr KernelTable table_of(const char* name) noexcept {
    return {name,
            {wide_kernels<DType::kFloat32>(), wide_kernels<DType::kFloat16>(),
             wide_kernels<DType::kBFloat16>()},
            attention_kernels()};
}

}  // namespace
}  // namespace kvcore::cpu
