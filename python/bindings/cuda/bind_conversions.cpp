// SPDX-License-Identifier: Apache-2.0
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "cuda/bindings.hpp"
#include "cuda/device_args.hpp"
#include "kvcore/cuda.hpp"
#include "quantize_args.hpp"
#include "state_args.hpp"

namespace py = pybind11;
namespace cuda = kvcore::cuda;
using kvcore::python::check_status;
using kvcore::python::DequantizeArgs;
using kvcore::python::MergeArgs;
using kvcore::python::QuantizeArgs;
using kvcore::python::seen;
using kvcore::python::stream_of;

namespace {

void quantize(const std::vector<std::int64_t>& sizes, const py::object& source,
              const py::object& codes, const py::object& scales, int device,
              std::uintptr_t stream) {
    const QuantizeArgs args(sizes, seen(source), seen(codes), seen(scales));
    cuda::Status status = cuda::kSuccess;
    {
        const py::gil_scoped_release unlocked;
        args.shape.visit([&](auto elements) {
            status = cuda::quantize(elements, args.wide, args.from, args.narrow, args.to,
                                    args.factors, stream_of(device, stream));
        });
    }
    check_status(status, "quantising ", args.shape.elements(), " elements on cuda:", device);
}

void dequantize(const std::vector<std::int64_t>& sizes, const py::object& codes,
                const py::object& scales, const py::object& destination, int device,
                std::uintptr_t stream) {
    const DequantizeArgs args(sizes, seen(codes), seen(scales), seen(destination));
    cuda::Status status = cuda::kSuccess;
    {
        const py::gil_scoped_release unlocked;
        args.shape.visit([&](auto elements) {
            status = cuda::dequantize(elements, args.narrow, args.from, args.factors, args.wide,
                                      args.to, stream_of(device, stream));
        });
    }
    check_status(status, "dequantising ", args.shape.elements(), " codes on cuda:", device);
}

void merge_states(const py::object& o_a, const py::object& lse_a, const py::object& o_b,
                  const py::object& lse_b, const py::object& out, const py::object& out_lse,
                  int device, std::uintptr_t stream) {
    const MergeArgs args(seen(o_a), seen(lse_a), seen(o_b), seen(lse_b), seen(out), seen(out_lse));
    cuda::Status status = cuda::kSuccess;
    {
        const py::gil_scoped_release unlocked;
        status = cuda::merge_states(args.n, args.dim, args.dtype, args.a, args.b, args.values,
                                    args.lse, stream_of(device, stream));
    }
    check_status(status, "merging ", args.n, " states on cuda:", device);
}

}  // namespace

void bind_cuda_conversions(py::module_& module) {
    module.def("quantize", &quantize, py::arg("shape"), py::arg("source"), py::arg("codes"),
               py::arg("scales"), py::arg("device"), py::arg("stream"));
    module.def("dequantize", &dequantize, py::arg("shape"), py::arg("codes"), py::arg("scales"),
               py::arg("destination"), py::arg("device"), py::arg("stream"));
    module.def("merge_states", &merge_states, py::arg("o_a"), py::arg("lse_a"), py::arg("o_b"),
               py::arg("lse_b"), py::arg("out"), py::arg("out_lse"), py::arg("device"),
               py::arg("stream"));
}
