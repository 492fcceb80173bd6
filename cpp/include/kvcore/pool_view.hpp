// SPDX-License-Identifier: Apache-2.0
// One layer of a KV cache as raw pointers and byte strides: every affine layout is one of these.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvcore/dtype.hpp"

namespace kvcore {

/// float32 [pages, page_size, heads, dim / group]: a code times its scale is the value. Strides
/// count bytes, of any sign; 0 along an axis means that one scale serves all of it, so a scale per
/// tensor or per head is a view as well.
template <class Byte>
struct ScaleView {
    Byte* data = nullptr;  // of page 0; nullptr: codes are the values
    std::int64_t page_stride = 0;
    std::int64_t token_stride = 0;
    std::int64_t head_stride = 0;
    std::int64_t group =
        1;  // elements of a head that share a scale; the scales of a head are dense
};

/// K or V of one layer, [pages, page_size, heads, dim]: the elements of a head are contiguous, all
/// other strides count bytes, of any sign.
template <class Byte>
struct PagedTensor {
    Byte* data = nullptr;  // of page 0
    DType dtype = DType::kFloat32;
    std::int64_t dim = 0;  // 0: there is none
    std::int64_t page_stride = 0;
    std::int64_t token_stride = 0;
    std::int64_t head_stride = 0;
    ScaleView<Byte> scales = {};

    /// The first element of a head. O(1).
    [[nodiscard]] KVCORE_HOST_DEVICE constexpr Byte* at(std::int64_t page, std::int64_t token,
                                                        std::int64_t head) const noexcept {
        return data + page * page_stride + token * token_stride + head * head_stride;
    }
};

/// K and V of one layer. Owns nothing.
///
/// Latent rows (MLA) have one head; their keys are `k` followed by `rope`, and their values are
/// `k` again: joint rows [pages, page_size, 576] as well as two arrays of 512 and 64, and the
/// 656-byte row of FP8 codes, scales and a bfloat16 rope part, are all views of this kind.
template <class Byte>
struct PoolView {
    std::int64_t pages = 0;
    std::int64_t page_size = 0;  // tokens
    std::int64_t heads = 0;      // of K and V
    PagedTensor<Byte> k;
    PagedTensor<Byte> v;
    PagedTensor<Byte> rope =
        {};  // the last elements of a key where they are stored apart; no scales
};

}  // namespace kvcore
