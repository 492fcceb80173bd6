// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Python.h>

namespace kvcore::python {

/// Returns 0 in the main interpreter. In another interpreter sets ImportError and returns -1:
/// extension modules take the GIL by its thread state after a call without it, and would wait
/// without end.
inline int require_main_interpreter() {
    if (PyInterpreterState_Get() == PyInterpreterState_Main()) return 0;
    PyErr_SetString(
        PyExc_ImportError,
        "kvcore cannot be imported in a sub-interpreter; use the main interpreter, with "
        "threads or with processes");
    return -1;
}

}  // namespace kvcore::python
