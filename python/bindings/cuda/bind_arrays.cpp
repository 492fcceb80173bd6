// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>

#include "cuda/bindings.hpp"
#include "cuda/device_args.hpp"
#include "kvcore/cuda.hpp"

namespace py = pybind11;
namespace cuda = kvcore::cuda;
using kvcore::python::check_status;
using kvcore::python::concat;
using kvcore::python::seen;
using kvcore::python::stream_of;
using kvcore::python::without_gil;

namespace {

void copy_strided(const py::object& given_source, const py::object& given_destination, int device,
                  std::uintptr_t stream) {
    const py::array source = seen(given_source);
    py::array destination = seen(given_destination);
    const py::ssize_t axes = source.ndim();
    if (axes > cuda::StridedCopy::kMostAxes) {
        throw py::value_error(concat("an array has ", axes, " axes, must have ",
                                     cuda::StridedCopy::kMostAxes,
                                     " at most; pass one in C order"));
    }
    cuda::StridedCopy copy;
    copy.item_bytes = source.itemsize();
    copy.num_axes = static_cast<int>(axes);
    bool is_alike = destination.ndim() == axes && destination.itemsize() == source.itemsize();
    for (int axis = 0; axis < axes && is_alike; ++axis) {
        is_alike = destination.shape(axis) == source.shape(axis);
        copy.axes[axis] = {source.shape(axis), source.strides(axis), destination.strides(axis)};
    }
    if (!is_alike) throw py::value_error("source and destination differ in shape or item size");
    const auto* from = static_cast<const std::byte*>(source.data());
    auto* to = static_cast<std::byte*>(destination.mutable_data());
    const cuda::Status status =
        without_gil([&] { return cuda::copy_strided(copy, from, to, stream_of(device, stream)); });
    check_status(status, "copying an array on cuda:", device);
}

void row_offsets(const py::object& given_lengths, const py::object& given_out, int device,
                 std::uintptr_t stream) {
    const py::array lengths = seen(given_lengths);
    py::array out = seen(given_out);
    const py::ssize_t batch = lengths.size();
    using Numbers = py::array_t<std::uint32_t, py::array::c_style>;
    const auto are_numbers = [](const py::array& array, py::ssize_t n) {
        return py::isinstance<Numbers>(array) && array.ndim() == 1 && array.size() == n;
    };
    if (!are_numbers(lengths, batch) || !are_numbers(out, batch + 1)) {
        throw py::value_error("lengths and out must be uint32 (n,) and (n + 1,), contiguous");
    }
    const auto* from = static_cast<const std::uint32_t*>(lengths.data());
    auto* to = static_cast<std::uint32_t*>(out.mutable_data());
    const cuda::Status status =
        without_gil([&] { return cuda::row_offsets(from, to, batch, stream_of(device, stream)); });
    check_status(status, "adding up ", batch, " lengths on cuda:", device);
}

}  // namespace

void bind_cuda_arrays(py::module_& module) {
    module.def("copy_strided", &copy_strided, py::arg("source"), py::arg("destination"),
               py::arg("device"), py::arg("stream"));
    module.def("row_offsets", &row_offsets, py::arg("lengths"), py::arg("out"), py::arg("device"),
               py::arg("stream"));
}
