// SPDX-License-Identifier: Apache-2.0
// Checks wide values, their codes and scales.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <type_traits>
#include <vector>

#include "array_args.hpp"
#include "kvcore/quantize.hpp"
#include "pool_args.hpp"

namespace kvcore::python {

/// Returns contiguous memory of `n` elements. The facade passes contiguous arrays; this check keeps
/// memory safe.
template <class Pointer>
[[nodiscard]] Pointer memory_of(const pybind11::array& array, const char* name, std::int64_t n) {
    if (!std::is_const_v<std::remove_pointer_t<Pointer>> && !array.writeable()) {
        throw pybind11::value_error(concat(name, " is read-only; pass a writable array"));
    }
    const bool is_dense = (array.flags() & pybind11::array::c_style) != 0;
    if (!is_dense || array.size() != n) {
        throw pybind11::value_error(
            concat(name, " holds ", array.size(), " elements, must be ", n, " in C order"));
    }
    return static_cast<Pointer>(const_cast<void*>(array.data()));
}

inline void check_fits(bool is_right, const pybind11::array& array, const char* name) {
    if (is_right) return;
    throw pybind11::type_error(
        concat(name, " has dtype ", text(array.dtype()), ", which does not fit"));
}

/// The shape (groups, group), with a scale for each group; or (rows, heads, dim), with a scale for
/// each head.
class QuantizedShape {
   public:
    explicit QuantizedShape(const std::vector<std::int64_t>& sizes) : sizes_(sizes) {
        if (sizes.size() == 2 || sizes.size() == 3) return;
        throw pybind11::value_error(concat("a shape of ", sizes.size(), " axes, must have 2 or 3"));
    }

    [[nodiscard]] std::int64_t elements() const {
        return std::accumulate(sizes_.begin(), sizes_.end(), std::int64_t{1}, std::multiplies<>());
    }
    [[nodiscard]] std::int64_t scales() const { return sizes_[sizes_.size() - 2]; }

    /// call(Groups) or call(HeadRows)
    template <class Call>
    void visit(const Call& call) const {
        if (sizes_.size() == 2) {
            call(Groups{sizes_[0], sizes_[1]});
        } else {
            call(HeadRows{sizes_[0], sizes_[1], sizes_[2]});
        }
    }

   private:
    const std::vector<std::int64_t>& sizes_;
};

/// The arrays that `quantize` reads and writes.
struct QuantizeArgs {
    QuantizeArgs(const std::vector<std::int64_t>& sizes, const pybind11::array& source,
                 const pybind11::array& codes, const pybind11::array& scales)
        : shape(sizes), wide(dtype_of(source, "source")), narrow(dtype_of(codes, "codes")) {
        check_fits(is_wide(wide), source, "source");
        check_fits(!is_wide(narrow), codes, "codes");
        check_fits(dtype_of(scales, "scales") == DType::kFloat32, scales, "scales");
        from = memory_of<const std::byte*>(source, "source", shape.elements());
        to = memory_of<std::byte*>(codes, "codes", shape.elements());
        factors = memory_of<float*>(scales, "scales", shape.scales());
        check_no_common_memory(codes, "the values", source, "x");
        check_no_common_memory(scales, "the scales", source, "x");
        check_no_common_memory(scales, "the scales", codes, "the values");
    }

    QuantizedShape shape;
    DType wide;
    DType narrow;
    const std::byte* from;
    std::byte* to;
    float* factors;
};

/// The arrays that `dequantize` reads and writes.
struct DequantizeArgs {
    DequantizeArgs(const std::vector<std::int64_t>& sizes, const pybind11::array& codes,
                   const pybind11::array& scales, const pybind11::array& destination)
        : shape(sizes),
          narrow(dtype_of(codes, "codes")),
          wide(dtype_of(destination, "destination")) {
        check_fits(!is_wide(narrow), codes, "codes");
        check_fits(is_wide(wide), destination, "destination");
        check_fits(dtype_of(scales, "scales") == DType::kFloat32, scales, "scales");
        from = memory_of<const std::byte*>(codes, "codes", shape.elements());
        factors = memory_of<const float*>(scales, "scales", shape.scales());
        to = memory_of<std::byte*>(destination, "destination", shape.elements());
        check_no_common_memory(destination, "out", codes, "the values");
        check_no_common_memory(destination, "out", scales, "the scales");
    }

    QuantizedShape shape;
    DType narrow;
    DType wide;
    const std::byte* from;
    const float* factors;
    std::byte* to;
};

}  // namespace kvcore::python
