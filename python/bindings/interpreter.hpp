// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Python.h>

namespace kvcore::python {

/// 0 in the main interpreter; -1 with ImportError set in another one, where taking the GIL by its
/// thread state, as extension modules do after a call without it, waits without end.
inline int require_main_interpreter() {
    if (PyInterpreterState_Get() == PyInterpreterState_Main()) return 0;
    PyErr_SetString(
        PyExc_ImportError,
        "kvcore cannot be imported in a sub-interpreter; use the main interpreter, with "
        "threads or with processes");
    return -1;
}

}  // namespace kvcore::python
