// SPDX-License-Identifier: Apache-2.0
// Functions of simulated GPUs for Python tests, in addition to the functions of the emulation.
#include <pybind11/pybind11.h>

#include <cstring>
#include <string>

#include "cuda/bindings.hpp"
#include "machine.hpp"

namespace py = pybind11;
using gpu_sim::Lock;
using gpu_sim::machine;

namespace {

void run_ptx(const std::string& ptx, const std::string& name, std::uint32_t blocks,
             std::uint32_t threads, const std::string& parameters, std::uint64_t seed) {
    const gpu_sim::Module module = gpu_sim::parse(ptx);
    const auto kernel = module.find(name);
    if (kernel == module.end()) throw py::key_error(name);
    std::vector<std::byte> bytes(static_cast<std::size_t>(kernel->second.parameter_bytes));
    if (parameters.size() != bytes.size()) {
        throw py::value_error("parameters have " + std::to_string(parameters.size()) +
                              " bytes, the kernel takes " + std::to_string(bytes.size()));
    }
    std::memcpy(bytes.data(), parameters.data(), bytes.size());
    const Lock lock(machine().mutex);
    gpu_sim::run({kernel->second, {blocks}, {threads}, std::move(bytes), 0, 0, seed},
                 machine().memory, machine().counts()[name]);
}

py::dict counts() {
    const Lock lock(machine().mutex);
    py::dict all;
    for (const auto& [name, of] : machine().counts()) {
        py::dict one;
        one["launches"] = of.launches;
        one["instructions"] = of.instructions;
        one["accesses"] = of.accesses;
        one["loaded"] = of.loaded;
        one["stored"] = of.stored;
        all[py::str(name)] = one;
    }
    machine().counts().clear();
    return all;
}

}  // namespace

void bind_cuda_simulation(py::module_& module) {
    // The arrays of the Python tests are on devices: a kernel that touches other memory is wrong.
    machine().memory.share_host(false);
    py::module_ part = module.def_submodule("simulation", "GPUs that run nvcc's PTX on the CPU.");
    part.def("run_ptx", &run_ptx, py::arg("ptx"), py::arg("kernel"), py::arg("blocks"),
             py::arg("threads"), py::arg("parameters"), py::arg("seed") = 0,
             "Run a kernel of a text of PTX on device 0, now. RuntimeError: what it did wrong.");
    part.def(
        "keep_order",
        [] {
            const Lock lock(machine().mutex);
            machine().keep_order(true);
        },
        "Run blocks, warps and lanes of kernels in their own order, until the next reset.");
    part.def("counts", &counts,
             "What each kernel did since the last call: launches, instructions of warps, accesses "
             "to global memory by warps, bytes that lanes loaded and stored.");
}
