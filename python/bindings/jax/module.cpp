// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

#include "handlers.hpp"
#include "module_of_main.hpp"

namespace py = pybind11;

namespace {

py::capsule handler(XLA_FFI_Handler* function) {
    return py::capsule(reinterpret_cast<void*>(function));
}

}  // namespace

KVCORE_MODULE(_jax, module) {
    module.doc() = "The handlers of kvcore.functional for functions that jax compiles for the CPU.";
    py::dict handlers;
    handlers["kvcore_append"] = handler(&kvcore::jax::append_handler);
    handlers["kvcore_gather"] = handler(&kvcore::jax::gather_handler);
    handlers["kvcore_attention"] = handler(&kvcore::jax::attention_handler);
    module.attr("handlers") = handlers;
}
