// SPDX-License-Identifier: Apache-2.0
// Quantisation of the bytes of a KV cache on the CPU. The functions take pointers, sizes and
// strides, and do not depend on who owns a page.
//
// Common to all: the caller has checked sizes and dtypes; sources and destinations do not overlap;
// the functions allocate only the stacks of `threads` - 1 more threads; results are the same bytes
// for every instruction set and number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/dtype.hpp"
#include "kvcore/paged_batch.hpp"

namespace kvcore {

/// The instruction set of the kernels: "baseline", "x86-64-v3", "x86-64-v4". This is the best set
/// that the processor supports, or the set that the environment variable KVCORE_ISA names. Throws
/// std::invalid_argument if that name is unknown or cannot run on this processor.
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

/// The same with given scales; a narrow pool without scales has a scale of 1.
void quantize_by(HeadRows shape, DType wide, const std::byte* source, DType narrow,
                 std::byte* codes, const float* scales, int threads = 1);

/// Writes `codes` * scale as `wide`, to the nearest.
void dequantize(Groups shape, DType narrow, const std::byte* codes, const float* scales, DType wide,
                std::byte* destination, int threads = 1);
void dequantize(HeadRows shape, DType narrow, const std::byte* codes, const float* scales,
                DType wide, std::byte* destination, int threads = 1);

// NVFP4: numbers of four bits in blocks of sixteen, each with a scale of eight bits, and one more
// scale for a whole tensor. A value is about code * block scale * global scale.
//
// The format follows "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference"
// (NVIDIA, 2025) and cuBLAS's documentation ("1D block scaling", VEC16_UE4M3). Codes are e2m1 of
// the OCP Microscaling specification, two in a byte: an element of an even index in the lower half.
// Block scales are float8_e4m3fn above zero.
//
// A block's codes are computed in these steps, each rounded to the nearest float32. First, the
// largest finite magnitude / (6 * global scale); the nearest e4m3 to this, at least 2^-9, is the
// block scale. Second, 1 / (block scale * global scale). Third, each element times that factor, to
// the nearest code. A value is read as code * (block scale * global scale).
//
// All verbs follow the common rules above. Global scales are finite and positive.

/// Elements that share a scale, and the bytes that their codes take.
constexpr std::int64_t kNvfp4Block = 16;
constexpr std::int64_t kNvfp4BlockBytes = 8;

/// e2m1 in the lower half of a byte: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and a sign. To the nearest, ties
/// to the even code; larger magnitudes, including infinities, become 6; NaN becomes 0.
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint8_t to_e2m1(float value) noexcept {
    constexpr std::uint32_t kSix = 0x40c00000U;
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t magnitude = bits & ~detail::kFloatSign;
    if (magnitude > detail::kFloatInfinity) return 0;
    const std::uint32_t clipped = magnitude < kSix ? magnitude : kSix;
    return static_cast<std::uint8_t>((bits & detail::kFloatSign) >> 28 |
                                     detail::narrow_magnitude<1, 1>(clipped));
}
[[nodiscard]] KVCORE_HOST_DEVICE inline float from_e2m1(std::uint8_t code) noexcept {
    const std::uint32_t sign = static_cast<std::uint32_t>(code & 8U) << 28;
    return float_of(sign | bits_of(detail::widen_magnitude<1, 1>(code & 7U)));
}

/// The scale, e4m3fn, of a block whose largest finite magnitude is `largest`.
[[nodiscard]] KVCORE_HOST_DEVICE inline std::uint8_t nvfp4_scale(float largest,
                                                                 float global_scale) noexcept {
    const std::uint8_t code = to_e4m3fn(largest / (6.0F * global_scale));
    return code == 0 ? std::uint8_t{1} : code;
}

/// A scale of all elements: a number, or a pointer that is read when the work runs (on a GPU: on
/// the device).
struct GlobalScale {
    float value = 1.0F;
    const float* at = nullptr;  // in place of `value`

    [[nodiscard]] KVCORE_HOST_DEVICE float get() const noexcept {
        return at == nullptr ? value : *at;
    }
};

/// Writes the codes [blocks, 8 bytes] and scales [blocks] of contiguous elements of a wide dtype
/// [blocks, 16]. Cost: reading the elements twice (the second time from cache) and writing.
void quantize_nvfp4(std::int64_t blocks, DType wide, const std::byte* source, GlobalScale global,
                    std::byte* codes, std::byte* scales, int threads = 1);
/// Writes the values of the codes as elements of a wide dtype, to the nearest.
void dequantize_nvfp4(std::int64_t blocks, const std::byte* codes, const std::byte* scales,
                      GlobalScale global, DType wide, std::byte* destination, int threads = 1);

// ---- pools --------------------------------------------------------------------------------------

/// Bytes of a pool [pages, page_size, heads, bytes]: the bytes of a head are contiguous, all other
/// strides count bytes, of any sign.
template <class Byte>
struct HeadBytes {
    Byte* data = nullptr;  // of page 0
    std::int64_t page_stride = 0;
    std::int64_t token_stride = 0;
    std::int64_t head_stride = 0;

    /// The first byte of a head. O(1).
    [[nodiscard]] KVCORE_HOST_DEVICE constexpr Byte* at(std::int64_t page, std::int64_t token,
                                                        std::int64_t head) const noexcept {
        return data + page * page_stride + token * token_stride + head * head_stride;
    }
};

/// K or V of one layer in nvfp4.
template <class Byte>
struct Nvfp4Tensor {
    std::int64_t dim = 0;    // elements of a head, whole blocks; 0: no tensor
    HeadBytes<Byte> codes;   // dim / 2 bytes of each head
    HeadBytes<Byte> scales;  // dim / 16 bytes
    GlobalScale global = {};
};

/// K and V of one layer in nvfp4.
template <class Byte>
struct Nvfp4Pool {
    std::int64_t pages = 0;
    PageShape shape{};
    Nvfp4Tensor<Byte> k;
    Nvfp4Tensor<Byte> v;
};

/// As `append_batch` and `gather_batch` of kvcore/paged_batch.hpp: an append takes tokens of a wide
/// dtype and computes a scale for each block; a gather returns the values.
void append_batch(PageShape shape, const Nvfp4Tensor<std::byte>& pool, const PageTable& table,
                  const TokenRanges& ranges, const TokenRows<const std::byte>& source, DType wide,
                  int threads = 1);
void gather_batch(PageShape shape, const Nvfp4Tensor<const std::byte>& pool, const PageTable& table,
                  const TokenRanges& ranges, const TokenRows<std::byte>& destination, DType wide,
                  int threads = 1);

/// As `append_slots` of kvcore/paged_batch.hpp, for tokens of a wide dtype.
std::int64_t append_slots(const Nvfp4Pool<std::byte>& pool, const TokenRows<const std::byte>& k,
                          const TokenRows<const std::byte>& v, DType wide,
                          const std::int64_t* slots, std::int64_t n, int threads = 1);
std::int64_t append_slots(const Nvfp4Pool<std::byte>& pool, const TokenRows<const std::byte>& k,
                          const TokenRows<const std::byte>& v, DType wide,
                          const std::int32_t* slots, std::int64_t n, int threads = 1);

}  // namespace kvcore
