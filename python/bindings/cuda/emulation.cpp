// SPDX-License-Identifier: Apache-2.0
#include "emulation/emulation.hpp"

#include <cstdint>

#include "cuda/bindings.hpp"
#include "cuda/device_args.hpp"

namespace py = pybind11;
namespace emulation = kvcore::cuda::emulation;

void bind_cuda_emulation(py::module_& module) {
    py::module_ part =
        module.def_submodule("emulation", "The driver that tests have in place of a GPU's.");
    part.def("reset", &emulation::reset, py::arg("devices"),
             py::arg("bytes_per_device") = std::int64_t{1} << 30,
             "Begin anew with so many devices, 0 for a machine without a driver.");
    part.def(
        "set_order",
        [](bool is_any, std::uint64_t seed) {
            emulation::set_order(is_any ? emulation::Order::kAny : emulation::Order::kAtOnce, seed);
        },
        py::kw_only(), py::arg("is_any"), py::arg("seed") = 0,
        "Whether tasks wait in their streams and run in an order drawn from a seed.",
        py::call_guard<py::gil_scoped_release>());
    const auto stream = [](int device, std::uintptr_t handle) {
        return kvcore::python::stream_of(device, handle);
    };
    part.def(
        "begin_capture",
        [stream](int device, std::uintptr_t handle) {
            emulation::begin_capture(stream(device, handle));
        },
        py::arg("device"), py::arg("stream"), "Put what a stream is given from now into a graph.");
    part.def(
        "end_capture",
        [stream](int device, std::uintptr_t handle) {
            return emulation::end_capture(stream(device, handle));
        },
        py::arg("device"), py::arg("stream"), "End a capture and return the graph's number.");
    part.def(
        "replay",
        [stream](std::int64_t graph, int device, std::uintptr_t handle) {
            kvcore::python::check_status(emulation::replay(graph, stream(device, handle)),
                                         "replaying graph ", graph);
        },
        py::arg("graph"), py::arg("device"), py::arg("stream"), "Give a graph to a stream.");
    part.def("faults", &emulation::faults,
             "Count pinned memory that was given back while copies of it waited.");
    part.def("suspend", &emulation::suspend,
             "Make every other thread's call of the driver wait until resume.",
             py::call_guard<py::gil_scoped_release>());
    part.def("resume", &emulation::resume, "Let the driver answer again.");
    part.def("num_waiting", &emulation::num_waiting, "Tasks that were given and have not run.");
    part.def(
        "alive",
        [] {
            const emulation::Alive found = emulation::alive();
            py::dict counts;
            counts["allocations"] = found.allocations;
            counts["streams"] = found.streams;
            counts["events"] = found.events;
            counts["pinned"] = found.pinned;
            return counts;
        },
        "Count allocations, streams, events and pinned ranges.");
}
