// SPDX-License-Identifier: Apache-2.0
#include "kvcore/kernels.hpp"

#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "array_args.hpp"
#include "bindings.hpp"

namespace py = pybind11;
using kvcore::DType;
using kvcore::Groups;
using kvcore::HeadRows;
using kvcore::python::concat;
using kvcore::python::threads_of;

namespace {

DType dtype_of(std::string_view name) {
    constexpr std::pair<const char*, DType> kNames[] = {
        {"float32", DType::kFloat32},        {"float16", DType::kFloat16},
        {"bfloat16", DType::kBFloat16},      {"float8_e4m3fn", DType::kFloat8E4M3FN},
        {"float8_e5m2", DType::kFloat8E5M2}, {"int8", DType::kInt8},
    };
    for (const auto& [known, dtype] : kNames) {
        if (name == known) return dtype;
    }
    throw py::value_error(concat("dtype is ", std::string(name), ", which no cache is stored in"));
}

/// Contiguous memory of `n` elements: the facade makes it so, memory safety rests on it.
template <class Pointer>
Pointer memory_of(const py::array& array, const char* name, std::int64_t n, std::int64_t size) {
    if (!std::is_const_v<std::remove_pointer_t<Pointer>> && !array.writeable()) {
        throw py::value_error(concat(name, " is read-only"));
    }
    const bool is_dense = (array.flags() & py::array::c_style) != 0;
    if (!is_dense || array.nbytes() != n * size) {
        throw py::value_error(
            concat(name, " holds ", array.nbytes(), " bytes, must be ", n * size, " in C order"));
    }
    return static_cast<Pointer>(const_cast<void*>(array.data()));
}

template <class Shape>
void quantize(Shape shape, std::int64_t n, std::int64_t num_scales, const py::array& source,
              DType wide, const py::array& codes, DType narrow, const py::array& scales,
              int threads) {
    const auto* from = memory_of<const std::byte*>(source, "source", n, kvcore::item_size(wide));
    auto* to = memory_of<std::byte*>(codes, "codes", n, 1);
    auto* factors = memory_of<float*>(scales, "scales", num_scales, sizeof(float));
    const py::gil_scoped_release unlocked;
    kvcore::quantize(shape, wide, from, narrow, to, factors, threads);
}

template <class Shape>
void dequantize(Shape shape, std::int64_t n, std::int64_t num_scales, const py::array& codes,
                DType narrow, const py::array& scales, const py::array& destination, DType wide,
                int threads) {
    const auto* from = memory_of<const std::byte*>(codes, "codes", n, 1);
    const auto* factors = memory_of<const float*>(scales, "scales", num_scales, sizeof(float));
    auto* to = memory_of<std::byte*>(destination, "destination", n, kvcore::item_size(wide));
    const py::gil_scoped_release unlocked;
    kvcore::dequantize(shape, narrow, from, factors, wide, to, threads);
}

}  // namespace

void bind_kernels(py::module_& module) {
    module.def("kernel_isa", &kvcore::kernel_isa);
    module.def(
        "quantize_groups",
        [](std::int64_t groups, std::int64_t group, const py::array& source, std::string_view wide,
           const py::array& codes, std::string_view narrow, const py::array& scales, int threads) {
            quantize(Groups{groups, group}, groups * group, groups, source, dtype_of(wide), codes,
                     dtype_of(narrow), scales, threads_of(threads));
        },
        py::arg("groups"), py::arg("group"), py::arg("source"), py::arg("wide"), py::arg("codes"),
        py::arg("narrow"), py::arg("scales"), py::arg("threads"));
    module.def(
        "quantize_heads",
        [](std::int64_t rows, std::int64_t heads, std::int64_t dim, const py::array& source,
           std::string_view wide, const py::array& codes, std::string_view narrow,
           const py::array& scales, int threads) {
            quantize(HeadRows{rows, heads, dim}, rows * heads * dim, heads, source, dtype_of(wide),
                     codes, dtype_of(narrow), scales, threads_of(threads));
        },
        py::arg("rows"), py::arg("heads"), py::arg("dim"), py::arg("source"), py::arg("wide"),
        py::arg("codes"), py::arg("narrow"), py::arg("scales"), py::arg("threads"));
    module.def(
        "quantize_by",
        [](std::int64_t rows, std::int64_t heads, std::int64_t dim, const py::array& source,
           std::string_view wide, const py::array& codes, std::string_view narrow,
           const py::array& scales, int threads) {
            const std::int64_t n = rows * heads * dim;
            const DType from = dtype_of(wide);
            const DType to = dtype_of(narrow);
            const int workers = threads_of(threads);
            const auto* in =
                memory_of<const std::byte*>(source, "source", n, kvcore::item_size(from));
            auto* out = memory_of<std::byte*>(codes, "codes", n, 1);
            const auto* factors = memory_of<const float*>(scales, "scales", heads, sizeof(float));
            const py::gil_scoped_release unlocked;
            kvcore::quantize_by({rows, heads, dim}, from, in, to, out, factors, workers);
        },
        py::arg("rows"), py::arg("heads"), py::arg("dim"), py::arg("source"), py::arg("wide"),
        py::arg("codes"), py::arg("narrow"), py::arg("scales"), py::arg("threads"));
    module.def(
        "dequantize_groups",
        [](std::int64_t groups, std::int64_t group, const py::array& codes, std::string_view narrow,
           const py::array& scales, const py::array& destination, std::string_view wide,
           int threads) {
            dequantize(Groups{groups, group}, groups * group, groups, codes, dtype_of(narrow),
                       scales, destination, dtype_of(wide), threads_of(threads));
        },
        py::arg("groups"), py::arg("group"), py::arg("codes"), py::arg("narrow"), py::arg("scales"),
        py::arg("destination"), py::arg("wide"), py::arg("threads"));
    module.def(
        "dequantize_heads",
        [](std::int64_t rows, std::int64_t heads, std::int64_t dim, const py::array& codes,
           std::string_view narrow, const py::array& scales, const py::array& destination,
           std::string_view wide, int threads) {
            dequantize(HeadRows{rows, heads, dim}, rows * heads * dim, heads, codes,
                       dtype_of(narrow), scales, destination, dtype_of(wide), threads_of(threads));
        },
        py::arg("rows"), py::arg("heads"), py::arg("dim"), py::arg("codes"), py::arg("narrow"),
        py::arg("scales"), py::arg("destination"), py::arg("wide"), py::arg("threads"));
}
