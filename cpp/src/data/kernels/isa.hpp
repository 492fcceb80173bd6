// SPDX-License-Identifier: Apache-2.0
// The kernels that are compiled once per instruction set, as tables of functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/attention.hpp"
#include "kvcore/dtype.hpp"

namespace kvcore {
struct AttentionJob;
struct WorkItem;
}  // namespace kvcore

namespace kvcore::cpu {

/// Elements [tokens, heads, dim] in two places, and a float scale for each `group` of a head's
/// elements: [tokens, heads, dim / group]. Strides are in bytes and may be negative. The elements
/// of a head are contiguous, and its scales are also contiguous.
struct Tile {
    const std::byte* source;
    std::int64_t source_token;
    std::int64_t source_head;
    std::byte* destination;
    std::int64_t destination_token;
    std::int64_t destination_head;
    const std::byte* scales;  // nullptr: all are 1
    std::byte* new_scales;    // of kernels that compute scales
    std::int64_t scale_token;
    std::int64_t scale_head;
    std::int64_t tokens;
    std::int64_t heads;
    std::int64_t dim;
    std::int64_t group;
};

/// The kernels of one wide dtype, by narrow dtype.
struct WideKernels {
    void (*raise_to_largest)(const Tile&, float* most);  // of each head; finite elements
    void (*quantize[kNumNarrow])(const Tile&);           // writes the scales
    void (*quantize_by[kNumNarrow])(const Tile&);        // reads the scales
    void (*dequantize[kNumNarrow])(const Tile&);
    void (*widen[kNumWide])(const Tile&);  // to another wide dtype, without scales
    // nvfp4: `dim` elements in whole blocks. A code takes half a byte, a scale one byte.
    void (*quantize_nvfp4)(const Tile&, float global_scale);
    void (*dequantize_nvfp4)(const Tile&, float global_scale);
};

struct AttentionKernels {
    void (*attend)(const AttentionJob& job, const WorkItem& item, float* scratch);
    void (*merge_parts)(const AttentionJob& job, std::int64_t begin_token, std::int64_t end_token,
                        float* scratch);
    void (*merge_two[kNumWide])(std::int64_t begin, std::int64_t end, std::int64_t dim,
                                AttentionStates a, AttentionStates b, std::byte* values,
                                float* lse);
};

struct KernelTable {
    const char* name;
    WideKernels wide[kNumWide];
    AttentionKernels attention;
};

extern const KernelTable kBaselineKernels;
#if defined(__x86_64__)
extern const KernelTable kV3Kernels;  // x86-64-v3: AVX2, FMA, F16C
extern const KernelTable kV4Kernels;  // x86-64-v4: AVX-512 F, BW, CD, DQ, VL
#endif

/// The best table that this processor can run, or the table that KVCORE_ISA names. Throws
/// std::invalid_argument if KVCORE_ISA names no table, or a table that cannot run here.
[[nodiscard]] const KernelTable& kernels();

}  // namespace kvcore::cpu
