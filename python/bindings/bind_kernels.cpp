// SPDX-License-Identifier: Apache-2.0
#include "kvcore/quantize.hpp"

#include <pybind11/stl.h>

#include <vector>

#include "array_args.hpp"
#include "bindings.hpp"
#include "quantize_args.hpp"

namespace py = pybind11;
using kvcore::python::DequantizeArgs;
using kvcore::python::QuantizeArgs;
using kvcore::python::threads_of;

namespace {

void quantize(const std::vector<std::int64_t>& sizes, const py::array& source,
              const py::array& codes, const py::array& scales, const py::object& threads) {
    const QuantizeArgs args(sizes, source, codes, scales);
    const int workers = threads_of(threads);
    const py::gil_scoped_release unlocked;
    args.shape.visit([&](auto elements) {
        kvcore::quantize(elements, args.wide, args.from, args.narrow, args.to, args.factors,
                         workers);
    });
}

void dequantize(const std::vector<std::int64_t>& sizes, const py::array& codes,
                const py::array& scales, const py::array& destination, const py::object& threads) {
    const DequantizeArgs args(sizes, codes, scales, destination);
    const int workers = threads_of(threads);
    const py::gil_scoped_release unlocked;
    args.shape.visit([&](auto elements) {
        kvcore::dequantize(elements, args.narrow, args.from, args.factors, args.wide, args.to,
                           workers);
    });
}

}  // namespace

void bind_kernels(py::module_& module) {
    module.def("kernel_isa", &kvcore::kernel_isa);
    module.def(
        "dtypes",
        [] {
            py::list table;
            for (std::size_t i = 0; i < kvcore::kDTypeNames.size(); ++i) {
                const auto dtype = static_cast<kvcore::DType>(i);
                table.append(py::make_tuple(kvcore::kDTypeNames[i], kvcore::item_size(dtype),
                                            kvcore::largest(dtype)));
            }
            return table;
        },
        "Return the name, the bytes and the largest finite value of each dtype of a cache.");
    module.def("quantize", &quantize, py::arg("shape"), py::arg("source"), py::arg("codes"),
               py::arg("scales"), py::arg("threads"));
    module.def("dequantize", &dequantize, py::arg("shape"), py::arg("codes"), py::arg("scales"),
               py::arg("destination"), py::arg("threads"));
}
