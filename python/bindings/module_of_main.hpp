// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include "interpreter.hpp"

/// PYBIND11_MODULE that refuses a sub-interpreter before pybind11 runs: in a sub-interpreter its
/// first call would wait without end.
#define KVCORE_MODULE(name, variable)                                       \
    extern "C" PYBIND11_EXPORT PyObject* PyInit_##name##_of_main();         \
    extern "C" PYBIND11_EXPORT PyObject* PyInit_##name();                   \
    extern "C" PYBIND11_EXPORT PyObject* PyInit_##name() {                  \
        if (kvcore::python::require_main_interpreter() < 0) return nullptr; \
        return PyInit_##name##_of_main();                                   \
    }                                                                       \
    PYBIND11_MODULE(name##_of_main, variable)
