// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

#include <exception>

#include "bindings.hpp"
#include "kvcore/python_errors.hpp"
#include "module_of_main.hpp"

namespace py = pybind11;

#if defined(__clang__)
#define KVCORE_COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define KVCORE_COMPILER "gcc " __VERSION__
#else
#define KVCORE_COMPILER "unknown"
#endif

KVCORE_MODULE(_core, module) {
    module.doc() = "The C++ objects of kvcore: construction, counters and the building blocks.";
    py::register_exception_translator([](std::exception_ptr error) {
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
    py::dict build;
    build["compiler"] = KVCORE_COMPILER;
    build["cplusplus"] = static_cast<long>(__cplusplus);
    module.attr("build_info") = build;
    module.attr("__version__") = KVCORE_VERSION;
    bind_attention(module);
    bind_block_pool(module);
    bind_cache_config(module);
    bind_disk_store(module);
    bind_host_store(module);
    bind_page_copier(module);
    bind_kernels(module);
    bind_nvfp4(module);
    bind_page_bytes(module);
    bind_paged_batch(module);
    bind_paged_rows(module);
    bind_slots(module);
    bind_transfer(module);
}
