// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

#include <exception>

#include "cuda/bindings.hpp"
#include "kvcore/python_errors.hpp"
#include "module_of_main.hpp"

namespace py = pybind11;

KVCORE_MODULE(_cuda, module) {
    module.doc() = "The kernels of kvcore on NVIDIA GPUs, or their emulation on the CPU.";
    py::options options;
    options.disable_function_signatures();  // the stub has signatures with exact types
    py::register_local_exception_translator([](std::exception_ptr error) {
        try {
            if (error) std::rethrow_exception(error);
        } catch (const py::builtin_exception&) {
            throw;  // pybind11's own
        } catch (const py::error_already_set&) {
            throw;
        } catch (...) {
            kvcore::python::translate_exception();
        }
    });
#if defined(KVCORE_CUDA_EMULATED)
    module.attr("is_emulated") = true;
    bind_cuda_emulation(module);
#if defined(KVCORE_CUDA_SIMULATED)
    bind_cuda_simulation(module);
#endif
#else
    module.attr("is_emulated") = false;
#endif
    bind_cuda_memory(module);
    bind_cuda_streams(module);
    bind_cuda_arrays(module);
    bind_cuda_pages(module);
    bind_cuda_batch(module);
    bind_cuda_rows(module);
    bind_cuda_slots(module);
    bind_cuda_transfer(module);
    bind_cuda_conversions(module);
    bind_cuda_nvfp4(module);
}
