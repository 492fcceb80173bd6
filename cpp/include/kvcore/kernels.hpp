// SPDX-License-Identifier: Apache-2.0
// What is done to the bytes of a KV cache on the CPU. Pointers, sizes and strides only: who owns
// which page is nobody's business here.
//
// Common to all: the caller has checked sizes and dtypes; sources and destinations do not overlap;
// nothing is allocated but the stacks of `threads` - 1 more threads; results are the same bytes for
// every instruction set and number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/dtype.hpp"

namespace kvcore {

/// The instruction set of the kernels: "baseline", "x86-64-v3", "x86-64-v4". The best one that the
/// processor has, or the one that the environment variable KVCORE_ISA names; throws
/// std::invalid_argument when that is none of them or cannot run here.
[[nodiscard]] const char* kernel_isa();

/// Float32, float16 and bfloat16 are wide; FP8 and int8 are narrow. A narrow code times its scale
/// is about the wide value.
[[nodiscard]] constexpr bool is_wide(DType dtype) noexcept { return item_size(dtype) > 1; }

/// Elements [groups, group], one scale for each group.
struct Groups {
    std::int64_t groups;
    std::int64_t group;
};

/// Elements [rows, heads, dim], one scale for each head.
struct HeadRows {
    std::int64_t rows;
    std::int64_t heads;
    std::int64_t dim;
};

/// Writes each group's scale, max(largest finite magnitude / largest code, 1e-12), and the codes,
/// `source` * (1 / scale) to the nearest. `wide` to `narrow`; scales [groups].
void quantize(Groups shape, DType wide, const std::byte* source, DType narrow, std::byte* codes,
              float* scales, int threads = 1);
/// The same with a scale for each head; scales [heads].
void quantize(HeadRows shape, DType wide, const std::byte* source, DType narrow, std::byte* codes,
              float* scales, int threads = 1);

/// The same with scales that are given; a narrow pool without scales has one of 1.
void quantize_by(HeadRows shape, DType wide, const std::byte* source, DType narrow,
                 std::byte* codes, const float* scales, int threads = 1);

/// Writes `codes` * scale as `wide`, to the nearest.
void dequantize(Groups shape, DType narrow, const std::byte* codes, const float* scales, DType wide,
                std::byte* destination, int threads = 1);
void dequantize(HeadRows shape, DType narrow, const std::byte* codes, const float* scales,
                DType wide, std::byte* destination, int threads = 1);

}  // namespace kvcore
