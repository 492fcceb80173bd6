// SPDX-License-Identifier: Apache-2.0
#include "emulation/emulation.hpp"

#include <cstdint>

#include "cuda/bindings.hpp"
#include "cuda/device_args.hpp"

namespace py = pybind11;
namespace emulation = kvcore::cuda::emulation;

void bind_cuda_emulation(py::module_& module) {
    py::module_ part =
        module.def_submodule("emulation", "The driver that tests use instead of a GPU's driver.");
    part.def("reset", &emulation::reset, py::arg("devices"),
             py::arg("bytes_per_device") = std::int64_t{1} << 30,
             "Reset to a number of devices, 0 for a machine without a driver.");
    part.def(
        "set_order",
        [](bool is_any, std::uint64_t seed) {
            emulation::set_order(is_any ? emulation::Order::kAny : emulation::Order::kAtOnce, seed);
        },
        py::kw_only(), py::arg("is_any"), py::arg("seed") = 0,
        "Let tasks wait in their streams and run in an order drawn from a seed, or not.",
        py::call_guard<py::gil_scoped_release>());
    const auto stream = [](int device, std::uintptr_t handle) {
        return kvcore::python::stream_of(device, handle);
    };
    part.def(
        "begin_capture",
        [stream](int device, std::uintptr_t handle) {
            emulation::begin_capture(stream(device, handle));
        },
        py::arg("device"), py::arg("stream"), "Capture the further work of a stream into a graph.");
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
        py::arg("graph"), py::arg("device"), py::arg("stream"), "Enqueue a graph on a stream.");
    part.def("faults", &emulation::faults,
             "Count pinned memory that was freed while its copies waited.");
    part.def("suspend", &emulation::suspend,
             "Make driver calls of all other threads wait until resume.",
             py::call_guard<py::gil_scoped_release>());
    part.def("resume", &emulation::resume, "Let driver calls continue.");
    part.def("num_waiting", &emulation::num_waiting, "Count enqueued tasks that have not run.");
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
