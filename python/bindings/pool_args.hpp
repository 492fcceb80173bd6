// SPDX-License-Identifier: Apache-2.0
// Makes checked views of a layer's pools and of this step's tokens from arrays.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "array_args.hpp"
#include "kvcore/attention.hpp"
#include "kvcore/layout.hpp"
#include "kvcore/quantize.hpp"

namespace kvcore::python {

/// Returns the DType of an array; TypeError for a dtype that no cache has.
[[nodiscard]] inline DType dtype_of(const pybind11::array& array, const char* name) {
    const pybind11::dtype dtype = array.dtype();
    const bool is_native = dtype.byteorder() == '=' || dtype.byteorder() == '|';
    if (is_native && dtype.num() == pybind11::detail::npy_api::NPY_FLOAT_) return DType::kFloat32;
    // Reads the name of the scalar type: numpy takes a microsecond to build the name of the dtype.
    const pybind11::object scalar = dtype.attr("type");
    std::string_view found = reinterpret_cast<PyTypeObject*>(scalar.ptr())->tp_name;
    found.remove_prefix(found.rfind('.') + 1);
    for (std::size_t i = 0; i < kDTypeNames.size(); ++i) {
        if (is_native && found == kDTypeNames[i]) return static_cast<DType>(i);
    }
    std::string all(kDTypeNames.front());
    for (std::size_t i = 1; i < kDTypeNames.size(); ++i) {
        all.append(i + 1 < kDTypeNames.size() ? ", " : " or ").append(kDTypeNames[i]);
    }
    throw pybind11::type_error(concat(name, " has dtype ", text(dtype), ", must be ", all));
}

/// TypeError for a narrow dtype, or a dtype that no cache has.
inline void check_wide(const pybind11::array& array, const char* name) {
    if (is_wide(dtype_of(array, name))) return;
    throw pybind11::type_error(
        concat(name, " has dtype ", text(array.dtype()), ", must be float32, float16 or bfloat16"));
}

inline void check_dense_rows(const pybind11::array& array, const char* name) {
    if (has_dense_rows(array)) return;
    throw pybind11::value_error(
        concat(name, " is strided along its last axis; make the elements of a head contiguous"));
}

/// K, V or the rope part of keys: an array [pages, page_size, heads, dim]. Only the last axis must
/// be contiguous.
[[nodiscard]] inline PagedTensor<const std::byte> paged_tensor(const pybind11::array& array,
                                                               const char* name) {
    check_rank(array, name, "(pages, page_size, heads, dim)", 4);
    check_dense_rows(array, name);
    for (pybind11::ssize_t axis = 1; axis < 4; ++axis) {
        if (array.shape(axis) > 0) continue;
        throw pybind11::value_error(concat(name, " has shape ", shape_text(array),
                                           ", must have tokens, heads and elements"));
    }
    PagedTensor<const std::byte> tensor;
    tensor.data = static_cast<const std::byte*>(array.data());
    tensor.dtype = dtype_of(array, name);
    tensor.dim = array.shape(3);
    tensor.page_stride = array.strides(0);
    tensor.token_stride = array.strides(1);
    tensor.head_stride = array.strides(2);
    return tensor;
}

/// The scales of a pool, float32 [pages, page_size, heads, groups]; strides may be 0.
[[nodiscard]] inline ScaleView<const std::byte> scale_view(const pybind11::array& scales,
                                                           const char* name,
                                                           const pybind11::array& pool) {
    namespace py = pybind11;
    check_rank(scales, name, "(pages, page_size, heads, groups)", 4);
    check_dense_rows(scales, name);
    check_aligned(scales, name);
    if (dtype_of(scales, name) != DType::kFloat32) {
        throw py::type_error(
            concat(name, " has dtype ", text(scales.dtype()), ", must be float32"));
    }
    const bool fits = scales.shape(0) == pool.shape(0) && scales.shape(1) == pool.shape(1) &&
                      scales.shape(2) == pool.shape(2) && scales.shape(3) > 0 &&
                      pool.shape(3) % scales.shape(3) == 0;
    if (!fits) {
        throw py::value_error(concat(name, " has shape ", shape_text(scales),
                                     " for a pool of shape ", shape_text(pool),
                                     ", must agree in all axes but the last, and divide that"));
    }
    if (is_wide(dtype_of(pool, "the pool"))) {
        throw py::type_error(concat(name, " is given for a pool of dtype ", text(pool.dtype()),
                                    ", which is stored without scales"));
    }
    ScaleView<const std::byte> view;
    view.data = static_cast<const std::byte*>(scales.data());
    view.page_stride = scales.strides(0);
    view.token_stride = scales.strides(1);
    view.head_stride = scales.strides(2);
    view.group = pool.shape(3) / scales.shape(3);
    return view;
}

/// A vector per token and head of this step: an array [tokens, heads, dim].
template <class Byte>
[[nodiscard]] HeadVectors<Byte> head_vectors(const pybind11::array& array, const char* name) {
    check_rank(array, name, "(tokens, heads, head_dim)", 3);
    check_dense_rows(array, name);
    check_wide(array, name);
    return {static_cast<Byte*>(const_cast<void*>(array.data())), dtype_of(array, name),
            array.shape(1), array.strides(0), array.strides(1)};
}

}  // namespace kvcore::python
