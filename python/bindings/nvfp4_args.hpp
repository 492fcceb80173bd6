// SPDX-License-Identifier: Apache-2.0
// Checks the arrays of nvfp4: codes uint8, two in a byte, block scales float8_e4m3fn and the global
// scale.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "array_args.hpp"
#include "kvcore/quantize.hpp"
#include "paged_batch_args.hpp"
#include "quantize_args.hpp"

namespace kvcore::python {

/// The global scale: a number, or the address of a float32 array of one element. The element is
/// read when the work runs.
[[nodiscard]] inline GlobalScale global_scale(const pybind11::object& given) {
    if (pybind11::isinstance<pybind11::float_>(given)) return {given.cast<float>(), nullptr};
    const auto array = given.cast<pybind11::array>();
    if (dtype_of(array, "global_scale") != DType::kFloat32 || array.size() != 1) {
        throw pybind11::value_error(concat("global_scale has shape ", shape_text(array),
                                           " and dtype ", text(array.dtype()),
                                           ", must be float32 of one element"));
    }
    check_aligned(array, "global_scale");
    return {1.0F, static_cast<const float*>(array.data())};
}

/// Returns the global scale of the host as a number; ValueError if it is not finite and positive.
[[nodiscard]] inline GlobalScale host_global_scale(const pybind11::object& given) {
    const float value = global_scale(given).get();
    if (std::isfinite(value) && value > 0) return {value, nullptr};
    throw pybind11::value_error(
        concat("global_scale is ", value, " as float32, must be finite and positive"));
}

inline void check_codes(const pybind11::array& array, const char* name) {
    if (pybind11::isinstance<pybind11::array_t<std::uint8_t>>(array)) return;
    throw pybind11::type_error(concat(name, " has dtype ", text(array.dtype()),
                                      ", must be uint8: two codes of nvfp4 in each byte"));
}

inline void check_block_scales(const pybind11::array& array, const char* name) {
    if (dtype_of(array, name) == DType::kFloat8E4M3FN) return;
    throw pybind11::type_error(
        concat(name, " has dtype ", text(array.dtype()), ", must be float8_e4m3fn"));
}

/// Contiguous elements, their codes and scales, with matching sizes and in C order.
struct BlockArgs {
    BlockArgs(const pybind11::array& elements, const pybind11::array& codes,
              const pybind11::array& scales, bool writes_codes)
        : wide(dtype_of(elements, "elements")), blocks(scales.size()) {
        check_fits(is_wide(wide), elements, "elements");
        check_codes(codes, "codes");
        check_block_scales(scales, "scales");
        const pybind11::array& first = writes_codes ? codes : elements;
        check_no_common_memory(first, writes_codes ? "the values" : "out",
                               writes_codes ? elements : codes, writes_codes ? "x" : "the values");
        check_no_common_memory(scales, "the scales", elements, writes_codes ? "x" : "out");
        if (writes_codes) check_no_common_memory(scales, "the scales", codes, "the values");
        this->elements = memory_of<const std::byte*>(elements, "elements", blocks * kNvfp4Block);
        this->codes = memory_of<const std::byte*>(codes, "codes", blocks * kNvfp4BlockBytes);
        this->scales = memory_of<const std::byte*>(scales, "scales", blocks);
        for (const pybind11::array* written : {&elements, &codes, &scales}) {
            const bool is_written = (written == &elements) != writes_codes;
            if (is_written && !written->writeable()) {
                throw pybind11::value_error("an output is read-only; pass a writable array");
            }
        }
    }
    [[nodiscard]] static std::byte* target(const std::byte* memory) noexcept {
        return const_cast<std::byte*>(memory);
    }

    DType wide;
    std::int64_t blocks;
    const std::byte* elements;
    const std::byte* codes;
    const std::byte* scales;
};

/// The part of a call for a pool, without Python objects.
struct Nvfp4Move {
    std::int64_t pages = 0;
    PageShape shape{};
    Nvfp4Tensor<std::byte> pool;
    TokenRows<std::byte> tokens{};
    DType wide = DType::kFloat32;

    [[nodiscard]] TokenRows<const std::byte> source() const {
        return {tokens.data, tokens.token_stride, tokens.head_stride};
    }
    [[nodiscard]] Nvfp4Tensor<const std::byte> readable_pool() const {
        const auto seen = [](const HeadBytes<std::byte>& bytes) -> HeadBytes<const std::byte> {
            return {bytes.data, bytes.page_stride, bytes.token_stride, bytes.head_stride};
        };
        return {pool.dim, seen(pool.codes), seen(pool.scales), pool.global};
    }
};

[[nodiscard]] inline HeadBytes<std::byte> head_bytes(const pybind11::array& array) {
    return {data_of(array), array.strides(0), array.strides(1), array.strides(2)};
}

/// ValueError unless the scales have an entry for each block of the pool.
inline void check_blocks(const pybind11::array& pool, const pybind11::array& scales) {
    const bool is_whole = pool.shape(3) > 0 && pool.shape(3) % kNvfp4BlockBytes == 0 &&
                          std::equal(pool.shape(), pool.shape() + 3, scales.shape()) &&
                          scales.shape(3) == pool.shape(3) / kNvfp4BlockBytes;
    if (is_whole) return;
    throw pybind11::value_error(concat("scales has shape ", shape_text(scales),
                                       " for a pool of shape ", shape_text(pool),
                                       ", must have a scale for each 8 bytes of the last axis"));
}

/// Returns K or V in nvfp4 as attention reads it.
[[nodiscard]] inline PagedTensor<const std::byte> coded_tensor(const pybind11::array& pool,
                                                               const pybind11::array& scales) {
    check_rank(pool, "pool", "(pages, page_size, heads, dim / 2)", 4);
    check_rank(scales, "scales", "(pages, page_size, heads, dim / 16)", 4);
    check_codes(pool, "the pool");
    check_block_scales(scales, "scales");
    check_dense_rows(pool, "the pool");
    check_dense_rows(scales, "scales");
    check_blocks(pool, scales);
    if (pool.shape(1) < 1 || pool.shape(2) < 1) {
        throw pybind11::value_error(
            concat("the pool has shape ", shape_text(pool), ", pages must have tokens and heads"));
    }
    return {
        data_of(pool),
        DType::kInt8,
        2 * pool.shape(3),
        pool.strides(0),
        pool.strides(1),
        pool.strides(2),
        {data_of(scales), scales.strides(0), scales.strides(1), scales.strides(2), kNvfp4Block}};
}

/// A pool uint8 [pages, page_size, heads, dim / 2], its scales [pages, page_size, heads, dim / 16],
/// its global scale (in the place of factors), and `total` tokens [tokens, heads, dim] of a wide
/// dtype. With `may_be_more` there may be more tokens.
[[nodiscard]] inline Nvfp4Move nvfp4_move(const TokenTransfer& transfer, std::int64_t total,
                                          bool writes_pool, bool may_be_more,
                                          const GlobalScale& global) {
    const auto& [name, pool, given_scales, unused, tokens] = transfer;
    const auto scales = given_scales.cast<pybind11::array>();
    check_rank(pool, "pool", "(pages, page_size, heads, dim / 2)", 4);
    check_rank(scales, "scales", "(pages, page_size, heads, dim / 16)", 4);
    check_rank(tokens, name.c_str(), "(tokens, heads, dim)", 3);
    check_codes(pool, "the pool");
    check_block_scales(scales, "scales");
    check_wide(tokens, name.c_str());
    if (pool.shape(1) < 1) throw pybind11::value_error("the pool's pages have no tokens");
    check_blocks(pool, scales);
    const std::int64_t dim = 2 * pool.shape(3);
    const bool has_tokens = may_be_more ? tokens.shape(0) >= total : tokens.shape(0) == total;
    if (!has_tokens || tokens.shape(1) != pool.shape(2) || tokens.shape(2) != dim) {
        throw pybind11::value_error(concat(name, " has shape ", shape_text(tokens), ", must be (",
                                           may_be_more ? "at least " : "", total, ", ",
                                           pool.shape(2), ", ", dim, ")"));
    }
    if (!has_dense_rows(pool) || !has_dense_rows(scales) || !has_dense_rows(tokens)) {
        throw pybind11::value_error(
            concat("the last axis of the pool, its scales and ", name, " must be contiguous"));
    }
    const auto check_written = [](const pybind11::array& array, const std::string& what) {
        if (!array.writeable()) {
            throw pybind11::value_error(concat(what, " is read-only; pass a writable array"));
        }
        check_own_memory(array, what);
    };
    if (writes_pool) {
        check_written(pool, "the pool");
        check_written(scales, "the array of scales");
    } else {
        check_written(tokens, name);
    }
    for (const pybind11::array* other : {&pool, &scales}) {
        if (!is_overlapping(*other, tokens)) continue;
        throw pybind11::value_error(concat(name, " and the pool overlap in memory; pass a copy"));
    }
    Nvfp4Move move;
    move.pages = pool.shape(0);
    move.shape = {pool.shape(1), pool.shape(2)};
    move.pool = {dim, head_bytes(pool), head_bytes(scales), global};
    move.tokens = {data_of(tokens), tokens.strides(0), tokens.strides(1)};
    move.wide = dtype_of(tokens, name.c_str());
    return move;
}

/// Returns true if K and V agree in pages, page size, heads and dtype of tokens.
[[nodiscard]] inline bool are_alike(const Nvfp4Move& k, const Nvfp4Move& v) noexcept {
    return k.pages == v.pages && k.shape.page_size == v.shape.page_size &&
           k.shape.heads == v.shape.heads && k.wide == v.wide;
}

/// ValueError or TypeError if K and V cannot have common slots.
inline void check_alike(const Nvfp4Move& k, const Nvfp4Move& v) {
    if (are_alike(k, v)) return;
    if (k.wide != v.wide) throw pybind11::type_error("k and v differ in dtype; convert k or v");
    throw pybind11::value_error("the pools of K and V differ in pages, page size or heads");
}

}  // namespace kvcore::python
