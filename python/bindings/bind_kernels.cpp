// SPDX-License-Identifier: Apache-2.0
#include "kvcore/kernels.hpp"

#include <pybind11/stl.h>

#include <functional>
#include <numeric>
#include <type_traits>
#include <vector>

#include "array_args.hpp"
#include "bindings.hpp"
#include "pool_args.hpp"

namespace py = pybind11;
using kvcore::DType;
using kvcore::python::concat;
using kvcore::python::dtype_of;
using kvcore::python::threads_of;

namespace {

/// Contiguous memory of `n` elements: the facade makes it so, memory safety rests on it.
template <class Pointer>
Pointer memory_of(const py::array& array, const char* name, std::int64_t n) {
    if (!std::is_const_v<std::remove_pointer_t<Pointer>> && !array.writeable()) {
        throw py::value_error(concat(name, " is read-only"));
    }
    const bool is_dense = (array.flags() & py::array::c_style) != 0;
    if (!is_dense || array.size() != n) {
        throw py::value_error(
            concat(name, " holds ", array.size(), " elements, must be ", n, " in C order"));
    }
    return static_cast<Pointer>(const_cast<void*>(array.data()));
}

void check(bool is_right, const py::array& array, const char* name) {
    if (is_right) return;
    throw py::type_error(
        concat(name, " has dtype ", kvcore::python::text(array.dtype()), ", which does not fit"));
}

/// (groups, group), with a scale for each group; or (rows, heads, dim), with one for each head.
class Shape {
   public:
    explicit Shape(const std::vector<std::int64_t>& sizes) : sizes_(sizes) {
        if (sizes.size() == 2 || sizes.size() == 3) return;
        throw py::value_error(concat("a shape of ", sizes.size(), " axes, must have 2 or 3"));
    }

    [[nodiscard]] std::int64_t elements() const {
        return std::accumulate(sizes_.begin(), sizes_.end(), std::int64_t{1}, std::multiplies<>());
    }
    [[nodiscard]] std::int64_t scales() const { return sizes_[sizes_.size() - 2]; }

    /// call(Groups) or call(HeadRows)
    template <class Call>
    void visit(const Call& call) const {
        if (sizes_.size() == 2) {
            call(kvcore::Groups{sizes_[0], sizes_[1]});
        } else {
            call(kvcore::HeadRows{sizes_[0], sizes_[1], sizes_[2]});
        }
    }

   private:
    const std::vector<std::int64_t>& sizes_;
};

void quantize(const std::vector<std::int64_t>& sizes, const py::array& source,
              const py::array& codes, const py::array& scales, int threads) {
    const Shape shape(sizes);
    const DType wide = dtype_of(source, "source");
    const DType narrow = dtype_of(codes, "codes");
    check(is_wide(wide), source, "source");
    check(!is_wide(narrow), codes, "codes");
    check(dtype_of(scales, "scales") == DType::kFloat32, scales, "scales");
    const auto* from = memory_of<const std::byte*>(source, "source", shape.elements());
    auto* to = memory_of<std::byte*>(codes, "codes", shape.elements());
    auto* factors = memory_of<float*>(scales, "scales", shape.scales());
    const int workers = threads_of(threads);
    const py::gil_scoped_release unlocked;
    shape.visit([&](auto elements) {
        kvcore::quantize(elements, wide, from, narrow, to, factors, workers);
    });
}

void dequantize(const std::vector<std::int64_t>& sizes, const py::array& codes,
                const py::array& scales, const py::array& destination, int threads) {
    const Shape shape(sizes);
    const DType narrow = dtype_of(codes, "codes");
    const DType wide = dtype_of(destination, "destination");
    check(!is_wide(narrow), codes, "codes");
    check(is_wide(wide), destination, "destination");
    check(dtype_of(scales, "scales") == DType::kFloat32, scales, "scales");
    const auto* from = memory_of<const std::byte*>(codes, "codes", shape.elements());
    const auto* factors = memory_of<const float*>(scales, "scales", shape.scales());
    auto* to = memory_of<std::byte*>(destination, "destination", shape.elements());
    const int workers = threads_of(threads);
    const py::gil_scoped_release unlocked;
    shape.visit([&](auto elements) {
        kvcore::dequantize(elements, narrow, from, factors, wide, to, workers);
    });
}

}  // namespace

void bind_kernels(py::module_& module) {
    module.def("kernel_isa", &kvcore::kernel_isa);
    module.def("quantize", &quantize, py::arg("shape"), py::arg("source"), py::arg("codes"),
               py::arg("scales"), py::arg("threads"));
    module.def("dequantize", &dequantize, py::arg("shape"), py::arg("codes"), py::arg("scales"),
               py::arg("destination"), py::arg("threads"));
}
